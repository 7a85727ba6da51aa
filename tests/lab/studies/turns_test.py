"""The weight of first turns: what is measured, and how it is summed up."""

import dataclasses
import json

import numpy as np
import pytest

import grpo_jax
from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies import turns
from tests import runs

# One group of two. The first begins with 3 and has one turn, the second begins
# with 1 and has three; the end of the first counts as the others' turns do.
MASK = np.array([[[1, 0, 0, 0, 0], [1, 0, 1, 0, 1]]], bool)
REWARD = np.array([[1.0, 0.0]], np.float32)


def played():
  return losses.make_batch(
    MASK,
    REWARD,
    tokens=np.array([[[3, 0, 0, 0, 0], [1, 7, 2, 7, 2]]], np.int32),
    extras={
      'turn': np.array([[[0, 0, 0, 0, 0], [0, 0, 1, 1, 2]]], np.int32),
      'turn_reward': np.array([[[0.5, 0, 0], [0, 0, 0]]], np.float32),
    },
  )


def test_pulls_of_first_turns_are_weight_times_advantage():
  found = turns.first_turn_pulls(played())
  assert found['count'] == [0, 1, 0, 1]
  for credit in turns.CREDITS:  # both advantages are +-1/2 here
    assert found[f'{credit}_tokens_shift'] == [0]
    # 1/2 and -1/2, of one token and of three: 1/2 - 1/6 over 1/2 + 1/6.
    assert found[f'{credit}_lengths_shift'] == pytest.approx([0.5])
    assert found[f'{credit}_tokens_by_id'] == pytest.approx([0, -0.5, 0, 0.5])
    by_id = found[f'{credit}_lengths_by_id']
    assert by_id == pytest.approx([0, -0.25, 0, 0.75])


def fixed(seed, *pulls):
  """Rollouts in which ids 0 and 1 are drawn 1 and 3 times."""
  numbers = {'count': [[1, 3]] * len(pulls)}
  for credit in turns.CREDITS:
    numbers |= {
      f'{credit}_tokens_shift': [[0.0, 0.0]] * len(pulls),
      f'{credit}_lengths_shift': [[0.1 * seed, 0.3]] * len(pulls),
      f'{credit}_tokens_by_id': [[x, -x] for x in pulls],
      f'{credit}_lengths_by_id': [[0.0, x] for x in pulls],
    }
  return turns.Outcome(turns.ARMS[0], seed, len(pulls), numbers)


def test_the_bias_is_that_of_expected_gradients():
  rows = turns.of_fixed([fixed(1, 2.0, 2.0), fixed(2, 2.0, -1.0, 3.0, 1.0)])
  assert [row.name for row in rows] == [*turns.CREDITS]
  of_turn = {name: one.mean for name, one in rows[0].values.items()}
  assert of_turn['tokens'] == 0
  assert of_turn['lengths'] == pytest.approx((0.2 + 0.25) / 2)
  # The pull on id 1 alone, less what a pull on both as they are drawn would be,
  # raises id 1 and lowers id 0.
  assert of_turn['cosine'] == pytest.approx(-1)
  assert of_turn['halves'] == pytest.approx(1)
  one = turns._gradient(
    fixed(0, 2.0, 3.0).numbers, 'turn_lengths_by_id', np.s_[:]
  )
  np.testing.assert_allclose(one, [-5 / 4, 5 / 4])
  assert turns.of_fixed([]) == []
  (single, _) = turns.of_fixed([fixed(1, 2.0)])
  assert np.isnan(single.values['halves'].mean)  # it has no halves


def trained(label, seed, solved):
  numbers = {'solved': solved, 'turns': [5.0] * len(solved)}
  return turns.Outcome(turns.Arm(label), seed, len(solved), numbers)


