"""Checks the objects that a user gives, and puts marks into the config.

See `marks.py` for what a mark is.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import json
import math
import sys
from typing import Any
from typing import NamedTuple

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import losses
from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.models import foreign
from grpo_jax.rewards import WeightedReward
from grpo_jax.run.build import marks
from grpo_jax.run.build import provenance
from grpo_jax.run.build.marks import Given

_ITEMS = {
  'prompts': 'prompts',
  'heldout': 'held-out prompts',
  'demonstrations': 'demonstrations',
}


class _Entry(NamedTuple):
  """What stands in the config for one thing that is given."""

  name: str  # a mark for an object, or the name that was given
  value: Any = None  # the object
  record: provenance.Record | None = None  # of the object; None for a name


def put(
  config: Config,
  *,
  rewards: Any = None,
  prompts: Any = None,
  heldout: Any = None,
  demonstrations: Any = None,
  method: Any = None,
  tokenizer: Any = None,
  model: Any = None,
) -> tuple[Config, Given]:
  """The config with marks for the objects that are given, and the objects.

  A name goes into the config as it is, and so does the name of a function of
  this package. See `grpo_jax.train` for the arguments; None leaves the config
  as it is.

  Raises:
    ValueError: An argument is of the wrong kind.
  """
  builtin = config.data.train == config.data.heldout == 'arithmetic'
  if prompts is not None and heldout is None and builtin:
    heldout = ''  # built-in sums would say nothing about the user's prompts
  entries = {}
  for argument, value in (
    ('prompts', prompts),
    ('heldout', heldout),
    ('demonstrations', demonstrations),
  ):
    if value is not None:
      entries[argument] = _data(argument, value, config.data.last_turn)
  if method is not None:
    entries['method'] = _method(method)
  if tokenizer is not None:
    entries['tokenizer'] = _tokenizer(tokenizer)
  if model is not None:
    entries['model'] = _model(model)
    # The shape in the config belongs to the model that is replaced.
    config = dataclasses.replace(config, model=config_lib.Model())
  fields: dict[str, Any] = {
    marks.FIELDS[argument]: entry.name for argument, entry in entries.items()
  }
  judges = list(_rewards(rewards)) if rewards is not None else []
  if judges:
    fields['rewards'] = tuple(
      config_lib.Reward(entry.name, weight, **more)
      for entry, weight, more in judges
    )
  if method is not None:
    # The config's arguments belong to the method that is replaced.
    fields['learner.method_kwargs'] = {}
  marked = [
    entry
    for entry in (*entries.values(), *(entry for entry, *_ in judges))
    if entry.record is not None
  ]
  return _with_fields(config, fields), Given(
    {entry.name: entry.value for entry in marked},
    {entry.name: entry.record for entry in marked if entry.record},
  )


def _with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
  """The config with other values of fields such as 'data.train'."""
  for name, value in fields.items():
    group, _, field = name.rpartition('.')
    if group:
      inner = dataclasses.replace(getattr(config, group), **{field: value})
      config = dataclasses.replace(config, **{group: inner})
    else:
      config = dataclasses.replace(config, **{field: value})
  return config


def _data(argument: str, given: Any, last_turn: str) -> _Entry:
  """Prompts, held-out prompts or demonstrations."""
  if isinstance(given, str):
    return _Entry(given)
  sized = hasattr(given, '__len__') and hasattr(given, '__getitem__')
  # A dict has both too, but its keys are no positions.
  if not sized or isinstance(given, Mapping):
    raise ValueError(
      f'{argument}={given!r:.60} is of type {type(given).__name__}; give a '
      'list of dicts, or any object with __len__ and __getitem__ that returns '
      "dicts, or a name as in a config: 'arithmetic' or the path of a JSONL "
      'file.'
    )
  if not len(given) and argument == 'heldout':
    return _Entry('')
  if not len(given):
    raise ValueError(f'{argument} is empty; give at least one record.')
  if len(given) >= sys.maxsize:  # what grain says of a repeated dataset
    raise ValueError(
      f'{argument} has no end; give finite data, which the run shuffles and '
      'repeats itself.'
    )
  needed = ['prompt', *(['answer'] if argument == 'demonstrations' else [])]
  # Not all records of a large data set, because reading one may take a while.
  for index in provenance.ends(len(given)):
    _check_record(f'{argument}[{index}]', given[index], needed, last_turn)
  kind = type(given).__name__
  mark = marks.mark(f'{kind} of {len(given)} {_ITEMS[argument]}')
  return _Entry(mark, given, provenance.of_records(given))


def _check_record(
  where: str, record: Any, needed: list[str], last_turn: str
) -> None:
  """Raises a ValueError if a record cannot be used.

  Args:
    where: How messages name the record.
    record: What the data set returned.
    needed: The fields that must be there.
    last_turn: See `config.Data`.
  """
  example = "{'prompt': '1+2=', 'answer': '3'}"
  if not isinstance(record, Mapping):
    raise ValueError(
      f'{where} is {record!r:.60}, but a dict is needed, such as {example}.'
    )
  if last_turn == 'answer' and 'prompt' in record:
    try:
      record = data.without_last_turn(record)
    except ValueError as error:
      raise ValueError(f'{where} cannot be used: {error}') from error
  for field in needed:
    if field not in record:
      raise ValueError(
        f'{where} has the fields {list(record)}, but the field {field!r} is '
        f'needed; give records such as {example}.'
      )
  if problem := data.prompt_problem(record['prompt']):
    raise ValueError(
      f"{where}['prompt'] must be a text or a list of messages, but {problem}; "
      'correct the record.'
    )


def _method(given: Any) -> _Entry:
  """A method by name, a `LossTransform`, or a function that makes one."""
  if isinstance(given, str):
    return _Entry(given)
  if isinstance(given, losses.LossTransform):
    make = lambda: given
    return _Entry(
      marks.mark('method LossTransform'), make, provenance.of_method(given)
    )
  if not callable(given):
    raise ValueError(
      f'method={given!r:.60} is of type {type(given).__name__}; give a '
      'LossTransform such as losses.methods.grpo(high=0.3), a function without '
      "arguments that returns one, or a name such as 'dapo'."
    )
  # By name where there is one: such a run needs no object to go on.
  name = _short_name(given)
  if getattr(losses.methods, name, None) is given:
    return _Entry(name)
  return _Entry(
    marks.mark(f'method {name}'), given, provenance.of_function(given)
  )


def _tokenizer(given: Any) -> _Entry:
  if isinstance(given, str):
    return _Entry(given)
  if not isinstance(given, data.Tokenizer):
    raise ValueError(
      f'tokenizer={given!r:.60} is of type {type(given).__name__}; give a '
      'grpo_jax.data.Tokenizer, which character_tokenizer and '
      'Tokenizer.from_folder return, or a name as in config.data.tokenizer.'
    )
  mark = marks.mark(f'tokenizer of {given.vocab_size} tokens')
  return _Entry(mark, given, provenance.of_tokenizer(given))


def _model(given: Any) -> _Entry:
  if isinstance(given, str):
    return _Entry(given)
  if not isinstance(given, foreign.Pretrained):
    raise ValueError(
      f'model={given!r:.60} is of type {type(given).__name__}; give what '
      'grpo_jax.models.foreign.from_nnx(module) returns, or a name as in '
      'config.model.path.'
    )
  mark = marks.mark(f'model {given.model.name}')
  return _Entry(mark, given, provenance.of_model(given.model))


def _rewards(given: Any) -> Iterator[tuple[_Entry, float, dict[str, Any]]]:
  """Each reward, a `WeightedReward` if it is an object, its weight, and more.

  The last are fields of `config.Reward`, where they differ from the defaults.
  """
  if not isinstance(given, list | tuple) or not given:
    raise ValueError(
      f'rewards={given!r:.60} is no list of rewards; give one or more in a '
      'list, as in rewards=[my_reward].'
    )
  names = set()
  for index, item in enumerate(given):
    function, weight, name, kwargs = item, 1.0, '', {}
    if isinstance(item, WeightedReward):
      function, weight, name = item.function, item.weight, item.name
      kwargs = item.kwargs
    elif isinstance(item, list | tuple) and len(item) == 2:
      function, weight = item
    where = f'rewards[{index}]'
    known = isinstance(function, str) or callable(function)
    # A bool would pass for a number, and is a mistake in this place.
    if not known or isinstance(weight, bool | str) or not _finite(weight):
      raise ValueError(
        f'{where} is {item!r:.60}; give a function (prompt, completion, '
        'example) -> float, a pair (function, weight), a WeightedReward, or a '
        "name such as 'exact_match'."
      )
    if callable(function):
      judged = ('prompt', 'completion', 'example')
      _check_arguments(where, function, judged, kwargs)
    # Likewise by name, as a config would have it.
    if callable(function) and not name and _is_builtin(function):
      function = function.__name__
    if isinstance(function, str):
      entry = _Entry(function)
    else:
      name = name or _unused(_short_name(function), names)
      entry = _Entry(
        marks.mark(f'reward {name}'),
        dataclasses.replace(item, weight=1.0)
        if isinstance(item, WeightedReward)
        else WeightedReward(name, function),
        provenance.of_function(function),
      )
    if (name or function) in names:
      raise ValueError(
        f'{where} is a second reward with the name {name or function!r}; give '
        'it another, as in WeightedReward(name, function, weight).'
      )
    names.add(name or function)
    yield entry, float(weight), _more(where, item)


def _finite(weight: Any) -> bool:
  try:
    return math.isfinite(weight)
  except (TypeError, OverflowError):  # no float holds an integer of 400 digits
    return False


def _is_builtin(function: Callable[..., Any]) -> bool:
  """Whether a config can name the function as one of `grpo_jax.rewards`."""
  try:
    return rewards_lib.resolve(_short_name(function)) is function
  except ValueError:
    return False


def _more(where: str, given: Any) -> dict[str, Any]:
  """What a `WeightedReward` says beside its function and its weight.

  Args:
    where: How messages name it.
    given: Any reward.
  """
  if not isinstance(given, WeightedReward):
    return {}
  more: dict[str, Any] = {}
  if given.kwargs:
    try:
      more['kwargs'] = json.loads(json.dumps(dict(given.kwargs)))
    except (TypeError, ValueError) as error:
      raise ValueError(
        f'{where} has kwargs={dict(given.kwargs)!r:.80}, which the config of a '
        f'run cannot hold ({plain_text.said(error)}); give numbers, texts, '
        'lists and dicts, or functools.partial(function, ...).'
      ) from error
  if given.where == 'workers':
    more['where'] = 'workers'
  if given.failed is not None:
    more |= {'on_failure': 'reward', 'failed_reward': float(given.failed)}
  if given.required:
    more['required'] = True
  return more


def _short_name(function: Callable[..., Any]) -> str:
  """The name of a function, as 'brevity'; of an instance, that of its class.

  A partial function has the name of the function that it calls.
  """
  while isinstance(function, functools.partial):
    function = function.func
  name = getattr(function, '__name__', type(function).__name__)
  return name.strip('<>')  # a lambda is called '<lambda>'


def _unused(name: str, names: Collection[str]) -> str:
  """The name, with a number appended if another reward has it.

  Two lambdas, for example, have the same name.
  """
  number, free = 1, name
  while free in names:
    number += 1
    free = f'{name}_{number}'
  return free


def _check_arguments(
  where: str,
  function: Callable[..., Any],
  arguments: tuple[str, ...],
  kwargs: Mapping[str, Any] = {},
) -> None:
  """Raises a ValueError if a function cannot be called with the arguments."""
  try:
    inspect.signature(function).bind(*arguments, **kwargs)
  except TypeError as error:
    named = [f'{name}={value!r:.40}' for name, value in kwargs.items()]
    called = ', '.join([*arguments, *named])
    raise ValueError(
      f'{where} is {_short_name(function)}{inspect.signature(function)}, but '
      f'it will be called with ({called}); let it take these '
      f'{len(arguments) + len(named)}.'
    ) from error
  except ValueError:  # some functions written in C have no signature
    pass


def check_callback(on_rollout: Any) -> None:
  """Raises a ValueError if this cannot be called after a rollout."""
  if not callable(on_rollout):
    raise ValueError(
      f'on_rollout={on_rollout!r:.60} is no function; give one that takes '
      '(step, metrics, rollout).'
    )
  _check_arguments('on_rollout', on_rollout, ('step', 'metrics', 'rollout'))
