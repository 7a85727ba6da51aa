"""The configuration: every field, its default and its unit.

Config files (configs/*.py) change the ConfigDict that `default` returns; the
command line may override any field of it; `resolve` turns it into these frozen
dataclasses once, and refuses what they do not know. Past that point nothing
reads a ConfigDict and nothing has another default.
"""

import dataclasses
import difflib
import json
import types
import typing
from typing import Any

import ml_collections


@dataclasses.dataclass(frozen=True)
class Model:
  """The transformer; `vocab_size` comes from the tokenizer."""

  num_layers: int = 3  # layers
  width: int = 128  # residual stream
  num_heads: int = 4  # query heads
  num_kv_heads: int = 4  # key-value heads
  head_dim: int = 32  # size of a head
  mlp_width: int = 256  # hidden units of the SwiGLU
  rope_base: float = 10_000.0  # base of the rotary frequencies
  norm_epsilon: float = 1e-6  # in RMSNorm
  qk_norm: bool = False  # RMSNorm on queries and keys
  qkv_bias: bool = False  # biases on query, key, value
  tied_embeddings: bool = False  # output layer = embedding
  compute_dtype: str = 'float32'  # or 'bfloat16'; parameters stay float32
  remat: bool = False  # recompute layers in the backward pass
  unroll: bool = False  # compile layers one by one; for a few layers
  attention: str = 'auto'  # or 'xla', 'splash' (TPU), 'cudnn' (GPU, bfloat16)


@dataclasses.dataclass(frozen=True)
class Data:
  """Prompts: the built-in arithmetic, or JSONL files with named fields."""

  train: str = 'arithmetic'  # or the path of a JSONL file
  heldout: str = 'arithmetic'  # or the path of a JSONL file; '' has none
  prompt_field: str = 'prompt'  # of a JSONL record
  answer_field: str = 'answer'  # of a JSONL record; '' has none
  tokenizer: str = 'arithmetic'  # or the path of a tokenizer.json
  eos_tokens: tuple[str, ...] = ('<eos>',)  # of a tokenizer.json
  pad_token: str = '<pad>'  # of a tokenizer.json
  prompt_buckets: tuple[int, ...] = (8,)  # allowed prompt widths, tokens
  completion_buckets: tuple[int, ...] = (
    5,
  )  # allowed completion widths, tokens


