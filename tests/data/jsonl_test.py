"""Tests of the JSONL source: random access, field names, bad lines."""

import importlib
import json
import math
import pickle

import pytest

from grpo_jax import data
from grpo_jax.data import _jsonl
from grpo_jax.data import _records


def _write(folder, content):
  path = folder / 'prompts.jsonl'
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def test_rows_by_index_with_blank_lines_unicode_and_line_ends(tmp_path):
  records = [
    {'prompt': 'é\n一', 'answer': 1},
    {'prompt': 'second', 'answer': '2', 'level': [1, 2]},
    {'prompt': ' ', 'answer': 0},
  ]
  lines = [json.dumps(record, ensure_ascii=False) for record in records]
  path = _write(
    tmp_path, f'\ufeff{lines[0]}\r\n\n   \n{lines[1]}\n\n{lines[2]}'
  )
  source = data.JsonlSource(path)
  assert len(source) == 3
  assert [source[i] for i in (2, 0, 1, -1)] == [
    records[2],
    records[0],
    records[1],
    records[2],
  ]
  assert [record for record in source] == records


def test_named_fields_become_prompt_and_answer_beside_the_record(tmp_path):
  path = _write(tmp_path, '{"question": "1+1=", "solution": 2, "answer": "x"}')
  assert data.JsonlSource(path, 'question', 'solution')[0] == {
    'question': '1+1=',
    'solution': 2,
    'prompt': '1+1=',
    'answer': 2,
  }


def test_a_field_index_stays_beside_the_counter(tmp_path):
  """As pandas writes one."""
  record = {'prompt': 'a', 'answer': 1, 'index': 7}
  source = data.JsonlSource(_write(tmp_path, json.dumps(record)))
  (row,) = data.take(data.prompt_stream(source, 0), 3, 1)
  assert row == {**record, 'index': 3, 'record_index': 7}


def test_a_field_that_nobody_reads_may_hold_nan(tmp_path):
  """As Python's json and pandas write it."""
  lines = '{"prompt": "a", "answer": 1, "loss": NaN}\n' * 2
  for record in (source := data.JsonlSource(_write(tmp_path, lines))):
    assert math.isnan(record['loss']) and record['prompt'] == 'a'
  assert math.isnan(source[1]['loss'])


def test_a_prompt_may_be_a_list_of_messages(tmp_path):
  messages = [{'role': 'user', 'content': 'é', 'name': 'x'}]
  record = {'prompt': messages, 'answer': 1}
  path = _write(tmp_path, json.dumps(record))
  assert data.JsonlSource(path)[0] == record
  path = _write(tmp_path, '{"prompt": [{"role": "user"}], "answer": 1}')
  with pytest.raises(ValueError, match="message 0 has no text in 'content'"):
    data.JsonlSource(path)


def test_without_an_answer_field_nothing_is_required_or_added(tmp_path):
  path = _write(tmp_path, '{"prompt": "a"}')
  assert data.JsonlSource(path, answer_field=None)[0] == {'prompt': 'a'}


def test_pickled_source_reads_its_file(tmp_path):
  path = _write(tmp_path, '{"prompt": "a", "answer": "b"}\n' * 3)
  source = pickle.loads(pickle.dumps(data.JsonlSource(path)))
  assert source == data.JsonlSource(path)
  assert source[2] == {'prompt': 'a', 'answer': 'b'}


def test_past_the_end_is_an_index_error(tmp_path):
  source = data.JsonlSource(_write(tmp_path, '{"prompt": "a", "answer": 1}'))
  with pytest.raises(IndexError):
    source[1]


@pytest.mark.parametrize('content', ['', '\n \n'])
def test_a_file_without_records_is_refused(tmp_path, content):
  with pytest.raises(ValueError, match='prompts.jsonl.* holds no record'):
    data.JsonlSource(_write(tmp_path, content))


@pytest.mark.parametrize(
  'content, message',
  [
    ('gzip', 'is compressed with gzip; unpack it first'),
    ('bz2', 'is compressed with bzip2'),
    ('lzma', 'is compressed with xz'),
    (b'\x28\xb5\x2f\xfd', 'is compressed with zstd'),
    (b'PK\x03\x04', 'is a zip archive'),
    (b'PAR1\x15', "a Parquet file; give it a name that ends with '.parquet'"),
    ('[\n{"prompt": "a"}\n]', 'is an array; write one record per line'),
    ('\ufeff [{"prompt": "a"}]', 'is an array; write one record per line'),
  ],
)
def test_a_file_of_another_kind_is_told_from_its_start(
  tmp_path, content, message
):
  if content in ('gzip', 'bz2', 'lzma'):
    content = importlib.import_module(content).compress(b'{"prompt": "a"}')
  with pytest.raises(ValueError, match=f'prompts.jsonl.* {message}'):
    data.JsonlSource(_write(tmp_path, content))


