"""Builds the parts of a run from its `Config` and the objects given in Python.

`run` builds all that training needs, `sampler` only what draws completions, and
`abstract` what a plan needs: a run without devices, data or weights.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import rewards
from grpo_jax.config import importing
from grpo_jax.data import Tokenizer
from grpo_jax.engines.http.texts import TextScores
from grpo_jax.engines.local import lowered
from grpo_jax.environments import sessions
from grpo_jax.episodes import meeting
from grpo_jax.episodes import rollout
from grpo_jax.episodes.types import Rollout
from grpo_jax.hosts import joining
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import chips
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.rewards import Workers
from grpo_jax.rollouts import batch_fields
from grpo_jax.rollouts import sources
from grpo_jax.rollouts import teacher_field
from grpo_jax.rollouts import turn_fields
from grpo_jax.run.build import batch_fields as build_fields
from grpo_jax.run.build import compiled_programs
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import engine as build_engine
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import limits
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import optimizer as build_optimizer
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.build import specs
from grpo_jax.run.build import teacher as build_teacher
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep import workdir
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

Config = config_lib.Config

_INFLIGHT = 32  # tokens of a row that are drawn by the same weights, at most
_END = (0,)  # which ids end a completion changes nothing in a program's size


@dataclasses.dataclass(frozen=True)
class Sampler:
  """The specs and the parts of a run that sampling needs; nothing learns."""

  config: Config  # with widths; for what is saved, compared, shown or planned
  weights: specs.WeightsSpec
  data: specs.WidthSpec
  limits: specs.WorkersSpec  # of the processes that call rewards
  draw: specs.DrawSpec
  evaluation: specs.EvaluationSpec
  tokenizer: Tokenizer
  mesh: jax.sharding.Mesh
  sampling_mesh: jax.sharding.Mesh
  model: models.Model
  engine: engines.Engine
  sampling: engines.Sampling
  environment: specs.EnvironmentSpec | None  # None: completions are one turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing(Sampler):
  """What else is needed to draw and judge rollouts."""

  rewards: tuple[rewards.WeightedReward, ...]
  judging: rollout.Judging = rollout.judged_alone
  workers: Workers | None = None  # for the rewards that need them
  player: sessions.Player | None = None  # of an environment
  hosts: meeting.Hosts = meeting.ALONE  # which play together
  # Between two turns of the engine; what it raises ends the sampling.
  check: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Drawing):
  """What else a run needs to learn; made once, and no rollout changes it."""

  steps: int  # rollouts
  learn: specs.LearnSpec
  teacher: specs.TeacherSpec | None  # None without one beside the policy
  warm_up: specs.WarmUpSpec | None  # None without one
  keep: specs.KeepSpec
  export: specs.ExportSpec
  early_stop: specs.EarlyStopSpec
  measure: specs.MeasureSpec
  jobs: specs.JobsSpec
  sources: tuple[workdir.Source, ...]
  prompts: Any  # endless grain dataset of records
  epoch: int  # how many rows of it hold every record; see `data.epoch_rows`
  heldout: Any  # source of records, or None
  fields: tuple[batch_fields.BatchField, ...]  # that come from records
  turns: turn_fields.TurnFields  # that come from what is told of episodes
  taught: TextScores | None = None  # servers that are the teacher
  peak_flops: float | None = None  # FLOP/s of the whole mesh; None: not known
  draws_ahead: bool = False  # whether a thread of its own draws
  # Draws elsewhere, as `drawing.collect` does here; None: nobody does.
  collect: Callable[..., Any] | None = None


class Elsewhere(NamedTuple):
  """Stands in the place of the engine of a learner for which jobs draw.

  Attributes:
    capabilities: Of the engines of the jobs, as far as a learner asks.
  """

  capabilities: engines.Capabilities


def run(
  config: Config,
  objects: Objects = NOTHING,
  shares: bool = False,
  draws: bool = True,
) -> Run:
  """Builds everything that a run needs, except its state.

  Args:
    config: May leave widths open.
    objects: What the run was given in Python.
    shares: Whether several processes draw a rollout together.
    draws: Whether the run draws, itself or by servers, and not by jobs alone.

  Raises:
    ValueError: Something cannot be built; the message says what.
  """
  needed = (
    'rewards', 'prompts', 'heldout', 'method', 'fields', 'tokenizer', 'model',
    'environment', 'agent',
  )  # fmt: skip
  _require_to_train(config, objects, *needed)
  parts = sampler(config, objects, trains=True, shares=shares, draws=draws)
  config, mesh, model = parts.config, parts.mesh, parts.model
  generator = config.generator
  answer_function(parts.evaluation)  # raises if there is none
  peak = chips.peak_flops(jax.devices()[0].device_kind)
  # Whoever draws judges too: a device gets programs from one thread.
  judges = build_rewards.functions(config, objects, parts.sampling_mesh)
  labels = [judge.name for judge in judges]
  limits.check_best_metric(config, labels)
  limits.check_early_stop(config, labels)
  train, shares_of = build_data.train(config, objects)
  heldout = build_data.heldout(config, objects)
  method = build_method.method_of(config, objects)
  vocab, tokenizer = parts.tokenizer.vocab_size, parts.tokenizer
  teacher = build_teacher.teacher_spec(config, method, model, vocab, tokenizer)
  if teacher is not None:
    limits.check_length(teacher.weights, *limits.longest(config))
    if isinstance(model, models.Transformer):
      here = draws and config.engine.kind == 'local'
      limits.check_memory(config, model, mesh, teacher, here)
  fields = build_fields.batch_fields_of(config, method, objects)
  build_fields.check_records(fields, config, method, train)
  return Run(
    **run_specs(config, model, mesh, method, teacher),
    **vars(parts),
    warm_up=build_learner.warm_up_spec(
      config, model, mesh, functools.partial(_demonstrations, config, objects)
    ),
    sources=build_data.describe(config, train, heldout),
    prompts=_read_ahead(data.mixture(train, shares_of, config.seed), config),
    epoch=data.epoch_rows(train, shares_of),
    heldout=heldout,
    rewards=judges,
    fields=fields,
    turns=build_fields.turn_fields_of(config, method),
    taught=build_engine.teacher(config, method.top_tokens),
    draws_ahead=bool(
      config.sampler.ahead or generator.devices or generator.listen
    ),
    peak_flops=peak and peak * mesh.size,
  )


def run_specs(
  config: Config,
  model: models.Model,
  mesh: Any,
  method: losses.LossTransform,
  teacher: specs.TeacherSpec | None = None,
) -> dict[str, Any]:
  """The specs of what learns, by the name of their field in `Run`."""
  kept, log, early = config.checkpoint, config.log, config.early_stop
  jobs = config.generator
  return {
    'steps': config.steps,
    'learn': build_learner.learn_spec(config, model, mesh, method, teacher),
    'teacher': teacher,
    'keep': specs.KeepSpec(
      every_steps=kept.every_steps,
      every_minutes=kept.every_minutes,
      keep_last=kept.keep_last,
      best_metric=kept.best_metric,
      completions_every_steps=log.completions_every_steps,
      samples=log.samples,
    ),
    'export': specs.ExportSpec(**vars(config.export)),
    'early_stop': specs.EarlyStopSpec(
      early.metric, early.mode, early.patience, early.least_improvement
    ),
    'jobs': specs.JobsSpec(
      jobs.listen, jobs.secret, jobs.weights, jobs.wait_secs
    ),
    'measure': specs.MeasureSpec(
      log.completions_every_steps if log.token_effects else 0,
      log.geometry_every_steps,
      config.seed,
    ),
  }


def sampler_specs(
  config: Config, own: foreign.Pretrained | None = None
) -> dict[str, Any]:
  """The specs of what draws, by the name of their field in `Sampler`."""
  fields, evaluation = config.sampler, config.evaluation
  return {
    'weights': build_model.weights_spec(config, own),
    'data': build_data.data_spec(config),
    'limits': build_rewards.workers_spec(config),
    'draw': specs.DrawSpec(
      seed=config.seed,
      prompts=fields.prompts,
      group=fields.group,
      max_tokens=fields.max_tokens,
      resample_rounds=fields.resample_rounds,
      retire_solved=fields.retire_solved,
      right_reward=evaluation.right_reward,
      shuffles=config.shuffle_rewards,
      pace=sources.Pace(
        fields.ahead,
        config.generator.every,
        config.generator.updates == 'inflight',
      ),
      parts=config.generator.parts,
    ),
    'evaluation': specs.EvaluationSpec(
      evaluation.every_steps, evaluation.examples, evaluation.answer
    ),
  }


def _read_ahead(prompts: Any, config: Config) -> Any:
  """Gets the prompts of the next rollout early.

  Files are read in a thread. Other prompts are made in the thread of the loop:
  problems that programs make, and objects of a user's own, may not bear it to
  be read in another thread. With `sampler.ahead` those are, of which nobody
  knows beforehand that they are needed; see its help. What is held out, or
  shown in the warm-up, is not read early.
  """
  rows = config.sampler.prompts * (1 + config.sampler.ahead)
  found = [*map(build_data.files_of, build_data.sources_in(config.data.train))]
  inside = [paths for paths in found if paths is not None]
  if not inside or not all(inside):
    return data.MakeAhead(prompts, rows)
  return data.ReadAhead(prompts, rows)


def _require_to_train(
  config: Config, objects: Objects, *arguments: str
) -> None:
  objects_lib.require(
    config,
    objects,
    arguments,
    'Training this run',
    'grpo_jax.train(config, workdir, {})',
  )


def sampler(
  config: Config,
  objects: Objects = NOTHING,
  trains: bool = False,
  shares: bool = False,
  own_mesh: jax.sharding.Mesh | None = None,
  draws: bool = True,
) -> Sampler:
  """Builds what draws completions.

  Args:
    config: May leave widths open.
    objects: What the run was given in Python.
    trains: Whether a run will read the data, which are then checked first.
    shares: Whether several processes draw a rollout together.
    own_mesh: Devices that draw and do nothing else; None: as the config says.
    draws: See `run`.

  Returns:
    A `Sampler`. Its engine has no parameters yet. Its config has widths, if
    `config` leaves them open.

  Raises:
    ValueError: Something cannot be built; the message says what.
  """
  # Before any program is compiled, so that all of them are cached.
  compiled_programs.keep(config.compilation_cache)
  mesh = sampling_mesh = own_mesh
  if mesh is None or sampling_mesh is None:
    mesh, sampling_mesh = _meshes(config, trains)
  build_model.check_device(config, mesh)
  if trains:
    limits.check_work(config, mesh)
  tokenizer = build_data.tokenizer_of(config, objects)
  config = build_data.with_widths(config, tokenizer, objects, checks=trains)
  own = build_model.own_model(config, objects)
  made = sampler_specs(config, own)
  limits.check_length(made['weights'], *limits.longest(config))
  model, engine = _model_and_engine(
    config, own, tokenizer, mesh, sampling_mesh, trains, shares, draws
  )
  return Sampler(
    **made,
    config=config,
    tokenizer=tokenizer,
    mesh=mesh,
    sampling_mesh=sampling_mesh,
    model=model,
    engine=engine,
    sampling=sampling_spec(config.sampler, tokenizer.eos_ids),
    environment=build_environment.environment_spec(
      config, tokenizer, objects.environment, objects.agent
    ),
  )


def drawing(
  config: Config,
  shares: bool = False,
  devices: Sequence[Any] | None = None,
) -> Drawing:
  """Builds what a job draws with.

  Args:
    config: Of the run that it draws for.
    shares: Whether several processes draw together.
    devices: That draw; None: all of them.

  Raises:
    ValueError: Something cannot be built; the message says what.
  """
  number = jax.device_count() if devices is None else len(devices)
  tensor = config.sampler.tensor or config.mesh.tensor
  if number % tensor:
    raise ValueError(
      f'There are {number} devices here and {tensor} shards of heads, hidden '
      'units and vocabulary, which do not divide them; give '
      'config.sampler.tensor=1, or another divisor, to the learner.'
    )
  expert = math.gcd(config.mesh.expert, number // tensor)
  sizes = number // tensor // expert, 1, tensor, expert
  mesh = sharding.make_mesh(*sizes, devices=devices)
  parts = sampler(config, shares=shares, own_mesh=mesh)
  judges = build_rewards.functions(config, NOTHING, mesh)
  return Drawing(**vars(parts), rewards=judges)


def _meshes(
  config: Config, trains: bool
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """The learner's mesh and the sampler's.

  Raises:
    ValueError: The devices of this process cannot be divided so.
  """
  sizes, own = dataclasses.asdict(config.mesh), config.generator.devices
  if not (own and trains):
    mesh = sharding.make_mesh(**sizes)
    return mesh, _shared_mesh(config, mesh)
  devices = jax.devices()
  if jax.process_count() > 1:
    raise ValueError(
      f'config.generator.devices={own} in a run of {jax.process_count()} '
      'processes, but it divides the devices of one; give 0.'
    )
  if own >= len(devices):
    raise ValueError(
      f'config.generator.devices={own}, but there are {len(devices)} devices, '
      f'and one at least learns; give at most {len(devices) - 1}.'
    )
  mesh = sharding.make_mesh(**sizes, devices=devices[:-own])
  return mesh, sharding.generating_mesh(
    mesh, own, config.sampler.tensor, devices[-own:]
  )


def _shared_mesh(config: Config, mesh: Any) -> Any:
  """The sampler's mesh, if it has the devices of the learner."""
  return sharding.sampling_mesh(mesh, config.sampler.tensor, config.mesh.slices)


