"""Pieces of a rollout, drawn at once in threads."""

import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import generation
from grpo_jax.engines.local import sampler
from tests import compilations
from tests import drawing
from tests import tiny

MIB = 2**20


@pytest.mark.parametrize(
  'given, number',
  [
    # Little work: a product takes no longer than handing it over.
    ((2, 4, 4, 2 * MIB, MIB // 4), 1),
    ((2, 8, 8, 4 * MIB, MIB // 4), 2),
    ((8, 4, 64, 4 * MIB, MIB // 4), 4),  # prompts are not divided
    ((1, 8, 8, 4 * MIB, MIB // 4), 1),
    # The output layer is the larger part.
    ((2, 4, 8, 2 * MIB, 16 * MIB), 1),
    # Many weights, which every piece would read, for few rows and for many.
    ((2, 8, 8, 400 * MIB, 100 * MIB), 1),
    ((2, 64, 8, 400 * MIB, 100 * MIB), 2),
  ],
)
def test_pieces_have_enough_rows(given, number):
  assert generation.pieces(*given) == number


def engine(cores, **options):
  model = tiny.model(num_layers=1)
  options = {'prompt_buckets': (8,), 'completion_buckets': (8, 16)} | options
  made = engines.LocalEngine(model, cores=cores, **options)
  made.load(tiny.params(model), version=3)
  return made


def requests():
  sampling = engines.Sampling(eos_ids=(3, 7, 11))
  return drawing.requests(tiny.ragged(prompts=5)[0], sampling)


@pytest.fixture
def divided(monkeypatch):
  """Makes every rollout, however small, as many pieces as there are cores."""
  monkeypatch.setattr(generation, '_LEAST_WORK', 0)


@pytest.mark.parametrize(
  'cores, max_rows',
  [
    (2, 8),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in ((2, 4096), (3, 4096), (5, 4096), (3, 8), (5, 8))
    ),
  ],
)
def test_pieces_draw_what_the_whole_draws(cores, max_rows, divided):
  whole = drawing.generate(engine(1, max_rows=max_rows), requests())
  told, thread = [], []

  def finished(prompt, one):
    told.append((prompt, one.number, one.ids.tolist(), one.finish))
    thread.append(threading.current_thread())

  made = engine(cores, max_rows=max_rows)
  found = drawing.generate(made, requests(), finished)
  for name in ('tokens', 'length', 'finish', 'log_kept'):
    np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
  for name in ('logp', 'entropy'):
    wanted = getattr(whole, name)
    np.testing.assert_allclose(getattr(found, name), wanted, atol=1e-5)
  np.testing.assert_array_equal(found.version, whole.version)
  assert found.holder is None
  # Each completion once, whole, in the caller's thread.
  assert set(thread) == {threading.main_thread()} and len(told) == 5 * 4
  for prompt, completion, ids, finish in told:
    number = whole.length[prompt, completion]
    assert ids == whole.tokens[prompt, completion, :number].tolist()
    assert finish == whole.finish[prompt, completion]


def test_pieces_share_their_programs(divided):
  # A length that no other test has, or the programs might be there.
  made, asked = engine(3, completion_buckets=(13,)), requests()
  with compilations.compiled_programs() as names:
    drawing.generate(made, asked)
    # Of two prompts each: the third piece has one, and a row of padding.
    assert names.count('prefill') == 1 and 'decode' in names
    first = len(names)
    drawing.generate(made, asked)
    assert len(names) == first


@pytest.mark.parametrize('cores, rows', [(1, 8), (2, 4), (3, 4), (9, 4)])
def test_pieces_share_the_rows_that_are_allowed(cores, rows, divided):
  made, asked = engine(cores, max_rows=9), requests()  # groups of 4
  _, parts = made._begun(arrays.Batch(range(5), asked), made.cores)
  assert [part.schedule.prompts * 4 for part in parts] == [rows] * (8 // rows)
  assert sum(len(part.prompts.length) for part in parts) == 5


LEAVES = """
import sys
import jax, jax.numpy as jnp
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import sampler
from grpo_jax.engines.local import generation
body = lambda _, x: x @ x / 300
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, body, x))
slow = slow.lower(jnp.ones((300, 300))).compile()
def steps(works):
  yield works and slow(jnp.ones((300, 300))).block_until_ready()
for _ in generation.side_by_side([steps(False), steps(True)]):
  sys.exit(43)
"""


@pytest.mark.long
def test_a_program_may_end_while_a_piece_is_drawn():
  done = subprocess.run(
    [sys.executable, '-c', LEAVES],
    cwd=pathlib.Path(__file__).parents[3],
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert (done.returncode, done.stderr) == (43, '')


def watch_calls(monkeypatch, before):
  """Calls a function before each call of the devices, in the piece's thread."""
  decode = sampler.decode

  def watched(*args):
    before()
    return decode(*args)

  monkeypatch.setattr(sampler, 'decode', watched)


def test_each_piece_has_a_thread(divided, monkeypatch):
  seen, both = set(), threading.Barrier(2, timeout=60)

  def before():
    if threading.current_thread() not in seen:
      seen.add(threading.current_thread())
      both.wait()  # breaks unless the other piece comes meanwhile

  watch_calls(monkeypatch, before)
  drawing.generate(engine(2), requests())
  assert len(seen) == 2 and threading.main_thread() not in seen


class Stopped(BaseException):
  pass


def test_what_a_piece_raises_ends_all(divided, monkeypatch):
  calls, ends = [], threading.Event()

  def before():
    calls.append(threading.current_thread())
    if len(calls) > 1:
      ends.set()
      raise Stopped

  watch_calls(monkeypatch, before)
  with pytest.raises(Stopped):
    drawing.generate(engine(2), requests())
  assert ends.is_set()
  for thread in calls:
    thread.join(60)
    assert not thread.is_alive()


def test_what_the_caller_raises_ends_all():
  going = [threading.Event() for _ in range(2)]
  threads = []

  def steps(event):
    threads.append(threading.current_thread())
    while True:
      yield
      event.wait(60)

  def take():
    for _ in generation.side_by_side([steps(event) for event in going]):
      raise Stopped

  with pytest.raises(Stopped):
    take()
  for event in going:
    event.set()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()


def test_one_piece_needs_no_thread():
  seen = []

  def steps():
    seen.append(threading.current_thread())
    yield

  assert list(generation.side_by_side([steps()])) == [None]
  assert seen == [threading.main_thread()]
