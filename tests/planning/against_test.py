"""A run's times beside their bound, from what a run leaves in its workdir."""

import dataclasses
import json

import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.planning import against
from grpo_jax.planning import roofline
from tests import runs

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize('rank, passes', [(0, 3), (2, 2)])
def test_the_bound_is_that_of_the_chips(rank, passes, tmp_path, monkeypatch):
  """Compute alone, since a fast memory costs nothing."""
  monkeypatch.setattr(
    roofline, 'of_chip', lambda chip: roofline.Machine(1e6, 1e15)
  )
  directory = workdir(tmp_path, **{'lora.rank': rank, 'learner.epochs': 2})
  found = against.of_run(directory)
  assert found.devices == '4 x TPU v5 lite' and found.rollouts == 2
  once = forward(runs.small(), 5)
  assert found.sampling.bound_by == found.learning.bound_by == 'compute'
  assert found.sampling.bound_secs * 4e6 >= once
  assert found.sampling.bound_secs == pytest.approx(once / 4e6, rel=0.1)
  # The old policy is scored once, because of the second epoch.
  ratio = found.learning.bound_secs / found.sampling.bound_secs
  assert ratio == pytest.approx(2 * passes + 1, rel=1e-6)
  assert found.learning.reached == found.learning.bound_secs / 3.0


def test_rollouts_of_earlier_starts_tell_nothing_of_these_devices(tmp_path):
  slow = {**ROW, 'sample_secs': 99.0}
  rows = (slow, slow, slow, slow, ROW)
  found = against.of_run(workdir(tmp_path, rows=rows, start={'after_step': 2}))
  assert found.rollouts == 1 and found.sampling.measured_secs == 2.0
  # A start that finds the run done has no rollouts.
  file = tmp_path / 'versions.json'
  idle = {'devices': '1 x other', 'after_step': 5}
  file.write_text(json.dumps([*json.loads(file.read_text()), idle]))
  assert against.of_run(str(tmp_path)) == found


def test_a_cpu_is_measured(tmp_path, monkeypatch):
  asked = []

  def of_this_cpu(weight_bytes):
    asked.append(weight_bytes)
    return roofline.Machine(1e15, weight_bytes / 0.25)  # a pass: a quarter

  monkeypatch.setattr(roofline, 'of_this_cpu', of_this_cpu)
  found = against.of_run(workdir(tmp_path, '1 x cpu'))
  assert asked[0] > 4 * 32 * 32
  assert found.sampling.bound_by == 'memory'
  assert found.sampling.bound_secs == 5 * 0.25  # as many as the longest has


def test_what_was_given_in_python_is_not_asked_for(tmp_path):
  method = '<method mine given in Python>'
  marked = workdir(tmp_path, **{'learner.method': method})
  assert against.of_run(marked).learning.reached > 0


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
    against.of_run(workdir(tmp_path, **changes))


def test_this_cpu_reads_and_multiplies_at_some_speed():
  found = roofline.of_this_cpu(2**20)
  assert found.flops > 1e8 and found.memory_bytes > 1e8
