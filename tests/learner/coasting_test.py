"""The prediction of coasting against what happens, on the arithmetic model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import monitor
from grpo_jax import optim
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import micro_batches
from grpo_jax.learner import trust_region
from grpo_jax.learner import updates
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import sampling
from grpo_jax.run import warm_up
from grpo_jax.run.build import about
from grpo_jax.run.build import build
from tests import runs
from tests.learning import credited

STEPS, STATES = 8, 20


def prepared(tmp_path):
  """A run, its updater and its parameters after a short warm-up."""
  config = runs.arithmetic(
    **{
      'model.num_layers': 2,
      'sampler.prompts': 16,
      'warm_up.steps': 80,
      'learner.epochs': STEPS,
      'optim.warmup_steps': 5 * STEPS,
      'log.display': 'none',
      'log.tensorboard': False,
    }
  )
  run = build.run(config)
  with monitor.Monitor(about.monitored(config), tmp_path, 1, None, {}) as shown:
    params = warm_up.run(run, tmp_path, shown, lambda: False, None)
  return run, build.updater(run, None), params


def make_probe(learner):
  """Outward directions, predicted and real motion of all tokens' log-ratios."""

  @jax.jit
  def probe(state, batch, stack, used):
    batch = losses.prepare(learner.method, batch, state.loss_state)
    shape = batch.mask.shape
    found = gradient_lib.differentiate(
      learner, None, state.params, state.loss_state, batch, stack, used
    )
    coasted = optim.coast(
      learner.optimizer.transform, state.opt_state, state.params, STEPS
    )
    path = jax.tree.map(jnp.add, coasted.moved, coasted.decayed)

    def along(rows):
      score = lambda p: learner.scoring.score_forward(p, rows, models.LOGP).logp
      return jax.jvp(score, (state.params,), (path,))[1]

    after = gradient_lib.score_all(
      learner, None, coasted.params, stack, used, shape
    )
    predicted = micro_batches.map_rows(along, stack, used, shape)
    direction = trust_region.outward(found.terms, batch)
    return direction, predicted, after.logp - found.scores.logp

  return probe


@pytest.mark.long
def test_coasting_moves_clipped_tokens_as_predicted(tmp_path):
  """From 20 states: eight steps without gradient, and scored again."""
  run, updater, params = prepared(tmp_path)
  probe = make_probe(updater.compiled.learner)
  state = updater.compiled.init(params)
  prompt_state, errors, motions = PromptState(), [], []
  for step in range(6):
    if len(errors) == STATES:
      break
    run.engine.load(state.params, version=step)
    rollout, prompt_state, _ = sampling.sampled(run, prompt_state, step)
    ready = credited(updater, state, rollout, step)
    batch = ready.batch
    state = state._replace(loss_state=ready.loss_state)
    start = jnp.copy(state.step)
    prompts = len(rollout.prompts)
    for chosen in updates.optimizer_batches(updater.spec, prompts, step):
      stack, used = ready.layouts.stack(chosen)
      taken = jax.tree.map(lambda x: x[chosen], batch)  # noqa: B023
      direction, predicted, real = jax.device_get(
        probe(state, taken, stack, used)
      )
      clipped = direction != 0
      if np.sum(clipped) >= 20 and len(errors) < STATES:
        predicted, real = (
          np.mean((direction * x)[clipped]) for x in (predicted, real)
        )
        errors.append(abs(predicted - real) / abs(real))
        motions.append(real)
      state, _ = updater.compiled.step(
        None, state, batch, chosen, stack, used, start, start, False
      )
  assert len(errors) == STATES
  assert np.median(motions) > 0.1  # outward, nats: no small matter
  assert np.median(errors) < 0.1, errors
