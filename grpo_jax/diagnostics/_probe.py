"""Probes: small batches on which a method is evaluated to see what it does.

All evaluations have one of two shapes and are done in float64, so that a method
is compiled twice for a whole audit.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses

ROWS = 256  # batches that are evaluated at once
SHAPE = 2, 8, 20  # [P,G,T] of a batch, unless a tree needs more room

Fields = Callable[[losses.Batch], Mapping[str, Any]]
"""A user's function: the batch of a probe -> fields by name, [P,G,...]."""


class Probe(NamedTuple):
  """Batches and the policy on them; every array has a leading axis `[N]`."""

  batch: losses.Batch  # uncredited, every optional field set
  logp: np.ndarray  # f64[N,P,G,T], under the policy
  entropy: np.ndarray  # f64[N,P,G,T], of the policy, nats
  advantage: np.ndarray | None  # f64[N,P,G,T], in place of the method's own

  @property
  def mask(self) -> np.ndarray:
    """bool[N,P,G,T]: the tokens of valid completions."""
    return np.asarray(self.batch.mask & self.batch.valid[..., None])

  def edited(self, **fields: Any) -> 'Probe':
    """The probe with other fields of its batch."""
    return self._replace(batch=self.batch._replace(**fields))


class Reading(NamedTuple):
  """What a method computes on probes, as NumPy arrays; J is maximised."""

  loss: Any  # f64[N]
  objective: Any  # f64[N,P,G,T], d sum(weight * objective) / d logp
  penalty: Any  # f64[N,P,G,T], -d sum(weight * penalty) / d logp
  entropy: Any  # f64[N,P,G,T], -d loss / d entropy
  advantage: Any  # f64[N,P,G,T]
  weight: Any  # f64[N,P,G,T]

  @property
  def coefficient(self) -> np.ndarray:
    """f64[N,P,G,T]: -d loss / d logp, the paper's omega times A."""
    return self.objective + self.penalty


Probes = dict[str, Probe]
Readings = dict[str, Reading]


def hashable(method: losses.LossTransform) -> losses.LossTransform:
  """The method, or a chain of it that JAX can tell from another method.

  Call it once for a method: JAX compiles every new chain anew.
  """
  try:
    hash(method)
  except TypeError:  # a list of requirements, a transform with arrays in it
    return losses.chain(method)
  return method


@dataclasses.dataclass(frozen=True)
class Subject:
  """A method under audit, and the function that supplies its own fields."""

  method: losses.LossTransform
  fields: Fields | None = None

  def __post_init__(self):
    # A frozen dataclass refuses plain assignment, here too.
    object.__setattr__(self, 'method', hashable(self.method))

  def probe(
    self,
    reward: np.ndarray,  # f64[N,P,G]
    length: np.ndarray,  # i32[N,P,G], tokens
    logp_old: np.ndarray,  # f64[N,P,G,T], nats
    log_ratio: np.ndarray | float = 0.0,  # of policy to old policy
    gap_ref: np.ndarray | float = 0.0,  # logp_ref minus logp of the policy
    gap_teacher: np.ndarray | float = 0.0,  # likewise of the teacher
    tokens: np.ndarray | None = None,  # ids; all of them differ unless given
    entropy: np.ndarray | float = 0.7,  # of the old and of the current policy
    valid: np.ndarray | bool = True,  # bool[N,P,G]
    advantage: np.ndarray | None = None,  # in place of what `credit` makes
  ) -> Probe:
    """Builds a probe with every field that a method may require.

    The sampler is the old policy. Arrays without a shape are [N,P,G,T].
    """
    shape, logp = logp_old.shape, logp_old + log_ratio
    if tokens is None:
      tokens = np.arange(np.prod(shape[1:])).reshape(shape[1:])
    entropy = np.broadcast_to(np.asarray(entropy, float), shape)
    noise = np.random.default_rng(0).random(shape[1:])
    with jax.enable_x64(True):
      batch = losses.make_batch(
        np.arange(shape[-1]) < length[..., None],
        np.asarray(reward, float),
        tokens=np.broadcast_to(tokens, shape),
        valid=np.broadcast_to(valid, reward.shape),
        logp_old=logp_old,
        logp_ref=logp + gap_ref,
        logp_sampler=logp_old,
        entropy_old=entropy,
        extras={
          'noise': np.broadcast_to(noise, shape),
          'updates_done': np.zeros(shape),  # at ratio 1 there were none
          'age': np.zeros(shape),  # the policy that learns has drawn them
          'logp_teacher': logp + gap_teacher,
          'teacher_top_logp': top_of(self.method, logp + gap_teacher),
        },
      )
    batch = _with_fields(jax.tree.map(np.asarray, batch), self.fields)
    return Probe(batch, logp, entropy, advantage)

  def probes(self, base: dict, changes: Mapping[str, dict]) -> Probes:
    """Probes by name: the arguments `base` of `probe`, some of them changed."""
    return {name: self.probe(**base | new) for name, new in changes.items()}

  def read(self, probes: Probes) -> Readings:
    """Evaluates the method on all batches of some probes at once, by name."""
    sizes = [len(probe.logp) for probe in probes.values()]
    join = lambda *arrays: np.concatenate(arrays)
    joined = jax.tree.map(join, *probes.values())

    def evaluated(start):  # rows from `start` on, filled up by the last row
      at = np.arange(start, start + ROWS)
      rows = lambda x: np.take(x, at, axis=0, mode='clip')
      return _evaluate(self.method, jax.tree.map(rows, joined))

    readings = map(evaluated, range(0, sum(sizes), ROWS))
    cut = [
      np.split(join(*arrays), np.cumsum(sizes))[:-1]
      for arrays in zip(*readings, strict=True)
    ]
    return dict(zip(probes, map(Reading, *cut), strict=True))


