"""Three configs of runs that can be built, and that differ in every field.

What a config becomes is compared with them: specs in `specs_test.py`, all other
parts of a run in `parts_test.py`. Together these two read every field.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import json
import pathlib
import typing
from typing import Any
import zlib

import jax
import optax

from grpo_jax import config as config_lib
from grpo_jax import losses
from tests import hf_folder
from tests.models.weights import golden

OWN = __name__
FILE = pathlib.Path
TOLD: dict[losses.LossTransform, dict[str, Any]] = {}  # by `own_method`


def first_reward(prompt, completion, example, plus=0.0):
  """A number of its own for every completion."""
  del prompt, example
  return zlib.crc32(completion.encode()) % 1009 / 7 + plus


def second_reward(prompt, completion, example, plus=0.0):
  """Another one."""
  return first_reward(prompt, completion + '+', example, plus)


@losses.takes_from_run(
  weights='reward_weights',
  updates='updates_per_rollout',
  b1='adam_b1',
  b2='adam_b2',
  right='right_reward',
  most='max_tokens',
)
def own_method(**kwargs):
  """A user's method; what it was called with stands in `TOLD`."""
  own = losses.on_advantage(
    lambda advantage, batch: advantage * batch.extras['mine'],
    requires=('mine',),
  )
  method = losses.chain(losses.methods.rloo(), own)
  TOLD[method] = kwargs
  return method


def own_field(record, ids):
  """What it reads of each token."""
  return [41.0] * len(ids)


def other_field(record, ids):
  """Another one."""
  return [42.0] * len(ids)


def own_optimizer(learning_rate, weight_decay, mask, plus=0.0):
  """A user's optimizer."""
  decay = optax.add_decayed_weights(weight_decay, mask)
  rate = optax.scale_by_learning_rate(learning_rate)
  return optax.chain(optax.scale(plus), decay, rate)


def own_source(first):
  """A user's records."""
  return [{'prompt': f'{first:02}+0{n}=', 'answer': '7'} for n in range(5)]


def last_digit(text):
  """The answer in a completion."""
  return text[-1:]


REWARDS = (f'{OWN}:first_reward', f'{OWN}:second_reward')

# Two values of each field, of which a config has one; no two numbers of a
# config are equal, where that is possible. A path is one of `write_files`.
PAIRS = {
  'seed': (11, 12),
  'steps': (13, 4),
  'shuffle_rewards': (False, True),
  'compilation_cache': (FILE('here'), FILE('there')),
  'model.num_layers': (2, 3),
  'model.width': (12, 20),
  'model.num_heads': (6, 4),
  'model.num_kv_heads': (3, 2),
  'model.head_dim': (10, 14),
  'model.mlp_width': (18, 22),
  'model.rope_base': (500.0, 700.0),
  'model.norm_epsilon': (1e-3, 1e-4),
  'model.qk_norm': (True, False),
  'model.qkv_bias': (False, True),
  'model.tied_embeddings': (True, False),
  'model.window_tokens': ((3, 0), (5,)),
  'model.compute_dtype': ('bfloat16', 'float32'),
  'model.residual_dtype': ('bfloat16', 'float32'),
  'model.remat': ('attention', 'layer'),
  'model.unroll': (True, False),
  'model.attention': ('xla', 'auto'),
  'model.beyond_context': (True, False),
  'lora.rank': (7, 5),
  'lora.alpha': (9.0, 15.0),
  'lora.targets': (('mlp/*',), ('attention/*',)),
  'lora.base_dtype': ('bfloat16', 'float32'),
  'data.train': (
    (
      {'name': FILE('a.jsonl'), 'weight': 3.0},
      {'name': f'{OWN}:own_source', 'weight': 5.0, 'kwargs': {'first': 41}},
    ),
    (
      {'name': f'{OWN}:own_source', 'weight': 2.0, 'kwargs': {'first': 42}},
      {'name': FILE('b.jsonl')},
    ),
  ),
  'data.heldout': (
    (
      {'name': f'{OWN}:own_source', 'kwargs': {'first': 43}},
      {'name': FILE('held.jsonl')},
    ),
    (
      {'name': f'{OWN}:own_source', 'kwargs': {'first': 44}},
      {'name': FILE('b.jsonl')},
    ),
  ),
  'data.too_long': ('drop', 'refuse'),
  'data.prompt_field': ('question', 'asked'),
  'data.answer_field': ('solution', 'said'),
  'data.last_turn': ('answer', 'prefill'),
  'data.tokenizer': (FILE('this'), FILE('that')),
  'data.eos_tokens': (('<|eot_id|>',), ('<s>', '</s>')),
  'data.pad_token': ('<bos>', '<think>'),
  'data.chat': (True, True),
  'data.system_prompt': ('Be brief.', ''),
  'data.chat_kwargs': ({'enable_thinking': False}, {}),
  'data.completion_prefix': ('Answer:', 'So:'),
  'data.prompt_buckets': ((7, 120), (90,)),
  'data.completion_buckets': ((4, 6), (8,)),
  'rewards': (
    [
      {
        'name': REWARDS[0],
        'weight': 2.0,
        'kwargs': {'plus': 1.5},
        'label': 'one',
        'where': 'workers',
        'on_failure': 'reward',
        'failed_reward': -0.25,
        'required': True,
      },
      {'name': REWARDS[1], 'weight': -3.0, 'where': 'here'},
    ],
    [
      {'name': REWARDS[1], 'weight': 0.5, 'where': 'here'},
      {
        'name': REWARDS[1],
        'weight': 4.0,
        'kwargs': {'plus': 2.5},
        'label': 'two',
        'where': 'workers',
        'on_failure': 'reward',
        'failed_reward': 0.75,
      },
    ],
  ),
  'workers.number': (29, 30),
  'workers.time_limit_secs': (1.25, 2.25),
  'workers.memory_limit_gib': (3.5, 5.5),
  'workers.start_limit_secs': (6.5, 7.25),
  'workers.wall_limit_secs': (44.0, 45.0),
  'sampler.prompts': (6, 10),
  'sampler.group': (4, 3),
  'sampler.max_tokens': (5, 8),
  'sampler.min_tokens': (3, 0),
  'sampler.temperature': (0.7, 1.3),
  'sampler.top_k': (8, 0),
  'sampler.top_p': (0.9, 1.0),
  'sampler.min_p': (0.05, 0.0),
  'sampler.stop_strings': (('x',), ('y', '<s>')),
  'sampler.max_rows': (31, 32),
  'sampler.tensor': (1, 0),
  'sampler.resample_rounds': (2, 0),
  'sampler.retire_solved': (False, True),
  'sampler.ahead': (0, 1),
  'generator.devices': (0, 1),
  'generator.updates': ('between', 'inflight'),
  'generator.every': (1, 2),
  'generator.parts': (2, 5),
  'generator.listen': ('127.0.0.1:8470', ''),
  'generator.secret': (FILE('secret'), ''),
  'generator.weights': ('files', 'transfer'),
  'generator.wait_secs': (52.5, 53.5),
  'optim.name': ('adamw', 'adamw'),
  'optim.kwargs': ({}, {}),
  'optim.lr': (0.011, 0.012),
  'optim.warmup_steps': (4, 5),
  'optim.decay': ('cosine', 'linear'),
  'optim.decay_share': (0.33, 0.34),
  'optim.b1': (0.81, 0.82),
  'optim.b2': (0.91, 0.92),
  'optim.epsilon': (1e-5, 1e-6),
  'optim.weight_decay': (0.21, 0.22),
  'optim.clip_norm': (1.1, 0.0),
  'optim.brake': ('project', 'reset_first'),
  'optim.reward_scale': (0.31, 0.0),
  'optim.moments': (True, False),
  'optim.overshoot_every_steps': (9, 10),
  'optim.offload': (True, False),
  'learner.method': (f'{OWN}:own_method', f'{OWN}:own_method'),
  'learner.method_kwargs': ({'high': 0.3}, {'free': 3}),
  'learner.fields': (
    {'mine': f'{OWN}:other_field'},
    {'mine': f'{OWN}:own_field'},
  ),
  'learner.batches': (3, 2),
  'learner.epochs': (2, 5),
  'learner.layout': ('auto', 'padded'),
  'learner.micro_rows': (18, 19),
  'learner.row_completions': (2, 0),
  'learner.pack_tokens': (23, 0),
  'learner.anchor': ('learner', 'sampler'),
  'learner.on_zero_advantage': ('step', 'skip'),
  'learner.compute_all': (True, False),
  'learner.nonfinite_rollouts': (0, 2),
  'learner.expert_balance': (0.0, 0.0),
  'reference.refresh_steps': (3, 4),
  'reference.refresh_weight': (0.51, 0.52),
  'reference.offload': (False, True),
  'warm_up.steps': (7, 5),
  'warm_up.examples': (14, 15),
  'warm_up.micro_rows': (26, 27),
  'warm_up.lr': (0.013, 0.014),
  'warm_up.demonstrations': (FILE('shown.jsonl'), 'arithmetic'),
  'warm_up.carry_free_share': (0.61, 0.98),
  'evaluation.every_steps': (3, 0),
  'evaluation.examples': (25, 28),
  'evaluation.right_reward': (0.71, 0.72),
  'evaluation.answer': (f'{OWN}:last_digit', ''),
  'early_stop.metric': ('loss', 'reward'),
  'early_stop.mode': ('min', 'max'),
  'early_stop.patience': (33, 34),
  'early_stop.least_improvement': (0.015, 0.016),
  'checkpoint.every_steps': (5, 1),
  'checkpoint.every_minutes': (0.5, 2.5),
  'checkpoint.every_warm_up_steps': (2, 3),
  'checkpoint.keep_last': (8, 9),
  'checkpoint.best_metric': ('loss', ''),
  'export.every_saves': (2, 0),
  'export.dtype': ('bfloat16', 'float32'),
  'export.adapter': (False, True),
  'export.push_to': ('me/one', ''),
  'export.public': (True, False),
  'log.display': ('plain', 'none'),
  'log.samples': (2, 5),
  'log.tensorboard': (True, False),
  'log.wandb_project': ('sums', 'more'),
  'log.wandb_mode': ('offline', 'online'),
  'log.mlflow_experiment': ('sums', 'more'),
  'log.mlflow_uri': ('here.db', 'there.db'),
  'log.completions_every_steps': (4, 0),
  'log.token_effects': (True, False),
  'log.geometry_every_steps': (3, 0),
  'log.expected_prefixes': (True, False),
  'log.kl_alarm': (0.8, 0.2),
  'log.entropy_alarm': (0.2, 0.4),
  'log.sampler_gap_alarm': (0.9, 0.3),
  'mesh.data': (2, 1),
  'mesh.fsdp': (1, 1),
  'mesh.tensor': (2, 1),
  'mesh.expert': (1, 1),
  'mesh.context': (2, 1),
  'mesh.slices': (1, 1),
}
# What the third config has instead of the second's values.
THIRD = {
  'steps': 6,
  'lora.rank': 0,
  'data.train': FILE('c.jsonl'),
  'data.heldout': '',
  'data.tokenizer': 'arithmetic',
  'data.chat': False,
  'data.completion_prefix': '=',
  'data.prompt_buckets': (11,),
  'sampler.tensor': 2,
  'sampler.ahead': 0,
  'generator.devices': 0,
  'generator.updates': 'between',
  'generator.every': 1,
  'sampler.stop_strings': ('+',),
  'optim.name': f'{OWN}:own_optimizer',
  'optim.kwargs': {'plus': 3.5},
  'optim.decay': 'warmup-stable-decay',
  'optim.clip_norm': 2.2,
  'optim.brake': 'none',
  'optim.overshoot_every_steps': 0,
  'optim.b1': 0.9,  # an optimizer of one's own reads none of Adam's fields
  'optim.b2': 0.99,
  'optim.epsilon': 1e-8,
  'learner.method': 'grpo',
  'learner.method_kwargs': {'low': 0.1},
  'learner.micro_rows': 16,
  'learner.nonfinite_rollouts': 3,
  'learner.expert_balance': 0.41,
  'warm_up.micro_rows': 24,
  'warm_up.carry_free_share': 0.03,
  'export.every_saves': 1,
  'export.adapter': False,
  'export.push_to': 'me/other',
  'log.completions_every_steps': 2,
  'log.wandb_project': '',
  'log.mlflow_experiment': '',
  'mesh.fsdp': 2,
  'mesh.expert': 2,
  'mesh.slices': 2,
}
# Any other value is refused.
ONE_VALUE = ('data.heldout[].weight',)
# Those of `config.model` that count for the shape of files too.
COMPUTED = ('compute_dtype', 'residual_dtype', 'remat', 'unroll', 'attention')


