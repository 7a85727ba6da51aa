"""What may go wrong between an engine and its servers, as a table.

`python -m tests.engines.http.faults` prints it.
"""

from collections.abc import Callable
import copy
from typing import Any
from typing import NamedTuple

from tests.engines.http.fake_server import END
from tests.engines.http.fake_server import FakeServer
from tests.engines.http.fake_server import Reply

BOTH = 'vllm', 'sglang'


class Row(NamedTuple):
  """A fault of one kind of request.

  Attributes:
    name: What is wrong.
    change: As of `fake_server.Fault`.
    says: A pattern in the message, if no server does it well.
    dialects: Which servers may have it.
    adapters: Whether policies are adapters; None: both.
    kinds: The kinds of requests by dialect; '': completions.
    heals: Whether what was asked for comes, if it happens but once.
  """

  name: str
  change: Callable[[FakeServer, Callable[[], Reply]], Reply]
  says: str
  dialects: tuple[str, ...] = BOTH
  adapters: bool | None = False
  kind: str = ''
  heals: bool = True


class Answer:
  """The parts of a completion, whichever the dialect."""

  def __init__(self, dialect: str, body: Any):
    self._dialect, self._body = dialect, copy.deepcopy(body)
    if dialect == 'vllm':
      choice = self._body['choices'][0]
      self.ids, self.finish = choice['token_ids'], choice['finish_reason']
      self.logp = choice['logprobs']['token_logprobs']
      self.named = choice['logprobs']['tokens']
      self.by, self.spans = choice['stop_reason'], choice['weight_versions']
      self.model = self._body['model']
    else:
      told = self._body['meta_info']
      self.ids = self._body['output_ids']
      self.finish = told['finish_reason']['type']
      self.by = told['finish_reason'].get('matched')
      entries = told['output_token_logprobs']
      self.logp, self.named = ([one[n] for one in entries] for n in (0, 1))
      self.spans, self.model = told['weight_versions'], ''

  def name(self, token: Any) -> Any:
    """How a token is named beside its log-probability."""
    return f'token_id:{token}' if self._dialect == 'vllm' else token

  @property
  def body(self) -> Any:
    if self._dialect == 'vllm':
      choice = self._body['choices'][0]
      choice['token_ids'], choice['finish_reason'] = self.ids, self.finish
      choice['logprobs'] = {'token_logprobs': self.logp, 'tokens': self.named}
      choice['stop_reason'], choice['weight_versions'] = self.by, self.spans
      self._body['model'] = self.model
    else:
      told = self._body['meta_info']
      self._body['output_ids'] = self.ids
      told['finish_reason'] = {'type': self.finish, 'matched': self.by}
      told['output_token_logprobs'] = self.logp and [
        [*one, None] for one in zip(self.logp, self.named)
      ]
      told['weight_versions'] = self.spans
    return self._body


def answers(*reply: Any, **fields: Any) -> Any:
  """Gives this reply."""
  return lambda server, answer: Reply(*reply, **fields)


def edits(change: Callable[[Answer], Any]) -> Any:
  """Changes parts of a completion."""

  def edit(server, answer):
    reply = answer()
    if reply.status != 200:
      return reply
    parts = Answer(server.dialect, reply.body)
    change(parts)
    return reply._replace(body=parts.body)

  return edit


def whole(change: Callable[[Any], Any]) -> Any:
  """Changes the body of an answer."""

  def edit(server, answer):
    del server
    reply = answer()
    return reply._replace(body=change(copy.deepcopy(reply.body)))

  return edit


def sets(**fields: Any) -> Any:
  """Puts values into parts of a completion."""
  return edits(lambda a: [setattr(a, k, v) for k, v in fields.items()])


def first(field: str, value: Any) -> Any:
  """Puts a value in the place of the first of a list."""

  def change(a):
    getattr(a, field)[0] = value
    if field == 'ids':  # so that nothing else is wrong
      a.named[0] = a.name(value)

  return edits(change)


def spanned(change: Callable[[str, int], Any]) -> Any:
  """Gives spans, made of the right name and the number of tokens."""

  def edit(a):
    spans = change(a.spans[0]['version'], len(a.ids))
    a.spans = [
      dict(zip(('version', 'start', 'end'), one, strict=True)) for one in spans
    ]

  return edits(edit)


