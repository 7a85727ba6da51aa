"""Experiments on the papers: every verdict on true numbers, and on broken ones.

A verdict is computed from numbers. So each claim has an edit of the numbers
here that must turn its verdict.
"""

import base64
import copy
import functools
import json

import numpy as np
import pytest
from scipy import stats

from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers
from grpo_jax.lab.studies.claims import FAILS
from grpo_jax.lab.studies.claims import HOLDS
from grpo_jax.lab.studies.claims import OPEN
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import coefficients
from grpo_jax.lab.studies.papers import normalized_optimizer
from grpo_jax.lab.studies.papers import other_optimizers
from grpo_jax.lab.studies.papers import scales
from grpo_jax.lab.studies.papers import transformer
from tests import cli
from tests.lab.report import html_tree

# The claims that are wrong, or that these experiments cannot decide. All
# others hold.
NOT_TRUE = {
  ('coasting_ratio', 'five_steps'): FAILS,
  ('momentum_split', 'fresh_4'): FAILS,
  ('reward_scale', 'strictly'): FAILS,
  ('transformer_scale', 'usual_down'): FAILS,
  ('transformer_scale', 'clipped'): FAILS,
  ('transformer_jump', 'fresh'): FAILS,
  ('transformer_prefix', 'grpo_AdamW'): FAILS,
  ('transformer_prefix', 'still_AdamW'): FAILS,
  ('transformer_prefix', 'grpo_SGD'): FAILS,
  ('transformer_prefix', 'still_SGD'): FAILS,
  ('shared_prefix', 'cancels'): FAILS,
  ('normalized_rate', 'sum_form'): FAILS,
  ('normalized_optimizer', 'sgd_best'): OPEN,
  ('normalized_optimizer', 'adam_best'): OPEN,
  ('normalized_optimizer', 'adam_alike_best'): OPEN,
  ('threshold', 'always'): FAILS,
  ('threshold', 'start_decides'): FAILS,
  ('threshold', 'flips'): FAILS,
  ('finite_group', 'weight'): FAILS,
  ('interaction', 'own_data'): FAILS,
  ('interaction', 'here'): FAILS,
  ('interaction', 'two_prompts'): FAILS,
  ('interaction', 'm_own_data'): FAILS,
  ('interaction', 'm'): FAILS,
  ('other_optimizers', 'further'): OPEN,
  ('other_optimizers', 'foretold_adamw'): OPEN,
  ('other_optimizers', 'foretold_momentum'): OPEN,
  ('other_optimizers', 'foretold_lion'): OPEN,
  ('other_optimizers', 'foretold_muon'): OPEN,
  ('other_optimizers', 'foretold_adafactor_momentum'): OPEN,
  ('other_optimizers', 'foretold_schedule_free_sgd'): OPEN,
  ('other_optimizers', 'foretold_schedule_free_adam'): OPEN,
  ('other_optimizers', 'narrowed_fewer'): OPEN,
  ('other_optimizers', 'narrowed_keeps'): FAILS,
  ('other_optimizers', 'narrowed_gains'): OPEN,
  ('other_optimizers', 'foreseen_fewer'): OPEN,
  ('other_optimizers', 'foreseen_keeps'): FAILS,
  ('other_optimizers', 'foreseen_gains'): OPEN,
}


def put(value, *place):
  """An edit that sets the number at a place, or what a function makes of it."""

  def edit(numbers):
    for key in place[:-1]:
      numbers = numbers[key]
    old = numbers[place[-1]]
    numbers[place[-1]] = value(old) if callable(value) else value

  return edit


def all_by(factor, *place):
  """An edit that multiplies all numbers at a place."""
  return put(lambda old: (factor * np.array(old)).tolist(), *place)


def as_if_equal(numbers):
  """An edit after which fresh gradients act as equal ones do."""
  numbers['fresh'] = [numbers['equal']] * 5


def as_the_start(numbers):
  """An edit after which C(T) is what it was at the start."""
  sets = numbers['sets']
  for c, deviation in zip(sets['c'], sets['deviation'], strict=True):
    c[:] = [8 / 3 * deviation] * len(c)


