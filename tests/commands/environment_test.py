"""`grpo-jax environment`: what it finds, what it prints, what it refuses."""

import json

import pytest

from grpo_jax.commands import environment
from grpo_jax.commands.arguments import Arguments
from grpo_jax.config import default
from grpo_jax.environments import schemas
from grpo_jax.environments import survey as survey_lib
from grpo_jax.environments.events import Say
from grpo_jax.environments.random_policy import RandomPolicy
from tests import chat_templates
from tests import cli
from tests import hf_folder

MODULE = 'tests.commands.environments_to_survey:'


def found(name, **ways):
  """As the command finds it, but in this process, which is faster."""
  ways = survey_lib.Ways(where='here', **ways)
  report = survey_lib.survey(f'{MODULE}{name}', {}, ways)
  return environment.to_json(report, environment.reading(report, None))


def test_a_person_reads_what_an_environment_is_like():
  done = cli.call('environment', f'{MODULE}Countdown', '--episodes=3')
  assert done.returncode == 0 and done.stderr == '', done.stderr
  lines = [' '.join(line.split()) for line in done.stdout.splitlines()]
  assert lines[0] == f'{MODULE}Countdown, 3 episodes of a random policy'
  # It says what is in quotes, so it counts down.
  assert 'turns of an episode 3 3 3 3' in lines
  assert 'reward of a turn 1 1 1 1' in lines
  assert 'reward of an episode 3 3 3 3' in lines
  assert '3 of 3 ended by themselves' in lines
  assert 'same seed, same start: yes, 3 times' in lines
  assert 'same seed, same episode: yes' in lines
  assert 'same alone and beside others: yes, 3 at once' in lines
  assert '| user: Count down from 3, with "3" first.' in lines
  assert max(map(len, done.stdout.splitlines())) <= 80


def test_what_is_no_function_of_the_seed_is_told():
  report = found('Unseeded', episodes=2, max_turns=2)
  assert report['repeated'] == 2 and report['starts'] == 2
  assert [one['turn'] for one in report['differ_alone']] == [0, 0]
  assert report['ended'] == [{'how': 'turns', 'seeds': [0, 1]}]
  assert report['numbers']['turns of an episode']['most'] == 2


def test_instances_that_share_something_are_told():
  report = found('Shares', episodes=2)
  assert report['differ_alone'] == []
  assert report['beside'] == 2 and report['differ_beside']
  one = report['differ_beside'][0]
  assert one['turn'] >= 1 and one['first'] != one['other']


def test_tools_are_called_with_what_fits_and_episodes_that_fail_are_counted():
  report = found('Shop', episodes=2, seed=5)
  assert report['tool_calls'] >= 2 and report['tool_errors'] == 0
  assert [tool['function']['name'] for tool in report['tools']] == ['buy']
  assert report['starts'] == 2  # the seeds are 5 and 6
  report = found('FailsAtOddSeeds', episodes=4, max_turns=1)
  failed = {'how': "failed: raised KeyError: 'gold'", 'seeds': [1, 3]}
  assert failed in report['ended'] and report['beside'] == 2


@pytest.mark.parametrize(
  'given, words',
  [
    (['Raises'], "3 of 3: raised KeyError: 'gold'; correct"),
    (['Sleeps', '--episodes=1', '--episode_secs=.2'], 'time limit: more than'),
    pytest.param(
      ['Hangs', '--episodes=1', '--episode_secs=.2'],
      'time limit: more than',
      marks=pytest.mark.long,
    ),
    (['Nothing'], 'Nothing'),
    (['Countdown', '--kwargs={"end": 1}'], "unexpected keyword argument 'end'"),
    (['Countdown', '--kwargs=[1]'], '--kwargs=[1] is no JSON object'),
    (['Countdown', '--episodes=0'], '--episodes=0; give 1 or more'),
    (['Countdown', '--replies=nowhere.txt'], 'nowhere.txt cannot be used'),
    (['Countdown', '--turns=3'], '--turns, which it does not read'),
  ],
)
def test_what_cannot_be_played_is_refused_in_a_sentence(given, words):
  name, *flags = given
  cli.assert_refused(cli.call('environment', f'{MODULE}{name}', *flags), words)


