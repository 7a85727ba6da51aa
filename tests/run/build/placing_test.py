"""Objects given in Python: what is refused, marked and recorded."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import re
import subprocess
import sys
from unittest import mock

import jax.numpy as jnp
import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import losses
from grpo_jax import rewards
from grpo_jax.environments import base
from grpo_jax.run.build import build
from grpo_jax.run.build import placing
from grpo_jax.run.keep import workdir
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects
from tests import cli

CONFIG = config_lib.Config()
CHATS = config_lib.Config(data=config_lib.Data(chat=True))
SUMS = [{'prompt': f'0{i}+01=', 'answer': str(i + 1)} for i in range(9)]


def brevity(prompt, completion, example):
  return -float(len(completion))


def make_closure(target):
  return lambda p, c, e: float(len(c) == target)


def typed(text):
  """A function whose source Python has nowhere, as one that `exec` makes."""
  names = {}
  exec(text, names)
  return names['reward']


class Judge:
  def __call__(self, prompt, completion, example):
    return 1.0


def test_nothing_given_changes_nothing():
  assert placing.place(CONFIG) == (CONFIG, NOTHING)


def test_names_go_into_the_config_as_they_are():
  config, objects = placing.place(
    CONFIG,
    rewards=['exact_match', ('tests.judges:even', 2)],
    prompts='train.jsonl',
    heldout='heldout.jsonl',
    demonstrations='shown.jsonl',
    method='dapo',
    tokenizer='tokenizer.json',
  )
  assert config.rewards == (
    config_lib.Reward('exact_match', 1.0),
    config_lib.Reward('tests.judges:even', 2.0),
  )
  assert config.data.train == 'train.jsonl'
  assert config.data.heldout == 'heldout.jsonl'
  assert config.data.tokenizer == 'tokenizer.json'
  assert config.warm_up.demonstrations == 'shown.jsonl'
  assert config.learner.method == 'dapo'
  assert objects == Objects((None, None))


def test_functions_of_this_package_go_by_their_names():
  """And another method does not get the arguments of the config's."""
  learner = config_lib.Learner('grpo', {'kl_coefficient': 0.1})
  config, objects = placing.place(
    dataclasses.replace(CONFIG, learner=learner),
    rewards=[rewards.exact_match],
    method=losses.methods.gspo,
  )
  assert config.rewards[0].name == 'exact_match'
  assert config.learner.method == 'gspo' and objects == Objects((None,))
  assert config.learner.method_kwargs == {}


def test_objects_and_names_mix_and_every_mark_has_its_object():
  named = rewards.WeightedReward('named', brevity, 0.5)
  lambdas = [lambda p, c, e: 1.0, (lambda p, c, e: 2.0, 3)]
  config, objects = placing.place(
    CONFIG,
    rewards=['exact_match', brevity, named, *lambdas, Judge()],
    prompts=SUMS,
    heldout=tuple(SUMS),
    method=functools.partial(losses.methods.dapo, high=0.4),
    tokenizer=data.character_tokenizer(data.ALPHABET),
  )
  assert [(r.name, r.weight) for r in config.rewards] == [
    ('exact_match', 1.0),
    ('<reward brevity given in Python>', 1.0),
    ('<reward named given in Python>', 0.5),
    ('<reward lambda given in Python>', 1.0),
    ('<reward lambda_2 given in Python>', 3.0),
    ('<reward Judge given in Python>', 1.0),
  ]
  assert config.data.train == '<list of 9 prompts given in Python>'
  assert config.data.heldout == '<tuple of 9 held-out prompts given in Python>'
  assert config.learner.method == '<method dapo given in Python>'
  assert config.learner.method_kwargs == {}
  json.dumps(dataclasses.asdict(config))
  run = build.run(config, objects)
  judged = [r.function('', 'abc', {'answer': 'abc'}) for r in run.rewards]
  assert judged == [1.0, -3.0, -3.0, 1.0, 2.0, 1.0]
  assert [r.name for r in run.rewards][1:4] == ['brevity', 'named', 'lambda']
  assert run.epoch == 9 and run.heldout[0] == SUMS[0]
  assert run.tokenizer.vocab_size == len(data.ALPHABET) + 2


