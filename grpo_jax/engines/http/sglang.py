"""SGLang: `/generate`, adapters by name, weights from disk with a version."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.dialects import Call
from grpo_jax.engines.http.dialects import Completion
from grpo_jax.engines.http.dialects import Drawn
from grpo_jax.engines.http.dialects import Unusable

_BROKEN = 'NaN happened'  # in the place of an end token


class Sglang:
  """See `Dialect`.

  Args:
    adapters: Whether policies are adapters.
  """

  name = 'sglang'

  def __init__(self, adapters: bool):
    self._adapters = adapters

  def complete(self, asked: Completion) -> Call:
    """See `Dialect`."""
    sampling = asked.sampling
    return Call(
      '/generate',
      {
        'input_ids': [*map(int, asked.ids)],
        'sampling_params': {
          'max_new_tokens': asked.limit,
          # Read by a server with --enable-deterministic-inference alone.
          'sampling_seed': asked.seed,
          'temperature': sampling.temperature,
          **dialects.PLAIN,
          'top_k': -1,
          'stop': [*sampling.stop_strings],
          'stop_token_ids': [*sampling.eos_ids],
          # Without its own end tokens ours would not count either.
          'ignore_eos': not sampling.eos_ids,
          'no_stop_trim': True,
          'skip_special_tokens': False,
        },
        'return_logprob': True,
        **self._adapter(asked.policy),
      },
    )

  def drawn(self, answer: Any, asked: Completion) -> Drawn:
    """See `Dialect`."""
    told = dialects.field(answer, 'meta_info')
    finish = dialects.field(told, 'finish_reason', 'type')
    if finish not in ('stop', 'length'):
      raise dialects.GivenUp(f'a completion that finished by {finish!r:.40}')
    by = told['finish_reason'].get('matched')
    if by == _BROKEN:
      raise Unusable('a completion whose logits are no numbers')
    ids = dialects.field(answer, 'output_ids')
    entries = dialects.field(told, 'output_token_logprobs')
    values, named = _by_id(entries)
    found, logp = dialects.tokens(ids, values, asked)
    if named != ids:
      raise Unusable('log-probabilities of other tokens than it has drawn')
    if self._adapters:  # it draws by the adapter that was named, or refuses
      spans = ((asked.policy, len(found)),)
    elif 'weight_versions' in told:
      spans = dialects.spans(told['weight_versions'], len(found))
    else:  # of all tokens, because it waits for them before it changes
      spans = ((str(dialects.field(told, 'weight_version')), len(found)),)
    finish = dialects.end(found, finish == 'length', by, asked)
    return Drawn(found, logp, finish, spans)

  def score(self, ids: Sequence[int], top: int, policy: str) -> Call:
    """See `Dialect`."""
    return Call(
      '/generate',
      {
        'input_ids': [*map(int, ids)],
        'sampling_params': {'max_new_tokens': 0, 'temperature': 1.0},
        'return_logprob': True,
        'logprob_start_len': 0,
        'top_logprobs_num': top,
        **self._adapter(policy),
      },
    )

  def scored(
    self, answer: Any, ids: Sequence[int], top: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See `Dialect`."""
    told = dialects.field(answer, 'meta_info')
    # By their places: it names the last ids of a vocabulary 0.
    values, _ = _by_id(dialects.field(told, 'input_token_logprobs'))
    if len(values) != len(ids):
      raise Unusable(f'{len(values)} log-probabilities of {len(ids)} tokens')
    number = len(ids) - 1
    top_ids = np.zeros((number, top), np.int32)
    top_logp = np.zeros((number, top), np.float32)
    for n in range(number if top else 0):
      place = dialects.field(told, 'input_top_logprobs', n + 1)
      likely, of_ids = _by_id(place)
      if len(likely) < top or not all(map(dialects.is_id, of_ids)):
        raise Unusable(f'no {top} likeliest tokens, but {of_ids!r:.80}')
      top_ids[n] = of_ids[:top]
      top_logp[n] = dialects.log_probabilities(likely[:top])
    return dialects.log_probabilities(values[1:]), top_ids, top_logp

  def load_adapter(self, policy: str, folder: str) -> Sequence[Call]:
    """See `Dialect`; needs `--enable-lora`."""
    body = {'lora_name': policy, 'lora_path': folder}
    return [Call('/load_lora_adapter', body, 'already loaded', 'success')]

  def unload_adapter(self, policy: str) -> Sequence[Call]:
    """See `Dialect`."""
    body = {'lora_name': policy}
    return [Call('/unload_lora_adapter', body, 'does not exist')]

  def load_weights(self, policy: str, folder: str) -> Sequence[Call]:
    """See `Dialect`."""
    body = {
      'model_path': folder,
      'weight_version': policy,
      'flush_cache': True,
      'abort_all_requests': False,
    }
    return [Call('/update_weights_from_disk', body, wanted='success')]

  def alive(self) -> Call:
    """See `Dialect`."""
    return Call('/health')

  def _adapter(self, policy: str) -> dict[str, str]:
    return {'lora_path': policy} if self._adapters and policy else {}


def _by_id(entries: Any) -> tuple[list[Any], list[Any]]:
  """The log-probabilities and ids of entries [logp, id, text].

  Raises:
    Unusable: They are none.
  """
  if not isinstance(entries, list):
    raise Unusable('an answer without log-probabilities')
  return (
    [dialects.field(one, 0) for one in entries],
    [dialects.field(one, 1) for one in entries],
  )
