"""Scores: what a model says at every completion token of a layout."""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import experts
from grpo_jax.models.attention import over_layout
from grpo_jax.models.layers import keep_products
from grpo_jax.models.layout import Layout
from grpo_jax.models.protocol import LOGP
from grpo_jax.models.protocol import Layered
from grpo_jax.models.protocol import Routed
from grpo_jax.models.protocol import Scores
from grpo_jax.models.protocol import Wanted

Array = jax.Array

_CHUNK_FLOATS = 2**24  # 64 MiB of logits at a time, on each data shard
_CHUNK_FLOATS_CPU = 2**22  # 16 MiB, which its caches may hold

UNUSED_LOGIT = -1e30
"""The logit of an id that no token of the tokenizer has: it is never drawn.

Its probability is 0 at any temperature, also where the policy is nearly sure,
and it is finite: entropies and gradients have products of it with 0.
"""


def score(
  model: Layered,
  params,
  layout: Layout,
  temperature: float = 1.0,
  wanted: Wanted = LOGP,
  chunk_tokens: int | None = None,
  forward_mode: bool = False,
) -> Scores:
  r"""Log-probabilities of the completions under the policy

  .. math:: \pi = \operatorname{softmax}(\text{logits} / \text{temperature})

  The output layer runs on positions that are scored, and on a chunk of them at
  a time; the backward pass computes each chunk again. So no array of all
  positions times the vocabulary ever exists.

  Args:
    model: Whose log-probabilities.
    params: Its parameters.
    layout: The rows. A slot without a completion gets numbers without meaning,
      which are finite.
    temperature: The temperature of the sampler.
    wanted: What else is asked for.
    chunk_tokens: Positions per chunk, all rows together; None: as many on each
      data shard as `chunk_positions` says.
    forward_mode: Whether `jax.jvp` will differentiate this; see
      `attention.over_layout`.

  Returns:
    The `Scores`.
  """
  hidden, _ = model.hidden(
    params,
    layout.tokens,
    layout.position,
    over_layout(layout, model.config.attention, forward_mode=forward_mode),
  )
  return _score_hidden(
    model, params, layout, hidden, temperature, wanted, chunk_tokens
  )


def score_routed(
  model: Layered,
  params,
  layout: Layout,
  counted: Array,
  sampled: Array | None = None,
  temperature: float = 1.0,
  wanted: Wanted = LOGP,
  chunk_tokens: int | None = None,
) -> tuple[Scores, Routed]:
  """`score` of a model with experts, and what its routers did.

  A completion token stands for the position that predicts it, as in sampling.
  Prompts do not count, but for their last position: so the statistics are the
  same whether completions share their prompt or not.

  Args:
    model: A model that `routes`.
    params: Its parameters.
    layout: The rows.
    counted: bool[R,C,T], the completion tokens that count.
    sampled: i32[R,C,T], `experts.Routing.code` of the sampler at each; None if
      it is not known.
    temperature: The temperature of the sampler.
    wanted: What else is asked for.
    chunk_tokens: Positions per chunk, as in `score`.

  Returns:
    The `Scores`, and what the routers did.
  """
  rows, slots, tokens = layout.column.shape
  column, here = _places(layout, layout.column)
  column = column.reshape(rows, slots * tokens)
  # Positions that predict several tokens count for each of them.
  times = jax.vmap(
    lambda place, x: jnp.zeros(layout.tokens.shape[1]).at[place].add(x)
  )(column, jnp.where(here, counted, 0).reshape(rows, -1).astype(jnp.float32))
  hidden, _, routed = model.hidden_routed(
    params,
    layout.tokens,
    layout.position,
    over_layout(layout, model.config.attention),
    counted=times,
  )
  scores = _score_hidden(
    model, params, layout, hidden, temperature, wanted, chunk_tokens
  )
  disagreement = None
  if sampled is not None:
    code = jnp.take_along_axis(routed.code, column, axis=1)
    code = jnp.where(here, code.reshape(sampled.shape), 0)
    disagreement = experts.disagreement(
      model.config, shards.sum_columns(code), sampled
    )
  return scores, Routed(shards.sum_columns(routed.statistics), disagreement)


