"""A virtual environment for each peer, made when it is missing."""

import argparse
import pathlib
import subprocess
import sys

PACKAGES = {
  'tunix': ('google-tunix==0.1.7',),
  # Where PIP_EXTRA_INDEX_URL names an index of builds for CPUs, the build from
  # there; else PyPI's, which is larger and times the same.
  'trl': (
    'torch==2.13.0',
    'trl==1.16.0',
    'transformers==5.23.0',
    'datasets==5.2.0',
    'accelerate==1.15.0',
  ),
}


def add_arguments(parser: argparse.ArgumentParser, limit_secs: float) -> None:
  """Where the environments are, and how long a run in one may take."""
  parser.add_argument(
    '--envs',
    type=pathlib.Path,
    default=pathlib.Path(__file__).resolve().parents[2] / '.bench',
    help="folder of the peers' environments",
  )
  parser.add_argument(
    '--limit_secs', type=float, default=limit_secs, help='per run'
  )


def python_of(peer: str, envs: pathlib.Path) -> str:
  """The interpreter in which a peer can be imported.

  Args:
    peer: A key of `PACKAGES`.
    envs: The folder that holds a virtual environment for each peer.

  Returns:
    The path of its Python. The environment is complete: an installation that
    was interrupted is made again.
  """
  folder = envs / peer
  python, complete = folder / 'bin' / 'python', folder / 'complete'
  if not complete.exists():
    print(f'{peer}: installing into {folder}', file=sys.stderr)
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    subprocess.run(
      [python, '-m', 'pip', 'install', '-q', *PACKAGES[peer]], check=True
    )
    complete.write_text('\n'.join(PACKAGES[peer]))
  return str(python)
