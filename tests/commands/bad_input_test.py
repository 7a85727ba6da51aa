"""Bad input: one sentence, exit code 2, and nothing lost."""

import pytest

from tests.cli import CONFIG
from tests.cli import SMALL
from tests.cli import assert_refused
from tests.cli import call
from tests.cli import command


def reward(name):
  return (
    f'--config.rewards=({{"name":"tests.judges:{name}","weight":1.0,'
    '"where":"here"},)'
  )


# Quick to the first rollout: no warm-up, nothing held out.
BARE = (SMALL, '--config.warm_up.steps=0', '--config.data.heldout=')

# What is given (WORK is a workdir that is not there), and what is said of it.
BAD_INPUT = {
  'another command': (
    ['dance'],
    "got 'dance'; the commands are: train, eval, convert, methods",
  ),
  'no workdir': (['train', CONFIG], 'needs --workdir'),
  'no config': (['train', 'WORK'], 'no config.json'),
  'no such config': (
    ['train', '--config=no/such.py', 'WORK'],
    "There is no config file 'no/such.py'; give the path",
  ),
  'report on no run': (
    ['report', 'TMP', '--out=TMP/page'],
    'There is no run in TMP (no config.json); give the workdir of a run',
  ),
  'report on nothing': (['report'], 'report needs a workdir. As in:'),
  'flag': (['train', CONFIG, '--wrkdir=w'], 'workdir'),
  'no flag': (['train', CONFIG, 'WORK', 'resume'], 'got resume, which'),
  'flag of another command': (
    ['train', CONFIG, 'WORK', '--number=3'],
    'got --number, which',
  ),
  'fewer than one': (
    ['train', CONFIG, '--config.model.num_heads=0', 'WORK'],
    'model.num_heads=0; give 1 or more',
  ),
  'windows': (
    ['train', CONFIG, '--config.model.window_tokens=(4,0,0,0)', 'WORK'],
    'model.window_tokens=(4, 0, 0, 0) with model.num_layers=3; give at most',
  ),
  'long prompt': (
    ['train', *BARE, '--config.data.train=TMP/long.jsonl', 'WORK'],
    "Line 1 of 'TMP/long.jsonl' cannot be used: its prompt needs 8 tokens, but",
  ),
  'unwritable prompt': (
    ['train', *BARE, '--config.data.train=TMP/letters.jsonl', 'WORK'],
    "Line 2 of 'TMP/letters.jsonl' cannot be used: The text 'ab' holds",
  ),
  'empty stop string': (
    ['train', CONFIG, '--config.sampler.stop_strings=("",)', 'WORK'],
    'but the empty text is in every text',
  ),
  'rate': (
    ['train', CONFIG, '--config.optim.lr=nan', 'WORK'],
    'optim.lr=nan',
  ),
  'syntax of the config': (
    ['train', '--config=TMP/syntax.py', 'WORK'],
    'SyntaxError',
  ),
  'no get_config': (['train', '--config=TMP/empty.py', 'WORK'], 'get_config'),
  'a config that exits': (
    ['train', '--config=TMP/exits.py', 'WORK'],
    'TMP/exits.py raised SystemExit(0), which would end the process',
  ),
  'another config type': (
    ['train', '--config=TMP/none.py', 'WORK'],
    'no ConfigDict',
  ),
  'import of a reward': (
    ['train', CONFIG, 'WORK']
    + ['--config.rewards=({"name":"tests.no_such:f","weight":1.0},)'],
    "No module named 'tests.no_such'",
  ),
  'bucket': (['train', CONFIG, '--workdir=gs://b/run'], 'gs://b/run'),
  'field': (['train', CONFIG, '--config.sed=1', 'WORK'], 'config.seed'),
  "a peer's field": (
    ['train', CONFIG, '--config.num_generations=8', 'WORK'],
    'config.sampler.group',
  ),
  'no value': (['train', CONFIG, '--workdir'], '--workdir has no value'),
  'type': (['train', CONFIG, '--config.seed=x', 'WORK'], 'config.seed'),
  'method': (
    ['train', CONFIG, '--config.learner.method=gspoo', 'WORK'],
    'did you mean gspo',
  ),
  'argument of the method': (
    ['train', CONFIG, '--config.learner.method_kwargs={"lowest":1}', 'WORK'],
    "unexpected keyword argument 'lowest'",
  ),
  'order': (
    ['train', CONFIG, '--config.learner.method=tests.bad_methods:wrong_order']
    + ['--config.learner.method_kwargs={}', 'WORK'],
    'place pool_log_ratio before it',
  ),
  'k1': (
    ['train', CONFIG, '--config.learner.method=tests.bad_methods:k1']
    + ['--config.learner.method_kwargs={}', 'WORK'],
    'expected gradient is zero',
  ),
  'mesh': (['train', CONFIG, '--config.mesh.fsdp=16', 'WORK'], 'fsdp=16'),
  'batches': (
    ['train', CONFIG, '--config.learner.batches=5', 'WORK'],
    'learner.batches=5 with sampler.prompts=32',
  ),
  'rewards': (['train', CONFIG, '--config.rewards=()', 'WORK'], 'no rewards'),
  'no file': (
    ['train', CONFIG, '--config.data.train=missing.jsonl', 'WORK'],
    'grpo-jax: missing.jsonl cannot be used (No such file or directory); give',
  ),
  'malformed line': (
    ['train', CONFIG, '--config.data.train=TMP/bad.jsonl', 'WORK'],
    "Line 2 of 'TMP/bad.jsonl' is not valid JSON",
  ),
  'no chat template': (
    ['train', CONFIG, '--config.data.chat=True', 'WORK'],
    'config.data.chat=True needs a chat template',
  ),
  'empty data': (
    ['train', CONFIG, '--config.data.train=TMP/empty.jsonl', 'WORK'],
    "'TMP/empty.jsonl' holds no record",
  ),
  'argument of the config': (
    ['train', f'{CONFIG}:mu=8,moment=on', 'WORK'],
    "grpo-jax: configs/arithmetic.py got 'mu=8,moment=on'; give mu=NUMBER",
  ),
  'brake': (
    ['train', f'{CONFIG}:mu=8,brake=hard', 'WORK'],
    "optim.brake='hard'; give one of none, reset, reset_first",
  ),
  'range': (
    ['train', CONFIG, '--profile_steps=5,3', 'WORK'],
    '--profile_steps=5,3',
  ),
  'read-only': (
    ['train', CONFIG, '--workdir=TMP/file/run'],
    'TMP/file/run cannot be written (Not a directory)',
  ),
  'eval of nothing': (['eval', CONFIG, 'WORK'], 'There is no checkpoint in'),
  'sample of nothing': (['sample', 'WORK'], 'no config.json'),
}

