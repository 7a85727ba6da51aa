"""What a person is told of the episodes of a run, which a replay learns."""

import types
from typing import Any

import numpy as np
import pytest

from grpo_jax.episodes.types import Account
from grpo_jax.monitor import alarms as alarms_lib
from grpo_jax.monitor import table
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run import reports
from grpo_jax.run import watching
from grpo_jax.run.build import placing
from tests import runs
from tests.episodes import made_episodes as made
from tests.rollouts import parquet_test

PLAYED = {
  'rewards': [{'name': 'environment'}],
  'environment.name': 'in Python',
  'environment.max_turns': 4,
  'environment.failed_share': 1.0,
  'data.chat': True,
  'data.prompt_buckets': (64,),
  'data.completion_buckets': (256,),
  'sampler.max_tokens': 12,
  'optim.lr': 1e-2,
  'data.heldout': '',
  'steps': 3,
}


async def lengths(policy, example, seed):
  """Four turns at most, rewarded for what they are; some fail, some branch."""
  del example, seed
  said = 'guess'
  for _ in range(4):
    reply = await policy.say(said)
    policy.reward(0.1 * (ord(reply.text[:1] or 'a') % 7))
    if reply.text and reply.text[0] in '12345678':
      raise KeyError('no such room')
    if reply.tokens % 3 == 0:
      other = policy.fork()
      await other.say('was that wise')
      other.reward(0.01)
    said = 'more'
  return 1.0


def with_failures(*failures):
  """A rollout whose episodes have failed for these reasons, '' for none."""
  accounts = [
    Account(failure=one, ended='failed' if one else 'done') for one in failures
  ]
  rollout = parquet_test.make(1, len(failures), 3, ('environment', 'b'))
  return rollout._replace(accounts=[accounts])


def test_failed_episodes_are_told_with_the_most_frequent_reason():
  failures = watching.Failures()
  some = with_failures('', 'raised A', 'raised B', 'raised A')
  (said,) = failures.warnings(some, {})
  assert said.startswith('3 of the 4 episodes of this rollout have failed, 2')
  assert 'by: raised A;' in said and 'env_failed' in said
  # They are told again after ten rollouts without any.
  well = with_failures('', '', '', '')
  for rollout in (some, *[well] * 9, some, *[well] * 10):
    assert not failures.warnings(rollout, {})
  assert failures.warnings(with_failures('raised B', ''), {})
  assert not watching.Failures().warnings(well, {})
  assert not watching.Failures().warnings(parquet_test.make(), {})


@pytest.mark.parametrize(
  'shares, words',
  [
    ({'ended/turns': 0.75, 'ended/length': 0.25}, 'environment.max_turns'),
    ({'ended/length': 1.0, 'ended/turns': 0.0}, 'sampler.max_tokens'),
    ({'ended/tokens': 1.0}, 'environment.episode_tokens'),
    ({'ended/context': 1.0}, 'environment.context_tokens and data.completion'),
  ],
)
def test_the_alarm_of_cut_episodes_names_the_limit_that_most_met(shares, words):
  alarms = alarms_lib.Alarms(alarms_lib.Limits())
  (said,) = alarms({'truncated': 1.0, **shares})
  share = max(shares.values())
  assert f'of the episodes were cut, {share:.1%} at {words}' in said
  assert f'raise {words}' in said and len(said) < 200


def test_nothing_is_learned_if_every_episode_has_failed():
  alarms = alarms_lib.Alarms(alarms_lib.Limits())
  (said,) = alarms({'judged': 0.0, 'env_failed': 1.0})
  assert said.endswith('every episode has failed; look at the environment.')
  (said,) = alarms_lib.Alarms(alarms_lib.Limits())({'judged': 0.0})
  assert 'look at the reward functions' in said


