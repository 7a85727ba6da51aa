"""The programs of the engine, lowered from shapes alone.

Nothing here needs a device: what is lowered can be compiled for machines that
are not there.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from grpo_jax.engines.local import calls
from grpo_jax.engines.local import contexts
from grpo_jax.engines.local import next_token
from grpo_jax.engines.local import prepare as prepare_lib
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.engines.local.schedule import Schedule
from grpo_jax.mesh import sharding
from grpo_jax.models import attention


def programs(
  sampler: sampler_lib.Sampler,
  schedule: Schedule,
  params: Any,
  columns: Sequence[int],
  waits: bool,
) -> dict[str, Callable[[], Any]]:
  """See `LocalEngine.lowering`.

  Args:
    sampler: What the programs are compiled for; with a mesh.
    schedule: The numbers of rows.
    params: The learner's, as shapes, dtypes and shardings.
    columns: The lengths that the rows' caches may have, tokens, ascending.
    waits: Whether prompts wait. Then rows that have ended make room for some.
  """
  mesh = sampler.mesh
  assert mesh is not None
  read = decoding_params(sampler.model, params, mesh)
  admits = waits and schedule.admitted > 0
  some = dataclasses.replace(schedule, prompts=schedule.admitted)
  first = abstract_rows(sampler, schedule, params, columns[-1])
  # While prompts wait, the largest rows are those that some have joined.
  rows = first
  if admits:
    more = abstract_rows(sampler, some, params, columns[0])
    joined = schedule.sizes[0] + schedule.new_lanes(0).size
    rows = _regrouped(sampler, schedule, [first, more], joined, columns[-1])
    rows = max(first, rows, key=_caches)

  def prepare():
    return prepare_lib.Preparation(sampler.model, params, mesh).lower(
      params, mesh
    )

  def prefill():
    prompts = _prompts(sampler, some if admits else schedule)
    arguments = read, prompts, columns[0]
    return sharding.lower(mesh, sampler_lib.prefill, sampler, *arguments)

  def decode():
    scalars = (_SCALAR,) * 2
    return sharding.lower(
      mesh, sampler_lib.decode, sampler, read, rows, *scalars
    )

  def grow():
    short = abstract_rows(sampler, schedule, params, columns[-2])
    number = _numbers(mesh, schedule.prompts * schedule.group)
    lane = _numbers(mesh, schedule.prompts)
    return sharding.lower(
      mesh, sampler_lib.regroup, sampler, [short], lane, number, columns[-1]
    )

  def regroup():
    parts = [rows, more] if admits else [rows]
    number = joined if admits else schedule.sizes[0]
    place = _places(schedule, mesh, number)
    return sharding.lower(
      mesh, sampler_lib.regroup, sampler, parts, *place, columns[-1]
    )

  found = {'prepare': prepare, 'prefill': prefill, 'decode': decode}
  if len(columns) > 1:
    found['grow'] = grow
  return {**found, 'regroup': regroup} if schedule.sizes else found


def programs_of_calls(
  made: contexts.Programs, cache: Any, params: Any
) -> dict[str, Callable[[], Any]]:
  """See `LocalEngine.lowering_of_calls`.

  Args:
    made: What they are compiled for; with a mesh.
    cache: Of the pool, as shapes, dtypes and shardings.
    params: The learner's, likewise.
  """
  mesh: Any = made.mesh
  rows = jax.tree.leaves(cache)[0].shape[0]
  read = decoding_params(made.model, params, mesh)

  def prepare():
    return prepare_lib.Preparation(made.model, params, mesh).lower(params, mesh)

  def read_piece():
    some, piece = calls.longest_read(read, mesh, rows)
    given = [_numbers(mesh, some, *more) for more in ((), (piece,), (), ())]
    reading = contexts.Programs(made.model, mesh)
    return sharding.lower(mesh, contexts.read, reading, read, cache, *given)

  def decode():
    turns = contexts.Turns(
      *(_numbers(mesh, rows) for _ in range(3)),
      ended=_numbers(mesh, rows, dtype=jnp.bool_),
      words=_numbers(mesh, rows, 2, dtype=jnp.uint32),
      numbers=jax.tree.map(
        lambda dtype: _numbers(mesh, rows, dtype=dtype),
        next_token.dtypes(made.choices),
      ),
    )
    scalars = (_SCALAR,) * 2
    return sharding.lower(
      mesh, contexts.decode, made, read, cache, turns, *scalars
    )

  return {'prepare': prepare, 'read': read_piece, 'decode': decode}


def _places(schedule: Schedule, mesh: Any, number: int) -> tuple[Any, Any]:
  """The numbers of lanes and rows that regrouping is given."""
  return _numbers(mesh, number // schedule.narrow), _numbers(mesh, number)


def _regrouped(
  sampler: sampler_lib.Sampler,
  schedule: Schedule,
  parts: list[sampler_lib.Rows],
  number: int,
  columns: int,
) -> sampler_lib.Rows:
  """So many rows of some parts in narrow lanes, as shapes and shardings."""
  mesh = sampler.mesh

  def run(parts, lane, row):
    with sharding.use(mesh):
      return sampler.regroup(parts, lane, row, columns)

  shapes = jax.eval_shape(run, parts, *_places(schedule, mesh, number))
  return _placed(shapes, _shardings(sampler, shapes))


def _caches(rows: sampler_lib.Rows) -> int:
  """Numbers in the caches of rows."""
  return sum(x.size for x in jax.tree.leaves((rows.prompt_cache, rows.cache)))


_SAMPLER_PARAMS = jax.jit(prepare_lib.sampler_params, static_argnums=0)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def _numbers(mesh: Any, *shape: int, dtype: Any = jnp.int32) -> Any:
  """Numbers of rows, which lie where the rows do."""
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.rows(mesh))


def _prompts(
  sampler: sampler_lib.Sampler, schedule: Schedule
) -> sampler_lib.Prompts:
  mesh, number = sampler.mesh, schedule.prompts
  return sampler_lib.Prompts(
    tokens=_numbers(mesh, number, schedule.prompt_tokens),
    length=_numbers(mesh, number),
    keys=_numbers(mesh, number, schedule.group, 2, dtype=jnp.uint32),
    numbers=jax.tree.map(
      lambda dtype: _numbers(mesh, number, dtype=dtype),
      next_token.dtypes(sampler.choices),
    ),
  )


def decoding_params(model: Any, params: Any, mesh: Any) -> Any:
  """What `sampler_params` makes of the learner's parameters, as shapes."""
  # Without shardings, so that it is traced once for all meshes.
  bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  shapes = _SAMPLER_PARAMS.eval_shape(model, bare)
  place = sharding.param_shardings(
    mesh, shapes, model.logical_axes, sharding.DECODING_RULES
  )
  return _placed(shapes, place)


