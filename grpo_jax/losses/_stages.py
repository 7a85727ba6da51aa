"""Stage constructors: each builds a transform that writes one named field.

The flow is reward -> advantage; keep -> weight; log_ratio -> objective ->
edits; penalty. A constructor takes an array function and raises, when the chain
is traced, if the field it edits is not there yet or is already spent.

Hyper-parameters go in as keyword arguments and reach the function as keyword
arguments. Each is a number, a schedule of the rollout counter, or a
`Controller`; see `_controllers.py`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._controllers import Controller
from grpo_jax.losses._controllers import scheduled

CREDIT_METRIC = 'metric/'  # prefix in Batch.extras of what `credit` measured


def _with_metrics(result):
  """(array, metrics) of what a stage's function returned."""
  value, metrics = result if isinstance(result, tuple) else (result, {})
  return jnp.asarray(value), metrics


def _joined(old, new):
  """Metrics of two links; where both mark tokens by one name, either counts."""
  both = {
    name: old[name] | value
    for name, value in new.items()
    if name in old and value.dtype == bool
  }
  return {**old, **new, **both}


def _written(batch, field, value):
  """The batch with a new value of a field, nothing of it where nobody owns."""
  if field == 'reward':
    value = jnp.where(batch.valid, value, 0)
    edit = batch.extras.get('reward_edit', 0) + value - batch.reward
    extras = {**batch.extras, 'reward_edit': edit}
    return batch._replace(reward=value, extras=extras)
  value = value[:, :, None] if value.ndim == 2 else value
  if field == 'keep':
    return batch._replace(keep=batch.keep & value)
  return batch._replace(**{field: jnp.where(batch.mask, value, 0)})


def _stage(
  function: Callable[..., Any],
  component: str,
  field: str,
  *,
  needs: str = '',
  before: str = '',
  edits: bool = False,
  requires: Iterable[str] = (),
  scope: str = 'row',
  hyper: dict[str, Any],
) -> LossTransform:
  """A transform that writes `field` in `component`, an identity elsewhere.

  Args:
    function: Makes the new value.
    component: `'credit'`, `'prepare'` or `'apply'`.
    field: What is written, of `Batch` or (in `apply`) of `SurrogateTerms`.
    needs: A field that an earlier link must have set.
    before: A field that no earlier link may have set.
    edits: Whether `function` takes the old value as its first argument.
    requires: See `LossTransform`.
    scope: See `LossTransform`.
    hyper: Numbers, schedules and controllers. The state holds those of the
      latter two, which `credit` moves before anything reads them.
  """
  name = getattr(function, '__qualname__', repr(function)).split('.')[0]
  moving = {
    key: value if isinstance(value, Controller) else scheduled(value)
    for key, value in hyper.items()
    if callable(value) or isinstance(value, Controller)
  }
  requires = frozenset(requires).union(*(c.requires for c in moving.values()))

  def call(state, *args):
    current = {key: c.value(state[key]) for key, c in moving.items()}
    return function(*args, **(hyper | current))

  def check_order(holder):
    if before and getattr(holder, before) is not None:
      raise ValueError(
        f'{name} writes {field!r}, but an earlier transform of the chain has '
        f'already set {before!r}; place {name} before it, or keep one of them.'
      )
    if needs and getattr(holder, needs) is None:
      raise ValueError(
        f'{name} edits {field!r}, but no earlier transform of the chain sets '
        f'{needs!r}; place {name} after one that does.'
      )

  def write(batch, state):
    check_order(batch)
    old = (getattr(batch, field),) if edits else ()
    value, metrics = _with_metrics(call(state, *old, batch))
    marked = {CREDIT_METRIC + key: value for key, value in metrics.items()}
    batch = batch._replace(extras=_joined(batch.extras, marked))
    return _written(batch, field, value)

  def init():
    return {key: c.init() for key, c in moving.items()}

  def credit(batch, state):
    state = {key: c.update(state[key], batch) for key, c in moving.items()}
    return write(batch, state) if component == 'credit' else batch, state

  def prepare(batch, state):
    if component == 'prepare':
      return write(batch, state)
    if field == 'keep' and batch.weight is not None:
      raise ValueError(
        f'{name} drops tokens, but an earlier transform of the chain has '
        f"already counted them in 'weight'; place {name} before it."
      )
    return batch

  def apply(terms, batch, state):
    if component != 'apply':
      return terms
    check_order(terms)
    value, metrics = _with_metrics(call(state, terms, batch))
    value = jnp.where(batch.mask, value, 0)
    if field == 'penalty':
      value = terms.penalty + value
    return terms._replace(
      **{field: value}, metrics=_joined(terms.metrics, metrics)
    )

  return LossTransform(init, credit, prepare, apply, requires, scope)


