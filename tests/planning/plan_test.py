"""Plans of runs: verdicts, memory, work, bounds and advice."""

import json

import pytest

from grpo_jax.planning import compiling
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.planning.hlo import Collective
from grpo_jax.planning.topologies import GIB
from grpo_jax.run.build import model as build_model
from tests.planning.estimates import SHAPES
from tests.planning.estimates import estimate


@pytest.mark.quick
def test_what_fits_and_what_does_not():
  assert estimate(**{'mesh.fsdp': 64}).fits
  assert estimate('v5e:16x16', **{'mesh.fsdp': 64, 'mesh.tensor': 4}).fits
  small = estimate('v5e:2x4', **{'mesh.fsdp': 8})
  assert not small.fits
  assert small.largest.bytes > small.capacity == 15.75 * GIB


@pytest.mark.parametrize(
  'data, fsdp, tensor',
  [(d, 8 // d // t, t) for t in (1, 2, 4) for d in (1, 2) if d * t <= 8],
)
def test_no_mesh_of_eight_chips_has_room_for_7b(data, fsdp, tensor):
  """16 completions; `tests.planning.by_hand` asks the compiler."""
  sizes = {'mesh.data': data, 'mesh.fsdp': fsdp, 'mesh.tensor': tensor}
  few = {'sampler.prompts': 16 // 2, 'sampler.group': 2}
  made = estimate('v5e:2x4', **sizes, **few)
  assert made.counted.weights.number == pytest.approx(7.6e9, rel=0.01)
  assert not made.fits


def test_of_a_gpu_jax_takes_a_share(monkeypatch):
  name = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
  monkeypatch.delenv(name, raising=False)
  topology = topologies.named('h100-sxm:8')
  assert topology.memory_bytes == 60 * GIB
  monkeypatch.setenv(name, '.9')
  assert topology.memory_bytes == 72 * GIB
  for wrong in ('much', '0', '1.5', '-1', 'nan'):
    monkeypatch.setenv(name, wrong)
    with pytest.raises(ValueError, match=name):
      topology.memory_bytes  # noqa: B018


@pytest.mark.parametrize(
  'axis, falls', [('mesh.fsdp', 'parameters'), ('mesh.tensor', 'cache')]
)
def test_more_devices_need_less_of_each(axis, falls):
  plans = [
    estimate(name, **{axis: size, 'mesh.data': 4})
    for name, size in (('v5p:2x2x1', 1), ('v5p:2x2x4', 4))
  ]
  one, four = (
    next(one for one in made.programs if falls in one.memory) for made in plans
  )
  assert four.memory[falls] == pytest.approx(one.memory[falls] / 4, rel=0.01)


def test_slices_send_gradients_and_nothing_else():
  alone = estimate(**{'mesh.fsdp': 64, 'mesh.data': 1})
  two = estimate(slices=2, **{'mesh.fsdp': 64, 'mesh.data': 1})
  assert all(one.work.dcn_bytes == 0 for one in alone.programs)
  sent = {one.name: one.work.dcn_bytes for one in two.programs}
  trained = two.counted.weights.trained
  assert sent.pop('train_step') == trained  # 2 (n - 1) / n of it, n = 2
  assert not any(sent.values())


def test_what_crosses_nodes_of_gpus_is_told_apart():
  within = estimate('h100-sxm:2x8', **{'mesh.fsdp': 8, 'mesh.data': 2})
  across = estimate('h100-sxm:2x8', **{'mesh.fsdp': 16, 'mesh.data': 1})
  near, far = (
    next(one.work for one in made.programs if one.name == 'train_step')
    for made in (within, across)
  )
  trained = within.counted.weights.trained
  # Of gradients half is summed with one other node: 2 (n - 1) / n of it.
  assert near.dcn_bytes == trained
  # Half of all weights lie on the other node, and eight devices fetch them.
  weights = across.counted.weights
  assert weights.fetched == pytest.approx(weights.gathered, rel=1e-4)
  # But for the embedding, which is looked up where it lies.
  gathered = 2 * across.counted.rows.micro * (weights.fetched - weights.table)
  # Biases are on all devices, and summed as such.
  kept = weights.trained - weights.scattered
  summed = 16 * weights.scattered + 2 * kept
  assert 0 < kept < 1e-3 * weights.trained
  assert far.dcn_bytes == (gathered + summed) / 2 / 8


def test_what_is_not_split_is_not_gathered():
  """A width of 896 is not divided by 256, so every device has all weights."""
  made = estimate('v5e:16x16', 'Qwen2.5-0.5B', **{'mesh.fsdp': 256})
  weights = made.counted.weights
  assert weights.fetched == weights.scattered == 0
  assert weights.trained == pytest.approx(4 * weights.number, rel=0.001)
  sent = {one.name: one.work.ici_bytes for one in made.programs}
  assert sent['prepare'] == 0
  assert sent['train_step'] == 2 * weights.trained * 255 / 256


@pytest.mark.parametrize('remat, sums', [('none', 4), ('layer', 5)])
def test_activations_are_summed_forwards_and_backwards(remat, sums):
  """28 heads are not divided by 8, so that then the MLP alone is summed."""
  changes = {'mesh.tensor': 4, 'mesh.data': 16, 'model.remat': remat}
  made = estimate(**changes).counted
  token = 3584 * 2 * 28  # bytes in bfloat16, of all layers
  found = made._activations_sent(10, learns=True).ici_bytes
  assert found == sums * 10 * token * 2 * 3 / 4
  assert made._activations_sent(10).ici_bytes == 2 * 10 * token * 2 * 3 / 4
  wide = estimate(**changes | {'mesh.tensor': 8, 'mesh.data': 8}).counted
  found = wide._activations_sent(10, learns=True).ici_bytes
  assert found == 2 * 10 * token * 2 * 7 / 8


@pytest.mark.long
def test_a_mixture_may_begin_with_a_dense_layer(tmp_path):
  shape = json.loads((SHAPES / 'Qwen3-30B-A3B' / 'config.json').read_text())
  shape['mlp_only_layers'] = [0]
  (tmp_path / 'config.json').write_text(json.dumps(shape))
  made = estimate(
    'v5p:4x4x4',
    **{
      'model.path': str(tmp_path),
      'mesh.expert': 8,
      'mesh.fsdp': 8,
      'mesh.data': 1,
      'learner.epochs': 2,
    },
  )
  assert made.fits and {one.name for one in made.programs} >= {'score_all'}
  one_less = made.counted._activations_sent(1).ici_bytes
  assert one_less == pytest.approx(47 * 2048 * 2 * 2 * 7 * (1 - (7 / 8) ** 8))


def test_prompts_that_fill_no_start_cost_what_they_take():
  """65 prompts in two starts of 64 draw half as much in each."""
  changes = {'mesh.fsdp': 1, 'mesh.tensor': 4, 'mesh.data': 1}
  one, two = (
    estimate(
      'v5p:2x2x1',
      **changes | {'sampler.prompts': prompts, 'sampler.max_rows': 512},
    )
    for prompts in (64, 65)
  )
  calls = [
    next(one for one in made.programs if one.name == 'decode')
    for made in (one, two)
  ]
  assert [one.calls for one in calls] == [1, 2]
  assert 2 * calls[1].work.flops == pytest.approx(calls[0].work.flops * 65 / 64)


def test_overshoot_in_some_rollouts_is_a_program_of_its_own():
  always, some = (
    {
      one.name: one
      for one in estimate(**{'optim.overshoot_every_steps': steps}).programs
    }
    for steps in (1, 5)
  )
  assert 'watched_step' not in always
  watched, usual = some['watched_step'], some['train_step']
  assert watched.calls == 0 and watched.bytes > usual.bytes


def test_what_lies_on_the_host_takes_no_memory_of_devices():
  changes = {
    'mesh.fsdp': 64,
    'mesh.data': 1,
    'learner.method_kwargs': {'kl_coefficient': 0.1},
  }
  away = {'optim.offload': True, 'reference.offload': True}
  here, there = estimate(**changes), estimate(**changes | away)
  parts = [
    {one.name: one.memory for one in made.programs} for made in (here, there)
  ]
  weights = here.counted.weights
  assert weights.on_host == 0
  # But the counters of the optimizer.
  host = there.counted.weights.host_moments, there.counted.weights.moments
  assert sum(host) == weights.moments and host[1] < 100
  assert there.counted.weights.host_reference == weights.reference
  assert {'moments', 'reference'} <= parts[0]['decode'].keys()
  assert sum(parts[1]['decode'].values()) == pytest.approx(
    sum(parts[0]['decode'].values()) - there.counted.weights.on_host
  )
  found = parts[1]['score_reference']['reference from the host']
  assert found == weights.reference
  # Activations are larger than moments here, and gone when these come.
  assert 'moments from the host' not in parts[1]['train_step']
  json_of_it = plans.to_json(there)
  assert json_of_it['host_gib'] == there.counted.weights.on_host / GIB


def test_moments_that_are_too_large_are_advised_to_stay_on_the_host():
  said = ' '.join(plans.advice(estimate('v5e:2x4', **{'mesh.fsdp': 8})))
  assert 'Set config.optim.offload=True: the moments (7.1 GiB)' in said
  assert 'reference.offload' not in said
  away = estimate('v5e:2x4', **{'mesh.fsdp': 8, 'optim.offload': True})
  assert 'optim.offload' not in ' '.join(plans.advice(away))


def test_each_scoring_and_update_is_counted():
  made = estimate(
    **{
      'learner.epochs': 2,
      'learner.batches': 4,
      'learner.method_kwargs': {'kl_coefficient': 0.1},
    }
  )
  calls = {one.name: one.calls for one in made.programs}
  assert calls['train_step'] == 8
  assert calls['score_all'] == 8  # the old policy and the reference, by fours


def test_what_the_compiler_says_replaces_arithmetic():
  counted = estimate(**{'mesh.fsdp': 64}).counted
  result = compiling.Compiled(
    argument_bytes=2 * GIB,
    output_bytes=2 * GIB,
    alias_bytes=2 * GIB,
    temporary_bytes=20 * GIB,
    flops=7.0,
    collectives=(
      Collective('all-gather', 'bf16', 4 * GIB, 10, 2),
      Collective('all-reduce', 'f32', GIB, 1, 2, crosses=True),
    ),
  )
  one = plans.plan_program(counted, 'train_step', 1, result)
  state = sum(
    one.memory.get(name, 0) for name in ('parameters', 'moments', 'reference')
  )
  assert state == counted.weights.state
  assert one.bytes == pytest.approx(22 * GIB)
  assert one.work.flops == 7.0
  assert one.work.ici_bytes == 20 * GIB  # half of the result, ten times
  assert one.work.dcn_bytes == GIB
  assert plans.collectives(one) == {
    'ici all-gather bf16': 40.0,
    'dcn all-reduce f32': 1.0,
  }
  refused = compiling.Compiled(error='RESOURCE_EXHAUSTED', fits=False)
  full = plans.plan_program(counted, 'train_step', 1, refused)
  made = plans.Plan(topologies.named('v5p:4x4x4'), {}, counted, (full,))
  assert not made.fits


def test_the_verdict_on_what_was_compiled_is_the_compilers():
  """Even if its sum is above the table; it knows all that an update holds."""
  counted = estimate(**{'mesh.fsdp': 64}).counted
  chip = topologies.named('v5p:4x4x4')
  state, over = counted.weights.state, int(chip.memory_bytes) + 1
  taken = compiling.Compiled(argument_bytes=state, temporary_bytes=over - state)

  def verdict(name, result):
    one = plans.plan_program(counted, name, 1, result)
    return plans.Plan(chip, {}, counted, (one,)).fits

  assert verdict('train_step', taken)
  # While completions are drawn, moments lie in memory that it knows nothing of.
  needed = int(counted.arguments('decode'))
  beside = counted.weights.state
  for room, fits in ((beside, True), (beside - 2, False)):
    drawn = compiling.Compiled(
      argument_bytes=needed, temporary_bytes=over - 1 - needed - room
    )
    assert verdict('decode', drawn) == fits


def test_advice_names_the_field_that_helps():
  crowded = estimate('v5e:4x4', **{'mesh.fsdp': 16, 'model.remat': 'none'})
  assert not crowded.fits
  assert any("model.remat='layer'" in said for said in plans.advice(crowded))
  wasted = estimate('v5p:8x8x8', **{'mesh.fsdp': 64, 'mesh.data': 8})
  said = ' '.join(plans.advice(wasted))
  assert '12% of the rows' in said and 'row_completions' in said
  assert not any('rows of an update' in one for one in plans.advice(estimate()))


PLAYED = {
  'environment.name': 'any',
  'data.chat': True,
  'rewards': ({'name': 'environment'},),
  'data.completion_buckets': (8192,),
  'mesh.fsdp': 8,
}


def test_rows_of_episodes_have_caches_of_a_whole_context():
  all_at_once, some = (
    estimate(
      'v5p:2x2x2',
      **PLAYED,
      **{'sampler.max_rows': rows, 'learner.row_completions': 1},
      **{'sampler.group': 32},
    )
    for rows in (4096, 64)
  )
  # Keys and values in bfloat16, of 4 heads of 128, in 28 layers, of a context.
  row = 2 * 2 * 4 * 128 * 28 * 8192
  assert not all_at_once.fits and some.fits
  for made, rows in ((all_at_once, 2048), (some, 64)):
    memory = {one.name: one.memory for one in made.programs}
    assert {'prepare', 'read', 'decode', 'train_step'} == {*memory}
    assert memory['read']['cache'] == rows * row / 8
    assert memory['decode']['cache'] == rows * row / 8
  said = ' '.join(plans.advice(all_at_once))
  assert 'Lower config.sampler.max_rows' in said
  assert 'Lower config.environment.context_tokens' in said
  told = [plans.to_json(made)['parked_gib'] for made in (all_at_once, some)]
  assert told == [0, (2048 - 64) * row / GIB]


def test_a_turn_of_each_episode_is_counted():
  made = estimate('v5p:2x2x2', **PLAYED, **{'sampler.max_rows': 64})
  calls = {one.name: one.calls for one in made.programs}
  # 64 prompts of 512 tokens by a piece of 256 for one row of each shard.
  assert calls['decode'] == 512 / 64 and calls['read'] == 64 * 512 / (8 * 256)
  single = estimate('v5p:2x2x2', **PLAYED, **{'environment.max_turns': 1})
  assert 'prefill' in {one.name for one in single.programs}


def test_a_mixture_of_experts_is_planned():
  made = estimate(
    'v5p:8x8x8',
    'Qwen3-30B-A3B',
    **{'mesh.fsdp': 8, 'mesh.expert': 8, 'mesh.data': 8},
  )
  counted = made.counted
  assert counted.weights.number == pytest.approx(30.5e9, rel=0.01)
  # A token is multiplied by a tenth of them.
  per_token = (
    sum(counted._forward(1, counted.group, False)) * made.topology.number
  )
  tokens = counted.prompt_tokens + counted.group * counted.tokens
  assert 2 * 2.5e9 < per_token / tokens < 2 * 3.5e9
  # A step reads the experts that its tokens choose.
  weights, mixture = counted.weights, counted.model.experts
  whole = weights.gathered - weights.table
  assert 0.7 * whole < weights.experts < whole
  assert weights.read(1, mixture) == whole - weights.experts * 120 / 128
  assert weights.read(10**6, mixture) == pytest.approx(whole)
  assert weights.read(1, None) == whole
  # A token goes to the shards of its experts and back, in each of 48 layers.
  split = counted._activations_sent(3).ici_bytes
  shards = 7 * (1 - (7 / 8) ** 8)
  assert split == pytest.approx(48 * 3 * 2048 * 2 * 2 * shards)


def test_open_widths_are_asked_for():
  with pytest.raises(ValueError, match='prompt_buckets'):
    estimate(**{'data.prompt_buckets': (), 'data.train': 'nowhere.jsonl'})


def test_a_folder_of_a_shape_is_not_trained():

  with pytest.raises(ValueError, match='safetensors'):
    build_model.source(str(SHAPES / 'Qwen2.5-0.5B'))
  shape = build_model.source(str(SHAPES / 'Qwen2.5-0.5B'), needs_weights=False)
  assert shape.config().vocab_size == 151936


def test_parts_of_a_known_sum():
  assert plans.scaled({'a': 3.0, 'b': 1.0}, 2.0) == {'a': 1.5, 'b': 0.5}


# Of a method that reads a teacher, and of one that reads no other policy.
OPD = {'learner.method': 'opd', 'learner.method_kwargs': {}, 'mesh.fsdp': 64}
RLOO = {**OPD, 'learner.method': 'rloo'}
SMALL = 'Qwen2.5-0.5B'


def test_a_teacher_is_counted_by_its_own_shape():
  """As the policy of a run of its shape is, which scores the same rows."""
  path = str(SHAPES / 'Qwen2.5-7B')
  rows = {'learner.micro_rows': 64, 'learner.row_completions': 1}
  made = estimate(model=SMALL, **OPD, **rows, **{'teacher.path': path})
  own = estimate(**RLOO, **rows, **{'learner.epochs': 2})
  programs = {one.name: one for one in made.programs}
  others = {one.name: one for one in own.programs}
  found, wanted = programs['score_teacher'], others['score_all']
  assert found.calls == wanted.calls == 1 and found.work == wanted.work
  needs = made.counted.memory('score_teacher')
  expected = own.counted.memory('score_all')
  assert needs.pop('teacher from the host') == 0
  assert needs == expected
  # The policy is scored besides, and by its own shape.
  assert programs['score_all'].work.flops < found.work.flops / 5
  weights = made.counted.weights
  assert weights.teacher == own.counted.weights.trained  # float32 both
  for one in made.programs:
    assert one.memory['teacher'] == weights.teacher
  alone = estimate(model=SMALL, **RLOO, **rows).counted.weights
  assert weights.state == alone.state + weights.teacher


def test_its_likeliest_tokens_are_counted():
  path = {'teacher.path': str(SHAPES / 'Qwen2.5-7B')}
  gkd = {**OPD, 'learner.method': 'gkd', **path}
  alone = estimate(model=SMALL, **OPD, **path).counted
  few, many = (
    estimate(
      model=SMALL, **{**gkd, 'learner.method_kwargs': {'number': number}}
    ).counted
    for number in (4, 12)
  )
  arrays = lambda one: one.memory('train_step')['token arrays']
  one_more = (arrays(many) - arrays(few)) / 8
  assert one_more == pytest.approx((arrays(few) - arrays(alone)) / 4)
  assert one_more == pytest.approx(0.6 * arrays(alone))
  assert 'ordered logits' not in alone.memory('score_teacher')
  # A chunk of the teacher's logits, of which the output layer takes three.
  needs, head = few.memory('score_teacher'), few.teacher.weights.head
  assert needs['ordered logits'] == pytest.approx(
    (2 * needs['head'] - 2 * head) / 3
  )


def test_a_teacher_may_take_half_or_lie_on_the_host():
  path = {'teacher.path': str(SHAPES / 'Qwen2.5-7B')}
  here = estimate(model=SMALL, **OPD, **path).counted
  half = estimate(
    model=SMALL, **OPD, **path, **{'teacher.dtype': 'bfloat16'}
  ).counted
  # But for norms and biases, which stay as they are.
  assert 0.5 < half.weights.teacher / here.weights.teacher < 0.51
  away = estimate(model=SMALL, **OPD, **path, **{'teacher.offload': True})
  weights = away.counted.weights
  assert (weights.teacher, weights.host_teacher) == (0, here.weights.teacher)
  assert weights.on_host == here.weights.teacher
  memory = away.counted.memory('score_teacher')
  assert memory['teacher from the host'] == here.weights.teacher
  larger = {'teacher.path': str(SHAPES / 'Qwen3-30B-A3B')}
  large = estimate('v5e:2x4', SMALL, **{**OPD, 'mesh.fsdp': 8}, **larger)
  said = ' '.join(plans.advice(large))
  size = large.counted.weights.teacher / GIB
  assert f'config.teacher.offload=True: the teacher ({size:.1f} GiB)' in said


def test_what_lies_beside_adapters_is_counted_once():
  lora = {'lora.rank': 8, 'model.remat': 'layer', **OPD}
  path = {'teacher.path': str(SHAPES / 'Qwen2.5-7B')}
  made = estimate(**lora, **path).counted
  alone = estimate(**{**lora, 'learner.method': 'rloo'}).counted
  assert made.weights.teacher == 0
  assert made.weights.state == alone.weights.state
  assert made.teacher.arguments('score_all') == made.weights.frozen
