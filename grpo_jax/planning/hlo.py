"""What a program computes and sends, read from its HLO or StableHLO.

HLO is the form in which XLA prints what it has compiled. The compiler's own
counts have the body of each loop once; here every instruction counts as often
as it runs. StableHLO is what JAX hands to the compiler: all that there is of a
program for GPUs that are not there.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import math
import re
from typing import Any

import numpy as np

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
)
_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # of others, the name has them
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\](?:\{[^}]*\})?')
_LINE = re.compile(r'\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$')
_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_LOOP = re.compile(r'condition=%?([\w.\-]+), body=%?([\w.\-]+)')
_CALLED = re.compile(r'(?:calls|to_apply)=%?([\w.\-]+)')
_BRANCHES = re.compile(
  r'(?:branch_computations=\{([^}]*)\}|'
  r'true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+))'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program.

  Attributes:
    kind: One of `KINDS`.
    dtype: Of the largest array that results, as HLO calls it.
    bytes: Of the result on one device, of one execution.
    times: How often it runs.
    group: How many devices take part in each group; between slices, how many
      slices, since each device talks to one of each.
    crosses: Whether it sends between slices.
  """

  kind: str
  dtype: str
  bytes: int
  times: float
  group: int
  crosses: bool = False

  @property
  def sent(self) -> tuple[float, float]:
    """Bytes that a device sends inside its slice, and to other slices.

    Its group is taken to be a ring.
    """
    size = self.bytes * self.times
    if self.kind == 'all-reduce':
      size *= 2
    if self.kind == 'reduce-scatter':
      size *= self.group  # its operand
    if self.kind != 'collective-permute':
      size *= (self.group - 1) / self.group
    return (0.0, size) if self.crosses else (size, 0.0)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of HLO: `name = shape opcode(rest`."""

  name: str
  shape: str
  opcode: str
  rest: str

  @property
  def operands(self) -> list[str]:
    """Their names."""
    return re.findall(r'%([\w.\-]+)', self.rest.partition(')')[0])


def dimensions(shape: str) -> tuple[int, ...]:
  """The axes of the first array in a shape.

  >>> dimensions('bf16[8,128]{1,0:T(8,128)(2,1)}')
  (8, 128)
  """
  found = _ARRAY.search(shape)
  if found is None:
    return ()
  return tuple(int(n) for n in found[2].split(',') if n)


def arrays(shape: str) -> list[tuple[str, int]]:
  """The dtype and the bytes of each array in a shape.

  >>> arrays('(f32[2,3]{1,0}, bf16[4])')
  [('f32', 24), ('bf16', 8)]
  """
  found = []
  for dtype, axes in _ARRAY.findall(shape):
    digits = re.search(r'\d+', dtype)
    bits = _BITS.get(dtype) or (int(digits[0]) if digits else 0)
    number = math.prod(int(n) for n in axes.split(',') if n)
    found.append((dtype, number * bits // 8))
  return found


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    text: `compiled.as_text()`.
    trips: How often a loop runs whose number of trips is data.
    devices: How many of a slice it runs on. A program for several slices names
      the devices of one.
  """

  text: str
  trips: int = 1
  devices: int = 1

  @functools.cached_property
  def _computations(self) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the first."""
    found: dict[str, list[Instruction]] = {}
    entry, current = '', None
    for line in self.text.splitlines():
      if line[:1] not in ('', ' ', '}') and (head := _HEAD.match(line)):
        current = found.setdefault(head[2], [])
        entry = head[2] if head[1] else entry
      elif current is not None and (one := _LINE.match(line)):
        current.append(Instruction(*one.groups()))
    return found, entry

  @functools.cached_property
  def times(self) -> dict[str, float]:
    """How often each computation runs; of a conditional, the usual branch.

    That is the lightest, because the others are for what is rare: more experts
    chosen on one device than there is room for. But not one without products,
    if another has some: in it nothing needs to be computed.
    """
    computations, entry = self._computations
    found = dict.fromkeys(computations, 0.0)

    def visit(name: str, times: float):
      if name in found:
        found[name] += times
        for called, number in self._called(name):
          visit(called, times * number)

    visit(entry, 1.0)
    return found

  def _called(self, name: str) -> Iterator[tuple[str, int]]:
    """What a computation calls, and how often."""
    for one in self._computations[0].get(name, ()):
      if one.opcode == 'while' and (loop := _LOOP.search(one.rest)):
        yield loop[2], self._trips_of(one, loop[1])
        continue
      for called in _CALLED.findall(one.rest):
        yield called, 1
      if branches := _BRANCHES.search(one.rest):
        several, *two = branches.groups()
        names = several.split(',') if several else two
        yield self._usual([x.strip().lstrip('%') for x in names]), 1

  def _usual(self, branches: list[str]) -> str:
    """The lightest branch; of those that multiply, if any does."""
    weights = {name: self._weight(name) for name in branches}
    working = [name for name in branches if weights[name][0]]
    return min(working or branches, key=weights.__getitem__)

  def _weight(self, name: str) -> tuple[float, int]:
    """Operations of a computation, with what it calls, and its lines."""
    lines = self._computations[0].get(name, [])
    shapes = {one.name: one.shape for one in lines}
    flops, number = sum(flops_of(one, shapes) for one in lines), len(lines)
    for called, times in self._called(name):
      inside, more = self._weight(called)
      flops, number = flops + times * inside, number + more
    return flops, number

  def _trips_of(self, loop: Instruction, condition: str) -> int:
    """How often the body of a loop runs."""
    if known := _TRIPS.search(loop.rest):
      return int(known[1])
    # A counter from 0 that is compared with a constant.
    lines = self._computations[0].get(condition, [])
    constants = {
      one.name: int(one.rest.partition(')')[0])
      for one in lines
      if one.opcode == 'constant' and one.shape.startswith(('s32[]', 'u32[]'))
    }
    for one in lines:
      if one.opcode == 'compare' and 'direction=LT' in one.rest:
        limits = [constants[x] for x in one.operands if x in constants]
        if limits:
          return limits[-1]
    return self.trips

  def instructions(self) -> Iterator[tuple[Instruction, float, dict[str, str]]]:
    """Each instruction that runs, how often, and the shapes around it."""
    for name, lines in self._computations[0].items():
      if times := self.times[name]:
        shapes = {one.name: one.shape for one in lines}
        for one in lines:
          yield one, times, shapes

  def collectives(self) -> list[Collective]:
    """All collectives that run."""
    found: list[Collective] = []
    chains: dict[tuple[str, ...], int] = {}
    for name, lines in self._computations[0].items():
      times = self.times[name]
      for one in lines if times else ():
        if between := _between_slices(one, times):
          found.append(between)
        kind = one.opcode.removesuffix('-start')
        if kind not in KINDS:
          continue
        made = self._collective(one, kind, times, name)
        # A collective that a TPU hides behind other work is printed in every
        # step of that work.
        if chain := _chain(one):
          if chain in chains:
            place = chains[chain]
            found[place] = max(found[place], made, key=lambda x: x.times)
            continue
          chains[chain] = len(found)
        found.append(made)
    return found

  def _collective(
    self, one: Instruction, kind: str, times: float, computation: str
  ) -> Collective:
    parts = arrays(one.shape)
    if one.opcode != kind and kind != 'all-reduce':
      # Operands, then results, and perhaps counters.
      parts = [part for part in parts if part[1] > 4]
      parts = parts[len(parts) // 2 :] or arrays(one.shape)
    size = sum(size for _, size in parts)
    dtype = max(parts, key=lambda part: part[1])[0]
    group = group_size(one.rest) or self.devices
    if kind == 'all-reduce' and computation.startswith('all-reduce-scatter'):
      kind, size = 'reduce-scatter', size // group
    return Collective(kind, dtype, size, times, group)

  def flops(self) -> float:
    """Operations of all matrix products that run, on one device.

    Kernels count with what their authors tell the compiler, if they do.
    """
    return sum(
      times * flops_of(one, shapes)
      for one, times, shapes in self.instructions()
    )

  def kernels(self) -> float:
    """How many kernels run of which the compiler knows no operations."""
    return sum(
      times
      for one, times, _ in self.instructions()
      if _is_kernel(one) and not _told_flops(one)
    )


def _between_slices(one: Instruction, times: float) -> Collective | None:
  """What libtpu sends to other slices: it is a pair of `send` and `recv`.

  The attributes of both tell the kind, and which slices take part; the shape of
  `recv` is the result, beside a context and a token.
  """
  told = re.search(r'_xla_megascale_transfer_type="(\w+)"', one.rest)
  if one.opcode != 'recv' or told is None:
    return None
  kind = told[1].lower().replace('_', '-')
  # As in "{1,2}x{0:3}" or {{100000,200000},...}; of pairs {{1->2},...} two.
  slices = re.search(r'_xla_megascale_target="?\{+([\d,]+)\}', one.rest)
  *parts, _, _ = arrays(one.shape)
  return Collective(
    'collective-permute' if kind == 'one-to-one' else kind,
    parts[0][0],
    sum(size for _, size in parts),
    times,
    len(slices[1].split(',')) if slices else 2,
    crosses=True,
  )


def _chain(one: Instruction) -> tuple[str, ...] | None:
  """What all lines of one hidden collective have in common."""
  chain = re.search(r'chain_id="(\w+)"', one.rest)
  channel = re.search(r'channel_id=(\d+)', one.rest)
  return (chain[1], channel[1]) if chain and channel else None


def group_size(rest: str) -> int | None:
  """How many devices take part in each group of a collective.

  Args:
    rest: What stands behind the opcode.

  Returns:
    None if all devices are one group.

  >>> group_size('x), replica_groups=[2,4]<=[2,4]T(1,0), dims={0}')
  4
  >>> group_size('x), replica_groups={{0,1},{2,3}}, a=b')
  2
  >>> group_size("x), replica_groups=mesh['a'=4,'b'=3] {'b','a':(1)2}, a=b")
  6
  """
  if iota := re.search(r'replica_groups=\[([\d,]+)\]<=', rest):
    return int(iota[1].split(',')[-1])
  if named := re.search(r'replica_groups=mesh\[(.*?)\].*?\{(.*?)\}', rest):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    # Of an axis a part may be named, by what lies before it and its size.
    along = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[name]) for name, part in along)
  listed = re.search(
    r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest
  )
  return len(listed[1].split(',')) if listed else None


def flops_of(one: Instruction, shapes: dict[str, str]) -> float:
  """Operations of one instruction, of one execution.

  Args:
    one: The instruction.
    shapes: Of the instructions of its computation, by name.
  """
  if one.opcode == 'dot':
    left = dimensions(shapes.get(one.operands[0], ''))
    summed = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', one.rest)
    axes = [int(n) for n in summed[1].split(',') if n] if summed else []
    return 2.0 * math.prod(dimensions(one.shape)) * math.prod(
      left[axis] for axis in axes
    )  # fmt: skip
  if one.opcode == 'convolution':
    return _convolution(one, shapes)
  return _told_flops(one)


def _is_kernel(one: Instruction) -> bool:
  return one.opcode == 'custom-call' and 'tpu_custom_call' in one.rest


def _told_flops(one: Instruction) -> float:
  """What a kernel says of itself; 0 if it says nothing, or is none."""
  if not _is_kernel(one):
    return 0.0
  told = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', one.rest)
  return float(told[1]) if told else 0.0


def _convolution(one: Instruction, shapes: dict[str, str]) -> float:
  """Operations of a convolution, which is how a TPU computes products."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', one.rest)
  if labels is None:
    return 0.0
  left, kernel, result = (
    dict(zip(names, dimensions(shape), strict=True))
    for names, shape in zip(
      labels.groups(),
      (
        shapes.get(one.operands[0], ''),
        shapes.get(one.operands[1], ''),
        one.shape,
      ),
      strict=True,
    )
  )
  window = re.search(r'window=\{([^}]*)\}', one.rest)
  fields = dict(re.findall(r'(\w+)=(\S+)', window[1])) if window else {}
  pairs = 1
  for axis, name in enumerate(sorted(set(kernel) - {'i', 'o'}, key=int)):
    pairs *= _pairs(left[name], kernel[name], result[name], fields, axis)
  return 2.0 * result['b'] * result['f'] * kernel['i'] * pairs


