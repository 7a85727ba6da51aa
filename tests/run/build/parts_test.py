"""What `build.run` makes of a config, besides the specs of `specs_test.py`.

`ROWS` says of each part of a run what it has of the config: what is found in
the part, and what is wanted. Each field of a config is read by a row here or in
`specs_test.py`; one that no row reads fails.
"""

import contextlib
import dataclasses
import functools
import re
import types
from typing import Any
from typing import NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from grpo_jax import config as config_lib
from grpo_jax import data
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


class Built(NamedTuple):
  """A run, and what building it has set."""

  config: config_lib.Config
  run: build.Run
  cache: str  # where JAX keeps programs


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  folder = tmp_path_factory.mktemp('files')
  configs.write_files(folder)
  made = []
  for number in range(3):
    config = configs.config_of(number, folder)
    with jax_without_cache():
      run = build.run(config)
      made.append(Built(config, run, jax.config.jax_compilation_cache_dir))
  return made


@contextlib.contextmanager
def jax_without_cache():
  """JAX as a user has it who has set nothing; the tests have a cache."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in zip(names, (None, 1.0), strict=True):
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def mesh(config):
  axes = config.mesh
  return sharding.make_mesh(
    data=axes.data,
    fsdp=axes.fsdp,
    tensor=axes.tensor,
    expert=axes.expert,
    slices=axes.slices,
    context=axes.context,
  )


def tokens(run):
  """The size of the vocabulary; the tokens that end and that pad."""
  text = run.tokenizer.backend.id_to_token
  ends = tuple(map(text, run.sampling.eos_ids))
  return run.tokenizer.vocab_size, ends, text(run.tokenizer.pad_id)


def tokens_named(config):
  fields = config.data
  if fields.tokenizer == 'arithmetic':  # which has its own
    return 14, data.EOS_TOKENS, '<pad>'
  file = tokenizers.Tokenizer.from_file(f'{fields.tokenizer}/tokenizer.json')
  return file.get_vocab_size(), fields.eos_tokens, fields.pad_token


SHAPE = (
  'num_layers', 'width', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_width',
  'rope_base', 'norm_epsilon', 'qk_norm', 'qkv_bias', 'tied_embeddings',
)  # fmt: skip


def shape(run):
  """All of a model's shape but its vocabulary, which the tokenizer has."""
  found = run.model.config
  windows = tuple(kind.window_tokens for kind in found.pattern)
  names = *SHAPE, *configs.COMPUTED
  return {name: getattr(found, name) for name in names}, windows, found.lora


def shape_named(config):
  fields, lora, source = config.model, config.lora, config.model
  windows = tuple(size or None for size in fields.window_tokens)
  if fields.path:  # the shape comes with the files
    source = weights.source(fields.path).config()
    windows = tuple(kind.window_tokens for kind in source.pattern)
  values = {name: getattr(source, name) for name in SHAPE}
  values |= {name: getattr(fields, name) for name in configs.COMPUTED}
  adapters = models.LowRank(
    rank=lora.rank or 1, alpha=lora.alpha, targets=lora.targets
  )
  return values, windows, adapters if lora.rank else None


def source(config, named):
  """What a source of the config stands for."""
  fields = config.data
  if named.name.endswith('own_source'):
    return configs.own_source(**named.kwargs)
  return data.jsonl_source(
    [named.name],
    prompt_field=fields.prompt_field,
    answer_field=fields.answer_field,
    last_turn=fields.last_turn,
  )


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
  several = config.data.heldout
  found = [source(config, named) for named in several]
  for named in several:
    assert named.weight == 1
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
    weight=named.weight,
    where=named.where,
    failed=named.failed_reward if named.on_failure == 'reward' else None,
    required=named.required,
    kwargs=named.kwargs,
    imported_as=named.name,
  )


def told(config):
  """What the method is called with, if it is the user's."""
  fields, run = config.learner, config
  weights_of = tuple(one.weight for one in run.rewards)
  right = run.evaluation.right_reward
  facts = {
    'weights': weights_of,
    'updates': fields.batches * fields.epochs,
    'b1': run.optim.b1,
    'b2': run.optim.b2,
    'right': right * weights_of[0],
    'most': run.sampler.max_tokens,
  }
  given = dict(fields.method_kwargs)
  return facts | given if ':' in fields.method else None


def schedule(config):
  fields, learner = config.optim, config.learner
  return optim.learning_rate(
    peak=fields.lr,
    warmup_steps=fields.warmup_steps,
    decay=fields.decay,
    total_steps=config.steps * learner.batches * learner.epochs,
    decay_share=fields.decay_share,
  )


def warm_up_schedule(config):
  fields = config.warm_up
  return optim.learning_rate(
    fields.lr, decay='linear', total_steps=fields.steps
  )


