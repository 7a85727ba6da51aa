"""Runs whose completions are episodes with an environment."""

import functools
import json
import math

import numpy as np
import pytest
import tokenizers

import grpo_jax
from grpo_jax.environments import sessions
from grpo_jax.planning import dry_run
from grpo_jax.run import learning
from grpo_jax.run import loop
from grpo_jax.run import policy
from tests import compilations
from tests import runs
from tests.run import export_test

pytestmark = pytest.mark.usefixtures('shared_programs')

TEMPLATE = (
  '{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}'
  '{% if add_generation_prompt %}<|assistant|> {% endif %}'
)
SPECIAL = ('<|end|>', '<|user|>', '<|assistant|>')


@pytest.fixture(scope='module')
def words(tmp_path_factory):
  """The folder of a tokenizer of few words, so that turns end by chance."""
  said = ['guess', 'higher', 'lower', '0', '1', '2', '3', '<unk>']
  vocab = {word: number for number, word in enumerate([*SPECIAL, *said])}
  made = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token='<unk>')
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  made.add_special_tokens([*SPECIAL])
  folder = tmp_path_factory.mktemp('words')
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'chat_template.jinja').write_text(TEMPLATE)
  told = {'eos_token': '<|end|>', 'pad_token': '<|end|>'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(told))
  return folder


async def guess(policy, example, seed):
  """A digit below 4, in three turns."""
  if 'fails' in example:
    raise ValueError(example['fails'])
  wanted, said = str(seed % 4), 'guess'
  for _ in range(3):
    reply = await policy.say(said)
    if reply.text.strip() == wanted:
      return 1.0
    policy.reward(-0.1)
    said = 'higher' if reply.text < wanted else 'lower'
  return 0.0


class Other:
  """A single turn."""

  def reset(self, example, seed):
    return example['prompt']

  def step(self, action):
    raise AssertionError('never played')


def config(words, **changes):
  return runs.small(
    **{
      'seed': 2,
      'steps': 2,
      'data.chat': True,
      'data.tokenizer': str(words),
      'data.train': 'episodes',
      'data.heldout': 'episodes',
      'data.prompt_buckets': (32,),
      'data.completion_buckets': (64,),
      'environment.max_turns': 4,
      'sampler.max_tokens': 6,
      'evaluation.examples': 3,
      'checkpoint.every_steps': 1,
      **changes,
    }
  )


@pytest.fixture(scope='module')
def whole(words, tmp_path_factory, shared_programs):
  """A run of two rollouts, and what its callback saw."""
  workdir, seen = tmp_path_factory.mktemp('episodes') / 'run', []
  grpo_jax.train(
    config(words),
    workdir,
    environment=guess,
    on_rollout=lambda step, metrics, rollout: seen.append(rollout),
  )
  return workdir, seen


def test_turns_are_trained_and_what_is_said_to_them_is_not(whole):
  _, seen = whole
  assert len(seen) == 2
  for rollout in seen:
    assert rollout.reward_names == ('environment',)
    assert rollout.batch.valid.all()
    drawn, turns = rollout.batch.mask.sum(-1), rollout.batch.extras['turn']
    assert (turns.max((1, 2)) >= 1).any()
    # Between two turns stands what the environment says.
    several = turns.max(-1) >= 1
    assert (drawn < rollout.length)[several].all()


def test_metrics_tell_how_the_engine_was_used(whole):
  first, *records = runs.records(whole[0])
  assert len(records) == 2 and 'engine_read_share' not in first
  for record in records:
    assert 0 <= record['engine_idle_share'] < 1
    assert 0 < record['engine_read_share'] < 0.9  # the rest was in caches
    assert record['engine_parked_share'] == record['branches'] == 0


def test_a_rollout_in_which_more_is_said_than_before_compiles_nothing(
  words, tmp_path
):
  said, seen = ['guess'], []

  async def talks(policy, example, seed):
    del example, seed
    for text in ('guess', *said):
      await policy.say(text)
    return 1.0

  def on_rollout(step, metrics, rollout):
    del metrics, rollout
    seen.append(len(compiled))
    said[:] = ['guess ' * 30] if step == 1 else ['guess ' * 8, 'lower ' * 12]

  changes = {'steps': 3, 'data.heldout': '', 'sampler.max_rows': 4}
  with compilations.compiled_programs() as compiled:
    grpo_jax.train(
      config(words, **changes),
      tmp_path,
      environment=talks,
      on_rollout=on_rollout,
    )
  assert compiled.count('read_contexts') == 3  # a program for each piece
  first, *others = seen
  assert first > 0 and others == [first, first], compiled[first:]


