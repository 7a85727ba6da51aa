"""Runs of a few seconds whose completions are episodes of several turns.

  python -m tests.run.played WORKDIR WHERE [KILLED_AT]

trains; with a number this process is ended by SIGKILL as soon as the player of
its episodes has been asked for something so often. Without one it prints how
often that was.
"""

import functools
import os
import signal
import sys

import tokenizers

from grpo_jax import data
from grpo_jax.environments import sessions
from grpo_jax.run import loop
from grpo_jax.run.build import placing
from tests import runs

# Few tokens, so that a policy that knows nothing often ends a turn.
TOKENS = '<pad>', '|', '>', '0', '1'
TEMPLATE = (
  '{% for m in messages %}'
  '{{ (">" if m.role == "assistant" else "") + m.content + "|" }}'
  '{% endfor %}{% if add_generation_prompt %}{{ ">" }}{% endif %}'
)
SMALL = {
  'data.chat': True,
  'data.train': f'{__name__}:records',
  'data.heldout': f'{__name__}:heldout',
  'data.prompt_buckets': (16,),
  'data.completion_buckets': (96,),
  'sampler.max_tokens': 12,
  'sampler.group': 2,
  'rewards': [{'name': 'environment'}],
  'environment.name': f'{__name__}:guessing',
  'environment.where': 'here',
  'environment.processes': 2,
  'environment.failed_share': 1.0,
  'evaluation.examples': 3,
}


async def guessing(policy, example, seed):
  """Ends with a turn of odd length; some fail, and all but some branch."""
  said = example['prompt']
  for turn in range(4):
    reply = await policy.say(said)
    if len(reply.text) % 2:
      return 1.0
    if reply.text.startswith('>'):
      raise ValueError('it begins with >')
    if reply.text and not turn:
      fork = policy.fork()
      fork.reward(0.1 * len((await fork.say('01')).text))
    policy.reward(-0.25)
    said = '01'[seed % 2] + reply.text[:1]
  return 0.0


async def single(policy, example):
  """One turn; its reward is that of `odd`."""
  return float(len((await policy.say(example['prompt'])).text) % 2)


def odd(prompt, completion, example):
  return float(len(completion) % 2 and not example['truncated'])


def records():
  return [{'prompt': f'{n:05b}', 'answer': '0'} for n in range(32)]


def heldout():
  return [{'prompt': f'{n:06b}', 'answer': '0'} for n in range(3)]


@functools.cache
def tokenizer():
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: number for number, token in enumerate(TOKENS)}, merges=[]
    )
  )
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens(['<pad>', '|'])
  return data.Tokenizer(
    backend,
    (1,),
    0,
    chat_template=data.ChatTemplate(TEMPLATE),
    prompt_format=data.PromptFormat(chat=True),
  )


def train(workdir, stop=None, **changes):
  """A start of a run."""
  config = runs.small(**{**SMALL, **changes})
  config, objects = placing.place(config, tokenizer=tokenizer())
  return loop.train(config, workdir, stop, objects=objects)


def main(workdir, where, killed_at=0):
  counted = 0

  def counting(real):
    @functools.wraps(real)
    def called(*given):
      nonlocal counted
      counted += 1
      if counted == int(killed_at):
        os.kill(os.getpid(), signal.SIGKILL)
      return real(*given)

    return called

  for name in 'begin', 'answer', 'cancel', 'wait':
    real = getattr(sessions.Player, name)
    setattr(sessions.Player, name, counting(real))
  train(workdir, **{'environment.where': where})
  print(f'asked {counted} times')


if __name__ == '__main__':
  # Not that of `__main__`: the environment is looked up by the module's name.
  from tests.run import played

  played.main(*sys.argv[1:])
