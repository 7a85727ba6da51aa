r"""Whether the value of a method's loss says anything about progress.

At ratio 1, where every rollout starts, a surrogate with a ratio has the value
:math:`J = \sum_{i,t} w_{it} A_{it}`. With advantages that add up to 0 in their
group that is 0, or a statistic of the lengths, whatever the policy has learned
(proposition 4 of Fontana et al., `On the Hidden Objective Biases of Group-based
Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026). The gradient
is not 0 for that.
"""

from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack

_ROUNDING = 1e-6  # relative to the sum of |w A|; of float32 too
_EXPLAINED = 0.9  # squared correlation from which a statistic is the answer
_UNRELATED = 0.1  # below this it is not worth a word


class Value(NamedTuple):
  """What the loss's value is, over random batches at ratio 1.

  Squared correlations are None where the loss is constant. Each statistic's is
  the largest among the forms that are named.
  """

  zero: bool  # 0 up to rounding, on every batch
  constant: bool  # one number up to rounding
  reward: float | None  # corr^2 with the mean reward
  length: float | None  # with sum A L, also over N, or Cov(r, L) in groups
  logp: float | None  # with the mean log-probability, or sum w A log pi
  weights: float | None  # with sum w A
  size: float | None  # with sum w |A|
  entropy: float | None  # with the mean entropy
  rises: bool | None  # the loss is larger where the mean reward is
  teaching: float  # share of the batches whose gradient is not 0
  of_reference: bool  # the value changes with the gap to the reference
  text: str


