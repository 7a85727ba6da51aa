"""A tool that runs Python, in the sandbox of rewards.

What it runs has no network, no file but Python's and a scratch folder, and ends
at its limits; see `rewards.sandbox`. Each call is a new process: nothing stays
from one call to the next.
"""

from grpo_jax.environments.tools import tool
from grpo_jax.rewards import sandbox

_MOST_CHARACTERS = 10_000  # of each stream


def run(
  code: str, limits: sandbox.Limits, characters: int = _MOST_CHARACTERS
) -> str:
  """What a program prints, and how it ended if not well.

  Args:
    code: The program.
    limits: What it may use.
    characters: Of what it prints, at most; of errors, the last ones.

  Raises:
    SandboxError: The system offers no sandbox.
  """
  ran = sandbox.run(code, limits=limits)
  parts = [ran.stdout[:characters].rstrip('\n')]
  if len(ran.stdout) > characters:
    parts.append('[The rest is cut.]')
  if ran.failure:
    parts += [ran.stderr[-characters:].strip(), f'[It ended by: {ran.failure}]']
  said = '\n'.join(part for part in parts if part)
  return said or '[It printed nothing.]'


class Python:
  """The environment 'python': a policy that may run programs.

  Args:
    time_secs: Until a program is ended, by the clock.
    memory_bytes: Of a program and all that it starts.
    characters: Of what a program prints, at most.

  Raises:
    ValueError: The system offers no sandbox.
  """

  def __init__(
    self,
    time_secs: float = 10.0,
    memory_bytes: int = 1 << 30,
    characters: int = _MOST_CHARACTERS,
  ):
    if reason := sandbox.missing():
      raise ValueError(
        f'The tool python would run what a model writes, and {reason}; use'
        ' another system, or leave the tool out.'
      )
    self._limits = sandbox.Limits(time_secs, memory_bytes)
    self._characters = characters

  @tool
  def python(self, code: str) -> str:
    """Runs a program of Python and returns what it prints.

    Args:
      code: The whole program. Nothing stays from one program to the next.
    """
    return run(code, self._limits, self._characters)


def python(code: str) -> str:
  """Runs a program of Python and returns what it prints.

  Args:
    code: The whole program. Nothing stays from one program to the next.
  """
  return run(code, sandbox.Limits())
