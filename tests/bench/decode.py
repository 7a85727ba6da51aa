"""Times decoding beside what the machine could do.

python tests/bench/decode.py C S

A decode step reads every weight once, and multiplies it with every row. So it
takes no less than the bytes over the bandwidth, and no less than the operations
over the peak, both as measured in this run. Prints a table. A step is the time
of `TOKENS` tokens less that of one, over the tokens between, in the median of
`TURNS`. `choosing` is the softmax, the draw and the entropy of as many logits,
alone in a program. Nothing else should run on the machine meanwhile.
"""

import functools
import pathlib
import statistics
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax import engines  # noqa: E402
from grpo_jax import models  # noqa: E402
from grpo_jax.engines.local import next_token as next_token_lib  # noqa: E402
from grpo_jax.planning import roofline  # noqa: E402
from grpo_jax.run.build import build  # noqa: E402
from tests import drawing  # noqa: E402
from tests.bench import config as bench_config  # noqa: E402
from tests.bench import tables  # noqa: E402

STREAMS = 1, 8, 16, 64, 512
PROMPT, TOKENS, TURNS = 64, 64, 5
GROUP = 8  # completions of a prompt, if there are as many streams
HEAD = ['case', 'streams', 'a step, ms', 'tokens/s', 'bound, ms', 'of',
        'share of the bound', 'choosing, ms', 'of a step']  # fmt: skip


def main() -> None:
  """Prints the table."""
  lines = [HEAD, ['---'] * len(HEAD)]
  for case in sys.argv[1:] or ('C', 'S'):
    for streams in STREAMS:
      lines.append([case, *cells(case, streams)])
      print(lines[-1], file=sys.stderr, flush=True)
  print(tables.markdown(lines))


@functools.cache
def sampler(case: str):
  """Model, engine with random or pretrained weights, and the bytes of these."""
  config = bench_config.get_config(case)
  config.data.prompt_buckets = (PROMPT,)
  config.data.completion_buckets = (TOKENS,)
  config.sampler.max_tokens = TOKENS
  run = build.run(config_lib.resolve(config))
  run.engine.load(build.initial_params(run), version=0)
  matrices = models.flops_per_token(run.model.config, 0) / 2
  return run.model.config, run.engine, 4 * float(matrices)


@functools.cache
def machine(case: str) -> roofline.Machine:
  """What this one can do, with weights as large as these."""
  return roofline.measure_cpu(int(sampler(case)[2]))


def cells(case: str, streams: int) -> list[str]:
  """A row of the table."""
  model, _, weights = sampler(case)
  step = secs_of_a_step(case, streams)
  context = PROMPT + TOKENS / 2
  work = roofline.Work(
    streams * float(models.flops_per_token(model, context)),
    weights + cache_bytes(model, streams),
  )
  least, resource = roofline.bound(work.secs(machine(case)))
  choosing = secs_of_choosing(streams, model.vocab_size)
  return [
    str(streams),
    f'{1e3 * step:.3g}',
    tables.number(streams / step),
    f'{1e3 * least:.3g}',
    resource,
    f'{least / step:.0%}',
    f'{1e3 * choosing:.3g}',
    f'{choosing / step:.0%}',
  ]


def cache_bytes(model: models.ModelConfig, streams: int) -> float:
  """Keys and values that a step reads: a prompt's once, of its tokens half."""
  numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
  tokens = max(1, streams // GROUP) * PROMPT + streams * TOKENS / 2
  return 4.0 * numbers * tokens


def secs_of_a_step(case: str, streams: int, most: int = GROUP) -> float:
  """The median over turns, without reading prompts.

  Args:
    case: Its model.
    streams: Completions at a time.
    most: Completions of a prompt, if there are as many streams.
  """
  model, engine, _ = sampler(case)
  group = min(most, streams)
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, model.vocab_size, (streams // group, PROMPT))

  def secs(tokens, turn):
    requests = drawing.requests(
      prompts.tolist(), limit=tokens, group=group, rollout=turn
    )
    start = time.monotonic()
    engines.generate(engine, requests)
    return time.monotonic() - start

  secs(2, 0), secs(TOKENS, 0)  # compiles
  found = []
  for turn in range(TURNS):
    one = secs(1, turn)
    found.append((secs(TOKENS, turn) - one) / (TOKENS - 1))
  return statistics.median(found)


def secs_of_choosing(streams: int, vocab: int) -> float:
  """Seconds of drawing one token for all rows."""
  ways = drawing.alike(engines.Sampling(), streams, vocab)

  @jax.jit
  def draw(logits, key):
    def once(total, key):
      uniform = jax.random.uniform(key, (streams,))
      drawn = jnp.zeros((streams,), jnp.int32)
      # What was drawn moves the logits, so that nothing is computed just once.
      found = next_token_lib.next_token(logits + total, uniform, drawn, *ways)
      return 1e-9 * found[1].mean(), found[0]

    return jax.lax.scan(once, jnp.float32(0), jax.random.split(key, 8))

  logits = jax.random.normal(jax.random.key(0), (streams, vocab))
  jax.block_until_ready(draw(logits, jax.random.key(1)))
  found = []
  for turn in range(TURNS):
    start = time.monotonic()
    jax.block_until_ready(draw(logits, jax.random.key(turn)))
    found.append((time.monotonic() - start) / 8)
  return statistics.median(found)


if __name__ == '__main__':
  main()
