"""`grpo-jax environment`: plays an environment, and tells what it is like."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import statistics
import sys
import textwrap
from typing import Any
from typing import NamedTuple

from grpo_jax import data
from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.config import plain_text
from grpo_jax.environments import random_policy
from grpo_jax.environments import survey as survey_lib
from grpo_jax.environments import tools_as_text
from grpo_jax.environments.survey import Played
from grpo_jax.environments.survey import Survey
from grpo_jax.environments.survey import Ways

_MOST_TEXT = 1000  # characters that are shown of what a model reads first
_MOST_SHORT = 120  # of what differs
_MOST_SEEDS = 5  # that are named
_MOST_ERRORS = 3  # of tools, that are shown


def run(arguments: Arguments) -> None:
  """`grpo-jax environment`.

  Raises:
    OSError: The file of replies is not there.
    ValueError: The environment cannot be made, all its episodes have failed, or
      something else that was given cannot be used.
  """
  asked = _asked(arguments)
  for name, value in (
    ('episodes', arguments.episodes),
    ('max_turns', asked.max_turns),
    ('episode_secs', arguments.episode_secs),
  ):
    if not value > 0:
      least = 'more than 0' if name == 'episode_secs' else '1 or more'
      raise ValueError(f'--{name}={value}; give {least}.')
  tokenizer = asked.tokenizer
  ways = Ways(
    arguments.episodes,
    arguments.seed,
    asked.max_turns,
    arguments.episode_secs,
    _replies(arguments.replies),
    _examples(arguments),
  )
  found = survey_lib.survey(asked.name, asked.kwargs, ways, _Progress())
  if not found.succeeded:
    raise ValueError(_hopeless(found))
  read = reading(found, tokenizer, asked.appends)
  if arguments.json:
    printing.show_json(to_json(found, read))
    return
  printing.show(*parts(found, read, tokenizer, max(printing.columns(), 40)))


class _Asked(NamedTuple):
  """What is played, by the flags or else by the config."""

  name: str
  kwargs: Mapping[str, Any]
  max_turns: int
  tokenizer: data.Tokenizer | None
  appends: bool  # see `Tokenizer.check_continuation`


def _asked(arguments: Arguments) -> _Asked:
  name, kwargs = arguments.name, _mapping(arguments.kwargs, 'kwargs')
  turns = arguments.max_turns
  tokenizer = read_tokenizer(arguments.tokenizer)
  config = arguments.config
  if name is None and (config is None or not config.environment.name):
    given = 'no NAME' if config is None else 'a config without environment.name'
    raise ValueError(
      f'environment was given {given}; give one, as in environment '
      'my_games:Countdown, or the --config of a run that has one.'
    )
  if name is None:
    fields = config.environment
    from grpo_jax.run.build import environment as build_environment

    name = fields.name
    kwargs = {**build_environment.arguments(config), **kwargs}
    if tokenizer is None:
      from grpo_jax.run.build import data as build_data

      tokenizer = build_data.tokenizer_of(config)
  if turns is None:
    turns = 16 if config is None else config.environment.max_turns
  appends = config is None or config.environment.history == 'append'
  return _Asked(name, kwargs, turns, tokenizer, appends)


def _mapping(text: str, flag: str) -> dict[str, Any]:
  try:
    value = json.loads(text)
  except ValueError as error:
    value, said = None, f' ({plain_text.said(error)})'
  else:
    said = ''
  if not isinstance(value, dict):
    raise ValueError(
      f'--{flag}={text} is no JSON object{said}; give one, as in '
      f'--{flag}=\'{{"start": 3}}\'.'
    )
  return value


def _replies(path: str | None) -> tuple[str, ...]:
  if path is None:
    return ()
  with open(path, encoding='utf-8') as file:
    lines = tuple(line for line in file.read().splitlines() if line.strip())
  if not lines:
    raise ValueError(
      f'--replies={path} has no line; write what the policy says, a text on '
      'each line.'
    )
  return lines


def _examples(arguments: Arguments) -> tuple[dict[str, Any], ...]:
  """The records that episodes are about."""
  if arguments.config is None:
    return (_mapping(arguments.example, 'example'),)
  if arguments.example != '{}':
    raise ValueError(
      'environment was given --example and --config, whose records are '
      'examples too; leave out one of them.'
    )
  from grpo_jax.run.build import data as build_data

  sources, _ = build_data.train(arguments.config)
  others = arguments.config.environment.others
  found: list[dict[str, Any]] = []
  for place in range(len(sources[0]) if sources else 0):
    record = dict(sources[0][place])
    # Those that begin another environment say nothing of this one.
    if not (others and record.get('environment')):
      found.append(record)
    if len(found) == arguments.episodes:
      break
  return tuple(found) or ({},)


def read_tokenizer(name: str | None) -> data.Tokenizer | None:
  """The tokenizer that was named, with its chat template if it has one."""
  if not name:
    return None
  found = data.tokenizer_from(name)
  if found.chat_template is None:
    return found
  return found.with_format(data.PromptFormat(chat=True)).with_turn_end()


class _Progress:
  """Says on standard error how many episodes were played, if it takes long."""

  def __init__(self):
    self._beat = printing.Beat()

  def __call__(self, done: int, planned: int) -> None:
    if done < planned and self._beat.is_due():
      printing.say(f'played {done} of {planned} episodes', file=sys.stderr)


def _hopeless(found: Survey) -> str:
  reasons = Counter(one.failure for one in found.alone)
  reason, number = reasons.most_common(1)[0]
  often = '' if len(reasons) == 1 else f', {number} times'
  said = reason.rstrip('.')
  return (
    f'Every episode of {found.name} has failed, {len(found.alone)} of '
    f'{len(found.alone)}{often}: {said}; correct the '
    'environment, or what it is given (--kwargs, --example, --config, '
    '--episode_secs).'
  )


def numbers(found: Survey, tokenizer: data.Tokenizer | None) -> dict[str, list]:
  """All measurements, by what they are of; episodes that failed left out."""
  good = found.succeeded
  turns = [turn for one in good for turn in one.turns]
  said = ['\n'.join(random_policy.texts(turn.messages)) for turn in turns]
  steps = [turn.secs for one in good for turn in one.turns[1:]]
  steps += [one.last_secs for one in good]
  # The first episode waits for its process.
  begun = [one.turns[0].secs for one in good[1:] or good if one.turns]
  values = {
    'ms until an episode has begun': [1000 * secs for secs in begun],
    'ms of a step': [1000 * secs for secs in steps],
    'characters of an observation': [len(text) for text in said],
  }
  if tokenizer is not None:
    counts = [_count(tokenizer, text) for text in said]
    known = [count for count in counts if count is not None]
    values['tokens of an observation'] = known
  values['turns of an episode'] = [one.answered for one in good]
  values['reward of a turn'] = [x for one in good for _, x in one.rewarded]
  totals = [one.total for one in good]
  values['reward of an episode'] = [x for x in totals if x is not None]
  return values


def _count(tokenizer: data.Tokenizer, text: str) -> int | None:
  try:
    return len(tokenizer.encode(text))
  except ValueError:  # a vocabulary of a few characters
    return None


def reading(
  found: Survey, tokenizer: data.Tokenizer | None, appends: bool = True
) -> dict[str, Any]:
  """What the tokenizer and its template make of an environment.

  Returns:
    `numbers`, measurements; `ids`, those of the first messages, and `text`;
    `problem`, why chats cannot go on; None where it is not known.
  """
  first = found.first
  read = {'numbers': numbers(found, tokenizer), 'ids': None, 'problem': None}
  if tokenizer is None or first is None or tokenizer.chat_template is None:
    return read
  read['problem'] = ''
  try:
    messages = [dict(message) for message in first.turns[0].messages]
    tools = found.tools if tokenizer.reads_tools else ()
    if not tools:
      messages = tools_as_text.written(messages, found.tools)
    read['ids'] = tokenizer.begin_chat(messages, tools)
    tokenizer.check_continuation(tools, appends)
  except ValueError as error:
    read['problem'] = plain_text.said(error)
  return read


def _ends(found: Survey) -> list[tuple[str, list[int]]]:
  """How episodes have ended, with the seeds of each."""
  ends: dict[str, list[int]] = {}
  for one in found.alone:
    how = f'failed: {one.failure}' if one.failure else one.limit
    ends.setdefault(how or 'by itself', []).append(one.seed)
  return sorted(ends.items(), key=lambda pair: -len(pair[1]))


def _differences(pairs: Sequence[tuple[Played, Played]]) -> list[Any]:
  found = (survey_lib.difference(*pair) for pair in pairs)
  return [one for one in found if one is not None]


def to_json(found: Survey, read: dict[str, Any]) -> dict[str, Any]:
  """The report for a program to read."""
  return {
    'name': found.name,
    'episodes': len(found.alone),
    'ended': [{'how': how, 'seeds': seeds} for how, seeds in _ends(found)],
    'numbers': {
      name: _summary(values) for name, values in read['numbers'].items()
    },
    'starts': found.starts,
    'repeated': len(found.again),
    'differ_alone': [one._asdict() for one in _differences(found.again)],
    'beside': len(found.beside),
    'differ_beside': [one._asdict() for one in _differences(found.beside)],
    'tool_calls': sum(one.tool_calls for one in found.alone),
    'tool_errors': sum(one.tool_errors for one in found.alone),
    'prompt_ids': read['ids'],
    'template_problem': read['problem'],
    'tools': [dict(tool) for tool in found.tools],
  }


def _summary(values: Sequence[float]) -> dict[str, float] | None:
  if not values:
    return None
  return {
    'least': min(values),
    'median': statistics.median(values),
    'mean': statistics.fmean(values),
    'most': max(values),
  }


def parts(
  found: Survey,
  read: dict[str, Any],
  tokenizer: data.Tokenizer | None,
  columns: int,
) -> list[Any]:
  """The report for a person: texts and tables of rich."""
  from rich import text

  number = len(found.alone)
  title = (
    f'{found.name}, {number} episode{"s" * (number > 1)} of a random policy'
  )
  sections = {
    'How they have ended': [*_ended(found)],
    'Whether it can be repeated': [*_repeated(found)],
    'What the model reads first': [*_first(found, read, tokenizer, columns)],
    'Its tools, as the model reads them': [*_tools(found, columns)],
  }
  # A table ends with an empty line.
  shown: list[Any] = [text.Text(title, style='bold'), _table(read['numbers'])]
  for place, (head, lines) in enumerate(sections.items()):
    if lines:
      shown += [*[''] * bool(place), text.Text(head, style='bold'), *lines]
  return shown


def _table(measured: dict[str, list]) -> Any:
  shown = printing.table(('', 'least', 'median', 'mean', 'most'))
  for name, values in measured.items():
    summary = _summary(values)
    cells = [_number(x) for x in (summary or {}).values()]
    shown.add_row(name, *(cells or ['none', '', '', '']))
  return shown


def _number(value: float) -> str:
  """Three digits, and more of what is large.

  >>> _number(0.12345), _number(12), _number(1234.5)
  ('0.123', '12', '1,234')
  """
  return f'{value:,.0f}' if 1000 <= abs(value) < 1e6 else f'{value:.3g}'


def _ended(found: Survey) -> Iterator[str]:
  for how, seeds in _ends(found):
    how = 'ended by --max_turns' if how == survey_lib.TURNS else how
    named = ', '.join(map(str, seeds[:_MOST_SEEDS]))
    more = ', ...' if len(seeds) > _MOST_SEEDS else ''
    which = (
      ''
      if how == 'by itself'
      else f' (seed{"s" * (len(seeds) > 1)} {named}{more})'
    )
    how = 'ended by themselves' if how == 'by itself' else how
    yield f'{len(seeds)} of {len(found.alone)} {how}{which}'
  if calls := sum(one.tool_calls for one in found.alone):
    errors = sum(one.tool_errors for one in found.alone)
    yield f'{calls} calls of tools, {errors} of which went wrong'
  for line, number in _errors(found):
    yield f'  {number} of them: {line}'


def _errors(found: Survey) -> list[tuple[str, int]]:
  """The lines that a policy most often reads in the place of a result."""
  lines = Counter(
    said[:_MOST_SHORT]
    for one in found.succeeded
    for turn in one.turns
    for message in turn.messages
    if message['role'] == 'tool'
    for said in random_policy.texts([message])
    if said.startswith('Error:')
  )
  return lines.most_common(_MOST_ERRORS)


def _repeated(found: Survey) -> Iterator[str]:
  alone, beside = _differences(found.again), _differences(found.beside)
  late = [one for one in alone if one.turn]
  early = len(alone) - len(late)
  number = len(found.again)
  yield (
    'same seed, same start: '
    + (f'no, {early} of {number} differ' if early else f'yes, {number} times')
  )
  yield (
    'same seed, same episode: '
    + (f'no, {len(alone)} of {number} differ' if alone else 'yes')
  )
  if alone:
    yield from _told(alone[0], 'at first', 'then')
    yield 'Draw all that is random from the seed that reset is given.'
  ways = found.starts
  yield f'different starts of {len(found.succeeded)} seeds: {ways}'
  same = f'yes, {len(found.beside)} at once'
  if alone and beside:
    same = 'not known, as it differs alone too'
  elif beside:
    same = f'no, {len(beside)} of {len(found.beside)} differ'
  yield f'same alone and beside others: {same}'
  if beside and not alone:
    yield from _told(beside[0], 'alone', 'beside others')
    yield (
      'Something is shared: a global variable, a file, or the module random; '
      'or sessions=1 gives each episode a process of its own.'
    )


def _told(one: survey_lib.Difference, first: str, other: str) -> Iterator[str]:
  """Where two plays differ, with the texts around it."""
  yield f'  seed {one.seed}, turn {one.turn + 1}'
  same = len(os.path.commonprefix([one.first, one.other]))
  start = max(0, same - _MOST_SHORT // 2)
  for name, said in ((first, one.first), (other, one.other)):
    shown = repr(said[start : start + _MOST_SHORT])
    before = '...' if start else ''
    behind = '...' if len(said) > start + _MOST_SHORT else ''
    yield f'    {name}: {before}{shown}{behind}'


def _first(
  found: Survey,
  read: dict[str, Any],
  tokenizer: data.Tokenizer | None,
  columns: int,
) -> Iterator[Any]:
  """The first messages; as the template writes them, if there is one."""
  first = found.first
  if first is None:
    yield 'Nothing: it never asked the policy.'
    return
  if tokenizer is not None and read['ids'] is not None:
    yield from _lines(tokenizer.decode_whole(read['ids']), columns)
    yield f'{len(read["ids"])} tokens, by the chat template of the tokenizer'
  else:
    for message in first.turns[0].messages:
      said = '\n'.join(random_policy.texts([message]))
      yield from _lines(f'{message["role"]}: {said}', columns)
  if tokenizer is None:
    yield '--tokenizer=FOLDER shows what a chat template makes of it.'
  elif tokenizer.chat_template is None:
    yield 'The tokenizer has no chat template, which several turns need.'
  elif read['problem']:
    yield f'The template cannot be used: {read["problem"]}'
  else:
    yield 'The template can go on behind a turn.'


def _lines(text: str, columns: int) -> Iterator[str]:
  more = len(text) - _MOST_TEXT
  for line in text[:_MOST_TEXT].splitlines():
    yield from (
      f'  | {part}' for part in textwrap.wrap(line, columns - 5) or ['']
    )
  if more > 0:
    yield f'  ... {more:,} more characters ...'


def _tools(found: Survey, columns: int) -> Iterator[str]:
  for tool in found.tools:
    yield from _lines(json.dumps(tool), columns)
