"""Refuses chains that were put together by mistake, in a sentence each."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import difflib
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp


def check_transform(value: Any, kind: type, where: str) -> None:
  """Raises a ValueError if this is no transform.

  Args:
    value: What was given.
    kind: `LossTransform`.
    where: The subject of the error, such as 'chain'.
  """
  if isinstance(value, kind):
    check_names(value.requires, where)
    _check_scope(value.scope, where)
    return
  if isinstance(value, list | tuple):
    raise ValueError(
      f'{where} got a {type(value).__name__} of {len(value)}; give transforms '
      'one by one, as in losses.chain(*transforms).'
    )
  name = getattr(value, '__name__', None)
  if callable(value) and name:
    raise ValueError(
      f'{where} got {name}, which is a function that makes a transform; call '
      f'it, as in {name}().'
    )
  raise ValueError(
    f'{where} got {value!r:.60}, which is no LossTransform; give what a '
    'function of losses, such as losses.mean_over_tokens(), returns.'
  )


def _brief(value: Any) -> str:
  """What an error says of a value: of arrays, what they are, in one line."""
  if hasattr(value, 'shape'):
    return f'an array of shape {tuple(value.shape)}'
  if isinstance(value, tuple | dict):
    return f'a {type(value).__name__} of {len(value)}'
  return f'{value!r:.60}'


def check_names(requires: Iterable[str], where: str) -> frozenset[str]:
  """The names of required fields, if they are not a single text."""
  if isinstance(requires, str):
    raise ValueError(
      f'{where} got requires={requires!r}, whose letters would be the names; '
      f'give a tuple, as in requires=({requires!r},).'
    )
  return frozenset(requires)


def check_stage(
  name: str, function: Any, scope: str, requires: Iterable[Iterable[str]]
) -> frozenset[str]:
  """Checks what a stage is made of.

  Args:
    name: Of the function.
    function: Makes the new value.
    scope: See `LossTransform`.
    requires: The fields that the function and its controllers read.

  Returns:
    All fields that are read.

  Raises:
    ValueError: One of these cannot be used.
  """
  if not callable(function):
    raise ValueError(
      f'A stage got {function!r:.60}, which is no function; give one that '
      'returns an array, as help(grpo_jax.losses) explains.'
    )
  _check_scope(scope, name)
  return frozenset().union(*(check_names(one, name) for one in requires))


def _check_scope(scope: str, where: str) -> None:
  if scope not in ('row', 'batch'):
    raise ValueError(
      f"{where} got scope={scope!r}; give 'batch' if the function couples "
      "completions, else 'row'."
    )


def check_fields(fields: Iterable[str], known: tuple[str, ...]) -> None:
  """Raises a ValueError if `Batch` has no field of one of these names."""
  for name in fields:
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      meant = f' (did you mean {near[0]}?)' if near else ''
      raise ValueError(
        f'make_batch got {name}, which is no field of Batch{meant}; its fields '
        f'are {", ".join(known)}. Give one of your own as extras='
        f'{{{name!r}: ...}}.'
      )


def value_and_metrics(
  name: str, result: Any, shape: tuple[int, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The array and the metrics that a stage's function returned.

  Args:
    name: Of the function.
    result: An array, or a pair of an array and a dict.
    shape: [P,G,T], of the metrics.

  Raises:
    ValueError: It is neither, or a metric has another shape.
  """
  value, metrics = result, {}
  if isinstance(result, tuple) and len(result) == 2:
    value, metrics = result
  try:
    array = jax.numpy.asarray(value)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{name} returned {_brief(value)}; return an array, or a pair (array, '
      'metrics) with a dict of arrays.'
    ) from error
  if not isinstance(metrics, Mapping):
    raise ValueError(
      f'{name} returned a pair whose second part is {_brief(metrics)}; give '
      'metrics there, a dict of arrays by name.'
    )
  allowed = shape, (*shape[:2], 1)
  for key, metric in metrics.items():
    is_array = getattr(metric, 'shape', None) in allowed
    if not isinstance(key, str) or not is_array:
      raise ValueError(
        f'{name} returned a metric {key!r} that is {_brief(metric)}; give it a '
        f'name and one value per token, here {shape}.'
      )
  return array, dict(metrics)


