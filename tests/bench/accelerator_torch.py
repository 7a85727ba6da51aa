"""The work of `accelerator.py` by torch and transformers, to stand beside it.

  pip install torch transformers
  python tests/bench/accelerator_torch.py --shape 0.5B

Needs neither jax nor grpo_jax. The same shapes, lengths, micro-batches and
arithmetic; the names that it prints are the same too. Sampling is
`generate` of transformers with a static cache, all completions at once, and
with `--compiled` its model behind `torch.compile`. An update is GRPO without a
penalty: float32 parameters under autocast, scaled dot-product attention, layers
computed again in the backward pass, logits of completions alone, fused AdamW. A
completion's row begins with its own copy of the prompt, as rows of TRL do.
"""

import argparse
from collections.abc import Callable
import copy
import pathlib
import sys
import time
from typing import Any

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tests.bench import accelerator_shapes as shapes  # noqa: E402
from tests.bench import peer_sampling  # noqa: E402

import torch  # noqa: E402  isort: skip
import transformers  # noqa: E402


def main(argv=None) -> dict[str, Any]:
  """Measures, prints a table and one line of JSON, which it returns."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--compiled', action='store_true', help='of sampling')
  args = shapes.arguments(parser, argv)
  torch.manual_seed(0)
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model = model_of(args).to(device)
  told = {
    'device': torch.cuda.get_device_name() if device == 'cuda' else 'cpu',
    'torch': torch.__version__,
    'transformers': transformers.__version__,
    **{name: value for name, value in vars(args).items() if name != 'tiny'},
    'parameters': sum(x.numel() for x in model.parameters()),
  }
  rows, measured = sample(args, model, device)
  told |= measured | train(args, model, rows)
  if device == 'cuda':
    told['peak_gib'] = torch.cuda.max_memory_allocated() / 2**30
  shapes.show(told)
  return told


def model_of(args) -> transformers.Qwen2ForCausalLM:
  """Random weights of a shape, in float32."""
  shape = shapes.SHAPES[args.shape]
  return transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      vocab_size=shape['vocab_size'],
      hidden_size=shape['width'],
      intermediate_size=shape['mlp_width'],
      num_hidden_layers=shape['num_layers'],
      num_attention_heads=shape['num_heads'],
      num_key_value_heads=shape['num_kv_heads'],
      head_dim=shape['head_dim'],
      tie_word_embeddings=shape.get('tied_embeddings', False),
      max_position_embeddings=args.prompt_tokens + args.completion_tokens,
      attn_implementation='sdpa',
    )
  )


def best_secs(run: Callable[[], Any], repeats: int) -> float:
  """Least seconds of a call, after one that warms up."""
  times = []
  for _ in range(repeats + 1):
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
      torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
  return min(times[1:])


def sample(args, model, device) -> tuple[torch.Tensor, dict[str, float]]:
  """Rows [prompts * group, prompt + completion], and how fast they came."""
  size = (args.prompts, args.prompt_tokens)
  prompts = torch.randint(0, model.config.vocab_size, size, device=device)
  prompts = prompts.repeat_interleave(args.group, 0)
  drawer = copy.deepcopy(model).to(getattr(torch, args.dtype)).eval()
  if args.compiled:
    drawer.forward = torch.compile(drawer.forward)

  def generate(tokens: int) -> torch.Tensor:
    drawer.generation_config = peer_sampling.settings(tokens)
    mask = torch.ones_like(prompts)
    with torch.inference_mode():
      return drawer.generate(prompts, attention_mask=mask)

  tokens = args.completion_tokens
  rows = generate(tokens)
  if rows.shape[1] != args.prompt_tokens + tokens:
    sys.exit(f'{rows.shape[1] - args.prompt_tokens} tokens of {tokens}')
  secs = best_secs(lambda: generate(tokens), args.repeats)
  first_secs = best_secs(lambda: generate(1), args.repeats)
  return rows.clone(), {
    'sample_tokens_per_sec': len(rows) * tokens / secs,
    'sample_secs': secs,
    'prefill_secs': first_secs,
    'decode_step_secs': max(secs - first_secs, 1e-9) / (tokens - 1),
  }


def train(args, model, rows: torch.Tensor) -> dict[str, float]:
  """How fast one optimizer step over all rows is."""
  model.train()
  model.gradient_checkpointing_enable({'use_reentrant': False})
  fused = rows.device.type == 'cuda'
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
  # Half of a group is right, as in `accelerator.py`.
  reward = torch.arange(len(rows), device=rows.device) % args.group % 2
  reward = reward.float().view(args.prompts, args.group)
  centered = reward - reward.mean(1, keepdim=True)
  advantage = centered / (reward.std(1, keepdim=True) + 1e-6)
  chunks = list(
    zip(
      rows.split(args.micro_rows * args.group),
      advantage.flatten().split(args.micro_rows * args.group),
      strict=True,
    )
  )
  tokens = args.completion_tokens
  dtype = getattr(torch, args.dtype)

  def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    for ids, weight in chunks:
      cast = torch.autocast(
        ids.device.type, dtype, enabled=dtype != torch.float32
      )
      with cast:
        logits = model(ids, logits_to_keep=tokens + 1, use_cache=False).logits
      logits = logits[:, :-1].float()
      drawn = ids[:, -tokens:, None]
      logp = logits.log_softmax(-1).gather(-1, drawn)[..., 0]
      ratio = torch.exp(logp - logp.detach())
      clipped = ratio.clamp(0.8, 1.2)
      gain = torch.minimum(ratio * weight[:, None], clipped * weight[:, None])
      (-gain.mean() / len(chunks)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

  secs = best_secs(step, args.repeats)
  completions = len(rows) * tokens
  # Each prompt once, as `accelerator.py` counts.
  counted = args.prompts * args.prompt_tokens + completions
  return {
    'train_tokens_per_sec': counted / secs,
    'train_completion_tokens_per_sec': completions / secs,
    'train_secs': secs,
  }


if __name__ == '__main__':
  main()
