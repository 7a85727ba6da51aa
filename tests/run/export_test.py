"""Models go out and come in again: the whole way, without a network."""

import contextlib
import dataclasses
import functools
import json
import shutil
import types
from typing import Any

import jax
import numpy as np
import pytest

import grpo_jax
from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import models
from grpo_jax.hosts import processes
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.models.attention import over_layout
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.run import export
from grpo_jax.run import learning
from grpo_jax.run import loop
from grpo_jax.run import progress as progress_lib
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import model as build_model
from grpo_jax.run.keep import objects
from grpo_jax.run.progress import Progress
from tests import hf_folder
from tests import runs
from tests.models.weights import class_names
from tests.models.weights import golden

pytestmark = pytest.mark.usefixtures('shared_programs')

SHAPE = dict(
  num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=24
)
# A second of training on chats about the largest of four numbers.
TRAINED = {
  'steps': 2,
  'warm_up.steps': 0,
  'data.train': 'largest',
  'data.heldout': '',
  'data.tokenizer': '',
  'data.chat': True,
  'data.prompt_buckets': (160,),
  'data.completion_buckets': (4,),
  'sampler.max_tokens': 4,
  'optim.lr': 1e-2,
  'checkpoint.every_steps': 1,
  'checkpoint.best_metric': 'reward',
  'log.completions_every_steps': 0,
}
ROWS = np.array([[5, 300, 17, 42, 9, 333, 250, 8]], np.int32)


def pretrained(folder, **changes):
  """A random model, as a Hugging Face folder with a real tokenizer."""
  backend = hf_folder.write_tokenizer(folder)
  shape = models.ModelConfig(
    backend.get_vocab_size() + 6, **{**SHAPE, **changes}
  )
  params = jax.jit(models.Transformer(shape).init)(jax.random.key(1))
  # Norms and biases begin at 1 and 0, and would hide a mistake.
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  leaves = [x + 0.1 * rng.normal(size=x.shape).astype(x.dtype) for x in leaves]
  fields = {'max_position_embeddings': 512}
  weights.save(folder, shape, tree.unflatten(leaves), fields=fields)
  return folder


SMALL = {
  **{k: v for k, v in runs.SMALL.items() if not k.startswith('model.')},
  **TRAINED,
  'rewards': ({'name': 'tests.judges:even', 'weight': 1.0},),
}


def small(path, **changes):
  config = config_lib.default()
  config.update_from_flattened_dict(
    {**SMALL, 'model.path': str(path), **changes}
  )
  return config_lib.resolve(config)


@functools.partial(jax.jit, static_argnames='model')
def _logits(model, params, rows):
  attention = over_layout(rows, model.config.attention)
  hidden, _ = model.hidden(params, rows.tokens, rows.position, attention)
  return model.head(params, hidden)


def logits(model, params):
  """f32[1,S,V]."""
  with jax.default_matmul_precision('highest'):
    return np.asarray(_logits(model, params, golden.padded(ROWS, 'right')))


def of_folder(folder):
  source = weights.source(folder)
  model = models.Transformer(source.config())
  return logits(model, weights.load(source, model.config))


def of_run(config, workdir, which='latest'):
  found = build_model.source(str(workdir))
  vocab = build_data.tokenizer_of(config).vocab_size
  policy = build_model.policy(found, vocab, sharding.make_mesh(), which)
  return logits(policy.model, policy.params)


class Killed(BaseException):
  """Nothing is saved at this one, as at kill -9."""


def train_killed_once(config, workdir, monkeypatch):
  """Killed in the second rollout, then started again by the same command."""
  learn, steps = learning.learn, []

  def killed(updater, layout, state, rollout, step, *others):
    steps.append(step)
    if steps == [0, 1]:
      raise Killed
    return learn(updater, layout, state, rollout, step, *others)

  monkeypatch.setattr(learning, 'learn', killed)
  with pytest.raises(Killed):
    loop.train(config, workdir)
  loop.train(config, workdir)
  assert steps[:3] == [0, 1, 1]


