"""What a method reads of policies: which, and who gives it.

The old policy drew the rollout, the reference is the one that a method stays
close to, and the teacher is a second model that it learns from. The sampler has
given the log-probabilities of the tokens that it drew; the learner scores what
else is needed, before the first update.
"""

from collections.abc import Callable
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import straight
from grpo_jax.learner.layouts import Layouts
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.mesh import random_keys
from grpo_jax.models import LOGP
from grpo_jax.models import Scores
from grpo_jax.models import Wanted


class Score(Protocol):
  """Scores the completions of a rollout."""

  def __call__(self, params: Any, wanted: Wanted = LOGP) -> Scores:
    """`Scores` f32[P,G,T] under some parameters."""
    ...


def scores_old(learner: Learner, spec: UpdateSpec) -> bool:
  """Whether the learner scores `logp_old`.

  Otherwise it is the sampler's, or there is none and the ratio is 1.
  """
  several = spec.batches * spec.epochs > 1 or spec.stale
  needed = several or 'logp_old' in learner.method.requires
  return spec.anchor == 'learner' and needed


def score(
  layouts: Layouts, frozen: Any, params: Any, wanted: Wanted = LOGP
) -> Scores:
  """`Scores` f32[P,G,T] of the completions of a rollout.

  Args:
    layouts: How its completions lie in rows.
    frozen: The parameters that no update changes, or None.
    params: Of the policy, or of the reference.
    wanted: What else is asked for.
  """
  call = layouts.compiled.score
  return _joined(layouts, lambda *stack: call(frozen, params, *stack, wanted))


def score_teacher(layouts: Layouts, params: Any) -> Scores:
  """`Scores` f32[P,G,T] of the completions of a rollout, by the teacher.

  Args:
    layouts: How its completions lie in rows.
    params: All of the teacher's parameters.
  """
  call = layouts.compiled.score_teacher
  return _joined(layouts, lambda *stack: call(params, *stack))


def _joined(layouts: Layouts, scored: Callable[..., Scores]) -> Scores:
  """The scores of all optimizer batches, [P,G,T].

  Args:
    layouts: Of the rollout.
    scored: `(rows, used, shape) -> Scores` of one.
  """
  parts = []
  for chosen in layouts.first_epoch():
    rows, used = layouts.stack(chosen)
    shape = (len(chosen), *layouts.rollout.batch.mask.shape[1:])
    parts.append(scored(rows, used, shape))
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def with_policies(
  learner: Learner,
  spec: UpdateSpec,
  state: TrainState,
  rollout: Rollout,
  step: int,
  score: Score,
  score_teacher: Callable[[], Scores],
) -> tuple[losses.Batch, int]:
  """The batch with the log-probabilities, entropy and noise that are needed.

  Args:
    learner: What stays the same from update to update.
    spec: How the updates of a rollout are taken.
    state: Before the first update of the rollout.
    rollout: What was drawn.
    step: Number of the rollout.
    score: Scores its completions.
    score_teacher: Scores them by the teacher.

  Returns:
    The batch [P,G,T], and how many forward passes over it the policy and the
    reference took.
  """
  requires = learner.method.requires
  batch, shape = rollout.batch, rollout.batch.mask.shape
  # Whole completions: caches keep what older policies have read.
  mask = np.asarray(batch.mask)
  older = np.asarray(batch.version) < step
  older &= mask | ~mask.any(-1, keepdims=True)
  fresh = np.broadcast_to(~older.any(-1, keepdims=True), shape)
  extras = {**batch.extras, 'fresh': fresh}
  if 'turn' in extras:  # episodes: the contexts of their turns are compared
    line = rollout.previous is None
    extras['previous'] = straight(rollout) if line else rollout.previous
  if 'noise' in requires:
    rng = random_keys.generator(spec.seed, 'noise', step)
    # Positions come first, so that the noise of a token does not depend on how
    # wide the batch is.
    noise = rng.random((shape[2], *shape[:2]), np.float32)
    extras['noise'] = np.moveaxis(noise, 0, -1)
  if 'age' in requires or learner.measuring.ages:
    age = (step - np.asarray(batch.version)) * mask
    extras['age'] = age.astype(np.float32)
  # `credit` asks for the field already; `train_step` puts in the number.
  if 'updates_done' in requires:
    extras['updates_done'] = np.zeros(shape, np.float32)
  batch = batch._replace(
    extras=extras, entropy_old=extras.get('entropy_sampler')
  )
  if spec.anchor == 'sampler':
    batch = batch._replace(logp_old=batch.logp_sampler)

  sampler = batch.logp_sampler
  if sampler is not None:
    # Scored log-probabilities are of the whole policy; the sampler's are of
    # what top-k, top-p and min-p have left.
    sampler = sampler + extras.get('log_kept', 0)

  # The sampler's for tokens that an earlier policy drew: it is gone.
  def by_age(scored, sampler):
    if not spec.stale or sampler is None:
      return scored
    return jnp.where(fresh, scored, sampler)

  with_entropy, anchored = 'entropy_old' in requires, scores_old(learner, spec)
  drawn = (fresh & np.asarray(batch.mask)).any()
  if anchored and spec.stale and sampler is not None and not drawn:
    # Earlier policies drew every token, so a score would not be read.
    anchored, batch = False, batch._replace(logp_old=sampler)
  scored = anchored or (with_entropy and batch.entropy_old is None)
  if scored:
    old = score(state.params, Wanted(entropy=with_entropy))
    if old.entropy is not None:
      entropy = by_age(old.entropy, batch.entropy_old)
      batch = batch._replace(entropy_old=entropy)
    if anchored:
      batch = batch._replace(logp_old=by_age(old.logp, sampler))
  if learner.with_reference:
    batch = batch._replace(logp_ref=score(state.reference).logp)
  if learner.with_teacher:
    taught = score_teacher()
    extras = {**batch.extras, 'logp_teacher': taught.logp}
    if taught.top_ids is not None:
      extras |= {
        'teacher_top_ids': taught.top_ids,
        'teacher_top_logp': taught.top_logp,
      }
    batch = batch._replace(extras=extras)
  return batch, scored + learner.with_reference
