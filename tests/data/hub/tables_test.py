"""Data sets of the Hub: which files hold a split, and records of them."""

import pathlib
import types

from huggingface_hub import constants
import pyarrow as pa
from pyarrow import parquet
import pytest

from grpo_jax import config as config_lib
from grpo_jax.data import _files
from grpo_jax.data import first_look
from grpo_jax.data import hub as hub_lib
from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _repository
from grpo_jax.run.build import data as build_data
from tests.data.hub import stand_in

NAME = 'lab/sums'
CONVERTED = stand_in.CONVERTED
P = b'PAR1'


def table(*questions: str, **columns) -> bytes:
  sink = pa.BufferOutputStream()
  rows = {'question': questions, 'answer': ['2'] * len(questions), **columns}
  parquet.write_table(pa.table(rows), sink)
  return sink.getvalue().to_pybytes()


def found(config='', split='train', name=NAME):
  """The files of a split, from the folder of their commit."""
  files = [
    pathlib.Path(path) for path in hub_lib.data_files(name, config, split)
  ]
  parts = [path.parts for path in files]
  return ['/'.join(one[one.index('snapshots') + 2 :]) for one in parts]


@pytest.fixture
def listed(monkeypatch, tmp_path):
  """Makes a data set of which the list of files is known, and a README.md."""
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))

  def make(paths, readme=b''):
    files = {path: _repository.File(1) for path in (*paths, 'README.md')}
    one = _repository.Repository('dataset', NAME, 40 * 'a', files)

    def find(kind, name, revision):
      del kind, name
      if revision == CONVERTED:
        raise _asking.NoRevision('It has not been converted.')
      return one

    def download(repository, paths):
      folder = repository.folder
      folder.mkdir(parents=True, exist_ok=True)
      (folder / 'README.md').write_bytes(readme)
      return folder

    monkeypatch.setattr(_repository, 'find', find)
    monkeypatch.setattr(_repository, 'download', download)

  return make


def refused(*words, **asked):
  with pytest.raises(ValueError) as caught:
    found(**asked)
  for word in words:
    assert word in str(caught.value), str(caught.value)


def test_the_conversion_is_read(hub):
  one = hub.datasets[NAME]
  one.commit({'train.csv': b'a,b'})
  converted = one.commit(
    {
      'main/train/0000.parquet': P + b'0',
      'main/train/0001.parquet': P + b'1',
      'main/test/0000.parquet': P,
    },
    CONVERTED,
  )
  assert found() == ['main/train/0000.parquet', 'main/train/0001.parquet']
  assert found('main', 'test') == ['main/test/0000.parquet']
  assert hub_lib.data_commit(hub_lib.Name(NAME), '', 'train') == converted
  pinned = f'{NAME}@{converted}'
  assert found(name=pinned) == found()
  refused("no split 'dev'", 'test, train', split='dev')
  refused("no config 'mane'", "did you mean 'main'", config='mane')
  hub.datasets[NAME].branches.pop(CONVERTED)  # converted commits may vanish
  assert found(name=pinned) == found(name=pinned, split='train')


def vanish(hub, monkeypatch, cache):
  """The conversion is made anew; this is another machine."""
  one = hub.datasets[NAME]
  one.commits.pop(one.branches[CONVERTED])
  monkeypatch.setenv('XDG_CACHE_HOME', str(cache))
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(cache / 'hf'))
  _repository.find.cache_clear()