def as_the_bounds(numbers):
  """An edit after which the better bound has the smaller gradient."""
  sets = numbers['sets']
  sets['grpo'] = sets['c']
  sets['reinforce'] = np.ones_like(sets['c']).tolist()


def of_seeds(name, what, change):
  """An edit of what an optimizer has measured with every seed."""

  def edit(numbers):
    for one in numbers['optimizers'][name]:
      one[what] = change(one[what])

  return edit


def of_clip(clip, what, last):
  """An edit of how all rollouts under a clip end."""

  def edit(numbers):
    for arms in numbers['clips'].values():
      for one in arms[clip]:
        one[what][-1] = last

  return edit


EDITS = {
  'coasting_ratio': {
    'formula': put(0.5, 'sizes', 0, 0, 3),
    'five_steps': put(0.66, 'sizes', 0, -1, 4),
    'five_steps_right': put(0.66, 'sizes', 0, -1, 4),
    'distance': all_by(0.9, 'sizes', 0, -1),
    'distance_999': all_by(0.9, 'sizes', 2, -1),
    'grows': put(0.5, 'sizes', 3, -1, 15),
  },
  'coasting_distance': {
    'law': put(1.5, 'ratios', 1, 1, -1),
    'collapse': put(1.25, 'ratios', 2, 3, -1),
    'adam': put(1.5, 'ratios', 0, 2, -1),
    'sgd': put(1.3, 'others', 'sgd', -1),
    'rmsprop': put(1.3, 'others', 'rmsprop', -1),
    'momentum': put(1.3, 'others', 'momentum', -1),
  },
  'reward_jump': {
    'formula': put(2.0, 'steps', 0, 1, 7),
    'acts': put([[[1.0] * 300] * 4] * 2, 'steps'),
    'first_step': put(3.0, 'steps', 1, 3, 0),
    'first_step_95': put(3.0, 'steps', 0, 3, 0),
  },
  'momentum_split': {
    'carried': all_by(-1.0, '16', 'carried'),
    'fresh': all_by(-1.0, '16', 'fresh'),
    'carried_4': all_by(-1.0, '4', 'carried'),
    'fresh_4': all_by(-1.0, '4', 'fresh'),
    'outward': put([0.1] * 9, '16', 'outward'),
  },
  'reward_scale': {
    'powers_of_two': put(1e-16, 'change', '0', 1),
    'other_factors': put(0.1, 'change', '0', 3),
    'strictly': put([0.0] * 6, 'change', '1e-08'),
    'formula': all_by(1.01, 'step', 3),
    'epsilon': put([0.0] * 6, 'change', '1e-05'),
    'kl': put([0.0] * 6, 'change', 'kl'),
    'always_clipped': put(0.1, 'change', 'always_clipped', 2),
    'sometimes_clipped': put([0.0] * 6, 'change', 'sometimes_clipped'),
    'sgd': put([0.0] * 6, 'change', 'sgd'),
  },
  'transformer_scale': {
    'tiny': put(0.5, 'change', '1e-15', 4),
    'usual_up': put(0.5, 'change', '1e-08', 4),
    'usual_down': put([0.0] * 5, 'change', '1e-08'),
    'large': put(0.9, 'way', '1e-05', 0),
    'clipped': put([0.0] * 5, 'change', 'clipped'),
  },
  'transformer_jump': {
    'equal': put(3.0, 'equal', 0),
    'fresh': as_if_equal,
    'independent': as_if_equal,
    'acts': put([[1.0] * 12] * 5, 'fresh'),
  },
  'transformer_prefix': {
    'identity': put(0.1, 'identity', 2),
    'uniform': put(0.1, 'part', 'rloo', 3),
    'grpo': put([0.0] * 8, 'part', 'grpo'),
    **{
      f'{claim}_{name}': put([value] * 7, 'drift', name, arm)
      for name in ('AdamW', 'SGD')
      for claim, value, arm in (
        ('own', -1.0, 'grpo'),
        ('grpo', 0.5, 'grpo'),
        ('still', 0.0, 'dapo'),
      )
    },
  },
  'surrogate_value': {
    'grpo_zero': put(0.1, 'grpo', 'loss', 1, 2, 3),
    'grpo_learns': put([[[0.5] * 150] * 5] * 2, 'grpo', 'value'),
    # Twice the loss has the same correlation with the covariance.
    'lengths': all_by(2.0, 'dr_grpo', 'loss'),
    'long_right': all_by(-1.0, 'dr_grpo', 'loss'),
    'short_right': all_by(-1.0, 'dr_grpo', 'loss'),
  },
  'shared_prefix': {
    'identity': put(0.5, 'identity', 'measured', 3),
    'cancels': put(0.0, 'tree', 'dapo', 'first'),
    'grpo_bias': put(0.0, 'tree', 'grpo', 'first'),
    'dr_grpo': put(0.2, 'tree', 'dr_grpo', 'second'),
    'grpo_drift': put([[0.69]] * 9, 'drift', 'grpo'),
    'dapo_drift': put([[0.69]] * 9, 'drift', 'dapo'),
    'gspo_drift': put([[0.69]] * 9, 'drift', 'gspo'),
    'cppo_drift': put([[0.69]] * 9, 'drift', 'cppo'),
    'gtpo_drift': put([[0.69]] * 9, 'drift', 'gtpo'),
    'unbiased_drift': put([[0.9]] * 9, 'drift', 'rloo'),
    'dr_grpo_drift': put([[0.9]] * 9, 'drift', 'dr_grpo'),
    'flipped': put([[0.69]] * 9, 'flipped', 'grpo'),
    'flipped_others': put([[0.69]] * 9, 'flipped', 'cppo'),
    'flipped_gtpo': put([[0.4]] * 9, 'flipped', 'gtpo'),
  },
  'normalized_rate': {
    'reinforce': put([0.9999] * 5, 'start'),
    'sum_form': put(lambda old: old[:20], 'grpo'),
    'min_form': put([0.9999] * 5, 'start'),
  },
  'curvature': {
    'paper': put(4.5, 'hessian', 7),
    'tight': put(2.01, 'hessian', 7),
    'reached': all_by(0.9, 'hessian'),
    'absolute': put(0.2, 'absolute', 7),
    'gradient': put(0.4, 'gradient', 7),
  },
  'rate_exponents': {
    'reinforce_tail': put(0.5, 'reinforce', 'failures', -1),
    'grpo_tail': put(0.5, 'grpo', 'failures', -1),
    'reinforce_escape': put(100, 'reinforce', 'escape', 0),
    'grpo_escape': put(10, 'grpo', 'escape', 0),
  },
  'normalized_optimizer': {
    'sgd_same': put([0.9] * 32, 'failure', '0.5', 'SGD', 'divided', 0),
    'adam_same': all_by(2.0, 'failure', '0.0', 'Adam', 'divided'),
    'sgd_best': all_by(0.1, 'failure', '0.5', 'SGD', 'divided'),
    'adam_best': all_by(0.1, 'failure', '0.5', 'Adam', 'divided'),
    'large_epsilon_best': all_by(
      10, 'failure', '0.9', 'Adam, epsilon 0.01', 'divided'
    ),
    'adam_alike': all_by(2.0, 'alike', 'Adam', 'divided'),
    'sgd_alike': all_by(2.0, 'alike', 'SGD', 'divided'),
    'adam_alike_best': lambda numbers: numbers['alike'].update(
      Adam={
        arm: numbers['alike']['Adam']['plain'] for arm in ('plain', 'divided')
      }
    ),
    'inside': all_by(0.01, 'failure', '0.5', 'SGD', 'plain', 0),
  },
  'threshold': {
    'always': all_by(0.7, 'c'),
    'start': put(0.9, 'paper'),
    'conservative': put(0.0, 'reinforce', 0, 24),
    'start_decides': as_the_start,
    'flips': as_the_bounds,
  },
  'finite_group': {
    'exact': all_by(1.05, 'sampled'),
    'weight': put([[1.0] * 5] * 3, 'exact'),
    'limit': put(0.9, 'exact', 2, 4),
    'rare': put(0.9, 'exact', 0, 2),
  },
  'interaction': {
    'own_data': put(100.0, 'paper', '260'),
    'here': put([[1.0]] * 9, 'positive'),
    'two_prompts': put(0.1, 'two_prompts'),
    'm_own_data': put({'0': 5, '260': 6, '500': 7}, 'paper_m'),
    'm': put([[3.0]] * 9, 'm'),
  },
  'fisher': {
    'weighted': put([0.0] * 9, 'weighted'),
    'paper': put([0.9] * 9, 'paper'),
    'other': put([0.3] * 9, 'other'),
  },
  'other_optimizers': {
    'exact': put(0.1, 'exact', 'lion'),
    'still': put(0.5, 'optimizers', 'sgd', 0, 'steps', 3),
    'law_adamw': put(9.0, 'optimizers', 'adamw', 1, 'steps', 4),
    'law_momentum': put(9.0, 'optimizers', 'momentum', 1, 'steps', 4),
    'constant': put(0.1, 'optimizers', 'muon', 0, 'steps', -1),
    'law_free': put(9.0, 'optimizers', 'schedule_free_adam', 0, 'steps', 7),
    'further': of_seeds('adamw', 'coast', lambda way: [*way[:-1], 0.01]),
    **{
      f'{claim}_{name}': of_seeds(name, *edit)
      for name in other_optimizers.MOVING
      for claim, edit in (
        ('carried', ('carried', lambda old: -abs(old))),
        ('foretold', ('real', lambda way: [*way[:-1], 99.0])),
      )
    },
    **{
      f'{clip}_{claim}': of_clip(clip, *edit)
      for clip in ('narrowed', 'foreseen')
      for claim, edit in (
        ('fewer', ('outside', 2.0)),
        ('keeps', ('outside', 1e-9)),
        ('gains', ('gain', 1e9)),
      )
    },
  },
}


