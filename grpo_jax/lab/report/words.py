"""Numbers and sentences of a page, and what metrics mean."""

from collections.abc import Sequence
import html
import math
import re

from grpo_jax import monitor
from grpo_jax.lab.report.types import Curve

_PERCENT = '\u00a0%'  # a space that no line breaks at
_SHORT = 16  # characters of a name that a title has room for
_STILL = 0.03  # of its size: less than this is no change


def number(value: float, unit: str = '') -> str:
  r"""A number with three digits; a share in percent.

  >>> [number(x) for x in (0, 0.5, 1234567.0, 2.5e-5, float('nan'))]
  ['0', '0.5', '1,234,567', '2.5e-05', '-']
  >>> number(0.1234, '%')
  '12.3\xa0%'
  """
  if not math.isfinite(value):
    return '-'
  if unit == '%':
    return f'{float(f"{100 * value:.3g}"):g}{_PERCENT}'
  if abs(value) >= 1000:
    return f'{float(f"{value:.7g}"):,.0f}'
  return f'{value:.3g}'


def with_half(mean: float, half: float, unit: str = '') -> str:
  r"""A mean, and half its interval if it has one.

  >>> with_half(0.5, 0.021), with_half(0.5, 0.02, '%')
  ('0.5 ± 0.021', '50 ± 2\xa0%')
  """
  if not math.isfinite(half):
    return number(mean, unit)
  if half < 1e-9 * abs(mean):  # what rounding leaves of equal values
    half = 0.0
  if unit == '%':
    return (
      f'{number(mean, unit)[:-2]} ± {float(f"{100 * half:.2g}"):g}{_PERCENT}'
    )
  return f'{number(mean)} ± {float(f"{half:.2g}"):g}'


def message(label: str, unit: str, curves: Sequence[Curve]) -> str:
  """What is to be seen in a chart, from how its curves begin and end.

  Args:
    label: What is measured.
    unit: '%' for shares.
    curves: Of the chart, with `end`.
  """
  label = label[:1].upper() + label[1:]
  ends = [curve.end for curve in curves if curve.end]
  if not ends:
    return label
  if len(ends) > 4:
    low, high = (f(end.last for end in ends) for f in (min, max))
    return f'{label} ends between {number(low, unit)} and {number(high, unit)}'
  if len(ends) > 1:
    said = [number(end.last, unit) for end in ends]
    names = [curve.name for curve in curves]
    if len(names) == len(said) and max(map(len, names)) <= _SHORT:
      said = [f'{one} with {name}' for one, name in zip(said, names)]
    return f'{label} ends at {", ".join(said[:-1])} and {said[-1]}'
  (end,) = ends
  last = with_half(end.last, end.half, unit)
  if len(curves[0].x) == 1:
    return f'{label} is {last}'
  size = max(abs(end.first), abs(end.last))
  change = end.last - end.first
  if abs(change) <= max(end.noise, _STILL * size):
    return f'{label} stayed near {last}'
  verb = 'rose' if change > 0 else 'fell'
  return f'{label} {verb} from {number(end.first, unit)} to {last}'


def plural(count: int, noun: str) -> str:
  """A count with its noun.

  >>> plural(1, 'run'), plural(1200, 'run')
  ('1 run', '1,200 runs')
  """
  return f'{count:,} {noun}' + ('' if count == 1 else 's')


def duration(secs: float) -> str:
  """Seconds, minutes or hours.

  >>> duration(42), duration(725), duration(100_000)
  ('42 s', '12 min 5 s', '27 h 46 min')
  """
  if secs < 60:
    return f'{secs:.0f} s'
  minutes, seconds = divmod(int(secs), 60)
  if minutes < 60:
    return f'{minutes} min {seconds} s'
  return f'{minutes // 60} h {minutes % 60} min'


def escaped(text: str) -> str:
  r"""The text as HTML that shows it, inside an element or an attribute.

  >>> escaped('<b>"\x1b')
  '&lt;b&gt;&quot;\\x1b'
  """
  return html.escape(printable(text))


def printable(text: str) -> str:
  r"""The text with what does not print escaped; lines and tabs stay.

  >>> printable('a\x1b\n')
  'a\\x1b\n'
  """
  return ''.join(
    char if char.isprintable() or char in '\n\t\xa0' else ascii(char)[1:-1]
    for char in text
  )


