"""Chats that end with the assistant: the answer is never in the prompt."""

import json
import pickle

import pytest

from grpo_jax import data
from tests.data import formats

ASK = {'role': 'user', 'content': 'How much is 1+2?'}
ANSWER = {'role': 'assistant', 'content': '3'}
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
CHAT = [ASK, ANSWER]
MESSAGES = {'prompt_field': 'messages'}
NONE = {**MESSAGES, 'answer_field': None}
NAMED = {**MESSAGES, 'answer_field': 'solution'}


def turn(role, content):
  return {'role': role, 'content': content}


# Records, how they are read, and the prompt, the answer and what was taken off.
CASES = {
  'as Hugging Face has them': ({'messages': CHAT}, MESSAGES, [ASK], '3', '3'),
  'no reward needs an answer': ({'messages': CHAT}, NONE, [ASK], '3', '3'),
  'an answer beside': (
    {'messages': CHAT, 'answer': '#### 3'}, MESSAGES, [ASK], '#### 3', '3',
  ),
  'an answer that is no text': (
    {'messages': CHAT, 'answer': 3}, MESSAGES, [ASK], 3, '3',
  ),
  'an answer beside that none needs': (
    {'messages': CHAT, 'answer': '4'}, NONE, [ASK], '4', '3',
  ),
  'an answer that is null': (
    {'messages': CHAT, 'answer': None}, MESSAGES, [ASK], '3', '3',
  ),
  'an answer of another name': (
    {'messages': CHAT, 'solution': '4'}, NAMED, [ASK], '4', '3',
  ),
  'as OpenAI takes them': (
    {'messages': [SYSTEM, ASK, {**ANSWER, 'weight': 1}]},
    MESSAGES, [SYSTEM, ASK], '3', '3',
  ),
  'as a JSON text': (
    {'messages': json.dumps(CHAT)}, MESSAGES, [ASK], '3', '3',
  ),
  'a call of a tool': (
    {'messages': [ASK, {
      'role': 'assistant', 'content': None,
      'tool_calls': [{'function': {'name': 'add', 'arguments': '{"a": 1}'}}],
    }]},
    MESSAGES, [ASK], *['[{"name": "add", "arguments": {"a": 1}}]'] * 2,
  ),
  'several turns': (
    {'messages': [*CHAT, ASK, turn('assistant', '4')]},
    MESSAGES, [*CHAT, ASK], '4', '4',
  ),
  'two answers': (
    {'messages': [ASK, turn('assistant', 'Well,'), ANSWER]},
    MESSAGES, [ASK], '3', '3',
  ),
  'a tool before': (
    {'messages': [ASK, turn('tool', '{"sum": 3}'), ANSWER]},
    MESSAGES, [ASK, turn('tool', '{"sum": 3}')], '3', '3',
  ),
  'another name for the assistant': (
    {'messages': [ASK, turn('model', '3')]}, MESSAGES, [ASK], '3', '3',
  ),
  'a capital': (
    {'messages': [ASK, turn('Assistant', '3')]}, MESSAGES, [ASK], '3', '3',
  ),
  'a place for the answer': (
    {'messages': [ASK, turn('assistant', ' ')], 'answer': '3'},
    MESSAGES, [ASK], '3', ' ',
  ),
  'the usual field': ({'prompt': CHAT}, {}, [ASK], '3', '3'),
  'preferences': (
    {'chosen': CHAT, 'rejected': [ASK, turn('assistant', '4')]},
    {'prompt_field': 'chosen'}, [ASK], '3', '3',
  ),
  'a chat that asks': (
    {'prompt': [ASK], 'answer': '3'}, {}, [ASK], '3', None,
  ),
  'a text': ({'prompt': '1+2=', 'answer': '3'}, {}, '1+2=', '3', None),
}  # fmt: skip


@pytest.mark.parametrize('name', CASES)
def test_the_last_turn_is_the_answer_and_not_in_the_prompt(name, tmp_path):
  record, fields, prompt, answer, taken = CASES[name]
  file = formats.jsonl(tmp_path / 'a.jsonl', [record])
  (found,) = data.jsonl_source([file], **fields)
  assert found['prompt'] == prompt
  assert found['answer'] == answer
  assert found.get('last_turn') == taken
  # What a reward or a person may want is still there.
  others = {k: v for k, v in record.items() if k not in ('prompt', 'answer')}
  assert others.items() <= found.items()


