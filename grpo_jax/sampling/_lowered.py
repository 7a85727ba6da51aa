"""The programs of the engine, lowered from shapes alone.

Nothing here needs a device: what is lowered can be compiled for machines that
are not there.
"""

from collections.abc import Callable
from collections.abc import Sequence
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
) -> dict[str, Callable[[], Any]]:
  """See `LocalEngine.lowering`.

  Args:
    sampler: What the programs are compiled for; with a mesh.
    schedule: The numbers of rows.
    params: The learner's, as shapes, dtypes and shardings.
    columns: The lengths that the rows' caches may have, tokens, ascending.
  """
  mesh = sampler.mesh
  assert mesh is not None
  read = decoding_params(sampler, params)
  split = sharding.rows(mesh)

  def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)

  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  prompts = _sampler.Prompts(
    tokens=numbers(schedule.prompts, schedule.prompt_tokens),
    length=numbers(schedule.prompts),
    index=numbers(schedule.prompts),
    key=jax.eval_shape(lambda: jax.random.key(0)),
  )
  rows = abstract_rows(sampler, read, prompts, columns[-1])

  def prepare():
    made = _sampler.prepare_params(sampler.model, params, mesh)
    return made.lower(params)

  def prefill():
    given = read, prompts, scalar, columns[0]
    return _sampler.prefill.lower(sampler, *given)

  def decode():
    return _sampler.decode.lower(sampler, read, rows, scalar, scalar, scalar)

  def regroup():
    row = numbers(schedule.sizes[0])
    lane = numbers(schedule.sizes[0] // schedule.narrow)
    return _sampler.regroup.lower(sampler, [rows], lane, row, columns[-1])

  found = {'prepare': prepare, 'prefill': prefill, 'decode': decode}
  return {**found, 'regroup': regroup} if schedule.sizes else found


def decoding_params(sampler: _sampler.Sampler, params: Any) -> Any:
  """What `sampler_params` makes of the learner's parameters, as shapes."""
  model, mesh = sampler.model, sampler.mesh
  shapes = jax.eval_shape(
    lambda params: _sampler.sampler_params(model, params), params
  )
  place = sharding.of_params(
    mesh, shapes, model.logical_axes, sharding.DECODING_RULES
  )
  return _placed(shapes, place)


def abstract_rows(
  sampler: _sampler.Sampler,
  params: Any,
  prompts: _sampler.Prompts,
  columns: int,
) -> _sampler.Rows:
  """The rows that `prefill` returns: shapes, dtypes and shardings."""
  mesh = sampler.mesh
  assert mesh is not None
  scalar = jax.ShapeDtypeStruct((), jnp.int32)

  def first(params, prompts, limit):
    with sharding.use(mesh):
      return sampler.prefill(params, prompts, limit, columns)[0]

  rows = jax.eval_shape(first, params, prompts, scalar)
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
