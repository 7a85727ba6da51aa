"""Devices that sample and others that learn: their memory, and how many."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from grpo_jax.commands import plan as command
from grpo_jax.engines import handover
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.planning import compiling
from grpo_jax.planning import division
from grpo_jax.planning import dry_run
from grpo_jax.planning import plan as plans
from grpo_jax.planning import search
from grpo_jax.planning import topologies
from grpo_jax.planning.division import Reached
from grpo_jax.planning.plan import Jobs
from grpo_jax.run.build import build
from tests import cli
from tests import runs
from tests.planning import estimates

WIDE = {
  'model.num_layers': 2,
  'model.width': 64,
  'model.num_heads': 8,
  'model.num_kv_heads': 4,
  'model.compute_dtype': 'bfloat16',
  'sampler.prompts': 8,
  'learner.micro_rows': 0,
  'sampler.ahead': 2,
}


def config_of(**changes):
  return runs.small(**{**WIDE, **changes})


def of_topology(config, name='v5e:2x4', jobs=None):
  return plans.plan(config, topologies.named(name), estimate=True, jobs=jobs)


def on_first(tree, mesh):
  """Bytes on the first device of a mesh."""
  first = mesh.devices.flat[0]
  return sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
    if shard.device == first
  )


def divided(own, **changes):
  """A config, and its parts on eight devices, of which the last sample."""
  config = config_of(**changes, **{'generator.devices': own})
  devices = jax.devices()
  mesh = sharding.make_mesh(
    **dataclasses.asdict(config.mesh), devices=devices[:-own]
  )
  return config, build.abstract(config, mesh, devices[-own:])


DIVISIONS = [
  (4, {'mesh.fsdp': 4}),
  (2, {'mesh.fsdp': 2, 'mesh.data': 3, 'sampler.tensor': 2}),
  (6, {'mesh.tensor': 2, 'sampler.tensor': 1}),
  (4, {'mesh.fsdp': 4, 'lora.rank': 2}),
  (1, {}),
]


@pytest.mark.parametrize('own, changes', DIVISIONS)
def test_versions_take_the_bytes_that_they_take(own, changes):
  """Of a + 1 that are there, and of the one that decoding reads."""
  config, parts = divided(own, **changes)
  counted = arithmetic.Arithmetic(parts)
  run = build.run(config)
  frozen = build.frozen_params(run)
  updater = build.updater(run, frozen)
  params = updater.compiled.init(build.initial_params(run)).params
  weights = handover.Put(run.model, params, run.mesh, run.sampling_mesh, frozen)
  for version in range(3):
    weights.publish(params, version)
  read = weights.fetch(0)
  assert on_first(read, run.sampling_mesh) == counted.weights.sampled
  landed = [weights._snapshots[version] for version in range(3)]
  there = {id(x) for x in jax.tree.leaves(read)}
  more = [x for x in jax.tree.leaves(landed) if id(x) not in there]
  assert on_first(more, run.sampling_mesh) == counted.weights.older
  whole = sum(x.nbytes for x in jax.tree.leaves(landed[0]))
  assert whole == counted.weights.published
  # What comes anew is all but what adapters leave alone.
  drawn = on_first(weights.fetch(1), run.sampling_mesh)
  again = {id(x) for x in jax.tree.leaves(weights.fetch(2))}
  kept = [x for x in jax.tree.leaves(read) if id(x) in again]
  if config.lora.rank:
    drawn -= on_first(kept, run.sampling_mesh)
  assert counted.weights.renewed == drawn


@pytest.mark.parametrize(
  'own, changes',
  [*DIVISIONS[:4], (4, {'mesh.fsdp': 4, 'generator.parts': 2})],
)
def test_programs_are_given_the_bytes_that_a_plan_counts(own, changes):
  """Those that draw on their devices, those that learn on the others."""
  config, parts = divided(own, **changes)
  counted, devices = arithmetic.Arithmetic(parts), jax.devices()
  lowerings = compiling.lowerings(parts)
  own_devices = {'prefill': devices[-own:], 'decode': devices[-own:]}
  ids = np.zeros(counted.prompts, np.int32)
  for name in 'prefill', 'decode', 'train_step':
    compiled = lowerings[name]().lowered.compile()
    places = {
      device.id
      for one in jax.tree.leaves(compiled.input_shardings)
      for device in one.device_set
    }
    used = own_devices.get(name, devices[:-own])
    assert places == {device.id for device in used}
    given = counted.arguments(name)
    memory = compiled.memory_analysis()
    room = 4000 if name != 'train_step' else 30 * ids.nbytes * 100
    assert given <= memory.argument_size_in_bytes < given + room
    # All of these lie there by the plan, and nothing of the other side.
    one = plans.plan_program(counted, name, 1, None)
    state = {'parameters', 'moments'}
    drawing = {'older parameters', 'sampler weights'}
    assert state <= one.memory.keys() or name != 'train_step'
    others = drawing | {'cache'} if name == 'train_step' else state
    assert not others & one.memory.keys()
    assert sum(one.memory.values()) >= given


def test_each_side_holds_what_its_own_programs_need():
  config = config_of(**{'mesh.data': -1, 'generator.devices': 4})
  apart = of_topology(config)
  turn = of_topology(config_of(**{'mesh.data': -1, 'sampler.ahead': 0}))
  assert apart.counted.mesh.size == apart.counted.sampling_mesh.size == 4
  for one in apart.side(learns=True):
    assert {'parameters', 'moments'} <= one.memory.keys()
    lacks = {'sampler weights', 'cache', 'older parameters'}
    assert not lacks & one.memory.keys()
  for one in apart.side(learns=False):
    assert 'older parameters' in one.memory
    assert not {'parameters', 'moments', 'reference'} & one.memory.keys()
  assert 'prepare' not in {one.name for one in apart.programs}
  sync = apart.sync
  ends = apart.draw_secs + sync.sampling_secs, apart.learn_secs + sync[2]
  assert apart.bound_secs == pytest.approx(max(ends))
  assert turn.sync is None
  assert turn.bound_secs == pytest.approx(turn.draw_secs + turn.learn_secs)
  # Half as many devices for each.
  secs = {one.name: one.work.flops for one in turn.programs}
  for one in apart.programs:
    if one.name in ('decode', 'train_step'):
      assert one.work.flops == pytest.approx(2 * secs[one.name], rel=0.01)
  decode = [
    one.memory['cache'] for x in (turn, apart) for one in x.programs
    if one.name == 'decode'
  ]  # fmt: skip
  assert decode[1] == 2 * decode[0]


def test_newer_weights_come_beside_those_in_use():
  """In flight; on one device they are read where they lie."""
  found = []
  for updates, own in (('between', 4), ('inflight', 4), ('inflight', 1)):
    config = config_of(
      **{'mesh.data': -1, 'generator.devices': own},
      **{'generator.updates': updates},
    )
    found.append(of_topology(config))
  memory = [
    next(one.memory for one in made.programs if one.name == 'decode')
    for made in found
  ]
  between, inflight, alone = memory
  assert 'newer weights' not in between and 'newer weights' not in alone
  assert inflight['newer weights'] == inflight['sampler weights']
  ratio = inflight['older parameters'] / between['older parameters']
  assert ratio == 2 / 3  # of three that rollouts are drawn by
  assert alone['older parameters'] == 2 * alone['sampler weights']


def test_a_job_has_weights_and_caches_and_the_learner_the_versions():
  changes = {'mesh.data': -1, 'sampler.prompts': 16}
  topology = topologies.named('v5e:2x4')
  made = of_topology(config_of(**changes), jobs=Jobs(2, topology))
  turn = of_topology(config_of(**changes, **{'sampler.ahead': 0}))
  weights = made.counted.weights
  for one in made.side(learns=True):
    # Each device holds an eighth of each version, but for what is not cut.
    part = 3 * weights.published / 8
    assert one.memory['older parameters'] == pytest.approx(part, rel=0.02)
    assert 'sampler weights' not in one.memory
  by_name = {one.name: one for one in made.programs}
  in_turn = {one.name: one for one in turn.programs}
  for one in made.side(learns=False):
    state = {'parameters', 'moments', 'older parameters'}
    assert not state & one.memory.keys()
  # Half of the prompts for each.
  cache = by_name['decode'].memory['cache']
  assert made.drawing.prompts == 8
  assert cache == in_turn['decode'].memory['cache'] / 2
  train = in_turn['train_step'].work.flops
  assert by_name['train_step'].work.flops == train
  assert made.sync.link == 'dcn' and made.sync.learning_secs == 0
  assert made.chips == 24


def test_programs_are_compiled_for_the_side_that_runs_them(monkeypatch):
  asked = []

  def compile_all(requests, tell=None):
    asked.extend(requests)
    return [compiling.Compiled(error='full', fits=False)] * len(requests)

  monkeypatch.setattr(compiling, 'compile_all', compile_all)
  monkeypatch.setattr(topologies, 'mesh', lambda *_: None)
  config = config_of(**{'mesh.data': -1, 'mesh.slices': 2})
  job, topology = (topologies.named('v5e:2x4', n) for n in (1, 2))
  made = plans.compiled(
    plans.plan(config, topology, estimate=True, jobs=Jobs(2, job))
  )
  assert all(one.is_refused for one in made.programs)
  for one, request in zip(made.programs, asked, strict=True):
    learns = one in made.side(learns=True)
    assert (request.slices, request.program) == (1 + learns, one.name)
    assert request.config['sampler']['prompts'] == (8 if learns else 4)
    assert request.config['mesh']['slices'] == 1 + learns


@pytest.mark.parametrize('number, parts, rounds', [(2, 2, 1), (3, 4, 2)])
def test_jobs_draw_equal_parts_in_rounds(number, parts, rounds):
  config = config_of(**{'mesh.data': -1})
  jobs = Jobs(number, topologies.named('v5e:2x4'))
  made = of_topology(config, jobs=jobs)
  assert plans.parts_for(config, number) == parts
  assert made.drawing.prompts == 8 / parts
  calls = {one.name: one.calls for one in made.side(learns=False)}
  assert calls['decode'] == rounds


def test_a_run_that_waits_for_jobs_is_planned_with_one():
  config = config_of(**{'mesh.data': -1, 'generator.listen': '127.0.0.1:8470'})
  made = of_topology(config)
  given = of_topology(
    config_of(**{'mesh.data': -1}), jobs=Jobs(1, topologies.named('v5e:2x4'))
  )
  assert made.jobs == given.jobs
  assert [one.memory for one in made.programs] == [
    one.memory for one in given.programs
  ]


def test_parts_are_drawn_one_after_another():
  whole, halves = (
    of_topology(config_of(**{'mesh.data': -1, 'generator.devices': 4, **more}))
    for more in ({}, {'generator.parts': 2})
  )
  decode = [
    next(one for one in made.programs if one.name == 'decode')
    for made in (whole, halves)
  ]
  assert [one.calls for one in decode] == [1, 2]
  flops = [one.work.flops * one.calls for one in decode]
  assert flops[0] == flops[1]
  assert decode[1].memory['cache'] == decode[0].memory['cache'] / 2


def test_experts_lie_on_the_mesh_of_whoever_samples():
  shape = {
    'model.path': str(estimates.SHAPES / 'Qwen3-30B-A3B'),
    'mesh.expert': 4,
    'mesh.data': 1,
    'sampler.ahead': 1,
  }
  four, two, in_turn, in_pair = (
    estimates.estimate(name, 'Qwen3-30B-A3B', **{**shape, **more}).counted
    for name, more in (
      ('v5e:2x4', {'generator.devices': 4}),
      ('v5e:2x4', {'generator.devices': 2}),
      ('v5p:2x2x1', {'sampler.ahead': 0}),
      ('v5e:1x2', {'sampler.ahead': 0, 'mesh.expert': 2}),
    )
  )
  assert [one.sampling_mesh.shape['expert'] for one in (four, two)] == [4, 2]
  assert four.mesh.shape['expert'] == two.mesh.shape['expert'] == 4
  for name in 'decode', 'prefill':
    assert four.memory(name) == in_turn.memory(name)
    assert four.work(name) == in_turn.work(name)
    assert two.memory(name) == in_pair.memory(name)
    assert two.work(name) == in_pair.work(name)
  # A token of each device: the experts that two choose are read, not four.
  reads = two._read(1, draws=True), in_pair._read(1, draws=True)
  assert reads[0] == reads[1] == in_pair._read(1) < two._read(9, draws=True)
  # But the router, which each device has.
  ratio = two.weights.sampled_experts / four.weights.sampled_experts
  assert ratio == pytest.approx(2, rel=0.01)
  experts = [one.memory('decode')['experts'] for one in (four, two)]
  weights = four.weights, two.weights
  assert experts == [one.sampled_experts for one in weights]
  # On half as many devices as many tokens choose, and twice as many stay.
  for one, shards in (four, 4), (two, 2):
    assert one._experts_split(one.sampling_mesh) == shards
    sent = one._activations_sent(3, mesh=one.sampling_mesh).ici_bytes
    reached = shards * (1 - (1 - 1 / shards) ** 8)
    each = 48 * 3 * 2048 * 2 * 2 * reached * (shards - 1) / shards
    assert sent == pytest.approx(each)


LONG = pytest.mark.long


@LONG
def test_a_division_is_as_fast_as_the_slower_side():
  found = division.divide(
    config_of(), topologies.named('v5e:2x4'), Reached(0.5, 0.25)
  )
  assert {one.sampling for one in found} == {*range(8)}
  ranked = [(not one.plan.fits, one.step.secs) for one in found]
  assert ranked == sorted(ranked)
  for one in found:
    assert one.draw_secs == pytest.approx(2 * one.plan.draw_secs)
    assert one.learn_secs == pytest.approx(4 * one.plan.learn_secs)
    both = one.draw_secs, one.learn_secs
    if not one.sampling:
      assert one.waits == '' and one.step.secs == pytest.approx(sum(both))
      assert one.config.sampler.ahead == 0
      continue
    sync = one.plan.sync
    sides = both[0] + sync.sampling_secs, both[1] + sync.learning_secs
    assert one.step.secs == pytest.approx(max(sides)) and sync.secs > 0
    slower = 'learning' if sides[0] > sides[1] else 'sampling'
    assert one.waits == slower
    assert one.waits_secs == pytest.approx(max(sides) - min(sides))
    assert one.config.sampler.ahead == 2
    number = math.prod(one.plan.mesh.values())
    assert number + one.sampling == 8
    tensor = one.plan.counted.sampling_mesh.shape['tensor']
    assert tensor == one.config.sampler.tensor
  # More that sample draw faster, and fewer learn.
  by_number = {one.sampling: one for one in found}
  assert by_number[6].draw_secs < by_number[2].draw_secs
  assert by_number[6].learn_secs > by_number[2].learn_secs


@pytest.mark.parametrize(
  'name, slices, each, learners',
  [
    pytest.param('v5e:1x2', 3, 2, ['v5e:1x2'] * 3, id='slices'),
    pytest.param(
      'h100-sxm:3x1', 1, 1, [f'h100-sxm:{n}x1' for n in (3, 2, 1)], id='nodes'
    ),
  ],
)
def test_of_several_groups_whole_ones_sample(name, slices, each, learners):
  topology = topologies.named(name, slices)
  found = division.divide(config_of(), topology)
  by_jobs = {one.jobs: one for one in found}
  assert [*sorted(by_jobs)] == [0, 1, 2]
  for jobs, one in by_jobs.items():
    assert one.sampling == jobs * each
    assert one.config.generator.devices == 0
    made = one.plan
    assert made.topology.name == learners[jobs]
    assert math.prod(made.mesh.values()) == (3 - jobs) * each
    if slices > 1:
      assert one.config.mesh.slices == made.topology.slices == 3 - jobs
    if jobs:
      assert made.jobs.topology.number == each
      assert one.config.sampler.ahead == 2
      flags = command.flags_of_division(one)
      assert '--config.generator.listen=HOST:PORT' in flags
      assert f'--config.generator.parts={jobs}' in flags


def test_one_slice_of_several_hosts_is_not_cut():
  topology = topologies.named('v5p:2x2x2')
  assert topology.hosts == 2
  found = division.divide(config_of(), topology)
  assert [one.sampling for one in found] == [0]
  assert 'one slice of 2 hosts, which is not cut' in division.indivisible(
    topology
  )
  assert not division.indivisible(topologies.named('v5e:2x4'))
  assert not division.indivisible(topologies.named('v5p:2x2x2', 2))
  assert not division.indivisible(topologies.named('h100-sxm:2x8'))
  config = config_of(**{'generator.devices': 2})
  with pytest.raises(ValueError, match='has 2 hosts, .*; give 0, and --gen'):
    of_topology(config, 'v5p:2x2x2')


def test_one_device_may_draw_ahead():
  found = division.divide(config_of(), topologies.named('h100-sxm:1'))
  assert {one.config.sampler.ahead for one in found} == {0, 2}
  turn, ahead = sorted(found, key=lambda one: one.config.sampler.ahead)
  # Two threads share its speed, and it needs more memory.
  assert turn.step.secs == ahead.step.secs
  assert turn.plan.largest.bytes < ahead.plan.largest.bytes
  assert 'one device' in division.indivisible(turn.plan.topology)


def test_a_search_leaves_devices_to_those_that_sample():
  config = config_of(**{'generator.devices': 1})
  found = search.best(config, topologies.named('v5e:2x2'), 1, estimate=True)
  numbers = {math.prod(one.plan.mesh.values()) for one in found}
  assert numbers == {3}


def test_a_plan_says_who_waits(capsys):
  config = config_of(**{'mesh.data': -1, 'generator.devices': 4})
  made = of_topology(config)
  command.show(made)
  said = ' '.join(capsys.readouterr().out.split())
  assert 'which learn; 4 others sample, mesh data 4' in said
  assert 'A device that learns needs' in said
  assert 'GiB and goes over ICI, which takes' in said
  step = made.step()
  who = 'sampling' if step.sampling_waits > step.learning_waits else 'learning'
  assert f'; {who} waits for' in said
  told = plans.to_json(made)
  assert told['sampling_waits_secs'] == step.sampling_waits
  assert told['sync']['link'] == 'ici' and told['sync']['learning_secs'] > 0
  advice = [one for one in told['waste'] if 'Idle' in one]
  assert not advice
  turn = of_topology(config_of(**{'mesh.data': -1, 'sampler.ahead': 0}))
  assert plans.to_json(turn)['sync'] is None


def test_a_side_that_waits_long_is_advised_to_have_fewer_devices():
  config = config_of(**{'mesh.data': -1})
  said = [
    ' '.join(
      plans.advice(
        of_topology(
          dataclasses.replace(
            config,
            generator=dataclasses.replace(config.generator, devices=own),
          )
        )
      )
    )
    for own in (4, 7)
  ]
  assert 'Sampling waits for learning for' in said[1]
  assert 'give learning more of the devices; --split tries all' in said[1]


def test_a_network_that_is_not_in_the_table_is_told(capsys):
  made = of_topology(
    config_of(**{'mesh.data': -1}),
    'h100-pcie:2',
    Jobs(1, topologies.named('h100-pcie:2')),
  )
  command.show(made)
  said = ' '.join(capsys.readouterr().out.split())
  assert 'hosts, whose speed is not in the table of chips' in said
  assert '1 x h100-pcie:2 sample' in said
  assert plans.to_json(made)['sync']['sampling_secs'] is None


@LONG
def test_the_command_says_how_to_divide():
  done = cli.command(
    'plan', cli.SMALL, '--topology=v5e:1x2', '--split', '--json'
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert {one['sampling_devices'] for one in found} == {0, 1}
  for one in found:
    flag = f'--config.generator.devices={one["sampling_devices"]}'
    assert flag in one['flags']
    assert (one['sync'] is None) == (one['sampling_devices'] == 0)


def test_divisions_are_printed_with_their_waits(capsys):
  topology, reached = topologies.named('v5e:1x2'), Reached(0.25, 0.125)
  found = division.divide(config_of(), topology, reached)
  command.show_divisions(found, reached, topology)
  printed = capsys.readouterr().out
  assert max(map(len, printed.splitlines())) <= 80
  said = ' '.join(printed.split())
  assert 'sampling is assumed to reach 25% and learning 12% (--reached)' in said
  assert '2 in turn' in said and '1 of 2' in said
  waiting = next(one for one in found if one.sampling)
  assert waiting.waits and f'{waiting.waits} ' in said
  flags = command.flags_of_division(found[0])
  assert flags.replace(' ', '') in said.replace(' ', '')
  one = found[0]
  both = one.draw_secs * 0.25, one.learn_secs * 0.125
  assert both == pytest.approx((one.plan.draw_secs, one.plan.learn_secs))


@pytest.mark.parametrize('typed', ['0.5', '0,1', '0.5,2', 'a,b', '0.5,0.5,0.5'])
def test_shares_that_are_none_are_refused(typed):
  with pytest.raises(ValueError, match='are no two shares; give numbers'):
    command._reached(typed)
  assert command._reached('0.25,1') == Reached(0.25, 1.0)


def test_more_devices_than_there_are_are_refused():
  config = config_of(**{'generator.devices': 8})
  with pytest.raises(ValueError, match='has 8 devices, .*; give at most 7'):
    of_topology(config)


@pytest.mark.parametrize(
  'changes, number, said',
  [
    ({'generator.devices': 4}, 1, 'generator.devices=4 and 1 jobs .* give one'),
    ({}, 9, '8 prompts, and 9 jobs .*; give at most 8 jobs'),
    ({'mesh.data': 3, 'sampler.tensor': 3}, 1, '8 devices .* and 3 shards'),
  ],
)
def test_jobs_that_could_not_draw_are_refused(changes, number, said):
  config = config_of(**{'mesh.data': 1, **changes})
  with pytest.raises(ValueError, match=said):
    of_topology(config, jobs=Jobs(number, topologies.named('v5e:2x4')))


@pytest.mark.parametrize(
  'flags, said',
  [
    (('--generators=-1',), '--generators=-1; give how many'),
    (('--generators=1', '--split'), 'were given together'),
    (('--search=1', '--split'), 'were given together'),
  ],
)
def test_flags_that_do_not_go_together_are_refused(flags, said):
  done = cli.command('plan', cli.SMALL, '--topology=v5e:1x2', *flags)
  assert done.returncode == 2 and said in done.stderr


def test_a_check_of_a_divided_run_samples_on_its_devices(tmp_path):
  config = config_of(**{'mesh.data': 4, 'generator.devices': 4})
  report = dry_run.inspect(config, tmp_path / 'run')
  assert report['shapes']['devices'] == '4 x cpu'
  assert report['shapes']['devices that sample'] == '4 x cpu'
  _, parts = divided(4, **{'mesh.data': 4})
  older = arithmetic.count_weights(parts).older
  told = report['memory_gib']['older parameters (where others sample)']
  assert told * 2**30 == older
  assert len(report['first_rollout']['completions']) == 3
