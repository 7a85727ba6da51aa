"""Compiles one program, or lowers it: `python -m grpo_jax.planning.worker`.

It reads a `compiling.Request` as JSON from standard input, and prints a
`compiling.Compiled` as JSON.
"""

import dataclasses
import json
import sys
import time
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax.config import plain_text
from grpo_jax.planning import compiling
from grpo_jax.planning import gpu_lowering
from grpo_jax.planning import hlo
from grpo_jax.planning import programs
from grpo_jax.planning import topologies


def answer(request: compiling.Request) -> compiling.Compiled:
  """Lowers and compiles the program of a request; for GPUs it only lowers."""
  config = config_lib.dataclass_from_dict(
    config_lib.Config, request.config, 'config'
  )
  topology = topologies.named(request.topology, request.slices)
  if not topology.is_tpu:
    return _lowered(config, topology, request.program)
  found = programs.lowered(config, topology, request.program)
  several = found.parts
  text = '\0'.join(f'{calls} {one.as_text()}' for one, calls in several)
  name = compiling.key(text, found.trips, request)
  result = compiling.kept(name)
  if result is None:
    parts = [_compiled(one, found.trips, topology) for one, _ in several]
    result = compiling.together(parts, [calls for _, calls in several])
    if not result.error or not result.fits:  # else it may go well next time
      compiling.keep(name, result)
  return result


def _compiled(
  lowered: Any, trips: int, topology: topologies.Topology
) -> compiling.Compiled:
  """What the compiler says."""
  start = time.monotonic()
  try:
    compiled = lowered.compile()
  except Exception as error:  # of one type, whatever is wrong
    said = ' '.join(plain_text.said(error).split())
    full = 'RESOURCE_EXHAUSTED' in said
    return compiling.Compiled(
      error=_needed(said) if full else said[:400],
      fits=not full,
      secs=time.monotonic() - start,
    )
  secs = time.monotonic() - start
  program = hlo.Program(compiled.as_text(), trips, topology.joined)
  memory = compiled.memory_analysis()
  return compiling.Compiled(
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    alias_bytes=memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    host_bytes=memory.host_argument_size_in_bytes,
    flops=program.flops(),
    kernels=program.kernels(),
    collectives=tuple(program.collectives()),
    secs=secs,
  )


def _lowered(
  config: config_lib.Config, topology: topologies.Topology, program: str
) -> compiling.Compiled:
  """What the program tells before it is compiled."""
  start = time.monotonic()
  mesh = topologies.mesh(topology, config.mesh)
  parts = []
  try:
    with gpu_lowering.without_a_gpu():
      found = programs.lowered(config, topology, program)
    for one, _ in found.parts:
      module = hlo.Module(one.compiler_ir('stablehlo'), mesh.shape, found.trips)
      parts.append(
        compiling.Compiled(
          flops=module.flops(), kernels=module.kernels(), only_lowered=True
        )
      )
  except Exception as error:  # of many types, whatever JAX or a kernel refuses
    said = ' '.join(plain_text.named(error).split())[:400]
    return compiling.Compiled(
      error=f'cannot be lowered for CUDA: {said}',
      secs=time.monotonic() - start,
      only_lowered=True,
    )
  whole = compiling.together(parts, [calls for _, calls in found.parts])
  return dataclasses.replace(whole, secs=time.monotonic() - start)


def _needed(said: str) -> str:
  """The compiler's sentence about memory, without what follows it."""
  start = said.find('RESOURCE_EXHAUSTED')
  return said[start : start + 300]


if __name__ == '__main__':
  # JAX's own cache keeps programs that run; these it could write, but not read.
  jax.config.update('jax_enable_compilation_cache', False)
  print(json.dumps(answer(compiling.Request(**json.load(sys.stdin))).to_json()))
