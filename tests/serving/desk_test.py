"""A desk draws for many at once what each would get alone."""

import asyncio
import queue
import threading

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.serving import answering
from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import wire
from grpo_jax.serving.app import Client
from tests import fake_engine
from tests.serving import reading_test
from tests.serving import served

TOKENIZER = served.TOKENIZER
ENDS = TOKENIZER.eos_ids
CHAT = ({'role': 'user', 'content': 'a3 is it'},)
GREEDY = {'temperature': 0.0}
LONG = engines.Sampling(ENDS, min_tokens=90)


@pytest.fixture(scope='module')
def desk():
  with served.desk() as found:
    yield found


def request(ids, limit, key=(0, 0), **sampling):
  keys = np.array([key], np.uint32)
  return engines.Request(ids, keys, limit, engines.Sampling(ENDS, **sampling))


def nothing_is_held(found):
  """No job, no row and no context, but for the one that keeps the caches."""
  queue = found.engine._queue
  assert not found.desk._jobs
  if queue is None:
    return
  rows = [one for pool in queue._pools.values() for one in pool.contexts if one]
  assert len(rows) <= 1 and len(queue._contexts) <= 1 and not queue._waiting


def test_what_is_drawn_is_what_an_engine_draws_alone(desk):
  asked = [
    request([5, 6, 7], 20, (1, 2)),
    request([9] * 30, 20, (3, 4), temperature=0.7),
    request([5, 6], 30, (1, 2), temperature=0.0),
    request([8, 8, 8], 12, (5, 4), top_k=3),
    request([8, 9, 8], 12, (5, 4), top_k=3, top_p=0.9, min_p=0.01),
    request([7] * 60, 30, (6, 6)),
  ]

  async def all_at_once():
    return await asyncio.gather(*map(desk.desk.draw, asked))

  for one, (found, _) in zip(asked, served.run(all_at_once())):
    key, how = tuple(one.keys[0].tolist()), (one.limit, one.sampling)
    alone = served.generated(one.ids, *how, key)
    np.testing.assert_array_equal(found.ids, alone.ids)
    np.testing.assert_allclose(found.logp, alone.logp, atol=1e-5)
    assert found.finish == alone.finish
    alone = served.generated(one.ids, *how, key, calls=served.ROWS)
    np.testing.assert_array_equal(found.logp, alone.logp)
  nothing_is_held(desk)


def chat(desk, heard=None, messages=CHAT, **fields):
  fields.setdefault('sampling', GREEDY)
  asked = wire.Chat(messages, **fields)
  return served.run(desk.service.chat(asked, Client(), heard))


def complete(desk, prompt, heard=None, **fields):
  fields.setdefault('sampling', GREEDY)
  asked = wire.Completion(prompt, **fields)
  return served.run(desk.service.complete(asked, Client(), heard))


def test_greedy_answers_are_those_of_generate_bit_for_bit(desk):
  ids = TOKENIZER.begin_chat(CHAT)
  answer = chat(desk, max_tokens=20, return_token_ids=True, logprobs=0)
  greedy = engines.Sampling(ENDS, temperature=0.0)
  alone = served.generated(ids, 20, greedy)
  assert answer.ids == tuple(alone.ids.tolist())
  alone = served.generated(ids, 20, greedy, calls=served.ROWS)
  assert answer.ids == tuple(alone.ids.tolist())
  logp = np.array([one.logp for one in answer.logprobs], np.float32)
  np.testing.assert_array_equal(logp, alone.logp)
  assert answer.prompt_ids == tuple(ids) and answer.read == len(ids)
  assert answer.text == TOKENIZER.decode(alone.ids).strip()
  assert answer.tokens == len(alone.ids) and answer.model == 'policy@7'
  (text,) = complete(desk, (tuple(ids),), max_tokens=20, return_token_ids=True)
  assert text.ids == answer.ids and text.text == TOKENIZER.decode(alone.ids)


