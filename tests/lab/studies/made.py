"""Experiments and workdirs of studies that are made up, for tests of pages."""

import json

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import staleness
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured


def experiment(run=dict, label='E0', title='a made one'):
  """An experiment with one claim, which takes what `run` does."""

  def draw(numbers, found, figure, colors):
    figure.subplots().plot([1, 2], [1, 2])
    return 'A line.'

  return Experiment(
    label,
    title,
    {'one': Claim('It is at least 1.', 'derived', low=1.0)},
    lambda numbers: {'one': Measured(numbers['value'], 0.25)},
    draw,
    run,
  )


def result(value, label='E0', title='a made one', setting=''):
  """What has come of it."""
  done, numbers = experiment(dict, label, title), {'value': value}
  rows = claims.check(done, numbers)
  return pages.Result(done, numbers, rows, 1.5, setting)


def stale_numbers(slope):
  """Of a study of ages; what is clipped rises with the age by `slope`."""
  names = 'reward', 'clipped', 'carried', 'moved', 'outside', 'ess'
  of_arm = lambda arm, name: {
    str(seed): (slope if name == 'clipped' else -0.1) * arm.ahead
    for seed in range(2)
  }
  return {
    'means': {
      name: {arm.label: of_arm(arm, name) for arm in staleness.ARMS}
      for name in names
    },
    'curves': {arm.label: [0.0, 1.0] for arm in staleness.ARMS},
  }


def workdir(folder, content, environment=None):
  """A workdir in which a study has written `content`."""
  (folder / 'claims').mkdir(parents=True)
  text = content if isinstance(content, str) else json.dumps(content)
  (folder / 'claims' / 'claims.json').write_text(text)
  if environment is not None:
    config = json.dumps({'environment': {'name': environment}})
    (folder / 'config.json').write_text(config)
  return str(folder)


def stale(folder, slope=0.1, environment=None, **changes):
  """A workdir of that study."""
  saved = {'numbers': stale_numbers(slope), 'seconds': 12.0, **changes}
  return workdir(folder, {'staleness': saved}, environment)
