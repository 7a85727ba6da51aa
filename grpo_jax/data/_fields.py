"""Where in a record its prompt and its answer stand: names, paths, columns.

A field is the name of a column, or a path into one, with points between:
'reward_model.ground_truth', 'messages.-1.content'. A column may hold dicts,
lists, or either of them as a JSON text. The texts of several fields are one
prompt with a plus between their names: 'instruction+input'.
"""

from collections.abc import Callable
from collections.abc import Mapping
import difflib
import json
from typing import Any

# Names that files of others have, the likeliest first.
_PROMPTS = (
  'prompt problem question messages conversations instruction+input '
  'instruction input query conversation dialogue turns text'
).split()
_ANSWERS = (
  'ground_truth answer solution reference_answer label expected_answer '
  'final_answer target gold output response completion expected'
).split()
_MOST_SHOWN = 40  # columns in a message


def value_of(record: Any, field: str) -> Any:
  """The value of a field, or at a path in one.

  >>> value_of({'reward': {'truth': [72]}}, 'reward.truth.0')
  72
  >>> value_of({'reward': '{"truth": 72}'}, 'reward.truth')
  72

  Args:
    record: What the file holds.
    field: A name, or several with points between. A number is a place in a
      list, from the end if it is negative.

  Returns:
    The value; None if there is none.
  """
  inner = _named(record)
  if field in inner:
    return inner[field]
  names = field.split('.')
  for end in range(len(names) - 1, 0, -1):  # a name may hold points itself
    first, rest = '.'.join(names[:end]), '.'.join(names[end:])
    if first in inner and (found := value_of(inner[first], rest)) is not None:
      return found
  return None


def prompt_of(record: Mapping[str, Any], field: str) -> Any:
  """The value of a field, or the texts of several as one.

  >>> prompt_of({'instruction': 'Add.', 'input': '1+2'}, 'instruction+input')
  'Add.\\n\\n1+2'

  Args:
    record: What the file holds.
    field: As `value_of` takes it, or several with a plus between. Of these,
      texts that are empty are left out, and an empty line stands between the
      others.

  Returns:
    The value; None if there is none, or one of several is there in no form.
  """
  found = value_of(record, field)
  names = field.split('+')
  if found is not None or len(names) == 1:
    return found
  texts = []
  for name in names:
    text = value_of(record, name)
    if text is None and name in record:  # null, where another record has it
      text = ''
    if not isinstance(text, str):
      return None
    texts.append(text)
  return '\n\n'.join(filter(None, texts))


def columns(record: Mapping[str, Any]) -> list[str]:
  """The columns of a record, and the fields of the dicts in them.

  >>> columns({'prompt': 'a', 'reward_model': {'style': 'rule'}})
  ['prompt', 'reward_model', 'reward_model.style']
  """
  found = []
  for name, value in record.items():
    found.append(name)
    if isinstance(value, list | tuple):
      continue
    found += [f'{name}.{inner}' for inner in _named(value)]
  return found


def likely(
  record: Mapping[str, Any],
  field: str,
  is_prompt: bool,
  fits: Callable[[Any], bool],
) -> list[str]:
  """Fields that may be meant, the likeliest first.

  >>> likely({'question': '1+2=', 'id': 7}, 'prompt', True, lambda x: True)
  ['question']

  Args:
    record: What the file holds.
    field: What was named.
    is_prompt: Whether a prompt is looked for, and not an answer.
    fits: Whether a value can be one.
  """
  usual, others = _PROMPTS, _ANSWERS
  if not is_prompt:
    usual, others = others, usual
  last = lambda name: name.rpartition('.')[2]
  ranks = {name: rank for rank, name in enumerate(usual)}
  # 'solution' is like 'question', and nobody wants the answer in the prompt.
  there = [name for name in columns(record) if last(name) not in others]
  near = difflib.get_close_matches(field, there, 3)
  known = [name for name in there if last(name) in ranks]
  known.sort(key=lambda name: ranks[last(name)])
  if is_prompt and {'instruction', 'input'} <= record.keys():
    known.insert(0, 'instruction+input')
  found = [name for name in known + near if name != field]
  return [x for x in dict.fromkeys(found) if fits(prompt_of(record, x))]


def described(record: Mapping[str, Any]) -> str:
  """The columns of a record, for a message."""
  there = columns(record)
  more = len(there) - _MOST_SHOWN
  end = f' and {more} more' if more > 0 else ''
  return ', '.join(map(repr, there[:_MOST_SHOWN])) + end


def _named(value: Any) -> Mapping[str, Any]:
  """What can be named in a value: fields of a dict, places of a list."""
  if isinstance(value, str) and value.lstrip()[:1] in ('{', '['):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      return {}
  if isinstance(value, Mapping):
    return value
  if not isinstance(value, list | tuple):
    return {}
  places = {str(place): one for place, one in enumerate(value)}
  return places | {str(n - len(value)): one for n, one in enumerate(value)}
