"""A run of seconds, for the tests of the command line."""

import pathlib
import runpy

from tests import runs

ROOT = pathlib.Path(__file__).parent.parent


def get_config():
  config = runpy.run_path(str(ROOT / 'configs/arithmetic.py'))['get_config']()
  config.update_from_flattened_dict(runs.SMALL)
  return config
