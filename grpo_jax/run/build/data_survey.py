"""The data of a config, as a survey of it needs them."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from grpo_jax import rewards
from grpo_jax.config import Config
from grpo_jax.config import Reward
from grpo_jax.config import plain_text
from grpo_jax.data import survey as survey_lib
from grpo_jax.run.build import data as build_data


def survey(
  config: Config, show: int, most: int, tell: survey_lib.Tell
) -> survey_lib.Survey:
  """Reads the data of a config; the model and the devices are not needed.

  Args:
    config: Names the data, the tokenizer and the rewards.
    show: How many prompts to show of each split.
    most: How many records to read of each source; 0 for all.
    tell: Is called before every record.

  Raises:
    ValueError: The tokenizer or a source cannot be used.
  """
  tokenizer = build_data.tokenizer_of(config)
  trained, weights = build_data.train(config)
  names = [source.name for source in build_data.sources_in(config.data.train)]
  held_out = [
    (source.name, build_data.open_source(config, source, 'heldout'))
    for source in build_data.sources_in(config.data.heldout)
  ]
  problem, widths = '', config.data.prompt_buckets
  if not widths:
    try:
      config = build_data.with_widths(config, tokenizer)
      widths = config.data.prompt_buckets
    except ValueError as error:
      problem = plain_text.said(error)
  found = survey_lib.survey(
    survey_lib.Reader(
      tokenizer,
      tuple(sorted(widths)),
      verifiers(config.rewards),
      config.data.too_long == 'drop',
    ),
    [*zip(names, trained, weights, strict=True)],
    held_out,
    config.steps * config.sampler.prompts,
    config.seed,
    show,
    most,
    tell,
  )
  return found._replace(widths_problem=problem)


def verifiers(
  several: Sequence[Reward],
) -> list[tuple[Callable[..., float], dict[str, Any]]]:
  """Rewards that can be tried on an empty completion at no cost.

  Returns:
    Functions and their arguments.

  Raises:
    ValueError: This package has no such reward.
  """
  tried = 'grpo_jax.rewards.verifiers', 'grpo_jax.rewards.generated_code'
  found = []
  for reward in several:
    if ':' in reward.name and not reward.name.startswith('grpo_jax.'):
      continue  # a user's own, which may do anything
    function = rewards.resolve(reward.name)
    # `reasoning_gym` needs a process of its own for each record.
    if function is not rewards.reasoning_gym and str(
      getattr(function, '__module__', '')
    ).startswith(tried):
      found.append((function, dict(reward.kwargs)))
  return found
