"""The environment of a run: every field of its config, and what is refused."""

import dataclasses
import json
import sys
import types

import pytest

from grpo_jax import config as config_lib
from grpo_jax import engines
from grpo_jax.environments import calculator
from grpo_jax.environments import formats
from grpo_jax.episodes import play
from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Episode
from grpo_jax.run.build import about
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import names
from tests.data import continuation_test
from tests.data import trap_templates

pytestmark = pytest.mark.quick

TOKENIZER = continuation_test._tokenizer(trap_templates.ALL['separator'].source)
SINGLE = 'tests.run.build.environment_test:single'
GIVEN = {
  'name': SINGLE,
  'kwargs': {'text': 'a'},
  'others': {'other': SINGLE},
  'call_format': 'xml',
  'history': 'template',
  'seed': 'episode',
  'max_turns': 3,
  'episode_tokens': 21,
  'context_tokens': 61,
  'result_tokens': 7,
  'where': 'here',
  'processes': 3,
  'sessions': 5,
  'tool_secs': 1.5,
  'episode_secs': 2.5,
  'memory_limit_gib': 0.5,
  'retries': 2,
  'failed_share': 0.25,
}
READ = {
  'name': lambda spec: spec.played[''][0],
  'kwargs': lambda spec: spec.played[''][1],
  'others': lambda spec: {k: one for k, (one, _) in spec.played.items() if k},
  'call_format': lambda spec: spec.call_format.name,
  'history': lambda spec: 'template' if spec.renders else 'append',
  'seed': lambda spec: 'group' if spec.alike else 'episode',
  'max_turns': lambda spec: spec.limits.turns,
  'episode_tokens': lambda spec: spec.limits.episode_tokens,
  'context_tokens': lambda spec: spec.limits.context_tokens,
  'result_tokens': lambda spec: spec.limits.result_tokens,
  'where': lambda spec: spec.options.where,
  'processes': lambda spec: spec.options.processes,
  'sessions': lambda spec: spec.options.sessions,
  'tool_secs': lambda spec: spec.options.tool_secs,
  'episode_secs': lambda spec: spec.options.episode_secs,
  'memory_limit_gib': lambda spec: spec.options.memory_limit_bytes / 2**30,
  'retries': lambda spec: spec.options.retries,
  'failed_share': lambda spec: spec.failed_share,
}


async def single(policy, example, text='b'):
  return float((await policy.say(text)).text == example['answer'])


def made(**environment):
  data = config_lib.Data(
    chat=True, prompt_buckets=(16, 24), completion_buckets=(32, 64)
  )
  return config_lib.Config(
    data=data, environment=config_lib.Environment(**environment)
  )


def spec_of(config, own=None):
  return build_environment.environment_spec(config, TOKENIZER, own)


def test_every_field_is_read():
  names = {x.name for x in dataclasses.fields(config_lib.Environment)}
  assert names == GIVEN.keys() == READ.keys()
  given, usual = spec_of(made(**GIVEN)), spec_of(made(name=SINGLE))
  for name, read in READ.items():
    assert read(given) == GIVEN[name]
    assert name == 'name' or read(usual) != GIVEN[name], name


def helps(example, base_url, api_key, secret='', text='a'):
  """An agent that does nothing."""


AGENT = {
  'command': 'sh -c true',
  'function': 'tests.run.build.environment_test:helps',
  'kwargs': {'text': 'b'},
  'variables': {'A': 'b'},
  'readable': ('/etc/hosts',),
  'confine': 'no',
  'trains': 'tests.run.build.environment_test:helps',
  'trust_agent': True,
}


def agent(rewards=(), environment=(), **fields):
  more = {'rewards': tuple(map(config_lib.Reward, rewards))} if rewards else {}
  environment = {'name': 'agent', **dict(environment)}
  return config_lib.Config(
    data=made(name=SINGLE).data,
    environment=config_lib.Environment(**environment),
    agent=config_lib.Agent(**fields),
    **more,
  )


