"""Gradients of prompts: sketches and their metrics, against whole gradients."""

from collections.abc import Callable
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import step
from grpo_jax.learner.instruments import geometry
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments.geometry import SIZE
from grpo_jax.learner.instruments.geometry import Geometry
from grpo_jax.mesh import random_keys
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models import lora
from grpo_jax.rollouts import gathering
from grpo_jax.run import loop
from tests import bigram
from tests import runs
from tests import tiny
from tests.chosen import chosen
from tests.compilations import compiled_programs
from tests.learning import METHODS
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import credited
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec

SEEDS = 200


def dot(one, other):
  """The product of two trees."""
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return sum(float(np.vdot(a, b)) for a, b in pairs)


def leaves():
  """Leaves of every kind, each a tree of its own, and several as one."""
  rng = np.random.default_rng(0)
  column, row = np.zeros((256, 32)), np.zeros((36, 64))
  column[:, 3], row[7] = 5, 3  # all large entries in one place of their blocks
  found = {
    'weight': rng.normal(size=(3, 64, 64)),
    'odd': rng.normal(size=(9, 5)),
    'number': np.array(2.0),
    'column': column,
    'row': row,
    'constant': np.ones((64, 64)),
    'long and odd': rng.normal(size=(257, 8)),  # zeros are added
  }
  found = {name: [x.astype(np.float32)] for name, x in found.items()}
  # Signs of their own for leaves that are alike, or their products would count.
  names = 'constant', 'odd', 'number', 'constant'
  return {**found, 'several': [found[name] for name in names]}


# One odd leaf, and several of which two are alike; others tell which is wrong.
@pytest.mark.parametrize(
  'kind',
  chosen(leaves(), ('several', 'odd')),
)
def test_products_of_sketches_are_unbiased_and_as_exact_as_they_say(kind):
  rng, tree = np.random.default_rng(1), leaves()[kind]
  noisy = lambda x: np.float32(x + 0.5 * rng.normal(size=x.shape))
  other = jax.tree.map(noisy, tree)
  both = jax.jit(
    lambda key: (geometry.sketch(tree, key), geometry.sketch(other, key))
  )
  keys = map(jax.random.key, range(SEEDS))
  found = np.array([both(key) for key in keys], np.float64)
  products = np.sum(found[:, 0] * found[:, 1], axis=-1)
  exact = dot(tree, other)
  bound = math.sqrt((dot(tree, tree) * dot(other, other) + exact**2) / SIZE)
  # A deviation over 200 seeds is itself known to 5 %.
  assert abs(products.mean() - exact) < 4 * bound / math.sqrt(SEEDS) + 1e-5
  assert products.std() < 1.2 * bound


def test_a_complex_number_counts_as_two():
  parts = [jnp.full((8, 8), 3.0), jnp.full((8, 8), 4.0)]
  key = jax.random.key(0)
  np.testing.assert_array_equal(
    geometry.sketch([parts[0] + 1j * parts[1]], key),
    geometry.sketch(parts, key),
  )


def test_an_odd_vocabulary_has_blocks_as_large_as_an_even_one():
  """A block of 32 x 32 is added up 4 times, one of 1 x 32 took 128."""
  assert geometry._sides((geometry._filled(1001), 64)) == [32, 32]
  kept = 33, 255, 1002, 1024
  assert [geometry._filled(size) for size in kept] == [*kept]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """What a test needs of a model."""

  params: Any
  score: Callable[..., Any]
  make_learner: Callable[..., Any]
  make_rollout: Callable[..., Any]


BIGRAM = Model(bigram.params(), bigram.score, bigram_learner, bigram_rollout)
TINY = Model(
  PARAMS,
  lambda params, rows, wanted: tiny.score(MODEL, params, rows, wanted=wanted),
  make_learner,
  make_rollout,
)