def test_two_clients_at_once_get_what_each_gets_alone(desk):
  chats = [
    wire.Chat(
      ({'role': 'user', 'content': text},),
      max_tokens=24,
      sampling={'seed': n, **sampling},
      return_token_ids=True,
    )
    for n, (text, sampling) in enumerate(
      [('a', {}), ('b', {'temperature': 0.5}), ('a3', {'top_k': 4}), ('c', {})]
      * 3
    )
  ]

  async def together():
    ask = lambda one: desk.service.chat(one, Client(), None)
    return await asyncio.gather(*map(ask, chats))

  answers = served.run(together())
  for one, answer in zip(chats, answers):
    alone = served.run(desk.service.chat(one, Client(), None))
    assert alone == answer
  assert len({answer.ids for answer in answers}) > 8
  nothing_is_held(desk)


def test_a_seed_draws_the_same_again_and_no_seed_something_else(desk):
  ask = lambda **sampling: (
    chat(desk, max_tokens=24, sampling=sampling, return_token_ids=True).ids
  )
  assert ask(seed=3) == ask(seed=3) != ask(seed=4)
  assert len({ask() for _ in range(3)}) > 1
  first, second = complete(
    desk, ('ab', 'ab'), sampling={'seed': 3}, return_token_ids=True
  )
  assert first.ids != second.ids  # of one request each has its own key


def joined(pieces):
  names = wire.Piece._fields
  text, thought, *rest = (
    [getattr(piece, name) for piece in pieces] for name in names
  )
  return wire.Piece(
    ''.join(text), ''.join(thought), *(sum(some, ()) for some in rest)
  )


@pytest.mark.parametrize('seed', range(4))
def test_what_streams_joined_is_the_whole(desk, seed):
  pieces = []
  fields = dict(
    max_tokens=30,
    sampling={'seed': seed},
    return_token_ids=True,
    logprobs=0,
    stop=('m', 'xy'),
  )
  answer = chat(desk, pieces.append, **fields)
  whole = joined(pieces)
  assert (whole.text, whole.ids) == (answer.text, answer.ids)
  assert whole.logprobs == tuple(answer.logprobs)
  assert answer == chat(desk, **fields) and 'm' not in answer.text
  assert len(pieces) > 2 or answer.tokens < 3


def test_completions_stream_each_with_its_number(desk):
  pieces = {0: [], 1: []}
  hear = lambda n, piece: pieces[n].append(piece)
  fields = dict(max_tokens=16, echo=True, logprobs=2)
  answers = complete(desk, ('ab', 'cd'), hear, **fields)
  for n, answer in enumerate(answers):
    whole = joined(pieces[n])
    assert whole.text == answer.text and answer.text.startswith(('ab', 'cd')[n])
    assert [x[:3] for x in whole.logprobs] == [x[:3] for x in answer.logprobs]
  assert answers == complete(desk, ('ab', 'cd'), **fields)


def test_limits(desk):
  assert chat(desk, max_tokens=3).finish == 'length'
  assert chat(desk, sampling={'seed': 1}).tokens <= 24
  (text,) = complete(desk, ('ab',))
  assert text.tokens <= 16
  long = tuple([9] * (served.CONTEXT - 2))
  (text,) = complete(desk, (long,), max_tokens=50)
  assert text.tokens <= 2 and text.read == len(long)
  with pytest.raises(wire.Refused, match='at most 192 can be read') as caught:
    complete(desk, ((9,) * served.CONTEXT,), max_tokens=1)
  assert caught.value.code == 'context_length_exceeded'
  nothing_is_held(desk)


def own_scores(desk, ids):
  """By the function that the learner calls."""
  tokens = np.array([[ids[1:]]], np.int32)
  length = np.full((1, 1), len(ids) - 1, np.int32)
  rows = layout.padded_rows([ids[:1]], tokens, length, len(ids))
  model = served.model()
  return np.asarray(models.score(model, desk.params, rows).logp)[0, 0]


@pytest.mark.parametrize('most', [0, 1, 5])
def test_echoed_log_probabilities_are_those_of_the_learner(desk, most):
  ids = tuple(TOKENIZER.encode('how much is 23 or 4'))
  (answer,) = complete(
    desk, (ids,), max_tokens=most, echo=True, logprobs=1, return_token_ids=True
  )
  first, *rest = answer.logprobs
  assert first.logp is None and answer.tokens == len(answer.ids) <= most
  expected = own_scores(desk, [*ids, *answer.ids])
  found = np.array([one.logp for one in rest])
  np.testing.assert_allclose(found, expected, atol=1e-5)
  for n, one in enumerate(rest[len(ids) - 1 :]):  # greedy: the likeliest
    assert one.logp == one.top[0].logp
    assert answer.ids[n] == TOKENIZER.backend.token_to_id(one.text)
  text = ''.join(one.text for one in answer.logprobs)
  assert [one.offset for one in answer.logprobs] == [
    len(text[:n]) for n in range(len(text)) if n < len(answer.logprobs)
  ] or len(text) != len(answer.logprobs)
  assert answer.text.startswith('how much is 23 or 4')