def loss_value(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Value:
  """Correlates the loss at ratio 1 with what a reader may take it for.

  128 batches of two groups; every group has a right and a wrong completion, the
  others are right with a probability of the batch. Lengths, log-probabilities
  and entropies are random and independent of the rewards. The policy is also
  the reference; the same batches with a gap to it are read as well.

  Args:
    method: A chain. Each batch meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    A `Value`. With 128 batches independent quantities have a squared
    correlation of about 0.01.

  >>> loss_value(losses.methods.gspo()).text
  'always 0 at ratio 1: says nothing of progress, and still teaches, since its \
gradient is not 0'
  """
  together, apart = _probes(fields)
  reading = _probe.read(method, _stack.fill(together, apart))
  half = len(together.logp)
  loss, of_gap = reading.loss[:half], reading.loss[half:]
  near = _probe.Reading(*(x[:half] for x in reading))
  scale = np.abs(near.weight * near.advantage).sum((1, 2, 3)).max()
  noise = _ROUNDING * max(scale, np.abs(loss).max())
  constant = bool(np.ptp(loss) <= noise)
  found = {
    name: None if constant else max(_squared(loss, x) for x in forms)
    for name, forms in _statistics(near, together).items()
  }
  value = Value(
    zero=bool(np.abs(loss).max() <= noise),
    constant=constant,
    rises=None if constant else _rises(loss, together),
    teaching=float(np.any(near.coefficient != 0, axis=(1, 2, 3)).mean()),
    of_reference=bool(np.abs(of_gap - loss).max() > noise),
    text='',
    **found,
  )
  return value._replace(text=_text(value))


def _probes(fields) -> tuple[_probe.Probe, _probe.Probe]:
  """Random batches at ratio 1, without and with a gap to the reference."""
  random = np.random.default_rng(6)
  shape = (_stack.ROWS // 2, *_stack.SHAPE)
  chance = random.uniform(0, 1, (shape[0], 1, 1))
  right = random.random(shape[:-1]) < chance
  right[..., 0], right[..., 1] = True, False
  length = random.integers(1, shape[-1] + 1, right.shape)
  # The batch's own level makes the means vary as much as the tokens do.
  level = random.uniform(0.2, 2, (shape[0], 1, 1, 1))
  logp = -level * random.exponential(1, shape)
  level = random.uniform(0.2, 2, (shape[0], 1, 1, 1))
  entropy = level * random.uniform(0.5, 1.5, shape)
  gap = 0.3 * random.normal(size=shape)

  def probe(gap_ref):
    return _probe.make(
      right.astype(float),
      length,
      logp,
      gap_ref=gap_ref,
      entropy=entropy,
      fields=fields,
    )

  return probe(0.0), probe(gap)


def _statistics(reading: _probe.Reading, probe: _probe.Probe) -> dict:
  """The forms of each statistic, f64[N] each."""
  batch = probe.batch
  mask, reward = np.asarray(batch.mask), np.asarray(batch.reward)
  length = mask.sum(-1)
  tokens = length.sum((1, 2))
  advantage, weighted = reading.advantage, reading.weight * reading.advantage
  by_length = np.sum(advantage * mask, (1, 2, 3))
  centred = reward - reward.mean(-1, keepdims=True)

  def mean(value):
    return np.sum(value * mask, (1, 2, 3)) / tokens

  return {
    'reward': [reward.mean((1, 2))],
    'length': [
      by_length,
      by_length / tokens,
      np.sum(centred * length, (1, 2)),
    ],
    'logp': [mean(probe.logp), np.sum(weighted * probe.logp, (1, 2, 3))],
    'weights': [np.sum(weighted, (1, 2, 3))],
    'size': [np.sum(np.abs(weighted), (1, 2, 3))],
    'entropy': [mean(np.asarray(batch.entropy_old))],
  }


def _rises(loss: np.ndarray, probe: _probe.Probe) -> bool:
  """Whether the loss is larger where the mean reward is."""
  reward = np.asarray(probe.batch.reward).mean((1, 2))
  return bool((loss - loss.mean()) @ (reward - reward.mean()) > 0)


def _squared(x: np.ndarray, y: np.ndarray) -> float:
  """Squared correlation; 0 if `y` is constant up to rounding."""
  x, y = x - x.mean(), y - y.mean()
  if np.abs(y).max() <= _ROUNDING:
    return 0.0
  return float((x @ y) ** 2 / ((x @ x) * (y @ y)))


def _explanation(value: Value) -> tuple[str, float]:
  """The statistic that the loss follows, and its squared correlation.

  The first that explains it, in an order from what one hopes for to what
  explains nearly everything; else the best.
  """
  named = {
    'the mean reward': value.reward,
    'the lengths': value.length,
    'the log-probabilities': value.logp,
    'the entropy': value.entropy,
    'the size of the advantages': value.size,
    'sum w A': value.weights,
  }
  squares = {name: x for name, x in named.items() if x is not None}
  best = max(squares, key=lambda name: squares[name])
  first = next((k for k, v in squares.items() if v >= _EXPLAINED), best)
  return first, squares[first]


def follows(value: Value) -> str:
  """What the loss follows, in a word or two."""
  if value.constant:
    return '0' if value.zero else 'constant'
  first, square = _explanation(value)
  return first if square >= _EXPLAINED else f'{first} in part'


def _text(value: Value) -> str:
  """The verdict in one sentence."""
  teaches = (
    'still teaches, since its gradient is not 0'
    if value.teaching
    else 'teaches nothing: its gradient is 0'
  )
  if value.constant:
    what = 'always 0' if value.zero else 'always the same'
    text = f'{what} at ratio 1: says nothing of progress, and {teaches}'
    if value.of_reference:
      text += '; with a gap to the reference, the value of the regulariser'
    return text
  first, square = _explanation(value)
  way = 'rises' if value.rises else 'falls'
  reward = f'the mean reward (corr^2 = {value.reward:.2f})'
  if square < _EXPLAINED:
    return f'mixed: {first} most (corr^2 = {square:.2f}); {way} with {reward}'
  text = f'a statistic of {first} (corr^2 = {square:.2f})'
  if first == 'the mean reward':
    return f'{text}; {way} with it'
  assert value.reward is not None  # as it is not constant
  if value.reward < _UNRELATED:
    return f'{text}, not of {reward}'
  return f'{text}; {way} with {reward}'
