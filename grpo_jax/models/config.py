"""The shape of a decoder-only transformer as one frozen value, and its cost."""

from collections.abc import Sequence
import dataclasses
import fnmatch
import math
from typing import ClassVar
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

REMAT = ('none', 'layer', 'attention', 'offload')
"""What the backward pass finds of a layer, by the name of a policy.

Kept are: its matrix products and what attention needs; its input; its input,
and output and log-sum-exp of attention; its input, in the host's memory. Layers
that make up one repetition of `ModelConfig.pattern` have one input.
"""


CHUNK_TOKENS = 64
"""How many tokens the gated delta rule takes at once; see `delta.recur`."""

# What `LayerKind` and `ModelConfig` both have: that of the kind counts.
_SIZES = 'head_dim', 'num_kv_heads', 'mlp_width', 'attention_scale'


# Above the classes, because a default below calls it while the file is read.
def _require(ok: bool, problem: str):
  if not ok:
    raise ValueError(f'In the model config, {problem}.')


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are changed to reach beyond the trained context.

  Attributes:
    kind: `'linear'` divides every frequency by `factor`. `'llama3'` divides the
      low ones, keeps the high ones, and blends those between. `'yarn'` does
      so by the number of turns over the trained context, and scales queries and
      keys. See `layers.frequencies`.
    factor: By how much the context grows.
    original_tokens: The context that the model was trained on, tokens;
      `'llama3'` and `'yarn'`.
    low_factor: `'llama3'`: a frequency that makes fewer turns than this over
      the trained context is divided.
    high_factor: `'llama3'`: one that makes more turns than this is kept.
    beta_slow: `'yarn'`: as `low_factor`.
    beta_fast: `'yarn'`: as `high_factor`.
    attention_factor: `'yarn'`: what queries and keys are multiplied by; None:
      0.1 ln(factor) + 1.
    truncate: `'yarn'`: whether the ends of the blend are whole indices.
    query_growth: `b`: queries at position p are multiplied by
      1 + b ln(1 + floor(p / original_tokens)), as Llama 4 and Ministral 3 do.
  """

  kind: str
  factor: float
  original_tokens: int = 0
  low_factor: float = 1.0
  high_factor: float = 4.0
  beta_slow: float = 1.0
  beta_fast: float = 32.0
  attention_factor: float | None = None
  truncate: bool = True
  query_growth: float = 0.0

  def __post_init__(self):
    _require(
      self.kind in ('linear', 'llama3', 'yarn'),
      f"RopeScaling(kind={self.kind!r}) is none of 'linear', 'llama3' and "
      "'yarn'; give one of them",
    )
    _require(
      self.factor > 0, f'RopeScaling has factor={self.factor}; give more than 0'
    )
    _require(
      self.kind == 'linear'
      and not self.query_growth
      or self.original_tokens > 0,
      f'RopeScaling(kind={self.kind!r}) needs original_tokens, the context '
      'that the model was trained on; give 1 or more',
    )


@dataclasses.dataclass(frozen=True)
class Experts:
  """A mixture of experts in the place of a layer's MLP.

  Attributes:
    number: How many experts a layer has, `E`.
    per_token: How many of them compute each token, `k`.
    width: Number of hidden units of one expert.
    normalized: Whether the k weights of a token sum to 1, before `scale`.
    scores: What the router makes of its logits, the weights of the experts:
      `'softmax'`, or `'sigmoid'` of each by itself.
    corrected: Whether a number is added to the score of each expert for the
      choice alone. It gets no gradient.
    groups: Into how many equal groups experts fall, from which they are chosen;
      a group's score is the sum of its two largest.
    groups_per_token: From how many of the groups a token has its experts.
    scale: Factor of the weights.
    shared_width: Number of hidden units of an MLP beside the experts, which
      every token passes; 0: there is none.
    shared_gate: Whether its output is multiplied by the sigmoid of a product of
      the token and a vector.
    beside_mlp: Whether the layer keeps its MLP, as in Gemma 4: each of the two
      reads the residual stream through a norm of its own, and has one behind
      it. The router has a third one, and each expert a factor of its weights.
    biases: Whether the router and the three products of experts have biases.
  """

  number: int
  per_token: int
  width: int
  normalized: bool = True
  scores: str = 'softmax'
  corrected: bool = False
  groups: int = 1
  groups_per_token: int = 1
  scale: float = 1.0
  shared_width: int = 0
  shared_gate: bool = False
  beside_mlp: bool = False
  biases: bool = False

  def __post_init__(self):
    _require(
      0 < self.per_token <= self.number,
      f'Experts has per_token={self.per_token} and number={self.number}; give '
      'at least 1 and at most the number of experts',
    )
    _require(
      self.scores in ('softmax', 'sigmoid'),
      f"Experts has scores={self.scores!r}, which is neither 'softmax' nor "
      "'sigmoid'; give one of them",
    )
    size, rest = divmod(self.number, max(self.groups, 1))
    _require(
      not rest and 0 < self.groups_per_token <= self.groups,
      f'Experts has groups={self.groups} and groups_per_token='
      f'{self.groups_per_token} for number={self.number}; give a number of '
      'groups that divides that of experts, and at most as many for a token',
    )
    _require(
      self.groups == 1
      or size > 1
      and self.per_token <= size * self.groups_per_token,
      f'Experts has per_token={self.per_token}, groups_per_token='
      f'{self.groups_per_token} and groups of {size}; give groups of 2 or '
      'more, and as many of them as have experts enough',
    )
    _require(
      self.shared_width > 0 or not self.shared_gate,
      'Experts has shared_gate=True and shared_width=0; give the width of what '
      'the gate is for, or no gate',
    )


@dataclasses.dataclass(frozen=True)
class LowRank:
  """Low-rank adapters; see `lora`.

  Attributes:
    rank: Columns of A and rows of B, `r`.
    alpha: The product of A and B is multiplied by `alpha / rank`.
    targets: Patterns of the weights that get an adapter, with `*` for any
      text, among `LowRank.NAMES`.
    quantized: How the weights of `LowRank.NAMES` are kept, `'int8'` or `'nf4'`;
      None: as floating-point numbers.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = ('*',)
  quantized: str | None = None

  NAMES: ClassVar[tuple[str, ...]] = (
    'attention/query',
    'attention/key',
    'attention/value',
    'attention/output',
    'mlp/gate',
    'mlp/up',
    'mlp/down',
    'attention/head_gate',
    'convolution/before',
    'convolution/behind',
    'convolution/inward',
    'convolution/outward',
    'delta/query',
    'delta/key',
    'delta/value',
    'delta/head_gate',
    'delta/rate',
    'delta/decay',
    'delta/output',
  )
  QUANTIZED: ClassVar[tuple[str, ...]] = 'int8', 'nf4'

  def __post_init__(self):
    _require(self.rank > 0, f'LowRank has rank={self.rank}; give 1 or more')
    _require(
      self.quantized is None or self.quantized in self.QUANTIZED,
      f'LowRank has quantized={self.quantized!r}; give one of '
      f'{", ".join(self.QUANTIZED)}, or None',
    )
    for target in self.targets:
      _require(
        any(fnmatch.fnmatchcase(name, target) for name in self.NAMES),
        f'the LoRA target {target!r} matches none of {", ".join(self.NAMES)}; '
        "correct it, or give '*' for all of them",
      )

  @property
  def scale(self) -> float:
    """What the product of A and B is multiplied by."""
    return self.alpha / self.rank

  def adapts(self, name: str) -> bool:
    """Whether a weight of `NAMES` gets an adapter."""
    return any(fnmatch.fnmatchcase(name, target) for target in self.targets)


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
  """The heads of layers that keep a state by the gated delta rule.

  Attributes:
    num_heads: Number of query heads, and of key heads, `K`.
    num_value_heads: Number of value heads, `H`, a multiple of `num_heads`; each
      has a state, and value head h reads key head h // (H / K).
    key_dim: Size of a query and of a key, `D`.
    value_dim: Size of a value, `E`.
  """

  num_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int

  def __post_init__(self):
    _require(
      min(self.num_heads, self.key_dim, self.value_dim) > 0
      and self.num_value_heads > 0
      and self.num_value_heads % self.num_heads == 0,
      f'DeltaHeads has num_heads={self.num_heads}, num_value_heads='
      f'{self.num_value_heads}, key_dim={self.key_dim} and value_dim='
      f'{self.value_dim}; give 1 or more for each, and a multiple of the first '
      'for the second',
    )


