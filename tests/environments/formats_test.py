"""Formats of calls: read back what templates write, and never raise."""

import json
import random
import re
import time

import pytest

from grpo_jax.environments import base
from grpo_jax.environments import formats
from grpo_jax.environments import schemas
from tests.environments import call_templates

Piece = formats.Piece
THOUGHT = '<think>', '</think>'
MARKS = sorted(
  {
    mark
    for one in formats.FORMATS
    for mark in (*one.quotes, *sum((*one.pairs, *one.reasoning), ()))
    if mark
  }
)


def own(text):
  """A format: each line '!f 1' is a call."""
  calls = [
    base.ToolCall('', line[1:].split()[0], {'a': 1}, line)
    for line in text.splitlines()
    if line.startswith('!f')
  ]
  return formats.Parsed(text, '', tuple(calls), ())


def broken(text):
  raise SystemExit(f'no {text}')


def wrong(text):
  return 3


OWN = f'{__name__}:own'
EVERY = (*formats.NAMES, OWN, f'{__name__}:broken', f'{__name__}:wrong')


def read(name, *pieces, **options):
  """A text is a piece that is not special; ('...',) is a special one."""
  made = [
    Piece(one) if isinstance(one, str) else Piece(one[0], True)
    for one in pieces
  ]
  return formats.parse(formats.find(name), made, **options)


def named(parsed):
  return [(one.name, one.arguments) for one in parsed.calls]


def problems(parsed):
  return [one.problem for one in parsed.calls]


# What templates write.
def value(rng, depth=0):
  """A value that every format has."""
  kind = rng.randrange(8 if depth < 2 else 6)
  if kind == 0:
    return rng.randint(-(10**12), 10**12)
  if kind == 1:
    return rng.choice([0.5, -2.25, 1e-7, 3e20])
  if kind == 2:
    return rng.choice([True, False, None])
  if kind < 6:
    letters = 'ab \n\'"\\{}[]()<>:,=;`\t/é€😀|#%\u2028'
    return ''.join(rng.choices(letters, k=rng.randrange(12)))
  if kind == 6:
    return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
  names = rng.sample(['a', 'b_2', 'C'], rng.randrange(3))
  return {name: value(rng, depth + 1) for name in names}


def cut(rng, text, special):
  """A text in random pieces; marks are pieces of their own if they may be."""
  parts = re.split(f'({"|".join(map(re.escape, MARKS))})', text)
  for part in parts:
    if part in MARKS and special:
      yield Piece(part, True)
      continue
    while part:
      size = rng.randrange(1, 6)
      yield Piece(part[:size])
      part = part[size:]


@pytest.mark.parametrize('special', [True, False], ids=['ids', 'texts'])
@pytest.mark.parametrize('family', call_templates.ALL)
def test_what_a_template_writes_is_read_back(family, special):
  check_templates(family, special, range(8))


@pytest.mark.long
@pytest.mark.parametrize('special', [True, False], ids=['ids', 'texts'])
@pytest.mark.parametrize('family', call_templates.ALL)
def test_all_that_a_template_writes_is_read_back(family, special):
  check_templates(family, special, range(8, 500))


def check_templates(family, special, seeds):
  name, template = call_templates.ALL[family]
  format = formats.find(name)
  for seed in seeds:
    rng = random.Random(f'{family} {seed}')
    calls = [
      (
        rng.choice(['search', 'get_it', 'f2']),
        {key: value(rng) for key in rng.sample('abcd', rng.randrange(4))},
      )
      for _ in range(rng.randrange(1, 4))
    ]
    text = call_templates.render(template, calls)
    pieces = [*cut(rng, text, special)]
    marks = MARKS if special else ()
    parsed = formats.parse(format, pieces, special=marks)
    assert len(parsed.calls) == len(calls), text
    assert not any(problems(parsed)) and not parsed.problems, text
    for (wanted, given), found in zip(calls, parsed.calls):
      assert found.name == wanted
      if format.has_types:
        assert found.arguments == given, text
      else:
        assert [*found.arguments] == [*given]
    assert parsed.text.strip() == ''
    assert [one.id for one in parsed.calls] == [
      f'call_{place}' for place in range(len(calls))
    ]


