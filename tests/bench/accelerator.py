"""Sampling and training on one accelerator, against what the device can do.

  python tests/bench/accelerator.py --shape 0.5B --prompts 64 --group 8 \
    --prompt_tokens 512 --completion_tokens 1024

Needs jax, flax and optax alone, beside this repository. Qwen2.5's shapes with
random weights, random prompts, no end token: nothing depends on data. Compiling
is not timed; of `--repeats` the best is told; a micro-batch of training has
`--micro_rows` prompts with their groups. `--tiny` does all of it with a small
model, on a CPU in a minute.

The limits are measured in the same run: a matrix product and a copy. Training
is held against the first by the arithmetic of the model (`flops_per_token`,
each prompt counted once for its group, what `remat` computes again not
counted), decoding against the second by the bytes that a step cannot avoid: the
parameters once, the prompts' caches once for each group, each row's own cache.
So far it has run on CPUs only.
"""

import argparse
from collections.abc import Callable
import gzip
import json
import pathlib
import re
import sys
import tempfile
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax import engines  # noqa: E402
from grpo_jax import losses  # noqa: E402
from grpo_jax import models  # noqa: E402
from grpo_jax import optim  # noqa: E402
from grpo_jax.learner import compiled  # noqa: E402
from grpo_jax.learner.types import Learner  # noqa: E402
from grpo_jax.learner.types import Optimizer  # noqa: E402
from grpo_jax.learner.types import Placement  # noqa: E402
from grpo_jax.learner.types import Scoring  # noqa: E402
from grpo_jax.mesh import sharding  # noqa: E402
from grpo_jax.models import layout  # noqa: E402
from tests import drawing  # noqa: E402
from tests.bench import accelerator_shapes as shapes  # noqa: E402