def _pairs(
  inputs: int, kernel: int, results: int, window: dict[str, str], axis: int
) -> int:
  """How many places of a result and a kernel meet an input, along an axis."""

  def number(name: str, usual: int) -> int:
    parts = window.get(name, '').split('x')
    return int(parts[axis].partition('_')[0]) if parts[0] else usual

  place = (
    np.arange(results)[:, None] * number('stride', 1)
    + np.arange(kernel)[None] * number('rhs_dilate', 1)
    - number('pad', 0)
  )
  dilation = number('lhs_dilate', 1)
  inside = (place >= 0) & (place <= (inputs - 1) * dilation)
  return int(np.sum(inside & (place % dilation == 0)))


_KERNELS = '__cudnn$', '__gpu$xla.gpu.triton', 'tpu_custom_call'


def lowered_work(
  module: Any, mesh: Mapping[str, int], trips: int = 1
) -> tuple[float, float]:
  """What a lowered program computes on one device; an estimate.

  What the compiler will split is taken to be split evenly over all axes of the
  mesh that are left to it.

  Args:
    module: `lowered.compiler_ir('stablehlo')`.
    mesh: The axes of the mesh and their sizes.
    trips: How often a loop runs whose number of trips is data.

  Returns:
    Operations of all matrix products, and how many kernels run, whose
    operations StableHLO does not tell.
  """
  functions = {
    one.attributes['sym_name'].value: one
    for one in module.body.operations
    if one.operation.name == 'func.func'
  }

  @functools.cache  # many may call a function
  def in_function(name: str, manual: frozenset[str]):
    return inside(functions[name].regions, manual)

  # Along the axes `manual` of the mesh, shapes are those of one device.
  def inside(regions: Any, manual: frozenset[str]) -> tuple[float, float]:
    flops = kernels = 0.0
    for region in regions:
      for block in region.blocks:
        for one in block.operations:
          more, calls = work(one.operation, manual)
          flops, kernels = flops + more, kernels + calls
    return flops, kernels

  def work(one: Any, manual: frozenset[str]) -> tuple[float, float]:
    if one.name == 'stablehlo.dot_general':
      left = math.prod(n for axis, n in mesh.items() if axis not in manual)
      return _products(one) / left, 0.0
    if one.name == 'stablehlo.custom_call':
      name = one.attributes['call_target_name'].value
      return 0.0, float(name.startswith(_KERNELS))
    if one.name == 'func.call':
      return in_function(one.attributes['callee'].value, manual)
    if one.name == 'stablehlo.while':
      condition, body = one.regions
      times = _trips_of(condition, trips)
      flops, kernels = inside([body], manual)
      return times * flops, times * kernels
    if one.name in ('stablehlo.case', 'stablehlo.if'):
      # As in `Program`: the others are for what is rare.
      found = [inside([branch], manual) for branch in one.regions]
      return min([some for some in found if any(some)] or found)
    if one.name == 'sdy.manual_computation':
      named = re.findall(r'"([^"]+)"', str(one.attributes['manual_axes']))
      manual = manual | set(named)
    return inside(one.regions, manual)

  return in_function('main', frozenset())


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
