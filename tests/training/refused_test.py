"""Runs that cannot learn say so, and end saved."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.training import build
from grpo_jax.training import loop
from tests import runs

QUICK = {
  'warm_up.steps': 0,
  'evaluation.every_steps': 0,
  'log.completions_every_steps': 0,
  'checkpoint.every_steps': 100,
  'learner.method': 'dr_grpo',
  'learner.method_kwargs': {},
}


def test_a_run_whose_updates_are_all_refused_ends_saved(tmp_path, capsys):
  config = runs.small(
    **QUICK,
    reward='tests.judges:huge',
    steps=8,
    **{'learner.nonfinite_rollouts': 2},
  )
  for done in (2, 4):  # the same command goes on, and stops again
    with pytest.raises(ValueError, match='No update of the last 2 rollouts'):
      loop.train(config, tmp_path)
    assert runs.checkpoints(tmp_path)[-1] == done
    said = capsys.readouterr()
    assert 'The gradient of 100% of the updates' in said.out + said.err
  step, arrays, host = runs.saved(tmp_path)
  assert step == 4 and all(np.all(np.isfinite(x)) for x in arrays.values())
  written = runs.records(tmp_path)
  assert [r['nonfinite_gradient'] for r in written[1:]] == [1, 1, 1, 1]
  assert json.dumps(host)


def test_with_0_it_goes_on(tmp_path):
  config = runs.small(
    **QUICK,
    reward='tests.judges:huge',
    steps=2,
    **{'learner.nonfinite_rollouts': 0},
  )
  assert loop.train(config, tmp_path)['steps'] == 2


def test_rewards_that_are_all_none_alarm(tmp_path, capsys):
  config = runs.small(**QUICK, reward='tests.judges:none', steps=1)
  loop.train(config, tmp_path)
  said = capsys.readouterr()
  assert 'No completion was judged' in said.out + said.err
  assert runs.records(tmp_path)[-1]['judged'] == 0


def compares():
  return losses.methods.grpo()


def above():
  """Nothing is compared, but small rewards give nothing."""
  return losses.chain(
    losses.on_reward(lambda reward, batch: jnp.where(reward > 5, 1.0, 0.0)),
    losses.use_reward(),
    losses.mean_over_tokens(),
    losses.score_function(),
  )


@pytest.mark.parametrize('method', ['grpo', 'rloo', f'{__name__}:compares'])
def test_groups_of_one_need_a_method_that_compares_nothing(method):
  config = {**QUICK, 'learner.method': method, 'sampler.group': 1}
  with pytest.raises(ValueError, match='sampler.group=1 .* sampler.group=2'):
    build.run(runs.small(**config))
  for alone in ('reinforce', f'{__name__}:above'):
    build.run(runs.small(**{**config, 'learner.method': alone}))


def test_a_warm_up_without_a_finite_update_ends_the_run(tmp_path):
  config = runs.small(**{**QUICK, 'warm_up.steps': 3, 'warm_up.lr': 1e38})
  with pytest.raises(
    ValueError, match='2 of the last 3 .*, the gradient'
  ) as said:
    loop.train(config, tmp_path)
  assert 'warm_up.lr' in str(said.value)
  assert (tmp_path / 'warm_up/3').is_dir()
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))


def test_weights_that_are_not_finite_are_refused(monkeypatch):
  run = build.run(runs.small())
  params = build.initial_params(run)
  spoilt = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), params)
  monkeypatch.setattr(build.build_model, 'initial', lambda *_: spoilt)
  with pytest.raises(ValueError, match='parameter .* NaN or infinite'):
    build.initial_params(run)