def then(act: Callable[[FakeServer], Any]) -> Any:
  """Does something to the server, and then answers as it does."""

  def change(server, answer):
    act(server)
    return answer()

  return change


def _with_more(a: Answer) -> None:
  a.ids, a.logp = [11] * 99, [-0.5] * 99
  a.named = [a.name(one) for one in a.ids]
  a.finish, a.by = 'length', None


def _ended(a: Answer, ids: list[int], finish: str, by: Any = None) -> None:
  a.ids, a.logp, a.finish, a.by = ids, [-0.5] * len(ids), finish, by
  a.named = [a.name(one) for one in ids]
  if a.spans:
    a.spans = [{**a.spans[0], 'end': len(ids)}]


def _die(server: FakeServer, answer: Any) -> Reply:
  del answer
  server.die()
  return Reply(how='closes')


CONTEXT = {'error': {'message': 'The input (12 tokens) is longer than'}}
HTML = b'<html><body>Bad gateway</body></html>'

TRANSPORT = [
  Row('500', answers(500), 'HTTP 500, 3 times'),
  Row('500 with words', answers(500, b'CUDA error'), 'CUDA error'),
  Row('502, a page', answers(502, HTML), 'HTTP 502, 3 times.*Bad gateway'),
  Row('503', answers(503), 'HTTP 503, 3 times'),
  Row('503, again in 1 s', answers(503, b'', {'Retry-After': '1'}), 'HTTP 503'),
  Row(
    '503, again in an hour',
    answers(503, b'', {'Retry-After': '3600'}),
    'HTTP 503, to be asked again in 3600 s',
    heals=False,
  ),
  Row('429', answers(429), 'HTTP 429, 3 times'),
  Row('429, again in 1 s', answers(429, b'', {'Retry-After': '1'}), 'HTTP 429'),
  Row('408', answers(408), 'HTTP 408'),
  Row('302', answers(302, b''), 'HTTP 302', heals=False),
  Row(
    '400, too long a prompt', answers(400, CONTEXT), 'is longer', heals=False
  ),
  Row(
    '401, a text as error',
    answers(401, {'error': 'Unauthorized'}),
    'HTTP 401.*Unauthorized.*it was sent no key, see the field key_env',
    adapters=None,
    heals=False,
  ),
  Row('403', answers(403), 'HTTP 403.*no key', heals=False),
  Row(
    'reset in mid-answer',
    whole(lambda body: body),
    'ReadError|RemoteProtocolError',
  )._replace(change=lambda server, answer: answer()._replace(how='breaks')),
  Row(
    'ends in mid-answer',
    lambda server, answer: answer()._replace(how='ends'),
    'RemoteProtocolError',
  ),
  Row('closes without a word', answers(how='closes'), 'RemoteProtocolError'),
  Row('dies', _die, 'ConnectError', heals=False),
]
SHAPES = [
  Row('JSON that is cut', answers(200, b'{"choices": [{"te'), 'answer without'),
  Row('a page with status 200', answers(200, HTML), 'answer without.*Bad gate'),
  Row('nothing with status 200', answers(200), "answer without .*''"),
  Row('null', answers(200, b'null'), 'answer without'),
  Row('a number', answers(200, b'7'), 'answer without'),
  Row('an empty list', answers(200, []), 'answer without'),
  Row('no UTF-8', answers(200, b'\xff\xfe\xfa'), 'answer without'),
  Row('too deep', answers(200, b'[' * 200_000), 'answer without'),
  Row('5 MB', answers(200, b' ' * 5_000_000), 'more than 4194304 bytes'),
  Row('in a list', whole(lambda body: [body]), 'answer without'),
  Row(
    'no choices',
    whole(lambda body: {**body, 'choices': []}),
    'answer without choices.0',
    ('vllm',),
  ),
  Row('an error with 200', answers(200, CONTEXT), 'answer without'),
]
IDS = [
  Row('no ids', sets(ids=None), 'without ids of tokens'),
  Row('no tokens', edits(lambda a: _ended(a, [], 'length')), 'without ids'),
  Row('ids in a text', sets(ids='abc'), 'without ids'),
  Row('a bool as id', first('ids', True), 'without ids'),
  Row('a float as id', first('ids', 11.0), 'without ids'),
  Row('a text as id', first('ids', '11'), 'without ids'),
  Row('a negative id', first('ids', -1), 'without ids'),
  Row('an id of 2**31', first('ids', 2**31), 'without ids'),
  Row('too many tokens', edits(_with_more), '99 tokens, though at most 12'),
  Row(
    'another id is named', edits(lambda a: a.named.reverse()), 'of other tokens'
  ),
  Row(
    'texts are named',
    edits(lambda a: setattr(a, 'named', ['a' for _ in a.ids])),
    'of other tokens',
  ),
]
LOGP = [
  Row('no log-probabilities', sets(logp=None), 'log-probabilities'),
  Row('one too few', edits(lambda a: a.logp.pop()), 'tokens and'),
  Row(
    'one too many',
    edits(lambda a: (a.logp.append(-1.0), a.named.append(a.name(9)))),
    'tokens and',
  ),
  *(
    Row(
      f'{name} as log-probability', first('logp', value), 'as the log-probabil'
    )
    for name, value in (
      ('null', None),
      ('NaN', float('nan')),
      ('-Infinity', float('-inf')),
      ('-9999', -9999.0),
      ('-3.4e38', -3.4028235e38),
      ('0.5', 0.5),
      ('a text', '-0.5'),
      ('a bool', False),
      ('an integer that is no float', -(10**400)),
    )
  ),
]
FINISH = [
  *(
    Row(name, sets(finish=value), 'finished by|finish_reason')
    for name, value in (
      ('given up', 'abort'),
      ('repetition', 'repetition'),
      ('an unknown finish', 'sunset'),
      ('no finish', None),
      ('a number as finish', 7),
    )
  ),
  Row(
    'cut before the limit',
    edits(lambda a: _ended(a, [11, 12], 'length')),
    '2 tokens, cut at a limit, though 12',
  ),
  Row(
    'ends by no end token',
    edits(lambda a: _ended(a, [11, 12], 'stop', 12)),
    'ends with the id 12, which is no end token',
  ),
  Row(
    'goes on behind an end token',
    edits(lambda a: _ended(a, [11, END, 12, END], 'stop', END)),
    'goes on behind an end token',
  ),
  Row(
    'ends by a stop string of nobody',
    edits(lambda a: _ended(a, [11, 12], 'stop', 'x')),
    'which is no end token',
  ),
  Row(
    'broken logits',
    edits(lambda a: _ended(a, [11, END], 'stop', 'NaN happened')),
    'whose logits are no numbers',
    ('sglang',),
  ),
]
SPANS = [
  Row('default weights', spanned(lambda v, n: [('default', 0, n)]), 'default'),
  Row(
    "another run's weights",
    spanned(lambda v, n: [('deadbeef-0-0', 0, n)]),
    "completion by 'deadbeef-0-0' in place of",
  ),
  Row('no versions', sets(spans=None), 'does not name the version'),
  Row('a number as versions', sets(spans=7), 'does not name the version'),
  Row(
    'a gap in the versions',
    spanned(lambda v, n: [(v, 1, n)]),
    'do not join at 1',
  ),
  Row(
    'versions that overlap',
    spanned(lambda v, n: [(v, 0, n), (v, n - 1, n)]),
    'do not join at',
  ),
  Row('versions of less', spanned(lambda v, n: [(v, 0, n - 1)]), r'of \d+ of'),
  Row('versions of more', spanned(lambda v, n: [(v, 0, n + 1)]), 'of .*tokens'),
  Row(
    'versions that go back',
    spanned(lambda v, n: [(v, 0, -1)]),
    'do not join',
  ),
  Row('a text as end', spanned(lambda v, n: [(v, 0, f'{n}')]), 'do not join'),
  Row('a bool as end', spanned(lambda v, n: [(v, 0, True)]), 'do not join'),
  Row(
    'some by default weights',
    spanned(lambda v, n: [('default', 0, n - 1), (v, n - 1, n)][n == 1 :]),
    'default',
  ),
  Row(
    'versions without names',
    whole(
      lambda body: {
        **body,
        'choices': [{**body['choices'][0], 'weight_versions': [{}]}],
      }
    ),
    'without version',
    ('vllm',),
  ),
  Row(
    'another model',
    sets(model='policy'),
    "completion by 'policy' in place of",
    ('vllm',),
    adapters=True,
  ),
  Row(
    'no model',
    whole(lambda body: {k: v for k, v in body.items() if k != 'model'}),
    'answer without model',
    ('vllm',),
    adapters=True,
  ),
]
ANSWERS = [*TRANSPORT, *SHAPES, *IDS, *LOGP, *FINISH, *SPANS]

