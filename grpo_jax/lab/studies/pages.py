"""Experiments as text and as files: tables, every number, the figures.

`write` is the one place that knows in which form results are handed over.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import pathlib
import re
import shutil
import tempfile
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.lab import report
from grpo_jax.lab.report.curves import Interval
from grpo_jax.lab.studies import EXPERIMENTS
from grpo_jax.lab.studies import STUDIES
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import evidence
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import story

Lines = Sequence[Mapping[str, str]]


def number(value: float, sign: str = '') -> str:
  """A number with three digits after the point; '-' for NaN.

  Args:
    value: The number.
    sign: '+' writes the sign of a positive number too.

  >>> number(0.25, '+'), number(float('nan'))
  ('+0.250', '-')
  """
  return '-' if math.isnan(value) else f'{value:{sign}.3f}'


def mean_and_half(interval: Interval, sign: str = '') -> str:
  """An interval as `mean±half`; the mean alone if the half-width is NaN.

  Args:
    interval: See `Interval`.
    sign: See `number`.

  >>> mean_and_half(Interval(0.5, 0.02))
  '0.500±0.020'
  """
  half = '' if math.isnan(interval.half) else f'±{interval.half:.3f}'
  return number(interval.mean, sign) + half


def show_tables(tables: Mapping[str, Lines], notes: str) -> None:
  """Prints tables one below the other, and notes that explain them.

  Args:
    tables: By title, the lines of each table: the text of every cell by the
      name of its column. A table without lines is left out.
    notes: Text below the last table.
  """
  from rich import box
  from rich import console
  from rich import table

  # A pipe has no width; 160 columns are enough for the widest table.
  width = shutil.get_terminal_size((160, 24)).columns
  out = plain_text.guarded(console.Console(width=width, highlight=False))
  for title, lines in tables.items():
    if lines:
      first, *others = lines[0]
      made = table.Table(
        table.Column(first, no_wrap=True), *others,
        title=title, title_justify='left', box=box.SIMPLE, pad_edge=False,
      )  # fmt: skip
      for line in lines:
        made.add_row(*line.values())
      out.print(made)
  out.print(notes, markup=False)


def without_nan(value: Any) -> Any:
  """Nested dicts and lists with None for NaN and infinity, which JSON lacks."""
  if isinstance(value, dict):
    return {name: without_nan(inner) for name, inner in value.items()}
  if isinstance(value, list):
    return [without_nan(inner) for inner in value]
  is_finite = not isinstance(value, float) or math.isfinite(value)
  return value if is_finite else None


COLUMNS = 'verdict', 'claim', 'source', 'expected', 'measured'
"""Of the claims table; the verdict first, for screens that show no more."""


SYMBOLS = (
  ('failures', '1 - mean reward, or the probability of a wrong answer'),
  ('G, L', 'completions in a group; tokens of a completion'),
  ('J_i', 'expected reward of prompt i; g its gradient'),
  ('p', 'probability of a right answer; V = p (1 - p) is its variance'),
  ('X', 'the largest norm of the features of a prompt'),
  (
    'C(T)',
    '8/3 times the mean deviation sqrt(V) over T updates: by this factor the '
    "bound on GRPO's gradients differs from that on REINFORCE's",
  ),
  ('L3.1, T3.1, T3.2', 'a lemma and two theorems of arXiv:2601.23135'),
  (
    'A4, M',
    'its assumption that an update on one prompt hinders no other: the '
    'product of the gradients of two prompts is at least 0, and M says by how '
    'much it may be small',
  ),
  ('b1, b2, betas', "Adam's decays of the first and second moment"),
  ('phi', 'a factor on all rewards'),
)
"""What the claims call by a letter."""


_NOTES = """\
holds, fails: the whole 95 % interval of what was measured lies inside, or
outside, of what the claim expects. Exact numbers have no interval."""


_CLAIMS, _INDEX = 'claims.html', 'index.html'
_MODES = 'light', 'dark'
_MARKS = {claims.HOLDS: 'good', claims.FAILS: 'bad', claims.OPEN: 'open'}


_VERDICTS = (
  'A claim expects a number in a range. It holds if the whole 95 % interval of '
  'what was measured lies inside, and fails if it lies outside. Exact numbers '
  'have no interval.'
)


_HOW = (
  'Each chapter says what a paper claims and what was found. Below stand the '
  'experiments, each as a figure with the verdicts on its claims. A claim '
  f'leads to the numbers that decided it. {_VERDICTS}'
)


_WHOSE = (
  "The sentences tell of this project's own runs; the verdicts are of the runs "
  'on this page.'
)


_BESIDE = 6  # verdicts that are about as high as the figure beside them
_NOT_RUN = (
  'To have a study that trains runs on this page too, give its workdir as '
  '--run=WORKDIR to grpo-jax study all.'
)


class Result(NamedTuple):
  """An experiment that has been done.

  Attributes:
    experiment: Its claims.
    numbers: What it measured.
    rows: The verdict on each claim.
    seconds: What it took; of a study that trains runs, all of them together.
      NaN if that is not known.
    setting: What its trainings were about, see `story.Training`; '' for an
      experiment that trains no runs, or where nobody asks.
  """

  experiment: claims.Experiment
  numbers: claims.Numbers
  rows: Sequence[claims.Row]
  seconds: float
  setting: str = ''

  @property
  def title(self) -> str:
    """What it is about, and in which setting."""
    ending = f', in {self.setting}' if self.setting else ''
    return self.experiment.title + ending

  @property
  def heading(self) -> str:
    """Its label and its title."""
    return f'{self.experiment.label}: {self.title}'


class Judged(NamedTuple):
  """What the runs of a study say of its claims.

  Attributes:
    results: By the name of the study.
    folder: Of the pages.
    summary: What a study shows of its runs beside its claims; else None.
  """

  results: dict[str, Result]
  folder: pathlib.Path
  summary: Any = None


def show_judged(judged: Judged) -> None:
  """Prints verdicts, for a person."""
  show(judged.results, judged.folder / _CLAIMS)


def judged_to_json(judged: Judged) -> dict[str, Any]:
  """Verdicts and numbers, as JSON can hold them."""
  return to_json(judged.results)


def show_told(results: Mapping[str, Result], folder: pathlib.Path) -> None:
  """Prints verdicts, of which `write` has told the story in that folder."""
  show(results, folder / _INDEX)


def show(results: Mapping[str, Result], page: pathlib.Path) -> None:
  """Prints a table of claims for each experiment.

  Args:
    results: What `run` returned.
    page: The page to begin with.
  """
  shown = {}
  for done in results.values():
    shown[f'{done.heading}{_took(done, " ({} s)")}'] = [
      cells(row) for row in done.rows
    ]
  found = [f'{number} {kind}' for kind, number in counts(results).items()]
  files = f'{page}: {", ".join(found)}.'
  show_tables(shown, f'{_NOTES}\n{files}')


def prepare(folder: pathlib.Path) -> None:
  """Makes the folder of `write`; raises OSError if it cannot be written to."""
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=folder):
    pass


def write(
  results: Mapping[str, Result], folder: pathlib.Path, with_story: bool = False
) -> None:
  """Writes `claims.html`, `claims.md`, `claims.json` and the figures.

  Args:
    results: By the name of the experiment.
    folder: Where to; made if it does not exist.
    with_story: Also write `index.html`, which tells of the papers in chapters.
  """
  prepare(folder)
  drawn = {
    name: figures.save(name, done.experiment, done.numbers, folder)
    for name, done in results.items()
  }
  text = json.dumps(to_json(results, drawn), indent=1, allow_nan=False)
  (folder / evidence.FILE).write_text(text + '\n', encoding='utf-8')
  page = _markdown(results, drawn)
  (folder / 'claims.md').write_text(page, encoding='utf-8')
  shown = {
    name: _shown(done, drawn[name], folder) for name, done in results.items()
  }
  report.write(folder / _CLAIMS, _page(results, shown, with_story))
  if with_story:
    report.write(folder / _INDEX, _index(results, shown))


def to_json(
  results: Mapping[str, Result], drawn: Mapping[str, Mapping[str, str]] = {}
) -> dict[str, Any]:
  """Claims, verdicts and every number, as JSON can hold them.

  Args:
    results: By the name of the experiment.
    drawn: What `figures.save` returned for each.
  """
  answer = {
    name: {
      'label': done.experiment.label,
      'title': done.title,
      'seconds': round(done.seconds, 2),
      'claims': [
        {
          'name': row.name,
          **row.claim._asdict(),
          **row.measured._asdict(),
          'verdict': row.verdict,
        }
        for row in done.rows
      ],
      'figure': dict(drawn.get(name, {})),
      'numbers': done.numbers,
    }
    for name, done in results.items()
  }
  return without_nan(answer)


def verdicts_to_json(results: Mapping[str, Result]) -> dict[str, Any]:
  """The same without the numbers, which are in `claims.json`."""
  return {
    name: {key: value for key, value in one.items() if key != 'numbers'}
    for name, one in to_json(results).items()
  }


def cells(row: claims.Row) -> dict[str, str]:
  """A line of the claims table: the text of every cell by its column."""
  return {
    'verdict': row.verdict,
    'claim': f'{row.claim.text} {row.measured.example}'.strip(),
    'source': row.claim.source,
    'expected': claims.expected(row.claim),
    'measured': claims.answer(row),
  }


def linked(source: str) -> str:
  """A source with links to the papers in it, as Markdown.

  >>> linked('arXiv:2601.05002, eq. 36')
  '[arXiv:2601.05002](https://arxiv.org/abs/2601.05002), eq. 36'
  """
  return re.sub(
    r'arXiv:(\d+\.\d+)', r'[arXiv:\1](https://arxiv.org/abs/\1)', source
  )


def counts(results: Mapping[str, Result]) -> dict[str, int]:
  """How many claims have each verdict."""
  verdicts = [row.verdict for done in results.values() for row in done.rows]
  kinds = claims.HOLDS, claims.FAILS, claims.OPEN
  return {kind: verdicts.count(kind) for kind in kinds}


class _Shown(NamedTuple):
  """The figure of an experiment, as parts of a page.

  Attributes:
    figure: All that is to be seen.
    more: Curves of a part of it, which can be read and zoomed.
  """

  figure: list[report.Part]
  more: list[report.Part]


def _shown(
  done: Result, drawn: Mapping[str, str], folder: pathlib.Path
) -> _Shown:
  """The curves of a figure if they are all of it, else the picture."""
  title, measured = drawn['title'], _took(done, 'Measured in {} s.')
  charts, is_all = figures.make_charts(done.experiment, done.numbers)
  if is_all:
    note = [report.Text(measured, 'note')] if measured else []
    return _Shown([report.Text(title), *charts, *note], [])
  light, dark = ((folder / drawn[mode]).read_bytes() for mode in _MODES)
  picture = report.Picture(title, light, dark, measured)
  return _Shown([picture], [*charts])


def _page(
  results: Mapping[str, Result],
  shown: Mapping[str, _Shown],
  with_story: bool = False,
) -> report.Page:
  """The claims table; then of each experiment the figure and the numbers."""
  rows = []
  for name, done in results.items():
    for row in done.rows:
      line = cells(row)
      claim = report.Link(line['claim'], f'#{_anchor(name, row)}')
      line = line | {'claim': claim}
      rows.append((done.experiment.label, *line.values()))
  table = report.Table('All claims', ('', *COLUMNS), rows)
  first: list[report.Part] = [_counted(results), table]
  if with_story:
    first.insert(0, report.Link('The story of the papers, in chapters', _INDEX))
  sections = [report.Section('Verdicts', first)]
  for name, done in results.items():
    parts = [*shown[name].figure, *shown[name].more, _measured(name, done)]
    parts += evidence.parts(done.numbers)
    sections.append(report.Section(done.heading, parts))
  symbols = report.Table(
    'What claims call by a letter', ('symbol', 'meaning'), list(SYMBOLS)
  )
  sections.append(report.Section('Symbols', [symbols]))
  about = (
    'Claims of two papers, arXiv:2601.05002 and arXiv:2601.23135, and what '
    f'follows from them. {_VERDICTS}'
  )
  return report.Page('Claims and verdicts', about, sections)


def _anchor(name: str, row: claims.Row) -> str:
  """Where the numbers of a claim are on `claims.html`."""
  return re.sub(r'[^\w-]+', '_', f'{name}-{row.name}', flags=re.ASCII)


def _counted(results: Mapping[str, Result]) -> report.Facts:
  return report.Facts([(k, str(n)) for k, n in counts(results).items()])


def _measured(name: str, done: Result) -> report.Table:
  """The claims of an experiment, each with the numbers that decided it."""

  def digits(value: float, number: int) -> str:
    return f'{value:.{number}g}' if math.isfinite(value) else '-'

  head = (
    'claim', 'verdict', 'mean', 'half of the 95 % interval', 'values',
    'to decide', 'expected', 'what it says', 'example',
  )  # fmt: skip
  rows = [
    (
      row.name,
      row.verdict,
      digits(row.measured.mean, 6),
      digits(row.measured.half, 2),
      str(row.measured.count or '-'),
      f'n ≥ {needed}' if needed else '-',
      claims.expected(row.claim),
      row.claim.text,
      row.measured.example,
    )
    for row in done.rows
    for needed in [claims.values_needed(row.claim, row.measured)]
  ]
  if not any(row.measured.example for row in done.rows):
    head, rows = head[:-1], [row[:-1] for row in rows]
  anchors = [_anchor(name, row) for row in done.rows]
  return report.Table('What was measured', head, rows, anchors=anchors)


def _index(
  results: Mapping[str, Result], shown: Mapping[str, _Shown]
) -> report.Page:
  """The story of the papers, chapter by chapter."""
  known = *EXPERIMENTS, *STUDIES, *map(_study, results)
  papers = [
    report.Link(
      f'{who} ({paper})', paper.replace('arXiv:', 'https://arxiv.org/abs/')
    )
    for who, paper in (
      ('Fontana et al., On the Hidden Objective Biases of Group-based '
       'Reinforcement Learning', claims.FONTANA),
      ('Ge et al., Why GRPO Needs Normalization: A Local-Curvature '
       'Perspective', claims.GE),
    )
  ]  # fmt: skip
  first = [
    report.Text(_HOW),
    report.Text(_WHOSE),
    _counted(results),
    *papers,
    report.Link('All claims in one table, and what letters mean', _CLAIMS),
  ]
  chapters = [_chapter(one, results, shown) for one in story.chapters(known)]
  return report.Page(
    'What group-based methods optimise, and why they normalise',
    'Two papers on GRPO and its kin, read with experiments: what they claim, '
    'and what was found.',
    [report.Section('How to read this', first), *chapters],
  )


def _study(name: str) -> str:
  """The study of a result, which may be of one setting among several."""
  return name.partition('-')[0]


def _chapter(
  chapter: story.Chapter,
  results: Mapping[str, Result],
  shown: Mapping[str, _Shown],
) -> report.Section:
  """The text, experiments as figures with verdicts, and what is missing."""
  parts: list[report.Part] = []
  missing: list[tuple[str, str]] = []
  here: dict[str, Result] = {}
  has_runs = any(_study(name) in STUDIES for name in results)
  for study in chapter.names:
    some = {k: results[k] for k in sorted(results) if _study(k) == study}
    for name, done in some.items():
      parts += [
        report.Text(done.heading, 'heading'),
        report.Pair(shown[name].figure, [_findings(name, done.rows[:_BESIDE])]),
      ]
      if below := done.rows[_BESIDE:]:
        parts.append(_findings(name, below))
    if len(some) > 1:
      parts.append(_compared(some))
    missing += _missing(study, list(some.values()), has_runs)
    here |= some
  if missing:
    parts += [
      report.Table('Not run', ('experiment', 'command'), missing),
      report.Text(_NOT_RUN, 'note'),
    ]
  found = ', '.join(f'{kind} {n}' for kind, n in counts(here).items())
  first = [report.Text(chapter.says)]
  if here:
    # Without a figure nothing on the page could bear out what was found.
    first += [report.Text(chapter.found)] if chapter.found else []
    first.append(
      report.Text(f'Claims of this chapter, by verdict: {found}.', 'note')
    )
  return report.Section(chapter.title, [*first, *parts])


def _findings(name: str, rows: Sequence[claims.Row]) -> report.Findings:
  """The verdicts on claims of an experiment, which lead to their numbers."""
  return report.Findings(
    [
      report.Finding(
        row.verdict,
        _MARKS[row.verdict],
        report.Link(row.claim.text, f'{_CLAIMS}#{_anchor(name, row)}'),
        f'{_measured_text(row)}, expected {claims.expected(row.claim)}',
      )
      for row in rows
    ]
  )


def _measured_text(row: claims.Row) -> str:
  was_measured = not math.isnan(row.measured.mean)
  return 'measured ' * was_measured + claims.value(row.measured)


def _compared(some: Mapping[str, Result]) -> report.Table:
  """The claims of one study in several settings, side by side."""
  texts = {row.name: row.claim.text for x in some.values() for row in x.rows}
  said = [
    {r.name: f'{claims.value(r.measured)} ({r.verdict})' for r in one.rows}
    for one in some.values()
  ]
  rows = [
    (text, *(one.get(name, '-') for one in said))
    for name, text in texts.items()
  ]
  settings = [one.setting or 'setting not known' for one in some.values()]
  return report.Table('The same claims side by side', ('', *settings), rows)


def _missing(
  study: str, done: Sequence[Result], has_runs: bool
) -> list[tuple[str, str]]:
  """What of a study was not run, and the commands that run it."""
  if study in EXPERIMENTS:
    # Without them the page would lose the runs that it has.
    again = ' (with the same --run)' if has_runs else ''
    return [] if done else [(study, f'grpo-jax study all --out=FOLDER{again}')]
  settings = {one.setting for one in done}
  if study not in STUDIES or '' in settings:
    return []
  every = story.trainings(study)
  return [
    (f'{study}, in {one.setting}' if len(every) > 1 else study, one.command)
    for one in every
    if one.setting not in settings
  ]


def _markdown(results: Mapping[str, Result], drawn) -> str:
  """The claims table of all experiments, then a figure of each."""
  head = '| | ' + ' | '.join(COLUMNS) + ' |'
  lines = ['# Claims and verdicts', '', head, '| --- ' * 6 + '|']
  for done in results.values():
    for row in done.rows:
      line = cells(row) | {
        'verdict': f'**{row.verdict}**', 'source': linked(row.claim.source)
      }  # fmt: skip
      texts = [_in_markdown(cell) for cell in line.values()]
      label = _in_markdown(done.experiment.label)
      lines.append(f'| {label} | ' + ' | '.join(texts) + ' |')
  for name, done in results.items():
    shown = drawn[name]
    title = _in_markdown(shown['title'])
    lines += [
      '',
      f'## {_in_markdown(done.heading)}',
      '',
      f'{title}{_took(done, " ({} s)")}',
      '',
      '<picture>',
      f'<source media="(prefers-color-scheme: dark)" srcset="{shown["dark"]}">',
      f'<img alt="{title}" src="{shown["light"]}" width="720">',
      '</picture>',
    ]
  lines += ['', '## Symbols', '', *symbols_markdown()]
  return '\n'.join(lines) + '\n'


def _took(done: Result, text: str) -> str:
  """The text with the time in it; '' if that is not known."""
  known = math.isfinite(done.seconds)
  return text.format(f'{done.seconds:.1f}') if known else ''


def _in_markdown(text: str) -> str:
  """A text that may come from a file, in a cell of a table or an attribute.

  >>> _in_markdown('|x| < 1 &amp;' + chr(10) + '"')
  '&#124;x&#124; &lt; 1 &amp;amp; &quot;'
  """
  shown = text.replace('&', '&amp;').replace('<', '&lt;')
  shown = shown.replace('"', '&quot;').replace('|', '&#124;')
  return ' '.join(shown.split())


def symbols_markdown() -> list[str]:
  """The lines of a table of `SYMBOLS`."""
  rows = [f'| {symbol} | {linked(text)} |' for symbol, text in SYMBOLS]
  return ['| symbol | meaning |', '| --- | --- |', *rows]
