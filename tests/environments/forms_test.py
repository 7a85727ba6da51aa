"""The forms of an environment: what they become, and what always is closed."""

import asyncio
from collections.abc import Callable
import functools
import sys
import threading
from typing import Any

import numpy as np
import pytest

from grpo_jax.environments import base
from grpo_jax.environments import forms
from grpo_jax.environments import playing
from grpo_jax.environments import tools
from tests.environments import scripted

EXAMPLE = {'prompt': '1+1=', 'answer': '2'}


def play(
  environment, replies, example=EXAMPLE, kwargs=None, times=1, **options
):
  """What the last of some episodes returned, and its policy."""
  made = forms.resolve(environment, kwargs)

  async def episodes():
    plays = made.make()
    try:
      for seed in range(7, 7 + times):
        policy = scripted.Scripted(replies, tools=made.tools, **options)
        reward = await plays(policy, example, seed)
      return reward, policy
    finally:
      await plays.close()

  return asyncio.run(episodes())


def texts(policy):
  return [one['content'] for one in policy.context]


# Form A: a function.
async def later(policy, example):
  reply = await policy.say(example['prompt'])
  if reply.text != example['answer']:
    reply = await policy.say('no', {'role': 'user', 'content': 'try'})
  return reply.text == example['answer']


def now(policy, example):
  reply = policy.say(example['prompt'])
  if reply.text != example['answer']:
    reply = policy.say('no', {'role': 'user', 'content': 'try'})
  return np.float32(reply.text == example['answer'])


class Callable_:
  async def __call__(self, policy, example):
    return await later(policy, example)


def wrapped(
  policy, example
):  # as by a decorator: nothing tells that it is async
  return later(policy, example)


@pytest.mark.parametrize('episode', [later, now, Callable_(), wrapped])
def test_a_function_plays(episode):
  reward, policy = play(episode, ['3', '2'])
  assert reward == 1.0 and type(reward) is float
  assert texts(policy) == ['1+1=', '3', 'no', 'try', '2']
  assert play(episode, ['3', '4'])[0] == 0.0


def test_a_function_may_take_a_seed_and_arguments():
  async def seeded(policy, example, seed, *, scale=1):
    return seed * scale

  def seeded_now(policy, example, scale=1, seed=0):
    return seed * scale

  for one in (seeded, seeded_now, functools.partial(seeded, scale=2)):
    assert play(one, [])[0] == 7 * (
      2 if one.__class__ is functools.partial else 1
    )
    assert play(one, [], kwargs={'scale': 3})[0] == 21
  assert play(seeded_now, [], kwargs={'seed': 1})[0] == 1


def test_a_sync_function_can_fork_and_reward():
  def episode(policy, example):
    policy.say('a')
    other = policy.fork()
    other.say('b')
    policy.say('c')
    policy.reward(0.5)
    other.reward(2)
    policy.reward(1, turn=0)

  reward, policy = play(episode, ['x', 'y', 'z'])
  assert reward is None and policy.rewards == {2: 0.5, 1: 2.0, 0: 1.0}
  assert texts(policy) == ['a', 'x', 'c', 'z']


def test_a_sync_function_ends_with_its_episode():
  """Cancelled while it waits for the policy, which is asked nothing more."""
  ended = threading.Event()
  seen = []

  def episode(policy, example):
    try:
      policy.say('a')
    except base.Ended:
      seen.append('ended')
    try:
      policy.say('b')
    finally:
      ended.set()

  async def cancelled():
    policy = scripted.Scripted(['x'], delay=600)
    task = asyncio.ensure_future(forms.resolve(episode).make()(policy, {}, 0))
    while not policy.context:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    while not ended.is_set():
      await asyncio.sleep(0.001)
    return policy

  policy = asyncio.run(cancelled())
  assert seen == ['ended'] and texts(policy) == ['a']


def test_no_episode_sees_what_another_did_to_its_example():
  async def spoils(policy, example):
    example['list'].append(1)
    example['new'] = 1
    return len(example['list'])

  example = {'list': []}
  assert play(spoils, [], example, times=3)[0] == 1.0
  assert example == {'list': []}


@pytest.mark.parametrize('value', [float('nan'), float('inf'), 'high', [1], {}])
def test_what_is_no_reward_is_refused(value):
  async def returns(policy, example):
    return value

  with pytest.raises(ValueError, match="'returns' returned is .*finite number"):
    play(returns, [])


