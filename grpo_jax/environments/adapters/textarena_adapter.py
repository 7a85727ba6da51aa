"""Games of TextArena."""

from collections.abc import Iterator
import contextlib
import functools
import random
import threading
from typing import Any

from grpo_jax.config import importing
from grpo_jax.environments import adapters
from grpo_jax.environments.base import Action
from grpo_jax.environments.base import Step

# Games draw from the module `random` itself, which all threads share.
_drawing = threading.Lock()


def make(name: str) -> Any:
  """What makes a game of TextArena."""
  return functools.partial(TextArena, name)


class TextArena:
  """A game of TextArena, played by the policy at one seat.

  The reward comes with the last turn. Other seats are played by `opponent`.

  Args:
    name: An id, such as 'GuessTheNumber-v0-raw'. The games without '-raw'
      come with wrappers, which write the whole history into each observation.
    players: How many there are.
    seat: Of the policy; None: drawn by the seed.
    opponent: 'module:function', which takes an observation and a seed and
      returns a text.
    **kwargs: For `textarena.make`.

  Raises:
    ValueError: The package is missing, it has no such game, or an opponent is
      missing.
  """

  def __init__(
    self,
    name: str,
    players: int = 1,
    seat: int | None = 0,
    opponent: str = '',
    **kwargs: Any,
  ):
    textarena = importing.package('textarena', 'textarena')
    if players > 1 and not opponent:
      raise ValueError(
        f'{name!r} has {players} players, and nobody plays the other seats;'
        " name a function as opponent='module:function'."
      )
    if seat is not None and not 0 <= seat < players:
      raise ValueError(
        f'The seat {seat} is none of the {players}; give a number from 0 to'
        f' {players - 1}, or None.'
      )
    self._opponent = None
    if opponent:
      self._opponent = importing.imported(
        opponent, f'The opponent {opponent!r}'
      )
    self._env = adapters.made('TextArena', textarena.make, name, **kwargs)
    self._players, self._given_seat = players, seat
    self._seat = seat or 0
    self._state = random.Random(0).getstate()

  def reset(self, example: Any, seed: int) -> str:
    """Begins anew by a seed, and plays until it is the policy's turn."""
    drawn = random.Random(seed)
    self._state, self._seed = drawn.getstate(), seed
    if self._given_seat is None:
      self._seat = drawn.randrange(self._players)
    with self._random():
      self._env.reset(num_players=self._players, seed=seed % 2**31)
    said, done = self._turn(False)
    if done:
      raise ValueError('the game is over before the first turn of the policy')
    return said

  def step(self, action: Action) -> Step:
    """Plays what the policy has said, and then the others."""
    with self._random():
      done, _ = self._env.step(action=action.text)
    said, done = self._turn(bool(done))
    if not done:
      return Step(said)
    rewards, info = self._env.close()
    reward = (rewards or {}).get(self._seat, 0.0)
    own = (info or {}).get(self._seat, {})
    return Step(said, float(reward), True, {'game': str(own)})

  def _turn(self, done: bool) -> tuple[str, bool]:
    """What the policy reads next, and whether the game is over."""
    while not done:
      with self._random():
        player, seen = self._env.get_observation()
      if player == self._seat:
        return _text(seen, self._seat), False
      assert self._opponent is not None
      said = self._opponent(_text(seen, player), self._seed)
      with self._random():
        done, _ = self._env.step(action=str(said))
    return 'The game is over.', True

  @contextlib.contextmanager
  def _random(self) -> Iterator[None]:
    """Draws go on where those of this game stood, whatever others draw."""
    with _drawing:
      others = random.getstate()
      random.setstate(self._state)
      try:
        yield
      finally:
        self._state = random.getstate()
        random.setstate(others)


def _text(seen: Any, player: int) -> str:
  """An observation as a text, without what the player has said himself."""
  if isinstance(seen, str):
    return seen
  parts = []
  for sender, said, *kind in seen:
    if sender == player and 'ACTION' in str(kind):
      continue
    parts.append(said if sender in (-1, player) else f'Player {sender}: {said}')
  return '\n'.join(map(str, parts)) or 'It is your turn.'