def test_texts_of_the_xml_format_get_the_types_of_the_schema():
  def search(
    query: str, limit: int, exact: bool, near: list[float], also: str | int
  ): ...

  given = {
    'query': '12', 'limit': 3, 'exact': True, 'near': [0.5, 1], 'also': '7',
  }  # fmt: skip
  text = call_templates.render(call_templates.QWEN_CODER, [('search', given)])
  tools = [schemas.describe(search)]
  assert named(read('xml', text, tools=tools)) == [('search', given)]
  ((_, texts),) = named(read('xml', text))
  assert texts == {name: str(one) for name, one in given.items()} | {
    'near': '[0.5, 1]'
  }
  # What does not fit stays: the tool's result says so.
  wrong = text.replace('\n3\n', '\nmany\n')
  ((_, kept),) = named(read('xml', wrong, tools=tools))
  assert kept['limit'] == 'many'


@pytest.mark.parametrize('family', call_templates.ALL)
def test_the_format_is_guessed_from_a_template(family):
  name, template = call_templates.ALL[family]
  assert formats.guess(template) == name


def test_a_template_without_a_format_is_not_guessed():
  assert formats.guess('{{ messages }}') == 'json_block'
  glm = '<tool_call>{{ tool_calls }}<arg_key>'
  assert formats.guess(glm) == formats.guess('{{ tool_calls }}<|call|>') == ''


# What is a call, and what is none.
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BODY = '{"name": "f", "arguments": {"a": 1}}'
CALL = {
  'hermes': HERMES,
  'xml': '<tool_call><function=f><parameter=a>1</parameter></function>'
  '</tool_call>',
  'llama_json': '{"name": "f", "parameters": {"a": 1}}',
  'pythonic': '[f(a=1)]',
  'gemma': '<|tool_call>call:f{a:1}<tool_call|>',
  'json_block': '```json\n' + BODY + '\n```',
}


@pytest.mark.parametrize('name', CALL)
def test_no_call_is_read_inside_reasoning(name):
  call = CALL[name]
  wanted = [('f', {'a': '1' if name == 'xml' else 1})]
  assert named(read(name, call)) == wanted

  closed = read(name, f'<think>I may write\n{call}\n</think>\n', call)
  assert named(closed) == wanted
  assert call in closed.reasoning and not closed.text

  never = read(name, '<think>I may write\n', call)
  assert not never.calls and call in never.reasoning and never.problems

  opened = read(name, f'or\n{call}\n', opened_reasoning=True)
  assert not opened.calls and opened.text == '' and opened.problems
  thought = read(name, 'hm</think>\n\n', call, opened_reasoning=True)
  assert named(thought) == wanted and thought.reasoning == 'hm'


@pytest.mark.parametrize('name', CALL)
def test_no_call_is_read_from_a_turn_that_was_cut(name):
  parsed = read(name, CALL[name], cut=True)
  assert not parsed.calls and len(parsed.problems) == 1
  half = read(name, CALL[name][:-2], cut=True)
  assert not half.calls


@pytest.mark.parametrize('name', [n for n in CALL if n != 'json_block'])
def test_half_a_call_is_told_and_does_not_run(name):
  parsed = read(name, CALL[name][:-1])
  assert len(parsed.calls) == 1, parsed
  (call,) = parsed.calls
  assert call.problem and call.arguments is None
  assert call.problem.endswith('.') and '\n' not in call.problem
  if name in ('hermes', 'xml', 'gemma'):
    assert 'is not closed by <' in call.problem


@pytest.mark.parametrize(
  'name, marks',
  [
    ('hermes', ('<tool_call>', '</tool_call>')),
    ('xml', ('<tool_call>', '</tool_call>')),
    ('gemma', ('<|tool_call>', '<tool_call|>')),
    ('llama_json', ('<|python_tag|>',)),
    ('pythonic', ('<|tool_call_start|>', '<|tool_call_end|>')),
  ],
)
def test_a_text_that_spells_a_special_mark_is_no_call(name, marks):
  body = CALL[name].strip('[]') if name == 'pythonic' else CALL[name]
  for mark in ('<tool_call>', '</tool_call>', '<|tool_call>', '<tool_call|>'):
    body = body.replace(mark, '')
  inner = (marks[0], body, *marks[1:])
  spelled = ''.join(inner)
  parsed = read(name, 'so: ', spelled, special=marks)
  assert not parsed.calls and parsed.text == 'so: ' + spelled
  # As pieces they count, and a spelled one inside is a part of the call.
  pieces = [(one,) if one in marks else one for one in inner]
  (call,) = read(name, *pieces, special=marks).calls
  assert call.name == 'f' and call.raw == spelled and not call.problem
  # Where they are no special tokens, the same text is a call.
  assert len(read(name, 'so: ', spelled).calls) == 1


