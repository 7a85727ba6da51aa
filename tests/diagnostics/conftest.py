"""One program for each audited method in place of two.

An audit compiles a method once to find its advantages, and once to be given
them. Most tests here audit chains of their own, so most of the time is
compilation. Two tests of the whole audit have the programs that people have.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.diagnostics import _probe

_compiled = _probe._compiled


@functools.cache
def _forcible(method):
  """The method, whose advantages are those of the batch where it says so."""

  def credit(batch, state):
    batch, state = method.credit(batch, state)
    forced = jnp.where(batch.mask, batch.extras['forced'], 0)
    advantage = jnp.where(
      batch.extras['is_forced'][..., None], forced, batch.advantage
    )
    return batch._replace(advantage=advantage), state

  return method._replace(credit=credit)


def _compiled_once(method, probe):
  shape, given = probe.logp.shape, probe.advantage
  extras = {
    'forced': np.zeros(shape) if given is None else given,
    'is_forced': np.full(shape[:3], given is not None),
  }
  batch = probe.batch._replace(extras={**probe.batch.extras, **extras})
  probe = probe._replace(batch=batch, advantage=None)
  return _compiled(_forcible(method), probe)


REAL = (
  'test_what_an_audit_says_of_grpo',
  'test_a_transform_that_cannot_be_hashed_is_audited_too',
)


@pytest.fixture(autouse=True)
def one_program(request, monkeypatch):
  """Not where a dtype matters, which both kinds of advantages would share."""
  name = request.node.name
  if name not in REAL and 'float32' not in name:
    monkeypatch.setattr(_probe, '_compiled', _compiled_once)
