"""What a run asks its engine for, and what it does with the answers.

The specs are given one by one, and an engine without a model answers.
"""

import contextlib
import dataclasses
import functools
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.hosts import processes
from grpo_jax.mesh import random_keys
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k
from grpo_jax.rollouts import sources
from grpo_jax.rollouts.batch_fields import BatchField
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import policy as policies
from grpo_jax.run import reports
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import specs
from tests import runs
from tests.fake_engine import FakeEngine
from tests.run.build import configs

pytestmark = pytest.mark.quick

STEP = 7
SPECS = [
  specs.DrawSpec(
    seed=3, prompts=2, group=3, max_tokens=4, resample_rounds=0,
    retire_solved=False, right_reward=0.5, shuffles=False, pace=sources.Pace(),
  ),
  specs.DrawSpec(
    seed=5, prompts=4, group=2, max_tokens=3, resample_rounds=0,
    retire_solved=False, right_reward=1.5, shuffles=True, pace=sources.Pace(),
  ),
]  # fmt: skip


JUDGES = configs.first_reward, configs.second_reward


@functools.cache
def built():
  return build.run(runs.small(**{'sampler.temperature': 0.7}))


def run(judge=None, **changes):
  """A run with an engine that answers with numbers, each another one."""
  base, drawn = built(), iter(range(1, 10**6))
  encode = base.tokenizer.encode

  def answer(request, number):
    del number
    return encode(f'{next(drawn):0{request.limit}}')

  engine = FakeEngine(answer)
  engine.load(None, version=STEP)
  first, second = JUDGES
  found = (
    rewards.WeightedReward('one', judge or first, 2.0),
    rewards.WeightedReward('two', judge or second, -3.0),
  )
  return dataclasses.replace(base, engine=engine, rewards=found, **changes)


def asked(run, records, group, sampling, spec, purpose):
  """What an engine should be asked for."""
  return engines.requests(
    [run.tokenizer.encode_prompt(record['prompt']) for record in records],
    [record['index'] for record in records],
    group,
    sampling,
    spec.max_tokens,
    spec.seed,
    STEP,
    purpose,
  )


def assert_asked(run, *wanted):
  for found, one in zip(run.engine.requests, asked(run, *wanted), strict=True):
    np.testing.assert_array_equal(found.keys, one.keys)
    assert found.ids == one.ids and found.limit == one.limit
    assert found.sampling == one.sampling


def rows(records, number):
  return [{**records[i], 'index': i} for i in range(number)]


def drawn(run):
  return sampling.sampled(run, PromptState(), STEP)


@pytest.mark.parametrize('spec', SPECS)
def test_a_rollout_is_drawn_as_its_spec_says(spec):
  own = run(draw=spec)
  rollout, _, _ = drawn(own)
  records = rows(own.prompts, spec.prompts)
  assert_asked(own, records, spec.group, own.sampling, spec, 'sample')
  assert rollout.batch.tokens.shape[:2] == (spec.prompts, spec.group)
  # What the two rewards say of the texts, with their weights.
  parts = np.array(
    [
      [[judge('', text, {}) for judge in JUDGES] for text in group]
      for group in rollout.texts
    ]
  )
  reward = np.float32(parts) @ np.float32([2, -3])
  if spec.shuffles:
    rng = random_keys.generator(spec.seed, 'shuffle rewards', STEP)
    reward = rng.permutation(reward.ravel()).reshape(reward.shape)
  np.testing.assert_allclose(rollout.batch.reward, reward, rtol=1e-6)


def test_the_widths_are_those_of_the_spec():
  for width in 5, 9:
    own = run(data=specs.WidthSpec((12,), (width,), drops=False))
    assert drawn(own)[0].batch.tokens.shape[-1] == width


def always(prompt, completion, example):
  return 1.0


@pytest.mark.parametrize('rounds', [0, 2])
def test_more_prompts_are_drawn_while_rewards_are_equal(rounds):
  spec = dataclasses.replace(SPECS[0], resample_rounds=rounds)
  own = run(always, draw=spec)
  counts = drawn(own)[2]
  assert len(own.engine.requests) == spec.prompts * (1 + rounds)
  assert ('prompts_drawn' in counts) == bool(rounds)