def _model_and_engine(
  config: Config,
  own: foreign.Pretrained | None,
  tokenizer: Tokenizer,
  mesh: jax.sharding.Mesh,
  sampling_mesh: jax.sharding.Mesh,
  trains: bool,
  shares: bool,
  draws: bool,
) -> tuple[models.Model, Any]:
  prompts, completions = build_environment.widths(config)
  options: dict[str, Any] = dict(
    prompt_buckets=prompts,
    completion_buckets=completions,
    max_rows=config.sampler.max_rows,
    decode=build_data.decode_of_stops(config.sampler, tokenizer),
    mesh=sampling_mesh,
  )
  if own is not None:
    unused = tokenizer.unused_ids(own.model.vocab_size)
    model = own.model.drawing_without(unused)
    build_model.check_own(model, config, tokenizer.vocab_size)
    if not draws:
      return model, Elsewhere(engines.Capabilities())
    return model, engines.PlainEngine(model, **options)
  model = build_model.transformer(config, tokenizer.vocab_size)
  # Its embedding may have more rows than there are tokens. Sampler and learner
  # both leave these ids out, so that they agree on every log-probability.
  model = model.drawing_without(tokenizer.unused_ids(model.vocab_size))
  limits.check_model(config, model.config, mesh)
  served = trains and config.engine.kind == 'http'
  if trains:
    limits.check_memory(config, model, mesh, draws=draws and not served)
  if not draws:
    return model, Elsewhere(engines.Capabilities(routing=model.routes))
  if served:
    return model, build_engine.http_engine(config, model, mesh)
  shared = not config.generator.devices
  alone = shared and mesh.size == 1 and sharding.platform(mesh) == 'cpu'
  cores = joining.own_cores() if alone else 1
  # It is unloaded before the updates, which donate the parameters.
  # Which process draws a turn is not known before, nor whether it plays it.
  shares &= not config.environment.name
  engine = engines.LocalEngine(
    model,
    **options,
    shares=shares,
    cores=cores,
    copies=False,
    context_tokens=_context_tokens(config),
    turn_tokens=_turn_tokens(config),
  )
  return model, engine