def test_marks_inside_of_a_text_are_a_part_of_it():
  spelled = 'x</tool_call>y'
  body = json.dumps({'name': 'f', 'arguments': {'a': spelled}})
  assert named(read('hermes', f'<tool_call>{body}</tool_call>')) == [
    ('f', {'a': spelled})
  ]
  for a in ('<tool_call>', '<think>', '</think><tool_call>'):
    body = json.dumps({'name': 'f', 'arguments': {'a': a}})
    text = f'<tool_call>{body}</tool_call>' + HERMES
    assert named(read('hermes', text)) == [('f', {'a': a}), ('f', {'a': 1})]
    pieces = ('<tool_call>',), body, ('</tool_call>',)
    assert named(read('hermes', *pieces, special=MARKS)) == [('f', {'a': a})]
  quote = '<|"|>'
  text = 'call:f{a:', (quote,), f'so {quote} it', (quote,), '}'
  pieces = ('<|tool_call>',), *text, ('<tool_call|>',)
  assert named(read('gemma', *pieces, special=MARKS)) == [
    ('f', {'a': f'so {quote} it'})
  ]


@pytest.mark.parametrize('name', formats.NAMES)
def test_a_text_that_holds_the_signs_of_marks_is_no_call(name):
  """Code points that are no characters stand for the marks inside."""
  for first in range(0xFDD0, 0xFDE0):
    text = f'so {chr(first)}{BODY}{chr(first + 1)}'
    parsed = read(name, text)
    assert not parsed.calls and parsed.text.count('\ufffd') == 2


def test_a_call_says_what_is_wrong_with_it():
  said = {
    'hermes': ('<tool_call>{"name": }</tool_call>',
               'The call is no JSON: Expecting value at character 9.'),
    'xml': ('<tool_call><function=f><parameter=a>1</function></tool_call>',
            'The call does not close <parameter=a>.'),
    'pythonic': ('[f(a=1; b)]',
                 "The call needs ',' or ')' at character 6, but has '; b)]'."),
    'gemma': ('<|tool_call>call:f{a:}<tool_call|>',
              "The call needs a value at character 9, but has '}'."),
  }  # fmt: skip
  for name, (text, wanted) in said.items():
    assert problems(read(name, text)) == [wanted]


def test_texts_that_only_meet_at_a_special_token_are_no_mark():
  parsed = read('hermes', '<tool', ('<|end|>',), '_call>' + BODY)
  assert not parsed.calls and parsed.text == '<tool_call>' + BODY
  joined = read('hermes', '<tool', '_call>' + BODY + '</tool_', 'call>')
  assert len(joined.calls) == 1


@pytest.mark.parametrize(
  'bad',
  [
    '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'
    % ('9' * 5000),
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>',
    '<tool_call>%s</tool_call>' % ('[' * 5000),
    '<tool_call>{"name": "f"} and more</tool_call>',
    '<tool_call>\0</tool_call>',
    '<tool_call></tool_call>',
    '<tool_call>',
    '<tool_call><tool_call>' + BODY[:-1] + '</tool_call>',
  ],
)
def test_one_bad_call_spoils_no_other(bad):
  parsed = read('hermes', f'{HERMES}, {bad}, {HERMES}')
  good = [one for one in parsed.calls if not one.problem]
  assert [(one.name, one.arguments) for one in good] == [('f', {'a': 1})] * 2
  wrong = [one for one in parsed.calls if one.problem]
  assert wrong and all(one.arguments is None for one in wrong)
  assert all(
    re.fullmatch(r'The call [^\n]*\.', p) for p in problems(parsed) if p
  )
  assert parsed.calls[0] in good and parsed.calls[-1] in good


def test_what_is_beside_calls_is_text():
  text = f'First.\n{HERMES}\nThen {HERMES} last.'
  parsed = read('hermes', text)
  assert len(parsed.calls) == 2
  assert parsed.text == 'First.\n\nThen  last.'
  plain = read('hermes', ' no call\n', ('<|im_end|>',))
  assert plain == formats.Parsed(' no call\n')
  assert read('gemma', '<|channel>thought\nhm<channel|>ok') == formats.Parsed(
    'ok', 'hm'
  )
  two = read('xml', '<think>a</think>b<think>c</think>d')
  assert (two.text, two.reasoning) == ('bd', 'a\nc')


