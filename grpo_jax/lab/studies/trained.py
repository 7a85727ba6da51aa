"""What studies that train runs have measured, read from their workdirs.

The numbers are theirs. Verdicts are computed anew, by the claims of the code as
it is now.
"""

from collections.abc import Sequence
import json
import math
import pathlib
from typing import Any

from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import evidence
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import story

_FILE = pathlib.Path('claims', 'claims.json')


def read(workdirs: Sequence[str]) -> dict[str, pages.Result]:
  """What the studies in some workdirs have measured, with verdicts.

  Args:
    workdirs: Each of a study of `studies.STUDIES` that has written its folder
      `claims`.

  Returns:
    The results by the name of the study. A study of episodes that is not shown
    for episodes alone is called `NAME-episodes`, so that it has its place
    beside the one of single turns.

  Raises:
    ValueError: A workdir has no such file, the file is damaged or of something
      else, or two workdirs hold the same. The sentence says what to do.
  """
  found, places = {}, {}
  for workdir in map(pathlib.Path, workdirs):
    setting = _setting(workdir)
    for name, saved in _saved(workdir).items():
      if name not in studies.STUDIES:
        raise ValueError(
          f'{workdir / _FILE} is of {name!r:.60}, which is no study that '
          f'trains runs; these are: {", ".join(studies.STUDIES)}.'
        )
      first, *_ = story.trainings(name)
      is_other = setting == story.EPISODES and first.setting != setting
      key = f'{name}-episodes' if is_other else name
      if key in found:
        which = f'{name}, in {setting}' if setting else name
        raise ValueError(
          f'{places[key]} and {workdir} both hold {which}; give one of them.'
        )
      found[key] = _result(name, saved, setting, workdir / _FILE)
      places[key] = workdir
  return found


def _saved(workdir: pathlib.Path) -> dict[str, Any]:
  """What a study has written, by its name."""
  file = workdir / _FILE
  try:
    saved = json.loads(file.read_text('utf-8'))
  except (FileNotFoundError, NotADirectoryError) as error:
    raise ValueError(
      f'There is no {_FILE} in {workdir}; give the workdir of a study that has '
      'trained runs and ended.'
    ) from error
  except OSError as error:
    raise ValueError(f'{file} cannot be read ({error}).') from error
  except (ValueError, RecursionError) as error:
    raise _damaged(file, error) from error
  if not isinstance(saved, dict) or not saved:
    raise _damaged(file, 'it holds no study')
  return saved


def _damaged(file: pathlib.Path, why: object) -> ValueError:
  return ValueError(
    f'{file} is damaged ({why}); do the study again, which reads what its runs '
    'have measured and trains none of them anew.'
  )


def _result(
  name: str, saved: Any, setting: str, file: pathlib.Path
) -> pages.Result:
  """A study with verdicts on its numbers."""
  made = studies.study(name).experiment
  try:
    numbers, seconds = saved['numbers'], saved['seconds']
    seconds = math.nan if seconds is None else float(seconds)
    made = claims.asked(made, numbers)
    rows = claims.check(made, numbers)
    result = pages.Result(made, numbers, rows, seconds, setting)
    _try(name, result)
  except Exception as error:  # wrong numbers may raise anything
    why = f'{type(error).__name__}: {error}'
    raise _damaged(file, f'{name}, {why:.80}') from error
  return result


def _try(name: str, result: pages.Result) -> None:
  """Raises what writing would, now and not when all else has been measured.

  What is nested so deeply that Python cannot follow is refused too, here a call
  or two earlier than in `pages.write`.
  """
  json.dumps(pages.to_json({name: result}), indent=1, allow_nan=False)
  evidence.parts(result.numbers)
  figures.make_charts(result.experiment, result.numbers)


def _setting(workdir: pathlib.Path) -> str:
  """What the runs of a workdir were about; '' if its config does not say."""
  try:
    config = json.loads((workdir / 'config.json').read_text('utf-8'))
    name = config['environment']['name']
  except (OSError, ValueError, RecursionError, KeyError, TypeError):
    return ''
  return story.EPISODES if name else story.SINGLE
