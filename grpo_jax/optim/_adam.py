"""Adam's moments, wherever they lie in the state of an optax transformation."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.optim import _parts

Array = jax.Array
Tree = Any

# Also the states of adamw, nadam, lamb, and of Adam inside muon.
_ADAM = optax.ScaleByAdamState | optax.ScaleByAmsgradState
_MU, _NU = 'mu', 'nu'  # sources, while rates are read


class Split(NamedTuple):
  """One update as a sum of three parts.

  Attributes:
    carried: Tree like the parameters: of the moments of earlier gradients.
    fresh: Tree like the parameters: of this gradient.
    decayed: Tree like the parameters: of these themselves, weight decay.
  """

  carried: Tree
  fresh: Tree
  decayed: Tree


class CorrectedMoments(NamedTuple):
  """Bias-corrected moments, by the paths of their parameters in the tree."""

  m_hat: dict[Any, Array]  # first moment, bias corrected
  # Second moment, bias corrected, real; of AMSGrad the largest that there was,
  # which it divides by.
  v_hat: dict[Any, Array]


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

  A complex number counts as the two real ones that it has. A sum of products
  and not `jnp.vdot`, so that it works on any sharding.
  """
  single = lambda a: a.astype(jnp.float32)

  def product(a, b):
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(b):
      return product(jnp.real(a), jnp.real(b)) + product(
        jnp.imag(a), jnp.imag(b)
      )
    return jnp.sum(single(a) * single(b))

  products = jax.tree.map(product, x, y)
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
  gradient: Tree | None = None,
  **extra_args: Any,
) -> Split:
  r"""Splits an update into what was carried, what is fresh, and weight decay.

  An update is linear in the gradient, the first moment and the parameters, once
  all that they are multiplied with is taken as it is in this update: the roots
  of second moments, a trust ratio, the factors of clips, learning rates. The
  parts are those three, so they are shares of the update as it is, and their
  sum. For Adam, with :math:`k` for all that follows it, they are

  .. math:: k \frac{b_1 m_{t-1}}{(1 - b_1^t) (\sqrt{\hat v} + \epsilon)}, \quad
            k \frac{(1 - b_1) g_t}{(1 - b_1^t) (\sqrt{\hat v} + \epsilon)}

  and the decay. Weight decay in front of Adam (L2) counts as decay as far as
  this step adds it; what the moments remember of it is carried. A coordinate
  that is clipped shrinks all of its parts alike. Gradients that
  `optax.MultiSteps` has accumulated, and noise, are fresh. Moments of other
  transformations (`optax.trace`, Muon's) are carried too.

  The parts are found by following the update through its computation, so
  nothing needs to be known of the transformation. What a leaf of its state is,
  its first value says: memory begins with 0, a copy of the parameters with
  them, a setting with another constant.

  Args:
    transformation: Any with Adam's moments in its state.
    before: Its state before the update.
    after: Its state after the update.
    updates: The update itself.
    params: The parameters before the update; None if it was given none.
    gradient: What the update was given. Where it is not given, the moments in
      `after` stand for it, and what needs more is refused.
    **extra_args: What the update was given besides.

  Returns:
    A `Split` whose parts add up to `updates`, in float32 or wider.

  Raises:
    ValueError: There are no moments of Adam; or the update is no such sum (a
      sign of it is taken, its state holds parameters that it moves towards); or
      the gradient is needed and is not given.
  """
  return split_for(
    'split_update',
    transformation,
    before,
    after,
    updates,
    params,
    gradient,
    extra_args,
  )


def split_for(
  who, transformation, before, after, updates, params, gradient, extra_args
) -> Split:
  """`split` for a function that is named in error messages."""
  find(before, who)
  given = gradient is not None
  values = _parts.update_parts(
    who,
    transformation,
    gradient if given else jax.tree.map(jnp.zeros_like, updates),
    before,
    params,
    extra_args,
    None if given else after,
  )
  carried = _parts.part_tree(values, _parts.CARRIED, updates)
  decayed = _parts.part_tree(values, _parts.DECAYED, updates)
  fresh = jax.tree.map(lambda u, c, d: u - c - d, updates, carried, decayed)
  return Split(carried, fresh, decayed)


