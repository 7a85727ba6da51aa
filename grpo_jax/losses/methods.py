r"""The methods of the literature by name.

Every function here returns a `LossTransform`: a `chain` of three to six
transforms. Its own docstring has the formula, the arguments that only it has,
each choice that the paper leaves open, and the paper. This page has what they
share: the list of methods, the notation and the arguments that many of them
take. It is a long file, because most of a method is its formula and the choices
that its paper leaves open.

The ratio of each token, and a hard clip:

- `grpo`: z-scored rewards, mean over completions, KL penalty (2402.03300)
- `deepseek_v3_2`: GRPO with an unbiased KL penalty; wrong completions that the
  policy has moved away from are masked (2512.02556)
- `dr_grpo`: no division by deviation or length (2503.20783)
- `dapo`: higher upper bound, mean over tokens, penalty for length (2503.14476)
- `lite_ppo`: the group's mean, the rollout's deviation (2508.08221)
- `cppo`: completions of small advantage are pruned (2503.22342)
- `dual_clip_grpo`: the ratio of wrong tokens is capped (1912.09729)
- `two_sided_grpo`: the same cap, mean over tokens (2505.07291)

The ratio of each token, and another trust region:

- `importance_sampling`: the plain ratio
- `sapo`: a sigmoid gate (2511.20347)
- `cispo`: the clipped ratio is a weight, so no token loses its gradient
  (2506.13585)
- `prompt_mean`: CISPO with a mean over prompts (ScaleRL, 2510.13786)
- `dppo_tv`, `dppo_kl`: a gate on the change of a token's probability
  (2602.04879)
- `dro`: a quadratic pull back to the old policy (2405.19107)

One ratio for the whole completion:

- `gspo`, `gspo_token`: the geometric mean of the token ratios, then the clip
  (2507.18071)
- `gmpo`: the clip, then the geometric mean (2507.20673)
- `luspo`: GSPO times the length (2602.05261)
- `gcpo`: the product of the token ratios, then the clip (2510.07790)
- `vespo`: a smooth weight of that product (2602.10693)

REINFORCE, the methods derived from it, and imitation:

- `reinforce`: no baseline (Williams, 1992)
- `rloo`: the mean of the group's other rewards as baseline (2402.14740)
- `opo`: the mean weighted by length as baseline (2505.23585)
- `gpg`: the loss is scaled up to make up for groups of equal rewards
  (2504.02546)
- `maxrl`: the gradient of the log of the success rate (2602.02710)
- `reinforce_pp`, `reinforce_pp_baseline`: advantages normalised over the
  rollout (2501.03262)
- `positive_nll`: a clip, and imitation of good completions (2504.05118)
- `supervised`: maximum likelihood of given completions

A teacher, a second model that scores what the policy has drawn:

- `opd`: on-policy distillation, the teacher's log-probability as the credit of
  each token, alone or beside rewards (2306.13649, 2601.02780)
- `gkd`: the KL to the teacher at each token, over its likeliest tokens, in
  either direction (2306.13649)

Another credit for a completion or for its tokens:

- `passk`: for the success of any k completions (2508.10751)
- `gdpo`: each of several rewards is normalised by itself (2601.05242)
- `gtpo_conflict`: tokens that right and wrong completions share are protected
  (2508.03772)

Credit by turn, for episodes of several turns:

- `rloo_to_go`: RLOO by turn, unbiased
- `grpo_to_go`: GRPO by turn, on discounted returns (2511.14846)
- `mt_grpo`: rewards of turns and of the outcome, each normalised by itself
  (2505.11821)
- `gigpo`: GRPO, and a comparison of turns that began in the same state
  (2505.10978)

Against the collapse of the entropy:

- `clip_cov`, `kl_cov`: tokens of high covariance are detached or penalised
  (2505.22617)
- `forking_tokens`: only tokens of high entropy are trained (2506.01939)
- `gtpo_entropy`, `grpo_s`: rewards shaped by entropy (2508.04349)

Notation of the formulas. They are maximised, and written for one optimizer
batch.

- :math:`i, t` is token `t` of completion `i`, :math:`o_i` the completion,
  :math:`|o_i|` its tokens; `G` completions form the group of a prompt.
- `B` counts the completions that keep at least one token, `N` the kept tokens,
  `P` the prompts that keep a token, :math:`N_p` the kept tokens of prompt `p`.
- :math:`r_i` is the reward, :math:`\bar r` and :math:`\sigma(r)` are mean and
  deviation in the group. :math:`A_i` is the z-score
  :math:`(r_i - \bar r) / \sigma(r)`, unless the formula says something else.
- :math:`s_{it}` is the ratio of the policy's probability of the token to the
  old policy's. :math:`sg[\cdot]` lets no gradient through.
- `j` is a turn, :math:`M` counts the turns that keep a token, and
  :math:`G_{ij}` is the return of turn `j`, see `leave_one_out_to_go`. A
  completion without turns is one of a single turn.
- :math:`l, h` are `low` and `high`, :math:`\beta` is `kl_coefficient`, and
  :math:`k_2, k_3` are the estimators of KL(policy || reference) in `add_kl`.

Arguments that methods share. The default is the paper's value where it has one.

- `low`, `high`: the ratio is clipped to `[1 - low, 1 + high]`. Both are
  distances from 1, not negative and without unit.
- `deviation`: what advantages are divided by: `'population'` divides the sum of
  squares by n, as the papers' formulas do, `'sample'` by n - 1, as most
  released code does.
- `epsilon`: what is added to that deviation, in its units. The papers have
  none. Released code needs some (1e-4 to 1e-9), as equal rewards would be 0/0;
  here they have an advantage of exactly 0 without it.
- `kl_coefficient`: factor of the KL penalty, per nat. The number 0 leaves the
  penalty out, and then no reference model is needed.

Where an argument is a float, a schedule of the rollout counter or a
`Controller` will do as well, unless its docstring asks for a number.

A method raises a ValueError if `deviation` is unknown, if `low` or `high` is
negative, and for what its transforms refuse besides.
"""