# Form B: reset and step.
class Guess:
  """Higher or lower; each method is written down."""

  log: list[Any] = []
  number = 3

  def __init__(self, number=3):
    self.number = number
    self.note('made')

  def note(self, *what):
    Guess.log.append((*what, threading.current_thread()))

  def reset(self, example, seed):
    self.note('reset', example['answer'], seed)
    return 'guess'

  def step(self, action):
    self.note('step', action.text)
    right = action.text == str(self.number)
    return base.Step('no', 1.0 if right else -0.5, done=right)

  def close(self):
    self.note('closed')


class GuessLater(Guess):
  async def reset(self, example, seed):
    await asyncio.sleep(0)
    return super().reset(example, seed)

  async def step(self, action):
    return super().step(action)

  async def close(self):
    super().close()


class GuessMixed(Guess):
  async def step(self, action):
    return super().step(action)


@pytest.fixture(autouse=True)
def no_log():
  Guess.log = []


def logged():
  return [one[0] for one in Guess.log]


@pytest.mark.parametrize('kind', [Guess, GuessLater, GuessMixed])
def test_a_class_with_steps_plays(kind):
  reward, policy = play(kind, ['1', '3'], times=2)
  assert reward is None and policy.rewards == {0: -0.5, 1: 1.0}
  assert texts(policy) == ['guess', '1', 'no', '3']
  once = ['made', 'reset', 'step', 'step', 'closed']
  assert logged() == once * 2
  assert [one[:3] for one in Guess.log if one[0] == 'reset'] == [
    ('reset', '2', 7), ('reset', '2', 8),
  ]  # fmt: skip
  # What blocks is called in one thread, always the same: some code needs that.
  used = {one[-1] for one in Guess.log[:5] if one[0] != 'step'}
  assert len(used) == 1
  here = threading.main_thread() in used
  assert here == (kind is GuessLater)


def test_a_class_gets_arguments():
  _, policy = play(Guess, ['5'], kwargs={'number': 5})
  assert policy.rewards == {0: 1.0}
  made = functools.partial(Guess, number=4)
  assert play(made, ['4'])[1].rewards == {0: 1.0}
  assert play(lambda: Guess(6), ['6'])[1].rewards == {0: 1.0}


def test_observations_may_be_messages():
  class Talks:
    def reset(self, example, seed):
      return [{'role': 'system', 'content': 'Be.'}, 'begin']

    def step(self, action):
      return base.Step({'role': 'tool', 'content': action.text}, done=False)

  made = forms.resolve(Talks).make()
  policy = scripted.Scripted(['a', 'b'])
  with pytest.raises(base.Ended):
    asyncio.run(made(policy, {}, 0))
  assert policy.context[:4] == [
    {'role': 'system', 'content': 'Be.'},
    {'role': 'user', 'content': 'begin'},
    {'role': 'assistant', 'content': 'a'},
    {'role': 'tool', 'content': 'a'},
  ]


@pytest.mark.parametrize(
  'returned, said',
  [
    (None, 'reset or step of .* returned None, but a text'),
    ([], r'returned \[\]'),
    (3, 'returned 3'),
    ([{'role': 'user'}], 'but a text'),
    ({'content': 'x'}, 'but a text'),
  ],
)
def test_what_is_no_observation_is_refused(returned, said):
  class Odd(Guess):
    def reset(self, example, seed):
      return returned

  with pytest.raises(ValueError, match=said):
    play(Odd, ['1'])
  assert logged() == ['made', 'closed']


@pytest.mark.parametrize(
  'step, said',
  [
    (('no', 0.0, False), 'returned a tuple, but a Step is required'),
    (base.Step('no', float('nan')), 'reward of a step .* is nan'),
    (base.Step('no', None), 'is None, but a finite number'),  # type: ignore
  ],
)
def test_what_is_no_step_is_refused(step, said):
  class Odd(Guess):
    def step(self, action):
      return step

  with pytest.raises(ValueError, match=said):
    play(Odd, ['1'])
  assert logged() == ['made', 'reset', 'closed']