def adam(config, rate):
  """The optimizer without what is put around it."""
  fields = config.optim
  decays = functools.partial(optimizer.decays, tiny.model())
  most = fields.clip_norm or None
  if fields.name.endswith('own_optimizer'):
    made = configs.own_optimizer(
      rate, fields.weight_decay, decays, **fields.kwargs
    )
    return optim.clip_first(made, most)
  assert (fields.name, fields.kwargs) == ('adamw', {})
  return optim.adamw(
    rate,
    b1=fields.b1,
    b2=fields.b2,
    epsilon=fields.epsilon,
    weight_decay=fields.weight_decay,
    clip_norm=most,
    decays=decays,
  )


def braked(config):
  fields, made = config.optim, adam(config, schedule(config))
  made = {
    'project': lambda: optim.project_outward(made, fields.epsilon),
    'reset_first': lambda: optim.reset_moments(made, 'first'),
    'none': lambda: made,
  }[fields.brake]()
  if fields.reward_scale:
    made = optim.restore_reward_scale(made, fields.reward_scale)
  return (
    optim.record_adam_moments(made, fields.epsilon) if fields.moments else made
  )


def program(transform):
  """An update as JAX traces it, with its constants; two are equal or not."""

  def update(params, gradient):
    extra = {
      'first_of_rollout': jnp.array(True),
      'clipped_share': jnp.zeros(()),
      'advantage_scale': jnp.zeros(()),
      'outward': params,
    }
    return transform.update(gradient, transform.init(params), params, **extra)

  params = {'embedding': np.ones((2, 3)), 'final_norm': {'scale': np.ones(3)}}
  return re.sub('0x[0-9a-f]+', '', str(jax.make_jaxpr(update)(params, params)))


def transform(spec):
  return spec.learner.optimizer.transform


def narrow(config):
  fields = {
    'model.residual_dtype': config.model.residual_dtype,
    'model.compute_dtype': config.model.compute_dtype,
  }
  return tuple(name for name, dtype in fields.items() if dtype != 'float32')


def shown(config):
  log = config.log
  return monitor.Options(
    display=log.display,
    samples=log.samples,
    tensorboard=log.tensorboard,
    wandb_project=log.wandb_project,
    wandb_mode=log.wandb_mode,
    mlflow_experiment=log.mlflow_experiment,
    mlflow_uri=log.mlflow_uri,
    limits=monitor.Limits(
      kl=log.kl_alarm,
      entropy=log.entropy_alarm,
      sampler_gap=log.sampler_gap_alarm,
      narrow=narrow(config),
    ),
  )


# By a part what is found in a `Built`, and what is wanted: the name of a field
# of the config, or a function of the config.
ROWS = {
  'compiled programs': (lambda x: x.cache, 'compilation_cache'),
  'mesh': (lambda x: x.run.mesh, mesh),
  'mesh of the sampler': (
    lambda x: x.run.engine.mesh,
    lambda c: sharding.sampling_mesh(mesh(c), c.sampler.tensor, c.mesh.slices),
  ),
  'rows of the engine': (lambda x: x.run.engine.max_rows, 'sampler.max_rows'),
  'prompts of the engine': (
    lambda x: x.run.engine.prompt_buckets,
    'data.prompt_buckets',
  ),
  'completions of the engine': (
    lambda x: x.run.engine.completion_buckets,
    'data.completion_buckets',
  ),
  'text of stop strings': (
    lambda x: x.run.engine.decode.__name__,
    # Otherwise special tokens are hidden.
    lambda c: 'decode_whole' if '<s>' in c.sampler.stop_strings else 'decode',
  ),
  'sampling': (
    lambda x: {**dataclasses.asdict(x.run.sampling), 'eos_ids': None},
    lambda c: {
      'eos_ids': None,
      'temperature': c.sampler.temperature,
      'top_k': c.sampler.top_k,
      'top_p': c.sampler.top_p,
      'min_p': c.sampler.min_p,
      'min_tokens': c.sampler.min_tokens,
      'stop_strings': c.sampler.stop_strings,
    },
  ),
  'tokenizer': (lambda x: tokens(x.run), tokens_named),
  'prompt format': (
    lambda x: x.run.tokenizer.prompt_format,
    lambda c: data.PromptFormat(
      chat=c.data.chat,
      system_prompt=c.data.system_prompt,
      chat_kwargs=c.data.chat_kwargs,
      completion_prefix=c.data.completion_prefix,
    ),
  ),
  'model': (lambda x: shape(x.run), shape_named),
  'vocabulary': (
    lambda x: x.run.model.vocab_size,
    lambda c: 70 if c.model.path else tokens_named(c)[0],
  ),
  'prompts': (lambda x: first(x.run.prompts), prompts),
  'held-out problems': (
    lambda x: first(x.run.heldout) if x.run.heldout else [],
    heldout,
  ),
  'demonstrations': (
    lambda x: first(x.run.warm_up.demonstrations()),
    demonstrations,
  ),
  'rewards': (
    lambda x: x.run.rewards,
    lambda c: tuple(map(reward, c.rewards)),
  ),
  'method': (lambda x: configs.TOLD.get(x.run.learn.learner.method), told),
  'fields of a batch': (
    lambda x: {name: function for name, function in x.run.fields},
    lambda c: (
      {name: resolved(by) for name, by in c.learner.fields.items()}
      if ':' in c.learner.method
      else {}
    ),
  ),
  'weights beside adapters': (
    lambda x: beside(x.run),
    lambda c: c.lora.base_dtype if c.lora.rank else None,
  ),
  'learning rate': (
    lambda x: rates(x.run.learn),
    lambda c: curve(schedule(c)),
  ),
  'learning rate of the warm-up': (
    lambda x: rates(x.run.warm_up.learn),
    lambda c: curve(warm_up_schedule(c)),
  ),
  'optimizer': (
    lambda x: program(transform(x.run.learn)),
    lambda c: program(braked(c)),
  ),
  'optimizer of the warm-up': (
    lambda x: program(transform(x.run.warm_up.learn)),
    lambda c: program(adam(c, warm_up_schedule(c))),
  ),
  'cost of a key': (
    lambda x: x.run.learn.layout.key_cost,
    # Of 2 width products, where a layer has 12 width^2.
    lambda c: 2 / (12 * (24 if c.model.path else c.model.width)),
  ),
  'example': (
    lambda x: examples(x.run),
    lambda c: (
      (c.sampler.prompts, c.sampler.group, max(c.data.completion_buckets)),
      max(c.data.prompt_buckets),
      len(c.rewards),
    ),
  ),
  'answer': (
    lambda x: build.answer_function(x.run.evaluation),
    lambda c: resolved(c.evaluation.answer) if c.evaluation.answer else None,
  ),
  'instruments': (
    lambda x: instruments(x.run),
    lambda c: [
      every(c.log.completions_every_steps * c.log.token_effects, 1),
      every(c.log.geometry_every_steps, 0),
    ],
  ),
  'what is shown': (lambda x: about.monitored(x.config), shown),
}


