"""The transformer, and the log-probabilities that it gives to completions.

Read in this order:

- `protocol`: what the rest of the package asks of a model;
- `transformer`: the model of this package;
- `attention`: which tokens see which, in training and in decoding;
- `states`: what layers remember that have no keys and values;
- `layout`: how completions lie in the rows that the model reads;
- `scores`: log-probability and entropy of each completion token;
- `experts`: mixtures of experts, and what their routers did;
- `kernels`: attention kernels of accelerators;
- `weights`: pretrained models come in, and trained ones go out.
"""

from grpo_jax.models.axes import MatrixAxes
from grpo_jax.models.config import CHUNK_TOKENS
from grpo_jax.models.config import DeltaHeads
from grpo_jax.models.config import Experts
from grpo_jax.models.config import LayerKind
from grpo_jax.models.config import LowRank
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.config import bytes_per_token
from grpo_jax.models.config import flops_per_token
from grpo_jax.models.config import state_bytes
from grpo_jax.models.experts import balance
from grpo_jax.models.experts import load_max
from grpo_jax.models.protocol import LOGP
from grpo_jax.models.protocol import Layered
from grpo_jax.models.protocol import Model
from grpo_jax.models.protocol import Routed
from grpo_jax.models.protocol import Scores
from grpo_jax.models.protocol import Wanted
from grpo_jax.models.scores import chunk_positions
from grpo_jax.models.scores import score
from grpo_jax.models.scores import score_routed
from grpo_jax.models.transformer import Transformer

__all__ = (
  'CHUNK_TOKENS',
  'DeltaHeads',
  'Experts',
  'LOGP',
  'LayerKind',
  'Layered',
  'LowRank',
  'MatrixAxes',
  'Model',
  'ModelConfig',
  'RopeScaling',
  'Routed',
  'Scores',
  'Transformer',
  'Wanted',
  'balance',
  'bytes_per_token',
  'chunk_positions',
  'flops_per_token',
  'load_max',
  'score',
  'score_routed',
  'state_bytes',
)
