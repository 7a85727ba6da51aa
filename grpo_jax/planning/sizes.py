"""The sizes of a run's parts: its rows, and the bytes of its parameters.

All bytes are of one device. "Gathered" weights are whole over `fsdp`, and still
split over `tensor` and `expert`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.learner import layouts
from grpo_jax.learner import offload
from grpo_jax.mesh import sharding
from grpo_jax.run.build.build import Abstract


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of an update.

  Attributes:
    micro: Micro-batches.
    rows: Rows of a micro-batch, on all devices.
    columns: Tokens of a row.
    completions: Of a row; packed rows have so many on average.
    prompts: Copies of a prompt in a row, with what is left over in it.
  """

  micro: int
  rows: int
  columns: int
  completions: float
  prompts: float


def rows_of(
  parts: Abstract, prompts: int, prompt_tokens: int, tokens: int
) -> Rows:
  """The rows of an optimizer batch whose completions are all of full length.

  Then every row is full, and `'auto'` finds nothing to pack.

  Args:
    parts: Of the run.
    prompts: Of the batch.
    prompt_tokens: Of each prompt.
    tokens: Of each completion.
  """
  spec, group = parts.updater.layout, parts.run.draw.group
  if spec.kind == 'packed':
    stack, used = layouts.abstract_stack(
      parts.updater.compiled, parts.example(), np.arange(prompts), spec
    )
    _, rows, columns = stack.tokens.shape
    completions = prompts * group / (used * rows)
    rest = columns - completions * tokens
    return Rows(used, rows, columns, completions, rest / prompt_tokens)
  per_row = 1
  if spec.kind in ('auto', 'shared'):
    per_row = spec.row_completions or group
  columns = prompt_tokens + per_row * tokens
  number = math.ceil(prompts * group / per_row)
  rows = spec.rows_of(columns, prompts)
  return Rows(math.ceil(number / rows), rows, columns, per_row, 1)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Bytes of the parameters, of one device.

  Attributes:
    number: Of parameters, of the whole model.
    trained: As the learner holds them.
    moments: Of the optimizer, with its counters, unless they lie on the host.
    reference: 0 if the method has none, or if it lies on the host.
    host_moments: Of the optimizer, in the memory of the host.
    host_reference: In the memory of the host.
    frozen: Of what adapters leave alone.
    older: Of the trained parameters one version older, which draw rollouts
      ahead; 0 if none are.
    gathered: In the compute dtype, gathered.
    sampled: As decoding reads them, on the sampler's mesh.
    head: Of the output layer alone, gathered, in the compute dtype.
    table: Of the embedding, which is looked up and not multiplied by.
    experts: Of the experts of all layers, gathered, in the compute dtype.
    fetched: Of `gathered`, those that come from other shards of `fsdp`. An axis
      that its size does not divide is not split.
    scattered: Of `trained`, those that are split over `fsdp`.
  """

  number: int
  trained: int
  moments: int
  reference: int
  frozen: int
  gathered: int
  sampled: int
  head: int
  table: int
  experts: int
  fetched: int
  scattered: int
  host_moments: int = 0
  host_reference: int = 0
  older: int = 0

  @property
  def state(self) -> int:
    """What stays in the device's memory all the time."""
    return self.trained + self.moments + self.reference + self.frozen

  @property
  def on_host(self) -> int:
    """What lies in the memory of the host, for one device."""
    return self.host_moments + self.host_reference

  def read(self, tokens: float, mixture: models.Experts | None) -> float:
    """What a pass over some tokens reads, bytes.

    Args:
      tokens: Of a mixture, only the experts that they choose are read, each
        expert being chosen as often as any other. One token gives the least.
      mixture: Of the model.
    """
    whole = float(self.gathered - self.table)
    if mixture is None:
      return whole
    idle = (1 - mixture.per_token / mixture.number) ** tokens
    return whole - idle * self.experts


