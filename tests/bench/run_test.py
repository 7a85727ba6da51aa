"""The pure parts of the benchmarks, and a small one; no time is tested."""

import argparse
import dataclasses
import json

from matplotlib.figure import Figure
import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from tests.bench import cases
from tests.bench import config as bench_config
from tests.bench import idle
from tests.bench import plot
from tests.bench import pools
from tests.bench import rewards
from tests.bench import run
from tests.bench import serving
from tests.bench import tables
from tests.bench import work

TRL = tables.Contender('trl', 'float32')
STEP = tables.QUANTITIES[0]


def result(*step_secs, tokens=100):
  """A result whose parts are fixed shares of its steps."""
  return {
    'step_secs': list(step_secs),
    'sample_secs': [0.25 * secs for secs in step_secs],
    'update_secs': [0.5 * secs for secs in step_secs],
    'tokens': [tokens for _ in step_secs],
    'peak_rss_mib': 512,
    'first_step_secs': step_secs[0],
    'process_to_first_step_secs': step_secs[0] + 1,
  }


RESULTS = {
  ('A', tables.OURS): [result(9.0, 1.0, 3.0, 2.0), result(9.0, 4.0)],
  ('A', TRL): [result(1.0, 5.0), result(1.0, 6.0)],
  ('B', tables.OURS): [{'error': 'it broke'}, result(9.0, 2.0)],
  ('B', TRL): [result(1.0, 4.0), {'error': 'no memory'}],
}


def test_a_ratio_is_of_the_same_turn_without_the_first_step():
  assert tables.ratios(RESULTS, 'A', TRL, STEP) == [2.5, 1.5]
  speed = tables.QUANTITIES[3]
  assert tables.ratios(RESULTS, 'A', TRL, speed) == pytest.approx([2.5, 1.5])
  assert tables.ratios(RESULTS, 'B', TRL, STEP) == []


def test_a_table_says_what_failed():
  lines = tables.table(RESULTS, [tables.OURS, TRL], STEP).splitlines()
  assert lines[2:] == [
    '| case | grpo_jax | trl | ratio |',
    '| --- | --- | --- | --- |',
    '| A | 3.00 | 5.50 | 2.00 (1.50..2.50) |',
    '| B | 2.00 | 4.00 | - |',
  ]
  assert tables.errors(RESULTS).splitlines() == [
    '- B, grpo_jax, turn 1: it broke',
    '- B, trl, turn 2: no memory',
  ]
  nothing = {('A', tables.OURS): [{'error': 'it broke'}]}
  assert '| A | failed |' in tables.table(nothing, [tables.OURS], STEP)


def test_a_peer_takes_its_turns_with_what_was_fastest(monkeypatch, capsys):
  asked = []

  def run_one(args, command, environment):
    said = dict(word.split('=') for word in command[2:])
    asked.append((said['--parts'], said['--steps'], len(environment)))
    if said['--parts'] == '4':
      return {'error': 'no memory'}
    return result(9.0, {'1': 3.0, '2': 2.0}[said['--parts']])

  monkeypatch.setattr(run, 'run', run_one)
  args = argparse.Namespace(steps=None)
  found = run.tries(args, 'python', 'A', TRL)
  assert [parts for parts, *_ in asked] == ['1', '2', '4', '1']
  assert [variables for *_, variables in asked] == [2, 2, 2, 0]
  bare = tables.Setting(1, as_ours=False)
  assert min(found, key=found.__getitem__) == tables.Setting(2, as_ours=True)
  assert found[bare] == 3.0 and found[tables.Setting(4, True)] == float('inf')
  line = tables.tried_table({('A', TRL): found}).splitlines()[-1]
  secs = '1 part: 3.00; 2 parts: 2.00; 4 parts: inf; 1 part, bare: 3.00'
  assert line == f'| A | trl | {secs} | 1.53 times |'
  alone = dataclasses.replace(cases.CASES['A'], prompts=16, group=1)
  assert work.unshared(alone) == 1


def test_a_random_case_has_a_name_by_which_it_is_the_same():
  one, other = cases.find('R1'), cases.find('R2')
  assert one == cases.find('R1') and one.name == 'R1'
  assert dataclasses.replace(one, name='R2') != other
  for case in (cases.find(f'R{n}') for n in range(50)):
    assert case.width == case.heads * case.head_dim
    assert case.parts[0] == 1 and case.rows <= 128
  with pytest.raises(ValueError, match='no case; give one of A, B'):
    cases.find('Q')


def test_the_share_of_the_machine_is_work_over_time():
  results = {('A', tables.OURS): [result(9.0, 4.0, tokens=512)]}
  limits = {'float32_gflops': 1e-9, 'copy_gbytes': 2e-9}  # 1 FLOP/s, 2 bytes/s
  case = cases.CASES['A']
  cells = tables.limits_table(results, [tables.OURS], limits).split('|')
  trained = work.learn_flops(case, 512) / 2.0  # the update took half of 4 s
  read = work.decode_bytes(case, 512, 'float32') / 1.0 / 2
  assert f' {trained:.0%} ' in cells and f' {read:.0%} ' in cells


def test_work_counts_a_shared_prompt_once():
  case = cases.Case('x', '', 1, 32, 10, prompts=2, group=3, prompt_tokens=2,
                    max_tokens=2)  # fmt: skip
  layer, head = 2 * (4 * 32 * 32 + 3 * 32 * 128), 2 * 32 * 10
  per_seen = 4 * 32
  prompt = 2 * layer + per_seen * (1 + 2)
  completion = 2 * (layer + head) + per_seen * (3 + 4)
  flops = 2 * prompt + 6 * completion
  assert work.forward_flops(case, 12) == flops
  assert work.learn_flops(case, 12) == 4 * flops
  matrices = (layer + head) // 2
  cache = 2 * 32 * (2 * 2 + 6 * 1)  # keys and values; on average one own token
  assert work.decode_bytes(case, 12, 'float32') == 4 * 2 * (matrices + cache)
  assert work.decode_bytes(case, 12, 'bfloat16') == 2 * 2 * (matrices + cache)


