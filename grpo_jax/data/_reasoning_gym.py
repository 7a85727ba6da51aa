"""The tasks of reasoning-gym, a package that makes problems by programs."""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import random
import threading
from typing import Any

import numpy as np

from grpo_jax.config import importing
from grpo_jax.config import plain_text

PACKAGE = 'reasoning-gym'
# The package seeds item i of seed s by s + i. So the seeds of a split begin
# this far from those of the next, and no split may have more items.
MOST_ITEMS = 1 << 24
_MOST_SEED = (1 << 32) // (2 * MOST_ITEMS) - 1  # numpy takes 32 bits
_SIZES = {'train': 10_000, 'heldout': 1_000}
_OURS = ('size', 'seed', 'level', 'curriculum')
_LOCK = threading.Lock()


class ReasoningGymSource:
  """Problems of one task of reasoning-gym, each with its answer.

  Record i of a split depends on the task, its parameters, the seed and i alone;
  in 'acre', which makes all its problems at once, on `size` too. No record of
  one split, nor of another seed, comes from a seed of the package that another
  has. Questions can still be equal by chance, where a task has few different
  ones.

  A *curriculum* changes the parameters on the way. Each stage has 'from', how
  many records a run has drawn from this source before the stage begins, and the
  parameters that change there; the others stay. A stream
  (`data.prompt_stream`, `data.mixture`) reads by `drawn`, which knows that
  number; `data.stages` reads each stage by index. Who reads the source itself
  by index, as an evaluation does, gets the last stage.

  >>> source = ReasoningGymSource('chain_sum', 'heldout', max_terms=2)
  >>> len(source), source[0]['prompt'][:15]
  (1000, 'State the final')

  Args:
    task: A name of the package, such as 'chain_sum'; README.md beside this
      module lists those that are fit.
    split: 'train' or 'heldout'.
    size: How many different records; by default 10,000, and 1,000 held out.
    seed: From 0 to 127; another seed has other records.
    level: A level of the package's own curriculum for the task, from 0 on: it
      stands for values of some parameters.
    curriculum: Stages, such as ({'from': 0}, {'from': 2000, 'max_terms': 4}). A
      stage may name a level too.
    **parameters: Parameters of the task, as the package documents them. They
      win over what a level says.

  Raises:
    ValueError: The package is missing or of another version; the task, the
      split or a parameter is unknown or not usable; or the task is not fit.
  """

  def __init__(
    self,
    task: str,
    split: str,
    size: int | None = None,
    seed: int = 0,
    level: int | None = None,
    curriculum: Sequence[Mapping[str, Any]] = (),
    **parameters: Any,
  ):
    _check_fit(task)
    if split not in _SIZES:
      raise ValueError(
        f'The source {_name(task)} has no split {split!r}; pass one of'
        f' {sorted(_SIZES)}.'
      )
    size = _SIZES[split] if size is None else size
    _check_number(task, 'size', size, 1, MOST_ITEMS)
    _check_number(task, 'seed', seed, 0, _MOST_SEED)
    self._task, self._size = task, size
    self._first = MOST_ITEMS * (2 * seed + list(_SIZES).index(split))
    self._stages: dict[int, dict[str, Any]] = {}  # by where they begin
    if level is not None:
      parameters = {'level': level, **parameters}
    for start, changes in _stages(task, curriculum).items():
      parameters = {**parameters, **changes}
      self._stages[start] = stage = _stage_parameters(task, parameters)
      try:
        self._record(0, stage)
      except Exception as error:  # whatever a program for problems may raise
        raise ValueError(
          f'The source {_name(task)} was given {stage!r:.200}, with which'
          f' {PACKAGE} cannot make a problem ({plain_text.named(error)});'
          ' correct these parameters.'
        ) from error

  def __repr__(self) -> str:
    return f'ReasoningGymSource({self._task!r}, {self._size} records)'

  def __len__(self) -> int:
    return self._size

  @property
  def starts(self) -> tuple[int, ...]:
    """How many records are drawn before each stage."""
    return tuple(self._stages)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._record(index, self._stages[self.starts[-1]])

  def drawn(self, index: int, number: int) -> dict[str, Any]:
    """A record in the stage that is due.

    Args:
      index: Which record.
      number: How many a run has drawn from this source before it.

    Returns:
      'prompt'; 'answer'; and in 'reasoning_gym' what its verifier needs: the
      'task', the 'parameters' and the 'metadata' of the record.
    """
    return self._record(index, self.stage(number))

  def stage(self, number: int) -> dict[str, Any]:
    """The parameters that are due after a number of records was drawn."""
    due = bisect.bisect_right(self.starts, number) - 1
    return self._stages[self.starts[due]]

  def _record(self, index: int, stage: dict[str, Any]) -> dict[str, Any]:
    index = range(self._size)[index]  # raises IndexError past the end
    item = _item(self._task, stage, self._first, self._size, index)
    return {
      'prompt': item['question'],
      'answer': item['answer'],
      'reasoning_gym': {
        'task': self._task,
        'parameters': stage,
        'metadata': item['metadata'],
      },
    }


