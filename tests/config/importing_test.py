"""What is told of a module that is not imported."""

import importlib
import sys

import pytest

from grpo_jax.config import importing

pytestmark = pytest.mark.quick


@pytest.fixture
def module(tmp_path, monkeypatch):
  """Writes a module of a new name, in a folder that Python searches."""
  monkeypatch.syspath_prepend(tmp_path)
  made = []

  def write(text, name='seen_lab'):
    (tmp_path / f'{name}.py').write_text(text)
    importlib.invalidate_caches()
    made.append(name)
    return name

  yield write
  for name in made:
    sys.modules.pop(name, None)


FOUND = [
  'def score(): pass',
  'async def score(): pass',
  'class score: pass',
  'score = max',
  'from math import sqrt as score',
  'import json as score',
  'try:\n  from math import nothing\nexcept ImportError:\n  score = max',
  'if True:\n  def score(): pass',
  'a, score = min, max',
  # Here only importing can tell.
  'from math import *',
  'def __getattr__(name): return max',
  'globals()["sco" + "re"] = max',
]
MADE = [
  'def make():\n  global score\n  def score(): pass\nmake()',
  'match [max]:\n  case [score]: pass',
  'match [max]:\n  case [*score]: score = max',
  'match {1: 2}:\n  case {**score}: score = max',
  'match max:\n  case object() as score: pass',
  'import sys\nsys.modules[__name__].score = max',
  'import sys\nsys.modules[__name__].__dict__["score"] = max',
  'from sys import modules as m\nsetattr_ = m[__name__]\nsetattr_.score = max',
  'import importlib\nimportlib.import_module(__name__).score = max',
  'import builtins\nbuiltins.exec("sco" "re = max")',
  'def other(x=(score := max)): pass',
  'class A:\n  global score\n  def score(self): pass',
  'try:\n  1 / 0\nexcept ZeroDivisionError as score:\n  kept = score\n'
  'score = max',
]


@pytest.mark.parametrize('text', FOUND + MADE)
def test_what_may_be_there_is_not_refused(module, text):
  name = module(text)
  importing.find(f'{name}:score', 'It')
  assert name not in sys.modules
  if text in MADE:
    assert importing.imported(f'{name}:score', 'It')


@pytest.mark.parametrize(
  'text, function',
  [
    ('def score(): pass', 'scor'),
    ('def other():\n  score = 1\n', 'score'),
    ('class A:\n  def score(self): pass\n', 'score'),
    ('class A:\n  def __init__(self): self.score = max\n', 'score'),
    ('import logging\nlog = logging.getLogger(__name__)\n', 'score'),
    ('def score(:', 'score'),
    ('', ''),
  ],
)
def test_a_refusal_is_the_one_that_importing_gives(module, text, function):
  name = module(text)
  with pytest.raises(ValueError) as seen:
    importing.find(f'{name}:{function}', 'It')
  assert name not in sys.modules
  with pytest.raises(ValueError) as imported:
    importing.imported(f'{name}:{function}', 'It')
  assert str(seen.value) == str(imported.value)


@pytest.mark.parametrize(
  'name', ['no_lab.x:f', 'json.no:f', 'pickle.x:f', ':f']
)
def test_a_module_that_is_not_there(name):
  with pytest.raises(ValueError) as seen:
    importing.find(name, 'It')
  with pytest.raises(ValueError) as imported:
    importing.imported(name, 'It')
  first = str(seen.value).replace("'no_lab.x'", "'no_lab'")
  assert first == str(imported.value).replace("'no_lab.x'", "'no_lab'")


def test_the_list_of_a_module_is_read_and_not_made():
  from grpo_jax.losses import methods

  assert importing.listed('grpo_jax.losses.methods') == methods.__all__


def test_a_list_is_imported_where_one_may_be():
  found = importing.imported('string:ascii_letters', 'It', also=(str,))
  assert found.startswith('abc')
  with pytest.raises(ValueError, match='is no function'):
    importing.imported('string:ascii_letters', 'It', also=(list,))