import math

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import center_by_length
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import credit_pass_at_k
from grpo_jax.losses._credit import divide_by_batch_deviation
from grpo_jax.losses._credit import divide_by_group_mean
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import keep_largest_advantages
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import normalize_each_reward
from grpo_jax.losses._credit import normalize_over_completions
from grpo_jax.losses._credit import normalize_over_tokens
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._credit import subtract_kl_to_go
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._entropy import LOG_2
from grpo_jax.losses._entropy import credit_completions_by_entropy
from grpo_jax.losses._entropy import credit_tokens_by_entropy
from grpo_jax.losses._entropy import mask_low_entropy
from grpo_jax.losses._entropy import silence_uncertain
from grpo_jax.losses._entropy import subtract_entropy
from grpo_jax.losses._from_run import takes_from_run
from grpo_jax.losses._objective import average_ratio
from grpo_jax.losses._objective import capped_score_function
from grpo_jax.losses._objective import clip_log_ratio
from grpo_jax.losses._objective import detach_covariance
from grpo_jax.losses._objective import gamma_weighted_score
from grpo_jax.losses._objective import gate_binary_kl
from grpo_jax.losses._objective import gate_probability_change
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import mask_off_policy_negatives
from grpo_jax.losses._objective import pool_log_ratio
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._objective import sigmoid_gate
from grpo_jax.losses._objective import sum_log_ratio
from grpo_jax.losses._penalty import imitate_positives
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._penalty import pull_to_old
from grpo_jax.losses._stages import set_objective
from grpo_jax.losses._teacher import add_teacher_advantage
from grpo_jax.losses._teacher import add_teacher_top_kl
from grpo_jax.losses._turns import add_credit_by_state
from grpo_jax.losses._turns import leave_one_out_to_go
from grpo_jax.losses._turns import mean_over_turns
from grpo_jax.losses._turns import normalize_to_go_by_group
from grpo_jax.losses._turns import normalize_turns_and_outcome
from grpo_jax.losses._weight import gate_small_advantages
from grpo_jax.losses._weight import mean_over_prompts
from grpo_jax.losses._weight import mean_over_sequence_sums
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import scale_by_informative_groups
from grpo_jax.losses._weight import weigh_conflict_tokens

__all__ = (
  'cispo',
  'clip_cov',
  'cppo',
  'dapo',
  'deepseek_v3_2',
  'dppo_kl',
  'dppo_tv',
  'dr_grpo',
  'dro',
  'dual_clip_grpo',
  'forking_tokens',
  'gcpo',
  'gdpo',
  'gigpo',
  'gkd',
  'gmpo',
  'gpg',
  'grpo',
  'grpo_s',
  'grpo_to_go',
  'gspo',
  'gspo_token',
  'gtpo_conflict',
  'gtpo_entropy',
  'importance_sampling',
  'kl_cov',
  'lite_ppo',
  'luspo',
  'maxrl',
  'mt_grpo',
  'opd',
  'opo',
  'passk',
  'positive_nll',
  'prompt_mean',
  'reinforce',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'rloo',
  'rloo_to_go',
  'sapo',
  'supervised',
  'two_sided_grpo',
  'vespo',
)