LONG = (
  'normalized_optimizer',
  'transformer_scale',
  'transformer_jump',
  'transformer_prefix',
  'other_optimizers',
  # These take some seconds each, most of them to compile. `coasting_distance`,
  # `reward_scale` and the others show the same code at work.
  'coasting_ratio',
  'momentum_split',
  'shared_prefix',
  'finite_group',
  'surrogate_value',
)


def marked(*given):
  """A case of the tests below; those that train for long are `long`."""
  long = given[0] in LONG
  return pytest.param(*given, marks=[pytest.mark.long] * long)


EVERY = [marked(name, one) for name, edits in EDITS.items() for one in edits]


@functools.cache
def numbers_of(name):
  """What an experiment measured, as a reader of the JSON has it."""
  numbers = papers.experiment(name).run(False)
  return json.loads(json.dumps(numbers, allow_nan=False))


def rows_of(name, numbers):
  return {
    row.name: row for row in claims.check(papers.experiment(name), numbers)
  }


def test_every_claim_has_an_edit():
  assert set(EDITS) == set(studies.EXPERIMENTS)
  for name, edits in EDITS.items():
    assert edits.keys() == papers.experiment(name).claims.keys()


@pytest.mark.parametrize('name', [marked(name) for name in EDITS])
def test_verdicts_on_what_was_measured(name):
  for row in rows_of(name, numbers_of(name)).values():
    wanted = NOT_TRUE.get((name, row.name), HOLDS)
    assert row.verdict == wanted, (row.name, row.measured)
    if wanted == FAILS and row.claim.source[:5] == 'arXiv':
      assert 'case' in row.measured.example or row.name == 'here'


