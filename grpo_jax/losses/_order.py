"""Where in a chain a transform may stand."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
  """What a transform writes, and where in a chain it may stand."""

  component: str  # of `LossTransform`: 'credit', 'prepare' or 'apply'
  field: str  # of `Batch`, or of `SurrogateTerms` if the component is 'apply'
  edits: bool = False  # the function takes the old value as first argument
  needs: str = ''  # a field that an earlier transform must have set
  before: str = ''  # a field that no earlier transform may have set


Writes = tuple[tuple[str, Place], ...]
"""The transforms of a chain as it is written: names of functions, places."""


def problem(name: str, place: Place, is_set: Callable[[str], bool]) -> str:
  """Why a transform may not stand where it does, as a sentence; '' if it may.

  Args:
    name: Of its function.
    place: What it writes.
    is_set: Whether earlier transforms have set a field.
  """
  if place.before and is_set(place.before):
    return (
      f'{name} writes {place.field!r}, but an earlier transform of the chain '
      f'has already set {place.before!r}; place {name} before it, or keep one '
      'of them.'
    )
  if place.needs and not is_set(place.needs):
    return (
      f'{name} edits {place.field!r}, but no earlier transform of the chain '
      f'sets {place.needs!r}; place {name} after one that does.'
    )
  return ''


def dropped_late(name: str) -> str:
  """What is said of a transform that drops tokens behind the weight."""
  return (
    f'{name} drops tokens, but an earlier transform of the chain has '
    f"already counted them in 'weight'; place {name} before it."
  )


def check(writes: Writes) -> None:
  """Raises a ValueError if the transforms of a chain contradict each other.

  A field that none of them sets is no contradiction: the rest of the chain may
  run, such as its credit alone.

  Args:
    writes: See `Writes`.
  """
  sets = {place.field for _, place in writes if _sets(place)}
  done: set[str] = set()
  for component in ('credit', 'prepare', 'apply'):
    for name, place in writes:
      if place.component != component:
        continue
      # What no transform of the chain sets, the batch may bring.
      if not place.needs or place.needs in sets:
        if sentence := problem(name, place, done.__contains__):
          raise ValueError(sentence)
      if _sets(place):
        done.add(place.field)
  _check_drops(writes)


def _check_drops(writes: Sequence[tuple[str, Place]]) -> None:
  counted = False
  for name, place in writes:
    if place.field == 'keep' and counted:
      raise ValueError(dropped_late(name))
    counted |= place.field == 'weight' and _sets(place)


def _sets(place: Place) -> bool:
  """Whether a transform sets its field, and does not edit what is there."""
  return place.before == place.field
