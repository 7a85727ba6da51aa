"""The page for readers: chapters, figures beside verdicts, links to numbers."""

import json
import math
import pathlib
import re
import shlex

import pytest

from grpo_jax.commands import arguments
from grpo_jax.lab import report
from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import evidence
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers
from grpo_jax.lab.studies import story
from tests import cli
from tests.lab.report import html_tree
from tests.lab.report import pages as report_pages
from tests.lab.studies import made

EVERY = *studies.EXPERIMENTS, *studies.STUDIES


def test_every_experiment_has_one_chapter():
  placed = [name for one in story.CHAPTERS for name in one.names]
  assert len({*placed}) == len(placed)
  assert not {*EVERY} - {*placed}
  assert story.chapters(EVERY) == story.CHAPTERS


def test_chapters_are_in_the_order_of_the_papers():
  """By the labels of what they begin with."""
  first = [
    next(name for name in one.names if name in studies.EXPERIMENTS)
    for one in story.CHAPTERS
  ]
  labels = [papers.experiment(name).label for name in first]
  assert labels == ['E6', 'E7', 'E4', 'E1', 'E8', 'E10']


def test_what_belongs_to_no_chapter_has_a_last_one():
  results = {'lonely': made.result(2.0, 'E99')}
  page = index_of(results)
  assert page.sections[-1].title == 'Other experiments'
  assert 'E99: a made one' in str(page.sections[-1].parts)
  assert 'E99' not in str(page.sections[:-1])


@pytest.mark.parametrize('name', [*studies.STUDIES])
def test_a_command_that_is_shown_can_be_typed(name):
  workdirs = []
  for one in story.trainings(name):
    program, *words = shlex.split(one.command)
    found = arguments.read(words)
    assert program == 'grpo-jax' and found.study == name
    has_turns = bool(found.config.environment.name)
    assert has_turns == (one.setting == story.EPISODES)
    workdirs.append(found.workdir)
  assert len({*workdirs}) == len(workdirs)


def index_of(results):
  nothing = pages._Shown([report.Text('the figure')], [])
  return pages._index(results, dict.fromkeys(results, nothing))


def parts_of(results, title):
  (chapter,) = (x for x in story.CHAPTERS if title in x.title)
  return report_pages.parts_of(index_of(results), chapter.title)


def test_a_figure_stands_before_its_verdicts_and_these_lead_to_numbers():
  results = {'surrogate_value': made.result(2.0, 'E7')}
  says, found, counted, heading, pair, *rest = parts_of(results, 'loss does')
  assert says.text.startswith('At the first update')
  assert found.text.startswith('So it was')
  said = 'holds 1, fails 0, not decidable here 0.'
  assert counted.text == f'Claims of this chapter, by verdict: {said}'
  assert heading == report.Text('E7: a made one', 'heading')
  (figure,), (verdicts,) = pair
  assert figure == report.Text('the figure')
  (one,) = verdicts.rows
  assert (one.verdict, one.mark) == ('holds', 'good')
  assert one.statement.text == 'It is at least 1.'
  assert one.statement.target == 'claims.html#surrogate_value-one'
  assert one.note == 'measured 2 ± 0.25, expected ≥ 1'
  assert not rest


def test_what_was_not_measured_is_said_to_be_so():
  results = {'surrogate_value': made.result(math.nan, 'E7')}
  *_, pair = parts_of(results, 'loss does')
  (said,) = pair.second[0].rows
  assert said.note == 'not measured, expected ≥ 1'


def test_verdicts_that_find_no_room_beside_the_figure_stand_below_it():
  done = made.result(2.0, 'E7')
  rows = [done.rows[0]._replace(name=f'claim{n}') for n in range(8)]
  results = {'surrogate_value': done._replace(rows=rows)}
  *_, pair, below = parts_of(results, 'loss does')
  (beside,) = pair.second
  targets = [one.statement.target for one in [*beside.rows, *below.rows]]
  page = 'claims.html#surrogate_value'
  assert targets == [f'{page}-claim{n}' for n in range(8)]
  assert len(beside.rows) == 6


def test_what_was_not_run_is_said_with_the_command_that_runs_it():
  parts = parts_of({}, 'Momentum')
  (table,) = (one for one in parts if isinstance(one, report.Table))
  rows = dict(table.rows)
  assert table.title == 'Not run'
  assert rows['coasting_ratio'] == 'grpo-jax study all --out=FOLDER'
  (one,) = story.trainings('brakes_smollm2')
  assert rows['brakes_smollm2'] == one.command
  for one in story.trainings('staleness'):
    assert rows[f'staleness, in {one.setting}'] == one.command
  assert '--run=WORKDIR' in parts[-1].text
  # What is in no list of experiments cannot be run.
  assert {one.partition(',')[0] for one in rows} <= {*EVERY}
  assert not any('Claims of this' in str(one) for one in parts)
  # A page that has runs would lose them.
  parts = parts_of({'turns': made.result(2.0)}, 'Momentum')
  (table,) = (one for one in parts if isinstance(one, report.Table))
  said = 'grpo-jax study all --out=FOLDER (with the same --run)'
  assert dict(table.rows)['coasting_ratio'] == said


