"""Links, findings and pairs of parts, as a page has them."""

import re

import numpy as np
import pytest

from grpo_jax.lab import report
from tests.lab.report import html_tree


def html_of(*parts):
  text = report.as_html(report.Page('t', 'a', [report.Section('s', parts)]))
  (main,) = re.findall(r'<main id="main">.*</main>', text, re.S)
  html_tree.Tree(text)  # it is well-formed
  return main


@pytest.mark.parametrize(
  'target',
  ['#a-b_c', 'claims.json', 'claims.html#x', 'https://arxiv.org/abs/2601.0'],
)
def test_a_link_leads_to_a_place(target):
  link = report.Link('<here>', target)
  said = f'<a href="{target}">&lt;here&gt;</a>'
  assert f'<p>{said}</p>' in html_of(link)
  assert f'<td>{said}</td>' in html_of(report.Table('', (), [('a', link)]))
  assert f'<th scope="row">{said}' in html_of(report.Table('', (), [(link,)]))
  found = report.Findings([report.Finding('so', 'good', link)])
  assert f'<b class="good">so</b> {said}</li>' in html_of(found)


@pytest.mark.parametrize(
  'target',
  [
    'javascript:alert(1)', 'http://a.b', '//a.b/c', 'data:text/html,x', '',
    'a" onclick="b', 'https://', '#', ' #a', 'a b', 'file:///etc', 'é',
  ],
)  # fmt: skip
def test_a_link_leads_nowhere_else(target):
  with pytest.raises(ValueError, match='cannot lead to'):
    html_of(report.Link('x', target))


def test_rows_have_the_names_by_which_links_find_them():
  rows = [('a', '1'), ('b', '2')]
  named = html_of(report.Table('t', ('x', 'y'), rows, anchors=['one', 'two']))
  assert re.findall(r'<tr id="(\w+)"><th scope="row">(\w)', named) == [
    ('one', 'a'),
    ('two', 'b'),
  ]
  assert (
    'id="'
    not in html_of(report.Table('t', ('x', 'y'), rows)).partition('<table>')[2]
  )
  with pytest.raises(ValueError):
    html_of(report.Table('t', ('x', 'y'), rows, anchors=['one']))


def test_a_column_with_a_link_holds_no_numbers():
  cells = html_of(
    report.Table('', (), [('a', '1'), ('b', report.Link('2', '#a'))])
  )
  assert 'class="number"' not in cells
  assert 'class="number"' in html_of(report.Table('', (), [('a', '1')]))


def test_findings_say_what_else_is_to_be_said():
  link = report.Link('x', '#x')
  found = html_of(
    report.Findings([report.Finding('<no>', 'bad', link, '<why>')])
  )
  assert '<b class="bad">&lt;no&gt;</b>' in found
  assert '<span class="note">&lt;why&gt;</span>' in found


def test_a_pair_has_its_first_parts_first():
  x = np.arange(3)
  chart = report.Chart(
    'up', '', [report.make_curve('a', [(x, x.astype(float))])]
  )
  pair = report.Pair([chart, chart], [report.Text('beside')])
  text = html_of(pair, chart)
  assert re.search(
    r'<div class="pair"><div><div class="charts">.*</div></div>'
    r'<div><p>beside</p></div></div><div class="charts">',
    text,
    re.S,
  )
  # Each chart of a page has a number of its own.
  assert [*re.findall(r'id="(chart-\d)"', text)] == [
    'chart-1',
    'chart-2',
    'chart-3',
  ]
