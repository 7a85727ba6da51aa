"""Splits at commits that the Hub no longer has, and what stands for them.

The Hub makes a conversion to Parquet anew when it likes, and then its earlier
commits may vanish. A run names its data by their commit; it goes on where
another commit has the same files. What the files of a split are is known from
the list of the earlier commit, if it is in the cache, or else from the run that
has read them: `expect` is told their hash. Both are notes beside the lists of
`_repository`.
"""

from collections.abc import Sequence
import contextlib
import json

from grpo_jax.config import whole_files
from grpo_jax.data import _files
from grpo_jax.data.hub import _repository
from grpo_jax.data.hub._names import Name


def expect(name: Name, config: str, split: str, sha256: str) -> None:
  """Notes what the files of a split are.

  Args:
    name: With a commit.
    config: As it was asked for.
    split: As it was asked for.
    sha256: Of its files: `_files.fingerprint`.
  """
  _write('expected', name, config, split, sha256)


def keep(name: Name, config: str, split: str, commit: str) -> None:
  """Notes that another commit has the same files of a split."""
  _write('instead', name, config, split, commit)


def instead(name: Name, config: str, split: str) -> str:
  """The commit that stands for the one of a name; '' if none does."""
  return _read('instead', name, config, split)


def is_expected(
  name: Name, config: str, split: str, paths: Sequence[str]
) -> bool | None:
  """Whether files are those that a run has read; None if none has said."""
  expected = _read('expected', name, config, split)
  return _files.fingerprint(paths) == expected if expected else None


def _read(kind: str, name: Name, config: str, split: str) -> str:
  try:
    text = _repository.note(kind, str(name), config, split).read_text()
    return str(json.loads(text))
  except (OSError, ValueError):
    return ''


def _write(kind: str, name: Name, config: str, split: str, said: str) -> None:
  if _read(kind, name, config, split) == said:
    return
  note = _repository.note(kind, str(name), config, split)
  with contextlib.suppress(OSError):  # it only helps if a commit vanishes
    note.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write(note, json.dumps(said).encode())
