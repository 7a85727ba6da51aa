"""How to divide devices between those that sample and those that learn.

On one host `config.generator.devices=n` lets the last n devices sample while
the others learn. Of several slices, or nodes, some may be those of jobs that
sample for the run. Each side has the memory of its devices for itself, and a
step takes as long as the slower of both (see `pacing`). The bounds of
`roofline` are reached by neither, and by sampling to another share than by
learning, so these shares are assumed.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import math
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.planning import pacing
from grpo_jax.planning import plan as plans
from grpo_jax.planning import search
from grpo_jax.planning.plan import Jobs
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import Topology

_Best = Callable[[], tuple[Config, Plan]]
_MOST_TRIED = 16  # numbers of devices, or of jobs, that sample


class Reached(NamedTuple):
  """Which shares of their bounds programs reach."""

  sampling: float = 0.5
  learning: float = 0.4


class Division(NamedTuple):
  """A config that divides the devices, and what a rollout takes.

  Attributes:
    config: With `generator.devices`; 0: all sample, and then learn, or jobs
      sample.
    plan: By arithmetic.
    draw_secs: Of a rollout, at the assumed share of its bound.
    learn_secs: Of its updates, likewise.
    step: See `pacing.step`.
  """

  config: Config
  plan: Plan
  draw_secs: float
  learn_secs: float
  step: pacing.Step

  @property
  def jobs(self) -> int:
    """How many jobs sample."""
    return self.plan.jobs.number if self.plan.jobs else 0

  @property
  def sampling(self) -> int:
    """How many devices sample alone."""
    jobs = self.plan.jobs
    if jobs:
      return jobs.number * jobs.topology.number
    return self.config.generator.devices

  @property
  def waits(self) -> str:
    """Who waits for the other: 'sampling' or 'learning'; '' for neither."""
    sampling, learning = self.step.sampling_waits, self.step.learning_waits
    if max(sampling, learning) < 0.01 * self.step.secs:
      return ''
    return 'sampling' if sampling > learning else 'learning'

  @property
  def waits_secs(self) -> float:
    """For how long, of a step."""
    return max(self.step.sampling_waits, self.step.learning_waits)


def divide(
  config: Config, topology: Topology, reached: Reached | None = None
) -> list[Division]:
  """All divisions of some machines, by arithmetic: the best first.

  For each number of devices that sample, the fastest mesh of those that learn,
  and then the fastest `sampler.tensor` of the others; and the fastest mesh of
  all in turn. On a single device there is nothing to divide, but rollouts may
  be drawn ahead on it.

  Args:
    config: Of the run; its meshes, and the rows of its updates are replaced. It
      is drawn ahead by one rollout at least.
    topology: The machines. Of several slices, or nodes, whole ones sample.
    reached: None: those that `Reached` has.

  Returns:
    Ranked: what fits before what does not, then by the time of a step.

  Raises:
    ValueError: No division can be built, or servers sample.
  """
  plans.check_not_served(config)
  reached = reached or Reached()
  found, problem = [], ''
  for best in _tried(config, topology):
    try:
      found.append(_division(*best(), reached))
    except ValueError as error:
      problem = plain_text.said(error)
  if not found:
    raise ValueError(f'No mesh on {topology.name} can be built: {problem}')
  return sorted(found, key=lambda one: (not one.plan.fits, one.step.secs))


def indivisible(topology: Topology) -> str:
  """Why devices cannot be divided, in a sentence; '' if they can be."""
  if topology.groups > 1 or topology.hosts == 1 and topology.number > 1:
    return ''
  if topology.number == 1:
    return f'{topology.name} has one device, which samples and learns.'
  return (
    f'{topology.name} is one slice of {topology.hosts} hosts, which is not cut '
    'in pieces: config.generator.devices divides the devices of one process, '
    'and jobs that sample have slices of their own (--num_slices=2 or more, '
    'or --generators).'
  )


def _tried(config: Config, topology: Topology) -> Iterator[_Best]:
  """For each division that is tried a function that makes the best of it."""
  yield functools.partial(_in_turn, _changed(config, 0, 0), topology)
  ahead = max(1, config.sampler.ahead)
  if topology.number == 1:
    yield functools.partial(_in_turn, _changed(config, 0, ahead), topology)
  elif topology.groups > 1:
    changed = _changed(config, 0, ahead)
    for number in _numbers(topology.groups):
      yield functools.partial(_with_jobs, changed, topology, number)
  else:
    for number in _numbers(topology.number):
      yield functools.partial(_apart, _changed(config, number, ahead), topology)


def _numbers(number: int) -> range:
  """How many of so many may sample."""
  step = math.ceil(number / _MOST_TRIED)
  return range(step, number, step)


def _changed(config: Config, devices: int, ahead: int) -> Config:
  """The config with so many devices that sample, and so far ahead."""
  generator, sampler = config.generator, config.sampler
  sharing = {} if ahead else {'updates': 'between'}
  every = min(generator.every, ahead + 1)
  return dataclasses.replace(
    config,
    generator=dataclasses.replace(
      generator, devices=devices, every=every, listen='', **sharing
    ),
    sampler=dataclasses.replace(sampler, ahead=ahead, tensor=0),
  )


def _in_turn(config: Config, topology: Topology) -> tuple[Config, Plan]:
  """The fastest mesh of devices that sample and learn."""
  found = _learners(config, topology, 0, None)
  return min(found, key=lambda one: (not one[1].fits, one[1].bound_secs))


def _apart(config: Config, topology: Topology) -> tuple[Config, Plan]:
  """The fastest meshes of devices of one process."""
  own = config.generator.devices
  found = _learners(config, topology, own, None)
  best, _ = min(found, key=lambda one: _rank(one[1], learns=True))
  return _best_tensor(best, topology, own, None)


def _with_jobs(
  config: Config, topology: Topology, number: int
) -> tuple[Config, Plan]:
  """The fastest meshes if so many slices, or nodes, are those of jobs."""
  jobs = Jobs(number, topology.some(1))
  rest = topology.some(topology.groups - number)
  found = _learners(config, rest, 0, jobs)
  best, _ = min(found, key=lambda one: _rank(one[1], learns=True))
  return _best_tensor(best, rest, jobs.topology.number, jobs)


def _learners(
  config: Config, topology: Topology, own: int, jobs: Jobs | None
) -> list[tuple[Config, Plan]]:
  """All meshes of the devices that learn.

  Raises:
    ValueError: There are none; that of the last one.
  """

  def meshes(expert):
    for one in search.candidates(config, topology, expert, own):
      # While the learner is looked for, others only have to be there.
      tensor = int(bool(own or jobs))
      sampler = dataclasses.replace(one.sampler, tensor=tensor)
      yield dataclasses.replace(one, sampler=sampler)

  found = _planned(meshes(1), topology, jobs)
  # Experts are split if the model has some, which the first plan tells.
  if found[0][1].counted.model.experts:
    for size in search.divisors(search.MOST_SENDING)[1:]:
      with contextlib.suppress(ValueError):
        found += _planned(meshes(size), topology, jobs)
  return found


def _best_tensor(
  config: Config, topology: Topology, number: int, jobs: Jobs | None
) -> tuple[Config, Plan]:
  """The fastest of those that split the weights of whoever samples."""
  tensors = [
    tensor
    for tensor in search.divisors(number)
    if tensor <= search.MOST_SENDING
  ]
  configs = (
    dataclasses.replace(
      config, sampler=dataclasses.replace(config.sampler, tensor=tensor)
    )
    for tensor in tensors
  )
  found = _planned(configs, topology, jobs)
  return min(found, key=lambda one: _rank(one[1], learns=False))


def _planned(
  configs: Iterable[Config], topology: Topology, jobs: Jobs | None
) -> list[tuple[Config, Plan]]:
  """Those of some configs that can be planned, by arithmetic.

  Raises:
    ValueError: None of them can; that of the last one.
  """
  found: list[tuple[Config, Plan]] = []
  problem = ValueError('there are no devices for it')
  for one in configs:
    try:
      found.append((one, plans.plan(one, topology, estimate=True, jobs=jobs)))
    except ValueError as error:
      problem = error
  if not found:
    raise problem
  return found


def _rank(made: Plan, learns: bool) -> tuple[bool, float]:
  """What fits, then the fast ones; of those that learn, or that sample."""
  fits = all(one.fits(made.capacity) for one in made.side(learns))
  return not fits, made.learn_secs if learns else made.draw_secs


def _division(config: Config, made: Plan, reached: Reached) -> Division:
  return Division(
    config,
    made,
    made.draw_secs / reached.sampling,
    made.learn_secs / reached.learning,
    made.step(*reached),
  )
