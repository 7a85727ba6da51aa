"""The programs of a run, lowered for a topology that need not be there."""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.learner import layouts
from grpo_jax.learner import lowering
from grpo_jax.learner import updates
from grpo_jax.planning import topologies
from grpo_jax.run.build import build
from grpo_jax.run.build.build import Abstract


class Lowered(NamedTuple):
  """A program that is ready to be compiled.

  Attributes:
    lowered: Of JAX; a list of pairs (lowered, calls), if what has one name here
      is several programs, one after another.
    trips: How often a loop runs whose number of trips is data.
  """

  lowered: Any
  trips: int

  @property
  def parts(self) -> list[tuple[Any, int]]:
    """Each program of which this consists, and how often it is called."""
    one = self.lowered
    return one if isinstance(one, list) else [(one, 1)]


def lowered(
  config: Config, topology: topologies.Topology, program: str
) -> Lowered:
  """Lowers one program.

  Args:
    config: Of the run; its mesh lies over the topology.
    topology: See `topologies.named`.
    program: One of `names`.

  Raises:
    ValueError: It cannot be built; the message says why.
  """
  mesh = topologies.mesh(topology, config.mesh)
  return of_run(build.abstract(config, mesh))[program]()


def of_run(parts: Abstract) -> dict[str, Callable[[], Lowered]]:
  """For each program of a run a function that lowers it.

  The loop over micro-batches and the loop over tokens run as often as the
  largest rollout needs. What the warm-up runs is left out.
  """
  run, update, example = parts.run, parts.updater, parts.example()
  sampler = run.draw
  drawing = parts.engine.lowering(
    update.joined(update.compiled.abstract.params),
    sampler.prompts,
    sampler.group,
    run.sampling,
    sampler.max_tokens,
  )
  trips = {'decode': sampler.max_tokens}  # the others have no such loop
  found: dict[str, Callable[[], Lowered]] = {
    name: lambda name=name, lower=lower: Lowered(lower(), trips.get(name, 1))
    for name, lower in drawing.items()
  }
  # If a run measures overshoot in some rollouts, it does so in rollout 0.
  lower = functools.partial(lowering.lowering, update, update.layout, example)
  learning = lower(1)
  if update.spec.watch_steps > 1:
    watched = lower(0)
    learning['watched_step'] = watched['train_step']
  chosen = next(updates.optimizer_batches(update.spec, sampler.prompts, 0))
  _, used = layouts.abstract_stack(
    update.compiled, example, chosen, update.layout
  )
  found |= {
    name: lambda lower=lower: Lowered(lower(), used)
    for name, lower in learning.items()
  }
  return found
