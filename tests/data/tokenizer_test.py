"""Tests of the tokenizer: ids, end tokens, files."""

import pickle

import numpy as np
import pytest
import tokenizers

from grpo_jax import data


def _byte_level_file(folder, special=('<|end|>', '<|turn|>', '<|fill|>')):
  """A byte-level file that asks for truncation, padding and a prefix."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.train_from_iterator(
    ['one two three', 'two and two'],
    tokenizers.trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=list(special),
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|turn|> $A', special_tokens=[('<|turn|>', 1)]
  )
  backend.enable_truncation(2)
  backend.enable_padding(length=7)
  path = folder / 'tokenizer.json'
  backend.save(str(path))
  return path


def test_character_tokenizer_gives_one_id_per_character_from_two():
  tokenizer = data.character_tokenizer(data.ALPHABET)
  assert tokenizer.encode('01+=') == [2, 3, 12, 13]
  assert (tokenizer.pad_id, tokenizer.eos_ids) == (0, (1,))
  assert tokenizer.vocab_size == 14


@pytest.mark.parametrize('text', ['', ' ', 'ab a\n', '  \n', 'é b', '<eos>'])
def test_character_tokenizer_round_trips(text):
  tokenizer = data.character_tokenizer('ab \né<eos>')
  ids = tokenizer.encode(text)
  assert len(ids) == len(text)
  assert not set(ids) & {0, 1}  # '<eos>' spelled out is not the end token
  assert tokenizer.decode(ids) == text


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
  path = _byte_level_file(tmp_path)
  tokenizer = data.Tokenizer.from_file(path, ['<|end|>'], '<|fill|>')
  assert tokenizer.encode('one \U0001f600')
  with pytest.raises(ValueError, match=r"of a surrogate pair \('\\ud83d'\)"):
    tokenizer.encode('one \ud83d')
  with pytest.raises(TypeError):
    tokenizer.encode(3)


def test_decode_skips_end_and_padding():
  tokenizer = data.character_tokenizer('0123')
  assert tokenizer.decode([3, 1, 4, 0, 0]) == '12'
  assert tokenizer.decode(np.asarray([3, 1], np.int32)) == '1'
  assert tokenizer.decode([np.asarray(3), np.asarray(1)]) == '1'


def test_character_outside_the_alphabet_is_named():
  tokenizer = data.character_tokenizer('0123')
  with pytest.raises(ValueError, match="the character 'x', which"):
    tokenizer.encode('01x')


@pytest.mark.parametrize('alphabet', ['', 'aba'])
def test_bad_alphabet_is_refused(alphabet):
  with pytest.raises(ValueError, match='none twice'):
    data.character_tokenizer(alphabet)


def test_pickled_tokenizer_encodes_the_same():
  tokenizer = pickle.loads(pickle.dumps(data.character_tokenizer('ab<eos>')))
  assert tokenizer.encode('a<eos>') == [2, 4, 5, 6, 7, 8]
  with pytest.raises(ValueError, match='alphabet'):
    tokenizer.encode('z')


def test_from_file_reads_ids_and_ignores_truncation_and_padding(tmp_path):
  path = _byte_level_file(tmp_path)
  tokenizer = data.Tokenizer.from_file(
    path, ('<|turn|>', '<|end|>'), '<|fill|>'
  )
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1, 0), 2)
  text = 'one two ü three 一'
  ids = tokenizer.encode(text)
  assert len(ids) > 7 and not set(ids) & {0, 1, 2}
  assert tokenizer.decode(ids + [1, 2, 2]) == text
  assert tokenizer.encode('one<|turn|>')[-1] == 1


def test_end_tokens_are_skipped_where_the_file_does_not_mark_them(tmp_path):
  backend = data.character_tokenizer('ab').backend
  assert not backend.get_added_tokens_decoder()
  backend.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = data.Tokenizer.from_file(
    tmp_path / 'tokenizer.json', ['<eos>'], '<eos>'
  )
  assert tokenizer.pad_id == tokenizer.eos_ids[0] == 1
  assert tokenizer.decode([2, 3, 1]) == 'ab'


def test_vocab_size_counts_rows_of_an_embedding_not_tokens():
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab={'a': 0, 'b': 9}, merges=[])
  )
  assert data.Tokenizer(backend, (0,), 9).vocab_size == 10


@pytest.mark.parametrize(
  'eos_ids, pad_id, message',
  [
    ((1, 1), 0, 'name an id twice'),
    ((5,), 0, 'The id 5 is not'),
    ((1,), -1, 'The id -1 is not'),
  ],
)
def test_bad_ids_are_refused(eos_ids, pad_id, message):
  backend = data.character_tokenizer('ab').backend
  with pytest.raises(ValueError, match=message):
    data.Tokenizer(backend, eos_ids, pad_id)


def test_without_end_tokens_nothing_is_hidden():
  backend = data.character_tokenizer('ab').backend
  assert data.Tokenizer(backend, (), 0).decode([2, 1]) != ''


def test_bad_files_and_tokens_are_refused(tmp_path):
  path = _byte_level_file(tmp_path)
  with pytest.raises(ValueError, match=r"no token '<\|nope\|>'.*<\|end\|>"):
    data.Tokenizer.from_file(path, ['<|nope|>'], '<|fill|>')
  with pytest.raises(ValueError, match="no token 'nope'"):
    data.Tokenizer.from_file(path, ['<|end|>'], 'nope')
  with pytest.raises(ValueError, match='sequence of tokens'):
    data.Tokenizer.from_file(path, '<|end|>', '<|fill|>')
  with pytest.raises(ValueError, match='absent.json.*cannot be read'):
    data.Tokenizer.from_file(tmp_path / 'absent.json', ['a'], 'a')
