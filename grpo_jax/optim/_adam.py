"""Adam's moments, wherever they lie in the state of an optax transformation."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.optim._coast import decay_alone

Array = jax.Array
Tree = Any

# Also the states of adamw, nadam, lamb, and of Adam inside muon.
_ADAM = optax.ScaleByAdamState | optax.ScaleByAmsgradState


class Split(NamedTuple):
  """One applied update as a sum of three, trees like the parameters."""

  carried: Tree  # what the moments of earlier gradients do
  fresh: Tree  # what this gradient adds
  decayed: Tree  # what is left without any memory: decoupled weight decay


class Owned(NamedTuple):
  """Adam's numbers for some parameters, by their paths in the tree."""

  m_hat: dict[Any, Array]  # first moment, bias corrected
  v_hat: dict[Any, Array]  # second moment, bias corrected


def is_adam(node: Any) -> bool:
  """Whether a node of a state holds the moments of Adam."""
  return isinstance(node, _ADAM)


def edit(state: Any, function: Callable[..., Any], *others: Any) -> Any:
  """The state with `function(adam, *other_adams)` for each state of Adam."""
  return jax.tree.map(
    lambda node, *rest: function(node, *rest) if is_adam(node) else node,
    state,
    *others,
    is_leaf=is_adam,
  )


def nodes(state: Any, wanted: Callable[[Any], bool]) -> list[Any]:
  """The nodes of a state that are of some kind, wherever they lie."""
  leaves = jax.tree.leaves(state, is_leaf=wanted)
  return [leaf for leaf in leaves if wanted(leaf)]


def dot(x: Tree, y: Tree) -> Array:
  """f32[], an inner product without a contraction: so on any sharding."""
  products = jax.tree.map(
    lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y
  )
  return sum(jax.tree.leaves(products), jnp.zeros((), jnp.float32))


def find(state: Any, who: str) -> list[Any]:
  """All states of Adam inside a state.

  Args:
    state: Of any optax transformation.
    who: Needs them, for the error message.

  Raises:
    ValueError: There are none.
  """
  found = nodes(state, is_adam)
  if not found:
    raise ValueError(
      f'{who} got a transformation whose state ({type(state).__name__}) holds '
      "no moments of Adam; wrap one made of optax's adam, adamw, nadam, "
      'amsgrad, lamb or scale_by_adam, inside other transformations or not.'
    )
  return found


def split(
  transformation: optax.GradientTransformation,
  before: Any,
  after: Any,
  updates: Tree,
  params: Tree,
  **extra_args: Any,
) -> Split:
  """Splits an update into what was carried, what is fresh, and weight decay.

  The carried part is what the transformation would have done with a gradient of
  zero and the denominator that it had, so it holds :math:`b_1 m_{t-1}` and the
  fresh part :math:`(1 - b_1) g_t`, both behind whatever comes after Adam
  (learning rate, trust ratio, masks). It is found by running the transformation
  on zeros, from moments that lead to that denominator; nothing needs to be
  known of it but where Adam's moments are. (With `b2 = 0` nothing leads to a
  denominator, and the carried part is too large. A projection acts on the parts
  as on the whole: what `project_outward` leaves of them.)

  Args:
    transformation: Any with Adam's moments in its state.
    before: Its state before the update.
    after: Its state after the update.
    updates: The update itself.
    params: The parameters before the update.
    **extra_args: What the update was given besides.

  Returns:
    A `Split` whose parts add up to `updates`.
  """
  run = optax.with_extra_args_support(transformation).update
  zeros = jax.tree.map(jnp.zeros_like, updates)
  rates = iter(decay_rates(transformation, before, zeros, params, **extra_args))

  def leading_to(old, new):
    b2 = next(rates)[1]

    def back(v):  # b2 * back(v) = v
      return jnp.where(b2 > 0, v / b2, v).astype(v.dtype)

    old = old._replace(nu=jax.tree.map(back, new.nu))
    if isinstance(new, optax.ScaleByAmsgradState):
      old = old._replace(nu_max=new.nu_max)
    return old

  start = edit(_without_accumulated(before), leading_to, after)
  carried, _ = run(zeros, start, params, **extra_args)
  decayed = decay_alone(transformation, zeros, start, params, extra_args)
  subtract = lambda x, y: jax.tree.map(jnp.subtract, x, y)
  return Split(subtract(carried, decayed), subtract(updates, carried), decayed)