def test_trainings_are_compared_seed_by_seed_and_part_by_part():
  rows = turns.of_training(
    [
      trained('tokens', 0, [0.0, 0.2, 0.4, 0.6]),
      trained('lengths', 0, [0.1, 0.3, 0.4, 0.6]),
      trained('tokens', 1, [0.2, 0.2, 0.8, 0.8]),
      trained('lengths', 1, [0.5, 0.5, 0.8, 0.8]),
      trained('tokens', 2, [0.8, 0.8, 0.8, 0.8]),
    ],
    parts=2,
  )
  found = {row.name: row.values['solved'] for row in rows}
  assert [*found] == [
    f'{arm} {part}'
    for part in ('1-2', '3-4')
    for arm in ('tokens', 'lengths', 'lengths - tokens')
  ]
  assert found['tokens 1-2'].mean == pytest.approx(1.1 / 3)
  gap = found['lengths - tokens 1-2']
  assert gap.mean == pytest.approx(0.2)
  assert gap.half == pytest.approx(12.706 * 0.1, rel=1e-3)
  assert found['lengths - tokens 3-4'] == (0, 0, 2)
  alone = turns.of_training([trained('lengths', 0, [1.0])])
  assert [row.name for row in alone] == ['lengths 1-1']


def of_claims(seed, shift=0.3, harm=0.005, turned=0.0, left=0.2, kept=0.0):
  """Outcomes of a seed: what the claims are about is what is given."""
  one = fixed(seed, 2.0, 2.0).numbers
  for credit, sign in (('turn', 1), ('episode', -1)):
    one[f'{credit}_lengths_shift'] = [[sign * shift, sign * shift]] * 2
    one[f'{credit}_tokens_shift'] = [[kept, kept]] * 2
    # Of three ids, drawn equally often; the gradient turns out of a plane.
    one[f'{credit}_tokens_by_id'] = [[1.0, -1.0, 0.0]] * 2
    one[f'{credit}_lengths_by_id'] = [[1.0, -1.0 - turned, turned]] * 2
  one['count'] = [[1, 1, 1]] * 2
  outcomes = [turns.Outcome(turns.ARMS[0], seed, 2, one)]
  for arm, worse in (('tokens', 0.0), ('lengths', harm)):
    numbers = {
      'first': [0.1 * seed - worse, 0.3 - worse],
      'solved': [0.5 - worse, 0.1 * seed - worse],
      'uncancelled': [left if arm == 'lengths' else kept] * 2,
      'pull': [None, 1.0],
    }
    outcomes.append(turns.Outcome(turns.Arm(arm), seed, 2, numbers))
  return outcomes


def verdicts(**given):
  outcomes = [one for seed in range(2) for one in of_claims(seed, **given)]
  found = json.loads(json.dumps(turns.numbers(outcomes)))
  rows = claims.check(turns.EXPERIMENT, found)
  return {row.name: row.verdict for row in rows}


EXPECTED = {
  'one_weight_turn': claims.HOLDS,
  'one_weight_episode': claims.HOLDS,
  'length_turn': claims.HOLDS,
  'length_episode': claims.HOLDS,
  'direction_turn': claims.HOLDS,
  'direction_episode': claims.HOLDS,
  'trained_one_weight': claims.HOLDS,
  'trained_length': claims.HOLDS,
  'first_guess': claims.HOLDS,
  'solved': claims.HOLDS,
}


@pytest.mark.parametrize(
  'given, turned',
  [
    ({}, set()),
    ({'shift': -0.3}, {'length_turn', 'length_episode'}),
    ({'harm': -0.1}, {'first_guess', 'solved'}),
    ({'harm': 0.1}, {'first_guess'}),
    # What is the same is not more.
    ({'harm': 0.0}, {'solved'}),
    ({'shift': 0.0}, {'length_turn', 'length_episode'}),
    ({'turned': 0.0}, {'direction_turn', 'direction_episode'}),
    ({'left': 0.0}, {'trained_length'}),
    (
      {'kept': 1e-3},
      {'one_weight_turn', 'one_weight_episode', 'trained_one_weight'},
    ),
  ],
)
def test_claims_follow_from_what_was_measured(given, turned):
  found = verdicts(**{'turned': 0.5, **given})
  assert found == EXPECTED | dict.fromkeys(turned, claims.FAILS)


def test_a_direction_is_that_of_halves_with_the_same_chance():
  outcomes = [one for seed in range(2) for one in of_claims(seed, turned=0.5)]
  found = turns.numbers(outcomes)
  for columns in found['fixed'].values():
    # Each half is alike here.
    assert columns['across'] == pytest.approx(columns['cosine'])
    assert columns['halves']['1'] == pytest.approx(1)
    columns['halves'], columns['halves_lengths'] = {'0': 0.9}, {'0': 0.4}
    columns['across'] = {'0': 0.5}
  measured = turns.measure(found)
  assert measured['direction_turn'].mean == pytest.approx(0.6 - 0.5)
  # Halves that share nothing have no direction.
  found['fixed']['turn']['halves']['0'] = -0.1
  assert np.isnan(turns.measure(found)['direction_turn'].mean)