# GRPO and the methods that keep its token-wise ratio and clip.


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
    _ops.check_numbers(
      'cppo', least=0, most=1, moves=False, pruning_rate=pruning_rate
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


# Methods with another trust region than PPO's clip.


def importance_sampling() -> LossTransform:
  r"""The plain ratio, without a trust region.

  .. math:: J = \frac{1}{N} \sum_{i,t} s_{it} (r_i - \bar r)
  """
  return chain(center_by_group(), mean_over_tokens(), importance_weighted())


def sapo(
  positive=1.0, negative=1.05, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Soft Adaptive Policy Optimization: a sigmoid gate in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \frac{4}{\tau_i}
      \sigma\bigl(\tau_i (s_{it} - 1)\bigr) A_i

  Here :math:`\sigma` is the sigmoid function.

  Args:
    positive: :math:`\tau` where :math:`A > 0`.
    negative: :math:`\tau` elsewhere. It is larger, so that the gradient of
      wrong tokens fades nearer to ratio 1.
    deviation, epsilon: See `help(losses.methods)`.

  References:
    Gao et al., `Soft Adaptive Policy Optimization
    <https://arxiv.org/abs/2511.20347>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    sigmoid_gate(positive, negative),
  )


def cispo(
  low=1.0, high=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Clipped importance sampling weights: every token keeps its gradient.

  .. math::
    J = \frac{1}{N} \sum_{i,t} sg\bigl[\operatorname{clip}(s_{it}, 1 - l,
      1 + h)\bigr] A_i \log \pi(o_{it})

  The paper divides the sum over a prompt's group by the tokens of that group,
  inside the expectation over prompts (`mean_over_prompts` does that). Released
  code divides by the tokens of the batch, and so does this. The paper's unified
  form also has a token mask `M`. As long as no weight is clipped, that form has
  the gradient of this chain with `ppo_clip` as its objective.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. A `low` of 1 is
      no bound, as ratios are positive; the paper has none either. The paper
      names no number for `high`; 4, a largest ratio of 5, is that of ScaleRL.

  References:
    MiniMax, `MiniMax-M1 <https://arxiv.org/abs/2506.13585>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    capped_score_function(low, high),
  )


def prompt_mean(
  low=1.0, high=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The loss of ScaleRL: CISPO, averaged over prompts, with one deviation.

  .. math::
    J = \frac{1}{P} \sum_p \frac{1}{N_p} \sum_{i \in p, t}
      sg\bigl[\operatorname{clip}(s_{it}, 1 - l, 1 + h)\bigr]
      \frac{r_i - \bar r_p}{\sigma(r - \bar r)} \log \pi(o_{it})

  The sums run over prompts whose rewards differ. The deviation is that of all
  centered rewards of the rollout.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. A `low` of 1 is
      no bound, as ratios are positive.

  References:
    Khatri et al., `The Art of Scaling RL Compute
    <https://arxiv.org/abs/2510.13786>`_, 2025
  """
  return chain(
    center_by_group(),
    divide_by_batch_deviation(deviation, epsilon, within_groups=True),
    # The deviation contains the rewards of these groups all the same, as it
    # runs over all valid completions.
    drop_uniform_groups(),
    mean_over_prompts(),
    capped_score_function(low, high),
  )


def dppo_tv(low=0.2, high=0.2, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by each token's part of the total variation.

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  :math:`M_{it} = 0` where the probability of the token has risen by more than
  `h` and :math:`A > 0`, or fallen by more than `l` and :math:`A < 0`; otherwise
  it is 1.

  The paper measures from the sampler's probabilities and not from recomputed
  ones. In a run that is `learner.anchor='sampler'`.

  Args:
    low: `l`, the largest fall of a token's probability, not of its ratio.
    high: `h`, the largest rise, likewise.
    cap: :math:`c`, the largest absolute ratio, a number. The paper has 5 or
      none, released code 20.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_numbers('dppo_tv', least=1, most=math.inf, moves=False, cap=cap)
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # Bounds of a ratio as distances from 1: none below, `cap` above.
    capped_score_function(1.0, cap - 1),
    gate_probability_change(low, high),
  )


def dppo_kl(low=0.05, high=0.05, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by a binary KL: this token against all others.

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  :math:`M_{it} = 0` where that divergence, given in `gate_binary_kl`, exceeds
  its bound and the probability has moved the way the advantage pushes;
  otherwise it is 1. As in `dppo_tv`, the paper measures from the sampler's
  probabilities. It has one bound for both directions.

  Args:
    low: Bound of the divergence of a token whose probability has fallen, in
      nats.
    high: Bound for one whose probability has risen, in nats.
    cap: :math:`c`, the largest absolute ratio, a number.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_numbers('dppo_kl', least=1, most=math.inf, moves=False, cap=cap)
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # Bounds of a ratio as distances from 1: none below, `cap` above.
    capped_score_function(1.0, cap - 1),
    gate_binary_kl(low, high),
  )


def dro(coefficient=0.05) -> LossTransform:
  r"""Direct Reward Optimisation: a quadratic pull in place of a ratio.

  .. math::
    J = \frac{1}{N} \sum_{i,t} (r_i - \bar r) \log \pi(o_{it})
      - \frac{\beta}{2} (\log s_{it})^2

  This is the token-level form of released code. The paper regresses the
  log-ratio of a completion on its reward, with a learned value function.

  Args:
    coefficient: :math:`\beta`, per squared nat.

  References:
    Richemond et al., `Offline Regularised Reinforcement Learning
    <https://arxiv.org/abs/2405.19107>`_, 2024
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    score_function(),
    pull_to_old(coefficient),
  )


# Methods with one ratio for the whole completion.


def gspo(
  low=3e-4, high=4e-4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group Sequence Policy Optimization: pools the ratio, then clips it.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(s_i A_i, \operatorname{clip}(s_i, 1 - l,
      1 + h) A_i\bigr), \quad
    s_i = \exp\Bigl(\frac{1}{|o_i|} \sum_t \log s_{it}\Bigr)

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. The bounds are
      near 1, because a mean moves less than the ratio of a single token.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # 1 / (B L_i) for each of L_i equal terms: one term per completion.
    mean_over_sequences(),
    pool_log_ratio(),
    ppo_clip(low, high),
  )


def gspo_token(
  low=3e-4, high=4e-4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GSPO-token: the ratio of the completion, the slope of each token.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr), \quad
    s_{it} = sg[s_i] \frac{\pi_{it}}{sg[\pi_{it}]}

  With one advantage per completion, as here, value and gradient are those of
  `gspo`. They differ once an `on_advantage` makes the advantage depend on the
  token.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    pool_log_ratio(gradient='token'),
    ppo_clip(low, high),
  )


