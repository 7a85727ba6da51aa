"""An app that answers in a thread of its own, on a socket."""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from typing import Any

from grpo_jax.config import importing

_BEGIN_SECS = 30.0
_END_SECS = 10.0  # for answers under way, once it is to end


def package(name: str) -> Any:
  """A package that a server needs.

  Raises:
    ValueError: It is not installed.
  """
  return importing.package(name, 'server')


def bound(host: str = '127.0.0.1', port: int = 0) -> socket.socket:
  """A socket at an address, which does not listen yet.

  Args:
    host: A name or an address of this machine.
    port: 0: any that is free.

  Raises:
    ValueError: It cannot be had.
  """
  try:
    family, kind, proto, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, proto)
  except (OSError, OverflowError, UnicodeError) as error:
    raise _unusable(host, port, error) from error
  try:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(address)
  except OSError as error:
    made.close()
    raise _unusable(host, port, error) from error
  return made


def _unusable(host: str, port: int, error: Exception) -> ValueError:
  said = getattr(error, 'strerror', None) or str(error)
  return ValueError(
    f'Nothing can listen at {host}:{port} ({said}); give another --host or '
    '--port.'
  )


def is_loopback(host: str) -> bool:
  """Whether only this machine reaches a host.

  >>> is_loopback('localhost'), is_loopback('::1'), is_loopback('0.0.0.0')
  (True, True, False)
  """
  if host == 'localhost':
    return True
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host).is_loopback
  return False


def _without_log() -> Any:
  """The protocol, which logs no address, however loggers are set up."""
  h11_impl = package('uvicorn.protocols.http.h11_impl')

  class Protocol(h11_impl.H11Protocol):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      self.access_log = False  # addresses hold tokens

  return Protocol


class Listening:
  """An app that answers, until it is closed; a context manager.

  Attributes:
    address: Host and port.

  Args:
    app: An ASGI app.
    listener: From `bound`. It belongs to this object from here on.

  Raises:
    ValueError: uvicorn is not installed.
  """

  def __init__(self, app: Any, listener: socket.socket):
    uvicorn = package('uvicorn')
    self._listener = listener
    self._error: BaseException | None = None
    host, port, *_ = listener.getsockname()
    self.address: tuple[str, int] = host, port
    config = uvicorn.Config(
      app,
      http=_without_log(),
      ws='none',
      loop='asyncio',
      lifespan='off',
      interface='asgi3',
      log_config=None,
      access_log=False,
      proxy_headers=False,
      server_header=False,
      backlog=1024,
      timeout_graceful_shutdown=int(_END_SECS),
    )
    self._server = uvicorn.Server(config)
    self._begun = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='serving', daemon=True
    )

  @property
  def origin(self) -> str:
    """How addresses here begin, such as 'http://127.0.0.1:8000'."""
    host, port = self.address
    return f'http://{f"[{host}]" if ":" in host else host}:{port}'

  def __enter__(self) -> 'Listening':
    self._listener.listen(1024)
    self._thread.start()
    self._begun.wait(_BEGIN_SECS)
    if self._error is not None or not self._server.started:
      self.close()
      raise RuntimeError('The server could not begin.') from self._error
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Takes no more requests, and waits a while for answers under way."""
    self._server.should_exit = True
    if self._thread.ident is not None:
      self._thread.join(_END_SECS + 5)
    self._listener.close()

  def _run(self) -> None:
    try:
      asyncio.run(self._serve())
    except BaseException as error:
      self._error = error
    finally:
      self._begun.set()

  async def _serve(self) -> None:
    serving = asyncio.ensure_future(
      self._server.serve(sockets=[self._listener])
    )
    while not self._server.started and not serving.done():
      await asyncio.sleep(0.001)
    self._begun.set()
    await serving