@pytest.mark.parametrize('name', ['A', 'F'])
def test_a_config_asks_for_the_case(name):
  case, config = cases.CASES[name], bench_config.get_config(name)
  config = config_lib.resolve(config)
  assert config.sampler.group * config.sampler.prompts == case.rows
  words = bench_config.tokenizer(case)
  lines = bench_config.prompts(case).read_text().splitlines()
  tokenizer = data.Tokenizer.from_file(str(words), ('t0',), 't1')
  assert tokenizer.vocab_size == case.vocab
  for line in lines[:3]:
    record = json.loads(line)
    assert len(tokenizer.encode(record['prompt'])) == case.prompt_tokens
    assert record['half'] == case.vocab // 2
  assert tokenizer.encode('t0 t17') == [0, 17]


def test_end_ids_favour_neither_half():
  assert cases.CASES['A'].end_ids == ()
  case = cases.CASES['F']
  assert len(set(case.end_ids)) == 32
  share = rewards.low_half(
    '', '', {'completion_ids': case.end_ids, 'half': case.vocab // 2}
  )
  assert share == 0.5


def test_the_plot_shows_the_median_of_the_turns_and_says_its_range():
  found = plot.found(RESULTS, 'A', STEP)
  assert found == {'trl': [2.5, 1.5]}
  assert plot.found(RESULTS, 'B', STEP) == {}  # no turn that both finished
  panel = Figure().subplots()
  plot.draw(panel, {'A': found, 'B': {}}, {'': 3})
  marks, goals = (panel.lines[k].get_xdata() for k in (1, -2))
  np.testing.assert_allclose([*marks, *goals], [2.0, 3, 3])
  assert 'is 2.00 to 2.00 times' in plot.title_of(RESULTS, ['A', 'B'])


def test_what_the_benchmark_writes_can_be_drawn_again(tmp_path):
  run.save(tmp_path / 'figures.json', RESULTS, {})
  written = json.loads((tmp_path / 'figures.json').read_text())
  results = plot.results_of(written['runs'])
  assert tables.ratios(results, 'A', TRL, STEP) == [2.5, 1.5]
  assert set(results) == set(RESULTS)
  plot.save(results, tmp_path / 'ratios.svg')
  assert 'times as fast' in (tmp_path / 'ratios.svg').read_text()


def test_a_restart_has_what_the_start_before_it_has_compiled(monkeypatch):
  caches = []

  def timed(args, python, name, contender, setting, cache):
    caches.append(cache)
    if name == 'B' and caches.count(cache) == 2:
      return {'error': 'it broke'}
    return result(9.0 / caches.count(cache))

  monkeypatch.setattr(run, 'timed', timed)
  lines = run.restart(argparse.Namespace(cases=['A', 'B'])).splitlines()
  assert lines[2:] == [
    '| A | cold | 9.00 | 10.0 |',
    '| A | warm | 4.50 | 5.50 |',
    '| B | cold | 9.00 | 10.0 |',
    '| B | warm | it broke | - |',
  ]
  assert caches[0] == caches[1] != caches[2] == caches[3]
  assert caches[0].startswith('--cache=')


def test_the_same_episodes_are_played_at_once_and_in_rounds():
  case = idle.Case(
    episodes=8, rows=4, turns=2, secs=0.01, layers=1, width=16, most=64,
    context=256,
  )  # fmt: skip
  found = idle.compared(case, 1)
  (at_once,), (in_rounds,) = found.values()
  assert at_once.tokens == in_rounds.tokens > 16
  assert at_once.turns == in_rounds.turns == 2 * 8
  for one in (at_once, in_rounds):
    assert 0 < one.busy <= 1 and 0 < one.turn_secs < one.secs
  assert at_once.read < 0.6 < in_rounds.read


def test_a_table_has_a_line_for_each_rollout():
  one = idle.Result(12.34, 0.876, 0.5, 384, 16_863, 0.117)
  lines = idle.table({'at once': [one, one], 'in rounds': [one]}).splitlines()
  assert len(lines) == 2 + 3
  assert lines[2] == lines[3]
  assert lines[4] == '| in rounds | 12.3 | 88% | 0.50 | 384 | 16,863 | 12% |'


def test_both_kinds_of_rows_draw_a_case():
  case = dataclasses.replace(
    cases.CASES['A'], layers=1, width=32, vocab=64, max_tokens=8
  )
  found = pools.measured(case, 2)
  assert len(found) == 2
  assert all(lanes > 0 and contexts > 0 for lanes, contexts in found)
  lines = pools.table({'A': [(0.1, 0.2), (0.1, 0.3), (0.4, 0.4)]}).splitlines()
  assert lines[2] == '| A | 0.100 | 0.300 | 1.00 to 3.00 |'


def test_requests_of_agents_are_counted_and_nothing_is_left():
  pytest.importorskip('uvicorn')
  found = serving.measured(rollouts=1, episodes=4, faults=0.3, clients=2)
  assert found.counts.answered == 4 * serving.TURNS
  assert found.counts.requests > found.counts.answered
  # Threads of the rollout before may have ended meanwhile.
  assert max(found.left) <= 0 < found.cpu_secs
  assert serving.table([found]).count('\n') == 2
