"""Metrics: sums and counts that add up under any split, and their writers.

A metric leaves the compiled step as a small pytree that is merged over
micro-batches, devices and steps, and divided once, at the end; so no mean of
means can arise.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Array = jax.Array


class Mean(NamedTuple):
  """A mean, as sum and count; merging adds both."""

  total: Array  # f32[]
  count: Array  # f32[]


class Max(NamedTuple):
  """A maximum; merging takes the larger."""

  value: Array  # f32[]


Metric = Mean | Max


def masked_mean(value: ArrayLike, mask: ArrayLike) -> Mean:
  """The `Mean` of `value` where `mask`."""
  return Mean(
    jnp.sum(jnp.where(mask, value, 0), dtype=jnp.float32),
    jnp.sum(mask, dtype=jnp.float32),
  )


def masked_max(value: ArrayLike, mask: ArrayLike) -> Max:
  """The `Max` of `value` where `mask`; -inf where nothing is."""
  return Max(jnp.max(value, where=mask, initial=-jnp.inf))


def empty(metrics: dict[str, Metric]) -> dict[str, Metric]:
  """The same names with nothing in them: what `merge` leaves unchanged."""
  zero, least = jnp.zeros(()), jnp.full((), -jnp.inf)
  return {
    name: Mean(zero, zero) if isinstance(metric, Mean) else Max(least)
    for name, metric in metrics.items()
  }


def merge(
  first: dict[str, Metric], second: dict[str, Metric]
) -> dict[str, Metric]:
  """Joins two dicts of metrics, name by name."""

  def join(a: Metric, b: Metric) -> Metric:
    if isinstance(a, Mean) and isinstance(b, Mean):
      return Mean(a.total + b.total, a.count + b.count)
    assert isinstance(a, Max) and isinstance(b, Max)
    return Max(jnp.maximum(a.value, b.value))

  shared = first.keys() & second.keys()
  joined = {name: join(first[name], second[name]) for name in sorted(shared)}
  return {**first, **second, **joined}


def only_if(condition: Array, metric: Metric) -> Metric:
  """The metric, or one of nothing."""
  nothing = empty({'': metric})['']
  return jax.tree.map(
    lambda value, least: jnp.where(condition, value, least), metric, nothing
  )


def total(metrics: dict[str, Metric], names: Sequence[str]) -> Array:
  """f32[], the sum of the totals of those `Mean`s that are there."""
  found = [metrics[name] for name in names if name in metrics]
  sums = [metric.total for metric in found if isinstance(metric, Mean)]
  return sum(sums, start=jnp.zeros(()))


def to_scalars(metrics: dict[str, Metric]) -> dict[str, float]:
  """Plain numbers; metrics of nothing (count 0, maximum -inf) are left out."""
  scalars = {}
  for name, metric in jax.device_get(metrics).items():
    if isinstance(metric, Max):
      if metric.value > -jnp.inf:
        scalars[name] = float(metric.value)
    elif metric[1]:
      scalars[name] = float(metric[0] / metric[1])
  return scalars


class Writer:
  """Appends one JSON object per step to `metrics.jsonl`.

  Args:
    workdir: Directory, made if it is not there. The file of an earlier run is
      kept beside the new one, as `metrics.1.jsonl` and so on.
  """

  def __init__(self, workdir: str | pathlib.Path):
    self.path = pathlib.Path(workdir) / 'metrics.jsonl'
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if self.path.exists():
      earlier = (
        self.path.with_name(f'metrics.{n}.jsonl') for n in itertools.count(1)
      )
      self.path.rename(next(path for path in earlier if not path.exists()))
    self._start = time.monotonic()

  def write(self, step: int, scalars: dict[str, Any]) -> None:
    """Writes one line, with the seconds since this writer was made.

    Args:
      step: Rollouts done.
      scalars: Numbers by name; what is not finite becomes null.
    """
    record = {
      'step': step,
      'elapsed_secs': round(time.monotonic() - self._start, 3),
      **{
        name: value if value is not None and math.isfinite(value) else None
        for name, value in scalars.items()
      },
    }
    with self.path.open('a') as file:
      file.write(json.dumps(record) + '\n')


class Progress:
  """One line on standard error; rewritten in place on a terminal.

  Args:
    steps: Rollouts of the whole run.
  """

  _SHOWN = {
    'reward': 'reward',
    'heldout_accuracy': 'held-out',
    'length_tokens': 'tokens',
    'kl_old': 'kl',
    'grad_norm': 'gradient',
  }

  def __init__(self, steps: int):
    self._steps, self._start = steps, time.monotonic()
    self._live = sys.stderr.isatty()

  def show(self, step: int, measured: Mapping[str, float | None]) -> None:
    """Shows a rollout's numbers.

    Args:
      step: Rollouts done.
      measured: Scalars by name; a few of them are shown.
    """
    shown = [
      f'{label} {measured[name]:.3f}'
      for name, label in self._SHOWN.items()
      if measured.get(name) is not None
    ]
    self.line('  '.join([f'step {step}/{self._steps}', *shown]))
    if 'heldout_accuracy' in measured:
      self.close()

  def line(self, text: str) -> None:
    """Shows any text, with the seconds so far."""
    text = f'{text}  {time.monotonic() - self._start:.0f} s'
    start, end = ('\r\033[K', '') if self._live else ('', '\n')
    print(start + text, end=end, file=sys.stderr, flush=True)

  def close(self) -> None:
    """Leaves the line as it stands and starts another."""
    if self._live:
      print(file=sys.stderr, flush=True)
