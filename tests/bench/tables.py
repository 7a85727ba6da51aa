"""Results as Markdown tables.

A result is what `clock.Clock.answer` wrote, or `{'error': sentence}`. Results
are a dict: `(case, contender)` -> one result per turn, where a contender is a
framework and a dtype.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any
from typing import NamedTuple

from tests.bench import cases
from tests.bench import work


class Contender(NamedTuple):
  """What takes its turn."""

  framework: str
  dtype: str

  def __str__(self) -> str:
    if self.dtype == 'float32':
      return self.framework
    return f'{self.framework} {self.dtype}'


OURS = Contender('grpo_jax', 'float32')


class Setting(NamedTuple):
  """What a peer takes its turns with.

  Attributes:
    parts: Micro-batches of an update.
    as_ours: Whether its process has what grpo_jax sets for a CPU.
  """

  parts: int
  as_ours: bool

  def __str__(self) -> str:
    parts = '1 part' if self.parts == 1 else f'{self.parts} parts'
    return parts if self.as_ours else f'{parts}, bare'


Result = dict[str, Any]
Results = Mapping[tuple[str, Contender], Sequence[Result]]


class Quantity(NamedTuple):
  """One table.

  Attributes:
    title: With its unit.
    of: A number of a result.
    more_is_better: A ratio above 1 always speaks for grpo_jax: it is peer /
      grpo_jax if less is better, and else the other way round.
  """

  title: str
  of: Callable[[Result], float]
  more_is_better: bool = False


def steady(result: Result, name: str) -> float:
  """The median over all steps but the first, which compiles."""
  return statistics.median(result[name][1:])


QUANTITIES = (
  Quantity('Whole step, s', lambda r: steady(r, 'step_secs')),
  Quantity('Sampling, s', lambda r: steady(r, 'sample_secs')),
  Quantity(
    'Reference scores and update, s', lambda r: steady(r, 'update_secs')
  ),
  Quantity(
    'Completion tokens per s of the whole step',
    lambda r: steady(r, 'tokens') / steady(r, 'step_secs'),
    more_is_better=True,
  ),
  Quantity(
    'Completion tokens per s of sampling',
    lambda r: steady(r, 'tokens') / steady(r, 'sample_secs'),
    more_is_better=True,
  ),
  Quantity('Peak memory (resident), MiB', lambda r: r['peak_rss_mib']),
  Quantity('First step, s from asking for it', lambda r: r['first_step_secs']),
  Quantity(
    'First step, s from the start of the process',
    lambda r: r['process_to_first_step_secs'],
  ),
)


def ratios(
  results: Results, case: str, peer: Contender, quantity: Quantity
) -> list[float]:
  """How many times better grpo_jax is, in each turn that both finished."""
  found = []
  for ours, theirs in zip(results[case, OURS], results[case, peer]):
    if 'error' not in ours and 'error' not in theirs:
      ratio = quantity.of(theirs) / quantity.of(ours)
      found.append(1 / ratio if quantity.more_is_better else ratio)
  return found


def table(
  results: Results, contenders: Sequence[Contender], quantity: Quantity
) -> str:
  """One quantity of all cases.

  Args:
    results: See above; of every contender in every case.
    contenders: The columns. Each but `OURS` has a second one, the ratio: its
      median over turns, and the least and the greatest.
    quantity: What to show.

  Returns:
    Lines of Markdown.
  """
  head = ['case']
  for contender in contenders:
    head.append(str(contender))
    if contender != OURS:
      head.append('ratio')
  lines = [head, ['---'] * len(head)]
  for case in dict.fromkeys(case for case, _ in results):
    cells = [case]
    for contender in contenders:
      done = [r for r in results[case, contender] if 'error' not in r]
      cells.append(
        number(statistics.median(map(quantity.of, done))) if done else 'failed'
      )
      if contender != OURS:
        cells.append(spread(ratios(results, case, contender, quantity)))
    lines.append(cells)
  return f'**{quantity.title}**\n\n' + markdown(lines)


def tried_table(
  tried: Mapping[tuple[str, Contender], Mapping[Setting, float]],
) -> str:
  """Seconds of a step of each peer by setting, and what is read anew.

  Args:
    tried: Infinite where a run failed.

  Returns:
    Lines of Markdown. The last column is by how much a rollout's operations
    grow where a prompt is read for each of its completions, as peers do.
  """
  rows = [
    ['case', 'peer', 'seconds by setting', 'work, prompts not shared'],
    ['---'] * 4,
  ]
  for (name, contender), found in tried.items():
    secs = '; '.join(f'{one}: {number(found[one])}' for one in found)
    times = work.unshared(cases.find(name))
    rows.append([name, str(contender), secs, f'{times:.2f} times'])
  return '**Settings that peers tried**\n\n' + markdown(rows)


def limits_table(
  results: Results, contenders: Sequence[Contender], limits: Mapping[str, float]
) -> str:
  """What grpo_jax uses of what the machine can do.

  Args:
    results: See above.
    contenders: Those of grpo_jax.
    limits: What `limits.py` printed.

  Returns:
    Lines of Markdown. Arithmetic and bytes are those of `work.py`; arithmetic
    is compared to float32's fastest matrix product, whatever the dtype.
  """
  peak, copy = limits['float32_gflops'], limits['copy_gbytes']
  rows = [
    [
      'case',
      '',
      'update, GFLOP/s',
      'of the peak',
      'sampling, GFLOP/s',
      'of the peak',
      'sampling, GB/s',
      'of the copy',
    ],
  ]
  rows.append(['---'] * len(rows[0]))
  for name in dict.fromkeys(name for name, _ in results):
    for contender in contenders:
      done = [r for r in results[name, contender] if 'error' not in r]
      if not done:
        continue
      tokens, sample, update = (
        statistics.median(steady(r, key) for r in done)
        for key in ('tokens', 'sample_secs', 'update_secs')
      )
      case = cases.find(name)
      trained = work.learn_flops(case, tokens) / update / 1e9
      drawn = work.forward_flops(case, tokens) / sample / 1e9
      read = work.decode_bytes(case, tokens, contender.dtype) / sample / 1e9
      rows.append(
        [
          name,
          str(contender),
          number(trained),
          f'{trained / peak:.0%}',
          number(drawn),
          f'{drawn / peak:.0%}',
          number(read),
          f'{read / copy:.0%}',
        ]
      )
  return '**Share of the machine**\n\n' + markdown(rows)


def spread(values: Sequence[float]) -> str:
  """The median, and the range of several values."""
  if not values:
    return '-'
  middle = number(statistics.median(values))
  if len(values) == 1:
    return middle
  return f'{middle} ({number(min(values))}..{number(max(values))})'


def errors(results: Results) -> str:
  """A line for every turn that failed."""
  return '\n'.join(
    f'- {case}, {contender}, turn {turn}: {result["error"]}'
    for (case, contender), turns in results.items()
    for turn, result in enumerate(turns, 1)
    if 'error' in result
  )


def number(value: float) -> str:
  """At least three digits.

  >>> [number(x) for x in (0.01234, 1.5, 4955.4)]
  ['0.0123', '1.50', '4955']
  """
  if abs(value) >= 100:
    return f'{value:.0f}'
  return f'{value:#.3g}'.rstrip('.')


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Rows of cells as the lines of a table."""
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)
