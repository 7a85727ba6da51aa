"""A row that no run can use is found at the start, and named.

One of twenty is bad, of all kinds. `grpo-jax data` says the same.
"""

import dataclasses
import functools

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data import survey
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import placing
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects
from tests import chat_templates
from tests import hf_folder
from tests import runs
from tests.data import formats

ASK = {'role': 'user', 'content': '1+2='}
GOOD = {'prompt': '01+02=', 'answer': '30'}
CHAT = {'prompt': [ASK], 'answer': '3'}
BAD = 13  # its place among twenty


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def twenty(bad, good=GOOD):
  rows = [good] * 20
  rows[BAD] = bad
  return rows


@functools.cache
def gemma(folder):
  """A template that refuses some chats."""
  hf_folder.write_tokenizer(folder, chat_templates.GEMMA3, bos='<bos>')
  form = data.PromptFormat(chat=True)
  return data.Tokenizer.from_folder(folder, prompt_format=form)


def config_of(file, **changes):
  return runs.small(
    **{
      'data.train': str(file),
      'data.heldout': '',
      'data.prompt_buckets': (8,),
      'data.completion_buckets': (8,),
      'warm_up.steps': 0,
      **changes,
    }
  )


def checked(config, tokenizer, given=NOTHING):
  return build_data.with_widths(config, tokenizer, given, checks=True)


PLAIN = data.character_tokenizer(data.ALPHABET)
# Rows of files that can be read, but not as the run reads them.
UNWRITABLE = {
  'a character': ({**GOOD, 'prompt': '01-02='}, 'holds the character'),
  'a chat': ({**GOOD, 'prompt': [ASK]}, 'without a chat template a prompt'),
  'too long': ({**GOOD, 'prompt': '0' * 9}, 'its prompt needs 9 tokens, but'),
}


@pytest.mark.parametrize('form', ['jsonl', 'array_record'])
@pytest.mark.parametrize('kind', UNWRITABLE)
def test_a_row_of_a_file_is_named(kind, form, tmp_path):
  bad, words = UNWRITABLE[kind]
  # Parquet and Arrow have one type in a column, so no text beside a chat.
  file = getattr(formats, form)(tmp_path / f'a.{form}', twenty(bad))
  where = 'Line 14' if form == 'jsonl' else 'Record 14'
  message = rf"^{where} of '.*a\.{form}' cannot be used: .*{words}"
  for _ in range(2):  # a failure is not kept
    with pytest.raises(ValueError, match=message):
      checked(config_of(file), PLAIN)
  # Without the check, as an evaluation reads it, nothing is opened.
  assert build_data.with_widths(config_of(tmp_path), PLAIN, NOTHING)
  assert unusable(getattr(data, f'{form}_source')([str(file)])) == (1, (BAD,))


def unusable(source):
  """How many rows `grpo-jax data` says cannot be used, and which."""
  part = survey.Part('x', 'train', source, 1.0)
  read = survey.Reader(PLAIN, (8,)).read(part, 0, lambda *_: None)
  (found,) = read.unusable
  return found.records, found.first


@pytest.mark.parametrize(
  'messages, words',
  [
    ([ASK, ASK], 'Roles must alternate'),
    ([{'role': 'assistant', 'content': '3'}, ASK], 'Roles must alternate'),
    ([{**ASK, 'content': '1' * 60}], r'its prompt needs \d+ tokens, but the'),
  ],
)
def test_a_chat_that_its_template_refuses_is_named(messages, words, tmp_path):
  tokenizer = gemma(tmp_path)
  file = formats.jsonl(
    tmp_path / 'a.jsonl', twenty({'prompt': messages, 'answer': '3'}, CHAT)
  )
  config = config_of(file, **{'data.prompt_buckets': (40,)})
  with pytest.raises(ValueError, match=rf'^Line 14 of .* used: .*{words}'):
    checked(config, tokenizer)
  formats.jsonl(file, [CHAT] * 20)
  assert checked(config, tokenizer) == config


