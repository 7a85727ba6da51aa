"""Every field of a config reaches what it is meant for, with its value.

A run with fakes (`wiring.py`) is recorded for three configs that differ in
every field. `ROWS` says for each field where its value has to
arrive. A field without a row fails, and so does one that has the same value in
all configs in which it counts.
"""

import dataclasses
import functools
import typing
from typing import Any

from grpo_jax import config as config_lib
from tests.run import wiring
from tests.run import wiring_rows
from tests.run import wiring_rows_around

ROWS = wiring_rows.ROWS | wiring_rows_around.ROWS
OWN = wiring.HERE
# Fields whose place is in a type that the learner takes as it is; see
# `build/specs_test.py`.
IN_SPECS = {
  'early_stop.metric', 'early_stop.mode', 'early_stop.patience',
  'early_stop.least_improvement', 'export.adapter',
  'log.expected_prefixes', 'model.beyond_context',
  'optim.overshoot_every_steps', 'optim.offload',
  'reference.refresh_steps', 'reference.refresh_weight', 'reference.offload',
  'warm_up.micro_rows', *(
    f'learner.{name}'
    for name in (
      'layout', 'micro_rows', 'row_completions',
      'pack_tokens', 'anchor', 'on_zero_advantage', 'compute_all',
      'expert_balance',
    )
  ),
}  # fmt: skip
# Any other value is refused.
ONE_VALUE = ('data.heldout[].weight',)
REWARDS = (f'{OWN}:first_reward', f'{OWN}:second_reward')

# Two configs; no two numbers in one of them are equal, where that is possible.
PAIRS = {
  'seed': (11, 12),
  'steps': (13, 4),
  'shuffle_rewards': (False, True),
  'compilation_cache': ('here', 'there'),
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
      {'name': 'a', 'weight': 3.0},
      {'name': f'{OWN}:own_source', 'weight': 5.0, 'kwargs': {'first': 41}},
    ),
    (
      {'name': f'{OWN}:own_source', 'weight': 2.0, 'kwargs': {'first': 42}},
      {'name': 'b'},
    ),
  ),
  'data.heldout': (
    (
      {'name': f'{OWN}:own_source', 'kwargs': {'first': 43}},
      {'name': 'held'},
    ),
    (
      {'name': f'{OWN}:own_source', 'kwargs': {'first': 44}},
      {'name': 'b'},
    ),
  ),
  'data.too_long': ('drop', 'refuse'),
  'data.prompt_field': ('question', 'asked'),
  'data.answer_field': ('solution', 'said'),
  'data.last_turn': ('answer', 'prefill'),
  'data.tokenizer': ('this', 'that'),
  'data.eos_tokens': (('<a>',), ('<b>', '<c>')),
  'data.pad_token': ('<d>', '<e>'),
  'data.chat': (True, False),
  'data.system_prompt': ('Be brief.', ''),
  'data.chat_kwargs': ({'thinks': False}, {}),
  'data.completion_prefix': ('Answer:', 'So:'),
  'data.prompt_buckets': ((7, 16), (9,)),
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
  'sampler.stop_strings': (('x',), ('y', 'z')),
  'sampler.max_rows': (31, 32),
  'sampler.tensor': (1, 0),
  'sampler.resample_rounds': (2, 0),
  'sampler.retire_solved': (False, True),
  'sampler.ahead': (0, 1),
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
  'learner.micro_rows': (17, 19),
  'learner.row_completions': (2, 0),
  'learner.pack_tokens': (23, 0),
  'learner.anchor': ('learner', 'sampler'),
  'learner.on_zero_advantage': ('step', 'skip'),
  'learner.compute_all': (True, False),
  'learner.nonfinite_rollouts': (0, 2),
  'learner.expert_balance': (0.41, 0.0),
  'reference.refresh_steps': (3, 4),
  'reference.refresh_weight': (0.51, 0.52),
  'reference.offload': (False, True),
  'warm_up.steps': (7, 5),
  'warm_up.examples': (14, 15),
  'warm_up.micro_rows': (26, 27),
  'warm_up.lr': (0.013, 0.014),
  'warm_up.demonstrations': ('shown', 'arithmetic'),
  'warm_up.carry_free_share': (0.61, 0.62),
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
  'mesh.data': (2, 3),
  'mesh.fsdp': (3, 4),
  'mesh.tensor': (5, 6),
  'mesh.expert': (7, 8),
  'mesh.context': (7, 8),
  'mesh.slices': (9, 10),
}
# What the third config has instead of the second's values.
THIRD = {
  'steps': 6,
  'model.path': 'files',
  'lora.rank': 0,
  'data.train': 'c',
  'data.heldout': '',
  'optim.name': f'{OWN}:own_optimizer',
  'optim.kwargs': {'plus': 3.5},
  'optim.b1': 0.9,  # an optimizer of one's own reads none of Adam's fields
  'optim.b2': 0.99,
  'optim.epsilon': 1e-8,
  'learner.method': 'grpo',
  'learner.method_kwargs': {'low': 0.1},
  'warm_up.carry_free_share': 0.63,
  'learner.nonfinite_rollouts': 3,
  'export.every_saves': 1,
  'export.adapter': False,
  'export.push_to': 'me/other',
  'log.completions_every_steps': 2,
  'log.wandb_project': '',
  'log.mlflow_experiment': '',
}


@functools.cache
def seen(number):
  """What a run with one of the three configs has called."""
  return wiring.record(config_of(number))


def config_of(number):
  """One of the three configs."""
  values = {name: pair[min(number, 1)] for name, pair in PAIRS.items()}
  if number == 2:  # the shape comes with the files
    values = THIRD | {
      name: value
      for name, value in values.items()
      if name not in THIRD
      and (not name.startswith('model.') or name.endswith(wiring_rows.COMPUTED))
    }
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


def fields(kind: Any = config_lib.Config, prefix=''):
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


def value_of(config, name):
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


def test_every_field_arrives_with_its_value():
  """All in one test: the runs that they share take a quarter of a minute."""
  for name in fields():
    if name not in IN_SPECS:
      check_field(name)


def check_field(name):
  assert name in ROWS, (
    f'{name} has no row: give it two values in PAIRS, and say in wiring_rows '
    'where they have to arrive'
  )
  values = []
  for run in map(seen, range(3)):
    value = value_of(run.config, name)
    arrived, wanted = ROWS[name](run, value)
    assert arrived == wanted, f'{name}={value!r}'  # what arrived comes first
    if wanted:
      values.append(repr(value))
  # With a single value, a constant in the code would go unnoticed.
  assert len(set(values)) > (name not in ONE_VALUE), (name, values)


def test_no_row_is_left_over():
  assert {*ROWS, *IN_SPECS} == set(fields()) and not IN_SPECS & {*ROWS}


def test_the_sampler_has_a_new_version_of_the_policy_after_each_rollout():
  run = seen(0)
  assert run.at('hand to sampler', 'version') == list(
    range(run.config.steps + 1)
  )


def test_what_is_differentiated_forwards_is_scored_in_forward_mode():
  """`wiring.record` calls `score` and `score_forward` of each learner."""
  assert seen(0).at('score', 'forward_mode') == [False, True] * 2
