"""The docstrings are complete: every method and argument is in them."""

import inspect
import re

import pytest

from grpo_jax import losses
from grpo_jax.losses import contrib
from grpo_jax.losses import methods

SHARED = {'low', 'high', 'deviation', 'epsilon', 'kl_coefficient'}
FUNCTIONS = {
  f'{package.__name__.split(".")[-1]}.{name}': function
  for package in (methods, contrib, losses)
  for name in package.__all__
  if inspect.isfunction(function := getattr(package, name))
}


def is_stage_constructor(function):
  """`on_reward` and its kind: they alone pass on arguments by name."""
  return 'hyper' in inspect.signature(function).parameters


def described(function):
  """The names that the section `Args` of a docstring describes."""
  section = inspect.getdoc(function).partition('\nArgs:\n')[2]
  section = re.split(r'\n\S', section)[0]
  heads = re.findall(r'^  (\*{0,2}\w+(?:, \w+)*):', section, re.MULTILINE)
  return [name for head in heads for name in head.split(', ')]


@pytest.mark.parametrize(
  'function', list(FUNCTIONS.values()), ids=list(FUNCTIONS)
)
def test_every_argument_is_described(function):
  if is_stage_constructor(function):
    assert 'see `help(grpo_jax.losses)`' in ' '.join(function.__doc__.split())
    return
  parameters = inspect.signature(function).parameters.values()
  names = [str(p).split(':')[0].split('=')[0] for p in parameters]
  assert sorted(described(function)) == sorted(names)


def test_the_package_lists_every_method():
  listed = re.findall(r'^- ((?:`\w+`(?:, )?)+):', methods.__doc__, re.MULTILINE)
  names = [name for line in listed for name in re.findall(r'\w+', line)]
  arguments = [name for name in names if name in SHARED]
  assert set(arguments) == SHARED
  assert sorted(set(names) - SHARED) == sorted(methods.__all__)
  assert len(names) == len(set(names))


def test_the_package_lists_every_stage_constructor():
  stages = re.findall(r'(?:on|set|add)_[a-z_]+', losses.__doc__)
  expected = {
    name
    for name in losses.__all__
    if inspect.isfunction(function := getattr(losses, name))
    and is_stage_constructor(function)
  }
  assert expected == set(stages) and len(expected) == 11
