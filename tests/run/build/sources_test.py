"""What a start reads of its files before it builds anything."""

import json
import threading

import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.learner import metrics
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.keep import workdir
from tests import runs
from tests.data import formats

pytestmark = pytest.mark.usefixtures('shared_programs')

OPEN = {'data.prompt_buckets': (), 'data.completion_buckets': ()}


def written(path, records):
  path.write_text('\n'.join(map(json.dumps, records)))
  return str(path)


@pytest.mark.parametrize('widths', [{}, OPEN])
def test_demonstrations_without_answers_are_refused(tmp_path, widths):
  file = tmp_path / 'shown.jsonl'
  config = runs.small(
    **widths,
    **{
      'data.answer_field': '',
      'warm_up.demonstrations': str(file),
      'warm_up.steps': 1,
    },
  )
  answered = {'prompt': '01+02=', 'answer': '03'}
  written(file, [answered])
  assert build.run(config).warm_up.demonstrations()[0] == answered
  written(file, [answered, {'prompt': '01+02='}])
  words = r"^Record 2 of warm_up.demonstrations=.*'prompt'\], but the warm-up"
  with pytest.raises(ValueError, match=words):
    build.run(config).warm_up.demonstrations()
  written(file, [answered, {'prompt': '01+02=', 'answer': float('nan')}])
  words = "^Line 2 of .* has the number nan in the field 'answer'"
  with pytest.raises(ValueError, match=words):
    build.run(config).warm_up.demonstrations()


@pytest.mark.parametrize(
  'train, others, ahead',
  [
    ('FILE', 'arithmetic', True),
    ('FILE', 'tests.run.build.sources_test:own', True),
    (({'name': 'FILE'}, {'name': 'arithmetic'}), '', True),
    ('arithmetic', 'FILE', False),
    ('tests.run.build.sources_test:own', 'FILE', False),
    (
      ({'name': 'FILE'}, {'name': 'tests.run.build.sources_test:own'}),
      '',
      False,
    ),
  ],
)
def test_prompts_to_train_on_are_read_ahead_from_files(
  tmp_path, train, others, ahead
):
  file = written(tmp_path / 'a.jsonl', [{'prompt': '1+1=', 'answer': '2'}])
  train, others = (
    json.loads(json.dumps(one).replace('FILE', file)) for one in (train, others)
  )
  config = runs.small(**{'data.train': train, 'data.heldout': others})
  found = build._read_ahead([{}], config)
  assert isinstance(found, data.ReadAhead if ahead else data.MakeAhead)


class Own:
  """A source of a user's own: a length and items."""

  def __init__(self, count=3, first=1):
    self.count, self.first = count, first

  def __len__(self):
    return self.count

  def __getitem__(self, place):
    return {'prompt': f'{self.first}+{place}=', 'answer': '1'}


def own(count=3, first=1):
  return Own(count, first)


class Noting(Own):
  """Notes what is asked for, and what `loop.learn` does meanwhile."""

  events = []

  def __getitem__(self, place):
    self.events.append((place, threading.current_thread()))
    return {'prompt': f'{place:02}+01=', 'answer': '1'}


def noting():
  return Noting(12)


def test_the_next_problems_are_made_while_the_devices_learn(
  tmp_path, monkeypatch
):
  to_scalars = metrics.to_scalars

  def waits(measured):
    Noting.events.append('waits')
    return to_scalars(measured)

  config = runs.small(
    **{
      'data.train': 'tests.run.build.sources_test:noting',
      'data.heldout': '',
      'reward': 'tests.judges:even',
      'steps': 3,
    }
  )
  monkeypatch.setattr(metrics, 'to_scalars', waits)
  monkeypatch.setattr(build, '_read_ahead', noted_from(build._read_ahead))
  loop.train(config, tmp_path)
  events = Noting.events
  assert [one if one == 'waits' else 'row' for one in events] == [
    *['row'] * 8, 'waits', *['row'] * 4, 'waits', 'waits',
  ]  # fmt: skip
  rows = [one for one in events if one != 'waits']
  assert {thread for _, thread in rows} == {threading.current_thread()}
  parts = map(parquet.read, parquet.files(tmp_path / 'completions'))
  drawn = [text for part in parts for text in part.prompt_texts]
  assert drawn == [f'{place:02}+01=' for place, _ in rows]


def noted_from(read_ahead):
  """What was noted until then is forgotten: a start checks some records."""

  def function(*args):
    Noting.events.clear()
    return read_ahead(*args)

  return function


def fails():
  raise KeyError('no file')


def empty():
  return []


def no_prompts():
  return [{'prompt': 'a'}, {'asked': 'b'}]


class Unreadable(Own):
  def __getitem__(self, place):
    if place:
      raise OSError(5, 'Input/output error')
    return super().__getitem__(place)


def unreadable():
  return Unreadable()


HERE = __name__


def opened(given, split='train', **changes):
  """What a name, or a name with arguments, stands for."""
  config = runs.small(**changes)
  if isinstance(given, dict):
    given = config_lib.Source(**given)
  return build_data.open_source(config, given, split)


@pytest.mark.parametrize(
  'form', ['parquet', 'array_record', 'jsonl', 'json', 'arrow', 'dict']
)
def test_a_name_tells_the_format_and_arguments_the_fields(tmp_path, form):
  records = [{'asked': 'a', 'said': 'b'}] * 4
  write = {'json': formats.jsonl, 'dict': formats.arrow_dict}.get(form)
  given, name = {'prompt_field': 'asked', 'answer_field': 'said'}, f'a.{form}'
  if form == 'dict':
    formats.arrow_dict(tmp_path / name, train=records, test=records[:2])
  else:
    (write or getattr(formats, form))(tmp_path / name, records)
  source = {'name': str(tmp_path / name), 'kwargs': given}
  found = opened(source)
  assert len(found) == 4 and found[3]['prompt'] == 'a'
  assert found[3]['answer'] == 'b'
  fields = {'data.prompt_field': 'asked', 'data.answer_field': ''}
  assert 'answer' not in opened(str(tmp_path / name), **fields)[0]
  if form == 'dict':
    given['split'] = 'test'
    assert len(opened(source, 'heldout')) == 2
    del given['split']
    with pytest.raises(
      ValueError, match=r"splits \['train', 'test'\], and None"
    ):
      opened(source, 'heldout')


