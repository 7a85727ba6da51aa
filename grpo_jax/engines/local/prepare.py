"""The learner's parameters as decoding reads them.

Decoding reads single layers in the compute dtype, and its weights lie otherwise
over the devices than those of the learner. On several devices they go there
layer by layer, and what is no layer array by array, each by a call of its own.
So a device needs room for both sets and for one layer on its way. In one
program the compiler would bring all weights there side by side.

On one device, what decoding reads as the learner has it (in float32 the
embedding and the output layer) need not be copied at all.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.models.protocol import Layered

_STACKED = 'blocks', 'tail'  # see `models.transformer`
_AS_LEARNER = 'router', 'codes', 'scales'  # read in the learner's dtype


def sampler_params(model: Layered, params):
  """Parameters as decoding reads them: single layers, in the compute dtype.

  Args:
    model: Whose parameters.
    params: The learner's parameters, whose layers are stacked.

  Returns:
    The tree that `Sampler` and other engines read. Vectors (the scales of
    norms), routers and quantized weights stay as in training. The arrays are
    copies, because the learner donates its own to the next update.
  """
  return _cast(model, model.unstack(params))


def _cast(model, tree):
  """Copies in the dtypes in which decoding reads them."""
  return jax.tree.map(
    lambda x, dtype: jnp.copy(x.astype(dtype)), tree, _dtypes(model, tree)
  )


def _dtypes(model, tree):
  """In which dtypes decoding reads parameters."""
  narrow = jnp.dtype(model.config.compute_dtype)

  def one(path, x):
    is_narrow = x.ndim > 1 and sharding.path_names(path)[-1] not in _AS_LEARNER
    return narrow if is_narrow else x.dtype

  return jax.tree_util.tree_map_with_path(one, tree)


class Layerwise:
  """Calls a program for each layer, and for each array that is in none.

  Layers of one kind share a program.

  Args:
    model: Whose parameters.
    params: The learner's parameters, some of them, or their shapes. All that
      are given later have the same shapes and lie on the same devices.
    program: Makes a program of a layer, or of an array, of what `places` have
      in its place, and of whether the layer is one of several that are stacked.
    places: Trees as `model.unstack` makes them of `params`.
  """

  def __init__(
    self, model: Layered, params: Any, program: Callable[..., Any], *places: Any
  ):
    self._blocks, self._tail = model.config.blocks, model.config.tail
    self._rest = {
      name: program({name: x}, *({name: one[name]} for one in places), False)
      for name, x in params.items()
      if name not in _STACKED
    }
    layers = list(zip(*(one['layers'] for one in places), strict=True))
    blocks, tail = params['blocks'], params.get('tail', [])
    repeated = [layers[numbers[0]] for _, numbers in self._blocks]
    last = [layers[number] for _, number in self._tail]
    self._layers = [
      program(layer, *to, is_stacked)
      for given, is_stacked, where in (
        (blocks, True, repeated),
        (tail, False, last),
      )
      for layer, to in zip(given, where, strict=True)
    ]

  def calls(self, params: Any) -> list[tuple[Any, list[tuple[Any, ...]]]]:
    """For each program the arguments of its calls."""
    blocks, tail = params['blocks'], params.get('tail', [])
    layers = [
      [(x, np.int32(i)) for i in range(len(numbers))]
      for x, (_, numbers) in zip(blocks, self._blocks, strict=True)
    ]
    layers += [[(x,)] for x in tail]
    rest = [[({name: params[name]},)] for name in self._rest]
    programs = [*self._rest.values(), *self._layers]
    return list(zip(programs, rest + layers, strict=True))

  def __call__(self, params: Any) -> Any:
    """What the programs return, a tree as `model.unstack` makes it."""
    made = [
      [program(*arguments) for arguments in calls]
      for program, calls in self.calls(params)
    ]
    number = len(self._rest)
    rest = {name: x for (one,) in made[:number] for name, x in one.items()}
    numbers = [list(layers) for _, layers in self._blocks]
    numbers += [[layer] for _, layer in self._tail]
    layers = {
      layer: x
      for own, found in zip(numbers, made[number:], strict=True)
      for layer, x in zip(own, found, strict=True)
    }
    return {**rest, 'layers': [layers[layer] for layer in sorted(layers)]}


class Preparation:
  """`sampler_params`, which also brings the parameters to the sampler's mesh.

  Called with the learner's parameters it returns the sampler's.

  Args:
    model: Whose parameters.
    params: The learner's parameters, or their shapes. All that are given later
      have the same shapes and lie on the same devices.
    mesh: The sampler's mesh; None for one device.
    copies: Whether no array that is returned is the learner's own. If False,
      on one device, what is returned is of no use once these are donated.
  """

  def __init__(
    self,
    model: Layered,
    params,
    mesh: jax.sharding.Mesh | None = None,
    copies: bool = True,
  ):
    self._whole: Any = None
    self._layerwise: Any = None
    self._same: list[str] = []  # what is not copied
    place = None if mesh is None else decoding_shardings(model, params, mesh)
    if mesh is None or mesh.size == 1:
      self._same = [
        name
        for name, x in params.items()
        if not copies
        and name not in _STACKED
        and _is_same(model, {name: x}, place and {name: place[name]})
      ]
      if place is not None:
        place = _without(place, self._same)
      whole = functools.partial(sampler_params, model)
      self._whole = jax.jit(whole, out_shardings=place)
      return
    shapes = jax.eval_shape(model.unstack, params)
    half = sharding.param_shardings(mesh, shapes, model.logical_axes)
    program = functools.partial(_program, model)
    self._layerwise = Layerwise(model, params, program, half, place)

  def _calls(self, params: Any) -> list[tuple[Any, list[tuple[Any, ...]]]]:
    """For each program the arguments of its calls."""
    if self._whole is not None:
      return [(self._whole, [(_without(params, self._same),)])]
    return self._layerwise.calls(params)

  def __call__(self, params: Any) -> Any:
    """The sampler's parameters."""
    if self._whole is None:
      return self._layerwise(params)
    made = self._whole(_without(params, self._same))
    return made | {name: params[name] for name in self._same}

  def lower(self, params: Any, mesh: Any) -> list[tuple[Any, int]]:
    """The programs, lowered from shapes, and how often each is called."""
    return [
      (sharding.lower(mesh, program, *calls[0]), len(calls))
      for program, calls in self._calls(params)
    ]


