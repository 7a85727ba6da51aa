"""What is told of an episode: who said what, what it earned, how it ended."""

import json

import numpy as np
import pytest

from grpo_jax.environments.tools import tool
from grpo_jax.episodes import play
from grpo_jax.episodes import transcript
from grpo_jax.episodes import types
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import rollout_metrics
from tests.data import continuation_test
from tests.data import trap_templates
from tests.episodes import made_episodes as made
from tests.rollouts import parquet_test

pytestmark = pytest.mark.quick

FIRST = {'role': 'user', 'content': 'Guess the number: it is 1 to 9.'}
RIGHT, FAILS = made.saying('1', '3'), made.saying('8')
FORKS, LATE = made.saying('2', '4', '9'), made.saying('9')


@pytest.fixture(scope='module')
def rollout():
  return made.played(RIGHT, FAILS, FORKS, LATE)


def by_environment(text, **more):
  return {'role': 'user', 'content': text, 'by': 'environment', **more}


def by_policy(text, turn, **more):
  said = {'role': 'assistant', 'content': text, 'by': 'policy', 'turn': turn}
  return {**said, **more}


def test_messages_are_those_that_were_read_and_written(rollout):
  right, fails, forks, late = rollout.accounts[0]
  assert right.messages == (
    {**FIRST, 'by': 'environment'},
    by_policy('1', 0),
    by_environment('more'),
    by_policy('3', 1),
  )
  assert right.turn_rewards == (-0.25, 0) and right.ended == 'done'
  assert right.turns == 2 and right.failure == '' and right.secs >= 0
  assert fails.messages[1:] == (by_policy('8', 0),)
  assert fails.ended == 'failed' and 'no such room' in fails.failure
  assert late.ended == 'turns' and late.turns == 4 and late.failure == ''


def test_a_branch_is_told_behind_its_trunk_with_its_own_turns(rollout):
  forks = rollout.accounts[0][2]
  branch = {'context': [1, 1]}
  texts = ['4', '9']  # the trunk goes on to the limit
  assert [one['content'] for one in forks.messages if 'context' not in one] == [
    FIRST['content'], '2', 'more', *texts[:1], 'less', texts[1],
  ]  # fmt: skip
  assert forks.messages[-2:] == (
    by_environment('was that wise', **branch),
    by_policy('4', 3, **branch),
  )
  # The branch has its reward, whenever it was drawn.
  tenth = float(np.float32(0.1))
  assert forks.turn_rewards == (-0.25, -0.25, -0.25, tenth)
  chosen = rollout.batch.mask[0, 2] & (rollout.batch.extras['turn'][0, 2] == 3)
  ids = rollout.batch.tokens[0, 2][chosen]
  assert made.TOKENIZER.decode_whole(ids) == '4' + made.END


def test_branches_are_told_in_the_order_of_the_tree():
  tree = transcript.Transcript(np.zeros(2, np.uint32))

  def say(path, text):
    tree.read(path, [4], [{'role': 'user', 'content': text}])

  say((), 'trunk')
  first, second = tree.fork(()), tree.fork(())
  late = tree.fork(first)  # made last, and stands in the midst
  for path in (second, late, first):
    say(path, str(path))
  told = [one['content'] for one in transcript.messages(tree)]
  assert told == ['trunk', str(first), str(late), str(second)]


def test_all_that_the_policy_wrote_is_told_but_ends():
  said = made.saying('<|im_start|>a 3')
  (account,) = made.played(said).accounts[0]
  assert account.messages[1]['content'] == '<|im_start|>a 3'


def test_what_a_tool_said_is_told_as_it_was_read_and_calls_are_counted():
  call = '<tool_call>{"name": "%s", "arguments": {"text": "%s"}}</tool_call>'

  @tool
  def twice(text: str) -> str:
    """Says it twice.

    Args:
      text: What to say.
    """
    return 2 * text

  tokenizer = continuation_test._made(trap_templates.ALL['tools_in_system'])
  answer = made.saying(
    call % ('twice', 'ab'), call % ('once', 'ab'), call[:20] + '!</tool_call>',
    'no', tokenizer=tokenizer,
  )  # fmt: skip
  ((found,),) = made.played(
    answer,
    environment=twice,
    tokenizer=tokenizer,
    limits=play.Limits(9, 200, 900, 2000),
  ).accounts
  results = [x for x in found.messages if x['role'] == 'tool']
  assert results[0]['content'] == 'abab' and results[0]['by'] == 'environment'
  assert results[1]['content'].startswith('Error:')
  # What cannot be read is a call too, which went wrong.
  assert (found.tool_calls, found.tool_errors) == (3, 2)
  assert found.parse_errors == 0 and found.ended == 'done'


def test_groups_are_cut_and_joined_with_what_is_told_of_them(rollout):
  two = made.played(RIGHT, FAILS, FORKS, LATE, records=made.RECORDS)
  some = types.select(two, np.array([1]))
  assert some.accounts == two.accounts[1:]
  both = types.concatenate([some, rollout])
  assert both.accounts == [*some.accounts, *rollout.accounts]
  plain = parquet_test.make(1, 4, 3, ('environment', 'b'))
  assert plain.accounts == ()