@dataclasses.dataclass(frozen=True)
class Reward:
  """One reward function."""

  name: str = 'exact_match'  # of grpo_jax.rewards, or 'module:function'
  weight: float = 1.0  # in the sum


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How rollouts are sampled."""

  prompts: int = 32  # prompts per rollout
  group: int = 16  # completions per prompt
  max_tokens: int = 5  # of a completion, end token included
  min_tokens: int = 0  # before an end token
  temperature: float = 1.0  # also of the trained policy
  top_k: int = 0  # 0: off
  top_p: float = 1.0  # 1: off
  min_p: float = 0.0  # 0: off
  stop_strings: tuple[str, ...] = ()  # texts that end a completion
  max_rows: int = 4096  # completions decoded at once
  resample_rounds: int = 0  # extra draws, to replace groups of equal rewards
  retire_solved: bool = False  # do not draw a solved prompt again


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW and its schedule."""

  lr: float = 3e-4  # peak learning rate
  warmup_steps: int = 0  # optimizer steps of the linear rise
  decay: str = 'constant'  # 'constant', 'linear' or 'cosine', over the run
  b1: float = 0.9  # first moment
  b2: float = 0.99  # second moment
  epsilon: float = 1e-8  # in the denominator
  weight_decay: float = 0.01  # decoupled, of matrices
  clip_norm: float = 1.0  # global gradient norm; 0: off
  brake: str = 'none'  # 'reset', 'reset_first', 'decay', 'project'; see optim
  reward_scale: float = 0.0  # advantages' scale of a whole step; 0: off
  moments: bool = False  # record what Adam's moments do
  overshoot_every_steps: int = 0  # rollouts between measurements; 0: never


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a rollout becomes updates."""

  method: str = 'grpo'  # of losses.methods, or 'module:function'
  method_kwargs: dict[str, Any] = dataclasses.field(
    default_factory=dict  # arguments of the method
  )
  batches: int = 1  # optimizer batches per rollout
  epochs: int = 1  # passes over a rollout
  layout: str = 'auto'  # 'shared', 'packed', 'padded'; 'auto': the cheaper
  micro_rows: int = 0  # rows of a micro-batch; 0: to suit the device
  row_completions: int = 0  # of a shared row; 0: the whole group
  pack_tokens: int = 0  # least width of a packed row, tokens
  anchor: str = 'learner'  # who says logp_old: 'learner' or 'sampler'
  on_zero_advantage: str = 'skip'  # or 'step'; KL and decay wait in a skip


@dataclasses.dataclass(frozen=True)
class Reference:
  """The policy that a KL term is measured from, if the method has one."""

  refresh_steps: int = 0  # rollouts between refreshes; 0: fixed
  refresh_weight: float = 1.0  # of the policy in the average; 1: a copy


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """Supervised steps on demonstrations, before the first rollout."""

  steps: int = 0  # optimizer steps; 0: none
  examples: int = 256  # demonstrations per step
  micro_rows: int = 0  # rows of a micro-batch; 0: to suit the device
  lr: float = 2e-3  # peak, decays linearly to 0
  demonstrations: str = 'arithmetic'  # or the path of a JSONL file
  carry_free_share: float = 0.7  # of the arithmetic demonstrations


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """First reward of greedy answers to held-out problems, start and end too."""

  every_steps: int = 20  # rollouts between evaluations; 0: ends only
  examples: int = 1000  # held-out problems
  right_reward: float = 1.0  # least first reward of a right answer
  answer: str = ''  # 'module:function', completion -> answer for majority@k


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """What a workdir keeps, so that the same command goes on from there."""

  every_steps: int = 20  # rollouts between saves; the last is always saved
  every_warm_up_steps: int = 100  # optimizer steps between saves of a warm-up
  keep_last: int = 2  # newest checkpoints to keep
  best_metric: str = (
    'heldout_accuracy'  # keep the one with most of it; '': none
  )


@dataclasses.dataclass(frozen=True)
class Log:
  """What a person sees, on the terminal and in the workdir."""

  display: str = 'auto'  # 'rich', 'plain', 'none'; 'auto': rich on a terminal
  samples: int = 3  # completions shown with their rewards
  tensorboard: bool = True  # event files in the workdir
  wandb_project: str = ''  # of Weights & Biases; '': off
  wandb_mode: str = 'online'  # or 'offline'
  completions_every_steps: int = 20  # rollouts between Parquet files; 0: none
  kl_alarm: float = 1.0  # KL to old or reference that warns, nats per token
  entropy_alarm: float = 0.01  # entropy that warns when below, nats per token


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices; see sharding.py."""

  data: int = 1  # copies of the parameters; -1: all that is left
  fsdp: int = 1  # shards of the parameters
  tensor: int = 1  # shards of heads, hidden units, vocabulary


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  seed: int = 0  # of everything random
  steps: int = 60  # rollouts
  shuffle_rewards: bool = (
    False  # over the rollout: a control that must not learn
  )
  model: Model = Model()
  data: Data = Data()
  rewards: tuple[Reward, ...] = (Reward(),)  # summed
  sampler: Sampler = Sampler()
  optim: Optim = Optim()
  learner: Learner = Learner()
  reference: Reference = Reference()
  warm_up: WarmUp = WarmUp()
  evaluation: Evaluation = Evaluation()
  checkpoint: Checkpoint = Checkpoint()
  log: Log = Log()
  mesh: Mesh = Mesh()

  def __post_init__(self):
    for ok, problem in _checks(self):
      if not ok:
        raise ValueError(f'The config has {problem}.')


