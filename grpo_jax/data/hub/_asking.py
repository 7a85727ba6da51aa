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
import json
import random
import re
import sys
import time
from typing import Any
import urllib.parse

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
  _tell.get()(_without_secrets(text))


class HubError(ValueError):
  """What was asked for cannot be had; the message says what to do."""


class Unreachable(HubError):
  """The Hub does not answer, or must not be asked."""


class NoRevision(HubError):
  """There is the repository, but no such branch, tag or commit of it."""


def ask(call: Callable[[], Any], name: str, kind: str = 'model') -> Any:
  """What a call of `huggingface_hub` returns; `tell` hears of each wait.

  Args:
    call: May be called several times.
    name: What it is about, for messages: 'owner/name'.
    kind: 'model' or 'dataset'.

  Raises:
    HubError: It has failed, and would fail again.
    NoRevision: There is no such revision.
    Unreachable: Nobody has answered.
    OSError: The disk has failed.
  """
  _refuse_damaged_token()
  tries = 0
  while True:
    try:
      return call()
    except Exception as error:  # three libraries raise what they like
      tries += 1
      secs = _wait_secs(error, tries)
      if secs is None:
        refused = refusal(error, name, kind)
        # A traceback shows what the cause says too.
        is_open = all(_is_open(plain_text.said(x)) for x in _chain(error))
        raise refused from error if is_open else None
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
  is_refusal = status is not None and status != 429 and status < 500
  is_link = is_refusal and _other_host(error) != ''  # a new one may be good
  if is_refusal and not is_link:
    return None
  if tries >= (TRIES if status and not is_link else _TRIES_ALONE):
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


def _other_host(error: BaseException) -> str:
  """Who has answered, if it was not the Hub; '' if it was.

  The Hub sends large files from other hosts, by links that are good for an
  hour.
  """
  from huggingface_hub import constants

  for one in _chain(error):
    url = getattr(getattr(one, 'response', None), 'url', None)
    if url is not None:
      host = urllib.parse.urlsplit(str(url)).hostname or ''
      same = host == urllib.parse.urlsplit(constants.ENDPOINT).hostname
      return '' if same else host
  return ''


def _is_of_answer(error: BaseException) -> bool:
  """Whether what has come is no answer of the Hub, such as a login page."""
  kinds = json.JSONDecodeError | KeyError | TypeError | AttributeError
  return isinstance(error, kinds)


def _reason(error: BaseException) -> str:
  status = status_of(error)
  who = _other_host(error) if status is not None else ''
  if who:
    return f'{who}, which sends its files, has answered {status}'
  if status == 429:
    return 'the Hub has had too many requests (429)'
  if status is not None:
    return f'the Hub has answered {status}'
  # The cause says more than what was made of it.
  *_, first = _chain(error)
  return f'the Hub does not answer ({plain_text.named(first)})'


def _without_secrets(text: str) -> str:
  """A text without the token and without passwords in addresses.

  >>> _without_secrets("http://me:secret@host/a, b'Bearer hf_abc\\x0b'")
  "http://host/a, b'Bearer (not shown)'"
  """
  text = re.sub(r'(?<=://)[^/\s@\'"]+@', '', text)
  text = re.sub(r'(?i)(?<=bearer )[^\'"]+', '(not shown)', text)
  return re.sub(r'hf_[A-Za-z0-9]{16,}', '(not shown)', text)


def _is_open(text: str) -> bool:
  return _without_secrets(text) == text


def _refuse_damaged_token() -> None:
  """Raises an error if the token cannot be sent: the client would print it."""
  from huggingface_hub import get_token

  token = get_token() or ''
  if not all('!' <= one <= '~' for one in token):
    raise HubError(
      'The token of HF_TOKEN has a space, a control character or a letter that '
      'no token has; copy it again.'
    )


def page(name: str, kind: str) -> str:
  """The address of a repository, for people."""
  from huggingface_hub import constants

  folder = 'datasets/' if kind == 'dataset' else ''
  return _without_secrets(f'{constants.ENDPOINT}/{folder}{name}')


def refusal(error: BaseException, name: str, kind: str = 'model') -> Exception:
  """One sentence for what cannot be had, without secrets.

  Args:
    error: What `huggingface_hub` has raised.
    name: 'owner/name'.
    kind: 'model' or 'dataset'.
  """
  from huggingface_hub import errors

  if isinstance(error, errors.OfflineModeIsEnabled):
    found: Exception = _offline(name)
  elif (status := status_of(error)) is not None:
    found = _refused(error, name, kind, status)
  elif _is_of_network(error):
    found = Unreachable(
      f'{name} is not here, and {_reason(error)}; correct the name if it is a '
      f'path, or see whether {_endpoint()} can be reached from here.'
    )
  elif isinstance(error, OSError):  # of this machine
    return error
  elif _is_of_answer(error):
    found = Unreachable(
      f'What has answered for {_endpoint()} is not the Hub, or is damaged '
      f'({plain_text.named(error)}), so {name} cannot be read; see whether '
      'a page of the network asks you to log in, whether a proxy stands '
      'between, or correct HF_ENDPOINT.'
    )
  else:
    found = HubError(f'{name} cannot be read: {plain_text.named(error)}.')
  return type(found)(_without_secrets(str(found)))


def _endpoint() -> str:
  from huggingface_hub import constants

  return constants.ENDPOINT


def _offline(name: str) -> Unreachable:
  from huggingface_hub import constants

  return Unreachable(
    f'There is no {name} here, nor in the cache {constants.HF_HUB_CACHE}, '
    'and HF_HUB_OFFLINE is set; correct the name, unset that, or download it '
    'first.'
  )


def _refused(
  error: BaseException, name: str, kind: str, status: int
) -> HubError:
  """One sentence for an answer that is a refusal."""
  from huggingface_hub import errors
  from huggingface_hub import get_token

  has_token = get_token() is not None
  signed = 'with the token of HF_TOKEN' if has_token else 'without HF_TOKEN'
  if _other_host(error) and status < 500 and status != 429:
    return HubError(
      f'{name} on the Hub has not come: {_reason(error)}; its links are good '
      'for an hour, so try again, see whether the clock here is right, and '
      'whether a proxy stands between.'
    )
  if isinstance(error, errors.GatedRepoError):
    return HubError(
      f'{name} on the Hub is gated, and cannot be read {signed}; accept its '
      f'terms at {page(name, kind)} and set HF_TOKEN to a token of that '
      'account.'
    )
  if isinstance(error, errors.RevisionNotFoundError):
    return NoRevision(
      f'{name} on the Hub has no such revision; give another, see '
      f'{page(name, kind)}.'
    )
  if isinstance(error, errors.RepositoryNotFoundError):
    return HubError(
      f'There is no {name} here, and none on the Hub that can be read {signed};'
      ' correct the name, or set HF_TOKEN to a token that may read it.'
    )
  if isinstance(error, errors.RemoteEntryNotFoundError):
    return HubError(
      f'{name} on the Hub has lost a file that it lists; name another commit.'
    )
  if status in (401, 403):
    return HubError(
      f'The Hub does not show {name} {signed} ({status}); set HF_TOKEN to a '
      'token that may read it.'
    )
  return HubError(
    f'The Hub has not given {name}: {_reason(error)}; try again later.'
  )
