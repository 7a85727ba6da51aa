"""Speed of a rollout and its updates, and the peak speed of a device."""

import re

import numpy as np

from grpo_jax.models import ModelConfig
from grpo_jax.models import flops_per_token
from grpo_jax.rollouts.types import Rollout

# 10^12 FLOP/s of one JAX device, dense, bfloat16, from the vendors' data sheets
# (which quote NVIDIA's with sparsity: twice that). A device of TPU v2, v3 and
# 7x is half a chip. The T4 and the V100 have no bfloat16: theirs is float16.
_TPU_TFLOPS = {
  'TPU v2': 23.0,
  'TPU v3': 61.5,
  'TPU v4': 275.0,
  'TPU v5 lite': 197.0,
  'TPU v5e': 197.0,
  'TPU v5': 459.0,
  'TPU v5p': 459.0,
  'TPU v6 lite': 918.0,
  'TPU v6e': 918.0,
  'TPU7x': 1153.5,
}
# A device has the first entry all of whose words are in its name, so 'H200 NVL'
# comes before 'H200'.
_NVIDIA_TFLOPS = {
  'GB200': 2500.0,
  'B200': 2250.0,
  'H200 NVL': 835.5,
  'H200': 989.5,
  'GH200': 989.5,
  'H100 NVL': 835.5,
  'H100 PCIe': 756.5,
  'H100': 989.5,
  'A100': 312.0,
  'L40S': 362.0,
  'L4': 121.0,
  'A10': 125.0,
  'V100': 125.0,
  'T4': 65.0,
}


def of_speed(
  rollout: Rollout,
  sample_secs: float,
  learn_secs: float,
  model: ModelConfig | None,
  peak: float | None,
  learn_passes: int,
  tokens_drawn: float | None = None,
) -> dict[str, float]:
  """Seconds, completion tokens per second, and model FLOP utilisation (MFU).

  MFU is the number of FLOPs that the model needs, divided by the number that
  the devices could have done in the time. The model needs each prompt token
  once, without logits, and each completion token once, with logits; see
  `flops_per_token`. Repeated work (rematerialisation, prompts repeated in
  padded rows) does not count.

  Args:
    rollout: What was sampled and learned from.
    sample_secs: Seconds spent sampling and judging.
    learn_secs: Seconds spent on the optimizer steps.
    model: The shape of the model; None for a model of the user's own.
    peak: FLOP/s of all devices together; None if it is not known.
    learn_passes: Forward passes over the rollout that the optimizer steps are
      worth: 3 for each epoch (the backward pass is two), and 1 for each
      scoring, by the old policy or the reference.
    tokens_drawn: Completion tokens that were sampled in `sample_secs`; None:
      those of the rollout. Dynamic sampling drops some groups and keeps others
      for later, so it may sample more or fewer.

  Returns:
    `sample_secs`, `learn_secs`, their sum `step_secs`, `sample_tokens_per_sec`,
    `learn_tokens_per_sec`; with a peak and a shape also `mfu_sample` and
    `mfu_learn`.
  """
  tokens = float(rollout.length.sum())
  drawn = tokens if tokens_drawn is None else tokens_drawn
  measured = {
    'sample_secs': sample_secs,
    'learn_secs': learn_secs,
    'step_secs': sample_secs + learn_secs,
    'sample_tokens_per_sec': drawn / sample_secs,
    'learn_tokens_per_sec': tokens / learn_secs,
  }
  if peak is not None and model is not None:
    # Tokens that were drawn and dropped are taken to cost as much as others.
    flops = forward_flops(rollout, model)
    measured['mfu_sample'] = flops * (drawn / tokens) / sample_secs / peak
    measured['mfu_learn'] = learn_passes * flops / learn_secs / peak
  return measured


def forward_flops(rollout: Rollout, model: ModelConfig) -> float:
  """FLOPs of one forward pass over a rollout, each prompt computed once."""
  prompt = np.array([len(ids) for ids in rollout.prompts])
  in_prompts = np.concatenate([np.arange(n) + 1 for n in prompt])
  place = np.arange(rollout.length.max())
  in_completions = prompt[:, None, None] + 1 + place
  drawn = place < rollout.length[:, :, None]
  completions = np.sum(drawn * flops_per_token(model, in_completions))
  prompts = np.sum(flops_per_token(model, in_prompts, with_head=False))
  return float(prompts + completions)


def peak_flops(device_kind: str) -> float | None:
  """Peak FLOP/s of one device: dense bfloat16, by the vendor's data sheet.

  Args:
    device_kind: Of a `jax.Device`.

  Returns:
    FLOP/s; None for a kind that is not in the table, and for part of a GPU.

  >>> peak_flops('NVIDIA H100 80GB HBM3')
  989500000000000.0
  """
  teraflops = _TPU_TFLOPS.get(device_kind)
  words = set(re.split('[ -]', device_kind))
  if teraflops is None and words & {'NVIDIA', 'Tesla'} and 'MIG' not in words:
    fitting = (
      peak
      for name, peak in _NVIDIA_TFLOPS.items()
      if words >= set(name.split())
    )
    teraflops = next(fitting, None)
  return None if teraflops is None else teraflops * 1e12
