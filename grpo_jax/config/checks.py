"""What the values of a config must be."""

from collections.abc import Iterator
import dataclasses
import ipaddress
import math
import re
from typing import Any
import urllib.parse

from grpo_jax.config.from_dict import flat
from grpo_jax.config.importing import nearest
from grpo_jax.config.plain_text import REWARD_METRICS

# Least value of each of these fields.
_LEAST = {
  'seed': 0,
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
  'optim.weight_decay': 0,
  'warm_up.lr': 0,
  'sampler.prompts': 1,
  'sampler.group': 1,
  'sampler.max_tokens': 1,
  'sampler.max_rows': 1,
  'sampler.tensor': 0,
  'sampler.min_tokens': 0,
  'sampler.top_k': 0,
  'sampler.min_p': 0,
  'learner.batches': 1,
  'learner.epochs': 1,
  'learner.micro_rows': 0,
  'learner.row_completions': 0,
  'learner.pack_tokens': 0,
  'learner.nonfinite_rollouts': 0,
  'learner.expert_balance': 0,
  'warm_up.steps': 0,
  'warm_up.examples': 1,
  'warm_up.micro_rows': 0,
  'sampler.resample_rounds': 0,
  'sampler.ahead': 0,
  'generator.devices': 0,
  'generator.every': 1,
  'generator.parts': 1,
  'engine.concurrency': 1,
  'engine.retries': 0,
  'reference.refresh_steps': 0,
  'checkpoint.every_steps': 1,
  'checkpoint.every_minutes': 0,
  'checkpoint.every_warm_up_steps': 1,
  'checkpoint.keep_last': 1,
  'export.every_saves': 0,
  'log.samples': 0,
  'log.kl_alarm': 0,
  'log.entropy_alarm': 0,
  'log.sampler_gap_alarm': 0,
  'log.completions_every_steps': 0,
  'log.geometry_every_steps': 0,
  'evaluation.every_steps': 0,
  'evaluation.examples': 1,
  'early_stop.patience': 1,
  'early_stop.least_improvement': 0,
  'optim.clip_norm': 0,
  'optim.reward_scale': 0,
  'optim.overshoot_every_steps': 0,
  'warm_up.carry_free_share': 0,
  'workers.number': 0,
  'workers.wall_limit_secs': 0,
  'environment.max_turns': 1,
  'environment.episode_tokens': 0,
  'environment.context_tokens': 0,
  'environment.result_tokens': 1,
  'environment.processes': 0,
  'environment.sessions': 1,
  'environment.retries': 0,
  'environment.failed_share': 0,
}

# Each of these fields is more than 0. At 0 or below, something is divided by 0
# or is the root of a negative number.
_ABOVE_0 = (
  'model.rope_base',
  'model.norm_epsilon',
  'lora.alpha',
  'optim.epsilon',
  'optim.decay_share',
  'sampler.top_p',
  'workers.time_limit_secs',
  'workers.memory_limit_gib',
  'workers.start_limit_secs',
  'environment.tool_secs',
  'environment.episode_secs',
  'generator.wait_secs',
  'engine.timeout_secs',
)

# Most of each of these fields.
_MOST = {
  'seed': 2**32 - 1,
  'sampler.top_p': 1,
  'sampler.min_p': 1,
  'sampler.ahead': 16,
  # Such a policy is as good as uniform: logits hardly count.
  'sampler.temperature': 1000,
  'warm_up.carry_free_share': 1,
  'optim.decay_share': 1,
  # Each update of Adam moves a weight by about as much.
  'optim.lr': 10,
  'warm_up.lr': 10,
  # It is added to a mean square, and must not drown it.
  'model.norm_epsilon': 1,
  'lora.alpha': 1_000_000,
  'workers.number': 4096,
  'environment.processes': 4096,
  'environment.sessions': 255,
  'environment.failed_share': 1,
  # Lists of this length are made; no model is near.
  'model.num_layers': 10_000,
}

# The least address space in which a process of Python imports a judge.
_LEAST_GIB = 1 / 16

