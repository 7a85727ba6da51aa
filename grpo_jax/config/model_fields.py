"""The fields of a config that say what the model is.

As in `fields.py`, the comment above a field is its help text.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
  """The transformer. The tokenizer says how many token ids it has."""

  # Where the weights, the shape and the tokenizer come from: a Hugging Face
  # folder, a .gguf file, 'package:NAME' for the .gguf file in an installed
  # package, or the workdir of another run. '': random weights of the shape
  # below. 'module:function' names a function that returns a model of your own;
  # see grpo_jax/models/README.md.
  path: str = ''
  # Number of layers.
  num_layers: int = 3
  # Size of the residual stream.
  width: int = 128
  # Number of query heads.
  num_heads: int = 4
  # Number of key and value heads; divides num_heads.
  num_kv_heads: int = 4
  # Size of one head, an even number.
  head_dim: int = 32
  # Number of hidden units in the SwiGLU of each layer.
  mlp_width: int = 256
  # Base of the rotary frequencies.
  rope_base: float = 10_000.0
  # Added to the mean square in every RMSNorm.
  norm_epsilon: float = 1e-6
  # Whether query and key heads pass an RMSNorm.
  qk_norm: bool = False
  # Whether queries, keys and values have biases.
  qkv_bias: bool = False
  # Output layer = transposed embedding.
  tied_embeddings: bool = False
  # Sliding windows: how many tokens a layer attends to, the token itself and
  # those just before it. One number per layer, repeated over all layers, as
  # in (1024, 1024, 0). 0: no window.
  window_tokens: tuple[int, ...] = (0,)
  # Dtype of activations, 'float32' or 'bfloat16', which accelerators compute
  # faster. Parameters stay float32.
  compute_dtype: str = 'float32'
  # Dtype of the sum to which the layers add: 'float32', or 'bfloat16' if they
  # compute in it. Then sampler and learner differ by a third more, and the
  # inputs of layers take half the memory.
  residual_dtype: str = 'float32'
  # What the backward pass computes again instead of keeping it, for less memory
  # and more time. 'none': little of a layer. 'layer': all of it, from its
  # input. 'attention': as 'layer', but for attention, whose output is kept too
  # (that of cuDNN is computed again). 'offload': as 'layer', and the inputs lie
  # in the memory of the host until they are needed. True stands for 'layer',
  # and False for 'none'.
  remat: str = dataclasses.field(
    default='none', metadata={'of_bool': ('none', 'layer')}
  )
  # Whether layers are compiled one by one instead of as a loop. Compiling
  # takes longer; running is faster for a few layers.
  unroll: bool = False
  # Code that computes attention in training and over prompts: 'xla' on any
  # device, 'splash' on TPUs, 'cudnn' on GPUs with bfloat16. 'auto' takes the
  # one for the device.
  attention: str = 'auto'
  # Whether prompt and completion may together have more tokens than the model
  # of `path` was made for: max_position_embeddings in its config.json, or what
  # its YaRN scaling reaches. Such a run is refused otherwise, because the
  # model gets worse there without a sign.
  beyond_context: bool = False


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: the weights of the model stay as they are."""

  # Rank of the adapters; 0 trains the weights themselves.
  rank: int = 0
  # The adapters' product is multiplied by alpha / rank.
  alpha: float = 32.0
  # Which weights get an adapter, as patterns: attention/query, attention/key,
  # attention/value, attention/output, mlp/gate, mlp/up, mlp/down. Experts get
  # none.
  targets: tuple[str, ...] = ('*',)
  # Dtype of the weights beside the adapters: 'float32', or 'bfloat16' for half
  # the memory, to which weights of more digits are rounded.
  base_dtype: str = 'float32'
