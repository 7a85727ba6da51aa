"""Names of the Hub in a config get their commits, once for all of a run.

A branch may move, and hosts must not read different weights. So the first start
looks up what each name stands for, and the run goes on with that: the config of
its workdir has names such as 'owner/name@COMMIT', which need nobody to be asked
once the files are here.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import pathlib
from typing import Literal
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import Source
from grpo_jax.data import hub
from grpo_jax.episodes import reward_model
from grpo_jax.hosts.processes import Processes
from grpo_jax.run.build import data as build_data
from grpo_jax.run.keep import records


class Named(NamedTuple):
  """A field of a config that may hold a name of the Hub.

  Attributes:
    kind: What the name stands for.
    source: The name, and of data the arguments beside it.
    split: Of data: 'train' or 'heldout'.
  """

  kind: Literal['model', 'tokenizer', 'data']
  source: Source
  split: str = ''


def pinned(
  config: Config, directory: str | pathlib.Path, peers: Processes
) -> Config:
  """The config with a commit in each name of the Hub.

  Args:
    config: Of this start.
    directory: The workdir, which may not exist. A name that its run has, stands
      for the same commit.
    peers: The processes of the run; the first one asks for all.

  Raises:
    ValueError: There is no such model or data set.
  """
  named = peers.exchange(names(config))
  if not any(named):
    return config
  _check_alike(named)
  known = _known(pathlib.Path(directory))
  found: list[str] = []

  def with_commit(one: Named) -> str:
    found.append(known.get(_key(one)) or _looked_up(one))
    return found[-1]

  hashes: dict[str, str] = {}
  with peers.together():  # a name that does not exist is an error of all
    if peers.is_first:
      mapped(config, with_commit)
      hashes = records.hashes(directory)
  found, hashes = peers.from_first((found, hashes))
  told = iter(found)
  config = mapped(config, lambda one: next(told))
  _expect(config, hashes)
  return config


def _check_alike(named: list[list[str]]) -> None:
  """Raises a ValueError if a name is a path on some hosts alone."""
  for text in dict.fromkeys(one for names in named for one in names):
    with_path = [rank for rank, names in enumerate(named) if text not in names]
    if with_path:
      raise ValueError(
        f'{text} is a path on the host of process {with_path[0]}, and a name '
        'of the Hub on others; put it on all of them or on none, or write '
        f'hf://{text}.'
      )


def fetch(config: Config) -> None:
  """Downloads the models and data sets of a config, where they are missing.

  Raises:
    ValueError: One cannot be had.
    OSError: The disk is too small.
  """

  def downloaded(one: Named) -> str:
    if hub.parse(one.source.name):
      if one.kind == 'data':
        build_data.files_of(one.source)
      else:
        is_model = one.kind == 'model'
        needs = 'weights' if is_model else 'tokenizer'
        hub.local_model(one.source.name, needs)
    return one.source.name

  mapped(config, downloaded)


def names(config: Config) -> list[str]:
  """The names of the Hub in a config, each once."""
  found: dict[str, None] = {}

  def look(one: Named) -> str:
    if hub.parse(one.source.name):
      found[one.source.name] = None
    return one.source.name

  mapped(config, look)
  return [*found]


def mapped(config: Config, change: Callable[[Named], str]) -> Config:
  """A config with other names of models, tokenizers and data.

  Args:
    config: Any.
    change: Gives the new name. It is called for each field that has one, in
      the same order every time.
  """
  model = lambda path: change(Named('model', Source(path)))
  data = lambda one, split: dataclasses.replace(
    one, name=change(Named('data', one, split))
  )

  def several(value: str | tuple[Source, ...], split: str):
    found = tuple(data(one, split) for one in build_data.sources_in(value))
    # A text stays one, as it is compared with that of the workdir.
    return (found[0].name if found else '') if isinstance(value, str) else found

  rewards = tuple(
    dataclasses.replace(
      one, kwargs={**one.kwargs, 'path': model(one.kwargs['path'])}
    )
    if one.name == reward_model.NAME and isinstance(one.kwargs.get('path'), str)
    else one
    for one in config.rewards
  )
  shown = config.warm_up
  if shown.steps:
    shown = dataclasses.replace(
      shown, demonstrations=several(shown.demonstrations, 'train')
    )
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, path=model(config.model.path)),
    teacher=dataclasses.replace(
      config.teacher, path=model(config.teacher.path)
    ),
    data=dataclasses.replace(
      config.data,
      tokenizer=change(Named('tokenizer', Source(config.data.tokenizer))),
      train=several(config.data.train, 'train'),
      heldout=several(config.data.heldout, 'heldout'),
    ),
    rewards=rewards,
    warm_up=shown,
  )


def _looked_up(one: Named) -> str:
  """The name with its commit, if it is one of the Hub."""
  if one.kind == 'data':
    return build_data.with_commit(one.source, one.split)
  name = hub.parse(one.source.name)
  if name is None or name.commit:
    return one.source.name
  return str(name.pinned(hub.model_commit(name)))


def _known(directory: pathlib.Path) -> dict[tuple[str, ...], str]:
  """The names of the workdir's run with their commits."""
  known: dict[tuple[str, ...], str] = {}
  if not records.holds_run(directory):
    return known

  def keep(one: Named) -> str:
    text = one.source.name
    name = hub.parse(text)
    if name is not None and name.commit:
      typed = dataclasses.replace(one.source, name=str(name.pinned('')))
      known[_key(one._replace(source=typed))] = text
    return text

  mapped(records.saved_config(directory), keep)
  return known


def _expect(config: Config, hashes: Mapping[str, str]) -> None:
  """Notes what the run has read, for the day when a commit has vanished."""
  for split in 'train', 'heldout':
    sources = build_data.sources_in(getattr(config.data, split))
    for place, source in enumerate(sources):
      name = f'data.{split}[{place}]={source.name!r}'
      if name in hashes:
        build_data.expect(source, split, hashes[name])


def _key(one: Named) -> tuple[str, ...]:
  """What tells the names of a config apart."""
  name = hub.parse(one.source.name)
  kind = 'data' if one.kind == 'data' else 'model'
  parts = (str(one.source.kwargs.get(k, '')) for k in ('config', 'split'))
  return kind, str(name or one.source.name), one.split, *parts
