"""The optimizer that a config names, on the parameters of a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.run import loop
from grpo_jax.run.build import build
from grpo_jax.run.build import optimizer
from tests import learning
from tests import runs
from tests import tiny

pytestmark = pytest.mark.usefixtures('shared_programs')

NAMES = ('adafactor', 'lion', 'muon', 'sgd')
HERE = __name__


def make(name, braked=True, **fields):
  values = {'name': name, 'weight_decay': 0.1, **fields}
  found = config_lib.Optim(**values)
  rate = lambda count: 0.01 * (1 + count)
  return optimizer.make_optimizer(found, tiny.model(), rate, braked)


def sides(model):
  """Inputs, outputs and `hidden` of each parameter, by its path."""
  found = optimizer.matrices(model, model.abstract())
  leaves = jax.tree_util.tree_leaves_with_path(
    found, is_leaf=lambda x: isinstance(x, optim.Matrix)
  )
  return {'/'.join(sharding.path_names(path)): x for path, x in leaves}


def test_stacks_heads_experts_and_the_vocabulary_are_told_apart():
  found = sides(tiny.model(**tiny.FANCY))
  assert found['embedding'] == ((-2,), (-1,), False)
  query = found['blocks/0/attention/query']
  assert query == ((-3,), (-2, -1), True)
  assert found['blocks/0/attention/output'] == ((-3, -2), (-1,), True)
  assert found['tail/0/attention/output'] == ((-3, -2), (-1,), True)
  assert found['blocks/0/attention/query_bias'][:2] == ((), (-2, -1))
  assert found['final_norm/scale'][:2] == ((), (-1,))
  experts = sides(models.Transformer(tiny.EXPERTS))
  assert experts['head'] == ((-2,), (-1,), False)
  down = {x for name, x in experts.items() if name.endswith('down')}
  assert down == {((-2,), (-1,), True)}
  adapters = tiny.model(lora=models.LowRank(rank=2, alpha=4.0))
  lora = sides(adapters)
  assert lora['blocks/0/attention/query_a'] == ((-2,), (-1,), True)
  assert lora['blocks/0/attention/query_b'] == ((-3,), (-2, -1), True)
  assert lora['blocks/0/attention/output_a'] == ((-3, -2), (-1,), True)
  assert lora['blocks/0/attention/output_b'] == ((-2,), (-1,), True)


def test_every_axis_but_that_of_layers_or_experts_is_on_a_side():
  for config in (tiny.CONFIG, tiny.EXPERTS):
    model = models.Transformer(config)
    shapes, found = model.abstract(), sides(model)
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
      names = sharding.path_names(path)
      matrix = found['/'.join(names)]
      stacks = (names[0] == 'blocks') + (
        'experts' in names and names[-1] != 'router'
      )
      sides_of = matrix.inputs + matrix.outputs
      assert sorted(sides_of) == list(range(stacks - x.ndim, 0)), names


def own(learning_rate, weight_decay, mask, matrices, plus=0.0):
  """As in a user's file."""
  assert plus == 0.5
  return optax.chain(
    optim.muon(learning_rate, matrices),
    optax.add_decayed_weights(weight_decay, mask),
  )


def test_ones_own_gets_what_it_has_arguments_for():
  assert make(f'{HERE}:own', kwargs={'plus': 0.5}).init
  assert make('optax:adamw', kwargs={'b2': 0.5}, brake='decay').init
  assert make('optax:sgd', weight_decay=0.0, kwargs={'momentum': 0.9}).init


def no_rate(lr):
  return optax.sgd(lr)


def no_transform(learning_rate):
  return learning_rate


def fails(learning_rate):
  raise KeyError('gone')


def fails_when_traced(learning_rate):
  def update(updates, state, params=None):
    raise KeyError('later')

  return optax.GradientTransformation(lambda params: (), update)


def of_other_shapes(learning_rate):
  return optax.stateless(lambda u, _: jax.tree.map(jnp.sum, u))


