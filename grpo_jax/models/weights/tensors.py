"""How parameters are stored: names and layouts of tensors, fused ones too.

Files have a tensor for each layer, and often for each expert; ours are stacked.
From a table of names and a shape come all parameters of a model, and where each
of them lies in the files.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.models import axes
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.transformer import Transformer

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
    interleaved: The share of a head, from its first entry, of which entries i
      and i + F are stored side by side, with F the half of that share:
      llama.cpp and GLM turn such pairs, we turn halves.
    experts: Whether there is one such tensor for each expert. In ours, and
      before all that is said here, the experts are the first axis.
    packed: Whether the experts are the first axis of one tensor there too.
    depthwise: Whether an axis of size 1 stands between the groups there, as in
      the weight of a convolution of each channel by itself.
    is_log: Whether what is stored is -exp of ours.
  """

  first: int = 1
  transposed: bool = False
  added: float = 0.0
  interleaved: float = 0.0
  experts: bool = False
  packed: bool = False
  depthwise: bool = False
  is_log: bool = False

  def stored_axes(
    self, ours: tuple[Any, ...], merge: Callable[[tuple[Any, ...]], Any]
  ) -> tuple[Any, ...]:
    """What is known of our axes, for the axes of what is stored.

    Args:
      ours: One entry for each of our axes, such as its size.
      merge: From the entries of a group to that of its common axis; from () to
        that of an axis of size 1.

    Returns:
      One entry for each stored axis, behind that of the experts if there is
      one.
    """
    lead = int(self.experts)
    middle = lead + self.first
    groups = [group for group in (ours[lead:middle], ours[middle:]) if group]
    if self.depthwise:
      groups.insert(1, ())
    merged = [merge(group) for group in groups]
    return (*ours[:lead], *(merged[::-1] if self.transposed else merged))

  def stored_shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is stored, behind the number of experts if any.

    >>> Layout(transposed=True).stored_shape((576, 9, 64))
    (576, 576)
    >>> Layout(transposed=True, experts=True).stored_shape((8, 96, 32))
    (8, 32, 96)
    >>> Layout(transposed=True, depthwise=True).stored_shape((4, 2, 8))
    (16, 1, 4)
    """
    return self.stored_axes(ours, math.prod)

  def decode(self, stored: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Our parameter from what is stored.

    Args:
      stored: An array of `stored_shape`.
      shape: The shape of our parameter.
      dtype: The dtype of our parameter.
    """
    stored = self._turned(stored, shape[-2:], -1, 2)
    if self.depthwise:
      stored = jnp.squeeze(stored, axis=1)
    if self.transposed:
      stored = jnp.swapaxes(stored, -1, -2)
    if self.added:  # in float32: bfloat16 would round 1 + w to 8 bits
      stored = stored.astype(jnp.float32) + self.added
    if self.is_log:
      stored = jnp.log(-stored)
    return stored.reshape(shape).astype(dtype)

  def encode(self, ours: Array, dtype: Any) -> Array:
    """What is stored of our parameter: the inverse of `decode`.

    Args:
      ours: The parameter of one layer.
      dtype: The dtype of what is stored.
    """
    shape, heads = self.stored_shape(ours.shape), ours.shape[-2:]
    if self.added:
      ours = ours.astype(jnp.float32) - self.added
    if self.is_log:
      ours = -jnp.exp(ours)
    if self.transposed:
      flat = dataclasses.replace(self, depthwise=False)
      *experts, rows, columns = flat.stored_shape(ours.shape)
      ours = jnp.swapaxes(ours.reshape(*experts, columns, rows), -1, -2)
    ours = self._turned(ours, heads, 2, -1)
    return ours.reshape(shape).astype(dtype)

  def _turned(
    self, stored: Array, heads: tuple[int, ...], *pairs: int
  ) -> Array:
    """The rows of each head in the other order of its rotated entries.

    Args:
      stored: Behind the number of experts if any, heads and their entries are
        the first axis.
      heads: How many there are, and how many entries each has.
      *pairs: How rotated entries are laid out, -1 and 2 for pairs side by side.
    """
    if not self.interleaved:
      return stored
    rotated = int(heads[1] * self.interleaved)
    split = stored.reshape(*heads, -1)
    first, rest = split[:, :rotated], split[:, rotated:]
    turned = first.reshape(heads[0], *pairs, first.shape[-1])
    turned = jnp.swapaxes(turned, 1, 2).reshape(first.shape)
    return jnp.concatenate((turned, rest), axis=1).reshape(stored.shape)


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
    if not self.layout.experts or self.layout.packed:
      return [self.name.format(layer=layer)]
    return [self.name.format(layer=layer, expert=e) for e in range(experts)]


Tensors = Mapping[tuple[str, ...], Tensor]
"""From the path of a parameter in its layer, or in the tree, to its tensor."""


