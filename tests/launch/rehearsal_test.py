"""launch/local.py with real processes, one of which is lost."""

import signal

import pytest

from tests.launch import rehearsal

pytestmark = pytest.mark.long


def test_a_run_that_loses_a_process_ends_with_the_bits_of_one_that_does_not(
  tmp_path,
):
  """The first process: without it the others end at once."""
  said = rehearsal.compare(tmp_path, rehearsal.SMALL, number=2, rank=0)
  assert 'process 0 has ended with exit code 137' in said
  assert '\n[0] {"before": ' in said and '\n[1] {"before": ' not in said


def test_a_process_that_is_preempted_saves_with_the_others(tmp_path):
  """It alone gets SIGTERM, as from a host that is taken away."""
  said = rehearsal.compare(
    tmp_path, rehearsal.SMALL, number=2, rank=1, by=signal.SIGTERM
  )
  assert 'exit codes [143, 143]: starts all again' in said
