"""A page as one HTML file that needs nothing else, not even a network."""

import base64
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
import hashlib
from importlib import resources
import itertools
import math
import os
import pathlib
import re

import numpy as np

from grpo_jax.config import whole_files
from grpo_jax.lab.report import svg
from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import ENVIRONMENT
from grpo_jax.lab.report.types import POLICY
from grpo_jax.lab.report.types import TEMPLATE
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Completion
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Facts
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
  write_part = functools.partial(_part, numbers, _token_scales(blocks))
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
  keyed = told = False
  for kind, some in itertools.groupby(parts, type):
    some = list(some)
    written = ''.join(map(write_part, some))
    # Above the first completions whose tokens have colours.
    if not keyed and any(map(are_known, some)):
      keyed = True
      yield write_part(_KEY)
    if not told and any(map(_are_written, some)):
      told = True
      yield _WRITERS
    name = {Chart: 'charts', Completions: 'blocks'}.get(kind)
    yield f'<div class="{name}">{written}</div>' if name else written


_KEY = Text('', 'key')  # where the colours of tokens are explained
_WHO = {
  POLICY: 'the policy',
  ENVIRONMENT: 'the environment',
  TEMPLATE: 'the chat template',
}
_WRITERS = (
  '<p class="writers">Written by '
  + ', '.join(
    f'<i class="by-{writer}">{who}</i>' for writer, who in _WHO.items()
  )
  + '.</p>'
)


def _part(
  numbers: Iterator[int], scales: tuple[float, float], part: Part
) -> str:
  match part:
    case Chart():
      return svg.chart(part, next(numbers))
    case Timeline():
      return svg.timeline(part)
    case Facts():
      return _facts(part)
    case Table():
      return _table(part)
    case Findings():
      return _findings(part)
    case Link():
      return f'<p>{_link(part)}</p>'
    case Pair():
      write_part = functools.partial(_part, numbers, scales)
      sides = (''.join(_parts(side, write_part)) for side in part)
      inner = ''.join(f'<div>{side}</div>' for side in sides)
      return f'<div class="pair">{inner}</div>'
    case Picture():
      return _picture(part)
    case Completions():
      return _completions(part, scales)
    case Text():
      return _token_key(scales) if part is _KEY else _text(part)


def _text(part: Text) -> str:
  if part.kind == 'heading':
    return f'<h3>{words.escaped(part.text)}</h3>'
  kind = f' class="{part.kind}"' if part.kind else ''
  return f'<p{kind}>{words.escaped(part.text)}</p>'


_TARGET = re.compile(r'(https://|#)?[\w.-][\w./#-]*', re.ASCII)


def _link(part: Link) -> str:
  # An address of another kind could run a script.
  if not _TARGET.fullmatch(part.target):
    raise ValueError(f'a page cannot lead to {part.target!r}.')
  return f'<a href="{part.target}">{words.escaped(part.text)}</a>'


def _inline(cell: str | Link) -> str:
  return _link(cell) if isinstance(cell, Link) else words.escaped(cell)


def _findings(part: Findings) -> str:
  rows = ''.join(
    f'<li><b class="{words.escaped(one.mark)}">{words.escaped(one.verdict)}'
    f'</b> {_link(one.statement)}'
    + (f' <span class="note">{words.escaped(one.note)}</span>' * bool(one.note))
    + '</li>'
    for one in part.rows
  )
  return f'<ul class="findings">{rows}</ul>'


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
    '<figure class="picture"><div class="scroll" tabindex="0" role="region" '
    f'aria-label="{title}"><picture><source media="(prefers-color-scheme: '
    f'dark)" srcset="{dark}"><img alt="{title}" src="{light}"></picture></div>'
    f'{note}</figure>'
  )


def _table(part: Table) -> str:
  head = ''.join(f'<th scope="col">{words.escaped(x)}</th>' for x in part.head)
  rows = []
  classes = [
    ' class="number"' if all(map(_is_number, column)) else ''
    for column in zip(*part.rows)
  ]
  anchors = part.anchors or [''] * len(part.rows)
  for anchor, (first, *rest) in zip(anchors, part.rows, strict=True):
    cells = ''.join(
      f'<td{kind}>{_inline(cell)}</td>' for kind, cell in zip(classes[1:], rest)
    )
    name = f' id="{words.escaped(anchor)}"' if anchor else ''
    rows.append(f'<tr{name}><th scope="row">{_inline(first)}</th>{cells}</tr>')
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


def _is_number(cell: str | Link) -> bool:
  return isinstance(cell, str) and bool(_NUMBER.fullmatch(cell))


LEVELS = 5  # shades on each side of 0


def _token_scales(all_shown: Iterable[Completions]) -> tuple[float, float]:
  """What the darkest shade stands for, of coefficients and of log-ratios.

  All completions of a page have the same: the 95th percentile of the sizes.
  """
  pairs = [
    pair
    for shown in all_shown
    for completion in shown.completions
    for token in completion.tokens
    if (pair := _measured(token))
  ]
  coefficients, log_ratios = zip(*pairs) if pairs else ((), ())
  return _scale(coefficients), _scale(log_ratios)


