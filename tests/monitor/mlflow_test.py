"""MLflow, by a stand-in: its real server is another program."""

import contextlib
import sys
import threading
import types

import pytest

from grpo_jax import monitor
from grpo_jax.monitor import dashboards

LOG = monitor.Options(
  display='plain', tensorboard=False, mlflow_experiment='sums'
)


class Client:
  """Keeps what it is sent; `error`, if there is one, is raised instead."""

  def __init__(self, server):
    self.server = server

  def get_experiment_by_name(self, name):
    self.server.ask('get_experiment_by_name')
    number = self.server.experiments.get(name)
    return number and types.SimpleNamespace(experiment_id=number)

  def create_experiment(self, name):
    self.server.experiments[name] = str(len(self.server.experiments) + 1)
    return self.server.experiments[name]

  def create_run(self, experiment_id, run_name):
    run_id = f'run{len(self.server.runs)}'
    self.server.runs[run_id] = {
      'experiment': experiment_id, 'name': run_name, 'status': 'RUNNING',
      'metrics': [], 'params': {}, 'requests': [],
    }  # fmt: skip
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

  def update_run(self, run_id, status):
    self.server.runs[run_id]['status'] = status

  def log_batch(self, run_id, metrics=(), params=()):
    self.server.ask('log_batch')
    run = self.server.runs[run_id]
    assert len(metrics) <= 1000 and len(params) <= 100
    run['metrics'] += [(one.step, one.key, one.value) for one in metrics]
    run['params'] |= {one.key: one.value for one in params}

  def set_terminated(self, run_id, status):
    self.server.runs[run_id]['status'] = status


class Server:
  def __init__(self):
    self.experiments, self.runs, self.uris, self.error = {}, {}, [], None
    self.asked = threading.Event()

  def ask(self, what):
    if self.error is not None:
      self.asked.set()
      raise self.error

  def client(self, tracking_uri):
    self.uris.append(tracking_uri)
    return Client(self)


@pytest.fixture
def server(monkeypatch):
  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  server = Server()
  named = lambda **values: types.SimpleNamespace(**values)
  entities = types.SimpleNamespace(
    Metric=lambda key, value, timestamp, step: named(
      key=key, value=value, timestamp=timestamp, step=step
    ),
    Param=lambda key, value: named(key=key, value=value),
  )
  module = types.SimpleNamespace(MlflowClient=server.client, entities=entities)
  monkeypatch.setitem(sys.modules, 'mlflow', module)
  monkeypatch.setitem(sys.modules, 'mlflow.entities', entities)
  return server


def written(folder, resumed_step, steps, config=None):
  with monitor.Monitor(LOG, folder, 5, resumed_step, config or {}) as shown:
    for step in steps:
      shown.write(step, {'reward': step / 4, 'loss': None})


def test_a_run_that_goes_on_is_the_same_run(tmp_path, server, capsys):
  config = {'seed': 4, 'optim': {'lr': 0.5, 'kwargs': {}}, 'long': 'x' * 900}
  written(tmp_path, None, (0, 1, 2), config)
  assert server.runs['run0']['status'] == 'FINISHED'
  written(tmp_path, 2, (3,), {'seed': 5})
  written(tmp_path, None, (0, 1))
  assert 'warning' not in capsys.readouterr().err
  first, second = server.runs.values()
  rewards = [x for x in first['metrics'] if x[1] == 'reward']
  assert rewards == [(n, 'reward', n / 4) for n in range(4)]
  assert not [x for x in first['metrics'] if x[1] == 'loss']
  assert (first['experiment'], first['name']) == ('1', tmp_path.name)
  assert first['params'] == {
    'seed': '4', 'optim.lr': '0.5', 'optim.kwargs': '{}', 'long': 'x' * 500,
  }  # fmt: skip
  assert second['experiment'] == '1' and server.experiments == {'sums': '1'}
  assert (tmp_path / 'mlflow_run_id.txt').read_text() == 'run1\n'
  assert server.uris == [f'sqlite:///{tmp_path.resolve() / "mlflow.db"}'] * 3


