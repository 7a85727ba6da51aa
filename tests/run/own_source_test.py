"""A source that no code of the package knows runs a whole training."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.rollouts.sources import AtOnce
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.run import loop
from grpo_jax.run import sampling
from tests import runs
from tests.run import resume_test

pytestmark = pytest.mark.usefixtures('shared_programs')


class Behind(AtOnce):
  """Draws by the policy of two versions ago, as other devices may."""

  def publish(self, params, version):
    self.newest = params, version

  def next(self, version):
    params, _ = self.newest
    drawing = *self.receipt.params, jax.tree.map(jnp.copy, params)
    self.load(drawing[0], version + 1 - len(drawing))
    delivery = super().next(version)
    self.receipt = Receipt(delivery.receipt.prompts, drawing[-2:])
    return delivery._replace(receipt=self.receipt)

  def paused(self):
    self.load(*self.newest)
    return super().paused()


@pytest.fixture
def behind(monkeypatch):
  source = sampling.source

  def instead(*given):
    made = source(*given)
    fields = dataclasses.fields(made)
    return Behind(*(getattr(made, field.name) for field in fields))

  monkeypatch.setattr(sampling, 'source', instead)


@pytest.mark.long
def test_any_number_of_versions_is_kept_and_drawn_by_again(behind, tmp_path):
  config = runs.small(**{'optim.warmup_steps': 0, 'learner.anchor': 'sampler'})
  loop.train(config, tmp_path / 'whole')
  _, *records = runs.records(tmp_path / 'whole')
  assert [one['staleness_steps_max'] for one in records] == [0, 1, 2, 2]
  _, arrays, host = runs.saved(tmp_path / 'whole')
  assert host['older'] == 2
  assert len([name for name in arrays if name.startswith("['older']")]) > 2
  done = 0
  while done < config.steps:
    end = loop.train(config, tmp_path / 'pieces', resume_test.After(3))
    done = end['steps']
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'pieces')
