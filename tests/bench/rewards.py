"""The reward of the benchmark."""


def low_half(prompt: str, completion: str, example) -> float:
  """The share of ids in the lower half of the vocabulary."""
  del prompt, completion
  ids = example['completion_ids']
  return sum(i < example['half'] for i in ids) / len(ids)
