"""A summary as tables on the terminal."""

import math
import shutil

from grpo_jax.studies._summary import BASE_UPDATES
from grpo_jax.studies._summary import Interval
from grpo_jax.studies._summary import Row
from grpo_jax.studies._summary import Summary

_NOTES = f"""\
a±b: mean over the seeds and half of its 95 % t-interval.
(xk): the base (no brake, {BASE_UPDATES} updates, the same learning rate) has k
times as much.
Overshoot, carried, fresh: nats per update, over the tokens that the arm's own
trust region clips; narrow clips tokens that the base still trains.
KL: of the policy before a rollout's updates and the one after, nats per token.
Clipped: share of tokens after an update; outside: after a rollout's last.
The best learning rate is chosen by the reward that is shown, and so is the
control of 'no more KL': both flatter what they chose."""


def show(summary: Summary) -> None:
  """Prints a summary for a person.

  Args:
    summary: From `summarise`.
  """
  from rich import console

  width = shutil.get_terminal_size((160, 24)).columns
  out = console.Console(width=width, highlight=False)
  for title, lines in tables(summary).items():
    if lines:
      out.print(_made(title, lines))
  out.print(_NOTES, markup=False)


def tables(summary: Summary) -> dict[str, list[dict[str, str]]]:
  """The cells of every table, by title and then by column."""
  return {
    'what is learned': [_learned(row) for row in summary.rows],
    'what clipped tokens do': [_moved(row) for row in summary.rows],
    'the best learning rate of each': [
      {
        'arm': row.arm.label,
        'reward': _pair(row.means['reward']),
        'KL': _pair(row.means['kl_rollout']),
        'overshoot': _pair(row.means['overshoot']),
      }
      for row in summary.best
    ],
    'what a brake is worth: beside arms without one': [
      {
        'arm': match.arm.label,
        'control': match.control.label,
        'chosen by': match.by,
        'KL of both': ' and '.join(map(_number, match.kl)),
        'reward, arm - control': _pair(match.gap, '+'),
      }
      for match in summary.matches
    ],
  }


def _learned(row: Row) -> dict[str, str]:
  means = row.means
  return {
    'arm': row.arm.label,
    'seeds': str(row.seeds),
    'reward': _pair(means['reward']),
    'reward - base': _pair(row.gap, '+') if row.gap else '',
    'last third': _pair(means['reward_last']),
    'held-out': _pair(means['accuracy']),
    's/update': _number(means['secs_per_update'].mean),
  }


def _moved(row: Row) -> dict[str, str]:
  means = row.means

  def reduced(name):
    factor = row.factors.get(name)
    return _pair(means[name]) + (f' (x{factor:.1f})' if factor else '')

  return {
    'arm': row.arm.label,
    'overshoot': reduced('overshoot'),
    'positive': reduced('overshoot_positive'),
    'carried': _number(means['overshoot_carried'].mean),
    'fresh': _number(means['overshoot_fresh'].mean),
    'KL': reduced('kl_rollout'),
    'clipped': _number(means['ends_clipped'].mean),
    'outside': _number(means['rollout_outside'].mean),
  }


def _pair(interval: Interval, sign: str = '') -> str:
  half = '' if math.isnan(interval.half) else f'±{interval.half:.3f}'
  return _number(interval.mean, sign) + half


def _number(value: float, sign: str = '') -> str:
  return '-' if math.isnan(value) else f'{value:{sign}.3f}'


def _made(title: str, lines: list[dict[str, str]]):
  """A table of rich."""
  from rich import box
  from rich import table

  made = table.Table(
    title=title, title_justify='left', box=box.SIMPLE, pad_edge=False
  )
  for name in lines[0]:
    made.add_column(name, no_wrap=name == 'arm')
  for line in lines:
    made.add_row(*line.values())
  return made