def luspo(
  low=2e-3, high=2.5e-3, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Length-Unbiased Sequence Policy Optimization: GSPO times the length.

  .. math::
    J = \frac{1}{B} \sum_i |o_i| \min\bigl(s_i A_i, \operatorname{clip}(s_i,
      1 - l, 1 + h) A_i\bigr)

  The ratio :math:`s_i` is that of `gspo`.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Liu et al., `LUSPO <https://arxiv.org/abs/2602.05261>`_, 2026
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # 1 / B for each of |o_i| equal terms: the factor |o_i| of the formula.
    mean_over_sequence_sums(),
    pool_log_ratio(),
    ppo_clip(low, high),
  )


def gcpo(
  low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The loss of Group Contrastive Policy Optimization: the ratio is a product.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(S_i A_i, \operatorname{clip}(S_i, 1 - l,
      1 + h) A_i\bigr), \quad S_i = \prod_t s_{it}

  The other half of the method puts the reference answer into a group that has
  no right one, which is no part of a loss.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. We do not know
      the paper's bounds.

  References:
    `GCPO <https://arxiv.org/abs/2510.07790>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    sum_log_ratio(),
    ppo_clip(low, high),
  )


def vespo(positive=(2.0, 3.0), negative=(3.0, 2.0)) -> LossTransform:
  r"""VESPO: a smooth weight of the completion's ratio, from a variational view.

  .. math::
    J = \frac{1}{N} \sum_{i,t} sg\bigl[S_i^k e^{\lambda (1 - S_i)}\bigr]
      (r_i - \bar r) \log \pi(o_{it}), \quad S_i = \prod_t s_{it}

  The ratio saturates at :math:`e^{20}`; released code clamps it too.

  Args:
    positive: :math:`(k, \lambda)` where :math:`A \ge 0`: two numbers, each of
      which may be a schedule or a `Controller`.
    negative: :math:`(k, \lambda)` where :math:`A < 0`, likewise.

  References:
    Shen et al., `VESPO <https://arxiv.org/abs/2602.10693>`_, 2026
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    sum_log_ratio(),
    gamma_weighted_score(positive, negative),
  )


