"""What the audits measure of recentring and of the brakes in `contrib`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.run.build import method as build_method
from grpo_jax.run.keep.objects import NOTHING
from tests.losses import cases

RECENTER = {
  'none': (),
  'whole': (losses.recenter_shared_prefix(),),
  'branches': (losses.recenter_branches(),),
}


def grpo(links):
  return losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    *links,
    losses.ppo_clip(),
  )


def shared(kind):
  """W_agg of every token of ragged groups, from the loss's own gradient."""
  rng = np.random.default_rng(0)
  shape = 8, 6, 9
  tokens = rng.integers(0, 2, shape)
  tokens[:, :, :2] = 1  # the whole group shares these
  batch = losses.make_batch(
    np.arange(9) < rng.integers(2, 10, (8, 6, 1)),
    rng.choice([0.0, 0.5, 1.0], shape[:2]).astype(np.float32),
    tokens=tokens,
    valid=rng.random(shape[:2]) < 0.9,
  )
  method = grpo(RECENTER[kind])
  logp = jnp.full(shape, -1.0)
  *_, batch, slope = cases.terms_and_gradient(method, batch, logp)
  weight = jax.jit(diagnostics.shared_prefix_weight)
  return weight(tokens, batch.mask, -slope)


@pytest.mark.parametrize('kind', RECENTER)
def test_nothing_pulls_a_prefix_of_the_whole_group(kind):
  found = shared(kind)
  relative = np.abs(found.weight) / np.maximum(found.total, 1e-30)
  everyone = np.asarray(found.total[:, :, :2]) > 0
  left = relative[:, :, :2][everyone].max()
  assert left > 0.3 if kind == 'none' else left < 1e-6
  several = (np.asarray(found.sharers) > 1) & (np.asarray(found.total) > 0)
  assert relative[several].max() > 0.3  # the branches keep their signal


@pytest.mark.long
def test_the_bias_of_a_common_first_token_halves_and_does_not_vanish():
  """Relative to the second token's gradient, which shrinks more, it grows."""
  got = {
    kind: diagnostics.tree_bias(grpo(links)) for kind, links in RECENTER.items()
  }
  rows = {
    kind: (t.first, t.second, t.ratio, t.shared_weight)
    for kind, t in got.items()
  }
  expected = {
    'none': (0.0476, 0.0938, 0.5073, 0.1818),
    'whole': (0.0245, 0.0421, 0.5822, 0),
    'branches': (0.0245, 0.0288, 0.8516, 0),
  }
  for kind, row in expected.items():
    np.testing.assert_allclose(rows[kind], row, atol=6e-5)


def test_equal_lengths_have_no_bias_with_either():
  for kind in ('whole', 'branches'):
    tree = diagnostics.tree_bias(
      grpo(RECENTER[kind]), short_tokens=8, long_tokens=8
    )
    assert abs(tree.first) < 1e-12 < tree.second


def test_where_the_prefix_matters_only_a_baseline_per_group_keeps_dr_grpo():
  """The true gradients' ratio is 0.62; Dr. GRPO has it."""
  true, ratios = 0.62, []
  for links in RECENTER.values():
    method = losses.chain(
      losses.center_by_group(),
      losses.mean_over_sequence_sums(),
      *links,
      losses.importance_weighted(),
    )
    ratios.append(diagnostics.tree_bias(method, other_reward=0).ratio)
  np.testing.assert_allclose(ratios, [true, true, 0.701], atol=6e-5)


def test_the_brakes_are_audited_by_name():
  """The probes are those of a first update: nothing coasts yet."""
  module = 'grpo_jax.losses.contrib:'
  coasting = build_method.make_method(f'{module}coasting_grpo', {'updates': 4})
  rollback = build_method.make_method(f'{module}rollback_grpo', {'high': 0.3})
  clipping = diagnostics.clipping(coasting)
  assert clipping.text == 'zero above 1.2 for A > 0 and below 0.8 for A < 0'
  clipping = diagnostics.clipping(rollback)
  assert clipping.text == 'never zero'
  assert np.all((clipping.positive < 0) == (clipping.ratio > 1.3))
  assert np.all((clipping.negative > 0) == (clipping.ratio < 0.8))


def test_a_config_with_a_brake_is_traced_before_the_run(monkeypatch):
  """So that what does not fit is refused when it is built."""
  learner = dataclasses.replace(
    config_lib.Config().learner, method='grpo_jax.losses.contrib:coasting_grpo'
  )
  config = dataclasses.replace(config_lib.Config(), learner=learner)
  build_method.method_of(config, NOTHING)
  # As if its objective could not be computed.
  monkeypatch.setattr(losses, 'surrogate_loss', lambda *_: jnp.zeros(()) + 'x')
  with pytest.raises(ValueError, match='cannot be traced'):
    build_method.method_of(config, NOTHING)