def noisy(cosine, noise, noise_lengths, seeds=5, rollouts=30, ids=12):
  """Outcomes of `fixed`, whose expected gradients have this cosine.

  Both weights are measured on the same rollouts, so their chance is the same,
  but for the size that it has.
  """
  draw = np.random.default_rng(0).standard_normal
  for seed in range(seeds):
    # Two gradients at right angles, without a part that all ids share.
    basis = draw((ids, 2))
    one, other = np.linalg.qr(basis - basis.mean(axis=0))[0].T
    chance = draw((rollouts, ids))
    tokens = one + noise * chance
    turned = cosine * one + np.sqrt(1 - cosine**2) * other
    numbers = {'count': [[10] * ids] * rollouts}
    for credit in turns.CREDITS:
      numbers |= {
        f'{credit}_tokens_by_id': tokens.tolist(),
        f'{credit}_lengths_by_id': (turned + noise_lengths * chance).tolist(),
        f'{credit}_tokens_shift': [[0.0]] * rollouts,
        f'{credit}_lengths_shift': [[0.1]] * rollouts,
      }
    yield turns.Outcome(turns.ARMS[0], seed, rollouts, numbers)


@pytest.mark.parametrize(
  'cosine, noise, noise_lengths, wanted',
  [
    (0.9, 0.2, 0.2, claims.HOLDS),
    (0.9, 0.4, 0.4, claims.HOLDS),
    (1.0, 0.4, 0.5, claims.OPEN),
    (1.0, 0.8, 0.6, claims.OPEN),
    # A weight that has more chance in it points where the other does.
    (1.0, 0.2, 1.2, claims.OPEN),
  ],
)
def test_a_gradient_is_turned_if_its_expectation_is(
  cosine, noise, noise_lengths, wanted
):
  found = turns.numbers([*noisy(cosine, noise, noise_lengths)])
  rows = claims.check(turns.EXPERIMENT, found)
  verdicts = {row.name: row.verdict for row in rows}
  assert verdicts['direction_turn'] == wanted
  assert verdicts['direction_episode'] == wanted


def test_numbers_that_were_written_are_read_as_they_were():
  """With NaN, for which JSON has None."""
  outcomes = [one for seed in range(2) for one in of_claims(seed)]
  single = [
    turns.Outcome(x.arm, x.seed, 1, {k: v[:1] for k, v in x.numbers.items()})
    for x in outcomes
  ]
  for given in (outcomes, single):  # one rollout has no halves
    numbers = turns.numbers(given)
    read = json.loads(json.dumps(pages.without_nan(numbers)))
    verdicts, again = (
      {row.name: row.verdict for row in claims.check(turns.EXPERIMENT, one)}
      for one in (numbers, read)
    )
    assert again == verdicts
    figures.drawn(turns.EXPERIMENT, read, figures.LIGHT)
  assert verdicts['direction_turn'] == claims.OPEN


@pytest.mark.parametrize('unknown', [None, np.nan])
def test_a_rollout_that_was_not_measured_spoils_no_others(unknown):
  outcomes = [one for seed in range(2) for one in of_claims(seed)]
  whole = turns.measure(turns.numbers(outcomes))
  for one in outcomes:
    for name, values in one.numbers.items():
      nothing = unknown
      if isinstance(values[0], list) and name != 'count':
        nothing = [unknown] * len(values[0])
      elif name == 'count':
        nothing = [1, 1, 1]
      one.numbers[name] = [values[0], nothing, values[1]]
  found = turns.numbers(outcomes)
  assert found['training']['pull']['tokens'] == {'0': 1.0, '1': 1.0}
  assert np.isnan(found['curves']['pull']['tokens'][1])
  for name, one in turns.measure(found).items():
    assert one.mean == pytest.approx(whole[name].mean), name
  both = [x for x in outcomes if x.arm.label in turns.WEIGHTS]
  rows = turns.of_training(both, parts=1)
  assert rows[-1].values['solved'].mean == pytest.approx(-0.005)


