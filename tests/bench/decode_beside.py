"""Times decoding beside transformers' `generate` and llama.cpp, in turns.

python tests/bench/decode_beside.py --cases C,S --streams 1,16,64
python tests/bench/decode_beside.py --cases S --llama_cpp FOLDER

All have the same float32 weights, a prompt of 64 tokens for each stream, and
draw 64. They take turns, each peer in a process of its own. A cell has a peer's
milliseconds of a step, and their ratio to ours. transformers has a static
cache; `compiled` is `torch.compile` around its model. FOLDER has
`llama-quantize` and `llama-batched-bench` of llama.cpp; the second takes
random tokens instead of drawing them. Nothing else should run on the machine
meanwhile.
"""

import argparse
import math
import os
import pathlib
import statistics
import subprocess
import sys

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from grpo_jax.config import gguf_files  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import config as bench_config  # noqa: E402
from tests.bench import decode  # noqa: E402
from tests.bench import environments  # noqa: E402
from tests.bench import run  # noqa: E402
from tests.bench import tables  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
PEERS = 'transformers', 'transformers compiled', 'llama.cpp'


def main() -> None:
  """Runs what the command line asks for, and prints it."""
  args = arguments()
  lines = [['case', 'streams', 'grpo_jax, ms', *PEERS], ['---'] * 6]
  for case in args.cases:
    for streams in args.streams:
      lines.append([case, str(streams), *cells(args, case, streams)])
      print(lines[-1], file=sys.stderr, flush=True)
  print(tables.markdown(lines))


def arguments() -> argparse.Namespace:
  """What the command line says."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  words = lambda text: text.split(',')
  numbers = lambda text: [int(word) for word in words(text)]
  parser.add_argument('--cases', type=words, default=['C', 'S'])
  parser.add_argument('--streams', type=numbers, default=[1, 16, 64])
  parser.add_argument('--turns', type=int, default=3)
  parser.add_argument('--llama_cpp', type=pathlib.Path, metavar='FOLDER')
  environments.add_arguments(parser, limit_secs=300.0)
  return parser.parse_args()


def cells(args, case: str, streams: int) -> list[str]:
  """Of one row: our milliseconds, then each peer's with the ratio."""
  found: dict[str, list[float]] = {'grpo_jax': []}
  for _ in range(args.turns):
    found['grpo_jax'].append(decode.secs_of_a_step(case, streams, most=1))
    for peer in PEERS:
      if peer != 'llama.cpp' or (args.llama_cpp and case == 'S'):
        found.setdefault(peer, []).append(secs(args, peer, case, streams))
  own = statistics.median(found['grpo_jax'])
  row = [f'{1e3 * own:.3g}']
  for peer in PEERS:
    if peer not in found:
      row.append('-')
      continue
    ratios = [b / a for a, b in zip(found['grpo_jax'], found[peer])]
    row.append(
      f'{1e3 * statistics.median(found[peer]):.3g}: '
      f'{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})'
    )
  return row


def secs(args, peer: str, case: str, streams: int) -> float:
  """Of a decode step of a peer; NaN, and a word on stderr, if it fails."""
  of_llama_cpp = peer == 'llama.cpp'
  command = (
    llama_cpp(args, streams)
    if of_llama_cpp
    else [
      environments.python_of('trl', args.envs),
      HERE / 'peer_generate.py',
      f'--case={case}',
      f'--streams={streams}',
      f'--prompt={decode.PROMPT}',
      f'--tokens={decode.TOKENS}',
      '--turns=1',
      *(['--compiled'] if peer == 'transformers compiled' else []),
      *weights(case),
    ]
  )
  found = run.run(args, command)
  if 'error' in found:
    print(f'{peer}, {streams} streams: {found["error"]}', file=sys.stderr)
    return math.nan
  return found['t_tg'] / decode.TOKENS if of_llama_cpp else found['secs']


def weights(case: str) -> list[str]:
  """Where the weights of a pretrained case are, for a peer."""
  if not cases.find(case).pretrained:
    return []
  return [f'--weights={bench_config.pretrained(cases.find(case))}']


def llama_cpp(args, streams: int) -> list[str | pathlib.Path]:
  """What times llama.cpp on SmolLM2 in float32."""
  given = {
    '-m': float32_gguf(args.llama_cpp),
    '-npp': decode.PROMPT,
    '-ntg': decode.TOKENS,
    '-npl': streams,
    '-c': streams * (decode.PROMPT + decode.TOKENS),
    '-t': os.cpu_count(),
    '--output-format': 'jsonl',
  }
  words = [str(word) for pair in given.items() for word in pair]
  return [args.llama_cpp / 'llama-batched-bench', *words]


def float32_gguf(folder: pathlib.Path) -> pathlib.Path:
  """The weights of case S as llama.cpp's own file, converted when missing."""
  case = cases.find('S')
  path = bench_config.pretrained(case).with_suffix('.gguf')
  if not path.exists():
    part = path.with_suffix('.part')
    source = gguf_files.find(case.pretrained)
    quantize = [folder / 'llama-quantize', '--allow-requantize']
    subprocess.run(
      [*quantize, source, part, 'F32'], check=True, capture_output=True
    )
    part.rename(path)
  return path


if __name__ == '__main__':
  main()
