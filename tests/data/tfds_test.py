"""GSM8K and MATH through TensorFlow Datasets, without TensorFlow."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data import _array_record
from tests.data import formats

pytest.importorskip('tensorflow_datasets')

TRAIN = [
  {'question': f'é {n}?', 'answer': f'It is {n}.\n#### {n}'} for n in range(12)
]


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  """GSM8K and MATH as they were written from their files."""
  from grpo_jax.data import tfds_builders

  place = tmp_path_factory.mktemp('tfds')
  folder = formats.gsm8k(place / 'gsm8k', TRAIN, TRAIN[:3])
  told = tfds_builders.build('gsm8k', folder, place / 'data')
  assert told == {'train': 12, 'test': 3}
  for split in ('train', 'test'):
    for subject in ('geometry', 'algebra'):
      (place / 'math' / split / subject).mkdir(parents=True)
      for number in (10, 2):
        record = {
          'problem': f'{split} {subject} {number}?',
          'level': 'Level 3',
          'type': subject.title(),
          'solution': rf'\boxed{{{number}}}',
        }
        file = place / 'math' / split / subject / f'{number}.json'
        file.write_text(json.dumps(record))
  told = tfds_builders.build('math', place / 'math', place / 'data')
  assert told == {'train': 4, 'test': 4}
  return place / 'data'


def test_gsm8k_keeps_the_order_of_its_file(data_dir):
  source = data.tfds_source('gsm8k', 'train', data_dir, 'question')
  assert [source[n] for n in range(12)] == [
    {**record, 'prompt': record['question']} for record in TRAIN
  ]
  copy = pickle.loads(pickle.dumps(source))
  assert copy == source and copy[5] == source[5]
  assert source[-1]['prompt'] == 'é 11?'
  assert 'tensorflow' not in sys.modules


def test_a_home_may_be_written_short(data_dir, monkeypatch):
  monkeypatch.setenv('HOME', str(data_dir.parent))
  source = data.tfds_source('gsm8k', 'test', '~/data', 'question')
  assert len(source) == 3


def test_a_part_of_a_split(data_dir):
  source = data.tfds_source('gsm8k', 'train[3:5]', data_dir, 'question')
  assert [record['prompt'] for record in source] == ['é 3?', 'é 4?']


def test_math_goes_by_subject_and_number(data_dir):
  source = data.tfds_source('math', 'test', data_dir, 'problem', 'solution')
  assert [record['prompt'] for record in source] == [
    f'test {subject} {number}?'
    for subject in ('algebra', 'geometry')
    for number in (2, 10)
  ]
  assert source[0]['level'] == 'Level 3' and source[0]['type'] == 'Algebra'
  assert source[0]['answer'] == r'\boxed{2}'


def test_math_of_jsonl_files(tmp_path):
  from grpo_jax.data import tfds_builders

  record = {'problem': 'a?', 'solution': 'b', 'level': 5, 'subject': 'Algebra'}
  folder = formats.gsm8k(tmp_path / 'math', [record] * 2, [record])
  tfds_builders.build('math', folder, tmp_path / 'data')
  source = data.tfds_source(
    'math', 'train', tmp_path / 'data', 'problem', 'solution'
  )
  assert len(source) == 2
  assert source[0]['level'] == '5' and source[0]['type'] == 'Algebra'


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('gsm8k', 'dev'), "split 'dev' of 'tfds:gsm8k' .*Should be one of"),
    (('gsm9k', 'train'), "'tfds:gsm9k' has not been prepared in"),
    (('math', 'train'), "Record 1 of 'tfds:math'.* in the field 'prompt'"),
  ],
)
def test_what_is_not_there_is_said(data_dir, arguments, message):
  with pytest.raises(ValueError, match=message):
    data.tfds_source(*arguments, data_dir)


@pytest.mark.parametrize(
  'line, message',
  [
    ('{"question": "a"}', "Line 2 of .*train.jsonl.* in the field 'answer'"),
    ('{"question": ', 'Line 2 of .*train.jsonl.* is not valid JSON'),
  ],
)
def test_a_bad_official_file_is_refused(tmp_path, line, message):
  from grpo_jax.data import tfds_builders

  folder = formats.gsm8k(tmp_path / 'official', TRAIN[:1], TRAIN)
  with (folder / 'train.jsonl').open('a') as file:
    file.write(line)
  with pytest.raises(ValueError, match=message):
    tfds_builders.build('gsm8k', folder, tmp_path / 'data')
  (folder / 'train.jsonl').unlink()
  with pytest.raises(ValueError, match=r'There is no file .*train.jsonl'):
    tfds_builders.build('gsm8k', folder, tmp_path / 'data')


def test_the_command_writes_once(tmp_path):
  folder = formats.gsm8k(tmp_path / 'official', TRAIN, TRAIN[:3])
  given = ('gsm8k', str(folder), f'--data_dir={tmp_path}/data')
  module = 'grpo_jax.data.tfds_builders'
  first, second = (
    subprocess.run(
      [sys.executable, '-m', module, *given], capture_output=True, text=True
    )
    for _ in range(2)
  )
  assert first.returncode == 0, first.stderr
  assert json.loads(first.stdout.splitlines()[-1]) == {'train': 12, 'test': 3}
  assert second.returncode == 1
  assert 'is there already; remove it' in second.stderr
  assert 'Traceback' not in second.stderr


def test_short_floats_are_the_numbers_that_were_meant():
  given = {'x': np.float32(0.1), 'xs': np.array([[0.7, 2.0]], np.float16)}
  assert _array_record._plain(given) == {'x': 0.1, 'xs': [[0.7, 2.0]]}
  assert _array_record._plain(np.array(0.1, np.float32)) == 0.1
  assert _array_record._plain(np.float64(0.1)) == 0.1
