"""Does dividing by a group's deviation help in the phases that it should?

Ge et al. (arXiv:2601.23135) see three phases in a training. In the first,
gradients of different prompts are nearly orthogonal and rewards differ much
within a group; dividing by their deviation gains nothing. After the second, in
which rewards differ less, cosines of gradients lie far apart. The division
gains in the last two.

The arms are GRPO as it is, `divided`, and without the division, `plain`: with
the same seeds, prompts and parameters to begin with. Phases are found in the
run of `divided`, seed by seed, by the rule of `report.gradients`. Gradients are
compared in that run alone: it takes longer than the training.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.lab.report import gradients
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.normalization import METHODS
from grpo_jax.run import bare
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import rewards as build_rewards

_EVERY = 2  # rollouts; a measured one takes two to four times as long
DIVIDED, PLAIN = METHODS


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    label: A name in `normalization.METHODS`.
  """

  label: str


ARMS = tuple(map(Arm, METHODS))


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured.

  Attributes:
    arm: How it was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    numbers: By name, a value of each rollout: `reward`, the mean; `reward_std`,
      the deviation within a group, mean over groups; `unequal`, the share of
      groups whose rewards are not all equal; `graded`, the share of rewards
      that are neither 0 nor 1. And of each `_EVERY`-th rollout of `divided`,
      NaN between, `geometry_*` as `learner.instruments.geometry` has them.
  """

  arm: Arm
  seed: int
  steps: int
  numbers: dict[str, list[float]]


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, an arm's loss, and a seed."""
  method = METHODS[arm.label]
  every = _EVERY if arm.label == DIVIDED else 0
  return dataclasses.replace(
    config,
    seed=seed,
    learner=dataclasses.replace(config.learner, method=method),
    log=dataclasses.replace(config.log, geometry_every_steps=every),
  )


