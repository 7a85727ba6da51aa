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


def test_an_objective_that_is_not_linear_in_the_advantage_is_no_regulariser():
  def bounded(terms, batch):
    return jnp.exp(terms.log_ratio) * jnp.tanh(batch.advantage)

  row = read(objective=losses.set_objective(bounded))
  assert (row.ratio, row.regulariser) == ('token', 'none')
