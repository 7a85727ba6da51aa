"""What a run cannot do although each of its fields may have its value.

These checks need the model, its widths and the devices, so they come after
those of `grpo_jax.config`.
"""

from grpo_jax.config import Config
from grpo_jax.training import build_model


def check_context(config: Config) -> None:
  """Raises a ValueError if a row is longer than the model was made for.

  Args:
    config: With widths.
  """
  known = build_model.context_tokens(config.model.path)
  if known is None or config.model.beyond_context:
    return
  prompt, completion = longest(config)
  if prompt + completion > known:
    raise ValueError(
      f'A prompt of {prompt} tokens (data.prompt_buckets) and a completion of '
      f'{completion} have {prompt + completion} tokens together, but the model '
      f'in {config.model.path} was made for {known} (max_position_embeddings '
      'in its config.json); give shorter ones, or '
      'config.model.beyond_context=True if this is meant.'
    )


def longest(config: Config) -> tuple[int, int]:
  """The most tokens of a prompt, and of a completion.

  Args:
    config: With widths.
  """
  completion = config.sampler.max_tokens
  if config.warm_up.steps:  # the width is that of the longest demonstration
    completion = max(completion, *config.data.completion_buckets)
  return max(config.data.prompt_buckets), completion


def check_rows(config: Config, shards: int) -> None:
  """Raises a ValueError if micro-batches do not split over the data shards.

  JAX would refuse them too, but only once the first batch is laid out.
  """
  # 0 passes: `LayoutSpec` chooses.
  warm_up_rows = config.warm_up.micro_rows if config.warm_up.steps else 0
  for name, number in (
    ('learner.micro_rows', config.learner.micro_rows),
    ('warm_up.micro_rows', warm_up_rows),
  ):
    if number % shards:
      raise ValueError(
        f'{name}={number} does not split over {shards} data shards; give a '
        'multiple, or change config.mesh.'
      )
