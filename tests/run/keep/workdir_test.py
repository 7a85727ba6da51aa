"""The workdir: whose run it holds, and who may write to it."""

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
from grpo_jax.run.keep import workdir
from tests import runs
from tests.hosts import processes_test

# Written by the first version that had a config.json. It never changes.
EARLIER = pathlib.Path(__file__).parent / 'config_of_0.1.0.json'


@pytest.mark.parametrize('change', ['', 'model.residual_dtype', 'rewards'])
def test_a_config_of_an_earlier_version_is_refused(change, tmp_path):
  """Which had other fields, or a reward without some."""
  values = json.loads(EARLIER.read_text())
  if change:
    values = json.loads(json.dumps(dataclasses.asdict(runs.small())))
    del values['model']['residual_dtype']
    if change == 'rewards':
      values = json.loads(json.dumps(dataclasses.asdict(runs.small())))
      del values['rewards'][0]['required']
  (tmp_path / 'config.json').write_text(json.dumps(values))
  starts = [{'packages': {'grpo_jax': '0.0.9'}}]
  (tmp_path / 'versions.json').write_text(json.dumps(starts))
  words = f'by grpo_jax 0.0.9, an earlier version, .* {change}'
  for read in (
    records.get_config,
    functools.partial(workdir.refuse_another, config=runs.small()),
    functools.partial(workdir.with_widths, config=runs.small()),
  ):
    with pytest.raises(ValueError, match=words):
      read(tmp_path)
  assert records.config_of(tmp_path) == values  # as a report reads it


def test_a_saved_config_is_the_config(tmp_path):
  config = runs.small(**{'learner.method_kwargs': {'kl_coefficient': 0.1}})
  workdir.record(tmp_path, config, anew=True)
  assert records.saved_config(tmp_path) == config
  assert config_lib.resolve(records.get_config(str(tmp_path))) == config
  other = records.get_config(tmp_path)
  other.optim.brake = 'reset'
  with pytest.raises(ValueError, match="config.optim.brake='none', and now"):
    workdir.refuse_another(tmp_path, config_lib.resolve(other))
  other = records.get_config(tmp_path)
  other.learner.nonfinite_rollouts = 0  # which the stop of a run names
  workdir.refuse_another(tmp_path, config_lib.resolve(other))


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
    f'decays ({decay}), and now it is 6; give the same, or another workdir, or '
    'go on with the new value by --allow_changed=steps.'
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
def test_a_broken_record_of_versions_is_put_aside(broken, tmp_path):
  file, said = tmp_path / 'versions.json', []
  for _ in range(2):
    file.write_text(broken)
    workdir.record(tmp_path, runs.small(), False, warn=said.append)
    assert len(json.loads(file.read_text())) == 1
  assert (tmp_path / 'versions.2.json').read_text() == broken
  assert 'versions.1.json' in said[0] and 'versions.2.json' in said[1]


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


def test_a_run_goes_on_with_its_widths(tmp_path):
  config = runs.small(
    **{'data.prompt_buckets': (24,), 'data.completion_buckets': (7,)}
  )
  workdir.record(tmp_path, config, anew=True)
  values = records.get_config(tmp_path)
  values.data.prompt_buckets = values.data.completion_buckets = ()
  assert workdir.with_widths(tmp_path, config_lib.resolve(values)) == config
  values.data.prompt_buckets = (9,)
  other = workdir.with_widths(tmp_path, config_lib.resolve(values))
  assert other.data.prompt_buckets == (9,)
  alone = config_lib.Config()
  assert workdir.with_widths(tmp_path / 'no', alone) is alone


def test_what_is_no_json_is_refused(tmp_path):
  for text in ('{"a"', '[' * 100_000):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match='config.json is no JSON'):
      records.config_of(tmp_path)
