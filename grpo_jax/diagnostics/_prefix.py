"""What a method does to a first token that completions of a group share.

Such a token is moved by the sum of their coefficients, W_agg; see
`losses.shared_prefix_weight` (Fontana et al., arXiv 2601.05002, proposition 1).
`prefix_bias` measures how much of it does not cancel, and `tree_bias` how
biased the expected gradient then is.
"""

import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

_FIRST = 0.69  # probability of `s` on the tree
_SHORT, _LONG, _OTHER = range(3)  # the leaves
_CHANCE = np.array([_FIRST / 2, _FIRST / 2, 1 - _FIRST])  # of each leaf


class PrefixBias(NamedTuple):
  """What is left of W_agg where completions share their first token.

  Relative to the sum of |coefficient| over the group: 1 is reached where all
  completions pull one way, and 0 is exact cancellation.
  """

  whole: float | None  # largest |W_agg| where the whole group shares
  part: float | None  # largest |W_agg| where 2..G-1 completions share
  factor: float | None  # C of the best fit W(S) = C sum of S's advantages
  uneven: float | None  # largest |W(S) - C sum of S's advantages|, all S


def prefix_bias(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> PrefixBias:
  """Measures whether a method moves a common first token, at ratio 1.

  In a group of 8 with lengths 2 to 20 and mixed rewards, every subset S of two
  or more completions shares the first token in turn, and nobody else does. The
  whole group is tried on nine further groups. All fields are None where no
  first token has a gradient. The arguments are those of `audit`.

  >>> round(prefix_bias(losses.methods.rloo()).whole, 6)
  0.0
  >>> round(prefix_bias(losses.methods.grpo()).whole, 2)
  0.58
  """
  subject = _probe.Subject(method, fields)
  probe, sharing = _sharing_probe(subject)
  reading = subject.read({'sharing': probe})['sharing']
  c, advantage = reading.coefficient[:, 0, :, 0], reading.advantage[:, 0, :, 0]
  weight = np.sum(c * sharing, axis=1)  # [N], W_agg
  expected = np.sum(advantage * sharing, axis=1)
  total = np.sum(np.abs(c), axis=1)
  # A z-score of equal values may leave 1e-18 instead of 0, and the quotient of
  # two such numbers would be read as "nothing cancels".
  total[total < 1e-6 * np.abs(reading.coefficient).sum((1, 2, 3)).max()] = 0
  if not total.any():
    return PrefixBias(None, None, None, None)
  relative = _fit.divide(np.abs(weight), total)
  whole = np.all(sharing, axis=1)
  # Fitted on the subsets of one group, because C may differ between groups.
  one = np.s_[: whole.argmax() + 1]
  (factor,), off = _fit.least_squares(weight[one], expected[one])
  scale = np.max(total[one])
  return PrefixBias(
    whole=float(np.max(relative[whole])),
    part=float(np.max(relative[~whole])),
    factor=float(factor),
    uneven=float(off / scale) if scale > 0 else 0.0,
  )


def _sharing_probe(subject: _probe.Subject) -> tuple[_probe.Probe, np.ndarray]:
  """Batches, and who shares the first token in their first group, bool[N,G].

  The first batches hold the same group, in which each subset shares in turn,
  the whole group last. Each of the other batches has a group that shares as a
  whole.
  """
  number, (prompts, group, width) = _probe.ROWS, _probe.SHAPE
  everyone = itertools.product((False, True), repeat=group)
  subsets = [subset for subset in everyone if sum(subset) > 1]
  others = number - len(subsets)
  sharing = np.array(subsets + others * subsets[-1:])
  # The draw of each batch: those of the subsets all have the first.
  which = np.maximum(np.arange(number) - len(subsets) + 1, 0)
  random = np.random.default_rng(0)
  draws = 1 + others, prompts, group
  reward = random.choice([0.0, 0.3, 1.0], draws)
  # A group of equal rewards would have no gradient.
  reward[..., 0], reward[..., 1] = 1, 0
  lengths = np.linspace(2, width, group).astype(int)
  length = random.permuted(np.broadcast_to(lengths, draws), axis=-1)
  old = -random.uniform(0.05, 3, (*draws, width))[which]
  entropy = random.uniform(0, 1.5, (*draws, width))[which]
  tokens = np.resize(np.arange(np.prod(_probe.SHAPE)), old.shape)
  # First tokens follow the same prompt, so they have the same entropy. It is
  # the largest, so that a mask of low entropy keeps them.
  entropy[..., 0] = 1.6
  # Completions that share the first token share its id, its probability and
  # the entropy of the next token.
  for array, position in ((tokens, 0), (old, 0), (entropy, 1)):
    own = array[:, 0, :, position]
    first = own[np.arange(number), np.argmax(sharing, axis=1)]
    array[:, 0, :, position] = np.where(sharing, first[:, None], own)
  given = dict(tokens=tokens, entropy=entropy)
  return subject.probe(reward[which], length[which], old, **given), sharing


class TreeBias(NamedTuple):
  """Expected gradients of the logits of `s` and, after it, of `short`.

  An estimator that is unbiased up to a factor has `first / second` equal to
  `true_first / true_second`. What a bonus on the entropy adds on purpose is
  left out. `c` are the coefficients, P is the probability of `s`.
  """

  first: float  # E sum_i c_i1 (1[o_i1 = s] - P)
  second: float  # E sum_i c_i2 1[o_i1 = s] (1[o_i2 = short] - 1/2)
  true_first: float  # P (1 - P) (mean reward after s - that of a)
  true_second: float  # P / 4 (reward of short - reward of long)
  ratio: float | None  # first / second; None if one of them was not measured
  shared_weight: float  # E[sum_i c_i1 | all completions begin with s]


def tree_bias(
  method: losses.LossTransform,
  fields: _probe.Fields | None = None,
  short_tokens: int = 2,
  long_tokens: int = 20,
  other_tokens: int = 8,
  group: int = 4,
  short_reward: float = 1.0,
  long_reward: float = 0.0,
  other_reward: float = 0.5,
) -> TreeBias:
  """Computes the bias of a first token's gradient, exactly, at ratio 1.

  The policy draws `s` with probability 0.69, else `a`. After `s` it draws
  `short` or `long`, each with probability 1/2; every other token is certain.
  With the default rewards `s` is worth as much as `a`, so the true gradient of
  the first logit is 0. All ordered groups are enumerated: nothing is sampled.

  Args:
    method: Any chain; see `audit`.
    fields: See `audit`.
    short_tokens: Length of the completion `s short`, at least 2.
    long_tokens: Length of `s long`, at least 2.
    other_tokens: Length of `a`, at least 1.
    group: Completions in a group; 3 ** group groups are evaluated.
    short_reward: Reward of `s short`.
    long_reward: Reward of `s long`.
    other_reward: Reward of `a`.

  Raises:
    ValueError: A length or the group is too small.

  >>> round(tree_bias(losses.methods.rloo()).second, 4)
  0.1725
  """
  if min(short_tokens, long_tokens) < 2 or other_tokens < 1 or group < 1:
    raise ValueError(
      f'tree_bias got lengths {short_tokens}, {long_tokens}, {other_tokens} '
      f'and groups of {group}; give short and long at least 2 tokens, the '
      'other at least 1, and a group at least 1 completion.'
    )
  # All orders are enumerated, because a method may break ties by the order.
  leaves = np.array(list(itertools.product(range(3), repeat=group)))  # [N,G]
  rewards = np.array([short_reward, long_reward, other_reward], float)
  lengths = np.array([short_tokens, long_tokens, other_tokens])
  subject = _probe.Subject(method, fields)
  probe = _tree_probe(subject, leaves, rewards, lengths)
  c = subject.read({'tree': probe})['tree'].coefficient[:, 0, :group]
  after_s = leaves != _OTHER
  chance = np.prod(_CHANCE[leaves], axis=1)
  first = chance @ np.sum(c[..., 0] * (after_s - _FIRST), axis=1)
  toward_short = after_s * ((leaves == _SHORT) - 0.5)
  second = chance @ np.sum(c[..., 1] * toward_short, axis=1)
  all_share = np.all(after_s, axis=1)
  shared = chance * all_share @ np.sum(c[..., 0], axis=1) / _FIRST**group
  # There is no ratio if the first token is not trained (its expected gradient
  # of 0 would not mean "unbiased") or if the second's gradient is 0.
  size = chance @ np.sum(np.abs(c), axis=1)  # of each position
  measured = min(size[0], abs(second)) > 1e-7 * size.sum()
  gain = (short_reward + long_reward) / 2 - other_reward
  return TreeBias(
    first=float(first),
    second=float(second),
    true_first=_FIRST * (1 - _FIRST) * gain,
    true_second=_FIRST / 4 * (short_reward - long_reward),
    ratio=float(first / second) if measured else None,
    shared_weight=float(shared),
  )


def _tree_probe(subject, leaves, rewards, lengths) -> _probe.Probe:
  """Batches of one group each, given by its leaves, i32[N,G].

  The rest of a batch is completions that are not valid: they change nothing.
  """
  prompts, size, width = _probe.SHAPE
  number, group = leaves.shape
  size, width = max(size, group), max(width, *lengths)
  # Ids are equal where the tree shares a token and nowhere else, also when
  # positions are counted from the ends, as `conflict_tokens` does.
  ids = np.arange(3 * width).reshape(3, width)
  ids[_LONG, 0] = ids[_SHORT, 0]
  logp, entropy = np.zeros((2, 3, width))
  logp[:, 0] = np.log([_FIRST, _FIRST, 1 - _FIRST])
  logp[:_OTHER, 1] = np.log(0.5)
  entropy[:, 0] = -_FIRST * np.log(_FIRST) - (1 - _FIRST) * np.log(1 - _FIRST)
  entropy[:_OTHER, 1] = np.log(2)

  def lay_out(leaf):  # [3,...] -> [N,P,G,...]
    array = np.zeros((number, prompts, size, *leaf.shape[1:]), leaf.dtype)
    array[:, 0, :group] = leaf[leaves]
    return array

  return subject.probe(
    *map(lay_out, (rewards, lengths, logp)),
    tokens=lay_out(ids),
    entropy=lay_out(entropy),
    valid=lay_out(np.ones(3, bool)),
  )
