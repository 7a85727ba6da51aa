"""The card of a model that goes to the Hub: what it is, and what it learned.

It names what can be found by everybody. Paths, prompts, arguments of commands,
environment variables and functions of one's own stay here.
"""

from collections.abc import Iterator
import json
import math
import pathlib
from typing import Any

from grpo_jax import diagnostics
from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.data import hub
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import model as build_model
from grpo_jax.run.keep.metrics_file import Metrics

CURVE = 'learning_curve.png'
_ACCURACY, _JUDGED = 'heldout_accuracy', 'heldout_judged'
_QUANTILE = 1.959964  # of the normal distribution, for 95 %
_OWN = 'of its owner'
_MADE = 'grpo', 'reinforcement-learning'  # tags
# Where files of a model say what it came from.
_PATHS = {'_name_or_path', 'name_or_path', 'base_model_name_or_path'}


def write(
  folder: pathlib.Path,
  name: str,
  config: Config | None,
  metrics: Metrics,
  step: int | None,
  adapter: bool,
  base: str = '',
) -> None:
  """Writes README.md, and the curve of a run, into the folder of a model.

  Paths of this machine go out of its other files.

  Args:
    folder: Of the model, or of an adapter.
    name: Of the repository that it goes to: 'owner/name'.
    config: Of the run that made it; None if it is a converted model.
    metrics: Of that run.
    step: How many rollouts it has learned from.
    adapter: Whether it is an adapter.
    base: What was converted, if there was no run: a name or a path.

  Raises:
    OSError: A file cannot be written.
  """
  if config is None:
    known = hub.parse(base)
    repository = known.repository if known else ''
    _without_paths(folder, repository)
    head = _head(repository, base, [], (), adapter)
    _seal(folder, [*head, '', f'# {name}', '', _FOOT])
    return
  has_curve = _draw(metrics, step, folder / CURVE)
  path = build_model.first_path(config.model.path)
  known = _named(path)
  _without_paths(folder, known)
  lines = [
    *_head(known, path, _data_names(config), _MADE, adapter),
    '',
    f'# {name}',
    '',
    _sentence(config, step, adapter),
    '',
    *_facts(config, step),
    '',
    *_figures(metrics, step),
  ]
  if has_curve:
    lines += ['', f'![Learning curve]({CURVE})']
  _seal(folder, [*lines, '', _FOOT])


_FOOT = 'Written by grpo_jax, which post-trains language models.\n'


def _without_paths(folder: pathlib.Path, base: str) -> None:
  """Names the base in the files of a model, in the place of a path."""
  for name in ('config.json', 'tokenizer_config.json', 'adapter_config.json'):
    file = folder / name
    described = json.loads(file.read_text()) if file.exists() else {}
    known = _PATHS & described.keys()
    if known:
      described |= dict.fromkeys(known, base)
      file.write_text(json.dumps(described, indent=2) + '\n')


def _seal(folder: pathlib.Path, lines: list[str]) -> None:
  """Writes the card, so that it can be told whether somebody has changed it."""
  (folder / 'README.md').write_text(hub.sealed('\n'.join(lines)))


def _named(text: str) -> str:
  """The repository of a name that a run has looked up on the Hub; or ''.

  A path that is not here looks like a name, and nobody must read it.
  """
  name = hub.parse(text)
  return name.repository if name and name.commit else ''


def _head(
  base: str,
  path: str,
  names: list[str],
  tags: tuple[str, ...],
  adapter: bool,
) -> list[str]:
  """The front matter, as the Hub reads it.

  Args:
    base: The repository of the model that it comes from; '' for none.
    path: How the run names that.
    names: The data sets of the Hub.
    tags: Beside the mark of what was pushed from here.
    adapter: Whether it is an adapter.
  """
  lines = ['---']
  if base:
    lines.append(f'base_model: {base}')
    if licence := hub.licence(path):
      lines.append(f'license: {licence}')
  if names:
    lines += ['datasets:', *(f'- {one}' for one in names)]
  lines += [
    f'library_name: {"peft" if adapter else "transformers"}',
    'pipeline_tag: text-generation',
    'tags:',
    *(f'- {tag}' for tag in (*tags, hub.MARK)),
    '---',
  ]
  return lines


def _data_names(config: Config) -> list[str]:
  """The data sets of the Hub among the sources of prompts."""
  sources = build_data.sources_in(config.data.train)
  found = filter(None, [_named(source.name) for source in sources])
  return list(dict.fromkeys(found))


def _sentence(config: Config, step: int | None, adapter: bool) -> str:
  what = 'A LoRA adapter for' if adapter else 'This is'
  return (
    f'{what} {_base(config)}, after {step} rollouts of reinforcement learning.'
  )


