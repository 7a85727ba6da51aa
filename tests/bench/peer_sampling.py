"""How transformers samples in the benchmarks; needs no trl."""

import transformers


def settings(tokens: int) -> transformers.GenerationConfig:
  """So many tokens of each prompt from the whole policy, in a static cache."""
  return transformers.GenerationConfig(
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_new_tokens=tokens,
    max_new_tokens=tokens,
    cache_implementation='static',
    pad_token_id=0,
    eos_token_id=None,
  )
