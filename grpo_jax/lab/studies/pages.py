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
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures

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


class Result(NamedTuple):
  """An experiment that has been done."""

  experiment: claims.Experiment
  numbers: claims.Numbers
  rows: Sequence[claims.Row]
  seconds: float


class Judged(NamedTuple):
  """What the runs of a study say of its claims, and the folder of the pages."""

  results: dict[str, Result]
  folder: pathlib.Path


def judge(
  name: str,
  experiment: claims.Experiment,
  numbers: claims.Numbers,
  seconds: float,
  workdir: str | pathlib.Path,
) -> Judged:
  """Gives a verdict on each claim, and writes the pages.

  Args:
    name: Of the study.
    experiment: Its claims.
    numbers: What its runs have measured.
    seconds: That they took.
    workdir: Of the study; its folder `claims` gets the pages.
  """
  rows = claims.check(experiment, numbers)
  results = {name: Result(experiment, numbers, rows, seconds)}
  folder = pathlib.Path(workdir) / 'claims'
  write(results, folder)
  return Judged(results, folder)


def show_judged(judged: Judged) -> None:
  """Prints what `judge` returned, for a person."""
  show(*judged)


def judged_to_json(judged: Judged) -> dict[str, Any]:
  """What `judge` returned, as JSON can hold it."""
  return to_json(judged.results)


def show(results: Mapping[str, Result], out: str | pathlib.Path) -> None:
  """Prints a table of claims for each experiment.

  Args:
    results: What `run` returned.
    out: Where the files are.
  """
  shown = {}
  for done in results.values():
    experiment = done.experiment
    title = f'{experiment.label}: {experiment.title} ({done.seconds:.1f} s)'
    shown[title] = [cells(row) for row in done.rows]
  found = [f'{number} {kind}' for kind, number in counts(results).items()]
  files = f'{pathlib.Path(out) / "claims.html"}: {", ".join(found)}.'
  show_tables(shown, f'{_NOTES}\n{files}')


def prepare(folder: pathlib.Path) -> None:
  """Makes the folder of `write`; raises OSError if it cannot be written to."""
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=folder):
    pass


def write(results: Mapping[str, Result], folder: pathlib.Path) -> None:
  """Writes `claims.html`, `claims.md`, `claims.json` and the figures.

  Args:
    results: By the name of the experiment.
    folder: Where to; made if it does not exist.
  """
  prepare(folder)
  drawn = {
    name: figures.save(name, done.experiment, done.numbers, folder)
    for name, done in results.items()
  }
  text = json.dumps(to_json(results, drawn), indent=1, allow_nan=False)
  (folder / 'claims.json').write_text(text + '\n', encoding='utf-8')
  page = _markdown(results, drawn)
  (folder / 'claims.md').write_text(page, encoding='utf-8')
  report.write(folder / 'claims.html', _page(results, drawn, folder))


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
      'title': done.experiment.title,
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


def _page(
  results: Mapping[str, Result],
  drawn: Mapping[str, Mapping[str, str]],
  folder: pathlib.Path,
) -> report.Page:
  """The claims table, then the figure of each experiment."""
  rows = [
    (done.experiment.label, *cells(row).values())
    for done in results.values()
    for row in done.rows
  ]
  facts = [(kind, str(number)) for kind, number in counts(results).items()]
  table = report.Table('All claims', ('', *COLUMNS), rows)
  sections = [report.Section('Verdicts', [report.Facts(facts), table])]
  for name, done in results.items():
    shown, experiment = drawn[name], done.experiment
    title, measured = shown['title'], f'Measured in {done.seconds:.1f} s.'
    parts: list[report.Part] = []
    made, is_all = figures.make_charts(experiment, done.numbers)
    if is_all:
      parts += [report.Text(title), *made, report.Text(measured, 'note')]
    else:
      light, dark = (folder / shown[mode] for mode in ('light', 'dark'))
      parts += [
        report.Picture(title, light.read_bytes(), dark.read_bytes(), measured),
        *made,
      ]
    sections.append(
      report.Section(f'{experiment.label}: {experiment.title}', parts)
    )
  symbols = report.Table(
    'What claims call by a letter', ('symbol', 'meaning'), list(SYMBOLS)
  )
  sections.append(report.Section('Symbols', [symbols]))
  about = (
    'Claims of two papers, arXiv:2601.05002 and arXiv:2601.23135, and what '
    'follows from them. A claim expects a number in a range. It holds if the '
    'whole 95 % interval of what was measured lies inside, and fails if it '
    'lies outside. Exact numbers have no interval.'
  )
  return report.Page('Claims and verdicts', about, sections)


def _markdown(results: Mapping[str, Result], drawn) -> str:
  """The claims table of all experiments, then a figure of each."""
  head = '| | ' + ' | '.join(COLUMNS) + ' |'
  lines = ['# Claims and verdicts', '', head, '| --- ' * 6 + '|']
  for done in results.values():
    for row in done.rows:
      line = cells(row) | {
        'verdict': f'**{row.verdict}**', 'source': linked(row.claim.source)
      }  # fmt: skip
      texts = [cell.replace('|', '&#124;') for cell in line.values()]
      lines.append(f'| {done.experiment.label} | ' + ' | '.join(texts) + ' |')
  for name, done in results.items():
    shown, experiment = drawn[name], done.experiment
    lines += [
      '',
      f'## {experiment.label}: {experiment.title}',
      '',
      f'{shown["title"]} ({done.seconds:.1f} s)',
      '',
      '<picture>',
      f'<source media="(prefers-color-scheme: dark)" srcset="{shown["dark"]}">',
      f'<img alt="{shown["title"]}" src="{shown["light"]}" width="720">',
      '</picture>',
    ]
  lines += ['', '## Symbols', '', *symbols_markdown()]
  return '\n'.join(lines) + '\n'


def symbols_markdown() -> list[str]:
  """The lines of a table of `SYMBOLS`."""
  rows = [f'| {symbol} | {linked(text)} |' for symbol, text in SYMBOLS]
  return ['| symbol | meaning |', '| --- | --- |', *rows]
