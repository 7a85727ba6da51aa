"""What single turns would take in rows with contexts of their own.

python tests/bench/pools.py A B C E F

The engine has two kinds of rows. Those of `engines.local.sampler` share their
prompt's cache, write side by side, and are dropped when few go on: they draw
requests that are known whole. Those of `engines.local.contexts` each have the
cache of their whole context, and can wait: they draw calls of episodes. Here
both draw the same requests, in turns in one process.
"""

import os
import pathlib
import random
import statistics
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from grpo_jax import engines  # noqa: E402
from grpo_jax import models  # noqa: E402
from tests import tiny  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import tables  # noqa: E402
from tests.bench import work  # noqa: E402

HEAD = 'case', 'lanes, s', 'contexts, s', 'contexts / lanes'
REPEATS = 5


def requests_of(case: cases.Case) -> list[engines.Request]:
  """The prompts of one rollout, random ids."""
  rng = random.Random(0)
  prompts = [
    [rng.randrange(case.vocab) for _ in range(case.prompt_tokens)]
    for _ in range(case.prompts)
  ]
  sampling = engines.Sampling(eos_ids=case.end_ids)
  return engines.requests(
    prompts, range(case.prompts), case.group, sampling, case.max_tokens,
    seed=0, rollout=0,
  )  # fmt: skip


def measured(case: cases.Case, repeats: int) -> list[tuple[float, float]]:
  """Seconds of each kind, for each repeat; the first, which compiles, is left
  out."""
  model = models.Transformer(work.model_config(case))
  params, asked = tiny.params(model), requests_of(case)
  engine = engines.LocalEngine(
    model, (case.prompt_tokens,), (case.max_tokens,), max_rows=case.rows
  )

  def secs(calls: int) -> float:
    engine.load(params, version=0)  # no caches are left of the other kind
    begun = time.perf_counter()
    engines.generate(engine, [one._replace(calls=calls) for one in asked])
    return time.perf_counter() - begun

  found = [(secs(0), secs(case.rows)) for _ in range(repeats + 1)]
  return found[1:]


def table(found: dict[str, list[tuple[float, float]]]) -> str:
  """A line for each case: medians, and the range of the ratio."""
  lines = [HEAD, ('---',) * len(HEAD)]
  for name, some in found.items():
    lanes, contexts = (statistics.median(x) for x in zip(*some, strict=True))
    ratios = [b / a for a, b in some]
    lines.append(
      (
        name, f'{lanes:.3f}', f'{contexts:.3f}',
        f'{min(ratios):.2f} to {max(ratios):.2f}',
      )
    )  # fmt: skip
  return tables.markdown(lines)


def main() -> None:
  """Prints the table."""
  found = {name: measured(cases.CASES[name], REPEATS) for name in sys.argv[1:]}
  print(table(found))


if __name__ == '__main__':
  main()
