"""Metrics add up under any split; the files and lines people read."""

import json

import jax.numpy as jnp
import numpy as np

from grpo_jax import metrics


def test_merged_parts_equal_the_whole():
  value = jnp.arange(10.0)
  mask = value % 3 != 1
  whole = {
    'mean': metrics.masked_mean(value, mask),
    'max': metrics.masked_max(value, mask),
  }
  parts = metrics.empty(whole)
  for cut in (slice(0, 1), slice(1, 2), slice(2, 9), slice(9, 10)):
    parts = metrics.merge(
      parts,
      {
        'mean': metrics.masked_mean(value[cut], mask[cut]),
        'max': metrics.masked_max(value[cut], mask[cut]),
      },
    )
  scalars = metrics.to_scalars(whole)
  assert metrics.to_scalars(parts) == scalars
  np.testing.assert_allclose(scalars['mean'], np.arange(10.0)[mask].mean())
  assert scalars['max'] == 9


def test_metrics_of_nothing_are_left_out():
  nothing = jnp.zeros(3, bool)
  scalars = metrics.to_scalars(
    {
      'mean': metrics.masked_mean(jnp.full(3, jnp.nan), nothing),
      'max': metrics.masked_max(jnp.ones(3), nothing),
    }
  )
  assert scalars == {}


def test_merge_keeps_names_of_either_side():
  one = metrics.Mean(jnp.array(1.0), jnp.array(2.0))
  merged = metrics.merge({'a': one, 'b': one}, {'b': one, 'c': one})
  assert merged.keys() == {'a', 'b', 'c'} and merged['b'].count == 4


def test_the_writer_appends_one_object_per_step(tmp_path):
  writer = metrics.Writer(tmp_path / 'new' / 'run')
  writer.write(0, {'reward': 0.5})
  writer.write(1, {'reward': 0.75})
  lines = [json.loads(x) for x in writer.path.read_text().splitlines()]
  assert [x['step'] for x in lines] == [0, 1]
  assert [x['reward'] for x in lines] == [0.5, 0.75]
  assert lines[0]['elapsed_secs'] <= lines[1]['elapsed_secs']


def test_what_is_not_finite_is_null_and_earlier_runs_are_kept(tmp_path):
  for value in (float('nan'), float('inf'), None):
    metrics.Writer(tmp_path).write(0, {'reward': value})
  files = sorted(path.name for path in tmp_path.iterdir())
  assert files == ['metrics.1.jsonl', 'metrics.2.jsonl', 'metrics.jsonl']
  for name in files:
    text = (tmp_path / name).read_text()
    assert json.loads(text)['reward'] is None and 'NaN' not in text


def test_a_metric_may_count_under_a_condition_only():
  mean = metrics.Mean(jnp.array(3.0), jnp.array(2.0))
  most = metrics.Max(jnp.array(5.0))
  for condition in (True, False):
    kept = {
      'mean': metrics.only_if(jnp.array(condition), mean),
      'max': metrics.only_if(jnp.array(condition), most),
    }
    expected = {'mean': 1.5, 'max': 5.0} if condition else {}
    assert metrics.to_scalars(kept) == expected


def test_progress_writes_plain_lines_where_there_is_no_terminal(capsys):
  progress = metrics.Progress(9)
  progress.show(4, {'reward': 0.25, 'unknown': 1.0})
  progress.close()
  error = capsys.readouterr().err
  assert error.startswith('step 4/9  reward 0.250  ') and error.count('\n') == 1
