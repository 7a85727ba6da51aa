"""A reward of one's own, which a config beside this file names."""


def digits(prompt: str, completion: str, example: dict) -> float:
  """The share of the digits of the answer that stand in their places.

  >>> digits('47+85=', '231', {'answer': '231'})
  1.0
  >>> digits('47+85=', '201', {'answer': '231'}) == 2 / 3
  True

  Args:
    prompt: A sum, such as '47+85='.
    completion: What the model has written.
    example: The record of the prompt; its answer is written backwards.

  Returns:
    From 0 to 1.
  """
  del prompt
  answer = example['answer']
  right = sum(x == y for x, y in zip(completion, answer))
  return right / max(len(answer), len(completion))