def test_own_prompts_without_held_out_ones_leave_the_built_in_sums_out():
  config, _ = placing.place(CONFIG, prompts=SUMS)
  assert config.data.heldout == ''
  config, _ = placing.place(CONFIG, prompts=SUMS, heldout='arithmetic')
  assert config.data.heldout == 'arithmetic'
  config, _ = placing.place(CONFIG, heldout=[])
  assert config.data.heldout == '' and config.data.train == 'arithmetic'


def test_a_method_in_the_wrong_order_is_refused_like_a_named_one():
  method = losses.chain(losses.methods.dr_grpo(), losses.pool_log_ratio())
  config, objects = placing.place(CONFIG, method=method)
  with pytest.raises(ValueError, match='place pool_log_ratio before it'):
    build.run(config, objects)


@pytest.mark.parametrize(
  'arguments, words',
  [
    (dict(rewards=3), 'rewards=3 is no list'),
    (dict(rewards=brevity), 'no list of rewards; .*rewards=.my_reward'),
    (dict(rewards=[]), r'rewards=\[\] is no list'),
    (dict(rewards=[3]), r'rewards\[0\] is 3; give a function'),
    (dict(rewards=(brevity, 0.5)), r'rewards\[1\] is 0.5; give a function'),
    (dict(rewards=[(brevity, 'much')]), r'rewards\[0\]'),
    (dict(rewards=[(brevity, float('nan'))]), r'rewards\[0\]'),
    (dict(rewards=[(brevity, 10**400)]), r'rewards\[0\]'),
    (
      dict(rewards=[lambda completion: 1.0]),
      r'rewards\[0\] is lambda\(completion\), but .*completion, example',
    ),
    (
      dict(rewards=[brevity, rewards.WeightedReward('brevity', Judge())]),
      "second reward with the name 'brevity'",
    ),
    (dict(prompts=3), 'prompts=3 is of type int; give a list of dicts'),
    (dict(prompts=iter(SUMS)), 'prompts=.* is of type list_iterator'),
    (dict(prompts=SUMS[0]), 'is of type dict; give a list'),
    (dict(prompts=[]), 'prompts is empty'),
    (dict(prompts=['1+1=']), r"prompts\[0\] is '1\+1=', but a dict"),
    (
      dict(prompts=[SUMS[0], {'question': '1'}]),
      r"prompts\[1\] has the fields \['question'\], but the field 'prompt'",
    ),
    (
      dict(prompts=[{'prompt': 3}]),
      r"prompts\[0\]\['prompt'\] must be .*, but it is 3",
    ),
    (
      dict(prompts=data.prompt_stream(SUMS, 0)),
      'prompts has no end; give finite data',
    ),
    (dict(heldout=4.0), 'heldout=4.0 is of type float'),
    (dict(demonstrations=[{'prompt': 'a'}]), "the field 'answer' is needed"),
    (dict(method=3), 'method=3 is of type int; give a LossTransform'),
    (dict(tokenizer=3), 'tokenizer=3 is of type int; give a grpo_jax.data.Tok'),
  ],
  ids=lambda value: re.sub(r' at 0x[0-9a-f]+', '', str(value)),
)
def test_wrong_kinds_are_refused_in_a_sentence(arguments, words):
  with pytest.raises(ValueError, match=words):
    placing.place(CONFIG, **arguments)


@pytest.mark.parametrize('made', [lambda: 3, lambda high: None])
def test_a_function_that_makes_no_method_is_refused(made):
  config, objects = placing.place(CONFIG, method=made)
  with pytest.raises(ValueError, match='is no LossTransform|do not fit'):
    build.run(config, objects)


@pytest.mark.parametrize('callback', [3, lambda step: None])
def test_a_callback_that_cannot_be_called_is_refused(callback):
  with pytest.raises(ValueError, match='on_rollout.*step, metrics, rollout'):
    placing.check_callback(callback)