def _score_hidden(
  model, params, layout, hidden, temperature, wanted, chunk_tokens
) -> Scores:
  """The scores of a layout from the outputs of the last layer, f[R,S,width]."""
  rows, slots, tokens = layout.column.shape
  few = layout.blocks is None and layout.tokens.shape[1] < slots * tokens

  def scored(hidden, target, wanted):
    return _in_chunks(
      model, params, hidden, (target, wanted), temperature, chunk_tokens
    )

  if few or shards.parts() > 1:
    # Many short completions in a row: it has fewer columns than places for
    # completion tokens, so scoring every column is less work. If rows are cut,
    # each part scores the columns that it has.
    find = _columns if layout.own is None else _columns_of_trees
    hidden, target, place, here = find(layout, hidden)
    at_places = lambda ids: _brought(ids, place, here, target.shape[1])
    wanted = jax.tree.map(at_places, wanted)
    scores = _taken(scored(hidden, target, wanted), place, here)
  else:
    column = _places(layout, layout.column)[0].reshape(rows, slots * tokens)
    hidden = jnp.take_along_axis(hidden, column[:, :, None], axis=1)
    asked = layout.target, wanted
    scores = scored(
      hidden,
      *jax.tree.map(
        lambda x: jnp.asarray(x).reshape(rows, slots * tokens, *x.shape[3:]),
        asked,
      ),
    )
  return jax.tree.map(
    lambda x: x.reshape(rows, slots, tokens, *x.shape[2:]), scores
  )


def _brought(ids: Array, place: Array, here: Array, number: int) -> Array:
  """i32[R,C,T,K] -> i32[R,N,K]: of completion tokens, to their places.

  Those of no token go to place 0, where no token is scored.

  Args:
    ids: Of completion tokens.
    place: i32[R,C,T], their places.
    here: bool[R,C,T], whether these are here.
    number: `N`.
  """
  rows, *_, width = ids.shape
  nothing = jnp.zeros((rows, number, width), ids.dtype)
  at = jnp.where(here, place, number).reshape(rows, -1)
  return jax.vmap(lambda x, at, new: x.at[at].set(new, mode='drop'))(
    nothing, at, ids.reshape(rows, -1, width)
  )


def _taken(scores: Scores, place: Array, here: Array) -> Scores:
  """The scores at some places, from whichever part of the columns has them."""
  place, here = (x.reshape(x.shape[0], -1) for x in (place, here))
  like = lambda flat, x: flat.reshape(*flat.shape, *(1,) * (x.ndim - 2))
  scores = jax.tree.map(
    lambda x: jnp.take_along_axis(x, like(place, x), axis=1), scores
  )
  if shards.parts() == 1:
    return scores
  scores = jax.tree.map(
    lambda x: jnp.where(like(here, x), x, jnp.zeros_like(x)), scores
  )
  return shards.sum_columns(scores)


def _columns(layout: Layout, hidden: Array):
  """What is scored if every column predicts the token of the next one.

  The exception is the first token of a completion, which the end of a shared
  prompt predicts, for several completions at once; these are scored in columns
  added behind the others.

  Args:
    layout: The rows.
    hidden: f[R,S,W], outputs of the last layer.

  Returns:
    (f[R,N,W], i32[R,N], i32[R,C,T], bool[R,C,T]): at N places the output and
    the token that is scored; for each completion token its place, and whether
    that is here; see `_places`.
  """
  tokens = layout.target.shape[2]
  column, here = _places(layout, layout.column)
  first = _first_of(layout, column)
  hidden = jnp.concatenate(
    [hidden, jnp.take_along_axis(hidden, first[:, :, None], axis=1)], axis=1
  )
  target = jnp.concatenate(
    [_following(layout.tokens), _first_of(layout, layout.target)], axis=1
  )
  first_place = layout.tokens.shape[1] + jnp.arange(column.shape[1])
  if layout.first is None:
    place = column.at[:, :, 0].set(first_place[None])
  else:
    first = jnp.asarray(layout.first)[..., None]
    begins = jnp.arange(tokens)[None, None] == first
    place = jnp.where(begins, first_place[None, :, None], column)
  return hidden, target, place, here


