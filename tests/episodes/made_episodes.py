"""Rollouts of episodes, played with an engine that says what it is told to."""

from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes import playing
from grpo_jax.episodes.types import Rollout
from tests.data import continuation_test
from tests.data import trap_templates
from tests.fake_engine import FakeEngine

TOKENIZER = continuation_test._tokenizer(trap_templates.ALL['separator'].source)
LIMITS = play_lib.Limits(
  turns=4, turn_tokens=12, episode_tokens=40, context_tokens=400
)
RECORDS = [
  {'prompt': 'a', 'answer': '3', 'index': 7},
  {'prompt': 'b', 'answer': '5', 'index': 9},
]


async def guessing(policy, example, seed):
  """Ends once the answer is said; some episodes fail, others branch."""
  said = 'Guess the number: it is 1 to 9.'
  while True:
    reply = await policy.say(said)
    if reply.text == example['answer']:
      return 1.0
    policy.reward(-0.25)
    if reply.text == '8':
      raise KeyError('no such room')
    if reply.text == '2':
      other = policy.fork()
      await other.say('Was that wise?')
      other.reward(0.1)
    said = 'more' if reply.text < example['answer'] else 'less'


def numbers(request, number):
  """Says a number, by the key of the call."""
  said = str(int(request.keys[number][1]) % 9 + 1)
  return [*TOKENIZER.encode(said), TOKENIZER.eos_ids[0]]


def played(
  environment=guessing, answer=numbers, records=RECORDS, group=4, **changes
) -> Rollout:
  """A rollout; `changes` are those of `play.play`."""
  engine = FakeEngine(answer, engines.Capabilities(entropy=True))
  engine.load(None, 3)
  limits = changes.pop('limits', LIMITS)
  options = sessions.Options(where='here')

  def play(records, index):
    return play_lib.play(
      records,
      index,
      engine,
      TOKENIZER,
      player,
      formats.find('hermes'),
      engines.Sampling(eos_ids=TOKENIZER.eos_ids),
      limits,
      group,
      seed=1,
      rollout=4,
    )

  with sessions.Player({'': environment}, options) as player:
    reward = rewards.WeightedReward(
      'environment', rewards.resolve('environment')
    )
    return playing.collect(records, play, TOKENIZER, [reward], (128, 256))
