r"""Gemma 3 in NumPy, from the tensors of a GGUF file under llama.cpp's names.

It is written from the report on Gemma 3 (https://arxiv.org/abs/2503.19786) and
the description of the format, and shares no code with `grpo_jax`: neither the
tree of parameters nor the `config.json` that is made of the metadata comes in.
A matrix of a GGUF file maps its columns to its rows, and a norm multiplies by
what is stored.

  h = sqrt(width) E[token];  h += N(attention(N(h)));  h += N(mlp(N(h)))
  five layers with a window, then one without; only these rotate by the base of
  the file; queries and keys of each head have norms of their own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


def log_probs(
  tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any], tokens: Any
) -> np.ndarray:
  """Of every token, behind each place.

  Args:
    tensors: All of them, not quantized; of float32 or float64, in which this is
      computed.
    metadata: Of the file.
    tokens: N ids.

  Returns:
    f[N,V].
  """
  logits = hidden(tensors, metadata, tokens) @ tensors['token_embd.weight'].T
  logits -= logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def hidden(
  tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any], tokens: Any
) -> np.ndarray:
  """What the embedding turns into logits; see `log_probs`."""

  def say(key):
    return metadata[f'gemma3.{key}']

  epsilon = say('attention.layer_norm_rms_epsilon')

  def norm(x, name):
    root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    return x / root * tensors[f'{name}.weight']

  embedding = tensors['token_embd.weight']
  h = embedding[np.asarray(tokens)] * embedding.shape[1] ** 0.5
  dtype = embedding.dtype
  for number in range(say('block_count')):
    here = f'blk.{number}.'
    wide = number % 6 == 5
    x = norm(h, f'{here}attn_norm')
    query, key, value = (
      _heads(x @ tensors[f'{here}attn_{name}.weight'].T, say, count)
      for name, count in (
        ('q', 'attention.head_count'),
        ('k', 'attention.head_count_kv'),
        ('v', 'attention.head_count_kv'),
      )
    )
    base = say('rope.freq_base') if wide else 10_000.0
    query = _rotated(norm(query, f'{here}attn_q_norm'), base)
    key = _rotated(norm(key, f'{here}attn_k_norm'), base)
    window = None if wide else say('attention.sliding_window')
    mixed = _attention(query, key, value, window).astype(dtype)
    mixed = mixed @ tensors[f'{here}attn_output.weight'].T
    h = h + norm(mixed, f'{here}post_attention_norm')
    x = norm(h, f'{here}ffn_norm')
    gate, up = (
      x @ tensors[f'{here}ffn_{name}.weight'].T for name in ('gate', 'up')
    )
    inner = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    x = 0.5 * gate * (1 + np.tanh(inner)) * up
    x = (x @ tensors[f'{here}ffn_down.weight'].T).astype(dtype)
    h = h + norm(x, f'{here}post_ffw_norm')
  return norm(h, 'output_norm')


def _heads(x, say, count):
  """[N,H*D] as [N,H,D]."""
  return x.reshape(len(x), say(count), say('attention.key_length'))


def _rotated(x, base):
  """The halves of each head turned by position * base**(-2i/D)."""
  size = x.shape[-1]
  speed = base ** (-2 * np.arange(size // 2) / size)
  angle = np.arange(len(x))[:, None, None] * speed
  cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
  first, second = np.split(x, 2, axis=-1)
  return np.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def _attention(query, key, value, window):
  """Of all heads, side by side: [N,H*D]."""
  place = np.arange(len(query))
  behind = place[:, None] - place
  seen = behind >= 0
  if window is not None:
    seen &= behind < window
  heads = []
  for head in range(query.shape[1]):
    shared = head * key.shape[1] // query.shape[1]
    scores = query[:, head] @ key[:, shared].T / query.shape[2] ** 0.5
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    heads.append(weights @ value[:, shared])
  return np.concatenate(heads, axis=-1)
