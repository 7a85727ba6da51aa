"""What a worker process does: it answers requests until its pipe closes.

`workers.Workers` starts it. A request is a pickle of `(function, arguments,
batched)`; `function` is a name for `rewards.resolve`, or a pickle of a
function. Without arguments it is imported, and nothing is answered. Otherwise
the first answer says that the function is there: importing it may
take long, and is not counted as judging, nor is what a function has marked by
`rewards.imports`. The second has the values. Answers are
JSON and no pickles, so that a judge cannot make the trainer run anything, and
begin with the nonce, so that what a judge itself writes to the pipe is no
answer.

A worker for functions with the mark `confined` imports a judge once, and forks
for each call. The child is confined (see `_confine.py`) before it sees the
completion, and ends with the call. So whatever it does, the next call finds the
worker as it was, and a call that has to be ended costs no new import. The
answer of the child begins with a word that is drawn for the call, so that
nobody answers who only writes to the pipe. Code that the judge evaluates runs
in the same process, and can find the word there if it looks for it. A worker
has one thread and does not run JAX, so it may fork.
"""

import asyncio
from collections.abc import Callable
import contextlib
import functools
import gc
import inspect
import json
import math
import os
import pickle
import resource
import secrets
import select
import signal
import sys
import time
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.rewards import _base
from grpo_jax.rewards import _guard
from grpo_jax.rewards import piped
from grpo_jax.rewards import process_state

_LONGEST = 300  # characters of a message
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def main(
  requests: int, answers: int, confined: dict[str, Any] | None = None
) -> None:
  """Answers the requests on one pipe by answers on another.

  Args:
    requests: The end of a pipe to read from.
    answers: The end of a pipe to write to.
    confined: The arguments of `_Apart`, to make each call apart.
  """
  piped.adopt_orphans()
  requests, answers = map(piped.hide, (requests, answers))
  functions: dict[str | bytes, Any] = {}
  apart = None if confined is None else _Apart(**confined)
  _send(answers, piped.READY, {})
  mine, is_mine = os.getpid(), os.fstat(answers).st_ino
  while True:
    nonce, function_key, arguments, batched = _request(requests)
    answer: dict[str, Any] = {}
    state = None
    if arguments is None:
      with contextlib.suppress(BaseException):  # the first call will say it
        functions[function_key] = _imported(function_key)
      continue
    try:
      if function_key not in functions:
        functions[function_key] = _imported(function_key)
      function = functions[function_key]
      arguments, kwargs = pickle.loads(arguments)
      if apart is not None:
        _prepare(function, arguments[2], batched)
      own = bool(_base.mark_of(function, _base.LIMITS_ITSELF))
      used = sum(os.times()[:4])  # by imports, and by the calls before
      called = {'called': True, 'limits_itself': own, 'cpu_secs': used}
      _send(answers, nonce, called)
      state = process_state.State()
      rows = batched and len(arguments[0])
      call = functools.partial(_called, function, arguments, kwargs, rows)
      answer = call() if apart is None else apart.call(call)
      if apart is not None and 'values' in answer:
        values = _values(answer['values'], rows or 1)
        bounds = _base.mark_of(function, _base.BOUNDS)
        answer['values'] = [_within(value, bounds) for value in values]
    except BaseException as error:
      answer = {'failure': _failure(error)}
    if os.getpid() != mine:  # a judge has forked, and this is its child
      os._exit(0)
    # After a lack of memory nothing is sure about what the judge has left.
    memory = apart is None and answer.get('failure') == 'memory'
    answer['last'] = memory or not (state is None or state.restore())
    if os.fstat(answers).st_ino != is_mine:
      os._exit(1)
    _send(answers, nonce, answer)
    if answer['last']:
      os._exit(0)


def _prepare(function: Any, examples: Any, batched: bool) -> None:
  """Lets a function that is marked import and read what it needs."""
  prepare = _base.mark_of(function, _base.CONFINED)
  if prepare is not None:
    for example in examples if batched else [examples]:
      prepare(example)


def _called(
  function: Any, arguments: Any, kwargs: Any, rows: int | bool
) -> dict[str, Any]:
  """One call of a judge: its 'values', or its 'failure'."""
  try:
    values = function(*arguments, **kwargs)
    if inspect.isawaitable(values):
      values = asyncio.run(_awaited(values))
    return {'values': _values(values, rows)}
  except BaseException as error:
    return {'failure': _failure(error)}


def _request(requests: int) -> tuple[bytes, str | bytes, bytes | None, bool]:
  nonce, request = piped.receive(requests)
  return nonce, *pickle.loads(request)


def _send(answers: int, nonce: bytes, answer: dict[str, Any]) -> None:
  piped.send(answers, nonce, json.dumps(answer).encode())


def _imported(function: str | bytes) -> Any:
  """A function, after all that it imports."""
  found = _loaded(function)
  first = _base.mark_of(found, _base.IMPORTS)
  if first is not None:
    first()
  return found


def _loaded(function: str | bytes) -> Any:
  if isinstance(function, bytes):
    return pickle.loads(function)
  return _base.resolve(function)


async def _awaited(value: Any) -> Any:
  return await value


def _failure(error: BaseException) -> str:
  """'raised ValueError: ...'; the text of the error itself may raise."""
  told = piped.ending(error)
  if isinstance(error, _base.RewardError):
    told = plain_text.said(error)
  return (told or f'raised {plain_text.named(error)}')[:_LONGEST]


