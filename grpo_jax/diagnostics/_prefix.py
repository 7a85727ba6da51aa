r"""Shared prefixes: what a group's completions do together to a common token.

Completions of one group that begin with the same tokens pull on the same
log-probabilities, so a token is moved by the sum of their coefficients,

.. math:: W_{agg} = \sum_{i \in S} c_{it}, \qquad
          c_{it} = -\frac{\partial\, loss}{\partial \log \pi_{it}},

over the completions :math:`S` that share it with everything before it
(proposition 1 of Fontana et al., `On the Hidden Objective Biases of
Group-based Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026,
with :math:`c = \omega A`). Where a coefficient is one number times the
advantage and the advantages add up to 0, a prefix of the whole group is not
moved; where it depends on the length, it is.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _probe
from grpo_jax.losses import _trie


class SharedPrefix(NamedTuple):
  """The trie over a group's sampled ids, laid out on its tokens, `[P,G,T]`.

  The node of token `t` is the set of completions with the same ids up to and
  including `t` that sampled the id at `t`. All are 0 outside the mask.
  """

  sharers: jax.Array  # i32, completions in the node; 1: shared with nobody
  weight: jax.Array  # f, W_agg: sum of the node's coefficients
  total: jax.Array  # f, sum of their absolute values


def shared_prefix_weight(
  tokens: ArrayLike, mask: ArrayLike, coefficient: ArrayLike
) -> SharedPrefix:
  """Finds, for every token, who shares it and what moves it in sum.

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
  return _trie.fold_group(add, start, tokens, mask, coefficient)


