"""Pages of runs as HTML, and what is to be found in them."""

import json
import re
from typing import Any

from grpo_jax.lab import report
from tests.lab.report.html_tree import Tree


def page_of(*workdirs):
  return report.as_html(report.make_page([str(x) for x in workdirs]))


def data_of(text):
  """What the script reads, by the name of the metric."""
  found = {}
  for figure in re.findall(r'<figure class="chart".*?</figure>', text, re.S):
    key = re.search(r'<code>(.*?)</code>', figure)
    data = re.search(r'<script type="application/json">(.*?)</script>', figure)
    assert key and data
    found[key[1]] = json.loads(data[1])
  return found


def words(text):
  """All that a person reads."""
  hidden = {'script', 'style'}
  return ' '.join(e[2] for e in Tree(text).elements if e[0] not in hidden)


def parts_of(page, title) -> list[Any]:
  """The parts of the section with this title."""
  (found,) = [x.parts for x in page.sections if x.title == title]
  return found
