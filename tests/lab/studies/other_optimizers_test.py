"""Optimizers past the clip, on policies of which all is known.

On a policy with a parameter for every token a clipped token has no gradient at
all, so what is measured must be what a coast predicts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.lab.studies.papers import other_optimizers as study
from grpo_jax.lab.studies.papers import transformer

SHAPE = 2, 4, 3
COUNT = int(np.prod(SHAPE))


def policy(score, size):
  """A policy that has drawn `MEMORY` + 1 rollouts with random rewards."""
  number = study.MEMORY + 1
  random = np.random.default_rng(0)
  return transformer.Rollouts(
    params=jnp.asarray(random.normal(size=size), jnp.float32),
    score=score,
    unflatten=lambda vector: {'all': vector},
    model=None,  # what Muon and Adafactor would ask
    layout=np.zeros((number, 1)),
    tokens=np.zeros((number, *SHAPE), int),
    mask=np.ones((number, *SHAPE), bool),
    reward=random.integers(0, 9, (number, *SHAPE[:2])).astype(np.float32),
  )


@functools.cache
def apart():
  """Every token has a parameter, the logit of its probability."""
  given = policy(
    lambda vector, layout: jax.nn.log_sigmoid(vector).reshape(SHAPE), COUNT
  )
  return given, study._tools(given)


@functools.cache
def steps_of(name):
  return study._steps(apart()[0], study.OPTIMIZERS[name].make)


@functools.cache
def begun(name):
  """What the study has of an optimizer before the last rollout's updates."""
  given, tools = apart()
  run = steps_of(name)
  *before, last = [study._rollout(given, tools, k) for k in range(21)]
  gradients = jnp.stack(
    [tools.pull(given.params, one.layout, one.pull) for one in before]
  )
  own = tools.pull(given.params, last.layout, last.pull)
  rate = study._matched(given, tools, run, 1e-3, gradients, own, last)
  start = study._remember(given, run, rate, gradients)
  return run, rate, start, last, own


@functools.cache
def followed(name):
  run, rate, start, last, _ = begun(name)
  tools = apart()[1]
  if name == 'lion':
    # Memory of other rollouts would lead tokens back in, to gradients.
    start = start[0], run.init(rate, start[0])
  slope = study._clipped(tools, last)
  return study._follow(tools, run, rate, start, last, slope)


@pytest.mark.parametrize('name', ['adamw', 'momentum', 'lion', 'rmsprop'])
def test_tokens_with_parameters_of_their_own_move_as_a_coast_predicts(name):
  run, rate, _, last, _ = begun(name)
  tools, path = apart()[1], followed(name)
  found = study._past_the_clip(tools, run, rate, path, last)
  assert found['fresh'] == pytest.approx(0, abs=1e-6)
  assert found['last'] > 0 and 0 < found['clipped'] < 1
  left = study.COASTED.index(5) + 1
  np.testing.assert_allclose(found['coast'][:left], found['real'], rtol=1e-3)
  if name in study.STILL:
    assert not np.any(found['coast']) and found['carried'] == 0
    assert not np.any(found['steps'])
  else:
    assert found['carried'] > 0.01
    assert np.all(np.diff(found['coast']) > 0)
  if name in ('adamw', 'momentum'):
    law = study._laws()[name]
    np.testing.assert_allclose(found['steps'], law, rtol=2e-3)


def test_the_first_update_moves_tokens_as_far_as_any():
  for name in ('momentum', 'lion', 'schedule_free_adam'):
    run, rate, (vector, state), last, own = begun(name)
    tools = apart()[1]
    update = run.step(rate, own, state, vector)[2]
    ends = [
      tools.score(vector + sign * update, last.layout) for sign in (1, -1)
    ]
    change = (ends[0] - ends[1]) / 2
    assert np.abs(change).mean() == pytest.approx(study._TARGET, rel=1e-3)


@pytest.mark.parametrize('name', ['adamw', 'lion', 'schedule_free_adam'])
def test_all_optimizers_begin_at_the_policy_that_has_sampled(name):
  _, _, (vector, state), last, _ = begun(name)
  given, tools = apart()
  np.testing.assert_array_equal(vector, given.params)
  # To which the KL and the ratios are.
  path = followed(name)
  np.testing.assert_array_equal(
    path.logp[0], tools.score(given.params, last.layout)
  )
  moments = state.base_optimizer_state if name[0] == 's' else state
  assert any(np.any(x) for x in jax.tree.leaves(moments))


