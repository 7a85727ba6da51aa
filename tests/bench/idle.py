"""How busy the rows of an engine are while environments take their time.

python tests/bench/idle.py

The same episodes are played at once, as runs play them, and in rounds, which
wait for the slowest environment. The engine has a quarter as many rows as there
are episodes. Before each turn an environment sleeps for a time that is
exponentially distributed, and drawn by its seed: in the mean as long as a turn
of the model takes where no environment sleeps. A row is busy while a turn is
under way in it; see `episodes.engine_use`. Nothing else should run on the
machine meanwhile.
"""

import argparse
import asyncio
import dataclasses
import os
import pathlib
import random
import sys
import time
from typing import NamedTuple

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from grpo_jax import engines  # noqa: E402
from grpo_jax.environments import formats  # noqa: E402
from grpo_jax.environments import sessions  # noqa: E402
from grpo_jax.episodes import engine_use  # noqa: E402
from grpo_jax.episodes import play  # noqa: E402
from tests import tiny  # noqa: E402
from tests.bench import tables  # noqa: E402
from tests.episodes import made_episodes as made  # noqa: E402

HEAD = (
  'played', 'seconds', 'rows busy', 'a turn, s', 'turns', 'tokens drawn',
  'context read anew',
)  # fmt: skip
GROUP = 4
# Turns have a geometric length: logits are flat, and one of 43 tokens ends one.
SAMPLING = engines.Sampling(
  eos_ids=(made.TOKENIZER.eos_ids[0],), temperature=30.0
)


class Rounds(engines.LocalEngine):
  """Is asked in rounds."""

  @property
  def capabilities(self) -> engines.Capabilities:
    return super().capabilities._replace(queues=False)


ARMS = {'at once': engines.LocalEngine, 'in rounds': Rounds}


@dataclasses.dataclass(frozen=True)
class Case:
  """What is played.

  Attributes:
    episodes: How many, a multiple of `GROUP`.
    rows: Of the engine.
    turns: Of an episode.
    secs: That an environment sleeps before a turn, a mean; None: as long as a
      turn of the model.
    layers: Of the model.
    width: Of the model.
    most: Tokens of a turn.
    context: Tokens of an episode.
  """

  episodes: int = 64
  rows: int = 16
  turns: int = 6
  secs: float | None = None
  layers: int = 4
  width: int = 256
  most: int = 320
  context: int = 1024


class Result(NamedTuple):
  """What was measured of a rollout."""

  secs: float
  busy: float  # share of the time of rows
  turn_secs: float
  turns: int
  tokens: int
  read: float  # share of contexts


def engine_of(kind: type[engines.LocalEngine], case: Case):
  """An engine with a model of random weights."""
  model = tiny.model(
    num_layers=case.layers,
    width=case.width,
    mlp_width=4 * case.width,
    vocab_size=made.TOKENIZER.vocab_size,
  )
  widths = [width for width in (64, 128, 256, 512) if width < case.context]
  engine = kind(
    model, (*widths, case.context), (case.most,), max_rows=case.rows
  )
  engine.load(tiny.params(model), version=0)
  return engine


def played(engine: engines.LocalEngine, case: Case, rollout: int) -> Result:
  """One rollout."""

  async def sleepy(policy, example, seed):
    del example
    rng = random.Random(seed)
    for turn in range(case.turns):
      await asyncio.sleep(rng.expovariate(1) * (case.secs or 0.0))
      await policy.say(f'turn {turn}')
    return 1.0

  records = [{'prompt': 'a'}] * (case.episodes // GROUP)
  limits = play.Limits(
    case.turns, case.most, case.context, case.context, case.context
  )
  use, begun = engine_use.EngineUse(), time.monotonic()
  with sessions.Player({'': sleepy}, sessions.Options(where='here')) as player:
    _, found = play.play(
      records, range(len(records)), engine, made.TOKENIZER, player,
      formats.find('hermes'), SAMPLING, limits, GROUP, seed=1, rollout=rollout,
      alike=False, use=use,
    )  # fmt: skip
  secs = time.monotonic() - begun
  every = [one.episode for group in found for one in group]
  measured = use.metrics()
  return Result(
    secs,
    1 - measured['engine_idle_share'],
    use.busy_secs / use.turns,
    use.turns,
    sum(int(one.chosen.sum()) for one in every),
    measured['engine_read_share'],
  )


def compared(case: Case, repeats: int) -> dict[str, list[Result]]:
  """The results of all rollouts, by arm, played in turns."""
  made_engines = {name: engine_of(kind, case) for name, kind in ARMS.items()}
  found: dict[str, list[Result]] = {name: [] for name in ARMS}
  at_once = dataclasses.replace(case, secs=0.0)
  for engine in made_engines.values():
    played(engine, at_once, 0)  # compiles
  if case.secs is None:
    turn_secs = played(made_engines['at once'], at_once, 0).turn_secs
    case = dataclasses.replace(case, secs=turn_secs)
  print(f'environments sleep for {case.secs:.2f} s in the mean')
  for rollout in range(repeats):
    for name, engine in made_engines.items():
      found[name].append(played(engine, case, rollout))
      print(name, *found[name][-1], file=sys.stderr, flush=True)
  return found


def table(found: dict[str, list[Result]]) -> str:
  """A line for each rollout of each arm."""
  lines = [HEAD, ('---',) * len(HEAD)]
  for name, results in found.items():
    lines += [
      (
        name, f'{one.secs:.1f}', f'{one.busy:.0%}', f'{one.turn_secs:.2f}',
        str(one.turns), f'{one.tokens:,}', f'{one.read:.0%}',
      )
      for one in results
    ]  # fmt: skip
  return tables.markdown(lines)


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--repeats', type=int, default=3)
  for field in dataclasses.fields(Case):
    kind = float if field.default is None else type(field.default)
    parser.add_argument(f'--{field.name}', type=kind, default=field.default)
  given = vars(parser.parse_args())
  repeats = given.pop('repeats')
  print(table(compared(Case(**given), repeats)))


if __name__ == '__main__':
  main()
