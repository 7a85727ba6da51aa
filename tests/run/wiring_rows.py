"""Where each field of a config has to arrive in a run; see `wiring_test.py`.

A row is a function of a `wiring.Seen` and the value of the field, and returns
two lists: what has arrived, and what should have. Both are empty if the field
does not count in this run.
"""

import types

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax.mesh import random_keys
from tests.run import wiring


def at(*places):
  """Where a field has to arrive: (function, argument, *calls), default all."""

  def row(run, value):
    arrived = [x for place in places for x in run.at(*place)]
    return arrived, [value] * len(arrived)

  return row


def both(*rows):
  """All of several rows."""

  def row(run, value):
    parts = [each(run, value) for each in rows]
    return tuple([x for part in parts for x in part[i]] for i in (0, 1))

  return row


def shape(name):
  """A field of the model's shape, which comes from files if they are given."""

  def row(run, value):
    return (
      ([], [])
      if run.config.model.path
      else at(('ModelConfig', name))(run, value)
    )

  return row


def key_cost(run, value):
  """A key costs 2 width products of a layer's 12 width^2."""
  if run.config.model.path:
    return [], []
  found = run.at('LayoutSpec', 'key_cost')
  return found, [2 * value / (12 * value**2)] * len(found)


def asked(run, *purposes):
  """The requests for completions that have one of the purposes."""
  requests = [types.SimpleNamespace(**call) for call in run.calls['requests']]
  return [r for r in requests if r.purpose in (purposes or r.purpose)]


def drawing(name, purposes=()):
  """A field of how tokens are drawn."""

  def row(run, value):
    found = [getattr(r.sampling, name) for r in asked(run, *purposes)]
    return found, [value] * len(found)

  return row


def limit(run, value):
  found = [r.limit for r in asked(run)]
  return found, [value] * len(found)


def updates_of(config):
  return config.learner.batches * config.learner.epochs


def rollouts(run):
  """The rollouts that the run has learned from."""
  return run.at('learn 0', 'rollout')


def judged(run, rollout):
  """[P,G], what the rewards of the config say of the texts in a rollout."""
  return np.array(
    [
      [
        sum(
          r.weight * resolved(r.name)('', text, {}, **r.kwargs)
          for r in run.config.rewards
        )
        for text in texts
      ]
      for texts in rollout.texts
    ],
    np.float32,
  )


def resolved(name):
  return getattr(wiring, name.split(':')[1])


def trained_on(run):
  return [np.asarray(r.batch.reward).tolist() for r in rollouts(run)]


def steps(run, value):
  at_most = run.config.learner.nonfinite_rollouts or value
  return [
    run.at('display_for', 'about')[0].total_steps,
    run.at('learning_rate', 'total_steps', 0)[0],
    len(rollouts(run)),
  ], [value, value * updates_of(run.config), min(value, at_most)]


def shuffle(run, value):
  wanted = []
  for step, rollout in enumerate(rollouts(run)):
    reward = judged(run, rollout)
    if value:
      rng = random_keys.generator(run.config.seed, 'shuffle rewards', step)
      reward = rng.permutation(reward.reshape(-1)).reshape(reward.shape)
    wanted.append(reward.tolist())
  return trained_on(run), wanted


def windows(run, value):
  if run.config.model.path:
    return [], []
  patterns = run.at('ModelConfig', 'pattern')
  found = [tuple(k.window_tokens or 0 for k in kinds) for kinds in patterns]
  return found, [value] * len(found)


def path(run, value):
  opened = set(run.at('source', 'path'))
  return [opened, *run.at('tokenizer_from', 'model_path')], [
    {value} - {''},
    *[value] * len(run.calls['tokenizer_from']),
  ]


def base_dtype(run, value):
  """Of the largest matrix beside the adapters, and the learner's plan of it."""
  (updater,) = run.calls['Updater'][:1]
  if not run.config.lora.rank:
    return [], []
  learns = run.at('learn 0', 'updater', 0)[0]
  places = [updater['frozen'], learns.frozen]
  found = [tree['embedding'].dtype.name for tree in places]
  return found, [value] * 2


def adapters(name):
  def row(run, value):
    if not run.config.lora.rank:
      return [len(run.calls['LowRank'])], [0]
    return at(('LowRank', name))(run, value)

  return row


