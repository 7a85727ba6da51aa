"""Environments that do what none should."""

import asyncio
import contextlib
import functools
import os
import pathlib
import secrets
import signal
import sys
import threading
import time

from grpo_jax.environments.base import Ended
from grpo_jax.environments.base import Step
from grpo_jax.environments.base import Unavailable

_PROCESS = secrets.token_hex(8)  # numbers of processes are those of namespaces


async def good(policy, example):
  """Two turns, and a reward for each."""
  first = await policy.say(f'one {example.get("text", "")}')
  policy.reward(0.25)
  second = await policy.say({'role': 'user', 'content': 'two'})
  policy.reward(0.5)
  return float(len(first.text) + len(second.text))


async def waits(policy, example):
  """It has asked, and waits for the policy, while others end its process."""
  await policy.say('wait')
  return 1.0


class Turns:
  """Its methods are sync: they run in threads."""

  def reset(self, example, seed):
    return 'start'

  def step(self, action):
    return Step('next', 0.5, done=action.text == 'done')

  def close(self):
    pass


class RaisesInReset(Turns):
  def reset(self, example, seed):
    raise KeyError('gold')


class RaisesInStep(Turns):
  def step(self, action):
    raise RuntimeError('lost\nmore lines')


class RaisesInClose(Turns):
  def close(self):
    raise OSError('it is in use')


class ExitsInStep(Turns):
  def step(self, action):
    sys.exit(3)


class StopsIteration(Turns):
  def step(self, action):
    return next(iter(()))


class OneThread(Turns):
  """All its calls are made in one thread, and not in that of the loop."""

  def reset(self, example, seed):
    self._threads = {threading.get_ident()}
    return 'start'

  def step(self, action):
    self._threads.add(threading.get_ident())
    assert threading.current_thread() is not threading.main_thread()
    return Step('next', 1.0 / len(self._threads), action.text == 'done')


release = threading.Event()  # what cannot be ended in the process of the tests


class Kept(Turns):
  """Says how often it was closed, by a file: it is closed with the player."""

  reusable = True

  def reset(self, example, seed):
    self._mark = pathlib.Path(example['mark'])
    return f'start {id(self)}'

  def close(self):
    self._mark.touch()


class HangsInStep(Turns):
  def step(self, action):
    release.wait()


class LoopsInStep(Turns):
  def step(self, action):
    while not release.is_set():
      pass


async def raises_what_cannot_be_said(policy, example):
  class Unsayable(Exception):
    def __str__(self):
      raise ValueError

  raise Unsayable


async def exits(policy, example):
  await policy.say('x')
  sys.exit(3)


async def exits_beside(policy, example):
  async def leave():
    sys.exit('why')

  await asyncio.gather(policy.say('x'), leave())


async def interrupts(policy, example):
  raise KeyboardInterrupt


async def returns_text(policy, example):
  return '1.0'


async def returns_nan(policy, example):
  return float('nan')


async def rewards_nan(policy, example):
  await policy.say('x')
  policy.reward(float('nan'))


async def rewards_too_early(policy, example):
  policy.reward(1.0)


async def rewards_another_turn(policy, example):
  await policy.say('x')
  policy.reward(1.0, turn=7)


async def says_an_object(policy, example):
  await policy.say({'role': 'user', 'content': threading.Lock()})


async def says_no_message(policy, example):
  await policy.say(7)


async def says_nothing(policy, example):
  await policy.say()


async def says_much(policy, example):
  reply = await policy.say('x' * 10_000_000)
  return float(len(reply.text))


async def changes_tools(policy, example):
  await policy.say('x')
  await policy.say('y', tools=[{'type': 'function'}])


async def says_twice_at_once(policy, example):
  await asyncio.gather(policy.say('a'), policy.say('b'))


async def forks_while_it_waits(policy, example):
  asked = asyncio.ensure_future(policy.say('a'))
  await asyncio.sleep(0)
  policy.fork()
  await asked