def test_the_terminal_shows_what_there_is_of_episodes():
  measured = {
    'turns_mean': 2.5, 'tool_errors': 0.0, 'ended/done': 0.5,
    'ended/turns': 0.25, 'ended/length': 0.0, 'env_failed': 0.25,
  }  # fmt: skip
  shown = table.groups(measured, {})
  labels = [row.label for row in shown['episodes']]
  assert labels == [
    'turns of an episode', 'ended by environment', 'cut at max_turns',
  ]  # fmt: skip
  (failed,) = shown['problems']
  assert (failed.label, failed.value) == ('episodes failed', '25')
  assert 'episodes' not in table.groups({'reward': 1.0}, {})


def samples_of(rollout):
  """The samples of a rollout, of a run that writes nothing."""
  session: Any = types.SimpleNamespace(
    run=types.SimpleNamespace(
      keep=types.SimpleNamespace(completions_every_steps=0, samples=2)
    ),
    peers=types.SimpleNamespace(exchange=lambda one: [one]),
  )
  return reports.keep_completions(session, rollout, 1)


def test_a_sample_of_an_episode_shows_its_turns_in_short():
  rollout = made.played(made.saying('1', '9'), records=made.RECORDS)
  (first, second) = samples_of(rollout)
  assert first.prompt == 'Guess the number: it is 1 to 9.'
  assert first.completion == '1 | more | 9 | less | 9 | less | 9 [turns]'
  assert first.reward == -1 and first == second
  ((fails,), _) = [samples_of(made.played(made.saying('8'))), None]
  assert fails.completion.startswith('8 [failed: raised KeyError')
  assert np.isnan(fails.reward)
  single = samples_of(parquet_test.make())
  assert single[0].completion.startswith('ö 0 0')


def test_an_episode_that_has_not_begun_shows_its_record():
  begun = reports.episode_in_short(Account(ended='failed', failure='x'), 'rec')
  assert begun == ('rec', '[failed: x]')
  both = [{'by': 'environment', 'content': x} for x in ('rules', 'go')]
  said = Account((*both, {'by': 'policy', 'content': 'a'}))
  assert reports.episode_in_short(said, 'rec') == ('go', 'a')
  parts = ({'by': 'environment', 'content': [{'text': 'a'}]},)
  assert reports.episode_in_short(Account(parts), 'r') == (
    '[{"text": "a"}]',
    '',
  )


@pytest.mark.long
@pytest.mark.usefixtures('shared_programs')
def test_a_replay_of_episodes_learns_the_same_bits(tmp_path, capsys):
  config, objects = placing.place(
    runs.small(**PLAYED), environment=lengths, tokenizer=made.TOKENIZER
  )
  completions = tmp_path / 'run' / 'completions'
  loop.train(config, tmp_path / 'run', objects=objects)
  loop.train(config, tmp_path / 'again', replay=completions, objects=objects)
  said = capsys.readouterr().err
  (step, arrays, _), (_, others, _) = map(
    runs.saved, (tmp_path / 'run', tmp_path / 'again')
  )
  assert step == config.steps and arrays.keys() == others.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)
  files = [
    parquet.files(tmp_path / x / 'completions') for x in ('run', 'again')
  ]
  assert len(files[0]) == config.steps
  for file, other in zip(*files, strict=True):
    assert file.read_bytes() == other.read_bytes()
  # So that it says something: of all kinds there are some.
  rollouts = [parquet.read(file) for file in files[0]]
  told = [x for one in rollouts for group in one.accounts for x in group]
  assert {'turns', 'failed', 'length'} <= {one.ended for one in told}
  assert any(one.previous is not None for one in rollouts)
  assert max(one.turns for one in told) > 2
  assert any(
    record.get('grad_norm') for record in runs.records(tmp_path / 'run')
  )
  assert 'have failed' in said and 'no such room' in said
  assert ' | more | ' in said or '[length]' in said
  lines, again = (
    [runs.without_times(x) for x in runs.records(tmp_path / folder)]
    for folder in ('run', 'again')
  )
  assert lines == again