def digest(function):
  return placing.record(function)['sha256']


def test_a_function_is_recorded_with_its_name_and_source():
  record = placing.record(brevity)
  assert record['name'] == f'{__name__}.brevity'
  assert record['source'].startswith('def brevity(prompt, completion, example)')
  partial = functools.partial(brevity, example={})
  assert placing.record(partial)['name'] == record['name']
  assert 'class Judge' in placing.record(Judge())['source']


def test_of_a_lambda_only_its_own_text_is_recorded():
  first, second = lambda p, c, e: 1.0, lambda p, c, e: 2.0
  assert placing.source(first) == 'lambda p, c, e: 1.0'
  assert placing.source(second) == 'lambda p, c, e: 2.0'

  assert digest(first) != digest(second)


def compiles_to(text, function):
  node = ast.parse(text, mode='eval').body
  assert isinstance(node, ast.Lambda)
  return placing._compiles_to(node, function.__code__)


def test_a_lambda_is_compared_without_its_default_arguments():
  """They may name anything of the module, and may do anything."""
  target = 3.0
  one, two = lambda p, t=target: 1.0, lambda p, *, t=target: 2.0
  assert placing.source(one) == 'lambda p, t=target: 1.0'
  assert placing.source(two) == 'lambda p, *, t=target: 2.0'
  assert compiles_to('lambda p, t=target: 1.0', one)
  assert compiles_to('lambda p, *, t=target: 2.0', two)
  assert not compiles_to('lambda p, t=target: 1.0', two)
  assert compiles_to('lambda p, t=1 / 0, *, u=lambda: 1.0: 1.0', one)


def test_a_hash_covers_what_a_function_closes_over_and_its_defaults():
  assert digest(make_closure(3)) == digest(make_closure(3))
  assert digest(make_closure(3)) != digest(make_closure(4))

  def with_default(default):
    def reward(p, c, e, scale=default):
      return scale

    return reward

  assert digest(with_default(1.0)) != digest(with_default(2.0))
  times = functools.partial(brevity, scale=1)
  assert digest(times) != digest(functools.partial(brevity, scale=2))


def test_a_hash_does_not_change_by_calling_the_function():
  """It may count its calls, or keep answers, in what it closes over."""
  calls, kept = [], {}

  def counting(p, c, e):
    calls.append(c)
    kept[c] = 1.0
    return kept[c]

  before = digest(counting)
  counting('', 'a', {})
  assert digest(counting) == before


def test_a_hash_does_not_change_when_a_module_moves():
  def made(module):
    names = {'__name__': module}
    text = (
      'class Judge:\n  def __call__(self, p, c, e):\n    return 1.0\n'
      'judge = Judge()\n'
      'def reward(p, c, e, of=Judge): return judge(p, c, e)\n'
    )
    exec(text, names)
    return names['reward'], functools.partial(names['judge'], p='')

  for one, other in zip(made('here'), made('there.now'), strict=True):
    record = placing.record(other)
    assert record['name'].startswith('there.now.')
    assert record['sha256'] == digest(one)


def test_without_source_the_bytecode_is_hashed():
  text = 'def reward(p, c, e):\n  return float(c in {"a", "b", "c"})\n'
  record = placing.record(typed(text))
  assert record['source'] is None
  assert record['sha256'] == digest(typed(text))
  assert record['sha256'] != digest(typed(text.replace('"c"', '"d"')))
  assert record['sha256'] != digest(typed(text.replace('c in', 'p in')))


def test_a_hash_of_a_method_covers_its_numbers_and_its_chain():
  def of(method):
    return placing.record(method)['sha256']

  dapo = losses.methods.dapo
  assert of(dapo()) == of(dapo())
  assert of(dapo(high=0.3)) != of(dapo())
  assert of(losses.methods.gspo()) != of(dapo())
  schedule = lambda rollout: 0.2 + 0.001 * rollout
  assert of(dapo(high=schedule)) != of(dapo(high=lambda rollout: 0.2))

  def shifted(value):
    array = jnp.full((3,), value)
    return losses.on_reward(lambda reward, batch: reward + array.sum())

  assert of(shifted(1.0)) == of(shifted(1.0)) != of(shifted(2.0))


