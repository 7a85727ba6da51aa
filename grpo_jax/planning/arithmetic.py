"""What a run needs, by arithmetic: memory, operations, bytes sent.

It takes no compiler and no time, and is right to about a tenth; what the
compiler adds is in no formula. See `memory` for the rollout that is counted.

All numbers are of one device. "Gathered" weights are whole over `fsdp`, and
still split over `tensor` and `expert`.
"""

import math
from typing import Any

import numpy as np

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.planning import memory
from grpo_jax.planning.memory import LEARNING_STEPS
from grpo_jax.planning.memory import Memory
from grpo_jax.planning.roofline import Work

__all__ = ('LEARNING_STEPS', 'Arithmetic')


class Arithmetic(Memory):
  """The largest rollout of a run, counted; see `Memory`."""

  def _passes(self, program: str) -> tuple[float, int]:
    """Forward passes that the layers and the output layer are worth.

    A backward pass is worth two: for what is given to a layer, and for its
    weights, whose gradients are not needed where adapters alone are trained.
    """
    if program not in LEARNING_STEPS:
      return 1, 1
    learning = 2 if self.config.lora.rank else 3
    positions = self._chunk_positions * self.shards
    scored = self.rows.completions * self.room  # places of a row
    in_chunks = scored > max(1, positions // self.rows.rows)
    again = memory.recomputed(self.model)
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
  def _fetched(self) -> int:
    """Weights that a pass gathers: the embedding is looked up where it lies."""
    weights = self.weights
    return weights.fetched - weights.table * (self.mesh.shape['fsdp'] > 1)

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
    # Keys and values go to all parts of a row, and their slopes come back.
    heads = 2.0 * model.num_kv_heads * model.head_dim * self._compute / tensor
    parts = (mesh or self.mesh).shape['context']
    keys = model.num_layers * (passes + again) * heads * tokens * parts
    sums = attention * (passes + again)
    mixed = 0
    for kind in model.kinds:
      hidden = mixture.width if kind.experts and mixture else model.mlp_width
      sums += passes * (hidden % tensor == 0)
      mixed += kind.experts
    sent = self._sent('tensor', 2.0 * sums * token, mesh)
    sent += self._sent('context', keys, mesh)
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
