"""Brakes: optax wrappers against what momentum does to clipped tokens.

A clipped token has no gradient, but Adam's first moment still holds its former
ones and moves it on, further out. Each wrapper takes what it needs as an extra
argument of `update`, as any optax transformation may.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.optim import _adam

Array = jax.Array


def reset_moments(
  inner: optax.GradientTransformation, which: str = 'both'
) -> optax.GradientTransformationExtraArgs:
  """Forgets Adam's moments at the first update of every rollout.

  With `'both'` Adam begins anew, its bias correction too, so the first step of
  every rollout is as long as the learning rate allows: each coordinate moves by
  nearly all of it. With `'first'` the second moment and the count stay, and the
  first moment grows again from 0: a shorter step.

  `update` takes `first_of_rollout`, bool[].

  Args:
    inner: A transformation with Adam in it.
    which: `'both'` moments and the count, or the `'first'` only.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: Another `which`; when initialised, no Adam in `inner`.

  References:
    slime's `--reset-optimizer-states`; Fontana et al., 2026 (see
    `record_adam_moments`)
  """
  if which not in ('both', 'first'):
    raise ValueError(
      f"reset_moments got which={which!r}; give 'both' or 'first'."
    )
  kept = () if which == 'both' else ('nu', 'nu_max', 'count')

  def before(state, first):
    def forgotten(node):
      return node._replace(
        **{
          name: jax.tree.map(
            lambda x: jnp.where(first, jnp.zeros_like(x), x), moment
          )
          for name, moment in node._asdict().items()
          if name not in kept
        }
      )

    return _adam.edit(state, forgotten)

  return _braked(inner, 'reset_moments', 'first_of_rollout', before, lasts=True)


def decay_carried(
  inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  r"""Shrinks the first moment by the share of tokens that are clipped.

  .. math:: m_{t-1} \leftarrow (1 - \text{clipped share}) \, m_{t-1}

  before every update. `update` takes `clipped_share`, f32[] in [0, 1].

  Args:
    inner: A transformation with Adam in it.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: When initialised, no Adam in `inner`.
  """

  def before(state, clipped_share):
    kept = 1 - jnp.asarray(clipped_share)

    def shrunk(node):
      return node._replace(
        mu=jax.tree.map(lambda m: m * kept.astype(m.dtype), node.mu)
      )

    return _adam.edit(state, shrunk)

  return _braked(inner, 'decay_carried', 'clipped_share', before, lasts=False)


def project_outward(
  inner: optax.GradientTransformation, epsilon: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
  r"""Takes out of a step what moves clipped tokens further out.

  With :math:`o` the gradient of the clipped tokens' outward log-ratios, summed,
  and :math:`D = 1 / (\sqrt{\hat v} + \epsilon)` of Adam, the step :math:`u`
  becomes

  .. math:: u - \frac{\max(0, \langle o, u \rangle)}
                     {\langle o, D o \rangle} D o,

  the nearest step in Adam's metric, :math:`\sum u^2 / D`, in which these tokens
  do not move outward on average, to first order. Moments are left as they are.

  `update` takes `outward`, a tree like the parameters. Its price is that of
  :math:`o`: another backward pass for every micro-batch that has clipped tokens
  and a second accumulator of the size of the parameters.

  Args:
    inner: A transformation with Adam in it; parameters without Adam are not
      corrected.
    epsilon: That of Adam, which its state does not tell.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: When initialised, no Adam in `inner`.
  """
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    outward = _given(extra_args, 'project_outward', 'outward')
    updates, after = inner.update(updates, state, params, **extra_args)
    moments = _adam.owned(inner, state, after, updates, params, **extra_args)

    def scaled(path, pull):
      if path not in moments.v_hat:
        return jnp.zeros_like(pull)
      return pull / (jnp.sqrt(moments.v_hat[path]) + epsilon)

    direction = jax.tree_util.tree_map_with_path(scaled, outward)
    size = _adam.dot(outward, direction)
    too_far = _adam.dot(outward, updates)
    projects = _adam.stepped(state, after) & (size > 0) & (too_far > 0)
    factor = too_far / jnp.where(size > 0, size, 1)

    def projected(u, d):
      return jnp.where(projects, u - factor * d, u).astype(u.dtype)

    return jax.tree.map(projected, updates, direction), after

  return optax.GradientTransformationExtraArgs(
    _init_with_adam(inner, 'project_outward'), update
  )


def restore_reward_scale(
  inner: optax.GradientTransformation, reference: float = 1.0
) -> optax.GradientTransformationExtraArgs:
  r"""Makes the step proportional to the scale of the advantages again.

  Adam divides the scale of the gradient out, so that rewards ten times as large
  train like the same rewards (proposition 2 of Fontana et al., 2026). Here the
  whole update of `inner` is multiplied by

  .. math:: \sqrt{\text{mean of } A^2} / \text{reference},

  over the trained tokens of the optimizer batch: a batch of small advantages
  takes a small step. Without a method that leaves the scale in the advantages
  (Dr. GRPO, RLOO, GPG, ...) there is nothing to restore.

  `update` takes `advantage_scale`, f32[], the root above.

  Args:
    inner: Any transformation. What decays weights is scaled too; chain it
      behind this one if it should not be.
    reference: The scale at which the update stays as it is.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: A reference that is not positive.
  """
  if reference <= 0:
    raise ValueError(
      f'restore_reward_scale got reference={reference}; give the root mean '
      'square of the advantages at which the step should stay as it is.'
    )
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    scale = _given(extra_args, 'restore_reward_scale', 'advantage_scale')
    updates, state = inner.update(updates, state, params, **extra_args)
    scaled = jax.tree.map(
      lambda u: u * jnp.asarray(scale / reference, u.dtype), updates
    )
    return scaled, state

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _braked(inner, who, needs, before, lasts):
  """`inner` behind an edit of its state, `before(state, extra argument)`.

  An edit that does not last is undone where Adam takes no step, as while
  gradients accumulate.
  """
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    edited = before(state, _given(extra_args, who, needs))
    updates, after = inner.update(updates, edited, params, **extra_args)
    if lasts:
      return updates, after
    took = _adam.stepped(edited, after)

    def kept(new, old):
      return jax.tree.map(lambda x, y: jnp.where(took, x, y), new, old)

    return updates, _adam.edit(after, kept, state)

  return optax.GradientTransformationExtraArgs(
    _init_with_adam(inner, who), update
  )


def _init_with_adam(inner, who):
  def init(params):
    state = inner.init(params)
    _adam.find(state, who)
    return state

  return init


def _given(extra_args: dict[str, Any], who: str, needs: str) -> Any:
  """An extra argument that a brake cannot do without."""
  if needs not in extra_args:
    raise ValueError(
      f'{who} needs the extra argument {needs!r}, which was not given; call '
      f'update(gradients, state, params, {needs}=...).'
    )
  return extra_args[needs]
