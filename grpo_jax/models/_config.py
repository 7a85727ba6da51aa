"""The shape of a decoder-only transformer, as one frozen value."""

import dataclasses


# Above the classes, because a default below calls it while the file is read.
def _require(ok: bool, problem: str):
  if not ok:
    raise ValueError(f'In the model config, {problem}.')


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What may differ between the layers of one model.

  Attributes:
    window_tokens: How many tokens a token attends to: itself and the
      `window_tokens - 1` before it. None: itself and everything before it.
  """

  window_tokens: int | None = None

  def __post_init__(self):
    _require(
      self.window_tokens is None or self.window_tokens > 0,
      f'a layer has window_tokens={self.window_tokens}; give 1 or more, or '
      'None for a layer without a window',
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a `Transformer`, and how it is computed.

  Attributes:
    vocab_size: Number of token ids, `V`: rows of the embedding.
    num_layers: Number of layers, a multiple of `len(pattern)`.
    width: Size of the residual stream.
    num_heads: Number of query heads.
    num_kv_heads: Number of key and value heads; it divides `num_heads`.
    head_dim: Size of one head, an even number.
    mlp_width: Number of hidden units in the SwiGLU.
    rope_base: Base of the rotary frequencies.
    norm_epsilon: Added to the mean square in each RMSNorm.
    qk_norm: Whether each query and key head passes an RMSNorm before the
      rotation.
    qkv_bias: Whether the projections to queries, keys and values have biases.
    tied_embeddings: Whether the output layer is the transposed embedding.
    pattern: The kinds of the first layers; all further layers repeat them in
      this order. Parameters are stacked over the repetitions.
    compute_dtype: Dtype of activations, `'float32'` or `'bfloat16'`. Parameters
      stay float32.
    remat: Whether the backward pass computes each layer again instead of
      keeping its activations.
    unroll: Whether layers are compiled one by one instead of as one scan.
      Compiling takes longer, and running is sometimes faster.
    attention: Which implementation scores rows: `'xla'`, `'splash'` (TPU),
      `'cudnn'` (GPU) or `'auto'`; see `attention.over_layout`. With any but
      `'xla'`, decoding on an accelerator uses a kernel too.
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
  qkv_bias: bool = False
  tied_embeddings: bool = False
  pattern: tuple[LayerKind, ...] = (LayerKind(),)
  compute_dtype: str = 'float32'
  remat: bool = False
  unroll: bool = False
  attention: str = 'auto'

  def __post_init__(self):
    _require(
      self.num_layers % len(self.pattern) == 0,
      f'num_layers={self.num_layers} is not a multiple of the '
      f'{len(self.pattern)} layer kinds in pattern; change one of the two',
    )
    _require(
      self.num_heads % self.num_kv_heads == 0,
      f'num_heads={self.num_heads} is not a multiple of '
      f'num_kv_heads={self.num_kv_heads}; change one of the two',
    )
    _require(
      self.head_dim % 2 == 0,
      f'head_dim={self.head_dim} is odd, but rotary positions turn pairs of '
      'entries; give an even number',
    )
    _require(
      self.compute_dtype in ('float32', 'bfloat16'),
      f"compute_dtype={self.compute_dtype!r} is neither 'float32' nor "
      "'bfloat16'; give one of them",
    )
    _require(
      self.attention in ('auto', 'xla', 'splash', 'cudnn'),
      f"attention={self.attention!r} is none of 'auto', 'xla', 'splash' and "
      "'cudnn'; give one of them",
    )
    _require(
      self.attention != 'cudnn' or self.compute_dtype == 'bfloat16',
      f"attention='cudnn' comes with compute_dtype={self.compute_dtype!r}, but "
      "cuDNN's attention needs 'bfloat16'; change one of the two, or give "
      "attention='auto'",
    )

  @property
  def repeats(self) -> int:
    """How often the pattern repeats: the length of the stacked axis."""
    return self.num_layers // len(self.pattern)
