"""The types of one update: what it is given, what it finds, what it changes."""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
from jax.typing import ArrayLike
import optax

from grpo_jax import losses
from grpo_jax.learner import offload
from grpo_jax.models import Routed
from grpo_jax.models import Scores
from grpo_jax.models import Wanted

Array = jax.Array


class TrainState(NamedTuple):
  """What an update changes, and a checkpoint holds."""

  params: Any  # float32 master weights; with adapters, these alone
  opt_state: Any
  loss_state: Any  # of the method; moved once per rollout
  reference: Any  # parameters, like params, if the method has one, else None
  step: Array  # i32[], updates taken
  nonfinite: Array  # i32[], updates refused, see `Update.sound`
  idle: Array  # i32[], updates skipped: every advantage was 0


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
  """How the updates of a rollout are taken.

  Attributes:
    seed: Seed of the noise, and of the order of prompts in the second epoch and
      later.
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
  """

  seed: int = 0
  batches: int = 1
  epochs: int = 1
  anchor: str = 'learner'
  refresh_steps: int = 0
  refresh_weight: float = 1.0
  watch_steps: int = 0
  stale: bool = False

  def watches(self, step: int) -> bool:
    """Whether overshoot is measured in a rollout."""
    return self.watch_steps > 0 and step % self.watch_steps == 0

  def forward_passes(self, scorings: int, needed_tokens: float = 1) -> float:
    """How many forward passes the scorings and updates of a rollout need.

    A backward pass counts as two. Updates may need but a share of the tokens.
    """
    return 3 * self.epochs * needed_tokens + scorings


@dataclasses.dataclass(frozen=True)
class Scoring:
  """How a model scores the rows of a layout.

  Attributes:
    score: `(params, layout, wanted) -> Scores`, see `models.Wanted`.
    score_forward: Like `score`, but `jax.jvp` can differentiate it, which the
      measurement of overshoot needs. None: `score` serves for this too.
    score_routed: `(params, layout, wanted, counted, sampled) -> (Scores,
      Routed)`, see `models.score_routed`; None for a model without experts.
    takes_shards: Whether the model gathers what it needs of parameters that are
      split over data shards; see `sharding.on_shard`. Otherwise it gets all of
      them whole.
  """

  score: Callable[..., Any]
  score_forward: Callable[..., Any] | None = None
  score_routed: Callable[..., Any] | None = None
  takes_shards: bool = False


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What makes an update of a gradient.

  Attributes:
    transform: An optax transformation. Its `update` also gets
      `first_of_rollout` bool[]; `clipped_share` f32[]; `advantage_scale` f32[],
      the root mean square of the trained tokens' advantages; and `outward` if
      `with_outward`.
    on_zero_advantage: What happens to an optimizer batch whose advantages are
      all 0. `'skip'` leaves parameters and moments as they are. `'step'` takes
      an update as usual, in which momentum, weight decay and penalties still
      move the parameters.
    with_outward: Whether it wants `outward`, the gradient of the clipped
      tokens' outward log-ratios. It takes a second backward pass.
  """

  transform: optax.GradientTransformation
  on_zero_advantage: str = 'skip'
  with_outward: bool = False

  def __post_init__(self):
    if self.on_zero_advantage not in ('skip', 'step'):
      raise ValueError(
        f'on_zero_advantage={self.on_zero_advantage!r} is neither '
        "'skip' nor 'step'; set config.learner.on_zero_advantage to one."
      )


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where arrays lie.

  Attributes:
    mesh: From `sharding.make_mesh`.
    logical_axes: The model's; see `sharding.param_shardings`.
    offload_moments: Whether the moments, and whatever else the optimizer keeps
      for each parameter, lie in the memory of the host between updates.
    offload_reference: Whether the reference lies there while nothing is scored.
  """

  mesh: jax.sharding.Mesh
  logical_axes: Callable[..., Any]
  offload_moments: bool = False
  offload_reference: bool = False

  def __post_init__(self):
    if self.offload_moments:
      offload.check(self.mesh, 'optim.offload')
    if self.offload_reference:
      offload.check(self.mesh, 'reference.offload')


