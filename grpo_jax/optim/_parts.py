"""Runs a computation and keeps, beside each value, the parts it is a sum of.

An update of an optimizer is linear in a gradient, in moments and in parameters,
once all that they are multiplied with is taken as it is: roots of second
moments, trust ratios, the factors of clips, learning rates. So each value here
is an array and its parts, by the source that they come from, and the primitives
of JAX act on both.

- What is linear acts on every part. A constant that is added to one source's
  part belongs to it; one that is added to several counts as fresh.
- In a product, one factor has the parts and the other is a coefficient. That is
  the factor that is not linear in any source; if both are linear, the product
  is no sum of parts.
- A bound (`max`, `min`, `clamp`) is a factor for each coordinate.
- Any other function of a single source is that source's. Of several it is no
  sum of parts, and can be a coefficient only.

Nothing of a state is set to 0 for that, so it does not matter what else a state
holds: keys of noise, learning rates, counts, scales, parameters.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

# A computation, with the parts of each value.


Array = jax.Array
Tree = Any

FRESH = 'fresh'  # the gradient; its part is what the other parts leave
CARRIED = 'carried'  # moments of earlier gradients
DECAYED = 'decayed'  # the parameters
STORED = 'stored'  # copies of parameters in a state
_WITHOUT_ARRAY = (FRESH, STORED)

# Called with the same operands, so that what they call can take their place.
_CALLS = (
  *('jit', 'pjit', 'closed_call', 'core_call', 'remat', 'remat2', 'checkpoint'),
  *('custom_jvp_call', 'custom_vjp_call'),
)
# Linear in all of their inexact operands together; the others are indices.
_LINEAR = (
  *('add', 'sub', 'neg', 'add_any', 'select_n', 'copy', 'copy_p'),
  *('convert_element_type', 'broadcast_in_dim', 'reshape', 'transpose'),
  *('squeeze', 'expand_dims', 'rev', 'slice', 'dynamic_slice', 'gather', 'pad'),
  *('dynamic_update_slice', 'concatenate', 'split', 'scatter', 'scatter-add'),
  *('fft', 'reduce_precision', 'reduce_window_sum', 'name'),
  *('reduce_sum', 'cumsum', 'psum', 'psum_invariant', 'all_gather', 'pvary'),
  *('all_to_all', 'ppermute', 'reduce_scatter'),
  *('sharding_constraint', 'mesh_cast', 'reshard', 'real', 'imag', 'conj'),
  *('complex',),
)
_ONE_BY_ONE = ('optimization_barrier', 'device_put')
_PRODUCTS = ('mul', 'dot_general', 'conv_general_dilated')
_BOUNDS = ('max', 'min', 'clamp')


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['array', 'parts'],
  meta_fields=['linear', 'zero', 'guessed', 'parts_guessed', 'why'],
)
@dataclasses.dataclass(frozen=True)
class Value:
  """An array, and what is known of the sum that it is.

  Attributes:
    array: The value itself.
    parts: By source, of the array's shape, in float32 or wider; without
      sources: a constant. The parts of `FRESH` and `STORED` are only named
      (None). None: it depends on sources, but is no sum of their parts.
    linear: Whether it is linear in a source, and not another function of one.
    zero: Whether it is a constant 0.
    guessed: Whether `array` may differ from what it was in the update.
    parts_guessed: Whether parts that have arrays may.
    why: The primitive that made it no sum of parts.
  """

  array: Any
  parts: dict[str, Any] | None = dataclasses.field(default_factory=dict)
  linear: bool = True
  zero: bool = False
  guessed: bool = False
  parts_guessed: bool = False
  why: str = ''


def wide(x: Any) -> Any:
  """The dtype of a part: float32, or wider where the array is."""
  return jnp.promote_types(x.dtype, jnp.float32)


def evaluate(
  jaxpr: core.ClosedJaxpr,
  values: Sequence[Value],
  strict: bool = False,
  pins: Mapping[Any, Array] | None = None,
) -> list[Value]:
  """The outputs of a computation, with their parts.

  Args:
    jaxpr: The computation.
    values: Its inputs.
    strict: Whether only what is linear has parts: functions of one source and
      bounds have none, and constants are left out.
    pins: What some variables are known to be, by variable.

  Returns:
    One value for each output.
  """
  known = _with_selected(jaxpr.jaxpr, dict(pins or {}))
  environment = {}

  def read(variable):
    if isinstance(variable, core.Literal):
      return _constant(variable.val)
    return environment[variable]

  environment.update(zip(jaxpr.jaxpr.invars, values, strict=True))
  consts = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
  environment.update({var: _constant(const) for var, const in consts})
  for eqn in jaxpr.jaxpr.eqns:
    operands = [read(variable) for variable in eqn.invars]
    here = [known.get(variable) for variable in eqn.outvars]
    with eqn.ctx.manager:
      results = _apply(eqn, operands, strict, here)
    for variable, result, pin in zip(eqn.outvars, results, here, strict=True):
      if pin is not None:
        result = dataclasses.replace(result, array=pin, guessed=False)
      environment[variable] = result
  return [read(variable) for variable in jaxpr.jaxpr.outvars]


def _with_selected(jaxpr, pins):
  """Pins also for what a pinned variable is selected from."""
  for eqn in reversed(jaxpr.eqns):
    here = [pins.get(variable) for variable in eqn.outvars]
    if all(pin is None for pin in here):
      continue
    if eqn.primitive.name in _CALLS:
      called = _called(eqn).jaxpr
      inner = _with_selected(called, _pinned(called, here))
      found = [inner.get(variable) for variable in called.invars]
    elif eqn.primitive.name == 'select_n':
      found = [None, *(here * (len(eqn.invars) - 1))]
    else:
      continue
    pins |= {
      variable: pin
      for variable, pin in zip(eqn.invars, found, strict=True)
      if pin is not None and not isinstance(variable, core.Literal)
    }
  return pins


def _called(eqn) -> core.ClosedJaxpr:
  called = eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))
  if isinstance(called, core.Jaxpr):
    return core.ClosedJaxpr(called, ())
  return called


def _pinned(jaxpr, pins):
  """Pins of a called computation's outputs."""
  return {
    variable: pin
    for variable, pin in zip(jaxpr.outvars, pins, strict=True)
    if pin is not None and not isinstance(variable, core.Literal)
  }