@pytest.mark.parametrize(
  'name, text',
  [
    ('llama_json', '{"name": "Ada", "age": 36}'),
    ('llama_json', '{"answer": 3}'),
    ('llama_json', 'The call {"name": "f", "parameters": {}} is one.'),
    ('llama_json', '{"name": broken'),
    ('pythonic', '[1, 2, 3]'),
    ('pythonic', 'So f(a=1).'),
    ('json_block', '```json\n{"answer": 3}\n```'),
    ('json_block', '```json\nno JSON\n```'),
    ('json_block', '```python\n' + BODY + '\n```'),
    ('json_block', BODY),
    ('json_block', '```json\n{"arguments": {]}\n```'),
    ('json_block', '```json\n' + BODY),
    ('hermes', BODY),
    ('xml', '<function=f></function>'),
    ('gemma', 'call:f{a:1}'),
  ],
)
def test_an_answer_is_no_call(name, text):
  assert read(name, text) == formats.Parsed(text)


@pytest.mark.parametrize(
  'name, text, wanted',
  [
    ('llama_json', '<|python_tag|>f.call(a="x")', [('f', {'a': 'x'})]),
    ('llama_json', '{"type": "function", "name": "f", "parameters": {}}',
     [('f', {})]),
    ('llama_json', '{"name": "f", "parameters": {}} Wait.', [('f', {})]),
    ('llama_json', '<|python_tag|>print(1)', None),
    ('pythonic', "[f(a='''x\n'y''', b={'c': (1, 2,)},), g.h()] so",
     [('f', {'a': "x\n'y", 'b': {'c': [1, 2]}}), ('g.h', {})]),
    ('pythonic', '<|tool_call_start|>[{"name": "f", "arguments": {}}]'
     '<|tool_call_end|>', [('f', {})]),
    ('pythonic', '[f(1)]', None),
    ('pythonic', '[f(a=__import__("os"))]', None),
    ('pythonic', '[f(a=1)', None),
    ('pythonic', f'[f(a={"[" * 5000}1{"]" * 5000})]', None),
    ('pythonic', '[f(a=%s)]' % ('-' * 5000 + '1'), None),
    ('pythonic', r"[f(a='\x41\u00e9\q\n\'')]", [('f', {'a': "Aé\\q\n'"})]),
    ('gemma', '<|tool_call>call:f{a:{b:[1,None]},"c d":"e"}<tool_call|>',
     [('f', {'a': {'b': [1, None]}, 'c d': 'e'})]),
    ('gemma', '<|tool_call>call:f{a:<|"|>x}<tool_call|>', None),
    ('gemma', '<|tool_call>f{}<tool_call|>', None),
    ('xml', '<tool_call><function=f><parameter=a>\n\n x \n\n</parameter>'
     '</function><function=g></function></tool_call>',
     [('f', {'a': '\n x \n'}), ('g', {})]),
    ('xml', '<tool_call><function=f><parameter=a>1</function></tool_call>',
     None),
    ('xml', '<tool_call><function=></function></tool_call>', None),
    ('hermes', '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>',
     [('f', {'a': 1})]),
    ('hermes', '<tool_call>{"function":{"name":"f"}}</tool_call>',
     [('f', {})]),
    ('json_block', f'```\n[{BODY}, {BODY}]\n```', [('f', {'a': 1})] * 2),
    ('json_block', '```json\n{"name": "f", "arguments": {]}\n```', None),
    ('json_block', f'```json\nx\n```json\n{BODY}\n```', [('f', {'a': 1})]),
    ('pythonic', f'[f(a={"9" * 5000})]', None),
    ('pythonic', '[f(a=1e999)]', None),
    ('pythonic', '[f(a=-1_000, b=.5)]', [('f', {'a': -1000, 'b': 0.5})]),
    ('gemma', '<|tool_call>call:f{<|"|>a b<|"|>:<escape>c<escape>}<tool_call|>',
     [('f', {'a b': 'c'})]),
  ],
)  # fmt: skip
def test_notations(name, text, wanted):
  parsed = read(name, text)
  if wanted is None:
    assert len(parsed.calls) == 1 and parsed.calls[0].problem
  else:
    assert named(parsed) == wanted and not any(problems(parsed))


