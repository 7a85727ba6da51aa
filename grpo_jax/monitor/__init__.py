"""What a person sees of a run: the terminal, files, dashboards and alarms.

A `Screen` is opened before JAX is imported. It shows what the config alone says
of a run, and then what is being done, with its time.
`Monitor` takes over the same screen; the training loop calls nothing else here.
It writes `metrics.jsonl`, TensorBoard event files and, if a project or an
experiment is named, Weights & Biases and MLflow. It draws the terminal, and it
warns when the numbers of a run look wrong. An error of the disk, the terminal
or a service does not stop a run: what cannot be written leads to one warning,
what cannot be drawn is left out.
"""

from grpo_jax.monitor.alarms import Alarms
from grpo_jax.monitor.alarms import Limits
from grpo_jax.monitor.formatting import Sample
from grpo_jax.monitor.monitor import Monitor
from grpo_jax.monitor.monitor import Options
from grpo_jax.monitor.monitor import Quiet
from grpo_jax.monitor.screen import Screen
from grpo_jax.monitor.screen import quiet
from grpo_jax.monitor.table import GROUPS
from grpo_jax.monitor.table import About
from grpo_jax.monitor.table import Row

__all__ = [
  'About', 'Alarms', 'GROUPS', 'Limits', 'Monitor', 'Options', 'Quiet', 'Row',
  'Sample', 'Screen', 'quiet',
]  # fmt: skip