def test_killed_among_episodes_it_goes_on(words, whole, tmp_path, monkeypatch):
  """At the fifth answer in the second rollout."""
  real, learn, left = sessions.Player.answer, learning.learn, []

  def note(*given):
    left.extend(range(5))
    return learn(*given)

  def answer(self, *given):
    if left and not left.pop():
      raise export_test.Killed
    return real(self, *given)

  with monkeypatch.context() as patch:
    patch.setattr(learning, 'learn', note)
    patch.setattr(sessions.Player, 'answer', answer)
    with pytest.raises(ValueError, match='raised Killed'):
      grpo_jax.train(config(words), tmp_path, environment=guess)
  assert len(runs.records(tmp_path)) == 2
  grpo_jax.train(config(words), tmp_path, environment=guess)
  runs.assert_equal(whole[0], tmp_path)


def test_the_workdir_records_the_environment(whole):
  (record,) = [
    one
    for name, one in json.loads((whole[0] / 'given.json').read_text()).items()
    if 'environment' in name
  ]
  assert record['name'] == 'tests.run.environments_test.guess'
  assert 'A digit below 4' in record['source']


@pytest.mark.parametrize(
  'environment, message',
  [
    (Other, 'environment Other'),
    (None, 'was given environment'),
    (3, 'environment=3 is of type int; give an async function'),
  ],
)
def test_another_environment_is_refused(environment, message, words, whole):
  with pytest.raises(ValueError, match=message):
    grpo_jax.train(config(words), whole[0], environment=environment)


def test_evaluation_plays_episodes(whole):
  evaluate = functools.partial(
    grpo_jax.evaluate,
    whole[0],
    examples=4,
    samples=2,
    ks=[1, 2],
  )
  with pytest.raises(ValueError, match='given in Python: environment .guess.'):
    evaluate()
  found = evaluate(environment=guess)
  assert found['examples'] == 4 and 0 <= found['pass@1'] <= 1
  assert found == evaluate(environment=guess)
  with pytest.raises(ValueError, match='max_tokens=9, but turns .* at most 6'):
    evaluate(environment=guess, max_tokens=9)


@pytest.mark.long
def test_a_check_plays_with_what_a_config_names(words, tmp_path):
  named = config(
    words,
    **{
      'environment.name': 'tests.run.environments_test:guess',
      'environment.processes': 1,
      'rewards': ({'name': 'environment'},),
    },
  )
  report = dry_run.inspect(named, tmp_path / 'none')
  assert report['first_rollout']['not judged'] == 0
  assert 'guess' in report['first_rollout']['prompts'][0]


def test_records_that_a_config_names_number_episodes():
  source = grpo_jax.data.EpisodesSource('heldout')
  numbers = [one['number'] for one in source]
  assert numbers == list(range(10_000, 11_000))
  assert len({one['prompt'] for one in source}) == 1_000
  assert len(grpo_jax.data.EpisodesSource('train')) == 10_000
  with pytest.raises(ValueError, match="no split 'test'"):
    grpo_jax.data.EpisodesSource('test')