@pytest.mark.parametrize('kind', ['command', 'function'])
def test_every_field_of_an_agent_is_given_to_what_plays_it(kind):
  names = {x.name for x in dataclasses.fields(config_lib.Agent)}
  assert names == AGENT.keys()
  other = {
    'command': ('function', 'kwargs'),
    'function': ('command', 'variables', 'readable', 'confine'),
  }
  given = {k: v for k, v in AGENT.items() if k not in other[kind]}
  spec = spec_of(agent(**given))
  name, told = spec.played['']
  assert name == 'agent' and told.items() >= given.items()
  assert not spec.untrusted
  usual = agent(**{kind: AGENT[kind]})
  assert spec_of(usual).untrusted == {''}
  assert all(
    spec_of(usual).played[''][1][k] != AGENT[k] for k in given if k != kind
  )
  assert spec_of(made(name=SINGLE)).untrusted == frozenset()


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: agent(), 'no agent; give one of'),
    (lambda: agent(command='a', function='b'), 'agent.command and agent.func'),
    (lambda: agent(command='a', kwargs={'a': 1}), 'without agent.function'),
    (
      lambda: agent(function='a', variables={'a': 'b'}),
      'without agent.command',
    ),
    (lambda: agent(command='a', variables={'a': 1}), 'must be texts'),
    (
      lambda: agent(command='a', environment={'kwargs': {'a': 1}}),
      'give agent.kwargs',
    ),
    (
      lambda: agent(command='a', rewards=['environment']),
      'an agent would give itself',
    ),
    (
      lambda: dataclasses.replace(
        made(name=SINGLE), agent=config_lib.Agent(command='a')
      ),
      "give environment.name='agent'",
    ),
    (lambda: spec_of(agent(command='no_such_agent -x')), 'no program'),
    (lambda: spec_of(agent(command='"')), 'is no command'),
    (lambda: spec_of(agent(function='no_such.module:f')), 'agent.function'),
    (
      lambda: spec_of(agent(function=SINGLE)),
      'agent.function takes .*; correct one',
    ),
    (lambda: spec_of(agent(command='sh', trains='x:y')), 'agent.trains'),
  ],
)
def test_an_agent_that_cannot_be_played_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_an_agent_that_was_given_in_python_plays_here():
  made = agent(function='<agent helps given in Python>')
  spec_of = build_environment.environment_spec
  spec = spec_of(made, TOKENIZER, agent=helps)
  assert spec is not None and spec.options.where == 'here'
  name, told = spec.played['']
  assert name == 'agent' and told['function'] is helps
  assert spec.untrusted == {''}
  with pytest.raises(ValueError, match='agent.function takes .*; correct one'):
    spec_of(made, TOKENIZER, agent=lambda example: None)


def test_an_agent_needs_the_packages_of_a_server(monkeypatch):
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  with pytest.raises(ValueError, match=r"pip install 'grpo_jax\[server\]'"):
    spec_of(agent(command='sh'))


def test_what_a_config_is_silent_about_follows_from_widths():
  limits = spec_of(made(name=SINGLE)).limits
  assert limits.context_tokens == limits.episode_tokens == 64
  assert (limits.prompt_tokens, limits.turn_tokens) == (24, 5)
  # The template writes no calls.
  assert spec_of(made(name=SINGLE)).call_format.name in formats.NAMES


def test_an_object_is_played_here():
  spec = spec_of(made(name='<environment single given in Python>'), single)
  assert spec.played[''][0] is single and spec.options.where == 'here'


def test_a_chat_that_is_written_anew_may_be_written_otherwise():
  def spec(source, history):
    tokenizer = continuation_test._tokenizer(source)
    config = made(name=SINGLE, history=history)
    return build_environment.environment_spec(config, tokenizer)

  rounds = trap_templates.ROUNDS
  with pytest.raises(ValueError, match="set config.environment.history='temp"):
    spec(rounds, 'append')
  assert spec(rounds, 'template').renders
  two_parts = trap_templates.SEPARATOR.source.replace(
    ' m.content', " ('final ' if m.role == 'assistant' else '') + m.content"
  )
  assert not spec(two_parts, 'append').renders
  with pytest.raises(ValueError, match='is not read as such a turn; set'):
    spec(two_parts, 'template')


def test_without_a_name_there_is_none():
  config = made()
  assert spec_of(config) is None
  assert build_environment.widths(config) == ((16, 24), (32, 64))
  with build_environment.player(None) as player:
    assert player is None


