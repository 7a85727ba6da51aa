"""The workdir: a run of an earlier version, and who may write to it."""

import dataclasses
import errno
import functools
import json
import os
import pathlib
import shutil
import threading

import jax
import pytest

from grpo_jax import config as config_lib
from grpo_jax.run import loop
from grpo_jax.run.build import build
from grpo_jax.run.keep import records
from grpo_jax.run.keep import saved_config
from grpo_jax.run.keep import workdir
from tests import runs
from tests.hosts import processes_test

# Written by the first version that had a config.json. It never changes.
EARLIER = pathlib.Path(__file__).parent / 'config_of_0.1.0.json'


@pytest.fixture
def earlier(tmp_path):
  """A workdir of that version, and of one before some fields were there."""
  values = json.loads(EARLIER.read_text())
  del values['optim']['brake'], values['reference'], values['log']['samples']
  (tmp_path / 'config.json').write_text(json.dumps(values))
  return tmp_path


def resolved(directory):
  return config_lib.resolve(saved_config.get_config(str(directory)))


def test_a_config_of_an_earlier_version_is_read_with_defaults(earlier):
  config = resolved(earlier)
  assert config.learner.method_kwargs == {'kl_coefficient': 0.0}
  assert config.data.prompt_buckets == (6,) and config.warm_up.steps == 20
  assert config.optim.brake == 'none' and config.log.samples == 3
  assert config.reference == config_lib.Reference()


def test_a_run_of_an_earlier_version_goes_on(earlier):
  """With its own config, and not with another value of a field it lacked."""
  workdir.refuse_another(earlier, resolved(earlier))
  workdir.record(earlier, resolved(earlier), anew=False)
  for path in ('config.json', 'versions.json'):
    assert json.loads((earlier / path).read_text())
  assert not (earlier / 'given.json').exists()
  values = json.loads((earlier / 'config.json').read_text())
  assert values['optim']['brake'] == 'none'


@pytest.mark.parametrize('decay', ['constant', 'linear', 'cosine'])
def test_the_steps_of_a_decay_stay(decay, tmp_path):
  """Another number of them would be another schedule from the start."""
  decays = {'optim.decay': decay, 'optim.warmup_steps': 0}
  small = functools.partial(runs.small, **decays)
  workdir.record(tmp_path, small(steps=4), anew=True)
  workdir.refuse_another(tmp_path, small(steps=4))
  if decay == 'constant':
    workdir.refuse_another(tmp_path, small(steps=6))
    return
  with pytest.raises(ValueError) as caught:
    workdir.refuse_another(tmp_path, small(steps=6))
  assert str(caught.value) == (
    f'The run in {tmp_path} has config.steps=4, over which its learning rate '
    f'decays ({decay}), and now it is 6; give the same, or another workdir.'
  )


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
  """And nothing else that is there."""
  whole = [
    'metrics.jsonl',
    'completions/step_00000001.parquet',
    'exports/4/config.json',
    'notes.tmp',  # the user's
    'cache.tmp/notes',
  ]
  half = [
    '.config.json.77.tmp',
    '.metrics.jsonl.77.tmp',
    'completions/.step_00000002.parquet.77.tmp',
    'exports/.8.tmp/model.safetensors',
  ]
  for name in whole + half:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('half')
  workdir.record(tmp_path, runs.small(), anew=False)
  left = {
    str(path.relative_to(tmp_path))
    for path in tmp_path.rglob('*')
    if path.is_file()
  }
  assert left == {*whole, 'config.json', 'versions.json'}
  assert not (tmp_path / 'exports/.8.tmp').exists()


def test_the_first_process_of_several_writes_for_all(tmp_path, monkeypatch):
  config, directory = runs.small(), tmp_path / 'run'
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  with workdir.claimed(directory, config):
    assert workdir.record(directory, config, anew=True)['processes'] == 1
  assert not directory.exists()
  monkeypatch.setattr(jax, 'process_index', lambda: 0)
  with workdir.claimed(directory, config):
    assert {path.name for path in directory.iterdir()} == {'.lock'}
    with pytest.raises(ValueError, match='Another process is running'):
      with workdir.claimed(directory, config):
        pass
    workdir.record(directory, config, anew=True)
  assert (directory / 'versions.json').exists()