# Whatever the pieces.
SCRAPS = (
  *MARKS, *CALL.values(), BODY, '{', '}', '[', ']', '(', ')', '"', "'", '\\',
  '\\ud800', '\ud800', '\0', '\ufdd0', '\ufdd1', '\ufdef', 'call:f', 'f(', 'a=',
  '<function=', '<function=f>', '</function>', '<parameter=a>', '</parameter>',
  '```', '```json\n', '\n', ' ', '1e999', '9' * 2000, '-', 'NaN', 'x', 'é',
  '😀', '[' * 300, '{"a":' * 300, ';', '"""', '<|im_end|>', '!f', '\r\n',
  '\u2028',
)  # fmt: skip


@pytest.mark.parametrize('name', EVERY)
def test_no_pieces_make_a_format_raise(name):
  check_pieces(name, range(60))


@pytest.mark.long
@pytest.mark.parametrize('name', EVERY)
def test_no_pieces_ever_make_a_format_raise(name):
  check_pieces(name, range(60, 10_000))


def check_pieces(name, seeds):
  format = formats.find(name)
  for seed in seeds:
    rng = random.Random(f'{name} {seed}')
    pieces = [
      Piece(rng.choice(SCRAPS), rng.random() < 0.3)
      for _ in range(rng.randrange(14))
    ]
    options = {
      'opened_reasoning': rng.random() < 0.2,
      'cut': rng.random() < 0.2,
      'special': rng.choice([(), MARKS]),
    }
    parsed = formats.parse(format, pieces, **options)
    assert isinstance(parsed, formats.Parsed)
    assert isinstance(parsed.text, str) and isinstance(parsed.reasoning, str)
    assert not (options['cut'] and parsed.calls)
    for call in parsed.calls:
      assert bool(call.problem) == (call.arguments is None)
      json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
      assert call.raw and '\n' not in call.problem
    # A cut elsewhere in a text changes nothing.
    again = [
      Piece(letter, one.special)
      for one in pieces
      for letter in ((one.text,) if one.special else one.text)
    ]
    assert formats.parse(format, again, **options) == parsed


LONG = {
  'hermes': ('<tool_call>', '<tool_call>["</tool_call>', '<tool_call>{"a":"\\',
             '</tool_call>', '<think>', '<tool_call>[' ),
  'xml': ('<tool_call><function=f><parameter=a></tool_call>',
          '<tool_call><function=f><parameter=a>', '<function=f>', '<'),
  'llama_json': ('<|python_tag|>', '{"name":1,', '{"type":',
                 '{"name":"f","parameters":{}};', '{"name":"f","parameters":'),
  'pythonic': ('[f(', '[f(a=1),', 'f(a=', '[f(a="', '<|python_start|>[f(a="',
               '<|tool_call_start|><|python_start|>', '[f(a=1_'),
  'gemma': ('<|tool_call>', '<|tool_call>call:f{a:<|"|>', '<escape>',
            '<|tool_call>call:f{a:', '<|channel>'),
  'json_block': ('```json\n', '```json\n{"name":', '```\n', '```a\n', ' '),
}  # fmt: skip


@pytest.mark.parametrize('name', LONG)
def test_a_long_turn_takes_time_in_proportion(name):
  check_secs(name, LONG[name][:2])


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_every_long_turn_takes_time_in_proportion(name):
  check_secs(name, LONG[name][2:])


def check_secs(name, units):
  format = formats.find(name)
  for unit in units:
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    formats.parse(format, [Piece(text)])
    secs = time.process_time() - start
    assert secs < 1.0, f'{unit!r}: {secs} s'


def test_a_function_of_ones_own_is_a_format():
  parsed = read(OWN, '<think>hm</think>!f 1\nso', ('<|x|>',))
  assert named(parsed) == [('f', {'a': 1})]
  assert parsed.reasoning == 'hm' and parsed.text.endswith('so<|x|>')
  assert not read(OWN, '!f 1', cut=True).calls
  (said,) = read(f'{__name__}:broken', 'x').problems
  assert said == 'The format could not read the turn: SystemExit: no x'


@pytest.mark.parametrize(
  'name, said',
  [
    ('hermse', "There is no format 'hermse' (did you mean 'hermes'?)"),
    ('', 'give one of hermes, xml'),
    (f'{__name__}:nothing', "The format '.*nothing' cannot be imported"),
  ],
)
def test_a_misspelt_format_is_refused(name, said):
  with pytest.raises(
    ValueError, match=re.escape(said) if '(' in said else said
  ):
    formats.find(name)
