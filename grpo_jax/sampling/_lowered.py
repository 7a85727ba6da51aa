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

from grpo_jax import sharding
from grpo_jax.models import attention
from grpo_jax.sampling import _sampler
from grpo_jax.sampling._schedule import Schedule


def programs(
  sampler: _sampler.Sampler,
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
  prompts = _prompts(schedule, mesh)
  rows = abstract_rows(sampler, schedule, params, columns[-1])

  def prepare():
    made = _sampler.prepare_params(sampler.model, params, mesh)
    return made.lower(params)

  def prefill():
    given = read, prompts, _SCALAR, columns[0]
    return _sampler.prefill.lower(sampler, *given)

  def decode():
    scalars = (_SCALAR,) * 3
    return _sampler.decode.lower(sampler, read, rows, *scalars)

  def regroup():
    parts, number = [rows], schedule.sizes[0]
    if waits and schedule.admitted:
      some = dataclasses.replace(schedule, prompts=schedule.admitted)
      parts.append(abstract_rows(sampler, some, params, columns[0]))
      number += schedule.new_lanes(0).size
    row = _numbers(mesh, number)
    lane = _numbers(mesh, number // schedule.narrow)
    return _sampler.regroup.lower(sampler, parts, lane, row, columns[-1])

  found = {'prepare': prepare, 'prefill': prefill, 'decode': decode}
  return {**found, 'regroup': regroup} if schedule.sizes else found


_SAMPLER_PARAMS = jax.jit(_sampler.sampler_params, static_argnums=0)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def _numbers(mesh: Any, *shape: int) -> Any:
  """Numbers of rows, which lie where the rows do."""
  return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.rows(mesh))


def _prompts(schedule: Schedule, mesh: Any) -> _sampler.Prompts:
  number = schedule.prompts
  return _sampler.Prompts(
    tokens=_numbers(mesh, number, schedule.prompt_tokens),
    length=_numbers(mesh, number),
    index=_numbers(mesh, number),
    key=jax.eval_shape(lambda: jax.random.key(0)),
  )


def decoding_params(model: Any, params: Any, mesh: Any) -> Any:
  """What `sampler_params` makes of the learner's parameters, as shapes."""
  # Without shardings, so that it is traced once for all meshes.
  bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  shapes = _SAMPLER_PARAMS.eval_shape(model, bare)
  place = sharding.of_params(
    mesh, shapes, model.logical_axes, sharding.DECODING_RULES
  )
  return _placed(shapes, place)


def abstract_rows(
  sampler: _sampler.Sampler, schedule: Schedule, params: Any, columns: int
) -> _sampler.Rows:
  """The rows that `prefill` returns: shapes, dtypes and shardings.

  Args:
    sampler: See `programs`.
    schedule: See `programs`.
    params: See `programs`.
    columns: The length of their caches.
  """
  mesh = sampler.mesh
  assert mesh is not None

  def first(params, prompts, limit):
    with sharding.use(mesh):
      return sampler.prefill(params, prompts, limit, columns)[0]

  read = decoding_params(sampler.model, params, mesh)
  rows = jax.eval_shape(first, read, _prompts(schedule, mesh), _SCALAR)
  heads = 3 - attention.cache_axis(
    sampler.model.config.attention, sharding.platform(mesh)
  )

  def place(x):
    if x.ndim == 4:
      spec = sharding.cache_spec(mesh, x.shape, heads)
      return NamedSharding(mesh, spec)
    return sharding.rows(mesh) if x.ndim else sharding.replicated(mesh)

  return _placed(rows, jax.tree.map(place, rows))


def _placed(shapes: Any, place: Any) -> Any:
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    place,
  )