def _turn_tokens(config: Config) -> int | None:
  """How many tokens are drawn before newer weights may be taken."""
  return _INFLIGHT if config.generator.updates == 'inflight' else None


def _context_tokens(config: Config) -> int | None:
  """The most tokens of an episode; None without an environment."""
  if not config.environment.name:
    return None
  return build_environment.context_tokens(config)


def answer_function(
  spec: specs.EvaluationSpec,
) -> Callable[[str], str] | None:
  """What reads the answer out of a completion; None if the config names none.

  Raises:
    ValueError: There is no such function.
  """
  name = spec.answer
  return (
    importing.imported(name, f'config.evaluation.answer={name!r}')
    if name
    else None
  )


def sampling_spec(
  config: config_lib.Sampler, eos_ids: Sequence[int]
) -> engines.Sampling:
  """How a run draws tokens."""
  return engines.Sampling(
    eos_ids=tuple(eos_ids),
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    min_tokens=config.min_tokens,
    stop_strings=config.stop_strings,
  )


def _demonstrations(config: Config, objects: Objects) -> Any:
  """An endless dataset of demonstrations for the warm-up.

  `run` does not require them: once the warm-up is over, a run can be continued
  without its demonstrations.
  """
  fields = config.warm_up
  _require_to_train(config, objects, 'demonstrations')
  if fields.demonstrations == 'arithmetic':
    # As many as the warm-up reads, so that it draws each of them once.
    source = data.arithmetic_demonstrations(
      fields.steps * fields.examples, fields.carry_free_share, config.seed
    )
  else:
    source = build_data.demonstrations(config, objects)
  return data.prompt_stream(source, config.seed)


