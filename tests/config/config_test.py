"""The configuration: defaults, conversions, and what it refuses."""

import dataclasses
import importlib.util
import pathlib
import sys

from absl import flags
from ml_collections import ConfigDict
from ml_collections import config_flags
import pytest

from grpo_jax import config
from grpo_jax import losses
from grpo_jax.commands import options
from grpo_jax.config import checks
from grpo_jax.engines import protocol
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.keep.objects import NOTHING

ROOT = pathlib.Path(__file__).parents[2]


def test_an_empty_config_is_the_default():
  assert config.resolve(ConfigDict()) == config.Config()


def test_values_arrive():
  got = config.resolve(
    ConfigDict(
      dict(
        seed=3,
        optim=dict(lr=1),
        data=dict(prompt_buckets=(4, 8)),
        rewards=({'name': 'exact_match', 'weight': 2.0},),
        learner=dict(method='dapo', method_kwargs=dict(high=0.3)),
      )
    )
  )
  assert got.seed == 3 and got.optim.lr == 1.0
  assert type(got.optim.lr) is float
  assert got.data.prompt_buckets == (4, 8)
  assert got.rewards == (config.Reward('exact_match', 2.0),)
  assert got.learner.method_kwargs == {'high': 0.3}


def test_prompts_come_from_one_source_or_from_several():
  values = config.default()
  assert config.resolve(values).data.train == 'arithmetic'
  values.data.train = 'a.jsonl'
  assert config.resolve(values).data.train == 'a.jsonl'
  values.data.train = ({'name': 'a.jsonl', 'weight': 3}, {'name': 'arithmetic'})
  assert config.resolve(values).data.train == (
    config.Source('a.jsonl', 3.0),
    config.Source('arithmetic', 1.0),
  )


@pytest.mark.parametrize(
  'text, policy',
  [
    ('True', 'layer'),
    ('true', 'layer'),
    ('False', 'none'),
    ('attention', 'attention'),
    ('none', 'none'),
  ],
)
def test_remat_has_names_and_may_be_the_bool_that_it_was(
  text, policy, monkeypatch
):
  """As it is typed; files and saved configs hold the same values."""
  argv = ['grpo-jax', f'--config.model.remat={text}']
  monkeypatch.setattr(sys, 'argv', argv)  # where ml_collections looks
  read = flags.FlagValues()
  found = config_flags.DEFINE_config_dict(
    'config', config.default(), flag_values=read
  )
  read(argv)
  assert config.resolve(found.value).model.remat == policy


