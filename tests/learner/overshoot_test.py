"""Overshoot: measured, split and predicted as by hand, on the bigram model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import overshoot
from grpo_jax.learner import programs
from grpo_jax.learner import step_metrics
from grpo_jax.learner import trust_region
from grpo_jax.models import layout
from tests import bigram
from tests import tiny
from tests.learning import credited
from tests.learning import learned
from tests.learning import make_updater
from tests.learning import spec

METHOD = functools.partial(losses.methods.grpo, kl_coefficient=0.0)
LR, STEPS = 0.02, 3


def make_learner(method=None, brake=None, **changes):
  optimizer = optax.adam(LR, 0.9, 0.95)
  optimizer = brake(optimizer) if brake else optimizer
  return bigram.changed(
    bigram.make_learner(method or METHOD()),
    transform=optim.record_adam_moments(optimizer),
    records=True,
    score_forward=bigram.score,
    coast_steps=STEPS,
    **changes,
  )


def updater(learner):
  return make_updater(learner, bigram.params(), spec('shared', 2))


@functools.cache
def plain():
  """What most tests call."""
  return updater(make_learner())


def make(epochs=3, watch_steps=1, made=None):
  """An updater, and its state."""
  made = made or plain()
  spec = dataclasses.replace(
    made.spec, epochs=epochs, watch_steps=watch_steps
  )  # no part of a program
  made = dataclasses.replace(made, spec=spec)
  return made, made.compiled.init(copied())


def copied():
  return jax.tree.map(jnp.copy, bigram.params())


@functools.cache
def rows():
  rollout = bigram.rollout()
  return layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 16
  )


def logp(params):
  return tiny.gather(_logp(params, rows()), rows(), bigram.rollout().length)


@jax.jit
def _logp(params, rows):
  return bigram.score(params, rows, models.LOGP).logp


def two_steps(made, watch=True):
  """States around the second of two steps, its metrics, and the batch.

  On a rollout that says what its old policy was, so that tokens are clipped.
  """
  rollout = bigram.rollout()
  state = made.compiled.init(copied())
  ready = credited(made, state, rollout)
  batch = ready.batch
  state = state._replace(loss_state=ready.loss_state)
  (chosen,), start = ready.layouts.first_epoch(), jnp.copy(state.step)
  stack, used = ready.layouts.stack(chosen)
  for _ in range(2):
    before = jax.tree.map(jnp.copy, state)
    state, measured = made.compiled.step(
      None, state, batch, chosen, stack, used, start, start, watch
    )
  method = made.compiled.learner.method
  batch = losses.prepare(method, batch, before.loss_state)
  return before, state, metrics.to_scalars(measured), batch


@functools.cache
def stepped():
  return two_steps(plain())


def clipped(params, batch):
  """The outward direction of the tokens without gradient, by their ratio."""
  ratio = np.exp(logp(params) - batch.logp_old)
  up = (ratio > 1.2) & (batch.advantage > 0)
  down = (ratio < 0.8) & (batch.advantage < 0)
  return np.where(batch.keep, up * 1.0 - down, 0)


def test_the_rollout_is_off_policy():
  """Else nothing here would be clipped."""
  before, _, measured, batch = stepped()
  direction = clipped(before.params, batch)
  assert np.sum(direction > 0) > 3 and np.sum(direction < 0) > 3
  share = measured['clipped_high'] + measured['clipped_low']
  assert share == pytest.approx(np.sum(direction != 0) / np.sum(batch.keep))


@pytest.mark.quick
def test_motion_is_what_scoring_again_says():
  before, after, measured, batch = stepped()
  direction = clipped(before.params, batch)
  motion = direction * (logp(after.params) - logp(before.params))
  motion = np.asarray(motion)[direction != 0]
  assert measured['overshoot'] == pytest.approx(motion.mean(), rel=1e-3)
  assert measured['overshoot_positive'] == pytest.approx(
    np.maximum(motion, 0).mean(), rel=1e-3
  )
  left = clipped(after.params, batch)
  assert measured['ends_clipped'] == pytest.approx(
    np.sum(left != 0) / np.sum(batch.keep)
  )
  ratio = np.exp(logp(after.params) - batch.logp_old)
  outside = np.asarray(batch.keep & (batch.advantage != 0))
  outside = outside & np.asarray((ratio > 1.2) | (ratio < 0.8))
  assert measured['ends_outside'] == pytest.approx(
    np.sum(outside) / np.sum(batch.keep)
  )


def along(tangent, before, batch):
  """Outward motion along a tangent, by central differences in float64."""
  direction, h = clipped(before.params, batch), 1e-2
  moved = [
    logp(jax.tree.map(lambda p, t: p + s * h * t, before.params, tangent))  # noqa: B023
    for s in (1, -1)
  ]
  slope = direction * (moved[0] - moved[1]) / (2 * h)
  return float(np.mean(slope[direction != 0]))


def test_carried_and_fresh_are_the_parts_of_the_step():
  before, after, measured, batch = stepped()
  (old, *_), (new, *_) = (x.opt_state.inner_state for x in (before, after))
  size = lambda v: -LR / (jnp.sqrt(v / (1 - 0.95**2)) + 1e-8) / (1 - 0.9**2)
  carried = jax.tree.map(lambda m, v: size(v) * 0.9 * m, old.mu, new.nu)
  update = jax.tree.map(jnp.subtract, after.params, before.params)
  fresh = jax.tree.map(jnp.subtract, update, carried)
  for name, tangent in (('carried', carried), ('fresh', fresh)):
    expected = along(tangent, before, batch)
    assert measured[f'overshoot_{name}'] == pytest.approx(
      expected, rel=2e-2, abs=1e-4
    )
  total = measured['overshoot_carried'] + measured['overshoot_fresh']
  assert total == pytest.approx(measured['overshoot'], rel=0.2)
  norm = float(optax.tree.norm(carried))
  assert measured['adam_carried_norm'] == pytest.approx(norm, rel=1e-3)


def test_the_prediction_is_along_the_coasting_path():
  before, _, measured, batch = stepped()
  adam = optax.adam(LR, 0.9, 0.95)
  coasted = optim.coast(
    adam, before.opt_state.inner_state, before.params, STEPS
  )
  expected = along(coasted.moved, before, batch)
  assert abs(expected) > 1e-3
  assert measured['overshoot_predicted'] == pytest.approx(expected, rel=2e-2)


@pytest.mark.long
def test_the_end_of_a_rollout_is_scored_again():
  made, state = make()
  rollout = bigram.rollout()
  state, measured = learned(made, state, rollout, 0)
  found = metrics.to_scalars(measured)
  method = made.compiled.learner.method
  batch, _ = losses.credit(method, rollout.batch, method.init())
  old = logp(bigram.params())  # scored before the first update
  gap = np.asarray(logp(state.params) - old)
  kept = np.asarray(batch.keep)
  kl = np.mean(np.asarray(np.expm1(gap) - gap)[kept])
  assert found['kl_rollout'] == pytest.approx(kl, rel=1e-3)
  ratio = np.exp(gap)
  outside = kept & np.asarray(batch.advantage != 0)
  outside = outside & np.asarray((ratio > 1.2) | (ratio < 0.8))
  assert found['rollout_outside'] == pytest.approx(outside.sum() / kept.sum())
  assert 0 < found['rollout_clipped'] <= found['rollout_outside']


@pytest.mark.parametrize(
  'name', ['grpo', pytest.param('clip_cov', marks=pytest.mark.long)]
)
def test_the_outward_gradient_is_that_of_the_clipped_tokens(name):
  """Summed over micro-batches, for methods of either scope."""
  heard = []

  def listening(inner):
    def update_fn(grads, state, params=None, *, outward, **extra):
      jax.debug.callback(heard.append, outward)
      return inner.update(grads, state, params, **extra)

    inner = optax.with_extra_args_support(inner)
    return optax.GradientTransformationExtraArgs(inner.init, update_fn)

  method = METHOD() if name == 'grpo' else losses.methods.clip_cov(share=0.3)
  assert method.scope == ('row' if name == 'grpo' else 'batch')
  learner = make_learner(method, listening, with_outward=True)
  # Watched once, because the split of an update calls the optimizer too.
  before, _, _, batch = two_steps(updater(learner), watch=name == 'grpo')
  jax.effects_barrier()
  _, terms = losses.surrogate_loss(
    method, logp(before.params), batch, before.loss_state
  )
  direction = np.zeros(batch.mask.shape)
  for mark in ('clipped_high', 'clipped_low', 'detached'):
    if mark in terms.metrics:
      marked = terms.metrics[mark] & batch.keep
      direction = np.where(marked, np.sign(terms.log_ratio), direction)
  assert np.sum(direction > 0) > 2 and np.sum(direction < 0) > 2
  expected = jax.grad(lambda p: jnp.sum(direction * logp(p)))(before.params)
  heard = [x for x in heard if _near(x, expected)]
  assert heard  # of the second step


@pytest.mark.parametrize('direction', [(1, -1), (1, 1), (1, 0), (0, 0)])
def test_the_outward_gradient_of_all_some_or_no_tokens(
  direction,
):
  scores = models.Scores(jnp.zeros(2), jnp.zeros(2))
  found = gradient._outward(
    lambda slopes: (3 * slopes.logp + 5 * slopes.entropy,),
    scores,
    jnp.array(direction, jnp.float32),
    jnp.zeros(2),
  )
  np.testing.assert_array_equal(found, 3 * np.array(direction))


def _near(x, expected):
  try:
    tiny.assert_trees_close(x, expected, 1e-5)
  except AssertionError:
    return False
  return True


def test_overshoot_is_measured_every_n_rollouts():
  made, state = make(epochs=2, watch_steps=2)
  rollout = bigram.rollout()
  names = []
  for step in range(3):
    state, measured = learned(made, state, rollout, step)
    names.append({'overshoot', 'kl_rollout'} & set(measured))
    assert 'adam_carried_norm' in measured
  assert names[0] == names[2] == {'overshoot', 'kl_rollout'} and not names[1]
  never, state = make(epochs=1, watch_steps=0)
  assert not {'overshoot', 'kl_rollout'} & set(
    learned(never, state, rollout, 0)[1]
  )


@pytest.mark.long
def test_the_difference_of_the_parameters_is_kept_where_it_is_read(monkeypatch):
  kept = []

  def of_update(learner, state, found, update, *rest):
    kept.append(update.updates is not None)
    return whole(learner, state, found, update, *rest)

  whole = step_metrics.metrics_of_update
  monkeypatch.setattr(step_metrics, 'metrics_of_update', of_update)
  made, state = make(1, 2, updater(make_learner()))
  for step in range(2):
    programs.lowerings(made, made.layout, bigram.rollout(), step)[
      'train_step'
    ]()
  assert kept == [True, False]


@pytest.mark.parametrize('epochs', [pytest.param(1, marks=pytest.mark.long), 2])
def test_measuring_changes_no_parameter(epochs):
  """With one update the ratio stays exactly 1, whoever watches."""
  results, rollout = [], bigram.rollout()
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  for watch in (0, 1):
    made, state = make(epochs=epochs, watch_steps=watch)
    state, measured = learned(made, state, rollout, 0)
    results.append(state.params)
    found = metrics.to_scalars(measured)
    assert epochs > 1 or found['ratio_max'] == found['ratio_min'] == 1
  assert found['kl_rollout'] > 0
  tiny.assert_trees_close(*results, 1e-6)


def terms_of(method):
  """Terms of the off-policy rollout, and its batch."""
  batch = losses.check_batch(bigram.rollout().batch)
  batch, state = losses.credit(method, batch, method.init())
  batch = losses.prepare(method, batch, state)
  _, terms = losses.surrogate_loss(method, logp(bigram.params()), batch, state)
  return terms, batch


def test_outward_is_away_from_the_range_that_was_left():
  """GMPO clips tokens and then pools: the pooled ratio says nothing of them."""
  terms, batch = terms_of(losses.methods.gmpo(0.2, 0.2))
  own = np.asarray(logp(bigram.params()) - batch.logp_old)
  direction = np.asarray(trust_region.outward(terms, batch))
  assert np.sum(direction > 0) > 3 and np.sum(direction < 0) > 3
  np.testing.assert_array_equal(
    direction[direction != 0], np.sign(own)[direction != 0]
  )
  # A completion is masked for what it has lost.
  terms, batch = terms_of(
    losses.methods.deepseek_v3_2(threshold=0.05, kl_coefficient=0.0)
  )
  masked = np.asarray(terms.metrics['off_policy'] & batch.keep)
  high = np.asarray(terms.metrics['clipped_high'])
  direction = np.asarray(trust_region.outward(terms, batch))
  assert masked.sum() > 3
  assert set(direction[masked & ~high]) == {-1.0}


def test_a_token_with_two_marks_is_clipped_once():
  heard = []

  def listening(inner):
    def update_fn(grads, state, params=None, *, clipped_share, **extra):
      jax.debug.callback(lambda x: heard.append(float(x)), clipped_share)
      return inner.update(grads, state, params, **extra)

    inner = optax.with_extra_args_support(inner)
    return optax.GradientTransformationExtraArgs(inner.init, update_fn)

  method = losses.methods.deepseek_v3_2(threshold=0.05, kl_coefficient=0.0)
  two_steps(updater(make_learner(method, listening)), watch=False)
  jax.effects_barrier()
  terms, batch = terms_of(method)
  marks = [
    np.asarray(terms.metrics[name] & batch.keep)
    for name in ('clipped_high', 'clipped_low', 'off_policy')
  ]
  union, kept = np.any(marks, axis=0).sum(), np.asarray(batch.keep).sum()
  assert np.sum(marks) > union  # some have two
  assert min(abs(np.array(heard) - union / kept)) < 1e-6
  assert max(heard) <= 1


def test_an_update_that_is_not_taken_has_no_motion():
  """No overshoot, nothing at its end, and no moments of Adam."""
  made, state = make(epochs=1)
  rollout, found = bigram.rollout(), []
  batch = rollout.batch
  idle = batch._replace(reward=np.full_like(batch.reward, 0.5))
  broken = batch._replace(logp_old=np.full_like(batch.logp_old, np.nan))
  for step, drawn in enumerate((batch, idle, broken)):
    state, measured = learned(made, state, rollout._replace(batch=drawn), step)
    assert state.step == 1
    names = metrics.to_scalars(measured)
    kinds = ('adam_', 'overshoot', 'ends_')
    found.append([name for name in names if name.startswith(kinds)])
  assert len(found[0]) > 8 and not found[1] and not found[2]


def test_the_end_of_an_update_has_the_range_of_the_first():
  """Else the shares of a rollout's updates could not be compared."""
  method = losses.contrib.coasting_grpo(updates=4, b1=0.9, b2=0.95)
  scores, ends, outside = models.Scores(logp(bigram.params()), None), [], []
  for done in (0, 3):
    given = losses.check_batch(bigram.rollout().batch)
    number = np.full(given.mask.shape, done, np.float32)
    given = given._replace(extras={**given.extras, 'updates_done': number})
    batch, state = losses.credit(method, given, method.init())
    batch = losses.prepare(method, batch, state)
    measured = overshoot.ends(make_learner(method), scores, batch, state)
    ends.append(metrics.to_scalars(measured))
    _, terms = losses.surrogate_loss(method, scores.logp, batch, state)
    outside.append(np.sum(trust_region.outside(terms) & batch.keep))
  assert ends[0] == ends[1] and outside[0] != outside[1]


def test_a_token_that_is_not_trained_has_no_direction():
  terms, batch = terms_of(METHOD())
  everywhere = np.ones(batch.mask.shape, bool)
  terms = terms._replace(metrics={'clipped_low': everywhere})
  keep = np.asarray(batch.keep) & (np.arange(bigram.TOKENS) % 2 == 0)
  direction = trust_region.outward(terms, batch._replace(keep=keep))
  np.testing.assert_array_equal(direction, np.where(keep, -1.0, 0.0))


@pytest.mark.long
def test_the_updates_of_a_rollout_are_numbered():
  seen = []

  def objective(terms, batch):
    jax.debug.callback(
      lambda x: seen.append(float(np.max(x))), batch.extras['updates_done']
    )
    return terms.log_ratio * batch.advantage

  method = losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_tokens(),
    losses.set_objective(objective, requires=('updates_done',)),
  )
  made, state = make(3, 0, updater(make_learner(method)))
  state, _ = learned(made, state, bigram.rollout(), 0)
  learned(made, state, bigram.rollout(), 1)
  jax.effects_barrier()
  assert sorted(set(seen)) == [0.0, 1.0, 2.0]
