"""What Adam's moments do, step by step, recorded in the optimizer's state."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.optim import _adam
from grpo_jax.optim import _numbers
from grpo_jax.optim import _parts

Array = jax.Array
Tree = Any
Labels = Callable[[Tree], Tree] | Tree | None

# Edges of the histogram of log2(epsilon / sqrt(v-hat)), with open ends.
EPSILON_EDGES = np.arange(-32, 33, 4)
_QUANTILES = {'p01': 0.01, 'p50': 0.5, 'p99': 0.99}
_WHO = 'record_adam_moments'
_WHOLE = ''  # name of the one group that there is without labels


class MomentRecord(NamedTuple):
  """One Adam step of one group of parameters; norms are Euclidean.

  An update is the sum of three parts: `carried` by the moments from earlier
  gradients, `fresh` from this gradient, `decayed` by weight decay; see
  `split_update`. A cosine is 0 if one of its two directions is 0. The cosine of
  gradient and update is negative where the update descends. A complex number
  counts as the two real ones that it has.

  Attributes:
    grad_norm: f32[], of the gradient as it was given.
    update_norm: f32[], of the update as it is returned.
    m_hat_norm: f32[], of the bias-corrected first moment.
    v_hat_norm: f32[], of the bias-corrected second moment; of AMSGrad's largest
      ones.
    carried_norm: f32[].
    fresh_norm: f32[].
    decayed_norm: f32[].
    grad_update_cosine: f32[].
    grad_carried_cosine: f32[].
    carried_update_cosine: f32[].
    below_epsilon: f32[], share of coordinates with sqrt(v-hat) < epsilon.
    epsilon_counts: f32[18], coordinates by log2(epsilon / sqrt(v-hat)).
  """

  grad_norm: Array
  update_norm: Array
  m_hat_norm: Array
  v_hat_norm: Array
  carried_norm: Array
  fresh_norm: Array
  decayed_norm: Array
  grad_update_cosine: Array
  grad_carried_cosine: Array
  carried_update_cosine: Array
  below_epsilon: Array
  epsilon_counts: Array


class RecordAdamMomentsState(NamedTuple):
  """State of `record_adam_moments`."""

  inner_state: Any
  record: dict[str, MomentRecord]  # of the last step, by group


def record_adam_moments(
  inner: optax.GradientTransformation,
  epsilon: float = 1e-8,
  labels: Labels = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Wraps a transformation that has Adam in it, and records what Adam does.

  The updates stay what they were. With :math:`\hat m, \hat v` Adam's
  bias-corrected moments, a step is proportional to
  :math:`\hat m / (\sqrt{\hat v} + \epsilon)`. Since
  :math:`m_t = b_1 m_{t-1} + (1 - b_1) g_t`, it has a carried part and a fresh
  one, both multiplied with what the transformation multiplies Adam's step with
  (LAMB's trust ratio, the factor of a clip, the learning rate); `split_update`
  says more. The carried part moves the parameters whatever the present gradient
  is (zero, where a token is clipped). The ratio
  :math:`\epsilon / \sqrt{\hat v}` says whether the scale of the reward matters:
  far below 1 the step does not depend on it, far above 1 the step is
  proportional to it.

  Adam is found wherever it is: in `chain`, `named_chain`, `masked`,
  `partition`, `MultiSteps` (the record is that of the last step taken),
  `inject_hyperparams`, `apply_if_finite`. If there are several, all count.
  Parameters without Adam count in the norms of gradients and updates. Wrappers
  that keep parameters and move towards them (`optax.contrib.schedule_free`,
  `sam`, `mechanize`, `optax.lookahead`) take the record inside:
  `sam(record_adam_moments(optax.adam(...)), ...)`.

  The record costs a few passes over the optimizer's elements and no pass of the
  model. While it is made, old and new moments are both in memory. Where
  gradients accumulate, `grad_norm` and its cosines are those of the last part.

  Args:
    inner: Any optax transformation with `optax.ScaleByAdamState` or
      `optax.ScaleByAmsgradState` in its state: adam, adamw, nadam, radam,
      amsgrad, lamb. Adamax, yogi and adopt keep other numbers in these fields.
    epsilon: That of Adam, which its state does not tell.
    labels: Groups of parameters, as in `optax.partition`: a tree of names like
      the parameters, or a function from parameters to one. None: one group.
      (Give the tree where `optax.tree.map_params` will be used on the state.)

  Returns:
    A transformation whose state is a `RecordAdamMomentsState`; read it with
    `moment_metrics`.

  Raises:
    ValueError: A negative `epsilon`. When initialised, no Adam is found. At the
      first update, what is found is not Adam's, or the update is no sum of such
      parts.

  >>> tx = record_adam_moments(optax.adam(1e-3))
  >>> params = {'w': jnp.ones(3)}
  >>> updates, state = tx.update(params, tx.init(params), params)
  >>> float(moment_metrics(state)['adam_carried_norm'])
  0.0

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
    Learning <https://arxiv.org/abs/2601.05002>`_, 2026, propositions 2 and 3
  """
  _numbers.check(_WHO, 'epsilon', epsilon)
  inner = optax.with_extra_args_support(inner)

  def init(params):
    _parts.refuse_pairs(_WHO, params)
    state = inner.init(params)
    _adam.find(state, _WHO)
    # `optax.tree.map_params` initialises with a tree that has no leaves, so the
    # one group that there is without labels must not come from the leaves.
    groups = sorted({_WHOLE} if labels is None else set(_names(labels, params)))
    return RecordAdamMomentsState(state, {name: _empty() for name in groups})

  def update(updates, state, params=None, **extra_args):
    before, grads = state.inner_state, updates
    updates, after = inner.update(grads, before, params, **extra_args)
    names = _names(labels, grads if params is None else params)

    # Extra arguments may be functions, so they are not operands below.
    def recorded(old, grads, before, after, updates, params):
      step = before, after, updates, params
      parts = _adam.split_for(_WHO, inner, *step, grads, extra_args)
      moments = _adam.corrected_moments(inner, *step, **extra_args)
      return {
        group: _recorded(
          [name == group for name in names],
          grads,
          updates,
          parts,
          moments,
          epsilon,
        )
        for group in old
      }

    # The condition also keeps the compiler from fusing the record with the
    # update, which would round the update in other places.
    record = jax.lax.cond(
      _adam.stepped(before, after),
      recorded,
      lambda old, *_: old,
      state.record,
      *(grads, before, after, updates, params),
    )
    return updates, RecordAdamMomentsState(after, record)

  return optax.GradientTransformationExtraArgs(init, update)


