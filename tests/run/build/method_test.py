"""What a run tells its method, and what `build` refuses of a config."""

from contextlib import nullcontext
import types

import jax.numpy as jnp
import pytest

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax.mesh import chips
from grpo_jax.mesh import sharding
from grpo_jax.run.build import build
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import placing
from tests import own_module
from tests import runs
from tests import tiny

CALLS = []


@losses.takes_from_run(
  weights='reward_weights',
  updates='updates_per_rollout',
  first='adam_b1',
  second='adam_b2',
  most='max_tokens',
  right='right_reward',
  soft='soft_tokens',
)
def own(**kwargs):
  """A user's own method, which a config names by its module."""
  CALLS.append(kwargs)
  return losses.methods.rloo()


FACTS = {
  'weights': (2.0,), 'updates': 6, 'first': 0.8, 'second': 0.95, 'most': 5,
  'soft': 1, 'right': 1.5,
}  # fmt: skip


@pytest.mark.parametrize(
  'given', [{}, {'second': 0.5, 'other': 3}], ids=['none given', 'some given']
)
def test_a_users_method_is_told_of_the_run(given):
  CALLS.clear()
  config = runs.arithmetic(
    **{
      'learner.method': 'tests.run.build.method_test:own',
      'learner.method_kwargs': given,
      'learner.batches': 2,
      'learner.epochs': 3,
      'rewards': ({'name': 'exact_match', 'weight': 2.0},),
      'evaluation.right_reward': 0.75,
      'optim.b1': 0.8,
      'optim.b2': 0.95,
    }
  )
  build.run(config)
  assert CALLS == [FACTS | given]


@pytest.mark.parametrize(
  'field, value, words',
  [
    (
      'learner.method',
      'tests.bad_methods:raises_when_traced',
      "method='tests.bad_methods:raises_when_traced' .*KeyError: 'no column'",
    ),
    ('model.attention', 'splash', "attention='splash' runs on TPUs, .*'cpu'"),
    ('model.attention', 'cudnn', "attention='cudnn' runs on GPUs, .*'cpu'"),
    (
      'evaluation.answer',
      'tests.judges:gone',
      "config.evaluation.answer='tests.judges:gone' cannot be imported",
    ),
    (
      'model.path',
      'tests.bad_methods:raises',
      "config.model.path='tests.bad_methods:raises' raised KeyError",
    ),
  ],
)
def test_what_cannot_be_built_is_refused(field, value, words):
  config = runs.arithmetic(**{'learner.method_kwargs': {}, field: value})
  with pytest.raises(ValueError, match=words):
    build.run(config)


def shaped(soft):
  penalty = losses.shape_overlong_reward(soft, 6)
  return losses.chain(penalty, losses.methods.gspo())


def test_a_penalty_for_length_that_nothing_gets_is_refused():
  """Whoever has made it: its limits are not those of the run."""

  def made(soft):
    config = {'learner.method': f'{__name__}:shaped'}
    kwargs = {'learner.method_kwargs': {'soft': soft}}
    return build_method.method_of(runs.arithmetic(**config, **kwargs))

  assert made(2).acts_after_tokens == 4
  with pytest.raises(ValueError, match='after 5 tokens, .* at most 5 .*dapo'):
    made(1)
  for method in (losses.methods.dapo(), lambda: losses.methods.dapo()):
    own = placing.place(runs.arithmetic(), method=method)
    with pytest.raises(ValueError, match='after 16384 tokens, .* at most 5'):
      build_method.method_of(*own)


def compares():
  return losses.methods.grpo()


def above():
  """Nothing is compared, but small rewards give nothing."""
  return losses.chain(
    losses.on_reward(lambda reward, batch: jnp.where(reward > 5, 1.0, 0.0)),
    losses.use_reward(),
    losses.mean_over_tokens(),
    losses.score_function(),
  )


def undefined():
  """The sample's deviation of a single reward is 0 over 0."""

  def z_score(batch):
    spread = jnp.std(batch.reward, axis=1, keepdims=True, ddof=1)
    mean = jnp.mean(batch.reward, axis=1, keepdims=True)
    return (batch.reward - mean) / spread

  return losses.chain(
    losses.set_advantage(z_score),
    losses.mean_over_tokens(),
    losses.score_function(),
  )


@pytest.mark.parametrize(
  'method', ['grpo', 'rloo', f'{__name__}:compares', f'{__name__}:undefined']
)
def test_groups_of_one_need_a_method_that_compares_nothing(method):
  config = {
    'learner.method': method,
    'learner.method_kwargs': {},
    'sampler.group': 1,
  }
  with pytest.raises(ValueError, match='sampler.group=1 .* sampler.group=2'):
    build.run(runs.arithmetic(**config))
  for alone in ('reinforce', f'{__name__}:above'):
    build.run(runs.arithmetic(**{**config, 'learner.method': alone}))


