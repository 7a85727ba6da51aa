"""Episodes of a short vocabulary, which fail, branch, meet limits, or do not.

Byte-level tokenizers have so many tokens that a model of random weights hardly
ever ends a turn. The one of this file has about 40.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import string
from typing import Any

import tokenizers

from grpo_jax import data
from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes import playing
from grpo_jax.episodes.types import Rollout
from tests.data import trap_templates
from tests.fake_engine import FakeEngine

END, END_OF_CHAT = '<|im_end|>', '<|endoftext|>'
LIMITS = play_lib.Limits(
  turns=4, turn_tokens=12, episode_tokens=40, context_tokens=400
)
RECORDS = [
  {'prompt': 'a', 'answer': '3', 'index': 7},
  {'prompt': 'b', 'answer': '5', 'index': 9},
]


def _tokenizer() -> data.Tokenizer:
  letters = [*'123456789', *string.ascii_lowercase, 'G', ' ', ':', '.', '\n']
  special = END, END_OF_CHAT, '<|im_start|>'
  vocab = {token: k for k, token in enumerate([*special, *letters])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens([*special])
  return data.Tokenizer(
    backend,
    (vocab[END], vocab[END_OF_CHAT]),
    vocab[END_OF_CHAT],
    chat_template=data.ChatTemplate(trap_templates.ALL['separator'].source),
    prompt_format=data.PromptFormat(chat=True),
  )


TOKENIZER = _tokenizer()


async def guessing(policy, example, seed):
  """Ends once the answer is said; an 8 makes it fail, a 2 makes a branch."""
  del seed
  said = 'Guess the number: it is 1 to 9.'
  while True:
    reply = await policy.say(said)
    if reply.text == example['answer']:
      return 1.0
    policy.reward(-0.25)
    if reply.text[:1] == '8':
      raise KeyError('no such room')
    if reply.text[:1] == '2':
      other = policy.fork()
      await other.say('was that wise')
      other.reward(0.1)
    said = 'more' if reply.text < example['answer'] else 'less'


def saying(*texts: str, tokenizer: data.Tokenizer = TOKENIZER):
  """Says these, one in each turn; further turns say the last."""

  def answer(request, number):
    del number
    turn = tokenizer.decode_whole(request.ids).count('assistant\n') - 1
    said = texts[min(turn, len(texts) - 1)]
    return [*tokenizer.encode(said), tokenizer.eos_ids[0]]

  return answer


def played(
  *answers,
  environment: Any = guessing,
  records: Sequence[Mapping[str, Any]] = RECORDS[:1],
  limits: play_lib.Limits = LIMITS,
  tokenizer: data.Tokenizer = TOKENIZER,
) -> Rollout:
  """A rollout, whose g-th episode of each record has the g-th answers.

  Args:
    *answers: Functions of an engine, such as `saying` makes.
    environment: What is played.
    records: For each a group.
    limits: See `play.Limits`.
    tokenizer: Of the engines.
  """

  def play(records, index):
    """Each episode with an engine of its own, so that it says what it must."""
    found = []
    for answer in answers:
      engine = FakeEngine(answer, engines.Capabilities(entropy=True))
      engine.load(None, 3)
      found.append(
        play_lib.play(
          records,
          index,
          engine,
          tokenizer,
          player,
          formats.find('hermes'),
          engines.Sampling(eos_ids=tokenizer.eos_ids),
          limits,
          group=1,
          seed=1,
          rollout=4,
        )
      )
    prompts, _ = found[0]
    groups = zip(*(played for _, played in found))
    return prompts, [[one for (one,) in group] for group in groups]

  options = sessions.Options(where='here')
  with sessions.Player({'': environment}, options) as player:
    reward = rewards.WeightedReward(
      'environment', rewards.resolve('environment')
    )
    return playing.collect(records, play, tokenizer, [reward], (128, 2048))
