"""`grpo-jax data FILE`: what a file holds, and which fields read it."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import shlex
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.config import plain_text
from grpo_jax.data import first_look
from grpo_jax.data.first_look import Look
from grpo_jax.data.first_look import Made

_MOST_VALUE = 60  # characters of a value in a column
_MOST_TEXT = 400  # of a message, or of an answer


def run(arguments: Arguments) -> None:
  """Shows the files that were named.

  Raises:
    OSError: A file is not there.
    ValueError: One cannot be read, or there is a config too.
  """
  if arguments.config is not None:
    raise ValueError(
      'data looks at files without a config, and was given both; leave out '
      f'{arguments.file[0]!r}, or --config and its fields.'
    )
  found = [
    first_look.look(
      name, arguments.show, arguments.prompt_field, arguments.answer_field
    )
    for name in arguments.file
  ]
  if arguments.json:
    for one in found:
      printing.show_json(to_json(one))
    return
  for number, one in enumerate(found):
    printing.show(*[''] * bool(number), *parts(one))


def to_json(found: Look) -> dict[str, Any]:
  """What there is to say of a file, for a program to read."""
  shown = {
    'file': found.name,
    'columns': dict(found.columns),
    'settings': dict(found.settings),
    'records': [one._asdict() for one in found.records],
  }
  # Parquet holds bytes and dates too.
  return json.loads(json.dumps(shown, default=str))


def parts(found: Look) -> Iterator[Any]:
  """The same for a person: texts and tables of rich."""
  from rich import text

  title = lambda words: text.Text(words, style='bold')
  yield title(f'Columns of {plain_text.printable(found.name)}')
  shown = printing.table(('column', 'of the first record'), left=2)
  shown.columns[0].overflow = 'fold'
  for name, value in found.columns.items():
    shown.add_row(plain_text.printable(name), _brief(value))
  yield shown
  is_usable = not any(one.problem for one in found.records)
  yield ''
  yield title('What reads it' if is_usable else 'What may read it')
  for name, value in found.settings.items():
    yield f'  --config.{name}={shlex.quote(str(value))}'
  for number, one in enumerate(found.records, start=1):
    yield ''
    yield title(f'What a run makes of record {number}')
    yield from _made(one)


def _made(made: Made) -> Iterator[str]:
  if made.problem:
    yield f'  nothing: {plain_text.printable(made.problem)}'
    return
  if isinstance(made.prompt, str):
    yield f'  prompt: {_brief(made.prompt, _MOST_TEXT)}'
  else:
    for message in made.prompt:
      yield from _message(message)
  answer = '(none)' if made.answer is None else _brief(made.answer, _MOST_TEXT)
  yield f'  answer: {answer}'


def _message(message: Mapping[str, Any]) -> Iterator[str]:
  if 'tools' in message:
    yield f'  tools: {_brief(message["tools"], _MOST_TEXT)}'
  role = plain_text.printable(str(message['role']))
  yield f'  {role}: {_brief(message["content"], _MOST_TEXT)}'
  if 'tool_calls' in message:
    yield f'  {role} calls: {_brief(message["tool_calls"], _MOST_TEXT)}'


def _brief(value: Any, most: int = _MOST_VALUE) -> str:
  """The beginning of a value, as Python writes it."""
  text = plain_text.printable(repr(value))
  return text if len(text) <= most else f'{text[:most]}...'
