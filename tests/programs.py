"""Runs of equal configs in one process share their jitted functions.

Every start of a run jits its functions anew. To trace and lower them, and to
read the compiled programs from the disk, takes three quarters of the time of a
tiny run. What is shared is what the first run with a config has made, by the
code under test; all else every run makes for itself. A module asks for it, in a
folder whose `conftest.py` imports the fixtures:

  pytestmark = pytest.mark.usefixtures('shared_programs')
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.engines.local import prepare
from grpo_jax.run.build import build
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import placing

# What no function of an updater is made from; its numbers are its own.
_NOT_READ = (
  'checkpoint',
  'compilation_cache',
  'data',
  'evaluation',
  'model',  # what was built of it is in the key
  'seed',
  'workers',
)
_kept = {}


def _key(run, warms_up=False):
  """What the functions of a run's updater are made from."""
  config = dataclasses.asdict(run.config)
  for name in _NOT_READ:
    del config[name]
  del config['generator'], config['learner']['nonfinite_rollouts']
  config['log'] = config['log']['expected_prefixes']
  config['rewards'] = [reward['weight'] for reward in config['rewards']]
  if config['learner']['method'] in ('grpo', 'dr_grpo'):
    del config['rewards']  # others may take the weights from their run
  if not warms_up:
    del config['warm_up']
  if config['optim']['decay'] == 'constant':
    del config['steps']  # no rate depends on it
  method = placing.record(run.learn.learner.method)['sha256']
  # The run is kept, so that no other parameters get the place of its own.
  own = run.config.model.path, id(run.weights.own)
  if isinstance(run.model, models.Transformer):
    own = run.model
  own = own, run.teacher and run.teacher.model
  return json.dumps(config, sort_keys=True, default=repr), own, run.mesh, method


def _shapes(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, tuple((x.shape, x.dtype, x.sharding) for x in leaves)


@pytest.fixture(scope='module')
def shared_programs():
  def share(owner, name, made):
    real = getattr(owner, name)
    patch.setattr(
      owner, name, lambda *args, **options: made(real, *args, **options)
    )

  def updater(real, run, frozen, *optimizer, **teacher):
    update = real(run, frozen, *optimizer, **teacher)
    if not optimizer:
      key = real.__name__, *_key(run, real.__name__ == 'warm_up_updater')
      _, first = _kept.setdefault(key, (run, update))
      return dataclasses.replace(update, compiled=first.compiled)
    return update

  def random(real, spec, part, model, wanted):
    """Copies, as the arrays will be donated."""
    key = 'random', spec.seed, model, part.__qualname__, *_shapes(wanted)
    if key not in _kept:
      made = real(spec, part, model, wanted)
      _kept[key] = jax.tree.map(lambda x: (np.array(x), x.sharding), made)
      return made
    return jax.tree.map(
      lambda kept: jax.device_put(kept[0].copy(), kept[1]),
      _kept[key],
      is_leaf=lambda x: isinstance(x, tuple),
    )

  def preparation(real, model, params, mesh=None, copies=True):
    key = 'preparation', model, mesh, copies, *_shapes(params)
    if key not in _kept:
      _kept[key] = real(model, params, mesh, copies)
    return _kept[key]

  def slope(real, method, *sizes):
    key = 'slope', placing.record(method)['sha256'], *sizes
    if key not in _kept:
      _kept[key] = real(method, *sizes)
    return _kept[key]

  with pytest.MonkeyPatch.context() as patch:
    share(build, 'updater', updater)
    share(build, 'warm_up_updater', updater)
    share(build_model, '_random', random)
    share(prepare, 'Preparation', preparation)
    share(build_method, '_slope', slope)
    yield


@pytest.fixture
def own_programs(shared_programs):
  """The runs of a test make their own; later tests get them."""
  before = dict(_kept)
  _kept.clear()
  yield
  _kept.update({**before, **_kept})
