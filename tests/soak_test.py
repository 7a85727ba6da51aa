"""The soak fails where a process does not end, or go on, as it should."""

import subprocess

import pytest

from tests import soak

pytestmark = pytest.mark.quick

ASKED = 'is asked to end'
FROM_5 = '  goes on from the checkpoint of rollout 5\n'


def started(*scripts):
  every = []
  for script in scripts:
    # It says when it is ready for signals.
    one = subprocess.Popen(
      ['sh', '-c', script], stdout=subprocess.PIPE, text=True
    )
    assert one.stdout
    assert one.stdout.readline() == 'ready\n'
    every.append(one)
  return every


@pytest.mark.long
def test_one_that_was_asked_to_end_must_end_itself(monkeypatch):
  monkeypatch.setattr(soak, 'MOST_SECS', 5.0)
  ends = 'echo ready; exit 143'
  heeds = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"
  assert soak.strike(started(ends, heeds), ASKED, 1) == [143, 143]
  with pytest.raises(subprocess.TimeoutExpired):
    soak.strike(
      started(ends, "trap '' TERM; echo ready; exec sleep 60"), ASKED, 1
    )
  still = 'echo ready; exec sleep 60'
  assert soak.strike(started(ends, still), 'stands still', 1) == [143, -9]
  killed = f'is killed{soak.ALL}'
  assert soak.strike(started(still, still), killed, 0) == [-9, -9]


@pytest.mark.parametrize(
  'ended, fault, rank, is_done, right',
  [
    ([143, 143], ASKED, 0, False, True),
    ([143, 0], ASKED, 0, False, False),
    ([-9, 143], ASKED, 0, False, False),
    ([143, 0], ASKED, 0, True, True),
    ([75, -9], 'is killed', 1, False, True),
    ([75, 75], 'is killed', 1, False, False),
    ([-9, -6], 'is killed in a save', 0, False, True),
    ([-6, -9], 'is killed in a save', 1, False, False),
  ],
)
def test_each_must_end_with_its_code(ended, fault, rank, is_done, right):
  if right:
    soak.check_codes(ended, fault, rank, is_done)
    return
  with pytest.raises(AssertionError):
    soak.check_codes(ended, fault, rank, is_done)


@pytest.mark.parametrize(
  'said, saved, newest, ended, right',
  [
    (FROM_5, 5, 10, [75, -9], True),
    (FROM_5, 10, 10, [75, -9], False),
    (FROM_5, None, 5, [75, -9], False),
    ('', None, 5, [75, -9], True),
    ('  loading JAX\n', 5, 5, [75, -9], True),  # it did not come so far
    ('', 5, 5, [0, 0], False),
    ('', 5, 5, [143, 143], False),
    ('', 5, 10, [75, -9], False),
    ('  loading JAX\nrollout 1/60\n', 5, 5, [75, -9], False),
    ('warm-up 4/20\n', 5, 5, [75, -9], False),
    (FROM_5 + 'Checkpoint 10 cannot be read', 5, 10, [75, -9], False),
  ],
)
def test_a_start_must_go_on_where_the_last_one_ended(
  said, saved, newest, ended, right
):
  if right:
    soak.went_on(said, saved, newest, ended)
    return
  with pytest.raises(AssertionError):
    soak.went_on(said, saved, newest, ended)