MIXERS = 'attention', 'convolution', 'delta'
"""What a layer sees other tokens by; see `LayerKind.mixer`."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What may differ between the layers of one model.

  Attributes:
    window_tokens: How many tokens a token attends to: itself and the
      `window_tokens - 1` before it. None: itself and everything before it.
    rope_base: Base of the rotary frequencies; None: that of the model.
    rope_scaled: Whether the model's `rope_scaling` applies.
    experts: Whether the model's `experts` take the place of the MLP.
    rotated: Which share of a head is rotated, its first entries; 0: the layer
      does not see positions.
    proportional: Whether pairs and frequencies are those of a head that is
      rotated as a whole; the share `rotated` of the pairs, the fast ones, is.
    head_dim: Size of one head; None, here and below: that of the model.
    num_kv_heads: Number of key and value heads.
    mlp_width: Number of hidden units in the gated MLP.
    attention_scale: Factor of the product of query and key.
    keys_as_values: Whether values have no weights of their own: they are what
      becomes of keys before norm and rotation.
    shares_kv: Whether the layer has neither keys nor values of its own, and
      reads those of the last layer with the same window that has some. Such
      layers come last.
    mixer: What the layer sees other tokens by: `'attention'`; or a state that
      does not grow, by a gated short `'convolution'` or the gated `'delta'`
      rule; see `layers`. All of these fields but `experts` and `mlp_width` are
      of attention.
  """

  window_tokens: int | None = None
  rope_base: float | None = None
  rope_scaled: bool = True
  experts: bool = False
  rotated: float = 1.0
  proportional: bool = False
  head_dim: int | None = None
  num_kv_heads: int | None = None
  mlp_width: int | None = None
  attention_scale: float | None = None
  keys_as_values: bool = False
  shares_kv: bool = False
  mixer: str = 'attention'

  def __post_init__(self):
    _require(
      self.mixer in MIXERS,
      f'a layer has mixer={self.mixer!r}; give one of {", ".join(MIXERS)}',
    )
    for field in dataclasses.fields(self):
      value, usual = getattr(self, field.name), field.default
      _require(
        self.mixer == 'attention'
        or field.name in ('mixer', 'experts', 'mlp_width')
        or value == usual,
        f'a layer with mixer={self.mixer!r} has {field.name}={value}, which '
        f'is of attention; leave it at {usual}',
      )
    _require(
      0 <= self.rotated <= 1,
      f'a layer has rotated={self.rotated}; give a share from 0 to 1',
    )
    _require(
      self.window_tokens is None or self.window_tokens > 0,
      f'a layer has window_tokens={self.window_tokens}; give 1 or more, or '
      'None for a layer without a window',
    )
    _require(
      not (self.keys_as_values and self.shares_kv),
      'a layer has keys_as_values=True and shares_kv=True, but one that shares '
      'has no keys; give one of the two',
    )

  @property
  def kv_weights(self) -> int:
    """How many of keys and values have weights."""
    return 0 if self.shares_kv else 2 - self.keys_as_values