@pytest.mark.long
def test_a_qwen3_folder_is_trained_killed_resumed_written_and_read(
  tmp_path, monkeypatch
):
  folder = pretrained(tmp_path / 'qwen3', qk_norm=True, tied_embeddings=True)
  every = {'export.every_saves': 2}
  config, workdir = small(folder, **every), tmp_path / 'run'
  train_killed_once(config, workdir, monkeypatch)
  # The first start has saved once; the count goes on in the second.
  assert [path.name for path in (workdir / 'exports').iterdir()] == ['2']
  out = tmp_path / 'out'
  done = export.convert(str(workdir), out, shard_gb=2e-5)
  assert (done.architecture, done.checkpoint) == ('Qwen3ForCausalLM', 2)
  index = json.loads((out / 'model.safetensors.index.json').read_text())
  assert len(set(index['weight_map'].values())) > 1
  found = of_folder(out)
  np.testing.assert_array_equal(found, of_run(config, workdir))
  assert np.abs(found - of_folder(folder)).max() > 0.1  # it has learned
  np.testing.assert_array_equal(of_folder(workdir / 'exports' / '2'), found)
  # Its tokenizer and its end tokens are those that it came with.
  for name in (
    'tokenizer.json',
    'tokenizer_config.json',
    'chat_template.jinja',
    'generation_config.json',
  ):
    assert (out / name).read_bytes() == (folder / name).read_bytes()
  described = json.loads((out / 'config.json').read_text())
  assert described['max_position_embeddings'] == 512
  # An earlier checkpoint, and half the size.
  export.convert(str(workdir), tmp_path / 'one', '1', 'bfloat16')
  earlier = of_folder(tmp_path / 'one')
  np.testing.assert_allclose(
    earlier, of_run(config, workdir, '1'), atol=0.1, rtol=0
  )
  assert np.abs(earlier - found).max() > 0.1


LORA = {
  'lora.rank': 2,
  'lora.alpha': 6.0,
  'lora.targets': ('attention/*', 'mlp/down'),
}


@pytest.fixture(scope='module')
def begun(shared_programs, tmp_path_factory):
  """A Llama with grouped heads, and a run that will train its adapters."""
  path = tmp_path_factory.mktemp('begun')
  folder = pretrained(path / 'llama')
  loop.train(small(folder, **LORA, steps=0), path / 'run')
  return folder, path / 'run'


@pytest.fixture(scope='module')
def adapted(shared_programs, tmp_path_factory):
  """The same, trained."""
  path = tmp_path_factory.mktemp('lora')
  folder = pretrained(path / 'llama')
  config = small(folder, **LORA)
  with pytest.MonkeyPatch.context() as monkeypatch:
    train_killed_once(config, path / 'run', monkeypatch)
  return folder, config, path / 'run'


@pytest.mark.long
def test_adapters_are_added_to_the_weights_that_are_written(adapted, tmp_path):
  folder, config, workdir = adapted
  done = grpo_jax.convert(workdir, tmp_path / 'out')
  assert done.architecture == 'LlamaForCausalLM'
  found, expected = of_folder(tmp_path / 'out'), of_run(config, workdir)
  np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
  assert np.abs(found - of_folder(folder)).max() > 1e-2
  params = build_model.initial(
    build_model.weights_spec(
      dataclasses.replace(config, lora=type(config.lora)()), None
    ),
    models.Transformer(weights.source(folder).config()),
    sharding.make_mesh(),
  )
  assert done.parameters == sum(x.size for x in jax.tree.leaves(params))


def tensors_of(folder, name='model.safetensors'):
  numpy = pytest.importorskip('safetensors.numpy')
  return numpy.load_file(folder / name)


@pytest.mark.long
def test_an_adapter_has_the_names_and_the_product_that_peft_wants(
  adapted, tmp_path
):
  folder, _, workdir = adapted
  export.convert(str(workdir), tmp_path / 'merged')
  done = export.convert(str(workdir), tmp_path / 'adapter', adapter=True)
  told = json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())
  assert told['peft_type'] == 'LORA' and told['task_type'] == 'CAUSAL_LM'
  assert (told['r'], told['lora_alpha']) == (2, 6.0)
  assert told['base_model_name_or_path'] == str(folder.resolve())
  modules = ['down_proj', 'k_proj', 'o_proj', 'q_proj', 'v_proj']
  assert told['target_modules'] == modules
  low = tensors_of(tmp_path / 'adapter', 'adapter_model.safetensors')
  assert done.parameters == sum(x.size for x in low.values())
  base, merged = tensors_of(folder), tensors_of(tmp_path / 'merged')
  changed = 0
  for name, weight in base.items():
    module = f'base_model.model.{name.removesuffix(".weight")}'
    a = low.pop(f'{module}.lora_A.weight', None)
    if a is None:
      np.testing.assert_array_equal(merged[name], weight)
      continue
    b = low.pop(f'{module}.lora_B.weight')
    assert a.shape == (2, weight.shape[1]) and b.shape == (weight.shape[0], 2)
    np.testing.assert_allclose(merged[name], weight + 3 * b @ a, atol=1e-6)
    changed += bool(np.any(b))
  assert not low and changed == 2 * len(modules)


