"""Which axes of a parameter make a matrix, in a tree of stacked parameters."""

from collections.abc import Callable
import math
from typing import Any
from typing import NamedTuple


class Matrix(NamedTuple):
  """The axes of a parameter, counted from its last (-1), as a linear map reads.

  A parameter may hold several matrices, of stacked layers or of experts: an
  axis that is not named here numbers them. An attention's weight [layers,
  width, heads, head] that maps the width to all heads has the inputs (-3,) and
  the outputs (-2, -1).

  Attributes:
    inputs: Axes that the map sums over; () for a bias or the scale of a norm.
    outputs: Axes of what it gives.
    hidden: Whether both sides are hidden units; False for an embedding and for
      the output layer, whose one side is the vocabulary.
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  hidden: bool = True


# From parameters, or a tree like them, to a tree of one `Matrix` for each.
Matrices = Callable[[Any], Any]


def sizes(shape: tuple[int, ...], matrix: Matrix) -> tuple[int, int]:
  """The numbers of inputs and outputs."""
  return (
    math.prod(shape[axis] for axis in matrix.inputs),
    math.prod(shape[axis] for axis in matrix.outputs),
  )
