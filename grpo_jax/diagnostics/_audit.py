"""The audit of a method: six readings, as numbers, a table line and a page."""

import math
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _clipping
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _prefix
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _row
from grpo_jax.diagnostics import _scale
from grpo_jax.diagnostics import _value
from grpo_jax.diagnostics._fit import short

COLUMNS = {
  'weight': 'weight of each token; L_i, N_p and N count the kept tokens of its '
  'completion, its prompt and the batch, B completions, P prompts',
  'ratio': 'ratio of policy to old policy that multiplies the advantage',
  'advantage': 'r is the reward; mean and std are those of the group, unless '
  'the text says otherwise',
  'regulariser': 'what is subtracted from the objective; k1, k2 and k3 '
  'estimate the KL to the reference, r is the ratio',
  'W_agg': 'sum of the coefficients on a token that the whole group shares, '
  'over the sum of their absolute values; 0 means that they cancel',
  'bias': 'expected gradient of the first token of a tree over that of the '
  "second; the first token's true gradient is 0, so 0 means unbiased",
  'scale': 'e, if a factor phi on all rewards multiplies the gradient by '
  'phi^e (up to 1 %), before Adam; else none, and the factors that phi = 0.01, '
  '0.1, 10 and 100 give; log-ratios have a deviation of 0.05',
  'zero gradient': 'ratios s, the same for all tokens of a completion, at '
  'which their gradient is exactly 0, so that only momentum moves them; where '
  'this depends on more than s, for what it was measured',
  'loss at ratio 1': 'statistic that the value of the loss follows before the '
  'policy has moved; squared correlation where it is below 1.00',
}
"""Columns of the table of methods, and what they mean."""


class Audit(NamedTuple):
  """What a method does, measured by evaluating it; a table in a notebook."""

  requires: tuple[str, ...]  # optional fields that it reads
  scope: str  # 'row', or 'batch' if it couples completions
  row: _row.Row  # its row in the table of surrogates
  prefix: _prefix.PrefixBias  # what is left of W_agg on shared tokens
  tree: _prefix.TreeBias  # the exact bias of a first token's gradient
  scale: _scale.Scale  # what r -> phi r does to gradient and Adam step
  clipping: _clipping.Clipping  # where the gradient is exactly 0
  value: _value.Value  # what the loss's value says at ratio 1

  def _repr_markdown_(self) -> str:
    head = ('part', '', 'what was read'), ('---', '---', '---')
    return _fit.markdown([*head, *describe('method', self)])


def audit(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Audit:
  """Measures what a method does, by evaluating it on small batches.

  Args:
    method: Any chain, also one of your own. Every batch is evaluated with the
      state that its `init` returns.
    fields: A function for a method that requires fields of its own. It takes
      the batch of a probe, arrays [P,G,...], and returns these fields by name.

  Raises:
    ValueError: The method requires a field that nobody supplies.

  >>> from grpo_jax import losses
  >>> result = audit(losses.methods.dapo())
  >>> result.row.weight, result.row.advantage
  ('1/N, groups of equal rewards dropped', '(r - mean)/std')
  >>> result.clipping.text
  'zero above 1.28 for A > 0 and below 0.8 for A < 0'
  """
  method = _probe.hashable(method)
  return Audit(
    tuple(sorted(method.requires)),
    method.scope,
    _row.surrogate_row(method, fields),
    _prefix.prefix_bias(method, fields),
    _prefix.tree_bias(method, fields),
    _scale.reward_scale(method, fields),
    _clipping.clipping(method, fields),
    _value.loss_value(method, fields),
  )


def to_json(value: Any) -> Any:
  """An audit, or a part of it, for `json.dumps`; what is not finite is None."""
  if hasattr(value, '_asdict'):
    return {name: to_json(part) for name, part in value._asdict().items()}
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, list | tuple):
    return [to_json(part) for part in value]
  # JSON has no infinity and no NaN.
  finite = not isinstance(value, float) or math.isfinite(value)
  return value if finite else None


