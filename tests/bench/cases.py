"""The workloads of the benchmark; plain Python, because every peer reads it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
  """One workload.

  Every model has heads of size 32, as many key-value heads as query heads, a
  SwiGLU of 4 times the width, an output layer of its own and random weights.

  Attributes:
    name: The letter that the command line takes.
    stands_for: What the case is there to show.
    layers: Transformer blocks.
    width: Of the residual stream.
    vocab: Token ids, rows of the embedding.
    prompts: Prompts per step.
    group: Completions per prompt.
    prompt_tokens: Length of every prompt.
    max_tokens: Length of every completion; the longest if some ids end one.
    ends: Ids that end a completion, 0 for a fixed length. Under random weights
      the length is then about geometric with mean `vocab / ends`.
    steps: To be timed, the first included, unless the command line says.
    trl_parts: Micro-batches of TRL, where it needs too much memory otherwise.
  """

  name: str
  stands_for: str
  layers: int
  width: int
  vocab: int
  prompts: int
  group: int
  prompt_tokens: int
  max_tokens: int
  ends: int = 0
  steps: int = 6
  trl_parts: int = 1

  head_dim = 32
  mlp_factor = 4

  @property
  def heads(self) -> int:
    return self.width // self.head_dim

  @property
  def mlp_width(self) -> int:
    return self.width * self.mlp_factor

  @property
  def rows(self) -> int:
    """Completions per step."""
    return self.prompts * self.group

  @property
  def end_ids(self) -> tuple[int, ...]:
    """Evenly spread, so that the reward favours neither long nor short."""
    return tuple(i * self.vocab // self.ends for i in range(self.ends))


CASES = {
  case.name: case
  for case in (
    Case('A', 'dispatch', 2, 128, 512, 4, 4, 32, 32, steps=30),
    Case('B', 'small', 4, 128, 512, 8, 8, 32, 64, steps=10),
    Case('C', 'compute', 4, 256, 2048, 8, 8, 64, 128),
    Case('D', 'large vocabulary', 2, 128, 32768, 4, 4, 32, 32),
    Case('E', 'long shared prompt', 4, 256, 2048, 4, 16, 512, 64, steps=4),
    Case('F', 'ragged lengths', 4, 256, 2048, 16, 8, 64, 256, ends=32, steps=4),
    Case(
      'G',
      'memory of the output layer',
      2,
      128,
      151936,
      4,
      8,
      64,
      128,
      steps=4,
      trl_parts=4,
    ),
  )
}

LEARNING_RATE = 1e-3
KL_COEFFICIENT = 0.04  # so every framework makes a reference pass
