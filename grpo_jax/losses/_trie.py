r"""The trie over a group's sampled ids: what completions do to a shared token.

Completions of one group that begin with the same tokens pull on the same
log-probabilities, so a token is moved by the sum of their coefficients,

.. math:: W_{agg} = \sum_{i \in S} c_{it}, \qquad
          c_{it} = -\frac{\partial\, loss}{\partial \log \pi_{it}},

over the completions :math:`S` that share it with everything before it
(proposition 1 of Fontana et al., `On the Hidden Objective Biases of
Group-based Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026,
with :math:`c = \omega A`).

Advantages that add up to 0 over a group do not cancel on a common prefix once
each is multiplied by a weight of its own, such as 1 / length: the prefix is
pushed by :math:`W_{agg} = \sum_i w_{it} A_{it}`. The transforms here subtract
the mean that the method's own weights define, so they stand after the weight.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_weighted_advantage


def fold_group(
  function: Callable[..., Any], start: Any, tokens: Array, *arrays: Array
) -> Any:
  """Folds over the completions of each group, compared with all of it.

  Holds a few arrays `[P,G,T]`, never `[P,G,G,T]`: the completions are taken one
  by one.

  Args:
    function: `(total, common, *rows) -> total`, called once for each completion
      of a group. `common` i32[P,G,1] is the number of leading ids that it
      shares with each completion of its group (`T` with itself). Two
      completions have the same ids up to and including `t` where `t < common`,
      and the same ids before `t` where `t <= common`. `rows` are the
      completion's own, `[P,1,T]`.
    start: The first `total`, a pytree whose arrays keep shape and dtype.
    tokens: i32[P,G,T], ids; padding and what a tool wrote are compared too.
    *arrays: `[P,G,T]`, whose rows `function` gets.

  Returns:
    The last `total`.
  """
  width = tokens.shape[-1]
  position = jnp.arange(width, dtype=jnp.int32)[None, None]

  def step(total, other):
    ids, *rows = (x[:, None] for x in other)  # [P,1,T]
    unequal = jnp.where(tokens == ids, width, position)
    common = jnp.min(unequal, axis=-1, keepdims=True)
    return function(total, common, *rows), None

  others = tuple(jnp.moveaxis(x, 1, 0) for x in (tokens, *arrays))
  return lax.scan(step, start, others)[0]


class SharedPrefix(NamedTuple):
  """The trie over a group's sampled ids, laid out on its tokens, `[P,G,T]`.

  The node of the token at `t` is the set of completions that have the same ids
  up to and including `t` and sampled the id at `t`. All arrays are 0 outside
  the mask.

  Attributes:
    sharers: i32[P,G,T], completions in the node; 1: shared with nobody.
    weight: f[P,G,T], W_agg: sum of the node's coefficients.
    total: f[P,G,T], sum of their absolute values.
  """

  sharers: jax.Array
  weight: jax.Array
  total: jax.Array


def shared_prefix_weight(
  tokens: ArrayLike, mask: ArrayLike, coefficient: ArrayLike
) -> SharedPrefix:
  """For every token, counts who shares it and sums their coefficients.

  Holds a few arrays `[P,G,T]`, never `[P,G,G,T]`.

  Args:
    tokens: i32[P,G,T], ids. Where the mask has holes (what a tool wrote), the
      ids in them count as part of the prefix.
    mask: bool[P,G,T], the policy chose this token; all False for a completion
      that is not valid.
    coefficient: f[P,G,T], -d loss / d logp; read inside the mask only.

  Returns:
    A `SharedPrefix`.

  >>> tokens = jnp.array([[[5, 7, 2], [5, 8, 2]]])
  >>> shared = shared_prefix_weight(
  ...   tokens, jnp.ones((1, 2, 3), bool),
  ...   jnp.array([[[0.5, 0.5, 0.5], [-0.25, -0.25, -0.25]]]))
  >>> shared.sharers.tolist(), shared.weight.tolist()
  ([[[2, 1, 1], [2, 1, 1]]], [[[0.25, 0.5, 0.5], [0.25, -0.25, -0.25]]])
  """
  tokens, coefficient = jnp.asarray(tokens), jnp.asarray(coefficient)
  mask = jnp.asarray(mask, bool)
  position = jnp.arange(tokens.shape[-1], dtype=jnp.int32)[None, None]

  def add(shared, common, sampled, pull):
    same = (position < common) & mask & sampled
    pull = jnp.where(same, pull, 0)
    return SharedPrefix(
      shared.sharers + same, shared.weight + pull, shared.total + jnp.abs(pull)
    )

  zero = jnp.zeros_like(coefficient)
  start = SharedPrefix(jnp.zeros_like(mask, jnp.int32), zero, zero)
  return fold_group(add, start, tokens, mask, coefficient)


def prefix_summary(
  shared: SharedPrefix,
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Sums up the nodes of all tries, each node once.

  A node is `whole` if all completions of its group that hold any token are in
  it, and these are two or more; it is `part` if two or more are, but not all.

  Args:
    shared: What `shared_prefix_weight` returned.

  Returns:
    For `kind` in `whole` and `part`, pairs (sum f[], count f[]) whose quotients
    are as follows. (Pairs, so that the means of several batches can be joined.)

    - `kind_tokens`: number of nodes (a node is one token) per group, over the
      groups of at least two completions;
    - `kind_weight`: mean W_agg of a node;
    - `kind_uncancelled`: mean of abs(W_agg) / sum of abs(coefficient), over the
      nodes where that sum is not 0. 1: all pull one way; 0: they cancel.
  """
  holds = jnp.any(shared.sharers > 0, axis=-1, keepdims=True)
  size = jnp.sum(holds, axis=1, keepdims=True, dtype=jnp.int32)  # [P,1,1]
  groups = jnp.sum(size >= 2, dtype=jnp.float32)
  several = (shared.sharers >= 2) & (size >= 2)
  once = 1 / jnp.maximum(shared.sharers, 1).astype(shared.weight.dtype)
  moved = shared.total > 0
  share = jnp.abs(shared.weight) / jnp.where(moved, shared.total, 1)
  sums = {}
  for kind, chosen in (
    ('whole', several & (shared.sharers == size)),
    ('part', several & (shared.sharers < size)),
  ):
    # A node appears once for each of its completions; its shares add up to 1.
    each = jnp.where(chosen, once, 0)
    sums[kind] = {
      'nodes': each,
      'weight': each * shared.weight,
      'share': each * share,
      'moved': jnp.where(moved, each, 0),
    }
  summary = {}
  for kind, total in sum_of_each(sums).items():
    summary[f'{kind}_tokens'] = total['nodes'], groups
    summary[f'{kind}_weight'] = total['weight'], total['nodes']
    summary[f'{kind}_uncancelled'] = total['share'], total['moved']
  return summary


