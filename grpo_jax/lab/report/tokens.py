"""Completions as HTML: each token in the colours of what updates did to it."""

from collections.abc import Iterable
from collections.abc import Sequence
import math

import numpy as np

from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import Completion
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Token

LEVELS = 5  # shades on each side of 0


def scales(all_shown: Iterable[Completions]) -> tuple[float, float]:
  """What the darkest shade stands for, of coefficients and of log-ratios.

  All completions of a page have the same: the 95th percentile of the sizes.
  """
  tokens = [
    token
    for shown in all_shown
    for completion in shown.completions
    for token in completion.tokens
  ]
  return (
    _scale([token.coefficient for token in tokens]),
    _scale([token.log_ratio for token in tokens]),
  )


def are_known(part: Part) -> bool:
  """Whether a part has completions whose tokens have colours."""
  return isinstance(part, Completions) and any(
    one.tokens for one in part.completions
  )


def _scale(values: Sequence[float]) -> float:
  sizes = np.abs([value for value in values if math.isfinite(value)])
  sizes = sizes[sizes > 0]
  return float(np.percentile(sizes, 95)) if len(sizes) else 1.0


def block(shown: Completions, of_scales: tuple[float, float]) -> str:
  """The completions of one prompt."""
  answer = ''
  if shown.answer is not None:
    answer = f'<p class="answer">answer: {words.escaped(shown.answer)}</p>'
  kind = 'completions beside' if shown.beside else 'completions'
  inner = ''.join(_completion(one, of_scales) for one in shown.completions)
  return (
    f'<article class="{kind}"><p class="prompt">'
    f'{words.escaped(shown.prompt)}</p>{answer}'
    f'<div class="each">{inner}</div></article>'
  )


def key(of_scales: tuple[float, float]) -> str:
  """What the colours mean, and the choice between the two."""
  coefficient, ratio = (words.number(scale) for scale in of_scales)
  shades = ''.join(
    f'<i class="a{k}">&nbsp;</i>' for k in range(-LEVELS, LEVELS + 1)
  )
  return (
    '<div class="key"><fieldset><legend>Colour of a token</legend>'
    '<label><input type="radio" name="shade" value="coefficient" checked> '
    'coefficient: weight times advantage</label>'
    '<label><input type="radio" name="shade" value="ratio"> log-ratio after '
    'the update, nats</label></fieldset>'
    '<p class="notes">∎ is a token without a text, such as the end of a '
    'completion.</p>'
    f'<p class="shades"><span class="by-coefficient">−{coefficient} {shades} '
    f'+{coefficient}</span><span class="by-ratio">−{ratio} {shades} +{ratio}'
    '</span></p></div>'
  )


def _completion(one: Completion, of_scales: tuple[float, float]) -> str:
  label = [one.label] if one.label else []
  judged = math.isfinite(one.reward)
  label.append(f'reward {words.number(one.reward)}' if judged else 'not judged')
  if one.tokens:
    body = ''.join(_token(token, of_scales) for token in one.tokens)
    values = ' '.join(
      f'{token.coefficient:.3g},{token.log_ratio:.3g}' for token in one.tokens
    )
    text = (
      '<pre class="tokens" tabindex="0" role="group" aria-label="Tokens; arrow '
      f'keys read their values" data-values="{values}">{body}</pre>'
    )
  else:
    text = f'<pre>{words.escaped(one.text) or "<em>empty</em>"}</pre>'
  reading = '<span class="reading"></span>' if one.tokens else ''
  note = f'<p class="notes">{words.escaped(one.note)}</p>' if one.note else ''
  return (
    '<div class="completion"><p class="label">'
    f'{words.escaped(", ".join(label))} {reading}</p>{text}{note}</div>'
  )


def _token(token: Token, of_scales: tuple[float, float]) -> str:
  pair = token.coefficient, token.log_ratio
  a, r = (_level(x, scale) for x, scale in zip(pair, of_scales))
  # A token without a text, such as the end of a completion, is to be seen too.
  text = words.escaped(token.text).replace('\n', '↵\n') or '<b>∎</b>'
  return f'<i class="a{a} r{r}">{text}</i>'


def _level(value: float, scale: float) -> int:
  """The shade of a value, from -LEVELS to LEVELS; 0 for exactly 0 alone."""
  if not math.isfinite(value) or value == 0:
    return 0
  size = min(LEVELS, math.ceil(LEVELS * abs(value) / scale))
  return int(math.copysign(max(size, 1), value))