def updater(
  run: Run,
  frozen: Any,
  optimizer: Callable[[Any], Any] | None = None,
  teacher: Any = None,
) -> Updater:
  """What turns rollouts into updates of the policy.

  Args:
    run: The parts of the run.
    frozen: What `frozen_params` returned. To lower programs alone, their
      shapes: `abstract_params(run).frozen`.
    optimizer: Makes an optax transformation to take in place of that of
      `config.optim`. It gets a function from the parameters to a tree of bools,
      which says which of them decay.
    teacher: What `teacher_params` returned, or `abstract_teacher`; None for a
      run without a teacher.
  """
  transform = None
  if optimizer is not None:
    transform = optimizer(functools.partial(build_optimizer.decays, run.model))
  params = abstract_params(run)
  return build_learner.updater(run.learn, params, frozen, transform, teacher)


def warm_up_updater(run: Run, frozen: Any) -> Updater:
  """What turns demonstrations into updates, in a run that has a warm-up."""
  assert run.warm_up is not None
  return build_learner.updater(run.warm_up.learn, abstract_params(run), frozen)


def example(run: Run) -> Rollout:
  """A rollout of zeros, with the largest shapes that the run may sample."""
  zeros = rollout.blank(
    run.draw.prompts,
    run.draw.group,
    *limits.longest(run.config),
    len(run.rewards),
    run.data.completion_buckets,
    run.engine.capabilities.routing,
    bool(run.config.environment.name),
  )
  zeros = turn_fields.with_zeros(zeros, run.turns)
  if run.config.teacher.urls:
    top = run.learn.learner.method.top_tokens
    zeros = teacher_field.with_zeros(zeros, top)
  return batch_fields.with_ones(zeros, run.fields)


