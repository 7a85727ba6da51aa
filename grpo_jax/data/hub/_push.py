"""A folder goes to the Hub, as one commit."""

import os
import pathlib
from typing import Any

from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _names

MARK = 'made-with-grpo_jax'  # a tag in README.md of what was pushed from here
_EMPTY = {'.gitattributes', 'README.md'}  # what a new repository may hold


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
  exists = _asking.ask(lambda: api.repo_exists(repository), repository)
  if not exists:
    return repository
  ask = lambda: api.repo_info(repository)
  info = _asking.ask(ask, repository)
  if not info.private and not public:
    raise _asking.HubError(
      f'{repository} on the Hub is public; give --public (of a run, '
      'config.export.public=True), or another name.'
    )
  inside = {one.rfilename for one in info.siblings or ()}
  if (
    not overwrite
    and not inside <= {'.gitattributes'}
    and not _is_ours(api, repository, inside)
  ):
    raise _asking.HubError(
      f'{repository} on the Hub holds what was not pushed from here '
      f'({", ".join(sorted(inside - _EMPTY)[:3]) or "a README.md"}); give '
      '--overwrite (of `grpo-jax convert`) to replace it, or another name.'
    )
  return repository


def push(
  folder: str | os.PathLike[str], repository: str, public: bool, message: str
) -> str:
  """Makes a repository hold the files of a folder, and no others.

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
      delete_patterns='*',  # such as weights of an earlier push
    )

  _asking.ask(create, repository)
  nbytes = sum(
    path.stat().st_size
    for path in pathlib.Path(folder).rglob('*')
    if path.is_file()
  )
  _asking.tell(f'Uploading {nbytes / 1e9:.3g} GB to {repository}.')
  return str(_asking.ask(upload, repository).commit_url)


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


def _is_ours(api: Any, repository: str, inside: set[str]) -> bool:
  """Whether README.md has the mark of what was pushed from here."""
  if 'README.md' not in inside:
    return False
  load = lambda: api.hf_hub_download(
    repository, 'README.md', force_download=True
  )
  text = pathlib.Path(_asking.ask(load, repository)).read_text(errors='replace')
  head = text.split('---')[1] if text.startswith('---') else ''
  return f'- {MARK}\n' in head
