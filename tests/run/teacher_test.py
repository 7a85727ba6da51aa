"""Runs that learn from a teacher: a second model, which is another run's."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import updates
from grpo_jax.models import layout as layout_lib
from grpo_jax.models import lora
from grpo_jax.planning import dry_run
from grpo_jax.run import export
from grpo_jax.run import loop
from grpo_jax.run.build import about
from grpo_jax.run.build import build
from grpo_jax.run.build import identity
from grpo_jax.run.build import limits
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import pins
from grpo_jax.run.build import teacher as build_teacher
from tests import learning
from tests import runs
from tests import tiny
from tests.run import export_test
from tests.run.resume_test import After

pytestmark = pytest.mark.usefixtures('shared_programs')

LARGER = {'model.num_layers': 2, 'model.width': 48}
STUDENT = {
  'reward': 'tests.judges:even',
  'learner.method': 'opd',
  'learner.method_kwargs': {},
  'steps': 3,
  'data.heldout': '',
}
LORA = {'lora.rank': 2, 'lora.alpha': 4.0}


@pytest.fixture(scope='module')
def teacher(shared_programs, tmp_path_factory):
  """The workdir of a run of another shape."""
  workdir = tmp_path_factory.mktemp('teacher') / 'run'
  loop.train(larger(), workdir)
  return workdir


def larger(**changes):
  shape = {**LARGER, **runs.WARM, 'steps': 1, 'data.heldout': '', **changes}
  return runs.small(**shape, reward='tests.judges:even')


def student(teacher, **changes):
  return runs.small(**{**STUDENT, 'teacher.path': str(teacher), **changes})


@pytest.fixture(scope='module')
def learned(teacher, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('student') / 'run'
  loop.train(student(teacher), workdir)
  return workdir


def parts_of(config):
  """(run, updater with the teacher, state before the first rollout)."""
  run = build.run(config)
  frozen = build.frozen_params(run)
  taught = build.teacher_params(run, frozen)
  made = build.updater(run, frozen, teacher=taught)
  return run, made, made.compiled.init(build.initial_params(run))


def rollout(seed=0):
  """Completions of ids that the tokenizer of the runs has."""
  made = learning.make_rollout(seed, prompts=4, group=4)
  ids = [[2 + token % 12 for token in prompt[:6]] for prompt in made.prompts]
  tokens = np.where(made.batch.mask, 2 + made.batch.tokens % 12, 0)
  batch = made.batch._replace(tokens=tokens, logp_sampler=made.batch.logp_old)
  return made._replace(batch=batch, prompts=ids)


def taught_logp(config):
  """`logp_teacher` [P,G,T] as the learner finds it."""
  _, made, state = parts_of(config)
  found = updates.credit_rollout(made, made.layout, state, rollout(), 0)
  return np.asarray(found.batch.extras['logp_teacher'])


def plain_logp(model, params, temperature=1.0):
  """The same without the learner: each completion in a row of its own."""
  given = rollout()
  rows = layout_lib.padded_rows(
    given.prompts, given.batch.tokens, given.length, 16
  )
  logp = models.score(model, params, rows, temperature).logp
  return np.asarray(tiny.gather(logp, rows, given.length))


def read_alone(workdir, config):
  """The policy of a run and its model, read as anybody reads it."""
  run = build.run(config)
  found = build_model.source(str(workdir))
  held = build_model.policy(found, run.tokenizer.vocab_size, run.mesh)
  return run.model, held.params


def assert_scores(found, wanted, atol=2e-5):
  valid = rollout().batch.valid[..., None]
  inside = rollout().batch.mask & valid
  assert np.abs(wanted[inside]).max() > 1
  np.testing.assert_allclose(found[inside], wanted[inside], atol=atol)
  assert not found[~inside].any()


def test_a_run_learns_from_a_teacher_of_another_shape(learned):
  rows = runs.records(learned)
  assert [row['step'] for row in rows if 'kl_teacher_k1' in row] == [1, 2, 3]
  for row in rows[-3:]:
    # The advantage is nothing but the gap: on policy its mean is minus k1.
    assert row['advantage_mean'] == pytest.approx(
      -row['kl_teacher_k1'], abs=1e-4
    )
    assert row['kl_teacher_k3'] > 0.01
  step, arrays, host = runs.saved(learned)
  assert step == 3 and len(host['teacher']) > 5
  assert not any('teacher' in name for name in arrays)  # it is read anew


def test_two_runs_are_equal_and_so_is_one_in_two_starts(
  teacher, learned, tmp_path
):
  config = student(teacher)
  ended = loop.train(config, tmp_path / 'again', After(4))
  assert 0 < ended['steps'] < 3
  loop.train(config, tmp_path / 'again')
  runs.assert_equal(learned, tmp_path / 'again')


TOPS = {'learner.method': 'gkd', 'learner.method_kwargs': {'number': 3}}


@pytest.fixture(scope='module')
def learned_tops(teacher, tmp_path_factory):
  """Without a reward that differs: the KL is all there is to learn from."""
  workdir = tmp_path_factory.mktemp('tops') / 'run'
  config = student(teacher, **TOPS, reward='tests.run.teacher_test:nothing')
  loop.train(config, workdir)
  return config, workdir


def nothing(prompt, completion, example):
  return 0.0


def test_a_run_learns_from_the_likeliest_tokens(learned_tops):
  _, workdir = learned_tops
  rows = [row for row in runs.records(workdir) if 'kl_teacher_top' in row]
  assert [row['step'] for row in rows] == [1, 2, 3]
  for row in rows:
    assert 0 < row['kl_teacher_top'] and 0 < row['teacher_top_mass'] < 1
    assert row['grad_norm'] > 0 and not row['reward']
    # A lower bound of what k3 estimates from single tokens.
    assert row['kl_teacher_top'] < 2 * row['kl_teacher_k3']


@pytest.mark.long
def test_two_such_runs_are_equal_and_so_is_one_in_two_starts(
  learned_tops, tmp_path
):
  config, workdir = learned_tops
  ended = loop.train(config, tmp_path / 'again', After(4))
  assert 0 < ended['steps'] < 3
  loop.train(config, tmp_path / 'again')
  runs.assert_equal(workdir, tmp_path / 'again')
  loop.train(config, tmp_path / 'at once')
  runs.assert_equal(workdir, tmp_path / 'at once')


def tops_of(config):
  """The fields of the likeliest tokens, as the learner finds them."""
  _, made, state = parts_of(config)
  found = updates.credit_rollout(made, made.layout, state, rollout(), 0)
  extras = found.batch.extras
  return [np.asarray(extras[f'teacher_top_{name}']) for name in ('ids', 'logp')]


def test_the_likeliest_tokens_are_scored_as_the_sampled_ones(teacher):
  """At the temperature of the sampler, over the ids that the policy draws."""
  hot = {**TOPS, 'sampler.temperature': 0.5}
  ids, top = tops_of(student(teacher, **hot))
  sampled = taught_logp(student(teacher, **hot))
  given = rollout()
  inside = given.batch.mask & given.batch.valid[..., None]
  chosen = (ids == given.batch.tokens[..., None]) & inside[..., None]
  assert chosen.any()
  np.testing.assert_array_equal(
    top[chosen], np.broadcast_to(sampled[..., None], top.shape)[chosen]
  )
  assert np.all(sampled[inside] <= top[inside].max(-1))


@pytest.mark.long
@pytest.mark.parametrize(
  'mesh', [{'data': 4}, {'fsdp': 2, 'tensor': 2}, {'context': 2, 'fsdp': 2}]
)
def test_eight_devices_find_the_same_likeliest_tokens(teacher, mesh):
  mesh = {f'mesh.{name}': size for name, size in mesh.items()}
  changes = {'learner.micro_rows': 0, **TOPS}
  ids, top = tops_of(student(teacher, **changes, **mesh))
  expected = tops_of(student(teacher, **changes))
  inside = rollout().batch.mask & rollout().batch.valid[..., None]
  np.testing.assert_array_equal(ids[inside], expected[0][inside])
  np.testing.assert_allclose(top[inside], expected[1][inside], atol=2e-5)


def test_it_scores_at_the_temperature_of_the_sampler(teacher):
  model, params = read_alone(teacher, larger())
  config = student(teacher, **{'sampler.temperature': 0.5})
  assert_scores(taught_logp(config), plain_logp(model, params, 0.5))


def test_it_never_draws_what_the_policy_never_draws(tmp_path):
  """Files have more rows than tokens; each has a model of its own shape."""
  policy = export_test.pretrained(tmp_path / 'policy')
  other = export_test.pretrained(tmp_path / 'other', num_layers=1)
  opd = {'learner.method': 'opd', 'teacher.path': str(other)}
  run = build.run(export_test.small(policy, **opd))
  assert isinstance(run.model, models.Transformer) and run.teacher
  rows, tokens = run.model.vocab_size, run.tokenizer.vocab_size
  assert rows == tokens + 6
  assert run.teacher.model.unused_ids == run.model.unused_ids != ()
  assert run.teacher.model.config.num_layers == 1 < run.model.config.num_layers


def test_adapters_may_have_a_teacher_of_another_path(teacher):
  config = student(teacher, **LORA)
  run, made, _ = parts_of(config)
  assert run.teacher and not run.teacher.is_base
  assert_scores(taught_logp(config), plain_logp(*read_alone(teacher, larger())))
  assert made.frozen is not None


def test_a_name_of_the_hub_gets_its_commit(teacher):
  config = student(teacher, **{'model.path': 'a', 'teacher.path': 'b'})
  named = lambda one: f'{one.kind}:{one.source.name}@c'
  found = pins.mapped(config, named)
  assert found.teacher.path == 'model:b@c' and found.model.path == 'model:a@c'
  assert found.teacher.dtype == config.teacher.dtype


@pytest.mark.parametrize('layout', ['shared', 'padded', 'packed'])
def test_the_teacher_scores_what_it_scores_alone(teacher, layout):
  wanted = plain_logp(*read_alone(teacher, larger()))
  found = taught_logp(student(teacher, **{'learner.layout': layout}))
  assert_scores(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize(
  'mesh', [{'data': 4}, {'fsdp': 4}, {'fsdp': 2, 'tensor': 2}, {'context': 2}]
)
def test_eight_devices_score_what_one_does(teacher, mesh):
  mesh = {f'mesh.{name}': size for name, size in mesh.items()}
  mesh['mesh.data'] = 8 // int(np.prod([*mesh.values()]))
  if 'mesh.fsdp' not in mesh and 'mesh.context' not in mesh:
    mesh['mesh.data'] = 4
  wanted = plain_logp(*read_alone(teacher, larger()))
  changes = {'learner.micro_rows': 0, **mesh}
  assert_scores(taught_logp(student(teacher, **changes)), wanted)


@pytest.mark.long
def test_a_run_on_eight_devices_learns_from_it(teacher, learned, tmp_path):
  mesh = {'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2}
  config = student(teacher, **mesh, **{'learner.micro_rows': 4, 'steps': 1})
  loop.train(config, tmp_path)
  found, wanted = (
    next(row for row in runs.records(path) if 'loss' in row)
    for path in (tmp_path, learned)
  )
  for name in ('kl_teacher_k1', 'kl_teacher_k3', 'grad_norm'):
    assert found[name] == pytest.approx(wanted[name], rel=1e-3), name


def test_nothing_is_compiled_anew_for_later_rollouts(teacher):
  _, made, state = parts_of(student(teacher))
  layout = made.layout
  before = made.compiled.score_teacher._cache_size()
  for step in range(3):
    ready = updates.credit_rollout(made, layout, state, rollout(step), step)
    state, _ = updates.take_updates(made, state, ready)
    layout = ready.layouts.spec
    if not step:
      first = made.compiled.score_teacher._cache_size()
  assert before <= first <= before + 1
  assert made.compiled.score_teacher._cache_size() == first


def test_a_folder_is_a_teacher_too(teacher, tmp_path):
  folder = tmp_path / 'folder'
  export.convert(str(teacher), folder)
  by_run = taught_logp(student(teacher))
  np.testing.assert_array_equal(taught_logp(student(folder)), by_run)
  config = student(folder, **{'teacher.dtype': 'bfloat16'})
  run, made, _ = parts_of(config)
  sizes = {x.dtype.itemsize for x in jax.tree.leaves(made.teacher)}
  assert sizes == {2, 4} and run.teacher.weights.base_dtype == 'bfloat16'
  rounded = taught_logp(config)
  assert 0 < np.abs(rounded - by_run).max() < 0.1


def test_another_teacher_than_that_of_the_checkpoint_is_refused():
  saved = types.SimpleNamespace(host={'teacher': [1, 2]})
  build_teacher.check_unchanged(saved, [1, 2], 'here')
  for found in ([1, 3], []):
    with pytest.raises(ValueError, match="teacher.path='here' are not those"):
      build_teacher.check_unchanged(saved, found, 'here')
  # A checkpoint from before there were teachers.
  build_teacher.check_unchanged(types.SimpleNamespace(host={}), [], '')


@pytest.mark.long
def test_its_newest_policy_is_the_teacher_and_another_is_refused(
  teacher, tmp_path
):
  mine = tmp_path / 'teacher'
  shutil.copytree(teacher, mine)
  loop.train(student(mine, steps=1), tmp_path / 'run')
  before = taught_logp(student(mine))
  loop.train(larger(steps=2), mine)
  wanted = plain_logp(*read_alone(mine, larger(steps=2)))
  assert np.abs(wanted - before).max() > 1e-4
  assert_scores(taught_logp(student(mine)), wanted)
  with pytest.raises(ValueError, match='not those that this run has learned'):
    loop.train(student(mine, steps=2), tmp_path / 'run')


@pytest.mark.parametrize(
  'base', ['float32', pytest.param('int8', marks=pytest.mark.long)]
)
def test_what_lies_beside_adapters_is_the_teacher_and_is_there_once(
  teacher, tmp_path, base
):
  path = {'model.path': str(teacher)}
  if base != 'float32':  # which no run's weights may be rounded to
    pytest.importorskip('qwix')
    export.convert(str(teacher), tmp_path / 'folder')
    path = {'model.path': str(tmp_path / 'folder')}
  changes = {**LORA, **path, 'lora.base_dtype': base}
  config = student(path['model.path'], **LARGER, **changes)
  run, made, state = parts_of(config)
  leaves = jax.tree.leaves(made.teacher), jax.tree.leaves(made.frozen)
  assert leaves[0] and all(x is y for x, y in zip(*leaves, strict=True))
  assert run.teacher.is_base
  whole = lora.join(state.params, made.frozen)
  wanted = plain_logp(run.model, whole)  # adapters that change nothing yet
  assert_scores(taught_logp(config), wanted)


def test_a_teacher_on_the_host_scores_the_same_bits(teacher):
  config = student(teacher, **{'teacher.offload': True})
  run, made, _ = parts_of(config)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(made.teacher)}
  assert kinds == {'pinned_host'}
  wanted = build.abstract_teacher(run, None)
  for x, y in zip(*map(jax.tree.leaves, (made.teacher, wanted)), strict=True):
    assert x.sharding == y.sharding and x.dtype == y.dtype
  here = taught_logp(student(teacher))
  np.testing.assert_array_equal(taught_logp(config), here)


def test_a_teacher_credits_a_group_of_one():
  alone = {**STUDENT, 'sampler.group': 1}
  build_method.method_of(runs.small(**alone))
  alone['learner.method'] = 'rloo'
  with pytest.raises(ValueError, match='which compares the completions'):
    build_method.method_of(runs.small(**alone))


@pytest.mark.long
def test_a_group_may_be_one_completion(teacher, tmp_path):
  config = student(teacher, **{'sampler.group': 1, 'steps': 1})
  loop.train(config, tmp_path)
  assert runs.records(tmp_path)[-1]['grad_norm'] > 0


def test_rewards_count_if_they_are_asked_for(teacher):
  """Beside the teacher: each has its own coefficient."""

  def advantage(**kwargs):
    config = student(teacher, **{'learner.method_kwargs': kwargs})
    _, made, state = parts_of(config)
    ready = updates.credit_rollout(made, made.layout, state, rollout(), 0)
    return np.asarray(ready.batch.advantage)

  alone = advantage()
  both = advantage(coefficient=0.5, reward_coefficient=2.0)
  given = rollout().batch
  count = given.valid.sum(-1, keepdims=True)
  mean = np.where(given.valid, given.reward, 0).sum(-1, keepdims=True) / count
  owned = given.mask & given.valid[..., None]
  wanted = 2 * np.where(owned, (given.reward - mean)[..., None], 0)
  np.testing.assert_allclose(both, 0.5 * alone + wanted, atol=1e-5)


@pytest.mark.long
def test_the_penalty_is_scored_by_the_teacher(teacher, tmp_path):
  config = student(
    teacher, **{'learner.method': 'tests.run.teacher_test:with_penalty'}
  )
  loop.train(dataclasses.replace(config, steps=1), tmp_path)
  row = runs.records(tmp_path)[-1]
  assert row['kl_teacher'] == pytest.approx(row['kl_teacher_k3'], rel=1e-4)


def with_penalty():
  return losses.chain(losses.methods.rloo(), losses.add_teacher_kl(0.3, 'k3'))


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'teacher.offload': True, 'model.compute_dtype': 'bfloat16'},
    {'teacher.dtype': 'bfloat16', 'model.remat': 'none'},
  ],
)
def test_each_field_of_its_spec_is_that_of_the_config(
  teacher, tmp_path, changes
):
  path = teacher
  if changes:
    path = tmp_path / 'folder'
    export.convert(str(teacher), path)
  config = student(path, **changes)
  run = build.run(config)
  spec, fields = run.teacher, config.teacher
  assert (spec.weights.path, spec.offload) == (fields.path, fields.offload)
  assert (spec.weights.base_dtype, spec.is_base) == (fields.dtype, False)
  shape = spec.model.config
  assert (shape.num_layers, shape.width, shape.lora) == (2, 48, None)
  for name in build_model.COMPUTED:
    assert getattr(shape, name) == getattr(config.model, name), name
  held = run.learn.learner.teacher
  assert held.logical_axes == spec.model.logical_axes
  plain = build.run(runs.small(**{**STUDENT, 'learner.method': 'rloo'}))
  assert plain.teacher is None and plain.learn.learner.teacher is None


def test_the_check_counts_it(teacher, tmp_path):
  found = dry_run.inspect(student(teacher), tmp_path)['memory_gib']
  _, made, _ = parts_of(student(teacher))
  size = sum(x.nbytes for x in jax.tree.leaves(made.teacher))
  assert found['teacher'] == pytest.approx(size / 2**30)
  json.dumps(found)


def test_a_start_names_it():
  lines = about.facts(runs.small(**{'teacher.path': 'here/run'}), 'there')
  assert ['teacher', 'here/run'] in [line.split() for line in lines]
  lines = about.facts(runs.small(), 'there')
  assert not any('teacher' in line for line in lines)


def test_all_hosts_must_have_the_same(teacher):
  files = [name for name in identity.compared(student(teacher))]
  newest = f'the SHA-256 of {teacher}/checkpoints/1/host/metadata'
  assert newest in files and f'the SHA-256 of {teacher}/config.json' in files


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'teacher.path': ''}, "'opd' reads logp_teacher, and config.teacher.path"),
    (
      {'learner.method': 'rloo'},
      "but the method 'rloo' reads no logp_teacher; give a method that does",
    ),
    (
      {**TOPS, 'teacher.path': ''},
      "'gkd' reads teacher_top_logp, and config.teacher.path",
    ),
    (
      {**TOPS, 'learner.method_kwargs': {'number': 99}},
      "'gkd' reads the teacher's 99 likeliest tokens, but the policy has 14",
    ),
    (
      {
        **TOPS,
        'learner.method': 'tests.bad_methods:top_of_none',
        'learner.method_kwargs': {},
      },
      "top_of_none' reads logp_top, but does not say of how many of the",
    ),
    ({'teacher.path': 'tests.own_module:model'}, 'is a model of your own'),
    ({'teacher.path': '/none/here'}, 'There is no /none/here; give a'),
    (
      {'teacher.dtype': 'bfloat16'},
      "config.teacher.dtype='bfloat16' would round the weights of",
    ),
  ],
)
def test_what_cannot_be_is_refused(teacher, tmp_path, changes, said):
  with pytest.raises(ValueError) as caught:
    loop.train(student(teacher, **changes), tmp_path / 'run')
  assert said in str(caught.value)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'field, value', [('offload', True), ('dtype', 'bfloat16')]
)
def test_what_is_there_already_is_neither_moved_nor_cast(field, value):
  base = {'model.path': 'here', 'teacher.path': 'here'}
  wrong = {**base, f'teacher.{field}': value}
  said = rf'teacher.{field}={value!r}, but the teacher is what lies beside'
  with pytest.raises(ValueError, match=said):
    runs.small(**wrong, **LORA)
  runs.small(**wrong)
  runs.small(**base, **LORA)


def test_another_tokenizer_is_refused(teacher, tmp_path):
  """One token whose id is that of another, in the folder of the teacher."""
  folder = tmp_path / 'folder'
  export.convert(str(teacher), folder)
  file = folder / 'tokenizer.json'
  held = json.loads(file.read_text())
  vocab = held['model']['vocab']
  vocab['3'], vocab['4'] = vocab['4'], vocab['3']
  file.write_text(json.dumps(held))
  with pytest.raises(ValueError) as caught:
    build.run(student(folder))
  said = str(caught.value)
  assert '(2 of 14 tokens differ)' in said and "'3'" in said
  assert said.endswith("give one with the policy's tokenizer.")


def test_a_teacher_that_is_too_large_is_refused(teacher, monkeypatch):
  run, made, _ = parts_of(student(teacher))
  size = sum(x.nbytes for x in jax.tree.leaves(made.teacher))
  assert limits._teacher_bytes(run.teacher, run.mesh) == size
  state = limits._state_bytes(run.config, run.model, run.mesh)
  rows = limits._row_bytes(run.config, run.model.config)
  for spare, fits in ((size, True), (size - 1, False)):
    monkeypatch.setattr(limits, '_memory', lambda _, x=spare: state + rows + x)
    if fits:
      build.run(student(teacher))
    else:
      with pytest.raises(ValueError, match='the teacher takes'):
        build.run(student(teacher))


def test_a_row_that_is_too_long_for_it_is_refused(teacher, tmp_path):
  folder = tmp_path / 'folder'
  export.convert(str(teacher), folder)
  file = folder / 'config.json'
  held = json.loads(file.read_text())
  file.write_text(json.dumps({**held, 'max_position_embeddings': 8}))
  with pytest.raises(ValueError, match='was made for 8'):
    build.run(student(folder))
  build.run(student(folder, **{'model.beyond_context': True}))
