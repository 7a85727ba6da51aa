"""The episodes that `agents.py` times; plain Python, because peers read it.

A token is one character, so that texts and ids are the same everywhere, and a
text that was drawn is read again as the ids that were drawn.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import importlib.metadata
import itertools
import json
import random
import resource

_FIRST = 0x4E00  # the character of id 0; no two of these form a third
PAD, END, USER, ASSISTANT, TOOL = range(5)
_WORDS = 8  # the ids from here on are what prompts and answers consist of


def text(ids) -> str:
  """The characters of ids."""
  return ''.join(chr(_FIRST + int(k)) for k in ids)


def ids(text: str) -> list[int]:
  """The ids of characters."""
  return [ord(one) - _FIRST for one in text]


MARKS = {'user': text([USER]), 'assistant': text([ASSISTANT])}
MARKS['tool'] = text([TOOL])
# Each message has a mark and an end; calls are written, because TRL wants them.
CHAT_TEMPLATE = (
  '{% for m in messages %}{{ '
  + json.dumps(MARKS, ensure_ascii=False)
  + "[m.role] + (m.content or '') }}{% for c in m.tool_calls or [] %}"
  '{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ "'
  + text([END])
  + '" }}{% endfor %}{% if add_generation_prompt %}{{ "'
  + MARKS['assistant']
  + '" }}{% endif %}'
)


def chat_text(messages, add_generation_prompt: bool) -> str:
  """What `CHAT_TEMPLATE` writes, for messages without calls."""
  said = [
    f'{MARKS[one["role"]]}{one["content"]}{text([END])}' for one in messages
  ]
  return ''.join(said) + MARKS['assistant'] * add_generation_prompt


@dataclasses.dataclass(frozen=True)
class Work:
  """What is played; every turn draws exactly `turn_tokens`.

  Attributes:
    episodes: Of a rollout, a multiple of `group`.
    group: Episodes that begin with the same prompt.
    rows: Episodes that the model of grpo_jax draws for at a time.
    turns: Of an episode.
    prompt_tokens: Of the first message, without its marks.
    turn_tokens: That the model draws in a turn.
    answer_tokens: That an environment says between two turns.
    layers: Of the model.
    width: Of the model; heads have a size of 32.
    vocab: Token ids of the model.
  """

  episodes: int = 48
  group: int = 4
  rows: int = 16
  turns: int = 5
  prompt_tokens: int = 64
  turn_tokens: int = 32
  answer_tokens: int = 24
  layers: int = 4
  width: int = 256
  vocab: int = 2048

  def __post_init__(self):
    for name in 'episodes', 'rows':
      if getattr(self, name) % self.group:
        raise ValueError(
          f'{name}={getattr(self, name)} is no multiple of group={self.group}.'
        )

  @property
  def tokens(self) -> int:
    """That a rollout draws."""
    return self.episodes * self.turns * self.turn_tokens

  @property
  def contexts(self) -> list[int]:
    """Tokens that stand before each turn of an episode, marks included."""
    between = self.turn_tokens + self.answer_tokens + 4  # two ends, two marks
    return [self.prompt_tokens + 3 + k * between for k in range(self.turns)]

  @property
  def context_tokens(self) -> int:
    """Of a whole episode."""
    return self.contexts[-1] + self.turn_tokens

  def prompts(self) -> list[str]:
    """The first message of each group."""
    number = self.episodes // self.group
    return [
      self._said(f'prompt {k}', self.prompt_tokens) for k in range(number)
    ]

  def answer(self, episode: int, turn: int) -> str:
    """What an environment says before a turn."""
    return self._said(f'{episode}, {turn}', self.answer_tokens)

  def _said(self, seed: str, number: int) -> str:
    return text(
      random.Random(seed).choices(range(_WORDS, self.vocab), k=number)
    )


class Episodes:
  """Numbers episodes as they begin, and says how long each one sleeps.

  Args:
    work: What is played.
    secs: That an environment sleeps before each turn but the first, a mean.
  """

  def __init__(self, work: Work, secs: float):
    self._work, self._secs = work, secs
    self._numbers = itertools.count()

  def begin(self) -> Iterator[tuple[float, str]]:
    """Before each turn but the first: seconds to sleep, and what is said."""
    number = next(self._numbers)
    said = [self._work.answer(number, k) for k in range(1, self._work.turns)]
    return zip(sleeps(self._work, number, self._secs), said, strict=True)


def sleeps(work: Work, episode: int, secs: float) -> list[float]:
  """Seconds that an environment sleeps, exponentially distributed."""
  rng = random.Random(f'sleeps of {episode}')
  return [secs * rng.expovariate(1) for _ in range(work.turns - 1)]


def add_fields(parser: argparse.ArgumentParser) -> None:
  """An argument for each field of `Work`."""
  for field in dataclasses.fields(Work):
    parser.add_argument(f'--{field.name}', type=int, default=field.default)


def of_arguments(args: argparse.Namespace) -> Work:
  """The work that a command line asks for."""
  names = [field.name for field in dataclasses.fields(Work)]
  return Work(**{name: getattr(args, name) for name in names})


def worker_arguments(description: str | None, given=None):
  """What a process that plays is told.

  Beside the work: `secs`, the mean of what environments sleep; and `at_once`,
  how many episodes a peer plays at a time.
  """
  parser = argparse.ArgumentParser(description=description)
  add_fields(parser)
  parser.add_argument('--secs', type=float, default=0.0)
  parser.add_argument('--at_once', type=int)
  return parser.parse_args(given)


def answer(
  framework: str,
  packages: tuple[str, ...],
  work: Work,
  secs: float,
  drawn: list[int],
  **more,
) -> str:
  """What a process says that has played a rollout.

  Args:
    framework: Its name.
    packages: Whose versions are told.
    work: What was played.
    secs: Of the rollout.
    drawn: How many tokens each episode has drawn.
    **more: Is told too.

  Returns:
    One line of JSON.

  Raises:
    ValueError: An episode is not whole, so that times cannot be compared.
  """
  if drawn != [work.turns * work.turn_tokens] * work.episodes:
    raise ValueError(
      f'{framework} has drawn {drawn} tokens; each of {work.episodes} episodes '
      f'must draw {work.turns * work.turn_tokens}.'
    )
  told = {
    'framework': framework,
    'versions': {name: importlib.metadata.version(name) for name in packages},
    'secs': secs,
    'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
  }
  return json.dumps(told | more)