def test_a_commit_that_has_vanished(hub, monkeypatch, tmp_path, capsys):
  one = hub.datasets[NAME]
  one.commit({'README.md': b''})
  files = {'a/train/0.parquet': P + b'1', 'a/test/0.parquet': P}
  first = one.commit(files, CONVERTED)
  name = f'{NAME}@{first}'
  paths = hub_lib.data_files(name, '', 'train')
  sha256 = _files.fingerprint(paths)
  # Nothing is known of what the commit had.
  vanish(hub, monkeypatch, tmp_path / 'two')
  second = one.commit({**files, 'a/test/0.parquet': P + b'new'}, CONVERTED)
  refused('no commit ' + first[:7], 'may be others', 'another work', name=name)
  # A run has recorded it, of one split.
  parsed = hub_lib.parse(name)
  assert parsed
  hub_lib.expect_data(parsed, '', 'train', sha256)
  (path,) = hub_lib.data_files(name, '', 'train')
  assert second in path and pathlib.Path(path).read_bytes() == P + b'1'
  assert f'{second[:7]} has the same files' in capsys.readouterr().err
  refused("split 'test' may be others", name=name, split='test')
  with monkeypatch.context() as patch:
    stand_in.go_offline(patch)
    assert hub_lib.data_files(name, '', 'train') == [path]
  # Its list is in the cache, and says that the other split is another one.
  vanish(hub, monkeypatch, tmp_path / 'three')
  third = one.commit({**files, 'a/dev/0.parquet': P}, CONVERTED)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (path,) = hub_lib.data_files(name, '', 'train')
  assert third in path
  vanish(hub, monkeypatch, tmp_path / 'four')
  one.commit({**files, 'a/test/0.parquet': P + b'new'}, CONVERTED)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  refused("files of the split 'test' are others", name=name, split='test')


def test_of_several_configs_one_is_named(hub):
  one = hub.datasets[NAME]
  one.commit({'README.md': b''})
  files = {'main/train/0000.parquet': P, 'socratic/train/0000.parquet': P}
  one.commit(files, CONVERTED)
  refused('has several configs; name one of main, socratic')
  assert found('socratic') == ['socratic/train/0000.parquet']
  one.commit({**files, 'default/train/0000.parquet': P}, CONVERTED)
  assert found() == ['default/train/0000.parquet']


def test_a_part_is_never_taken_for_the_whole(hub):
  one = hub.datasets[NAME]
  one.commit({'train.csv': b''})
  one.commit({'default/partial-train/0000.parquet': P}, CONVERTED)
  refused('only in part (default/train)', 'none can be read')
  own = {'data/train-00000-of-00002.parquet': P, 'data/test.parquet': P}
  own['data/train-00001-of-00002.parquet'] = P + b'1'
  commit = one.commit(own)
  assert found() == sorted(own)[1:]
  assert hub_lib.data_commit(hub_lib.Name(NAME), '', 'train') == commit
  refused('only in part', name=f'{NAME}@{one.branches[CONVERTED]}')


BY_NAMES = [
  (['train.jsonl', 'test.jsonl'], '', 'train', ['train.jsonl']),
  (['train.jsonl', 'test.jsonl'], '', 'test', ['test.jsonl']),
  (['all.jsonl'], '', 'train', ['all.jsonl']),
  (['a.jsonl', 'a.parquet'], '', 'train', ['a.parquet']),
  (['en/dev.json', 'de/dev.json'], 'de', 'validation', ['de/dev.json']),
  (['data/val-0.parquet'], '', 'validation', ['data/val-0.parquet']),
  (['train/1.parquet', 'train/0.parquet'], '', 'train')
  + (['train/0.parquet', 'train/1.parquet'],),
  (['train.jsonl', 'dataset_infos.json'], '', 'train', ['train.jsonl']),
  # Files without a word for a split, beside others that have one.
  (['all.jsonl', 'train.jsonl', 'test.jsonl'], '', 'train', ['train.jsonl']),
  (['train.jsonl', 'metadata.jsonl'], '', 'train', ['train.jsonl']),
  (['a.jsonl', 'metadata.jsonl'], '', 'train', ['a.jsonl']),
  (['train.jsonl', 'train.csv'], '', 'train', ['train.jsonl']),
  (['train/tests.jsonl', 'test/train.jsonl'], '', 'train')
  + (['test/train.jsonl', 'train/tests.jsonl'],),
  (
    [f'data/{x}-00000-of-00001.parquet' for x in ('train_sft', 'train_dpo')],
    '',
    'train_sft',
    ['data/train_sft-00000-of-00001.parquet'],
  ),
  # With the hash that `datasets` once wrote, and counted from 1.
  (
    [
      'data/train-00000-of-00002-1a.parquet',
      'data/train-00001-of-00002-2b.parquet',
    ],
    '',
    'train',
    [
      'data/train-00000-of-00002-1a.parquet',
      'data/train-00001-of-00002-2b.parquet',
    ],
  ),
  (['x-1-of-2.jsonl', 'x-2-of-2.jsonl'], '', 'train')
  + (['x-1-of-2.jsonl', 'x-2-of-2.jsonl'],),
  # As a conversion has them, but not all.
  (
    ['data/train/0.parquet', 'data/train/extra-1.parquet'],
    '',
    'train',
    ['data/train/0.parquet', 'data/train/extra-1.parquet'],
  ),
]


