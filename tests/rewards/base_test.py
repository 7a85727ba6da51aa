"""Tests of WeightedReward, resolve and the functions of the package."""

import dataclasses

import pytest

from grpo_jax import rewards


@pytest.mark.parametrize(
  'completion, answer, expected',
  [
    ('231', '231', 1.0),
    (' 231\n', '231 ', 1.0),
    ('72', 72, 1.0),
    ('2 31', '231', 0.0),
    ('2311', '231', 0.0),
    ('', '231', 0.0),
  ],
)
def test_exact_match(completion, answer, expected):
  result = rewards.exact_match('p', completion, {'answer': answer})
  assert result == expected and type(result) is float


def test_exact_match_without_an_answer_says_so():
  with pytest.raises(ValueError, match=r"'answer'.*\['gold', 'index'\]"):
    rewards.exact_match('p', 'c', {'index': 0, 'gold': '1'})


@pytest.mark.parametrize(
  'arguments, message',
  [
    (('', len), 'name of a reward'),
    ((None, len), 'name of a reward'),
    (('a', 'exact_match'), "reward 'a' is 'exact_match'.*cannot be called"),
    (('a', len, float('nan')), "reward 'a' is nan"),
    (('a', len, float('inf')), "reward 'a' is inf"),
  ],
)
def test_bad_terms_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    rewards.WeightedReward(*arguments)


def test_a_term_cannot_be_changed():
  term = rewards.WeightedReward('a', len)
  assert term.weight == 1.0
  with pytest.raises(dataclasses.FrozenInstanceError):
    setattr(term, 'weight', 2.0)  # noqa: B010


def test_resolve_finds_functions_of_the_package_and_of_others(
  tmp_path, monkeypatch
):
  assert rewards.resolve('exact_match') is rewards.exact_match
  folder = tmp_path / 'some_lab'
  folder.mkdir()
  (folder / 'terms.py').write_text('def brevity(p, c, e):\n  return 1.0\n')
  monkeypatch.syspath_prepend(tmp_path)
  assert rewards.resolve('some_lab.terms:brevity')('', '', {}) == 1.0
  with pytest.raises(ValueError, match="no function 'brevty'.*'brevity'"):
    rewards.resolve('some_lab.terms:brevty')


@pytest.mark.parametrize(
  'name, message',
  [
    ('exact_mach', "no reward 'exact_mach' .did you mean 'exact_match'"),
    ('zzz', "no reward 'zzz'; pass one of .*'exact_match'"),
    ('score', "no reward 'score'"),  # of the package, but no reward
    ('Any', "no reward 'Any'"),
    ('no_such_lab:f', 'failed .ModuleNotFoundError: No module.*PYTHONPATH'),
    ('math:pi', "no function 'pi'"),
    ('math:', "no function ''"),
    (':f', 'failed'),
    ('.relative:f', 'failed'),
  ],
)
def test_unknown_names_are_refused(name, message):
  with pytest.raises(ValueError, match=message):
    rewards.resolve(name)
