"""Dynamic sampling, with a collector that needs no model."""

import json

import jax
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.episodes import types
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import concatenate
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts.dynamic_sampling import PromptState

GROUP = 3
# What the completions of a prompt earn, by its last letter.
REWARDS = {'s': (1, 1, 1), 'f': (0, 0, 0), 'm': (0, 1, 0)}


def stream_of(letters):
  """An endless dataset: epoch after epoch in the same order."""

  class Stream:
    def __len__(self):
      return 10**9

    def __getitem__(self, i):
      number = i % len(letters)
      return {'prompt': f'{number}{letters[number]}'}

  return Stream()


def collect(records, width=2):
  """Rollouts whose rewards follow from the prompt."""
  shape = (len(records), GROUP)
  reward = [REWARDS[record['prompt'][-1]] for record in records]
  reward = np.array(reward, np.float32).reshape(shape)
  index = np.array([record['index'] for record in records])
  tokens = np.broadcast_to(index[:, None, None], (*shape, width))
  mask = np.ones(tokens.shape, bool)
  batch = losses.Batch(
    tokens=tokens.astype(np.int32),
    mask=mask,
    keep=mask,
    valid=np.ones(shape, bool),
    reward=reward,
    reward_parts=reward[..., None],
    truncated=np.zeros(shape, bool),
    version=np.zeros(tokens.shape, np.int32),
    extras={'log_kept': np.zeros(tokens.shape, np.float32)},
  )
  return Rollout(
    batch,
    np.full(shape, width, np.int32),
    [[1]] * len(records),
    [record['prompt'] for record in records],
    [['x'] * GROUP] * len(records),
    index,
    ('judge',),
  )


def draw(letters, state=None, number=2, rounds=0, calls=None, **options):
  def counted(records):
    if calls is not None:
      calls.append([record['index'] for record in records])
    return collect(records)

  return dynamic_sampling.draw(
    state or PromptState(),
    stream_of(letters),
    len(letters),
    number,
    counted,
    rounds,
    **options,
  )


def test_without_rounds_the_next_prompts_are_taken_as_they_are():
  rollout, state, counts = draw('sfm')
  assert rollout.prompt_texts == ['0s', '1f'] and counts == {}
  rollout, state, _ = draw('sfm', state)
  assert rollout.prompt_texts == ['2m', '0s'] and state == PromptState(4)


def short(record):
  """Not those whose number is 1 or 2."""
  return record['prompt'][0] not in '12'


def test_prompts_that_are_too_long_are_passed_over_and_counted():
  rollout, state, counts = draw('smsm', fits=short)
  assert rollout.prompt_texts == ['0s', '3m'] and state.position == 4
  assert counts == {'prompts_too_long': 2.0}
  rollout, state, counts = draw('smsm', state, number=1, fits=short)
  assert rollout.prompt_texts == ['0s'] and state.position == 5
  assert counts == {'prompts_too_long': 0.0}
  # From any position, so a run that is resumed draws the same.
  again, other, _ = draw('smsm', PromptState(1), fits=short)
  assert again.prompt_texts == ['3m', '0s'] and other.position == 5


def test_both_rounds_and_retirement_pass_over_prompts_that_are_too_long():
  options = dict(rounds=2, retire=True, number=1, fits=short)
  rollout, state, counts = draw('smsm', **options)
  assert rollout.prompt_texts == ['3m'] and state.position == 4
  assert counts['prompts_too_long'] == 2 and counts['prompts_retired'] == 1
  assert counts['prompts_drawn'] == 2
  _, state, counts = draw('smsm', state, **options)
  assert state.position == 8 and counts['prompts_too_long'] == 2


def test_all_rounds_count_what_is_too_long():
  _, state, counts = draw('ssmsms', rounds=2, number=2, fits=short)
  # 0, 3; 4, 5; 0, 3: of the first and the last round two were too long.
  assert state.position == 10 and counts['prompts_too_long'] == 4


def test_when_no_prompt_is_left_that_fits_it_ends():
  with pytest.raises(dynamic_sampling.NothingToLearn, match="'drop' drops"):
    draw('sms', fits=lambda record: False)
  _, state, _ = draw('sm', number=1, retire=True)
  words = 'drops them, and the other 1 are retired; give larger widths'
  with pytest.raises(dynamic_sampling.NothingToLearn, match=words):
    draw('sm', state, retire=True, fits=lambda r: r['prompt'] == '0s')