def test_files_of_the_repository_by_their_names(listed):
  for files, config, split, expected in BY_NAMES:
    listed(files)
    assert found(config, split) == expected, files


IN_PART = [
  (['train.jsonl.gz', 'sample.json'], ['no Parquet or JSONL files']),
  (['train.zip', 'sample.json'], ['no Parquet or JSONL files']),
  (['data.jsonl.gz', 'sample.json'], ['data.jsonl.gz of it is neither']),
  (['train-1.csv', 'train-2.jsonl'], ["split 'train'", 'train-1.csv of it']),
  (['a.jsonl', 'b.parquet'], ['several formats (a.jsonl, b.parquet)']),
  (['x/a/train.jsonl', 'x/b/train.parquet'], ['several formats (x/a/train']),
  (['train-00000-of-00002.parquet'], ['1 of the 2 shards of train.parquet']),
]


def test_a_split_is_never_read_in_part(listed):
  for files, words in IN_PART:
    listed(files)
    refused(*words)


def named(*entries: str) -> bytes:
  text = ''.join(f'  {entry}\n' for entry in entries)
  return f'---\nconfigs:\n- config_name: default\n{text}---\n'.encode()


PATTERNS = [
  (['data/x.jsonl', 'data/old/y.jsonl'], ['data_files: data/*.jsonl'])
  + (['data/x.jsonl'],),
  (['x.jsonl', 'more/y.jsonl'], ['data_files: "**/*.jsonl"'])
  + (['more/y.jsonl', 'x.jsonl'],),
  # As a conversion has them, but with a README.md.
  (
    ['data/2023/000.parquet', 'data/2024/000.parquet', 'a/b/1.parquet'],
    ['data_files: data/*/*.parquet'],
    ['data/2023/000.parquet', 'data/2024/000.parquet'],
  ),
  (['a/x1.jsonl', 'a/x2.jsonl', 'b.jsonl'], ['data_files: "a/x[!2].jsonl"'])
  + (['a/x1.jsonl'],),
  (['.old/x.jsonl', 'y.jsonl'], ['data_files: "**"'], ['y.jsonl']),
  (['a/train.jsonl', 'a/all.jsonl', 'train.jsonl'], ['data_dir: a'])
  + (['a/train.jsonl'],),
  (['a/x.jsonl', 'x.jsonl'], ['data_dir: ./a/', 'data_files: "*.jsonl"'])
  + (['a/x.jsonl'],),
  # A text means train, whatever words it has.
  (['test.jsonl', 'x.jsonl'], ['data_files: test.jsonl'], ['test.jsonl']),
]


def test_patterns_are_matched_as_the_hub_does(listed):
  for paths, entries, expected in PATTERNS:
    listed(paths, named(*entries))
    assert found() == expected, entries
    # Pinned, its README.md says the same.
    assert found(name=f'{NAME}@{40 * "a"}') == expected, entries


LOST = [
  ('data_files: [train.csv, more.jsonl]', 'train.csv of it is neither'),
  ('data_files: "*.jsonl.gz"', 'x.jsonl.gz of it is neither'),
  ('data_files: lost.jsonl', 'its README.md names for it are not there'),
  ('data_files: [more.jsonl, lost-*.jsonl]', 'names for it are not there'),
]


def test_what_a_readme_names_is_read_whole_or_not_at_all(listed):
  for entry, words in LOST:
    listed(['train.csv', 'more.jsonl', 'x.jsonl.gz'], named(entry))
    refused(words)


def test_a_conversion_that_cannot_be_looked_up_is_no_missing_one(
  hub, monkeypatch
):
  clock = types.SimpleNamespace(sleep=lambda secs: None)
  monkeypatch.setattr(_asking, 'time', clock)
  hub.datasets[NAME].commit({'train.jsonl': b'{}'})
  hub.datasets[NAME].commit({'a/train/0.parquet': P}, CONVERTED)
  for code in 429, 503:
    hub.faults.api = [code] * _asking.TRIES
    refused('The Hub has not given', str(code))
  hub.faults.api = [503]
  assert found() == ['a/train/0.parquet']


