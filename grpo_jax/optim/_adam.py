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
  """One update as a sum of three parts, trees like the parameters."""

  carried: Tree  # what the moments of earlier gradients do by themselves
  fresh: Tree  # what this gradient adds
  decayed: Tree  # what happens without any memory: decoupled weight decay


class CorrectedMoments(NamedTuple):
  """Bias-corrected moments, by the paths of their parameters in the tree."""

  m_hat: dict[Any, Array]  # first moment, bias corrected
  v_hat: dict[Any, Array]  # second moment, bias corrected


def is_adam(node: Any) -> bool:
  """Whether a node of a state holds the moments of Adam."""
  return isinstance(node, _ADAM)


def edit(state: Any, function: Callable[..., Any], *others: Any) -> Any:
  """The state with `function(adam, *other_adams)` in place of each Adam."""
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
  """The inner product of two trees in float32, f32[].

  A sum of products and not `jnp.vdot`, so that it works on any sharding.
  """
  products = jax.tree.map(
    lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y
  )
  return sum(jax.tree.leaves(products), jnp.zeros((), jnp.float32))


def find(state: Any, who: str) -> list[Any]:
  """All states of Adam inside a state.

  Args:
    state: Of any optax transformation.
    who: The function that needs them, for the error message.

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
  zero and the denominator that it had. So it comes from :math:`b_1 m_{t-1}`
  and the fresh part from :math:`(1 - b_1) g_t`, each passed through whatever
  comes after Adam (learning rate, trust ratio, masks).

  The carried part is found by running the transformation on zeros, from moments
  that lead to that denominator. So nothing needs to be known of the
  transformation but where Adam's moments are. With `b2 = 0` no moments lead to
  it, and the carried part is too large. Under `project_outward` the
  carried part is what the projection leaves of it.

  Args:
    transformation: Any with Adam's moments in its state.
    before: Its state before the update.
    after: Its state after the update.
    updates: The update itself.
    params: The parameters before the update.
    **extra_args: What the update was given besides.

  Returns:
    A `Split` whose parts add up to `updates`.

  Raises:
    ValueError: There are no moments of Adam.
  """
  run = optax.with_extra_args_support(transformation).update
  zeros = jax.tree.map(jnp.zeros_like, updates)
  rates = iter(decay_rates(transformation, before, zeros, params, **extra_args))

  def leading_to(old, new):
    b2 = next(rates)[1]

    def back(v):  # b2 * back(v) = v
      return jnp.where(b2 > 0, v / b2, v).astype(v.dtype)

    # Divided by b2, because the run on zeros multiplies by b2: it then ends at
    # the second moment of the real update.
    old = old._replace(nu=jax.tree.map(back, new.nu))
    if isinstance(new, optax.ScaleByAmsgradState):
      old = old._replace(nu_max=new.nu_max)
    return old

  # Gradients that `optax.MultiSteps` has accumulated count as fresh.
  start = edit(_without_accumulated(before), leading_to, after)
  # Weight decay needs no gradient either, so this run has it too; take it out.
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

  Under a gradient of 0, moments of 1 become b1 and b2. So it does not matter
  who set the rates, or whether they change from step to step. The compiler
  removes all of this run but a few scalars. (If the first moment is kept in
  bfloat16, `mu_dtype`, b1 is right to three digits.)
  """
  run = optax.with_extra_args_support(transformation).update
  # Brakes inside would edit these moments too: tell them that nothing is
  # clipped and that no rollout begins.
  released = {'first_of_rollout': jnp.array(False), 'clipped_share': 0.0}
  extra_args |= {k: v for k, v in released.items() if k in extra_args}

  def ones(node):
    # In bfloat16 a b2 of 0.999 would be read as 1.
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


def corrected_moments(
  transformation: optax.GradientTransformation,
  before: Any,
  after: Any,
  updates: Tree,
  params: Tree,
  **extra_args: Any,
) -> CorrectedMoments:
  """Bias-corrected moments after an update, of the parameters that have any.

  Args:
    transformation: See `split`.
    before: Its state before the update.
    after: Its state after the update.
    updates: The update itself.
    params: The parameters before the update.
    **extra_args: What the update was given besides.

  Returns:
    A `CorrectedMoments`; keys are `jax.tree_util` paths in `params`.

  Raises:
    ValueError: The moments do not lie along the parameters.
  """
  # optax keeps raw moments; the correction needs the rates.
  zeros = jax.tree.map(jnp.zeros_like, updates)
  rates = decay_rates(transformation, before, zeros, params, **extra_args)
  corrected = CorrectedMoments({}, {})
  for node, (b1, b2) in zip(
    find(after, 'corrected_moments'), rates, strict=True
  ):
    count = node.count.astype(jnp.float32)
    for moment, into, rate in (
      (node.mu, corrected.m_hat, b1),
      (node.nu, corrected.v_hat, b2),
    ):
      correction = 1 - rate**count
      correction = jnp.where(correction > 0, correction, 1)  # before any step
      # Several states of Adam own different parameters (`optax.partition`), so
      # each writes its own paths.
      for path, leaf in jax.tree_util.tree_leaves_with_path(moment):
        into[path] = leaf.astype(jnp.float32) / correction
  # Else every lookup by path would find nothing, and the norms would be 0.
  known = {path for path, _ in jax.tree_util.tree_leaves_with_path(updates)}
  if known and not known & corrected.v_hat.keys():
    raise ValueError(
      "Adam's moments do not lie along the parameters (as behind optax.flatten)"
      '; wrap a transformation that keeps a moment for each of them.'
    )
  return corrected


def stepped(before: Any, after: Any) -> Array:
  """Whether Adam has taken a step, bool[]; not while gradients accumulate.

  Its count tells, except where `reset_moments` set a count of 1 back to 0 and
  the step made it 1 again. Then the moments tell.
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

  # To compare the moments takes a pass over all of them, so that is done only
  # where the count does not tell.
  counted = jnp.any(jnp.stack([old.count != new.count for old, new in pairs]))
  return jax.lax.cond(counted, lambda: jnp.array(True), moved)


def _without_accumulated(state: Any) -> Any:
  """The state without the gradients that `optax.MultiSteps` has gathered."""
  gathers = lambda node: isinstance(node, optax.MultiStepsState)

  def emptied(node):
    if not gathers(node):
      return node
    zeros = jax.tree.map(jnp.zeros_like, node.acc_grads)
    return node._replace(acc_grads=zeros)

  return jax.tree.map(emptied, state, is_leaf=gathers)


def _scalar(moment: Tree) -> Array:
  """The number that all entries of a moment have; 0 if there are no entries."""
  leaves = [leaf for leaf in jax.tree.leaves(moment) if leaf.size]
  if not leaves:
    return jnp.zeros(())
  # All entries are equal, so the smallest array does.
  smallest = min(leaves, key=lambda leaf: leaf.size)
  return jnp.max(smallest).astype(jnp.float32)
