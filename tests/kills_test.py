"""Runs that servers draw or score for, killed while the servers go on.

`python -m tests.kills` kills more often, and longer runs. Fast counterparts,
in a process, are in `tests/run/http_engine_test.py` and
`tests/run/taught_by_servers_test.py`.
"""

import random

import pytest

from tests import kills

SMALL = (
  '--config=tests/small_config.py',
  '--config.data.heldout=',
  '--config.checkpoint.every_steps=1',
  '--config.log.completions_every_steps=1',
  '--config.steps=8',
)


@pytest.mark.long
@pytest.mark.parametrize('what', kills.SERVED)
def test_killed_runs_end_with_the_same_bits(what, tmp_path, monkeypatch):
  pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'compiled'))
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  with kills.serving(SMALL, what) as (options, url):
    kills.through(tmp_path, options, 2, random.Random(0))
    assert kills.adapters(url) == []
  # Nor folders: each is known to the workdir before it is made.
  assert not [*tmp_path.glob('grpo_jax_weights_*')]
