"""Methods that must be refused before anything runs."""

from grpo_jax import losses


def wrong_order():
  """Pools the ratios after the objective has read them."""
  return losses.chain(losses.methods.dr_grpo(), losses.pool_log_ratio())


def k1():
  """A KL term whose expected gradient is zero."""
  return losses.chain(losses.methods.dr_grpo(), losses.add_kl(0.1, 'k1'))