@dataclasses.dataclass(frozen=True)
class Measuring:
  """What is measured inside an update; no update changes by it.

  Attributes:
    coast_steps: For how many steps without gradient overshoot is predicted.
    records: Whether the optimizer was made by `optim.record_adam_moments`.
    expects_prefixes: Whether the metrics `prefix_*_expected` are measured. They
      take a second evaluation of the loss; see
      `step_metrics.metrics_of_prefixes`.
    ages: By how many versions a policy that draws may be older than the one
      that learns; 0: no metrics tell ages apart.
    learning_rate: From the number of an update to the learning rate that the
      optimizer takes then; None: there are no metrics of it.
  """

  coast_steps: int = 1
  records: bool = False
  ages: int = 0
  expects_prefixes: bool = False
  learning_rate: Callable[[Array], ArrayLike] | None = None


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A second model, which scores completions and is never updated.

  Attributes:
    scoring: How it scores rows, which are those of the policy.
    logical_axes: The model's; see `sharding.param_shardings`.
  """

  scoring: Scoring
  logical_axes: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Learner:
  """What stays the same from update to update.

  Attributes:
    method: A chain of loss transforms.
    scoring: How the model scores rows.
    optimizer: What makes an update of a gradient.
    placement: Where arrays lie.
    measuring: What is measured inside an update.
    expert_balance: What `models.balance` of the optimizer batch is multiplied
      by and added to the loss. Unless it is 0, an update takes a further
      forward pass; see `gradient.differentiate`.
    compute_all: Whether updates compute completions without an advantage though
      the method finds nothing in them; see `LossTransform`.
    teacher: The model that gives the fields `losses.OF_TEACHER`, if the method
      reads them.
  """

  method: losses.LossTransform
  scoring: Scoring
  optimizer: Optimizer
  placement: Placement
  measuring: Measuring = Measuring()
  expert_balance: float = 0.0
  compute_all: bool = True
  teacher: Teacher | None = None

  def __post_init__(self):
    if self.expert_balance and self.scoring.score_routed is None:
      raise ValueError(
        f'expert_balance={self.expert_balance} needs a model with experts, and '
        'this one has none; set config.learner.expert_balance=0.'
      )

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh on which arrays lie."""
    return self.placement.mesh

  def top_ids(self, batch: losses.Batch) -> ArrayLike | None:
    """i32[P,G,T,K], the teacher's likeliest tokens; None: the loss needs none.

    Args:
      batch: [P,G,T].
    """
    number = self.method.top_tokens
    return batch.extras['teacher_top_ids'][..., :number] if number else None

  def wanted(self, top_ids: Any) -> Wanted:
    """What the loss reads of scores, beside the log-probabilities of tokens.

    Args:
      top_ids: Those of `top_ids` that are scored.
    """
    return Wanted('entropy' in self.method.requires, ids=top_ids)

  def loss(
    self, scores: Scores, batch: losses.Batch, loss_state: Any
  ) -> tuple[ArrayLike, losses.SurrogateTerms]:
    """The loss of some completions, as `losses.surrogate_loss` has it.

    Args:
      scores: Theirs, with what is `wanted`.
      batch: Prepared, any arrangement of completions.
      loss_state: Of the `TrainState`.
    """
    return losses.surrogate_loss(
      self.method,
      scores.logp,
      batch,
      loss_state,
      scores.entropy,
      scores.top_logp,
    )

  @property
  def with_reference(self) -> bool:
    """Whether the loss reads a reference policy."""
    return 'logp_ref' in self.method.requires

  @property
  def with_teacher(self) -> bool:
    """Whether the loss reads a teacher that lies beside the policy."""
    return self.teacher is not None

  @property
  def reference_scorings(self) -> list[str]:
    """The program of `lowerings` that scores the reference, if any."""
    away = self.placement.offload_reference
    return ['score_reference' if away else 'score_all'] * self.with_reference


class Gradient(NamedTuple):
  """What the forward and backward passes of one optimizer batch found."""

  grads: Any  # of the loss, like the parameters, float32
  outward: Any  # of the clipped tokens' outward log-ratios, or None
  loss: ArrayLike  # f32[]
  scores: Scores  # of the whole optimizer batch, [P,G,T]
  terms: losses.SurrogateTerms  # of the whole optimizer batch, [P,G,T]
  slope: Array  # f32[P,G,T], d loss / d logp
  routed: Routed | None  # of the whole optimizer batch, [P,G,T]
  needed: Array | None  # bool[P,G], `gradient.informative`; None: all are
  computed: Array  # i32[], micro-batches that went through the model


class Update(NamedTuple):
  """What the optimizer does, which is nothing if the update is not accepted."""

  params: Any  # after the update
  opt_state: Any  # after the update
  updates: Any  # the difference of the parameters, or None if nothing reads it
  norm: Array  # f32[], of this difference, which is 0 if not accepted
  extra: dict[str, Any]  # what the optimizer got besides gradient and state
  grad_norm: Array  # f32[]
  sound: dict[str, Array]  # bool[]: is the loss, gradient, update finite?
  finite: Array  # bool[], whether all of these are
  idle: Array  # bool[], to be skipped, because every advantage is 0

  @property
  def accepted(self) -> Array:
    """bool[], whether parameters and moments have changed."""
    return self.finite & ~self.idle
