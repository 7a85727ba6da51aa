"""The model protocol: what the rest of the package asks of a policy.

`Model` is what training a policy needs: names and axes of its parameters, how
rows may look, and `score`. `Layered` adds what the engine of this package and
`scores` need: the layers and the output layer apart, and caches. Parameters are
trees of plain arrays, and every method is a pure function of them.

A family of models differs in what stands behind these methods. A cache is a
tree of arrays for each layer, which only the model and its attention look into,
so it may hold keys and values, or a state that does not grow.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import Protocol
from typing import runtime_checkable

import jax
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.models.axes import MatrixAxes
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.experts import Routing
from grpo_jax.models.experts import Statistics
from grpo_jax.models.layout import Layout

Array = jax.Array
Params = dict[str, Any]
Path = tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wanted:
  """What is asked for beside the log-probability of each completion token.

  It is a tree: `ids` are an array, and what else it says belongs to a program.

  Attributes:
    entropy: Whether the entropy is.
    likeliest: How many of the likeliest tokens in each place, `K`.
    ids: i32[R,C,T,K], tokens whose log-probabilities are, in the place of the
      likeliest; None: none are.
  """

  entropy: bool = dataclasses.field(default=False, metadata=dict(static=True))
  likeliest: int = dataclasses.field(default=0, metadata=dict(static=True))
  ids: Array | None = None


LOGP = Wanted()
"""Nothing else."""


class Scores(NamedTuple):
  """What the policy gives to each completion token, in nats.

  What was not asked for is None; see `Wanted`.

  Attributes:
    logp: f32[R,C,T], log-probability of the token.
    entropy: f32[R,C,T], of the distribution over the vocabulary at this place.
    top_logp: f32[R,C,T,K], of the likeliest tokens, the likeliest first, or of
      the ids that were given. That of the completion token is `logp`, to the
      last bit.
    top_ids: i32[R,C,T,K], the likeliest tokens.
  """

  logp: Array
  entropy: Array | None = None
  top_logp: Array | None = None
  top_ids: Array | None = None


class Routed(NamedTuple):
  """What the routers of a model did with completion tokens.

  Attributes:
    statistics: Sums over the completion tokens that count.
    disagreement: f32[R,C,T], an estimate of the share of layers in which the
      sampler chose other experts; None if its choices are not known.
  """

  statistics: Statistics
  disagreement: Array | None


class Score(Protocol):
  """The log-probabilities of completions in a layout."""

  def __call__(
    self,
    params: Params,
    layout: Layout,
    temperature: float = 1.0,
    wanted: Wanted = LOGP,
    *,
    forward_mode: bool = False,
  ) -> Scores:
    """See `scores.score`."""
    ...


class ScoreRouted(Protocol):
  """`Score` of a model with experts."""

  def __call__(
    self,
    params: Params,
    layout: Layout,
    counted: Array,
    sampled: Array | None = None,
    temperature: float = 1.0,
    wanted: Wanted = LOGP,
  ) -> tuple[Scores, Routed]:
    """See `scores.score_routed`."""
    ...


@runtime_checkable
class Model(Protocol):
  """A policy that can be trained: its structure, without parameters."""

  @property
  def score(self) -> Score:
    """Log-probabilities of completions."""
    ...

  @property
  def score_routed(self) -> ScoreRouted | None:
    """Likewise, and what routers did; None without experts."""
    ...

  @property
  def vocab_size(self) -> int:
    """Logits of each token, `V`."""
    ...

  @property
  def unused_ids(self) -> Sequence[tuple[int, int]]:
    """Runs `(first, end)` of ids that are never drawn."""
    ...

  @property
  def takes_shards(self) -> bool:
    """Whether `score` gathers parameters that are split over `fsdp`."""
    ...

  @property
  def bytes_per_token(self) -> int:
    """What a backward pass keeps of a token, roughly."""
    ...

  @property
  def key_cost(self) -> float | None:
    """Cost of attending to one more key, relative to all else of a token.

    None: the model reads padded rows alone.
    """
    ...

  @property
  def kv_heads(self) -> int:
    """Heads that the axis `tensor` should divide; 0: nothing is known."""
    ...

  @property
  def file_shape(self) -> ModelConfig | None:
    """The shape as Hugging Face's files hold it; None: they cannot."""
    ...

  def shares_prompts(self, platform: str) -> bool:
    """Whether its attention on a platform lets tokens see any part of a row.

    Packed completions then share prompts, and branches what they have in
    common (`Layout.reach`). If not, each of them reads a copy.
    """
    ...

  @property
  def reads_branches(self) -> bool:
    """Whether a completion may branch in a row (`Layout.reach`)."""
    ...

  def flops_per_token(
    self, context: ArrayLike, with_head: bool = True
  ) -> np.ndarray | None:
    """See `models.flops_per_token`; None if it is not known."""
    ...

  def abstract(self) -> Params:
    """Shapes and dtypes of the parameters."""
    ...

  def trains(self, path: Path) -> bool:
    """Whether updates change the parameter at a path, or it stays frozen."""
    ...

  def decays(self, path: Path) -> bool:
    """Whether weight decay acts on the parameter at a path."""
    ...

  def logical_axes(self, path: Path, rank: int) -> tuple[str | None, ...]:
    """The names of a parameter's axes; see `sharding.param_shardings`."""
    ...

  def matrix_axes(self, path: Path, rank: int) -> MatrixAxes:
    """Which axes of a parameter are inputs, and which are outputs."""
    ...


@runtime_checkable
class Layered(Model, Protocol):
  """A `Model` whose layers and output layer can be called apart."""

  @property
  def config(self) -> ModelConfig:
    """Its shape."""
    ...

  @property
  def routes(self) -> bool:
    """Whether it has experts, and so `hidden_routed`."""
    ...

  def hidden(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    attention: Any,
    cache: list[Any] | None = None,
  ) -> tuple[Array, list[Any] | None]:
    """The output of the last layer, and the new caches."""
    ...

  def hidden_routed(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    attention: Any,
    cache: list[Any] | None = None,
    counted: Array | None = None,
  ) -> tuple[Array, list[Any] | None, Routing]:
    """`hidden`, and what the routers did."""
    ...

  def head(self, params: Params, hidden: Array) -> Array:
    """Logits f32[..., V] of what `hidden` returns."""
    ...

  def head_params(self, params: Params) -> Params:
    """What `head` reads, whole over `fsdp`."""
    ...

  def unstack(self, params: Params) -> Params:
    """The same parameters, as decoding reads them."""
    ...