@pytest.mark.parametrize('name, one', EVERY)
def test_a_verdict_turns_with_its_numbers(name, one):
  numbers = copy.deepcopy(numbers_of(name))
  before = rows_of(name, numbers)[one].verdict
  EDITS[name][one](numbers)
  with np.errstate(all='ignore'):
    assert rows_of(name, numbers)[one].verdict != before


@pytest.mark.parametrize(
  'mean, half, wanted',
  [
    (0.5, 0.5, HOLDS),
    (1.1, 0.0, FAILS),
    (-0.2, 0.1, FAILS),
    (0.9, 0.2, OPEN),
    (0.5, float('nan'), OPEN),
    (float('nan'), 0.0, OPEN),
  ],
)
def test_a_verdict_compares_an_interval_with_a_range(mean, half, wanted):
  claim = Claim('x', 'derived', 0, 1)
  assert claims.verdict(claim, Measured(mean, half)) == wanted


def test_an_open_claim_says_how_many_values_would_decide_it():
  """With so many the interval is as wide as its mean is far from the end."""
  claim = Claim('x', 'derived', -0.14, 0.14)
  values = [0.1, 0.2, 0.5, -0.1]
  measured = claims.over_seeds(values)
  assert measured.count == 4 and claims.verdict(claim, measured) == OPEN
  needed = claims.values_needed(claim, measured)
  deviation, distance = np.std(values, ddof=1), measured.mean - 0.14
  assert needed is not None
  half = [
    stats.t.ppf(0.975, n - 1) * deviation / np.sqrt(n)
    for n in (needed - 1, needed)
  ]
  assert half[0] > distance >= half[1]
  row = claims.Row('x', claim, measured, OPEN)
  assert claims.answer(row).endswith(f'(n = 4; to decide takes n ≥ {needed})')
  # The nearer end counts, also from inside.
  inside = measured._replace(mean=-0.1)
  few = claims.values_needed(claim, inside)
  assert few == claims.values_needed(claim, measured._replace(mean=0.1))


