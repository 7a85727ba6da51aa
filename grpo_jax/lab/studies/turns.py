"""Does a weight by length bias the first turn of an agent? Trains runs.

Every episode of a group takes its first turn in the same context. The
advantages of these turns add up to 0, and so do their pulls if all tokens have
one weight. If each episode's tokens share one weight (1 / length, as the mean
of GRPO over each completion), they do not: short episodes pull harder at the
same first turn (proposition 1 of Fontana et al., arXiv:2601.05002).

The arm `fixed` measures that on rollouts of one policy, which is not trained.
The arms `tokens` and `lengths` train with the two weights, all else equal.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.config import Config
from grpo_jax.lab.report import curves
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.run import bare
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import rewards as build_rewards

WEIGHTS = {
  'tokens': losses.mean_over_tokens,
  'lengths': losses.mean_over_sequences,
}
"""By arm that trains, the weight: the same for all tokens, or 1 / length."""

CREDITS = {
  'turn': lambda: losses.center_to_go_by_group(0.5),
  'episode': losses.center_by_group,
}
"""What the arm `fixed` credits: each turn, or the episode as a whole."""


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train, or `fixed`."""

  label: str


ARMS = Arm('fixed'), Arm('tokens'), Arm('lengths')


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured.

  Attributes:
    arm: How it was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    numbers: By name, a value of each rollout. Of training: `solved`, the mean
      of the first reward; `turns` of an episode; `first`, the mean reward of
      first turns; `pull` and `uncancelled`, the metrics
      `prefix_turn0_weight_expected` and `prefix_turn0_uncancelled_expected`.
      Of `fixed`, for each credit and weight: see `first_turn_pulls`.
  """

  arm: Arm
  seed: int
  steps: int
  numbers: dict[str, list[Any]]


def method(weight: str = 'tokens', gamma: float = 0.5, entropy: float = 0.01):
  """That of `configs/guess_number.py`, with a choice of the weight."""
  return losses.chain(
    losses.center_to_go_by_group(gamma),
    WEIGHTS[weight](),
    losses.ppo_clip(0.2, 0.4),
    losses.add_entropy_bonus(entropy),
  )


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, an arm's loss, and a seed."""
  weight = arm.label if arm.label in WEIGHTS else 'tokens'
  return dataclasses.replace(
    config,
    seed=seed,
    learner=dataclasses.replace(
      config.learner,
      method=f'{__name__}:method',
      method_kwargs={'weight': weight},
    ),
    log=dataclasses.replace(config.log, expected_prefixes=True),
  )


def first_turn_pulls(batch: losses.Batch) -> dict[str, list[float]]:
  """What both weights do to the first turns of a rollout, at ratio 1.

  Args:
    batch: A rollout of episodes, with the fields of their turns.

  Returns:
    `{credit}_{weight}_shift`: of the pulls of first turns, c = weight x
    advantage, the sum over the mean of a group's sum of |c|: one value for each
    group. `{credit}_{weight}_by_id`: of each id, the sum of c over all first
    turns that begin with it, in units of the sum of |c|; and `count`, how many
    they are.
  """
  first = np.argmax(batch.mask, axis=-1)[..., None]
  at_first = lambda x: np.take_along_axis(np.asarray(x), first, -1)[..., 0]
  assert batch.tokens is not None  # a rollout has them
  ids = at_first(batch.tokens)
  found = {'count': np.bincount(ids.ravel()).tolist()}
  for credit, made in CREDITS.items():
    for weight in WEIGHTS:
      loss = losses.chain(made(), WEIGHTS[weight]())
      credited, state = losses.credit(loss, batch, loss.init())
      credited = losses.prepare(loss, credited, state)
      assert credited.weight is not None and credited.advantage is not None
      pull = at_first(credited.weight).astype(np.float64)
      pull *= at_first(credited.advantage)
      size = np.abs(pull).sum()
      name = f'{credit}_{weight}'
      shift = pull.sum(1) / (size / len(pull))
      by_id = np.bincount(ids.ravel(), pull.ravel()) / size
      found |= {
        f'{name}_shift': shift.tolist(),
        f'{name}_by_id': by_id.tolist(),
      }
  return found


