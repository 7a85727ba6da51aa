"""Scores: what a model says of the completions in a layout."""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.layout import Layout
from grpo_jax.models.attention import over_layout

Array = jax.Array

_CHUNK_FLOATS = 2**24  # 64 MiB of logits at a time


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
) -> Scores:
  r"""Log-probabilities of the completions, under

  .. math:: \pi = \operatorname{softmax}(\text{logits} / \text{temperature})

  The output layer runs on scored positions only, `chunk_tokens` of them at a
  time, and again in the backward pass: no array of all positions times the
  vocabulary ever exists.

  Args:
    model: Anything with the model protocol.
    params: Its parameters.
    layout: Rows; slots without a completion give finite rubbish.
    temperature: The sampler's.
    with_entropy: Whether to compute the entropy too.
    chunk_tokens: Positions per chunk; None picks 64 MiB of logits.

  Returns:
    The `Scores`.
  """
  hidden, _ = model.hidden(
    params, layout.tokens, layout.position, over_layout(layout)
  )
  rows, slots, tokens = layout.column.shape
  column = layout.column.reshape(rows, slots * tokens, 1)
  hidden = jnp.take_along_axis(hidden, column, axis=1)
  hidden = hidden.reshape(-1, hidden.shape[-1])
  target = layout.target.reshape(-1)

  @jax.checkpoint
  def chunk_scores(hidden, target):
    return token_scores(
      model.head(params, hidden) / temperature, target, with_entropy
    )

  vocab = jax.eval_shape(model.head, params, hidden).shape[-1]
  size = chunk_tokens or max(128, _CHUNK_FLOATS // vocab)
  if hidden.shape[0] <= size:
    scores = chunk_scores(hidden, target)
  else:
    number = math.ceil(hidden.shape[0] / size)
    padding = number * size - hidden.shape[0]
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    target = jnp.pad(target, (0, padding))
    chunks = (
      hidden.reshape(number, size, -1),
      target.reshape(number, size),
    )
    scores = lax.map(lambda chunk: chunk_scores(*chunk), chunks)
  return jax.tree.map(
    lambda x: x.reshape(-1)[: rows * slots * tokens].reshape(
      rows, slots, tokens
    ),
    scores,
  )


def token_scores(logits: Array, target: Array, with_entropy: bool) -> Scores:
  """Log-probability of the target, and the entropy, of each row of logits.

  Args:
    logits: f32[N,V], already divided by the temperature.
    target: i32[N].
    with_entropy: Whether to compute the entropy too.

  Returns:
    `Scores` of shape [N].
  """
  log_mass = jax.nn.logsumexp(logits, axis=-1)
  # A masked sum: unlike a gather it stays sharded over the vocabulary and its
  # gradient needs no scatter.
  chosen = jnp.arange(logits.shape[-1])[None] == target[:, None]
  logp = jnp.sum(jnp.where(chosen, logits, 0), axis=-1) - log_mass
  if not with_entropy:
    return Scores(logp, None)
  log_policy = logits - log_mass[:, None]
  entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
  return Scores(logp, entropy)