GOOD = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"prompt": "a", ', 'not valid JSON'),
    (b'{"prompt": "\xff", "answer": 1}', 'not valid JSON in UTF-8'),
    (b'[' * 100_000, 'not valid JSON in UTF-8'),
    (b'["a", "b"]', r'is \["a", "b"\], but a JSON object is required'),
    (b'null', 'is null, but a JSON object is required'),
    (b'{"prompt": "a", "answer": NaN}', "number nan in the field 'answer'"),
    (
      b'{"prompt": "a", "answer": {"b": [1, %s-Infinity%s]}}'
      % (b'[' * 900, b']' * 900),
      'number -inf in',
    ),
    (
      b'{"prompt": [{"role": "user", "content": "a", "at": 1e999}],'
      b' "answer": 1}',
      "number inf in the field 'prompt'",
    ),
    (
      b'{"promt": "a", "answer": "b"}',
      "in the field 'prompt', but it is None, .*promt",
    ),
    (
      b'{"prompt": "", "answer": "b"}',
      "in the field 'prompt', but it is empty",
    ),
    (
      rb'{"prompt": "a\ud83d", "answer": "b"}',
      r"'prompt', but it holds half of a surrogate pair \('\\ud83d'\)",
    ),
    (
      rb'{"prompt": [{"role": "user", "content": "\ude00"}], "answer": "b"}',
      "'prompt', but it holds half of a surrogate pair",
    ),
    (
      rb'{"prompt": "a", "answer": ["\ud83d"]}',
      "half of a surrogate pair .* in the field 'answer'",
    ),
    (b'{"prompt": 3, "answer": "b"}', "in the field 'prompt', but it is 3"),
    (b'{"prompt": "a"}', "value in the field 'answer'"),
    (b'{"prompt": "a", "answer": null}', "value in the field 'answer'"),
  ],
)
def test_a_bad_line_is_named_at_construction(tmp_path, line, message):
  path = _write(tmp_path, GOOD + b'\n' + line + b'\n' + GOOD)
  with pytest.raises(ValueError, match=f'Line 3 of .*prompts.jsonl.*{message}'):
    data.JsonlSource(path)


@pytest.mark.parametrize('size', [1, 7, 31, 32, 33, 1000])
def test_lines_are_found_wherever_a_chunk_ends(tmp_path, monkeypatch, size):
  monkeypatch.setattr(_jsonl, '_CHUNK_BYTES', size)
  records = [{'prompt': 'a' * n, 'answer': n} for n in range(1, 20)]
  lines = [json.dumps(record) for record in records]
  for ends in ('\n', '\n\n', '\n \t \n  ', '\r\n'):
    source = data.JsonlSource(_write(tmp_path, ends.join(lines)))
    assert list(source) == records and source[7] == records[7]
    source = data.JsonlSource(_write(tmp_path, ends.join(lines) + '\n'))
    assert [source[n] for n in range(19)] == records


def test_of_a_large_file_a_sample_is_checked_and_the_rest_when_read(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(_jsonl, '_CHECKED_BYTES', 100)
  lines = [GOOD] * 12_000
  unseen = max(set(range(12_000)) - set(_records.checked_places(12_000)))
  lines[unseen] = b'{"prompt": "a"}\n'
  source = data.JsonlSource(_write(tmp_path, b'\n' + b''.join(lines)))
  assert source[unseen - 1] == json.loads(GOOD)
  # One more for the blank line, and one because lines count from 1.
  with pytest.raises(ValueError, match=f"Line {unseen + 2} of .*'answer'"):
    source[unseen]
  lines[-1] = b'no json\n'  # both ends are in every sample
  with pytest.raises(ValueError, match='Line 12000 of .* is not valid JSON'):
    data.JsonlSource(_write(tmp_path, b''.join(lines)))


def test_an_answer_within_a_dict_is_named_with_a_point(tmp_path):
  path = tmp_path / 'verl.jsonl'
  record = {
    'prompt': '36*2=',
    'reward_model': {'style': 'rule', 'ground_truth': '72'},
    'a.b': '1',
  }
  path.write_text(json.dumps(record) + '\n')
  for field, answer in (
    ('reward_model.ground_truth', '72'),
    ('reward_model', record['reward_model']),
    ('a.b', '1'),  # a name with a point is a name first
  ):
    source = data.JsonlSource(str(path), answer_field=field)
    assert source[0]['answer'] == answer
  for field in 'reward_model.truth', 'prompt.x', 'reward_model.style.x':
    with pytest.raises(ValueError, match=f"a value in the field '{field}'"):
      data.JsonlSource(str(path), answer_field=field)


def test_a_number_that_is_not_finite_is_found_in_a_map_too():
  # As pyarrow gives the values of a map: pairs.
  record = {'prompt': '1', 'answer': [('x', 1.0), ('y', float('nan'))]}
  with pytest.raises(ValueError, match='Record 1 has the number nan'):
    _records.checked(record, 'Record 1', 'prompt', 'answer')
