"""Whether an engine of others draws by the policy that learns.

The engine samples from some prompts, the learner scores what was sampled, and
the two log-probabilities of each token are compared. What is drawn is scored,
and not a prompt: servers take another path for prompts, and leave the
temperature out there.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.engines import protocol
from grpo_jax.engines.scoring import Scorer

PROMPTS = 8
TOKENS = 16  # of a completion, at most
_HEAD = 2  # tokens of every second prompt: where a text begins, most angles
# by which places are turned are the same whatever the base.
_GROWS = 3.0  # times the gap of the first quarter of all places, at the end
_ROUNDED = 0.5  # nats; weights of 4 to 8 bits differ by less


class Report(NamedTuple):
  """What a handshake has found.

  Attributes:
    gap: Mean of |log-probability of the learner minus that of the engine| over
      all tokens, nats.
    tokens: How many there were.
    cause: What fits best where the gap is too large, as a sentence.
  """

  gap: float
  tokens: int
  cause: str


def shake(
  engine: protocol.Engine,
  scorer: Scorer,
  prompts: Sequence[Sequence[int]],
  sampling: protocol.Sampling,
  limit: int,
  others: Mapping[str, Any],
  version: int = 0,
) -> Report:
  """Compares an engine with the learner's scores.

  Args:
    engine: With the parameters of `scorer`.
    scorer: The learner's.
    prompts: Ids.
    sampling: How the run draws tokens.
    limit: The most tokens of a completion.
    others: Parameters that the engine may have in the place of its own, each by
      a sentence for people.
    version: Of the parameters; another one draws other tokens.
  """
  prompts = [one[:_HEAD] if n % 2 else one for n, one in enumerate(prompts)]
  asked = protocol.requests(
    prompts,
    range(len(prompts)),
    1,
    sampling,
    min(limit, TOKENS),
    0,
    version,
    'handshake',
  )
  drawn = [one for (one,) in protocol.generate(engine, asked)]
  texts = [
    ([*prompt, *one.ids.tolist()], one)
    for prompt, one in zip(prompts, drawn, strict=True)
  ]
  own = sampling.temperature or 1.0

  def gaps(by: Scorer, temperature: float) -> np.ndarray:
    return np.concatenate(
      [
        np.abs(by(ids, 0, temperature).logp[-len(one.ids) :] - one.logp)
        for ids, one in texts
      ]
    )

  found = gaps(scorer, own)
  places = np.concatenate(
    [np.arange(len(ids) - len(one.ids), len(ids)) for ids, one in texts]
  )
  tried = {
    text: float(gaps(dataclasses.replace(scorer, params=params), own).mean())
    for text, params in others.items()
  }
  if own != 1:
    tried[
      'Its log-probabilities are those before the temperature, or it draws '
      'without it; start vLLM with --logprobs-mode=processed_logprobs, and '
      'SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB.'
    ] = float(gaps(scorer, 1.0).mean())
  return Report(float(found.mean()), len(found), cause(found, places, tried))


def cause(
  found: np.ndarray, places: np.ndarray, tried: Mapping[str, float]
) -> str:
  """What explains the gaps, if the policies are not the same.

  Args:
    found: f32[n], of each token.
    places: i64[n], its place behind the first token of the prompt.
    tried: The mean gap to each of some other policies.

  >>> cause(np.full(4, 1.0), np.arange(4), {'It has no adapter.': 0.01})
  'It has no adapter.'
  """
  own = float(found.mean())
  best = min(tried, key=tried.__getitem__, default='')
  if best and tried[best] < own / _GROWS:
    return best
  early, late = np.quantile(places, (0.25, 0.75))
  first, last = found[places <= early].mean(), found[places >= late].mean()
  if last > _GROWS * max(first, 1e-6):
    return (
      'The gap grows with the place of a token: it may turn places by other '
      'angles (rope_theta, rope_scaling), or cut the context.'
    )
  if own < _ROUNDED:
    return (
      'It is about the same everywhere: it may hold weights or caches in fewer '
      'bits (--quantization, --kv-cache-dtype).'
    )
  return (
    'No cause that is known here fits: it may have another model, an older '
    'version, or weights that were read wrongly.'
  )
