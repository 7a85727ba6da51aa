"""How fast rollouts follow each other, and what versions cost on their way."""

import threading

import pytest

from grpo_jax.planning import arithmetic
from grpo_jax.planning import pacing
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.planning.pacing import Sync
from grpo_jax.planning.plan import Jobs
from grpo_jax.planning.roofline import Machine
from grpo_jax.rollouts import sources
from grpo_jax.rollouts.sources import Pace
from tests import runs
from tests.rollouts import sources_test

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  'draw, learn, pace, secs',
  [
    # Who learns needs what is drawn now: one after the other.
    (2, 5, Pace(), 2 + 3 + 5 + 1),
    # The slower of both, with what a version costs it.
    (2, 5, Pace(1), 5 + 1),
    (9, 5, Pace(1), 9 + 3),
    (9, 5, Pace(4, inflight=True), 9 + 3),
    # Of two rollouts by one version the first is drawn before, and the other
    # while that one is learned from.
    (2, 5, Pace(1, every=2), (3 + 2 + 5 + 5 + 1) / 2),
    (9, 5, Pace(1, every=2), (3 + 9 + 9 + 5 + 1) / 2),
    # With one more ahead, each second version is there in time.
    (2, 5, Pace(3, every=2), 5 + 1 / 2),
    (9, 5, Pace(3, every=2), 9 + 3 / 2),
  ],
)
def test_a_step_takes_as_long_as_the_slower_side(draw, learn, pace, secs):
  sync = Sync(learning_secs=1.0, sampling_secs=3.0)
  found = pacing.step(draw, learn, sync, pace)
  assert found.secs == pytest.approx(secs)
  waits = secs - draw - 3 / pace.every, secs - learn - 1 / pace.every
  assert found[1:] == pytest.approx(waits)


def test_what_ends_together_waits_for_nothing():
  found = pacing.step(4.0, 4.0, Sync(), Pace(1))
  assert found == pytest.approx((4.0, 0.0, 0.0))


@pytest.mark.parametrize('ahead', [1, 2, 5])
@pytest.mark.parametrize('every', [1, 2, 3])
def test_versions_that_are_there_at_once(ahead, every):
  """The most, of a source whose rollouts are drawn as late as they can be."""
  pace = Pace(ahead, min(every, ahead + 1))
  sampling, may = sources_test.Sampling(), threading.Semaphore(0)
  sampling.before = lambda rollout: may.acquire()
  source = sources.Ahead(sampling, pace, sources.Lease(), 30)
  evaluated = 0
  for version in range(30):
    source.publish(sources_test.params(version), version)
    evaluated = max(evaluated, len({*sampling.there, version}))
    may.release()
    source.next(version)
  source.close()
  assert max(sampling.most, evaluated) == arithmetic.snapshots(pace)
  if pace.every == 1:
    assert arithmetic.snapshots(pace) == ahead + 1


def test_in_flight_one_replaces_the_other():
  assert arithmetic.snapshots(Pace(5, inflight=True)) == 2


def planned(name, own=0, jobs=0, **changes):
  config = runs.small(
    **{
      'mesh.data': -1,
      'sampler.ahead': 1,
      'sampler.prompts': 8,
      'generator.devices': own,
      'model.compute_dtype': 'bfloat16',
      'learner.micro_rows': 0,
      **changes,
    }
  )
  topology = topologies.named(name)
  more = Jobs(jobs, topology) if jobs else None
  return plans.plan(config, topology, estimate=True, jobs=more)


MACHINE = Machine(1.0, 1.0, 100.0, 10.0)  # bytes per second


@pytest.mark.parametrize(
  'own, changes, parts, copies, lacks',
  [
    (4, {}, 4, 0, 3 / 4),
    (2, {}, 2, 0, 1 / 2),
    (6, {}, 2, 2, 1 / 2),
    (1, {}, 1, 0, 0),
    # Each device needs half of the weights alone.
    (4, {'sampler.tensor': 2}, 4, 0, 3 / 4),
  ],
)
def test_parts_are_sent_once_and_then_put_together(
  own, changes, parts, copies, lacks
):
  counted = planned('v5e:2x4', own, **changes).counted
  sync = pacing.handed_over(counted, MACHINE)
  size = counted.weights.published
  # In bfloat16, but for the scales of norms.
  assert size == pytest.approx(2 * counted.weights.number, rel=0.01)
  assert sync.bytes == size and sync.link == 'ici' and sync.is_known
  assert sync.learning_secs == pytest.approx(size / parts * (1 + copies) / 100)
  needed = counted.weights.sampled
  assert (needed < size) == bool(changes)
  assert sync.sampling_secs == pytest.approx(needed * lacks / 100)


def test_adapters_go_over_alone():
  whole, adapters = (
    planned('v5e:2x4', 4, **{'lora.rank': rank}).counted for rank in (0, 2)
  )
  syncs = [pacing.handed_over(one, MACHINE) for one in (whole, adapters)]
  assert syncs[1].bytes < 0.3 * syncs[0].bytes
  assert syncs[1].secs < 0.3 * syncs[0].secs


@pytest.mark.parametrize('number, fetched', [(1, 1 / 8), (3, 3 / 8)])
def test_jobs_fetch_a_version_over_the_network(number, fetched):
  """Eight devices have the network of the learner, which all jobs share."""
  made = planned('v5e:2x4', jobs=number)
  size = made.counted.weights.published
  sync = pacing.fetched(made.counted, made.drawing, number, MACHINE)
  assert sync.link == 'dcn' and sync.learning_secs == 0
  lacks = made.drawing.weights.sampled * 7 / 8
  assert sync.secs == pytest.approx(size * fetched / 10 + lacks / 100)


@pytest.mark.parametrize('lost', ['ici', 'dcn'])
def test_a_link_without_a_figure_is_told(lost):
  machine = MACHINE._replace(**{f'{lost}_bytes': None})
  here = pacing.handed_over(planned('v5e:2x4', 4).counted, machine)
  assert here.is_known == (lost == 'dcn')
  made = planned('v5e:2x4', jobs=1)
  there = pacing.fetched(made.counted, made.drawing, 1, machine)
  assert not there.is_known