# Below this, dividing by the temperature overflows, and rounding errors of the
# logits become differences of whole nats.
_LEAST_TEMPERATURE = 1e-3

# Counts are int32: steps, tokens, completions.
_MOST_COUNT = 2**31 - 1

# Of float32; smaller ones are 0 in compiled programs.
_LEAST_FLOAT, _MOST_FLOAT = 1.2e-38, 3e38

# Allowed values of each of these fields.
_KNOWN = {
  'lora.base_dtype': ('float32', 'bfloat16', 'int8', 'nf4'),
  'teacher.dtype': ('float32', 'bfloat16'),
  'export.dtype': ('float32', 'bfloat16'),
  'model.remat': ('none', 'layer', 'attention', 'offload'),
  'learner.layout': ('auto', 'shared', 'packed', 'padded'),
  'learner.anchor': ('learner', 'sampler'),
  'learner.on_zero_advantage': ('skip', 'step'),
  'generator.updates': ('between', 'inflight'),
  'generator.weights': ('auto', 'transfer', 'files'),
  'engine.kind': ('local', 'http'),
  'engine.dialect': ('vllm', 'sglang'),
  'engine.dtype': ('bfloat16', 'float32'),
  'teacher.dialect': ('vllm', 'sglang'),
  'optim.decay': ('constant', 'linear', 'cosine', 'warmup-stable-decay'),
  'optim.brake': ('none', 'reset', 'reset_first', 'decay', 'project'),
  'log.display': ('auto', 'rich', 'plain', 'none'),
  'log.wandb_mode': ('online', 'offline'),
  'early_stop.mode': ('max', 'min'),
  'environment.history': ('append', 'template'),
  'environment.seed': ('group', 'episode'),
  'environment.where': ('workers', 'here'),
  'agent.confine': ('auto', 'namespaces', 'landlock', 'no'),
}


# A name or a password before the host of an address.
_PASSWORD = re.compile(r'//[^/@]*@')

# Named optimizers, and those fields of Adam's that each of them reads.
_OPTIMIZERS = {
  'adamw': ('b1', 'b2', 'epsilon'),
  'adafactor': (),
  'lion': ('b1', 'b2'),
  'muon': ('b1', 'b2', 'epsilon'),
  'sgd': (),
}


# The name of an argument, wherever it stands.
_ARGUMENT = re.compile(r'kwargs\b')


def checks(config: Any):
  """Yields what must hold for the values of a config.

  Args:
    config: A `Config`.

  Yields:
    Pairs: whether it holds, and half a sentence that says what does not and
    what to give instead.
  """
  sampler, learner, optim = config.sampler, config.learner, config.optim
  values = flat(dataclasses.asdict(config))
  yield from _checks_of_numbers(values)
  yield from _checks_of_tables(values)
  for name, value in (('optim.b1', optim.b1), ('optim.b2', optim.b2)):
    yield 0 <= value < 1, f'{name}={value}; give at least 0 and less than 1'
  yield from _checks_of_rewards(config.rewards)
  yield from _checks_of_optim(config)
  yield from _checks_of_warm_up(config.warm_up)
  yield (
    config.model.rope_base > 1,
    f'model.rope_base={config.model.rope_base}; give more than 1, such as '
    '10000, so that later entries of a head turn more slowly',
  )
  for group in ('workers', 'environment'):
    memory = getattr(config, group).memory_limit_gib
    yield (
      memory >= _LEAST_GIB,
      f'{group}.memory_limit_gib={memory}, in which Python does not start; '
      f'give {_LEAST_GIB} or more',
    )
  yield from _checks_of_environment(config)
  yield from _checks_of_agent(config)
  yield from _checks_of_lora(config.lora)
  yield from _checks_of_teacher(config)
  yield (
    0 < config.reference.refresh_weight <= 1,
    f'reference.refresh_weight={config.reference.refresh_weight}; give more '
    'than 0 and at most 1, which copies the policy',
  )
  yield (
    config.log.completions_every_steps > 0 or not config.log.token_effects,
    'log.token_effects=True with log.completions_every_steps=0, so that no '
    'file is written; give how many rollouts lie between files',
  )
  yield (
    not _PASSWORD.search(config.log.mlflow_uri),
    'log.mlflow_uri with a name and a password in it, which the workdir would '
    'keep; leave them out, and set MLFLOW_TRACKING_USERNAME and '
    'MLFLOW_TRACKING_PASSWORD',
  )
  yield from _checks_of_fields(learner.fields)
  yield from _checks_of_learner(config)
  yield from _checks_of_windows(config.model)
  yield from _checks_of_sources(config.data)
  yield from _checks_of_prompts(config)
  yield from _checks_of_sampler(sampler)
  yield from _checks_of_generator(config)
  yield from _checks_of_engine(config)
  yield from _checks_of_taught(config)
  yield from _checks_of_widths(config)