def cells(audit: Audit) -> dict[str, str]:
  """One line, or one block, of the table of methods: text by `COLUMNS`."""
  row, words = audit.row, ('everywhere', 's<{}', 's>{}', '{}<s<{}')
  number = lambda ratio: short(ratio, 5)
  positive, negative = _clipping.spans(audit.clipping.zeros, words, number)
  sides = [f'A>0: {x}' for x in positive] + [f'A<0: {x}' for x in negative]
  conditions = _clipping.bracketed(audit.clipping.conditions)
  return {
    'weight': row.weight,
    'ratio': row.ratio,
    'advantage': row.advantage,
    'regulariser': row.regulariser,
    'W_agg': short(audit.prefix.whole, 2),
    'bias': short(audit.tree.ratio, 2),
    # The last setting is off policy, where thresholds act as well.
    'scale': _scale.cell(audit.scale.settings[-1]),
    'zero gradient': ('; '.join(sides) or 'none') + conditions,
    'loss at ratio 1': _value.verdict(audit.value)[0].removeprefix('the '),
  }


def describe(name: str, audit: Audit) -> list[tuple[str, str, str]]:
  """An audit in sentences: (section, label, sentence), in reading order."""
  row, prefix, scale = audit.row, audit.prefix, audit.scale
  required = ', '.join(audit.requires) or 'nothing else'
  scope = 'by itself' if audit.scope == 'row' else 'with its whole batch'
  whole = part = 'not measured: the first token has no gradient on the probes'
  if prefix.whole is not None:
    left = short(prefix.whole)
    whole = f'|W_agg| is {left} of the sum of absolute coefficients'
    part = (
      f'up to {short(prefix.part)}; and up to {short(prefix.uneven)} away from '
      'the sum of the advantages'
    )
  momentum = (
    'never acts alone: the gradient is nowhere exactly 0 on the measured ratios'
  )
  if audit.clipping.coasts:
    momentum = 'can carry a token on where its own gradient is 0'
  elif audit.clipping.zeros:
    momentum = 'has no bound to cross: a gradient that is 0 is 0 at every ratio'
  return [
    (name, 'weight', row.weight),
    (name, 'ratio', row.ratio),
    (name, 'advantage', row.advantage),
    (name, 'regulariser', row.regulariser),
    (name, 'reads', f'rewards and {required}; each completion {scope}'),
    ('shared prefix', 'whole group', whole),
    ('shared prefix', 'part of it', part),
    ('shared prefix', 'bias', _bias(audit.tree)),
    ('reward scale', 'in sum', scale.text),
    *(
      ('reward scale', f'x {short(factor)}', _causes(scale.settings[-1], k))
      for k, factor in enumerate(scale.factors)
    ),
    ('clipping', 'gradient', audit.clipping.text),
    ('clipping', 'momentum', momentum),
    ('loss value', 'at ratio 1', audit.value.text),
  ]


def _bias(tree: _prefix.TreeBias) -> str:
  """The expected gradients on the tree."""
  found = tree.first, tree.second, tree.shared_weight
  size = max(map(abs, found))
  if not size:
    return 'not measured: no gradient on the tree'
  first, second, shared = (short(x, rounding=1e-6 * size) for x in found)
  return (
    f'E[gradient] of the first token {first} (true: {short(tree.true_first)}), '
    f'of the second {second} (true: {short(tree.true_second)}), first over '
    f'second {short(tree.ratio)}; E[W_agg] {shared}'
  )


def _causes(change: _scale.StepChange, k: int) -> str:
  """What one factor of the rewards changes, by cause."""
  parts = change.step, change.kl, change.thresholds, change.epsilon
  step, kl, thresholds, epsilon = (short(x[k], rounding=1e-9) for x in parts)
  return (
    f'gradient x {short(change.gradient[k])}; Adam step changes by {step}, of '
    f'which the penalty {kl}, thresholds {thresholds}, epsilon {epsilon}'
  )
