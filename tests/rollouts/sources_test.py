"""What a source draws by, and when its receipt changes."""

import contextlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rollouts import sources
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.rollouts.sources import Receipt


class Stopped(KeyboardInterrupt):
  """A signal, where it need not wait."""


class Engine:
  """Notes what it is given; a rollout is the parameters that draw it."""

  def __init__(self):
    self.events, self.params = [], None

  def load(self, params, version):
    self.events.append(('load', version))
    self.params = params

  def unload(self):
    self.events.append('unload')
    self.params = None

  def draw(self, prompts, version):
    self.events.append(('draw', version))
    drawn = np.asarray(self.params['w']).copy()
    return drawn, prompts._replace(position=prompts.position + 2), {'n': 1.0}


def params(version):
  return {'w': jnp.full(3, float(version))}


def at_once(engine, **more):
  return sources.AtOnce(engine.draw, engine.load, engine.unload, **more)


def drawn_ahead(engine, rollouts=9, wait=contextlib.nullcontext):
  return sources.Ahead(engine.draw, engine.load, engine.unload, wait, rollouts)


def train(source, first, last):
  """What versions have drawn, and the receipts behind each rollout."""
  versions, receipts = [], []
  for version in range(first, last):
    source.publish(newest := params(version), version)
    delivery = source.next(version)
    jax.tree.map(lambda x: x.delete(), newest)  # the learner donates it
    versions.append(delivery.rollout[0])
    receipts.append(delivery.receipt)
    assert delivery.receipt is source.receipt and delivery.counts['n'] == 1
  return versions, receipts


def test_at_once_draws_by_the_newest_and_frees_the_engine():
  engine = Engine()
  source = at_once(engine)
  assert source.first(params(0)) == Receipt()
  versions, receipts = train(source, 0, 2)
  assert versions == [0, 1]
  assert receipts == [Receipt(PromptState(2)), Receipt(PromptState(4))]
  one = [('load', 0), ('draw', 0), 'unload']
  assert engine.events == [*one, ('load', 1), ('draw', 1), 'unload']


def test_prompts_are_not_read_behind_the_last_rollout():
  filled = []
  source = at_once(Engine(), fill=lambda: filled.append(1), rollouts=2)
  source.prepare(1)
  source.prepare(2)
  assert len(filled) == 1


def test_ahead_draws_by_the_version_before_and_a_receipt_draws_it_again():
  engine = Engine()
  source = drawn_ahead(engine)
  source.receipt = source.first(params(0))
  versions, receipts = train(source, 0, 4)
  source.close()
  assert versions == [0, 0, 1, 2]
  (older,) = receipts[-1].params
  assert receipts[-1].prompts == PromptState(8) and older['w'][0] == 3
  # The memory of what drew earlier ones was taken.
  assert receipts[0].params[0]['w'].is_deleted()
  again = drawn_ahead(engine := Engine())
  again.receipt = receipts[-1]
  assert train(again, 4, 6)[0] == [3, 4]
  assert engine.events[:2] == [('load', 3), ('draw', 4)]
  again.close()


def test_no_rollout_is_drawn_behind_the_last():
  engine = Engine()
  source = drawn_ahead(engine, rollouts=2)
  source.receipt = source.first(params(0))
  train(source, 0, 2)
  source.close()
  assert [event for event in engine.events if 'draw' in event] == [
    ('draw', 0),
    ('draw', 1),
  ]
  assert engine.params is None


@pytest.mark.parametrize('fails', [Stopped, ValueError, MemoryError])
def test_what_ends_a_wait_leaves_the_receipt_as_it_was(fails):
  """A signal, a judge, the engine: what is saved then draws it again."""
  engine, waits = Engine(), []

  @contextlib.contextmanager
  def wait():
    waits.append(1)
    yield
    if fails is Stopped and len(waits) == 2:
      raise Stopped

  def draw(prompts, version):
    if fails is ValueError and version == 1:
      raise ValueError
    return engine.draw(prompts, version)

  def load(given, version):
    if fails is MemoryError and engine.events:  # for the second rollout
      raise MemoryError
    engine.load(given, version)

  source = drawn_ahead(engine, wait=wait)
  source.draw, source.load = draw, load
  source.receipt = source.first(params(0))
  source.publish(params(0), 0)
  source.next(0)
  receipt = source.receipt
  source.publish(params(1), 1)
  with pytest.raises(fails):
    source.next(1)
  source.close()
  assert source.receipt is receipt
  assert not receipt.params[0]['w'].is_deleted()


def test_paused_waits_for_the_thread_and_has_the_newest():
  engine, goes_on = Engine(), threading.Event()
  source = drawn_ahead(engine)
  draw = source.draw

  def slow(prompts, version):
    if version == 1:
      goes_on.wait()
    return draw(prompts, version)

  source.draw = slow
  source.receipt = source.first(params(0))
  source.publish(params(0), 0)
  source.next(0)
  source.publish(params(1), 1)
  threading.Timer(0.1, goes_on.set).start()
  with source.paused():
    assert engine.events[-2:] == [('draw', 1), ('load', 1)]
    assert engine.params['w'][0] == 1
  assert source.next(1).rollout[0] == 0  # it was drawn by the one before
  source.close()


def test_what_is_drawn_is_given_up_when_a_source_is_closed():
  engine, begun = Engine(), threading.Event()
  source = drawn_ahead(engine)
  draw = source.draw

  def endless(prompts, version):
    while version == 1:
      begun.set()
      source.lease.check()
    return draw(prompts, version)

  source.draw = endless
  source.receipt = source.first(params(0))
  source.publish(params(0), 0)
  source.next(0)
  assert begun.wait(timeout=300)
  source.close()
  assert not [t for t in threading.enumerate() if t.name == 'ahead']


def test_only_a_judge_that_judges_is_left_alone(monkeypatch):
  """The thread of one that has failed may be in a program of the device."""
  monkeypatch.setattr(sources, '_JUDGING_SECS', 1e-9)
  source = drawn_ahead(Engine())
  draw, begun, ended = source.draw, threading.Event(), threading.Event()

  def fails(chosen, *check):
    raise ValueError

  def recovers(prompts, version):
    if version == 1:
      with contextlib.suppress(ValueError):
        source.lease.judging(fails, [])
      begun.set()
      time.sleep(0.3)
      ended.set()
    return draw(prompts, version)

  source.draw = recovers
  source.receipt = source.first(params(0))
  source.publish(params(0), 0)
  source.next(0)
  assert begun.wait(timeout=300)
  source.close()
  assert ended.is_set()
