"""An engine that asks between two calls of the devices whether to go on."""

from collections.abc import Callable
from collections.abc import Generator
import contextlib
import dataclasses
from typing import Any

from grpo_jax.engines.protocol import Capabilities
from grpo_jax.engines.protocol import Engine
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled


@dataclasses.dataclass(frozen=True)
class Interruptible:
  """An `Engine` that is another with a question before each of its turns.

  Attributes:
    engine: What samples.
    between: Called before the first call of the devices and after each; what it
      raises ends the sampling. Several processes can agree there whether to
      stop, because they all have the same turns.
  """

  engine: Engine
  between: Callable[[], None]

  @property
  def capabilities(self) -> Capabilities:
    """Those of the engine."""
    return self.engine.capabilities

  def load(self, params: Any, version: int) -> None:
    """See `Engine`."""
    self.engine.load(params, version)

  def unload(self) -> None:
    """See `Engine`."""
    self.engine.unload()

  def submit(self, request: Request) -> int:
    """See `Engine`."""
    return self.engine.submit(request)

  def completed(
    self, every_tokens: int | None = None
  ) -> Generator[list[Sampled], None, None]:
    """See `Engine`."""
    with contextlib.closing(self.engine.completed(every_tokens)) as turns:
      self.between()
      for turn in turns:
        yield turn
        self.between()
