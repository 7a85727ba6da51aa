"""Flat rows of TRL, verl and Tunix, in the arrays that these libraries have.

Each test has a library's own names, shapes, kinds of padding and group ids, and
that library's GRPO loss written down in NumPy. The loss of `batch_from_rows` is
compared with it in value, and in its slope by central differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

CLOSE = dict(rtol=1e-9, atol=1e-12)
PAD = 0
EOS = 2


def compare(loss, method, logp, **given):
  """A method on `batch_from_rows(**given)` against `loss(logp[B,S])`."""
  batch, rows = losses.batch_from_rows(**given)

  @jax.jit
  def run(batch, logp):
    batch, state = cases.prepared(method, batch)
    return jax.value_and_grad(
      lambda x: losses.surrogate_loss(method, rows.gather(x), batch, state)[0]
    )(logp)

  value, gradient = run(batch, logp)
  slope = np.zeros(logp.shape)
  for place in np.ndindex(logp.shape):
    step = np.zeros(logp.shape)
    step[place] = 1e-6
    slope[place] = (loss(logp + step) - loss(logp - step)) / 2e-6
  np.testing.assert_allclose(value, loss(logp), **CLOSE)
  np.testing.assert_allclose(gradient, slope, rtol=1e-7, atol=1e-9)
  assert np.any(slope)
  return batch


def clipped(logp, old, advantage):
  """-min(r A, clip(r) A), f[B,S]."""
  ratio = np.exp(logp - old)
  return -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)


def logps(mask, seed):
  """A model's log-probabilities and those of two others near it."""
  rng = np.random.default_rng(seed)
  logp = -rng.exponential(1.0, mask.shape)
  return logp, *(logp + 0.3 * rng.standard_normal((2, *mask.shape)))


@pytest.mark.parametrize('loss_type', ['dapo', 'grpo'])
def test_trl(loss_type):
  """What `GRPOTrainer._generate_and_score_completions` makes, G = 3.

  Prompts are padded on the left, completions on the right, in two arrays, and
  rows of one prompt are neighbours. `tool_mask` has 0 on tool output and is
  padded with 1. The last row hit the length limit: with
  `mask_truncated_completions` its mask is empty, and its reward still counts.
  (TRL's loss type grpo divides by all rows, the empty one too; so there it is
  not masked.)
  """
  prompt_ids = np.array([[PAD, 11, 12]] * 3 + [[13, 14, 15]] * 3)
  completion_ids = np.array(
    [
      [21, 22, 23, EOS, PAD],
      [21, 31, 24, 25, EOS],  # 31 was written by a tool
      [26, EOS, PAD, PAD, PAD],
      [27, 28, EOS, PAD, PAD],
      [27, EOS, PAD, PAD, PAD],
      [28, 29, 21, 22, 23],
    ]
  )
  length = np.array([4, 5, 2, 3, 2, 5])[:, None]
  completion_mask = (np.arange(5) < length).astype(np.int64)
  tool_mask = np.ones_like(completion_mask)
  tool_mask[1, 1] = 0
  truncated = completion_ids[:, -1] > EOS
  if loss_type == 'dapo':
    completion_mask *= ~truncated[:, None]
  rewards = np.array([1.0, 0.0, 0.5, 2.0, 0.0, 0.25])
  logp, old_per_token_logps, ref_per_token_logps = logps(completion_ids, 0)

  mask = completion_mask * tool_mask
  grouped = rewards.reshape(-1, 3)
  mean, std = grouped.mean(1), grouped.std(1, ddof=1)
  advantages = (rewards - mean.repeat(3)) / (std.repeat(3) + 1e-4)

  def loss(logp):
    per_token = clipped(logp, old_per_token_logps, advantages[:, None])
    gap = ref_per_token_logps - logp
    per_token += 0.04 * (np.exp(gap) - gap - 1)
    if loss_type == 'dapo':
      return (per_token * mask).sum() / mask.sum()
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()

  weight = {
    'dapo': losses.mean_over_tokens(),
    'grpo': losses.mean_over_sequences(),
  }
  method = losses.chain(
    losses.normalize_by_group('sample', 1e-4),
    weight[loss_type],
    losses.ppo_clip(0.2, 0.2),
    losses.add_kl(0.04),
  )
  batch = compare(
    loss,
    method,
    logp,
    mask=mask,
    group=np.arange(len(prompt_ids)) // 3,
    reward=rewards,
    tokens=completion_ids,
    truncated=truncated,
    logp_old=old_per_token_logps,
    logp_ref=ref_per_token_logps,
  )
  np.testing.assert_array_equal(
    batch.tokens[0],
    completion_ids[:3] * (np.arange(5) < length[:3]),
  )


