"""reasoning-gym as a judge: in confined workers, whatever an answer is."""

import importlib.util
import json
import os
import pathlib
import sys
import time

import pytest

from grpo_jax import rewards
from grpo_jax.rewards import sandbox
from grpo_jax.rewards import workers as workers_lib
from grpo_jax.rewards.verifiers import gym
from tests.rewards.verifiers import hostile

LIMIT_SECS = 5.0  # only hostile answers need a tenth of it
HANG_SECS = 120.0  # which only what hangs takes

needs_package = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None
  or bool(sandbox.refusal('landlock')),
  reason='reasoning-gym is not installed, or the system offers no Landlock',
)
# These evaluated what they were given, or never came back from it.
HOSTILE = [
  'binary_matrix', 'countdown', 'n_queens', 'puzzle24', 'spiral_matrix',
  'string_insertion',
  # They read the answer with the same package, which takes seconds to import.
  *(
    pytest.param(task, marks=pytest.mark.long)
    for task in (
      'intermediate_integration', 'polynomial_multiplication',
      'simple_integration',
    )
  ),
]  # fmt: skip
# It answers in place of the judge, whose pipe has the number 3.
ANSWERS_ITSELF = (
  '__import__("os").write(3, b\'{"values": [%s]}\\n\')'
  ' and __import__("os")._exit(0)'
)


@pytest.fixture(scope='module')
def pool():
  with workers_lib.Workers(1, LIMIT_SECS) as workers:
    yield workers


def record(task, **parameters):
  """As a source makes it; tasks that are not fit are judged here too."""
  import reasoning_gym

  (item,) = reasoning_gym.create_dataset(task, seed=1, size=1, **parameters)
  made = {
    'task': task,
    'parameters': parameters,
    'metadata': json.loads(json.dumps(item['metadata'], default=str)),
  }
  return {
    'prompt': item['question'],
    'answer': item['answer'],
    'reasoning_gym': made,
  }


def judge(pool, example, *completions):
  rows = len(completions)
  return pool.judge(
    'reasoning_gym', ['p'] * rows, completions, [example] * rows
  )


@needs_package
@pytest.mark.parametrize('task', HOSTILE)
def test_a_hostile_answer_writes_nothing_and_is_counted(pool, task, tmp_path):
  example = record(task)
  names = [str(pathlib.Path(one, 'evil')) for one in (tmp_path, pathlib.Path())]
  writes = [
    form.format(f'open({name!r}, "w")')
    for name in names
    for form in ('{}', '[{}]', 'x + {}')
  ]
  writes += [ANSWERS_ITSELF % value for value in ('1e30', '1.0')]
  outcomes = judge(pool, example, *writes)
  assert not any(map(os.path.exists, names))
  assert all(one.failure or (one.reward or 0) < 0.1 for one in outcomes)
  start = time.monotonic()
  (outcome,) = judge(pool, example, '9**9**9**9')
  assert time.monotonic() - start < HANG_SECS
  assert outcome.failure in ('', 'time limit', 'memory')
  if not outcome.failure:
    assert (outcome.reward or 0) < 0.1
  if example['answer'] is not None:
    (outcome,) = judge(pool, example, example['answer'])
    assert outcome.failure == ''


@needs_package
@pytest.mark.parametrize(
  'task', ['binary_matrix', 'n_queens', 'spiral_matrix', 'string_insertion']
)
def test_an_answer_cannot_look_the_right_one_up(pool, task):
  """The frame of the verifier has the reference; `eval` would give it."""
  example = record(task)
  look = (
    'getattr(__import__("sys"), "_getframe")(1).f_locals["entry"]["answer"]'
  )
  forms = look, f'[{look}]', f'{look}.split()', f'list({look})'
  for outcome in judge(pool, example, *forms):
    assert (outcome.reward or 0) < 0.1, outcome


