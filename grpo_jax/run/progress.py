"""What a run carries from one rollout to the next, and a checkpoint holds."""

import collections
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from grpo_jax.episodes.types import Rollout
from grpo_jax.learner.types import TrainState
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.monitor import Sample
from grpo_jax.rollouts import sources
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.run.build import build_updater
from grpo_jax.run.keep.checkpoint import Restored

# The arrays of a checkpoint: the fields of `TrainState`, of which `params` come
# first and can be read alone, and the parameters of a `Receipt`.
_Arrays = collections.namedtuple('_Arrays', [*TrainState._fields, 'older'])


class Unwritten(NamedTuple):
  """The metrics of a rollout and its updates that are not yet written.

  They wait for the evaluation, which may be due after the rollout.
  """

  measured: dict[str, float | None]
  samples: list[Sample]
  rollout: Rollout | None = None  # None if an earlier start has sampled it


class Progress(NamedTuple):
  """How far a run has come."""

  step: int  # rollouts done
  state: TrainState
  receipt: Receipt  # what the next rollouts are drawn from
  unwritten: Unwritten | None  # None once they are written
  layout: LayoutSpec  # as far as the first rollout has decided it

  @property
  def arrays(self) -> Any:
    """All arrays of it, for a checkpoint."""
    return _Arrays(*self.state, older=self.receipt.params)

  def to_json(self, whole: Callable[[Rollout], Rollout]) -> dict[str, Any]:
    """All that is no array, for a checkpoint; see `Receipt.to_json`."""
    unwritten = self.unwritten
    return {
      **self.receipt.to_json(whole),
      'unwritten': unwritten
      and {'measured': unwritten.measured, 'samples': unwritten.samples},
      # What the first rollout has decided; see `models.stack.decided`.
      'layout': build_updater.spec_json(self.layout),
    }


def abstract(state: TrainState, host: dict[str, Any]) -> Any:
  """The arrays of a checkpoint as shapes, dtypes and shardings.

  Args:
    state: As shapes, dtypes and shardings.
    host: What lies beside the arrays.

  Raises:
    ValueError: An earlier version of this package has saved it.
  """
  if 'older' not in host:
    packages = host.get('versions', {}).get('packages', {})
    raise ValueError(
      f'it was saved by grpo_jax {packages.get("grpo_jax")}, an earlier '
      'version, which alone reads it'
    )
  return _Arrays(*state, older=(state.params,) * host['older'])


def restored(saved: Restored, layout: LayoutSpec) -> Progress:
  """The progress that a checkpoint holds.

  Args:
    saved: The checkpoint.
    layout: Of this start, which may differ from that of the one before.
  """
  *state, older = saved.state
  unwritten = saved.host['unwritten']
  if unwritten is not None:
    samples = [Sample(*sample) for sample in unwritten['samples']]
    unwritten = Unwritten(unwritten['measured'], samples)
  return Progress(
    saved.step,
    TrainState(*state),
    sources.receipt_from_json(saved.host, older),
    unwritten,
    build_updater.decided(layout, saved.host['layout']),
  )