def _base(config: Config) -> str:
  path = build_model.first_path(config.model.path)
  if (name := hub.parse(path)) and name.commit:
    return f'{name.repository} (commit {name.commit[:7]})'
  return f'a model {_OWN}' if path else 'a model with random weights'


def _facts(config: Config, step: int | None) -> Iterator[str]:
  """A table of what the run did."""
  sampler, optim = config.sampler, config.optim
  yield '| | |'
  yield '| --- | --- |'
  rows = {
    'base model': _base(config),
    'prompts': ', '.join(_sources(config)),
    'rewards': ', '.join(
      one.name if ':' not in one.name else f'a function {_OWN}'
      for one in config.rewards
    ),
    'method': _method_name(config),
    **_formula(config),
    'rollouts': str(step),
    'a rollout': f'{sampler.prompts} prompts, {sampler.group} completions each',
    'sampling': f'temperature {sampler.temperature:g}, '
    f'at most {sampler.max_tokens} tokens',
    'learning rate': f'{optim.lr:g}',
  }
  for name, text in rows.items():
    yield f'| {name} | {_cell(text)} |'


def _formula(config: Config) -> dict[str, str]:
  """The parts of a run's objective; none if its method cannot be audited."""
  try:
    made = build_method.method_of(config)
    rows = diagnostics.describe('', diagnostics.audit(made))
  except Exception:  # a method of the user's own may raise anything
    return {}
  found = {label: text for section, label, text in rows if not section}
  parts = ('weight', 'ratio', 'advantage', 'regulariser')
  return {name: found[name] for name in parts}


def _sources(config: Config) -> Iterator[str]:
  for source in build_data.sources_in(config.data.train):
    if name := _named(source.name):
      yield name
    elif source.name in build_data.BUILT_IN or source.name.startswith(
      ('reasoning_gym:', 'tfds:')
    ):
      yield source.name
    else:
      yield f'data {_OWN}'


def _method_name(config: Config) -> str:
  name = config.learner.method
  return f'a method {_OWN}' if ':' in name else name


def _figures(metrics: Metrics, step: int | None) -> Iterator[str]:
  """What held-out problems and rewards were, with their intervals."""
  steps, values = metrics.points(_ACCURACY)
  known = [
    (int(at), float(value))
    for at, value in zip(steps, values, strict=True)
    if step is None or at <= step
  ]
  judged = dict(zip(*metrics.points(_JUDGED), strict=True))
  if not known:
    return
  graded = metrics.values.get('heldout_graded')
  is_share = graded is None or not (graded > 0).any()
  yield '| rollouts | held-out problems | mean of the first reward | 95 % |'
  yield '| --- | --- | --- | --- |'
  for at, value in dict.fromkeys((known[0], known[-1])):
    interval, number = '', int(judged.get(at, 0))
    if is_share and number:
      low, high = share_interval(value, number)
      interval = f'{low:.3f} to {high:.3f}'
    yield f'| {at} | {number or ""} | {value:.3f} | {interval} |'
  if not is_share:
    return
  yield ''
  yield 'The interval is that of problems which are right or wrong (Wilson).'


def share_interval(share: float, number: int) -> tuple[float, float]:
  """The 95 % interval of a share, by Wilson's score.

  Args:
    share: Of right answers, from 0 to 1.
    number: Of answers.

  >>> [round(end, 3) for end in share_interval(0.5, 100)]
  [0.404, 0.596]
  >>> share_interval(0.0, 10)[0]
  0.0
  """
  z2 = _QUANTILE**2
  middle = (share + z2 / (2 * number)) / (1 + z2 / number)
  spread = share * (1 - share) / number + z2 / (4 * number**2)
  half = _QUANTILE * math.sqrt(max(spread, 0.0)) / (1 + z2 / number)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def _draw(metrics: Metrics, step: int | None, path: pathlib.Path) -> bool:
  """Draws rewards and held-out problems; whether there was anything."""
  from matplotlib import figure

  names = {'reward': 'reward of rollouts', _ACCURACY: 'held-out problems'}
  curves: dict[str, Any] = {}
  for name, label in names.items():
    at, values = metrics.points(name)
    kept = at <= step if step is not None else at == at
    if kept.sum() > 1:
      curves[label] = at[kept], values[kept]
  if not curves:
    return False
  made = figure.Figure(figsize=(6, 3.5), layout='constrained')
  axes = made.subplots()
  for label, (at, values) in curves.items():
    axes.plot(at, values, label=label)
  axes.set_xlabel('rollouts')
  axes.legend(frameon=False)
  made.savefig(path, dpi=120)
  return True


def _cell(text: str) -> str:
  """A text in one cell of a table."""
  return plain_text.printable(' '.join(text.split())).replace('|', '\\|')