def test_an_engine_reads_all_that_came_before():
  config = made(name=SINGLE)
  assert build_environment.widths(config) == ((64,), (5,))
  wide = dataclasses.replace(config.data, completion_buckets=(1000,))
  config = dataclasses.replace(config, data=wide)
  assert build_environment.widths(config)[0] == (256, 512, 1000)


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      {'rewards': (config_lib.Reward('environment'),)},
      'without environment.name',
    ),
    (
      {'environment': config_lib.Environment(name=SINGLE)},
      'with data.chat=False',
    ),
  ],
)
def test_what_cannot_be_together_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    config_lib.Config(**changes)


def test_an_episode_is_no_longer_than_what_holds_it():
  with pytest.raises(ValueError, match='context_tokens=65 above the largest'):
    made(name=SINGLE, context_tokens=65)


@pytest.mark.parametrize(
  'group, field, value',
  [
    ('sampler', 'stop_strings', ('x',)),
    ('data', 'completion_prefix', 'x'),
    ('data', 'too_long', 'drop'),
  ],
)
def test_what_episodes_cannot_do_is_refused(group, field, value):
  config = made(name=SINGLE)
  changed = dataclasses.replace(getattr(config, group), **{field: value})
  with pytest.raises(ValueError, match=f'{group}.{field}=.*cannot be together'):
    dataclasses.replace(config, **{group: changed})


TOOLBOX = [calculator.calculator]
OTHERS = {'a': SINGLE, 'b': {'name': SINGLE, 'kwargs': {'text': 'c'}}}


def test_a_record_begins_the_environment_that_it_names():
  spec = spec_of(made(name=SINGLE, kwargs={'text': 'x'}, others=OTHERS))
  assert spec.played == {
    '': (SINGLE, {'text': 'x'}),
    'a': (SINGLE, {}),
    'b': (SINGLE, {'text': 'c'}),
  }
  begun = [
    build_environment._begun(spec, {'environment': name, 'index': 3})
    for name in ('a', 'b', '', None)
  ]
  assert begun == ['a', 'b', '', ''] and not build_environment._begun(spec, {})
  with pytest.raises(ValueError, match='record 3 cannot.* begins .*bb.*a, b;'):
    build_environment._begun(spec, {'environment': 'bb', 'index': 3})
  alone = spec_of(made(name=SINGLE))
  assert not build_environment._begun(alone, {'environment': 'of the world'})


@pytest.mark.parametrize(
  'other, message',
  [
    (3, r"others\['a'\]=3; give a name such as"),
    ({'kwargs': {}}, 'give a name such as'),
    ({'name': SINGLE, 'seed': 3}, 'give a name such as'),
    ('no.such.module:Thing', r"others\['a'\] cannot be used: .*no.such.module"),
    ({'name': SINGLE, 'kwargs': {'wrong': 3}}, 'cannot be used: .*wrong'),
  ],
)
def test_another_environment_that_cannot_be_used_is_refused(other, message):
  with pytest.raises(ValueError, match=message):
    spec_of(made(name=SINGLE, others={'a': other}))


@pytest.mark.parametrize('known, ends', [('a', ''), ('c', "'c'.*has a, b")])
def test_records_are_looked_at_before_the_first_rollout(known, ends, tmp_path):
  path = tmp_path / 'some.jsonl'
  rows = [
    {'prompt': 'x', 'answer': '3', 'environment': name} for name in ('a', known)
  ]
  path.write_text('\n'.join(map(json.dumps, rows)))
  config = made(name=SINGLE, others=OTHERS)
  fields = dataclasses.replace(config.data, train=str(path), heldout='')
  config = dataclasses.replace(config, data=fields)
  widen = lambda: build_data.with_widths(config, TOKENIZER, checks=True)
  if not ends:
    assert widen().data == fields
    return
  with pytest.raises(ValueError, match=f'Line 2 of .*{ends}'):
    widen()


def test_demonstrations_are_measured_where_a_width_is_open(tmp_path):
  path = tmp_path / 'shown.jsonl'
  row = {'prompt': 'ab ' * 200, 'answer': 'cd ' * 200}
  path.write_text(json.dumps(row))
  warm_up = config_lib.WarmUp(steps=1, demonstrations=str(path))
  config = dataclasses.replace(made(name=SINGLE), warm_up=warm_up)
  open_ = dataclasses.replace(
    config.data, prompt_buckets=(), completion_buckets=()
  )
  widened = build_data.with_widths(
    dataclasses.replace(config, data=open_), TOKENIZER
  ).data
  assert widened.prompt_buckets[0] > 256
  assert widened.completion_buckets[0] > 256 + 4 * 5
  # Given widths are only checked, and by a run alone.
  assert build_data.with_widths(config, TOKENIZER) == config
  with pytest.raises(ValueError, match='needs .* tokens, but the largest'):
    build_data.with_widths(config, TOKENIZER, checks=True)


