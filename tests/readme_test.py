"""The READMEs: their code runs, their links lead somewhere."""

import asyncio
import collections
import contextlib
import importlib
import io
import json
import pathlib
import re
import runpy
import subprocess
import sys
import types
from unittest import mock
import urllib.request

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import rewards
from grpo_jax.commands import options
from grpo_jax.commands import start
from grpo_jax.commands import table as command_line
from grpo_jax.environments import formats
from grpo_jax.environments import forms
from grpo_jax.lab import audits
from grpo_jax.serving import app
from grpo_jax.serving import listening
from tests import cli
from tests import readmes
from tests.environments import scripted
from tests.serving import served

ROOT = readmes.ROOT
PAGES = {str(path.relative_to(ROOT)): path for path in readmes.paths()}


def text(page):
  return PAGES[page].read_text()


def blocks(page, language):
  return re.findall(rf'```{language}\n(.*?)```', text(page), re.DOTALL)


def run(code, **scope):
  exec(compile(code, '<README>', 'exec'), scope)  # noqa: S102
  return scope


def test_the_first_page_is_short():
  assert len(text('README.md').splitlines()) <= 250


# The code. Every block of Python is run by one of the tests below.
RUN_BELOW = {
  'README.md': 4,
  'configs/README.md': 1,
  'grpo_jax/commands/README.md': 1,
  'grpo_jax/diagnostics/README.md': 1,
  'grpo_jax/environments/README.md': 4,
  'grpo_jax/losses/README.md': 4,
  'grpo_jax/models/README.md': 1,
  'grpo_jax/optim/README.md': 3,
  'grpo_jax/data/README.md': 2,
  'grpo_jax/rewards/README.md': 3,
  'grpo_jax/serving/README.md': 2,
}


def test_every_block_of_python_is_run():
  counts = {page: len(blocks(page, 'python')) for page in PAGES}
  assert {page: count for page, count in counts.items() if count} == RUN_BELOW


@pytest.mark.long
def test_the_worked_file_trains(tmp_path, monkeypatch, capsys):
  """With a smaller model, and fewer and smaller rollouts."""
  smaller = {
    'steps': 2,
    'optim.warmup_steps': 1,
    'sampler.prompts': 4,
    'sampler.group': 4,
    'evaluation.examples': 8,
    'model.num_layers': 1,
    'model.width': 16,
  }
  changes = [f'run.{name} = {value}' for name, value in smaller.items()]
  before, after = blocks('README.md', 'python')[0].split(
    'run.steps = 200  # rollouts\n'
  )
  code = '\n'.join([before, *changes, after])
  monkeypatch.chdir(tmp_path)
  done = run(code)
  assert done['result']['steps'] == 2
  assert done['places']('', '236', {'answer': '237'}) == pytest.approx(2 / 3)
  printed = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in printed[:2]] == ['1', '2']
  assert "'prompt': '372='" in printed[-1]


@pytest.mark.long
def test_the_example_of_a_model_trains(tmp_path, monkeypatch, capsys):
  """With fewer and smaller rollouts."""
  smaller = {
    'steps': 2,
    'sampler.prompts': 4,
    'sampler.group': 4,
    'evaluation.examples': 8,
  }
  changes = [f'config.{name} = {value}' for name, value in smaller.items()]
  last = 'config.optim.warmup_steps = 0\n'
  before, after = blocks('grpo_jax/models/README.md', 'python')[0].split(last)
  monkeypatch.chdir(tmp_path)
  assert run('\n'.join([before, *changes, after]))['result']['steps'] == 2


@pytest.mark.parametrize(
  'page, number', [('README.md', 2), ('grpo_jax/losses/README.md', 0)]
)
def test_the_examples_of_a_loss_run(page, number):
  gradient = run(blocks(page, 'python')[number])['gradient']
  assert gradient.shape == (2, 4, 8) and abs(gradient).max() > 0