def prefix_summary(
  shared: SharedPrefix,
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Sums up the nodes of all tries, each node once.

  A node is `whole` if all completions of its group that hold any token are in
  it, and these are two or more; it is `part` if two or more are, but not all.

  Args:
    shared: What `shared_prefix_weight` returned.

  Returns:
    For `kind` in `whole` and `part`, pairs (sum, count) whose quotients are:

    - `kind_tokens`: nodes per group, in tokens, over groups of at least two;
    - `kind_weight`: W_agg per node;
    - `kind_uncancelled`: abs(W_agg) / sum of abs(coefficient), over the nodes
      where that sum is not 0. 1: all pull one way; 0: they cancel exactly.
  """
  holds = jnp.any(shared.sharers > 0, axis=-1, keepdims=True)
  size = jnp.sum(holds, axis=1, keepdims=True, dtype=jnp.int32)  # [P,1,1]
  groups = jnp.sum(size >= 2, dtype=jnp.float32)
  several = (shared.sharers >= 2) & (size >= 2)
  once = 1 / jnp.maximum(shared.sharers, 1).astype(shared.weight.dtype)
  moved = shared.total > 0
  share = jnp.abs(shared.weight) / jnp.where(moved, shared.total, 1)
  summary = {}
  for kind, chosen in (
    ('whole', several & (shared.sharers == size)),
    ('part', several & (shared.sharers < size)),
  ):
    each = jnp.where(chosen, once, 0)  # adds up to 1 over a node
    nodes = jnp.sum(each)
    summary[f'{kind}_tokens'] = nodes, groups
    summary[f'{kind}_weight'] = jnp.sum(each * shared.weight), nodes
    summary[f'{kind}_uncancelled'] = (
      jnp.sum(each * share),
      jnp.sum(jnp.where(moved, each, 0)),
    )
  return summary


class PrefixBias(NamedTuple):
  r"""What is left of W_agg where completions share their first token.

  Everything is relative to :math:`\sum_i |c_{i1}|` over the group: 1 is what
  completions that pull one way reach, and 0 is exact cancellation. What does
  not cancel need not be a bias: without a baseline `whole` is 1 and nothing is
  biased. `tree_bias` measures the bias itself.
  """

  whole: float | None  # largest |W_agg| where the whole group shares
  part: float | None  # largest |W_agg| where 2..G-1 completions share
  factor: float | None  # C of the best fit W(S) = C sum of S's advantages
  uneven: float | None  # largest |W(S) - C sum of S's advantages|, all S


def prefix_bias(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> PrefixBias:
  r"""Measures whether a method moves a common first token, at ratio 1.

  In a group of 8 with lengths 2 to 20 and mixed rewards, every subset
  :math:`S` of two or more completions shares the first token in turn, and
  nobody else does. A weight that is the same for all completions gives
  :math:`W(S) = C \sum_{i \in S} A_i`, with the method's own advantage of the
  first token; `uneven` is how far the method is from that. The whole group is
  tried on nine further groups. Another, ordinary group is in each batch.

  A factor such as 1 / L that a method puts into its advantage is part of
  :math:`A_i` here; it shows in `whole`, since those do not add up to 0.

  Args:
    method: A chain. Each batch meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    A `PrefixBias`; all None if no first token here has a gradient, so that
    nothing was measured.

  >>> round(prefix_bias(losses.methods.rloo()).whole, 6)
  0.0
  >>> round(prefix_bias(losses.methods.grpo()).whole, 2)
  0.58
  """
  probe, sharing = _sharing_probe(fields)
  reading = _probe.read(method, probe)
  c, advantage = reading.coefficient[:, 0, :, 0], reading.advantage[:, 0, :, 0]
  weight = np.sum(c * sharing, axis=1)  # [N], W_agg
  expected = np.sum(advantage * sharing, axis=1)
  total = np.sum(np.abs(c), axis=1)
  if not total.any():
    return PrefixBias(None, None, None, None)
  relative = np.abs(weight) / np.where(total == 0, 1, total)
  whole = np.all(sharing, axis=1)
  subsets = 2 ** sharing.shape[1] - sharing.shape[1] - 1
  weight, expected = weight[:subsets], expected[:subsets]  # of one group
  square = expected @ expected
  factor = weight @ expected / square if square > 0 else 0.0
  off = np.max(np.abs(weight - factor * expected))
  scale = np.max(total[:subsets])
  return PrefixBias(
    whole=float(np.max(relative[whole])),
    part=float(np.max(relative[~whole])),
    factor=float(factor),
    uneven=float(off / scale) if scale > 0 else 0.0,
  )


def _sharing_probe(
  fields: _probe.Fields | None,
) -> tuple[_probe.Probe, np.ndarray]:
  """Batches, and who shares the first token in their first group, bool[N,G].

  The first 2 ** G - G - 1 batches are one group under all subsets, ending
  with the whole; the others are whole groups with other rewards and lengths.
  """
  number, prompts, group, width = _probe.PROBE_SHAPE
  subsets = [
    s for s in itertools.product((False, True), repeat=group) if sum(s) > 1
  ]
  others = number - len(subsets)
  sharing = np.array(subsets + others * [(True,) * group])
  # Draws, one for each different batch; `which` repeats the first.
  which = np.maximum(np.arange(number) - len(subsets) + 1, 0)
  random = np.random.default_rng(0)
  draws = 1 + others, prompts, group
  reward = random.choice([0.0, 0.3, 1.0], draws)
  reward[..., 0], reward[..., 1] = 1, 0
  lengths = np.linspace(2, width, group).astype(int)
  length = random.permuted(np.broadcast_to(lengths, draws), axis=-1)
  logp_old = -random.uniform(0.05, 3, (*draws, width))[which]
  entropy = random.uniform(0, 1.5, (*draws, width))[which]
  tokens = np.arange(np.prod(logp_old.shape[1:])).reshape(logp_old.shape[1:])
  tokens = np.broadcast_to(tokens, logp_old.shape).copy()
  entropy[..., 0] = 1.6  # one prompt, one distribution; kept by entropy masks
  # The same prefix has the same id, chance and next distribution.
  for array, position in ((tokens, 0), (logp_old, 0), (entropy, 1)):
    own = array[:, 0, :, position]
    first = own[np.arange(number), np.argmax(sharing, axis=1)]
    array[:, 0, :, position] = np.where(sharing, first[:, None], own)
  probe = _probe.make(
    reward[which],
    length[which],
    logp_old,
    tokens=tokens,
    entropy=entropy,
    fields=fields,
  )
  return probe, sharing
