"""One-token completions of weight 1: what a link does to each, by itself."""

import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from tests.losses import cases


def run(links, now, old, advantage, dtype=jnp.float64, **fields):
  """(terms, d loss / d logp) of one-token completions, weight 1 each."""
  row = lambda x: jnp.asarray(x, dtype)[None, :, None]
  number = len(now)
  batch = losses.make_batch(
    jnp.ones((1, number, 1), bool),
    jnp.asarray([advantage], dtype),
    logp_old=row(old),
    **fields,
  )
  method = losses.chain(
    losses.use_reward(),
    losses.set_weight(lambda batch: jnp.ones_like(batch.logp_old)),
    *links,
  )
  _, terms, _, gradient = cases.terms_and_gradient(method, batch, row(now))
  return terms, np.asarray(gradient)[0, :, 0]
