"""Transcripts: what comes back is bitwise what was written."""

import itertools

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.episodes import types
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import parquet

pyarrow = pytest.importorskip('pyarrow')
pyarrow_parquet = pytest.importorskip('pyarrow.parquet')


def make(number=3, group=4, width=6, names=('exact', 'format'), **fields):
  """A rollout of ragged completions, one of them empty and one full."""
  rng = np.random.default_rng(number)
  length = rng.integers(1, width + 1, (number, group)).astype(np.int32)
  length[0, 0], length[-1, -1] = 0, width
  inside = np.arange(width) < length[:, :, None]

  def draw(dtype=np.float32):
    drawn = rng.normal(size=inside.shape) * 100
    return np.where(inside, drawn, 0).astype(dtype)

  batch = losses.Batch(
    tokens=draw(np.int32),
    mask=inside & (rng.random(inside.shape) < 0.8),
    keep=inside & (rng.random(inside.shape) < 0.5),
    valid=rng.random(length.shape) < 0.7,
    reward=rng.normal(size=length.shape).astype(np.float32),
    reward_parts=rng.normal(size=(*length.shape, 2)).astype(np.float32),
    truncated=rng.random(length.shape) < 0.5,
    version=draw(np.int32),
    logp_sampler=draw(),
    **fields,
  )
  return Rollout(
    batch,
    length,
    [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 5, number)],
    [f'"{p}",\nprompt\0' for p in range(number)],
    [[f'ö {p} {g} ' for g in range(group)] for p in range(number)],
    np.arange(number, dtype=np.int64) + 2**40,
    names,
  )


def assert_same_bits(got, want):
  assert type(got) is np.ndarray
  assert got.dtype == want.dtype and got.shape == want.shape
  assert got.tobytes() == np.ascontiguousarray(want).tobytes()


def assert_same(got, want):
  for name, value in want.batch._asdict().items():
    other = getattr(got.batch, name)
    if name == 'extras':
      assert other.keys() == value.keys()
      for key in value:
        assert_same_bits(other[key], np.asarray(value[key]))
    elif value is None:
      assert other is None, name
    else:
      assert_same_bits(other, np.asarray(value))
  for name in ('length', 'index'):
    assert_same_bits(getattr(got, name), getattr(want, name))
  for name in ('prompts', 'prompt_texts', 'texts', 'reward_names'):
    assert getattr(got, name) == getattr(want, name), name


@pytest.mark.parametrize(
  'sizes', [(1, 1, 1), (3, 4, 6), (5, 2, 9)], ids=lambda sizes: f'{sizes}'
)
def test_everything_comes_back_bit_for_bit(sizes):
  whole = make(*sizes)
  inside = np.arange(sizes[2]) < whole.length[:, :, None]
  nan = np.array([0x7FC00001, 0x7FC00002], np.uint32).view(np.float32)
  odd = np.where(inside, nan[np.arange(sizes[2]) % 2], 0)
  odd[-1, -1, 0] = -0.0
  whole = whole._replace(
    batch=whole.batch._replace(
      reward=np.full(whole.length.shape, np.nan, np.float32),
      advantage=odd,
      weight=np.where(inside, 1 / 3, 0),  # float64
      logp_old=whole.batch.logp_sampler.astype(np.float16),
      extras={
        'log_kept': odd,
        'turn': np.where(inside, 3, 0).astype(np.uint8),
        'level': np.ones(whole.length.shape, np.int16),
        'table': np.ones((*sizes[:2], 2, 7)),
      },
    )
  )
  assert_same(parquet.from_bytes(parquet.to_bytes(whole, 7)), whole)


@pytest.mark.parametrize('names', [(), ('same', 'same'), ('b', 'a')])
def test_reward_parts_of_any_names_keep_their_order(names):
  whole = make(names=names)
  assert_same(parquet.from_bytes(parquet.to_bytes(whole, 0)), whole)


def test_arrays_of_a_device_are_written_too():
  import jax.numpy as jnp

  whole = make()
  tokens = jnp.asarray(whole.batch.tokens)
  on_device = whole._replace(batch=whole.batch._replace(tokens=tokens))
  assert_same(parquet.from_bytes(parquet.to_bytes(on_device, 0)), whole)


