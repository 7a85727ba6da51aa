"""The story of the two papers: chapters, and the experiments that belong there.

A page for readers is made from this; see `pages.write`. Everything here is
data: what a paper says and what was found, in sentences. Verdicts are computed
from numbers, and stand beside the figures.
"""

from collections.abc import Iterable
from typing import NamedTuple

SINGLE, EPISODES = 'single turns', 'episodes of several turns'
"""What a training is about, as `Training.setting`."""


class Training(NamedTuple):
  """A study that trains runs, and how it is run.

  Attributes:
    command: What runs it.
    setting: `SINGLE` or `EPISODES`.
  """

  command: str
  setting: str = SINGLE


TRAININGS = {
  'brakes': (
    Training(
      'grpo-jax study brakes --config=configs/arithmetic.py '
      '--workdir=runs/brakes'
    ),
  ),
  'brakes_updates': (
    Training(
      'grpo-jax study brakes_updates --config=configs/arithmetic.py '
      '--workdir=runs/brakes_updates --seeds=3 --steps=15'
    ),
  ),
  'brakes_smollm2': (
    Training(
      'grpo-jax study brakes_smollm2 --config=configs/smollm2.py '
      '--config.sampler.prompts=8 --workdir=runs/brakes_smollm2 --seeds=3 '
      '--steps=6'
    ),
  ),
  'normalization': (
    Training(
      'grpo-jax study normalization --config=configs/arithmetic.py '
      '--config.sampler.prompts=16 --workdir=runs/normalization --seeds=5 '
      '--steps=20'
    ),
  ),
  'normalization_smollm2': (
    Training(
      'grpo-jax study normalization_smollm2 --config=configs/smollm2.py '
      '--config.sampler.prompts=8 --workdir=runs/normalization_smollm2 '
      '--seeds=3 --steps=8'
    ),
  ),
  'phases': (
    Training(
      'grpo-jax study phases --config=configs/smollm2.py '
      '--config.sampler.prompts=8 --config.optim.lr=5e-6 '
      '--workdir=runs/phases_smollm2 --seeds=1 --steps=150'
    ),
  ),
  'turns': (
    Training(
      'grpo-jax study turns --config=configs/guess_number.py '
      '--workdir=runs/turns --seeds=5 --steps=30',
      EPISODES,
    ),
  ),
  'staleness': (
    Training(
      'grpo-jax study staleness --config=configs/arithmetic.py:mu=4 '
      '--config.sampler.prompts=16 --workdir=runs/staleness --seeds=5 '
      '--steps=30'
    ),
    Training(
      'grpo-jax study staleness --config=configs/guess_number.py '
      '--config.sampler.prompts=16 --workdir=runs/staleness_episodes '
      '--seeds=5 --steps=30',
      EPISODES,
    ),
  ),
}
"""By study, the settings that its chapter shows beside each other."""


def trainings(study: str) -> tuple[Training, ...]:
  """How a study is run, of which `TRAININGS` may say nothing.

  >>> trainings('mine')[0].command
  'grpo-jax study mine --config=CONFIG --workdir=runs/mine'
  """
  command = f'grpo-jax study {study} --config=CONFIG --workdir=runs/{study}'
  return TRAININGS.get(study, (Training(command),))


class Chapter(NamedTuple):
  """A part of the story.

  Attributes:
    title: What it is about.
    says: What a paper says, in a few sentences.
    found: What was found in this project's own runs, whatever a page has.
      Verdicts stand below it, so it has few numbers.
    names: Of experiments and studies, in the order in which they are shown. A
      name that no experiment has yet keeps its place.
  """

  title: str
  says: str
  found: str
  names: tuple[str, ...]