def gmpo(
  low=0.4, high=0.4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Geometric-Mean Policy Optimization: clips each ratio, then pools them.

  .. math::
    J = \frac{1}{B} \sum_i A_i \exp\Bigl(\frac{1}{|o_i|} \sum_t
      \operatorname{clip}_{A_i}(\log s_{it}, -l, h)\Bigr)

  The clip acts on the side to which the advantage pushes, as in PPO.

  Args:
    low: :math:`l`, distance of the lower bound of a log-ratio from 0, in nats.
    high: :math:`h`, distance of its upper bound, likewise. The paper has 0.4
      for both: ratios from :math:`e^{-0.4}` to :math:`e^{0.4}`.
    deviation, epsilon: See `help(losses.methods)`.

  References:
    Zhao et al., `Geometric-Mean Policy Optimization
    <https://arxiv.org/abs/2507.20673>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    # In this order: after the pooling, the mean would be clipped and not the
    # tokens.
    clip_log_ratio(low, high),
    pool_log_ratio(),
    importance_weighted(),
  )


# REINFORCE, the methods derived from it, and imitation.


def reinforce() -> LossTransform:
  r"""REINFORCE without a baseline.

  .. math:: J = \frac{1}{B} \sum_i r_i \sum_t \log \pi(o_{it})

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """
  return chain(use_reward(), mean_over_sequence_sums(), score_function())


def rloo() -> LossTransform:
  r"""REINFORCE with the mean of the group's other rewards as baseline.

  .. math:: J = \frac{1}{B} \sum_i \Bigl(r_i - \frac{1}{G-1} \sum_{j \neq i}
                r_j\Bigr) \sum_t \log \pi(o_{it})

  It is unbiased, because the baseline does not depend on the completion that it
  is subtracted from. Some released code has the clipped ratio of the whole
  completion instead of the log-probability.

  References:
    Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024
  """
  # A sum over tokens, because a division by the length would bias the gradient.
  return chain(leave_one_out(), mean_over_sequence_sums(), score_function())


def gpg() -> LossTransform:
  r"""Group Policy Gradient: no ratio, no deviation, informative groups count.

  .. math::
    J = \frac{\alpha}{N} \sum_{i,t} (r_i - \bar r) \log \pi(o_{it}), \quad
    \alpha = \frac{B}{B - M}

  Here `B` counts the valid completions, and `M` those of them in groups of
  equal rewards. This is the paper's method with :math:`F_{norm} = 1`. The paper
  also samples until enough groups are informative, which is no part of a loss.

  References:
    Chu et al., `GPG <https://arxiv.org/abs/2504.02546>`_, 2025
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # `N` also counts the tokens of groups of equal rewards, which are not
    # dropped. The factor alpha makes up for them.
    scale_by_informative_groups(),
    score_function(),
  )


def opo() -> LossTransform:
  r"""On-Policy RL with the Optimal reward baseline.

  .. math:: J = \frac{1}{B} \sum_i \Bigl(r_i - \frac{\sum_j |o_j| r_j}
                {\sum_j |o_j|}\Bigr) \sum_t \log \pi(o_{it})

  It is meant for exactly one update per rollout.

  References:
    Hao et al., `OPO <https://arxiv.org/abs/2505.23585>`_, 2025
  """
  return chain(center_by_length(), mean_over_sequence_sums(), score_function())


def maxrl() -> LossTransform:
  r"""Maximum likelihood RL: ascends the log of the success rate.

  .. math:: J = \frac{1}{B} \sum_i \frac{r_i - \bar r}{\bar r}
                \sum_t \log \pi(o_{it})

  Groups whose mean reward is not positive have no gradient.

  References:
    `Maximum Likelihood Reinforcement Learning
    <https://arxiv.org/abs/2602.02710>`_, 2026
  """
  return chain(
    divide_by_group_mean(), mean_over_sequence_sums(), score_function()
  )


