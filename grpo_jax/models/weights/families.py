"""The families of models that come in and go out: one row of a table each.

A row says what the `config.json` of a family may hold and what it means, and
under which names its tensors are stored. Nothing else in this package asks
which family it has before it.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.models.weights import tensors as tensors_lib

Fields = Mapping[str, Any]


def _no_windows(fields: Fields) -> list[bool]:
  return [False] * fields['num_hidden_layers']


def _all_windows(fields: Fields) -> list[bool]:
  window = fields['sliding_window'] is not None
  return [window] * fields['num_hidden_layers']


def _if_used(fields: Fields) -> list[bool]:
  return [fields['use_sliding_window']] * fields['num_hidden_layers']


def _later_windows(fields: Fields) -> list[bool]:
  first, used = fields['max_window_layers'], fields['use_sliding_window']
  return [used and i >= first for i in range(fields['num_hidden_layers'])]


def _every_other(fields: Fields) -> list[bool]:
  return [i % 2 == 0 for i in range(fields['num_hidden_layers'])]


def _all_but_every_nth(fields: Fields) -> list[bool]:
  period = fields['sliding_window_pattern']
  return [(i + 1) % period > 0 for i in range(fields['num_hidden_layers'])]


@dataclasses.dataclass(frozen=True)
class Family:
  """What one architecture of Hugging Face's means to us.

  Attributes:
    architecture: As `config.json` names it.
    model_type: As `config.json` names it.
    defaults: The fields that are read, with the values that a `config.json` may
      leave out; transformers means the same by leaving them out.
    renamed: Other names under which a field may be given.
    fixed: Fields that only this value of can be computed, with the reason.
    windows: Which layers have a window, where `layer_types` does not say.
    layer_types: Whether the field `layer_types` is read at all.
    features: Fields of our `ModelConfig` that all models of the family share.
    scaled_embedding: Whether embeddings are multiplied by sqrt(width).
    rope_bases: Base of the rotary frequencies where none is given: of layers
      without a window, and of those with one, None if that is the same.
    tensors: See `tensors`.
    inside: The field of `config.json` that holds all others, if one does.
    written_as: The architecture that is written for such a model, if another.
    prefixes: Pairs of a prefix of stored names and what it stands for.
    left_out: Prefixes of stored names that are no part of the language model.
    modules: Pairs of a prefix in `tensors` and that of the same modules in the
      class of this architecture, where it differs. Files may have other names,
      which transformers changes when it reads them.
  """

  architecture: str
  model_type: str
  defaults: Fields
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Fields = dataclasses.field(default_factory=dict)
  windows: Callable[[Fields], list[bool]] = _no_windows
  layer_types: bool = False
  features: Fields = dataclasses.field(default_factory=dict)
  scaled_embedding: bool = False
  rope_bases: tuple[float, float | None] = (10_000.0, None)
  tensors: tensors_lib.Tensors = dataclasses.field(
    default_factory=tensors_lib.hugging_face
  )
  inside: str | None = None
  written_as: str | None = None
  prefixes: tuple[tuple[str, str], ...] = ()
  left_out: tuple[str, ...] = ()
  modules: tuple[tuple[str, str], ...] = ()

  def module(self, name: str) -> str:
    """What the class of this architecture calls the module of a weight.

    Args:
      name: Of the weight in `tensors`, as 'model.layers.0.mlp.up_proj.weight'.
    """
    name = name.removesuffix('.weight')
    for prefix, theirs in self.modules:
      if name.startswith(prefix):
        return theirs + name.removeprefix(prefix)
    return name


REQUIRED = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
)
"""Fields that must be given, unless a family has defaults for them."""

OF_ALL = (
  'layer_types',
  'rope_parameters',
  'rope_scaling',
  'rope_theta',
  'rope_local_base_freq',
  'original_max_position_embeddings',
)
"""Fields that are read for every family, and for which none has defaults."""

# What every family reads beside them. None means what it means in Hugging
# Face's: as many key-value heads as heads, and width / heads entries in each.
_COMMON = dict(
  num_key_value_heads=None,
  head_dim=None,
  rms_norm_eps=1e-6,
  tie_word_embeddings=False,
  max_position_embeddings=None,
)
_LLAMA = dict(_COMMON, hidden_act='silu')
_QWEN = dict(
  _LLAMA,
  use_sliding_window=False,
  sliding_window=4096,
  max_window_layers=28,
)
_GEMMA = dict(
  _COMMON,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=256,
  hidden_activation='gelu_pytorch_tanh',
  query_pre_attn_scalar=256,
  tie_word_embeddings=True,
  sliding_window=4096,
)

_NO_OUTPUT_BIAS = 'attention with a bias of its output is not computed here'
_ATTENTION_BIAS = dict(attention_bias=(False, _NO_OUTPUT_BIAS))
_BOTH_WAYS = dict(
  use_bidirectional_attention=(
    False,
    'attention that looks ahead is not computed here',
  )
)
_GEMMA_TENSORS = tensors_lib.hugging_face(added=1.0, post_norms=True)

_GEMMA3 = Family(
  'Gemma3ForCausalLM',
  'gemma3_text',
  dict(
    _GEMMA,
    vocab_size=262_208,
    final_logit_softcapping=None,
    sliding_window_pattern=6,
  ),
  fixed=dict(
    **_ATTENTION_BIAS,
    **_BOTH_WAYS,
    attn_logit_softcapping=(
      None,
      'transformers leaves it out in Gemma 3, so it is unclear what is meant',
    ),
  ),
  windows=_all_but_every_nth,
  layer_types=True,
  features=dict(qk_norm=True, post_norms=True),
  scaled_embedding=True,
  rope_bases=(1_000_000.0, 10_000.0),
  tensors=_GEMMA_TENSORS,
)

FAMILIES = (
  Family(
    'LlamaForCausalLM',
    'llama',
    _LLAMA,
    fixed=dict(
      **_ATTENTION_BIAS,
      mlp_bias=(False, 'an MLP with biases is not computed here'),
    ),
  ),
  Family(
    'MistralForCausalLM',
    'mistral',
    dict(_LLAMA, num_key_value_heads=8, sliding_window=4096),
    windows=_all_windows,
  ),
  Family(
    'Qwen2ForCausalLM',
    'qwen2',
    _QWEN,
    windows=_later_windows,
    layer_types=True,
    features=dict(qkv_bias=True),
  ),
  Family(
    'Qwen3ForCausalLM',
    'qwen3',
    dict(_QWEN, head_dim=128),
    fixed=_ATTENTION_BIAS,
    windows=_later_windows,
    layer_types=True,
    features=dict(qk_norm=True),
  ),
  Family(
    'Qwen3MoeForCausalLM',
    'qwen3_moe',
    dict(
      _LLAMA,
      num_key_value_heads=4,
      use_sliding_window=False,
      sliding_window=4096,
      num_experts=128,
      num_experts_per_tok=8,
      moe_intermediate_size=768,
      norm_topk_prob=False,
      decoder_sparse_step=1,
      mlp_only_layers=(),
    ),
    renamed=dict(num_local_experts='num_experts'),  # since transformers 5
    fixed=dict(
      **_ATTENTION_BIAS,
      shared_expert_intermediate_size=(
        None,
        'experts that every token passes are not computed here',
      ),
    ),
    windows=_if_used,
    features=dict(qk_norm=True),
  ),
  Family(
    'Gemma2ForCausalLM',
    'gemma2',
    dict(
      _GEMMA,
      vocab_size=256_000,
      final_logit_softcapping=30.0,
      attn_logit_softcapping=50.0,
    ),
    fixed=dict(**_ATTENTION_BIAS, **_BOTH_WAYS),
    windows=_every_other,
    layer_types=True,
    features=dict(post_norms=True),
    scaled_embedding=True,
    tensors=_GEMMA_TENSORS,
  ),
  _GEMMA3,
  # Text with images. We read the language model in it, and write what we have
  # read as a language model alone.
  dataclasses.replace(
    _GEMMA3,
    architecture='Gemma3ForConditionalGeneration',
    model_type='gemma3',
    inside='text_config',
    written_as='Gemma3ForCausalLM',
    prefixes=(
      ('model.language_model.', 'model.'),
      ('language_model.', ''),
    ),
    left_out=(
      'vision_tower.',
      'multi_modal_projector.',
      'model.vision_tower.',
      'model.multi_modal_projector.',
    ),
    # Since transformers 4.52; the language model alone has 'model.layers.'.
    modules=(('model.', 'model.language_model.'),),
  ),
)
"""All families, the plainest first: what several can express, it is."""


def family(architecture: Any) -> Family:
  """The family of an architecture.

  Raises:
    ValueError: There is none.
  """
  for one in FAMILIES:
    if one.architecture == architecture:
      return one
  known = ', '.join(one.architecture for one in FAMILIES)
  raise ValueError(
    f'config.json names the architecture {architecture!r}, which is not built '
    f'here; give a model of one of these: {known}.'
  )


def written_as(architecture: str) -> str:
  """The architecture that a model is written as, from the one it was read as.

  Raises:
    ValueError: The architecture is not built here.
  """
  return family(architecture).written_as or architecture