def _columns_of_trees(layout: Layout, hidden: Array):
  """`_columns` if any column may predict the tokens of several others.

  So each token is scored in its own column, from the output that predicts it.
  """
  rows, size = layout.tokens.shape
  own, column = (
    jnp.asarray(x).reshape(rows, -1) for x in (layout.own, layout.column)
  )
  # What is in no slot has 0 for both, the column of a prompt, which no one
  # scores.
  nothing = jnp.zeros((rows, size * shards.parts()), jnp.int32)
  source = jax.vmap(lambda x, at, value: x.at[at].set(value))(
    nothing, own, column
  )
  if shards.parts() > 1:
    first = shards.first_column(size)
    source = lax.dynamic_slice_in_dim(source, first, size, axis=1)
  hidden = shards.gather_columns(hidden)
  hidden = jnp.take_along_axis(hidden, source[:, :, None], axis=1)
  return hidden, layout.tokens, *_places(layout, layout.own)


def _first_of(layout: Layout, values: Array) -> Array:
  """[R,C,T] -> [R,C]: the value at the first token of each slot."""
  if layout.first is None:
    return values[:, :, 0]
  first = jnp.asarray(layout.first)[..., None]
  return jnp.take_along_axis(values, first, axis=2)[:, :, 0]


def _places(layout: Layout, column: Any) -> tuple[Array, Array]:
  """The columns of completion tokens among those at hand.

  Args:
    layout: The rows.
    column: i32[R,C,T], a column for each completion token.

  Returns:
    i32[R,C,T], and bool[R,C,T], whether that column is here: rows may be cut,
    see `shards.parts`. Where it is not, the first number is 0.
  """
  column, size = jnp.asarray(column), layout.tokens.shape[1]
  if shards.parts() == 1:
    return column, jnp.ones(column.shape, bool)
  column -= shards.first_column(size)
  here = (column >= 0) & (column < size)
  return jnp.where(here, column, 0), here


def _following(tokens: Array) -> Array:
  """The token of the next column, for every column at hand, i32[R,S]."""
  following = jnp.roll(shards.gather_columns(tokens), -1, axis=1)
  if shards.parts() == 1:
    return following
  size = tokens.shape[1]
  return lax.dynamic_slice_in_dim(following, shards.first_column(size), size, 1)


def _in_chunks(
  model, params, hidden, asked, temperature, chunk_tokens
) -> Scores:
  """The scores of some positions of all rows at a time.

  A chunk cuts the positions and not the rows, because the rows may be split
  over devices, all of which should work on every chunk.

  Args:
    model: The model.
    params: Its parameters.
    hidden: f[R,N,W], outputs of the last layer at N positions.
    asked: The token to be scored at each, i32[R,N], and what else is `Wanted`.
    temperature: The temperature of the sampler.
    chunk_tokens: Positions per chunk, as in `score`.

  Returns:
    Scores [R,N,...].
  """

  params = model.head_params(params)  # once, and not for every chunk

  def chunk_scores(hidden, asked):
    logits = model.head(params, hidden) / temperature
    return token_scores(logits, *asked)

  rows, number, width = hidden.shape
  vocab = jax.eval_shape(model.head, params, hidden).shape[-1]
  positions = chunk_positions(vocab, width, sharding.platform())
  budget = positions * sharding.current_row_shards()
  size = max(1, (chunk_tokens or budget) // rows)
  if number <= size:  # one chunk: no loop, and its logits may be kept
    return keep_products(chunk_scores)(hidden, asked)
  chunks = math.ceil(number / size)
  more = chunks * size - number  # chunks have one shape; the last is padded

  def cut(x):
    x = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(rows, chunks, size, *x.shape[2:]), 1, 0)

  # No logits of several chunks are kept for the backward pass.
  scores = lax.map(
    lambda chunk: jax.checkpoint(chunk_scores)(*chunk),
    jax.tree.map(cut, (hidden, asked)),
  )
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, chunks * size, *x.shape[3:])[
      :, :number
    ],
    scores,
  )


