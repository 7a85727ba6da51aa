"""`brakes` with fewer arms at four updates per rollout, each at three rates.

For SmolLM2-135M, of which a run takes minutes:

  grpo-jax study brakes_smollm2 --config=configs/smollm2.py \
    --config.sampler.prompts=8 --workdir=runs/brakes_smollm2 --steps=8
"""

import functools

from grpo_jax.lab.studies import brakes
from grpo_jax.lab.studies.brakes import show
from grpo_jax.lab.studies.brakes import to_json

ARMS = tuple(
  brakes.Arm(brake, 4, lr)
  for lr in (4e-5, 2e-5, 1e-5)
  for brake in ('none', 'decay', 'project')
)
run = functools.partial(brakes.run, arms=ARMS, name='brakes_smollm2')

__all__ = ('ARMS', 'run', 'show', 'to_json')
