"""AdamW behind a global-norm clip, and its learning-rate schedule."""

from collections.abc import Callable
from typing import Any

import optax

from grpo_jax.optim import _numbers
from grpo_jax.optim._coasting_law import warn_if_growing


def learning_rate(
  peak: float,
  warmup_steps: int = 0,
  decay: str = 'constant',
  total_steps: int = 0,
  decay_share: float = 0.2,
) -> optax.Schedule:
  """A linear rise from 0 to `peak`, then a decay to 0 or a constant `peak`.

  Args:
    peak: The highest learning rate, reached after `warmup_steps`.
    warmup_steps: Optimizer steps of the rise; 0 starts at `peak`.
    decay: `'constant'`, `'linear'`, `'cosine'`, or `'warmup-stable-decay'`: the
      peak, then a linear decay in the last steps.
    total_steps: The optimizer step at which the decay reaches 0.
    decay_share: Share of the steps after the rise over which
      `'warmup-stable-decay'` falls, in (0, 1]; at least one step.

  Returns:
    A function from the count of optimizer steps to the learning rate.

  Raises:
    ValueError: A number is negative, or no number; or `decay` has another
      value, or needs steps but has none: `total_steps` is not more than
      `warmup_steps`.

  >>> schedule = learning_rate(1.0, 2, decay='linear', total_steps=4)
  >>> [float(schedule(step)) for step in range(5)]
  [0.0, 0.5, 1.0, 0.5, 0.0]
  """
  _numbers.check('learning_rate', 'peak', peak)
  _numbers.check('learning_rate', 'warmup_steps', warmup_steps, whole=True)
  _numbers.check('learning_rate', 'total_steps', total_steps, whole=True)
  _numbers.check('learning_rate', 'decay_share', decay_share, above=True)
  steps = total_steps - warmup_steps
  if decay not in ('constant', 'linear', 'cosine', 'warmup-stable-decay'):
    raise ValueError(
      f"learning_rate got decay={decay!r}; give 'constant', 'linear', 'cosine' "
      "or 'warmup-stable-decay'."
    )
  if decay_share > 1:
    raise ValueError(
      f'learning_rate got decay_share={decay_share}; give at most 1.'
    )
  if decay != 'constant' and steps <= 0:
    raise ValueError(
      f'learning_rate got total_steps={total_steps} with warmup_steps='
      f'{warmup_steps}; a {decay} decay needs total_steps > warmup_steps.'
    )
  # Functions, so that only the chosen one is built: the others may be invalid
  # for these steps.
  falling = max(1, round(decay_share * steps))
  tail = {
    'constant': lambda: optax.constant_schedule(peak),
    'linear': lambda: optax.linear_schedule(peak, 0.0, steps),
    'cosine': lambda: optax.cosine_decay_schedule(peak, steps),
    'warmup-stable-decay': lambda: optax.linear_schedule(
      peak, 0.0, falling, steps - falling
    ),
  }[decay]()
  if not warmup_steps:
    return tail
  rise = optax.linear_schedule(0.0, peak, warmup_steps)
  return optax.join_schedules([rise, tail], [warmup_steps])


def adamw(
  schedule: optax.ScalarOrSchedule,
  b1: float = 0.9,
  b2: float = 0.999,
  epsilon: float = 1e-8,
  weight_decay: float = 0.0,
  clip_norm: float | None = 1.0,
  decays: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """AdamW after clipping the gradient's global norm.

  Args:
    schedule: Learning rate, or a function from the optimizer step to it.
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in [0, 1).
    epsilon: Added to the root of the second moment, in the gradient's units.
    weight_decay: Decoupled decay: the share of a parameter that a step of
      learning rate 1 would remove.
    clip_norm: Largest global norm of the gradient; None does not clip.
    decays: From the parameters to a tree of bools that says which of them
      decay; None: all. (Their rank does not tell: stacked norms have two axes.)

  Returns:
    An optax transformation that ignores extra arguments.

  Raises:
    ValueError: A number is outside its range.

  Warns:
    UserWarning: `b2 < b1 ** 2`; see `warn_if_growing`.
  """
  if not callable(schedule):
    _numbers.check('adamw', 'schedule', schedule)
  _numbers.reals('adamw', 'b1', b1)
  _numbers.reals('adamw', 'b2', b2)
  _numbers.check('adamw', 'epsilon', epsilon)
  _numbers.check('adamw', 'weight_decay', weight_decay)
  if clip_norm is not None:
    _numbers.check('adamw', 'clip_norm', clip_norm, above=True)
  if not (0 <= b1 < 1 and 0 <= b2 < 1):
    raise ValueError(
      f'adamw got b1={b1} and b2={b2}; give for each at least 0 and less than '
      '1.'
    )
  # b2 = 0 is allowed here, but the law of coasting divides by its root.
  if b2 > 0:
    warn_if_growing(b1, b2)
  adam = optax.adamw(
    schedule,
    b1=b1,
    b2=b2,
    eps=epsilon,
    weight_decay=weight_decay,
    mask=decays,
  )
  # The clip comes first, so that the moments remember clipped gradients.
  if clip_norm is not None:
    adam = optax.chain(optax.clip_by_global_norm(clip_norm), adam)
  # Brakes and the learner pass on arguments that AdamW does not know.
  return optax.with_extra_args_support(adam)
