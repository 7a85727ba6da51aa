"""A server on loopback that speaks vLLM's dialect or SGLang's, and fails.

What it draws depends on the seed, on the prompt, on the weights that it has
read from a folder, and on the fields of a request that change the distribution
and are missing. So a test that knows these knows every token, and no other
server, version or request gives the same.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import json
import pathlib
import random
import socket
import struct
import sys
import threading
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.engines import protocol
from grpo_jax.engines.http import dialects

BASE = -1  # the weights that a server has when it starts
END = 9
STOP, STOP_ID = '\n\n', 13  # the token that completes the stop string

_RST = struct.pack('ii', 1, 0)

# What a server takes from a file beside the model, unless it is sent.
_DECIDING = {
  'vllm': (
    'temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty',
    'presence_penalty', 'frequency_penalty', 'max_tokens',
  ),
  'sglang': (
    'temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty',
    'presence_penalty', 'frequency_penalty', 'max_new_tokens',
  ),
}  # fmt: skip
_KNOWN = {
  *_DECIDING['sglang'], 'stop', 'stop_token_ids', 'ignore_eos',
  'no_stop_trim', 'skip_special_tokens', 'sampling_seed', 'min_new_tokens',
  'n',
}  # fmt: skip


class Reply(NamedTuple):
  """What is answered.

  Attributes:
    status: Of HTTP.
    body: JSON, or bytes as they are.
    headers: Beside those of every answer.
    how: '': whole; 'hangs': never; 'breaks': half of it, and then the
      connection is reset; 'ends': half of it; 'closes': nothing.
  """

  status: int = 200
  body: Any = b''
  headers: dict[str, str] = {}
  how: str = ''


class Fault(NamedTuple):
  """Something that a server does at some requests.

  Attributes:
    kind: Of the requests, the last word of their path.
    change: From the server and what answers well to a reply.
    at: Of the requests of that kind, from 0; None: at all.
  """

  kind: str
  change: 'Callable[[FakeServer, Callable[[], Reply]], Reply]'
  at: Sequence[int] | None = None


def draw(
  seed: int,
  prompt: Sequence[int],
  limit: int,
  weights: int,
  stops: bool = False,
  missing: Sequence[str] = (),
) -> tuple[list[int], list[float], Any]:
  """The ids and log-probabilities of a completion, and what ends it.

  Returns:
    Also None, END or STOP.
  """
  numbers = random.Random(repr((seed, [*prompt], weights, [*missing])))
  ids, logp = [], []
  for _ in range(limit):
    token = numbers.randrange(9, 19)
    ids.append(token)
    logp.append(-numbers.random())
    if token == END:
      return ids, logp, END
    if stops and token == STOP_ID:
      return ids, logp, STOP
  return ids, logp, None


def drawn(
  request: protocol.Request, number: int, weights: int
) -> tuple[list[int], list[float], int]:
  """What a healthy server draws: ids, log-probabilities, and the finish."""
  ids, logp, end = draw(
    dialects.key_to_seed(request.keys[number]),
    request.ids,
    request.limit,
    weights,
    bool(request.sampling.stop_strings),
  )
  finish = {None: protocol.TRUNCATED, END: protocol.ENDED}
  return ids, logp, finish.get(end, protocol.STOPPED)


def write(folder: pathlib.Path, params: int) -> None:
  """Writes weights, which are a number."""
  folder.mkdir()
  (folder / 'weights.json').write_text(json.dumps(params))


def _read(folder: str) -> int:
  return json.loads((pathlib.Path(folder) / 'weights.json').read_text())


class FakeServer:
  """One server.

  Attributes:
    url: Where it is.
    requests: Paths and bodies of all that came, in order.
    left: How many requests nobody waited for any more.
    waiting: How many requests wait for `release`.
    gate: Cleared, completions wait for `release`.
    late: Changes the answers of those that have waited.
    adapters: Weights by name.
    weights: Those of the model itself.
    label: What it calls them.
    paused: Whether it draws nothing.
  """

  def __init__(self, dialect: str, faults: Sequence[Fault] = ()):
    self.dialect, self.faults = dialect, [*faults]
    self.requests: list[tuple[str, Any]] = []
    self.left = self.waiting = 0
    self._counts: dict[str, int] = {}
    self.forget()
    self.late: Callable[[Reply], Reply] = lambda reply: reply
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='fake server', daemon=True
    )
    self._thread.start()
    # Bound as long as it lives, so that nobody gets the port while it is dead.
    self._bound = self._bind(0)
    self._port, self._listener = self._bound.getsockname()[1], None
    if sys.platform != 'linux':
      self._bound.close()  # elsewhere two sockets cannot be bound there
    self._open: dict[asyncio.StreamWriter, asyncio.Task] = {}
    self.gate = asyncio.Event()
    self.gate.set()
    self.rise()
    self.url = f'http://127.0.0.1:{self._port}'

  def forget(self) -> None:
    """Starts anew, without what it was told."""
    self.adapters: dict[str, int] = {}
    self.weights, self.label, self.paused = BASE, 'default', False

  def rise(self) -> None:
    """Listens, at the port of before."""

    async def begin():
      self._listener = await asyncio.start_server(
        self._serve, sock=self._bind(self._port)
      )

    self._run(begin())

  def _bind(self, port: int) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(('127.0.0.1', port))
    return found

  def die(self) -> None:
    """Listens no more, and resets every connection; in its own thread."""
    if self._listener is not None:
      self._listener.close()
      self._listener = None
    for writer in [*self._open]:
      _reset(writer)

  def kill(self) -> None:
    """As `die`, from another thread."""

    async def end():
      self.die()

    self._run(end())

  def hold(self) -> None:
    """Lets completions wait."""
    self._loop.call_soon_threadsafe(self.gate.clear)
    self._run(asyncio.sleep(0))

  def release(self) -> None:
    """Lets no completion wait any more."""
    self._loop.call_soon_threadsafe(self.gate.set)

  def close(self) -> None:
    """Ends it."""

    async def end():
      self.die()
      for task in [*self._open.values()]:
        task.cancel()
      await asyncio.gather(*self._open.values(), return_exceptions=True)
      await asyncio.sleep(0)

    self._run(end())
    self._bound.close()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def wait(self, until: Callable[['FakeServer'], bool]) -> None:
    """Waits until something is so, which takes no time if all is well."""

    async def look():
      async with asyncio.timeout(10):
        while not until(self):
          await asyncio.sleep(0.002)

    self._run(look())

  def bodies(self, kind: str) -> list[Any]:
    """What was posted to one kind of path."""
    return [body for path, body in self.requests if _kind(path) == kind]

  def _run(self, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

  async def _serve(self, reader, writer) -> None:
    task = asyncio.current_task()
    assert task is not None
    if self._listener is None:  # accepted before it died, and begun after
      _reset(writer)
      return
    self._open[writer] = task
    try:
      while True:
        head = (await reader.readuntil(b'\r\n\r\n')).decode().lower()
        size = 0
        for line in head.split('\r\n'):
          if line.startswith('content-length:'):
            size = int(line.partition(':')[2])
        data = await reader.readexactly(size)
        path = head.split(' ')[1]
        self.requests.append((path, json.loads(data) if data else None))
        reply = self._reply(*self.requests[-1])
        if not await self._send(reader, writer, reply, _kind(path)):
          return
    except (asyncio.IncompleteReadError, OSError):
      pass
    finally:
      del self._open[writer]
      writer.close()

  async def _send(self, reader, writer, reply: Reply, kind: str) -> bool:
    """Answers; returns whether the connection goes on."""
    if reply.how == 'closes':
      return False
    held = kind in ('completions', 'generate') and not self.gate.is_set()
    if held or reply.how == 'hangs':
      self.waiting += 1
      gone = asyncio.create_task(reader.read(1))
      gate = asyncio.create_task(
        asyncio.Event().wait() if reply.how == 'hangs' else self.gate.wait()
      )
      try:
        await asyncio.wait([gone, gate], return_when='FIRST_COMPLETED')
        if not gate.done():
          self.left += 1
          return False
      finally:
        self.waiting -= 1
        for one in (gone, gate):
          one.cancel()
        await asyncio.gather(gone, gate, return_exceptions=True)
      reply = self.late(reply)
    body = reply.body
    if not isinstance(body, bytes):
      body = json.dumps(body).encode()
    head = f'HTTP/1.1 {reply.status} Word\r\nContent-Length: {len(body)}\r\n'
    for name, value in reply.headers.items():
      head += f'{name}: {value}\r\n'
    if reply.how in ('breaks', 'ends'):
      body = body[: len(body) // 2]
    writer.write(head.encode() + b'\r\n' + body)
    await writer.drain()
    if reply.how == 'breaks':
      _reset(writer)
    return not reply.how

  def _reply(self, path: str, body: Any) -> Reply:
    """The answer to a request, changed by the first fault that it meets."""
    kind = _kind(path)
    number = self._counts.get(kind, 0)
    self._counts[kind] = number + 1
    for fault in self.faults:
      if fault.kind == kind and (fault.at is None or number in fault.at):
        return fault.change(self, lambda: self._answer(kind, path, body))
    return self._answer(kind, path, body)

  def _answer(self, kind: str, path: str, body: Any) -> Reply:
    known = _VLLM if self.dialect == 'vllm' else _SGLANG
    answer = known.get(path.partition('?')[0])
    if answer is None:
      return Reply(404, {'detail': 'Not Found'})
    with contextlib.suppress(FileNotFoundError):
      return answer(self, body)
    return _error(404, f'{kind} failed: No adapter found for <path>')


def _kind(path: str) -> str:
  return path.partition('?')[0].rsplit('/', 1)[1]


def _reset(writer: asyncio.StreamWriter) -> None:
  known = writer.get_extra_info('socket')
  with contextlib.suppress(OSError):
    known.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
  writer.transport.abort()


def _error(status: int, message: str) -> Reply:
  body = {'message': message, 'type': 'Error', 'param': None, 'code': status}
  return Reply(status, {'error': body})


def _health(server: FakeServer, body: Any) -> Reply:
  del server, body
  return Reply()


def _models(server: FakeServer, body: Any) -> Reply:
  del body
  names = 'policy', *server.adapters
  data = [{'id': name, 'object': 'model', 'parent': None} for name in names]
  return Reply(body={'object': 'list', 'data': data})


def _vllm_complete(server: FakeServer, body: Any) -> Reply:
  if server.paused:
    return _error(503, 'Generation is paused. Please retry after it resumes.')
  name, weights = body.get('model', 'policy'), server.weights
  if name in server.adapters:
    weights = server.adapters[name]
  elif name != 'policy':
    return _error(
      404, f'The model `{name}` does not exist. Valid aliases: policy.'
    )
  ids, logp, end = draw(
    body.get('seed'),
    body['prompt'],
    body.get('max_tokens', 16),
    weights,
    body.get('stop') == [STOP],
    [one for one in _DECIDING['vllm'] if one not in body],
  )
  if body.get('prompt_logprobs') is not None:
    return _vllm_scores(body)
  shown = [f'token_id:{one}' for one in ids]
  if not body.get('return_tokens_as_token_ids'):
    shown = ['a'] * len(ids)
  if body.get('return_weight_versions'):
    spans = [{'version': server.label, 'start': 0, 'end': len(ids)}]
  else:
    spans = None
  choice = {
    'index': 0,
    'text': 'ab',
    'finish_reason': 'length' if end is None else 'stop',
    'stop_reason': {None: None, END: END}.get(end, end),
    'token_ids': ids if body.get('return_token_ids') else None,
    'weight_versions': spans,
    'logprobs': None,
    'prompt_logprobs': None,
  }
  if body.get('logprobs') is not None:
    choice['logprobs'] = {'tokens': shown, 'token_logprobs': logp}
  return Reply(body={'id': 'cmpl-a1', 'model': name, 'choices': [choice]})


def score_of(token: int) -> float:
  """The log-probability of a token of a prompt."""
  return -token / 64


def _vllm_scores(body: Any) -> Reply:
  places: list[Any] = [None]
  top = body['prompt_logprobs']
  for token in body['prompt'][1:]:
    place = {str(token): {'logprob': score_of(token), 'rank': 5}}
    for likely in range(top):
      place[str(likely)] = {'logprob': score_of(likely), 'rank': likely + 1}
    places.append(place)
  choice = {'prompt_logprobs': places, 'finish_reason': 'length'}
  return Reply(body={'model': body['model'], 'choices': [choice]})


def _vllm_load(server: FakeServer, body: Any) -> Reply:
  name = body['lora_name']
  if name in server.adapters:
    return _error(
      400,
      f"The lora adapter '{name}' has already been loaded. If you want to load "
      "the adapter in place, set 'load_inplace' to True.",
    )
  server.adapters[name] = _read(body['lora_path'])
  text = f"Success: LoRA adapter '{name}' added successfully."
  return Reply(body=text.encode())


def _vllm_unload(server: FakeServer, body: Any) -> Reply:
  name = body['lora_name']
  if server.adapters.pop(name, None) is None:
    return _error(404, f"The lora adapter '{name}' cannot be found.")
  text = f"Success: LoRA adapter '{name}' removed successfully."
  return Reply(body=text.encode())


def _pause(server: FakeServer, body: Any) -> Reply:
  del body
  server.paused = True
  return Reply(body={'status': 'paused'})


def _resume(server: FakeServer, body: Any) -> Reply:
  del body
  server.paused = False
  return Reply(body={'status': 'resumed'})


def _reload(server: FakeServer, body: Any) -> Reply:
  assert body['method'] == 'reload_weights'
  server.weights = _read(body['kwargs']['weights_path'])
  return Reply(body={'results': [None]})


def _reset_cache(server: FakeServer, body: Any) -> Reply:
  del server, body
  return Reply(body={'success': True})


def _label(server: FakeServer, body: Any) -> Reply:
  server.label = body['new_version']
  return Reply(body={'success': True, 'new_version': server.label})


_VLLM = {
  '/health': _health,
  '/v1/models': _models,
  '/v1/completions': _vllm_complete,
  '/v1/load_lora_adapter': _vllm_load,
  '/v1/unload_lora_adapter': _vllm_unload,
  '/pause': _pause,
  '/collective_rpc': _reload,
  '/reset_prefix_cache': _reset_cache,
  '/update_weight_version': _label,
  '/resume': _resume,
}


def _sglang_complete(server: FakeServer, body: Any) -> Reply:
  asked = body['sampling_params']
  for name in asked:
    if name not in _KNOWN:
      return Reply(400, {'error': f'unknown field `{name}`, expected one of'})
  name, weights = body.get('lora_path'), server.weights
  if name is not None:
    if name not in server.adapters:
      text = f'Got LoRA adapter that has never been loaded: {name}'
      return Reply(400, {'error': {'message': text}})
    weights = server.adapters[name]
  if not asked['max_new_tokens']:
    return _sglang_scores(server, body)
  ids, logp, end = draw(
    asked.get('sampling_seed'),
    body['input_ids'],
    asked['max_new_tokens'],
    weights,
    asked.get('stop') == [STOP],
    [one for one in _DECIDING['sglang'] if one not in asked],
  )
  finish = {'type': 'length', 'length': len(ids)}
  if end is not None:
    finish = {'type': 'stop', 'matched': end}
  told = {
    'id': body.get('rid', 'g7'),
    'finish_reason': finish,
    'weight_version': server.label,
    'weight_versions': [{'version': server.label, 'start': 0, 'end': len(ids)}],
    'input_token_logprobs': [],
  }
  if body.get('return_logprob'):
    told['output_token_logprobs'] = [
      [value, token, None] for value, token in zip(logp, ids, strict=True)
    ]
  return Reply(body={'text': 'ab', 'output_ids': ids, 'meta_info': told})


def _sglang_scores(server: FakeServer, body: Any) -> Reply:
  ids, top = body['input_ids'], body['top_logprobs_num']
  scores = [[score_of(token), token, None] for token in ids]
  likely = [[score_of(token), token, None] for token in range(top)]
  told = {
    'finish_reason': {'type': 'length', 'length': 0},
    'weight_version': server.label,
    'input_token_logprobs': [[None, ids[0], None], *scores[1:]],
    'output_token_logprobs': [[-0.25, 11, None]],
    'input_top_logprobs': [None, *[likely for _ in ids[1:]]],
  }
  return Reply(body={'text': '', 'output_ids': [], 'meta_info': told})


def _sglang_load(server: FakeServer, body: Any) -> Reply:
  name = body['lora_name']
  if name in server.adapters:
    text = f'Failed to load LoRA adapter {name} because it is already loaded'
    return Reply(400, {'success': False, 'error_message': text})
  server.adapters[name] = _read(body['lora_path'])
  return Reply(body={'success': True, 'error_message': ''})


def _sglang_unload(server: FakeServer, body: Any) -> Reply:
  name = body['lora_name']
  if server.adapters.pop(name, None) is None:
    text = f'LoRA with name {name} does not exist. Loaded LoRAs: []'
    return Reply(400, {'success': False, 'error_message': text})
  return Reply(body={'success': True, 'error_message': ''})


def _from_disk(server: FakeServer, body: Any) -> Reply:
  server.weights = _read(body['model_path'])
  server.label = body['weight_version']
  text = 'Succeeded to update model weights.'
  return Reply(body={'success': True, 'message': text})


_SGLANG = {
  '/health': _health,
  '/v1/models': _models,
  '/generate': _sglang_complete,
  '/load_lora_adapter': _sglang_load,
  '/unload_lora_adapter': _sglang_unload,
  '/update_weights_from_disk': _from_disk,
}


def keys(count: int, seed: int = 0) -> np.ndarray:
  """u32[count,2], random."""
  numbers = np.random.default_rng(seed)
  return numbers.integers(2**32, size=(count, 2), dtype=np.uint32)
