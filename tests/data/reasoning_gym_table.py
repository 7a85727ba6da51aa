"""Which tasks of reasoning-gym are fit to train on, and why the others are not.

`python -m tests.data.reasoning_gym_table` measures all tasks of the installed
version, which takes minutes, and writes grpo_jax/data/reasoning_gym.json, which
`ReasoningGymSource` reads. `python -m tests.readmes` makes a table of that. It
runs what the verifiers evaluate, without a sandbox, but the texts are its own.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

from grpo_jax.data import _reasoning_gym as gym

FILE = pathlib.Path(gym.__file__).with_name('reasoning_gym.json')
SIZE, ITEMS, AGAIN, JUDGED, COMPARED = 1000, 50, 8, 5, 12
TASK_SECS, PROBE_SECS = 30, 2
SLOW_MS = 100.0  # of an item
LEAST_RIGHT, MOST_JUNK, MOST_CONSTANT = 0.999, 0.3, 0.9
MORE = '{} or 7'  # a right answer, and something else

JUNK = (
  'I do not know.', '?', '.', 'xyzzy', 'The answer is', 'None', 'null', 'nan',
  'inf', '-1e999', '1/0', '[', '[]', '[[', '{}', '{"a": 1}', '()', '""', "''",
  '\\boxed{}', '$$', '<answer>', '((((((((', '))))))))', '\0', '\ud800', '\n',
  'lorem ipsum dolor sit amet ' * 40, 'a' * 5000, '= = =', '#' * 50, 'é \u0663',
  '__import__', 'x', '-', 'import os', '%s%n', '9' * 5000, '[' * 3000,
)  # fmt: skip
HUGE = ('9**9**9**9', '9**9**9**9**9', '[9**9**9**9]', '10**10**10')
# What evaluates any of these makes a file.
EVALUATED = ('{0}', '[{0}]', '{0} + 1', 'x + {0}')
# Parameters that no task may have; None stands for any value. Labels were found
# wrong by computing them.
WRONG = (
  (
    'basic_arithmetic',
    {'allow_parentheses': False},
    'without parentheses a fifth of its answers are wrong',
  ),
  (  # The package keeps the problems of a difficulty in the class.
    'codeio',
    {'difficulty': None},
    'what it makes problems from is then shared by all sources of this task, so'
    " that they change one another's problems",
  ),
)


def main() -> None:
  """Measures all tasks and writes the table, or prints digests alone."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--digests', help='a file to write these to')
  parser.add_argument('--only', nargs='*')
  given = parser.parse_args()
  warnings.simplefilter('ignore')
  version = importlib.metadata.version(gym.PACKAGE)
  if not given.digests:
    old = json.loads(FILE.read_text()) if FILE.exists() else {'tasks': {}}
    write({**old, 'version': version, 'refused': WRONG})
  from reasoning_gym import factory

  names = given.only or sorted(factory.DATASETS)
  if given.digests:
    found = {name: forked(digest, name) for name in names}
    pathlib.Path(given.digests).write_text(json.dumps(found))
    return
  tasks, digests = json.loads(FILE.read_text())['tasks'], {}
  for name in names:
    found = forked(measured, name)
    digests[name] = found.pop('digest', '')
    tasks[name] = {'refused': refusal(found), **found}
    print(name, json.dumps(tasks[name]), flush=True)
    write({'version': version, 'refused': WRONG, 'tasks': tasks})
  fit = [name for name in names if not tasks[name]['refused']]
  again = other_digests(fit)
  for name in fit:
    if again[name] != digests[name]:
      tasks[name]['refused'] = 'its problems differ from process to process'
      print(name, tasks[name]['refused'])
  write({'version': version, 'refused': WRONG, 'tasks': tasks})


def write(table) -> None:
  """The file, with one line for each task."""
  lines = [
    f'    {json.dumps(name)}: {json.dumps(table["tasks"][name])}'
    for name in sorted(table['tasks'])
  ]
  FILE.write_text(
    f'{{\n  "version": {json.dumps(table["version"])},\n'
    f'  "refused": {json.dumps(table["refused"])},\n'
    '  "tasks": {\n' + ',\n'.join(lines) + '\n  }\n}\n'
  )


