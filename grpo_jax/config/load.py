"""Config files: Python files with a function `get_config`."""

import os
import pathlib
import runpy
from typing import TYPE_CHECKING

from grpo_jax.config import importing

if TYPE_CHECKING:
  from ml_collections import ConfigDict

PACKAGE = pathlib.Path(__file__).parent.parent


def load_config(path: str | os.PathLike[str]) -> 'ConfigDict':
  """Reads a config file, for `train` or to change fields of it before.

  >>> config = load_config('configs/arithmetic.py:mu=8')
  >>> config.optim.lr = 1e-4
  >>> config.learner.epochs
  8

  Modules in the folder of the file can be imported from then on: so a config
  names a function in a file beside it, as in 'my_rewards:score'.

  Args:
    path: The path of a config file, perhaps with an argument after a colon. A
      path that begins with 'configs/' also names a file that comes with
      grpo_jax.

  Raises:
    ValueError: There is no such file, or it has no `get_config`.
  """
  file, *argument = installed(os.fspath(path)).split(':', 1)
  importing.add_folder(pathlib.Path(file).parent)
  get_config = runpy.run_path(file, run_name=_name(file)).get('get_config')
  if get_config is None:
    raise ValueError(
      f'The config file {file} has no function get_config; write one that '
      'returns grpo_jax.config.default() with your changes.'
    )
  return get_config(*filter(None, argument))


def _name(file: str) -> str:
  """What `__name__` is in a config file.

  The name by which it can be imported, if it lies in the current directory, so
  that it can name its own functions.

  >>> _name('lab/sums.py'), _name('../sums.py')
  ('lab.sums', '<run_path>')
  """
  parts = pathlib.Path(file).with_suffix('').parts
  named = all(part.isidentifier() for part in parts)
  return '.'.join(parts) if named else '<run_path>'


def installed(config: str) -> str:
  """The path of a config file, perhaps with an argument after a colon.

  'configs/x.py' stands for the file of the installed package, or of the
  checkout that is installed, unless there is such a file in the current
  directory.

  Raises:
    ValueError: There is no such file.
  """
  file = config.split(':')[0]
  if pathlib.Path(file).is_file():
    return config
  checkout = PACKAGE.parent
  # Beside an installed package are other packages, which may have configs too.
  is_checkout = (checkout / 'pyproject.toml').is_file()
  for folder in (PACKAGE, checkout) if is_checkout else (PACKAGE,):
    if file.startswith('configs/') and (folder / file).is_file():
      return config.replace(file, str(folder / file), 1)
  raise ValueError(
    f'There is no config file {file!r}; give the path of a Python file with '
    'get_config, such as configs/arithmetic.py.'
  )
