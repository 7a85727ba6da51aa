"""Rollouts: the sampled ids, judged, and laid out in few shapes."""

import dataclasses
import pathlib
import time

import jax
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.episodes import rollout
from grpo_jax.learner import micro_batches
from grpo_jax.mesh import random_keys
from grpo_jax.models.layout import LayoutSpec
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.quick

TOKENIZER = data.character_tokenizer(data.ALPHABET)
RECORDS = [
  {'prompt': '47+85=', 'answer': '231', 'index': 7},
  {'prompt': '01+02=', 'answer': '3', 'index': 8},
]


def fixed(made, texts, **options):
  """An engine that answers with texts; all but the last end."""
  answers = {}
  for record, group in zip(RECORDS, texts, strict=True):
    ids = [[*TOKENIZER.encode(text), *TOKENIZER.eos_ids] for text in group]
    answers[tuple(TOKENIZER.encode(record['prompt']))] = ids
  ids[-1].pop()
  engine = made(lambda asked, g: answers[tuple(asked.ids)][g], **options)
  engine.load(None, version=3)
  return engine


def collect(
  functions, texts=(('231', '2'), ('3', '44')), buckets=(4, 8), **options
):
  engine = fixed(FakeEngine, texts, **options)
  weighted = [rewards.WeightedReward(*f) for f in functions]
  sampling = engines.Sampling(eos_ids=TOKENIZER.eos_ids)
  return engine, rollout.collect(
    RECORDS, engine, TOKENIZER, weighted, sampling, 8, 2, 0, 5, buckets
  )


def exact(prompt, completion, example):
  return rewards.exact_match(prompt, completion, example)


def test_what_was_sampled_is_what_is_trained():
  engine, got = collect([('exact', exact)])
  batch = got.batch
  keys = random_keys.folded(0, 'sample', 5, [7, 8], range(2))
  for one, record, its in zip(engine.requests, RECORDS, keys, strict=True):
    assert one.ids == TOKENIZER.encode(record['prompt']) and one.limit == 8
    np.testing.assert_array_equal(one.keys, its)
  np.testing.assert_array_equal(got.length, [[4, 2], [2, 2]])
  np.testing.assert_array_equal(batch.mask.sum(-1), got.length)
  eos = TOKENIZER.eos_ids[0]
  assert batch.tokens[0, 0].tolist() == TOKENIZER.encode('231') + [eos]
  np.testing.assert_array_equal(batch.truncated, [[0, 0], [0, 1]])
  np.testing.assert_array_equal(batch.reward, [[1, 0], [1, 0]])
  np.testing.assert_array_equal(batch.keep, batch.mask)
  assert batch.valid.all()
  # And nothing past the end.
  for field, value in (
    (batch.version, 3),
    (batch.logp_sampler, -0.75),
    (batch.extras['log_kept'], -0.25),
  ):
    np.testing.assert_array_equal(field, np.where(batch.mask, value, 0))
  assert not batch.tokens[~batch.mask].any()
  assert got.texts == [['231', '2'], ['3', '44']]


def test_a_blank_rollout_has_the_shapes_of_a_sampled_one():
  """Programs are compiled for it, and have to fit what is sampled."""
  _, got = collect([('exact', exact)])
  blank = rollout.blank(2, 2, 6, 4, 1, (4, 8))
  like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  extras = {name: blank.batch.extras[name] for name in got.batch.extras}
  assert like(blank.batch._replace(extras=extras)) == like(got.batch)
  for name in ('length', 'index'):
    assert like(getattr(blank, name)) == like(getattr(got, name))
  for name in ('prompts', 'texts'):
    assert [*map(len, getattr(blank, name))] == [*map(len, getattr(got, name))]
  assert np.all(blank.length == 4) and blank.batch.mask.all()


@pytest.mark.parametrize(
  'answer, text',
  [('7', '7'), (None, None), (7, '7'), ({'is': ['ö']}, '{"is": ["ö"]}')],
)
def test_an_answer_that_is_no_text_is_shown_as_json(answer, text):
  assert rollout.answer_text(answer) == text


def test_the_samplers_entropy_is_passed_on_if_it_is_known():
  assert 'entropy_sampler' not in collect([('exact', exact)])[1].batch.extras
  can = engines.Capabilities(entropy=True)
  batch = collect([('exact', exact)], capabilities=can)[1].batch
  np.testing.assert_array_equal(
    batch.extras['entropy_sampler'], batch.tokens / 8
  )


def test_the_batch_is_no_wider_than_its_bucket():
  assert collect([('exact', exact)])[1].batch.mask.shape == (2, 2, 4)
  long = (('231231', '2'), ('3', '44'))
  assert collect([('exact', exact)], long)[1].batch.mask.shape == (2, 2, 8)


def test_parts_are_kept_by_name_order_and_summed_with_weights():
  length = lambda prompt, completion, example: len(completion)
  _, got = collect([('exact', exact, 2.0), ('length', length, -0.5)])
  assert got.reward_names == ('exact', 'length')
  np.testing.assert_array_equal(
    got.batch.reward_parts, [[[1, 3], [0, 1]], [[1, 1], [0, 2]]]
  )
  np.testing.assert_allclose(got.batch.reward, [[0.5, -0.5], [1.5, -1]])