def test_temperatures_are_those_of_who_draws(desk):
  """A prompt was drawn by nobody: it is scored at the temperature 1."""
  fields = dict(max_tokens=6, return_token_ids=True)
  sampling = {'temperature': 0.5, 'seed': 1}
  ask = lambda **more: complete(
    desk, ('ab3',), sampling=sampling, **fields, **more
  )
  ((one,), (echoed,), (top,)) = (
    ask(logprobs=0), ask(logprobs=0, echo=True), ask(logprobs=3, echo=True),
  )  # fmt: skip
  drawn = [x.logp for x in one.logprobs]
  np.testing.assert_array_equal([x.logp for x in echoed.logprobs[3:]], drawn)
  np.testing.assert_allclose(
    [x.logp for x in top.logprobs[3:]], drawn, atol=1e-5
  )
  own = own_scores(desk, TOKENIZER.encode('ab3'))
  for answer in (echoed, top):
    found = [x.logp for x in answer.logprobs[1:3]]
    np.testing.assert_allclose(found, own, atol=1e-5)


def refused(desk, said, **fields):
  with pytest.raises(wire.Refused, match=said) as caught:
    chat(desk, **fields)
  assert caught.value.status == 400
  nothing_is_held(desk)


def test_what_cannot_be_answered_is_refused(desk):
  refused(desk, 'temperature=0.0001', sampling={'temperature': 1e-4})
  refused(desk, 'top_p=0', sampling={'top_p': 0.0})
  with pytest.raises(wire.Refused, match='none of the tokenizer'):
    complete(desk, ((10_000,),))
  with pytest.raises(wire.Refused) as caught:
    served.run(desk.service.control('reward', {}, ''))
  assert caught.value.status == 404


def test_tools_of_an_unknown_format_are_refused():
  tool = {'type': 'function', 'function': {'name': 'add'}}
  with served.desk(call_format=None) as found:
    refused(found, 'a format that is not known', tools=(tool,))
    chat(found, max_tokens=2)


def test_calls_of_tools_and_reasoning():
  tokenizer = reading_test.BYTES
  text = f'<think>Hm, 1.</think>I add. {reading_test.CALL}'
  said = [*tokenizer.encode(text), *tokenizer.eos_ids]
  engine = fake_engine.FakeEngine(lambda *_: said, engines.Capabilities())
  engine.load(None, 3)
  with desk_lib.Desk(engine, None, 2) as found:
    service = answering.Answering(
      found, tokenizer, 'policy@3', engines.Sampling(tokenizer.eos_ids), 200,
      1000, answering.call_format('hermes', tokenizer),
    )  # fmt: skip
    pieces = []
    asked = wire.Chat(CHAT, (reading_test.ADD,))
    ask = lambda heard: served.run(service.chat(asked, Client(), heard))
    answer, other = ask(None), ask(pieces.append)
  assert (answer.text, answer.reasoning) == ('I add.', 'Hm, 1.')
  assert answer.finish == 'tool_calls' and answer.tokens == len(said)
  (call,) = answer.calls
  assert (call.name, call.arguments) == ('add', {'a': 1})
  assert call.id.startswith('call_') and call.id != other.calls[0].id
  whole = joined(pieces)
  assert whole[:3] == (other.text, other.reasoning, other.calls)


def test_chats_need_a_template():
  plain = TOKENIZER.with_format(type(TOKENIZER.prompt_format)())
  with served.desk(plain) as found:
    refused(found, 'are no chats')
    assert complete(found, ('ab',))[0].read == 2


def test_who_goes_away_frees_what_is_held():
  with served.desk(sampling=LONG) as found:
    check_leaving(found)