CHAPTERS = (
  Chapter(
    'One equation for all methods, and what it does to shared tokens',
    'Fontana et al. write ten methods as one sum over tokens, each with a '
    'weight, an advantage and a ratio of probabilities. On a token that all '
    'completions of a group share, the advantages cancel if all weights are '
    'equal. If the weights go by 1 / length, short completions pull harder, '
    'and the sum has a sign.',
    'The sums are as the paper says, on small policies, on a transformer and '
    'on the first turns of episodes, which a group shares too; there 1 / '
    'length also turns the gradient further than chance does. What fails is '
    'to read more into them: DAPO moves a shared token although its sum is 0 '
    'in each group, and in a transformer other tokens move a shared one more '
    'than its own sum does.',
    ('shared_prefix', 'transformer_prefix', 'turns'),
  ),
  Chapter(
    'The loss does not measure progress',
    'At the first update of a rollout the loss of methods that divide by the '
    'length is 0 without a KL term, whatever the policy earns. For Dr. GRPO it '
    'follows whether right completions are longer than wrong ones.',
    'So it was: GRPO learned while its loss stayed 0. The loss of Dr. GRPO was '
    'minus the covariance of reward and length: while the policy improved it '
    'rose where right answers were long, and fell where they were short.',
    ('surrogate_value',),
  ),
  Chapter(
    'AdamW and the scale of rewards',
    'Adam divides by the size of past gradients, so one factor on all rewards '
    'changes nothing, as long as epsilon is negligible and nothing else sees '
    'the scale.',
    'Without epsilon no bit of the parameters changes for factors that are '
    'powers of 2. With epsilon 1e-8 small rewards train otherwise, on a '
    'transformer too. A KL term, a norm of the gradient that is clipped now '
    'and then, or a change of the scale while it is new: each makes the scale '
    'act.',
    ('reward_scale', 'transformer_scale', 'reward_jump', 'transformer_jump'),
  ),
  Chapter(
    'Momentum carries past the clip',
    'A clipped token has no gradient, but Adam moves its parameters on by the '
    'gradients that it remembers. So a clip stops the gradient at once, and '
    'the policy only later.',
    'The law by which these steps decay is exact, and after many steps they '
    'add up to 9 to 12 times the last one before the clip; SGD and RMSProp '
    'stop at once. On language models momentum moves clipped tokens on as '
    'well, that of Lion, Muon, Adafactor and SGD too. Of the way that an '
    'update moves them outward, projection takes nearly all away on balance, '
    'rollback and a narrower clip a fifth or more, a smaller first moment '
    '(`decay`) 4 to 49 %, and a reset of moments a tenth or less. With each '
    'at its best rate no gain in reward is shown; at an equal KL one '
    'comparison of 16 shows one, of .016. Where the rate is too high `decay` '
    'helps, and a lower rate helps more. Of what a policy four versions older '
    'has drawn, more tokens are clipped. Momentum moves these further out if '
    'ratios are to the policy that learns, as if that had drawn, and less far '
    'if they are to the policy that drew, in single turns and in episodes.',
    (
      'coasting_ratio',
      'coasting_distance',
      'momentum_split',
      'other_optimizers',
      'brakes',
      'brakes_updates',
      'brakes_smollm2',
      'staleness',
    ),
  ),
  Chapter(
    'Why GRPO normalises',
    'Ge et al. bound the curvature of the expected reward of a prompt by the '
    'variance of that reward, p (1 - p). Dividing by the deviation then makes '
    'a larger step safe for prompts that are nearly always or hardly ever '
    'solved. By a factor C(T), 8 / 3 of the mean deviation, the bound on the '
    'gradients of GRPO differs from that on REINFORCE, so a gain is promised '
    'where it is below 1. The paper assumes that an update on one prompt '
    'hinders no other, and measures curvature by a proxy for the Fisher '
    'information. It sees three phases of a training: gradients of prompts are '
    'nearly orthogonal, and dividing gains nothing; then rewards within groups '
    'differ less, and it gains most; then the cosines of gradients lie further '
    'apart, and it gains less.',
    'The bound on the curvature holds, with half of its constant. With the '
    'exact gradient of one prompt, failures of GRPO fall as 1 / t^2, those of '
    'REINFORCE as 1 / t. One theorem is wrong as it is printed, for the sum of '
    'squared gradients over all steps, and right as it is proved, for the '
    'smallest of them. C(T) can be above 1, and there too GRPO gets to '
    'gradients no larger than those of REINFORCE, each at the rate of its '
    'theorem, by which the steps of GRPO are never the shorter ones. Gradients '
    'of different prompts disagree more than the paper assumes, in its own '
    'data too. In small groups a prompt weighs less than the paper says, above '
    'all where success is rare: .36 of it at a success of 2 % and 8 '
    'completions. The Fisher information follows the variance of the reward if '
    "it is weighted with the reward, and the paper's proxy for it, which knows "
    'no reward, follows it weakly. In one pair of runs of SmolLM2, too few for '
    'a verdict, the division gained more in the second phase than in the '
    'first, as the paper says, but gradients were not orthogonal before it, '
    'and no third phase came.',
    (
      'normalized_rate',
      'curvature',
      'rate_exponents',
      'threshold',
      'finite_group',
      'interaction',
      'fisher',
      'phases',
    ),
  ),
  Chapter(
    'Does the division matter under Adam?',
    'Neither paper tests this. By the first, Adam cancels a factor that all '
    'prompts share, so what is left of the division is how prompts are weighed '
    'beside each other, and how the factor changes over time.',
    'On small policies the division then changes little; with a large epsilon '
    'it helps Adam where prompts share most of their features. At low rates it '
    'helps SGD; at best rates no gain is shown where half of the features are '
    'shared. On a small transformer under Adam it changes failures by less '
    'than a tenth either way. On SmolLM2 it helps SGD at one rate below the '
    'best, and Adam with a large epsilon at two; at best rates three seeds '
    'decide nothing.',
    ('normalized_optimizer', 'normalization', 'normalization_smollm2'),
  ),
)
"""In the order of the papers."""


def chapters(names: Iterable[str]) -> tuple[Chapter, ...]:
  """All chapters, and a last one with what belongs to none.

  Args:
    names: Of experiments and studies.

  >>> chapters(['fisher', 'mine', 'mine'])[-1].names
  ('mine',)
  """
  placed = {name for chapter in CHAPTERS for name in chapter.names}
  others = tuple(name for name in dict.fromkeys(names) if name not in placed)
  if not others:
    return CHAPTERS
  says = 'What belongs to no chapter of the two papers.'
  return (*CHAPTERS, Chapter('Other experiments', says, '', others))
