"""Numbers and sentences of a page."""

from collections.abc import Sequence
import html
import math

from grpo_jax.lab.report.types import Curve

_PERCENT = '\u00a0%'  # a space that no line breaks at
_SHORT = 16  # characters of a name that a title has room for
_STILL = 0.03  # of its size: less than this is no change


def number(value: float, unit: str = '') -> str:
  r"""A number with three digits; a share in percent.

  >>> [number(x) for x in (0, 0.5, 1234567.0, 2.5e-5, float('nan'))]
  ['0', '0.5', '1,234,567', '2.5e-05', '-']
  >>> number(0.1234, '%')
  '12.3\xa0%'
  """
  if not math.isfinite(value):
    return '-'
  if unit == '%':
    return f'{float(f"{100 * value:.3g}"):g}{_PERCENT}'
  if abs(value) >= 1000:
    return f'{float(f"{value:.7g}"):,.0f}'
  return f'{value:.3g}'


def with_half(mean: float, half: float, unit: str = '') -> str:
  r"""A mean, and half its interval if it has one.

  >>> with_half(0.5, 0.021), with_half(0.5, 0.02, '%')
  ('0.5 ± 0.021', '50 ± 2\xa0%')
  """
  if not math.isfinite(half):
    return number(mean, unit)
  if half < 1e-9 * abs(mean):  # what rounding leaves of equal values
    half = 0.0
  if unit == '%':
    return (
      f'{number(mean, unit)[:-2]} ± {float(f"{100 * half:.2g}"):g}{_PERCENT}'
    )
  return f'{number(mean)} ± {float(f"{half:.2g}"):g}'


def message(label: str, unit: str, curves: Sequence[Curve]) -> str:
  """What is to be seen in a chart, from how its curves begin and end.

  Args:
    label: What is measured.
    unit: '%' for shares.
    curves: Of the chart, with `end`.
  """
  label = label[:1].upper() + label[1:]
  ends = [curve.end for curve in curves if curve.end]
  if not ends:
    return label
  if len(ends) > 4:
    low, high = (f(end.last for end in ends) for f in (min, max))
    return f'{label} ends between {number(low, unit)} and {number(high, unit)}'
  if len(ends) > 1:
    said = [number(end.last, unit) for end in ends]
    names = [curve.name for curve in curves]
    if len(names) == len(said) and max(map(len, names)) <= _SHORT:
      said = [f'{one} with {name}' for one, name in zip(said, names)]
    return f'{label} ends at {", ".join(said[:-1])} and {said[-1]}'
  (end,) = ends
  last = with_half(end.last, end.half, unit)
  if len(curves[0].x) == 1:
    return f'{label} is {last}'
  size = max(abs(end.first), abs(end.last))
  change = end.last - end.first
  if abs(change) <= max(end.noise, _STILL * size):
    return f'{label} stayed near {last}'
  verb = 'rose' if change > 0 else 'fell'
  return f'{label} {verb} from {number(end.first, unit)} to {last}'


def plural(count: int, noun: str) -> str:
  """A count with its noun.

  >>> plural(1, 'run'), plural(1200, 'run')
  ('1 run', '1,200 runs')
  """
  return f'{count:,} {noun}' + ('' if count == 1 else 's')


def duration(secs: float) -> str:
  """Seconds, minutes or hours.

  >>> duration(42), duration(725), duration(100_000)
  ('42 s', '12 min 5 s', '27 h 46 min')
  """
  if secs < 60:
    return f'{secs:.0f} s'
  minutes, seconds = divmod(int(secs), 60)
  if minutes < 60:
    return f'{minutes} min {seconds} s'
  return f'{minutes // 60} h {minutes % 60} min'


def escaped(text: str) -> str:
  r"""The text as HTML that shows it, inside an element or an attribute.

  >>> escaped('<b>"\x1b')
  '&lt;b&gt;&quot;\\x1b'
  """
  return html.escape(printable(text))


def printable(text: str) -> str:
  r"""The text with what does not print escaped; lines and tabs stay.

  >>> printable('a\x1b\n')
  'a\\x1b\n'
  """
  return ''.join(
    char if char.isprintable() or char in '\n\t\xa0' else ascii(char)[1:-1]
    for char in text
  )
