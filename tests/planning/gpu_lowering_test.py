"""Programs lowered for GPUs that are not there, and what is counted in them."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import pytest

from grpo_jax.commands import plan as command
from grpo_jax.config import Mesh
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.planning import compiling
from grpo_jax.planning import hlo
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.run.build import build
from tests import runs
from tests.cli import command as run_command
from tests.planning.arithmetic_test import WIDE

pytestmark = pytest.mark.filterwarnings(
  # JAX 0.12 warns of its Triton backend; see `kernels.decode`.
  'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)

H100 = topologies.named('h100-sxm:8')


def config(mesh, **changes):
  sizes = {'learner.micro_rows': 0, 'sampler.prompts': 16}
  return dataclasses.replace(
    runs.small(**WIDE | sizes | changes), mesh=Mesh(**mesh)
  )


@functools.cache
def run(mesh='fsdp=4,tensor=2', **changes):
  """The parts of a run on eight GPUs."""
  sizes = {k: int(v) for k, v in (x.split('=') for x in mesh.split(','))}
  given = config(sizes, **changes)
  at = topologies.abstract_mesh(H100, given.mesh)
  return build.abstract(given, at)


def lowered(parts, program):
  with compiling.without_a_gpu():
    return compiling.lowerings(parts)[program]()


@pytest.mark.parametrize(
  'program, kernels',
  [
    ('prefill', {'__cudnn$fmhaSoftmax'}),
    ('decode', {'__gpu$xla.gpu.triton'}),
    ('regroup', set()),
    pytest.param(
      'train_step',
      {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'},
      marks=pytest.mark.long,
    ),
  ],
)
def test_programs_are_lowered_with_the_kernels_of_gpus(program, kernels):
  parts = run(**{'model.compute_dtype': 'bfloat16', 'model.num_layers': 1})
  found = lowered(parts, program)
  text = found.lowered.as_text()
  assert (
    set(re.findall(r'custom_call @([\w$.]+)', text))
    & {
      '__cudnn$fmhaSoftmax',
      '__cudnn$fmhaSoftmaxBackward',
      '__gpu$xla.gpu.triton',
    }
    == kernels
  )
  flops, kernels_run = hlo.lowered_work(
    found.lowered.compiler_ir('stablehlo'), parts.run.mesh.shape, found.trips
  )
  assert bool(kernels_run) == bool(kernels)


def test_afterwards_jax_asks_for_a_gpu_again():
  parts = run(**{'model.compute_dtype': 'bfloat16', 'model.num_layers': 1})
  with compiling.without_a_gpu():
    pass
  with pytest.raises(RuntimeError, match='cuDNN is not detected'):
    compiling.lowerings(parts)['prefill']()


@pytest.mark.parametrize(
  'program, mesh',
  [
    ('prefill', 'fsdp=4,tensor=2'),
    ('train_step', 'data=2,fsdp=2,tensor=2'),
    *(
      pytest.param(*row, marks=pytest.mark.long)
      for row in (
        ('prefill', 'data=2,fsdp=2,tensor=2'),
        ('decode', 'fsdp=4,tensor=2'),
        ('decode', 'data=2,fsdp=2,tensor=2'),
        ('train_step', 'fsdp=4,tensor=2'),
      )
    ),
  ],
)
def test_operations_are_those_of_arithmetic(program, mesh):
  parts = run(mesh)
  found = lowered(parts, program)
  flops, _ = hlo.lowered_work(
    found.lowered.compiler_ir('stablehlo'), parts.run.mesh.shape, found.trips
  )
  counted = arithmetic.Arithmetic(parts).work(program).flops
  assert flops == pytest.approx(counted, rel=0.03)


def test_products_of_a_program_whose_author_knows_them():
  """In a loop, in a loop of unknown length, on a shard, in the light branch."""
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  rows = PartitionSpec('data')

  def on_shard(x, y):  # f32[8,16], half of the rows
    def five(x, _):
      return x @ y, None

    x, _ = jax.lax.scan(five, x, length=5)
    return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x @ y, x)

  def program(x, y):
    x = jax.shard_map(
      on_shard,
      mesh=mesh,
      in_specs=(rows, PartitionSpec()),
      out_specs=rows,
      axis_names={'data'},
      check_vma=False,
    )(x, y)
    light = lambda x: x @ y
    return jax.lax.cond(jnp.sum(x) > 0, light, lambda x: x @ y @ y, x)

  given = jnp.ones((16, 16)), jnp.ones((16, 16))
  with sharding.use(mesh):
    module = jax.jit(program).lower(*given).compiler_ir('stablehlo')
  flops, kernels = hlo.lowered_work(module, mesh.shape, trips=3)
  one = 2 * 8 * 16 * 16  # on half of the rows; tensor and fsdp share the rest
  assert flops == (5 + 3) * one / 4 + 2 * one / 8
  assert kernels == 0


def request(mesh, program, **changes):
  values = dataclasses.asdict(config(mesh, **changes))
  return compiling.Request(values, H100.name, 1, program)


def test_the_worker_tells_operations_and_nothing_else():
  answer = compiling.answer(request({'fsdp': 8}, 'prepare'))
  assert answer == compiling.Compiled(only_lowered=True, secs=answer.secs)
  answer = compiling.answer(request({'fsdp': 8}, 'prefill'))
  counted = arithmetic.Arithmetic(run('fsdp=8')).work('prefill').flops
  assert answer.flops == pytest.approx(counted, rel=0.03)
  assert not answer.error and not answer.peak_bytes


def test_what_cannot_be_lowered_is_said_in_a_sentence(monkeypatch, capsys):
  def refuse(*_):
    raise NotImplementedError('no such kernel\nfor this head')

  monkeypatch.setattr(compiling, 'lowered', refuse)
  answer = compiling.answer(request({'fsdp': 8}, 'decode'))
  sentence = (
    'cannot be lowered for CUDA: NotImplementedError: no such kernel for this '
    'head'
  )
  assert answer.error == sentence and answer.only_lowered

  def compile_all(requests, **_):
    done = compiling.Compiled(flops=7.0, only_lowered=True)
    return [answer if one.program == 'decode' else done for one in requests]

  monkeypatch.setattr(compiling, 'compile_all', compile_all)
  made = plans.plan(config({'fsdp': 8}), H100)
  assert not made.is_whole
  command.show(made)
  said = ' '.join(capsys.readouterr().out.split())
  assert 'Not known, since not all programs could be lowered' in said
  assert f'decode: {sentence}' in said
  assert 'Lowered for CUDA: prepare, prefill, regroup, train_step.' in said
  found = command.to_json(made)
  assert found['fits'] is None
  for name, one in found['programs'].items():
    assert one['estimated'] and not one['compiled']
    assert one['lowered'] == (name != 'decode')
  # Operations are those that were lowered; all else is arithmetic.
  assert found['programs']['train_step']['flops'] == 7.0
  estimate = command.to_json(plans.plan(config({'fsdp': 8}), H100, True))
  for name, one in found['programs'].items():
    assert one['memory_gib'] == estimate['programs'][name]['memory_gib']
    assert not estimate['programs'][name]['lowered']


@pytest.mark.long
def test_the_command_lowers_for_gpus():
  done = run_command(
    'plan',
    '--config=tests/small_config.py',
    '--config.model.compute_dtype=bfloat16',
    '--config.learner.micro_rows=4',
    '--config.sampler.prompts=8',
    '--topology=h100-sxm:8',
    '--mesh=data=2,fsdp=2,tensor=2',
    '--json',
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['fits'] and found['programs'].keys() >= {'decode', 'train_step'}
  assert all(one['lowered'] for one in found['programs'].values())
  assert 'train_step: lowered in' in done.stderr
