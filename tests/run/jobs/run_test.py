"""Runs for which generators draw: threads that know the learner by sockets."""

import json
import random
import threading
import time

import jax
import pytest
import tokenizers

from grpo_jax.engines import fetching
from grpo_jax.hosts import processes
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import door as door_lib
from grpo_jax.run.jobs import generating
from tests import runs
from tests.run import played
from tests.run import resume_test
from tests.run.jobs import generators

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.fixture(autouse=True)
def beats_fast(monkeypatch):
  monkeypatch.setattr(calls, 'BEAT_SECS', 0.2)
  monkeypatch.setattr(door_lib, 'TAKE_SECS', 0.5)


@pytest.fixture(autouse=True)
def no_thread_is_left():
  before = {*threading.enumerate()}  # of other tests
  yield
  until = time.monotonic() + 30  # a last beat may be under way
  while left := [t.name for t in threading.enumerate() if t not in before]:
    if not {'ahead', 'beat', 'serving'} & {*left}:
      return
    assert time.monotonic() < until, left
    time.sleep(0.01)


CHANGES = [
  {'sampler.ahead': 1},
  {'sampler.ahead': 2, 'sampler.resample_rounds': 1, 'shuffle_rewards': True},
  {'lora.rank': 2, 'generator.parts': 4, 'generator.weights': 'files'},
  {'mesh.fsdp': 2, 'learner.micro_rows': 4, 'sampler.ahead': 1},
]


@pytest.mark.parametrize(
  'changes', CHANGES, ids=['ahead', 'resampled', 'adapters', 'two devices']
)
def test_it_is_the_run_that_draws_itself(changes, tmp_path):
  """Bit for bit, with as many parts, however many generators there are."""
  alone = runs.small(**{**generators.SMALL, **changes})
  if 'mesh.fsdp' in changes:
    changes_alone = {**changes, 'generator.devices': 1}
    alone = runs.small(**{**generators.SMALL, **changes_alone})
  loop.train(alone, tmp_path / 'alone')
  port = generators.free_port()
  with generators.some(port, 2) as every:
    generators.train(tmp_path / 'jobs', port, **changes)
  assert [one.ended() for one in every] == [0, 0]
  assert sum(one.generator.parts for one in every)
  runs.assert_equal(tmp_path / 'alone', tmp_path / 'jobs')
  for k, file in enumerate(parquet.files(tmp_path / 'jobs' / 'completions')):
    batch = parquet.read(file).batch
    version = max(k - changes.get('sampler.ahead', 0), 0)
    if 'sampler.resample_rounds' not in changes:  # which keeps a surplus
      assert set(batch.version[batch.mask]) == {version}
  assert not (tmp_path / 'jobs' / 'weights').exists()


def test_a_learner_that_is_stopped_goes_on_with_the_same_generators(tmp_path):
  changes = {'sampler.ahead': 2, 'steps': 6, 'checkpoint.every_steps': 1}
  loop.train(runs.small(**{**generators.SMALL, **changes}), tmp_path / 'whole')
  port, starts = generators.free_port(), 0
  with generators.some(port, 2) as every:
    done = {'steps': 0}
    while done['steps'] < 6:
      stop = resume_test.After(2)
      done = generators.train(tmp_path / 'pieces', port, stop, **changes)
      starts += 1
      assert starts < 20
    generators.train(tmp_path / 'pieces', port, **changes)
  assert starts > 1
  assert [one.ended() for one in every] == [0, 0]
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'pieces')


class Late:
  """Draws late, at random; some parts are lost on their way."""

  def __init__(self, draws, seed):
    self._draws, self._chance = draws, random.Random(seed)

  def fetch(self, *args):
    if self._chance.random() < 0.2:
      raise fetching.Late('The link is slow.')
    self._draws.fetch(*args)

  def load(self, *args):
    self._draws.load(*args)

  def draw(self, job, check, newest):
    time.sleep(self._chance.choice((0, 0, 0.05, 0.2)))
    if self._chance.random() < 0.2:
      raise generating.Abandoned
    return self._draws.draw(job, check, newest)


def test_what_generators_suffer_changes_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(generating, '_AGAIN_SECS', 0.01)
  changes = {'sampler.ahead': 2, 'steps': 6, 'generator.parts': 4}
  loop.train(runs.small(**{**generators.SMALL, **changes}), tmp_path / 'whole')
  port, seeds = generators.free_port(), iter(range(9))
  late = lambda draws: Late(draws, next(seeds))
  with generators.some(port, 3, draws=late):
    generators.train(tmp_path / 'jobs', port, **changes)
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'jobs')


