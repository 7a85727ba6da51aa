"""Brakes: optax wrappers against what momentum does to clipped tokens.

A clipped token has no gradient. But Adam's first moment still holds its former
gradients and moves it on, further out of the clip range. Each wrapper takes
what it needs to know, such as the share of clipped tokens, as an extra argument
of `update`. (`restore_reward_scale` is not about clipping: it undoes another
effect of Adam, in the same way.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.optim import _adam
from grpo_jax.optim import _numbers

Array = jax.Array


def reset_moments(
  inner: optax.GradientTransformation, which: str = 'both'
) -> optax.GradientTransformationExtraArgs:
  """Forgets Adam's moments at the first update of every rollout.

  With `'both'` Adam begins anew, its bias correction too. Then the first step
  of every rollout is as long as the learning rate allows: each coordinate moves
  by nearly all of it. With `'first'` the second moment and the count stay, and
  the first moment grows again from 0, which makes a shorter step.

  `update` takes `first_of_rollout`, bool[].

  Args:
    inner: A transformation with Adam in it.
    which: `'both'` moments and the count, or the `'first'` moment only.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: Another `which`; when initialised, no Adam in `inner`; when
      updated, no `first_of_rollout`.

  References:
    The option `--reset-optimizer-states` of slime; Fontana et al., `On the
    Hidden Objective Biases of Group-based Reinforcement Learning
    <https://arxiv.org/abs/2601.05002>`_, 2026
  """
  if which not in ('both', 'first'):
    raise ValueError(
      f"reset_moments got which={which!r}; give 'both' or 'first'."
    )
  # With both moments the count is reset too, because the bias correction of new
  # moments must begin anew.
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

  return _after_edit(
    inner, 'reset_moments', 'first_of_rollout', before, lasts=True
  )


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
    ValueError: When initialised, no Adam in `inner`; when updated, no
      `clipped_share`.
  """

  def before(state, clipped_share):
    kept = 1 - jnp.asarray(clipped_share)

    # Cast, because a float32 factor would turn a bfloat16 moment into float32.
    def shrunk(node):
      return node._replace(
        mu=jax.tree.map(lambda m: m * kept.astype(m.dtype), node.mu)
      )

    return _adam.edit(state, shrunk)

  return _after_edit(
    inner, 'decay_carried', 'clipped_share', before, lasts=False
  )


def project_outward(
  inner: optax.GradientTransformation, epsilon: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
  r"""Takes out of a step what moves clipped tokens further out.

  Let :math:`o` be the gradient of the sum of the clipped tokens' outward
  log-ratios, and :math:`D = 1 / (\sqrt{\hat v} + \epsilon)` that of Adam. The
  step :math:`u` becomes

  .. math:: u - \frac{\max(0, \langle o, u \rangle)}
                     {\langle o, D o \rangle} D o .

  Of all steps in which these tokens do not move outward on average, to first
  order, this one is nearest to `u` in Adam's metric, :math:`\sum u^2 / D`.
  Moments are left as they are.

  `update` takes `outward`, a tree like the parameters with the values of
  :math:`o`. To compute it takes another backward pass for every micro-batch
  that has clipped tokens, and a second accumulator of the size of the
  parameters.

  Args:
    inner: A transformation with Adam in it. Parameters without Adam are not
      corrected.
    epsilon: That of Adam, which its state does not tell.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: A negative `epsilon`; when initialised, no Adam in `inner`; when
      updated, no `outward`.
  """
  _numbers.check('project_outward', 'epsilon', epsilon)
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    outward = _argument(extra_args, 'project_outward', 'outward')
    updates, after = inner.update(updates, state, params, **extra_args)
    moments = _adam.corrected_moments(
      inner, state, after, updates, params, **extra_args
    )

    def scaled(path, pull):
      if path not in moments.v_hat:
        return jnp.zeros_like(pull)
      return pull / (jnp.sqrt(moments.v_hat[path]) + epsilon)

    direction = jax.tree_util.tree_map_with_path(scaled, outward)
    size = _adam.dot(outward, direction)
    too_far = _adam.dot(outward, updates)
    # While gradients accumulate there is no step to correct.
    projects = _adam.stepped(state, after) & (size > 0) & (too_far > 0)
    factor = too_far / jnp.where(size > 0, size, 1)

    def projected(u, d):
      # `where`, so that without a projection it is the update of `inner`, bit
      # for bit.
      return jnp.where(projects, u - factor * d, u).astype(u.dtype)

    return jax.tree.map(projected, updates, direction), after

  return optax.GradientTransformationExtraArgs(
    _init_with_adam(inner, 'project_outward'), update
  )


def restore_reward_scale(
  inner: optax.GradientTransformation, reference: float = 1.0
) -> optax.GradientTransformationExtraArgs:
  r"""Makes the step proportional to the scale of the advantages again.

  Adam divides by the scale of the gradient, so rewards ten times as large train
  like the same rewards (proposition 2 of Fontana et al., `On the Hidden
  Objective Biases of Group-based Reinforcement Learning
  <https://arxiv.org/abs/2601.05002>`_, 2026). Here the whole update of `inner`
  is multiplied by

  .. math:: \sqrt{\text{mean of } A^2} / \text{reference},

  with the mean over the trained tokens of the optimizer batch: a batch of small
  advantages takes a small step. This needs a method that leaves the scale in
  the advantages (Dr. GRPO, RLOO, GPG, ...); with others there is nothing to
  restore.

  `update` takes `advantage_scale`, f32[], the root above.

  Args:
    inner: Any transformation. Its weight decay is scaled too; chain decay
      behind this one if it should not be.
    reference: The scale at which the update stays as it is, in units of the
      advantage.

  Returns:
    A transformation with the state of `inner`.

  Raises:
    ValueError: A reference that is not positive; when updated, no
      `advantage_scale`.
  """
  _numbers.check('restore_reward_scale', 'reference', reference, above=True)
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    scale = _argument(extra_args, 'restore_reward_scale', 'advantage_scale')
    updates, state = inner.update(updates, state, params, **extra_args)
    scaled = jax.tree.map(
      lambda u: u * jnp.asarray(scale / reference, u.dtype), updates
    )
    return scaled, state

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _after_edit(inner, who, needs, before, lasts):
  """A transformation that edits the state of `inner` before each update.

  Args:
    inner: A transformation with Adam in it.
    who: The brake, for error messages.
    needs: Name of the extra argument of `update`.
    before: `(state, extra argument) -> state`, the edit.
    lasts: Whether the edit stays where Adam takes no step, as while gradients
      accumulate. If not, it is undone there.
  """
  inner = optax.with_extra_args_support(inner)

  def update(updates, state, params=None, **extra_args):
    edited = before(state, _argument(extra_args, who, needs))
    updates, after = inner.update(updates, edited, params, **extra_args)
    # A second reset before the next step does nothing more. A second decay
    # would shrink the moment once for every gradient that is accumulated.
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
  """The `init` of `inner`, which raises if there is no Adam in it."""

  # A transformation is a pair of functions; only its state tells whether Adam
  # is in it.
  def init(params):
    state = inner.init(params)
    _adam.find(state, who)
    return state

  return init


def _argument(extra_args: dict[str, Any], who: str, needs: str) -> Any:
  """An extra argument that a brake cannot do without."""
  if needs not in extra_args:
    raise ValueError(
      f'{who} needs the extra argument {needs!r}, which was not given; call '
      f'update(gradients, state, params, {needs}=...).'
    )
  return extra_args[needs]