def test_a_completion_that_was_not_judged_is_not_valid():
  odd = lambda prompt, completion, example: None if completion == '2' else 1.0
  _, got = collect([('odd', odd)])
  np.testing.assert_array_equal(got.batch.valid, [[1, 0], [1, 1]])


def test_what_a_judge_does_to_its_record_no_other_sees(monkeypatch):
  monkeypatch.setitem(RECORDS[0], 'answer', ['b', 'a'])
  monkeypatch.setitem(RECORDS[0], 'facts', {'of': [{1}]})
  seen = []

  def disorderly(prompt, completion, example):
    if isinstance(example['answer'], list):
      seen.append((*example['answer'], *example['facts']['of'][0]))
      example['answer'].sort()
      example['facts']['of'].pop().clear()
    return 0

  collect([('disorderly', disorderly)])
  assert seen == [('b', 'a', 1)] * 2
  assert RECORDS[0]['answer'] == ['b', 'a'] and RECORDS[0]['facts']['of']


def test_rewards_see_ids_and_truncation():
  seen = []

  def reward(prompt, completion, example):
    seen.append(
      (example['index'], example['completion_ids'], example['truncated'])
    )
    return 0.0

  _, got = collect([('reward', reward)])
  assert seen[0] == (7, got.batch.tokens[0, 0, :4].tolist(), False)
  assert [s[0] for s in seen] == [7, 7, 8, 8]
  assert [s[2] for s in seen] == [False, False, False, True]


def test_demonstrations_end_with_the_end_token():
  got = rollout.demonstrations(RECORDS, TOKENIZER, (3, 5))
  assert got.batch.tokens.shape == (2, 1, 5)
  np.testing.assert_array_equal(got.length, [[4], [2]])
  last = got.batch.tokens[[0, 1], 0, got.length[:, 0] - 1]
  np.testing.assert_array_equal(last, TOKENIZER.eos_ids[0])
  np.testing.assert_array_equal(got.batch.mask.sum(-1), got.length)


@pytest.mark.parametrize('kind', ['shared', 'packed', 'padded'])
def test_shapes_depend_on_the_buckets_alone(kind):
  spec = LayoutSpec(kind, 2, 0, (8,), 32)
  shapes = set()
  for texts in ((('2', '2'), ('3', '4')), (('231', '12'), ('333', '44'))):
    _, got = collect([('exact', exact)], texts)
    rows, used = micro_batches.cut_rollout(got, np.arange(2), spec)
    assert 1 <= used <= rows.tokens.shape[0]
    # Nothing lies in the micro-batches that are not used.
    assert not np.any(rows.segment[used:])
    shapes.add(rows.tokens.shape + rows.column.shape)
  assert len(shapes) == 1


def ragged(lengths, prompt_tokens=6):
  """A rollout of 2 x 4 with given lengths of at most 32."""
  _, got = collect([('exact', exact)])
  length = np.array(lengths, np.int32).reshape(2, 4)
  mask = np.arange(32) < length[..., None]
  batch = got.batch._replace(tokens=np.ones(mask.shape, np.int32), mask=mask)
  return got._replace(
    batch=batch, length=length, prompts=[[1] * prompt_tokens] * 2
  )


def test_auto_takes_the_layout_with_the_least_work():
  spec = LayoutSpec('auto', 1, 0, (8,))
  same = micro_batches.cut_rollout(ragged([32] * 8), np.arange(2), spec)[0]
  assert same.blocks is not None and same.tokens.shape == (2, 1, 8 + 4 * 32)
  mixed = ragged([32, 3, 4, 5, 6, 7, 8, 9])
  rows = micro_batches.cut_rollout(mixed, np.arange(2), spec)[0]
  assert rows.blocks is None and rows.tokens.shape[1:] == (1, 40)
  # Unless attention over the whole of a wide row costs more than it saves.
  wide = dataclasses.replace(spec, pack_tokens=120, key_cost=1 / 30)
  assert (
    micro_batches.cut_rollout(mixed, np.arange(2), wide)[0].blocks is not None
  )
  wide = dataclasses.replace(wide, key_cost=0.0)
  assert micro_batches.cut_rollout(mixed, np.arange(2), wide)[0].blocks is None


