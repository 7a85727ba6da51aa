"""An episode as a tree, and what each of its turns is credited with.

python tests/pictures/episode_tree.py

plays three episodes of guessing a number, with an engine that says what it
must, and draws the first of them. It forks: a context of its own asks about the
first turn. The numbers are those of `losses.center_to_go_by_group`.
"""

import pathlib
import sys
import textwrap
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
INK, LINE = '#24292f', '#57606a'
READ, SAMPLED = ('#eaeef2', LINE, 1), ('#b6e3e6', '#0a6c74', 3)  # and outline
WIDTH, GAP, MARGIN = 176, 24, 10  # of a box, between boxes, around all
SIZE, STEP = 15, 24  # of letters, and from line to line
FITS = 20  # letters in a line of a box, in the widest of usual fonts


class Box(NamedTuple):
  """A message, at a place of the tree.

  Attributes:
    row: How many messages come before it.
    column: Of its context.
    parent: The box before it; None for the first.
    lines: What is written in it, each short enough to fit.
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
    lines = tuple(textwrap.wrap(message['content'], FITS))
    if is_sampled:
      n = message['turn']
      lines = (
        f'“{message["content"]}” (turn {n})',
        f'reward {_number(rewards[n])}',
        f'return to go {_number(to_go[n])}',
        f'group’s mean {_number(to_go[n] - credit[n])}',
        f'credit {_number(credit[n])}',
      )
      turns[path].append(len(found))
    row = 0 if parent is None else found[parent].row + 1
    column = sorted({*turns}).index(path)
    last[path] = len(found)
    found.append(Box(row, column, parent, lines, is_sampled))
  return found


def _number(value: np.ndarray) -> str:
  return f'{value.item():.3g}'.replace('-', '\N{MINUS SIGN}')


def draw() -> str:
  """The picture, as SVG."""
  found = boxes()
  tops = _tops(found)
  columns = 1 + max(one.column for one in found)
  width = columns * (WIDTH + GAP) - GAP + 2 * MARGIN
  height = tops[-1] + 2 * STEP + MARGIN
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    f'font-family="sans-serif" font-size="{SIZE}" fill="{INK}">',
    f'<rect width="{width}" height="{height}" fill="white"/>',
  ]
  parts += [_edge(found, one, tops) for one in found if one.parent is not None]
  parts += [_box(one, tops) for one in found]
  legend = (
    (READ, 'from the environment: only read'),
    (SAMPLED, 'sampled by the policy: learned from once'),
  )
  for n, (colors, text) in enumerate(legend):
    x, y = MARGIN + 2, tops[-1] + STEP * n
    parts.append(
      f'{_rectangle(x, y, 16, 16, colors)}'
      f'<text x="{x + STEP}" y="{y + 13}">{text}</text>'
    )
  return '\n'.join([*parts, '</svg>', ''])


def _tops(found: list[Box]) -> list[int]:
  """Where each row begins, and last where the legend does."""
  tops = [MARGIN]
  for row in range(1 + max(one.row for one in found)):
    tallest = max(_height(one) for one in found if one.row == row)
    tops.append(tops[-1] + tallest + GAP)
  return tops


def _height(one: Box) -> int:
  return len(one.lines) * STEP + 12


def _left(one: Box) -> int:
  return MARGIN + one.column * (WIDTH + GAP)


def _edge(found: list[Box], one: Box, tops: list[int]) -> str:
  """A line from the box before."""
  assert one.parent is not None
  before = found[one.parent]
  x, to_x = _left(before) + WIDTH // 2, _left(one) + WIDTH // 2
  y, to_y = tops[before.row] + _height(before), tops[one.row]
  return (
    f'<path d="M{x} {y} V{to_y - GAP // 2} H{to_x} V{to_y}" fill="none" '
    f'stroke="{LINE}" stroke-width="2"/>'
  )


def _box(one: Box, tops: list[int]) -> str:
  x, y = _left(one), tops[one.row]
  texts = ''.join(
    f'<text x="{x + WIDTH // 2}" y="{y + 23 + STEP * n}" text-anchor="middle">'
    f'{saxutils.escape(line)}</text>'
    for n, line in enumerate(one.lines)
  )
  colors = SAMPLED if one.is_sampled else READ
  return _rectangle(x, y, WIDTH, _height(one), colors) + texts


def _rectangle(
  x: int, y: int, width: int, height: int, colors: tuple[str, str, int]
) -> str:
  fill, outline, thick = colors
  return (
    f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" '
    f'fill="{fill}" stroke="{outline}" stroke-width="{thick}"/>'
  )


if __name__ == '__main__':
  PICTURE.write_text(draw())
  print(PICTURE)
