"""A whole run in which all that costs time is a fake that notes its arguments.

The code of `loop`, `session`, `warm_up`, `build`, `build_model` and
`build_learner` is the real one. The engine, the updater, the checkpoints and
the displays are fakes, so that nothing but the initial parameters is computed.
"""

import collections
import contextlib
import functools
import inspect
import itertools
import pathlib
import tempfile
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import data
from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax import rewards
from grpo_jax.config import importing
from grpo_jax.data import hub
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.learner import compiled
from grpo_jax.learner import metrics
from grpo_jax.learner import programs
from grpo_jax.learner import updates
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments import token_effects
from grpo_jax.learner.types import TrainState
from grpo_jax.mesh import random_keys
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.monitor import dashboards
from grpo_jax.monitor import screen
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k
from grpo_jax.rollouts import rollout_metrics
from grpo_jax.run import export
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run import session
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
from grpo_jax.run.build import card
from grpo_jax.run.build import compiled_programs
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.keep.checkpoint import Checkpoints
from tests.fake_engine import FakeEngine

HERE = __name__
TOKENIZER = data.tokenizer_from('arithmetic')


def first_reward(prompt, completion, example, plus=0.0):
  """A number of its own for every completion."""
  del prompt, example
  return zlib.crc32(completion.encode()) % 1009 / 7 + plus


def second_reward(prompt, completion, example, plus=0.0):
  """Another one."""
  return first_reward(prompt, completion + '+', example, plus)


@losses.takes_from_run(
  weights='reward_weights',
  updates='updates_per_rollout',
  b1='adam_b1',
  b2='adam_b2',
)
def own_method(**kwargs):
  """A user's method, which a config names by its module."""
  del kwargs
  own = losses.on_advantage(
    lambda advantage, batch: advantage * batch.extras['mine'],
    requires=('mine',),
  )
  return losses.chain(losses.methods.rloo(), own)


def own_field(record, ids):
  """What it reads of each token, which a config names by its module."""
  return [41.0] * len(ids)


def other_field(record, ids):
  """Another one."""
  return [42.0] * len(ids)


def own_optimizer(learning_rate, weight_decay, mask, plus=0.0):
  """A user's optimizer, which a config names by its module."""
  del plus
  return optax.adamw(learning_rate, weight_decay=weight_decay, mask=mask)


def own_source(first):
  """A user's records, which a config names by its module."""
  return [{'prompt': f'{first:02}+0{n}=', 'answer': '7'} for n in range(5)]


def last_digit(text):
  """The answer in a completion."""
  return text[-1:]