def _checks_of_learner(config: Any):
  """As `checks`, of the learner beside the sampler."""
  sampler, learner = config.sampler, config.learner
  yield (
    sampler.prompts % learner.batches == 0,
    f'learner.batches={learner.batches} with sampler.prompts='
    f'{sampler.prompts}; give a number that divides the prompts',
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


def _checks_of_widths(config: Any):
  """As `checks`, of the widths of prompts and completions."""
  sampler = config.sampler
  for name, value in (
    ('prompt', config.data.prompt_buckets),
    ('completion', config.data.completion_buckets),
  ):
    yield (
      min(value, default=1) > 0,
      f'data.{name}_buckets={value}; give widths of 1 token or more',
    )
  yield (
    max(config.data.completion_buckets or (sampler.max_tokens,))
    >= sampler.max_tokens,
    f'sampler.max_tokens={sampler.max_tokens} above the largest of '
    f'data.completion_buckets={config.data.completion_buckets}; add a bucket, '
    'or give () for one that fits',
  )


def _checks_of_optim(config: Any):
  """As `checks`, of the optimizer and its schedule."""
  optim, learner = config.optim, config.learner
  yield from _checks_of_optimizer(optim)
  updates = config.steps * learner.batches * learner.epochs
  yield (
    updates <= _MOST_COUNT,
    f'steps={config.steps}, learner.batches={learner.batches} and '
    f'learner.epochs={learner.epochs}, whose product, {updates:,} optimizer '
    f'steps, is above {_MOST_COUNT:,}; give less',
  )
  yield (
    optim.decay == 'constant' or updates > optim.warmup_steps or not updates,
    f'optim.decay={optim.decay!r} over {updates} optimizer steps, of which '
    f'optim.warmup_steps={optim.warmup_steps} leave none; give fewer',
  )
  yield (
    optim.lr * optim.weight_decay < 1,
    f'optim.lr={optim.lr} and optim.weight_decay={optim.weight_decay}, whose '
    'product is what an update takes from a weight: all of it, or more; give '
    'less',
  )


def _checks_of_optimizer(optim: Any):
  """As `checks`, of what the chosen optimizer can do."""
  names, own = ', '.join(_OPTIMIZERS), ':' in optim.name
  near = nearest(optim.name, _OPTIMIZERS)
  yield (
    own or optim.name in _OPTIMIZERS,
    f'optim.name={optim.name!r}{near}; give one of {names}, or '
    "'module:function' of your own",
  )
  standard, read = type(optim)(), _OPTIMIZERS.get(optim.name, ())
  for field in ('b1', 'b2', 'epsilon'):
    value, usual = getattr(optim, field), getattr(standard, field)
    yield (
      field in read or value == usual,
      f'optim.{field}={value} with optim.name={optim.name!r}, which does not '
      f'read it; give optim.{field}={usual}'
      + (', and its own arguments in optim.kwargs' if own else ''),
    )
  for field in ('brake', 'moments', 'overshoot_every_steps'):
    value = getattr(optim, field)
    yield (
      own or optim.name == 'adamw' or value == getattr(standard, field),
      f'optim.{field}={value!r} with optim.name={optim.name!r}: it needs the '
      "moments of Adam for every parameter; give optim.name='adamw', or "
      f'optim.{field}={getattr(standard, field)!r}',
    )


def _checks_of_warm_up(warm_up: Any):
  """As `checks`, of the supervised updates."""
  yield (
    bool(warm_up.demonstrations) or not warm_up.steps,
    f"warm_up.demonstrations='' with warm_up.steps={warm_up.steps}; name where "
    'the demonstrations come from, or give warm_up.steps=0',
  )


def _checks_of_tables(values: dict[str, Any]):
  """As `checks`, of the fields in the tables above."""
  for name, least in _LEAST.items():
    value = values[name]
    yield value >= least, f'{name}={value}; give {least} or more'
  for name in _ABOVE_0:
    yield (
      values[name] >= _LEAST_FLOAT,
      f'{name}={values[name]}; give more than 0, at least {_LEAST_FLOAT}',
    )
  for name, most in _MOST.items():
    yield values[name] <= most, f'{name}={values[name]}; give at most {most}'
  for name, known in _KNOWN.items():
    value = values[name]
    yield value in known, f'{name}={value!r}; give one of {", ".join(known)}'


def _checks_of_numbers(values: dict[str, Any]):
  """As `checks`: int32 and float32 hold every number, wherever it stands.

  Arguments of methods and of chat templates are another's: infinity may say
  there that something is off. No number of theirs is NaN.
  """
  for field, value in values.items():
    most = _MOST.get(field, _MOST_COUNT)
    for name, number in _numbers(field, value):
      if _ARGUMENT.search(name):
        # Not by `math.isnan`: no float holds an integer of 400 digits.
        yield number == number, f'{name}={number}; give a finite number'
      elif isinstance(number, int):
        yield abs(number) <= most, f'{name}={number}; give at most {most}'
      else:  # the comparison is false of NaN
        ok = abs(number) <= _MOST_FLOAT
        yield ok, f'{name}={number}; give a finite number'


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int | float]]:
  """Every number in a value, which may hold others, with its name."""
  if isinstance(value, int | float):
    yield name, value
  elif isinstance(value, dict):
    for key, inner in value.items():
      yield from _numbers(f'{name}.{key}', inner)
  elif isinstance(value, list | tuple):
    for place, inner in enumerate(value):
      yield from _numbers(f'{name}[{place}]', inner)


