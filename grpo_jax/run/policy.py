"""The policy in a checkpoint: evaluated, and sampled from."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import itertools
import json
import numbers
import os
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import data
from grpo_jax import engines
from grpo_jax import models
from grpo_jax.config import Config
from grpo_jax.engines import scoring
from grpo_jax.episodes import meeting
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.hosts import joining
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.monitor import formatting
from grpo_jax.rewards import WeightedReward
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k
from grpo_jax.run import collecting
from grpo_jax.run import judging as judging_lib
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import identity
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import pins
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep import workdir as workdir_lib
from grpo_jax.run.keep.checkpoint import Checkpoints
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

# The fields of the config that the parameters of a checkpoint depend on. A
# policy is not loaded under other values, except of free fields.
BOUND = ('model', 'data.tokenizer', 'data.eos_tokens', 'data.pad_token')

_USUAL_CONTEXT = 4096  # tokens, of a model that is served
_NARROWEST = 128  # tokens, of the caches that it is served with


class Policy(NamedTuple):
  """What samples from a checkpoint of a run."""

  run: build.Sampler  # its engine has the parameters of the checkpoint
  step: int  # rollouts that the policy has learned from
  heldout: Any = None  # source of records, to evaluate; None without one
  rewards: tuple[WeightedReward, ...] = ()  # that judge an evaluation
  hosts: meeting.Hosts = meeting.ALONE  # the processes that play episodes


def load(
  config: Config,
  workdir: str | pathlib.Path,
  which: str = 'latest',
  objects: Objects = NOTHING,
  to_evaluate: bool = False,
  peers: processes.Processes = processes.ALONE,
  stop: stop_signal.Stop | None = None,
) -> Policy:
  """The policy in a checkpoint of a run.

  Only the parameters are read, so neither the method nor the optimizer of the
  run matters here.

  Args:
    config: That of the run, or one that differs from it outside `BOUND`.
    workdir: Of the run; nothing in it is changed.
    which: The number of a rollout, 'latest' or 'best'.
    objects: What is given in Python.
    to_evaluate: Whether the rewards and the held-out prompts are needed too.
    peers: The processes that sample together.
    stop: What a signal to one of them asks, while they play.

  Returns:
    A `Policy`.

  Raises:
    ValueError: The workdir has no such checkpoint, or a run of another config;
      or the weights beside its adapters are not those that it began with.
  """
  config, directory = _opened(config, workdir, objects, peers)
  if to_evaluate:
    needed = (
      'rewards', 'heldout', 'tokenizer', 'model', 'environment', 'agent',
    )  # fmt: skip
    call = 'grpo_jax.evaluate(workdir, {})'
    objects_lib.require(config, objects, needed, 'Evaluating this run', call)
  call = 'grpo_jax.sample(workdir, prompts, {})'
  needed = ('tokenizer', 'model', 'environment', 'agent')
  objects_lib.require(config, objects, needed, 'Sampling from this run', call)
  run = build.sampler(config, objects)
  joining.check_joined(peers)
  peers.check_equal(identity.compared(run.config) if peers.number > 1 else {})
  params, step = _restored(run, directory, which, peers)
  run.engine.load(params, version=step)
  hosts = judging_lib.hosts(peers, stop or stop_signal.Stop())
  if not to_evaluate:
    return Policy(run, step, hosts=hosts)
  return Policy(
    run,
    step,
    build_data.heldout(run.config, objects),
    build_rewards.functions(run.config, objects, run.mesh),
    hosts,
  )


def _opened(
  config: Config,
  workdir: str | pathlib.Path,
  objects: Objects,
  peers: processes.Processes,
) -> tuple[Config, pathlib.Path]:
  """The config with what the workdir knows, and where its checkpoints are."""
  workdir = bucket.read_only(workdir)
  config = pins.pinned(config, workdir, peers)
  config = workdir_lib.with_widths(workdir, config)
  workdir_lib.refuse_another(workdir, config, BOUND, objects)
  directory = bucket.arrays(workdir) / 'checkpoints'
  if not directory.is_dir():
    raise ValueError(
      f'There is no checkpoint in {workdir}; give the workdir of a run that '
      'has trained.'
    )
  return config, directory


def _restored(
  run: build.Sampler,
  directory: pathlib.Path,
  which: str,
  peers: processes.Processes,
) -> tuple[Any, int]:
  """The parameters in a checkpoint, and from how many rollouts they learned."""
  wanted = build.abstract_params(run).trained
  # Read-only, because the run may be training at this moment.
  config = run.config
  best = config.checkpoint.best_metric
  with Checkpoints(
    directory, best_metric=best, read_only=True, peers=peers
  ) as saves:
    saved = saves.restore(wanted, saves.named(which), 'params')
  if saved is None:
    raise ValueError(
      f'There is no checkpoint in {directory}; let the run train on.'
    )
  frozen = build.frozen_params(run)
  build_model.check_frozen(
    saved, fingerprints.compute(frozen), config.model.path
  )
  return lora.join(saved.state, frozen), saved.step


class Served(NamedTuple):
  """A policy that answers requests as they come.

  Attributes:
    run: Its engine has the parameters.
    step: How many rollouts the policy has learned from.
    scorer: Scores texts.
    context_tokens: Of a prompt and its answer, at most.
  """

  run: build.Sampler
  step: int
  scorer: scoring.Scorer
  context_tokens: int


def load_to_serve(
  config: Config,
  workdir: str | pathlib.Path | None = None,
  which: str = 'latest',
  context_tokens: int | None = None,
) -> Served:
  """The policy in a checkpoint of a run, or that a config begins with.

  Args:
    config: See `load`. Of its environment nothing is read: clients ask.
    workdir: Of the run; None: the policy is that before the first rollout,
      which is the model in `config.model.path`.
    which: See `load`.
    context_tokens: Of a prompt and its answer, at most; None: as much as the
      run reads and draws, or without a workdir as much as the model was made
      for, but not more than `_USUAL_CONTEXT`.

  Raises:
    ValueError: See `load`; or the model is not one of this package.
  """
  directory = None
  if workdir is not None:
    config, directory = _opened(config, workdir, NOTHING, processes.ALONE)
  call = 'grpo_jax.sample(workdir, prompts, {})'
  needed = 'tokenizer', 'model'
  objects_lib.require(config, NOTHING, needed, 'Serving this run', call)
  most = build_model.context_tokens(config.model.path)
  usual = min(most or _USUAL_CONTEXT, _USUAL_CONTEXT)
  if directory is not None:
    fields = config.data
    usual = max(fields.prompt_buckets) + max(fields.completion_buckets)
    if config.environment.name:
      usual = build_environment.context_tokens(config)
  context = usual if context_tokens is None else context_tokens
  if context < 2 or (
    most is not None and context > most and not config.model.beyond_context
  ):
    up_to = '' if most is None else f', and at most {most}, as it was made for'
    raise ValueError(f'--context_tokens={context}; give at least 2{up_to}.')
  run = build.sampler(_to_serve(config, context))
  if not isinstance(run.engine, engines.LocalEngine):
    raise ValueError(
      'A model of your own cannot be served, because its engine draws in '
      'rounds; serve a model that this package can read.'
    )
  run.engine.decode = run.tokenizer.decode  # clients may give stop strings
  run.engine.context_tokens = context
  if directory is None:
    trained = build_model.initial(run.weights, run.model, run.mesh)
    params, step = lora.join(trained, build.frozen_params(run)), 0
  else:
    params, step = _restored(run, directory, which, processes.ALONE)
  run.engine.load(params, version=step)
  mesh = run.mesh if run.mesh.size > 1 else None
  scorer = scoring.Scorer(run.engine.model, params, context, mesh)
  return Served(run, step, scorer, context)


def read_model(served: Served, folder: str) -> Any:
  """Other parameters for a policy that is served; adapters change nothing.

  Args:
    served: The policy.
    folder: Of a Hugging Face model of the same shape.

  Raises:
    ValueError: It is another model, or cannot be read.
  """
  run = served.run
  assert isinstance(run.model, models.Transformer)
  source = weights.source(folder)
  fresh = dataclasses.replace(run.weights, path='')
  wanted = build.abstract_params(run)
  whole = wanted.trained if wanted.frozen is None else wanted.frozen
  place = jax.tree.map(lambda x: x.sharding, whole)
  dtype = 'float32' if wanted.frozen is None else run.weights.base_dtype
  found = weights.load(source, run.model.config, place, dtype, rounded=True)
  if wanted.frozen is None:
    return found
  return lora.join(build_model.initial(fresh, run.model, run.mesh), found)


def read_adapter(served: Served, folder: str) -> Any:
  """The parameters of a policy that is served, with other adapters.

  They are beside the weights that it was served with at first, also when
  `read_model` has replaced these.

  Args:
    served: The policy; it has adapters.
    folder: Of an adapter, as `weights.save_adapter` writes it.

  Raises:
    ValueError: The policy has no adapters, or others; or it cannot be read.
  """
  run = served.run
  assert isinstance(run.model, models.Transformer)
  wanted = build.abstract_params(run)
  if wanted.frozen is None:
    raise ValueError(
      'The policy that is served has no adapters; serve it with '
      '--config.lora.rank=... of the adapters that are to come.'
    )
  path = run.config.model.path
  written = build_model.adapter_base(path, build_model.origin_of(path))
  found = weights.load_adapter(
    folder, run.model.config, wanted.trained, written['architecture']
  )
  _, frozen = lora.split(served.scorer.params, lora.trains)
  return lora.join(found, frozen)


def _to_serve(config: Config, context: int) -> Config:
  """A config whose engine reads and draws what clients ask for."""
  widths, width = [], _NARROWEST
  while width < context:
    widths.append(width)
    width *= 2
  widths.append(context)
  return dataclasses.replace(
    config,
    data=dataclasses.replace(
      config.data, prompt_buckets=(1,), completion_buckets=tuple(widths)
    ),
    sampler=dataclasses.replace(
      config.sampler, max_tokens=min(config.sampler.max_tokens, context - 1)
    ),
    environment=dataclasses.replace(
      config.environment, name='', others={}, kwargs={}
    ),
    rewards=Config().rewards,  # nobody judges; one may be the environment's
    warm_up=dataclasses.replace(config.warm_up, steps=0),
  )


def evaluate(
  policy: Policy,
  examples: int,
  samples: int,
  ks: list[int],
  temperature: float | None = None,
  max_tokens: int | None = None,
  completions: str | None = None,
  answer: Callable[[str], str] | None = None,
  judging: rollout_lib.Judging = rollout_lib.judged_alone,
) -> dict[str, Any]:
  """Samples answers to held-out problems and sums them up.

  Args:
    policy: From `load`, with `to_evaluate`.
    examples: How many held-out problems, counted from the first; 0: as many as
      the config says.
    samples: Completions per problem.
    ks: The values of k in pass@k and majority@k, none above `samples`.
    temperature: None: the config's.
    max_tokens: None: the config's.
    completions: A Parquet file to write them to, or None.
    answer: Reads the answer out of a completion, for majority@k; None: what
      `config.evaluation.answer` names.
    judging: How several processes judge together.

  Returns:
    What `pass_at_k.summarize` returns; `checkpoint`, the number of rollouts
    that the policy has learned from; and `heldout_too_long`, the number of
    problems that are too long and dropped, if there are any.

  Raises:
    ValueError: There are no held-out problems, or a k above `samples`; rows are
      longer than the model was made for; or the completions cannot be written.
  """
  run, heldout = policy.run, policy.heldout
  # Absolute from here on: a reward function may change the directory.
  completions = completions and os.path.abspath(completions)
  _check_whole('samples', samples, 1)
  _check_whole('examples', examples, 0)
  pass_at_k.check_ks(ks, samples)
  if heldout is None:
    raise ValueError(
      'The config has no held-out problems; give --config.data.heldout.'
    )
  records, too_long = build_data.heldout_records(
    run.data, run.tokenizer, heldout, examples or run.evaluation.examples
  )
  if not records:
    raise ValueError(
      'All held-out problems are longer than the largest of data.prompt_buckets'
      " and dropped by data.too_long='drop'; give shorter ones."
    )
  sampling, limit = _sampling(run, temperature, max_tokens)
  if run.environment is None:  # what an episode reads is limited as it grows
    prompts = [run.tokenizer.encode_prompt(x['prompt']) for x in records]
    limits.check_length(run.weights, max(map(len, prompts)), limit)
  answer = answer or build.answer_function(run.evaluation)
  with (
    build_rewards.workers(run.limits, policy.rewards) as workers,
    build_environment.player(run.environment) as player,
  ):
    rollout = collecting.collect(
      run,
      records,
      policy.rewards,
      sampling,
      limit,
      samples,
      policy.step,
      'eval',  # other random numbers than those of the training
      judging,
      workers,
      player,
      hosts=policy.hosts,
    )
  summary = {
    'checkpoint': policy.step,
    **pass_at_k.summarize(
      rollout, ks, run.draw.right_reward, run.draw.seed, answer
    ),
    **{name: int(number) for name, number in too_long.items()},
  }
  if completions:
    try:
      parquet.write(completions, rollout, policy.step)
    except OSError as error:  # what was measured is not lost with the file
      raise ValueError(
        f'{completions} cannot be written ({error.strerror or error}); give '
        f'another file. The result is {json.dumps(summary)}.'
      ) from error
  return summary


def _check_whole(name: str, value: Any, least: int) -> None:
  """Raises a ValueError unless a flag is a whole number, `least` or more."""
  if not isinstance(value, numbers.Integral) or value < least:
    none = ' asks for none' if value == 0 else ''
    raise ValueError(
      f'--{name}={value!r}{none}; give a whole number, {least} or more.'
    )


def _sampling(
  run: build.Sampler, temperature: float | None, max_tokens: int | None
) -> tuple[engines.Sampling, int]:
  """How tokens are drawn, and the limit; where it is None, the config's."""
  sampling = run.sampling
  if temperature is not None:
    sampling = dataclasses.replace(sampling, temperature=temperature)
  limit = run.draw.max_tokens if max_tokens is None else max_tokens
  engines.check_limit(limit, sampling)
  if run.environment is not None and limit > run.draw.max_tokens:
    raise ValueError(
      f'--max_tokens={limit}, but turns of this run have at most '
      f'{run.draw.max_tokens} tokens (sampler.max_tokens); give that or less, '
      'or --config.sampler.max_tokens.'
    )
  return sampling, limit