def other_digests(names):
  """Those of a process with another order of sets."""
  program = [sys.executable, '-m', 'tests.data.reasoning_gym_table']
  with tempfile.NamedTemporaryFile() as file:
    subprocess.run(
      [*program, '--digests', file.name, '--only', *names],
      env={**os.environ, 'PYTHONHASHSEED': '12345'},
      check=True,
    )
    return json.loads(pathlib.Path(file.name).read_text())


def forked(function, *arguments, secs=TASK_SECS):
  """What a function returns in a process with a limit of processor time."""
  out, into = os.pipe()
  child = os.fork()
  if child == 0:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (secs, secs))
    try:
      said = function(*arguments)
    except BaseException as error:
      said = {'error': f'it raises {type(error).__name__}: {error}'[:120]}
    os.write(into, json.dumps(said).encode())
    os._exit(0)
  os.close(into)
  with open(out, 'rb') as file:
    data = file.read()
  _, status = os.waitpid(child, 0)
  if data:
    return json.loads(data)
  if os.waitstatus_to_exitcode(status) in (-signal.SIGXCPU, -signal.SIGKILL):
    return {'error': f'it takes more than {secs} s', 'late': True}
  return {'error': 'its process ended'}


def digest(name, items=None):
  """A hash of the first items."""
  if items is None:
    items = [gym._item(name, {}, 0, SIZE, index) for index in range(AGAIN)]
  return hashlib.sha256(json.dumps(items[:AGAIN]).encode()).hexdigest()


def measured(name):
  """All that the table has of a task."""
  start = time.process_time()
  dataset = gym._dataset(name, '{}', 0, SIZE)
  start_secs = time.process_time() - start
  # After others, so that what an item leaves behind shows in the digest.
  start = time.process_time()
  for index in range(3):
    gym._item(name, {}, 0, SIZE, ITEMS + index)
  if (ms := 1e3 * (time.process_time() - start) / 3) > SLOW_MS:
    return {'error': f'making a problem takes {ms:.0f} ms'}
  start = time.process_time()
  items = [gym._item(name, {}, 0, SIZE, index) for index in range(ITEMS)]
  item_ms = 1e3 * (time.process_time() - start) / ITEMS
  if any(not isinstance(item['answer'], str) for item in items):
    return {'error': 'it has no answer that is a text'}
  if any(not isinstance(item['question'], str) for item in items):
    return {'error': 'its questions are no texts'}
  start = time.process_time()
  right = [dataset.score_answer(item['answer'], item) for item in items]
  judge_ms = 1e3 * (time.process_time() - start) / ITEMS
  more = [*range(ITEMS, 3 * ITEMS)] if item_ms < 5 else []
  train = {item['question'] for item in items}
  train |= {gym._item(name, {}, 0, SIZE, i)['question'] for i in more}
  heldout = [
    gym._item(name, {}, gym.MOST_ITEMS, SIZE, i)['question']
    for i in range(ITEMS)
  ]
  lengths = [len(item['question']) for item in items]
  return {
    'digest': digest(name, items),
    'right': round(float(statistics.mean(right)), 4),
    'start_ms': round(1e3 * start_secs),
    'item_ms': round(item_ms, 2),
    'judge_ms': round(judge_ms, 2),
    'characters': [round(statistics.median(lengths)), max(lengths)],
    'answers': len({item['answer'] for item in items}),
    'repeated': sum(text in train for text in heldout) / ITEMS,
    **junk(dataset, items[:JUDGED]),
    **forked(fooled, dataset, items[:COMPARED], secs=4 * TASK_SECS),
    **hostile(dataset, items[0]),
  }


def junk(dataset, items):
  """The most that a junk text gets, and whether one raises an error."""
  most, text_of, raises = -1.0, '', ''

  def judged(*texts):
    found = []
    for text in texts:
      try:
        scores = [float(dataset.score_answer(text, item)) for item in items]
        found.append(statistics.mean(scores))
      except Exception as error:
        found.append({'error': f'{type(error).__name__}: {error}'[:80]})
    return found

  scores = forked(judged, *JUNK, secs=PROBE_SECS)
  if isinstance(scores, dict):  # one ended it, so one by one
    each = [forked(judged, text, secs=PROBE_SECS) for text in JUNK]
    scores = [one if isinstance(one, dict) else one[0] for one in each]
  for text, score in zip(JUNK, scores, strict=True):
    if isinstance(score, dict):
      raises = raises or f'{score["error"]} for {text[:20]!r}'
    elif score > most:
      most, text_of = score, text[:20]
  return {'junk': round(most, 3), 'junk_text': text_of, 'raises': raises}