def top_of(method: losses.LossTransform, logp: Any) -> Any:
  """f64[...,K], log-probabilities of the tokens that are a teacher's likeliest.

  One of them moves with the sampled token, 1 nat below it, so that it is less
  likely than all together; the others have no mass.

  Args:
    method: Says how many are read.
    logp: f64[...], of the sampled token, under the policy or the teacher.
  """
  shape = *logp.shape, max(method.top_tokens - 1, 0)
  none = jnp.full(shape, -1000.0, logp.dtype)
  return jnp.concatenate([logp[..., None] - 1, none], axis=-1)


def _with_fields(batch: losses.Batch, fields: Fields | None) -> losses.Batch:
  """The batch with what the user's function makes of each of its rows."""
  if fields is None:
    return batch
  with jax.enable_x64(True):  # else jax.numpy would cast float64 to float32
    made = [
      fields(jax.tree.map(lambda x: x[n], batch))  # noqa: B023
      for n in range(len(batch.reward))
    ]
  for one in made:
    if not isinstance(one, Mapping):
      raise ValueError(
        f'fields returned a {type(one).__name__} where a dict is needed; '
        "return the fields by name, {'name': array [P,G,...]}."
      )
  given = {name: np.stack([one[name] for one in made]) for name in made[0]}
  known = {name: given.pop(name) for name in batch._fields if name in given}
  return batch._replace(extras={**batch.extras, **given}, **known)


def _evaluate(method: losses.LossTransform, probe: Probe) -> Reading:
  """Evaluates a method on a probe, mapped over its axis `[N]`."""
  made = {'entropy', 'logp_top', *losses.Batch._fields, *losses.OF_TURNS}
  for name in sorted(method.requires - made):
    if name not in probe.batch.extras:
      raise ValueError(
        f'The method requires the field {name!r}, which an audit cannot make '
        f'up; give fields=function, where function(batch) returns {{{name!r}: '
        'array [P,G,...]}.'
      )

  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, _compiled(method, probe))


# Compiling takes most of the time, and less of it without optimizations.
@functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 0},
)
def _compiled(method: losses.LossTransform, probe: Probe) -> Reading:
  """What `_evaluate` returns, as arrays of JAX."""

  def one(probe):
    batch, state = losses.credit(method, probe.batch, method.init())
    if probe.advantage is not None:
      # Zero outside the mask, as `credit` would have left it.
      forced = jnp.where(batch.mask, probe.advantage, 0)
      batch = batch._replace(advantage=forced)
    batch = losses.prepare(method, batch, state)
    weight = batch.weight
    assert weight is not None  # losses.prepare has set it

    def parts(logp, entropy):
      top = top_of(method, logp)
      loss, terms = losses.surrogate_loss(
        method, logp, batch, state, entropy, top
      )
      assert terms.objective is not None  # or surrogate_loss had raised
      parts = jnp.stack([terms.objective, -terms.penalty])
      kept = jnp.where(batch.keep[None], parts, 0)
      return tuple(jnp.sum(weight[None] * kept, axis=(1, 2, 3))), loss

    # One vector-Jacobian product for each part, so that an audit can tell what
    # the objective does from what the penalty does.
    _, pull, loss = jax.vjp(parts, probe.logp, probe.entropy, has_aux=True)
    on, off = jnp.ones_like(loss), jnp.zeros_like(loss)
    (objective, entropy), (penalty, more) = pull((on, off)), pull((off, on))
    return Reading(
      loss, objective, penalty, entropy + more, batch.advantage, weight
    )

  return jax.vmap(one)(probe)


def single_out(sign: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Rewards f64[N,P,G], advantages f64[N,P,G,T] that single a completion out.

  The first completion alone is right (`sign` f64[N] is 1) or wrong (-1) in its
  group. So its advantage is the largest there, and a method that drops small
  advantages keeps it.
  """
  group = SHAPE[1]
  own, in_turn = np.arange(group) == 0, np.arange(group) % 2 == 0
  right = np.where(sign[:, None] > 0, own, ~own)
  reward = np.stack([right, np.broadcast_to(in_turn, right.shape)], axis=1)
  alone = sign[:, None] * np.where(own, 1, -1 / (group - 1))
  advantage = np.stack([alone, 2.0 * reward[:, 1] - 1], axis=1)[..., None]
  return reward.astype(float), advantage * np.ones(SHAPE[-1])
