"""The data of a run: its tokenizer, its sources, and how wide rows are.

Where a config leaves the widths of prompts and completions open, they follow
from the data: from all of it where it is small, otherwise from a sample. The
same pass over the data finds rows that no run can use, so that they are named
at the start and not in the middle of a run. How large the sample is depends on
the data alone, never on the time that it takes, so that all processes of a run
find the same widths. What was measured in files is kept in the user's cache
directory, so that the next start need not encode them again.

All of it is one file, because widths are measured in every kind of source.
Nothing here imports JAX, so that `grpo-jax data` and misspelt names need no
seconds for that.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import pathlib
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import rewards
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.config import whole_files
from grpo_jax.data import JsonlSource
from grpo_jax.data import hub
from grpo_jax.run.keep import workdir
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects
from grpo_jax.run.keep.objects import is_object

if TYPE_CHECKING:
  from grpo_jax.run.build.specs import WidthSpec

Config = config_lib.Config
Source = config_lib.Source

# For a user's own data, whose records may each take a while to make.
_MOST_CHECKED = 100
_PROMPT_TOKENS = 256  # of what episodes read first, where a config is silent
# Encoding a chat takes 0.1 to 0.2 ms, so this many take a few seconds.
MOST_RECORDS = 20_000
_SAMPLE = 2_000  # of more records
_LEAST_SAMPLE = 100  # of each source
# For records that a program makes: reasoning-gym takes up to 170 ms for one.
_MOST_MADE = 300
_LEAST_MADE = 30  # of each source
# Where the widths are given, of each larger source; of problems that programs
# of this package make, which can all be written, of any.
_MOST_CHECKED_MADE = 30
_MADE_HERE = (
  data.ArithmeticDemonstrations,
  data.ArithmeticSource,
  data.EpisodesSource,
  data.LargestSource,
)
_QUICK = (*_MADE_HERE, data.FileSource, data.JsonlSource)


def tokenizer_of(config: Config, objects: Objects = NOTHING) -> data.Tokenizer:
  """The tokenizer of a run.

  The end of a turn by its chat template is one of its end tokens, unless the
  config names the end tokens.

  Raises:
    ValueError: It cannot be read, or its prompts cannot be written as the
      config says.
  """
  found = _tokenizer_as_named(config, objects)
  named = tuple(config.data.eos_tokens) not in ((), data.EOS_TOKENS)
  return found if named else found.with_turn_end()


def _tokenizer_as_named(config: Config, objects: Objects) -> data.Tokenizer:
  """`tokenizer_of`, with the end tokens that its files name."""
  fields = config.data
  prompts = data.PromptFormat(
    fields.chat,
    fields.system_prompt,
    fields.chat_kwargs,
    fields.completion_prefix,
  )
  if objects.tokenizer is not None:
    # It may come with a format of its own, which a config that says nothing
    # leaves alone.
    if prompts == data.PromptFormat():
      return objects.tokenizer
    return objects.tokenizer.with_format(prompts)
  path = config.model.path
  if objects.model is not None or importing.is_function(path):
    if not fields.tokenizer:
      raise ValueError(
        'config.data.tokenizer is empty, which means the tokenizer of the '
        'model, but a model of your own brings none; give tokenizer=... or set '
        'the field.'
      )
    path = ''
  return data.tokenizer_from(
    fields.tokenizer,
    path,
    fields.eos_tokens,
    fields.pad_token,
    prompts,
  )


def decode_of_stops(
  config: config_lib.Sampler, tokenizer: data.Tokenizer
) -> Callable[[Any], str]:
  """What makes the text that stop strings are looked for in."""
  # Otherwise as rewards see a completion, without special tokens.
  if any(map(tokenizer.hides, config.stop_strings)):
    return tokenizer.decode_whole
  return tokenizer.decode


def turn_end_note(config: Config, tokenizer: data.Tokenizer) -> str:
  """What the start says of the end of a turn; '' if the files name it.

  Args:
    config: Names the end tokens and the texts that stop a completion.
    tokenizer: What `tokenizer_of` returned.
  """
  text = lambda ids: ', '.join(
    str(tokenizer.backend.id_to_token(token_id)) for token_id in ids
  )
  end = tokenizer.turn_end_id()
  if end is None:
    words = tokenizer.turn_end_text()
    if not words or any(stop in words for stop in config.sampler.stop_strings):
      return ''
    return f'turns end by the text {words!r:.60}, which is no token and no stop'
  named = [i for i in tokenizer.eos_ids if i not in tokenizer.added_eos_ids]
  beside = text(named) or 'no other end token'
  if end in tokenizer.added_eos_ids:
    return f'{text([end])} ends a turn, so it is an end token beside {beside}'
  if end not in tokenizer.eos_ids:
    return (
      f'{text([end])} ends a turn, but is no end token: data.eos_tokens names '
      f'{tuple(config.data.eos_tokens)}'
    )
  return ''


def train(
  config: Config, objects: Objects = NOTHING
) -> tuple[list[Any], list[float]]:
  """The sources of prompts to train on, and their weights in the mixture."""
  several, own = sources_in(config.data.train), objects.prompts
  found = [open_source(config, source, 'train', own) for source in several]
  return found, [source.weight for source in several]


def heldout(config: Config, objects: Objects = NOTHING) -> Any:
  """The held-out records, source after source; None if the config has none."""
  found = [
    open_source(config, source, 'heldout', objects.heldout)
    for source in sources_in(config.data.heldout)
  ]
  if len(found) > 1:
    return data.Joined(found)
  return found[0] if found else None


def describe(
  config: Config, trained: list[Any], held_out: Any
) -> tuple[workdir.Source, ...]:
  """What tells the data of a run from changed data.

  Args:
    config: Names the sources.
    trained: What `train` returned first.
    held_out: What `heldout` returned.
  """
  several = len(sources_in(config.data.heldout)) > 1
  held = held_out.sources if several else [held_out]
  fields = {'train': trained, 'heldout': held if held_out is not None else []}
  return tuple(
    workdir.Source(
      f'data.{field}[{place}]={source.name!r}',
      len(records),
      tuple(files_of(source) or ()),
    )
    for field, found in fields.items()
    for place, (source, records) in enumerate(
      zip(sources_in(getattr(config.data, field)), found, strict=True)
    )
  )


def sources_in(value: str | tuple[Source, ...]) -> tuple[Source, ...]:
  """What `data.train` or `data.heldout` names, as sources; none for ''."""
  if isinstance(value, str):
    return (Source(value),) if value else ()
  return value


def open_source(
  config: Config, source: Source | str, split: str, own: Any = None
) -> Any:
  """The records that a source of the config stands for; see `grpo_jax.data`.

  Args:
    config: Says which fields hold prompts and answers.
    source: A name, or one with arguments.
    split: 'train' or 'heldout', for sources that have several parts.
    own: Records from Python that stand in its place.

  Raises:
    OSError: A file is not there.
    ValueError: There is no such source, it does not take the arguments, or a
      record cannot be used.
  """
  if isinstance(source, str):
    source = Source(source)
  name = source.name
  prefix, colon, behind = name.partition(':')
  if own is not None:
    return _with_last_turn(own, config)
  if name in BUILT_IN:
    _check_kwargs(source, ())
    return BUILT_IN[name](split)
  if hub.parse(name):
    return _hub(source, split, config)
  if colon and prefix in PREFIXES:
    return PREFIXES[prefix](behind, source, split, config)
  form = data.format_of(name)
  if os.path.isdir(name):
    return _folder(source, split, config)
  if colon and form is None and not os.path.exists(name):
    return _with_last_turn(_function(source, split), config)
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


def _with_last_turn(source: Any, config: Config) -> Any:
  """A user's own source, whose chats end where the assistant is to answer."""
  if config.data.last_turn == 'prefill':
    return source
  return data.WithoutLastTurns(source)