def test_verl():
  """A `DataProto` with groups of three and two in any order, as rows.

  `uid` is an object array of strings. `responses`, `response_mask` and
  `old_log_probs` are [B,R] and padded on the right; `input_ids` is [B,P+R] and
  padded on both sides. The reward stands on the last token of the response.
  """
  uid = np.array(['e7', '3c', 'e7', '3c', 'e7'], dtype=object)
  prompts = np.array([[PAD, 11], [12, 13], [PAD, 11], [12, 13], [PAD, 11]])
  responses = np.array(
    [
      [21, 22, EOS, PAD],
      [23, 24, 25, EOS],
      [21, 31, 32, EOS],  # 31 and 32 were written by a tool
      [23, EOS, PAD, PAD],
      [26, 27, 28, 29],
    ]
  )
  length = np.array([3, 4, 4, 2, 4])
  response_mask = (np.arange(4) < length[:, None]).astype(np.int64)
  response_mask[2, 1:3] = 0
  token_level_rewards = np.zeros(responses.shape)
  token_level_rewards[np.arange(5), length - 1] = [1.0, 0.25, 0.0, 1.0, 0.5]
  logp, old_log_probs, _ = logps(responses, 1)
  old_log_probs[0, 0] = logp[0, 0] + 1.5
  old_log_probs[2, 0] = logp[2, 0] - 1.5  # beyond the dual clip: A < 0, r > 3

  scores = token_level_rewards.sum(-1)
  advantages = np.zeros(responses.shape)
  for name in set(uid):
    of_group = scores[uid == name]
    value = (of_group - of_group.mean()) / (of_group.std(ddof=1) + 1e-6)
    advantages[uid == name] = value[:, None] * response_mask[uid == name]

  def loss(log_prob):
    per_token = clipped(log_prob, old_log_probs, advantages)
    capped = np.minimum(per_token, -3.0 * advantages)
    per_token = np.where(advantages < 0, capped, per_token)
    return (per_token * response_mask).sum() / response_mask.sum()

  method = losses.chain(
    losses.normalize_by_group('sample', 1e-6),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, 0.2, cap=3.0),
  )
  given = dict(group=uid, reward=scores)
  batch = compare(
    loss,
    method,
    logp,
    mask=response_mask,
    tokens=responses,
    logp_old=old_log_probs,
    **given,
  )
  np.testing.assert_array_equal(batch.valid, [[1, 1, 1], [1, 1, 0]])

  # Prompt and response in one row give the same batch.
  input_ids = np.concatenate([prompts, responses], axis=1)
  before = lambda x: np.pad(x, ((0, 0), (prompts.shape[1], 0)))
  again, _ = losses.batch_from_rows(
    mask=before(response_mask),
    tokens=input_ids,
    logp_old=before(old_log_probs),
    **given,
  )
  jax.tree.map(np.testing.assert_array_equal, again, batch)


@pytest.mark.parametrize(
  'kl_loss_mode, estimator',
  [('kl', 'k1_with_zero_expected_gradient'), ('low_var_kl', 'k3')],
)
def test_tunix(kl_loss_mode, estimator):
  """The arrays of a `TrainExample` of `GRPOLearner`, as JAX arrays, G = 2.

  Completions are padded on the right to `max_tokens_to_generate`, the mask is
  what is not padding, and rows of one prompt are neighbours.
  """
  completion_ids = jnp.array(
    [
      [21, 22, EOS, PAD, PAD, PAD],
      [21, 23, 24, 25, 26, EOS],
      [27, EOS, PAD, PAD, PAD, PAD],
      [28, 29, 21, EOS, PAD, PAD],
    ]
  )
  completion_mask = completion_ids != PAD
  rewards = np.array([0.0, 1.0, 0.75, 0.5])
  logp, old, ref = logps(completion_ids, 2)
  mask = np.asarray(completion_mask)

  grouped = rewards.reshape(-1, 2)
  mean, std = grouped.mean(-1).repeat(2), grouped.std(-1, ddof=1).repeat(2)
  advantages = (rewards - mean) / (std + 1e-6)

  def loss(logp):
    per_token = clipped(logp, old, advantages[:, None])
    gap = ref - logp
    kl = -gap if kl_loss_mode == 'kl' else np.exp(gap) - gap - 1
    sequence = ((per_token + 0.04 * kl) * mask).sum(-1) / mask.sum(-1)
    return sequence.sum() / len(rewards)

  method = losses.chain(
    losses.normalize_by_group('sample', 1e-6),
    losses.mean_over_sequences(),
    losses.ppo_clip(0.2, 0.2),
    losses.add_kl(0.04, estimator),
  )
  batch = compare(
    loss,
    method,
    logp,
    mask=completion_mask,
    group=np.repeat(np.arange(2), 2),
    reward=rewards,
    tokens=completion_ids,
    logp_old=jnp.asarray(old),
    logp_ref=jnp.asarray(ref),
    shape=(2, 2, completion_ids.shape[1]),
  )
  np.testing.assert_array_equal(batch.tokens.reshape(4, 6), completion_ids)