def curve(schedule):
  return np.asarray(jax.jit(schedule)(np.arange(90))).tolist()


def rates(spec):
  return curve(spec.learner.measuring.learning_rate)


def beside(run):
  """The dtype of the largest matrix that is not trained."""
  frozen = build.abstract_params(run).frozen
  return frozen and frozen['embedding'].dtype.name


def instruments(run):
  """In which rollouts token effects and geometry are measured."""
  updater: Any = types.SimpleNamespace(
    compiled=types.SimpleNamespace(learner=run.learn.learner, mesh=run.mesh),
  )
  effects, geometry, _ = build_learner.instruments(run.measure, updater)
  return [
    [one.is_due(step) for step in range(9)] for one in (effects, geometry)
  ]


def every(steps, later):
  return [bool(steps) and (step + later) % steps == 0 for step in range(9)]


def examples(run):
  """The largest rollout: its tokens, its prompts, its rewards."""
  found = build.example(run)
  return (
    found.batch.tokens.shape,
    max(map(len, found.prompts)),
    found.batch.reward_parts.shape[-1],
  )


def test_each_part_has_what_the_config_says(built):
  """All in one test, because building the three runs takes seconds."""
  read = set()
  for name, (found, row) in ROWS.items():
    values = set()
    for one in built:
      value = found(one)
      assert value == configs.wanted(one.config, row, read), name
      values.add(repr(value))
    # With a single value, a constant in the code would go unnoticed.
    assert len(values) > 1, name
  for one in built:
    for row in specs_test.ROWS.values():
      configs.wanted(one.config, row, read)
  missing = set(configs.fields()) - read
  assert not missing, 'give it a row in ROWS, or in those of specs_test'


class Told(models.Transformer):
  """Returns what it is asked for."""

  def score(self, *asked, **more):
    return asked, more

  score_routed = score


def test_a_run_scores_at_its_temperature_and_its_warm_up_at_1(built):
  model, one = Told(specs_test.SHAPE), built[0]
  learn = build_learner.learn_spec(
    one.config, model, one.run.mesh, specs_test.METHOD
  )
  warm_up = build_learner.warm_up_spec(one.config, model, one.run.mesh, list)
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
  found = build_model.initial(spec, Drawn(tiny.CONFIG), sharding.make_mesh())
  wanted = Drawn(tiny.CONFIG).init(random_keys.key(seed, 'init'))
  np.testing.assert_array_equal(found['embedding'], wanted['embedding'])


def test_each_field_has_two_values(built):
  for name in set(configs.fields()) - {*configs.ONE_VALUE}:
    values = {repr(configs.value_of(one.config, name)) for one in built}
    assert len(values) > 1, f'{name} needs two values in configs.PAIRS'
