"""A method of one's own reads what the records of a run have for it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_jax
from grpo_jax import data
from grpo_jax import losses
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.mesh import sharding
from grpo_jax.rollouts import batch_fields
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import turn_fields
from grpo_jax.rollouts.batch_fields import BatchField
from grpo_jax.run import loop
from grpo_jax.run.build import batch_fields as build_fields
from grpo_jax.run.build import build
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import names
from grpo_jax.run.build import placing
from tests import bigram
from tests import judges
from tests import learning
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')

HERE = __name__
# Powers of two, so that products with them are exact.
WEIGHTS = (0.5, 1.0, 4.0)


def records():
  """Sums, each with a weight."""
  source = data.ArithmeticSource('train')
  return [{**source[n], 'my_weight': WEIGHTS[n % 3]} for n in range(60)]


def by_token(record, ids):
  return [2.0 if i % 2 else 1.0 for i in ids]


def weighted():
  """Multiplies by a number of the record, and by one of each token."""
  by_weight = losses.on_advantage(
    lambda advantage, batch: advantage * batch.extras['my_weight'][..., None],
    requires=['my_weight'],
  )
  by_token = losses.on_objective(
    lambda terms, batch: terms.objective * batch.extras['of_tokens'],
    requires=['of_tokens'],
  )
  return losses.chain(
    losses.center_by_group(),
    by_weight,
    losses.mean_over_tokens(),
    losses.ppo_clip(),
    by_token,
  )


def by_hand():
  """The same for `weighted_even`, without any field."""
  return losses.chain(
    losses.center_by_group(),
    losses.on_advantage(
      lambda advantage, batch: jnp.where(
        batch.tokens % 2 == 1, 2 * advantage, advantage
      ),
      requires=['tokens'],
    ),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
  )


def weighted_even(prompt, completion, example):
  return example['my_weight'] * judges.even(prompt, completion, example)


FIELDS = {'of_tokens': f'{HERE}:by_token'}


def small(**changes):
  return runs.small(
    **{
      'reward': 'tests.judges:even',
      'data.train': f'{HERE}:records',
      'data.heldout': '',
      'evaluation.every_steps': 1,
      'data.prompt_buckets': (6,),
      'learner.method': f'{HERE}:weighted',
      'learner.method_kwargs': {},
      'learner.fields': FIELDS,
      'optim.warmup_steps': 0,
      **changes,
    }
  )


def params(workdir):
  _, arrays, _ = runs.saved(workdir)
  found = {name: x for name, x in arrays.items() if 'params' in name}
  assert len(found) > 5
  return found


def assert_same(workdir, other):
  for name, array in params(workdir).items():
    np.testing.assert_array_equal(array, params(other)[name], err_msg=name)


def filled_and_scaled():
  """A rollout with the fields, and one whose rewards have the weights."""
  rollout = learning.bigram_rollout()
  batch, given = rollout.batch, records()[: len(rollout.prompts)]
  fields = [BatchField('my_weight'), BatchField('of_tokens', by_token)]
  weight = np.array([one['my_weight'] for one in given], np.float32)[:, None]
  scaled = batch._replace(reward=weight * batch.reward)
  return (
    batch_fields.with_fields(rollout, given, fields),
    rollout._replace(batch=scaled),
  )


def test_the_slope_of_the_loss_is_the_product_by_hand():
  filled, scaled = filled_and_scaled()
  logp = jnp.asarray(filled.batch.logp_old) + 0.1

  def slope(method, batch):
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)
    loss = lambda x: losses.surrogate_loss(method, x, batch, state)[0]
    return jax.grad(loss)(logp)

  slopes = jax.jit(
    lambda *x: (slope(weighted(), x[0]), slope(by_hand(), x[1]))
  )(filled.batch, scaled.batch)
  assert np.any(slopes[0])
  np.testing.assert_array_equal(*slopes)


@pytest.mark.long
@pytest.mark.parametrize('layout', ['padded', 'packed', 'shared'])
def test_the_gradient_of_a_learner_is_the_product_by_hand(layout):
  """In micro-batches, each of a row."""
  found, start = [], bigram.params()
  for method, drawn in zip((weighted(), by_hand()), filled_and_scaled()):
    updater = learning.make_updater(
      learning.bigram_learner(method), start, learning.spec(layout), batches=2
    )
    state = updater.compiled.init(jax.tree.map(jnp.copy, start))
    state, measured, _ = learning.learn(
      updater, updater.layout, state, drawn, 0
    )
    found.append((state.params, measured['grad_norm']))
  jax.tree.map(np.testing.assert_array_equal, *found)
  moved = jax.tree.map(lambda x, y: np.any(x != y), found[0][0], start)
  assert any(jax.tree.leaves(moved))


@pytest.mark.long
@pytest.mark.parametrize(
  'changes',
  [
    {'learner.batches': 2, 'learner.epochs': 2},
    {'learner.layout': 'padded'},
    {'learner.layout': 'packed'},
    {'mesh.data': 2, 'mesh.fsdp': 2, 'learner.micro_rows': 4},
  ],
)
def test_the_gradient_of_a_run_is_the_product_by_hand(changes, tmp_path):
  """Bit for bit, by a reward and tokens that are multiplied without fields."""
  loop.train(small(steps=2, **changes), tmp_path / 'fields')
  hand = {
    'reward': f'{HERE}:weighted_even',
    'learner.method': f'{HERE}:by_hand',
    'learner.fields': {},
  }
  loop.train(small(steps=2, **changes, **hand), tmp_path / 'hand')
  assert_same(tmp_path / 'fields', tmp_path / 'hand')
  norms = [
    [line['grad_norm'] for line in runs.records(tmp_path / name)[1:]]
    for name in ('fields', 'hand')
  ]
  assert norms[0] == norms[1] and all(norms[0])
  first = parquet.path_of(tmp_path / 'fields' / 'completions', 1)
  batch = parquet.read(first).batch
  assert batch.extras['my_weight'].shape == batch.reward.shape
  assert len(np.unique(batch.extras['my_weight'])) > 1
  np.testing.assert_array_equal(
    batch.extras['of_tokens'], batch.mask * (1 + batch.tokens % 2)
  )


RESUMED = {
  'sampler.resample_rounds': 2,
  'sampler.group': 2,
  'learner.batches': 2,
  'learner.epochs': 2,
}


@pytest.mark.long
@pytest.mark.parametrize('changes', [RESUMED, {'sampler.ahead': 1}])
def test_a_run_in_pieces_is_the_run_in_one_and_its_replay(changes, tmp_path):
  loop.train(small(**changes), tmp_path / 'whole')
  surplus = 0
  for steps in range(1, 5):
    loop.train(small(steps=steps, **changes), tmp_path / 'pieces')
    surplus += 'surplus' in runs.saved(tmp_path / 'pieces')[2]['sha256']
  assert surplus or changes is not RESUMED
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'pieces')
  completions = tmp_path / 'whole' / 'completions'
  loop.train(small(**changes), tmp_path / 'again', replay=completions)
  assert_same(tmp_path / 'whole', tmp_path / 'again')


def test_functions_may_be_given_in_python():
  mine = lambda record, ids: [record['my_weight']] * len(ids)
  config, objects = placing.place(small(), fields={'of_tokens': mine})
  words = '<field of_tokens given in Python>'
  assert config.learner.fields == {'of_tokens': words}
  assert build.run(config, objects).fields[1] == BatchField('of_tokens', mine)
  assert 'my_weight' in objects.records[words]['source']
  with pytest.raises(ValueError, match=r'fields \(of_tokens\).*fields={...}'):
    build.run(config)
  named = {'of_tokens': f'{HERE}:by_token'}
  assert placing.place(small(), fields=named)[0] == small()


@pytest.mark.long
def test_functions_and_records_may_be_given_in_python(tmp_path):
  """And the next start needs them again."""
  mine = lambda record, ids: [record['my_weight']] * len(ids)
  given = dict(prompts=records(), method=weighted(), fields={'of_tokens': mine})
  config = small(steps=1)
  grpo_jax.train(config, tmp_path, **given)
  saved = json.loads((tmp_path / 'config.json').read_text())
  words = '<field of_tokens given in Python>'
  assert saved['learner']['fields'] == {'of_tokens': words}
  assert "record['my_weight']" in (tmp_path / 'given.json').read_text()
  batch = parquet.read(parquet.path_of(tmp_path / 'completions', 1)).batch
  np.testing.assert_array_equal(
    batch.extras['of_tokens'], batch.mask * batch.extras['my_weight'][..., None]
  )
  with pytest.raises(ValueError, match=r'fields \(of_tokens\) .*fields={...}'):
    loop.train(config, tmp_path)
  given['fields'] = {'of_tokens': lambda record, ids: [1.0 for _ in ids]}
  with pytest.raises(ValueError, match='field of_tokens is not the one that'):
    grpo_jax.train(config, tmp_path, **given)


def test_a_replay_of_files_without_the_field_is_refused(tmp_path):
  """Before anything is compiled, and a workdir is made."""
  file = parquet.path_of(tmp_path / 'completions', 1)
  parquet.write(file, rollout_lib.blank(4, 4, 1, 5, 1, (5,)), 1)
  with pytest.raises(ValueError, match="parquet has no field 'my_weight', whi"):
    loop.train(small(), tmp_path / 'b', replay=tmp_path / 'completions')
  assert not (tmp_path / 'b').exists()


GOOD = {'prompt': '01+02=', 'answer': '3', 'my_weight': 1}


@pytest.mark.parametrize(
  'bad, words',
  [
    ({'my_weight': None}, 'its my_weight is None, no number'),
    ({'my_weight': 'high'}, "its my_weight is 'high', no number"),
    ({'my_weight': 1e39}, 'no finite number of float32'),
    ('my_weight', "it has no field 'my_weight', but answer, prompt"),
  ],
)
def test_a_record_without_the_field_is_refused_before_all_else(
  bad, words, tmp_path
):
  """In a file, of which the line is named."""
  record = {**GOOD, **bad} if isinstance(bad, dict) else dict(GOOD)
  if isinstance(bad, str):
    del record[bad]
  lines = [GOOD, GOOD, record, GOOD]
  file = tmp_path / 'a.jsonl'
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  with pytest.raises(ValueError) as caught:
    build.run(small(**{'data.train': str(file)}))
  said = str(caught.value)
  assert said.startswith(f'Line 3 of {str(file)!r} cannot be used: ')
  assert words in said and said.endswith(
    f"and the method '{HERE}:weighted', by its transform weighted, reads it; "
    'give every record a number of this name, or name a function (record, ids) '
    "-> a number for each id, as in config.learner.fields={'my_weight': "
    "'my_lab.losses:by_token'}."
  )


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'of_tokens': 'tests.judges:gone'}, "has no function 'gone'"),
    ({'of_tokens': f'{HERE}:records'}, r'is a function of \(\), but it will'),
    ({'noise': f'{HERE}:by_token'}, "names 'noise', which a run computes its"),
  ],
)
def test_a_function_that_cannot_be_called_is_refused(fields, words):
  config = small(**{'learner.fields': {**FIELDS, **fields}})
  with pytest.raises(ValueError, match=words):
    method = build_method.method_of(config)
    build_fields.batch_fields_of(config, method)


@pytest.mark.parametrize(
  'fields, words',
  [
    ([by_token], 'is no dict; give functions'),
    ({'of_tokens': 1.0}, r"fields\['of_tokens'\] is 1.0; give a function"),
    ({'of_tokens': records}, r'records\(\), but it will be called with \(reco'),
  ],
)
def test_what_is_no_function_is_refused(fields, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    grpo_jax.train(small(), tmp_path / 'run', fields=fields)


def test_rewards_of_turns_are_asked_for_where_there_are_turns():
  """With the weight of the environment's reward."""
  rewards = {'name': 'exact_match'}, {'name': 'environment', 'weight': 0.5}
  played = {'environment.name': 'my.envs:game', 'environment.max_turns': 7}
  chat = {'data.chat': True, 'rewards': rewards}
  method = losses.methods.rloo_to_go()
  turns_of = lambda method, **changes: build_fields.turn_fields_of(
    runs.small(**changes), method
  )
  found = turns_of(method, **played, **chat)
  assert found == turn_fields.TurnFields(('turn_reward',), 7, 0.5)
  both = turns_of(losses.methods.gigpo(), **played, **chat)
  assert both.names == ('turn_reward', 'turn_state')
  alone = turns_of(method, **played, **{**chat, 'rewards': rewards[:1]})
  assert alone.weight == 0
  assert turns_of(method) == turn_fields.NO_TURNS
  plain = losses.methods.grpo()
  assert turns_of(plain, **played, **chat) == turn_fields.NO_TURNS


def test_a_misspelt_function_is_refused_before_jax_is_imported():
  names.check(small())
  gone = {'of_tokens': 'tests.judges:gone'}
  with pytest.raises(ValueError, match="fields.'of_tokens'.='tests.judges:go"):
    names.check(small(**{'learner.fields': gone}))


def test_programs_are_compiled_for_their_shapes():
  """Also for a plan, which has no records."""
  plan = build.abstract(small(), sharding.make_mesh()).example()
  extras, shape = plan.batch.extras, plan.batch.mask.shape
  assert extras['my_weight'].shape == shape[:2]
  assert extras['of_tokens'].shape == shape


def test_a_field_that_the_method_does_not_read_is_left_alone():
  """So that one change is enough to compare two methods."""
  config = small(**{'learner.method': 'dr_grpo'})
  assert build.run(config).fields == ()
