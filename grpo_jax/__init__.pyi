"""What type checkers know of `__init__.py`, which imports nothing by itself."""

from grpo_jax import config as config
from grpo_jax import data as data
from grpo_jax import diagnostics as diagnostics
from grpo_jax import losses as losses
from grpo_jax import optim as optim
from grpo_jax import rewards as rewards
from grpo_jax.config.load import load_config as load_config
from grpo_jax.run.export import convert as convert
from grpo_jax.run.from_python import evaluate as evaluate
from grpo_jax.run.from_python import sample as sample
from grpo_jax.run.from_python import train as train

__version__: str
