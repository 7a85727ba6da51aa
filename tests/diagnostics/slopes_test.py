"""The row of the table: ratios and regularisers of a user's own chains."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _row


def read(*links, **parts):
  """The row of a chain whose parts are simple but for those given."""
  default = dict(
    advantage=losses.center_by_group(),
    weight=losses.mean_over_tokens(),
    objective=losses.importance_weighted(),
  )
  return _row.surrogate_row(losses.chain(*(default | parts).values(), *links))


def ratio_of(function, *links):
  return read(*links, objective=losses.set_objective(function)).ratio


def test_a_detached_ratio_is_told_by_its_value():
  def cispo(terms, batch):
    ratio = lax.stop_gradient(jnp.exp(terms.log_ratio))
    return jnp.clip(ratio, 0, 5) * batch.advantage * terms.logp

  def detached(terms, batch):  # the same gradient; the value is a ratio
    ratio = jnp.exp(terms.log_ratio)
    return lax.stop_gradient(ratio) * batch.advantage * terms.log_ratio

  assert ratio_of(cispo) == 'stop-gradient weight x log pi (token)'
  assert ratio_of(detached) == 'token'


def pooled(terms, batch, how):
  shape = terms.log_ratio.shape
  value = how(terms.log_ratio, axis=-1, keepdims=True, where=batch.mask)
  return jnp.broadcast_to(value, shape)


def test_ratios_of_the_sequence():
  def product(terms, batch):
    return jnp.exp(pooled(terms, batch, jnp.sum)) * batch.advantage

  def arithmetic(terms, batch):
    ratio = terms._replace(log_ratio=jnp.exp(terms.log_ratio))
    mean = pooled(ratio, batch, jnp.mean)
    clipped = jnp.clip(mean, 0.8, 1.2)
    return jnp.minimum(mean * batch.advantage, clipped * batch.advantage)

  def cubed(terms, batch):
    log_ratio = pooled(terms, batch, jnp.sum)
    return jnp.exp(lax.stop_gradient(3 * log_ratio)) * (
      batch.advantage * terms.logp
    )

  assert ratio_of(product) == 'sequence product'
  assert ratio_of(arithmetic) == 'arithmetic mean'
  assert ratio_of(cubed) == (
    'stop-gradient weight x log pi (sequence product to the power 3)'
  )


def test_a_ratio_of_ones_own_is_given_by_its_slopes():
  def soft(terms, batch):
    gate = jax.nn.sigmoid(terms.log_ratio)
    return lax.stop_gradient(gate) * batch.advantage * terms.log_ratio

  def one_sided(terms, batch):
    return jnp.exp(terms.log_ratio) * jnp.maximum(batch.advantage, 0)

  def coupled(terms, batch):
    ratio = jnp.exp(terms.log_ratio)
    rest = jnp.sum(lax.stop_gradient(ratio), where=batch.mask)
    return ratio / rest * batch.advantage

  assert ratio_of(soft) == 'own: slope 0.5, to other tokens 0'
  assert ratio_of(one_sided) == (
    'A > 0 token; A < 0 own: no gradient at ratio 1'
  )
  assert ratio_of(coupled).endswith('coupled to other completions')


def regulariser_of(*links, **parts):
  return read(*links, **parts).regulariser


def test_known_penalties_add_up():
  def old(terms, batch):
    return 0.3 * jnp.square(terms.log_ratio) / 2

  def entropy(terms, batch):
    return -0.01 * terms.entropy

  row = read(
    losses.add_kl(0.5, 'k2'),
    losses.add_penalty(old),
    losses.add_penalty(entropy, requires=('entropy',)),
  )
  assert row.regulariser == ('0.5 k2 + 0.3 (log r)^2 / 2 + entropy bonus 0.01')
  found = dict(row.regulariser_facts.terms)
  assert found['k2'] == pytest.approx(0.5, abs=1e-9)
  assert row.regulariser_facts.entropy_bonus == pytest.approx(0.01)


@pytest.mark.parametrize('detached', [False, True])
def test_a_ratio_in_front_of_k3_is_seen(detached):
  def penalty(terms, batch):
    gap = batch.logp_ref - terms.logp
    ratio = jnp.exp(terms.log_ratio)
    ratio = lax.stop_gradient(ratio) if detached else ratio
    return 0.2 * ratio * (jnp.exp(gap) - gap - 1)

  wanted = '0.2 sg[r] k3' if detached else '0.2 r k3'
  link = losses.add_penalty(penalty, requires=('logp_ref',))
  assert regulariser_of(link) == wanted


def test_a_pull_inside_the_objective_is_a_regulariser():
  def dro(terms, batch):
    pull = 0.05 * jnp.square(terms.log_ratio) / 2
    return batch.advantage * terms.logp - pull

  row = read(objective=losses.set_objective(dro))
  assert row.regulariser == '0.05 (log r)^2 / 2'
  assert row.ratio == 'none (log pi)'


def test_a_penalty_of_ones_own_is_described_by_what_moves_it():
  square = losses.add_penalty(lambda terms, batch: jnp.square(terms.logp))
  assert regulariser_of(square) == 'own: depends on the ratio, log pi'

  def cubic(terms, batch):
    return jnp.abs(batch.logp_ref - terms.logp) ** 3

  link = losses.add_penalty(cubic, requires=('logp_ref',))
  assert regulariser_of(link) == 'own: depends on the reference'


def test_an_objective_that_is_not_linear_in_the_advantage_says_so():
  def bounded(terms, batch):
    return jnp.exp(terms.log_ratio) * jnp.tanh(batch.advantage)

  row = read(objective=losses.set_objective(bounded))
  assert row.ratio == 'token; not proportional to A'
  assert row.regulariser == 'none'


def clipped(*links):
  """The ratio of PPO's clip after some links that edit what it reads."""
  credit = losses.chain(losses.center_by_group(), *links)
  return read(advantage=credit, objective=losses.ppo_clip()).ratio