BUILT_IN = {
  'arithmetic': data.ArithmeticSource,
  'episodes': data.EpisodesSource,
  'largest': data.LargestSource,
}


_FORMATS = {
  'parquet': data.parquet_source,
  'array_record': data.array_record_source,
}


def _tfds(name: str, source: Source, split: str, config: Config) -> Any:
  fields = _fields(source, config, ('split', 'data_dir'))
  part = _part(source, split)
  return data.tfds_source(name, part, source.kwargs.get('data_dir'), *fields)


def _part(source: Source, split: str) -> str:
  """The split of a data set that a source stands for.

  Raises:
    ValueError: It is held out, and names none.
  """
  part = source.kwargs.get('split', 'train' if split == 'train' else None)
  if part is None:
    raise ValueError(
      f'config.data.heldout names {source.name!r}, but not which split of it is'
      " held out; name one in its kwargs, as in {'split': 'test'}."
    )
  return part


def _hub(source: Source, split: str, config: Config) -> Any:
  """The records of a data set on the Hub."""
  fields = _fields(source, config, ('config', 'split'))
  found = _hub_files(source, _part(source, split))
  open_files = _FORMATS.get(data.format_of(found[0]) or '', data.jsonl_source)
  return open_files(found, *fields)


def _hub_files(source: Source, part: str) -> list[str]:
  return hub.data_files(source.name, source.kwargs.get('config', ''), part)


