"""What to change in a run so that it fits, or is faster."""

from grpo_jax.planning import roofline
from grpo_jax.planning import topologies
from grpo_jax.planning.plan import LEARNING
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import GIB

_IDLE = 0.9  # below this share of data shards with rows, it is worth a word


def of(plan: Plan) -> list[str]:
  """Sentences, the most useful first; none if there is nothing to say."""
  return [*_to_fit(plan), *_to_be_faster(plan)]


def _to_fit(plan: Plan) -> list[str]:
  """What makes the largest program smaller, if it has to be."""
  if plan.fits:
    return []
  counted, largest = plan.counted, plan.largest
  memory = largest.memory
  found = []
  whole = plan.topology.chip.device_memory_gib * GIB
  if not plan.topology.is_tpu and plan.capacity < largest.bytes < 0.95 * whole:
    found.append(
      'Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX takes '
      f"{topologies.gpu_share():.0%} of a GPU's memory now."
    )
  if largest.name in LEARNING:
    activations = memory.get('activations', 0)
    if counted.model.remat in ('none', 'attention'):
      found.append(
        "Set config.model.remat='layer': only the input of each layer is kept "
        'then.'
      )
    elif counted.model.remat == 'layer' and activations > 0.2 * largest.bytes:
      found.append(
        "Set config.model.remat='offload': the inputs of layers then lie in "
        "the host's memory."
      )
    spare = counted.rows.rows // counted.shards
    if activations > 0.2 * largest.bytes and spare > 1:
      found.append(
        f'Set config.learner.micro_rows={counted.shards}: a micro-batch then '
        f'has one row on each data shard instead of {spare}.'
      )
    elif activations > 0.2 * largest.bytes:
      found.append(
        'Set config.learner.row_completions to a divisor of the group: rows '
        'become shorter.'
      )
  state = sum(
    memory.get(name, 0) for name in ('parameters', 'moments', 'reference')
  )
  if state > 0.3 * plan.capacity:
    found.append(
      f'Split parameters and moments further: they take {state / GIB:.1f} GiB '
      f'of each device with fsdp={plan.mesh["fsdp"]}, tensor='
      f'{plan.mesh["tensor"]}.'
    )
  for part, field in (('moments', 'optim'), ('reference', 'reference')):
    if memory.get(part, 0) > 0.1 * plan.capacity:
      found.append(
        f'Set config.{field}.offload=True: the {part} '
        f'({memory[part] / GIB:.1f} GiB) then stay in the memory of the host '
        'and come to the device only where they are read.'
      )
  held = memory.get('sampler weights', 0)
  if held > 0.3 * plan.capacity:
    found.append(
      f'Raise config.sampler.tensor: the weights that decoding reads are split '
      f'over tensor and expert alone, and take {held / GIB:.1f} GiB.'
    )
  if memory.get('cache', 0) > 0.3 * plan.capacity:
    found.append(
      'Lower config.sampler.max_rows: fewer completions are decoded at once, '
      'and the others wait.'
    )
  return found


def _to_be_faster(plan: Plan) -> list[str]:
  """What the slowest program waits for."""
  counted = plan.counted
  found = []
  rows, shards = counted.rows, counted.shards
  needed = counted.prompts // counted.config.learner.batches
  kind = counted.parts.updater.layout.kind
  per_row = 1
  if kind in ('auto', 'shared'):
    per_row = counted.config.learner.row_completions or counted.group
  needed = needed * counted.group // per_row
  share = needed / (rows.micro * rows.rows)
  if share < _IDLE and kind != 'packed':
    found.append(
      f'Only {share:.0%} of the rows of an update hold something: {needed} '
      f'rows lie on {shards} data shards. Use more of config.mesh.tensor, set '
      'config.learner.row_completions, or sample more prompts.'
    )
  secs = plan.secs()
  slowest = max(
    plan.programs, key=lambda one: roofline.bound(secs[one.name])[0]
  )
  least, by = roofline.bound(secs[slowest.name])
  if least < 0.5 * plan.bound_secs:
    return found
  advised = {
    'memory': 'More rows at once cost nearly the same there: raise '
    'config.sampler.prompts or config.mesh.tensor.',
    'ici': 'Give fsdp and tensor smaller sizes and data a larger one, as far '
    'as memory allows.',
    'dcn': 'Let data alone cross slices, and give each update more rows.',
  }
  if by in advised:
    found.append(
      f'{slowest.name} takes {least / plan.bound_secs:.0%} of the bound, and '
      f'is bound by {by}. {advised[by]}'
    )
  return found