_RATIO = (
  'The ratio says how many times as probable a token is now as when it was '
  'sampled.'
)
_PAPER = 'Ge et al. (arXiv:2601.23135)'
_A5 = f'Assumption A5 of {_PAPER} is that prompts are of a similar scale'
_MEANINGS = {
  'reward': 'Mean reward of the completions of a rollout.',
  'heldout_accuracy': (
    'Share of held-out problems that greedy answers solve (the mean of the '
    'first reward).'
  ),
  'heldout_reward': (
    'Mean of the first reward of greedy answers to held-out problems, which is '
    'not 0 or 1 alone.'
  ),
  'heldout_graded': (
    'Share of the held-out problems whose first reward is neither 0 nor 1.'
  ),
  'heldout_judged': 'Held-out problems that the accuracy is of.',
  'accuracy': 'Share of the sampled completions that are right.',
  'uniform_groups': (
    'Share of the groups whose completions all earn the same: they teach '
    'nothing.'
  ),
  'length_tokens': 'Mean length of a completion.',
  'truncated': 'Share of the completions that were cut at the token limit.',
  'turns_mean': 'Mean number of turns of the policy in an episode.',
  'turns_max': 'Most turns of the policy in an episode.',
  'branches': (
    'Mean number of times that an episode goes on behind an earlier place: in '
    'a fork, or where the chat is written otherwise than it was read.'
  ),
  'episode_tokens': (
    'Mean number of tokens that the policy writes in an episode.'
  ),
  'context_share': (
    'Share of the tokens of episodes, those of their prompts included, that '
    'the policy did not write: the environment and the chat template did.'
  ),
  'tool_calls': 'Mean number of calls of tools in an episode.',
  'tool_errors': (
    'Mean number of calls in an episode that went wrong, or could not be read: '
    'the policy reads why and goes on.'
  ),
  'parse_errors': (
    'Mean number of other things in an episode that could not be read, such as '
    'reasoning that is not closed.'
  ),
  'ended/done': 'Share of the episodes that their environment has ended.',
  'ended/end': (
    'Share of the episodes in which the policy ended not a turn but the whole '
    'chat.'
  ),
  'ended/length': (
    'Share of the episodes with a turn that was cut at sampler.max_tokens, or '
    'where its environment wanted it shorter; it ends them.'
  ),
  'ended/turns': (
    'Share of the episodes that were cut at environment.max_turns.'
  ),
  'ended/tokens': (
    'Share of the episodes that were cut at environment.episode_tokens, the '
    'limit of what the policy writes.'
  ),
  'ended/context': (
    'Share of the episodes that were cut at environment.context_tokens, the '
    'limit of all that it writes and reads.'
  ),
  'env_failed': (
    'Share of the episodes whose environment has failed. They are left out, '
    'and are no rewards of 0.'
  ),
  'env_secs_p50': (
    'Median of how long the environment of an episode takes itself.'
  ),
  'env_secs_max': (
    'The longest that the environment of an episode takes itself.'
  ),
  'entropy': (
    'How undecided the policy is at a token, as the sampler sees it; near 0, '
    'completions of a prompt hardly differ.'
  ),
  'kl_old_k3': 'How far the updates of a rollout move the policy that drew it.',
  'kl_ref_k3': 'How far the policy is from the reference.',
  'kl_teacher_k1': 'How far the policy is from the teacher.',
  'kl_teacher_top': (
    'How far the policy is from the teacher, over its likeliest tokens and all '
    'others as one.'
  ),
  'teacher_top_mass': (
    "The teacher's probability of its likeliest tokens, which are those that "
    'count one by one in the KL.'
  ),
  'kl_rollout': (
    'How far all updates of a rollout together have moved the policy, measured '
    'after the last.'
  ),
  'clipped_high': (
    f'Share of the tokens without a gradient because their ratio is high. '
    f'{_RATIO}'
  ),
  'clipped_low': (
    f'Share of the tokens without a gradient because their ratio is low. '
    f'{_RATIO}'
  ),
  'clipped_cap': f'Share of the tokens whose ratio is cut at its cap. {_RATIO}',
  'ess_token': (
    'How many tokens of equal weight would tell as much, over how many there '
    'are. A token that is twice as probable now as when it was sampled weighs '
    'twice. At 100 % all weigh the same.'
  ),
  'prefix_whole_uncancelled': (
    'Sum of the coefficients on tokens that a whole group shares, over the sum '
    'of their sizes: 0 if they cancel.'
  ),
  'prefix_turn0_uncancelled': (
    'The same of the first turns of episodes, each by its first token: all of '
    'a group take them in one context.'
  ),
  'sampler_gap': (
    'Mean difference of the log-probabilities of sampler and learner.'
  ),
  'loss': 'Value of the loss. It is no measure of progress.',
  'grad_norm': 'Norm of the gradient before it is clipped.',
  'update_norm': 'How far an update moves the parameters.',
  'learning_rate': 'That of the schedule, also for updates that are skipped.',
  'adam_carried_norm': 'The part of the update that earlier gradients carry.',
  'adam_fresh_norm': 'The part of the update that this gradient gives.',
  'adam_carried_update_cosine': (
    'Direction of the carried part against the whole update: at 1 momentum '
    'alone moves the parameters.'
  ),
  'adam_grad_update_cosine': (
    'Direction of the gradient against the update; -1 is straight downhill.'
  ),
  'adam_below_epsilon': (
    'Share of the weights whose gradients are smaller than epsilon of Adam.'
  ),
  'overshoot': (
    'How far an update moves clipped tokens further out: nothing pulls them '
    'there but momentum and other tokens.'
  ),
  'overshoot_carried': 'The part of overshoot that momentum causes (coasting).',
  'overshoot_fresh': 'The part of overshoot that the new gradient causes.',
  'overshoot_predicted': 'What the law of coasting predicts without gradients.',
  'overshoot_positive': 'Overshoot, where tokens that move back count as 0.',
  'ends_clipped': 'Share of the tokens that are clipped after an update.',
  'rollout_outside': (
    'Share of the tokens outside their range after the last update of a '
    'rollout.'
  ),
  'geometry_cosine_mean': (
    'Mean cosine of the gradients of two prompts; near 0, they hardly help or '
    'hinder each other.'
  ),
  'geometry_cosine_std': (
    'How far the cosines of pairs of prompts lie apart, beyond what sketching '
    'adds.'
  ),
  'geometry_cosine_noise': 'What sketching adds to the deviation of a cosine.',
  'geometry_cosine_negative': (
    'Share of the pairs of prompts whose gradients point against each other.'
  ),
  'geometry_cosine_small': 'Share of the pairs with a cosine of less than 0.1.',
  'geometry_m': (
    f'Assumption A4 of {_PAPER} is that an update on one prompt hinders no '
    'other: the inner product of the gradients of two prompts, times a number '
    'M, is at least the squared norm of one of them, as seen through the '
    'features of the other. Here the whole norm counts, which may ask for a '
    'larger M. This one is enough for half of the pairs whose gradients agree; '
    'no M is enough for pairs whose gradients disagree.'
  ),
  'geometry_norm_ratio': (
    'Largest norm of the gradient of a prompt over the smallest. '
    f'{_A5}; R1 is its bound on this ratio.'
  ),
  'geometry_reward_std': 'Deviation of rewards in a group, mean over groups.',
  'geometry_reward_ratio': (
    'Largest deviation of rewards in a group over the smallest. '
    f'{_A5}; R2 is its bound on this ratio.'
  ),
  'geometry_within': (
    'How much the gradient of a prompt depends on which completions were '
    'drawn. Each half of its group gives a gradient; shown is the norm of '
    'their difference over the norm of their sum. It is 0 if the halves agree, '
    'and 1 if they have nothing in common.'
  ),
  'geometry_zero': 'Share of the prompts whose gradient is 0.',
  'geometry_prompts': 'Prompts whose gradients are compared.',
  'geometry_secs': 'How long the comparison of gradients takes.',
  'sample_tokens_per_sec': 'Completion tokens that are drawn and judged.',
  'learn_tokens_per_sec': 'Completion tokens that are learned from.',
  'left_out': (
    'Share of the micro-batches that updates need not compute, because no '
    'completion in them has an advantage.'
  ),
  'needed_tokens': (
    'Share of the tokens in completions with an advantage, or of all if the '
    'method finds something in the others.'
  ),
  'step_secs': 'Sampling, judging and learning of a rollout.',
  'judge_secs': 'How long a rollout waits for its judges.',
  'engine_idle_share': (
    'Share of the time of rows, as many as there are episodes that are not '
    'over, in which they draw no turn: they wait for environments, or in '
    'rounds for other turns.'
  ),
  'engine_read_share': (
    'Share of the tokens before turns that are computed for them; the others '
    'are in the cache of the turn before, or of the group.'
  ),
  'engine_parked_share': (
    'Share of the turns whose cache was moved to the memory of the host while '
    'the environment worked, because others needed the row.'
  ),
  'ahead_wait_secs': 'How long updates wait for a rollout drawn ahead.',
  'mfu_sample': 'FLOP/s that the model needs over what the devices could do.',
  'mfu_learn': 'FLOP/s that the model needs over what the devices could do.',
  'device_peak_gib': 'The most that a device has held since the run began.',
  'host_peak_gib': 'The most that the process has held since it began.',
}
_NATS = 'nats per token'
# Metrics that the terminal does not show in a table, and those whose label
# there is understood below its heading alone.
_MORE = {
  'reward': monitor.Row('reward'),
  'heldout_accuracy': monitor.Row('held-out accuracy', '%'),
  'heldout_reward': monitor.Row('held-out mean reward'),
  'heldout_graded': monitor.Row('held-out rewards between', '%'),
  'heldout_judged': monitor.Row('held-out problems judged', '#'),
  'truncated': monitor.Row('share cut at the token limit', '%'),
  'turns_mean': monitor.Row('turns of an episode'),
  'engine_idle_share': monitor.Row('share of the time of idle rows', '%'),
  'engine_read_share': monitor.Row('share of contexts read anew', '%'),
  'engine_parked_share': monitor.Row('share of turns back from the host', '%'),
  'episode_tokens': monitor.Row('tokens of the policy in an episode', 'tokens'),
  'context_share': monitor.Row('share not written by the policy', '%'),
  'tool_calls': monitor.Row('calls of tools in an episode'),
  'tool_errors': monitor.Row('calls of tools that went wrong'),
  'parse_errors': monitor.Row('faults of replies'),
  'ended/done': monitor.Row('share ended by the environment', '%'),
  'ended/end': monitor.Row('share that ended the whole chat', '%'),
  'ended/length': monitor.Row('share cut inside a turn', '%'),
  'ended/turns': monitor.Row('share cut at the limit of turns', '%'),
  'ended/tokens': monitor.Row('share cut at the limit of tokens', '%'),
  'ended/context': monitor.Row('share cut at the limit of the context', '%'),
  'env_failed': monitor.Row('share of episodes that failed', '%'),
  'env_secs_p50': monitor.Row('time of an environment, median', 'seconds'),
  'env_secs_max': monitor.Row('time of an environment, longest', 'seconds'),
  'clipped_high': monitor.Row('share clipped at high ratios', '%'),
  'clipped_low': monitor.Row('share clipped at low ratios', '%'),
  'clipped_cap': monitor.Row('share clipped at the cap', '%'),
  'sampler_gap': monitor.Row('gap of sampler and learner', _NATS),
  'kl_rollout': monitor.Row('KL of a whole rollout', _NATS),
  'overshoot': monitor.Row('overshoot', 'nats'),
  'overshoot_positive': monitor.Row('overshoot, outward alone', 'nats'),
  'overshoot_carried': monitor.Row('overshoot by momentum', 'nats'),
  'overshoot_fresh': monitor.Row('overshoot by the gradient', 'nats'),
  'overshoot_predicted': monitor.Row('overshoot without gradients', 'nats'),
  'rollout_outside': monitor.Row('share outside at rollout end', '%'),
  'ends_clipped': monitor.Row('share clipped after an update', '%'),
  'geometry_cosine_mean': monitor.Row('mean cosine of prompts'),
  'geometry_cosine_noise': monitor.Row('noise of a cosine'),
  'geometry_cosine_negative': monitor.Row('pairs that disagree', '%'),
  'geometry_cosine_small': monitor.Row('pairs that are nearly orthogonal', '%'),
  'geometry_m': monitor.Row('M of assumption A4'),
  'geometry_norm_ratio': monitor.Row('ratio of gradient norms'),
  'geometry_reward_std': monitor.Row('deviation of rewards'),
  'geometry_reward_ratio': monitor.Row('ratio of deviations'),
  'geometry_within': monitor.Row('dependence on the completions drawn'),
  'geometry_zero': monitor.Row('gradients that are 0', '%'),
  'geometry_prompts': monitor.Row('gradients compared', '#'),
  'geometry_secs': monitor.Row('time of comparing', 'seconds'),
  'adam_carried_update_cosine': monitor.Row('cosine of momentum and update'),
  'adam_grad_update_cosine': monitor.Row('cosine of gradient and update'),
  'sample_tokens_per_sec': monitor.Row('sampling speed', 'tokens per second'),
  'learn_tokens_per_sec': monitor.Row('learning speed', 'tokens per second'),
  'step_secs': monitor.Row('time of a rollout', 'seconds'),
  'judge_secs': monitor.Row('time of waiting for judges', 'seconds'),
  'ahead_wait_secs': monitor.Row('time of waiting for rollouts', 'seconds'),
}
_ROWS = {
  name: row for rows in monitor.GROUPS.values() for name, row in rows.items()
} | _MORE


