"""What a source draws by, when, and what its receipt holds."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from grpo_jax.rollouts import sources
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.rollouts.sources import Pace
from grpo_jax.rollouts.sources import Receipt

MOST = 300.0  # seconds of a wait that would otherwise have no end


class Stopped(KeyboardInterrupt):
  """A signal, where it need not wait."""


class Sampling:
  """Notes what it is asked; a rollout says which versions have drawn it."""

  def __init__(self):
    self.events, self.there, self.version = [], {}, None
    self.lock = threading.Lock()  # one thread publishes, another one drops
    self.most, self.before = 0, lambda rollout: None

  def publish(self, params, version):
    self.events.append(('publish', version))
    with self.lock:
      self.there[version] = np.array(params)
      self.most = max(self.most, len(self.there))

  def load(self, version, goes_on=False):
    self.events.append(('load', version))
    assert self.there[version][0] == version
    self.version = version

  def draw(self, prompts, rollout):
    self.events.append(('draw', rollout))
    versions = [self.version]
    self.before(rollout)
    versions.append(self.version)
    after = prompts._replace(position=prompts.position + 2)
    return (rollout, *versions), after, {'n': 1.0}

  def drop(self, needed):
    with self.lock:
      self.there = {v: x for v, x in self.there.items() if v in needed}

  def snapshot(self, version):
    return self.there[version].copy()

  def restore(self, version, snapshot):
    self.there[version] = snapshot

  @property
  def draws(self):
    return [number for what, number in self.events if what == 'draw']


def params(version):
  return np.full(3, float(version))


def drawn_ahead(sampling, pace=Pace(1), rollouts=9, **more):  # noqa: B008
  return sources.Ahead(sampling, pace, sources.Lease(), rollouts, **more)


def train(source, first, last, after=lambda version: None):
  """What has drawn each rollout, and the receipt behind each."""
  found, receipts = [], []
  for version in range(first, last):
    source.publish(newest := params(version), version)
    delivery = source.next(version)
    newest[:] = np.nan  # the learner donates it
    rollout, *versions = delivery.rollout
    assert rollout == version and delivery.counts['n'] == 1
    found.append(tuple(versions))
    after(version)
    receipts.append(source.receipt())
  return found, receipts


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  assert not [t for t in threading.enumerate() if t.name == 'ahead']


def test_at_once_draws_by_the_newest_and_frees_the_engine():
  events, loaded = [], []

  def draw(prompts, version):
    events.append(('draw', version))
    return (version, loaded[-1]), prompts._replace(position=2), {'n': 1.0}

  def load(given, version):
    assert given[0] == version
    loaded.append(version)

  source = sources.AtOnce(draw, load, lambda: events.append('unload'))
  assert source.receipt() == Receipt()
  versions, receipts = train(source, 0, 2)
  assert versions == [(0,), (1,)]
  assert receipts == [Receipt(PromptState(2))] * 2
  assert events == [('draw', 0), 'unload', ('draw', 1), 'unload']
  source.restore(Receipt(PromptState(8)), 3)
  assert source.receipt() == Receipt(PromptState(8))


def test_prompts_are_not_read_behind_the_last_rollout():
  filled = []
  nothing = lambda *_: None
  source = sources.AtOnce(
    nothing, nothing, nothing, fill=filled.append, rollouts=2
  )
  source.prepare(1)
  source.prepare(2)
  assert filled == [0]


@pytest.mark.parametrize('every', [1, 2, 3])
@pytest.mark.parametrize('ahead', [0, 1, 2, 4])
def test_no_version_is_older_than_it_may_be(ahead, every):
  if every > ahead + 1:
    return
  pace, sampling = Pace(ahead, every), Sampling()
  source = drawn_ahead(sampling, pace, 12)
  found, _ = train(source, 0, 12)
  source.close()
  assert found == [(pace.version(k),) * 2 for k in range(12)]
  ages = [k - version for k, (version, _) in enumerate(found)]
  assert max(ages) == ahead and min(ages) >= 0
  assert all(version % every == 0 for version, _ in found)
  assert sampling.draws == list(range(12))  # each once, in order
  # Those that rollouts still need, and the newest.
  assert sampling.most <= ahead // every + 2


def test_it_draws_as_far_ahead_as_versions_allow_and_no_further():
  sampling = Sampling()
  source = drawn_ahead(sampling, Pace(3), 20)
  source.publish(params(0), 0)
  deadline = time.monotonic() + MOST
  while len(sampling.draws) < 4 and time.monotonic() < deadline:
    time.sleep(0.001)
  time.sleep(0.05)
  assert sampling.draws == [0, 1, 2, 3]  # rollout 4 needs version 1
  receipt = source.receipt()
  source.close()
  assert [one.rollout for one in receipt.finished] == [
    (k, 0, 0) for k in range(4)
  ]
  assert receipt.prompts == PromptState(8) and receipt.versions == ()


@pytest.mark.parametrize('rollouts', [12, 20])
@pytest.mark.parametrize('ahead, every', [(1, 1), (2, 1), (4, 1), (3, 2)])
def test_a_receipt_draws_the_same_again_wherever_it_is_taken(
  ahead, every, rollouts
):
  """Also at the end of a run, which may get more rollouts to learn from."""
  pace, chance = Pace(ahead, every), random.Random(ahead)
  sampling = Sampling()
  sampling.before = lambda rollout: time.sleep(chance.choice((0, 0, 0.004)))
  source = drawn_ahead(sampling, pace, rollouts)
  _, receipts = train(
    source, 0, 12, lambda version: time.sleep(chance.choice((0, 0.006)))
  )
  source.close()
  lagged = 0
  for version, receipt in enumerate(receipts, 1):
    assert len(receipt.finished) + len(receipt.versions) <= ahead
    assert all(one < version for one in receipt.versions)
    lagged += len(receipt.versions)
    sampling = Sampling()
    again = drawn_ahead(sampling, pace, version + 6)
    again.restore(receipt, version)
    found, _ = train(again, version, version + 6)
    again.close()
    assert found == [
      (pace.version(k),) * 2 for k in range(version, version + 6)
    ]
    first = version + len(receipt.finished)
    assert sampling.draws == list(range(first, version + 6))
    assert receipt.prompts.position == 2 * first
  assert lagged


def test_inflight_takes_what_is_published_while_a_rollout_is_drawn():
  sampling, drawing = Sampling(), threading.Event()
  source = drawn_ahead(sampling, Pace(2, inflight=True), 9)

  def before(rollout):
    if rollout == 1:
      drawing.set()
    while rollout == 1 and sampling.version == 0:
      source._lease.check()

  sampling.before = before
  source.publish(params(0), 0)
  assert source.next(0).rollout == (0, 0, 0)
  assert drawing.wait(MOST)
  assert source.receipt().versions == ()  # the newest draws it again
  source.publish(params(1), 1)
  assert source.next(1).rollout == (1, 0, 1)
  source.close()


def test_a_version_that_is_about_to_be_loaded_is_not_dropped():
  """Newer ones are published between the choice and the loading."""
  sampling, chosen, goes_on = Sampling(), threading.Event(), threading.Event()
  load = sampling.load

  def late(version, goes_on_with=False):
    chosen.set()
    assert goes_on.wait(MOST)
    load(version, goes_on_with)

  sampling.load = late
  source = drawn_ahead(sampling, Pace(2, inflight=True), 9)
  source.publish(params(0), 0)
  assert chosen.wait(MOST)
  source.publish(params(1), 1)
  source.publish(params(2), 2)
  assert sampling.there.keys() == {0, 2}
  goes_on.set()
  assert source.next(0).rollout == (0, 0, 0)
  source.close()


def test_nobody_but_the_thread_loads_what_is_taken_in_flight():
  """A judge that another thread runs calls the same check."""
  sampling, begun, goes_on = Sampling(), threading.Event(), threading.Event()
  source = drawn_ahead(sampling, Pace(2, inflight=True), 9)

  def before(rollout):
    if rollout == 1:
      begun.set()
      assert goes_on.wait(MOST)

  sampling.before = before
  source.publish(params(0), 0)
  source.next(0)
  assert begun.wait(MOST)
  source.publish(params(1), 1)
  source._lease.check()
  assert ('load', 1) not in sampling.events
  goes_on.set()
  source.close()


@pytest.mark.parametrize('fails', [Stopped, ValueError, SystemExit])
def test_what_ends_a_wait_loses_nothing(fails):
  """A signal, a judge, the engine: what is saved then draws it again."""
  sampling, waits, goes_on = Sampling(), [], threading.Event()

  @contextlib.contextmanager
  def wait():
    waits.append(1)
    yield
    if fails is Stopped and len(waits) == 2:
      raise Stopped

  def before(rollout):
    if fails is not Stopped and rollout == 1:
      goes_on.wait(MOST)
      raise fails('of a judge')

  sampling.before = before
  source = drawn_ahead(sampling, Pace(1), wait=wait)
  source.publish(params(0), 0)
  source.next(0)
  source.publish(params(1), 1)
  goes_on.set()
  with pytest.raises(fails):
    source.next(1)
  source.close()
  receipt = source.receipt()
  drawn = 2 * (1 + len(receipt.finished))
  assert receipt.prompts.position == drawn
  again = drawn_ahead(Sampling(), Pace(1))
  again.restore(receipt, 1)
  assert train(again, 1, 3)[0] == [(0, 0), (1, 1)]
  again.close()


def test_rollouts_before_an_error_are_delivered():
  sampling = Sampling()

  def before(rollout):
    if rollout == 2:
      raise ValueError('of rollout 2')

  sampling.before = before
  source = drawn_ahead(sampling, Pace(4))
  assert train(source, 0, 2)[0] == [(0, 0)] * 2
  source.publish(params(2), 2)
  with pytest.raises(ValueError, match='of rollout 2'):
    source.next(2)
  source.close()


def test_paused_waits_for_what_is_drawn_and_has_the_newest():
  sampling, goes_on = Sampling(), threading.Event()
  source = drawn_ahead(sampling, Pace(2, every=2), 9)
  sampling.before = lambda rollout: rollout != 1 or goes_on.wait(MOST)
  source.publish(params(0), 0)
  source.next(0)
  source.publish(params(1), 1)  # which draws no rollout
  threading.Timer(0.1, goes_on.set).start()
  with source.paused():
    assert sampling.draws[-1] == 1 and sampling.version == 1
    time.sleep(0.05)
    assert sampling.draws[-1] == 1  # nothing is drawn meanwhile
  assert source.next(1).rollout == (1, 0, 0)
  assert train(source, 2, 4)[0] == [(0, 0), (2, 2)]
  source.close()


def test_what_is_drawn_is_given_up_when_a_source_is_closed():
  sampling, begun = Sampling(), threading.Event()
  source = drawn_ahead(sampling)

  def endless(rollout):
    while rollout == 1:
      begun.set()
      source._lease.check()

  sampling.before = endless
  source.publish(params(0), 0)
  source.next(0)
  assert begun.wait(timeout=MOST)
  source.close()


def test_only_a_judge_that_judges_is_left_alone(monkeypatch):
  """The thread of one that has failed may be in a program of the device."""
  monkeypatch.setattr(sources, '_JUDGING_SECS', 1e-9)
  sampling, begun, ended = Sampling(), threading.Event(), threading.Event()
  source = drawn_ahead(sampling)

  def fails(chosen, *check):
    raise ValueError

  def recovers(rollout):
    if rollout == 1:
      with contextlib.suppress(ValueError):
        source._lease.judging(fails, [])
      begun.set()
      time.sleep(0.3)
      ended.set()

  sampling.before = recovers
  source.publish(params(0), 0)
  source.next(0)
  assert begun.wait(timeout=MOST)
  source.close()
  assert ended.is_set()


def test_a_thousand_rollouts_with_a_heavy_tail_of_delays():
  """No token is older than it may be, and slow ones are not left out."""
  chance, ahead, number = np.random.default_rng(0), 4, 1000
  delays = np.minimum(chance.pareto(1.1, number) * 2e-4, 0.05)
  lengths = np.ceil(delays * 1e5).astype(int)  # slow ones are long
  sampling = Sampling()
  sampling.before = lambda rollout: time.sleep(delays[rollout])
  source = drawn_ahead(sampling, Pace(ahead), number)
  found, learned = [], []

  def learn(version):
    learned.append(lengths[version])
    time.sleep(2e-4)

  found, _ = train(source, 0, number, learn)
  source.close()
  ages = [k - version for k, (version, _) in enumerate(found)]
  assert np.bincount(ages)[ahead] == number - ahead and max(ages) == ahead
  # The two samples are the same, so their distance is 0.
  grid = np.unique(lengths)
  drawn, kept = (
    np.searchsorted(np.sort(x), grid, side='right') / number
    for x in (lengths, learned)
  )
  assert np.abs(drawn - kept).max() == 0


@pytest.mark.parametrize('ahead, every', [(0, 1), (1, 1), (2, 1), (3, 2)])
def test_processes_of_which_some_hear_later_have_one_receipt(ahead, every):
  """The first draws, the others hear of it; any may be one step ahead."""
  steps, chance = 25, random.Random(ahead)
  heard = [threading.Event() for _ in range(steps)]
  delays = [chance.choice((0, 0, 0.01)) for _ in range(3 * steps)]
  meet = threading.Barrier(2)
  said, receipts, found = {}, {0: [], 1: []}, {}

  def agree(rank, number):
    if rank == 0:
      said['begun'] = number
    meet.wait(20)
    number = said['begun']
    meet.wait(20)
    time.sleep(0.003)  # the threads go on
    return number

  def before(rank, rollout):
    if rank == 0:
      heard[rollout].set()  # as what is handed out, before it is noted here
      time.sleep(delays[rollout])
    else:
      assert heard[rollout].wait(20)
      time.sleep(delays[steps + rollout])

  def run(rank):
    sampling = Sampling()
    sampling.before = lambda rollout: before(rank, rollout)
    source = drawn_ahead(
      sampling, Pace(ahead, every), steps,
      agree=lambda number: agree(rank, number),
    )  # fmt: skip
    with contextlib.closing(source):
      source.restore(Receipt(), 0)
      found[rank], receipts[rank] = train(
        source, 0, steps,
        lambda version: time.sleep(delays[2 * steps + version]),
      )  # fmt: skip

  threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(MOST)
  assert found[0] == found[1] and len(found[0]) == steps
  for version, (one, other) in enumerate(zip(*receipts.values(), strict=True)):
    assert one.prompts == other.prompts
    assert one.versions == other.versions
    assert [f.rollout for f in one.finished] == [
      f.rollout for f in other.finished
    ]
    begun = version + 1 + len(one.finished)
    assert one.prompts.position == 2 * begun
    # What is still to be drawn has all it is drawn by, after the end too.
    more = range(begun, steps + ahead)
    due = {*map(Pace(ahead, every).version, more)}
    assert {v for v in due if v <= version} == {*one.versions} - {version} | (
      {version} & due
    )
