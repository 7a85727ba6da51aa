"""What earlier starts of a run have left with servers that draw for it.

A start that is killed leaves adapters with the servers, and folders that they
have read. `servers.json` in the workdir has the word by which the next start
knows them, and where the folders lie.
"""

import contextlib
import pathlib

from grpo_jax.engines.http.versions import Versions
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import records

_FILE = 'servers.json'


def recognise(workdir: pathlib.Path, versions: Versions) -> None:
  """Names the versions of a start as those of its run, and removes old folders.

  The workdir must be claimed: nobody else may have the word of a run. A copy of
  a workdir is another run, and gets a word of its own.

  Args:
    workdir: Of the run, absolute.
    versions: Of this start; none has been published.
  """
  file, place = workdir / _FILE, str(bucket.arrays(workdir))
  try:
    saved = records.read(file) or {}
  except ValueError:
    saved = {}
  if saved.get('workdir') == place:
    versions.run = saved['run']
    versions.clear(pathlib.Path(saved['folder']))
  now = {
    'run': versions.run, 'folder': str(versions.folder), 'workdir': place
  }  # fmt: skip
  with contextlib.suppress(OSError):  # the disk may be full
    records.write(file, now)
