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
  # What the branch was rewarded with may be the merit of the turn before it.
  assert to_go == pytest.approx([0.85, 1.1, 1.1])
  assert credit[:2] == pytest.approx((to_go - baseline)[:2])
  texts = ' '.join(text for one in found for text in one.lines)
  assert f'credit {credit[0]:.3g}' in texts
