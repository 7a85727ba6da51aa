"""`grpo-jax data`: what it counts, what it prints, what it refuses.

`tests/readme_test.py` compares all of one report with the README.
"""

import dataclasses
import io
import json
import os

import numpy as np
import pytest
from rich import cells

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.commands import printing
from grpo_jax.commands import show_data
from grpo_jax.data import character_tokenizer
from grpo_jax.data import survey
from grpo_jax.data.survey import Part
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import data_survey
from grpo_jax.run.keep.objects import NOTHING
from tests import cli
from tests import runs
from tests.commands import data_example

QUIET = lambda *_: None
DIGITS = character_tokenizer('0123456789+= ')


def surveyed(folder, show=2, records=0, **changes):
  config = data_example.config(folder, **changes)
  return data_survey.survey(config, show, records, QUIET)


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  return surveyed(tmp_path_factory.mktemp('data'))


def test_the_command_prints_a_report_and_starts_no_device(monkeypatch):
  # JAX would raise where it looks for its devices.
  monkeypatch.setenv('JAX_PLATFORMS', 'nowhere')
  done = cli.command('data', cli.CONFIG, '--show=1')
  assert done.returncode == 0, done.stderr
  # Where other work has the processors, it says how far it is.
  assert all(x.startswith('reading ') for x in done.stderr.splitlines())
  lines = done.stdout.splitlines()
  assert ' training   arithmetic     9,000    all    100%    0.356' in lines
  first = '72+01='
  assert f'  | {first}' in lines
  ids = ' '.join(str('0123456789+='.index(c) + 2) for c in first)
  assert lines[lines.index(f'  | {first}') + 1] == f'  {ids}'
  assert '-- width 6: 100% fit --' in done.stdout
  assert lines[-1] == '0 of 10,000 records that were read cannot be used.'
  assert max(map(len, lines)) <= 80 and '\x1b' not in done.stdout


@pytest.mark.parametrize(
  'given, words',
  [
    ([], 'data needs a config, as in data --config'),
    ([cli.CONFIG, '--records=-5'], '--records=-5; give 0 or more'),
    ([cli.CONFIG, '--config.data.train=no.jsonl'], 'no.jsonl cannot be used'),
    ([cli.CONFIG, '--config.data.chat=True'], 'needs a chat template, but'),
  ],
)
def test_bad_input_gets_one_sentence(given, words):
  cli.assert_refused(cli.call('data', *given), words)


def test_negative_numbers_are_refused():
  for name in ('show', 'records'):
    done = cli.call('data', cli.CONFIG, f'--{name}', '-1')
    cli.assert_refused(done, f'--{name}=-1; give 0 or more')


def test_the_first_prompts_are_those_of_the_run(tmp_path):
  config = data_example.config(tmp_path, seed=3)
  found = data_survey.survey(config, 9, 0, QUIET)
  tokenizer = build_data.tokenizer_of(config)
  train, weights = build_data.train(config, NOTHING)
  drawn = data.take(data.mixture(train, weights, config.seed), 0, 9)
  heldout = build_data.heldout(config, NOTHING)
  wanted = [*drawn, *(heldout[place] for place in range(9))]
  assert len(found.prompts) == 18
  for row, shown in zip(wanted, found.prompts, strict=True):
    assert shown.record['answer'] == row['answer']
    assert shown.ids == tokenizer.encode_prompt(row['prompt'])
  names = [os.path.basename(x.place.part.name) for x in found.prompts[:9]]
  assert {*names} == {'word_problems.jsonl', 'sums.jsonl'}


def test_a_prompt_that_cannot_be_read_is_shown_with_the_reason(tmp_path):
  plain = {'data.chat': False, 'data.system_prompt': ''}
  found = surveyed(tmp_path, **plain, **{'data.tokenizer': 'arithmetic'})
  assert all(one.ids is None for one in found.prompts)
  words = ' '.join(data_example.printed(short_names(found)).split())
  assert 'held out: record 1 of heldout.jsonl cannot be used: The ' in words


def short_names(found):
  """The survey with the names of files alone."""
  parts = {
    read.part.name: read.part._replace(name=os.path.basename(read.part.name))
    for read in found.reads
  }
  return found._replace(
    reads=tuple(r._replace(part=parts[r.part.name]) for r in found.reads),
    prompts=tuple(
      p._replace(place=p.place._replace(part=parts[p.place.part.name]))
      for p in found.prompts
    ),
  )