def with_commit(source: Source, split: str) -> str:
  """The name of a source, with its commit if it is a name of the Hub.

  Args:
    source: Any.
    split: 'train' or 'heldout'.

  Raises:
    ValueError: There is no such data set, config or split.
  """
  name = hub.parse(source.name)
  if name is None or name.commit:
    return source.name
  part, config = _part(source, split), source.kwargs.get('config', '')
  return str(name.pinned(hub.data_commit(name, config, part)))


def expect(source: Source, split: str, sha256: str) -> None:
  """Notes what the files of a source are, if it is a name of the Hub.

  Args:
    source: With its commit.
    split: 'train' or 'heldout'.
    sha256: What `data.fingerprint` said of its files.
  """
  name = hub.parse(source.name)
  if name is not None and name.commit:
    part, config = _part(source, split), source.kwargs.get('config', '')
    hub.expect_data(name, config, part, sha256)


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
    config: Says which fields hold prompts and answers.
    others: Which other arguments the source takes.
  """
  _check_kwargs(source, ('prompt_field', 'answer_field', *others))
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


def _check_kwargs(source: Source, names: tuple[str, ...]) -> None:
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


def demonstrations(config: Config, objects: Objects = NOTHING) -> Any:
  """The source of demonstrations for the warm-up, with an answer in each.

  Raises:
    ValueError: A record of a file has no answer. The file itself checks it only
      if the config names a field for the answers. Here a sample is checked of
      more than 10,000 records.
  """
  name = config.warm_up.demonstrations
  source = open_source(config, name, 'train', objects.demonstrations)
  if objects.demonstrations is None and not config.data.answer_field:
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
  # A file is opened only once so. A user's own data needs no more than a
  # length and items.
  if isinstance(source, JsonlSource) and len(source) <= most:
    yield from enumerate(source)
    return
  for place in data.some_places(len(source), most):
    yield place, source[place]


def some_rows(source: Any, most: int, name: str):
  """As `some`, of records that have a usable prompt.

  Args:
    source: An object with a length and items.
    most: How many records, in a random sample of more.
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


