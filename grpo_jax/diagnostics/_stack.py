"""What parts of an audit have in common: filled stacks, a pushed completion."""

from typing import TypeVar

import jax
import numpy as np

from grpo_jax.diagnostics import _probe

ROWS = _probe.PROBE_SHAPE[0]
SHAPE = _probe.PROBE_SHAPE[1:]  # prompts, completions of a prompt, positions

Tree = TypeVar('Tree', _probe.Probe, np.ndarray)


def fill(*blocks: Tree) -> Tree:
  """Joins blocks along the first axis and repeats the last row up to `ROWS`.

  XLA compiles each operation once per shape, which costs far more than its run
  on arrays this small; so every stack has the same number of rows.

  Args:
    *blocks: Probes or arrays, each with a leading axis; `ROWS` in all at most.

  Returns:
    One probe, or one array, of `ROWS` rows.
  """

  def join(*arrays):
    missing = ROWS - sum(map(len, arrays))
    last = arrays[-1][-1:]
    return np.concatenate([*arrays, np.repeat(last, missing, axis=0)])

  return jax.tree.map(join, *blocks)


def push(sign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Rewards and advantages that single out each batch's first completion.

  It alone is right (or wrong) in its group, so its advantage is the largest
  there whatever the method: one that drops the small ones keeps it.

  Args:
    sign: f64[N], +1 or -1, of the first completion's advantage.

  Returns:
    Rewards of 0 and 1, f64[N,P,G], and advantages to match, f64[N,P,G,T]:
    `sign` for the first completion, the opposite in equal parts for the rest of
    its group, plus and minus 1 in turn in the other group.
  """
  group = SHAPE[1]
  own = np.arange(group) == 0
  in_turn = np.arange(group) % 2 == 0
  right = np.where(sign[:, None] > 0, own, ~own)
  reward = np.stack([right, np.broadcast_to(in_turn, right.shape)], axis=1)
  alone = sign[:, None] * np.where(own, 1, -1 / (group - 1))
  advantage = np.stack([alone, 2.0 * reward[:, 1] - 1], axis=1)
  shape = (len(sign), *SHAPE)
  return reward.astype(float), np.broadcast_to(advantage[..., None], shape)
