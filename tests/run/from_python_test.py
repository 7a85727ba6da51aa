"""`grpo_jax.train` as a notebook calls it: no module files, only objects."""

import functools
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import grpo_jax
from grpo_jax import data
from grpo_jax.run import loop
from tests import cli
from tests import runs

NAMED = {'reward': 'tests.judges:even', 'learner.method_kwargs': {}}


def typed(text, name):
  """What a cell of a notebook defines; Python keeps no source of it here."""
  names = {}
  exec(text, names)
  return names[name]


EVEN = """
def even(prompt, completion, example):
  return float(sum(example['completion_ids']) % 2 == 0)
"""


def remainder(divisor):
  """A closure, for a reward of weight 0."""
  return lambda prompt, completion, example: len(completion) % divisor


def objects():
  """Everything that a run can be given, made anew as by another process."""
  return dict(
    rewards=[typed(EVEN, 'even'), (remainder(3), 0.0)],
    prompts=list(data.ArithmeticSource('train')),
    heldout=data.ArithmeticSource('heldout'),
    demonstrations=data.arithmetic_demonstrations(4 * 16, 0.7, 0),
    method=grpo_jax.losses.methods.grpo(),
    tokenizer=data.character_tokenizer(data.ALPHABET),
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of six rollouts, what its callback saw, and what it returned."""
  workdir, seen = tmp_path_factory.mktemp('given') / 'run', []
  config = grpo_jax.load_config('configs/arithmetic.py')
  config.update_from_flattened_dict({**runs.SMALL, 'steps': 6, **runs.WARM})
  result = grpo_jax.train(
    config,
    workdir,
    **objects(),
    on_rollout=lambda *told: seen.append(told),
  )
  return workdir, seen, result


def test_the_callback_gets_numbers_and_the_rollout_after_every_rollout(whole):
  workdir, seen, result = whole
  assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5, 6]
  for (step, numbers, rollout), line in zip(seen, runs.records(workdir)[1:]):
    assert {type(value) for value in numbers.values()} == {float}
    assert numbers['reward/even'] == line['reward/even']
    assert ('heldout_accuracy' in numbers) == (step in (2, 4, 6))
    assert np.mean(rollout.batch.reward) == pytest.approx(numbers['reward'])
    assert len(rollout.texts) == 4 and len(rollout.texts[0]) == 4
  assert result['steps'] == 6 and result['after'] == numbers['heldout_accuracy']


@pytest.mark.long
def test_objects_train_as_their_names_do(whole, tmp_path):
  loop.train(runs.small(steps=6, **NAMED, **runs.WARM), tmp_path)
  (_, arrays, _), (_, others, _) = runs.saved(whole[0]), runs.saved(tmp_path)
  assert arrays.keys() == others.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)
  assert not (tmp_path / 'given.json').exists()


def test_the_workdir_records_what_the_run_was_given(whole):
  workdir, _, _ = whole
  config = json.loads((workdir / 'config.json').read_text())
  given = json.loads((workdir / 'given.json').read_text())
  assert [(one['name'], one['weight']) for one in config['rewards']] == [
    ('<reward even given in Python>', 1.0),
    ('<reward lambda given in Python>', 0.0),
  ]
  assert config['data']['train'] == '<list of 9000 prompts given in Python>'
  assert len(given) == 7
  assert given['<reward even given in Python>']['source'] is None
  assert given['<reward lambda given in Python>']['source'] == (
    'lambda prompt, completion, example: len(completion) % divisor'
  )


@pytest.mark.long
def test_a_run_in_pieces_is_the_run_in_one(whole, tmp_path):
  """Ended by an exit in the callback, by its True, and by Ctrl-C in it."""

  def fails(step, numbers, rollout):
    if step == 3:
      sys.exit(0)
    return 'a text, which does not end the run as True does'

  def interrupts(step, numbers, rollout):
    signal.raise_signal(signal.SIGINT)

  config, workdir = runs.small(steps=6, **runs.WARM), tmp_path / 'pieces'
  before = signal.getsignal(signal.SIGINT)
  with pytest.raises(ValueError, match=r'raised SystemExit\(0\)'):
    grpo_jax.train(config, workdir, **objects(), on_rollout=fails)
  assert runs.saved(workdir)[0] == 3
  result = grpo_jax.train(
    config, workdir, **objects(), on_rollout=lambda *_: np.True_
  )
  assert result['steps'] == 4 == runs.saved(workdir)[0]
  with pytest.raises(KeyboardInterrupt):
    grpo_jax.train(config, workdir, **objects(), on_rollout=interrupts)
  assert runs.saved(workdir)[0] == 5
  assert signal.getsignal(signal.SIGINT) is before
  # The demonstrations are no longer needed, and the config lies in the workdir.
  kept = {k: v for k, v in objects().items() if k != 'demonstrations'}
  grpo_jax.train(None, workdir, **kept)
  runs.assert_equal(workdir, whole[0])
  assert len(json.loads((workdir / 'given.json').read_text())) == 7


@pytest.mark.parametrize(
  'changes, words',
  [
    (
      dict(rewards=None),
      r'was given rewards \(even, lambda\) in Python, and this start was not; '
      r'give the same with grpo_jax.train\(config, workdir, rewards=\[...\]\)',
    ),
    (
      dict(rewards=[typed(EVEN, 'even'), (remainder(2), 0.0)]),
      'The reward lambda is not the one that the run in',
    ),
    (
      dict(
        rewards=[
          typed(EVEN.replace('== 0', '== 1'), 'even'),
          (remainder(3), 0.0),
        ]
      ),
      'The reward even is not the one',
    ),
    (
      dict(method=grpo_jax.losses.methods.grpo(kl_coefficient=0.1)),
      'The method LossTransform is not the one',
    ),
    (dict(on_rollout=3), 'on_rollout=3 is no function'),
  ],
  ids=['nothing', 'closure', 'source', 'method', 'callback'],
)
def test_another_start_is_refused(changes, words, whole):
  with pytest.raises(ValueError, match=words):
    grpo_jax.train(
      runs.small(steps=6, **runs.WARM), whole[0], **{**objects(), **changes}
    )


@pytest.mark.parametrize(
  'command, words',
  [
    (
      ['train'],
      'Training this run needs again what it was given in Python: rewards '
      '(even, lambda), prompts (list of 9000 prompts), heldout',
    ),
    (
      ['eval'],
      'Evaluating this run needs again what it was given in Python: rewards '
      '(even, lambda), heldout (ArithmeticSource of 1000 held-out prompts) and '
      'tokenizer (tokenizer of 14 tokens); call grpo_jax.evaluate(workdir, '
      'rewards=[...], heldout=..., tokenizer=...).',
    ),
    (
      ['sample', '--prompt=01+02='],
      'Sampling from this run needs again what it was given in Python: '
      'tokenizer (tokenizer of 14 tokens); call grpo_jax.sample(workdir, '
      'prompts, tokenizer=...).',
    ),
  ],
)
def test_a_command_that_lacks_an_object_says_what_to_call(
  command, words, whole
):
  cli.assert_refused(cli.call(*command, f'--workdir={whole[0]}'), words)


def test_evaluate_and_sample_take_the_objects_again(whole, tmp_path):
  workdir, _, _ = whole
  given = objects()
  tokenizer = given['tokenizer']
  evaluate = functools.partial(
    grpo_jax.evaluate,
    workdir,
    rewards=given['rewards'],
    heldout=given['heldout'],
    tokenizer=tokenizer,
    answer=lambda completion: completion[:1],
    examples=5,
    samples=2,
    ks=[1, 2],
  )
  summary = evaluate(completions=str(tmp_path / 'all.parquet'))
  with pytest.raises(ValueError, match='/dev/full cannot be written') as error:
    evaluate(completions='/dev/full')
  assert f'The result is {json.dumps(summary)}.' in str(error.value)
  assert summary['checkpoint'] == 6 and summary['examples'] == 5
  assert 0 <= summary['pass@1'] <= summary['pass@2'] <= 1
  assert (tmp_path / 'all.parquet').exists()
  sampled = grpo_jax.sample(
    workdir, ['01+02=', '03+04='], tokenizer=tokenizer, number=2, checkpoint=4
  )
  assert [one['prompt'] for one in sampled] == ['01+02='] * 2 + ['03+04='] * 2
  other = data.character_tokenizer(data.ALPHABET[::-1])
  with pytest.raises(ValueError, match='tokenizer of .* tokens is not the one'):
    grpo_jax.sample(workdir, ['01+02='], tokenizer=other)
  with pytest.raises(ValueError, match="prompts='01.02=' is one text"):
    grpo_jax.sample(workdir, '01+02=', tokenizer=tokenizer)


@pytest.mark.long
def test_a_run_with_a_named_tokenizer_is_sampled_by_the_command(
  tmp_path, monkeypatch
):
  """Neither the method nor the optimizer matters for that."""
  monkeypatch.chdir(tmp_path.parent)
  result = grpo_jax.train(
    runs.small(steps=1, **{'warm_up.steps': 0}),
    tmp_path.name,
    rewards=[remainder(3)],
    prompts=[{'prompt': '01+02='}],
    method=grpo_jax.losses.methods.grpo(),
  )
  assert result['steps'] == 1
  done = cli.call('sample', f'--workdir={tmp_path}', '--prompt=01+02=')
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('01+02=')


@pytest.mark.parametrize(
  'config, words',
  [
    ('no_config.py', 'no_config.py has no function get_config'),
    (3, 'config=3 is of type int; give grpo_jax.config.default'),
    (None, 'There is no run in'),
    ('configs/arithmetic.py:mu=x', "got 'mu=x'"),
  ],
)
def test_what_is_no_config_is_refused(config, words, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'no_config.py').write_text('')
  (tmp_path / 'configs').symlink_to(cli.ROOT / 'configs')
  with pytest.raises(ValueError, match=words):
    grpo_jax.train(config, tmp_path / 'run')


def test_a_config_file_can_be_changed(tmp_path, monkeypatch):
  """In a directory without configs: those of the checkout are found."""
  monkeypatch.chdir(tmp_path)
  config = grpo_jax.load_config('configs/arithmetic.py:mu=8')
  assert config.learner.epochs == 8
  config.update_from_flattened_dict({'steps': 3})  # `whole` trains with one
  assert config.steps == 3
  with pytest.raises(ValueError, match="There is no config file 'run/none.py'"):
    grpo_jax.load_config('run/none.py')


def run_script(script):
  """What a script printed, in a process of its own."""
  return subprocess.run(
    [sys.executable, '-c', script],
    capture_output=True,
    text=True,
    env=cli.environment(),
    timeout=300,
  )


def test_a_script_waits_for_the_compiler():
  """Which would crash if the interpreter ended under it."""
  done = run_script("""
import threading
import time
import grpo_jax
assert grpo_jax.train

def compile():
  time.sleep(1)
  print('compiled')

threading.Thread(target=compile, name='compile ahead', daemon=True).start()
""")
  assert done.stdout == 'compiled\n', done.stderr


@pytest.mark.long
def test_a_script_ends_with_the_error_of_its_reward(tmp_path):
  """In an event loop, as a notebook; standard error is no terminal."""
  script = f"""
import asyncio
import grpo_jax
import sys
assert not [name for name in sys.modules if name.startswith(('jax', 'flax'))]

def reward(prompt, completion, example):
  if example['index'] >= 4:
    raise RuntimeError('no judge is here')
  return 1.0

async def main():
  config = grpo_jax.load_config('configs/arithmetic.py')
  config.update_from_flattened_dict({runs.SMALL!r})
  grpo_jax.train(config, {str(tmp_path)!r}, rewards=[reward],
                 prompts=[{{'prompt': '01+02='}}] * 3)

asyncio.run(main())
"""
  done = run_script(script)
  assert done.returncode == 1, done.stderr
  assert 'rollout 1/4  reward 1' in done.stderr
  last = done.stderr.splitlines()[-1]
  assert last.startswith('grpo_jax.rewards._base.RewardError: The reward ')
  assert 'WARNING:absl' not in done.stderr