def make(method='grpo', kind='shared', mesh=None, frozen=None, model=BIGRAM):
  """An updater that measures, and its state."""
  learner = model.make_learner(
    METHODS[method](), mesh=(1, 1, 1) if mesh is None else mesh
  )
  rows = dataclasses.replace(
    spec(kind, 8),
    shards=sharding.row_shards(learner.mesh),
    parts=learner.mesh.shape['context'],
  )
  params = jax.tree.map(jnp.copy, model.params)
  if frozen:
    params, frozen = lora.split(params, frozen)
  updater = make_updater(learner, params, rows, frozen=frozen)
  state = updater.compiled.init(params)
  if state.reference is not None:  # left behind, so that its penalty counts
    state = state._replace(
      reference=jax.tree.map(lambda x: 1.2 * x, state.reference)
    )
  return updater, state


@functools.cache
def made(method, kind):
  """What measures, compiled once for several tests, and the state."""
  updater, state = make(method, kind)
  return updater, Geometry(updater, 7, 1), state


def sketches(updater, measure, state, rollout):
  return measure.sketches(state, credited(updater, state, rollout))


@functools.cache
def gradients(method, frozen=None, model=BIGRAM):
  """The gradient of each prompt's loss, without the learner; the credit too."""
  rollout, chain = model.make_rollout(width=8), METHODS[method]()
  learner = model.make_learner(chain)
  batch, state, _ = step.credit(learner, rollout.batch, chain.init())
  rows = layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 18
  )
  moved = jax.tree.map(lambda x: 1.2 * x, model.params)
  if frozen:
    moved = lora.join(
      *(lora.split(x, frozen)[k] for k, x in enumerate((moved, model.params)))
    )
  logp_ref = model.score(moved, rows, models.LOGP).logp
  batch = batch._replace(logp_ref=tiny.gather(logp_ref, rows, rollout.length))

  @jax.jit
  @jax.grad
  def gradient(params, p):
    scores = model.score(
      params, rows, models.Wanted('entropy' in chain.requires)
    )
    logp, entropy = jax.tree.map(
      lambda x: tiny.gather(x, rows, rollout.length)[p][None],
      (scores.logp, scores.entropy),
    )
    one = jax.tree.map(lambda x: jnp.asarray(x)[p][None], batch)
    one = losses.prepare(chain, one, state)
    return losses.surrogate_loss(chain, logp, one, state, entropy)[0]

  found = [gradient(model.params, p) for p in range(4)]
  if frozen:
    found = [lora.split(tree, frozen)[0] for tree in found]
  return found


def of_attention(path):
  return 'attention' in path


def of_positions(path):
  return 'position' in path


CASES = [
  ('grpo', 'shared', {}),
  pytest.param('gspo', 'padded', {}, marks=pytest.mark.long),
  ('kl_cov', 'packed', {}),  # a loss that couples completions
  pytest.param(
    'grpo', 'shared', dict(frozen=of_positions), marks=pytest.mark.long
  ),
  ('grpo', 'shared', dict(mesh=(2, 2, 2))),
  *(
    pytest.param(*case, marks=pytest.mark.long)
    for case in (
      ('entropy', 'shared', dict(model=TINY)),
      ('grpo', 'shared', dict(frozen=of_attention, model=TINY)),
      ('kl_cov', 'packed', dict(model=TINY)),
    )
  ),
]


def check(method, kind, options):
  if options:
    updater, state = make(method, kind, **options)
    measure = Geometry(updater, 7, 1)
  else:
    updater, measure, state = made(method, kind)
  model = options.get('model', BIGRAM)
  found = sketches(updater, measure, state, model.make_rollout(width=8))
  assert found.shape == (4, 1 if method == 'kl_cov' else 2, SIZE)
  key = random_keys.key(7, 'gradient sketches')
  project = jax.jit(lambda tree: geometry.sketch(tree, key))
  whole = gradients(method, options.get('frozen'), model)
  want = np.array([project(tree) for tree in whole])
  scale = np.abs(want).max()
  assert scale > 1e-3
  np.testing.assert_allclose(found.sum(1), want, atol=2e-5 * scale)


# The address of a function in a name would differ from process to process.
@pytest.mark.parametrize(
  'method, kind, options',
  CASES,
  ids=lambda value: '-'.join(value) if isinstance(value, dict) else value,
)
def test_a_sketch_is_that_of_the_gradient_of_one_prompt(method, kind, options):
  check(method, kind, options)


