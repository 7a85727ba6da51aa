"""Files of other packages are read as they are, by the fields of the table."""

import contextlib
import json

import pytest

from grpo_jax import data
from grpo_jax.data import _fields
from grpo_jax.data import _messages
from grpo_jax.data import _records
from grpo_jax.data import first_look
from tests import cli
from tests.data import formats
from tests.data import peer_files

WRITE = {
  'jsonl': formats.jsonl,
  'parquet': formats.parquet,
  'array_record': formats.array_record,
  'arrow': formats.arrow,
}
OPEN = {
  'jsonl': lambda path, **fields: data.jsonl_source([path], **fields),
  'parquet': data.parquet_source,
  'array_record': data.array_record_source,
  'arrow': data.arrow_source,
}
CHAT = [{'role': 'user', 'content': 'a'}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def written(folder, form, records):
  # A folder of Arrow has two files, of which each needs a record.
  records = [*records] * (1 + (form == 'arrow' and len(records) < 2))
  return WRITE[form](folder / f'a.{form}', records)


@pytest.mark.parametrize('form', WRITE)
@pytest.mark.parametrize('name', peer_files.SHAPES)
def test_a_file_of_another_package_is_read_unchanged(name, form, tmp_path):
  shape = peer_files.SHAPES[name]
  path = written(tmp_path, form, mixed(shape.records, form))
  fields = {
    key.removeprefix('data.'): value
    for key, value in shape.settings.items()
    if key != 'data.chat'
  }
  found = [*OPEN[form](path, **fields)][: len(shape.records)]
  assert [one['prompt'] for one in found] == [*shape.prompts]
  assert [one['answer'] for one in found] == [*shape.answers]
  for one, record in zip(found, shape.records, strict=True):
    assert record.keys() <= one.keys()
  assert any(isinstance(x, list) for x in shape.prompts) == bool(
    shape.settings.get('data.chat')
  )


def mixed(records, form):
  """Without what a format has no type for: contents of two types."""
  if form not in ('parquet', 'arrow'):
    return records
  are_parts = [
    isinstance(turn['content'], list)
    for record in records
    if isinstance(record.get('messages'), list)
    for turn in record['messages']
  ]
  return records if not any(are_parts) else [as_parts(one) for one in records]


def as_parts(record):
  parts = lambda x: x if isinstance(x, list) else [{'type': 'text', 'text': x}]
  return {
    'messages': [
      {**turn, 'content': parts(turn['content'])} for turn in record['messages']
    ]
  }


@pytest.mark.parametrize('form', WRITE)
@pytest.mark.parametrize('name', peer_files.SHAPES)
def test_a_first_look_finds_the_fields_of_the_table(name, form, tmp_path):
  shape = peer_files.SHAPES[name]
  path = written(tmp_path, form, mixed(shape.records, form))
  found = first_look.look(str(path), 2)
  wanted = dict(shape.settings)
  if name.startswith('JSON'):  # it does not look into lists
    wanted['data.answer_field'] = 'reward_model.ground_truth'
    assert found.columns['reward_model.ground_truth'] == ['72']
  assert found.settings == {'data.train': str(path), **wanted}
  if not name.startswith('JSON'):
    assert [(x.prompt, x.answer) for x in found.records[:1]] == [
      (shape.prompts[0], shape.answers[0])
    ]
  assert not any(one.problem for one in found.records)


def test_the_command_shows_what_is_made_of_a_record(tmp_path):
  shape = peer_files.SHAPES['verl']
  path = formats.parquet(tmp_path / 'gsm8k.parquet', shape.records)
  done = cli.call('data', path)
  assert done.returncode == 0, done.stderr
  lines = [line.strip() for line in done.stdout.splitlines()]
  assert "reward_model.ground_truth  '72'" in {
    '  '.join(line.split(maxsplit=1)) for line in lines
  }
  assert '--config.data.answer_field=reward_model.ground_truth' in lines
  assert '--config.data.chat=True' in lines
  assert f'user: {peer_files.QUESTION!r}' in lines and "answer: '72'" in lines
  done = cli.call('data', path, '--json', '--answer_field=no', '--show=1')
  (record,) = json.loads(done.stdout)['records']
  assert "such as 'reward_model.ground_truth'" in record['problem']
  cli.assert_refused(cli.call('data', path, cli.SMALL), 'was given both')
  cli.assert_refused(
    cli.call('data', cli.SMALL, '--answer_field=a'),
    'give --config.data.answer_field=a',
  )
  cli.assert_refused(cli.call('data', tmp_path / 'no.jsonl'), 'No such file')


@pytest.mark.parametrize(
  'record, fields, words',
  [
    (
      {'question': 'a', 'reward_model': {'ground_truth': 1, 'style': 'x'}},
      {},
      "the columns are 'question', 'reward_model', "
      "'reward_model.ground_truth', 'reward_model.style'; .* such as "
      "'question'",
    ),
    (
      {'prompt': 'a', 'reward_model': {'ground_truth': 1}, 'solutoin': 2},
      {'answer_field': 'solution'},
      "another answer_field, such as 'reward_model.ground_truth' or 'solutoin'",
    ),
    (
      {'prompt': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      {},
      "message 0 holds a part of type 'image_url', but models here read texts",
    ),
    (
      {'instruction': 'a', 'output': 'b'},
      {'prompt_field': 'instruction+inptu', 'answer_field': 'output'},
      "in the field 'instruction.inptu', but it is None",
    ),
  ],
)
def test_what_does_not_fit_is_told_with_columns(
  record, fields, words, tmp_path
):
  path = formats.jsonl(tmp_path / 'a.jsonl', [record])
  with pytest.raises(ValueError, match=f'^Line 1 of .*{words}'):
    data.jsonl_source([path], **fields)


def test_paths_lead_through_dicts_lists_and_json():
  record = {
    'a': {'b': [1, {'c': 2}]},
    'a.b': 3,
    'text': '{"x": [4]}',
    'broken': '{"x',
    'v': {'w.x': 5},
  }
  for field, value in {
    'a.b': 3, 'a.b.0': 1, 'a.b.-1.c': 2, 'text.x.0': 4, 'v.w.x': 5,
    'broken.x': None, 'a.b.2': None, 'a.c': None, 'no': None, '': None,
  }.items():  # fmt: skip
    assert _fields.value_of(record, field) == value, field
  parts = {'a': 'x', 'b': '', 'c': None, 'd': 4, 'e+f': 'own'}
  for field, value in {
    'a+b': 'x', 'a+c': 'x', 'a+a': 'x\n\nx', 'a+d': None, 'a+no': None,
    'e+f': 'own',
  }.items():  # fmt: skip
    assert _fields.prompt_of(parts, field) == value, field


def test_many_columns_are_cut():
  record = {f'c{n}': n for n in range(50)}
  assert _fields.described(record).endswith("'c39' and 10 more")


@pytest.mark.parametrize(
  'value',
  ['text', '[{"role": "user"', '["a"]', '[{"a": 1}, 2]', 7, None, {'a': 1}]
  + ['[{"x": 1}]', '[{"from": "a", "to": "b"}]', ' [{"name": "f"}, {}]'],
)
def test_what_is_no_chat_stays_as_it_is(value):
  assert _messages.read_prompt(value) == value


def test_messages_of_every_kind():
  read = _messages.read_prompt
  # A call as ShareGPT and as OpenAI used to write it.
  call = '{"name": "f", "arguments": {"x": 1}}'
  function = {'name': 'f', 'arguments': {'x': 1}}
  calls = [{'type': 'function', 'function': function}]
  wanted = {'role': 'assistant', 'content': '', 'tool_calls': calls}
  assert read([{'from': 'function_call', 'value': call}]) == [wanted]
  older = {'name': 'f', 'arguments': '{"x": 1}'}
  asked = {'role': 'assistant', 'content': None, 'function_call': older}
  assert read([asked]) == [wanted]
  answered = {'from': 'observation', 'value': '1'}
  assert read([answered]) == [{'role': 'tool', 'content': '1'}]
  # A role that nobody knows stays; arguments that are no JSON too.
  assert read([{'from': 'teacher', 'value': 'a'}])[0]['role'] == 'teacher'
  odd = {'type': 'function', 'function': {'name': 'f', 'arguments': 'x='}}
  assert read([{**asked, 'tool_calls': [odd]}])[0]['tool_calls'] == [odd]
  # What Parquet adds to each message.
  assert read([{**CHAT[0], 'tool_calls': None, 'name': None}]) == CHAT
  parts = [{'type': 'text', 'text': 'a', 'image_url': None}, 'b']
  assert read([{'role': 'user', 'content': parts}])[0]['content'] == 'a\nb'


@pytest.mark.parametrize(
  'text, is_prompt',
  [
    ('[{"x": 1}, {"x": 2}]', True),
    ('[{"from": "A", "to": "B"}] Which way?', True),
    ('[{"value": 3}]', True),
    ('[{"from": "human", "value": "a"}', False),
    ("[{'value': 'a', 'from': 'human'}]", False),
    ('[{"role": "user", "text": "a"}]', False),
  ],
)
def test_a_text_of_data_is_a_prompt(text, is_prompt):
  record, made = {'prompt': text, 'answer': '1'}, None
  with contextlib.suppress(ValueError):
    made = _records.checked(record, 'Record', 'prompt', None)['prompt']
  assert made == (text if is_prompt else None)


CALLED = [{'name': 'f', 'arguments': {'x': 1}}]


@pytest.mark.parametrize(
  'calls',
  [
    CALLED[0],
    json.dumps(CALLED),
    json.dumps(CALLED[0]),
    [json.dumps(CALLED[0])],
    [{'type': 'function', 'function': CALLED[0]}],
    [{'type': 'function', 'function': json.dumps(CALLED[0])}],
    json.dumps([{'function': {'name': 'f', 'arguments': '{"x": 1}'}}]),
  ],
)
def test_calls_of_tools_may_be_texts_or_a_single_one(calls):
  """As Parquet holds them, and in the turn that is the answer."""
  turn = {'role': 'assistant', 'content': None, 'tool_calls': calls}
  record = {'prompt': [*CHAT, turn]}
  found = _records.checked(record, 'Record', 'prompt', 'answer')
  assert found['prompt'] == CHAT
  assert json.loads(found['answer']) == CALLED
  (read,) = _messages.read_prompt([turn])
  assert [x.get('function', x) for x in read['tool_calls']] == CALLED
  # A source of one's own, whose messages are as they are.
  own = {'prompt': [*CHAT, {**turn, 'content': ''}]}
  assert json.loads(data.without_last_turn(own)['answer']) == CALLED


def test_what_are_no_calls_of_tools():
  turn = {'role': 'assistant', 'content': 'a'}
  for none in None, '', [], '[]', 'null', {}:
    assert _messages.read_prompt([{**turn, 'tool_calls': none}]) == [turn]
    assert _messages.read_prompt([{**turn, 'function_call': none}]) == [turn]
  for wrong in ['f'], 'f', 3, "[{'name': 'f'}]", '[1]':
    record = {'prompt': [*CHAT, {**turn, 'content': '', 'tool_calls': wrong}]}
    with pytest.raises(
      ValueError, match='Record .* message 1 has .*tool_calls'
    ):
      _records.checked(record, 'Record', 'prompt', None)
    with pytest.raises(ValueError, match='The last turn has .*tool_calls'):
      data.without_last_turn(record)


def test_only_descriptions_of_tools_are_tools():
  read = _messages.read_prompt
  for tools in ([peer_files.TOOL], json.dumps([peer_files.TOOL])):
    assert read(CHAT, tools)[0]['tools'] == [peer_files.TOOL]
  for other in (None, [], ['hammer'], 'hammer', [{'size': 3}], 7):
    assert read(CHAT, other) == CHAT
  own = [{**CHAT[0], 'tools': [1]}]
  assert read(own, [peer_files.TOOL]) == own


def test_the_template_gets_the_tools_and_a_role_that_it_knows():
  source = (
    '{% if tools %}{{ tools[0].function.name }}:{% endif %}'
    '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}'
  )
  template = data.ChatTemplate(source)
  messages = _messages.read_prompt(
    [{'role': 'developer', 'content': 'Be brief.'}, *CHAT], [peer_files.TOOL]
  )
  assert template.render(messages) == 'add:<system>Be brief.<user>a'
  knows = data.ChatTemplate(source + '{# it has the role developer #}')
  assert knows.render(messages) == 'add:<developer>Be brief.<user>a'
  deaf = data.ChatTemplate('{% for m in messages %}{{ m.content }}{% endfor %}')
  with pytest.raises(ValueError, match='reads no tools, but the prompt comes'):
    deaf.render(messages)
  form = data.PromptFormat(chat=True, system_prompt='Own.')
  assert form.messages(messages) == messages
