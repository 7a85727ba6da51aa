"""A server that answers as a policy might, and keeps what it was asked.

It calls the tool, with arguments as no client would spell them, calls it twice
at once, and then answers. With the standard library alone.
"""

import contextlib
import dataclasses
from http import server
import json
import threading
from typing import Any

TURNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
  ('Hm,\nlet me see.', ' Let me count.\n', ('12 * 34 + 5',)),
  ('', '', ('413 + 1', '√')),
  ('Done.', ' It is 414. \n', ()),
)
"""What is said in each turn: reasoning, a text, and what is calculated."""

REFUSALS = {
  400: ('The context is full.', 'context_length_exceeded'),
  410: ('The episode is over.', 'episode_over'),
}


@dataclasses.dataclass
class Asked:
  """A request.

  Attributes:
    path: Of its address.
    headers: With names in lower case.
    body: As it came.
  """

  path: str
  headers: dict[str, str]
  body: bytes

  @property
  def fields(self) -> dict[str, Any]:
    """What the body says."""
    return json.loads(self.body)


@dataclasses.dataclass
class Stub:
  """What is served.

  Attributes:
    address: For OPENAI_BASE_URL.
    asked: All requests so far.
    refuses: Requests from this one on are refused; None: none are.
    status: With which.
  """

  address: str = ''
  asked: list[Asked] = dataclasses.field(default_factory=list)
  refuses: int | None = None
  status: int = 400

  def answer(self, asked: Asked) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    number = len(self.asked)
    self.asked.append(asked)
    if not asked.path.endswith('/v1/chat/completions'):
      return 404, _error('There is nothing here.', 'not_found')
    if self.refuses is not None and number >= self.refuses:
      return self.status, _error(*REFUSALS[self.status])
    return 200, _answer(number, asked.fields)


def _error(message: str, code: str) -> dict[str, Any]:
  kind = 'invalid_request_error'
  return {
    'error': {'message': message, 'type': kind, 'param': None, 'code': code}
  }


def _answer(number: int, asked: dict[str, Any]) -> dict[str, Any]:
  """The answer to a request with a number."""
  reasoning, text, expressions = TURNS[min(number, len(TURNS) - 1)]
  calls = [
    ('calculator', f'{{"expression":  {json.dumps(one)}}}')
    for one in expressions
  ]
  tools = [one['function']['name'] for one in asked.get('tools') or ()]
  if not calls and 'final_answer' in tools:
    calls = [('final_answer', '{"answer":  "414"}')]
  message: dict[str, Any] = {'role': 'assistant', 'content': text or None}
  if reasoning:
    message['reasoning_content'] = reasoning
  if calls:
    message['tool_calls'] = [
      {
        'id': f'call_{number}_{k}',
        'type': 'function',
        'function': {'name': name, 'arguments': arguments},
      }
      for k, (name, arguments) in enumerate(calls)
    ]
  choice = {
    'index': 0,
    'message': message,
    'logprobs': None,
    'finish_reason': 'tool_calls' if calls else 'stop',
  }
  usage = {'prompt_tokens': 3, 'completion_tokens': 3, 'total_tokens': 6}
  return {
    'id': f'chatcmpl-{number}',
    'object': 'chat.completion',
    'created': 1,
    'model': 'policy',
    'choices': [choice],
    'usage': usage,
  }


@contextlib.contextmanager
def serving(refuses: int | None = None, status: int = 400):
  """A `Stub` that listens on loopback, for as long as it is wanted."""
  stub = Stub(refuses=refuses, status=status)

  class Handler(server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
      pass

    def _reply(self):
      size = int(self.headers.get('content-length') or 0)
      headers = {name.lower(): value for name, value in self.headers.items()}
      asked = Asked(self.path, headers, self.rfile.read(size))
      status, said = stub.answer(asked)
      body = json.dumps(said).encode()
      self.send_response(status)
      self.send_header('content-type', 'application/json')
      self.send_header('content-length', str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    do_POST = do_GET = _reply  # noqa: N815

  with server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as made:
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    stub.address = f'http://127.0.0.1:{made.server_address[1]}/e/token/v1'
    try:
      yield stub
    finally:
      made.shutdown()
      thread.join()