def openai_client(base_url, api_key):
  """Sends what the client of OpenAI sends, which need not be installed."""
  del api_key

  def create(extra_body, **fields):
    sent = urllib.request.Request(
      f'{base_url}/chat/completions',
      json.dumps(fields | extra_body).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(sent, timeout=60) as answer:
      return json.load(answer, object_hook=lambda x: types.SimpleNamespace(**x))

  completions = types.SimpleNamespace(create=create)
  return types.SimpleNamespace(
    chat=types.SimpleNamespace(completions=completions)
  )


def test_the_example_of_a_client_is_answered(monkeypatch, capsys):
  (code,) = blocks('grpo_jax/commands/README.md', 'python')
  module = types.SimpleNamespace(OpenAI=openai_client)
  monkeypatch.setitem(sys.modules, 'openai', module)
  with served.desk() as found:
    made = app.app(lambda _: found.service, hosts=['127.0.0.1'])
    with listening.Listening(made, listening.bound()) as server:
      run(code.replace('http://127.0.0.1:8000', server.origin))
  assert re.fullmatch(r'[^\[]*\[\d+(, \d+)*\]\n', capsys.readouterr().out)


def test_the_examples_of_rewards_are_rewards():
  terms, apart, own = blocks('grpo_jax/rewards/README.md', 'python')
  changed = run(terms, config=config_lib.default())['config']
  labels = [reward.label for reward in config_lib.resolve(changed).rewards]
  assert labels == ['', '', 'brief']
  brief = run(own, rewards=rewards)['brief']
  assert rewards.is_bounded(brief) and brief('', 'so', {}, limit=2) == 1
  with pytest.raises(ValueError, match='limit=0; give 1 or more'):
    rewards.check_arguments(brief, {'limit': 0}, '')
  assert callable(run(apart, rewards=rewards)['evaluated'])


def test_the_examples_of_environments_are_played():
  """By policies that do well, and badly."""
  values = config_lib.default()
  guess, _, countdown, shop = (
    run(code, config=values)
    for code in blocks('grpo_jax/environments/README.md', 'python')
  )
  config = config_lib.resolve(values)
  assert config.environment.name.endswith(':guess') and config.data.chat
  assert max(config.data.completion_buckets) > config.sampler.max_tokens

  def bisect(context):
    low, high = 0, 32
    said = [one['content'] for one in context]
    for number, hint in zip(map(int, said[1::2]), said[2::2]):
      low, high = (number, high) if 'higher' in hint else (low, number)
    return str((low + high) // 2)

  def play(environment, replies, example=None, **options):
    made = forms.resolve(environment)
    policy = scripted.Scripted(replies, tools=made.tools, **options)
    return asyncio.run(made.make()(policy, example or {}, 0)), policy

  (first,) = (x for x in blocks('README.md', 'python') if 'def guess' in x)
  first = forms.resolve(run(first)['guess']).make()

  for number in range(32):
    policy = scripted.Scripted(bisect)
    assert asyncio.run(first(policy, {}, 32 + number)) == 1.0
    assert play(guess['guess'], bisect, {'number': number})[0] == 1.0
  assert play(guess['guess'], ['seven'], {'number': 7})[0] == 0.0

  _, policy = play(countdown['Countdown'], ['3', '2', '1', '0'])
  assert policy.rewards == {0: 1.0, 1: 1.0, 2: 1.0}
  _, policy = play(countdown['Countdown'], ['3', '1'])
  assert policy.rewards == {0: 1.0, 1: -1.0}

  price = (
    '<tool_call>{"name": "price", "arguments": {"goods": "tea"}}</tool_call>'
  )
  buy = price.replace('price', 'buy')
  reward, policy = play(
    shop['Shop'], [price + buy, 'I have tea.'], {'budget': 3}, format='hermes'
  )
  assert reward == 1.0
  said = [one['content'] for one in policy.context]
  assert said[2:4] == ['3', 'You have spent 3.']
  again = [buy + buy, 'so']
  assert play(shop['Shop'], again, {'budget': 3}, format='hermes')[0] == 0.0


def test_the_examples_of_agents_are_played(monkeypatch):
  from tests.serving import agents_test

  class Client:
    """What the example uses of the package, which is not installed here."""

    def __init__(self, base_url, api_key):
      self.chat = self.completions = self
      self._address = base_url

    async def create(self, model, messages):
      assert model == 'policy'
      status, said = await asyncio.to_thread(
        agents_test.ask, self._address, messages
      )
      assert status == 200
      choice = types.SimpleNamespace(**said['choices'][0])
      return types.SimpleNamespace(choices=[choice])

  package = types.ModuleType('openai')
  package.AsyncOpenAI = Client  # type: ignore
  monkeypatch.setitem(sys.modules, 'openai', package)
  values = config_lib.default()
  first, second = blocks('grpo_jax/serving/README.md', 'python')
  run(first, config=values)
  config = config_lib.resolve(values)
  assert config.agent.command.split()[0] == 'python' and config.data.chat
  assert max(config.data.completion_buckets) > config.sampler.max_tokens
  solve = run(second)['solve']
  _, one = agents_test.play_one(solve, kwargs={'drafts': 2})
  assert one.failure == '' and one.account.turns == 3
  assert one.account.counts == {}


def test_tests_that_pages_name_are_there():
  names = re.findall(r'`([\w/]+\.py)::(\w+)`', text('tests/README.md'))
  assert len(names) > 30
  for path, name in names:
    code = (ROOT / 'tests' / path).read_text()
    assert f'\ndef {name}(' in code, f'{path}::{name}'


def test_the_table_of_formats_is_whole():
  page = text('grpo_jax/environments/README.md')
  rows = re.findall(r'^\| `(\w+)` \| (.*) \|', page, re.MULTILINE)
  rows = {name: said for name, said in rows if name in formats.NAMES}
  assert (*rows,) == formats.NAMES
  for name, said in rows.items():
    for shown in re.findall(r'`([^`]*f[^`]*1[^`]*)`', said):
      (call,) = formats.parse(
        formats.find(name), [(shown.replace('\\|', '|'), False)]
      ).calls
      assert call.name == 'f' and str(call.arguments['a']) == '1', shown


def test_the_example_of_sources_resolves():
  hub, code = blocks('grpo_jax/data/README.md', 'python')
  resolved = config_lib.resolve(run(hub, config=config_lib.default())['config'])
  assert resolved.data.train[0].name == 'hf:openai/gsm8k'
  changed = run(code, config=config_lib.default())['config']
  resolved = config_lib.resolve(changed)
  (source,) = resolved.data.heldout
  assert source.kwargs['max_digits'] == 2
  assert resolved.rewards[0].name == 'reasoning_gym'


def test_the_example_of_an_audit_runs(tmp_path, monkeypatch):
  code = blocks('grpo_jax/diagnostics/README.md', 'python')[0]
  (said,) = re.findall(r"row.weight  # ('.*')", code)
  monkeypatch.chdir(tmp_path)
  assert repr(run(code)['result'].row.weight) == said
  assert (tmp_path / 'dapo.png').exists()


@pytest.mark.parametrize(
  'page, number, loop',
  [
    ('README.md', 3, 'optax'),
    ('grpo_jax/optim/README.md', 0, 'optax'),
    ('grpo_jax/optim/README.md', 1, 'nnx'),
  ],
)
def test_the_examples_of_the_record_run(page, number, loop, capsys):
  """They use nothing of ours but `optim`, and print a norm."""
  code = blocks(page, 'python')[number]
  assert f'{loop}.' in code
  assert re.findall(r'from grpo_jax.*', code) == ['from grpo_jax import optim']
  run(code)
  assert float(capsys.readouterr().out) > 0


def test_the_lines_for_tunix_run(capsys):
  """On a trainer that makes and calls its optimizer as Tunix 0.1.7 does."""
  from grpo_jax import optim

  page = 'grpo_jax/optim/README.md'
  wrap, read = blocks(page, 'python')[2].splitlines()
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  optimizer = run(wrap, optim=optim, optimizer=optimizer)['optimizer']
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  trainer = types.SimpleNamespace(
    model=model, optimizer=nnx.Optimizer(model, optimizer, wrt=nnx.Param)
  )
  for _ in range(3):
    gradients = nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, 4))) ** 2))(model)
    trainer.optimizer.update(model, gradients)
  cluster = types.SimpleNamespace(actor_trainer=trainer)
  run(read, optim=optim, rl_cluster=cluster)
  assert "'adam_carried_norm'" in capsys.readouterr().out


