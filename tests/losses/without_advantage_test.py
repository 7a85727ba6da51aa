"""What a method finds in completions without an advantage: nothing, or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.learner import trust_region
from tests.losses import cases
from tests.losses import evaluated


def found(method):
  """Of a batch in which half of the completions have no advantage.

  Returns:
    bool[P,G], these completions. For two policies that differ on them alone:
    d loss / d (logp, entropy), and which tokens are marked as outside their
    range.
  """
  case = cases.make_case()
  batch, state = cases.prepared(method, cases.to_batch(case))
  rng = np.random.default_rng(0)
  without = rng.random(case.valid.shape) < 0.5
  without[0] = True, False, True, False
  advantage = np.where(without[..., None], 0, batch.advantage)
  batch = batch._replace(advantage=jnp.asarray(advantage))
  given = np.stack([case.logp, case.entropy])
  # Far to both sides: pooled over a completion, and token by token.
  moves = rng.choice([-3, 3], (*case.valid.shape, 1))
  moves = moves + rng.standard_normal(case.logp.shape)
  moved = given + np.where(without[..., None], moves, 0)

  def of_policy(batch, logp, entropy):
    def loss(logp, entropy):
      top = cases.logp_top(logp, batch)
      return losses.surrogate_loss(method, logp, batch, state, entropy, top)

    pull = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (_, terms), slopes = pull(logp, entropy)
    return slopes, trust_region.outside(terms) & batch.keep

  # As often as there are cases in `evaluated`: operations of these shapes are
  # compiled anyway.
  many = len(evaluated.stacks()[jnp.float64])
  again = lambda *x: np.resize(np.stack(x), (many, *np.shape(x[0])))
  policies = map(again, given, moved)
  slopes, marked = jax.vmap(of_policy)(jax.tree.map(again, batch), *policies)
  slopes = np.stack([x[:2] for x in slopes], axis=1)
  return without, slopes, np.asarray(marked[:2])


@pytest.mark.parametrize(**cases.by_name(cases.ONCE_EACH))
def test_the_methods_know_whether_they_find_nothing(entry):
  method = entry.make()
  if method.scope == 'batch':
    return  # then every completion is read anyway
  without, slopes, marked = found(method)
  nothing = (
    not slopes[:, :, without].any()
    and not marked[:, without].any()
    and np.array_equal(*slopes[:, :, ~without])
  )
  assert nothing == method.zero_without_advantage
  assert slopes[:, 0][:, ~without].any()


def test_most_methods_find_nothing():
  zero = {e.name for e in cases.METHODS if e.make().zero_without_advantage}
  assert {'dapo', 'gspo', 'cispo', 'rloo', 'dr_grpo-max_tokens=8'} <= zero
  assert not {'grpo', 'dro', 'kl_cov'} & zero  # they have penalties


def test_a_chain_is_zero_if_all_of_it_is():
  links = losses.center_by_group(), losses.mean_over_tokens(), losses.ppo_clip()
  assert losses.chain(*links).zero_without_advantage
  penalty = losses.add_penalty(lambda terms, batch: terms.logp)
  assert not losses.chain(*links, penalty).zero_without_advantage
  own = losses.set_objective(lambda terms, batch: terms.logp)
  assert not losses.chain(*links[:2], own).zero_without_advantage