class Stack(NamedTuple):
  """Layers that repeat a pattern; their parameters are stacked.

  Attributes:
    first: The number of the first layer.
    pattern: The kinds of its first layers.
    number: How many layers there are.
  """

  first: int
  pattern: tuple[LayerKind, ...]
  number: int

  @property
  def repeats(self) -> int:
    """How often the whole pattern repeats: the length of the stacked axis."""
    return self.number // len(self.pattern)

  @property
  def tail(self) -> tuple[LayerKind, ...]:
    """The kinds of the layers behind the last whole repetition."""
    return self.pattern[: self.number % len(self.pattern)]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
  """The shortest pattern whose repetitions begin with these kinds.

  Args:
    kinds: The kind of each layer.

  Returns:
    The first layers; the last repetition may be cut short.

  >>> wide, local = LayerKind(), LayerKind(window_tokens=4)
  >>> len(shortest_pattern([local, local, wide, local, local, wide, local]))
  3
  """
  for length in range(1, len(kinds)):
    if all(a == b for a, b in zip(kinds, kinds[length:])):
      return tuple(kinds[:length])
  return tuple(kinds)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a `Transformer`, and how it is computed.

  Attributes:
    vocab_size: Rows of the embedding, `V`; at least the number of token ids.
    num_layers: Number of layers.
    width: Size of the residual stream.
    num_heads: Number of query heads.
    num_kv_heads: Number of key and value heads; it divides `num_heads`.
    head_dim: Size of one head, an even number.
    mlp_width: Number of hidden units in the gated MLP.
    rope_base: Base of the rotary frequencies.
    norm_epsilon: Added to the mean square in each RMSNorm.
    qk_norm: Whether each query and key head passes an RMSNorm before the
      rotation.
    qk_norm_joint: Whether that norm is one over all heads together.
    value_norm: Whether each value head passes an RMSNorm without a scale.
    qkv_bias: Whether the projections to queries, keys and values have biases.
    output_bias: Whether that back from the heads has one.
    sinks: Whether each query head has a number that stands beside the scores in
      the softmax, as that of a key whose value is 0.
    head_gates: Whether the output of each head of attention is multiplied by
      the sigmoid of a product of its own, entry by entry.
    tied_embeddings: Whether the output layer is the transposed embedding.
    pattern: The kinds of the first layers; all further layers repeat them in
      this order. Parameters are stacked over the repetitions. The last
      repetition may be cut short.
    compute_dtype: Dtype of activations, `'float32'` or `'bfloat16'`. Parameters
      that are trained stay float32.
    residual_dtype: Dtype of the residual stream, the sum to which the layers
      add: `'float32'`, or `'bfloat16'` if they compute in it. In bfloat16 it is
      rounded in every layer, which takes sampler and learner further apart, and
      the inputs of layers, all that `remat='layer'` keeps, are half as large.
    remat: What the backward pass computes again instead of keeping it:
      `'none'`, what is neither a product nor needed by attention; `'layer'`,
      each layer, from its input; `'attention'`, the same but for attention,
      unless it is cuDNN's; `'offload'`, as `'layer'`, with the inputs in the
      host's memory.
    unroll: Whether layers are compiled one by one instead of as one scan.
      Compiling takes longer, and running is sometimes faster.
    attention: Which implementation scores rows and reads prompts: `'xla'`,
      `'splash'` (TPU), `'cudnn'` (GPU) or `'auto'`; see
      `attention.over_layout`. With any but `'xla'`, decoding on an accelerator
      uses a kernel too.
    rope_scaling: Of the rotary frequencies; None: they are used as they are.
    activation: Of the MLP's gate: `'silu'`, `'gelu_tanh'` for GELU by its tanh
      approximation, or `'clamped_swiglu'` for that of gpt-oss; see
      `layers.GATES`.
    embedding_scale: Factor of the embedding before the first layer.
    pre_norms: Whether attention and MLP read the residual stream through a
      norm.
    post_norms: Whether the outputs of attention and MLP pass a norm of their
      own before they are added.
    residual_scale: Factor of these outputs as they are added.
    layer_scales: Whether each layer ends with a factor of the residual stream,
      a number that is stored, and not trained.
    layer_inputs: Number of entries that each layer gets of a token beside the
      residual stream, partly from a table that is not trained, as in Gemma 4;
      0: none.
    attention_scale: Factor of the product of query and key; None:
      `head_dim ** -0.5`.
    attention_cap: Scores s of attention become `cap * tanh(s / cap)`; None: as
      they are.
    logit_divisor: What logits are divided by.
    logit_cap: They become `cap * tanh(s / cap)`, as scores do.
    experts: The experts of layers whose kind has them; None if no kind has.
    delta: The heads of layers with the gated delta rule; None if no kind has.
    taps: How many tokens the convolution of a layer with a state reads, the
      present one included.
    lora: The adapters; None: every parameter is trained itself.
    unused_ids: Ids that no token of the tokenizer has, as runs (first, end):
      the policy never draws them. Both sampler and learner leave them out.
  """

  vocab_size: int
  num_layers: int = 3
  width: int = 128
  num_heads: int = 4
  num_kv_heads: int = 4
  head_dim: int = 32
  mlp_width: int = 256
  rope_base: float = 10_000.0
  norm_epsilon: float = 1e-6
  qk_norm: bool = False
  qk_norm_joint: bool = False
  value_norm: bool = False
  qkv_bias: bool = False
  output_bias: bool = False
  sinks: bool = False
  head_gates: bool = False
  tied_embeddings: bool = False
  pattern: tuple[LayerKind, ...] = (LayerKind(),)
  compute_dtype: str = 'float32'
  residual_dtype: str = 'float32'
  remat: str = 'none'
  unroll: bool = False
  attention: str = 'auto'
  rope_scaling: RopeScaling | None = None
  activation: str = 'silu'
  embedding_scale: float = 1.0
  pre_norms: bool = True
  post_norms: bool = False
  residual_scale: float = 1.0
  layer_scales: bool = False
  layer_inputs: int = 0
  attention_scale: float | None = None
  attention_cap: float | None = None
  logit_divisor: float = 1.0
  logit_cap: float | None = None
  experts: Experts | None = None
  delta: DeltaHeads | None = None
  taps: int = 0
  lora: LowRank | None = None
  unused_ids: tuple[tuple[int, int], ...] = ()

  def __post_init__(self):
    _require(
      0 < len(self.pattern) <= self.num_layers,
      f'pattern has {len(self.pattern)} layer kinds and num_layers='
      f'{self.num_layers}; give at least one kind and as many layers',
    )
    _require(
      self.activation in ('silu', 'gelu_tanh', 'clamped_swiglu'),
      f"activation={self.activation!r} is none of 'silu', 'gelu_tanh' and "
      "'clamped_swiglu'; give one of them",
    )
    _require(
      (self.experts is not None) == any(kind.experts for kind in self.pattern),
      'either experts are described and no layer kind has them, or a kind has '
      'experts that are not described; give both, or neither',
    )
    _require(
      self.experts is None or self.lora is None or not self.lora.quantized,
      f'the model has experts, and {self.lora and self.lora.quantized} (in a '
      "run, lora.base_dtype) is for matrices of layers without; give 'bfloat16'"
      ' instead',
    )
    for target in self.lora.targets if self.lora is not None else ():
      here = self._adaptable()
      _require(
        any(fnmatch.fnmatchcase(name, target) for name in here),
        f'the LoRA target {target!r} matches no weight of the model that can '
        f'have an adapter, which experts cannot; give a pattern of some of '
        f'{", ".join(here)}',
      )
    _require(
      self.qk_norm or not self.qk_norm_joint,
      'qk_norm_joint=True comes with qk_norm=False; give both, or neither',
    )
    for kind in self.pattern:
      self._check_heads(kind)
    self._check_sharing()
    self._check_mixers()
    self._check_implementation()
    _require(
      self.compute_dtype in ('float32', 'bfloat16'),
      f"compute_dtype={self.compute_dtype!r} is neither 'float32' nor "
      "'bfloat16'; give one of them",
    )
    _require(
      self.residual_dtype in ('float32', self.compute_dtype),
      f'residual_dtype={self.residual_dtype!r} comes with '
      f"compute_dtype={self.compute_dtype!r}; give 'float32', or 'bfloat16' in "
      'both',
    )
    _require(
      self.remat in REMAT,
      f'remat={self.remat!r} is none of {", ".join(REMAT)}; give one of them',
    )

  def _check_mixers(self) -> None:
    mixers = {kind.mixer for kind in self.pattern}
    _require(
      (self.delta is not None) == ('delta' in mixers),
      'either delta describes heads and no layer kind has them, or a kind has '
      'heads that are not described; give both, or neither',
    )
    _require(
      self.taps > 1 if mixers - {'attention'} else not self.taps,
      f'taps={self.taps} comes with layers of {", ".join(sorted(mixers))}; '
      'give 2 or more if there is another than attention, and else 0',
    )
    _require(
      'attention' in mixers,
      f'all layers are of {", ".join(sorted(mixers))}; give a pattern with a '
      'layer of attention, whose cache says how many tokens there are',
    )

  def _check_implementation(self) -> None:
    _require(
      self.attention in ('auto', 'xla', 'splash', 'cudnn'),
      f"attention={self.attention!r} is none of 'auto', 'xla', 'splash' and "
      "'cudnn'; give one of them",
    )
    _require(
      self.attention != 'cudnn' or self.attention_cap is None,
      f"attention='cudnn' comes with attention_cap={self.attention_cap}, which "
      "cuDNN's attention cannot compute; give attention='auto'",
    )
    _require(
      self.attention != 'cudnn' or not self.sinks,
      "attention='cudnn' comes with sinks=True, which cuDNN's attention cannot "
      "compute; give attention='auto'",
    )
    _require(
      self.attention != 'cudnn' or self.compute_dtype == 'bfloat16',
      f"attention='cudnn' comes with compute_dtype={self.compute_dtype!r}, but "
      "cuDNN's attention needs 'bfloat16'; change one of the two, or give "
      "attention='auto'",
    )

  def _adaptable(self) -> list[str]:
    """The weights of `LowRank.NAMES` that the model has; experts are none."""
    parts = {kind.mixer for kind in self.pattern}
    if any(map(self.has_mlp, self.pattern)):
      parts.add('mlp')
    gated = self.head_gates
    return [
      name
      for name in LowRank.NAMES
      if name.split('/')[0] in parts
      and (gated or name != 'attention/head_gate')
    ]

  def _check_heads(self, kind: LayerKind) -> None:
    heads = kind.num_kv_heads or self.num_kv_heads
    _require(
      self.num_heads % heads == 0,
      f'num_heads={self.num_heads} is not a multiple of '
      f'num_kv_heads={heads}; change one of the two',
    )
    size = kind.head_dim or self.head_dim
    _require(
      size * kind.rotated % 2 == 0,
      f'head_dim={size} comes with a layer that rotates the share '
      f'{kind.rotated:g} of a head, but rotary positions turn pairs of '
      'entries; give sizes that make an even number',
    )
    scaling = self.rope_scaling if kind.rope_scaled else None
    yarn = scaling is not None and scaling.kind == 'yarn'
    _require(
      not (yarn and 0 < kind.rotated < 1),
      f'a layer has rotated={kind.rotated}, and YaRN scales whole queries and '
      'keys; give a layer that is rotated as a whole, or not at all',
    )

  def _check_sharing(self) -> None:
    kinds, own = self.kinds, {}
    for number, kind in enumerate(kinds):
      if kind.mixer != 'attention':
        continue
      heads = (
        kind.num_kv_heads or self.num_kv_heads,
        kind.head_dim or self.head_dim,
      )
      if not kind.shares_kv:
        _require(
          not any(before.shares_kv for before in kinds[:number]),
          f'layer {number} has keys and values, and one before it shares those '
          'of others; give layers with shares_kv=True behind all others',
        )
        own[kind.window_tokens] = heads
      _require(
        own.get(kind.window_tokens) == heads,
        f'layer {number} shares keys and values of {heads[0]} heads of size '
        f'{heads[1]}, which no layer before it with window_tokens='
        f'{kind.window_tokens} has last; give one with these',
      )

  def of(self, kind: LayerKind) -> 'ModelConfig':
    """The same model, whose own sizes are those of its layers of a kind."""
    own = {name: getattr(kind, name) for name in _SIZES}
    own = {name: size for name, size in own.items() if size is not None}
    return dataclasses.replace(self, **own) if own else self

  def has_mlp(self, kind: LayerKind) -> bool:
    """Whether a layer has an MLP, without experts or beside them."""
    return not kind.experts or bool(self.experts and self.experts.beside_mlp)

  def hidden_units(self, kind: LayerKind) -> int:
    """Those of a layer's MLP, or of all experts that a token is given to."""
    units = (kind.mlp_width or self.mlp_width) * self.has_mlp(kind)
    if kind.experts and (experts := self.experts) is not None:
      units += experts.per_token * experts.width + experts.shared_width
    return units

  @property
  def shared_kv_heads(self) -> int:
    """What divides the number of key-value heads of every layer.

    Those of layers with a state are the key heads, or all channels.
    """
    numbers = {'convolution': self.width}
    if self.delta is not None:
      numbers['delta'] = self.delta.num_heads
    return math.gcd(
      *(
        numbers.get(kind.mixer) or self.of(kind).num_kv_heads
        for kind in self.pattern
      )
    )

  @property
  def has_states(self) -> bool:
    """Whether any layer keeps a state, and not keys and values."""
    return any(kind.mixer != 'attention' for kind in self.pattern)

  @property
  def kinds(self) -> tuple[LayerKind, ...]:
    """The kind of each layer, in their order."""
    whole = Stack(0, self.pattern, self.num_layers)
    return self.pattern * whole.repeats + whole.tail

  @property
  def stacks(self) -> tuple[Stack, ...]:
    """All layers: of one pattern; or those that share keys by themselves."""
    kinds = self.kinds
    own = sum(not kind.shares_kv for kind in kinds)
    if own == len(kinds):
      return (Stack(0, self.pattern, own),)
    parts = (0, kinds[:own]), (own, kinds[own:])
    return tuple(
      Stack(first, shortest_pattern(part), len(part)) for first, part in parts
    )

  @property
  def blocks(self) -> list[tuple[LayerKind, range]]:
    """Of each stacked layer its kind, and the numbers of its repetitions."""
    return [
      (kind, range(place, stack.first + period * stack.repeats, period))
      for stack in self.stacks
      for period in (len(stack.pattern),)
      for place, kind in enumerate(stack.pattern, stack.first)
    ]

  @property
  def tail(self) -> list[tuple[LayerKind, int]]:
    """Of each layer that is not stacked its kind, and its number."""
    return [
      (kind, number)
      for stack in self.stacks
      for number, kind in enumerate(
        stack.tail, stack.first + len(stack.pattern) * stack.repeats
      )
    ]

  @property
  def shared_windows(self) -> list[int | None]:
    """`window_tokens` of layers that share keys and values, each once."""
    shared = (kind.window_tokens for kind in self.kinds if kind.shares_kv)
    return list(dict.fromkeys(shared))

  @property
  def sources(self) -> list[int]:
    """Of each layer the number of that whose keys and values it reads."""
    found, last = [], {}
    for number, kind in enumerate(self.kinds):
      if kind.mixer == 'attention' and not kind.shares_kv:
        last[kind.window_tokens] = number
      found.append(last[kind.window_tokens] if kind.shares_kv else number)
    return found


