"""Tests of the package: its doctests, and that importing it is light."""

import doctest
import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize('name', ['_arithmetic', '_prompts', '_tokenizer'])
def test_doctests(name):
  module = importlib.import_module(f'grpo_jax.data.{name}')
  result = doctest.testmod(module)
  assert result.attempted > 0 and result.failed == 0


def test_import_loads_no_heavy_package():
  code = (
    'import sys, grpo_jax; before = set(sys.modules); import grpo_jax.data;'
    ' print({"grain", "tokenizers", "jax"} & (set(sys.modules) - before))'
  )
  loaded = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert loaded.stdout.strip() == 'set()'
