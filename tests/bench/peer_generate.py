"""Times a decode step of transformers, in TRL's environment; prints JSON.

PYTHON_OF_TRL tests/bench/peer_generate.py --case C --streams 16

`generate` with a static cache, and with `torch.compile` around the model if it
is `--compiled`. See `decode_beside.py`, which runs this.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tests.bench import cases  # noqa: E402
from tests.bench import peer_sampling  # noqa: E402
from tests.bench import peer_trl  # noqa: E402

import torch  # noqa: E402  isort: skip
import transformers  # noqa: E402


def main() -> None:
  """Prints the seconds of a step, the median of turns."""
  args = arguments()
  model = model_of(args)
  prompts = torch.randint(
    1, model.config.vocab_size, (args.streams, args.prompt)
  )
  generate(model, prompts, 1)  # compiles
  generate(model, prompts, args.tokens)
  secs = []
  for _ in range(args.turns):
    one = generate(model, prompts, 1)
    all_of_them = generate(model, prompts, args.tokens)
    secs.append((all_of_them - one) / (args.tokens - 1))
  print(json.dumps({'secs': statistics.median(secs)}))


def arguments() -> argparse.Namespace:
  """What the command line says."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--case', required=True, help='a letter of cases.py')
  parser.add_argument('--streams', type=int, required=True)
  parser.add_argument('--prompt', type=int, default=64, help='tokens')
  parser.add_argument('--tokens', type=int, default=64, help='to be drawn')
  parser.add_argument('--turns', type=int, default=5)
  parser.add_argument('--weights', help='the folder of a pretrained case')
  parser.add_argument('--compiled', action='store_true')
  return parser.parse_args()


def model_of(args: argparse.Namespace) -> transformers.LlamaForCausalLM:
  """The case's model in float32, which ends no completion."""
  if args.weights:
    model = transformers.LlamaForCausalLM.from_pretrained(
      args.weights, dtype=torch.float32
    )
  else:
    model = peer_trl.model_of(cases.find(args.case))
  model.eval()
  model.generation_config = transformers.GenerationConfig(eos_token_id=None)
  if args.compiled:
    model.forward = torch.compile(model.forward)
  return model


def generate(model, prompts: torch.Tensor, tokens: int) -> float:
  """Seconds of so many tokens of each prompt."""
  mask, settings = torch.ones_like(prompts), peer_sampling.settings(tokens)
  start = time.monotonic()
  with torch.inference_mode():
    found = model.generate(
      prompts,
      attention_mask=mask,
      generation_config=settings,
    )
  secs = time.monotonic() - start
  if found.shape[1] != prompts.shape[1] + tokens:
    sys.exit(f'{found.shape[1] - prompts.shape[1]} tokens of {tokens}')
  return secs


if __name__ == '__main__':
  main()
