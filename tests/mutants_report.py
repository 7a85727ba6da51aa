"""What became of mutants, and how it is told."""

import collections
from collections.abc import Collection
from collections.abc import Mapping
import math
from typing import NamedTuple

REQUIRED = 0.9  # share of mutants that must be killed
_QUANTILE = 1.959964  # of the normal distribution, for 95 %


class Result(NamedTuple):
  """What became of a mutant."""

  path: str
  lineno: int
  key: tuple[str, str, str]
  killer: str  # the check that failed; '' if the mutant survived
  secs: float


def share_killed(results: Collection[Result]) -> float:
  return sum(bool(r.killer) for r in results) / max(1, len(results))


def table(results: Collection[Result]) -> list[str]:
  """Mutants and killed ones of each file, and of all."""
  rows = collections.defaultdict(list)
  for result in sorted(results):
    rows[result.path].append(result)
  rows['total'] = list(results)
  lines = [f'{"file":42}{"mutants":>8}{"killed":>8}{"share":>8}']
  for path, some in rows.items():
    killed = sum(bool(result.killer) for result in some)
    share = share_killed(some)
    lines.append(f'{path:42}{len(some):8}{killed:8}{share:8.1%}')
  return lines


def survivors(
  results: Collection[Result], reasons: Mapping[tuple[str, str, str], str]
) -> list[str]:
  """Each mutant that no check noticed, with the reason why none should."""
  lines = []
  for result in sorted(result for result in results if not result.killer):
    reason = reasons.get(result.key, f'NO REASON GIVEN for {result.key}')
    lines += [f'{result.path}:{result.lineno}  {result.key[1]}']
    lines += [f'    {result.key[2]}', f'    {reason}']
  return lines


def interval(killed: int, number: int) -> tuple[float, float]:
  r"""The 95 % confidence interval of a share, by Wilson's formula.

  .. math:: \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4n^2}}
            {1 + z^2 / n}

  with p the share of n that were killed, and z = 1.96.

  References:
    Wilson, Probable Inference, the Law of Succession, and Statistical
    Inference, Journal of the American Statistical Association 22, 1927

  >>> [round(share, 3) for share in interval(270, 300)]
  [0.861, 0.929]
  """
  share, z = killed / number, _QUANTILE
  center = share + z**2 / (2 * number)
  half = z * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
  scale = 1 + z**2 / number
  return (center - half) / scale, (center + half) / scale
