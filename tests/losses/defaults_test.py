"""The defaults are the papers': those that the oracles state on their own."""

import inspect

import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests import oracles


def defaults(function):
  parameters = inspect.signature(function).parameters.values()
  given = {p.name: p.default for p in parameters if p.default is not p.empty}
  if 'deviation' in given:
    given['ddof'] = {'population': 0, 'sample': 1}[given.pop('deviation')]
  return given


@pytest.mark.parametrize('name', methods.__all__)
def test_a_method_has_the_defaults_of_its_oracle(name):
  expected = defaults(oracles.METHODS[name])
  given = defaults(getattr(methods, name))
  assert given == {key: expected[key] for key in given}


@pytest.mark.parametrize(
  'transform, method',
  [
    (losses.normalize_by_group, methods.grpo),
    (losses.shape_overlong_reward, methods.dapo),
    (losses.ppo_clip, methods.grpo),
    (losses.clip_log_ratio, methods.gmpo),
    (losses.penalize_covariance, methods.kl_cov),
    (losses.detach_covariance, methods.clip_cov),
    (losses.mask_low_entropy, methods.forking_tokens),
    (losses.credit_tokens_by_entropy, methods.gtpo_entropy),
    (losses.credit_completions_by_entropy, methods.grpo_s),
    (losses.credit_pass_at_k, methods.passk),
    (losses.normalize_each_reward, methods.gdpo),
    (losses.capped_score_function, methods.cispo),
    (losses.sigmoid_gate, methods.sapo),
    (losses.gamma_weighted_score, methods.vespo),
    (losses.gate_small_advantages, methods.cppo),
    (losses.gate_probability_change, methods.dppo_tv),
    (losses.gate_binary_kl, methods.dppo_kl),
    (losses.mask_off_policy_negatives, methods.deepseek_v3_2),
    (losses.pull_to_old, methods.dro),
    (losses.imitate_positives, methods.positive_nll),
    (losses.normalize_over_tokens, methods.reinforce_pp),
    (losses.silence_uncertain, methods.gtpo_conflict),
    (losses.leave_one_out_to_go, methods.rloo_to_go),
    (losses.normalize_to_go_by_group, methods.grpo_to_go),
    (losses.normalize_turns_and_outcome, methods.mt_grpo),
    (losses.add_credit_by_state, methods.gigpo),
  ],
)
def test_a_transform_has_the_defaults_of_its_method(transform, method):
  # No cap, and epsilon beside the deviation, as methods have them.
  given = defaults(transform).items() - {('cap', None), ('under_root', False)}
  assert given <= defaults(method).items()


def test_transforms_of_no_method_have_plain_defaults():
  assert defaults(losses.constant_advantage) == {'value': 1.0}
  assert defaults(losses.mean_over_sequence_sums) == {'budget_tokens': 1}
  assert defaults(losses.add_kl) == {'estimator': 'k3'}
  assert defaults(losses.subtract_entropy) == {
    'coefficient': defaults(methods.gtpo_conflict)['entropy_coefficient']
  }


@pytest.mark.parametrize(
  'name',
  [
    'grpo',
    'deepseek_v3_2',
    'cppo',
    'reinforce_pp',
    'reinforce_pp_baseline',
    'mt_grpo',
    'gigpo',
  ],
)
def test_a_coefficient_of_0_needs_no_reference(name):
  make = getattr(methods, name)
  assert 'logp_ref' not in make(kl_coefficient=0).requires
  assert 'logp_ref' not in make(kl_coefficient=0.0).requires
  for coefficient in (1, 0.001, lambda rollout: 0.0):
    assert 'logp_ref' in make(kl_coefficient=coefficient).requires


def test_without_its_entropy_terms_a_method_needs_no_entropy():
  make = methods.gtpo_conflict
  without = make(entropy_coefficient=0, entropy_limit=float('inf'))
  assert without.requires == {'tokens'}
  for some in (
    make(entropy_coefficient=1, entropy_limit=float('inf')),
    make(entropy_coefficient=0),
  ):
    assert some.requires == {'tokens', 'entropy_old'}
