"""What the loss tests share: random batches and a table of everything."""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import contrib
from grpo_jax.losses import methods
from tests import oracles


class Entry(NamedTuple):
  """One row of the property table."""

  name: str
  make: Callable[[], losses.LossTransform]
  oracle: Callable | None = None  # with the same arguments as `make`
  is_long: bool = False  # whether all its tests are


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


_SAMPLE = dict(deviation='sample', epsilon=0.01)

METHODS = [
  _method('grpo'),
  _method('grpo', kl_coefficient=0, low=0.1, high=0.3),
  _method('grpo', **_SAMPLE, kl_coefficient=0.5),
  _method('deepseek_v3_2', kl_coefficient=0.3),
  _method('deepseek_v3_2', threshold=0.05, policy='sampler'),
  _method('dr_grpo', max_tokens=8),
  _method('dapo'),
  _method('dapo', soft_tokens=4, max_tokens=6),
  _method('cppo'),
  _method('cppo', pruning_rate=0.5),
  _method('cppo', spare_penalty=True, kl_coefficient=0.5),
  _method('dual_clip_grpo', cap=1.3),
  _method('dual_clip_grpo'),
  _method('two_sided_grpo', low=0.1, high=0.1, cap=1.2),
  _method('two_sided_grpo'),
  _method('lite_ppo', **_SAMPLE),
  _method('lite_ppo'),
  _method('gspo', low=0.05, high=0.1),
  _method('gspo'),
  _method('gspo_token', low=0.05, high=0.1),
  _method('gmpo', low=0.2, high=0.3),
  _method('luspo'),
  _method('luspo', low=0.05, high=0.1),
  _method('gcpo'),
  _method('vespo'),
  _method('vespo', positive=(1.0, 0.5), negative=(0.5, 1.5)),
  _method('importance_sampling'),
  _method('sapo'),
  _method('sapo', positive=2.0, negative=4.0),
  _method('cispo'),
  _method('cispo', low=0.2, high=0.2),
  _method('prompt_mean', high=0.3, **_SAMPLE),
  _method('prompt_mean'),
  _method('dppo_tv', low=0.02, high=0.03, cap=1.2),
  _method('dppo_kl', low=0.005, high=0.02, cap=1.2),
  _method('dro'),
  _method('dro', coefficient=1.5),
  _method('rloo'),
  _method('reinforce'),
  _method('gpg'),
  _method('opo'),
  _method('maxrl'),
  _method('opd'),
  _method('opd', coefficient=0.5, reward_coefficient=2.0),
  _method('gkd'),
  _method('gkd', direction='forward', number=3),
  _method('reinforce_pp', kl_coefficient=0.7),
  _method('reinforce_pp', kl_coefficient=0, **_SAMPLE),
  _method('reinforce_pp_baseline', kl_coefficient=0.7),
  _method('reinforce_pp_baseline', kl_coefficient=0, **_SAMPLE),
  _method('positive_nll', coefficient=0.7),
  _method('passk', k=2),
  _method('passk', k=2, right_reward=0.5, low=0.1),
  _method('gdpo', weights=(2.0, -0.5)),
  _method('gdpo', **_SAMPLE),
  _method('gtpo_conflict', entropy_coefficient=0.5, entropy_limit=0.4),
  _method('gtpo_conflict', entropy_coefficient=0, entropy_limit=math.inf),
  _method('gtpo_entropy', alpha=0.6, **_SAMPLE),
  _method('gtpo_entropy'),
  _method('grpo_s', alpha=0.6, low=0.05, high=0.1, **_SAMPLE),
  _method('grpo_s'),
  _method('clip_cov', share=0.3, low_covariance=0.1, high_covariance=2.0),
  _method('clip_cov'),
  _method('kl_cov', share=0.2, coefficient=0.7),
  _method('kl_cov'),
  _method('forking_tokens', share=0.5),
  _method('forking_tokens'),
  _method('rloo_to_go', gamma=0.5)._replace(is_long=True),
  _method('grpo_to_go', gamma=0.5, **_SAMPLE)._replace(is_long=True),
  _method('mt_grpo', coefficient=0.5, **_SAMPLE)._replace(is_long=True),
  _method(
    'gigpo', coefficient=2.0, kl_coefficient=0, normalizes=False
  )._replace(is_long=True),
  _method('gigpo', **_SAMPLE)._replace(is_long=True),
  _method('supervised'),
]
"""Every method, off its defaults too where these would leave a part idle."""


