"""The reward that an environment gives itself."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.rewards._base import Outcome
from grpo_jax.rewards._base import bounded


@bounded
def environment(
  prompt: str, completion: str, example: Mapping[str, Any]
) -> Outcome:
  """What the episode returned, with the rewards of its turns.

  None if it has no reward, or has failed.

  Args:
    prompt: Not read.
    completion: Not read.
    example: With 'episode', what the run has put there.

  Raises:
    ValueError: There is no episode: the run has no environment.
  """
  del prompt, completion
  episode = example.get('episode')
  if not isinstance(episode, Mapping):
    raise ValueError(
      "The reward 'environment' needs a run with config.environment.name."
    )
  return Outcome(episode['reward'], episode['failure'], episode.get('secs', 0))