def of_images(folder):
  """A Gemma 3 that sees images, of which the language model is there."""
  backend = hf_folder.write_tokenizer(folder)
  cases = json.loads(class_names.FILE.read_text())
  described = cases['Gemma3ForConditionalGeneration']['config']
  described['text_config']['vocab_size'] = backend.get_vocab_size()
  shape = weights.config_from_huggingface(described)
  weights.save(folder, shape, golden.random_params(shape))
  numpy = pytest.importorskip('safetensors.numpy')
  renamed = {
    name.replace('model.', 'model.language_model.', 1): tensor
    for name, tensor in tensors_of(folder).items()
  }
  numpy.save_file(renamed, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(described))
  return folder


@pytest.mark.long
def test_an_adapter_is_for_the_class_of_the_base_that_it_names(tmp_path):
  """A base that sees images, and the same written as a language model alone."""
  low = {**LORA, 'steps': 0, 'model.beyond_context': True}  # of 32 tokens
  loop.train(small(of_images(tmp_path / 'base'), **low), tmp_path / 'run')
  loop.train(small(tmp_path / 'run', **low), tmp_path / 'later')
  whole = export.convert(str(tmp_path / 'run'), tmp_path / 'whole')
  assert whole.architecture == 'Gemma3ForCausalLM'
  for run, base, inside in (
    ('run', 'base', 'model.language_model.layers.'),
    ('later', 'run', 'model.layers.'),
  ):
    out = tmp_path / f'adapter of {run}'
    export.convert(str(tmp_path / run), out, adapter=True)
    told = json.loads((out / 'adapter_config.json').read_text())
    assert told['base_model_name_or_path'] == str((tmp_path / base).resolve())
    names = tensors_of(out, 'adapter_model.safetensors')
    assert names and all(
      name.startswith(f'base_model.model.{inside}') for name in names
    )


@pytest.mark.long
def test_a_run_that_began_at_random_is_written_and_begun_from(tmp_path):
  untrained = {'steps': 0, 'warm_up.steps': 0, 'data.heldout': ''}
  config = runs.small(**untrained, **{'model.qkv_bias': True})
  loop.train(config, tmp_path / 'run')
  done = export.convert(str(tmp_path / 'run'), tmp_path / 'out')
  assert done.architecture == 'Qwen2ForCausalLM'
  again = small(tmp_path / 'out', **{
    'data.chat': False, 'data.train': 'arithmetic',
    'data.tokenizer': 'arithmetic',
  })  # fmt: skip
  run = build.run(again)
  assert run.tokenizer.eos_ids == (1,)
  np.testing.assert_array_equal(
    logits_of_ids(run.model, build.initial_params(run)),
    logits_of_ids(*policy_of(config, tmp_path / 'run')),
  )
  with_own = data.tokenizer_from('', str(tmp_path / 'out'))
  assert with_own.encode_prompt('47+85=') == run.tokenizer.encode('47+85=')
  assert (with_own.eos_ids, with_own.pad_id) == ((1,), 0)


def policy_of(config, workdir):
  vocab = build_data.tokenizer_of(config).vocab_size
  found = build_model.source(str(workdir))
  policy = build_model.policy(found, vocab, sharding.make_mesh())
  return policy.model, policy.params


def logits_of_ids(model, params):
  rows = golden.padded(ROWS % 14, 'right')
  return np.asarray(_logits(model, params, rows))