def abstract_params(run: Sampler) -> build_model.Parameters:
  """Shapes, dtypes and shardings of the run's parameters."""
  return build_model.abstract(run.model, run.mesh, run.weights.base_dtype)


def initial_params(run: Run) -> Any:
  """The trained parameters before the first update; see `model.initial`."""
  return build_model.initial(run.weights, run.model, run.mesh)


def frozen_params(run: Sampler) -> Any:
  """The parameters that no update changes; see `model.frozen`."""
  return build_model.frozen(run.weights, run.model, run.mesh)


def abstract_teacher(run: Run, frozen: Any) -> Any:
  """Shapes of what `teacher_params` returns; None without a teacher."""
  if run.teacher is None:
    return None
  return build_teacher.abstract(run.teacher, run.mesh, frozen)


def teacher_params(run: Run, frozen: Any) -> Any:
  """The teacher's parameters; None without one; see `teacher.params`."""
  if run.teacher is None:
    return None
  return build_teacher.params(run.teacher, run.mesh, frozen)


class Abstract(NamedTuple):
  """What a run compiles, on a mesh whose devices need not be there."""

  run: Run  # without tokenizer, prompts and rewards
  updater: Updater
  model: models.ModelConfig
  engine: engines.LocalEngine

  def example(self) -> Rollout:
    """A rollout of zeros with the largest shapes, which takes their memory."""
    return example(self.run)

  def teacher(self) -> tuple[Any, Any]:
    """What a scoring by the teacher reads: as it lies on devices, and gathered.

    The second is in the compute dtype, whole over `fsdp`.
    """
    spec, mesh = self.run.teacher, self.run.mesh
    assert spec is not None
    whole = jax.tree.map(  # as it comes from the host, if it lies there
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
      ),
      self.updater.teacher,
    )
    return whole, lowered.decoding_params(spec.model, whole, mesh)