def reinforce_pp(
  kl_coefficient=0.01, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""REINFORCE++: rewards minus KL to go, normalised over the rollout.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr), \quad
    A_{it} = \operatorname{z}\Bigl(r_i - \beta \sum_{s \ge t}
      \log \frac{\pi_{old}(o_{is})}{\pi_{ref}(o_{is})}\Bigr)

  `z` is the z-score among all trained tokens of the rollout.

  Args:
    kl_coefficient, low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the rollout.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  # Only the number 0 leaves the term out, as a schedule may start at 0.
  none = isinstance(kl_coefficient, int | float) and kl_coefficient == 0
  return chain(
    use_reward(),
    # Before the z-score, which is that of the rewards minus their KL to go.
    *(() if none else (subtract_kl_to_go(kl_coefficient),)),
    normalize_over_tokens(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def reinforce_pp_baseline(
  kl_coefficient=0.01, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""REINFORCE++ with the group's mean as baseline, and k2 as a loss.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr) - \beta\, k_2, \quad
    A_i = \operatorname{z}(r_i - \bar r)

  `z` is the z-score among all trained tokens of the rollout.

  Args:
    kl_coefficient, low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the rollout.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  return chain(
    center_by_group(),
    normalize_over_tokens(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
    # As a loss, k2 has the gradient of KL(policy || reference).
    *maybe_kl(kl_coefficient, 'k2'),
  )


def opd(coefficient=1.0, reward_coefficient=0.0) -> LossTransform:
  r"""On-policy distillation: the teacher judges each token of the policy.

  .. math::
    J = \frac{1}{N} \sum_{i,t} s_{it} A_{it}, \quad
    A_{it} = a (r_i - \bar r) + c \, \bigl(\log \pi_{teacher}(o_{it}) -
      \log \pi_{old}(o_{it})\bigr)

  Its expected gradient on policy is that of -c KL(policy || teacher) at each
  token. Rewards are not needed: with `reward_coefficient` 0 they are measured
  and nothing else, and a group may be a single completion.

  The papers leave open how tokens are weighed; here it is the mean over all of
  them. Released code has the plain ratio, a clipped one (`ppo_clip`), or the
  ratio as a gate (`mask_token_importance`, MiMo-V2).

  Args:
    coefficient: `c`, per nat.
    reward_coefficient: `a`; above 0 the rewards of the run count too.

  References:
    Agarwal et al., `On-Policy Distillation of Language Models
    <https://arxiv.org/abs/2306.13649>`_, 2023; Lu et al., `On-Policy
    Distillation <https://thinkingmachines.ai/blog/on-policy-distillation>`_,
    2025; Xiaomi, `MiMo-V2-Flash <https://arxiv.org/abs/2601.02780>`_, 2026
  """
  return chain(
    center_by_group(),
    add_teacher_advantage(coefficient, reward_coefficient),
    mean_over_tokens(),
    importance_weighted(),
  )


def gkd(direction='reverse', number=16) -> LossTransform:
  r"""On-policy GKD: the KL to the teacher at each token that the policy draws.

  .. math::
    J = -\frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t KL_K(\pi \,\|\,
      \pi_{teacher})(o_{i,<t})

  :math:`KL_K` is over the teacher's `K` likeliest tokens and all others as one,
  see `add_teacher_top_kl`. It is computed and not estimated, so its gradient
  has no noise but that of which completions were drawn. Rewards are measured
  and nothing else; for both, put `add_teacher_top_kl` behind another method.

  The paper takes the whole vocabulary, and a divergence between the two
  directions besides; part of its completions may come from a data set. Here the
  policy draws all of them, as with its fraction of 1. As in its equation 2, all
  completions weigh the same.

  Args:
    direction: `'reverse'`, or `'forward'`: KL(teacher || policy).
    number: `K`.

  References:
    Agarwal et al., `On-Policy Distillation of Language Models
    <https://arxiv.org/abs/2306.13649>`_, 2023
  """
  return chain(
    # Of 1, as an update whose advantages are all 0 is skipped.
    constant_advantage(1.0),
    mean_over_sequences(),
    set_objective(lambda terms, batch: jnp.zeros_like(terms.logp)),
    add_teacher_top_kl(1.0, direction, number),
  )


def positive_nll(
  coefficient=0.1, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The clip of DAPO, and imitation of completions above their group's mean.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it},
      1 - l, 1 + h) A_i\bigr) + \frac{c}{N_+} \sum_{A_i > 0} \log \pi(o_{it})

  :math:`N_+` counts the kept tokens where :math:`A_i > 0`. This is the loss of
  VAPO without its critic. `imitate_positives` adds the second term to any other
  method.

  Args:
    coefficient: :math:`c`, without unit.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Yue et al., `VAPO <https://arxiv.org/abs/2504.05118>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
    imitate_positives(coefficient),
  )


def supervised() -> LossTransform:
  r"""Maximum likelihood of given completions, as a method like any other.

  .. math:: J = \frac{1}{N} \sum_{i,t} \log \pi(o_{it})
  """
  return chain(constant_advantage(1.0), mean_over_tokens(), score_function())


# Methods that differ in what a completion is credited for.


@takes_from_run(right_reward='right_reward')
def passk(k=4, right_reward=1.0, low=0.2, high=0.2) -> LossTransform:
  r"""Pass@k training: credit for the success of any k completions.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  The advantage is that of `credit_pass_at_k`, which needs groups of more than k
  completions. The method of arXiv 2503.19595 credits the best completion with
  its lead over the second; it has `best_minus_second()` in that place.

  Args:
    k: Size of the subsets, an integer. A subset succeeds if one of its
      completions is right.
    right_reward: The smallest reward of a right completion, a number. A run
      takes its `evaluation.right_reward` times the weight of its first reward.
    low, high: See `help(losses.methods)`.

  References:
    Chen et al., `Pass@k Training <https://arxiv.org/abs/2508.10751>`_, 2025
  """
  return chain(
    credit_pass_at_k(k, right_reward),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


@takes_from_run(weights='reward_weights')
def gdpo(
  weights=None, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group reward-Decoupled normalization Policy Optimization.

  .. math::
    A_i = \operatorname{z}\Bigl(\sum_k w_k
      \frac{r_{ik} - \bar r_k}{\sigma(r_k)}\Bigr), \quad
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  `z` is the z-score among all completions of the rollout. Each of several
  rewards is normalised by itself first, so that none is hidden by another of
  larger scale.

  Args:
    weights: :math:`w_k`, one number per reward function; None: all 1. In a run
      they are the weights of its rewards, unless the config gives others.
    low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, of both normalisations.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  return chain(
    normalize_each_reward(weights, deviation, epsilon),
    # The deviation of a sum of z-scores depends on how many there are.
    normalize_over_completions(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def gtpo_conflict(
  entropy_coefficient=0.1, entropy_limit=LOG_2
) -> LossTransform:
  r"""GTPO of Simoni et al.: protects conflict tokens, penalises entropy.

  .. math::
    J = \frac{1}{B} \sum_i \frac{\delta_i}{|o_i|} \bigl(r_i - \bar r -
      \gamma \langle H \rangle_i\bigr) \sum_t \lambda_{it} s_{it}

  A conflict token is one that a right and a wrong completion of the group share
  (`conflict_tokens`). There :math:`\lambda` is 0 in completions below the
  group's mean reward and 2 above it; elsewhere it is 1.
  :math:`\langle H \rangle_i` is the mean entropy of the completion.
  :math:`\delta_i` is 0 where that exceeds the limit, if the mean entropy of the
  first rollout was below :math:`\log 2`; otherwise it is 1.

  The method has no clip, so it is meant for one update per rollout. Released
  code also divides by the number of conflict tokens, and filters at 0.7 nats
  from the start. (Another method called GTPO is `gtpo_entropy`.)

  Args:
    entropy_coefficient: :math:`\gamma`, per nat; 0 leaves the penalty out.
    entropy_limit: Limit for :math:`\delta`, in nats; infinity leaves
      :math:`\delta` out.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  # A transform that is left out does not require the old entropy either.
  entropy = ()
  if entropy_coefficient != 0:
    entropy += (subtract_entropy(entropy_coefficient),)
  if entropy_limit != float('inf'):
    entropy += (silence_uncertain(entropy_limit),)
  return chain(
    center_by_group(),
    *entropy,
    # The mean comes first: its lengths count the tokens of weight 0 as well.
    mean_over_sequences(),
    weigh_conflict_tokens(),
    importance_weighted(),
  )


# Methods that credit each turn of an episode. Without turns they are methods of
# whole completions. RAGEN's StarPO is none of them: it credits whole episodes.


def rloo_to_go(gamma=1.0) -> LossTransform:
  r"""RLOO by turn: REINFORCE with the return to go, and a baseline of turns.

  .. math::
    J = \frac{1}{B} \sum_i \sum_t A_{ij(t)} \log \pi(o_{it}), \quad
    A_{ij} = G_{ij} - \frac{1}{G-1} \sum_{k \neq i} G_{kj}

  :math:`G_{kj} = 0` behind the end of an episode, and it counts in the mean.
  With :math:`\gamma = 1` the expected gradient is that of the reward, with
  less variance than `rloo` where turns have rewards of their own. Without turns
  this is `rloo`.

  Args:
    gamma: :math:`\gamma`, from 0 to 1.

  References:
    Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024
  """
  return chain(
    leave_one_out_to_go(gamma), mean_over_sequence_sums(), score_function()
  )


def grpo_to_go(
  gamma=1.0, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO by turn: the z-score of each turn's return to go.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{ij(t)},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{ij(t)}\bigr), \quad
    A_{ij} = \frac{G_{ij} - \bar G_j}{\sigma(G_j)}

  The paper takes normalised discounted returns too. Its rewards, which it
  shapes by the code that was written, are for the environment to give. Here the
  mean is over the whole group, with 0 for episodes that have ended. Without
  turns this is GRPO without a KL penalty.

  Args:
    gamma: :math:`\gamma`, from 0 to 1.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Ding et al., `Group Turn Policy Optimization
    <https://arxiv.org/abs/2511.14846>`_, 2025
  """
  return chain(
    normalize_to_go_by_group(gamma, deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def mt_grpo(
  coefficient=1.0,
  kl_coefficient=0.04,
  low=0.2,
  high=0.2,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""MT-GRPO: rewards of turns and of the outcome, each normalised by itself.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{ij(t)},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{ij(t)}\bigr) - \beta\, k_3

  The advantage is that of `normalize_turns_and_outcome`: the outcome's z-score,
  and before the last turn :math:`\lambda` times that of the turn's reward. The
  first version of the paper has episodes of two turns; what is done with more,
  or with different numbers of turns, is a choice made here. Released code takes
  the mean over all tokens.

  Args:
    coefficient: :math:`\lambda`, without unit.
    kl_coefficient, low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Zeng et al., `Reinforcing Multi-Turn Reasoning in LLM Agents
    <https://arxiv.org/abs/2505.11821>`_, 2025
  """
  return chain(
    normalize_turns_and_outcome(coefficient, deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )


def gigpo(
  coefficient=1.0,
  gamma=0.95,
  normalizes=True,
  kl_coefficient=0.01,
  low=0.2,
  high=0.2,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""GiGPO: compares episodes, and turns that began in the same state.

  .. math::
    J = \frac{1}{M} \sum_{i,j} \frac{1}{|o_{ij}|} \sum_{t \in j} \min\bigl(
      s_{it} A_{ij}, \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{ij}\bigr)
      - \beta\, k_3, \quad
    A_{ij} = A_i + \omega A^S_{ij}

  :math:`A^S` is that of `add_credit_by_state`. In a run the state of a turn is
  what the environment has said since the turn before, as in released code. All
  turns have the same weight, as in the paper.

  Args:
    coefficient: :math:`\omega`, without unit.
    gamma: :math:`\gamma` of the returns that are compared in a state.
    normalizes: Whether both comparisons are divided by a deviation. The paper
      has both; without it nothing depends on how hard a prompt is.
    kl_coefficient, low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Feng et al., `Group-in-Group Policy Optimization
    <https://arxiv.org/abs/2505.10978>`_, 2025
  """
  _ops.check_flag('gigpo', 'normalizes', normalizes)
  episodes = center_by_group()
  if normalizes:
    episodes = normalize_by_group(deviation, epsilon)
  return chain(
    episodes,
    add_credit_by_state(coefficient, gamma, normalizes, deviation, epsilon),
    mean_over_turns(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )


# Methods against the collapse of the policy's entropy.


def clip_cov(
  share=2e-4,
  low_covariance=1.0,
  high_covariance=5.0,
  low=0.2,
  high=0.2,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Clip-Cov: no gradient for some tokens that drive the entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it},
      1 - l, 1 + h) A_i\bigr), \text{ detached where chosen}

  The chosen tokens are drawn at random among those whose covariance lies
  between two bounds; `detach_covariance` has its formula. They couple the whole
  batch, so the chain has `scope='batch'`.

  Args:
    share: Share of the batch's kept tokens that is chosen, in [0, 1].
    low_covariance: Covariances of chosen tokens are larger than this, in nats
      times the unit of the advantage.
    high_covariance: Covariances of chosen tokens are smaller than this.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
    # After the clip, because it edits the objective that the clip sets.
    detach_covariance(share, low_covariance, high_covariance),
  )


def kl_cov(
  share=2e-4, coefficient=1.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""KL-Cov: a penalty on the tokens whose covariance drives the entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} s_{it} A_i - c\, |\log s_{it}|\,
      1[it \in \operatorname{top}_k \operatorname{cov}]

  `penalize_covariance` has the covariance and :math:`k`. The ranks couple the
  whole batch, so the chain has `scope='batch'`.

  Args:
    share: Share of the batch's kept tokens that is penalised, in [0, 1].
    coefficient: :math:`c`, per nat.
    deviation, epsilon: See `help(losses.methods)`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    # Without a clip: only the penalty holds the policy back.
    importance_weighted(),
    penalize_covariance(share, coefficient),
  )


def forking_tokens(
  share=0.2, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The 80/20 rule: only tokens of high entropy are trained.

  .. math::
    J = \frac{1}{N} \sum_{i,t} 1[H_{it} \ge \tau] \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  :math:`H_{it}` is the entropy of the old policy, and :math:`\tau` the value
  that the given share of the rollout's tokens reaches. `N` counts all kept
  tokens.

  Args:
    share: Share of the tokens that is trained, in [0, 1].
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Wang et al., `Beyond the 80/20 Rule <https://arxiv.org/abs/2506.01939>`_,
    2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # Sets advantages to 0 and drops no token, so `N` counts all of them.
    mask_low_entropy(share),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def gtpo_entropy(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GTPO of Tan et al.: token rewards shaped by entropy.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr)

  The advantage is that of `credit_tokens_by_entropy`. (Another method called
  GTPO is `gtpo_conflict`.)

  Args:
    alpha: Share of the reward itself in a token's reward, in [0, 1]; the rest
      is distributed by entropy.
    low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the right or of the wrong
      completions of a group.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  return chain(
    credit_tokens_by_entropy(alpha, deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def grpo_s(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO-S of Tan et al.: completion rewards shaped by entropy, mean ratios.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(\bar s_i A_i, \operatorname{clip}(
      \bar s_i, 1 - l, 1 + h) A_i\bigr), \quad
    \bar s_i = \frac{1}{|o_i|} \sum_t s_{it}

  The advantage is that of `credit_completions_by_entropy`.

  Args:
    alpha: Share of the reward itself in a completion's reward, in [0, 1]; the
      rest is distributed by entropy.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  return chain(
    credit_completions_by_entropy(alpha, deviation, epsilon),
    # 1 / (B L_i) for each of L_i equal terms: one term per completion.
    mean_over_sequences(),
    average_ratio(),
    ppo_clip(low, high),
  )
