"""The page in headless Chromium, without a network.

Debian's package `chromium` is enough to run these tests.
"""

import contextlib

import pytest

from grpo_jax.lab import report
from grpo_jax.lab.report import sections
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers
from tests.lab.report import chromium
from tests.lab.report import made_runs

pytestmark = pytest.mark.skipif(
  chromium.find() is None, reason='there is no Chromium here'
)


@pytest.fixture(scope='module')
def page(tmp_path_factory):
  """A page about two groups of runs, with all that a page can have."""
  folder = tmp_path_factory.mktemp('page')
  alarm = {9: {'entropy': 0.0}}
  workdirs = [
    made_runs.run(folder / f'seed{seed}', 300, seed, alarm.get)
    for seed in range(3)
  ]
  workdirs.append(made_runs.run(folder / 'other', 300, **{'optim.lr': 0.5}))
  long = made_runs.NASTY + 'a_very_long_word' * 40
  for workdir in workdirs:
    made_runs.with_completions(
      workdir, 5, 25, texts=[[long, 'c'], ['', 'dd']], prompts=[long] * 2
    )
    made_runs.with_evaluations(
      workdir, [(0, 1), (1, 0), (0, 0)], prompts=[long] * 3
    )
  with pytest.MonkeyPatch.context() as patch:
    audit = [('method', 'weight', '1/N'), ('method', 'ratio', 'token')]
    patch.setattr(sections.diagnostics, 'audit', lambda method: None)
    patch.setattr(sections.diagnostics, 'describe', lambda *_: audit)
    made = report.make_page([str(workdir) for workdir in workdirs])
  report.write(folder / 'page.html', made)
  return folder / 'page.html'


@pytest.fixture(scope='module')
def claims_page(tmp_path_factory):
  """The page of `grpo-jax study`: curves, and a picture of something else."""
  folder = tmp_path_factory.mktemp('claims')
  done = {}
  for name in ('coasting_ratio', 'rate_exponents', 'interaction'):
    made = papers.experiment(name)
    numbers = made.run(False)
    done[name] = pages.Result(made, numbers, claims.check(made, numbers), 1.0)
  pages.write(done, folder, with_story=True)
  return folder / 'claims.html'


@pytest.fixture(scope='module')
def story_page(claims_page):
  """The page for readers, which leads to the one of claims."""
  return claims_page.with_name('index.html')


@pytest.fixture(scope='module')
def browser():
  with chromium.started() as tab:
    yield tab


@pytest.fixture
def tab(browser):
  """A tab; nothing may have gone wrong in it, and nothing been asked for."""
  browser.errors.clear()
  browser.requests.clear()
  yield browser
  assert not browser.errors
  assert all(url.startswith(('file:', 'data:')) for url in browser.requests)


FIGURES = """[...document.querySelectorAll('figure.chart')].map(figure => {
  document.querySelectorAll('details').forEach(one => { one.open = true; });
  const [box, line] = ['.canvas', '.plot .line'].map(
    name => figure.querySelector(name).getBoundingClientRect());
  const path = figure.querySelector('.plot .line');
  return [box.width, box.height, line.width, path.getTotalLength(),
    getComputedStyle(path).stroke, figure.querySelectorAll('.x span').length,
    figure.querySelectorAll('.y span').length];
})"""


PAGES = pytest.mark.parametrize('kind', ['page', 'claims_page', 'story_page'])


@PAGES
@pytest.mark.parametrize('width', [360, 1600])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(
  width, kind, request, tab
):
  tab.open(request.getfixturevalue(kind), width=width)
  figures = tab(FIGURES)
  assert len(figures) > (5 if kind == 'page' else 1)
  for wide, high, line, length, stroke, across, up in figures:
    assert wide > 200 and high > 100 and line > 0.5 * wide and length > 0
    assert stroke.startswith('rgb(') and across >= 2 and up >= 2
  # With all that is folded shown, as it is now.
  assert tab('document.documentElement.scrollWidth') == width
  beyond = tab(
    """[...document.querySelectorAll('main *')].filter(e =>
      !e.closest('.scroll, svg, pre, .prompt') &&
      e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"""
  )
  assert not beyond


