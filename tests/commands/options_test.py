"""The table of options against config.py, and peers' names against ours."""

import ast
import dataclasses
import inspect

from ml_collections import ConfigDict
import pytest

from grpo_jax import config
from grpo_jax import losses
from grpo_jax.commands import options
from grpo_jax.commands import peers
from grpo_jax.config.fields import field
from tests import readmes


@dataclasses.dataclass(frozen=True)
class Inner:
  """What is
  inside."""

  size: int = field(3, 'of it, in # tokens')
  names: tuple[str, ...] = field(('a|b',), 'some names')


@dataclasses.dataclass(frozen=True)
class Deep:
  """At the bottom."""

  inner: Inner = Inner()
  bare: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Outer:
  """All."""

  label: str = field('x # y', 'What it is called. It is shown.')
  items: tuple[Inner, ...] = (Inner(), Inner(size=4))
  deep: Deep = Deep()
  more: dict[str, float] = field({}, 'by name')
  either: str | tuple[Inner, ...] = field('', 'one or several')
  needed: int = dataclasses.field(kw_only=True)  # without a default


def test_meanings_defaults_and_types_are_those_of_the_fields():
  got = {option.name: option[1:] for option in options.describe(Outer)}
  items = "({'size': 3, 'names': ('a|b',)}, {'size': 4, 'names': ('a|b',)})"
  names = ('tuple[str, ...]', "('a|b',)", 'some names')
  assert got == {
    'label': ('str', "'x # y'", 'What it is called. It is shown.'),
    'more': ('dict[str, float]', '{}', 'by name'),
    'either': ('str | tuple[Inner, ...]', "''", 'one or several'),
    'needed': ('int', '', ''),
    'items': ('tuple[Inner, ...]', items, 'What is inside.'),
    'items[].size': ('int', '3', 'of it, in # tokens'),
    'items[].names': names,
    'deep.bare': ('float', '1e-06', ''),
    'deep.inner.size': ('int', '3', 'of it, in # tokens'),
    'deep.inner.names': names,
  }
  headings = [section[:2] for section in options.sections(Outer)]
  assert headings == [
    ('', 'All.'),
    ('items', 'What is inside.'),
    ('deep', 'At the bottom.'),
    ('deep.inner', 'What is inside.'),
  ]


GROUP = (
  'Completions per prompt. More make the advantages less noisy, and a hard '
  'prompt more likely to have one that is right.'
)


def leaves(values, path=''):
  """Names of a nested dict as `describe` has them."""
  for key, value in values.items():
    name = f'{path}.{key}' if path else key
    if isinstance(value, dict) and value:
      yield from leaves(value, name)
    else:
      yield name
      if isinstance(value, tuple) and value and isinstance(value[0], dict):
        yield from leaves(value[0], f'{name}[]')


def test_every_option_of_the_config_is_there_once_with_a_meaning():
  names = [option.name for option in options.describe()]
  assert sorted(names) == sorted(leaves(config.default().to_dict()))
  bare = {option.name for option in options.describe() if not option.meaning}
  assert not bare
  group = next(o for o in options.describe() if o.name == 'sampler.group')
  assert group == ('sampler.group', 'int', '16', GROUP)


def test_defaults_can_be_typed_back():
  values = {}
  for option in options.describe():
    if '[]' not in option.name:
      place = values
      *path, last = option.name.split('.')
      for step in path:
        place = place.setdefault(step, {})
      place[last] = ast.literal_eval(option.default)
  assert config.resolve(ConfigDict(values)) == config.Config()


def test_markdown_has_a_row_for_each_option():
  text = readmes.config_options()
  assert text.startswith('### `config`\n\nA run.\n\n| option | type |')
  row = f'| `sampler.group` | `int` | `16` | {GROUP} |'
  assert row in text.splitlines()
  rows = [line for line in text.splitlines() if line.startswith('| `')]
  assert len(rows) == len(options.describe())
  text = readmes.config_options(Outer)
  assert r"| `items[].names` | `tuple[str, ...]` | `('a\|b',)` | some" in text


@pytest.mark.parametrize('width', [60, 80, 120])
def test_help_fits_the_terminal(width):
  lines = options.fields(width).splitlines()
  assert max(map(len, lines)) <= width
  text = ' '.join(' '.join(lines).split())
  for option in options.describe():
    name = option.name.replace('[]', '[0]')
    words = f'--config.{name}={option.default} {option.meaning}'
    assert words.strip() in text
  starts = {
    line.index('Completions per prompt')
    for line in lines
    if 'Completions per prompt' in line
  } | {line.index('Rollouts') for line in lines if '.steps=60' in line}
  assert len(starts) == 1  # aligned
  assert 'sampler: How the completions of a rollout are sampled.' in lines


def arguments():
  """Every argument of every method."""
  return {
    name
    for method in losses.methods.__all__
    for name in inspect.signature(getattr(losses.methods, method)).parameters
  }


def test_peers_names_lead_to_fields_that_exist():
  known = {option.name for option in options.describe()}
  known |= {f'learner.method_kwargs.{name}' for name in arguments()}
  assert len(peers.PEERS) >= 30
  assert {peer.ours for peer in peers.PEERS} <= known
  assert all(peer.trl or peer.verl for peer in peers.PEERS)
  trl = [peer.trl for peer in peers.PEERS if peer.trl]
  assert len(set(trl)) == len(trl)  # one answer for each
  assert all(name.isidentifier() for name in trl)
  roots = ('actor_rollout_ref', 'data', 'algorithm', 'trainer', 'reward')
  assert all(p.verl.split('.')[0] in roots for p in peers.PEERS if p.verl)
  assert (
    peers.Peer(
      'learner.method_kwargs.low',
      'epsilon',
      'actor_rollout_ref.actor.clip_ratio_low',
    )
    in peers.PEERS
  )
  for peer in peers.PEERS:
    assert f'| `{peer.ours}` |' in readmes.other_names()


@pytest.mark.parametrize(
  'name, ours',
  [
    ('num_generations', 'sampler.group'),
    ('sampler.num_generations', 'sampler.group'),
    ('actor_rollout_ref.rollout.n', 'sampler.group'),
    ('rollout.n', 'sampler.group'),
    ('n', 'sampler.group'),
    ('lr', 'optim.lr'),
    ('sampler.lr', 'optim.lr'),
    ('--config.learning_rate', 'optim.lr'),
    ('beta', 'learner.method_kwargs.kl_coefficient'),
    ('clip_ratio', 'learner.method_kwargs.low'),
    ('data.train_batch_size', 'sampler.prompts'),
    ('optim.temperature', 'sampler.temperature'),
    ('samper.group', 'sampler.group'),
    ('sampler.temprature', 'sampler.temperature'),
    ('max_new_tokens', 'sampler.max_tokens'),
    ('model.epsilon', 'optim.epsilon'),
    ('eval.examples', 'evaluation.examples'),
    ('warmup.examples', 'warm_up.examples'),
    ('rewards[0].wight', 'rewards[].weight'),
    ('optim.lr', 'optim.lr'),
    ('entropy_coeff', None),
    ('', None),
  ],
)
def test_suggestions(name, ours):
  assert options.suggest(name) == ours


def test_every_name_of_a_peer_is_answered():
  for peer in peers.PEERS:
    if peer.trl:
      assert options.suggest(peer.trl) == (
        peer.trl if peer.ours == peer.trl else peer.ours
      )
    if peer.verl:
      answers = {p.ours for p in peers.PEERS if p.verl == peer.verl}
      assert options.suggest(peer.verl) in answers | {peer.verl}
