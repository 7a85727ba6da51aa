"""A run that servers sample for is the run that samples itself, bit for bit.

The server is ours, in each of the two dialects: it draws by the keys in the
seeds, so nothing but the wire lies between.
"""

import contextlib
import dataclasses

import numpy as np
import pytest

from grpo_jax.engines.http.engine import HttpEngine
from grpo_jax.planning import dry_run
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run import progress as progress_lib
from tests import runs
from tests.serving import served

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")
pytest.importorskip('starlette', reason="needs pip install 'grpo_jax[serve]'")


@contextlib.contextmanager
def serving(config):
  """The address of a server of the policy that a config begins with."""
  with served.opened(config, rows=8) as found:
    yield found.url


def with_servers(changes, tmp_path, *urls, dialect='vllm'):
  """A config whose rollouts these servers draw."""
  return runs.small(
    **changes,
    **{
      'engine.kind': 'http',
      'engine.dialect': dialect,
      'engine.urls': urls,
      'engine.dtype': 'float32',
      'engine.model': 'policy',
      'engine.folder': str(tmp_path / 'weights'),
    },
  )


SETTINGS = {
  'weights': {},
  'adapters': {'lora.rank': 2, 'sampler.temperature': 1.3},
  'ahead': {'sampler.ahead': 2, 'learner.anchor': 'sampler', 'lora.rank': 2},
  'weights ahead': {'sampler.ahead': 1, 'learner.anchor': 'sampler'},
}
LEARNS = {
  'steps': 3,
  'optim.lr': 0.02,
  'optim.warmup_steps': 0,
  'rewards': (
    {
      'name': 'tests.run.http_engine_test:low',
      'weight': 1.0,
      'where': 'here',
    },
  ),
  'log.completions_every_steps': 1,
}


def low(prompt, completion, example):
  """A reward that has a slope from the first rollout on."""
  del prompt, example
  return float(sum(completion.count(digit) for digit in '012'))


def drawn(workdir):
  """The ids and rewards of all completions of a run."""
  found = [
    parquet.read(file) for file in parquet.files(workdir / 'completions')
  ]
  assert found
  return [
    (one.batch.tokens.tolist(), one.batch.reward.tolist()) for one in found
  ]


def alike(tmp_path, one, other, tolerance):
  """Whether two runs have the same completions and parameters.

  Servers draw each completion by itself, so the last bits of log-probabilities
  are those of other programs: who learns from these, and not from the
  learner's, has a tolerance.
  """
  one, other = tmp_path / one, tmp_path / other
  assert drawn(one) == drawn(other)
  for a, b in zip(runs.records(one), runs.records(other), strict=True):
    assert a.get('reward') == b.get('reward')
  arrays, others = (runs.saved(workdir)[1] for workdir in (one, other))
  names = [name for name in arrays if 'params' in name]
  assert names
  for name in names:
    np.testing.assert_allclose(
      arrays[name], others[name], rtol=0, atol=tolerance, err_msg=name
    )


@pytest.mark.parametrize(
  'setting, dialect',
  [
    pytest.param(
      *(setting, dialect),
      marks=()
      if (setting, dialect) == ('weights', 'vllm')
      else pytest.mark.long,
    )
    for setting in SETTINGS
    for dialect in ('vllm', 'sglang')
  ],
)
def test_a_run_by_servers_is_the_run_by_itself(setting, dialect, tmp_path):
  changes = LEARNS | SETTINGS[setting]
  loop.train(runs.small(**changes), tmp_path / 'alone')
  with serving(runs.small(**changes)) as url:
    config = with_servers(changes, tmp_path, url, dialect=dialect)
    loop.train(config, tmp_path / 'served')
  exact = 'learner.anchor' not in changes
  alike(tmp_path, 'alone', 'served', 0 if exact else 1e-5)
  assert not (tmp_path / 'weights').exists()


@pytest.mark.long
def test_two_servers_draw_as_one_and_a_run_goes_on_with_others(tmp_path):
  changes = LEARNS | SETTINGS['ahead']
  loop.train(runs.small(**changes), tmp_path / 'alone')
  plain = runs.small(**changes)
  with serving(plain) as first, serving(plain) as second:
    begun = with_servers({**changes, 'steps': 2}, tmp_path, first, second)
    loop.train(begun, tmp_path / 'served')
  with serving(plain) as third:
    config = with_servers(changes, tmp_path, third, dialect='sglang')
    config = runs.small(
      **changes,
      **{
        'engine.kind': 'http',
        'engine.urls': (third,),
        'engine.dtype': 'float32',
        'engine.model': 'policy',
      },
    )
    loop.train(config, tmp_path / 'served')
  alike(tmp_path, 'alone', 'served', 1e-5)


