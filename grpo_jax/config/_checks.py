"""What the values of a config must be."""

import dataclasses
import math
from typing import Any

from grpo_jax.config import _names

# Least value of each of these fields.
_LEAST = {
  'steps': 0,
  'lora.rank': 0,
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
  'learner.expert_balance': 0,
  'warm_up.steps': 0,
  'warm_up.examples': 1,
  'warm_up.micro_rows': 0,
  'sampler.resample_rounds': 0,
  'reference.refresh_steps': 0,
  'checkpoint.every_steps': 1,
  'checkpoint.every_warm_up_steps': 1,
  'checkpoint.keep_last': 1,
  'checkpoint.export_every_saves': 0,
  'log.samples': 0,
  'log.completions_every_steps': 0,
  'evaluation.every_steps': 0,
  'evaluation.examples': 1,
  'optim.clip_norm': 0,
  'optim.reward_scale': 0,
  'optim.overshoot_every_steps': 0,
}

# Allowed values of each of these fields.
_KNOWN = {
  'lora.base_dtype': ('float32', 'bfloat16'),
  'checkpoint.export_dtype': ('float32', 'bfloat16'),
  'learner.layout': ('auto', 'shared', 'packed', 'padded'),
  'learner.anchor': ('learner', 'sampler'),
  'learner.on_zero_advantage': ('skip', 'step'),
  'optim.decay': ('constant', 'linear', 'cosine'),
  'optim.brake': ('none', 'reset', 'reset_first', 'decay', 'project'),
  'log.display': ('auto', 'rich', 'plain', 'none'),
  'log.wandb_mode': ('online', 'offline'),
}


def checks(config: Any):
  """Yields what must hold for the values of a config.

  Args:
    config: A `Config`.

  Yields:
    Pairs: whether it holds, and half a sentence that says what does not and
    what to give instead.
  """
  sampler, learner, optim = config.sampler, config.learner, config.optim
  values = _names.flat(dataclasses.asdict(config))
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
    not config.lora.rank or len(config.lora.targets) > 0,
    f'lora.rank={config.lora.rank} with no lora.targets, so that there is '
    "nothing to train; give patterns, such as ('attention/*',)",
  )
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
  yield from _checks_of_windows(config.model)
  yield from _checks_of_sources(config.data)
  yield from _checks_of_prompts(config)
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


def _checks_of_windows(model: Any):
  """As `checks`, of the model's windows."""
  layers, windows = model.num_layers, model.window_tokens
  yield (
    len(windows) > 0 and min(windows) >= 0,
    f'model.window_tokens={windows}; give a tuple of numbers, each 0 (no '
    'window) or more',
  )
  yield (
    len(windows) <= layers,
    f'model.window_tokens={windows} with model.num_layers={layers}; give at '
    'most as many windows as layers',
  )


def _checks_of_sources(data: Any):
  """As `checks`, of the sources of prompts."""
  if isinstance(data.train, str):
    return
  yield len(data.train) > 0, 'no source in data.train; give one'
  for place, source in enumerate(data.train):
    yield (
      0 < source.weight < math.inf,
      f'data.train[{place}].weight={source.weight}; give a number above 0, '
      'or leave out the source',
    )


def _checks_of_prompts(config: Any):
  """As `checks`, of the tokenizer and of how prompts are written."""
  data = config.data
  yield (
    bool(data.tokenizer or config.model.path),
    "data.tokenizer='', the tokenizer of the model, but no model.path; give "
    'one of the two',
  )
  for name in ('system_prompt', 'chat_kwargs'):
    value = getattr(data, name)
    yield (
      data.chat or not value,
      f'data.{name}={value!r:.60} with data.chat=False, under which there are '
      'no messages; give data.chat=True, or leave the field out',
    )
