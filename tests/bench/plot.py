"""Draws how many times as fast grpo_jax is as its peers, case by case.

python tests/bench/run.py --json=figures.json
python tests/bench/plot.py figures.json [MORE.json ...] tests/bench/ratios.svg

Cases of several files are drawn below each other. A mark is the median over
turns, with a line from the least to the greatest.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
import statistics
import sys

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from matplotlib import rc_context  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from grpo_jax.lab.studies import figures  # noqa: E402
from tests.bench import tables  # noqa: E402

PEERS = {'tunix': ('Tunix', 'first', 'o'), 'trl': ('TRL', 'second', 's')}
QUANTITIES = {  # a title, and how many times as fast is wanted (case: times)
  'Whole step': (tables.QUANTITIES[0], {'A': 2.3, 'S': 6, '': 3}),
  'First step, from asking for it': (tables.QUANTITIES[6], {'': 1}),
}
TICKS = 0.03, 0.1, 0.3, 1, 3, 10, 30


def main() -> None:
  """Draws what the command line names."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    'figures', type=pathlib.Path, nargs='+', help='files of `run.py --json`'
  )
  parser.add_argument('picture', type=pathlib.Path, help='is written')
  args = parser.parse_args()
  runs = [
    one
    for source in args.figures
    for one in json.loads(source.read_text())['runs']
  ]
  save(results_of(runs), args.picture)


def results_of(runs: Sequence[Mapping]) -> tables.Results:
  """The `runs` that `run.py --json` has written, as results."""
  results: dict = {}
  for one in runs:
    framework, _, dtype = one['contender'].partition(' ')
    contender = tables.Contender(framework, dtype or 'float32')
    results.setdefault((one['case'], contender), []).append(one)
  return results


def save(results: tables.Results, target: pathlib.Path) -> None:
  """Two panels: the whole step and the first.

  Args:
    results: See `tables.py`.
    target: A file; its suffix says the format.
  """
  cases = [case for case, who in results if who == tables.OURS]
  if not cases:
    raise ValueError('The file has no run of grpo_jax; make it with run.py.')
  settings = {'svg.hashsalt': 'ratios', 'svg.fonttype': 'none'}
  with rc_context(figures.style(figures.LIGHT) | settings):
    figure = Figure(figsize=(8, 0.9 + 0.42 * len(cases)), layout='constrained')
    panels = figure.subplots(1, len(QUANTITIES), sharey=True)
    for panel, (title, (quantity, wanted)) in zip(panels, QUANTITIES.items()):
      panel.set_title(title)
      draw(panel, {c: found(results, c, quantity) for c in cases}, wanted)
    panels[0].set_ylabel('case')
    panels[-1].legend(loc='best')
    figure.suptitle(
      title_of(results, cases), x=0.012, ha='left', fontsize=11.5, wrap=True
    )
    figure.savefig(target, metadata={'Date': None})


def found(
  results: tables.Results, case: str, quantity: tables.Quantity
) -> dict[str, list[float]]:
  """For each peer the ratios of the turns that both finished, if any."""
  ratios = {
    peer: tables.ratios(
      results, case, tables.Contender(peer, 'float32'), quantity
    )
    for peer in PEERS
    if (case, tables.Contender(peer, 'float32')) in results
  }
  return {peer: turns for peer, turns in ratios.items() if turns}


def draw(
  panel: Axes,
  ratios: Mapping[str, Mapping[str, Sequence[float]]],
  wanted: Mapping[str, float],
) -> None:
  """Cases from top to bottom; to the right is for grpo_jax.

  Args:
    panel: Where to.
    ratios: By case and peer, those of the turns.
    wanted: The goal by case; that of '' for the others.
  """
  colors = figures.LIGHT
  for peer, (name, color, marker) in PEERS.items():
    rows = [(at, r[peer]) for at, r in enumerate(ratios.values()) if peer in r]
    middle = [statistics.median(turns) for _, turns in rows]
    spread = [
      [m - min(turns) for m, (_, turns) in zip(middle, rows)],
      [max(turns) - m for m, (_, turns) in zip(middle, rows)],
    ]
    panel.errorbar(
      middle,
      [at for at, _ in rows],
      xerr=spread,
      fmt=marker,
      color=colors[color],
      label=f'times as fast as {name}',
    )
  goals = [wanted.get(case, wanted['']) for case in ratios]
  panel.plot(
    goals, range(len(goals)), '|', ms=14, mew=1.5, color=colors['faint'],
    label='goal',
  )  # fmt: skip
  panel.axvline(1, color=colors['faint'], linewidth=1)
  panel.set_xscale('log')
  panel.set_xticks(TICKS, [f'{tick:g}' for tick in TICKS])
  panel.minorticks_off()
  everything = [
    x for r in ratios.values() for turns in r.values() for x in turns
  ]
  panel.set_xlim(0.8 * min([1, *everything]), 1.25 * max([3, *everything]))
  panel.set_yticks(range(len(ratios)), ratios)
  panel.set_ylim(len(ratios) - 0.5, -0.5)


def title_of(results: tables.Results, cases: Sequence[str]) -> str:
  """What the picture says."""
  quantity = tables.QUANTITIES[0]
  middle = [
    statistics.median(turns)
    for case in cases
    for turns in found(results, case, quantity).values()
  ]
  if not middle:
    return 'No peer finished a step'
  return (
    f'A whole step is {tables.number(min(middle))} to '
    f"{tables.number(max(middle))} times as fast as the peers'"
  )


if __name__ == '__main__':
  main()
