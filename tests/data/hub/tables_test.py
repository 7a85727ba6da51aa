"""Data sets of the Hub: which files hold a split, and records of them."""

import pathlib

import pyarrow as pa
from pyarrow import parquet
import pytest

from grpo_jax import config as config_lib
from grpo_jax.data import first_look
from grpo_jax.data import hub as hub_lib
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


def test_of_several_configs_one_is_named(hub):
  one = hub.datasets[NAME]
  one.commit({'README.md': b''})
  files = {'main/train/0000.parquet': P, 'socratic/train/0000.parquet': P}
  one.commit(files, CONVERTED)
  refused('has several configs; name one of main, socratic')
  assert found('socratic') == ['socratic/train/0000.parquet']
  one.commit({**files, 'default/train/0000.parquet': P})
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


@pytest.mark.parametrize(
  'files, config, split, expected',
  [
    (['train.jsonl', 'test.jsonl'], '', 'train', ['train.jsonl']),
    (['train.jsonl', 'test.jsonl'], '', 'test', ['test.jsonl']),
    (['all.jsonl'], '', 'train', ['all.jsonl']),
    (['a.jsonl', 'a.parquet'], '', 'train', ['a.parquet']),
    (['en/dev.json', 'de/dev.json'], 'de', 'validation', ['de/dev.json']),
    (['data/val-0.parquet'], '', 'validation', ['data/val-0.parquet']),
    (['train/1.parquet', 'train/0.parquet'], '', 'train')
    + (['train/0.parquet', 'train/1.parquet'],),
    (['train.jsonl', 'dataset_infos.json'], '', 'train', ['train.jsonl']),
  ],
)
def test_files_of_the_repository_by_their_names(
  hub, files, config, split, expected
):
  hub.datasets[NAME].commit({path: path.encode() for path in files})
  assert found(config, split) == expected


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
