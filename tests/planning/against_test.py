"""A run's times beside their bound, from what a run leaves in its workdir."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.commands import plan as command
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.planning import against
from grpo_jax.planning import roofline
from grpo_jax.run.build import build
from tests import runs
from tests.cli import command as run_command

ROW = {
  'sample_secs': 2.0,
  'learn_secs': 3.0,
  'sample_tokens_per_sec': 40.0,  # 80 in all, 5 for each of 16 completions
  'learn_tokens_per_sec': 80 / 3,
  'length_tokens_max': 5.0,
}


def workdir(
  tmp_path,
  devices='4 x TPU v5 lite',
  rows=(ROW,) * 4,
  start=None,
  **changes,
):
  sizes = {'mesh.data': -1, 'learner.micro_rows': 4}
  given = runs.small(**sizes | changes)
  values = dataclasses.asdict(given)
  if 'learner.method' in changes:
    values['learner']['method'] = changes['learner.method']
  (tmp_path / 'config.json').write_text(json.dumps(values))
  starts = [{'devices': '1 x other'}, {'devices': devices, **(start or {})}]
  (tmp_path / 'versions.json').write_text(json.dumps(starts))
  lines = [json.dumps({'step': n, **row}) for n, row in enumerate(rows, 1)]
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines))
  return str(tmp_path)


def forward(config, length):
  """FLOPs of a pass over 16 completions of so many tokens."""
  model = models.ModelConfig(
    vocab_size=14,
    num_layers=config.model.num_layers,
    width=config.model.width,
    num_heads=config.model.num_heads,
    num_kv_heads=config.model.num_kv_heads,
    head_dim=config.model.head_dim,
    mlp_width=config.model.mlp_width,
  )
  return 16 * models.flops_per_token(model, np.arange(length) + 1).sum()


@pytest.mark.quick
@pytest.mark.parametrize('rank, passes', [(0, 3), (2, 2)])
def test_the_bound_is_that_of_the_chips(rank, passes, tmp_path, monkeypatch):
  """Compute alone, since a fast memory costs nothing."""
  monkeypatch.setattr(
    roofline, 'chip_peaks', lambda chip: roofline.Machine(1e6, 1e15)
  )
  directory = workdir(tmp_path, **{'lora.rank': rank, 'learner.epochs': 2})
  found = against.compare(directory)
  assert found.devices == '4 x TPU v5 lite' and found.rollouts == 2
  once = forward(runs.small(), 5)
  assert found.sampling.bound_by == found.learning.bound_by == 'compute'
  assert found.sampling.bound_secs * 4e6 >= once
  assert found.sampling.bound_secs == pytest.approx(once / 4e6, rel=0.1)
  # The old policy is scored once, because of the second epoch.
  ratio = found.learning.bound_secs / found.sampling.bound_secs
  assert ratio == pytest.approx(2 * passes + 1, rel=1e-6)
  assert found.learning.reached == found.learning.bound_secs / 3.0
  # Updates that need 32 of the 80 tokens: at best 2 of each completion.
  rows = ({**ROW, 'needed_tokens': 0.4},) * 4
  changes = {'lora.rank': rank, 'learner.epochs': 2}
  some = against.compare(workdir(tmp_path, rows=rows, **changes))
  ratio = some.learning.bound_secs / found.sampling.bound_secs
  shorter = forward(runs.small(), 2) / once
  assert ratio == pytest.approx(2 * passes * shorter + 1, rel=1e-3)


def test_a_teacher_has_a_forward_pass_of_its_own(tmp_path, monkeypatch):
  machine = roofline.Machine(1e6, 1e15)
  monkeypatch.setattr(roofline, 'chip_peaks', lambda chip: machine)
  shape = {'model.num_layers': 2, 'model.width': 48}
  folder = tmp_path / 'teacher'
  made = build.abstract(runs.small(**shape), sharding.make_mesh()).model
  weights.save(folder, made, models.Transformer(made).init(jax.random.key(0)))
  opd = {'learner.method': 'opd', 'learner.method_kwargs': {}}
  found = against.compare(
    workdir(tmp_path, **opd, **{'teacher.path': str(folder)})
  )
  once, taught = forward(runs.small(), 5), forward(runs.small(**shape), 5)
  ratio = found.learning.bound_secs / found.sampling.bound_secs
  assert ratio == pytest.approx(3 + 1 + taught / once, rel=1e-6)


def test_each_side_of_a_divided_run_has_its_devices(tmp_path, monkeypatch):
  """Three draw, and one learns; weights that are split over two are halves."""
  machine = roofline.Machine(1e6, 1e15)
  monkeypatch.setattr(roofline, 'chip_peaks', lambda chip: machine)
  changes = {'learner.micro_rows': 1, 'sampler.ahead': 1}
  own = {'generator.devices': 3, **changes}
  turn = against.compare(workdir(tmp_path, '1 x TPU v5 lite', **changes))
  found = against.compare(workdir(tmp_path, **own))
  assert found.learning == turn.learning
  once = turn.sampling.bound_secs
  assert found.sampling.bound_secs == pytest.approx(once / 3)
  machine = roofline.Machine(1e15, 1e6)
  monkeypatch.setattr(roofline, 'chip_peaks', lambda chip: machine)
  two = {**own, 'generator.devices': 2, 'learner.micro_rows': 2}
  whole, halves = (
    against.compare(workdir(tmp_path, **two, **{'sampler.tensor': tensor}))
    for tensor in (1, 2)
  )
  assert whole.sampling.bound_by == 'memory'
  assert halves.learning == whole.learning
  ratio = halves.sampling.bound_secs / whole.sampling.bound_secs
  assert 0.5 <= ratio < 0.6  # but for what is not split


@pytest.mark.parametrize(
  'changes',
  [
    {'generator.listen': '127.0.0.1:8470', 'sampler.ahead': 1},
    {'engine.kind': 'http', 'engine.urls': ('http://127.0.0.1:8000',)},
  ],
)
def test_of_those_that_sample_elsewhere_nothing_is_told(
  changes, tmp_path, capsys
):
  found = against.compare(workdir(tmp_path, **changes))
  assert found.sampling is None
  assert found.learning == against.compare(workdir(tmp_path)).learning
  command.show_against(found)
  assert 'sampling: by jobs or servers' in capsys.readouterr().out
  assert command.against_json(found)['sampling'] is None


@pytest.mark.parametrize('needed', [0.5, 0.0])
def test_what_updates_left_out_costs_nothing(needed, tmp_path):
  rows = ({**ROW, 'needed_tokens': needed},) * 4
  with_all, found = (
    against.compare(workdir(tmp_path, rows=given)).learning
    for given in ((ROW,) * 4, rows)
  )
  assert with_all.bound_by == 'memory'  # weights are read whatever it is
  assert found.bound_secs == (with_all.bound_secs if needed else 0)


def test_rollouts_of_earlier_starts_tell_nothing_of_these_devices(tmp_path):
  slow = {**ROW, 'sample_secs': 99.0}
  rows = (slow, slow, slow, slow, ROW)
  found = against.compare(workdir(tmp_path, rows=rows, start={'after_step': 2}))
  assert found.rollouts == 1 and found.sampling.measured_secs == 2.0
  # A start that finds the run done has no rollouts.
  file = tmp_path / 'versions.json'
  idle = {'devices': '1 x other', 'after_step': 5}
  file.write_text(json.dumps([*json.loads(file.read_text()), idle]))
  assert against.compare(str(tmp_path)) == found


@pytest.mark.quick
def test_a_cpu_is_measured(tmp_path, monkeypatch):
  asked = []

  def measure_cpu(weight_bytes, dtype):
    asked.append((weight_bytes, dtype))
    return roofline.Machine(1e15, weight_bytes / 0.25)  # a pass: a quarter

  monkeypatch.setattr(roofline, 'measure_cpu', measure_cpu)
  changes = {'model.compute_dtype': 'bfloat16'}
  found = against.compare(workdir(tmp_path, '1 x cpu', **changes))
  ((size, dtype),) = asked
  assert size > 2 * 32 * 32 and dtype == 'bfloat16'
  assert found.sampling.bound_by == 'memory'
  assert found.sampling.bound_secs == 5 * 0.25  # as many as the longest has


def test_what_was_given_in_python_is_not_asked_for(tmp_path):
  method = '<method mine given in Python>'
  marked = workdir(tmp_path, **{'learner.method': method})
  assert against.compare(marked).learning.reached > 0


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'devices': '8 x TPU v99'}, 'TPU v99 is not in the table of chips'),
    ({'rows': (ROW, ROW)}, 'no more than 2 rollouts'),
    ({'start': {'after_step': 3}}, 'no more than 2 rollouts of the last'),
    ({'start': {'replays': True}}, 'has replayed completions'),
    ({'model.path': '<model mine given in Python>'}, 'a model of your own'),
  ],
)
def test_what_cannot_be_bounded_is_said(changes, said, tmp_path):
  with pytest.raises(ValueError, match=said):
    against.compare(workdir(tmp_path, **changes))


def test_this_cpu_reads_and_multiplies_at_some_speed(monkeypatch):
  monkeypatch.setattr(roofline, '_SECS', 0.05)
  found = roofline.measure_cpu(2**20)
  assert found.flops > 1e8 and found.memory_bytes > 1e8


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_of_a_cpu_the_fastest_products_count(dtype, monkeypatch):
  """In any size, and in the dtype of the run or in float32."""
  # 10^9 operations per second.
  speeds = {('float32', 1024): 3.0, ('bfloat16', 512): 7.0}

  def fastest(run):
    made = run()
    if made.ndim < 2:
      return 1.0
    size = len(made)
    return 2 * size**3 / 1e9 / speeds.get((str(made.dtype), size), 1.0)

  monkeypatch.setattr(roofline, '_fastest', fastest)
  found = roofline.measure_cpu(2**20, dtype)
  assert found.flops == pytest.approx({'float32': 3e9, 'bfloat16': 7e9}[dtype])


@pytest.mark.parametrize('size', [2**20, 2**24])
def test_a_repeat_is_short_enough_to_be_undisturbed(size, monkeypatch):
  monkeypatch.setattr(roofline, '_fastest', lambda run: 1.0)
  read = roofline.measure_cpu(size).memory_bytes  # in one repeat of a second
  assert size <= read <= 2**26


def test_of_a_busy_machine_the_fastest_of_many_counts(monkeypatch):
  """A repeat that nobody disturbs may come late."""
  now, runs = [0.0], []

  def run():
    runs.append(0)
    now[0] += 0.01 if len(runs) > 15 else 0.05
    return jnp.zeros(())

  monkeypatch.setattr(roofline.time, 'perf_counter', lambda: now[0])
  assert roofline._fastest(run) == pytest.approx(0.01)


def test_the_share_that_is_reached_is_printed(capsys):
  found = against.Against(
    '4 x TPU v5 lite',
    roofline.Machine(2e9, 3e9),
    7,
    against.Share(2.0, 0.5, 'memory'),
    against.Share(4.0, 3.0, 'compute'),
  )
  command.show_against(found)
  printed = ' '.join(capsys.readouterr().out.split())
  assert (
    '4 x TPU v5 lite: 2 GFLOP/s, 3.0 GB/s; medians of 7 rollouts.' in printed
  )
  assert (
    'sampling: 2 s; at least 0.5 s (memory), of which 25% are reached.'
    in printed
  )
  assert (
    'learning: 4 s; at least 3 s (compute), of which 75% are reached.'
    in printed
  )
  told = command.against_json(found)
  assert told['sampling']['reached'] == 0.25
  assert told['learning'] == {
    'measured_secs': 4.0,
    'bound_secs': 3.0,
    'bound_by': 'compute',
    'reached': 0.75,
  }


@pytest.mark.long
def test_a_run_is_no_faster_than_its_bound(tmp_path):
  """The embedded default with a short warm-up, on this CPU."""
  done = run_command(
    'train',
    '--config=configs/arithmetic.py',
    f'--workdir={tmp_path}',
    '--config.steps=6',
    '--config.optim.warmup_steps=1',
    '--config.warm_up.steps=8',
    '--config.data.heldout=',
    '--config.checkpoint.best_metric=reward',
    quick=False,
  )
  assert done.returncode == 0, done.stderr
  done = run_command('plan', f'--against={tmp_path}', '--json', quick=False)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['rollouts'] == 4
  for part in ('sampling', 'learning'):
    one = found[part]
    assert 0 < one['bound_secs'] <= one['measured_secs']
    assert one['reached'] == one['bound_secs'] / one['measured_secs']
