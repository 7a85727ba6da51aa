"""What `build.run` makes of a config, besides the specs of `specs_test.py`.

Each field of a config is read by a row of `parts` or of `specs_test.ROWS`; one
that no row reads fails.
"""

import collections
import contextlib
import functools
import re
import types
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax import models
from grpo_jax import monitor
from grpo_jax import optim
from grpo_jax import rewards
from grpo_jax.mesh import random_keys
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.run.build import about
from grpo_jax.run.build import build
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import optimizer
from grpo_jax.run.build import specs
from tests import tiny
from tests.run.build import configs
from tests.run.build import specs_test


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """Three configs, with the run of each and where JAX keeps its programs."""
  folder, made = tmp_path_factory.mktemp('files'), []
  configs.write_files(folder)
  for number in range(3):
    config = configs.config_of(number, folder)
    with jax_without_cache():
      run = build.run(config)
      made.append((config, run, jax.config.jax_compilation_cache_dir))
  return made


@contextlib.contextmanager
def jax_without_cache():
  """JAX as a user has it who has set nothing; the tests have a cache."""
  kept = 'jax_compilation_cache_dir'
  least = 'jax_persistent_cache_min_compile_time_secs'
  before = {name: getattr(jax.config, name) for name in (kept, least)}
  jax.config.update(kept, None)
  jax.config.update(least, 1.0)
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def some(value, *names):
  """Fields of a value, by their names."""
  return {name: getattr(value, name) for name in names}


AXES = 'data', 'fsdp', 'tensor', 'expert', 'context', 'slices'
DRAWING = (
  'temperature', 'top_k', 'top_p', 'min_p', 'min_tokens', 'stop_strings',
)  # fmt: skip
SHAPE = (
  'num_layers', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_width',
  'rope_base', 'norm_epsilon', 'qk_norm', 'qkv_bias', 'tied_embeddings',
)  # fmt: skip
SHOWN = (
  'display', 'samples', 'tensorboard', 'wandb_project', 'wandb_mode',
  'mlflow_experiment', 'mlflow_uri',
)  # fmt: skip


