"""Pages show who wrote which token of an episode, and what turns earned."""

import html
import re

import numpy as np
import pytest

from grpo_jax.lab import report
from grpo_jax.lab.report import episodes
from grpo_jax.lab.report import transcripts
from grpo_jax.lab.report import words
from grpo_jax.monitor import table
from grpo_jax.rollouts import parquet
from grpo_jax.run.build import data as build_data
from tests.episodes import made_episodes as made
from tests.lab.report import browser_test
from tests.lab.report import chromium
from tests.lab.report import made_runs
from tests.lab.report.html_tree import Tree
from tests.lab.report.pages import parts_of

pytestmark = pytest.mark.usefixtures('quick_audit')
P, E, T = 'policy', 'environment', 'template'


def pieces_of(text):
  """A letter is a token, and so is all between '<' and '>', a mark."""
  return [
    episodes.Piece(x, x.startswith('<'))
    for x in re.findall(r'<.*?>|.|\n', text)
  ]


def told(by, content):
  return {'by': by, 'role': 'user', 'content': content}


@pytest.mark.parametrize(
  'said, text',
  [
    # What is theirs stands in « ».
    ('a', '<start>user\n«a»<end>\n<start>assistant\n'),
    ('user', '<start>user\n«user»<end>\n<start>assistant\n'),
    ('user', '<h>user<eh>\n\n«user»<end>\n<h>assistant<eh>'),
    ('user', '<u>«user»<end>'),
    ('start', '<start>user\n«start»<end>'),
    (' a ', '<start>user\n«a»<end>'),
    ('a\n"b"', '{"result": "«a\\n\\"b\\"»"}<end>'),
    ('gone', '<start>user\nnothing<end>'),
    ('', '<start>user\n<end>'),
    ('\0\0\0', '<u>a<e>'),
    ([{'a': 1}], '<start>user\n«[{"a": 1}]»<end>'),
  ],
)
def test_what_an_environment_said_is_told_from_the_template(said, text):
  parts = re.split('[«»]', text)
  pieces, wanted = [], []
  for place, part in enumerate(parts):
    pieces += pieces_of(part)
    wanted += [E if place % 2 else T] * len(pieces_of(part))
  chosen = [False] * len(pieces)
  assert episodes.who_wrote(pieces, chosen, [told(E, said)]) == wanted


def test_what_was_said_before_a_turn_is_sought_there_alone():
  pieces = pieces_of('<s>hi<e>no<e><s>no<e><s>b<s>c<e>')
  chosen = [k in (4, 5, 6) for k in range(len(pieces))]
  said = (E, 'hi'), (P, 'no'), (E, 'no'), (E, 'b'), (E, 'c')
  found = episodes.who_wrote(pieces, chosen, [told(*one) for one in said])
  assert ''.join(x[0] for x in found) == 'teetppp' + 'teettetet'
  # Nor what was said before the turn before, nor twice in one place.
  pieces = pieces_of('<s>b<s>b<e>n<e><s>b no<e>')
  chosen = [k in (5, 6) for k in range(len(pieces))]
  said = (E, 'b'), (E, 'b'), (P, 'n'), (E, 'no')
  found = episodes.who_wrote(pieces, chosen, [told(*one) for one in said])
  assert ''.join(x[0] for x in found) == 'tetetpp' + 'ttteet'


def test_a_mark_is_no_letters_that_spell_it():
  texts = ('<s>', True), ('<', False), ('s', False), ('>', False), ('<e>', True)
  pieces = [episodes.Piece(*one) for one in texts]
  found = episodes.who_wrote(pieces, [False] * 5, [told(E, '<s>')])
  assert found == [T, E, E, E, T]


def test_a_part_of_a_character_belongs_to_whoever_wrote_it():
  pieces = [episodes.Piece(x, False) for x in ('x', ' ', '', 'é', '', 'y')]
  found = episodes.who_wrote(pieces, [False] * 6, [told(E, 'é')])
  assert found == [T, T, E, E, T, T]