def test_the_examples_of_fields_of_ones_own_run():
  """The advantage of a group is multiplied by the number of its record."""
  _, own, by_token, _ = blocks('grpo_jax/losses/README.md', 'python')
  method = run(own, losses=losses)['weighted']()
  batch = losses.make_batch(
    jnp.ones((2, 2, 3), bool),
    jnp.array([[1.0, 0], [1, 0]]),
    extras={'my_weight': jnp.array([[3.0, 3], [1, 1]])},
  )
  batch, _ = losses.credit(method, batch, method.init())
  assert batch.advantage[:, :, 0].tolist() == [[1.5, -1.5], [0.5, -0.5]]
  assert run(by_token)['by_token']({'rare_ids': [7]}, [7, 8]) == [2.0, 1.0]


class Tensor(np.ndarray):
  """As much of a tensor of PyTorch as the example needs."""

  def detach(self):
    return self

  def numpy(self):
    return np.asarray(self)

  def backward(self, gradient):
    self.pulled.append(gradient)


def test_the_example_of_flat_rows_runs():
  """Its micro-batches pull as the whole batch does in a loop of JAX."""
  rng = np.random.default_rng(0)
  rows, width, pulled = 8, 6, []
  logp = rng.normal(-1, 0.3, (rows, width)).astype(np.float32)

  def policy_logp(first, last):
    tensor = logp[first:last].view(Tensor)
    tensor.pulled = pulled
    return tensor

  done = run(
    blocks('grpo_jax/losses/README.md', 'python')[3],
    jax=jax,
    np=np,
    losses=losses,
    torch=types.SimpleNamespace(from_numpy=lambda array: array),
    completion_mask=np.arange(width) < rng.integers(2, width + 1, (rows, 1)),
    tool_mask=np.arange(width) != 1,
    uid=np.array([7, 3, 7, 3, 7, 9, 9, 9]),
    rewards=rng.normal(size=rows),
    completion_ids=rng.integers(0, 9, (rows, width)),
    truncated=np.zeros(rows, bool),
    old_per_token_logps=logp + rng.normal(0, 1e-4, logp.shape),
    policy_logp=policy_logp,
  )
  whole = jax.grad(
    lambda logp: losses.surrogate_loss(
      done['method'], done['rows'].gather(logp), done['batch'], done['state']
    )[0]
  )(logp)
  assert np.any(whole)
  np.testing.assert_allclose(np.concatenate(pulled), whole, rtol=1e-5)


