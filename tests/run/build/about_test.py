"""What the config alone tells, and that it is told before JAX is imported."""

import dataclasses
import subprocess
import sys

import pytest

from grpo_jax import config as config_lib
from grpo_jax.run.build import about
from tests import cli
from tests import runs


def facts(**changes):
  """Lines by their name."""
  lines = about.facts(runs.arithmetic(**changes), 'runs/mine')
  assert all(len(line) <= 80 for line in lines), lines
  return {line[2:11].strip(): line[12:] for line in lines}


def test_the_embedded_default_in_eight_lines():
  assert facts() == {
    'run': 'runs/mine',
    'method': 'grpo(kl_coefficient=0.0), learning rate 0.0003',
    'model': '3 layers, width 128, 4 heads of 32',
    'data': 'built-in sums, written backwards: 47+85= is answered 231',
    'warm-up': '300 steps on 256 demonstrations each',
    'rollouts': (
      '100, each 32 prompts x 16 completions of up to 5 tokens, 1 update'
    ),
    'reward': 'exact_match',
    'held-out': (
      '1000 problems, after the warm-up, every 20 rollouts, and at the end'
    ),
  }


@pytest.mark.parametrize(
  'changes, name, said',
  [
    ({'learner.epochs': 2, 'learner.batches': 4}, 'rollouts', '8 updates'),
    ({'optim.brake': 'decay'}, 'method', 'brake decay'),
    ({'model.num_kv_heads': 2}, 'model', '(2 for keys and values)'),
    ({'model.num_layers': 1}, 'model', '1 layer,'),
    ({'warm_up.steps': 0}, 'held-out', 'problems, at the start, every'),
    ({'evaluation.every_steps': 0}, 'held-out', 'warm-up and at the end'),
    ({'data.train': 'mine.jsonl'}, 'data', 'mine.jsonl, tokenizer arithmetic'),
    (
      {
        'data.train': 'mine.jsonl',
        'data.chat': True,
        'data.tokenizer': '',
        'model.path': 'models/qwen',
      },
      'data',
      'mine.jsonl as chats, tokenizer models/qwen',
    ),
  ],
)
def test_what_is_changed_is_said(changes, name, said):
  assert said in facts(**changes)[name]


@pytest.mark.parametrize('display', ['plain', 'none'])
def test_the_screen_is_the_one_that_the_config_asks_for(display, capsys):
  config = runs.small(**{'log.display': display, 'steps': 13})
  with about.start(config, 'runs/mine') as screen:
    screen.write(1, {'loss': 1.0}, [])
  said = capsys.readouterr().err
  assert ('runs/mine' in said and 'rollout 1/13' in said) == (
    display == 'plain'
  )
  assert bool(said) == (display == 'plain')


@pytest.mark.parametrize(
  'changes, absent',
  [({'warm_up.steps': 0}, 'warm-up'), ({'data.heldout': ''}, 'held-out')],
)
def test_what_the_run_does_not_do_is_not_said(changes, absent):
  assert absent not in facts(**changes)


def sources(**weights):
  return tuple({'name': n, 'weight': w} for n, w in weights.items())


@pytest.mark.parametrize(
  'train, said',
  [
    (
      sources(**{'a.jsonl': 3.0, 'b.jsonl': 1.0}),
      'a.jsonl (75 %), b.jsonl (25 %)',
    ),
    (sources(mine=1.0), 'mine (100 %)'),
    (
      sources(arithmetic=1.0, mine=2.0),
      'arithmetic (33.3 %), mine (66.7 %)',
    ),
  ],
)
def test_several_sources_have_their_shares(train, said):
  assert facts(**{'data.train': train})['data'] == (
    f'{said}, tokenizer arithmetic'
  )


def test_every_reward_with_its_weight():
  config = dataclasses.replace(
    runs.arithmetic(),
    rewards=(config_lib.Reward(), config_lib.Reward('my.py:short', 0.5)),
  )
  assert '  reward    exact_match + 0.5 x my.py:short' in about.facts(
    config, 'x'
  )


def test_only_sums_need_a_note():
  assert 'backwards' in about.note(runs.arithmetic())
  assert about.note(runs.arithmetic(**{'data.train': 'mine.jsonl'})) == ''
  mixed = sources(arithmetic=1.0, mine=1.0)
  assert 'backwards' in about.note(runs.arithmetic(**{'data.train': mixed}))


BEFORE_JAX = """
import sys
for heavy in ('jax', 'jaxlib', 'flax', 'orbax', 'optax', 'grain'):
  sys.modules[heavy] = None  # importing it raises an ImportError
sys.argv = ['grpo-jax', 'train', *sys.argv[1:]]
from grpo_jax.commands import main
main.run()
"""


@pytest.mark.parametrize('more', [[], ['--check']])
def test_they_are_shown_before_jax_is_imported(tmp_path, more):
  """In a process that cannot import JAX."""
  done = subprocess.run(
    [
      sys.executable, '-c', BEFORE_JAX, cli.CONFIG,
      f'--workdir={tmp_path}/run', *more,
    ],
    cwd=cli.ROOT,
    env=cli.environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )  # fmt: skip
  first, second, *_ = done.stderr.splitlines()
  assert first == f'  run       {tmp_path}/run'
  assert second.startswith('  method    grpo(')
  assert done.returncode and 'jax' in done.stderr.splitlines()[-1]
  assert not (tmp_path / 'run').exists()
