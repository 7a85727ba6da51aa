"""`grpo-jax generate`."""

import sys
import time

from grpo_jax.commands import printing
from grpo_jax.commands import together
from grpo_jax.commands.arguments import Arguments


def run(arguments: Arguments) -> int:
  """Draws for a run until it is done; returns the exit code."""
  if not arguments.learner:
    raise ValueError(
      'generate needs --learner, the HOST:PORT at which the run listens '
      '(config.generator.listen), as in --learner=learner-0:8470.'
    )
  if arguments.wait_secs <= 0:
    raise ValueError(f'--wait_secs={arguments.wait_secs}; give more than 0.')
  with together.joined(arguments) as peers:
    # Only now: it takes seconds.
    from grpo_jax.run.jobs import generating
    from grpo_jax.run.jobs import here

    learner = generating.learner_at(arguments.learner, arguments.secret)
    hello = generating.hello(
      learner, arguments.wait_secs, together.STOP, peers, _tell
    )
    if hello is None:
      return 128 + int(together.STOP.signal or 0)
    with here.opened(learner, hello, peers, together.STOP) as (draws, about):
      generator = generating.Generator(
        learner,
        draws,
        {'name': generating.own_name(), 'about': about},
        _tell,
        together.STOP,
        arguments.wait_secs,
        peers,
      )
      code = generator.run()
    if arguments.json:
      printing.show_json({'parts': generator.parts})
    return code


def _tell(text: str) -> None:
  """A line for people, with the time."""
  printing.say(f'{time.strftime("%H:%M:%S")} {text}', file=sys.stderr)
