"""Tries meshes for a run, and ranks them."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import Mesh
from grpo_jax.config import plain_text
from grpo_jax.planning import plan as plans
from grpo_jax.planning.topologies import Topology

MOST_SENDING = 16  # `tensor` and `expert`: both send activations in each layer
_ERROR = 1.15  # of an estimate of memory
_HOPELESS = 1.5  # an estimate this much above the memory is not compiled


class Candidate(NamedTuple):
  """A config with another mesh, and perhaps other rows and another `remat`."""

  config: Config
  plan: plans.Plan


def best(
  config: Config,
  topology: Topology,
  number: int,
  estimate: bool = False,
  tell: Callable[..., None] = lambda *_: None,
) -> list[Candidate]:
  """The best meshes of a run.

  All are counted by arithmetic, and ranked: those that fit before the others,
  and the fast ones first. So are the best of them under other policies of
  `config.model.remat`. Then they are compiled in this order, until so many
  fit: a program of a large model takes minutes, so few are to be compiled.

  Args:
    config: Of the run; its mesh, its `remat`, and the rows of its updates are
      replaced.
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
  # Experts are split if the model has some, which the first plan tells.
  for one in itertools.chain.from_iterable(
    candidates(config, topology, size, config.generator.devices)
    for size in divisors(MOST_SENDING)
    if size == 1 or (counted and counted[0].plan.counted.model.experts)
  ):
    try:
      made = plans.plan(one, topology, estimate=True)
    except ValueError as error:
      problem = plain_text.said(error)
      continue
    # Several numbers of rows may come to the same micro-batches.
    what = tuple(made.mesh.values()), made.counted.rows
    if what not in seen:
      counted.append(Candidate(one, made))
    seen.add(what)
  if not counted:
    raise ValueError(f'No mesh on {topology.name} can be built: {problem}')
  counted.sort(key=_rank)
  counted += [
    Candidate(other, plans.plan(other, topology, estimate=True))
    for one in counted[:number]
    for other in _policies(one.config)
  ]
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
    if sum(one.plan.fits and one.plan.is_whole for one in found) >= number:
      break
  return sorted(found, key=_rank) or counted


def _rank(one: Candidate) -> tuple[bool, bool, float, float]:
  """The order: what fits, then the fast ones, then the small ones.

  Of what fits by arithmetic, those come first that have room for its error.
  What could not be compiled is not taken to fit. Bounds count as equal if their
  first two digits are.
  """
  plan = one.plan
  size = plan.largest.bytes
  compiled = plan.largest.compiled is not None
  is_close = not compiled and size * _ERROR > plan.capacity
  fits = plan.fits and plan.is_whole
  return not fits, is_close, float(f'{plan.bound_secs:.1e}'), size


def candidates(
  config: Config, topology: Topology, expert: int = 1, apart: int = 0
) -> Iterator[Config]:
  """All configs that are tried: meshes, micro-batches, completions of a row.

  Args:
    config: Of the run.
    topology: The machines.
    expert: Over how many devices experts are split.
    apart: How many devices sample alone; of several slices whole ones.
  """
  number = topology.number - apart
  slices = topology.slices - apart * topology.slices // topology.number
  in_slice = number // slices
  tensors = [size for size in divisors(in_slice) if size <= MOST_SENDING]
  for tensor, fsdp in itertools.product(tensors, divisors(in_slice)):
    data, rest = divmod(in_slice, tensor * expert * fsdp)
    if rest or not data:
      continue
    mesh = Mesh(data, fsdp, tensor, expert, slices=slices)
    shards = data * fsdp * expert * slices
    rows = {config.learner.micro_rows, shards}
    of_row = {config.learner.row_completions, *_row_choices(config, shards)}
    for micro_rows, per_row in itertools.product(rows, of_row):
      learner = dataclasses.replace(
        config.learner, micro_rows=micro_rows, row_completions=per_row
      )
      yield dataclasses.replace(config, mesh=mesh, learner=learner)


def _policies(config: Config) -> Iterator[Config]:
  """The same config with other policies of what is computed again.

  Not with `'offload'`: what that sends to the host is in no bound.
  """
  for remat in ('none', 'attention', 'layer'):
    if remat != config.model.remat:
      model = dataclasses.replace(config.model, remat=remat)
      yield dataclasses.replace(config, model=model)


def _row_choices(config: Config, shards: int) -> tuple[int, ...]:
  """How many completions a row may have.

  One takes the least memory. The other is the most of which each data shard
  gets a row.
  """
  learner = config.learner
  if learner.layout not in ('auto', 'shared'):
    return ()  # other layouts have no such choice
  completions = config.sampler.prompts // learner.batches * config.sampler.group
  sizes = divisors(config.sampler.group)
  return 1, max([1] + [size for size in sizes if completions // size >= shards])


def divisors(number: int) -> list[int]:
  """All of them, ascending."""
  return [size for size in range(1, number + 1) if number % size == 0]