def train(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Does one run from given parameters; see `sweeps.Sweep.train`."""
  run = build.run(config_of(config, arm, seed))
  updater = build.updater(run, build.frozen_params(run))
  rows = []
  with contextlib.ExitStack() as stack:
    run = dataclasses.replace(
      run,
      workers=stack.enter_context(
        build_rewards.workers(run.limits, run.rewards)
      ),
      player=stack.enter_context(build_environment.player(run.environment)),
    )
    # Copied: `init` donates its argument, and other arms need it again.
    params = jax.tree.map(jnp.copy, params)
    if arm.label == 'fixed':
      source = sampling.drawn_at_once(run, updater)
      for step in range(run.steps):
        source.publish(params, step)
        rows.append(first_turn_pulls(source.next(step).rollout.batch))
    else:
      for one in bare.trained(run, updater, updater.compiled.init(params)):
        rows.append(_of_training(one))
  numbers = {name: [row[name] for row in rows] for name in rows[0]}
  return Outcome(arm, seed, len(rows), numbers)


def _of_training(one: bare.Trained) -> dict[str, float]:
  played = [x for group in one.rollout.accounts for x in group if x.turns]
  measured = one.measured
  return {
    'solved': float(np.mean(one.rollout.batch.reward_parts[..., 0])),
    'turns': float(np.mean([x.turns for x in played])),
    'first': float(np.mean([(x.turn_rewards or (0.0,))[0] for x in played])),
    'pull': measured.get('prefix_turn0_weight_expected', math.nan),
    'uncancelled': measured.get('prefix_turn0_uncancelled_expected', math.nan),
  }


class Row(NamedTuple):
  """One line of the tables: a name, and intervals over seeds by column."""

  name: str
  values: dict[str, curves.Interval]


def of_fixed(outcomes: Iterable[Outcome]) -> list[Row]:
  """What the two weights do to first turns of policies that are not trained.

  Args:
    outcomes: Any; those of `fixed` count.

  Returns:
    A row for each credit, with

    - `tokens` and `lengths`: the mean sum of a group's pulls, over the mean sum
      of their sizes; 0 if they cancel;
    - `cosine`: of the two mean gradients in the logits of the first token, on
      the same rollouts, so that chance turns both alike;
    - `halves`: with the weight `tokens`, between the two halves of the
      rollouts: what chance alone leaves of 1; NaN for one rollout;
    - `halves_lengths`: the same with the weight `lengths`;
    - `across`: one weight in one half, the other in the other half, mean of
      both ways. It has the chance of both halves, and what the weights do.
  """
  runs = [one.numbers for one in outcomes if one.arm.label == 'fixed']
  if not runs:
    return []
  return [
    Row(credit, _over_seeds([_biases(one, credit) for one in runs]))
    for credit in CREDITS
  ]


def _over_seeds(rows: Sequence[dict[str, float]]) -> dict[str, curves.Interval]:
  return {
    name: curves.mean_interval([row[name] for row in rows]) for name in rows[0]
  }


def _biases(run: dict[str, list[Any]], credit: str) -> dict[str, float]:
  """The columns of `of_fixed`, of one seed."""

  def gradient(weight: str, part: slice = slice(None)) -> np.ndarray:
    return _gradient(run, f'{credit}_{weight}_by_id', part)

  found = {
    weight: float(_known_mean(run[f'{credit}_{weight}_shift']))
    for weight in WEIGHTS
  }
  found['cosine'] = _cosine(gradient('tokens'), gradient('lengths'))
  half = len(run['count']) // 2
  if not half:
    return found | dict.fromkeys(_OF_HALVES, math.nan)
  one, other = (
    {weight: gradient(weight, part) for weight in WEIGHTS}
    for part in (slice(half), slice(half, None))
  )
  across = [
    _cosine(one['tokens'], other['lengths']),
    _cosine(one['lengths'], other['tokens']),
  ]
  of_halves = (
    _cosine(one['tokens'], other['tokens']),
    _cosine(one['lengths'], other['lengths']),
    float(np.mean(across)),
  )
  return found | dict(zip(_OF_HALVES, of_halves, strict=True))


def _known_mean(values: Any, axis: int | None = None) -> np.ndarray:
  """The mean without NaN, for which a file has None; NaN of nothing."""
  values = np.array(values, float)
  known = ~np.isnan(values)
  with np.errstate(invalid='ignore'):
    return np.where(known, values, 0.0).sum(axis) / known.sum(axis)


def _gradient(run: dict[str, list[Any]], name: str, part: slice) -> np.ndarray:
  """The mean gradient in the logits of the first token, [ids].

  That is the sum of c (1[id] - probability of the id) over first turns.
  """
  width = max(map(len, run['count']))
  # A rollout without pulls has NaN, or None of a file, and adds nothing.
  known = lambda x: np.nan_to_num(np.asarray(x, float))
  total = lambda rows: np.sum(
    [np.pad(known(x), (0, width - len(x))) for x in rows], axis=0
  )
  pull, chance = total(run[name][part]), total(run['count'])
  return pull - pull.sum() * chance / chance.sum()


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
  return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def of_training(outcomes: Sequence[Outcome], parts: int = 4) -> list[Row]:
  """What was measured in equal parts of the trainings, by arm.

  Args:
    outcomes: Any; those of arms that train count.
    parts: How many, of which none is shorter than a rollout.

  Returns:
    Rows named `{arm} {first rollout}-{last}`, and for the arms' difference
    `lengths - tokens`, over the seeds that both have.
  """
  by_arm = {
    name: {x.seed: x.numbers for x in outcomes if x.arm.label == name}
    for name in WEIGHTS
  }
  rows, steps = [], outcomes[0].steps
  for cut in np.array_split(np.arange(steps), min(parts, steps)):
    # Of each arm and seed the means of this part.
    means = {
      arm: {seed: _means(run, cut) for seed, run in runs.items()}
      for arm, runs in by_arm.items()
    }
    tokens, lengths = means.values()
    means['lengths - tokens'] = {
      seed: {name: lengths[seed][name] - x for name, x in tokens[seed].items()}
      for seed in tokens.keys() & lengths.keys()
    }
    rows += [
      Row(f'{arm} {cut[0] + 1}-{cut[-1] + 1}', _over_seeds([*runs.values()]))
      for arm, runs in means.items()
      if runs
    ]
  return rows


def _means(run: dict[str, list[Any]], cut: np.ndarray) -> dict[str, float]:
  return {
    name: float(_known_mean(np.asarray(x)[cut])) for name, x in run.items()
  }


_OF_HALVES = 'halves', 'halves_lengths', 'across'
_CASES = {'turn': 'by turn', 'episode': 'of the episode'}
_LEAST = 1e-5  # of float32; the sizes add up to 1
_SAME = 0.01  # of a reward; the best first guess is worth .5

CLAIMS = {
  **{
    f'one_weight_{credit}': Claim(
      f'Credit {case}, one weight for all tokens: the pulls on the first turns '
      'of a group add up to 0 (sum / sum of sizes, a policy that is not '
      'trained).',
      f'{FONTANA}, prop. 1, case 1, in episodes',
      -_LEAST,
      _LEAST,
    )
    for credit, case in _CASES.items()
  },
  'length_turn': Claim(
    'Credit by turn, weight 1 / length: the pulls do not add up to 0; first '
    'turns are pulled up, whatever they are (sum / sum of sizes).',
    f'derived from {FONTANA}, prop. 1, case 2',
    low=claims.ABOVE_0,
  ),
  'length_episode': Claim(
    'Credit of the episode, weight 1 / length: the pulls do not add up to 0; '
    'first turns are pulled down (sum / sum of sizes).',
    f'derived from {FONTANA}, prop. 1, case 2',
    high=claims.BELOW_0,
  ),
  **{
    f'direction_{credit}': Claim(
      f'Credit {case}: 1 / length turns the gradient in the logits of the '
      'first guess further than chance does (cosine between the halves of the '
      'rollouts, geometric mean of both weights, less that of one weight in '
      'one half and the other in the other).',
      'derived',
      low=claims.ABOVE_0,
    )
    for credit, case in _CASES.items()
  },
  'trained_one_weight': Claim(
    'In trainings with one weight the pulls cancel too (part of them that does '
    'not).',
    f'{FONTANA}, prop. 1, case 1, in episodes',
    high=_LEAST,
  ),
  'trained_length': Claim(
    'In trainings with 1 / length a hundredth of the pulls or more does not '
    'cancel (part of them that does not).',
    f'derived from {FONTANA}, prop. 1, case 2',
    low=0.01,
  ),
  'first_guess': Claim(
    'The mean reward of the first guess over a whole training differs by less '
    f'than {_SAME} between the weights (1 / length minus one weight).',
    'asked by this project',
    -_SAME,
    _SAME,
  ),
  'solved': Claim(
    'A training with 1 / length solves fewer episodes (share of them, 1 / '
    'length minus one weight).',
    'asked by this project',
    high=claims.BELOW_0,
  ),
}


def numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
  """What the claims are about, by seed; and curves.

  Returns:
    `fixed`: {credit: {column: {seed: value}}}, with the columns of `of_fixed`.
    `training`: {measure: {arm: {seed: mean over the rollouts}}}. `curves`:
    {measure: {arm: values of each rollout, means over seeds}}.
  """
  fixed: dict[str, Any] = {credit: {} for credit in CREDITS}
  training: dict[str, Any] = {}
  by_rollout: dict[str, Any] = {}
  for one in outcomes:
    arm, seed = one.arm.label, str(one.seed)
    if arm == 'fixed':
      for credit, columns in fixed.items():
        for name, value in _biases(one.numbers, credit).items():
          columns.setdefault(name, {})[seed] = value
      continue
    for name, values in one.numbers.items():
      training.setdefault(name, {}).setdefault(arm, {})[seed] = float(
        _known_mean(values)
      )
      by_rollout.setdefault(name, {}).setdefault(arm, []).append(values)
  return {
    'fixed': fixed,
    'training': training,
    'curves': {
      name: {arm: _known_mean(rows, 0).tolist() for arm, rows in arms.items()}
      for name, arms in by_rollout.items()
    },
  }


def measure(found: Mapping[str, Any]) -> dict[str, Measured]:
  """See `Experiment`."""
  fixed, training = found['fixed'], found['training']

  def mean(by_seed: Mapping[str, float]) -> Measured:
    return claims.over_seeds([*by_seed.values()])

  def of_fixed(credit: str, column: str) -> Mapping[str, float]:
    return claims.known(fixed[credit].get(column, {}))

  def trained(name: str, arm: str) -> Mapping[str, float]:
    return claims.known(training.get(name, {}).get(arm, {}))

  def direction(credit: str) -> Measured:
    one, other, across = (of_fixed(credit, name) for name in _OF_HALVES)
    # Chance may turn the weights unequally far; `across` has some of both.
    chance = {
      seed: math.sqrt(one[seed] * other[seed])
      if one[seed] > 0 and other[seed] > 0
      else math.nan  # halves that share nothing have no direction
      for seed in one.keys() & other.keys()
    }
    return claims.difference(chance, across)

  return {
    **{
      f'one_weight_{credit}': mean(of_fixed(credit, 'tokens'))
      for credit in CREDITS
    },
    **{
      f'length_{credit}': mean(of_fixed(credit, 'lengths'))
      for credit in CREDITS
    },
    **{f'direction_{credit}': direction(credit) for credit in CREDITS},
    'trained_one_weight': mean(trained('uncancelled', 'tokens')),
    'trained_length': mean(trained('uncancelled', 'lengths')),
    **{
      claim: claims.difference(
        trained(name, 'lengths'), trained(name, 'tokens')
      )
      for claim, name in (('first_guess', 'first'), ('solved', 'solved'))
    },
  }


_SHOWN = {'tokens': 'one weight', 'lengths': '1 / length'}
_DRAWN = {
  'first': 'mean reward of the first guess',
  'solved': 'share of episodes solved',
}


def draw(found, measured, figure, colors) -> str:
  """See `Experiment`: the sums of pulls, and how both weights learn."""
  left, *others = figure.subplots(1, 1 + len(_DRAWN))
  hue = {
    arm: colors[name] for arm, name in zip(_SHOWN, figures.SERIES, strict=False)
  }
  for place, (arm, claim) in enumerate(
    (('tokens', 'one_weight'), ('lengths', 'length'))
  ):
    sums = [measured[f'{claim}_{credit}'] for credit in CREDITS]
    left.errorbar(
      # Both weights of one credit lie beside each other.
      [x + 0.2 * place for x in range(len(sums))],
      [one.mean for one in sums],
      yerr=[0.0 if math.isnan(one.half) else one.half for one in sums],
      fmt='o',
      color=hue[arm],
      label=_SHOWN[arm],
    )
  left.axhline(0, color=colors['faint'], linewidth=1)
  left.set_xticks([0.1 + x for x in range(len(CREDITS))], [*_CASES.values()])
  left.set(
    xlabel='credit', title='sum of pulls / sum of sizes', xlim=(-0.5, 1.7)
  )
  left.legend()
  for axes, (name, title) in zip(others, _DRAWN.items(), strict=True):
    for arm, values in found['curves'].get(name, {}).items():
      rollouts = np.arange(1, len(values) + 1)
      axes.plot(
        rollouts, np.array(values, float), color=hue[arm], label=_SHOWN[arm]
      )
    axes.set(xlabel='rollout', title=title)
  sums = [measured[f'length_{credit}'] for credit in CREDITS]
  if any(math.isnan(one.mean) for one in sums):
    return 'First turns of episodes with two weights'
  by_turn, of_episode = map(claims.value, sums)
  return (
    'The sum of pulls on the first turns of a group over that of their sizes, '
    f'with a weight of 1 / length: {by_turn} with credit by turn, {of_episode} '
    'with credit of the episode'
  )


EXPERIMENT = Experiment(
  'E18',
  'a weight by length and the first turns of episodes',
  CLAIMS,
  measure,
  draw,
)


class Summary(NamedTuple):
  """What all runs say: see `of_fixed` and `of_training`."""

  fixed: list[Row]
  training: list[Row]


def study(name: str) -> sweeps.Study:
  """The study, by its one name."""
  sweep = sweeps.Sweep(name, ARMS, Arm, Outcome, train, _progress, _check)
  return sweeps.Study(sweep, EXPERIMENT, numbers, summarise, show, to_json)


def _check(config: Config) -> None:
  if not config.environment.name:
    raise ValueError(
      'The study of turns needs episodes of several, and this config has no '
      'environment; give one, as --config=configs/guess_number.py has.'
    )


def summarise(outcomes: Sequence[Outcome]) -> Summary:
  """The tables of some runs; see `of_fixed` and `of_training`."""
  trained = [one for one in outcomes if one.arm.label in WEIGHTS]
  return Summary(of_fixed(outcomes), of_training(trained) if trained else [])


def _progress(outcome: Outcome) -> str:
  solved = outcome.numbers.get('solved')
  return f'solved {solved[-1]:.3f}' if solved else ''


def show(judged: pages.Judged) -> None:
  """Prints tables and verdicts, for a person."""
  for rows in judged.summary:
    for row in rows:
      cells = (
        f'{k} {x.mean:.4g} ± {x.half:.2g}' for k, x in row.values.items()
      )
      print(f'{row.name}: {", ".join(cells)}')
  pages.show_judged(judged)


def to_json(judged: pages.Judged) -> dict[str, Any]:
  """Tables, then verdicts, as JSON can hold them."""
  tables = {
    table: {
      row.name: {name: list(one) for name, one in row.values.items()}
      for row in rows
    }
    for table, rows in judged.summary._asdict().items()
  }
  # Most of the numbers are in the tables.
  verdicts = pages.verdicts_to_json(judged.results)
  return {**pages.without_nan(tables), 'claims': verdicts}
