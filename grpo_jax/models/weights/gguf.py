"""Models in GGUF files, the format of llama.cpp.

The `gguf` package reads the file and knows its quantizations; tensors are made
float32 as they are read, a few rows at a time.
"""

from collections.abc import Mapping
import pathlib
import types
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.models.weights import config_fields
from grpo_jax.models.weights import families
from grpo_jax.models.weights import tensors as tensors_lib
from grpo_jax.models.weights.safetensors import Stored

# How many entries are made float32 at once: what the package holds besides its
# result is a few times as much.
_PIECE = 1 << 20


class Gguf:
  """The tensors and the metadata of a GGUF file.

  Attributes:
    path: The file.
    tensors: Every tensor, by its name; float32, however it is quantized.
    metadata: Every field, but for lists of the tokenizer.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the header.

    Args:
      path: The file.

    Raises:
      ValueError: The package `gguf` is not installed, or cannot read the file.
    """
    gguf = _package(path)
    self.path = path
    try:
      reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
      raise ValueError(
        f'{path} is truncated, or no GGUF file that the package gguf can read '
        f'({error}); copy it again, or update gguf.'
      ) from error
    if reader.byte_order == 'S':
      raise ValueError(
        f'{path} has the byte order of another kind of machine, in which '
        'weights are not read here; convert it with the script '
        'gguf_convert_endian of the package gguf.'
      )
    self.metadata: dict[str, Any] = {
      name: field.contents()
      for name, field in reader.fields.items()
      if field.types
      and (
        field.types[0] != gguf.GGUFValueType.ARRAY
        or not name.startswith('tokenizer.')
      )
    }
    self.tensors: dict[str, Stored] = {}
    for tensor in reader.tensors:
      self._check(tensor.name, tensor.tensor_type)
      self.tensors[tensor.name] = Stored(
        tensor.name,
        tuple(int(size) for size in tensor.shape[::-1]),
        np.dtype(np.float32),
        _Where(
          tensor.tensor_type,
          int(tensor.data_offset),
          tensor.data.dtype,
          tensor.data.shape,
        ),
      )

  def _check(self, name: str, kind: Any) -> None:
    """Refuses a quantization that cannot be undone."""
    import gguf

    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
      gguf.dequantize(np.zeros(block_bytes, np.uint8), kind)
    except NotImplementedError as error:
      raise ValueError(
        f'{name} in {self.path} is quantized as {kind.name}, which the package '
        'gguf cannot undo; give a file with another quantization, Q8_0 say.'
      ) from error

  def read(self, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """See `safetensors.Reader`."""
    import gguf

    kind, offset, dtype, shape = stored.where
    # Not the array of the package's reader: that is part of one mapping of the
    # whole file, and all that was ever read of it would stay in memory.
    data = np.memmap(self.path, dtype, 'r', offset, shape)
    if len(shape) == 1:
      return gguf.dequantize(np.array(data), kind)[index]
    first, end, _ = index[0].indices(shape[0])
    left, right, _ = index[1].indices(stored.shape[1])
    result = np.empty((end - first, right - left), np.float32)
    step = max(1, _PIECE // stored.shape[1])
    for start in range(first, end, step):  # a quantized block is in one row
      stop = min(start + step, end)
      rows = gguf.dequantize(np.array(data[start:stop]), kind)
      result[start - first : stop - first] = rows[:, left:right]
    return result


class _Where(NamedTuple):
  """Where a tensor is in its file, and as what."""

  kind: Any
  offset: int
  dtype: np.dtype
  shape: tuple[int, ...]


_NEEDED = (
  'embedding_length',
  'feed_forward_length',
  'block_count',
  'attention.head_count',
  'attention.layer_norm_rms_epsilon',
)


_KINDS = {
  **dict.fromkeys(
    (
      'embedding_length', 'feed_forward_length', 'block_count',
      'attention.head_count', 'attention.head_count_kv', 'context_length',
      'attention.key_length', 'rope.dimension_count',
      'attention.sliding_window_pattern',
    ),
    config_fields.COUNT,
  ),
  'attention.layer_norm_rms_epsilon': config_fields.SHARE,
  'rope.freq_base': config_fields.base_problem,
  'rope.freq_base_swa': config_fields.base_problem,
}  # fmt: skip


def _check(path: pathlib.Path, metadata: Mapping[str, Any], name: str) -> None:
  """Raises a ValueError that names a field with a value which means nothing.

  Args:
    path: The file.
    metadata: All fields.
    name: What the fields of the model begin with.
  """
  kinds = {**_KINDS, **_OWN.get(name, _Own()).kinds}
  if metadata.get(f'{name}.rope.scaling.type') not in (None, 'none'):
    kinds['rope.scaling.factor'] = config_fields.ABOVE_0
    kinds['rope.scaling.original_context_length'] = config_fields.COUNT
  for key, problem in kinds.items():
    value = metadata.get(f'{name}.{key}')
    if value is not None and (needed := problem(value)):
      raise ValueError(
        f'{path} has {name}.{key}={value!r:.60}, but {needed}; copy the file '
        'again, or convert the model again.'
      )


class Described(NamedTuple):
  """What a file says of its model.

  Attributes:
    config_json: As a `config.json` of Hugging Face says it.
    tensors: Where the parameters are.
    fused: Of the tensors, which are stored as one.
  """

  config_json: dict[str, Any]
  tensors: tensors_lib.Tensors
  fused: tuple[tensors_lib.Fused, ...]


def _families() -> dict[str, families.Family]:
  """The families that are read, by GGUF's name of their architecture."""
  return {row.gguf[0]: row for row in families.FAMILIES if row.gguf}


def described(model: Gguf) -> Described:
  """What the metadata say, as a `config.json` of Hugging Face says it.

  Args:
    model: The file.

  Returns:
    That, and where the tensors are.

  Raises:
    ValueError: Its architecture, or something in it, is not read here.
  """
  metadata, path = model.metadata, model.path
  name = metadata.get('general.architecture')
  rows = _families()
  if name not in rows:
    raise ValueError(
      f'{path} has the architecture {name!r}; of GGUF files, these are read '
      f'here: {", ".join(rows)}. Give one of them, or the model as a '
      'Hugging Face folder.'
    )

  def get(key: str, default: Any = None) -> Any:
    return metadata.get(f'{name}.{key}', default)

  own = _OWN.get(name, _Own())
  needed = *_NEEDED, *own.kinds
  missing = [f'{name}.{key}' for key in needed if get(key) is None]
  if 'token_embd.weight' not in model.tensors:
    missing.append('token_embd.weight')
  if missing:
    raise ValueError(
      f'{path} lacks {", ".join(missing)}; give a complete file, or the model '
      'as a Hugging Face folder.'
    )
  _check(path, metadata, name)
  width, heads = get('embedding_length'), get('attention.head_count')
  head_dim = get('attention.key_length', get('rope.dimension_count'))
  head_dim = head_dim or width // heads
  unread = [
    f'{name}.{key}'
    for key, understood in (
      ('expert_count', (0,)),
      ('rope.dimension_count', (head_dim,)),
      ('attention.value_length', (head_dim,)),
      ('rope.scaling.type', ('none', 'linear', 'yarn')),
    )
    if get(key, understood[0]) not in understood
  ]
  scaling = 'type', 'factor', 'original_context_length', 'finetuned'
  known = {f'{name}.rope.scaling.{key}' for key in scaling}
  also = f'{name}.rope.scaling.', f'{name}.rope.scale_linear'
  also = *also, f'{name}.attention.sliding_window', f'{name}.rope.freq_base_'
  also = *also, f'{name}.attn_logit_soft', f'{name}.final_logit_soft'
  known |= {f'{name}.{key}' for key in own.keys}
  unread += [
    key
    for key, value in metadata.items()
    # 0 and 1 are how such a field says that it does nothing.
    if key.startswith(also) and key not in known and value not in (0, 1)
  ]
  # How Llama 3.1 and later scale rotary positions.
  unread += [key for key in ('rope_freqs.weight',) if key in model.tensors]
  if unread:
    raise ValueError(
      f'{path} has {", ".join(unread)}, of which the meaning is not read from '
      'GGUF files here; give the model as a Hugging Face folder.'
    )
  row = rows[name]
  assert row.gguf is not None
  fields = dict(
    architectures=[row.architecture],
    vocab_size=model.tensors['token_embd.weight'].shape[0],
    hidden_size=width,
    intermediate_size=get('feed_forward_length'),
    num_hidden_layers=get('block_count'),
    num_attention_heads=heads,
    num_key_value_heads=get('attention.head_count_kv', heads),
    head_dim=head_dim,
    # Stored as float32, and meant as the decimal number.
    rms_norm_eps=float(
      str(np.float32(get('attention.layer_norm_rms_epsilon')))
    ),
    rope_theta=get('rope.freq_base', 10_000.0),
    rope_scaling=_scaling(get),
    max_position_embeddings=get('context_length'),
    tie_word_embeddings='output.weight' not in model.tensors,
    **{
      f'{token}_token_id': metadata.get(f'tokenizer.ggml.{key}_token_id')
      for token, key in (('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding'))
    },
  )
  return Described({**fields, **own.fields(get, fields)}, *row.gguf[1:])


def _nothing(get: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
  """Of an architecture without fields of its own."""
  return {}


def _gemma3(get: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
  """What Gemma 3 has besides, as llama.cpp understands it.

  Args:
    get: From a key, without the name of the architecture, to its value or None.
    fields: Of the `config.json`, without these.
  """
  width, heads = fields['hidden_size'], fields['num_attention_heads']
  # No key says it: that of 27B is the width of a head of others.
  largest = fields['num_hidden_layers'] == 62
  return dict(
    sliding_window=get('attention.sliding_window'),
    sliding_window_pattern=get('attention.sliding_window_pattern') or 6,
    rope_local_base_freq=get('rope.freq_base_swa') or 10_000.0,
    query_pre_attn_scalar=width // heads if largest else fields['head_dim'],
    final_logit_softcapping=get('final_logit_softcapping') or None,
  )


def _lfm2(get: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
  """What LFM2 has besides: layers without key-value heads have a state."""
  del fields
  heads = get('attention.head_count_kv')
  return dict(
    num_key_value_heads=max(heads, default=0),
    full_attn_idxs=[layer for layer, number in enumerate(heads) if number],
    conv_L_cache=get('shortconv.l_cache'),
    block_auto_adjust_ff_dim=False,
  )


class _Own(NamedTuple):
  """What an architecture says besides.

  Attributes:
    keys: Of what others may not say, that which is read.
    kinds: Keys that it must say, and what they may hold.
    fields: Makes fields of a `config.json` of them.
  """

  keys: frozenset[str] = frozenset()
  kinds: Mapping[str, config_fields.Problem] = types.MappingProxyType({})
  fields: Any = _nothing


_OWN = {
  'gemma3': _Own(
    keys=frozenset({
      'attention.sliding_window', 'attention.sliding_window_pattern',
      'rope.freq_base_swa', 'final_logit_softcapping',
    }),
    fields=_gemma3,
  ),
  'lfm2': _Own(
    kinds={
      'attention.head_count_kv': config_fields.COUNTS,
      'shortconv.l_cache': config_fields.TAPS,
    },
    fields=_lfm2,
  ),
}  # fmt: skip


def _scaling(get: Any) -> dict[str, Any] | None:
  kind = get('rope.scaling.type', 'none')
  if kind == 'none':
    return None
  return dict(
    rope_type=kind,
    factor=get('rope.scaling.factor'),
    original_max_position_embeddings=get(
      'rope.scaling.original_context_length'
    ),
  )


def _package(path: pathlib.Path) -> Any:
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      f'{path} is a GGUF file, and reading it needs the package gguf; run '
      "`pip install 'grpo_jax[gguf]'`."
    ) from error
  return gguf
