"""What people get of a rollout: its file, some samples, a call of their own."""

import collections
from collections.abc import Mapping
import math

import numpy as np

from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Rollout
from grpo_jax.monitor import Sample
from grpo_jax.monitor import formatting
from grpo_jax.rollouts import parquet
from grpo_jax.run import progress as progress_lib
from grpo_jax.run.progress import Progress
from grpo_jax.run.progress import Session
from grpo_jax.run.progress import Unwritten


def keep_completions(
  session: Session,
  rollout: Rollout,
  step: int,
  effects: Mapping[str, np.ndarray] | None = None,
) -> list[Sample]:
  """Writes all completions to a file if that is due; returns some to show.

  If the disk is full, a warning is shown and the run goes on.

  Args:
    session: Says how many are kept.
    rollout: What was learned from.
    step: Rollouts done, this one included.
    effects: What updates have done to each token; see `parquet.to_bytes`.
  """
  keep = session.run.keep
  every = keep.completions_every_steps
  if every and step % every == 0:
    _write(session, rollout, step, 'completions', effects)
  first = {
    p: _in_short(rollout, p) for p in rollout.own_groups if p < keep.samples
  }
  texts = collections.ChainMap(*session.peers.exchange(first))
  return [
    Sample(
      prompt,
      text,
      # Not 0, which a judge might have given.
      float(rollout.batch.reward[p, 0])
      if rollout.batch.valid[p, 0]
      else math.nan,
    )
    for p, (prompt, text) in sorted(texts.items())
  ]


def _in_short(rollout: Rollout, p: int) -> tuple[str, str]:
  """What a sample shows of a prompt, and of its first completion."""
  if not rollout.accounts:
    return rollout.prompt_texts[p], rollout.texts[p][0]
  return episode_in_short(rollout.accounts[p][0], rollout.prompt_texts[p])


def episode_in_short(account: Account, prompt: str) -> tuple[str, str]:
  """What an episode reads last before its first turn, and all that follows.

  >>> said = [('environment', 'Guess.'), ('policy', '3'), ('policy', '5')]
  >>> messages = tuple({'by': by, 'content': text} for by, text in said)
  >>> episode_in_short(Account(messages, ended='turns'), 'a record')
  ('Guess.', '3 | 5 [turns]')

  Args:
    account: Of the episode.
    prompt: Of its record, if it has not begun.
  """
  said = [formatting.message_text(one) for one in account.messages]
  by = [one['by'] for one in account.messages]
  first = by.index('policy') if 'policy' in by else len(by)
  if first:
    prompt = said[first - 1]
  end = account.ended
  if end == 'failed':
    end = f'failed: {account.failure}'
  marked = '' if end == 'done' else f' [{end}]'
  return prompt, (' | '.join(said[first:]) + marked).strip()


def keep_answers(session: Session, rollout: Rollout, step: int) -> None:
  """Writes the answers to held-out problems to a file, if any are written."""
  if session.run.keep.completions_every_steps:
    _write(session, rollout, step, 'evaluations')


def _write(session, rollout, step, folder, effects=None) -> None:
  gathered = session.whole(rollout)
  path = parquet.path_of(session.workdir / folder, step)
  try:
    if session.peers.is_first:
      parquet.write(path, gathered, step, effects)
  except OSError as error:
    session.monitor.warn(f'{path} could not be written ({error}).')


def call_on_rollout(
  session: Session, progress: Progress, report: Unwritten
) -> bool:
  """Calls the user's `on_rollout`, and returns whether it asks to end the run.

  Of several processes the first calls it.

  Args:
    session: Has the function.
    progress: Saved if the function raises. At step 0 there is no rollout yet,
      and the function is not called.
    report: The metrics and the rollout that the function gets.
  """
  if session.on_rollout is None or not progress.step:
    return False
  numbers = {
    name: value for name, value in report.measured.items() if value is not None
  }
  answer, rollout = None, report.rollout
  rollout = session.whole(rollout) if rollout else None
  with (
    progress_lib.saved_if_it_fails(session, progress),
    session.peers.together(),
    session.peers.patient(),
  ):
    if session.peers.is_first:
      answer = session.on_rollout(progress.step, numbers, rollout)
  # Only a bool counts: a lambda that merely stores something often returns a
  # value that is true.
  ends = isinstance(answer, bool | np.bool_) and bool(answer)
  return session.peers.from_first(ends)


def show_warnings(session: Session) -> None:
  """Shows what other processes have warned of since the last time."""
  for warning in session.peers.warnings():
    session.monitor.warn(warning)