_KNOWN_OF_REWARDS = {
  'where': ('auto', 'here', 'workers'),
  'on_failure': ('invalid', 'reward'),
}


def _checks_of_lora(lora):
  yield (
    not lora.rank or len(lora.targets) > 0,
    f'lora.rank={lora.rank} with no lora.targets, so that there is '
    "nothing to train; give patterns, such as ('attention/*',)",
  )
  yield (
    lora.rank > 0 or lora.base_dtype not in ('int8', 'nf4'),
    f"lora.base_dtype='{lora.base_dtype}' with lora.rank=0, which trains the "
    "weights themselves; give lora.rank, or 'float32'",
  )


def _checks_of_teacher(config):
  teacher, lora = config.teacher, config.lora
  is_base = lora.rank > 0 and teacher.path == config.model.path
  for name, is_usual in (
    ('dtype', teacher.dtype == 'float32'),
    ('offload', not teacher.offload),
  ):
    given = f'teacher.{name}={getattr(teacher, name)!r}'
    yield (
      is_usual or teacher.path != '',
      f'{given} with teacher.path empty, so that there is no teacher; give its '
      'path, or leave the field out',
    )
    yield (
      is_usual or not is_base,
      f'{given}, but the teacher is what lies beside the adapters, which is '
      'there already (teacher.path is model.path); leave the field out',
    )


