"""A page as one HTML file that needs nothing else, not even a network."""

import base64
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import hashlib
from importlib import resources
import itertools
import os
import pathlib
import re

from grpo_jax.config import whole_files
from grpo_jax.lab.report import svg
from grpo_jax.lab.report import tokens
from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Facts
from grpo_jax.lab.report.types import Page
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Picture
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.lab.report.types import Timeline

_NUMBER = re.compile(
  r'[-+−]?[\d,.]+(e[-+]?\d+)?(\s?%)?( ± [\d.e+-]+(\s?%)?)?|-'
)


def write(path: str | os.PathLike[str], page: Page) -> int:
  """Writes a page, whole or not at all.

  Args:
    path: The file. Its directory is made if there is none.
    page: See `Page`.

  Returns:
    The size of the file, in bytes.

  Raises:
    OSError: It cannot be written.
  """
  path, data = pathlib.Path(path), as_html(page).encode()
  path.parent.mkdir(parents=True, exist_ok=True)
  whole_files.write(path, data)
  return len(data)


def as_html(page: Page) -> str:
  """A page as HTML. The policy in its head lets no other script run."""
  style, script = _file('style.css'), _file('script.js')
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
  )
  numbers = itertools.count(1)
  blocks = [
    part
    for section in page.sections
    for part in section.parts
    if isinstance(part, Completions)
  ]
  write_part = functools.partial(_part, numbers, tokens.scales(blocks))
  sections = ''.join(
    _section(section, f'section-{place}', write_part)
    for place, section in enumerate(page.sections, start=1)
  )
  links = ''.join(
    f'<li><a href="#section-{place}">{words.escaped(section.title)}</a></li>'
    for place, section in enumerate(page.sections, start=1)
  )
  title = words.escaped(page.title)
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
    f'<title>{title}</title><style>{style}</style></head><body>'
    f'<a class="skip" href="#main">To the content</a><header><h1>{title}</h1>'
    f'<p>{words.escaped(page.about)}</p></header>'
    f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
    f'<main id="main">{sections}</main>'
    f'<script>{script}</script></body></html>\n'
  )


def _file(name: str) -> str:
  return (
    resources.files('grpo_jax.lab.report').joinpath(name).read_text('utf-8')
  )


def _section(
  section: Section, place: str, write_part: Callable[[Part], str]
) -> str:
  inner = ''.join(_parts(section.parts, write_part))
  head = words.escaped(section.title)
  if section.folded:
    inner = f'<details><summary>Show</summary>{inner}</details>'
  return (
    f'<section id="{place}" aria-labelledby="{place}-title">'
    f'<h2 id="{place}-title">{head}</h2>{inner}</section>'
  )


def _parts(
  parts: Sequence[Part], write_part: Callable[[Part], str]
) -> Iterator[str]:
  """The parts, with what stands side by side in a block of its own."""
  keyed = False
  for kind, some in itertools.groupby(parts, type):
    some = list(some)
    written = ''.join(map(write_part, some))
    # Above the first completions whose tokens have colours.
    if not keyed and any(map(tokens.are_known, some)):
      keyed = True
      yield write_part(_KEY)
    name = {Chart: 'charts', Completions: 'blocks'}.get(kind)
    yield f'<div class="{name}">{written}</div>' if name else written


_KEY = Text('', 'key')  # where the colours of tokens are explained


def _part(
  numbers: Iterator[int], of_scales: tuple[float, float], part: Part
) -> str:
  if isinstance(part, Chart):
    return svg.chart(part, next(numbers))
  if isinstance(part, Facts):
    return _facts(part)
  if isinstance(part, Timeline):
    return svg.timeline(part)
  if isinstance(part, Table):
    return _table(part)
  if isinstance(part, Picture):
    return _picture(part)
  if isinstance(part, Completions):
    return tokens.block(part, of_scales)
  if part is _KEY:
    return tokens.key(of_scales)
  if part.kind == 'heading':
    return f'<h3>{words.escaped(part.text)}</h3>'
  kind = f' class="{part.kind}"' if part.kind else ''
  return f'<p{kind}>{words.escaped(part.text)}</p>'


def _facts(part: Facts) -> str:
  rows = ''.join(
    f'<div><dt>{words.escaped(what)}</dt><dd>{words.escaped(value)}</dd></div>'
    for what, value in part.rows
  )
  return f'<dl class="facts">{rows}</dl>'


def _picture(part: Picture) -> str:
  light, dark = (
    f'data:image/png;base64,{base64.b64encode(file).decode()}'
    for file in (part.light, part.dark)
  )
  title = words.escaped(part.title)
  note = f'<p class="notes">{words.escaped(part.note)}</p>' if part.note else ''
  return (
    f'<figure class="picture"><picture><source media="(prefers-color-scheme: '
    f'dark)" srcset="{dark}"><img alt="{title}" src="{light}"></picture>'
    f'{note}</figure>'
  )


def _table(part: Table) -> str:
  head = ''.join(f'<th scope="col">{words.escaped(x)}</th>' for x in part.head)
  rows = []
  columns = list(zip(*part.rows))
  classes = [
    ' class="number"' if all(map(_NUMBER.fullmatch, column)) else ''
    for column in columns
  ]
  for row in part.rows:
    first, *rest = row
    cells = ''.join(
      f'<td{kind}>{words.escaped(cell)}</td>'
      for kind, cell in zip(classes[1:], rest)
    )
    rows.append(f'<tr><th scope="row">{words.escaped(first)}</th>{cells}</tr>')
  thead = f'<thead><tr>{head}</tr></thead>' if part.head else ''
  table = (
    f'<div class="scroll" tabindex="0" role="region" aria-label="'
    f'{words.escaped(part.title or "Table")}"><table>{thead}<tbody>'
    f'{"".join(rows)}</tbody></table></div>'
  )
  title = words.escaped(part.title)
  if part.folded:
    return f'<details><summary>{title}</summary>{table}</details>'
  return (f'<h3>{title}</h3>' if title else '') + table
