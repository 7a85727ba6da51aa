"""What an optimizer would still do if every gradient were zero from now on."""

import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.optim import _parts

_MISSING = re.compile(
  r'\w*update\w*\(\) missing \d+ required '
  r'(?:keyword-only|positional) arguments?: (.*)'
)


class Coasted(NamedTuple):
  """Where zero gradients lead, and by which way; see :func:`coast`.

  Attributes:
    moved: Tree like the parameters, in their units: the sum of the updates
      without decoupled decay, in float32 or wider.
    decayed: Tree like the parameters: what decoupled weight decay did on the
      way.
    norms: `[num_steps]`, global norm of each step's motion without decay;
      float32, or float64 where a parameter is.
    params: The parameters at the end, in their own dtypes: the first ones plus
      `moved` and `decayed`, but for rounding.
    state: The optimizer's state at the end.
  """

  moved: Any
  decayed: Any
  norms: jax.Array
  params: Any
  state: Any


def coast(
  transformation: optax.GradientTransformation,
  state: Any,
  params: Any,
  num_steps: int,
  **extra_args: Any,
) -> Coasted:
  """Runs an optimizer on zero gradients, along the path that it then takes.

  Momentum and weight decay alone move the parameters then. For Adam `norms`
  follows :func:`grpo_jax.optim.coasting_ratio`; for SGD with momentum it is a
  geometric series, for Lion constant steps, for RMSProp zero. After T updates
  at a constant rate, schedule-free goes n / (T + n) of its way to `z` in n
  steps. Schedules, chains, masks, `optax.inject_hyperparams` and
  `optax.MultiSteps` (whose half-full accumulator counts as memory) act as they
  would in training.

  Weight decay needs no gradient either, so it is reported apart. `decayed` is
  the part of each update that comes from the parameters, `moved` all else; see
  :func:`grpo_jax.optim.split_update`. What the update multiplies both with is
  taken as it is, so LAMB's trust ratio scales the decay as it scales the rest.
  Nothing of the state is left out for that, so keys of noise, learning rates
  and scales act as they do.

  Decay that is added to the gradient (L2) before the moments is split in two:
  what a step adds is in `decayed`, what the moments remember of it in `moved`.

  `z` of `optax.contrib.schedule_free` is memory as far as it differs from the
  parameters: moving towards it is in `moved`, and so are decays that it took.
  Any other copy of the parameters that the update moves towards (of SAM,
  Mechanic, Madgrad, an anchor of your own, also one that follows the
  parameters) is refused: such a motion is neither momentum nor decay.

  Under `jax.jit`, XLA removes what is not read.

  Args:
    transformation: An optimizer: any optax transformation whose update needs
      only gradients, state and parameters, or `extra_args` that stay the same.
    state: Its state now.
    params: The parameters now; any tree.
    num_steps: Steps with zero gradient; a static int, 0 or more.
    **extra_args: Passed to every update.

  Returns:
    A :class:`Coasted`.

  Raises:
    ValueError: `num_steps` is no static int >= 0; the optimizer's update
      requires keywords that are not among `extra_args` (`optax.lbfgs`,
      `optax.polyak_sgd`); or it is no sum of weight decay and all else.

  >>> sgd = optax.sgd(0.5, momentum=0.5)
  >>> params = jnp.float32(1.0)
  >>> _, state = sgd.update(jnp.float32(2.0), sgd.init(params), params)
  >>> coasted = coast(sgd, state, params, 3)
  >>> coasted.norms.tolist(), float(coasted.moved), float(coasted.params)
  ([0.5, 0.25, 0.125], -0.875, 0.125)
  """
  if not isinstance(num_steps, int | np.integer) or num_steps < 0:
    raise ValueError(
      f'coast got num_steps={num_steps}; give a static int, 0 or more.'
    )
  _parts.refuse_pairs('coast', params)
  state, params = jax.tree.map(jnp.asarray, (state, params))
  zeros = jax.tree.map(jnp.zeros_like, params)
  # Sums in float32, because bfloat16 would round small steps of a long way off.
  none = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=_parts.wide(x)), params)

  add = lambda total, x: total + x.astype(total.dtype)

  def step(carry, _):
    params, state, moved, decayed = carry
    update, after = _update(transformation, zeros, state, params, extra_args)
    # At every step and not once, because decay depends on the parameters.
    decay = _decay(transformation, zeros, state, params, extra_args)
    motion = jax.tree.map(jnp.subtract, update, decay)
    moved = jax.tree.map(add, moved, motion)
    decayed = jax.tree.map(add, decayed, decay)
    params = optax.apply_updates(params, update)
    return (params, after, moved, decayed), _norm(motion)

  (params, state, moved, decayed), norms = jax.lax.scan(
    step, (params, state, none, none), length=num_steps
  )
  return Coasted(moved, decayed, norms, params, state)


def _decay(transformation, zeros, state, params, extra_args):
  """The part of an update that comes from the parameters, a tree like them."""
  # Memory counts as gradients do, so that only the parameters are told apart.
  values = _parts.update_parts(
    'coast',
    transformation,
    zeros,
    state,
    params,
    extra_args,
    memory=_parts.FRESH,
    copies=True,
  )
  return _parts.part_tree(values, _parts.DECAYED, params)


def _update(transformation, zeros, state, params, extra_args):
  """One update, with an error that says which keywords it lacks."""
  update = optax.with_extra_args_support(transformation).update
  try:
    return update(zeros, state, params, **extra_args)
  except TypeError as error:
    # optax has no list of the keywords that an update needs: the TypeError of a
    # missing one is all there is.
    missing = _MISSING.search(str(error))
    if missing is None or extra_args.keys() & re.findall(r'\w+', missing[1]):
      raise  # another error, or a keyword that was given: no advice of ours
    raise ValueError(
      f'coast cannot run this optimizer on zero gradients alone, as its update '
      f'also needs {missing[1]}; leave out the transformation that does, or '
      'give coast what it needs as keywords if one value serves every step.'
    ) from error


def _norm(tree) -> jax.Array:
  squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, jnp.float32(0.0)))
