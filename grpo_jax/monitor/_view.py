"""The frame that the live display draws: lines for a width and a height."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
import textwrap
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.monitor import _format
from grpo_jax.monitor._samples import Sample
from grpo_jax.monitor._samples import shorten

_GROUPS = {
  'quality': {
    'reward': 'reward',
    'rewards': '',  # the sparkline
    'accuracy': 'accuracy',
    'heldout_accuracy': 'held-out',
    'heldout_best': 'held-out best',
  },
  'policy': {
    'kl_old_k3': 'kl old',
    'kl_ref_k3': 'kl reference',
    'entropy': 'entropy',
    'clipped_high': 'clipped high',
    'clipped_low': 'clipped low',
    'ratio_p01': 'ratio p01',
    'ratio_p99': 'ratio p99',
    'ess_token': 'ess token',
    'prefix_whole_uncancelled': 'shared |W|',
    'overshoot': 'overshoot',
    'overshoot_carried': 'carried',
    'overshoot_fresh': 'fresh',
    'overshoot_predicted': 'will coast',
    'rollout_outside': 'ends outside',
  },
  'optimizer': {
    'loss': 'loss',
    'grad_norm': 'grad norm',
    'update_norm': 'update norm',
    'param_norm': 'param norm',
    'adam_carried_norm': 'carried norm',
    'adam_fresh_norm': 'fresh norm',
    'adam_below_epsilon': 'below epsilon',
    'lr': 'lr',
  },
  'data': {
    'length_tokens': 'length tokens',
    'truncated': 'truncated',
    'uniform_groups': 'uniform groups',
    'staleness_steps': 'stale steps',
    'prompts_drawn': 'prompts drawn',
    'accuracy_drawn': 'accuracy drawn',
    'prompts_retired': 'retired',
  },
  'speed': {
    'sample_tokens_per_sec': 'sample tok/s',
    'learn_tokens_per_sec': 'learn tok/s',
    'mfu_learn': 'mfu learn',
    'step_secs': 'step secs',
  },
}
# Which groups stand above each other, the widest arrangement first.
_ARRANGEMENTS = (
  (('quality',), ('policy',), ('optimizer',), ('data',), ('speed',)),
  (('quality', 'data'), ('policy',), ('optimizer', 'speed')),
  (('quality', 'data', 'speed'), ('policy', 'optimizer')),
  (('quality', 'policy', 'optimizer', 'data', 'speed'),),
)
_LABEL, _VALUE = 14, 8  # columns
_CELL = _LABEL + _VALUE
_GAP, _MOST_GAP = 3, 9  # columns between two cells
_INDENT = 2  # columns
_BARS = '▁▂▃▄▅▆▇█'


class View(NamedTuple):
  """Everything that a frame shows."""

  label: str = 'step'  # what is counted
  step: int = 0
  total: int = 0
  scalars: Mapping[str, float | None] = {}
  samples: Sequence[Sample] = ()
  warnings: Sequence[str] = ()  # oldest first
  rewards: Sequence[float] = ()  # so far
  heldout: Sequence[float] = ()  # accuracies so far
  elapsed: float = 0.0  # seconds
  left: float | None = None  # seconds
  step_secs: float | None = None  # of the last step


def frame(view: View, width: int, height: int) -> list[Any]:
  """The lines of a frame.

  Args:
    view: What to show.
    width: Columns of the terminal.
    height: Rows of the terminal. Where they do not do, warnings show their
      first lines only (they stand in full above the frame), and the last
      samples give way.

  Returns:
    `rich.text.Text` lines, none of them wider than `width`. The last one is
    empty, so that the prompt of a shell after a kill has a line of its own.
  """
  from rich.text import Text

  empty = Text('')
  lines = [_header(view, width), empty, *_grid(view, width)]
  samples = _samples(view.samples, width)
  warnings = [line for text in view.warnings for line in _warning(text, width)]
  room = height - len(lines) - 1
  if len(warnings) + 1 + len(samples) + 1 > room:
    warnings = [_warning(text, width)[0].append('…') for text in view.warnings]
  for part in (warnings, samples):
    part = part[: max(0, room - 1)]
    if part:
      lines += [empty, *part]
      room -= len(part) + 1
  lines.append(empty)
  for line in lines:
    line.no_wrap, line.overflow = True, 'crop'
    line.truncate(width)
  return lines


def sparkline(values: Sequence[float], width: int) -> str:
  """A curve of one character's height.

  Args:
    values: Finite numbers, oldest first.
    width: Most characters; more values than that are averaged in turn.

  Returns:
    At most `width` characters between the least and the greatest.

  >>> sparkline([0.0, 0.0, 1.0, 2.0, 7.0, 7.0], 3)
  '▁▃█'
  """
  if not len(values):
    return ''
  parts = np.array_split(np.asarray(values), min(width, len(values)))
  means = np.array([part.mean() for part in parts])
  low, high = means.min(), means.max()
  if high == low:
    return _BARS[3] * len(means)
  levels = (means - low) / (high - low) * (len(_BARS) - 1)
  return ''.join(_BARS[round(level)] for level in levels)


def _header(view: View, width: int):
  """Count, bar, share, time so far, time left."""
  from rich.text import Text

  share = min(1.0, view.step / view.total) if view.total else 1.0
  count = f'{view.label} {view.step}/{view.total}'
  times = f'{share:4.0%}   elapsed {_format.duration(view.elapsed)}'
  if view.left is not None:
    times += f'   left {_format.duration(view.left)}'
  bar = max(0, width - 2 * _INDENT - len(count) - len(times) - 4)
  done = math.floor(share * bar)
  return Text.assemble(
    ' ' * _INDENT,
    (count, 'bold'),
    '  ',
    ('━' * done, 'green'),
    ('─' * (bar - done), 'dim'),
    '  ',
    times,
  )


def _grid(view: View, width: int) -> list[Any]:
  """The groups of numbers, side by side as far as the width goes."""
  from rich.text import Text

  scalars = dict(view.scalars)
  if view.heldout:
    scalars['heldout_accuracy'] = view.heldout[-1]
    scalars['heldout_best'] = max(view.heldout)
  scalars['step_secs'] = view.step_secs
  blocks = {
    title: _block(title, names, scalars, view.rewards)
    for title, names in _GROUPS.items()
  }
  arrangement = next(
    columns
    for columns in _ARRANGEMENTS
    if len(columns) == 1
    or _INDENT + len(columns) * (_CELL + _GAP) - _GAP <= width
  )
  columns = []
  for titles in arrangement:
    there = [blocks[title] for title in titles if blocks[title]]
    if there:
      joined = there[0]
      for block in there[1:]:
        joined = [*joined, Text(''), *block]
      columns.append(joined)
  spaces = max(1, len(arrangement) - 1)
  gap = (width - 2 * _INDENT - len(arrangement) * _CELL) // spaces
  gap = min(_MOST_GAP, max(_GAP, gap))
  lines = []
  for cells in itertools.zip_longest(*columns, fillvalue=Text('')):
    line = Text(' ' * _INDENT)
    for cell in cells:
      line.append_text(cell).append(' ' * (_CELL - len(cell) + gap))
    line.rstrip()
    lines.append(line)
  return lines


def _block(title, names, scalars, rewards) -> list[Any]:
  """A title and the rows of what is there; nothing if nothing is."""
  from rich.text import Text

  rows = []
  for name, label in names.items():
    value = scalars.get(name)
    if name == 'rewards' and len(rewards) > 1:
      rows.append(Text(sparkline(rewards, _CELL), style='green'))
    elif value is not None:
      row = Text(f'{label:{_LABEL}}', style='dim')
      strong = 'bold' if math.isfinite(value) else 'bold red'
      row.append(f'{_format.number(value):>{_VALUE}}', 'not dim ' + strong)
      rows.append(row)
  return [Text(title, style='cyan'), *rows] if rows else []


def _warning(text: str, width: int) -> list[Any]:
  """A warning over as many lines as it takes."""
  from rich.text import Text

  mark = ' ' * _INDENT + '! '
  lines = textwrap.wrap(
    text,
    max(width - 1, 20),
    initial_indent=mark,
    subsequent_indent=' ' * len(mark),
  )
  return [Text(line, style='yellow') for line in lines]


def _samples(samples: Sequence[Sample], width: int) -> list[Any]:
  """A title, then reward, prompt and completion of each, on one line."""
  from rich.cells import cell_len
  from rich.text import Text

  if not samples:
    return []
  lines = [Text(' ' * _INDENT + 'samples', style='cyan')]
  room = max(20, width - 2 * _INDENT - _VALUE - len('   → '))
  prompts = [shorten(s.prompt, int(0.4 * room), cell_len) for s in samples]
  widest = max(map(cell_len, prompts))
  for sample, prompt in zip(samples, prompts, strict=True):
    lines.append(
      Text.assemble(
        ' ' * _INDENT,
        (f'{sample.reward:{_VALUE}.3f}', 'bold'),
        '  ',
        (prompt + ' ' * (widest - cell_len(prompt)), 'dim'),
        ' → ',
        shorten(sample.completion, room - widest, cell_len),
      )
    )
  return lines