def _checks_of_rewards(rewards: Any):
  """As `checks`, of the reward functions."""
  yield len(rewards) > 0, 'no rewards; give at least one'
  yield (
    any(reward.weight for reward in rewards),
    'weight=0 for each of its rewards, so that every completion earns 0 and '
    'there is nothing to learn from; give one of them another weight',
  )
  labels = [reward.label or reward.name for reward in rewards]
  for place, reward in enumerate(rewards):
    where, label = f'rewards[{place}]', labels[place]
    yield (
      bool(reward.name),
      f"{where}.name=''; name a function of grpo_jax.rewards, or your own as "
      "'module:function'",
    )
    field = 'label' if reward.label else 'name'
    yield (
      label not in labels[:place],
      f'{where}.{field}={label!r}, which is rewards[{labels.index(label)}] '
      'already; give each function once, with the sum of its weights, or '
      'different labels',
    )
    yield (
      not any(
        label == other + end for other in labels for end in REWARD_METRICS
      ),
      f'{where}.{field}={label!r}, which is what a metric of another reward is '
      'called; give another label',
    )
    for name, known in _KNOWN_OF_REWARDS.items():
      value = getattr(reward, name)
      yield (
        value in known,
        f'{where}.{name}={value!r}; give one of {", ".join(known)}',
      )
    yield (
      reward.on_failure == 'reward' or not reward.failed_reward,
      f'{where}.failed_reward={reward.failed_reward} with on_failure='
      "'invalid', which leaves the completion out; give on_failure='reward'",
    )


def _checks_of_agent(config: Any):
  """As `checks`, of somebody's agent."""
  agent, environment = config.agent, config.environment
  given = [x for x in ('command', 'function') if getattr(agent, x)]
  if environment.name != 'agent':
    yield (
      not given,
      f'agent.{"".join(given[:1])} with environment.name={environment.name!r}, '
      "which does not play it; give environment.name='agent'",
    )
    return
  yield (
    len(given) == 1,
    "environment.name='agent' with "
    + ('agent.command and agent.function' if given else 'no agent')
    + '; give one of agent.command and agent.function',
  )
  for name, of in (
    ('kwargs', 'function'),
    ('variables', 'command'),
    ('readable', 'command'),
  ):
    yield (
      not getattr(agent, name) or of in given,
      f'agent.{name}={getattr(agent, name)!r:.60} without agent.{of}, to which '
      'it belongs; leave it out',
    )
  yield (
    all(isinstance(x, str) for x in agent.variables.values()),
    f'agent.variables={agent.variables!r:.80}, which must be texts by names',
  )
  yield (
    not environment.kwargs,
    f'environment.kwargs={environment.kwargs!r:.60} with environment.name='
    "'agent'; give agent.kwargs",
  )
  yield (
    agent.trust_agent or 'environment' not in [x.name for x in config.rewards],
    "a reward with name='environment' that an agent would give itself; name "
    'rewards that read what it has said, or give agent.trust_agent=True if no '
    'code of the policy runs in it',
  )


def _checks_of_environment(config: Any):
  """As `checks`, of what the policy talks to."""
  fields, rewards = config.environment, [x.name for x in config.rewards]
  if not fields.name:
    yield (
      not fields.others,
      f'environment.others={fields.others!r:.60} without environment.name; '
      'name the usual one',
    )
    yield (
      'environment' not in rewards,
      "a reward with name='environment' without environment.name; name the "
      'environment',
    )
    return
  yield (
    config.data.chat,
    f'environment.name={fields.name!r} with data.chat=False, but what it says '
    'are messages; give data.chat=True',
  )
  widest = max(config.data.completion_buckets or (fields.context_tokens, 1))
  yield (
    fields.context_tokens <= widest,
    f'environment.context_tokens={fields.context_tokens} above the largest of '
    f'data.completion_buckets={config.data.completion_buckets}, which hold an '
    'episode; add a bucket, or give 0',
  )
  for name, value, usual in (
    ('sampler.stop_strings', config.sampler.stop_strings, ()),
    ('data.completion_prefix', config.data.completion_prefix, ''),
    ('data.too_long', config.data.too_long, 'refuse'),
  ):
    yield (
      value == usual,
      f'{name}={value!r} with environment.name={fields.name!r}, which cannot '
      f'be together; give {name}={usual!r}',
    )


