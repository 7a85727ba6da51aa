"""Adapters: with packages of the same shape, and with the real ones."""

import asyncio
import random
import re
import sys

import pytest

from grpo_jax import data
from grpo_jax.environments import adapters
from grpo_jax.environments import base
from grpo_jax.environments import forms
from grpo_jax.environments import playing
from grpo_jax.environments.adapters import choices
from grpo_jax.environments.adapters import reasoning_gym_adapter
from grpo_jax.rewards import Outcome
from tests.environments import fakes
from tests.environments import scripted

HERE = 'tests.environments.fakes:'


@pytest.fixture
def fake(monkeypatch):
  for name, module in fakes.MODULES.items():
    monkeypatch.setitem(sys.modules, name, module)


def play(name, replies, kwargs=None, seed=3, example=None, times=1):
  """Plays on one `Playing`, and returns the policies and what they got."""
  made = forms.resolve(name, kwargs)
  found = []

  async def main():
    play = made.make()
    try:
      for _ in range(times):
        policy = scripted.Scripted(replies)
        given = {'prompt': 'p'} if example is None else example
        try:
          value = await play(policy, given, seed)
        except base.Ended:  # all is said that was written down
          value = None
        found.append((policy, value))
    finally:
      await play.close()

  asyncio.run(main())
  return found[0] if times == 1 else found


def read(policy):
  return [
    one['content'] for one in policy.context if one['role'] != 'assistant'
  ]


@pytest.mark.parametrize(
  'text, place',
  [
    ('left', 0),
    ('I go LEFT, no: right.', 1),
    ('right or left', 0),
    ('copyright', None),
    ('up-left', 2),
    ('left, then up-left', 2),
    ('', None),
    ('x(0,1)', 3),
    ('ax(0,1)', None),
    ('left' + ' ' * 200_000, None),
  ],
)
def test_the_last_name_is_chosen(text, place):
  names = ['left', 'right', 'up-left', 'x(0,1)', '']
  assert choices.chosen(text, names) == place


@pytest.mark.parametrize(
  'text, number',
  [('7', 7), ('3 or -4.', -4), ('4.5', None), ('v2', None), ('1, 2!', 2)],
)
def test_the_last_whole_number_is_read(text, number):
  assert choices.last_number(text) == number


@pytest.mark.parametrize(
  'name, package, extra',
  [
    ('gymnasium:Walk-v0', 'gymnasium', 'gymnasium'),
    ('textarena:Draws-v0', 'textarena', 'textarena'),
    ('open_spiel:nim', 'pyspiel', 'open-spiel'),
    ('mcp:server', 'mcp', 'mcp'),
    ('reasoning_gym:chain_sum', 'reasoning_gym', 'reasoning-gym'),
  ],
)
def test_a_package_that_is_missing(monkeypatch, name, package, extra):
  monkeypatch.setitem(sys.modules, package, None)
  advice = re.escape(f"pip install 'grpo_jax[{extra}]'.")
  with pytest.raises(ValueError, match=f'package {package} cannot.*{advice}'):
    forms.resolve(name)


def test_a_name_without_its_rest():
  with pytest.raises(ValueError, match="'gymnasium:' names nothing"):
    forms.resolve('gymnasium:')
  assert not adapters.is_name('gymnasium_like:Thing')


class TestGymnasium:
  def test_an_episode(self, fake):
    fakes.Walk.closed = 0
    names = {'actions': ('left', 'stay', 'right'), 'task': 'Go right.'}
    policy, _ = play('gymnasium:Walk-v0', ['right', 'hm', 'RIGHT'], names)
    assert read(policy) == [
      'Go right.\n\nActions: left, stay, right. Answer with one of them.\n\n'
      'at: 0\nseed: 3',
      'at: 1',
      'That has no action in it. Actions: left, stay, right. Answer with one of'
      ' them.',
    ]
    assert policy.rewards == {0: 0.5, 1: 0.0, 2: 1.0}
    assert fakes.Walk.closed == 2  # one was made to look at it

  def test_numbers_and_what_it_shows(self, fake):
    kwargs = {'render_mode': 'ansi', 'invalid_reward': -1.0}
    policy, _ = play('gymnasium:Walk-v0', ['2', '9', '3', 'x'], kwargs)
    assert read(policy)[:2] == [
      'Answer with an action, a number from 0 to 2.\n\nat 0 of 2',
      'at 1 of 2',
    ]
    assert policy.rewards == {0: 0.5, 1: -1.0, 2: -1.0, 3: -1.0}  # it ends

  def test_texts(self, fake):
    policy, _ = play('gymnasium:Walk-v0', ['a', 'b'], {'text': True})
    assert policy.rewards == {0: 0.5, 1: 1.0}

  @pytest.mark.parametrize(
    'name, kwargs, message',
    [
      ('Run-v0', {}, "Gymnasium cannot make 'Run-v0'"),
      ('Walk-v0', {'actions': ('a',)}, '1 names were given for the 3 actions'),
    ],
  )
  def test_what_cannot_be(self, fake, name, kwargs, message):
    with pytest.raises(ValueError, match=message):
      forms.resolve(f'gymnasium:{name}', kwargs)

  def test_real(self):
    pytest.importorskip('gymnasium')
    kwargs = dict(
      render_mode='ansi',
      is_slippery=False,
      actions=('left', 'down', 'right', 'up'),
    )
    way = ['down', 'down', 'right', 'right', 'down', 'right']
    policy, _ = play('gymnasium:FrozenLake-v1', way, kwargs)
    assert policy.rewards[5] == 1.0
    policy, _ = play('gymnasium:Pendulum-v1', ['[0.5]', '[9]', '[]', 'x'])
    assert len(policy.rewards) == 4