@pytest.mark.parametrize(
  'measured',
  [
    Measured(0.5, 0.1, 3),  # fails
    Measured(0.0, 0.1, 3),  # holds
    Measured(0.1, float('nan'), 1),  # one seed
    Measured(0.14, 0.1, 3),  # at the end: no number is enough
    Measured(0.14 + 1e-9, 0.1, 3),  # so many that nobody has them
    Measured(np.inf, float('nan'), 3),  # of infinite values
    Measured(0.1, np.inf, 3),
    claims.UNKNOWN,
  ],
)
def test_where_no_number_of_values_would_decide_none_is_said(measured):
  claim = Claim('x', 'derived', -0.14, 0.14)
  row = claims.Row('x', claim, measured, claims.verdict(claim, measured))
  assert claims.values_needed(claim, measured) is None
  assert claims.answer(row) == claims.value(measured)


@pytest.mark.parametrize('sign', [1, -1])
def test_what_is_said_of_the_furthest_of_several_foretells_no_verdict(sign):
  open_one = Measured(0.1 * sign, 0.5, 3, 'here')
  alone = claims.furthest([claims.UNKNOWN, open_one], sign)
  assert alone == open_one  # of one that is known the count is its own
  found = claims.furthest([open_one, Measured(0.0, 0.1, 9)], sign)
  assert found == open_one._replace(count=0)
  claim = Claim('x', 'derived', high=0.2)
  assert claims.values_needed(claim, found) is None


@pytest.mark.parametrize(
  'claim, sign, text',
  [
    (Claim('more', 'derived', low=claims.ABOVE_0), 1, '> 0'),
    (Claim('less', 'derived', high=claims.BELOW_0), -1, '< 0'),
  ],
)
def test_what_is_equal_is_neither_more_nor_less(claim, sign, text):
  assert claims.expected(claim) == text
  assert claims.verdict(claim, Measured(0.0)) == FAILS
  assert claims.verdict(claim, Measured(1e-300 * sign)) == HOLDS
  assert claims.verdict(claim, Measured(0.0, 0.1, 3)) == OPEN
  assert claims.values_needed(claim, Measured(0.0, 0.1, 3)) is None


def test_a_step_after_a_jump_follows_the_formula_for_noise():
  """Adam itself, on gradients that are noise alone."""
  noise = np.sign(np.random.default_rng(0).standard_normal((32, 20_000)))
  steps = np.asarray(transformer._ratios(noise, np.zeros(20_000)))
  k = np.arange(1, len(steps) + 1)
  law = transformer.independent_gradients_step(0.9, 0.99, 10.0, k)
  np.testing.assert_allclose(steps, law, rtol=0.02)
  # A factor of 1 is no jump.
  flat = transformer.independent_gradients_step(0.9, 0.99, 1.0, k)
  np.testing.assert_allclose(flat, 1)
  assert np.all(steps > 1.4 * scales.equal_gradients_step(0.9, 0.99, 10, 1))


