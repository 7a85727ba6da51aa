"""A run's measured times beside the least that its machines allow.

The bound counts what no implementation can do without: one forward pass over
every sampled token to draw it, three for each epoch to learn from it if it is
needed (two if adapters alone are trained), one for each scoring, and the
weights read once for every token of the longest completion. Prompts count
nothing, because metrics do not tell their lengths. A method that was given in
Python counts as one that scores nothing before its updates.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import models
from grpo_jax.learner import programs
from grpo_jax.mesh import chips
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.planning import roofline
from grpo_jax.planning import topologies
from grpo_jax.run.build import build
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import objects
from grpo_jax.run.keep import records

_WARM_UP = 2  # rollouts in which programs are compiled


class Share(NamedTuple):
  """One part of a rollout."""

  measured_secs: float  # the median over rollouts
  bound_secs: float
  bound_by: str  # one of `roofline.RESOURCES`

  @property
  def reached(self) -> float:
    """The share of the bound's speed that the run had."""
    return self.bound_secs / self.measured_secs


class Against(NamedTuple):
  """A run beside its bound."""

  devices: str  # as the run has noted them
  machine: roofline.Machine  # one device; on a CPU all of them together
  rollouts: int  # of which the medians are
  sampling: Share | None  # None: elsewhere, by jobs or servers
  learning: Share


def compare(directory: str) -> Against:
  """Reads a run, and bounds its times.

  Args:
    directory: The run's workdir.

  Raises:
    ValueError: There is no run, it has too few rollouts, or its devices are not
      in the table of chips.
  """
  config = _planned(
    config_lib.dataclass_from_dict(
      config_lib.Config, records.config_of(directory), directory
    )
  )
  place = bucket.read_only(directory)
  path = place / 'metrics.jsonl'
  rows = _rollouts(path)
  last = max((row['step'] for row in rows), default=0)
  start = _newest_start(place / 'versions.json', last)
  if start.get('replays'):
    raise ValueError(
      f'The last start in {directory} has replayed completions of another run, '
      'so that it tells no times of sampling; give the workdir of that run.'
    )
  # Earlier ones may have had other devices. In its first rollouts programs are
  # compiled.
  earlier = start.get('after_step', 0)
  rows = [row for row in rows if row['step'] > earlier][_WARM_UP:]
  if not rows:
    raise ValueError(
      f'{path} has no more than {_WARM_UP} rollouts of the last start, in '
      'which programs are compiled; let the run train on.'
    )
  devices = start['devices']
  number, _, kind = devices.partition(' x ')
  is_cpu = kind.casefold() == 'cpu'
  chip = chips.find(kind)
  if chip is None and not is_cpu:
    raise ValueError(
      f'{directory} ran on {devices}, and {kind} is not in the table of chips, '
      'so that its peak is not known.'
    )
  own = config.generator.devices
  shape = sharding.mesh_shape(int(number) - own, **vars(config.mesh))
  used = int(np.prod(list(shape.values())))
  platform = 'cpu' if is_cpu else 'tpu'  # the devices need not be here
  mesh = topologies.mesh_of_shapes(shape, platform, platform)
  parts = build.abstract(config, mesh)
  weights = arithmetic.count_weights(parts)
  # The virtual devices of a CPU share it: what all of them read is read by it.
  sides = own or used, used  # that draw, that learn
  shares = [1 if is_cpu else number for number in sides]
  # All tokens may choose the same experts.
  least = weights.read(1, parts.model.experts)
  drawn = weights.read(1, parts.model.experts, draws=True)
  reads = [
    size * (number if is_cpu else 1)
    for size, number in zip((drawn, least), sides, strict=True)
  ]
  machine = (
    roofline.measure_cpu(int(min(reads)), parts.model.compute_dtype)
    if chip is None
    else roofline.chip_peaks(chip)
  )
  needs = _needs(config, parts, reads, shares)
  sampling, learning = _shares(rows, needs, machine)
  elsewhere = bool(config.generator.listen) or config.engine.kind == 'http'
  return Against(
    devices, machine, len(rows), None if elsewhere else sampling, learning
  )


