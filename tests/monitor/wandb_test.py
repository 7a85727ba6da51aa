"""Weights & Biases: offline for real, and a stand-in for what goes wrong."""

import sys
import time
import types

import pytest

from grpo_jax import monitor
from grpo_jax.monitor import dashboards

LOG = monitor.Options(
  display='plain', tensorboard=False, wandb_project='p', wandb_mode='offline'
)


@pytest.mark.long
def test_offline_runs_lie_in_the_workdir(tmp_path, monkeypatch, capfd):
  monkeypatch.setenv('WANDB_ERROR_REPORTING', 'false')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  ids = []
  for resumed_step in (None, 1, None):
    with monitor.Monitor(LOG, tmp_path, 3, resumed_step, {'seed': 4}) as shown:
      for step in (1,) if resumed_step else (0, 1):
        shown.write(step, {'reward': 0.25, 'loss': None})
    ids.append((tmp_path / 'wandb_run_id.txt').read_text().strip())
  assert 'warning' not in capfd.readouterr().err
  assert ids[0] == ids[1] != ids[2]
  files = sorted((tmp_path / 'wandb').glob('offline-run-*/*.wandb'))
  assert sorted(path.stem for path in files) == sorted(f'run-{n}' for n in ids)
  deadline = time.monotonic() + 120  # its own process writes, a moment later
  while not all(b'reward' in path.read_bytes() for path in files):
    assert time.monotonic() < deadline
    time.sleep(0.05)


class Run:
  def __init__(self):
    self.logged, self.axes, self.exit_codes = [], [], []
    self.error = None

  def define_metric(self, name, step_metric=None):
    self.axes.append((name, step_metric))

  def log(self, scalars):
    if self.error:
      raise self.error
    self.logged.append(scalars)

  def finish(self, exit_code):
    self.exit_codes.append(exit_code)


@pytest.fixture
def fake(monkeypatch):
  run, inits = Run(), []

  def init(**kwargs):
    inits.append(kwargs)
    return run

  module = types.SimpleNamespace(init=init, Settings=dict, run=run, inits=inits)
  monkeypatch.setitem(sys.modules, 'wandb', module)
  return module


def test_the_step_is_an_axis_and_the_id_is_kept(tmp_path, fake):
  first = dashboards.Wandb(tmp_path, 'p', 'online', False, {'seed': 4})
  first.write(3, {'reward': 0.25, 'loss': None, 'kl': float('nan')})
  first.close(failed=True)
  assert fake.run.axes == [('step', None), ('*', 'step')]
  assert fake.run.logged == [{'step': 3, 'reward': 0.25}]
  assert fake.run.exit_codes == [1]
  dashboards.Wandb(tmp_path, 'p', 'online', True, {})
  dashboards.Wandb(tmp_path, 'p', 'online', False, {})
  assert [init['resume'] for init in fake.inits] == ['allow'] * 3
  ids = [init['id'] for init in fake.inits]
  assert ids[0] == ids[1] != ids[2]
  assert fake.inits[0]['config'] == {'seed': 4}
  assert fake.inits[0]['dir'] == tmp_path


def test_a_service_that_fails_is_warned_of_once(tmp_path, fake, capsys):
  with monitor.Monitor(LOG, tmp_path, 5, None, {}) as shown:
    shown.write(1, {'reward': 0.25})
    fake.run.error = ConnectionError('the service\nis away')
    shown.write(2, {'reward': 0.5})
    shown.write(3, {'reward': 0.5})
    fake.run.error = None
    shown.write(4, {'reward': 0.75})
  assert [logged['step'] for logged in fake.run.logged] == [1, 4]
  error = capsys.readouterr().err
  assert error.count('warning') == 1
  assert (
    'rollout 2: Weights & Biases' in error and 'the service is away' in error
  )
  assert fake.run.exit_codes == [0]


def test_a_service_that_does_not_start_lets_the_run_go_on(
  tmp_path, fake, capsys
):
  def refuse(**_):
    raise PermissionError('no key')

  fake.init = refuse
  with monitor.Monitor(LOG, tmp_path, 5, None, {}) as shown:
    shown.write(1, {'heldout_accuracy': 0.25})
    assert shown.heldout() == [(1, 0.25)]
  error = capsys.readouterr().err
  assert error.count('warning') == 1 and 'PermissionError: no key' in error
  assert not (tmp_path / 'wandb_run_id.txt').exists()


@pytest.mark.parametrize('fault', ['id', 'axis', 'both'])
def test_a_run_that_cannot_be_begun_is_finished(tmp_path, fake, capsys, fault):
  def refuse(*_, **__):
    raise RuntimeError('no axis')

  def refuse_too(exit_code):
    fake.run.exit_codes.append(exit_code)
    raise ConnectionError('and no end')

  if fault == 'id':
    (tmp_path / 'wandb_run_id.txt').mkdir()
  else:
    fake.run.define_metric = refuse
  if fault == 'both':
    fake.run.finish = refuse_too
  with monitor.Monitor(LOG, tmp_path, 5, None, {}) as shown:
    shown.write(1, {'reward': 0.25})
  assert fake.run.exit_codes == [1] and not fake.run.logged
  error = capsys.readouterr().err
  assert error.count('warning') == 1 and 'no end' not in error
  assert ('IsADirectoryError' if fault == 'id' else 'no axis') in error


def test_an_exception_marks_the_run_as_failed(tmp_path, fake):
  with pytest.raises(ZeroDivisionError):
    with monitor.Monitor(LOG, tmp_path, 5, None, {}):
      raise ZeroDivisionError
  assert fake.run.exit_codes == [1]
