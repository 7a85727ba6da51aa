"""Runs whose teacher is a server of vLLM's or SGLang's dialect: here ours."""

import numpy as np
import pytest

from grpo_jax.engines import scoring
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import teacher_field
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from grpo_jax.run.build import engine as build_engine
from tests import runs
from tests.run import http_engine_test
from tests.run.http_engine_test import serving

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")

TEACHER = runs.small(seed=7)
TOPS = {'learner.method': 'gkd', 'learner.method_kwargs': {'number': 3}}


def student(url, dialect='vllm', **changes):
  return runs.small(
    **{
      'steps': 2,
      'learner.method': 'opd',
      'learner.method_kwargs': {},
      'teacher.urls': (url,),
      'teacher.dialect': dialect,
      'teacher.model': 'policy',
      'optim.warmup_steps': 0,
      'log.completions_every_steps': 1,
      **changes,
    }
  )


@pytest.mark.parametrize(
  'dialect, changes',
  [
    ('vllm', {}),
    pytest.param('sglang', {}, marks=pytest.mark.long),
    ('vllm', TOPS),
    pytest.param('sglang', TOPS, marks=pytest.mark.long),
    pytest.param(
      'vllm',
      {'sampler.ahead': 1, 'learner.anchor': 'sampler'},
      marks=pytest.mark.long,
    ),
  ],
)
def test_a_run_learns_from_what_a_server_says(dialect, changes, tmp_path):
  score = policies.load_to_serve(TEACHER).scorer
  with serving(TEACHER) as url:
    done = loop.train(student(url, dialect, **changes), tmp_path)
  assert done['steps'] == 2
  found = [parquet.read(x) for x in parquet.files(tmp_path / 'completions')]
  assert len(found) == 2
  for one in found:
    taught = one.batch.extras['logp_teacher']
    for p, g in np.ndindex(*one.length.shape):
      length = one.length[p, g]
      ids = [*one.prompts[p], *one.batch.tokens[p, g, :length].tolist()]
      wanted = score(ids).logp[-length:]
      np.testing.assert_allclose(taught[p, g, :length], wanted, atol=1e-5)
      assert not taught[p, g, length:].any()
      if changes == TOPS:
        top = score(ids, 3).top_logp[-length:]
        found_top = one.batch.extras['teacher_top_logp'][p, g, :length]
        np.testing.assert_allclose(found_top, top, atol=1e-5)
  records = runs.records(tmp_path)
  gap = np.asarray(found[-1].batch.extras['logp_teacher'])
  assert np.isfinite(records[-1]['kl_teacher_k1']) and gap.any()
  assert records[-1]['grad_norm'] > 0
  assert ('kl_teacher_top' in records[-1]) == (changes == TOPS)


def test_a_killed_run_is_taught_by_a_server_that_goes_on(tmp_path, monkeypatch):
  changes = http_engine_test.KILLED | {'steps': 3}
  with serving(TEACHER) as url:
    config = student(url, **changes)
    loop.train(config, tmp_path / 'whole')
    workdir = tmp_path / 'killed'
    http_engine_test.kill(config, workdir, monkeypatch, 1, 2, lambda: None)
    loop.train(config, workdir)
  runs.assert_equal(tmp_path / 'whole', workdir)


def test_nobody_who_scores_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
  monkeypatch.setattr(build_engine, '_BACKOFF_SECS', 0.01)
  config = student('http://127.0.0.1:9')
  with pytest.raises(OSError, match='scores of a text.*127.0.0.1:9') as refused:
    loop.train(config, tmp_path)
  assert isinstance(refused.value, servers_lib.Away)


def rollout():
  blank = rollout_lib.blank(2, 2, 4, 6, 1, (6,))
  tokens = np.arange(24).reshape(2, 2, 6)
  length = np.array([[3, 0], [6, 1]], np.int32)
  batch = blank.batch._replace(tokens=tokens)
  return blank._replace(batch=batch, length=length, prompts=[[90], [91, 92]])


def test_each_token_has_the_score_of_its_place():
  asked = []

  def score(texts):
    asked.extend(texts)
    return [known(ids) for ids in texts]

  found = teacher_field.with_scores(rollout(), score, 2)
  assert asked == [
    [90, 0, 1, 2],
    [91, 92, 12, 13, 14, 15, 16, 17],
    [91, 92, 18],
  ]
  tokens, length = found.batch.tokens, found.length
  wanted = np.where(np.arange(6) < length[..., None], -tokens, 0)
  taught = found.batch.extras['logp_teacher']
  np.testing.assert_array_equal(taught, wanted)
  assert taught.dtype == np.float32
  ids, top = (found.batch.extras[f'teacher_top_{x}'] for x in ('ids', 'logp'))
  after = np.where(np.arange(6) < length[..., None], tokens + 1, 0)
  np.testing.assert_array_equal(ids, np.stack([after, 2 * after], -1))
  np.testing.assert_array_equal(top, -ids / 2)
  assert (ids.dtype, top.dtype) == (np.int32, np.float32)
  zeros = teacher_field.with_zeros(rollout(), 2).batch.extras
  for name, one in found.batch.extras.items():
    assert (zeros[name].shape, zeros[name].dtype) == (one.shape, one.dtype)
  alone = teacher_field.with_scores(rollout(), score).batch.extras
  assert 'logp_teacher' in alone and 'teacher_top_ids' not in alone


def known(ids):
  """Of each token but the first: by its id, and by one and twice one more."""
  ids = np.array(ids[1:])
  top = np.stack([ids + 1, 2 * (ids + 1)], -1).astype(np.int32)
  return scoring.Known(-ids.astype(np.float32), top, -top / np.float32(2))


def test_a_branch_is_no_single_text():
  one = rollout()
  branched = one._replace(previous=np.zeros((2, 2, 6), np.int32))
  with pytest.raises(ValueError, match='give the teacher as config'):
    teacher_field.with_scores(branched, lambda texts: [])


def test_the_config_names_whom_to_ask(monkeypatch):
  monkeypatch.setenv('KEY_OF_THE_TEST', 'of the test')
  for dialect, name in (('vllm', 'served'), ('sglang', '')):
    config = student(
      'http://a:1', dialect,
      **{'teacher.model': name, 'teacher.key_env': 'KEY_OF_THE_TEST'},
    )  # fmt: skip
    taught = build.run(config).taught
    assert taught._dialect.name == dialect
    assert [x.url for x in taught._servers.every] == ['http://a:1']
    assert taught._servers._client.key() == 'of the test'
    if name:
      assert taught._dialect._model == name
  assert build.run(runs.small()).taught is None
