"""What a request of an agent costs: python tests/bench/serving.py.

Episodes are played in one process by an engine without a model, and another
process is the client of all of them: it sends whole chats that grow to 16
messages, and now and then hangs up, sends garbage or the wrong token, or asks
again. Processor time of the first process over its requests is told, which
holds the server, the episodes, the chat template and the tokenizer; and whether
something is left when all is over: episodes, threads, file descriptors.
"""

import argparse
import asyncio
import dataclasses
import http.client
import json
import multiprocessing
import os
import pathlib
import random
import sys
import threading
import time
from typing import Any
from typing import NamedTuple
import urllib.parse

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from tests.bench import tables  # noqa: E402

HEAD = (
  'requests', 'answered', 'refused', 'hung up', 'ms a request', 'seconds',
  'left: episodes', 'threads', 'descriptors',
)  # fmt: skip
TURNS = 8  # of an episode: its last chat has 15 messages, and an answer


class Counts(NamedTuple):
  """What a client has seen."""

  answered: int = 0
  refused: int = 0
  hung_up: int = 0

  @property
  def requests(self) -> int:
    """All of them."""
    return sum(self)


@dataclasses.dataclass
class Result:
  """What was measured."""

  counts: Counts
  cpu_secs: float
  secs: float
  left: tuple[int, int, int]  # episodes, threads, descriptors


def converse(address: str, seed: int, faults: float) -> Counts:
  """Plays one episode as its client; a share of its requests is bad."""
  rng, found = random.Random(seed), Counts()
  parts = urllib.parse.urlsplit(address)
  assert parts.hostname and parts.port
  path = f'{parts.path}/chat/completions'
  client = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)

  def send(body: bytes, where: str = path) -> int:
    client.request('POST', where, body, {'Content-Type': 'application/json'})
    answer = client.getresponse()
    data.append(answer.read())
    return answer.status

  data: list[bytes] = []
  messages: list[Any] = []
  for turn in range(TURNS):
    messages.append({'role': 'user', 'content': f'turn {turn} of {seed}'})
    body = json.dumps({'model': 'policy', 'messages': messages}).encode()
    while rng.random() < faults:
      match rng.randrange(3):
        case 0:
          refused = send(body[: rng.randrange(1, len(body))])
        case 1:
          refused = send(body, '/e/nobody/v1/chat/completions')
        case _:
          client.request(
            'POST', path, body, {'Content-Type': 'application/json'}
          )
          client.close()  # the next request, an equal one, gets its answer
          found = found._replace(hung_up=found.hung_up + 1)
          continue
      assert 400 <= refused < 500, refused
      found = found._replace(refused=found.refused + 1)
    assert send(body) == 200, data[-1]
    messages.append(json.loads(data[-1])['choices'][0]['message'])
    found = found._replace(answered=found.answered + 1)
  client.close()
  return found


def drive(addresses: Any, results: Any, threads: int, faults: float) -> None:
  """The client of all episodes, in a process of its own."""

  def work():
    while (given := addresses.get()) is not None:
      address, seed = given
      results.put((seed, converse(address, seed, faults)))

  some = [threading.Thread(target=work) for _ in range(threads)]
  for one in some:
    one.start()
  for one in some:
    one.join()


def measured(
  rollouts: int = 20, episodes: int = 64, faults: float = 0.2, clients: int = 16
) -> Result:
  """Plays rollouts of so many episodes, and counts."""
  from grpo_jax import engines
  from grpo_jax.environments import sessions
  from grpo_jax.episodes import play as play_lib
  from grpo_jax.serving import agents
  from tests.episodes import play_test
  from tests.fake_engine import FakeEngine

  context = multiprocessing.get_context('spawn')
  addresses, results = context.SimpleQueue(), context.SimpleQueue()
  driver = context.Process(
    target=drive, args=(addresses, results, clients, faults), daemon=True
  )
  driver.start()
  over: dict[int, threading.Event] = {}
  counts = Counts()

  async def agent(example, base_url, api_key):
    """Tells the client where it is served, and waits until it has done."""
    del example, api_key
    seed = len(over)
    over[seed] = threading.Event()
    addresses.put((base_url, seed))
    while not over[seed].is_set():
      await asyncio.sleep(0.01)

  def listen():
    nonlocal counts
    while True:
      seed, one = results.get()
      counts = Counts(*(a + b for a, b in zip(counts, one, strict=True)))
      over[seed].set()

  threading.Thread(target=listen, daemon=True).start()
  tokenizer = play_test.TOKENIZER

  def answer(request, number):
    del number
    return [*tokenizer.encode(str(len(request.ids))), tokenizer.eos_ids[0]]

  limits = play_lib.Limits(999, 12, 9_999, 9_999)
  engine = FakeEngine(answer, engines.Capabilities(queues=True))
  engine.load(None, 0)
  options = sessions.Options(where='here')
  given = {'function': agent}
  with sessions.Player({'': (agents.PLAY, given)}, options) as player:

    def play(rollout: int) -> None:
      engine.requests.clear()
      engine.forgotten.clear()
      _, played = play_lib.play(
        [{'prompt': 'a'}] * (episodes // 4), range(episodes // 4), engine,
        tokenizer, player, play_test.HERMES, play_test.SAMPLING, limits, 4,
        seed=1, rollout=rollout,
      )  # fmt: skip
      failures = {one.failure for group in played for one in group}
      assert failures == {''}, failures

    play(0)
    before, counted = _left(), counts
    cpu, begun = time.process_time(), time.monotonic()
    for rollout in range(1, rollouts + 1):
      play(rollout)
    cpu, secs = time.process_time() - cpu, time.monotonic() - begun
    time.sleep(1.0)  # connections close
    left = tuple(b - a for a, b in zip(before, _left(), strict=True))
  for _ in range(clients):
    addresses.put(None)
  driver.join()
  new = Counts(*(b - a for a, b in zip(counted, counts, strict=True)))
  return Result(new, cpu, secs, left)


def _left() -> tuple[int, int, int]:
  """How many episodes are served, threads run and files are open."""
  from grpo_jax.serving import agents

  served = len(agents._started()._services)
  return served, threading.active_count(), len(os.listdir('/proc/self/fd'))


def table(results: list[Result]) -> str:
  """A line for each."""
  lines = [HEAD, ('---',) * len(HEAD)]
  for one in results:
    counts = one.counts
    lines.append(
      (
        f'{counts.requests:,}', f'{counts.answered:,}', f'{counts.refused:,}',
        f'{counts.hung_up:,}', f'{1e3 * one.cpu_secs / counts.requests:.2f}',
        f'{one.secs:.1f}', *map(str, one.left),
      )
    )  # fmt: skip
  return tables.markdown(lines)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--rollouts', type=int, default=20)
  parser.add_argument('--faults', type=float, default=0.2)
  parser.add_argument('--clients', type=int, default=16)
  args = parser.parse_args()
  print(table([measured(args.rollouts, 64, args.faults, args.clients)]))


if __name__ == '__main__':
  main()
