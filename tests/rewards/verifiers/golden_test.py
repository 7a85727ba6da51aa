"""Every verifier on completions that were judged by hand, in golden/*.jsonl."""

import importlib.util
import json
import pathlib

import pytest

from grpo_jax import rewards
from grpo_jax.rewards import verifiers

FOLDER = pathlib.Path(__file__).parent / 'golden'
CASES = {
  path.stem: [json.loads(line) for line in path.read_text().splitlines()]
  for path in sorted(FOLDER.glob('*.jsonl'))
}
FEWEST = {'math_equivalence': 150, 'gsm8k': 60}
# It runs in workers only; gym_test.py has its cases.
APART = {'reasoning_gym'}
PACKAGES = {'math_equivalence': 'math_verify', 'json_schema': 'jsonschema'}

# Where the reward decides otherwise than a mathematician: the answer, the
# completion, and why. The golden case has what is right.
KNOWN = {
  ('10\\text{ cm}', '\\boxed{0.1\\text{ m}}'): 'no value is converted',
}


def needs(name):
  """Skips the tests of a verifier whose package is not installed."""
  package = PACKAGES.get(name)
  missing = package is not None and importlib.util.find_spec(package) is None
  return pytest.mark.skipif(missing, reason=f'{package} is not installed')


def reward_of(name, case):
  example = {
    key: case[key] for key in ('answer', 'completion_ids') if key in case
  }
  return getattr(rewards, name)(
    '', case['completion'], example, **case.get('kwargs', {})
  )


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=needs(name)) for name in CASES]
)
def test_golden(name):
  wrong = []
  for line, case in enumerate(CASES[name], start=1):
    got = reward_of(name, case)
    assert type(got) is float
    known = KNOWN.get((case.get('answer'), case['completion']))
    if name == 'math_equivalence' and known:
      # So that the list shrinks with what is mended.
      assert got != case['reward'], f'{case} is judged rightly now: remove it'
    elif got != case['reward']:
      wrong.append((line, got, case))
  assert not wrong


def test_every_verifier_has_enough_cases_of_both_kinds():
  assert set(CASES) == set(verifiers.__all__) - APART
  for name, cases in CASES.items():
    assert len(cases) >= FEWEST.get(name, 15), name
    wrong = sum(case['reward'] == 0 for case in cases)
    assert len(cases) / 3 <= wrong <= len(cases) * 3 / 4, name
    texts = [json.dumps(case | {'why': ''}, sort_keys=True) for case in cases]
    assert len({*texts}) == len(texts), name
    assert all(case['why'] for case in cases), name


def test_what_is_known_is_among_the_cases():
  cases = CASES['math_equivalence']
  assert {*KNOWN} <= {(case['answer'], case['completion']) for case in cases}
