"""GRPO and the methods that keep its token-wise ratio and clip."""

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._from_run import takes_from_run
from grpo_jax.losses._gate import mask_off_policy_negatives
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._shaping import divide_by_batch_deviation
from grpo_jax.losses._shaping import keep_largest_advantages
from grpo_jax.losses._weight import gate_small_advantages
from grpo_jax.losses._weight import mean_over_sequence_sums
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens


def grpo(
  low=0.2, high=0.2, kl_coefficient=0.04, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group Relative Policy Optimization.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr) - \beta\, k_3

  The paper names no clip bounds. It says "std" without saying which, and has no
  `epsilon`; released code has 1e-4 or 1e-6. Its KL coefficient is 0.04, that of
  DeepSeek-R1 0.001.

  Args:
    low, high, kl_coefficient, deviation, epsilon: See `help(losses.methods)`.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )


def deepseek_v3_2(
  threshold=0.5, low=0.2, high=0.2, kl_coefficient=0.001, policy='old'
) -> LossTransform:
  r"""GRPO of DeepSeek-V3.2: unbiased KL, and a mask for stale wrong answers.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t M_i \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)
      - \beta\, s_{it} k_3, \quad A_i = r_i - \bar r

  :math:`M_i = 0` where :math:`A_i < 0` and the mean of
  :math:`\log(\pi_{old} / \pi)` over the completion exceeds the threshold;
  otherwise it is 1. The ratio in front of :math:`k_3` makes the gradient of the
  penalty that of KL(policy || reference).

  The paper names neither the threshold nor the KL coefficient. Its two other
  measures, keeping the engine's routing of experts and its sampling mask, are
  not the work of a loss.

  Args:
    threshold: Bound of the mean in `M`, in nats per token.
    low, high, kl_coefficient: See `help(losses.methods)`.
    policy: What `M` is measured from. `'old'` is the policy before the update.
      `'sampler'` takes what the engine reported; the paper means that one where
      the engine's log-probabilities differ from the learner's.

  References:
    DeepSeek-AI, `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025
  """
  return chain(
    center_by_group(),
    mean_over_sequences(),
    ppo_clip(low, high),
    # After the clip and as a gate on the objective alone: the penalty stays.
    mask_off_policy_negatives(threshold, policy),
    *maybe_kl(kl_coefficient, 'k3_weighted'),
  )


def cppo(
  threshold=1.0,
  pruning_rate=None,
  low=0.2,
  high=0.2,
  kl_coefficient=0.04,
  deviation='population',
  epsilon=0.0,
  spare_penalty=False,
) -> LossTransform:
  r"""Completion Pruning Policy Optimization.

  .. math::
    J = \frac{1}{B} \sum_{i: |A_i| \ge \gamma} \frac{1}{|o_i|} \sum_t
      \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)
      - \beta\, k_3

  The paper names no number for the threshold. Its released code prunes over the
  local batch and not by group. The paper also fills the memory that this frees
  with more prompts, which is no part of a loss.

  Args:
    threshold: :math:`\gamma`, in units of the z-score (equation 7).
    pruning_rate: None, or the share of each group that is pruned, in [0, 1); a
      number. It replaces the threshold: completions of least :math:`|A_i|` go
      first, and `B` counts those that are left (equations 8 to 10).
    low, high, kl_coefficient, deviation, epsilon: See `help(losses.methods)`.
    spare_penalty: Whether completions below the threshold keep their KL
      penalty. In the formula above they lose it.

  Raises:
    ValueError: A `pruning_rate` outside [0, 1), or one with `spare_penalty`: by
      a rate completions are not trained at all.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025
  """
  _ops.check_flag('cppo', 'spare_penalty', spare_penalty)
  if pruning_rate is not None:
    _ops.check_number(
      'cppo', 'pruning_rate', pruning_rate, least=0, most=1, moves=False
    )
    if pruning_rate == 1:
      raise ValueError(
        'cppo got pruning_rate=1, which leaves nothing; give less than 1.'
      )
  surrogate = ppo_clip(low, high), *maybe_kl(kl_coefficient)
  if pruning_rate is None:
    gate = gate_small_advantages(threshold, spare_penalty)
    return chain(
      normalize_by_group(deviation, epsilon),
      mean_over_sequences(),
      # After the weight, so that `B` still counts what is pruned. What spares
      # the penalty edits the objective, and stands behind that.
      *((*surrogate, gate) if spare_penalty else (gate, *surrogate)),
    )
  if spare_penalty:
    raise ValueError(
      f'cppo got spare_penalty=True and pruning_rate={pruning_rate}; a pruning '
      'rate drops completions altogether, so give one of the two.'
    )
  return chain(
    normalize_by_group(deviation, epsilon),
    # Before the weight, so that `B` counts only what is left.
    keep_largest_advantages(1 - pruning_rate),
    mean_over_sequences(),
    *surrogate,
  )