def decoding_shardings(model: Layered, params: Any, mesh: Any) -> Any:
  """Where the layers of parameters lie as decoding reads them.

  Args:
    model: Whose parameters.
    params: The learner's, some of them, or their shapes.
    mesh: The sampler's.
  """
  shapes = jax.eval_shape(model.unstack, params)
  return sharding.param_shardings(
    mesh, shapes, model.logical_axes, sharding.DECODING_RULES
  )


def cut_program(
  model: Layered,
  then: Callable[[Any, Any], Any],
  tree: Any,
  near: Any,
  far: Any,
  is_stacked: bool,
) -> Callable[..., Any]:
  """Casts some parameters, cuts them and sends them; see `mesh.crossing`.

  Args:
    model: See `Preparation`.
    then: Sends what was cut.
    tree: The parameters, or their shapes; not read.
    near: Where they lie once they are cut.
    far: Where they are sent.
    is_stacked: See `Layerwise`.

  Returns:
    A function of the parameters and, if they are stacked, of a layer's number.
  """
  del tree

  def cast(tree, number=None):
    if is_stacked:
      tree = jax.tree.map(lambda x: x[number], tree)
    return _cast(model, tree)

  program = jax.jit(cast, out_shardings=near)
  return lambda *arguments: then(program(*arguments), far)


def _without(tree: dict[str, Any], names: list[str]) -> dict[str, Any]:
  """The tree without some of its entries."""
  return {name: x for name, x in tree.items() if name not in names}


def _is_same(model, tree, place) -> bool:
  """Whether decoding reads parameters as they are, and where they are.

  Args:
    model: See `Preparation`.
    tree: The parameters.
    place: Where they shall lie; None: anywhere.
  """

  arrays = jax.tree.leaves(tree)
  dtypes = jax.tree.leaves(_dtypes(model, tree))
  if any(x.dtype != dtype for x, dtype in zip(arrays, dtypes, strict=True)):
    return False
  return place is None or all(
    x.sharding.is_equivalent_to(at, x.ndim)
    for x, at in zip(arrays, jax.tree.leaves(place), strict=True)
  )


def _program(model, tree, half, place, is_stacked: bool) -> Callable[..., Any]:
  """Brings some parameters to the sampler.

  Args:
    model: See `Preparation`.
    tree: The parameters, or their shapes.
    half: Where they lie on the sampler's mesh by the learner's rules.
    place: Where they shall lie.
    is_stacked: Whether they are several layers, one of which is wanted.

  Returns:
    A function of the parameters and, if they are stacked, of a layer's number.
  """

  def own(x):
    at = getattr(x, 'sharding', None)
    if not isinstance(at, NamedSharding):
      return None
    spec = (*at.spec, *(None,) * (x.ndim - len(at.spec)))
    return NamedSharding(at.mesh, PartitionSpec(*spec[is_stacked:]))

  # None is no leaf of a tree, so these are lists.
  path = [[own(x) for x in jax.tree.leaves(tree)], jax.tree.leaves(half)]

  def prepare(tree, number=None):
    if is_stacked:
      tree = jax.tree.map(lambda x: x[number], tree)
    leaves, treedef = jax.tree.flatten(_cast(model, tree))
    # Cast where they are, so that half as much is sent. Then split over more of
    # `tensor` before they are made whole over `fsdp`: the compiler knows how to
    # do either, but would gather all of an array for both at once.
    for places in path:
      leaves = [
        x if at is None else jax.lax.with_sharding_constraint(x, at)
        for x, at in zip(leaves, places, strict=True)
      ]
    return treedef.unflatten(leaves)

  return jax.jit(prepare, out_shardings=place)
