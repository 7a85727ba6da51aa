"""What a lowered program computes, read from its StableHLO module.

StableHLO is what JAX gives to a compiler. Where there is no compiler, as for
GPUs on a machine that has none, it still tells the matrix products and how
often they run. It does not tell what the compiler will make of them: memory,
and what is sent, are not in it.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
import re
from typing import Any

_KERNELS = '__cudnn$', '__gpu$xla.gpu.triton', 'tpu_custom_call'


@dataclasses.dataclass(frozen=True)
class Module:
  """A lowered program.

  Attributes:
    module: `lowered.compiler_ir('stablehlo')`.
    mesh: The axes of the mesh and their sizes.
    trips: How often a loop runs whose number of trips is data.
  """

  module: Any
  mesh: Mapping[str, int]
  trips: int = 1

  def flops(self) -> float:
    """Operations of all matrix products on one device; an estimate.

    What the compiler will split is taken to be split evenly over all axes of
    the mesh that are left to it.
    """
    return self._main[0]

  def kernels(self) -> float:
    """How many kernels run, whose operations StableHLO does not tell."""
    return self._main[1]

  @functools.cached_property
  def _functions(self) -> dict[str, Any]:
    return {
      one.attributes['sym_name'].value: one
      for one in self.module.body.operations
      if one.operation.name == 'func.func'
    }

  @functools.cached_property
  def _main(self) -> tuple[float, float]:
    return self._of_function('main', frozenset())

  @functools.cached_property
  def _known(self) -> dict[tuple[str, frozenset[str]], tuple[float, float]]:
    return {}

  def _of_function(
    self, name: str, manual: frozenset[str]
  ) -> tuple[float, float]:
    """Products and kernels of a function, which many may call."""
    key = name, manual
    if key not in self._known:
      self._known[key] = self._of_regions(self._functions[name], manual)
    return self._known[key]

  def _of_regions(
    self, operation: Any, manual: frozenset[str]
  ) -> tuple[float, float]:
    return _sum(self._of_region(one, manual) for one in operation.regions)

  def _of_region(
    self, region: Any, manual: frozenset[str]
  ) -> tuple[float, float]:
    return _sum(
      self._of_operation(one.operation, manual)
      for block in region.blocks
      for one in block.operations
    )

  def _of_operation(
    self, one: Any, manual: frozenset[str]
  ) -> tuple[float, float]:
    """Products and kernels of one operation, and of all that it runs.

    Args:
      one: The operation.
      manual: Axes of the mesh along which shapes are those of one device.
    """
    if one.name == 'stablehlo.dot_general':
      left = math.prod(
        size for axis, size in self.mesh.items() if axis not in manual
      )
      return _products(one) / left, 0.0
    if one.name == 'stablehlo.custom_call':
      name = one.attributes['call_target_name'].value
      return 0.0, float(name.startswith(_KERNELS))
    if one.name == 'func.call':
      return self._of_function(one.attributes['callee'].value, manual)
    if one.name == 'stablehlo.while':
      condition, body = one.regions
      times = _trips_of(condition, self.trips)
      flops, kernels = self._of_region(body, manual)
      return times * flops, times * kernels
    if one.name in ('stablehlo.case', 'stablehlo.if'):
      # As in `hlo`: the others are for what is rare.
      found = [self._of_region(branch, manual) for branch in one.regions]
      return min([work for work in found if any(work)] or found)
    if one.name == 'sdy.manual_computation':
      named = re.findall(r'"([^"]+)"', str(one.attributes['manual_axes']))
      return self._of_regions(one, manual | set(named))
    return self._of_regions(one, manual)


def _sum(parts: Iterator[tuple[float, float]]) -> tuple[float, float]:
  flops = kernels = 0.0
  for one in parts:
    flops, kernels = flops + one[0], kernels + one[1]
  return flops, kernels


def _products(one: Any) -> float:
  """Operations of a `dot_general`, from the shapes that it has."""
  left = one.operands[0].type.shape
  numbers = str(one.attributes['dot_dimension_numbers'])
  found = re.search(r'lhs_contracting_dimensions = \[([\d, ]*)\]', numbers)
  axes = [int(n) for n in found[1].split(',') if n.strip()] if found else []
  summed = math.prod(left[axis] for axis in axes)
  return 2.0 * math.prod(one.results[0].type.shape) * summed


def _trips_of(condition: Any, otherwise: int) -> int:
  """How often a loop runs: a counter from 0 is compared with a constant."""
  for block in condition.blocks:
    for one in block.operations:
      if one.operation.name != 'stablehlo.compare':
        continue
      direction = str(one.attributes['comparison_direction'])
      limit = _constant(one.operands[1])
      if 'LT' in direction and limit is not None:
        return limit
  return otherwise


def _constant(value: Any) -> int | None:
  """A number that is written in the program; None if the value is another."""
  one = value.owner
  while getattr(one, 'name', '') == 'sdy.sharding_constraint':
    one = one.operands[0].owner
  if getattr(one, 'name', '') != 'stablehlo.constant':
    return None
  found = re.search(r'dense<(\d+)> : tensor<', str(one.attributes['value']))
  return int(found[1]) if found else None