async def forks(policy, example):
  await policy.say('root')
  both = [policy.fork(), policy.fork()]
  replies = await asyncio.gather(
    *(one.say(f'{k}') for k, one in enumerate(both))
  )
  both[1].reward(0.5)
  return float(len({reply.turn for reply in replies}))


_later: list[asyncio.Task] = []


async def says_after_the_end(policy, example):
  async def later():
    try:
      await asyncio.sleep(1000)
    except asyncio.CancelledError:
      await policy.say('too late')

  _later.append(asyncio.ensure_future(later()))
  await policy.say('x')
  return 1.0


async def _goes_on(policy, swallowed):
  while True:
    with contextlib.suppress(swallowed):
      await policy.say('x')


async def goes_on_after_its_end(policy, example):
  await _goes_on(policy, Ended)


async def outlives_its_time(policy, example):
  try:
    await asyncio.sleep(1000)
  except asyncio.CancelledError:
    return 1.0


async def catches_all(policy, example):
  await _goes_on(policy, BaseException)


async def keeps_its_reward(policy, example):
  try:
    while True:
      await policy.say('x')
  except Ended:
    return 0.75


async def lets_it_pass(policy, example):
  while True:
    await policy.say('x')
    policy.reward(1.0)


async def ends_itself(policy, example):
  raise Ended('my own')


async def sleeps(policy, example):
  await policy.say('x')
  await asyncio.sleep(1000)


async def loops(policy, example):
  await policy.say('x')
  while not release.is_set():
    pass


async def takes_its_time(policy, example):
  await policy.say('x')
  await asyncio.sleep(0.05)
  await policy.say('y')
  return 1.0


async def leaves_the_process(policy, example):
  await policy.say('x')
  os._exit(5)


async def kills_itself(policy, example):
  await policy.say('x')
  os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(1000)


async def eats(policy, example):
  await policy.say('x')
  return float(len([bytearray(1 << 20) for _ in range(1 << 20)]))


async def closes_all(policy, example):
  os.closerange(0, 1 << 12)
  return 1.0


async def writes_everywhere(policy, example):
  await policy.say('x')
  for number in range(1 << 10):
    try:
      os.write(number, b'{"reward": 1}' * 10)
    except OSError:
      pass
  return 1.0


async def prints(policy, example):
  for _ in range(10_000):
    print('[["Done", 0, 1.0]]')
    print('x', file=sys.stderr)
  os.write(1, b'y' * 10_000)
  await policy.say('x')
  return 1.0


async def changes_folder(policy, example):
  was = os.getcwd()
  os.chdir('/')
  os.environ['CHANGED'] = 'yes'
  await policy.say('x')
  return float(was != '/')


async def leaves_a_thread(policy, example):
  threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
  await policy.say('x')
  return 1.0


async def leaves_a_call(policy, example):
  begun = asyncio.Event()
  loop = asyncio.get_running_loop()

  def call():
    loop.call_soon_threadsafe(begun.set)
    time.sleep(1000)

  asyncio.ensure_future(asyncio.to_thread(call))
  await begun.wait()
  await policy.say('x')
  return 1.0


async def forks_its_process(policy, example):
  """The child comes back as if it were the worker."""
  await policy.say('x')
  child = os.fork()
  await policy.say('child' if child == 0 else 'parent')
  return 1.0


async def says_its_process(policy, example):
  await policy.say(_PROCESS)
  return 1.0


async def is_away(policy, example):
  await policy.say('x')
  raise Unavailable('no server')


async def is_away_once(policy, example):
  mark = pathlib.Path(example['mark'])
  await policy.say('x')
  if not mark.exists():
    mark.touch()
    raise Unavailable('no server')
  return 1.0


class _Local:
  """Cannot be pickled, nor can what it makes be read elsewhere."""

  def __reduce__(self):
    return functools.partial(_only_here, os.getpid()), ()


def _only_here(process):
  if os.getpid() != process:
    raise ImportError('no such thing here')
  return _Local()