def test_the_policy_depends_on_its_seed_and_on_what_it_read():
  say = Say(0, 0, ({'role': 'user', 'content': "'[a]' or '[b]'"},), (), None)
  said = [RandomPolicy(seed).answer(say).text for seed in range(20)]
  assert said == [RandomPolicy(seed).answer(say).text for seed in range(20)]
  assert {*said} == {'[a]', '[b]'}
  assert RandomPolicy(0, ['x']).answer(say).text == 'x'
  plain = say._replace(messages=({'role': 'user', 'content': "don't"},))
  assert RandomPolicy(0).answer(plain).text == 'ok'
  policy = RandomPolicy(0)
  policy.answer(say)  # what was offered there holds in later turns
  assert policy.answer(plain).text in ('[a]', '[b]')


def test_drawn_arguments_fit_their_schema():
  parameters = {
    'type': 'object',
    'properties': {
      'whole': {'type': 'integer', 'minimum': 3, 'exclusiveMaximum': 5},
      'part': {'type': ['number', 'null']},
      'kind': {'enum': ['a', 'b']},
      'several': {'type': 'array', 'items': {'$ref': '#/$defs/one'}},
      'either': {'anyOf': [{'type': 'boolean'}, {'type': 'string'}]},
      'free': {},
    },
    'required': ['whole', 'several'],
    '$defs': {'one': {'type': 'object', 'properties': {'x': {'const': 1}}}},
  }
  tool = {
    'type': 'function',
    'function': {'name': 'f', 'parameters': parameters},
  }
  seen = set()
  for seed in range(100):
    say = Say(0, 0, ({'role': 'user', 'content': 'go'},), (tool,), None)
    (call,) = RandomPolicy(seed).answer(say).calls
    assert call.arguments is not None
    fitted, problem = schemas.fit(call.arguments, parameters, 'f')
    assert not problem and fitted == json.loads(call.raw)
    assert call.arguments['whole'] in (3, 4)
    assert all(one in ({}, {'x': 1}) for one in call.arguments['several'])
    seen |= {*call.arguments}
  assert seen == {*parameters['properties']}


def test_a_difference_is_that_of_messages_or_of_the_end():
  turn = survey_lib.Turn(0, ({'role': 'user', 'content': 'a'},), 0.1)
  one = survey_lib.Played(4, (turn, turn), reward=1.0)
  assert survey_lib.difference(one, one) is None
  slower = one._replace(turns=(turn, turn._replace(secs=9.0)))
  assert survey_lib.difference(one, slower) is None
  other = turn._replace(messages=({'role': 'tool', 'content': 'a'},))
  found = survey_lib.difference(one, one._replace(turns=(turn, other)))
  assert found is not None and (found.seed, found.turn) == (4, 1)
  assert found.first != found.other
  found = survey_lib.difference(one, one._replace(reward=0.5))
  assert found == (4, 2, 'reward 1', 'reward 0.5')
  found = survey_lib.difference(one, one._replace(turns=(turn,)))
  assert found == (4, 1, 'a', 'its end (reward 1)')


def test_replies_and_records_and_a_tokenizer_come_from_files(tmp_path):
  (tmp_path / 'replies.txt').write_text('9\n\n')
  done = cli.call(
    *('environment', f'{MODULE}Countdown', '--episodes=2', cli.CONFIG),
    *(f'--replies={tmp_path}/replies.txt', '--kwargs={"start": 9}'),
    '--tokenizer=arithmetic',
  )
  assert done.returncode == 0, done.stderr
  lines = [' '.join(line.split()) for line in done.stdout.splitlines()]
  assert 'turns of an episode 2 2 2 2' in lines  # the second 9 is wrong
  assert 'reward of an episode 0 0 0 0' in lines
  assert 'tokens of an observation none' in lines  # it has digits alone
  assert any('has no chat template' in line for line in lines)


def _with_one_turn(*tools):
  """What was found of an environment that says 'Go on.'."""
  turn = survey_lib.Turn(0, ({'role': 'user', 'content': 'Go on.'},), 0.1)
  return survey_lib.Survey('x', tools, (survey_lib.Played(0, (turn,)),), (), ())