def test_a_partial_report_says_so(tmp_path):
  found = surveyed(tmp_path, show=0, records=50)
  text = ' '.join(data_example.printed(found).split())
  assert '400 50 75.0%' in text and '60 50' in text
  assert 'Looked for in 150 of 550 records, chosen at random' in text
  assert 'Prompts, as the model reads them' not in text
  whole = surveyed(tmp_path, show=0)
  assert 'chosen at random' not in data_example.printed(whole)


def test_the_histogram_holds_every_prompt_once(found):
  rows = found.histogram()
  train, heldout = (
    np.concatenate([read.lengths for read in found.read_in(split)])
    for split in ('train', 'heldout')
  )
  for row in rows:
    assert row.counts == tuple(
      int(np.sum((of >= row.first) & (of <= row.last)))
      for of in (train, heldout)
    )
  assert np.sum([row.counts for row in rows], axis=0).tolist() == [490, 60]
  assert [row.first for row in rows[1:]] == [row.last + 1 for row in rows[:-1]]
  ends = {row.last for row in rows}
  assert {width for width in found.widths if width < max(ends)} <= ends


@pytest.mark.parametrize(
  'lengths, rows',
  [
    ([6], 1),
    ([1, 2], 2),
    ([*range(1, 2000)], 12),
    ([5] * 1000 + [90_000], 5),
    ([30, 31, 10**9], None),
  ],
)
def test_histograms_are_short(lengths, rows):
  part = Part('x', 'train', [], 1.0)
  read = np.zeros(len(lengths), survey.ROW)
  read['tokens'] = lengths
  one = survey.Read(part, len(lengths), read)
  surveyed = survey.Survey((one,), (), (6, 100, 1000), {}, 1)
  found = surveyed.histogram()
  assert found[0].first == min(lengths) and found[-1].last == max(lengths)
  assert sum(row.counts[0] for row in found) == len(lengths)
  assert len(found) == (rows or len(found)) <= 24


@pytest.mark.parametrize('draws', [False, True])
@pytest.mark.parametrize('columns', [40, 59, 80, 120, 200])
def test_reports_fit_the_terminal(found, columns, draws):
  text = data_example.printed(short_names(found), columns, draws)
  assert max(map(cells.cell_len, text.splitlines())) <= columns
  assert ('█' in text, '#####' in text) == (draws, not draws)
  words = ' '.join(text.split())
  for said in ('width 160: 99.0% fit', '5 of 490 (1.0%) are longer', '1.78'):
    assert said in words


def test_what_is_too_long_has_another_colour(found):
  lines = show_data.parts(found, show_data.Terminal(80, True))
  red = [str(line) for line in lines if getattr(line, 'style', '') == 'red']
  assert [line.split()[0] for line in red] == ['161-180', '181-200', '201-204']


def test_answers_of_any_type_go_into_json(tmp_path):
  answers = [np.int32(7), {1: b'x'}, None, [1.5, 'é']]
  part = Part('x', 'train', [], 1.0)
  place = survey.Place(part, 0)
  shown = [survey.Shown(place, {'answer': one}, [], '') for one in answers]
  written = show_data.to_json(survey.Survey((), tuple(shown), (), {}, 1))
  json.dumps(written)
  got = [one['answer'] for one in written['prompts']]
  assert got == ['7', {'1': "b'x'"}, None, [1.5, 'é']]


def test_what_is_not_seen_is_marked():
  lines = list(show_data._folded('a  \n\tb\x1b[2J\u202e\n\nlast \u00e9  ', 60))
  assert lines == [
    r'| a  \n', r'| \tb\x1b[2J\u202e\n', r'| \n', r'| last é\x20\x20',
  ]  # fmt: skip
  long = 'ab ' * 30 + '\u4e2d' * 40 + 'x' * 100
  pieces = list(show_data._folded(long, 40))
  assert max(map(cells.cell_len, pieces)) <= 40
  assert ''.join(piece[2:] for piece in pieces) == long