def abstract(
  config: Config,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  devices: Sequence[Any] | None = None,
) -> Abstract:
  """The parts of a run on some mesh, from shapes alone.

  Args:
    config: With `model.path` a folder is enough that holds a `config.json` and
      no weights. Data is read only if the widths of prompts are left open.
    mesh: Of the learner; `config.mesh` is not read.
    devices: The `config.generator.devices` that sample alone, if the mesh has
      devices; else None.

  Raises:
    ValueError: A part cannot be built; the message says why.
  """
  path, method = config.model.path, config.learner.method
  if objects_lib.is_object(path) or importing.is_function(path):
    raise ValueError(
      f'config.model.path={path!r} is a model of your own, whose programs are '
      'not known here; try it with `grpo-jax train --check`.'
    )
  if objects_lib.is_object(method):
    raise ValueError(
      f'config.learner.method={method!r} is an object, whose programs are not '
      'known here; give the name of a method that reads as much.'
    )
  config = _with_widths(config)
  # An abstract mesh has all that shapes need; nothing else is asked of it.
  shapes: Any = mesh
  limits.check_work(config, shapes)
  made = sampler_specs(config)
  limits.check_length(made['weights'], *limits.longest(config))
  nothing: Any = None
  # The shape comes with its vocabulary, but for another run's.
  named = path and not build_model.is_run(path)
  vocab_size = 0 if named else build_data.tokenizer_of(config).vocab_size
  model = build_model.transformer(config, vocab_size, needs_weights=False)
  limits.check_model(config, model.config, shapes)
  prompts, completions = build_environment.widths(config)
  if own := config.generator.devices:
    sampling_mesh = sharding.generating_mesh(
      shapes, own, config.sampler.tensor, devices
    )
  else:
    sampling_mesh = _shared_mesh(config, shapes)
  engine = engines.LocalEngine(
    model,
    prompt_buckets=prompts,
    completion_buckets=completions,
    max_rows=config.sampler.max_rows,
    mesh=sampling_mesh,
    context_tokens=_context_tokens(config),
    turn_tokens=_turn_tokens(config),
  )
  loss = build_method.method_of(config)
  teacher = build_teacher.teacher_spec(config, loss, model, vocab_size)
  parts = Run(
    **made,
    **run_specs(config, model, shapes, loss, teacher),
    config=config,
    warm_up=None,
    sources=(),
    tokenizer=nothing,
    prompts=None,
    epoch=0,
    heldout=None,
    rewards=(nothing,) * len(config.rewards),
    fields=build_fields.batch_fields_of(config, loss),
    turns=build_fields.turn_fields_of(config, loss),
    mesh=shapes,
    sampling_mesh=sampling_mesh,
    model=model,
    engine=engine,
    sampling=sampling_spec(config.sampler, _END),
    environment=None,
  )
  frozen = abstract_params(parts).frozen
  taught = abstract_teacher(parts, frozen)
  updates = updater(parts, frozen, teacher=taught)
  return Abstract(parts, updates, model.config, engine)


def _with_widths(config: Config) -> Config:
  """The config with widths, which are read from the data if need be."""
  if config.data.prompt_buckets and config.data.completion_buckets:
    return config
  try:
    tokenizer = build_data.tokenizer_of(config)
    return build_data.with_widths(config, tokenizer)
  except (ValueError, OSError) as error:
    raise ValueError(
      f'The widths of prompts and completions follow from data that cannot be '
      f'read here ({error}); give them, as in '
      '--config.data.prompt_buckets="(1024,)" '
      '--config.data.completion_buckets="(4096,)".'
    ) from error
