"""Runs of a second or two, and what they leave: shared by several tests."""

import json
import pathlib
import runpy

import jax
import numpy as np

from grpo_jax import config as config_lib
from grpo_jax.rollouts import parquet
from grpo_jax.run.build import limits

ROOT = pathlib.Path(__file__).parent.parent

SMALL = {
  'steps': 4,
  'optim.warmup_steps': 1,
  'model.num_layers': 1,
  'model.width': 32,
  'model.mlp_width': 32,
  'sampler.prompts': 4,
  'sampler.group': 4,
  'learner.micro_rows': 2,
  'warm_up.steps': 0,
  'warm_up.examples': 16,
  'warm_up.micro_rows': 8,
  'evaluation.examples': 20,
  'evaluation.every_steps': 2,
  'checkpoint.every_steps': 2,
  'checkpoint.every_warm_up_steps': 2,
  'log.completions_every_steps': 1,
  'log.display': 'plain',
}
WARM = {'warm_up.steps': 4}
"""Added to it for tests of what a warm-up does: it is a fourth of the time."""


def arithmetic(**changes):
  """The embedded default with some fields changed."""
  module = runpy.run_path(str(ROOT / 'configs' / 'arithmetic.py'))
  config = module['get_config']()
  if 'reward' in changes:
    reward = {'name': changes.pop('reward'), 'weight': 1.0}
    if isinstance(reward['name'], dict):  # all that is said of it
      reward = reward.pop('name')
    config.rewards = ({'where': 'here', **reward},)
  config.update_from_flattened_dict(changes)
  return config_lib.resolve(config)


def small(**changes):
  """A few seconds' worth of it."""
  return arithmetic(**{**SMALL, **changes})


def records(workdir):
  """The metrics of a run; `checkpoint.best_metric` may name each of them."""
  lines = (pathlib.Path(workdir) / 'metrics.jsonl').read_text().splitlines()
  found = [json.loads(line) for line in lines]
  names = {name for record in found for name in record} - {'step'}
  labels = {name.partition('/')[2] for name in names if '/' in name}
  for name in names:
    best = config_lib.Checkpoint(best_metric=name)
    limits.check_best_metric(config_lib.Config(checkpoint=best), [*labels])
  return found


def without_times(record):
  timed = ('_secs', '_per_sec', '_gib')
  # What an engine has done depends on when it was asked.
  return {
    k: v
    for k, v in record.items()
    if not k.startswith('engine_')
    and not k.endswith(timed)
    and '_secs_' not in k
  }


def checkpoints(workdir):
  """The steps of the complete checkpoints, oldest first."""
  names = [path.name for path in (workdir / 'checkpoints').glob('*')]
  return sorted(int(name) for name in names if name.isdecimal())


def saved(workdir):
  """The newest checkpoint: its step, its arrays by path, and the rest."""
  import orbax.checkpoint as ocp

  directory = pathlib.Path(workdir).absolute() / 'checkpoints'
  step = checkpoints(pathlib.Path(workdir))[-1]
  with ocp.PyTreeCheckpointer() as reader:
    folder = directory / str(step) / 'state'
    # As NumPy has it: the devices that have saved it may not be here.
    in_numpy = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
      reader.metadata(folder).item_metadata.tree,
    )
    tree = reader.restore(folder, restore_args=in_numpy)
  arrays = {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    host = reader.restore(directory / str(step) / 'host')
  return step, arrays, host


def assert_equal(workdir, other):
  """Bit for bit: arrays, the rest of the checkpoint, metrics, completions."""
  (step, arrays, host), (other_step, others, other_host) = (
    saved(workdir),
    saved(other),
  )
  assert step == other_step and arrays.keys() == others.keys()
  for name, array in arrays.items():
    assert array.dtype == others[name].dtype
    np.testing.assert_array_equal(array, others[name], err_msg=name)
  # What is drawn ahead depends on the time; the rest does not.
  drawn = len(host['receipt']['finished'])
  if not drawn and not other_host['receipt']['finished']:
    assert host['receipt'] == other_host['receipt']
    assert host['sha256'] == other_host['sha256']  # of the surplus
  arrays, others = (h['fingerprint']['arrays'] for h in (host, other_host))
  assert arrays == others
  assert host['versions']['packages'] and host['config']['model']
  assert list(map(without_times, records(workdir))) == list(
    map(without_times, records(other))
  )
  files, other_files = (
    parquet.files(pathlib.Path(path) / 'completions')
    for path in (workdir, other)
  )
  assert [f.name for f in files] == [f.name for f in other_files]
  for file, other_file in zip(files, other_files, strict=True):
    assert file.read_bytes() == other_file.read_bytes()


def processes_with(variable):
  """The processes that have been started with a variable of the environment."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
    try:
      if variable.encode() in path.read_bytes().split(b'\0'):
        found.append(int(path.parent.name))
    except OSError:  # it has ended, or is another user's
      pass
  return found
