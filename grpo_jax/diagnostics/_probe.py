"""Probes: small batches on which a method is read off by evaluating it.

All probes of an audit have their shape in common and are evaluated at once, by
`jax.vmap`, in float64 and without a compiled program of their own: what XLA
compiles for one method serves the next.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses

PROBE_SHAPE = 256, 2, 8, 20
"""[N,P,G,T] of all probes: what XLA compiles for one serves the next."""

Fields = Callable[[losses.Batch], Mapping[str, Any]]
"""A user's generator: the batch of a probe -> fields by name, [P,G,...]."""


class Probe(NamedTuple):
  """Batches and the policy on them; every array has a leading axis `[N]`."""

  batch: losses.Batch  # uncredited, every optional field set
  logp: np.ndarray  # f64[N,P,G,T], under the policy
  entropy: np.ndarray  # f64[N,P,G,T], of the policy, nats


class Reading(NamedTuple):
  """What a method makes of probes, NumPy; coefficients of the maximised J."""

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


def make(
  reward: np.ndarray,
  length: np.ndarray,
  logp_old: np.ndarray,
  *,
  log_ratio: np.ndarray | float = 0.0,
  gap_ref: np.ndarray | float = 0.0,
  tokens: np.ndarray | None = None,
  entropy: np.ndarray | float = 0.7,
  fields: Fields | None = None,
) -> Probe:
  """Builds probes, with every field that a method may require.

  The sampler is the old policy; `entropy` is the old and the current one's;
  tokens are all different unless given; there is one reward function.

  Args:
    reward: f64[N,P,G].
    length: i32[N,P,G], tokens.
    logp_old: f64[N,P,G,T], nats.
    log_ratio: Of policy to old policy, f64[N,P,G,T] or a number.
    gap_ref: logp_ref minus logp of the policy, f64[N,P,G,T] or a number.
    tokens: i32[N,P,G,T], ids.
    entropy: Nats, f64[N,P,G,T] or a number.
    fields: A user's generator of fields; see `Fields`.

  Returns:
    A `Probe`.
  """
  shape = logp_old.shape
  mask = np.arange(shape[-1]) < length[..., None]
  if tokens is None:
    each = np.arange(np.prod(shape[1:])).reshape(shape[1:])
    tokens = np.broadcast_to(each, shape)
  logp = logp_old + log_ratio
  entropy = np.broadcast_to(np.asarray(entropy, float), shape)
  noise = np.random.default_rng(0).random(shape[1:])
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=np.ones(reward.shape, bool),
    reward=np.asarray(reward, float),
    reward_parts=np.asarray(reward, float)[..., None],
    truncated=np.zeros(reward.shape, bool),
    version=np.zeros(shape, np.int32),
    logp_old=logp_old,
    logp_ref=logp + gap_ref,
    logp_sampler=logp_old,
    entropy_old=entropy,
    extras={
      'noise': np.broadcast_to(noise, shape),
      'updates_done': np.zeros(shape),  # as at ratio 1
    },
  )
  if fields is not None:
    batch = _with_fields(batch, fields)
  return Probe(batch, logp, entropy)


def _with_fields(batch: losses.Batch, fields: Fields) -> losses.Batch:
  """The batch with what the user's generator makes of each of its probes."""
  with jax.enable_x64(True):  # float64 stays that in jax.numpy too
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


def check_fields(method: losses.LossTransform, probe: Probe) -> None:
  """Raises if the method requires what no probe has.

  Raises:
    ValueError: It names the field, and how to supply it.
  """
  for name in sorted(method.requires - {'entropy', *losses.Batch._fields}):
    if name not in probe.batch.extras:
      raise ValueError(
        f'The method requires the field {name!r}, which an audit cannot make '
        f'up; give fields=function, where function(batch) returns {{{name!r}: '
        'array [P,G,...]}.'
      )


def read(
  method: losses.LossTransform,
  probe: Probe,
  advantage: np.ndarray | None = None,
) -> Reading:
  """Evaluates a method on probes.

  Args:
    method: A chain.
    probe: See `Probe`.
    advantage: f64[N,P,G,T], put in place of what `credit` makes.

  Returns:
    A `Reading`.
  """
  check_fields(method, probe)

  def one(batch, logp, entropy, forced):
    batch, state = losses.credit(method, batch, method.init())
    if advantage is not None:
      batch = batch._replace(advantage=jnp.where(batch.mask, forced, 0))
    batch = losses.prepare(method, batch, state)

    weight = batch.weight
    assert weight is not None  # losses.prepare has set it

    def parts(logp, entropy):
      loss, terms = losses.surrogate_loss(method, logp, batch, state, entropy)
      assert terms.objective is not None  # or surrogate_loss had raised
      parts = jnp.stack([terms.objective, -terms.penalty])
      kept = jnp.where(batch.keep[None], parts, 0)
      return tuple(jnp.sum(weight[None] * kept, axis=(1, 2, 3))), loss

    # One vector-Jacobian product for each part.
    _, pull_back, loss = jax.vjp(parts, logp, entropy, has_aux=True)
    by_objective = pull_back((jnp.ones_like(loss), jnp.zeros_like(loss)))
    by_penalty = pull_back((jnp.zeros_like(loss), jnp.ones_like(loss)))
    return Reading(
      loss,
      by_objective[0],
      by_penalty[0],
      by_objective[1] + by_penalty[1],
      batch.advantage,
      weight,
    )

  with jax.enable_x64(True):
    forced = probe.logp if advantage is None else advantage
    reading = jax.vmap(one)(probe.batch, probe.logp, probe.entropy, forced)
    return jax.tree.map(np.asarray, reading)