@needs_package
@pytest.mark.parametrize(
  'task, answers',
  [
    ('countdown', {'{right}': 1.0, '{right}  # so': 1.0, '{right} + 0': 0.05}),
    ('countdown', {'0  # {right}': 0.05, '24.0': 0.0, '2**3': 0.0, 'x': 0.0}),
    ('puzzle24', {'8*3*1*1': 1.0, '8*3 # 1, 1': 0.01, '4!': 0.0, '': 0.0}),
    ('simple_integration', {'{right}': 1.0, '{right} + 3.5': 1.0}),
    (
      'simple_integration',
      {
        'Integral({integrand}, {variable})': 0.0,
        'integrate({integrand}, {variable})': 0.0,
        '({right}).doit()': 0.0,
        '{right}, 1': 0.0,
      },
    ),
  ],
)
def test_expressions_are_read_and_nothing_else_is(pool, task, answers):
  example = record(task)
  given = {
    'right': example['answer'],
    **example['reasoning_gym']['metadata'],
  }
  outcomes = judge(pool, example, *(one.format(**given) for one in answers))
  assert [one.reward for one in outcomes] == list(answers.values()), outcomes


@needs_package
def test_an_integral_may_have_functions_in_it(pool):
  example = record('intermediate_integration')
  metadata = example['reasoning_gym']['metadata']
  metadata['integrand'] = 'x*sin(2*x) + 1/x + exp(x)/pi'
  right = 'sin(2*x)/4 - x*cos(2*x)/2 + log(x) + exp(x)/pi'
  outcomes = judge(pool, example, right, f'{right} + C', f'{right} + x')
  assert [one.reward for one in outcomes] == [1.0, 1.0, 0.0]


@needs_package
def test_what_the_verifiers_read_as_lists_still_counts(pool):
  example = record('spiral_matrix')
  listed = str([int(one) for one in example['answer'].split()])
  (outcome,) = judge(pool, example, listed)
  assert outcome.reward == 0.1  # what the package gives for this form
  example = record('n_queens')
  rows = [line.split() for line in example['answer'].splitlines()]
  (outcome,) = judge(pool, example, str(rows))
  assert outcome.reward == 0.5


@needs_package
def test_the_parameters_of_the_task_count(pool):
  """puzzle24 asks its own settings which numbers are allowed."""
  answer = '9 + 9 + 3 + 3'
  for most, reward in ((8, 0.01), (10, 1.0)):
    example = record('puzzle24', max_value=most)
    (outcome,) = judge(pool, example, answer)
    assert outcome.reward == reward


@needs_package
def test_the_answer_is_cut_out(pool):
  example = record('chain_sum', max_terms=2, max_digits=1)
  right = example['answer']
  completions = {
    right: 1,
    f' {right}\n': 1,
    f'<think>5</think><answer> {right} </answer> so': 1,
    f'<answer>x</answer> <answer>{right}</answer>': 1,
    f'<answer><answer>{right}</answer>': 1,
    f'<answer>{right}</answer><answer>x</answer>': 0,
    '<answer></answer>': 0,
    '': 0,
    ' \n': 0,
  }
  outcomes = judge(pool, example, *completions)
  assert [one.reward for one in outcomes] == list(completions.values())


@pytest.mark.parametrize(
  'text, tag, require, answer',
  [
    ('a <x>b</x>', 'x', False, 'b'),
    ('a <x>b</x>', None, True, 'a <x>b</x>'),
    ('a <x>b</x>', 'answer', False, 'a <x>b</x>'),
    ('a <x>b</x>', 'answer', True, ''),
    ('</x><x>b', 'x', False, '</x><x>b'),
    ('<x>b</x><x>c', 'x', True, 'b'),
    ('<x>' * 50_000, 'x', True, ''),
  ],
)
def test_which_text_is_the_answer(text, tag, require, answer):
  assert gym._answer(text, tag, require) == answer


# The texts that fool and break verifiers, for tasks that compare, read numbers,
# read a grid and read an expression.
CORPUS = 'chain_sum', 'fraction_simplification', 'mini_sudoku', 'countdown'
MOST_REWARD = 0.3  # of a text without an answer, as the table of tasks has it


