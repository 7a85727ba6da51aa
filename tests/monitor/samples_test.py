"""Completions on one line, whatever they hold."""

import pytest
from rich.cells import cell_len

from grpo_jax.monitor import formatting


@pytest.mark.parametrize(
  'text, shown',
  [
    ('a b', 'a b'),
    ('a\nb\tc\r', r'a\nb\tc\r'),
    ('\x1b[2J\a\0', r'\x1b[2J\x07\x00'),
    ('\u202eabc\u200b', r'\u202eabc\u200b'),
    ('\ud800', r'\ud800'),
    ('[/red] \\frac', '[/red] \\frac'),
    ('漢字é', '漢字é'),
  ],
)
def test_escape(text, shown):
  assert formatting.escape(text) == shown


@pytest.mark.parametrize(
  'text, width, shown',
  [
    ('abcdef', 6, 'abcdef'),
    ('abcdefg', 6, 'abc…fg'),
    ('abcdefg', 5, 'ab…fg'),
    ('\n' * 7, 6, r'\n…\n'),
    ('ab', 1, '…'),
    ('x' * 1000 + 'the answer', 21, 'x' * 10 + '…the answer'),
    ('', 5, ''),
  ],
)
def test_shorten_keeps_both_ends(text, width, shown):
  assert formatting.shorten(text, width) == shown


@pytest.mark.parametrize('width', [1, 2, 9, 40])
def test_a_cut_is_shown_where_nothing_has_a_width(width):
  text = 'ab' + '\u0301' * 1000 + 'yz'
  shown = formatting.shorten(text, width, cell_len)
  assert '…' in shown and cell_len(shown) <= width
  # Nothing is said to be missing where everything is there.
  whole = 'a' + '\u0301' * (4 * width - 1)
  assert formatting.shorten(whole, width, cell_len) == whole


@pytest.mark.parametrize('width', [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize('text', ['漢' * 30, 'a漢\n' * 30, 'e\u0301' * 60])
def test_shorten_measures_columns(text, width):
  shown = formatting.shorten(text, width, cell_len)
  assert width - 4 < cell_len(shown) <= width
