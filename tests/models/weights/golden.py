"""The golden folders: what transformers computes with tiny models.

`make_golden.py` writes them.
"""

import functools
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models import weights

FOLDER = pathlib.Path(__file__).parent / 'golden'
# A release holds none of them.
NAMES = [path.name for path in sorted(FOLDER.glob('*'))]
LENGTHS = (12, 7)


class Golden(NamedTuple):
  """A model, and what is expected of it."""

  source: weights.Source
  model: models.Transformer
  params: dict
  expected: dict[str, np.ndarray]

  @property
  def rows(self) -> list[np.ndarray]:
    """The ids of each row."""
    return np.split(self.expected['tokens'].astype(np.int32), LENGTHS[:-1])


def folder(name: str) -> pathlib.Path:
  """Where the files of one of `NAMES` are; without any, the test is skipped."""
  if not NAMES:
    pytest.skip('the models are in the repository, and not in a release')
  return FOLDER / name


@functools.cache
def golden(name: str) -> Golden:
  """One of `NAMES`, loaded onto one device."""
  source = weights.source(folder(name))
  config = source.config()
  expected = dict(np.load(folder(name) / 'expected.npz'))
  params = weights.load(source, config)
  return Golden(source, models.Transformer(config), params, expected)


def padded(rows: list[np.ndarray], side: str) -> layout.Layout:
  """Rows with padding behind or before them; nothing is scored."""
  width = max(map(len, rows))
  tokens, position, segment = np.zeros((3, len(rows), width), np.int32)
  for i, row in enumerate(rows):
    span = slice(len(row)) if side == 'right' else slice(width - len(row), None)
    tokens[i, span], segment[i, span] = row, 1
    position[i, span] = np.arange(len(row))
  nothing = np.zeros((len(rows), 1, 1), np.int32)
  return layout.Layout(
    tokens=tokens,
    position=position,
    segment=segment,
    parent=np.zeros_like(segment),
    column=nothing,
    target=nothing,
    completion=nothing[:, :, 0],
  )


def random_params(config: models.ModelConfig) -> dict:
  """Parameters of NumPy, without compiling anything."""
  shapes = jax.eval_shape(models.Transformer(config).init, jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )


def assert_same_trees(actual, expected):
  """Every leaf equal, bit by bit."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    assert a.dtype == e.dtype
    np.testing.assert_array_equal(a, e)
