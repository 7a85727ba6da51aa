"""Prompts that are longer than the widths of a run."""

import types

import pytest

from grpo_jax import data
from grpo_jax.hosts.processes import ALONE
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run import sampling
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from tests import runs
from tests.data import formats

pytestmark = pytest.mark.usefixtures('shared_programs')

# Every third prompt has 8 tokens, and the widths hold 6.
RECORDS = [
  {'prompt': f'{n}0+0{n}=' if n % 3 else f'{n}0+{n}0+0=', 'answer': f'{n}'}
  for n in range(9)
]
FIT = {record['prompt'] for record in RECORDS if len(record['prompt']) == 6}


def config(place, **changes):
  file = formats.jsonl(place / 'mixed.jsonl', RECORDS)
  return runs.small(
    **{
      'data.train': str(file),
      'data.heldout': str(file),
      'data.prompt_buckets': (6,),
      'data.too_long': 'drop',
      'steps': 3,
      **changes,
    }
  )


def drawn(workdir):
  found = []
  for file in parquet.files(workdir / 'completions'):
    rollout = parquet.read(file)
    found += zip(rollout.index.tolist(), rollout.prompt_texts)
  return found


@pytest.mark.long
def test_they_are_dropped_and_counted_and_the_run_goes_on_alike(tmp_path):
  loop.train(config(tmp_path), tmp_path / 'whole')
  found = drawn(tmp_path / 'whole')
  # 12 of 18 prompts fit: two epochs.
  assert len(found) == 12 and {text for _, text in found} == FIT
  for epoch in found[:6], found[6:]:
    assert len({text for _, text in epoch}) == 6
  counts = [r['prompts_too_long'] for r in runs.records(tmp_path / 'whole')[1:]]
  assert sum(counts) == found[-1][0] + 1 - 12
  for steps in (1, 3):  # the first ends within an epoch
    loop.train(config(tmp_path, steps=steps), tmp_path / 'stops')
  assert drawn(tmp_path / 'stops') == found
  (_, arrays, host), (_, others, other) = (
    runs.saved(tmp_path / name) for name in ('stops', 'whole')
  )
  assert all((arrays[name] == others[name]).all() for name in arrays)
  places = [x['receipt']['prompts']['position'] for x in (host, other)]
  assert places == [found[-1][0] + 1] * 2


@pytest.mark.long
def test_they_are_refused_and_the_run_may_go_on_without_them(tmp_path):
  changes = {'data.heldout': '', 'data.too_long': 'refuse', 'steps': 2}
  words = r'needs 8 tokens, but the largest bucket is 6.*data.too_long'
  with pytest.raises(ValueError, match=words):
    loop.train(config(tmp_path, **changes), tmp_path / 'run')
  changes['data.too_long'] = 'drop'
  loop.train(config(tmp_path, **changes), tmp_path / 'run')
  assert {text for _, text in drawn(tmp_path / 'run')} <= FIT


@pytest.mark.parametrize(
  'wanted, places, dropped', [(4, [1, 2, 4, 5], 2), (2, [1, 2], 1), (9, 6, 3)]
)
def test_held_out_problems_that_are_dropped_are_counted(
  tmp_path, wanted, places, dropped
):
  tokenizer = data.character_tokenizer(data.ALPHABET)
  found, counts = build_data.heldout_records(
    build_data.data_spec(config(tmp_path)), tokenizer, RECORDS, wanted
  )
  if isinstance(places, list):
    assert [record['index'] for record in found] == places
  else:
    assert len(found) == places
  assert counts == {'heldout_too_long': dropped}
  # Nothing is said where nothing is dropped.
  for changes in {'data.prompt_buckets': (8,)}, {'data.too_long': 'refuse'}:
    spec = build_data.data_spec(config(tmp_path, **changes))
    _, counts = build_data.heldout_records(spec, tokenizer, RECORDS, wanted)
    assert counts == {}


def test_an_evaluation_says_how_many_were_dropped(tmp_path):
  changes = {'warm_up.steps': 0, 'steps': 1, 'evaluation.examples': 5}
  changed = config(tmp_path, **changes)
  loop.train(changed, tmp_path / 'run')
  for record in runs.records(tmp_path / 'run'):
    assert record['heldout_too_long'] == 3  # of eight
  policy = policies.load(changed, tmp_path / 'run', to_evaluate=True)
  summary = policies.evaluate(policy, 2, 1, [1])
  assert summary['examples'] == 2 and summary['heldout_too_long'] == 1
  nothing = sampling.evaluated(
    build.run(config(tmp_path, **{'data.prompt_buckets': (5,)})), 0
  )
  assert nothing == {'heldout_accuracy': None, 'heldout_too_long': 9}


def test_a_warm_up_takes_the_next_demonstrations_that_fit(tmp_path):
  parts = types.SimpleNamespace(
    data=build_data.data_spec(config(tmp_path)),
    tokenizer=data.character_tokenizer(data.ALPHABET),
  )
  index = lambda position: [
    row['index'] for row in warm_up._records(RECORDS, position, 4, parts, ALONE)
  ]
  assert index(0) == [1, 2, 4, 5] and index(4) == [4, 5, 7, 8]
  passed_over = lambda position: warm_up._passed_over(
    warm_up._records(RECORDS, position, 4, parts, ALONE), position
  )
  assert passed_over(0) == {0, 3} and passed_over(4) == {6}
  refuses = config(tmp_path, **{'data.too_long': 'refuse'})
  parts.data = build_data.data_spec(refuses)
  assert len(warm_up._records(RECORDS * 2, 0, 16, parts, ALONE)) == 16
  narrow = config(tmp_path, **{'data.prompt_buckets': (5,)})
  parts.data = build_data.data_spec(narrow)
  with pytest.raises(ValueError, match='Nearly all demonstrations are long'):
    warm_up._records(RECORDS * 2, 0, 16, parts, ALONE)
