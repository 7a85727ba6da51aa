"""A million records start as a thousand do."""

import json
import os
import subprocess
import sys

import pytest

from tests import pace
from tests.bench import reading
from tests.data import formats

MOST_MIB = 64  # more than for a thousand; a million texts are a few hundred


def measured(path, cache):
  """In a process of its own; see `tests/bench/reading.py`."""
  done = subprocess.run(
    [sys.executable, reading.__file__, f'--of={path}'],
    check=True,
    stdout=subprocess.PIPE,
    env={**os.environ, 'XDG_CACHE_HOME': str(cache)},
  )
  return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize('form', ['jsonl', 'array_record'])
def test_a_million_records_start_soon_and_in_little_memory(tmp_path, form):
  found = {}
  for number in (1000, 1_000_000):
    records = (
      {'question': f'Problem {n}: how many apples?', 'answer': str(n)}
      for n in range(number)
    )
    path = getattr(formats, form)(tmp_path / f'{number}.{form}', records)
    found[number] = measured(path, tmp_path / 'cache')
  most_secs = 25 * pace.counting_secs()  # of processor time
  assert found[1_000_000]['start_cpu'] < most_secs, found
  assert found[1_000_000]['memory'] < found[1000]['memory'] + MOST_MIB, found
