"""Learners and rollouts that the tests of learner and update share."""

import functools

import jax
import numpy as np

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import compiled
from grpo_jax.learner import gradient
from grpo_jax.learner import layouts
from grpo_jax.learner import policies
from grpo_jax.learner import step
from grpo_jax.learner import token_shards
from grpo_jax.learner import updates
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments.rollout_end import RolloutEnd
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import Optimizer
from grpo_jax.learner.types import Placement
from grpo_jax.learner.types import Scoring
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models.layout import LayoutSpec
from tests import bigram
from tests import tiny

MODEL = tiny.model()
PARAMS = tiny.params(MODEL)


def entropy_method():
  """Reads the entropy, so that its pull-back is exercised too."""
  bonus = losses.add_penalty(
    lambda terms, batch: -0.1 * terms.entropy, requires=('entropy',)
  )
  return losses.chain(losses.methods.dapo(), bonus)


def top_method(direction='reverse', number=5):
  """Reads the teacher's likeliest tokens; see `with_top`."""
  kl = losses.add_teacher_top_kl(0.5, direction, number)
  return losses.chain(losses.methods.dapo(), kl)


METHODS = {
  'grpo': losses.methods.grpo,
  'gspo': functools.partial(losses.methods.gspo, low=0.05, high=0.05),
  'kl_cov': functools.partial(losses.methods.kl_cov, share=0.2),
  'entropy': entropy_method,
  'top': top_method,
}


def make_learner(
  method,
  mesh=(1, 1, 1),
  optimizer=None,
  on_zero='skip',
  takes_shards=True,
  **changes,
):
  model = tiny.model(**changes)

  def score(params, rows, wanted):
    return models.score(model, params, rows, 1.0, wanted)

  sizes = mesh if isinstance(mesh, dict) else {}
  mesh = sharding.make_mesh(*(() if sizes else mesh), **sizes)
  return Learner(
    method,
    Scoring(score, takes_shards=takes_shards),
    Optimizer(optimizer or optim.adamw(1e-2), on_zero),
    Placement(mesh, model.logical_axes),
  )


def bigram_learner(method, optimizer=None, mesh=(1, 1, 1), **changes):
  """`make_learner` with a model that is traced and compiled in half the time.

  For tests of what the learner does with any scores.
  """
  return bigram.changed(
    bigram.make_learner(method, mesh),
    transform=optimizer or optim.adamw(1e-2),
    **changes,
  )


def bigram_rollout(seed=0, **options):
  """`make_rollout` for it: the same lengths, rewards and distances."""
  return make_rollout(seed, **options, of_bigram=True)


def make_updater(learner, params, rows, *args, frozen=None, **options):
  """An updater; the options are those of `UpdateSpec`."""
  functions = compiled.jit_functions(learner, params)
  return updates.Updater(functions, UpdateSpec(*args, **options), rows, frozen)


def credited(updater, state, rollout, step=0):
  """The rollout before its first update."""
  return updates.credit_rollout(updater, updater.layout, state, rollout, step)


def learn(updater, layout, state, rollout, step):
  """The new state, metrics, and the layout for the next rollout."""
  ready = updates.credit_rollout(updater, layout, state, rollout, step)
  state, measured = updates.take_updates(updater, state, ready)
  return state, measured, ready.layouts.spec


def learned(updater, state, rollout, step=0):
  """The new state, and the metrics with those of the end of the rollout."""
  ready = credited(updater, state, rollout, step)
  end = RolloutEnd(updater)
  watch = hook.watch([end] * end.is_due(step), state, ready)
  state, measured = updates.take_updates(updater, state, ready)
  return state, measured | watch.findings(state).metrics


def layouts_of(updater, rollout):
  """The layouts of a rollout."""
  return layouts.Layouts(
    updater.compiled, rollout, updater.layout, updater.spec.batches
  )


def score(updater, params, rollout):
  """`Scores` [P,G,T] as the learner finds them."""
  return policies.score(layouts_of(updater, rollout), updater.frozen, params)


