"""What each field of a spec holds of a config.

`ROWS` has a row for each field of each spec of a run; a field without a row
fails. What else a run is made of is in `parts_test.py`.
"""

import ast
import dataclasses
import pathlib

import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.rollouts import sources
import grpo_jax.run
from grpo_jax.run.build import build
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import specs as specs_lib
from tests.run.build import configs

SHAPE = models.ModelConfig(
  14,
  num_layers=1,
  width=8,
  pattern=(models.LayerKind(experts=True),),
  experts=models.Experts(2, 1, 8),
)
MODEL = models.Transformer(SHAPE)
MESH = sharding.make_mesh()
METHOD = losses.methods.dapo()


def updates(config):
  return config.learner.batches * config.learner.epochs


def made(config):
  """The specs of a run by the names of its fields."""
  return {
    **build.sampler_specs(config),
    **build.run_specs(config, MODEL, MESH, METHOD),
    'warm_up': build_learner.warm_up_spec(config, MODEL, MESH, ends),
  }


def ends():
  """The demonstrations of a run that has none."""


def learning(name, **rows):
  """The rows of a `LearnSpec`."""
  return {f'{name}.{field}': row for field, row in rows.items()}


# By a spec's field the field of the config, or a function of the config.
ROWS = {
  'steps': 'steps',
  'weights.path': 'model.path',
  'weights.own': lambda config: None,
  'weights.seed': 'seed',
  'weights.has_adapters': lambda config: config.lora.rank > 0,
  'weights.base_dtype': 'lora.base_dtype',
  'weights.most_tokens': lambda config: (
    64 if not config.model.beyond_context and config.model.path else None
  ),
  'data.prompt_buckets': 'data.prompt_buckets',
  'data.completion_buckets': 'data.completion_buckets',
  'data.drops': lambda config: config.data.too_long == 'drop',
  'limits.number': 'workers.number',
  'limits.time_limit_secs': 'workers.time_limit_secs',
  'limits.memory_limit_bytes': lambda config: (
    config.workers.memory_limit_gib * 2**30
  ),
  'limits.start_limit_secs': 'workers.start_limit_secs',
  'limits.wall_limit_secs': 'workers.wall_limit_secs',
  'draw.seed': 'seed',
  'draw.prompts': 'sampler.prompts',
  'draw.group': 'sampler.group',
  'draw.max_tokens': 'sampler.max_tokens',
  'draw.resample_rounds': 'sampler.resample_rounds',
  'draw.retire_solved': 'sampler.retire_solved',
  'draw.right_reward': 'evaluation.right_reward',
  'draw.shuffles': 'shuffle_rewards',
  'draw.parts': 'generator.parts',
  'draw.pace': lambda config: sources.Pace(
    config.sampler.ahead,
    config.generator.every,
    config.generator.updates == 'inflight',
  ),
  'jobs.listen': 'generator.listen',
  'jobs.secret': 'generator.secret',
  'jobs.weights': 'generator.weights',
  'jobs.wait_secs': 'generator.wait_secs',
  'evaluation.every_steps': 'evaluation.every_steps',
  'evaluation.examples': 'evaluation.examples',
  'evaluation.answer': 'evaluation.answer',
  'early_stop.metric': 'early_stop.metric',
  'early_stop.mode': 'early_stop.mode',
  'early_stop.patience': 'early_stop.patience',
  'early_stop.least_improvement': 'early_stop.least_improvement',
  'keep.every_steps': 'checkpoint.every_steps',
  'keep.every_minutes': 'checkpoint.every_minutes',
  'keep.keep_last': 'checkpoint.keep_last',
  'keep.best_metric': 'checkpoint.best_metric',
  'export.every_saves': 'export.every_saves',
  'export.dtype': 'export.dtype',
  'export.adapter': 'export.adapter',
  'export.push_to': 'export.push_to',
  'export.public': 'export.public',
  'keep.completions_every_steps': 'log.completions_every_steps',
  'keep.samples': 'log.samples',
  'measure.effects_every_steps': lambda config: (
    config.log.token_effects * config.log.completions_every_steps
  ),
  'measure.geometry_every_steps': 'log.geometry_every_steps',
  'measure.seed': 'seed',
  'teacher': lambda config: None,  # teacher_test.py has others
  'warm_up.steps': 'warm_up.steps',
  'warm_up.examples': 'warm_up.examples',
  'warm_up.save_every_steps': 'checkpoint.every_warm_up_steps',
  'warm_up.demonstrations': lambda config: ends,
  **learning(
    'learn',
    method='learner.method',
    learner=lambda config: (
      METHOD,
      config.learner.on_zero_advantage,
      config.optim.brake == 'project',
      config.optim.offload,
      config.reference.offload,
      updates(config),
      config.optim.moments,
      config.log.expected_prefixes,
      config.sampler.ahead,
      config.learner.expert_balance,
      config.learner.compute_all,
      # At the end of the rise.
      pytest.approx(config.optim.lr, 1e-5),
    ),
    update=lambda config: (
      config.seed,
      config.learner.batches,
      config.learner.epochs,
      config.learner.anchor,
      config.reference.refresh_steps,
      config.reference.refresh_weight,
      config.optim.overshoot_every_steps,
      config.sampler.resample_rounds > 0,
    ),
    layout=lambda config: (
      config.learner.layout,
      config.learner.micro_rows,
      config.learner.row_completions,
      config.learner.pack_tokens,
      config.data.prompt_buckets,
    ),
    nonfinite_rollouts='learner.nonfinite_rollouts',
  ),
  **learning(
    'warm_up.learn',
    method=lambda config: 'supervised',
    learner=lambda config: (
      'step',
      False,
      config.optim.offload,
      config.reference.offload,
      updates(config),
      False,
      config.log.expected_prefixes,
      0,  # ages
      0.0,
      True,
      pytest.approx(config.warm_up.lr, 1e-5),
    ),
    update=lambda config: (config.seed, 1, 1, 'learner', 0, 1.0, 0, False),
    layout=lambda config: (
      'padded',
      config.warm_up.micro_rows,
      0,
      0,
      config.data.prompt_buckets,
    ),
    nonfinite_rollouts='learner.nonfinite_rollouts',
  ),
}