class TestTextArena:
  def test_games_at_the_same_time_draw_as_games_alone(self, fake):
    made = forms.resolve('textarena:Draws-v0')
    construct = adapters.find('textarena:Draws-v0')
    assert made.name == 'textarena:Draws-v0'

    def said(seeds):
      games = [construct() for _ in seeds]
      found = [[game.reset({}, seed)] for game, seed in zip(games, seeds)]
      for _ in range(3):
        random.random()
        for game, heard in zip(games, found):
          heard.append(game.step(base.Action('x')).observation)
      return found

    state = random.getstate()
    together = said([1, 2, 1])
    assert together[0] == together[2] != together[1]
    assert said([1]) == [together[0]]
    assert random.getstate() != state  # by the draws of the test alone

  def test_two_players(self, fake):
    kwargs = {'players': 2, 'opponent': HERE + 'says_nothing'}
    say = lambda context: context[-1]['content'].rpartition(' ')[2]
    policy, _ = play('textarena:Draws-v0', ['no', 'no', 'x'], kwargs)
    assert policy.rewards == {0: 0.0, 1: 0.0, 2: 0.0}
    policy, _ = play('textarena:Draws-v0', say, kwargs)
    assert policy.rewards == {0: 1.0}
    kwargs['opponent'] = HERE + 'says_the_number'
    policy, _ = play('textarena:Draws-v0', ['no'], kwargs)
    assert policy.rewards == {0: -1.0}
    assert 'what I said' not in str(read(policy))

  @pytest.mark.parametrize(
    'kwargs, message',
    [
      ({'players': 2}, 'has 2 players, and nobody plays the other seats'),
      ({'seat': 1}, 'The seat 1 is none of the 1'),
      ({'opponent': 'math:sqart'}, 'did you mean .sqrt.'),
    ],
  )
  def test_what_cannot_be(self, fake, kwargs, message):
    with pytest.raises(ValueError, match=message):
      forms.resolve('textarena:Draws-v0', kwargs)

  def test_real(self):
    pytest.importorskip('textarena')
    guess = lambda context: f'[{len(context)}]'
    runs = [play('textarena:GuessTheNumber-v0-raw', guess)[0] for _ in '12']
    assert runs[0].context == runs[1].context and runs[0].rewards


class TestOpenSpiel:
  def test_a_game(self, fake):
    kwargs = {'opponent': HERE + 'takes_two', 'task': 'Play.'}
    policy, _ = play('open_spiel:nim', lambda _: 'I take 1', kwargs)
    first = read(policy)[0]
    assert re.fullmatch(
      r'Play.\n\n[67] stones\n\nLegal moves: take 1, take 2', first
    )
    assert set(list(policy.rewards.values())[:-1]) == {0.0}
    assert list(policy.rewards.values())[-1] in (-1.0, 1.0)

  def test_it_is_a_function_of_the_seed(self, fake):
    kwargs = {'seat': None}
    runs = [
      play('open_spiel:nim', lambda _: 'take 1', kwargs, seed)[0]
      for seed in [*range(8), *range(8)]
    ]
    said = [str(one.context) for one in runs]
    assert said[:8] == said[8:] and len({*said}) > 2
    assert any('player 1' in one for one in said)

  def test_illegal_moves(self, fake):
    replies = ['take 3', 'take 1', 'no', 'no', 'no']
    kwargs = {'opponent': HERE + 'takes_two'}
    policy, _ = play('open_spiel:nim', replies, kwargs)
    assert policy.rewards == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: -1.0}
    assert read(policy)[1].startswith('That is no legal move.\n\n')

  def test_an_opponent_that_cheats(self, fake):
    with pytest.raises(ValueError, match='returned 5, which is no legal'):
      play('open_spiel:nim', ['take 1'], {'opponent': HERE + 'cheats'})

  @pytest.mark.parametrize(
    'name, kwargs, message',
    [
      ('nimm', {}, "cannot load 'nimm' .Unknown game nimm.;"),
      ('at_once', {}, 'move at the same time, which is not supported'),
      ('nim', {'seat': 2}, "The seat 2 is none of the 2 of 'nim'"),
    ],
  )
  def test_what_cannot_be(self, fake, name, kwargs, message):
    with pytest.raises(ValueError, match=message):
      forms.resolve(f'open_spiel:{name}', kwargs)

  def test_real(self):
    pytest.importorskip('pyspiel')
    first = lambda context: (
      context[-1]['content'].rpartition('Legal moves: ')[2].split(', x')[0]
    )
    runs = [play('open_spiel:tic_tac_toe', first)[0] for _ in '12']
    assert runs[0].context == runs[1].context
    assert list(runs[0].rewards.values())[-1] in (-1.0, 0.0, 1.0)
    policy, _ = play('open_spiel:kuhn_poker', lambda _: 'bet', {'seat': None})
    assert policy.rewards


