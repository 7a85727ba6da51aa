"""Carries connections from a network without a way out to one port outside.

`agent_process.py` gets a socket that listens in the network of a process which
it has started. What connects there is accepted here, in the process outside,
and joined to the real port: bytes, ends and resets pass both ways.
"""

import contextlib
import os
import selectors
import socket
import struct
import threading
import time

_MOST = 128  # connections at a time: each takes two descriptors
_CHUNK = 1 << 16  # bytes on their way, in each way of a connection
_PAUSE_SECS = 0.05  # while this process has no descriptor left
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Relay:
  """A thread that serves the listening socket which comes over a channel.

  Args:
    channel: A unix socket that gets the listening one. The relay closes it.
    address: Where to connect to.
  """

  def __init__(self, channel: socket.socket, address: tuple[str, int]):
    self._channel, self._address = channel, address
    self._woken, self._wake = os.pipe()
    self._connections: set[_Connection] = set()
    self._thread = threading.Thread(
      target=self._run, name='relay of an agent', daemon=True
    )
    self._thread.start()

  def end(self) -> None:
    """Resets all connections, and returns once nothing is left open."""
    os.close(self._wake)
    self._thread.join()

  def _run(self) -> None:
    with contextlib.ExitStack() as opened:
      opened.callback(os.close, self._woken)
      opened.enter_context(self._channel)
      selector = opened.enter_context(selectors.DefaultSelector())
      selector.register(self._woken, _READ)
      selector.register(self._channel, _READ)
      if any(key.fd == self._woken for key, _ in selector.select()):
        return
      _, numbers, *_ = socket.recv_fds(self._channel, 1, 1)
      selector.unregister(self._channel)
      if not numbers:  # the network was not made
        return
      listener = opened.enter_context(socket.socket(fileno=numbers[0]))
      listener.setblocking(False)
      opened.callback(self._end_all)
      self._serve(selector, listener)

  def _end_all(self) -> None:
    for connection in self._connections:
      connection.reset()

  def _serve(
    self, selector: selectors.BaseSelector, listener: socket.socket
  ) -> None:
    accepts = False
    while True:
      if accepts != (len(self._connections) < _MOST):
        accepts = not accepts
        if accepts:
          selector.register(listener, _READ)
        else:
          selector.unregister(listener)
      for key, events in selector.select():
        if key.fd == self._woken:
          return
        if key.fileobj is listener:
          self._accept(selector, listener)
        elif not key.data.is_over:  # by an event of its other end, just now
          key.data.go_on(key.fileobj, events)
          if key.data.is_over:
            self._connections.discard(key.data)

  def _accept(
    self, selector: selectors.BaseSelector, listener: socket.socket
  ) -> None:
    try:
      near, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
      return
    except OSError:
      time.sleep(_PAUSE_SECS)
      return
    try:
      far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
      _reset(near)
      time.sleep(_PAUSE_SECS)
      return
    for one in (near, far):
      one.setblocking(False)
      one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.connect_ex(self._address)  # what comes of it, an event tells
    self._connections.add(_Connection(selector, near, far))


class _Way:
  """One way of a connection.

  Attributes:
    source: Where its bytes come from.
    sink: Where they go to.
    left: Those that were read and not yet written.
    ended: Whether nothing more comes.
    over: Whether its end has been passed on.
  """

  def __init__(self, source: socket.socket, sink: socket.socket):
    self.source, self.sink = source, sink
    self.left = memoryview(b'')
    self.ended = self.over = False


class _Connection:
  """Two sockets, of which each gets what comes from the other one.

  Args:
    selector: It tells when one of them is ready.
    near: The one that was accepted.
    far: One that connects.

  Attributes:
    is_over: Whether both are closed.
  """

  def __init__(
    self,
    selector: selectors.BaseSelector,
    near: socket.socket,
    far: socket.socket,
  ):
    self._selector, self._far = selector, far
    self._ways = _Way(near, far), _Way(far, near)
    self._connected = self._was_reset = self.is_over = False
    self._events = {near: 0, far: 0}
    self._listen()

  def go_on(self, ready: socket.socket, events: int) -> None:
    """Moves what can be moved, now that a socket is ready."""
    if not self._connected:
      if self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        self.reset()
        return
      self._connected = True
      events &= ~_WRITE
    for way in self._ways:
      if events & _READ and way.source is ready:
        self._read(way)
      if events & _WRITE and way.sink is ready:
        self._write(way)
    self._listen()

  def reset(self) -> None:
    """Closes both sockets, so that both others meet an error."""
    for one in self._close():
      _reset(one)

  def _read(self, way: _Way) -> None:
    if way.ended or way.left:
      return
    try:
      data = way.source.recv(_CHUNK)
    except BlockingIOError:
      return
    except OSError:  # it was reset: nothing can be sent to it either
      data, self._was_reset = b'', True
      (other,) = (one for one in self._ways if one is not way)
      self._give_up(other)
    way.left, way.ended = memoryview(data), not data
    self._write(way)

  def _write(self, way: _Way) -> None:
    try:
      if way.left:
        way.left = way.left[way.sink.send(way.left) :]
      if way.ended and not way.left and not way.over:
        way.over = True
        if not self._was_reset:
          way.sink.shutdown(socket.SHUT_WR)
    except BlockingIOError:
      pass
    except OSError:  # what its sink has sent before is still to be passed on
      self._give_up(way)

  def _give_up(self, way: _Way) -> None:
    way.left, way.ended, way.over = memoryview(b''), True, True

  def _listen(self) -> None:
    """Asks for the events that can move something."""
    if all(way.over for way in self._ways):
      for one in self._close():
        (_reset if self._was_reset else socket.socket.close)(one)
      return
    wanted = dict.fromkeys(self._events, 0)
    for way in self._ways:
      if self._connected and not way.ended and not way.left:
        wanted[way.source] |= _READ
      if way.left:
        wanted[way.sink] |= _WRITE
    if not self._connected:
      wanted[self._far] = _WRITE
    for one, events in wanted.items():
      before, self._events[one] = self._events[one], events
      if events == before:
        continue
      if not before:
        self._selector.register(one, events, self)
      elif not events:
        self._selector.unregister(one)
      else:
        self._selector.modify(one, events, self)

  def _close(self) -> list[socket.socket]:
    """The sockets, which are to be closed and tell no events any more."""
    self.is_over = True
    for one, events in self._events.items():
      if events:
        self._selector.unregister(one)
    sockets, self._events = list(self._events), {}
    return sockets


def _reset(one: socket.socket) -> None:
  """Closes a socket by a reset: the other side meets an error."""
  with one, contextlib.suppress(OSError):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
