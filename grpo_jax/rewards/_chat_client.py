"""Asks a chat model over HTTP.

The server speaks the chat completions of OpenAI's API, as vLLM, SGLang and
llama.cpp do: https://platform.openai.com/docs/api-reference/chat.
"""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any
from typing import NamedTuple

from grpo_jax.config import http_client
from grpo_jax.config.http_client import NotAnswered


class Answer(NamedTuple):
  """What the model has written.

  Attributes:
    text: Its message.
    cut: Whether the message ended at the limit of tokens.
  """

  text: str
  cut: bool


@dataclasses.dataclass(frozen=True)
class ChatClient:
  """Asks one server.

  Args:
    url: The base, such as 'http://127.0.0.1:8000/v1'.
    client: Asks it.
  """

  url: str
  client: http_client.Client

  async def ask(self, opened: Any, body: Mapping[str, Any]) -> Answer:
    """The answer to a request.

    Args:
      opened: What `client.opened` gave.
      body: The request, without its key.

    Raises:
      NotAnswered: There is none, for the reason in the message.
      ValueError: The server refuses the key, or knows no such model.
    """
    url = self.url.rstrip('/') + '/chat/completions'
    try:
      return _parse(await self.client.ask(opened, url, body))
    except NotAnswered as error:
      if error.status not in (401, 404):
        raise
      raise ValueError(
        f'{url} answers {self.client.who} with {error}; correct url, model or '
        f'the key in the environment variable {self.client.api_key_env!r}.'
      ) from error


def _parse(received: bytes) -> Answer:
  """The message in the answer of a server."""
  try:
    choice = json.loads(received)['choices'][0]
    text, finish = choice['message']['content'], choice.get('finish_reason')
  except (
    ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError
  ):  # fmt: skip
    raise NotAnswered('an answer that is no chat completion') from None
  if not isinstance(text, str) or not text.strip():
    raise NotAnswered('an empty message')
  return Answer(text, finish == 'length')