def _constant(array):
  plain = np.ndarray | np.generic | float | int | bool | complex
  zero = isinstance(array, plain) and not np.any(np.asarray(array))
  return Value(array, zero=zero)


def _apply(eqn, operands, strict, pins) -> list[Value]:
  """The outputs of one equation."""
  name = eqn.primitive.name
  if name in _CALLS:
    called = _called(eqn)
    return evaluate(called, operands, strict, _pinned(called.jaxpr, pins))
  if name == 'cond':
    return _cond(eqn, operands, strict, pins)
  if name == 'scan' and len(_labels(operands)) > 1:
    return _scan(eqn, operands, strict)
  arrays = _bind(eqn, [value.array for value in operands])
  if all(value.parts == {} for value in operands):
    guessed = any(value.guessed for value in operands)
    zero = _is_zero(name, operands)
    return [Value(array, zero=zero, guessed=guessed) for array in arrays]
  if name in _ONE_BY_ONE and len(arrays) == len(operands):
    return [
      dataclasses.replace(value, array=array)
      for value, array in zip(operands, arrays, strict=True)
    ]
  rule = _whole
  if all(jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays):
    rule = _RULES.get(name, _whole)
  return rule(eqn, operands, arrays, strict)


def _bind(eqn, arrays, **changed) -> list[Array]:
  params = eqn.primitive.get_bind_params(eqn.params)
  functions, params = params if isinstance(params, tuple) else ((), params)
  made = eqn.primitive.bind(*functions, *arrays, **{**params, **changed})
  return list(made) if eqn.primitive.multiple_results else [made]