class Judge:
  """As `rewards.workers.Workers`; right is what ends in the answer."""

  open = 0

  def __init__(self, number):
    Judge.open += 1

  def run(self, calls):
    ((prompt, text, example),) = [call.arguments for call in calls]
    if text == 'break':
      return [[Outcome(None, 'time limit')]]
    return [[Outcome(float(text.endswith(example['answer'])))]]

  def close(self):
    Judge.open -= 1


class TestReasoningGym:
  RECORD = {
    'prompt': '1+1=',
    'answer': '2',
    'reasoning_gym': {'task': 'chain_sum', 'parameters': {}, 'metadata': {}},
  }

  @pytest.fixture
  def judge(self, monkeypatch):
    monkeypatch.setitem(sys.modules, 'reasoning_gym', fakes)
    monkeypatch.setattr(reasoning_gym_adapter.workers, 'Workers', Judge)

  def play(self, replies, times=1, **kwargs):
    name = 'reasoning_gym:chain_sum'
    return play(name, replies, kwargs, example=self.RECORD, times=times)

  def test_tries(self, judge):
    policy, _ = self.play(['3', '2'], discount=0.5)
    assert read(policy) == [
      '1+1=',
      'That is not right. Try again; tries left: 2.',
    ]
    assert policy.rewards == {0: 0.0, 1: 0.5}
    policy, _ = self.play(['3', '4', '5'], tries=2)
    assert policy.rewards == {0: 0.0, 1: 0.0}

  def test_one_judge_serves_all_and_is_closed(self, judge):
    self.play(['2'], times=3)
    assert Judge.open == 0 and not reasoning_gym_adapter._judges

  def test_what_cannot_be_judged_is_a_failure(self, judge):
    with pytest.raises(RuntimeError, match='cannot be judged: time limit'):
      self.play(['break'])

  def test_a_record_of_something_else(self, judge):
    with pytest.raises(ValueError, match="no problem of 'reasoning_gym:chain"):
      play('reasoning_gym:chain_sum', ['2'], example={'prompt': 'x'})

  @pytest.mark.long
  def test_real(self):
    pytest.importorskip('reasoning_gym')
    record = data.ReasoningGymSource('chain_sum', 'train', max_terms=2)[0]
    replies = ['<answer>x</answer>', f'<answer>{record["answer"]}</answer>']
    name = 'reasoning_gym:chain_sum'
    policy, _ = play(name, replies, example=record)
    assert policy.rewards == {0: 0.0, 1: 1.0}


class TestMCP:
  def test_tools_of_a_server(self, fake):
    fakes.Server.started = 0
    replies = [
      scripted.calls(('add', {'amount': 2})),
      scripted.calls(
        ('add', {'amount': 3}), ('fail', {}), ('add', {'amount': 'x'})
      ),
      'done',
    ]
    runs = play('mcp:server --flag "a b"', replies, times=2)
    for policy, _ in runs:  # each has a server of its own
      said = read(policy)
      assert said[:4] == [
        'p',
        'count 2',
        'count 5',
        "Error: The tool 'fail' failed: RuntimeError: it went wrong",
      ]
      assert said[4].startswith('Error: ')
    assert (fakes.Server.started, fakes.Server.open) == (3, 0)
    made = forms.resolve('mcp:server')
    assert [one['function']['name'] for one in made.tools] == ['add', 'fail']

  def test_a_server_that_does_not_start(self, fake):
    with pytest.raises(ValueError, match="'missing' has told no tools"):
      forms.resolve('mcp:missing')

  @pytest.mark.long
  def test_real(self, tmp_path):
    pytest.importorskip('mcp')
    (tmp_path / 'server.py').write_text(
      'from mcp.server import MCPServer\n'
      "server, total = MCPServer('counter'), 0\n"
      '@server.tool()\n'
      'def add(amount: int) -> str:\n'
      "  '''Adds.'''\n"
      '  global total\n'
      '  total += amount\n'
      "  return f'count {total}'\n"
      'server.run()\n'
    )
    replies = [scripted.calls(('add', {'amount': 2}))] * 2 + ['done']
    name = f'mcp:{sys.executable} {tmp_path / "server.py"}'
    for policy, _ in play(name, replies, times=2):
      assert read(policy) == ['p', 'count 2', 'count 4']


def test_a_play_is_what_sessions_play(fake):
  assert isinstance(forms.resolve('open_spiel:nim').make(), playing.Instances)
