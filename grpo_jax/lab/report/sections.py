"""The sections of a page about runs, but for completions and gradients."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import diagnostics
from grpo_jax import monitor
from grpo_jax.config import plain_text
from grpo_jax.lab import audits
from grpo_jax.lab.report import read
from grpo_jax.lab.report import svg
from grpo_jax.lab.report import words
from grpo_jax.lab.report.read import Group
from grpo_jax.lab.report.read import Run
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Ends
from grpo_jax.lab.report.types import Facts
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.lab.report.types import Timeline
from grpo_jax.run.build import about
from grpo_jax.run.build import method as build_method
from grpo_jax.run.keep import records

_POINTS = 60, 240  # of a curve, at least and at most
_BYTES = 3_000_000  # that all charts may take, about
_AXIS = 'elapsed_secs', 'step'  # what is no metric of a chart
_LEARNED = 'reward', 'heldout_accuracy'
_LISTED = 8  # rollouts with alarms of one kind
_LONGEST = 200  # characters of a value
_NO_ROLLOUT = 'No rollout has a line in metrics.jsonl yet.'
_OWN_TENTHS = (
  'Runs of a group have different numbers of rollouts. Each counts with its '
  'own first and last tenth.'
)
_ALARMS_NOTE = (
  'Found again from metrics.jsonl with the limits of each config. An alarm '
  'speaks when its condition begins, and again only after ten rollouts without '
  'it. A value that was not finite stands there as null, and raises none here; '
  'a metric that has no numbers any more is marked where they end.'
)


class Charts:
  """Makes the charts of metrics, each of them once.

  Args:
    groups: The runs.
  """

  def __init__(self, groups: Sequence[Group]):
    self._groups = groups
    self._runs = [run for group in groups for run in group.runs]
    names = [name for run in self._runs for name in run.metrics.values]
    self.left = dict.fromkeys(name for name in names if name not in _AXIS)
    values = {name: self._values(name) for name in self.left}
    self.constant = {
      name: float(found[0])
      for name, found in values.items()
      if name not in _LEARNED and len(found) > 1 and np.ptp(found) == 0
    }
    for name in self.constant:
      del self.left[name]
    # The reward is 1 for a right answer, else 0.
    if 'accuracy' in self.left and np.array_equal(
      values['accuracy'], self._values('reward')
    ):
      del self.left['accuracy']
    # About the bytes that a point takes, written as a number and drawn.
    point_bytes = sum(80 + 25 * len(group.runs) for group in groups)
    points = _BYTES / (point_bytes * max(1, len(self.left)))
    self.most_points = int(np.clip(points, *_POINTS))
    # One axis for all, so that they can be compared.
    self._range = 0, max(1, *(run.done for run in self._runs), 1)

  def make(self, names: Iterable[str]) -> list[Part]:
    """Charts of those metrics that have numbers, and no chart yet."""
    found = [self._chart(name) for name in names if name in self.left]
    return [chart for chart in found if chart]

  def _values(self, name: str) -> np.ndarray:
    return np.concatenate([run.metrics.points(name)[1] for run in self._runs])

  def _chart(self, name: str) -> Chart | None:
    del self.left[name]
    made = [group.curve(name, self.most_points) for group in self._groups]
    curves = [curve for curve in made if curve]
    if not curves:
      return None
    called = words.called(name, _is_graded(self._runs))
    unit = words.unit(called)
    lines = sum(len(run.metrics.steps) for run in self._runs)
    known, notes = len(self._values(name)), []
    if known < lines - len(self._runs):  # step 0 has few numbers
      notes.append(
        f'Measured in {known:,} of {words.plural(lines, "rollout")}.'
      )
    for group in self._groups:
      whose = f'{group.name}: ' if len(self._groups) > 1 else ''
      notes += [whose + note for note in _uneven(group, name)]
    return Chart(
      words.message(words.label(called), unit, curves)
      + read.silence_ending(self._runs, name),
      words.measured(called),
      curves,
      unit,
      name,
      ' '.join(dict.fromkeys(notes)),
      x_range=self._range,
      y_log=svg.log_suits(curves, unit),
    )


def _is_graded(runs: Sequence[Run]) -> bool:
  """Whether a held-out reward of some run was neither 0 nor 1."""
  return any(len(run.metrics.points('heldout_graded')[0]) for run in runs)


def _uneven(group: Group, name: str) -> Iterator[str]:
  """What must be known of a mean over runs that do not all go on to its end."""
  ends = [x[-1] for run in group.runs if len(x := run.metrics.points(name)[0])]
  missing = len(group.runs) - len(ends)
  if missing and ends:
    left = 'has' if missing == 1 else 'have'
    yield f'{missing:,} of {len(group.runs):,} runs {left} no number.'
  if len({*ends}) > 1:
    yield (
      f'Runs end at rollouts {min(ends):,} to {max(ends):,}. Beyond its end a '
      'run is not in the mean; the title compares tenths of each run.'
    )


def learned(charts: Charts) -> Section:
  """Reward and accuracy."""
  parts = charts.make(_LEARNED)
  rewards = [
    name
    for name in charts.left
    if name.startswith('reward/')
    and not name.endswith(config_lib.REWARD_METRICS)
  ]
  if len(rewards) > 1:
    parts += charts.make(rewards)
  return Section('What was learned', parts or [Text(_NO_ROLLOUT, 'warning')])


def diagnostics_sections(charts: Charts) -> list[Section]:
  """What is measured beside the reward."""
  rows = monitor.GROUPS
  metrics = {
    'Answers': rows['answers'],
    'Episodes': [*rows['episodes'], 'env_failed'],
    'Policy: entropy, KL, clipping': [
      *rows['policy'], 'kl_rollout', 'sampler_gap',
    ],
    'Optimizer': [
      *rows['optimizer'], 'adam_carried_update_cosine',
      'adam_grad_update_cosine',
    ],
    'Clipped tokens: coasting and overshoot': [
      *rows['clipped tokens, per update'], 'overshoot_positive',
      'ends_clipped',
    ],
  }  # fmt: skip
  found = {title: charts.make(names) for title, names in metrics.items()}
  return [Section(title, parts) for title, parts in found.items() if parts]


def speed(charts: Charts) -> Section:
  """Throughput and memory."""
  parts = charts.make(monitor.GROUPS['speed']) or [Text(_NO_ROLLOUT)]
  return Section('Throughput and memory', parts)


def others(charts: Charts) -> Section:
  """All that has no place elsewhere."""
  said = ', '.join(
    f'{name} = {words.number(value)}'
    for name, value in sorted(charts.constant.items())
  )
  parts = [Text(f'The same in every rollout: {said}.')] if said else []
  parts += charts.make(sorted(charts.left))
  return Section('All other metrics', parts, folded=True)


def summary(groups: Sequence[Group], charts: Charts) -> Section:
  """The numbers that matter most, of each group."""
  runs = [run for group in groups for run in group.runs]
  heldout = words.called('heldout_accuracy', _is_graded(runs))
  unit = words.unit(heldout)

  def row(name: str, label: str, shown: Callable[[Ends], str]):
    """The row of a metric; none if no group has a number."""
    curves = [group.curve(name, charts.most_points) for group in groups]
    cells = [
      shown(curve.end) if curve and curve.end else '-' for curve in curves
    ]
    return [(label, *cells)] if any(curves) else []

  def last(end: Ends) -> str:
    return words.with_half(end.last, end.half)

  def accuracy(end: Ends) -> str:
    later = words.with_half(end.last, end.half, unit)
    return f'{words.number(end.first, unit)} → {later}'

  rows: list[tuple[str, ...]] = [
    ('runs', *map(_seeds, groups)),
    ('rollouts', *map(_done, groups)),
    *row('reward', 'reward, last tenth', last),
    *row(
      'heldout_accuracy', f'{words.label(heldout)}, first to last', accuracy
    ),
    *row('entropy', 'entropy, last tenth, nats', last),
    ('time', *map(_time, groups)),
  ]
  for name, in_unit in (
    ('sample_tokens_per_sec', 'tokens/s'), ('learn_tokens_per_sec', 'tokens/s'),
    ('device_peak_gib', 'GiB'), ('host_peak_gib', 'GiB'),
  ):  # fmt: skip
    label = f'{words.label(name)}, {in_unit}'
    rows += row(name, label, lambda end: words.number(end.last))
  parts: list[Part] = [
    Table('', ('', *(group.name for group in groups)), rows)
    if len(groups) > 1
    else Facts([(row[0], row[1]) for row in rows])
  ]
  if any(len({run.done for run in group.runs}) > 1 for group in groups):
    parts.append(Text(_OWN_TENTHS, 'note'))
  for run in runs:
    silent = [
      read.silence_sentence(run, one) for one in read.find_silences(run)
    ]
    wrong = [*run.troubles, *silent]
    parts += [Text(f'{run.name}: {said}', 'warning') for said in wrong]
  return Section('Summary', parts)


def _seeds(group: Group) -> str:
  seeds = ', '.join(str(run.saved.get('seed')) for run in group.runs)
  noun = 'seed' if len(group.runs) == 1 else 'seeds'
  return f'{len(group.runs)} ({noun} {seeds})'


def _done(group: Group) -> str:
  ends = sorted({run.done for run in group.runs})
  span = ' to '.join(f'{end:,}' for end in dict.fromkeys((ends[0], ends[-1])))
  wanted = group.first.saved.get('steps')
  if isinstance(wanted, int) and ends[0] < wanted:
    return f'{span} of {wanted:,}: not at the end'
  return span


def _time(group: Group) -> str:
  secs = [
    float(values[-1])
    for run in group.runs
    if len(values := run.metrics.points('elapsed_secs')[1])
  ]
  each = ' each' if len(secs) > 1 else ''
  return words.duration(sum(secs) / len(secs)) + each if secs else '-'


def method(groups: Sequence[Group]) -> Section:
  """What an audit finds of each method, in words."""
  named: dict[str, config_lib.Config] = {}
  for config in (group.first.config for group in groups):
    if config:
      kwargs = config.learner.method_kwargs
      given = ', '.join(f'{name}={value!r}' for name, value in kwargs.items())
      named.setdefault(f'{config.learner.method}({given})', config)
  parts = [_audit(name, config) for name, config in named.items()]
  note = Text(
    'Measured by evaluating the method on small batches; grpo-jax audit METHOD '
    'does the same.',
    'note',
  )
  unread = Text('The config cannot be read here.', 'warning')
  return Section('The method, in words', [*(parts or [unread]), note])


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
  differ = read.differing(firsts)
  usual = records.flat(config_lib.Config())
  flat = config_lib.flat(firsts[0].saved)
  where = '' if len(firsts) == 1 else f' in {firsts[0].name}'
  parts: list[Part] = [
    Table(
      f'Fields that are not at their defaults{where}',
      ('field', 'value', 'default'),
      [
        (name, _shown(value), _shown(usual.get(name)))
        for name, value in flat.items()
        if value != usual.get(name) and name not in (*differ, 'seed')
      ],
    ),
    Table(
      f'All {len(flat)} fields{where}',
      ('field', 'value'),
      [(name, _shown(value)) for name, value in flat.items()],
      folded=True,
    ),
  ]
  if differ:
    fields = [read.learned(run) for run in firsts]
    rows = [
      (name, *(_shown(one.get(name)) for one in fields)) for name in differ
    ]
    head = ('field', *(group.name for group in groups))
    parts.insert(0, Table('Where the groups differ', head, rows))
  return Section('Config', parts)


def versions(groups: Sequence[Group]) -> Section:
  """Packages, machines and starts of every run."""
  cells = {
    run.name: _versions(run.starts) for group in groups for run in group.runs
  }
  rows = []
  for name in dict.fromkeys(name for one in cells.values() for name in one):
    values = {run: one.get(name, '-') for run, one in cells.items()}
    if len({*values.values()}) == 1:
      rows.append((name, next(iter(values.values()))))
    else:
      rows += [(f'{name}, {run}', value) for run, value in values.items()]
  if not rows:
    return Section('Versions', [Text('There is no versions.json.', 'warning')])
  said = 'Of the last start' + (' of each run.' if len(cells) > 1 else '.')
  return Section('Versions', [Text(said, 'note'), Table('', (), rows)])


def _versions(starts: Sequence[dict[str, Any]]) -> dict[str, str]:
  """What is known of the last start, by what it is."""
  if not starts:
    return {}
  last = starts[-1]
  found = {
    'started': last.get('time', '-'),
    'starts': len(starts),
    'devices': last.get('devices', '-'),
    'processes': last.get('processes', '-'),
    'Python': last.get('python', '-'),
    'git revision': last.get('git', '-'),
  }
  if changes := '; '.join(_changes(starts)):
    found['changed'] = changes
  if isinstance(packages := last.get('packages'), dict):
    found |= packages
  return {str(name): str(value) for name, value in found.items()}


def _changes(starts: Sequence[dict[str, Any]]) -> Iterator[str]:
  """What starts have changed of the config, and after which rollout."""
  for start in starts:
    changed = start.get('changed')
    for name, pair in changed.items() if isinstance(changed, dict) else ():
      if isinstance(pair, list) and len(pair) == 2:
        before, now = map(_shown, pair)
        after = start.get('after_step', '?')
        yield f'{name} from {before} to {now} after rollout {after}'


def _shown(value: Any) -> str:
  text = 'none' if value is None else str(value)
  return f'{text[:_LONGEST]} …' if len(text) > _LONGEST else text or "''"


def alarms(groups: Sequence[Group], charts: Charts) -> Section:
  """All alarms over the rollouts, and what each said first."""
  rows: dict[str, list[float]] = {}
  # For each run and kind: the rollouts, and what was said first.
  said: dict[tuple[str, str], tuple[list[int], str]] = {}
  runs = [(group, run) for group in groups for run in group.runs]
  for group, run in runs:
    for kind, step, sentence in _alarms(run):
      row = f'{kind} · {group.name}' if len(groups) > 1 else kind
      rows.setdefault(row, []).append(step)
      said.setdefault((run.name, kind), ([], sentence))[0].append(step)
  unknown = sum(run.config is None for _, run in runs)
  parts: list[Part] = []
  if unknown:
    left = words.plural(unknown, 'run')
    parts.append(Text(f'The config of {left} cannot be read here.', 'warning'))
  elif not said:
    parts.append(Text('None: no metric was beyond its limit in config.log.'))
  if said:
    number = words.plural(sum(map(len, rows.values())), 'alarm')
    last = max(1, *(run.done for _, run in runs))
    listed = [
      (name, _listed(steps), sentence)
      for (name, _), (steps, sentence) in said.items()
    ]
    parts += [
      Timeline(f'{number}, by rollout', list(rows.items()), 0, last),
      Table('What each said first', ('run', 'rollouts', 'alarm'), listed),
    ]
  problems = charts.make(monitor.GROUPS['problems'])
  return Section('Alarms', [*parts, *problems, Text(_ALARMS_NOTE, 'note')])


def _alarms(run: Run) -> Iterator[tuple[str, int, str]]:
  """Kind, rollout and sentence of each alarm, and where metrics fall silent."""
  # Those that the terminal has shown; none without a config.
  if run.config:
    replays = bool(run.starts and run.starts[-1].get('replays'))
    judge = monitor.Alarms(about.monitored(run.config).limits, replays)
    for step, scalars in run.metrics.records():
      for metric, sentence in judge.begun(scalars):
        yield words.label(metric), step, sentence
  for one in read.find_silences(run):
    # Each has a sentence of its own, which names its metrics.
    yield 'no more numbers', one.since, read.silence_sentence(run, one)


def _listed(steps: Sequence[int]) -> str:
  """The first of some rollouts, and how many more there are."""
  shown = ', '.join(f'{step:,}' for step in steps[:_LISTED])
  more = len(steps) - _LISTED
  return f'{shown} and {more:,} more' if more > 0 else shown