def test_people_are_told_of_a_server_that_is_away(tmp_path, capfd):
  changes = LEARNS | {'steps': 1}
  with serving(runs.small(**changes)) as url:
    config = with_servers(changes, tmp_path, url, 'http://127.0.0.1:9')
    engine = dataclasses.replace(config.engine, retries=0)
    loop.train(dataclasses.replace(config, engine=engine), tmp_path / 'served')
  said = capfd.readouterr().err
  assert 'Version 0 goes on without a server: http://127.0.0.1:9: ' in said
  assert runs.records(tmp_path / 'served')[-1]['step'] == 1


def test_servers_with_another_policy_are_refused_before_the_first_rollout(
  tmp_path, monkeypatch
):
  """Of a server that forgets to read what it is given."""
  monkeypatch.setattr(
    policies, 'read_model', lambda served, folder: served.scorer.params
  )
  with serving(runs.small(**LEARNS, seed=1)) as url:
    config = with_servers(LEARNS, tmp_path, url)
    with pytest.raises(
      ValueError, match='do not draw by the policy of the run'
    ):
      loop.train(config, tmp_path / 'served')
  assert not (tmp_path / 'served/metrics.jsonl').exists()


KILLED = {
  'steps': 5, 'checkpoint.every_steps': 1, 'checkpoint.keep_last': 3,
  'data.heldout': '',
}  # fmt: skip


class Killed(Exception):
  """A start that ends as by a kill: nothing is saved or closed behind it."""


def kill(config, workdir, monkeypatch, last_saved, at_step, seen):
  """Trains until a start is killed.

  Args:
    config: Of the run.
    workdir: Of the run.
    monkeypatch: Changes what would be done at an orderly end.
    last_saved: The newest checkpoint.
    at_step: The rollout after which it is killed.
    seen: Called before.
  """
  save = progress_lib.save

  def save_some(session, progress):
    return save(session, progress) if progress.step <= last_saved else progress

  def strike(step, *_):
    if step == at_step:
      seen()
      raise Killed

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(HttpEngine, 'close', lambda self: None)
    patch.setattr(progress_lib, 'save', save_some)
    loop.train(config, workdir, on_rollout=strike)
  assert runs.checkpoints(workdir)[-1] == last_saved


@pytest.mark.parametrize(
  'setting, dialect',
  [
    pytest.param(
      *(setting, dialect),
      marks=()
      if (setting, dialect) == ('adapters', 'vllm')
      else pytest.mark.long,
    )
    for setting in ('adapters', 'weights', 'ahead')
    for dialect in ('vllm', 'sglang')
  ],
)
def test_a_killed_run_goes_on_with_servers_that_have_newer_versions(
  setting, dialect, tmp_path, monkeypatch
):
  """The checkpoint is of rollout 1, and the servers have newer versions."""
  changes, workdir = LEARNS | SETTINGS[setting] | KILLED, tmp_path / 'served'
  loop.train(runs.small(**changes), tmp_path / 'alone')
  before, after = [], []
  with served.opened(runs.small(**changes), rows=8) as ours:
    config = with_servers(changes, tmp_path, ours.url, dialect=dialect)
    policies = ours.desk.policies
    kill(config, workdir, monkeypatch, 1, 4, lambda: before.extend(policies()))
    folders = {path.name for path in (tmp_path / 'weights').iterdir()}
    assert folders
    if 'lora.rank' in changes:
      newest = int(before[-1].rpartition('-')[2])
      assert newest > 1 or changes.get('sampler.ahead')
    loop.train(config, workdir, on_rollout=lambda *_: after.extend(policies()))
    assert not policies()
  if 'lora.rank' in changes:
    assert after and not {*before} & {*after}
    assert {x.split('-')[0] for x in before} == {x.split('-')[0] for x in after}
  exact = 'learner.anchor' not in changes
  alike(tmp_path, 'alone', 'served', 0 if exact else 1e-5)
  assert not (tmp_path / 'weights').exists()


def test_a_check_leaves_nothing_with_the_servers(tmp_path):
  changes = LEARNS | SETTINGS['adapters']
  with served.opened(runs.small(**changes), rows=8) as ours:
    config = with_servers(changes, tmp_path, ours.url)
    found = dry_run.inspect(config, tmp_path / 'none')
    assert not ours.desk.policies()
  assert found['first_rollout']['completions']
  assert not (tmp_path / 'weights').exists()
  assert 'older parameters' not in found['memory_gib']


def test_a_check_counts_the_copies_of_versions(tmp_path):
  """All that a checkpoint may ask for, beside the parameters."""
  changes = LEARNS | SETTINGS['weights ahead']
  alone = dry_run.inspect(runs.small(**changes), tmp_path / 'none')
  with serving(runs.small(**changes)) as url:
    config = with_servers(changes, tmp_path, url)
    found = dry_run.inspect(config, tmp_path / 'none')['memory_gib']
  assert found['older parameters'] == 2 * found['parameters']
  assert alone['memory_gib']['older parameters'] == found['parameters']
