"""A folder goes to the Hub, as one commit."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import hashlib
import os
import pathlib
from typing import Any

from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _names

MARK = 'made-with-grpo_jax'  # a tag in README.md of what was pushed from here
_EMPTY = {'.gitattributes', 'README.md'}  # what a new repository may hold
# The files of a push that go with the next one.
_OURS = ['model*.safetensors', 'model.safetensors.index.json', 'adapter_*']
_SEAL = len(f'<!-- {16 * "0"} -->\n')


def repository_of(text: str) -> str:
  """What a text names, as 'owner/name'; nobody is asked.

  Raises:
    ValueError: It is no name of a repository alone.
  """
  name = _names.parse(f'hf://{text.removeprefix("hf://")}')
  if name is None or name.revision or name.commit or name.file:
    raise ValueError(
      f'{text!r} is no repository of the Hub; give owner/name alone.'
    )
  return name.repository


def check(text: str, public: bool = False, overwrite: bool = False) -> str:
  """The repository that a folder may be pushed to, as 'owner/name'.

  Args:
    text: Its name; it need not exist.
    public: Whether everybody may see it.
    overwrite: Whether it may hold what was not pushed from here.

  Raises:
    ValueError: It is no name, there is no token, or it holds something else.
  """
  repository = repository_of(text)
  api = _api(repository)
  _check_token(api, repository)
  exists = _ask(lambda: api.repo_exists(repository), repository)
  if not exists:
    return repository
  info = _ask(lambda: api.repo_info(repository), repository)
  if info.private == public:
    raise _asking.HubError(
      f'{repository} on the Hub is private, and --public makes no private '
      'repository public; change it on its page, or leave that out.'
      if public
      else f'{repository} on the Hub is public; give --public (of a run, '
      'config.export.public=True), or another name.'
    )
  inside = {one.rfilename for one in info.siblings or ()}
  found = '' if overwrite else _foreign(api, repository, inside)
  if found:
    raise _asking.HubError(
      f'{repository} on the Hub holds what was not pushed from here '
      f'({found}); give --overwrite (of `grpo-jax convert`) to replace it, or '
      'another name.'
    )
  return repository


def push(
  folder: str | os.PathLike[str], repository: str, public: bool, message: str
) -> str:
  """Makes a repository hold the files of a folder, as one commit.

  Weights and adapters of an earlier push go; what else lies there stays.

  Args:
    folder: What is pushed. Only its README.md should name what it is.
    repository: From `check`.
    public: Whether everybody may see a repository that is new.
    message: Of the commit.

  Returns:
    The address of the commit.

  Raises:
    ValueError: It was refused, or the Hub cannot be reached.
  """
  api = _api(repository)

  def create() -> Any:
    return api.create_repo(repository, private=not public, exist_ok=True)

  def upload() -> Any:
    return api.upload_folder(
      repo_id=repository,
      folder_path=folder,
      commit_message=message,
      delete_patterns=_OURS,
      ignore_patterns=['.*'],
    )

  _ask(create, repository)
  nbytes = sum(
    path.stat().st_size
    for path in pathlib.Path(folder).rglob('*')
    if path.is_file()
  )
  _asking.tell(f'Uploading {nbytes / 1e9:.3g} GB to {repository}.')
  with _without_bars():
    return str(_ask(upload, repository).commit_url)


def sealed(text: str) -> str:
  """A card, with a last line by which a change of it is seen."""
  return f'{text}<!-- {_digest(text)} -->\n'


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
  """Without bars of progress, which would run through the lines of a run."""
  from huggingface_hub import utils

  shown = not utils.are_progress_bars_disabled()
  utils.disable_progress_bars()
  try:
    yield
  finally:
    if shown:
      utils.enable_progress_bars()


def _ask(call: Callable[[], Any], repository: str) -> Any:
  """As `_asking.ask`, with what is meant for somebody who writes."""
  try:
    return _asking.ask(call, repository)
  except _asking.Unreachable as error:
    raise _asking.Unreachable(
      f'{repository} cannot be pushed to: the Hub does not answer; try again '
      'later.'
    ) from error
  except _asking.HubError as error:
    if _asking.status_of(error) in (401, 403):
      raise _no_right(repository) from error
    raise


def _no_right(repository: str) -> _asking.HubError:
  return _asking.HubError(
    f'{repository} cannot be pushed to with the token of HF_TOKEN; set it to '
    'one that may write there, or give a name of your own.'
  )


def _check_token(api: Any, repository: str) -> None:
  """Raises a HubError if the token is one that may read alone."""
  told = _ask(api.whoami, repository)
  if told.get('auth', {}).get('accessToken', {}).get('role') == 'read':
    raise _no_right(repository)


def licence(text: str) -> str:
  """The licence that the card of a model names; '' if it names none."""
  name = _names.parse(text)
  if name is None or _asking.is_offline():
    return ''
  import huggingface_hub

  api = huggingface_hub.HfApi()
  try:
    ask = lambda: api.model_info(name.repository, revision=name.at)
    card = _asking.ask(ask, name.repository).card_data
  except _asking.HubError:  # it is only copied
    return ''
  found = card.get('license') if card else None
  if isinstance(found, list) and len(found) == 1:
    (found,) = found
  return found if isinstance(found, str) else ''


def _api(repository: str) -> Any:
  import huggingface_hub

  if _asking.is_offline():
    raise _asking.Unreachable(
      f'{repository} cannot be pushed to while HF_HUB_OFFLINE is set; unset it.'
    )
  if huggingface_hub.get_token() is None:
    raise _asking.HubError(
      f'{repository} cannot be pushed to without a token; set HF_TOKEN to one '
      'that may write.'
    )
  return huggingface_hub.HfApi()


def _foreign(api: Any, repository: str, inside: set[str]) -> str:
  """What of a repository nobody has pushed from here; '' if there is nothing.

  Files beside those that a push replaces stay, so they do not count.
  """
  if inside <= {'.gitattributes'}:
    return ''
  others = ', '.join(sorted(inside - _EMPTY)[:3]) or 'a README.md'
  if 'README.md' not in inside:
    return others
  load = lambda: api.hf_hub_download(
    repository, 'README.md', force_download=True
  )
  text = pathlib.Path(_ask(load, repository)).read_text(errors='replace')
  head = text.split('---')[1] if text.startswith('---') else ''
  if f'- {MARK}\n' not in head:
    return others
  card, seal = text[:-_SEAL], text[-_SEAL:]
  return '' if seal == f'<!-- {_digest(card)} -->\n' else 'another README.md'