class Exporting:
  """What `progress` needs to write an export; nothing is trained."""

  def __init__(self, workdir, **changes):
    config = runs.small(**{'export.every_saves': 2, **changes})
    tokenizer = data.character_tokenizer(data.ALPHABET)
    self.run = types.SimpleNamespace(
      export=config.export,
      weights=build_model.weights_spec(config, None),
      tokenizer=tokenizer,
      model=self.model(config, tokenizer),
    )
    self.workdir, self.peers = workdir, processes.ALONE
    self.export = export.writer(self.run)
    self.saves = types.SimpleNamespace(wait=lambda: None, owed=False)
    self.warned = []
    self.monitor = types.SimpleNamespace(
      phase=lambda _: contextlib.nullcontext(), warn=self.warned.append
    )
    self.updater = types.SimpleNamespace(joined=lambda params: params)
    params = jax.jit(self.run.model.init)(jax.random.key(0))
    state: Any = types.SimpleNamespace(params=params)
    self.progress = Progress(0, state, Receipt(), LayoutSpec('auto', 1))

  @staticmethod
  def model(config, tokenizer):
    return build_model.transformer(config, tokenizer.vocab_size)

  def saved(self, step):
    saves = self.progress.saves.counted(step, self.run.export.every_saves)
    session: Any = self
    self.progress = progress_lib.export(
      session, self.progress._replace(step=step, saves=saves)
    )


def test_every_second_save_is_written_and_a_full_disk_is_a_warning(
  tmp_path, monkeypatch
):
  run = Exporting(tmp_path)
  for step in (1, 2, 2, 3):  # the last save of a run is tried twice
    run.saved(step)
  run.saves.owed = True
  run.saved(4)  # its checkpoint is not there, so the next save is written
  run.saves.owed = False
  run.saved(5)
  folder = tmp_path / 'exports'
  assert sorted(path.name for path in folder.iterdir()) == ['2', '5']
  assert not run.warned

  def full(*_):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(export.weights, 'save', full)
    run.saved(6)
  (said,) = run.warned
  assert 'exports/6 cannot be written (No space left' in said
  assert sorted(path.name for path in folder.iterdir()) == ['2', '5']
  run.saved(7)  # the next save is written in its place
  assert sorted(path.name for path in folder.iterdir()) == ['2', '5', '7']


@pytest.mark.parametrize('adapter', [False, True])
def test_a_folder_that_is_whole_is_not_written_again(tmp_path, adapter):
  run, written = Exporting(tmp_path), []
  run.run.export = dataclasses.replace(run.run.export, adapter=adapter)
  run.export = lambda folder, params: written.append(folder.name)
  files = ['config.json', 'adapter_config.json'][:: -1 if adapter else 1]
  for step, last in zip(('2', '4'), files):  # of the second it is another's
    (tmp_path / 'exports' / step).mkdir(parents=True)
    (tmp_path / 'exports' / step / last).touch()
  for step in (1, 2, 3, 4):
    run.saved(step)
  assert written == ['4']


def test_a_folder_that_a_kill_has_cut_off_is_written_by_the_next_start(
  tmp_path, monkeypatch
):
  config = runs.small(
    **{
      'steps': 2,
      'checkpoint.every_steps': 1,
      'export.every_saves': 1,
      'evaluation.every_steps': 0,
      'data.heldout': '',
    }
  )
  real = export.whole_folder

  def kill(folder, *given):
    if folder.name == '2':
      raise Killed
    real(folder, *given)

  with monkeypatch.context() as patch:
    patch.setattr(export, 'whole_folder', kill)
    with pytest.raises(Killed):
      loop.train(config, tmp_path)
  exports = tmp_path / 'exports'
  assert [path.name for path in exports.iterdir()] == ['1']
  loop.train(config, tmp_path)
  assert sorted(path.name for path in exports.iterdir()) == ['1', '2']


def test_a_model_that_no_folder_can_describe_is_refused_at_the_start(tmp_path):
  windows = {'model.num_layers': 2, 'model.window_tokens': (4, 0)}
  with pytest.raises(ValueError, match='cannot say'):
    Exporting(
      tmp_path, **windows, **{'model.qkv_bias': True, 'model.qk_norm': True}
    )