_LEAST = {
  'steps': 0,
  'model.num_layers': 1,
  'model.width': 1,
  'model.num_heads': 1,
  'model.num_kv_heads': 1,
  'model.head_dim': 1,
  'model.mlp_width': 1,
  'optim.lr': 0,
  'optim.warmup_steps': 0,
  'optim.epsilon': 0,
  'optim.weight_decay': 0,
  'warm_up.lr': 0,
  'sampler.prompts': 1,
  'sampler.group': 1,
  'sampler.max_tokens': 1,
  'sampler.max_rows': 1,
  'learner.batches': 1,
  'learner.epochs': 1,
  'learner.micro_rows': 0,
  'learner.row_completions': 0,
  'warm_up.steps': 0,
  'warm_up.examples': 1,
  'warm_up.micro_rows': 0,
  'sampler.resample_rounds': 0,
  'reference.refresh_steps': 0,
  'checkpoint.every_steps': 1,
  'checkpoint.every_warm_up_steps': 1,
  'checkpoint.keep_last': 1,
  'log.samples': 0,
  'log.completions_every_steps': 0,
  'evaluation.every_steps': 0,
  'evaluation.examples': 1,
  'optim.clip_norm': 0,
  'optim.reward_scale': 0,
  'optim.overshoot_every_steps': 0,
}

_KNOWN = {
  'learner.layout': ('auto', 'shared', 'packed', 'padded'),
  'learner.anchor': ('learner', 'sampler'),
  'learner.on_zero_advantage': ('skip', 'step'),
  'optim.decay': ('constant', 'linear', 'cosine'),
  'optim.brake': ('none', 'reset', 'reset_first', 'decay', 'project'),
  'log.display': ('auto', 'rich', 'plain', 'none'),
  'log.wandb_mode': ('online', 'offline'),
}


def _checks(config: Config):
  """Yields (whether it is right, what is wrong and what to do) of values."""
  sampler, learner, optim = config.sampler, config.learner, config.optim
  values = flat(dataclasses.asdict(config))
  for name, least in _LEAST.items():
    value = values[name]
    yield value >= least, f'{name}={value}; give {least} or more'
  for name, known in _KNOWN.items():
    value = values[name]
    yield value in known, f'{name}={value!r}; give one of {", ".join(known)}'
  for name, value in (('optim.b1', optim.b1), ('optim.b2', optim.b2)):
    yield 0 <= value < 1, f'{name}={value}; give at least 0 and less than 1'
  yield len(config.rewards) > 0, 'no rewards; give at least one'
  yield (
    0 < config.reference.refresh_weight <= 1,
    f'reference.refresh_weight={config.reference.refresh_weight}; give more '
    'than 0 and at most 1, which copies the policy',
  )
  yield (
    sampler.prompts % learner.batches == 0,
    f'learner.batches={learner.batches} with sampler.prompts='
    f'{sampler.prompts}; give a number that divides the prompts',
  )
  yield (
    sampler.temperature > 0,
    f'sampler.temperature={sampler.temperature}, under which there is nothing '
    'to learn from; give more than 0 (evaluations are greedy anyway)',
  )
  for name, value in (
    ('prompt', config.data.prompt_buckets),
    ('completion', config.data.completion_buckets),
  ):
    yield len(value) > 0, f'no data.{name}_buckets; give at least one width'
  yield (
    max(config.data.completion_buckets) >= sampler.max_tokens,
    f'sampler.max_tokens={sampler.max_tokens} above the largest of '
    f'data.completion_buckets={config.data.completion_buckets}; add a bucket',
  )
  filtered = (
    sampler.top_k or sampler.top_p < 1 or sampler.min_p or sampler.min_tokens
  )
  yield (
    learner.anchor == 'learner' or not filtered,
    "learner.anchor='sampler' with top_k, top_p, min_p or min_tokens, which "
    "would put the ratio of every token off 1; give anchor='learner'",
  )
  yield (
    learner.layout in ('shared', 'auto') or not learner.row_completions,
    f'learner.row_completions with layout={learner.layout!r}; it belongs to '
    "layout='shared' or 'auto'",
  )
  yield (
    not learner.row_completions or sampler.group % learner.row_completions == 0,
    f'learner.row_completions={learner.row_completions} with sampler.group='
    f'{sampler.group}; give a divisor',
  )
  yield (
    learner.layout in ('packed', 'auto') or not learner.pack_tokens,
    f'learner.pack_tokens with layout={learner.layout!r}; it belongs to '
    "layout='packed' or 'auto'",
  )
  updates = config.steps * learner.batches * learner.epochs
  yield (
    optim.decay == 'constant' or updates > optim.warmup_steps or not updates,
    f'optim.decay={optim.decay!r} over {updates} optimizer steps, of which '
    f'optim.warmup_steps={optim.warmup_steps} leave none; give fewer',
  )


