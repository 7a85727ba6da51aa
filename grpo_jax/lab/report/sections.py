"""The sections of a page about runs, but for those about their settings."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import monitor
from grpo_jax.lab.report import meanings
from grpo_jax.lab.report import silence
from grpo_jax.lab.report import svg
from grpo_jax.lab.report import tokens
from grpo_jax.lab.report import transcripts
from grpo_jax.lab.report import words
from grpo_jax.lab.report.groups import Group
from grpo_jax.lab.report.read import Run
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Ends
from grpo_jax.lab.report.types import Facts
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.rollouts import parquet
from grpo_jax.run.build import about
from grpo_jax.run.build import data as build_data

_POINTS = 60, 240  # of a curve, at least and at most
_BYTES = 3_000_000  # that all charts may take, about
_FILES = 3  # groups of runs of which completions are shown
_AXIS = 'elapsed_secs', 'step'  # what is no metric of a chart
_LEARNED = 'reward', 'heldout_accuracy'
_OWN_TENTHS = (
  'Runs of a group have different numbers of rollouts. Each counts with its '
  'own first and last tenth.'
)


class Charts:
  """Makes the charts of metrics, each of them once.

  Args:
    groups: The runs.
  """

  def __init__(self, groups: Sequence[Group]):
    self._groups = groups
    names = [
      name
      for group in groups
      for run in group.runs
      for name in run.metrics.values
      if name not in _AXIS
    ]
    self.left = dict.fromkeys(names)
    self.constant: dict[str, float] = {}
    for name in list(self.left):
      values = self._values(name)
      if name not in _LEARNED and len(values) > 1 and np.ptp(values) == 0:
        self.constant[name] = float(values[0])
        del self.left[name]
    if 'accuracy' in self.left and self._equal('accuracy', 'reward'):
      del self.left['accuracy']  # the reward is 1 for a right answer, else 0
    # About the bytes that a point takes, written as a number and drawn.
    of_point = sum(80 + 25 * len(group.runs) for group in groups)
    points = _BYTES / (of_point * max(1, len(self.left)))
    self.most_points = int(np.clip(points, *_POINTS))
    # One axis for all, so that they can be compared.
    self._range = 0, max(1, *(run.done for g in groups for run in g.runs), 1)

  def of(self, names: Iterable[str]) -> list[Part]:
    """Charts of those metrics that have numbers, and no chart yet."""
    found = [self._of(name) for name in names if name in self.left]
    return [chart for chart in found if chart]

  def rest(self) -> list[Part]:
    """Charts of all metrics that have none yet."""
    return self.of(sorted(self.left))

  def _values(self, name: str) -> np.ndarray:
    values = [r.metrics.points(name)[1] for g in self._groups for r in g.runs]
    return np.concatenate(values)

  def _equal(self, name: str, other: str) -> bool:
    values, others = self._values(name), self._values(other)
    return len(values) == len(others) and bool(np.all(values == others))

  def _of(self, name: str) -> Chart | None:
    del self.left[name]
    made = [group.curve(name, self.most_points) for group in self._groups]
    curves = [curve for curve in made if curve]
    if not curves:
      return None
    runs = [run for group in self._groups for run in group.runs]
    called = meanings.called(name, _is_graded(runs))
    unit = meanings.unit(called)
    lines = sum(len(run.metrics.steps) for run in runs)
    known, notes = len(self._values(name)), []
    if known < lines - len(runs):  # step 0 has few numbers
      notes.append(
        f'Measured in {known:,} of {words.plural(lines, "rollout")}.'
      )
    for group in self._groups:
      whose = f'{group.name}: ' if len(self._groups) > 1 else ''
      notes += [whose + note for note in _uneven(group, name)]
    return Chart(
      words.message(meanings.label(called), unit, curves)
      + silence.ending(runs, name),
      meanings.measured(called),
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


def _uneven(group: Group, name: str) -> list[str]:
  """What must be known of a mean over runs that do not all go on to its end."""
  ends = [x[-1] for run in group.runs if len(x := run.metrics.points(name)[0])]
  missing, said = len(group.runs) - len(ends), []
  if missing and ends:
    left = 'has' if missing == 1 else 'have'
    said.append(f'{missing:,} of {len(group.runs):,} runs {left} no number.')
  if len({*ends}) > 1:
    said.append(
      f'Runs end at rollouts {min(ends):,} to {max(ends):,}. Beyond its end a '
      'run is not in the mean; the title compares tenths of each run.'
    )
  return said


def learned(charts: Charts) -> Section:
  """Reward and accuracy."""
  parts = charts.of(_LEARNED)
  rewards = [
    name
    for name in charts.left
    if name.startswith('reward/')
    and not name.endswith(config_lib.REWARD_METRICS)
  ]
  if len(rewards) > 1:
    parts += charts.of(rewards)
  if not parts:
    parts = [Text('No rollout has a line in metrics.jsonl yet.', 'warning')]
  return Section('What was learned', parts)


def diagnostics(charts: Charts) -> list[Section]:
  """What is measured beside the reward."""
  rows = monitor.GROUPS
  policy = [*rows['policy'], 'kl_rollout', 'sampler_gap']
  optimizer = [
    *rows['optimizer'], 'adam_carried_update_cosine', 'adam_grad_update_cosine',
  ]  # fmt: skip
  clipped = [
    *rows['clipped tokens, per update'], 'overshoot_positive', 'ends_clipped',
  ]  # fmt: skip
  found = {
    'Answers': charts.of(rows['answers']),
    'Policy: entropy, KL, clipping': charts.of(policy),
    'Optimizer': charts.of(optimizer),
    'Clipped tokens: coasting and overshoot': charts.of(clipped),
  }
  return [Section(title, parts) for title, parts in found.items() if parts]


def speed(charts: Charts) -> Section:
  """Throughput and memory."""
  parts = charts.of(monitor.GROUPS['speed'])
  if not parts:
    parts = [Text('No rollout has a line in metrics.jsonl yet.')]
  return Section('Throughput and memory', parts)


def others(charts: Charts) -> Section:
  """All that has no place elsewhere."""
  parts: list[Part] = []
  if charts.constant:
    said = ', '.join(
      f'{name} = {words.number(value)}'
      for name, value in sorted(charts.constant.items())
    )
    parts.append(Text(f'The same in every rollout: {said}.'))
  return Section('All other metrics', [*parts, *charts.rest()], folded=True)


def before_and_after(groups: Sequence[Group]) -> Section:
  """Greedy answers to the same held-out problems, early and late."""
  parts: list[Part] = []
  for group in groups[:_FILES]:
    run = group.first
    files = parquet.files(run.path / 'evaluations')
    if len(files) < 2:
      continue
    right = run.config.evaluation.right_reward if run.config else 1.0
    found = transcripts.between(files[0], files[-1], right)
    if found is None:
      continue
    of = f' ({run.name})' if len(groups) > 1 or len(group.runs) > 1 else ''
    total = sum(found[1:5])
    within = words.plural(found.steps[1] - found.steps[0], 'rollout')
    parts.append(
      Table(
        f'Within {within}, {found.became_right:,} of '
        f'{words.plural(total, "problem")} became right and '
        f'{found.became_wrong:,} became wrong{of}',
        ('', 'then right', 'then wrong'),
        [
          ('first right', f'{found.stayed_right:,}', f'{found.became_wrong:,}'),
          ('first wrong', f'{found.became_right:,}', f'{found.stayed_wrong:,}'),
        ],
      )
    )
    parts.append(Text('The first of each kind, answered greedily:', 'note'))
    parts += found.shown
  if not parts:
    parts = [
      Text(
        'No two evaluations with problems in common were written. A run with '
        'held-out problems (data.heldout) writes its greedy answers to them '
        'unless log.completions_every_steps is 0.'
      )
    ]
  else:
    parts = [*_written(groups), *parts]
  parts = [*_chosen(groups), *parts]
  return Section('The same problems, before and after', parts)


def _chosen(groups: Sequence[Group]) -> list[Part]:
  """Of which groups and runs completions are shown, if not of all."""
  said = []
  if len(groups) > _FILES:
    said.append(
      f'Only the first {_FILES} of {len(groups)} groups are read here.'
    )
  firsts = [g.first.name for g in groups[:_FILES] if len(g.runs) > 1]
  if firsts:
    said.append(
      'Of runs that differ in nothing but their seeds one is read here: '
      f'{", ".join(firsts)}.'
    )
  return [Text(' '.join(said), 'note')] if said else []


def _written(groups: Sequence[Group]) -> list[Part]:
  """What a reader of completions must know of the data."""
  configs = [run.config for group in groups for run in group.runs]
  notes = {about.note(config) for config in configs if config} - {''}
  return [Text(f'In the data {note}.', 'note') for note in sorted(notes)]


def completions(groups: Sequence[Group]) -> Section:
  """Sampled completions, with what the updates did to each token."""
  parts: list[Part] = []
  for group in groups[:_FILES]:
    run = group.first
    files = parquet.files(run.path / 'completions')
    decode = _decode(run)
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
      shown = transcripts.of_training(file, decode, prompts=3)
      step = int(file.stem.rpartition('_')[2])
      of = f' of {run.name}' if len(groups) > 1 or len(group.runs) > 1 else ''
      if shown:
        parts.append(Text(f'Rollout {step:,}{of}', 'heading'))
        parts += shown
  if not parts:
    parts = [
      Text(
        'None were written, or none can be read: log.completions_every_steps '
        'says how often.'
      )
    ]
    return Section('Completions', [*_chosen(groups), *parts])
  parts = [*_chosen(groups), *_written(groups), *parts]
  if not any(map(tokens.are_known, parts)):
    parts.insert(
      0,
      Text(
        'What the updates did to each token was not measured; a run with '
        '--config.log.token_effects=True does.'
      ),
    )
  return Section('Completions', parts)


def _decode(run) -> Callable[[Sequence[int]], str] | None:
  """What turns ids into text; None if the tokenizer cannot be had here."""
  if run.config is None:
    return None
  try:
    tokenizer = build_data.tokenizer_of(run.config)
  # The files may be gone, or the tokenizer was given in Python.
  except (ValueError, OSError, ImportError):
    return None
  return tokenizer.decode


def summary(groups: Sequence[Group], charts: Charts) -> Section:
  """The numbers that matter most, of each group."""
  rows: list[tuple[str, ...]] = [
    ('runs', *(_seeds(group) for group in groups)),
    ('rollouts', *(_done(group) for group in groups)),
  ]

  def add(name: str, label: str, shown: Callable[[Ends], str]) -> None:
    curves = [group.curve(name, charts.most_points) for group in groups]
    if any(curves):
      cells = [
        shown(curve.end) if curve and curve.end else '-' for curve in curves
      ]
      rows.append((label, *cells))

  def last(end: Ends) -> str:
    return words.with_half(end.last, end.half)

  def accuracy(end: Ends) -> str:
    later = words.with_half(end.last, end.half, unit)
    return f'{words.number(end.first, unit)} → {later}'

  def alone(end: Ends) -> str:
    return words.number(end.last)

  add('reward', 'reward, last tenth', last)
  graded = _is_graded([run for group in groups for run in group.runs])
  heldout = meanings.called('heldout_accuracy', graded)
  unit = meanings.unit(heldout)
  add('heldout_accuracy', f'{meanings.label(heldout)}, first to last', accuracy)
  add('entropy', 'entropy, last tenth, nats', last)
  rows.append(('time', *(_time(group) for group in groups)))
  for name in ('sample_tokens_per_sec', 'learn_tokens_per_sec'):
    add(name, f'{meanings.label(name)}, tokens/s', alone)
  for name in ('device_peak_gib', 'host_peak_gib'):
    add(name, f'{meanings.label(name)}, GiB', alone)
  parts: list[Part] = [
    Table('', ('', *(group.name for group in groups)), rows)
    if len(groups) > 1
    else Facts([(row[0], row[1]) for row in rows])
  ]
  if any(len({run.done for run in group.runs}) > 1 for group in groups):
    parts.append(Text(_OWN_TENTHS, 'note'))
  for group in groups:
    for run in group.runs:
      silent = [silence.sentence(run, one) for one in silence.of_run(run)]
      wrong = [*run.troubles, *silent]
      parts += [Text(f'{run.name}: {x}', 'warning') for x in wrong]
  return Section('Summary', parts)


def _seeds(group: Group) -> str:
  seeds = ', '.join(str(run.saved.get('seed')) for run in group.runs)
  return (
    f'{len(group.runs)} ({"seed" if len(group.runs) == 1 else "seeds"} {seeds})'
  )


def _done(group: Group) -> str:
  done = [run.done for run in group.runs]
  wanted = group.first.saved.get('steps')
  span = (
    f'{min(done):,}' if len({*done}) == 1 else f'{min(done):,} to {max(done):,}'
  )
  if isinstance(wanted, int) and min(done) < wanted:
    return f'{span} of {wanted:,}: not at the end'
  return span


def _time(group: Group) -> str:
  secs = [
    float(values[-1])
    for run in group.runs
    if len(values := run.metrics.points('elapsed_secs')[1])
  ]
  if not secs:
    return '-'
  each = ' each' if len(secs) > 1 else ''
  return f'{words.duration(sum(secs) / len(secs))}{each}'
