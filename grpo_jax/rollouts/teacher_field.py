"""What a teacher that is asked elsewhere says of the tokens of a rollout."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import with_extras

_SAID = {  # where each stands in what is known
  'logp_teacher': 'logp',
  'teacher_top_ids': 'top_ids',
  'teacher_top_logp': 'top_logp',
}


def with_scores(
  rollout: Rollout,
  score: Callable[[Sequence[Sequence[int]]], Sequence[Any]],
  top: int = 0,
) -> Rollout:
  """A rollout with the fields of a teacher; see `losses.Batch`.

  Args:
    rollout: Was drawn.
    score: From texts, as ids, to what is known of each; see
      `engines.scoring.Known`.
    top: How many of the likeliest tokens that tells, `K`; 0: their fields are
      left out.

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
  found = _zeros(rollout, top)
  some = [n for n, (p, g) in enumerate(places) if rollout.length[p, g]]
  scores = score([texts[n] for n in some])
  for n, known in zip(some, scores, strict=True):
    p, g = places[n]
    length = rollout.length[p, g]
    for name, field in found.items():
      field[p, g, :length] = getattr(known, _SAID[name])[-length:]
  return with_extras(rollout, found)


def with_zeros(rollout: Rollout, top: int = 0) -> Rollout:
  """A rollout whose fields are 0, to compile for it; see `with_scores`."""
  return with_extras(rollout, _zeros(rollout, top))


def _zeros(rollout: Rollout, top: int) -> dict[str, np.ndarray]:
  """The fields by name; 0 where nothing is."""
  shape = rollout.batch.mask.shape
  found: dict[str, np.ndarray] = {'logp_teacher': np.zeros(shape, np.float32)}
  if top:
    found['teacher_top_ids'] = np.zeros((*shape, top), np.int32)
    found['teacher_top_logp'] = np.zeros((*shape, top), np.float32)
  return found
