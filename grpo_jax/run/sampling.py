"""What draws the rollouts of a run, and its answers to held-out problems."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.engines import offering
from grpo_jax.engines import scoring
from grpo_jax.engines.handover import Put
from grpo_jax.engines.handover import Weights
from grpo_jax.engines.http import handshake
from grpo_jax.engines.http.engine import HttpEngine
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.engine_use import EngineUse
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import random_keys
from grpo_jax.rollouts import batch_fields
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import pass_at_k
from grpo_jax.rollouts import replay as replay_lib
from grpo_jax.rollouts import teacher_field
from grpo_jax.rollouts import turn_fields
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.rollouts.sources import Ahead
from grpo_jax.rollouts.sources import AtOnce
from grpo_jax.rollouts.sources import Lease
from grpo_jax.rollouts.sources import Source
from grpo_jax.rollouts.sources import Wait
from grpo_jax.run import drawing
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import limits
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.jobs import learning as learning_jobs
from grpo_jax.run.jobs import shared


class Jobs(NamedTuple):
  """What draws for a run in jobs of its own.

  Attributes:
    desk: Has the parts.
    offers: Has the snapshots.
  """

  desk: shared.Shared
  offers: offering.Offers


def offers(run: build.Run, updater: Updater) -> offering.Offers:
  """What brings trained parameters to jobs that draw."""
  trained = updater.compiled.abstract.params
  return offering.Offers(run.model, trained, run.mesh)


def _weights(run: build.Run, updater: Updater) -> Weights:
  """What brings trained parameters to the devices that draw."""
  if isinstance(run.engine, HttpEngine):
    return run.engine.versions
  trained = updater.compiled.abstract.params
  return Put(run.model, trained, run.mesh, run.sampling_mesh, updater.frozen)


def abstract_snapshot(run: build.Run, updater: Updater) -> Any:
  """Shapes, dtypes and shardings of what draws rollouts of an older version."""
  if run.jobs.listen:
    return offers(run, updater).abstract()
  return _weights(run, updater).abstract()


def source(
  run: build.Run,
  updater: Updater,
  replay: pathlib.Path | None = None,
  wait: Wait = contextlib.nullcontext,
  jobs: Jobs | None = None,
) -> Source:
  """Where a run gets its rollouts.

  Args:
    run: The parts of the run.
    updater: Joins the trained parameters with the frozen ones.
    replay: The completions of an earlier run, to learn from in place of what
      this one would draw.
    wait: Gives a context in which a signal need not wait.
    jobs: Draw for the run; None: it draws itself.
  """
  if replay is not None:
    draw = functools.partial(
      replay_lib.draw,
      replay,
      run.tokenizer,
      run.draw.prompts,
      run.draw.group,
      turns=run.turns,
    )
    # Evaluations are drawn even so.
    return AtOnce(draw, loader(run, updater), run.engine.unload, wait)
  if not run.draws_ahead:
    return drawn_at_once(run, updater, wait)
  lease = Lease()
  run = dataclasses.replace(run, check=lease.check, judging=lease.judging)
  fill = run.prompts.fill
  if jobs is not None:
    there = _There(run, jobs)
    return Ahead(
      there, run.draw.pace, lease, run.steps, wait, fill, jobs.desk.agree
    )
  here = _Here(run, _weights(run, updater))
  return Ahead(here, run.draw.pace, lease, run.steps, wait, fill)


class _There:
  """Has rollouts drawn by jobs; see `sources.Sampling`."""

  def __init__(self, run: build.Run, jobs: Jobs):
    self._desk, weights = jobs.desk, jobs.offers
    self.publish, self.drop = weights.publish, weights.drop
    self.snapshot, self.restore = weights.snapshot, weights.restore
    run = learning_jobs.elsewhere(jobs.desk, run, run.check)
    self.draw = functools.partial(sampled, run)

  def load(self, version: int, goes_on: bool = False) -> None:
    """See `sources.Sampling`."""
    del goes_on
    self._desk.newest = version


class _Here:
  """Draws with the engine of this process; see `sources.Sampling`."""

  def __init__(self, run: build.Run, weights: Weights):
    self._run, self._weights = run, weights
    self.publish, self.drop = weights.publish, weights.drop
    self.snapshot, self.restore = weights.snapshot, weights.restore
    self.draw = functools.partial(sampled, run)

  def load(self, version: int, goes_on: bool = False) -> None:
    """See `sources.Sampling`."""
    engine = self._run.engine
    if not goes_on:
      engine.unload()  # so that memory holds one set at a time
    engine.take(self._weights.fetch(version), version)

  def put(self, params: Any, version: int) -> None:
    """Gives the engine a version that nothing else is drawn by."""
    self.publish(params, version)
    self.load(version)
    self.drop(())


def asks_servers(run: build.Run) -> bool:
  """Whether servers of others draw for a run."""
  return isinstance(run.engine, HttpEngine)


@contextlib.contextmanager
def closing(run: build.Run) -> Iterator[None]:
  """Leaves nothing with servers of others at its end, if they draw."""
  try:
    yield
  finally:
    if isinstance(run.engine, HttpEngine):
      run.engine.close()


def greet(
  run: build.Run, updater: Updater, params: Any, version: int
) -> handshake.Report:
  """Compares servers that draw for a run with its own scores.

  Args:
    run: The parts of the run.
    updater: See `source`.
    params: Trained parameters; the servers get them.
    version: Of these.

  Raises:
    ValueError: They differ by more than `config.log.sampler_gap_alarm`.
  """
  engine, joined = run.engine, updater.joined(params)
  engine.load(joined, version)
  mesh = run.mesh if run.mesh.size > 1 else None
  assert isinstance(run.model, models.Layered)
  longest = sum(limits.longest(run.config))
  scorer = scoring.Scorer(run.model, joined, longest, mesh)
  prompts = [
    run.tokenizer.encode_prompt(run.prompts[n]['prompt'])
    for n in range(handshake.PROMPTS)
  ]
  others = {}
  if updater.frozen is not None:
    none = jax.tree.map(jnp.zeros_like, params)
    others['It draws without the adapter.'] = updater.joined(none)
  found = handshake.shake(
    engine, scorer, prompts, run.sampling, run.draw.max_tokens, others, version
  )
  most = run.config.log.sampler_gap_alarm
  if most and not found.gap <= most:
    raise ValueError(
      f'The servers of config.engine.urls do not draw by the policy of the '
      f'run: log-probabilities of {found.tokens} tokens differ by '
      f'{found.gap:.3g} nats in the mean, above log.sampler_gap_alarm='
      f'{most:g}. {found.cause}'
    )
  return found


def loader(run: build.Run, updater: Updater) -> Callable[[Any, int], None]:
  """What gives the engine trained parameters, wherever it draws.

  Args:
    run: The parts of the run.
    updater: See `source`.

  Returns:
    A function of parameters and their version.
  """
  if run.config.generator.devices:
    return _Here(run, _weights(run, updater)).put
  return functools.partial(_load, run, updater)


def drawn_at_once(
  run: build.Run, updater: Updater, wait: Wait = contextlib.nullcontext
) -> Source:
  """A source that samples each rollout when it is asked for; see `source`."""
  return AtOnce(
    functools.partial(sampled, run),
    functools.partial(_load, run, updater),
    run.engine.unload,
    wait,
    run.steps,
    run.prompts.fill,
  )


def _load(run: build.Run, updater: Updater, params: Any, version: int) -> None:
  """Gives the engine trained parameters, with the frozen ones beside them."""
  run.engine.load(updater.joined(params), version=version)


def sampled(run: build.Run, prompt_state: PromptState, step: int) -> Drawn:
  """The next rollout, sampled by the policy of the engine and judged."""
  spec, number, parts = run.draw, 0, list[drawing.Collected]()

  def collect(records):
    nonlocal number
    parts.append(_collected(run, records, step, 'sample'))
    number += len(records) * spec.group
    rollout = parts[-1].rollout
    rollout = turn_fields.with_turns(rollout, run.turns)
    # Here, so that dynamic sampling chooses groups by the shuffled rewards too.
    if spec.shuffles:
      rng = random_keys.generator(spec.seed, 'shuffle rewards', step)
      rollout = rollout_lib.shuffle_rewards(rollout, rng)
    if run.taught is not None:
      top = run.learn.learner.method.top_tokens
      rollout = teacher_field.with_scores(rollout, run.taught, top)
    return batch_fields.with_fields(rollout, records, run.fields)

  rollout, prompt_state, counts = dynamic_sampling.draw(
    prompt_state,
    run.prompts,
    run.epoch,
    spec.prompts,
    collect,
    spec.resample_rounds,
    spec.retire_solved,
    spec.right_reward,
    build_data.fits(run.data, run.tokenizer),
    whole_records=run.environment is not None,
  )
  use = EngineUse()
  for part in parts:
    use.add(part.use)
  # A rollout may consist of what was drawn before.
  if secs := sum(part.judging_secs for part in parts):
    waited = sum(part.waited_secs for part in parts)
    counts |= {'judge_secs': waited, 'judged_per_sec': number / secs}
  return rollout, prompt_state, counts | use.metrics()


def first(run: build.Run) -> Rollout:
  """What the model of a run samples first, before it has learned.

  No group takes the place of another, and rewards are those of the judges.
  """
  plain = dataclasses.replace(run.draw, resample_rounds=0, shuffles=False)
  with (
    build_rewards.workers(run.limits, run.rewards) as workers,
    build_environment.player(run.environment) as player,
  ):
    run = dataclasses.replace(run, draw=plain, workers=workers, player=player)
    return sampled(run, PromptState(), 0)[0]


def evaluated(
  run: build.Run,
  step: int,
  keep: Callable[[Rollout, int], None] = lambda rollout, step: None,
) -> dict[str, float | None]:
  """The metrics of greedy answers to held-out problems.

  Args:
    run: Its engine has the policy.
    step: Rollouts done.
    keep: Called with the answers and `step`.

  Returns:
    `heldout_accuracy`, the mean of the first reward, which for a reward of 0 or
    1 is the accuracy, and `heldout_judged`, over how many problems. It is None
    if the run has no held-out problems, if no answer was judged, or if all
    problems are too long and dropped; an answer on which it failed counts as 0.
    If any reward has failed on some,
    `heldout_failed` is the number of these; if any problem is too long and
    dropped, `heldout_too_long` is the number of those. If any reward is neither
    0 nor 1, `heldout_graded` is the share of those, and people are told a mean
    reward instead of an accuracy.
  """
  nothing: dict[str, float | None] = {'heldout_accuracy': None}
  if run.heldout is None:
    return nothing
  records, too_long = build_data.heldout_records(
    run.data, run.tokenizer, run.heldout, run.evaluation.examples
  )
  if not records:
    return nothing | too_long
  rollout = _collected(run, records, step, 'evaluate').rollout
  keep(rollout, step)
  reward, counts = pass_at_k.first_rewards(rollout)
  accuracy = float(np.mean(reward[counts])) if counts.any() else None
  failed = float(rollout.failed.any(-1).sum())
  some = {'heldout_judged': float(counts.sum())}
  some |= {'heldout_failed': failed} if failed else {}
  graded = (reward != 0) & (reward != 1) & counts
  if graded.any():
    some['heldout_graded'] = float(np.mean(graded[counts]))
  return {'heldout_accuracy': accuracy, **some, **too_long}


def _collected(
  run: build.Run, records: drawing.Records, step: int, purpose: str
) -> drawing.Collected:
  """What was drawn of some records, by whoever draws for the run."""
  if run.collect is not None:
    return run.collect(records, step, purpose)
  return drawing.collect(run, records, step, purpose)
