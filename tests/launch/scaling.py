"""Weak scaling on paper: `python -m tests.launch.scaling`.

Plans Qwen3-8B on 16 to 6,144 chips of v5p by arithmetic, with a fixed batch for
each chip: `fsdp` stays as it is, and `data` grows. Draws the picture of
launch/README.md, whose table `tests.readmes` writes.
"""

import dataclasses
import pathlib
import runpy

from grpo_jax import config as config_lib
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import GIB

ROOT = pathlib.Path(__file__).parent.parent.parent
PICTURE = ROOT / 'tests' / 'pictures' / 'weak_scaling.svg'
SHAPES = (
  '2x2x4', '4x4x4', '8x8x4', '8x8x8', '8x16x16', '16x16x16', '16x16x24',
)  # fmt: skip
FSDP = 16
PROMPTS = 1  # for each chip


def scaled(shape: str) -> Plan:
  """The plan of one topology."""
  topology = topologies.named(f'v5p:{shape}')
  made = runpy.run_path(str(ROOT / 'configs/plan.py'))['get_config']('Qwen3-8B')
  made.sampler.prompts = PROMPTS * topology.number
  made.sampler.max_rows = made.sampler.prompts * made.sampler.group
  made.mesh.fsdp, made.mesh.data = FSDP, topology.number // FSDP
  config = config_lib.resolve(made)
  return plans.plan(config, topology, estimate=True)


def rows() -> list[dict[str, float]]:
  """For each topology what one chip needs and does in an update."""
  found = []
  for shape in SHAPES:
    made = scaled(shape)
    update = next(one for one in made.programs if one.name == 'train_step')
    secs = made.secs()['train_step']
    work = dataclasses.asdict(update.work)
    found.append(
      {
        'chips': made.topology.number,
        'memory': update.bytes / GIB,
        'sent': work['ici_bytes'] / GIB,
        'compute_secs': secs['compute'],
        'ici_secs': secs['ici'],
      }
    )
  return found


def markdown(found: list[dict[str, float]]) -> str:
  """The table."""
  lines = [
    '| chips | mesh | GiB of a chip | GiB sent | computing | sending |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for one in found:
    data = int(one['chips']) // FSDP
    lines.append(
      f'| {int(one["chips"]):,} | data {data} x fsdp {FSDP} '
      f'| {one["memory"]:.1f} | {one["sent"]:.1f} '
      f'| {one["compute_secs"]:.2f} s | {one["ici_secs"]:.2f} s |'
    )
  return '\n'.join(lines)


def draw(found: list[dict[str, float]]) -> None:
  """Memory, and the time of computing beside that of sending."""
  import matplotlib

  matplotlib.use('svg')
  from matplotlib import pyplot

  matplotlib.rcParams['svg.hashsalt'] = 'weak scaling'
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
  chips = [one['chips'] for one in found]
  left.plot(chips, [one['memory'] for one in found], 'o-', color='tab:blue')
  left.set_title('GiB of a chip')
  for name, color in (('compute_secs', 'tab:green'), ('ici_secs', 'tab:red')):
    label = 'computing' if name == 'compute_secs' else 'sending'
    right.plot(chips, [one[name] for one in found], 'o-', c=color, label=label)
  right.set_title('seconds of an update, at least')
  right.legend(frameon=False)
  for axes in (left, right):
    axes.set_xscale('log', base=2)
    axes.set_xticks(chips, [f'{int(number):,}' for number in chips])
    axes.tick_params('x', rotation=45)
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel('chips')
    axes.spines[['top', 'right']].set_visible(False)
  figure.tight_layout()
  figure.savefig(PICTURE, metadata={'Date': None})


def crossing(found: list[dict[str, float]]) -> float:
  """Tokens of a chip below which sending takes longer than computing.

  Computing shrinks with the tokens of an update, and what is sent does not.
  """
  last = found[-1]
  made = scaled(SHAPES[0]).counted
  tokens = PROMPTS * (made.prompt_tokens + made.group * made.tokens)
  return tokens * last['ici_secs'] / last['compute_secs']


if __name__ == '__main__':
  every = rows()
  print(markdown(every))
  print(
    f'\nSending overtakes computing at {crossing(every):,.0f} tokens a chip.'
  )
  draw(every)
