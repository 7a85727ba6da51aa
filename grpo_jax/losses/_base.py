r"""The types of a loss: `Batch`, `SurrogateTerms`, `LossTransform`, `chain`.

Every group-based method is one surrogate,

.. math::
  J(\theta) = \sum_{i,t} w_{it} \bigl(f(s_{it}(\theta), A_{it})
               - R_{it}(\theta)\bigr),

and a method is a `chain` of transforms, each of which fills in or edits one of
its parts. Three functions run a chain, one for each of three nested sets:

1. `credit`, once per rollout (all that one policy version sampled): rewards
   become advantages, and tokens that should not be trained are dropped;
2. `prepare`, once per optimizer batch (the part of the rollout that one
   optimizer step uses): every token gets its weight, so every denominator is
   known before the first micro-batch;
3. `surrogate_loss`, once per micro-batch (the part of an optimizer batch that
   fits in memory): what is differentiated.

Axes: `P` prompts, `G` completions per prompt, `T` completion positions.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _checks
from grpo_jax.losses._checks import at_least_float32

Array = jax.Array | np.ndarray  # a batch may be in NumPy arrays still
State = Any  # a pytree of arrays; `()` for a transform that keeps none


class Batch(NamedTuple):
  """What losses read of a rollout. Build it with `make_batch`.

  `P` prompts, `G` completions of each, `T` completion positions, `K` reward
  functions. Once `credit` has run, every per-token field but `tokens` is zero
  outside `mask`, and the mask of a completion that is not `valid` is empty.
  Transforms therefore need no guards against padding.

  Attributes:
    tokens: i32[P,G,T], the sampled ids; None: not known.
    mask: bool[P,G,T], the policy chose this token; never changes.
    keep: bool[P,G,T], this token is trained; edited by `on_keep`.
    valid: bool[P,G], the completion exists and was judged.
    reward: f32[P,G], edited by `on_reward`.
    reward_parts: f32[P,G,K], each reward function's value; NaN where it has not
      judged.
    truncated: bool[P,G], ended by the length limit.
    version: i32[P,G,T], the policy version that drew each token.
    logp_old: f32[P,G,T], log-probability of each token under the policy before
      the update, nats; None: not known.
    logp_ref: f32[P,G,T], that of the reference policy, nats; None: not known.
    logp_sampler: f32[P,G,T], that which the engine reported, nats; None: not
      known.
    entropy_old: f32[P,G,T], nats; None: not known.
    advantage: f32[P,G,T], set by `credit`.
    weight: f32[P,G,T], set by `prepare`.
    extras: Arrays [P,G,...] by name, fields of a user's own, and those of
      episodes of several turns (`OF_TURNS`), of which there are N at most:
      `turn` i32[P,G,T], the number of each token's turn, from 0; `turn_reward`
      f32[P,G,N], the parts of the reward that turns were given; `turn_state`
      i32[P,G,N], equal numbers where turns of a group began in the same state.
      `age` f32[P,G,T] is by how many versions the policy that learns is newer
      than `version`; `credit` gets no version to compare with. Of a teacher
      (`OF_TEACHER`): `logp_teacher` f32[P,G,T], its log-probability of each
      token, nats; `teacher_top_logp` f32[P,G,T,K], those of its likeliest
      tokens in the place of each, the likeliest first; and `teacher_top_ids`
      i32[P,G,T,K], their ids, which no loss reads.
  """

  tokens: Array | None
  mask: Array
  keep: Array
  valid: Array
  reward: Array
  reward_parts: Array
  truncated: Array
  version: Array
  logp_old: Array | None = None
  logp_ref: Array | None = None
  logp_sampler: Array | None = None
  entropy_old: Array | None = None
  advantage: Array | None = None
  weight: Array | None = None
  extras: Mapping[str, Array] = {}


class SurrogateTerms(NamedTuple):
  """The differentiable quantities of a micro-batch.

  Attributes:
    logp: f32[P,G,T], log-probability of each token, nats.
    log_ratio: f32[P,G,T], log pi / pi_old, nats.
    entropy: f32[P,G,T], of the whole distribution, nats; None: not known.
    objective: f32[P,G,T], f(s, A), maximised; None: not set yet.
    penalty: f32[P,G,T], R, minimised.
    metrics: Arrays [P,G,T] by name; the learner averages kept tokens.
    logp_top: f32[P,G,T,K], of the teacher's likeliest tokens, nats; None: not
      known.
  """

  logp: Array
  log_ratio: Array
  entropy: Array | None
  objective: Array | None
  penalty: Array
  metrics: dict[str, Array]
  logp_top: Array | None = None


class LossTransform(NamedTuple):
  """One transform of a chain; a stage constructor makes it from a function.

  Attributes:
    init: `() -> State`.
    credit: `(Batch, State) -> (Batch, State)`, once per rollout. Only this
      function changes the state.
    prepare: `(Batch, State) -> Batch`, once per optimizer batch.
    apply: `(SurrogateTerms, Batch, State) -> SurrogateTerms`, differentiable.
    requires: Names of the optional fields that are read (`'logp_ref'`,
      `'entropy'`, ...). The learner computes these and no others.
    scope: `'batch'` if `apply` couples completions of different micro-batches,
      else `'row'`.
    zero_without_advantage: Whether what `apply` adds to the loss is 0, with its
      derivatives, for every token whose advantage is 0, and no such token is
      marked as clipped. Updates then need not compute completions without an
      advantage, such as those of groups whose rewards are all equal.
    acts_after_tokens: The length of a completion up to which a part of it (a
      penalty for length) does nothing, tokens. A run without longer ones
      refuses the method.
    top_tokens: How many of the teacher's likeliest tokens are read in each
      place, `K`; 0: none are.
    writes: What it writes and where it may stand, so that `credit` can refuse a
      chain out of order; () for a transform that no stage constructor has made:
      its place is checked only where it runs.
  """

  init: Callable[[], State]
  credit: Callable[[Batch, State], tuple[Batch, State]]
  prepare: Callable[[Batch, State], Batch]
  apply: Callable[[SurrogateTerms, Batch, State], SurrogateTerms]
  requires: frozenset[str] = frozenset()
  scope: str = 'row'
  zero_without_advantage: bool = False
  writes: _checks.Writes = ()
  acts_after_tokens: float = 0
  top_tokens: int = 0


def chain(*transforms: LossTransform) -> LossTransform:
  """Applies transforms one after another, stage by stage.

  The stages run in their own order, wherever their transforms are written:

  1. `credit`, once per rollout: all transforms that edit the reward, drop
     tokens (`keep`), or set or edit the advantage;
  2. `prepare`, once per optimizer batch: all that set or edit the weight, and
     those that edit the advantage by the weight;
  3. `apply`, in every micro-batch: all that edit the log-ratio, set or edit the
     objective, or add a penalty.

  Inside a stage transforms run in the order in which they are written: to pool
  ratios and then clip is GSPO, to clip and then pool is GMPO. So an edit of the
  advantage that is written behind the weight or the objective still runs before
  both. An order that this would contradict raises a ValueError in `credit`, for
  example a transform that drops tokens and is written behind the weight that
  counts them.

  Args:
    *transforms: Transforms in reading order; a chain is a transform too.

  Returns:
    A `LossTransform`. Its state is the tuple of its transforms' states. It
    requires what any of them requires, its scope is the widest among theirs,
    and it is zero without an advantage if all of them are. It reads as many of
    the teacher's likeliest tokens as the one that reads most.

  >>> from grpo_jax import losses
  >>> method = losses.chain(losses.center_by_group(),
  ...                       losses.mean_over_tokens(), losses.ppo_clip())
  >>> method.scope
  'row'

  Raises:
    ValueError: One of them is no transform.
  """
  for transform in transforms:
    _checks.check_transform(transform, LossTransform, 'chain')

  def init():
    return tuple(transform.init() for transform in transforms)

  def credit(batch, state):
    states = []
    # strict: a state of another chain is refused, not used in part.
    for transform, inner_state in zip(transforms, state, strict=True):
      batch, inner_state = _checks.check_pair(
        transform.credit(batch, inner_state)
      )
      _checks.check_kind(batch, Batch, 'credit')
      states.append(inner_state)
    return batch, tuple(states)

  def prepare(batch, state):
    for transform, inner_state in zip(transforms, state, strict=True):
      batch = transform.prepare(batch, inner_state)
      _checks.check_kind(batch, Batch, 'prepare')
    return batch

  def apply(terms, batch, state):
    for transform, inner_state in zip(transforms, state, strict=True):
      terms = transform.apply(terms, batch, inner_state)
      _checks.check_kind(terms, SurrogateTerms, 'apply')
    return terms

  requires = frozenset().union(*(t.requires for t in transforms))
  wide = any(transform.scope == 'batch' for transform in transforms)
  scope = 'batch' if wide else 'row'
  zero = all(transform.zero_without_advantage for transform in transforms)
  writes = tuple(one for transform in transforms for one in transform.writes)
  after = max((t.acts_after_tokens for t in transforms), default=0)
  top = max((t.top_tokens for t in transforms), default=0)
  return LossTransform(
    init, credit, prepare, apply, requires, scope, zero, writes, after, top
  )


OF_TURNS = frozenset({'turn', 'turn_reward', 'turn_state'})
"""Fields of episodes in `Batch.extras`; see `Batch`."""

OF_TEACHER = frozenset({'logp_teacher', 'teacher_top_logp'})
"""Fields of a teacher in `Batch.extras` that a loss may read; see `Batch`."""

# What a transform may require that is no field, but given to `surrogate_loss`.
_ARGUMENTS = frozenset({'entropy', 'logp_top'})

# Zeroed outside the mask. Not `tokens`: there it holds the ids that a tool
# wrote, and shared prefixes are compared over those too.
_PER_TOKEN = (
  'keep', 'version', 'logp_old', 'logp_ref', 'logp_sampler',
  'entropy_old', 'advantage', 'weight',
)  # fmt: skip
_PER_COMPLETION = ('valid', 'reward', 'truncated')

# Below the logarithm of any float64 number above 0, in nats.
_LEAST_LOGP = -1000.0


def make_batch(mask, reward, **fields) -> Batch:
  """Builds a `Batch`, with defaults for what the caller does not have.

  Args:
    mask: bool[P,G,T], the tokens that the policy chose (end token included).
    reward: f32[P,G].
    **fields: Any other field of `Batch`.

  Returns:
    A `Batch`: all completions valid, none truncated, every token kept. Without
    `tokens`, a method that compares the ids of completions is refused. Without
    `logp_old` the ratio is 1: right for the first update after sampling alone.

  >>> import jax.numpy as jnp
  >>> make_batch(jnp.ones((2, 4, 3), bool), jnp.zeros((2, 4))).valid.shape
  (2, 4)

  Raises:
    ValueError: `Batch` has no such field.
  """
  _checks.check_fields(fields, Batch._fields)
  mask, reward = jnp.asarray(mask, bool), jnp.asarray(reward)
  defaults: dict[str, Any] = dict(
    tokens=None,
    keep=mask,
    valid=jnp.ones(reward.shape, bool),
    reward_parts=reward[..., None],
    truncated=jnp.zeros(reward.shape, bool),
    version=jnp.zeros(mask.shape, jnp.int32),
  )
  return Batch(mask=mask, reward=reward, **(defaults | fields))


def check_batch(batch: Batch) -> Batch:
  """Checks the shapes, and zeroes padding and invalid completions.

  Args:
    batch: Any `Batch`; padding and invalid completions may hold anything.

  Returns:
    The batch, in which the mask of an invalid completion is empty, per-token
    fields are zero outside the mask, and per-completion fields are zero where
    not valid. Log-probabilities are at least -1000 nats, also those of tokens
    that a policy could not draw. `tokens` stays as it is, because the ids
    outside the mask are what a tool wrote. Floats are float32 at least.

  Raises:
    ValueError: A field has the wrong rank or shape.
  """
  if jnp.ndim(batch.mask) != 3:
    raise ValueError(
      f'Batch.mask has shape {jnp.shape(batch.mask)}; it must be [P,G,T] '
      '(prompts, completions per prompt, completion positions).'
    )
  shape = batch.mask.shape
  fields = batch._asdict()
  extras = dict(batch.extras)
  # Checked as `logp_ref` is.
  of_teacher = sorted(OF_TEACHER & extras.keys())
  fields |= {name: extras[name] for name in of_teacher}
  of_tokens = *_PER_TOKEN, *of_teacher
  wanted = {name: shape for name in ('tokens', *of_tokens)}
  wanted |= {name: shape[:2] for name in _PER_COMPLETION}
  if 'teacher_top_logp' in extras:
    number = jnp.shape(extras['teacher_top_logp'])[3:4]
    wanted['teacher_top_logp'] = (*shape, *(number or ('K',)))
  for name, want in wanted.items():
    if fields[name] is not None and jnp.shape(fields[name]) != want:
      raise ValueError(
        f'Batch.{name} has shape {jnp.shape(fields[name])}, but Batch.mask has '
        f'shape {shape}: give {name} the shape {want}.'
      )
  for name, value in {
    'reward_parts': batch.reward_parts,
    **batch.extras,
  }.items():
    if jnp.shape(value)[:2] != shape[:2]:
      raise ValueError(
        f'Batch field {name!r} has shape {jnp.shape(value)}; its first axes '
        f'must be [P,G] = {shape[:2]}.'
      )
  valid = batch.valid.astype(bool)
  mask = batch.mask.astype(bool) & valid[:, :, None]
  for name in of_tokens:
    if fields[name] is not None:
      # Not a product with the mask, because 0 times NaN is NaN. `where` with a
      # 0 turns the booleans of `keep` into integers, and `wide` turns them
      # back: `~` and the `where=` of a reduction need booleans.
      value, inside = fields[name], mask
      if name == 'teacher_top_logp':
        inside = mask[..., None]
      value = _checks.wide(jnp.where(inside, value, 0), value.dtype)
      # The logarithm of 0 would make a log-ratio infinite, and the losses that
      # saturate it NaN: infinity minus infinity.
      if name.startswith('logp_') or name in OF_TEACHER:
        value = jnp.maximum(value, _LEAST_LOGP)
      fields[name] = value
  extras |= {name: fields[name] for name in of_teacher}
  # `reward_parts` may have any number of axes behind [P,G].
  parts_valid = valid.reshape(
    valid.shape + (1,) * (batch.reward_parts.ndim - 2)
  )
  return batch._replace(
    **{name: fields[name] for name in _PER_TOKEN},
    mask=mask,
    valid=valid,
    reward=jnp.where(valid, at_least_float32(batch.reward), 0),
    reward_parts=jnp.where(
      parts_valid, at_least_float32(batch.reward_parts), 0
    ),
    truncated=batch.truncated.astype(bool) & valid,
    extras=extras,
  )


def _with_turns(method: LossTransform, batch: Batch) -> Batch:
  """The batch, of single turns if it has no turns and the method reads them."""
  wanted = method.requires & OF_TURNS
  if not wanted or any(name in batch.extras for name in OF_TURNS):
    return batch
  shape = batch.mask.shape
  single = {
    'turn': jnp.zeros(shape, jnp.int32),
    'turn_reward': jnp.zeros((*shape[:2], 1), batch.reward.dtype),
    'turn_state': jnp.zeros((*shape[:2], 1), jnp.int32),
  }
  extras = {**batch.extras, **{name: single[name] for name in sorted(wanted)}}
  return batch._replace(extras=extras)


def with_required(method: LossTransform, batch: Batch) -> Batch:
  """Fills the required fields that a batch lacks with zeros.

  Meant for tracing, where only shapes and dtypes matter.

  Args:
    method: A chain.
    batch: Any `Batch`.

  Returns:
    The batch with a value for every name in `method.requires`: in its field, or
    in `extras` if `Batch` has no such field. Only `'entropy'` and `'logp_top'`
    are left out: they are arguments of `surrogate_loss`, not fields.
  """
  batch = _with_turns(method, batch)
  given = {**batch._asdict(), **batch.extras}
  shape = batch.mask.shape
  shapes = {'teacher_top_logp': (*shape, method.top_tokens)}
  missing = {
    name: jnp.zeros(shapes.get(name, shape))
    for name in method.requires - _ARGUMENTS
    if given.get(name) is None
  }
  # `pop` leaves in `missing` only the names that `Batch` has no field for.
  known = {k: missing.pop(k) for k in batch._fields if k in missing}
  return batch._replace(extras={**batch.extras, **missing}, **known)


def credit(
  method: LossTransform, batch: Batch, state: State
) -> tuple[Batch, State]:
  """Turns a rollout's rewards into advantages; run it once per rollout.

  Args:
    method: A chain.
    batch: The whole rollout, `[P,G,T]`. Without the fields `OF_TURNS` each
      completion is a single turn.
    state: `method.init()` or what the previous `credit` returned.

  Returns:
    The checked batch with `advantage` f32[P,G,T] and `keep` set, and the
    method's new state.

  Raises:
    ValueError: The chain is out of order in any of its stages, a field has the
      wrong shape or is missing, or no transform sets the advantage.
  """
  _checks.check_transform(method, LossTransform, 'credit')
  _checks.check_order(method.writes)
  batch = _with_turns(method, check_batch(batch))
  required = method.requires - _ARGUMENTS
  _checks.check_required(required, batch._asdict(), batch.extras)
  with _checks.with_state(method, state, 'credit'):
    credited, state = _checks.check_pair(method.credit(batch, state))
  written = 'advantage', 'keep'
  _checks.check_result(credited, Batch, written, batch.mask.shape, 'credit')
  batch = credited
  if batch.advantage is None:
    raise ValueError(
      'No transform of this method sets the advantage; add one, for example '
      'normalize_by_group().'
    )
  return batch, state


def prepare(method: LossTransform, batch: Batch, state: State) -> Batch:
  """Weighs the tokens of one optimizer batch; run it once per optimizer step.

  Args:
    method: A chain.
    batch: What `credit` returned, or some of its prompts.
    state: The state that `credit` returned.

  Returns:
    The batch with `weight` f32[P,G,T], zero wherever `keep` is False.

  Raises:
    ValueError: No transform sets the weight, or `credit` has not been run.
  """
  _checks.check_transform(method, LossTransform, 'prepare')
  if batch.advantage is None:
    raise ValueError(
      'prepare got a batch without advantage; run losses.credit on the whole '
      'rollout first.'
    )
  with _checks.with_state(method, state, 'prepare'):
    prepared = method.prepare(batch, state)
  written = 'advantage', 'weight'
  _checks.check_result(prepared, Batch, written, batch.mask.shape, 'prepare')
  batch = prepared
  if batch.weight is None:
    raise ValueError(
      'No transform of this method sets the weight; add one, for example '
      'mean_over_tokens().'
    )
  return batch._replace(weight=jnp.where(batch.keep, batch.weight, 0))


def surrogate_loss(
  method: LossTransform,
  logp: Array,
  batch: Batch,
  state: State,
  entropy: Array | None = None,
  logp_top: Array | None = None,
) -> tuple[Array, SurrogateTerms]:
  r"""The loss of one micro-batch, a sum:

  .. math:: -\sum_{i,t} w_{it} (\text{objective}_{it} - \text{penalty}_{it})

  Every denominator is already inside the weight. So the sums of all
  micro-batches, devices and rows add up to the loss of the optimizer batch.

  Args:
    method: A chain.
    logp: f[P,G,T], log-probability of `batch.tokens` under the policy, nats.
    batch: What `prepare` returned, or some of its completions. When
      `method.scope` is `'row'`, these may be arranged as any `[P,G]`. Without
      `logp_old` the ratio to the old policy is exactly 1. That is right for the
      first update after sampling. For every later update of the same rollout
      give `logp_old`, or nothing is ever clipped.
    state: The state that `credit` returned.
    entropy: f[P,G,T], nats; needed only if `'entropy' in method.requires`.
    logp_top: f[P,G,T,K], log-probabilities under the policy of the tokens
      `teacher_top_ids` of the batch, nats; needed only if `'logp_top' in
      method.requires`.

  Returns:
    The loss, f32[], and the `SurrogateTerms` it was made of.

  Raises:
    ValueError: The method sets no objective, a field that it requires is
      missing, `logp`, `entropy` or `logp_top` has another shape than the batch,
      or `credit` and `prepare` have not been run.

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> method = losses.methods.rloo()
  >>> batch = make_batch(jnp.ones((1, 2, 3), bool), jnp.array([[1.0, 0.0]]))
  >>> batch, state = credit(method, batch, method.init())
  >>> batch = prepare(method, batch, state)
  >>> loss, terms = surrogate_loss(method, jnp.zeros((1, 2, 3)), batch, state)
  >>> batch.advantage[0, :, 0].tolist()
  [1.0, -1.0]
  """
  _checks.check_transform(method, LossTransform, 'surrogate_loss')
  given = {'entropy': entropy, 'logp_top': logp_top, **batch._asdict()}
  _checks.check_required(method.requires, given, batch.extras)
  if batch.advantage is None or batch.weight is None:
    raise ValueError(
      'surrogate_loss got a batch without advantage or weight; run '
      'losses.credit on the rollout and losses.prepare on the batch first.'
    )
  for name, value in (('logp', logp), ('entropy', entropy)):
    if value is not None and jnp.shape(value) != batch.mask.shape:
      raise ValueError(
        f'surrogate_loss got {name} of shape {jnp.shape(value)}, but '
        f'Batch.mask has shape {batch.mask.shape}: give one value for each '
        'token of the batch, [P,G,T].'
      )
  top = () if logp_top is None else jnp.shape(logp_top)
  if top and (len(top), top[:3]) != (4, batch.mask.shape):
    raise ValueError(
      f'surrogate_loss got logp_top of shape {top}, but Batch.mask has shape '
      f'{batch.mask.shape}: give one value for each of the tokens in '
      'teacher_top_ids, [P,G,T,K].'
    )
  # Losses are float32 at least, whatever the model computes in. `logp` may
  # hold anything outside the mask, NaN too.
  logp = jnp.where(batch.mask, at_least_float32(logp), 0)
  logp = jnp.maximum(logp, _LEAST_LOGP)
  if entropy is not None:
    entropy = jnp.where(batch.mask, at_least_float32(entropy), 0)
  if logp_top is not None:
    logp_top = jnp.where(batch.mask[..., None], at_least_float32(logp_top), 0)
    logp_top = jnp.maximum(logp_top, _LEAST_LOGP)
  # Without `logp_old` the ratio is exactly 1, in every dtype. A `logp_old` from
  # a pass of its own differs by rounding: measured in bfloat16 by up to 5.9e-3,
  # and then 38 % of the completions lie outside the clip range of GSPO before
  # the policy has moved.
  old = lax.stop_gradient(logp) if batch.logp_old is None else batch.logp_old
  terms = SurrogateTerms(
    logp, logp - old, entropy, None, jnp.zeros_like(logp), {}, logp_top
  )
  with _checks.with_state(method, state, 'surrogate_loss'):
    terms = method.apply(terms, batch, state)
  written, shape = ('objective', 'penalty'), batch.mask.shape
  _checks.check_result(terms, SurrogateTerms, written, shape, 'apply')
  if terms.objective is None:
    raise ValueError(
      'No transform of this method sets the objective; add one, for example '
      'ppo_clip(0.2, 0.2).'
    )
  # The weight of a dropped token is 0, but its value may be infinite, and 0
  # times infinity would be NaN.
  value = jnp.where(batch.keep, terms.objective - terms.penalty, 0)
  loss = -jnp.sum(batch.weight * value)
  return loss, terms
