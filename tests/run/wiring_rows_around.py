"""The rows of `wiring_rows` for what surrounds rollouts and updates.

That is the warm-up, evaluations, checkpoints, and what is shown and written.
"""

import numpy as np

from tests.run import wiring
from tests.run.wiring_rows import asked
from tests.run.wiring_rows import at
from tests.run.wiring_rows import optional
from tests.run.wiring_rows import resolved
from tests.run.wiring_rows import rollouts


def ahead(run, value):
  """The versions that have drawn the rollouts."""
  found = [int(np.max(rollout.batch.version)) for rollout in rollouts(run)]
  return found, [max(step - value, 0) for step in range(len(found))]


def warm_up_steps(run, value):
  return [len(run.calls['learn 1'])] + run.at(
    'learning_rate', 'total_steps', 1
  ), [value, value]


def warm_up_examples(run, value):
  arrived = [len(x) for x in run.at('demonstrations', 'records')]
  draws = run.at('arithmetic_demonstrations', 'num_draws')
  total = value * run.config.warm_up.steps
  return arrived + draws, [value] * len(arrived) + [total] * len(draws)


def shown(run, value):
  sources = [
    x.path if isinstance(x, wiring.Source) else 'arithmetic'
    for x in run.at('prompt_stream', 'source')
  ]
  return sources, [value]


def evaluated(run):
  return [r.rollout for r in asked(run, 'evaluate')]


def every_steps(run, value):
  last = run.config.steps if not run.error else -1
  if not run.config.data.heldout:
    return [], []
  wanted = [
    step
    for step in range(len(rollouts(run)) + 1)
    if step in (0, last) or value and step % value == 0
  ]
  return evaluated(run), wanted


def examples(run, value):
  found = [len(r.prompts) for r in asked(run, 'evaluate', 'eval')]
  return found, [value] * len(found)


def answer(run, value):
  found = run.at('summarize', 'answer')
  wanted = resolved(value) if value else None
  return found, [wanted] * len(found)


def saved(run, value):
  """Every so many rollouts, after evaluations, and at the end."""
  steps = run.at('save checkpoints', 'step')
  done = range(len(rollouts(run)) + 1)
  due = {s for s in done if s % value == 0 or s == len(done) - 1}
  # Without held-out problems too: evaluations are due, and find none.
  every, last = run.config.evaluation.every_steps, run.config.steps
  due |= {s for s in done if s in (0, last) or every and s % every == 0}
  return [sorted(set(steps))], [sorted(due)]


def saved_in_warm_up(run, value):
  done = range(1, run.config.warm_up.steps + 1)
  return run.at('save warm_up', 'step'), [s for s in done if s % value == 0]


def best_metric(run, value):
  shown = dict(zip(run.at('shown', 'step'), run.at('shown', 'scalars')))
  calls = run.calls['save checkpoints']
  kept = run.at('Checkpoints', 'best_metric')
  wanted = [shown[c['step']].get(value) for c in calls]
  return [c['metric'] for c in calls] + kept, wanted + [value, '']


def export_every_saves(run, value):
  names = [to.name.split('.')[1] for to in run.at('export', 'folder')]
  folders = [int(name) for name in names if name]  # without that of a push
  saves = sorted(set(run.at('save checkpoints', 'step')) - {0})
  return folders, saves[value - 1 :: value] if value else []


def push_to(run, value):
  asked = ('check_push', 'text'), ('push', 'repository'), ('card', 'name')
  found = {name for where in asked for name in run.at(*where)}
  return [*found], [value] if value else []


def samples(run, value):
  """Each with the reward of its own completion."""
  found, wanted = run.at('shown', 'samples')[1:], []
  for r in rollouts(run):
    reward = np.asarray(r.batch.reward)
    wanted.append(
      [
        (r.prompt_texts[p], r.texts[p][0], float(reward[p, 0]))
        for p in range(min(value, len(r.prompts)))
      ]
    )
  return [[tuple(s) for s in x] for x in found], wanted


def completions_every(run, value):
  done = range(1, len(rollouts(run)) + 1)
  wanted = [s for s in done if value and s % value == 0]
  steps = _written(run, 'completions', 'step')
  answers = _written(run, 'evaluations', 'step')
  evaluated = len(asked(run, 'evaluate')) if value else 0
  return (
    [len(answers), len(steps), *steps],
    [evaluated, len(wanted), *wanted],
  )


def _written(run, folder, argument):
  """An argument of all calls that write a file into a folder."""
  calls = zip(run.at('parquet', 'path'), run.at('parquet', argument))
  return [value for path, value in calls if path.parent.name == folder]


def token_effects(run, value):
  found = _written(run, 'completions', 'effects')
  wanted = [['coefficient'] if value else []] * len(found)
  return [[*effects] for effects in found], wanted


def alarm(words, metric, ill):
  """The first rollout in which the metric is beyond the limit."""

  def row(run, value):
    found = [w['step'] for w in run.calls['warn'] if words in w['text']]
    scalars = zip(run.at('shown', 'step'), run.at('shown', 'scalars'))
    wanted = [s for s, x in scalars if s and ill(x[metric], value)]
    return found[:1], wanted[:1]

  return row


ROWS = {
  'sampler.ahead': ahead,
  'warm_up.steps': warm_up_steps,
  'warm_up.examples': warm_up_examples,
  'warm_up.lr': at(('learning_rate', 'peak', 1)),
  'warm_up.demonstrations': shown,
  'warm_up.carry_free_share': at(
    ('arithmetic_demonstrations', 'carry_free_share')
  ),
  'evaluation.every_steps': every_steps,
  'evaluation.examples': examples,
  'evaluation.right_reward': at(
    ('metrics_of_rollout', 'right_reward'),
    ('draw', 'right_reward'),
    ('summarize', 'right_reward'),
  ),
  'evaluation.answer': answer,
  'checkpoint.every_steps': saved,
  'checkpoint.every_warm_up_steps': saved_in_warm_up,
  'checkpoint.every_minutes': at(('Checkpoints', 'every_minutes', 0)),
  'checkpoint.keep_last': at(('Checkpoints', 'keep_last', 0)),
  'checkpoint.best_metric': best_metric,
  'export.every_saves': export_every_saves,
  'export.dtype': at(('export', 'dtype')),
  'export.push_to': push_to,
  'export.public': at(('check_push', 'public'), ('push', 'public')),
  'log.display': at(('display_for', 'mode')),
  'log.samples': samples,
  'log.tensorboard': optional('TensorBoard'),
  'log.wandb_project': optional('Wandb', 'project'),
  'log.wandb_mode': at(('Wandb', 'mode')),
  'log.mlflow_experiment': optional('Mlflow', 'experiment'),
  'log.mlflow_uri': at(('Mlflow', 'uri')),
  'log.completions_every_steps': completions_every,
  'log.token_effects': token_effects,
  'log.geometry_every_steps': at(('Geometry', 'every_steps')),
  'log.kl_alarm': alarm(
    'KL from the sampling', 'kl_old_k3', lambda x, most: x > most
  ),
  'log.entropy_alarm': alarm(
    'Entropy is', 'entropy', lambda x, least: x < least
  ),
  'log.sampler_gap_alarm': alarm(
    'Sampler and learner', 'sampler_gap', lambda x, most: x > most
  ),
}
