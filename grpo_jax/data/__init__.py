"""Prompts and tokenizers. This package imports no jax.

A *source* is a finite set of records: it has `__len__` and `__getitem__(int) ->
dict` and keeps no state. A *stream* is an endless grain dataset over sources,
in random order.

How far a run has read its stream is a single integer, the global prompt
counter. `take(stream, position, count)` gives the same rows at any time and on
any process, so a run that is resumed needs this integer alone.

grain and tokenizers are imported inside the functions that need them, because
both are slow to import.
"""

from grpo_jax.data._arithmetic import ALPHABET
from grpo_jax.data._arithmetic import ArithmeticDemonstrations
from grpo_jax.data._arithmetic import ArithmeticSource
from grpo_jax.data._arithmetic import arithmetic_demonstrations
from grpo_jax.data._jsonl import JsonlSource
from grpo_jax.data._prompts import epoch_rows
from grpo_jax.data._prompts import mixture
from grpo_jax.data._prompts import prompt_stream
from grpo_jax.data._prompts import take
from grpo_jax.data._tokenizer import Tokenizer
from grpo_jax.data._tokenizer import character_tokenizer

__all__ = (
  'ALPHABET',
  'ArithmeticDemonstrations',
  'ArithmeticSource',
  'JsonlSource',
  'Tokenizer',
  'arithmetic_demonstrations',
  'character_tokenizer',
  'epoch_rows',
  'mixture',
  'prompt_stream',
  'take',
)
