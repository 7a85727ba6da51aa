"""An episode as a tree, and what each of its turns is credited with.

python tests/pictures/episode_tree.py

plays three episodes of guessing a number, with an engine that says what it
must, and draws the first of them. It forks: a context of its own asks about the
first turn. The numbers are those of `losses.center_to_go_by_group`.
"""

import pathlib
import sys
from typing import Any
from typing import NamedTuple
from xml.sax import saxutils

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from grpo_jax import losses  # noqa: E402
from grpo_jax.episodes.types import Account  # noqa: E402
from grpo_jax.rollouts import turn_fields  # noqa: E402
from tests.episodes import made_episodes as made  # noqa: E402

PICTURE = pathlib.Path(__file__).resolve().parent / 'episode_tree.svg'
INK, READ, SAMPLED, LINE = '#24292f', '#eaeef2', '#b6e3e6', '#57606a'
WIDTH, HEIGHT, GAP = 190, 104, 30  # of a box, and between boxes
SIZE = 15  # of letters


class Box(NamedTuple):
  """A message, at a place of the tree.

  Attributes:
    row: How many messages come before it.
    column: Of its context.
    parent: The box before it; None for the first.
    lines: What is written in it.
    is_sampled: Whether the policy wrote it.
  """

  row: int
  column: int
  parent: int | None
  lines: tuple[str, ...]
  is_sampled: bool


def measured() -> tuple[Account, np.ndarray, np.ndarray, np.ndarray]:
  """What was said; rewards, returns to go and credit of turns, f[n]."""
  rollout = made.played(
    made.saying('2', '3'), made.saying('3'), made.saying('4', '1')
  )
  fields = turn_fields.TurnFields(('turn_reward',), 4, 1.0)
  rollout = turn_fields.with_turns(rollout, fields)
  method = losses.chain(
    losses.center_to_go_by_group(), losses.mean_over_sequences()
  )
  batch, _ = losses.credit(method, rollout.batch, method.init())
  account, is_drawn = rollout.accounts[0][0], np.asarray(batch.mask)[0, 0] > 0
  turn = np.asarray(batch.extras['turn'])[0, 0]
  credit = [
    np.unique(np.asarray(batch.advantage)[0, 0][is_drawn & (turn == n)]).item()
    for n in range(account.turns)
  ]
  # As `losses` counts them: what is left belongs to the last turn.
  counted = np.asarray(batch.extras['turn_reward'])[0, 0, : account.turns]
  counted = counted.astype(float)
  counted[-1] += float(np.asarray(batch.reward)[0, 0]) - counted.sum()
  to_go = np.cumsum(counted[::-1])[::-1]
  return account, np.array(account.turn_rewards), to_go, np.array(credit)


def boxes() -> list[Box]:
  """The messages of the first episode, in the order of the tree."""
  account, rewards, to_go, credit = measured()
  found: list[Box] = []
  last: dict[tuple[int, ...], int] = {}  # the newest box of each context
  turns: dict[tuple[int, ...], list[int]] = {(): []}
  for message in account.messages:
    path = tuple(message.get('context', ()))
    if path not in last and path:  # it begins behind a turn of another
      last[path] = turns[path[:-2]][path[-2] - 1]
      turns[path] = []
    parent, is_sampled = last.get(path), message['by'] == 'policy'
    lines: tuple[str, ...] = (message['content'],)
    if is_sampled:
      n = message['turn']
      lines = (
        f'“{message["content"]}” (turn {n})',
        f'reward {_number(rewards[n])}',
        f'return to go {_number(to_go[n])}',
        f'credit {_number(credit[n])}',
      )
      turns[path].append(len(found))
    row = 0 if parent is None else found[parent].row + 1
    column = sorted({*turns}).index(path)
    last[path] = len(found)
    found.append(Box(row, column, parent, lines, is_sampled))
  return found


def _number(value: float) -> str:
  return f'{value:.3g}'.replace('-', '\N{MINUS SIGN}')


def draw() -> str:
  """The picture, as SVG."""
  found = boxes()
  width = (max(one.column for one in found) + 1) * (WIDTH + GAP) - GAP + 20
  height = (max(one.row for one in found) + 1) * (HEIGHT + GAP) + 50
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    f'font-family="sans-serif" font-size="{SIZE}" fill="{INK}">',
    f'<rect width="{width}" height="{height}" fill="white"/>',
  ]
  parts += [_edge(found, one) for one in found if one.parent is not None]
  parts += [_box(one) for one in found]
  legend = (
    (READ, 'written by the environment: only read'),
    (SAMPLED, 'sampled by the policy: learned from once'),
  )
  for n, (color, text) in enumerate(legend):
    x, y = 10, height - 60 + 28 * n
    parts.append(
      f'<rect x="{x}" y="{y}" width="18" height="18" fill="{color}" '
      f'stroke="{LINE}"/><text x="{x + 26}" y="{y + 14}">{text}</text>'
    )
  return '\n'.join([*parts, '</svg>', ''])


def _place(one: Box) -> tuple[int, int]:
  return 10 + one.column * (WIDTH + GAP), 10 + one.row * (HEIGHT + GAP)


def _edge(found: list[Box], one: Box) -> str:
  """A line from the box before."""
  assert one.parent is not None
  (x, y), (to_x, to_y) = _place(found[one.parent]), _place(one)
  x, to_x, y = x + WIDTH // 2, to_x + WIDTH // 2, y + HEIGHT
  middle = (y + to_y) // 2
  return (
    f'<path d="M{x} {y} V{middle} H{to_x} V{to_y}" fill="none" '
    f'stroke="{LINE}" stroke-width="2"/>'
  )


def _box(one: Box) -> str:
  x, y = _place(one)
  color = SAMPLED if one.is_sampled else READ
  top = y + HEIGHT // 2 + 5 - 12 * (len(lines := _lines(one.lines)) - 1)
  texts = ''.join(
    f'<text x="{x + WIDTH // 2}" y="{top + 24 * n}" text-anchor="middle">'
    f'{saxutils.escape(line)}</text>'
    for n, line in enumerate(lines)
  )
  return (
    f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
    f'fill="{color}" stroke="{LINE}"/>{texts}'
  )


def _lines(texts: tuple[str, ...]) -> list[str]:
  """Texts in lines that fit into a box."""
  found: list[Any] = []
  for text in texts:
    line = ''
    for word in text.split():
      if line and len(line) + len(word) > 22:
        found.append(line)
        line = word
      else:
        line = f'{line} {word}'.strip()
    found.append(line)
  return found


if __name__ == '__main__':
  PICTURE.write_text(draw())
  print(PICTURE)
