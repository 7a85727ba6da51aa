"""What the loss tests share: random batches and a table of everything."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.losses import methods
from tests import oracles


class Entry(NamedTuple):
  """One row of the property table."""

  name: str
  make: Callable[[], losses.LossTransform]
  oracle: Callable | None = None  # with the same arguments as `make`


def _method(name, **kwargs):
  label = name + ''.join(f'-{k}={v}' for k, v in kwargs.items())
  oracle = oracles.METHODS[name]
  translate = dict(kwargs)
  if translate.pop('deviation', 'population') == 'sample':
    translate['ddof'] = 1
  return Entry(
    label,
    lambda: getattr(methods, name)(**kwargs),
    lambda case: oracle(case, **translate),
  )


METHODS = [
  _method('grpo'),
  _method('grpo', kl_coefficient=0, low=0.1, high=0.3),
  _method('grpo', deviation='sample', epsilon=0.01, kl_coefficient=0.5),
  _method('dr_grpo', max_tokens=8),
  _method('dapo'),
  _method('dapo', soft_tokens=4, max_tokens=6),
  _method('gspo', low=0.05, high=0.1),
  _method('gspo'),
  _method('gmpo', limit=0.3),
  _method('rloo'),
  _method('reinforce'),
  _method('kl_cov', share=0.2, coefficient=0.7),
  _method('kl_cov'),
  _method('supervised'),
]
"""Every method, off its defaults too where these would leave a part idle."""


def _with(*links) -> Callable[[], losses.LossTransform]:
  return lambda: losses.chain(*links)


_CREDIT = losses.normalize_by_group()
_WEIGHT = losses.mean_over_tokens()
_CLIP = losses.ppo_clip()
_HALF = 0.5

TRANSFORMS = [
  Entry(
    'shape_overlong_reward',
    _with(losses.shape_overlong_reward(3, 5), _CREDIT, _WEIGHT, _CLIP),
  ),
  Entry(
    'drop_uniform_groups',
    _with(_CREDIT, losses.drop_uniform_groups(), _WEIGHT, _CLIP),
  ),
  Entry('center_by_group', _with(losses.center_by_group(), _WEIGHT, _CLIP)),
  Entry('leave_one_out', _with(losses.leave_one_out(), _WEIGHT, _CLIP)),
  Entry('use_reward', _with(losses.use_reward(), _WEIGHT, _CLIP)),
  Entry(
    'constant_advantage', _with(losses.constant_advantage(), _WEIGHT, _CLIP)
  ),
  Entry(
    'mean_over_sequences',
    _with(_CREDIT, losses.mean_over_sequences(), _CLIP),
  ),
  Entry('sum_over_tokens', _with(_CREDIT, losses.sum_over_tokens(5), _CLIP)),
  Entry(
    'clip_log_ratio',
    _with(
      _CREDIT, _WEIGHT, losses.clip_log_ratio(), losses.importance_weighted()
    ),
  ),
  Entry(
    'pool_log_ratio',
    _with(
      _CREDIT, _WEIGHT, losses.pool_log_ratio(), losses.importance_weighted()
    ),
  ),
  Entry('add_kl-k2', _with(_CREDIT, _WEIGHT, _CLIP, losses.add_kl(0.3, 'k2'))),
  Entry('add_kl-k3', _with(losses.add_kl(0.3), _CREDIT, _WEIGHT, _CLIP)),
  Entry(
    'stages',
    _with(
      losses.on_reward(lambda reward, batch: reward + batch.truncated),
      _CREDIT,
      losses.on_advantage(lambda advantage, batch: jnp.tanh(advantage)),
      losses.on_keep(lambda keep, batch: ~batch.truncated),
      _WEIGHT,
      losses.on_weight(lambda weight, batch: _HALF * weight),
      losses.on_log_ratio(lambda terms, batch: _HALF * terms.log_ratio),
      _CLIP,
      losses.on_objective(lambda terms, batch: jnp.sin(terms.objective)),
      losses.add_penalty(lambda terms, batch: jnp.square(terms.logp)),
    ),
  ),
]

TABLE = METHODS + TRANSFORMS


def by_name(entries):
  """Arguments of `pytest.mark.parametrize`."""
  return dict(
    argnames='entry', argvalues=entries, ids=[entry.name for entry in entries]
  )


def make_case(seed=0, prompts=4, group=4, tokens=6, spread=0.4) -> oracles.Case:
  """A random off-policy batch.

  Ragged lengths, an empty completion, an invalid one full of garbage, one group
  of equal rewards, and log-ratios with a standard deviation of `spread`.
  """
  rng = np.random.default_rng(seed)
  shape = (prompts, group, tokens)
  length = rng.integers(1, tokens + 1, shape[:2])
  length[0, 1] = 0
  mask = np.arange(tokens) < length[:, :, None]
  valid = np.ones(shape[:2], bool)
  valid[1, 2] = False
  reward = rng.choice([0.0, 0.5, 1.0], shape[:2])
  reward[0] = rng.permutation(np.linspace(0, 1, group))
  reward[2] = 1 / 3
  logp_old = -rng.exponential(1.5, shape)
  case = oracles.Case(
    logp=logp_old + spread * rng.standard_normal(shape),
    logp_old=logp_old,
    logp_ref=logp_old + spread * rng.standard_normal(shape),
    mask=mask,
    valid=valid,
    reward=reward,
  )
  return garbage(case, np.nan)


def garbage(case: oracles.Case, value) -> oracles.Case:
  """Writes `value` wherever no valid completion owns the place."""
  owned = case.mask & case.valid[:, :, None]
  per_token = {
    name: np.where(owned, getattr(case, name), value)
    for name in ('logp', 'logp_old', 'logp_ref')
  }
  reward = np.where(case.valid, case.reward, value)
  return case._replace(reward=reward, **per_token)


def to_batch(case: oracles.Case, dtype=jnp.float64) -> losses.Batch:
  """The case as a `Batch`; short completions count as not truncated."""
  tokens = case.mask.shape[-1]
  return losses.make_batch(
    case.mask,
    jnp.asarray(case.reward, dtype),
    valid=jnp.asarray(case.valid),
    truncated=jnp.asarray(case.mask.sum(-1) == tokens),
    logp_old=jnp.asarray(case.logp_old, dtype),
    logp_ref=jnp.asarray(case.logp_ref, dtype),
  )


def prepared(method, batch):
  """Runs `credit` and `prepare` with the rollout as one optimizer batch."""
  batch, state = losses.credit(method, batch, method.init())
  return losses.prepare(method, batch, state), state


def loss_and_gradient(method, case, dtype=jnp.float64):
  """(loss, d loss / d logp) of a case, the rollout being one batch."""
  batch, state = prepared(method, to_batch(case, dtype))
  logp = jnp.asarray(case.logp, dtype)

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state)[0]

  return jax.value_and_grad(loss)(logp)
