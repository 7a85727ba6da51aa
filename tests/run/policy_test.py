"""A policy that is sampled from; what it is loaded from is in other tests."""

import types

from grpo_jax import config
from grpo_jax import data
from grpo_jax import engines
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build


class Bytes:
  """An engine that draws bytes: a character in two of them, and a half."""

  drawn = 'é'.encode() + b'\xc3'

  def submit(self, request):
    del request

  def completed(self, every_tokens):
    assert every_tokens == 1
    for number in range(1, len(self.drawn) + 1):
      yield [types.SimpleNamespace(ids=[*self.drawn[:number]])]


def test_a_character_is_streamed_when_it_is_whole_and_a_half_at_the_end():
  tokenizer = types.SimpleNamespace(
    encode_prompt=lambda prompt: [2, 3],
    decode=lambda ids: bytes(ids).decode(errors='replace'),
    prompt_format=data.PromptFormat(),
  )
  run = types.SimpleNamespace(
    tokenizer=tokenizer,
    engine=Bytes(),
    sampling=engines.Sampling(eos_ids=(1,)),
    environment=None,
    **build.sampler_specs(config.Config()),
  )
  policy = policies.Policy(run, 3)
  pieces = [*policies.stream(policy, ['1+2='])]
  assert pieces == ['1+2=', 'é', '\ufffd\n']
