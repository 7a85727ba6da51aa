"""What an update sends between devices, read from the compiled program.

Bytes are those of the results of collectives on one device, times how often
each runs. What is needed is written out in `needed`.
"""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

from grpo_jax.learner import layouts
from grpo_jax.learner import programs
from grpo_jax.mesh import sharding
from grpo_jax.models import scores
from grpo_jax.planning import hlo
from tests import tiny
from tests.learning import METHODS
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec

VOCAB = 4096  # so that the output layer is the largest part
FLOAT = 4  # bytes
WIDTH = 8  # positions of a completion, which data shards have between them
ROWS, COLUMNS, MICRO = 8, 16, 2  # of a micro-batch; how many of these
SIZES = {
  'data': (4, 1, 1),
  'fsdp': (1, 4, 1),
  'data x fsdp': (2, 4, 1),
  'tensor': (1, 1, 2),
  'fsdp x tensor': (1, 4, 2),
  'data x fsdp x tensor': (2, 2, 2),
}
MORE = [  # every mesh, and with every axis the third policy
  ('fsdp', 'none'),
  ('fsdp', 'layer'),
  ('data x fsdp x tensor', 'none'),
  ('data x fsdp', 'layer'),
  ('tensor', 'none'),
  ('tensor', 'layer'),
  ('fsdp x tensor', 'layer'),
  ('fsdp', 'attention'),
  ('data x fsdp x tensor', 'attention'),
]


@functools.cache
def compiled(mesh, **changes):
  """The program of an update in two micro-batches and several chunks."""
  changes = {'vocab_size': VOCAB, **changes}
  learner = make_learner(METHODS['grpo'](), mesh, optax.sgd(0.1), **changes)
  params = jax.eval_shape(tiny.model(**changes).init, jax.random.key(0))
  made = make_updater(learner, params, spec('padded', ROWS))
  example = make_rollout(width=WIDTH)
  chosen = np.arange(len(example.prompts))
  rows, used = layouts.abstract_stack(
    made.compiled, example, chosen, made.layout
  )
  assert rows.tokens.shape == (MICRO, ROWS, COLUMNS) and used == MICRO
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(scores, 'chunk_positions', lambda *_: 12)
    lowered = programs.lowerings(made, made.layout, example)
    text = lowered['train_step']().compile().as_text()
  params = made.compiled.abstract.params
  return hlo.Program(text, used, math.prod(mesh)), params, text


def found(program):
  """Bytes by kind of collective."""
  sizes: dict[str, float] = dict.fromkeys(hlo.KINDS, 0.0)
  for one in program.collectives():
    sizes[one.kind] += one.bytes * one.times
  return sizes


def needed(params, mesh, remat):
  """What an update with these meshes and sizes has to send, by kind."""
  data, fsdp, tensor = mesh
  gathers = scatters = sums = 0.0
  for path, leaf in jax.tree.leaves_with_path(params):
    place = leaf.sharding.spec
    part = FLOAT * math.prod(leaf.sharding.shard_shape(leaf.shape))
    looked_up = sharding.path_names(path)[-1] == 'embedding'
    if 'fsdp' in place and fsdp > 1 and not looked_up:
      # For the forward pass and for the backward pass, of each micro-batch.
      gathers += 2 * MICRO * part * fsdp
      scatters += MICRO * part
    if data > 1 or fsdp > 1 and 'fsdp' not in place:
      sums += part  # once, over all that have the same part
  shards = data * fsdp
  tokens = ROWS * COLUMNS // shards
  activations = FLOAT * tokens * tiny.CONFIG.width
  swaps = 2 * MICRO * activations if fsdp > 1 else 0  # rows of the embedding
  if tensor > 1:
    # Of each layer: two sums forward, again under remat, and backward that of
    # the queries, keys and values, and that of the gate and what it gates; and
    # one of the embedding and one of the output layer.
    layers = tiny.CONFIG.num_layers * (2 + (remat != 'none') + 5)
    sums += MICRO * (layers + 2) * activations
    # The residual stream is split over `tensor`, so what each half of a layer
    # reads is gathered: forward, and backward with its slope and, unless it is
    # kept, once more. And what the output layer reads, with its slope.
    halves = 2 * tiny.CONFIG.num_layers
    gathers += MICRO * (halves * (3 + (remat == 'layer')) + 4) * activations
  sums += 4000  # metrics
  if shards > 1:
    # Of the completions in rows: log-probabilities of two policies, advantages,
    # weights and two masks come, log-probabilities and their slopes go.
    swaps += MICRO * ROWS // shards * WIDTH * (6 * FLOAT + 2)
  return {
    # And ids; not a single array of the batch, of which metrics read dozens.
    'all-gather': gathers + 250,
    'reduce-scatter': scatters,
    'all-reduce': sums,
    'all-to-all': swaps,
  }


@pytest.mark.parametrize(
  'name, remat',
  [
    # Gathers no weights, so a gather of metrics is seen.
    pytest.param('data', 'none', marks=pytest.mark.long),
    ('data x fsdp x tensor', 'layer'),
  ],
)
def test_an_update_sends_what_it_needs(name, remat):
  sends_what_it_needs(SIZES[name], remat)


@pytest.mark.long
@pytest.mark.parametrize('name, remat', MORE, ids=str)
def test_so_it_does_on_more_meshes(name, remat):
  sends_what_it_needs(SIZES[name], remat)


def sends_what_it_needs(mesh, remat):
  program, params, _ = compiled(mesh, remat=remat)
  sent, limits = found(program), needed(params, mesh, remat)
  for kind in hlo.KINDS:
    limit = 1.02 * limits.get(kind, 0)
    assert sent[kind] <= limit, (kind, sent, limits)
  # A count that sees nothing would pass. (On a CPU the compiler gathers the
  # output layer once for all micro-batches.)
  assert sum(sent.values()) > 0.3 * sum(limits.values()), (sent, limits)


def in_bfloat16():
  return compiled((2, 4, 1), compute_dtype='bfloat16', remat='layer')


def test_gradients_are_summed_in_float32_under_bfloat16():
  program, params, _ = in_bfloat16()
  summed = [
    one
    for one in program.collectives()
    if one.kind in ('all-reduce', 'reduce-scatter') and one.bytes > 1000
  ]
  assert len(summed) > 5
  assert {one.dtype for one in summed} == {'f32'}
  assert np.isclose(  # once for all of what is replicated over data
    sum(one.bytes * one.times for one in summed if one.kind == 'all-reduce'),
    sum(
      FLOAT * math.prod(x.sharding.shard_shape(x.shape))
      for x in jax.tree.leaves(params)
    ),
    rtol=0.1,
  )


@pytest.mark.quick
def test_data_shards_move_weights_and_not_activations():
  """8 rows of 16 columns, width 32: none of these move, weights do."""
  pattern = rf' = (.*?) (?:{"|".join(hlo.KINDS)})(?:-start)?\('
  moved = [
    tuple(size for size in map(int, shape.split(',')) if size > 1)
    for result in re.findall(pattern, in_bfloat16()[2])
    for shape in re.findall(r'\w+\[([\d,]+)\]', result)
  ]
  assert len(moved) > 4
  logits = [shape for shape in moved if shape[-1:] == (VOCAB,)]
  # The output layer itself, and each shard's part of its gradient.
  assert logits and {*logits} <= {(32, VOCAB), (32 // 4, VOCAB)}
  activations = [
    shape
    for shape in moved
    if COLUMNS in shape and math.prod(shape) >= 2 * COLUMNS * 32
  ]
  assert not activations, activations
