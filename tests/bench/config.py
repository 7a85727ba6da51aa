"""grpo-jax train --config=tests/bench/config.py:C --workdir=runs/bench_C

A case of the benchmark, as a user would run it. Its prompts (random words) and
its tokenizer (one word per id) are written to a folder for temporary files when
they are not there yet.
"""

import json
import os
import pathlib
import random
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
  case = cases.CASES[name]
  config = default()
  config.steps = 6

  config.model.num_layers = case.layers
  config.model.width = case.width
  config.model.num_heads = config.model.num_kv_heads = case.heads
  config.model.head_dim = case.head_dim
  config.model.mlp_width = case.mlp_width
  config.model.unroll = case.layers <= 2  # a loop over few layers costs more

  prompts, tokenizer = files(case)
  config.data.train = str(prompts)
  config.data.heldout = config.data.answer_field = ''
  config.data.tokenizer = str(tokenizer)
  config.data.pad_token = 't1'
  config.data.eos_tokens = tuple(f't{i}' for i in case.end_ids)
  config.data.prompt_buckets = (case.prompt_tokens,)
  config.data.completion_buckets = (case.max_tokens,)
  config.rewards = ({'name': 'tests.bench.rewards:low_half', 'weight': 1.0},)

  config.sampler.prompts = case.prompts
  config.sampler.group = case.group
  config.sampler.max_tokens = case.max_tokens
  config.learner.method = 'grpo'
  config.learner.method_kwargs = {'kl_coefficient': cases.KL_COEFFICIENT}
  config.optim.lr = cases.LEARNING_RATE

  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = 10**6
  config.checkpoint.best_metric = ''
  config.log.display = 'none'
  config.log.samples = config.log.completions_every_steps = 0
  config.log.tensorboard = False
  return config


def files(case: cases.Case) -> tuple[pathlib.Path, pathlib.Path]:
  """The prompts and the tokenizer of a case, written when missing.

  Args:
    case: Its sizes decide what is written.

  Returns:
    The paths of a JSONL file and of a tokenizer.json.
  """
  folder = pathlib.Path(tempfile.gettempdir()) / f'grpo_jax_bench_{os.getuid()}'
  folder.mkdir(exist_ok=True)
  prompts = folder / f'prompts_{case.vocab}_{case.prompt_tokens}.jsonl'
  tokenizer = folder / f'words_{case.vocab}.json'
  if not tokenizer.exists():
    _write_whole(tokenizer, words(case.vocab))
  if not prompts.exists():
    rng = random.Random(0)
    lines = (
      json.dumps(
        {
          'prompt': ' '.join(
            f't{i}'
            for i in rng.choices(range(case.vocab), k=case.prompt_tokens)
          ),
          'half': case.vocab // 2,
        }
      )
      for _ in range(RECORDS)
    )
    _write_whole(prompts, '\n'.join(lines))
  return prompts, tokenizer


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
