"""Each family in all layouts, by the sampler, and on eight devices.

The models are the golden ones, whose logits are those of transformers; see
`weights/parity_test.py`.
"""

import itertools
import json
import pathlib

import numpy as np
import pytest

from grpo_jax.models.weights import families
from tests import tiny
from tests.chosen import chosen
from tests.models import families_table
from tests.models import meshed
from tests.models.weights import golden

# What only one of them has of all that is computed otherwise.
IN_THE_SUITE = ('olmo3', 'phi3', 'gpt_oss', 'lfm2', 'qwen3_5')
# What no family has: layers of several sizes, all of routers at once, and all
# kinds of states.
MORE = {
  'uneven': tiny.UNEVEN,
  'routed': tiny.ROUTED,
  'states': tiny.STATES,
  'sharing': tiny.SHARING,
  'beside': tiny.BESIDE,
}
EVERY = [*golden.NAMES, *MORE]


def found(name):
  """A model, and its parameters."""
  if name in MORE:
    model = tiny.model(**MORE[name], vocab_size=64)
    return model, tiny.params(model)
  one = golden.golden(name)
  return one.model, one.params


@pytest.mark.parametrize('name', chosen(golden.NAMES, IN_THE_SUITE))
def test_log_probabilities_are_those_of_transformers_in_all_layouts(name):
  assert families_table.of_layouts(name) < 1e-5


@pytest.mark.parametrize('name', chosen(EVERY, (*MORE, 'ministral3')))
def test_the_sampler_draws_by_the_probabilities_of_the_learner(name):
  assert families_table.of_sampler(*found(name)) < 2e-5


@pytest.mark.long
@pytest.mark.parametrize('name', EVERY)
def test_one_gradient_on_one_device_and_on_eight(name):
  every = meshed.errors(*found(name))
  # The second mesh has nothing that differs between families.
  for error in itertools.islice(every, 1 + (name in MORE)):
    assert error < 2e-5


def test_the_correction_of_a_choice_gets_no_gradient_and_does_not_decay():
  model, params = found('routed')
  grads = meshed.differentiated(model, params, {'data': 1}).grads
  experts = grads['blocks'][1]['experts']
  assert not np.any(experts['correction_bias'])
  for name in ('router', 'router_bias', 'gate_bias', 'up_bias', 'down_bias'):
    assert np.any(experts[name]), name
  assert np.all(grads['blocks'][0]['attention']['sinks'])
  for path in ('experts', 'correction_bias'), ('attention', 'sinks'):
    assert not model.decays(('blocks', '1', *path))


def test_the_front_page_counts_the_families():
  front = pathlib.Path(__file__).parents[2] / 'README.md'
  assert f'one of {len(families_table.ROWS)} families' in front.read_text()


def test_models_are_missing_from_a_release_alone():
  checkout = pathlib.Path(__file__).parents[2] / '.ci'
  assert bool(golden.NAMES) == checkout.exists()


def test_every_family_has_a_row_with_small_errors():
  named = {
    families_table.golden_architecture(case)
    for case, *_ in families_table.ROWS.values()
  }
  # Some are read inside another, and written as these.
  assert {families.written_as(one) for one in named} == {
    families.written_as(one.architecture) for one in families.FAMILIES
  }
  errors = json.loads(families_table.FILE.read_text())
  assert list(errors) == [case for case, *_ in families_table.ROWS.values()]
  for one in errors.values():
    assert max(one['logits'], one['layouts']) < 1e-5
    assert max(one['sampler'], one['axes']) < 2e-5
