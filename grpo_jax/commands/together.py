"""The processes that run one command."""

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal

STOP = stop_signal.Stop()
"""One for the process: `main.run` installs its handlers before anything else.
"""


def join(arguments: Arguments, **options: Any) -> bool:
  """Joins the other processes, if there are any; whether this is the first.

  Args:
    arguments: The flags of the command.
    **options: Further arguments of `joining.initialize`.
  """
  from grpo_jax.hosts import joining

  is_first = joining.initialize(
    arguments.coordinator,
    arguments.num_processes,
    arguments.process_id,
    **options,
  )
  if joining.are_joined():
    printing.keep_stdout()
  return is_first


@contextlib.contextmanager
def joined(
  arguments: Arguments, **options: Any
) -> Iterator[processes.Processes]:
  """The processes that run this command; the first alone prints; see `join`."""
  join(arguments, **options)
  from grpo_jax.hosts import joining

  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(joining.joined())
    peers.pass_on(STOP)
    words = [x for x in arguments.words if not x.startswith('--process_id=')]
    peers.check_equal({'the command': [arguments.command, *words]})
    if not peers.is_first:
      nowhere = stack.enter_context(open(os.devnull, 'w'))
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    yield peers