def _wide_params(eqn) -> dict[str, Any]:
  """The dtypes that an equation names, as wide as those of parts."""
  return {
    name: jnp.promote_types(eqn.params[name], jnp.float32)
    for name in ('new_dtype', 'preferred_element_type')
    if eqn.params.get(name) is not None
  }


def _is_zero(name, operands) -> bool:
  numbers = [v for v in operands if _inexact(v)] or operands
  if name in _PRODUCTS:
    return any(value.zero for value in numbers)
  return name in _LINEAR and all(value.zero for value in numbers)


def _inexact(value) -> bool:
  return jnp.issubdtype(jnp.result_type(value.array), jnp.inexact)


def _labels(values) -> set[str]:
  return {label for value in values for label in value.parts or {}}


def _part(label, array):
  return None if label in _WITHOUT_ARRAY else array.astype(wide(array))


def _sum(array, parts, linear, guessed, parts_guessed) -> Value:
  held = any(part is not None for part in parts.values())
  return Value(
    array,
    parts,
    linear=linear,
    guessed=guessed,
    parts_guessed=parts_guessed and held,
  )


def _mixed(array, values, why) -> Value:
  whys = [value.why for value in values if value.parts is None]
  guessed = any(value.guessed for value in values)
  return Value(array, None, guessed=guessed, why=(*whys, why)[0])


def _whole(eqn, operands, arrays, strict) -> list[Value]:
  """Any function: the part of its source, if there is just one."""
  labels = _labels(operands)
  mixed = any(value.parts is None for value in operands)
  if mixed or strict or len(labels) != 1:
    return [_mixed(array, operands, eqn.primitive.name) for array in arrays]
  guessed = any(value.guessed for value in operands)
  (label,) = labels
  return [
    _sum(array, {label: _part(label, array)}, False, guessed, guessed)
    for array in arrays
  ]


def _linear(eqn, operands, arrays, strict) -> list[Value]:
  """A function that is linear in its inexact operands, acting on each part."""
  numbers = [value for value in operands if _inexact(value)]
  if any(value.parts is None for value in numbers):
    return [_mixed(array, numbers, '') for array in arrays]
  labels = _labels(numbers)
  if not labels:
    if numbers and all(value.zero for value in numbers):
      return [Value(array, zero=True) for array in arrays]
    return _whole(eqn, operands, arrays, strict)
  if not strict and any(not v.parts and not v.zero for v in numbers):
    if len(labels) == 1:
      return _whole(eqn, numbers, arrays, strict)
    labels |= {FRESH}

  def act_on_label(label):
    if label in _WITHOUT_ARRAY:
      return [None] * len(arrays)
    parts = [
      part_of(value, label) if _inexact(value) else value.array
      for value in operands
    ]
    return _bind(eqn, parts, **_wide_params(eqn))

  found = {label: act_on_label(label) for label in labels}
  linear = any(value.linear for value in numbers if value.parts)
  guessed = any(value.guessed for value in operands)
  # A guessed index, or condition of a choice.
  chosen = any(value.guessed for value in operands if not _inexact(value))
  chosen |= any(value.parts_guessed for value in numbers)
  return [
    _sum(
      array,
      {label: parts[i] for label, parts in found.items()},
      linear,
      guessed,
      chosen,
    )
    for i, array in enumerate(arrays)
  ]


def part_of(value: Value, label: str) -> Array:
  """The part of a source, in float32 or wider; 0 where there is none."""
  part = (value.parts or {}).get(label)
  if part is None:
    array = jnp.asarray(value.array)
    return jnp.zeros_like(array, dtype=wide(array))
  return part


