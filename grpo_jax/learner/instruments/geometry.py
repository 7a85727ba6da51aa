r"""How the gradients of different prompts lie to each other.

Each prompt of a rollout has a gradient of its own: that of the method's loss of
this prompt alone, at the policy before the first update. None of them is kept.
Each is projected at once to a sketch of `SIZE` numbers, so the memory is that
of one gradient, and P sketches.

For any gradients g and h the product of their sketches has the mean
:math:`\langle g, h \rangle` over the random signs, and a variance of at most

.. math:: \left( |g|^2 |h|^2 + \langle g, h \rangle^2 \right) / SIZE

So the cosine of two orthogonal gradients is estimated with a deviation of at
most 1 / sqrt(SIZE), 0.016, and a norm to 1 / sqrt(2 SIZE), 1.1 %.

References:
  Ge et al., `Why GRPO Needs Normalization: A Local-Curvature Perspective on
  Adaptive Gradients <https://arxiv.org/abs/2601.23135>`_, 2026
"""

from collections.abc import Sequence
import dataclasses
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import gradient
from grpo_jax.learner import layouts
from grpo_jax.learner.instruments.hook import Findings
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Credited
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import random_keys
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models.layout import LayoutSpec

Array = jax.Array

SIZE = 4096  # numbers in a sketch
_SIDE = 32  # how many neighbours along an axis are mixed
_SMALL = 0.1  # table 3 of the paper counts cosines below it