def main(argv=None) -> dict:
  """Measures, prints a table and one line of JSON, which it returns."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--attention', default='auto', help='of training')
  args = shapes.arguments(parser, argv)
  config = models.ModelConfig(
    **shapes.SHAPES[args.shape],
    compute_dtype=args.dtype,
    attention=args.attention,
  )
  model = models.Transformer(config)
  params = jax.jit(model.init)(jax.random.key(0))
  device = jax.devices()[0]
  told = {
    'device': device.device_kind,
    'jax': jax.__version__,
    **{name: value for name, value in vars(args).items() if name != 'tiny'},
    'parameters': sum(x.size for x in jax.tree.leaves(params)),
    **limits(args),
  }
  completions, measured = sample(args, model, params, told)
  told |= measured
  told |= train(args, model, params, completions, told)
  memory = device.memory_stats() or {}
  told['peak_gib'] = memory.get('peak_bytes_in_use', 0) / 2**30
  shapes.show(told)
  return told


def best_secs(run: Callable, repeats: int) -> float:
  """Least seconds of a call, after one that compiles."""
  jax.block_until_ready(run())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return min(times)


def limits(args) -> dict[str, float]:
  """FLOP/s of a matrix product and bytes/s of a copy, read and written."""
  size, times = (512, 2) if args.tiny else (8192, 20)
  left, right = (
    jax.random.normal(key, (size, size), jnp.dtype(args.dtype)) * size**-0.5
    for key in jax.random.split(jax.random.key(0))
  )

  @jax.jit
  def products(left, right):
    return jax.lax.fori_loop(0, times, lambda _, x: x @ right, left)

  secs = best_secs(lambda: products(left, right), args.repeats + 2)
  data = jnp.zeros((2**20 if args.tiny else 2**29,), jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  copy_secs = best_secs(lambda: copy(data), args.repeats + 2)
  return {
    'matrix_flops_per_sec': 2 * size**3 * times / secs,
    'copy_bytes_per_sec': 2 * data.nbytes / copy_secs,
  }


def sample(args, model, params, told):
  """Completions, and how fast they were drawn."""
  config, rng = model.config, np.random.default_rng(0)
  shape = args.prompts, args.prompt_tokens
  prompts = rng.integers(0, config.vocab_size, shape).tolist()
  engine = engines.LocalEngine(
    model, (args.prompt_tokens,), (args.completion_tokens,)
  )
  engine.load(params, 0)

  def generate(tokens):
    return drawing.completions(engine, prompts, limit=tokens, group=args.group)

  tokens = args.completion_tokens
  completions = generate(tokens)
  secs = best_secs(lambda: generate(tokens), args.repeats)
  first_secs = best_secs(lambda: generate(1), args.repeats)
  item = jnp.dtype(args.dtype).itemsize
  place = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
  # An embedding that is not the output layer too is looked up, not read.
  unread = 0 if config.tied_embeddings else params['embedding'].size
  step_bytes = (told['parameters'] - unread) * item + place * args.prompts * (
    args.prompt_tokens + args.group * (tokens + 1) / 2
  )
  bound = step_bytes / told['copy_bytes_per_sec']
  step_secs = max(secs - first_secs, 1e-9) / (tokens - 1)
  return completions, {
    'sample_tokens_per_sec': int(completions.length.sum()) / secs,
    'sample_secs': secs,
    'prefill_secs': first_secs,
    'decode_step_secs': step_secs,
    'decode_share_of_copy_bound': bound / step_secs,
    'decode_top_ops': top_ops(lambda: generate(min(tokens, 16))),
  }


def train(args, model, params, completions, told):
  """How fast one optimizer step over all completions is."""

  def score(params, rows, wanted):
    return models.score(model, params, rows, 1.0, wanted)

  learner = Learner(
    losses.methods.grpo(kl_coefficient=0),
    Scoring(score),
    Optimizer(optim.adamw(1e-6), 'step'),
    Placement(sharding.make_mesh(), model.logical_axes),
  )
  functions = compiled.jit_functions(learner, params)
  state = functions.init(params)
  prompts = [[1] * args.prompt_tokens] * args.prompts
  drawn = completions.tokens, completions.length
  rows = layout.shared_prompt(prompts, *drawn, args.prompt_tokens)
  micro = jax.tree.map(
    lambda x: x.reshape(-1, args.micro_rows, *x.shape[1:]), rows
  )
  micro = jax.device_put(micro, sharding.rows(learner.mesh, axis=1))
  shape = completions.tokens.shape
  batch = losses.make_batch(
    np.arange(shape[2]) < completions.length[..., None],
    np.indices(shape[:2])[1] % 2.0,  # half of a group is right
    tokens=completions.tokens,
  )
  batch, loss_state, _ = functions.credit(batch, state.loss_state)
  state = state._replace(loss_state=loss_state)
  number = np.arange(args.prompts)

  def step(used=args.prompts // args.micro_rows):
    nonlocal state
    used, start = np.int32(used), np.int32(0)
    state, _ = functions.step(
      None, state, batch, number, micro, used, start, start
    )
    return state.step

  secs = best_secs(step, args.repeats)
  flops = 3 * forward_flops(args, model.config)
  count = args.prompts * (args.prompt_tokens + args.group * shape[2])
  return {
    'train_tokens_per_sec': count / secs,
    'train_completion_tokens_per_sec': completions.length.sum() / secs,
    'train_secs': secs,
    'train_mfu': flops / secs / told['matrix_flops_per_sec'],
    'train_top_ops': top_ops(lambda: step(1)),
  }


def forward_flops(args, config) -> float:
  """Of a forward pass; the output layer on completions only."""
  edge = args.prompt_tokens
  prompt = models.flops_per_token(config, np.arange(edge) + 1, with_head=False)
  context = edge + np.arange(args.completion_tokens) + 1
  own = models.flops_per_token(config, context).sum()
  return args.prompts * (prompt.sum() + args.group * own)


def top_ops(run: Callable, number: int = 5) -> list[str]:
  """The operations with most time of their own, from JAX's own trace."""
  with tempfile.TemporaryDirectory(prefix='grpo_jax_trace_') as folder:
    jax.block_until_ready(run())  # compiles
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
      jax.block_until_ready(run())
    (path,) = pathlib.Path(folder).rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  spent = own_micros(events)
  total = sum(spent.values())
  ranked = sorted(spent.items(), key=lambda item: -item[1])[:number]
  return [f'{micros / total:6.1%}  {name}' for name, micros in ranked]


def own_micros(events) -> dict[str, float]:
  """Microseconds of each operation, without those of operations inside it.

  Args:
    events: `traceEvents`. A device's line 'XLA Ops' counts where there is one
      (its streams say the same again), else whatever names an HLO operation.

  Returns:
    From names, without their numbers, to microseconds.
  """
  lines = {
    (event['pid'], event['tid'])
    for event in events
    if event.get('name') == 'thread_name' and event['args']['name'] == 'XLA Ops'
  }

  def counts(event):
    if lines:
      return (event['pid'], event['tid']) in lines
    return 'hlo_op' in event.get('args', ())

  ops = [e for e in events if e.get('ph') == 'X' and counts(e)]
  spent: dict[str, float] = {}
  open_ops: list[tuple[tuple, float, str]] = []
  ops.sort(key=lambda e: (e['pid'], e['tid'], e['ts'], -e['dur']))
  for event in ops:
    line, name = (event['pid'], event['tid']), event['name']
    name = re.sub(r'[._]\d+', '', name)
    while open_ops and open_ops[-1][:2] <= (line, event['ts']):
      open_ops.pop()
    if open_ops:  # inside another, a loop say
      spent[open_ops[-1][2]] -= event['dur']
    spent[name] = spent.get(name, 0) + event['dur']
    open_ops.append((line, event['ts'] + event['dur'], name))
  return spent


if __name__ == '__main__':
  main()
