"""One version: what names it beside `grpo_jax.__version__` agrees with it."""

import pathlib
import re
import tomllib

import pytest

import grpo_jax

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  'file, line',
  [
    ('CITATION.cff', r'^version: (.*)$'),
    # The newest one below what is not released yet.
    ('CHANGELOG.md', r'^## \[(\d.*?)\]'),
  ],
)
def test_the_version_is_the_same_everywhere(file, line):
  found = re.findall(line, (ROOT / file).read_text(), re.MULTILINE)
  assert found[:1] == [grpo_jax.__version__]


def test_the_package_takes_its_version_from_the_code():
  told = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  assert 'version' in told['project']['dynamic']
  assert told['tool']['hatch']['version'] == {'path': 'grpo_jax/__init__.py'}
  assert re.fullmatch(r'\d+\.\d+\.\d+', grpo_jax.__version__)
