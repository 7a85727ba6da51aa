"""The mutants that no test can or should see; `tests.mutants` reads this."""

EQUIVALENT = {
  (
    'losses/_credit.py:drop_uniform_groups.keep',
    'return keep & ~_ops.uniform_groups(batch)[:, None, None]',
    'keep & ~_ops.uniform...h)[:, None, None] -> '
    '~_ops.uniform_groups...h)[:, None, None]',
  ): '`on_keep` itself joins the result with what was kept before',
  (
    'losses/_ops.py:centered_reward',
    'offset = jnp.where(batch.valid, batch.reward - anchor, 0)',
    '0 -> 1',
  ): 'the mean and the last line both mask invalid entries again',
  (
    'losses/_ops.py:rank_descending',
    'rank = jnp.argsort(order, stable=True).reshape(value.shape)',
    'True -> False',
  ): '`order` is a permutation: no ties, so any sort is stable',
  (
    'losses/_penalty.py:penalize_covariance.penalty',
    'logp, kept = lax.stop_gradient(terms.logp), batch.keep',
    'lax.stop_gradient(terms.logp) -> terms.logp',
  ): 'only a comparison reads it, and that has no gradient; it saves work',
}
"""(file:function, source line, change) -> why no test can or should see it."""
