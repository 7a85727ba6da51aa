"""Stage constructors: each makes a transform that writes one named field.

`_PLACES` says for every constructor which field it writes and where in a chain
that may happen; `_stage` makes a transform for any of these places. What the
constructors have in common (the array function, hyper-parameters, metrics,
errors) is explained in the docstring of the package, `help(grpo_jax.losses)`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from grpo_jax.losses import _checks
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import at_least_float32
from grpo_jax.losses._checks import Place
from grpo_jax.losses._controllers import Controller
from grpo_jax.losses._controllers import scheduled

CREDIT_METRIC = 'metric/'  # of the keys in Batch.extras of metrics of `credit`


# In the order of a chain, from the reward to the loss. Constructors of 'apply'
# hand all of `SurrogateTerms` to their function, so none of them `edits`.
_PLACES = {
  'on_reward': Place('credit', 'reward', edits=True, before='advantage'),
  'on_keep': Place('credit', 'keep', edits=True),
  'set_advantage': Place('credit', 'advantage', before='advantage'),
  'on_advantage': Place('credit', 'advantage', edits=True, needs='advantage'),
  'set_weight': Place('prepare', 'weight', before='weight'),
  'on_weight': Place('prepare', 'weight', edits=True, needs='weight'),
  'on_weighted_advantage': Place(
    'prepare', 'advantage', edits=True, needs='weight'
  ),
  'on_log_ratio': Place('apply', 'log_ratio', before='objective'),
  'set_objective': Place('apply', 'objective', before='objective'),
  'on_objective': Place('apply', 'objective', needs='objective'),
  'add_penalty': Place('apply', 'penalty'),
}


def on_reward(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Edits the reward: `function(reward, batch, **hyper) -> f32[P,G]`.

  The function sees the whole rollout. Place the transform before the one that
  sets the advantage. For the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['on_reward'], function, hyper, requires)


def on_keep(
  function, requires: Iterable[str] = (), needs: str = '', **hyper
) -> LossTransform:
  """Drops tokens: `function(keep, batch, **hyper) -> bool[P,G] or [P,G,T]`.

  The function sees the whole rollout and returns which tokens are trained. A
  token that an earlier transform has dropped stays dropped. Place the transform
  before the one that sets the weight, whose denominators count kept tokens.
  `needs='advantage'` says that the function reads the advantage, so that a
  chain that sets it later is refused. For the other arguments see
  `help(grpo_jax.losses)`.
  """
  place = _PLACES['on_keep']._replace(needs=needs)
  return _stage(place, function, hyper, requires)


def set_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Sets the advantage: `function(batch, **hyper) -> f32[P,G] or [P,G,T]`.

  The function sees the whole rollout; its statistics should run over
  `batch.valid`. A chain has exactly one such transform. For the arguments see
  `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['set_advantage'], function, hyper, requires)


def on_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Edits the advantage: `function(advantage, batch, **hyper)`.

  The function sees the whole rollout, gets the advantage as f32[P,G,T] and
  returns f32[P,G] or f32[P,G,T]. Place the transform after the one that sets
  the advantage. For the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['on_advantage'], function, hyper, requires)


def set_weight(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Sets the weight of each token: `function(batch, **hyper) -> f32[P,G,T]`.

  The function sees one optimizer batch; its denominators should run over
  `batch.keep`. The weight is for aggregation alone, because it multiplies
  objective and penalty alike. A chain has exactly one such transform. For the
  arguments see `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['set_weight'], function, hyper, requires)


def on_weight(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Edits the weight: `function(weight, batch, **hyper) -> f32[P,G,T]`.

  The function sees one optimizer batch. Place the transform after the one that
  sets the weight. For the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['on_weight'], function, hyper, requires)


def on_weighted_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Edits the advantage by the weight: `function(advantage, batch, **hyper)`.

  The function sees one optimizer batch with its weight and returns f32[P,G,T].
  Place the transform after the one that sets the weight, and after all that
  edit the weight: it does not see later edits. For the arguments see
  `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['on_weighted_advantage'], function, hyper, requires)


def on_log_ratio(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Edits the log-ratio: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  The function is differentiated; it reads `terms.log_ratio` and returns what
  replaces it. Place the transform before the one that sets the objective. For
  the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(_PLACES['on_log_ratio'], function, hyper, requires, scope)


def set_objective(
  function,
  requires: Iterable[str] = (),
  scope: str = 'row',
  zero_without_advantage: bool = False,
  **hyper,
) -> LossTransform:
  """Sets the objective: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  The function is differentiated, and what it returns is maximised. A chain has
  exactly one such transform. For the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(
    _PLACES['set_objective'],
    function,
    hyper,
    requires,
    scope,
    zero_without_advantage,
  )


