"""The picture of an episode's tree is that of the code."""

import numpy as np
import pytest

from tests.pictures import episode_tree


def test_the_picture_is_what_the_script_draws():
  assert episode_tree.PICTURE.read_text() == episode_tree.draw()


def test_each_message_stands_once_and_credit_is_that_of_the_group():
  found = episode_tree.boxes()
  assert [one.parent for one in found] == [None, 0, 1, 2, 1, 4]
  assert [one.is_sampled for one in found] == [False, True] * 3
  _, rewards, to_go, credit = episode_tree.measured()
  # The others return 1 at once, and lose .25 in each of four turns.
  others = np.array([[1, 0, 0], [-1, -0.75, -0.5]])
  baseline = np.concatenate([to_go[None], others]).mean(axis=0)
  assert rewards == pytest.approx([-0.25, 0, 0.1])
  # The branch is last in the order of the tree, so both turns before have its
  # reward in their return, and no reward moves to a later turn.
  assert to_go == pytest.approx([0.85, 1.1, 1.1])
  assert credit == pytest.approx(to_go - baseline)
  written = [one.lines[1:] for one in found if one.is_sampled]
  assert written == [
    ('reward −0.25', 'return to go 0.85', 'group’s mean 0.283', 'credit 0.567'),
    ('reward 0', 'return to go 1.1', 'group’s mean 0.117', 'credit 0.983'),
    ('reward 0.1', 'return to go 1.1', 'group’s mean 0.2', 'credit 0.9'),
  ]
