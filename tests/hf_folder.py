"""Hugging Face folders for tests: a tokenizer with all its files.

The tokenizer is a byte-level BPE that is trained in 10 ms. It has the special
tokens of every family whose templates are in `chat_templates`.
"""

from collections.abc import Sequence
import json
import pathlib

import tokenizers

from tests import chat_templates

SPECIAL = (
  '<|endoftext|>', '<|im_start|>', '<|im_end|>', '<think>', '</think>',
  '<bos>', '<eos>', '<start_of_turn>', '<end_of_turn>',
  '<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>',
  '<s>', '</s>', '[INST]', '[/INST]',
)  # fmt: skip
TEXTS = (
  'What is the largest of 12, 47, 5 and 93? The answer is 93.',
  'The capital of France is Paris. How much is one and two?',
  'system user assistant model You are a helpful assistant. Answer:',
)


def backend(
  vocab_size: int = 400,
  special: Sequence[str] = SPECIAL,
  merges: Sequence[Sequence[str]] | None = None,
  bos: str = '',
) -> tokenizers.Tokenizer:
  """A byte-level BPE: special tokens, 256 bytes, and merges.

  Args:
    vocab_size: how many tokens it has at most, if it is trained.
    special: its special tokens, which get the ids 0, 1, ...
    merges: pairs of tokens; None: trained on `TEXTS`.
    bos: a token that is put before a text, by the post-processor.
  """
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  model = tokenizers.models.BPE()
  if merges is not None:
    tokens = [*special, *letters, *(''.join(pair) for pair in merges)]
    model = tokenizers.models.BPE(
      vocab={token: number for number, token in enumerate(tokens)},
      merges=[(first, second) for first, second in merges],
    )
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  if merges is None:
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=list(special),
      initial_alphabet=letters,
      show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
  else:
    made.add_special_tokens(list(special))
  if bos:
    made.post_processor = tokenizers.processors.TemplateProcessing(
      single=f'{bos} $A', special_tokens=[(bos, made.token_to_id(bos))]
    )
  return made


def write_tokenizer(
  folder: str | pathlib.Path,
  template: str | None = chat_templates.QWEN3,
  *,
  eos: Sequence[str] = ('<|im_end|>', '<|endoftext|>'),
  pad: str | None = '<|endoftext|>',
  bos: str = '',
  vocab_size: int = 400,
  merges: Sequence[Sequence[str]] | None = None,
  template_file: bool = True,
) -> tokenizers.Tokenizer:
  """Writes the tokenizer's part of a folder, as transformers 5 does.

  Args:
    folder: made if it is not there; what else is in it stays.
    template: the chat template; None: none.
    eos: end tokens; the first is the 'eos_token' of tokenizer_config.json, and
      all of them are in generation_config.json.
    pad: padding token; None: none.
    bos: a token that is put before texts, or ''.
    vocab_size: how many tokens it has at most.
    merges: see `backend`.
    template_file: whether the template is a file of its own, or a field of
      tokenizer_config.json as in older folders.

  Returns:
    The tokenizer.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  made = backend(vocab_size, merges=merges, bos=bos)
  made.save(str(folder / 'tokenizer.json'))
  told = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': eos[0],
    'model_max_length': 1024,
  }
  if bos:
    told['bos_token'] = bos
  if pad is not None:
    told['pad_token'] = pad
  if template is not None and template_file:
    (folder / 'chat_template.jinja').write_text(template)
  elif template is not None:
    told['chat_template'] = template
  ends = [made.token_to_id(token) for token in eos]
  for name, values in (
    ('tokenizer_config.json', told),
    ('generation_config.json', {'eos_token_id': ends}),
  ):
    (folder / name).write_text(json.dumps(values, indent=1))
  return made
