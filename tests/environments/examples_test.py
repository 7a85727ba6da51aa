"""The environments of configs/: what they say, reward and measure.

One file, because all of them are read from the folder of the configs.
"""

import asyncio
import importlib.util
import pathlib
import re

import pytest

from grpo_jax import data
from grpo_jax.environments import formats
from tests.environments import scripted

pytestmark = pytest.mark.quick

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
TOKENIZER = data.Tokenizer.from_folder(
  CONFIGS / 'words', prompt_format=data.PromptFormat(chat=True)
)


def module(name):
  spec = importlib.util.spec_from_file_location(name, CONFIGS / f'{name}.py')
  found = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(found)
  return found


def play(episode, replies, example, **kwargs):
  """What the episode returned, and its policy."""
  policy = scripted.Scripted(replies)
  return asyncio.run(episode(policy, example, **kwargs)), policy


def halving(context):
  """Guesses the middle of what is left."""
  left = range(32)
  for guess, answer in zip(context[1::2], context[2::2], strict=True):
    at = int(guess['content'])
    higher = answer['content'] == 'higher'
    left = range(at + 1, left.stop) if higher else range(left.start, at)
  return str(left[len(left) // 2])


@pytest.mark.parametrize('number', range(32))
def test_halving_finds_every_number_in_six_turns(number):
  guess = module('guess_number').guess
  worth, policy = play(guess, halving, {'answer': str(number)})
  assert worth == 0.5 and len(policy.replies) <= 6
  assert policy.replies[-1].text == str(number)
  # What is ruled out for sure: a half, give or take the odd one.
  assert all(0.4 <= x <= 1 for x in policy.rewards.values())


@pytest.mark.parametrize('said', ['higher', '', '-3'])
def test_what_is_no_number_ends_the_game(said):
  guess = module('guess_number').guess
  worth, policy = play(guess, ['16', said], {'answer': '20'})
  assert worth == 0 and len(policy.replies) == 2
  assert policy.rewards == {0: 0.5}


@pytest.mark.parametrize(
  'said, told', [('32', 'lower'), ('24', 'lower'), ('16', 'higher')]
)
def test_a_guess_that_cannot_be_costs_a_turn(said, told):
  guess = module('guess_number').guess
  replies = ['16', '24', said, '20']
  worth, policy = play(guess, replies, {'answer': '20'})
  assert worth == 0.5 and policy.context[-2]['content'] == told
  # 17 to 23 are left after two guesses, and after the third.
  assert policy.rewards == {0: 0.5, 1: 1 - 7 / 15, 2: 0, 3: 1 - 3 / 7}


def test_the_game_ends_after_six_turns():
  guess = module('guess_number').guess
  worth, policy = play(guess, ['0'] * 7, {'answer': '20'})
  assert worth == 0 and len(policy.replies) == 6
  assert policy.rewards == {0: 1 / 32} | dict.fromkeys(range(1, 6), 0)


def test_what_is_shown_is_a_guess_that_may_be_right():
  for shown in module('guess_number').random_guesses(200):
    chat, left = shown['prompt'], range(32)
    for said, new in zip(chat[1::2], chat[2::2], strict=True):
      at = int(said['content'])
      is_more = new['content'] == 'higher'
      left = range(at + 1, left.stop) if is_more else range(left.start, at)
    assert int(shown['answer']) in left and len(chat) <= 11


def test_the_words_of_the_game_are_tokens_of_their_own():
  unknown = TOKENIZER.backend.token_to_id('<unk>')
  TOKENIZER.check_continuation()
  for shown in module('guess_number').random_guesses(50):
    chat = shown['prompt']
    ids = TOKENIZER.begin_chat(chat[:1])
    for said, new in zip(chat[1::2], chat[2::2], strict=True):
      ids += TOKENIZER.encode(said['content']) + [TOKENIZER.eos_ids[0]]
      ids += TOKENIZER.continue_chat([new])
    assert ids == TOKENIZER.encode_prompt(chat) and unknown not in ids
    assert len(TOKENIZER.encode(shown['answer'])) == 1


def test_random_games_show_legal_moves():
  """The warm-up of the game: what was read, and a move that was offered."""
  pytest.importorskip('pyspiel')
  board = data.Tokenizer.from_folder(
    CONFIGS / 'board', prompt_format=data.PromptFormat(chat=True)
  )
  unknown = board.backend.token_to_id('<unk>')
  for shown in module('tictactoe').random_moves(50):
    said = shown['prompt'][-1]['content']
    assert shown['answer'] in said.partition('Legal moves: ')[2].split(', ')
    assert unknown not in board.encode_prompt(shown['prompt'])
    assert len(board.encode(shown['answer'])) == 1


def test_only_a_won_game_counts_as_won():
  won = module('tictactoe').won
  for reward, counts in ((1.0, 1.0), (0.0, 0.0), (-1.0, 0.0), (None, 0.0)):
    assert won('', '', {'episode': {'reward': reward}}) == counts


@pytest.mark.parametrize('has_tool', [True, False])
def test_word_problems_stand_behind_one_that_is_worked(has_tool):
  found = module('calculator')
  problems = found.problems(8, seed=3, has_tool=has_tool)
  assert len({one['prompt'][-1]['content'] for one in problems}) == 8
  for one in problems:
    *shown, question = one['prompt']
    a, b, c = map(int, re.findall(r'\d+', question['content']))
    assert one['answer'] == str(a * b + c)
    assert ('calculator' in str(shown)) == has_tool
    assert shown[-1] == {'role': 'assistant', 'content': '413'}


def test_the_call_that_is_shown_is_read_and_gives_what_is_shown():
  found = module('calculator')
  call = found.problems(1, seed=3)[0]['prompt'][2]['content']
  parsed = formats.parse(formats.find('json_block'), [(call, False)])
  [call] = parsed.calls
  assert (call.name, parsed.problems) == ('calculator', ())
  assert found.calculator(**call.arguments) == '413'


@pytest.mark.parametrize(
  'said, results, counts',
  [
    ('413', ['413'], 1.0),
    (' 413\n', ['12', '413'], 1.0),
    ('413', [], 0.0),
    ('413', ['412'], 0.0),
    ('412', ['413'], 0.0),
  ],
)
def test_an_answer_counts_as_from_the_tool_with_its_result(
  said, results, counts
):
  told = [{'role': 'user', 'content': '413'}]
  told += [{'role': 'tool', 'content': one} for one in results]
  example = {'answer': '413', 'episode': {'messages': told}}
  assert module('calculator').used('', said, example) == counts
