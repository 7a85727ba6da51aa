"""Prompt sources, prompt streams and tokenizers. No jax.

A *source* has `__len__` and `__getitem__(int) -> dict` and keeps no state. A
*stream* is an infinite grain dataset over sources. The data position of a
run is one integer, the global prompt counter: `take(stream, position, count)`
gives the same rows at any time, on any process.

grain and tokenizers are imported inside the functions that need them.
"""

from grpo_jax.data._arithmetic import ALPHABET
from grpo_jax.data._arithmetic import ArithmeticDemonstrations
from grpo_jax.data._arithmetic import ArithmeticSource
from grpo_jax.data._arithmetic import arithmetic_demonstrations
from grpo_jax.data._jsonl import JsonlSource
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
  'mixture',
  'prompt_stream',
  'take',
)
