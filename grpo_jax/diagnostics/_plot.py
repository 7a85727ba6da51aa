"""The coefficient of a token against its ratio, as a figure."""

import os

import numpy as np

from grpo_jax.diagnostics._clipping import Clipping

_SIGNS = (
  (1, 'positive', 'A = +1', '#1b6ca8'),
  (-1, 'negative', 'A = -1', '#c8442c'),
)


def plot(clipping: Clipping, title: str, path: str | os.PathLike) -> None:
  """Draws both signs, and shades where the gradient is exactly 0.

  Args:
    clipping: What `clipping` returned.
    title: Of the figure.
    path: File to write; its ending says the format (png, svg, pdf).
  """
  from matplotlib.figure import Figure  # no global state, no display

  figure = Figure(figsize=(7, 4), layout='constrained')
  axes = figure.subplots()
  low, high = _window(clipping)
  for sign, field, label, color in _SIGNS:
    zeros = [interval[1:] for interval in clipping.zeros if interval[0] == sign]
    curve = _with_steps(clipping.ratio, getattr(clipping, field), zeros)
    axes.plot(*curve, label=label, color=color)
    for start, stop in zeros:
      axes.axvspan(
        max(start, low),
        min(stop, high),
        ymin=0.5 if sign > 0 else 0,
        ymax=1 if sign > 0 else 0.5,
        color=color,
        alpha=0.12,
        lw=0,
      )
  axes.axhline(0, color='0.6', lw=0.8)
  axes.axvline(1, color='0.6', lw=0.8, ls=':')
  reach = _reach(clipping, low, high)
  axes.set(
    xlim=(low, high),
    ylim=(-reach, reach),
    xlabel='ratio of the token, policy / old policy',
    ylabel='coefficient of its score',
    title=title,
  )
  axes.ticklabel_format(useOffset=False)
  axes.legend(title='shaded: exactly 0')
  figure.savefig(path, dpi=150)


def _window(clipping: Clipping) -> tuple[float, float]:
  """Ratios to show: the bounds with some room, or a factor of 4 around 1."""
  ends = [
    end
    for _, *interval in clipping.zeros
    for end in interval
    if 0 < end < np.inf
  ]
  if not ends:
    return 0.25, 4.0
  room = max(abs(np.log(end)) for end in ends) * 2
  return float(np.exp(-room)), float(np.exp(room))


def _reach(clipping: Clipping, low: float, high: float) -> float:
  """The largest coefficient in the window, with some room."""
  seen = (clipping.ratio >= low) & (clipping.ratio <= high)
  both = np.abs([clipping.positive[seen], clipping.negative[seen]])
  return float(1.1 * both.max()) or 1.0


def _with_steps(ratio: np.ndarray, values: np.ndarray, zeros):
  """The curve with upright steps at the ends of the intervals of zeros."""
  for end in {end for interval in zeros for end in interval}:
    if not 0 < end < np.inf:
      continue
    after = int(np.searchsorted(ratio, end))
    zero_after = values[min(after, len(values) - 1)] == 0
    # From the live side, along the last two points there.
    near = after - 1 if zero_after else after
    far = near - 1 if zero_after else near + 1
    slope = (values[near] - values[far]) / (ratio[near] - ratio[far])
    live = values[near] + slope * (end - ratio[near])
    step = (live, 0.0) if zero_after else (0.0, live)
    ratio = np.insert(ratio, after, (end, end))
    values = np.insert(values, after, step)
  return ratio, values
