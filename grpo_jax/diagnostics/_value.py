"""Whether the value of a method's loss says anything about progress.

At ratio 1, where every rollout starts, the value of a loss with a ratio is
-sum w A. Where advantages add up to 0, that is 0 or a statistic of the lengths,
whatever the policy has learned (Fontana et al., arXiv 2601.05002, proposition
4).
"""

from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

_ROUNDING = 1e-6  # relative to the sum of |w A|; of float32 too
# From this squared correlation on, as printed, a statistic explains the loss.
_EXPLAINED = 0.9
_UNRELATED = 0.1  # below this the reward is called unrelated
_TIE = 1e-3  # squared correlations that are no further apart are equal

# From what one hopes for to what explains nearly everything: of statistics that
# explain a loss equally well, the first is named.
_NAMES = {
  'reward': 'the mean reward',
  'length': 'the lengths',
  'logp': 'the log-probabilities',
  'entropy': 'the entropy',
  'size': 'the size of the advantages',
  'weights': 'sum w A',
}


class Value(NamedTuple):
  """What the loss's value is, over random batches at ratio 1.

  Squared correlations are None where the loss is constant. Where a comment
  names several forms of a statistic, the largest of theirs is given.
  """

  zero: bool  # 0 up to rounding, on every batch
  constant: bool  # one number up to rounding
  reward: float | None  # corr^2 with the mean reward
  length: float | None  # with sum A L, also over N, or Cov(r, L) in groups
  logp: float | None  # with the mean log-probability, or sum w A log pi
  weights: float | None  # with sum w A
  size: float | None  # with sum w |A|
  entropy: float | None  # with the mean entropy
  rises: bool | None  # whether the loss rises with the mean reward
  teaching: float  # share of the batches whose gradient is not 0
  of_reference: bool  # the value changes with the gap to the reference
  text: str


def loss_value(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Value:
  """Correlates the loss at ratio 1 with what a reader may take it for.

  There are 128 batches of two groups, so a squared correlation of about 0.01
  says nothing. Every group has a right and a wrong completion; the others are
  right with a probability that each batch draws. All else is random. The policy
  equals the reference in a first reading and differs from it in a second. The
  arguments are those of `audit`.

  >>> loss_value(losses.methods.gspo()).text
  'always 0 at ratio 1: says nothing of progress, and still teaches, since its \
gradient is not 0'
  """
  subject = _probe.Subject(method, fields)
  random = np.random.default_rng(6)
  shape = (_probe.ROWS // 2, *_probe.SHAPE)
  each = (shape[0], 1, 1, 1)  # one number for each batch
  chance = random.uniform(0, 1, each[:-1])
  right = random.random(shape[:-1]) < chance
  right[..., 0], right[..., 1] = True, False
  length = random.integers(1, shape[-1] + 1, right.shape)
  # The batch's own level makes the means vary as much as the tokens do.
  logp = -random.uniform(0.2, 2, each) * random.exponential(1, shape)
  entropy = random.uniform(0.2, 2, each) * random.uniform(0.5, 1.5, shape)
  gap = 0.3 * random.normal(size=shape)
  base = dict(reward=right, length=length, logp_old=logp, entropy=entropy)
  probes = subject.probes(base, {'near': {}, 'off': dict(gap_ref=gap)})
  read, batch = subject.read(probes), probes['near'].batch
  near, loss = read['near'], read['near'].loss
  mask, reward = np.asarray(batch.mask), np.asarray(batch.reward)
  total = lambda value: np.sum(value, axis=(1, 2, 3))
  weighted, tokens = near.weight * near.advantage, total(mask)
  by_length, length = total(near.advantage * mask), mask.sum(-1)
  centred = reward - reward.mean(-1, keepdims=True)
  reward = reward.mean((1, 2))
  statistics = {
    'reward': [reward],
    'length': [by_length, by_length / tokens, (centred * length).sum((1, 2))],
    'logp': [total(logp * mask) / tokens, total(weighted * logp)],
    'weights': [total(weighted)],
    'size': [total(np.abs(weighted))],
    'entropy': [total(np.asarray(batch.entropy_old) * mask) / tokens],
  }
  size = np.abs(near.coefficient).max((1, 2, 3))
  noise = _ROUNDING * max(total(np.abs(weighted)).max(), np.abs(loss).max())
  constant = bool(np.ptp(loss) <= noise)
  value = Value(
    zero=bool(np.abs(loss).max() <= noise),
    constant=constant,
    **{
      name: None if constant else max(_squared(loss, x) for x in forms)
      for name, forms in statistics.items()
    },
    rises=None if constant else bool(np.cov(loss, reward)[0, 1] > 0),
    teaching=float(np.mean(size > _ROUNDING * size.max())),
    of_reference=bool(np.abs(read['off'].loss - loss).max() > noise),
    text='',
  )
  return value._replace(text=verdict(value)[1])


def _squared(x: np.ndarray, y: np.ndarray) -> float:
  """Squared correlation; 0 if `y` is constant up to rounding."""
  if np.abs(y - y.mean()).max() <= _ROUNDING:
    return 0.0
  return float(np.corrcoef(x, y)[0, 1] ** 2)


def verdict(value: Value) -> tuple[str, str]:
  """What the loss follows, in a word or two and in a sentence."""
  if value.constant:
    zero, what = ('0', '0') if value.zero else ('constant', 'the same')
    text = f'always {what} at ratio 1: says nothing of progress, and '
    text += (
      'still teaches, since its gradient is not 0'
      if value.teaching
      else 'teaches nothing: its gradient is 0'
    )
    if value.of_reference:
      text += '; with a gap to the reference, the value of the regulariser'
    return zero, text
  # The first statistic that explains the loss, or else the one that explains
  # most of it.
  squares = [getattr(value, name) for name in _NAMES]
  # Two digits, as printed: 0.8988 must not be called less than 0.90.
  printed = [float(_fit.number(square, 2, 'f')) for square in squares]
  explains = [square >= _EXPLAINED for square in printed]
  index = explains.index(True) if any(explains) else _fit.leading(squares, _TIE)
  first = list(_NAMES.values())[index]
  square = printed[index]
  share, reward_share = (f'(corr^2 = {x:.2f})' for x in (square, printed[0]))
  cell = first if square == 1 else f'{first} ({square:.2f})'
  way = 'rises with' if value.rises else 'falls with'
  if not any(explains):
    text = f'mixed: {first} most {share}; {way} the mean reward {reward_share}'
    return cell, text
  text = f'a statistic of {first} {share}'
  if index == 0:
    return cell, f'{text}; {way} it'
  how = ', not of' if squares[0] < _UNRELATED else f'; {way}'
  return cell, f'{text}{how} the mean reward {reward_share}'