@pytest.mark.long
@pytest.mark.parametrize(
  'mesh, kind',
  [
    (dict(data=8), 'shared'),
    (dict(fsdp=2, context=2), 'shared'),
    (dict(fsdp=4, tensor=2), 'packed'),
  ],
  ids=str,
)
def test_on_more_meshes_too(mesh, kind):
  check('entropy', kind, dict(mesh=mesh, model=TINY))


@pytest.mark.long
def test_rows_that_are_gathered_on_the_devices_are_those_of_one_host():
  updater, state = make(mesh=dict(data=2, fsdp=2), model=TINY)
  rollout = make_rollout(width=8)
  held = rollout._replace(holder=np.zeros(4, np.int64))
  held = gathering.on_devices(held, updater.compiled.learner.mesh)
  assert isinstance(held.batch.tokens, jax.Array)
  found = [
    sketches(updater, Geometry(updater, 7, 1), state, one)
    for one in (rollout, held)
  ]
  np.testing.assert_array_equal(*found)


def test_halves_are_those_of_the_group():
  updater, measure, state = made('grpo', 'shared')
  rollout = bigram_rollout(width=8)
  first = rollout.batch.keep & (np.arange(4) < 2)[:, None]
  alone = rollout._replace(batch=rollout.batch._replace(keep=first))
  whole, half = (
    sketches(updater, measure, state, one) for one in (rollout, alone)
  )
  assert not np.any(half[:, 1]) and np.any(whole[:, 1])
  # Without the others, weights alone have changed.
  for one, other in zip(whole[:, 0], half[:, 0], strict=True):
    size = np.linalg.norm(one) * np.linalg.norm(other)
    assert np.vdot(one, other) == pytest.approx(size, rel=1e-5)