def parts(config, run, c):
  """Each part of a run by name: what is found in it, and what is wanted.

  Args:
    config: As it is.
    run: What was built of it.
    c: The config again; it notes which fields are read.
  """
  tokenizer, model = run.tokenizer, run.model.config
  engine, learner = run.engine, run.learn.learner
  devices, own = jax.devices(), c.generator.devices
  learning = devices[: len(devices) - own]
  mesh = sharding.make_mesh(**some(c.mesh, *AXES), devices=learning)
  yield 'mesh', run.mesh, mesh
  on = sharding.sampling_mesh(mesh, c.sampler.tensor, c.mesh.slices)
  if own:
    apart = devices[len(devices) - own :]
    on = sharding.generating_mesh(mesh, own, c.sampler.tensor, apart)
  yield 'mesh of the engine', engine.mesh, on
  yield 'mesh of whoever samples', run.sampling_mesh, on
  draws = own or c.sampler.ahead or c.generator.listen
  yield 'who draws', run.draws_ahead, bool(draws)
  turn = 32 if c.generator.updates == 'inflight' else None
  if isinstance(engine, engines.LocalEngine):
    yield 'tokens by the same weights', engine.turn_tokens, turn
  yield 'ages', learner.measuring.ages, c.sampler.ahead
  yield 'rows of the engine', engine.max_rows, c.sampler.max_rows
  yield 'its prompts', engine.prompt_buckets, c.data.prompt_buckets
  yield 'its completions', engine.completion_buckets, c.data.completion_buckets
  # Otherwise special tokens are hidden.
  text = 'decode_whole' if '<s>' in c.sampler.stop_strings else 'decode'
  yield 'text for stop strings', engine.decode.__name__, text
  yield 'sampling', some(run.sampling, *DRAWING), some(c.sampler, *DRAWING)
  token = tokenizer.backend.id_to_token
  found = [*map(token, run.sampling.eos_ids)], token(tokenizer.pad_id)
  yield 'tokens', (*found, tokenizer.vocab_size), tokens(c.data)
  fields = 'chat', 'system_prompt', 'chat_kwargs', 'completion_prefix'
  prompt = data.PromptFormat(**some(c.data, *fields))
  yield 'prompts in tokens', tokenizer.prompt_format, prompt
  yield 'shape', (some(model, *SHAPE), model.pattern), shape(c.model)
  computed = some(c.model, *configs.COMPUTED)
  yield 'computed', some(model, *configs.COMPUTED), computed
  rows = 70 if c.model.path else tokens(c.data)[-1]
  yield 'vocabulary', model.vocab_size, rows
  adapters = c.lora.rank and models.LowRank(
    rank=c.lora.rank, alpha=c.lora.alpha, targets=c.lora.targets
  )
  yield 'adapters', model.lora, adapters or None
  frozen = build.abstract_params(run).frozen
  dtype = c.lora.base_dtype if c.lora.rank else None
  yield 'beside them', frozen and frozen['embedding'].dtype.name, dtype
  yield 'prompts', first(run.prompts), prompts(c)
  yield 'held-out problems', first(run.heldout or []), heldout(c)
  shown = run.warm_up.demonstrations()
  yield 'demonstrations', first(shown), demonstrations(c)
  yield 'rewards', run.rewards, tuple(map(reward, c.rewards))
  yield 'method', configs.TOLD.get(learner.method), told(c)
  by_name = c.learner.fields if ':' in c.learner.method else {}
  by_name = {name: resolved(one) for name, one in by_name.items()}
  yield 'fields of a batch', {one[0]: one[1] for one in run.fields}, by_name
  yield 'optimizer', program(learner), program(braked(c))
  warm_up, peak = run.warm_up.learn.learner, c.warm_up.lr
  rate = optim.learning_rate(peak, decay='linear', total_steps=c.warm_up.steps)
  yield 'that of the warm-up', program(warm_up), program(adam(c, rate))
  # Of 2 width products, where a layer has 12 width^2.
  width = 24 if c.model.path else c.model.width
  yield 'cost of a key', run.learn.layout.key_cost, 2 * width / (12 * width**2)
  made = build.example(run).batch
  shapes = (made.tokens.shape, made.reward_parts.shape[-1])
  largest = c.sampler.prompts, c.sampler.group, max(c.data.completion_buckets)
  yield 'largest rollout', shapes, (largest, len(c.rewards))
  effects = c.log.completions_every_steps * c.log.token_effects
  due = every(effects, 1), every(c.log.geometry_every_steps, 0)
  yield 'instruments', instruments(run), due
  answer = c.evaluation.answer and resolved(c.evaluation.answer)
  yield 'answer', build.answer_function(run.evaluation), answer or None
  yield 'what is shown', about.monitored(config), shown_by(c)


def test_each_part_has_what_the_config_says(built):
  """All in one test, because building the three runs takes seconds."""
  read, found = set(), collections.defaultdict(set)
  for config, run, cache in built:
    noted = configs.Noted(config, read)
    kept = 'compiled programs', cache, noted.compilation_cache
    for name, value, wanted in (kept, *parts(config, run, noted)):
      assert value == wanted, name
      found[name].add(repr(value))
    for row in specs_test.ROWS.values():
      configs.wanted(config, row, read)
  for name, values in found.items():
    # With a single value, a constant in the code would go unnoticed.
    assert len(values) > 1, name
  missing = _fields() - read
  assert not missing, 'give it a row in parts, or in those of specs_test'


def _fields():
  """All but those of episodes, servers and teachers.

  These have tests of their own: environment_test.py, engine_test.py and
  ../teacher_test.py.
  """
  own = 'environment.', 'agent.', 'engine.', 'teacher.'
  return {name for name in configs.fields() if not name.startswith(own)}