class Geometry:
  r"""Measures how the gradients of a rollout's prompts lie to each other.

  It takes a gradient for each prompt, whose few rows do not fill many devices.
  With 0.5M parameters on two cores and completions of 5 tokens it took 0.43 s
  beside updates of 0.11 s, most of it for sketching (10 ns per parameter and
  sketch); with completions of 64 tokens about as long as the update:

    grpo-jax train --config=configs/arithmetic.py --workdir=/tmp/geometry \
      --config.steps=12 --config.log.geometry_every_steps=1
    grep -oE '"(geometry|learn)_secs": [0-9.]*' /tmp/geometry/metrics.jsonl

  Args:
    updater: What takes the updates.
    seed: Of the run; the signs of the sketches come from it.
    every_steps: Every rollout is measured whose number is a multiple of this;
      0: none is.
  """

  def __init__(self, updater: Updater, seed: int, every_steps: int):
    self._updater, self._every_steps = updater, every_steps
    learner = updater.compiled.learner
    optimizer = dataclasses.replace(learner.optimizer, with_outward=False)
    plain = dataclasses.replace(
      learner, optimizer=optimizer, expert_balance=0.0
    )

    def sketch_of_part(frozen, params, loss_state, batch, place, rows, used):
      prompt, part = place
      with sharding.use(plain.mesh):
        one = jax.tree.map(lambda x: x[prompt[None]], batch)
        # Weights first: they are those of the whole group.
        one = losses.prepare(plain.method, one, loss_state)
        parts = self._parts(batch.mask.shape[1])
        some = jax.tree.map(
          lambda x: x.reshape(parts, -1, *x.shape[2:])[part[None]], one
        )
        found = gradient.differentiate(
          plain, frozen, params, loss_state, some, rows, used
        )
        return sketch(found.grads, random_keys.key(seed, 'gradient sketches'))

    self._sketch_of_part = jax.jit(
      sketch_of_part,
      compiler_options=sharding.COMPILER_OPTIONS,
      out_shardings=sharding.replicated(updater.compiled.mesh),
    )

  def is_due(self, step: int) -> bool:
    """Whether a rollout is measured."""
    return self._every_steps > 0 and step % self._every_steps == 0

  def before(self, state: TrainState, credited: Credited) -> dict[str, float]:
    """What `metrics_of_sketches` returns, and the `geometry_secs` it took."""
    start = time.monotonic()
    deviation = _deviations(credited.rollout)
    found = metrics_of_sketches(self.sketches(state, credited), deviation)
    return {**found, 'geometry_secs': time.monotonic() - start}

  def after(
    self, state: TrainState, credited: Credited, before: dict[str, float]
  ) -> Findings:
    """What `before` has measured."""
    del state, credited
    return Findings(numbers=before)

  def sketches(self, state: TrainState, credited: Credited) -> np.ndarray:
    """The gradients of all prompts, f32[P,H,SIZE].

    The gradient of a prompt is the sum of H parts: those of the two halves of
    its group. Where the group is odd, or where the loss of a completion depends
    on others, H is 1.

    Args:
      state: Before the first update.
      credited: The rollout with its advantages.
    """
    updater, rollout = self._updater, credited.rollout
    prompts, group, width = rollout.batch.mask.shape
    parts = self._parts(group)
    decided = credited.layouts.spec
    spec = _spec(decided, rollout.prompts, group // parts, width)
    halves = _split(rollout, parts)
    found = []
    for number in range(prompts * parts):
      rows, used = layouts.lay_out(
        updater.compiled, halves, np.array([number]), spec
      )
      place = np.array(divmod(number, parts), np.int32)
      found.append(
        self._sketch_of_part(
          updater.frozen,
          state.params,
          credited.loss_state,
          credited.batch,
          place,
          rows,
          used,
        )
      )
    found = np.stack(host_arrays.to_host(found))
    return found.reshape(prompts, parts, SIZE)

  def _parts(self, group: int) -> int:
    coupled = self._updater.compiled.learner.method.scope == 'batch'
    return 1 if coupled or group % 2 else 2


def _spec(
  spec: LayoutSpec, prompts: Sequence[Sequence[int]], group: int, width: int
) -> LayoutSpec:
  """How one prompt's completions lie in rows, the same for each prompt.

  Args:
    spec: Of the updates, decided.
    prompts: All prompts of the rollout.
    group: How many completions of a prompt are laid out at once.
    width: `T`.
  """
  shared = spec.kind == 'shared'
  per_row = math.gcd(spec.row_completions or group, group) if shared else 1
  rows = group // per_row
  longest = max(map(len, prompts))
  prompt_width = layout.bucket(longest, spec.prompt_buckets, 'prompt')
  most = math.ceil(rows / spec.shards) * spec.shards
  return dataclasses.replace(
    spec,
    kind='shared' if shared else 'padded',
    micro_rows=min(most, spec.rows_of(prompt_width + width, rows)),
    row_completions=per_row if shared else 0,
    row_slots=0,
    prompt_buckets=(prompt_width,),
  )


def _split(rollout: Rollout, parts: int) -> Rollout:
  """A rollout with each part of a group as a group of its own.

  What a layout reads of it, and no more.
  """

  def split(x):
    return x.reshape(x.shape[0] * parts, -1, *x.shape[2:])

  batch = rollout.batch
  return rollout._replace(
    batch=batch._replace(tokens=split(batch.tokens), mask=split(batch.mask)),
    length=split(rollout.length),
    previous=None if rollout.previous is None else split(rollout.previous),
    prompts=[prompt for prompt in rollout.prompts for _ in range(parts)],
  )


def _deviations(rollout: Rollout) -> np.ndarray:
  """The deviation of the rewards within each group, f64[P]."""
  reward = np.asarray(rollout.batch.reward, np.float64)
  judged = np.ma.masked_array(reward, ~np.asarray(rollout.batch.valid))
  return judged.std(axis=1).filled(0.0)


def metrics_of_sketches(
  sketches: np.ndarray, deviation: np.ndarray
) -> dict[str, float]:
  r"""What the sketches of a rollout tell.

  Args:
    sketches: f32[P,H,SIZE], those of all prompts, in H parts.
    deviation: f64[P], of the rewards within each group.

  Returns:
    Over all prompts

    - `geometry_zero`: the share whose gradient is 0. They are left out of all
      that follows but for `geometry_reward_*`, and so are those that are not
      finite; `geometry_prompts` says how many are left.
    - `geometry_reward_std`: the mean of `deviation`.
    - `geometry_reward_ratio`: the largest `deviation` over the smallest that is
      not 0, R2 in assumption A5 of the paper.

    Over pairs of prompts, if any are left,

    - `geometry_cosine_mean`: the mean of the cosines of their gradients;
    - `geometry_cosine_noise`: the deviation that sketching adds to a cosine;
    - `geometry_cosine_std`: the deviation of the cosines. The variance that
      sketching adds has been taken away; 0 if no more was seen;
    - `geometry_cosine_negative` and `geometry_cosine_small`: the share below 0,
      and with \|cosine\| < 0.1, as estimated. The sign of a cosine smaller
      than the noise is no better than that of a coin;
    - `geometry_m`: of the M in assumption A4, M <g_i, g_j> >= |X_i g_j|^2 /
      |X_i|^2, that would do for half of the ordered pairs with a product above
      0: the median of |g_j|^2 / <g_i, g_j>. This is an upper bound of the least
      M of a pair, which would take the features X_i of a log-linear policy. No
      M does for pairs with a product below 0; and no maximum is reported,
      because that would tell of the pair with the smallest product, which is
      noise. The paper does not say how it found its own.
    - `geometry_norm_ratio`: the largest norm over the smallest, R1 in A5.

    And over prompts that are left, if there are halves, `geometry_within`:
    |a - b| over |a + b| as root mean squares, for the gradients a and b of the
    halves of a group: how far the gradient of a prompt depends on which
    completions were drawn. It is 1 if the halves are orthogonal. (They share a
    baseline, so it is not quite the deviation of independent draws.)
  """
  whole = sketches.sum(axis=1, dtype=np.float64)
  square = np.sum(whole**2, axis=1)
  used = np.isfinite(square) & (square > 0)
  found = {
    'geometry_prompts': used.sum(),
    'geometry_zero': np.mean(square == 0),
    'geometry_reward_std': np.mean(deviation),
  }
  if np.any(deviation > 0):
    some = deviation[deviation > 0]
    found['geometry_reward_ratio'] = some.max() / some.min()
  if sketches.shape[1] == 2 and used.any():
    between = np.diff(sketches[used].astype(np.float64), axis=1)
    found['geometry_within'] = np.sqrt(np.sum(between**2) / square[used].sum())
  if used.sum() > 1:
    found |= _of_pairs(whole[used])
  return {name: float(value) for name, value in found.items()}


def _of_pairs(whole: np.ndarray) -> dict[str, Any]:
  """Metrics of pairs of gradients, none 0; see `metrics_of_sketches`."""
  norm = np.linalg.norm(whole, axis=1)
  unit = whole / norm[:, None]
  first, second = np.triu_indices(len(whole), 1)
  cosine = np.clip(unit @ unit.T, -1, 1)[first, second]
  # As of a correlation: gradients of one direction have sketches of one.
  noise = np.mean((1 - cosine**2) ** 2) / whole.shape[1]
  found = {
    'geometry_cosine_mean': cosine.mean(),
    'geometry_cosine_noise': np.sqrt(noise),
    'geometry_cosine_std': np.sqrt(max(0.0, cosine.var() - noise)),
    'geometry_cosine_negative': np.mean(cosine < 0),
    'geometry_cosine_small': np.mean(np.abs(cosine) < _SMALL),
    'geometry_norm_ratio': norm.max() / norm.min(),
  }
  up = cosine > 0
  if up.any():
    ratio = norm[second[up]] / norm[first[up]]
    needed = np.concatenate([ratio / cosine[up], 1 / (ratio * cosine[up])])
    found['geometry_m'] = np.median(needed)
  return found


def sketch(tree: Any, key: Array) -> Array:
  """A random projection of all leaves, f32[SIZE]; see the module.

  It is linear, and the same on every mesh. Leaves stay where they lie: only
  sums leave a device. The signs are computed where they are needed, and the
  copies of a leaf are the only memory.

  Args:
    tree: Arrays of any shapes, as long as it is the same tree each time. A
      complex number counts as the two real ones that it has.
    key: A jax.random key, on which the signs depend.
  """
  leaves = [
    part
    for x in jax.tree.leaves(tree)
    for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))
  ]
  salts = jax.random.bits(key, (len(leaves), 2), jnp.uint32)
  parts = [_of_leaf(x, *salts[k]) for k, x in enumerate(leaves)]
  return sum(parts, jnp.zeros(SIZE, jnp.float32))


