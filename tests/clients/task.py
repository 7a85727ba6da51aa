"""What the agents of this folder have in common: a task and a tool.

Agents run in virtual environments of their own, without JAX. What is imported
of this package here needs the standard library alone.
"""

from collections.abc import Callable
import json
import pathlib
import sys
from typing import Any

if (_root := str(pathlib.Path(__file__).parents[2])) not in sys.path:
  sys.path.insert(0, _root)

from grpo_jax.environments import calculator as arithmetic  # noqa: E402

_OVER = {(400, 'context_length_exceeded'), (410, 'episode_over')}


def calculator(expression: str) -> str:
  """Calculates."""
  try:
    return arithmetic.calculator(expression)
  except Exception as error:  # as `environments.tools` words it
    said = f'{type(error).__name__}: {error}'.splitlines()[0]
    return f"Error: The tool 'calculator' failed: {said}"[:507]


def example() -> dict[str, Any]:
  """What is asked: the first line of the standard input."""
  return json.loads(sys.stdin.readline())


def messages(asked: dict[str, Any]) -> list[dict[str, str]]:
  """The chat that an example begins with."""
  prompt = asked['prompt']
  if isinstance(prompt, str):
    return [{'role': 'user', 'content': prompt}]
  return prompt


def main(
  play: Callable[[dict[str, Any]], Any],
  misled: tuple[type[Exception], ...] = (),
) -> None:
  """Plays, prints what was said last, and ends well at limits.

  Args:
    play: Given an example; what it returns is printed.
    misled: What the package raises when it cannot go on from what the model has
      said. That is the end of an episode, not a fault of the agent.
  """
  try:
    print(play(example()))
  except Exception as error:
    if not _is_over(error) and not isinstance(error, misled):
      raise
    print(f'({type(error).__name__})')


def _is_over(error: BaseException | None) -> bool:
  """Whether the server has said that nothing is left to say."""
  while error is not None:
    found = getattr(error, 'status_code', 0), getattr(error, 'code', '')
    if found in _OVER or found[0] == 410:
      return True
    error = error.__cause__ or error.__context__
  return False
