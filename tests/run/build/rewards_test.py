"""Rewards as a config names them: arguments, labels, and where they run."""

import dataclasses
import time

import pytest

from grpo_jax import config as config_lib
from grpo_jax import rewards
from grpo_jax.rewards import generated_code
from grpo_jax.rewards import sandbox
from grpo_jax.run.build import placing
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.keep.objects import NOTHING

CODE = 'grpo_jax.rewards.generated_code:python_tests'
BASE = config_lib.Config()


def built(*terms, given=NOTHING):
  terms = tuple(config_lib.Reward(**term) for term in terms)
  config = dataclasses.replace(BASE, rewards=terms)
  return build_rewards.functions(config, given)


def where(name, **fields):
  (reward,) = built({'name': name, **fields})
  return reward.where


@pytest.mark.parametrize(
  'name, kwargs',
  [
    ('exact_match', {}),
    ('last_number', {}),
    ('number', {}),
    ('gsm8k', {}),
    ('boxed_text', {}),
    ('multiple_choice', {}),
    ('format_tags', {}),
    ('completion_length', {'limit': 3}),
    ('tests.judges:even', {}),  # which is marked
    ('http_judge', {'url': 'http://localhost/v1', 'model': 'm'}),
  ],
)
def test_bounded_functions_run_here(name, kwargs):
  assert where(name, kwargs=kwargs) == 'here'
  assert where(name, kwargs=kwargs, where='workers') == 'workers'


@pytest.mark.parametrize(
  'name, kwargs',
  [
    ('regular_expression', {'regex': 'a'}),
    ('tests.judges:huge', {}),
    (CODE, {'insist': True}),
  ],
)
def test_all_others_run_in_workers(name, kwargs):
  assert where(name, kwargs=kwargs) == 'workers'
  assert where(name, kwargs=kwargs, where='here') == 'here'


def test_fields_become_those_of_a_reward():
  one, two = built(
    dict(name='number', weight=2.0, kwargs={'absolute_tolerance': 0.5}),
    dict(name='number', label='near', on_failure='reward', failed_reward=-1.0),
  )
  assert (one.name, one.weight, one.failed) == ('number', 2.0, None)
  assert (two.name, two.weight, two.failed) == ('near', 1.0, -1.0)
  scores = rewards.score([one, two], [''], ['5.4'], [{'answer': '5'}])
  assert scores.parts.tolist() == [[1, 0]]


def test_objects_run_here_unless_they_say_otherwise():
  def judge(prompt, completion, example, plus=0):
    return len(completion) + plus

  config, given = placing.place(
    BASE,
    rewards=[
      judge,
      rewards.WeightedReward(
        'more', judge, 3.0, 'workers', failed=-1.0, kwargs={'plus': 2}
      ),
    ],
  )
  first, second = build_rewards.functions(config, given)
  assert (first.where, first.failed, dict(first.kwargs)) == ('here', None, {})
  assert (second.where, second.failed) == ('workers', -1.0)
  assert (second.name, second.weight, second.kwargs['plus']) == ('more', 3, 2)
  # What differs from a plain function is saved with the config.
  assert config.rewards[0] == config_lib.Reward(config.rewards[0].name)
  assert config.rewards[1].where == 'workers'
  with pytest.raises(ValueError, match='which the config of a run cannot'):
    unsaid = rewards.WeightedReward('x', judge, kwargs={'plus': judge})
    placing.place(BASE, rewards=[unsaid])
  with pytest.raises(ValueError, match=r'example, minus=1\); let it take'):
    wrong = rewards.WeightedReward('x', judge, kwargs={'minus': 1})
    placing.place(BASE, rewards=[wrong])


@pytest.mark.parametrize(
  'name, kwargs, words',
  [
    (
      'number',
      {'tolerance': 1},
      r"config.rewards\[0\].kwargs={'tolerance': 1} does not fit the reward "
      r"function number\(prompt.*unexpected keyword argument 'tolerance'",
    ),
    ('regular_expression', {}, "missing a required .*argument: 'regex'"),
    ('exact_match', {'prompt': 'x'}, 'multiple values for argument'),
    ('tests.judges:even', {'even': 2}, r'function even\(prompt'),
    ('number', {'relative_tolerance': -1.0}, 'relative_tolerance of the rewa'),
    ('number', {'relative_tolerance': '1'}, r'cannot be used \(TypeError'),
    ('multiple_choice', {'choices': 'AA'}, "choices of the .* 'AA', but"),
    ('format_tags', {'tags': []}, 'tags of the reward format_tags are'),
    ('completion_length', {}, 'exactly one of the two is required'),
    ('completion_length', {'limit': 3, 'unit': 'words'}, "is 'words', but"),
    ('regular_expression', {'regex': '(a+)+'}, 'it can take exponential'),
    (CODE, {'limits': {'secs': 1}}, r"has \['secs'\], but its fields are"),
    (CODE, {'total_secs': 0}, 'total_secs of the reward'),
    (CODE, {'total_secs': 10}, r'\[0\].kwargs lets .*=10, .*_secs=10.0; give'),
  ],
)
def test_wrong_arguments_are_refused_when_a_run_is_built(name, kwargs, words):
  with pytest.raises(ValueError, match=words):
    built({'name': name, 'kwargs': kwargs})


