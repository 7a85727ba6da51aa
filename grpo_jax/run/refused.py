"""Rollouts without a finite update: how many in a row, and what to say."""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass
class Refused:
  """How many rollouts in a row have had no update that was finite.

  A checkpoint holds it, so that a run that is stopped and goes on counts on.

  Attributes:
    rollouts: The number.
    part: What was not finite first in most updates of the last of them:
      `'loss'`, `'gradient'` or `'update'`.
    ended: How many of these rollouts there were when the run last ended for
      them; 0 if it has not.
  """

  rollouts: int = 0
  part: str = ''
  ended: int = 0

  def count(self, measured: Mapping[str, float | None]) -> None:
    """Counts a rollout by its metrics; call it once for each."""
    parts = 'loss', 'gradient', 'update'
    shares = {part: measured.get(f'nonfinite_{part}') or 0.0 for part in parts}
    # Rounding: thirds may add up to a little less than 1.
    all_refused = sum(shares.values()) > 0.999
    self.rollouts = self.rollouts + 1 if all_refused else 0
    self.part = max(shares, key=shares.__getitem__) if all_refused else ''
    self.ended = self.ended if all_refused else 0

  def midway(self, most: int) -> str:
    """Why a run ends before its last rollout; `''` if it goes on.

    Ask before the checkpoint of this rollout is saved, and only if it can still
    be saved: the checkpoint holds that the run has ended here. Otherwise the
    next start would end here again.

    Args:
      most: The config's `learner.nonfinite_rollouts`. A run that is started
        again after this error gets as many rollouts more.
    """
    if not most or self.rollouts - self.ended < most:
      return ''
    self.ended = self.rollouts
    return (
      f'No {self._what()} The run is saved; learner.nonfinite_rollouts says '
      'after how many such rollouts it stops.'
    )

  def at_the_end(self, most: int) -> str:
    """Why a run that has done all its rollouts has failed; `''` if it has not.

    Args:
      most: See `midway`.
    """
    if not most or not self.rollouts:
      return ''
    return (
      f'The run is done, but no {self._what()} The run is saved; '
      'learner.nonfinite_rollouts=0 accepts such an end.'
    )

  def _what(self) -> str:
    """What both sentences say, without the first word."""
    number = f'{self.rollouts} rollouts' if self.rollouts > 1 else 'rollout'
    return (
      f'update of the last {number} was finite (first of all the {self.part}), '
      'so nothing was learned; look at the reward, the method and optim.lr.'
    )