# Form C: tools.
class Shop(Guess):
  goods = 0

  def reset(self, example, seed):
    self.note('reset')

  @tools.tool
  def search(self, query: str, limit: int = 5) -> str:
    """Finds goods."""
    return f'{query} {limit}'

  step = None  # not that of Guess

  @tools.tool
  async def buy(self, count: int) -> str:
    """Buys."""
    self.goods += count
    return f'has {self.goods}'

  @tools.tool
  @staticmethod
  def price() -> float:
    """The price of all goods."""
    return 2.5

  def reward(self):
    self.note('reward')
    return self.goods


BUY = '<tool_call>{"name": "buy", "arguments": {"count": 2}}</tool_call>'
BAD = '<tool_call>{"name": "by"}</tool_call>'


def test_a_class_with_tools_plays_until_a_turn_has_no_call():
  made = forms.resolve(Shop)
  names = [one['function']['name'] for one in made.tools]
  assert names == ['search', 'buy', 'price']
  assert made.tools[1]['function']['parameters'] == {
    'type': 'object', 'properties': {'count': {'type': 'integer'}},
    'required': ['count'],
  }  # fmt: skip
  price = '<tool_call>{"name": "price"}</tool_call>'
  reward, policy = play(
    Shop, [BUY + BAD + BUY, price, 'done', BUY], format='hermes', times=2
  )
  assert reward == 4.0
  read = [one for one in policy.context if one['role'] == 'tool']
  assert [one['content'] for one in read] == [
    'has 2',
    "Error: There is no tool 'by' (did you mean 'buy'?); there are: search, "
    'buy, price.',
    'has 4',
    '2.5',
  ]
  assert policy.context[0] == {'role': 'user', 'content': '1+1='}
  assert texts(policy)[-1] == 'done'
  assert logged() == ['made', 'reset', 'reward', 'closed'] * 2


def test_a_limit_asks_the_environment_as_it_stands():
  reward, _ = play(Shop, [BUY], format='hermes')
  assert reward == 2.0 and logged()[-1] == 'closed'

  def fine() -> str:
    return 'fine'

  call = scripted.calls(('fine', {}))
  with pytest.raises(base.Ended):
    play(fine_tool := tools.tool(fine), [call])
  assert forms.resolve(fine_tool).name == 'fine'


def add(a: int, b: int) -> int:
  """Adds."""
  return a + b


TOOLS = [add]


@pytest.mark.parametrize(
  'environment', [[add], (add, 'calculator'), f'{__name__}:TOOLS']
)
def test_tools_alone_play(environment):
  calls = scripted.calls(('add', {'a': 1, 'b': 1}))
  reward, policy = play(environment, [calls, '2'])
  assert reward is None and texts(policy) == ['1+1=', '', '2', '2']
  messages = [
    {'role': 'system', 'content': 's'},
    {'role': 'user', 'content': 'u'},
  ]
  _, policy = play(environment, ['2'], {'prompt': messages})
  assert policy.context[:2] == messages
  with pytest.raises(ValueError, match="need a field 'prompt' .*'answer'"):
    play(environment, [], {'answer': 1})


def test_the_calculator_is_there_by_its_name():
  calls = scripted.calls(('calculator', {'expression': '2*21'}))
  _, policy = play('calculator', [calls, 'so'])
  assert texts(policy)[2] == '42'


# Whatever happens: closed.
def raising(error):
  def method(self, *args):
    raise error

  async def method_later(self, *args):
    await asyncio.sleep(0)
    raise error

  return method, method_later


ERRORS = (
  ValueError('x'), SystemExit(3), KeyboardInterrupt(), base.Ended('turns'),
  base.Unavailable('away'), StopIteration(),
)  # fmt: skip


