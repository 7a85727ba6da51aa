"""What is written has the names of the class that will read it.

The names are those of transformers, in `class_names.json`. The second half
loads what was written with transformers and peft; it needs both, and torch:

  pip install torch transformers peft
  pytest -m reference tests/models/weights/class_names_test.py
"""

import dataclasses
import itertools
import json
import re
import warnings

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.models.weights import families
from tests.chosen import chosen
from tests.models.weights import class_names
from tests.models.weights import golden

NAMES = json.loads(class_names.FILE.read_text())
# The others are compared with golden folders in `save_test.py`.
IN_THE_SUITE = 'Qwen3MoeForCausalLM', 'Gemma3ForConditionalGeneration'
# What holds the matrices by which a layer sees other tokens.
MIXERS = {'self_attn', 'conv', 'linear_attn'}
BEFORE, ENDS = 'base_model.model.', ('.lora_A.weight', '.lora_B.weight')


def without_mlps(config):
  """Whether peft passes over MLPs: where some layers have experts instead."""
  return config.experts is not None and not config.experts.beside_mlp


def low_rank(config):
  """Adapters of all that peft adapts; see `without_mlps`."""
  mixers = {f'{kind.mixer}/*' for kind in config.pattern}
  targets = tuple(sorted(mixers)) if without_mlps(config) else ('*',)
  return dataclasses.replace(config, lora=models.LowRank(2, 4.0, targets))


def adapted(architecture):
  """The model with adapters, and parameters off their first ones."""
  config = low_rank(
    weights.config_from_huggingface(NAMES[architecture]['config'])
  )
  return config, golden.random_params(config)


def test_every_family_is_compared():
  assert list(NAMES) == list(class_names.CASES)
  assert {*NAMES} == {one.architecture for one in families.FAMILIES}


@pytest.mark.parametrize('architecture', chosen([*NAMES], IN_THE_SUITE))
def test_tensors_have_the_names_of_the_class_in_config_json(
  architecture, tmp_path
):
  config, params = adapted(architecture)
  weights.save(tmp_path, config, params)
  written = json.loads((tmp_path / 'config.json').read_text())
  (named,) = written['architectures']
  # Shapes that several families can express are written as the plainest one.
  given = weights.written_as(architecture)
  assert given in NAMES
  described = weights.config_to_huggingface(
    dataclasses.replace(config, lora=None), architecture
  )
  assert described['architectures'] == [given]
  assert described['model_type'] == NAMES[given]['config']['model_type']
  found = safetensors.load_file(tmp_path / 'model.safetensors')
  expected = NAMES[named]['files']
  if given != architecture:  # of the language model inside another
    expected = [
      re.sub(r'^(model\.)?language_model\.', r'\1', name)
      for name in NAMES[architecture]['files']
      if 'language_model.' in name or name == 'lm_head.weight'
    ]
  assert sorted(found) == sorted(expected)


def of_language(modules, attention_alone):
  """The linear layers that have adapters: not those of images, nor the output.

  Args:
    modules: Shapes by name.
    attention_alone: Whether MLPs have none, and only mixers have.
  """
  return {
    name: shape
    for name, shape in modules.items()
    if '.layers.' in name
    and 'vision_tower' not in name
    and 'per_layer' not in name
    and 'router' not in name
    and (attention_alone <= bool(MIXERS & {*name.split('.')}))
  }


def told_of(told, pattern, module, usual):
  """What an adapter's file says of a module: by its name, or by its end."""
  short = module.rpartition('.')[2]
  return told[pattern].get(module, told[pattern].get(short, usual))


