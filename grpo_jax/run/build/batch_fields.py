"""Builds what fills the fields of a batch that a method of one's own reads."""

from collections.abc import Mapping
from collections.abc import Sequence
import inspect
from typing import Any

from grpo_jax import losses
from grpo_jax.config import Config
from grpo_jax.config import importing
from grpo_jax.rollouts import batch_fields
from grpo_jax.rollouts import turn_fields
from grpo_jax.rollouts.batch_fields import BatchField
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import method as build_method
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects


def batch_fields_of(
  config: Config, method: losses.LossTransform, objects: Objects = NOTHING
) -> tuple[BatchField, ...]:
  """The fields that a method reads and that come from records.

  Args:
    config: Names functions for those that have a number for each token.
    method: The loss of the run.
    objects: Has the functions that were given in Python.

  Raises:
    ValueError: A function cannot be imported or takes other arguments, or is
      for a field that the run computes.
  """
  named = config.learner.fields
  if taken := sorted({*named} & build_method.COMPUTED):
    raise ValueError(
      f'config.learner.fields names {taken[0]!r}, which a run computes itself; '
      'give the field another name, in the method too.'
    )
  return tuple(
    BatchField(name, _function(name, named, objects) if name in named else None)
    for name in sorted(build_method.own_fields(method))
  )


def turn_fields_of(
  config: Config, method: losses.LossTransform
) -> turn_fields.TurnFields:
  """The fields that a method reads of the turns of episodes.

  Args:
    config: Of the run; without an environment completions are single turns.
    method: The loss of the run.
  """
  names = (method.requires & losses.OF_TURNS) - {'turn'}
  if not config.environment.name or not names:
    return turn_fields.NO_TURNS
  weights = [one.weight for one in config.rewards if one.name == 'environment']
  most = config.environment.max_turns
  return turn_fields.TurnFields(tuple(sorted(names)), most, sum(weights, 0.0))


def _function(
  name: str, named: Mapping[str, str], objects: Objects
) -> batch_fields.PerToken:
  """The function for a field."""
  where = f'config.learner.fields[{name!r}]={named[name]!r}'
  if name in objects.fields:
    return objects.fields[name]
  if objects_lib.is_object(named[name]):  # of a plan, which calls none
    return lambda record, ids: [1.0] * len(ids)
  found = importing.imported(named[name], where)
  try:
    inspect.signature(found).bind({}, [])
  except TypeError as error:
    raise ValueError(
      f'{where} is a function of {inspect.signature(found)}, but it will be '
      'called with (record, ids); let it take these two.'
    ) from error
  except ValueError:  # some functions written in C have no signature
    pass
  return found


def check_records(
  fields: Sequence[BatchField],
  config: Config,
  method: losses.LossTransform,
  sources: Sequence[Any],
) -> None:
  """Raises a ValueError if a record has no number for a field.

  Of a large source a sample is read. What is found later ends the run then.

  Args:
    fields: What `batch_fields_of` returned.
    config: Names the sources.
    method: The loss of the run, which knows its transforms.
    sources: The records to train on.
  """
  names = [field.name for field in fields if field.function is None]
  if not names:
    return
  several = build_data.sources_in(config.data.train)
  for source, records in zip(several, sources, strict=True):
    called = f'data.train={source.name!r}'
    for row, record in build_data.checked_rows(records, called):
      for name in names:
        try:
          batch_fields.number_of(record, name)
        except ValueError as error:
          raise ValueError(
            f'{row} cannot be used: {error}, and '
            f'{_reader(name, config, method)} reads it; give every record a '
            f'number of this name, or name a function (record, ids) -> a '
            f'number for each id, as in config.learner.fields='
            f"{{{name!r}: 'my_lab.losses:by_token'}}."
          ) from error


def _reader(name: str, config: Config, method: losses.LossTransform) -> str:
  """Who reads a field: the transforms, where their names are known."""
  readers = {who: None for who, place in method.writes if name in place.reads}
  called = f'the method {config.learner.method!r}'
  if not readers:
    return called
  return f'{called}, by its transform {" and ".join(readers)},'