def _needs(
  config: config_lib.Config,
  parts: build.Abstract,
  reads: Sequence[float],
  shares: Sequence[int],
) -> Callable[[dict[str, Any]], tuple[roofline.Work, roofline.Work]]:
  """From the metrics of a rollout to its work: of sampling, and of learning.

  Args:
    config: Of the run.
    parts: Of the run.
    reads: Bytes of the weights that a device reads in a pass: one that draws,
      and one that learns.
    shares: How many devices share the products, likewise.
  """
  to_draw, to_learn = zip(reads, shares, strict=True)
  model, update = parts.model, parts.updater
  completions = config.sampler.prompts * config.sampler.group
  # Dynamic sampling draws more of them, and some in earlier rollouts.
  most = completions * (1 + config.sampler.resample_rounds)
  # Forward passes: what updates are worth, and those before the updates.
  passes = (2 if config.lora.rank else 3) * update.spec.epochs
  names = programs.scoring_names(update)
  scorings = sum(name != 'score_teacher' for name in names)
  teacher = parts.run.teacher

  def forward(tokens: float, number: int, model=model) -> float:
    """FLOPs of a forward pass over completions, at least.

    Attention grows faster than length, so equal lengths cost least.
    """
    length = tokens / number
    whole = np.arange(int(length)) + 1
    each = models.flops_per_token(model, whole).sum()
    rest = (length - int(length)) * models.flops_per_token(model, length)
    return float(number * (each + rest))

  def work(row: dict[str, Any]) -> tuple[roofline.Work, roofline.Work]:
    tokens = row['learn_tokens_per_sec'] * row['learn_secs']
    drawn = row['sample_tokens_per_sec'] * row['sample_secs']
    # Updates leave out what has no advantage.
    needed = tokens * row.get('needed_tokens', 1.0)
    flops = passes * forward(needed, completions)
    flops += scorings * forward(tokens, completions)
    if teacher is not None:
      flops += forward(tokens, completions, teacher.model.config)
    longest = row.get('length_tokens_max', 1.0)
    steps = longest if most == completions else 1.0
    return (
      roofline.Work(forward(drawn, most) / to_draw[1], to_draw[0] * steps),
      roofline.Work(flops / to_learn[1], to_learn[0] if flops else 0),
    )

  return work


def _shares(
  rows: list[dict[str, Any]],
  needs: Callable[[dict[str, Any]], tuple[roofline.Work, roofline.Work]],
  machine: roofline.Machine,
) -> tuple[Share, Share]:
  """Sampling and learning: medians over rollouts."""
  found: list[tuple[float, ...]] = []
  names: tuple[str, str] = ('', '')
  for row in rows:
    bounds = [roofline.bound(work.secs(machine)) for work in needs(row)]
    names = bounds[0][1], bounds[1][1]
    found.append(
      (row['sample_secs'], bounds[0][0], row['learn_secs'], bounds[1][0])
    )
  sample, least_sample, learn, least_learn = np.median(found, axis=0)
  return (
    Share(float(sample), float(least_sample), names[0]),
    Share(float(learn), float(least_learn), names[1]),
  )


def _planned(config: config_lib.Config) -> config_lib.Config:
  """The config of a run without what the bound does not need.

  Data is not read, and neither is an object that was given in Python.
  """
  widths = config.sampler.max_tokens, *config.data.completion_buckets
  data = dataclasses.replace(
    config.data,
    prompt_buckets=config.data.prompt_buckets or (1,),
    completion_buckets=(max(widths),),
  )
  learner = config.learner
  if objects.is_object(learner.method):
    learner = dataclasses.replace(learner, method='reinforce', method_kwargs={})
  return dataclasses.replace(config, data=data, learner=learner)


def _rollouts(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a run's metrics that a rollout has written."""
  if not path.exists():
    return []
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  return [row for row in rows if 'learn_secs' in row]


def _newest_start(path: pathlib.Path, last: int) -> dict[str, Any]:
  """What the newest start that has added rollouts has noted of itself.

  Args:
    path: Of the notes.
    last: The last rollout. A start of a run that is done adds none.
  """
  try:
    noted = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be read ({error}), which tells the devices of a run; '
      'give the workdir of a run.'
    ) from error
  starts = noted if isinstance(noted, list) else [noted]
  added = [one for one in starts if one.get('after_step', 0) < last]
  return (added or starts)[-1]
