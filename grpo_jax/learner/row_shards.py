"""Functions of parameters and rows, called on every data shard by itself.

Each shard has some of the rows, and a part of the parameters. It gathers the
weights of a layer when it needs them, and sends back its sum of their gradient:
nothing else crosses from one shard to another. The compiler, left to itself,
would reduce gradients in every chunk of tokens, and gather activations.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from grpo_jax.learner import token_shards
from grpo_jax.learner.types import Learner
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import lora
from grpo_jax.models import stack
from grpo_jax.models.layout import Layout

# From the trained parameters that a shard has to what the model is given.
Join = Callable[[Any], Any]
Function = Callable[[Join, Sequence[Any], Any, Layout], tuple[list, Any, Any]]

_EVERYWHERE = PartitionSpec()


def run(
  function: Function,
  learner: Learner,
  frozen: Any,
  trees: Sequence[Any],
  given: Any,
  layout: Layout,
  number: int = 0,
  given_at: Any = _EVERYWHERE,
) -> tuple[list, Any, Any]:
  """Calls a function on every data shard, with the rows of that shard.

  Args:
    function: `(join, trees, given, layout) -> (like_params, of_tokens, sums)`.
      `join` makes of the trained parameters what `learner.scoring` takes: it
      adds the frozen ones and, unless the model gathers them itself, gathers
      all. What the gradient is of goes through it.
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    trees: Trees like the trained parameters. A shard gets its parts of them.
    given: Further arrays.
    layout: Micro-batches, [N, rows, ...], of which a shard gets its rows.
    number: How many trees there are in `like_params`.
    given_at: What each shard gets of `given`, as `token_shards.specs` tells it
      of a batch; of what is not named, all.

  Returns:
    What the function returned. `like_params` is a list of trees like the
    trained parameters, summed over the shards; of a parameter that is split
    over shards each has its part. The function must return such a part as the
    sum over the axes that split it, as `shards.gather` does. `of_tokens` are
    arrays [P,G,T], of which the function has `put` together what the shard has.
    `sums` are arrays that are summed.
  """
  mesh = learner.mesh
  if mesh.size == 1:
    join = functools.partial(lora.join, second=frozen)
    return function(join, trees, given, layout)

  def places(tree):
    return sharding.param_shardings(mesh, tree, learner.placement.logical_axes)

  at_frozen, at_params = places(frozen), places(trees[0])
  of_frozen, of_params = shards.specs(at_frozen), shards.specs(at_params)
  width = layout.target.shape[-1]

  def on_shard(frozen, trees, given, layout):
    if learner.scoring.takes_shards:
      join = functools.partial(lora.join, second=frozen)
    else:
      whole = _whole(frozen, at_frozen)
      join = lambda params: lora.join(_whole(params, at_params), whole)
    like_params, of_tokens, sums = function(join, trees, given, layout)
    like_params = [_summed(tree, of_params) for tree in like_params]
    of_tokens = lax.psum(of_tokens, token_shards.missing(width))
    return like_params, of_tokens, shards.sum_over(sums)

  return shards.call(
    on_shard,
    in_specs=(of_frozen, [of_params] * len(trees), given_at, _cut(layout)),
    out_specs=(
      [of_params] * number,
      shards.positions(mesh, width),
      _EVERYWHERE,
    ),
  )(frozen, list(trees), given, layout)


def filled(
  learner: Learner, layout: Layout, tokens: jax.Array, prompts: jax.Array
) -> Layout:
  """Micro-batches of ids, from those of `stack.number_tokens`.

  Args:
    learner: What stays the same from update to update.
    layout: Micro-batches, [N, rows, ...].
    tokens: i32[P,G,T], the ids of all completions.
    prompts: i32[P'], the prompts in the micro-batches.
  """
  rows = PartitionSpec(None, sharding.ROW_AXES)
  at_tokens = shards.positions(learner.mesh, tokens.shape[-1])

  def on_shard(tokens, layout):
    taken = lambda completion: token_shards.take(tokens, at_tokens, completion)
    return jax.lax.map(
      lambda rows: stack.fill(rows, taken(rows.completion)), layout
    )

  call = shards.call(on_shard, in_specs=(at_tokens, rows), out_specs=rows)
  return call(tokens[prompts], layout)


def _cut(layout: Layout) -> Layout:
  """Which part of each array of micro-batches [N, rows, ...] a shard gets."""
  rows = PartitionSpec(None, sharding.ROW_AXES)
  columns = PartitionSpec(None, sharding.ROW_AXES, 'context')
  of_columns = 'tokens', 'position', 'segment', 'parent', 'reach'
  of_slots = 'column', 'target', 'completion', 'first', 'count', 'own'
  places = dict.fromkeys(of_columns, columns) | dict.fromkeys(of_slots, rows)
  there = {x: at for x, at in places.items() if getattr(layout, x) is not None}
  return dataclasses.replace(layout, **there)


def _whole(tree: Any, places: Any) -> Any:
  """All parameters of a tree, gathered."""
  return jax.tree.map(lambda x, at: shards.gather(x, at.spec), tree, places)


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
