"""Functions of parameters and rows, called on every data shard by itself.

Each shard has some of the rows, and a part of the parameters. It gathers the
weights of a layer when it needs them, and sends back its sum of their gradient:
nothing else crosses from one shard to another. The compiler, left to itself,
would reduce gradients in every chunk of tokens, and gather activations.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from grpo_jax import sharding
from grpo_jax import shards
from grpo_jax.learner.types import Learner
from grpo_jax.models.layout import Layout

Function = Callable[[Learner, Sequence[Any], Any, Layout], tuple[list, Any]]


def run(
  function: Function,
  learner: Learner,
  trees: Sequence[Any],
  given: Any,
  layout: Layout,
  number: int = 0,
) -> tuple[list, Any]:
  """Calls a function on every data shard, with the rows of that shard.

  Args:
    function: `(learner, trees, given, layout) -> (like_params, sums)`.
    learner: See `types.Learner`.
    trees: Trees like the trained parameters. A shard gets its parts of them.
    given: Arrays that every shard gets as they are.
    layout: Micro-batches, [N, rows, ...], of which a shard gets its rows.
    number: How many trees there are in `like_params`.

  Returns:
    What the function returned, each array the sum over the shards.
    `like_params` is a list of trees like the trained parameters; of a parameter
    that is split over shards each has its part. The function must return such a
    part as the sum over the axes that split it, as `shards.gather` does.
  """
  mesh, frozen = learner.mesh, learner.frozen
  if sharding.row_shards(mesh) * mesh.shape['context'] == 1:
    return function(learner.beside(frozen), trees, given, layout)

  def places(tree):
    return sharding.of_params(mesh, tree, learner.logical_axes)

  at_frozen, at_params = places(frozen), places(trees[0])
  of_frozen, of_params = shards.specs(at_frozen), shards.specs(at_params)
  everywhere = PartitionSpec()

  def on_shard(frozen, trees, given, layout):
    if learner.takes_shards:
      bound = learner.beside(frozen)
    else:
      bound = learner.beside(_whole(frozen, at_frozen))
      bound = _gathering(bound, at_params)
    like_params, sums = function(bound, trees, given, layout)
    like_params = [_summed(tree, of_params) for tree in like_params]
    return like_params, shards.sum_over(sums)

  return shards.call(
    on_shard,
    in_specs=(of_frozen, [of_params] * len(trees), everywhere, _cut(layout)),
    out_specs=([of_params] * number, everywhere),
  )(frozen, list(trees), given, layout)


def _cut(layout: Layout) -> Layout:
  """Which part of each array of micro-batches [N, rows, ...] a shard gets."""
  rows = PartitionSpec(None, sharding.ROW_AXES)
  columns = PartitionSpec(None, sharding.ROW_AXES, 'context')
  cut = dict.fromkeys(('tokens', 'position', 'segment', 'parent'), columns)
  whole = dict.fromkeys(('column', 'target', 'completion'), rows)
  return dataclasses.replace(layout, **cut, **whole)


def _whole(tree: Any, places: Any) -> Any:
  """All parameters of a tree, gathered."""
  return jax.tree.map(lambda x, at: shards.gather(x, at.spec), tree, places)


def _gathering(learner: Learner, places: Any) -> Learner:
  """A learner whose model gets whole parameters, all of them at once."""

  def gathered(score):
    return lambda params, *args: score(_whole(params, places), *args)

  return learner.with_scores(gathered)


def _summed(tree: Any, specs: Any) -> Any:
  """Gradients summed over the shards that have the same part of a parameter."""
  sizes = jax.sharding.get_abstract_mesh().shape
  leaves, treedef = jax.tree.flatten(tree)
  missing = [
    tuple(
      name
      for name in (*sharding.ROW_AXES, 'context')
      if name not in spec and sizes[name] > 1
    )
    for spec in treedef.flatten_up_to(specs)
  ]
  # All that is summed over the same axes at once: few large messages.
  for axes in dict.fromkeys(missing):
    chosen = [i for i, names in enumerate(missing) if names == axes]
    summed = lax.psum([leaves[i] for i in chosen], axes)
    for i, leaf in zip(chosen, summed, strict=True):
      leaves[i] = leaf
  return treedef.unflatten(leaves)
