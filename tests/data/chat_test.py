"""Chats: ids against transformers, formats of prompts, what is refused."""

import dataclasses
import datetime
import json
import pickle

import pytest

from grpo_jax import data
from tests import chat_templates
from tests import hf_folder
from tests.golden import chat as golden

GOLDEN = json.loads(golden.FILE.read_text())
ASK = {'role': 'user', 'content': 'How much is 1+2?'}
SYSTEM = {'role': 'system', 'content': 'Be brief.'}


def _chat(**changes):
  return data.PromptFormat(**({'chat': True} | changes))


def _ids(folder, messages, kwargs):
  form = _chat(chat_kwargs=kwargs)
  tokenizer = data.Tokenizer.from_folder(folder, prompt_format=form)
  return tokenizer.encode_prompt(messages)


@pytest.mark.parametrize('name', chat_templates.ALL)
def test_prompt_ids_equal_those_of_transformers(name, tmp_path):
  cases = [case for case in GOLDEN['cases'] if case['template'] == name]
  assert len(cases) >= 2
  golden.write_folder(tmp_path, name, GOLDEN['merges'])
  for case in cases:
    got = _ids(tmp_path, case['messages'], case['kwargs'])
    assert got == case['ids'], case['messages']


def test_the_golden_file_has_every_case():
  wanted = [list(case) for case in golden.cases()]
  found = [
    [c[k] for k in ('template', 'messages', 'kwargs')] for c in GOLDEN['cases']
  ]
  assert found == wanted


@pytest.mark.parametrize('name', chat_templates.ALL)
def test_prompt_ids_equal_those_of_the_installed_transformers(name, tmp_path):
  pytest.importorskip('transformers')
  golden.write_folder(tmp_path, name)
  for template, messages, kwargs in golden.cases():
    if template == name:
      expected = golden.by_transformers(tmp_path, messages, kwargs)
      assert _ids(tmp_path, messages, kwargs) == expected


def _render(source, messages=(ASK,), **kwargs):
  return data.ChatTemplate(source, {'bos_token': '<s>'}).render(
    messages, **kwargs
  )


def test_what_templates_may_call():
  today = datetime.datetime.now().strftime('%Y')
  assert _render("{{ strftime_now('%Y') }}") in (today, str(int(today) + 1))
  assert _render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
  loop = '{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}'
  assert _render(loop + '{% endfor %}') == '1'
  tag = '{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}'
  assert _render(tag) == '1'  # x is not known outside
  assert _render('{{ bos_token }}{{ tools is none }}') == '<s>True'
  assert _render('{{ bos_token }}', bos_token='<b>') == '<b>'
  silent = [{**ASK, 'tool_calls': None}]
  assert _render('{{ messages[0].tool_calls is defined }}', silent) == 'False'
  # A block alone on its line leaves no line behind.
  assert _render('  {% if true %}\na\n  {% endif %}\nb') == 'a\nb'


def test_a_template_cannot_leave_the_sandbox():
  for source in (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    '{{ messages.append(1) }}',
  ):
    with pytest.raises(ValueError, match='cannot write messages'):
      _render(source, [ASK])


def test_a_template_with_an_error_is_refused():
  with pytest.raises(ValueError, match=r'syntax error in line 2: .*endif'):
    _render('a\n{% if true %}')
  with pytest.raises(
    ValueError, match=r"no variable 'enable_thinkng' to be set, but"
  ):
    _render(chat_templates.QWEN3, enable_thinkng=False)
  with pytest.raises(
    ValueError, match=r"roles \['system', 'user'\]: System role not supported;"
  ):
    _render(chat_templates.GEMMA2, [SYSTEM, ASK])
  with pytest.raises(ValueError, match='Roles must alternate'):
    _render(chat_templates.GEMMA3, [ASK, ASK])
  with pytest.raises(ValueError, match='can only concatenate'):
    _render("{{ 'a' + messages }}")


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('qwen3')
  hf_folder.write_tokenizer(path)
  return path


def _text(folder, prompt, **form):
  tokenizer = data.Tokenizer.from_folder(folder, prompt_format=_chat(**form))
  return tokenizer.backend.decode(
    tokenizer.encode_prompt(prompt), skip_special_tokens=False
  )


def test_a_text_is_a_message_of_the_user(folder):
  text = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  assert _text(folder, 'Hi') == text
  assert _text(folder, [{'role': 'user', 'content': 'Hi'}]) == text