@pytest.mark.parametrize('right, retired', [(1.0, 2), (1.5, 0)])
def test_what_is_solved_is_retired(right, retired):
  spec = dataclasses.replace(SPECS[0], retire_solved=True, right_reward=right)
  own = run(always, draw=spec)
  assert drawn(own)[2]['prompts_retired'] == retired
  assert 'prompts_retired' not in drawn(run(always, draw=SPECS[0]))[2]


@pytest.mark.parametrize('drops', [False, True])
def test_what_is_too_long_is_dropped_if_the_spec_says_so(drops):
  own = run(data=specs.WidthSpec((12,), (8,), drops))
  assert ('prompts_too_long' in drawn(own)[2]) == drops


def test_the_fields_of_a_batch_are_filled():
  fields = (BatchField('mine', configs.own_field),)
  batch = drawn(run(fields=fields))[0].batch
  assert np.all(batch.extras['mine'][batch.mask] == 41)


@pytest.mark.parametrize('spec', SPECS)
@pytest.mark.parametrize('examples', [3, 5])
def test_an_evaluation_asks_for_one_greedy_answer_of_each_problem(
  spec, examples
):
  own = run(draw=spec, evaluation=specs.EvaluationSpec(2, examples, ''))
  kept = []
  sampling.evaluated(own, STEP, lambda rollout, step: kept.append(step))
  assert kept == [STEP]
  greedy = dataclasses.replace(own.sampling, temperature=0.0)
  records = rows(own.heldout, examples)
  assert_asked(own, records, 1, greedy, spec, 'evaluate')


def graded(prompt, completion, example):
  """0, 1 or 2."""
  return int(completion[-1]) % 3


@pytest.mark.parametrize(
  'spec, answer', [(SPECS[0], configs.last_digit), (SPECS[1], None)]
)
def test_so_does_an_evaluation_of_a_checkpoint_with_several_samples(
  spec, answer, tmp_path
):
  name = f'{configs.OWN}:last_digit' if answer else ''
  own = run(graded, draw=spec, evaluation=specs.EvaluationSpec(2, 4, name))
  policy = policies.Policy(own, STEP, own.heldout, own.rewards)
  file = str(tmp_path / 'answers.parquet')
  found = policies.evaluate(policy, 0, 5, [2], completions=file)
  records = rows(own.heldout, 4)
  assert_asked(own, records, 5, own.sampling, spec, 'eval')
  wanted = pass_at_k.summarize(
    parquet.read(file), [2], spec.right_reward, spec.seed, answer
  )
  assert found == {'checkpoint': STEP, **wanted}


@pytest.mark.parametrize('every, samples', [(0, 1), (2, 2), (3, 9)])
def test_completions_are_kept_as_the_spec_says(every, samples, tmp_path):
  own = run(draw=SPECS[1])
  own = dataclasses.replace(
    own, keep=specs.KeepSpec(1, 0.0, 1, '', every, samples)
  )
  rollout, _, _ = drawn(own)
  session: Any = types.SimpleNamespace(
    run=own, workdir=tmp_path, peers=processes.ALONE, whole=lambda x: x
  )
  for step in range(1, 7):
    shown = reports.keep_completions(session, rollout, step)
    assert [tuple(one) for one in shown] == [
      (rollout.prompt_texts[p], rollout.texts[p][0], rollout.batch.reward[p, 0])
      for p in range(min(samples, SPECS[1].prompts))
    ]
  reports.keep_answers(session, rollout, 5)
  due = [s for s in range(1, 7) if every and s % every == 0]
  for folder, steps in ('completions', due), ('evaluations', [5] * bool(every)):
    found = parquet.files(tmp_path / folder) if steps else []
    assert found == [parquet.path_of(tmp_path / folder, s) for s in steps]
    assert (tmp_path / folder).exists() == bool(steps)


@pytest.mark.parametrize('ahead', [False, True])
def test_rollouts_are_drawn_ahead_if_the_run_says_so(ahead, monkeypatch):
  monkeypatch.setattr(
    sampling,
    'Put',
    lambda *_: types.SimpleNamespace(
      publish=None, drop=None, snapshot=None, restore=None
    ),
  )
  own = run(draws_ahead=ahead)
  updater: Any = mock.MagicMock()
  with contextlib.closing(
    sampling.source(own, updater, None, contextlib.nullcontext)
  ) as found:
    kind = sources.Ahead if ahead else sources.AtOnce
    assert isinstance(found, kind)
