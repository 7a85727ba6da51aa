"""How the optimizer batches of one rollout lie in rows, on the mesh."""

from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import micro_batches
from grpo_jax.learner.compiled import Compiled
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import LayoutSpec


class Stack(NamedTuple):
  """The micro-batches of some prompts."""

  rows: Layout  # [N, rows, ...]
  used: int  # how many of the N hold anything


class Layouts:
  """The stacks of one rollout, as long as it is learned from.

  The policies that score it, the first epoch and the instruments read the same
  rows. So a stack of the first epoch is laid out and put on the mesh when it is
  read first, and kept: it is the one thing that changes.

  Attributes:
    compiled: Has the mesh.
    rollout: What was drawn.
    spec: How completions are laid out; it leaves nothing open.
    batches: Optimizer batches of an epoch; divides the prompts.
  """

  def __init__(
    self, compiled: Compiled, rollout: Rollout, spec: LayoutSpec, batches: int
  ):
    """What `spec` leaves open, the first optimizer batch decides."""
    self.compiled, self.rollout, self.batches = compiled, rollout, batches
    self._first: dict[bytes, Stack | None] = {
      chosen.tobytes(): None for chosen in self.first_epoch()
    }
    if spec.is_open:
      spec = micro_batches.decided(rollout, self.first_epoch()[0], spec)
    self.spec = spec

  def first_epoch(self) -> list[np.ndarray]:
    """The prompts [P'] of each optimizer batch of the first epoch."""
    return np.split(np.arange(len(self.rollout.prompts)), self.batches)

  def stack(self, chosen: np.ndarray) -> Stack:
    """The micro-batches of some prompts.

    Args:
      chosen: i[P'], numbers of the prompts.
    """
    key = chosen.tobytes()
    if found := self._first.get(key):
      return found
    found = lay_out(self.compiled, self.rollout, chosen, self.spec)
    # A later epoch has other optimizer batches, which are used only once.
    if key in self._first:
      self._first[key] = found
    return found

  def shapes(self) -> dict[str, str | int]:
    """What the updates of the rollout were compiled for, in words."""
    rows = self.stack(self.first_epoch()[0]).rows
    number, micro_rows, columns = rows.tokens.shape
    *_, slots, positions = rows.column.shape
    branches = rows.reach is not None or rows.first is not None
    return {
      'layout': self.spec.kind,
      'branches': 'some' if branches else 'none',
      'micro-batches': number,
      'rows of a micro-batch': micro_rows,
      'columns of a row': columns,
      'completions in a row': slots,
      'completion positions': positions,
    }


def lay_out(
  compiled: Compiled, rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec
) -> Stack:
  """The micro-batches of some prompts by any spec, on the mesh.

  Args:
    compiled: Whose mesh it is.
    rollout: What was drawn.
    chosen: i[P'], numbers of the prompts.
    spec: How completions are laid out.
  """
  mesh = compiled.mesh
  shards = host_arrays.own_shards(mesh)
  rows, used = micro_batches.cut_rollout(rollout, chosen, spec, shards)
  rows = host_arrays.from_local(rows, sharding.rows(mesh, axis=1))
  if rollout.holder is not None:
    rows = compiled.fill(rows, rollout.batch.tokens, chosen)
  return Stack(rows, used)


def abstract_stack(
  compiled: Compiled, example: Rollout, chosen: np.ndarray, spec: LayoutSpec
) -> Stack:
  """As `lay_out`, with shapes, dtypes and shardings in place of arrays."""
  # Which rows are filled does not matter.
  nowhere = np.zeros(sharding.row_shards(compiled.mesh), bool)
  rows, used = micro_batches.cut_rollout(example, chosen, spec, nowhere)
  place = sharding.rows(compiled.mesh, axis=1)
  return Stack(
    jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), rows
    ),
    used,
  )
