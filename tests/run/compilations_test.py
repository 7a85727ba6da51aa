"""A run compiles in its first rollouts; later it says so, and why."""

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.hosts import stop_signal
from grpo_jax.models import stack
from grpo_jax.run import loop
from grpo_jax.run import session as session_lib
from grpo_jax.run import watching
from grpo_jax.run.build import method as build_method
from tests import runs
from tests.compilations import compiled_programs

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.fixture
def watch(monkeypatch):
  monkeypatch.setattr(watching, '_LEAST_SECS', 0.0)
  return watching.Compilations()


def compile_something():
  jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()


def test_a_late_compilation_names_what_changed(watch):
  shapes = {'layout': 'shared', 'completion positions': 32}
  for width in (32, 64, 32):
    compile_something()
    assert watch.warning({**shapes, 'completion positions': width}) == ''
  compile_something()
  said = watch.warning({**shapes, 'completion positions': 128})
  assert 'completion positions 128 (before: 32, 64)' in said
  assert 'layout' not in said and 'data.completion_buckets' in said
  compile_something()
  said = watch.warning(shapes)
  assert said.endswith('compiling, in a program other than the update.')
  compile_something()
  said = watch.warning({**shapes, 'layout': 'packed'})
  assert said.endswith('new shapes: layout packed (before: shared).')


def test_short_ones_are_not_worth_a_word():
  watch = watching.Compilations()
  for _ in range(5):
    compile_something()
    assert watch.warning({}) == ''


@pytest.mark.long
def test_a_run_that_goes_on_keeps_the_layout_of_its_first_rollout(
  tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    patch.setattr(stack, '_WORTHWHILE', 1e9)  # 'auto' takes packed rows
    loop.train(runs.small(steps=1, **{'data.heldout': ''}), tmp_path)
  _, _, host = runs.saved(tmp_path)

  def spec(**changes):
    config = runs.small(steps=1, **{'data.heldout': ''}, **changes)
    stop = stop_signal.Stop()
    start = session_lib.Start(config, tmp_path, stop)
    with session_lib.opened(start) as (session, progress):
      watched = session.compilations
      assert isinstance(watched, watching.Compilations)
      return progress.layout

  kept = spec()
  assert kept.kind == 'packed'
  assert kept.row_slots == host['layout']['row_slots'] > 0
  # Rows of another width hold another number of completions.
  wider = spec(**{'learner.pack_tokens': 64})
  assert (wider.kind, wider.row_slots, wider.pack_tokens) == ('auto', 0, 64)
  assert spec(**{'learner.layout': 'shared'}).row_slots == 0


@pytest.mark.long
def test_a_first_rollout_compiles_whole_programs_and_no_single_operations(
  own_programs, tmp_path
):
  jax.clear_caches()  # of other tests; what is read from the disk counts too
  config = runs.small(steps=1, **{'data.heldout': ''})
  with compiled_programs() as names:
    loop.train(config, tmp_path)
  once = 'drawn', 'init', '_fingerprints', 'credit', 'train_step'
  assert [name for name in once if names.count(name) != 1] == []
  sampling = {'sampler_params', 'prefill', 'decode', 'regroup'}
  # A zero of the optimizer, and a copy that one call of the updater makes.
  small = {'convert_element_type', 'copy'}
  assert set(names) <= {*once} | sampling | small


def test_checking_a_method_compiles_nothing():
  # A group of no other test, whose zeros JAX has no programs for.
  config = runs.small(**{'sampler.group': 23})
  with compiled_programs() as names:
    build_method.method_of(config)
  assert names == []
