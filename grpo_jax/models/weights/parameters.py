"""The parameters of a model, each with the tensors that hold its layers."""

import dataclasses
from typing import Any

import jax

from grpo_jax.mesh import sharding
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.transformer import Transformer
from grpo_jax.models.weights.tensors import Layout
from grpo_jax.models.weights.tensors import Tensors


@dataclasses.dataclass(frozen=True)
class Parameter:
  """A parameter of our tree.

  Attributes:
    path: Where it is in the tree.
    shape: Of one layer's share.
    layers: The numbers of its layers, in the order of the first axis; None if
      it has no such axis.
    names: The names of the tensors of each layer, or of the whole.
    layout: Of each of these.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  layers: tuple[int, ...] | None
  names: tuple[tuple[str, ...], ...]
  layout: Layout

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """Of one layer's share, as it is stored; experts are the first axis."""
    return self.layout.stored_shape(self.shape)

  @property
  def name_shape(self) -> tuple[int, ...]:
    """Of the tensor of one name."""
    return self.stored_shape[int(self.layout.experts) :]

  @property
  def is_matrix(self) -> bool:
    """Whether it is stored with two axes, and not a scale or a bias."""
    return len(self.name_shape) > 1


def parameters(
  config: ModelConfig, tensors: Tensors
) -> tuple[list[Parameter], Any]:
  """All parameters of a model, but for adapters.

  Args:
    config: The model.
    tensors: Where they are stored.

  Returns:
    The parameters in the order of the tree's leaves, and the tree with their
    shapes.
  """
  plain = dataclasses.replace(config, lora=None)
  tree = jax.eval_shape(Transformer(plain).init, jax.random.key(0))
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [
    _parameter(config, sharding.path_names(path), leaf.shape, tensors)
    for path, leaf in leaves
  ], tree


def _parameter(
  config: ModelConfig, path: tuple[str, ...], shape, tensors: Tensors
) -> Parameter:
  """One of them, from its path and its shape in the tree."""
  period, repeats = len(config.pattern), config.repeats
  experts = config.experts.number if config.experts else 0
  layers, layer = None, 0
  if path[0] == 'blocks':
    layers = tuple(int(path[1]) + period * i for i in range(repeats))
    shape = shape[1:]
  elif path[0] == 'tail':
    layer = int(path[1]) + period * repeats
  inside = path[2:] if path[0] in ('blocks', 'tail') else path
  if inside not in tensors:
    raise ValueError(
      f'The parameter {".".join(path)} of the model has no place among the '
      'tensors of this source; give the config that the source itself has.'
    )
  tensor = tensors[inside]
  of_layers = (layer,) if layers is None else layers
  names = tuple(tuple(tensor.names(i, experts)) for i in of_layers)
  return Parameter(path, tuple(shape), layers, names, tensor.layout)