def contrast(tab, selector):
  """Of the text of an element against what lies behind it."""
  return tab(f"""(() => {{
    const light = text => {{
      const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(
        c => c / 255).map(
        v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b;
    }};
    const e = document.querySelector('{selector}');
    let behind = e;
    while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)')
      behind = behind.parentElement;
    const two = [getComputedStyle(e).color,
      getComputedStyle(behind).backgroundColor].map(light);
    return (Math.max(...two) + .05) / (Math.min(...two) + .05);
  }})()""")


PICTURES = """[...document.querySelectorAll('img')].filter(
  e => getComputedStyle(e).display !== 'none').map(
  e => [e.complete, e.naturalWidth, e.getBoundingClientRect().width,
    e.alt.length, e.currentSrc.slice(0, 14)])"""


@pytest.mark.parametrize('width, beside', [(360, False), (1600, True)])
def test_verdicts_stand_beside_their_figure_where_there_is_room(
  width, beside, story_page, tab
):
  tab.open(story_page, width=width)
  pairs = tab("""[...document.querySelectorAll('.pair')].map(pair =>
    [...pair.children].flatMap(side => {
      const {left, right, top, bottom} = side.getBoundingClientRect();
      return [left, right, top, bottom];
    }))""")
  assert len(pairs) == 3
  for left, right, top, bottom, *second in pairs:
    assert second[0] >= right if beside else second[2] >= bottom
    assert abs(second[2] - top) < 1 if beside else abs(second[0] - left) < 1


def test_a_claim_leads_to_its_numbers(story_page, tab):
  tab.open(story_page)
  said = tab("document.querySelector('.findings a').textContent")
  target = tab("document.querySelector('.findings a').href")
  assert target.startswith(story_page.parent.as_uri() + '/claims.html#')
  tab("document.querySelector('.findings a').click()")
  arrived = "document.querySelector('tr:target')"
  place = f'{arrived}.getBoundingClientRect()'
  seen = f'!!{arrived} && {place}.top >= 0 && {place}.bottom <= innerHeight'
  tab.until(seen)  # the page scrolls there smoothly
  assert tab(seen) and said in tab(f'{arrived}.textContent')


@pytest.mark.parametrize('width', [360, 1600])
def test_every_picture_of_a_study_is_there(width, claims_page, tab):
  tab.open(claims_page, width=width)
  pictures = tab(PICTURES)
  assert pictures
  for complete, natural, wide, words, source in pictures:
    assert complete and natural > 500 and words > 20
    # On a narrow page it scrolls inside itself, and stays as large.
    assert wide > 600 and source == 'data:image/png'
    assert wide <= width or width == 360
  assert tab("document.querySelectorAll('table tr').length") > 8


@PAGES
@pytest.mark.parametrize('dark', [False, True])
def test_it_is_light_or_dark_as_the_reader_likes(dark, kind, request, tab):
  tab.open(request.getfixturevalue(kind), dark=dark)
  paper = tab('getComputedStyle(document.body).backgroundColor')
  assert (sum(map(int, paper[4:-1].split(','))) < 200) == dark
  named = ('.label',) if kind == 'page' else ()
  for selector in (
    'h1',
    '.measured',
    '.notes',
    '.x span',
    'td',
    'nav a',
    *named,
  ):
    assert contrast(tab, selector) >= 4.5, selector


def test_nothing_moves_for_a_reader_who_does_not_want_it(page, tab):
  asked = 'getComputedStyle(document.documentElement).scrollBehavior'
  tab.open(page)
  assert tab(asked) == 'smooth'
  tab.open(page, still=True)
  assert tab(asked) == 'auto'


