"""The names in a config, looked for before JAX is imported.

Importing JAX and building a model take seconds. Most names can be looked up
without: those of this package in a table, and a 'module:function' of the
user's own in the file of the module, which is read and not imported. So a
misspelt name is told at once. What this does not see, the building of the run
says later.
"""

from collections.abc import Iterable
import difflib
import os

from grpo_jax import data
from grpo_jax import rewards
from grpo_jax.config import Config
from grpo_jax.config import importing
from grpo_jax.data import hub
from grpo_jax.environments import forms
from grpo_jax.run.build import data as build_data
from grpo_jax.run.keep.objects import is_object

_METHODS = 'grpo_jax.losses.methods'


def check(config: Config) -> None:
  """Looks for all that a training run names.

  Args:
    config: Of the run. What it says of objects from Python is passed over.

  Raises:
    ValueError: A name stands for nothing; the nearest one is named.
    OSError: A file of data is not there.
  """
  check_evaluation(config)
  check_learning(config)
  if config.export.push_to:
    hub.repository_of(config.export.push_to)
  for source in build_data.sources_in(config.data.train):
    _check_source(source.name, 'train')


def check_learning(config: Config) -> None:
  """As `check`, of what can be planned where neither data nor rewards are."""
  check_model(config)
  _check_method(config.learner.method)
  for field, name in config.learner.fields.items():
    if not is_object(name):
      importing.find(name, f'config.learner.fields[{field!r}]={name!r}')
  if ':' in (name := config.optim.name):  # the others are of the config's table
    importing.find(name, f'config.optim.name={name!r}')


def check_evaluation(config: Config) -> None:
  """As `check`, of what an evaluation needs."""
  check_model(config)
  for reward in config.rewards:
    if not is_object(reward.name):
      rewards.find(reward.name)
  played = config.environment
  others = [
    one['name'] if isinstance(one, dict) and 'name' in one else one
    for one in played.others.values()
  ]
  for name in (played.name, *others):
    if isinstance(name, str) and name and not is_object(name):
      forms.find(name)
  if name := config.evaluation.answer:
    importing.find(name, f'config.evaluation.answer={name!r}')
  for source in build_data.sources_in(config.data.heldout):
    _check_source(source.name, 'heldout')


def _check_method(name: str) -> None:
  """As `check`, of a method."""
  flag = '--config.learner.method'
  if is_object(name):
    return
  if ':' in name:
    importing.find(name, f'{flag}={name!r}')
  elif name not in (known := importing.listed(_METHODS)):
    raise no_method(name, flag, known)


def no_method(name: str, flag: str, known: Iterable[str]) -> ValueError:
  """The error of a method that is none of this package.

  Args:
    name: What was given.
    flag: The option that it comes from.
    known: The names of all methods.
  """
  near = difflib.get_close_matches(name, known, 1)
  meant = f'did you mean {near[0]}?' if near else 'see `grpo-jax methods`.'
  return ValueError(
    f'{flag}={name!r} is no method; {meant} A method of your own is named '
    "'module:function'."
  )


def check_model(config: Config) -> None:
  """As `check`, of a model of the user's own."""
  path = config.model.path
  if not is_object(path) and importing.is_function(path):
    importing.find(path, f'config.model.path={path!r}')


def _check_source(name: str, split: str) -> None:
  """As `check`, of a source of data; files are not opened."""
  if is_object(name) or name in build_data.BUILT_IN or os.path.exists(name):
    return
  prefix, colon, _ = name.partition(':')
  if (
    data.format_of(name) is not None or colon and prefix in build_data.PREFIXES
  ):
    return  # it may be a file in shards, or lie behind a cache
  if importing.is_function(name):
    importing.find(name, f'config.data.{split}={name!r}')
  elif name.isidentifier() and not data.files(name):
    known = build_data.BUILT_IN
    raise ValueError(
      f'config.data.{split}={name!r} is no source that is built in, and no file'
      f'{importing.nearest(name, known)}; give one of {", ".join(known)}, the '
      "path of a file, or 'module:function' for a source of your own."
    )
