"""Tests of sources in files other than JSONL: random access, bad records."""

import contextlib
import os
import pickle
import resource
import signal

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data import _parquet
from tests.data import formats

RECORDS = [
  {'question': f'é {n}?', 'solution': str(n), 'level': [n, 2]}
  for n in range(10)
]
EXPECTED = [
  {**record, 'prompt': record['question'], 'answer': record['solution']}
  for record in RECORDS
]
FIELDS = {'prompt_field': 'question', 'answer_field': 'solution'}
WRITE = {
  'parquet': formats.parquet,
  'array_record': formats.array_record,
  'arrow': formats.arrow,
}
OPEN = {
  'parquet': data.parquet_source,
  'array_record': data.array_record_source,
  'arrow': data.arrow_source,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def assert_holds(source, expected):
  order = np.random.default_rng(0).permutation(len(expected))
  assert len(source) == len(expected)
  assert [source[int(n)] for n in order] == [expected[n] for n in order]
  assert source[-1] == expected[-1] and list(source) == expected
  with pytest.raises(IndexError):
    source[len(expected)]


@pytest.mark.parametrize('form', WRITE)
def test_records_by_index(tmp_path, form):
  path = WRITE[form](tmp_path / f'a.{form}', RECORDS)
  source = OPEN[form](path, **FIELDS)
  assert_holds(source, EXPECTED)
  copy = pickle.loads(pickle.dumps(source))
  assert copy == source and copy[3] == EXPECTED[3]
  assert 'answer' not in OPEN[form](path, prompt_field='question',
                                    answer_field=None)[0]  # fmt: skip


OPEN_ALL = {**OPEN, 'jsonl': data.jsonl_source}


def special(path, kind):
  """What never ends when it is opened or read."""
  if kind == 'pipe':
    os.mkfifo(path)
  else:
    path.symlink_to('/dev/zero')
  return path


@pytest.mark.parametrize('kind', ['pipe', 'device'])
@pytest.mark.parametrize('form', OPEN_ALL)
def test_what_is_no_regular_file_is_refused(tmp_path, form, kind):
  if form == 'arrow':
    path = formats.arrow(tmp_path / 'a', RECORDS)
    (path / 'data-00000-of-00002.arrow').unlink()
    special(path / 'data-00000-of-00002.arrow', kind)
  else:
    path = special(tmp_path / f'a.{form}', kind)
  paths = [path] if form == 'jsonl' else path
  with in_time(), pytest.raises(ValueError, match=f'{kind}.* regular file'):
    OPEN_ALL[form](paths, **FIELDS)


@pytest.mark.parametrize('kind', ['pipe', 'device'])
def test_no_fingerprint_is_taken_of_what_is_no_regular_file(tmp_path, kind):
  path = special(tmp_path / 'a', kind)
  with in_time(), pytest.raises(ValueError, match=f'{kind}.* regular file'):
    data.fingerprint([str(path)])


@contextlib.contextmanager
def in_time():
  """Raises an error instead of waiting for ever, in memory too."""

  def late(*_):
    raise AssertionError('it does not end')

  before = signal.signal(signal.SIGALRM, late)
  limits = resource.getrlimit(resource.RLIMIT_AS)
  used = int(open('/proc/self/statm').read().split()[0]) * 4096
  resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
  signal.alarm(5)
  try:
    yield
  finally:
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize('form', ['array_record', 'jsonl'])
@pytest.mark.parametrize(
  'line',
  [
    b'{"question": "a", "solution": "1", "question": "b"}',
    b'{"question": "a", "solution": {"question": 1, "question": 2}}',
  ],
)
def test_a_name_that_comes_twice_is_refused(tmp_path, form, line):
  path = tmp_path / f'a.{form}'
  if form == 'jsonl':
    path.write_bytes(line + b'\n')
  else:
    formats.array_record(path, [line])
  paths = [path] if form == 'jsonl' else path
  with pytest.raises(ValueError, match=r"(Line|Record) 1 .*'question' more"):
    OPEN_ALL[form](paths, **FIELDS)


@pytest.mark.parametrize('form', ['parquet', 'array_record'])
def test_several_files_are_one_source(tmp_path, form):
  paths = [
    WRITE[form](tmp_path / f'{n}.{form}', part)
    for n, part in enumerate((RECORDS[:4], RECORDS[4:5], RECORDS[5:]))
  ]
  assert_holds(OPEN[form](paths, **FIELDS), EXPECTED)


@pytest.mark.parametrize('rows', [3, 100])
@pytest.mark.parametrize('kept', [0, 2**26])
@pytest.mark.parametrize('written', [0, 2**33])
def test_row_groups_of_any_size(tmp_path, monkeypatch, rows, kept, written):
  """In memory, decoded for each record, or through a temporary file."""
  monkeypatch.setattr(_parquet, '_KEPT_BYTES', kept)
  monkeypatch.setattr(_parquet, '_WRITTEN_BYTES', written)
  paths = [
    formats.parquet(tmp_path / f'{n}.parquet', part, row_group_size=rows)
    for n, part in enumerate((RECORDS[:7], RECORDS[7:]))
  ]
  source = data.parquet_source(paths, **FIELDS)
  assert_holds(source, EXPECTED)
  through_file = not kept and written
  assert isinstance(source._rows, _parquet._RowGroups) != bool(through_file)
  if not through_file:  # at least the last one is kept
    groups = len(source._rows._groups)
    assert len(source._rows._kept) == (groups if kept else 1)
  assert (tmp_path / 'cache').exists() == bool(through_file)
  assert not list(tmp_path.glob('cache/*/*'))  # it has lost its name


@pytest.mark.parametrize('kept', [2**16, 2**26])
def test_texts_that_repeat_take_no_room(tmp_path, monkeypatch, kept):
  """40 MB of prompts, which the file keeps as 10 texts and their numbers."""
  import pyarrow as pa
  from pyarrow import parquet

  numbers = pa.array(np.arange(20_000, dtype=np.int32) % 10)
  texts = pa.array([f'{n}' * 2000 for n in range(10)])
  prompts = pa.DictionaryArray.from_arrays(numbers, texts)
  path = tmp_path / 'a.parquet'
  # Without the schema of Arrow, which would say that it is a dictionary.
  parquet.write_table(
    pa.table({'prompt': prompts, 'answer': numbers}),
    path,
    row_group_size=10_000,
    store_schema=False,
  )
  monkeypatch.setattr(_parquet, '_KEPT_BYTES', kept)
  source = data.parquet_source(path)
  assert source[12_003] == {'prompt': '3' * 2000, 'answer': 3}
  if kept == 2**26:
    held = [table.nbytes for table in source._rows._kept.values()]
    assert len(held) == 2 and sum(held) < 2**20
    return
  # In the temporary file there is one dictionary for all batches of a group.
  found = {
    batch.column('prompt').dictionary.buffers()[-1].address
    for batch in source._rows._batches
  }
  assert len(source._rows._batches) == 20 and len(found) <= 2


@pytest.mark.parametrize('rows', [70, 150, 1000])
@pytest.mark.parametrize('kept', [0, 2**26])
@pytest.mark.parametrize('largest', [2**7, 2**20])
def test_dictionaries_hold_the_same_texts(
  tmp_path, monkeypatch, rows, kept, largest
):
  """Of columns in lists too, with null, and with dictionaries that end."""
  monkeypatch.setattr(_parquet, '_KEPT_BYTES', kept)
  monkeypatch.setattr(_parquet, '_BATCH_ROWS', 100)
  records = [
    {
      'prompt': [{'role': 'user', 'content': f'é {n % 7}'}] * (1 + n % 3),
      'answer': str(n),
      'level': None if n % 2 else str(n // 50),
    }
    for n in range(300)
  ]
  path = formats.parquet(
    tmp_path / 'a.parquet',
    records,
    row_group_size=rows,
    dictionary_pagesize_limit=largest,
    data_page_size=100,
    write_batch_size=10,
  )
  assert list(data.parquet_source(path)) == records


@pytest.mark.parametrize('form', WRITE)
@pytest.mark.parametrize(
  'bad, message',
  [
    ({'question': '', 'solution': '1'}, "'question', but it is empty"),
    ({'question': 'a', 'solution': None}, "a value in the field 'solution'"),
    ({'question': 'a', 'solution': float('nan')}, 'has the number nan in'),
    (
      {'asked': 'a', 'solution': '1'},
      "but it is None, and the columns are '",
    ),
  ],
)
def test_a_bad_record_is_named(tmp_path, form, bad, message):
  good = {'question': 'a', 'solution': type(bad['solution'])() or 'x'} if (
    isinstance(bad['solution'], str)
  ) else {'question': 'a', 'solution': 1.0}  # fmt: skip
  path = WRITE[form](tmp_path / f'a.{form}', [good, good, bad, good])
  with pytest.raises(ValueError, match=f'Record 3 of .*a.{form}.*{message}'):
    OPEN[form](path, **FIELDS)


@pytest.mark.parametrize('text', [b'no json', b'["a"]', b'\xff'])
def test_a_record_that_is_no_json_object_is_named(tmp_path, text):
  good = {'question': 'a', 'solution': 1}
  path = formats.array_record(tmp_path / 'a.array_record', [good, text])
  with pytest.raises(ValueError, match='Record 2 of .*a.array_record.*JSON'):
    data.array_record_source(path, **FIELDS)


def test_a_bad_record_of_many_is_named_when_it_is_read(tmp_path):
  """A sample is checked at construction, and every record when it is read."""
  records = [{'prompt': 'a', 'answer': 1}] * 12_000
  unseen = set(range(12_000)) - set(data.some_places(12_000, 300))
  bad = max(unseen)
  records[bad] = {'prompt': '', 'answer': 1}
  path = formats.parquet(tmp_path / 'a.parquet', records)
  source = data.parquet_source(path)
  assert source[bad - 1]['prompt'] == 'a'
  with pytest.raises(ValueError, match=f'Record {bad + 1} of .*a.parquet'):
    source[bad]


@pytest.mark.parametrize('form', ['parquet', 'array_record'])
def test_files_that_cannot_be_used_are_refused(tmp_path, form):
  path = tmp_path / f'a.{form}'
  with pytest.raises(FileNotFoundError):
    OPEN[form](path)
  path.write_bytes(b'x' * 100)
  with pytest.raises(ValueError, match=f'a.{form}.* cannot be read as'):
    OPEN[form](path)


@pytest.mark.parametrize('form', ['array_record'])
def test_files_without_records_are_refused(tmp_path, form):
  path = WRITE[form](tmp_path / f'a.{form}', [])
  with pytest.raises(ValueError, match=f'There is no record in .*a.{form}'):
    OPEN[form](path)


def test_a_dataset_dict_has_splits(tmp_path):
  folder = formats.arrow_dict(
    tmp_path / 'dict', train=RECORDS, test=RECORDS[:3]
  )
  assert_holds(data.arrow_source(folder, 'test', **FIELDS), EXPECTED[:3])
  for split in ('dev', None):
    with pytest.raises(ValueError, match=r"splits \['train', 'test'\], and"):
      data.arrow_source(folder, split, **FIELDS)
  with pytest.raises(ValueError, match='a single dataset without splits'):
    data.arrow_source(folder / 'train', 'train', **FIELDS)


def test_a_damaged_folder_is_refused(tmp_path):
  folder = formats.arrow(tmp_path / 'set', RECORDS)
  file = folder / 'data-00001-of-00002.arrow'
  whole = file.read_bytes()
  file.write_bytes(b'x' * len(whole))
  with pytest.raises(ValueError, match='cannot be read as an Arrow stream'):
    data.arrow_source(folder, **FIELDS)
  file.write_bytes(whole)
  (folder / 'state.json').write_text('{"_indices_data_files": [1]}')
  with pytest.raises(ValueError, match='flatten_indices'):
    data.arrow_source(folder, **FIELDS)
  (folder / 'state.json').write_text('no json')
  with pytest.raises(ValueError, match=r'state.json.* is no JSON'):
    data.arrow_source(folder, **FIELDS)


def test_names_stand_for_files(tmp_path):
  for name in ('b.parquet', 'a.parquet', 'c.array_record-00001-of-00002',
               'c.array_record-00000-of-00002'):  # fmt: skip
    (tmp_path / name).write_text('x')
  place = str(tmp_path)
  names = lambda name: [
    path.removeprefix(f'{place}/') for path in data.files(f'{place}/{name}')
  ]
  assert names('*.parquet') == ['a.parquet', 'b.parquet']
  assert names('b.parquet') == ['b.parquet']
  shards = [f'c.array_record-0000{n}-of-00002' for n in range(2)]
  assert names('c.array_record') == names('c.array_record-*') == shards
  assert names('none') == []
  assert data.format_of(shards[0]) == 'array_record'
  assert data.format_of('c.array_record-*-of-00002') == 'array_record'
  assert data.format_of('x.arrayrecord') == 'array_record'


@pytest.mark.parametrize(
  'shards, words',
  [
    (['0-of-3', '2-of-3'], 'all its 3 shards, .*, but 1 is missing'),
    (['0-of-4', '1-of-4'], 'all its 4 shards, .*, but 2, 3 are missing'),
    (['0-of-2', '1-of-2', '2-of-2'], 'all its 2 shards, .* 2 is too many'),
    (['0-of-2', '1-of-2', '0-of-1'], 'some are of 1 and others of 2'),
  ],
)
def test_a_name_stands_for_all_shards_or_none(tmp_path, shards, words):
  for shard in shards:
    (tmp_path / f'a.jsonl-{shard}').write_text('x')
  with pytest.raises(ValueError, match=f'a.jsonl.* {words}'):
    data.files(f'{tmp_path}/a.jsonl')
  assert len(data.files(f'{tmp_path}/a.jsonl-*')) == len(shards)


def test_other_names_beside_shards_are_no_shards(tmp_path):
  for name in ('a.jsonl-0-of-1', 'a.jsonl-0-of-1.bak', 'a.jsonl-0-of-1~'):
    (tmp_path / name).write_text('x')
  assert data.files(f'{tmp_path}/a.jsonl') == [f'{tmp_path}/a.jsonl-0-of-1']


def test_a_fingerprint_follows_the_contents(tmp_path):
  path = tmp_path / 'a'
  seen = set()
  for contents in (b'a', b'b', b'a' * 2**27, b'a' * 2**27 + b'b'):
    path.write_bytes(contents)
    seen.add(data.fingerprint([str(path)]))
  assert len(seen) == 4


@pytest.mark.parametrize('form', ['parquet', 'arrow'])
def test_short_floats_are_the_numbers_that_were_meant(form, tmp_path):
  import pyarrow as pa

  wide = {'x': 0.1, 'xs': [0.7, None], 'in': {'x': 0.3, 'n': 7, 'y': 'a'}}
  inside = pa.struct(
    [('x', pa.float16()), ('n', pa.int8()), ('y', pa.string())]
  )
  schema = pa.schema(
    [
      ('question', pa.string()),
      ('x', pa.float32()),
      ('xs', pa.list_(pa.float32())),
      ('in', inside),
    ]
  )
  rows = [{'question': 'a', **wide}, {'question': 'b'}]
  path = WRITE[form](tmp_path / f'a.{form}', rows, schema=schema)
  first, second = OPEN[form](path, prompt_field='question', answer_field=None)
  assert first == {'question': 'a', 'prompt': 'a', **wide}
  assert second['x'] is second['xs'] is second['in'] is None
  WRITE[form](tmp_path / f'b.{form}', rows[:1] * 2, schema=schema)
  again = OPEN[form](
    tmp_path / f'b.{form}', prompt_field='question', answer_field='in.x'
  )
  assert [one['answer'] for one in again] == [0.3, 0.3]