@pytest.mark.parametrize(
  'fields, words',
  [
    (dict(sed=1), 'the nearest is config.seed'),
    (dict(optim=dict(learning_rate=1.0)), 'config.optim.learning_rate'),
    (dict(sampler=dict(temprature=1.0)), 'config.sampler.temperature'),
    (dict(seed='1'), "config.seed is '1'; it must be of type int"),
    (dict(seed=1.5), 'config.seed is 1.5'),
    (dict(seed=True), 'config.seed is True'),
    (dict(optim=3), 'config.optim is 3'),
    (dict(data=dict(prompt_buckets=('a',))), r'prompt_buckets\[0\]'),
    (dict(steps=-1), 'steps=-1'),
    (dict(model=dict(remat='all')), "remat='all'; give one of none, layer"),
    (dict(model=dict(remat=1)), 'config.model.remat is 1'),
    (dict(model=dict(unroll='layer')), "config.model.unroll is 'layer'"),
    (dict(learner=dict(batches=5)), 'learner.batches=5'),
    (dict(learner=dict(epochs=0)), 'learner.epochs=0'),
    (dict(learner=dict(anchor='ref')), "learner.anchor='ref'"),
    (dict(rewards=()), 'no rewards'),
    (dict(sampler=dict(temperature=0.0)), 'nothing to learn from'),
    (dict(sampler=dict(temperature=1e-30)), 'temperature=1e-30, by which'),
    (dict(sampler=dict(min_tokens=5)), 'min_tokens=5 with sampler.max_tokens'),
    (dict(sampler=dict(top_p=1.5)), 'sampler.top_p=1.5; give at most 1'),
    (dict(sampler=dict(group=10**9)), 'group=1000000000 and .* give less'),
    (dict(optim=dict(epsilon=0.0)), 'optim.epsilon=0.0; give more than 0'),
    (dict(model=dict(rope_base=0.0)), 'model.rope_base=0.0; give more than'),
    (
      dict(data=dict(completion_buckets=(5, -3))),
      r'data.completion_buckets=\(5, -3\); give widths of 1 token or more',
    ),
    (dict(data=dict(prompt_buckets=(8, 0))), r'data.prompt_buckets=\(8, 0\)'),
    (
      dict(rewards=({'name': 'exact_match'}, {'name': 'exact_match'})),
      r"rewards\[1\].name='exact_match', which is rewards\[0\] already",
    ),
    (
      dict(rewards=({'label': 'x'}, {'name': 'gsm8k', 'label': 'x'})),
      r"rewards\[1\].label='x', which is .* or different labels",
    ),
    (
      dict(rewards=({}, {'name': 'gsm8k', 'label': 'exact_match_failed'})),
      "label='exact_match_failed', which is what a metric of another",
    ),
    (
      dict(rewards=({'where': 'there'},)),
      r"rewards\[0\].where='there'; give one of auto, here, workers",
    ),
    (
      dict(rewards=({'on_failure': '?'},)),
      r"rewards\[0\].on_failure='\?'; give one of invalid, reward",
    ),
    (
      dict(rewards=({'failed_reward': 1.0},)),
      r"rewards\[0\].failed_reward=1.0 with on_failure='invalid'",
    ),
    (
      dict(rewards=({'kwargs': {'a': float('nan')}},)),
      r'rewards\[0\].kwargs.a=nan; give a finite number',
    ),
    (dict(workers=dict(number=-1)), 'workers.number=-1; give 0 or more'),
    (
      dict(workers=dict(time_limit_secs=0.0)),
      'workers.time_limit_secs=0.0; give more than 0',
    ),
    (
      dict(rewards=({'weight': float('inf')},)),
      r'rewards\[0\].weight=inf; give a finite number',
    ),
    (
      dict(learner=dict(method_kwargs={'a': [{'b': float('nan')}]})),
      r'learner.method_kwargs.a\[0\].b=nan; give a finite number',
    ),
    (dict(steps=10**12), 'steps=1000000000000; give at most 2147483647'),
    (dict(optim=dict(lr=1e300)), 'optim.lr=1e\\+300; give a finite number'),
    (
      dict(data=dict(prompt_buckets=(2**40,))),
      r'data.prompt_buckets\[0\]=1099511627776; give at most 2147483647',
    ),
    (dict(optim=dict(epsilon=1e-60)), 'epsilon=1e-60; give more than 0, at'),
    (dict(log=dict(kl_alarm=-1.0)), 'log.kl_alarm=-1.0; give 0 or more'),
    (dict(sampler=dict(group=0)), 'sampler.group=0; give 1 or more'),
    (
      dict(sampler=dict(max_tokens=9), data=dict(completion_buckets=(5,))),
      'sampler.max_tokens=9 above the largest',
    ),
    (dict(learner=dict(layout='diagonal')), "learner.layout='diagonal'"),
    (dict(learner=dict(on_zero_advantage='?')), 'on_zero_advantage='),
    (dict(learner=dict(row_completions=3)), 'give a divisor'),
    (
      dict(learner=dict(row_completions=4, layout='packed')),
      "it belongs to layout='shared'",
    ),
    (
      dict(learner=dict(pack_tokens=64, layout='shared')),
      "it belongs to layout='packed'",
    ),
    (dict(optim=dict(decay='sudden')), "optim.decay='sudden'"),
    (dict(optim=dict(decay='linear', warmup_steps=99)), 'leave none'),
    (dict(optim=dict(clip_norm=-1.0)), 'optim.clip_norm=-1.0'),
    (
      dict(optim=dict(b1=1.0, b2=1.0)),
      'optim.b1=1.0; give at least 0 and less',
    ),
    (dict(optim=dict(b2=1.0)), 'optim.b2=1.0; give at least 0 and less'),
    (dict(evaluation=dict(examples=0)), 'evaluation.examples=0'),
    (dict(model=dict(window_tokens=())), r'window_tokens=\(\); give a tuple'),
    (dict(model=dict(window_tokens=(-1,))), r'window_tokens=\(-1,\); give a'),
    (
      dict(model=dict(window_tokens=(4, 0), num_layers=1)),
      r'window_tokens=\(4, 0\) with model.num_layers=1; give at most as many',
    ),
    (dict(model=dict(window_tokens=(0.5,))), r'window_tokens\[0\] is 0.5'),
    (dict(model=dict(window_tokens=4)), 'window_tokens is 4; it must be of'),
    (dict(data=dict(train=3)), r'train is 3; it must be .* str \| tuple\['),
    (dict(data=dict(train=())), 'no source in data.train'),
    (dict(data=dict(train=('a',))), r"train\[0\] is 'a'"),
    (
      dict(data=dict(train=({'name': 'a', 'wieght': 2.0},))),
      r'the nearest is config.data.train\[0\].weight',
    ),
    (
      dict(data=dict(train=({'name': 'a'}, {'name': 'b', 'weight': 0.0}))),
      r'data.train\[1\].weight=0.0; give a number above 0',
    ),
    (
      dict(data=dict(train=({'name': 'a', 'weight': float('inf')},))),
      r'data.train\[0\].weight=inf',
    ),
    (dict(data=dict(tokenizer='')), "data.tokenizer='', .* but no model.path"),
    (
      dict(data=dict(system_prompt='Be brief.')),
      "data.system_prompt='Be brief.' with data.chat=False",
    ),
    (
      dict(data=dict(chat_kwargs=dict(enable_thinking=False))),
      "data.chat_kwargs={'enable_thinking': False} with data.chat=False",
    ),
    (
      dict(data=dict(chat=True, chat_kwargs=dict(f=max))),
      'data.chat_kwargs has f=.* a config cannot hold',
    ),
    (
      dict(sampler=dict(top_k=3), learner=dict(anchor='sampler')),
      "anchor='sampler' with top_k",
    ),
  ],
)
def test_bad_configs_are_refused_in_one_sentence(fields, words):
  with pytest.raises(ValueError, match=words):
    config.resolve(ConfigDict(fields))