def check_pair(result: Any) -> tuple[Any, Any]:
  """What the `credit` of a transform returned, a batch and a state."""
  if isinstance(result, tuple) and len(result) == 2:
    return result
  raise ValueError(
    f'The credit of a transform returned {_brief(result)}; return a pair, the '
    'Batch and the state of the transform.'
  )


def check_kind(result: Any, kind: type, where: str) -> None:
  """Raises a ValueError if a transform returned no `kind`."""
  if not isinstance(result, kind):
    raise ValueError(
      f'The {where} of a transform returned {type(result).__name__}; return '
      f'the {kind.__name__} that it was given, with fields changed by _replace.'
    )


def check_result(
  result: Any,
  kind: type,
  fields: Iterable[str],
  shape: tuple[int, ...],
  where: str,
) -> None:
  """Raises a ValueError if transforms of one's own returned something else.

  Args:
    result: What the last transform of a chain returned.
    kind: What it must be, a named tuple.
    fields: Of the result: what transforms write per token.
    shape: [P,G,T].
    where: The component of `LossTransform` that was called.
  """
  check_kind(result, kind, where)
  for name in fields:
    value = getattr(result, name)
    if value is not None and jax.numpy.shape(value) != shape:
      raise ValueError(
        f'The {where} of a transform left {name} with shape '
        f'{jax.numpy.shape(value)}, but this batch has [P,G,T] = {shape}; give '
        'one value for each token.'
      )


@contextlib.contextmanager
def with_state(method: Any, state: Any, where: str) -> Iterator[None]:
  """Turns an error of a state that is not the method's into a sentence.

  Args:
    method: A `LossTransform`.
    state: What was given as its state.
    where: The function that was called.
  """
  try:
    yield
  except Exception as error:
    # Only now, so that a state that works is not looked at.
    if jax.tree.structure(state) == jax.tree.structure(method.init()):
      raise
    raise ValueError(
      f'{where} got a state that is not of this method; give method.init() '
      'before the first rollout, and from then on the state that losses.credit '
      'returned for the same method.'
    ) from error


def at_least_float32(x) -> jax.Array:
  """Casts to float32, or leaves a wider float as it is."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def wide(x, dtype) -> jax.Array:
  """Casts `x` to `dtype`, but to float32 if `dtype` is a narrower float."""
  floating = jnp.issubdtype(dtype, jnp.floating)
  return at_least_float32(x) if floating else x.astype(dtype)


def check_required(requires, given, extras) -> None:
  """Raises if a field that a method requires is not there."""
  for name in sorted(requires):
    if given.get(name, extras.get(name)) is None:
      raise ValueError(
        f'This method reads {name!r}, which was not given; compute it and pass '
        'it in the Batch (entropy: as an argument of surrogate_loss).'
      )


class Place(NamedTuple):
  """What a transform writes, and where in a chain it may stand."""

  component: str  # of `LossTransform`: 'credit', 'prepare' or 'apply'
  field: str  # of `Batch`, or of `SurrogateTerms` if the component is 'apply'
  edits: bool = False  # the function takes the old value as first argument
  needs: str = ''  # a field that an earlier transform must have set
  before: str = ''  # a field that no earlier transform may have set
  reads: frozenset[str] = frozenset()  # see `LossTransform.requires`


Writes = tuple[tuple[str, Place], ...]
"""The transforms of a chain as it is written: names of functions, places."""


def order_problem(
  name: str, place: Place, is_set: Callable[[str], bool]
) -> str:
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


def check_order(writes: Writes) -> None:
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
        if sentence := order_problem(name, place, done.__contains__):
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
