"""The sizes of a run's parts: its rows, and the bytes of its parameters.

All bytes are of one device. "Gathered" weights are whole over `fsdp`, and still
split over `tensor` and `expert`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import models
from grpo_jax import sharding
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.training.build_abstract import Abstract


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of an update.

  Attributes:
    micro: Micro-batches.
    rows: Rows of a micro-batch, on all devices.
    columns: Tokens of a row.
    scored: Places of a row that are scored.
  """

  micro: int
  rows: int
  columns: int
  scored: int


def rows_of(
  spec: LayoutSpec, prompts: int, group: int, prompt_tokens: int, tokens: int
) -> Rows:
  """The rows of an optimizer batch whose completions are all of full length.

  Then every row is full, and `'auto'` and `'packed'` find nothing to pack.
  """
  per_row = 1
  if spec.kind in ('auto', 'shared'):
    per_row = spec.row_completions or group
  columns = prompt_tokens + per_row * tokens
  if spec.kind == 'packed':
    columns = max(columns, spec.pack_tokens)
    per_row = max(1, columns // (prompt_tokens + tokens))
  number = math.ceil(prompts * group / per_row)
  # As `stack` does: packed rows do not count themselves.
  rows = spec.rows_of(columns, prompts)
  return Rows(math.ceil(number / rows), rows, columns, per_row * tokens)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Bytes of the parameters, of one device.

  Attributes:
    number: Of parameters, of the whole model.
    trained: As the learner holds them.
    moments: Of the optimizer, with its counters.
    reference: 0 if the method has none.
    frozen: Of what adapters leave alone.
    gathered: In the compute dtype, gathered; so decoding reads them.
    head: Of the output layer alone, gathered, in the compute dtype.
    table: Of the embedding, which is looked up and not multiplied by.
    experts: Of the experts of all layers, gathered, in the compute dtype.
  """

  number: int
  trained: int
  moments: int
  reference: int
  frozen: int
  gathered: int
  head: int
  table: int
  experts: int

  @property
  def state(self) -> int:
    """What stays in memory all the time."""
    return self.trained + self.moments + self.reference + self.frozen

  def read(self, tokens: int, mixture: models.Experts | None) -> float:
    """What a pass over some tokens reads, bytes.

    Args:
      tokens: Of a mixture, only the experts that they choose are read, each
        expert being chosen as often as any other. One token gives the least.
      mixture: Of the model.
    """
    whole = float(self.gathered - self.table)
    if mixture is None:
      return whole
    idle = (1 - mixture.per_token / mixture.number) ** tokens
    return whole - idle * self.experts


def weights_of(parts: Abstract) -> Weights:
  """The parameters of a run."""
  run, state = parts.run, parts.updater.abstract
  mesh, model = run.mesh, parts.model
  whole = parts.updater.whole(state.params)
  read = parts.engine.decoding_params(whole)
  compute = jnp.dtype(model.compute_dtype).itemsize
  width, vocab = model.width, model.vocab_size
  split = mesh.shape['tensor'] if vocab % mesh.shape['tensor'] == 0 else 1
  table = width * vocab * compute // split
  tied = model.tied_embeddings
  return Weights(
    number=sum(math.prod(x.shape) for x in jax.tree.leaves(whole)),
    trained=on_device(state.params),
    moments=on_device(state.opt_state),
    reference=on_device(state.reference),
    frozen=on_device(parts.updater.frozen),
    gathered=on_device(read),
    head=table,
    table=0 if tied else table,
    experts=on_device(
      [
        leaf
        for path, leaf in jax.tree.leaves_with_path(read)
        if 'experts' in sharding.path_names(path)
      ]
    ),
  )


def on_device(tree: Any) -> int:
  """Bytes of arrays on one device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
