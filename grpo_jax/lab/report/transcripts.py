"""Completions of runs, from their Parquet files: some that tell the most."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
import math
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.lab.report import episodes
from grpo_jax.lab.report import page
from grpo_jax.lab.report import words
from grpo_jax.lab.report.read import Group
from grpo_jax.lab.report.read import Run
from grpo_jax.lab.report.types import Completion
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.lab.report.types import Token
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k
from grpo_jax.run.build import about
from grpo_jax.run.build import data as build_data

MOST_TOKENS = 400  # of a completion; what is between head and tail is left out
MOST_OF_EPISODE = 1500  # likewise
MOST_CHARACTERS = 3000  # of a text
_FILES = 3  # groups of runs of which completions are shown
_PROMPTS, _ANSWERS = 3, 4  # of a rollout, and of each: the best and the worst
_CONTEXT = 12  # tokens that are decoded with one, for characters of several
_EFFECTS = 'coefficient', 'log_ratio_after'
_EACH = 3  # pairs to show of each kind

Decode = Callable[[Sequence[int]], str]


class Texts(NamedTuple):
  """What turns ids into text.

  Attributes:
    decode: Without end tokens and other special ones.
    decode_whole: With all of them.
    marks: The ids that were added to the vocabulary.
  """

  decode: Decode
  decode_whole: Decode
  marks: Collection[int]


def before_and_after(groups: Sequence[Group]) -> Section:
  """Greedy answers to the same held-out problems, early and late."""
  parts: list[Part] = []
  for group in groups[:_FILES]:
    run = group.first
    files = parquet.files(run.path / 'evaluations')
    if len(files) > 1:
      right = run.config.evaluation.right_reward if run.config else 1.0
      whose = f' ({run.name})' if _is_one_of_several(groups) else ''
      parts += _compare((files[0], files[-1]), right, whose)
  none = Text(
    'No two evaluations with problems in common were written. A run with '
    'held-out problems (data.heldout) writes its greedy answers to them '
    'unless log.completions_every_steps is 0.'
  )
  parts = [*_written(groups), *parts] if parts else [none]
  return Section(
    'The same problems, before and after', [*_chosen(groups), *parts]
  )


def completions(groups: Sequence[Group]) -> Section:
  """Sampled completions, with what the updates did to each token."""
  parts: list[Part] = []
  for group in groups[:_FILES]:
    run = group.first
    files = parquet.files(run.path / 'completions')
    texts = _texts(run)
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
      if shown := _most_different(file, texts):
        whose = f' of {run.name}' if _is_one_of_several(groups) else ''
        parts.append(Text(f'Rollout {_step(file):,}{whose}', 'heading'))
        parts += shown
  unmeasured = Text(
    'What the updates did to each token was not measured; a run with '
    '--config.log.token_effects=True does.'
  )
  if not parts:
    none = Text(
      'None were written, or none can be read: log.completions_every_steps '
      'says how often.'
    )
    return Section('Completions', [*_chosen(groups), none])
  said = [] if any(map(page.are_known, parts)) else [unmeasured]
  return Section(
    'Completions', [*said, *_chosen(groups), *_written(groups), *parts]
  )


def _is_one_of_several(groups: Sequence[Group]) -> bool:
  return len(groups) > 1 or len(groups[0].runs) > 1


def _chosen(groups: Sequence[Group]) -> list[Part]:
  """Of which groups and runs completions are shown, if not of all."""
  said = []
  if len(groups) > _FILES:
    said.append(
      f'Only the first {_FILES} of {len(groups)} groups are read here.'
    )
  firsts = [g.first.name for g in groups[:_FILES] if len(g.runs) > 1]
  if firsts:
    said.append(
      'Of runs that differ in nothing but their seeds one is read here: '
      f'{", ".join(firsts)}.'
    )
  return [Text(' '.join(said), 'note')] if said else []


def _written(groups: Sequence[Group]) -> list[Part]:
  """What a reader of completions must know of the data."""
  configs = [run.config for group in groups for run in group.runs]
  notes = {about.note(config) for config in configs if config} - {''}
  return [Text(f'In the data {note}.', 'note') for note in sorted(notes)]


def _texts(run: Run) -> Texts | None:
  """What turns ids into text; None if the tokenizer cannot be had here."""
  try:
    found = run.config and build_data.tokenizer_of(run.config)
  # The files may be gone, or the tokenizer was given in Python.
  except (ValueError, OSError, ImportError):
    return None
  if found is None:
    return None
  marks = found.backend.get_added_tokens_decoder()
  return Texts(found.decode, found.decode_whole, marks)


def _step(file: pathlib.Path) -> int:
  return int(file.stem.rpartition('_')[2])


class Answer(NamedTuple):
  """A row of a file: one completion."""

  index: int  # of the prompt
  prompt: str
  answer: str | None
  completion: str
  reward: float  # NaN if it was not judged
  first: float  # the first reward function's; NaN likewise
  ids: Sequence[int]
  prompt_ids: Sequence[int]
  course: episodes.Course | None  # of an episode that was played
  coefficient: Sequence[float]  # empty if it was not measured
  log_ratio: Sequence[float]


def _answers(file: pathlib.Path) -> list[Answer]:
  """The completions of a file; none if it cannot be read.

  Args:
    file: As `rollouts.parquet` writes it.
  """
  try:
    rollout = parquet.read(file)
    effects = _effects(file)
  except (ValueError, OSError):
    return []
  first, counts = pass_at_k.first_rewards(rollout)
  batch, found = rollout.batch, []
  tokens, valid = np.asarray(batch.tokens), np.asarray(batch.valid)
  reward, group = np.asarray(batch.reward), valid.shape[1]
  for p, prompt in enumerate(rollout.prompt_texts):
    for g in range(group):
      found.append(
        Answer(
          int(rollout.index[p]),
          prompt,
          rollout.answers[p] if rollout.answers else None,
          rollout.texts[p][g],
          float(reward[p, g]) if valid[p, g] else math.nan,
          float(first[p, g]) if counts[p, g] else math.nan,
          tokens[p, g, : rollout.length[p, g]].tolist(),
          rollout.prompts[p],
          _course(rollout, p, g),
          *(values[p * group + g] for values in effects),
        )
      )
  return found


def _course(rollout: Any, p: int, g: int) -> episodes.Course | None:
  """What became of an episode; None if it was not played."""
  if not rollout.accounts:
    return None
  account, length = rollout.accounts[p][g], rollout.length[p, g]
  turn = rollout.batch.extras.get('turn')
  previous = rollout.previous
  return episodes.Course(
    account.messages,
    account.turn_rewards,
    account.ended,
    account.failure,
    np.asarray(rollout.batch.mask)[p, g, :length].tolist(),
    [0] * length if turn is None else turn[p, g, :length].tolist(),
    None if previous is None else previous[p, g, :length].tolist(),
  )


def _effects(file: pathlib.Path) -> list[Sequence[Sequence[float]]]:
  """`coefficient` and `log_ratio_after` of every row, [] where unknown."""
  from pyarrow import parquet as pq

  with pq.ParquetFile(file) as opened:
    names = [x for x in _EFFECTS if x in opened.schema_arrow.names]
    table = opened.read(names)
    nothing = [()] * opened.metadata.num_rows
  return [
    table[name].to_pylist() if name in names else nothing for name in _EFFECTS
  ]


def _most_different(
  file: pathlib.Path, texts: Texts | None
) -> list[Completions]:
  """The groups of a rollout whose rewards differ most, some of each.

  Args:
    file: The file of the rollout.
    texts: Turns ids into text; None if the tokenizer cannot be had. Tokens are
      then shown as numbers, and episodes as messages.
  """
  groups: dict[int, list[Answer]] = {}
  for one in _answers(file):
    groups.setdefault(one.index, []).append(one)

  def spread(group):
    rewards = [one.reward for one in group if math.isfinite(one.reward)]
    return float(np.std(rewards)) if rewards else -1.0

  shown = []
  for group in sorted(groups.values(), key=spread, reverse=True)[:_PROMPTS]:
    best = sorted(group, key=lambda one: -np.nan_to_num(one.reward, nan=-9e9))
    if len(best) > _ANSWERS:
      best = best[: _ANSWERS - _ANSWERS // 2] + best[-(_ANSWERS // 2) :]
    few = [_completion(one, '', texts) for one in best]
    read = _read_first(best[0], texts)
    shown.append(Completions(group[0].prompt, group[0].answer, few, read=read))
  return shown


def _compare(
  files: tuple[pathlib.Path, pathlib.Path], right_reward: float, whose: str
) -> list[Part]:
  """What became of the problems that two evaluations share; else nothing.

  Args:
    files: Of the earlier one, and of the later one.
    right_reward: The least first reward of a right answer.
    whose: Which run it was, where there are several.
  """
  before, after = ({one.index: one for one in _answers(f)} for f in files)
  kinds: dict[tuple[bool, ...], list[tuple[Answer, Answer]]] = {}
  for index in sorted(before.keys() & after.keys()):
    pair = before[index], after[index]
    if not any(math.isnan(one.first) for one in pair):
      kind = tuple(one.first >= right_reward for one in pair)
      kinds.setdefault(kind, []).append(pair)
  if not kinds:
    return []
  steps = [_step(file) for file in files]
  total = words.plural(sum(map(len, kinds.values())), 'problem')

  def number(*kind: bool) -> str:
    return f'{len(kinds.get(kind, ())):,}'

  shown = []
  for kind in ((False, True), (True, False), (False, False)):
    for pair in kinds.get(kind, [])[:_EACH]:
      both = [
        _completion(one, f'{_when(step)}: {"right" if right else "wrong"}')
        for one, step, right in zip(pair, steps, kind)
      ]
      shown.append(
        Completions(pair[0].prompt, pair[0].answer, both, beside=True)
      )
  return [
    Table(
      f'Within {words.plural(steps[1] - steps[0], "rollout")}, '
      f'{number(False, True)} of {total} became right and '
      f'{number(True, False)} became wrong{whose}',
      ('', 'then right', 'then wrong'),
      [
        ('first right', number(True, True), number(True, False)),
        ('first wrong', number(False, True), number(False, False)),
      ],
    ),
    Text('The first of each kind, answered greedily:', 'note'),
    *shown,
  ]


def _when(step: int) -> str:
  if not step:
    return 'before the first rollout'
  return f'after {words.plural(step, "rollout")}'


def _read_first(one: Answer, texts: Texts | None) -> list[Token]:
  """What all episodes of a record have read first; nothing of other answers."""
  if one.course is None or texts is None:
    return []
  return _transcript(one, one.course, texts)[0]


def _transcript(
  one: Answer, course: episodes.Course, texts: Texts
) -> tuple[list[Token], list[Token]]:
  """The tokens of an episode's prompt, and those behind it."""
  ids, first = [*one.prompt_ids, *one.ids], len(one.prompt_ids)
  pieces = [
    episodes.Piece(_piece(ids, k, texts.decode_whole), ids[k] in texts.marks)
    for k in range(len(ids))
  ]
  return episodes.from_tokens(course, pieces[:first], pieces[first:])