HASHES = """
from grpo_jax import losses
from grpo_jax.run.build import placing
names = {}
text = 'def reward(p, c, e, known=frozenset("abcdef")): return c in {"a", "b"}'
exec(text, names)
print(placing.record(names['reward'])['sha256'])
print(placing.record(losses.methods.dapo())['sha256'])
print(placing.record_of_data([{'tags': set('uvwxyz')}])['sha256'])
"""


def test_hashes_are_the_same_in_every_process(tmp_path):
  """Python orders sets of texts differently in each, as in this one."""
  # A file: Python 3.13 takes the text of `-c` for that of what is in `exec`.
  script = tmp_path / 'hashes.py'
  script.write_text(HASHES)
  done = subprocess.run(
    [sys.executable, str(script)],
    env={**cli.environment(), 'PYTHONHASHSEED': '1'},
    capture_output=True,
    check=True,
    text=True,
  )
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(HASHES, {})
  assert len(done.stdout.split()) == 3 and done.stdout == printed.getvalue()


def test_a_hash_of_data_covers_its_ends():
  many = [{'prompt': str(i)} for i in range(1500)]
  record = placing.record_of_data(many)
  assert record['length'] == 1500 and record['items_hashed'] == 1000
  changed = [*many]
  changed[0] = {'prompt': 'x'}
  assert placing.record_of_data(changed)['sha256'] != record['sha256']
  changed = [*many[:-1], {'prompt': '1499', 'answer': '1'}]
  assert placing.record_of_data(changed)['sha256'] != record['sha256']


def test_a_hash_of_a_tokenizer_covers_its_characters():
  make = data.character_tokenizer
  first, other = (placing.record(make(text)) for text in ('ab', 'ba'))
  assert first['vocab_size'] == other['vocab_size'] == 4
  assert first['sha256'] != other['sha256']
  assert first == placing.record(make('ab'))


def test_a_hash_of_a_tokenizer_covers_its_chats():
  plain = data.character_tokenizer('ab')
  template = data.ChatTemplate(
    '{{ bos_token }}{{ messages[0].content }}', {'bos_token': '<pad>'}
  )
  chat = dataclasses.replace(plain, chat_template=template)
  other = data.ChatTemplate(
    '{{ bos_token }}{{ messages[0].content }}', {'bos_token': '<eos>'}
  )
  tokenizers = [
    plain,
    dataclasses.replace(plain, bos_ids=(0,)),
    chat,
    dataclasses.replace(plain, chat_template=other),
    chat.with_format(data.PromptFormat(chat=True)),
    chat.with_format(data.PromptFormat(chat=True, completion_prefix=':')),
  ]
  hashes = {placing.record(one)['sha256'] for one in tokenizers}
  assert len(hashes) == len(tokenizers)


def started(directory, **objects):
  """A workdir as a start with these objects leaves it."""
  config, found = placing.place(CONFIG, **objects)
  workdir.refuse_another(directory, config, objects=found)
  workdir.record(directory, config, anew=True, objects=found)


def test_a_start_without_what_the_run_was_given_is_told_what_to_give(tmp_path):
  started(tmp_path, rewards=['exact_match', brevity], prompts=SUMS)
  with pytest.raises(
    ValueError,
    match=r'was given rewards \(brevity\) and prompts \(list of 9 prompts\) .*'
    r'with grpo_jax.train\(config, workdir, rewards=\[...\], prompts=...\)',
  ):
    started(tmp_path, heldout='')
  with pytest.raises(ValueError, match=r'was given prompts \(list of 9'):
    started(tmp_path, rewards=['exact_match', brevity])
  started(tmp_path, rewards=['exact_match', brevity], prompts=SUMS)