def _with(*links) -> Callable[[], losses.LossTransform]:
  return lambda: losses.chain(*links)


_CREDIT = losses.normalize_by_group()
_WEIGHT = losses.mean_over_tokens()
_CLIP = losses.ppo_clip()
_PLAIN = (_CREDIT, _WEIGHT, _CLIP)
_HALF = 0.5

CORRECTIONS = {
  'truncate_token': losses.truncate_token_importance(1.2),
  'truncate_token-normalized': losses.truncate_token_importance(1.2, True),
  'truncate_sequence': losses.truncate_sequence_importance(1.2, True),
  'mask_token': losses.mask_token_importance(0.2, 0.3),
  'mask_sequence': losses.mask_sequence_importance(1.2),
  'geometric': losses.gate_geometric_mean(0.2, 0.2),
  'stale': losses.mask_stale(1),
  'stale-whole': losses.mask_stale(3, whole=True),
}

RECENTER = {
  'recenter_shared_prefix': losses.recenter_shared_prefix(),
  'recenter_branches': losses.recenter_branches(),
}

TRANSFORMS = [
  Entry(
    'shape_overlong_reward',
    _with(losses.shape_overlong_reward(3, 5), _CREDIT, _WEIGHT, _CLIP),
  ),
  Entry(
    'clip_by_age',
    _with(_CREDIT, _WEIGHT, losses.clip_by_age(0.1, 0.2, 0.5)),
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
  Entry(
    'mean_over_sequence_sums',
    _with(_CREDIT, losses.mean_over_sequence_sums(5), _CLIP),
  ),
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
  Entry('add_kl-weighted', _with(losses.add_kl(0.3, 'k3_weighted'), *_PLAIN)),
  Entry(
    'add_kl-k1',
    _with(*_PLAIN, losses.add_kl(0.3, 'k1_with_zero_expected_gradient')),
  ),
  Entry(
    'adaptive_kl',
    _with(*_PLAIN, losses.add_kl(losses.adaptive_kl(0.3, 0.1))),
  ),
  Entry('add_entropy_bonus', _with(*_PLAIN, losses.add_entropy_bonus(0.1))),
  Entry(
    'entropy_target',
    _with(
      *_PLAIN,
      losses.add_entropy_bonus(losses.entropy_target(9.0, initial=0.1)),
    ),
  ),
  Entry('subtract_kl', _with(losses.subtract_kl(0.3), *_PLAIN)),
  Entry('center_by_batch', _with(losses.center_by_batch(), _WEIGHT, _CLIP)),
  Entry('best_minus_second', _with(losses.best_minus_second(), _WEIGHT, _CLIP)),
  Entry(
    'clip_advantage',
    _with(_CREDIT, losses.clip_advantage(-0.5, 0.7), _WEIGHT, _CLIP),
  ),
  Entry('drop_truncated', _with(losses.drop_truncated(), *_PLAIN)),
  *(
    Entry(name, _with(_CREDIT, losses.mean_over_sequences(), recenter, _CLIP))
    for name, recenter in RECENTER.items()
  ),
  Entry(
    'rollback_clip', _with(_CREDIT, _WEIGHT, contrib.rollback_clip(0.1, 0.3))
  ),
  Entry(
    'coasting_clip', _with(_CREDIT, _WEIGHT, contrib.coasting_clip(updates=4))
  ),
  *(
    Entry(name, _with(_CREDIT, correction, _WEIGHT, _CLIP))
    for name, correction in CORRECTIONS.items()
  ),
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

_OF_PARTS = {
  'divide_by_group_deviation-lead': (
    losses.best_minus_second(),
    losses.divide_by_group_deviation('sample', 0.01),
  ),
  'divide_by_group_deviation': (
    losses.center_by_batch(),
    losses.divide_by_group_deviation(),
  ),
  'normalize_by_group-under_root': (
    losses.normalize_by_group(epsilon=0.05, under_root=True),
  ),
}

PARTS = [
  *(
    Entry(
      name,
      _with(*credit, losses.mean_over_sequences(), _CLIP),
      oracles.PARTS[name],
    )
    for name, credit in _OF_PARTS.items()
  ),
  Entry(
    'add_kl-k1_score',
    _with(
      losses.center_by_group(),
      _WEIGHT,
      losses.score_function(),
      losses.add_kl(0.3, 'k1_score'),
    ),
    oracles.PARTS['add_kl-k1_score'],
  ),
  *(
    Entry(
      name,
      _with(
        losses.center_by_group(),
        _WEIGHT,
        losses.score_function(),
        losses.add_teacher_kl(0.3, *estimator),
      ),
      oracles.PARTS[name],
    )
    for name, estimator in {
      'add_teacher_kl': (),
      'add_teacher_kl-k3': ('k3',),
    }.items()
  ),
  *(
    Entry(
      name,
      _with(
        losses.center_by_group(),
        _WEIGHT,
        losses.score_function(),
        losses.add_teacher_top_kl(0.3, direction),
      ),
      oracles.PARTS[name],
    )
    for name, direction in {
      'add_teacher_top_kl': 'reverse',
      'add_teacher_top_kl-forward': 'forward',
    }.items()
  ),
  Entry(
    'center_to_go_by_group',
    _with(
      losses.center_to_go_by_group(0.5), losses.mean_over_sequences(), _CLIP
    ),
    oracles.PARTS['center_to_go_by_group'],
    is_long=True,
  ),
  Entry(
    'mean_over_turns',
    _with(losses.use_reward(), losses.mean_over_turns(), _CLIP),
    oracles.PARTS['mean_over_turns'],
    is_long=True,
  ),
]
"""Parts that no method has, each in a small chain."""

TABLE = METHODS + TRANSFORMS + PARTS

ONCE_EACH = list({e.name.split('-')[0]: e for e in TABLE}.values())
"""Without other arguments of the same: for properties that take a compile."""


def by_name(entries, long=()):
  """Arguments of `pytest.mark.parametrize`; all of one entry run together.

  The rows of the entries in `long`, and of those that are, are marked so.
  """
  marked = lambda entry: pytest.param(entry, marks=pytest.mark.long)
  return dict(
    argnames='entry',
    argvalues=[marked(e) if e.is_long or e in long else e for e in entries],
    ids=[entry.name for entry in entries],
    scope='module',  # tests with an entry in common are put together
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
    logp_sampler=logp_old + spread * rng.standard_normal(shape),
    entropy_old=rng.exponential(0.6, shape),
    entropy=rng.exponential(0.6, shape),
    reward_parts=rng.choice([0.0, 0.5, 1.0], (*shape[:2], 2)),
    truncated=rng.random(shape[:2]) < 0.2,
    tokens=rng.integers(0, 3, shape),
    noise=rng.random(shape),
    # Drawn last, so that all else is as it was before there were turns.
    turn=np.minimum(np.cumsum(rng.random(shape) < 0.4, axis=-1), TURNS - 1),
    turn_reward=rng.choice([0.0, 0.25, 0.5], (*shape[:2], TURNS)),
    turn_state=rng.integers(0, 5, (*shape[:2], TURNS)),
    logp_teacher=logp_old + spread * rng.standard_normal(shape),
    teacher_top=-np.sort(rng.exponential(1.5, (*shape, TOPS)) + 2.5, axis=-1),
    others=-4 - rng.exponential(1.0, (*shape, TOPS - 1)),
  )
  return garbage(case, np.nan)


TOPS = 16
"""Likeliest tokens of the teacher, each in a place of its own."""


TURNS = 4
"""At most, of an episode."""


_PER_TOKEN = (
  'logp', 'logp_old', 'logp_ref', 'logp_sampler', 'entropy_old', 'entropy',
  'logp_teacher',
)  # fmt: skip


def garbage(case: oracles.Case, value) -> oracles.Case:
  """Writes `value` wherever no valid completion owns the place."""
  owned = case.mask & case.valid[:, :, None]
  per_token = {
    name: np.where(owned, getattr(case, name), value) for name in _PER_TOKEN
  }
  per_token |= {
    name: np.where(owned[..., None], getattr(case, name), value)
    for name in ('teacher_top', 'others')
    if getattr(case, name) is not None
  }
  reward = np.where(case.valid, case.reward, value)
  parts = np.where(case.valid[:, :, None], case.reward_parts, value)
  if case.turn is not None:
    earned = np.where(case.valid[:, :, None], case.turn_reward, value)
    turn = np.where(owned, case.turn, 77)
    case = case._replace(turn=turn, turn_reward=earned)
  return case._replace(reward=reward, reward_parts=parts, **per_token)


def to_batch(case: oracles.Case, dtype=jnp.float64) -> losses.Batch:
  """The case as a `Batch`."""
  of_policies = {
    name: jnp.asarray(getattr(case, name), dtype)
    for name in ('logp_old', 'logp_ref', 'logp_sampler', 'entropy_old')
  }
  return losses.make_batch(
    case.mask,
    jnp.asarray(case.reward, dtype),
    tokens=jnp.asarray(case.tokens),
    valid=jnp.asarray(case.valid),
    truncated=jnp.asarray(case.truncated),
    reward_parts=jnp.asarray(case.reward_parts, dtype),
    extras={
      'noise': jnp.asarray(case.noise, dtype),
      'updates_done': jnp.asarray(np.floor(4 * case.noise), dtype),
      'age': jnp.asarray(_age(case), dtype),
      'logp_teacher': jnp.asarray(case.logp_teacher, dtype),
      'teacher_top_logp': jnp.asarray(case.teacher_top, dtype),
      'others': jnp.asarray(case.others, dtype),
      **_turns(case, dtype),
    },
    **of_policies,
  )


def logp_top(logp, batch):
  """The policy's log-probabilities of the top tokens, by those of the sampled.

  The first moves with `logp`, 3 nats below it: all have less than the mass 1.
  """
  others = jnp.asarray(batch.extras['others'], logp.dtype)
  return jnp.concatenate([logp[..., None] - 3, others], axis=-1)


def _age(case):
  """Up to 4, and anything where nothing is trained: credit gets it as it is."""
  anything = np.where(case.noise < 0.5, np.nan, np.inf)
  owned = case.mask & case.valid[..., None]
  return np.where(owned, np.floor(5 * case.noise), anything)


def _turns(case, dtype):
  """What a batch has of turns, by name."""
  if case.turn is None:
    return {}
  return {
    'turn': jnp.asarray(case.turn),
    'turn_reward': jnp.asarray(case.turn_reward, dtype),
    'turn_state': jnp.asarray(case.turn_state),
  }


def prepared(method, batch):
  """Runs `credit` and `prepare` with the rollout as one optimizer batch."""
  batch, state = losses.credit(method, batch, method.init())
  return losses.prepare(method, batch, state), state


@functools.partial(jax.jit, static_argnums=0)
def credited(method, batch):
  """`credit` as one program, for shapes whose operations no other test has."""
  return losses.credit(method, batch, method.init())[0]


@functools.partial(jax.jit, static_argnums=0)
def terms_and_gradient(method, batch, logp):
  """(loss, terms, batch, d loss / d logp) of a batch, as one program."""
  batch, state = prepared(method, batch)
  loss = lambda logp: losses.surrogate_loss(method, logp, batch, state)
  (value, terms), slope = jax.value_and_grad(loss, has_aux=True)(logp)
  return value, terms, batch, slope


def loss_and_gradient(method, case, dtype=jnp.float64):
  """(loss, d loss / d logp) of a case, the rollout being one batch."""
  batch, state = prepared(method, to_batch(case, dtype))
  logp = jnp.asarray(case.logp, dtype)
  entropy = jnp.asarray(case.entropy, dtype)

  def loss(logp):
    top = logp_top(logp, batch)
    return losses.surrogate_loss(method, logp, batch, state, entropy, top)[0]

  return jax.value_and_grad(loss)(logp)
