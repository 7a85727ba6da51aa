"""What studies that train have measured, read from their workdirs."""

import json

import pytest

from grpo_jax.lab import studies
from grpo_jax.lab.studies import brakes
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import staleness
from grpo_jax.lab.studies import story
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies import trained
from tests import cli
from tests.lab.studies import made


def test_verdicts_are_computed_anew(tmp_path):
  lying = [{'name': 'clipped', 'verdict': 'fails', 'mean': -5.0}]
  workdir = made.stale(tmp_path / 'a', claims=lying, label='E99')
  (found,) = trained.read([workdir]).values()
  by_name = {row.name: row for row in found.rows}
  assert by_name['clipped'].verdict == claims.HOLDS
  assert by_name['clipped'].measured.mean == pytest.approx(0.4)
  assert found.experiment.label == 'E15' and found.seconds == 12.0
  (other,) = trained.read([made.stale(tmp_path / 'b', -0.1)]).values()
  verdicts = {row.name: row.verdict for row in other.rows}
  assert verdicts['clipped'] == claims.FAILS


def test_what_a_study_wrote_is_read_again(tmp_path):
  """A file of `sweeps.judge`, with numbers that are not finite."""
  numbers = made.stale_numbers(0.1)
  numbers['means']['carried'] = {
    name: dict.fromkeys(of_arm, float('nan'))
    for name, of_arm in numbers['means']['carried'].items()
  }
  study = staleness.study('staleness')._replace(numbers=lambda _: numbers)
  judged = sweeps.judge(study, (), tmp_path, 3.0)
  assert 'null' in (judged.folder / 'claims.json').read_text()
  found = trained.read([str(tmp_path)])['staleness']
  (written,) = judged.results.values()
  assert [row.verdict for row in found.rows] == [
    row.verdict for row in written.rows
  ]
  assert found.numbers == pages.without_nan(numbers)


def test_single_turns_and_episodes_have_places_of_their_own(tmp_path):
  workdirs = [
    made.stale(tmp_path / 'many', environment='games:Guess'),
    made.stale(tmp_path / 'one', environment=''),
  ]
  found = trained.read(workdirs)
  assert [*found] == ['staleness-episodes', 'staleness']
  assert found['staleness'].setting == story.SINGLE
  episodes = found['staleness-episodes']
  assert episodes.title.endswith(', in episodes of several turns')
  # A study of episodes alone has one place.
  numbers = {'fixed': {'turn': {}, 'episode': {}}, 'training': {}, 'curves': {}}
  saved = {'turns': {'numbers': numbers, 'seconds': 1}}
  assert [*trained.read([made.workdir(tmp_path / 'c', saved, 'x')])] == [
    'turns'
  ]
  (unknown,) = trained.read([made.stale(tmp_path / 'd')]).values()
  assert unknown.setting == '' and unknown.title == staleness.EXPERIMENT.title


@pytest.mark.parametrize(
  'text', ['', '[]', '{"environment": 3}', '{"environment": [{}]}', '\udcff']
)
def test_a_config_that_cannot_be_read_leaves_the_setting_open(text, tmp_path):
  workdir = made.stale(tmp_path / 'a')
  file = tmp_path / 'a' / 'config.json'
  file.write_bytes(text.encode('utf-8', 'surrogateescape'))
  assert trained.read([workdir])['staleness'].setting == ''


def test_a_study_of_some_arms_makes_claims_on_these(tmp_path):
  others = dict.fromkeys(brakes.METRICS, 0.5)
  outcomes = [
    brakes.Outcome(arm, seed, 30, **{**others, 'reward': 0.1 * seed + arm.lr})
    for arm in brakes.STUDIES['brakes']
    if arm.brake in ('none', 'decay')
    for seed in range(2)
  ]
  saved = {'brakes': {'numbers': brakes.numbers(outcomes), 'seconds': 1.0}}
  (found,) = trained.read([made.workdir(tmp_path / 'a', saved)]).values()
  verdicts = {row.name: row.verdict for row in found.rows}
  assert verdicts.keys() == {*brakes.GENERAL, 'decay_8', 'decay_8_kl'}
  assert verdicts['carried'] == claims.HOLDS
  assert verdicts['project'] == claims.OPEN


@pytest.mark.parametrize('name', studies.STUDIES)
def test_every_study_that_trains_has_claims(name):
  found = studies.study(name).experiment
  assert found.claims and found.label.startswith('E')


@pytest.mark.parametrize('name', studies.STUDIES)
def test_no_claim_of_more_or_less_holds_where_arms_are_equal(name):
  for one in studies.study(name).experiment.claims.values():
    assert 0.0 not in (one.low, one.high), one.text