def oracle(found, deviation):
  """The metrics of `geometry.metrics_of_sketches`, pair by pair."""
  whole = [sum(parts) for parts in found.astype(np.float64)]
  left = [p for p, g in enumerate(whole) if 0 < g @ g < np.inf]
  pairs = [(i, j) for i in left for j in left if i < j]
  cosines = np.array([
    whole[i] @ whole[j] / np.sqrt(whole[i] @ whole[i] * (whole[j] @ whole[j]))
    for i, j in pairs
  ])  # fmt: skip
  norms = [np.sqrt(whole[p] @ whole[p]) for p in left]
  noise = np.mean([(1 - c * c) ** 2 for c in cosines]) / found.shape[2]
  needed = [
    whole[j] @ whole[j] / (whole[i] @ whole[j])
    for i in left
    for j in left
    if i != j and whole[i] @ whole[j] > 0
  ]
  some = [x for x in deviation if x > 0]
  between = [found[p, 0] - found[p, 1] for p in left]
  return {
    'geometry_prompts': len(left),
    'geometry_zero': sum(not np.any(g) for g in whole) / len(whole),
    'geometry_reward_std': sum(deviation) / len(deviation),
    'geometry_reward_ratio': max(some) / min(some),
    'geometry_within': np.sqrt(
      sum(d @ d for d in between) / sum(n * n for n in norms)
    ),
    'geometry_cosine_mean': sum(cosines) / len(pairs),
    'geometry_cosine_noise': np.sqrt(noise),
    'geometry_cosine_std': np.sqrt(max(0, np.var(cosines) - noise)),
    'geometry_cosine_negative': sum(cosines < 0) / len(pairs),
    'geometry_cosine_small': sum(abs(c) < 0.1 for c in cosines) / len(pairs),
    'geometry_m': sorted(needed)[len(needed) // 2 - 1 : len(needed) // 2 + 1],
    'geometry_norm_ratio': max(norms) / min(norms),
  }


@pytest.mark.quick
@pytest.mark.parametrize('common', [0.0, 0.3])
def test_metrics_are_those_of_all_pairs(common):
  rng = np.random.default_rng(0)
  found = rng.normal(size=(9, 2, 500)) * rng.uniform(1, 3, (9, 1, 1))
  found += common * rng.normal(size=500)
  found[2], found[5, 0, 3] = 0, np.nan
  deviation = np.array([0.1, 0.5, 0, 0.25, 0.3, 0.4, 0.5, 0.2, 0])
  got, want = (
    geometry.metrics_of_sketches(found, deviation),
    oracle(found, deviation),
  )
  want['geometry_m'] = np.mean(want['geometry_m'])
  assert got.keys() == want.keys() and got['geometry_prompts'] == 7
  for name, value in want.items():
    assert got[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.quick
def test_without_pairs_there_are_no_metrics_of_pairs():
  found = np.zeros((3, 1, 8))
  nothing = geometry.metrics_of_sketches(found, np.zeros(3))
  assert nothing == {
    'geometry_prompts': 0, 'geometry_zero': 1, 'geometry_reward_std': 0,
  }  # fmt: skip
  found[1, 0, 2] = 1.0
  one = geometry.metrics_of_sketches(found, np.zeros(3))
  assert one == {**nothing, 'geometry_prompts': 1, 'geometry_zero': 2 / 3}
  found[2] = found[1]  # of one direction: there is no noise
  two = geometry.metrics_of_sketches(found, np.zeros(3))
  assert two['geometry_cosine_mean'] == two['geometry_m'] == 1
  assert two['geometry_cosine_std'] == two['geometry_cosine_noise'] == 0


def test_the_noise_of_sketches_is_taken_out_of_the_deviation():
  """Of orthogonal gradients, and of gradients whose cosines differ."""
  rng, key = np.random.default_rng(0), random_keys.key(0, 'gradient sketches')
  size, prompts = 128 * 160, 40
  common = rng.normal(size=size)
  own = rng.normal(size=(prompts, size))
  for share in 0.0, 0.6:
    whole = own + np.linspace(-share, share, prompts)[:, None] * common
    whole = whole.astype(np.float32)
    project = jax.jit(lambda x: geometry.sketch([x.reshape(128, 160)], key))
    found = np.array([project(x) for x in whole])[:, None]
    exact = geometry.metrics_of_sketches(whole[:, None], np.zeros(prompts))
    got = geometry.metrics_of_sketches(found, np.zeros(prompts))
    assert got['geometry_cosine_noise'] == pytest.approx(1 / 64, rel=0.1)
    name = 'geometry_cosine_std'
    assert abs(got[name] - exact[name]) < 0.007


def test_the_metrics_of_a_rollout_are_those_of_its_gradients():
  updater, measure, state = made('gspo', 'padded')
  rollout = bigram_rollout(width=8)
  found = measure.before(state, credited(updater, state, rollout))
  assert found.pop('geometry_secs') > 0
  flat = [
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    for tree in gradients('gspo')
  ]
  reward, valid = rollout.batch.reward, rollout.batch.valid
  deviation = [np.std(r[v]) for r, v in zip(reward, valid, strict=True)]
  want = geometry.metrics_of_sketches(
    np.array(flat)[:, None], np.array(deviation)
  )
  assert found.keys() == want.keys() | {'geometry_within'}
  for name in ('prompts', 'zero', 'reward_std', 'reward_ratio'):
    name = 'geometry_' + name
    assert found[name] == pytest.approx(want[name], rel=1e-6), name
  for name in ('mean', 'std'):
    name = 'geometry_cosine_' + name
    assert found[name] == pytest.approx(want[name], abs=0.05), name
  name = 'geometry_norm_ratio'
  assert found[name] == pytest.approx(want[name], rel=0.06)


def test_one_program_serves_all_prompts():
  """Of all lengths, in all rollouts."""
  updater, state = make()
  buckets = tuple(range(1, 9))
  updater = dataclasses.replace(
    updater,
    layout=dataclasses.replace(updater.layout, prompt_buckets=buckets),
  )
  measure = Geometry(updater, 7, 1)
  rollout = bigram_rollout(width=8)
  assert len({*map(len, rollout.prompts)}) > 1
  with compiled_programs() as names:
    for number in range(3):
      measure.before(state, credited(updater, state, rollout, number))
  assert names.count('sketch_of_part') == 1


@pytest.mark.quick
def test_it_is_due_every_so_many_rollouts(monkeypatch):
  updater, state = make()
  monkeypatch.setattr(
    Geometry, 'sketches', lambda *_: np.ones((4, 2, 8), np.float32)
  )
  reward = np.array([[0, 1, 0, 1], [1, 9, 1, 1], [0] * 4, [0, 0, 4, 4]])
  rollout = bigram_rollout(reward=reward)  # that of 9 is not judged

  def due(every):
    measure = Geometry(updater, 0, every)
    return [k for k in range(7) if measure.is_due(k)]

  assert due(0) == [] and due(1) == [*range(7)] and due(3) == [0, 3, 6]
  ready = credited(updater, state, rollout)
  watch = hook.watch([Geometry(updater, 0, 1)], state, ready)
  found = watch.findings(state).numbers
  assert found['geometry_secs'] >= 0
  assert found['geometry_reward_std'] == (0.5 + 0 + 0 + 2) / 4
  assert found['geometry_reward_ratio'] == 2 / 0.5


def test_leaves_stay_where_they_lie():
  """Of all that a mesh splits, sums of the size of a sketch alone are sent."""
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  tree = {
    'query': ((4, 256, 8, 64), PartitionSpec(None, 'fsdp', 'tensor')),
    'output': ((4, 8, 64, 256), PartitionSpec(None, 'tensor', None, 'fsdp')),
    'up': ((4, 256, 512), PartitionSpec(None, 'fsdp', 'tensor')),
    'embedding': ((512, 256), PartitionSpec('tensor', 'fsdp')),
    'scale': ((256,), PartitionSpec()),
  }
  given = {
    name: jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=NamedSharding(mesh, place)
    )
    for name, (shape, place) in tree.items()
  }
  project = jax.jit(
    lambda tree: geometry.sketch(tree, jax.random.key(0)),
    out_shardings=sharding.replicated(mesh),
  )
  with sharding.use(mesh):
    text = project.lower(given).compile().as_text()
  kinds = 'all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter'
  found = re.findall(rf'= (.*?) ({kinds})(?:-start)?\(', text)
  assert {kind for _, kind in found} == {'all-reduce'}
  for result, _ in found:
    for shape in re.findall(r'\[([\d,]*)\]', result):
      assert math.prod(map(int, shape.split(','))) <= SIZE, result


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Adapters that learn; every second rollout is measured."""
  folder = tmp_path_factory.mktemp('geometry')
  changes = {'lora.rank': 2, 'log.completions_every_steps': 0}
  changes |= {'reward': 'tests.judges:even'}
  with compiled_programs() as names:
    loop.train(runs.small(**changes), folder / 'off')
  assert 'sketch_of_part' not in names
  changes['log.geometry_every_steps'] = 2
  before, updates_before = Geometry.before, []

  def noted(self, state, *args):
    updates_before.append(int(state.step))
    return before(self, state, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Geometry, 'before', noted)
    loop.train(runs.small(**changes), folder / 'on')
  assert updates_before == [0, 2]  # each before the update of its rollout
  return changes, folder


@pytest.mark.long
def test_a_run_learns_what_it_would_learn_without(run):
  folder = run[1]
  on, off = (runs.records(folder / name) for name in ('on', 'off'))
  names = {name for row in on for name in row if name.startswith('geometry_')}
  assert len(names) == 13 and 'geometry_secs' in names
  assert [sum(n in row for n in names) > 8 for row in on] == [
    False, True, False, True, False,
  ]  # fmt: skip
  for row, other in zip(on, off, strict=True):
    left = {k: v for k, v in row.items() if k not in names}
    assert runs.without_times(left) == runs.without_times(other)
  arrays, others = (runs.saved(folder / name)[1] for name in ('on', 'off'))
  for name, array in others.items():
    np.testing.assert_array_equal(arrays[name], array, err_msg=name)


@pytest.mark.long
def test_a_run_in_two_starts_measures_the_same(run, tmp_path):
  changes, folder = run
  loop.train(runs.small(**changes, steps=2), tmp_path)
  loop.train(runs.small(**changes), tmp_path)
  rows, others = runs.records(tmp_path), runs.records(folder / 'on')
  assert rows[-2]['geometry_cosine_mean'] == others[-2]['geometry_cosine_mean']
  pick = lambda row: {k: v for k, v in row.items() if k[:5] == 'geome'}
  assert [*map(runs.without_times, map(pick, rows))] == [
    *map(runs.without_times, map(pick, others))
  ]
