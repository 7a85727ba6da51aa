"""Where each parameter of ours is stored, and how it is laid out there."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a parameter of one layer is stored.

  A stored tensor has at most two axes. The axes of ours that are summed over
  are one of them, all others are the second: `query` [width, H, D] is stored as
  [H * D, width].

  Attributes:
    first: How many of our axes make up the first group.
    transposed: Whether the second group comes first there, as in the weight of
      a `torch.nn.Linear`.
    added: Added to what is stored: 1 for a norm that multiplies by 1 + w.
    interleaved: Whether entries i and i + D / 2 of a head are stored side by
      side: llama.cpp turns such pairs, we turn halves.
    experts: Whether there is one such tensor for each expert. In ours, and
      before all that is said here, the experts are the first axis.
  """

  first: int = 1
  transposed: bool = False
  added: float = 0.0
  interleaved: bool = False
  experts: bool = False

  def stored_axes(
    self, ours: tuple[Any, ...], merge: Callable[[tuple[Any, ...]], Any]
  ) -> tuple[Any, ...]:
    """What is known of our axes, for the axes of what is stored.

    Args:
      ours: One entry for each of our axes, such as its size.
      merge: From the entries of a group to that of its common axis.

    Returns:
      One entry for each stored axis, behind that of the experts if there is
      one.
    """
    lead = int(self.experts)
    middle = lead + self.first
    groups = [group for group in (ours[lead:middle], ours[middle:]) if group]
    merged = [merge(group) for group in groups]
    return (*ours[:lead], *(merged[::-1] if self.transposed else merged))

  def stored_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is stored, behind the number of experts if any.

    >>> Layout(transposed=True).stored_shape((576, 9, 64))
    (576, 576)
    >>> Layout(transposed=True, experts=True).stored_shape((8, 96, 32))
    (8, 32, 96)
    """
    return self.stored_axes(ours, math.prod)

  def decode(self, stored: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Our parameter from what is stored.

    Args:
      stored: Of `stored_shape`.
      shape: Of ours.
      dtype: Of ours.
    """
    if self.interleaved:
      pairs = stored.reshape(shape[-2], shape[-1] // 2, 2, -1)
      stored = jnp.swapaxes(pairs, 1, 2).reshape(stored.shape)
    if self.transposed:
      stored = jnp.swapaxes(stored, -1, -2)
    if self.added:  # in float32: bfloat16 would round 1 + w to 8 bits
      stored = stored.astype(jnp.float32) + self.added
    return stored.reshape(shape).astype(dtype)

  def encode(self, ours: Array, dtype: Any) -> Array:
    """What is stored of our parameter: the inverse of `decode`.

    Args:
      ours: The parameter of one layer, not of an `interleaved` layout: nothing
        is written in that order.
      dtype: Of what is stored.
    """
    shape = self.stored_shape(ours.shape)
    if self.added:
      ours = ours.astype(jnp.float32) - self.added
    if self.transposed:
      *experts, rows, columns = shape
      ours = jnp.swapaxes(ours.reshape(*experts, columns, rows), -1, -2)
    return ours.reshape(shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a parameter is stored.

  Attributes:
    name: Its name, with `{layer}` for the number of a layer and `{expert}` for
      that of an expert.
    layout: How it is laid out there.
  """

  name: str
  layout: Layout = Layout()

  def names(self, layer: int, experts: int) -> list[str]:
    """The stored names: one, or one for each expert.

    Args:
      layer: Number of the layer; read if the name has a `{layer}`.
      experts: Number of experts; read if there is one tensor for each.
    """
    if not self.layout.experts:
      return [self.name.format(layer=layer)]
    return [self.name.format(layer=layer, expert=e) for e in range(experts)]


Tensors = Mapping[tuple[str, ...], Tensor]
"""From the path of a parameter in its layer, or in the tree, to its tensor."""


def _linear(name: str, **layout) -> Tensor:
  """The weight of a linear layer, stored [out, in]."""
  return Tensor(f'{name}.weight', Layout(transposed=True, **layout))


def hugging_face(added: float = 0.0, post_norms: bool = False) -> Tensors:
  """The names that all families share in Hugging Face's folders.

  Args:
    added: To the scale of each norm; see `Layout`.
    post_norms: Whether attention and MLP have norms behind them. The norm
      before the MLP has another name then.
  """
  layer = 'model.layers.{layer}.'
  attention, mlp = f'{layer}self_attn.', f'{layer}mlp.'
  norms = {
    'attention_norm': 'input_layernorm',
    'mlp_norm': 'post_attention_layernorm',
  }
  if post_norms:
    norms = {
      'attention_norm': 'input_layernorm',
      'attention_post_norm': 'post_attention_layernorm',
      'mlp_norm': 'pre_feedforward_layernorm',
      'mlp_post_norm': 'post_feedforward_layernorm',
    }
  norm, bias = Layout(added=added), Layout(first=2)
  tensors = {
    ('embedding',): Tensor('model.embed_tokens.weight'),
    ('final_norm', 'scale'): Tensor('model.norm.weight', norm),
    ('head',): _linear('lm_head'),
    ('attention', 'output'): _linear(f'{attention}o_proj', first=2),
    ('experts', 'router'): _linear(f'{mlp}gate'),
  }
  for ours, name in norms.items():
    tensors[ours, 'scale'] = Tensor(f'{layer}{name}.weight', norm)
  for ours in ('query', 'key', 'value'):
    name = f'{attention}{ours[0]}_proj'
    tensors['attention', ours] = _linear(name)
    tensors['attention', f'{ours}_bias'] = Tensor(f'{name}.bias', bias)
    scale = Tensor(f'{attention}{ours[0]}_norm.weight', norm)
    tensors['attention', f'{ours}_norm', 'scale'] = scale
  for ours in ('gate', 'up', 'down'):
    tensors['mlp', ours] = _linear(f'{mlp}{ours}_proj')
    expert = _linear(f'{mlp}experts.{{expert}}.{ours}_proj', experts=True)
    tensors['experts', ours] = expert
  return tensors


def llama_cpp(interleaved: bool) -> Tensors:
  """The names in GGUF files, of which all are read and none written.

  Args:
    interleaved: Of queries and keys; see `Layout`. llama.cpp interleaves those
      of the architecture `llama` alone.
  """
  layer = 'blk.{layer}.'
  tensors = {
    ('embedding',): Tensor('token_embd.weight'),
    ('final_norm', 'scale'): Tensor('output_norm.weight'),
    ('head',): _linear('output'),
    ('attention_norm', 'scale'): Tensor(f'{layer}attn_norm.weight'),
    ('mlp_norm', 'scale'): Tensor(f'{layer}ffn_norm.weight'),
    ('attention', 'output'): _linear(f'{layer}attn_output', first=2),
  }
  for ours in ('query', 'key', 'value'):
    name = f'{layer}attn_{ours[0]}'
    turned = interleaved and ours != 'value'
    tensors['attention', ours] = _linear(name, interleaved=turned)
    tensors['attention', f'{ours}_bias'] = Tensor(
      f'{name}.bias', Layout(first=2)
    )
    norm = Tensor(f'{name}_norm.weight')
    tensors['attention', f'{ours}_norm', 'scale'] = norm
  for ours in ('gate', 'up', 'down'):
    tensors['mlp', ours] = _linear(f'{layer}ffn_{ours}')
  return tensors