def test_long_prompts_are_cut_in_print_and_whole_in_json(tmp_path):
  (tmp_path / 'long.jsonl').write_text(
    json.dumps({'prompt': '12=' * 3000, 'answer': 'z' * 900})
  )
  config = runs.arithmetic(
    **{'data.train': str(tmp_path / 'long.jsonl'), 'data.heldout': ''}
  )
  found = data_survey.survey(config, 1, 0, QUIET)
  text = data_example.printed(found)
  assert '5,000 more characters' in text and '8936 more' in text
  assert len(text) < 9000
  (shown,) = show_data.to_json(found)['prompts']
  assert shown['text'] == '12=' * 3000 and len(shown['ids']) == 9000


def test_json_has_all_that_is_printed(found):
  answer = show_data.to_json(found)
  assert json.loads(json.dumps(answer, allow_nan=False)) == answer
  assert [one['records'] for one in answer['sources']] == [400, 90, 60]
  assert [one['share'] for one in answer['sources']] == [0.75, 0.25, None]
  assert answer['prompt_buckets'] == [96, 128, 160]
  assert answer['longer_than_all_buckets'] == {'train': 5, 'heldout': 1}
  within = answer['duplicates']['within training']
  assert (within['exact'], answer['prompts_with_several_answers']) == (6, 1)
  across = answer['duplicates']['held out, and in training']
  assert (across['exact'], across['but_for_spaces_and_case']) == (0, 1)
  ((trained, held),) = across['examples']
  assert (trained['record'], held['record']) == (2, 7)
  assert answer['sources'][0]['unusable'][0]['first'] == [20]
  assert 'gsm8k' in answer['sources'][0]['unusable'][0]['reason']


def test_several_held_out_sources_are_told_apart(tmp_path, monkeypatch):
  config = data_example.config(tmp_path)
  names = [config_lib.Source('first'), config_lib.Source('second')]
  several = dataclasses.replace(config.data, heldout=tuple(names))
  config = dataclasses.replace(config, data=several)
  both = {
    name: [{'prompt': prompt, 'answer': '1'} for prompt in prompts]
    for name, prompts in (('first', '12'), ('second', '345'))
  }
  named = build_data.open_source

  def opened(config, source, *others):
    return both.get(source.name) or named(config, source, *others)

  monkeypatch.setattr(build_data, 'open_source', opened)
  found = data_survey.survey(config, 4, 0, QUIET)
  read = [(one.part.name, one.records) for one in found.read_in('heldout')]
  assert read == [('first', 2), ('second', 3)]
  shown = [(one.place.part.name, one.place.place) for one in found.prompts[4:]]
  assert shown == [('first', 0), ('first', 1), ('second', 0), ('second', 1)]


class Counts:
  """A curriculum that shows how much was drawn before."""

  def __init__(self, *starts):
    self.starts = starts

  def __len__(self):
    return 8

  def __getitem__(self, index):
    return self.drawn(index, 10**6)

  def drawn(self, index, number):
    return {'prompt': f'{index}+{number}=', 'answer': '1'}


def of_curriculum(monkeypatch, source, **changes):
  """The survey of a curriculum alone, and the first prompts of its stream."""
  config = runs.small(
    **{'data.train': 'counts', 'data.heldout': '', 'steps': 2, **changes}
  )
  monkeypatch.setattr(build_data, 'open_source', lambda *_: source)
  rows = data.take(data.prompt_stream(source, config.seed), 0, 4)
  found = data_survey.survey(config, 4, 0, QUIET)
  assert all(one.ids for one in found.prompts), found.prompts
  looked = [one.record['prompt'] for one in found.prompts]
  assert looked == [row['prompt'] for row in rows]
  return found


def test_every_stage_of_a_curriculum_is_read(monkeypatch):
  source = Counts(0, 3, 100)
  found = of_curriculum(monkeypatch, source, **{'sampler.prompts': 5})
  assert [read.part.stage for read in found.reads] == [0, 3, 100]
  # Of ten prompts three are drawn in the first stage.
  assert [read.part.share for read in found.reads] == [0.3, 0.7, 0]
  assert [read.rows['tokens'].max() for read in found.reads] == [4, 4, 6]
  report = data_example.printed(found)
  assert [f'counts from {n} ' in report for n in (0, 3, 100)] == [True] * 3
  stages = [one.place.part.stage for one in found.prompts]
  assert stages == [0, 0, 0, 3]


def test_a_curriculum_without_stages_is_shown_as_it_is_drawn(monkeypatch):
  found = of_curriculum(monkeypatch, Counts())
  assert [read.part.stage for read in found.reads] == [None]


