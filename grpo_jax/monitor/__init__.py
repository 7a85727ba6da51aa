"""What a person sees of a run: the terminal, files, dashboards and alarms.

`start` opens a `Screen` before JAX is imported. The screen shows what the
config alone says of a run, and then what is being done, with its time.
`Monitor` takes over the same screen; the training loop calls nothing else here.
It writes `metrics.jsonl`, TensorBoard event files and, if a project is named,
Weights & Biases. It draws the terminal, and it warns when the numbers of a run
look wrong. An error of the disk, the terminal or a service does not stop a run:
what cannot be written leads to one warning, what cannot be drawn is left out.
"""

from grpo_jax.monitor.alarms import Alarms
from grpo_jax.monitor.facts import note
from grpo_jax.monitor.monitor import Monitor
from grpo_jax.monitor.quiet import Quiet
from grpo_jax.monitor.quiet import quiet
from grpo_jax.monitor.samples import Sample
from grpo_jax.monitor.screen import Screen
from grpo_jax.monitor.screen import start
from grpo_jax.monitor.table import GROUPS
from grpo_jax.monitor.table import Row

__all__ = [
  'Alarms', 'GROUPS', 'Monitor', 'Quiet', 'Row', 'Sample', 'Screen', 'note',
  'quiet', 'start',
]  # fmt: skip
