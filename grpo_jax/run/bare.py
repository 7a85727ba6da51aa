"""Bare runs: a warm-up, rollouts and their updates, and nothing is kept.

They need neither a workdir nor a screen; studies do many of them.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
from typing import Any
from typing import NamedTuple

from grpo_jax import monitor
from grpo_jax.config import Config
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner.instruments.geometry import Geometry
from grpo_jax.learner.instruments.rollout_end import RolloutEnd
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.run import learning
from grpo_jax.run import sampling
from grpo_jax.run import warm_up
from grpo_jax.run.build import build


def warmed_up(config: Config, workdir: pathlib.Path) -> Any:
  """The parameters after the supervised warm-up of one seed.

  Args:
    config: What to warm up, for how long, and with which seed.
    workdir: Of the study. The warm-up of each seed has a directory in it, from
      which it continues if it was interrupted.

  Returns:
    Parameters that every run of this seed may begin with.
  """
  place = workdir / f'seed_{config.seed}'
  silent = monitor.Options('none', tensorboard=False)
  # The rate rises in the runs, each of which may have a rise of its own.
  steady = dataclasses.replace(config.optim, warmup_steps=0)
  parts = build.run(dataclasses.replace(config, optim=steady))
  frozen = build.frozen_params(parts)
  with monitor.Monitor(silent, place, 0, None, {}) as shown:
    return warm_up.run(parts, place, shown, lambda: False, frozen)


class Trained(NamedTuple):
  """A rollout, and what its updates have measured."""

  rollout: Rollout
  measured: dict[str, float]
  secs: float  # that the updates took
  layout: LayoutSpec  # for the next rollout; it leaves nothing open


def trained(
  run: build.Run, updater: Updater, state: TrainState
) -> Iterator[Trained]:
  """Trains, and yields every rollout after its updates.

  It measures what updates do to clipped tokens and how gradients of prompts lie
  to each other, in the rollouts in which a run of this config would.

  Args:
    run: Its engine samples, and has the last policy at the end.
    updater: What updates the policy; with the frozen parameters of the run.
    state: To begin with; donated.
  """
  layout, measure = updater.layout, run.measure
  instruments = [
    Geometry(updater, measure.seed, measure.geometry_every_steps),
    RolloutEnd(updater),
  ]
  source = sampling.source(run, updater)
  with contextlib.closing(source):
    source.publish(state.params, 0)
    for step in range(run.steps):
      rollout = source.next(step).rollout
      learned = learning.learn(
        updater, layout, state, rollout, step, instruments=instruments
      )
      state, layout = learned.state, learned.layouts.spec
      source.publish(state.params, step + 1)
      measured = {**learned.measured, **learned.findings.numbers}
      yield Trained(rollout, measured, learned.secs, layout)
