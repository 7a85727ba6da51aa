"""Live against transformers: ids and scores of reward models.

Needs torch and transformers beside what the suite needs:

  pip install torch transformers accelerate
  pytest -m reference tests/episodes/reward_model_reference_test.py
"""

import functools

import jax
import numpy as np
import pytest

from grpo_jax.episodes import reward_model
from tests import reward_folder

pytestmark = pytest.mark.reference

torch = pytest.importorskip('torch', reason='needs torch')
transformers = pytest.importorskip('transformers', reason='needs transformers')

# Short, because both turn queries and keys by angles in float32: at position
# 200 each is 8e-6 away from the same model in float64.
ANSWERS = (
  'It is 3.',
  '',
  '  two\n\n',
  '<answer>one and\ntwo</answer>\n\nThe answer is 93.',
  'Paris is the capital of France. ' * 2,
)
PROMPTS = (
  'How much is one and two?',
  'Hi',
  [
    {'role': 'system', 'content': 'You are a helpful assistant.'},
    {'role': 'user', 'content': 'How much?'},
    {'role': 'assistant', 'content': 'Of what?'},
    {'role': 'user', 'content': 'Of 12 and 47.'},
  ],
)


@pytest.mark.parametrize('pad', ['<|endoftext|>', '<|im_end|>'])
@pytest.mark.parametrize('family', reward_folder.FAMILIES)
def test_ids_and_scores_are_those_of_transformers(family, pad, tmp_path):
  reward_folder.write(tmp_path, family, pad=pad)
  # Not the class of the family, which has rules of its own for cutting texts
  # that our tokenizer.json of no family does not state.
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  theirs, info = (
    transformers.AutoModelForSequenceClassification.from_pretrained(
      tmp_path,
      dtype=torch.float32,
      attn_implementation='eager',
      output_loading_info=True,
    )
  )
  assert not any(map(len, info.values())), info
  judged = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]
  texts = []
  for prompt, answer in judged:
    asked = (
      [{'role': 'user', 'content': prompt}]
      if isinstance(prompt, str)
      else prompt
    )
    texts.append(
      tokenizer.apply_chat_template(
        [*asked, {'role': 'assistant', 'content': answer}],
        tokenize=True,
        return_dict=False,
      )
    )
  width = max(map(len, texts))
  tokens = np.full((len(texts), width), theirs.config.pad_token_id)
  mask = np.zeros_like(tokens)
  for i, ids in enumerate(texts):
    tokens[i, : len(ids)], mask[i, : len(ids)] = ids, 1
  with torch.no_grad():
    expected = (
      theirs.eval()(torch.tensor(tokens), torch.tensor(mask))
      .logits[:, 0]
      .numpy()
    )
  exact = functools.partial(jax.default_matmul_precision, 'highest')
  with exact():
    model = reward_model.RewardModel(
      str(tmp_path), dtype='float32', max_tokens=512, buckets=(64, 512)
    )
    ours = [model.ids(*one) for one in judged]
    found = model.scores(ours)
  for ids, text in zip(ours, texts, strict=True):
    kept = len(text)
    while text[kept - 1] == theirs.config.pad_token_id:
      kept -= 1
    assert ids == text[:kept]
  error = np.abs(found - expected).max() / np.abs(expected).max()
  print(f'{family}, padding {pad}: scores differ by {error:.1e} of the largest')
  assert error < 1e-5
