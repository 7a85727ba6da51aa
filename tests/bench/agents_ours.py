"""Times grpo_jax on the episodes of `agents_work.py`; prints a line of JSON.

python tests/bench/agents_ours.py --secs 0.1
"""

import asyncio
import os
import pathlib
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  from grpo_jax.commands import start

  start.prepare()  # as the command does

import tokenizers  # noqa: E402

from grpo_jax import data  # noqa: E402
from grpo_jax import engines  # noqa: E402
from grpo_jax import models  # noqa: E402
from grpo_jax.environments import formats  # noqa: E402
from grpo_jax.environments import sessions  # noqa: E402
from grpo_jax.episodes import engine_use  # noqa: E402
from grpo_jax.episodes import play  # noqa: E402
from grpo_jax.hosts import joining  # noqa: E402
from tests import tiny  # noqa: E402
from tests.bench import agents_work  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import work as work_lib  # noqa: E402


def main() -> None:
  """Plays a rollout, and says how long it took."""
  args = agents_work.worker_arguments(__doc__)
  print(run(agents_work.of_arguments(args), args.secs))


def run(work: agents_work.Work, secs: float) -> str:
  """Plays, and returns what `agents_work.answer` says of it."""
  engine, tokenizer = engine_of(work), tokenizer_of(work)
  played(engine, tokenizer, work, 0.0, engine_use.EngineUse())  # compiles
  use, begun = engine_use.EngineUse(), time.perf_counter()
  drawn = played(engine, tokenizer, work, secs, use)
  return agents_work.answer(
    'grpo_jax',
    ('jax', 'flax'),
    work,
    time.perf_counter() - begun,
    drawn,
    turn_secs=use.busy_secs / use.turns,
    **use.metrics(),
  )


def model_config(work: agents_work.Work) -> models.ModelConfig:
  """The shape of the model."""
  return work_lib.model_config(
    cases.Case('', '', work.layers, work.width, work.vocab, 1, 1, 1, 1)
  )


def whole_of(work: agents_work.Work) -> int:
  """Places of a cache that holds an episode."""
  return -(-work.context_tokens // 32) * 32


def engine_of(work: agents_work.Work) -> engines.LocalEngine:
  """An engine with a model of random weights."""
  model = models.Transformer(model_config(work))
  prompt = work.contexts[0]
  engine = engines.LocalEngine(
    model, (prompt,), (whole_of(work) - prompt,), max_rows=work.rows,
    cores=joining.own_cores(),  # as in a run
  )  # fmt: skip
  engine.load(tiny.params(model), version=0)
  return engine


def tokenizer_of(work: agents_work.Work) -> data.Tokenizer:
  """One character per id."""
  vocab = {agents_work.text([k]): k for k in range(work.vocab)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens([agents_work.text([agents_work.END])])
  return data.Tokenizer(
    backend,
    (agents_work.END,),
    agents_work.PAD,
    chat_template=data.ChatTemplate(agents_work.CHAT_TEMPLATE),
    prompt_format=data.PromptFormat(chat=True),
  )


def played(
  engine: engines.LocalEngine,
  tokenizer: data.Tokenizer,
  work: agents_work.Work,
  secs: float,
  use: engine_use.EngineUse,
) -> list[int]:
  """Plays a rollout; returns how many tokens each episode has drawn."""
  episodes = agents_work.Episodes(work, secs)

  async def environment(policy, example, seed):
    del seed
    chat = [{'role': 'user', 'content': example['prompt']}]
    # A turn of `chat` that reaches its own limit is not the last.
    reply = await policy.chat(chat, max_tokens=work.turn_tokens)
    for sleep_secs, said in episodes.begin():
      await asyncio.sleep(sleep_secs)
      chat.append({'role': 'assistant', 'content': reply.text})
      chat.append({'role': 'user', 'content': said})
      reply = await policy.chat(chat, max_tokens=work.turn_tokens)
    return 1.0

  records = [{'prompt': one} for one in work.prompts()]
  most = work.turns * work.turn_tokens
  whole = whole_of(work)
  limits = play.Limits(work.turns, work.turn_tokens + 1, most, whole, whole)
  sampling = engines.Sampling(
    eos_ids=(agents_work.END,), min_tokens=work.turn_tokens - 1
  )
  options = sessions.Options(where='here')
  with sessions.Player({'': environment}, options) as player:
    _, found = play.play(
      records, range(len(records)), engine, tokenizer, player,
      formats.find('hermes'), sampling, limits, work.group, seed=1, rollout=0,
      alike=False, use=use,
    )  # fmt: skip
  every = [one for group in found for one in group]
  if failures := {one.failure for one in every if one.failure}:
    raise ValueError(f'Episodes failed: {failures}')
  return [int(one.episode.chosen.sum()) for one in every]


if __name__ == '__main__':
  main()
