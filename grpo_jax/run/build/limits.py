"""What a run cannot do although each of its fields may have its value.

These checks need the model, its widths and the devices, so they come after
those of `grpo_jax.config`.
"""

from collections.abc import Sequence
import difflib
import os
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax import models
from grpo_jax.config import Config
from grpo_jax.mesh import sharding
from grpo_jax.monitor import table
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build.specs import TeacherSpec
from grpo_jax.run.build.specs import WeightsSpec
from grpo_jax.run.keep.objects import is_object

GIB = 2**30
_MOMENTS = {'adamw': 2, 'lion': 1, 'muon': 1}  # of a parameter, at least


def check_length(spec: WeightsSpec, prompt: int, completion: int) -> None:
  """Raises a ValueError if a row is longer than the model was made for.

  Args:
    spec: Says how long a row may be.
    prompt: Its tokens.
    completion: The most tokens of a completion.
  """
  most = spec.most_tokens
  if most is not None and prompt + completion > most:
    raise ValueError(
      f'A prompt of {prompt} tokens and a completion of {completion} have '
      f'{prompt + completion} tokens together, but the model in '
      f'{spec.path} was made for {most} (max_position_embeddings in its '
      'config.json); give shorter ones (data.prompt_buckets, max_tokens), or '
      'config.model.beyond_context=True if this is meant.'
    )


def longest(config: Config) -> tuple[int, int]:
  """The most tokens of a prompt, and of a completion or an episode.

  Args:
    config: With widths.
  """
  completion = config.sampler.max_tokens
  if config.environment.name:
    completion = max(config.data.completion_buckets)
  if config.warm_up.steps:  # the width is that of the longest demonstration
    completion = max(completion, *config.data.completion_buckets)
  return max(config.data.prompt_buckets), completion


def check_work(config: Config, mesh: jax.sharding.Mesh) -> None:
  """Raises a ValueError if a run cannot be divided into updates on a mesh.

  Here and not where a config is read, so that workdirs of such runs are read.
  """
  learner, rise = config.learner, config.optim.warmup_steps
  updates = config.steps * learner.batches * learner.epochs
  shards = sharding.row_shards(mesh)
  # 0 passes: `LayoutSpec` chooses.
  warm_up_rows = config.warm_up.micro_rows if config.warm_up.steps else 0
  rows = {
    'learner.micro_rows': learner.micro_rows,
    'warm_up.micro_rows': warm_up_rows,
  }
  for is_wrong, text in (
    (
      0 < updates < rise,
      f'config.optim.warmup_steps={rise}, but {config.steps} rollouts have '
      f'{updates} optimizer steps, so that the learning rate never comes to '
      'its peak; give fewer, or more config.steps.',
    ),
    # JAX would refuse them too, but only once the first batch is laid out.
    *(
      (
        number % shards,
        f'{name}={number} does not split over {shards} data shards; give a '
        'multiple, or change config.mesh.',
      )
      for name, number in rows.items()
    ),
    # A program on several devices is started on one after the other. Two
    # threads start theirs in orders that may differ from device to device, and
    # then each program waits for devices that the other one has.
    (
      config.sampler.ahead
      and mesh.size > 1
      and not (config.generator.devices or config.generator.listen),
      f'sampler.ahead={config.sampler.ahead} on {mesh.size} devices, where '
      'sampling and learning at the same time may wait for each other forever; '
      'give sampler.ahead=0, a mesh of one device, or config.generator.devices '
      'for devices that sample alone.',
    ),
  ):
    if is_wrong:
      raise ValueError(text)


def check_model(
  config: Config, shape: models.ModelConfig, mesh: jax.sharding.Mesh
) -> None:
  """Raises a ValueError if the config asks of the model what it has not.

  Args:
    config: Asks for adapters, experts and their balance.
    shape: The shape of the model.
    mesh: Its axes.
  """
  rank, split = config.lora.rank, mesh.shape['expert']
  balance, has_none = config.learner.expert_balance, shape.experts is None
  for is_wrong, text in (
    (
      rank > shape.width,
      f'config.lora.rank={rank}, but the model has the width {shape.width}, so '
      'that adapters would have more parameters than what they change; give a '
      'smaller rank, or 0 to train the weights themselves.',
    ),
    (
      has_none and split > 1,
      f'config.mesh.expert={split}, but the model has no experts that could be '
      'split; give 1, and more of mesh.data or mesh.fsdp.',
    ),
    (
      has_none and balance,
      f'config.learner.expert_balance={balance}, but the model has no experts; '
      'give 0.',
    ),
  ):
    if is_wrong:
      raise ValueError(text)