def _values(returned: Any, rows: int | bool) -> list[float | str | None]:
  """What a judge returned, as one number, None or failure per completion."""
  if not rows:
    return [_value(returned)]
  if isinstance(returned, str | bytes | dict | set):
    returned = [returned]
  returned = list(returned)
  if len(returned) != rows:
    raise _base.RewardError(
      f'returned {len(returned)} values for {rows} completions'
    )
  return [_value(value) for value in returned]


def _value(value: Any) -> float | str | None:
  if not isinstance(value, _base.Outcome):
    return _number(value)
  return str(value.failure)[:_LONGEST] or _number(value.reward)


def _within(
  value: float | str | None, bounds: tuple[float, float] | None
) -> float | str | None:
  """A value, or that it failed because it lies outside its bounds."""
  if bounds is None or not isinstance(value, float):
    return value
  least, most = bounds
  if least <= value <= most:
    return value
  return f'returned {value!r}, which is not from {least:g} to {most:g}'


def _number(value: Any) -> float | None:
  if value is None:
    return None
  if getattr(value, 'ndim', None) == 0:
    value = value.item()
  if not isinstance(value, int | float):
    raise _base.RewardError(
      f'returned {plain_text.shown(value)} of type {plain_text.kind(value)}'
    )
  if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX or math.isnan(value):
    raise _base.RewardError(
      f'returned {plain_text.shown(value)}, which is no finite float32'
    )
  return float(value)


_ANSWER_FD = 3
_MOST_FDS = 4096
_LOOK_SECS = 0.1  # between two looks at the processor time
_MOST_BYTES = 1 << 26  # of an answer


class _Apart:
  """Makes calls in processes of their own.

  Args:
    limit_secs: The most processor time of a call.
    wall_limit_secs: The longest that it may take by the clock.
    readable: The paths that it may read.
  """

  def __init__(
    self, limit_secs: float, wall_limit_secs: float, readable: list[str]
  ):
    # As in the script of the guard, where `_confine` finds it under this name.
    sys.modules.setdefault('_guard', _guard)
    from grpo_jax.rewards import _confine

    self._limit_secs = limit_secs
    self._wall_limit_secs = wall_limit_secs
    _confine.give_up_privileges()
    self._confinement = _confine.Confinement(readable)

  def call(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a child: 'values', or a 'failure'."""
    out, into = os.pipe()
    word = secrets.token_hex(16).encode()
    gc.freeze()  # so that the child does not copy what lives here
    child = os.fork()
    if child == 0:
      self._judge(function, into, word)
    os.close(into)
    try:
      data, failure = self._read(out, child)
    finally:
      os.close(out)
      os.kill(child, signal.SIGKILL)
      _, status = os.waitpid(child, 0)
    if failure:
      return {'failure': failure}
    if data and not data.startswith(word):
      return {'failure': 'wrote to the pipe of answers'}
    try:
      answer = json.loads(data.removeprefix(word))
      if 'failure' in answer:
        return {'failure': str(answer['failure'])[:300]}
      return {'values': list(answer['values'])}
    except (ValueError, TypeError, KeyError, RecursionError):
      if data:
        return {'failure': 'wrote to the pipe of answers'}
      return {'failure': _ending(status)}

  def _judge(
    self, function: Callable[[], dict[str, Any]], into: int, word: bytes
  ) -> None:
    """The child: it never returns."""
    try:
      os.chdir('/')
      _guard.lower(resource.RLIMIT_CPU, int(self._limit_secs) + 1)
      self._confinement.enter()
      os.dup2(into, _ANSWER_FD)  # it may be that of the confinement until here
      into = _ANSWER_FD
      os.closerange(_ANSWER_FD + 1, _MOST_FDS)
      _base.is_confined = True
      answer = function()
    except BaseException as error:
      answer = {'failure': f'refused: {plain_text.named(error)}'[:300]}
    try:
      data = word + json.dumps(answer).encode() + b'\n'
      while data:
        data = data[os.write(into, data) :]
    finally:
      os._exit(0)

  def _read(self, out: int, child: int) -> tuple[bytes, str]:
    """The line that a child writes, or why there is none."""
    until = time.monotonic() + self._wall_limit_secs
    poll, data = select.poll(), b''
    poll.register(out, select.POLLIN)
    while not data.endswith(b'\n'):
      used = _cpu_secs(child)
      if used is None:  # the clock then counts
        used = self._wall_limit_secs - (until - time.monotonic())
      left = min(until - time.monotonic(), self._limit_secs - used)
      if left <= 0:
        return b'', 'time limit'
      if not poll.poll(1000 * min(left, _LOOK_SECS)):
        continue
      read = os.read(out, 1 << 16)
      if not read:
        break
      data += read
      if len(data) > _MOST_BYTES:
        return b'', 'wrote to the pipe of answers'
    return data, ''


def _cpu_secs(child: int) -> float | None:
  """The processor time of a child and all below it; None where it is unknown.

  A process that is new counts from its fork.
  """
  try:
    # The clock of another process; see clock_getcpuclockid(3).
    own = time.clock_gettime(~child << 3 | 2)
  except OSError:
    return None
  return own + (_guard.cpu_secs(child) or 0.0)


def _ending(status: int) -> str:
  """How a child ended that has given no answer."""
  code = os.waitstatus_to_exitcode(status)
  if code >= 0:
    return f'exit {code}'
  if code == -signal.SIGXCPU:  # by the kernel, before this process looked
    return 'time limit'
  return f'signal {_guard.signal_name(-code)}'