def opened(source):
  """What a source of the config stands for."""
  if source.name.endswith('own_source'):
    return wiring.own_source(**source.kwargs)
  return wiring.Source(source.name)


def prompts_of(source):
  return [source[i]['prompt'] for i in range(len(source))]


def train(run, value):
  if isinstance(value, str):
    value = [config_lib.Source(value)]
  found = [list(map(prompts_of, x)) for x in run.at('mixture', 'sources')]
  return found + run.at('mixture', 'weights'), [
    [prompts_of(opened(source)) for source in value],
    [source.weight for source in value],
  ]


def source_kwargs(split):
  def row(run, value):
    del value
    several = getattr(run.config.data, split)
    several = [] if isinstance(several, str) else several
    wanted = [x.kwargs for x in several if x.kwargs]
    called = [{'first': first} for first in run.at('own_source', 'first')]
    return [kwargs for kwargs in wanted if kwargs in called], wanted

  return row


def too_long(run, value):
  found = [fits is not None for fits in run.at('draw', 'fits')]
  return found, [value == 'drop'] * len(found)


def heldout(run, value):
  found = [
    [record['prompt'] for record in call['records']]
    for call in run.calls['collect']
    if call['purpose'] != 'sample'
  ]
  if not value:
    return found, []
  wanted = [prompt for source in value for prompt in prompts_of(opened(source))]
  number = run.config.evaluation.examples
  return found, [wanted[:number]] * max(1, len(found))


def heldout_part(run, value):
  del value
  return heldout(run, run.config.data.heldout)


def prompt_format(name):
  def row(run, value):
    formats = run.at('tokenizer_from', 'prompt_format')
    return [getattr(x, name) for x in formats], [value] * len(formats)

  return row


def prompt_buckets(run, value):
  rows = at(('LocalEngine', 'prompt_buckets'), ('LayoutSpec', 'prompt_buckets'))
  (arrived, wanted), longest = (
    rows(run, value),
    run.at('blank', 'prompt_tokens'),
  )
  return arrived + longest, wanted + [max(value)] * len(longest)


def reward_parts(run, value):
  """Each reward's label and numbers, by its function and its arguments."""
  del value
  rewards = run.config.rewards
  labels = tuple(reward.label or reward.name for reward in rewards)
  return [r.reward_names for r in rollouts(run)] + [
    np.asarray(r.batch.reward_parts).tolist() for r in rollouts(run)
  ], [labels for _ in rollouts(run)] + [
    [
      [
        [
          float(np.float32(resolved(one.name)('', text, {}, **one.kwargs)))
          for one in rewards
        ]
        for text in texts
      ]
      for texts in r.texts
    ]
    for r in rollouts(run)
  ]


def of_rewards(read, wanted=lambda value: value):
  """What each `WeightedReward` has, wherever completions are judged."""

  def row(run, value):
    found = [
      [read(reward) for reward in rewards]
      for rewards in run.at('collect', 'rewards')
    ]
    return found, [[wanted(x) for x in value] for _ in found]

  return row


def memory_limit(run, value):
  found = run.at('Workers', 'memory_limit_bytes')
  return found, [value * 2**30] * len(found)


def reward_weights(run, value):
  arrived = [sorted(np.ravel(x)) for x in trained_on(run)]
  wanted = [sorted(np.ravel(judged(run, r))) for r in rollouts(run)]
  told = [call['kwargs']['weights'] for call in run.calls['own_method']]
  return arrived + told, wanted + [value] * len(told)


def prompts(run, value):
  found = run.at('draw', 'number') + run.at('blank', 'prompts')
  found += [len(r.prompts) for r in asked(run, 'sample')]
  return found, [value] * len(found)


def group(run, value):
  found = run.at('blank', 'group')
  found += [r.group for r in asked(run, 'sample')]
  greedy = [r.group for r in asked(run, 'evaluate')]
  return found + greedy, [value] * len(found) + [1] * len(greedy)


def temperature(run, value):
  """Of what samples and learns; evaluations are greedy, the warm-up is at 1."""
  arrived = [r.sampling.temperature for r in asked(run)]
  wanted = [0.0 if r.purpose == 'evaluate' else value for r in asked(run)]
  scored = run.at('score', 'temperature')
  assert len(scored) == 4
  return arrived + scored, wanted + [value, value, 1.0, 1.0]