@pytest.fixture(scope='module')
def rollout():
  return made.played(
    made.saying('1', '3'),
    made.saying('8'),
    made.saying('2', '4', '9'),
    made.saying('9'),
  )


@pytest.fixture
def workdir(rollout, tmp_path, monkeypatch):
  """Of a run with two files of episodes, whose tokenizer can be had."""
  tokenizer_of = lambda config: made.TOKENIZER
  monkeypatch.setattr(build_data, 'tokenizer_of', tokenizer_of)
  folder = made_runs.run(tmp_path / 'run', 10)
  write(folder, rollout)
  return folder


def write(folder, rollout, effects=None):
  for step in (5, 10):
    path = parquet.path_of(folder / 'completions', step)
    parquet.write(path, rollout, step, effects)


def shown_of(workdir):
  """The page of a run, and the completions that it shows last."""
  page = report.make_page([str(workdir)])
  (_, shown) = [
    part
    for part in parts_of(page, 'Completions')
    if isinstance(part, report.Completions)
  ]
  return page, shown


def test_a_transcript_says_who_wrote_what_and_how_it_ended(workdir):
  page, shown = shown_of(workdir)
  assert ''.join(x.text for x in shown.read) == (
    '<|im_start|>user\nGuess the number: it is 1 to 9.<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  theirs = ''.join(x.text for x in shown.read if x.writer == E)
  assert theirs == 'Guess the number: it is 1 to 9.'
  by_facts = {one.facts: one for one in shown.completions}
  right = by_facts['2 turns', 'ended by the environment']
  assert right.reward == 0.75
  written = [(x.text, x.writer, x.before) for x in right.tokens]
  assert written[:2] == [('1', P, 'turn 1, reward -0.25'), (made.END, P, '')]
  assert ('3', P, 'turn 2, reward 0') in written
  assert ''.join(x for x, writer, _ in written if writer == E) == 'more'
  (failed,) = [one for facts, one in by_facts.items() if 'failed' in facts[1]]
  assert 'KeyError' in failed.facts[1] and not np.isfinite(failed.reward)
  (branched,) = [
    one
    for one in shown.completions
    if any('branch' in x.before for x in one.tokens)
  ]
  marks = [x.before for x in branched.tokens if x.before]
  assert marks == [
    'turn 1, reward -0.25', 'turn 2, reward -0.25', 'turn 3, reward -0.25',
    'branch behind turn 1', 'turn 4, reward 0.1',
  ]  # fmt: skip
  text = report.as_html(page)
  Tree(text)
  assert text.count('class="writers"') == 1
  assert '<b class="turn">branch behind turn 1</b>' in text
  for kind, body in re.findall(r'<pre class="tokens (\w+)"(.*?)</pre>', text):
    assert kind == 'written' and 'data-values' not in body
    counts = re.search(r'data-writers="(.*?)"', body)
    assert counts
    number = sum(int(x.partition(',')[0]) for x in counts[1].split(';'))
    assert number == body.count('<i ')


def test_effects_are_shown_beside_who_wrote_a_token(workdir, rollout):
  mask = rollout.batch.mask
  effects = {
    'coefficient': np.where(mask, -0.25, 0).astype(np.float32),
    'log_ratio_after': np.where(mask, 0.125, 0).astype(np.float32),
  }
  write(workdir, rollout, effects)
  page, shown = shown_of(workdir)
  for token in shown.completions[0].tokens:
    wanted = (-0.25, 0.125) if token.writer == P else (0, 0)
    assert (token.coefficient, token.log_ratio) == wanted
  text = report.as_html(page)
  assert 'class="a-5 r5 by-policy"' in text and 'a0 r0 by-template' in text
  assert 'was not measured' not in text and text.count('class="key"') == 1
  # A prompt is read, and nothing is done to it.
  assert text.count('tokens written') == 2
  assert text.count('tokens measured') == 2 * 4


def test_without_a_tokenizer_messages_are_shown(workdir, monkeypatch):
  def gone(config):
    raise ValueError('It is not here.')

  monkeypatch.setattr(build_data, 'tokenizer_of', gone)
  _, shown = shown_of(workdir)
  assert not shown.read and shown.prompt == 'a'
  right = next(x for x in shown.completions if x.reward == 0.75)
  assert [(x.text, x.writer, x.before) for x in right.tokens] == [
    ('Guess the number: it is 1 to 9.', E, 'user'),
    ('1', P, 'turn 1, reward -0.25'),
    ('more', E, 'user'),
    ('3', P, 'turn 2, reward 0'),
  ]


def test_a_long_episode_is_cut_in_its_middle(workdir, monkeypatch):
  monkeypatch.setattr(transcripts, 'MOST_OF_EPISODE', 10)
  _, shown = shown_of(workdir)
  cut = [one for one in shown.completions if one.note]
  assert cut and all(len(one.tokens) == 10 for one in cut)
  assert 'in the middle left out' in cut[0].note


def test_marks_are_known_by_their_ids(workdir, monkeypatch):
  seen = []
  from_tokens = episodes.from_tokens

  def spy(course, prompt, pieces):
    seen.extend([*prompt, *pieces])
    return from_tokens(course, prompt, pieces)

  monkeypatch.setattr(episodes, 'from_tokens', spy)
  shown_of(workdir)
  marks = {made.END, '<|im_start|>'}
  assert {piece.text for piece in seen if piece.is_mark} == marks
  assert not any(x.text in marks for x in seen if not x.is_mark)


@pytest.mark.parametrize('tokenizer', [made.TOKENIZER, None])
def test_what_episodes_say_does_nothing_on_a_page(
  tokenizer, workdir, rollout, monkeypatch
):
  monkeypatch.setattr(build_data, 'tokenizer_of', lambda config: tokenizer)
  nasty = made_runs.NASTY
  accounts = [
    [
      one._replace(
        messages=({'by': E, 'role': nasty, 'content': nasty}, *one.messages),
        ended='failed',
        failure=nasty,
      )
      for one in rollout.accounts[0]
    ]
  ]
  write(workdir, rollout._replace(accounts=accounts))
  page, shown = shown_of(workdir)
  text = report.as_html(page)
  assert '<img' not in text and html.escape('<img') in text
  assert nasty in shown.completions[0].facts[1]


@pytest.mark.parametrize('name', [*table.GROUPS['episodes'], 'env_failed'])
def test_each_metric_of_episodes_has_its_sentence(name):
  assert words._MEANINGS[name].endswith('.')
  assert words.label(name) != name.partition('/')[2]


def test_an_episode_that_nobody_began_is_empty():
  course = episodes.Course((), None, 'failed', 'x', (), (), None)
  assert episodes.from_messages(course) == []
  read, tokens = episodes.from_tokens(course, pieces_of('<e>'), [])
  assert [x.writer for x in read] == [T] and tokens == []
  assert course.facts == ('0 turns', 'failed: x')


@pytest.mark.skipif(chromium.find() is None, reason='there is no Chromium here')
def test_the_arrow_keys_read_who_wrote_a_token(workdir, tmp_path):
  page, _ = shown_of(workdir)
  report.write(tmp_path / 'page.html', page)
  with chromium.started() as tab:
    tab.open(tmp_path / 'page.html')
    tab("document.querySelectorAll('pre.tokens')[1].focus()")
    reading = "document.querySelectorAll('.completion .reading')[1].textContent"
    tab.press('ArrowRight')
    assert tab(reading) == 'token 1, written by the policy'
    for _ in range(3):
      tab.press('ArrowRight')
    assert tab(reading) == 'token 4, written by the chat template'
    color = 'getComputedStyle(document.querySelector("{}")).color'.format
    assert len({tab(color(f'.tokens .by-{one}')) for one in (P, E, T)}) == 3
    for writer in (E, T):
      assert browser_test.contrast(tab, f'.tokens .by-{writer}') >= 4.5
    assert not tab.errors
