"""The transformer of this package, which is a `protocol.Layered`.

`params` is a tree of plain arrays. Layers are NNX modules inside, but they are
split into structure and parameters once, and everything outside is a pure
function of the parameters.

The layers of a model repeat a pattern of layer kinds. In `params` the layers of
one kind are stacked: `params['blocks'][k]` holds kind k of the pattern, with
the repetitions on the first axis of each array. If the last repetition is cut
short, its layers stand in `params['tail']`, one by one. Layers that share keys
and values repeat a pattern of their own, whose kinds stand behind these. The
optimizer and checkpoints use this tree, and scoring scans over it. For
decoding, `unstack` turns it into a tree of single layers.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import axes
from grpo_jax.models import config as config_lib
from grpo_jax.models import experts
from grpo_jax.models import lora
from grpo_jax.models import scores
from grpo_jax.models.attention import Attention as AttentionFunction
from grpo_jax.models.axes import MatrixAxes
from grpo_jax.models.config import LayerKind
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.layers import Block
from grpo_jax.models.layers import RMSNorm
from grpo_jax.models.layers import project
from grpo_jax.models.layers import turns as turns_at
from grpo_jax.models.protocol import ScoreRouted
from grpo_jax.models.softmax import CHECKPOINT_NAME

Array = jax.Array
Params = dict[str, Any]

_INPUT = 'input'  # what `jax.checkpoint` calls the input of layers
# What is kept of layers that are computed again, beside their input; see
# `config.REMAT`. What `layers.keep_products` drops is under all of them.
_KEPT = {
  'layer': None,
  'attention': jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME),
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_INPUT],
    offload_src='device',
    offload_dst='pinned_host',
  ),
}


def _cut(layers: Any, number: int) -> tuple[Any, Any]:
  """Of some layers the first, and the others; None of None."""
  return (None, None) if layers is None else (layers[:number], layers[number:])


def _sharing(
  attention: AttentionFunction, kept: dict[Any, Any]
) -> AttentionFunction:
  """Attention that reads what is kept where a layer has no keys.

  Args:
    attention: What attends.
    kept: By window, keys and values of the last layer that had some; they are
      put there.
  """

  def attend(query, key, value, cache, window, *rest, **options):
    if key is None:
      key, value = kept[window]
    kept[window] = key, value
    # A cache gets the same once more, at the same places.
    return attention(query, key, value, cache, window, *rest, **options)

  return dataclasses.replace(attention, attend=attend)


def _stack(layers: list[Any]) -> Any:
  """What routers did, stacked over the layers with one; None if none has."""
  layers = [layer for layer in layers if layer is not None]
  return jax.tree.map(lambda *x: jnp.stack(x), *layers) if layers else None


@dataclasses.dataclass(frozen=True)
class Transformer:
  """A decoder-only transformer.

  Attributes:
    config: The shape of the model.

  >>> import jax
  >>> from grpo_jax.models import ModelConfig, Transformer
  >>> model = Transformer(ModelConfig(vocab_size=16))
  >>> params = model.init(jax.random.key(0))
  >>> params['embedding'].shape
  (16, 128)
  """

  config: ModelConfig
  takes_shards = True
  score = scores.score

  @property
  def score_routed(self) -> ScoreRouted | None:
    """None without experts."""
    return functools.partial(scores.score_routed, self) if self.routes else None

  @property
  def routes(self) -> bool:
    """Whether any layer has experts."""
    return self.config.experts is not None

  @property
  def vocab_size(self) -> int:
    """Logits of each token."""
    return self.config.vocab_size

  @property
  def unused_ids(self) -> tuple[tuple[int, int], ...]:
    """Runs of ids that are never drawn."""
    return self.config.unused_ids

  def drawing_without(self, ids: Sequence[tuple[int, int]]) -> 'Transformer':
    """The same model as a policy that never draws ids of these runs."""
    shape = dataclasses.replace(self.config, unused_ids=tuple(ids))
    return Transformer(shape)

  @property
  def bytes_per_token(self) -> int:
    """See `models.bytes_per_token`."""
    return config_lib.bytes_per_token(self.config)

  @property
  def key_cost(self) -> float:
    """One key's cost.

    For each token, a layer multiplies `width` numbers by a key and `width` by
    its value: 2 width products per key that the token attends to. Its matrices
    take about 12 width^2 products. The cost is the ratio of these, and less
    where some layers have a state.
    """
    kinds = self.config.kinds
    share = sum(kind.mixer == 'attention' for kind in kinds) / len(kinds)
    return share / (6 * self.config.width)

  @property
  def kv_heads(self) -> int:
    """Key-value heads."""
    return self.config.shared_kv_heads

  @property
  def file_shape(self) -> ModelConfig:
    """What Hugging Face's files say of it."""
    return self.config

  def shares_prompts(self, platform: str) -> bool:
    """The splash kernel cannot run on rows with shared prompts or branches.

    See `kernels.splash_suits`. Copies cost less than the portable code would,
    which makes an array of all queries times all keys.
    """
    splash = platform == 'tpu' and self.config.attention in ('auto', 'splash')
    return not splash

  @property
  def reads_branches(self) -> bool:
    """A state goes on along one line."""
    return not self.config.has_states

  def flops_per_token(
    self, context: ArrayLike, with_head: bool = True
  ) -> np.ndarray:
    """See `models.flops_per_token`."""
    return config_lib.flops_per_token(self.config, context, with_head)

  @functools.cached_property
  def _blocks(self) -> dict[LayerKind, Any]:
    """The structure of a layer of each kind, without parameters."""

    def structure(kind):
      make = lambda: Block(self.config, kind, nnx.Rngs(0))
      return nnx.split(nnx.eval_shape(make))[0]

    return {kind: structure(kind) for kind in self.config.pattern}

  def init(self, key: Array) -> Params:
    """Random parameters, float32.

    Args:
      key: A jax.random key.

    Returns:
      The parameter tree, with stacked layers.
    """
    config = self.config
    number = len(config.blocks)
    embedding_key, head_key, *block_keys = jax.random.split(
      key, 2 + number + len(config.tail)
    )

    def block(kind, key):
      layer = Block(config, kind, nnx.Rngs(key))
      return nnx.to_pure_dict(nnx.state(layer))

    params = {
      'embedding': 0.02
      * jax.random.normal(embedding_key, (config.vocab_size, config.width)),
      'blocks': [
        lax.map(
          functools.partial(block, kind), jax.random.split(key, len(layers))
        )
        for (kind, layers), key in zip(config.blocks, block_keys, strict=False)
      ],
      'final_norm': {'scale': jnp.ones((config.width,))},
    }
    if config.layer_inputs:
      params['inputs'] = self._init_inputs(jax.random.fold_in(key, 1))
    if config.tail:
      tail = [kind for kind, _ in config.tail]
      params['tail'] = list(map(block, tail, block_keys[number:]))
    if not config.tied_embeddings:
      init = nnx.initializers.lecun_normal()
      params['head'] = init(head_key, (config.width, config.vocab_size))
    return params

  def _init_inputs(self, key):
    """What makes the inputs that each layer gets of a token."""
    config, (table_key, key) = self.config, jax.random.split(key)
    size = config.num_layers * config.layer_inputs
    init = nnx.initializers.lecun_normal()
    return {
      'input_table': 0.02
      * jax.random.normal(table_key, (config.vocab_size, size)),
      'input_projection': init(key, (config.width, size)),
      'norm': {'scale': jnp.ones((config.layer_inputs,))},
    }

  def abstract(self) -> Params:
    """Shapes and dtypes of what `init` returns."""
    return jax.eval_shape(lambda: self.init(jax.random.key(0)))

  def trains(self, path: tuple[str, ...]) -> bool:
    """Updates change adapters alone if there are any, else nearly all."""
    if self.config.lora is not None:
      return lora.trains(path)
    return path[-1] not in axes.FROZEN

  def hidden(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    attention: AttentionFunction,
    cache: list[Any] | None = None,
  ) -> tuple[Array, list[Any] | None]:
    """The output of the last layer, behind the final norm.

    Args:
      params: The tree of `init`, whose layers are scanned; or that of
        `unstack`, whose layers come one after another in the program.
      tokens: i32[B,Q].
      positions: i32[B,Q].
      attention: See `models.attention`.
      cache: For each layer the cache that the attention function reads; None if
        it needs none. It must be None for scanned layers.

    Returns:
      f[B,Q,width] in the compute dtype; and for each layer its new cache, or
      None for scanned layers.
    """
    return self._hidden(params, tokens, positions, attention, cache)[:2]

  def hidden_routed(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    attention: AttentionFunction,
    cache: list[Any] | None = None,
    counted: Array | None = None,
  ) -> tuple[Array, list[Any] | None, experts.Routing]:
    """`hidden` of a model that `routes`, and what its routers did.

    Args:
      params: The tree of `init` or of `unstack`, as in `hidden`.
      tokens: i32[B,Q].
      positions: i32[B,Q].
      attention: The attention function of the layers.
      cache: The cache of each layer, as in `hidden`.
      counted: f32[B,Q], how often each token counts in the statistics; None:
        there are none.

    Returns:
      What `hidden` returns, and the `Routing`.
    """
    hidden, cache, routed = self._hidden(
      params, tokens, positions, attention, cache, counted
    )
    return hidden, cache, experts.model_routing(routed, self.config)

  def _hidden(
    self, params, tokens, positions, attention, cache, counted=None
  ) -> tuple[Array, list[Any] | None, Any]:
    """See `hidden_routed`; what the routers did is stacked over layers."""
    dtype = jnp.dtype(self.config.compute_dtype)
    width = self.config.width
    x = self._embedded(params['embedding'], tokens, width).astype(dtype)
    x = sharding.constrain_rows(x)
    if self.config.embedding_scale != 1:
      x = x * jnp.asarray(self.config.embedding_scale, dtype)
    inputs = None
    if self.config.layer_inputs:
      inputs = self._inputs(params['inputs'], tokens, x)
    x = shards.spread(x.astype(self.config.residual_dtype))
    turns = {
      kind: turns_at(self.config, kind, positions)
      for kind in dict.fromkeys(self.config.kinds)
      if kind.mixer == 'attention'
    }
    if 'layers' in params:
      caches = cache or [None] * self.config.num_layers
      x, cache, routed = self._unrolled(
        params, x, inputs, turns, attention, caches, counted
      )
    else:
      x, routed = self._scanned(params, x, inputs, turns, attention, counted)
    # The final norm belongs to no layer: a module around its one parameter.
    norm = RMSNorm(self.config.width, self.config.norm_epsilon, dtype.name)
    norm.scale = nnx.Param(params['final_norm']['scale'])
    return shards.whole(norm(x)), cache, routed

  def _inputs(self, params, tokens, x):
    """What each layer gets of a token beside the stream, f[L,B,Q,size].

    Args:
      params: The part of `init` that makes it.
      tokens: i32[B,Q].
      x: f[B,Q,width], the embedding of the tokens.
    """
    number, size = self.config.num_layers, self.config.layer_inputs
    rows = self._embedded(params['input_table'], tokens, number * size)
    rows = sharding.constrain_rows(rows.astype(x.dtype))
    name = 'input_projection'
    weight = axes.gather(params[name], (name,), self.config.width, x.dtype)
    made = project(x, weight) * self.config.width**-0.5
    rows, made = (
      shards.spread(y).reshape(*x.shape[:2], number, size) for y in (rows, made)
    )
    norm = RMSNorm(size, self.config.norm_epsilon)
    norm.scale = nnx.Param(params['norm']['scale'])
    inputs = (norm(made) + rows * size**0.5) * 2**-0.5
    return jnp.moveaxis(inputs, 2, 0)

  def _embedded(self, table, tokens, columns):
    """The rows of a table with so many columns, f[B,Q,C], in its dtype."""
    if table.shape[1] == columns:
      return jnp.take(table, tokens, axis=0)
    # A shard has some columns of the table. It looks up the tokens of all, and
    # gives each its columns: less than the table, and than its gradient.
    ids = lax.all_gather(tokens, 'fsdp')
    return lax.all_to_all(
      jnp.take(table, ids, axis=0).astype(self.config.compute_dtype),
      'fsdp',
      split_axis=0,
      concat_axis=3,
      tiled=True,
    )[0]

  def _gathered(self, params, dtype):
    """Parameters of a layer, or of none, whole over `fsdp`."""

    def one(path, x):
      path = sharding.path_names(path)
      return axes.gather(x, path, self.config.width, dtype)

    return jax.tree_util.tree_map_with_path(one, params)

  def head_params(self, params: Params) -> Params:
    """What `head` reads, whole over `fsdp`; see `sharding.on_shard`.

    Args:
      params: The tree of `init` or of `unstack`.
    """
    name = 'embedding' if self.config.tied_embeddings else 'head'
    return self._gathered({name: params[name]}, self.config.compute_dtype)

  def _layer(self, kind, params, x, inputs, turns, attention, cache, counted):
    """One layer of a kind, with these parameters."""
    block = nnx.merge(self._blocks[kind], params)
    x, cache, routed = block(
      x, turns.get(kind), attention, cache, counted, inputs
    )
    return sharding.constrain_rows(x), cache, routed

  def _unrolled(self, params, x, inputs, turns, attention, caches, counted):
    """All layers one after another, each with the cache that it reads."""
    routed_layers, sources = [], self.config.sources
    if self.config.shared_windows:
      attention = _sharing(attention, {})
      # A layer that shares has no cache, whatever others have.
      caches = [() if cache is None else cache for cache in caches]
    caches = list(caches)
    for number, (kind, layer, source) in enumerate(
      zip(self.config.kinds, params['layers'], sources, strict=True)
    ):
      own = None if inputs is None else inputs[number]
      x, caches[source], routed = self._layer(
        kind, layer, x, own, turns, attention, caches[source], counted
      )
      routed_layers.append(routed)
    return x, caches, _stack(routed_layers)

  def _scanned(self, params, x, inputs, turns, attention, counted):
    """All layers: a scan over the repetitions of each stack, then its tail."""
    remat, windows = self.config.remat, self.config.shared_windows

    def run(kinds, x, kept, layers, inputs):
      routed_layers = []
      if remat == 'offload':
        x = checkpoint_name(x, _INPUT)
      # Under 'none' each part of a layer gathers what it reads.
      if remat != 'none':
        layers = self._gathered(layers, self.config.compute_dtype)
      attend, new = attention, dict(zip(windows, kept, strict=True))
      if windows:
        attend = _sharing(attention, new)
      for place, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        own = None if inputs is None else inputs[place]
        x, _, routed = self._layer(
          kind, layer, x, own, turns, attend, None, counted
        )
        routed_layers.append(routed)
      kept = [new[window] for window in windows]
      return (x, kept), _stack(routed_layers)

    if remat != 'none':
      run = jax.checkpoint(run, static_argnums=0, policy=_KEPT[remat])
    kept, routed_layers = self._nothing_kept(x), []
    blocks, tail = params['blocks'], params.get('tail', [])
    for stack in self.config.stacks:
      of_stack, blocks = _cut(blocks, len(stack.pattern))
      own, inputs = _cut(inputs, stack.repeats * len(stack.pattern))
      x, kept, routed = self._stack_scanned(stack, run, x, kept, of_stack, own)
      of_stack, tail = _cut(tail, len(stack.tail))
      own, inputs = _cut(inputs, len(stack.tail))
      (x, kept), last = run(stack.tail, x, kept, of_stack, own)
      routed_layers += [part for part in (routed, last) if part is not None]
    if not routed_layers:
      return x, None
    return x, jax.tree.map(lambda *x: jnp.concatenate(x), *routed_layers)

  def _stack_scanned(self, stack, run, x, kept, layers, inputs):
    """The whole repetitions of a stack; see `_scanned`."""
    if inputs is not None:
      shape = stack.repeats, len(stack.pattern), *inputs.shape[1:]
      inputs = inputs.reshape(shape)
    # What the layers of a stack share stays the same, so no scan carries it.
    shares = stack.pattern[0].shares_kv

    def one(carry, given):
      x, carried = carry
      (x, new), routed = run(
        stack.pattern, x, kept if shares else carried, *given
      )
      return (x, [] if shares else new), routed

    carry = x, [] if shares else kept
    (x, carried), routed = lax.scan(
      one, carry, (layers, inputs), unroll=self.config.unroll
    )
    routed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)
    return x, kept if shares else carried, routed

  def _nothing_kept(self, x):
    """Keys and values of each window that layers share, before the first."""
    found = []
    for window in self.config.shared_windows:
      kinds = (k for k in self.config.kinds if k.window_tokens == window)
      sizes = self.config.of(next(kinds))
      shape = *x.shape[:2], sizes.num_kv_heads, sizes.head_dim
      found.append((jnp.zeros(shape, sizes.compute_dtype),) * 2)
    return found

  def head(self, params: Params, hidden: Array) -> Array:
    """Logits over the vocabulary.

    Args:
      params: The tree of `init` or of `unstack`.
      hidden: f[..., width], as `hidden` returns it.

    Returns:
      f32[..., V]; of ids that no token has, `scores.UNUSED_LOGIT`.
    """
    # Factors in the compute dtype, sums in float32: the softmax needs them.
    weight = params.get('head')  # absent if tied
    weight = params['embedding'].T if weight is None else weight
    logits = jnp.matmul(
      hidden.reshape(-1, hidden.shape[-1]),
      weight.astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    if self.config.logit_divisor != 1:
      logits = logits / self.config.logit_divisor
    if self.config.logit_cap is not None:
      logits = self.config.logit_cap * jnp.tanh(logits / self.config.logit_cap)
    logits = scores.without_ids(logits, self.config.unused_ids)
    return logits.reshape(*hidden.shape[:-1], -1)

  def logical_axes(
    self, path: tuple[str, ...], rank: int
  ) -> tuple[str | None, ...]:
    """The names of a parameter's axes, for `sharding.param_shardings`.

    Args:
      path: Where the parameter is in the tree of `init`.
      rank: Its number of axes.

    Returns:
      A name or None for each axis. The axis over which layers are stacked has
      no name.
    """
    names = axes.names(path)
    return (None,) * (rank - len(names)) + names

  def matrix_axes(self, path: tuple[str, ...], rank: int) -> MatrixAxes:
    """Which axes of a parameter are inputs, and which are outputs.

    Args:
      path: Where the parameter is in the tree of `init`.
      rank: Its number of axes; not read, because axes count from the last.
    """
    del rank
    return axes.matrix(path)

  def decays(self, path: tuple[str, ...]) -> bool:
    """Whether weight decay acts on a parameter: on matrices alone.

    Args:
      path: Where the parameter is in the tree of `init`.

    Returns:
      False for scales of norms, for biases, and for parts of quantized weights.
    """
    if path[-1] in axes.QUANTIZED:
      return False
    return bool(axes.names(path)) and not axes.is_vector(path[-1])

  def unstack(self, params: Params) -> Params:
    """The same parameters with single layers, for decoding.

    Args:
      params: The tree of `init`.

    Returns:
      A tree with `layers`, a list in the order of the layers, in the place of
      `blocks`.
    """
    layers = {
      number: jax.tree.map(lambda x, i=i: x[i], stacked)
      for (_, numbers), stacked in zip(
        self.config.blocks, params['blocks'], strict=True
      )
      for i, number in enumerate(numbers)
    }
    for (_, number), layer in zip(
      self.config.tail, params.get('tail', []), strict=True
    ):
      layers[number] = layer
    rest = {k: x for k, x in params.items() if k not in ('blocks', 'tail')}
    return {**rest, 'layers': [layers[number] for number in sorted(layers)]}