def test_metrics_count_what_happened(rollout):
  found = rollout_metrics.metrics_of_episodes(rollout)
  assert found.pop('env_secs_max') >= found.pop('env_secs_p50') >= 0
  drawn = np.array([2 + 2, 4 * 2, 4 * 2])  # without the one that has failed
  whole = rollout.length[0, [0, 2, 3]] + len(rollout.prompts[0])
  assert found == {
    'turns_mean': pytest.approx(10 / 3),
    'turns_max': 4,
    'branches': pytest.approx(1 / 3),  # one has a fork
    'episode_tokens': pytest.approx(20 / 3),
    'context_share': pytest.approx(1 - drawn.sum() / whole.sum()),
    'tool_calls': 0,
    'tool_errors': 0,
    'parse_errors': 0,
    'ended/done': 0.25,
    'ended/end': 0,
    'ended/length': 0,
    'ended/turns': 0.5,
    'ended/tokens': 0,
    'ended/context': 0,
    'env_failed': 0.25,
  }
  every = rollout_metrics.metrics_of_rollout(rollout, 3, 1.0)
  assert found.items() <= every.items()


def test_tools_are_counted_for_each_episode(rollout):
  row = [
    types.Account(tool_calls=4, tool_errors=1, secs=1.0),
    types.Account(ended='failed', failure='x', tool_calls=99, secs=99.0),
    types.Account(parse_errors=3, secs=3.0, counts={'retries': 6}),
    types.Account(ended='end', tool_errors=2, secs=8.0),
  ]
  told = rollout._replace(accounts=[row])
  found = rollout_metrics.metrics_of_episodes(told)
  names = 'tool_calls', 'tool_errors', 'parse_errors'
  assert [found[x] for x in names] == pytest.approx([4 / 3, 1, 1])
  assert (found['env_secs_p50'], found['env_secs_max']) == (3, 8)
  assert (found['ended/done'], found['ended/end']) == (0.5, 0.25)
  shares = [v for name, v in found.items() if name.startswith('ended/')]
  assert sum(shares) + found['env_failed'] == 1
  assert found['counted/retries'] == 2


def test_columns_do_not_depend_on_what_happens(rollout):
  some = rollout_metrics.metrics_of_episodes(made.played(RIGHT)).keys()
  assert rollout_metrics.metrics_of_episodes(rollout).keys() == some
  # But what nobody knows is no 0.
  failed = made.played(FAILS, FAILS)
  found = rollout_metrics.metrics_of_episodes(failed)
  assert found['env_failed'] == 1 and found.keys() < some
  assert not {'turns_mean', 'context_share', 'tool_calls'} & found.keys()
  assert rollout_metrics.metrics_of_episodes(parquet_test.make()) == {}


def without_secs(rollout):
  return [
    [one._replace(secs=0.0) for one in group] for group in rollout.accounts
  ]


def test_a_file_gives_episodes_back_bit_for_bit(rollout):
  at_once = made.played(*[made.saying('3')] * 4)
  assert at_once.accounts[0][0].turn_rewards is None
  rollout = types.concatenate([rollout, at_once])
  rollout.accounts[0][1] = rollout.accounts[0][1]._replace(counts={'x/y': 2})
  data = parquet.to_bytes(rollout, 5)
  again = parquet.from_bytes(data)
  parquet_test.assert_same(again, rollout)
  parquet_test.assert_same_bits(again.previous, rollout.previous)
  assert without_secs(again) == without_secs(rollout)
  assert parquet.to_bytes(again, 5) == data
  # Nothing of it is a matter of the clock.
  slow = [[one._replace(secs=9.0) for one in x] for x in rollout.accounts]
  assert parquet.to_bytes(rollout._replace(accounts=slow), 5) == data


def test_columns_are_what_a_person_expects(rollout, tmp_path):
  pq = pytest.importorskip('pyarrow.parquet')
  path = tmp_path / 'a.parquet'
  parquet.write(path, rollout, 5)
  assert parquet.extras_in(path) >= {'turn', 'log_kept'}
  rows = pq.read_table(path).to_pylist()
  right, fails, _, late = rows
  assert [x['by'] for x in json.loads(right['messages'])] == [
    'environment', 'policy', 'environment', 'policy',
  ]  # fmt: skip
  wrote = [
    token
    for token, is_chosen in zip(right['completion_ids'], right['chosen'])
    if is_chosen
  ]
  assert made.TOKENIZER.decode_whole(wrote) == f'1{made.END}3{made.END}'
  turns = [t for t, c in zip(right['turn'], right['chosen']) if c]
  assert turns == [0, 0, 1, 1] and right['turn_reward'] == [-0.25, 0]
  assert [row['ended'] for row in rows] == ['done', 'failed', 'turns', 'turns']
  assert right['failure'] is None and 'no such room' in fails['failure']
  assert not fails['judged'] and late['truncated'] and right['tool_calls'] == 0
  assert not {'mask', 'extras/turn'} & right.keys()
  (one,) = pq.read_table(path, columns=['turn_reward']).to_pylist()[3:]
  assert one['turn_reward'] == [-0.25] * 4


def test_single_answers_have_no_such_columns(tmp_path):
  pq = pytest.importorskip('pyarrow.parquet')
  path = tmp_path / 'a.parquet'
  parquet.write(path, parquet_test.make(), 5)
  names = pq.read_schema(path).names
  assert 'mask' in names
  assert not {'messages', 'chosen', 'turn', 'ended', 'turn_reward'} & {*names}