def _checks_of_sampler(sampler: Any):
  """As `checks`, of how completions are drawn."""
  yield (
    sampler.temperature > 0,
    f'sampler.temperature={sampler.temperature}, under which there is nothing '
    'to learn from; give more than 0 (evaluations are greedy anyway)',
  )
  yield (
    sampler.temperature >= _LEAST_TEMPERATURE,
    f'sampler.temperature={sampler.temperature}, by which float32 cannot '
    f'divide logits; give {_LEAST_TEMPERATURE} or more',
  )
  yield (
    sampler.min_tokens < sampler.max_tokens,
    f'sampler.min_tokens={sampler.min_tokens} with sampler.max_tokens='
    f'{sampler.max_tokens}, so that no completion could end; give less',
  )
  yield (
    all(sampler.stop_strings),
    f'sampler.stop_strings={sampler.stop_strings!r}, but the empty text is in '
    'every text, so that each completion would end at once; leave it out',
  )
  for name, value, one in (
    ('top_k', sampler.top_k, 1),
    ('min_p', sampler.min_p, 1.0),
  ):
    yield (
      value != one,
      f'sampler.{name}={value}, which draws the likeliest token alone, so that '
      'all completions of a prompt are the same; give 0 to turn it off, or '
      + ('more' if name == 'top_k' else 'less'),
    )
  yield (
    sampler.group > 1 or not sampler.resample_rounds,
    f'sampler.resample_rounds={sampler.resample_rounds} with sampler.group=1, '
    'where the completions of a group always earn the same; give 0, or a '
    'larger group',
  )
  tokens = sampler.prompts * sampler.group * sampler.max_tokens
  yield (
    tokens <= _MOST_COUNT,
    f'sampler.prompts={sampler.prompts}, sampler.group={sampler.group} and '
    f'sampler.max_tokens={sampler.max_tokens}, whose product, {tokens:,} '
    f'tokens of a rollout, is above {_MOST_COUNT:,}; give less',
  )


def _checks_of_generator(config: Any):
  """As `checks`, of devices that sample while others learn."""
  generator, ahead = config.generator, config.sampler.ahead
  yield (
    generator.every <= ahead + 1,
    f'generator.every={generator.every} with sampler.ahead={ahead}, whose '
    f'rollouts need newer versions; give at most {ahead + 1}',
  )
  yield (
    generator.updates == 'between' or ahead > 0,
    "generator.updates='inflight' with sampler.ahead=0, where no version comes "
    "while a rollout is drawn; give 'between', or sampler.ahead=1",
  )
  prompts = config.sampler.prompts
  yield (
    prompts % generator.parts == 0,
    f'generator.parts={generator.parts} with sampler.prompts={prompts}, which '
    'it does not divide; give a divisor',
  )
  yield (
    not generator.listen or _is_address(generator.listen),
    f'generator.listen={generator.listen!r}; give HOST:PORT, as in '
    "'0.0.0.0:8470'",
  )
  yield (
    not generator.listen
    or bool(generator.secret)
    or _is_loopback(generator.listen.rpartition(':')[0]),
    f'generator.listen={generator.listen!r} without generator.secret, where '
    'other machines could take part; give a file with a secret, or listen at '
    '127.0.0.1',
  )
  yield (
    not (generator.listen and generator.devices),
    f'generator.listen={generator.listen!r} with generator.devices='
    f'{generator.devices}; either jobs sample or devices of the run; give '
    'generator.devices=0',
  )


def _checks_of_engine(config: Any):
  """As `checks`, of servers that sample."""
  engine, sampler = config.engine, config.sampler
  is_http = engine.kind == 'http'
  yield (
    is_http == bool(engine.urls),
    f'engine.kind={engine.kind!r} with engine.urls={engine.urls!r}; give '
    "addresses with 'http', and none without",
  )
  yield _check_of_urls('engine.urls', engine.urls)
  generator = config.generator
  yield (
    not is_http or not (generator.devices or generator.listen),
    "engine.kind='http' with generator.devices or generator.listen; either "
    'servers sample or devices of yours; give one of them',
  )
  yield (
    not is_http or generator.updates == 'between',
    "engine.kind='http' with generator.updates='inflight'; give 'between', by "
    'which what is under way ends with the weights that it began with',
  )
  filters = {
    'top_k': sampler.top_k > 0,
    'top_p': sampler.top_p < 1,
    'min_p': sampler.min_p > 0,
    'min_tokens': sampler.min_tokens > 0,
  }
  some = [f'sampler.{name}' for name, is_on in filters.items() if is_on]
  yield (
    not is_http or not some,
    f"engine.kind='http' with {', '.join(some)}: servers do not tell what such "
    'filters leave of the policy, without which it cannot be learned; give '
    'top_k=0, top_p=1, min_p=0 and min_tokens=0',
  )
  yield (
    not is_http or engine.dialect != 'vllm' or sampler.temperature <= 2,
    f'sampler.temperature={sampler.temperature:g}, above the 2 that vLLM '
    'takes; give at most 2',
  )