def keep_only(function):
  """Trains the tokens at which `function` of position and length is true."""

  def keep(keep, batch):
    position = jnp.arange(keep.shape[-1])[None, None]
    return keep & function(position, jnp.sum(batch.mask, -1, keepdims=True))

  return losses.on_keep(keep)


@pytest.mark.long
@pytest.mark.parametrize(
  'kept',
  [
    lambda t, n: t > 0,
    lambda t, n: t == n - 1,
    pytest.param(lambda t, n: t == 1, marks=pytest.mark.long),
  ],
)
def test_a_ratio_is_read_off_a_token_that_is_trained(kept):
  assert clipped(keep_only(kept)) == 'token'
  pool = losses.pool_log_ratio()
  assert clipped(keep_only(kept), pool) == 'sequence mean'


def test_one_trained_token_shows_a_ratio_of_the_sequence():
  def detached(terms, batch):
    ratio = jnp.exp(pooled(terms, batch, jnp.mean))
    return lax.stop_gradient(ratio) * batch.advantage * terms.logp

  last = keep_only(lambda t, n: t == n - 1)
  credit = losses.chain(losses.center_by_group(), last)
  row = read(advantage=credit, objective=losses.set_objective(detached))
  assert row.ratio == 'stop-gradient weight x log pi (sequence mean)'


def test_no_gradient_is_not_called_no_ratio():
  still = ratio_of(lambda terms, batch: lax.stop_gradient(batch.advantage))
  assert still == 'not measured: no gradient on the probes'


def test_a_ratio_of_the_prefix_is_neither_a_tokens_nor_the_sequences():
  prefix = losses.on_log_ratio(
    lambda terms, batch: jnp.cumsum(terms.log_ratio, axis=-1)
  )
  text = clipped(prefix)
  assert 'own: slope 1, to other tokens 1, from the second' in text


