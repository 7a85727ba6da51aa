"""What a teacher that is asked elsewhere says of the tokens of a rollout."""

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import batch_fields

NAME = 'logp_teacher'


def with_scores(
  rollout: Rollout,
  score: Callable[[Sequence[Sequence[int]]], Sequence[np.ndarray]],
) -> Rollout:
  """A rollout with the field `logp_teacher` f32[P,G,T]; 0 where nothing is.

  Args:
    rollout: Was drawn.
    score: From texts, as ids, to the log-probability of each token but the
      first.

  Raises:
    ValueError: An episode branches, so that it is no single text.
  """
  if rollout.previous is not None:
    raise ValueError(
      'An episode branches, and the servers of config.teacher.urls score '
      'single texts; give the teacher as config.teacher.path.'
    )
  tokens = np.asarray(rollout.batch.tokens)
  places = [(p, g) for p in rollout.own_groups for g in range(tokens.shape[1])]
  texts = [
    [*rollout.prompts[p], *tokens[p, g, : rollout.length[p, g]].tolist()]
    for p, g in places
  ]
  found = np.zeros(tokens.shape, np.float32)
  some = [n for n, (p, g) in enumerate(places) if rollout.length[p, g]]
  scores = score([texts[n] for n in some])
  for n, logp in zip(some, scores, strict=True):
    p, g = places[n]
    length = rollout.length[p, g]
    found[p, g, :length] = logp[-length:]
  return batch_fields.with_extras(rollout, {NAME: found})


def with_zeros(rollout: Rollout) -> Rollout:
  """A rollout whose field is 0, to compile for it."""
  shape = rollout.batch.mask.shape
  zeros = np.zeros(shape, np.float32)
  return batch_fields.with_extras(rollout, {NAME: zeros})