def on_reward(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Edits the reward: `function(reward, batch, **hyper) -> f32[P,G]`.

  Args:
    function: Sees the whole rollout.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it before the advantage is set.
  """
  return _stage(
    function,
    'credit',
    'reward',
    before='advantage',
    edits=True,
    requires=requires,
    hyper=hyper,
  )


def on_keep(
  function, requires: Iterable[str] = (), needs: str = '', **hyper
) -> LossTransform:
  """Drops tokens: `function(keep, batch, **hyper) -> bool[P,G] or [P,G,T]`.

  Args:
    function: Sees the whole rollout; what an earlier transform dropped
      stays dropped.
    requires: Optional fields that it reads, by name.
    needs: `'advantage'` if it reads what an earlier transform must have set.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it before the weight is set, whose
    denominators count the kept tokens.
  """
  return _stage(
    function,
    'credit',
    'keep',
    needs=needs,
    edits=True,
    requires=requires,
    hyper=hyper,
  )


def set_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Sets the advantage: `function(batch, **hyper) -> f32[P,G] or [P,G,T]`.

  Args:
    function: Sees the whole rollout; its statistics run over `batch.valid`.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; a chain has exactly one of these.
  """
  return _stage(
    function,
    'credit',
    'advantage',
    before='advantage',
    requires=requires,
    hyper=hyper,
  )


def on_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Edits the advantage: `function(advantage, batch, **hyper)`.

  Args:
    function: Sees the whole rollout; returns f32[P,G] or f32[P,G,T], or a pair
      of it and metrics, a dict of per-token values f32[P,G,T].
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it after the advantage is set.
  """
  return _stage(
    function,
    'credit',
    'advantage',
    needs='advantage',
    edits=True,
    requires=requires,
    hyper=hyper,
  )


def set_weight(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Sets each token's weight: `function(batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Sees one optimizer batch; its denominators run over
      `batch.keep`.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; a chain has exactly one of these. The weight
    multiplies objective and penalty alike: it is aggregation, nothing else.
  """
  return _stage(
    function,
    'prepare',
    'weight',
    before='weight',
    requires=requires,
    hyper=hyper,
  )


def on_weight(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Edits the weight: `function(weight, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Sees one optimizer batch.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it after the weight is set.
  """
  return _stage(
    function,
    'prepare',
    'weight',
    needs='weight',
    edits=True,
    requires=requires,
    hyper=hyper,
  )


def on_weighted_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Edits the advantage by the weight: `function(advantage, batch, **hyper)`.

  Args:
    function: Sees one optimizer batch with its weight; returns f32[P,G,T].
    requires: Optional fields that it reads, by name.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it after the weight is set. What edits the weight
    after it is not seen by it.
  """
  return _stage(
    function,
    'prepare',
    'advantage',
    needs='weight',
    edits=True,
    requires=requires,
    hyper=hyper,
  )


def on_log_ratio(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Edits the log-ratio: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Differentiable; may return a pair (array, metrics), metrics being
      a dict of per-token values f32[P,G,T].
    requires: Optional fields that it reads, by name.
    scope: `'batch'` if it couples completions, else `'row'`.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it before the objective is set.
  """
  return _stage(
    function,
    'apply',
    'log_ratio',
    before='objective',
    requires=requires,
    scope=scope,
    hyper=hyper,
  )


def set_objective(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Sets the objective: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Differentiable, maximised; may return (array, metrics).
    requires: Optional fields that it reads, by name.
    scope: `'batch'` if it couples completions, else `'row'`.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; a chain has exactly one of these.
  """
  return _stage(
    function,
    'apply',
    'objective',
    before='objective',
    requires=requires,
    scope=scope,
    hyper=hyper,
  )


def on_objective(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Edits the objective: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Differentiable; may return (array, metrics).
    requires: Optional fields that it reads, by name.
    scope: `'batch'` if it couples completions, else `'row'`.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; place it after the objective is set.
  """
  return _stage(
    function,
    'apply',
    'objective',
    needs='objective',
    requires=requires,
    scope=scope,
    hyper=hyper,
  )


def add_penalty(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Adds to the penalty: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Differentiable, minimised; may return (array, metrics).
    requires: Optional fields that it reads, by name.
    scope: `'batch'` if it couples completions, else `'row'`.
    **hyper: Numbers, schedules or controllers, passed to `function` by name.

  Returns:
    A `LossTransform`; it may stand anywhere in a chain.
  """
  return _stage(
    function, 'apply', 'penalty', requires=requires, scope=scope, hyper=hyper
  )