def test_who_answers_and_who_asks():
  answers = 'assistant ASSISTANT assistant_1 Model gpt gpt-4 ChatGPT bot AI'
  asks = 'user Human system developer tool function observation'
  for roles, is_answer in ((answers, True), (asks, False)):
    for role in roles.split():
      assert data.is_by_assistant({'role': role}) == is_answer, role
      assert data.has_known_role({'role': role}), role
  for role in 'teacher', 'Alice', '', None:
    assert not data.has_known_role({'role': role})
    record = {'prompt': [ASK, turn(role, '3')]}
    assert data.without_last_turn(record) is record


@pytest.mark.parametrize(
  'record, fields, words',
  [
    (
      {'messages': [{'from': 'human', 'content': 'a'}]},
      MESSAGES,
      "message 0 has no text in 'role'",
    ),
    (
      {'messages': json.dumps(CHAT)[:-1], 'answer': '3'},
      MESSAGES,
      'but it is a list of messages that is written as a text',
    ),
    (
      {'messages': str(CHAT), 'answer': '3'},
      MESSAGES,
      'but it is a list of messages that is written as a text',
    ),
    ({'messages': [ANSWER]}, MESSAGES, 'turns of the assistant alone'),
    ({'messages': CHAT}, NAMED, "needs a value in the field 'solution'"),
    (
      {'messages': [ASK, turn('assistant', '')]},
      MESSAGES,
      "needs a value in the field 'answer'",
    ),
    (
      {'messages': [ASK, {'role': 'assistant', 'content': None}]},
      MESSAGES,
      "message 1 has no text in 'content'",
    ),
  ],
)
def test_a_chat_without_a_question_or_an_answer_is_named(
  record, fields, words, tmp_path
):
  good = {'messages': CHAT, 'solution': '3'}
  file = formats.jsonl(tmp_path / 'a.jsonl', [good, record])
  with pytest.raises(ValueError, match=f"^Line 2 of '.*a.jsonl' .*{words}"):
    data.jsonl_source([file], **fields)


@pytest.mark.parametrize('form', ['parquet', 'array_record', 'arrow'])
def test_every_format_takes_the_turn_off(form, tmp_path):
  records = [{'messages': CHAT}, {'messages': [SYSTEM, *CHAT]}]
  path = getattr(formats, form)(tmp_path / f'a.{form}', records)
  opened = getattr(data, f'{form}_source')
  for copy in (
    (source := opened(path, **MESSAGES)),
    pickle.loads(pickle.dumps(source)),
  ):
    assert [one['prompt'] for one in copy] == [[ASK], [SYSTEM, ASK]]
    assert [one['answer'] for one in copy] == ['3', '3']
  kept = opened(path, **NONE, last_turn='prefill')
  assert kept[0]['prompt'] == CHAT and 'answer' not in kept[0]


def test_what_a_file_calls_last_turn_stays(tmp_path):
  record = {'prompt': CHAT, 'last_turn': 'mine'}
  file = formats.jsonl(tmp_path / 'a.jsonl', [record])
  (found,) = data.jsonl_source([file])
  assert found['last_turn'] == 'mine' and found['prompt'] == [ASK]
  assert record['prompt'] == CHAT == json.loads(file.read_text())['prompt']


class Grows:
  """A curriculum."""

  starts = (0, 5)

  def __len__(self):
    return 1

  def __getitem__(self, index):
    return self.drawn(index, 9)

  def drawn(self, index, number):
    return {'prompt': [ASK, turn('assistant', str(number))]}


def test_records_of_a_users_own_are_read_alike():
  own = data.WithoutLastTurns([{'prompt': CHAT}, {'prompt': 'a'}, 7])
  for source in own, pickle.loads(pickle.dumps(own)):
    assert len(source) == 3
    assert source[0] == {'prompt': [ASK], 'answer': '3', 'last_turn': '3'}
    assert (source[1], source[2]) == ({'prompt': 'a'}, 7)
    assert data.stages(source) == [(0, source)]
  grows = data.WithoutLastTurns(Grows())
  (first, early), (then, late) = data.stages(grows)
  assert (first, then) == (0, 5)
  assert early[0]['answer'] == '0' and late[0]['answer'] == '5'
  assert early[0]['prompt'] == [ASK]
  assert data.take(data.prompt_stream(grows, 0), 7, 1)[0]['answer'] == '7'
