"""The audit as a whole: the papers' table from the named methods."""

import math
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.losses import methods
from tests.diagnostics import named

# papers.md 1.3: E[grad first], E[grad second], E[W_agg given all share].
PUBLISHED = {
  'dr_grpo': (methods.dr_grpo(max_tokens=1), 0.0, 0.1294, 0.0),
  'gcpo': (named.method('gcpo'), 0.0, 0.3409, 0.0),
  'grpo': (named.method('grpo'), 0.0476, 0.0938, 0.1818),
  'gspo': (named.method('gspo'), 0.0476, 0.0938, 0.1818),
  'deepseek_v3_2': (named.method('deepseek_v3_2'), 0.0180, 0.0356, 0.0844),
  'dapo': (named.method('dapo'), 0.0111, 0.0379, 0.0),
  'cispo': (named.method('cispo'), 0.0111, 0.0379, 0.0),
  'gpg': (named.method('gpg'), 0.0026, 0.0139, 0.0),
  'cppo': (methods.cppo(threshold=1.2), 0.0207, 0.0408, 0.0487),
  'gtpo_conflict': (
    methods.gtpo_conflict(0.0, math.inf), 0.0372, 0.0356, 0.1875,
  ),
}  # fmt: skip


# `tree_test` audits these with the same numbers.
_ALSO_THERE = 'dr_grpo', 'gspo', 'dapo'


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.long] * (name in _ALSO_THERE))
    for name in PUBLISHED
  ],
)
def test_the_audit_has_the_papers_table(name):
  method, first, second, weight = PUBLISHED[name]
  tree = diagnostics.tree_bias(method)
  found = tree.first, tree.second, tree.shared_weight
  np.testing.assert_allclose(found, (first, second, weight), atol=1e-4)


def test_what_an_audit_says_of_grpo():
  said = {
    (section, label): text
    for section, label, text in diagnostics.describe(
      'grpo', diagnostics.audit(named.method('grpo'))
    )
  }
  assert said['grpo', 'advantage'] == '(r - mean)/std'
  assert said['grpo', 'regulariser'] == '0.04 k3'
  assert 'first token 0.0476 (true: 0)' in said['shared prefix', 'bias']
  assert said['loss value', 'at ratio 1'].startswith('always 0 at ratio 1')
  assert 'carry a token on' in said['clipping', 'momentum']


@pytest.mark.long
def test_a_notebook_shows_a_table():
  audit = diagnostics.audit(named.method('kl_cov'))
  head, line, *rows = audit._repr_markdown_().splitlines()
  assert head.startswith('| part |') and line == '| --- | --- | --- |'
  wanted = diagnostics.describe('method', audit)
  assert len(rows) == len(wanted)
  for row, cells in zip(rows, wanted):
    assert row.count('|') == 4  # what a text has of them is escaped
    shown = [cell.strip().replace('&#124;', '|') for cell in row.split(' | ')]
    assert [cell.strip('| ') for cell in shown] == [
      c.strip('| ') for c in cells
    ]
  assert '1 &#124;log r&#124; on' in '\n'.join(rows)


@pytest.mark.parametrize(
  'name',
  [
    'kl_cov',
    *(pytest.param(x, marks=pytest.mark.long) for x in ('cppo', 'vespo')),
  ],
)
def test_the_texts_fit_a_terminal_of_80_columns(name):
  """One block a method: the label in front of a text that wraps."""
  audit = diagnostics.audit(named.method(name))
  page = {label: text for _, label, text in diagnostics.describe(name, audit)}
  for rows in (page, diagnostics.cells(audit), diagnostics.COLUMNS):
    width = max(map(len, rows)) + 3
    assert width <= 20
    for text in rows.values():
      lines = textwrap.wrap(text, 80 - width, break_long_words=False)
      assert max(map(len, lines)) <= 80 - width


def dated(strength=0.5):
  """Trusts the first half of the positions more, by a field of its own."""
  return losses.chain(
    losses.center_by_group(),
    losses.on_advantage(
      lambda a, batch, strength: a * (1 - strength * batch.extras['late']),
      requires=('late',),
      strength=strength,
    ),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
  )


def late(batch):
  position = np.arange(batch.mask.shape[-1])
  return {'late': np.broadcast_to(position >= 4, batch.mask.shape)}


def test_a_method_with_fields_of_its_own():
  with pytest.raises(ValueError, match="requires the field 'late'.*fields="):
    diagnostics.audit(dated())
  audit = diagnostics.audit(dated(), late)
  assert audit.row.advantage.startswith('per token')
  assert audit.requires == ('late',)
  plain = diagnostics.audit(dated(0.0), late)
  assert plain.row.advantage == 'r - mean'