def abstract_rows(
  sampler: sampler_lib.Sampler, schedule: Schedule, params: Any, columns: int
) -> sampler_lib.Rows:
  """The rows that `prefill` returns: shapes, dtypes and shardings.

  Args:
    sampler: What the programs are compiled for; with a mesh.
    schedule: The numbers of rows.
    params: The learner's, as shapes, dtypes and shardings.
    columns: The length of their caches.
  """
  mesh = sampler.mesh
  assert mesh is not None

  def first(params, prompts):
    with sharding.use(mesh):
      return sampler.prefill(params, prompts, columns)[0]

  read = decoding_params(sampler.model, params, mesh)
  rows = jax.eval_shape(first, read, _prompts(sampler, schedule))
  return _placed(rows, _shardings(sampler, rows))


def _shardings(sampler: sampler_lib.Sampler, rows: sampler_lib.Rows) -> Any:
  """The shardings of rows."""
  mesh = sampler.mesh
  assert mesh is not None
  config = sampler.model.config
  heads = attention.cache_axes(config.attention, sharding.platform(mesh)).heads

  def place(x):
    return sharding.rows(mesh) if x.ndim else sharding.replicated(mesh)

  def place_cache(kind, layer):
    axes = sampler_lib.heads_axes(kind, heads)
    specs = (
      sharding.cache_spec(mesh, x.shape, axis, sampler.everywhere)
      for x, axis in zip(layer, axes, strict=bool(layer))
    )
    return tuple(NamedSharding(mesh, spec) for spec in specs)

  caches = {
    name: list(map(place_cache, config.kinds, getattr(rows, name)))
    for name in ('cache', 'prompt_cache')
  }
  return jax.tree.map(place, rows)._replace(**caches)


def _placed(shapes: Any, place: Any) -> Any:
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    place,
  )