def test_each_field_has_two_values(built):
  for name in _fields() - {*configs.ONE_VALUE}:
    values = {repr(configs.value_of(config, name)) for config, _, _ in built}
    assert len(values) > 1, f'{name} needs two values in configs.PAIRS'


def tokens(fields):
  """The end tokens, the one that pads, and the size of the vocabulary."""
  if fields.tokenizer == 'arithmetic':  # which has its own
    return [*data.EOS_TOKENS], '<pad>', 14
  file = tokenizers.Tokenizer.from_file(f'{fields.tokenizer}/tokenizer.json')
  return [*fields.eos_tokens], fields.pad_token, file.get_vocab_size()


def shape(fields):
  """The shape of a model, which comes with its files if there are any."""
  if fields.path:
    found = weights.source(fields.path).config()
    return some(found, *SHAPE), found.pattern
  windows = (models.LayerKind(size or None) for size in fields.window_tokens)
  return some(fields, *SHAPE), tuple(windows)


def source(config, named):
  """What a source of the config stands for."""
  if named.name.endswith('own_source'):
    return configs.own_source(**named.kwargs)
  fields = 'prompt_field', 'answer_field', 'last_turn'
  return data.jsonl_source([named.name], **some(config.data, *fields))


def first(records):
  """What is read of the first records."""
  few = [records[i] for i in range(min(8, len(records)))]
  return [(record['prompt'], record['answer']) for record in few]


def prompts(config):
  several = config.data.train
  if isinstance(several, str):
    several = [config_lib.Source(several)]
  found = [source(config, named) for named in several]
  shares = [named.weight for named in several]
  return first(data.mixture(found, shares, config.seed))


def heldout(config):
  found = [source(config, named) for named in config.data.heldout]
  assert all(named.weight == 1 for named in config.data.heldout)
  return first([records[i] for records in found for i in range(len(records))])


def demonstrations(config):
  fields = config.warm_up
  if fields.demonstrations == 'arithmetic':
    found = data.arithmetic_demonstrations(
      fields.steps * fields.examples, fields.carry_free_share, config.seed
    )
  else:
    found = source(config, config_lib.Source(fields.demonstrations))
  return first(data.prompt_stream(found, config.seed))


def resolved(name):
  module, _, function = name.partition(':')
  assert module == configs.OWN
  return getattr(configs, function)


def reward(named):
  return rewards.WeightedReward(
    name=named.label or named.name,
    function=resolved(named.name),
    failed=named.failed_reward if named.on_failure == 'reward' else None,
    imported_as=named.name,
    **some(named, 'weight', 'where', 'required', 'kwargs'),
  )


def told(config):
  """What the method is called with, if it is the user's."""
  weights_of = tuple(one.weight for one in config.rewards)
  facts = {
    'weights': weights_of,
    'updates': config.learner.batches * config.learner.epochs,
    'b1': config.optim.b1,
    'b2': config.optim.b2,
    'right': config.evaluation.right_reward * weights_of[0],
    'most': config.sampler.max_tokens,
  }
  facts |= config.learner.method_kwargs
  return facts if ':' in config.learner.method else None


def adam(config, rate):
  """The optimizer without what is put around it."""
  fields = config.optim
  decays = functools.partial(optimizer.decays, tiny.model())
  decay, most = fields.weight_decay, fields.clip_norm or None
  if fields.name.endswith('own_optimizer'):
    made = configs.own_optimizer(rate, decay, decays, **fields.kwargs)
    return optim.clip_first(made, most)
  assert (fields.name, fields.kwargs) == ('adamw', {})
  numbers = some(fields, 'b1', 'b2', 'epsilon', 'weight_decay')
  return optim.adamw(rate, **numbers, clip_norm=most, decays=decays)