def part_tree(values: list[Value], label: str, like: Tree) -> Tree:
  """The parts of a source, as a tree like another one."""
  parts = [part_of(value, label) for value in values]
  return jax.tree.unflatten(jax.tree.structure(like), parts)


def _scaled(eqn, operands, arrays, place) -> list[Value]:
  """A product, in which the factor at a place has the parts."""
  carrier = operands[place]
  guessed = any(value.guessed for value in operands)
  others = [jnp.asarray(value.array) for value in operands]
  others = [array.astype(wide(array)) for array in others]

  def scaled(part):
    factors = [*others[:place], part, *others[place + 1 :]]
    return _bind(eqn, factors, **_wide_params(eqn))

  parts = {
    label: None if part is None else scaled(part)[0]
    for label, part in carrier.parts.items()
  }
  factors = any(v.guessed for i, v in enumerate(operands) if i != place)
  inexact = carrier.parts_guessed or factors
  return [_sum(arrays[0], parts, carrier.linear, guessed, inexact)]


def _product(eqn, operands, arrays, strict) -> list[Value]:
  if any(value.zero for value in operands):
    return [Value(arrays[0], zero=True)]
  known = [i for i, value in enumerate(operands) if value.parts]
  if len(known) == 2:
    known = [i for i in known if operands[i].linear]
  if len(known) == 1:
    return _scaled(eqn, operands, arrays, known[0])
  return _whole(eqn, operands, arrays, strict)


def _quotient(eqn, operands, arrays, strict) -> list[Value]:
  above, below = operands
  if above.zero:
    return [Value(arrays[0], zero=True)]
  if above.parts and (above.linear or not (below.parts and below.linear)):
    return _scaled(eqn, operands, arrays, 0)
  return _whole(eqn, operands, arrays, strict)


def _bound(eqn, operands, arrays, strict) -> list[Value]:
  """Shrinks all parts of a coordinate as much as the coordinate itself."""
  known = [value for value in operands if value.parts and value.linear]
  if strict or len(known) != 1 or len(_labels(operands)) == 1:
    return _whole(eqn, operands, arrays, strict)
  (bounded,) = known
  some = bounded.array != 0
  factor = jnp.where(some, arrays[0] / jnp.where(some, bounded.array, 1), 1)
  factor = factor.astype(wide(factor))
  parts = {
    label: None if part is None else part * factor
    for label, part in bounded.parts.items()
  }
  guessed = any(value.guessed for value in operands)
  # The factor is a guess where the coordinate itself is.
  inexact = guessed or bounded.parts_guessed
  return [_sum(arrays[0], parts, True, guessed, inexact)]


def _power(eqn, operands, arrays, strict) -> list[Value]:
  if eqn.params['y'] == 1:
    return [dataclasses.replace(operands[0], array=arrays[0])]
  return _whole(eqn, operands, arrays, strict)


_RULES: dict[str, Callable[..., list[Value]]] = {
  **dict.fromkeys(_LINEAR, _linear),
  **dict.fromkeys(_PRODUCTS, _product),
  **dict.fromkeys(_BOUNDS, _bound),
  'div': _quotient,
  'integer_pow': _power,
}


def _cond(eqn, operands, strict, pins) -> list[Value]:
  """Both branches, with the parts that either of them has."""
  index, *values = operands

  def branch(jaxpr):
    inner = _pinned(jaxpr.jaxpr, pins)
    return lambda values: evaluate(jaxpr, values, strict, inner)

  branches = [branch(jaxpr) for jaxpr in eqn.params['branches']]
  values = [_as_array(value) for value in values]
  shapes = [jax.eval_shape(run, values) for run in branches]
  common = functools.reduce(_joined, shapes)

  def fitted(run):
    return lambda values: _fit(run(values), common)

  return jax.lax.switch(index.array, [fitted(run) for run in branches], values)