@pytest.mark.parametrize('prompt', ['guess it', '{"prompt": "x", "answer": 3}'])
def test_samples_are_episodes(prompt, whole):
  sample = functools.partial(grpo_jax.sample, whole[0], environment=guess)
  found = sample([prompt], number=3)
  assert [one['prompt'] for one in found] == [prompt] * 3
  for one in found:
    said = one['messages']
    roles = ['user', 'assistant'] * (len(said) // 2)
    assert [message['role'] for message in said] == roles
    assert said[0]['content'] == 'guess' and one['ended'] and not one['failure']
    shown = policy.transcript(one).splitlines()
    assert len(shown) == len(said) + 1 and shown[0] == 'user: guess'
    assert shown[-1].startswith(f'[{one["ended"]}')
  assert found == sample([prompt], number=3)


def test_a_record_reaches_the_episode_and_a_failure_is_told(whole):
  record = {'prompt': '', 'fails': 'as asked'}
  for given in record, json.dumps(record):
    (one,) = grpo_jax.sample(whole[0], [given], environment=guess)
    assert 'as asked' in one['failure'] and one['reward'] is None
    assert 'failed: ' in policy.transcript(one) and one['ended'] == 'failed'


@pytest.mark.long
@pytest.mark.parametrize('layout', ['padded', 'packed', 'shared'])
def test_what_is_measured_of_answers_is_measured_of_episodes(
  layout, words, tmp_path
):
  measured = {
    'optim.overshoot_every_steps': 1,
    'optim.moments': True,
    'log.geometry_every_steps': 1,
    'log.token_effects': True,
    'log.expected_prefixes': True,
    'sampler.resample_rounds': 1,
    'learner.epochs': 2,
    'learner.layout': layout,
  }
  seen = []
  grpo_jax.train(
    config(words, **measured),
    tmp_path,
    environment=guess,
    on_rollout=lambda step, metrics, rollout: seen.append((metrics, rollout)),
  )
  for name in (
    'overshoot', 'adam_carried_norm', 'geometry_cosine_mean',
    'prefix_part_tokens', 'prefix_part_uncancelled_expected', 'kl_old_k3',
    'prefix_turn0_contexts', 'prefix_turn1_uncancelled_expected',
  ):  # fmt: skip
    assert math.isfinite(seen[-1][0][name]), name
  for metrics, rollout in seen:
    assert metrics['sampler_gap'] < 1e-5 and metrics['turns_max'] > 1
    # Groups that were drawn again keep what belongs to them.
    turns = rollout.batch.extras['turn'].max(-1) + 1
    told = np.array([[one.turns for one in row] for row in rollout.accounts])
    np.testing.assert_array_equal(turns, told)


async def forks(policy, example, seed):
  """Forks of a fork, and one before anything is said."""
  early = policy.fork()
  await policy.say('guess')
  fork = policy.fork()
  await fork.say('higher')
  await fork.fork().say('lower')
  await fork.say('0')
  await policy.say('1')
  reply = await early.say(str(seed % 4))
  return float(reply.tokens % 2)


@pytest.mark.parametrize(
  'changes',
  [
    {'learner.layout': 'packed'},
    pytest.param(
      {'learner.layout': 'shared', 'mesh.context': 2, 'mesh.fsdp': 2},
      marks=pytest.mark.long,
    ),
    pytest.param(
      {'learner.layout': 'padded', 'model.window_tokens': (6,)},
      marks=pytest.mark.long,
    ),
  ],
  ids=str,
)
def test_branches_are_learned_behind_what_they_have_read(
  changes, words, tmp_path
):
  seen = []
  grpo_jax.train(
    config(
      words,
      **{
        'steps': 1,
        'environment.max_turns': 9,
        'sampler.max_tokens': 24,
        'data.completion_buckets': (256,),
        'optim.warmup_steps': 0,
        **changes,
      },
    ),
    tmp_path,
    environment=forks,
    on_rollout=lambda step, metrics, rollout: seen.append((metrics, rollout)),
  )
  for metrics, rollout in seen:
    assert metrics['sampler_gap'] < 1e-5 and metrics['update_norm'] > 0
    # All have heard 'guess' alone before their first turn.
    assert metrics['prefix_turn0_contexts'] == pytest.approx(1)
    begins = rollout.previous != np.arange(rollout.previous.shape[-1]) - 1
    is_there = np.arange(begins.shape[-1]) < rollout.length[..., None]
    assert np.sum(begins & is_there, axis=-1).max() >= 3


@pytest.mark.long
def test_turns_are_credited_and_it_goes_on_bit_for_bit(
  words, tmp_path, monkeypatch
):
  """By a method that reads all that is told of turns; killed in rollout 2."""
  changes = {
    'steps': 3,
    'learner.method': 'gigpo',
    'learner.method_kwargs': {},
    'sampler.resample_rounds': 1,
    'log.completions_every_steps': 1,
  }
  credited, seen = config(words, **changes), []
  grpo_jax.train(
    credited,
    tmp_path / 'whole',
    environment=guess,
    on_rollout=lambda step, metrics, rollout: seen.append(rollout),
  )
  for rollout in seen:
    earned = rollout.batch.extras['turn_reward']
    told = [[one.turn_rewards or () for one in x] for x in rollout.accounts]
    for (p, g), _ in np.ndenumerate(rollout.batch.reward):
      own = earned[p, g, : len(told[p][g])]
      np.testing.assert_array_equal(own, np.float32(told[p][g]))
    assert earned.shape[-1] == 4 and np.any(earned)
    assert np.any(rollout.batch.extras['turn_state'])
  records = runs.records(tmp_path / 'whole')[1:]
  assert all(record['grad_norm'] > 0 for record in records)
  real, calls = learning.learn, []

  def learn(*given):
    calls.append(None)
    if len(calls) == 2:
      raise export_test.Killed
    return real(*given)

  with monkeypatch.context() as patch:
    patch.setattr(learning, 'learn', learn)
    with pytest.raises(ValueError, match='raised Killed'):
      grpo_jax.train(credited, tmp_path / 'again', environment=guess)
  assert len(runs.records(tmp_path / 'again')) == 2
  grpo_jax.train(credited, tmp_path / 'again', environment=guess)
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'again')
  named = {
    'environment.name': f'{__name__}:guess',
    'environment.where': 'here',
    'rewards': ({'name': 'environment'},),
  }
  loop.train(
    config(words, **changes, **named),
    tmp_path / 'replay',
    replay=tmp_path / 'whole' / 'completions',
  )
  arrays = [runs.saved(tmp_path / name)[1] for name in ('whole', 'replay')]
  for name, array in arrays[0].items():
    if 'params' in name:
      np.testing.assert_array_equal(array, arrays[1][name], err_msg=name)