def _episode(
  one: Answer, course: episodes.Course, label: str, texts: Texts | None
) -> Completion:
  """An episode; its messages if ids cannot be made into text here."""
  noun, measured = 'token', len(one.coefficient) == len(one.ids) > 0
  if texts is None:
    noun, measured = 'message', False
    tokens = episodes.from_messages(course)
  else:
    _, tokens = _transcript(one, course, texts)
  if measured:
    effects = zip(one.coefficient, one.log_ratio, strict=True)
    tokens = [
      token._replace(coefficient=a, log_ratio=r)
      for token, (a, r) in zip(tokens, effects, strict=True)
    ]
  head, tail, note = _ends(tokens, MOST_OF_EPISODE, noun)
  shown = [*head, *tail]
  return Completion(label, '', one.reward, shown, note, course.facts)


def _completion(
  one: Answer, label: str, texts: Texts | None = None
) -> Completion:
  if one.course is not None:
    return _episode(one, one.course, label, texts)
  decode = texts and texts.decode
  if not len(one.coefficient) == len(one.log_ratio) == len(one.ids) > 0:
    head, tail, note = _ends(one.completion, MOST_CHARACTERS, 'character')
    text = f'{head} […] {tail}' if note else head
    return Completion(label, text, one.reward, note=note)
  head, tail, note = _ends(range(len(one.ids)), MOST_TOKENS, 'token')
  tokens = [
    Token(
      _piece(one.ids, k, decode),
      float(one.coefficient[k]),
      float(one.log_ratio[k]),
    )
    for k in (*head, *tail)
  ]
  return Completion(label, one.completion, one.reward, tokens, note)


def _ends(given: Any, most: int, noun: str) -> tuple[Any, Any, str]:
  """Head and tail of a long text or list, and a note on what is left out."""
  if len(given) <= most:
    return given, given[:0], ''
  half, cut = most // 2, words.plural(len(given) - most, noun)
  return given[:half], given[-half:], f'{cut} in the middle left out.'


def _piece(ids: Sequence[int], k: int, decode: Decode | None) -> str:
  """What token k adds to the text, as far as one token adds a text.

  The tokens before it are decoded too: a tokenizer may write a token otherwise
  at the beginning of a text, and a character may need several tokens.
  """
  if decode is None:
    return f'{ids[k]} '
  start = max(0, k - _CONTEXT)
  before, after = decode(ids[start:k]), decode(ids[start : k + 1])
  if after.startswith(before):
    return after[len(before) :]
  # The bytes of the last character are complete only now.
  whole = before.rstrip('\ufffd')
  return after[len(whole) :] if after.startswith(whole) else decode([ids[k]])