def moment_metrics(state: Any) -> dict[str, Array]:
  """Reads the record of `record_adam_moments` back, as flat metrics.

  Args:
    state: Of any transformation with a record in it; of several, the last is
      read.

  Returns:
    A dict of f32[]. Every field of `MomentRecord` but the histogram is there as
    `adam_field` if there is one group, else as `adam_group_field`. Of the
    histogram there are `..._epsilon_log2_p01`, `_p50` and `_p99`: quantiles of
    log2(epsilon / sqrt(v-hat)) over the coordinates, each the middle of a bin
    that is four wide (-34 and 34 stand for the open ends).

  Raises:
    ValueError: The state has no such record.
  """
  is_record = lambda node: isinstance(node, RecordAdamMomentsState)
  found = _adam.nodes(state, is_record)
  if not found:
    raise ValueError(
      f'moment_metrics got a state ({type(state).__name__}) without a record; '
      'give that of record_adam_moments(...).'
    )
  metrics = {}
  for group, record in found[-1].record.items():
    prefix = 'adam_' if group == _WHOLE else f'adam_{group}_'
    fields = record._asdict()
    counts = fields.pop('epsilon_counts')
    # As arrays, because an nnx.Optimizer wraps what is in its state.
    metrics |= {prefix + k: jnp.asarray(value) for k, value in fields.items()}
    middles = np.append(EPSILON_EDGES - 2.0, EPSILON_EDGES[-1] + 2.0)
    counts = jnp.asarray(counts)
    reached = jnp.cumsum(counts) / jnp.maximum(jnp.sum(counts), 1)
    for name, share in _QUANTILES.items():
      # The first bin at which the share is reached.
      place = jnp.argmax(reached >= share)
      metrics[f'{prefix}epsilon_log2_{name}'] = jnp.asarray(middles)[place]
  return metrics