@pytest.mark.parametrize('error', ERRORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize('method', ['reset', 'step'])
@pytest.mark.parametrize('later', [False, True], ids=['sync', 'async'])
def test_it_is_closed_when_its_code_raises(error, method, later):
  kind = type('Bad', (GuessLater if later else Guess,), {
    method: raising(error)[later]
  })  # fmt: skip
  with pytest.raises(Exception) as caught:  # and nothing that ends a process
    play(kind, ['1', '3'])
  if isinstance(error, Exception) and type(error) is not StopIteration:
    assert caught.value is error
  else:
    assert type(error).__name__ in str(caught.value)
  assert logged()[0] == 'made' and logged()[-1] == 'closed'
  assert logged().count('closed') == 1


@pytest.mark.parametrize('kind', [Guess, GuessLater, Shop])
@pytest.mark.parametrize('error', [base.Ended('turns'), RuntimeError('away')])
def test_it_is_closed_when_the_policy_raises(kind, error):
  def says(context):
    raise error

  if kind is Shop and isinstance(error, base.Ended):
    assert play(kind, says)[0] == 0.0
  else:
    with pytest.raises(type(error)):
      play(kind, says)
  assert logged()[0] == 'made' and logged()[-1] == 'closed'


@pytest.mark.parametrize('kind', [Guess, GuessLater, Shop])
def test_it_is_closed_when_the_episode_is_cancelled(kind):
  async def cancelled():
    policy = scripted.Scripted(['1'], delay=600)
    task = asyncio.ensure_future(forms.resolve(kind).make()(policy, EXAMPLE, 0))
    while not policy.context:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(cancelled())
  assert logged() == ['made', 'reset', 'closed']


def test_it_is_closed_when_it_is_cancelled_while_it_is_made(monkeypatch):
  """The thread makes it, though nobody waits any more."""
  monkeypatch.setattr(playing, '_CLOSE_SECS', 60.0)
  begun, go = threading.Event(), threading.Event()

  class Slow(Guess):
    def __init__(self):
      begun.set()
      assert go.wait(60)
      super().__init__()

  async def cancelled():
    policy = scripted.Scripted(['1'])
    task = asyncio.ensure_future(forms.resolve(Slow).make()(policy, EXAMPLE, 0))
    while not begun.is_set():
      await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(cancelled())
  assert logged() == ['made', 'closed']


def test_a_step_that_hangs_holds_nobody_up(monkeypatch):
  monkeypatch.setattr(playing, '_CLOSE_SECS', 0.01)
  begun, go, closed = threading.Event(), threading.Event(), threading.Event()

  class Hangs(Guess):
    def step(self, action):
      begun.set()
      go.wait(60)

    def close(self):
      super().close()
      closed.set()

  async def cancelled():
    policy = scripted.Scripted(['1'])
    task = asyncio.ensure_future(
      forms.resolve(Hangs).make()(policy, EXAMPLE, 0)
    )
    while not begun.is_set():
      await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(cancelled())
  assert not closed.is_set()
  go.set()  # and if the step ever returns, what it was of is closed
  assert closed.wait(60)


def test_a_constructor_that_raises_is_told():
  class Never(Guess):
    def __init__(self):
      raise OSError('no display')

  with pytest.raises(OSError, match='no display'):
    play(Never, ['1'])
  assert logged() == []


def test_an_error_in_close_is_told_if_nothing_else_was_wrong():
  class Bad(Guess):
    close = raising(OSError('cannot close'))[0]

  with pytest.raises(OSError, match='cannot close'):
    play(Bad, ['3'])
  Bad.reset = raising(ValueError('first'))[0]
  with pytest.raises(ValueError, match='first'):
    play(Bad, ['3'])


# Reuse.
class Kept(Guess):
  reusable = True


def test_a_reusable_class_is_made_once_and_closed_at_the_end():
  play(Kept, ['3'], times=3)
  assert logged() == ['made', *['reset', 'step'] * 3, 'closed']
  Guess.log = []

  async def fails_between():
    plays = forms.resolve(Kept).make()
    await plays(scripted.Scripted(['3']), EXAMPLE, 0)
    with pytest.raises(base.Ended):
      await plays(scripted.Scripted([]), EXAMPLE, 0)
    with pytest.raises(ZeroDivisionError):
      await plays(scripted.Scripted(lambda _: 1 / 0), EXAMPLE, 0)
    await plays(scripted.Scripted(['3']), EXAMPLE, 0)
    await plays.close()
    await plays.close()

  asyncio.run(fails_between())  # what has failed plays nothing more
  assert logged() == [
    'made', 'reset', 'step', 'reset', 'reset', 'closed',
    'made', 'reset', 'step', 'closed',
  ]  # fmt: skip


def test_a_reusable_instance_plays_one_episode_at_a_time():
  class Alone(Kept):
    playing = 0

    async def reset(self, example, seed):
      assert not self.playing
      self.playing += 1
      await asyncio.sleep(0)
      return 'guess'

    async def step(self, action):
      self.playing -= 1
      return base.Step('', 1.0, True)

  made = forms.resolve(Alone())

  async def together():
    plays = [made.make() for _ in range(4)]
    policies = [scripted.Scripted(['3'], delay=0.001) for _ in plays]
    await asyncio.gather(
      *(one(policy, {}, 0) for one, policy in zip(plays, policies))
    )
    await asyncio.gather(*(one.close() for one in plays))
    return policies

  assert [one.rewards for one in asyncio.run(together())] == [{0: 1.0}] * 4
  with pytest.raises(ZeroDivisionError):
    asyncio.run(made.make()(scripted.Scripted(lambda _: 1 / 0), {}, 0))
  assert logged() == ['made']  # who has made it closes it


# What is none.
class Nothing:
  pass


class OnlyStep:
  def step(self, action): ...


class Both(Guess):
  @tools.tool
  def look(self) -> str: ...


class BadReset(Guess):
  def reset(self, example): ...


class BadStep(Guess):
  def step(self): ...


class BadClose(Guess):
  def close(self, now): ...


class BadReward(Shop):
  def reward(self, example): ...


class Untyped:
  @tools.tool
  def look(self, at): ...


class Stars:
  @tools.tool
  def look(self, *at: int): ...


def one_argument(policy): ...
def three(policy, example, third): ...
async def nobody(): ...
def broken_factory() -> Any:
  raise OSError('no display')


def other_add() -> Callable[..., Any]:
  def add(a: int) -> str: ...

  return add


@pytest.mark.parametrize(
  'environment, kwargs, said',
  [
    (Nothing, {}, "'Nothing' has neither a method step.* nor .*@tool"),
    (OnlyStep, {}, r"'OnlyStep' has the method step, but no reset\(example"),
    (Both, {}, "'Both' has the method step and the tools look; keep one"),
    (BadReset, {}, r"reset of .* takes \(self, example\), but is called with"),
    (BadStep, {}, r'step of .*\(self\), but is called with \(self, action\)'),
    (BadClose, {}, 'close of .*now'),
    (BadReward, {}, 'reward of .*example'),
    (Untyped, {}, "'at' of the tool 'look' has no type"),
    (Stars, {}, r"'look' takes \*at"),
    (Guess, {'numbr': 1}, r"takes .*, but is called with \(numbr=...\)"),
    (Guess(), {}, 'an instance of Guess, .* give the class Guess'),
    (Shop(), {}, 'an instance of Shop'),
    (Kept(), {'a': 1}, "an instance, which takes no kwargs, but got .'a'."),
    (one_argument, {}, r'takes \(policy\), but is called with'),
    (three, {}, r'takes \(policy, example, third\), but is called with'),
    (later, {'b': 1}, r'but is called with \(policy, example, b=...\)'),
    (nobody, {}, 'takes no arguments and is async'),
    (broken_factory, {}, 'cannot be made .OSError: no display'),
    (lambda: 3, {}, 'has neither'),
    ([], {}, 'an empty list of tools'),
    ([add, other_add()], {}, "two tools with the name 'add'"),
    ([add, 3], {}, 'has 3 among its tools'),
    ([Shop], {}, 'among its tools'),
    ([add], {'a': 1}, 'takes no kwargs'),
    (3, {}, 'is a int, but a name or'),
    (None, {}, 'is a NoneType'),
    ('calculater', {}, r"There is no environment 'calculater' \(did you mean"),
    ('no_module:Thing', {}, "'no_module:Thing' cannot be imported"),
    (f'{__name__}:Nowhere', {}, "has no function 'Nowhere'"),
    (f'{__name__}:EXAMPLE', {}, 'is no function'),
  ],
)  # fmt: skip
def test_what_is_no_environment_is_refused_in_a_sentence(
  environment, kwargs, said
):
  with pytest.raises(ValueError, match=said) as error:
    forms.resolve(environment, kwargs)
  sentence = str(error.value)
  assert '\n' not in sentence and sentence.endswith('.')


def test_nothing_is_made_when_it_is_resolved():
  for one in (Guess, GuessLater, Shop, f'{__name__}:Guess'):
    forms.resolve(one).make()
  assert logged() == []
  assert 'jax' not in {name for name in vars(sys.modules[forms.__name__])}
