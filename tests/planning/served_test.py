"""Plans of runs whose rollouts others draw: nothing of a sampler is counted."""

import types

import pytest

from grpo_jax import models
from grpo_jax.commands import plan as command
from grpo_jax.hosts import stop_signal
from grpo_jax.mesh import sharding
from grpo_jax.planning import compiling
from grpo_jax.planning import division
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.run import session
from grpo_jax.run.build import build
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from tests import refusals_test
from tests import runs
from tests.planning import estimates
from tests.planning.estimates import estimate

SERVED = {'engine.kind': 'http', 'engine.urls': ('http://a:1', 'http://b:2')}
PLAYED = {
  'environment.name': 'tests.run.environments_test:Guess',
  'data.chat': True,
  'environment.max_turns': 3,
  'sampler.max_rows': 64,
}
AHEAD = {'sampler.ahead': 2, 'name': 'v5e:1x1'}
OF_SAMPLER = {'sampler weights', 'cache', 'cache of admitted prompts'}


@pytest.mark.parametrize('more', [{}, AHEAD, {'mesh.fsdp': 8}])
def test_only_what_learns_is_counted(more):
  alone, made = estimate(**more), estimate(**SERVED, **more)
  names = {one.name for one in made.programs}
  assert names and names <= {*plans.LEARNING}
  assert names == {one.name for one in alone.side(learns=True)}
  before = {one.name: one for one in alone.programs}
  for one in made.programs:
    assert not OF_SAMPLER & {*one.memory}
    assert one.work == before[one.name].work
    rest = dict(before[one.name].memory)
    for part in (*OF_SAMPLER, 'older parameters'):
      rest.pop(part, None)
    found = {k: v for k, v in one.memory.items() if k != 'older parameters'}
    assert found == rest
  assert made.draw_secs == 0 < made.learn_secs == alone.learn_secs
  assert made.bound_secs == made.learn_secs
  assert made.sync is None


@pytest.mark.parametrize('ahead', [0, 1, 3])
def test_versions_that_a_checkpoint_needs_are_copies_of_the_learners(ahead):
  made = estimate('v5e:1x1', **SERVED, **{'sampler.ahead': ahead})
  (train,) = (one for one in made.programs if one.name == 'train_step')
  copies = (ahead + 1) * made.counted.weights.trained if ahead else 0
  assert train.memory.get('older parameters', 0) == copies


def test_rows_of_episodes_are_elsewhere():
  alone = estimate(**PLAYED)
  assert {'read', 'decode'} <= {one.name for one in alone.programs}
  assert alone.counted.parked > 0
  made = estimate(**PLAYED, **SERVED)
  assert {one.name for one in made.programs} <= {*plans.LEARNING}
  assert made.counted.parked == 0


def test_what_servers_do_is_not_lowered():
  config = runs.small(**SERVED)
  parts = build.abstract(config, sharding.make_mesh())
  assert {*compiling.lowerings(parts)} == {'credit', 'train_step'}


def test_people_are_told_what_is_not_in_the_bound(capsys):
  made = estimate(**SERVED)
  command.show(made)
  said = ' '.join(capsys.readouterr().out.split())
  assert ', which learn; 2 servers sample;' in said
  assert 'What servers need to sample (config.engine.urls), and for' in said
  assert 'Sampling' not in said and 'sampler weights' not in said
  assert command.to_json(made)['servers'] == 2
  command.show(estimate(**{**SERVED, 'engine.urls': SERVED['engine.urls'][:1]}))
  assert ', which learn; a server samples;' in capsys.readouterr().out
  command.show(estimate())
  assert 'servers' not in capsys.readouterr().out
  assert command.to_json(estimate())['servers'] == 0


def test_copies_of_the_sampler_waste_nothing():
  few = {'sampler.prompts': 2, 'mesh.tensor': 8}
  assert any('Sampling' in text for text in plans.wasted(estimate(**few)))
  found = plans.wasted(estimate(**few, **SERVED))
  assert found and not any('Sampling' in text for text in found)
  assert all('The learner' in text or 'data=-1' in text for text in found)


