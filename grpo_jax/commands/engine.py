"""`grpo-jax doctor --engine=URL`: can a run sample from this server?"""

import sys

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments


def run(arguments: Arguments) -> int:
  """Makes all checks; returns the exit code, 2 if one has failed."""
  # Only now: it takes seconds.
  from grpo_jax.config import Config
  from grpo_jax.config import Engine
  from grpo_jax.engines.http import conformance
  from grpo_jax.run.build import engine as build_engine

  fields = Engine(
    kind='http',
    dialect=arguments.dialect,
    urls=(arguments.engine,),
    model=arguments.model or 'policy',
    key_env=arguments.key_env,
    concurrency=64,
    timeout_secs=120.0,
    retries=1,
  )
  config = Config(engine=fields)
  found: list[conformance.Check] = []

  def tell(one: conformance.Check) -> None:
    found.append(one)
    if not arguments.json:
      printing.say(f'{one.verdict:8}{one.name}: {one.said}')

  suite = conformance.Suite(
    build_engine.servers(config),
    build_engine.dialect(config, adapters=True),
    build_engine.dialect(config, adapters=False),
    arguments.model,
  )
  fine = suite.examine(tell)
  if arguments.json:
    printing.show_json({'ok': fine, 'checks': [x._asdict() for x in found]})
  if not fine:
    number = sum(one.verdict == conformance.FAILED for one in found)
    text = f'{number} of {len(found)} checks have failed: {arguments.engine}'
    printing.say(text, file=sys.stderr)
  return 0 if fine else 2
