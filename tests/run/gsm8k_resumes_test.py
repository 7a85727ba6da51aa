"""GSM8K through TFDS: a run that is ended and started again loses no prompt."""

import os
import subprocess
import sys

import pytest

from grpo_jax.rollouts import parquet
from tests import cli
from tests import runs
from tests.data import formats

pytest.importorskip('tensorflow_datasets')
pytestmark = pytest.mark.long

# 10 problems, 4 in a rollout: of five rollouts the third goes over the end of
# an epoch, and only the fifth ends with one.
PROBLEMS = [
  {'question': f'{n}0+0{n}=', 'answer': f'It is {n}{n}.\n#### {n}{n}'}
  for n in range(10)
]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """The official files, read by the command that people use."""
  place = tmp_path_factory.mktemp('gsm8k')
  folder = formats.gsm8k(place / 'official', PROBLEMS, PROBLEMS[:2])
  module = 'grpo_jax.data.tfds_builders'
  subprocess.run(
    [sys.executable, '-m', module, 'gsm8k', folder, f'--data_dir={place}/data'],
    check=True,
  )
  return place / 'data'


def run(workdir, data_dir, number, ends_once=''):
  """A run of so many processes; what was printed.

  launch/local.py starts all of them again when one has ended by a signal: new
  processes of the operating system, which find the workdir.
  """
  mark = {'ENDS_ONCE': f'{ends_once},{workdir}.mark'} if ends_once else {}
  done = subprocess.run(
    [
      sys.executable, 'launch/local.py', f'--num_processes={number}',
      '--pause_secs=0', '--', 'train', f'--workdir={workdir}',
      f'--config=tests/run/gsm8k_config.py:{data_dir}',
      f'--config.mesh.fsdp={number}',
    ],
    cwd=cli.ROOT,
    env=cli.environment() | mark,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout[-3000:]
  assert os.path.exists(f'{workdir}.mark') == bool(ends_once)
  assert done.stdout.count('starts all again') == bool(ends_once), done.stdout
  return done.stdout


def drawn(workdir):
  """The number and the text of each prompt, in the order of the run."""
  parts = map(parquet.read, parquet.files(workdir / 'completions'))
  return [pair for part in parts for pair in zip(part.index, part.prompt_texts)]


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory, data_dir):
  """The run of one process that nothing has ended."""
  workdir = tmp_path_factory.mktemp('one') / 'run'
  run(workdir, data_dir, 1)
  return workdir


def test_the_unbroken_run_draws_each_problem_once_in_an_epoch(unbroken):
  assert [index for index, _ in drawn(unbroken)] == [*range(20)]
  prompts = [text for _, text in drawn(unbroken)]
  asked = sorted(problem['question'] for problem in PROBLEMS)
  assert sorted(prompts[:10]) == sorted(prompts[10:]) == asked
  assert prompts[:10] != prompts[10:]  # each epoch has its own order


def test_one_process_that_is_killed_goes_on_in_the_middle_of_an_epoch(
  tmp_path, data_dir, unbroken
):
  """In the fourth rollout; the last checkpoint is of the second."""
  said = run(tmp_path / 'run', data_dir, 1, ends_once='13,KILL')
  assert 'goes on from the checkpoint of rollout 2' in said
  runs.assert_equal(tmp_path / 'run', unbroken)


def test_two_processes_go_on_with_the_prompts_that_one_draws(
  tmp_path, data_dir, unbroken
):
  """One of the two is told to end in the third rollout, and both save."""
  run(tmp_path / 'two', data_dir, 2)
  said = run(tmp_path / 'ended', data_dir, 2, ends_once='9,TERM')
  assert 'goes on from the checkpoint of rollout 2' in said
  runs.assert_equal(tmp_path / 'ended', tmp_path / 'two')
  assert drawn(tmp_path / 'ended') == drawn(unbroken)
