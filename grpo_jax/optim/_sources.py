"""An optimizer's update as a sum: of the gradient, its memory, the parameters.

Nothing of a state is set to 0 for that, so it does not matter what else a state
holds: keys of noise, learning rates, counts, scales, parameters.
"""

from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import optax

from grpo_jax.optim import _parts
from grpo_jax.optim._parts import CARRIED
from grpo_jax.optim._parts import DECAYED
from grpo_jax.optim._parts import FRESH
from grpo_jax.optim._parts import STORED
from grpo_jax.optim._parts import Value

Tree = Any

# Fields of `optax.inject_hyperparams` states: settings, no memory of gradients.
_SETTINGS = ('hyperparams', 'hyperparams_states')
# Of `optax.MultiSteps`: gradients of this step, in parts.
_GATHERED = 'acc_grads'


def of_update(
  who: str,
  transformation: optax.GradientTransformation,
  gradient: Tree,
  state: Any,
  params: Tree,
  extra_args: dict[str, Any],
  after: Any = None,
  memory: str = CARRIED,
) -> list[Value]:
  """The leaves of an update, each with the parts that it is a sum of.

  Args:
    who: The function that needs them, for error messages.
    transformation: Any optax transformation.
    gradient: A tree like the parameters.
    state: The state before the update.
    params: The parameters before the update; None where none are needed.
    extra_args: What the update is given besides.
    after: The state after the update, where the gradient is not known and
      `gradient` has other values.
    memory: The source that moments count as.

  Returns:
    A value for each leaf, with parts of `FRESH`, `DECAYED` and `memory`.

  Raises:
    ValueError: The update is no such sum, or cannot be split without the
      gradient.
  """
  refuse_pairs(who, params)
  update = optax.with_extra_args_support(transformation).update
  jaxpr, shapes = jax.make_jaxpr(
    lambda *trees: update(*trees, **extra_args), return_shape=True
  )(gradient, state, params)
  of_init = gradient if params is None else params
  labels = _labels(transformation, state, of_init, memory)
  guessed = after is not None
  values = [
    *(_value(x, FRESH, guessed=guessed) for x in jax.tree.leaves(gradient)),
    *(
      _value(x, label)
      for x, label in zip(jax.tree.leaves(state), labels, strict=True)
    ),
    *(_value(x, DECAYED) for x in jax.tree.leaves(params)),
  ]
  pins = {}
  count = len(jax.tree.leaves(shapes[0]))
  if guessed:
    variables = jaxpr.jaxpr.outvars[count:]
    pins = {
      variable: new
      for variable, new in zip(variables, jax.tree.leaves(after), strict=True)
      if not isinstance(variable, core.Literal)
    }
  found = _parts.evaluate(jaxpr, values, pins=pins)[:count]
  for value in found:
    _refuse(who, value)
  return found


def refuse_pairs(who: str, params: Tree) -> None:
  """Raises a ValueError for the parameters of `optax.lookahead`."""
  if isinstance(params, optax.LookaheadParams):
    raise ValueError(
      f'{who} got optax.LookaheadParams, two sets of parameters of which an '
      f'update moves one towards the other; {_advice(who)}.'
    )


def _advice(who: str) -> str:
  if who == 'record_adam_moments':
    return 'record inside it instead, as in sam(record_adam_moments(adam), ...)'
  return f'give {who} the optimizer that is inside it, and its state'


def _refuse(who: str, value: Value) -> None:
  if value.parts is None:
    raise ValueError(
      f'{who} got an optimizer whose update is no sum of a part of earlier '
      f'gradients, of this gradient and of weight decay: {value.why!r} makes '
      'one number of several of them. Leave out what does so (as a sign, or '
      'one update times another), or wrap what comes before it.'
    )
  if STORED in value.parts:
    raise ValueError(
      f'{who} got an optimizer that keeps parameters in its state and moves '
      'towards them (as optax.contrib.schedule_free and sam), which is neither '
      f'memory of gradients nor weight decay; {_advice(who)}.'
    )
  if value.parts_guessed:
    raise ValueError(
      f'{who} cannot split this update without its gradient, as what is added '
      'before Adam or acts on the update depends on it; give gradient=....'
    )


def _value(leaf, label, guessed=False, linear=True) -> Value:
  array = jnp.asarray(leaf)
  label, linear = label if isinstance(label, tuple) else (label, linear)
  if label is None or not jnp.issubdtype(array.dtype, jnp.inexact):
    return Value(array, guessed=guessed)
  part = None
  if label not in (FRESH, STORED):
    part = array.astype(_parts.wide(array))
  return Value(array, {label: part}, linear=linear, guessed=guessed)


def _labels(transformation, state, params, memory):
  """For each leaf of a state, its source, and whether it is linear in it.

  What a state begins with says what it is: memory of gradients with 0, a copy
  of the parameters with the parameters, a setting with another constant. A
  single number is memory only where it is added: a factor is a setting.
  """
  begin, shape = jax.make_jaxpr(transformation.init, return_shape=True)(params)
  inputs = [_value(leaf, DECAYED) for leaf in jax.tree.leaves(params)]
  first = jax.eval_shape(lambda x: _parts.evaluate(begin, x), inputs)
  by_path = jax.tree_util.tree_leaves_with_path
  begins = {
    path: value for (path, _), value in zip(by_path(shape), first, strict=True)
  }

  def label(path, leaf):
    names = {getattr(key, 'name', None) for key in path}
    scalar = jnp.ndim(leaf) == 0
    value = begins.get(path)
    if names & set(_SETTINGS):
      return None, True
    if _GATHERED in names:
      return FRESH, True
    if value is None:  # as optax.monitor's: there is nothing to tell
      return STORED, True
    if value.zero:
      return memory, not scalar
    copied = value.parts is not None and value.linear
    if value.parts == {} or (scalar and not copied):
      return None, True
    return STORED, True

  return [label(*leaf) for leaf in by_path(state)]
