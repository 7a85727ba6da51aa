"""The transformer of `configs/arithmetic.py`, held at one policy.

Experiments on a language model's own gradients: a policy that does not change
samples rollouts, and each experiment asks what optimizers and methods make of
them. Unless the policy is warmed up, its parameters are random. Such a policy
is never right and hardly ever ends, so its rewards, in eighths, and its lengths
are random too.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax.models import layout as layout_lib
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import bare
from grpo_jax.run import sampling
from grpo_jax.run.build import build

PROMPTS, GROUP = 8, 8
_PROMPT_TOKENS, _MOST_TOKENS = 6, 5  # of a sum of two numbers below 100


class Rollouts(NamedTuple):
  """What one policy has sampled, N rollouts of P prompts with G completions.

  Attributes:
    params: Of the policy, one vector f32[D].
    score: `(vector, layout) -> logp`, f32[P,G,T].
    layout: Rows of each rollout, arrays [N,P*G,...].
    tokens: i32[N,P,G,T], ids.
    mask: bool[N,P,G,T], whether there is a token.
    reward: f32[N,P,G].
  """

  params: jax.Array
  score: Callable[..., jax.Array]
  layout: layout_lib.Layout
  tokens: np.ndarray
  mask: np.ndarray
  reward: np.ndarray


def config(temperature: float, warm: bool) -> config_lib.Config:
  """The model, task and warm-up of `configs/arithmetic.py`.

  Args:
    temperature: Of the policy. A low one makes a random policy sure of some
      tokens, as a trained policy is, so that completions of a group share them.
    warm: Whether the policy is warmed up on demonstrations.
  """
  base = config_lib.Config()
  change = dataclasses.replace
  return change(
    base,
    model=change(base.model, rope_base=100.0, unroll=True),
    data=change(
      base.data,
      prompt_buckets=(_PROMPT_TOKENS,),
      completion_buckets=(_MOST_TOKENS,),
    ),
    sampler=change(
      base.sampler,
      prompts=PROMPTS,
      group=GROUP,
      max_tokens=_MOST_TOKENS,
      temperature=temperature,
    ),
    warm_up=change(base.warm_up, steps=300 if warm else 0),
  )


@functools.cache
def rollouts(
  number: int, temperature: float = 1.0, warm: bool = False
) -> Rollouts:
  """Samples from the policy; the same rollouts at every call.

  Args:
    number: N, how many.
    temperature: See `config`.
    warm: Whether the policy is warmed up (half a minute) and judged, instead of
      random with random rewards.
  """
  resolved = config(temperature, warm)
  run = build.run(resolved)
  if warm:
    with tempfile.TemporaryDirectory() as folder:
      params = bare.warmed_up(resolved, pathlib.Path(folder))
  else:
    params = build.initial_params(run)
  run.engine.load(params, version=0)
  drawn = [sampling.sampled(run, PromptState(), k)[0] for k in range(number)]
  tokens = np.stack([np.asarray(one.batch.tokens) for one in drawn])
  reward = np.stack([np.asarray(one.batch.reward) for one in drawn])
  length = np.stack([one.length for one in drawn])
  if not warm:
    random = np.random.default_rng(0)
    reward = random.integers(0, 9, reward.shape).astype(np.float32) / 8
    drawn_length = random.integers(2, _MOST_TOKENS + 1, length.shape)
    length = np.minimum(length, drawn_length)
  width = _PROMPT_TOKENS + _MOST_TOKENS
  layouts = [
    layout_lib.padded_rows(one.prompts, tokens[k], length[k], width)
    for k, one in enumerate(drawn)
  ]
  mask = np.arange(tokens.shape[-1]) < length[..., None]
  vector, unflatten = jax.flatten_util.ravel_pytree(params)

  def score(vector, layout):
    found = run.model.score(unflatten(vector), layout, temperature)
    return found.logp.reshape(PROMPTS, GROUP, -1)

  stacked = jax.tree.map(lambda *x: np.stack(x), *layouts)
  return Rollouts(vector, score, stacked, tokens, mask, reward)


def credited(method: losses.LossTransform, mask, reward, logp_old=None):
  """A rollout [P,G,T] ready for an update, and the method's state."""
  batch = losses.make_batch(mask, reward, logp_old=logp_old)
  batch, state = losses.credit(method, batch, method.init())
  return losses.prepare(method, batch, state), state


def loss_of(method: losses.LossTransform, logp, batch, state) -> jax.Array:
  """The surrogate loss of log-probabilities, f32[]."""
  return jnp.asarray(losses.surrogate_loss(method, logp, batch, state)[0])


def coefficients(method: losses.LossTransform, mask, reward, logp):
  """Coefficients -d loss / d logp at ratio 1, f32[P,G,T]."""
  batch, state = credited(method, mask, reward)
  slope = jax.grad(lambda logp: loss_of(method, logp, batch, state))(logp)
  return -slope


def pull_back(score, vector, layout, coefficient):
  """The gradient of `-sum(coefficient * logp)`, f32[D]."""
  logp, back = jax.vjp(lambda x: score(x, layout), vector)
  return back(-jnp.asarray(coefficient, logp.dtype))[0]
