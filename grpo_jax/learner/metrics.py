"""Metrics: sums and counts that add up under any split of the data.

A metric leaves the compiled step as a small pytree. It is merged over
micro-batches, devices and steps, and divided once, at the end; so no mean of
means can arise. Each kind of metric is a NamedTuple. `merge`, `empty`,
`only_if` and `to_scalars` know all kinds. An empty metric is one of no values:
merging it changes nothing, and it is not reported.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

Array = jax.Array


class Mean(NamedTuple):
  """A mean, as sum and count; merging adds both."""

  total: Array  # f32[]
  count: Array  # f32[]


class Max(NamedTuple):
  """A maximum; merging takes the larger."""

  value: Array  # f32[]


class Min(NamedTuple):
  """A minimum; merging takes the smaller."""

  value: Array  # f32[]


class Moments(NamedTuple):
  """Mean and standard deviation; reported as `name_mean` and `name_std`.

  Holds the sum of squared deviations. In a sum of squares, a deviation that is
  small beside the mean would be lost to rounding.
  """

  mean: Array  # f32[]
  squares: Array  # f32[], sum of squared deviations from the mean
  count: Array  # f32[]


class EffectiveShare(NamedTuple):
  r"""Effective sample size over sample size of weights w, in (0, 1].

  .. math:: \frac{(\sum w)^2}{N \sum w^2}

  1 for equal weights, 1 / N where one outweighs all others. Weights are held
  relative to the largest: those of long completions leave the range of float32.
  """

  largest: Array  # f32[], log of the largest weight
  total: Array  # f32[], sum of weights over the largest
  squares: Array  # f32[], sum of their squares
  count: Array  # f32[]


class Histogram(NamedTuple):
  """A histogram of logarithms, reported as quantiles of their exponentials.

  A histogram that is named `log_ratio` is reported as `ratio_p01`, `ratio_p50`
  and `ratio_p99`. The bins are fixed, so that counts add up: a bin for 0, and
  on both sides bins a factor of 1.12 apart, from 1e-4 to 20. A quantile of the
  logarithm is therefore off by less than 12 % of itself or by 1e-4, and exact
  at 0; beyond 20 it is reported as 20.
  """

  counts: Array  # f32[len(_EDGES) + 1], the open end bins included


Metric = Mean | Max | Min | Moments | EffectiveShare | Histogram

_MAGNITUDES = np.geomspace(1e-4, 20, 107)
# The bin between the innermost edges is for 0 alone: two log-probabilities that
# differ at all differ by more than 1e-30.
_EDGES = np.concatenate([-_MAGNITUDES[::-1], [-1e-30, 1e-30], _MAGNITUDES])
_QUANTILES = {'p01': 0.01, 'p50': 0.5, 'p99': 0.99}

# How values are joined, and what stands for those outside the mask.
_JOINED: dict[Any, tuple[Any, float]] = {
  Mean: (lax.add, 0),
  Max: (lax.max, -np.inf),
  Min: (lax.min, np.inf),
}

# Fields of an empty metric; of a kind that is not named here, all are 0.
_NOTHING = {
  Max: (-np.inf,),
  Min: (np.inf,),
  EffectiveShare: (-np.inf, 0, 0, 0),
}


def together(
  wanted: Mapping[str, tuple[type[Metric], ArrayLike, ArrayLike]],
) -> dict[str, Any]:
  """Several metrics at once.

  Arrays of one shape are read in one loop. XLA does not join reductions by
  itself on a CPU, where it takes 20 ms to compile each of them.

  Args:
    wanted: For each name `Mean`, `Max` or `Min`, values and a mask.

  Returns:
    What `masked_mean`, `masked_max` or `masked_min` would return for each.
  """
  pieces: list[tuple[Array, tuple[Any, float]]] = []
  places: dict[str, list[int]] = {}
  counts: dict[int, int] = {}  # the place of a mask that is counted already
  for name, (kind, value, mask) in wanted.items():
    places[name] = [len(pieces)]
    # A choice, no product: 0 times a NaN outside the mask would be NaN.
    value = jnp.where(jnp.asarray(mask, bool), value, _JOINED[kind][1])
    pieces.append((value.astype(jnp.float32), _JOINED[kind]))
    if kind is Mean:
      if id(mask) not in counts:
        counts[id(mask)] = len(pieces)
        pieces.append((jnp.asarray(mask, jnp.float32), _JOINED[Mean]))
      places[name].append(counts[id(mask)])
  found = _reduced(pieces)
  return {
    name: wanted[name][0](*(found[k] for k in at))
    for name, at in places.items()
  }


def _reduced(
  pieces: Sequence[tuple[Array, tuple[Any, float]]],
) -> list[Array]:
  """Each array reduced to a number, by the operation beside it.

  On several devices each array alone: a loop over several arrays is not split,
  and every device would gather them whole.
  """
  alone = jax.sharding.get_abstract_mesh().size > 1
  groups: dict[Any, list[int]] = {}
  for k, (x, _) in enumerate(pieces):
    kind = k if alone else (x.shape, jax.typeof(x).sharding)
    groups.setdefault(kind, []).append(k)
  found = [x for x, _ in pieces]
  for chosen in groups.values():
    operations, neutral = zip(*(pieces[k][1] for k in chosen), strict=True)
    start = tuple(map(jnp.float32, neutral))

    def join(left, right, operations=operations):
      return tuple(
        f(x, y) for f, x, y in zip(operations, left, right, strict=True)
      )

    parts = tuple(found[k] for k in chosen)
    # The last axis first, because a sum of sums is more exact than a sum of all
    # numbers one by one.
    if parts[0].ndim > 1:
      parts = lax.reduce(parts, start, join, (parts[0].ndim - 1,))
    if parts[0].ndim:
      parts = lax.reduce(parts, start, join, range(parts[0].ndim))
    for k, part in zip(chosen, parts, strict=True):
      found[k] = part
  return found


def masked_mean(value: ArrayLike, mask: ArrayLike) -> Mean:
  """The `Mean` of `value` where `mask`."""
  return together({'': (Mean, value, mask)})['']


def masked_max(value: ArrayLike, mask: ArrayLike) -> Max:
  """The `Max` of `value` where `mask`; -inf if `mask` is nowhere true."""
  return together({'': (Max, value, mask)})['']


def masked_min(value: ArrayLike, mask: ArrayLike) -> Min:
  """The `Min` of `value` where `mask`; inf if `mask` is nowhere true."""
  return together({'': (Min, value, mask)})['']


def masked_moments(value: ArrayLike, mask: ArrayLike) -> Moments:
  """The `Moments` of `value` where `mask`."""
  total, count = masked_mean(value, mask)
  mean = total / jnp.maximum(count, 1)
  squares, _ = masked_mean(jnp.square(value - mean), mask)
  return Moments(mean, squares, count)


def effective_share(log_weight: ArrayLike, mask: ArrayLike) -> EffectiveShare:
  """The `EffectiveShare` of `exp(log_weight)` where `mask`."""
  largest = masked_max(log_weight, mask).value
  weight = jnp.exp(log_weight - _finite(largest))
  found = together(
    {'': (Mean, weight, mask), '2': (Mean, weight * weight, mask)}
  )
  (total, count), (squares, _) = found.values()
  return EffectiveShare(largest, total, squares, count)


def _finite(largest: Array) -> Array:
  """The largest; 0 for that of no weights, as -inf - -inf would be NaN."""
  return jnp.where(largest == -jnp.inf, 0, largest)


def masked_histogram(value: ArrayLike, mask: ArrayLike) -> Histogram:
  """The `Histogram` of `value` where `mask`; NaN counts as the largest."""
  # Values are compared with every edge, because a scatter is slow on a TPU.
  edges = jnp.asarray(_EDGES, jnp.float32).reshape(-1, *(1,) * jnp.ndim(value))
  below = jnp.sum(
    jnp.expand_dims(value, 0) <= edges,
    axis=range(1, edges.ndim),
    dtype=jnp.int32,
    where=jnp.expand_dims(jnp.asarray(mask, bool), 0),
  )
  everything = jnp.sum(mask, dtype=jnp.int32)
  return Histogram(
    jnp.diff(below, prepend=0, append=everything).astype(jnp.float32)
  )


def empty(metrics: dict[str, Metric]) -> dict[str, Metric]:
  """Empty metrics of the same names and kinds."""

  def nothing(metric: Metric) -> Metric:
    full = lambda x, filler: jnp.full(x.shape, filler, x.dtype)
    return jax.tree.map(full, metric, _nothing(metric))

  return {name: nothing(metric) for name, metric in metrics.items()}


def _nothing(metric: Metric) -> Metric:
  """An empty metric of the same kind, with plain numbers for arrays."""
  return type(metric)(*_NOTHING.get(type(metric), (0,) * len(metric)))


def merge(
  first: dict[str, Metric], second: dict[str, Metric]
) -> dict[str, Metric]:
  """Joins two dicts of metrics, name by name."""
  shared = first.keys() & second.keys()
  joined = {name: _join(first[name], second[name]) for name in sorted(shared)}
  return {**first, **second, **joined}


_merge_at_once = jax.jit(merge)  # one call in place of one for each array


def merge_outside(
  first: dict[str, Metric], second: dict[str, Metric]
) -> dict[str, Metric]:
  """`merge` outside of a program; if no name is shared, no program runs."""
  if first.keys().isdisjoint(second):
    return {**first, **second}
  return _merge_at_once(first, second)


def _join(a: Metric, b: Metric) -> Metric:
  assert type(a) is type(b)
  if isinstance(a, Moments) and isinstance(b, Moments):
    # Chan et al.: deviations from two means become deviations from their common
    # mean, without a sum of squares.
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1)
    gap = b.mean - a.mean
    squares = a.squares + b.squares + gap * gap * a.count * share
    return Moments(a.mean + gap * share, squares, count)
  if isinstance(a, EffectiveShare) and isinstance(b, EffectiveShare):
    largest = jnp.maximum(a.largest, b.largest)
    left, right = (jnp.exp(x.largest - _finite(largest)) for x in (a, b))
    return EffectiveShare(
      largest,
      a.total * left + b.total * right,
      a.squares * left**2 + b.squares * right**2,
      a.count + b.count,
    )
  join = {Max: jnp.maximum, Min: jnp.minimum}.get(type(a), jnp.add)
  return jax.tree.map(join, a, b)


def only_if(condition: Array, metric: Metric) -> Metric:
  """The metric if `condition`, a bool[]; else an empty one."""
  return jax.tree.map(
    lambda x, nothing: jnp.where(condition, x, nothing),
    metric,
    _nothing(metric),
  )


def to_scalars(metrics: dict[str, Metric]) -> dict[str, float]:
  """Plain numbers for a log; empty metrics are left out."""
  scalars = {}
  for name, metric in _on_host(metrics).items():
    nothing = _nothing(metric)
    if any(np.any(x != y) for x, y in zip(metric, nothing, strict=True)):
      scalars |= _report(name, metric)
  return {name: float(value) for name, value in scalars.items()}


def _on_host(metrics: dict[str, Metric]) -> dict[str, Metric]:
  """The same with arrays of NumPy.

  `device_get` begins all copies before it waits for one. On a CPU nothing needs
  copying, and `device_get` takes ten times as long as `np.asarray`: half a
  millisecond for a hundred numbers.
  """
  if jax.default_backend() == 'cpu':
    return jax.tree.map(np.asarray, metrics)
  return jax.device_get(metrics)


def _report(name: str, metric: Metric) -> dict[str, Any]:
  """The numbers of a metric that is not empty, by name."""
  match metric:
    case Mean(total, count):
      return {name: total / count}
    case Max(value) | Min(value):
      return {name: value}
    case Moments(mean, squares, count):
      return {f'{name}_mean': mean, f'{name}_std': np.sqrt(squares / count)}
    case EffectiveShare(_, total, squares, count):
      return {name: total / squares * (total / count)}
    case Histogram(counts):
      name = name.removeprefix('log_')
      return {
        f'{name}_{label}': np.exp(_quantile(np.asarray(counts), share))
        for label, share in _QUANTILES.items()
      }


def _quantile(counts: np.ndarray, share: float) -> float:
  """The quantile at `share` of the values, linear inside a bin."""
  passed = np.cumsum(counts, dtype=np.float64)
  sought = share * passed[-1]
  place = int(np.searchsorted(passed, sought))
  # The open bins at both ends get no width, so they report the last edge.
  edges = np.concatenate([_EDGES[:1], _EDGES, _EDGES[-1:]])
  inside = (sought - passed[place] + counts[place]) / counts[place]
  return edges[place] + inside * (edges[place + 1] - edges[place])