def test_uniform_groups_are_replaced_and_the_surplus_waits_its_turn():
  letters, calls = 'msmfmmmm', []
  rollout, state, counts = draw(letters, rounds=3, number=3, calls=calls)
  # Of the first three, two differ; of the next three again two.
  assert rollout.prompt_texts == ['0m', '2m', '4m']
  assert state.surplus.prompt_texts == ['5m'] and state.position == 6
  assert counts == {
    'prompts_drawn': 6.0,
    'groups_surplus': 1.0,
    'groups_short': 0.0,
    'accuracy_drawn': (4 * 1 + 3) / 18,
    'rewards_failed': 0.0,
    'tokens_drawn': 18 * 2,
  }
  rollout, state, _ = draw(letters, state, rounds=3, number=3, calls=calls)
  assert rollout.prompt_texts == ['5m', '6m', '7m']
  assert calls == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
  np.testing.assert_array_equal(rollout.batch.tokens[:, 0, 0], [5, 6, 7])
  np.testing.assert_array_equal(rollout.index, [5, 6, 7])


def test_failures_of_what_was_drawn_and_dropped_are_counted():
  """A group on which a judge has always failed is not kept."""

  def failing(records):
    rollout = collect(records)
    number = len(records)
    failures = np.full((number, *rollout.length.shape[1:], 1), '', object)
    failures[0] = 'time limit'
    valid = failures[..., 0] == ''
    batch = rollout.batch._replace(valid=valid)
    return rollout._replace(batch=batch, failures=failures)

  rollout, _, counts = dynamic_sampling.draw(
    PromptState(), stream_of('mmmm'), 4, 2, failing, 3
  )
  assert rollout.prompt_texts == ['1m', '3m']
  assert not rollout.failed.any()
  assert counts['reward/judge_failed'] == 0.5


def test_as_many_groups_as_are_needed_end_the_drawing():
  calls = []
  rollout, state, counts = draw('mmmm', rounds=3, calls=calls)
  assert calls == [[0, 1]] and rollout.prompt_texts == ['0m', '1m']
  assert state == PromptState(2) and counts['groups_surplus'] == 0


def test_no_group_is_lost_or_repeated_over_many_steps():
  letters, state, seen = 'mmsmfmm', PromptState(), []
  for _ in range(12):
    rollout, state, counts = draw(letters, state, number=4, rounds=9)
    assert counts['groups_short'] == 0 and len(rollout.prompts) == 4
    seen += list(rollout.index)
  seen += list(state.surplus.index) if state.surplus else []
  drawn = range(state.position)
  assert seen == [i for i in drawn if letters[i % len(letters)] == 'm']


def test_rounds_are_bounded_and_the_rest_is_filled_up():
  calls = []
  rollout, state, counts = draw('msssss', rounds=1, calls=calls)
  assert len(calls) == 2 and counts['groups_short'] == 1
  assert rollout.prompt_texts == ['0m', '1s'] and state.surplus is None
  assert state.position == 4


@pytest.mark.parametrize(
  'letters, words',
  [
    ('sssss', 'last 8 prompts.*solved by all.*4 solved, 0 failed.*harder'),
    ('fffff', 'failed by all.*0 solved, 4 failed.*easier'),
    ('sffff', 'equal rewards.*1 solved, 3 failed'),
  ],
)
def test_when_every_prompt_has_been_met_in_vain_it_ends_and_says_so(
  letters, words
):
  """Of five prompts each; four in vain are bad luck, the run goes on."""
  calls = []
  rollout, state, counts = draw(letters, rounds=1, calls=calls)
  assert (
    len(calls) == 2 and state.prompts_without_signal == 4
  )  # and not an endless loop
  assert len(rollout.prompts) == 2 and counts['groups_short'] == 2
  with pytest.raises(dynamic_sampling.NothingToLearn, match=words):
    draw(letters, state, rounds=1, calls=calls)


def test_one_group_that_differs_begins_the_count_anew():
  _, state, _ = draw('ssssm', rounds=1)
  assert state.prompts_without_signal == 4
  _, state, _ = draw('ssssm', state, rounds=1)
  assert state.prompts_without_signal == 0
  _, state, _ = draw('sssss', rounds=0)
  assert (
    state.prompts_without_signal == 0
  )  # without dynamic sampling nobody counts


def test_solved_prompts_retire_and_stay_so():
  letters, state, seen = 'smsm', PromptState(), []
  for _ in range(4):
    rollout, state, counts = draw(letters, state, retire=True)
    seen += rollout.prompt_texts
  assert seen == ['0s', '1m', '2s', '3m', '1m', '3m', '1m', '3m']
  assert counts == {'prompts_retired': 2.0}


def test_when_all_have_retired_it_ends():
  _, state, _ = draw('ss', retire=True)
  with pytest.raises(dynamic_sampling.NothingToLearn, match='all 2 prompts'):
    draw('ss', state, retire=True)


