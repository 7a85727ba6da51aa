"""One token: filters, mass, greediness, and the distribution drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines import Sampling
from grpo_jax.engines.local import next_token as next_token_lib
from grpo_jax.engines.local.next_token import Choices
from grpo_jax.engines.local.next_token import Numbers
from grpo_jax.engines.local.next_token import choices_of
from grpo_jax.engines.local.next_token import numbers_of
from tests.drawing import mixed
from tests.drawing import next_token

pytestmark = pytest.mark.quick

PROBABILITY = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def draw(number=20_000, step=0, **options):
  logits = jnp.broadcast_to(jnp.log(PROBABILITY), (number, 5))
  uniform = jax.random.uniform(jax.random.key(0), (number,))
  sampling = Sampling(**options)
  return [
    np.asarray(x)
    for x in next_token(logits, uniform, jnp.full(number, step), sampling)
  ]


@pytest.mark.parametrize(
  'options, kept',
  [
    (dict(), [0, 1, 2, 3, 4]),
    (dict(top_k=2), [0, 1]),
    (dict(top_p=0.8), [0, 1, 2]),
    (dict(top_p=0.7), [0, 1]),
    (dict(min_p=0.3), [0, 1, 2]),
    (dict(top_k=4, top_p=0.8), [0, 1, 2]),
    (dict(top_p=1e-6), [0]),
    (dict(eos_ids=(1, 3), min_tokens=2), [0, 2, 4]),
  ],
)
def test_frequencies_are_those_of_the_kept_tokens(options, kept):
  token, logp, log_kept, _ = draw(**options)
  expected = np.zeros(5)
  expected[kept] = PROBABILITY[kept] / PROBABILITY[kept].sum()
  frequency = np.bincount(token, minlength=5) / len(token)
  np.testing.assert_array_equal(frequency[expected == 0], 0)
  np.testing.assert_allclose(frequency, expected, atol=0.015)
  np.testing.assert_allclose(logp, np.log(PROBABILITY)[token], atol=1e-6)
  np.testing.assert_allclose(
    log_kept, np.log(PROBABILITY[kept].sum()), atol=1e-6
  )


def test_the_token_that_reaches_top_p_is_the_last_one():
  logits = jnp.log(jnp.array([[4.0, 2.0, 1.0, 1.0]]))
  half = float(jax.nn.softmax(logits)[0, 0])
  assert half == 0.5
  for top_p, kept in ((half, 0.5), (half + 1e-6, 0.75)):
    *_, log_kept, _ = next_token(
      logits, jnp.zeros(1), jnp.zeros(1), Sampling(top_p=top_p)
    )
    np.testing.assert_allclose(log_kept, np.log(kept), atol=1e-6)


def test_end_tokens_return_after_min_tokens():
  token, _, log_kept, _ = draw(step=2, eos_ids=(1, 3), min_tokens=2)
  assert set(token) == set(range(5))
  np.testing.assert_allclose(log_kept, 0, atol=1e-6)


@pytest.mark.parametrize('temperature', [0.5, 2.0])
def test_temperature_defines_the_policy(temperature):
  token, logp, _, entropy = draw(temperature=temperature)
  policy = PROBABILITY ** (1 / temperature)
  policy /= policy.sum()
  frequency = np.bincount(token, minlength=5) / len(token)
  np.testing.assert_allclose(frequency, policy, atol=0.015)
  np.testing.assert_allclose(logp, np.log(policy)[token], atol=1e-5)
  np.testing.assert_allclose(
    entropy, -np.sum(policy * np.log(policy)), atol=1e-5
  )


@pytest.mark.parametrize(
  'options',
  [dict(top_k=2, min_p=0.3), dict(temperature=0.0), dict(eos_ids=(0,))],
)
def test_the_entropy_is_of_the_policy_before_filters(options):
  entropy = draw(number=3, **options)[3]
  expected = -np.sum(PROBABILITY * np.log(PROBABILITY))
  np.testing.assert_allclose(entropy, expected, atol=1e-6)


def test_greedy_takes_the_likeliest_with_certainty():
  token, logp, log_kept, _ = draw(number=3, temperature=0.0)
  np.testing.assert_array_equal(token, 0)
  np.testing.assert_allclose(logp, np.log(0.4), atol=1e-6)
  np.testing.assert_allclose(logp - log_kept, 0, atol=1e-6)


def test_the_ends_of_the_noise_are_safe():
  logits = jnp.log(jnp.array([[0.0, 0.5, 0.5, 0.0]] * 2))
  uniform = jnp.array([0.0, 1 - 2**-24])
  token, _, _, entropy = next_token(
    logits, uniform, jnp.zeros(2, int), Sampling()
  )
  np.testing.assert_array_equal(token, [1, 2])
  np.testing.assert_allclose(entropy, np.log(2), atol=1e-6)  # 0 log 0 is 0


def test_at_the_end_of_the_noise_rounding_draws_nothing_without_mass():
  """On a CPU, in one row of six, all running sums stay below the threshold."""
  logits = np.log(np.random.default_rng(0).random((200, 3000)))
  logits[:, 1500:] = -np.inf
  token, *_ = next_token(
    jnp.asarray(logits, jnp.float32),
    jnp.full(200, 1 - 2**-24),
    jnp.zeros(200, int),
    Sampling(),
  )
  assert np.all(np.isfinite(logits[np.arange(200), token]))


def test_past_the_end_of_the_noise_each_row_has_its_own_last_token():
  """Noise of 1 stands for a threshold that rounding has put at the end."""
  mass = jnp.array([[1.0, 2, 0, 4, 0, 0], [3, 0, 0, 0, 0, 0], [1] * 6])
  token, logit = next_token_lib.at_random(mass, 2 * mass, jnp.ones(3), None)
  np.testing.assert_array_equal(token, [3, 0, 5])
  np.testing.assert_array_equal(logit, [8, 6, 2])


@pytest.mark.parametrize('vocab', [1, 7, 128, 129, 3000])
def test_blocks_give_the_token_of_one_running_sum(vocab):
  """At noise far enough from the edges; tokens without mass are never drawn."""
  rng = np.random.default_rng(vocab)
  logits = 3 * rng.standard_normal((4, vocab))
  logits[:, rng.random(vocab) < 0.4] = -np.inf
  logits[:, -1] = 0
  mass = np.exp(logits)
  total = np.cumsum(mass, axis=-1) / mass.sum(-1, keepdims=True)
  drawn = []
  for uniform in np.linspace(0, 1, 101, endpoint=False):
    token, *_ = next_token(
      jnp.asarray(logits, jnp.float32),
      jnp.full(4, uniform),
      jnp.zeros(4, int),
      Sampling(),
    )
    wanted = np.argmax(total > uniform, axis=-1)
    clear = np.min(np.abs(total - uniform), axis=-1) > 1e-6
    np.testing.assert_array_equal(token[clear], wanted[clear])
    assert np.all(np.isfinite(logits[np.arange(4), token]))
    drawn.append(token)
  assert len(np.unique(drawn)) > min(vocab // 4, 30)


@pytest.mark.parametrize(
  'options',
  [
    dict(temperature=-1.0),
    dict(temperature=1e-30),
    dict(temperature=float('inf')),
    dict(temperature=float('nan')),
    dict(top_k=-1),
    dict(top_p=0.0),
    dict(min_p=1.5),
    dict(min_tokens=-1),
  ],
)
def test_impossible_options_are_refused(options):
  name = next(iter(options))
  with pytest.raises(ValueError, match=f'{name}='):
    Sampling(**options)


@pytest.mark.parametrize('limit, name', [(0, 'max_tokens'), (9, 'min_tokens')])
def test_a_limit_below_which_nothing_can_end_is_refused(limit, name):
  with pytest.raises(ValueError, match=f'{name}='):
    engines.check_limit(limit, Sampling(min_tokens=9))


ROWS = {
  'plain': Sampling(),
  'warm': Sampling(temperature=0.7),
  'greedy': Sampling(temperature=0.0),
  'top_k': Sampling(top_k=2),
  'largest top_k': Sampling(top_k=4),
  'top_p': Sampling(top_p=0.8, temperature=2.0),
  'min_p': Sampling(min_p=0.3),
  'top_k of all': Sampling(top_k=5),
  'several': Sampling(top_k=3, top_p=0.9, min_p=0.1),
}


def test_rows_that_are_drawn_differently_share_a_program():
  """Each gets what it gets among rows that are drawn as it is."""
  number = len(ROWS)
  logits = jnp.broadcast_to(jnp.log(PROBABILITY), (number, 5))
  for uniform in (0.05, 0.45, 0.75, 0.999):
    given = logits, jnp.full(number, uniform), jnp.zeros(number, int)
    samplings = [*ROWS.values()]
    numbers = numbers_of(samplings, [1] * number, 5)
    found = mixed(*given, numbers, choices_of(samplings, 5))
    for row, (name, sampling) in enumerate(ROWS.items()):
      alone = next_token(*given, sampling)
      for x, y in zip(found, alone, strict=True):
        np.testing.assert_allclose(x[row], y[row], atol=1e-6, err_msg=name)


def test_a_program_has_the_filters_of_its_rows_alone():
  """And the numbers of filters are data, which compile nothing."""
  assert choices_of([Sampling()], 5) == Choices()
  assert choices_of([Sampling(top_k=5)], 5) == Choices()
  warm = [Sampling(temperature=t) for t in (0.7, 1.3)]
  assert choices_of(warm[:1], 5) == choices_of(warm[1:], 5) == Choices()
  one, other = (Sampling(top_p=p, top_k=3, min_p=p / 9) for p in (0.5, 0.9))
  assert choices_of([one], 5) == choices_of([other], 5)
  numbers = numbers_of([Sampling()], [7], 5)
  assert jax.tree.map(list, numbers) == Numbers(limit=[7], scale=[1.0])