def sum_of_each(tree: Any) -> Any:
  """The sum of each array [P,G,T], all in one loop.

  XLA does not join reductions by itself on a CPU, where it takes 20 ms to
  compile each of them. On several devices each array alone: a loop over several
  arrays is not split, and every device would gather them whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  devices = jax.device_count() if mesh.empty else mesh.size
  return _total(tree) if devices == 1 else jax.tree.map(_total, tree)


def _total(tree: Any) -> Any:
  """The sum of each array [P,G,T], in one loop."""
  add = lambda left, right: jax.tree.map(jnp.add, left, right)
  zero = jax.tree.map(lambda x: jnp.zeros((), x.dtype), tree)
  # Sums of sums are more exact than a sum of all numbers one by one.
  return lax.reduce(lax.reduce(tree, zero, add, (2,)), zero, add, (0, 1))


def recenter_shared_prefix() -> LossTransform:
  r"""Makes W_agg exactly 0 on a prefix that the whole group shares.

  .. math::
    A_{it} \leftarrow A_{it} - b(t), \qquad
    b(t) = \frac{\sum_j w_{jt} A_{jt}}{\sum_j w_{jt}}

  This is the baseline at `t` if all completions of the group have the same ids
  before `t` and train a token at `t`. Elsewhere a completion keeps the last
  such baseline that it had, or 0 if it had none.

  At ratio 1 the coefficient of a token is :math:`w_{it} A_{it}` if the
  objective's slope there is the advantage (as for `ppo_clip` and
  `score_function`). So a token that the whole group shares is not moved,
  whatever the weights. At the first token that differs, the coefficients of all
  branches add up to 0. If the weights are constant over a completion
  (`mean_over_sequences`), the baseline is one number per group.

  A completion counts at `t` if it keeps a token of positive weight there, and
  it belongs to the group if it does so anywhere. A completion that is alone is
  left as it is. Equal advantages leave exactly 0; otherwise "exactly" is up to
  rounding, a few units in the last place of :math:`\sum_i |w_{it} A_{it}|`.

  This does not make the gradient unbiased. On the tree of
  `diagnostics.tree_bias`, GRPO's expected W_agg where all share the first token
  falls from 0.18 to 0, and the bias of that token by half, from 0.048 to 0.024.
  But the gradient of the second token falls as well, so that relative to it the
  bias rises from 0.51 to 0.58. The bias that remains is that of prefixes that
  only a part of the group shares.

  Returns:
    A `LossTransform` that edits the advantage; place it after the weight.

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> method = losses.chain(losses.center_by_group(),
  ...                       losses.mean_over_sequences(),
  ...                       losses.recenter_shared_prefix())
  >>> mask = jnp.array([[[1, 1, 0, 0], [1, 1, 1, 1]]], bool)
  >>> tokens = jnp.array([[[5, 6, 0, 0], [5, 7, 8, 9]]])
  >>> batch = losses.make_batch(mask, jnp.array([[6.0, 0.0]]), tokens=tokens)
  >>> batch, state = losses.credit(method, batch, method.init())
  >>> batch = losses.prepare(method, batch, state)
  >>> batch.advantage.tolist()
  [[[2.0, 2.0, 0.0, 0.0], [-4.0, -4.0, -4.0, -4.0]]]
  >>> batch.weight.tolist()
  [[[0.25, 0.25, 0.0, 0.0], [0.125, 0.125, 0.125, 0.125]]]
  """
  return on_weighted_advantage(
    lambda advantage, batch: _recentered(advantage, batch, whole=True),
    requires=('tokens',),
  )


def recenter_branches() -> LossTransform:
  r"""Makes W_agg add up to 0 at every node of the trie of shared prefixes.

  .. math::
    A_{it} \leftarrow A_{it} - b(h_{it}), \qquad
    b(h) = \frac{\sum_{j \ni h} w_{jt} A_{jt}}{\sum_{j \ni h} w_{jt}}

  Here :math:`h_{it}` are the ids before the token, and the sums run over those
  completions of the group that begin with `h`, if they are two or more. From
  the point where a completion goes on alone it keeps the last baseline that it
  had.

  Where all that share `h` also take the same next token, the W_agg of that
  token is 0. Where they branch, the W_agg of the branches add up to 0, and the
  choice between them keeps its gradient. (Setting the W_agg of each branch to 0
  would delete that signal.) Which completions count, and what "0" means, is as
  in `recenter_shared_prefix`.

  The baseline of a node averages only the completions that pass through the
  node. How these compare with the rest of the group acts at the branch where
  they left it. The baseline contains the completion's own advantage, which
  shrinks the gradient of a branching by about (n - 1) / n if n completions come
  to it: deep branchings are shrunk more than early ones. For that reason, on
  the tree of `diagnostics.tree_bias` (see `recenter_shared_prefix`), the
  gradient of GRPO's second token falls from 0.094 to 0.029, and the bias of the
  first relative to it rises to +0.85. Dr. GRPO by itself is unbiased up to a
  factor; with this transform it is not, where the first token has a true
  gradient.

  Returns:
    A `LossTransform` that edits the advantage; place it after the weight.
  """
  return on_weighted_advantage(
    lambda advantage, batch: _recentered(advantage, batch, whole=False),
    requires=('tokens',),
  )


def _recentered(advantage: Array, batch: Batch, whole: bool) -> Array:
  """The advantage minus its weighted mean over those that share the history.

  Args:
    advantage: f[P,G,T].
    batch: With its weight.
    whole: Whether a history counts only if the whole group shares it.
  """
  assert batch.weight is not None  # the stage has checked that
  weight = jnp.where(batch.keep, batch.weight, 0).astype(advantage.dtype)
  counts = weight > 0
  position = jnp.arange(weight.shape[-1], dtype=jnp.int32)[None, None]

  def add(total, common, other_counts, other_weight, other_advantage):
    sharers, mass, moment = total
    shares = (position <= common) & other_counts
    share = jnp.where(shares, other_weight, 0)
    # Differences are exactly 0 if the advantages are equal; a difference of two
    # sums would leave rounding errors.
    gain = share * (advantage - other_advantage)
    return sharers + shares, mass + share, moment + gain

  assert batch.tokens is not None  # both transforms require them
  zero = jnp.zeros_like(advantage)
  start = jnp.zeros_like(counts, jnp.int32), zero, zero
  sharers, mass, moment = fold_group(
    add, start, batch.tokens, counts, weight, advantage
  )
  centered = _ops.safe_divide(moment, mass)  # advantage - baseline
  # An empty or dropped completion is no member, so that the rest of the group
  # is still "whole".
  members = jnp.any(counts, axis=-1, keepdims=True)
  size = jnp.sum(members, axis=1, keepdims=True, dtype=jnp.int32)  # [P,1,1]
  qualifies = sharers >= 2
  if whole:
    qualifies &= sharers == size
  # The last position up to here whose history qualifies; -1 is none.
  last = lax.cummax(jnp.where(qualifies, position, -1), axis=2)
  at_last = lambda x: jnp.take_along_axis(x, jnp.maximum(last, 0), axis=-1)
  # Where `last` is the token itself, the first two terms cancel exactly.
  moved = advantage - at_last(advantage) + at_last(centered)
  return jnp.where(last >= 0, moved, advantage)
