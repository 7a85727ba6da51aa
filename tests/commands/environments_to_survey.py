"""Environments for the tests of `grpo-jax environment`."""

import asyncio
import random
import threading

from grpo_jax.environments.base import Step
from grpo_jax.environments.tools import tool

_said = []


class Countdown:
  """The policy must say the numbers from `start` down to 1."""

  def __init__(self, start=3):
    self.start = start

  def reset(self, example, seed):
    self.next = self.start
    return f'Count down from {self.start}, with "{self.start}" first.'

  def step(self, action):
    right = action.text.strip() == str(self.next)
    self.next -= 1
    if not right:
      return Step('No.', reward=-1.0, done=True)
    return Step(f'Now "{self.next}".', reward=1.0, done=self.next == 0)


class Shop:
  """Tools."""

  def reset(self, example, seed):
    self.spent = 0
    return f'Buy goods, with the number {seed}.'

  @tool
  def buy(self, goods: str, count: int = 1) -> str:
    """Buys goods."""
    self.spent += count
    return f'You have bought {self.spent}.'

  def reward(self):
    return float(self.spent > 0)


class Endless:
  def reset(self, example, seed):
    return 'Go on.'

  def step(self, action):
    return Step('Go on.')


class Unseeded(Endless):
  def reset(self, example, seed):
    return f'The number is {random.SystemRandom().random()}.'


class Shares:
  """Its instances write to one list, so that they see each other."""

  def reset(self, example, seed):
    _said.clear()
    return 'Say something.'

  def step(self, action):
    _said.append(action.text)
    return Step(f'{len(_said)} were said.', done=len(_said) > 5)


class FailsAtOddSeeds(Endless):
  def reset(self, example, seed):
    if seed % 2:
      raise KeyError('gold')
    return 'Go on.'


class Raises(Endless):
  def reset(self, example, seed):
    raise KeyError('gold')


class Hangs(Endless):
  def reset(self, example, seed):
    threading.Event().wait()


class Sleeps(Endless):
  async def reset(self, example, seed):
    await asyncio.sleep(1e6)


class Broken:
  """Its tool goes wrong, with a long text before what differs."""

  def reset(self, example, seed):
    return 'a' * 500 + f'{random.SystemRandom().random()}'

  @tool
  def look(self) -> str:
    """Looks."""
    raise KeyError('gold')