def default() -> ml_collections.ConfigDict:
  """Every field with its default, for a config file to change.

  Returns:
    A `ConfigDict`, which refuses fields that it does not have.
  """
  return ml_collections.ConfigDict(dataclasses.asdict(Config()))


# What may change when a run goes on: how the work is divided, kept or shown,
# but not what is learned.
FREE = (
  'mesh',
  'checkpoint',
  'log',
  'evaluation.every_steps',
  'evaluation.examples',
  'evaluation.answer',
  'learner.layout',
  'learner.micro_rows',
  'learner.row_completions',
  'learner.pack_tokens',
  'model.attention',
  'model.remat',
  'model.unroll',
  'sampler.max_rows',
)


def is_free(name: str, config: Config) -> bool:
  """Whether the field `name` may change when a run goes on.

  Those of `FREE` may, and `steps` too, unless the learning rate decays over
  them.
  """
  if name == 'steps':
    return config.optim.decay == 'constant'
  return within(name, FREE)


def within(name: str, groups: tuple[str, ...]) -> bool:
  """Whether a field is one of `groups`, or in one of them."""
  return any(name == group or name.startswith(f'{group}.') for group in groups)


def flat(values: Any, name: str = '') -> dict[str, Any]:
  """Nested dicts as one, {'optim.lr': ...}; lists and arguments are values."""
  if not isinstance(values, dict) or name.endswith('_kwargs'):
    return {name: values}
  return {
    path: leaf
    for key, value in values.items()
    for path, leaf in flat(value, f'{name}.{key}' if name else key).items()
  }


def resolve(config: ml_collections.ConfigDict) -> Config:
  """Checks a ConfigDict against the dataclasses above.

  Args:
    config: What a config file's `get_config` returned, with overrides.

  Returns:
    A `Config`.

  Raises:
    ValueError: An unknown field (the nearest known one is named), or a value
      of the wrong type or outside its range.
  """
  return _build(Config, config.to_dict(), 'config')


def _build(kind, values: Any, path: str):
  """A dataclass of type `kind` from nested dicts."""
  if not isinstance(values, dict):
    raise ValueError(f'{path} is {values!r}; it must be a group of fields.')
  hints = typing.get_type_hints(kind)
  for name in values:
    if name not in hints:
      near = difflib.get_close_matches(name, hints, 1)
      advice = (
        f'the nearest is {path}.{near[0]}'
        if near
        else (f'the fields are {", ".join(hints)}')
      )
      raise ValueError(f'{path}.{name} is no field of the config; {advice}.')
  return kind(
    **{
      name: _convert(hints[name], value, f'{path}.{name}')
      for name, value in values.items()
    }
  )


def _convert(hint, value, path: str):
  """`value` as the annotated type; exact but for int -> float."""
  if dataclasses.is_dataclass(hint):
    return _build(hint, value, path)
  origin = typing.get_origin(hint)
  if origin is tuple and isinstance(value, list | tuple):
    inner = typing.get_args(hint)[0]
    return tuple(
      _convert(inner, item, f'{path}[{i}]') for i, item in enumerate(value)
    )
  if origin is dict and isinstance(value, dict):
    return _writable(dict(value), path)
  if hint is float and type(value) is int:
    return float(value)
  if origin is None and type(value) is hint:
    return value
  wanted = hint if isinstance(hint, types.GenericAlias) else hint.__name__
  raise ValueError(f'{path} is {value!r}; it must be of type {wanted}.')


def _writable(values: dict, path: str) -> dict:
  """The values, if a config can be written with them."""
  for name, value in values.items():
    try:
      json.dumps(value)
    except TypeError as error:
      raise ValueError(
        f'{path} has {name}={value!r:.80}, which a config cannot hold; put '
        'schedules and controllers into a function of your own that returns '
        "the method, and name it 'module:function'."
      ) from error
  return values
