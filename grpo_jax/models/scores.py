"""Scores: what a model says of the completions in a layout."""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import sharding
from grpo_jax.layout import Layout
from grpo_jax.models.attention import over_layout

Array = jax.Array

_CHUNK_FLOATS = 2**24  # 64 MiB of logits at a time, on each data shard


class Scores(NamedTuple):
  """What the policy says of each completion token, in nats."""

  logp: Array  # f32[R,C,T]
  entropy: Array | None  # f32[R,C,T], of the whole distribution


def score(
  model,
  params,
  layout: Layout,
  temperature: float = 1.0,
  with_entropy: bool = False,
  chunk_tokens: int | None = None,
  forward_mode: bool = False,
) -> Scores:
  r"""Log-probabilities of the completions, under

  .. math:: \pi = \operatorname{softmax}(\text{logits} / \text{temperature})

  The output layer runs on scored positions only, `chunk_tokens` of them at a
  time, and again in the backward pass: no array of all positions times the
  vocabulary ever exists.

  Args:
    model: Anything with the model protocol, and `config.attention`.
    params: Its parameters.
    layout: Rows; slots without a completion give finite rubbish.
    temperature: The sampler's.
    with_entropy: Whether to compute the entropy too.
    chunk_tokens: Positions per chunk, over all rows; None picks 64 MiB of
      logits on each data shard.
    forward_mode: For `jax.jvp`; see `attention.over_layout`.

  Returns:
    The `Scores`.
  """
  hidden, _ = model.hidden(
    params,
    layout.tokens,
    layout.position,
    over_layout(layout, model.config.attention, forward_mode=forward_mode),
  )
  rows, slots, tokens = layout.column.shape
  column = layout.column.reshape(rows, slots * tokens)
  if layout.blocks is None and layout.tokens.shape[1] < slots * tokens:
    # Many short completions in a row: fewer columns than slots for tokens. A
    # column predicts the next one's token, but for the first of a completion,
    # which may be predicted by the end of a prompt that others share.
    first = layout.column[:, :, 0]
    hidden = jnp.concatenate(
      [hidden, jnp.take_along_axis(hidden, first[:, :, None], axis=1)], axis=1
    )
    target = jnp.concatenate(
      [jnp.roll(layout.tokens, -1, axis=1), layout.target[:, :, 0]], axis=1
    )
    scores = _in_chunks(
      model, params, hidden, target, temperature, with_entropy, chunk_tokens
    )
    of_first = layout.tokens.shape[1] + jnp.arange(slots)
    place = jnp.asarray(layout.column).at[:, :, 0].set(of_first[None])
    place = place.reshape(rows, slots * tokens)
    scores = jax.tree.map(
      lambda x: jnp.take_along_axis(x, place, axis=1), scores
    )
  else:
    hidden = jnp.take_along_axis(hidden, column[:, :, None], axis=1)
    target = layout.target.reshape(rows, slots * tokens)
    scores = _in_chunks(
      model, params, hidden, target, temperature, with_entropy, chunk_tokens
    )
  return jax.tree.map(lambda x: x.reshape(rows, slots, tokens), scores)


def _in_chunks(
  model, params, hidden, target, temperature, with_entropy, chunk_tokens
) -> Scores:
  """`Scores` [R,N] of hidden f[R,N,W], some positions of all rows at a time.

  Rows stay whole, because they may be split over devices.
  """

  @jax.checkpoint
  def chunk_scores(hidden, target):
    logits = model.head(params, hidden) / temperature
    return token_scores(logits, target, with_entropy)

  rows, number, width = hidden.shape
  vocab = jax.eval_shape(model.head, params, hidden).shape[-1]
  budget = max(128, _CHUNK_FLOATS // vocab) * sharding.current_row_shards()
  size = max(1, (chunk_tokens or budget) // rows)
  if number <= size:
    return chunk_scores(hidden, target)
  chunks = math.ceil(number / size)
  more = chunks * size - number
  hidden = jnp.pad(hidden, ((0, 0), (0, more), (0, 0)))
  target = jnp.pad(target, ((0, 0), (0, more)))
  hidden = jnp.moveaxis(hidden.reshape(rows, chunks, size, width), 1, 0)
  target = jnp.moveaxis(target.reshape(rows, chunks, size), 1, 0)
  scores = lax.map(lambda chunk: chunk_scores(*chunk), (hidden, target))
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :number], scores
  )


def token_scores(logits: Array, target: Array, with_entropy: bool) -> Scores:
  """Log-probability of the target, and the entropy, at each position.

  Args:
    logits: f32[R,N,V], already divided by the temperature.
    target: i32[R,N].
    with_entropy: Whether to compute the entropy too.

  Returns:
    `Scores` of shape [R,N].
  """
  log_mass = jax.nn.logsumexp(logits, axis=-1)
  # A masked sum: unlike a gather it stays sharded over the vocabulary and its
  # gradient needs no scatter.
  chosen = jnp.arange(logits.shape[-1])[None, None] == target[..., None]
  logp = jnp.sum(jnp.where(chosen, logits, 0), axis=-1) - log_mass
  if not with_entropy:
    return Scores(logp, None)
  log_policy = logits - log_mass[..., None]
  entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
  return Scores(logp, entropy)
