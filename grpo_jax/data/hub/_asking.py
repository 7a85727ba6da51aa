"""Asking the Hub: again where that may help, and in one sentence where not.

`huggingface_hub` asks again for the bytes of a file alone. Here 429 and 5xx are
asked again for everything, and a connection that fails; what a proxy or a
server asks to wait is waited.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import contextvars
import errno
import random
import sys
import time
from typing import Any

from grpo_jax.config import plain_text

TRIES = 6
_TRIES_ALONE = 2  # where nobody answers, as on a machine without a network
_MOST_SECS = 60.0  # of one wait


Tell = Callable[[str], None]


def _to_stderr(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


_tell: contextvars.ContextVar[Tell] = contextvars.ContextVar(
  'tell', default=_to_stderr
)


@contextlib.contextmanager
def telling(tell: Tell) -> Iterator[None]:
  """In it sentences on downloads and waits go here, and not to stderr."""
  token = _tell.set(tell)
  try:
    yield
  finally:
    _tell.reset(token)


def tell(text: str) -> None:
  """Says what takes its time."""
  _tell.get()(text)


class HubError(ValueError):
  """What was asked for cannot be had; the message says what to do."""


class Unreachable(HubError):
  """The Hub does not answer, or must not be asked."""


def ask(call: Callable[[], Any], name: str) -> Any:
  """What a call of `huggingface_hub` returns; `tell` hears of each wait.

  Args:
    call: May be called several times.
    name: What it is about, for messages: 'owner/name'.

  Raises:
    HubError: It has failed, and would fail again.
    Unreachable: Nobody has answered.
    OSError: The disk has failed.
  """
  tries = 0
  while True:
    try:
      return call()
    except Exception as error:  # three libraries raise what they like
      tries += 1
      secs = _wait_secs(error, tries)
      if secs is None:
        raise refusal(error, name) from error
      tell(f'{name}: {_reason(error)}; asking again in {secs:.0f} s.')
      time.sleep(secs)


def is_offline() -> bool:
  """Whether the Hub must not be asked: HF_HUB_OFFLINE is set."""
  from huggingface_hub import constants

  return constants.HF_HUB_OFFLINE


def _chain(error: BaseException) -> Iterator[BaseException]:
  """An error and what it came from: the first is often only a consequence."""
  seen = set()
  found: BaseException | None = error
  while found is not None and id(found) not in seen:
    seen.add(id(found))
    yield found
    found = found.__cause__ or found.__context__


def status_of(error: BaseException) -> int | None:
  """The status of the answer that an error came from; None if none came."""
  for one in _chain(error):
    status = getattr(getattr(one, 'response', None), 'status_code', None)
    if isinstance(status, int):
      return status
  return None


def _wait_secs(error: BaseException, tries: int) -> float | None:
  """How long to wait before the next try; None if there is to be none."""
  from huggingface_hub import errors

  if isinstance(error, errors.OfflineModeIsEnabled):
    return None
  status = status_of(error)
  if status is None and not _is_of_network(error):
    return None
  if status is not None and status != 429 and status < 500:
    return None
  if tries >= (TRIES if status else _TRIES_ALONE):
    return None
  # With jitter, because all hosts of a run begin at the same time.
  usual = min(2.0 ** (tries - 1), _MOST_SECS) * (1 + random.random() / 2)
  return max(usual, min(_retry_after(error), _MOST_SECS))


def _retry_after(error: BaseException) -> float:
  for one in _chain(error):
    headers = getattr(getattr(one, 'response', None), 'headers', None)
    if headers is not None:
      try:
        return float(headers.get('Retry-After', 0))
      except (TypeError, ValueError):  # a date
        return 0.0
  return 0.0


def _is_of_network(error: BaseException) -> bool:
  """Whether a connection has failed, and no file of this machine."""
  from huggingface_hub import errors

  for one in _chain(error):
    if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
      return False
    # Those of httpx, which is httpx2 for newer versions, have no common base
    # with anything that could be imported here.
    is_of_client = type(one).__module__.partition('.')[0].startswith('httpx')
    if is_of_client or isinstance(one, ConnectionError | TimeoutError):
      return True
    if isinstance(one, errors.LocalEntryNotFoundError):
      return True  # what it makes of a connection that fails
    if isinstance(one, OSError) and 'Consistency check failed' in str(one):
      return True  # fewer bytes than were announced
  return False


def _reason(error: BaseException) -> str:
  status = status_of(error)
  if status == 429:
    return 'the Hub has had too many requests (429)'
  if status is not None:
    return f'the Hub has answered {status}'
  # The cause says more than what was made of it.
  *_, first = _chain(error)
  return f'the Hub does not answer ({plain_text.named(first)})'


def refusal(error: BaseException, name: str) -> Exception:
  """One sentence for what cannot be had.

  Args:
    error: What `huggingface_hub` has raised.
    name: 'owner/name'.
  """
  from huggingface_hub import constants
  from huggingface_hub import errors
  from huggingface_hub import get_token

  page = f'{constants.ENDPOINT}/{name}'
  has_token = get_token() is not None
  signed = 'with the token of HF_TOKEN' if has_token else 'without HF_TOKEN'
  status = status_of(error)
  if isinstance(error, errors.OfflineModeIsEnabled):
    return Unreachable(
      f'There is no {name} here, nor in the cache {constants.HF_HUB_CACHE}, '
      'and HF_HUB_OFFLINE is set; correct the name, unset that, or download it '
      'first.'
    )
  if isinstance(error, errors.GatedRepoError):
    return HubError(
      f'{name} on the Hub is gated, and cannot be read {signed}; accept its '
      f'terms at {page} and set HF_TOKEN to a token of that account.'
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return HubError(
      f'{name} on the Hub has no such revision; give one of its branches, tags '
      f'or commits, see {page}.'
    )
  if isinstance(error, errors.RepositoryNotFoundError):
    return HubError(
      f'There is no {name} here, and none on the Hub that can be read {signed};'
      ' correct the name, or set HF_TOKEN to a token that may read it.'
    )
  if isinstance(error, errors.RemoteEntryNotFoundError):
    return HubError(
      f'{name} on the Hub has lost a file that it lists ({error}); name '
      'another commit.'
    )
  if status in (401, 403):
    return HubError(
      f'The Hub does not show {name} {signed} ({status}); set HF_TOKEN to a '
      'token that may read it.'
    )
  if status is not None:
    return HubError(
      f'The Hub has not given {name}: {_reason(error)}; try again later.'
    )
  if _is_of_network(error):
    return Unreachable(
      f'{name} is not here, and {_reason(error)}; correct the name if it is a '
      f'path, or see whether {constants.ENDPOINT} can be reached from here.'
    )
  if isinstance(error, OSError):  # of this machine
    return error
  return HubError(f'{name} cannot be read: {plain_text.named(error)}.')
