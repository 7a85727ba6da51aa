"""`grpo-jax serve`: a policy that clients of OpenAI's API can ask."""

from collections.abc import Iterator
import contextlib
import functools
import os
import signal
import time
from typing import Any

from grpo_jax.commands import arguments as arguments_lib
from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run import policy as policies
from grpo_jax.serving import answering
from grpo_jax.serving import app as app_lib
from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import engine_calls
from grpo_jax.serving import listening

_KEY = 'GRPO_JAX_SERVE_KEY'
_LOOK_SECS = 0.2


def run(arguments: Arguments) -> None:
  """`grpo-jax serve`."""
  key = arguments.key or os.environ.get(_KEY) or None
  check(arguments, key)
  for name in ('starlette', 'uvicorn'):
    listening.package(name)
  # Before weights are read, because it may be taken.
  with contextlib.closing(
    listening.bound(arguments.host, arguments.port)
  ) as listener:
    source = arguments.source
    workdir = source if arguments_lib.is_run(source or '') else None
    served = policies.load_to_serve(
      arguments.config,
      workdir,
      arguments.checkpoint,
      arguments.context_tokens,
    )
    with desk_lib.Desk(
      served.run.engine, served.scorer, arguments.rows
    ) as desk:
      service = service_of(served, desk, arguments.config)
      hosts = {'127.0.0.1', '::1', 'localhost', arguments.host}
      posted = _engine_calls(served, service) if arguments.as_engine else {}
      app = app_lib.app(
        lambda token: service, hosts=hosts, key=key, posted=posted
      )
      with _until_signalled() as wait, listening.Listening(app, listener) as it:
        _tell(f'{it.origin}/v1', service.name, arguments.json)
        wait()


def check(arguments: Arguments, key: str | None) -> None:
  """Raises a ValueError unless there is something to serve, and to whom."""
  if arguments.config is None:
    raise ValueError(
      'serve needs the workdir of a run, a model, or --config, as in '
      '`grpo-jax serve runs/arithmetic`.'
    )
  if key is None and not listening.is_loopback(arguments.host):
    raise ValueError(
      f'--host={arguments.host} lets other machines ask, so a key is needed; '
      f'set {_KEY}, or give --key, and let clients give it as their API key.'
    )
  if not 0 <= arguments.port < 2**16:
    raise ValueError(f'--port={arguments.port}; give a number below 65536.')
  if arguments.rows < 1:
    raise ValueError(f'--rows={arguments.rows}; give at least 1.')


def service_of(
  served: policies.Served, desk: desk_lib.Desk, config: Any
) -> answering.Answering:
  """What answers clients by a policy."""
  tokenizer = served.run.tokenizer
  return answering.Answering(
    desk=desk,
    tokenizer=tokenizer,
    name=f'policy@{served.step}',
    sampling=served.run.sampling,
    max_tokens=served.run.draw.max_tokens,
    context_tokens=served.context_tokens,
    call_format=answering.call_format(
      config.environment.call_format, tokenizer
    ),
  )


def _engine_calls(
  served: policies.Served, service: answering.Answering
) -> dict[str, app_lib.Posted]:
  """The calls of a learner whose engine this is."""
  return engine_calls.EngineCalls(
    service,
    functools.partial(policies.read_model, served),
    functools.partial(policies.read_adapter, served),
  ).routes()


def _tell(url: str, model: str, as_json: bool) -> None:
  if as_json:
    printing.show_json({'base_url': url, 'model': model})
  else:
    printing.say(f'{url} serves {model}; Ctrl-C ends it.')


@contextlib.contextmanager
def _until_signalled() -> Iterator[Any]:
  """A function that returns after Ctrl-C or SIGTERM; a second one ends all."""
  received: list[int] = []

  def wait() -> None:
    while not received:
      time.sleep(_LOOK_SECS)

  def receive(number: int, _: Any) -> None:
    if received:
      raise KeyboardInterrupt
    received.append(number)

  numbers = signal.SIGINT, signal.SIGTERM
  earlier = {one: signal.signal(one, receive) for one in numbers}
  try:
    yield wait
  finally:
    for number, handler in earlier.items():
      signal.signal(number, handler)
