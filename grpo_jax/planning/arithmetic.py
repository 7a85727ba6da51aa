"""What a run needs, by arithmetic: memory, operations, bytes sent.

It takes no compiler and no time, and is right to about a tenth; what the
compiler adds (copies, buffers that live side by side) is in no formula. The
shapes are those of the largest rollout: every prompt and every completion has
the greatest length.

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
from grpo_jax import sharding
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.planning.roofline import Work
from grpo_jax.training.build_abstract import Abstract

_TOKEN_ARRAYS = 10  # [P,G,T] of 4 bytes that an update holds on every device


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of an update.

  Attributes:
    micro: Micro-batches.
    rows: Rows of a micro-batch, on all devices.
    columns: Tokens of a row.
    scored: Places of a row that are scored.
  """

  micro: int
  rows: int
  columns: int
  scored: int


def rows_of(
  spec: LayoutSpec, prompts: int, group: int, prompt_tokens: int, tokens: int
) -> Rows:
  """The rows of an optimizer batch whose completions are all of full length.

  Then every row is full, and `'auto'` and `'packed'` find nothing to pack.
  """
  per_row = 1
  if spec.kind in ('auto', 'shared'):
    per_row = spec.row_completions or group
  columns = prompt_tokens + per_row * tokens
  if spec.kind == 'packed':
    columns = max(columns, spec.pack_tokens)
    per_row = max(1, columns // (prompt_tokens + tokens))
  number = math.ceil(prompts * group / per_row)
  # As `stack` does: packed rows do not count themselves.
  rows = spec.rows_of(columns, prompts)
  return Rows(math.ceil(number / rows), rows, columns, per_row * tokens)


@dataclasses.dataclass(frozen=True)
class Weights:
  """Bytes of the parameters, of one device.

  Attributes:
    number: Of parameters, of the whole model.
    trained: As the learner holds them.
    moments: Of the optimizer, with its counters.
    reference: 0 if the method has none.
    frozen: Of what adapters leave alone.
    gathered: In the compute dtype, gathered; so decoding reads them.
    head: Of the output layer alone, gathered, in the compute dtype.
    table: Of the embedding, which is looked up and not multiplied by.
  """

  number: int
  trained: int
  moments: int
  reference: int
  frozen: int
  gathered: int
  head: int
  table: int

  @property
  def state(self) -> int:
    """What stays in memory all the time."""
    return self.trained + self.moments + self.reference + self.frozen


def weights_of(parts: Abstract) -> Weights:
  """The parameters of a run."""
  run, state = parts.run, parts.updater.abstract
  mesh, model = run.mesh, parts.model
  whole = parts.updater.whole(state.params)
  read = parts.engine.decoding_params(whole)
  compute = jnp.dtype(model.compute_dtype).itemsize
  width, vocab = model.width, model.vocab_size
  split = mesh.shape['tensor'] if vocab % mesh.shape['tensor'] == 0 else 1
  table = width * vocab * compute // split
  tied = model.tied_embeddings
  return Weights(
    number=sum(math.prod(x.shape) for x in jax.tree.leaves(whole)),
    trained=on_device(state.params),
    moments=on_device(state.opt_state),
    reference=on_device(state.reference),
    frozen=on_device(parts.updater.frozen),
    gathered=on_device(read),
    head=table,
    table=0 if tied else table,
  )


def on_device(tree: Any) -> int:
  """Bytes of arrays on one device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


class Arithmetic:
  """The largest rollout of a run, counted.

  Args:
    parts: See `build_abstract`.
  """

  def __init__(self, parts: Abstract):
    self.parts = parts
    self.config = parts.run.config
    self.model = parts.model
    self.mesh = parts.run.mesh
    self.weights = weights_of(parts)
    sampler, learner = self.config.sampler, self.config.learner
    self.prompts, self.group = sampler.prompts, sampler.group
    self.prompt_tokens = max(self.config.data.prompt_buckets)
    self.tokens = max(self.config.data.completion_buckets)
    self.shards = sharding.row_shards(self.mesh)
    self.tensor = self.mesh.shape['tensor']
    self.updates = learner.batches * learner.epochs
    self.rows = rows_of(
      parts.updater.spec,
      self.prompts // learner.batches,
      self.group,
      self.prompt_tokens,
      self.tokens,
    )
    self.schedule = parts.engine.schedule(
      self.prompts, self.group, self.prompt_tokens
    )

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
    return self.rows.rows // self.shards * self.rows.columns

  @property
  def _rows_here(self) -> int:
    """Completions that one device decodes at once."""
    return self.schedule.prompts * self.group // self.shards

  @property
  def cache(self) -> float:
    """Keys and values of the rows and of their prompts, bytes."""
    heads = self.model.num_kv_heads
    split = self.tensor if heads % self.tensor == 0 else 1
    place = 2 * heads // split * self.model.head_dim * self._compute

    def places(columns):
      windows = (kind.window_tokens or columns for kind in self.model.kinds)
      return sum(min(columns, window) for window in windows)

    lanes = self.schedule.prompts // self.shards
    own = self._rows_here * places(self.tokens)
    return float(place * (own + lanes * places(self.prompt_tokens)))

  def memory(self, program: str) -> dict[str, float]:
    """What a program needs besides its arguments, bytes by part.

    Args:
      program: One of `compiling.PROGRAMS`.
    """
    if program.startswith('score'):
      return self._scoring()
    if program == 'train_step':
      return self._learning()
    vocab = self.model.vocab_size
    logits = 4.0 * self._rows_here * vocab
    return {
      'prepare': {
        'sampler weights': float(self.weights.gathered),
        'weights on their way': float(self.weights.gathered),
      },
      'prefill': {'cache': self.cache, 'logits': logits / self.tensor},
      'decode': {'logits': logits},
      'regroup': {'regrouped cache': self.cache / 2},
    }[program]

  @property
  def _head(self) -> float:
    """The output layer: its weights, and a chunk of logits with its slope."""
    vocab = self.model.vocab_size
    chunk = 4.0 * models.chunk_positions(vocab) * vocab / self.tensor
    return 3.0 * self.weights.head + 3.0 * chunk

  @property
  def _layer(self) -> float:
    """The gathered weights of one layer."""
    weights = self.weights
    inside = weights.gathered - weights.head - weights.table
    return inside / self.model.num_layers

  @property
  def _token_arrays(self) -> float:
    return 4.0 * _TOKEN_ARRAYS * self.prompts * self.group * self.tokens

  def _scoring(self) -> dict[str, float]:
    tokens = self._tokens_here
    shallow = dataclasses.replace(
      self.model, num_layers=1, pattern=self.model.pattern[:1]
    )
    layer = models.bytes_per_token(shallow, self.tensor)
    return {
      'activations': float(tokens * layer),
      'head': self._head / 2,
      'layer weights': 2 * self._layer,
      'token arrays': self._token_arrays,
    }

  def _learning(self) -> dict[str, float]:
    token = models.bytes_per_token(self.model, self.tensor)
    return {
      'gradients': 2.0 * self.weights.trained,
      'activations': float(token * self._tokens_here),
      'head': self._head,
      'layer weights': 3 * self._layer,
      'token arrays': self._token_arrays,
    }

  @property
  def _padding(self) -> float:
    """How many tokens the rows of an update have for each that counts."""
    rows = self.rows
    tokens = self.prompt_tokens + self._group_tokens
    if self.parts.updater.spec.kind == 'padded':
      tokens = self.group * (self.prompt_tokens + self.tokens)
    needed = self.prompts // self.config.learner.batches * tokens
    return max(1.0, rows.micro * rows.rows * rows.columns / needed)

  @property
  def _group_tokens(self) -> int:
    return self.group * self.tokens

  def _passes(self, program: str) -> tuple[float, int]:
    """Forward passes that the layers and the output layer are worth."""
    if program != 'train_step':
      return 1, 1
    positions = models.chunk_positions(self.model.vocab_size) * self.shards
    in_chunks = self.rows.scored > max(1, positions // self.rows.rows)
    return 3 + self.model.remat * self._recomputed, 3 + in_chunks

  @property
  def _recomputed(self) -> float:
    """The share of the layers' products that `remat` computes again.

    No gradient needs the output of the last product of an MLP.
    """
    hidden = self.model.mlp_width
    if self.model.experts is not None:
      hidden = self.model.experts.per_token * self.model.experts.width
    last = 2 * self.model.num_layers * self.model.width * hidden
    return 1 - last / float(models.flops_per_token(self.model, 0, False))

  def _learning_flops(self, program: str) -> float:
    """FLOPs of `train_step` or of a scoring, with the padding in rows."""
    layers, head = self._passes(program)
    prompts = self.prompts // self.config.learner.batches
    inside, outside = self._forward(prompts)
    return (layers * inside + head * outside) * self._padding

  def _forward(
    self, prompts: int, attention: bool = True
  ) -> tuple[float, float]:
    """FLOPs of a forward pass over whole groups, on one device.

    Args:
      prompts: How many groups.
      attention: Whether to count scores and weighted values.

    Returns:
      Those of the layers, and those of the output layer.
    """
    place = float(attention) * np.arange(self.prompt_tokens + self.tokens) + 1
    of_prompt, of_completion = np.split(place, [self.prompt_tokens])

    def of(context, with_head=False):
      return models.flops_per_token(self.model, context, with_head).sum()

    layers = of(of_prompt) + self.group * of(of_completion)
    head = self.group * (of(of_completion, True) - of(of_completion))
    share = prompts / self.mesh.size
    return float(share * layers), float(share * head)

  def attention_flops(self, program: str) -> float:
    """Of `work`, what scores and weighs keys."""
    prompts = self.prompts // self.config.learner.batches
    if program == 'decode':
      prompts = self.schedule.prompts
    elif program != 'train_step' and not program.startswith('score'):
      return 0.0
    whole, without = (self._forward(prompts, seen)[0] for seen in (True, False))
    return self._passes(program)[0] * (whole - without)

  def work(self, program: str) -> Work:
    """What one call of a program has to do on one device, at least.

    Of what is sent, only what no implementation can do without is counted:
    weights gathered once for each pass, gradients summed once.
    """
    if program == 'train_step':
      reads = 3 if self.model.remat else 2
      return Work(
        self._learning_flops(program),
        self._weight_reads(reads)
        + 2.0 * (self.weights.trained + self.weights.moments)
        + 2.0 * self.model.num_layers * self._stream * self._columns,
        self._gathers(2) + self._gradient_sums + self._tensor_sums(3),
        self._between_slices,
      )
    if program.startswith('score'):
      return Work(
        self._learning_flops(program),
        self._weight_reads(1),
        self._gathers(1) + self._tensor_sums(1),
      )
    return self._sampling(program)

  def _sampling(self, program: str) -> Work:
    weights = float(self.weights.gathered - self.weights.table)
    if program == 'decode':
      flops = sum(self._forward(self.schedule.prompts)) - self._prompt_flops
      sums = 2 * self.model.num_layers * self._rows_here * self.tokens
      ring = 2 * (self.tensor - 1) / self.tensor
      return Work(
        flops,
        self.tokens * (weights + self.cache / 2),
        sums * self.model.width * self._compute * ring,
      )
    if program == 'prefill':
      return Work(self._prompt_flops, weights)
    if program == 'regroup':
      return Work(memory_bytes=self.cache)
    moved = self.weights.gathered
    return Work(
      memory_bytes=self.weights.trained + float(moved),
      ici_bytes=moved * (1 - 1 / self.mesh.shape['fsdp']),
    )

  @property
  def _prompt_flops(self) -> float:
    position = np.arange(self.prompt_tokens) + 1
    each = models.flops_per_token(self.model, position, with_head=False)
    return float(self.schedule.prompts * each.sum() / self.mesh.size)

  @property
  def _columns(self) -> int:
    """Tokens of all micro-batches on one device."""
    return self.rows.micro * self._tokens_here

  def _weight_reads(self, passes: int) -> float:
    read = self.weights.gathered - self.weights.table
    return float(self.rows.micro * passes * read)

  def _gathers(self, passes: int) -> float:
    fsdp = self.mesh.shape['fsdp']
    gathered = self.weights.gathered * (fsdp - 1) / fsdp
    return float(self.rows.micro * passes * gathered)

  @property
  def _gradient_sums(self) -> float:
    """Scattered over `fsdp` in float32, then summed over `data`."""
    fsdp = self.mesh.shape['fsdp']
    data = self.mesh.shape['data'] // self.config.mesh.slices
    trained = self.weights.trained
    return trained * (fsdp - 1.0) + 2.0 * trained * (data - 1) / data

  def _tensor_sums(self, passes: int) -> float:
    """Activations, summed over `tensor` twice in each layer and pass."""
    ring = 2 * (self.tensor - 1) / self.tensor
    sums = 2 * passes * self.model.num_layers * self._columns
    return sums * self.model.width * self._compute * ring

  @property
  def _between_slices(self) -> float:
    """Gradients, summed over slices in float32."""
    slices = self.config.mesh.slices
    return 2.0 * self.weights.trained * (slices - 1) / slices