def test_a_pattern_names_all_its_files(tmp_path):
  for n in range(3):
    record = {'prompt': str(n), 'answer': n}
    formats.jsonl(tmp_path / f'{n}.jsonl', [record])
    formats.array_record(
      tmp_path / f'a.array_record-0000{n}-of-00003', [record]
    )
  for name in ('*.jsonl', 'a.array_record', 'a.array_record-*-of-00003'):
    found = opened(str(tmp_path / name))
    assert [record['prompt'] for record in found] == ['0', '1', '2']


@pytest.mark.parametrize('form', ['jsonl', 'parquet', 'array_record'])
def test_a_file_without_records_among_others_is_passed_over(tmp_path, form):
  records = [{'prompt': 'a', 'answer': 'b'}]
  for name, some in (('a', []), ('b', records), ('c', [])):
    getattr(formats, form)(tmp_path / f'{name}.{form}', some)
  assert opened(f'{tmp_path}/*.{form}')[0] == records[0]
  with pytest.raises(ValueError, match='no record'):
    opened(f'{tmp_path}/[ac].{form}')


@pytest.mark.parametrize('name', ['*.jsonl', '?.parquet', 'a[0-9]', '*'])
def test_a_pattern_without_files_is_refused(tmp_path, name):
  words = r'No file matches the pattern .*; give one that'
  with pytest.raises(ValueError, match=words):
    opened(f'{tmp_path}/none/{name}')


def test_a_function_of_the_users_own():
  found = opened({'name': f'{HERE}:own', 'kwargs': {'first': 7, 'count': 2}})
  assert len(found) == 2 and found[1]['prompt'] == '7+1='
  assert len(opened(f'{HERE}:own')) == 3


@pytest.mark.parametrize(
  'given, words',
  [
    ({'name': 'arithmetic', 'kwargs': {'n': 3}}, "'arithmetic' takes no argu"),
    (
      {'name': 'a.jsonl', 'kwargs': {'promt_field': 'q'}},
      r"takes prompt_field, answer_field, but its kwargs have promt_field='q'"
      r" \(did you mean 'prompt_field'\?\)",
    ),
    ({'name': 'a.jsonl', 'kwargs': {'prompt_field': 3}}, 'prompt_field=3 in'),
    ({'name': 'tfds:x', 'kwargs': {'splits': 'a'}}, 'split, data_dir, but its'),
    (
      {'name': f'{HERE}:own', 'kwargs': {'n': 1}},
      r"own' cannot be called with the kwargs {'n': 1}: got an unexpected",
    ),
    (f'{HERE}:fails', "fails' raised KeyError: 'no file', when it was called"),
    (f'{HERE}:empty', r"empty' returned \[\], but a source is an object with"),
    (f'{HERE}:no_prompts', 'Item 1 of what .*no_prompts.*it is None'),
    (
      f'{HERE}:unreadable',
      r"Item \d of .*unreadable' returned cannot be read \(OSError: .*/out",
    ),
    (f'{HERE}:ow', r"has no function 'ow' \(did you mean 'own'\?\)"),
    ('tests', "The folder 'tests' holds no data set"),
  ],
)
def test_what_cannot_be_a_source_is_refused(given, words):
  with pytest.raises(ValueError, match=words):
    opened(given)


def test_held_out_data_of_tfds_names_its_split():
  with pytest.raises(ValueError, match='not which split of it is held out'):
    opened('tfds:gsm8k', 'heldout')


def test_files_of_one_name_in_two_places_are_both_known(tmp_path):
  several = []
  for place in ('a', 'b'):
    (tmp_path / place / 'gsm8k').mkdir(parents=True)
    (tmp_path / place / 'gsm8k' / 'x').write_text(place)
    kwargs = {'data_dir': str(tmp_path / place), 'split': 'test'}
    several.append(({'name': 'tfds:gsm8k', 'kwargs': kwargs},))
  config = runs.small(**{'data.train': several[0], 'data.heldout': several[1]})
  paths = [[str(tmp_path / place / 'gsm8k' / 'x')] for place in ('a', 'b')]
  assert list(build_data.files(config).values()) == paths
  assert isinstance(build._read_ahead([{}], config), data.ReadAhead)
  told = workdir.contents(build_data.describe(config, [[{}]], [{}]))
  assert [one['sha256'] for one in told.values()] == [
    data.fingerprint(files) for files in paths
  ]


def test_held_out_sources_are_read_one_after_the_other(tmp_path):
  own = {'name': f'{HERE}:own', 'kwargs': {'count': 2}}
  config = runs.small(**{'data.heldout': (own, {'name': 'arithmetic'})})
  found = build_data.heldout(config)
  assert len(found) == 1002
  assert [found[n]['prompt'] for n in (0, 1, 2)] == ['1+0=', '1+1=', '26+52=']
  assert build_data.heldout(runs.small(**{'data.heldout': ''})) is (None)
  for heldout, words in (
    ((), "no source in data.heldout; give one, or ''"),
    (({'name': 'arithmetic', 'weight': 2.0},), r'heldout\[0\].weight=2.0, but'),
  ):
    with pytest.raises(ValueError, match=words):
      runs.small(**{'data.heldout': heldout})
