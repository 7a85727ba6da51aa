"""The sources of prompts that a config names."""

from collections.abc import Callable
from collections.abc import Mapping
import inspect
import itertools
import os
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.data import JsonlSource
from grpo_jax.run.build import marks
from grpo_jax.run.build.marks import Given

Config = config_lib.Config
Source = config_lib.Source

# Of a user's own data, whose records may each take a while to make.
_MOST_CHECKED = 100


def train(config: Config, given: Given) -> tuple[list[Any], list[float]]:
  """The sources of prompts to train on, and their weights in the mixture."""
  several = listed(config.data.train)
  found = [named(config, source, 'train', given) for source in several]
  return found, [source.weight for source in several]


def heldout(config: Config, given: Given) -> Any:
  """The held-out records, source after source; None if the config has none."""
  found = [
    named(config, source, 'heldout', given)
    for source in listed(config.data.heldout)
  ]
  if len(found) > 1:
    return data.Joined(found)
  return found[0] if found else None


def lengths(
  config: Config, trained: list[Any], held_out: Any
) -> dict[tuple[str, int], int]:
  """How many records each source has, by its field in the config and its place.

  Args:
    config: Of the run.
    trained: What `train` returned first.
    held_out: What `heldout` returned.
  """
  several = len(listed(config.data.heldout)) > 1
  held = held_out.sources if several else [held_out]
  fields = {'train': trained, 'heldout': held if held_out is not None else []}
  return {
    (field, place): len(source)
    for field, found in fields.items()
    for place, source in enumerate(found)
  }


def listed(value: str | tuple[Source, ...]) -> tuple[Source, ...]:
  """What `data.train` or `data.heldout` names, as sources; none for ''."""
  if isinstance(value, str):
    return (Source(value),) if value else ()
  return value


def named(
  config: Config, source: Source | str, split: str, given: Given
) -> Any:
  """The records that a source of the config stands for; see `grpo_jax.data`.

  Args:
    config: Says which fields hold prompts and answers.
    source: A name, or one with arguments.
    split: 'train' or 'heldout', for sources that have several parts.
    given: The objects that the marks in the config stand for.

  Raises:
    OSError: A file is not there.
    ValueError: There is no such source, it does not take the arguments, or a
      record cannot be used.
  """
  if isinstance(source, str):
    source = Source(source)
  name = source.name
  prefix, colon, behind = name.partition(':')
  if name in given.objects:
    _takes(source, ())
    return _as_asked(given.objects[name], config)
  if name in _BUILT_IN:
    _takes(source, ())
    return _BUILT_IN[name](split)
  if colon and prefix in PREFIXES:
    return PREFIXES[prefix](behind, source, split, config)
  form = data.format_of(name)
  if os.path.isdir(name):
    return _folder(source, split, config)
  if colon and form is None and not os.path.exists(name):
    return _as_asked(_function(source, split), config)
  fields = _fields(source, config, ())
  found = data.files(name)
  if not found and data.is_pattern(name):
    raise ValueError(
      f'No file matches the pattern {name!r} in {os.getcwd()}; give one that'
      ' some file matches.'
    )
  # A name without a known end is that of a JSONL file too.
  open_files = _FORMATS.get(form or '', data.jsonl_source)
  return open_files(found or [name], *fields)


def _as_asked(source: Any, config: Config) -> Any:
  """A user's own source, whose chats end where the assistant is to answer."""
  if config.data.last_turn == 'prefill':
    return source
  return data.WithoutLastTurns(source)


_BUILT_IN = {
  'arithmetic': data.ArithmeticSource,
  'largest': data.LargestSource,
}


_FORMATS = {
  'parquet': data.parquet_source,
  'array_record': data.array_record_source,
}


def _tfds(name: str, source: Source, split: str, config: Config) -> Any:
  fields = _fields(source, config, ('split', 'data_dir'))
  part = source.kwargs.get('split', 'train' if split == 'train' else None)
  if part is None:
    raise ValueError(
      f"config.data.heldout names 'tfds:{name}', but not which split of it is"
      " held out; name one in its kwargs, as in {'split': 'test'}."
    )
  return data.tfds_source(name, part, source.kwargs.get('data_dir'), *fields)


def _reasoning_gym(
  name: str, source: Source, split: str, config: Config
) -> Any:
  del config  # its problems have the fields that are needed
  return data.reasoning_gym_source(name, split, source.kwargs)


# Names that begin with a word and a colon. The function gets what is behind the
# colon, the source with its arguments, 'train' or 'heldout', and the config.
PREFIXES: dict[str, Callable[[str, Source, str, Config], Any]] = {
  'reasoning_gym': _reasoning_gym,
  'tfds': _tfds,
}


def _folder(source: Source, split: str, config: Config) -> Any:
  """A Hugging Face dataset that was saved in a folder."""
  inside = set(os.listdir(source.name))
  if not inside & {'dataset_dict.json', 'dataset_info.json', 'state.json'}:
    raise ValueError(
      f'The folder {source.name!r} holds no data set (no dataset_info.json,'
      ' state.json or dataset_dict.json); give one that save_to_disk has'
      " written, or files, as in 'folder/*.parquet'."
    )
  fields = _fields(source, config, ('split',))
  part = source.kwargs.get('split')
  if part is None and split == 'train' and 'dataset_dict.json' in inside:
    part = 'train'
  return data.arrow_source(source.name, part, *fields)