def test_a_ratio_of_the_batch_is_not_called_none():
  def mean(terms, batch):
    total = jnp.sum(terms.log_ratio, where=batch.mask)
    return jnp.broadcast_to(total / jnp.sum(batch.mask), terms.logp.shape)

  pool = losses.on_log_ratio(mean, scope='batch')
  text = clipped(pool)
  assert 'own: slope 0.005' in text and 'power' not in text
  assert text.endswith('coupled to other completions')


def test_log_ratios_in_float32_do_not_hide_the_ratio():
  cast = losses.on_log_ratio(
    lambda terms, batch: (
      terms.logp.astype(jnp.float32) - batch.logp_old.astype(jnp.float32)
    )
  )
  assert clipped(cast) == 'token'


def test_an_objective_that_does_not_use_the_advantage_says_so():
  def reward(terms, batch):
    return jnp.exp(terms.log_ratio) * batch.reward[:, :, None]

  row = read(objective=losses.set_objective(reward))
  assert row.ratio == 'own: the gradient does not scale with A'
  assert row.regulariser == 'own: a part of the objective without A'


def test_a_part_of_the_objective_that_fits_nothing_is_not_none():
  def hidden(terms, batch):
    idle = 0.3 * terms.logp * jnp.exp(terms.logp)
    return jnp.exp(terms.log_ratio) * batch.advantage + idle

  row = read(objective=losses.set_objective(hidden))
  assert row.ratio == 'token'
  assert row.regulariser == 'own: a part of the objective without A'


def test_a_slope_of_log_pi_is_k1_only_if_its_value_has_the_reference():
  likelihood = losses.add_penalty(lambda terms, batch: -0.05 * terms.logp)
  k3 = losses.add_kl(0.2, 'k3')
  k1 = losses.add_kl(0.1, 'k1_with_zero_expected_gradient')
  assert regulariser_of(likelihood) == '-0.05 log pi'
  assert regulariser_of(k3, likelihood) == '0.2 k3 + -0.05 log pi'
  assert regulariser_of(k3, k1) == '0.2 k3 + 0.1 k1'


@pytest.mark.long
def test_a_slope_of_k2_is_k1_as_a_score_function_if_its_value_is_that_of_k1():
  k3, score = losses.add_kl(0.2, 'k3'), losses.add_kl(0.1, 'k1_score')
  assert regulariser_of(score) == '0.1 k1 (score function)'
  assert regulariser_of(k3, score) == '0.2 k3 + 0.1 k1 (score function)'
  assert regulariser_of(losses.add_kl(0.1, 'k2')) == '0.1 k2'


def test_a_penalty_by_the_reward_is_said_to_be():
  def scaled(terms, batch):
    return batch.reward[:, :, None] * terms.logp

  def chosen(terms, batch):
    return jnp.where(batch.reward[:, :, None] > 1.4, terms.logp, 0)

  text = regulariser_of(losses.add_penalty(scaled))
  assert text == 'own: depends on the reward'
  text = regulariser_of(losses.add_penalty(chosen))
  assert text.startswith('1 log pi on ') and text.endswith(', by the reward')


def test_only_a_linear_entropy_bonus_is_called_one():
  def square(terms, batch):
    return 0.1 * jnp.square(terms.entropy)

  bonus = losses.add_penalty(square, requires=('entropy',))
  row = read(bonus)
  assert row.regulariser == 'own: a term in the entropy'
  assert row.regulariser_facts.entropy_bonus is None


def test_penalties_in_float32_are_known():
  def rounded(terms, batch):
    gap = (batch.logp_ref - terms.logp).astype(jnp.float32)
    return 0.2 * (jnp.exp(gap) - gap - 1)

  link = losses.add_penalty(rounded, requires=('logp_ref',))
  assert regulariser_of(link) == '0.2 k3'
