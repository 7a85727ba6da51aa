"""Which fields of a config may change when a run goes on."""

import pytest

from grpo_jax import config as config_lib
from grpo_jax.config import changes
from tests.run.build import configs

# By hand, so that a field changes its kind here and in the code.
FREE = {
  'compilation_cache', 'data.too_long', 'evaluation.every_steps',
  'evaluation.examples', 'evaluation.answer', 'learner.layout',
  'learner.micro_rows', 'learner.row_completions', 'learner.pack_tokens',
  'learner.nonfinite_rollouts', 'model.attention', 'model.beyond_context',
  'model.remat', 'model.unroll', 'sampler.max_rows', 'generator.devices',
  'generator.listen', 'generator.secret', 'generator.weights',
  'generator.wait_secs', 'engine.urls', 'engine.model', 'engine.folder',
  'engine.key_env', 'engine.concurrency', 'engine.timeout_secs',
  'engine.retries', 'optim.offload', 'teacher.offload',
  'teacher.model', 'teacher.key_env',
  'reference.offload', 'environment.where', 'environment.processes',
  'environment.sessions', 'environment.tool_secs', 'environment.episode_secs',
  'environment.memory_limit_gib', 'environment.retries',
  'environment.failed_share',
}  # fmt: skip
FREE_GROUPS = (
  'mesh', 'checkpoint', 'export', 'log', 'workers', 'early_stop',
)  # fmt: skip
ALLOWED = {
  'steps', 'optim.lr', 'optim.warmup_steps', 'optim.decay',
  'optim.decay_share', 'rewards.weight', 'evaluation.right_reward',
}  # fmt: skip


def test_every_field_has_the_kind_that_is_written_here():
  kinds = changes.kinds()
  names = {name.replace('[]', '') for name in configs.fields()}
  assert kinds.keys() == names
  free = FREE | {x for x in names if x.partition('.')[0] in FREE_GROUPS}
  for name, kind in kinds.items():
    wanted = 'free' if name in free else 'fixed'
    assert kind == ('allowed' if name in ALLOWED else wanted), name


def test_steps_are_free_while_the_learning_rate_is_constant():
  constant = config_lib.Config()
  assert config_lib.is_free('steps', constant)
  decays = config_lib.Optim(decay='linear')
  assert not config_lib.is_free('steps', config_lib.Config(optim=decays))


@pytest.mark.parametrize(
  'names', [(), ('optim.lr', 'steps'), ('rewards[0].weight',), ('log.samples',)]
)
def test_what_may_change_may_be_named(names):
  assert config_lib.check_allowed(names) == names
  for name in names:
    assert config_lib.is_allowed(name, names)


def test_the_weights_of_all_rewards_have_one_name():
  for name in ('rewards.weight', 'rewards[].weight', 'rewards[1].weight'):
    assert config_lib.is_allowed('rewards[0].weight', [name])
  assert not config_lib.is_allowed('rewards[0].name', ['rewards.weight'])


@pytest.mark.parametrize(
  'name, words',
  [
    ('seed', "names 'seed', which stays as it is for as long as a run lasts"),
    ('rewards', "names 'rewards', which stays .* takes steps, rewards.weight"),
    ('optim.b1', 'begin another run with it, in another workdir'),
    ('optim', "names 'optim', which is a group.*; name fields one by one"),
    ('optim.rl', r"no field of the config \(did you mean 'optim.lr'\?\)"),
    ('', "names '', which is no field"),
  ],
)
def test_what_never_changes_cannot_be_named(name, words):
  with pytest.raises(ValueError, match=f'--allow_changed {words}|{words}'):
    config_lib.check_allowed(['optim.lr', name])
