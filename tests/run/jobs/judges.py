"""Judges of jobs."""

import time

from tests import judges


def fails(prompt, completion, example):
  del prompt, completion, example
  raise KeyError('These answers are bad.')


def slow(prompt, completion, example):
  """As `tests.judges.even`, and takes a while."""
  time.sleep(0.02)
  return judges.even(prompt, completion, example)
