"""What a session compiles while nothing is there to learn from."""

import jax
import jax.numpy as jnp
import pytest

from grpo_jax import losses
from grpo_jax.learner import programs
from tests import bigram
from tests.compilations import compiled_programs
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import learn
from tests.learning import make_updater
from tests.learning import spec


def updater(kind='shared'):
  learner = bigram_learner(losses.methods.grpo())
  return make_updater(learner, bigram.params(), spec(kind, 1))


def test_programs_are_compiled_in_a_thread_and_once():
  made = updater()
  with compiled_programs() as names:
    ahead = programs.compile_ahead(made, made.layout, bigram_rollout(), 0)
    assert ahead.thread is not None
    # The name by which the end of a program knows it.
    assert ahead.thread.name == 'compile ahead' and ahead.thread.daemon
    ahead.wait()
    state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
    learn(made, made.layout, state, bigram_rollout(1), 0)
  for name in ('train_step', 'credit', 'score_all'):
    assert names.count(name) == 1, name


def test_rows_whose_shapes_are_not_known_are_not_compiled(monkeypatch):
  made = updater('packed')
  start = programs.compile_ahead
  assert start(made, made.layout, bigram_rollout(), 0).thread is None
  programs.NOTHING.wait()
  other = updater()
  # Several processes would compile in orders of their own.
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert start(other, other.layout, bigram_rollout(), 0).thread is None


def test_an_error_is_left_to_the_first_update():
  made = updater()
  wrong = bigram_rollout()
  wrong = wrong._replace(prompts=[[1] * 99] * 4)  # wider than all buckets
  programs.compile_ahead(made, made.layout, wrong, 0).wait()  # says nothing
  with pytest.raises(ValueError, match='prompt'):
    state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
    learn(made, made.layout, state, wrong, 0)
