"""All optimizer steps of one rollout.

Which log-probabilities the method needs, which prompts form each optimizer
batch, in which order; the steps themselves are `learner.train_step`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import keys
from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import rollout as rollout_lib
from grpo_jax import sharding
from grpo_jax.learner import Compiled
from grpo_jax.learner import Learner
from grpo_jax.learner import TrainState
from grpo_jax.learner import compiled
from grpo_jax.rollout import LayoutSpec
from grpo_jax.rollout import Rollout

Measured = dict[str, metrics.Metric]

_merge = jax.jit(metrics.merge)  # one call instead of one for each array


@dataclasses.dataclass
class Updater:
  """Turns rollouts into optimizer steps.

  Attributes:
    learner: See `learner.py`.
    params: Parameters or their shapes, to compile for.
    spec: How completions are laid out.
    seed: Of the order of prompts in the second epoch and later.
    batches: Optimizer batches per rollout; divides the prompts.
    epochs: Passes over a rollout.
    anchor: `'learner'` scores logp_old itself, if more than one step or the
      method needs it; `'sampler'` takes the sampler's.
    refresh_steps: Rollouts between refreshes of the reference, if the method
      has one; 0 leaves it fixed.
    refresh_weight: Of the policy in the average that refreshes; 1: a copy.
    watch_steps: Rollouts between those whose overshoot is measured, from the
      first on; 0: never.
    stale: Rollouts may hold groups that an earlier policy has drawn. The
      policy before the update of these is the sampler's; so logp_old is always
      scored, for the others.
    scorings: Passes over the last rollout, by the policy or the reference,
      before its first step.
  """

  learner: Learner
  params: dataclasses.InitVar[Any]
  spec: LayoutSpec
  seed: int = 0
  batches: int = 1
  epochs: int = 1
  anchor: str = 'learner'
  refresh_steps: int = 0
  refresh_weight: float = 1.0
  watch_steps: int = 0
  stale: bool = False
  compiled: Compiled = dataclasses.field(init=False)
  scorings: int = dataclasses.field(default=0, init=False)

  def __post_init__(self, params):
    self.compiled = compiled(self.learner, params)
    self._ahead: threading.Thread | None = None
    self._laid_out: Rollout | None = None
    self._layouts: dict[bytes, Any] = {}
    if not self.learner.with_reference:
      self.refresh_steps = 0

  def __call__(
    self, state: TrainState, rollout: Rollout, step: int
  ) -> tuple[TrainState, Measured]:
    """Takes every optimizer step of one rollout.

    Args:
      state: Donated; do not use it again.
      rollout: See `rollout.py`.
      step: Number of the rollout.

    Returns:
      The new state, and metrics of the rollout and its steps.
    """
    if self._ahead is not None:
      self._ahead.join()  # else the same would be compiled twice
      self._ahead = None
    batch = self.with_policies(state, rollout, step)
    batch, loss_state, measured = self.compiled.credit(batch, state.loss_state)
    state = state._replace(loss_state=loss_state)
    start = jnp.copy(state.step)  # the state itself is donated
    watch, begun = self.watches(step), batch
    # A ratio of exactly 1 needs no old policy; the rollout's end does.
    if watch and batch.logp_old is None:
      begun = batch._replace(logp_old=self.score(state.params, rollout).logp)
    for chosen in self.optimizer_batches(rollout, step):
      layout, used = self.layout(rollout, chosen)
      state, more = self.compiled.train_step(
        state, batch, chosen, layout, used, start, watch
      )
      measured = _merge(measured, more)
    if watch:
      measured |= self._end(state, rollout, begun)
    if self.refresh_steps and (step + 1) % self.refresh_steps == 0:
      weight = jnp.asarray(self.refresh_weight, jnp.float32)
      state = self.compiled.refresh(state, weight)
    return state, measured

  def watches(self, step: int) -> bool:
    """Whether overshoot is measured in a rollout."""
    return self.watch_steps > 0 and step % self.watch_steps == 0

  def _end(
    self, state: TrainState, rollout: Rollout, batch: losses.Batch
  ) -> Measured:
    """Where the last update has left the rollout; batch by batch."""
    measured = None
    for chosen in np.split(np.arange(len(rollout.prompts)), self.batches):
      layout, used = self.layout(rollout, chosen)
      more = self.compiled.rollout_end(
        state.params, batch, state.loss_state, chosen, layout, used
      )
      measured = _merge(measured, more) if measured else more
    return measured or {}

  def compile_ahead(self, example: Rollout) -> None:
    """Compiles for the shapes of an example, while others go on.

    What sampling needs is compiled and run meanwhile. The first update waits
    for it, so a wrong guess costs its time once. Packed rows have shapes that
    nobody guesses.

    Args:
      example: Of the largest shapes, say; what it holds does not matter.
    """
    if self.spec.kind != 'packed' and jax.process_count() == 1:
      # A daemon, because the compiler cannot be interrupted; see main.run.
      self._ahead = threading.Thread(
        target=self._try, args=(example,), name='compile ahead', daemon=True
      )
      self._ahead.start()

  def _try(self, example: Rollout) -> None:
    with contextlib.suppress(Exception):  # the real call will say it
      self._compile(example)

  def _compile(self, example: Rollout) -> None:
    """Leaves the programs of `__call__` in jit's caches."""
    everywhere = sharding.replicated(self.learner.mesh)

    def arrays(tree):
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        tree,
      )

    state, shape = self.compiled.abstract, example.batch.mask.shape
    chosen = next(self.optimizer_batches(example, 0))
    layout, used = self.layout(example, chosen)
    scorings = []

    def unscored(params, rollout, with_entropy=False):
      del rollout
      of_chosen = len(chosen), *shape[1:]
      lowered = self.compiled.score.lower(
        params, layout, used, of_chosen, with_entropy
      )
      scorings.append(lowered)
      nothing = jnp.zeros(shape, device=everywhere)
      return jax.tree.map(lambda _: nothing, lowered.out_info)

    batch = self.with_policies(state, example, 0, unscored)
    credited, _, _ = jax.eval_shape(
      self.compiled.credit, batch, state.loss_state
    )
    step = arrays(jax.ShapeDtypeStruct((), jnp.int32))
    self.compiled.train_step.lower(
      state, arrays(credited), chosen, layout, used, step, self.watches(0)
    ).compile()
    self.compiled.credit.lower(batch, state.loss_state).compile()
    for lowered in scorings:
      lowered.compile()

  @property
  def scores_old(self) -> bool:
    """Whether logp_old is scored, not taken from the sampler or implied."""
    several = self.batches * self.epochs > 1 or self.stale
    needed = several or self._requires('logp_old')
    return self.anchor == 'learner' and needed

  @property
  def forward_passes(self) -> int:
    """What the last rollout's steps were worth; a backward pass counts two."""
    return 3 * self.epochs + self.scorings

  def _requires(self, name: str) -> bool:
    return name in self.learner.method.requires

  def with_policies(
    self, state: TrainState, rollout: Rollout, step: int, score=None
  ) -> losses.Batch:
    """The batch with what the method reads of policies, and its noise."""
    score = score or self.score
    batch, shape = rollout.batch, rollout.batch.mask.shape
    fresh = np.asarray(batch.version) >= step
    extras = {**batch.extras, 'fresh': fresh}
    if self._requires('noise'):
      rng = keys.generator(self.seed, 'noise', step)
      # Positions first: a wider batch then draws the same and more.
      noise = rng.random((shape[2], *shape[:2]), np.float32)
      extras['noise'] = np.moveaxis(noise, 0, -1)
    if self._requires('updates_done'):  # each step says it anew
      extras['updates_done'] = np.zeros(shape, np.float32)
    batch = batch._replace(
      extras=extras, entropy_old=extras.get('entropy_sampler')
    )
    if self.anchor == 'sampler':
      batch = batch._replace(logp_old=batch.logp_sampler)
    unknown = self._requires('entropy_old') and batch.entropy_old is None
    scored = self.scores_old or unknown
    if scored:
      old = score(state.params, rollout, self._requires('entropy_old'))
      if old.entropy is not None:
        entropy = self._of_each_age(batch, old.entropy, batch.entropy_old)
        batch = batch._replace(entropy_old=entropy)
      if self.scores_old:
        sampler = batch.logp_sampler
        if sampler is not None:  # of the whole policy, without the filters
          sampler = sampler + extras.get('log_kept', 0)
        logp_old = self._of_each_age(batch, old.logp, sampler)
        batch = batch._replace(logp_old=logp_old)
    self.scorings = scored + self.learner.with_reference
    if self.learner.with_reference:
      logp_ref = score(state.reference, rollout).logp
      batch = batch._replace(logp_ref=logp_ref)
    return batch

  def _of_each_age(self, batch: losses.Batch, scored, sampler):
    """What was scored; the sampler's for what an earlier policy has drawn."""
    if not self.stale or sampler is None:
      return scored
    return jnp.where(batch.extras['fresh'], scored, sampler)

  def score(self, params: Any, rollout: Rollout, with_entropy: bool = False):
    """`Scores` f32[P,G,T] of the completions under some parameters."""
    parts = []
    for chosen in np.split(np.arange(len(rollout.prompts)), self.batches):
      layout, used = self.layout(rollout, chosen)
      shape = (len(chosen), *rollout.batch.mask.shape[1:])
      parts.append(
        self.compiled.score(params, layout, used, shape, with_entropy)
      )
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

  def layout(self, rollout: Rollout, chosen: np.ndarray):
    """Micro-batches of some prompts, on the mesh, and how many are used.

    Those of the last rollout are kept: the policies that score it and the first
    epoch read the same rows.
    """
    if rollout is not self._laid_out:
      self._laid_out, self._layouts = rollout, {}
    key = chosen.tobytes()
    if key not in self._layouts:
      layout, used = rollout_lib.micro_batches(rollout, chosen, self.spec)
      place = sharding.rows(self.learner.mesh, axis=1)
      found = jax.device_put(layout, place), used
      if len(self._layouts) == self.batches:  # a later epoch, in another order
        return found
      self._layouts[key] = found
    return self._layouts[key]

  def memory_gib(self, rollout: Rollout) -> dict[str, float]:
    """What the compiled step needs on each device, by the compiler."""
    chosen = np.arange(len(rollout.prompts) // self.batches)
    layout, used = self.layout(rollout, chosen)
    method = self.learner.method
    batch = losses.with_required(method, rollout.batch)
    batch, _, _ = self.compiled.credit(batch, method.init())
    step = self.compiled.train_step.lower(
      self.compiled.abstract, batch, chosen, layout, used, np.int32(0),
      self.watch_steps > 0,
    )  # fmt: skip
    needs = step.compile().memory_analysis()
    held = needs.argument_size_in_bytes + needs.output_size_in_bytes
    return {
      'temporary': needs.temp_size_in_bytes / 2**30,
      'peak': (held - needs.alias_size_in_bytes + needs.temp_size_in_bytes)
      / 2**30,
    }

  def optimizer_batches(self, rollout: Rollout, step: int) -> Iterator[Any]:
    """The prompts of each optimizer batch, every epoch in another order."""
    order = np.arange(len(rollout.prompts))
    for epoch in range(self.epochs):
      if epoch:
        rng = keys.generator(self.seed, f'epoch {epoch}', step)
        order = rng.permutation(order)
      yield from np.split(order, self.batches)
