"""The reward functions of a run, and the processes that call them."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import inspect

import jax

from grpo_jax import data
from grpo_jax import rewards
from grpo_jax.config import Config
from grpo_jax.config import Reward
from grpo_jax.episodes import reward_model
from grpo_jax.hosts import joining
from grpo_jax.run.build.specs import WorkersSpec
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

_MOST_WORKERS = 16  # by default, however many cores there are
_GIB = 2**30


def functions(
  config: Config,
  objects: Objects = NOTHING,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[rewards.WeightedReward, ...]:
  """The reward functions of a config, as `rewards.score` takes them.

  Args:
    config: Names them, with weights and arguments.
    objects: May have others in their places.
    mesh: Of the run, for a reward model; None: one device.

  Returns:
    One per reward of the config, in order.

  Raises:
    ValueError: There is no such function, or it does not take its arguments.
  """
  found, owns = [], objects.rewards or (None,) * len(config.rewards)
  for place, (reward, own) in enumerate(zip(config.rewards, owns, strict=True)):
    where = f'config.rewards[{place}].kwargs'
    found.append(_function(reward, own, where, mesh))
    _check_total_secs(found[-1], where, config.workers.time_limit_secs)
  return tuple(found)


def _function(
  reward: Reward,
  own: rewards.WeightedReward | None,
  where: str,
  mesh: jax.sharding.Mesh | None,
) -> rewards.WeightedReward:
  failed = reward.failed_reward if reward.on_failure == 'reward' else None
  if own is not None:
    # Its weight and the rest are in the config, which is saved and compared.
    found = own
    auto, name, kwargs = 'here', '', reward.kwargs
  elif reward.name == reward_model.NAME:
    own_kwargs = dict(reward.kwargs)
    if isinstance(path := own_kwargs.get('path'), str):
      own_kwargs['path'] = data.local_model(path)
    judge = reward_model.from_kwargs(own_kwargs, mesh)
    found = rewards.WeightedReward(reward.name, judge)
    auto, name, kwargs = 'here', '', {}
  else:
    function = rewards.resolve(reward.name)
    found = rewards.WeightedReward(reward.name, function)
    auto = 'here' if rewards.is_bounded(function) else 'workers'
    name, kwargs = reward.name, reward.kwargs
  rewards.check_arguments(found.function, kwargs, where)
  return dataclasses.replace(
    found,
    name=reward.label or found.name,
    weight=reward.weight,
    where=auto if reward.where == 'auto' else reward.where,
    failed=failed,
    required=reward.required,
    kwargs=kwargs,
    imported_as=name,
  )


def _check_total_secs(
  reward: rewards.WeightedReward, where: str, limit_secs: float
) -> None:
  """Refuses a limit of the function's own that a worker would not reach."""
  try:
    parameters = inspect.signature(reward.function).parameters
  except (TypeError, ValueError):  # some functions written in C have none
    return
  parameter = parameters.get('total_secs')
  if reward.where != 'workers' or parameter is None:
    return
  secs = reward.kwargs.get('total_secs', parameter.default)
  if secs >= limit_secs:
    raise ValueError(
      f'{where} lets a call take total_secs={secs}, but workers end it after'
      f' config.workers.time_limit_secs={limit_secs}; give less of the one, or'
      ' more of the other.'
    )


def warnings(functions: Sequence[rewards.WeightedReward]) -> list[str]:
  """What a person must know of the rewards before a run: a sentence each."""
  found = [
    rewards.check_arguments(reward.function, reward.kwargs, reward.name)
    for reward in functions
  ]
  return [text for text in found if text]


def workers_spec(config: Config) -> WorkersSpec:
  """The limits of the processes that call rewards."""
  limits = config.workers
  return WorkersSpec(
    limits.number or min(joining.own_cores(), _MOST_WORKERS),
    limits.time_limit_secs,
    int(limits.memory_limit_gib * _GIB),
    limits.start_limit_secs,
    limits.wall_limit_secs or None,
  )


@contextlib.contextmanager
def workers(
  spec: WorkersSpec, functions: Sequence[rewards.WeightedReward]
) -> Iterator[rewards.Workers | None]:
  """The processes that call reward functions; they end with the context.

  They start at once, and import what they call while this process goes on.

  Args:
    spec: Their limits.
    functions: What `functions` returned.

  Yields:
    A pool; None if no function needs one.
  """
  remote = [reward for reward in functions if reward.where == 'workers']
  if not remote:
    yield None
    return
  with rewards.Workers(**dataclasses.asdict(spec)) as pool:
    pool.start([reward.imported_as or reward.function for reward in remote])
    yield pool