def chunk_positions(vocab: int, width: int, platform: str) -> int:
  """Positions of a chunk on each data shard.

  Their logits take 64 MiB, on a CPU 16, which its caches may hold. But each
  chunk also reads the output layer, which takes as many bytes as the logits of
  `width` positions; so it has no fewer.

  Args:
    vocab: Ids.
    width: The size of the output layer's input.
    platform: See `sharding.platform`.
  """
  if platform == 'cpu':
    return max(128, width, _CHUNK_FLOATS_CPU // vocab)
  return max(128, _CHUNK_FLOATS // vocab)


def token_scores(logits: Array, target: Array, wanted: Wanted) -> Scores:
  """What is wanted of the target, and of the distribution, at each position.

  Args:
    logits: f32[R,N,V], already divided by the temperature.
    target: i32[R,N].
    wanted: What else is asked for; its ids are i32[R,N,K].

  Returns:
    `Scores` of shape [R,N].
  """
  log_mass = jax.nn.logsumexp(logits, axis=-1)
  # A masked sum and not a gather: it works on a vocabulary that is split over
  # devices, and its gradient needs no scatter.
  chosen = jnp.arange(logits.shape[-1])[None, None] == target[..., None]
  logp = jnp.sum(jnp.where(chosen, logits, 0), axis=-1) - log_mass
  entropy = top_logp = top_ids = None
  if wanted.entropy:
    log_policy = logits - log_mass[..., None]
    entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
  if wanted.likeliest:
    most, top_ids = _largest(logits, wanted.likeliest)
    top_logp = most - log_mass[..., None]
  elif wanted.ids is not None:
    # A gather here, as masked sums would read all logits K times. A teacher may
    # have ids that the policy lacks, and so never draws.
    given = jnp.take_along_axis(
      logits, wanted.ids, axis=-1, mode='fill', fill_value=UNUSED_LOGIT
    )
    top_logp = given - log_mass[..., None]
  return Scores(logp, entropy, top_logp, top_ids)


def _largest(logits: Array, number: int) -> tuple[Array, Array]:
  """The largest logits f32[R,N,K] and their ids; of equal ones the first ids.

  Where the vocabulary is split over `tensor`, each part finds its own, and only
  these are compared with each other: `lax.top_k` alone would gather all logits.
  """
  vocab = logits.shape[-1]
  parts = shards.vocabulary_parts(vocab)
  if parts == 1 or number > vocab // parts:
    return lax.top_k(logits, number)

  def of_part(logits, part):
    most, ids = lax.top_k(logits, number)
    return most, ids + part * logits.shape[-1]

  most, ids = shards.on_vocabulary_parts(of_part, logits)
  most, place = lax.top_k(most, number)
  return most, jnp.take_along_axis(ids, place, axis=-1)


def without_ids(logits: Array, unused: Sequence[tuple[int, int]]) -> Array:
  """The logits of a policy that never draws some ids.

  Args:
    logits: f32[..., V].
    unused: Runs `(first, end)` of ids; none: the logits stay what they are.

  Returns:
    f32[..., V], with `UNUSED_LOGIT` at these ids.
  """
  if not unused:
    return logits
  never = np.zeros(logits.shape[-1], bool)
  for first, end in unused:
    never[first:end] = True
  # As many axes as the logits have: ranks are not promoted here.
  never = never.reshape((1,) * (logits.ndim - 1) + (-1,))
  return jnp.where(never, UNUSED_LOGIT, logits)
