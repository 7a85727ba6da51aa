"""The frame of the live display, as text."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.console import Group

from grpo_jax.monitor import Sample
from grpo_jax.monitor import _view

VIEW = _view.View(
  step=12,
  total=100,
  scalars={
    'reward': 0.512,
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
    'lr': 1e-6,
    'length_tokens': 212.4,
    'truncated': 0.0124,
    'uniform_groups': 0.254,
    'staleness_steps': 0.0,
    'sample_tokens_per_sec': 75_100.0,
    'learn_tokens_per_sec': 181_000.0,
    'mfu_learn': 0.417,
  },
  samples=(
    Sample('What is 37 + 85?\n', 'Add the ones. ' * 30 + '\\boxed{122}', 1.0),
    Sample('12+5=', '[/red] 漢字\x1b[2J\n[bold]17', 0.5),
    Sample('99+1=', '100', -1.0),
  ),
  warnings=(
    'step 7: KL to the reference is 1.73 nats per token, above log.kl_alarm=1: '
    'the policy runs away; raise beta or lower optim.lr.',
    'step 9: [/b] second',
    'step 11: third',
  ),
  rewards=[0.1, 0.2, 0.4, 0.5],
  heldout=[0.43, 0.42],
  elapsed=31.0,
  left=228.0,
  step_secs=2.51,
)
NUMBERS = (
  '12/100 12% 0:31 3:48 0.512 0.513 0.420 0.430 3.2e-04 0.0123 0.814 0.0121 '
  '0.0082 0.912 1.104 0.983 4.1e-04 -0.0213 0.415 3.1e-04 45.2k 1.0e-06 212.4 '
  '0.0124 0.254 0 75.1k 181k 0.417 2.510 1.000 0.500 -1.000'
).split()


def draw(view, width, height=60):
  """What a terminal of this size shows; rich may wrap nothing."""
  frame = _view.frame(view, width, height)
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


@pytest.mark.parametrize('width', [20, 40, 80, 160])
def test_nothing_wraps(width):
  wide = Sample('漢字' * 100, '漢字' * 100 + '5', 1.0)
  lines = draw(VIEW._replace(samples=(wide,)), width)
  assert width < 40 or lines[-2].endswith('5') and '漢…漢' in lines[-2]


@pytest.mark.parametrize('width', [50, 74, 80, 123, 124, 160, 200])
def test_every_number_is_there(width):
  lines = draw(VIEW, width)
  words = '\n'.join(lines).split()
  for number in NUMBERS:
    assert number in words
  text = '\n'.join(lines)
  assert 'oxed{122}' in text and '…' in text
  assert r'12+5=' in text and '! step 9: [/b] second' in text
  assert ' '.join(text.split()).count('raise beta or lower optim.lr.') == 1


@pytest.mark.parametrize('width', [80, 160])
def test_what_looks_like_markup_survives(width):
  text = '\n'.join(draw(VIEW, width))
  assert r'[/red] 漢字\x1b[2J\n[bold]17' in text
  assert r'What is 37 + 85?\n' in text or width == 80


@pytest.mark.parametrize('width, across', [(50, 2), (80, 3), (160, 5)])
def test_columns_are_aligned(width, across):
  lines = draw(VIEW, width)
  rows = [line for line in lines if re.match('  (quality|reward) ', line)]
  title, first = rows
  starts = [match.start() for match in re.finditer(r'\S+', title)]
  assert len(starts) == across and starts[0] == 2
  pitch = {b - a for a, b in zip(starts, starts[1:])}
  assert len(pitch) == 1
  for start in starts:  # a value ends 22 columns after its label begins
    assert first[start + 21] != ' ' and first[start + 22 : start + 23] in ' '


def test_what_is_absent_leaves_no_hole():
  few = {'reward': 0.5, 'loss': 1.5, 'lr': None}
  lines = draw(_view.View(step=1, total=4, scalars=few), 80)
  assert [line.split() for line in lines[2:]] == [
    ['quality', 'optimizer'],
    ['reward', '0.500', 'loss', '1.500'],
    [],
  ]


def test_the_latest_and_the_best_evaluation_stay():
  text = '\n'.join(draw(VIEW, 80))
  assert re.search(r'held-out +0.420', text)
  assert re.search(r'held-out best +0.430', text)


def test_a_low_terminal_shortens_warnings_then_samples():
  lines = draw(VIEW, 80, 24)
  assert len(lines) == 24
  assert sum(line.startswith('  ! step') for line in lines) == 3
  assert '1.73 nats' in '\n'.join(lines) and lines[-2].endswith('→ 100')
  lines = draw(VIEW, 80, 23)
  assert '→ 100' not in '\n'.join(lines) and '12+5=' in lines[-2]
  assert 'samples' not in '\n'.join(draw(VIEW, 80, 15))


def test_the_bar_grows():
  def bar(step):
    header = draw(VIEW._replace(step=step), 80)[0]
    return header.count('━'), header.count('─')

  assert bar(0)[0] == 0 and bar(100)[1] == 0
  done, left = bar(50)
  assert abs(done - left) <= 1 and done + left > 20


def test_a_run_of_no_steps_is_done():
  assert '0/0' in draw(_view.View(), 80)[0]


def test_what_is_not_finite_is_shown():
  scalars = {'loss': float('nan'), 'reward': 0.5}
  assert re.search(
    r'loss +nan', '\n'.join(draw(_view.View(scalars=scalars), 80))
  )


@pytest.mark.parametrize(
  'values, width, curve',
  [
    ([], 5, ''),
    ([2.0], 5, '▄'),
    ([2.0, 2.0], 5, '▄▄'),
    ([0.0, 7.0, 3.5], 5, '▁█▅'),
    (range(8), 8, '▁▂▃▄▅▆▇█'),
    (range(800), 8, '▁▂▃▄▅▆▇█'),
    ([-7.0, 0.0], 2, '▁█'),
  ],
)
def test_sparkline(values, width, curve):
  assert _view.sparkline(values, width) == curve