def decay_rates(
  transformation: optax.GradientTransformation,
  state: Any,
  zeros: Tree,
  params: Tree,
  **extra_args: Any,
) -> list[tuple[Array, Array]]:
  """(b1, b2) that each state of Adam would be decayed by now, f32[] each.

  Read off what becomes of moments of one under a gradient of zero, so that it
  does not matter who set them, or whether they move. The compiler keeps of this
  a few scalars. (Of a first moment that is kept in bfloat16, `mu_dtype`, b1 is
  read to three digits.)
  """
  run = optax.with_extra_args_support(transformation).update
  # Brakes that act on moments shall not act on these.
  released = {'first_of_rollout': jnp.array(False), 'clipped_share': 0.0}
  extra_args |= {k: v for k, v in released.items() if k in extra_args}

  def ones(node):
    one = lambda x: jnp.ones_like(x, dtype=jnp.float32)
    return node._replace(
      mu=jax.tree.map(one, node.mu), nu=jax.tree.map(one, node.nu)
    )

  start = edit(_without_accumulated(state), ones)
  _, decayed = run(zeros, start, params, **extra_args)
  return [
    (_scalar(node.mu), _scalar(node.nu))
    for node in find(decayed, 'decay_rates')
  ]


def owned(
  transformation: optax.GradientTransformation,
  before: Any,
  after: Any,
  updates: Tree,
  params: Tree,
  **extra_args: Any,
) -> Owned:
  """Bias-corrected moments after an update, of the parameters that have any.

  Args:
    transformation: See `split`.
    before: Its state before the update.
    after: Its state after the update.
    updates: The update itself.
    params: The parameters before the update.
    **extra_args: What the update was given besides.

  Returns:
    An `Owned`; keys are `jax.tree_util` paths in `params`.

  Raises:
    ValueError: The moments do not lie along the parameters.
  """
  zeros = jax.tree.map(jnp.zeros_like, updates)
  rates = decay_rates(transformation, before, zeros, params, **extra_args)
  corrected = Owned({}, {})
  for node, (b1, b2) in zip(find(after, 'owned'), rates, strict=True):
    count = node.count.astype(jnp.float32)
    for moment, into, rate in (
      (node.mu, corrected.m_hat, b1),
      (node.nu, corrected.v_hat, b2),
    ):
      correction = 1 - rate**count
      correction = jnp.where(correction > 0, correction, 1)  # before any step
      for path, leaf in jax.tree_util.tree_leaves_with_path(moment):
        into[path] = leaf.astype(jnp.float32) / correction
  known = {path for path, _ in jax.tree_util.tree_leaves_with_path(updates)}
  if known and not known & corrected.v_hat.keys():
    raise ValueError(
      "Adam's moments do not lie along the parameters (as behind optax.flatten)"
      '; wrap a transformation that keeps a moment for each of them.'
    )
  return corrected


def stepped(before: Any, after: Any) -> Array:
  """bool[], whether Adam has taken a step: not while gradients accumulate.

  Its count says so, unless it has been set back to 0 and come to 1 again.
  """
  pairs = list(
    zip(find(before, 'stepped'), find(after, 'stepped'), strict=True)
  )

  def moved():
    moments = [(old.mu, new.mu) for old, new in pairs]
    changes = jax.tree.map(
      lambda x, y: jnp.any(x != y), *map(list, zip(*moments, strict=True))
    )
    return jnp.any(jnp.stack([jnp.array(False), *jax.tree.leaves(changes)]))

  counted = jnp.any(jnp.stack([old.count != new.count for old, new in pairs]))
  return jax.lax.cond(counted, lambda: jnp.array(True), moved)


def _without_accumulated(state: Any) -> Any:
  """The state with no gradients that `optax.MultiSteps` has gathered."""
  gathers = lambda node: isinstance(node, optax.MultiStepsState)

  def emptied(node):
    if not gathers(node):
      return node
    zeros = jax.tree.map(jnp.zeros_like, node.acc_grads)
    return node._replace(acc_grads=zeros)

  return jax.tree.map(emptied, state, is_leaf=gathers)


def _scalar(moment: Tree) -> Array:
  """The number that all entries of a moment have; 0 if there are none."""
  leaves = [leaf for leaf in jax.tree.leaves(moment) if leaf.size]
  if not leaves:
    return jnp.zeros(())
  smallest = min(leaves, key=lambda leaf: leaf.size)
  return jnp.max(smallest).astype(jnp.float32)