def sample(
  policy: Policy,
  prompts: Iterable[Any],
  number: int = 1,
  temperature: float | None = None,
  max_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
  """Completes prompts one after the other, as they come, or plays episodes.

  Args:
    policy: From `load`.
    prompts: Texts or lists of messages; the next is read when the last is done.
      With an environment also records as dicts, or as JSON.
    number: Completions of each.
    temperature: None: the config's.
    max_tokens: None: the config's.

  Yields:
    A dict for each completion: 'prompt', 'completion', and 'truncated', whether
    the completion was cut at its longest length. Of an episode the completion
    is what the policy has said last; 'messages', 'reward', 'turn_rewards',
    'ended' and 'failure' tell the rest, see `episodes.types.Account`.
  """
  if policy.run.environment is not None:
    yield from _episodes(policy, prompts, number, temperature, max_tokens)
    return
  tokenizer = policy.run.tokenizer
  for prompt, asked in _requests(
    policy, prompts, number, temperature, max_tokens
  ):
    (group,) = engines.generate(policy.run.engine, asked)
    for one in group:
      yield {
        'prompt': prompt,
        'completion': tokenizer.decode(one.ids),
        'truncated': one.finish == engines.TRUNCATED,
      }


def stream(
  policy: Policy,
  prompts: Iterable[data.Prompt],
  temperature: float | None = None,
  max_tokens: int | None = None,
) -> Iterator[str]:
  """One completion of each prompt, as it is drawn; see `sample`.

  Yields:
    Pieces of a text: each prompt as a person reads it, its completion, and the
    end of the line; or the transcript of an episode.
  """
  tokenizer, engine = policy.run.tokenizer, policy.run.engine
  if policy.run.environment is not None:
    episodes = sample(policy, prompts, 1, temperature, max_tokens)
    yield from map(transcript, episodes)
    return
  for prompt, asked in _requests(policy, prompts, 1, temperature, max_tokens):
    yield tokenizer.prompt_format.shown(prompt)
    text = written = ''
    engine.submit(*asked)
    for one in itertools.chain.from_iterable(engine.completed(every_tokens=1)):
      text = tokenizer.decode(one.ids)
      # A character may need several tokens; it is written once it is whole.
      if text.startswith(written) and not text.endswith('\ufffd'):
        yield text[len(written) :]
        written = text
    yield text[len(written) :] + '\n'


def _episodes(
  policy: Policy,
  prompts: Iterable[Any],
  number: int,
  temperature: float | None,
  max_tokens: int | None,
) -> Iterator[dict[str, Any]]:
  """Plays episodes that begin with each prompt; see `sample`."""
  run = policy.run
  _check_whole('number', number, 1)
  sampling, limit = _sampling(run, temperature, max_tokens)
  assert run.environment is not None
  # A person sees why an episode has failed.
  spec = dataclasses.replace(run.environment, failed_share=1.0)
  with build_environment.player(spec) as player:
    assert player is not None
    for index, prompt in enumerate(prompts):
      _, (episodes,) = build_environment.play(
        spec,
        player,
        run.engine,
        run.tokenizer,
        sampling,
        limit,
        [_record(prompt)],
        [index],
        group=number,
        seed=run.draw.seed,
        rollout=policy.step,
        purpose='sample command',
        hosts=policy.hosts,
      )
      for one in episodes:
        told = one.account
        yield {
          'prompt': prompt,
          'completion': told.last_text,
          'truncated': one.episode.finish == engines.TRUNCATED,
          'messages': [*told.messages],
          'reward': one.reward,
          'turn_rewards': [*(told.turn_rewards or ())],
          'ended': told.ended,
          'failure': told.failure,
        }


def _record(prompt: Any) -> dict[str, Any]:
  """What an episode begins with: a record, also as JSON, or a prompt of one."""
  if isinstance(prompt, str) and prompt.lstrip().startswith('{'):
    with contextlib.suppress(ValueError):
      prompt = json.loads(prompt)
  if isinstance(prompt, Mapping):
    return {'prompt': '', **prompt}
  return {'prompt': prompt}


def transcript(one: Mapping[str, Any]) -> str:
  """An episode as `sample` yields it, as lines for a person.

  >>> said = [{'role': 'user', 'content': 'Guess.'}]
  >>> episode = {'messages': said, 'reward': 1.0, 'ended': 'done'}
  >>> print(transcript(episode | {'failure': ''}), end='')
  user: Guess.
  [done, reward 1]
  """
  lines = [
    f'{message["role"]}: {formatting.message_text(message)}'
    for message in one['messages']
  ]
  end = f'failed: {one["failure"]}' if one['failure'] else one['ended']
  reward = '' if one['reward'] is None else f', reward {one["reward"]:g}'
  return '\n'.join([*lines, f'[{end}{reward}]\n'])


def _requests(
  policy: Policy,
  prompts: Iterable[data.Prompt],
  number: int,
  temperature: float | None,
  max_tokens: int | None,
) -> Iterator[tuple[data.Prompt, list[engines.Request]]]:
  """Each prompt, and what an engine is asked about it."""
  run = policy.run
  _check_whole('number', number, 1)
  sampling, limit = _sampling(run, temperature, max_tokens)
  for index, prompt in enumerate(prompts):
    ids = run.tokenizer.encode_prompt(prompt)
    limits.check_length(run.weights, len(ids), limit)
    yield (
      prompt,
      engines.requests(
        [ids],
        [index],
        number,
        sampling,
        limit,
        run.draw.seed,
        policy.step,
        purpose='sample command',
      ),
    )