OWN = {
  'no prompt': ({'answer': '3'}, "has no field 'prompt', but"),
  'nothing': ({'prompt': None}, 'no usable prompt: it is None'),
  'a number': ({'prompt': 7}, 'no usable prompt: it is 7'),
  'empty': ({'prompt': ''}, 'no usable prompt: it is empty'),
  'no messages': ({'prompt': []}, r'no usable prompt: it is \[\]'),
  'a text among messages': ({'prompt': ['1+2=']}, "message 0 is '1"),
  'no content': (
    {'prompt': [{**ASK, 'content': None}]},
    "message 0 has no text in 'content'",
  ),
  'half a pair': ({'prompt': '1\ud83d'}, 'half of a surrogate pair'),
  'half a pair in the answer': (
    {**GOOD, 'answer': ['3', '\ud83d']},
    "half of a surrogate pair .* in 'answer'",
  ),
  'no dict': ('01+02=', 'of type str, no dict'),
  'a character': ({'prompt': 'a'}, "holds the character 'a'"),
  'too long': ({'prompt': '0' * 9}, 'needs 9 tokens, but the largest bucket'),
}


def given(rows, field='train', **changes):
  """A config with rows that were given in Python."""
  name = objects_lib.words(f'list of {len(rows)} prompts')
  config = config_of('arithmetic', **changes)
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, **{field: name})
  )
  argument = {'train': 'prompts', 'heldout': 'heldout'}[field]
  return config, Objects(**{argument: rows})


@pytest.mark.parametrize('field', ['train', 'heldout'])
@pytest.mark.parametrize('kind', OWN)
def test_a_row_that_was_given_in_python_is_named(kind, field):
  bad, words = OWN[kind]
  config, objects = given(twenty(bad), field)
  with pytest.raises(ValueError, match=f'^Item 13 of data.{field}.*{words}'):
    checked(config, PLAIN, objects)
  assert unusable(twenty(bad)) == (1, (BAD,))


def fails():
  class Fails(list):
    def __getitem__(self, place):
      if place == BAD:
        raise KeyError('gone')
      return super().__getitem__(place)

  return Fails([GOOD] * 20)


def test_a_row_that_cannot_be_read_is_named():
  config, objects = given(fails())
  words = r"^Item 13 of data.train=.* read \(KeyError: 'gone'\)"
  with pytest.raises(ValueError, match=words):
    checked(config, PLAIN, objects)


def test_rows_that_are_too_long_may_be_dropped():
  drops = {'data.too_long': 'drop'}
  config, objects = given(twenty({'prompt': '0' * 9}), **drops)
  assert checked(config, PLAIN, objects) == config
  config, objects = given(twenty({'prompt': '-'}), **drops)
  with pytest.raises(ValueError, match="^Item 13 .* holds the character '-'"):
    checked(config, PLAIN, objects)


def test_demonstrations_are_checked_with_their_answers(tmp_path):
  rows = twenty({'prompt': '01+02=', 'answer': '1' * 8})  # and an end token
  file = formats.jsonl(tmp_path / 'shown.jsonl', rows)
  warm_up = {'warm_up.steps': 2, 'warm_up.demonstrations': str(file)}
  config = config_of('arithmetic', **warm_up)
  words = '^Line 14 of .*shown.jsonl.*: its answer needs 9 tokens, but the la'
  with pytest.raises(ValueError, match=words):
    checked(config, PLAIN)
  # A run whose warm-up is over goes on without them.
  file.unlink()
  assert checked(config, PLAIN) == config


def test_the_start_of_a_run_checks_its_rows(tmp_path):
  file = formats.jsonl(tmp_path / 'a.jsonl', twenty({**GOOD, 'prompt': 'a'}))
  with pytest.raises(ValueError, match='^Line 14 of .* holds the character'):
    build.run(config_of(file))