def numbers(name, value, config):
  """What a type of another room holds of the config."""
  if name.endswith('.update'):
    return dataclasses.astuple(value)
  if name.endswith('.layout'):
    return (
      value.kind,
      value.micro_rows,
      value.row_completions,
      value.pack_tokens,
      value.prompt_buckets,
    )
  if not name.endswith('.learner'):
    return value
  in_run = name == 'learn.learner'
  peak = config.optim.warmup_steps if in_run else 0
  return (
    *((value.method,) if in_run else ()),
    value.optimizer.on_zero_advantage,
    value.optimizer.with_outward,
    value.placement.offload_moments,
    value.placement.offload_reference,
    value.measuring.coast_steps,
    value.measuring.records,
    value.measuring.expects_prefixes,
    value.measuring.ages,
    value.expert_balance,
    value.compute_all,
    float(value.measuring.learning_rate(peak)),
  )


def fields(specs, prefix=''):
  """Each field of the specs with its value; those of nested specs too."""
  for name, value in specs.items():
    if type(value).__module__ == specs_lib.__name__:
      inner = {
        one.name: getattr(value, one.name) for one in dataclasses.fields(value)
      }
      yield from fields(inner, f'{prefix}{name}.')
    else:
      yield prefix + name, value


@pytest.fixture(scope='module')
def arrived(tmp_path_factory):
  """Three configs, and the fields of the specs that each becomes."""
  folder = tmp_path_factory.mktemp('files')
  found = [configs.config_of(number, folder) for number in range(3)]
  return [(config, dict(fields(made(config)))) for config in found]


def test_each_field_of_a_spec_has_a_row(arrived):
  for _, specs in arrived:
    assert set(specs) == set(ROWS)
  run = {field.name for field in dataclasses.fields(build.Run)}
  assert {name.partition('.')[0] for name in ROWS} <= run


@pytest.mark.parametrize('name', ROWS)
def test_a_field_has_the_value_of_the_config(name, arrived):
  values = set()
  for config, specs in arrived:
    found = numbers(name, specs[name], config)
    assert found == configs.wanted(config, ROWS[name])
    values.add(repr(found))
  # With a single value, a constant in the code would go unnoticed.
  constant = {
    'weights.own', 'warm_up.demonstrations', 'warm_up.learn.method',
    'teacher',
  }  # fmt: skip
  assert (len(values) > 1) != (name in constant), values


def test_a_run_without_a_warm_up_has_no_spec_of_one(arrived):
  config, _ = arrived[0]
  none = dataclasses.replace(config.warm_up, steps=0)
  config = dataclasses.replace(config, warm_up=none)
  assert build_learner.warm_up_spec(config, MODEL, MESH, ends) is None


def test_below_build_nothing_reads_a_config():
  """But what is called with one, and saves it as text."""
  folder = pathlib.Path(grpo_jax.run.__file__).parent
  readers = set()
  for path in folder.rglob('*.py'):
    if path.parent.name == 'build':
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and node.module == 'grpo_jax.config':
        names = {alias.name for alias in node.names}
        if 'Config' in names:
          readers.add(path.name)
  assert readers == {
    'bare.py', 'export.py', 'here.py', 'loop.py', 'policy.py', 'session.py',
    'objects.py', 'records.py', 'workdir.py',
  }  # fmt: skip
