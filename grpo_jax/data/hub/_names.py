"""How names of the Hugging Face Hub are written.

    owner/name                 the newest commit of its main branch
    owner/name@revision        a branch, a tag or a commit
    owner/name@revision@COMMIT what that was when it was looked up
    owner/name:file.gguf       one file of it
    hf://owner/name            a name of the Hub, whatever lies here

A path that exists here wins over a name without hf://.
"""

import dataclasses
import os
import re

_COMMIT = re.compile('[0-9a-f]{40}')
_PREFIX = re.compile(r'hf:(//)?((models|datasets)/(?=[^/]+/))?')
_NAME = re.compile(
  r'(?P<repository>[^/@:]+/[^/@:]+)'
  r'(@(?P<revision>[^@:]+?))??(@(?P<commit>[0-9a-f]{40}))?'
  r'(:(?P<file>[^:@]+))?'
)
# As the Hub checks them: https://huggingface.co/docs/huggingface_hub.
_PART = re.compile(r'(?![-.])[\w.-]+(?<![-.])', re.ASCII)
_HOSTS = 'huggingface.co', 'www.huggingface.co', 'hf.co'
_MOST = 96  # characters of a repository
_FILES = (
  '.arrayrecord', '.array_record', '.arrow', '.bin', '.gguf', '.json',
  '.jsonl', '.parquet', '.pth', '.safetensors',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Name:
  """A repository, or one of its files, at some commit.

  Attributes:
    repository: 'owner/name'.
    revision: As it was typed; '' for the main branch.
    commit: Of 40 digits; '' if it is not known yet.
    file: Its path in the repository; '' for the repository.
  """

  repository: str
  revision: str = ''
  commit: str = ''
  file: str = ''

  @property
  def at(self) -> str:
    """What the Hub is asked for."""
    return self.commit or self.revision or 'main'

  @property
  def is_newest(self) -> bool:
    """Whether it names no revision, so that the newest commit is meant."""
    return not self.revision and not self.commit

  def pinned(self, commit: str) -> 'Name':
    """The same at a commit, with the revision that was typed."""
    return dataclasses.replace(self, commit=commit)

  def __str__(self) -> str:
    # Without hf:// a name that ends as files do would be one of a file.
    looks_like_a_file = self.repository.lower().endswith(_FILES)
    found = f'hf://{self.repository}' if looks_like_a_file else self.repository
    for part in filter(None, (self.revision, self.commit)):
      found += f'@{part}'
    return f'{found}:{self.file}' if self.file else found


def parse(text: str) -> Name | None:
  """What a name stands for; None if it is no name of the Hub.

  >>> parse('Qwen/Qwen3-0.6B@v1')
  Name(repository='Qwen/Qwen3-0.6B', revision='v1', commit='', file='')
  >>> str(parse('hf://a/b:c.gguf').pinned(40 * '0'))[:8]
  'a/b@0000'
  >>> any(map(parse, ('a', './a/b', 'a/b/c', 'a/b.jsonl', 'arithmetic')))
  False

  Raises:
    ValueError: It begins with hf: and is none, or is the address of a page of
      the Hub.
  """
  _refuse_page(text)
  prefix = _PREFIX.match(text)
  if prefix is None and os.path.exists(os.path.expanduser(text)):
    return None
  found = _NAME.fullmatch(text[prefix.end() :] if prefix else text)
  if found is None or not _is_repository(found['repository'], bool(prefix)):
    if prefix:
      raise ValueError(
        f'{text!r} is no name on the Hugging Face Hub; give hf://owner/name, '
        'with @revision behind it for another branch, tag or commit.'
      )
    return None
  revision, commit = found['revision'] or '', found['commit'] or ''
  return Name(found['repository'], revision, commit, found['file'] or '')


def _refuse_page(text: str) -> None:
  """Raises an error for what is copied from a browser; it says the name."""
  scheme, slashes, place = text.partition('://')
  if (slashes and scheme not in ('http', 'https')) or (
    not slashes and os.path.exists(os.path.expanduser(text))
  ):
    return
  host, *parts = re.split('[?#]', place if slashes else text)[0].split('/')
  own = os.environ.get('HF_ENDPOINT', '').partition('://')[2].strip('/')
  if host not in {*_HOSTS, own or _HOSTS[0]}:
    return
  parts = [part for part in parts if part]
  if parts[:1] in (['datasets'], ['models']):
    parts = parts[1:]
  name = '/'.join(parts[:2]) if len(parts) > 1 else 'owner/name'
  if len(parts) > 3 and parts[2] in ('tree', 'blob', 'resolve'):
    name += f'@{parts[3]}' if parts[3] != 'main' else ''
    name += f':{"/".join(parts[4:])}' if parts[-1].endswith('.gguf') else ''
  raise ValueError(
    f'{text!r} is the address of a page of the Hugging Face Hub; give the name '
    f'there, {name!r}.'
  )


def short(text: str) -> str:
  """A name with seven digits of its commit, to be shown.

  >>> short('a/b@' + 40 * '1'), short('runs/first')
  ('a/b@1111111', 'runs/first')
  """
  return re.sub('(@[0-9a-f]{7})[0-9a-f]{33}(?![0-9a-f])', r'\1', text)


def is_commit(revision: str) -> bool:
  """Whether a revision is a whole commit, which nothing can move."""
  return bool(_COMMIT.fullmatch(revision))


def _is_repository(text: str, is_told: bool) -> bool:
  usable = len(text) <= _MOST and not {'..', '--'} & {
    text[place : place + 2] for place in range(len(text))
  }
  is_file = text.lower().endswith(_FILES) and not is_told
  parts = text.split('/')
  return usable and not is_file and all(map(_PART.fullmatch, parts))
