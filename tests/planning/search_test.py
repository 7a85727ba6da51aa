"""Searches for a mesh: what is tried, compiled, ranked and printed."""

import pytest

from grpo_jax.commands import plan as command
from grpo_jax.planning import compiling
from grpo_jax.planning import search
from grpo_jax.planning import topologies
from tests.planning.estimates import config
from tests.planning.estimates import estimate


@pytest.mark.long
def test_what_could_not_be_compiled_is_not_taken_to_fit(monkeypatch):
  failed = compiling.Compiled(error='Check failed: of XLA')
  monkeypatch.setattr(
    compiling, 'compile_all', lambda requests, **_: [failed] * len(requests)
  )
  monkeypatch.setattr(topologies, 'mesh', lambda *_: None)
  found = search.best(config(), topologies.named('v5p:2x2x1'), 1)
  assert len(found) > 1 and not any(one.plan.is_whole for one in found)


@pytest.mark.long
@pytest.mark.parametrize(
  'name, size', [('h100-sxm:1x4', 4), ('h100-sxm:2x8', 16)]
)
def test_a_search_ranks_what_fits_first_and_the_fast_ones_before_others(
  name, size
):
  found = search.best(config(), topologies.named(name), 3)
  meshes = [tuple(one.plan.mesh.values()) for one in found]
  ways = {(size, 1, 1, 1, 1), (1, size, 1, 1, 1), (1, 1, 1, 1, size)}
  assert ways <= set(meshes)
  fits = [one.plan.fits for one in found]
  assert fits == sorted(fits, reverse=True)
  room = found[0].plan.capacity / 1.15
  for group in (
    True,
    False,
  ):  # those that fit with certainty, and those that may
    fitting = [
      float(f'{one.plan.bound_secs:.1e}')
      for one in found
      if one.plan.fits and (one.plan.largest.bytes <= room) == group
    ]
    assert fitting == sorted(fitting)


@pytest.mark.long
def test_a_search_finds_rows_for_all_devices(capsys):
  topology = topologies.named('v5p:8x8x8')
  found = search.best(config(), topology, 1, estimate=True)
  by_rows = {one.config.learner.row_completions for one in found}
  assert by_rows >= {0, 1, 2, 4}
  best = found[0]
  assert (
    best.plan.bound_secs
    < 0.5 * estimate('v5p:8x8x8', **{'mesh.fsdp': 64}).bound_secs
  )
  command.show_ranked(found[:2])
  said = ''.join(capsys.readouterr().out.split())
  flags = command.flags_of(best.config)
  assert f'--config.mesh.fsdp={best.plan.mesh["fsdp"]} ' in flags
  assert flags.replace(' ', '') in said


@pytest.mark.long
def test_a_search_compiles_in_the_order_of_its_estimates(monkeypatch):
  asked = []

  def compile_all(requests, at_once=None, tell=None):
    asked.append(requests[0].config['mesh'])
    room = asked[-1]['fsdp'] >= 8  # the others do not fit
    result = compiling.Compiled(error='' if room else 'full', fits=room)
    return [result] * len(requests)

  monkeypatch.setattr(compiling, 'compile_all', compile_all)
  monkeypatch.setattr(topologies, 'mesh', lambda *_: None)
  found = search.best(config(), topologies.named('v5p:2x2x4'), 2)
  assert [one.plan.fits for one in found[:2]] == [True, True]
  assert len(asked) == len(found)
  assert sum(mesh['fsdp'] >= 8 for mesh in asked) == 2


@pytest.mark.long
def test_a_search_splits_the_experts_of_a_mixture_alone():
  topology = topologies.named('v5p:2x2x2')
  mixture = search.best(config('Qwen3-30B-A3B'), topology, 1, estimate=True)
  assert {one.plan.mesh['expert'] for one in mixture} == {1, 2, 4, 8}
  dense = search.best(config(), topology, 1, estimate=True)
  assert {one.plan.mesh['expert'] for one in dense} == {1}
