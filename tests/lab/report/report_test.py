"""A page about runs: what stands on it, and what must never."""

import json
import math
import re

import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax.lab import report
from grpo_jax.lab.report import curves
from grpo_jax.lab.report import read
from grpo_jax.lab.report import sections
from grpo_jax.run.keep import metrics_file
from tests.cli import call
from tests.lab.report import made_runs
from tests.lab.report.html_tree import Tree
from tests.lab.report.pages import data_of
from tests.lab.report.pages import page_of
from tests.lab.report.pages import words

REAL = diagnostics.audit
pytestmark = pytest.mark.usefixtures('quick_audit')


@pytest.fixture(scope='module')
def three(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs')
  return [made_runs.run(folder / f's{s}', seed=s) for s in range(3)]


def test_a_page_is_whole_html_and_needs_nothing_else(three):
  text = page_of(three[0])
  tree = Tree(text)
  for tag, attributes, _ in tree.elements:
    for name in ('src', 'srcset', 'data', 'action', 'xlink:href'):
      assert name not in attributes, (tag, attributes)
    assert not any(name.startswith('on') for name in attributes)
    if tag != 'a':
      assert 'href' not in attributes
  style = ''.join(e[2] for e in tree.of('style'))
  assert 'url(' not in style and '@import' not in style
  assert 'http' not in re.sub(r'<a [^>]*>', '', text).replace('http-equiv', '')
  assert not tree.of('link') and not tree.of('img') and not tree.of('iframe')
  (policy,) = tree.of('meta', **{'http-equiv': 'Content-Security-Policy'})
  assert "default-src 'none'" in policy[1]['content']


def test_every_metric_has_its_figure(three):
  text = page_of(three[0])
  found = data_of(text)
  measured = made_runs.record(40).keys() - {'step', 'elapsed_secs'}
  # What is the same in every rollout has a sentence instead.
  assert found.keys() == measured - {'learn_tokens_per_sec'}
  assert 'learn_tokens_per_sec = 500' in words(text)
  for figure in re.findall(r'<figure class="chart".*?</figure>', text, re.S):
    assert re.search(r'<path class="line c0" d="M[\d.]+ [\d.]+', figure)
    assert re.search(r'<h3>[A-Z].*</h3>', figure)


def test_titles_say_what_is_to_be_seen(three):
  text = page_of(three[0])
  assert re.search(r'<h3>Reward rose from 0.1\d* to 0.8\d*</h3>', text)
  assert re.search(r'<h3>Held-out accuracy rose from 20\xa0% to 60\xa0%', text)
  assert re.search(r'<h3>Gradient norm stayed near (1|0.9|1.0)\d*</h3>', text)


def test_a_mean_of_other_rewards_than_0_and_1_is_no_accuracy(tmp_path):
  def metrics(step):
    return {'heldout_graded': 0.5} if step == 20 else {}

  graded = made_runs.run(tmp_path / 'a', metrics=metrics)
  text = words(page_of(graded))
  assert 'Held-out mean reward rose from 0.2 to 0.6' in text
  assert 'held-out mean reward, first to last' in text
  assert 'accuracy' not in text.replace('heldout_accuracy', '')


def test_seeds_are_one_curve_with_an_interval(three):
  data = data_of(page_of(*three))['reward']
  (curve,) = data['curves']
  assert len(curve['runs']) == 3
  k = curve['x'].index(17)
  values = [made_runs.record(17, seed)['reward'] for seed in range(3)]
  want = curves.mean_interval(values)
  assert curve['mean'][k] == pytest.approx(want.mean, rel=1e-4)
  assert curve['high'][k] - curve['mean'][k] == pytest.approx(
    want.half, rel=1e-3
  )
  assert (curve['least'][k], curve['most'][k]) == pytest.approx(
    (min(values), max(values)), rel=1e-4
  )


def test_a_run_that_is_behind_counts_as_far_as_it_is(three, tmp_path):
  short = made_runs.run(tmp_path / 'short', 20, seed=9)
  config = json.loads((short / 'config.json').read_text())
  (short / 'config.json').write_text(json.dumps({**config, 'steps': 40}))
  text = page_of(three[0], three[1], short)
  (curve,) = data_of(text)['reward']['curves']
  both = [made_runs.record(30, seed)['reward'] for seed in (0, 1)]
  k = curve['x'].index(30)
  assert curve['mean'][k] == pytest.approx(np.mean(both), rel=1e-4)
  assert '20 to 40 of 40: not at the end' in words(text)
  tenths = [(0, 37, 41), (1, 37, 41), (9, 19, 21)]
  ends = np.mean(
    [
      np.mean([made_runs.record(step, s)['reward'] for step in range(*span)])
      for s, *span in tenths
    ]
  )
  assert re.search(f'Reward rose from 0.[01]\\d* to {ends:.3g} ± ', text)


def test_other_configs_are_compared_by_what_differs(three, tmp_path):
  other = made_runs.run(tmp_path / 'b', **{'optim.lr': 0.5})
  text = page_of(*three, other)
  curves = data_of(text)['reward']['curves']
  assert [c['name'] for c in curves] == ['lr=0.0003', 'lr=0.5']
  assert [len(c.get('runs', [])) for c in curves] == [3, 0]
  assert 'Where the groups differ' in text and 'optim.lr' in text
  assert re.search(r'Reward ends at 0.\d+ with lr=0.0003 and 0.\d+ with', text)


def test_two_runs_of_one_seed_are_not_independent(three, tmp_path):
  again = made_runs.run(tmp_path / 'again', 30)
  config = json.loads((again / 'config.json').read_text())
  (again / 'config.json').write_text(json.dumps({**config, 'steps': 40}))
  text = page_of(*three, again)
  (curve,) = data_of(text)['reward']['curves']
  assert len(curve['runs']) == 3
  assert 'again and s0 have the same config and the same seed (0)' in text


def test_bins_keep_the_least_and_the_largest(tmp_path):
  spike = {777: {'grad_norm': 1e6}, 778: {'grad_norm': -5.0}}
  made_runs.run(tmp_path / 'a', 1000, metrics=spike.get)
  text = page_of(tmp_path / 'a')
  (curve,) = data_of(text)['grad_norm']['curves']
  assert len(curve['x']) <= 240
  (k,) = [
    k for k, x in enumerate(curve['since']) if x <= 777 <= curve['until'][k]
  ]
  assert curve['high'][k] == 1e6 and min(curve['low']) == -5
  low, high = data_of(text)['grad_norm']['y']
  assert low <= -5 and high >= 1e6  # and they are to be seen
  inside = range(int(curve['since'][k]), int(curve['until'][k]) + 1)
  of_bin = [
    made_runs.record(step)['grad_norm'] for step in inside if step not in spike
  ]
  of_bin += [one['grad_norm'] for step, one in spike.items() if step in inside]
  assert curve['mean'][k] == pytest.approx(np.mean(of_bin), rel=1e-4)
  said = 'Each point is the mean of up to 5 rollouts. Band: least to largest'
  assert said in text


@pytest.mark.long
def test_ten_thousand_rollouts_are_a_small_page(tmp_path):
  folder = made_runs.run(tmp_path / 'a', None)
  names = ['reward', 'entropy', *(f'metric_{k}' for k in range(80))]
  values = np.random.default_rng(0).normal(size=(10_000, len(names))).tolist()
  with (folder / 'metrics.jsonl').open('w') as file:
    for step, row in enumerate(values):
      file.write(json.dumps({'step': step, **dict(zip(names, row))}) + '\n')
  size = report.write(tmp_path / 'page', report.make_page([str(folder)]))
  assert size == (tmp_path / 'page').stat().st_size
  assert size < 5e6
  assert len(data_of((tmp_path / 'page').read_text())) == len(names)


def test_many_runs_are_a_small_page_too():
  rng, steps = np.random.default_rng(0), np.arange(400)
  names = [f'metric_{k}' for k in range(80)]

  def run():
    values = {name: rng.normal(size=len(steps)) for name in names}
    return read.Run(
      '', None, {}, None, metrics_file.Metrics(steps, values, 0), [], []
    )

  of_groups = [read.Group(f'{k}', [run(), run(), run()]) for k in range(4)]
  charts = sections.Charts(of_groups)
  page = report.Page('', '', [sections.others(charts)])
  assert len(report.as_html(page)) < 5e6
  assert charts.most_points >= 60


def test_what_a_run_says_is_never_read_as_html(tmp_path):
  nasty = made_runs.NASTY
  folder = made_runs.run(tmp_path / '<b>run"\'')
  config = json.loads((folder / 'config.json').read_text())
  config['evaluation']['answer'] = config['data']['tokenizer'] = nasty
  config['learner']['method'] = nasty
  (folder / 'config.json').write_text(json.dumps(config))
  start = {'git': nasty, 'changed': {nasty: [nasty, 1]}, 'after_step': nasty}
  starts = [{'changed': 3}, {'changed': {'a': 1, 'b': []}}, start]
  (folder / 'versions.json').write_text(json.dumps(starts))
  (folder / 'traceback.txt').write_text(f'ValueError: {nasty}')
  lines = folder / 'metrics.jsonl'
  with lines.open('a') as file:
    file.write(json.dumps({'step': 41, f'reward/{nasty}': 1.0}) + '\n')
  made_runs.with_completions(
    folder, 5, texts=[[nasty, 'a'], [nasty, 'b']], prompts=[nasty] * 2
  )
  made_runs.with_evaluations(folder, [(0, 1)], prompts=[nasty])
  other = made_runs.run(tmp_path / '<i>other', **{'optim.lr': 0.5})
  text = page_of(folder, other)
  tree = Tree(text)
  assert not tree.of('img') and not tree.of('b', src='x')
  ours = [e for e in tree.of('script') if 'type' not in e[1]]
  assert len(ours) == 1
  assert not any('alert' in str(e[1].get('onerror')) for e in tree.elements)
  # It is all there to be read, though.
  assert '<img src=x onerror="alert(1)">' in words(text)
  assert '\x1b' not in text and '\\x1b[31m' in text


def test_what_starts_have_changed_is_told(tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  starts = [
    {'after_step': 0},
    {'after_step': 3, 'changed': {'optim.lr': [0.5, 1], 'steps': [3, 6]}},
    {'after_step': 6, 'changed': {'optim.lr': [1, 2.5]}},
  ]
  (folder / 'versions.json').write_text(json.dumps(starts))
  said = words(page_of(folder))
  assert 'optim.lr from 0.5 to 1 after rollout 3; steps from 3 to 6 af' in said
  assert 'optim.lr from 1 to 2.5 after rollout 6' in said


def test_no_part_of_a_page_is_read_as_html():
  """Whoever writes the page, and wherever the text stands."""
  bad = made_runs.NASTY
  points = [(np.arange(3), np.arange(3.0)), (np.arange(3), np.ones(3))]
  curves = [
    report.make_curve(bad, points),
    report.make_curve(bad, points),
  ]
  token = report.Token(bad, 1.0, -1.0)
  each = [
    report.Completion(bad, bad, 1.0, note=bad),
    report.Completion(bad, bad, 1.0, [token], bad),
  ]
  parts = [
    report.Text(bad),
    report.Text(bad, 'heading'),
    report.Facts([(bad, bad)]),
    report.Table(bad, (bad, bad), [(bad, bad)]),
    report.Table(bad, (), [(bad, bad)], True),
    report.Chart(bad, bad, curves, bad, bad, bad, bad),
    report.Timeline(bad, [(bad, [1.0])], 0, 2, bad),
    report.Completions(bad, bad, each),
  ]
  text = report.as_html(report.Page(bad, bad, [report.Section(bad, parts)]))
  tree = Tree(text)
  kinds = [e[1].get('type', 'ours') for e in tree.of('script')]
  assert kinds == ['application/json', 'ours']
  assert not tree.of('img') and '\x1b' not in text
  for _, attributes, _ in tree.elements:
    assert 'onerror' not in attributes
  (data,) = tree.of('script', type='application/json')
  assert json.loads(data[2])['curves'][0]['name'] == bad


MISSING = {
  'no line yet': (dict(rollouts=None), 'It has no line in metrics.jsonl yet'),
  'before the first rollout': (dict(rollouts=0), 'stayed|is 20'),
  'one rollout': (dict(rollouts=1), 'Reward is '),
  'NaN': (
    dict(metrics=lambda step: {'reward': math.nan, 'loss': None}),
    'Entropy fell',
  ),
  'some NaN': (
    dict(metrics=lambda step: {'reward': None} if 9 < step < 20 else {}),
    'Measured in 30 of 41 rollouts',
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', MISSING)
def test_what_is_missing_leaves_a_page(name, tmp_path):
  made, said = MISSING[name]
  made_runs.run(tmp_path / 'a', **made)
  text = page_of(tmp_path / 'a')
  Tree(text)
  assert re.search(said, text)
  assert 'None were written' in text and 'No two evaluations' in text


def broken_line(folder):
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write('\n{"step": 41, "rew\n[1]\n{"step": "x"}\n')


def without_versions(folder):
  (folder / 'versions.json').write_text('{')


def of_the_future(folder):
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**config, 'hover': 1}))


def of_a_lost_method(folder):
  config = json.loads((folder / 'config.json').read_text())
  config['learner']['method'] = 'no_such_module:loss'
  (folder / 'config.json').write_text(json.dumps(config))


def of_a_lost_tokenizer(folder):
  config = json.loads((folder / 'config.json').read_text())
  config['data'] |= {'train': 'x.jsonl', 'tokenizer': 'gone.json'}
  (folder / 'config.json').write_text(json.dumps(config))
  made_runs.with_completions(folder, 5)


def of_a_broken_transcript(folder):
  made_runs.with_completions(folder, 5)
  next((folder / 'completions').iterdir()).write_bytes(b'PAR1 not')


def without_effects(folder):
  made_runs.with_completions(folder, 5, effects=False)


def ended(folder):
  (folder / 'traceback.txt').write_text('Traceback\nValueError: it is over')


BROKEN = {
  broken_line: '3 lines of metrics.jsonl could not be read and are left out',
  without_versions: 'There is no versions.json',
  of_the_future: 'cannot read all of its config',
  of_a_lost_method: 'cannot be audited here',
  of_a_lost_tokenizer: '>4 </i>',
  of_a_broken_transcript: 'None were written, or none can be read',
  without_effects: 'was not measured; a run with --config.log.token_effects',
  ended: 'A start ended with an error: ValueError: it is over',
}


@pytest.mark.parametrize('damage', BROKEN, ids=lambda f: f.__name__)
def test_what_is_broken_is_said_and_leaves_a_page(damage, tmp_path):
  damage(made_runs.run(tmp_path / 'a'))
  text = page_of(tmp_path / 'a')
  Tree(text)
  assert BROKEN[damage] in text
  assert 'Reward rose' in text


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(
    ValueError, match='There is no run in .*; give the workdir'
  ):
    page_of(tmp_path)
  (tmp_path / 'config.json').write_text('[')
  with pytest.raises(ValueError, match='is no JSON'):
    page_of(tmp_path)
  with pytest.raises(ValueError, match='A workdir is empty'):
    page_of('')


def test_alarms_stand_at_the_rollout_that_they_began_at(tmp_path):
  def metrics(step):
    return {'entropy': 0.001} if step in (7, 8, 30) else {}

  made_runs.run(tmp_path / 'a', metrics=metrics)
  text = page_of(tmp_path / 'a')
  tree = Tree(text)
  assert '2 alarms, by rollout' in text
  marks = [e[1] for e in tree.of('i') if 'title' in e[1]]
  assert [mark['title'] for mark in marks] == ['rollout 7', 'rollout 30']
  assert [mark['style'] for mark in marks] == ['left:17.50%', 'left:75.00%']
  assert 'Entropy is 0.001 nats per token, below log.entropy_alarm' in text
  made_runs.run(tmp_path / 'b')
  assert 'None: no metric was beyond its limit' in page_of(tmp_path / 'b')


def test_the_same_problems_before_and_after(tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  outcomes = (
    [(0, 1)] * 5 + [(1, 0)] * 2 + [(1, 1)] * 3 + [(0, 0), (math.nan, 1)]
  )
  made_runs.with_evaluations(folder, outcomes)
  text = page_of(folder)
  assert (
    'Within 40 rollouts, 5 of 11 problems became right and 2 became' in text
  )
  shown = [e for e in Tree(text).of('article')]
  assert len(shown) == 3 + 2 + 1
  assert 'before the first rollout: wrong, reward 0' in text
  assert 'after 40 rollouts: right, reward 1' in text
  assert 'answer 0' in text and 'answer 1' in text


def test_tokens_have_the_colours_of_what_updates_did(tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  made_runs.with_completions(folder, 5, 25)
  text = page_of(folder)
  assert 'Rollout 5' in text and 'Rollout 25' in text
  blocks = Tree(text).of('pre', **{'class': 'tokens'})
  assert blocks[0][1]['data-values'] == '-0.25,0.125 -0.25,0.125'
  assert '<i class="a-5 r5">2</i>' in text  # token 4 of sums is the digit 2
  assert text.count('name="shade"') == 2  # one choice for the page


def test_the_method_is_audited_in_words(tmp_path, monkeypatch):
  monkeypatch.setattr(sections.diagnostics, 'audit', REAL)
  folder = made_runs.run(tmp_path / 'a')
  config = json.loads((folder / 'config.json').read_text())
  config['learner'] |= {'method': 'dapo', 'method_kwargs': {'high': 0.5}}
  (folder / 'config.json').write_text(json.dumps(config))
  text = page_of(folder)
  assert 'dapo(high=0.5)' in text
  assert 'zero above 1.5 for A &gt; 0 and below 0.8 for A &lt; 0' in text


def test_the_command_writes_the_page_and_says_what_is_wrong(tmp_path):
  made_runs.run(tmp_path / 'a')
  broken_line(made_runs.run(tmp_path / 'b', seed=1))
  out = tmp_path / 'page.html'
  runs = f'--workdir={tmp_path / "a"}', str(tmp_path / 'b')
  done = call('report', *runs, f'--out={out}', '--json')
  assert done.returncode == 0, done.stderr
  said = json.loads(done.stdout)
  assert said['out'] == str(out) and said['bytes'] == out.stat().st_size
  (warning,) = said['warnings']
  assert warning.startswith('b: 3 lines of metrics.jsonl could not be read')
  Tree(out.read_text())


def test_a_study_makes_a_page_of_its_own(tmp_path):
  rates = np.array([1e-4, 1e-3, 1e-2])
  made = [(rates, np.array([0.1, 0.5, 0.2]) + seed) for seed in (0, 0.1)]
  chart = report.Chart(
    'The best rate is 0.001',
    'Reward after training.',
    [report.make_curve('Adam', made)],
    x_label='learning rate',
    x_log=True,
  )
  parts = [
    report.Text('A sentence.'),
    report.Table('T', ('a', 'b'), [('x', '1')]),
    chart,
  ]
  page = report.Page(
    'A study', 'Its question.', [report.Section('Results', parts)]
  )
  report.write(tmp_path / 'deep' / 'study.html', page)
  text = (tmp_path / 'deep' / 'study.html').read_text()
  Tree(text)
  assert 'data-x="learning rate"' in text and 'A sentence.' in text
  assert '<td class="number">1</td>' in text
  assert '95 % interval of the mean over runs' in text