@pytest.mark.parametrize('by', ['valid', 'reward_parts'])
@pytest.mark.parametrize(
  'letter, found', [('m', '0 solved, 4 failed'), ('s', '4 solved, 0 failed')]
)
def test_an_unjudged_completion_neither_solves_nor_fails(letter, found, by):
  def collect_unjudged(records):
    rollout = collect(records)
    batch = rollout.batch
    fields = {by: getattr(batch, by).copy()}
    # Where another reward has judged it, only its part of the first one says
    # that this has not. With 'm' it would be the only right one.
    fields[by][:, 1] = False if by == 'valid' else np.nan
    reward = batch.reward.copy()
    reward[:, 1] = reward[:, 0]
    batch = batch._replace(reward=reward, **fields)
    return rollout._replace(batch=batch)

  with pytest.raises(dynamic_sampling.NothingToLearn, match=found):
    dynamic_sampling.draw(
      PromptState(), stream_of(letter), 1, 2, collect_unjudged, 1
    )


def test_a_supply_goes_through_json_and_goes_on_the_same():
  letters, options = 'msmfmmsm', {'number': 3, 'rounds': 3, 'retire': True}
  _, state, _ = draw(letters, **options)
  assert state.surplus and state.retired
  values = dynamic_sampling.to_json(state)
  surplus = values.pop('surplus')  # beside the JSON of a checkpoint
  values = json.loads(json.dumps(values))
  again = dynamic_sampling.from_json({**values, 'surplus': surplus})
  assert again.retired == state.retired
  assert again.position == state.position
  first, after_first, _ = draw(letters, state, **options)
  second, after_second, _ = draw(letters, again, **options)
  assert first.prompt_texts == second.prompt_texts
  for a, b in zip(first.batch, second.batch, strict=True):
    if isinstance(a, np.ndarray):
      np.testing.assert_array_equal(a, b)
      assert a.dtype == b.dtype
  assert dynamic_sampling.to_json(after_first) == dynamic_sampling.to_json(
    after_second
  )


def test_widths_are_joined_and_reward_parts_are_not_widened():
  records = [{'prompt': 'm', 'index': i} for i in range(2)]
  narrow, wide = collect(records, 1), collect(records, 3)  # T = K = 1 in one
  tops = lambda one: types.with_extras(
    one, {'tops': np.ones((*one.batch.mask.shape, 2), np.int32)}
  )
  joined = concatenate([tops(narrow), tops(wide)])
  assert joined.batch.extras['tops'].shape == (4, GROUP, 3, 2)
  assert joined.batch.extras['tops'].sum() == 2 * GROUP * (1 + 3) * 2
  assert joined.batch.tokens.shape == (4, GROUP, 3)
  assert joined.batch.reward_parts.shape == (4, GROUP, 1)
  assert not joined.batch.mask[:2, :, 1:].any()
  assert joined.batch.extras['log_kept'].shape == (4, GROUP, 3)
  np.testing.assert_array_equal(
    joined.batch.reward_parts[2:], wide.batch.reward_parts
  )


def test_what_all_know_is_joined_to_what_some_hold(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  records = [{'prompt': 'm', 'index': i} for i in range(3)]
  known = collect(records)
  held = known._replace(holder=np.array([1, 1, 0]))
  assert concatenate([known, known]).holder is None
  joined = concatenate([known, held])
  assert joined.holder.tolist() == [0, 1, 0, 1, 1, 0]


@pytest.mark.quick
def test_what_counts_as_equal_is_what_losses_take_for_equal():
  """Also a rounding error apart, and where nothing or one was judged."""
  rng = np.random.default_rng(0)
  rollout = collect([{'prompt': 's', 'index': i} for i in range(300)])
  apart = rng.integers(0, 60, (300, GROUP)) * np.float32(2**-24)
  reward = rng.normal(size=(300, 1)).astype(np.float32) * (1 + apart)
  valid = rng.random((300, GROUP)) < 0.7
  batch = rollout.batch._replace(reward=reward.astype(np.float32), valid=valid)
  found = dynamic_sampling._uniform(rollout._replace(batch=batch))
  np.testing.assert_array_equal(found, losses.uniform_groups(batch))
  assert 0.2 < found.mean() < 0.9 and not valid.any(axis=1).all()


def test_an_environment_may_ask_another_thing_with_the_same_words():
  one = {'prompt': 'Guess.', 'number': 3, 'index': 1}
  identity = dynamic_sampling._identity
  others = [one | {'index': 2}, one | {'number': 4}, one | {'prompt': 'Go.'}]
  same = [identity(one, True) == identity(other, True) for other in others]
  assert same == [True, False, False]
  same = [identity(one, False) == identity(other, False) for other in others]
  assert same == [True, True, False]
