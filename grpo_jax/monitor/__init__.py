"""What a person sees of a run: the terminal, files, dashboards and alarms.

`start` shows what the config alone tells of a run, before JAX is imported, and
then what is being done, with its time. `Monitor` goes on with the same screen
and is all that the loop talks to. It writes `metrics.jsonl`, TensorBoard event
files and, if a project is named, Weights & Biases. It draws the terminal, and
it says when the numbers of a run look ill. None of these may stop a run: what
cannot be written or drawn leads to one warning.
"""

from grpo_jax.monitor._monitor import Monitor
from grpo_jax.monitor._samples import Sample
from grpo_jax.monitor._screen import Screen
from grpo_jax.monitor._screen import start

__all__ = ['Monitor', 'Sample', 'Screen', 'start']
