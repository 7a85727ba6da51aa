"""What a person sees of a run: the terminal, files, dashboards and alarms.

`Monitor` is all that the loop talks to. It writes `metrics.jsonl`, TensorBoard
event files and, if a project is named, Weights & Biases; it draws the terminal;
and it says when a run looks ill. None of these may stop a run: what cannot be
written or drawn is warned of once.
"""

from grpo_jax.monitor._monitor import Monitor
from grpo_jax.monitor._samples import Sample

__all__ = ['Monitor', 'Sample']
