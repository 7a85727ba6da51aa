"""What a run is, in small values: each has what one reader reads.

`build.run` makes them from a `Config`, once, and the rollouts of a run read
them. Still read as a `Config` is what is saved or compared as text, shown on
the screen, or planned. What has a type of its own already is no spec here:
`learner.types` has those of an update, `models.layout` that of rows, `engines`
how tokens are drawn.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes.play import Limits
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.models import Transformer
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts.sources import Pace


@dataclasses.dataclass(frozen=True)
class WeightsSpec:
  """Where the parameters of a run come from; see `model.initial`."""

  path: str  # see `config.Model`; '': they are drawn from the seed
  own: Any  # those of a model of one's own, which need no reading; or None
  seed: int
  has_adapters: bool
  base_dtype: str  # of matrices beside adapters
  most_tokens: int | None  # of a row that the model is for; None: of any


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
  """A second model, which scores what the policy draws."""

  model: Transformer
  weights: WeightsSpec  # whose `base_dtype` is that of its matrices
  offload: bool  # whether it lies in the memory of the host
  is_base: bool  # whether it is what lies beside the policy's adapters


@dataclasses.dataclass(frozen=True)
class WidthSpec:
  """How wide rows are, in tokens."""

  prompt_buckets: tuple[int, ...]
  completion_buckets: tuple[int, ...]
  drops: bool  # whether records that are too long are dropped, or refused


@dataclasses.dataclass(frozen=True)
class WorkersSpec:
  """The processes that call rewards, as `rewards.Workers` takes it."""

  number: int
  time_limit_secs: float
  memory_limit_bytes: int
  start_limit_secs: float
  wall_limit_secs: float | None


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
  """What the policy talks to in episodes; see `config.Environment`."""

  played: dict[str, Any]  # as `sessions.Player` takes it; '': the usual one
  call_format: formats.Format
  options: sessions.Options
  limits: Limits
  renders: bool  # whether each turn reads the chat as the template writes it
  alike: bool  # whether all episodes of a record begin with one seed
  failed_share: float  # above which the episodes that failed end the run
  untrusted: frozenset[str] = frozenset()  # whose own rewards do not count


@dataclasses.dataclass(frozen=True)
class DrawSpec:
  """How a rollout is drawn."""

  seed: int  # of everything random in it
  prompts: int
  group: int
  max_tokens: int
  resample_rounds: int
  retire_solved: bool
  right_reward: float  # the least first reward of a right answer
  shuffles: bool  # whether rewards are permuted
  pace: Pace  # which version draws a rollout
  parts: int = 1  # into which the prompts of a rollout fall


@dataclasses.dataclass(frozen=True)
class JobsSpec:
  """Where jobs that draw find the run; see `config.Generator`."""

  listen: str  # '': there are none, and the run draws itself
  secret: str
  weights: str
  wait_secs: float


@dataclasses.dataclass(frozen=True)
class LearnSpec:
  """How rollouts become updates."""

  method: str  # its name in the config
  learner: Learner
  update: UpdateSpec
  layout: LayoutSpec
  nonfinite_rollouts: int = 0  # in a row, after which the run ends; 0: never


@dataclasses.dataclass(frozen=True)
class MeasureSpec:
  """In which rollouts instruments measure: multiples of these; 0: in none."""

  effects_every_steps: int
  geometry_every_steps: int
  seed: int  # of the prompts that geometry chooses


@dataclasses.dataclass(frozen=True)
class WarmUpSpec:
  """The supervised updates before the first rollout."""

  steps: int
  examples: int  # demonstrations per update
  save_every_steps: int
  demonstrations: Callable[[], Any]  # opens their endless dataset
  learn: LearnSpec


@dataclasses.dataclass(frozen=True)
class EvaluationSpec:
  """When held-out problems are answered, how many, and what is read of them."""

  every_steps: int  # rollouts; 0: at the start and the end only
  examples: int
  answer: str  # the function that reads an answer, by name; '': none


@dataclasses.dataclass(frozen=True)
class EarlyStopSpec:
  """When a run ends before its last rollout; see `config.EarlyStop`."""

  metric: str  # '': never
  mode: str
  patience: int
  least_improvement: float


@dataclasses.dataclass(frozen=True)
class ExportSpec:
  """How the policy goes out; see `config.Export`."""

  every_saves: int
  dtype: str
  adapter: bool
  push_to: str
  public: bool


@dataclasses.dataclass(frozen=True)
class KeepSpec:
  """What is kept in the workdir, and when; see `config.Checkpoint`."""

  every_steps: int
  every_minutes: float
  keep_last: int
  best_metric: str
  completions_every_steps: int  # see `config.Log`
  samples: int
