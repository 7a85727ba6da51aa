"""Tries meshes for a run, and ranks them."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import Mesh
from grpo_jax.planning import plan as plans
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import Topology

_MOST_TENSOR = 16
_HOPELESS = 1.5  # an estimate this much above the memory is not compiled


class Candidate(NamedTuple):
  """A config with another mesh and perhaps other micro-batches."""

  config: Config
  plan: Plan


def best(
  config: Config,
  topology: Topology,
  number: int,
  estimate: bool = False,
  tell: Callable[..., None] = lambda *_: None,
) -> list[Candidate]:
  """The best meshes of a run.

  All are counted by arithmetic, and ranked: those that fit before the others,
  and the fast ones first. Then they are compiled in this order, until so many
  fit: a program of a large model takes minutes, so few are to be compiled.

  Args:
    config: Of the run; its mesh is replaced.
    topology: The machines.
    number: How many that fit are wanted.
    estimate: Whether arithmetic is enough.
    tell: See `compiling.compile_all`.

  Returns:
    Those that were compiled, ranked; all of them, by arithmetic alone, where
    there is no compiler for the topology.

  Raises:
    ValueError: No mesh can be built.
  """
  counted: list[Candidate] = []
  seen, problem = set(), ''
  for one in candidates(config, topology):
    try:
      made = plans.plan(one, topology, estimate=True)
    except ValueError as error:
      problem = str(error)
      continue
    # Several numbers of rows may come to the same micro-batches.
    what = tuple(made.mesh.values()), made.counted.rows
    if what not in seen:
      counted.append(Candidate(one, made))
    seen.add(what)
  if not counted:
    raise ValueError(f'No mesh on {topology.name} can be built: {problem}')
  counted.sort(key=_rank)
  if estimate or not topology.is_tpu:
    return counted
  found: list[Candidate] = []
  for one in counted:
    if one.plan.largest.bytes > _HOPELESS * one.plan.capacity:
      continue
    with contextlib.suppress(ValueError):  # such as a mesh that cannot be laid
      made = plans.plan(one.config, topology, tell=tell)
      found.append(one._replace(plan=made))
    if sum(candidate.plan.fits for candidate in found) >= number:
      break
  return sorted(found, key=_rank) or counted


def _rank(one: Candidate) -> tuple[bool, float, float]:
  """Those that fit first, then the fast ones, then the small ones."""
  return not one.plan.fits, one.plan.bound_secs, one.plan.largest.bytes


def candidates(config: Config, topology: Topology) -> Iterator[Config]:
  """All configs that are tried.

  `expert` is tried if the config has it. `tensor` stays small, because it sums
  activations in every layer.
  """
  in_slice = topology.number // topology.slices
  experts = _divisors(in_slice) if config.mesh.expert > 1 else [1]
  for tensor in _divisors(in_slice):
    if tensor > _MOST_TENSOR:
      break
    for expert in experts:
      for fsdp in _divisors(in_slice):
        data, rest = divmod(in_slice, tensor * expert * fsdp)
        if rest or not data:
          continue
        mesh = Mesh(data, fsdp, tensor, expert, slices=topology.slices)
        shards = data * fsdp * expert * topology.slices
        for micro_rows in {config.learner.micro_rows, shards}:
          learner = dataclasses.replace(config.learner, micro_rows=micro_rows)
          yield dataclasses.replace(config, mesh=mesh, learner=learner)


def _divisors(number: int) -> list[int]:
  return [size for size in range(1, number + 1) if number % size == 0]