# What is measured for each age N of tokens, by what stands behind `age_N_`.
_OF_AGE = {
  'share': (
    monitor.Row('share of the tokens', '%'),
    'Share of the trained tokens.',
  ),
  'log_ratio': (
    monitor.Row('distance from the sampler', _NATS),
    'Mean distance of the log-probabilities of the policy and of the one that '
    'drew.',
  ),
  'kl': (
    monitor.Row('KL from the sampler', _NATS),
    'How far the policy is from the one that drew.',
  ),
  'clipped': (
    monitor.Row('share clipped', '%'),
    'Share of the tokens without a gradient because they left the trust '
    'region.',
  ),
  'ess': (monitor.Row('effective sample size', '%'), _MEANINGS['ess_token']),
}


def _of_age(name: str) -> tuple[monitor.Row, str] | None:
  """What a metric of one age is called and means; None: it is of no age."""
  found = re.fullmatch(r'age_(\d+)_(\w+)', name)
  if not found or found[2] not in _OF_AGE:
    return None
  row, meaning = _OF_AGE[found[2]]
  age = int(found[1])
  drawn = {0: 'the policy that learns', 1: 'a policy one rollout older'}
  by = drawn.get(age, f'a policy {age} rollouts older')
  return (
    row._replace(label=f'{row.label}, age {age}'),
    f'{meaning} Of tokens that {by} has drawn.',
  )