@pytest.mark.parametrize('architecture', NAMES)
def test_adapters_have_the_names_of_modules_and_meet_all_of_them(
  architecture, tmp_path
):
  config, params = adapted(architecture)
  weights.save_adapter(
    tmp_path, config, params, 'base', architecture=architecture
  )
  modules = NAMES[architecture]['modules']
  wanted = of_language(modules, without_mlps(config))
  found = safetensors.load_file(tmp_path / 'adapter_model.safetensors')
  expected = {BEFORE + name + end for name in wanted for end in ENDS}
  assert found.keys() == expected
  told = json.loads((tmp_path / 'adapter_config.json').read_text())
  for name, (out, into) in wanted.items():
    a, b = (found[BEFORE + name + end] for end in ENDS)
    rank = told_of(told, 'rank_pattern', name, told['r'])
    assert (a.shape, b.shape) == ((rank, into), (out, rank))
  # As peft finds what to adapt: by the whole name, or by its end.
  met = {
    name
    for name in modules
    for target in told['target_modules']
    if name == target or name.endswith(f'.{target}')
  }
  assert met == wanted.keys()


def test_modules_of_one_name_are_told_apart(tmp_path):
  """LFM2 has an `out_proj` in layers of either kind."""
  name = 'Lfm2ForCausalLM'
  config = weights.config_from_huggingface(NAMES[name]['config'])
  low = models.LowRank(2, 4.0, ('attention/output',))
  config = dataclasses.replace(config, lora=low)
  params = golden.random_params(config)
  weights.save_adapter(tmp_path, config, params, 'base', architecture=name)
  told = json.loads((tmp_path / 'adapter_config.json').read_text())
  assert told['target_modules'] == ['model.layers.1.self_attn.out_proj']
  assert 'model.layers.0.conv.out_proj' in NAMES[name]['modules']


SOME = ('attention/key', 'mlp/up')


@pytest.mark.parametrize(
  'architecture, targets',
  [
    *itertools.product(
      ['LlamaForCausalLM', 'Phi3ForCausalLM', 'Glm4ForCausalLM'], [('*',), SOME]
    ),
    ('Lfm2ForCausalLM', ('*',)),
    ('Lfm2ForCausalLM', ('attention/output', 'convolution/behind')),
    ('Qwen3_5ForCausalLM', ('*',)),
    ('Qwen3_5ForCausalLM', ('attention/head_gate', 'delta/value')),
    ('Qwen3NextForCausalLM', ('attention/*', 'delta/*')),
    ('Qwen3NextForCausalLM', ('attention/head_gate', 'delta/value')),
  ],
)
def test_a_product_is_what_an_adapter_adds_to_the_stored_weight(
  architecture, targets, tmp_path
):
  """Also where one module holds several weights, or stores pairs of entries."""
  config = weights.config_from_huggingface(NAMES[architecture]['config'])
  config = dataclasses.replace(config, lora=models.LowRank(2, 6.0, targets))
  params = golden.random_params(config)
  described = json.dumps(NAMES[architecture]['config'])
  (tmp_path / 'config.json').write_text(described)
  source = weights.source(tmp_path, needs_weights=False)
  weights.save(tmp_path / 'whole', config, params, source=source)
  plain = dataclasses.replace(config, lora=None)
  alone = lora.split(params, lora.trains)[1]
  weights.save(tmp_path / 'base', plain, alone, source=source)
  weights.save_adapter(
    tmp_path / 'low', config, params, 'base', architecture=architecture
  )
  whole, base = (
    safetensors.load_file(tmp_path / name / 'model.safetensors')
    for name in ('whole', 'base')
  )
  low = safetensors.load_file(tmp_path / 'low' / 'adapter_model.safetensors')
  told = json.loads((tmp_path / 'low' / 'adapter_config.json').read_text())
  met = 0
  for name, after in whole.items():
    module = name.removesuffix('.weight')
    pair = [low.get(BEFORE + module + end) for end in ENDS]
    if pair[0] is None:
      np.testing.assert_array_equal(after, base[name])
      continue
    scale = told_of(told, 'alpha_pattern', module, told['lora_alpha'])
    scale /= told_of(told, 'rank_pattern', module, told['r'])
    expected = base[name] + scale * pair[1] @ pair[0]
    np.testing.assert_allclose(after, expected, atol=1e-4)
    met += 1
  assert met == len(low) / 2 > 0