def test_columns_are_what_a_person_expects(tmp_path):
  whole = make(extras={'level': np.full((3, 4), 2)})
  path = parquet.path_of(tmp_path / 'new' / 'directory', 12)
  parquet.write(path, whole, 12)
  table = pyarrow_parquet.read_table(path)
  rows = table.to_pylist()
  assert len(rows) == 12
  for row, (p, g) in zip(rows, itertools.product(range(3), range(4))):
    n = whole.length[p, g]
    assert (row['step'], row['index']) == (12, 2**40 + p)
    assert row['completion_number'] == g and row['length_tokens'] == n
    assert row['prompt'] == whole.prompt_texts[p]
    assert row['completion'] == whole.texts[p][g]
    assert row['prompt_ids'] == whole.prompts[p]
    assert row['completion_ids'] == whole.batch.tokens[p, g, :n].tolist()
    assert row['logp_sampler'] == whole.batch.logp_sampler[p, g, :n].tolist()
    assert row['judged'] == whole.batch.valid[p, g]
    assert row['reward/format'] == whole.batch.reward_parts[p, g, 1]
    assert row['extras/level'] == 2
  assert 'advantage' not in rows[0] and 'logp_ref' not in rows[0]
  assert_same(parquet.read(path), whole)


def test_what_the_file_would_lose_is_refused():
  whole = make()
  for bad in (5.0, np.nan):
    logp = whole.batch.logp_sampler.copy()
    logp[0, 0, -1] = bad
    broken = whole._replace(batch=whole.batch._replace(logp_sampler=logp))
    with pytest.raises(ValueError, match='logp_sampler is not zero past'):
      parquet.to_bytes(broken, 0)
  text = whole._replace(
    batch=whole.batch._replace(extras={'word': np.full((3, 4), 'a')})
  )
  with pytest.raises(ValueError, match='extras/word of dtype str'):
    parquet.to_bytes(text, 0)


def rewritten(path, change):
  pyarrow_parquet.write_table(change(pyarrow_parquet.read_table(path)), path)


@pytest.mark.parametrize(
  'damage',
  [
    lambda path: path.write_bytes(b'PAR1 no'),
    lambda path: path.write_bytes(path.read_bytes()[:-40]),
    lambda path: path.write_bytes(b''),
    lambda path: rewritten(path, lambda t: t.replace_schema_metadata({})),
    lambda path: rewritten(path, lambda t: t.slice(1)),
    lambda path: rewritten(path, lambda t: t.sort_by('completion_number')),
    lambda path: rewritten(path, lambda t: t.drop_columns(['mask'])),
  ],
  ids=['no', 'half', 'empty', 'bare', 'rows', 'order', 'columns'],
)
def test_other_files_are_refused_by_name(tmp_path, damage):
  path = tmp_path / 'other.parquet'
  parquet.write(path, make(), 0)
  damage(path)
  with pytest.raises(
    ValueError, match='other.parquet does not hold a whole rollout'
  ):
    parquet.read(path)


def test_files_come_by_step_and_a_kill_leaves_none(tmp_path, monkeypatch):
  for step in (100_000_000, 2, 99_999_999):
    parquet.write(parquet.path_of(tmp_path, step), make(), step)
  (tmp_path / 'step_1.parquet.txt').touch()
  (tmp_path / 'step_x.parquet').touch()
  steps = [path.name for path in parquet.files(tmp_path)]
  assert steps == [
    'step_00000002.parquet',
    'step_99999999.parquet',
    'step_100000000.parquet',
  ]
  assert parquet.files(tmp_path / 'none') == []

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(parquet.os, 'replace', killed)
  before = parquet.path_of(tmp_path, 2).read_bytes()
  with pytest.raises(KeyboardInterrupt):
    parquet.write(parquet.path_of(tmp_path, 2), make(1, 1, 1), 2)
  assert parquet.path_of(tmp_path, 2).read_bytes() == before
  assert not list(tmp_path.glob('.step*'))


