"""How to divide devices between those that sample and those that learn.

`config.generator.devices=n` lets the last n devices sample while the others
learn. A step then takes as long as the slower of both, and each has the memory
of its devices for itself. The bounds of `roofline` are reached by neither, and
by sampling to another share than by learning, so these shares are assumed.
"""

import dataclasses
import math
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.planning import plan as plans
from grpo_jax.planning import roofline
from grpo_jax.planning import search
from grpo_jax.planning.plan import LEARNING
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import Topology

_MOST_TRIED = 16  # numbers of devices that sample


class Reached(NamedTuple):
  """Which shares of their bounds programs reach."""

  sampling: float = 0.5
  learning: float = 0.4


class Division(NamedTuple):
  """A config that divides the devices, and what a rollout takes.

  Attributes:
    config: With `generator.devices`; 0: all sample, and then learn.
    plan: By arithmetic.
    draw_secs: Of a rollout, at the assumed share of its bound.
    learn_secs: Of its updates, likewise.
    sync_secs: Of a version on its way to those that sample, at least.
  """

  config: Config
  plan: Plan
  draw_secs: float
  learn_secs: float
  sync_secs: float = 0.0

  @property
  def sampling(self) -> int:
    """How many devices sample alone."""
    return self.config.generator.devices

  @property
  def step_secs(self) -> float:
    """Of a rollout with its updates."""
    if not self.sampling:
      return self.draw_secs + self.learn_secs
    return max(self.draw_secs, self.learn_secs) + self.sync_secs

  @property
  def waits(self) -> str:
    """Who waits for the other: 'sampling' or 'learning'; '' in turn."""
    if not self.sampling:
      return ''
    return 'sampling' if self.draw_secs < self.learn_secs else 'learning'


def divide(
  config: Config, topology: Topology, reached: Reached | None = None
) -> list[Division]:
  """All divisions of some machines, by arithmetic: the best first.

  For each number of devices that sample, the fastest mesh of those that learn,
  and then the fastest `sampler.tensor` of the others; and the fastest mesh of
  all in turn.

  Args:
    config: Of the run; its meshes, and the rows of its updates are replaced.
    topology: The machines. Of several slices, or hosts, whole ones sample.
    reached: None: those that `Reached` has.

  Returns:
    Ranked: what fits before what does not, then by the time of a step.

  Raises:
    ValueError: No division can be built.
  """
  found, problem = [], ''
  for number in (0, *_numbers(topology)):
    try:
      found.append(_best(config, topology, number, reached or Reached()))
    except ValueError as error:
      problem = plain_text.said(error)
  if not found:
    raise ValueError(f'No mesh on {topology.name} can be built: {problem}')
  return sorted(found, key=lambda one: (not one.plan.fits, one.step_secs))


def _numbers(topology: Topology) -> range:
  """How many devices may sample."""
  number, whole = topology.number, 1
  for groups in (topology.slices, topology.hosts):
    if groups > 1:
      whole = number // groups
      break
  tried = math.ceil(number / whole / _MOST_TRIED)
  return range(whole * tried, number, whole * tried)


def _best(
  config: Config, topology: Topology, number: int, reached: Reached
) -> Division:
  """The best division with so many devices that sample."""
  ahead = max(1, config.sampler.ahead) if number else 0
  config = dataclasses.replace(
    config,
    generator=dataclasses.replace(
      config.generator, devices=number, **({} if number else _IN_TURN)
    ),
    sampler=dataclasses.replace(config.sampler, ahead=ahead, tensor=0),
  )
  learning, problem = [], ''
  for size in search.divisors(search.MOST_SENDING):
    # Experts are split if the model has some, which the first plan tells.
    if size > 1 and not (learning and learning[0][1].counted.model.experts):
      break
    for one in search.candidates(config, topology, size, number):
      # While the learner is looked for, others only have to be there.
      sampler = dataclasses.replace(one.sampler, tensor=int(number > 0))
      one = dataclasses.replace(one, sampler=sampler)
      try:
        learning.append((one, plans.plan(one, topology, estimate=True)))
      except ValueError as error:
        problem = plain_text.said(error)
  if not learning:
    raise ValueError(problem)
  if not number:
    best, made = min(learning, key=lambda one: _rank_in_turn(one[1]))
    return _division(best, made, reached)
  best, made = min(
    learning, key=lambda one: _rank(one[1], one[1].learn_secs, learns=True)
  )
  sampling = [(best, made)]
  for tensor in search.divisors(number):
    if tensor <= search.MOST_SENDING:
      sampler = dataclasses.replace(best.sampler, tensor=tensor)
      one = dataclasses.replace(best, sampler=sampler)
      sampling.append((one, plans.plan(one, topology, estimate=True)))
  best, made = min(
    sampling[1:], key=lambda one: _rank(one[1], one[1].draw_secs, learns=False)
  )
  return _division(best, made, reached)


_IN_TURN = {'updates': 'between', 'every': 1}


def _rank(made: Plan, secs: float, learns: bool) -> tuple[bool, float]:
  """What fits, then the fast ones; of those that learn, or that sample."""
  programs = [one for one in made.programs if (one.name in LEARNING) == learns]
  return not all(one.fits(made.capacity) for one in programs), secs


def _rank_in_turn(made: Plan) -> tuple[bool, float]:
  return not made.fits, made.bound_secs


def _division(config: Config, made: Plan, reached: Reached) -> Division:
  return Division(
    config,
    made,
    made.draw_secs / reached.sampling,
    made.learn_secs / reached.learning,
    sync_secs(made) if config.generator.devices else 0.0,
  )


def sync_secs(made: Plan) -> float:
  """The least time in which a version goes to those that sample.

  Each part of it is sent once, by as many devices as both sides have; over the
  links between hosts, if both do not share them. Those that sample then send
  each other what each lacks.
  """
  counted, topology = made.counted, made.topology
  machine = roofline.chip_peaks(topology.chip)
  near, far = counted.mesh.size, counted.sampling_mesh.size
  together = near + far <= counted.joined
  link = machine.ici_bytes if together else machine.dcn_bytes
  cut = math.gcd(near, far)
  secs = counted.weights.published / cut / link if link else 0.0
  lacks = counted.weights.sampled * (1 - 1 / cut)
  return secs + (lacks / machine.ici_bytes if machine.ici_bytes else 0.0)
