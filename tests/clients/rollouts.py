"""python -m tests.clients.rollouts FOLDER NAME [--steps=3] [--seed=0] ...

Trains SmolLM2 on the calculator's problems, played by the agent of a package
which nobody rewrote, and prints what came of it: a line for each rollout, in
which `twice` is how many tokens are trained twice, and `astray` how many are
trained behind other ids than the engine has read. FOLDER has the virtual
environments that `venvs` makes. NAME is one of them, or 'native', which is the
environment of configs/calculator.py without an agent.
"""

import argparse
import collections
from collections.abc import Iterator
from collections.abc import Sequence
import json
import pathlib
import re
import tempfile
import time
from typing import Any

import numpy as np

import grpo_jax
from grpo_jax import engines
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes.types import Episode
from tests import trees
from tests.clients import venvs

HERE = pathlib.Path(__file__).parent
CONFIG = HERE.parents[1] / 'configs' / 'calculator.py'


def final_answer(
  prompt: str, completion: str, example: dict[str, Any]
) -> float:
  """Whether the answer is right, which smolagents has written as a call."""
  del prompt, completion
  said = [
    one['content']
    for one in example['episode']['messages']
    if one['role'] == 'assistant'
  ]
  answers = re.findall(r'"answer":\s*"?([^"}]*)', said[-1]) if said else ()
  return float([one.strip() for one in answers] == [example['answer']])


def config(options: argparse.Namespace) -> Any:
  """What is trained: configs/calculator.py with an agent."""
  name, folder = options.name, options.folder
  found = grpo_jax.load_config(str(CONFIG))
  found.steps, found.seed = options.steps, options.seed
  found.sampler.prompts = options.prompts
  found.evaluation.examples = options.heldout
  if name == 'native':
    return found
  python = venvs.python(name, folder)
  if python is None:
    raise SystemExit(f'{folder} has no {name}; make it by venvs.py.')
  found.environment.name = 'agent'
  found.agent.command = f'{python} {HERE / f"agent_{name}.py"}'
  found.environment.episode_secs = 600.0
  if name == 'smolagents':  # its own prompt is long, and so are its histories
    found.environment.max_turns = 3
    found.environment.episode_tokens = 132
    found.environment.context_tokens = 3000
    found.data.prompt_buckets = (1600,)
    found.data.completion_buckets = (512, 3000)
    found.rewards = (
      {'name': 'tests.clients.rollouts:final_answer', 'weight': 1.0},
    )
  return found


class Recorded:
  """What engines were asked and have drawn, and what was made of it."""

  def __init__(self):
    self.asked: dict[int, engines.Request] = {}
    self.drawn: dict[tuple[int, int], engines.Sampled] = {}
    self.lines: list[dict[str, Any]] = []
    self._began = time.monotonic()

  def watch(self) -> None:
    """Looks at all engines and episodes of this process from here on."""
    engine: Any = engines.LocalEngine
    submit, completed, play = engine.submit, engine.completed, play_lib.play

    def submits(made, request):
      number = submit(made, request)
      self.asked[number] = request
      return number

    def completes(made, *args, **kwargs):
      for group in completed(made, *args, **kwargs):
        self.drawn.update({(one.request, one.number): one for one in group})
        yield group

    def plays(*args, **kwargs):
      self.asked.clear()
      self.drawn.clear()
      self._began = time.monotonic()
      prompts, played = play(*args, **kwargs)
      self.lines.append(self._line(prompts, played))
      print(json.dumps(self.lines[-1]), flush=True)
      return prompts, played

    engine.submit, engine.completed, play_lib.play = submits, completes, plays

  def _line(
    self,
    prompts: Sequence[Sequence[int]],
    played: Sequence[Sequence[play_lib.Played]],
  ) -> dict[str, Any]:
    """What there is to tell of a rollout."""
    trained: collections.Counter[Any] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    ends: collections.Counter[str] = collections.Counter()
    branches = 0
    for prompt, group in zip(prompts, played):
      for one in group:
        ends[one.account.ended] += 1
        counts.update(one.account.counts)
        if one.failure:
          print('failed:', one.failure[:300], flush=True)
          continue
        trained.update(turns(prompt, one.episode))
        branches += len(leaves(one.episode)) - 1
    drawn = collections.Counter(
      (
        tuple(map(int, self.asked[number].ids)),
        tuple(map(int, one.ids)),
        one.logp.tobytes(),
      )
      for (number, _), one in self.drawn.items()
    )
    either = {turn[1:]: 0 for turn in trained}
    for turn, number in trained.items():
      either[turn[1:]] += number
    known: collections.Counter[Any] = collections.Counter()
    for turn, number in drawn.items():
      known[turn[1:]] += number
    accounts = [one.account for group in played for one in group]
    return {
      'episodes': len(accounts),
      'calls': drawn.total(),
      'turns': sum(one.turns for one in accounts),
      'branches': branches,
      'drawn': _tokens(drawn),
      'trained': _tokens(trained),
      'twice': sum(
        len(turn[0]) * max(0, number - known[turn])
        for turn, number in either.items()
      ),
      'astray': _tokens(trained - drawn),
      'ends': dict(ends),
      'counts': dict(counts),
      'secs': round(time.monotonic() - self._began, 1),
    }


def _tokens(some: collections.Counter[Any]) -> int:
  return sum(len(turn[1]) * number for turn, number in some.items())


def _previous(episode: Episode) -> np.ndarray:
  if episode.previous is not None:
    return episode.previous
  return np.arange(-1, len(episode.ids) - 1)


def leaves(episode: Episode) -> list[int]:
  """The places of the tokens that nothing follows."""
  return sorted({*range(len(episode.ids))} - {*_previous(episode).tolist()})


def turns(prompt: Sequence[int], episode: Episode) -> Iterator[Any]:
  """Of each turn that is learned: what was read, drawn, and told of it."""
  previous = _previous(episode)
  number = episode.turn
  if number is None:
    number = np.zeros(len(episode.ids), np.int32)
  for turn in np.unique(number[episode.chosen]):
    places = np.flatnonzero(episode.chosen & (number == turn))
    way = trees.path(previous, places[-1])
    assert way[-len(places) :] == places.tolist(), 'a turn lies apart'
    read = episode.ids[way[: -len(places)]].tolist()
    yield (
      (*map(int, prompt), *read),
      tuple(episode.ids[places].tolist()),
      episode.logp[places].tobytes(),
    )


def main() -> None:
  """Trains, and prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder')
  parser.add_argument('name', choices=['native', *venvs.PACKAGES])
  parser.add_argument('--steps', type=int, default=3)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--prompts', type=int, default=4)
  parser.add_argument('--heldout', type=int, default=32)
  options = parser.parse_args()
  recorded = Recorded()
  recorded.watch()
  rewards = []

  def told(step, metrics, rollout):
    del rollout
    rewards.append(
      {x: round(float(y), 3) for x, y in metrics.items() if 'reward' in x}
    )
    print(step, json.dumps(rewards[-1]), flush=True)

  with tempfile.TemporaryDirectory() as workdir:
    found = grpo_jax.train(config(options), workdir, on_rollout=told)
  print({x: y for x, y in found.items() if 'reward' in x or 'eval' in x})


if __name__ == '__main__':
  main()
