"""`normalization` with fewer arms: 2 optimizers, 3 rates, with and without.

For SmolLM2-135M, of which a run takes minutes:

  grpo-jax study normalization_smollm2 --config=configs/smollm2.py \
    --workdir=runs/normalization_smollm2
"""

import functools

from grpo_jax.lab.studies import normalization
from grpo_jax.lab.studies.normalization import show
from grpo_jax.lab.studies.normalization import to_json

run = functools.partial(normalization.run, plan=normalization.SMOLLM2)

__all__ = ('run', 'show', 'to_json')
