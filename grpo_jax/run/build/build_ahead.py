"""What a run that draws its rollouts ahead is refused for, and warned of."""

import jax
import jax.numpy as jnp

from grpo_jax import losses
from grpo_jax.config import Config
from grpo_jax.run.build import build


def check(config: Config, mesh: jax.sharding.Mesh) -> None:
  """Raises a ValueError if rollouts cannot be drawn ahead on a mesh.

  A program on several devices is started on one after the other. Two threads
  start theirs in orders that may differ from device to device, and then each
  program waits for devices that the other one has.
  """
  if config.sampler.ahead and mesh.size > 1:
    raise ValueError(
      f'sampler.ahead={config.sampler.ahead} on {mesh.size} devices, where '
      'sampling and learning at the same time may wait for each other forever; '
      'give sampler.ahead=0, or a mesh of one device.'
    )


def warnings(run: build.Run) -> list[str]:
  """A sentence where nothing corrects for the age of the policy that samples.

  Args:
    run: The parts of the run.
  """
  config = run.config
  # With dynamic sampling the old policy of completions is the one that has
  # drawn them, whatever the anchor is; see `UpdateSpec.stale`.
  is_old = (
    config.learner.anchor == 'sampler' or config.sampler.resample_rounds > 0
  )
  if not config.sampler.ahead or _corrects(run, is_old):
    return []
  advice = "give learner.anchor='sampler'"
  if is_old or not _corrects(run, True):
    advice += " and a method with a ratio, such as 'importance_sampling'"
  return [
    'With config.sampler.ahead=1 completions come from a policy that is one '
    f'rollout older, and learner.anchor={config.learner.anchor!r} with the '
    f'method {config.learner.method!r} learns from them as if the policy '
    f'itself had drawn them, which is biased; {advice}.'
  ]


def _corrects(run: build.Run, is_old: bool) -> bool:
  """Whether the gradient depends on the policy that has drawn the completions.

  It is taken at one policy, of completions that this policy or one that differs
  from it has drawn.

  Args:
    run: See `warnings`.
    is_old: Whether the policy that has drawn them is the old policy.
  """
  method, group = run.method, run.config.sampler.group
  known = {'entropy', 'noise', 'updates_done', *losses.Batch._fields}
  if not method.requires <= known:
    return True  # what a field of the user's own holds is not known here
  tokens = jnp.zeros((2, group, 4), jnp.int32)
  logp = jnp.full(tokens.shape, -1.0)
  reward = jnp.arange(2.0 * group).reshape(2, group) % 2
  parts = jnp.repeat(reward[..., None], len(run.config.rewards), -1)

  @jax.jit
  def slope(gap):
    # It differs from token to token, else dividing by its mean would cancel it.
    sampler = logp - gap * jax.lax.broadcasted_iota(logp.dtype, logp.shape, 2)
    batch = losses.make_batch(
      tokens == 0, reward, tokens=tokens, reward_parts=parts
    )
    batch = losses.check_batch(losses.with_required(method, batch))
    batch = batch._replace(
      logp_sampler=sampler, logp_old=sampler if is_old else logp
    )
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)
    return jax.grad(
      lambda x: losses.surrogate_loss(method, x, batch, state, -logp)[0]
    )(logp)

  return bool(jnp.any(slope(0.0) != slope(0.3)))
