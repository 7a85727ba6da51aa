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

import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax import sharding
from grpo_jax.models import layout
from grpo_jax.planning import sizes
from grpo_jax.planning.roofline import Work
from grpo_jax.training.build_abstract import Abstract

_TOKEN_ARRAYS = 10  # [P,G,T] of 4 bytes that an update holds on every device


class Arithmetic:
  """The largest rollout of a run, counted.

  Args:
    parts: See `build_abstract`.
    joined: How many devices are joined by fast links: those of a slice, or of
      a host with GPUs; None: all.
  """

  def __init__(self, parts: Abstract, joined: int | None = None):
    self.parts = parts
    self.joined = joined or parts.run.mesh.size
    self.config = parts.run.config
    self.model = parts.model
    self.mesh = parts.run.mesh
    self.platform = sharding.platform(self.mesh)
    self.weights = sizes.weights_of(parts)
    sampler, learner = self.config.sampler, self.config.learner
    self.prompts, self.group = sampler.prompts, sampler.group
    self.prompt_tokens = max(self.config.data.prompt_buckets)
    self.tokens = sampler.max_tokens
    self.room = layout.bucket(
      self.tokens, self.config.data.completion_buckets, 'completion'
    )
    self.shards = sharding.row_shards(self.mesh)
    self.tensor = self.mesh.shape['tensor']
    self.updates = learner.batches * learner.epochs
    self.rows = sizes.rows_of(
      parts.updater.spec,
      self.prompts // learner.batches,
      self.group,
      self.prompt_tokens,
      self.room,
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
    prompts = self.schedule.prompts
    return self._cache(prompts, prompts * self.group, self.room)

  @property
  def admitted_cache(self) -> float:
    """Keys and values of prompts that are admitted while others go on, bytes.

    They lie beside `cache`, until rows are regrouped.
    """
    if self.prompts <= self.schedule.prompts:
      return 0.0
    shortest = min(self.config.data.completion_buckets)
    prompts = self.schedule.admitted
    return self._cache(prompts, prompts * self.group, shortest)

  @property
  def regrouped_cache(self) -> float:
    """Keys and values after rows have been regrouped the first time, bytes.

    Lanes are narrower then, and each has a copy of its prompt.
    """
    schedule = self.schedule
    rows = schedule.sizes[0] if schedule.sizes else 0
    if self.admitted_cache:
      rows += schedule.new_lanes(0).size
    return self._cache(rows // schedule.narrow, rows, self.room)

  def _cache(self, lanes: int, rows: int, columns: int) -> float:
    """Keys and values of rows, and of the prompts of their lanes, bytes."""
    heads = self.model.num_kv_heads
    split = self.tensor if heads % self.tensor == 0 else 1
    place = 2 * heads // split * self.model.head_dim * self._compute

    def places(columns):
      windows = (kind.window_tokens or columns for kind in self.model.kinds)
      return sum(min(columns, window) for window in windows)

    number = rows * places(columns) + lanes * places(self.prompt_tokens)
    return float(place * number // self.shards)

  def arguments(self, program: str) -> float:
    """The weights and caches that a program is given, bytes.

    Args:
      program: One of `compiling.PROGRAMS`.
    """
    weights = self.weights
    given = {
      'prefill': weights.gathered,
      'decode': weights.gathered + self.cache,
      'regroup': self.cache + self.admitted_cache,
      'train_step': weights.state,
    }
    return float(given.get(program, weights.trained + weights.frozen))

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
      'regroup': {'regrouped cache': self.regrouped_cache},
    }[program]

  @property
  def _head(self) -> float:
    """The output layer: its weights, and a chunk of logits with its slope.

    With `tensor`, the slopes of all data shards are gathered on each device.
    """
    vocab = self.model.vocab_size
    chunk = 4.0 * models.chunk_positions(vocab) * vocab / self.tensor
    chunks = 3.0 if self.tensor == 1 else 5.0 * self.shards
    return 3.0 * self.weights.head + chunks * chunk

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
    token += self._beside_gradient
    return {
      'gradients': 2.0 * self.weights.trained,
      'activations': float(token * self._tokens_here),
      'head': self._head,
      'layer weights': 3 * self._layer,
      'token arrays': self._token_arrays,
    }

  @property
  def _beside_gradient(self) -> float:
    """What the backward pass of one layer needs of a token, bytes.

    Of the MLP, the slopes of both factors. On a TPU also what the kernel of
    attention keeps of each head: three sums, repeated over 128 lanes, and three
    gradients in float32 and four arrays in bfloat16, whose last axis is filled
    up to 128 lanes.
    """
    hidden = self.model.mlp_width
    if self.model.experts is not None:
      hidden = self.model.experts.per_token * self.model.experts.width
    needed = 2.0 * hidden * self._compute
    if self.platform == 'tpu':
      lanes = math.ceil(self.model.head_dim / 128) * 128
      sums, gradients, arrays = 3 * 4 * 128, 3 * 4 * lanes, 4 * 2 * lanes
      needed += self.model.num_heads * (sums + gradients + arrays)
    return needed / self.tensor

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
    """Forward passes that the layers and the output layer are worth.

    A backward pass is worth two: for what is given to a layer, and for its
    weights, whose gradients are not needed where adapters alone are trained.
    """
    if program != 'train_step':
      return 1, 1
    learning = 2 if self.config.lora.rank else 3
    positions = models.chunk_positions(self.model.vocab_size) * self.shards
    in_chunks = self.rows.scored > max(1, positions // self.rows.rows)
    again = self.model.remat * self._recomputed
    return learning + again, learning + in_chunks

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
    weights gathered once for each pass, gradients summed once, activations
    summed over `tensor` and brought to their experts.
    """
    weights = self.weights
    if program == 'train_step':
      micro, passes = self.rows.micro, 3 if self.model.remat else 2
      gathered = self._sent('fsdp', 2.0 * micro * weights.gathered)
      scattered = self._sent('fsdp', self.mesh.shape['fsdp'] * weights.trained)
      summed = self._sent('data', 2.0 * weights.trained)
      made = Work(
        self._learning_flops(program),
        micro * passes * self._read(self._tokens_here)
        + 2.0 * (weights.trained + weights.moments)
        + 2.0 * self.model.num_layers * self._stream * self._columns,
      )
      sums = self._activations_sent(3 * self._columns)
      return made + gathered + scattered + summed + sums
    if program.startswith('score'):
      micro = self.rows.micro
      gathered = self._sent('fsdp', float(micro * weights.gathered))
      read = micro * self._read(self._tokens_here)
      made = Work(self._learning_flops(program), read)
      return made + gathered + self._activations_sent(self._columns)
    return self._sampling(program)

  def _sampling(self, program: str) -> Work:
    if program == 'decode':
      flops = sum(self._forward(self.schedule.prompts)) - self._prompt_flops
      weights = self._read(self._rows_here)
      read = self.tokens * (weights + self.cache / 2)
      return Work(flops, read) + self._activations_sent(
        self._rows_here * self.tokens
      )
    if program == 'prefill':
      tokens = self.schedule.prompts // self.shards * self.prompt_tokens
      made = Work(self._prompt_flops, self._read(tokens))
      return made + self._activations_sent(tokens)
    if program == 'regroup':
      return Work(memory_bytes=self.cache)
    moved = float(self.weights.gathered)
    return Work(memory_bytes=self.weights.trained + moved) + self._sent(
      'fsdp', moved
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

  def _read(self, tokens: int) -> float:
    """Weights that a pass over so many tokens on each device reads, bytes."""
    # Those of all shards that the experts are split over come to each expert.
    tokens *= self.mesh.shape['expert']
    return self.weights.read(tokens, self.model.experts)

  def _activations_sent(self, tokens: int) -> Work:
    """What each layer sends of tokens: summed over `tensor`, and to experts.

    Over `tensor` they are summed twice. Each token goes to all shards that have
    one of its experts, each of which is as likely as any other, and back.
    """
    token = self.model.num_layers * tokens * self.model.width * self._compute
    sent = self._sent('tensor', 4.0 * token)
    shards, mixture = self.mesh.shape['expert'], self.model.experts
    if mixture is None:
      return sent
    reached = shards * (1 - (1 - 1 / shards) ** mixture.per_token)
    return sent + self._sent('expert', 2.0 * reached * token)

  def _sent(self, axis: str, size: float) -> Work:
    """What a device sends so that all along an axis have an array.

    Those that share fast links do it among themselves; between such groups each
    sends its share of what the others lack.

    Args:
      axis: Of the mesh.
      size: Bytes of the array; twice as many if it is summed.
    """
    shape = dict(self.mesh.shape)
    number, names = shape[axis], list(shape)
    inner = math.prod(shape[name] for name in names[names.index(axis) + 1 :])
    inside = min(number, max(1, self.joined // inner))
    outside = math.ceil(number / inside)
    return Work(
      ici_bytes=size * (inside - 1) / inside,
      dcn_bytes=size * (outside - 1) / outside / inside,
    )