def test_an_environment_that_is_not_there_is_refused():
  with pytest.raises(ValueError, match='no.such.module'):
    spec_of(made(name='no.such.module:Thing'))


@pytest.mark.parametrize('failed, ends', [(2, False), (3, True)])
def test_more_failures_than_the_config_allows_end_a_run(failed, ends):
  spec = types.SimpleNamespace(failed_share=0.5)
  said = ({'by': 'policy', 'content': 'x'},)
  nothing: list = [None] * len(Episode._fields)
  episode = Episode(*nothing)._replace(finish=engines.ENDED)
  accounts = [
    Account(said, failure='raised X' * (n < failed)) for n in range(4)
  ]
  played = [
    [play.Played(episode._replace(account=account), None)]
    for account in accounts
  ]
  if not ends:
    build_environment.check_failures(spec, played)
    return
  with pytest.raises(ValueError, match='3 of 4 episodes have failed.*raised X'):
    build_environment.check_failures(spec, played)


def test_episodes_without_a_turn_end_a_run():
  spec = spec_of(made(name=SINGLE, context_tokens=9))
  nothing: list = [None] * len(Episode._fields)
  one = Episode(*nothing)._replace(account=Account(ended='context'))
  with pytest.raises(
    ValueError, match="'context'.*context_tokens=9, give more"
  ):
    build_environment.check_failures(spec, [[play.Played(one, 0.0)]])


def called(text):
  """A tokenizer whose template writes a call as a text says."""
  source = trap_templates.ALL['tools_in_system'].source
  calls = "'\\n<tool_call>' ~ call.function | tojson ~ '</tool_call>'"
  assert calls in source
  return continuation_test._tokenizer(source.replace(calls, text))


@pytest.mark.parametrize(
  'text, format',
  [
    ("'<tool_call>' ~ call.function | tojson ~ '</tool_call>'", 'hermes'),
    (
      "'<tool_call><function=' ~ call.function.name ~ '><parameter=x>'"
      " ~ call.function.arguments.x ~ '</parameter></function></tool_call>'",
      'xml',
    ),
    # Marks that are known, around what is not.
    (
      "'<tool_call>' ~ call.function.name ~ ': '"
      " ~ call.function.arguments | tojson ~ '</tool_call>'",
      '',
    ),
    ("'(' ~ call.function | tojson ~ ')'", ''),
  ],
)
def test_a_format_is_that_of_the_template_which_it_reads_back(text, format):
  tools = trap_templates.TOOLS
  if format:
    found = build_environment._call_format('auto', called(text), [tools])
    assert found.name == format
    return
  with pytest.raises(ValueError, match='add.* not known here; give config.env'):
    build_environment._call_format('auto', called(text), [tools])
  # A user may know better.
  found = build_environment._call_format('hermes', called(text), [tools])
  assert found.name == 'hermes'


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'name': 'calculater'}, "'calculater'.*calculator"),
    ({'name': 'tests.run.build.environment_test:singel'}, 'single'),
    ({'name': 'no.such.module:Thing'}, 'no.such'),
    ({'name': SINGLE, 'others': {'a': 'tests.lab.gone:it'}}, 'tests.lab.gone'),
    ({'name': SINGLE, 'others': {'a': {'name': 'pyton'}}}, "'pyton'.*python"),
  ],
)
def test_a_misspelt_name_is_told_before_anything_is_built(fields, message):
  with pytest.raises(ValueError, match=message):
    names.check(made(**fields))


def test_names_that_are_there_are_taken():
  names.check(made(name=SINGLE, others=OTHERS | {'c': 'textarena:Wordle-v0'}))
  names.check(made(name='calculator'))
  names.check(made(name=f'{__name__}:TOOLBOX'))
  (said,) = [
    line
    for line in about.facts(made(name=SINGLE, others=OTHERS), 'x')
    if 'episodes ' in line and 'turns' in line and 'single' in line
  ]
  assert 'a, b, up to 16 turns' in said
