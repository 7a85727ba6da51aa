"""All updates of one rollout.

This module decides which log-probabilities the method needs, which prompts form
each optimizer batch, and in which order. `step.train_step` is one update.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import random_keys
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import gradient
from grpo_jax.learner import micro_batches
from grpo_jax.learner import offload
from grpo_jax.learner import row_shards
from grpo_jax.learner import step as step_lib
from grpo_jax.learner import token_shards
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.models import Scores
from grpo_jax.models import lora
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import LayoutSpec

Measured = dict[str, metrics.Metric]


@dataclasses.dataclass
class Updater:
  """A learner, compiled for its mesh, that takes all updates of a rollout.

  Its functions `init(params)`, `refresh(state, weight)`, `credit(batch,
  loss_state)`, `score_all(params, layout, num_micro, shape, with_entropy)`,
  `train_step(state, batch, prompts, layout, num_micro, rollout_start, number,
  watch)` and `rollout_end(...)` are those of `step` and `gradient`, jitted. The
  parameters given to `init` and the state given to `refresh` and `train_step`
  are donated: do not use them again.

  Attributes:
    learner: See `learner/types.py`.
    params: Parameters or their shapes, to compile for.
    spec: How completions are laid out. What it leaves open, the first rollout
      decides; see `models.stack.decided`.
    seed: Seed of the order of prompts in the second epoch and later.
    batches: Optimizer batches per rollout; divides the prompts.
    epochs: Passes over a rollout.
    anchor: Where `logp_old` comes from. `'learner'` scores the completions
      itself, if the rollout gets more than one update or the method needs it.
      `'sampler'` takes the sampler's log-probabilities.
    refresh_steps: Rollouts between refreshes of the reference, if the method
      has one; 0 leaves the reference as it is.
    refresh_weight: Weight of the policy in the average that becomes the new
      reference; 1 makes a copy of the policy.
    watch_steps: Overshoot is measured in every rollout whose number is a
      multiple of this; 0: in none.
    stale: Whether rollouts may hold groups that an earlier policy has drawn.
      `logp_old` of such groups is the sampler's, because the policy that drew
      them is gone; `logp_old` of the other groups is then always scored.
    scorings: Forward passes over the last rollout, by the policy or the
      reference, before its first update; 0 before the first rollout.
    frozen: Parameters of the model that no update changes, such as the weights
      beside adapters: their shapes, dtypes and shardings at first, and the
      arrays before the first call. None: there are none.
    abstract: The `TrainState` as shapes, dtypes and shardings, for a restore.
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
  scorings: int = dataclasses.field(init=False, default=0)
  frozen: Any = None
  abstract: TrainState = dataclasses.field(init=False)

  def __post_init__(self, params):
    self._compile_functions(params)
    self._ahead: threading.Thread | None = None
    self._laid_out: Any = None
    self._layouts: dict[bytes, Any] = {}
    if not self.learner.with_reference:
      self.refresh_steps = 0

  def _compile_functions(self, params: Any) -> None:
    """Jits the functions of `step` on the learner's mesh."""
    place = step_lib.state_sharding(self.learner, params)
    everywhere = sharding.replicated(self.learner.mesh)

    def jit(function, **options):
      def traced(*args):
        with sharding.use(self.learner.mesh):
          return function(self.learner, *args)

      traced.__name__ = function.__name__  # its name in logs and profiles
      compiler_options = sharding.COMPILER_OPTIONS
      return jax.jit(traced, compiler_options=compiler_options, **options)

    # What scores also gets the frozen parameters: as an argument, because XLA
    # would copy a constant into every program.
    def scoring(function):
      @functools.wraps(function)
      def with_frozen(learner, frozen, *args):
        return function(dataclasses.replace(learner, frozen=frozen), *args)

      return with_frozen

    # Numbers of arguments below are without the learner, which `traced` adds.
    self.abstract = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      jax.eval_shape(lambda p: step_lib.init(self.learner, p), params),
      place,
    )
    self.init = jit(step_lib.init, donate_argnums=0, out_shardings=place)
    self.refresh = jit(step_lib.refresh, donate_argnums=0, out_shardings=place)
    # Where arrays [P,G,T] lie `token_shards` says.
    self.credit = jit(
      step_lib.credit, out_shardings=(None, everywhere, everywhere)
    )
    self.score_all = jit(
      scoring(offload.given_on_device(gradient.score_all)),
      static_argnums=(4, 5),
    )
    self.train_step = jit(
      scoring(step_lib.train_step),
      donate_argnums=1,
      static_argnums=8,
      out_shardings=(place, everywhere),
    )
    in_rows = sharding.rows(self.learner.mesh, axis=1)
    self.fill = jit(row_shards.filled, out_shardings=in_rows)
    self.rollout_end = jit(
      scoring(step_lib.rollout_end), out_shardings=everywhere
    )

  def __call__(
    self, state: TrainState, rollout: Rollout, step: int
  ) -> tuple[TrainState, Measured]:
    """Takes every update of one rollout.

    Args:
      state: Donated; do not use it again.
      rollout: See `episodes/types.py`. What other processes know of it has been
        gathered on the devices.
      step: Number of the rollout.

    Returns:
      The new state, and metrics of the rollout and its updates.
    """
    self.wait()
    mesh, batch = self.learner.mesh, self.with_policies(state, rollout, step)
    batch = token_shards.placed(mesh, batch)
    batch, loss_state, measured = self.credit(batch, state.loss_state)
    # The compiler may have another name for the same place.
    batch = token_shards.placed(mesh, batch)
    state = state._replace(loss_state=loss_state)
    start = jnp.copy(state.step)  # the state itself is donated
    watch, begun = self.watches(step), batch
    # Where the method needs no `logp_old`, its only update takes the ratio as
    # exactly 1. But `_end` compares the policy after the update with the one
    # before it, which must be scored now: the update donates its parameters.
    if watch and batch.logp_old is None:
      begun = batch._replace(logp_old=self.score(state.params, rollout).logp)
    first = step * self.batches * self.epochs
    every = enumerate(self.optimizer_batches(rollout, step), start=first)
    for number, chosen in every:
      layout, used = self.layout(rollout, chosen)
      state, more = self.train_step(
        self.frozen,
        state,
        batch,
        chosen,
        layout,
        used,
        start,
        np.int32(number),
        watch,
      )
      measured = metrics.merge_outside(measured, more)
    if watch:
      measured |= self._end(state, rollout, begun)
    if self.refresh_steps and (step + 1) % self.refresh_steps == 0:
      weight = jnp.asarray(self.refresh_weight, jnp.float32)
      state = self.refresh(state, weight)
    return state, measured

  def wait(self) -> None:
    """Waits for `compile_ahead`; else the same would be compiled twice."""
    ahead, self._ahead = self._ahead, None
    if ahead:
      ahead.join()

  def whole(self, params: Any) -> Any:
    """The trained parameters and the frozen ones, as the model takes them."""
    return lora.join(params, self.frozen)

  def watches(self, step: int) -> bool:
    """Whether overshoot is measured in a rollout."""
    return self.watch_steps > 0 and step % self.watch_steps == 0

  def _end(
    self, state: TrainState, rollout: Rollout, batch: losses.Batch
  ) -> Measured:
    """`rollout_end` of all prompts, one optimizer batch at a time."""
    # The first epoch's batches, whose layouts are still there.
    measured: Measured = {}
    for chosen in np.split(np.arange(len(rollout.prompts)), self.batches):
      layout, used = self.layout(rollout, chosen)
      more = self.rollout_end(
        self.frozen,
        state.params,
        batch,
        state.loss_state,
        chosen,
        layout,
        used,
      )
      measured = metrics.merge_outside(measured, more)
    return measured

  def compile_ahead(self, example: Rollout, step: int) -> None:
    """Compiles the programs of an update in a thread of its own.

    Meanwhile the sampler is compiled and the first rollout is drawn. If that
    has other shapes than the example, the update is compiled once more. Packed
    rows are not compiled ahead: their shapes depend on lengths of completions.

    Args:
      example: A rollout of the shapes to compile for, such as the largest; the
        values in it do not matter.
      step: Number of the first rollout to come; see `watches`.
    """
    if self.spec.kind != 'packed' and jax.process_count() == 1:
      # A daemon, because Python would wait for any other thread before it ends,
      # and the compiler cannot be interrupted; see `commands.main.run`.
      self._ahead = threading.Thread(
        target=self._try,
        args=(example, step),
        name='compile ahead',
        daemon=True,
      )
      self._ahead.start()

  def _try(self, example: Rollout, step: int) -> None:
    # What fails here fails again in the first update, which raises it.
    with contextlib.suppress(BaseException):
      self._compile(example, step)

  def _compile(self, example: Rollout, step: int) -> None:
    """Compiles the programs that `__call__` runs; jit keeps them for it."""
    for lower in self.lowering(example, step).values():
      lower().compile()

  def lowering(
    self, example: Rollout, step: int = 0
  ) -> dict[str, Callable[[], Any]]:
    """What lowers the programs that `__call__` runs.

    Nothing is put on a device; those of the mesh need not be there.

    Args:
      example: See `compile_ahead`.
      step: See `compile_ahead`.

    Returns:
      For each program a function that lowers it: `train_step`, `credit`, and
      what scores before the first update: `score_all`, `score_entropy` if the
      entropy is needed too, `score_reference` of a reference on the host.
    """
    mesh = self.learner.mesh
    lower = functools.partial(sharding.lower, mesh)
    state, shape = self.abstract, example.batch.mask.shape
    chosen = next(self.optimizer_batches(example, 0))
    layout, used = self.abstract_layout(example, chosen)
    scoring = {}

    # In place of `score`: it notes the program; no parameters are there yet.
    def unscored(params, rollout, with_entropy=False):
      del rollout
      of_chosen = len(chosen), *shape[1:]
      given = self.frozen, params, layout, used, of_chosen, with_entropy
      name = 'score_entropy' if with_entropy else 'score_all'
      if params is state.reference:
        (name,) = self.learner.reference_scorings
      scoring[name] = lambda: lower(self.score_all, *given)
      nothing = jnp.asarray(np.zeros(shape, np.float32))
      return jax.tree.map(lambda _: nothing, self.score_all.eval_shape(*given))

    # What the method reads must be there; its values do not matter.
    batch = losses.with_required(
      self.learner.method, self.with_policies(state, example, step, unscored)
    )
    batch = token_shards.placed(mesh, batch, abstract=True)
    credited, *_ = jax.eval_shape(self.credit, batch, state.loss_state)
    credited = token_shards.placed(mesh, credited, abstract=True)
    everywhere = sharding.replicated(mesh)
    start = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    number = np.int32(0)
    given = self.frozen, state, credited, chosen, layout, used, start, number
    watch = self.watches(step)
    return {
      'train_step': lambda: lower(self.train_step, *given, watch),
      'credit': lambda: lower(self.credit, batch, state.loss_state),
      **scoring,
    }

  def abstract_layout(
    self, example: Rollout, chosen: np.ndarray
  ) -> tuple[Layout, int]:
    """As `layout`: shapes, dtypes and shardings, and how many are used."""
    # Which rows are filled does not matter.
    nowhere = np.zeros(sharding.row_shards(self.learner.mesh), bool)
    layout, used = micro_batches.of_rollout(example, chosen, self.spec, nowhere)
    place = sharding.rows(self.learner.mesh, axis=1)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), layout
    ), used

  @property
  def scores_old(self) -> bool:
    """Whether the learner scores `logp_old`.

    Otherwise it is the sampler's, or there is none and the ratio is 1.
    """
    several = self.batches * self.epochs > 1 or self.stale
    needed = several or self._requires('logp_old')
    return self.anchor == 'learner' and needed

  @property
  def scoring_names(self) -> list[str]:
    """The programs of `lowering` that score before the first update."""
    own = 'score_entropy' if self._requires('entropy_old') else 'score_all'
    names = [own] if self.scores_old else []
    return names + self.learner.reference_scorings

  def forward_passes(self, needed_tokens: float = 1) -> float:
    """How many forward passes the last rollout's scorings and updates need.

    A backward pass counts as two. Updates may need but a share of the tokens.
    """
    return 3 * self.epochs * needed_tokens + self.scorings

  def _requires(self, name: str) -> bool:
    return name in self.learner.method.requires

  def with_policies(
    self,
    state: TrainState,
    rollout: Rollout,
    step: int,
    score: Callable[..., Scores] | None = None,
  ) -> losses.Batch:
    """The batch with the log-probabilities, entropy and noise that are needed.

    Args:
      state: Before the first update of the rollout.
      rollout: See `episodes/types.py`.
      step: Number of the rollout.
      score: Called instead of `self.score`.
    """
    score = score or self.score
    batch, shape = rollout.batch, rollout.batch.mask.shape
    fresh = np.asarray(batch.version) >= step
    extras = {**batch.extras, 'fresh': fresh}
    if self._requires('noise'):
      rng = random_keys.generator(self.seed, 'noise', step)
      # Positions come first, so that the noise of a token does not depend on
      # how wide the batch is.
      noise = rng.random((shape[2], *shape[:2]), np.float32)
      extras['noise'] = np.moveaxis(noise, 0, -1)
    # `credit` asks for the field already; `train_step` puts in the number.
    if self._requires('updates_done'):
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
        if sampler is not None:
          # Scored log-probabilities are of the whole policy; the sampler's are
          # of what top-k, top-p and min-p have left.
          sampler = sampler + extras.get('log_kept', 0)
        logp_old = self._of_each_age(batch, old.logp, sampler)
        batch = batch._replace(logp_old=logp_old)
    self.scorings = scored + self.learner.with_reference
    if self.learner.with_reference:
      logp_ref = score(state.reference, rollout).logp
      batch = batch._replace(logp_ref=logp_ref)
    return batch

  def _of_each_age(self, batch: losses.Batch, scored, sampler):
    """What was scored; the sampler's for tokens that an earlier policy drew."""
    if not self.stale or sampler is None:
      return scored
    return jnp.where(batch.extras['fresh'], scored, sampler)

  def score(self, params: Any, rollout: Rollout, with_entropy: bool = False):
    """`Scores` f32[P,G,T] of the completions under some parameters."""
    parts = []
    for chosen in np.split(np.arange(len(rollout.prompts)), self.batches):
      layout, used = self.layout(rollout, chosen)
      shape = (len(chosen), *rollout.batch.mask.shape[1:])
      scores = self.score_all(
        self.frozen, params, layout, used, shape, with_entropy
      )
      parts.append(scores)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

  def layout(self, rollout: Rollout, chosen: np.ndarray) -> tuple[Layout, int]:
    """Micro-batches of some prompts, on the mesh, and how many are used.

    The layouts of the last rollout are kept, because the policies that score it
    and the first epoch read the same rows.
    """
    # By the identity of what every rollout has of its own, on the host.
    if rollout.batch.mask is not self._laid_out:
      self._laid_out, self._layouts = rollout.batch.mask, {}
    key = chosen.tobytes()
    if key not in self._layouts:
      found = self.laid_on_mesh(rollout, chosen, self.spec)
      if self.spec.is_open:
        self.spec = micro_batches.decided(rollout, chosen, self.spec)
      # A later epoch has other optimizer batches, which are used only once.
      if len(self._layouts) == self.batches:
        return found
      self._layouts[key] = found
    return self._layouts[key]

  def laid_on_mesh(
    self, rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec
  ) -> tuple[Layout, int]:
    """As `layout`, by any spec; nothing is kept, and nothing decided."""
    shards = host_arrays.own_shards(self.learner.mesh)
    layout, used = micro_batches.of_rollout(rollout, chosen, spec, shards)
    place = sharding.rows(self.learner.mesh, axis=1)
    layout = host_arrays.from_local(layout, place)
    if rollout.holder is not None:
      layout = self.fill(layout, rollout.batch.tokens, chosen)
    return layout, used

  def shapes(self) -> dict[str, Any]:
    """What the update of the last rollout was compiled for, in words."""
    rows, _ = next(iter(self._layouts.values()))
    number, micro_rows, columns = rows.tokens.shape
    *_, slots, positions = rows.column.shape
    return {
      'layout': self.spec.kind,
      'micro-batches': number,
      'rows of a micro-batch': micro_rows,
      'columns of a row': columns,
      'completions in a row': slots,
      'completion positions': positions,
    }

  def memory_gib(self, rollout: Rollout) -> dict[str, float]:
    """Memory that the compiled update needs on each device, GiB.

    Returns:
      What the compiler says: `temporary`, and `peak`, which counts arguments
      and results too.
    """
    # In rollout 0 overshoot is measured, if in any.
    step = self.lowering(rollout)['train_step']()
    needs: Any = step.compile().memory_analysis()
    # Results lie in the memory of donated arguments, which counts once.
    held = needs.argument_size_in_bytes + needs.output_size_in_bytes
    peak = held - needs.alias_size_in_bytes + needs.temp_size_in_bytes
    gib = 2**30
    return {'temporary': needs.temp_size_in_bytes / gib, 'peak': peak / gib}

  def optimizer_batches(self, rollout: Rollout, step: int) -> Iterator[Any]:
    """Yields the prompts [P'] of each optimizer batch.

    The first epoch takes them in their order, every later one in its own.
    """
    order = np.arange(len(rollout.prompts))
    for epoch in range(self.epochs):
      if epoch:
        rng = random_keys.generator(self.seed, f'epoch {epoch}', step)
        order = rng.permutation(order)
      yield from np.split(order, self.batches)
