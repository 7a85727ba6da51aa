"""Fills tests/planning/compiled.json, which holds what the compiler has said.

  python -m tests.planning.record [WORD...]

compiles the rows that have no `fits` yet, or those in whose text all the words
are, such as `v5e:16x16 train_step`, as `grpo-jax plan` does. It needs libtpu,
and minutes for an update of a large model. `fits` is the compiler's verdict;
`peak_bytes` is what the program needs on one chip, and null if it was refused.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

from grpo_jax.config import Config
from grpo_jax.planning import compiling
from tests.planning import estimates

FILE = pathlib.Path(__file__).parent / 'compiled.json'


def _all() -> list[dict[str, Any]]:
  return json.loads(FILE.read_text())


def rows() -> list[dict[str, Any]]:
  """What is recorded; not those rows that are to be compiled yet."""
  return [row for row in _all() if 'fits' in row]


def config_of(row: dict[str, Any]) -> Config:
  """The run of a row."""
  return estimates.config(row['model'], **row['config'])


def request(row: dict[str, Any]) -> compiling.Request:
  """What a plan of this run asks the compiler."""
  values = dataclasses.asdict(config_of(row))
  return compiling.Request(values, row['topology'], 1, row['program'])


def main(words: list[str]) -> None:
  """Compiles, and writes the file after each program."""
  recorded = _all()
  for row in recorded:
    text = json.dumps(row)
    if all(word in text for word in words) if words else 'fits' not in row:
      (found,) = compiling.compile_all([request(row)])
      if found.error and found.fits:
        sys.exit(f'{text}: {found.error}')
      row['fits'] = found.fits
      row['peak_bytes'] = found.peak_bytes if found.fits else None
      print(json.dumps(row), found.error, f'{found.secs:.0f} s', flush=True)
      lines = ',\n'.join(map(json.dumps, recorded))
      FILE.write_text(f'[\n{lines}\n]\n')


if __name__ == '__main__':
  main(sys.argv[1:])
