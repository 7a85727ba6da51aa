"""Builds the parts of a run from its `Config` and the objects given in Python.

`run` builds all that training needs, `sampler` only what draws completions.
Wherever a config names something, the name may be a mark for an object that was
given in Python; see `marks.py`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import inspect
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import rewards
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.episodes import rollout
from grpo_jax.episodes.types import Rollout
from grpo_jax.mesh import sharding
from grpo_jax.rewards import Workers
from grpo_jax.run import speed
from grpo_jax.run.build import build_foreign
from grpo_jax.run.build import build_limits
from grpo_jax.run.build import build_model
from grpo_jax.run.build import build_rewards
from grpo_jax.run.build import build_tokenizer
from grpo_jax.run.build import compiled_programs
from grpo_jax.run.build import marks
from grpo_jax.run.build import sources
from grpo_jax.run.build import widths
from grpo_jax.run.build.marks import Given

Config = config_lib.Config
tokenizer_of = build_tokenizer.tokenizer_of


class Sampler(NamedTuple):
  """The parts of a run that sampling needs; nothing in it learns."""

  config: Config
  tokenizer: data.Tokenizer
  mesh: jax.sharding.Mesh
  model: models.Model
  engine: engines.Engine
  sampling: engines.Sampling


class Run(NamedTuple):
  """The parts of a run that do not change while it runs."""

  config: Config
  tokenizer: data.Tokenizer
  prompts: Any  # endless grain dataset of records
  epoch: int  # how many rows of it hold every record; see `data.epoch_rows`
  heldout: Any  # source of records, or None
  rewards: tuple[rewards.WeightedReward, ...]
  mesh: jax.sharding.Mesh
  model: models.Model
  method: losses.LossTransform
  engine: engines.Engine
  peak_flops: float | None  # FLOP/s of the whole mesh; None if not known
  sampling: engines.Sampling
  given: Given  # what the marks in the config stand for
  lengths: Mapping[tuple[str, int], int]  # of sources; see `sources.lengths`
  judging: rollout.Judging = rollout.judged_alone
  workers: Workers | None = None  # for the rewards that need them


def run(
  config: Config, given: Given = marks.NOTHING, shares: bool = False
) -> Run:
  """Builds everything that a run needs, except its state.

  Args:
    config: See `grpo_jax.config.Config`.
    given: The objects that the marks in the config stand for.
    shares: See `engines.LocalEngine`.

  Returns:
    A `Run`.

  Raises:
    ValueError: Something cannot be built; the message says what.
  """
  needed = ('rewards', 'prompts', 'heldout', 'method', 'tokenizer', 'model')
  _require_to_train(config, given, *needed)
  build_limits.check_schedule(config)
  parts = sampler(config, given, trains=True, shares=shares)
  config = parts.config
  answer_function(config)  # raises if there is none
  peak = speed.peak_flops(jax.devices()[0].device_kind)
  judges = build_rewards.functions(config, given, parts.mesh)
  build_limits.check_best_metric(config, [judge.name for judge in judges])
  train, weights = sources.train(config, given)
  heldout = sources.heldout(config, given)
  return Run(
    config=config,
    tokenizer=parts.tokenizer,
    prompts=_read_ahead(data.mixture(train, weights, config.seed), config),
    epoch=data.epoch_rows(train, weights),
    heldout=heldout,
    rewards=judges,
    mesh=parts.mesh,
    model=parts.model,
    method=method_of(config, given),
    engine=parts.engine,
    peak_flops=peak and peak * parts.mesh.size,
    sampling=parts.sampling,
    given=given,
    lengths=sources.lengths(config, train, heldout),
  )


def _read_ahead(prompts: Any, config: Config) -> Any:
  """Gets the prompts of the next rollout early.

  Files are read in a thread. Other prompts are made while the devices learn:
  problems that programs make, and objects of a user's own, may not bear it to
  be read in another thread. What is held out, or shown in the warm-up, is not
  read early.
  """
  found = [*map(sources.files_of, sources.listed(config.data.train))]
  inside = [paths for paths in found if paths is not None]
  if not inside or not all(inside):
    return data.MakeAhead(prompts, config.sampler.prompts)
  return data.ReadAhead(prompts, config.sampler.prompts)


def _require_to_train(config: Config, given: Given, *arguments: str) -> None:
  marks.require(
    config,
    given,
    arguments,
    'Training this run',
    'grpo_jax.train(config, workdir, {})',
  )


def sampler(
  config: Config, given: Given, trains: bool = False, shares: bool = False
) -> Sampler:
  """Builds what draws completions.

  Args:
    config: See `grpo_jax.config.Config`.
    given: The tokenizer and the model, if the config has marks for them.
    trains: Whether a run will read the data, which are then checked first.
    shares: See `engines.LocalEngine`.

  Returns:
    A `Sampler`. Its engine has no parameters yet. Its config has widths, if
    `config` leaves them open.

  Raises:
    ValueError: Something cannot be built; the message says what.
  """
  # Before any program is compiled, so that all of them are cached.
  compiled_programs.keep(config.compilation_cache)
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
  build_model.check_device(config, mesh)
  tokenizer = tokenizer_of(config, given)
  config = widths.with_widths(config, tokenizer, given, checks=trains)
  build_limits.check_context(config)
  if trains:
    build_limits.check_rows(config, sharding.row_shards(mesh))
  own = build_foreign.found(config, given)
  options: dict[str, Any] = dict(
    prompt_buckets=config.data.prompt_buckets,
    completion_buckets=config.data.completion_buckets,
    max_rows=config.sampler.max_rows,
    decode=build_tokenizer.decode_of_stops(config.sampler, tokenizer),
    mesh=sharding.sampling_mesh(
      mesh, config.sampler.tensor, config.mesh.slices
    ),
  )
  if own is None:
    model = build_model.transformer(config, tokenizer.vocab_size)
    model = build_model.drawing_tokens_of(model, tokenizer)
    build_limits.check_model(config, model.config, mesh)
    if trains:
      build_limits.check_memory(config, model.config, mesh)
    alone = mesh.size == 1 and sharding.platform(mesh) == 'cpu'
    cores = rewards.own_cores() if alone else 1
    # It is unloaded before the updates, which donate the parameters.
    engine = engines.LocalEngine(
      model,
      **options,
      shares=shares,
      cores=cores,
      copies=False,
    )
  else:
    model = build_foreign.drawing_tokens_of(own.model, tokenizer)
    build_foreign.check(model, config, tokenizer.vocab_size)
    engine = engines.PlainEngine(model, **options)
  drawing = drawing_of(config.sampler, tokenizer.eos_ids)
  return Sampler(config, tokenizer, mesh, model, engine, drawing)


def answer_function(config: Config) -> Callable[[str], str] | None:
  """What reads the answer out of a completion; None if the config names none.

  Raises:
    ValueError: There is no such function.
  """
  name = config.evaluation.answer
  return (
    importing.imported(name, f'config.evaluation.answer={name!r}')
    if name
    else None
  )


def method(
  name: str,
  kwargs: Mapping[str, Any],
  flag: str = '--config.learner.method',
  given: Given = marks.NOTHING,
  facts: Mapping[str, Any] | None = None,
) -> losses.LossTransform:
  """The loss that a config names.

  Args:
    name: A function in `losses.methods`, or `'module:function'` for one of your
      own, or a mark.
    kwargs: The arguments of this function.
    flag: The option that the name comes from, for the error message.
    given: The function that a mark stands for.
    facts: Values of the run by name, for the arguments that a method takes from
      its run (see `losses.takes_from_run`); None if there is no run, as in an
      audit.

  Returns:
    A `LossTransform`.

  Raises:
    ValueError: There is no such method (the nearest is named), the arguments do
      not fit, or the function does not return a `LossTransform`.
  """
  if name in given.objects:
    make = given.objects[name]
  elif ':' in name:
    make = importing.imported(name, f'{flag}={name!r}')
  elif name in losses.methods.__all__:
    make = getattr(losses.methods, name)
  else:
    near = difflib.get_close_matches(name, losses.methods.__all__, 1)
    meant = f'did you mean {near[0]}?' if near else 'see `grpo-jax methods`.'
    raise ValueError(
      f'{flag}={name!r} is no method; {meant} A method of your own is named '
      "'module:function'."
    )
  asked = dict(kwargs)
  if facts is not None:
    kwargs = losses.arguments_from_run(make, facts, kwargs)
  # Before the call: a TypeError that is raised inside `make` is another error.
  try:
    inspect.signature(make).bind(**kwargs)
  except TypeError as error:
    raise ValueError(
      f'{flag}_kwargs={kwargs} do not fit {name}{_arguments(make)}:'
      f' {plain_text.said(error)}; '
      f'set all arguments at once with {flag}_kwargs="{{...}}".'
    ) from error
  try:
    made = make(**kwargs)
  except ValueError as error:
    if not asked:
      raise
    # A transform of the method may call its argument by another name.
    raise ValueError(
      f'{flag}_kwargs={asked} cannot be used: {plain_text.said(error)}'
    ) from error
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'{flag}={name!r} raised {plain_text.named(error)}, when it was '
      f'called with {flag}_kwargs={dict(kwargs)}; correct the function or the '
      'arguments.'
    ) from error
  if not isinstance(made, losses.LossTransform):
    raise ValueError(
      f'{flag}={name!r} made {made!r:.80}, which is no LossTransform; return '
      'what losses.chain returns.'
    )
  return made


def _arguments(function) -> str:
  return str(inspect.signature(function)).split(' ->')[0]


def _facts(config: Config) -> dict[str, Any]:
  """What a run tells a method that is marked by `losses.takes_from_run`."""
  weights = tuple(reward.weight for reward in config.rewards)
  # Of the sum, in which the first reward has its weight.
  right = config.evaluation.right_reward
  return {
    'reward_weights': weights,
    'right_reward': right * weights[0] if weights[0] > 0 else right,
    'updates_per_rollout': config.learner.batches * config.learner.epochs,
    'adam_b1': config.optim.b1,
    'adam_b2': config.optim.b2,
    'max_tokens': config.sampler.max_tokens,
    'soft_tokens': max(1, config.sampler.max_tokens // 5),
  }


def _check_lengths(loss: losses.LossTransform, config: Config) -> None:
  """Refuses a penalty for length that no completion of the run can get."""
  after, most = loss.acts_after_tokens, config.sampler.max_tokens
  if after >= most:
    raise ValueError(
      f'The penalty for length in the method {config.learner.method!r} begins '
      f'after {after:g} tokens, but completions of this run have at most '
      f'{most} (sampler.max_tokens), so that none gets it; give it limits such '
      f'as max_tokens={most} and soft_tokens={max(1, most // 5)}, or '
      "method='dapo', which takes them from the run."
    )


def method_of(config: Config, given: Given) -> losses.LossTransform:
  """The method of a run, traced so that a chain in the wrong order raises."""
  learner, facts = config.learner, _facts(config)
  loss = method(learner.method, learner.method_kwargs, given=given, facts=facts)
  _check_lengths(loss, config)
  # Sizes that differ from each other and from 1, so that a result of another
  # shape cannot pass; small ones, because a group may be large.
  group = config.sampler.group
  prompts, length = [size for size in (2, 3, 4) if size != group][:2]
  known = {'entropy', 'noise', 'updates_done', *losses.Batch._fields}
  if loss.requires <= known:
    # A method that requires a field of the user's own is not traced, because
    # the shape of that field is not known here.
    def zeros():
      tokens = jnp.zeros((prompts, group, length), jnp.int32)
      batch = losses.make_batch(
        tokens == 0,
        jnp.zeros(tokens.shape[:2]),
        tokens=tokens,
        reward_parts=jnp.zeros((*tokens.shape[:2], len(config.rewards))),
      )
      return losses.check_batch(losses.with_required(loss, batch))

    # Traced as a whole, because each operation outside of a program is a
    # program of its own, which takes 30 ms to compile.
    def run_chain():
      batch, state = losses.credit(loss, zeros(), loss.init())
      batch = losses.prepare(loss, batch, state)
      logp = jnp.zeros(batch.mask.shape)
      return losses.surrogate_loss(loss, logp, batch, state, logp)

    try:
      jax.eval_shape(run_chain)
    except ValueError:
      raise
    except Exception as error:  # a transform of a user's own may raise anything
      raise ValueError(
        f'config.learner.method={learner.method!r} cannot be traced with '
        f'config.learner.method_kwargs={learner.method_kwargs} '
        f'({plain_text.kind(error)}: {plain_text.first_line(error)}); give '
        'numbers where it wants numbers, or correct the function.'
      ) from error
    if group == 1 and not _credits_alone(loss, zeros()):
      raise ValueError(
        f'sampler.group=1 with the method {learner.method!r}, which compares '
        'the completions of a prompt: every advantage would be 0; give '
        'sampler.group=2 or more, or a method that needs no group, such as '
        "'reinforce'."
      )
  return loss


def _credits_alone(loss: losses.LossTransform, batch: losses.Batch) -> bool:
  """Whether groups of a single completion get an advantage that is not 0."""

  def credits(largest):
    # A transform may map some rewards to 0: those below a threshold, say.
    reward = jnp.linspace(0.0, largest, len(batch.reward))[:, None]
    parts = jnp.broadcast_to(reward[..., None], batch.reward_parts.shape)
    given = batch._replace(reward=reward, reward_parts=parts)
    credited, _ = losses.credit(loss, given, loss.init())
    # A deviation of a single completion may be 0 over 0.
    advantage = jnp.asarray(credited.advantage)
    return bool(jnp.any(jnp.isfinite(advantage) & (advantage != 0)))

  return any(map(credits, (1.0, -1.0, 30.0, -1000.0)))


def drawing_of(
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


def demonstrations(run: Run):
  """An endless dataset of demonstrations for the warm-up."""
  config = run.config.warm_up
  # `run` does not require them: once the warm-up is over, a run can be
  # continued without its demonstrations.
  _require_to_train(run.config, run.given, 'demonstrations')
  if config.demonstrations == 'arithmetic':
    # As many as the warm-up reads, so that it draws each of them once.
    source = data.arithmetic_demonstrations(
      config.steps * config.examples, config.carry_free_share, run.config.seed
    )
  else:
    source = sources.demonstrations(run.config, run.given)
  return data.prompt_stream(source, run.config.seed)


def example(run: Run) -> Rollout:
  """A rollout of zeros, with the largest shapes that the run may sample."""
  config = run.config
  return rollout.blank(
    config.sampler.prompts,
    config.sampler.group,
    max(config.data.prompt_buckets),
    config.sampler.max_tokens,
    len(run.rewards),
    config.data.completion_buckets,
    run.engine.capabilities.routing,
  )


def abstract_params(run: Run | Sampler) -> build_model.Parameters:
  """Shapes, dtypes and shardings of the run's parameters."""
  return build_model.abstract(run.model, run.mesh, run.config.lora.base_dtype)


