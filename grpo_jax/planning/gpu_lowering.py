"""Lowers programs with cuDNN's attention on a machine that has no GPU.

JAX refuses this for two reasons, neither of which concerns what is lowered: it
asks the installed cuDNN for its version, and it takes every program that may be
split by a partitioner of its own to need devices. Here attention is split by
hand before (see `models/kernels/split.py`), so no partitioner runs.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

_CUDNN = 91000  # a version that has all that is asked for


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
  """Inside, JAX lowers for CUDA as if cuDNN were there; in the whole process.

  It changes private parts of JAX, so it is meant for a process that does
  nothing else, as `worker` does.
  """
  # Private: a later JAX may have them elsewhere, which `tests` would show.
  from jax._src import dispatch
  from jax._src.cudnn import fused_attention_stablehlo

  library: Any = fused_attention_stablehlo
  asked, need = (
    library.check_cudnn_version,
    set(dispatch.prim_requires_devices_during_lowering),
  )
  attention = {
    one
    for one in need
    if one.name == 'custom_partitioning' or 'dot_product_attention' in one.name
  }
  library.check_cudnn_version = lambda: _CUDNN
  dispatch.prim_requires_devices_during_lowering -= attention
  try:
    yield
  finally:
    library.check_cudnn_version = asked
    dispatch.prim_requires_devices_during_lowering |= attention
