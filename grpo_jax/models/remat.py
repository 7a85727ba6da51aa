"""What the backward pass finds of a layer, and what it computes again.

A policy has a name, `ModelConfig.remat`; `POLICIES` says what each of them
keeps. What `layers.keep_products` drops is computed again under all of them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

POLICIES = ('none', 'layer', 'attention', 'offload')
"""Of each layer are kept: its matrix products and what attention needs; its
input; its input, and output and log-sum-exp of attention; its input, in the
host's memory. Layers that make up one repetition of `ModelConfig.pattern` have
one input."""

ATTENTION = 'attention'
"""The name by which `jax.checkpoint` knows what 'attention' keeps."""

_INPUT = 'input'


def again(run: Callable[..., Any], policy: str) -> Callable[..., Any]:
  """The same function, whose backward pass computes it again.

  Args:
    run: Of the kinds of some layers, which are static, of the residual stream,
      and of the parameters of these layers.
    policy: One of `POLICIES`.

  Returns:
    `run` itself under `'none'`.
  """
  if policy == 'none':
    return run
  kept = None
  if policy == 'attention':
    kept = jax.checkpoint_policies.save_only_these_names(ATTENTION)
  if policy == 'offload':
    run = _named(run)
    kept = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[_INPUT],
      offload_src='device',
      offload_dst='pinned_host',
    )
  return jax.checkpoint(run, static_argnums=0, policy=kept)


def _named(run: Callable[..., Any]) -> Callable[..., Any]:
  """The same function, which names the residual stream that it is given."""

  def named(kinds, x, layers):
    return run(kinds, checkpoint_name(x, _INPUT), layers)

  return named
