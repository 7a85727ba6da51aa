"""The comparison of the arms as tables on the terminal."""

from typing import Any

from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import tables as tables_lib
from grpo_jax.lab.studies.brakes.arms import BASE_UPDATES
from grpo_jax.lab.studies.brakes.study import Compared
from grpo_jax.lab.studies.brakes.summary import Row
from grpo_jax.lab.studies.brakes.summary import Summary
from grpo_jax.lab.studies.brakes.summary import to_json as summary_to_json
from grpo_jax.lab.studies.tables import mean_and_half
from grpo_jax.lab.studies.tables import number

_NOTES = f"""\
a±b: mean over the seeds, and half the width of its 95 % t-interval.
(xk): the mean of the base is k times this mean. The base of an arm has no
brake and the same learning rate and updates per rollout; that of an arm without
a brake has {BASE_UPDATES} updates.
overshoot, positive, carried, fresh: nats per update, over the tokens that the
arm's own trust region clips. The brake 'narrow' clips tokens that the base
still trains.
KL: of the policy before the updates of a rollout and the one after, nats per
token.
clipped: share of tokens that are clipped after an update; outside: share that
are outside the trust region after the last update of a rollout.
The best learning rate is chosen by the reward that is shown, and so is the
control of 'no more KL'. Both rewards are therefore somewhat too high."""


def show(compared: Compared) -> None:
  """Prints what `study.run` returned, for a person."""
  tables_lib.show(tables(compared.summary), _NOTES)
  pages.show(compared.results, compared.folder)


def to_json(compared: Compared) -> dict[str, Any]:
  """What `study.run` returned, as JSON can hold it: arms, then claims."""
  claims = pages.to_json(compared.results)
  for one in claims.values():
    del one['numbers']  # the same as `arms`, run by run
  return {**summary_to_json(compared.summary), 'claims': claims}


def tables(summary: Summary) -> dict[str, list[dict[str, str]]]:
  """The text of every cell, by the title of its table and by its column."""
  return {
    'what is learned': [_learned(row) for row in summary.rows],
    'what clipped tokens do': [_moved(row) for row in summary.rows],
    'the best learning rate of each brake': [
      {
        'arm': row.arm.label,
        'reward': mean_and_half(row.means['reward']),
        'KL': mean_and_half(row.means['kl_rollout']),
        'overshoot': mean_and_half(row.means['overshoot']),
      }
      for row in summary.best
    ],
    'each brake beside an arm without one': [
      {
        'arm': match.arm.label,
        'control': match.control.label,
        'chosen by': match.by,
        'KL of both': ' and '.join(map(number, match.kl)),
        'reward, arm - control': mean_and_half(match.gap, '+'),
      }
      for match in summary.matches
    ],
  }


def _learned(row: Row) -> dict[str, str]:
  means = row.means
  return {
    'arm': row.arm.label,
    'seeds': str(row.seeds),
    'reward': mean_and_half(means['reward']),
    'reward - base': mean_and_half(row.gap, '+') if row.gap else '',
    'last third': mean_and_half(means['reward_last']),
    'held-out': mean_and_half(means['accuracy']),
    's/update': number(means['secs_per_update'].mean),
  }


def _moved(row: Row) -> dict[str, str]:
  means = row.means

  def reduced(name):
    factor = row.factors.get(name)
    return mean_and_half(means[name]) + (f' (x{factor:.1f})' if factor else '')

  return {
    'arm': row.arm.label,
    'overshoot': reduced('overshoot'),
    'positive': reduced('overshoot_positive'),
    'carried': number(means['overshoot_carried'].mean),
    'fresh': number(means['overshoot_fresh'].mean),
    'KL': reduced('kl_rollout'),
    'clipped': number(means['ends_clipped'].mean),
    'outside': number(means['rollout_outside'].mean),
  }
