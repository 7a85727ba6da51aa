"""Problems of reasoning-gym: splits, curricula, and what is refused."""

import collections
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import runpy
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data import _reasoning_gym as gym

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None,
  reason='reasoning-gym is not installed',
)
FIT = [
  name for name, task in gym.fitness()['tasks'].items() if not task['refused']
]
# Stages that tell themselves by the number of terms of a question.
STAGES = (
  {'from': 0, 'min_terms': 2, 'max_terms': 2},
  {'from': 30, 'max_terms': 3, 'min_terms': 3},
  {'from': 70, 'min_terms': 5, 'max_terms': 5},
)


def source(task='chain_sum', split='train', **kwargs):
  return data.reasoning_gym_source(task, split, kwargs)


def terms(record):
  return record['reasoning_gym']['metadata']['num_terms']


def test_a_record_has_what_training_and_judging_need():
  record = source(max_terms=2, max_digits=1)[3]
  assert record['prompt'].startswith('State the final answer')
  first, sign, second = record['prompt'].split(': ')[1].split()[:3]
  right = int(first) + (1 if sign == '+' else -1) * int(second)
  assert record['answer'] == str(right)
  made = record['reasoning_gym']
  assert made['task'] == 'chain_sum'
  assert made['parameters'] == {'max_terms': 2, 'max_digits': 1}
  assert json.loads(json.dumps(record)) == record


def test_the_splits_have_the_lengths_asked_for():
  assert (len(source()), len(source(split='heldout'))) == (10_000, 1_000)
  assert len(source(size=7)) == 7
  assert source(size=7)[-1] == source(size=7)[6]
  with pytest.raises(IndexError):
    source(size=7)[7]


def seeds(split, size, seed):
  """The first and last seed of the package for a split."""
  made = source(split=split, size=size, seed=seed)
  return made._first, made._first + len(made) - 1


def test_no_two_splits_and_no_two_seeds_share_a_seed_of_the_package():
  """For the largest sizes, and so for all: a split begins where it does."""
  spans = sorted(
    seeds(split, gym.MOST_ITEMS, seed)
    for seed in range(gym._MOST_SEED + 1)
    for split in ('train', 'heldout')
  )
  assert len(spans) == 256 and spans[0][0] == 0
  assert all(one[1] < two[0] for one, two in zip(spans, spans[1:]))
  assert spans[-1][1] < 2**32  # what numpy takes
  for size in (1, 10_000):
    assert seeds('heldout', size, 3)[0] == seeds('heldout', 99, 3)[0]


def test_the_package_seeds_an_item_by_the_sum_that_this_rests_on():
  """Item 1 of a seed is item 0 of the next: so seeds 0 and 1 would overlap."""
  for task in ('chain_sum', 'gcd'):
    one, two = (gym._dataset(task, '{}', seed, 10) for seed in (5, 6))
    assert one[1]['question'] == two[0]['question']


def test_splits_and_seeds_share_no_question():
  made = [
    source('chain_sum', split, min_digits=4, size=150, seed=seed)
    for split in ('train', 'heldout')
    for seed in (0, 1)
  ]
  questions = [one[i]['prompt'] for one in made for i in range(len(one))]
  assert len(set(questions)) == len(questions)


DIGEST = """
import hashlib, json, sys
from grpo_jax import data
print(hashlib.sha256(json.dumps([
  [data.ReasoningGymSource(task, 'train')[i] for i in (4, 0)]
  for task in sys.argv[1:]
]).encode()).hexdigest())
"""


