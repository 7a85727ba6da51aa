"""The sections about what the runs were told: method, config, versions."""

from collections.abc import Sequence
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax import diagnostics
from grpo_jax.config import plain_text
from grpo_jax.lab import audits
from grpo_jax.lab.report import groups as groups_lib
from grpo_jax.lab.report import read
from grpo_jax.lab.report.groups import Group
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.run.build import method as build_method
from grpo_jax.run.keep import records

_LONGEST = 200  # characters of a value


def method(groups: Sequence[Group]) -> Section:
  """What an audit finds of each method, in words."""
  parts: list[Part] = []
  done = set()
  for group in groups:
    config = group.first.config
    if config is None:
      continue
    kwargs = config.learner.method_kwargs
    given = ', '.join(f'{name}={value!r}' for name, value in kwargs.items())
    name = f'{config.learner.method}({given})'
    if name not in done:
      done.add(name)
      parts.append(_audit(name, config))
  if not parts:
    parts = [Text('The config cannot be read here.', 'warning')]
  note = Text(
    'Measured by evaluating the method on small batches; grpo-jax audit METHOD '
    'does the same.',
    'note',
  )
  return Section('The method, in words', [*parts, note])


def _audit(name: str, config: config_lib.Config) -> Part:
  try:
    made = build_method.method_of(config)
    rows = audits.lines('method', diagnostics.audit(made))
  except Exception as error:  # a method of the user's own may raise anything
    said = ' '.join(plain_text.said(error).split())
    return Text(f'{name} cannot be audited here ({said}).', 'warning')
  return Table(name, (), rows)


def config(groups: Sequence[Group]) -> Section:
  """What the groups differ in, and what they have in common."""
  firsts = [group.first for group in groups]
  parts: list[Part] = []
  differ = groups_lib.differing(firsts)
  if differ:
    fields = [groups_lib.learned(run) for run in firsts]
    rows = [
      (name, *(_shown(one.get(name)) for one in fields)) for name in differ
    ]
    head = ('field', *(group.name for group in groups))
    parts.append(Table('Where the groups differ', head, rows))
  usual = records.flat(config_lib.Config())
  flat = config_lib.flat(firsts[0].saved)
  changed = [
    (name, _shown(value), _shown(usual.get(name)))
    for name, value in flat.items()
    if value != usual.get(name) and name not in (*differ, 'seed')
  ]
  where = '' if len(firsts) == 1 else f' in {firsts[0].name}'
  parts.append(
    Table(
      f'Fields that are not at their defaults{where}',
      ('field', 'value', 'default'),
      changed,
    )
  )
  rows = [(name, _shown(value)) for name, value in flat.items()]
  parts.append(
    Table(f'All {len(rows)} fields{where}', ('field', 'value'), rows, True)
  )
  return Section('Config', parts)


def versions(groups: Sequence[Group]) -> Section:
  """Packages, machines and starts of every run."""
  runs = [run for group in groups for run in group.runs]
  cells = {run.name: _versions(run) for run in runs}
  names = dict.fromkeys(name for one in cells.values() for name in one)
  rows = []
  for name in names:
    values = {run: one.get(name, '-') for run, one in cells.items()}
    if len({*values.values()}) == 1:
      rows.append((name, next(iter(values.values()))))
      continue
    rows += [(f'{name}, {run}', value) for run, value in values.items()]
  if not rows:
    return Section('Versions', [Text('There is no versions.json.', 'warning')])
  about = 'Of the last start' + (' of each run.' if len(runs) > 1 else '.')
  return Section('Versions', [Text(about, 'note'), Table('', (), rows)])


def _versions(run: read.Run) -> dict[str, str]:
  if not run.starts:
    return {}
  last = run.starts[-1]
  packages = last.get('packages')
  found = {
    'started': str(last.get('time', '-')),
    'starts': str(len(run.starts)),
    'devices': str(last.get('devices', '-')),
    'processes': str(last.get('processes', '-')),
    'Python': str(last.get('python', '-')),
    'git revision': str(last.get('git', '-')),
  }
  if isinstance(packages, dict):
    found |= {str(name): str(value) for name, value in packages.items()}
  return found


def _shown(value: Any) -> str:
  text = 'none' if value is None else str(value)
  if len(text) > _LONGEST:
    return f'{text[:_LONGEST]} …'
  return text if text else "''"