def checked_rows(
  source: Any, name: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """The records that are looked at before a run, with what messages call them.

  At most 20,000 of those in files or in memory, and 30 of others, in every
  stage.

  Args:
    source: The records.
    name: How messages name the source, if it is in no file.
  """
  for _, stage in data.stages(source):
    most = MOST_RECORDS if _is_quick(stage) else _MOST_CHECKED_MADE
    for place, record in some_rows(stage, most, name):
      yield data.row_name(stage, place, name), record


def files(config: Config) -> dict[str, list[str]]:
  """The files that the prompts of a run come from, by the name of their source.

  A name of TensorFlow Datasets has its directory added where one is given. A
  source in no file, such as an object given in Python, has an empty list.
  Those that are built in are left out.
  """
  found: dict[str, list[str]] = {}
  shown = config.warm_up.demonstrations if config.warm_up.steps else ''
  for source in itertools.chain(
    *map(sources_in, (config.data.train, config.data.heldout, shown))
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
  if name in BUILT_IN:
    return None
  if hub.parse(name):
    return _hub_files(source, source.kwargs.get('split', 'train'))
  if name.startswith('tfds:'):
    place = source.kwargs.get('data_dir', '~/tensorflow_datasets')
    folder = name.removeprefix('tfds:').partition(':')[0]
    return data.files(os.path.join(os.path.expanduser(place), folder))
  return [] if is_object(name) else data.files(name)


class _Rows(NamedTuple):
  """Records that are encoded."""

  source: Any
  name: str  # of the field in the config, and of the source
  is_shown: bool  # as demonstrations, whose answers are encoded too
  checks_alone: bool  # whether no width follows from them


def with_widths(
  config: Config,
  tokenizer: data.Tokenizer,
  objects: Objects = NOTHING,
  checks: bool = False,
) -> Config:
  """The config with a width wherever it leaves one open.

  Prompts get the length of the longest one, and completions the larger of
  `sampler.max_tokens` and the longest demonstration. Up to 20,000 records are
  encoded for that, of a curriculum in every stage. Of more records a sample of
  about 2,000 is encoded, and the width is a quarter larger than the longest of
  them; `data.too_long` says what becomes of records that are longer still. The
  same holds of records that a program makes, as reasoning-gym and functions of
  the user do, but of more than 300 about 300 are encoded. Where the config has
  widths, nothing is read, unless the data are to be checked: then as many are
  encoded, but 30 of each source whose records a program makes, unless it is the
  user's and has no more than 300.

  What an environment says is not known before. So prompts get 256 tokens there,
  and whatever an episode reads beyond that belongs to the completion, which
  gets 256 more than four times `sampler.max_tokens`.

  Args:
    config: Perhaps without `data.prompt_buckets` or `data.completion_buckets`.
    tokenizer: Of the run.
    objects: What the run was given in Python.
    checks: Whether to look for rows that cannot be used, for a run that will
      read them: those whose prompt cannot be encoded, and with
      data.too_long='refuse' those that are longer than the config's widths.

  Returns:
    A config with both.

  Raises:
    ValueError: A row that was read cannot be used; the message names it.
  """
  fields, played = config.data, config.environment
  if played.name:
    if checks and played.others:
      _check_environments(config, objects)
    width = played.context_tokens or (
      _PROMPT_TOKENS + 4 * config.sampler.max_tokens
    )
    longest = {'prompt': 1, 'completion': 0}
    has_widths = fields.prompt_buckets and fields.completion_buckets
    # Demonstrations are known.
    if config.warm_up.steps and (checks or not has_widths):
      limits = _limits(config) if checks else {}
      longest = _measure(config, tokenizer, objects, checks, limits)
    prompt = max(_PROMPT_TOKENS, longest['prompt'])
    width = max(width, longest['completion'])
    fields = dataclasses.replace(
      fields,
      prompt_buckets=fields.prompt_buckets or (prompt,),
      completion_buckets=fields.completion_buckets or (width,),
    )
    return dataclasses.replace(config, data=fields)
  if fields.prompt_buckets and fields.completion_buckets and not checks:
    return config
  limits = _limits(config) if checks else {}
  key = _key(config, tokenizer, checks, limits)
  longest = _read(key)
  if longest is None:
    longest = _measure(config, tokenizer, objects, checks, limits)
    _write(key, longest)
  width = max(longest['completion'], config.sampler.max_tokens)
  fields = dataclasses.replace(
    fields,
    prompt_buckets=fields.prompt_buckets or (longest['prompt'],),
    completion_buckets=fields.completion_buckets or (width,),
  )
  return dataclasses.replace(config, data=fields)


def named(record: Mapping[str, Any], known: Collection[str]) -> str:
  """The name of the environment that a record begins; '' is the usual one.

  Args:
    record: Its field 'environment' is read if there are others than ''.
    known: The names of all.

  Raises:
    ValueError: The record names another one.
  """
  others = [one for one in known if one]
  # Without others the field says something else, if it is there.
  name = record.get('environment') if others else None
  if name and name not in others:
    raise ValueError(
      f'it begins the environment {name!r}'
      f'{importing.nearest(str(name), others)}, but config.environment.others '
      f'has {", ".join(others)}; correct the record, or name it there.'
    )
  return str(name or '')


def _check_environments(config: Config, objects: Objects) -> None:
  """Checks which environments records begin, as many as widths are made of.

  Raises:
    ValueError: One that is not there.
  """
  rows = _prompt_rows(config, objects)
  for one, number in zip(rows, _sample_sizes(rows), strict=True):
    for place, record in some_rows(one.source, number, one.name):
      try:
        named(record, config.environment.others)
      except ValueError as error:
        name = data.row_name(one.source, place, one.name)
        raise ValueError(f'{name} cannot be used: {error}') from error


def data_spec(config: Config) -> 'WidthSpec':
  """The widths of a config that has them."""
  from grpo_jax.run.build.specs import WidthSpec  # whose module needs JAX

  fields = config.data
  return WidthSpec(
    fields.prompt_buckets, fields.completion_buckets, fields.too_long == 'drop'
  )


Fits = Callable[[Mapping[str, Any]], bool]


def fits(spec: 'WidthSpec', tokenizer: data.Tokenizer) -> Fits | None:
  """Whether the prompt of a record is no longer than the largest width.

  Returns:
    A function of a record; None if prompts that are too long are refused, as
    the engine does.
  """
  if not spec.drops:
    return None
  width = max(spec.prompt_buckets)
  return lambda record: len(tokenizer.encode_prompt(record['prompt'])) <= width


def shown_fits(spec: 'WidthSpec', tokenizer: data.Tokenizer) -> Fits | None:
  """As `fits`, of a demonstration: its answer is a completion."""
  prompt_fits = fits(spec, tokenizer)
  if prompt_fits is None:
    return None
  width = max(spec.completion_buckets)
  return lambda record: (
    prompt_fits(record) and _answer_tokens(tokenizer, record) <= width
  )


def heldout_records(
  spec: 'WidthSpec', tokenizer: data.Tokenizer, heldout: Any, most: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
  """The first held-out records, and how many were too long.

  Args:
    spec: Says whether records that are too long are dropped.
    tokenizer: Encodes the prompts.
    heldout: The source.
    most: How many records are wanted.

  Returns:
    The records, and the metric `heldout_too_long`, if data.too_long='drop' has
    dropped any of those up to the last of them.
  """
  records = data.take_fitting(heldout, 0, most, fits(spec, tokenizer))
  looked_at = len(heldout)
  if records and len(records) == most:
    looked_at = records[-1]['index'] + 1
  dropped = looked_at - len(records)
  return records, {'heldout_too_long': float(dropped)} if dropped else {}


def _answer_tokens(tokenizer: data.Tokenizer, record: Mapping[str, Any]) -> int:
  # And the end token.
  return len(tokenizer.encode(rewards.shown_answer(record))) + 1


def _limits(config: Config) -> dict[str, int]:
  """The most tokens of 'prompt' and 'completion', where more are refused."""
  if config.data.too_long == 'drop':
    return {}
  buckets = {
    'prompt': config.data.prompt_buckets,
    'completion': config.data.completion_buckets,
  }
  return {name: max(widths) for name, widths in buckets.items() if widths}


def _measure(
  config: Config,
  tokenizer: data.Tokenizer,
  objects: Objects,
  checks: bool,
  limits: Mapping[str, int],
) -> dict[str, int]:
  """The widths that prompts and demonstrations need.

  Args:
    config: May leave widths open.
    tokenizer: Encodes prompts and answers.
    objects: What the run was given in Python.
    checks: Whether prompts are read though their width is given.
    limits: Of `_limits`; a row that is longer is refused.
  """
  rows = _demonstration_rows(config, objects, checks)
  # What an episode reads first, its environment says.
  reads = checks or not config.data.prompt_buckets
  if reads and not config.environment.name:
    rows = [*_prompt_rows(config, objects), *rows]
  # A source without records is refused where it is read.
  longest = {'prompt': 1, 'completion': 0}
  is_sample = False
  for one, number in zip(rows, _sample_sizes(rows), strict=True):
    is_sample |= number < len(one.source) and not one.checks_alone
    for lengths in _lengths(one, number, tokenizer, limits):
      longest |= {kind: max(longest[kind], n) for kind, n in lengths.items()}
  if is_sample:  # a quarter more, as a multiple of 8
    longest = {kind: -(-n * 5 // 32) * 8 for kind, n in longest.items()}
  return longest


def _prompt_rows(config: Config, objects: Objects) -> list[_Rows]:
  """The prompts of a run, in every stage, and those that are held out."""
  alone = bool(config.data.prompt_buckets)
  found = [
    _Rows(stage, f'data.train={source.name!r}', False, alone)
    for source, records in zip(
      sources_in(config.data.train),
      train(config, objects)[0],
      strict=True,
    )
    for _, stage in data.stages(records)
  ]
  held_out = heldout(config, objects)  # which is read by index
  if held_out is not None:
    found.append(_Rows(held_out, 'data.heldout', False, alone))
  return found


def _demonstration_rows(
  config: Config, objects: Objects, checks: bool
) -> list[_Rows]:
  """The demonstrations; none without a warm-up.

  Args:
    config: Names them.
    objects: What the run was given in Python.
    checks: Whether the rows are read to be checked. Then demonstrations may be
      missing: a run whose warm-up is over needs none.
  """
  name = config.warm_up.demonstrations
  if not config.warm_up.steps:
    return []
  fields = config.data
  alone = checks and bool(fields.prompt_buckets and fields.completion_buckets)
  if alone and is_object(name) and objects.demonstrations is None:
    return []
  try:
    # The arithmetic ones are as long as right answers are.
    source = demonstrations(config, objects)
  except OSError:
    if alone:
      return []
    raise
  return [
    _Rows(stage, f'warm_up.demonstrations={name!r}', True, alone)
    for _, stage in data.stages(source)
  ]


def _lengths(
  rows: _Rows,
  number: int,
  tokenizer: data.Tokenizer,
  limits: Mapping[str, int],
) -> Iterator[dict[str, int]]:
  """Tokens of each prompt, and of an answer that is shown."""
  for place, record in some_rows(rows.source, number, rows.name):
    try:
      lengths = {'prompt': len(data.prompt_ids(tokenizer, record))}
      if rows.is_shown:
        lengths['completion'] = _answer_tokens(tokenizer, record)
      for kind, length in lengths.items():
        if length > limits.get(kind, length):
          part = 'prompt' if kind == 'prompt' else 'answer'
          raise ValueError(
            f'its {part} needs {length} tokens, but the largest bucket is '
            f'{limits[kind]}; give a larger one in data.{kind}_buckets, or '
            "data.too_long='drop'."
          )
    except ValueError as error:
      name = data.row_name(rows.source, place, rows.name)
      raise ValueError(f'{name} cannot be used: {error}') from error
    yield lengths


def _sample_sizes(several: Sequence[_Rows]) -> list[int]:
  """How many records of each source are encoded."""
  totals = {True: 0, False: 0}
  for one in several:
    totals[_is_quick(one.source)] += len(one.source)
  numbers = []
  for one in several:
    number, is_quick = len(one.source), _is_quick(one.source)
    is_made = not is_quick or isinstance(one.source, _MADE_HERE)
    few = number <= _MOST_MADE and not _takes_long(one.source)
    if one.checks_alone and is_made and not few:
      number = _MOST_CHECKED_MADE
    elif is_quick and totals[True] > MOST_RECORDS:
      number = max(_LEAST_SAMPLE, _SAMPLE * number // totals[True])
    elif not is_quick and totals[False] > _MOST_MADE:
      number = max(_LEAST_MADE, _MOST_MADE * number // totals[False])
    numbers.append(min(number, len(one.source)))
  return numbers


def _takes_long(source: Any) -> bool:
  """Whether a program of this package makes each record."""
  while isinstance(source, data.WithoutLastTurns | data.Stage):
    source = source.source
  if isinstance(source, data.Joined):
    return any(map(_takes_long, source.sources))
  return isinstance(source, (*_MADE_HERE, data.ReasoningGymSource))


def _is_quick(source: Any) -> bool:
  """Whether the records are built in, in files or in memory."""
  if isinstance(source, data.WithoutLastTurns):
    source = source.source
  if isinstance(source, data.Joined):
    return all(map(_is_quick, source.sources))
  return type(source) in (list, tuple) or isinstance(source, _QUICK)


def _key(
  config: Config,
  tokenizer: data.Tokenizer,
  checks: bool,
  limits: Mapping[str, int],
) -> pathlib.Path | None:
  """The file that keeps the widths of some data; None for data in no file."""
  asks = checks or not config.data.prompt_buckets
  reads = asks or config.warm_up.steps
  found = files(config) if reads else {}
  # Built-in sources are fast, and of others there is no telling whether they
  # have changed.
  if not found or not all(found.values()):
    return None
  fields = config.data
  paths = [path for files in found.values() for path in files]
  try:
    modified = [os.stat(path).st_mtime_ns for path in paths]
    contents = data.fingerprint(paths)
  except OSError:  # said where the file is opened
    return None
  facts = {
    'form': 4,  # of this dict, and of how widths follow from data
    'sources': dataclasses.asdict(fields)['train'],
    'heldout': dataclasses.asdict(fields)['heldout'],
    'demonstrations': config.warm_up.steps > 0
    and config.warm_up.demonstrations,
    'fields': [
      fields.prompt_field,
      fields.answer_field,
      fields.last_turn,
    ],
    'open': asks,
    'limits': dict(limits),
    'files': paths,
    'modified': modified,
    'contents': contents,
    'tokenizer': tokenizer.fingerprint(),
  }
  name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
  return data.cache_directory() / 'widths' / f'{name[:32]}.json'


def _read(path: pathlib.Path | None) -> dict[str, int] | None:
  """The widths in a file of the cache; None if it is not there, or damaged."""
  if path is None:
    return None
  try:
    kept = json.loads(path.read_text())
    widths = {name: kept[name] for name in ('prompt', 'completion')}
  except (OSError, ValueError, KeyError, TypeError):
    return None
  are_ints = all(type(width) is int for width in widths.values())
  return widths if are_ints and widths['prompt'] >= 1 else None


def _write(path: pathlib.Path | None, widths: dict[str, int]) -> None:
  if path is None:
    return
  with contextlib.suppress(OSError):  # without it, the next start measures
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write(path, json.dumps(widths).encode())
