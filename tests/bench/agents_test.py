"""The pure parts of the benchmark of episodes, and ours; peers are not run."""

import dataclasses
import json
import math
import statistics

import pytest

from grpo_jax import models
from tests.bench import agents
from tests.bench import agents_ours
from tests.bench import agents_work
from tests.bench import run

SMALL = agents_work.Work(
  episodes=4, group=2, rows=2, turns=3, prompt_tokens=5, turn_tokens=4,
  answer_tokens=3, layers=1, width=32, vocab=64,
)  # fmt: skip


def test_texts_and_ids_are_the_same_everywhere():
  tokenizer = agents_ours.tokenizer_of(SMALL)
  said = agents_work.text(range(2, SMALL.vocab))  # without the end
  assert tokenizer.encode(said) == agents_work.ids(said) == [*range(2, 64)]
  chat = [
    {'role': 'user', 'content': SMALL.prompts()[0]},
    {'role': 'assistant', 'content': said[:4]},
    {'role': 'user', 'content': SMALL.answer(0, 1)},
  ]
  written = agents_work.chat_text(chat, True)
  assert tokenizer.chat_text(chat) == written
  assert tokenizer.begin_chat(chat) == agents_work.ids(written)
  assert len(agents_work.ids(written)) == SMALL.contexts[1] == 8 + 4 + 3 + 4


def test_calls_are_written_where_trl_looks_for_them():
  call = {'function': {'name': 'look', 'arguments': {'key': 'value'}}}
  chat = [
    {'role': 'user', 'content': 'hi'},
    {'role': 'assistant', 'content': '', 'tool_calls': [call]},
    {'role': 'tool', 'name': 'look', 'content': 'found'},
  ]
  said = agents_ours.tokenizer_of(SMALL).chat_text(chat)
  assert all(word in said for word in ('look', 'key', 'value', 'found'))


def test_work_says_what_is_played():
  assert SMALL.tokens == 4 * 3 * 4
  assert SMALL.contexts == [8, 8 + 11, 8 + 22]
  assert SMALL.context_tokens == 8 + 22 + 4
  first, second = SMALL.prompts()
  assert first != second and len(first) == len(second) == 5
  assert min(agents_work.ids(first + second)) > agents_work.TOOL
  with pytest.raises(ValueError, match='rows=3 is no multiple of group=2'):
    agents_work.Work(episodes=4, group=2, rows=3)


def test_episodes_sleep_for_the_same_times_in_every_process():
  work = agents_work.Work(episodes=400, turns=6)
  one, other = (agents_work.Episodes(work, 0.5) for _ in range(2))
  played = [[*one.begin()] for _ in range(work.episodes)]
  assert played == [[*other.begin()] for _ in range(work.episodes)]
  assert {len(turns) for turns in played} == {5}
  secs = [secs for turns in played for secs, _ in turns]
  assert statistics.mean(secs) == pytest.approx(0.5, rel=0.1)
  assert statistics.stdev(secs) == pytest.approx(0.5, rel=0.1)
  assert len({said for turns in played for _, said in turns}) == 2000
  assert [*agents_work.Episodes(work, 0.0).begin()][0][0] == 0


def test_an_answer_is_of_whole_episodes():
  said = agents_work.answer('ours', ('jax',), SMALL, 2.0, [12] * 4, more=1)
  told = json.loads(said)
  assert told['secs'] == 2 and told['more'] == 1 and 'jax' in told['versions']
  for drawn in [12] * 3, [12, 12, 12, 11]:
    with pytest.raises(ValueError, match='each of 4 episodes must draw 12'):
      agents_work.answer('ours', (), SMALL, 2.0, drawn)


def test_what_is_read_anew_is_counted():
  work = dataclasses.replace(SMALL, prompt_tokens=6)
  config = agents_ours.model_config(work)
  each = lambda place, head: models.flops_per_token(
    config, place + 1, with_head=head
  )
  read = lambda a, b: sum(each(place, False) for place in range(a, b))
  drawn = sum(each(n + k, True) for n in (9, 20, 31) for k in range(4))
  ours = read(0, 9) / 2 + read(13, 20) + read(24, 31)
  plain = read(0, 9) + read(0, 20) + read(0, 31)
  padded = read(0, 9) + 2 * read(0, 32)
  found = agents.reread(work), agents.reread(work, padded=True)
  expected = (plain + drawn) / (ours + drawn), (padded + drawn) / (ours + drawn)
  assert found == pytest.approx(expected)


def test_what_is_slept_is_counted():
  every = [agents_work.sleeps(SMALL, episode, 0.3) for episode in range(4)]
  one_by_one, in_rounds = agents.slept(SMALL, 0.3)
  assert one_by_one == pytest.approx(sum(a + b for a, b in every))
  rounds = max(a for a, _ in every) + max(b for _, b in every)
  assert in_rounds == pytest.approx(rounds)


def result(secs, peak=100):
  return {'secs': secs, 'peak_rss_mib': peak, 'versions': {'jax': '1'}}


def test_a_ratio_is_of_the_same_turn():
  results = {
    (0.0, 'grpo_jax'): [result(1.0), result(2.0), {'error': 'it broke'}],
    (0.0, 'trl'): [result(3.0, 200), result(4.0, 300), result(9.0, 400)],
    (0.25, 'grpo_jax'): [result(1.0)],
    (0.25, 'trl'): [{'error': 'no memory'}],
  }
  lines = agents.table(SMALL, results).splitlines()
  assert lines[2:] == [
    '| answer at once | grpo_jax | 1.50 | 32.0 | 8.00 | 100 |  |',
    '| answer at once | trl | 4.00 | 12.0 | 3.00 | 300 | 3.00, 2.00 |',
    '| sleep 0.250 s | grpo_jax | 1.00 | 48.0 | 12.0 | 100 |  |',
    '| sleep 0.250 s | trl | failed | - | - | - | - |',
  ]
  said = agents.report(SMALL, 0.25, results, {})
  assert said.startswith('4 episodes of 3 turns, 4 tokens each; jax 1.')
  assert said.partition('**Failed**')[2].split('\n')[2:] == [
    '- answer at once, grpo_jax, turn 3: it broke',
    '- sleep 0.250 s, trl, turn 1: no memory',
  ]
  assert f'{agents.reread(SMALL):.2f} times' in said


def test_peers_take_their_turns_with_what_was_fastest(monkeypatch):
  asked = []

  def run_one(args, command, environment):
    said = dict(word[2:].split('=') for word in command[2:])
    name = command[1].stem.removeprefix('agents_')
    threads = environment.get('OMP_NUM_THREADS')
    asked.append(
      (name, said['secs'], said['turns'], said.get('at_once'), threads)
    )
    if said.get('at_once') == '2' and name == 'tunix':
      return {'error': 'no memory'}
    secs = {None: 1.0, '2': 4.0, '4': 3.0, '16': 2.5}[said.get('at_once')]
    secs += 0.25 * (environment.get('OMP_WAIT_POLICY') == 'PASSIVE')
    return result(secs - bool(threads) - 0.5 * bool(not environment))

  monkeypatch.setattr(run, 'run', run_one)
  monkeypatch.setattr(agents.os, 'cpu_count', lambda: 16)
  args = agents.arguments(['--secs=0.5', '--repeats=1'])
  work = dataclasses.replace(SMALL, turns=5)
  names = dict.fromkeys(['grpo_jax', *agents.PEERS], 'python')
  results, tried = agents.compared(args, names, work)
  assert [*tried] == [(0.0, 'trl'), (0.0, 'tunix'), (0.5, 'tunix')]
  assert tried[0.0, 'trl'] == {
    agents.Setting(2): 4, agents.Setting(4): 3, agents.Setting(2, False): 3.5,
    agents.Setting(2, passive=True): 4.25, agents.Setting(4, threads=1): 2,
    agents.Setting(4, passive=True): 3.25,
  }  # fmt: skip
  assert tried[0.5, 'tunix'][agents.Setting(2)] == math.inf
  turns = [one for one in asked if one[2] == '5']
  assert [one for one in asked if one[2] == '2' and one[0] == 'ours'] == []
  assert turns == [
    ('ours', '0.0', '5', None, None), ('trl', '0.0', '5', '4', '1'),
    ('tunix', '0.0', '5', '16', None), ('ours', '0.5', '5', None, None),
    ('trl', '0.5', '5', '4', '1'), ('tunix', '0.5', '5', '16', None),
  ]  # fmt: skip
  assert results[0.0, 'trl'] == [result(2.0)]
  line = agents.tried_table(tried).splitlines()[4]
  assert line == (
    '| answer at once | trl | 2 at a time: 4.00; 4 at a time: 3.00; '
    '2 at a time, passive: 4.25; 4 at a time, passive: 3.25; '
    '4 at a time, 1 thread: 2.00; 2 at a time, bare: 3.50 |'
  )


def test_only_known_peers_are_run(capsys):
  assert agents.arguments([]).peers == ['trl', 'tunix']
  assert agents_work.of_arguments(agents.arguments([])) == agents_work.Work()
  with pytest.raises(SystemExit):
    agents.arguments(['--peers=verl'])
  assert "['verl'] is none of trl, tunix" in capsys.readouterr().err


@pytest.mark.long
def test_ours_plays_all_episodes_and_waits_for_their_environments():
  # A sixteenth of the draws would be an end, if turns could end early.
  work, secs = dataclasses.replace(SMALL, vocab=16), 0.2
  found = [json.loads(agents_ours.run(work, each)) for each in (0.0, secs)]
  slept = [sum(agents_work.sleeps(SMALL, k, secs)) for k in range(4)]
  assert found[1]['secs'] > max(slept) > secs
  assert 0 < found[0]['turn_secs'] < found[0]['secs']
  # Each token is read once but for the prompt, which is read for its group.
  read = (8 / 2 + 8 + 8) / sum(SMALL.contexts)
  assert found[0]['engine_read_share'] == pytest.approx(read, abs=0.01)
