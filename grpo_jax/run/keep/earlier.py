"""What earlier starts of a run have left with servers that draw for it.

A start that is killed leaves adapters with the servers, and folders that they
have read. `servers.json` in the workdir has the word by which the next start
knows them, and where the folders lie.
"""

import contextlib
import pathlib
import re

from grpo_jax.engines.http.versions import Versions
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import records

_FILE = 'servers.json'
_WORD = re.compile('[0-9a-f]{8}')  # as `Versions` makes them


def recognise(workdir: pathlib.Path, versions: Versions) -> None:
  """Names the versions of a start as those of its run, and removes old folders.

  The workdir must be claimed: nobody else may have the word of a run. A copy of
  a workdir at another place is another run, and gets a word of its own. A file
  that cannot be read, or says something else, is written anew.

  Args:
    workdir: Of the run, absolute.
    versions: Of this start; none has been published.
  """
  # Resolved: the same workdir may be given by another path.
  file, place = workdir / _FILE, str(bucket.arrays(workdir.resolve()))
  try:
    saved = records.read(file) or {}
  except (ValueError, OSError):
    saved = {}
  word, folder = (str(saved.get(name)) for name in ('run', 'folder'))
  # Folders are removed by the word: no other text may stand in its place.
  if saved.get('workdir') == place and _WORD.fullmatch(word):
    versions.run = word
    versions.clear(pathlib.Path(folder))
  now = {
    'run': versions.run, 'folder': str(versions.folder), 'workdir': place
  }  # fmt: skip
  with contextlib.suppress(OSError):  # the disk may be full
    records.write(file, now)
  bucket.push(workdir)  # before servers have anything by this word
