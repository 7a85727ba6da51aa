"""A reward model in two processes: each scores alone, on its own devices."""

import json
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import cli
from tests import reward_folder

ROWS = [[30, 31, 32], [40] * 7, [50, 60]]


@pytest.mark.long
def test_one_process_scores_while_the_other_does_not(tmp_path):
  reference = reward_folder.write(tmp_path / 'model')
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  environment = cli.environment()
  environment['XLA_FLAGS'] += ' --xla_force_host_platform_device_count=2'
  both = []
  for rank in '01':
    with (tmp_path / f'log.{rank}').open('w') as log:
      one = subprocess.Popen(
        [sys.executable, '-m', __name__, address, rank, tmp_path],
        env=environment,
        stdout=log,
        stderr=log,
      )
    both.append(one)
  try:
    codes = [one.wait(120) for one in both]
  finally:
    for one in both:
      one.kill()
  assert codes == [0, 0], (tmp_path / 'log.1').read_text()[-3000:]
  expected = [reference.score(row) for row in ROWS]
  for rank in '01':
    told = json.loads((tmp_path / f'{rank}.json').read_text())
    assert told['devices'] == 2 and told['of_the_run'] == 4
    np.testing.assert_allclose(told['scores'], expected, rtol=1e-4, atol=1e-4)


def main(address: str, rank: str, folder: str) -> None:
  """One of two processes, which take turns."""
  import time

  import jax

  from grpo_jax.episodes import reward_model
  from grpo_jax.mesh import sharding

  jax.distributed.initialize(address, 2, int(rank))
  at = pathlib.Path(folder)
  mesh = sharding.make_mesh(data=2, tensor=2)
  while rank == '1' and not (at / '0.json').exists():
    time.sleep(0.05)  # the other one has long scored without this one
  model = reward_model.RewardModel(
    str(at / 'model'), mesh, dtype='float32', max_tokens=16
  )
  told = {
    'scores': model.scores(ROWS).tolist(),
    'devices': model._mesh.size,
    'of_the_run': mesh.size,
  }
  (at / f'{rank}.tmp').write_text(json.dumps(told))
  (at / f'{rank}.tmp').rename(at / f'{rank}.json')
  while not (at / '1.json').exists():  # it would end the other one
    time.sleep(0.05)


if __name__ == '__main__':
  main(*sys.argv[1:])