def test_best_rates_at_the_first_place_leave_no_lower_ones():
  failures = [[0.1] * 16, [0.2] * 16, [0.3] * 16]
  arms = {'plain': failures, 'divided': failures}
  assert normalized_optimizer._at_low_rates(arms) == []
  nothing = normalized_optimizer._largest([])
  claim = Claim('x', 'derived', high=1)
  assert claims.verdict(claim, nothing) == OPEN


def test_best_rates_are_chosen_on_other_seeds():
  # Seeds take turns in 8 blocks, and in each of them choose or compare.
  chooses = np.arange(32) // 8 % 2 == 0
  plain = np.where(chooses, [[1.0], [2.0]], [[4.0], [1.0]])
  arms = {'plain': plain, 'divided': np.ones((2, 32))}
  assert normalized_optimizer._held_out(arms) == (2.0, 0.0, 8, '')


def test_a_group_of_equal_rewards_pulls_nowhere():
  reward, length = np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([[1, 2]] * 2)
  # Deviation 1/2, centred rewards +-1/2.
  np.testing.assert_allclose(coefficients.pull(reward, length), [0, 0.25])


def test_files_of_an_experiment(tmp_path):
  results = papers.run('threshold', tmp_path / 'new')
  made = {path.name for path in (tmp_path / 'new').iterdir()}
  pictures = {'threshold-light.png', 'threshold-dark.png'}
  tables = {'claims.html', 'claims.md', 'claims.json'}
  assert made == {'index.html', *tables, *pictures}
  text = (tmp_path / 'new' / 'claims.json').read_text()
  found = json.loads(text)['threshold']
  assert found['figure']['title'] in (tmp_path / 'new/claims.md').read_text()
  page = html_tree.Tree((tmp_path / 'new/claims.html').read_text())
  ((_, light, _),), ((_, dark, _),) = page.of('img'), page.of('source')
  assert light['alt'] == found['figure']['title']
  for place, file in ((light['src'], 'light'), (dark['srcset'], 'dark')):
    head, _, data = place.partition('base64,')
    assert head == 'data:image/png;'
    picture = tmp_path / f'new/threshold-{file}.png'
    assert base64.b64decode(data) == picture.read_bytes()
  assert {one['name']: one['verdict'] for one in found['claims']} == {
    row.name: row.verdict for row in results['threshold'].rows
  }
  # The verdicts follow from the numbers in the file.
  again = rows_of('threshold', found['numbers']).values()
  assert [one['verdict'] for one in found['claims']] == [
    row.verdict for row in again
  ]


def test_the_title_of_a_figure_is_made_from_the_numbers(tmp_path):
  from matplotlib.figure import Figure

  from grpo_jax.lab.studies import figures

  drawn = papers.experiment('normalized_rate')
  numbers = copy.deepcopy(numbers_of('normalized_rate'))

  def title():
    found = drawn.measure(numbers)
    return drawn.draw(numbers, found, Figure(), figures.LIGHT)

  assert '36-fold' in title()
  for name in ('grpo', 'reinforce'):
    numbers[name] = numbers[name][:2000]
  assert '36-fold' not in title()


def test_pages_are_plain_where_a_cell_has_a_bar():
  claim = Claim('|x| is small.', 'derived', high=1.0)
  row = claims.Row('x', claim, Measured(0.5, 0.1), HOLDS)
  assert pages.cells(row)['measured'] == '0.5 ± 0.1'
  assert pages.to_json({}) == {}


@pytest.mark.long
def test_the_command_writes_and_prints(tmp_path):
  done = cli.command('study', 'curvature', f'--out={tmp_path}')
  assert done.returncode == 0, done.stderr
  assert 'E8b' in done.stdout and 'holds' in done.stdout
  assert (tmp_path / 'claims.md').exists()
  done = cli.command('study', 'curvature')
  cli.assert_refused(done, 'study curvature needs --out')