def check_leaving(desk):
  async def leave(after):
    heard = asyncio.Event()
    fields = dict(max_tokens=100, sampling={'seed': 1})
    task = asyncio.ensure_future(
      desk.service.chat(
        wire.Chat(CHAT, **fields), Client(), lambda _: heard.set()
      )
    )
    if after:
      await heard.wait()
    else:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  async def many():
    await asyncio.gather(*(leave(n % 2) for n in range(20)))
    # Behind all that was given up.
    await desk.service.chat(wire.Chat(CHAT, max_tokens=2), Client(), None)

  served.run(many())
  nothing_is_held(desk)


def test_a_thousand_requests_leave_nothing_behind():
  before = threading.active_count()
  with served.desk() as found:
    draw = np.random.default_rng(3)

    async def one(n):
      limit, ids = int(draw.integers(1, 4)), draw.integers(5, 40, 4).tolist()
      task = asyncio.ensure_future(
        found.desk.draw(request(ids, limit, (1, n)), lambda _: None)
      )
      if n % 10 == 0:
        await asyncio.sleep(draw.uniform(0, 0.01))
        task.cancel()
      return await asyncio.gather(task, return_exceptions=True)

    async def all_of_them():
      for first in range(0, 1000, 50):
        await asyncio.gather(*map(one, range(first, first + 50)))

    served.run(all_of_them())
    nothing_is_held(found)
    assert found.desk._inbox.empty()
  assert found.engine._queue is None  # at its end not even the caches
  assert threading.active_count() == before


def test_a_fault_of_the_engine_fails_its_requests_alone(monkeypatch):
  fails, completed = [], engines.LocalEngine.completed

  def failing(self, every_tokens=None):
    for turn in completed(self, every_tokens):
      if fails:
        raise fails.pop()
      yield turn

  monkeypatch.setattr(engines.LocalEngine, 'completed', failing)
  with served.desk() as found:
    whole = chat(found, max_tokens=4, return_token_ids=True).ids
    fails += [RuntimeError('out of memory')] * 2
    for _ in range(2):
      with pytest.raises(RuntimeError, match='out of memory'):
        chat(found, max_tokens=4)
    assert chat(found, max_tokens=4, return_token_ids=True).ids == whole
    nothing_is_held(found)


def test_a_desk_that_is_closed_refuses():
  async def late(found):
    waiting = asyncio.ensure_future(
      found.service.chat(wire.Chat(CHAT, max_tokens=100), Client(), None)
    )
    await asyncio.sleep(0.05)
    await asyncio.to_thread(found.desk.__exit__)
    return await asyncio.gather(waiting, return_exceptions=True)

  with served.desk(sampling=LONG) as found:
    (error,) = served.run(late(found))
    assert isinstance(error, wire.Refused) and error.status == 503
    with pytest.raises(wire.Refused, match='is ending'):
      chat(found)
    with pytest.raises(desk_lib.Closed):
      served.run(found.desk.score([1, 2]))


def test_what_comes_while_a_desk_ends_is_refused():
  class Late:
    """An inbox: who puts something there is overtaken by the end."""

    def __init__(self, found):
      self._found, self._inbox = found, found.desk._inbox

    def put(self, what):
      if what is not None:
        found.desk.__exit__()
      self._inbox.put(what)

    def __getattr__(self, name):
      return getattr(self._inbox, name)

  async def asked(wanted):
    async with asyncio.timeout(20):
      await wanted

  for ask in (
    lambda desk: desk.score([1, 2]),
    lambda desk: desk.know('a', lambda: None),
    lambda desk: desk.pause(),
  ):
    with served.desk() as found:
      found.desk._inbox = Late(found)
      with pytest.raises(desk_lib.Closed):
        served.run(asked(ask(found.desk)))


def test_who_refuses_late_waits_for_nothing():
  """The end of a desk, and whoever asks it then, empty one inbox."""

  class Shared(queue.SimpleQueue):
    """Another thread takes what this one has just seen."""

    def empty(self):
      is_empty = super().empty()
      self.get_nowait()
      return is_empty

  with served.desk() as found:
    pass
  found.desk._inbox = Shared()
  found.desk._inbox.put(None)
  thread = threading.Thread(target=found.desk._refuse_waiting, daemon=True)
  thread.start()
  thread.join(10)
  assert not thread.is_alive()


def test_ranks_are_not_promoted():
  assert jax.config.jax_numpy_rank_promotion == 'raise'