def on_objective(
  function,
  requires: Iterable[str] = (),
  scope: str = 'row',
  zero_without_advantage: bool = False,
  **hyper,
) -> LossTransform:
  """Edits the objective: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  The function is differentiated; it reads `terms.objective` and returns what
  replaces it. Place the transform after the one that sets the objective. For
  the arguments see `help(grpo_jax.losses)`.
  """
  return _stage(
    _PLACES['on_objective'],
    function,
    hyper,
    requires,
    scope,
    zero_without_advantage,
  )


def add_penalty(
  function,
  requires: Iterable[str] = (),
  scope: str = 'row',
  zero_without_advantage: bool = False,
  **hyper,
) -> LossTransform:
  """Adds to the penalty: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  The function is differentiated, and what it returns is minimised. The
  transform may stand anywhere in a chain; penalties add up. For the arguments
  see `help(grpo_jax.losses)`.
  """
  return _stage(
    _PLACES['add_penalty'],
    function,
    hyper,
    requires,
    scope,
    zero_without_advantage,
  )


def _stage(
  place: Place,
  function: Callable[..., Any],
  hyper: dict[str, Any],
  requires: Iterable[str],
  scope: str = 'row',
  zero_without_advantage: bool = True,
) -> LossTransform:
  """A transform that writes one field and passes on everything else.

  Args:
    place: What is written, and where in a chain that may happen.
    function: Makes the new value.
    hyper: Numbers, schedules and controllers by name. The state holds those of
      schedules and controllers; `credit` updates it before a value is read.
    requires: See `LossTransform`; the fields that controllers read are added.
    scope: See `LossTransform`.
    zero_without_advantage: See `LossTransform`. What writes the log-ratio or
      nothing in `apply` adds nothing by itself.
  """
  component, field, edits, *_ = place
  # The name for errors. The `__qualname__` of a closure begins with the
  # transform that holds it, 'ppo_clip'; its `__name__` is only 'objective'.
  name = getattr(function, '__qualname__', repr(function)).split('.')[0]
  moving = {
    key: value if isinstance(value, Controller) else scheduled(value)
    for key, value in hyper.items()
    if callable(value) or isinstance(value, Controller)
  }
  read = requires, *(c.requires for c in moving.values())
  requires = _checks.check_stage(name, function, scope, read)

  def call(state, shape, *args):
    current = {key: c.value(state[key]) for key, c in moving.items()}
    result = function(*args, **(hyper | current))
    value, metrics = _checks.value_and_metrics(name, result, shape)
    return _in_field_shape(name, place, value, shape), metrics

  def write(batch, state):
    _check_order(name, place, batch)
    old = (getattr(batch, field),) if edits else ()
    value, metrics = call(state, batch.mask.shape, *old, batch)
    # A Batch has no field for metrics. The learner takes those of `credit` out
    # of `extras` before anything else reads the batch.
    marked = {CREDIT_METRIC + key: value for key, value in metrics.items()}
    batch = batch._replace(extras=_joined(batch.extras, marked))
    return _written(batch, field, value)

  def init():
    return {key: c.init() for key, c in moving.items()}

  def credit(batch, state):
    # Every transform moves its own hyper-parameters here, also one that writes
    # in `apply`: this pass alone runs once per rollout, so all updates of a
    # rollout see the same numbers.
    state = {key: c.update(state[key], batch) for key, c in moving.items()}
    return write(batch, state) if component == 'credit' else batch, state

  def prepare(batch, state):
    if component == 'prepare':
      return write(batch, state)
    # The weight would count the right tokens even so, because `credit` has run
    # through the whole chain by now. Refusing it keeps a chain readable: what
    # stands first happens first.
    if field == 'keep' and batch.weight is not None:
      raise ValueError(_checks.dropped_late(name))
    return batch

  def apply(terms, batch, state):
    if component != 'apply':
      return terms
    _check_order(name, place, terms)
    value, metrics = call(state, batch.mask.shape, terms, batch)
    value = jnp.where(batch.mask, value, 0)
    if field == 'penalty':
      value = terms.penalty + value
    return terms._replace(
      **{field: value}, metrics=_joined(terms.metrics, metrics)
    )

  return LossTransform(
    init, credit, prepare, apply, requires, scope, zero_without_advantage,
    ((name, place._replace(reads=requires)),),
  )  # fmt: skip