def test_offline_a_part_in_the_cache_is_not_taken_for_all(
  hub, monkeypatch, tmp_path
):
  """What another program has downloaded, which keeps no list of files."""
  commit = hub.datasets[NAME].commit({f'{x}.jsonl': b'{}' for x in 'ab'})
  name = f'{NAME}@{commit}'
  (first, _) = hub_lib.data_files(name, '', 'train')
  pathlib.Path(first).unlink()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))
  stand_in.go_offline(monkeypatch)
  refused('whether they are all cannot be seen', 'unset it', name=name)


README = """---
license: mit
configs:
- config_name: easy
  data_files:
  - split: train
    path: part/one-*.jsonl
  - split: held
    path: [part/two.jsonl]
- config_name: hard
  data_files: part/two.jsonl
---
# Sums
"""


def test_files_of_the_repository_as_its_readme_names_them(hub):
  names = ('part/one-0.jsonl', 'part/one-1.jsonl', 'part/two.jsonl')
  files = {name: name.encode() for name in names}
  hub.datasets[NAME].commit({**files, 'README.md': README.encode()})
  assert found('easy') == [*names[:2]]
  assert found('easy', 'held') == found('hard') == [names[2]]
  refused('easy, hard')


@pytest.mark.parametrize(
  'readme',
  [b'', b'no matter', b'---\n: [\n---\n', b'---\n- 1\n---\n', b'\xff---',
   b'---\nconfigs: 3\n---\n', b'---\nconfigs: [3, {data_files: 4}]\n---\n'],
)  # fmt: skip
def test_a_readme_that_says_nothing(hub, readme):
  hub.datasets[NAME].commit({'a.jsonl': b'{}', 'README.md': readme})
  assert found() == ['a.jsonl']


def test_nothing_to_read(hub):
  refused('no lab/sums here', 'HF_TOKEN')
  hub.datasets[NAME].commit({'train.csv': b'a'})
  refused('no Parquet or JSONL files')
  refused('names a file', name=f'{NAME}:train.jsonl')


def test_a_first_look_at_a_name(hub):
  """What it says is what a person then types."""
  hub.datasets[NAME].commit(
    {'b/test/0.parquet': table('1'), 'a/test/0.parquet': table('2+0', '1+1')},
    CONVERTED,
  )
  found = first_look.look(NAME, 2)
  assert [one.prompt for one in found.records] == ['2+0', '1+1']
  kwargs = {'split': 'test', 'config': 'a'}
  assert found.settings == {
    'data.train': ({'name': NAME, 'kwargs': kwargs},),
    'data.prompt_field': 'question',
  }
  source = config_lib.Source(NAME, kwargs=kwargs)
  data = config_lib.Data(prompt_field='question')
  config = config_lib.Config(data=data)
  assert len(build_data.open_source(config, source, 'train')) == 2
  own = {'default/train/0.jsonl': b'{"prompt": "1", "answer": "2"}'}
  hub.datasets['lab/own'].commit(own)
  assert first_look.look('lab/own', 1).settings == {'data.train': 'lab/own'}
  hub.datasets['lab/none'].commit({'a.csv': b''})
  with pytest.raises(ValueError, match='no Parquet or JSONL files'):
    first_look.look('lab/none', 1)


def test_records(hub):
  hub.datasets[NAME].commit(
    {'main/train/0000.parquet': table('1+1'), 'main/test/0.parquet': table('x')}
    | {'main/train/0001.parquet': table('2+0', '0+2')},
    CONVERTED,
  )
  data = config_lib.Data(prompt_field='question')
  config = config_lib.Config(data=data)
  source = config_lib.Source(f'hf:{NAME}')
  records = build_data.open_source(config, source, 'train')
  assert [one['prompt'] for one in records] == ['1+1', '2+0', '0+2']
  assert [one['answer'] for one in records] == ['2'] * 3
  assert len(build_data.files_of(source) or ()) == 2
  with pytest.raises(ValueError, match='which split of it is held out'):
    build_data.open_source(config, source, 'heldout')
  with pytest.raises(ValueError, match='takes prompt_field, answer_field, con'):
    wrong = config_lib.Source(NAME, kwargs={'subset': 'main'})
    build_data.open_source(config, wrong, 'train')
