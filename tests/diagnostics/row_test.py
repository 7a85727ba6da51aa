"""The row of the table: published methods, weights and advantages."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.diagnostics import _row
from grpo_jax.losses import methods
from tests.diagnostics import named

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
  row = _row.surrogate_row(named.method(name))
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


@pytest.mark.parametrize(
  'epsilon',
  [0.01, *(pytest.param(x, marks=pytest.mark.long) for x in (1e-6, 2.0))],
)
def test_an_epsilon_under_the_root_is_told_from_one_beside_it(epsilon):
  row = read(advantage=losses.normalize_by_group('sample', epsilon, True))
  assert row.advantage == f'(r - mean)/sqrt(sample std^2 + {epsilon:g})'
  assert row.advantage_facts.epsilon == pytest.approx(epsilon, rel=1e-6)


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
    lambda weight, batch: weight / 7, weight=losses.mean_over_sequence_sums()
  )
  assert text == '1/(7 B)' and facts.factor == pytest.approx(1 / 7)


def weight_of(function):
  """The text of a weight of all kept tokens."""

  def weight(batch):
    return batch.keep / jnp.maximum(function(batch), 1)

  return read(weight=losses.set_weight(weight)).weight


def prompts(batch):
  return jnp.sum(jnp.any(batch.keep, axis=(1, 2)))


def test_a_weight_of_the_prompt_is_matched():
  def tokens(batch):
    return jnp.sum(batch.keep, axis=(1, 2), keepdims=True)

  assert weight_of(lambda b: tokens(b) * prompts(b)) == '1/(P N_p)'
  assert weight_of(lambda b: tokens(b) * b.keep.shape[0]) == '1/(2 N_p)'


def test_a_weight_that_does_not_know_the_batch_is_told_from_one_of_prompts():
  assert weight_of(prompts) == '1/P'
  assert weight_of(lambda batch: 1024) == '1/1024, whatever the batch'
  size = weight_of(lambda batch: batch.keep.size)  # the padded one
  assert size == '1/320, whatever the batch'


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


def test_a_weight_that_depends_on_the_position_is_noticed():
  def early(weight, batch):  # by the place alone, whatever stands there
    return jnp.where(jnp.arange(20)[None, None] < 5, weight, 0.5 * weight)

  assert weighed(early)[0].endswith(', the position')
  late = losses.on_keep(lambda keep, batch: jnp.cumsum(keep, -1) > 2)
  row = read(weight=losses.chain(late, losses.mean_over_tokens()))
  assert row.weight.startswith('1/N on ')
  assert row.weight.endswith('else 0; also depends on the position')
  assert row.advantage == 'r - mean'

  def decayed(batch):
    return batch.keep * 0.9 ** jnp.arange(20)[None, None]

  text = read(weight=losses.set_weight(decayed)).weight
  assert text == 'own: depends on the position'


def test_what_stands_at_a_position_is_not_the_position():
  def own(weight, batch):
    parts = batch.logp_old, batch.entropy_old, batch.extras['noise']
    return weight * jnp.where(sum(parts) > 0, 1, 0.5)

  text = weighed(own)[0]
  assert 'the position' not in text
  for name in ('log pi_old', 'the entropy', 'noise'):
    assert name in text
  ids = lambda weight, batch: jnp.where(batch.tokens % 3, weight, 0)
  assert 'the position' not in weighed(ids)[0]


def test_a_missing_field_is_asked_for():
  link = losses.on_weight(
    lambda weight, batch: weight * batch.extras['trust'], requires=('trust',)
  )
  with pytest.raises(ValueError, match="'trust'"):
    read(link)
  method = losses.chain(named.method('rloo'), link)
  row = _row.surrogate_row(
    method, lambda batch: {'trust': np.full(batch.mask.shape, 0.5)}
  )
  assert row.weight == '1/(2 B)'


def test_a_method_without_an_advantage_on_the_probes_says_so():
  row = _row.surrogate_row(methods.passk(right_reward=5.0))
  assert row.advantage == '0 on the probes'
  assert row.weight == '1/(B L_i)'
  none = losses.on_keep(lambda keep, batch: keep & False)
  row = _row.surrogate_row(losses.chain(none, named.method('rloo')))
  assert row.weight == '0 on the probes'
  assert row.ratio == 'not measured: no gradient on the probes'


def rounded():
  return losses.on_reward(lambda r, batch: r.astype(jnp.float32))


@pytest.mark.long
@pytest.mark.parametrize(
  'advantage,text',
  [
    (losses.center_by_group(), 'r - mean'),
    (losses.normalize_by_group(), Z),
    pytest.param(
      losses.leave_one_out(), 'n/(n-1) (r - mean)', marks=pytest.mark.long
    ),
    (losses.normalize_by_group(epsilon=1e-4), '(r - mean)/(std + 0.0001)'),
  ],
)
def test_a_cast_to_float32_on_the_way_changes_no_statement(advantage, text):
  row = read(advantage=losses.chain(rounded(), advantage))
  assert row.advantage == text
  assert row.weight == '1/N'
  assert row.advantage_facts.depends_on == ('the reward',)
  assert row.advantage_facts.shift_invariant


def test_a_tiny_epsilon_is_still_seen_in_float64():
  row = read(advantage=losses.normalize_by_group(epsilon=1e-6))
  assert row.advantage == '(r - mean)/(std + 1e-06)'


@pytest.mark.parametrize('cast', [(), (rounded(),)])
@pytest.mark.parametrize(
  'advantage,text',
  [
    pytest.param(losses.center_by_group(), 'r - mean', marks=pytest.mark.long),
    (losses.normalize_by_group(), Z),
  ],
)
def test_a_kl_in_the_reward_is_measured(advantage, text, cast):
  row = read(advantage=losses.chain(losses.subtract_kl(0.1), *cast, advantage))
  assert row.advantage == f'{text}, with r - 0.1 sum k1 for r'
  assert row.regulariser == '0.1 k1 in the reward'
  facts = row.advantage_facts
  assert facts.kl_in_reward == pytest.approx(0.1)
  assert facts.scale_exponent is None  # the KL has a scale
  assert facts.depends_on == ('the reward', 'lengths', 'the reference')


def test_a_kl_to_go_is_told_from_one_of_the_completion():
  to_go = losses.subtract_kl_to_go(0.3)
  row = read(losses.add_kl(0.2, 'k2'), advantage=losses.chain(
    losses.center_by_group(), to_go
  ))  # fmt: skip
  assert row.advantage == 'per token, r - mean, with r - 0.3 k1 to go for r'
  assert row.regulariser == '0.2 k2 + 0.3 k1 in the reward'


def test_a_reference_in_the_advantage_without_a_form_is_mentioned():
  def squared(reward, batch):
    gap = jnp.where(batch.mask, batch.logp_old - batch.logp_ref, 0)
    return reward - 0.1 * jnp.sum(jnp.square(gap), axis=-1)

  link = losses.on_reward(squared, requires=('logp_old', 'logp_ref'))
  row = read(advantage=losses.chain(link, losses.center_by_group()))
  assert row.advantage == 'r - mean; also depends on lengths, the reference'
  assert row.regulariser == 'the reference in A'
  assert row.advantage_facts.kl_in_reward is None


def test_an_audit_has_drawn_with_the_policy_itself():
  """So a mask of what is old does nothing, and a clip by age is the clip."""
  plain, by_age = (
    losses.chain(losses.center_by_group(), *links, losses.mean_over_tokens())
    for links in (
      (losses.ppo_clip(0.2, 0.28),),
      (losses.mask_stale(0), losses.clip_by_age(0.2, 0.28, 0.5)),
    )
  )
  one, other = map(diagnostics.surrogate_row, (by_age, plain))
  assert one == other