def clip_norm(run, value):
  arrived = run.at('adamw', 'clip_norm')
  return arrived, [value or None] * len(arrived)


def optimizer(run, value):
  """One for the run, and one for its warm-up."""
  made = run.at(value.split(':')[-1], '->')
  return [len(made)], [2]


def optimizer_kwargs(run, value):
  calls = run.calls[run.config.optim.name.split(':')[-1]]
  return [{k: call[k] for k in value} for call in calls], [value] * 2


def optional(function, argument=None):
  """A wrapper of the optimizer that is there once, or not at all."""

  def row(run, value):
    calls = run.calls[function]
    found = [call[argument] for call in calls] if argument else []
    return [len(calls), *found], [int(bool(value)), *[value] * len(found)]

  return row


def brake(run, value):
  found = run.at('reset_moments', 'which')
  found += ['project'] * len(run.calls['project_outward'])
  found += run.at('Optimizer', 'with_outward')
  return found, {
    'project': ['project', True, False],
    'reset_first': ['first', False, False],
  }[value]


def method(run, value):
  own = value.split(':')[-1]
  (made,) = run.at(own, '->')
  return [made is x for x in run.at('Learner', 'method', 0)], [True]


def method_kwargs(run, value):
  own = run.config.learner.method.split(':')[-1]
  (call,) = run.calls[own]
  call = call.get('kwargs', call)
  return [{name: call[name] for name in value}], [value]


def batch_fields(run, value):
  """What the learner gets, if the method reads it."""
  batches = [rollout.batch for rollout in run.at('learn 0', 'rollout')]
  found = {x for b in batches for x in np.unique(b.extras.get('mine', [])) if x}
  if not run.calls['own_method']:
    return [*found], []
  name = value['mine'].split(':')[-1]
  return [*found], {'own_field': [41.0], 'other_field': [42.0]}[name]


def told(argument):
  """A fact of the run that the method is told of."""

  def row(run, value):
    found = [call['kwargs'][argument] for call in run.calls['own_method']]
    return found, [value] * len(found)

  return row


def updates_per_rollout(name):
  def row(run, value):
    arrived = run.at('UpdateSpec', name, 0)
    coasts = run.at('Measuring', 'coast_steps')
    coasts += [c['kwargs']['updates'] for c in run.calls['own_method']]
    wanted = [updates_of(run.config)] * len(coasts)
    return arrived + coasts, [value] + wanted

  return row


def nonfinite_rollouts(run, value):
  """No update of the fake updater is finite."""
  ends = bool(value) and value <= run.config.steps
  return [len(rollouts(run)), 'was finite' in str(run.error)], [
    value if ends else run.config.steps,
    ends,
  ]


def rounds(run, value):
  return at(('draw', 'rounds'))(run, value)[0] + run.at(
    'UpdateSpec', 'stale', 0
  ), [value] * len(run.calls['draw']) + [value > 0]


