"""Pages of figures, tables and text: one HTML file each, without a network.

`make_page` reads workdirs and returns a `Page`; `write` writes it. A study
makes a page of its own from the same parts:

>>> import numpy as np
>>> curve = make_curve('Adam', [(np.arange(3), np.array([0.1, 0.4, 0.5]))])
>>> chart = Chart('Adam learns', 'Mean reward.', [curve])
>>> page = Page('A study', 'What it asks.', [Section('Results', [chart])])
>>> as_html(page).count('<figure')
1
"""

from collections.abc import Sequence
import datetime

from grpo_jax import __version__
from grpo_jax.lab.report import gradients as _gradients
from grpo_jax.lab.report import read as _read
from grpo_jax.lab.report import sections as _sections
from grpo_jax.lab.report import transcripts as _transcripts
from grpo_jax.lab.report import words as _words
from grpo_jax.lab.report.curves import make_curve
from grpo_jax.lab.report.page import as_html
from grpo_jax.lab.report.page import write
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Completion
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Curve
from grpo_jax.lab.report.types import Facts
from grpo_jax.lab.report.types import Finding
from grpo_jax.lab.report.types import Findings
from grpo_jax.lab.report.types import Link
from grpo_jax.lab.report.types import Page
from grpo_jax.lab.report.types import Pair
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Picture
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.lab.report.types import Timeline
from grpo_jax.lab.report.types import Token

__all__ = (
  'Chart', 'Completion', 'Completions', 'Curve', 'Facts', 'Finding',
  'Findings', 'Link', 'Page', 'Pair', 'Part', 'Picture', 'Section', 'Table',
  'Text', 'Timeline', 'Token', 'as_html', 'make_curve', 'make_page', 'write',
)  # fmt: skip

_HOW = (
  'Point at a chart to read it, drag to zoom, double-click to show all again. '
  'With the keyboard: the arrow keys read (with Shift in larger steps), plus '
  'and minus zoom, Escape shows all. Charts over the same axis are read and '
  'zoomed together.',
  'Where a curve has more rollouts than fit, these are cut into bins of equal '
  'width: a point is the mean of its bin, and the least and the largest value '
  'go with it. A chart says below it when that is so.',
  'Runs that differ in nothing but their seeds are one curve. Its band, and ± '
  'behind a number, is the 95 % interval of the mean over seeds, from '
  "Student's distribution; with three seeds it is wide. Titles compare the "
  'first tenth of the rollouts with the last. Each run has tenths of its own, '
  'also where one ends before the others.',
  'Where an interval leaves the drawing, it is cut; its numbers are not.',
)


def make_page(workdirs: Sequence[str]) -> Page:
  """The page about one run, or about several beside each other.

  Args:
    workdirs: At least one.

  Returns:
    A `Page`.

  Raises:
    ValueError: One of them holds no run.
  """
  if not workdirs:
    raise ValueError('There is no run to report on; give a workdir.')
  runs = _read.runs(workdirs)
  groups, said = _read.group_runs(runs)
  charts = _sections.Charts(groups)
  summary = _sections.summary(groups, charts)
  warnings = [Text(one, 'warning') for one in said]
  sections = [
    summary._replace(parts=[*summary.parts, *warnings]),
    _sections.learned(charts),
    _transcripts.before_and_after(groups),
    *_sections.diagnostics_sections(charts),
    *_gradients.section(groups, charts),
    _sections.alarms(groups, charts),
    _transcripts.completions(groups),
    _sections.method(groups),
    _sections.speed(charts),
    _sections.config(groups),
    _sections.versions(groups),
    _sections.others(charts),
    Section('How to read this page', [Text(text) for text in _HOW]),
  ]
  title = ' · '.join(group.name for group in groups)
  if len(groups) > 4:
    title = f'{len(groups)} groups of runs'
  now = datetime.datetime.now().astimezone().strftime('%d %B %Y, %H:%M %Z')
  about = (
    f'{_words.plural(len(runs), "run")}, read on {now} by grpo_jax '
    f'{__version__}.'
  )
  return Page(title, about, sections)