def initial_params(run: Run) -> Any:
  """The trained parameters before the first update, sharded over the mesh.

  Raises:
    ValueError: They hold a number that is not finite, or cannot be read.
  """
  own = build_foreign.found(run.config, run.given)
  if own is None:
    assert isinstance(run.model, models.Transformer)
    params = build_model.initial(run.config, run.model, run.mesh)
  else:
    params = build_foreign.initial(own, abstract_params(run).trained)
  return _checked(params, run.config)


def _checked(params: Any, config: Config) -> Any:
  """The parameters, if all of their numbers are finite."""
  if not config.model.path:  # drawn at random
    return params
  finite = jax.jit(
    lambda tree: jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)
  )(params)
  for path, fine in jax.tree_util.tree_leaves_with_path(finite):
    if not fine:
      raise ValueError(
        f'The parameter {"/".join(sharding.path_names(path))} of model.path='
        f'{config.model.path!r} has entries that are NaN or infinite, so '
        'nothing can be learned; give weights that are whole.'
      )
  return params


def frozen_params(run: Run | Sampler) -> Any:
  """The parameters that no update changes; None without adapters."""
  if not run.config.lora.rank:
    return None
  assert isinstance(run.model, models.Transformer)
  frozen = build_model.frozen(run.config, run.model, run.mesh)
  return _checked(frozen, run.config)