def test_two_starts_with_other_configs_do_not_both_pass(tmp_path, monkeypatch):
  """The second one has looked before the first has written its config."""
  first, second = runs.small(), runs.small(seed=1)
  real = workdir.fcntl.flock

  def slow(file, how):
    workdir.record(tmp_path, first, anew=True)
    real(file, how)

  monkeypatch.setattr(workdir.fcntl, 'flock', slow)
  with pytest.raises(ValueError, match='has config.seed=0.*now it is 1'):
    with workdir.claimed(tmp_path, second):
      raise AssertionError('it is another run')


def test_a_workdir_that_not_all_see_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(workdir, 'SHARED_SECS', 0.2)
  for rank in range(3):
    (tmp_path / str(rank)).mkdir()
  (tmp_path / '0' / '.seen_by_all.of_a_killed_start').touch()

  def body(peers, shared):
    rank = 0 if shared else peers.rank
    workdir.check_shared(tmp_path / str(rank), peers)

  def checked(shared):
    return processes_test.run(functools.partial(body, shared=shared))[0]

  assert checked(shared=True) == [None] * 3
  assert 'Process 1 does not see in ' in str(checked(shared=False)[1])
  assert not any(path.is_file() for path in tmp_path.rglob('*'))


def test_a_slow_file_system_is_waited_for(tmp_path):
  def appears():
    for file in (tmp_path / '0').iterdir():
      shutil.copy(file, tmp_path / '1')

  def body(peers):
    (tmp_path / str(peers.rank)).mkdir()
    if peers.rank:
      threading.Timer(0.2, appears).start()
    workdir.check_shared(tmp_path / str(peers.rank), peers)

  assert processes_test.run(body, 2)[0] == [None, None]


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_is_no_other_process(
  number, tmp_path, monkeypatch
):
  def flock(file, how):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(workdir.fcntl, 'flock', flock)
  with pytest.raises(ValueError, match='cannot be locked') as caught:
    with workdir.claimed(tmp_path, runs.small()):
      pass
  assert os.strerror(number) in str(caught.value)
  assert 'Another process' not in str(caught.value)


@pytest.mark.parametrize('broken', ['', '{"a": 1}', '[{}', '\0\0'])
def test_a_broken_record_of_versions_is_put_aside(broken, earlier):
  file, said = earlier / 'versions.json', []
  for _ in range(2):
    file.write_text(broken)
    workdir.record(earlier, resolved(earlier), False, warn=said.append)
    assert len(json.loads(file.read_text())) == 1
  assert (earlier / 'versions.2.json').read_text() == broken
  assert 'versions.1.json' in said[0] and 'versions.2.json' in said[1]


def test_a_field_that_the_run_lacked_counts_with_its_default(earlier):
  values = saved_config.get_config(str(earlier))
  values.optim.brake = 'reset'
  with pytest.raises(ValueError, match="config.optim.brake='none', and now"):
    workdir.refuse_another(earlier, config_lib.resolve(values))


def test_a_run_goes_on_from_before_remat_had_names(tmp_path):
  values = json.loads(EARLIER.read_text())
  values['model']['remat'] = True
  (tmp_path / 'config.json').write_text(json.dumps(values))
  config = resolved(tmp_path)
  assert config.model.remat == 'layer'
  workdir.refuse_another(tmp_path, config)


def test_what_an_earlier_version_did_is_said_in_todays_names(tmp_path):
  values = json.loads(EARLIER.read_text())
  values['model']['compute_dtype'] = 'bfloat16'
  for method, argument in ('gmpo', 'limit'), ('dppo_kl', 'threshold'):
    values['learner'] |= {'method': method, 'method_kwargs': {argument: 0.3}}
    (tmp_path / 'config.json').write_text(json.dumps(values))
    config = resolved(tmp_path)
    workdir.refuse_another(tmp_path, config)
    assert config.learner.method_kwargs == {'low': 0.3, 'high': 0.3}
    assert config.model.residual_dtype == 'bfloat16'
    assert config.model.remat == 'none'
  other = saved_config.get_config(str(tmp_path))
  other.model.residual_dtype = 'float32'
  with pytest.raises(ValueError, match="residual_dtype='bfloat16', and now it"):
    workdir.refuse_another(tmp_path, config_lib.resolve(other))
  other = saved_config.get_config(str(tmp_path))
  other.learner.nonfinite_rollouts = 0  # which the stop of a run names
  workdir.refuse_another(tmp_path, config_lib.resolve(other))


