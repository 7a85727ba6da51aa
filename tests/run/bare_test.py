"""Runs of which nothing is kept, as studies make them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.run import bare
from grpo_jax.run.build import build
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.mark.long
def test_adapters_are_warmed_up_and_trained(tmp_path):
  config = runs.small(
    reward='tests.judges:even',
    steps=2,
    **{'lora.rank': 2, 'warm_up.steps': 1},
  )
  params = bare.warmed_up(config, tmp_path)
  run = build.run(config)
  updater = build.updater(run, build.frozen_params(run))
  state = updater.compiled.init(jax.tree.map(jnp.copy, params))
  done = list(bare.trained(run, updater, state))
  # The sampler has the frozen parameters too, and so has the learner.
  assert len(done) == 2
  assert all(one.measured['sampler_gap'] < 1e-4 for one in done)
  assert all(np.isfinite(one.measured['loss']) for one in done)


def test_gradients_are_compared_in_the_rollouts_that_a_config_names(tmp_path):
  config = runs.small(
    reward='tests.judges:even',
    steps=3,
    **{'log.geometry_every_steps': 2, 'optim.warmup_steps': 0},
  )
  run = build.run(config)
  updater = build.updater(run, build.frozen_params(run))
  state = updater.compiled.init(bare.warmed_up(config, tmp_path))
  done = bare.trained(run, updater, state)
  found = ['geometry_zero' in one.measured for one in done]
  assert found == [True, False, True]