def _row(name: str) -> monitor.Row | None:
  """What a metric is called, and its unit; None: nobody has said it."""
  of_age = _of_age(name)
  return of_age[0] if of_age else _ROWS.get(name)


def label(name: str) -> str:
  """A metric in words.

  >>> label('kl_old_k3'), label('groups_solved'), label('reward/brevity')
  ('KL from sampling policy', 'groups solved', 'brevity')
  """
  if row := _row(name):
    return row.label
  return name.partition('/')[2] or name.replace('_', ' ')


def called(name: str, graded: bool) -> str:
  """The name under which a metric is looked up here.

  Args:
    name: In `metrics.jsonl`.
    graded: Whether a held-out reward was neither 0 nor 1: then their mean is no
      accuracy.
  """
  return 'heldout_reward' if graded and name == 'heldout_accuracy' else name


def unit(name: str) -> str:
  """The unit of a metric; '%' for shares, '' where there is none."""
  if row := _row(name):
    return row.unit.replace('#', '')
  return 'seconds' if '_secs' in name else ''


def measured(name: str) -> str:
  """What is measured, with its unit."""
  of_age = _of_age(name)
  said = [of_age[1] if of_age else _MEANINGS.get(name, '')]
  if unit(name) not in ('', '%'):
    said.append(f'In {unit(name)}.')
  return ' '.join(filter(None, said))