# Metrics that begin with a word of which all of them are known; another name
# with such a word is a mistake.
_NAMES = frozenset(
  'accuracy accuracy_drawn groups_failed groups_short groups_solved '
  'groups_surplus heldout_accuracy heldout_failed heldout_graded '
  'heldout_judged heldout_too_long judged judged_per_sec length_tokens '
  'length_tokens_max length_tokens_right length_tokens_wrong loss reward '
  'rewards_failed '
  'truncated uniform_groups'.split()
)
# First words of the others, of which each method and option has its own, beside
# those that are shown.
_WORDS = frozenset(
  'advantage age capped clip conflict detached elapsed ends expert gated '
  'importance kept log needed off outside penalized positive pruned router '
  'sampler saturated stale teacher tokens value'.split()
)


def check_best_metric(config: Config, labels: Sequence[str]) -> None:
  """Raises a ValueError if no rollout can have `checkpoint.best_metric`.

  A method of the user's may have metrics of any name.

  Args:
    config: Names the metric and the method.
    labels: What its rewards are called.
  """
  name = config.checkpoint.best_metric
  if near := _nearest_metric(config, name, labels):
    raise ValueError(
      f'config.checkpoint.best_metric={name!r} is no metric of this run, so '
      'that no checkpoint would be the best; give one of metrics.jsonl, such '
      f"as {near!r}, or '' to keep none."
    )


def check_early_stop(config: Config, labels: Sequence[str]) -> None:
  """Raises a ValueError if no rollout can have `early_stop.metric`.

  Args:
    config: Names the metric and the method.
    labels: What its rewards are called.
  """
  name = config.early_stop.metric
  if near := _nearest_metric(config, name, labels):
    raise ValueError(
      f'config.early_stop.metric={name!r} is no metric of this run, so that it '
      'would never end early; give one of metrics.jsonl, such as '
      f"{near!r}, or '' to do all rollouts."
    )
  if not name.startswith('heldout_'):
    return
  lacks = '' if config.data.heldout else "data.heldout=''"
  if not config.evaluation.every_steps:
    lacks = 'evaluation.every_steps=0'
  if lacks:
    raise ValueError(
      f'config.early_stop.metric={name!r} is measured in evaluations, and with '
      f'{lacks} there are none between the first rollout and the last; give '
      "another metric, or '' to do all rollouts."
    )


def _nearest_metric(config: Config, name: str, labels: Sequence[str]) -> str:
  """The metric that is most like a name; '' if a run may have the name itself.

  Args:
    config: Names the method; one of the user's may have any metrics.
    name: Of a metric, or ''.
    labels: What the rewards are called.
  """
  method = config.learner.method
  if not name or ':' in method or is_object(method):
    return ''
  ends = '', *config_lib.REWARD_METRICS
  of_rewards = [f'reward/{label}{end}' for label in labels for end in ends]
  shown = {metric for rows in table.GROUPS.values() for metric in rows}
  known = [*of_rewards, *sorted(_NAMES | shown)]
  word = lambda metric: metric.partition('_')[0]
  open_words = _WORDS | set(map(word, shown)) - set(map(word, _NAMES))
  if name in known or word(name) in open_words and '/' not in name:
    return ''
  return difflib.get_close_matches(name, known, 1, 0)[0]


def check_memory(
  config: Config,
  model: models.Transformer,
  mesh: jax.sharding.Mesh,
  teacher: TeacherSpec | None = None,
  draws: bool = True,
) -> None:
  """Raises a ValueError if a run needs more memory than there is in any case.

  What is counted is the least: parameters, gradient and moments once for all
  devices, and a single row of the longest prompt and completion, or the rows of
  an environment, which all are there from the first turn on. A run that
  passes may still run out of memory; `grpo-jax plan` tells how much one takes.

  Args:
    config: With widths.
    model: Its shapes.
    mesh: The devices.
    teacher: Of the run, if it has one.
    draws: Whether these devices draw completions.
  """
  found, shape = _memory(mesh), model.config
  if found is None:
    return
  state = _state_bytes(config, model, mesh)
  row, number, width, rows = 0, 0, 0, 0
  if draws:
    row = _row_bytes(config, shape)
    number, width, rows = _pool_bytes(config, shape)
  # There is no gradient while turns are drawn.
  kept = _state_bytes(config, model, mesh, gradient=0)
  taught, least = _teacher_bytes(teacher, mesh), max(state + row, kept + rows)
  if least + taught <= found:
    return
  prompt, completion = longest(config)
  what = (
    f'the parameters of the model (width={shape.width}, '
    f'layers={shape.num_layers}, vocabulary={shape.vocab_size}) with gradient '
    f'and moments take {state / GIB:,.1f} GiB at least'
  )
  advice = 'give a smaller model, adapters (config.lora.rank), or more devices'
  if row > state:
    what = (
      f'a single row of {prompt} tokens (data.prompt_buckets) and {completion} '
      f'of a completion takes {row / GIB:,.1f} GiB at least'
    )
    advice = 'give smaller widths'
  if state + row <= found:
    what = (
      f'{number:,} rows for turns of episodes (sampler.max_rows) of {width:,} '
      f'tokens each take {rows / GIB:,.1f} GiB at least'
    )
    advice = (
      'lower sampler.max_rows, beyond which episodes wait for rows, or '
      'environment.context_tokens'
    )
  if least <= found:
    what = (
      f'the teacher takes {taught / GIB:,.1f} GiB, and all else '
      f'{least / GIB:,.1f} GiB at least'
    )
    advice = (
      "give teacher.dtype='bfloat16', teacher.offload=True where devices reach "
      'the memory of their host, a smaller teacher, or more devices'
    )
  raise ValueError(
    f'This run needs more memory than the {found / GIB:,.1f} GiB of its '
    f'devices: {what}; {advice}.'
  )