def test_the_example_of_a_config_file_can_be_used():
  get_config = run(blocks('configs/README.md', 'python')[0])['get_config']
  resolved = config_lib.resolve(get_config())
  assert (resolved.steps, resolved.learner.method) == (100, 'dapo')


@pytest.mark.long
def test_a_method_of_a_users_own_trains_and_is_audited(tmp_path):
  """The README's lines, with a smaller run, and no edit to the package."""
  lines = next(
    block
    for block in blocks('grpo_jax/losses/README.md', 'sh')
    if 'my_lab' in block
  )
  lines = lines.replace('.venv/bin/grpo-jax', f'{sys.executable} -m grpo_jax')
  lines = lines.replace('PYTHONPATH=.', f'PYTHONPATH=.:{ROOT}')
  lines = lines.replace('configs/', f'{ROOT}/configs/').strip()
  smaller = (
    '--config.steps=2 --config.optim.warmup_steps=1 --config.warm_up.steps=0 '
    '--config.evaluation.examples=16 --config.sampler.group=4 '
    '--config.sampler.temperature=0.3 '
    f"'{cli.JUDGE}'"
  )
  done = subprocess.run(
    ['bash', '-ec', f'{lines} {smaller}'],
    cwd=tmp_path,
    env=cli.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert 'W_agg| is 0.333 of the sum' in done.stdout
  assert json.loads(done.stdout.splitlines()[-1])['steps'] == 2
  metrics = tmp_path / 'runs' / 'flipped' / 'metrics.jsonl'
  last = json.loads(metrics.read_text().splitlines()[-1])
  np.testing.assert_allclose(
    last['prefix_whole_uncancelled_expected'], 1 / 3, rtol=1e-5
  )
  assert last['update_norm'] > 0


def test_the_sums_of_the_readme_are_right():
  """As the model writes them: the last digit first."""
  sums = re.findall(r'^(\d+)\+(\d+)=(\d+)$', text('README.md'), re.MULTILINE)
  assert len(sums) == 2
  for first, second, written in sums:
    assert str(int(first) + int(second))[::-1] == written


# Commands.
@pytest.mark.skipif(
  not (ROOT / '.ci').exists(), reason='an sdist is without the gate'
)
def test_the_gate_installs_and_tests_as_the_readmes_say():
  gate = (ROOT / '.ci' / 'run').read_text()
  installs = [
    line
    for page in ('README.md', 'tests/README.md')
    for line in blocks(page, 'sh')
    if '[test]' in line
  ]
  assert len(installs) == 2 and len(set(installs)) == 1
  for step in installs[0].replace('.venv/bin/', '').split(' && ')[1:]:
    assert f'\n{step.strip()}\n' in gate + '\n', step


def typed(program):
  """What the pages type after a program: lists of words."""
  lines = [
    line.replace('`', ' ').partition(f'{program} ')[2].split(' && ')[0]
    for page in PAGES
    for line in '\n'.join(blocks(page, 'sh')).splitlines()
    if program in line
  ]
  return [line.split() for line in lines]


def test_the_commands_have_the_flags_that_are_typed():
  fields = {option.name for option in options.describe()}
  found = typed('bin/grpo-jax')
  assert {words[0] for words in found} >= {'train', 'eval', 'sample', 'audit'}
  for command, *words in found:
    for word in words:
      if word.startswith('--config.'):
        name = word[9:].partition('=')[0]
        field, _, _ = name.partition('kwargs.')  # which may hold any argument
        assert name in fields or f'{field}kwargs' in fields, word
      elif word.startswith('--'):
        name = word[2:].partition('=')[0]
        assert name in command_line.COMMANDS[command].flags, word


def help_of(script):
  """What a script says of its flags; here, where all is imported already."""
  with (
    cli.set_back(),
    mock.patch.object(sys, 'argv', [script, '--help']),
    mock.patch.object(start, 'prepare'),  # which starts a program anew
    contextlib.redirect_stdout(io.StringIO()) as said,
    pytest.raises(SystemExit),
  ):
    runpy.run_path(str(ROOT / script), run_name='__main__')
  return said.getvalue()


def test_the_scripts_have_the_flags_that_are_typed():
  found = typed('bin/python')
  assert len(found) == 27
  flags = collections.defaultdict(set)
  for script, *words in found:
    assert (ROOT / script).exists()
    flags[script] |= {word for word in words if word.startswith('--')}
  for script, wanted in flags.items():
    if wanted:
      help_text = help_of(script)
      assert wanted <= set(re.findall(r'--\w+', help_text)), script


# Tables that are made from the code.
@pytest.mark.parametrize(
  'name',
  [
    # Plans of all shapes, and programs of engines, take half a minute.
    pytest.param(name, marks=pytest.mark.long)
    if name in ('families', 'conformance')
    else name
    for name in readmes.PARTS
    if name != 'methods'
  ],
)
def test_parts_made_from_the_code_are_up_to_date(name):
  """Otherwise: `python -m tests.readmes`."""
  assert readmes.written(name) == readmes.PARTS[name][1]().strip()


def test_every_method_of_a_paper_names_it():
  without = re.findall(r'^\| `(\w+)` \| none', readmes.papers(), re.MULTILINE)
  assert sorted(without) == ['importance_sampling', 'supervised']


@pytest.mark.long
def test_the_table_of_methods_is_the_one_computed():
  """Otherwise: `python -m tests.readmes`."""
  found = audits.every()
  rows = audits.table(found)
  assert {row['method'] for row in rows} == set(losses.methods.__all__)
  assert all(cell for row in rows for cell in row.values())
  for name, audit in found.items():
    answer = audits.to_json(name, audit)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
  assert readmes.methods(rows).strip() == readmes.written('methods')


def test_the_map_names_every_folder():
  """And everything that lies beside the folders."""
  (tree,) = re.findall(
    r'```\ngrpo_jax/\n(.*?)```', text('grpo_jax/README.md'), re.S
  )
  named = {
    pathlib.PurePath(line.split()[0]) for line in tree.splitlines() if line
  }
  inner = {
    path.name
    for path in (ROOT / 'grpo_jax').rglob('*')
    if path.is_dir() and any(path.glob('*.py'))
  }
  beside = {
    path.name
    for path in (ROOT / 'grpo_jax').glob('*.py')
    if not path.name.startswith('_')
  }
  assert {str(name) for name in named} == inner | beside


def test_the_changelog_says_where_modules_are_now():
  rows = re.findall(
    r'^\| `(.*) \| (`.*) \|$', text('CHANGELOG.md'), re.MULTILINE
  )
  names = {name for _, new in rows for name in re.findall(r'`([\w.]+)`', new)}
  assert len(names) > 25
  for name in names:
    module, _, last = name.rpartition('.')
    try:
      importlib.import_module(f'grpo_jax.{name}')
    except ModuleNotFoundError:
      assert hasattr(importlib.import_module(f'grpo_jax.{module}'), last), name


# Links.
def anchors(page):
  """The headings of a page as GitHub names them."""
  headings = re.findall(r'^#+ (.*)$', text(page), re.MULTILINE)
  kept = (re.sub(r'[^\w\- ]', '', heading.lower()) for heading in headings)
  return {heading.replace(' ', '-') for heading in kept}


@pytest.mark.parametrize('page', PAGES)
def test_links_and_pictures_are_there(page):
  found = re.findall(r'\]\(([^)]+)\)|<img src="([^"]+)"', text(page))
  for target in (link or picture for link, picture in found):
    if target.startswith(('http://', 'https://')):
      continue
    file, _, anchor = target.partition('#')
    path = (PAGES[page].parent / file).resolve() if file else PAGES[page]
    assert path.exists(), target
    if anchor:
      assert anchor in anchors(str(path.relative_to(ROOT))), target


@pytest.mark.parametrize('page', PAGES)
def test_papers_are_links(page):
  """Wherever a number of arXiv is, it leads to the paper."""
  numbers = re.findall(r'\d{4}\.\d{5}', text(page))
  links = re.findall(
    r'\[arXiv:(\d{4}\.\d{5})\]\(https://arxiv.org/abs/\1\)', text(page)
  )
  assert len(numbers) == 2 * len(links)
