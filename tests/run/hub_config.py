"""Two rollouts by names of the Hub, for several processes."""

from grpo_jax import config as config_lib
from tests.run import export_test
from tests.run import hub_test


def get_config():
  config = config_lib.default()
  config.update_from_flattened_dict(
    {
      **export_test.SMALL,
      **hub_test.RUN,
      'model.path': hub_test.MODEL,
      'mesh.data': -1,
      'evaluation.every_steps': 0,
    }
  )
  return config