NUMBERS = {
  option.name: option.type
  for option in options.describe()
  if option.type in ('int', 'float') and '[' not in option.name
}


def with_field(name, value):
  values = config.default()
  values.update_from_flattened_dict({name: value})
  return config.resolve(values)


@pytest.mark.parametrize('name', NUMBERS)
def test_no_number_of_the_config_is_meaningless(name):
  if NUMBERS[name] == 'float':
    for value in (float('nan'), float('inf'), -float('inf')):
      with pytest.raises(ValueError, match=f'{name}={value}; give a finite'):
        with_field(name, value)
  # `make_mesh` checks the axes, and rewards and alarms may be below 0.
  if not name.startswith(('mesh.', 'evaluation.right_reward', 'log.')):
    with pytest.raises(ValueError, match=f'{name}=-7'):
      with_field(name, -7)


def test_infinity_may_be_an_argument_of_a_method():
  kwargs = {'entropy_limit': float('inf')}
  fields = {'learner': {'method_kwargs': kwargs}}
  assert config.resolve(ConfigDict(fields)).learner.method_kwargs == kwargs
  huge = {'learner': {'method_kwargs': {'top': 10**400}}}  # no float holds it
  assert config.resolve(ConfigDict(huge)).learner.method_kwargs['top'] > 1e308


def test_methods_by_name_and_by_module():
  made = build_method.make_method('gspo', {'low': 0.1})
  assert isinstance(made, losses.LossTransform)
  own = build_method.make_method(
    'grpo_jax.losses.methods:kl_cov', {'share': 0.5}
  )
  assert own.scope == 'batch'


@pytest.mark.parametrize(
  'name, kwargs, words',
  [
    ('grpoo', {}, 'did you mean grpo'),
    ('grpo', {'hgh': 1}, "method_kwargs={'hgh': 1}"),
    ('no_such.module:f', {}, 'no_such'),
    ('grpo_jax.losses:no_such', {}, 'no_such'),
    ('grpo_jax.losses:__doc__', {}, 'is no function'),
    ('json:dumps', {'obj': 1}, 'is no LossTransform'),
    ('dapo', {'soft_tokens': 0}, 'soft_tokens=0'),
    ('dapo', {'soft_tokens': 'x'}, "soft_tokens='x'; give a number"),
    ('tests.bad_methods:raises', {}, "raises' raised KeyError: 'no table'"),
  ],
)
def test_bad_methods_are_refused(name, kwargs, words):
  with pytest.raises(ValueError, match=words):
    build_method.make_method(name, kwargs)


def test_what_no_config_can_hold_is_refused():
  fields = {'learner': {'method_kwargs': {'low': lambda rollout: 0.1}}}
  with pytest.raises(ValueError, match="'module:function'"):
    config.resolve(ConfigDict(fields))


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem
)
def test_every_config_file_resolves_and_opens_with_its_command(
  path, monkeypatch
):
  monkeypatch.syspath_prepend(str(path.parent))  # as the command does
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  resolved = config.resolve(module.get_config())
  assert dataclasses.is_dataclass(resolved)
  # What it names is there and takes its arguments.
  build_method.make_method(
    resolved.learner.method, resolved.learner.method_kwargs
  )
  assert build_rewards.functions(resolved, NOTHING)
  if path.stem == 'plan':  # which trains nothing
    assert module.__doc__.startswith('grpo-jax plan --config=configs/plan.py')
    return
  measured = path.stem in (
    *('agent_openai_agents', 'arithmetic', 'calculator', 'distill'),
    *('gemma3_270m', 'guess_number', 'reasoning_gym', 'smollm2', 'tictactoe'),
  )
  assert measured != ('Not yet run' in module.__doc__)
  assert measured or 'Hardware: ' in module.__doc__
  assert module.__doc__.startswith(
    f'grpo-jax train --config=configs/{path.name} '
  )


def test_config_and_sampling_refuse_the_same_temperatures():
  """The config may not import what imports JAX."""
  assert checks._LEAST_TEMPERATURE == protocol.LEAST_TEMPERATURE


def test_infinity_may_be_an_argument_of_a_reward():
  reward = {'name': 'number', 'kwargs': {'absolute_tolerance': float('inf')}}
  got = config.resolve(ConfigDict({'rewards': (reward,)}))
  assert got.rewards[0].kwargs == reward['kwargs']