def test_a_wrong_schema_is_refused():
  pytest.importorskip('jsonschema')
  with pytest.raises(ValueError, match='schema of the reward json_schema is'):
    built({'name': 'json_schema', 'kwargs': {'schema': {'type': 'number?'}}})


def test_a_missing_package_is_refused(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'math_verify', None)
  with pytest.raises(ValueError, match='requires the package math-verify'):
    built({'name': 'math_equivalence'})


def test_generated_code_needs_a_sandbox_or_that_somebody_insists(monkeypatch):
  def warned(**kwargs):
    term = config_lib.Reward(CODE, kwargs=kwargs)
    config = dataclasses.replace(BASE, rewards=(term,))
    return build_rewards.warnings(build_rewards.functions(config))

  nothing = {'namespaces': 'not allowed', 'landlock': 'kernel 5.4'}
  monkeypatch.setattr(
    sandbox, 'available', lambda: sandbox.Available('', nothing)
  )
  reason = r'offers no sandbox \(namespaces: not allowed; landlock: kernel 5.4'
  with pytest.raises(ValueError, match=reason):
    warned()
  (sentence,) = warned(insist=True)
  assert 'because this system offers no sandbox (namespaces: not' in sentence
  monkeypatch.setattr(
    sandbox, 'available', lambda: sandbox.Available('landlock', {})
  )
  assert warned() == warned(insist=True) == []


def test_a_loop_of_generated_code_is_wrong_and_not_late(monkeypatch):
  """In all tests together, so that a worker does not reach its limit."""
  allowed = []

  def run(code, stdin, limits, insist):
    allowed.append(limits.time_secs)
    time.sleep(limits.time_secs)
    return sandbox.Ran(None, '', '', 'time limit')

  monkeypatch.setattr(sandbox, 'run', run)
  tests, completion = [{'stdout': '1'}] * 9, '```\nwhile True: pass\n```'
  judge = generated_code.python_tests
  limits = {'total_secs': 0.3, 'limits': {'time_secs': 0.2}}
  assert judge('', completion, {'tests': tests}, **limits) == 0
  first, second = allowed  # and none after these
  assert first == 0.2 and 0 < second <= 0.1


def test_no_processes_start_for_rewards_that_need_none():
  here, there = built({}, {'name': 'tests.judges:huge'})
  limits = config_lib.Workers(2, 3.0, 0.5, 40.0, 50.0)
  config = dataclasses.replace(BASE, workers=limits)
  spec = build_rewards.workers_spec(config)
  with build_rewards.workers(spec, [here]) as pool:
    assert pool is None
  with build_rewards.workers(spec, [here, there]) as pool:
    assert pool is not None
    assert len(pool._idle) == 2  # before anything is judged
    assert pool._time_limit_secs == 3.0 and pool._start_limit_secs == 40.0
    assert pool._limits['memory_bytes'] == 1 << 29
    assert pool._wall_limit_secs == 50.0
    example = {'index': 0, 'completion_ids': [2]}
    scores = rewards.score([there], ['p'], ['c'], [example], workers=pool)
    assert scores.reward.tolist() == [pytest.approx(1e30)]
  assert not pool._idle


@pytest.mark.parametrize(
  'kwargs, sentence',
  [
    ({'model': 'm'}, "missing a required .*argument: 'url'"),
    ({'url': 'http://localhost', 'model': 'm', 'retry': 1}, "'retry'"),
    ({'url': 'localhost', 'model': 'm'}, 'the base of a server is needed'),
    (
      {'url': 'http://localhost', 'model': 'm', 'api_key_env': 'NO_SUCH_KEY'},
      'NO_SUCH_KEY',
    ),
  ],
)
def test_settings_of_a_judge_are_refused_before_anything_is_sampled(
  kwargs, sentence
):
  pytest.importorskip('httpx2')
  with pytest.raises(ValueError, match=sentence):
    built({'name': 'http_judge', 'kwargs': kwargs})