ROLLBACK = {
  'success': False,
  'message': 'Failed to update weights: bad.\nRolling back to original weights',
}
UNFLUSHED = {
  'success': False,
  'message': 'Weights were updated, but the cache was not flushed because',
}
NOT_ENABLED = {'success': False, 'error_message': 'LoRA is not enabled.'}
RANK = {'error': {'message': 'LoRA rank 64 is greater than max_lora_rank 16.'}}
MISSING = answers(404, {'detail': 'Not Found'})

LOADS = [
  Row(
    'no developer mode',
    MISSING,
    'Not Found.*start it with VLLM_SERVER_DEV_MODE=1',
    ('vllm',),
    kind='pause',
    heals=False,
  ),
  Row('pause fails', answers(500), 'HTTP 500', ('vllm',), kind='pause'),
  Row(
    'a worker fails',
    answers(500, {'error': {'message': 'no such file'}}),
    'HTTP 500, 3 times, to /collective_rpc.*no such file',
    ('vllm',),
    kind='collective_rpc',
  ),
  Row(
    'the cache is not emptied',
    answers(200, {'success': False}),
    'no success, to /reset_prefix_cache.*false',
    ('vllm',),
    kind='reset_prefix_cache',
  ),
  Row(
    'the version is not named',
    answers(200, {'success': False}),
    'no success, to /update_weight_version',
    ('vllm',),
    kind='update_weight_version',
  ),
  Row('resume fails', answers(503), 'HTTP 503', ('vllm',), kind='resume'),
  Row(
    'goes back to old weights',
    answers(400, ROLLBACK),
    'HTTP 400.*Rolling back',
    ('sglang',),
    kind='update_weights_from_disk',
  ),
  Row(
    'the cache is not flushed',
    answers(400, UNFLUSHED),
    'HTTP 400.*not flushed',
    ('sglang',),
    kind='update_weights_from_disk',
  ),
  Row(
    'success is a text',
    answers(200, {'success': 'yes'}),
    'no success',
    ('sglang',),
    kind='update_weights_from_disk',
  ),
  Row(
    'a page as success',
    answers(200, HTML),
    'without success.*Bad gateway',
    ('sglang',),
    kind='update_weights_from_disk',
    heals=False,
  ),
  Row(
    'too large a rank',
    answers(500, RANK),
    'LoRA rank 64 is greater than max_lora_rank 16',
    ('vllm',),
    adapters=True,
    kind='load_lora_adapter',
  ),
  Row(
    'no adapters at run time',
    MISSING,
    'start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True',
    ('vllm',),
    adapters=True,
    kind='load_lora_adapter',
    heals=False,
  ),
  Row(
    'the folder is not seen',
    answers(404, {'error': {'message': 'No adapter found for <path>'}}),
    'No adapter found for.*read the folder in config.engine.folder',
    ('vllm',),
    adapters=True,
    kind='load_lora_adapter',
    heals=False,
  ),
  Row(
    'no adapters',
    answers(400, NOT_ENABLED),
    'LoRA is not enabled',
    ('sglang',),
    adapters=True,
    kind='load_lora_adapter',
  ),
  Row(
    'an adapter is not loaded, with status 200',
    answers(200, NOT_ENABLED),
    'no success, to /load_lora_adapter.*LoRA is not enabled',
    ('sglang',),
    adapters=True,
    kind='load_lora_adapter',
  ),
]


def cases(rows: list[Row]) -> list[tuple[Row, str, bool]]:
  """Each row with each dialect, and adapters or not."""
  return [
    (row, dialect, adapters)
    for row in rows
    for dialect in row.dialects
    for adapters in (True, False)
    if row.adapters in (None, adapters)
  ]


def table() -> str:
  """The faults, and what happens."""
  lines = []
  for row in (*ANSWERS, *LOADS):
    what = 'asked again, or of another' if row.heals else 'asked of another'
    kind = row.kind or 'a completion'
    lines.append(f'{row.name:42} {kind:25} {"+".join(row.dialects):13} {what}')
  return '\n'.join(lines)


if __name__ == '__main__':
  print(table())
