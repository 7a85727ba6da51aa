"""Arguments that a method takes from its run."""

import functools
from functools import partial
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import contrib
from grpo_jax.losses import methods

FACTS = {
  'reward_weights': (2.0, -0.5),
  'updates_per_rollout': 6,
  'adam_b1': 0.8,
  'adam_b2': 0.95,
  'max_tokens': 40,
  'soft_tokens': 8,
  'right_reward': 0.5,
}


@losses.takes_from_run(share='adam_b1', steps='updates_per_rollout')
def own(share, low=0.2, steps=1):
  """A user's own method; `share` has no default."""
  return losses.chain(
    losses.center_by_group(),
    losses.on_advantage(lambda a, batch: share * a),
    losses.mean_over_sequence_sums(steps),
    losses.ppo_clip(low, low),
  )


@pytest.mark.parametrize(
  'make, given, expected',
  [
    (methods.gdpo, {}, {'weights': (2.0, -0.5)}),
    (methods.gdpo, {'low': 0.1}, {'weights': (2.0, -0.5), 'low': 0.1}),
    (methods.gdpo, {'weights': (1.0, 1.0)}, {'weights': (1.0, 1.0)}),
    (methods.gdpo, {'weights': None}, {'weights': None}),
    (contrib.coasting_grpo, {}, {'updates': 6, 'b1': 0.8, 'b2': 0.95}),
    (contrib.coasting_grpo, {'b2': 0.9}, {'updates': 6, 'b1': 0.8, 'b2': 0.9}),
    (methods.grpo, {'low': 0.1}, {'low': 0.1}),
    (methods.dr_grpo, {}, {'max_tokens': 40}),
    (methods.dr_grpo, {'max_tokens': 3000}, {'max_tokens': 3000}),
    (methods.dapo, {}, {'max_tokens': 40, 'soft_tokens': 8}),
    (methods.dapo, {'soft_tokens': 10}, {'max_tokens': 40, 'soft_tokens': 10}),
    # The ramp is a fifth of the limit, whoever gives that.
    (methods.dapo, {'max_tokens': 20}, {'max_tokens': 20, 'soft_tokens': 4}),
    (methods.dapo, {'max_tokens': 4}, {'max_tokens': 4, 'soft_tokens': 1}),
    (methods.dapo, {'max_tokens': 47}, {'max_tokens': 47, 'soft_tokens': 9}),
    (partial(methods.dapo, high=0.4), {}, {'max_tokens': 40, 'soft_tokens': 8}),
    (
      partial(partial(methods.dapo, max_tokens=10), 0.1),
      {},
      {'soft_tokens': 2},
    ),
    (partial(contrib.coasting_grpo, 0.1, 0.1, 3), {}, {'b1': 0.8, 'b2': 0.95}),
    (
      methods.dapo,
      {'max_tokens': np.int64(20)},
      {'max_tokens': 20, 'soft_tokens': 4},
    ),
    (methods.passk, {'k': 2}, {'k': 2, 'right_reward': 0.5}),
    (methods.passk, {'right_reward': 0.9}, {'right_reward': 0.9}),
    (own, {}, {'share': 0.8, 'steps': 6}),
    (own, {'steps': 2, 'low': 0.1}, {'share': 0.8, 'steps': 2, 'low': 0.1}),
  ],
)
def test_the_run_fills_in_and_the_user_wins(make, given, expected):
  before = dict(given)
  filled = losses.arguments_from_run(make, FACTS, given)
  assert filled == expected and given == before
  assert isinstance(make(**filled), losses.LossTransform)


def test_a_mark_changes_nothing_but_an_attribute():
  def make(b1=0.9):
    """What it does."""
    return b1

  before = inspect.signature(make), make.__doc__, make.__name__
  marked = losses.takes_from_run(b1='adam_b1')(make)
  assert marked is make and marked() == 0.9
  assert (inspect.signature(make), make.__doc__, make.__name__) == before
  assert marked.from_run == {'b1': 'adam_b1'}  # pyright: ignore
  assert functools.wraps(marked)(lambda **kwargs: 0).from_run == {
    'b1': 'adam_b1'
  }


