r"""A mixture of experts in the place of an MLP: k of E experts for each token.

The router gives every token a score for each expert, in float32: a probability,
or a sigmoid of each by itself. The k best experts compute the token, and their
outputs are summed with these scores as weights. No token is dropped, however
uneven the choices are: the pairs of a token and an expert are sorted by expert,
so that each expert multiplies the rows of its own pairs.

On a mesh the experts are split over the axis `expert`, and so are the rows. The
devices along this axis exchange rows of activations and never weights: each
gets the rows of all, computes the pairs of its own experts, and gives back what
it has to add to each row. With k experts per token an exchange of single pairs
would move up to k copies of a row; this moves one to every device.

What routers did is told by statistics, sums over tokens, which add up over
micro-batches, and by a code, which says of each token which experts it chose:
some bits of every layer in one integer. By it the choices of the sampler and
those of the learner are compared, at 4 bytes per token instead of one for each
of k experts in each layer.

Shapes: `B` rows, `Q` tokens in each, `N` tokens, `k` experts per token, `E`
experts, `w` hidden units of one.

References:
  Fedus et al., `Switch Transformers <https://arxiv.org/abs/2101.03961>`_, 2021
  Gale et al., `MegaBlocks <https://arxiv.org/abs/2211.15841>`_, 2022
  Yang et al., `Qwen3 Technical Report <https://arxiv.org/abs/2505.09388>`_,
  2025
"""

from collections.abc import Callable
import functools
import math
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import axes
from grpo_jax.models.config import Experts
from grpo_jax.models.config import ModelConfig

Array = jax.Array

# The rows of pairs that one expert multiplies at a time. Larger blocks waste
# rows where an expert has few pairs; smaller ones read its weights more often.
_LEAST_BLOCK, _LARGEST_BLOCK = 8, 512
# The pairs of a token and an expert that one device computes at a time, where
# experts lie on several devices.
_MOST_PAIRS = 2**18
_CODE_BITS = 32  # of the code of a token


class Statistics(NamedTuple):
  """How evenly routers chose, summed over tokens.

  Attributes:
    mass: f32[L,E], the probability that the router of each of the L layers with
      experts gave to each expert.
    load: f32[L,E], how many tokens chose each expert.
  """

  mass: Array
  load: Array


class LayerRouting(NamedTuple):
  """What the router of one layer did.

  Attributes:
    hash: u32[B,Q], of the experts that each token chose; the order of the
      choice does not matter.
    statistics: Sums over the tokens that count, f32[E] each; None where the
      caller wants none.
  """

  hash: Array
  statistics: Statistics | None


class Routing(NamedTuple):
  """What the routers of all layers with experts did.

  Attributes:
    code: i32[B,Q], of the experts that each token chose.
    statistics: Sums over the tokens that count; None where the caller wants
      none.
  """

  code: Array
  statistics: Statistics | None


class Kernels(NamedTuple):
  """The weights of experts: of all, or of those that are here.

  Attributes:
    gate: f[E,width,w].
    up: f[E,width,w].
    down: f[E,w,width].
    gate_bias: f[E,w], added to products with `gate`; None: nothing is.
    up_bias: f[E,w] likewise.
    down_bias: f[E,width] likewise.
  """

  gate: Array
  up: Array
  down: Array
  gate_bias: Array | None = None
  up_bias: Array | None = None
  down_bias: Array | None = None


Gated = Callable[[Array, Array], Array]
"""From both inner products of an expert to what `down` reads."""


class Pairs(NamedTuple):
  """Where each pair of a token and an expert lies, sorted by expert.

  The slots of an expert follow one another and begin at a multiple of the block
  size, so that all slots of a block belong to one expert.

  Attributes:
    slot: i32[M], of each pair n * k + j; beyond all slots for an expert that is
      not here.
    end: i32[E], the first slot behind each expert's last block.
    sizes: i32[E], pairs of each expert.
  """

  slot: Array
  end: Array
  sizes: Array


