"""A handshake lets a sound engine pass, and says why another one differs.

`python -m tests.engines.http.handshake_test` prints the gaps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import config
from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines import scoring
from grpo_jax.engines.http import handshake
from grpo_jax.models import lora
from grpo_jax.run.build import engine as build_engine
from tests import tiny
from tests.serving import served

CONTEXT = 96
LIMIT = 200  # the most that a run draws; a handshake needs less
LORA = models.LowRank(2, 4.0)
NO_ADAPTER = 'It draws without the adapter.'
OLDER = 'It has an older version.'
RAW = (
  'Its log-probabilities are those before the temperature, or it draws without '
  'it; start vLLM with --logprobs-mode=processed_logprobs, and SGLang without '
  'SGLANG_RETURN_ORIGINAL_LOGPROB.'
)
TURNED = (
  'The gap grows with the place of a token: it may turn places by other angles '
  '(rope_theta, rope_scaling), or cut the context.'
)
ROUNDED = (
  'It is about the same everywhere: it may hold weights or caches in fewer '
  'bits (--quantization, --kv-cache-dtype).'
)
UNKNOWN = (
  'No cause that is known here fits: it may have another model, an older '
  'version, or weights that were read wrongly.'
)
ALARM = 0.1  # nats


@functools.cache
def model(**changes):
  return tiny.model(lora=LORA, **changes)


@functools.cache
def params(seed=0):
  """With adapters that change the policy."""
  return tiny.params(model(), seed)


def prompts(number=handshake.PROMPTS):
  rng = np.random.default_rng(1)
  return [rng.integers(2, 40, 4 + 3 * n).tolist() for n in range(number)]


class Engine(engines.LocalEngine):
  """Tells of what it has drawn as `tells` says.

  Attributes:
    tells: From the ids of a prompt and what was drawn to what is told.
  """

  tells = None

  def submit(self, request):
    number = super().submit(request)
    self.known = {**getattr(self, 'known', {}), number: request}
    return number

  def completed(self, every_tokens=None):
    for turn in super().completed(every_tokens):
      yield [
        self.tells(self.known[one.request], one) if self.tells else one
        for one in turn
      ]


def engine(loaded=None, **changes):
  found = Engine(model(**changes), (32,), (32,), max_rows=8)
  found.load(params() if loaded is None else loaded, 0)
  return found


@functools.cache
def scorer():
  return scoring.Scorer(model(), params(), CONTEXT)


def shake(drawing, temperature=1.0, others=None, **options):
  sampling = engines.Sampling(temperature=temperature)
  return handshake.shake(
    drawing, scorer(), prompts(), sampling, LIMIT, others or {}, **options
  )


def rounded(bits):
  """The parameters as whole numbers of so many bits, for each column."""
  most = 2 ** (bits - 1) - 1

  def one(x):
    x = np.asarray(x)
    if x.ndim < 2:
      return x
    scale = np.abs(x).max(axis=-2, keepdims=True) / most
    return (np.round(x / np.where(scale, scale, 1)) * scale).astype(x.dtype)

  low, base = lora.split(params(), lora.trains)
  return lora.join(low, jax.tree.map(one, base))


def in_bfloat16():
  return jax.tree.map(
    lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(x.dtype), params()
  )


def without_adapter():
  low, base = lora.split(params(), lora.trains)
  return lora.join(jax.tree.map(np.zeros_like, low), base)


def moved(size):
  """What the policy was some updates before."""
  low, base = lora.split(params(), lora.trains)
  rng = np.random.default_rng(5)
  low = jax.tree.map(
    lambda x: (x + size * rng.normal(size=x.shape)).astype(x.dtype), low
  )
  return lora.join(low, base)


def raw():
  """An engine that tells log-probabilities at temperature 1."""

  def tell(request, one):
    logp = scorer()([*request.ids, *one.ids.tolist()]).logp[-len(one.ids) :]
    return one._replace(logp=logp)

  found = engine()
  found.tells = tell
  return found


SOUND = [
  (dtype, temperature)
  for dtype in ('float32', 'bfloat16')
  for temperature in (0.7, 1.0, 1.5)
]


def sound(dtype, temperature):
  drawing = engine(in_bfloat16() if dtype == 'bfloat16' else None)
  return shake(
    drawing, temperature, {NO_ADAPTER: without_adapter(), OLDER: moved(0.2)}
  )


LIES = {
  'raw at temperature 0.7': (lambda: shake(raw(), 0.7), RAW),
  'raw at temperature 1.5': (lambda: shake(raw(), 1.5), RAW),
  'adapter dropped': (
    lambda: shake(engine(without_adapter()), others=known()), NO_ADAPTER,
  ),
  'adapter dropped at temperature 0.7': (
    lambda: shake(engine(without_adapter()), 0.7, known()), NO_ADAPTER,
  ),
  'adapter dropped at temperature 4': (
    lambda: shake(engine(without_adapter()), 4.0, known()),
    NO_ADAPTER,
  ),
  'older version': (
    lambda: shake(engine(moved(0.2)), others=known()), OLDER,
  ),
  'other rope_theta': (
    lambda: shake(engine(rope_base=3e6), others=known()), TURNED,
  ),
  '5 bits': (lambda: shake(engine(rounded(5)), others=known()), ROUNDED),
  '8 bits': (lambda: shake(engine(rounded(8)), others=known()), ROUNDED),
  'other weights': (
    lambda: shake(engine(tiny.params(model(), 7)), others=known()), UNKNOWN,
  ),
}  # fmt: skip


def known():
  return {NO_ADAPTER: without_adapter(), OLDER: moved(0.2)}


# Gaps that a run goes on with, unless log.sampler_gap_alarm is lower.
QUIET = {'8 bits'}


@pytest.mark.parametrize('dtype, temperature', SOUND)
def test_a_sound_engine_passes(dtype, temperature):
  found = sound(dtype, temperature)
  assert found.tokens == handshake.PROMPTS * handshake.TOKENS
  assert found.gap < {'float32': 1e-5, 'bfloat16': 0.03}[dtype]
  assert found.gap < ALARM


@pytest.mark.parametrize('name', LIES)
def test_a_lie_is_found_and_explained(name):
  do, said = LIES[name]
  found = do()
  assert found.cause == said
  assert (found.gap > ALARM) != (name in QUIET)
  assert found.gap > 0.02


def test_other_bases_of_the_angles_are_found():
  for base in (1e3, 1e5):
    assert shake(engine(rope_base=base)).cause == TURNED


def test_what_is_drawn_depends_on_the_version_and_not_on_long_limits():
  drawn = []

  class Recorded(Engine):
    def submit(self, request):
      drawn.append((request.keys.tolist(), request.limit, [*request.ids]))
      return super().submit(request)

  def shaken(limit, **options):
    drawn.clear()
    made = Recorded(model(), (32,), (32,), max_rows=8)
    made.load(params(), 0)
    sampling = engines.Sampling()
    report = handshake.shake(
      made, scorer(), prompts(), sampling, limit, {}, **options
    )
    return report.tokens, [*drawn]

  tokens, first = shaken(LIMIT)
  assert {limit for _, limit, _ in first} == {handshake.TOKENS}
  whole = prompts()
  assert [ids for *_, ids in first] == [
    ids[:2] if n % 2 else ids for n, ids in enumerate(whole)
  ]
  assert shaken(LIMIT) == (tokens, first)
  other = shaken(LIMIT, version=3)[1]
  assert all(x[0] != y[0] for x, y in zip(first, other))
  tokens, short = shaken(5)
  assert {limit for _, limit, _ in short} == {5}
  assert tokens == 5 * handshake.PROMPTS


def test_greedy_tokens_are_compared_at_temperature_1():
  found = shake(engine(), 0.0)
  assert found.gap < 1e-5 and found.cause != RAW


@pytest.mark.parametrize(
  'found, places, tried, said',
  [
    # Another policy must fit three times as well.
    ([0.9] * 4, [1, 2, 3, 4], {'A.': 0.29, 'B.': 0.2}, 'B.'),
    ([0.9] * 4, [1, 2, 3, 4], {'A.': 0.31}, UNKNOWN),
    ([0.3] * 4, [1, 2, 3, 4], {'A.': 0.11}, ROUNDED),
    ([0.1, 0.2, 0.3, 0.31], [1, 2, 3, 4], {}, TURNED),
    ([0.31, 0.3, 0.2, 0.1], [4, 3, 2, 1], {}, TURNED),
    ([0.1, 0.2, 0.3, 0.29], [1, 2, 3, 4], {}, ROUNDED),
    ([0.0, 0.0, 0.0, 0.9], [1, 2, 3, 4], {}, TURNED),
    ([0.51] * 4, [1, 2, 3, 4], {}, UNKNOWN),
    ([0.49] * 4, [1, 2, 3, 4], {}, ROUNDED),
  ],
)
def test_causes(found, places, tried, said):
  gaps = np.array(found, np.float32)
  assert handshake.cause(gaps, np.array(places), tried) == said


ours = pytest.fixture(scope='module')(served.smallest)


@pytest.mark.parametrize('dialect', ['vllm', 'sglang'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_our_own_server_takes_adapters_and_passes(ours, dialect, dtype):
  found = ours.served
  fields = config.Engine(
    kind='http', dialect=dialect, urls=(ours.url,), model=ours.service.name,
    dtype=dtype, concurrency=8,
  )  # fmt: skip
  described = dataclasses.replace(found.run.config, engine=fields)
  made = build_engine.http_engine(described, found.run.model, found.run.mesh)
  learned = served.with_adapters(ours, 3)
  scores = dataclasses.replace(found.scorer, params=learned)
  others = {NO_ADAPTER: found.scorer.params}
  asked = [[2 + n, 4, 5, 6, 7] for n in range(handshake.PROMPTS)]
  sampling = engines.Sampling(temperature=0.7)
  try:
    made.load(learned, 2)
    sound = handshake.shake(made, scores, asked, sampling, 16, others, 2)
    made.load(found.scorer.params, 3)  # whose adapters change nothing
    lies = handshake.shake(made, scores, asked, sampling, 16, others, 3)
  finally:
    made.versions.close()
  assert sound.gap < {'float32': 1e-5, 'bfloat16': 0.03}[dtype]
  assert lies.gap > ALARM and lies.cause == NO_ADAPTER


if __name__ == '__main__':
  for row in SOUND:
    print('sound', *row, f'{sound(*row).gap:.2g}', sep=' | ')
  for name, (do, _) in LIES.items():
    found = do()
    print(name, f'{found.gap:.2g}', found.cause, sep=' | ')
