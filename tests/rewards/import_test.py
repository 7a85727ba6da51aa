"""Test that importing the package is light."""

import subprocess
import sys


def test_import_loads_no_heavy_package():
  code = (
    'import sys, grpo_jax; before = set(sys.modules); import grpo_jax.rewards;'
    ' print({"jax"} & (set(sys.modules) - before))'
  )
  loaded = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert loaded.stdout.strip() == 'set()'
