r"""The methods of the literature by name.

Every function here returns a `LossTransform`: a `chain` of three to six
transforms. Its own docstring has the formula, the arguments that only it has,
each choice that the paper leaves open, and the paper. This page has what they
share: the list of methods, the notation and the arguments that many of them
take.

The ratio of each token, and a hard clip (`_token.py`):

- `grpo`: z-scored rewards, mean over completions, KL penalty (2402.03300)
- `deepseek_v3_2`: GRPO with an unbiased KL penalty; wrong completions that the
  policy has moved away from are masked (2512.02556)
- `dr_grpo`: no division by deviation or length (2503.20783)
- `dapo`: higher upper bound, mean over tokens, penalty for length (2503.14476)
- `lite_ppo`: the group's mean, the rollout's deviation (2508.08221)
- `cppo`: completions of small advantage are pruned (2503.22342)
- `dual_clip_grpo`: the ratio of wrong tokens is capped (1912.09729)
- `two_sided_grpo`: the same cap, mean over tokens (2505.07291)

The ratio of each token, and another trust region (`_trust.py`):

- `importance_sampling`: the plain ratio
- `sapo`: a sigmoid gate (2511.20347)
- `cispo`: the clipped ratio is a weight, so no token loses its gradient
  (2506.13585)
- `prompt_mean`: CISPO with a mean over prompts (ScaleRL, 2510.13786)
- `dppo_tv`, `dppo_kl`: a gate on the change of a token's probability
  (2602.04879)
- `dro`: a quadratic pull back to the old policy (2405.19107)

One ratio for the whole completion (`_sequence.py`):

- `gspo`, `gspo_token`: the geometric mean of the token ratios, then the clip
  (2507.18071)
- `gmpo`: the clip, then the geometric mean (2507.20673)
- `luspo`: GSPO times the length (2602.05261)
- `gcpo`: the product of the token ratios, then the clip (2510.07790)
- `vespo`: a smooth weight of that product (2602.10693)

REINFORCE, the methods derived from it, and imitation (`_reinforce.py`):

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

Another credit for a completion or for its tokens (`_credit.py`):

- `passk`: for the success of any k completions (2508.10751)
- `gdpo`: each of several rewards is normalised by itself (2601.05242)
- `gtpo_conflict`: tokens that right and wrong completions share are protected
  (2508.03772)

Against the collapse of the entropy (`_entropy.py`):

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

from grpo_jax.losses.methods._credit import gdpo
from grpo_jax.losses.methods._credit import gtpo_conflict
from grpo_jax.losses.methods._credit import passk
from grpo_jax.losses.methods._entropy import clip_cov
from grpo_jax.losses.methods._entropy import forking_tokens
from grpo_jax.losses.methods._entropy import grpo_s
from grpo_jax.losses.methods._entropy import gtpo_entropy
from grpo_jax.losses.methods._entropy import kl_cov
from grpo_jax.losses.methods._reinforce import gpg
from grpo_jax.losses.methods._reinforce import maxrl
from grpo_jax.losses.methods._reinforce import opo
from grpo_jax.losses.methods._reinforce import positive_nll
from grpo_jax.losses.methods._reinforce import reinforce
from grpo_jax.losses.methods._reinforce import reinforce_pp
from grpo_jax.losses.methods._reinforce import reinforce_pp_baseline
from grpo_jax.losses.methods._reinforce import rloo
from grpo_jax.losses.methods._reinforce import supervised
from grpo_jax.losses.methods._sequence import gcpo
from grpo_jax.losses.methods._sequence import gmpo
from grpo_jax.losses.methods._sequence import gspo
from grpo_jax.losses.methods._sequence import gspo_token
from grpo_jax.losses.methods._sequence import luspo
from grpo_jax.losses.methods._sequence import vespo
from grpo_jax.losses.methods._token import cppo
from grpo_jax.losses.methods._token import dapo
from grpo_jax.losses.methods._token import deepseek_v3_2
from grpo_jax.losses.methods._token import dr_grpo
from grpo_jax.losses.methods._token import dual_clip_grpo
from grpo_jax.losses.methods._token import grpo
from grpo_jax.losses.methods._token import lite_ppo
from grpo_jax.losses.methods._token import two_sided_grpo
from grpo_jax.losses.methods._trust import cispo
from grpo_jax.losses.methods._trust import dppo_kl
from grpo_jax.losses.methods._trust import dppo_tv
from grpo_jax.losses.methods._trust import dro
from grpo_jax.losses.methods._trust import importance_sampling
from grpo_jax.losses.methods._trust import prompt_mean
from grpo_jax.losses.methods._trust import sapo

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
  'gmpo',
  'gpg',
  'grpo',
  'grpo_s',
  'gspo',
  'gspo_token',
  'gtpo_conflict',
  'gtpo_entropy',
  'importance_sampling',
  'kl_cov',
  'lite_ppo',
  'luspo',
  'maxrl',
  'opo',
  'passk',
  'positive_nll',
  'prompt_mean',
  'reinforce',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'rloo',
  'sapo',
  'supervised',
  'two_sided_grpo',
  'vespo',
)