def with_policies(updater, state, rollout, step=0):
  """The batch with what its method needs, and how often it was scored."""
  rows = layouts_of(updater, rollout)
  return policies.with_policies(
    updater.compiled.learner,
    updater.spec,
    state,
    rollout,
    step,
    functools.partial(policies.score, rows, updater.frozen),
    functools.partial(policies.score_teacher, rows, updater.teacher),
  )


def lowered_gradient(learner, params, rows, example):
  """What `gradient.differentiate` is compiled from, from shapes alone.

  Half of an update's program: without the optimizer and the metrics.
  """
  made = compiled.jit_functions(learner, params)
  method, chosen = learner.method, np.arange(len(example.prompts))

  def run(params, batch, *of_rows):
    with sharding.use(learner.mesh):
      batch, state, _ = step.credit(learner, batch, method.init())
      batch = losses.prepare(method, batch, state)
      return gradient.differentiate(
        learner, None, params, state, batch, *of_rows
      )

  batch = losses.with_required(method, example.batch)
  batch = token_shards.placed(learner.mesh, batch, abstract=True)
  of_rows = layouts.abstract_stack(made, example, chosen, rows)
  jitted = jax.jit(run, compiler_options=sharding.COMPILER_OPTIONS)
  return jitted.lower(made.abstract.params, batch, *of_rows)


def _tiny_logp(rows, length):
  return tiny.gather(tiny.score(MODEL, PARAMS, rows).logp, rows, length)


def _bigram_logp(rows, length):
  scores = jax.jit(bigram.score)(bigram.params(), rows, models.LOGP)
  return tiny.gather(scores.logp, rows, length)


def make_rollout(
  seed=0, prompts=4, group=4, reward=None, width=6, of_bigram=False
):
  """At most six tokens a completion, and the rest of the width is padding."""
  ids, tokens, length = tiny.ragged(seed, prompts, group)
  tokens = np.pad(tokens, ((0, 0), (0, 0), (0, width - 6)))
  if of_bigram:
    ids = [[token % bigram.VOCAB for token in prompt] for prompt in ids]
    tokens %= bigram.VOCAB
  rng = np.random.default_rng(seed)
  mask = np.arange(tokens.shape[-1]) < length[:, :, None]
  valid = np.ones(length.shape, bool)
  valid[1, 1] = False
  reward = rng.integers(0, 2, length.shape) if reward is None else reward
  rows = layout.padded_rows(ids, tokens, length, 10 + width)
  logp = (_bigram_logp if of_bigram else _tiny_logp)(rows, length)
  logp = np.asarray(logp) + 0.4 * rng.standard_normal(tokens.shape)
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=valid,
    reward=np.asarray(reward, np.float32),
    reward_parts=np.asarray(reward, np.float32)[..., None],
    truncated=length == 6,
    version=np.zeros(tokens.shape, np.int32),
    logp_old=logp.astype(np.float32),
    logp_ref=(logp + 0.3).astype(np.float32),
  )
  return Rollout(batch, length, ids, [''] * prompts, [], np.arange(prompts))


def with_top(rollout, vocab, number=5):
  """A rollout of which a teacher has said its likeliest tokens, at random."""
  rng = np.random.default_rng(9)
  shape = rollout.batch.mask.shape
  logits = 2 * rng.standard_normal((*shape, vocab))
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  ids = np.argsort(-logp, axis=-1)[..., :number].astype(np.int32)
  top = np.take_along_axis(logp, ids, axis=-1).astype(np.float32)
  # Behind the end of a completion there may be anything.
  ids[~rollout.batch.mask], top[~rollout.batch.mask] = vocab - 1, np.nan
  extras = {'teacher_top_ids': ids, 'teacher_top_logp': top}
  batch = rollout.batch
  return rollout._replace(
    batch=batch._replace(extras={**batch.extras, **extras})
  )


def spec(kind='shared', micro_rows=1, row_completions=0, pack_tokens=30):
  return LayoutSpec(kind, micro_rows, row_completions, (8,), pack_tokens)