def test_servers_leave_nothing_to_divide():
  topology = topologies.named('v5p:2x2x1')
  config = estimates.config(**SERVED)
  with pytest.raises(ValueError, match='leave --split and --generators out'):
    division.divide(config, topology)
  jobs = plans.Jobs(1, topology)
  with pytest.raises(ValueError, match='leave --split and --generators out'):
    plans.plan(config, topology, estimate=True, jobs=jobs)


@pytest.mark.quick
@pytest.mark.parametrize(
  'fields',
  [
    {'data.prompt_buckets': (2**31 - 1,)},
    {
      'environment.name': 'any',
      'data.chat': True,
      'data.completion_buckets': (2**20,),
      'sampler.max_tokens': 5,
      'sampler.prompts': 2**12,
    },
  ],
)
def test_rows_that_are_drawn_elsewhere_need_no_memory_here(fields):
  fields = {
    'data.prompt_buckets': (6,), 'data.completion_buckets': (5,), **fields
  }  # fmt: skip
  config = refusals_test.with_fields(fields)
  model = models.Transformer(refusals_test.SHAPE)
  mesh = sharding.make_mesh()
  with pytest.raises(ValueError, match='needs more memory'):
    limits.check_memory(config, model, mesh)
  limits.check_memory(config, model, mesh, draws=False)


def checked(config, monkeypatch, **options):
  """Whether memory is checked for rows that are drawn here; and the run."""
  seen = []
  monkeypatch.setattr(
    limits,
    'check_memory',
    lambda config, model, mesh, teacher=None, draws=True: seen.append(draws),
  )
  run = build.run(config, **options)
  if config.engine.kind == 'http':
    run.engine.versions.close()  # its folder
  return seen, run


def test_a_learner_for_which_jobs_draw_has_no_engine(monkeypatch):
  changes = {'generator.listen': '127.0.0.1:8470'}
  seen, run = checked(runs.small(**changes), monkeypatch, draws=False)
  assert seen == [False] and not hasattr(run.engine, 'load')
  assert build.example(run).batch.mask.any()
  seen, run = checked(runs.small(**changes), monkeypatch)
  assert seen == [True] and run.engine.max_rows


@pytest.mark.parametrize('replays', [False, True])
def test_a_start_says_who_draws(replays, tmp_path, monkeypatch):
  """A replay answers held-out problems itself, whoever drew before."""
  seen = []

  def build_run(config, objects, shares, draws):
    seen.append(draws)
    raise ZeroDivisionError

  monkeypatch.setattr(build, 'run', build_run)
  monkeypatch.setattr(session.replay_lib, 'folder', lambda path: path)
  for changes in ({}, {'generator.listen': '127.0.0.1:8470'}):
    start = session.Start(
      runs.small(**changes), tmp_path, stop_signal.Stop(),
      replay=tmp_path if replays else None,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError), session.opened(start):
      pass
  assert seen == [True, replays]


def test_a_teacher_is_counted_beside_the_same_rows(tmp_path, monkeypatch):
  teacher = {
    'learner.method': 'opd',
    'learner.method_kwargs': {},
    'teacher.path': str(tmp_path),
  }
  weights = build_model.weights_spec(runs.small(), None)

  def spec(config, method, model, *_):
    return types.SimpleNamespace(weights=weights, model=model, is_base=True)

  monkeypatch.setattr(build.build_teacher, 'teacher_spec', spec)
  for changes, draws in ((SERVED, False), ({}, True)):
    changes = {**teacher, **changes}
    seen, _ = checked(runs.small(**changes), monkeypatch)
    assert seen == [draws, draws]


def test_who_draws_needs_memory_for_rows(monkeypatch):
  seen, _ = checked(runs.small(), monkeypatch)
  assert seen == [True]
  seen, run = checked(runs.small(**SERVED), monkeypatch)
  assert seen == [False] and hasattr(run.engine, 'versions')