def _of_leaf(x: Array, first: Array, second: Array) -> Array:
  """The part of one leaf.

  Blocks of the leaf are added up with random signs, entry by entry. Alone this
  would fail where all blocks have their large entries in the same places, such
  as one column of a weight. So each block is rotated before, by random signs
  and a Hadamard matrix: any block then is spread over all of its entries, and
  no two of them are added up that belong to the same block. A block smaller
  than a sketch is added up several times, with other signs.
  """
  more = [(0, _filled(size) - size, 0) for size in x.shape]
  x = lax.pad(x.astype(jnp.float32), jnp.float32(0), more)
  sides = _sides(x.shape)
  x = x * _signs(x.shape, first)
  x = x.reshape([n for a, b in zip(x.shape, sides) for n in (a // b, b)])
  for axis, side in enumerate(sides):
    if side > 1:
      place = 2 * axis + 1
      x = jnp.tensordot(
        x, _hadamard(side), (place, 0), precision=lax.Precision.HIGHEST
      )
      x = jnp.moveaxis(x, -1, place)
  copies = SIZE // math.prod(sides)

  def added(copy):
    signs = _signs(x.shape, second + copy * jnp.uint32(0x9E3779B9))
    return jnp.sum(x * signs, axis=tuple(range(0, x.ndim, 2)))

  found = lax.map(added, jnp.arange(copies, dtype=jnp.uint32))
  return found.reshape(SIZE) / math.sqrt(copies)


def _sides(shape: tuple[int, ...]) -> list[int]:
  """The sizes of a block: powers of two, along the two longest axes.

  So that a block lies on one device: these axes are split into long parts. (If
  a part is no multiple of a block, the leaf is gathered.)
  """
  longest = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
  return [
    math.gcd(size, _SIDE) if axis in longest else 1
    for axis, size in enumerate(shape)
  ]


def _filled(size: int) -> int:
  """The size of an axis, with zeros behind a long one of odd size.

  With such a vocabulary blocks would be small, and the sketch cost 32 times as
  much. Meshes seldom split an axis of odd size.
  """
  odd_and_long = size % 2 and size > 8 * _SIDE
  return -(-size // _SIDE) * _SIDE if odd_and_long else size


def _hadamard(size: int) -> np.ndarray:
  """An orthogonal matrix f32[size,size] of entries of one magnitude."""
  matrix = np.ones((1, 1), np.float32)
  while len(matrix) < size:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / np.float32(math.sqrt(size))


def _signs(shape: tuple[int, ...], salt: Array) -> Array:
  """1 or -1 at random for each place, f32.

  A function of the place and nothing else, which compilers put into the product
  that needs it: nothing is stored, and nothing is sent.
  """
  mixed = _mixed(salt)
  for axis, size in enumerate(shape):
    along = [size if k == axis else 1 for k in range(len(shape))]
    place = lax.broadcasted_iota(jnp.uint32, along, axis)
    mixed = _mixed(mixed + place * jnp.uint32(0x9E3779B1))
  return 1 - 2 * (mixed >> 31).astype(jnp.float32)


def _mixed(x: Array) -> Array:
  """The last stage of MurmurHash3: each bit of u32 depends on all others."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
