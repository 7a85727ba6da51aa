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

import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax import sharding
from grpo_jax.models import layout
from grpo_jax.planning import sizes
from grpo_jax.planning.roofline import Work
from grpo_jax.training.build_abstract import Abstract

LEARNING_STEPS = ('train_step', 'watched_step')
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
    self.mesh = parts.run.mesh
    self.sampling_mesh: Any = parts.engine.mesh
    self.platform = sharding.platform(self.mesh)
    self.model = sizes.as_computed(parts.model, self.platform)
    self.weights = sizes.weights_of(parts)
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
    self.rows = sizes.rows_of(parts, batch, self.prompt_tokens, self.room)
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
    return self.rows.rows // self.shards * self.rows.columns

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
    """What the sampler holds when a program begins, bytes by part."""
    weights = {'sampler weights': float(self.weights.sampled)}
    cache, admitted = {'cache': self.cache}, {}
    if self.admits:
      admitted = {'cache of admitted prompts': self.admitted_cache}
    return {
      'prefill': {**weights, **(cache if self.admits else {})},
      'decode': weights | cache,
      'grow': {**weights, 'cache': self._first_cache(self.rooms[-2:][0])},
      'regroup': weights | cache | admitted,
    }.get(program, {})

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
  def _head(self) -> float:
    """The output layer: its weights, and a chunk of logits with its slope.

    With `tensor`, the slopes of several data shards are gathered on each
    device; of how many was read off what the compiler needs.
    """
    vocab = self.model.vocab_size
    chunk = 4.0 * models.chunk_positions(vocab) * vocab / self.tensor
    chunks = 3.0 if self.tensor == 1 else 5.0 * min(self.shards, 8)
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

  @property
  def on_host(self) -> float:
    """What lies in the memory of the host, bytes for one device."""
    kept = self.model.num_layers * self._stream * self._tokens_here
    return self.weights.on_host + kept * (self.model.remat == 'offload')

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
    token = sizes.activations(self.model, self.platform, self.tensor)
    # How overshoot moves the log-probabilities is measured along each update.
    tangents = self.weights.trained * (program == 'watched_step')
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

  def _expert_arrays(self, here: int, wide=2.5, hidden=2.0) -> float:
    """What the mixture of one layer needs at once, bytes.

    There is room for each pair of a token and an expert that this device may
    get: all of the tokens of its shards, however uneven the choices are. How
    many arrays lie side by side was read off what the compiler needs.

    Args:
      here: Tokens on one device.
      wide: How many arrays [pairs, width] in the compute dtype.
      hidden: How many arrays [pairs, hidden] in float32.
    """
    mixture, shards = self.model.experts, self.mesh.shape['expert']
    if mixture is None:
      return 0.0
    experts = max(1, mixture.number // shards)
    pairs = here * shards * min(mixture.per_token, experts)
    inside = 4 * hidden * mixture.width / self.tensor
    return pairs * (wide * self.model.width * self._compute + inside)

  @property
  def _experts_learning(self) -> float:
    """With experts and their gradients, laid out for their products."""
    copies = 1.5 * self.weights.trained * (self.model.experts is not None)
    return copies + self._expert_arrays(self._tokens_here, 5.0, 4.0)

  def _passes(self, program: str) -> tuple[float, int]:
    """Forward passes that the layers and the output layer are worth.

    A backward pass is worth two: for what is given to a layer, and for its
    weights, whose gradients are not needed where adapters alone are trained.
    """
    if program not in LEARNING_STEPS:
      return 1, 1
    learning = 2 if self.config.lora.rank else 3
    positions = models.chunk_positions(self.model.vocab_size) * self.shards
    scored = self.rows.completions * self.room  # places of a row
    in_chunks = scored > max(1, positions // self.rows.rows)
    again = sizes.recomputed(self.model)
    return learning + again, learning + in_chunks

  def _learning_flops(self, program: str) -> float:
    """FLOPs of `train_step` or of a scoring: of all places of all rows."""
    layers, head = self._passes(program)
    inside, outside = self._forward(*self._in_rows, attention=False)
    return layers * inside + self.attention_flops(program) + head * outside

  @property
  def _in_rows(self) -> tuple[float, float]:
    """Prompts and completions of full length that the rows have places for."""
    rows = self.rows.micro * self.rows.rows
    completions = rows * self.rows.completions * self.room / self.tokens
    return rows * self.rows.prompts, completions

  def _forward(
    self, prompts: float, completions: float, attention: bool = True
  ) -> tuple[float, float]:
    """FLOPs of a forward pass, on one device.

    Args:
      prompts: How many are read.
      completions: How many go on from a prompt.
      attention: Whether to count scores and weighted values.

    Returns:
      Those of the layers, and those of the output layer.
    """
    place = float(attention) * np.arange(self.prompt_tokens + self.tokens) + 1
    of_prompt, of_completion = np.split(place, [self.prompt_tokens])

    def of(context, with_head=False):
      return models.flops_per_token(self.model, context, with_head).sum()

    layers = prompts * of(of_prompt) + completions * of(of_completion)
    head = completions * (of(of_completion, True) - of(of_completion))
    return float(layers / self.mesh.size), float(head / self.mesh.size)

  def attention_flops(self, program: str) -> float:
    """Of `work`, what scores and weighs keys; it has no weights to freeze."""
    passes = 1.0
    if program == 'decode':
      counted = 0.0, self._drawn * self.group
    elif program in LEARNING_STEPS or program.startswith('score'):
      counted = self._in_rows
      if program in LEARNING_STEPS:
        passes = 3.0 + (self.model.remat in ('layer', 'offload'))
    else:
      return 0.0
    whole, without = (
      self._forward(*counted, seen)[0] for seen in (True, False)
    )
    return passes * (whole - without)

  @property
  def _drawn(self) -> float:
    """Prompts of a start, on average; each shard has as many as the fullest."""
    last = self.prompts - (self.starts - 1) * self.schedule.prompts
    last = math.ceil(last / self.schedule.shards) * self.schedule.shards
    whole = (self.starts - 1) * self.schedule.prompts
    return (whole + last) / self.starts

  def work(self, program: str) -> Work:
    """What one call of a program has to do on one device, at least.

    Of what is sent, only what no implementation can do without is counted:
    weights gathered once for each pass, gradients summed once, activations
    summed over `tensor` and brought to their experts; nothing to the host.
    """
    weights = self.weights
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
      made += self._sent('fsdp', 2.0 * micro * weights.fetched)
      made += self._sent('fsdp', summed)
      made += self._sent('data', 2.0 * weights.trained)
      return made + self._activations_sent(self._columns, learns=True)
    if program.startswith('score'):
      micro = self.rows.micro
      read = micro * self._read(self._tokens_here)
      made = Work(self._learning_flops(program), read)
      made += self._sent('fsdp', float(micro * weights.fetched))
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
      weights = self._read(here * self.group) * self._sampled_share
      made = Work(sum(self._forward(0, rows)), self.tokens * (weights + seen))
      tokens = here * self.group * self.tokens
      return made + self._activations_sent(tokens, mesh=mesh)
    if program == 'prefill':
      tokens = here * self.prompt_tokens
      weights = self._read(tokens) * self._sampled_share
      made = Work(self._forward(prompts, 0)[0], weights)
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

  @property
  def _sampled_share(self) -> float:
    """How large the sampler's weights are beside those of a pass."""
    return self.weights.sampled / self.weights.gathered

  @property
  def _columns(self) -> int:
    """Tokens of all micro-batches on one device."""
    return self.rows.micro * self._tokens_here

  @property
  def _exchanging(self) -> int:
    """Over how many devices experts are split."""
    mixture, shards = self.model.experts, self.mesh.shape['expert']
    return shards if mixture and mixture.number % shards == 0 else 1

  def _read(self, tokens: float) -> float:
    """Weights that a pass over so many tokens on each device reads, bytes."""
    # Those of all shards that the experts are split over come to each expert.
    return self.weights.read(tokens * self._exchanging, self.model.experts)

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
    sums = attention * (passes + again)
    mixed = 0
    for kind in model.kinds:
      hidden = mixture.width if kind.experts and mixture else model.mlp_width
      sums += passes * (hidden % tensor == 0)
      mixed += kind.experts
    sent = self._sent('tensor', 2.0 * sums * token, mesh)
    shards = self._exchanging
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
