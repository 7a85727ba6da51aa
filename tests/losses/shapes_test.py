"""A result of another shape is refused, although it would broadcast."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

pytestmark = pytest.mark.quick

P, G, T = SHAPE = 2, 3, 4
CREDIT = losses.use_reward()
WEIGHT = losses.mean_over_tokens()
CLIP = losses.ppo_clip()

# For each constructor: the links before it, and those after it.
PLACES = {
  'on_reward': ((), (CREDIT, WEIGHT, CLIP)),
  'set_advantage': ((), (WEIGHT, CLIP)),
  'on_advantage': ((CREDIT,), (WEIGHT, CLIP)),
  'on_keep': ((CREDIT,), (WEIGHT, CLIP)),
  'set_weight': ((CREDIT,), (CLIP,)),
  'on_weight': ((CREDIT, WEIGHT), (CLIP,)),
  'on_weighted_advantage': ((CREDIT, WEIGHT), (CLIP,)),
  'on_log_ratio': ((CREDIT, WEIGHT), (CLIP,)),
  'set_objective': ((CREDIT, WEIGHT), ()),
  'on_objective': ((CREDIT, WEIGHT, CLIP), ()),
  'add_penalty': ((CREDIT, WEIGHT, CLIP), ()),
}
WRONG = [(), (1,), (1, 1), (1, G), (G, P), (P, 1), (1, 1, 1), (1, G, T),
         (P, 1, T), (1, 1, T), (P, 1, 1), (T,)]  # fmt: skip


def batch():
  values = np.arange(P * G, dtype=float).reshape(P, G)
  zeros = jnp.zeros(SHAPE)
  return losses.make_batch(zeros == 0, values, logp_old=zeros)


def run(stage, shape):
  """The loss of a chain with a stage whose function returns `shape`."""

  def mine(*args):
    return jnp.ones(shape, bool if stage == 'on_keep' else float)

  before, after = PLACES[stage]
  method = losses.chain(*before, getattr(losses, stage)(mine), *after)
  made, state = cases.prepared(method, batch())
  return losses.surrogate_loss(method, jnp.zeros(SHAPE), made, state)


@pytest.mark.parametrize('shape', WRONG, ids=str)
@pytest.mark.parametrize('stage', PLACES)
def test_what_would_broadcast_is_refused(stage, shape):
  with pytest.raises(ValueError, match='run returned an array') as caught:
    run(stage, shape)
  assert f'of shape {shape}' in str(caught.value)
  assert f'[P,G,T] = {SHAPE}' in str(caught.value)


@pytest.mark.parametrize('stage', PLACES)
def test_one_value_per_completion_will_do(stage):
  run(stage, (P, G))
  if stage != 'on_reward':
    whole, _ = run(stage, SHAPE)
    for shape in ((P, G), (P, G, 1)):
      np.testing.assert_array_equal(run(stage, shape)[0], whole)


@pytest.mark.parametrize(
  'shape', [(), (T,), (G, T), (P, G, 1), (P, G), (1, G, T), (P, 1, T)], ids=str
)
@pytest.mark.parametrize('name', ['logp', 'entropy'])
def test_the_policy_gives_one_value_per_token(name, shape):
  method = losses.methods.rloo()
  made, state = cases.prepared(method, batch())
  given = {'logp': jnp.zeros(SHAPE), 'entropy': None, name: jnp.zeros(shape)}
  with pytest.raises(ValueError, match=f'{name} of shape') as caught:
    losses.surrogate_loss(method, batch=made, state=state, **given)
  assert str(shape) in str(caught.value) and str(SHAPE) in str(caught.value)


@pytest.mark.parametrize(
  'metrics, words',
  [
    ({'mine': jnp.ones(P)}, r"'mine' that is an array of shape \(2,\)"),
    ({'mine': 3.0}, "metric 'mine' that is 3.0"),
    ({'mine': 'many'}, "metric 'mine' that is 'many'"),
    ({3: jnp.ones(SHAPE)}, 'metric 3 that is an array'),
  ],
)
def test_a_metric_is_per_token(metrics, words):
  edit = losses.on_advantage(lambda a, b: (a, metrics))
  method = losses.chain(CREDIT, edit, WEIGHT, CLIP)
  with pytest.raises(ValueError, match=words):
    cases.prepared(method, batch())


@pytest.mark.parametrize(
  'stage, value, words',
  [
    ('on_keep', 1.0, "float64 for 'keep'; return booleans"),
    ('on_keep', 2, "for 'keep'; return booleans"),  # True & 2 is 0
    ('on_advantage', 1j, "complex128 for 'advantage'; return real numbers"),
  ],
)
def test_a_value_of_another_kind_is_refused(stage, value, words):
  edit = getattr(losses, stage)(lambda old, b: jnp.full(SHAPE, value))
  method = losses.chain(CREDIT, edit, WEIGHT, CLIP)
  with pytest.raises(ValueError, match=words):
    cases.prepared(method, batch())


@pytest.mark.parametrize('dtype', [int, bool, jnp.bfloat16])
def test_losses_are_float32_whatever_a_stage_returns(dtype):
  counted = losses.on_reward(lambda r, b: (r > 0).astype(dtype))
  as_float = losses.on_reward(lambda r, b: (r > 0).astype(jnp.float32))
  made = [
    cases.prepared(losses.chain(edit, CREDIT, WEIGHT, CLIP), batch())[0]
    for edit in (counted, as_float)
  ]
  assert made[0].reward.dtype == made[1].reward.dtype == jnp.float32
  np.testing.assert_array_equal(made[0].advantage, made[1].advantage)


def own(link, **components):
  """A transform that was written without a stage constructor."""
  return link._replace(**components)


@pytest.mark.parametrize(
  'links, words',
  [
    (
      (own(CREDIT, credit=lambda b, s: (b._replace(advantage=1.0), s)),),
      'credit of a transform left advantage with shape',
    ),
    ((own(CREDIT, credit=lambda b, s: b),), 'returned a Batch of .*a pair'),
    (
      (CREDIT, own(WEIGHT, prepare=lambda b, s: b._replace(weight=b.reward))),
      'prepare of a transform left weight with shape',
    ),
    (
      (
        CREDIT,
        WEIGHT,
        own(CLIP, apply=lambda t, b, s: t._replace(objective=t.logp.sum())),
      ),
      'apply of a transform left objective with shape',
    ),
    ((CREDIT, WEIGHT, own(CLIP, apply=lambda t, b, s: None)), 'NoneType'),
    ((CREDIT, own(WEIGHT, prepare=lambda b, s: None)), 'NoneType'),
  ],
  ids=['credit', 'no pair', 'prepare', 'apply', 'no terms', 'no batch'],
)
def test_what_a_transform_leaves_is_checked_too(links, words):
  method = losses.chain(*links)
  with pytest.raises(ValueError, match=words):
    made, state = cases.prepared(method, batch())
    losses.surrogate_loss(method, jnp.zeros(SHAPE), made, state)


@pytest.mark.parametrize(
  'method',
  [
    losses.methods.gtpo_conflict(),
    losses.recenter_branches(),
    losses.recenter_shared_prefix(),
  ],
  ids=['conflict', 'branches', 'prefix'],
)
def test_ids_that_are_compared_have_to_be_given(method):
  given = batch()._replace(entropy_old=jnp.zeros(SHAPE))
  with pytest.raises(ValueError, match="'tokens', which was not given"):
    losses.credit(method, given, method.init())
