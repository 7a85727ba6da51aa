"""Pictures of the terminal in the first minute of a real run.

python tests/pictures/terminal.py

runs the first of the two commands of README.md in tmux, once for each size of
the terminal, and draws what the terminal shows as SVG: in the middle of the
warm-up, and in the middle of the rollouts. Needs tmux; a run takes a minute or
two on two cores that do nothing else.
"""

import argparse
import html
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COMMAND = (
  'grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic'
)
MOMENTS = {  # a picture: what must have been counted so far, and to which share
  'warm_up': ('warm-up', 0.6),
  'rollouts': ('rollout', 0.6),
}
TIMEOUT_SECS = 1800

# One character of the terminal, in units of the SVG.
WIDTH, HEIGHT, MARGIN = 8.4, 18.0, 12.0
# By the numbers that terminals give to red, green, yellow and cyan.
COLOURS = {1: '#e06c75', 2: '#98c379', 3: '#e5c07b', 6: '#56b6c2'}
INK, DIM, PAPER = '#e6e6e6', '#8b929e', '#1b1f27'
# The part of a character's box that a block fills: from the top, to the bottom.
BLOCKS = {
  **{bar: (1 - n / 8, 1.0) for n, bar in enumerate('▁▂▃▄▅▆▇█', 1)},
  '▀': (0.0, 0.5),
  '━': (0.42, 0.58),
  '─': (0.47, 0.53),
}


class Terminal:
  """A terminal of a size, with a shell in it; a context manager.

  Args:
    width: Columns.
    height: Rows.
    folder: Where the shell stands.
  """

  def __init__(self, width: int, height: int, folder: pathlib.Path):
    self.socket = f'pictures{width}x{height}'
    self._tmux(
      'new-session', '-d', '-s', 'run', '-x', str(width), '-y', str(height),
      '-c', str(folder), 'env', "PS1=$ ", 'bash', '--norc', '--noprofile',
    )  # fmt: skip

  def __enter__(self) -> 'Terminal':
    return self

  def __exit__(self, *_) -> None:
    self._tmux('kill-server')

  def type(self, line: str) -> None:
    """Types a line, and Enter."""
    self._tmux('send-keys', '-t', 'run', '-l', line)
    self._tmux('send-keys', '-t', 'run', 'Enter')

  def screen(self) -> str:
    """What is on the screen, with its colours, once it stands still."""
    while True:
      first, second = self._capture(), self._capture()
      if first == second:
        return first

  def _capture(self) -> str:
    time.sleep(0.05)
    return self._tmux('capture-pane', '-e', '-p', '-t', 'run')

  def _tmux(self, *arguments: str) -> str:
    done = subprocess.run(
      ['tmux', '-u', '-L', self.socket, '-f', '/dev/null', *arguments],
      check=True,
      capture_output=True,
      text=True,
    )
    return done.stdout


def record(width: int, height: int, more: list[str]) -> dict[str, str]:
  """The screen at each of `MOMENTS` of one run.

  Args:
    width: Columns.
    height: Rows.
    more: Arguments after the command's own.

  Returns:
    What the terminal showed, with escape sequences, by the name of the moment.
  """
  screens = {}
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    folder = pathlib.Path(folder)
    (folder / 'configs').symlink_to(ROOT / 'configs')
    with Terminal(width, height, folder) as terminal:
      terminal.type(
        f'export PYTHONPATH={ROOT}; '
        f'grpo-jax() {{ {sys.executable} -m grpo_jax "$@"; }}; clear'
      )
      time.sleep(1)
      terminal.type(' '.join([COMMAND, *more]))
      deadline = time.monotonic() + TIMEOUT_SECS
      for name, (counted, share) in MOMENTS.items():
        screen = ''
        while not reached(screen, counted, share):
          if time.monotonic() > deadline:
            raise SystemExit(f'The run did not come to {name}:\n{screen}')
          screen = terminal.screen()
        screens[name] = screen
  return screens


def reached(screen: str, counted: str, share: float) -> bool:
  """Whether so much has been counted, as '60/100', on a whole frame."""
  plain = Text.from_ansi(screen).plain
  found = re.findall(rf'{counted} (\d+)/(\d+)', plain)
  whole = counted == 'warm-up' or 'samples: ' in plain
  return whole and any(int(n) >= share * int(total) for n, total in found)


def svg(screen: str, width: int, height: int, title: str) -> str:
  """A screen as an SVG.

  Blocks are drawn as rectangles, because the blocks of most fonts leave gaps
  between lines.

  Args:
    screen: Text with escape sequences.
    width: Columns.
    height: Rows.
    title: For those who cannot see the picture.
  """
  wide, high = width * WIDTH + 2 * MARGIN, height * HEIGHT + 2 * MARGIN
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" '
    f'font-family="\'DejaVu Sans Mono\',Menlo,Consolas,monospace" '
    'font-size="14">',
    f'<title>{html.escape(title)}</title>',
    f'<rect width="{wide:g}" height="{high:g}" rx="8" fill="{PAPER}"/>',
  ]
  console = Console(width=width, color_system='truecolor')
  decoder = AnsiDecoder()  # a style of tmux goes on in the next line
  for row, line in enumerate(screen.splitlines()[:height]):
    column = 0
    for segment in decoder.decode_line(line).render(console, end=''):
      style = segment.style or Style()
      parts += drawn(segment.text, style, column, row)
      column += cell_len(segment.text)
  return '\n'.join([*parts, '</svg>', ''])


def drawn(text: str, style: Style, column: int, row: int) -> list[str]:
  """The rectangles and texts of one piece of a line."""
  colour = DIM if style.dim else INK
  if style.color is not None and style.color.number is not None:
    colour = COLOURS.get(style.color.number, colour)
  bold = ' font-weight="bold"' if style.bold else ''
  parts = []
  # Runs of one block; and words, which are laid out one by one, so that a font
  # of another width does not move what follows.
  for match in re.finditer(r'([▀▁▂▃▄▅▆▇█━─])\1*|[^\s▀▁▂▃▄▅▆▇█━─]+', text):
    piece = match.group()
    x = MARGIN + WIDTH * (column + cell_len(text[: match.start()]))
    y, size = MARGIN + HEIGHT * row, WIDTH * cell_len(piece)
    if piece[0] in BLOCKS:
      top, bottom = BLOCKS[piece[0]]
      parts.append(
        f'<rect x="{x:.1f}" y="{y + HEIGHT * top:.2f}" width="{size:.1f}" '
        f'height="{HEIGHT * (bottom - top):.2f}" fill="{colour}" '
        'shape-rendering="crispEdges"/>'
      )
    else:
      parts.append(
        f'<text x="{x:.1f}" y="{y + 0.74 * HEIGHT:.1f}" fill="{colour}"{bold} '
        f'textLength="{size:.1f}">{html.escape(piece)}</text>'
      )
  return parts


def main() -> None:
  """Runs, and writes a picture of each moment at each size."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--sizes', default='80x24,120x40', help='COLUMNSxROWS')
  parser.add_argument('--out', type=pathlib.Path, default=HERE)
  args, more = parser.parse_known_args()
  if shutil.which('tmux') is None:
    raise SystemExit('tmux is not installed, and it holds the terminal here.')
  args.out.mkdir(parents=True, exist_ok=True)
  for size in args.sizes.split(','):
    width, height = map(int, size.split('x'))
    for name, screen in record(width, height, more).items():
      path = args.out / f'terminal_{name}_{size}.svg'
      title = f'The terminal of a run, {name.replace("_", "-")}'
      path.write_text(svg(screen, width, height, title))
      print(path)


if __name__ == '__main__':
  main()
