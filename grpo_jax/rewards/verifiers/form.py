"""Completions of a form: a length, tags, a regular expression or a schema."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import re

# The only way to see what an expression repeats.
from re import _parser as syntax  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any
import unicodedata

from grpo_jax.config import plain_text
from grpo_jax.rewards import _base
from grpo_jax.rewards.verifiers import _shared


# A few config values, checked for every completion otherwise.
@functools.lru_cache(maxsize=64)
def _check_length(
  limit: int | None = None,
  target: int | None = None,
  margin: int = 0,
  unit: str = 'tokens',
) -> int:
  """The limit or the target of a length, whichever is given."""
  given = limit if target is None else target
  if given is None or (limit is not None and target is not None):
    raise ValueError(
      f'completion_length has limit={limit} and target={target}, but exactly'
      ' one of the two is required; give one.'
    )
  if not (given >= 0 and margin >= 0):  # NaN is neither
    raise ValueError(
      f'completion_length has a length of {given} and margin={margin}, but'
      ' neither may be negative.'
    )
  if unit not in ('tokens', 'characters'):
    raise ValueError(
      f"unit of the reward completion_length is {unit!r}, but 'tokens' or"
      " 'characters' is required."
    )
  return given


@_base.bounded
@_base.checked(_check_length)
def completion_length(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limit: int | None = None,
  target: int | None = None,
  margin: int = 0,
  unit: str = 'tokens',
) -> float:
  r"""1 for a length up to a limit, or at a target, falling to 0 over a margin.

  .. math:: \max(0, 1 - d / \text{margin})

  where d is by how much the length exceeds `limit`, or how far the length is
  from `target` to either side. With a margin of 0 the reward is 1 where d is 0,
  and else 0. The time does not depend on the text.

  >>> example = {'completion_ids': [7] * 15}
  >>> completion_length('', '', example, limit=10, margin=20)
  0.75

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; 'completion_ids' are the sampled
      tokens, end token included.
    limit: the longest completion with the full reward, in `unit`.
    target: the only length with the full reward, in `unit`. Give this or
      `limit`.
    margin: the distance at which the reward reaches 0, in `unit`.
    unit: 'tokens' or 'characters'.

  Returns:
    A number from 0.0 to 1.0.

  Raises:
    ValueError: not exactly one of `limit` and `target` is given, a length is
      negative, the unit is another, or the record has no 'completion_ids' where
      tokens are counted.
  """
  del prompt
  given = _check_length(limit, target, margin, unit)
  if unit == 'tokens' and 'completion_ids' not in example:
    raise ValueError(
      "completion_length requires the field 'completion_ids', but the example"
      f" has the fields {sorted(example)}; give unit='characters', or add it."
    )
  length = len(example['completion_ids'] if unit == 'tokens' else completion)
  distance = length - given
  distance = max(0, distance) if target is None else abs(distance)
  if not margin:
    return float(not distance)
  return max(0.0, 1.0 - distance / margin)


# Letters and signs without a shape: fillers of Hangul, and a blank of Braille.
_EMPTY = '\u115f\u1160\u3164\uffa0\u2800'


def _check_tags(
  tags: Sequence[str] = ('think', 'answer'),
  allow_outside: bool = False,
  first_is_open: bool = False,
) -> None:
  del allow_outside, first_is_open
  _form(_names(tags))


@_base.bounded
@_base.checked(_check_tags)
def format_tags(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  tags: Sequence[str] = ('think', 'answer'),
  allow_outside: bool = False,
  first_is_open: bool = False,
) -> float:
  """1 if the completion consists of the tagged parts, in order, else 0.

  Every tag is opened once and closed once, in the order given, one part behind
  the other. No part is blank, nor made of characters that nobody sees. Between
  the parts, before the first and behind the last stands nothing but white
  space. Tags of other names count as text. A completion of more than 100,000
  characters has reward 0.

  >>> format_tags('', '<think>1+1</think> <answer>2</answer>', {})
  1.0
  >>> format_tags('', 'Well, <think>1+1</think><answer>2</answer>', {})
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: is not used.
    tags: the names of the tags, without angle brackets, all different.
    allow_outside: whether text may stand outside the parts.
    first_is_open: whether the prompt ends with the first opening tag, as some
      chat templates and `config.data.completion_prefix` have it. The completion
      must then not repeat it.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: there are no tags, two are the same, or one is no name.
  """
  del prompt, example
  wanted, tag = _form(_names(tags))
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  if first_is_open:
    completion = wanted[0] + completion
  pieces = tag.split(completion)
  if pieces[1::2] != wanted:
    return 0.0
  # Texts and tags alternate, and so do texts outside and inside the parts.
  texts = [text.strip() for text in pieces[::2]]
  outside, inside = texts[::2], texts[1::2]
  if not all(map(_is_seen, inside)):
    return 0.0
  return float(allow_outside or not any(outside))


def _names(tags: Any) -> str | tuple[Any, ...]:
  """The tags as what a cache can find."""
  return tags if isinstance(tags, str) else tuple(tags)


@functools.lru_cache(maxsize=64)
def _form(tags: str | tuple[Any, ...]) -> tuple[list[str], re.Pattern[str]]:
  """The tags of a completion in order, and what matches any of them."""
  # A string would be taken for its letters.
  names = () if isinstance(tags, str) else tags
  named = all(re.fullmatch(r'[\w-]+', str(name)) for name in names)
  if not names or not named or len({*map(str, names)}) < len(names):
    raise ValueError(
      f'tags of the reward format_tags are {tags!r:.80}, but a list of one or'
      " more different names is required, as in ('think', 'answer')."
    )
  wanted = [tag for name in names for tag in (f'<{name}>', f'</{name}>')]
  either = '|'.join(re.escape(str(name)) for name in names)
  return wanted, re.compile(f'(</?(?:{either})>)')


def _is_seen(text: str) -> bool:
  """Whether a text has a letter, a digit or a sign, unlike U+200B.

  >>> _is_seen('x'), _is_seen(' \\u200b\\x00')
  (True, False)
  """
  return any(
    unicodedata.category(character)[0] in 'LNPS' and character not in _EMPTY
    for character in text
  )


_MOST_REPEATS = 4  # 2 to this power is still few ways


def _check_regex(regex: str, full: bool = False, flags: str = '') -> None:
  del full
  _compile(regex, flags)


@_base.checked(_check_regex)
def regular_expression(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  regex: str,
  full: bool = False,
  flags: str = '',
) -> float:
  r"""1 if a regular expression matches the completion, else 0.

  Python's matcher tries every way to divide a text. If a part that is repeated
  may itself have several lengths, as in (a+)+, (a{1,3})* or (a|bc)*, these ways
  can be exponentially many. So such an expression is refused, unless the inner
  part is possessive or atomic, as in (a++)+, (a{1,3}+)* or (?>a|bc)*. An
  expression with repetitions side by side, such as .*a.*b.*c, still takes a
  time that grows with a power of the length. So does a single one, because a
  match is sought from every place: \d+x takes 20 seconds for 100,000 digits,
  and (?<!\d)\d++x a hundredth of one. The time limit of the reward ends it. A
  completion of more than 100,000 characters has reward 0.

  >>> regular_expression('', 'It is 42.', {}, regex=r'\b\d+\.$')
  1.0
  >>> regular_expression('', 'It is 42.', {}, regex=r'\d+', full=True)
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: is not used.
    regex: the expression, in the syntax of Python's module `re`.
    full: whether it must match the whole completion, and not just a part.
    flags: letters of `re`: 'i' for any case, 'm' for ^ and $ at every line, 's'
      for a point that matches line ends, 'x' for comments, 'a' for ASCII.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: the expression is not valid, or may take exponential time; or
      a flag is unknown.
  """
  del prompt, example
  compiled = _compile(regex, flags)
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  match = compiled.fullmatch if full else compiled.search
  return float(match(completion) is not None)


@functools.lru_cache(maxsize=64)
def _compile(regex: str, flags: str) -> re.Pattern[str]:
  unknown = sorted({*flags} - {*'imsxa'})
  if unknown:
    raise ValueError(
      f'flags of the reward regular_expression are {flags!r}, but'
      f" {', '.join(unknown)} is unknown; give letters of 'imsxa'."
    )
  bits = functools.reduce(
    lambda bits, letter: bits | getattr(re, letter.upper()), flags, 0
  )
  try:
    compiled = re.compile(regex, bits)
    nested = _is_ambiguous(syntax.parse(regex, bits), False)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(
      f'regex of the reward regular_expression is {regex!r:.80}, which is not'
      f' valid: {error}; correct it.'
    ) from error
  if nested:
    raise ValueError(
      f'regex of the reward regular_expression is {regex!r:.80}, which repeats'
      ' a part that may have several lengths; it can take exponential time.'
      ' Make the inner part possessive or atomic, as in (a++)+ or (?>a|bc)*.'
    )
  return compiled


def _is_ambiguous(item: Any, repeated: bool) -> bool:
  """Whether a repeated part of a parsed expression may have several lengths."""
  if isinstance(item, syntax.SubPattern):
    return any(_is_ambiguous(one, repeated) for one in item)
  if not isinstance(item, tuple | list):
    return False
  kind = str(item[0]) if item and isinstance(item, tuple) else ''
  if kind in ('ATOMIC_GROUP', 'POSSESSIVE_REPEAT'):
    # What has matched is not divided anew; what is inside still may be.
    return _is_ambiguous(item[1], False)
  if kind in ('MAX_REPEAT', 'MIN_REPEAT'):
    low, high, body = item[1]
    if repeated and low != high:
      return True
    return _is_ambiguous(body, repeated or int(high) > _MOST_REPEATS)
  if kind == 'BRANCH' and repeated:
    return True
  return any(_is_ambiguous(one, repeated) for one in item)


# The line that opens or closes a block; a closing line has no more than this.
_FENCE = re.compile(r'^```[^`\n]*$', re.MULTILINE)


def _check_schema(schema: Mapping[str, Any] | None = None) -> None:
  # Without one, each example has its own; the package is needed for any.
  _validator(_schema_text({} if schema is None else schema))


@_base.imports(_check_schema)
@_base.checked(_check_schema)
def json_schema(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  schema: Mapping[str, Any] | None = None,
) -> float:
  """1 if the completion is JSON that fits a schema, else 0.

  The completion is one JSON value and nothing else but white space, or it has
  fenced blocks, as Markdown does: then the last block counts. NaN, Infinity and
  two fields of the same name in one object are no JSON here. The field 'format'
  of a schema is not checked, and a '$ref' must lead to a place in the schema. A
  completion of more than 100,000 characters has reward 0. This needs the
  package jsonschema: `pip install 'grpo_jax[json]'`.

  >>> schema = {'type': 'object', 'required': ['name']}
  >>> json_schema('', '{"name": "Ada"}', {}, schema=schema)
  1.0
  >>> json_schema('', '{"age": 36}', {}, schema=schema)
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the schema, as JSON
      or as a dict, if no `schema` is given; or a list of them, of which any.
    schema: the JSON schema of all completions.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: jsonschema is not installed; or there is no schema, or it is not
      valid.
  """
  del prompt
  validators = [_validator(text) for text in _schema_texts(schema, example)]
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  try:
    value = _load_json(_last_block(completion))
  except (ValueError, RecursionError):
    return 0.0
  try:
    return float(any(one.is_valid(value) for one in validators))
  except (RecursionError, OverflowError):  # too deep, or 1e400 among integers
    return 0.0
  except Exception as error:
    # jsonschema checks a '$ref' or a 'pattern' not before it is used.
    raise _invalid(plain_text.named(error)) from error


def _last_block(text: str) -> str:
  """What the last closed block of a text holds; without one, the text."""
  block, start = text, None
  for fence in _FENCE.finditer(text):
    if start is None:
      start = fence.end()
    elif fence.group().rstrip() == '```':
      block, start = text[start : fence.start()], None
  return block


def _schema_texts(schema: Any, example: dict[str, Any]) -> list[str]:
  """The schemas of an example, of which any must fit."""
  if schema is not None:
    return [_schema_text(schema)]
  given = example.get('answer')
  items = given if isinstance(given, list | tuple) and given else [given]
  if any(isinstance(item, Mapping | bool) for item in items):
    return [i if isinstance(i, str) else _schema_text(i) for i in items]
  return [one.text for one in _shared.answers('json_schema', example)]


def _schema_text(schema: Any) -> str:
  """A schema as text, which can be the key of a cache."""
  try:
    return json.dumps(_shared.plain(schema))
  except (TypeError, ValueError, RecursionError) as error:
    raise _invalid(plain_text.named(error)) from error


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> Any:
  try:
    import jsonschema.validators
    import referencing
  except ImportError as error:
    raise ValueError(
      'The reward json_schema requires the package jsonschema, which is not'
      " installed; run pip install 'grpo_jax[json]'."
    ) from error
  try:
    schema = _load_json(text)
    if type(schema) not in (dict, bool):
      raise ValueError('it is no object, and neither true nor false')
    kind = jsonschema.validators.validator_for(
      schema, default=jsonschema.Draft202012Validator
    )
    kind.check_schema(schema)
  except (ValueError, RecursionError, jsonschema.SchemaError) as error:
    raise _invalid(
      getattr(error, 'message', None) or plain_text.said(error)
    ) from error
  # Without a registry of its own jsonschema would fetch a '$ref' from the web.
  return kind(schema, registry=referencing.Registry())


def _invalid(reason: str) -> ValueError:
  return ValueError(
    f'The schema of the reward json_schema is not valid: {reason:.300}; correct'
    ' `schema`, or the answer of the example.'
  )


def _load_json(text: str) -> Any:
  return json.loads(
    text, parse_constant=_refuse_constant, object_pairs_hook=_object
  )


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    raise ValueError('two fields have the same name')
  return fields