def test_sources_had_no_arguments(tmp_path):
  mixed = ({'name': 'a.jsonl', 'weight': 3.0}, {'name': 'arithmetic'})
  config = runs.small(**{'data.train': mixed})
  values = json.loads(json.dumps(dataclasses.asdict(config)))
  for source in values['data']['train']:
    assert source.pop('kwargs') == {}
  (tmp_path / 'config.json').write_text(json.dumps(values))
  workdir.refuse_another(tmp_path, config)
  mixed[0]['kwargs'] = {'prompt_field': 'q'}
  with pytest.raises(ValueError, match=r"config.data.train=.*'kwargs': {}}"):
    workdir.refuse_another(tmp_path, runs.small(**{'data.train': mixed}))


def test_a_run_that_met_a_long_prompt_may_drop_it(tmp_path):
  values = dataclasses.asdict(runs.small())
  (tmp_path / 'config.json').write_text(json.dumps(values))
  workdir.refuse_another(tmp_path, runs.small(**{'data.too_long': 'drop'}))


def test_data_that_has_changed_since_the_run_began_is_told(tmp_path):
  """At each start that goes on; a run that begins anew has its own data."""
  names = ('a.jsonl', 'b.jsonl', 'c.jsonl')
  files = [tmp_path / name for name in names]
  for file in files:
    file.write_text('{"prompt": "1+1="}\n')
  config = runs.small(
    **{
      'data.train': ({'name': str(files[0])}, {'name': 'arithmetic'}),
      'data.heldout': ({'name': str(files[1])}, {'name': str(files[2])}),
      'data.answer_field': '',
      'warm_up.steps': 0,
    }
  )

  def said(after_step):
    contents = workdir.contents(build.run(config).sources)
    warnings = []
    workdir.record(
      tmp_path / 'run', config, not after_step, warn=warnings.append,
      contents=contents, after_step=after_step,
    )  # fmt: skip
    return warnings

  (tmp_path / 'run').mkdir()
  assert said(0) == said(2) == []
  files[0].write_text('{"prompt": "1+1="}\n' * 2)
  changed = (
    f'data.train[0]={str(files[0])!r} has changed since the run began; prompts '
    'may be repeated or lost.'
  )
  assert said(2) == said(4) == [changed]
  files[2].write_text('{"prompt": "1+2="}\n')  # of the same length
  assert said(4) == [
    changed,
    f'data.heldout[1]={str(files[2])!r} has changed since the run began; '
    'accuracies before and after it do not compare.',
  ]
  assert said(0) == said(2) == []
  last = json.loads((tmp_path / 'run' / 'versions.json').read_text())[-1]
  assert list(last['data'].values())[1] == {'records': 9000}
  # Of a run that was begun by an earlier version nothing is known.
  old = [{'after_step': 0}, 'x', {'after_step': 2}]
  (tmp_path / 'run' / 'versions.json').write_text(json.dumps(old))
  assert said(4) == []
  files[2].write_text('{"prompt": "1+3="}\n')
  assert len(said(4)) == 1


@pytest.mark.long
def test_a_run_that_goes_on_warns_of_changed_data(tmp_path, capsys):
  file = tmp_path / 'a.jsonl'
  for number in (8, 9):
    record = {'prompt': '01+02=', 'answer': '03'}
    file.write_text(f'{json.dumps(record)}\n' * number)
    changes = {'data.train': str(file), 'data.heldout': '', 'steps': number - 7}
    loop.train(runs.small(**changes), tmp_path / 'run')
    warned = f"data.train[0]='{file}' has changed since the run began"
    assert (warned in capsys.readouterr().err) == (number == 9)


def test_a_run_goes_on_with_its_widths(earlier, tmp_path):
  values = saved_config.get_config(str(earlier))
  values.data.prompt_buckets = values.data.completion_buckets = ()
  config = workdir.with_widths(earlier, config_lib.resolve(values))
  assert config == resolved(earlier) and config.data.prompt_buckets == (6,)
  values.data.prompt_buckets = (9,)
  other = workdir.with_widths(earlier, config_lib.resolve(values))
  assert other.data.prompt_buckets == (9,)
  alone = config_lib.Config()
  assert workdir.with_widths(tmp_path / 'no', alone) is alone


def test_what_is_no_json_is_refused(tmp_path):
  for text in ('{"a"', '[' * 100_000):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match='config.json is no JSON'):
      records.config_of(tmp_path)