class RoutedMLP(nnx.Module):
  """The feed-forward part of a layer whose kind has `experts`.

  Args:
    config: The shape of the model; its `experts` are described.
    gated: The function of both inner products.
    rngs: Random keys.
  """

  def __init__(self, config: ModelConfig, gated: Gated, rngs: nnx.Rngs):
    assert config.experts is not None
    self.config, self.gated = config, gated
    number, width = config.experts.number, config.experts.width
    init = nnx.initializers.lecun_normal(batch_axis=0)
    router_init = nnx.initializers.lecun_normal()
    inward, outward = (config.width, width), (width, config.width)
    key = rngs.params
    self.router = nnx.Param(router_init(key(), (config.width, number)))
    self.gate = nnx.Param(init(key(), (number, *inward)))
    self.up = nnx.Param(init(key(), (number, *inward)))
    self.down = nnx.Param(init(key(), (number, *outward)))
    vectors = {'correction_bias': number} if config.experts.corrected else {}
    if config.experts.biases:
      vectors['router_bias'] = number
      for name, size in (('gate', width), ('up', width), ('down', None)):
        shape = number, size or config.width
        setattr(self, f'{name}_bias', nnx.Param(jnp.zeros(shape)))
    for name, size in vectors.items():
      setattr(self, name, nnx.Param(jnp.zeros((size,))))
    if config.experts.beside_mlp:
      self.input_scale = nnx.Param(jnp.ones((config.width,)))
      self.output_scale = nnx.Param(jnp.ones((number,)))

  def __call__(
    self, x: Array, counted: Array | None = None, told: Array | None = None
  ) -> tuple[Array, LayerRouting]:
    """Computes a layer.

    Args:
      x: f[B,Q,width].
      counted: f32[B,Q], how often each token counts in the statistics; None
        leaves them out.
      told: f32[B,Q,width], what the router is told of each token beside an MLP,
        before its scale; elsewhere it reads `x`.

    Returns:
      f[B,Q,width], and what the router did.
    """
    experts = self.config.experts
    assert experts is not None
    vectors = (
      self._whole(name) if hasattr(self, name) else None
      for name in ('router_bias', 'correction_bias', 'output_scale')
    )
    if experts.beside_mlp:
      assert told is not None
      scale = self.config.width**-0.5 * self.input_scale[...]
      told = told * scale[None, None]
    probability, weight, chosen = route(
      x if told is None else told, self._whole('router'), experts, *vectors
    )
    names = Kernels._fields if experts.biases else Kernels._fields[:3]
    kernels = Kernels(
      *(self._whole(name, x.dtype).astype(x.dtype) for name in names)
    )
    run = over_devices
    if sharding.on_shard():
      run = functools.partial(on_shard, number=experts.number)
    mixed = run(x, weight, chosen, kernels, gated=self.gated)
    return mixed, layer_routing(experts, probability, chosen, counted)

  def _whole(self, name: str, dtype=None) -> Array:
    """A parameter, whole over `fsdp`."""
    path = 'experts', name
    parameter = getattr(self, name)[...]
    return axes.gather(parameter, path, self.config.width, dtype)


