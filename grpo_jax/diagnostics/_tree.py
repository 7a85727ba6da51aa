r"""The bias of the first token's gradient, exactly, on a tree of three leaves.

The policy draws `s` with probability 0.69, else `a`. After `s` it draws `short`
or `long`, each with probability 1/2; every other token is certain. With the
default rewards `s` is worth as much as `a`, so the true gradient of the first
logit is 0 and whatever an estimator expects there is its bias. All groups are
enumerated, so nothing is sampled.

Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
Learning <https://arxiv.org/abs/2601.05002>`_, 2026, say that a common prefix is
not moved if weights are uniform, because the advantages add up to 0. That holds
for a prefix of the whole group. The tree shows what is left: normalizers that
depend on the group (1 / number of tokens, 1 / deviation) are correlated with
the advantages of the subset that shares a token, and bias it.
"""

import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _probe

_FIRST = 0.69  # probability of `s`
_SHORT, _LONG, _OTHER = range(3)
_CHANCE = np.array([_FIRST / 2, _FIRST / 2, 1 - _FIRST])  # of each leaf


class TreeBias(NamedTuple):
  r"""Expected gradients of the two logits, over all groups.

  With :math:`c` the coefficients -d loss / d logp, :math:`P` the probability of
  `s` and :math:`z_1, z_2` the logits of `s` and, after it, of `short`:

  .. math::
    \text{first} = E \sum_i c_{i1} (1[o_{i1} = s] - P), \qquad
    \text{second} = E \sum_{i: o_{i1} = s} c_{i2} (1[o_{i2} = short] - 1/2)

  An estimator that is unbiased up to a factor has `first / second` equal to
  `true_first / true_second`. What a bonus on the entropy adds on purpose is
  left out.
  """

  first: float
  second: float
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
  """Enumerates all ordered groups on the tree, each a batch, at ratio 1.

  Args:
    method: A chain. Each group meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.
    short_tokens: Length of the completion `s short`, at least 2 tokens.
    long_tokens: Length of `s long`, at least 2 tokens.
    other_tokens: Length of `a`, at least 1 token.
    group: Completions in a group; 3 ** group groups are evaluated.
    short_reward: Reward of `s short`.
    long_reward: Reward of `s long`.
    other_reward: Reward of `a`.

  Returns:
    A `TreeBias`.

  Raises:
    ValueError: A length or the group is too small.

  >>> round(tree_bias(losses.methods.rloo()).second, 4)
  0.1725
  """
  lengths = np.array([short_tokens, long_tokens, other_tokens])
  rewards = np.array([short_reward, long_reward, other_reward], float)
  if min(short_tokens, long_tokens) < 2 or other_tokens < 1 or group < 1:
    raise ValueError(
      f'tree_bias got lengths {short_tokens}, {long_tokens}, {other_tokens} '
      f'and groups of {group}; give short and long at least 2 tokens, the '
      'other at least 1, and a group at least 1 completion.'
    )
  # Ties between equal completions are broken by their order: enumerate it too.
  leaves = np.array(list(itertools.product(range(3), repeat=group)))  # [N,G]
  probe = _probe_of(leaves, rewards, lengths, fields)
  c = _probe.read(method, probe).coefficient[: len(leaves), 0, :group]
  after_s = leaves != _OTHER
  chance = np.prod(_CHANCE[leaves], axis=1)
  first = chance @ np.sum(c[..., 0] * (after_s - _FIRST), axis=1)
  toward_short = after_s * ((leaves == _SHORT) - 0.5)
  second = chance @ np.sum(c[..., 1] * toward_short, axis=1)
  all_share = np.all(after_s, axis=1)
  shared = chance * all_share @ np.sum(c[..., 0], axis=1) / _FIRST**group
  # An untrained first token says nothing; a second of 0 divides nothing.
  rounding = 1e-7 * (chance @ np.sum(np.abs(c), axis=(1, 2)))
  measured = np.any(c[..., 0] != 0) and abs(second) > rounding
  gain = (short_reward + long_reward) / 2 - other_reward
  return TreeBias(
    first=float(first),
    second=float(second),
    true_first=_FIRST * (1 - _FIRST) * gain,
    true_second=_FIRST / 4 * (short_reward - long_reward),
    ratio=float(first / second) if measured else None,
    shared_weight=float(shared),
  )


def _probe_of(
  leaves: np.ndarray,
  rewards: np.ndarray,
  lengths: np.ndarray,
  fields: _probe.Fields | None,
) -> _probe.Probe:
  """One group in each batch, filled up to the shape of all other probes.

  What fills it are completions that are not valid, which change nothing, and
  further batches, which are not looked at.
  """
  number, prompts, size, width = _probe.PROBE_SHAPE
  groups, group = leaves.shape
  size, width = max(size, group), max(width, *lengths)
  filled = leaves[np.minimum(np.arange(max(number, groups)), groups - 1)]
  ids, logp, entropy = _leaf_tokens(width)

  def of_each(leaf):  # [3,...] -> [N,P,G,...]
    shape = (len(filled), prompts, size, *leaf.shape[1:])
    array = np.zeros(shape, leaf.dtype)
    array[:, 0, :group] = leaf[filled]
    return array

  valid = of_each(np.ones(3, bool))[0]

  def fields_of(batch):
    batch = batch._replace(valid=valid)
    return {'valid': valid, **(fields(batch) if fields else {})}

  return _probe.make(
    of_each(rewards),
    of_each(lengths),
    of_each(logp),
    tokens=of_each(ids),
    entropy=of_each(entropy),
    fields=fields_of,
  )


def _leaf_tokens(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Ids, log-probabilities and entropies of the three completions, `[3,T]`.

  Ids are shared where the tree shares, and nowhere else: not by accident, and
  not when positions are counted from the completions' ends.
  """
  ids = np.arange(3 * width).reshape(3, width)
  ids[_LONG, 0] = ids[_SHORT, 0]
  logp, entropy = np.zeros((3, width)), np.zeros((3, width))
  logp[:, 0] = np.log([_FIRST, _FIRST, 1 - _FIRST])
  logp[:_OTHER, 1] = np.log(0.5)
  entropy[:, 0] = -_FIRST * np.log(_FIRST) - (1 - _FIRST) * np.log(1 - _FIRST)
  entropy[:_OTHER, 1] = np.log(2)
  return ids, logp, entropy
