"""The exact bias on the tree, against the table of papers.md 1.3."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from tests.diagnostics import named


def plain(*links):
  """Centred rewards, a mean per completion, no clip; `links` may edit it."""
  return losses.chain(
    losses.center_by_group(),
    losses.mean_over_sequences(),
    *links,
    losses.importance_weighted(),
  )


def token_mean():
  return losses.chain(
    losses.center_by_group(),
    losses.mean_over_tokens(),
    losses.score_function(),
  )


def sequence_product():
  """GCPO: the product of the ratios, clipped nowhere near 1."""

  def objective(terms, batch):
    ratio = jnp.exp(jnp.sum(terms.log_ratio, axis=-1, keepdims=True))
    last = jnp.cumsum(batch.mask, axis=-1) == jnp.sum(
      batch.mask, axis=-1, keepdims=True
    )
    last &= batch.mask  # one term for each completion
    return jnp.where(last, ratio * batch.advantage, 0)

  return losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequence_sums(),
    losses.set_objective(objective),
  )


def cppo(gamma=1.2):
  return losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.on_weight(lambda w, batch: w * (jnp.abs(batch.advantage) >= gamma)),
    losses.importance_weighted(),
  )


def conflict_rule():
  """GTPO: 0, 1 or 2 where a common prefix has advantages of both signs."""

  def weight(weight, batch):
    sign = jnp.sign(batch.advantage)
    same = batch.tokens[:, :, None] == batch.tokens[:, None]
    both = batch.mask[:, :, None] & batch.mask[:, None]
    against = sign[:, :, None] * sign[:, None] < 0
    conflict = jnp.any(same & both & against, axis=2)
    conflict = jnp.cumprod(conflict, axis=-1)  # the run from the first token
    return weight * jnp.where(conflict, 1 + sign, 1)

  return plain(losses.on_weight(weight))


METHODS = {
  'dr_grpo': lambda: losses.methods.dr_grpo(max_tokens=1),
  'gcpo': sequence_product,
  'grpo': lambda: named.method('grpo'),
  'gspo': lambda: named.method('gspo'),
  'grpo without std': plain,
  'dapo': lambda: named.method('dapo'),
  'token mean': token_mean,
  'cppo': cppo,
  'gtpo': conflict_rule,
}
TABLE = {  # E[first], E[second], first / second, E[W_agg | all share]
  'dr_grpo': (0, 0.1294, 0, 0),
  'gcpo': (0, 0.3409, 0, 0),
  'grpo': (0.0476, 0.0938, 0.51, 0.1818),
  'gspo': (0.0476, 0.0938, 0.51, 0.1818),
  'grpo without std': (0.0180, 0.0356, 0.51, 0.0844),
  'dapo': (0.0111, 0.0379, 0.29, 0),
  'token mean': (0.0026, 0.0139, 0.19, 0),
  'cppo': (0.0207, 0.0408, 0.51, 0.0487),
  'gtpo': (0.0372, 0.0356, 1.04, 0.1875),
}


@functools.cache
def made(name):
  return METHODS[name]()


@pytest.mark.parametrize('name', TABLE)
def test_the_table(name):
  first, second, ratio, shared = TABLE[name]
  bias = diagnostics.tree_bias(made(name))
  assert bias.first == pytest.approx(first, abs=1e-4)
  assert bias.second == pytest.approx(second, abs=1e-4)
  assert bias.ratio == pytest.approx(ratio, abs=1e-2)
  assert bias.shared_weight == pytest.approx(shared, abs=1e-4)
  assert (bias.true_first, bias.true_second) == pytest.approx((0, 0.1725))


@pytest.mark.parametrize('name', TABLE)
def test_reversing_who_is_short_flips_the_sign_except_for_the_conflict_rule(
  name,
):
  bias = diagnostics.tree_bias(made(name), short_reward=0.0, long_reward=1.0)
  first, second, _, shared = TABLE[name]
  if name == 'gtpo':
    assert bias.first == pytest.approx(0.0011, abs=1e-4)
    assert bias.shared_weight == pytest.approx(0.019, abs=1e-3)
  else:
    got = bias.first, bias.second, bias.shared_weight
    assert got == pytest.approx((-first, -second, -shared), abs=1e-4)


@pytest.mark.parametrize('name', TABLE)
def test_with_equal_lengths_only_the_conflict_rule_is_biased(name):
  bias = diagnostics.tree_bias(made(name), short_tokens=8, long_tokens=8)
  want = 0.0087 if name == 'gtpo' else 0
  assert bias.first == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
  'method,factor',
  [
    (losses.methods.dr_grpo(max_tokens=1), 0.75),
    (named.method('rloo'), 1),
    (named.method('reinforce'), 1),
  ],
)
def test_these_are_the_true_gradient_times_a_factor(method, factor):
  bias = diagnostics.tree_bias(method, other_reward=0.2, long_reward=-0.3)
  # By the definition: chance times reward times derivative of log chance.
  first = 0.345 * (1 - 0.3) * 0.31 + 0.31 * 0.2 * -0.69
  second = 0.345 * 1 * 0.5 + 0.345 * -0.3 * -0.5
  assert (bias.true_first, bias.true_second) == pytest.approx((first, second))
  got = bias.first, bias.second
  assert got == pytest.approx((factor * first, factor * second), abs=1e-12)


def test_a_tie_is_broken_by_the_order_so_all_orders_are_taken():
  """Training on the earliest completion alone changes nothing but a factor."""

  def first_only(keep, batch):
    return keep & (jnp.arange(keep.shape[1]) == 0)[None, :, None]

  def last_only(keep, batch):
    return keep & (jnp.arange(keep.shape[1]) == 3)[None, :, None]

  one, other = (
    diagnostics.tree_bias(losses.chain(losses.on_keep(f), named.method('rloo')))
    for f in (first_only, last_only)
  )
  assert one.second == pytest.approx(0.1725)
  assert other[:2] == pytest.approx(one[:2], abs=1e-12)


def weighted(field, function):
  return losses.chain(
    losses.leave_one_out(),
    losses.mean_over_sequence_sums(),
    losses.on_weight(
      lambda w, batch: w * function(getattr(batch, field)), requires=(field,)
    ),
    losses.score_function(),
  )


def test_the_entropies_are_those_of_the_tree():
  """A factor by the entropy acts on the tokens where the tree branches."""
  method = weighted('entropy_old', lambda x: x)
  bias = diagnostics.tree_bias(method, other_reward=0.2)
  assert bias.second == pytest.approx(bias.true_second * 0.6931, abs=1e-4)
  assert bias.first == pytest.approx(bias.true_first * 0.6191, abs=1e-4)


def test_the_probabilities_are_those_of_the_tree():
  bias = diagnostics.tree_bias(weighted('logp_old', jnp.exp), other_reward=0.2)
  assert bias.second == pytest.approx(bias.true_second * 0.5)
  # RLOO leaves each completion its reward less the mean reward, 0.407.
  first = (
    0.69 * (0.5 - 0.407) * 0.31 * 0.69 - 0.31 * (0.2 - 0.407) * 0.69 * 0.31
  )
  assert bias.first == pytest.approx(first)


def test_what_fills_the_batch_is_not_valid_and_larger_trees_have_room():
  seen, longest = [], []

  def mine(batch):
    seen.append(np.asarray(batch.valid))
    longest.append(np.max(np.sum(batch.mask, axis=-1)))
    return {'mine': 2.0 * batch.mask}

  method = losses.chain(
    losses.leave_one_out(),
    losses.mean_over_sequence_sums(),
    losses.on_weight(
      lambda w, batch: w * batch.extras['mine'], requires=('mine',)
    ),
    losses.score_function(),
  )
  bias = diagnostics.tree_bias(method, mine, group=3)
  assert bias.second == pytest.approx(2 * 0.1725)
  assert all(v[0].tolist() == 3 * [True] + 5 * [False] for v in seen)
  assert not any(np.any(v[1]) for v in seen)
  assert max(longest) == 20
  diagnostics.tree_bias(method, mine, group=2, long_tokens=24)
  assert max(longest) == 24


def test_the_result_is_plain_and_impossible_lengths_are_refused():
  bias = diagnostics.tree_bias(named.method('rloo'), group=2)
  assert json.loads(json.dumps(bias._asdict())) == bias._asdict()
  with pytest.raises(ValueError, match='at least 2 tokens'):
    diagnostics.tree_bias(named.method('rloo'), short_tokens=1)


@pytest.mark.parametrize('dropped', [slice(None), slice(1)])
def test_what_is_not_trained_is_not_called_unbiased(dropped):
  """No token, or all but the first: there is nothing to compare."""
  keep = losses.on_keep(lambda keep, batch: keep.at[..., dropped].set(False))
  bias = diagnostics.tree_bias(losses.chain(keep, named.method('rloo')))
  assert bias.first == 0 and bias.ratio is None
  alike = diagnostics.tree_bias(named.method('rloo'), long_reward=1.0)
  assert alike.first > 0.1 and alike.ratio is None  # over a second of 0
  assert diagnostics.tree_bias(named.method('rloo')).ratio == pytest.approx(0)
