"""The calls by which a learner uses this server as its engine.

They are those of SGLang, and those of vLLM that OpenAI's API lacks: see
`engines.http.sglang` and `engines.http.vllm`, which ask them. Completions by
ids are `/v1/completions` as ever.
"""

from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any

from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import wire
from grpo_jax.serving.answering import Answering
from grpo_jax.serving.app import Client

Do = Callable[[Mapping[str, Any]], Awaitable[Any]]

# Of SGLang's `sampling_params`: those that are called so elsewhere too, and
# others. Whatever is neither is refused, as SGLang does.
_SHARED = (
  'temperature', 'top_p', 'top_k', 'min_p', 'stop', 'stop_token_ids', 'n',
  'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'ignore_eos',
)  # fmt: skip
_OWN = (
  'max_new_tokens', 'sampling_seed', 'no_stop_trim', 'skip_special_tokens',
  'spaces_between_special_tokens',
)  # fmt: skip
_USUAL_TOKENS = 128


class EngineCalls:
  """Answers a learner.

  Args:
    service: Draws.
    read_model: The parameters in the folder of a model.
    read_adapter: The parameters with the adapter in a folder.
  """

  def __init__(
    self,
    service: Answering,
    read_model: Callable[[str], Any],
    read_adapter: Callable[[str], Any],
  ):
    self._service, self._desk = service, service.desk
    self._read_model, self._read_adapter = read_model, read_adapter
    self._folders: dict[str, str] = {}  # of adapters

  def routes(self) -> dict[str, Do]:
    """What is posted where."""
    every = {
      '/generate': self.generate,
      '/update_weights_from_disk': self.update_weights,
      '/load_lora_adapter': self.load_adapter,
      '/unload_lora_adapter': self.unload_adapter,
      '/v1/load_lora_adapter': self.load_adapter,
      '/v1/unload_lora_adapter': self.unload_adapter,
      '/pause': self.pause,
      '/resume': self.resume,
      '/collective_rpc': self.call_workers,
      '/reset_prefix_cache': self.reset_prefix_cache,
      '/update_weight_version': self.name_weights,
    }
    return {
      path: functools.partial(self._unless_closed, do)
      for path, do in every.items()
    }

  async def _unless_closed(self, do: Do, body: Mapping[str, Any]) -> Any:
    """What a call answers; a desk that draws no more takes none."""
    try:
      if self._desk.is_closed:
        raise desk_lib.Closed
      return await do(body)
    except desk_lib.Closed as error:
      raise wire.Refused(503, wire.ENDING) from error

  async def generate(self, body: Mapping[str, Any]) -> Any:
    """SGLang's `/generate`, of one prompt by ids."""
    given = _object(body, 'sampling_params')
    for name in given:
      if name not in _SHARED + _OWN:
        raise wire.Refused(
          400, f'unknown field {name!r:.80} of sampling_params; leave it out.'
        )
    most = _whole(given, 'max_new_tokens', _USUAL_TOKENS)
    top = _whole(body, 'top_logprobs_num', 0)
    policy = _text(body, 'lora_path') if body.get('lora_path') else ''
    if policy and policy not in self._desk.policies():
      raise wire.Refused(
        400, f'Got LoRA adapter that has never been loaded: {policy:.80}'
      )
    scores = body.get('logprob_start_len') == 0
    completion = wire.completion(
      {
        **{name: given[name] for name in _SHARED if name in given},
        'prompt': [_ids(body)],
        'max_tokens': max(1, most),
        'seed': given.get('sampling_seed'),
        'logprobs': 0,
        'return_token_ids': True,
        'model': policy,
        'prompt_logprobs': top if scores else None,
      }
    )
    (answer,) = await self._service.complete(completion, Client(), None)
    return self._sglang(answer, most, top)

  def _sglang(self, answer: wire.Answer, most: int, top: int) -> Any:
    """An answer as SGLang writes it."""
    ids = [*answer.ids][:most]
    kinds = {'stop': {'type': 'stop', 'matched': ids[-1] if ids else None}}
    length = {'type': 'length', 'length': len(ids)}
    told: dict[str, Any] = {
      'id': 'grpo_jax',
      'finish_reason': kinds.get(answer.finish, length) if most else length,
      'prompt_tokens': answer.read,
      'completion_tokens': len(ids),
      'weight_version': answer.version,
      'weight_versions': [
        {'version': answer.version, 'start': 0, 'end': len(ids)}
      ],
      'output_token_logprobs': [
        [x.logp, x.id, None] for x in answer.logprobs or ()
      ],
    }
    if (scored := answer.prompt_logprobs) is not None:
      told['input_token_logprobs'] = [[x.logp, x.id, None] for x in scored]
      if top:
        told['input_top_logprobs'] = [
          [[y.logp, y.id, None] for y in x.top] or None for x in scored
        ]
    text = answer.text if most else ''
    return {'text': text, 'output_ids': ids, 'meta_info': told}

  async def update_weights(self, body: Mapping[str, Any]) -> Any:
    """SGLang's; what is being drawn is drawn to its end by the old ones."""
    version = str(body.get('weight_version') or 'default')
    await self._replace(_text(body, 'model_path'), version)
    return {'success': True, 'message': 'The weights are new.'}

  async def call_workers(self, body: Mapping[str, Any]) -> Any:
    """vLLM's, for the method that reads weights."""
    method = _text(body, 'method')
    if method != 'reload_weights':
      raise wire.Refused(
        400, f'There is no method {method!r:.80}; give reload_weights.'
      )
    folder = _text(_object(body, 'kwargs'), 'weights_path')
    await self._replace(folder, 'default')
    return {'results': [None]}

  async def _replace(self, folder: str, version: str) -> None:
    read = lambda: self._read_model(folder)
    await _read(self._desk.know('', read, version))

  async def name_weights(self, body: Mapping[str, Any]) -> Any:
    """vLLM's name of the version of its weights."""
    version = _text(body, 'new_version')
    self._desk.name_version(version)
    return {'success': True, 'new_version': version}

  async def reset_prefix_cache(self, body: Mapping[str, Any]) -> Any:
    """Nothing that older weights have read outlives them here."""
    del body
    return {'success': True}

  async def load_adapter(self, body: Mapping[str, Any]) -> Any:
    """Makes an adapter known by a name."""
    name, folder = _text(body, 'lora_name'), _text(body, 'lora_path')
    if name in self._desk.policies():
      raise wire.Refused(
        400,
        f"The lora adapter '{name:.80}' has already been loaded, because it is "
        'already loaded; give another name.',
      )
    if name == self._service.name:
      raise wire.Refused(
        400, f'The model itself is called {name:.80}; give another name.'
      )
    await _read(self._desk.know(name, lambda: self._read_adapter(folder)))
    self._folders[name] = folder
    return self._loaded()

  async def unload_adapter(self, body: Mapping[str, Any]) -> Any:
    """Forgets an adapter."""
    name = _text(body, 'lora_name')
    if name not in self._desk.policies():
      raise wire.Refused(
        404,
        f"The lora adapter '{name:.80}' cannot be found; it does not exist.",
      )
    await self._desk.forget(name)
    return self._loaded()

  def _loaded(self) -> Any:
    known = {x: self._folders.get(x, '') for x in self._desk.policies()}
    return {'success': True, 'loaded_adapters': known}

  async def pause(self, body: Mapping[str, Any]) -> Any:
    """New completions are refused until `resume`."""
    del body
    await self._desk.pause()
    return {'status': 'paused'}

  async def resume(self, body: Mapping[str, Any]) -> Any:
    """Completions are drawn again."""
    del body
    self._desk.is_paused = False
    return {'status': 'resumed'}


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  value = body.get(name) or {}
  if not isinstance(value, Mapping):
    raise wire.Refused(400, f'{name} must be an object; it is {value!r:.80}.')
  return value


def _whole(body: Mapping[str, Any], name: str, usual: int) -> int:
  value = usual if body.get(name) is None else body[name]
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise wire.Refused(
      400, f'{name} must be a whole number from 0; it is {value!r:.80}.'
    )
  return value


def _ids(body: Mapping[str, Any]) -> list[int]:
  value = body.get('input_ids')
  if not isinstance(value, list) or not all(
    isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
  ):
    raise wire.Refused(
      400,
      f'input_ids must be a list of ids, of one prompt; it is {value!r:.80}.',
    )
  return value


def _text(body: Mapping[str, Any], name: str) -> str:
  value = body.get(name)
  if not isinstance(value, str) or not value:
    raise wire.Refused(400, f'{name} must be a text; it is {value!r:.80}.')
  return value


async def _read(wanted: Awaitable[None]) -> None:
  """What is read from disk; its errors are told."""
  try:
    await wanted
  except (ValueError, OSError) as error:
    raise wire.Refused(400, str(error)) from error
