"""The frame of the live display, as text."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.console import Group

from grpo_jax.monitor import Sample
from grpo_jax.monitor import table
from grpo_jax.monitor import view as view_lib
from grpo_jax.monitor.view import Tile
from tests.chosen import chosen

SCALARS = {
  'accuracy': 0.513,
  'kl_old_k3': 3.2e-4,
  'kl_ref_k3': 0.0123,
  'entropy': 0.814,
  'clipped_high': 0.0121,
  'clipped_low': 0.0082,
  'ratio_p01': 0.912,
  'ratio_p99': 1.104,
  'ess_token': 0.983,
  'overshoot': 4.1e-4,
  'loss': -0.0213,
  'grad_norm': 0.415,
  'update_norm': 3.1e-4,
  'param_norm': 45_210.0,
  'length_tokens': 212.4,
  'truncated': 0.0124,
  'uniform_groups': 0.254,
  'sample_tokens_per_sec': 75_100.0,
  'learn_tokens_per_sec': 181_000.0,
  'mfu_learn': 0.417,
  'step_secs': 2.51,
}
GROUPS = table.groups(SCALARS, {})
VIEW = view_lib.View(
  label='rollout',
  step=12,
  total=100,
  doing='sampling and judging',
  doing_secs=4.25,
  tiles=(
    Tile('reward', 0.512, [(n, 0.1 + n / 40) for n in range(1, 13)]),
    Tile('held-out accuracy', 0.42, [(0, 0.335), (10, 0.42)], 'best 0.430'),
    Tile('tokens per second', 53_000.0, [(1, 150.0), (12, 53_000.0)]),
  ),
  groups=GROUPS,
  samples=(
    Sample('What is 37 + 85?\n', 'Add the ones. ' * 30 + '\\boxed{122}', 1.0),
    Sample('12+5=', '[/red] 漢字\x1b[2J\n[bold]17', 0.5),
    Sample('99+1=', '100', -1.0),
  ),
  note='sums are written backwards',
  warnings=(
    'rollout 7: KL to the reference is 1.73 nats per token, above log.kl_alarm='
    '1: the policy runs away; raise beta or lower optim.lr.',
    'rollout 9: [/b] second',
    'rollout 11: third',
  ),
  elapsed=31.0,
  left=228.0,
)
SIZES = [(80, 24), (120, 40), (200, 50)]


def draw(view, width, height=60):
  """What a terminal of this size shows; rich may wrap nothing."""
  frame = view_lib.frame(view, width, height)
  console = Console(
    record=True,
    width=width,
    height=height,
    file=io.StringIO(),
    force_terminal=True,
  )
  console.print(Group(*frame))
  lines = [line.rstrip() for line in console.export_text().splitlines()]
  assert lines == [line.plain.rstrip() for line in frame]
  assert all(cell_len(line) <= width for line in lines)
  assert lines[-1] == '' and len(lines) <= height
  return lines


WIDE = Sample('漢字' * 100, '漢字' * 100 + '5', 1.0)
WARM_UP = VIEW._replace(
  label='warm-up', tiles=VIEW.tiles[:2], groups={}, samples=(), warnings=()
)


@pytest.mark.parametrize(
  'width',
  chosen([1, 10, 20, 40, 79, 80, 81, 120, 160, 200], {1, 20, 79, 80, 120, 200}),
)
@pytest.mark.parametrize(
  'height', chosen([1, 2, 5, 12, 23, 24, 30, 40, 50], {1, 5, 23, 24, 50})
)
@pytest.mark.parametrize(
  'view',
  [
    view_lib.View(),
    view_lib.View(doing='loading JAX', doing_secs=3.0),
    WARM_UP,
    VIEW,
    VIEW._replace(samples=(WIDE,) * 3, warnings=()),
  ],
)
def test_nothing_wraps_and_nothing_is_too_high(view, width, height):
  draw(view, width, height)


@pytest.mark.parametrize(
  'first, number',
  [
    pytest.param(
      first, number, marks=[pytest.mark.long] * (place % 3 != number - 1)
    )
    for place, first in enumerate([0, 990, 12_345])
    for number in (1, 2, 3)
  ],
)
def test_curves_of_a_long_run_fit_every_width(first, number):
  tiles = [
    one._replace(points=[(first, 0.25), (first + 9, 0.5)]) for one in VIEW.tiles
  ]
  for width in range(1, 100):
    draw(VIEW._replace(tiles=tiles[:number], groups={}), width, 24)


@pytest.mark.parametrize('width, height', [(120, 60), (160, 50), (200, 50)])
def test_every_number_is_there_with_its_unit(width, height):
  lines = draw(VIEW, width, height)
  text = ' '.join(' '.join(lines).split())
  for rows in GROUPS.values():
    for row in rows:
      said = f'{row.label} {row.value} {row.unit}'.rstrip()
      assert said in text, said
  for word in ('12/100', '12%', '0:31', '3:48', '1.000', '0.500', '-1.000'):
    assert word in text.split()
  assert 'sampling and judging 4.2 s' in text
  assert 'oxed{122}' in text and '…' in text
  assert '12+5=' in text and '! rollout 9: [/b] second' in text
  assert text.count('raise beta or lower optim.lr.') == 1


@pytest.mark.parametrize('width, height', SIZES)
def test_what_matters_most_is_largest(width, height):
  lines = draw(VIEW._replace(warnings=()), width, height)
  labels = ['reward', 'held-out accuracy', 'tokens per second']
  (top,) = [
    n for n, line in enumerate(lines) if re.split('  +', line)[1:] == labels
  ]
  starts = [lines[top].index(label) for label in labels]
  for start, tile in zip(starts, VIEW.tiles):
    big = [lines[top + n][start:] for n in (1, 2, 3)]
    assert all(re.match('[█▀▄ ]{15}', line) for line in big), tile
  # A curve of each, with its scale.
  text = '\n'.join(lines)
  for scale in ('0.400', '0.125', '0.420', '0.335', '53.0k', '150.0'):
    assert f'█ {scale}' in text or f'▁ {scale}' in text, scale


@pytest.mark.parametrize('width, height', SIZES)
def test_the_height_is_used(width, height):
  full = VIEW._replace(warnings=VIEW.warnings[1:])
  assert height - 4 <= len(draw(full, width, height)) <= height


@pytest.mark.parametrize('width', [80, 120, 200])
@pytest.mark.parametrize('height', chosen(range(20, 51), {*range(20, 51, 3)}))
def test_what_is_planned_is_not_cut_off(width, height):
  for view in (VIEW._replace(warnings=()), WARM_UP):
    plan = view_lib.plan_for(view, width, height)
    assert len(view_lib.frame(view, width, 99, plan)) <= height


def test_curves_grow_with_the_terminal():
  def bars(width, height):
    lines = draw(VIEW._replace(warnings=()), width, height)
    return sum(line.count('█') for line in lines)

  assert bars(80, 24) < bars(120, 40) < bars(200, 50)


@pytest.mark.parametrize('width, height', [*SIZES, (80, 12), (40, 12)])
def test_warnings_stay_visible(width, height):
  text = '\n'.join(draw(VIEW, width, height))
  for step in (7, 9, 11):
    assert f'! rollout {step}: ' in text
  assert ('0.512' if width < 80 else 'reward') in text


@pytest.mark.parametrize('width', [80, 120])
def test_what_looks_like_markup_survives(width):
  text = '\n'.join(draw(VIEW, width))
  assert r'[/red] 漢字\x1b[2J\n[bold]17' in text
  assert r'What is 37 + 85?\n' in text or width == 80


@pytest.mark.parametrize(
  'width, across', [(50, 1), (80, 2), (120, 2), (200, 3)]
)
def test_columns_are_aligned(width, across):
  lines = draw(VIEW, width, 70)
  title = next(line for line in lines if line.startswith('  answers'))
  first = lines[lines.index(title) + 1]
  starts = [match.start() for match in re.finditer(r'\S+( \S+)*', title)]
  assert len(starts) == across and starts[0] == 2
  assert len({b - a for a, b in zip(starts, starts[1:])}) <= 1
  for start in starts:
    assert first[start] != ' ' and first[start - 1] == ' '


def test_what_is_absent_leaves_no_hole():
  groups = table.groups({'loss': 1.5, 'entropy': 0.5, 'lr': None}, {})
  lines = draw(view_lib.View(groups=groups), 80)
  assert [line.split() for line in lines] == [
    ['policy', 'optimizer'],
    ['entropy', '0.500', 'nats', 'loss', '1.500'],
    [],
  ]


def test_a_low_terminal_leaves_out_what_matters_least():
  def shown(height):
    return '\n'.join(draw(VIEW._replace(warnings=()), 80, height))

  tall, usual, low = shown(40), shown(24), shown(18)
  for label in ('99th percentile ratio', 'update norm'):
    assert label in tall and label not in usual
  for label in ('entropy', 'KL from sampling policy', 'gradient norm'):
    assert label in usual
  assert 'samples' in usual and 'samples' not in low and 'entropy' in low


def test_what_is_being_done_comes_and_goes_on_a_line_of_its_own():
  quiet = draw(VIEW._replace(doing='', doing_secs=None), 80, 24)
  busy = draw(VIEW, 80, 24)
  assert quiet[1] == '' and busy[1] == '  sampling and judging  4.2 s'
  assert quiet[2:] == busy[2:]


def test_the_bar_grows():
  def bar(step):
    header = draw(VIEW._replace(step=step), 80)[0]
    return header.count('━'), header.count('─')

  assert bar(0)[0] == 0 and bar(100)[1] == 0
  done, left = bar(50)
  assert abs(done - left) <= 1 and done + left > 20


def test_a_run_of_no_steps_is_done():
  assert '0/0' in draw(view_lib.View(label='rollout'), 80)[0]


def test_what_is_not_finite_is_shown():
  groups = table.groups({'loss': float('nan')}, {})
  tiles = (Tile('reward', float('nan')),)
  text = '\n'.join(draw(view_lib.View(groups=groups, tiles=tiles), 80))
  assert re.search(r'loss +nan', text) and text.count('nan') == 2