def _measured(token: Token) -> tuple[float, float] | None:
  """What updates did to a token, if that was measured."""
  if token.coefficient is None or token.log_ratio is None:
    return None
  return token.coefficient, token.log_ratio


def are_known(part: Part) -> bool:
  """Whether a part has completions of whose tokens it is known what became."""
  return isinstance(part, Completions) and any(
    _measured(token) for one in part.completions for token in one.tokens
  )


def _are_written(part: Part) -> bool:
  """Whether a part has completions that several have written."""
  return isinstance(part, Completions) and any(
    token.writer for one in part.completions for token in one.tokens
  )


def _scale(values: Sequence[float]) -> float:
  sizes = np.abs([value for value in values if math.isfinite(value)])
  sizes = sizes[sizes > 0]
  return float(np.percentile(sizes, 95)) if len(sizes) else 1.0


def _completions(shown: Completions, scales: tuple[float, float]) -> str:
  """The completions of one prompt."""
  answer = ''
  if shown.answer is not None:
    answer = f'<p class="answer">answer: {words.escaped(shown.answer)}</p>'
  kind = 'completions beside' if shown.beside else 'completions'
  inner = ''.join(_completion(one, scales) for one in shown.completions)
  prompt = f'<p class="prompt">{words.escaped(shown.prompt)}</p>'
  if shown.read:
    prompt = (
      '<div class="completion"><p class="label">all its episodes read first '
      f'<span class="reading"></span></p>{_tokens(shown.read, scales)}</div>'
    )
  return (
    f'<article class="{kind}">{prompt}{answer}'
    f'<div class="each">{inner}</div></article>'
  )


def _token_key(scales: tuple[float, float]) -> str:
  """What the colours mean, and the choice between the two."""
  coefficient, ratio = (words.number(scale) for scale in scales)
  shades = ''.join(
    f'<i class="a{k}">&nbsp;</i>' for k in range(-LEVELS, LEVELS + 1)
  )
  return (
    '<div class="key"><fieldset><legend>Colour of a token</legend>'
    '<label><input type="radio" name="shade" value="coefficient" checked> '
    'coefficient: weight times advantage</label>'
    '<label><input type="radio" name="shade" value="ratio"> log-ratio after '
    'the update, nats</label></fieldset>'
    '<p class="notes">∎ is a token without a text, such as the end of a '
    'completion.</p>'
    f'<p class="shades"><span class="by-coefficient">−{coefficient} {shades} '
    f'+{coefficient}</span><span class="by-ratio">−{ratio} {shades} +{ratio}'
    '</span></p></div>'
  )


def _completion(one: Completion, scales: tuple[float, float]) -> str:
  label = [one.label] if one.label else []
  judged = math.isfinite(one.reward)
  label.append(f'reward {words.number(one.reward)}' if judged else 'not judged')
  label += one.facts
  if one.tokens:
    text = _tokens(one.tokens, scales)
  else:
    text = f'<pre>{words.escaped(one.text) or "<em>empty</em>"}</pre>'
  reading = '<span class="reading"></span>' if one.tokens else ''
  note = f'<p class="notes">{words.escaped(one.note)}</p>' if one.note else ''
  return (
    '<div class="completion"><p class="label">'
    f'{words.escaped(", ".join(label))} {reading}</p>{text}{note}</div>'
  )


def _tokens(tokens: Sequence[Token], scales: tuple[float, float]) -> str:
  """Tokens with their colours, and what a script reads of them."""
  body = ''.join(_token(token, scales) for token in tokens)
  pairs, said = [*map(_measured, tokens)], []
  if all(pairs):
    values = ' '.join(f'{a:.3g},{r:.3g}' for a, r in filter(None, pairs))
    said.append(f'data-values="{values}"')
  kind = 'tokens'
  if tokens[0].writer:
    kind = 'tokens measured' if all(pairs) else 'tokens written'
    runs = itertools.groupby(_WHO.get(token.writer, '') for token in tokens)
    who = ';'.join(f'{len([*some])},{name}' for name, some in runs)
    said.append(f'data-writers="{who}"')
  return (
    f'<pre class="{kind}" tabindex="0" role="group" aria-label="Tokens; arrow '
    f'keys read their values" {" ".join(said)}>{body}</pre>'
  )


def _token(token: Token, scales: tuple[float, float]) -> str:
  classes = []
  if pair := _measured(token):
    a, r = (_level(x, scale) for x, scale in zip(pair, scales))
    classes += [f'a{a}', f'r{r}']
  if token.writer:
    classes.append(f'by-{token.writer}')
  # A token without a text, such as the end of a completion, is to be seen too.
  text = words.escaped(token.text).replace('\n', '↵\n') or '<b>∎</b>'
  before = f'<b class="turn">{words.escaped(token.before)}</b>'
  return (
    f'{before if token.before else ""}<i class="{" ".join(classes)}">{text}</i>'
  )


def _level(value: float, scale: float) -> int:
  """The shade of a value, from -LEVELS to LEVELS; 0 for exactly 0 alone."""
  if not math.isfinite(value) or value == 0:
    return 0
  size = min(LEVELS, math.ceil(LEVELS * abs(value) / scale))
  return int(math.copysign(max(size, 1), value))
