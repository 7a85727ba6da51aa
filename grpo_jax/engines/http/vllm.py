"""vLLM: `/v1/completions`, adapters by name, weights by a worker's method."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.dialects import Call
from grpo_jax.engines.http.dialects import Completion
from grpo_jax.engines.http.dialects import Drawn
from grpo_jax.engines.http.dialects import Unusable

_TOKEN = 'token_id:'  # what `return_tokens_as_token_ids` puts before an id


class Vllm:
  """See `Dialect`.

  Args:
    model: The name by which the server has the model (`--served-model-name`).
    adapters: Whether policies are adapters, each a model of its own name.
  """

  name = 'vllm'

  def __init__(self, model: str, adapters: bool):
    self._model, self._adapters = model, adapters

  def complete(self, asked: Completion) -> Call:
    """See `Dialect`."""
    sampling = asked.sampling
    return Call(
      '/v1/completions',
      {
        'model': self._named(asked.policy),
        'prompt': [*map(int, asked.ids)],
        'max_tokens': asked.limit,
        'seed': asked.seed,
        'temperature': sampling.temperature,
        **dialects.PLAIN,
        'top_k': 0,
        'logprobs': 0,
        'stop': [*sampling.stop_strings],
        'include_stop_str_in_output': True,
        'stop_token_ids': [*sampling.eos_ids],
        # Its own end tokens may be others than ours.
        'ignore_eos': True,
        'add_special_tokens': False,
        'skip_special_tokens': False,
        'return_token_ids': True,
        'return_tokens_as_token_ids': True,
        'return_weight_versions': not self._adapters,
      },
    )

  def drawn(self, answer: Any, asked: Completion) -> Drawn:
    """See `Dialect`."""
    choice = dialects.field(answer, 'choices', 0)
    finish = dialects.field(choice, 'finish_reason')
    if finish not in ('stop', 'length'):
      raise dialects.GivenUp(f'a completion that finished by {finish!r:.40}')
    ids = dialects.field(choice, 'token_ids')
    named = dialects.field(choice, 'logprobs', 'tokens')
    values = dialects.field(choice, 'logprobs', 'token_logprobs')
    found, logp = dialects.tokens(ids, values, asked)
    if named != [f'{_TOKEN}{one}' for one in ids]:
      raise Unusable('log-probabilities of other tokens than it has drawn')
    if self._adapters:
      spans = ((str(dialects.field(answer, 'model')), len(found)),)
    else:
      spans = dialects.spans(choice.get('weight_versions'), len(found))
    by = choice.get('stop_reason')
    finish = dialects.end(found, finish == 'length', by, asked)
    return Drawn(found, logp, finish, spans)

  def score(self, ids: Sequence[int], top: int, policy: str) -> Call:
    """See `Dialect`; one token is drawn, because vLLM draws one at least."""
    return Call(
      '/v1/completions',
      {
        'model': self._named(policy),
        'prompt': [*map(int, ids)],
        'max_tokens': 1,
        'temperature': 1.0,
        'add_special_tokens': False,
        'prompt_logprobs': top,
        'return_token_ids': True,
      },
    )

  def scored(
    self, answer: Any, ids: Sequence[int], top: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See `Dialect`."""
    places = dialects.field(answer, 'choices', 0, 'prompt_logprobs')
    if not isinstance(places, list) or len(places) != len(ids):
      raise Unusable('an answer without prompt_logprobs of every token')
    logp, top_ids, top_logp = [], [], []
    for token, place in zip(ids[1:], places[1:], strict=True):
      logp.append(dialects.field(place, str(int(token)), 'logprob'))
      values = dialects.log_probabilities(
        [dialects.field(one, 'logprob') for one in place.values()]
      )
      named = [int(one) if one.isdecimal() else -1 for one in place]
      if len(named) < top or not all(map(dialects.is_id, named)):
        raise Unusable(f'no {top} likeliest tokens, but {[*place]!r:.80}')
      likely = sorted(zip(-values, named, strict=True))[:top]
      top_ids.append([name for _, name in likely])
      top_logp.append([-value for value, _ in likely])
    shape = len(ids) - 1, top
    return (
      dialects.log_probabilities(logp),
      np.array(top_ids, np.int32).reshape(shape),
      np.array(top_logp, np.float32).reshape(shape),
    )

  def load_adapter(self, policy: str, folder: str) -> Sequence[Call]:
    """See `Dialect`; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."""
    body = {'lora_name': policy, 'lora_path': folder}
    return [
      Call(
        '/v1/load_lora_adapter',
        body,
        fine='already been loaded',
        needs='--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True',
      )
    ]

  def unload_adapter(self, policy: str) -> Sequence[Call]:
    """See `Dialect`."""
    body = {'lora_name': policy}
    return [Call('/v1/unload_lora_adapter', body, fine='cannot be found')]

  def load_weights(self, policy: str, folder: str) -> Sequence[Call]:
    """See `Dialect`; needs VLLM_SERVER_DEV_MODE=1.

    If a step fails the server stays paused: it must not draw by weights that
    are half of one version.
    """
    method = {'method': 'reload_weights', 'kwargs': {'weights_path': folder}}
    return [
      Call('/pause?mode=wait', {}, needs='VLLM_SERVER_DEV_MODE=1'),
      Call('/collective_rpc', method),
      Call('/reset_prefix_cache', {}, wanted='success'),
      Call('/update_weight_version', {'new_version': policy}, wanted='success'),
      Call('/resume', {}),
    ]

  def alive(self) -> Call:
    """See `Dialect`."""
    return Call('/health')

  def _named(self, policy: str) -> str:
    return policy if self._adapters and policy else self._model
