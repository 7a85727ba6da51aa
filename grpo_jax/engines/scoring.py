"""Log-probabilities of known tokens: those that the learner computes."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import layout

_NARROWEST = 16
_TOPS = 1, 5, 20  # of likeliest tokens, one program each


class Known(NamedTuple):
  """Tokens behind a first one.

  Attributes:
    logp: f32[n-1], of each token but the first, nats.
    top_ids: i32[n-1,K], the likeliest in its place, the likeliest first.
    top_logp: f32[n-1,K], theirs.
  """

  logp: np.ndarray
  top_ids: np.ndarray
  top_logp: np.ndarray


@dataclasses.dataclass(frozen=True)
class Scorer:
  """Scores texts by the learner's parameters, as ids.

  Attributes:
    model: Whose log-probabilities.
    params: The learner's.
    longest: The most tokens of a text. Texts are padded to powers of two, so
      that programs are few.
    mesh: Of the parameters; None for one device.
  """

  model: models.Layered
  params: Any
  longest: int
  mesh: jax.sharding.Mesh | None = None

  def __call__(
    self, ids: Sequence[int], top: int = 0, temperature: float = 1.0
  ) -> Known:
    """Scores a text.

    Args:
      ids: At least one; of the first nothing is known.
      top: How many of the likeliest tokens are wanted, `K`, at most 20.
      temperature: Divides the logits.

    Raises:
      ValueError: There are too many ids, or none.
    """
    if not len(ids):
      raise ValueError('A text without tokens has no score; give at least one.')
    if len(ids) == 1:
      return Known(np.zeros(0, np.float32), *_nothing(0, top))
    width = layout.bucket(len(ids), self._widths, 'text')
    tokens = np.zeros((1, 1, width - 1), np.int32)
    tokens[0, 0, : len(ids) - 1] = ids[1:]
    length = np.full((1, 1), len(ids) - 1, np.int32)
    rows = layout.padded_rows([[ids[0]]], tokens, length, width)
    if self.mesh is not None:  # each data shard has a row
      copies = sharding.row_shards(self.mesh)
      rows = jax.tree.map(lambda x: np.repeat(x, copies, axis=0), rows)
    number = min(next(x for x in _TOPS if x >= top), self.model.vocab_size)
    found = _score(
      self.model,
      self.mesh,
      self.params,
      rows,
      number,
      np.float32(temperature or 1),
    )
    logp, ids_of_top, logp_of_top = (
      np.asarray(x)[0, 0, : len(ids) - 1]
      for x in (found.logp, found.top_ids, found.top_logp)
    )
    return Known(logp, ids_of_top[:, :top], logp_of_top[:, :top])

  @functools.cached_property
  def _widths(self) -> list[int]:
    widths, width = [], _NARROWEST
    while width < self.longest:
      widths.append(width)
      width *= 2
    return [*widths, self.longest]


def _nothing(number: int, top: int) -> tuple[np.ndarray, np.ndarray]:
  shape = number, top
  return np.zeros(shape, np.int32), np.zeros(shape, np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _score(model, mesh, params, rows, number, temperature):
  with sharding.use(mesh):
    wanted = models.Wanted(likeliest=number)
    found = model.score(params, rows, temperature, wanted)
  if mesh is None:
    return found
  everywhere = sharding.replicated(mesh)
  return jax.lax.with_sharding_constraint(found, everywhere)
