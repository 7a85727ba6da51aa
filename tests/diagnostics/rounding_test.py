"""What processors round differently decides on no text of an audit."""

import jax
import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe
from tests.diagnostics import named

# Of each, a text would depend on the noise if ties were not recognised:
# positive_nll by two statistics that are one here, passk by two factors at
# which its step changes alike, rloo by a true gradient of 0.1725. The cells of
# the other two are numbers that were measured.
METHODS = 'gtpo_entropy', 'passk', 'positive_nll', 'rloo', 'supervised'


def texts(method):
  audit = diagnostics.audit(method)
  return diagnostics.describe('method', audit), diagnostics.cells(audit)


@pytest.fixture(scope='module', params=METHODS)
def recorded(request):
  """A method, all that was evaluated of it, and what was said of it."""
  method, evaluated = named.method(request.param), []
  evaluate = _probe._evaluate

  def record(*given):
    evaluated.append(evaluate(*given))
    return evaluated[-1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_probe, '_evaluate', record)
    return method, evaluated, texts(method)


@pytest.mark.parametrize(
  'seed',
  [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 6))],
)
def test_noise_in_a_loss_changes_no_text(recorded, seed, monkeypatch):
  """Noise of 1e-12, which is more than processors differ by."""
  method, evaluated, said = recorded
  random, left = np.random.default_rng(seed), iter(evaluated)

  def replay(*given):
    noisy = lambda x: x * (1 + 1e-12 * random.uniform(-1, 1, x.shape))
    return jax.tree.map(noisy, next(left))

  monkeypatch.setattr(_probe, '_evaluate', replay)
  assert texts(method) == said
  assert next(left, None) is None  # the noise has not led elsewhere


@pytest.mark.long
def test_probes_a_millionth_away_have_the_same_line_in_the_table(
  recorded, monkeypatch
):
  """No cell lies that close to a threshold or to the next digit."""
  method, _, said = recorded
  probe = _probe.Subject.probe

  def away(self, reward, length, logp_old, **given):
    for name in {'log_ratio', 'gap_ref', 'entropy'} & given.keys():
      given[name] = given[name] * (1 + 1e-6)
    return probe(self, reward, length, logp_old * (1 + 1e-6), **given)

  monkeypatch.setattr(_probe.Subject, 'probe', away)
  assert diagnostics.cells(diagnostics.audit(method)) == said[1]


def test_of_equal_scores_the_first_leads():
  assert _fit.leading([0.2, 0.9 - 1e-9, 0.9, 0.1], 1e-6) == 1
  assert _fit.leading([0.2, 0.9 - 1e-3, 0.9, 0.1], 1e-6) == 2


@pytest.mark.parametrize(
  'value, said', [(0.1725, '0.172'), (0.1875, '0.188'), (0.172501, '0.173')]
)
def test_a_number_between_two_prints_is_rounded_as_the_exact_one(value, said):
  for near in (value, value * (1 - 1e-12), value * (1 + 1e-12)):
    assert _fit.number(near, 3) == said