def test_adapters_that_peft_would_pass_over_are_not_written(tmp_path):
  name = 'Qwen3MoeForCausalLM'
  config = weights.config_from_huggingface(NAMES[name]['config'])
  for targets in ('*',), ('mlp/up', 'attention/query'):
    low = dataclasses.replace(config, lora=models.LowRank(2, 4.0, targets))
    with pytest.raises(ValueError, match='peft would pass over these. Write'):
      weights.save_adapter(tmp_path / 'out', low, {}, 'base')
  assert not (tmp_path / 'out').exists()


def test_an_adapter_of_nothing_is_not_written(tmp_path):
  config, params = adapted('LlamaForCausalLM')
  beside, base = lora.split(params, lora.trains)
  assert beside['blocks']
  with pytest.raises(ValueError, match='No weight of the model has an adapt'):
    weights.save_adapter(tmp_path / 'out', config, base, 'base')
  assert not (tmp_path / 'out').exists()


def logits_of(config, params, tokens):
  """f32[S,V] of ours, of one row."""
  from tests.models.weights import parity_test

  rows = golden.padded([np.asarray(tokens, np.int32)], 'right')
  with parity_test.EXACT():
    model = models.Transformer(config)
    return np.asarray(parity_test.logits(model, params, rows)[0])


def their_logits(model, tokens):
  torch = pytest.importorskip('torch')
  with torch.no_grad():
    return model(torch.tensor(tokens)[None].long()).logits[0].float().numpy()


def assert_close(found, expected):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.fixture(params=NAMES)
def base(request, tmp_path):
  """A folder that transformers has written, and the model in it."""
  torch = pytest.importorskip('torch', reason='needs torch')
  torch.manual_seed(0)
  model = class_names.their_model(request.param).float().eval()
  for name, weight in model.named_parameters():
    if weight.ndim > 1:
      torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    elif 'norm' in name:
      weight.data += 0.3 * torch.randn_like(weight)
  model.save_pretrained(tmp_path / 'base')
  return request.param, tmp_path / 'base', model


@pytest.mark.reference
def test_transformers_and_peft_compute_what_we_do(base, tmp_path):
  """The same base, its adapter, and both written as one model."""
  peft = pytest.importorskip('peft', reason='needs peft')
  transformers = pytest.importorskip('transformers')
  architecture, folder, model = base
  tokens = np.arange(11) % 19
  source = weights.source(folder)
  assert source.architecture == architecture
  plain = source.config()
  params = weights.load(source, plain)
  before = their_logits(model, tokens)
  assert_close(logits_of(plain, params, tokens), before)

  config = low_rank(plain)
  drawn, _ = lora.split(golden.random_params(config), lora.trains)
  both = lora.join(jax.tree.map(lambda x: 0.3 * x, drawn), params)
  expected = logits_of(config, both, tokens)
  assert np.abs(expected - before).max() > 1e-2

  weights.save_adapter(
    tmp_path / 'adapter', config, both, str(folder), 'float32', architecture
  )
  told = peft.PeftConfig.from_pretrained(str(tmp_path / 'adapter'))
  again = class_names.loader(model.config).from_pretrained(
    told.base_model_name_or_path, dtype='float32', attn_implementation='eager'
  )
  with warnings.catch_warnings():
    # peft warns of keys that are missing or left over.
    warnings.filterwarnings('error', '.*adapter keys.*')
    with_adapter = peft.PeftModel.from_pretrained(again, tmp_path / 'adapter')
  assert_close(their_logits(with_adapter.eval(), tokens), expected)

  weights.save(tmp_path / 'whole', config, both, source=source)
  whole, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'whole', dtype='float32', attn_implementation='eager',
    output_loading_info=True,
  )  # fmt: skip
  assert not any(map(len, info.values())), info
  assert type(whole).__name__ == weights.written_as(architecture)
  assert_close(their_logits(whole.eval(), tokens), expected)