def dual_clip_grpo(
  low=0.2, high=0.2, cap=3.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO with PPO's dual clip, and without a KL term.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f_{it}, \quad
    f = \max\bigl(\min(s A, \operatorname{clip}(s, 1 - l, 1 + h) A), c A\bigr)
      \text{ if } A < 0

  For :math:`A \ge 0`, `f` is the inner minimum.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.
    cap: :math:`c`, an absolute ratio above `1 + high`.

  References:
    Ye et al., `Mastering Complex Control in MOBA Games
    <https://arxiv.org/abs/1912.09729>`_, 2020
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high, cap),
  )


def two_sided_grpo(
  low=0.2, high=0.2, cap=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO with the two-sided clip of INTELLECT-2.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(\min(s_{it}, \delta) A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  The cap acts where :math:`A < 0`, and there it equals the dual clip. The
  paper's recipe adds `add_kl(0.001)` and a small `add_entropy_bonus`.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.
    cap: :math:`\delta`, an absolute ratio above `1 + high`.

  References:
    Prime Intellect, `INTELLECT-2 <https://arxiv.org/abs/2505.07291>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high, cap),
  )


def lite_ppo(
  low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Lite PPO: the group's mean, the rollout's deviation, equal tokens.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr), \quad
    A_i = \frac{r_i - \bar r}{\sigma_{rollout}(r)}

  Args:
    low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, of all rewards of the rollout.

  References:
    Liu et al., `Tricks or Traps? <https://arxiv.org/abs/2508.08221>`_, 2025
  """
  return chain(
    center_by_group(),
    divide_by_batch_deviation(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


@takes_from_run(max_tokens='max_tokens')
def dr_grpo(max_tokens=3000, low=0.2, high=0.2) -> LossTransform:
  r"""GRPO done right: no division by the deviation or by the length.

  .. math::
    J = \frac{1}{B L_{max}} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr), \quad
    A_i = r_i - \bar r

  Args:
    max_tokens: :math:`L_{max}`, a constant number of tokens: the budget of a
      completion. It sets the scale of the loss and nothing else. A run takes
      its `sampler.max_tokens`; 3000 is that of the released code.
    low, high: See `help(losses.methods)`.

  References:
    Liu et al., `Understanding R1-Zero-Like Training
    <https://arxiv.org/abs/2503.20783>`_, 2025
  """
  return chain(
    center_by_group(), mean_over_sequence_sums(max_tokens), ppo_clip(low, high)
  )


@takes_from_run(soft_tokens='soft_tokens', max_tokens='max_tokens')
def dapo(
  low=0.2,
  high=0.28,
  soft_tokens=4096,
  max_tokens=20480,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Decoupled clip and dynamic sampling policy optimization.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  The sum runs over groups whose rewards differ before length is penalised. The
  paper samples until the batch is full of such groups, which is no part of a
  loss. The paper divides the sum over a prompt's group by the tokens of that
  group, inside the expectation over prompts (`mean_over_prompts` does that).
  Its released code divides by the tokens of the batch, and so does this.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. `high` is larger
      than `low`, so that improbable tokens can rise further.
    soft_tokens: Width of the ramp of the length penalty, in tokens. A run takes
      a fifth of its `sampler.max_tokens`.
    max_tokens: Length at which the length penalty reaches 1, in tokens. A run
      takes its `sampler.max_tokens`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """
  return chain(
    # First, because the length penalty makes equal rewards differ.
    drop_uniform_groups(),
    shape_overlong_reward(soft_tokens, max_tokens),
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )
