"""Games of OpenSpiel, against a random opponent or a given one."""

from collections.abc import Callable
import functools
import random
from typing import Any

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.environments.adapters import choices
from grpo_jax.environments.base import Action
from grpo_jax.environments.base import Step


def make(name: str) -> Any:
  """What makes a game of OpenSpiel."""
  return functools.partial(OpenSpiel, name)


class OpenSpiel:
  """A game of OpenSpiel whose players move one after the other.

  The policy reads what it may see of the game, and its legal moves by their
  names; a move is the last of these names in its text. The reward is what the
  game gives at its end, with the last turn; what loses by illegal moves gets
  the least that the game gives.

  Args:
    name: As `pyspiel.load_game` takes it, such as 'tic_tac_toe' or
      'connect_four(rows=4)'.
    seat: Of the policy, from 0 on; None: drawn by the seed.
    opponent: 'random', or 'module:function' of (state, random.Random), which
      returns a legal action.
    task: What the policy is told at the start.
    most_illegal: So many illegal moves in a row lose the game.

  Raises:
    ValueError: The package is missing, or the game cannot be played so.
  """

  def __init__(
    self,
    name: str,
    seat: int | None = 0,
    opponent: str = 'random',
    task: str = '',
    most_illegal: int = 3,
  ):
    pyspiel = importing.package('pyspiel', 'open-spiel')
    try:
      self._game = pyspiel.load_game(name)
    except Exception as error:
      raise ValueError(
        f'OpenSpiel cannot load {name!r} ({plain_text.first_line(error)});'
        ' correct the name or its parameters.'
      ) from error
    kind = self._game.get_type()
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
      raise ValueError(
        f'The players of {name!r} move at the same time, which is not'
        ' supported; give a game in which they take turns.'
      )
    players = self._game.num_players()
    if seat is not None and not 0 <= seat < players:
      raise ValueError(
        f'The seat {seat} is none of the {players} of {name!r}; give a number'
        f' from 0 to {players - 1}, or None.'
      )
    self._opponent: Callable[[Any, random.Random], int] = _any
    if opponent != 'random':
      self._opponent = importing.imported(
        opponent, f'The opponent {opponent!r}'
      )
    self._sees = bool(kind.provides_observation_string)
    self._given_seat, self._players = seat, players
    self._task, self._most_illegal = task, most_illegal
    self._name = name

  def reset(self, example: Any, seed: int) -> str:
    """Begins anew by a seed, and plays until it is the policy's turn."""
    self._random = random.Random(seed)
    seat = self._given_seat
    self._seat = self._random.randrange(self._players) if seat is None else seat
    self._state, self._illegal = self._game.new_initial_state(), 0
    self._play_others()
    if self._state.is_terminal():
      raise ValueError('the game is over before the first turn of the policy')
    task = self._task or (
      f'You play {self._game.get_type().long_name} as player {self._seat}.'
      ' Answer with your move.'
    )
    return f'{task}\n\n{self._shown()}'

  def step(self, action: Action) -> Step:
    """Plays a move, and then those of the others."""
    state = self._state
    moves = state.legal_actions()
    place = choices.chosen(action.text, self._names(moves))
    if place is None:
      self._illegal += 1
      lost = self._illegal >= self._most_illegal
      reward = float(self._game.min_utility()) if lost else 0.0
      said = f'That is no legal move.\n\n{self._shown()}'
      return Step(said, reward, lost, {'illegal': True})
    self._illegal = 0
    state.apply_action(moves[place])
    self._play_others()
    if state.is_terminal():
      reward = float(state.returns()[self._seat])
      return Step('The game is over.', reward, True)
    return Step(self._shown())

  def _play_others(self) -> None:
    state = self._state
    while not state.is_terminal() and state.current_player() != self._seat:
      if state.is_chance_node():
        moves, shares = zip(*state.chance_outcomes(), strict=True)
        move = self._random.choices(moves, shares)[0]
      else:
        move = self._opponent(state, self._random)
        if move not in state.legal_actions():
          raise ValueError(
            f'the opponent of {self._name!r} has returned'
            f' {plain_text.shown(move)}, which is no legal action'
          )
      state.apply_action(move)

  def _names(self, moves: list[int]) -> list[str]:
    return [self._state.action_to_string(self._seat, one) for one in moves]

  def _shown(self) -> str:
    seen = self._state.observation_string(self._seat) if self._sees else ''
    moves = ', '.join(self._names(self._state.legal_actions()))
    return f'{seen or self._state}\n\nLegal moves: {moves}'.strip()


def _any(state: Any, drawn: random.Random) -> int:
  """A legal action, each as likely as the others."""
  return drawn.choice(state.legal_actions())