def test_a_title_says_what_was_measured_and_not_what_was_hoped():
  for shift in (0.0, -0.3):
    outcomes = [x for seed in range(2) for x in of_claims(seed, shift)]
    _, title = figures.drawn(
      turns.EXPERIMENT, turns.numbers(outcomes), figures.LIGHT
    )
    assert f'1 / length: {shift:.4g} with credit by turn' in title
    assert ' not ' not in title
  trained_alone = [x for x in outcomes if x.arm.label != 'fixed']
  _, title = figures.drawn(
    turns.EXPERIMENT, turns.numbers(trained_alone), figures.LIGHT
  )
  assert title == 'First turns of episodes with two weights'


@pytest.mark.parametrize('missing, left', [(-1, -2), (-2, -1)])
def test_trainings_are_compared_with_that_of_the_same_seed(missing, left):
  outcomes = [one for seed in range(3) for one in of_claims(seed, harm=0.1)]
  # The training of one seed is missing, whose partner learned nothing.
  outcomes[left].numbers['first'] = [-9.0, -9.0]
  del outcomes[missing]
  gap = turns.measure(turns.numbers(outcomes))['first_guess']
  assert gap.mean == pytest.approx(-0.1) and gap.half == pytest.approx(0)


@pytest.mark.parametrize(
  'arms', [(), ('fixed',), ('tokens',), ('tokens', 'fixed')]
)
def test_what_was_left_out_of_a_study_has_no_verdict(arms):
  outcomes = [
    one for seed in range(2) for one in of_claims(seed) if one.arm.label in arms
  ]
  numbers = turns.numbers(outcomes)
  found = {r.name: r.verdict for r in claims.check(turns.EXPERIMENT, numbers)}
  assert found['solved'] == found['trained_length'] == claims.OPEN
  measured = found['length_turn'] == claims.HOLDS
  assert measured == ('fixed' in arms)
  figures.drawn(turns.EXPERIMENT, numbers, figures.LIGHT)


def test_arms_differ_in_the_weight_alone():
  config = runs.small()
  fixed, tokens, lengths = (
    turns.config_of(config, arm, 7) for arm in turns.ARMS
  )
  assert fixed == tokens and tokens.log.expected_prefixes and tokens.seed == 7
  assert tokens.learner.method_kwargs == {'weight': 'tokens'}
  assert lengths.learner.method_kwargs == {'weight': 'lengths'}
  changed = dataclasses.replace(
    lengths.learner, method_kwargs={'weight': 'tokens'}
  )
  assert dataclasses.replace(lengths, learner=changed) == tokens
  batch = played()
  weights = []
  for weight in turns.WEIGHTS:
    method = turns.method(weight)
    credited, state = losses.credit(method, batch, method.init())
    weights.append(losses.prepare(method, credited, state).weight)
  np.testing.assert_allclose(weights[0], MASK / 4)
  np.testing.assert_allclose(weights[1], MASK / [[[2], [6]]])


def test_a_config_without_episodes_is_refused(tmp_path):
  with pytest.raises(ValueError, match='needs episodes of several'):
    sweeps.conduct(turns.study('turns'), runs.small(), tmp_path, 1, 2)
  assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_a_study_measures_and_trains(tmp_path, capsys):
  config = grpo_jax.load_config('configs/guess_number.py')
  # After so many steps, most guesses are numbers.
  config.update_from_flattened_dict({'warm_up.steps': 50})
  config = config_lib.resolve(config)
  study = studies.study('turns')
  found = sweeps.conduct(study, config, tmp_path, seeds=1, steps=2)
  (row, _), training = found.summary
  assert abs(row.values['tokens'].mean) < 1e-6
  assert abs(row.values['lengths'].mean) > 1e-3
  (tokens, lengths, _, *_) = (x.values['uncancelled'].mean for x in training)
  assert tokens < 1e-5 and lengths > 1e-3
  study.show(found)
  out = capsys.readouterr().out
  assert 'lengths - tokens 2-2: solved' in out and 'E18: a weight' in out
  (done,) = json.loads(json.dumps(study.to_json(found)))['claims'].values()
  assert [one['name'] for one in done['claims']] == [*turns.CLAIMS]
  assert (tmp_path / 'claims' / 'turns-light.png').exists()