def test_surplus_groups_may_be_of_any_size():
  """A rollout cut to some of its prompts, as a checkpoint keeps it."""
  whole = make(5, 2, 9)
  some = np.array([4, 1])
  batch = losses.Batch(
    *(None if x is None else x[some] for x in whole.batch[:-1]), {}
  )
  part = Rollout(
    batch,
    whole.length[some],
    [whole.prompts[p] for p in some],
    [whole.prompt_texts[p] for p in some],
    [whole.texts[p] for p in some],
    whole.index[some],
    whole.reward_names,
  )
  assert_same(parquet.from_bytes(parquet.to_bytes(part, 1)), part)


def test_answers_come_back_and_are_a_column_for_people():
  rollout = make()
  assert not parquet.from_bytes(parquet.to_bytes(rollout, 1)).answers
  rollout = rollout._replace(answers=['7', None, 'ö'])
  written = parquet.to_bytes(rollout, 1)
  assert list(parquet.from_bytes(written).answers) == ['7', None, 'ö']
  table = pyarrow_parquet.read_table(pyarrow.BufferReader(written))
  column = table['answer'].to_pylist()
  assert column == ['7'] * 4 + [None] * 4 + ['ö'] * 4
  both = types.concatenate([rollout, make()])
  assert list(both.answers) == ['7', None, 'ö', None, None, None]
  assert list(types.select(both, np.array([2, 0])).answers) == ['ö', '7']


@pytest.mark.parametrize('number', [1, 3, 150])
def test_a_process_reads_its_own_groups(tmp_path, number):
  """And of the others what all decide on."""
  want, path = make(number), tmp_path / 'a.parquet'
  parquet.write(path, want, 1)
  own = np.arange(number) % 3 == 1
  got = parquet.read(path, lambda prompts: np.where(own, 0, 1))
  assert got.holder.tolist() == [0 if here else 1 for here in own]
  assert got.own_groups == np.flatnonzero(own).tolist()
  for name in 'tokens', 'logp_sampler':
    found, whole = getattr(got.batch, name), getattr(want.batch, name)
    assert_same_bits(found[own], whole[own])
    assert not found[~own].any()
  for p in range(number):
    assert got.texts[p] == (want.texts[p] if own[p] else [''] * 4)
  known = {
    name: getattr(want.batch, name) for name in ('tokens', 'logp_sampler')
  }
  texts = want.texts
  assert_same(
    got._replace(batch=got.batch._replace(**known), texts=texts, holder=None),
    want,
  )


def test_parts_that_are_not_needed_are_not_read(tmp_path):
  path = tmp_path / 'a.parquet'
  parquet.write(path, make(1024), 1)
  assert pyarrow_parquet.ParquetFile(path).num_row_groups == 4
  read, reader = [], pyarrow_parquet.ParquetFile.read_row_groups

  def noted(self, groups, *args):
    read.extend(groups)
    return reader(self, groups, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pyarrow_parquet.ParquetFile, 'read_row_groups', noted)
    parquet.read(path, lambda prompts: np.arange(prompts) * 4 // prompts)
    assert read == [0]
    nothing = parquet.read(path, lambda prompts: np.full(prompts, 7))
    assert read == [0] and not nothing.batch.tokens.any()


@pytest.mark.parametrize('names', [('exact', 'format'), ('same', 'same')])
def test_failures_are_texts_that_come_back(names, tmp_path):
  whole = make(names=names)
  failures = np.full((3, 4, 2), '', object)
  failures[1, 2, 0], failures[2, 3, 1] = 'time limit', "raised ValueError: 'ö'"
  whole = whole._replace(failures=failures)
  path = tmp_path / 'a.parquet'
  parquet.write(path, whole, 1)
  got = parquet.read(path, lambda prompts: np.full(prompts, 7))
  np.testing.assert_array_equal(got.failures, failures)
  np.testing.assert_array_equal(got.failed, failures != '')
  first = 'failure/' + ('exact' if names[0] == 'exact' else '0')
  column = pyarrow_parquet.read_table(path)[first].to_pylist()
  assert column == [None] * 6 + ['time limit'] + [None] * 5
  # Groups of a file of an earlier version have no record.
  both = types.concatenate([make(), whole, make()])
  wanted = np.full((9, 4, 2), '', object)
  wanted[3:6] = failures
  np.testing.assert_array_equal(both.failures, wanted)
  chosen = types.select(both, np.array([5, 0]))
  np.testing.assert_array_equal(chosen.failures, wanted[[5, 0]])
  assert types.concatenate([make(), make()]).failures is None
