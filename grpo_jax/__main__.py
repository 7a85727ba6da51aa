"""`python -m grpo_jax` is `grpo-jax`."""

import sys

from grpo_jax.commands import start

# Those that compute for more than a moment.
_COMPUTE = {'train', 'eval', 'sample', 'study', 'generate'}


def run() -> None:
  """The console script."""
  if _COMPUTE & {*sys.argv[1:2]}:
    start.prepare()  # before more is imported: the program may start anew
  from grpo_jax.commands import main

  main.run()


if __name__ == '__main__':
  run()
