"""What becomes of the figure of an experiment on a page."""

import numpy as np
import pytest

from grpo_jax.lab import report
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages

X = np.array([1.0, 10.0, 100.0])


def drawing(*draws):
  """An experiment with axes for each of some functions that draw."""

  def draw(numbers, found, figure, colors):
    axes = np.ravel(figure.subplots(1, len(draws)))
    for one, onto in zip(draws, axes):
      one(onto, colors)
    return 'What is to be seen'

  return claims.Experiment('E0', 'a title', {}, dict, draw)


def lines(axes, colors):
  axes.plot(X[::-1], [3, 2, 1], color=colors['first'], label='fast')
  axes.plot(X, [2, 2, 5], 'o', color=colors['first'])
  for shift in (0, 2):
    axes.plot(X, X + shift, color=colors['second'])
  axes.plot(X, X + 1, color=colors['second'], label='slow')
  axes.axhline(4, color=colors['faint'], linestyle=':')
  axes.text(1, 1, 'here it ends')
  axes.set(xscale='log', xlabel='size', ylabel='seconds')
  axes.set_title('growth')


def bars(axes, colors):
  del colors
  axes.bar([0, 1], [2, 3])


def cloud(axes, colors):
  axes.plot([1, 3, 2], [1, 1, 1], 'o', color=colors['first'], label='a')


def nameless(axes, colors):
  axes.plot(X, X, color=colors['first'])
  axes.plot(X, 2 * X, color=colors['second'])


def test_lines_become_curves_with_their_names_and_numbers():
  (chart,), is_all = figures.make_charts(drawing(lines), {})
  assert is_all
  assert chart.title == 'growth' and chart.measured == 'seconds'
  assert chart.x_label == 'size' and chart.x_log and not chart.y_log
  assert chart.note == 'here it ends.'
  fast, dots, slow, level = chart.curves
  assert [fast.name, dots.name] == ['fast', 'fast, measured']
  np.testing.assert_array_equal(fast.x, X)
  np.testing.assert_array_equal(fast.mean, [1, 2, 3])
  np.testing.assert_array_equal(dots.mean, [2, 2, 5])
  assert slow.name == 'slow' and slow.runs.shape == (3, 3)
  np.testing.assert_allclose(slow.mean, X + 1)
  assert level.name == '4' and set(level.mean) == {4}
  np.testing.assert_array_equal(level.x, [1, 100])


@pytest.mark.parametrize('draw', [bars, cloud, nameless])
def test_what_is_no_curve_has_no_chart(draw):
  assert figures.make_charts(drawing(draw), {}) == ([], False)


def test_values_that_a_logarithm_has_not_are_left_out():
  def draw(axes, colors):
    axes.plot([0, *X], [3, 0, 1, 2], color=colors['first'], label='a')
    axes.axhline(1, color=colors['faint'])
    axes.set(xscale='log', yscale='log')

  ((chart,), _) = figures.make_charts(drawing(draw), {})
  np.testing.assert_array_equal(chart.curves[0].x, X[1:])
  np.testing.assert_array_equal(chart.curves[1].x, X[[0, -1]])
  assert report.as_html(
    report.Page('', '', [report.Section('', [chart])])
  )  # can be drawn


@pytest.mark.parametrize('scale', ['linear', 'log'])
def test_of_many_points_some_are_shown_at_equal_distances(scale):
  many = np.arange(1, 5001.0)

  def draw(axes, colors):
    axes.plot(many, many**2, color=colors['first'], label='a')
    axes.set(xscale=scale, ylabel='seconds')

  ((chart,), _) = figures.make_charts(drawing(draw), {})
  assert (chart.title, chart.measured) == ('seconds', '')
  curve = chart.curves[0]
  assert curve.x[0] == 1 and curve.x[-1] == 5000 and len(curve.x) <= 200
  np.testing.assert_array_equal(curve.mean, curve.x**2)
  below = np.mean(curve.x < 71)  # the middle of a logarithmic axis
  assert (below < 0.02) if scale == 'linear' else (0.3 < below < 0.6)


@pytest.mark.parametrize('draws', [(lines,), (lines, bars)])
def test_a_page_has_the_picture_unless_charts_show_all_of_it(draws, tmp_path):
  experiment = drawing(*draws)
  drawn = figures.save('one', experiment, {}, tmp_path)
  done = pages.Result(experiment, {}, [], 1.5)
  figure = pages._shown(done, drawn, tmp_path)
  page = pages._page({'one': done}, {'one': figure})
  parts = page.sections[1].parts
  kinds = [type(part) for part in parts]
  picture = report.Picture in kinds
  assert picture == (len(draws) == 2) and report.Chart in kinds
  shown = [part for part in parts if not isinstance(part, report.Chart)]
  assert 'What is to be seen' in str(shown[0]) and '1.5 s' in str(shown)
