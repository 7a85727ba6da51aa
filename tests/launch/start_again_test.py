"""The one rule of starting again, in the shell, in Python and in Kubernetes."""

import pytest
import yaml

from tests.launch import scripts

LOCAL = scripts.local()
CODES = [*range(-64, 0), *range(256)]


def of_the_shell(asked):
  """The codes that `start_again` takes."""
  done = scripts.run(
    'bash',
    '-euc',
    'source launch/start_again.sh; asked=$1; shift; for code in "$@"; do '
    'if start_again "$code" $asked; then echo "$code"; fi; done',
    'bash',
    asked,
    *CODES,
  )
  assert done.returncode == 0, done.stderr
  return [int(code) for code in done.stdout.split()]


@pytest.mark.parametrize(
  'code, again',
  [
    (0, False),
    (1, False),
    (2, False),
    (3, False),
    (75, True),
    (127, False),  # there is no such program
    (130, False),  # Ctrl-C
    (-2, False),
    (134, True),  # aborted
    (137, True),  # kill -9
    (-9, True),
    (139, True),  # a segmentation fault
    (143, True),
    (-15, True),
    (253, False),  # srun: out of memory
    (255, False),  # ssh
  ],
)
def test_what_starts_again(code, again):
  assert LOCAL.starts_again(code) is again
  assert not LOCAL.starts_again(code, asked=True)


def test_the_shell_has_the_same_rule():
  mine = [code for code in CODES if LOCAL.starts_again(code)]
  assert of_the_shell(asked='') == mine and mine
  assert of_the_shell(asked='asked') == []


def test_kubernetes_has_the_same_rule():
  jobset = yaml.safe_load((scripts.LAUNCH / 'gke_jobset.yaml').read_text())
  (job,) = jobset['spec']['replicatedJobs']
  last = job['template']['spec']['podFailurePolicy']['rules'][-1]
  assert last['action'] == 'FailJob'
  assert last['onExitCodes']['operator'] == 'NotIn'
  assert last['onExitCodes']['values'] == [
    code for code in range(1, 256) if LOCAL.starts_again(code)
  ]


@pytest.mark.parametrize(
  'codes, joint',
  [
    ((0, 0), 0),
    ((0, 75), 75),
    ((137, 75), 75),
    ((75, 2), 2),
    ((137, 1), 1),
    ((143, 143), 143),
    ((143, 137), 137),
    ((143, 130), 130),
    ((130, 2), 2),
  ],
)
def test_one_code_for_several_processes(codes, joint):
  assert LOCAL.joint(codes) == joint == LOCAL.joint(codes[::-1])