def test_system_prompt_kwargs_and_prefix(folder):
  system = '<|im_start|>system\nBe brief.<|im_end|>\n'
  user = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  form = {'system_prompt': 'Be brief.', 'completion_prefix': 'Answer:'}
  assert _text(folder, 'Hi', **form) == f'{system}{user}Answer:'
  own = [
    {'role': 'system', 'content': 'Own.'},
    {'role': 'user', 'content': 'Hi'},
  ]
  assert 'Own.' in _text(folder, own, **form)
  assert 'Be brief.' not in _text(folder, own, **form)
  off = _text(folder, 'Hi', chat_kwargs={'enable_thinking': False})
  assert off == f'{user}<think>\n\n</think>\n\n'


def test_a_chat_that_ends_with_the_assistant_is_gone_on_with(folder):
  chat = [ASK, {'role': 'assistant', 'content': 'It is <b>'}]
  asked = _text(folder, [ASK])
  assert _text(folder, chat) == f'{asked}It is <b>'
  assert _text(folder, chat, completion_prefix='|') == f'{asked}It is <b>|'
  # The turn is open: nothing ends it, and no other begins.
  assert _text(folder, chat).count('<|im_end|>') == 1
  assert chat[1]['content'] == 'It is <b>' and len(chat) == 2


def test_the_prefix_is_encoded_with_what_stands_before_it(tmp_path):
  hf_folder.write_tokenizer(tmp_path, '{{ messages[-1].content }}')
  form = _chat(completion_prefix='wer')
  tokenizer = data.Tokenizer.from_folder(tmp_path, prompt_format=form)
  ids = tokenizer.encode_prompt('The ans')
  assert ids == tokenizer.encode('The answer')
  assert ids != tokenizer.encode('The ans') + tokenizer.encode('wer')


def test_without_chat_a_prompt_is_completed_as_it_is(folder, tmp_path):
  tokenizer = data.Tokenizer.from_folder(folder)
  assert tokenizer.encode_prompt('1+2=') == tokenizer.encode('1+2=')
  form = data.PromptFormat(completion_prefix=' 3')
  assert tokenizer.with_format(form).encode_prompt('1+2=') == tokenizer.encode(
    '1+2= 3'
  )
  with pytest.raises(ValueError, match='set config.data.chat=True, or give te'):
    tokenizer.encode_prompt([ASK])
  hf_folder.write_tokenizer(tmp_path, chat_templates.GEMMA3, bos='<bos>')
  gemma = data.Tokenizer.from_folder(tmp_path)
  (bos,) = gemma.encode('<bos>')
  assert gemma.encode('1') == gemma.encode_prompt('1')[1:]
  assert gemma.encode_prompt('1')[0] == bos
  # Spelled out, or by the template: not twice.
  assert gemma.encode_prompt('<bos>1').count(bos) == 1
  assert gemma.with_format(_chat()).encode_prompt('1').count(bos) == 1


def test_chats_need_a_template_that_compiles(tmp_path):
  plain = data.character_tokenizer('ab')
  with pytest.raises(ValueError, match=r'chat=True needs a chat template'):
    plain.with_format(_chat())
  hf_folder.write_tokenizer(tmp_path, '{% if %}')
  tokenizer = data.Tokenizer.from_folder(tmp_path)
  assert tokenizer.encode_prompt('1')
  with pytest.raises(ValueError, match='syntax error in line 1'):
    tokenizer.with_format(_chat())


def test_a_format_that_the_template_does_not_take_is_refused_at_once(tmp_path):
  hf_folder.write_tokenizer(tmp_path, chat_templates.GEMMA2, bos='<bos>')
  tokenizer = data.Tokenizer.from_folder(tmp_path)
  with pytest.raises(ValueError, match='System role not supported'):
    tokenizer.with_format(_chat(system_prompt='Be brief.'))
  with pytest.raises(ValueError, match="no variable 'enable_thinking'"):
    tokenizer.with_format(_chat(chat_kwargs={'enable_thinking': False}))
  for name in ('messages', 'add_generation_prompt'):
    with pytest.raises(ValueError, match=f"no variable '{name}' to be set"):
      tokenizer.with_format(_chat(chat_kwargs={name: False}))