def test_fields_may_replace_those_of_the_batch():
  def two(batch):
    return {'reward_parts': jnp.stack([batch.reward, 0 * batch.reward], -1)}

  method = methods.gdpo(weights=(1.0, 2.0))
  with pytest.raises(ValueError, match='2 weights'):
    diagnostics.surrogate_row(method)
  assert '(r - mean)/std' in diagnostics.surrogate_row(method, two).advantage


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('dapo', marks=pytest.mark.long),
    'gspo',
    'sapo',
    'dual_clip_grpo',
  ],
)
def test_the_figure(name, tmp_path):
  """Its curve is the coefficient, with upright steps at the bounds."""
  from matplotlib.figure import Figure

  drawn = []
  save = Figure.savefig

  def keep(figure, *args, **kwargs):
    drawn.append(figure)
    return save(figure, *args, **kwargs)

  clipping = diagnostics.clipping(named.method(name))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Figure, 'savefig', keep)
    diagnostics.plot(clipping, name, tmp_path / 'a.png')
  assert (tmp_path / 'a.png').stat().st_size > 5000
  (axes,) = drawn[0].axes
  right, wrong = axes.lines[:2]
  x, y = right.get_xdata(), right.get_ydata()
  at_one = np.interp(1.0, x, y), np.interp(1.0, *wrong.get_data())
  np.testing.assert_allclose(at_one, (1, -1), atol=1e-3)
  for sign, start, stop in clipping.zeros:
    if sign > 0 and np.isinf(stop):
      assert not y[x > start].any()
      assert y[x == start].max() == pytest.approx(
        start if name != 'gspo' else 1, rel=0.01
      )
  assert len(axes.patches) == len(clipping.zeros)
  assert axes.get_xlim()[0] < 1 < axes.get_xlim()[1]


def said_of(method):
  audit = diagnostics.audit(method)
  lines = diagnostics.describe('mine', audit)
  return {line[:2]: line[2] for line in lines}, diagnostics.cells(audit)


def test_what_an_audit_says_where_nothing_was_measured():
  said, cells = said_of(methods.passk(right_reward=5.0))
  assert cells['advantage'] == '0 on the probes'
  assert cells['W_agg'] == cells['bias'] == cells['scale'] == '-'
  none = 'not measured: the first token has no gradient on the probes'
  assert said['shared prefix', 'whole group'] == none
  assert said['shared prefix', 'bias'].startswith('not measured: no gradient')


@pytest.mark.long
def test_what_an_audit_says_of_a_reward_in_float32():
  """All as without the cast: nothing is more than float32's rounding."""

  def method(*links):
    return losses.chain(
      *links,
      losses.center_by_group(),
      losses.mean_over_sequence_sums(100),
      losses.ppo_clip(),
    )

  cast = losses.on_reward(lambda r, batch: r.astype(jnp.float32))
  said, cells = said_of(method(cast))
  plain, want = said_of(method())
  assert cells == want
  assert cells['W_agg'] == cells['bias'] == '0'
  sum_up = 'reward scale', 'in sum'
  assert said[sum_up].startswith('linear, which Adam undoes')
  assert ';' not in said[sum_up] + plain[sum_up]


def test_what_momentum_does_is_said_of_what_was_measured():
  said, _ = said_of(named.method('rloo'))
  assert said['clipping', 'momentum'].endswith('on the measured ratios')

  def positive(terms, batch):
    return jnp.exp(terms.log_ratio) * jnp.maximum(batch.advantage, 0)

  said, _ = said_of(
    losses.chain(
      losses.center_by_group(),
      losses.mean_over_tokens(),
      losses.set_objective(positive),
    )
  )
  assert said['clipping', 'momentum'].startswith('has no bound to cross')


@pytest.mark.long
def test_a_bound_that_holds_under_a_condition_is_not_told_without_it():
  clips = {
    'dppo_tv': 's>1.6667; A<0: s<0.33333 (for tokens of old probability 0.3)',
    'gcpo': 's>1.0466; A<0: s<0.94574 (for a completion of 4 tokens)',
  }
  for name, clip in clips.items():
    _, cells = said_of(named.method(name))
    assert cells['zero gradient'] == f'A>0: {clip}'


def test_fields_that_are_no_dict_are_asked_for():
  with pytest.raises(ValueError, match='returned a ndarray where a dict is'):
    diagnostics.surrogate_row(dated(), lambda batch: np.zeros((2, 8)))


def test_a_transform_that_cannot_be_hashed_is_audited_too():
  """One made by hand, whose requirements are a set that may change."""
  method, traced = named.method('grpo'), []

  def prepare(batch, state):
    traced.append(batch.mask.shape)
    return method.prepare(batch, state)

  by_hand = method._replace(prepare=prepare, requires=set(method.requires))
  assert diagnostics.audit(by_hand).clipping.text == (
    diagnostics.clipping(method).text
  )
  assert len(traced) == 2  # so often is any method compiled
