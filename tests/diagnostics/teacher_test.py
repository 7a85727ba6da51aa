"""Audits of methods that learn from a teacher."""

from grpo_jax import diagnostics
from grpo_jax import losses


def row(method):
  return diagnostics.audit(method).row


def test_a_teacher_in_the_advantage_is_told_beside_the_form():
  alone = row(losses.methods.opd())
  assert (alone.advantage, alone.regulariser) == (
    '0 on the probes',
    'the teacher in A',
  )
  both = row(losses.methods.opd(reward_coefficient=1.0))
  assert (both.advantage, both.regulariser) == (
    'per token, r - mean',
    'the teacher in A',
  )
  assert both.ratio == 'token' and both.weight == '1/N'


def test_a_kl_to_a_teacher_has_the_forms_of_one_to_a_reference():
  for estimator, form in (('k2', 'k2'), ('k3', 'k3'), ('k3_weighted', 'r k3')):
    penalty = losses.add_teacher_kl(0.3, estimator)
    found = row(losses.chain(losses.methods.rloo(), penalty))
    assert found.regulariser == f'0.3 {form}'
    assert found.advantage == 'n/(n-1) (r - mean)'
  assert row(losses.methods.rloo()).regulariser == 'none'


def test_the_kl_over_likeliest_tokens_is_told_by_its_direction():
  found = row(losses.methods.gkd())
  assert (
    found.regulariser == '1 KL(pi, teacher)' and found.weight == '1/(B L_i)'
  )
  assert found.ratio.startswith('not measured')
  found = row(losses.methods.gkd('forward', 3))
  assert found.regulariser == '1 KL(teacher, pi)'
  penalty = losses.add_teacher_top_kl(0.3, 'forward')
  found = row(losses.chain(losses.methods.rloo(), penalty))
  assert found.regulariser == '0.3 KL(teacher, pi)'
  assert found.advantage == 'n/(n-1) (r - mean)'