@pytest.mark.parametrize(
  'prompt, words',
  [
    ('', 'it is empty'),
    ([], r'it is \[\]'),
    (None, 'it is None'),
    ([3], 'message 0 is 3, no dict'),
    ([ASK, {'content': 'a'}], "message 1 has no text in 'role'"),
    ([{'from': 'human', 'value': 'a'}], "'value', as ShareGPT writes them"),
    ([{'role': 'user', 'content': None}], "no text in 'content', but {'role'"),
    ([{'role': 'user', 'content': [{'text': 'a'}]}], "no text in 'content'"),
  ],
)
def test_bad_prompts_are_refused(prompt, words, folder):
  tokenizer = data.Tokenizer.from_folder(folder, prompt_format=_chat())
  with pytest.raises(ValueError, match=words):
    tokenizer.encode_prompt(prompt)


def test_people_see_the_last_question():
  answer = {'role': 'assistant', 'content': '3'}
  again = {'role': 'user', 'content': 'And 2+2?'}
  assert data.prompt_text('1+2=') == '1+2='
  assert data.prompt_text([SYSTEM, ASK, answer, again]) == 'And 2+2?'
  assert data.prompt_text([SYSTEM]) == 'Be brief.'
  assert data.PromptFormat(completion_prefix=':').shown('1+2=') == '1+2=:'
  shown = _chat(completion_prefix='Answer:').shown([ASK])
  assert shown == 'How much is 1+2?\nAnswer:'
  begun = [ASK, {'role': 'assistant', 'content': 'It is '}]
  assert _chat().shown(begun) == 'How much is 1+2?\nIt is '


@pytest.mark.parametrize(
  'name, eos, end',
  [
    ('gemma3', ('<eos>', '<end_of_turn>'), '<end_of_turn>'),
    ('llama3', ('<|endoftext|>', '<|eot_id|>'), '<|eot_id|>'),
    ('qwen3', ('<|endoftext|>', '<|im_end|>'), '<|im_end|>'),
    ('mistral', ('</s>', '<|endoftext|>'), '</s>'),
    ('qwen3', ('<eos>', '<bos>'), '<eos>'),  # which the template never writes
    ('smollm2', ('<|im_end|>',), '<|im_end|>'),
    ('own', ('<s>', '<eos>', '</s>'), '</s>'),  # the user ends by another
  ],
)
def test_a_demonstration_ends_as_the_template_ends_a_turn(
  name, eos, end, tmp_path
):
  own = (
    "{% for m in messages %}{{ m['content'] }}{{ loop.cycle('<s>', '</s>') }}"
    '{% endfor %}'
  )
  template = chat_templates.ALL.get(name, own)
  hf_folder.write_tokenizer(tmp_path, template, eos=eos, bos='<bos>')
  plain = data.Tokenizer.from_folder(tmp_path)
  assert plain.answer_end_id() == plain.eos_ids[0]
  chat = plain.with_format(_chat())
  assert [chat.answer_end_id()] == plain.encode(end)


PLAIN_TURNS = (
  '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
)
PHI = (
  "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|im_end|>' }}"
  "{% endfor %}{% if not add_generation_prompt %}{{ '<|endoftext|>' }}"
  '{% endif %}'
)
# The token that begins the next turn ends one, as in GLM 4.
NEXT_TURN = (
  '{% for m in messages %}<|im_start|>\n{{ m.content }}{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>\n{% endif %}'
)
LAST_IS_OPEN = (
  '{% for m in messages %}{{ m.role }}: {{ m.content }}'
  "{% if not loop.last %}{{ '<|im_end|>' }}\n{% endif %}{% endfor %}"
)
USER_IS_LAST = (
  "{{ raise_exception('no') if messages[-1].role != 'user' }}"
  "{% for m in messages %}{{ m.content }}{{ '<|eot_id|>' }}{% endfor %}"
)
REFUSES = (
  "{{ raise_exception('no') if messages | length > 1 }}"
  '{{ messages[0].content }}'
)


