"""Times TRL on one case, in its own environment; prints one line of JSON.

PYTHON_OF_TRL tests/bench/peer_trl.py --case A --steps 6
"""

import os
import pathlib
import random
import sys
import tempfile
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('HF_HUB_OFFLINE', '1')
  os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

from tests.bench import cases  # noqa: E402
from tests.bench import clock as clock_lib  # noqa: E402

import datasets  # noqa: E402  isort: skip
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402


def main() -> None:
  """Trains, and says how long each part of each step took."""
  parser = clock_lib.peer_parser(__doc__)
  parser.add_argument('--weights', help='the folder of a pretrained case')
  args = parser.parse_args()
  clock, case = clock_lib.Clock(), cases.find(args.case)
  with tempfile.TemporaryDirectory(prefix='trl_bench_') as folder:
    # From a folder, because TRL loads its reference from the policy's.
    source = args.weights or f'{folder}/model'
    if not args.weights:
      model_of(case).save_pretrained(source)
    model = transformers.LlamaForCausalLM.from_pretrained(
      source, dtype=torch.float32
    )
    tokenizer = words(case, args.weights)
    trainer = trl.GRPOTrainer(
      model=model,
      reward_funcs=reward_of(case),
      args=settings(case, args, f'{folder}/run'),
      train_dataset=datasets.Dataset.from_list(
        prompts(case, args.steps, tokenizer)
      ),
      processing_class=tokenizer,
      callbacks=[EndOfStep(clock)],
    )
    measure(trainer, clock)
    clock.asked = time.perf_counter()
    trainer.train()
  for i, (whole, sample) in enumerate(
    zip(clock.step_secs(), clock.sample_secs, strict=True)
  ):
    clock.update_secs.append(whole - sample - trainer.reward_secs[i])
  print(clock.answer('trl', args, ('trl', 'torch', 'transformers')))


def model_of(case: cases.Case) -> transformers.LlamaForCausalLM:
  """A Llama with random weights."""
  torch.manual_seed(0)
  ends = list(case.end_ids) or [case.vocab]
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=case.vocab,
      hidden_size=case.width,
      intermediate_size=case.mlp_width,
      num_hidden_layers=case.layers,
      num_attention_heads=case.heads,
      num_key_value_heads=case.heads,
      head_dim=case.head_dim,
      max_position_embeddings=case.prompt_tokens + case.max_tokens,
      rope_theta=10_000.0,
      rms_norm_eps=1e-6,
      tie_word_embeddings=False,
      bos_token_id=None,
      eos_token_id=ends,
      pad_token_id=0,
    )
  )
  model.generation_config.eos_token_id = ends  # all of them end a completion
  return model


def words(case: cases.Case, weights: str | None):
  """The tokenizer of the weights; else one word per id, and an end token."""
  if weights:
    return transformers.AutoTokenizer.from_pretrained(weights)
  ids = {f't{i}': i for i in range(case.vocab)}
  end = f't{case.end_ids[0]}' if case.end_ids else 'end'
  ids.setdefault(end, case.vocab)
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, 't0'))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token=end, pad_token='t0', padding_side='left'
  )


def settings(case: cases.Case, args, folder: str) -> trl.GRPOConfig:
  """One optimizer step per rollout, and nothing that costs time beside it."""
  return trl.GRPOConfig(
    output_dir=folder,
    max_steps=args.steps,
    per_device_train_batch_size=case.rows // args.parts,
    gradient_accumulation_steps=args.parts,
    num_generations=case.group,
    max_completion_length=case.max_tokens,
    num_iterations=1,
    beta=case.kl_coefficient,
    loss_type='grpo',
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    learning_rate=case.learning_rate,
    lr_scheduler_type='constant',
    gradient_checkpointing=False,  # TRL's default is True, which is slower
    bf16=args.dtype == 'bfloat16',
    use_cpu=True,
    logging_strategy='no',
    save_strategy='no',
    report_to='none',
    disable_tqdm=True,
  )


def reward_of(case: cases.Case):
  """`rewards.low_half` as TRL calls it."""

  def low_half(completion_ids, **_):
    low = case.low_ids
    return [sum(i < low for i in ids) / len(ids) for ids in completion_ids]

  return low_half


def prompts(case: cases.Case, steps: int, tokenizer) -> list[dict[str, str]]:
  """Random words, or questions whose answer has begun."""
  if case.pretrained:
    # As texts: TRL ends the message of a chat before the completion.
    return [
      {
        'prompt': tokenizer.apply_chat_template(
          [{'role': 'user', 'content': text}],
          add_generation_prompt=True,
          tokenize=False,
        )
        + cases.COMPLETION_PREFIX
      }
      for text in cases.questions(case.prompts * (steps + 1))
    ]
  rng = random.Random(0)
  return [
    {
      'prompt': ' '.join(
        f't{i}' for i in rng.choices(range(case.vocab), k=case.prompt_tokens)
      )
    }
    for _ in range(case.prompts * (steps + 1))
  ]


class EndOfStep(transformers.TrainerCallback):
  """Tells the clock."""

  def __init__(self, clock: clock_lib.Clock):
    self.clock = clock

  def on_step_end(self, args, state, control, **_):
    self.clock.end_step()


def measure(trainer, clock: clock_lib.Clock) -> None:
  """Puts clocks around what a step calls."""
  generate, judge = trainer.model.generate, trainer._calculate_rewards
  trainer.reward_secs = []

  def generate_timed(input_ids, **kwargs):
    start = time.perf_counter()
    result = generate(input_ids=input_ids, **kwargs)
    clock.sample_secs.append(time.perf_counter() - start)
    return result

  def judge_timed(inputs, prompts, completions, ids):
    start = time.perf_counter()
    result = judge(inputs, prompts, completions, ids)
    trainer.reward_secs.append(time.perf_counter() - start)
    clock.tokens.append(sum(map(len, ids)))
    return result

  trainer.model.generate = generate_timed
  trainer._calculate_rewards = judge_timed


if __name__ == '__main__':
  main()