def _scan(eqn, operands, strict) -> list[Value]:
  """A loop, whose carry has the parts that it has after any step."""
  params, jaxpr = eqn.params, eqn.params['jaxpr']
  first = _places(params)
  operands = [_as_array(value) for value in operands]
  consts, carry = operands[: first[0]], operands[first[0] : first[1]]
  rows = operands[first[1] :]

  def body(carry, row):
    made = evaluate(jaxpr, [*consts, *carry, *row], strict)
    return made[: len(carry)], made[len(carry) :]

  row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
  common = jax.eval_shape(lambda carry: carry, carry)
  while True:
    joined = _joined(common, jax.eval_shape(body, common, row)[0])
    if jax.tree.structure(joined) == jax.tree.structure(common):
      break
    common = joined

  def step(carry, row):
    carry, made = body(carry, row)
    return _fit(carry, common), made

  carry, made = jax.lax.scan(
    step,
    _fit(carry, common),
    rows,
    length=params['length'],
    reverse=params['reverse'],
  )
  return [*carry, *made]


def _places(params) -> tuple[int, int]:
  """Where the carry of a loop begins among its operands, and where it ends."""
  if 'num_consts' in params:
    consts, carry = params['num_consts'], params['num_carry']
  else:  # of a newer JAX: trees of constants, carry and rows
    consts, carry = (
      len(list(tree)) for tree in [*params['ft_in'].unpack()][:2]
    )
  return consts, consts + carry


def _as_array(value):
  return dataclasses.replace(value, array=jnp.asarray(value.array))


def _joined(ones: list[Value], others: list[Value]) -> list[Value]:
  """What both of two lists of values are, in shapes."""

  def joined(one, other):
    guessed = one.guessed or other.guessed
    if one.parts is None or other.parts is None:
      why = one.why or other.why
      return Value(one.array, None, guessed=guessed, why=why)
    labels = one.parts.keys() | other.parts.keys()
    if labels and any(not v.parts and not v.zero for v in (one, other)):
      labels |= {FRESH}
    part = jax.ShapeDtypeStruct(one.array.shape, wide(one.array))
    parts = {name: None if name in _WITHOUT_ARRAY else part for name in labels}
    linear = any(v.linear for v in (one, other) if v.parts) or not labels
    parts_guessed = one.parts_guessed or other.parts_guessed
    made = _sum(one.array, parts, linear, guessed, parts_guessed)
    return dataclasses.replace(made, zero=one.zero and other.zero)

  return [joined(*pair) for pair in zip(ones, others, strict=True)]


def _fit(values: list[Value], common: list[Value]) -> list[Value]:
  """The values with the parts that the common ones have."""

  def fit(value, like):
    if like.parts is None:
      return dataclasses.replace(like, array=value.array)
    parts = {
      name: None if part is None else part_of(value, name)
      for name, part in like.parts.items()
    }
    return dataclasses.replace(like, array=value.array, parts=parts)

  return [fit(*pair) for pair in zip(values, common, strict=True)]


# An optimizer's update as a sum: of the gradient, its memory, the parameters.

# Fields of `optax.inject_hyperparams` states: settings, no memory of gradients.
_SETTINGS = ('hyperparams', 'hyperparams_states')
# Of `optax.MultiSteps`: gradients of this step, in parts.
_GATHERED = 'acc_grads'

_by_path = jax.tree_util.tree_leaves_with_path