def test_where_it_goes_and_what_it_is_called(tmp_path, server, monkeypatch):
  monkeypatch.setenv('MLFLOW_TRACKING_URI', 'http://there')
  for uri in '', 'http://here':
    sent = dashboards.Mlflow(tmp_path, 'sums', uri, False, {})
    sent.write(1, {'heldout_pass@4': 1.0, 'reward/gsm8k': 0.5})
    sent.close(failed=True)
  assert server.uris == ['http://there', 'http://here']
  names = [name for _, name, _ in server.runs['run1']['metrics']]
  assert names == ['heldout_pass_4', 'reward/gsm8k']
  assert server.runs['run1']['status'] == 'FAILED'


def test_many_metrics_and_parameters_are_sent_in_parts(tmp_path, server):
  config = {f'p{n}': n for n in range(205)}
  sent = dashboards.Mlflow(tmp_path, 'sums', '', False, config)
  sent.write(1, {f'm{n}': float(n) for n in range(2500)})
  sent.close(failed=False)
  (run,) = server.runs.values()
  assert len(run['metrics']) == 2500 and len(run['params']) == 205


def test_what_a_server_did_not_take_is_sent_later(tmp_path, server, capsys):
  server.error = ConnectionError('http://me:secret@host\nis away')
  with monitor.Monitor(LOG, tmp_path, 5, None, {}) as shown:
    for step in (1, 2):
      shown.write(step, {'reward': step / 4})
      assert server.asked.wait(60)
      server.asked.clear()
    # The thread has kept the error by the time that it is asked again.
    shown.write(3, {'reward': 0.75})
    assert server.asked.wait(60)
    server.error = None
  (run,) = server.runs.values()
  rewards = [x for x in run['metrics'] if x[1] == 'reward']
  assert rewards == [(n, 'reward', n / 4) for n in (1, 2, 3)]
  error = capsys.readouterr().err
  assert error.count('warning') == 1 and 'MLflow does not work' in error
  assert 'host is away' in error and 'secret' not in error
  assert run['status'] == 'FINISHED'


def test_a_server_that_fails_at_once_gets_one_run_with_all(tmp_path, server):
  client, failed = Client.log_batch, threading.Event()

  def once(self, *args, **kwargs):
    if not failed.is_set():
      failed.set()
      raise ConnectionError('away')
    client(self, *args, **kwargs)

  Client.log_batch = once
  try:
    sent = dashboards.Mlflow(tmp_path, 'sums', '', False, {'seed': 4})
    sent.write(1, {'reward': 0.25})
    assert failed.wait(60)
    with contextlib.suppress(ConnectionError):
      sent.write(2, {'reward': 0.5})
    with contextlib.suppress(ConnectionError):  # of the first try
      sent.close(failed=False)
  finally:
    Client.log_batch = client
  (run,) = server.runs.values()
  assert run['params'] == {'seed': '4'} and run['status'] == 'FINISHED'
  assert [step for step, *_ in run['metrics']] == [1, 2]


def test_a_server_that_never_answers_does_not_hold_a_run(
  tmp_path, server, capsys, monkeypatch
):
  monkeypatch.setattr(dashboards, '_CLOSE_TIMEOUT_SECS', 0.05)
  answers = threading.Event()
  server.ask = lambda what: answers.wait(60)
  written(tmp_path, None, (1, 2))
  error = capsys.readouterr().err
  answers.set()
  assert error.count('warning') == 1
  assert 'it has not taken the last metrics' in error


def test_without_the_package_a_run_goes_on(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'mlflow', None)
  written(tmp_path, None, (1,))
  error = capsys.readouterr().err
  assert error.count('warning') == 1 and 'MLflow does not work' in error
  assert "pip install 'grpo_jax[mlflow]'" in error


def test_an_exception_marks_the_run_as_failed(tmp_path, server):
  with pytest.raises(ZeroDivisionError):
    with monitor.Monitor(LOG, tmp_path, 5, None, {}):
      raise ZeroDivisionError
  assert server.runs['run0']['status'] == 'FAILED'
