"""Times Tunix on one case, in its own environment; prints one line of JSON.

PYTHON_OF_TUNIX tests/bench/peer_tunix.py --case A --steps 6
"""

import os
import pathlib
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from tests.bench import cases  # noqa: E402
from tests.bench import clock as clock_lib  # noqa: E402

import flax.nnx as nnx  # noqa: E402  isort: skip
import grain  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402


class Words:
  """Ids written as numbers: what Tunix needs of a tokenizer."""

  def encode(self, text, **_):
    return [int(word) for word in text.split()]

  def decode(self, ids, **_):
    return ' '.join(str(int(i)) for i in ids)

  def pad_id(self):
    return 0

  def bos_id(self):  # is put before every prompt
    return 1

  def eos_id(self):
    return 2


def main() -> None:
  """Trains, and says how long each part of each step took."""
  args = clock_lib.peer_parser(__doc__).parse_args()
  clock, case = clock_lib.Clock(), cases.find(args.case)
  # Explicit axes, JAX's default, raise in Tunix's embedding.
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=auto)
  with mesh:
    cluster = build(case, mesh, args)
    learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      reward_fns=reward_of(case),
      algo_config=grpo_learner.GRPOConfig(
        num_generations=case.group,
        num_iterations=1,
        beta=case.kl_coefficient,
        epsilon=0.2,
      ),
    )
    measure(cluster, clock, args.parts)
    rows = prompts(case, args.steps)
    clock.asked = time.perf_counter()
    learner.train(grain.MapDataset.source(rows).batch(case.prompts))
  print(clock.answer('tunix', args, ('google-tunix', 'jax', 'flax')))


def model_of(case: cases.Case, dtype: str):
  """A Llama with random weights; two of them are the same."""
  model = llama.Llama3(
    llama.ModelConfig(
      num_layers=case.layers,
      vocab_size=case.vocab,
      embed_dim=case.width,
      hidden_dim=case.mlp_width,
      num_heads=case.heads,
      num_kv_heads=case.heads,
      head_dim=case.head_dim,
      rope_theta=10_000,
      norm_eps=1e-6,
    ),
    rngs=nnx.Rngs(0),
  )
  nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
  return model


def build(case: cases.Case, mesh, args):
  """The policy, the reference and the sampler of Tunix."""
  roles = rl_cluster.Role
  return rl_cluster.RLCluster(
    actor=model_of(case, args.dtype),
    reference=model_of(case, args.dtype),
    tokenizer=Words(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(
        (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh
      ),
      rollout_engine='vanilla',
      offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(case.learning_rate),
        eval_every_n_steps=10**6,
        max_steps=args.steps,
        mini_batch_size=case.prompts,
        train_micro_batch_size=case.prompts // args.parts,
        compute_logps_micro_batch_size=case.prompts // args.parts,
        rollout_micro_batch_size=case.prompts,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=case.max_tokens,
        max_prompt_length=case.prompt_tokens,
        kv_cache_size=case.prompt_tokens + case.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        # An id that is never drawn gives a fixed length.
        eos_tokens=list(case.end_ids) or [case.vocab + 1],
      ),
    ),
  )


def reward_of(case: cases.Case):
  """`rewards.low_half` as Tunix calls it, with text."""

  def low_half(prompts, completions, **_):
    rewards = []
    for text in completions:
      ids = [int(word) for word in text.split()]
      rewards.append(sum(i < case.vocab // 2 for i in ids) / max(len(ids), 1))
    return rewards

  return low_half


def prompts(case: cases.Case, steps: int):
  """Random prompts, one less than their length: Tunix adds a first token."""
  rng = np.random.default_rng(0)
  shape = (case.prompts * (steps + 1), case.prompt_tokens - 1)
  ids = rng.integers(3, case.vocab, shape)
  return [{'prompts': ' '.join(map(str, row))} for row in ids]


def measure(cluster, clock: clock_lib.Clock, parts: int) -> None:
  """Puts clocks around what a step calls, an update in several parts."""
  generate = cluster.generate
  score, update = cluster.get_ref_per_token_logps, cluster.update_actor
  ref_secs, part_secs = [], []

  def generate_timed(*args, **kwargs):
    start = time.perf_counter()
    result = generate(*args, **kwargs)
    clock.sample_secs.append(time.perf_counter() - start)
    clock.tokens.append(sum(len(ids) for ids in result.tokens))
    return result

  def score_timed(*args, **kwargs):
    start = time.perf_counter()
    result = jax.block_until_ready(score(*args, **kwargs))
    ref_secs.append(time.perf_counter() - start)
    return result

  def update_timed(*args, **kwargs):
    start = time.perf_counter()
    result = update(*args, **kwargs)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    part_secs.append(time.perf_counter() - start)
    if len(part_secs) == parts:
      clock.update_secs.append(ref_secs[-1] + sum(part_secs))
      clock.end_step()
      part_secs.clear()
    return result

  cluster.generate = generate_timed
  cluster.get_ref_per_token_logps = score_timed
  cluster.update_actor = update_timed


if __name__ == '__main__':
  main()
