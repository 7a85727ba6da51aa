"""Packages of the same shape as those that adapters need, for `sys.modules`."""

import contextlib
import random
import types
from typing import Any


class Discrete:
  """As `gymnasium.spaces.Discrete`."""

  start = 0

  def __init__(self, n):
    self.n = n

  def contains(self, action):
    return 0 <= action < self.n


class Text:
  def contains(self, action):
    return isinstance(action, str)


class Walk:
  """Ends at 2 steps to the right; the seed says where it begins."""

  closed = 0

  def __init__(self, render_mode=None, text=False):
    self.render_mode = render_mode
    self.action_space = Text() if text else Discrete(3)

  def reset(self, seed=None):
    self.at, self.seed = 0, seed
    return {'at': self.at, 'seed': seed}, {}

  def step(self, action):
    self.at += {0: -1, 1: 0, 2: 1}.get(action, 1)
    return {'at': self.at}, 0.5 * self.at, self.at == 2, False, {}

  def render(self):
    return f'at {self.at} of 2'

  def close(self):
    Walk.closed += 1


def _make_walk(name, **kwargs):
  if name != 'Walk-v0':
    raise KeyError(name)
  return Walk(**kwargs)


gymnasium = types.SimpleNamespace(make=_make_walk)


class Draws:
  """A game of TextArena's shape that draws from `random` itself.

  Each turn it says a number; who says the same number ends the game.
  """

  def reset(self, num_players, seed):
    random.seed(seed)
    self.players, self.turn, self.rewards = num_players, 0, None

  def get_observation(self):
    self.number = random.randrange(10**6)
    player = self.turn % self.players
    return player, [
      (-1, f'say {self.number}', 'ObservationType.PROMPT'),
      (player, 'what I said', 'ObservationType.PLAYER_ACTION'),
    ]

  def step(self, action):
    player = self.turn % self.players
    self.turn += 1
    if action == str(self.number):
      self.rewards = {k: 1.0 if k == player else -1.0 for k in range(9)}
    return self.rewards is not None, {}

  def close(self):
    return self.rewards, {0: {'turn_count': self.turn}}


textarena = types.SimpleNamespace(make=lambda name, **_: Draws())


class Nim:
  """Takes one or two of seven stones; who takes the last one wins.

  A chance node at the start takes none or one.
  """

  def __init__(self, name='nim'):
    self.name = name

  def get_type(self):
    return types.SimpleNamespace(
      dynamics='at once' if self.name == 'at_once' else 'in turns',
      provides_observation_string=True,
      long_name='Nim',
    )

  def num_players(self):
    return 2

  def min_utility(self):
    return -1.0

  def new_initial_state(self):
    return NimState()


class NimState:
  def __init__(self):
    self.stones, self.moves = 7, -1

  def is_chance_node(self):
    return self.moves < 0

  def chance_outcomes(self):
    return [(0, 0.5), (1, 0.5)]

  def current_player(self):
    return -1 if self.moves < 0 else self.moves % 2

  def legal_actions(self):
    return [one for one in (1, 2) if one <= self.stones]

  def action_to_string(self, player, action):
    return f'take {action}'

  def apply_action(self, action):
    self.stones -= action
    self.moves += 1

  def is_terminal(self):
    return self.stones == 0

  def returns(self):
    winner = (self.moves - 1) % 2
    return [1.0 if k == winner else -1.0 for k in range(2)]

  def observation_string(self, player):
    return f'{self.stones} stones'


def _load(name):
  if name not in ('nim', 'at_once'):
    raise RuntimeError(f'Unknown game {name}\nand much more')
  return Nim(name)


pyspiel = types.SimpleNamespace(
  load_game=_load,
  GameType=types.SimpleNamespace(
    Dynamics=types.SimpleNamespace(SEQUENTIAL='in turns')
  ),
)


def takes_two(state, drawn):
  return min(2, state.stones)


def cheats(state, drawn):
  return 5


def says_the_number(seen, seed):
  return seen.rpartition(' ')[2]


def says_nothing(seen, seed):
  return 'nothing'


class Server:
  """As a server behind `mcp.ClientSession`: it counts, two tools on two pages.

  Attributes:
    open: How many are connected now.
    started: How many were ever.
  """

  open = started = 0

  def __init__(self, read, write):
    self.count = 0

  async def __aenter__(self):
    return self

  async def __aexit__(self, *_):
    pass

  async def initialize(self):
    pass

  async def list_tools(self, params=None):
    first = params is None
    number = {'type': 'object', 'properties': {'amount': {'type': 'integer'}}}
    tool = types.SimpleNamespace(
      name='add' if first else 'fail',
      description='Adds.',
      input_schema={**number, 'required': ['amount']} if first else {},
    )
    return types.SimpleNamespace(
      tools=[tool], next_cursor='more' if first else None
    )

  async def call_tool(self, name, arguments, read_timeout_seconds):
    self.count += arguments.get('amount', 0)
    text = f'count {self.count}' if name == 'add' else 'it went wrong'
    return types.SimpleNamespace(
      content=[types.SimpleNamespace(type='text', text=text)],
      is_error=name == 'fail',
    )


@contextlib.asynccontextmanager
async def _stdio_client(server: Any, errlog: Any):
  if server.command == 'missing':
    raise FileNotFoundError('missing')
  Server.open += 1
  Server.started += 1
  try:
    yield 'read', 'write'
  finally:
    Server.open -= 1


def _page(cursor):
  return types.SimpleNamespace(cursor=cursor)


mcp_types = types.SimpleNamespace(PaginatedRequestParams=_page)
mcp = types.SimpleNamespace(
  StdioServerParameters=lambda command, args: types.SimpleNamespace(
    command=command, args=args
  ),
  stdio_client=_stdio_client,
  ClientSession=Server,
  types=mcp_types,
)
MODULES = {
  'gymnasium': gymnasium,
  'textarena': textarena,
  'pyspiel': pyspiel,
  'mcp': mcp,
  'mcp.types': mcp_types,
}
