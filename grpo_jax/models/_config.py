"""What a decoder-only transformer is made of, as one frozen value."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """What may differ between the layers of one model.

  Attributes:
    window_tokens: A token sees itself and the `window_tokens - 1` before it;
      None sees everything before it.
  """

  window_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a `Transformer`.

  Attributes:
    vocab_size: Rows of the embedding, `V`.
    num_layers: A multiple of `len(pattern)`.
    width: Size of the residual stream.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; divides `num_heads`.
    head_dim: Size of one head, even.
    mlp_width: Hidden size of the SwiGLU.
    rope_base: Base of the rotary frequencies.
    norm_epsilon: Added to the mean square in RMSNorm.
    qk_norm: RMSNorm on each query and key head before the rotation.
    qkv_bias: Biases on query, key and value projections.
    tied_embeddings: The output layer is the transposed embedding.
    pattern: The repeating block of layer kinds; parameters are stacked over its
      repetitions.
    compute_dtype: `'float32'` or `'bfloat16'`; parameters stay float32.
    remat: Recompute each layer in the backward pass.
    unroll: Layers compiled one by one instead of scanned: slower to compile,
      sometimes faster.
    attention: Of rows that are scored; unless it is `'xla'`, decoding on an
      accelerator has a kernel too. `'xla'`, `'splash'`, `'cudnn'`, or
      `'auto'`; see `attention.over_layout`.
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
      f'num_layers={self.num_layers} is not a multiple of the pattern of '
      f'{len(self.pattern)} layer kinds; change one of the two',
    )
    _require(
      self.num_heads % self.num_kv_heads == 0,
      f'num_heads={self.num_heads} is not a multiple of '
      f'num_kv_heads={self.num_kv_heads}; change one of the two',
    )
    _require(
      self.head_dim % 2 == 0,
      f'head_dim={self.head_dim} is odd, and rotary positions pair its '
      'entries; give an even one',
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
      f"attention='cudnn' comes with compute_dtype={self.compute_dtype!r}, and "
      "cuDNN's wants 'bfloat16'; change one of the two, or give 'auto'",
    )

  @property
  def repeats(self) -> int:
    """How often the pattern repeats: the length of the stacked axis."""
    return self.num_layers // len(self.pattern)


def _require(ok: bool, problem: str):
  if not ok:
    raise ValueError(f'In the model config, {problem}.')