def test_memories_of_schedule_free_lie_as_in_training():
  """On gradients of the first parameters, which do not know where they are."""
  given, tools = apart()
  run, rate, (vector, state), *_ = begun('schedule_free_adam')
  params, moved = given.params, run.init(rate, given.params)
  for k in range(study.MEMORY):
    one = study._rollout(given, tools, k)
    gradient = tools.pull(given.params, one.layout, one.pull)
    params, moved, _ = run.step(rate, gradient, moved, params)
  assert np.abs(params - given.params).max() > 0.01
  np.testing.assert_allclose(
    state.z['all'] - vector, moved.z['all'] - params, atol=1e-5
  )
  assert np.abs(state.z['all'] - vector).max() > 0.01


def test_steps_of_schedule_free_are_compared_with_the_way_to_z():
  name = 'schedule_free_adam'
  run, rate, _, last, _ = begun(name)
  path = followed(name)
  found = study._past_the_clip(apart()[1], run, rate, path, last)
  vector, state = path.points[study.LIVE]
  length = np.linalg.norm(np.asarray(state.z['all'] - vector))
  way = length / path.lengths[study.LIVE - 1]
  assert found['way'] == pytest.approx(float(way), rel=1e-5)
  numbers = {
    'optimizers': {
      'adamw': [{'steps': study._laws()['adamw']}],
      'momentum': [{'steps': study._laws()['momentum']}],
      'schedule_free_sgd': [found],
      'schedule_free_adam': [found],
    }
  }
  assert study._errors(numbers)[name] < 1e-3
  # Steps of the right form that lead elsewhere.
  numbers['optimizers'][name] = [found | {'way': 2 * found['way']}]
  assert study._errors(numbers)[name] == pytest.approx(0.5, rel=0.01)


def test_a_loss_without_rewards_leads_where_a_coast_does():
  run, rate, _, last, _ = begun('adamw')
  tools, path = apart()[1], followed('adamw')
  assert study._off(tools, run, rate, path, last) < 1e-5
  # Not if the gradient is another one.
  gone = tools._replace(pull=lambda *given: tools.pull(*given) + 1e-3)
  assert study._off(gone, run, rate, path, last) > 0.1


@pytest.mark.parametrize('name', ['momentum', 'lion'])
def test_clips_that_know_of_memory_stop_momentum_and_not_lion(name):
  """All memory is of this rollout, as the formula takes it to be.

  Lion steps on by the sign of its momentum, which no clip takes away.
  """
  run, rate, _, last, _ = begun(name)
  given, tools = apart()
  start = given.params, run.init(rate, given.params)
  follow = functools.partial(study._follow, tools, run, rate / 2, start, last)
  betas = study.OPTIMIZERS[name].betas
  foreseen = functools.partial(study._foreseen, tools, run, rate / 2, last)
  plain, narrowed, foreseen = (
    study._ends(follow(slope), last)
    for slope in (
      study._clipped(tools, last),
      study._clipped(tools, last, betas),
      foreseen,
    )
  )
  assert plain['outside'][-1] > 0
  if name == 'momentum':
    # Less far, but past the bound too: one takes steps to be equal where they
    # grow, the other ends a gradient after the update that leads outside.
    assert narrowed['kl'][-1] < 0.8 * plain['kl'][-1]
    assert foreseen['kl'][-1] < 0.8 * plain['kl'][-1]
  else:
    assert narrowed == foreseen == plain


def test_what_a_coast_sees_outside_has_no_gradient():
  run, rate, start, last, _ = begun('momentum')
  tools = apart()[1]
  old = tools.score(start[0], last.layout)
  c = study._foreseen(tools, run, rate, last, 0, start, old, old)
  vector, state = start
  for _ in range(study.UPDATES):
    vector, state, _ = run.coast(rate, state, vector)
  d = np.asarray(tools.score(vector, last.layout) - old)
  pushed = np.sign(last.pull)
  gone = (pushed * d > 0) & ((d > np.log(1.2)) | (d < np.log(0.8)))
  assert gone.any() and not gone.all()
  np.testing.assert_array_equal(np.asarray(c) != 0, ~gone & (pushed != 0))
  np.testing.assert_allclose(np.asarray(c)[~gone], last.pull[~gone], rtol=1e-6)