def write_files(folder: pathlib.Path) -> None:
  """Writes what the configs name: tokenizers and records."""
  hf_folder.write_tokenizer(folder / 'this')
  hf_folder.write_tokenizer(folder / 'that', vocab_size=390)
  for name, prompt, answer in (
    ('a', 'question', 'solution'),
    ('held', 'question', 'solution'),
    ('shown', 'question', 'solution'),
    ('b', 'asked', 'said'),
    ('c', 'asked', 'said'),
  ):
    first = zlib.crc32(name.encode()) % 90
    records = [
      {prompt: f'{first + n}+{n}=', answer: str(first + 2 * n)}
      for n in range(9)
    ]
    if name in 'ab':  # a chat that ends with the assistant
      turns = ('user', '1+1='), ('assistant', '2')
      chat = [{'role': role, 'content': text} for role, text in turns]
      records.append({prompt: chat, answer: '3'})
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (folder / f'{name}.jsonl').write_text(lines)


def config_of(number: int, folder: pathlib.Path) -> config_lib.Config:
  """One of the three configs, with files in a folder."""
  values = {name: pair[min(number, 1)] for name, pair in PAIRS.items()}
  if number == 2:  # the shape comes with the files
    third = THIRD | {'model.path': golden.folder('qwen3_moe')}
    values = third | {
      name: value
      for name, value in values.items()
      if name not in third
      and (not name.startswith('model.') or name.endswith(COMPUTED))
    }
  values = jax.tree.map(
    lambda x: str(folder / x) if isinstance(x, FILE) else x, values
  )
  config = config_lib.default()
  # A ConfigDict takes the fields of a dict one by one.
  for name in (
    'learner.method_kwargs',
    'learner.fields',
    'data.chat_kwargs',
    'optim.kwargs',
  ):
    group, field = name.split('.')
    setattr(config[group], field, values.pop(name))
  config.update_from_flattened_dict(values)
  return config_lib.resolve(config)