def test_a_study_has_the_claims_of_its_own_arms():
  many, few, some = (
    studies.study(name).experiment
    for name in ('brakes_updates', 'brakes_smollm2', 'normalization_smollm2')
  )
  assert 'rollback_16' in many.claims
  assert 'narrow_16' in few.claims and 'rollback_16' not in few.claims
  assert 'adam-epsilon-0.01' in some.claims and 'momentum' not in some.claims


BAD = {
  'text': ('no JSON', 'is damaged (Expecting value'),
  'deep': ('[' * 100_000, 'is damaged ('),
  'no study': ('{}', 'is damaged (it holds no study)'),
  'a list': ('[]', 'is damaged (it holds no study)'),
  'another': ({'curvature': {}}, "is of 'curvature', which is no study that"),
  'of a person': ({'my notes': 1}, "is of 'my notes', which is no study"),
  'no numbers': ({'staleness': {'seconds': 1}}, "(staleness, KeyError: 'numb"),
  'a number': ({'staleness': 3}, 'is damaged (staleness, TypeError: '),
  'no seconds': (
    {'staleness': {'numbers': made.stale_numbers(1), 'seconds': 'x'}},
    'is damaged (staleness, ValueError: ',
  ),
  'numbers of another': (
    {'staleness': {'numbers': {'runs': []}, 'seconds': 1}},
    "is damaged (staleness, KeyError: 'means')",
  ),
  'texts': (
    {
      'staleness': {
        'numbers': {
          **made.stale_numbers(1),
          'means': {'clipped': {'4-corrected': {'0': 'x'}}},
        },
        'seconds': 1,
      }
    },
    'is damaged (staleness, ',
  ),
}


@pytest.mark.parametrize('kind', BAD)
def test_a_damaged_or_foreign_file_is_refused_in_a_sentence(kind, tmp_path):
  content, words = BAD[kind]
  workdir = made.workdir(tmp_path / 'a', content)
  with pytest.raises(ValueError) as error:
    trained.read([workdir])
  said = str(error.value)
  assert words in said and 'a/claims/claims.json' in said
  assert len(said) < 600 and '\n' not in said


def test_numbers_that_cannot_be_drawn_are_damaged(tmp_path):
  """They are refused now, and not when all else has been measured."""
  numbers = {**made.stale_numbers(1)}
  numbers['means'] = {**numbers['means']}
  drawn = numbers['means']['reward']
  # No claim reads the arm, but the figure has it.
  numbers['means']['reward'] = {**drawn, '2-plain': {'0': 'x'}}
  saved = {'staleness': {'numbers': numbers, 'seconds': 1}}
  with pytest.raises(ValueError, match='is damaged'):
    trained.read([made.workdir(tmp_path / 'a', saved)])


@pytest.mark.parametrize('begin, end', [('[', ']'), ('{"a": ', '}')])
def test_what_cannot_be_written_is_refused_before_anything_is_done(
  begin, end, tmp_path, monkeypatch
):
  """Of numbers nested ever deeper, all that are read can be written."""
  # What takes long and goes no deeper.
  monkeypatch.setattr(figures, 'make_charts', lambda *given: ([], True))
  drawn = dict.fromkeys(('title', 'light', 'dark'), '')
  monkeypatch.setattr(figures, 'save', lambda *given: drawn)

  def read(depth):
    nested = begin * depth + '1' + end * depth
    text = json.dumps({'staleness': {'numbers': numbers, 'seconds': 1}})
    text = text.replace('"curves"', f'"extra": {nested}, "curves"')
    return trained.read([made.workdir(tmp_path / f'{depth}', text)])

  # How deep is too deep differs between versions of Python.
  numbers, depth, too_deep = made.stale_numbers(1), 1, 10_000
  with pytest.raises(ValueError, match='is damaged .*RecursionError|recursion'):
    read(too_deep)
  while too_deep - depth > 1:
    middle = (depth + too_deep) // 2
    try:
      found = read(middle)
    except ValueError:
      too_deep = middle
    else:
      depth = middle
  pages.write(found, tmp_path / 'out', with_story=True)


def test_a_folder_without_a_study_is_refused_before_anything_is_done(tmp_path):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'empty').mkdir()
  folder = tmp_path / 'folder'
  (folder / 'claims' / 'claims.json').mkdir(parents=True)
  out = f'--out={tmp_path / "out"}'
  for name, words in (
    ('nowhere', 'There is no claims/claims.json in'),
    ('file', 'There is no claims/claims.json in'),
    ('empty', 'give the workdir of a study that has trained runs and ended'),
    ('folder', 'claims.json cannot be read'),
  ):
    # Otherwise it would take far longer than the test may.
    done = cli.call('study', 'all', out, f'--run={tmp_path / name}')
    cli.assert_refused(done, words)
  assert not (tmp_path / 'out').exists()


def test_two_workdirs_of_the_same_are_refused(tmp_path):
  workdirs = [made.stale(tmp_path / name, environment='') for name in 'ab']
  with pytest.raises(ValueError, match='a and .*b both hold staleness'):
    trained.read(workdirs)