READINGS = """[...document.querySelectorAll('figure.chart')].map(
  figure => figure.querySelector('.reading').textContent).filter(Boolean)"""
LABELS = """[...document.querySelectorAll('#chart-1 .x span')].map(
  span => Number(span.textContent))"""


def test_the_mouse_reads_and_zooms(page, tab):
  tab.open(page, width=1200)
  box = tab("""(() => {
    const canvas = document.querySelector('#chart-1 .canvas');
    canvas.scrollIntoView({block: 'center', behavior: 'instant'});
    const box = canvas.getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
  })()""")
  left, top, width, height = box
  tab.settle()
  middle = dict(x=left + width / 2, y=top + height / 2)
  tab.mouse('mouseMoved', **middle)
  readings = tab(READINGS)
  assert len(readings) > 1  # those beside it say the same rollouts
  assert (
    readings[0].startswith('rollouts 149 to 150: lr=')
    and 'lr=0.5: ' in readings[0]
  )
  whole = tab(
    "document.querySelector('#chart-1 .plot .line').getAttribute('d')"
  )
  tab.mouse('mousePressed', **middle, button='left', clickCount=1)
  right = dict(x=left + 0.75 * width, y=top + height / 2)
  tab.mouse('mouseMoved', **right, button='left')
  tab.mouse('mouseReleased', **right, button='left', clickCount=1)
  seen = tab(LABELS)
  assert 140 < min(seen) and max(seen) < 235
  others = tab(LABELS.replace('chart-1', 'chart-3'))
  assert 140 < min(others) and max(others) < 235
  for count in (1, 2):
    tab.mouse('mousePressed', **middle, button='left', clickCount=count)
    tab.mouse('mouseReleased', **middle, button='left', clickCount=count)
  assert max(tab(LABELS)) == 300
  again = tab(
    "document.querySelector('#chart-1 .plot .line').getAttribute('d')"
  )
  assert again.split('L')[0] == whole.split('L')[0]


def test_the_keyboard_reads_and_zooms(page, tab):
  tab.open(page)
  tab("document.querySelector('#chart-1 .plot').focus()")
  reading = "document.querySelector('#chart-1 .reading')"
  tab.press('Home')
  first = tab(f'{reading}.textContent')
  assert first.startswith('rollouts 1 to 2: lr=0.0003: ')
  assert tab(f"{reading}.getAttribute('aria-live')") == 'polite'
  tab.press('ArrowRight')
  assert tab(f'{reading}.textContent') != first
  tab.press('+')
  assert max(tab(LABELS)) < 200
  tab.press('Escape')
  assert max(tab(LABELS)) == 300
  order = tab("""[...document.querySelectorAll('a, .plot, pre.tokens, input')]
    .filter(e => e.tabIndex < 0).length""")
  assert order == 0


def test_tokens_are_read_and_coloured_by_either(page, tab):
  tab.open(page)
  tab("document.querySelector('pre.tokens').focus()")
  tab.press('ArrowRight')
  said = tab("document.querySelector('.completion .reading').textContent")
  assert said == 'token 1: coefficient -0.25, log-ratio 0.125 nats'
  shade = (
    "getComputedStyle(document.querySelector('.tokens i')).backgroundColor"
  )
  blue = tab(shade)
  tab("document.querySelector('[value=ratio]').click()")
  orange = tab(shade)
  red = lambda color: float(color[5:].split(',')[0])
  assert red(blue) < 60 and red(orange) > 180


def test_without_a_script_the_figures_are_there_too(page, tab):
  text = page.read_text()
  bare = page.with_name('bare.html')
  bare.write_text(text.replace("script-src 'sha256-", "script-src 'sha256-no"))
  with contextlib.suppress(AssertionError):  # the console says what is refused
    tab.open(bare)
  tab.errors.clear()
  assert all(figure[2] > 100 for figure in tab(FIGURES))
