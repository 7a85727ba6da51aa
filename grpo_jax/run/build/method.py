"""Builds the loss of a run from the name of its method, or from an object."""

from collections.abc import Callable
from collections.abc import Mapping
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.config import Config
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.run.build import names
from grpo_jax.run.build.specs import DrawSpec
from grpo_jax.run.build.specs import LearnSpec
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

# The fields that a run computes for a method that requires them.
_KNOWN = {
  'age', 'entropy', 'logp_top', 'noise', 'updates_done', 'teacher_top_ids',
  *losses.OF_TEACHER, *losses.Batch._fields,
}  # fmt: skip
# What is in the extras of some rollouts already, with shapes of their own.
_OF_ROLLOUTS = {
  'log_kept', 'entropy_sampler', 'routing_sampler', 'fresh', 'reward_edit',
}  # fmt: skip
COMPUTED = _KNOWN | _OF_ROLLOUTS | losses.OF_TURNS


def own_fields(loss: losses.LossTransform) -> frozenset[str]:
  """The fields that a method requires and that come from records."""
  return loss.requires - COMPUTED


def make_method(
  name: str,
  kwargs: Mapping[str, Any],
  flag: str = '--config.learner.method',
  own: Callable[..., losses.LossTransform] | None = None,
  facts: Mapping[str, Any] | None = None,
) -> losses.LossTransform:
  """The loss that a config names.

  Args:
    name: A function in `losses.methods`, or `'module:function'` for one of your
      own.
    kwargs: The arguments of this function.
    flag: The option that the name comes from, for the error message.
    own: A function from Python that stands in the place of the name.
    facts: Values of the run by name, for the arguments that a method takes from
      its run (see `losses.takes_from_run`); None if there is no run, as in an
      audit.

  Returns:
    A `LossTransform`.

  Raises:
    ValueError: There is no such method (the nearest is named), the arguments do
      not fit, or the function does not return a `LossTransform`.
  """
  if own is not None:
    make = own
  elif ':' in name:
    make = importing.imported(name, f'{flag}={name!r}')
  elif name in losses.methods.__all__:
    make = getattr(losses.methods, name)
  else:
    raise names.no_method(name, flag, losses.methods.__all__)
  from_config = dict(kwargs)
  if facts is not None:
    kwargs = losses.arguments_from_run(make, facts, kwargs)
  # Before the call: a TypeError that is raised inside `make` is another error.
  try:
    inspect.signature(make).bind(**kwargs)
  except TypeError as error:
    arguments = str(inspect.signature(make)).split(' ->')[0]
    raise ValueError(
      f'{flag}_kwargs={kwargs} do not fit {name}{arguments}:'
      f' {plain_text.said(error)}; '
      f'set all arguments at once with {flag}_kwargs="{{...}}".'
    ) from error
  try:
    made = make(**kwargs)
  except ValueError as error:
    if not from_config:
      raise
    # A transform of the method may call its argument by another name.
    raise ValueError(
      f'{flag}_kwargs={from_config} cannot be used: {plain_text.said(error)}'
    ) from error
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'{flag}={name!r} raised {plain_text.named(error)}, when it was '
      f'called with {flag}_kwargs={dict(kwargs)}; correct the function or the '
      'arguments.'
    ) from error
  if not isinstance(made, losses.LossTransform):
    raise ValueError(
      f'{flag}={name!r} made {made!r:.80}, which is no LossTransform; return '
      'what losses.chain returns.'
    )
  return made