@pytest.mark.parametrize('name', studies.STUDIES)
def test_commands_are_those_of_the_readmes(name):
  root = pathlib.Path(studies.__file__).parents[2]
  readmes = root / 'optim' / 'README.md', root / 'lab/studies/README.md'
  text = ' '.join(' '.join(one.read_text().split()) for one in readmes)
  for one in story.trainings(name):
    # Whole, so that nothing follows that is typed too.
    assert re.search(rf'{re.escape(one.command)}[` ] ?(?!--)', text), one


def test_what_was_found_is_said_where_something_bears_it_out():
  told = [chapter.found for chapter in story.CHAPTERS]
  for results in ({}, {'turns': made.result(2.0)}):
    page = index_of(results)
    said = [
      one.text for section in page.sections for one in section.parts
      if isinstance(one, report.Text)
    ]  # fmt: skip
    assert [one for one in told if one in said] == told[: len(results)]
    assert all(one.says in said for one in story.CHAPTERS)
    assert sum("this project's own runs" in one for one in said) == 1


@pytest.mark.parametrize(
  'setting, missing',
  [
    (story.SINGLE, {story.EPISODES}),
    (story.EPISODES, {story.SINGLE}),
    ('', ()),
  ],
)
def test_the_other_setting_of_a_study_is_missing(setting, missing):
  key = 'staleness-episodes' if setting == story.EPISODES else 'staleness'
  parts = parts_of({key: made.result(2.0, setting=setting)}, 'Momentum')
  (table,) = (one for one in parts if isinstance(one, report.Table))
  names = {name for name, _ in table.rows if name.startswith('staleness')}
  assert names == {f'staleness, in {one}' for one in missing}
  assert any(isinstance(one, report.Pair) for one in parts)


def test_two_settings_of_a_study_are_compared():
  results = {
    'staleness-episodes': made.result(0.0, 'E15', 'age', story.EPISODES),
    'staleness': made.result(2.0, 'E15', 'age', story.SINGLE),
  }
  parts = parts_of(results, 'Momentum')
  heads = [x.text for x in parts if getattr(x, 'kind', '') == 'heading']
  assert heads == [f'E15: age, in {x}' for x in (story.SINGLE, story.EPISODES)]
  compared, not_run = (x for x in parts if isinstance(x, report.Table))
  assert compared.head == ('', story.SINGLE, story.EPISODES)
  assert list(compared.rows) == [
    ('It is at least 1.', '2 ± 0.25 (holds)', '0 ± 0.25 (fails)')
  ]
  assert not any('staleness' in name for name, _ in not_run.rows)


def ids(text):
  return [
    one[1]['id'] for one in html_tree.Tree(text).elements if 'id' in one[1]
  ]


def test_every_claim_is_one_link_from_its_numbers(tmp_path):
  """And every link on both pages leads to something that is there."""
  results = {
    'surrogate_value': made.result(2.0, 'E7'),
    'staleness': made.result(0.5, 'E15', setting=story.SINGLE),
    'staleness-episodes': made.result(1.0, 'E15', setting=story.EPISODES),
  }
  pages.write(results, tmp_path, with_story=True)
  index, table = (
    (tmp_path / name).read_text() for name in ('index.html', 'claims.html')
  )
  files = {'index.html': index, 'claims.html': table, 'claims.json': ''}
  for name, text in files.items():
    assert len({*ids(text)}) == len(ids(text))
    links = [one[1]['href'] for one in html_tree.Tree(text).of('a')]
    for link in links:
      file, _, place = link.partition('#')
      if file.startswith('https://'):
        assert re.fullmatch(r'https://arxiv.org/abs/2601.\d{5}', file)
        continue
      assert not place or place in ids(files[file or name]), link
    if name != 'claims.json':
      # Of each claim: the first page leads to it, and the table above it.
      place = 'claims.html' if name == 'index.html' else ''
      for key in results:
        assert f'{place}#{key}-one' in links
  assert 'index.html' in [x[1]['href'] for x in html_tree.Tree(table).of('a')]
  assert 'claims.json' in [x[1]['href'] for x in html_tree.Tree(table).of('a')]
  row = re.search(r'<tr id="staleness-one">.*?</tr>', table)
  assert row and '<td class="number">0.5</td>' in row[0]
  for said in ('fails', '≥ 1', '0.25', 'It is at least 1.'):
    assert said in row[0]


def test_the_numbers_of_an_experiment_stand_below_its_figure(tmp_path):
  results = {'one': made.result(0.123456789)}
  nothing = pages._Shown([report.Text('figure')], [report.Text('more')])
  (_, section, _) = pages._page(results, {'one': nothing}).sections
  figure, more, table, *rest = section.parts
  assert (figure.text, more.text) == ('figure', 'more')
  assert table.anchors == ['one-one']
  (row,) = table.rows
  assert row[:4] == ('one', 'fails', '0.123457', '0.25')
  assert row[4:] == ('-', '-', '≥ 1', 'It is at least 1.')
  assert rest == evidence.parts(results['one'].numbers)


