"""What `grpo-jax plan` says, beside programs that are compiled by hand.

  python -m tests.planning.by_hand [--lowered] [CASE...]

compiles programs for TPUs twice, and prints a row of the table of
grpo_jax/commands/README.md for each: once as a plan does, and once without what
plans have in common with runs. Here the model's fields are written down, and
the mesh and the shapes and shardings of all arguments are made by hand. It
needs libtpu, and minutes for each program; without names of `CASES` all are
compiled. With `--lowered` nothing is: it is said whether the compiler would be
given the same text for the same devices, which takes seconds.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
from typing import Any
from typing import NamedTuple

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.config import Config
from grpo_jax.engines.local import next_token
from grpo_jax.engines.local import prepare
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.episodes import rollout
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import Optimizer
from grpo_jax.learner.types import Placement
from grpo_jax.learner.types import Scoring
from grpo_jax.mesh import sharding
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.planning import compiling
from grpo_jax.planning import hlo
from grpo_jax.planning import topologies
from tests.planning import estimates

_QWEN = {'rope_base': 1e6, 'qkv_bias': True}
MODELS = {
  'Qwen2.5-0.5B': dict(
    vocab_size=151936, num_layers=24, width=896, num_heads=14, num_kv_heads=2,
    head_dim=64, mlp_width=4864, tied_embeddings=True, **_QWEN,
  ),
  'Qwen2.5-7B': dict(
    vocab_size=152064, num_layers=28, width=3584, num_heads=28, num_kv_heads=4,
    head_dim=128, mlp_width=18944, **_QWEN,
  ),
  'Llama-3.1-70B': dict(
    vocab_size=128256, num_layers=80, width=8192, num_heads=64, num_kv_heads=8,
    head_dim=128, mlp_width=28672, rope_base=5e5, norm_epsilon=1e-5,
    rope_scaling=models.RopeScaling('llama3', 8.0, original_tokens=8192),
  ),
}  # fmt: skip


class Case(NamedTuple):
  """A run, once more without a config.

  Attributes:
    model: The fields of its `ModelConfig`.
    config: What a plan reads.
    topology: Such as `v5e:4x4`.
    programs: Which to compare.
  """

  model: dict[str, Any]
  config: Config
  topology: str
  programs: tuple[str, ...]


class Figures(NamedTuple):
  """What the compiler says: its verdict, and bytes of one device."""

  fits: bool
  memory: int = 0
  collectives: float = 0.0


def case(
  model: str,
  topology: str,
  mesh: dict[str, int],
  *programs: str,
  **changes: Any,
) -> Case:
  """A large model: 64 prompts of 512 tokens, 8 completions of 1,024 each."""
  given = {
    'learner.micro_rows': 16,
    'mesh.data': 1,
    **{f'mesh.{axis}': size for axis, size in mesh.items()},
  }
  config = estimates.config(model, **{**given, **changes})
  fields = {**MODELS[model], 'compute_dtype': 'bfloat16', 'remat': 'layer'}
  return Case(fields, config, topology, programs)


LONG = {
  'learner.micro_rows': 64,
  'data.prompt_buckets': (1024,),
  'data.completion_buckets': (4096,),
  'sampler.max_tokens': 4096,
}
CASES = {
  '0.5B': lambda: case(
    'Qwen2.5-0.5B', 'v5e:4x4', {'fsdp': 16}, 'prefill', 'decode'
  ),
  '0.5B-update': lambda: case(
    'Qwen2.5-0.5B', 'v5e:4x4', {'fsdp': 16}, 'train_step'
  ),
  '7B': lambda: case(
    'Qwen2.5-7B', 'v5p:4x4x4', {'data': 4, 'fsdp': 4, 'tensor': 4},
    'decode',
  ),
  '7B-update': lambda: case(
    'Qwen2.5-7B', 'v5p:4x4x4', {'fsdp': 16, 'tensor': 4}, 'train_step'
  ),
  '70B': lambda: case(
    'Llama-3.1-70B', 'v5p:8x8x8', {'fsdp': 64, 'tensor': 8}, 'decode',
    **LONG,
  ),
  '70B-update': lambda: case(
    'Llama-3.1-70B', 'v5p:8x8x8', {'fsdp': 64, 'tensor': 8}, 'train_step',
    **LONG, **{'learner.row_completions': 1},
  ),
  # No mesh of eight chips has room for it.
  '7B-small': lambda: case(
    'Qwen2.5-7B', 'v5e:2x4', {'fsdp': 4, 'tensor': 2}, 'decode', 'train_step',
    **{'sampler.prompts': 4, 'sampler.group': 4, 'learner.micro_rows': 4},
  ),
}  # fmt: skip


def planned(given: Case, program: str) -> Figures:
  """As a plan has it."""
  request = compiling.Request(
    dataclasses.asdict(given.config), given.topology, 1, program
  )
  (found,) = compiling.compile_all([request])
  assert not found.error or not found.fits, found.error
  return Figures(found.fits, found.peak_bytes, _bytes(found.collectives))


def by_hand(given: Case, program: str) -> Figures:
  """The same without a plan."""
  mesh = _mesh(given)
  lowered, trips = _lowered(given, mesh, program)
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    assert 'RESOURCE_EXHAUSTED' in str(error), error
    return Figures(False)
  memory = compiled.memory_analysis()
  kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return Figures(
    True,
    memory.argument_size_in_bytes + kept + memory.temp_size_in_bytes,
    _bytes(hlo.Program(compiled.as_text(), trips, mesh.size).collectives()),
  )


def is_given_the_same(given: Case, program: str) -> bool:
  """Whether the compiler of a plan gets what is made here."""
  topology, mesh = topologies.named(given.topology), _mesh(given)
  lowered, trips = _lowered(given, mesh, program)
  other = compiling.lowered(given.config, topology, program)
  places = topologies.mesh(topology, given.config.mesh)
  return (
    trips == other.trips
    and lowered.as_text() == other.lowered.as_text()
    and [device.id for device in mesh.devices.flat]
    == [device.id for device in places.devices.flat]
  )


def _lowered(given: Case, mesh, program: str) -> tuple[Any, int]:
  model = models.Transformer(models.ModelConfig(**given.model))
  lower = _learning if program == 'train_step' else _sampling
  return lower(given.config, model, mesh, program)


def _bytes(collectives: Any) -> float:
  return sum(one.bytes * one.times for one in collectives)


def _mesh(given: Case) -> Mesh:
  found = topologies.devices(topologies.named(given.topology))
  sizes = given.config.mesh
  shape = sizes.data, sizes.fsdp, sizes.expert, 1, sizes.tensor
  placed = mesh_utils.create_device_mesh(
    shape, devices=found, allow_split_physical_axes=True
  )
  types = (AxisType.Auto,) * 5
  axes = 'data', 'fsdp', 'expert', 'context', 'tensor'
  return Mesh(placed, axes, axis_types=types)


def _at(tree: Any, places: Any) -> Any:
  """Shapes with shardings: a tree of them, or one for all."""
  if isinstance(places, NamedSharding):
    places = jax.tree.map(lambda _: places, tree)
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    tree,
    places,
  )


def _sampling(config: Config, model, mesh, program: str) -> tuple[Any, int]:
  """A program of the sampler, and how often its loop runs."""
  numbers, tokens = config.sampler, config.sampler.max_tokens
  rows = NamedSharding(mesh, PartitionSpec(('data', 'fsdp', 'expert')))
  whole = NamedSharding(mesh, PartitionSpec())
  params = jax.eval_shape(model.init, jax.random.key(0))
  read = jax.eval_shape(
    functools.partial(prepare.sampler_params, model), params
  )
  rules = sharding.DECODING_RULES
  read = _at(
    read, sharding.param_shardings(mesh, read, model.logical_axes, rules)
  )
  choices = next_token.Choices(eos_ids=(0,))
  sampler = sampler_lib.Sampler(model, choices, numbers.group, mesh)
  (width,) = config.data.prompt_buckets

  def of_rows(*shape, dtype=jnp.int32):
    shape = numbers.prompts, *shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  prompts = sampler_lib.Prompts(
    of_rows(width),
    of_rows(),
    of_rows(numbers.group, 2, dtype=jnp.uint32),
    next_token.Numbers(limit=of_rows(), scale=of_rows(dtype=jnp.float32)),
  )
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  prefill = sampler_lib.prefill.lower(sampler, read, prompts, tokens)
  if program == 'prefill':
    return prefill, 1

  def place(x):
    if len(x.shape) < 4:
      return rows if x.shape else whole
    axes: list[Any] = [('data', 'fsdp', 'expert'), None, None, None]
    heads = x.shape.index(model.config.num_kv_heads, 1)
    if x.shape[heads] % mesh.shape['tensor'] == 0:
      axes[heads] = 'tensor'
    return NamedSharding(mesh, PartitionSpec(*axes))

  made = prefill.out_info[0]
  made = _at(made, jax.tree.map(place, made))
  return sampler_lib.decode.lower(sampler, read, made, *(scalar,) * 2), tokens


def _learning(config: Config, model, mesh, program: str) -> tuple[Any, int]:
  """An update, and how many micro-batches it has."""
  del program  # there is one
  numbers, whole = config.sampler, NamedSharding(mesh, PartitionSpec())
  (width,) = config.data.prompt_buckets

  def score(params, layout, wanted, forward_mode=False):
    return models.score(
      model, params, layout, 1.0, wanted, forward_mode=forward_mode
    )

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: model.decays(sharding.path_names(path)), params
    )

  optimizer = optim.adamw(
    optim.learning_rate(3e-4, 0, 'constant', 100), b1=0.9, b2=0.99,
    epsilon=1e-8, weight_decay=0.01, clip_norm=1.0, decays=decays,
  )  # fmt: skip
  method = losses.methods.grpo(kl_coefficient=0.0)
  learner = Learner(
    method,
    Scoring(score, takes_shards=True),
    Optimizer(optimizer),
    Placement(mesh, model.logical_axes),
    compute_all=False,
  )
  params = jax.eval_shape(model.init, jax.random.key(0))
  places = step.state_sharding(learner, params)
  state = jax.eval_shape(lambda p: step.init(learner, p), params)
  blank = rollout.blank(
    numbers.prompts, numbers.group, width, numbers.max_tokens,
    len(config.rewards), config.data.completion_buckets,
  )  # fmt: skip
  spec = LayoutSpec(
    config.learner.layout,
    config.learner.micro_rows,
    config.learner.row_completions,
    prompt_buckets=config.data.prompt_buckets,
    shards=mesh.shape['data'] * mesh.shape['fsdp'] * mesh.shape['expert'],
  )
  chosen = np.arange(numbers.prompts)
  layout, used = micro_batches.cut_rollout(blank, chosen, spec)
  batch = losses.with_required(method, blank.batch)
  # What the learner adds: which tokens are of the policy that learns.
  shape, extras = batch.mask.shape, batch.extras
  batch = batch._replace(
    entropy_old=extras['entropy_sampler'],
    extras={**extras, 'fresh': np.ones(shape, bool)},
  )
  batch, *_ = jax.eval_shape(
    functools.partial(step.credit, learner), batch, state.loss_state
  )

  def train_step(*args):
    with sharding.use(mesh):
      return step.train_step(learner, None, *args)

  jitted = jax.jit(
    train_step,
    donate_argnums=0,
    static_argnums=7,
    out_shardings=(places, whole),
    compiler_options=sharding.COMPILER_OPTIONS,
  )
  # Of arrays [P,G,T] each data shard has some positions, if all have as many.
  shards = tuple(a for a in ('data', 'fsdp', 'expert') if mesh.shape[a] > 1)
  parts = math.prod(mesh.shape[axis] for axis in shards)
  each = PartitionSpec(None, None, shards if shape[2] % parts == 0 else None)
  by_position = NamedSharding(mesh, each)
  batch_places = jax.tree.map(
    lambda x: by_position if x.shape == shape else whole, batch
  )
  rows = PartitionSpec(None, ('data', 'fsdp', 'expert'))
  start = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  lowered = jitted.lower(
    _at(state, places), _at(batch, batch_places), chosen,
    _at(layout, NamedSharding(mesh, rows)), used, start, start, False,
  )  # fmt: skip
  return lowered, used


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--lowered', action='store_true')
  parser.add_argument('cases', nargs='*', help=', '.join(CASES))
  asked = parser.parse_args()
  if not asked.lowered:
    print(
      '| model | machines | mesh | program | GiB by hand | GiB by the plan '
      '| MiB of collectives by hand | by the plan |\n' + '| --- ' * 8 + '|'
    )
  for name in asked.cases or CASES:
    given = CASES[name]()
    for program in given.programs:
      if asked.lowered:
        same = is_given_the_same(given, program)
        print(f'{name} {program}: {"the same" if same else "other"}')
      else:
        print(row(given, program), flush=True)


def row(given: Case, program: str) -> str:
  """A line of the table."""
  sizes = dataclasses.asdict(given.config.mesh).items()
  mesh = ' x '.join(f'{axis} {n}' for axis, n in sizes if n > 1)
  model = pathlib.Path(given.config.model.path).name
  both = by_hand(given, program), planned(given, program)
  memory = (
    f'{one.memory / 2**30:.3f}' if one.fits else 'does not fit' for one in both
  )
  sent = (f'{one.collectives / 2**20:,.1f}' for one in both)
  cells = model, given.topology, mesh, f'`{program}`', *memory, *sent
  return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
  main()
