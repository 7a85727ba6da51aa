"""Charts with many curves: each is told from the others, in the legend too."""

from importlib import resources
import re

import numpy as np
import pytest

from grpo_jax.lab import report
from grpo_jax.lab.report import svg


def chart_of(number):
  """A chart with so many curves."""
  steps = np.arange(30)
  curves = [
    report.make_curve(f'curve {k}', [(steps, steps + float(k))])
    for k in range(number)
  ]
  return svg.chart(report.Chart('', '', [x for x in curves if x]), 1)


@pytest.mark.parametrize('number', [8, 9, 20, 32])
def test_no_two_curves_of_a_chart_look_alike(number):
  text = chart_of(number)
  legend, plot = text.split('class="plot"')
  of_plot = re.findall(r'class="line ([^"]*)"', plot)
  assert len({*of_plot}) == len(of_plot) == number
  assert re.findall(r'class="line ([^"]*)"', legend) == of_plot


def dashes_of(style, look):
  """The dashes that a line with these classes has; '' if it is solid."""
  found = [
    re.search(rf'\.line\.{name} {{ stroke-dasharray: ([^;]*);', style)
    for name in look.split()
  ]
  return [''] + [match[1] for match in found if match]


def test_curves_of_one_colour_have_different_dashes():
  style = (
    resources.files('grpo_jax.lab.report').joinpath('style.css').read_text()
  )
  looks = re.findall(r'class="line ([^"]*)"', chart_of(32))[:32]
  # A later rule of the file counts: those of dashes follow those of colours.
  assert style.index('.line.d1') > style.index('.line.c7')
  seen = {(look.split()[0], dashes_of(style, look)[-1]) for look in looks}
  assert len(seen) == 32
