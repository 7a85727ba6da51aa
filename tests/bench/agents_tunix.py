"""Times Tunix on the episodes of `agents_work.py`; prints a line of JSON.

PYTHON_OF_TUNIX tests/bench/agents_tunix.py --secs 0.1 --at_once 16

What is timed is the part of its agentic learner that plays: its orchestrator,
which plays so many episodes at a time, each in threads of its own, and its
vanilla rollout.
"""

import asyncio
import os
import pathlib
import sys
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from tests.bench import agents_work  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import peer_tunix  # noqa: E402

import jax  # noqa: E402  isort: skip
import numpy as np  # noqa: E402
import optax  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.agentic import agentic_grpo_learner  # noqa: E402
from tunix.rl.agentic.environments import base_environment  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402


class Words:
  """What Tunix needs of a tokenizer, and of a chat template."""

  def encode(self, text, **_):
    return agents_work.ids(text)

  def decode(self, ids, **_):
    return agents_work.text(ids)

  def pad_id(self):
    return agents_work.PAD

  def bos_id(self):  # none
    return None

  def eos_id(self):
    return agents_work.END

  def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
    del is_first_msg
    said = [
      {**one, 'content': str(np.asarray(one['content']).reshape(-1)[0])}
      for one in messages
      if one['role'] != 'system'
    ]
    return agents_work.chat_text(said, add_generation_prompt)


def main() -> None:
  """Plays a rollout, and says how long it took."""
  args = agents_work.worker_arguments(__doc__)
  work = agents_work.of_arguments(args)
  # Explicit axes, JAX's default, raise in Tunix's embedding.
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=auto)
  with mesh:
    current = [agents_work.Episodes(work, 0.0)]
    learner = learner_of(work, args.at_once or work.rows, mesh, current)
    # One group is all that is compiled: each episode is drawn by itself.
    played(learner, work.prompts()[:1])
    current[0] = agents_work.Episodes(work, args.secs)
    begun = time.perf_counter()
    drawn = played(learner, work.prompts())
    secs = time.perf_counter() - begun
  packages = 'google-tunix', 'jax', 'flax'
  print(agents_work.answer('tunix', packages, work, secs, drawn))


def learner_of(work: agents_work.Work, at_once: int, mesh, current):
  """Tunix's learner, whose environments take their sleeps from the current."""

  class Environment(base_environment.BaseTaskEnv):
    """Answers every turn but the last."""

    def __init__(self, task, **given):
      super().__init__(task, max_steps=work.turns, **given)
      self.turns = current[0].begin()

    def _initial_observation(self):
      return self.task

    def _step_impl(self, action):
      del action
      secs, said = next(self.turns, (0.0, ''))
      time.sleep(secs)
      return base_environment.EnvStepResult(said, 0.0, not said, {})

  class Learner(agentic_grpo_learner.GRPOLearner):
    """Turns of one length; else they fill the episode."""

    def _model_call(self, chat_lists, env=None, max_generation_steps=None):
      return super()._model_call(chat_lists, env, work.turn_tokens)

  return Learner(
    rl_cluster=cluster_of(work, mesh),
    algo_config=agentic_grpo_learner.GRPOConfig(
      num_generations=work.group,
      beta=0.0,
      max_response_length=work.context_tokens,
      max_concurrency=at_once,
      use_rollout_logps=False,
    ),
    reward_fns=lambda prompts, completions, **_: [0.0] * len(completions),
    chat_parser=Words(),
    env_class=Environment,
  )


def cluster_of(work: agents_work.Work, mesh) -> rl_cluster.RLCluster:
  """The policy and the sampler; no reference and no moments."""
  roles = rl_cluster.Role
  case = cases.Case('', '', work.layers, work.width, work.vocab, 1, 1, 1, 1)
  groups = work.episodes // work.group
  longest = 1 << (work.contexts[-1] - 1).bit_length()  # what a prompt grows to
  return rl_cluster.RLCluster(
    actor=peer_tunix.model_of(case, 'float32'),
    tokenizer=Words(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(
        (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh
      ),
      rollout_engine='vanilla',
      offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(1e-3),
        eval_every_n_steps=10**6,
        max_steps=1,
        mini_batch_size=groups,
        train_micro_batch_size=groups,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=work.context_tokens,
        max_prompt_length=work.contexts[0],
        kv_cache_size=longest + work.turn_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[work.vocab + 1],  # is never drawn
        return_logprobs=False,
      ),
    ),
  )


def played(learner, prompts: list[str]) -> list[int]:
  """Plays a rollout; returns how many tokens each episode has drawn."""
  learner._full_batch_size = len(prompts)
  each = learner._create_micro_batch_iterator(iter([{'prompts': prompts}]), 1)

  async def collect():
    return [
      one
      async for group in learner._orchestrator_producer(
        learner._build_orchestrator(), each, learner.algo_config.num_generations
      )
      for one in group
    ]

  future = asyncio.run_coroutine_threadsafe(collect(), learner.loop)
  return [int(one.traj['conversation_masks'].sum()) for one in future.result()]


if __name__ == '__main__':
  main()
