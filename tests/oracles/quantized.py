"""int8 and nf4 by their definitions, in NumPy; nothing here is of qwix."""

import numpy as np
from scipy import stats

# Appendix E of the QLoRA paper (arXiv:2305.14314).
NF4 = np.array([
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
  0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
  0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


def quantiles() -> np.ndarray:
  """The levels of `NF4` from what they mean: quantiles of N(0, 1).

  Seven below 0, eight above, and 0 itself, over the largest. The outermost
  leaves 1/32 and 1/30 of the two sides, on average, as it would be infinite.
  """
  most = 1 - (1 / 32 + 1 / 30) / 2
  above = stats.norm.ppf(np.linspace(most, 0.5, 9)[:-1])
  below = -stats.norm.ppf(np.linspace(most, 0.5, 8)[:-1])
  return np.sort(np.concatenate((below, [0.0], above))) / above.max()


def int8(weight: np.ndarray, inputs: int) -> tuple[np.ndarray, np.ndarray]:
  """Codes and scales: each output has one, and codes reach to 127.5."""
  axes = tuple(range(inputs))
  scales = np.abs(weight).max(axes, keepdims=True) / np.float32(127.5)
  scales[scales == 0] = 1
  codes = np.clip(np.round(weight / scales), -128, 127)
  return codes.astype(np.int8), scales


def nf4(weight: np.ndarray, inputs: int, tile: int) -> np.ndarray:
  """What the codes stand for, f32 of the shape of `weight`."""
  moved = np.moveaxis(weight, inputs - 1, -1)
  tiles = moved.reshape(*moved.shape[:-1], -1, tile)
  scales = np.abs(tiles).max(-1, keepdims=True)
  scales[scales == 0] = 1
  share = tiles / scales
  nearest = np.abs(share[..., None] - NF4).argmin(-1)
  values = (NF4[nearest] * scales).reshape(moved.shape)
  return np.moveaxis(values, -1, inputs - 1)