def test_weights_are_taken_between_tokens(tmp_path):
  """'inflight': no token is older than it may be, and a replay is the run."""
  changes = {
    'sampler.ahead': 2, 'generator.updates': 'inflight', 'steps': 6,
    'checkpoint.every_steps': 3,
  }  # fmt: skip
  port = generators.free_port()
  with generators.some(port, 2):
    generators.train(tmp_path / 'jobs', port, **changes)
  files = parquet.files(tmp_path / 'jobs' / 'completions')
  assert len(files) == 6
  for k, file in enumerate(files):
    batch = parquet.read(file).batch
    assert batch.version[batch.mask].min() >= k - 2
  config = generators.listening(port, **changes)
  again = tmp_path / 'again'
  loop.train(config, again, replay=tmp_path / 'jobs' / 'completions')
  (_, arrays, _), (_, others, _) = map(runs.saved, (tmp_path / 'jobs', again))
  for name, x in others.items():
    assert (arrays[name] == x).all()


def test_a_judge_that_fails_elsewhere_ends_the_run_as_if_it_were_here(tmp_path):
  port = generators.free_port()
  one = generators.Thread(port)
  with pytest.raises(desk_lib.Failed, match='answers are bad') as raised:
    generators.train(tmp_path, port, reward='tests.run.jobs.judges:fails')
  assert 'judges.py' in raised.value.__notes__[0]
  assert isinstance(one.ended(), Exception)
  assert runs.checkpoints(tmp_path) == [0]


def test_without_a_generator_the_run_is_saved_and_ends(tmp_path):
  port = generators.free_port()
  with pytest.raises(processes.StartAgain, match='none has come') as raised:
    generators.train(tmp_path, port, **{'generator.wait_secs': 0.5})
  assert 'give the same command again' in str(raised.value)
  assert runs.checkpoints(tmp_path) == [0]


def test_what_was_given_in_python_cannot_travel(tmp_path):
  import grpo_jax

  port = generators.free_port()
  values = grpo_jax.config.default()
  values.generator.listen, values.log.display = f'127.0.0.1:{port}', 'plain'
  judge = lambda prompt, completion, example: 1.0
  with pytest.raises(ValueError, match='given rewards in Python, which cannot'):
    grpo_jax.train(values, tmp_path, rewards=[judge])


def test_a_generator_with_other_files_is_refused(tmp_path, monkeypatch):
  from grpo_jax.run.jobs import learning

  port, needed = generators.free_port(), learning.needed
  main = threading.current_thread()

  def other(config):
    found = needed(config)
    if threading.current_thread() is main:
      found['the SHA-256 of the module of tests.judges:even'] = "'other'"
    return found

  monkeypatch.setattr(learning, 'needed', other)
  one = generators.Thread(port)
  with pytest.raises(processes.StartAgain):
    generators.train(tmp_path, port, **{'generator.wait_secs': 5.0})
  error = one.ended()
  assert isinstance(error, ValueError)
  assert 'the SHA-256 of the module of tests.judges:even=' in str(error)
  assert jax.devices()


def test_episodes_are_played_where_they_are_drawn(tmp_path):
  """Environments, branches and judges of generators, bit for bit."""
  folder = tmp_path / 'tokenizer'
  folder.mkdir()
  tokenizers.Tokenizer.from_str(played.tokenizer().backend.to_str()).save(
    str(folder / 'tokenizer.json')
  )
  told = {
    'chat_template': played.TEMPLATE,
    'eos_token': '|',
    'pad_token': '<pad>',
  }
  (folder / 'tokenizer_config.json').write_text(json.dumps(told))
  changes = {
    **{k: v for k, v in generators.SMALL.items() if k != 'reward'},
    **played.SMALL, 'data.tokenizer': str(folder), 'sampler.ahead': 1,
  }  # fmt: skip
  loop.train(runs.small(**changes), tmp_path / 'alone')
  port = generators.free_port()
  address = {'generator.listen': f'127.0.0.1:{port}'}
  with generators.some(port, 2) as every:
    loop.train(runs.small(**changes, **address), tmp_path / 'jobs')
  assert [one.ended() for one in every] == [0, 0]
  runs.assert_equal(tmp_path / 'alone', tmp_path / 'jobs')
  (first, *_) = parquet.files(tmp_path / 'jobs' / 'completions')
  assert parquet.read(first).accounts
  # What took how long comes over too.
  assert 'engine_idle_share' in runs.records(tmp_path / 'jobs')[-1]