def test_records_are_the_same_in_every_process(monkeypatch, capsys):
  # Two of these draw from generators that the process shares.
  tasks = [
    name
    for name in ('list_functions', 'pool_matrix', 'chain_sum', 'syllogism')
    if name in FIT
  ]
  # Texts have another hash there than in this process.
  seed = '1' if os.environ.get('PYTHONHASHSEED') != '1' else '2'
  there = subprocess.run(
    [sys.executable, '-W', 'ignore', '-c', DIGEST, *tasks],
    env={**os.environ, 'PYTHONHASHSEED': seed},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  monkeypatch.setattr(sys, 'argv', ['', *tasks])
  exec(DIGEST, {})
  assert capsys.readouterr().out == there and len(there) == 65


@pytest.mark.parametrize('task', ['list_functions', 'pool_matrix'])
def test_reading_leaves_the_shared_generators_alone(task):
  if task not in FIT:
    pytest.skip(f'{task} is not fit')
  made = source(task)
  random.seed(1)
  np.random.seed(1)
  first = [made[i] for i in range(5)]
  drawn = random.random(), np.random.rand()
  random.seed(1)
  np.random.seed(1)
  assert drawn == (random.random(), np.random.rand())
  assert [made[i] for i in range(5)] == first


def test_a_curriculum_follows_the_number_of_prompts_drawn():
  stream = data.prompt_stream(source(curriculum=STAGES), seed=3)
  counts = [terms(stream[row]) for row in range(100)]
  assert counts == [2] * 30 + [3] * 40 + [5] * 30
  assert terms(stream[10**9]) == 5


def test_a_run_resumes_in_the_middle_of_a_stage():
  """Rows depend on their number alone, whatever was read before them."""
  whole = data.take(data.prompt_stream(source(curriculum=STAGES), 3), 0, 90)
  for start in (29, 30, 71, 5):
    fresh = data.prompt_stream(source(curriculum=STAGES), 3)
    assert data.take(fresh, start, 10) == whole[start : start + 10]


def test_a_curriculum_keeps_the_order_and_passes_epochs():
  """The same records in the same order, but for what a stage changes."""
  small = {'size': 20, 'min_terms': 2, 'max_terms': 2}
  plain = data.prompt_stream(source(**small), seed=0)
  stages = data.prompt_stream(
    source(**small, curriculum=({'from': 0}, {'from': 25, 'max_digits': 1})), 0
  )
  rows = [stages[i] for i in range(60)]
  assert rows[:25] == [plain[i] for i in range(25)]
  assert [row['prompt'] for row in rows[25:40]] != [
    plain[i]['prompt'] for i in range(25, 40)
  ]
  assert len({row['prompt'] for row in rows[40:60]}) > 15


def test_in_a_mixture_a_source_counts_what_was_drawn_from_it_alone():
  letters = [{'prompt': f'{n}', 'answer': ''} for n in range(300)]
  stream = data.mixture([letters, source(curriculum=STAGES)], [3, 1], seed=0)
  rows = [stream[i] for i in range(4 * 80)]
  counts = [terms(row) for row in rows if 'reasoning_gym' in row]
  assert counts == [2] * 30 + [3] * 40 + [5] * 10


def test_read_by_index_a_curriculum_is_at_its_end():
  made = source(split='heldout', curriculum=STAGES)
  assert {terms(made[i]) for i in range(5)} == {5}


def test_a_stage_keeps_what_those_before_it_changed():
  made = source(
    max_digits=2,
    curriculum=({'from': 0, 'max_terms': 3}, {'from': 9, 'max_digits': 1}),
  )
  assert made.stage(8) == {'max_digits': 2, 'max_terms': 3}
  assert made.stage(9) == {'max_digits': 1, 'max_terms': 3}


def test_levels_are_those_of_the_package():
  made = source(
    level=0, max_digits=3, curriculum=({'from': 0}, {'from': 5, 'level': 2})
  )
  assert made.stage(0) == {
    'max_terms': 2, 'max_digits': 3,
  }  # fmt: skip
  assert made.stage(5) == {'max_terms': 4, 'max_digits': 3}
  with pytest.raises(ValueError, match='level 99, but its levels are 0 to 1'):
    source(level=99)
  with pytest.raises(ValueError, match="level 'hard', but its levels are 0"):
    source(level='hard')
  if 'list_functions' in FIT:
    with pytest.raises(ValueError, match='has no curriculum for this task'):
      source('list_functions', level=0)


@pytest.mark.parametrize(
  'curriculum',
  [
    ({'from': 1},),
    ({'max_terms': 3},),
    ({'from': 0}, {'from': 0}),
    ({'from': 0}, {'from': 9}, {'from': 5}),
    ({'from': 0}, {'from': 1.5}),
    ({'from': True},),
    ('x',),
  ],
)
def test_a_curriculum_that_cannot_be_is_refused(curriculum):
  with pytest.raises(ValueError, match="stage .*each is a dict with 'from'"):
    source(curriculum=curriculum)


@pytest.mark.parametrize(
  'task, kwargs, message',
  [
    ('chain_sums', {}, "no task 'chain_sums' .did you mean 'chain_sum'"),
    ('zzz', {}, "no task 'zzz'; pass one of those that grpo_jax/data/README"),
    ('composite', {}, "'reasoning_gym:composite' is refused, because"),
    ('chain_sum', {'max_term': 3}, "no 'max_term' .did you mean 'max_terms'"),
    ('chain_sum', {'max_terms': 1}, 'refuses .max_terms must be >= min_terms'),
    ('chain_sum', {'max_terms': 'x'}, "'max_terms': 'x'.*refuses"),
    ('chain_sum', {'max_terms': 3.5}, 'cannot make a problem'),
    ('chain_sum', {'max_terms': object()}, 'refuses .*of type object'),
    ('chain_sum', {'size': 0}, 'size of the source .* from 1 to 16,777,216'),
    ('chain_sum', {'size': 2**24 + 1}, 'size of the source'),
    ('chain_sum', {'seed': 128}, 'seed of the source .* from 0 to 127'),
    ('chain_sum', {'seed': True}, 'seed of the source .* is True'),
    ('chain_sum', {'task': 'gcd'}, "kwargs with 'task'"),
    ('basic_arithmetic', {'allow_parentheses': False}, 'is refused with'),
    ('codeio', {'difficulty': 3}, "refused with {'difficulty': 3}, because"),
    ('codeio', {'level': 0}, "refused with {'difficulty': 6}, because"),
    (
      'codeio',
      {'curriculum': ({'from': 0}, {'from': 5, 'difficulty': 8})},
      "refused with {'difficulty': 8}, because",
    ),
    (
      'chain_sum',
      {'curriculum': ({'from': 0}, {'from': 5, 'max_term': 4})},
      "no 'max_term'",
    ),
  ],
)
def test_what_cannot_be_used_is_refused(task, kwargs, message):
  with pytest.raises(ValueError, match=message):
    data.reasoning_gym_source(task, 'train', kwargs)


@pytest.mark.long
def test_what_the_best_constant_answer_of_the_config_would_get():
  """configs/README.md and configs/reasoning_gym.py say so."""
  from reasoning_gym import create_dataset

  folder = pathlib.Path(__file__).parents[2] / 'configs'
  module = runpy.run_path(str(folder / 'reasoning_gym.py'))
  examples = module['get_config']().evaluation.examples
  made = source(split='heldout', **module['TASK'])
  judge = create_dataset('chain_sum', seed=0, size=1, **module['TASK'])
  answers = collections.Counter(made[i]['answer'] for i in range(examples))

  def mean(text):
    scores = (
      number * judge.score_answer(text, {'answer': answer})
      for answer, number in answers.items()
    )
    return sum(scores) / examples

  found = {str(n): mean(str(n)) for n in range(-999, 10_000)}
  best = max(found, key=lambda text: found[text])
  assert best == '110'
  for text, score in ((best, '.073'), ('0', '.047')):
    assert f'{found[text]:.3f}'.removeprefix('0') == score
    assert score in (folder / 'README.md').read_text()
  assert 'answer, 110, would get .073' in module['__doc__']


def test_another_split_is_refused():
  with pytest.raises(ValueError, match="no split 'test'; pass one of"):
    source(split='test')


def test_without_the_package_it_is_named(monkeypatch):
  gym._library.cache_clear()
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  try:
    with pytest.raises(ValueError, match=r"pip install 'grpo_jax\[reasoning"):
      source()
  finally:
    gym._library.cache_clear()


def test_another_version_is_refused(monkeypatch):
  gym._library.cache_clear()
  monkeypatch.setattr(gym.importlib.metadata, 'version', lambda name: '9.9')
  try:
    with pytest.raises(ValueError, match='reasoning-gym 9.9 is installed, but'):
      source()
  finally:
    gym._library.cache_clear()


def test_tasks_whose_verifier_is_fooled_are_refused():
  """puzzle24 does not look at the numbers of the problem, for one."""
  for task in ('puzzle24', 'game_of_life'):
    with pytest.raises(ValueError, match='for the answer of another problem'):
      source(task)
  told = gym.fitness()['tasks']
  assert told['spell_backward']['more'] > 0.7  # a note says so
  assert all(told[task]['constant'] <= 0.9 for task in FIT)


def test_every_task_has_a_verdict():
  from reasoning_gym import factory

  assert set(gym.fitness()['tasks']) == set(factory.DATASETS)
  assert len(FIT) > 80


@pytest.mark.long
@pytest.mark.parametrize('task', FIT)
def test_no_source_changes_the_problems_of_another(task):
  made = source(task)
  before = made[0]
  source(task, 'heldout', seed=1, size=50)[0]
  for level in (0, 1):
    with contextlib.suppress(ValueError):  # there is no such level
      source(task, level=level)[0]
  assert made[0] == before
  gym._dataset.cache_clear()
  assert made[0] == before


def test_a_refused_source_leaves_the_problems_of_others():
  made = source('codeio')
  before = made[0]
  with pytest.raises(ValueError, match='is refused with'):
    source('codeio', difficulty=8)
  assert made[0] == before


@pytest.mark.long
@pytest.mark.parametrize('task', FIT)
def test_every_fit_task_makes_problems(task):
  record = source(task)[1]
  assert record['prompt'] and record['answer']
  assert json.loads(json.dumps(record)) == record