def _check_order(name: str, place: Place, holder) -> None:
  """Raises a ValueError if a transform stands in the wrong place of a chain.

  Args:
    name: Of its function.
    place: What it writes.
    holder: A `Batch` or `SurrogateTerms`, as earlier transforms have left it.
  """
  is_set = lambda field: getattr(holder, field) is not None
  if problem := _checks.order_problem(name, place, is_set):
    raise ValueError(problem)


def _in_field_shape(name: str, place: Place, value: Array, shape) -> Array:
  """What a stage's function returned, in the shape of its field.

  Any other shape that broadcasts (one prompt of the batch, a mean over it, the
  transposed reward) would give completions the credit of others.

  Args:
    name: Of the function.
    place: What it writes.
    value: What it returned.
    shape: [P,G,T].

  Returns:
    [P,G] for the reward, else [P,G,1] or [P,G,T].

  Raises:
    ValueError: It has another shape, or what is kept is not of booleans.
  """
  prompts, group, tokens = shape
  per_completion = (prompts, group), (prompts, group, 1)
  if place.field == 'reward':
    allowed, words = per_completion[:1], '[P,G]'
  else:
    allowed = *per_completion, (prompts, group, tokens)
    words = '[P,G,T], or [P,G] for one value per completion'
  if value.shape not in allowed:
    raise ValueError(
      f'{name} returned an array of shape {value.shape} for {place.field!r}, '
      f'but this batch has [P,G,T] = {tuple(shape)} (prompts, completions per '
      f'prompt, completion positions); return {words}.'
    )
  is_bool = value.dtype == bool
  if jnp.iscomplexobj(value) or (place.field == 'keep' and not is_bool):
    wanted = 'booleans' if place.field == 'keep' else 'real numbers'
    raise ValueError(
      f'{name} returned {value.dtype} for {place.field!r}; return {wanted}.'
    )
  if place.field != 'keep':
    value = at_least_float32(value)  # counts, and what was computed in bfloat16
  if place.field != 'reward' and value.ndim == 2:
    return value[:, :, None]
  return value


def _joined(old, new):
  """Metrics of two transforms; a token that either of them marks is marked.

  Only boolean metrics of the same name are joined. Of other metrics of the same
  name the later one replaces the earlier.
  """
  both = {
    name: old[name] | value
    for name, value in new.items()
    if name in old and value.dtype == bool
  }
  return {**old, **new, **both}


def _written(batch, field, value):
  """The batch with a new value of a field, zero in padding.

  Padding is every invalid completion and, for a per-token field, every position
  outside the mask.
  """
  if field == 'reward':
    value = jnp.where(batch.valid, value, 0)
    # `normalize_each_reward` reads the parts of the reward, not their sum. It
    # would miss this edit, so the sum of all edits is kept beside the parts.
    edit = batch.extras.get('reward_edit', 0) + value - batch.reward
    extras = {**batch.extras, 'reward_edit': edit}
    return batch._replace(reward=value, extras=extras)
  if field == 'keep':
    return batch._replace(keep=batch.keep & value)
  return batch._replace(**{field: jnp.where(batch.mask, value, 0)})
