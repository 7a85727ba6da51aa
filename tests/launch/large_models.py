"""Meshes for large models: `python -m tests.launch.large_models`.

Searches a mesh on 512 chips of v5p for each model of the table in
launch/README.md, compiles the best, and prints the table. It needs libtpu and
some ten minutes; what was compiled before is kept.
`tests/planning/compiled.json` holds what the compiler has said of them, and a
test compares the arithmetic.
"""

import json
import subprocess
import sys

MODELS = 'Qwen3-8B', 'Qwen3-30B-A3B', 'Llama-3.1-70B'
PROGRAMS = 'train_step', 'prepare', 'prefill', 'decode', 'regroup'


def searched(model: str) -> dict:
  """The first mesh that fits, by the command that a person would type."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'grpo_jax',
      'plan',
      f'--config=configs/plan.py:{model}',
      '--topology=v5p:8x8x8',
      '--search=1',
      '--json',
    ],
    stdout=subprocess.PIPE,
    check=True,
  )
  return json.loads(done.stdout)[0]


def markdown(found: dict[str, dict]) -> str:
  """The table: GiB of a chip by program, and the least time of a rollout."""
  names = ' | '.join(f'`{name}`' for name in PROGRAMS)
  lines = [
    f'| model | mesh | completions of a row | {names} '
    '| collectives of an update | a rollout takes at least |',
    '| --- ' * (len(PROGRAMS) + 5) + '|',
  ]
  for model, one in found.items():
    if not one['fits']:
      raise SystemExit(f'{model} fits nowhere on v5p:8x8x8.')
    programs = one['programs']
    sizes = ' | '.join(f'{programs[n]["total_gib"]:.1f}' for n in PROGRAMS)
    sent = sum(programs['train_step']['collectives_gib'].values())
    mesh = ' x '.join(f'{k} {n}' for k, n in one['mesh'].items() if n > 1)
    flags = dict(flag.split('=') for flag in one['flags'].split())
    per_row = flags['--config.learner.row_completions']
    lines.append(
      f'| {model} | {mesh} | {per_row if int(per_row) else "all"} | {sizes} '
      f'| {sent:.0f} | {one["bound_secs"]:.1f} s |'
    )
  return '\n'.join(lines)


if __name__ == '__main__':
  print(markdown({model: searched(model) for model in MODELS}))
