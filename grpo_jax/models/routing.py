r"""What the routers of a model did: how evenly they chose, and which experts.

Statistics are sums over tokens, which add up over micro-batches. A code says of
each token which experts it chose: some bits of every layer in one integer. By
it the choices of the sampler and those of the learner are compared, at 4 bytes
per token instead of one for each of k experts in each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.config import Experts
from grpo_jax.models.config import ModelConfig

Array = jax.Array

_CODE_BITS = 32


class Statistics(NamedTuple):
  """How evenly routers chose, summed over tokens.

  Attributes:
    mass: f32[L,E], the probability that the router of each of the L layers with
      experts gave to each expert.
    load: f32[L,E], how many tokens chose each expert.
  """

  mass: Array
  load: Array


class OfLayer(NamedTuple):
  """What the router of one layer did.

  Attributes:
    hash: u32[B,Q], of the experts that each token chose; the order of the
      choice does not matter.
    statistics: Of the tokens that count, f32[E] each; None if not asked for.
  """

  hash: Array
  statistics: Statistics | None


class Routing(NamedTuple):
  """What the routers of all layers with experts did.

  Attributes:
    code: i32[B,Q], of the experts that each token chose.
    statistics: Of the tokens that count; None if not asked for.
  """

  code: Array
  statistics: Statistics | None


def of_layer(
  experts: Experts, probability: Array, chosen: Array, counted: Array | None
) -> OfLayer:
  """What the router of one layer did.

  Args:
    experts: Their description.
    probability: f32[B,Q,E].
    chosen: i32[B,Q,k].
    counted: f32[B,Q], how often each token counts; None: no statistics.
  """
  words = jnp.asarray(_words(experts.number))[chosen]
  code = jax.lax.reduce(
    words, np.uint32(0), jax.lax.bitwise_xor, (words.ndim - 1,)
  )
  if counted is None:
    return OfLayer(code, None)
  took = chosen[..., None] == jnp.arange(experts.number)[None, None, None]
  times = counted[..., None]
  return OfLayer(
    code,
    Statistics(
      mass=jnp.sum(probability * times, axis=(0, 1)),
      load=jnp.sum(jnp.where(took, times[..., None], 0), axis=(0, 1, 2)),
    ),
  )


def of_model(layers: OfLayer, config: ModelConfig) -> Routing:
  """What all routers did.

  Args:
    layers: Stacked over the layers with experts: [L,...].
    config: The shape of the model.
  """
  bits, chosen = _form(config)
  code = jnp.zeros(layers.hash.shape[1:], jnp.uint32)
  for place, layer in enumerate(chosen):
    low = layers.hash[layer] & np.uint32(2**bits - 1)
    code |= low << np.uint32(place * bits)
  code = jax.lax.bitcast_convert_type(code, jnp.int32)
  return Routing(code, layers.statistics)


def disagreement(config: ModelConfig, code: Array, other: Array) -> Array:
  """In which share of the layers two passes chose other experts, per token.

  An estimate. A model with at most 32 layers with experts has 32 / L bits of
  each in its codes, a deeper one has one bit of 32 layers, evenly spread. Two
  sets of experts that differ may have the same bits; the count is divided by
  the probability that they do not, if the sets differ in one expert. Single
  tokens are therefore off, but not the mean over many.

  Args:
    config: The shape of the model.
    code: i32[...], of one pass.
    other: i32[...], of the other.

  Returns:
    f32[...], 0 where the codes are equal.
  """
  assert config.experts is not None
  bits, chosen = _form(config)
  differ = jax.lax.bitcast_convert_type(code ^ other, jnp.uint32)
  count = jnp.zeros(differ.shape, jnp.float32)
  for place in range(len(chosen)):
    low = (differ >> np.uint32(place * bits)) & np.uint32(2**bits - 1)
    count += low != 0
  words = _words(config.experts.number) & np.uint32(2**bits - 1)
  number = len(words)
  unequal = np.sum(words[:, None] != words[None])
  seen = unequal / (number * (number - 1)) if number > 1 else 1.0
  return count / (len(chosen) * seen)


def balance(statistics: Statistics) -> Array:
  r"""How unevenly the experts are used: 1 if each is used alike.

  .. math:: \frac{1}{L} \sum_l E \sum_e f_{le} P_{le}

  with f the share of the choices that fell on expert e, and P the mean
  probability that the router gave it. The gradient comes through P alone.
  transformers' `load_balancing_loss_func` is k times this for one layer: its f
  is the share of tokens.

  Args:
    statistics: Of all tokens that count.

  Returns:
    f32[]; 0 if no token counts.

  References:
    Fedus et al., `Switch Transformers <https://arxiv.org/abs/2101.03961>`_,
    2021, equation 4
    Qiu et al., `Demons in the Detail <https://arxiv.org/abs/2501.11873>`_,
    2025, for f over the whole batch and not over each micro-batch
  """
  load, mass = _shares(statistics.load), _shares(statistics.mass)
  layers, experts = load.shape
  return experts / layers * jnp.sum(jax.lax.stop_gradient(load) * mass)


def load_max(statistics: Statistics) -> Array:
  """The largest load of an expert in any layer, f32[]; 1 if all are alike."""
  return statistics.load.shape[-1] * jnp.max(_shares(statistics.load))


def _shares(sums: Array) -> Array:
  """Of each layer's total; 0 without tokens."""
  total = jnp.sum(sums, axis=-1, keepdims=True)
  return sums / jnp.where(total > 0, total, 1)


def _words(experts: int) -> np.ndarray:
  """A random word of each expert, u32[E], the same in every program.

  Their low bits number the experts: so the words of two experts differ, or, if
  fewer bits are looked at, do so for as many pairs of experts as possible.
  """
  rng = np.random.default_rng(0)
  number, bits = rng.permutation(experts), max(1, (experts - 1).bit_length())
  above = rng.integers(2 ** (_CODE_BITS - bits), size=experts)
  return (number + (above << bits)).astype(np.uint32)


def _form(config: ModelConfig) -> tuple[int, list[int]]:
  """How many bits of a code a layer has, and which layers have them."""
  number = sum(kind.experts for kind in config.kinds)
  places = min(number, _CODE_BITS)
  layers = [place * number // places for place in range(places)]
  return _CODE_BITS // places, layers
