"""A server of chat completions on loopback, which does what a test tells it."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from http import server
import json
import threading
from typing import Any
from typing import NamedTuple


class Request(NamedTuple):
  """What was asked."""

  path: str
  headers: dict[str, str]
  body: dict[str, Any]

  @property
  def text(self) -> str:
    """The message of the user."""
    return self.body['messages'][-1]['content']


class Reply(NamedTuple):
  """What is answered; a `hang` is how many seconds later."""

  status: int = 200
  body: Any = b''
  headers: dict[str, str] = {}
  hang: float = 0.0
  closes: bool = False


def says(text: Any, finish: str = 'stop', **more: Any) -> Reply:
  """A completion with this text."""
  message = {'role': 'assistant', 'content': text}
  body = {'choices': [{'message': message, 'finish_reason': finish}]}
  return Reply(body=body, **more)


class ChatServer:
  """Answers the n-th request with `reply(n, request)`.

  Attributes:
    url: For the judge.
    requests: All that came, in order.
    most_at_once: The most requests that were under way at once.
  """

  def __init__(self, reply: Callable[[int, Request], Reply]):
    self.requests: list[Request] = []
    self.most_at_once = self._now = 0
    self._lock = threading.Lock()
    self._ended = threading.Event()
    outer = self

    class Handler(server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'
      disable_nagle_algorithm = True

      def do_POST(self):
        size = int(self.headers['Content-Length'])
        body = json.loads(self.rfile.read(size))
        request = Request(self.path, dict(self.headers), body)
        with outer._lock:
          number = len(outer.requests)
          outer.requests.append(request)
          outer._now += 1
          outer.most_at_once = max(outer.most_at_once, outer._now)
        answer = reply(number, request)
        if answer.hang:
          outer._ended.wait(answer.hang)
        with outer._lock:
          outer._now -= 1
        if answer.closes:
          self.close_connection = True
          return
        data = answer.body
        if not isinstance(data, bytes):
          data = json.dumps(data).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
          self.send_header(name, value)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the judge has gone
          self.wfile.write(data)

      def log_message(self, *_):
        pass

    class Quiet(server.ThreadingHTTPServer):
      daemon_threads = True
      request_queue_size = 64

      def handle_error(self, *_):  # of a judge that has gone
        pass

    self._server = Quiet(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self._server.server_port}/v1'
    self._thread = threading.Thread(
      target=self._server.serve_forever, args=(0.01,), daemon=True
    )
    self._thread.start()

  def close(self):
    self._ended.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


@contextlib.contextmanager
def serving(*replies: Any) -> Iterator[ChatServer]:
  """A server that gives these replies in turn, and the last one ever after.

  A reply may be a function of the request.
  """

  def reply(number, request):
    found = replies[min(number, len(replies) - 1)]
    return found(request) if callable(found) else found

  chat_server = ChatServer(reply)
  try:
    yield chat_server
  finally:
    chat_server.close()


class FakeTime:
  """A clock that is put forward by whoever sleeps; nobody waits."""

  def __init__(self, module: Any, monkeypatch: Any):
    self.now, self.sleeps, self._sleep = 1000.0, [], module._sleep
    monkeypatch.setattr(module, '_clock', lambda: self.now)
    monkeypatch.setattr(module, '_sleep', self.sleep)

  async def sleep(self, secs: float) -> None:
    self.sleeps.append(secs)
    self.now += secs
    await self._sleep(0)