def test_what_was_checked_is_not_read_again(tmp_path, monkeypatch):
  file = formats.jsonl(tmp_path / 'a.jsonl', [GOOD] * 20)
  encoded = []
  monkeypatch.setattr(
    data, 'prompt_ids', lambda *given: encoded.append(given) or [1]
  )
  for number in (20, 20):
    assert checked(config_of(file), PLAIN)
    assert len(encoded) == number
  checked(config_of(file, **{'data.prompt_buckets': (7,)}), PLAIN)
  assert len(encoded) == 40  # other limits


def test_of_made_and_of_built_in_rows_a_few_are_checked(monkeypatch):
  class Made:
    def __init__(self):
      self.read = []

    def __len__(self):
      return 10**6

    def __getitem__(self, place):
      self.read.append(int(np.int64(place)))
      return GOOD

  made = Made()
  config, objects = given(made)
  assert checked(config, PLAIN, objects) == config
  assert len(made.read) == 30 and made.read[-1] == 10**6 - 1


@pytest.mark.parametrize('size', [200, 300])
def test_every_row_of_a_small_source_of_a_users_own_is_checked(size):
  class Own:
    def __len__(self):
      return size

    def __getitem__(self, place):
      return {'prompt': 'a' if place == 137 else '01+02=', 'answer': '3'}

  config, objects = given(Own())
  with pytest.raises(ValueError, match='^Item 137 .* holds the character'):
    checked(config, PLAIN, objects)


def test_a_demonstration_without_one_answer_is_named(tmp_path):
  rows = twenty({**GOOD, 'answer': {'truth': '3'}})
  file = formats.jsonl(tmp_path / 'shown.jsonl', rows)
  warm_up = {'warm_up.steps': 2, 'warm_up.demonstrations': str(file)}
  words = r"^Line 14 of .*: A demonstration .*dict with the fields \['truth'\]"
  with pytest.raises(ValueError, match=words):
    checked(config_of('arithmetic', **warm_up), PLAIN)


def test_a_chat_shows_its_own_answer_in_a_warm_up():
  chat = {'prompt': [ASK, {'role': 'assistant', 'content': '3'}]}
  config, objects = placing.place(
    config_of('arithmetic'), demonstrations=[chat]
  )
  source = build_data.demonstrations(config, objects)
  assert source[0] == {'prompt': [ASK], 'answer': '3', 'last_turn': '3'}
  prefill = config_of('arithmetic', **{'data.last_turn': 'prefill'})
  with pytest.raises(ValueError, match="demonstrations.0. .*'answer' is neede"):
    placing.place(prefill, demonstrations=[chat])
  answered = {**chat, 'answer': ' 3.'}
  config, objects = placing.place(prefill, prompts=[answered])
  assert build_data.train(config, objects)[0] == [[answered]]
  words = r'^prompts\[0\] cannot be used: .* turns of the assistant alone'
  with pytest.raises(ValueError, match=words):
    placing.place(
      config_of('arithmetic'), prompts=[{'prompt': chat['prompt'][1:]}]
    )


class LongUnseen:
  """So many rows that a start looks at some; all others are too long."""

  def __len__(self):
    return 10_000

  def __getitem__(self, place):
    is_seen = place in data.some_places(len(self), 30)
    return {'prompt': '47+85=' if is_seen else '47+85+1=', 'answer': '1'}


def test_what_the_start_has_not_looked_at_is_not_refused_there():
  config, objects = given(LongUnseen(), **{'data.prompt_buckets': (6,)})
  assert checked(config, PLAIN, objects) == config
  longer = [LongUnseen()[place] for place in range(100)]
  config, objects = given(longer, **{'data.prompt_buckets': (6,)})
  with pytest.raises(ValueError, match='^Item 1 of data.train.* needs 8 tok'):
    checked(config, PLAIN, objects)