def fooled(dataset, items):
  """The best that other problems' answers get, and the right one with more.

  'constant' is the most that the answer of one problem gets in the mean over
  those that have another answer.
  """

  def score(text, item):
    with contextlib.suppress(Exception):  # it has failed, which is no reward
      return float(dataset.score_answer(text, item))
    return 0.0

  def elsewhere(answer):
    others = [item for item in items if item['answer'] != answer]
    return statistics.mean(score(answer, one) for one in others or items)

  answers = {item['answer'] for item in items}
  more = [score(MORE.format(item['answer']), item) for item in items]
  return {
    'constant': round(max(map(elsewhere, answers)), 3),
    'more': round(statistics.mean(more), 3),
  }


def hostile(dataset, item):
  """Whether the verifier evaluates an answer, and whether one keeps it busy."""
  late = (text for text in HUGE if 'late' in probe(dataset, item, text))
  hangs = next(late, '')
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, 'evaluated')
    opened = f'open({str(file)!r}, "w")', f'open({str(file)!r}, chr(119))'
    texts = [form.format(one) for form in EVALUATED for one in opened]
    probe(dataset, item, *texts)
    return {'hangs': hangs, 'evaluates': file.exists()}


def probe(dataset, item, *texts):
  """{} or what went wrong when these were judged."""

  def judged():
    for text in texts:
      with contextlib.suppress(Exception):
        dataset.score_answer(text, item)
    return {}

  return forked(judged, secs=PROBE_SECS)


def refusal(found) -> str:
  """Why a task is not fit, as the end of a sentence; '' if it is."""
  if 'error' in found:
    return found['error']
  if found['repeated'] > 0.99:
    return 'its held-out problems are those that it trains on'
  if found['right'] < LEAST_RIGHT:
    return f'its own answers get {found["right"]} from its verifier'
  if found['junk'] > MOST_JUNK:
    return (
      f'its verifier gives {found["junk"]} for the answer'
      f' {found["junk_text"]!r}'
    )
  if (most := found['constant']) > MOST_CONSTANT:
    return f'its verifier gives {most} for the answer of another problem'
  return ''


def markdown() -> str:
  """The tasks that are fit, and why the others are not."""
  table = gym.fitness()
  fit = [
    '| task | problem, ms | prompt, characters: median, longest | answers in 50'
    ' | held-out questions among 150 of training | junk gets | the answer of'
    ' another problem gets | notes |',
    '| --- | --- | --- | --- | --- | --- | --- | --- |',
  ]
  unfit = ['| task | why it is refused |', '| --- | --- |']
  for name, task in sorted(table['tasks'].items()):
    if task['refused']:
      unfit.append(f'| `{name}` | {task["refused"]} |')
      continue
    notes = [
      *(['evaluates answers'] if task['evaluates'] else []),
      *([f'late on `{task["hangs"]}`'] if task['hangs'] else []),
      *(['raises on junk'] if task['raises'] else []),
      *(['text behind the answer costs little'] if task['more'] > 0.7 else []),
    ]
    median, longest = task['characters']
    fit.append(
      f'| `{name}` | {task["item_ms"]:.2g} | {median}, {longest} |'
      f' {task["answers"]} | {task["repeated"]:.0%} | {task["junk"]:.2g} |'
      f' {task["constant"]:.2g} |'
      f' {", ".join(notes)} |'
    )
  for task, parameters, reason in table['refused']:
    given = ', '.join(
      f'any `{name}`' if value is None else f'`{name}={value}`'
      for name, value in parameters.items()
    )
    unfit.append(f'| `{task}` with {given} | {reason} |')
  return (
    f'Of reasoning-gym {table["version"]}, {len(fit) - 2} tasks are fit:\n\n'
    + '\n'.join(fit)
    + '\n\nThese are refused:\n\n'
    + '\n'.join(unfit)
  )


if __name__ == '__main__':
  main()
