"""Claims, what was measured of them, and the verdict that follows.

A claim expects a number in a range. An experiment measures that number, with an
interval if chance had a part in it. The verdict compares the two:

- `holds`: the whole interval lies in the range;
- `fails`: the whole interval lies outside;
- `not decidable here`: the interval lies across an end of the range, or there
  is no interval, because a number that chance made was measured once.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import sys
from typing import Any
from typing import NamedTuple

from grpo_jax.lab.report import curves

HOLDS, FAILS, OPEN = 'holds', 'fails', 'not decidable here'

FONTANA = 'arXiv:2601.05002'
"""Fontana et al., On the Hidden Objective Biases of Group-based RL, 2026."""
GE = 'arXiv:2601.23135'
"""Ge et al., Why GRPO Needs Normalization, 2026."""

ABOVE_0, BELOW_0 = sys.float_info.min, -sys.float_info.min
"""Ends of ranges that leave out 0 itself: for claims of more, and of less.

With two arms that are equal such a claim does not hold. These are the smallest
numbers that no processor takes for 0.
"""

Numbers = Mapping[str, Any]
"""What an experiment measured: numbers, and nested dicts and lists of them."""


class Claim(NamedTuple):
  """A statement about a number.

  Attributes:
    text: The statement, in words.
    source: The paper and the place in it; or 'derived', if no paper has it.
    low: The least value of the number with which the statement is true.
    high: The largest.
  """

  text: str
  source: str
  low: float = -math.inf
  high: float = math.inf


class Measured(NamedTuple):
  """A number, and what is to be said of it.

  Attributes:
    mean: The number, or the mean over seeds.
    half: Half the width of its 95 % interval; 0 where nothing is random.
    count: Of how many independent values; 0 where nothing is random.
    example: The smallest case that shows it, in words; '' for none.
  """

  mean: float
  half: float = 0.0
  count: int = 0
  example: str = ''


UNKNOWN = Measured(math.nan, math.nan)
"""What was not measured."""


class Experiment(NamedTuple):
  """Claims, and how to test them.

  Attributes:
    label: 'E1' and so on: its number in the project's list of experiments.
    title: What it is about, in a few words.
    claims: By a short name.
    measure: From the numbers alone to what each claim is about, by the names
      of the claims.
    draw: `(numbers, measured, figure, colors) -> title`: fills a matplotlib
      figure and returns what one sees on it, in one sentence. `measured` is
      what `measure` returned; `colors` has the names of `figures.LIGHT`.
    run: `(full) -> numbers`. `full` takes more seeds or longer runs. Where a
      study trains runs (`sweeps.Study`), these give the numbers.
  """

  label: str
  title: str
  claims: Mapping[str, Claim]
  measure: Callable[[Numbers], dict[str, Measured]]
  draw: Callable[[Numbers, dict[str, Measured], Any, Mapping[str, str]], str]
  run: Callable[[bool], dict[str, Any]] = lambda full: {}


class Row(NamedTuple):
  """A claim beside what was measured."""

  name: str
  claim: Claim
  measured: Measured
  verdict: str


def verdict(claim: Claim, measured: Measured) -> str:
  """What a measurement says of a claim.

  >>> small = Claim('The error is rounding.', 'derived', high=1e-12)
  >>> verdict(small, Measured(2e-16)), verdict(small, Measured(0.1))
  ('holds', 'fails')
  >>> verdict(small, Measured(0.1, 0.2))
  'not decidable here'
  """
  least, most = measured.mean - measured.half, measured.mean + measured.half
  # False for NaN, which then is neither inside nor outside.
  if least >= claim.low and most <= claim.high:
    return HOLDS
  return FAILS if least > claim.high or most < claim.low else OPEN


def values_needed(claim: Claim, measured: Measured) -> int | None:
  """How many values, one for each seed, would decide a claim that is open.

  So many that the interval would lie on one side of the nearer end of the
  range, if mean and deviation stayed what they are. They do not stay, so with
  so many a verdict is about as likely as none.

  Args:
    claim: The claim.
    measured: With an interval over two values or more.

  Returns:
    A number above `measured.count`. None where the claim is decided, where
    there is no interval, or where the mean lies at the end of the range, to
    within a millionth of the deviation.

  >>> values_needed(Claim('', '', low=0.0), Measured(0.28, 0.94, 3))
  10
  """
  if verdict(claim, measured) != OPEN or measured.count < 2:
    return None
  if not (math.isfinite(measured.mean) and math.isfinite(measured.half)):
    return None
  deviation = measured.half / curves.half_width(1.0, measured.count)
  distance = min(abs(measured.mean - end) for end in (claim.low, claim.high))
  if distance <= 1e-6 * deviation:
    return None
  # Normal values would need so many; Student's t needs a few more.
  number = max(measured.count, math.ceil((1.96 * deviation / distance) ** 2))
  while curves.half_width(deviation, number) > distance:
    number += 1
  return number


def check(experiment: Experiment, numbers: Numbers) -> list[Row]:
  """The verdict on every claim of an experiment.

  Args:
    experiment: Whose claims.
    numbers: What `experiment.run` returned, or a copy from JSON.

  Raises:
    KeyError: Not every claim was measured.
  """
  found = experiment.measure(numbers)
  return [
    Row(name, claim, found[name], verdict(claim, found[name]))
    for name, claim in experiment.claims.items()
  ]


def asked(experiment: Experiment, numbers: Numbers) -> Experiment:
  """The experiment without claims of which its numbers say nothing.

  A study of some arms makes no claims on the others.
  """
  measured = experiment.measure(numbers).keys()
  kept = {k: x for k, x in experiment.claims.items() if k in measured}
  return experiment._replace(claims=kept)


def over_seeds(values: Sequence[float], example: str = '') -> Measured:
  """The mean of one value per seed, with the interval of Student's t.

  Without values it is `UNKNOWN`.

  >>> over_seeds([1.0, 2.0, 3.0]).mean
  2.0
  """
  if not len(values):
    return UNKNOWN._replace(example=example)
  return Measured(*curves.mean_interval(values), example)


def known(values: Mapping[str, float | None]) -> dict[str, float]:
  """Values of a file, in which None stands for NaN, as numbers.

  >>> known({'0': 1.0, '1': None})
  {'0': 1.0, '1': nan}
  """
  return {k: math.nan if x is None else x for k, x in values.items()}


def difference(
  one: Mapping[str, float], other: Mapping[str, float]
) -> Measured:
  """One minus another, seed by seed, over the seeds that both have.

  >>> difference({'0': 3.0, '1': 5.0}, {'0': 1.0, '2': 9.0}).mean
  2.0
  """
  both = sorted(one.keys() & other.keys(), key=int)
  return over_seeds([one[seed] - other[seed] for seed in both])


def furthest(found: Iterable[Measured], sign: int = 1) -> Measured:
  """Of several, the one whose interval reaches furthest up.

  What is claimed of all must hold of that one.

  Args:
    found: Those that are NaN do not count.
    sign: -1 for the one that reaches furthest down.

  Returns:
    One of them, or `UNKNOWN`. Of one among several the count is 0: with more
    values another may reach further, so its count foretells no verdict.

  >>> furthest([Measured(1.0, 0.1), Measured(0.9, 0.5)]).mean
  0.9
  """

  def reach(one):
    return sign * one.mean + (0.0 if math.isnan(one.half) else one.half)

  known = [one for one in found if not math.isnan(one.mean)]
  if len(known) < 2:
    return known[0] if known else UNKNOWN
  return max(known, key=reach)._replace(count=0)


def expected(claim: Claim) -> str:
  """The range of a claim as text.

  >>> expected(Claim('', '', 0.655, 0.665)), expected(Claim('', '', high=1e-12))
  ('0.66 ± 0.005', '≤ 1e-12')
  >>> expected(Claim('', '', low=ABOVE_0)), expected(Claim('', '', low=0.0))
  ('> 0', '≥ 0')
  """
  low, high = claim.low, claim.high
  if low == ABOVE_0 and math.isinf(high):
    return '> 0'
  if high == BELOW_0 and math.isinf(low):
    return '< 0'
  if math.isinf(low) or math.isinf(high):
    return f'≤ {high:.4g}' if math.isinf(low) else f'≥ {low:.4g}'
  if low == high:
    return f'{low:.4g}'
  return f'{(low + high) / 2:.4g} ± {(high - low) / 2:.2g}'


def value(measured: Measured) -> str:
  """A measurement as text.

  >>> value(Measured(0.67128)), value(Measured(2.0, 0.1))
  ('0.6713', '2 ± 0.1')
  >>> value(over_seeds([0.5])), value(UNKNOWN)
  ('0.5 (one seed)', 'not measured')
  """
  if math.isnan(measured.mean):
    return 'not measured'
  text = f'{measured.mean:.4g}'
  if math.isnan(measured.half):
    return f'{text} (one seed)'
  return text if measured.half == 0 else f'{text} ± {measured.half:.2g}'


def answer(row: Row) -> str:
  """What was measured as text, and of an open claim how many values it takes.

  >>> claim, measured = Claim('', '', low=0.0), Measured(0.28, 0.94, 3)
  >>> answer(Row('', claim, measured, verdict(claim, measured)))
  '0.28 ± 0.94 (n = 3; to decide takes n ≥ 10)'
  """
  text, needed = value(row.measured), values_needed(row.claim, row.measured)
  if needed is None:
    return text
  return f'{text} (n = {row.measured.count}; to decide takes n ≥ {needed})'