@pytest.mark.parametrize(
  'learner, warm_up, steps, refused',
  [
    (2, 3, 1, 'warm_up.micro_rows=3 does not split over 2 data shards'),
    (3, 2, 1, 'learner.micro_rows=3 does not split over 2 data shards'),
    (2, 3, 0, ''),  # there is no warm-up
    (0, 4, 1, ''),  # the run chooses
  ],
)
def test_micro_batches_split_over_the_devices(learner, warm_up, steps, refused):
  config = runs.arithmetic(
    **{
      'mesh.data': 2,
      'learner.micro_rows': learner,
      'warm_up.micro_rows': warm_up,
      'warm_up.steps': steps,
    }
  )
  with pytest.raises(ValueError, match=refused) if refused else nullcontext():
    build.run(config)


@pytest.mark.parametrize('peak, of_four', [(3e12, 1.2e13), (None, None)])
def test_the_peak_is_that_of_all_devices(peak, of_four, monkeypatch):
  monkeypatch.setattr(chips, 'peak_flops', lambda kind: peak)
  run = build.run(runs.arithmetic(**{'mesh.data': 2, 'mesh.fsdp': 2}))
  assert run.peak_flops == of_four


def test_a_large_group_is_not_held_in_memory_to_trace_the_method():
  build.run(runs.arithmetic(**{'sampler.group': 20_000}))


def test_widths_that_are_left_open_come_from_the_data():
  open_ended = {'data.prompt_buckets': (), 'data.completion_buckets': ()}
  fields = build.run(runs.arithmetic(**open_ended)).config.data
  assert fields.prompt_buckets == (6,) and fields.completion_buckets == (5,)
  # A demonstration has three digits and an end token.
  open_ended |= {'sampler.max_tokens': 2, 'data.completion_prefix': '1'}
  fields = build.run(runs.arithmetic(**open_ended)).config.data
  assert fields.prompt_buckets == (7,) and fields.completion_buckets == (4,)
  given = {'data.prompt_buckets': (9, 8)}
  fields = build.run(runs.arithmetic(**{**open_ended, **given})).config.data
  assert fields.prompt_buckets == (9, 8) and fields.completion_buckets == (4,)
  open_ended |= {'warm_up.steps': 0, 'data.prompt_buckets': (9, 8)}
  fields = build.run(runs.arithmetic(**open_ended)).config.data
  assert fields.prompt_buckets == (9, 8) and fields.completion_buckets == (2,)


@pytest.mark.parametrize(
  'platform, attention, shared',
  [('tpu', 'auto', False), ('tpu', 'xla', True), ('cpu', 'auto', True)],
)
def test_prompts_are_shared_where_the_attention_of_the_platform_can(
  platform, attention, shared, monkeypatch
):
  monkeypatch.setattr(sharding, 'platform', lambda mesh: platform)
  spec = build_learner._layout(
    config_lib.Config(),
    tiny.model(attention=attention),
    sharding.make_mesh(),
    'packed',
    0,
  )
  assert spec.share == shared


@pytest.mark.parametrize('kind', ['mask', 'causal'])
def test_branches_are_shared_where_a_model_of_ones_own_obeys_the_mask(kind):
  model, mesh = own_module.made(kind).model, sharding.make_mesh()
  spec = build_learner._layout(config_lib.Config(), model, mesh, 'auto', 0)
  assert (spec.kind, spec.share) == ('padded', kind == 'mask')


def test_layers_with_a_state_share_prompts_and_read_no_branches():
  mesh, config = sharding.make_mesh(), config_lib.Config()
  for changes, branches in ({}, True), (tiny.STATES, False):
    model = tiny.model(**changes)
    spec = build_learner._layout(config, model, mesh, 'auto', 0)
    assert (spec.share, spec.branches) == (True, branches)


def test_rows_are_those_that_a_teacher_can_read_too():
  mesh, config = sharding.make_mesh(), config_lib.Config()
  plain, states = tiny.model(), tiny.model(**tiny.STATES)
  none = types.SimpleNamespace(
    shares_prompts=lambda platform: False, reads_branches=True
  )
  for policy, teacher, share, branches in (
    (plain, plain, True, True),
    (plain, states, True, False),
    (states, plain, True, False),
    (plain, none, False, True),
  ):
    spec = build_learner._layout(config, policy, mesh, 'auto', 0, teacher)
    assert (spec.share, spec.branches) == (share, branches)
    alone = build_learner._layout(config, policy, mesh, 'auto', 0)
    assert spec.micro_tokens == alone.micro_tokens


def test_a_token_that_needs_more_than_there_is_still_has_a_place():
  huge = types.SimpleNamespace(
    bytes_per_token=2**60,
    key_cost=None,
    shares_prompts=lambda platform: False,
    reads_branches=False,
  )
  mesh = sharding.make_mesh()
  spec = build_learner._layout(config_lib.Config(), huge, mesh, 'packed', 0)
  assert spec.micro_tokens == 1
