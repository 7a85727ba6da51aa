"""Several processes of a learner share a desk: threads over a store."""

import threading

import pytest

from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import shared
from tests.hosts import processes_test
from tests.run.jobs import doors

pytestmark = pytest.mark.quick


def part_of(job):
  index = [record['index'] for record in job.records]
  use = dict.fromkeys(
    ('wanted_secs', 'busy_secs', 'turns', 'tokens', 'read', 'parked'), 2.0
  )
  return drawing.Collected(doors.rollout_of(index), 0.25, 1.5, use)


def draws(desk, number=1):
  """A generator in a thread, without a wire."""

  def run():
    word, left = desk.join('one'), number
    while left:
      if taken := desk.take(word):
        desk.bring(word, taken[0], part_of(taken[1]), 1.0)
        left -= 1

  threading.Thread(target=run, daemon=True).start()


def test_all_processes_get_what_was_brought(monkeypatch):
  monkeypatch.setattr(processes, '_PART_BYTES', 999)  # many parts
  desk = desk_lib.Desk()
  draws(desk, 8)

  def body(peers):
    own = shared.Shared(desk if peers.is_first else desk_lib.Desk(), peers)
    found = []
    for step in range(4):
      found.append(own.draw(doors.jobs(2, step=step), lambda: None))
      peers.exchange()
    return [
      [
        (one.rollout.index.tolist(), one.rollout.texts, one.use)
        for one in parts
      ]
      for parts in found
    ]

  told, client = processes_test.run(body)
  assert told[0] == told[1] == told[2]
  assert [index for index, *_ in told[0][3]] == [[0], [1]]
  # What all have read is deleted, but for the last ones.
  left = {key.split('/')[3] for key in client.values if '/handed/' in key}
  assert len(left) <= 2


@pytest.mark.parametrize('kind', [desk_lib.Failed, desk_lib.FailedInside])
def test_an_error_ends_the_wait_of_all(kind):
  desk = desk_lib.Desk()
  word = desk.join('one')

  def fails():
    while not (taken := desk.take(word)):
      pass
    inside = kind is desk_lib.FailedInside
    desk.fail(word, taken[0], 'It is bad.', 'a trace', inside)

  threading.Thread(target=fails, daemon=True).start()

  def body(peers):
    own = shared.Shared(desk if peers.is_first else desk_lib.Desk(), peers)
    with pytest.raises(kind, match='It is bad') as raised:
      own.draw(doors.jobs(1), lambda: None)
    return raised.value.__notes__

  told, _ = processes_test.run(body)
  assert told[0] == told[1] == told[2] and 'a trace' in told[0][0]


def test_without_a_generator_all_start_again():
  desk = desk_lib.Desk(wait_secs=0.1)

  def body(peers):
    own = shared.Shared(desk if peers.is_first else desk_lib.Desk(), peers)
    with pytest.raises(processes.StartAgain, match='none has come'):
      own.draw(doors.jobs(1), lambda: None)
    return 'ended'

  assert processes_test.run(body)[0] == ['ended'] * 3


def test_a_signal_to_the_first_ends_the_wait_of_all():
  desk, stop = desk_lib.Desk(), stop_signal.Stop()
  stop.take(15)

  def body(peers):
    own = shared.Shared(
      desk if peers.is_first else desk_lib.Desk(), peers, stop
    )
    with pytest.raises(stop_signal.Stopped):
      own.draw(doors.jobs(1), lambda: None)
    return 'ended'

  assert processes_test.run(body)[0] == ['ended'] * 3


def test_who_gives_up_waits_for_nobody():
  def body(peers):
    if peers.is_first:
      return 'ended'
    own = shared.Shared(desk_lib.Desk(), peers)

    def check():
      raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
      own.draw(doors.jobs(1), check)
    return 'ended'

  assert processes_test.run(body)[0] == ['ended'] * 3
