"""The row of the table: published methods, weights and advantages."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _row
from grpo_jax.losses import methods

Z = '(r - mean)/std'

ROWS = {
  'dapo': ('1/N, groups of equal rewards dropped', 'token', 'none', Z),
  'dr_grpo': ('1/(3000 B)', 'token', 'none', 'r - mean'),
  'gmpo': ('1/(B L_i)', 'sequence mean', 'none', Z),
  'grpo': ('1/(B L_i)', 'token', '0.04 k3', Z),
  'gspo': ('1/(B L_i)', 'sequence mean', 'none', Z),
  'kl_cov': ('1/N', 'token', '1 |log r| on ', Z),
  'reinforce': ('1/B', 'none (log pi)', 'none', 'r'),
  'rloo': ('1/B', 'none (log pi)', 'none', 'n/(n-1) (r - mean)'),
  'supervised': ('1/N', 'none (log pi)', 'none', '1'),
}


@pytest.mark.parametrize('name', ROWS)
def test_the_row_of_a_published_method(name):
  row = _row.surrogate_row(getattr(methods, name)())
  weight, ratio, regulariser, advantage = ROWS[name]
  assert (row.weight, row.ratio, row.advantage) == (weight, ratio, advantage)
  assert row.regulariser.startswith(regulariser)


def read(*links, **parts):
  """The row of a chain whose parts are simple but for those given."""
  default = dict(
    advantage=losses.center_by_group(),
    weight=losses.mean_over_tokens(),
    objective=losses.importance_weighted(),
  )
  return _row.surrogate_row(losses.chain(*(default | parts).values(), *links))


def advantage_of(function, **given):
  row = read(advantage=losses.set_advantage(function), **given)
  return row.advantage, row.advantage_facts


def centred(reward):
  return reward - jnp.mean(reward, axis=-1, keepdims=True)


def test_a_deviation_and_its_epsilon_are_measured():
  row = read(advantage=losses.normalize_by_group('sample', 0.01))
  assert row.advantage == '(r - mean)/(sample std + 0.01)'
  assert abs(row.advantage_facts.epsilon - 0.01) < 1e-9
  assert row.advantage_facts.shift_invariant
  assert row.advantage_facts.scale_exponent is None  # the epsilon is a scale


def test_a_factor_of_the_advantage_is_measured():
  triple = losses.on_advantage(lambda advantage, batch: 3 * advantage)
  row = read(advantage=losses.chain(losses.center_by_group(), triple))
  assert row.advantage == '3 (r - mean)'
  assert row.advantage_facts.scale_exponent == pytest.approx(1)


def test_a_baseline_weighted_by_length_is_found():
  def advantage(batch):
    length = jnp.sum(batch.mask, axis=-1)
    total = jnp.sum(length * batch.reward, axis=1, keepdims=True)
    share = total / jnp.sum(length, axis=1, keepdims=True)
    return jnp.where(batch.valid, batch.reward - share, 0)

  text, facts = advantage_of(advantage)
  assert text == 'r - sum L r / sum L'
  assert facts.depends_on == ('the reward', 'lengths')


def test_an_advantage_of_ones_own_is_described():
  text, facts = advantage_of(lambda batch: jnp.sqrt(batch.reward))
  assert text == (
    'own: not shift-invariant, scales as r^0.5, depends on the reward'
  )
  assert facts.factor is None and not facts.per_token


def test_an_advantage_per_token_is_said_to_be():
  def advantage(batch):
    late = jnp.arange(batch.mask.shape[-1], dtype=batch.reward.dtype)
    return batch.reward[..., None] * 0.9 ** late[None, None]

  text, facts = advantage_of(advantage)
  assert text.startswith('per token, own: ') and facts.per_token
  assert facts.scale_exponent == pytest.approx(1)


def test_a_gate_on_tokens_leaves_the_rest_recognizable():
  def advantage(batch):
    return jnp.where(batch.entropy_old > 1, batch.reward[..., None], 0)

  text, facts = advantage_of(advantage)
  assert text.startswith('per token, r on ')
  assert 'else 0; also depends on the entropy' in text
  assert facts.factor == pytest.approx(1)


def test_a_term_in_the_mean_entropy_is_found():
  def advantage(batch):
    length = jnp.maximum(jnp.sum(batch.mask, axis=-1), 1)
    mean = jnp.sum(batch.entropy_old * batch.mask, axis=-1) / length
    return jnp.where(batch.valid, batch.reward - 0.2 * mean, 0)

  assert advantage_of(advantage)[0] == 'r - 0.2 <H>_i'


def weighed(function, **given):
  row = read(losses.on_weight(function), **given)
  return row.weight, row.weight_facts


def test_a_users_weight_is_matched_up_to_a_constant():
  assert weighed(lambda weight, batch: 2 * weight)[0] == '2/N'
  text, facts = weighed(
    lambda weight, batch: weight / 7, weight=losses.sum_over_tokens()
  )
  assert text == '1/(7 B)' and facts.factor == pytest.approx(1 / 7)


def test_a_weight_of_the_prompt_is_matched():
  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    tokens = jnp.sum(kept, axis=(1, 2), keepdims=True)
    return kept / (tokens * kept.shape[0])

  assert read(weight=losses.set_weight(weight)).weight == '1/(P N_p)'


def test_a_weight_of_ones_own_is_described_by_what_moves_it():
  def by_length(weight, batch):
    length = jnp.sum(batch.mask, axis=-1, keepdims=True)
    return weight * jnp.sqrt(length)

  def by_reward(weight, batch):
    return weight * (1 + batch.reward[..., None])

  sequences = dict(weight=losses.mean_over_sequences())
  assert weighed(by_length, **sequences)[0] == 'own: depends on own length'
  assert weighed(by_reward, **sequences)[0] == (
    'own: depends on own length, the reward'
  )


def test_a_weight_that_drops_says_how_much_and_by_what():
  def large(weight, batch):
    return jnp.where(jnp.abs(batch.advantage) > 0.3, weight, 0)

  text, facts = weighed(large, weight=losses.mean_over_sequences())
  assert text.startswith('1/(B L_i) (B: all completions) on ')
  assert text.endswith(' of the tokens, else 0; also depends on the reward')
  assert 0.2 < facts.kept < 0.8 and facts.uniform_kept == 0


def test_ids_that_change_a_weight_are_noticed():
  def rare(weight, batch):
    return jnp.where(batch.tokens < 20, weight, 2 * weight)

  def marked(weight, batch):
    first = batch.tokens[..., 0]
    shared = jnp.all(first == first[0, 0])
    return jnp.where(shared, 2 * weight, weight)

  assert 'ids' in weighed(rare)[0]
  assert weighed(marked)[0] == '1/N; also depends on ids'


def test_a_missing_field_is_asked_for():
  link = losses.on_weight(
    lambda weight, batch: weight * batch.extras['trust'], requires=('trust',)
  )
  with pytest.raises(ValueError, match="'trust'"):
    read(link)
  method = losses.chain(losses.methods.rloo(), link)
  row = _row.surrogate_row(
    method, lambda batch: {'trust': np.full(batch.mask.shape, 0.5)}
  )
  assert row.weight == '1/(2 B)'