def _empty() -> MomentRecord:
  """Zeros, each in a buffer of its own, because a state may be donated."""
  shapes = [()] * (len(MomentRecord._fields) - 1) + [len(EPSILON_EDGES) + 1]
  return MomentRecord(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def _names(labels: Labels, params: Tree) -> list[str]:
  """The group of each leaf, in the order of the leaves."""
  if labels is None:
    return [_WHOLE] * len(jax.tree.leaves(params))
  tree = labels(params) if callable(labels) else labels
  return jax.tree.leaves(tree)


def _recorded(
  chosen: list[bool],
  grads: Tree,
  updates: Tree,
  parts: _adam.Split,
  moments: _adam.CorrectedMoments,
  epsilon: float,
) -> MomentRecord:
  """The record of the chosen leaves."""
  by_path = jax.tree_util.tree_leaves_with_path
  pairs = zip(by_path(grads), chosen, strict=True)
  paths = [path for (path, _), is_in in pairs if is_in]

  def chosen_of(moment):  # some parameters have none
    return [moment[path] for path in paths if path in moment]

  def leaves(tree):
    return chosen_of(dict(by_path(tree)))

  grad, update, carried = map(leaves, (grads, updates, parts.carried))
  v_hat = chosen_of(moments.v_hat)
  counts = _epsilon_counts(v_hat, epsilon)
  # The first bin whose log2 is above 0, where epsilon is larger than the root.
  half = len(EPSILON_EDGES) // 2 + 1
  return MomentRecord(
    grad_norm=_norm(grad),
    update_norm=_norm(update),
    m_hat_norm=_norm(chosen_of(moments.m_hat)),
    v_hat_norm=_norm_of_squares(v_hat),
    carried_norm=_norm(carried),
    fresh_norm=_norm(leaves(parts.fresh)),
    decayed_norm=_norm(leaves(parts.decayed)),
    grad_update_cosine=_cosine(grad, update),
    grad_carried_cosine=_cosine(grad, carried),
    carried_update_cosine=_cosine(carried, update),
    below_epsilon=jnp.sum(counts[half:]) / jnp.maximum(jnp.sum(counts), 1),
    epsilon_counts=counts,
  )


def _norm(x: list[Array]) -> Array:
  return jnp.sqrt(_adam.dot(x, x))


def _norm_of_squares(x: list[Array]) -> Array:
  """The norm of second moments, scaled, as their squares leave float32."""
  tops = [jnp.max(v) for v in x if v.size]
  top = jnp.max(jnp.stack([jnp.zeros(()), *tops]))
  return top * _norm([v / jnp.where(top > 0, top, 1) for v in x])


def _cosine(x: list[Array], y: list[Array]) -> Array:
  size = _norm(x) * _norm(y)
  cosine = jnp.where(
    size > 0, _adam.dot(x, y) / jnp.where(size > 0, size, 1), 0
  )
  return jnp.clip(cosine, -1, 1)  # rounding may take it past 1


def _epsilon_counts(v_hat: list[Array], epsilon: float) -> Array:
  """Coordinates between the edges, f32[18]; a moment of 0 is in the last."""
  # log2(epsilon / root) > edge where root < epsilon / 2**edge.
  limits = jnp.asarray((epsilon / 2.0**EPSILON_EDGES) ** 2, jnp.float32)

  def below(limit):
    counts = (jnp.sum(v < limit, dtype=jnp.float32) for v in v_hat)
    return sum(counts, jnp.zeros((), jnp.float32))

  # One edge after another, because all at once would take an array as large as
  # the moments for each edge.
  above = jax.lax.map(below, limits)
  number = jnp.full(1, sum(v.size for v in v_hat), jnp.float32)
  above = jnp.concatenate([number, above, jnp.zeros(1, jnp.float32)])
  return above[:-1] - above[1:]
