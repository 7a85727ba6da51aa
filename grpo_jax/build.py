"""From a `Config` to the parts of a run."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import learner as learner_lib
from grpo_jax import losses
from grpo_jax import measure
from grpo_jax import models
from grpo_jax import named
from grpo_jax import optim
from grpo_jax import rewards
from grpo_jax import rollout
from grpo_jax import sampling
from grpo_jax import sharding
from grpo_jax import update

Config = config_lib.Config


class Run(NamedTuple):
  """The parts of a run that do not change while it runs."""

  config: Config
  tokenizer: data.Tokenizer
  prompts: Any  # infinite grain dataset of records
  epoch: int  # rows of it among which every record is met
  heldout: Any  # source of records, or None
  rewards: tuple[rewards.WeightedReward, ...]
  mesh: jax.sharding.Mesh
  model: models.Transformer
  method: losses.LossTransform
  engine: sampling.LocalEngine
  peak_flops: float | None  # of all devices together, where it is known
  sampling: sampling.Sampling


def run(config: Config) -> Run:
  """Builds everything that a run needs but its state.

  Args:
    config: See `config.py`.

  Returns:
    A `Run`.

  Raises:
    ValueError: Something in the config cannot be built; the sentence says what.
  """
  mesh = sharding.make_mesh(**dataclasses.asdict(config.mesh))
  warm_up_rows = config.warm_up.micro_rows if config.warm_up.steps else 0
  for name, number in (
    ('learner.micro_rows', config.learner.micro_rows),
    ('warm_up.micro_rows', warm_up_rows),
  ):
    if number % sharding.row_shards(mesh):
      raise ValueError(
        f'{name}={number} does not split over {sharding.row_shards(mesh)} data '
        'shards; give a multiple, or change config.mesh.'
      )
  tokenizer = _tokenizer(config.data)
  model = models.Transformer(
    models.ModelConfig(
      vocab_size=tokenizer.vocab_size, **dataclasses.asdict(config.model)
    )
  )
  heldout = config.data.heldout
  peak = measure.peak_flops(jax.devices()[0].device_kind)
  source = _source(config.data, config.data.train, 'train')
  return Run(
    config=config,
    tokenizer=tokenizer,
    prompts=data.prompt_stream(source, config.seed),
    epoch=len(source),
    heldout=_source(config.data, heldout, 'heldout') if heldout else None,
    rewards=tuple(
      rewards.WeightedReward(
        reward.name, rewards.resolve(reward.name), reward.weight
      )
      for reward in config.rewards
    ),
    mesh=mesh,
    model=model,
    method=_method(config),
    engine=sampling.LocalEngine(
      model,
      config.seed,
      config.data.prompt_buckets,
      config.data.completion_buckets,
      config.sampler.max_rows,
      tokenizer.decode,
      mesh,
    ),
    peak_flops=peak and peak * mesh.size,
    sampling=_sampling(config.sampler, tokenizer),
  )


def _method(config: config_lib.Config) -> losses.LossTransform:
  """The method, after a trace in which a chain in the wrong order raises."""
  name, kwargs = config.learner.method, config.learner.method_kwargs
  if name == 'gdpo':  # which weighs the rewards itself
    weights = tuple(reward.weight for reward in config.rewards)
    kwargs = {'weights': weights, **kwargs}
  if name == 'grpo_jax.losses.contrib:coasting_grpo':  # of what will coast
    updates = config.learner.batches * config.learner.epochs
    adam = {'b1': config.optim.b1, 'b2': config.optim.b2}
    kwargs = {'updates': updates, **adam, **kwargs}
  method = named.method(name, kwargs)
  tokens = jnp.zeros((1, config.sampler.group, 2))
  known = {'entropy', 'noise', 'updates_done', *losses.Batch._fields}
  if method.requires <= known:
    # Else it reads a user's own, of a shape that nobody knows here.
    given = losses.make_batch(
      tokens == 0,
      tokens[..., 0],
      reward_parts=jnp.zeros((*tokens.shape[:2], len(config.rewards))),
    )
    given = losses.with_required(method, given)

    def run_chain(given):
      batch, state = losses.credit(method, given, method.init())
      batch = losses.prepare(method, batch, state)
      return losses.surrogate_loss(method, tokens, batch, state, tokens)

    try:
      jax.eval_shape(run_chain, losses.check_batch(given))
    except TypeError as error:
      raise ValueError(
        'config.learner.method cannot be traced with the arguments in '
        f'config.learner.method_kwargs ({str(error).splitlines()[0]}); give '
        'numbers where it wants numbers.'
      ) from error
  return method


def _tokenizer(config: config_lib.Data) -> data.Tokenizer:
  if config.tokenizer == 'arithmetic':
    return data.character_tokenizer(data.ALPHABET)
  return data.Tokenizer.from_file(
    config.tokenizer, config.eos_tokens, config.pad_token
  )


def _source(config: config_lib.Data, name: str, split: str):
  if name == 'arithmetic':
    return data.ArithmeticSource(split)
  return data.JsonlSource(
    name, config.prompt_field, config.answer_field or None
  )


def _sampling(config: config_lib.Sampler, tokenizer) -> sampling.Sampling:
  return sampling.Sampling(
    max_tokens=config.max_tokens,
    eos_ids=tokenizer.eos_ids,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    min_tokens=config.min_tokens,
    stop_strings=config.stop_strings,
  )


def demonstrations(run: Run):
  """An infinite dataset of demonstrations for the warm-up."""
  config = run.config.warm_up
  if config.demonstrations == 'arithmetic':
    source = data.arithmetic_demonstrations(
      config.steps * config.examples, config.carry_free_share, run.config.seed
    )
  else:
    source = _source(run.config.data, config.demonstrations, 'train')
  return data.prompt_stream(source, run.config.seed)


def warm_up_updater(run: Run) -> update.Updater:
  """What turns demonstrations into supervised steps, one each."""
  config = run.config
  schedule = optim.learning_rate(
    config.warm_up.lr, decay='linear', total_steps=config.warm_up.steps
  )
  learner = _learner(run, losses.methods.supervised(), schedule, 1.0, 'step')
  spec = _spec(run, 'padded', config.warm_up.micro_rows)
  return update.Updater(learner, shapes(run), spec, config.seed)


def _spec(
  run: Run, kind: str, micro_rows: int, **options: int
) -> rollout.LayoutSpec:
  """How to lay out rows for the model on its devices."""
  on_cpu = jax.default_backend() == 'cpu'
  return rollout.LayoutSpec(
    kind,
    micro_rows,
    prompt_buckets=run.config.data.prompt_buckets,
    # What a CPU's caches hold; what fills an accelerator.
    micro_tokens=2048 if on_cpu else 16384,
    shards=sharding.row_shards(run.mesh),
    # Two products with a key of all heads, among twelve of width times width.
    key_cost=1 / (6 * run.config.model.width),
    share=not (  # see kernels.splash_suits
      jax.default_backend() == 'tpu'
      and run.config.model.attention in ('auto', 'splash')
    ),
    **options,
  )


def shapes(run: Run) -> Any:
  """The parameters as shapes and dtypes."""
  return jax.eval_shape(run.model.init, jax.random.key(0))


def example(run: Run) -> rollout.Rollout:
  """A rollout of the largest shapes that the run may sample, of zeros."""
  config = run.config
  return rollout.blank(
    config.sampler.prompts,
    config.sampler.group,
    max(config.data.prompt_buckets),
    config.sampler.max_tokens,
    len(run.rewards),
    config.data.completion_buckets,
  )


def updater(run: Run) -> update.Updater:
  """What turns rollouts into optimizer steps.

  Args:
    run: See `Run`.

  Returns:
    An `Updater`.
  """
  config = run.config.learner
  optimizer = run.config.optim
  schedule = optim.learning_rate(
    optimizer.lr,
    optimizer.warmup_steps,
    optimizer.decay,
    run.config.steps * config.batches * config.epochs,
  )
  spec = _spec(
    run,
    config.layout,
    config.micro_rows,
    row_completions=config.row_completions,
    pack_tokens=config.pack_tokens,
  )
  return update.Updater(
    _learner(
      run,
      run.method,
      schedule,
      run.config.sampler.temperature,
      config.on_zero_advantage,
      braked=True,
    ),
    shapes(run),
    spec,
    run.config.seed,
    config.batches,
    config.epochs,
    config.anchor,
    run.config.reference.refresh_steps,
    run.config.reference.refresh_weight,
    optimizer.overshoot_every_steps,
    stale=run.config.sampler.resample_rounds > 0,
  )


def _learner(
  run, method, schedule, temperature, on_zero_advantage, braked=False
):
  def score(params, layout, with_entropy, forward_mode=False):
    return models.score(
      run.model,
      params,
      layout,
      temperature,
      with_entropy,
      forward_mode=forward_mode,
    )

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: run.model.decays(sharding.path_names(path)), params
    )

  config = run.config.optim
  optimizer = optim.adamw(
    schedule,
    b1=config.b1,
    b2=config.b2,
    epsilon=config.epsilon,
    weight_decay=config.weight_decay,
    clip_norm=config.clip_norm or None,
    decays=decays,
  )
  if braked:
    optimizer = _braked(optimizer, config)
  updates = run.config.learner.batches * run.config.learner.epochs
  return learner_lib.Learner(
    score=score,
    method=method,
    optimizer=optimizer,
    on_zero_advantage=on_zero_advantage,
    mesh=run.mesh,
    logical_axes=run.model.logical_axes,
    with_outward=braked and config.brake == 'project',
    score_forward=functools.partial(score, forward_mode=True),
    coast_steps=updates,
    records=braked and config.moments,
  )


def _braked(optimizer, config: config_lib.Optim):
  """The optimizer behind what the config puts around it."""
  brakes = {
    'none': lambda: optimizer,
    'reset': lambda: optim.reset_moments(optimizer),
    'reset_first': lambda: optim.reset_moments(optimizer, 'first'),
    'decay': lambda: optim.decay_carried(optimizer),
    'project': lambda: optim.project_outward(optimizer, config.epsilon),
  }
  optimizer = brakes[config.brake]()
  if config.reward_scale:
    optimizer = optim.restore_reward_scale(optimizer, config.reward_scale)
  if config.moments:
    optimizer = optim.record_adam_moments(optimizer, config.epsilon)
  return optimizer
