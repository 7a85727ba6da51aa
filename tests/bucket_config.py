"""A run of seconds that may write to the stand-in for a bucket."""

from tests import bucket
from tests import small_config

assert bucket.StandIn


def get_config():
  return small_config.get_config()