@pytest.mark.parametrize('kind', ['auto', 'packed'])
def test_what_is_decided_once_has_one_shape(kind):
  """For completions that get longer and for such that get shorter."""
  spec = LayoutSpec(kind, 1, 0, (8,))
  mixed = [32, 3, 4, 5, 6, 7, 8, 9]
  spec = micro_batches.decided(ragged(mixed), np.arange(2), spec)
  assert (spec.kind, spec.row_slots) == ('packed', 4)
  shapes = set()
  for lengths in (mixed, [32] * 8, [1] * 8, [2, 1, 1, 1, 1, 1, 1, 1]):
    got = ragged(lengths)
    assert micro_batches.decided(got, np.arange(2), spec) == spec
    rows, used = micro_batches.cut_rollout(got, np.arange(2), spec)
    shapes.add((rows.tokens.shape, rows.column.shape, rows.blocks))
    there = rows.completion[rows.completion < 8]
    assert sorted(there) == list(range(8)) and used >= 1
  assert len(shapes) == 1
  few = dataclasses.replace(spec, row_slots=2)
  rows, used = micro_batches.cut_rollout(ragged([1] * 8), np.arange(2), few)
  assert rows.column.shape[2] == 2 and used == 4


def test_a_layout_that_is_named_stays():
  for kind in ('shared', 'padded'):
    spec = LayoutSpec(kind, 1, 0, (8,))
    rollout = ragged([32, 3, 4, 5, 6, 7, 8, 9])
    assert micro_batches.decided(rollout, np.arange(2), spec) == spec


def test_bad_layouts_are_refused():
  with pytest.raises(ValueError, match="'diagonal'"):
    LayoutSpec('diagonal', 2, 0, (8,))
  _, got = collect([('exact', exact)])
  spec = LayoutSpec('shared', 2, 3, (8,))
  with pytest.raises(ValueError, match='row_completions=3'):
    micro_batches.cut_rollout(got, np.arange(2), spec)


@pytest.mark.parametrize(
  'answer, text',
  [
    ('2', '2'), (2, '2'), (2.0, '2'), (np.float32(2), '2'), (['2', '3'], '2'),
    ([2.0, '3'], '2'), (np.array([2, 3]), '2'), (b'2', '2'),
  ],
)  # fmt: skip
def test_a_demonstration_shows_one_right_answer(answer, text):
  records = [{**RECORDS[0], 'answer': answer}]
  got = rollout.demonstrations(records, TOKENIZER, (5,))
  assert got.texts == [[text]]
  shown = TOKENIZER.decode(got.batch.tokens[0, 0, : got.length[0, 0]])
  assert shown == text


@pytest.mark.parametrize('answer', [{'truth': '2'}, None, [], [['2']]])
def test_a_demonstration_of_no_answer_is_refused(answer):
  records = [{**RECORDS[0], 'answer': answer}]
  with pytest.raises(ValueError, match='^A demonstration requires '):
    rollout.demonstrations(records, TOKENIZER, (5,))


def test_demonstrations_need_an_end_token():
  endless = data.Tokenizer(TOKENIZER.backend, (), TOKENIZER.pad_id)
  with pytest.raises(ValueError, match='eos_tokens'):
    rollout.demonstrations(RECORDS, endless, (5,))


def notes(prompt, completion, example):
  """Writes a file when it is called."""
  ids = len(example['completion_ids']) + 100 * example['truncated']
  pathlib.Path(example['folder'], f'{completion} {ids}').touch()
  return float(len(completion))


class WaitingEngine(FakeEngine):
  """Has completed one prompt, and goes on when it has been judged."""

  def completed(self, every_tokens=None):
    turns = super().completed(every_tokens)
    yield next(turns)
    until = time.monotonic() + 60
    folder = pathlib.Path(RECORDS[0]['folder'])
    while {path.name for path in folder.iterdir()} != {'44 102', '3 2'}:
      assert time.monotonic() < until
      time.sleep(0.01)
    yield from turns


@pytest.mark.parametrize(
  'processes, shares, where, early',
  [
    (1, False, 'workers', True),
    (1, False, 'here', False),
    (2, False, 'workers', False),
    (2, True, 'workers', True),
    (2, True, 'here', False),
  ],
)
def test_workers_judge_early_what_is_drawn_by_one_process(
  processes, shares, where, early, monkeypatch
):
  monkeypatch.setattr(jax, 'process_count', lambda: processes)
  told = {'shares': True} if shares else {}
  engine = FakeEngine(None, engines.Capabilities(**told))
  terms = [rewards.WeightedReward('notes', notes, where=where)]
  assert rollout._is_judged_early(engine, terms) == early


def test_what_has_ended_is_judged_while_the_engine_goes_on(
  monkeypatch, tmp_path
):
  for record in RECORDS:
    monkeypatch.setitem(record, 'folder', str(tmp_path))
  texts = ('231', '2'), ('3', '44')
  term = rewards.WeightedReward('notes', notes, where='workers')
  sampling = engines.Sampling(eos_ids=TOKENIZER.eos_ids)
  asked = TOKENIZER, [term], sampling, 8, 2, 0, 5, (4, 8)
  with rewards.Workers(2, time_limit_secs=20.0) as pool:
    early, late = (
      rollout.collect(RECORDS, fixed(made, texts), *asked, workers=pool)
      for made in (WaitingEngine, FakeEngine)
    )
  np.testing.assert_array_equal(early.batch.reward, [[3, 1], [1, 2]])
  assert early.texts == late.texts
  jax.tree.map(np.testing.assert_array_equal, early.batch, late.batch)