def _fields(
  source: Source, config: Config, others: tuple[str, ...]
) -> tuple[str, str | None, str]:
  """The fields of prompt and answer in the records of a source, and last_turn.

  Args:
    source: Its arguments may name other fields than the config.
    config: Of the run.
    others: Which other arguments the source takes.
  """
  _takes(source, ('prompt_field', 'answer_field', *others))
  for name, value in source.kwargs.items():
    if not isinstance(value, str):
      raise ValueError(
        f'The source {source.name!r} was given {name}={value!r} in its kwargs,'
        ' but this argument is a text; write it in quotes.'
      )
  kwargs = source.kwargs
  prompt = kwargs.get('prompt_field', config.data.prompt_field)
  answer = kwargs.get('answer_field', config.data.answer_field) or None
  return prompt, answer, config.data.last_turn


def _takes(source: Source, names: tuple[str, ...]) -> None:
  """Raises a ValueError if a source has arguments that it does not take."""
  for name in source.kwargs:
    if name not in names:
      takes = f'takes {", ".join(names)}' if names else 'takes no arguments'
      near = importing.nearest(name, names)
      raise ValueError(
        f'The source {source.name!r} {takes}, but its kwargs have'
        f' {name}={source.kwargs[name]!r}{near}; correct the kwargs.'
      )


def _function(source: Source, split: str) -> Any:
  """What a function of the user's own returns, as 'module:function'."""
  where = f'config.data.{split}={source.name!r}'
  make = importing.imported(source.name, where)
  try:
    inspect.signature(make).bind(**source.kwargs)
  except TypeError as error:
    raise ValueError(
      f'{where} cannot be called with the kwargs {source.kwargs}:'
      f' {plain_text.said(error)};'
      ' correct the kwargs of the source.'
    ) from error
  except ValueError:  # some functions written in C have no signature
    pass
  try:
    found = make(**source.kwargs)
  except (ValueError, OSError):  # a sentence about the arguments, or a file
    raise
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'{where} raised {plain_text.named(error)}, when it was called with'
      f' the kwargs {source.kwargs}; correct the function or the kwargs.'
    ) from error
  sized = hasattr(found, '__len__') and hasattr(found, '__getitem__')
  if not sized or isinstance(found, Mapping | str) or not len(found):
    raise ValueError(
      f'{where} returned {found!r:.60}, but a source is an object with a length'
      ' of 1 or more, and with a dict at each place; return one.'
    )
  for place in data.some_places(len(found), _MOST_CHECKED):
    try:
      record = found[place]
    except Exception as error:  # a user's object may raise anything
      raise ValueError(
        f'Item {place} of what {where} returned cannot be read'
        f' ({plain_text.named(error)}); correct the object.'
      ) from error
    problem = 'it is no dict'
    if isinstance(record, Mapping):
      problem = data.prompt_problem(record.get('prompt'))
    if problem:
      raise ValueError(
        f'Item {place} of what {where} returned is {record!r:.60}, but a dict'
        f" with a text or a list of messages in 'prompt' is needed; {problem}."
      )
  return found


def demonstrations(config: Config, given: Given) -> Any:
  """The source of demonstrations for the warm-up, with an answer in each.

  Raises:
    ValueError: A record of a file has no answer. The file itself checks it only
      if the config names a field for the answers. Of more than 10,000 records
      a sample is checked here.
  """
  name = config.warm_up.demonstrations
  source = named(config, name, 'train', given)
  if name not in given.objects and not config.data.answer_field:
    for number, record in some(source, data.MOST_CHECKED):
      if record.get('answer') is None:
        raise ValueError(
          f'Record {number + 1} of warm_up.demonstrations={name!r} has the '
          f"fields {sorted(record)}, but the warm-up needs an 'answer' in each;"
          ' add it, name the field that holds it in data.answer_field, or set '
          'warm_up.steps=0.'
        )
  return source


def some(source: Any, most: int):
  """At most so many records of a source, each with its place.

  All of a shorter source, otherwise a random sample, the same every time.
  """
  # A file is opened only once so. Of data of a user's own, no more than the
  # length and the places need to work.
  if isinstance(source, JsonlSource) and len(source) <= most:
    yield from enumerate(source)
    return
  for place in data.some_places(len(source), most):
    yield place, source[place]


def some_rows(source: Any, most: int, name: str):
  """As `some`, of records that have a usable prompt.

  Args:
    source: An object with a length and items.
    most: See `some`.
    name: How messages name the source, if it is in no file.

  Raises:
    ValueError: A record has none; the message names it.
  """
  if isinstance(source, JsonlSource) and len(source) <= most:
    yield from enumerate(source)  # which checks and names its records itself
    return
  for place in data.some_places(len(source), most):
    try:
      yield place, data.row_at(source, place)
    except ValueError as error:
      named = data.row_name(source, place, name)
      if str(error).startswith(named):  # a file names its records itself
        raise
      raise ValueError(f'{named} cannot be used: {error}') from error


def files(config: Config) -> dict[str, list[str]]:
  """The files that the prompts of a run come from, by the name of their source.

  A name of TensorFlow Datasets has its directory added where one is given. A
  source in no file, such as an object given in Python, has an empty list.
  Those that are built in are left out.
  """
  found: dict[str, list[str]] = {}
  shown = config.warm_up.demonstrations if config.warm_up.steps else ''
  for source in itertools.chain(
    *map(listed, (config.data.train, config.data.heldout, shown))
  ):
    paths = files_of(source)
    if paths is not None:
      place = source.kwargs.get('data_dir', '')
      # The same name may be prepared in two places.
      found[f'{source.name} in {place}' if place else source.name] = paths
  return found


def files_of(source: Source) -> list[str] | None:
  """The files of a source; none for one in no file, None for one built in."""
  name = source.name
  if name in _BUILT_IN:
    return None
  if name.startswith('tfds:'):
    place = source.kwargs.get('data_dir', '~/tensorflow_datasets')
    folder = name.removeprefix('tfds:').partition(':')[0]
    return data.files(os.path.join(os.path.expanduser(place), folder))
  return [] if marks.is_mark(name) else data.files(name)
