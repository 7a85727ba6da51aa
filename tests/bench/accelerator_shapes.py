"""What the accelerator's benchmarks compute, without jax and without torch."""

import argparse
from collections.abc import Sequence
import json
from typing import Any

_QWEN = dict(
  vocab_size=151936,
  num_kv_heads=2,
  rope_base=1e6,
  qkv_bias=True,
  tied_embeddings=True,
  remat='layer',
)
SHAPES = {
  '0.5B': dict(
    num_layers=24, width=896, num_heads=14, head_dim=64, mlp_width=4864, **_QWEN
  ),
  '1.5B': dict(
    num_layers=28, width=1536, num_heads=12, head_dim=128, mlp_width=8960,
    **_QWEN,
  ),
  'tiny': dict(
    num_layers=2, width=64, num_heads=4, num_kv_heads=2, head_dim=16,
    mlp_width=128, vocab_size=256,
  ),
}  # fmt: skip


def arguments(
  parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
  """What the command line says, of which a parser knows a part already."""
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument('--shape', choices=('0.5B', '1.5B'), default='0.5B')
  sizes = dict(prompts=64, group=8, prompt_tokens=512, completion_tokens=1024)
  for name, value in dict(sizes, micro_rows=1, repeats=3).items():
    parser.add_argument(f'--{name}', type=int, default=value)
  parser.add_argument('--dtype', default='bfloat16', help='or float32')
  parser.add_argument('--tiny', action='store_true', help='a check on a CPU')
  args = parser.parse_args(argv)
  if args.tiny:
    args.shape, args.prompts, args.group = 'tiny', 2, 2
    args.prompt_tokens = args.completion_tokens = 8
    args.repeats = 1
  return args


def show(told: dict[str, Any]) -> None:
  """Prints a table and one line of JSON."""
  for name, value in told.items():
    for row in value if isinstance(value, list) else [value]:
      shown = f'{row:.4g}' if isinstance(row, float) else row
      print(f'{name:32} {shown}')
  print(json.dumps(told))
