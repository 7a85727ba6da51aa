"""Builds the teacher of a run: a second model, whose parameters never change.

It lies on the mesh of the learner by the same rules as the policy. Where the
policy has adapters and both have one path, the weights beside the adapters are
the teacher.
"""

import dataclasses
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import losses
from grpo_jax import models
from grpo_jax.config import importing
from grpo_jax.data import Tokenizer
from grpo_jax.learner import offload
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build.specs import TeacherSpec
from grpo_jax.run.keep.objects import is_object

Config = config_lib.Config


def teacher_spec(
  config: Config,
  method: losses.LossTransform,
  policy: models.Model,
  vocab_size: int,
  tokenizer: Tokenizer | None = None,
) -> TeacherSpec | None:
  """The teacher of a run; None if its method reads none.

  Args:
    config: Of the run.
    method: Says whether a teacher is needed.
    policy: The model that learns.
    vocab_size: Token ids of the policy.
    tokenizer: Of the policy; None, in a plan: that of the teacher is not
      compared with it, and its weights need not be there.

  Raises:
    ValueError: The method reads no teacher and there is one, or the reverse;
      the teacher cannot be read, or has another tokenizer.
  """
  _check_method(config, method, policy)
  path = config.teacher.path
  if not path:
    return None
  if is_object(path) or importing.is_function(path):
    raise ValueError(
      f'config.teacher.path={path!r} is a model of your own, which can be the '
      'policy alone; give a Hugging Face folder, a GGUF file, a name of the '
      'Hub, or the workdir of a run.'
    )
  if config.teacher.dtype != 'float32' and build_model.is_run(path):
    raise ValueError(
      f'config.teacher.dtype={config.teacher.dtype!r} would round the weights '
      f'of the run in {path}, and with them most of what it has learned; give '
      "'float32', or a folder that `grpo-jax convert` makes of the run."
    )
  if tokenizer is not None:
    # A path of nothing is refused as such, not for the tokenizer it lacks.
    build_model.source(path, needs_weights=False)
    check_tokenizer(path, tokenizer, data.tokenizer_from(path))
  own = dataclasses.replace(
    config,
    model=config_lib.Model(
      path=path,
      beyond_context=config.model.beyond_context,
      **{field: getattr(config.model, field) for field in build_model.COMPUTED},
    ),
    lora=config_lib.Lora(base_dtype=config.teacher.dtype),
  )
  is_base = is_policy_base(config)
  if is_base:
    assert isinstance(policy, models.Transformer)
    assert policy.config.lora is not None
    # Without targets there are no adapters, and quantized weights stay so.
    bare = dataclasses.replace(policy.config.lora, targets=())
    shape = dataclasses.replace(policy.config, lora=bare)
    model = models.Transformer(shape)
  else:
    exists = tokenizer is not None
    model = build_model.transformer(own, vocab_size, needs_weights=exists)
  if tokenizer is not None:
    # Those that the policy never draws have no probability for either.
    unused = tokenizer.unused_ids(model.vocab_size)
    model = model.drawing_without(unused)
  return TeacherSpec(
    model=model,
    weights=build_model.weights_spec(own, None),
    offload=config.teacher.offload,
    is_base=is_base,
  )


def _check_method(
  config: Config, method: losses.LossTransform, policy: models.Model
) -> None:
  """Raises a ValueError unless the method reads what there is of a teacher."""
  path, name = config.teacher.path, config.learner.method
  urls = config.teacher.urls
  reads = sorted(losses.OF_TEACHER & method.requires)
  if reads and not (path or urls):
    raise ValueError(
      f'The method {name!r} reads {reads[0]}, and config.teacher.path is '
      'empty; give the model that is to be the teacher.'
    )
  if (path or urls) and not reads:
    given = f'path={path!r}' if path else f'urls={urls!r}'
    raise ValueError(
      f'config.teacher.{given}, but the method {name!r} reads no '
      "logp_teacher; give a method that does, such as 'opd', or no teacher."
    )
  of_top = sorted({'logp_top', 'teacher_top_logp'} & method.requires)
  if of_top and not method.top_tokens:
    raise ValueError(
      f'The method {name!r} reads {of_top[0]}, but does not say of how many of '
      "the teacher's likeliest tokens; give the transform that reads it "
      'top_tokens, as in transform._replace(top_tokens=16).'
    )
  if method.top_tokens > policy.vocab_size:
    raise ValueError(
      f"The method {name!r} reads the teacher's {method.top_tokens} likeliest "
      f'tokens, but the policy has {policy.vocab_size}; give a smaller number '
      'in config.learner.method_kwargs.'
    )


def is_policy_base(config: Config) -> bool:
  """Whether the weights beside the policy's adapters are the teacher."""
  return config.lora.rank > 0 and config.teacher.path == config.model.path


def check_tokenizer(path: str, own: Tokenizer, other: Tokenizer) -> None:
  """Raises a ValueError unless a teacher has every token of the policy.

  Args:
    path: Of the teacher.
    own: The policy's tokenizer.
    other: The teacher's, which may have more tokens.
  """
  known = other.backend.get_vocab()
  ids = own.backend.get_vocab()
  differ = [token for token, n in ids.items() if known.get(token) != n]
  if differ:
    token = min(differ, key=lambda token: ids[token])
    has = f'the id {known[token]}' if token in known else 'no id'
    raise ValueError(
      f'The tokenizer of config.teacher.path={path!r} has {has} for {token!r}, '
      f'whose id is {ids[token]} for the policy ({len(differ):,} of '
      f'{len(ids):,} tokens differ), but a teacher scores ids; give one with '
      "the policy's tokenizer."
    )


def abstract(spec: TeacherSpec, mesh: jax.sharding.Mesh, frozen: Any) -> Any:
  """Shapes, dtypes and shardings of the teacher's parameters.

  Args:
    spec: Of the teacher.
    mesh: Of the learner.
    frozen: Those of the parameters beside the policy's adapters.
  """
  if spec.is_base:
    return frozen
  found = build_model.abstract_frozen(spec.model, mesh, spec.weights.base_dtype)
  if not spec.offload:
    return found
  offload.check(mesh, 'teacher.offload')
  away = offload.on_host(jax.tree.map(lambda x: x.sharding, found))
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    found,
    away,
  )


def params(spec: TeacherSpec, mesh: jax.sharding.Mesh, frozen: Any) -> Any:
  """The teacher's parameters, on the mesh or in the memory of its hosts.

  They are in no checkpoint: every start reads them again.

  Args:
    spec: Of the teacher.
    mesh: Of the learner.
    frozen: The parameters beside the policy's adapters.

  Raises:
    ValueError: They cannot be read, or a number in them is not finite.
  """
  if spec.is_base:
    return frozen
  dtype = spec.weights.base_dtype
  wanted = build_model.abstract_frozen(spec.model, mesh, dtype)
  found = build_model.read(spec.weights, spec.model, mesh, dtype, wanted)
  if not spec.offload:
    return found
  place = jax.tree.map(lambda x: x.sharding, abstract(spec, mesh, frozen))
  return jax.device_put(found, place)


def check_unchanged(saved: Any, found: list[int], path: str) -> None:
  """Checks that the teacher is the one that a checkpoint was learned from.

  Args:
    saved: A `checkpoint.Restored`.
    found: Fingerprint of the teacher's parameters that there are now; [] of
      none.
    path: Where they come from; see `config.Teacher`.

  Raises:
    ValueError: It is another one.
  """
  if saved.host.get('teacher', []) != found:
    raise ValueError(
      f'The weights in config.teacher.path={path!r} are not those that this '
      'run has learned from; put them back, or give another workdir.'
    )
