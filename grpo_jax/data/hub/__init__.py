"""Models and data sets by their names on the Hugging Face Hub.

A name stands for a repository at a commit. What is read of it is downloaded
once, into the cache that other programs use too (HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE are read), and then it is a local path like any
other: whoever opens a path calls `local_model` or `data_files` first.

huggingface_hub is imported late, where something is not here yet.
"""

from grpo_jax.data.hub._asking import HubError
from grpo_jax.data.hub._asking import Unreachable
from grpo_jax.data.hub._asking import telling
from grpo_jax.data.hub._models import Needs
from grpo_jax.data.hub._models import commit as model_commit
from grpo_jax.data.hub._models import local as local_model
from grpo_jax.data.hub._names import Name
from grpo_jax.data.hub._names import parse
from grpo_jax.data.hub._names import short
from grpo_jax.data.hub._push import MARK
from grpo_jax.data.hub._push import check as check_push
from grpo_jax.data.hub._push import licence
from grpo_jax.data.hub._push import push
from grpo_jax.data.hub._push import repository_of
from grpo_jax.data.hub._push import sealed
from grpo_jax.data.hub._tables import commit as data_commit
from grpo_jax.data.hub._tables import files as data_files
from grpo_jax.data.hub._tables import sample as data_sample

__all__ = [
  'HubError', 'MARK', 'Name', 'Needs', 'Unreachable', 'check_push',
  'data_commit', 'data_files', 'data_sample', 'licence', 'local_model',
  'model_commit', 'parse', 'push', 'repository_of', 'sealed', 'short',
  'telling',
]  # fmt: skip
