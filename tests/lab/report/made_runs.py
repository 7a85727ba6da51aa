"""Workdirs as runs leave them, made in milliseconds."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import parquet
from tests import runs

NASTY = '</script><img src=x onerror="alert(1)">&\u2028\x1b[31m'
"""What must do nothing, wherever a run says it."""


def run(
  folder, rollouts: int | None = 40, seed=0, metrics=None, **changes: Any
):
  """A workdir with as many rollouts.

  Args:
    folder: The workdir to make.
    rollouts: Lines of `metrics.jsonl` after that of step 0; None: no such file.
    seed: Of the run.
    metrics: From a step to metrics that replace others, or None.
    **changes: Of the config, by name.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True)
  config = runs.small(steps=rollouts or 40, seed=seed, **changes)
  values = dataclasses.asdict(config)
  (folder / 'config.json').write_text(json.dumps(values))
  start = {
    'time': '2026-11-24T12:00:00+00:00', 'packages': {'jax': '0.10.2'},
    'git': 'abc', 'devices': '1 x cpu', 'processes': 1, 'python': '3.11.7',
    'after_step': 0, 'replays': False,
  }  # fmt: skip
  (folder / 'versions.json').write_text(json.dumps([start]))
  if rollouts is not None:
    lines = [record(step, seed) for step in range(rollouts + 1)]
    for line in lines:
      line.update(metrics(line['step']) or {} if metrics else {})
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / 'metrics.jsonl').write_text(text)
  return folder


def record(step, seed=0):
  """What a rollout measures; at step 0, before the first, only an accuracy."""
  noise = np.random.default_rng([seed, step]).normal(size=4)
  scalars = {'step': step, 'elapsed_secs': 2.0 * step}
  if step % 10 == 0:
    scalars['heldout_accuracy'] = min(1.0, 0.2 + 0.01 * step)
  if not step:
    return scalars
  reward = 1 - np.exp(-step / 20) + 0.02 * noise[0]
  return scalars | {
    'reward': reward,
    'entropy': float(np.exp(-step / 30)) + 0.1,
    'kl_old_k3': 1e-3 * float(np.exp(noise[1])),
    'clipped_high': 0.01 + 0.002 * noise[2],
    'grad_norm': 1.0 + 0.1 * noise[3],
    'overshoot': 1e-3 * step if step % 4 == 0 else None,
    'sample_tokens_per_sec': 1000.0 + step,
    'learn_tokens_per_sec': 500.0,
    'host_peak_gib': 1.0 + 1e-3 * step,
  }


def rollout(texts, rewards, prompts=None, index=None, ids=None):
  """A rollout of these texts [P][G] with rewards [P,G]; a letter is a token."""
  reward = np.asarray(rewards, np.float32)
  length = np.array([[len(x) for x in row] for row in texts], np.int32)
  width = max(1, int(length.max()))
  mask = np.arange(width) < length[..., None]
  tokens = np.where(mask, 4, 0).astype(np.int32) if ids is None else ids
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=np.isfinite(reward),
    reward=np.nan_to_num(reward),
    reward_parts=np.nan_to_num(reward)[..., None],
    truncated=np.zeros(reward.shape, bool),
    version=np.zeros(mask.shape, np.int32),
  )
  number = len(texts)
  return Rollout(
    batch,
    length,
    [[1]] * number,
    prompts or [f'prompt {p}' for p in range(number)],
    texts,
    np.arange(number) if index is None else np.asarray(index),
    ('exact_match',),
    ['an answer'] * number,
  )


def with_completions(folder, *steps, effects=True, **made):
  """Writes files of completions into a workdir."""
  drawn = rollout(
    made.pop('texts', [['ab', 'c'], ['', 'dd']]),
    made.pop('rewards', [[1, 0], [0, 0]]),
    **made,
  )
  mask = drawn.batch.mask
  of_tokens = {
    'coefficient': np.where(mask, -0.25, 0).astype(np.float32),
    'log_ratio_after': np.where(mask, 0.125, 0).astype(np.float32),
  }
  for step in steps:
    path = parquet.path_of(folder / 'completions', step)
    parquet.write(path, drawn, step, of_tokens if effects else None)


def with_evaluations(folder, outcomes, steps=(0, 40), **made):
  """Writes two evaluations: of each problem, the reward before and after."""
  for place, step in enumerate(steps):
    texts = [[f'answer {place}'] for _ in outcomes]
    rewards = [[pair[place]] for pair in outcomes]
    drawn = rollout(texts, rewards, **made)
    parquet.write(parquet.path_of(folder / 'evaluations', step), drawn, step)