@pytest.mark.parametrize(
  'name, eos, added',
  [
    # As folders of base weights: the end of a document beside a chat template.
    ('qwen2', ('<|endoftext|>',), '<|im_end|>'),
    ('qwen3', ('<|endoftext|>',), '<|im_end|>'),
    ('smollm2', ('<eos>',), '<|im_end|>'),
    ('llama3', ('</s>',), '<|eot_id|>'),
    ('llama3', ('<|endoftext|>', '</s>'), '<|eot_id|>'),
    ('gemma2', ('<eos>',), '<end_of_turn>'),
    ('gemma3', ('<eos>',), '<end_of_turn>'),
    # The first of two that are written.
    (PHI, ('<|endoftext|>',), '<|im_end|>'),
    # Not behind the last answer, but before the next question.
    (NEXT_TURN, ('<|endoftext|>',), '<|im_start|>'),
    (LAST_IS_OPEN, ('</s>',), '<|im_end|>'),
    (USER_IS_LAST, ('</s>',), '<|eot_id|>'),
    # As they should be, and where nothing can be added.
    ('qwen3', ('<|im_end|>', '<|endoftext|>'), ''),
    ('qwen3', ('<|endoftext|>', '<|im_end|>'), ''),
    ('mistral', ('</s>',), ''),
    (PLAIN_TURNS, ('</s>',), ''),
    (REFUSES, ('</s>',), ''),
  ],
)
def test_the_end_of_a_turn_is_an_end_token(name, eos, added, tmp_path):
  template = chat_templates.ALL.get(name, name)
  hf_folder.write_tokenizer(tmp_path, template, eos=eos, bos='<bos>')
  plain = data.Tokenizer.from_folder(tmp_path)
  assert plain.with_turn_end() is plain  # no chats
  found = plain.with_format(_chat()).with_turn_end()
  wanted = [plain.backend.token_to_id(token) for token in eos]
  ids = plain.encode(added)
  assert len(ids) == bool(added)
  assert found.eos_ids == (*wanted, *ids)
  assert found.added_eos_ids == tuple(ids)
  assert found.decode([*plain.encode('ab'), *ids]) == 'ab'
  if added:  # and demonstrations end with it
    assert [found.answer_end_id()] == ids


def test_a_turn_may_end_with_what_no_token_can_write():
  plain = data.character_tokenizer('ab')
  template = data.ChatTemplate(
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] != 'user' %}."
    '{% endif %}{% endfor %}'
  )
  found = dataclasses.replace(
    plain, chat_template=template, prompt_format=_chat()
  )
  assert found.encode_prompt('ab') == [2, 3]
  assert found.with_turn_end() is found and found.answer_end_id() == 1


def test_a_turn_may_end_with_a_token_that_is_not_marked_as_special(tmp_path):
  hf_folder.write_tokenizer(tmp_path, chat_templates.QWEN2, eos=('</s>',))
  file = tmp_path / 'tokenizer.json'
  values = json.loads(file.read_text())
  for token in values['added_tokens']:
    token['special'] = token['special'] and token['content'] != '<|im_end|>'
  file.write_text(json.dumps(values))
  found = data.Tokenizer.from_folder(tmp_path, prompt_format=_chat())
  assert [found.with_turn_end().added_eos_ids[0]] == found.encode('<|im_end|>')


def test_a_pickled_tokenizer_writes_the_same_chats(folder):
  tokenizer = data.Tokenizer.from_folder(folder, prompt_format=_chat())
  copy = pickle.loads(pickle.dumps(tokenizer))
  assert copy.encode_prompt([ASK]) == tokenizer.encode_prompt([ASK])


USER = (
  "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
)
DROPPING = [
  ('Hello!', {}, "'user' (it writes 'Hello!')"),
  ('{{ bos_token }}', {}, "leaves out messages with the role 'user'"),
  ("{{ messages[0]['role'] }}", {}, "leaves out messages with the role 'user'"),
  ("{{ messages[0]['content'][:4] }}", {}, "it writes 'What'"),
  ("{% if think %}{{ messages[0]['content'] }}{% endif %}", {}, "role 'user'"),
  (USER, {'system_prompt': 'Be brief.'}, "role 'system'"),
  # A template for one message, which the system message takes.
  ("{{ messages[0]['content'] }}", {'system_prompt': 'x'}, "role 'user'"),
]


@pytest.mark.parametrize('source, options, words', DROPPING)
def test_a_template_that_drops_a_message_is_refused(source, options, words):
  plain = data.character_tokenizer('ab')
  form = data.PromptFormat(chat=True, **options)
  template = data.ChatTemplate(source, {'bos_token': '<s>'})
  with pytest.raises(ValueError, match='^The chat template leaves') as refused:
    dataclasses.replace(plain, chat_template=template, prompt_format=form)
  assert words in str(refused.value)


@pytest.mark.parametrize(
  'source, options',
  [
    (USER, {}),
    ("{{ messages[0]['content'] }}", {}),
    (
      "{% if think %}{{ messages[0]['content'] }}{% endif %}",
      {'chat_kwargs': {'think': True}},
    ),
    (
      "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}",
      {'system_prompt': 'Be brief.'},
    ),
  ],
)
def test_a_template_that_writes_them_is_not(source, options):
  plain = data.character_tokenizer('ab')
  form = data.PromptFormat(chat=True, **options)
  template = data.ChatTemplate(source)
  dataclasses.replace(plain, chat_template=template, prompt_format=form)