def test_open_widths_are_those_of_the_run(tmp_path):
  found = surveyed(tmp_path, 0, **{'data.prompt_buckets': ()})
  lengths = np.concatenate([read.lengths for read in found.reads])
  assert found.widths == (lengths.max(),)
  whole = surveyed(
    tmp_path, 0, **{'data.prompt_buckets': (), 'data.heldout': ''}
  )
  assert not whole.read_in('heldout')
  assert 'held out' not in data_example.printed(whole)


def test_widths_that_cannot_be_known_are_no_end(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"prompt": "1", "answer": "1"}\n' * 3)
  (tmp_path / 'b.jsonl').write_text('{"prompt": "b", "answer": "1"}\n')
  config = runs.arithmetic(
    **{
      'data.train': str(tmp_path / 'a.jsonl'),
      'data.heldout': str(tmp_path / 'b.jsonl'),
      'data.prompt_buckets': (),
    }
  )
  text = data_example.printed(data_survey.survey(config, 0, 0, QUIET))
  text = ''.join(text.split())  # a long path is broken anywhere
  for words in (
    'The widths are not known: Line 1 of ',
    "b.jsonl' cannot be used: The text 'b' holds",
    '1 of 4 records that were read cannot be used.',
  ):
    assert ''.join(words.split()) in text


def test_progress_is_said_where_it_takes_long(monkeypatch):
  now, err = [0.0], io.StringIO()
  monkeypatch.setattr(printing.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(show_data.sys, 'stderr', err)
  tell = show_data._Progress()
  for now[0] in (50.0, 51.0, 52.0, 55.0, 62.0):
    tell('x', int(now[0] - 50) * 1000, 20_000)
  assert err.getvalue().splitlines() == [
    'reading x: 2,000 of 20,000 records',
    'reading x: 12,000 of 20,000 records',
  ]


def chats(tmp_path, records, **changes):
  """A survey of chats that end with the assistant, and what it prints."""
  file = tmp_path / 'chats.jsonl'
  file.write_text('\n'.join(map(json.dumps, records)))
  chosen = {
    'data.train': str(file),
    'data.heldout': '',
    'data.prompt_field': 'messages',
    'rewards': ({'name': 'exact_match', 'weight': 1.0},),
  }
  found = surveyed(tmp_path, **{**chosen, **changes})
  return found, ' '.join(data_example.printed(short_names(found)).split())


def test_what_becomes_of_the_last_turn_is_said(tmp_path):
  turns = lambda answer: [
    {'role': 'user', 'content': 'How much?'},
    {'role': 'assistant', 'content': answer},
  ]
  records = [{'messages': turns(f'zebra{n}')} for n in range(3)]
  records[2]['answer'] = '7'
  records += [{'messages': turns('')[:1], 'answer': '8'}] * 2
  found, said = chats(tmp_path, records)
  assert (
    'chats.jsonl: 3 of 5 prompts end with the assistant; this turn is taken'
    ' off the prompt as the answer of 2 and beside the answer of 1.'
  ) in said
  assert '0 of 5 records that were read cannot be used.' in said
  written = show_data.to_json(found)
  (source,) = written['sources']
  ends = {'answer': 2, 'beside_answer': 1, 'prefill': 0, 'unknown': 0}
  assert source['last_turns'] == ends
  for one in written['prompts']:
    assert 'zebra' not in one['text'] and one['text'].count('How much?') == 1
  assert {one['answer'] for one in written['prompts']} <= {
    'zebra0', 'zebra1', '7', '8',
  }  # fmt: skip

  records[0]['messages'][1]['role'] = 'teacher'  # who asks, or answers
  records[0]['answer'] = '9'
  found, said = chats(tmp_path, records)
  assert '2 of 5 prompts end with the assistant; this turn is taken' in said
  assert '1 of 5 prompts end with a role that says neither that it' in said
  assert [*found.reads[0].last_turns.values()] == [1, 1, 0, 1]

  records[0]['messages'][1]['role'] = 'AI assistant'
  kept = {'data.last_turn': 'prefill', 'data.answer_field': ''}
  found, said = chats(tmp_path, records, **kept)
  assert 'completions go on where they end (data.last_turn=prefill).' in said
  (source,) = show_data.to_json(found)['sources']
  assert source['last_turns']['prefill'] == 3
