"""Writes chat.json: prompts as token ids, by `transformers`.

  python -m tests.golden.chat

needs transformers (5.23 was used) and tokenizers. Each case of the file is a
chat template of `tests.chat_templates`, messages, and variables for the
template, with the ids of `apply_chat_template(add_generation_prompt=True)`. The
merges of the tokenizer are in the file too, so that its ids do not depend on
how a version of tokenizers trains.
"""

from collections.abc import Iterator
import json
import pathlib
import tempfile
from typing import Any

from tests import chat_templates
from tests import hf_folder

FILE = pathlib.Path(__file__).with_suffix('.json')
SPECIAL_OF = {  # (bos, eos) of each template
  'smollm2': ('<|im_start|>', '<|im_end|>'),
  'qwen2': ('', '<|im_end|>'),
  'qwen3': ('', '<|im_end|>'),
  'llama3': ('<|begin_of_text|>', '<|eot_id|>'),
  'gemma2': ('<bos>', '<eos>'),
  'gemma3': ('<bos>', '<eos>'),
  'gemma4': ('<bos>', '<eos>'),
  'mistral': ('<s>', '</s>'),
}
_ASK = {'role': 'user', 'content': ' How much is 12+47? <b>&é\n'}
_ANSWER = {
  'role': 'assistant',
  'content': '<think>\n1\n</think>\n\n59 <|eot_id|>',
}
_SYSTEM = {'role': 'system', 'content': 'Be brief.'}
_CHATS = (
  [_ASK],
  [_SYSTEM, _ASK],
  [_ASK, _ANSWER, {'role': 'user', 'content': 'Why? 3  4\n\n5'}],
  [_SYSTEM, _ASK, _ANSWER, {**_ASK, 'name': 'é', 'tool_calls': None}],
)
_KWARGS: dict[str, list[dict[str, Any]]] = {
  'qwen2': [{'tools': [{'name': 'add', 'about': "<é> & 'x'"}]}],
  'qwen3': [{'enable_thinking': False}, {'enable_thinking': True}],
  'gemma4': [{'enable_thinking': True}],
  'llama3': [{'date_string': '22 Nov 2026'}],
}


def cases() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
  """Templates by name, messages, and variables."""
  for name in chat_templates.ALL:
    for messages in _CHATS:
      if name == 'gemma2' and messages[0]['role'] == 'system':
        continue  # it refuses them
      # Without a date the template of Llama 3 writes today's.
      plain = [] if name == 'llama3' else [{}]
      for kwargs in (*plain, *_KWARGS.get(name, [])):
        yield name, messages, kwargs


def write_folder(folder: str | pathlib.Path, name: str, merges=None) -> None:
  """The folder of a model with one of the templates."""
  bos, eos = SPECIAL_OF[name]
  hf_folder.write_tokenizer(
    folder, chat_templates.ALL[name], eos=(eos,), bos=bos, merges=merges
  )


def by_transformers(folder: str | pathlib.Path, messages, kwargs) -> list[int]:
  """The ids of a prompt."""
  import transformers

  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
  return tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False, **kwargs
  )


def main() -> None:
  """Writes the file."""
  trained = json.loads(hf_folder.backend().to_str())['model']['merges']
  found = []
  with tempfile.TemporaryDirectory() as folder:
    for name, messages, kwargs in cases():
      write_folder(folder, name, trained)
      ids = by_transformers(folder, messages, kwargs)
      found.append(
        {'template': name, 'messages': messages, 'kwargs': kwargs, 'ids': ids}
      )
  lines = ',\n'.join(json.dumps(case) for case in found)
  FILE.write_text(
    f'{{"merges": {json.dumps(trained)},\n"cases": [\n{lines}\n]}}\n'
  )


if __name__ == '__main__':
  main()