def _facts(config: Config) -> dict[str, Any]:
  """What a run tells a method that is marked by `losses.takes_from_run`."""
  optimizer = config.optim
  adam = {'adam_b1': optimizer.b1, 'adam_b2': optimizer.b2}
  weights = tuple(reward.weight for reward in config.rewards)
  # In the sum the first reward has its weight.
  right = config.evaluation.right_reward
  return {
    # Other optimizers have no such numbers, and methods refuse them.
    **(adam if optimizer.name == 'adamw' else {}),
    'reward_weights': weights,
    'right_reward': right * weights[0] if weights[0] > 0 else right,
    'updates_per_rollout': config.learner.batches * config.learner.epochs,
    'max_tokens': config.sampler.max_tokens,
    'soft_tokens': max(1, config.sampler.max_tokens // 5),
  }


def _check_lengths(loss: losses.LossTransform, config: Config) -> None:
  """Refuses a penalty for length that no completion of the run can get."""
  after, most = loss.acts_after_tokens, config.sampler.max_tokens
  if after >= most:
    raise ValueError(
      f'The penalty for length in the method {config.learner.method!r} begins '
      f'after {after:g} tokens, but completions of this run have at most '
      f'{most} (sampler.max_tokens), so that none gets it; give it limits such '
      f'as max_tokens={most} and soft_tokens={max(1, most // 5)}, or '
      "method='dapo', which takes them from the run."
    )


def method_of(
  config: Config, objects: Objects = NOTHING
) -> losses.LossTransform:
  """The method of a run, traced so that a chain in the wrong order raises."""
  learner, facts = config.learner, _facts(config)
  name, kwargs = learner.method, learner.method_kwargs
  loss = make_method(name, kwargs, own=objects.method, facts=facts)
  _check_lengths(loss, config)
  # Sizes that differ from each other and from 1, so that a result of another
  # shape cannot pass; small ones, because a group may be large.
  group = config.sampler.group
  prompts, length = [size for size in (2, 3, 4) if size != group][:2]
  if not loss.requires & _OF_ROLLOUTS:
    # Of ones, because the advantage may be a product with them.
    own = {
      name: jnp.ones((prompts, group, length)[: 2 + (name in learner.fields)])
      for name in own_fields(loss)
    }

    def zeros():
      tokens = jnp.zeros((prompts, group, length), jnp.int32)
      batch = losses.make_batch(
        tokens == 0,
        jnp.zeros(tokens.shape[:2]),
        tokens=tokens,
        reward_parts=jnp.zeros((*tokens.shape[:2], len(config.rewards))),
        extras=own,
      )
      return losses.check_batch(losses.with_required(loss, batch))

    # Traced as a whole, because each operation outside of a program is a
    # program of its own, which takes 30 ms to compile.
    def run_chain():
      batch, state = losses.credit(loss, zeros(), loss.init())
      batch = losses.prepare(loss, batch, state)
      logp = jnp.zeros(batch.mask.shape)
      top = batch.extras.get('teacher_top_logp')
      return losses.surrogate_loss(loss, logp, batch, state, logp, top)

    try:
      jax.eval_shape(run_chain)
    except ValueError:
      raise
    except Exception as error:  # a transform of a user's own may raise anything
      raise ValueError(
        f'config.learner.method={learner.method!r} cannot be traced with '
        f'config.learner.method_kwargs={learner.method_kwargs} '
        f'({plain_text.kind(error)}: {plain_text.first_line(error)}); give '
        'numbers where it wants numbers, or correct the function.'
      ) from error
    if group == 1 and not _credits_alone(loss, zeros()):
      raise ValueError(
        f'sampler.group=1 with the method {learner.method!r}, which compares '
        'the completions of a prompt: every advantage would be 0; give '
        'sampler.group=2 or more, or a method that needs no group, such as '
        "'reinforce'."
      )
  return loss


def _credits_alone(loss: losses.LossTransform, batch: losses.Batch) -> bool:
  """Whether groups of a single completion get an advantage that is not 0."""
  if (
    'logp_teacher' in loss.requires
  ):  # of which there are zeros, as of logp_old
    apart = jnp.full(batch.mask.shape, -1.0)
    batch = batch._replace(extras={**batch.extras, 'logp_teacher': apart})

  def credits(largest):
    # A transform may map some rewards to 0: those below a threshold, say.
    reward = jnp.linspace(0.0, largest, len(batch.reward))[:, None]
    parts = jnp.broadcast_to(reward[..., None], batch.reward_parts.shape)
    rewarded = batch._replace(reward=reward, reward_parts=parts)
    credited, _ = losses.credit(loss, rewarded, loss.init())
    # A deviation of a single completion may be 0 over 0.
    advantage = jnp.asarray(credited.advantage)
    return bool(jnp.any(jnp.isfinite(advantage) & (advantage != 0)))

  return any(map(credits, (1.0, -1.0, 30.0, -1000.0)))


def warnings_of_age(
  learn: LearnSpec, draw: DrawSpec, num_rewards: int
) -> list[str]:
  """A sentence where nothing corrects for the age of the policy that samples.

  Args:
    learn: With the method.
    draw: Says whether rollouts are drawn ahead.
    num_rewards: How many rewards each completion has.
  """
  # With dynamic sampling the old policy of completions is the one that has
  # drawn them, whatever the anchor is; see `UpdateSpec.stale`.
  anchor, method = learn.update.anchor, learn.learner.method
  is_old = anchor == 'sampler' or draw.resample_rounds > 0
  oldest = draw.pace.ahead
  if not oldest:
    return []
  slope = _slope(method, draw.group, num_rewards, is_old)
  if _corrects(slope):
    if oldest == 1 or _has_trust_region(slope):
      return []
    return [
      f'With config.sampler.ahead={oldest} tokens come from policies up to '
      f'{oldest} rollouts older, and the method {learn.method!r} weighs each '
      'by its ratio without a limit, so that runs can collapse; give a method '
      'with a clip, or with truncate_token_importance.'
    ]
  advice = "give learner.anchor='sampler'"
  sampled = _slope(method, draw.group, num_rewards, True)
  if is_old or not _corrects(sampled):
    advice += " and a method with a ratio, such as 'importance_sampling'"
  return [
    f'With config.sampler.ahead={oldest} completions come from a '
    f'policy that is older, and learner.anchor={anchor!r} with the method '
    f'{learn.method!r} learns from them as if the policy itself had drawn '
    f'them, which is biased; {advice}.'
  ]


Slope = Callable[[float], Any]
"""From a distance in nats to the gradient in log-probabilities, [2,G,4]."""


def _slope(
  method: losses.LossTransform, group: int, num_rewards: int, is_old: bool
) -> Slope | None:
  """The gradient at one policy, of completions that this or another has drawn.

  Args:
    method: The loss.
    group: Completions of each prompt.
    num_rewards: How many rewards each completion has.
    is_old: Whether the policy that has drawn them is the old policy.

  Returns:
    A function of how far the policy is from the one that has drawn, in nats:
    that of token t has drawn it with t times as much less. The rewards of a
    group are 0 and 1 in turns. None: the method reads what is not known here.
  """
  if not method.requires <= _KNOWN | losses.OF_TURNS:
    return None
  tokens = jnp.zeros((2, group, 4), jnp.int32)
  logp = jnp.full(tokens.shape, -1.0)
  reward = jnp.arange(2.0 * group).reshape(2, group) % 2
  parts = jnp.repeat(reward[..., None], num_rewards, -1)

  @jax.jit
  def slope(gap):
    # It differs from token to token, else dividing by its mean would cancel it.
    sampler = logp - gap * jax.lax.broadcasted_iota(logp.dtype, logp.shape, 2)
    batch = losses.make_batch(
      tokens == 0,
      reward,
      tokens=tokens,
      reward_parts=parts,
      logp_ref=logp,  # so that penalties are 0, whatever weighs them
      # At the youngest age: what drops older tokens does not correct these.
      extras={'age': jnp.full(tokens.shape, gap > 0, logp.dtype)},
    )
    batch = losses.check_batch(losses.with_required(method, batch))
    batch = batch._replace(
      logp_sampler=sampler, logp_old=sampler if is_old else logp
    )
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)
    return jax.grad(
      lambda x: losses.surrogate_loss(
        method, x, batch, state, -logp, batch.extras.get('teacher_top_logp')
      )[0]
    )(logp)

  return slope


def _corrects(slope: Slope | None) -> bool:
  """Whether the gradient depends on which policy has drawn."""
  return slope is None or bool(jnp.any(slope(0.0) != slope(0.3)))


def _has_trust_region(slope: Slope | None) -> bool:
  """Whether tokens that have become likely are not learned from ever harder.

  Those of completions with a positive advantage: the others push back.
  """
  if slope is None:
    return True
  rises = np.asarray(slope(0.0)) < 0
  # Ratios of up to e^6 and e^12. A limit lies below, if there is one.
  near, far = (
    np.max(np.abs(slope(gap)), where=rises, initial=0) for gap in (2.0, 4.0)
  )
  return bool(far <= 10 * near)