def judge_corpus(pool, task, every):
  """Each text of the hostile corpus has an outcome, in time."""
  example = record(task)
  kinds = (list(texts.values())[::every] for texts in hostile.KINDS.values())
  texts = [text for kind in kinds for text in kind]
  texts += [f'<answer>{text}</answer>' for text in texts[::4]]
  outcomes = judge(pool, example, *texts)
  for text, outcome in zip(texts, outcomes, strict=True):
    assert outcome.secs < HANG_SECS, ascii(text[:80])
    assert bool(outcome.failure) == (outcome.reward is None)
    assert (outcome.reward or 0) <= MOST_REWARD, (ascii(text[:80]), outcome)
  (right,) = judge(pool, example, example['answer'])
  assert right.reward == 1
  return len(texts)


@needs_package
@pytest.mark.parametrize('task', CORPUS)
def test_some_of_the_hostile_corpus_has_outcomes(pool, task):
  judge_corpus(pool, task, 9)


@needs_package
@pytest.mark.long
@pytest.mark.parametrize('task', CORPUS)
def test_all_of_the_hostile_corpus_has_outcomes(pool, task):
  assert judge_corpus(pool, task, 1) > 500


@pytest.mark.long
@needs_package
def test_score_counts_the_failures_of_a_batch(pool):
  """As a run calls it; what has failed is not judged, and is no 0."""
  coin, sums = record('coin_flip'), record('chain_sum')
  rows = [
    (coin, '-1e999', 'raised OverflowError'),  # known to make it raise
    (coin, coin['answer'], ''),
    (sums, sums['answer'], ''),
    (sums, '9**9**9**9', ''),
    (sums, '\ud800', ''),
    (record('prime_factorization'), 'I do not know.', 'raised ValueError'),
    (record('simple_integration'), 'x**9**9**9**9', 'time limit'),
  ]
  examples, completions, expected = map(list, zip(*rows))
  term = rewards.WeightedReward(
    'gym', rewards.reasoning_gym, where='workers', failed=None
  )
  found = rewards.score(
    [term], ['p'] * len(rows), completions, examples, workers=pool
  )
  assert [text.partition(':')[0] for text in found.failures[:, 0]] == expected
  assert found.judged.tolist() == [not text for text in expected]
  assert found.reward.tolist() == [0, 1, 1, 0, 0, 0, 0]


def test_in_the_process_of_the_trainer_it_refuses():
  example = {'answer': '1', 'reasoning_gym': {'task': 'gcd', 'parameters': {}}}
  with pytest.raises(ValueError, match='judges in confined workers only'):
    rewards.reasoning_gym('p', '1', example)
  with pytest.raises(rewards.RewardError, match='judges in confined workers'):
    term = rewards.WeightedReward('gym', rewards.reasoning_gym)
    rewards.score([term], ['p'], ['1'], [example])


@pytest.mark.parametrize(
  'kwargs', [{'tag': '<x>'}, {'tag': 3}, {'tag': None, 'require_tag': True}]
)
def test_wrong_arguments_are_refused(kwargs):
  with pytest.raises(ValueError, match='name of a tag is required'):
    rewards.check_arguments(rewards.reasoning_gym, kwargs, 'kwargs')


def test_without_landlock_a_run_does_not_start(monkeypatch):
  monkeypatch.setattr(sandbox, 'refusal', lambda means: 'an old kernel')
  with pytest.raises(ValueError, match='not offer Landlock .*.an old kernel'):
    rewards.check_arguments(rewards.reasoning_gym, {}, 'kwargs')


def test_a_record_of_another_source_is_refused():
  with pytest.raises(ValueError, match="requires the field 'reasoning_gym'"):
    gym.prepare({'prompt': 'p', 'answer': '1'})


def test_a_missing_package_is_named(monkeypatch):
  gym._task.cache_clear()
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  with pytest.raises(ValueError, match=r"pip install 'grpo_jax\[reasoning"):
    gym.prepare({'reasoning_gym': {'task': 'gcd', 'parameters': {}}})