def test_a_row_says_of_how_many_values_it_is_and_how_many_it_takes():
  done = made.result(2.0)
  measured = claims.Measured(0.9, 0.5, 4)
  row = claims.Row('one', done.rows[0].claim, measured, claims.OPEN)
  (cells,) = pages._measured('x', done._replace(rows=[row])).rows
  needed = claims.values_needed(row.claim, measured)
  assert cells[4:6] == ('4', f'n ≥ {needed}') and needed is not None


def test_an_example_has_a_column_where_there_is_one():
  done = made.result(2.0)
  (row,) = done.rows
  shown = row._replace(measured=row.measured._replace(example='A case.'))
  table = pages._measured('x', done._replace(rows=[shown]))
  assert table.head[-1] == 'example' and table.rows[0][-1] == 'A case.'
  unknown = row._replace(measured=claims.UNKNOWN)
  table = pages._measured('x', done._replace(rows=[unknown]))
  assert table.rows[0][2:4] == ('-', '-')


HOSTILE = '<script>alert(1)</script>"\'&\x1b|\n\n<b>'


def test_texts_of_a_file_are_no_html(tmp_path):
  """They come from a file that somebody may have sent."""
  done = made.result(2.0, HOSTILE, HOSTILE, HOSTILE)
  (row,) = done.rows
  row = row._replace(
    name=HOSTILE,
    claim=row.claim._replace(text=HOSTILE, source=HOSTILE),
    measured=row.measured._replace(example=HOSTILE),
  )
  numbers = {HOSTILE: HOSTILE, 'value': 1.0, 'in': {HOSTILE: [HOSTILE] * 20}}
  results = {'staleness': done._replace(rows=[row], numbers=numbers)}
  pages.write(results, tmp_path, with_story=True)
  for name in ('index.html', 'claims.html'):
    text = (tmp_path / name).read_text()
    assert '<script>alert' not in text and '\x1b' not in text
    scripts = html_tree.Tree(text).of('script')
    assert sum('type' not in one[1] for one in scripts) == 1
    policy = html_tree.Tree(text).of('meta')[1][1]['content']
    assert policy.startswith("default-src 'none';")
  # A browser that shows Markdown shows what HTML is in it.
  lines = (tmp_path / 'claims.md').read_text().splitlines()
  assert '<script' not in '\n'.join(lines)
  (line,) = (one for one in lines if '**holds**' in one)
  assert line.count('|') == 7 and '&lt;script>' in line and '<b>' not in line


def test_a_time_that_is_not_known_is_not_shown(capsys, tmp_path):
  known = made.result(2.0)
  for done, said in (known, True), (known._replace(seconds=math.nan), False):
    pages.show_judged(pages.Judged({'one': done}, tmp_path))
    assert ('(1.5 s)' in capsys.readouterr().out) == said
    pages.write({'one': done}, tmp_path, with_story=True)
    assert ('1.5 s' in (tmp_path / 'claims.md').read_text()) == said
    for name in ('index.html', 'claims.html'):
      page = (tmp_path / name).read_text()
      assert ('Measured in 1.5 s.' in page) == ('Measured' in page) == said
    seconds = json.loads((tmp_path / 'claims.json').read_text())['one']
    assert seconds['seconds'] == (1.5 if said else None)


def test_the_last_line_names_the_page_to_begin_with(capsys, tmp_path):
  pages.show_told({'one': made.result(2.0)}, tmp_path)
  assert 'index.html: 1 holds' in ''.join(capsys.readouterr().out.split('\n'))
  judged = pages.Judged({'one': made.result(2.0)}, tmp_path)
  pages.show_judged(judged)
  assert 'claims.html: 1 holds' in ''.join(capsys.readouterr().out.split('\n'))


def test_the_command_shows_what_runs_have_measured(tmp_path):
  workdirs = [
    made.stale(tmp_path / 'a', environment=''),
    made.stale(tmp_path / 'b', -0.1, environment='games:Guess'),
  ]
  out = tmp_path / 'out'
  given = [f'--run={one}' for one in workdirs]
  done = cli.call('study', 'curvature', f'--out={out}', *given, '--json')
  assert done.returncode == 0, done.stderr
  names = ['curvature', 'staleness', 'staleness-episodes']
  assert list(json.loads(done.stdout)) == names
  saved = json.loads((out / 'claims.json').read_text())
  assert list(saved) == names and saved['staleness']['label'] == 'E15'
  assert saved['staleness']['title'].endswith(', in single turns')
  for name in names:
    for mode in ('light', 'dark'):
      assert (out / f'{name}-{mode}.png').stat().st_size > 1000
    assert f'src="{name}-light.png"' in (out / 'claims.md').read_text()
  page = html_tree.Tree((out / 'index.html').read_text())
  targets = [one[1]['href'] for one in page.of('a')]
  assert 'claims.html#staleness-episodes-clipped' in targets
  assert 'claims.html#curvature-tight' in targets
  text = report_pages.words((out / 'index.html').read_text())
  assert 'grpo-jax study brakes --config' in text
  for where in (story.SINGLE, story.EPISODES):
    assert f'drew, in {where}' in text
