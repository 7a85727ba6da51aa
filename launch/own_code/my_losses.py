"""A loss of one's own: a method of the package, and a transform more."""

from grpo_jax import losses


def patient_grpo(patience: float = 0.5) -> losses.LossTransform:
  """GRPO that learns more from what went right than from what went wrong.

  .. math:: A_i \\leftarrow A_i \\text{ if } A_i > 0 \\text{ else } p A_i

  Args:
    patience: The factor `p` of advantages below 0.
  """

  def lower(advantage, batch, patience):
    del batch
    return advantage * (patience + (1 - patience) * (advantage > 0))

  return losses.chain(
    losses.normalize_by_group(),
    losses.on_advantage(lower, patience=patience),
    losses.mean_over_sequences(),
    losses.ppo_clip(0.2, 0.2),
  )