def reasoning_gym_source(
  task: str, split: str, kwargs: Mapping[str, Any]
) -> ReasoningGymSource:
  """The source that a config names 'reasoning_gym:TASK'.

  Args:
    task: What stands behind the colon.
    split: 'train' or 'heldout'.
    kwargs: The other arguments of `ReasoningGymSource`.

  Returns:
    The source; `ReasoningGymSource` says what it raises.
  """
  kwargs = dict(kwargs)
  for name in ('task', 'split'):
    if name in kwargs:
      raise ValueError(
        f'The source {_name(task)} was given kwargs with {name!r}, which'
        ' follows from the name of the source and the place that names it;'
        ' leave it out.'
      )
  return ReasoningGymSource(task, split, **kwargs)


@functools.cache
def fitness() -> dict[str, Any]:
  """The table of tasks; `python -m tests.data.reasoning_gym_table` makes it.

  Returns:
    'version', that of the package; 'tasks', by name, each with 'refused', which
    is '' for a task that is fit, and what was measured; and 'refused', lists of
    a task, parameters that it must not have (null stands for any value), and
    why.
  """
  path = pathlib.Path(__file__).with_name('reasoning_gym.json')
  return json.loads(path.read_text())


def plain(value: Any) -> Any:
  """A value as JSON has it, which tells no tuple from a list.

  Raises:
    TypeError: JSON has no such value.
  """
  return json.loads(json.dumps(value, default=_to_plain))


def _to_plain(value: Any) -> Any:
  if isinstance(value, np.ndarray | np.generic):
    return value.tolist()
  raise TypeError(f'{value!r:.60} is of type {type(value).__name__}')


def _item(
  task: str, stage: dict[str, Any], first: int, size: int, index: int
) -> dict[str, Any]:
  """An item of the package: 'question', 'answer', 'metadata', as plain values.

  Some tasks draw from the global generators of Python and numpy, or seed them.
  So these are seeded here, and set back: an item then depends on its own seed,
  and nothing else of the process depends on the item.
  """
  dataset = _dataset(task, json.dumps(stage, sort_keys=True), first, size)
  with _LOCK:
    python, numpy = random.getstate(), np.random.get_state()
    try:
      random.seed(first + index)
      np.random.seed(first + index)
      return plain(dataset[index])
    finally:
      random.setstate(python)
      np.random.set_state(numpy)


@functools.lru_cache(maxsize=64)
def _dataset(task: str, stage: str, first: int, size: int) -> Any:
  parameters = json.loads(stage)
  return _library().create_dataset(task, seed=first, size=size, **parameters)


@functools.cache
def _library() -> Any:
  try:
    from reasoning_gym import factory
  except ImportError as error:
    raise ValueError(
      "A source whose name begins with 'reasoning_gym:' requires the package"
      f' {PACKAGE}, which is not installed; run'
      " pip install 'grpo_jax[reasoning-gym]'."
    ) from error
  installed = importlib.metadata.version(PACKAGE)
  if installed != fitness()['version']:
    raise ValueError(
      f'{PACKAGE} {installed} is installed, but which tasks are fit is known of'
      f' version {fitness()["version"]}; run pip install'
      f' {PACKAGE}=={fitness()["version"]}.'
    )
  return factory


