"""The launchers, and stand-ins for the programs that they call."""

import importlib.util
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent.parent
LAUNCH = ROOT / 'launch'


def local():
  """launch/local.py as a module; no package has it."""
  spec = importlib.util.spec_from_file_location('local', LAUNCH / 'local.py')
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def stand_in(folder, name, text):
  """Puts a shell script into a folder, which `run` puts before the others."""
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(f'#!/usr/bin/env bash\n{text}')
  (folder / name).chmod(0o755)


def run(*words, programs=None, timeout=60, **variables):
  """A script with its arguments; `programs` is a folder of stand-ins."""
  path = os.environ['PATH']
  return subprocess.run(
    [str(word) for word in words],
    cwd=ROOT,
    env={
      **os.environ,
      'PATH': f'{programs}:{path}' if programs else path,
      **{name: str(value) for name, value in variables.items()},
    },
    capture_output=True,
    text=True,
    timeout=timeout,
  )
