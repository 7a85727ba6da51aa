"""What a config alone says of a run to a person, before JAX is imported.

Importing JAX and Flax takes seconds. Nothing here needs them, so a person sees
within a second whether the command does what was meant.
"""

import os

from grpo_jax import config as config_lib
from grpo_jax import monitor
from grpo_jax.data import hub
from grpo_jax.monitor import formatting
from grpo_jax.monitor import screen
from grpo_jax.monitor import table
from grpo_jax.monitor.table import Still


def start(
  config: config_lib.Config, workdir: str | os.PathLike, is_first: bool = True
) -> monitor.Screen:
  """Opens the screen of a run, and shows what the config alone says of it.

  Args:
    config: Says what the run does.
    workdir: The folder of the run, as it was typed.
    is_first: Whether this is the process that shows anything.

  Returns:
    A `Screen`, which the caller closes; `Monitor` uses it further.
  """
  if not is_first:
    return monitor.quiet()
  about = monitor.About(config.steps, still(config), note(config))
  made = monitor.Screen(screen.display_for(config.log.display, about))
  made.line('\n'.join(facts(config, workdir)))
  return made


def monitored(config: config_lib.Config) -> monitor.Options:
  """What is shown of a run, where it goes, and when a number alarms."""
  log = config.log
  dtypes = {
    'model.residual_dtype': config.model.residual_dtype,
    'model.compute_dtype': config.model.compute_dtype,
  }
  return monitor.Options(
    log.display,
    log.samples,
    log.tensorboard,
    log.wandb_project,
    log.wandb_mode,
    log.mlflow_experiment,
    log.mlflow_uri,
    monitor.Limits(
      log.kl_alarm,
      log.entropy_alarm,
      log.sampler_gap_alarm,
      tuple(name for name, dtype in dtypes.items() if dtype != 'float32'),
      config.sampler.ahead,
    ),
  )


def facts(config: config_lib.Config, workdir: str | os.PathLike) -> list[str]:
  """Lines that each have a name and a fact.

  Args:
    config: Says what the run does.
    workdir: The folder of the run, as it was typed.

  Returns:
    Lines for at least 'run', 'method', 'model', 'data', 'rollouts' and
    'reward'.
  """
  rows = {
    'run': str(workdir),
    'method': _method(config),
    'model': _model(config.model),
    'teacher': config.teacher.path and hub.short(config.teacher.path),
    'data': _data(config),
    'warm-up': _warm_up(config.warm_up),
    'rollouts': _rollouts(config),
    'episodes': _episodes(config.environment),
    'reward': ' + '.join(map(_reward, config.rewards)),
    'held-out': _heldout(config),
  }
  return [screen.fact_line(name, text) for name, text in rows.items() if text]


def note(config: config_lib.Config) -> str:
  """What a reader of sampled completions must know of the data, or ''."""
  train = config.data.train
  names = [train] if isinstance(train, str) else [x.name for x in train]
  if 'arithmetic' in names:
    return 'sums are written backwards'
  return ''


def still(config: config_lib.Config) -> dict[str, Still]:
  """The metrics that are constant under a config.

  With one update per rollout the policy that is updated is the policy that
  sampled: every ratio is 1, nothing is clipped, and their KL is 0.

  Args:
    config: Says how the run learns.

  Returns:
    The value of each of these metrics. `groups` hides a metric only while it
    has this value. One that moves nevertheless is shown: something is wrong, or
    the method clips by something else than the ratio.
  """
  learner, optim = config.learner, config.optim
  fixed = {}
  if optim.decay == 'constant' and not optim.warmup_steps:
    fixed['learning_rate'] = Still(optim.lr, 1e-6 * optim.lr)  # in float32
  if not config.sampler.resample_rounds and not config.sampler.ahead:
    fixed['staleness_steps'] = Still(0.0, 0.0)
    if learner.batches * learner.epochs == 1 and learner.anchor == 'learner':
      # In bfloat16, scoring a token twice moves its ratio by up to 0.006.
      ratio = ('ratio_p01', 'ratio_p99', 'ess_token')
      fixed |= {name: Still(1.0, 0.01) for name in ratio}
      fixed |= {name: Still(0.0, 0.0) for name in table.CLIPPED}
      fixed['kl_old_k3'] = Still(0.0, 0.01)
      # At ratio 1 the value of the loss is the sum of centered advantages.
      fixed['loss'] = Still(0.0, 1e-5)
  return fixed


def _method(config: config_lib.Config) -> str:
  kwargs = config.learner.method_kwargs.items()
  arguments = ', '.join(f'{name}={value!r}' for name, value in kwargs)
  brake = config.optim.brake
  return (
    f'{config.learner.method}({arguments}), learning rate {config.optim.lr:g}'
    + (f', {config.optim.name}' if config.optim.name != 'adamw' else '')
    + (f', brake {brake}' if brake != 'none' else '')
  )


def _model(model: config_lib.Model) -> str:
  if model.path:  # its shape is known once it has been opened
    return hub.short(model.path)
  heads = f'{model.num_heads} heads of {model.head_dim}'
  if model.num_kv_heads != model.num_heads:
    heads += f' ({model.num_kv_heads} for keys and values)'
  return f'{_count(model.num_layers, "layer")}, width {model.width}, {heads}'


def _data(config: config_lib.Config) -> str:
  data = config.data
  if data.train == 'arithmetic':
    return 'built-in sums, written backwards: 47+85= is answered 231'
  names = data.train
  if not isinstance(names, str):
    total = sum(source.weight for source in names)
    names = ', '.join(
      f'{hub.short(one.name)} ({formatting.percent(one.weight / total)} %)'
      for one in names
    )
  chats = ' as chats' if data.chat else ''
  tokenizer = hub.short(data.tokenizer or config.model.path)
  return f'{hub.short(names)}{chats}, tokenizer {tokenizer}'


def _warm_up(warm_up: config_lib.WarmUp) -> str:
  if not warm_up.steps:
    return ''
  return (
    f'{_count(warm_up.steps, "step")} on {warm_up.examples} demonstrations each'
  )


def _rollouts(config: config_lib.Config) -> str:
  sampler, learner = config.sampler, config.learner
  updates = _count(learner.batches * learner.epochs, 'update')
  drawn = f'completions of up to {sampler.max_tokens} tokens'
  if config.environment.name:
    drawn = f'episodes, turns of up to {sampler.max_tokens} tokens'
  return (
    f'{config.steps}, each {sampler.prompts} prompts x {sampler.group} '
    f'{drawn}, {updates}'
  )


def _episodes(environment: config_lib.Environment) -> str:
  if not environment.name:
    return ''
  names = ', '.join([environment.name, *environment.others])
  return f'{names}, up to {_count(environment.max_turns, "turn")}'


def _reward(reward: config_lib.Reward) -> str:
  weight = '' if reward.weight == 1 else f'{reward.weight:g} x '
  arguments = ', '.join(f'{k}={v!r}' for k, v in reward.kwargs.items())
  return f'{weight}{reward.name}' + (f'({arguments})' if arguments else '')


def _heldout(config: config_lib.Config) -> str:
  if not config.data.heldout:
    return ''
  every = config.evaluation.every_steps
  between = f', every {_count(every, "rollout")},' if every else ''
  examples = config.evaluation.examples
  first = 'after the warm-up' if config.warm_up.steps else 'at the start'
  return f'{examples} problems, {first}{between} and at the end'


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}' + ('' if number == 1 else 's')