def test_ends_by_hand():
  mask = np.array([[[True, True, False]]])
  last = study._Rollout(
    None, mask, np.ones((1, 1)), np.array([[[0.5, -0.25, 0.0]]])
  )
  logp = np.log([[[[1.0, 1.0, 1.0]]], [[[1.5, 0.9, 9.0]]]])
  found = study._ends(study._Path([], logp - 1, []), last)
  assert found['outside'] == [0, 0.5]
  kl = (0.5 - np.log(1.5) + -0.1 - np.log(0.9)) / 2
  assert found['kl'] == pytest.approx([0, kl])
  assert found['gain'] == pytest.approx([0, 0.25 + 0.025])


def test_a_token_is_clipped_where_it_is_pushed_to():
  pull = np.array([[[1.0, 1.0, 1.0, -1.0, -1.0, 0.0]]])
  d = np.log([[[1.21, 1.19, 0.5, 0.79, 1.5, 2.0]]])
  last = study._Rollout(None, pull != 0, np.ones((1, 1)), pull)
  assert study._is_clipped(d, last).tolist() == [[[1, 0, 0, 1, 0, 0]]]


def test_a_gain_is_read_between_the_ends_of_paths():
  paths = [
    {'kl': [0.0, 9.0, 0.04], 'gain': [0.0, 9.0, 1.0]},
    {'kl': [0.0, 9.0, 0.16], 'gain': [0.0, 9.0, 1.6]},
  ]
  assert study._gain_at(0.09, paths) == pytest.approx(1.3)
  assert study._gain_at(0.01, paths) == pytest.approx(0.5)
  assert np.isnan(study._gain_at(0.2, paths))


def test_steps_of_schedule_free_add_up_to_its_way():
  law = study._laws()['schedule_free_sgd']
  live, n = study.MEMORY + study.LIVE, study.COASTED[-1]
  assert law.sum() == pytest.approx(n / (live + n))


def test_gains_are_compared_with_a_lower_rate_at_an_equal_kl():
  plain = {'outside': [0.4], 'kl': [0.0, 0.1, 0.2], 'gain': [0.0, 1.0, 1.2]}
  lower = {'outside': [0.2], 'kl': [0.0, 0.01, 0.05], 'gain': [0.0, 0.3, 0.8]}
  new = {'outside': [0.1], 'kl': [0.0, 0.05], 'gain': [0.0, 1.0]}
  arms = {'plain': [plain], 'narrowed': [new], 'lower': [[lower]]}
  numbers = {'clips': {'lion': {clip: 2 * arms[clip] for clip in arms}}}
  outside, gain = study._compared(numbers, 'narrowed')
  assert outside[0].mean == pytest.approx(0.25)
  assert gain[0].mean == pytest.approx(1.25)
  # Farther than any of them: nothing is known of all four.
  new['kl'][-1] = 0.3
  assert np.isnan(study._compared(numbers, 'narrowed')[1][0].mean)


@pytest.mark.parametrize(
  ('lengths', 'farthest'),
  [((1.0, 1.3, 0.8), 1.3), ((1.0, 1.1, 0.7), 0.7), ((1.0, 1.0, 1.0), 1.0)],
)
def test_lengths_that_grow_are_not_constant_either(lengths, farthest):
  numbers = {
    'lion': [{'steps': [2.0, 2 * lengths[0]]}],
    'muon': [{'steps': [1.0, x]} for x in lengths[1:]],
  }
  assert study._farthest_from_one(numbers) == pytest.approx(farthest)


def test_ways_are_of_tokens_that_an_update_has_just_clipped():
  run, rate, _, last, _ = begun('momentum')
  tools, path = apart()[1], followed('momentum')
  # Two tokens are far outside from the first update on; one is new.
  old = study._is_clipped(path.logp[study.LIVE - 1] - path.logp[0], last)
  just = study._is_clipped(path.logp[study.LIVE] - path.logp[0], last) & ~old
  far = np.argwhere(~just & (last.pull > 0))[:2]
  logp = path.logp.copy()
  for place in far:
    logp[1:, *place] = logp[0, *place] + 1
  found = study._past_the_clip(tools, run, rate, path._replace(logp=logp), last)
  moved = (logp[study.LIVE] - logp[study.LIVE - 1])[just]
  assert found['last'] == pytest.approx(np.abs(moved).mean(), rel=1e-5)