def weights_of(parts: Abstract) -> Weights:
  """The parameters of a run."""
  run, state = parts.run, parts.updater.compiled.abstract
  mesh, model = run.mesh, parts.model
  whole = parts.updater.joined(state.params)
  read = parts.engine.decoding_params(whole)
  gathered = _placed(read, mesh, parts.engine.model)
  compute = jnp.dtype(model.compute_dtype).itemsize
  width, vocab = model.width, model.vocab_size
  split = mesh.shape['tensor'] if vocab % mesh.shape['tensor'] == 0 else 1
  table = width * vocab * compute // split
  tied = model.tied_embeddings

  def over_fsdp(tree):
    return [x for x in jax.tree.leaves(tree) if 'fsdp' in _axes_of(x)]

  return Weights(
    number=sum(math.prod(x.shape) for x in jax.tree.leaves(whole)),
    trained=on_device(state.params),
    moments=on_device(state.opt_state),
    reference=on_device(state.reference),
    frozen=on_device(parts.updater.frozen),
    gathered=on_device(gathered),
    sampled=on_device(read),
    head=table,
    table=0 if tied else table,
    experts=on_device(
      [
        leaf
        for path, leaf in jax.tree.leaves_with_path(gathered)
        if 'experts' in sharding.path_names(path)
      ]
    ),
    fetched=mesh.shape['fsdp']
    * compute
    * sum(math.prod(x.sharding.shard_shape(x.shape)) for x in over_fsdp(whole)),
    scattered=on_device(over_fsdp(state.params)),
    host_moments=on_host(state.opt_state),
    host_reference=on_host(state.reference),
    older=on_device(state.params) * run.draw.ahead,
  )


def recomputed(model: models.ModelConfig) -> float:
  """The share of the layers' products that `remat` computes again.

  No gradient needs the output of the last product of an MLP.
  """
  if model.remat == 'none':
    return 0.0
  mixture = model.experts
  hidden = sum(
    mixture.per_token * mixture.width
    if kind.experts and mixture
    else model.mlp_width
    for kind in model.kinds
  )
  last = 2 * model.width * hidden
  return 1 - last / float(models.flops_per_token(model, 0, False))


def _placed(read: Any, mesh: Any, model: Any) -> Any:
  """What decoding reads, on the learner's mesh."""
  rules = sharding.DECODING_RULES
  place = sharding.of_params(mesh, read, model.logical_axes, rules)
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    read,
    place,
  )


def as_computed(model: models.ModelConfig, platform: str) -> models.ModelConfig:
  """The model with the policy of `remat` that comes to the same there.

  cuDNN keeps nothing of attention for another backward pass, and a CPU's memory
  is the host's.

  Args:
    model: Of a run.
    platform: See `sharding.platform`.
  """
  cudnn = model.attention in ('auto', 'cudnn') and (
    platform == 'gpu' and model.compute_dtype == 'bfloat16'
  )
  same = {'attention': cudnn, 'offload': platform == 'cpu'}
  if same.get(model.remat):
    return dataclasses.replace(model, remat='layer')
  return model


def activations(model: models.ModelConfig, platform: str, tensor: int) -> float:
  """What a backward pass needs of a token, bytes on one device.

  Beside what is kept for it, for one layer: of the MLP, the slopes of both
  factors. On a TPU also what the kernel of attention keeps of each head: three
  sums, repeated over 128 lanes, and three gradients in float32 and four arrays
  in bfloat16, whose last axis is filled up to 128 lanes.

  Args:
    model: Of the run.
    platform: See `sharding.platform`.
    tensor: Over how many devices heads and hidden units are split.
  """
  hidden = model.mlp_width
  if model.experts is not None:
    hidden = model.experts.per_token * model.experts.width
  needed = 2.0 * hidden * jnp.dtype(model.compute_dtype).itemsize
  filled = 1
  if platform == 'tpu':
    filled = 128
    lanes = math.ceil(model.head_dim / filled) * filled
    sums, gradients, arrays = 3 * 4 * filled, 3 * 4 * lanes, 4 * 2 * lanes
    needed += model.num_heads * (sums + gradients + arrays)
  return models.bytes_per_token(model, tensor, filled) + needed / tensor


def _axes_of(x: Any) -> set[str]:
  """The axes of the mesh over which an array is split."""
  found = set()
  for axes in x.sharding.spec:
    found |= {axes} if isinstance(axes, str) else set(axes or ())
  return found


def on_device(tree: Any) -> int:
  """Bytes of arrays on one device, without those that lie on the host."""
  return _bytes(tree, away=False)


def on_host(tree: Any) -> int:
  """Bytes of arrays in the memory of the host, for one device."""
  return _bytes(tree, away=True)


def _bytes(tree: Any, away: bool) -> int:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if offload.lies_on_host(x) == away
  )