def _check_fit(task: str) -> None:
  """Raises a ValueError if there is no such task, or if it is not fit."""
  tasks = fitness()['tasks']
  if task not in tasks:
    raise ValueError(
      f'{PACKAGE} has no task {task!r}{importing.nearest(task, tasks)}; pass'
      ' one of those that grpo_jax/data/README.md lists.'
    )
  if reason := tasks[task]['refused']:
    raise ValueError(
      f'The source {_name(task)} is refused, because {reason}; pass a task that'
      ' grpo_jax/data/README.md lists as fit.'
    )
  _library()


def _stages(
  task: str, curriculum: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
  """What each stage changes, by where it begins."""
  stages: dict[int, dict[str, Any]] = {}
  for stage in curriculum or ({'from': 0},):
    start = stage.get('from') if isinstance(stage, Mapping) else None
    if type(start) is not int or (
      start <= max(stages) if stages else start != 0
    ):
      raise ValueError(
        f'The curriculum of {_name(task)} has the stage {stage!r:.80}, but each'
        " is a dict with 'from', the number of prompts drawn before it: 0 in"
        ' the first stage, and more in each that follows.'
      )
    stages[start] = {k: v for k, v in stage.items() if k != 'from'}
  return stages


def _stage_parameters(task: str, own: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters that the package takes, with those of a level among them."""
  library = _library()
  settings = library.DATASETS[task][1]
  fields = {one.name for one in dataclasses.fields(settings)} - {*_OURS}
  parameters = {key: one for key, one in own.items() if key != 'level'}
  for key in parameters:
    if key not in fields:
      raise ValueError(
        f'The source {_name(task)} takes no {key!r}'
        f'{importing.nearest(key, [*fields, *_OURS])}; its parameters are'
        f' {sorted(fields)}, besides {", ".join(_OURS)}.'
      )
  try:
    if 'level' in own:
      parameters = {**_level_parameters(task, own['level']), **parameters}
    stage = plain(parameters)
    # Before a dataset is made, because one of codeio changes all others.
    _check_parameters(task, stage)
    _dataset.__wrapped__(task, json.dumps(stage), 0, 1)
  # The settings of the package check themselves by `assert`.
  except (AssertionError, TypeError, ValueError) as error:
    if isinstance(error, _Refused):
      raise
    raise ValueError(
      f'The source {_name(task)} was given {parameters!r:.200}, which'
      f' {PACKAGE} refuses ({error}); correct these parameters.'
    ) from error
  return stage


def _check_parameters(task: str, stage: Mapping[str, Any]) -> None:
  """Raises a ValueError if a task must not have these parameters."""
  for name, refused, reason in fitness()['refused']:
    if name == task and all(
      key in stage and value in (None, stage[key])
      for key, value in refused.items()
    ):
      found = {key: stage[key] for key in refused}
      raise _Refused(
        f'The source {_name(task)} is refused with {found!r}, because'
        f' {reason}; change these parameters.'
      )


class _Refused(ValueError):
  """An error whose message is for a person already."""


def _level_parameters(task: str, level: Any) -> dict[str, Any]:
  """What a level of the package's own curriculum changes."""
  library = _library()
  if not library.has_curriculum(task):
    raise _Refused(
      f'The source {_name(task)} was given the level {level!r}, but {PACKAGE}'
      ' has no curriculum for this task; give its parameters instead.'
    )
  curriculum = library.create_curriculum(task)
  number = max(len(one.levels) for one in curriculum.attributes.values())
  if type(level) is not int or not 0 <= level < number:
    raise _Refused(
      f'The source {_name(task)} was given the level {level!r}, but its levels'
      f' are 0 to {number - 1}; pass one of these.'
    )
  curriculum.set_global_level(level)
  settings = library.DATASETS[task][1]
  made, usual = curriculum.generate_configuration(), settings()
  return {
    one.name: getattr(made, one.name)
    for one in dataclasses.fields(settings)
    if one.name not in _OURS
    and getattr(made, one.name) != getattr(usual, one.name)
  }


def _check_number(
  task: str, name: str, value: Any, least: int, most: int
) -> None:
  if type(value) is not int or not least <= value <= most:
    raise ValueError(
      f'{name} of the source {_name(task)} is {value!r}, but a whole number'
      f' from {least:,} to {most:,} is required; pass one.'
    )


def _name(task: str) -> str:
  return repr(f'reasoning_gym:{task}')
