"""The coefficients that a method gives to whole groups, read from its loss."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.lab.studies.papers import _compiling


def of_groups(
  method: losses.LossTransform,
  reward: np.ndarray,
  length: np.ndarray,
  **fields: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Coefficients -d loss / d logp at ratio 1, each group a batch of its own.

  Args:
    method: Any method that needs no entropy of the policy.
    reward: f64[N,G].
    length: i64[N,G], tokens of each completion, at least 1.
    **fields: Other fields of `losses.Batch`, `[N,G,...]`.

  Returns:
    The coefficients f64[N,G,T] and the value of the loss f64[N].
  """
  mask = np.arange(length.max()) < length[..., None]

  def one(mask, reward, fields):
    batch = losses.make_batch(
      mask[None], reward[None], **{k: v[None] for k, v in fields.items()}
    )
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)

    def loss(logp):
      return losses.surrogate_loss(method, logp, batch, state)[0]

    value, slope = jax.value_and_grad(loss)(-jnp.ones(batch.mask.shape))
    return -slope[0], value

  with jax.enable_x64(True):
    found = _compiling.jit(jax.vmap(one))(
      mask, np.asarray(reward, np.float64), fields
    )
    return np.asarray(found[0]), np.asarray(found[1])
