"""`brakes` at 4, 8 and 16 updates per rollout, each brake at three rates.

More updates on one rollout mean more clipped tokens, and more momentum for a
brake to act on. The tables that answer are those of the best learning rate of
each brake, and of the arms without a brake that move as much.

  grpo-jax study brakes_updates --config=configs/arithmetic.py \
    --workdir=runs/brakes_updates
"""

import functools

from grpo_jax.lab.studies import brakes
from grpo_jax.lab.studies.brakes import show
from grpo_jax.lab.studies.brakes import to_json

_RATES = {
  4: (5e-4, 2e-4, 1e-4),
  8: (5e-4, 2e-4, 1e-4),
  16: (2e-4, 1e-4, 5e-5),
}
ARMS = tuple(
  brakes.Arm(brake, updates, lr)
  for updates, rates in _RATES.items()
  for lr in rates
  for brake in ('none', 'decay', 'project', 'narrow', 'rollback')
)
run = functools.partial(brakes.run, arms=ARMS, name='brakes_updates')

__all__ = ('ARMS', 'run', 'show', 'to_json')
