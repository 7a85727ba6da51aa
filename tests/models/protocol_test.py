"""Three models stand behind the protocol: ours, a user's module, a bigram.

That the first two have its methods, pyright checks too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import bigram
from tests import own_module
from tests import tiny

LAYERED: models.Layered = tiny.model()


def foreign() -> tuple[models.Model, Any]:
  own = own_module.made()
  return own.model, own.params


CASES: dict[str, Callable[[], tuple[models.Model, Any]]] = {
  'transformer': lambda: (LAYERED, tiny.params(tiny.model())),
  'foreign': foreign,
  'bigram': lambda: (bigram.MODEL, bigram.params()),
}


@pytest.fixture(params=CASES, scope='module')
def case(request):
  return CASES[request.param]()


def test_abstract_parameters_are_those_of_the_model(case):
  model, params = case
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
  assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract())


def test_every_parameter_has_axes_and_learns_or_is_frozen(case):
  model, params = case
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = sharding.path_names(path)
    assert len(model.logical_axes(names, leaf.ndim)) == leaf.ndim
    assert model.trains(names) in (True, False)
    assert model.decays(names) in (True, False)


def test_temperature_divides_logits(case):
  """Every id of the vocabulary, each as a completion of one token."""
  model, params = case
  number = model.vocab_size
  tokens, length = np.arange(number)[None, :, None], np.ones((1, number), int)
  rows = layout.padded_rows([[1, 2]], tokens, length, 4)
  logp, warm = (
    tiny.gather(model.score(params, rows, t).logp, rows, length).ravel()
    for t in (1.0, 2.0)
  )
  np.testing.assert_allclose(jnp.exp(logp).sum(), 1, rtol=1e-5)
  np.testing.assert_allclose(warm, jax.nn.log_softmax(logp / 2), rtol=1e-5)


def test_who_has_what(case):
  model, _ = case
  assert isinstance(model, models.Model)
  assert isinstance(model, models.Layered) == (model is LAYERED)
  context = np.arange(3)
  assert (model.flops_per_token(context) is None) == (model is not LAYERED)
  assert model.score_routed is None  # none of these has experts
  assert models.Transformer(tiny.EXPERTS).score_routed is not None