@pytest.mark.parametrize('with_tools', [False, True])
def test_the_chat_template_is_tried(with_tools, tmp_path):
  hf_folder.write_tokenizer(tmp_path, chat_templates.SMOLLM2)
  tool = {'name': 'look', 'description': '', 'parameters': {'type': 'object'}}
  tools = ({'type': 'function', 'function': tool},) * with_tools
  report = _with_one_turn(*tools)
  tokenizer = environment.read_tokenizer(str(tmp_path))
  read = environment.reading(report, tokenizer)
  parts = environment.parts(report, read, tokenizer, 80)
  assert '  | <|im_start|>user' in parts and read['problem'] == ''
  assert f'{len(read["ids"])} tokens, by the chat template' in f'{parts}'
  assert parts.count('The template can go on behind a turn.') == 1
  # The template reads no tools: a run gives them as a text, and so does this.
  assert ('"name": "look"' in '\n'.join(map(str, parts))) == with_tools


def test_the_chat_template_is_tried_as_the_run_goes_on(tmp_path):
  numbered = chat_templates.SMOLLM2.replace(
    "message['role'] +", "message['role'] + loop.index | string +"
  )
  assert numbered != chat_templates.SMOLLM2
  hf_folder.write_tokenizer(tmp_path, numbered)
  report = _with_one_turn()
  tokenizer = environment.read_tokenizer(str(tmp_path))
  refused = environment.reading(report, tokenizer)
  assert "history='template'" in refused['problem']
  parts = environment.parts(report, refused, tokenizer, 80)
  assert any('cannot be used' in str(part) for part in parts)
  # Where the whole chat is written anew each turn, it may depend on all of it.
  assert environment.reading(report, tokenizer, False)['problem'] == ''


def test_a_config_says_how_the_run_goes_on():
  config = default()
  config.environment.name = f'{MODULE}Countdown'
  for history in ('append', 'template'):
    config.environment.history = history
    arguments = Arguments(
      name=None, kwargs='{}', max_turns=None, tokenizer=None, config=config
    )
    assert environment._asked(arguments).appends == (history == 'append')


def test_what_is_told_is_what_differs_and_what_goes_wrong():
  ways = survey_lib.Ways(episodes=3, where='here')
  report = survey_lib.survey(f'{MODULE}Broken', {}, ways)
  parts = environment.parts(report, environment.reading(report, None), None, 80)
  lines = [part for part in parts if isinstance(part, str)]
  (first,) = [line for line in lines if 'at first: ' in line]
  (then,) = [line for line in lines if '    then: ' in line]
  assert "...'aaaa" in first and '0.' in first and len(first) < 150
  assert first.partition(': ')[2] != then.partition(': ')[2]
  calls = sum(one.tool_calls for one in report.alone)
  assert f'{calls} calls of tools, {calls} of which went wrong' in lines
  (wrong,) = [line for line in lines if ' of them: Error: ' in line]
  assert wrong.startswith(f'  {calls} of them') and 'gold' in wrong


def test_a_config_names_the_environment(tmp_path):
  hf_folder.write_tokenizer(tmp_path / 'words', chat_templates.QWEN3)
  (tmp_path / 'mine.py').write_text(
    'from grpo_jax.config import default\n\n\n'
    'def get_config():\n'
    '  config = default()\n'
    f"  config.environment.name = '{MODULE}Countdown'\n"
    '  config.environment.max_turns = 2\n'
    f"  config.data.tokenizer = '{tmp_path / 'words'}'\n"
    "  config.data.train = 'episodes'\n"
    '  config.data.chat = True\n'
    "  config.rewards = [{'name': 'environment'}]\n"
    '  return config\n'
  )
  flags = f'--config={tmp_path / "mine.py"}', '--episodes=2', '--json'
  report = json.loads(cli.call('environment', *flags).stdout)
  assert report['name'] == f'{MODULE}Countdown'
  assert report['ended'] == [{'how': 'turns', 'seeds': [0, 1]}]
  assert report['numbers']['tokens of an observation']['least'] > 0
  more = cli.call('environment', *flags, '--max_turns=3')
  assert json.loads(more.stdout)['ended'] != report['ended']


@pytest.mark.parametrize(
  'flags, words',
  [
    ((), 'environment was given no NAME; give one'),
    ((f'{MODULE}Countdown', 'more'), 'environment got more, which it does not'),
    (('--config=configs/arithmetic.py',), 'a config without environment.name'),
  ],
)
def test_nothing_to_play_is_refused(flags, words):
  cli.assert_refused(cli.call('environment', *flags), words)