def test_a_start_with_something_else_is_refused_by_name(tmp_path):
  started(tmp_path, rewards=[make_closure(3)], prompts=SUMS)
  with pytest.raises(ValueError, match='The reward lambda is not the one'):
    started(tmp_path, rewards=[make_closure(4)], prompts=SUMS)
  with pytest.raises(ValueError, match='list of 9 prompts is not the one'):
    started(tmp_path, rewards=[make_closure(3)], prompts=SUMS[::-1])
  with pytest.raises(ValueError, match='rewards.*name=.*lambda.*is.*brevity'):
    started(tmp_path, rewards=[brevity], prompts=SUMS)
  with pytest.raises(ValueError, match='list of 9.*now it is .*list of 8'):
    started(tmp_path, rewards=[make_closure(3)], prompts=SUMS[1:])
  (tmp_path / 'given.json').unlink()  # as the message says
  started(tmp_path, rewards=[make_closure(4)], prompts=SUMS)


async def episode(policy, example):
  return float((await policy.say(example['prompt'])).text == 'yes')


class Steps:
  def reset(self, example, seed):
    return 'Go.'

  def step(self, action):
    return base.Step('', 1.0, done=True)


def look(where: str) -> str:
  """Looks.

  Args:
    where: Up or down.
  """
  return where


@pytest.mark.parametrize('environment', [episode, Steps])
def test_an_environment_brings_its_reward_and_a_record(environment):
  config, objects = placing.place(CHATS, environment=environment)
  assert [one.name for one in config.rewards] == ['environment']
  assert objects.environment is environment
  (record,) = objects.records.values()
  assert record['name'].endswith(environment.__name__) and record['source']
  config, _ = placing.place(
    CHATS, environment=environment, rewards=['exact_match']
  )
  assert [one.name for one in config.rewards] == ['exact_match']
  own = dataclasses.replace(
    CHATS, rewards=(config_lib.Reward('exact_match', 2.0),)
  )
  assert placing.place(own, environment=environment)[0].rewards == own.rewards


def test_tools_alone_have_no_reward_and_names_change_none():
  for environment in ([look], 'calculator'):
    config, _ = placing.place(CHATS, environment=environment)
    assert config.rewards == CHATS.rewards
  _, objects = placing.place(CHATS, environment=[look])
  assert [*objects.records] == ['<environment look given in Python>']


def test_a_class_is_another_one_if_its_source_is():
  records = []
  for reward in ('1.0', '2.0'):
    source = inspect.getsource(Steps).replace('1.0', reward)
    with mock.patch.object(placing, 'source', lambda one, text=source: text):
      records.append(placing.record_of_environment(Steps))
  assert records[0]['sha256'] != records[1]['sha256']
  assert placing.record_of_environment(Steps) == (
    placing.record_of_environment(Steps)
  )


def solve(example, base_url, api_key):
  """An agent."""


def test_an_agent_is_an_environment_that_brings_no_reward():
  config, objects = placing.place(CHATS, agent=solve)
  assert config.environment.name == 'agent'
  assert config.agent.function == '<agent solve given in Python>'
  assert config.rewards == CHATS.rewards
  assert objects.agent is solve and objects.environment is None
  (record,) = objects.records.values()
  assert record['name'].endswith('solve') and 'An agent' in record['source']
  config, objects = placing.place(CHATS, agent='my_lab.agents:solve')
  assert config.environment.name == 'agent' and objects.agent is None
  assert config.agent.function == 'my_lab.agents:solve'


def test_an_agent_that_cannot_be_one_is_refused():
  with pytest.raises(ValueError, match='agent=3 is of type int; give a func'):
    placing.place(CHATS, agent=3)
  with pytest.raises(ValueError, match='environment and agent were both given'):
    placing.place(CHATS, agent=solve, environment=episode)
  commanded = dataclasses.replace(
    CHATS,
    environment=config_lib.Environment(name='agent'),
    agent=config_lib.Agent(command='sh'),
  )
  with pytest.raises(ValueError, match='give one of agent.command and agent.f'):
    placing.place(commanded, agent=solve)