# Said in a process of its own: before anything is imported, by code of the
# user's, and by the run itself. The others take milliseconds in this process.
IN_A_PROCESS = 'another command', 'a config that exits', 'mesh'


@pytest.mark.parametrize('name', BAD_INPUT)
def test_bad_input_gets_one_sentence_and_exit_code_2(name, tmp_path):
  (tmp_path / 'bad.jsonl').write_text('{"prompt": "1", "answer": 1}\n{"pro\n')
  (tmp_path / 'empty.jsonl').write_text('')
  (tmp_path / 'long.jsonl').write_text('{"prompt": "47+85+1=", "answer": 1}\n')
  (tmp_path / 'letters.jsonl').write_text(
    '{"prompt": "1", "answer": 1}\n{"prompt": "ab", "answer": 1}\n'
  )
  (tmp_path / 'file').write_text('in the way')
  (tmp_path / 'syntax.py').write_text('def get_config(:')
  (tmp_path / 'empty.py').write_text('')
  (tmp_path / 'exits.py').write_text('def get_config(): raise SystemExit(0)')
  (tmp_path / 'none.py').write_text('def get_config(): return None')
  given, words = BAD_INPUT[name]
  place = str(tmp_path)
  say = command if name in IN_A_PROCESS else call
  done = say(
    *(
      a.replace('WORK', '--workdir=TMP/run').replace('TMP', place)
      for a in given
    )
  )
  assert_refused(done, words.replace('TMP', place))
  assert not (tmp_path / 'run').exists()


# What shows when the first rollout is drawn; by then there is a workdir, and
# what was learned so far is in it.
LATE_INPUT = {
  'exits': ([reward('exits')], "tests.judges:exits' (function exits)"),
  'nan': ([reward('nan')], 'returned nan'),
  'too few': ([reward('too_few')], 'returned 1 for 16 completions'),
  'long prompt': (
    # Of so many rows the start looks at some, which are short.
    ['--config.data.train=tests.run.rows_test:LongUnseen'],
    'the prompt with index 0 needs 8 tokens, but the largest bucket is 6',
  ),
}


@pytest.mark.parametrize(
  'name',
  [
    pytest.param('nan', marks=pytest.mark.long),
    pytest.param('too few', marks=pytest.mark.long),
    pytest.param('exits', marks=pytest.mark.long),
    pytest.param('long prompt', marks=pytest.mark.long),
  ],
)
def test_bad_input_of_the_first_rollout_is_said_too(name, tmp_path):
  given, words = LATE_INPUT[name]
  arguments = (a.replace('TMP', str(tmp_path)) for a in given)
  workdir = tmp_path / 'run'
  done = call('train', *BARE, *arguments, f'--workdir={workdir}')
  assert_refused(done, words)
  assert 'example' in done.stderr
  assert (workdir / 'checkpoints' / '0').is_dir()
  assert 'Traceback' in (workdir / 'traceback.txt').read_text()


def test_verbose_shows_the_traceback(tmp_path):
  done = call(
    'train',
    CONFIG,
    '--config.mesh.fsdp=16',
    f'--workdir={tmp_path}',
    '--verbose',
  )
  assert done.returncode != 0 and 'Traceback' in done.stderr
