"""What a run needs, by arithmetic: memory, operations, bytes sent.

It takes no compiler and no time, and is right to about a tenth. What the
compiler adds (copies, buffers that live side by side) is in no formula.

The shapes are those of the largest rollout: every prompt and every completion
has the greatest length. All numbers are of one device. "Gathered" weights are
whole over `fsdp`, and still split over `tensor` and `expert`.
"""

import copy
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax import models
from grpo_jax.learner import layouts
from grpo_jax.learner import offload
from grpo_jax.mesh import crossing
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import experts as experts_lib
from grpo_jax.models import layout
from grpo_jax.planning.roofline import Work
from grpo_jax.run.build import model as build_model
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


def count_rows(
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
    teacher: Likewise; 0 too if it is what adapters leave alone.
    host_moments: Of the optimizer, in the memory of the host.
    host_reference: In the memory of the host.
    host_teacher: Likewise.
    frozen: Of what adapters leave alone.
    older: Of the trained parameters of further versions by which rollouts may
      be drawn ahead, as decoding reads them; 0 if none are. On devices that
      sample alone all versions are cut over these devices; if jobs sample,
      over the learner's, from which the jobs fetch them. If servers sample,
      they are copies as the learner has them, for checkpoints.
    newer: Of the trained parameters as decoding reads them, that come while the
      ones before are still there; 0 if these are freed before.
    published: Of the trained parameters as they are published, on all devices
      together.
    renewed: Of `sampled`, what comes anew with each version.
    sampled_experts: Of `sampled`, the experts of all layers.
    sampled_table: Of `sampled`, the embedding; see `table`.
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
  teacher: int = 0
  host_teacher: int = 0
  older: int = 0
  newer: int = 0
  published: int = 0
  renewed: int = 0
  sampled_experts: int = 0
  sampled_table: int = 0

  @property
  def state(self) -> int:
    """What stays in the device's memory all the time."""
    beside = self.reference + self.frozen + self.teacher
    return self.trained + self.moments + beside

  @property
  def on_host(self) -> int:
    """What lies in the memory of the host, for one device."""
    return self.host_moments + self.host_reference + self.host_teacher

  def read(
    self, tokens: float, mixture: models.Experts | None, draws: bool = False
  ) -> float:
    """What a pass over some tokens reads, bytes.

    Args:
      tokens: Of a mixture, only the experts that they choose are read, each
        expert being chosen as often as any other. One token gives the least.
      mixture: Of the model.
      draws: Whether it reads the weights of decoding.
    """
    whole, experts = self.gathered - self.table, self.experts
    if draws:
      whole = self.sampled - self.sampled_table
      experts = self.sampled_experts
    if mixture is None:
      return float(whole)
    idle = (1 - mixture.per_token / mixture.number) ** tokens
    return float(whole - idle * experts)


def count_weights(parts: Abstract) -> Weights:
  """The parameters of a run."""
  run, state = parts.run, parts.updater.compiled.abstract
  mesh, model = run.mesh, parts.model
  whole = parts.updater.joined(state.params)
  read = parts.engine.decoding_params(whole)
  gathered = _placed(read, mesh, parts.engine.model)
  drawn = build_model.split(parts.engine.model, read).trained
  tied, taught = model.tied_embeddings, parts.updater.teacher
  if run.teacher is not None and run.teacher.is_base:
    taught = None  # it is counted as `frozen`
  return Weights(
    **_of_model(model, whole, gathered, mesh),
    trained=on_device(state.params),
    moments=on_device(state.opt_state),
    reference=on_device(state.reference),
    frozen=on_device(parts.updater.frozen),
    sampled=on_device(read),
    scattered=on_device(_over_fsdp(state.params)),
    host_moments=on_host(state.opt_state),
    host_reference=on_host(state.reference),
    teacher=on_device(taught),
    host_teacher=on_host(taught),
    older=_older(parts, drawn),
    newer=_newer(parts, drawn),
    published=_whole(drawn),
    renewed=on_device(drawn),
    sampled_experts=_experts(read),
    sampled_table=0 if tied else _table(model, run.sampling_mesh),
  )


def count_teacher(parts: Abstract) -> Weights:
  """The parameters of a run's teacher, which nothing trains or samples from."""
  run = parts.run
  assert run.teacher is not None
  whole, gathered = parts.teacher()
  found = _of_model(run.teacher.model.config, whole, gathered, run.mesh)
  nothing = dict.fromkeys(('trained', 'moments', 'reference', 'scattered'), 0)
  held = on_device(parts.updater.teacher)
  return Weights(**found, **nothing, frozen=held, sampled=found['gathered'])


def _of_model(
  model: models.ModelConfig, whole: Any, gathered: Any, mesh: Any
) -> dict[str, int]:
  """The fields of `Weights` that depend on one model alone, by name.

  Args:
    model: The shape.
    whole: All of its parameters, as the learner has them.
    gathered: Likewise in the compute dtype, gathered.
    mesh: Of the learner.
  """
  split = [x.sharding.shard_shape(x.shape) for x in _over_fsdp(whole)]
  shards = mesh.shape['fsdp'] * jnp.dtype(model.compute_dtype).itemsize
  return {
    'number': sum(math.prod(x.shape) for x in jax.tree.leaves(whole)),
    'gathered': on_device(gathered),
    'head': _table(model, mesh),
    'table': 0 if model.tied_embeddings else _table(model, mesh),
    'experts': _experts(gathered),
    'fetched': shards * sum(map(math.prod, split)),
  }


def _table(model: models.ModelConfig, mesh: Any) -> int:
  """Bytes of an embedding on one device, in the compute dtype."""
  vocab, tensor = model.vocab_size, mesh.shape['tensor']
  size = jnp.dtype(model.compute_dtype).itemsize
  return model.width * vocab * size // (tensor if vocab % tensor == 0 else 1)


def _over_fsdp(tree: Any) -> list[Any]:
  """The arrays that are split over `fsdp`."""
  return [x for x in jax.tree.leaves(tree) if 'fsdp' in _axes_of(x)]


def _experts(tree: Any) -> int:
  """Bytes of the experts of all layers, on one device."""
  return on_device(
    [
      leaf
      for path, leaf in jax.tree.leaves_with_path(tree)
      if 'experts' in sharding.path_names(path)
    ]
  )


def _whole(tree: Any) -> int:
  """Bytes of arrays, on all devices together, without copies."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def snapshots(pace: Any) -> int:
  """How many versions whoever draws may have at once.

  They are those that rollouts are still to be drawn by, the newest among them.
  Where newer ones are taken in flight, only that is needed, and it comes before
  the one that it replaces is freed.

  Args:
    pace: A `sources.Pace`.
  """
  if pace.inflight:
    return 2
  newest = pace.ahead  # then no rollout needs more than the oldest there is
  return len(pace.needed(newest, newest) | {newest})


def landed(trained: Any, parts: int) -> int:
  """Bytes on one device of a version that is cut; see `crossing.cut`.

  Args:
    trained: As decoding reads it.
    parts: Into how many.
  """
  return sum(
    math.prod(x.shape)
    * x.dtype.itemsize
    // (1 if crossing.cut(x.shape, parts) == PartitionSpec() else parts)
    for x in jax.tree.leaves(trained)
  )


def _older(parts: Abstract, trained: Any) -> int:
  """See `Weights.older`.

  Args:
    parts: See `count_weights`.
    trained: As decoding reads it.
  """
  run = parts.run
  pace, own = run.draw.pace, run.config.generator.devices
  if run.config.generator.listen:
    return snapshots(pace) * landed(trained, run.mesh.size)
  if run.config.engine.kind == 'http' and pace.ahead:
    state = parts.updater.compiled.abstract
    return snapshots(pace) * on_device(state.params)
  if not own and not pace.ahead:
    return 0
  number = snapshots(pace)
  if run.sampling_mesh.size == 1:
    # Decoding reads one of them where it lies; in flight, one before them.
    number -= not pace.inflight
    return number * on_device(trained)
  cut = math.gcd(run.mesh.size, run.sampling_mesh.size)
  return number * landed(trained, cut)


def _newer(parts: Abstract, trained: Any) -> int:
  """See `Weights.newer`; on one device it is read where it lies."""
  run = parts.run
  comes = run.draw.pace.inflight and run.sampling_mesh.size > 1
  return on_device(trained) if comes else 0


def recomputed(model: models.ModelConfig) -> float:
  """The share of the layers' products that `remat` computes again.

  No gradient needs the output of the last product of an MLP.
  """
  if model.remat == 'none':
    return 0.0
  hidden = sum(model.hidden_units(kind) for kind in model.kinds)
  last = 2 * model.width * hidden
  return 1 - last / float(models.flops_per_token(model, 0, False))


def _pools(parts: Abstract) -> tuple[list[Any], int, int]:
  """The caches of the rows that draw turns, if an environment asks for them.

  Returns:
    As shapes, for each width; [] if completions are drawn at once. And in how
    many rows a call of `read` reads, and how many tokens of each.
  """
  config, engine = parts.run.config, parts.engine
  if not config.environment.name or config.environment.max_turns == 1:
    return [], 0, 0
  if config.engine.kind == 'http':
    return [], 0, 0
  whole = parts.updater.joined(parts.updater.compiled.abstract.params)
  number = config.sampler.prompts * config.sampler.group
  number //= config.generator.parts
  return engine.pools(whole, number), *engine.longest_read(whole, number)


def _placed(read: Any, mesh: Any, model: Any) -> Any:
  """What decoding reads, on the learner's mesh."""
  rules = sharding.DECODING_RULES
  place = sharding.param_shardings(mesh, read, model.logical_axes, rules)
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
  in bfloat16, whose last axis is filled up to 128 lanes. Of the gated delta
  rule, in float32, about five times what it reads, six arrays of a chunk's
  tokens for each token and head, and the states before all chunks.

  Args:
    model: Of the run.
    platform: See `sharding.platform`.
    tensor: Over how many devices heads and hidden units are split.
  """
  hidden = max(model.hidden_units(kind) for kind in model.pattern)
  needed = 2.0 * hidden * jnp.dtype(model.compute_dtype).itemsize
  filled = 1
  if platform == 'tpu':
    filled = 128
    size = max(model.of(kind).head_dim for kind in model.pattern)
    lanes = math.ceil(size / filled) * filled
    sums, gradients, arrays = 3 * 4 * filled, 3 * 4 * lanes, 4 * 2 * lanes
    needed += model.num_heads * (sums + gradients + arrays)
  if (heads := model.delta) is not None:
    values = heads.num_value_heads * heads.value_dim
    arrays = 2 * heads.num_heads * heads.key_dim + values
    chunk = 6 * models.CHUNK_TOKENS * heads.num_value_heads
    state = values * heads.key_dim / models.CHUNK_TOKENS
    needed = max(needed, 4 * (5 * arrays + chunk + state))
  return models.bytes_per_token(model, tensor, filled) + needed / tensor


def _to_other_parts(
  model: models.ModelConfig, kind: models.LayerKind, parts: int
) -> float:
  """What a layer sends of a token where rows are cut, numbers.

  Keys and values go to all parts. A layer with a state exchanges columns for
  heads and back: once for each convolution, and once for the delta rule.
  """
  if kind.mixer == 'convolution':
    return 2.0 * model.width
  if kind.mixer == 'delta' and (heads := model.delta) is not None:
    values = heads.num_value_heads * heads.value_dim
    return 6.0 * heads.num_heads * heads.key_dim + 4.0 * values
  sizes = model.of(kind)
  return 2.0 * sizes.num_kv_heads * sizes.head_dim * parts


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
# Likewise for each of a teacher's likeliest tokens, read off what the compiler
# needs: ids and log-probabilities, those of an optimizer batch, the policy's,
# and their slope.
_TOP_ARRAYS = 6


class Arithmetic:
  """The largest rollout of a run, counted.

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
    # Whether servers of others sample; whether jobs do, and what learns is
    # counted, or what draws in a job; and whether some devices sample while
    # others learn.
    self.served = self.config.engine.kind == 'http'
    self.jobs = bool(self.config.generator.listen)
    self.apart = self.jobs or self.config.generator.devices > 0
    self.platform = sharding.platform(self.mesh)
    self.model = as_computed(parts.model, self.platform)
    self.weights = count_weights(parts)
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
    self.rows = count_rows(parts, batch, self.prompt_tokens, self.room)
    # Prompts that are drawn at once; a rollout may fall into several parts.
    self._part = self.prompts // self.config.generator.parts
    self.schedule = parts.engine.schedule(
      self._part, self.group, self.prompt_tokens
    )
    starts = math.ceil(self._part / self.schedule.prompts)
    self.starts = starts * self.config.generator.parts
    # Prompts of a start, on average; each shard has as many as the fullest.
    before = (starts - 1) * self.schedule.prompts
    last = math.ceil((self._part - before) / self.schedule.shards)
    self._drawn = (before + last * self.schedule.shards) / starts
    # Whether prompts that wait are admitted while rows go on.
    self.admits = starts > 1 and self.schedule.admitted > 0
    # The caches of the pools of an environment, the narrowest first; of turns
    # that are drawn when they are asked for, one of each episode is counted.
    self.pools, self._read_rows, piece = _pools(parts)
    if self.pools:
      self.admits, number = False, self._part * self.group
      # Calls of `read` that read each prompt once.
      tokens = self._part * self.prompt_tokens
      reads = math.ceil(tokens / (self._read_rows * piece))
      self.reads = reads * self.config.generator.parts
      starts = math.ceil(number / self.pool_rows)
      self.starts = starts * self.config.generator.parts
      self._drawn = self._part / starts
    # Tokens of a micro-batch on one device, and of all micro-batches.
    parts_of_row = self.mesh.shape['context']
    columns = math.ceil(self.rows.columns / parts_of_row)
    self._tokens_here = self.rows.rows // self.shards * columns
    self._columns = self.rows.micro * self._tokens_here
    self._measure(self.model, self.weights)

  def _measure(self, model: models.ModelConfig, weights: Weights) -> None:
    """Notes what depends on a model that reads the rows."""
    self.model, self.weights = model, weights
    # Bytes of a number in the compute dtype, and of a token in the residual
    # stream.
    self._compute = jnp.dtype(model.compute_dtype).itemsize
    self._stream = model.width * jnp.dtype(model.residual_dtype).itemsize
    # Positions of a chunk of logits on each data shard.
    self._chunk_positions = models.chunk_positions(
      model.vocab_size, model.width, self.platform
    )
    # The gathered weights of one layer, and how large the sampler's weights are
    # beside those of a pass.
    inside = weights.gathered - weights.head - weights.table
    self._layer = inside / model.num_layers
    self._sampled_share = weights.sampled / weights.gathered
    # Weights that a pass gathers: the embedding is looked up where it lies.
    is_split = self.mesh.shape['fsdp'] > 1
    self._fetched = weights.fetched - weights.table * is_split

  @functools.cached_property
  def teacher(self) -> 'Arithmetic':
    """Of a run with a teacher: the same rows, when the teacher scores them."""
    spec, found = self.parts.run.teacher, copy.copy(self)
    assert spec is not None
    model = as_computed(spec.model.config, self.platform)
    found._measure(model, count_teacher(self.parts))
    return found

  def _experts_split(self, mesh: Any) -> int:
    """Over how many devices of a mesh experts are split."""
    mixture, split = self.model.experts, mesh.shape['expert']
    return split if mixture and mixture.number % split == 0 else 1

  @property
  def drawn(self) -> float:
    """Prompts that all devices have places for in a start, on average."""
    return self._drawn

  @property
  def cache(self) -> float:
    """The largest caches of keys and values, of rows and prompts, bytes."""
    if self.pools:
      return float(on_device(self.pools))
    # When admitted prompts have joined the rows, lanes are narrower, and each
    # has a copy of its prompt.
    joined = self._regrouped_cache if self.admits else 0.0
    return max(self._first_cache(self.room), joined)

  @property
  def pool_rows(self) -> int:
    """How many rows a pool has, on all devices."""
    return jax.tree.leaves(self.pools)[0].shape[0]

  @property
  def parked(self) -> float:
    """The caches of episodes that have no row, in the memory of each host."""
    if not self.pools:
      return 0.0
    waiting = max(0, self._part * self.group - self.pool_rows)
    row = sum(
      math.prod(x.shape[1:]) * x.dtype.itemsize
      for x in jax.tree.leaves(self.pools[-1])
    )
    return float(waiting * row)

  def _first_cache(self, columns: int) -> float:
    """The caches of the first rows, bytes."""
    prompts = self.schedule.prompts
    return self._cache(prompts, prompts * self.group, columns)

  @property
  def admitted_cache(self) -> float:
    """The caches of prompts that are admitted, bytes.

    They lie beside `cache`, until rows are regrouped.
    """
    prompts = self.schedule.admitted
    return self._cache(prompts, prompts * self.group, self.rooms[0])

  @property
  def _regrouped_cache(self) -> float:
    """What regrouping returns the first time, bytes."""
    schedule = self.schedule
    rows = schedule.sizes[0]
    if self.admits:
      rows += schedule.new_lanes(0).size
    return self._cache(rows // schedule.narrow, rows, self.room)

  def _cache(self, lanes: float, rows: float, columns: int) -> float:
    """Keys and values of rows, and of the prompts of their lanes, bytes.

    Of layers with a state, that of the rows alone.
    """
    tensor = self.sampling_mesh.shape['tensor']

    def of_layer(kind):
      if kind.mixer != 'attention':
        split = tensor if self.model.shared_kv_heads % tensor == 0 else 1
        return rows * models.state_bytes(self.model, kind) / split
      sizes = self.model.of(kind)
      split = tensor if sizes.num_kv_heads % tensor == 0 else 1
      place = 2 * sizes.num_kv_heads // split * sizes.head_dim * self._compute
      window = kind.window_tokens or math.inf
      number = rows * min(columns, window)
      return place * (number + lanes * min(self.prompt_tokens, window))

    own = [kind for kind in self.model.kinds if not kind.shares_kv]
    return sum(map(of_layer, own)) / self.schedule.shards

  def held(self, program: str) -> dict[str, float]:
    """What the sampler holds when a program begins, bytes by part.

    Drawing ahead on the same device, it holds weights and caches while updates
    run too.
    """
    if self.served:
      return {}
    weights = {'sampler weights': float(self.weights.sampled)}
    cache, admitted = {'cache': self.cache}, {}
    if self.admits:
      admitted = {'cache of admitted prompts': self.admitted_cache}
    return {
      'read': weights | cache,
      'prefill': {**weights, **(cache if self.admits else {})},
      'decode': weights | cache,
      'grow': {**weights, 'cache': self._first_cache(self.rooms[-2:][0])},
      'regroup': weights | cache | admitted,
      'prepare': {},
    }.get(
      program,
      weights | cache | admitted
      if self.config.sampler.ahead and not self.apart
      else {},
    )

  def arguments(self, program: str) -> float:
    """Weights and caches that one of `compiling.PROGRAMS` is given, bytes."""
    if program == 'score_teacher':
      return self.teacher.arguments('score_all')
    weights, held = self.weights, sum(self.held(program).values())
    given = {
      'grow': held - weights.sampled,
      'regroup': held - weights.sampled,
      'prefill': weights.sampled,
      'read': held,
      'decode': held,
      **dict.fromkeys(LEARNING_STEPS, weights.state),
    }
    return float(given.get(program, weights.trained + weights.frozen))

  def memory(self, program: str) -> dict[str, float]:
    """What a program needs besides its arguments, bytes by part.

    Args:
      program: One of `compiling.PROGRAMS`.
    """
    if program == 'score_teacher':
      needs = self.teacher.memory('score_all')
      needs['teacher from the host'] = float(self.weights.host_teacher)
      if self._top_tokens:  # to order them takes a copy
        needs['ordered logits'] = self.teacher._chunk
      return needs
    if program.startswith('score'):
      return self._scoring(program)
    if program in LEARNING_STEPS:
      return self._learning(program)
    mesh = self.sampling_mesh
    shards = sharding.row_shards(mesh)
    vocab, split = self.model.vocab_size, mesh.shape['tensor']
    rows = self.schedule.prompts * self.group
    if self.pools:
      rows = self.pool_rows
    rows //= shards
    logits = 4.0 * rows * vocab / (split if vocab % split == 0 else 1)
    if program == 'prepare':
      one = max(self._layer, self.weights.head) * self._sampled_share
      made = float(self.weights.sampled)
      return {'sampler weights': made, 'weights on their way': one}
    if program == 'read':
      tokens = self.prompts * self.prompt_tokens / self.reads / shards
      some = self._read_rows / self.pool_rows / self.model.num_layers
      # The caches of the rows that are read in, for one layer.
      return {
        'experts': self._expert_arrays(math.ceil(tokens), mesh=mesh),
        'rows of a layer': some * on_device(self.pools[-1]),
      }
    if program == 'prefill':
      prompts = self.schedule.admitted if self.admits else self.schedule.prompts
      logits *= prompts / self.schedule.prompts
      made = self._cache(prompts, prompts * self.group, self.rooms[0])
      read = prompts // shards * self.prompt_tokens
      experts = self._expert_arrays(read, mesh=mesh)
      return {'new cache': made, 'logits': logits, 'experts': experts}
    if program == 'grow':
      return {'longer cache': self._first_cache(self.room)}
    if program == 'regroup':
      return {'regrouped cache': self._regrouped_cache}
    # A copy of the experts, laid out for their products.
    experts = float(self.weights.sampled_experts)
    newer = float(self.weights.newer)
    return {'logits': logits, 'experts': experts, 'newer weights': newer}

  @property
  def on_host(self) -> float:
    """What lies in the memory of the host, bytes for one device."""
    kept = (
      self.model.num_layers * self._stream * self._tokens_here / self.tensor
    )
    return self.weights.on_host + kept * (self.model.remat == 'offload')

  @property
  def _head(self) -> float:
    """The output layer: its weights, and a chunk of logits with its slope.

    How many chunks of logits lie side by side was read off what the compiler
    needs.
    """
    return 2.0 * self.weights.head + 3.0 * self._chunk

  @property
  def _chunk(self) -> float:
    """A chunk of logits."""
    return 4.0 * self._chunk_positions * self.model.vocab_size / self.tensor

  @property
  def _top_tokens(self) -> int:
    """How many of a teacher's likeliest tokens the method reads."""
    return self.parts.run.learn.learner.method.top_tokens

  @property
  def _token_arrays(self) -> float:
    number = _TOKEN_ARRAYS + _TOP_ARRAYS * self._top_tokens
    whole = 4.0 * number * self.prompts * self.group * self.tokens
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
    self, here: int, wide=2.5, hidden=2.0, gathered=2.0, mesh: Any = None
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
      mesh: None: the learner's.
    """
    shape = (mesh or self.mesh).shape
    mixture, shards = self.model.experts, shape['expert']
    if mixture is None or not here:
      return 0.0
    number = max(1, mixture.number // shards)
    tokens, row = here * shards, self.model.width * self._compute
    pieces = experts_lib.pieces(tokens, mixture.per_token, shards)
    pairs = tokens // pieces * min(mixture.per_token, number)
    inside = 4 * hidden * mixture.width / shape['tensor']
    outside = tokens * gathered * row * (pieces > 1)
    return pairs * (wide * row + inside) + outside

  @property
  def _experts_learning(self) -> float:
    """With experts and their gradients, laid out for their products."""
    copies = 1.5 * self.weights.trained * (self.model.experts is not None)
    return copies + self._expert_arrays(self._tokens_here, 5.2, 4.0, 4.0)

  def _learning_flops(self, program: str) -> float:
    """FLOPs of `train_step` or of a scoring: of all places of all rows.

    A backward pass is worth two forward passes: for what is given to a layer,
    and for its weights, whose gradients are not needed where adapters alone are
    trained.
    """
    layers, head = 1.0, 1
    if program in LEARNING_STEPS:
      learning = 2 if self.config.lora.rank else 3
      scored = self.rows.completions * self.room  # places of a row
      positions = self._chunk_positions * self.shards
      in_chunks = scored > max(1, positions // self.rows.rows)
      layers, head = learning + recomputed(self.model), learning + in_chunks
    inside, outside = self._forward(*self._in_rows, attention=False)
    return layers * inside + self.attention_flops(program) + head * outside

  @property
  def _in_rows(self) -> tuple[float, float]:
    """Prompts and completions of full length that the rows have places for."""
    rows = self.rows.micro * self.rows.rows
    completions = rows * self.rows.completions * self.room / self.tokens
    return rows * self.rows.prompts, completions

  def _forward(
    self,
    prompts: float,
    completions: float,
    attention: bool = True,
    mesh: Any = None,
  ) -> tuple[float, float]:
    """FLOPs of a forward pass, on one device.

    Args:
      prompts: How many are read.
      completions: How many go on from a prompt.
      attention: Whether to count scores and weighted values.
      mesh: Over which they are divided; None: the learner's.

    Returns:
      Those of the layers, and those of the output layer.
    """
    place = float(attention) * np.arange(self.prompt_tokens + self.tokens) + 1
    in_prompt, in_completion = np.split(place, [self.prompt_tokens])

    def flops(context, with_head=False):
      return models.flops_per_token(self.model, context, with_head).sum()

    layers = prompts * flops(in_prompt) + completions * flops(in_completion)
    head = completions * (flops(in_completion, True) - flops(in_completion))
    devices = (mesh or self.mesh).size
    return float(layers / devices), float(head / devices)

  def attention_flops(self, program: str) -> float:
    """Of `work`, what scores and weighs keys; it has no weights to freeze."""
    passes, mesh = 1.0, self.sampling_mesh
    if program == 'score_teacher':
      return self.teacher.attention_flops('score_all')
    if program == 'decode':
      counted = 0.0, self._drawn * self.group
    elif program in LEARNING_STEPS or program.startswith('score'):
      counted, mesh = self._in_rows, self.mesh
      if program in LEARNING_STEPS:
        passes = 3.0 + (self.model.remat in ('layer', 'offload'))
    else:
      return 0.0
    whole, without = (
      self._forward(*counted, seen, mesh)[0] for seen in (True, False)
    )
    return passes * (whole - without)

  def work(self, program: str) -> Work:
    """What one call of a program has to do on one device, at least.

    Of what is sent, only what no implementation can do without is counted:
    weights gathered once for each pass, gradients summed once, activations
    summed over `tensor` and brought to their experts; nothing to the host.
    """
    weights = self.weights
    if program == 'score_teacher':
      return self.teacher.work('score_all')
    if program in LEARNING_STEPS:
      micro, passes = self.rows.micro, 2 + (self.model.remat != 'none')
      kept = weights.trained - weights.scattered
      summed = self.mesh.shape['fsdp'] * weights.scattered + 2.0 * kept
      made = Work(
        self._learning_flops(program),
        micro * passes * self._read(self._tokens_here)
        + 2.0 * (weights.trained + weights.moments + weights.host_moments)
        + 2.0 * self.model.num_layers * self._stream * self._columns,
      )
      made += self._sent('fsdp', 2.0 * micro * self._fetched)
      made += self._sent('fsdp', summed)
      made += self._sent('data', 2.0 * weights.trained)
      made += self._sent('context', 2.0 * weights.trained)
      return made + self._activations_sent(self._columns, learns=True)
    if program.startswith('score'):
      micro = self.rows.micro
      read = micro * self._read(self._tokens_here)
      made = Work(self._learning_flops(program), read)
      made += self._sent('fsdp', float(micro * self._fetched))
      return made + self._activations_sent(self._columns)
    return self._sampling(program)

  def _sampling(self, program: str) -> Work:
    mesh, prompts = self.sampling_mesh, self._drawn
    here = prompts / sharding.row_shards(mesh)
    if program == 'decode':
      rows = prompts * self.group
      # Of a completion half is there on average, of its prompt all.
      seen = self._cache(prompts, 0, self.tokens)
      seen += self._cache(0, rows, self.tokens) / 2
      weights = self._read(here * self.group, draws=True)
      flops = sum(self._forward(0, rows, mesh=mesh))
      made = Work(flops, self.tokens * (weights + seen))
      tokens = here * self.group * self.tokens
      return made + self._activations_sent(tokens, mesh=mesh)
    if program in ('prefill', 'read'):
      if program == 'read':
        prompts = self.prompts / self.reads
        here = prompts / sharding.row_shards(mesh)
      tokens = here * self.prompt_tokens
      weights = self._read(tokens, draws=True)
      made = Work(self._forward(prompts, 0, mesh=mesh)[0], weights)
      return made + self._activations_sent(tokens, mesh=mesh)
    if program == 'grow':
      caches = (self._first_cache(columns) for columns in self.rooms[-2:])
      return Work(memory_bytes=sum(caches))
    if program == 'regroup':
      return Work(memory_bytes=self._regrouped_cache)
    weights = self.weights
    made = Work(memory_bytes=float(weights.trained + weights.sampled))
    if mesh == self.mesh:
      return made + self._sent('fsdp', float(weights.fetched))
    return made + Work(ici_bytes=float(weights.sampled))

  def _read(self, tokens: float, draws: bool = False) -> float:
    """Weights that a pass over so many tokens on each device reads, bytes."""
    # Those of all shards that the experts are split over come to each expert.
    split = self._experts_split(self.sampling_mesh if draws else self.mesh)
    return self.weights.read(tokens * split, self.model.experts, draws)

  def _activations_sent(
    self, tokens: float, learns: bool = False, mesh: Any = None
  ) -> Work:
    """What all layers send of tokens: summed over `tensor`, and to experts.

    Over `tensor` the outputs of attention and of the MLP are summed, each if
    its heads or hidden units are split. Each token goes to all shards that have
    one of its experts, each of which is as likely as any other, and back. To
    learn, all of this is done backwards too, and with `remat` attention's part
    once more.
    """
    model, mixture = self.model, self.model.experts
    token = tokens * model.width * self._compute
    passes = 2.0 if learns else 1.0
    again = learns and model.remat != 'none'
    tensor = (mesh or self.mesh).shape['tensor']
    attention = model.num_layers * (model.num_heads % tensor == 0)
    # Keys and values go to all parts of a row, and their slopes come back.
    parts = (mesh or self.mesh).shape['context']
    heads = sum(_to_other_parts(model, kind, parts) for kind in model.kinds)
    keys = (passes + again) * heads * self._compute / tensor * tokens
    sums = attention * (passes + again)
    mixed = 0
    for kind in model.kinds:
      own = model.of(kind).mlp_width
      hidden = mixture.width if kind.experts and mixture else own
      sums += passes * (hidden % tensor == 0)
      mixed += kind.experts
    sent = self._sent('tensor', 2.0 * sums * token, mesh)
    sent += self._sent('context', keys, mesh)
    shards = self._experts_split(mesh or self.mesh)
    if mixture is None or shards == 1:
      return sent
    reached = shards * (1 - (1 - 1 / shards) ** mixture.per_token)
    size = 2.0 * passes * mixed * reached * token
    return sent + self._sent('expert', size, mesh)

  def _sent(self, axis: str, size: float, mesh: Any = None) -> Work:
    """What a device sends so that all along an axis have an array.

    Those that share fast links do it among themselves; between such groups each
    sends its share of what the others lack.

    Args:
      axis: Of the mesh.
      size: Bytes of the array; twice as many if it is summed.
      mesh: None: the learner's.
    """
    shape = dict((mesh or self.mesh).shape)
    number, names = shape[axis], list(shape)
    inner = math.prod(shape[name] for name in names[names.index(axis) + 1 :])
    inside = min(number, max(1, self.joined // inner))
    outside = math.ceil(number / inside)
    return Work(
      ici_bytes=size * (inside - 1) / inside,
      dcn_bytes=size * (outside - 1) / outside / inside,
    )
