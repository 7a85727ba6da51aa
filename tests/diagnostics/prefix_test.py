"""W_agg of methods where completions share their first token."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _prefix
from grpo_jax.diagnostics import _probe
from tests.diagnostics import named


def method(*links):
  return losses.chain(
    losses.center_by_group(),
    losses.mean_over_sequence_sums(),
    *links,
    losses.score_function(),
  )


def shared(method):
  """Who shares the first token, on which probe, and what was read of it."""
  subject = _probe.Subject(method)
  probe, sharing = _prefix._sharing_probe(subject)
  return sharing, probe, subject.read({'all': probe})['all']


@pytest.mark.parametrize('name', ['dr_grpo', 'rloo', 'dapo'])
def test_a_uniform_weight_cancels_on_the_prefix_of_a_group(name):
  bias = _prefix.prefix_bias(named.method(name))
  assert bias.whole < 1e-12 and bias.uneven < 1e-12
  assert bias.part > 0.3  # a subset's advantages do not add up to 0


def test_the_factor_is_the_weight():
  assert _prefix.prefix_bias(method()).factor == pytest.approx(1 / 16)


def test_grpo_moves_a_group_by_the_correlation_of_reward_and_inverse_length():
  r"""W_agg = Corr(r, 1/L) std(1/L), over the group alone: B = G."""
  sharing, probe, reading = shared(named.method('grpo'))
  c = reading.coefficient[:, 0, :, 0]
  whole = np.all(sharing, axis=1)
  reward = probe.batch.reward[whole, 0]
  inverse = 1 / np.sum(probe.batch.mask[whole, 0], axis=-1)
  want = [np.corrcoef(r, x)[0, 1] * np.std(x) for r, x in zip(reward, inverse)]
  got = np.sum(c[whole], axis=1) * 2  # the batch holds two groups
  assert len({f'{w:.6f}' for w in want}) == len(want) == 10
  np.testing.assert_allclose(got, want, atol=1e-12)
  bias = _prefix.prefix_bias(named.method('grpo'))
  assert bias.whole > 0.1 and bias.uneven > 0.1


def test_only_those_who_share_have_the_same_first_id():
  sharing, probe, _ = shared(named.method('grpo'))
  first = np.asarray(probe.batch.tokens)[:, 0, :, 0]
  assert len(np.unique(sharing, axis=0)) == 2**8 - 8 - 1
  for ids, shares in zip(first, sharing):
    assert len(set(ids[shares])) == 1
    assert len(set(ids)) == 1 + np.sum(~shares)
  for array in (probe.logp, probe.batch.entropy_old):  # one policy
    ranges = np.ptp(np.where(sharing, array[:, 0, :, 0], np.nan), axis=1)
    assert not np.any(ranges > 0)


def test_a_weight_by_the_ids_is_measured_as_it_would_act():
  """Twice the weight for a shared first token: one factor for all who share."""

  def double(weight, batch):
    same = batch.tokens[:, :, None, 0] == batch.tokens[:, None, :, 0]
    return weight * (1 + (jnp.sum(same, axis=-1) > 1))[..., None]

  bias = _prefix.prefix_bias(method(losses.on_weight(double)))
  assert bias.factor == pytest.approx(2 / 16)
  assert bias.uneven < 1e-12


def test_noise_is_no_difference_between_subsets():
  """Random factors, the same in every subset: W(S) is a sum of ten numbers."""
  noisy = method(
    losses.on_weight(
      lambda w, batch: w * batch.extras['noise'], requires=('noise',)
    )
  )
  c = shared(noisy)[2].coefficient[:247, 0, :, 0]
  assert np.max(np.ptp(c, axis=0)) < 1e-12
  assert _prefix.prefix_bias(noisy).uneven > 0.1


def test_a_method_without_gradient_has_no_bias_and_results_are_plain():
  zero = method(losses.on_advantage(lambda a, batch: 0 * a))
  bias = _prefix.prefix_bias(zero)
  assert bias == (None, None, None, None)  # not 0: nothing was measured
  assert json.loads(json.dumps(bias._asdict())) == bias._asdict()


def test_a_first_token_that_is_not_trained_is_not_said_to_cancel():
  late = losses.on_keep(lambda keep, batch: keep.at[..., 0].set(False))
  bias = _prefix.prefix_bias(losses.chain(late, named.method('rloo')))
  assert bias == (None, None, None, None)


def test_what_a_method_requires_can_be_given():
  needy = method(
    losses.on_weight(
      lambda w, batch: w * batch.extras['mine'], requires=('mine',)
    )
  )
  with pytest.raises(ValueError, match="'mine'"):
    _prefix.prefix_bias(needy)
  bias = _prefix.prefix_bias(
    needy, lambda batch: {'mine': 0.5 + 0 * batch.mask}
  )
  assert bias.factor == pytest.approx(0.5 / 16)