def decay_rates(
  transformation: optax.GradientTransformation,
  state: Any,
  zeros: Tree,
  params: Tree,
  **extra_args: Any,
) -> list[tuple[Array, Array]]:
  """(b1, b2) that each state of Adam would be decayed by now, f32[] each.

  A new moment is its rate times the old one plus something else, so what
  moments of 1 become under that factor alone is the rate. So it does not matter
  who set the rates, whether they change from step to step, or what is added to
  the gradient. The compiler removes all of this run but a few scalars.

  Args:
    transformation: See `split`.
    state: Its state.
    zeros: A tree like the parameters.
    params: The parameters.
    **extra_args: What an update is given besides.

  Raises:
    ValueError: A moment is not a mean of gradients or of their squares.
  """
  run = optax.with_extra_args_support(transformation).update
  # Brakes inside would edit these moments too: tell them that nothing is
  # clipped and that no rollout begins.
  released = {'first_of_rollout': jnp.array(False), 'clipped_share': 0.0}
  extra_args |= {k: v for k, v in released.items() if k in extra_args}

  def single(node):
    # In bfloat16 a b2 of 0.999 would be read as 1.
    cast = lambda x: x.astype(_parts.wide(x))
    return node._replace(
      mu=jax.tree.map(cast, node.mu), nu=jax.tree.map(cast, node.nu)
    )

  def named(node):
    of = lambda name, tree: jax.tree.map(lambda _: name, tree)
    return node._replace(mu=of(_MU, node.mu), nu=of(_NU, node.nu))

  state = edit(state, single)
  labels = jax.tree.leaves(edit(state, named))
  jaxpr, shapes = jax.make_jaxpr(
    lambda state: run(zeros, state, params, **extra_args)[1], return_shape=True
  )(state)
  values = [
    _parts.Value(x, {label: jnp.ones_like(x)})
    if isinstance(label, str)
    else _parts.Value(x)
    for x, label in zip(jax.tree.leaves(state), labels, strict=True)
  ]
  found = _parts.evaluate(jaxpr, values, strict=True)
  after = jax.tree.unflatten(jax.tree.structure(shapes), found)
  return [
    (_rate(node, node.mu, _MU), _rate(node, node.nu, _NU))
    for node in find(after, 'decay_rates')
  ]


def _rate(node: Any, moment: Tree, name: str) -> Array:
  """The factor of an old moment in the new one; 0 if there are no entries."""
  is_value = lambda x: isinstance(x, _parts.Value)
  values = jax.tree.leaves(moment, is_leaf=is_value)
  if any(
    value.parts is None or value.parts.keys() - {name} for value in values
  ):
    raise ValueError(
      f'The moments in a {type(node).__name__} are not those of Adam: the '
      f'{"first" if name == _MU else "second"} one is no mean of '
      f'{"gradients" if name == _MU else "their squares"} (adamax, yogi and '
      "optax.contrib.adopt keep other numbers there). Use optax's adam, adamw, "
      'nadam, radam, amsgrad, lamb or scale_by_adam.'
    )
  values = [value for value in values if value.array.size]
  if not values:
    return jnp.zeros(())
  # All entries are equal, so the smallest array does.
  smallest = min(values, key=lambda value: value.array.size)
  rate = jnp.max(jnp.real(_parts.part_of(smallest, name)))
  return rate.astype(jnp.float32)


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
    ValueError: The moments do not lie along the parameters, a parameter has
      two, or they are no means of gradients and of their squares.
  """
  paths = [
    path
    for node in find(after, 'corrected_moments')
    for path, _ in jax.tree_util.tree_leaves_with_path(node.nu)
  ]
  if len(paths) > len(set(paths)):
    raise ValueError(
      'A parameter has the moments of two Adams, one behind the other; wrap '
      'the transformation with one of them alone.'
    )
  # optax keeps raw moments; the correction needs the rates.
  zeros = jax.tree.map(jnp.zeros_like, updates)
  rates = decay_rates(transformation, before, zeros, params, **extra_args)
  corrected = CorrectedMoments({}, {})
  for node, (b1, b2) in zip(
    find(after, 'corrected_moments'), rates, strict=True
  ):
    count = node.count.astype(jnp.float32)
    largest = getattr(node, 'nu_max', None)
    for moment, into, rate in (
      (node.mu, corrected.m_hat, b1),
      (node.nu if largest is None else largest, corrected.v_hat, b2),
    ):
      correction = 1 - rate**count
      correction = jnp.where(correction > 0, correction, 1)  # before any step
      if moment is largest:
        correction = 1  # before the largest was taken
      # Several states of Adam own different parameters (`optax.partition`), so
      # each writes its own paths.
      for path, leaf in jax.tree_util.tree_leaves_with_path(moment):
        leaf = leaf.astype(_parts.wide(leaf))
        into[path] = (leaf if moment is node.mu else leaf.real) / correction
  # Else a lookup by path would find nothing, or another's.
  shapes = {
    path: leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
  }
  if any(shapes.get(path) != v.shape for path, v in corrected.v_hat.items()):
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