def flops_per_token(
  config: ModelConfig, context: ArrayLike, with_head: bool = True
) -> np.ndarray:
  r"""Floating-point operations of a forward pass, for one token.

  .. math:: 2 N + 4 L H D \cdot \text{context}

  with N parameters in the matrices that a token is multiplied by, L layers and
  H heads of size D. N includes the output layer, but not the embedding, which
  is looked up; of experts it includes the router and the k that a token is
  given to. Norms, rotations and the softmax are not counted. A backward pass
  takes twice as many operations.

  Args:
    config: The shape of the model.
    context: How many tokens the token attends to, itself included; an array of
      any shape. A layer with a window sees no more than its window.
    with_head: Whether the logits are computed too.

  Returns:
    f64 of the shape of `context`.

  References:
    Chowdhery et al., `PaLM: Scaling Language Modeling with Pathways
    <https://arxiv.org/abs/2204.02311>`_, 2022, appendix B; it counts a backward
    pass too: 6 N + 12 L H D context.
  """
  total = np.zeros(np.shape(context), np.float64)
  if with_head:
    total += 2 * config.width * config.vocab_size
  for kind in config.kinds:
    total += 2 * _mixer_weights(config, kind)
    total += 2 * config.width * 3 * config.hidden_units(kind)
    if kind.experts and config.experts:
      total += 2 * config.width * config.experts.number  # the router
    if kind.mixer == 'attention':
      sizes, window = config.of(kind), kind.window_tokens or np.inf
      heads = sizes.num_heads * sizes.head_dim
      total += 4 * heads * np.minimum(context, window)
    elif kind.mixer == 'delta' and (delta := config.delta) is not None:
      # A state is multiplied by a key and a query, and gets a product.
      size = delta.key_dim * delta.value_dim
      total += 6 * delta.num_value_heads * size
  # The inputs of each layer are made of the embedding, gated, and projected.
  total += 6 * config.width * config.layer_inputs * config.num_layers
  return total


