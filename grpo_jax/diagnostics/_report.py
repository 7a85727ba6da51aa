"""An audit in words: a page for one method, a line of a table for many."""

import functools
import math

from grpo_jax.diagnostics import _value
from grpo_jax.diagnostics._audit import Audit
from grpo_jax.diagnostics._clipping import Clipping
from grpo_jax.diagnostics._prefix import PrefixBias
from grpo_jax.diagnostics._tree import TreeBias

COLUMNS = {
  'weight': 'of each token; L_i tokens of a completion, N of the batch, N_p of '
  'a prompt, B completions, P prompts',
  'ratio': 'what multiplies the advantage',
  'advantage': 'r reward; mean and std of the group unless said',
  'regulariser': 'what is subtracted; k1, k2, k3: KL to the reference',
  'W_agg': 'what is left on a token that the whole group shares, over the sum '
  'of absolute coefficients; 0: cancels',
  'bias': "the first token's mean gradient over the second's on a tree where "
  "the first's true gradient is 0",
  'scale': 'e, if the gradient goes as the e-th power of a factor of all '
  'rewards before Adam',
  'zero gradient': 'ratios where the gradient is exactly 0, so that momentum '
  'goes on alone',
  'loss at ratio 1': 'what the value of the loss follows there',
}
"""Columns of the table of methods, and what they mean."""


def number(value: float | None, digits: int = 3, rounding: float = 1e-6) -> str:
  """Short, '0' for rounding errors, '-' for none."""
  if value is None:
    return '-'
  return '0' if abs(value) < rounding else f'{value:.{digits}g}'


def cells(audit: Audit) -> dict[str, str]:
  """One line of the table of methods.

  Args:
    audit: What `audit` returned.

  Returns:
    Text by column; see `COLUMNS`.
  """
  row = audit.row
  return {
    'weight': row.weight,
    'ratio': row.ratio,
    'advantage': row.advantage,
    'regulariser': row.regulariser,
    'W_agg': number(audit.prefix.whole, 2),
    'bias': number(audit.tree.ratio, 2),
    'scale': number(audit.scale.settings[-1].exponent, 2),
    'zero gradient': _zeros(audit.clipping),
    'loss at ratio 1': _value.follows(audit.value).removeprefix('the '),
  }


def _zeros(clipping: Clipping) -> str:
  """The intervals, as 'A>0: s>1.2; A<0: s<0.8'."""
  parts = []
  for sign, low, high in clipping.zeros:
    side = 'A>0' if sign > 0 else 'A<0'
    if low <= 0 and math.isinf(high):
      where = 'everywhere'
    elif math.isinf(high):
      where = f's>{number(low, 5)}'
    elif low <= 0:
      where = f's<{number(high, 5)}'
    else:
      where = f'{number(low, 5)}<s<{number(high, 5)}'
    parts.append(f'{side}: {where}')
  return '; '.join(parts) or 'none'


def describe(name: str, audit: Audit) -> list[tuple[str, str, str]]:
  """An audit in sentences.

  Args:
    name: Of the method.
    audit: What `audit` returned.

  Returns:
    Triples of a section, a label and a sentence, in reading order.
  """
  row, prefix, tree, scale = audit.row, audit.prefix, audit.tree, audit.scale
  required = ', '.join(audit.requires) or 'nothing else'
  scope = 'by itself' if audit.scope == 'row' else 'with its whole batch'
  return [
    (name, 'weight', row.weight),
    (name, 'ratio', row.ratio),
    (name, 'advantage', row.advantage),
    (name, 'regulariser', row.regulariser),
    (name, 'reads', f'rewards and {required}; each completion {scope}'),
    *(('shared prefix', *said) for said in _prefix(prefix)),
    ('shared prefix', 'bias', _bias(tree)),
    ('reward scale', 'in sum', scale.text),
    *(
      (
        'reward scale',
        f'x {number(factor)}',
        _causes(scale.settings[-1], k),
      )
      for k, factor in enumerate(scale.factors)
    ),
    ('clipping', 'gradient', audit.clipping.text),
    ('clipping', 'momentum', _momentum(audit.clipping)),
    ('loss value', 'at ratio 1', audit.value.text),
  ]


def _prefix(prefix: PrefixBias) -> list[tuple[str, str]]:
  """What is left on a first token that some or all share."""
  if prefix.whole is None:
    what = 'not measured: the first token has no gradient on the probes'
    return [('whole group', what), ('part of it', what)]
  return [
    (
      'whole group',
      f'|W_agg| is {number(prefix.whole)} of the sum of absolute coefficients',
    ),
    (
      'part of it',
      f'up to {number(prefix.part)}; and up to {number(prefix.uneven)} away '
      'from the sum of the advantages',
    ),
  ]


def _bias(tree: TreeBias) -> str:
  """The expected gradients on the tree."""
  found = tree.first, tree.second, tree.shared_weight
  size = max(map(abs, found))
  if not size:
    return 'not measured: no gradient on the tree'
  first, second, shared = (number(x, rounding=1e-6 * size) for x in found)
  return (
    f'E[gradient] of the first token {first} (true: {number(tree.true_first)}),'
    f' of the second {second} (true: {number(tree.true_second)}), first over '
    f'second {number(tree.ratio)}; E[W_agg] {shared}'
  )


def _causes(change, k: int) -> str:
  """One factor's changes, by cause."""
  small = functools.partial(number, rounding=1e-9)
  return (
    f'gradient x {number(change.gradient[k])}; Adam step changes by '
    f'{small(change.step[k])}, of which the penalty {small(change.kl[k])}, '
    f'thresholds {small(change.thresholds[k])}, epsilon '
    f'{small(change.epsilon[k])}'
  )


def _momentum(clipping: Clipping) -> str:
  if clipping.coasts:
    return 'can carry a token on where its own gradient is off'
  if clipping.zeros:
    return 'has no bound to cross: a gradient that is off is so at every ratio'
  return (
    'never acts alone: the gradient is nowhere exactly 0 on the measured ratios'
  )
