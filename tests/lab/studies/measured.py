"""What studies have measured, kept for the table of claims in their README.

`python -m tests.lab.studies.measured claims/claims.json` takes the values out
of a file that `grpo-jax study` has written, or out of several, and puts them
into `measured.json`. That file has numbers alone: claims and their ranges are
those of the code, and `tests.readmes` computes the verdicts.

Of a study that trains runs, give the workdir. What its runs have measured in
hours is then kept in the folder `runs` too, for pages to show.
"""

import collections
from collections.abc import Mapping
import functools
import json
import math
import pathlib
import sys

from grpo_jax.lab import studies
from grpo_jax.lab.studies import brakes
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers
from grpo_jax.lab.studies import story
from grpo_jax.lab.studies import trained
from grpo_jax.lab.studies.claims import Measured

FILE = pathlib.Path(__file__).with_suffix('.json')
RUNS = FILE.parent / 'runs'


@functools.cache
def experiments() -> Mapping[str, claims.Experiment]:
  """All that the table may have, by the name in `claims.json`.

  Of brakes only what is claimed of all of them: each one has two claims more.
  """
  found = {name: papers.experiment(name) for name in studies.EXPERIMENTS}
  for name in studies.STUDIES:
    made = studies.study(name).experiment
    if name in brakes.STUDIES:
      general = {one: made.claims[one] for one in brakes.GENERAL}
      made = made._replace(claims=general)
    found[name] = made
    if len(story.trainings(name)) > 1:  # as `trained.read` calls the other one
      found[f'{name}-episodes'] = made
  return found


def values() -> dict[str, dict[str, Measured]]:
  """What was measured, by study and claim."""

  def measured(mean, half, count, example):
    mean, half = (math.nan if x is None else x for x in (mean, half))
    return Measured(mean, half, count, example)

  return {
    study: {name: measured(*one) for name, one in of_study.items()}
    for study, of_study in json.loads(FILE.read_text()).items()
  }


def rows() -> dict[str, list[claims.Row]]:
  """Every claim with its verdict, by study; of those that were run."""
  return {
    study: [
      claims.Row(name, claim, one, claims.verdict(claim, one))
      for name, claim in experiments()[study].claims.items()
      for one in [of_study.get(name, claims.UNKNOWN)]
    ]
    for study, of_study in values().items()
  }


def markdown() -> str:
  """The table, how many claims have each verdict, and what letters mean."""
  counted = collections.Counter()
  lines = [
    '| study | verdict | claim | source | expected | measured |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for study, of_study in rows().items():
    label = f'{experiments()[study].label} `{study}`'
    for row in of_study:
      counted[row.verdict] += 1
      cells = pages.cells(row) | {'source': pages.linked(row.claim.source)}
      texts = [cell.replace('|', '&#124;') for cell in cells.values()]
      lines.append('| ' + ' | '.join([label, *texts]) + ' |')
      label = ''
  order = claims.HOLDS, claims.FAILS, claims.OPEN
  lines = [
    ', '.join(f'{counted[one]} {one}' for one in order) + '.',
    '',
    *lines,
  ]
  return '\n'.join([*lines, '', *pages.symbols_markdown()])


def keep(workdir: pathlib.Path) -> None:
  """Copies into `runs` what `trained.read` reads, and no name of a machine."""
  target = RUNS / workdir.name
  (target / 'claims').mkdir(parents=True, exist_ok=True)
  config = json.loads((workdir / 'config.json').read_text())
  about = {'environment': {'name': config['environment']['name']}}
  (target / 'config.json').write_text(json.dumps(about) + '\n')
  read = json.loads((workdir / 'claims' / 'claims.json').read_text())
  (target / 'claims' / 'claims.json').write_text(json.dumps(read) + '\n')


def main() -> None:
  """Updates `measured.json`, and `runs`."""
  kept = json.loads(FILE.read_text()) if FILE.exists() else {}
  for path in map(pathlib.Path, sys.argv[1:]):
    if path.is_dir():
      keep(path)
      read = pages.to_json(trained.read([str(path)]))
    else:
      read = json.loads(path.read_text())
    for study, one in read.items():
      if study in experiments():
        wanted = experiments()[study].claims
        kept[study] = {
          row['name']: [row[part] for part in Measured._fields]
          for row in one['claims']
          if row['name'] in wanted
        }
  ordered = {name: kept[name] for name in experiments() if name in kept}
  FILE.write_text(json.dumps(ordered, indent=1) + '\n')


if __name__ == '__main__':
  main()
