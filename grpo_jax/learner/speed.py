"""Speed of a rollout and its updates."""

from collections.abc import Callable
import time
from typing import Any

import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.models import Model
from grpo_jax.models import layout


def metrics_of_speed(
  rollout: Rollout,
  sample_secs: float,
  learn_secs: float,
  model: Model,
  peak: float | None,
  learn_passes: float,
  tokens_drawn: float | None = None,
  waited_secs: float | None = None,
  teacher: Model | None = None,
) -> dict[str, float]:
  """Seconds, completion tokens per second, and model FLOP utilisation (MFU).

  MFU is the number of FLOPs that the model needs, divided by the number that
  the devices could have done in the time. The model needs each prompt token
  once, without logits, and each completion token once, with logits; see
  `flops_per_token`. Repeated work (rematerialisation, prompts repeated in
  padded rows, copies of what branches share) does not count.

  Args:
    rollout: What was sampled and learned from.
    sample_secs: Seconds spent sampling and judging.
    learn_secs: Seconds spent on the optimizer steps, and on what the host does
      in that time.
    model: The policy.
    peak: FLOP/s of all devices together; None if it is not known.
    learn_passes: Forward passes over the rollout that the optimizer steps are
      worth: 3 for each epoch (the backward pass is two), and 1 for each
      scoring, by the old policy or the reference; less where updates have left
      out completions.
    tokens_drawn: Completion tokens that were sampled in `sample_secs`; None:
      those of the rollout. Dynamic sampling drops some groups and keeps others
      for later, so it may sample more or fewer.
    waited_secs: How many of `sample_secs` the learner waited for; None: all.
    teacher: The model that has scored the rollout once, if there is one.

  Returns:
    `sample_secs`, `learn_secs`, `step_secs` (learning and waiting),
    `sample_tokens_per_sec`, `learn_tokens_per_sec`; and `mfu_sample` and
    `mfu_learn`, where the peak and the model's FLOPs are known.
  """
  tokens = float(rollout.drawn.sum())
  drawn = tokens if tokens_drawn is None else tokens_drawn
  waited = sample_secs if waited_secs is None else waited_secs
  measured = {
    'sample_secs': sample_secs,
    'learn_secs': learn_secs,
    'step_secs': waited + learn_secs,
    'sample_tokens_per_sec': drawn / sample_secs,
    'learn_tokens_per_sec': tokens / learn_secs,
  }
  flops = None if peak is None else forward_flops(rollout, model)
  if peak is not None and flops is not None:
    # Tokens that were drawn and dropped are taken to cost as much as others.
    # There are none if every episode of the rollout has failed.
    share = drawn / max(tokens, 1)
    measured['mfu_sample'] = flops * share / sample_secs / peak
    learned = learn_passes * flops
    if teacher is not None:
      learned += forward_flops(rollout, teacher) or 0.0
    measured['mfu_learn'] = learned / learn_secs / peak
  return measured


def timed(function: Callable[..., Any], *args) -> tuple[Any, float]:
  """The result of a call, and how many seconds the call took."""
  start = time.monotonic()
  result = function(*args)
  return result, time.monotonic() - start


def forward_flops(rollout: Rollout, model: Model) -> float | None:
  """FLOPs of one forward pass over a rollout, each token computed once.

  None if the model does not know how many operations it takes.
  """
  prompt = np.array([len(ids) for ids in rollout.prompts])
  in_prompts = np.concatenate([np.arange(n) + 1 for n in prompt])
  place = np.arange(rollout.length.max())
  is_there = place < rollout.length[:, :, None]
  if rollout.previous is not None:
    place = layout.depths(rollout.length, rollout.previous)[..., : len(place)]
  in_completions = prompt[:, None, None] + 1 + place
  of_completions = model.flops_per_token(in_completions)
  of_prompts = model.flops_per_token(in_prompts, with_head=False)
  if of_completions is None or of_prompts is None:
    return None
  return float(np.sum(of_prompts) + np.sum(is_there * of_completions))
