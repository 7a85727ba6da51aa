"""grpo-jax train --config=tests/bench/config.py:C --workdir=runs/bench_C

A case of the benchmark, as a user would run it. Its prompts (random words) and
its tokenizer (one word per id), or its pretrained model as a Hugging Face
folder, are written to a folder for temporary files when they are not there yet.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

from ml_collections import ConfigDict

from grpo_jax.config import default

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # the command line does not add it
  sys.path.insert(0, str(ROOT))

from tests.bench import cases  # noqa: E402

RECORDS = 2048  # of a prompt file


def get_config(name: str) -> ConfigDict:
  """The config of the case `name`, for 6 steps."""
  case = cases.find(name)
  config = default()
  config.steps = 6

  config.data.train = str(prompts(case))
  config.data.heldout = config.data.answer_field = ''
  if case.pretrained:
    config.model.path = str(pretrained(case))
    config.data.chat = True
    config.data.completion_prefix = cases.COMPLETION_PREFIX
    config.data.tokenizer = ''
    config.learner.anchor = 'sampler'  # as in configs/smollm2.py
  else:
    random_model(config, case)
  config.data.prompt_buckets = (case.prompt_tokens,)
  config.data.completion_buckets = (case.max_tokens,)
  # In this process, as the peers call theirs.
  reward = {'name': 'tests.bench.rewards:low_half', 'where': 'here'}
  config.rewards = ({**reward, 'weight': 1.0},)

  config.sampler.prompts = case.prompts
  config.sampler.group = case.group
  config.sampler.max_tokens = case.max_tokens
  config.learner.method = 'grpo'
  config.learner.method_kwargs = {'kl_coefficient': case.kl_coefficient}
  config.optim.lr = case.learning_rate

  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = 10**6
  config.checkpoint.best_metric = ''
  config.log.display = 'none'
  config.log.samples = config.log.completions_every_steps = 0
  config.log.tensorboard = False
  return config


def random_model(config: ConfigDict, case: cases.Case) -> None:
  """Sets the shape of a model with random weights, and its tokenizer."""
  config.model.num_layers = case.layers
  config.model.width = case.width
  config.model.num_heads = config.model.num_kv_heads = case.heads
  config.model.head_dim = case.head_dim
  config.model.mlp_width = case.mlp_width
  config.data.tokenizer = str(tokenizer(case))
  config.data.pad_token = 't1'
  config.data.eos_tokens = tuple(f't{i}' for i in case.end_ids)


def prompts(case: cases.Case) -> pathlib.Path:
  """The JSONL file of a case's prompts, written when missing."""
  name = f'prompts_{case.vocab}_{case.prompt_tokens}.jsonl'
  if not (path := _folder() / name).exists():
    rng = random.Random(0)
    ids = range(case.vocab)
    asked = (
      cases.questions(RECORDS)
      if case.pretrained
      else (
        ' '.join(f't{i}' for i in rng.choices(ids, k=case.prompt_tokens))
        for _ in range(RECORDS)
      )
    )
    lines = (json.dumps({'prompt': p, 'half': case.low_ids}) for p in asked)
    _write_whole(path, '\n'.join(lines))
  return path


def tokenizer(case: cases.Case) -> pathlib.Path:
  """The tokenizer.json of a case with random weights, written when missing."""
  if not (path := _folder() / f'words_{case.vocab}.json').exists():
    _write_whole(path, words(case.vocab))
  return path


def pretrained(case: cases.Case) -> pathlib.Path:
  """The Hugging Face folder of a pretrained case, converted when missing."""
  path = _folder() / f'pretrained_{case.name}'
  if not path.exists():
    part = path.with_name(f'{path.name}.{os.getpid()}')
    command = [sys.executable, '-m', 'grpo_jax', 'convert']
    subprocess.run(
      [*command, case.pretrained, str(part)],
      cwd=ROOT,
      check=True,
      stdout=subprocess.DEVNULL,
    )
    part.rename(path)
  return path


def _folder() -> pathlib.Path:
  folder = pathlib.Path(tempfile.gettempdir()) / f'grpo_jax_bench_{os.getuid()}'
  folder.mkdir(exist_ok=True)
  return folder


def words(vocab: int) -> str:
  """A tokenizer.json in which the word 't17' is the id 17."""
  import tokenizers

  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({f't{i}': i for i in range(vocab)}, 't0')
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return backend.to_str()


def _write_whole(path: pathlib.Path, text: str) -> None:
  """All of it or nothing: another process may read at the same time."""
  part = path.with_name(f'{path.name}.{os.getpid()}')
  part.write_text(text)
  part.replace(path)
