"""What a run needs of memory, by arithmetic.

The shapes are those of the largest rollout: every prompt and every completion
has the greatest length. What the compiler adds (copies, buffers that live side
by side) is in no formula.

All numbers are of one device. "Gathered" weights are whole over `fsdp`, and
still split over `tensor` and `expert`.
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
from grpo_jax.mesh import shards
from grpo_jax.models import experts as experts_lib
from grpo_jax.models import layout
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


LEARNING_STEPS = ('train_step', 'watched_step')
_TOKEN_ARRAYS = 10  # [P,G,T] of 4 bytes that an update holds


class Memory:
  """The largest rollout of a run, and what it needs of memory.

  Args:
    parts: See `build.abstract`.
    joined: How many devices are joined by fast links: those of a slice, or of
      a host with GPUs; None: all.
  """

  def __init__(self, parts: Abstract, joined: int | None = None):
    self.parts = parts
    self.joined = joined or parts.run.mesh.size
    self.config = parts.run.config
    self.mesh = parts.run.mesh
    self.sampling_mesh: Any = parts.engine.mesh
    self.platform = sharding.platform(self.mesh)
    self.model = as_computed(parts.model, self.platform)
    self.weights = weights_of(parts)
    sampler, learner = self.config.sampler, self.config.learner
    self.prompts, self.group = sampler.prompts, sampler.group
    self.prompt_tokens = max(self.config.data.prompt_buckets)
    self.tokens = sampler.max_tokens
    buckets = self.config.data.completion_buckets
    self.room = layout.bucket(self.tokens, buckets, 'completion')
    # The lengths that caches may have.
    self.rooms = sorted(size for size in {*buckets} if size <= self.room)
    self.shards = sharding.row_shards(self.mesh)
    self.tensor = self.mesh.shape['tensor']
    self.updates = learner.batches * learner.epochs
    batch = self.prompts // learner.batches
    self.rows = rows_of(parts, batch, self.prompt_tokens, self.room)
    self.schedule = parts.engine.schedule(
      self.prompts, self.group, self.prompt_tokens
    )
    self.starts = math.ceil(self.prompts / self.schedule.prompts)

  @property
  def _compute(self) -> int:
    """Bytes of a number in the compute dtype."""
    return jnp.dtype(self.model.compute_dtype).itemsize

  @property
  def _stream(self) -> int:
    """Bytes of a token in the residual stream."""
    return self.model.width * jnp.dtype(self.model.residual_dtype).itemsize

  @property
  def _tokens_here(self) -> int:
    """Tokens of a micro-batch on one device."""
    parts = self.mesh.shape['context']
    return self.rows.rows // self.shards * math.ceil(self.rows.columns / parts)

  @property
  def _rows_here(self) -> int:
    """Completions that one device decodes at once."""
    rows = self.schedule.prompts * self.group
    return rows // sharding.row_shards(self.sampling_mesh)

  @property
  def cache(self) -> float:
    """The largest caches of keys and values, of rows and prompts, bytes."""
    return max(self._first_cache(self.room), self._narrow_cache)

  def _first_cache(self, columns: int) -> float:
    """The caches of the first rows, bytes."""
    prompts = self.schedule.prompts
    return self._cache(prompts, prompts * self.group, columns)

  @property
  def admits(self) -> bool:
    """Whether prompts that wait are admitted while rows go on."""
    return self.starts > 1 and self.schedule.admitted > 0

  @property
  def admitted_cache(self) -> float:
    """The caches of prompts that are admitted, bytes.

    They lie beside `cache`, until rows are regrouped.
    """
    prompts = self.schedule.admitted
    return self._cache(prompts, prompts * self.group, self.rooms[0])

  @property
  def _narrow_cache(self) -> float:
    """The caches when admitted prompts have joined the rows, bytes; or 0.

    Lanes are narrower then, and each has a copy of its prompt.
    """
    return self._regrouped_cache if self.admits else 0.0

  @property
  def _regrouped_cache(self) -> float:
    """What regrouping returns the first time, bytes."""
    schedule = self.schedule
    rows = schedule.sizes[0]
    if self.admits:
      rows += schedule.new_lanes(0).size
    return self._cache(rows // schedule.narrow, rows, self.room)

  def _cache(self, lanes: float, rows: float, columns: int) -> float:
    """Keys and values of rows, and of the prompts of their lanes, bytes."""
    heads = self.model.num_kv_heads
    tensor = self.sampling_mesh.shape['tensor']
    split = tensor if heads % tensor == 0 else 1
    place = 2 * heads // split * self.model.head_dim * self._compute

    def places(columns):
      windows = (kind.window_tokens or columns for kind in self.model.kinds)
      return sum(min(columns, window) for window in windows)

    number = rows * places(columns) + lanes * places(self.prompt_tokens)
    return place * number / self.schedule.shards

  def held(self, program: str) -> dict[str, float]:
    """What the sampler holds when a program begins, bytes by part.

    Drawing ahead, it holds weights and caches while updates run too.
    """
    weights = {'sampler weights': float(self.weights.sampled)}
    cache, admitted = {'cache': self.cache}, {}
    if self.admits:
      admitted = {'cache of admitted prompts': self.admitted_cache}
    return {
      'prefill': {**weights, **(cache if self.admits else {})},
      'decode': weights | cache,
      'grow': {**weights, 'cache': self._first_cache(self.rooms[-2:][0])},
      'regroup': weights | cache | admitted,
      'prepare': {},
    }.get(program, weights | cache | admitted if self._is_ahead else {})

  @property
  def _is_ahead(self) -> bool:
    return bool(self.config.sampler.ahead)

  def arguments(self, program: str) -> float:
    """Weights and caches that one of `compiling.PROGRAMS` is given, bytes."""
    weights, held = self.weights, self.held(program)
    if program in ('grow', 'regroup'):
      return sum(held.values()) - weights.sampled
    if program == 'prefill':
      return float(weights.sampled)
    if program == 'decode':
      return sum(held.values())
    if program in LEARNING_STEPS:
      return float(weights.state)
    return float(weights.trained + weights.frozen)

  def memory(self, program: str) -> dict[str, float]:
    """What a program needs besides its arguments, bytes by part.

    Args:
      program: One of `compiling.PROGRAMS`.
    """
    if program.startswith('score'):
      return self._scoring(program)
    if program in LEARNING_STEPS:
      return self._learning(program)
    vocab, split = self.model.vocab_size, self.sampling_mesh.shape['tensor']
    logits = (
      4.0 * self._rows_here * vocab / (split if vocab % split == 0 else 1)
    )
    if program == 'prepare':
      one = max(self._layer, self.weights.head) * self._sampled_share
      made = float(self.weights.sampled)
      return {'sampler weights': made, 'weights on their way': one}
    if program == 'prefill':
      prompts = self.schedule.admitted if self.admits else self.schedule.prompts
      logits *= prompts / self.schedule.prompts
      made = self._cache(prompts, prompts * self.group, self.rooms[0])
      read = prompts // self.shards * self.prompt_tokens
      experts = self._expert_arrays(read)
      return {'new cache': made, 'logits': logits, 'experts': experts}
    if program == 'grow':
      return {'longer cache': self._first_cache(self.room)}
    if program == 'regroup':
      return {'regrouped cache': self._regrouped_cache}
    # A copy of the experts, laid out for their products.
    return {'logits': logits, 'experts': float(self.weights.experts)}

  @property
  def on_host(self) -> float:
    """What lies in the memory of the host, bytes for one device."""
    kept = (
      self.model.num_layers * self._stream * self._tokens_here / self.tensor
    )
    return self.weights.on_host + kept * (self.model.remat == 'offload')

  @property
  def _chunk_positions(self) -> int:
    """Positions of a chunk of logits on each data shard."""
    model = self.model
    return models.chunk_positions(model.vocab_size, model.width, self.platform)

  @property
  def _head(self) -> float:
    """The output layer: its weights, and a chunk of logits with its slope.

    How many chunks of logits lie side by side was read off what the compiler
    needs.
    """
    vocab = self.model.vocab_size
    chunk = 4.0 * self._chunk_positions * vocab / self.tensor
    return 2.0 * self.weights.head + 3.0 * chunk

  @property
  def _layer(self) -> float:
    """The gathered weights of one layer."""
    weights = self.weights
    inside = weights.gathered - weights.head - weights.table
    return inside / self.model.num_layers

  @property
  def _sampled_share(self) -> float:
    """How large the sampler's weights are beside those of a pass."""
    return self.weights.sampled / self.weights.gathered

  @property
  def _token_arrays(self) -> float:
    whole = 4.0 * _TOKEN_ARRAYS * self.prompts * self.group * self.tokens
    axes = shards.position_axes(self.mesh, self.room)
    return whole / math.prod(self.mesh.shape[axis] for axis in axes)

  def _scoring(self, program: str) -> dict[str, float]:
    tokens = self._tokens_here
    kept = dataclasses.replace(self.model, remat='none')
    layer = models.bytes_per_token(kept, self.tensor) / kept.num_layers
    reference = self.weights.host_reference * (program == 'score_reference')
    return {
      'reference from the host': float(reference),
      'activations': float(tokens * layer),
      'experts': self._expert_arrays(tokens),
      'head': self._head / 2,
      'layer weights': 2 * self._layer,
      'token arrays': self._token_arrays,
    }

  def _learning(self, program: str) -> dict[str, float]:
    token = activations(self.model, self.platform, self.tensor)
    # How overshoot moves the log-probabilities is measured along each update.
    tangents = self.weights.trained * (program == 'watched_step')
    # Sums over `tensor` that one layer makes; read off what the compiler needs.
    token += 6.0 * self._stream * (self.tensor > 1)
    passes = {
      'activations': float(token * self._tokens_here),
      'experts': self._experts_learning,
      'head': self._head,
      'layer weights': 3 * self._layer,
    }
    # They come when the passes are over, and take the same memory.
    moments = max(0.0, self.weights.host_moments - sum(passes.values()))
    return {
      'gradients': 2.0 * self.weights.trained + tangents,
      'moments from the host': moments,
      **passes,
      'token arrays': self._token_arrays,
    }

  def _expert_arrays(
    self, here: int, wide=2.5, hidden=2.0, gathered=2.0
  ) -> float:
    """What the mixture of one layer needs at once, bytes.

    There is room for each pair of a token and an expert that this device may
    get: all of the tokens of its shards, however uneven the choices are. Many
    tokens are computed in pieces, one after another. How many arrays lie side
    by side was read off what the compiler needs.

    Args:
      here: Tokens on one device.
      wide: How many arrays [pairs, width] in the compute dtype.
      hidden: How many arrays [pairs, hidden] in float32.
      gathered: How many arrays [tokens of all shards, width] in the compute
        dtype lie beside a piece.
    """
    mixture, shards = self.model.experts, self.mesh.shape['expert']
    if mixture is None or not here:
      return 0.0
    number = max(1, mixture.number // shards)
    tokens, row = here * shards, self.model.width * self._compute
    pieces = experts_lib.pieces(tokens, mixture.per_token, shards)
    pairs = tokens // pieces * min(mixture.per_token, number)
    inside = 4 * hidden * mixture.width / self.tensor
    outside = tokens * gathered * row * (pieces > 1)
    return pairs * (wide * row + inside) + outside

  @property
  def _experts_learning(self) -> float:
    """With experts and their gradients, laid out for their products."""
    copies = 1.5 * self.weights.trained * (self.model.experts is not None)
    return copies + self._expert_arrays(self._tokens_here, 5.2, 4.0, 4.0)