def route(
  x: Array,
  router: Array,
  experts: Experts,
  bias: Array | None = None,
  correction: Array | None = None,
  factor: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Chooses the experts of each token.

  Args:
    x: f[B,Q,width].
    router: f[width,E].
    experts: How they are chosen.
    bias: f[E], added to the logits.
    correction: f[E], added to the scores for the choice alone.
    factor: f[E], of the weights of each expert, once they are normalised.

  Returns:
    The probability of every expert, f32[B,Q,E]: its score over the sum of all
    scores; the weights of the chosen ones, f32[B,Q,k], those chosen first
    before the others; and their numbers, i32[B,Q,k].

  References:
    Liu et al., `DeepSeek-V3 <https://arxiv.org/abs/2412.19437>`_, 2024, for
    sigmoids, corrections and groups.
  """
  # In float32, and exactly so: in bfloat16 many experts would be equally
  # likely, and the learner would choose others than the sampler.
  logits = jnp.matmul(
    x.astype(jnp.float32).reshape(-1, x.shape[-1]),
    router.astype(jnp.float32),
    precision=lax.Precision.HIGHEST,
  ).reshape(*x.shape[:-1], -1)
  if bias is not None:
    logits += bias.astype(jnp.float32)[None, None]
  if experts.scores == 'softmax':
    probability = score = jax.nn.softmax(logits, axis=-1)
  else:
    score = jax.nn.sigmoid(logits)
    probability = score / jnp.sum(score, axis=-1, keepdims=True)
  if correction is None and experts.groups == 1:
    weight, chosen = lax.top_k(score, experts.per_token)
  else:
    chosen = _choose(score, experts, correction)
    weight = jnp.take_along_axis(score, chosen, axis=-1)
  if experts.normalized:
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
  if experts.scale != 1:
    weight = weight * experts.scale
  if factor is not None:
    every = jnp.broadcast_to(factor.astype(jnp.float32), score.shape)
    weight = weight * jnp.take_along_axis(every, chosen, axis=-1)
  return probability, weight, chosen


def _choose(score: Array, experts: Experts, correction: Array | None) -> Array:
  """The numbers of the chosen experts, i32[B,Q,k], from f32[B,Q,E]."""
  if correction is not None:
    score = score + correction.astype(jnp.float32)[None, None]
  if experts.groups > 1:
    grouped = score.reshape(*score.shape[:-1], experts.groups, -1)
    of_group = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, best = lax.top_k(of_group, experts.groups_per_token)
    number = jnp.arange(experts.groups)
    is_best = jnp.any(best[..., None] == number[None, None, None], axis=-2)
    grouped = jnp.where(is_best[..., None], grouped, -jnp.inf)
    score = grouped.reshape(score.shape)
  return lax.top_k(score, experts.per_token)[1]


def over_devices(
  x: Array, weight: Array, chosen: Array, kernels: Kernels, gated: Gated
) -> Array:
  """`mixture` on the mesh in use, each device with the experts that it holds.

  An axis whose size the mesh does not divide is not split: then every device
  has all experts, or all rows.

  Args:
    x: Of `mixture`, as the next two.
    weight: Of all rows.
    chosen: Of all rows.
    kernels: Of all experts.
    gated: The function of both inner products.

  Returns:
    f[B,Q,width].
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return mixture(x, weight, chosen, kernels, gated)
  shards = sharding.row_shards(mesh)
  rows = jax.P(sharding.ROW_AXES if x.shape[0] % shards == 0 else None)
  # What is split over `fsdp` is gathered, but only of this device's experts.
  places: list[Any] = [
    sharding.gathered_spec(mesh, kernel.shape, axes.names(('experts', name)))
    for name, kernel in kernels._asdict().items()
    if kernel is not None
  ]
  mix = functools.partial(
    _mix_on_device,
    gated=gated,
    parts=mesh.shape['expert'] if places[0][0] is not None else 1,
    exchanges=rows[0] is not None,
    summed=places[0][2] is not None,
  )
  return jax.shard_map(
    mix, in_specs=(rows, rows, rows, Kernels(*places)), out_specs=rows
  )(x, weight, chosen, kernels)


def on_shard(
  x: Array,
  weight: Array,
  chosen: Array,
  kernels: Kernels,
  gated: Gated,
  number: int,
) -> Array:
  """`over_devices` where each data shard already has its own rows and experts.

  See `sharding.on_shard`. Only the hidden units are left to be split.

  Args:
    x: Of `mixture`, as the next two.
    weight: Of the rows of this shard.
    chosen: Of the rows of this shard.
    kernels: Of the experts of this shard.
    gated: The function of both inner products.
    number: How many experts there are on all devices.

  Returns:
    f[B,Q,width].
  """
  mesh, arrays = jax.sharding.get_abstract_mesh(), (x, weight, chosen, kernels)
  mix = functools.partial(
    _mix_on_device, gated=gated, parts=number // len(kernels.gate)
  )
  split = kernels.gate.shape[2] % mesh.shape['tensor'] == 0
  if mesh.shape['tensor'] == 1 or not split:
    return mix(*arrays)
  inward, hidden = jax.P(None, None, 'tensor'), jax.P(None, 'tensor')
  places: list[Any] = [inward, inward, hidden]
  if kernels.gate_bias is not None:
    places += [hidden, hidden, jax.P()]
  return jax.shard_map(
    functools.partial(mix, summed=True),
    in_specs=(*(jax.P(),) * 3, Kernels(*places)),
    out_specs=jax.P(),
    axis_names={'tensor'},
    check_vma=False,
  )(*arrays)


def _mix_on_device(
  x, weight, chosen, kernels, gated, parts, exchanges=True, summed=False
):
  """`mixture` with the experts of this device.

  Args:
    x: Of `mixture`, as the next three.
    weight: Of the rows that are here.
    chosen: Of the rows that are here.
    kernels: Of the experts that are here.
    gated: The function of both inner products.
    parts: On how many devices the experts lie.
    exchanges: Whether these devices have rows of their own.
    summed: Whether the hidden units are split over `tensor`.
  """
  exchanges &= parts > 1
  if summed and kernels.down_bias is not None:  # each device adds its share
    share = kernels.down_bias / lax.axis_size('tensor')
    kernels = kernels._replace(down_bias=share)
  if exchanges:
    x, weight, chosen = (
      shards.gathered(one, 'expert') for one in (x, weight, chosen)
    )
  first = lax.axis_index('expert') * len(kernels.gate) if parts > 1 else 0
  mixed = mixture(x, weight, chosen, kernels, gated, first=first, parts=parts)
  if summed:  # each device has summed over its hidden units
    mixed = lax.psum(mixed, 'tensor')
  if exchanges:
    return shards.sum_scattered(mixed, 'expert', 0)
  return lax.psum(mixed, 'expert') if parts > 1 else mixed


def mixture(
  x: Array,
  weight: Array,
  chosen: Array,
  kernels: Kernels,
  gated: Gated,
  first: Array | int = 0,
  parts: int = 1,
  ragged: bool | None = None,
) -> Array:
  r"""The weighted sum of the chosen experts' outputs, for some of the experts.

  .. math:: \sum_j \text{weight}_j \,
    \operatorname{gated}(x\, G_{e_j}, x\, U_{e_j}) D_{e_j}

  over those j whose expert is here, with a bias behind each product if there
  are any.

  Args:
    x: f[B,Q,width].
    weight: f32[B,Q,k].
    chosen: i32[B,Q,k], numbers among all experts.
    kernels: Of the E' experts that are here.
    gated: The function of both inner products.
    first: Number of the first expert that is here.
    parts: On how many devices experts lie, each with as many as are here.
    ragged: Whether the products are `lax.ragged_dot`. Otherwise they are
      products of blocks of pairs with copies of the weights. None: on a TPU,
      which has code for the former. Elsewhere XLA multiplies all pairs by all
      experts for it.

  Returns:
    f[B,Q,width]; the sum over the experts is taken in float32.
  """
  if ragged is None:
    ragged = sharding.platform() == 'tpu'
  number, per_token = len(kernels.gate), chosen.shape[-1]
  tokens, weight = x.reshape(-1, x.shape[-1]), weight.reshape(-1, per_token)
  here = chosen.reshape(-1) - first
  here = jnp.where((here >= 0) & (here < number), here, number)
  mix = functools.partial(_mix_tokens, gated=gated, parts=parts, ragged=ragged)
  cuts = pieces(len(tokens), per_token, parts)
  if cuts == 1:
    return mix(tokens, weight, here, kernels).reshape(x.shape)
  # In float32, so that the gradients of all pieces are added in float32. The
  # values stay the same.
  wide = jax.tree.map(lambda one: one.astype(jnp.float32), kernels)

  # What pieces keep for the backward pass would be kept for all of them.
  @jax.checkpoint
  def one_piece(piece):
    narrow = jax.tree.map(lambda one: one.astype(x.dtype), wide)
    return mix(piece[0], piece[1], piece[2], narrow)

  inputs = tuple(
    one.reshape(cuts, -1, *one.shape[1:]) for one in (tokens, weight, here)
  )
  return lax.map(one_piece, inputs).reshape(x.shape)


def pieces(tokens: int, per_token: int, parts: int) -> int:
  """Into how many equal pieces tokens fall, so that each has few pairs.

  A device gets the tokens of all that share its experts, and has room for each
  pair with one of its experts, however uneven the choices are: with 16 devices
  and 8 experts per token that is 128 times its own tokens.

  Args:
    tokens: That one device computes, of all that share its experts.
    per_token: `k`.
    parts: On how many devices experts lie. If on one, there is one piece.
  """
  if parts == 1:
    return 1
  least = math.ceil(tokens * per_token / _MOST_PAIRS)
  return next(n for n in range(max(1, least), tokens + 1) if tokens % n == 0)


def _mix_tokens(
  tokens: Array,
  weight: Array,
  here: Array,
  kernels: Kernels,
  gated: Gated,
  parts: int,
  ragged: bool,
) -> Array:
  """`mixture` of flat tokens, with room for any choice of experts.

  Args:
    tokens: f[N,width].
    weight: f32[N,k].
    here: i32[N*k], numbers among the experts that are here; E' for the others.
    kernels: Of the E' experts that are here.
    gated: The function of both inner products.
    parts: On how many devices experts lie.
    ragged: Whether the products are `lax.ragged_dot`.

  Returns:
    f[N,width].
  """
  number, per_token = len(kernels.gate), weight.shape[-1]
  # A token has its experts at most once.
  most = len(tokens) * min(per_token, number)
  block = 1 if ragged else _block(most // parts, number)
  pairs = sort_pairs(here, number, block)

  def run(most, *arrays):
    slots = _slots(most, number, block)
    return _mixed(pairs, gated, slots, block, ragged, *arrays)

  arrays = tokens, weight, kernels
  # Room for twice an even share is enough nearly always, and saves most of the
  # work where the experts lie on many devices. Any routing fits into the rest.
  usual = 2 * math.ceil(most / parts)
  if usual >= most:
    return run(most, *arrays)
  # What a branch keeps for the backward pass would be kept for both.
  branches = [
    jax.checkpoint(functools.partial(run, size)) for size in (usual, most)
  ]
  fits = pairs.end[-1] <= _slots(usual, number, block)
  return lax.cond(fits, *branches, *arrays)


def _block(pairs: int, experts: int) -> int:
  """The rows of a block: a power of two, a half of an even share or less.

  Measured on two CPU cores, with 2048 tokens, each given to 4 of 64 experts of
  3 x 512 x 256 (128 pairs per expert): 0.3 s forwards in blocks of 128 and
  0.6 s in blocks of 64, with the backward pass 0.9 s and 0.8 s; forwards 2.7 s
  if all experts compute all tokens, and 6.9 s by `lax.ragged_dot`. One token:
  1.5 ms against 110 ms, because blocks read the chosen weights alone.
  """
  share = max(1, pairs // (2 * experts))
  power = 1 << (share.bit_length() - 1)
  return min(max(power, _LEAST_BLOCK), _LARGEST_BLOCK)


def _slots(pairs: int, experts: int, block: int) -> int:
  """The most slots that so many pairs need: each expert may waste a part."""
  if block == 1:
    return pairs
  return (pairs // block + min(experts, pairs)) * block


def sort_pairs(expert: Array, number: int, block: int) -> Pairs:
  """Sorts pairs by expert.

  Args:
    expert: i32[M], the expert of each pair; `number` for one that is not here.
    number: How many experts there are, `E`.
    block: The slots of a block.
  """
  order = jnp.argsort(expert, stable=True).astype(jnp.int32)
  ordered = expert[order]
  begin = jnp.searchsorted(ordered, jnp.arange(number + 1)).astype(jnp.int32)
  sizes = jnp.diff(begin)
  end = jnp.cumsum((sizes + block - 1) // block * block)
  place = jnp.arange(len(expert), dtype=jnp.int32)
  # Behind all slots, and no two pairs at one place.
  far = 2 * len(expert) + number * block
  offset = jnp.append(
    end - (sizes + block - 1) // block * block - begin[:-1], far
  )
  slot = (
    jnp.zeros_like(place)
    .at[order]
    .set(place + offset[ordered], unique_indices=True)
  )
  return Pairs(slot, end, sizes)


def _mixed(pairs, gated, slots, block, ragged, tokens, weight, kernels):
  """`mixture` of flat tokens f[N,width], with room for some slots."""
  number, per_token = len(tokens), weight.shape[-1]
  # Every index below occurs once: what JAX makes of them for the backward pass
  # then needs no atomic additions, whose order changes from run to run.
  # Slots that no pair has read behind the copies, each at a place of its own.
  source = number * per_token + jnp.arange(slots, dtype=jnp.int32)
  source = source.at[pairs.slot].set(
    jnp.arange(number * per_token, dtype=jnp.int32),
    mode='drop',
    unique_indices=True,
  )
  copies = jnp.repeat(tokens, per_token, axis=0)
  rows = copies.at[source].get(mode='fill', fill_value=0, unique_indices=True)
  if not ragged:
    rows = rows.reshape(slots // block, block, -1)
  starts = jnp.arange(slots // block) * block
  owner = jnp.searchsorted(pairs.end, starts, side='right')
  owner = jnp.minimum(owner, len(pairs.end) - 1)

  def dot(x, kernel, bias):
    if ragged:
      product = lax.ragged_dot(x, kernel, pairs.sizes)
    else:
      product = _block_dot(owner, x, kernel)
    if bias is None:
      return product
    of_block = bias.astype(jnp.float32)[owner].astype(x.dtype)
    return product + (of_block if ragged else of_block[:, None])

  hidden = gated(
    dot(rows, kernels.gate, kernels.gate_bias),
    dot(rows, kernels.up, kernels.up_bias),
  )
  rows = dot(hidden, kernels.down, kernels.down_bias).reshape(slots, -1)
  # Pairs whose expert is not here get 0, whatever `ragged_dot` left there.
  parts = rows.at[pairs.slot].get(
    mode='fill', fill_value=0, unique_indices=True
  )
  parts = parts.reshape(number, per_token, -1)
  mixed = jnp.sum(parts.astype(jnp.float32) * weight[..., None], axis=1)
  return mixed.astype(tokens.dtype)


def _block_dot(owner: Array, rows: Array, kernel: Array) -> Array:
  """Each block times the weights of its expert, f[n,block,...].

  Args:
    owner: i32[n], the expert of each block.
    rows: f[n,block,inputs].
    kernel: f[E,inputs,outputs].
  """
  # By way of float32, so that the gradients of an expert's blocks are added in
  # float32 too; the values stay the same.
  chosen = kernel.astype(jnp.float32)[owner].astype(rows.dtype)
  return jnp.einsum('nbi,nio->nbo', rows, chosen)


def layer_routing(
  experts: Experts, probability: Array, chosen: Array, counted: Array | None
) -> LayerRouting:
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
    return LayerRouting(code, None)
  took = chosen[..., None] == jnp.arange(experts.number)[None, None, None]
  times = counted[..., None]
  return LayerRouting(
    code,
    Statistics(
      mass=jnp.sum(probability * times, axis=(0, 1)),
      load=jnp.sum(jnp.where(took, times[..., None], 0), axis=(0, 1, 2)),
    ),
  )


def model_routing(layers: LayerRouting, config: ModelConfig) -> Routing:
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
    statistics: Sums over all tokens that count.

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
  """The share of each expert in its layer's total; 0 without tokens."""
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
