"""Methods that must be refused before anything runs."""

from grpo_jax import losses


def wrong_order():
  """Pools the ratios after the objective has read them."""
  return losses.chain(losses.methods.dr_grpo(), losses.pool_log_ratio())


def raises():
  """Fails before there is a method."""
  return {}['no table']


def raises_when_traced():
  """Fails where its function is called."""

  def reward(reward, batch):
    del reward, batch
    raise KeyError('no column')

  return losses.chain(losses.on_reward(reward), losses.methods.dr_grpo())


def k1():
  """A KL term whose expected gradient is zero."""
  return losses.chain(losses.methods.dr_grpo(), losses.add_kl(0.1, 'k1'))


def top_of_none():
  """Reads likeliest tokens, and does not say of how many."""
  reads = 'teacher_top_logp', 'logp_top'
  penalty = lambda terms, batch: terms.logp_top.sum(-1)
  return losses.chain(
    losses.methods.rloo(), losses.add_penalty(penalty, requires=reads)
  )