@dataclasses.dataclass(frozen=True)
class Fused:
  """A stored tensor that holds several of the table.

  Attributes:
    name: Its name, with `{layer}` for the number of a layer.
    parts: The names of those that it holds, in their order.
    sizes: How many rows each has, in a layer of this shape, before the next one
      begins.
    turns: How often they take turns.
    axis: Of which axis the rows are.
  """

  name: str
  parts: tuple[str, ...]
  sizes: Callable[[ModelConfig], tuple[int, ...]]
  turns: Callable[[ModelConfig], int] = lambda config: 1
  axis: int = 0

  def places(
    self, shape: tuple[int, ...], config: ModelConfig
  ) -> list[np.ndarray]:
    """Which rows of the tensor are those of each part, i64[rows].

    Args:
      shape: Of the tensor.
      config: The model, with the sizes of the layer.

    Raises:
      ValueError: The parts have another number of rows together.
    """
    sizes, turns = self.sizes(config), self.turns(config)
    rows = shape[self.axis]
    if sum(sizes) * turns != rows:
      often = f', {turns} times,' if turns > 1 else ''
      raise ValueError(
        f'has {rows} rows, but its parts have '
        f'{" + ".join(map(str, sizes))}{often} by the config.json; give files '
        'that belong to it.'
      )
    numbers = np.arange(rows).reshape(turns, -1)
    *ends, _ = itertools.accumulate(sizes)
    return [one.reshape(-1) for one in np.split(numbers, ends, axis=1)]

  def joined(self, parts: Sequence[np.ndarray], turns: int) -> np.ndarray:
    """The tensor, of all its parts, which take turns so often."""
    axis = self.axis % parts[0].ndim
    before, behind = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
    split = [part.reshape(*before, turns, -1, *behind) for part in parts]
    return np.concatenate(split, axis + 1).reshape(*before, -1, *behind)

  @functools.cached_property
  def pattern(self) -> re.Pattern[str]:
    """What matches its name in any layer, and has the number of that."""
    return re.compile(re.escape(self.name).replace(r'\{layer\}', r'(\d+)'))


@dataclasses.dataclass(frozen=True)
class Tiled(Fused):
  """One of which the last part has the heads of values in another order.

  llama.cpp has the first value head of each key head, then the second ones.
  """

  def places(
    self, shape: tuple[int, ...], config: ModelConfig
  ) -> list[np.ndarray]:
    """As of `Fused`; those of the last part are in the order of ours."""
    *others, last = super().places(shape, config)
    assert config.delta is not None
    keys = config.delta.num_heads
    several = config.delta.num_value_heads // keys
    tiles = last.reshape(several, keys, -1).swapaxes(0, 1)
    return [*others, tiles.reshape(-1)]


@dataclasses.dataclass(frozen=True)
class Parameter:
  """A parameter of our tree.

  Attributes:
    path: Where it is in the tree.
    shape: The shape of one layer's share.
    layers: The numbers of its layers, in the order of the first axis; None if
      it has no such axis.
    names: The names of the tensors of each layer, or of the whole.
    layout: How each of these tensors is laid out.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  layers: tuple[int, ...] | None
  names: tuple[tuple[str, ...], ...]
  layout: Layout

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of one layer's share as stored; experts are the first axis."""
    return self.layout.stored_shape(self.shape)

  @property
  def name_shape(self) -> tuple[int, ...]:
    """The shape of the tensor of one name."""
    each = self.layout.experts and not self.layout.packed
    return self.stored_shape[int(each) :]

  @property
  def has_two_axes(self) -> bool:
    """Whether it is a matrix, of experts or not: no scale, bias or taps."""
    number = len(self.stored_shape) - int(self.layout.experts)
    return number > 1 and not axes.is_vector(self.path[-1])


class Part(NamedTuple):
  """What one layer has of a parameter.

  Attributes:
    parameter: The number of the parameter among all.
    layer: The number of the layer among those of the parameter.
  """

  parameter: int
  layer: int


class Written(NamedTuple):
  """What is written at once: a tensor, or those of all experts of a layer.

  Attributes:
    names: One, or one for each expert.
    parts: What the tensor holds.
    fused: How, if it holds several.
    turns: How often these take turns.
  """

  names: tuple[str, ...]
  parts: tuple[Part, ...]
  fused: Fused | None = None
  turns: int = 1

  def shape(self, wanted: Sequence[Parameter]) -> tuple[int, ...]:
    """That of the tensor of one name."""
    shapes = [wanted[part.parameter].name_shape for part in self.parts]
    whole = list(shapes[0])
    if self.fused is not None:
      axis = self.fused.axis
      whole[axis] = sum(shape[axis] for shape in shapes)
    return tuple(whole)

  def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor of one name, of the arrays of its parts."""
    if self.fused is None:
      return parts[0]
    return self.fused.joined(parts, self.turns)


def written(
  config: ModelConfig, wanted: Sequence[Parameter], fused: Sequence[Fused]
) -> list[Written]:
  """The tensors of a file, fused ones at the place of their first part.

  Args:
    config: The model.
    wanted: Its parameters.
    fused: Which of their tensors are one.
  """
  whole = {
    part.format(layer=layer): (one.name.format(layer=layer), one, layer)
    for one in fused
    for layer in range(config.num_layers)
    for part in one.parts
  }
  order = {name: place for place, name in enumerate(whole)}
  found: dict[tuple[str, ...], list[tuple[int, Part]]] = {}
  how: dict[tuple[str, ...], tuple[Fused | None, int]] = {}
  for number, parameter in enumerate(wanted):
    for layer, names in enumerate(parameter.names):
      if names[0] in whole:
        name, one, its_layer = whole[names[0]]
        sizes = config.of(config.kinds[its_layer])
        key, how[name,] = (name,), (one, one.turns(sizes))
      else:
        key = names
      place = order.get(names[0], 0)
      found.setdefault(key, []).append((place, Part(number, layer)))
  return [
    Written(
      names,
      tuple(part for _, part in sorted(parts)),
      *how.get(names, (None, 1)),
    )
    for names, parts in found.items()
  ]


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
  experts = config.experts.number if config.experts else 0
  layers, layer = None, 0
  if path[0] == 'blocks':
    layers = tuple(config.blocks[int(path[1])][1])
    shape = shape[1:]
  elif path[0] == 'tail':
    layer = config.tail[int(path[1])][1]
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
