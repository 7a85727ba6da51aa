"""Loop oracles of every method, in NumPy float64, each from its paper.

Every oracle walks over prompts p, completions g and tokens t, and returns

  loss      float, to be minimised: -sum of weight * (objective - penalty)
  gradient  f64[P, G, T], d loss / d logp, derived by hand

with a gradient of zero on every token that does not take part. `_base.py` has
the notation; the files have the names of those in grpo_jax/losses/methods.
"""

from collections.abc import Callable
import functools

from tests.oracles import _credit
from tests.oracles import _entropy
from tests.oracles import _parts
from tests.oracles import _reinforce
from tests.oracles import _sequence
from tests.oracles import _teacher
from tests.oracles import _token
from tests.oracles import _trust
from tests.oracles import _turns
from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._kl import Enumeration
from tests.oracles._kl import enumerate_kl

METHODS: dict[str, Callable[..., Result]] = {
  'passk': _credit.passk,
  'gdpo': _credit.gdpo,
  'gtpo_conflict': _credit.gtpo_conflict,
  'kl_cov': _entropy.kl_cov,
  'clip_cov': _entropy.clip_cov,
  'forking_tokens': _entropy.forking_tokens,
  'gtpo_entropy': _entropy.gtpo_entropy,
  'grpo_s': _entropy.grpo_s,
  'rloo': _reinforce.rloo,
  'reinforce': _reinforce.reinforce,
  'supervised': _reinforce.supervised,
  'gpg': _reinforce.gpg,
  'opo': _reinforce.opo,
  'maxrl': _reinforce.maxrl,
  'reinforce_pp': _reinforce.reinforce_pp,
  'reinforce_pp_baseline': _reinforce.reinforce_pp_baseline,
  'positive_nll': _reinforce.positive_nll,
  'gspo': _sequence.gspo,
  'gmpo': _sequence.gmpo,
  'gspo_token': _sequence.gspo_token,
  'luspo': _sequence.luspo,
  'gcpo': _sequence.gcpo,
  'vespo': _sequence.vespo,
  'opd': _teacher.opd,
  'gkd': _teacher.gkd,
  'grpo': _token.grpo,
  'dr_grpo': _token.dr_grpo,
  'dapo': _token.dapo,
  'deepseek_v3_2': _token.deepseek_v3_2,
  'cppo': _token.cppo,
  'dual_clip_grpo': _token.dual_clip_grpo,
  'two_sided_grpo': _token.two_sided_grpo,
  'lite_ppo': _token.lite_ppo,
  'importance_sampling': _token.importance_sampling,
  'sapo': _trust.sapo,
  'cispo': _trust.cispo,
  'prompt_mean': _trust.prompt_mean,
  'dppo_tv': _trust.dppo_tv,
  'dppo_kl': _trust.dppo_kl,
  'dro': _trust.dro,
  'rloo_to_go': _turns.rloo_to_go,
  'grpo_to_go': _turns.grpo_to_go,
  'mt_grpo': _turns.mt_grpo,
  'gigpo': _turns.gigpo,
}

PARTS: dict[str, Callable[..., Result]] = {
  'divide_by_group_deviation-lead': _parts.lead_over_deviation,
  'divide_by_group_deviation': _parts.batch_mean_over_deviation,
  'normalize_by_group-under_root': _parts.variance_plus_epsilon,
  'add_kl-k1_score': _parts.k1_score,
  'add_teacher_kl': _teacher.kl_penalty,
  'add_teacher_top_kl': _teacher.top_kl_penalty,
  'add_teacher_top_kl-forward': functools.partial(
    _teacher.top_kl_penalty, direction='forward'
  ),
  'add_teacher_kl-k3': functools.partial(_teacher.kl_penalty, estimator='k3'),
  'center_to_go_by_group': _turns.centred_to_go,
  'mean_over_turns': _turns.mean_of_turns,
}
"""Parts that no method has by default, by their name in the tests."""

__all__ = ('METHODS', 'PARTS', 'Case', 'Enumeration', 'Result', 'enumerate_kl')