def train(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Does one run from given parameters; see `sweeps.Sweep.train`."""
  run = build.run(config_of(config, arm, seed))
  updater = build.updater(run, build.frozen_params(run))
  with (
    build_rewards.workers(run.limits, run.rewards) as workers,
    build_environment.player(run.environment) as player,
  ):
    run = dataclasses.replace(run, workers=workers, player=player)
    # Copied: `init` donates its argument, and the other arm needs it again.
    state = updater.compiled.init(jax.tree.map(jnp.copy, params))
    rows = [_numbers(one) for one in bare.trained(run, updater, state)]
  names = dict.fromkeys(name for row in rows for name in row)
  numbers = {name: [row.get(name, math.nan) for row in rows] for name in names}
  return Outcome(arm, seed, len(rows), numbers)


def _numbers(one: bare.Trained) -> dict[str, float]:
  batch = one.rollout.batch
  reward = np.ma.masked_array(
    np.asarray(batch.reward, np.float64), ~np.asarray(batch.valid)
  )
  deviation = reward.std(axis=1).filled(0.0)
  graded = (reward != 0) & (reward != 1)
  return {
    # NaN where nothing was judged.
    'reward': float(np.ma.filled(reward.mean(), math.nan)),
    'reward_std': float(deviation.mean()),
    # Not by the deviation, in which equal rewards may leave rounding.
    'unequal': float(np.mean(np.ma.ptp(reward, axis=1).filled(0.0) > 0)),
    'graded': float(np.ma.filled(graded.mean(), 0.0)),
    **{
      name: value
      for name, value in one.measured.items()
      if name.startswith('geometry_')
    },
  }


_SAME = 0.02  # rewards that differ by less are the same
_ROLLOUTS = 'of one seed, the interval is over its rollouts'
_SEEDS = 'mean reward, divided minus plain; of one seed there is no interval'
_C = (
  '8/3 times the mean deviation of rewards in a group as it was drawn, which '
  'for G completions is too small, by a sixth at G = 8 and success 0.2; '
  f'rewards of 0 and 1 alone; {_ROLLOUTS}'
)

CLAIMS = {
  'orthogonal': Claim(
    'In phase I, or in the first third of a run without phases, gradients of '
    'prompts are nearly orthogonal (share of pairs with |cosine| < 0.1; '
    f'{_ROLLOUTS}).',
    f'{GE}, section 4.2; table 3 has 0.977 at step 0',
    low=0.8,
  ),
  'mean_cosine': Claim(
    'In phase I, or in the first third of a run without phases, the mean '
    f'cosine of two gradients is near 0 ({_ROLLOUTS}).',
    f'{GE}, table 3, which has 0.000 at step 0 and 0.039 at step 260',
    -0.02,
    0.02,
  ),
  'second': Claim(
    'The deviation of rewards within groups falls in a step, so there is a '
    'phase II (share of the seeds, each by the rule of the report).',
    f'{GE}, section 4.4',
    low=1.0,
  ),
  'third': Claim(
    'After that the deviation of cosines rises in a step, so there is a phase '
    'III (share of the seeds, each by the rule of the report).',
    f'{GE}, section 4.4 and table 3',
    low=1.0,
  ),
  'spread': Claim(
    'The deviation of cosines is larger in phase III than in phase I '
    f'(difference; {_ROLLOUTS}).',
    f'{GE}, table 3, which has 0.045 at step 0 and 0.130 at step 500',
    low=claims.ABOVE_0,
  ),
  'orthogonal_falls': Claim(
    'Fewer pairs are nearly orthogonal in phase III than in phase I '
    f'(difference of shares, I minus III; {_ROLLOUTS}).',
    f'{GE}, table 3, which has 0.977 at step 0 and 0.524 at step 500',
    low=claims.ABOVE_0,
  ),
  'a4': Claim(
    'A4: no update on a prompt hinders another (share of pairs of gradients, '
    'as they were drawn, whose product is above 0, in rollouts where cosines '
    f'lie further apart than sketching makes them; {_ROLLOUTS}).',
    f'{GE}, assumption A4; table 3 has 0.505 to 0.727',
    low=1.0,
  ),
  'c_first': Claim(
    f'C(T) is above 1 in phase I ({_C}).',
    f'derived from {GE}, figure 3, which begins at 1.33',
    low=1.0,
  ),
  'c_second': Claim(
    f'C(T) is below 1 in phase II ({_C}).',
    f'derived from {GE}, figure 3',
    high=1.0,
  ),
  'no_gain': Claim(
    f'In phase I the division gains nothing ({_SEEDS}).',
    f'{GE}, section 4.4 and figure 3, where curves overlap',
    -_SAME,
    _SAME,
  ),
  'gain_second': Claim(
    f'In phase II the division gains ({_SEEDS}).',
    f'{GE}, figure 3, which has 0.03 to 0.07 at its end',
    low=claims.ABOVE_0,
  ),
  'gain_either': Claim(
    'The division gains in phase II by the phases of either run too (mean of '
    'the gain in phase II of `divided` and in that of `plain`, which begins '
    'by the rewards of `plain` and ends with the other; the phase of one run '
    f'alone favours what rose first there; {_SEEDS}).',
    'wanted of a fair comparison',
    low=claims.ABOVE_0,
  ),
  'gain_third': Claim(
    f'In phase III the division gains ({_SEEDS}).',
    f'{GE}, figure 3, which has 0.02 to 0.03',
    low=claims.ABOVE_0,
  ),
  'gain': Claim(
    f'Over a whole training the division gains ({_SEEDS}).',
    f'{GE}, figure 3',
    low=claims.ABOVE_0,
  ),
  'threshold': Claim(
    'The division gains more in phases with C(T) below 1 than in those with '
    f'C(T) above 1 (difference of gains; {_SEEDS}).',
    f'derived from {GE}, comparison of theorems 3.1 and 3.2',
    low=claims.ABOVE_0,
  ),
}

_OF_PHASES = (
  'geometry_reward_std',
  'geometry_cosine_std',
  'geometry_cosine_noise',
)
_DRAWN = (
  'reward', 'reward_std', 'geometry_cosine_mean', 'geometry_cosine_std',
  'geometry_cosine_small', 'geometry_cosine_negative',
)  # fmt: skip
_SHOWN = 'reward_std', 'unequal', *_DRAWN[2:]


def numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
  """The phases of each seed, what was measured in them, and curves.

  Returns:
    `seeds`: of each seed with a run of `divided`, what `_of_seed` returns;
    `curves`: {arm: {seed: {name: values by rollout}}}. Means come as `[mean,
    half of the interval over rollouts]`.
  """
  by_seed: dict[str, dict[str, Any]] = {}
  drawn: dict[str, Any] = {}
  for one in outcomes:
    # As numbers, because a file has None in the place of NaN.
    values = {k: np.array(x, float) for k, x in one.numbers.items()}
    by_seed.setdefault(str(one.seed), {})[one.arm.label] = values
    drawn.setdefault(one.arm.label, {})[str(one.seed)] = {
      name: values[name].tolist() for name in _DRAWN if name in values
    }
  seeds = {
    seed: _of_seed(arms[DIVIDED], arms.get(PLAIN))
    for seed, arms in by_seed.items()
    if DIVIDED in arms
  }
  return {'seeds': seeds, 'curves': drawn}


Values = Mapping[str, np.ndarray]


def _of_seed(divided: Values, plain: Values | None) -> dict[str, Any]:
  """What the runs of one seed say.

  Args:
    divided: f64[N] by name, of the run in which phases are looked for.
    plain: Likewise of the other; None if it was not run.

  Returns:
    `second` and `third`, the first rollout of these phases, counted from 1, or
    None; `reason`, why one is not found; and of all rollouts (`whole`), of each
    phase that was found (`phases`) and of each third of the run (`thirds`) what
    `_of_span` returns. `by_plain` is the gain in phase II of `plain`, or None.
  """
  number = len(divided['reward'])
  known = _known(divided)
  found = gradients.phases(*(divided[x][known] for x in _OF_PHASES))
  spans = gradients.spans(found, known, 0, number)
  end = spans['III'].start if 'III' in spans else number
  second = _second_by_rewards(plain, known, end) if plain else None
  cuts = [round(number * k / 3) for k in range(4)]
  thirds = dict(zip(gradients.NAMES, map(range, cuts, cuts[1:])))

  def each(ranges):
    return {
      name: _of_span(divided, plain, one) for name, one in ranges.items() if one
    }

  return {
    **{
      which: spans[name].start + 1 if name in spans else None
      for which, name in (('second', 'II'), ('third', 'III'))
    },
    'reason': found.reason,
    'phases': each(spans),
    'by_plain': second and _of_span(divided, plain, second)['gain'],
    'thirds': each(thirds),
    'whole': _of_span(divided, plain, range(number)),
  }


def _known(divided: Values) -> np.ndarray:
  """The rollouts, counted from 0, in which gradients were compared."""
  nothing = np.full(len(divided['reward']), math.nan)
  needed = [divided.get(name, nothing) for name in _OF_PHASES]
  return np.flatnonzero(np.all(np.isfinite(needed), axis=0))


def _second_by_rewards(
  plain: Values, known: np.ndarray, end: int
) -> range | None:
  """Phase II of a run whose gradients were not compared, if there is one.

  Args:
    plain: See `_of_seed`.
    known: i64[K], the rollouts by which phases are told.
    end: The first rollout of phase III of the other run, or that run's end.
  """
  no_third = np.zeros(len(known))
  found = gradients.phases(plain['reward_std'][known], no_third, no_third)
  return gradients.spans(found, known, 0, end).get('II') or None


def _of_span(
  divided: Values, plain: Values | None, span: range
) -> dict[str, Any]:
  """What was measured in some rollouts; see `_of_seed`.

  Returns:
    `rollouts`, [first, last], counted from 1; means of the run of `divided` by
    name; `agree`, the share of pairs with a product above 0 where sketching
    allows to tell; `c`, 8/3 times `reward_std`, if rewards are 0 and 1; and
    `gain`, the mean reward of `divided` minus that of `plain`. What was not
    measured is not there.
  """
  part = slice(span.start, span.stop)
  nothing = np.full(len(divided['reward']), math.nan)
  negative, spread, noise = (
    divided.get(f'geometry_cosine_{x}', nothing)
    for x in ('negative', 'std', 'noise')
  )
  series = {name: divided[name] for name in _SHOWN if name in divided}
  series['agree'] = np.where(spread > noise, 1 - negative, math.nan)
  if not np.any(divided['graded'] > 0):
    series['c'] = gradients.FACTOR * divided['reward_std']
  if plain is not None:
    series['gain'] = divided['reward'] - plain['reward']
  found: dict[str, Any] = {'rollouts': [span.start + 1, span.stop]}
  for name, values in series.items():
    some = values[part][np.isfinite(values[part])]
    if len(some):
      mean, half, _ = gradients.mean_over_rollouts(some)
      found[name] = [mean, half]
  return found


def measure(found: Mapping[str, Any]) -> dict[str, Measured]:
  """See `Experiment`."""
  seeds = found['seeds']

  def told(which: str) -> Measured:
    """The share of the seeds in which a phase was found."""
    if not seeds:
      return claims.UNKNOWN
    lacking = [k for k, one in seeds.items() if one[which] is None]
    example = ''
    if lacking:
      reason = seeds[lacking[0]]['reason']
      example = f'Smallest case: seed {lacking[0]}. {reason}'
    # Chance decides it too, so one seed does not.
    return claims.over_seeds([float(k not in lacking) for k in seeds], example)

  def described(name: str, phase: str, instead: bool = False) -> Measured:
    some = _spans(seeds, phase, instead, name)
    return _described([x[name] for x in some], len(seeds))

  def rise(name: str, first: str, last: str) -> Measured:
    pairs = [
      (one['phases'][first][name], one['phases'][last][name])
      for one in seeds.values()
      if name in one['phases'].get(first, ())
      and name in one['phases'].get(last, ())
    ]
    return _described(
      [(b[0] - a[0], math.hypot(*map(_half, (a, b)))) for a, b in pairs],
      len(seeds),
    )

  def bound(phase: str) -> Measured:
    one = described('c', phase)
    if seeds and all('c' not in x['whole'] for x in seeds.values()):
      return one._replace(example='Rewards are not 0 and 1 alone.')
    return one

  def whole(name: str) -> list[Any]:
    of_runs = (one['whole'] for one in seeds.values())
    return [one[name] for one in of_runs if name in one]

  either = [
    (one['phases']['II']['gain'][0] + one['by_plain'][0]) / 2
    for one in seeds.values()
    if one['by_plain'] and 'II' in one['phases']
  ]
  sides = [*_thresholds(seeds)]
  return {
    'orthogonal': described('geometry_cosine_small', 'I', True),
    'mean_cosine': described('geometry_cosine_mean', 'I', True),
    'second': told('second'),
    'third': told('third'),
    'spread': rise('geometry_cosine_std', 'I', 'III'),
    'orthogonal_falls': rise('geometry_cosine_small', 'III', 'I'),
    'a4': _described(whole('agree'), len(seeds)),
    'c_first': bound('I'),
    'c_second': bound('II'),
    'no_gain': _gained(seeds, 'I'),
    'gain_second': _gained(seeds, 'II'),
    'gain_either': claims.over_seeds(either),
    'gain_third': _gained(seeds, 'III'),
    'gain': _compared(whole('gain')),
    'threshold': claims.over_seeds(sides),
  }


def _spans(
  seeds: Mapping[str, Any], phase: str, instead: bool, name: str
) -> list[Mapping[str, Any]]:
  """Of each seed the phase, if a measure is known there.

  Args:
    seeds: See `numbers`.
    phase: Its name.
    instead: Whether a run without phases has its third in that place.
    name: Of the measure.
  """
  found = []
  for one in seeds.values():
    parts = one['thirds'] if instead and not one['phases'] else one['phases']
    if name in parts.get(phase, ()):
      found.append(parts[phase])
  return found


def _half(pair: Sequence[float | None]) -> float:
  """Half the interval of a mean; None, of JSON, stands for NaN."""
  return math.nan if pair[1] is None else pair[1]


def _described(pairs: Sequence[Sequence[Any]], seeds: int) -> Measured:
  """The mean over seeds, or of a study's only seed over its rollouts.

  Args:
    pairs: Means, each with half its interval, of the seeds that have one.
    seeds: How many seeds there are. If most of several have none, the one that
      has is chosen by chance, and gets no interval.
  """
  if len(pairs) == seeds == 1:
    return Measured(pairs[0][0], _half(pairs[0]))
  found = _over_seeds(pairs)
  if pairs and len(pairs) < seeds:
    found = found._replace(example=f'{len(pairs)} of {seeds} seeds have it.')
  return found


def _over_seeds(pairs: Sequence[Sequence[Any]]) -> Measured:
  """The mean over seeds of means over rollouts."""
  return claims.over_seeds([pair[0] for pair in pairs])


def _compared(pairs: Sequence[Sequence[Any]]) -> Measured:
  """The mean over seeds of what one arm earns more than the other.

  One seed has no interval. Chance early in a training moves all that follows,
  so rollouts of one pair of runs do not tell how another pair would differ.
  """
  found = _over_seeds(pairs)
  if len(pairs) == 1:
    inside = claims.value(Measured(pairs[0][0], _half(pairs[0])))
    found = found._replace(
      example=f'Over the rollouts of these two runs alone: {inside}.'
    )
  return found


def _gained(seeds: Mapping[str, Any], phase: str) -> Measured:
  """The gain in a phase, over the seeds that have it.

  Where no seed has it, nothing is said of it; thirds of the runs are told in
  its place.
  """
  inside = [x['gain'] for x in _spans(seeds, phase, False, 'gain')]
  lacking = [k for k, one in seeds.items() if phase not in one['phases']]
  if inside:
    found = _compared(inside)
    if lacking:
      text = f'{found.example} Seeds without it: {", ".join(lacking)}.'.strip()
      found = found._replace(example=text)
    return found
  thirds = [x['gain'] for x in _spans(seeds, phase, True, 'gain')]
  if not thirds:
    return claims.UNKNOWN
  place = ('first', 'second', 'last')[gradients.NAMES.index(phase)]
  example = (
    f'In the {place} third of runs without phases: '
    f'{claims.value(_over_seeds(thirds))}.'
  )
  return claims.UNKNOWN._replace(example=example)


def _thresholds(seeds: Mapping[str, Any]) -> Iterator[float]:
  """Of each seed the gain in phases with C(T) < 1, minus that in the others.

  A mean over the rollouts of these phases; nothing of a seed whose phases lie
  all on one side.
  """
  for one in seeds.values():
    sides: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for part in one['phases'].values():
      if 'c' in part and 'gain' in part:
        first, last = part['rollouts']
        sides[part['c'][0] < 1].append((part['gain'][0], last - first + 1))
    if sides[True] and sides[False]:
      below, above = (_weighted(sides[which]) for which in (True, False))
      yield below - above


def _weighted(pairs: Sequence[tuple[float, int]]) -> float:
  """The mean of values, each with its weight."""
  values, weights = zip(*pairs)
  return float(np.average(values, weights=weights))


_PANELS = {
  'mean reward': {'reward': ''},
  'deviation of rewards in a group': {'reward_std': ''},
  'cosines of two gradients': {
    'geometry_cosine_std': 'deviation',
    'geometry_cosine_mean': 'mean',
  },
  'pairs of gradients': {
    'geometry_cosine_small': 'nearly orthogonal',
    'geometry_cosine_negative': 'disagree',
  },
}
"""What is drawn, by the title; both arms where a curve has no name."""


def draw(found, measured, figure, colors) -> str:
  """See `Experiment`: the measures of a run, with its phases marked."""
  pair = colors['first'], colors['second']
  for axes, (title, curves) in zip(
    figure.subplots(2, 2, sharex=True).flat, _PANELS.items(), strict=True
  ):
    if len(curves) == 1:
      (name,) = curves
      shown = [(arm, name, arm) for arm in METHODS]
    else:
      shown = [(DIVIDED, name, label) for name, label in curves.items()]
    for (arm, name, label), color in zip(shown, pair, strict=True):
      _draw_curve(axes, found['curves'].get(arm, {}), name, label, color)
    if title.startswith('deviation'):
      axes.axhline(1 / gradients.FACTOR, color=colors['faint'], lw=1, ls='--')
    for one in found['seeds'].values():
      for name, begin in (('II', one['second']), ('III', one['third'])):
        if begin is not None:
          axes.axvline(begin, color=colors['text'], lw=1, ls=':')
          place = axes.get_xaxis_transform()
          axes.text(
            begin, 0.98, f' {name}', transform=place, va='top', fontsize=8
          )
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
      axes.legend(fontsize=8)
  for axes in figure.axes[2:]:
    axes.set_xlabel('rollout')
  return _title(found, measured)


_GAINS = 'no_gain', 'gain_second', 'gain_third'
"""The claims on the phases, in their order."""


def _draw_curve(
  axes: Any, runs: Mapping[str, Any], name: str, label: str, color: str
) -> None:
  """A thin line for each seed, and their mean."""
  rows = [np.array(one[name], float) for one in runs.values() if name in one]
  if not rows:
    return
  # Rollouts between measured ones have no point.
  at = np.flatnonzero(np.isfinite(rows).any(axis=0))
  if len(rows) > 1:
    for row in rows:
      axes.plot(at + 1, row[at], color=color, lw=0.7, alpha=0.35)
  mean = np.nanmean(np.array(rows)[:, at], axis=0)
  axes.plot(at + 1, mean, color=color, label=label, lw=1.4)


def _title(found: Mapping[str, Any], measured: Mapping[str, Measured]) -> str:
  by_phase = [
    f'{claims.value(measured[name])} in phase {phase}'
    for name, phase in zip(_GAINS, gradients.NAMES)
    if not math.isnan(measured[name].mean)
  ]
  if not any(one['phases'] for one in found['seeds'].values()):
    by_phase = ['the phases of Ge et al. are not found']
  gain = claims.value(measured['gain'])
  whole = f'Gain of dividing by the deviation: {gain} over the whole training'
  return '; '.join([whole, *by_phase])


EXPERIMENT = Experiment(
  'E17',
  'dividing by the deviation in the phases of a training',
  CLAIMS,
  measure,
  draw,
)


def study(name: str) -> sweeps.Study:
  """The study, by its one name."""
  sweep = sweeps.Sweep(
    name,
    ARMS,
    Arm,
    Outcome,
    train,
    lambda one: f'reward {one.numbers["reward"][-1]:.3f}',
  )
  return sweeps.Study(sweep, EXPERIMENT, numbers)