def update_parts(
  who: str,
  transformation: optax.GradientTransformation,
  gradient: Tree,
  state: Any,
  params: Tree,
  extra_args: dict[str, Any],
  after: Any = None,
  memory: str = CARRIED,
  copies: bool = False,
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
    copies: Whether `z` of `optax.contrib.schedule_free` is told apart too; see
      `_with_memory`.

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
  like = gradient if params is None else params
  labels = _state_sources(transformation, state, like, memory)
  guessed = after is not None
  given = [_value(x, FRESH, guessed=guessed) for x in jax.tree.leaves(gradient)]
  held = [
    _value(x, label)
    for x, label in zip(jax.tree.leaves(state), labels, strict=True)
  ]
  own = [_value(x, DECAYED) for x in jax.tree.leaves(params)]
  count = len(jax.tree.leaves(shapes[0]))
  values = [*given, *held, *own]
  if copies and any(STORED in (value.parts or {}) for value in held):
    held = _with_memory(held, transformation, state, params, memory)
    values = [*given, *held, *own]
  pins = {}
  if guessed:
    variables = jaxpr.jaxpr.outvars[count:]
    pins = {
      variable: new
      for variable, new in zip(variables, jax.tree.leaves(after), strict=True)
      if not isinstance(variable, core.Literal)
    }
  found = evaluate(jaxpr, values, pins=pins)[:count]
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
      'towards them (as optax.contrib.sam and mechanize), which is neither '
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
    part = array.astype(wide(array))
  return Value(array, {label: part}, linear=linear, guessed=guessed)


def _state_sources(transformation, state, params, memory):
  """For each leaf of a state, its source, and whether it is linear in it.

  What a state begins with says what it is: memory of gradients with 0, a copy
  of the parameters with the parameters, a setting with another constant. A
  single number is memory only where it is added: a factor is a setting.
  """
  paths, first = _beginning(transformation, params)
  begins = dict(zip(paths, jax.eval_shape(first), strict=True))

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
    if value.parts == {} or (scalar and not _is_copy(value)):
      return None, True
    return STORED, True

  return [label(*leaf) for leaf in _by_path(state)]


def _beginning(transformation, params):
  """The paths of a first state's leaves, and what computes these leaves."""
  begin, shape = jax.make_jaxpr(transformation.init, return_shape=True)(params)
  inputs = [_value(leaf, DECAYED) for leaf in jax.tree.leaves(params)]
  paths = [path for path, _ in _by_path(shape)]
  return paths, lambda: evaluate(begin, inputs)


def _is_copy(value) -> bool:
  """Whether what a state begins with is linear in the parameters, or 0."""
  return value.parts is not None and value.linear


def _with_memory(held, transformation, state, params, memory):
  """A state's values, those of schedule-free's `z` split into two parts.

  `z` begins as the parameters and differs from them by what earlier gradients
  did. As far as it does it counts as memory, and otherwise as the parameters:
  moving on towards it is motion, and what it adds to weight decay is decay. Any
  other copy stays as it is, also where gradients change it: a moving average of
  the parameters, or a copy that is renewed now and then, is an anchor, and what
  pulls towards that is no momentum.

  Args:
    held: The values of the state.
    transformation: The optimizer.
    state: Its state.
    params: The parameters.
    memory: The source that memory counts as.
  """
  paths, first = _beginning(transformation, params)
  # What the copy would be if it were made now.
  copies = dict(zip(paths, first(), strict=True))

  def split(path, value):
    copy = copies.get(path)
    parts = copy.parts if copy is not None and _is_copy(copy) else None
    if not parts or DECAYED not in parts:
      return value
    of_params = parts[DECAYED]
    rest = _part(memory, value.array - of_params)
    return dataclasses.replace(value, parts={DECAYED: of_params, memory: rest})

  return [
    split(path, value) if is_z else value
    for (path, _), value, is_z in zip(
      _by_path(state), held, _are_z(state), strict=True
    )
  ]


def _are_z(state) -> list[bool]:
  """For each leaf of a state, whether it is of schedule-free's `z`."""
  free = optax.contrib.ScheduleFreeState

  def marked(part):
    marks = jax.tree.map(lambda _: False, part)
    if isinstance(part, free):
      marks = marks._replace(z=jax.tree.map(lambda _: True, part.z))
    return jax.tree.leaves(marks)

  parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, free))
  return [mark for part in parts for mark in marked(part)]
