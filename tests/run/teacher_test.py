"""Runs that learn from a teacher: a second model, which is another run's."""

import shutil

import jax
import numpy as np
import pytest

from grpo_jax.learner import policies
from grpo_jax.learner import updates
from grpo_jax.mesh import sharding
from grpo_jax.run import loop
from grpo_jax.run.build import build
from grpo_jax.run.build import teacher as build_teacher
from tests import runs
from tests import tiny
from tests.run.resume_test import After

pytestmark = pytest.mark.usefixtures('shared_programs')

LARGER = {'model.num_layers': 2, 'model.width': 48}
STUDENT = {
  'reward': 'tests.judges:even',
  'learner.method': 'opd',
  'learner.method_kwargs': {},
  'steps': 3,
  'data.heldout': '',
}


@pytest.fixture(scope='module')
def teacher(shared_programs, tmp_path_factory):
  """The workdir of a run of another shape."""
  workdir = tmp_path_factory.mktemp('teacher') / 'run'
  shape = {**LARGER, **runs.WARM, 'steps': 1, 'data.heldout': ''}
  loop.train(runs.small(**shape, reward='tests.judges:even'), workdir)
  return workdir


def student(teacher, **changes):
  return runs.small(**{**STUDENT, 'teacher.path': str(teacher), **changes})


@pytest.fixture(scope='module')
def learned(teacher, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('student') / 'run'
  loop.train(student(teacher), workdir)
  return workdir


def parts_of(config):
  """(run, updater with the teacher, state before the first rollout)."""
  run = build.run(config)
  frozen = build.frozen_params(run)
  taught = build.teacher_params(run, frozen)
  made = build.updater(run, frozen, teacher=taught)
  return run, made, made.compiled.init(build.initial_params(run))


def test_a_run_learns_from_a_teacher_of_another_shape(learned):
  rows = runs.records(learned)
  assert [row['step'] for row in rows if 'kl_teacher_k1' in row] == [1, 2, 3]
  for row in rows[-3:]:
    # The advantage is nothing but the gap: on policy its mean is minus k1.
    assert row['advantage_mean'] == pytest.approx(
      -row['kl_teacher_k1'], abs=1e-4
    ), row
    assert row['kl_teacher_k3'] > 0.01