def _state_bytes(
  config: Config,
  model: models.Transformer,
  mesh: jax.sharding.Mesh,
  gradient: int = 1,
) -> int:
  """The least bytes of parameters, gradient and moments, on all devices."""
  params = build_model.abstract(model, mesh, config.lora.base_dtype)
  # float32 each: a parameter, its gradient, and its moments.
  moments = 0 if config.optim.offload else _MOMENTS.get(config.optim.name, 0)
  each = 4 * (1 + gradient + moments)
  trained = sum(each * x.size for x in jax.tree.leaves(params.trained))
  beside = jax.tree.leaves(params.frozen)
  return trained + sum(x.size * x.dtype.itemsize for x in beside)


def _teacher_bytes(teacher: TeacherSpec | None, mesh: jax.sharding.Mesh) -> int:
  """The bytes of the teacher's parameters, on all devices, without copies."""
  if teacher is None or teacher.is_base or teacher.offload:
    return 0
  dtype = teacher.weights.base_dtype
  params = build_model.abstract_frozen(teacher.model, mesh, dtype)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


def _row_bytes(config: Config, shape: models.ModelConfig) -> int:
  """The least bytes of one row while it is sampled: keys, values, states."""
  whole = [kind for kind in shape.kinds if kind.window_tokens is None]
  # Ids at least, where all layers have windows.
  place = max(4, _place_bytes(shape, whole))
  return sum(longest(config)) * place + _states_bytes(shape)


def _states_bytes(shape: models.ModelConfig) -> int:
  """The bytes of the states of one row."""
  return sum(models.state_bytes(shape, kind) for kind in shape.kinds)


def _place_bytes(
  shape: models.ModelConfig, kinds: Sequence[models.LayerKind]
) -> int:
  """The bytes of keys and values of a token, in layers of these kinds."""
  size = 2 if shape.compute_dtype == 'bfloat16' else 4
  sizes = [
    shape.of(kind)
    for kind in kinds
    if kind.mixer == 'attention' and not kind.shares_kv
  ]
  return sum(2 * one.num_kv_heads * one.head_dim * size for one in sizes)


def _pool_bytes(
  config: Config, shape: models.ModelConfig
) -> tuple[int, int, int]:
  """The rows in which turns of episodes are drawn.

  Returns:
    How many there are, tokens of each, and their least bytes; zeros if
    completions are drawn without an environment.
  """
  sampler = config.sampler
  if not config.environment.name or config.environment.max_turns == 1:
    return 0, 0, 0
  rows = min(sampler.prompts * sampler.group, sampler.max_rows)
  width = build_environment.context_tokens(config)
  # Layers with windows have no shorter caches there.
  row = width * _place_bytes(shape, shape.kinds) + _states_bytes(shape)
  return rows, width, rows * row


def _memory(mesh: jax.sharding.Mesh) -> float | None:
  """Bytes of all devices of a mesh; None if JAX does not tell them."""
  if sharding.platform(mesh) == 'cpu':
    try:
      host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    except (AttributeError, OSError, ValueError):  # not on Linux
      return None
    return host * len({device.process_index for device in mesh.devices.flat})
  here = [
    d for d in mesh.devices.flat if d.process_index == jax.process_index()
  ]
  limits = [(d.memory_stats() or {}).get('bytes_limit', 0) for d in here]
  if not limits or 0 in limits:
    return None
  return sum(limits) * mesh.size / len(limits)


def facts(run: Any, devices: int) -> dict[str, str]:
  """What a person should know of a run that is not refused for it.

  Args:
    run: A `build.Run`.
    devices: How many there are.

  Returns:
    Texts by name.
  """
  found = {}
  learn, draw = run.mesh.size, run.sampling_mesh.size
  shared = run.sampling_mesh.devices.flat[0] in run.mesh.devices
  if not shared:
    found['apart'] = f'{learn} devices learn, and {draw} others sample'
  if (used := learn if shared else learn + draw) < devices:
    found['mesh'] = (
      f'{used} of {devices} devices; config.mesh leaves the others without work'
    )
  unused = sum(end - first for first, end in run.model.unused_ids)
  if unused:
    found['never drawn'] = (
      f'{unused:,} of {run.model.vocab_size:,} ids, which no token has'
    )
  return found
