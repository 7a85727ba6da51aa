"""A bigram model, learners and rollouts: quick to compile, read by a layout.

It stands for the transformer where a test is about what happens to any scores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import Optimizer
from grpo_jax.learner.types import Placement
from grpo_jax.learner.types import Scoring
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models import scores as scores_lib
from tests import tiny

PROMPTS, GROUP, TOKENS, VOCAB = 5, 4, 6, 8


@dataclasses.dataclass(frozen=True)
class Bigram:
  """A `models.Model`: the next token by the last one and its position."""

  vocab_size = VOCAB
  unused_ids = ()
  takes_shards = False
  bytes_per_token = 3 * 4 * VOCAB
  key_cost = 0.0
  kv_heads = 0
  score_routed = file_shape = None

  def score(
    self,
    params,
    layout,
    temperature=1.0,
    wanted=models.LOGP,
    *,
    forward_mode=0,
  ):
    """Reads columns and targets as a layout has them."""
    del forward_mode
    shape = layout.column.shape
    column = layout.column.reshape(shape[0], -1)
    token, position = (
      jnp.take_along_axis(x, column, axis=1)
      for x in (layout.tokens, layout.position)
    )
    logits = params['token'][token] + params['position'][position]
    target = layout.target.reshape(column.shape)
    if temperature != 1:
      logits = logits / temperature
    wanted = jax.tree.map(
      lambda ids: ids.reshape(*column.shape, ids.shape[-1]), wanted
    )
    found = scores_lib.token_scores(logits, target, wanted)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[2:]), found)

  def shares_prompts(self, platform):
    return True

  @property
  def reads_branches(self):
    return True

  def flops_per_token(self, context, with_head=True):
    return None

  def abstract(self):
    return jax.eval_shape(params)

  def trains(self, path):
    return True

  def decays(self, path):
    return True

  def logical_axes(self, path, rank):
    return 'width', 'vocab'

  def matrix_axes(self, path, rank):
    return models.MatrixAxes((-2,), (-1,), hidden=False)


MODEL: models.Model = Bigram()


def score(params, rows, wanted):
  """As a learner scores with it."""
  return MODEL.score(params, rows, wanted=wanted)


@functools.cache
def params():
  normal = np.random.default_rng(0).standard_normal
  return {
    'token': jnp.asarray(normal((VOCAB, VOCAB)), jnp.float32),
    'position': jnp.asarray(normal((8 + TOKENS, VOCAB)), jnp.float32),
  }


@functools.cache
def rollout():
  """Off-policy, ragged, with shared tokens; see the comments."""
  rng = np.random.default_rng(1)
  shape = (PROMPTS, GROUP, TOKENS)
  ids = [
    rng.integers(0, VOCAB, size).tolist() for size in rng.integers(1, 8, 5)
  ]
  tokens = rng.integers(0, 2, shape).astype(np.int32)  # many shared prefixes
  tokens[3, :, :2] = 1  # the whole group
  length = rng.integers(2, TOKENS + 1, shape[:2]).astype(np.int32)
  length[0, 0] = 0
  valid = np.ones(shape[:2], bool)
  valid[1, 1] = False
  valid[2], length[2, :2] = False, 0  # nothing is trained here
  reward = rng.choice([0.0, 0.5, 1.0], shape[:2])
  reward[0] = reward[3] = reward[4] = 0, 1, 0, 0.5
  reward[1] = 0.5  # a group that teaches nothing
  normal = lambda size: size * rng.standard_normal(shape)
  rows = layout.padded_rows(ids, tokens, length, 16)
  now = score(params(), rows, models.Wanted(entropy=True))
  logp, entropy = (
    np.asarray(tiny.gather(x, rows, length)) for x in (now.logp, now.entropy)
  )
  old = logp + normal(0.4)
  batch = losses.Batch(
    tokens=tokens,
    mask=np.arange(TOKENS) < length[:, :, None],
    keep=np.arange(TOKENS) < length[:, :, None],
    valid=valid,
    reward=reward,
    reward_parts=rng.choice([0.0, 0.5, 1.0], (*shape[:2], 2)),
    truncated=length == TOKENS,
    version=np.zeros(shape, np.int32),
    logp_old=old,
    logp_ref=logp + normal(0.4),
    logp_sampler=old + normal(0.3),
    entropy_old=entropy * np.exp(normal(0.3)),
    extras={'noise': rng.random(shape), 'log_kept': normal(0.1)},
  )
  batch = jax.tree.map(
    lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, batch
  )
  return Rollout(batch, length, ids, [''] * PROMPTS, [], np.arange(PROMPTS))


def make_learner(method, mesh=(1, 1, 1)):
  return Learner(
    method,
    Scoring(score),
    Optimizer(optax.sgd(0.1)),
    Placement(sharding.make_mesh(*mesh), MODEL.logical_axes),
  )


def changed(learner, **fields):
  """A learner with other values of fields of its parts."""
  parts = {'method': learner.method}
  for name in 'scoring', 'optimizer', 'placement', 'measuring':
    part = getattr(learner, name)
    own = {x.name for x in dataclasses.fields(part)} & fields.keys()
    values = {field: fields.pop(field) for field in own}
    parts[name] = dataclasses.replace(part, **values)
  return dataclasses.replace(learner, **parts, **fields)
