"""Adafactor on stacked parameters: each matrix has its own rows and columns."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from grpo_jax.optim import _matrices
from grpo_jax.optim import _numbers

Array = jax.Array

_LEAST_SCALE = 1e-3  # of a parameter that is 0, in its own units


class FactoredState(NamedTuple):
  """Second moments: of rows and columns, or whole where those are too short.

  Every array has the rank of its parameter. What an axis is averaged over has
  size 1, and so has every axis of what is not kept.
  """

  count: ArrayLike  # i32[], steps taken
  rows: Any  # averaged over outputs
  columns: Any  # averaged over inputs
  whole: Any


def adafactor(
  schedule: optax.ScalarOrSchedule,
  matrices: _matrices.Matrices,
  weight_decay: float = 0.0,
  decays: Callable[[Any], Any] | None = None,
  *,
  min_dim_size_to_factor: int = 128,
  decay_rate: float = 0.8,
  multiply_by_parameter_scale: bool = True,
  clipping_threshold: float | None = 1.0,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Adafactor, which keeps two vectors in place of a matrix of second moments.

  It is `optax.adafactor` of the model whose layers are not stacked and whose
  heads are merged, but for two things: momentum is taken before the learning
  rate, and weight decay is multiplied by it, as AdamW's is.

  Args:
    schedule: Learning rate, or a function from the optimizer step to it. With
      `multiply_by_parameter_scale` it is a share of a parameter's root mean
      square, so 1e-3 is a usual value.
    matrices: From the parameters to a tree of `Matrix`.
    weight_decay: Decoupled decay: the share of a parameter that a step of
      learning rate 1 would remove.
    decays: From the parameters to a tree of bools: which of them decay; None:
      all.
    min_dim_size_to_factor: Inputs and outputs that a matrix has at least if its
      second moment is factored.
    decay_rate: Exponent of second moments' decay, which is 1 - step^-rate.
    multiply_by_parameter_scale: Whether a step is multiplied by the root mean
      square of its matrix, at least 1e-3.
    clipping_threshold: Largest root mean square of a matrix's step before the
      learning rate; None does not clip.
    momentum: Decay of a mean of steps, in [0, 1), which takes memory for one
      more copy of the parameters; None: no momentum.

  Raises:
    ValueError: A number is outside its range.

  References:
    Shazeer et al., `Adafactor <https://arxiv.org/abs/1804.04235>`_, 2018
  """
  check = lambda *given, **kind: _numbers.check('adafactor', *given, **kind)
  check('min_dim_size_to_factor', min_dim_size_to_factor, whole=True)
  check('decay_rate', decay_rate, above=True)
  check('weight_decay', weight_decay)
  stages: list[optax.GradientTransformation] = [
    _by_factored_moments(matrices, min_dim_size_to_factor, decay_rate)
  ]
  if clipping_threshold is not None:
    check('clipping_threshold', clipping_threshold, above=True)
    stages.append(_clipped(matrices, clipping_threshold))
  if multiply_by_parameter_scale:
    stages.append(_by_parameter_scale(matrices))
  if momentum is not None:
    _numbers.share('adafactor', 'momentum', momentum)
    stages.append(optax.ema(momentum, debias=False))
  stages += [
    optax.add_decayed_weights(weight_decay, decays),
    optax.scale_by_learning_rate(schedule),
  ]
  return optax.chain(*stages)


def _by_factored_moments(matrices, least, exponent):
  """Divides a gradient by the root of its second moment."""

  def factors(x, matrix):
    return (
      bool(matrix.inputs) and min(_matrices.sizes(x.shape, matrix)) >= least
    )

  def init(params):
    def zeros(kept):
      def one(x, matrix):
        return jnp.zeros(kept(x, matrix), x.dtype)

      return jax.tree.map(one, params, matrices(params))

    def averaged(name):
      return lambda x, matrix: (
        _without(x.shape, getattr(matrix, name))
        if factors(x, matrix)
        else (1,) * x.ndim
      )

    return FactoredState(
      jnp.zeros((), jnp.int32),
      zeros(averaged('outputs')),
      zeros(averaged('inputs')),
      zeros(lambda x, m: (1,) * x.ndim if factors(x, m) else x.shape),
    )

  def update(updates, state, params=None, **extra_args):
    del params, extra_args
    count = optax.safe_increment(state.count)
    old = 1.0 - jnp.asarray(count, jnp.float32) ** -exponent

    def one(g, matrix, row, column, whole):
      square = jnp.square(g) + 1e-30
      mixed = lambda moment, new: (old * moment + (1 - old) * new).astype(
        moment.dtype
      )
      if not factors(g, matrix):
        whole = mixed(whole, square)
        return g * whole**-0.5, row, column, whole
      mean = lambda x, axes: jnp.mean(x, axes, keepdims=True)
      row = mixed(row, mean(square, matrix.outputs))
      column = mixed(column, mean(square, matrix.inputs))
      relative = row / mean(row, matrix.inputs)
      return g * relative**-0.5 * column**-0.5, row, column, whole

    leaves, treedef = jax.tree.flatten(updates)
    others = matrices(updates), state.rows, state.columns, state.whole
    made = [
      one(*each)
      for each in zip(leaves, *map(treedef.flatten_up_to, others), strict=True)
    ]
    parts = [treedef.unflatten([m[i] for m in made]) for i in range(4)]
    return parts[0], FactoredState(count, *parts[1:])

  return optax.GradientTransformationExtraArgs(init, update)


def _clipped(matrices, threshold):
  """Shrinks the step of each matrix to a largest root mean square."""

  def one(u, matrix):
    return u / jnp.maximum(1.0, _root_mean_square(u, matrix) / threshold)

  return optax.stateless(lambda u, _: jax.tree.map(one, u, matrices(u)))


def _by_parameter_scale(matrices):
  """Multiplies the step of each matrix by the matrix's root mean square."""

  def one(u, x, matrix):
    return u * jnp.maximum(_root_mean_square(x, matrix), _LEAST_SCALE)

  return optax.stateless(lambda u, p: jax.tree.map(one, u, p, matrices(u)))


def _root_mean_square(x, matrix) -> Array:
  axes = (*matrix.inputs, *matrix.outputs)
  return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def _without(shape, axes) -> tuple[int, ...]:
  gone = {axis % len(shape) for axis in axes}
  return tuple(1 if i in gone else size for i, size in enumerate(shape))
