"""The mutation run when asked for; a handful of its mutants always."""

import os
import subprocess
import sys

import pytest

from tests import mutants

ORACLE = 'tests.losses.properties_test::test_value_and_gradient'
CHAIN = 'tests.losses.chain_test::test'
OPS = 'tests.losses.ops_test::test'

PICKED = [
  (
    'losses/_base.py:surrogate_loss',
    'value = jnp.where(batch.keep, terms.objective - terms.penalty, 0)',
    'terms.objective - terms.penalty -> terms.objective + terms.penalty',
    f'{ORACLE}[grpo-0]',
  ),
  (
    'losses/_base.py:surrogate_loss',
    'old = lax.stop_gradient(logp) if batch.logp_old is None '
    'else batch.logp_old',
    'lax.stop_gradient(logp) -> logp',
    f'{CHAIN}_without_an_old_policy_the_gradient_is_that_at_ratio_one[]',
  ),
  (
    'losses/_credit.py:leave_one_out.advantage',
    'return _ops.safe_divide(centered * number, number - 1)',
    'centered * number -> centered',
    f'{ORACLE}[rloo-0]',
  ),
  (
    'losses/_objective.py:hold_between',
    'clip = _ops.clip_metrics(ratio > most, ratio < least, advantage)',
    'ratio > most -> ratio >= most',
    f'{OPS}_a_ratio_on_the_bound_is_not_clipped[0]',
  ),
  (
    'losses/_ops.py:clip_metrics',
    "'clipped_high': above & (advantage > 0),",
    'above & (advantage > 0) -> above | (advantage > 0)',
    f'{CHAIN}_clip_metrics_by_side_and_sign[]',
  ),
  (
    'losses/_ops.py:sequence_mean',
    'return masked_mean(value, batch.mask, axis=-1)',
    'axis=-1 -> axis=0',
    f'{ORACLE}[gspo-0]',
  ),
  (
    'losses/_penalty.py:kl_penalty.penalty',
    'kl = jnp.square(gap) / 2',
    'jnp.square(gap) / 2 -> jnp.square(gap)',
    'tests.losses.oracle_test::test_kl_gradients_against_enumeration[]',
  ),
  (
    'losses/_objective.py:clip_log_ratio.log_ratio',
    "return jnp.where(metrics['clipped_low'], -low, value), metrics",
    'branches swapped',
    f'{ORACLE}[gmpo-low=0.2-high=0.3-0]',
  ),
  (
    'losses/_stages.py:_stage',
    'if callable(value) or isinstance(value, Controller)',
    'to And',
    f'{CHAIN}_a_schedule_may_stand_beside_a_constant[]',
  ),
  (
    'losses/_weight.py:mean_over_sequences.weight',
    'sequences = jnp.sum(tokens > 0).astype(kept.dtype)',
    '0 -> 1',
    f'{ORACLE}[grpo-0]',
  ),
  (
    'losses/methods.py:gspo',
    'return chain(',
    'without pool_log_ratio()',
    f'{ORACLE}[gspo-0]',
  ),
  (
    'optim/_adamw.py:learning_rate',
    'steps = total_steps - warmup_steps',
    'total_steps - warmup_steps -> total_steps + warmup_steps',
    'tests.optim.adamw_test::test_learning_rate[5]',
  ),
]
"""The first three say which mutant (as in `EQUIVALENT`), the last who kills."""


@pytest.mark.long
@pytest.mark.parametrize('package', mutants.PACKAGES)
def test_the_checks_pass_without_a_mutant(package):
  names = {name for *_, name in PICKED if name.startswith(f'tests.{package}')}
  with mutants.loaded({}):
    checks = mutants.checks(package)
    failures = {name: mutants.failure(checks[name]) for name in names}
  assert names and not any(failures.values()), failures


@pytest.mark.parametrize(
  'where, line, change, killer',
  [
    pytest.param(
      *entry, id=entry[2], marks=pytest.mark.long if number % 4 else ()
    )
    for number, entry in enumerate(PICKED)
  ],
)
def test_a_picked_mutant_is_killed(where, line, change, killer):
  path = 'grpo_jax/' + where.split(':')[0]
  (text,) = (s.text for s in mutants.sources().values() if s.path == path)
  every = {mutant.key: mutant for mutant in mutants.mutants(path, text)}
  result = mutants.judge(every[where, line, change], [killer])
  assert result.killer == killer


def test_modules_come_back_after_a_mutant():
  from grpo_jax import losses

  with mutants.loaded({}):
    from grpo_jax import losses as fresh
  from grpo_jax import losses as again

  assert again is losses and fresh is not losses


@pytest.mark.parametrize(
  'line, changes',
  [
    ('a > b', ['a > b -> a < b', 'a > b -> a >= b']),
    ('a - b', ['a - b -> a + b']),
    ('a * b', ['a * b -> a / b', 'a * b -> a', 'a * b -> b']),
    ('~a & b', ['~a & b -> ~a | b', '~a & b -> ~a', '~a & b -> b', '~a -> a']),
    ('f(a, axis=-1)', ['axis=-1 -> axis=0']),
    ('lax.stop_gradient(a)', ['lax.stop_gradient(a) -> a']),
    ('jnp.minimum(a, b)', ['jnp.minimum -> jnp.maximum']),
    ('a.where(b, c, d)', ['branches swapped']),
    ('chain(a, b())', ['without a', 'without b()']),
    ('0 if a else 0.5', ['not (a)', '0 -> 1', '0.5 -> 0.75']),
    ('def f(a: b - c = 1): raise g(1)', ['1 -> 0']),
    ('"""a"""; import b; c: d[1]', []),
  ],
)
def test_kinds_of_change(line, changes):
  found = [mutant.key[2] for mutant in mutants.mutants('a.py', line)]
  assert sorted(found) == sorted(changes)


@pytest.mark.parametrize(
  'killers, listed, good',
  [
    ('x' * 19 + ' ', [19], True),
    ('x' * 20, [], True),
    ('x' * 19 + ' ', [], False),  # a survivor without a reason
    ('x' * 20, [19], False),  # a reason without a survivor
    ('x' * 17 + ' ' * 3, [17, 18, 19], False),  # 85 %
  ],
)
def test_the_verdict(killers, listed, good, monkeypatch):
  monkeypatch.setattr(
    mutants,
    'EQUIVALENT',
    {('losses/a.py:f', 'b', n): 'c' for n in listed}
    | {('learner/step.py:f', 'b', 'c'): 'of the sample, not of this run'},
  )
  results = [
    mutants.Result(
      'a.py', 1, ('losses/a.py:f', 'b', place), killer.strip(), 0.1
    )
    for place, killer in enumerate(killers)
  ]
  assert mutants.report(results)[1] == good


@pytest.mark.mutants
def test_the_tests_kill_the_mutants(request):
  asked = 'mutants' in request.config.option.markexpr
  if not asked and os.environ.get('GRPO_JAX_MUTANTS') != '1':
    pytest.skip('takes minutes; ask with -m mutants or GRPO_JAX_MUTANTS=1')
  run('--workers', '2')


@pytest.mark.mutants
def test_the_tests_kill_a_sample_of_the_other_mutants():
  state = os.environ.get('GRPO_JAX_MUTANTS_STATE')
  if not state:
    pytest.skip('takes hours; ask with GRPO_JAX_MUTANTS_STATE=FILE')
  run('--state', os.path.abspath(state))


def run(*options):
  done = subprocess.run(
    [sys.executable, '-m', 'tests.mutants', *options],
    cwd=mutants.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr[-2000:]