def braked(config):
  fields, learner = config.optim, config.learner
  rate = optim.learning_rate(
    peak=fields.lr,
    total_steps=config.steps * learner.batches * learner.epochs,
    **some(fields, 'warmup_steps', 'decay', 'decay_share'),
  )
  made = adam(config, rate)
  if fields.brake == 'project':
    made = optim.project_outward(made, fields.epsilon)
  elif fields.brake == 'reset_first':
    made = optim.reset_moments(made, 'first')
  if fields.reward_scale:
    made = optim.restore_reward_scale(made, fields.reward_scale)
  if fields.moments:
    made = optim.record_adam_moments(made, fields.epsilon)
  return made


def program(transform):
  """An update as JAX traces it, with all its constants."""
  if not hasattr(transform, 'update'):  # of a learner
    transform = transform.optimizer.transform

  def update(params, gradient):
    extra = {
      'first_of_rollout': jnp.array(True),
      'clipped_share': jnp.zeros(()),
      'advantage_scale': jnp.zeros(()),
      'outward': params,
    }
    return transform.update(gradient, transform.init(params), params, **extra)

  params = {'embedding': np.ones((2, 3)), 'final_norm': {'scale': np.ones(3)}}
  traced = jax.make_jaxpr(update)(params, params)
  numbers = [np.asarray(constant).tolist() for constant in traced.consts]
  return re.sub('0x[0-9a-f]+', '', f'{traced}'), numbers


def instruments(run):
  """In which rollouts token effects and geometry are measured."""
  compiled = types.SimpleNamespace(learner=run.learn.learner, mesh=run.mesh)
  updater: Any = types.SimpleNamespace(compiled=compiled)
  found = build_learner.instruments(run.measure, updater)[:2]
  return tuple([one.is_due(step) for step in range(9)] for one in found)


def every(steps, later):
  return [bool(steps) and (step + later) % steps == 0 for step in range(9)]


def shown_by(config):
  dtypes = some(config.model, 'residual_dtype', 'compute_dtype')
  narrow = tuple(f'model.{k}' for k, v in dtypes.items() if v != 'float32')
  log = config.log
  limits = monitor.Limits(
    log.kl_alarm,
    log.entropy_alarm,
    log.sampler_gap_alarm,
    narrow,
    config.sampler.ahead,
  )
  return monitor.Options(**some(log, *SHOWN), limits=limits)


class Told(models.Transformer):
  """Returns what it is asked for."""

  def score(self, *asked, **more):
    return asked, more

  score_routed = score


def test_a_run_scores_at_its_temperature_and_its_warm_up_at_1(built):
  model, (config, run, _) = Told(specs_test.SHAPE), built[0]
  learn = build_learner.learn_spec(config, model, run.mesh, specs_test.METHOD)
  warm_up = build_learner.warm_up_spec(config, model, run.mesh, list)
  for spec, at in (learn, 0.7), (warm_up.learn, 1.0):
    scoring = spec.learner.scoring
    for score, forward in (scoring.score, False), (scoring.score_forward, True):
      asked, more = score('params', 'rows', 'entropy')
      assert asked == ('params', 'rows', at, 'entropy')
      # What is differentiated forwards cannot pass through faster code.
      assert more == {'forward_mode': forward}
    asked, _ = scoring.score_routed('params', 'rows', 'entropy', 'some', 'ids')
    assert asked == ('params', 'rows', 'some', 'ids', at, 'entropy')


class Drawn(models.Transformer):
  """Has one parameter, which is drawn at random."""

  def init(self, key):
    return {'embedding': jax.random.bits(key, (2, 3)) * 1.0}


@pytest.mark.parametrize('seed', [1, 2])
def test_parameters_are_drawn_from_the_seed(seed):
  spec = specs.WeightsSpec('', None, seed, False, 'float32', None)
  model = Drawn(tiny.CONFIG)
  found = build_model.initial(spec, model, sharding.make_mesh())
  wanted = model.init(random_keys.key(seed, 'init'))
  np.testing.assert_array_equal(found['embedding'], wanted['embedding'])
