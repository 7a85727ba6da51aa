"""Stage constructors: each builds a transform that writes one named field.

The flow is reward -> advantage; keep -> weight; log_ratio -> objective ->
edits; penalty. A constructor takes an array function and raises, when the chain
is traced, if the field it edits is not there yet or is already spent.

Hyper-parameters go in as keyword arguments and reach the function as keyword
arguments. Each is a number or a schedule, a function of the rollout counter
(0 for the first rollout), for example `optax.linear_schedule(0.2, 0.1, 1000)`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from grpo_jax.losses._base import LossTransform


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
    hyper: Numbers and schedules. A schedule makes the state a counter of
      rollouts, which `credit` moves; `prepare` and `apply` then read the number
      of the rollout that was just credited.
  """
  name = function.__qualname__.split('.')[0]
  scheduled = any(callable(value) for value in hyper.values())

  def call(rollout, *args):
    return function(
      *args,
      **{k: v(rollout) if callable(v) else v for k, v in hyper.items()},
    )

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

  def write(batch, rollout):
    check_order(batch)
    old = (getattr(batch, field),) if edits else ()
    value = call(rollout, *old, batch)
    if field == 'reward':
      return batch._replace(reward=jnp.where(batch.valid, value, 0))
    value = value[:, :, None] if value.ndim == 2 else value
    if field == 'keep':
      return batch._replace(keep=batch.keep & value)
    return batch._replace(**{field: jnp.where(batch.mask, value, 0)})

  def init():
    return jnp.zeros((), jnp.int32) if scheduled else ()

  def current(state):
    return jnp.maximum(state - 1, 0) if scheduled else None

  def credit(batch, state):
    if component == 'credit':
      batch = write(batch, state)
    return batch, state + 1 if scheduled else state

  def prepare(batch, state):
    if component == 'prepare':
      return write(batch, current(state))
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
    result = call(current(state), terms, batch)
    value, metrics = result if isinstance(result, tuple) else (result, {})
    value = jnp.where(batch.mask, value, 0)
    if field == 'penalty':
      value = terms.penalty + value
    return terms._replace(
      **{field: value}, metrics={**terms.metrics, **metrics}
    )

  return LossTransform(init, credit, prepare, apply, frozenset(requires), scope)


def on_reward(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Edits the reward: `function(reward, batch, **hyper) -> f32[P,G]`.

  Args:
    function: Sees the whole rollout.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers or schedules, passed to `function` by name.

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


def on_keep(function, requires: Iterable[str] = (), **hyper) -> LossTransform:
  """Drops tokens: `function(keep, batch, **hyper) -> bool[P,G] or [P,G,T]`.

  Args:
    function: Sees the whole rollout; what an earlier transform dropped
      stays dropped.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers or schedules, passed to `function` by name.

  Returns:
    A `LossTransform`; place it before the weight is set, whose
    denominators count the kept tokens.
  """
  return _stage(
    function, 'credit', 'keep', edits=True, requires=requires, hyper=hyper
  )


def set_advantage(
  function, requires: Iterable[str] = (), **hyper
) -> LossTransform:
  """Sets the advantage: `function(batch, **hyper) -> f32[P,G] or [P,G,T]`.

  Args:
    function: Sees the whole rollout; its statistics run over `batch.valid`.
    requires: Optional fields that it reads, by name.
    **hyper: Numbers or schedules, passed to `function` by name.

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
    function: Sees the whole rollout; returns f32[P,G] or f32[P,G,T].
    requires: Optional fields that it reads, by name.
    **hyper: Numbers or schedules, passed to `function` by name.

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
    **hyper: Numbers or schedules, passed to `function` by name.

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
    **hyper: Numbers or schedules, passed to `function` by name.

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


def on_log_ratio(
  function, requires: Iterable[str] = (), scope: str = 'row', **hyper
) -> LossTransform:
  """Edits the log-ratio: `function(terms, batch, **hyper) -> f32[P,G,T]`.

  Args:
    function: Differentiable; may return a pair (array, metrics), metrics being
      a dict of per-token values f32[P,G,T].
    requires: Optional fields that it reads, by name.
    scope: `'batch'` if it couples completions, else `'row'`.
    **hyper: Numbers or schedules, passed to `function` by name.

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
    **hyper: Numbers or schedules, passed to `function` by name.

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
    **hyper: Numbers or schedules, passed to `function` by name.

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
    **hyper: Numbers or schedules, passed to `function` by name.

  Returns:
    A `LossTransform`; it may stand anywhere in a chain.
  """
  return _stage(
    function, 'apply', 'penalty', requires=requires, scope=scope, hyper=hyper
  )