def _checks_of_taught(config: Any):
  """As `checks`, of servers that are the teacher."""
  teacher, temperature = config.teacher, config.sampler.temperature
  yield (
    not (teacher.urls and teacher.path),
    f'teacher.urls={teacher.urls!r} with teacher.path={teacher.path!r}; either '
    'servers are the teacher or a model of yours; give one of them',
  )
  yield _check_of_urls('teacher.urls', teacher.urls)
  yield (
    not teacher.urls or temperature == 1,
    f'teacher.urls with sampler.temperature={temperature:g}, but servers score '
    'at temperature 1; give 1, or teacher.path',
  )


def _check_of_urls(name: str, urls: Any) -> tuple[bool, str]:
  text = f'{name}={urls!r}; give each as http://HOST:PORT, without a path'
  return all(map(_is_url, urls)), text


def _is_url(url: str) -> bool:
  """Whether a text is http://HOST:PORT.

  >>> _is_url('http://127.0.0.1:8000'), _is_url('127.0.0.1:8000')
  (True, False)
  """
  try:
    parts = urllib.parse.urlsplit(url)
    return (
      parts.scheme in ('http', 'https')
      and bool(parts.hostname)
      and (parts.port or 1) > 0
      and not (parts.path.strip('/') or parts.query or parts.username)
    )
  except ValueError:
    return False


def _is_loopback(host: str) -> bool:
  """Whether only this machine reaches a host."""
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host.strip('[]')).is_loopback
  except ValueError:
    return False


def _is_address(text: str) -> bool:
  """Whether it is HOST:PORT, such as '[::1]:8470'."""
  host, colon, port = text.rpartition(':')
  return bool(host and colon) and port.isdecimal() and int(port) < 2**16


def _checks_of_fields(fields: dict[str, Any]):
  """As `checks`, of the functions for fields of a batch."""
  for name, value in fields.items():
    is_function = isinstance(value, str) and (':' in value or value[:1] == '<')
    yield (
      is_function,
      f'learner.fields[{name!r}]={value!r:.60}; name a function, as in '
      "'my_lab.losses:by_token'",
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
  yield (
    data.too_long in ('refuse', 'drop'),
    f"data.too_long={data.too_long!r}; give 'refuse' or 'drop'",
  )
  yield (
    data.last_turn in ('answer', 'prefill'),
    f"data.last_turn={data.last_turn!r}; give 'answer' or 'prefill'",
  )
  yield (
    data.prompt_field != '',
    "data.prompt_field=''; name the field of a record that has the prompt",
  )
  yield (
    data.prompt_field != data.answer_field,
    f'data.prompt_field and data.answer_field both {data.prompt_field!r}, so '
    'that the model would read the answer; name two fields, or give '
    "data.answer_field='' if no reward needs an answer",
  )
  for field in ('train', 'heldout'):
    listed = getattr(data, field)
    for place, source in enumerate(() if isinstance(listed, str) else listed):
      yield (
        source.name != '',
        f"data.{field}[{place}].name=''; name where its prompts come from",
      )
  yield (
    data.train != '',
    "data.train=''; name where the prompts come from, such as 'arithmetic'",
  )
  if not isinstance(data.heldout, str):
    yield len(data.heldout) > 0, "no source in data.heldout; give one, or ''"
    for place, source in enumerate(data.heldout):
      yield (
        source.weight == 1,
        f'data.heldout[{place}].weight={source.weight}, but held-out sources '
        'are read one after the other and have no weights; leave it out',
      )
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
