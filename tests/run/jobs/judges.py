"""Judges of jobs."""


def fails(prompt, completion, example):
  del prompt, completion, example
  raise KeyError('These answers are bad.')
