"""A small mixture with a chat template, in which all that can happen happens.

`python -m tests.readmes` writes what `grpo-jax data` says of it into the README
of the commands.
"""

import contextlib
import io
import json
import os
import pathlib
import random
import tempfile

from rich import console

from grpo_jax import config as config_lib
from grpo_jax.commands import show_data
from grpo_jax.run.build import data_survey
from tests.golden import chat as golden

_NAMES = ['Ada', 'Ben', 'Eve', 'Kim', 'Lea', 'Max', 'Tom', 'Zoe']
_THINGS = ['apples', 'pears', 'books', 'coins', 'cards', 'shells']


def config(folder, **changes):
  """The config; its files are written into `folder`.

  Args:
    folder: An empty directory.
    **changes: Of fields of the config.
  """
  folder = pathlib.Path(folder)
  merges = json.loads(golden.FILE.read_text())['merges']
  golden.write_folder(folder / 'model', 'smollm2', merges)
  for name, records in records_of_files().items():
    lines = '\n'.join(map(json.dumps, records))
    (folder / name).write_text(f'{lines}\n')
  found = config_lib.default()
  found.update_from_flattened_dict(
    {
      'steps': 20,
      'data.train': (
        {'name': str(folder / 'word_problems.jsonl'), 'weight': 3.0},
        {'name': str(folder / 'sums.jsonl'), 'weight': 1.0},
      ),
      'data.heldout': str(folder / 'heldout.jsonl'),
      'data.tokenizer': str(folder / 'model'),
      'data.chat': True,
      'data.system_prompt': 'Give one number.',
      'data.completion_prefix': 'Answer: ',
      'data.prompt_buckets': (96, 128, 160),
      'rewards': ({'name': 'gsm8k', 'weight': 1.0},),
      **changes,
    }
  )
  return config_lib.resolve(found)


def records_of_files():
  """The records of each file."""
  draw = random.Random(0)
  problems = [_problem(draw) for _ in range(400)]
  heldout = [_problem(draw) for _ in range(60)]
  problems[9] = dict(problems[3])
  problems[11] = {'prompt': problems[5]['prompt'], 'answer': '#### 0'}
  problems[20] = {**problems[20], 'answer': 'It is not known.'}
  heldout[7] = {**problems[2], 'prompt': f' {problems[2]["prompt"].upper()}\n'}
  sums = [
    {
      'prompt': [
        {'role': 'system', 'content': 'Add.'},
        {'role': 'user', 'content': f'{number}+{number + 1}'},
      ],
      'answer': str(2 * number + 1),
    }
    for number in range(90)
  ]
  return {
    'word_problems.jsonl': problems,
    'sums.jsonl': sums,
    'heldout.jsonl': heldout,
  }


def _problem(draw):
  numbers = [draw.randint(2, 99) for _ in range(1 + int(draw.expovariate(0.7)))]
  name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
  got = ''.join(f' Then {name} gets {number} more.' for number in numbers[1:])
  has = f'{name} has {numbers[0]} {thing}.'
  return {
    'prompt': f'{has}{got} How many {thing} is that?',
    'answer': f'#### {sum(numbers)}',
  }


def printed(found, columns=80, draws=False):
  """What the command prints, without spaces at the ends of lines."""
  out = io.StringIO()
  screen = console.Console(
    file=out, width=columns, highlight=False, markup=False
  )
  for part in show_data.parts(found, show_data.Terminal(columns, draws)):
    screen.print(part)
  return '\n'.join(line.rstrip() for line in out.getvalue().splitlines())


def markdown():
  """The report, for a README."""
  with tempfile.TemporaryDirectory() as folder:
    before = os.getcwd()
    os.chdir(folder)
    with contextlib.ExitStack() as stack:
      stack.callback(os.chdir, before)
      found = data_survey.survey(config(''), 1, 0, lambda *_: None)
      return f'```\n{printed(found)}\n```'