@pytest.mark.parametrize(
  'name, fields, words',
  [
    ('adamw', {'kwargs': {'b2': 0.5}}, 'arguments are all fields of optim'),
    ('sgd', {'kwargs': {'momentun': 1}}, 'momentun.* do not fit sgd'),
    ('sgd', {'kwargs': {'momentum': 1.0}}, 'momentum=1.0; give less than 1'),
    ('lion', {'kwargs': {'b1': 0.5}}, "kwargs has 'b1'.* set optim.b1"),
    ('lion', {'kwargs': {'schedule': 1.0}}, 'set optim.lr instead'),
    ('optax:sgd', {}, "no argument 'weight_decay'.* optim.weight_decay=0"),
    ('optax:gone', {}, "has no function 'gone'"),
    ('no_such_module:f', {}, "config.optim.name='no_such_module:f' cannot be"),
    (f'{HERE}:no_rate', {}, "has no argument 'learning_rate'"),
    (f'{HERE}:no_transform', {}, 'is no optax transformation'),
    (f'{HERE}:fails', {}, "raised KeyError: 'gone'"),
    (f'{HERE}:fails_when_traced', {}, "cannot be used: KeyError: 'later'"),
    (f'{HERE}:of_other_shapes', {}, 'updates of other shapes'),
    ('optax:sgd', {'moments': True}, 'holds no moments of Adam'),
    ('optax:sgd', {'brake': 'project'}, 'holds no moments of Adam'),
    ('optax:sgd', {'overshoot_every_steps': 1}, 'holds no moments of Adam'),
  ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(
  name, fields, words
):
  own_fields = name != 'optax:sgd' or fields
  decay = 0.1 if name == 'optax:sgd' and not own_fields else 0.0
  with pytest.raises(ValueError, match=words) as refused:
    make(name, **{'weight_decay': decay, **fields})
  assert '\n' not in str(refused.value)


def test_a_method_that_reads_adams_decays_is_refused():
  config = runs.arithmetic(
    **{
      'learner.method': f'{HERE}:coasts',
      'learner.method_kwargs': {},
      'optim.name': 'sgd',
    }
  )
  with pytest.raises(ValueError, match="takes 'adam_b1' from the run"):
    build.run(config)


@losses.takes_from_run(b1='adam_b1')
def coasts(b1):
  del b1
  return losses.methods.rloo()


@functools.cache
def gradients():
  model = tiny.model()
  draw = np.random.default_rng(3).standard_normal
  return [
    jax.tree.map(lambda x: np.float32(draw(x.shape)), model.abstract())
    for _ in range(2)
  ]


def updated(transform, mesh):
  """Parameters and state after two updates, each array where it belongs."""
  learner = learning.make_learner(
    losses.methods.grpo(), mesh=mesh, optimizer=transform
  )
  params = learning.PARAMS
  place = step.state_sharding(learner, params)
  with jax.sharding.set_mesh(learner.mesh):
    params = jax.device_put(params, place.params)
    state = jax.jit(transform.init, out_shardings=place.opt_state)(params)
    update = jax.jit(
      transform.update, out_shardings=(place.params, place.opt_state)
    )
    for gradient in gradients():
      moved, state = update(gradient, state, params)
      params = optax.apply_updates(params, moved)
  return params, state


@pytest.mark.parametrize(
  'name',
  ['adafactor', *(pytest.param(n, marks=pytest.mark.long) for n in NAMES[1:])],
)
def test_eight_devices_have_the_state_between_them(name):
  kwargs = {
    'adafactor': {'min_dim_size_to_factor': 16, 'momentum': 0.9},
    'sgd': {'momentum': 0.9},
  }.get(name, {})
  transform = make(name, braked=False, kwargs=kwargs)
  params, state = updated(transform, dict(data=2, fsdp=2, tensor=2))
  alone, of_one = updated(transform, {})
  close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
  jax.tree.map(close, params, alone)
  jax.tree.map(close, state, of_one)
  held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
  )
  # Of four parts; norms, counters and short axes are on every device.
  assert held < 0.4 * sum(x.nbytes for x in jax.tree.leaves(state))


def test_a_plan_counts_the_state_of_any_optimizer():
  def counted(name, **fields):
    config = runs.small(**{'optim.name': name, **fields})
    parts = build.abstract(config, sharding.make_mesh())
    return arithmetic.count_weights(parts)

  adam, lion = counted('adamw'), counted('lion')
  assert adam.moments == pytest.approx(2 * adam.trained, rel=1e-3)
  assert lion.moments == pytest.approx(lion.trained, rel=1e-3)
  wide = {'model.width': 256, 'model.mlp_width': 512}
  small = counted('adafactor', **wide)
  assert small.moments < 0.03 * small.trained
  own = counted('optax:adam', **{'optim.weight_decay': 0.0})
  assert own.moments == adam.moments


@pytest.mark.long
@pytest.mark.parametrize('name', NAMES)
def test_a_run_trains_with_each(name, tmp_path):
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'steps': 2,
      'optim.name': name,
      'optim.warmup_steps': 0,
      'evaluation.every_steps': 0,
      'data.heldout': '',
    }
  )
  loop.train(config, tmp_path)
  first, second = runs.records(tmp_path)[-2:]
  assert first['learning_rate'] == pytest.approx(config.optim.lr)
  assert second['update_norm'] > 0 and second['nonfinite_loss'] == 0


@pytest.mark.long
@pytest.mark.parametrize('name', NAMES)
def test_adapters_train_with_each(name, tmp_path):
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'steps': 2,
      'lora.rank': 2,
      'optim.name': name,
      'optim.warmup_steps': 0,
    }
  )
  loop.train(config, tmp_path)
  assert runs.records(tmp_path)[-1]['update_norm'] > 0


class After(stop_signal.Stop):
  """Says stop from the n-th question on."""

  def __init__(self, questions):
    super().__init__()
    self.left = questions

  def __call__(self):
    self.left -= 1
    return self.left < 0


@pytest.mark.long
@pytest.mark.parametrize('name', ['muon', 'adafactor'])
def test_a_run_in_two_starts_is_the_run_in_one(name, tmp_path):
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'optim.name': name,
      'optim.decay': 'warmup-stable-decay',
      'optim.decay_share': 0.7,
    }
  )
  loop.train(config, tmp_path / 'whole')
  loop.train(config, tmp_path / 'parts', After(7))
  assert 1 < len(runs.records(tmp_path / 'parts')) < 5
  loop.train(config, tmp_path / 'parts')
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'parts')
  rates = [row['learning_rate'] for row in runs.records(tmp_path / 'whole')[1:]]
  assert rates[1] == pytest.approx(config.optim.lr) and rates[-1] < rates[1]