class Seen:
  """What a run has called, and with what.

  Attributes:
    config: Of the run.
    calls: By the name of a function: the arguments of each of its calls by
      name, defaults included, and under '->' what it returned.
    error: What ended the run, or None.
  """

  def __init__(self, config):
    self.config = config
    self.calls = collections.defaultdict(list)
    self.error: ValueError | None = None

  def noted(self, name, real, instead=None):
    """The function, or another in its place; calls of it are noted."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args, **kwargs):
      bound = signature.bind(*args, **kwargs)
      bound.apply_defaults()
      arguments = dict(bound.arguments)
      self.calls[name].append(arguments)
      arguments['->'] = (instead or real)(*args, **kwargs)
      return arguments['->']

    return call

  def at(self, name, argument, *which):
    """An argument in all calls of a function, or in some of them."""
    calls = self.calls[name]
    chosen = [calls[i] for i in which] if which else calls
    return [call[argument] for call in chosen]


def engine(seen):
  """Draws completions that all differ, from no model."""
  drawn = itertools.count()
  ids = [TOKENIZER.encode(str(digit))[0] for digit in range(10)]

  def answer(request, number):
    del number
    digits = f'{next(drawn):0{request.limit}}'[-request.limit :]
    return [ids[int(digit)] for digit in digits]

  made = FakeEngine(answer, engines.Capabilities(entropy=True))
  made.load(None, version=0)  # a policy's checkpoint is not read here
  made.load = seen.noted('hand to sampler', made.load)
  return made


class Workers:
  """Calls rewards here, as if in other processes."""

  def __init__(self, *_, **__):
    pass

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def start(self, functions):
    """There is nothing to start."""

  @contextlib.contextmanager
  def stream(self):
    yield Stream()


class Stream:
  """Makes each call when it comes."""

  def __init__(self):
    self.outcomes = []

  def add(self, call):
    reward = rewards.resolve(call.function)(*call.arguments, **call.kwargs)
    self.outcomes.append([rewards.Outcome(reward, '', 0.1)])
    return len(self.outcomes) - 1

  def wait(self, check=None):
    return self.outcomes


def _state(params):
  return TrainState(params, (), (), None, step=0, nonfinite=0, idle=0)


def _learns(seen, patch):
  """Nothing is learned; every update is refused as not finite."""

  def measured(updater, state, rollout, step):
    del updater, state, rollout
    values = {
      'loss': 100.0 + step,
      'grad_norm': 1.0,
      'nonfinite_loss': 1.0,
      'kl_old_k3': 0.3 * step,
      'sampler_gap': 0.2 * step,
      'entropy': 0.5**step,
    }
    return {k: metrics.Max(jnp.float32(v)) for k, v in values.items()}

  # The run's own updater is built first, then that of its warm-up.
  learn = [
    seen.noted(f'learn {number}', measured, measured) for number in range(2)
  ]

  def jit_functions(learner, params):
    del params
    return types.SimpleNamespace(
      learner=learner, abstract=_state({}), init=_state
    )

  def credit_rollout(updater, layout, state, rollout, step):
    del updater, layout, state
    layouts = types.SimpleNamespace(
      spec=LayoutSpec('shared', micro_rows=1), shapes=dict, rollout=rollout
    )
    return types.SimpleNamespace(
      step=step, batch=(), layouts=layouts, rollout=rollout, scorings=0
    )

  def take_updates(updater, state, credited):
    made = seen.at('jit_functions', '->')
    (number,) = [k for k, x in enumerate(made) if x is updater.compiled]
    args = updater, state, credited.rollout, credited.step
    return state, learn[number](*args)

  functions = seen.noted('jit_functions', compiled.jit_functions, jit_functions)
  patch.setattr(compiled, 'jit_functions', functions)
  patch.setattr(updates, 'credit_rollout', credit_rollout)
  patch.setattr(updates, 'take_updates', take_updates)
  start = lambda *_: programs.NOTHING
  patch.setattr(programs, 'compile_ahead', start)


class Instrument:
  """Measures no rollout."""

  def __init__(self, *_):
    pass

  def is_due(self, step):
    del step
    return False


class Effects(token_effects.TokenEffects):
  """Finds something wherever it is due."""

  def before(self, state, credited):
    """Nothing."""

  def after(self, state, credited, before):
    del state, credited, before
    return hook.Findings(tokens={'coefficient': np.zeros(())})


class Saves:
  """Checkpoints that are on no disk."""

  failed, owed, warn = 0, False, print

  def __init__(self, seen, directory):
    note = 'save ' + pathlib.Path(directory).name
    self.save = functools.partial(
      seen.noted(note, Checkpoints.save, lambda *_: None), self
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def restore(self, *_):
    """There is none."""

  def wait(self, check=None):
    """Nothing is being written."""

  def check(self):
    """Nothing can fail."""

  def insist(self, save, *_):
    """The first try is written."""
    save()

  def is_due(self):
    """Time does not pass."""
    return False

  def steps(self):
    """None is there."""
    return []


class Source:
  """A JSONL file that is on no disk."""

  def __init__(self, path):
    self.path = path

  def __len__(self):
    return 50

  def __getitem__(self, index):
    first = zlib.crc32(self.path.encode()) % 100
    return {'prompt': f'{first:02}+{index:02}=', 'answer': '7'}


class Display(screen.Nothing):
  """Notes what is shown."""

  def __init__(self, seen):
    self.write = seen.noted('shown', lambda step, scalars, samples: None)
    self.warn = seen.noted('warn', lambda step, text: None)


def _shape_of_files(vocab_size):
  """What is opened where `config.model.path` says: a model of one layer."""

  def config(**computed):
    return models.ModelConfig(
      **{**dict(vocab_size=vocab_size, num_layers=1), **computed}
    )

  return types.SimpleNamespace(
    config=config, architecture='', tokenizer=None, context_tokens=77
  )


def _starts_at_zero(patch):
  """Parameters are zeros of the right shapes, which compile at once."""
  real = models.Transformer.init

  @functools.cache
  def abstract(config):
    model = models.Transformer(config)
    return jax.eval_shape(lambda: real(model, jax.random.key(0)))

  def zeros(model, key):
    del key
    make = lambda x: jnp.zeros(x.shape, x.dtype)
    return jax.tree.map(make, abstract(model.config))

  patch.setattr(models.Transformer, 'init', zeros)
  patch.setattr(
    models.Transformer, 'abstract', lambda model: abstract(model.config)
  )


def _patches(seen, patch):
  """Puts the fakes in place."""

  def note(owner, name, instead=None, as_name=''):
    real = getattr(owner, name)
    patch.setattr(owner, name, seen.noted(as_name or name, real, instead))

  _starts_at_zero(patch)
  note(compiled_programs, 'keep', lambda place: None)
  mesh = sharding.make_mesh()
  note(sharding, 'make_mesh', lambda **_: mesh)
  note(sharding, 'sampling_mesh')
  note(data, 'tokenizer_from', lambda *_: TOKENIZER)
  note(data, 'jsonl_source', lambda paths, *_: Source(paths[0]))
  for name in ('mixture', 'prompt_stream', 'arithmetic_demonstrations'):
    note(data, name)
  opened = _shape_of_files(TOKENIZER.vocab_size)
  note(opened, 'config', as_name='opened config')
  note(build_model, 'source', lambda path, *_: opened)
  note(
    weights,
    'load',
    lambda found, shape, place, dtype, rounded: models.Transformer(shape).init(
      jax.random.key(0)
    ),
  )
  note(models, 'ModelConfig')
  note(models, 'LowRank')
  note(build_model, 'abstract')
  # Every field has a value here, also that of models with experts.
  note(limits, 'check_model', lambda *_: None)
  note(engines, 'LocalEngine', lambda *_, **__: engine(seen))
  note(engines, 'requests')
  for name in ('key', 'generator'):
    note(random_keys, name, as_name=f'random {name}')
  for name in optim.__all__:
    if inspect.isfunction(getattr(optim, name)):
      note(optim, name)
  note(losses.methods, 'grpo')
  patch.setattr(f'{HERE}.own_method', seen.noted('own_method', own_method))
  own = seen.noted('own_optimizer', own_optimizer)
  patch.setattr(f'{HERE}.own_optimizer', own)
  patch.setattr(f'{HERE}.own_source', seen.noted('own_source', own_source))
  note(models.Transformer, 'score', lambda *_, **__: None)
  note(build_learner, 'LayoutSpec')
  for name in 'Learner', 'Scoring', 'Optimizer', 'Placement', 'Measuring':
    note(build_learner, name, lambda **fields: types.SimpleNamespace(**fields))
  note(build_learner, 'UpdateSpec')
  note(updates, 'Updater')
  _learns(seen, patch)
  note(build_learner, 'RolloutEnd', Instrument)
  note(build_learner, 'TokenEffects', Effects)
  note(build_learner, 'Geometry', Instrument)
  for owner in (session, warm_up):
    note(owner, 'Checkpoints', lambda where, *_, **__: Saves(seen, where))
  for name in ('collect', 'demonstrations', 'blank'):
    note(rollout_lib, name)
  note(dynamic_sampling, 'draw')
  note(rollout_metrics, 'metrics_of_rollout')
  note(parquet, 'write', lambda *_: None, as_name='parquet')
  note(weights, 'config_to_huggingface', lambda *_: None)
  note(export, 'origin_of', lambda config: None)
  note(export, 'save', lambda to, *_: to.mkdir(), as_name='export')
  note(hub, 'check_push', lambda text, *_: text)
  note(card, 'write', lambda *_: None, as_name='card')
  note(hub, 'push', lambda *_: 'the address of a commit')
  note(rewards, 'Workers', Workers)
  note(screen, 'display_for', lambda *_: Display(seen))
  sink = types.SimpleNamespace(write=lambda *_: None, close=lambda *_: None)
  note(dashboards, 'TensorBoard', lambda *_: sink)
  note(dashboards, 'Wandb', lambda *_: sink)
  note(dashboards, 'Mlflow', lambda *_: sink)
  note(importing, 'imported')
  note(pass_at_k, 'summarize')


def record(config):
  """Runs a config, then evaluates what it would have left; a `Seen`."""
  seen = Seen(config)
  with (
    pytest.MonkeyPatch.context() as patch,
    tempfile.TemporaryDirectory() as workdir,
  ):
    _patches(seen, patch)
    try:
      loop.train(config, workdir)
    except ValueError as error:
      seen.error = error
    # What a learner has in a function, and not in a field, shows in a call.
    for scoring in seen.at('Scoring', '->'):
      scoring.score({}, None, False)
      scoring.score_forward({}, None, False)
    policy = policies.Policy(
      build.sampler(config),
      1,
      build_data.heldout(config),
      build_rewards.functions(config),
    )
    with contextlib.suppress(ValueError):  # there may be no held-out problems
      policies.evaluate(policy, 0, 2, [1])
  return seen