def fields(kind: Any = config_lib.Config, prefix: str = '') -> Iterator[str]:
  """The names of all fields; of a tuple of dataclasses, 'rewards[].name'."""
  for name, hint in typing.get_type_hints(kind).items():
    parts = [part for x in typing.get_args(hint) for part in typing.get_args(x)]
    items = [x for x in parts if dataclasses.is_dataclass(x)]
    items += [x for x in typing.get_args(hint) if dataclasses.is_dataclass(x)]
    if dataclasses.is_dataclass(hint):
      yield from fields(hint, f'{prefix}{name}.')
      continue
    yield prefix + name
    for item in items:
      yield from fields(item, f'{prefix}{name}[].')


def value_of(config: Any, name: str) -> Any:
  """The value of a field; of 'rewards[].name', those of all rewards."""
  head, *rest = name.split('.', 1)
  value = getattr(config, head.removesuffix('[]'))
  if not rest:
    return value
  if not head.endswith('[]'):
    return value_of(value, rest[0])
  if isinstance(value, str):  # the single source of data.train
    value = ()
  return tuple(value_of(item, rest[0]) for item in value)


class Noted:
  """A config that notes which of its fields are read."""

  def __init__(self, value: Any, read: set[str], prefix: str = ''):
    self._value, self._read, self._prefix = value, read, prefix

  def __getattr__(self, name: str) -> Any:
    value, name = getattr(self._value, name), self._prefix + name
    if dataclasses.is_dataclass(value):
      return Noted(value, self._read, f'{name}.')
    self._read.add(name)
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
      return tuple(Noted(item, self._read, f'{name}[].') for item in value)
    return value


Row = str | Callable[[Any], Any]


def wanted(
  config: config_lib.Config, row: Row, read: set[str] | None = None
) -> Any:
  """What a row says: the value of a field, or of a function of the config.

  Args:
    config: Of a run.
    row: The name of a field, or a function.
    read: Gets the names of the fields that the row reads.
  """
  read = set() if read is None else read
  if isinstance(row, str):
    read.add(row)
    return value_of(config, row)
  return row(Noted(config, read))