def test_a_kill_leaves_no_half_folder(tmp_path):
  target = tmp_path / 'out'

  def half(folder):
    folder.mkdir()
    (folder / 'config.json').write_text('{}')
    raise Killed

  with pytest.raises(Killed):
    export.whole_folder(target, half)
  assert not target.exists()
  # What a process that was killed has left is no hindrance.
  (tmp_path / '.out.tmp').mkdir()
  (tmp_path / '.out.tmp' / 'old').touch()
  export.whole_folder(target, lambda folder: folder.mkdir())
  assert target.is_dir() and not list(tmp_path.glob('.out.tmp'))
  assert not list(target.iterdir())


class Second(processes.Processes):
  """The second of two processes, of which the first one says nothing."""

  is_first = False

  def exchange(self, value=None):
    return ['', value]


def test_a_folder_is_made_with_its_parents_and_replaced(tmp_path):
  target = tmp_path / 'new' / 'newer' / 'out'
  for name in ('first', 'second'):

    def write(folder):
      folder.mkdir()
      (folder / name).touch()  # noqa: B023

    export.whole_folder(target, write)
    assert [path.name for path in target.iterdir()] == [name]
  # Where there are several processes, only the first one moves files.
  given = []
  export.whole_folder(target, given.append, Second())
  assert len(given) == 1 and given[0].parent == target.parent
  assert [path.name for path in target.iterdir()] == ['second']


def refused(words, *args, **kwargs):
  with pytest.raises(ValueError, match=words) as error:
    export.convert(*args, **kwargs)
  assert '\n' not in str(error.value)


def test_what_cannot_be_written_is_said_in_a_sentence(begun, tmp_path):
  folder, workdir = begun
  out = tmp_path / 'out'
  refused('holds a model already', str(workdir), folder)
  refused('There is no .*/nothing', str(tmp_path / 'nothing'), out)
  refused('no checkpoint of step 9', str(workdir), out, '9')
  refused("none of 'latest', 'best'", str(workdir), out, 'newest')
  refused('--adapter asks', str(folder), out, adapter=True)
  refused('--checkpoint=2 asks', str(folder), out, '2')
  (tmp_path / 'file').touch()
  refused('is a file', str(folder), tmp_path / 'file')
  refused('holds file already', str(folder), tmp_path)
  empty = tmp_path / 'empty'
  shutil.copytree(workdir, empty, ignore=lambda *_: ['checkpoints'])
  refused('no checkpoint in', str(empty), out)
  (empty / 'checkpoints').mkdir()
  refused('no checkpoint in', str(empty), out)
  assert not out.exists()


def test_an_adapter_needs_a_run_with_one_and_a_base(tmp_path):
  for name, changes, words in (
    ('plain', {}, 'has no adapters'),
    ('random', {'lora.rank': 2}, 'began with random weights'),
  ):
    workdir = tmp_path / name
    (workdir / 'checkpoints').mkdir(parents=True)
    config = dataclasses.asdict(runs.small(**changes))
    (workdir / 'config.json').write_text(json.dumps(config))
    refused(words, str(workdir), tmp_path / 'out', adapter=True)


def test_adapters_of_other_weights_are_not_written(
  begun, tmp_path, monkeypatch
):
  _, workdir = begun
  frozen = build_model.frozen

  def changed(*args):
    return jax.tree.map(lambda x: x + 1e-3, frozen(*args))

  monkeypatch.setattr(build_model, 'frozen', changed)
  out = tmp_path / 'out'
  refused('not those that this run began with', str(workdir), out)


def test_a_tokenizer_given_in_python_is_missed(tmp_path):
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  config = dataclasses.asdict(
    runs.small(**{'data.tokenizer': objects.words('tokenizer mine')})
  )
  (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
  refused('its tokenizer in Python', str(tmp_path / 'run'), tmp_path / 'out')


def test_what_a_run_of_a_run_began_with(begun):
  folder, workdir = begun
  origin = build_model.origin_of(str(workdir))
  assert origin is not None and origin.folder == folder
  assert build_model.origin_of('') is None


def test_a_model_of_ones_own_has_no_folder(tmp_path):
  run = Exporting(tmp_path).run
  run.model = types.SimpleNamespace(file_shape=None)
  with pytest.raises(ValueError, match='A model of your own has no form'):
    export.writer(run, tmp_path)
