"""grpo-jax train --config=configs/gsm8k_served.py --workdir=runs/served

The run of gsm8k_qwen2p5_0p5b.py, whose rollouts a server of vLLM draws, or with
`gsm8k_served.py:sglang` one of SGLang, on another device of the same machine:
launch/README.md has the commands that start both. The policy is an adapter, so
that a new version is some megabytes, and comes under a name of its own.

Hardware: two GPUs of 24 GB. Not yet run, so no figure can be promised.
"""

import gsm8k_qwen2p5_0p5b
from ml_collections import ConfigDict


def get_config(dialect: str = 'vllm') -> ConfigDict:
  """That config, with servers.

  Args:
    dialect: 'vllm' or 'sglang'.
  """
  config = gsm8k_qwen2p5_0p5b.get_config()
  config.lora.rank = 32
  config.optim.lr = 2e-5
  config.engine.kind = 'http'
  config.engine.dialect = dialect
  port = {'vllm': 8000, 'sglang': 30000}[dialect]
  config.engine.urls = (f'http://127.0.0.1:{port}',)
  # One rollout is drawn while the one before is learned from.
  config.sampler.ahead = 1
  config.learner.anchor = 'sampler'
  config.mesh.data = 1
  return config
