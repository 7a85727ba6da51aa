"""Episodes that an engine with a model has drawn, and what is learned of them.

The engine's log-probabilities are those of the learner, turn by turn, and few
programs are compiled for many turns.
"""

import asyncio
import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import rewards
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes import rollout as rollout_lib
from tests import tiny
from tests.compilations import compiled_programs
from tests.data import continuation_test
from tests.data import trap_templates
from tests.learning import METHODS
from tests.learning import make_learner
from tests.learning import make_updater
from tests.learning import score
from tests.learning import spec

TOKENIZER = continuation_test._tokenizer(trap_templates.ALL['separator'].source)
SIZE = TOKENIZER.vocab_size
MODEL = tiny.model(num_layers=1, vocab_size=SIZE)
PARAMS = tiny.params(MODEL)
GROUP = 2
WIDTH = 512
LIMITS = play_lib.Limits(30, 16, 400, 256)
# Every second token ends a turn, as a stop string would.
SAMPLING = engines.Sampling(eos_ids=tuple(range(20, SIZE, 2)))


def environment(turns, forks):
  async def episode(policy, example, seed):
    del seed
    contexts = [policy]
    for turn in range(turns):
      for one in contexts:
        reply = await one.say(f'{example["prompt"]} {turn}')
        one.reward(float(reply.tokens))
      if turn == 0:
        contexts += [policy.fork() for _ in range(forks)]

  return episode


def late(delay, turns=4):
  """Contexts that talk side by side, and whose environment takes its time."""

  async def talk(policy, name):
    for turn in range(turns):
      await asyncio.sleep(delay())
      await policy.say(f'{name} {turn}')

  async def episode(policy, example, seed):
    del seed
    await asyncio.sleep(delay())
    await policy.say(example['prompt'])
    some = [policy, policy.fork(), policy.fork()]
    await asyncio.gather(*map(talk, some, 'abc'))

  return episode


def engine(widest=256):
  made = engines.LocalEngine(
    MODEL, prompt_buckets=(64, widest), completion_buckets=(16,)
  )
  made.load(PARAMS, version=3)
  return made


def play(
  drawing, turns, forks=0, rollout=0, renders=False, made=None, limits=LIMITS
):
  records = [{'prompt': 'a'}, {'prompt': 'the'}]
  options = sessions.Options(where='here')
  made = made or environment(turns, forks)
  with sessions.Player({'': made}, options) as player:
    return play_lib.play(
      records,
      [0, 1],
      drawing,
      TOKENIZER,
      player,
      formats.find('hermes'),
      SAMPLING,
      limits,
      GROUP,
      seed=1,
      rollout=rollout,
      renders=renders,
    )


@functools.cache
def drawn(forks, renders=False):
  """A rollout of three turns in each context."""
  with jax.default_matmul_precision('highest'):
    prompts, played = play(engine(), 3, forks, renders=renders)
  reward = np.arange(len(prompts) * GROUP, dtype=np.float32)
  found = rollout_lib.make_rollout(
    [[one.episode for one in group] for group in played],
    rewards.Scores(reward, reward[:, None], reward >= 0),
    (WIDTH,),
    prompts=prompts,
    prompt_texts=[''] * 2,
    texts=[[''] * GROUP] * 2,
    index=np.arange(2),
  )
  assert not [one.failure for group in played for one in group if one.failure]
  return found


@pytest.mark.long
@pytest.mark.parametrize('forks', [0, 1])
@pytest.mark.parametrize('renders', [False, True])
@pytest.mark.parametrize('kind', ['padded', 'packed', 'shared'])
def test_the_learner_finds_what_the_engine_said_turn_by_turn(
  kind, renders, forks
):
  rollout = drawn(forks, renders)
  # What an untrained model says is encoded anew as other ids.
  assert (rollout.previous is not None) == bool(forks or renders)
  learner = make_learner(METHODS['grpo'](), num_layers=1, vocab_size=SIZE)
  rows = dataclasses.replace(
    spec(kind, 8, pack_tokens=1024), prompt_buckets=(64,)
  )
  made = make_updater(learner, PARAMS, rows)
  with jax.default_matmul_precision('highest'):
    found = np.asarray(score(made, PARAMS, rollout).logp)
  mask, turn = rollout.batch.mask, rollout.batch.extras['turn']
  assert rollout.batch.logp_sampler is not None
  assert turn.max() == (4 if forks else 2)
  for number in range(turn.max() + 1):
    some = mask & (turn == number)
    assert some.any(axis=-1).any()
    np.testing.assert_allclose(
      found[some], rollout.batch.logp_sampler[some], atol=1e-5
    )


@pytest.mark.parametrize('renders', [False, True])
def test_who_comes_late_is_not_waited_for_and_draws_the_same_bits(renders):
  drawing, limits = engine(1024), play_lib.Limits(30, 6, 4000, 4000)

  def bits(delay):
    made = late(delay)
    _, played = play(drawing, 0, made=made, renders=renders, limits=limits)
    assert {one.account.ended for group in played for one in group} == {'done'}
    every = [one.episode for group in played for one in group]
    return [
      [
        np.asarray(getattr(one, name)).tobytes()
        for name in ('ids', 'logp', 'entropy', 'turn', 'previous')
      ]
      for one in every
    ]

  draw = random.Random(0)
  first = bits(lambda: 0.0)
  for _ in range(2):
    assert bits(lambda: draw.expovariate(100)) == first


@pytest.mark.parametrize('method', ['grpo', 'entropy'])
def test_what_nobody_chose_has_no_slope(method):
  rollout = drawn(1)
  method = METHODS[method]()
  batch = jax.tree.map(jnp.asarray, rollout.batch)
  batch = batch._replace(logp_ref=batch.logp_sampler - 0.2)
  credited, state = losses.credit(method, batch, method.init())
  ready = losses.prepare(method, credited, state)
  entropy = jnp.ones(batch.mask.shape)

  def loss(logp, entropy):
    return losses.surrogate_loss(method, logp, ready, state, entropy)[0]

  slopes = jax.jit(jax.grad(loss, (0, 1)))(batch.logp_sampler - 0.1, entropy)
  for slope in map(np.asarray, slopes):
    assert not slope[~rollout.batch.mask].any()
  assert np.asarray(slopes[0])[rollout.batch.mask].any()


@pytest.mark.long
def test_eight_turns_need_few_programs():
  drawing = engine(260)  # a width that no other test compiles
  counts = []
  for rollout in range(2):
    with compiled_programs() as names:
      prompts, played = play(drawing, 8, rollout=rollout)
    counts.append(len(names))
    for group in played:
      for one in group:
        assert one.episode.turn is not None and one.episode.turn.max() == 7
  # The pieces that are read, and what draws, for each width.
  assert counts[1] == 0, names
  assert 0 < counts[0] <= 12
