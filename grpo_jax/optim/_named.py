"""Lion, Muon and SGD as a run takes them; see `adamw` and `adafactor`."""

from collections.abc import Callable
import math
from typing import Any

import jax
import optax
import optax.contrib

from grpo_jax.optim import _matrices
from grpo_jax.optim import _numbers

Decays = Callable[[Any], Any] | None


def clip_first(
  inner: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformationExtraArgs:
  """A transformation of gradients whose global norm is clipped.

  Args:
    inner: Any transformation.
    clip_norm: Largest global norm of the gradient; None does not clip.

  Returns:
    One that also ignores arguments that `inner` does not know.
  """
  if clip_norm is not None:
    _numbers.check('clip_first', 'clip_norm', clip_norm, above=True)
    inner = optax.chain(optax.clip_by_global_norm(clip_norm), inner)
  return optax.with_extra_args_support(inner)


def lion(
  schedule: optax.ScalarOrSchedule,
  weight_decay: float = 0.0,
  decays: Decays = None,
  *,
  b1: float = 0.9,
  b2: float = 0.99,
) -> optax.GradientTransformationExtraArgs:
  """Lion: the sign of a mix of momentum and gradient.

  Args:
    schedule: Learning rate, or a function from the optimizer step to it. Three
      to ten times less than AdamW's is usual, because every entry of a
      parameter moves by all of it.
    weight_decay: Decoupled decay: the share of a parameter that a step of
      learning rate 1 would remove.
    decays: From the parameters to a tree of bools: which of them decay; None:
      all.
    b1: Weight of momentum in the mix, in [0, 1).
    b2: Decay of momentum, in [0, 1).

  Raises:
    ValueError: A number is outside its range.

  References:
    Chen et al., `Symbolic Discovery of Optimization Algorithms
    <https://arxiv.org/abs/2302.06675>`_, 2023
  """
  _numbers.check('lion', 'weight_decay', weight_decay)
  _numbers.share('lion', 'b1', b1)
  _numbers.share('lion', 'b2', b2)
  return optax.lion(schedule, b1, b2, weight_decay=weight_decay, mask=decays)


def sgd(
  schedule: optax.ScalarOrSchedule,
  weight_decay: float = 0.0,
  decays: Decays = None,
  *,
  momentum: float | None = None,
  nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Stochastic gradient descent with decoupled weight decay.

  Args:
    schedule: Learning rate, or a function from the optimizer step to it.
    weight_decay: See `lion`.
    decays: See `lion`.
    momentum: Decay of the sum of gradients, in [0, 1); None: no momentum, and
      no state.
    nesterov: Whether momentum is Nesterov's.

  Raises:
    ValueError: A number is outside its range.
  """
  _numbers.check('sgd', 'weight_decay', weight_decay)
  stages = []
  if momentum is not None:
    _numbers.share('sgd', 'momentum', momentum)
    stages.append(optax.trace(momentum, nesterov))
  return optax.chain(
    *stages,
    optax.add_decayed_weights(weight_decay, decays),
    optax.scale_by_learning_rate(schedule),
  )


def muon(
  schedule: optax.ScalarOrSchedule,
  matrices: _matrices.Matrices,
  weight_decay: float = 0.0,
  decays: Decays = None,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  epsilon: float = 1e-8,
  beta: float = 0.95,
  ns_steps: int = 5,
  nesterov: bool = True,
  consistent_rms: float | None = 0.2,
) -> optax.GradientTransformationExtraArgs:
  """Muon: momentum of each hidden matrix made orthogonal; Adam for the rest.

  It is `optax.contrib.muon` of the model whose layers are not stacked and whose
  heads are merged. Embedding, output layer, biases and norms are Adam's.

  Args:
    schedule: Learning rate, or a function from the optimizer step to it.
    matrices: From the parameters to a tree of `Matrix`.
    weight_decay: See `lion`.
    decays: See `lion`.
    b1: Decay of Adam's first moment, in [0, 1).
    b2: Decay of Adam's second moment, in [0, 1).
    epsilon: Added to the root of Adam's second moment, and to the norm that
      Muon divides by.
    beta: Decay of Muon's momentum, in [0, 1).
    ns_steps: Newton-Schulz steps that make a matrix nearly orthogonal.
    nesterov: Whether momentum is Nesterov's, in Muon and in Adam.
    consistent_rms: A step's root mean square at learning rate 1. 0.2 is near
      that of AdamW, so that one learning rate serves both; None scales a step
      by sqrt(max(1, outputs / inputs)) instead.

  Raises:
    ValueError: A number is outside its range.

  References:
    Jordan, `modded-nanogpt <https://github.com/KellerJordan/modded-nanogpt>`_,
    2024; Liu et al., `Muon is Scalable for LLM Training
    <https://arxiv.org/abs/2502.16982>`_, 2025
  """
  _numbers.check('muon', 'weight_decay', weight_decay)
  _numbers.check('muon', 'epsilon', epsilon)
  _numbers.check('muon', 'ns_steps', ns_steps, above=True, whole=True)
  for name, value in (('b1', b1), ('b2', b2), ('beta', beta)):
    _numbers.share('muon', name, value)
  if consistent_rms is not None:
    _numbers.check('muon', 'consistent_rms', consistent_rms, above=True)

  def dimensions(tree):
    # optax counts axes that are negative as NumPy does, from the end.
    return jax.tree.map(
      lambda _, m: optax.contrib.MuonDimensionNumbers(m.inputs, m.outputs),
      tree,
      matrices(tree),
    )

  def labels(params):
    return jax.tree.map(
      lambda _, m: 'muon' if m.inputs and m.hidden else 'adam',
      params,
      matrices(params),
    )

  def scaled(update, matrix):
    inputs, outputs = _matrices.sizes(update.shape, matrix)
    if consistent_rms is None:
      return math.sqrt(max(1, outputs / inputs)) * update
    return consistent_rms * math.sqrt(max(inputs, outputs)) * update

  orthogonal = optax.chain(
    optax.contrib.scale_by_muon(
      ns_steps=ns_steps,
      beta=beta,
      eps=epsilon,
      nesterov=nesterov,
      weight_dimension_numbers=dimensions,
    ),
    optax.stateless(lambda u, _: jax.tree.map(scaled, u, matrices(u))),
  )
  adam = optax.scale_by_adam(b1, b2, epsilon, nesterov=nesterov)
  return optax.chain(
    optax.partition({'muon': orthogonal, 'adam': adam}, labels),
    optax.add_decayed_weights(weight_decay, decays),
    optax.scale_by_learning_rate(schedule),
  )
