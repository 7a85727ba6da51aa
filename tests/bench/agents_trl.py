"""Times TRL on the episodes of `agents_work.py`; prints a line of JSON.

PYTHON_OF_TRL tests/bench/agents_trl.py --secs 0.1 --at_once 16

A model of random weights writes no calls, so the tokenizer reads a call from
whatever was drawn. All else is TRL's: `_generate` of its trainer, with its loop
over turns, is what is timed.
"""

import os
import pathlib
import sys
import tempfile
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('HF_HUB_OFFLINE', '1')
  os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
  os.environ.setdefault('TRL_EXPERIMENTAL_SILENCE', '1')

from tests.bench import agents_work  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import peer_trl  # noqa: E402

import datasets  # noqa: E402  isort: skip
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402


class Tokenizer(transformers.PreTrainedTokenizerFast):
  """Reads every turn as a call of the environment's tool."""

  def parse_response(self, response, prefix=None, tools=None, **_):
    """A message with a call."""
    del prefix, tools
    call = {'name': 'answer', 'arguments': {}}
    return {
      'role': 'assistant',
      'content': self.decode(response),
      'tool_calls': [{'type': 'function', 'function': call}],
    }


def main() -> None:
  """Plays a rollout, and says how long it took."""
  args = agents_work.worker_arguments(__doc__)
  work = agents_work.of_arguments(args)
  at_once = args.at_once or work.rows
  current = [agents_work.Episodes(work, 0.0)]
  with tempfile.TemporaryDirectory(prefix='trl_bench_') as folder:
    trainer = trainer_of(work, at_once, folder, current)
    inputs = [one for one in records(work) for _ in range(work.group)]
    played(trainer, inputs[: work.group], at_once)  # warms up
    current[0] = agents_work.Episodes(work, args.secs)
    secs, drawn = played(trainer, inputs, at_once)
  packages = 'trl', 'torch', 'transformers'
  print(agents_work.answer('trl', packages, work, secs, drawn))


def trainer_of(
  work: agents_work.Work, at_once: int, folder: str, current
) -> trl.GRPOTrainer:
  """A trainer whose environments take their sleeps from the current ones."""

  class Environment:
    """Answers each call."""

    def reset(self, **_):
      self.turns = current[0].begin()

    def answer(self) -> str:
      """Says something."""
      secs, said = next(self.turns)
      time.sleep(secs)
      return said

  case = cases.Case(
    '', '', work.layers, work.width, work.vocab, 1, 1, work.context_tokens, 1
  )
  return trl.GRPOTrainer(
    model=peer_trl.model_of(case),
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=settings(work, at_once, folder),
    train_dataset=datasets.Dataset.from_list(records(work)),
    processing_class=tokenizer_of(work),
    environment_factory=Environment,
  )


def settings(
  work: agents_work.Work, at_once: int, folder: str
) -> trl.GRPOConfig:
  """Turns of one length: without `generation_kwargs` they fill the episode."""
  return trl.GRPOConfig(
    output_dir=folder,
    per_device_train_batch_size=at_once,
    num_generations=work.group,
    max_completion_length=work.context_tokens,
    max_tool_calling_iterations=work.turns - 1,
    generation_kwargs={'max_new_tokens': work.turn_tokens},
    beta=0.0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
    logging_strategy='no',
    save_strategy='no',
    report_to='none',
    disable_tqdm=True,
  )


def tokenizer_of(work: agents_work.Work) -> Tokenizer:
  """One character per id, and an end that the model has no id for."""
  vocab = {agents_work.text([k]): k for k in range(work.vocab)}
  vocab['<never>'] = work.vocab
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
  backend.decoder = tokenizers.decoders.Fuse()
  tokenizer = Tokenizer(
    tokenizer_object=backend,
    eos_token='<never>',
    pad_token=agents_work.text([agents_work.PAD]),
    padding_side='left',
    chat_template=agents_work.CHAT_TEMPLATE,
  )
  tokenizer.response_template = {}  # so that TRL asks `parse_response`
  return tokenizer


def records(work: agents_work.Work) -> list[dict[str, list[dict[str, str]]]]:
  """The chat that each group begins with."""
  return [
    {'prompt': [{'role': 'user', 'content': one}]} for one in work.prompts()
  ]


def played(
  trainer: trl.GRPOTrainer, inputs, at_once: int
) -> tuple[float, list[int]]:
  """Plays a rollout, so many episodes at a time, as training does.

  Returns:
    Seconds in the part that samples, and tokens that each episode has drawn.
  """
  drawn: list[int] = []
  secs, generate = 0.0, type(trainer)._generate

  def timed(prompts):
    nonlocal secs
    begun = time.perf_counter()
    found = generate(trainer, prompts)
    secs += time.perf_counter() - begun
    drawn.extend(map(sum, found[2]))  # the mask of what the model has said
    return found

  trainer._generate = timed
  for first in range(0, len(inputs), at_once):
    trainer._generate_and_score_completions(inputs[first : first + at_once])
  return secs, drawn


if __name__ == '__main__':
  main()
