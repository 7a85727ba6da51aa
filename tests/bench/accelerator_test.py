"""The accelerator's benchmark, as far as a CPU can run it."""

import json

import pytest

from tests.bench import accelerator


def event(name, start, micros, line=1, **args):
  return dict(
    ph='X', pid=0, tid=line, name=name, ts=start, dur=micros, args=args
  )


def test_time_inside_an_operation_is_not_its_own():
  host = [
    event('while.2', 0, 100, hlo_op='while.2'),
    event('dot.1', 10, 30, hlo_op='dot.1'),
    event('dot.7', 50, 20, hlo_op='dot.7'),
    event('dot.9', 100, 5, hlo_op='dot.9'),  # behind the loop
    event('add', 20, 7, line=2, hlo_op='add'),  # on another thread
    event('python', 0, 1000),
  ]
  expected = {'while': 50, 'dot': 55, 'add': 7}
  assert accelerator.own_micros(host) == expected
  named = dict(ph='M', pid=0, tid=3, name='thread_name')
  named['args'] = {'name': 'XLA Ops'}
  device = [*host, named, event('fusion.3', 0, 40, line=3)]
  assert accelerator.own_micros(device) == {'fusion': 40}


@pytest.mark.long
def test_the_whole_benchmark_runs(capsys):
  told = accelerator.main(['--tiny', '--dtype', 'float32'])
  *table, last = capsys.readouterr().out.splitlines()
  assert json.loads(last) == told
  assert len(table) == sum(
    len(value) if isinstance(value, list) else 1 for value in told.values()
  )
  for name in ('sample_tokens_per_sec', 'train_tokens_per_sec', 'train_mfu'):
    assert told[name] > 0
  for name in ('decode_top_ops', 'train_top_ops'):
    assert len(told[name]) == 5
  assert told['train_tokens_per_sec'] * told['train_secs'] == pytest.approx(
    2 * 8 + 2 * 2 * 8
  )


def test_the_shapes_are_those_of_the_models():
  sizes = {'0.5B': 494_032_768, '1.5B': 1_543_714_304}  # their model cards
  for shape, size in sizes.items():
    config = accelerator.models.ModelConfig(**accelerator.shapes.SHAPES[shape])
    model = accelerator.models.Transformer(config)
    abstract = accelerator.jax.eval_shape(
      model.init, accelerator.jax.random.key(0)
    )
    leaves = accelerator.jax.tree.leaves(abstract)
    assert sum(x.size for x in leaves) == size


@pytest.mark.reference
def test_torch_does_the_same_work(capsys):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  from tests.bench import accelerator_torch

  told = accelerator_torch.main(['--tiny', '--dtype', 'float32'])
  *_, last = capsys.readouterr().out.splitlines()
  assert json.loads(last) == told
  assert told['train_tokens_per_sec'] * told['train_secs'] == pytest.approx(
    2 * 8 + 2 * 2 * 8
  )
  config = accelerator.models.ModelConfig(**accelerator.shapes.SHAPES['tiny'])
  model = accelerator.models.Transformer(config)
  abstract = accelerator.jax.eval_shape(
    model.init, accelerator.jax.random.key(0)
  )
  sizes = [x.size for x in accelerator.jax.tree.leaves(abstract)]
  # Qwen 2 has biases of queries, keys and values, which the tiny one has not.
  biases = 2 * (64 + 32 + 32)
  assert told['parameters'] == sum(sizes) + biases
