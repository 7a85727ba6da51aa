"""Methods that must be refused before anything runs."""

from grpo_jax import losses


def wrong_order():
  """Clips before there is a weight or an advantage."""
  return losses.chain(losses.ppo_clip(), losses.normalize_by_group())


def k1():
  """A KL term whose expected gradient is zero."""
  return losses.chain(losses.methods.dr_grpo(), losses.add_kl(0.1, 'k1'))
