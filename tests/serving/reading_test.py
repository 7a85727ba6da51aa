"""Parts of answers: joined the whole, and none that must be taken back."""

import itertools
import random

import pytest
import tokenizers

from grpo_jax import data
from grpo_jax.environments import formats
from grpo_jax.serving import reading
from tests.data import trap_templates
from tests.episodes import made_episodes

TOKENIZER = made_episodes.TOKENIZER
ADD = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def bytes_tokenizer(*added):
  """A token for each byte, as vocabularies of GPT-2's kind have them."""
  special = '<|im_end|>', *added
  vocab = {token: n for n, token in enumerate([*special, *reading._BYTES])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
  pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.pre_tokenizer = pre
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([*special])
  return data.Tokenizer(
    backend,
    (0,),
    0,
    chat_template=data.ChatTemplate(trap_templates.ALL['separator'].source),
    prompt_format=data.PromptFormat(chat=True),
  )


BYTES = bytes_tokenizer()


def read(tokenizer, text, stops=(), tools=(), format='hermes', chat=True):
  """The parts of a text, token by token, and the whole."""
  reader = reading.Texts(tokenizer)
  if chat:
    reader = reading.Turns(tokenizer, formats.find(format), tools)
  parts = reading.Parts(reader, stops, strips=chat)
  ids = tokenizer.encode(text)
  # As an engine does: the token that completes a stop string is the last.
  for end in range(1, len(ids) + 1):
    if any(stop in tokenizer.decode(ids[:end]) for stop in stops):
      ids = ids[:end]
      break
  pieces = [parts.part(ids[:n])[0] for n in range(1, len(ids))]
  whole = parts.whole(ids, cut=False)
  pieces.append(parts.rest(whole, ids)[0])
  assert [*itertools.chain(*(one.ids for one in pieces))] == ids
  assert ''.join(one.text for one in pieces) == whole.text
  assert ''.join(one.reasoning for one in pieces) == whole.reasoning
  assert pieces[-1].calls == whole.calls
  return [one.text for one in pieces if one.text], whole


def test_characters_are_never_cut():
  pieces, whole = read(BYTES, 'Grüße 日本語 🎉!')
  assert whole.text == 'Grüße 日本語 🎉!'
  assert pieces == ['G', 'r', 'ü', 'ß', 'e', ' 日', '本', '語', ' 🎉', '!']


@pytest.mark.parametrize('chat', [True, False])
def test_stop_strings_never_show(chat):
  text = 'The answer STO is 5.\nOb Obs\nObservation: 7'
  pieces, whole = read(BYTES, text, ('Observation:', 'STOP', '日本'), chat=chat)
  expected = 'The answer STO is 5.\nOb Obs\n'
  assert whole.text == (expected.strip() if chat else expected)
  assert len(pieces) > 10 and not [x for x in pieces if 'Obse' in x]
  pieces, whole = read(BYTES, 'x 日本 y', ('日本',), chat=chat)
  assert whole.text == ('x' if chat else 'x ')


def test_reasoning_and_calls():
  text = f'<think>\nLet me see.\n</think>\n\nI add. {CALL} And {CALL}'
  pieces, whole = read(BYTES, text, tools=[ADD])
  assert whole.reasoning == 'Let me see.' and ''.join(pieces[:-1]) == 'I add.'
  assert whole.text.split() == ['I', 'add.', 'And']
  assert [call.arguments for call in whole.calls] == [{'a': 1}] * 2
  # Without tools nothing is a call.
  _, whole = read(BYTES, f'It is {CALL}')
  assert whole.text == f'It is {CALL}' and not whole.calls


def test_marks_that_are_tokens():
  tokenizer = bytes_tokenizer(
    '<tool_call>', '</tool_call>', '<think>', '</think>'
  )
  text = f'<think>hm</think>Yes: {CALL}'
  _, whole = read(tokenizer, text, tools=[ADD])
  assert (whole.text, whole.reasoning) == ('Yes:', 'hm') and len(
    whole.calls
  ) == 1


def test_a_format_without_marks_says_nothing_before_its_end():
  block = '```json\n{"name": "add", "arguments": {"a": 1}}\n```'
  pieces, whole = read(
    BYTES, f'I add.\n{block}', tools=[ADD], format='json_block'
  )
  assert pieces == ['I add.'] and len(whole.calls) == 1
  pieces, whole = read(BYTES, f'Like {block}.', format='json_block')
  assert not whole.calls and len(pieces) > 10


PARTS = (
  'a', 'I think', ' ', '\n', '  ', 'ü', '日', '🎉', '<', '<think>', '</think>',
  'thought', '<tool_call>', '</tool_call>', '<tool_', CALL, '{', 'STOP', 'STO',
  'ST', '```', '\ufffd',
)  # fmt: skip


@pytest.mark.parametrize('format', formats.NAMES)
@pytest.mark.parametrize('tools', [(), (ADD,)])
def test_whatever_is_drawn_its_parts_joined_are_the_whole(format, tools):
  draw = random.Random(format)
  for _ in range(60):
    text = ''.join(draw.choices(PARTS, k=draw.randint(1, 12)))
    _, whole = read(BYTES, text, ('STOP',), tools, format)
    assert 'STOP' not in whole.text


def test_tokens_have_their_bytes():
  ids = BYTES.encode('aü 🎉')
  found = reading.scored(BYTES, ids, [None] + [-1.0] * 7)
  assert b''.join(one.data for one in found).decode() == 'aü 🎉'
  assert found[0].text == 'a' and found[0].logp is None
  pieces = '▁Hi <0xC3> <0xBC>'.split()
  vocab = {token: n for n, token in enumerate(['<s>', *pieces])}
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab, merges=[], byte_fallback=True)
  )
  backend.decoder = tokenizers.decoders.Sequence([
    tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(),
  ])  # fmt: skip
  tokenizer = data.Tokenizer(backend, (0,), 0)
  found = reading.scored(tokenizer, [1, 1, 2, 3], [-1.0] * 4)
  assert [one.text for one in found[:2]] == ['Hi', ' Hi']  # alone it has none
  assert [one.offset for one in found[:3]] == [0, 2, 5]
  assert found[2].data + found[3].data == 'ü'.encode()