def _mixer_weights(config: ModelConfig, kind: LayerKind) -> int:
  """The numbers in the matrices of a layer's mixer."""
  if kind.mixer == 'convolution':
    return 4 * config.width**2
  if kind.mixer == 'delta' and (delta := config.delta) is not None:
    keys = delta.num_heads * delta.key_dim
    values = delta.num_value_heads * (3 * delta.value_dim + 2)
    return config.width * (2 * keys + values)
  sizes = config.of(kind)
  heads = sizes.num_heads * (2 + config.head_gates)
  heads += sizes.num_kv_heads * kind.kv_weights
  return config.width * sizes.head_dim * heads


def state_bytes(config: ModelConfig, kind: LayerKind) -> int:
  """What a layer with a state keeps of a row, bytes; 0 for attention."""
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  before = (config.taps - 1) * itemsize
  if kind.mixer == 'convolution':
    return before * config.width
  if kind.mixer != 'delta' or (delta := config.delta) is None:
    return 0
  keys = delta.num_heads * delta.key_dim
  values = delta.num_value_heads * delta.value_dim
  return before * (2 * keys + values) + 4 * delta.key_dim * values


def _mixer_numbers(
  config: ModelConfig, kind: LayerKind, lanes: int
) -> tuple[int, int]:
  """What a layer's mixer keeps of a token for its gradient.

  Returns:
    The numbers of heads or channels; and the bytes of output and log-sum-exp of
    attention, as accelerators' kernels keep them.
  """
  if kind.mixer == 'convolution':
    return 4 * config.width, 0
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  if kind.mixer == 'delta' and (delta := config.delta) is not None:
    keys = delta.num_heads * delta.key_dim
    values = delta.num_value_heads * delta.value_dim
    # As projected and as convolved, the gate and the output.
    return 4 * keys + 4 * values, values * itemsize
  sizes = config.of(kind)
  heads = sizes.num_heads + 2 * sizes.num_kv_heads * (not kind.shares_kv)
  filled = -(-sizes.head_dim // lanes) * lanes
  gates = sizes.num_heads * config.head_gates
  kept = sizes.num_heads * (filled * itemsize + 4)
  return (3 * heads + gates) * sizes.head_dim, kept


def bytes_per_token(
  config: ModelConfig, tensor: int = 1, lanes: int = 1
) -> int:
  """The activations that the layers keep for their gradients, bytes a token.

  Counted are the arrays that products and norms read: twice the residual stream
  in its dtype, four as wide as it, queries, keys and values three times (as
  projected, rotated, and their gradient), and four as wide as the MLP. Scores
  of attention are not kept. The logits are computed in chunks, and are not
  counted either.

  Args:
    config: The shape of the model. Its `remat` says what is kept of each layer;
      under all but `'none'`, all of one layer is there too. What is offloaded
      is not counted, but for two layers whose input is on its way.
    tensor: Over how many devices heads and hidden units are split, and the
      columns of the residual stream. What a layer's halves read is whole.
    lanes: To a multiple of which an array's last axis is filled up.

  Returns:
    Bytes per token, all layers together.
  """
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  stream = config.width * jnp.dtype(config.residual_dtype).itemsize // tensor
  read = 2 * config.width * itemsize * (tensor > 1)
  layers, attended = [], 0
  for kind in config.kinds:
    split, kept = _mixer_numbers(config, kind, lanes)
    split += 4 * config.hidden_units(kind) + 4 * config.width
    split += 2 * config.layer_inputs  # the gate, and what it lets through
    layers.append(2 * stream + split // tensor * itemsize + read)
    attended += kept // tensor
  told = config.num_layers * config.layer_inputs * itemsize // tensor
  return (
    told
    + {
      'none': sum(layers),
      'layer': config.num_layers * stream + max(layers),
      'attention': config.num_layers * stream + attended + max(layers),
      'offload': 2 * stream + max(layers),
    }[config.remat]
  )