ROWS = {
  'seed': at(
    ('requests', 'seed'),
    ('mixture', 'seed'),
    ('prompt_stream', 'seed'),
    ('arithmetic_demonstrations', 'seed'),
    ('UpdateSpec', 'seed'),
    ('Geometry', 'seed'),
    ('random key', 'seed'),
    ('random generator', 'seed'),
    ('summarize', 'seed'),
  ),
  'steps': steps,
  'shuffle_rewards': shuffle,
  'compilation_cache': at(('keep', 'place')),
  'model.path': path,
  'model.window_tokens': windows,
  'lora.rank': adapters('rank'),
  'lora.alpha': adapters('alpha'),
  'lora.targets': adapters('targets'),
  'lora.base_dtype': base_dtype,
  'data.train': train,
  'data.train[].name': lambda run, value: train(run, run.config.data.train),
  'data.train[].weight': lambda run, value: train(run, run.config.data.train),
  'data.train[].kwargs': source_kwargs('train'),
  'data.heldout': heldout,
  'data.heldout[].name': heldout_part,
  'data.heldout[].weight': heldout_part,
  'data.heldout[].kwargs': source_kwargs('heldout'),
  'data.too_long': too_long,
  'data.prompt_field': at(('jsonl_source', 'prompt_field')),
  'data.answer_field': at(('jsonl_source', 'answer_field')),
  'data.last_turn': at(('jsonl_source', 'last_turn')),
  'data.tokenizer': at(('tokenizer_from', 'source')),
  'data.eos_tokens': at(('tokenizer_from', 'eos_tokens')),
  'data.pad_token': at(('tokenizer_from', 'pad_token')),
  'data.prompt_buckets': prompt_buckets,
  'data.completion_buckets': at(
    ('LocalEngine', 'completion_buckets'),
    ('collect', 'completion_buckets'),
    ('blank', 'completion_buckets'),
    ('demonstrations', 'completion_buckets'),
  ),
  'rewards': reward_parts,
  'rewards[].name': reward_parts,
  'rewards[].kwargs': reward_parts,
  'rewards[].label': reward_parts,
  'rewards[].weight': reward_weights,
  'rewards[].where': of_rewards(lambda reward: reward.where),
  'rewards[].on_failure': of_rewards(
    lambda reward: reward.failed is not None, lambda value: value == 'reward'
  ),
  'rewards[].failed_reward': of_rewards(lambda reward: reward.failed or 0.0),
  'rewards[].required': of_rewards(lambda reward: reward.required),
  'workers.number': at(('Workers', 'number')),
  'workers.time_limit_secs': at(('Workers', 'time_limit_secs')),
  'workers.memory_limit_gib': memory_limit,
  'workers.start_limit_secs': at(('Workers', 'start_limit_secs')),
  'workers.wall_limit_secs': at(('Workers', 'wall_limit_secs')),
  'sampler.prompts': prompts,
  'sampler.group': group,
  'sampler.max_tokens': both(limit, at(('blank', 'max_tokens'))),
  'sampler.temperature': temperature,
  'sampler.max_rows': at(('LocalEngine', 'max_rows')),
  'sampler.tensor': at(('sampling_mesh', 'tensor')),
  'sampler.resample_rounds': rounds,
  'sampler.retire_solved': at(('draw', 'retire')),
  'optim.name': optimizer,
  'optim.kwargs': optimizer_kwargs,
  'optim.lr': at(('learning_rate', 'peak', 0)),
  'optim.warmup_steps': at(('learning_rate', 'warmup_steps', 0)),
  'optim.decay': at(('learning_rate', 'decay', 0)),
  'optim.decay_share': at(('learning_rate', 'decay_share', 0)),
  'optim.b1': both(at(('adamw', 'b1')), told('b1')),
  'optim.b2': both(at(('adamw', 'b2')), told('b2')),
  'optim.epsilon': at(
    ('adamw', 'epsilon'),
    ('record_adam_moments', 'epsilon'),
    ('project_outward', 'epsilon'),
  ),
  'optim.weight_decay': at(
    ('adamw', 'weight_decay'), ('own_optimizer', 'weight_decay')
  ),
  'optim.clip_norm': clip_norm,
  'optim.brake': brake,
  'optim.reward_scale': optional('restore_reward_scale', 'reference'),
  'optim.moments': both(
    optional('record_adam_moments'), at(('Measuring', 'records', 0))
  ),
  'learner.method': method,
  'learner.method_kwargs': method_kwargs,
  'learner.fields': batch_fields,
  'learner.batches': updates_per_rollout('batches'),
  'learner.epochs': updates_per_rollout('epochs'),
  'learner.nonfinite_rollouts': nonfinite_rollouts,
}
ROWS |= {
  f'model.{name}': shape(name)
  for name in (
    'num_layers', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_width',
    'rope_base', 'norm_epsilon', 'qk_norm', 'qkv_bias', 'tied_embeddings',
  )
}  # fmt: skip


ROWS['model.width'] = both(shape('width'), key_cost)
# How the model is computed is said for the shape of files too.
COMPUTED = 'compute_dtype', 'residual_dtype', 'remat', 'unroll', 'attention'
ROWS |= {f'model.{name}': at(('ModelConfig', name)) for name in COMPUTED}
ROWS |= {
  f'data.{name}': prompt_format(name)
  for name in ('chat', 'system_prompt', 'chat_kwargs', 'completion_prefix')
}
ROWS |= {
  f'sampler.{name}': drawing(name)
  for name in ('min_tokens', 'top_k', 'top_p', 'min_p', 'stop_strings')
}
AXES = 'data', 'fsdp', 'tensor', 'expert', 'context', 'slices'
ROWS |= {f'mesh.{name}': at(('make_mesh', name)) for name in AXES}
