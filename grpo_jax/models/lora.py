r"""Low-rank adapters: a few trained parameters beside frozen weights.

A weight W that has an adapter computes

.. math:: x W + \frac{\alpha}{r} \, (x A) B

with A of r columns and B of r rows. A begins random and B with 0, so a fresh
adapter changes nothing. Adapters lie in the parameter tree beside their weight:
`query_a` and `query_b` beside `query`.

References:
  Hu et al., `LoRA <https://arxiv.org/abs/2106.09685>`_, 2021.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from grpo_jax.models.config import LowRank


def trains(path: tuple[str, ...]) -> bool:
  """Whether a parameter is part of an adapter."""
  return path[-1].endswith(('_a', '_b'))


def split(
  tree: Any, keep: Callable[[tuple[str, ...]], bool]
) -> tuple[Any, Any]:
  """Two parts of a parameter tree; `join` puts them together.

  Args:
    tree: Nested dicts and lists.
    keep: From the path of a leaf to whether it belongs to the first part.

  Returns:
    Two trees. A dict has the entries of its part alone; lists stay as long as
    they were, so that every path stays the same.
  """

  def walk(node, path, first):
    if isinstance(node, list):
      return [walk(x, (*path, str(i)), first) for i, x in enumerate(node)]
    if not isinstance(node, dict):
      return node
    part = {}
    for name, child in node.items():
      if not isinstance(child, dict | list) and keep((*path, name)) != first:
        continue
      child = walk(child, (*path, name), first)
      if not isinstance(child, dict) or child:
        part[name] = child
    return part

  return walk(tree, (), True), walk(tree, (), False)


def join(first: Any, second: Any) -> Any:
  """The tree that `split` has split; None is the empty part."""
  if first is None or second is None:
    return second if first is None else first
  if isinstance(first, list):
    return list(map(join, first, second))
  return {
    name: join(first.get(name), second.get(name)) for name in first | second
  }


def merge(params: Any, lora: LowRank) -> Any:
  """The parameters of the same function without adapters.

  Args:
    params: The tree of `Transformer.init` or `unstack`, with adapters.
    lora: Their description.

  Returns:
    A new tree, each weight in its own dtype; the sum is taken in float32.
  """

  def walk(node):
    if isinstance(node, list):
      return [walk(child) for child in node]
    if not isinstance(node, dict):
      return node
    result = {}
    for name, child in node.items():
      if trains((name,)):
        continue
      if name + '_a' in node:
        a, b = node[name + '_a'], node[name + '_b']
        child = add_adapter(child, a, b, lora).astype(child.dtype)
      result[name] = walk(child)
    return result

  return walk(params)


def add_adapter(weight, a, b, lora: LowRank):
  """A weight with its adapter added.

  Args:
    weight: f[..., in, ..., out, ...], perhaps with an axis of layers in front.
    a: f[..., in, ..., r] likewise.
    b: f[..., r, out, ...] likewise.
    lora: The description of the adapter.

  Returns:
    f32 of the shape of `weight`.
  """
  # Stacked layers have one more axis in front, in all three arrays.
  stack = weight.shape[: a.ndim + b.ndim - 2 - weight.ndim]
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  product = a.reshape(*stack, -1, lora.rank) @ b.reshape(*stack, lora.rank, -1)
  return weight.astype(jnp.float32) + lora.scale * product.reshape(weight.shape)