def test_the_methods_that_take_from_a_run():
  """All others are as their arguments say, whatever the run."""
  marked = {
    name: make.from_run
    for package in (methods, contrib)
    for name in package.__all__
    if hasattr(make := getattr(package, name), 'from_run')
  }
  assert marked == {
    'gdpo': {'weights': 'reward_weights'},
    'passk': {'right_reward': 'right_reward'},
    'dr_grpo': {'max_tokens': 'max_tokens'},
    'dapo': {'soft_tokens': 'soft_tokens', 'max_tokens': 'max_tokens'},
    'coasting_grpo': {
      'updates': 'updates_per_rollout',
      'b1': 'adam_b1',
      'b2': 'adam_b2',
    },
  }


@pytest.mark.parametrize(
  'arguments, words',
  [
    (
      {'low': 'adam_beta1', 'high': 'adam_b1'},
      "own_method takes 'adam_beta1' from the run, which knows no such fact; "
      "take one of 'adam_b1', 'adam_b2', 'max_tokens', 'reward_weights', "
      "'right_reward', 'soft_tokens', 'updates_per_rollout'.",
    ),
    (
      {'lwo': 'adam_b1', 'high': 'adam_b1'},
      'own_method marks arguments that it does not have (got an unexpected '
      "keyword argument 'lwo'); mark some of 'low', 'high'.",
    ),
  ],
)
def test_a_wrong_mark_is_refused_when_it_is_applied(arguments, words):
  mark = losses.takes_from_run(**arguments)

  def own_method(low, high):
    return low, high

  own_method.__qualname__ = 'own_method'
  with pytest.raises(ValueError) as raised:
    mark(own_method)
  assert str(raised.value) == words


def test_a_fact_that_the_run_does_not_say_is_missed():
  some = {'adam_b1': 0.8, 'updates_per_rollout': 6}
  with pytest.raises(ValueError, match="takes 'adam_b2' from the run, but"):
    losses.arguments_from_run(contrib.coasting_grpo, some, {})
  given = losses.arguments_from_run(contrib.coasting_grpo, some, {'b2': 0.9})
  assert given == {'updates': 6, 'b1': 0.8, 'b2': 0.9}
  with pytest.raises(ValueError, match='of this run are none; add'):
    losses.arguments_from_run(methods.gdpo, {}, {})


@pytest.mark.parametrize(
  'given',
  [
    {'max_tokens': 50},
    {'max_tokens': 20480},
    {'max_tokens': 20480, 'soft_tokens': 4096},
    {'max_tokens': 41, 'soft_tokens': 1},
    {'max_tokens': np.int64(50)},
  ],
)
def test_a_penalty_that_no_completion_can_get_is_refused(given):
  with pytest.raises(ValueError, match='begin to act after .* at most 40'):
    losses.arguments_from_run(methods.dapo, FACTS, given)


def test_a_partial_function_with_another_argument_is_refused():
  with pytest.raises(ValueError, match="gives dapo.*not have: .*'hihg': 0.4"):
    losses.arguments_from_run(partial(methods.dapo, hihg=0.4), FACTS, {})


def test_a_run_of_eight_tokens_is_shaped_by_dapo():
  """Its default ramp begins at 16,384 tokens: never."""
  facts = {**FACTS, 'max_tokens': 8, 'soft_tokens': 1}
  method = methods.dapo(**losses.arguments_from_run(methods.dapo, facts, {}))
  # Lengths 8, 7, 6 and 2; the penalty of the first is 1, of the others 0.
  mask = np.arange(8) < np.array([[8, 7, 6, 2]])[..., None]
  reward = jnp.array([[1.0, 1.0, 0.0, 0.0]])
  batch, _ = losses.credit(
    method, losses.make_batch(mask, reward), method.init()
  )
  # By hand: (0, 1, 0, 0), less 1/4, over sqrt(3)/4.
  expected = (jnp.array([0.0, 1.0, 0.0, 0.0]) - 0.25) / (3**0.5 / 4)
  found = jnp.where(mask[0], batch.advantage[0], 0).sum(-1) / mask[0].sum(-1)
  assert jnp.allclose(found, expected, atol=1e-6)
