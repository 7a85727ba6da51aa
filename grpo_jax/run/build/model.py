"""Builds the model of a run, and the parameters that it begins with.

With `config.model.path`, shape and weights come from there: from a Hugging Face
folder, a GGUF file, or the workdir of another run. Otherwise the config has the
shape, and weights are random.

A model of your own is an object from Python, as `grpo_jax.train(model=...)`; or
`config.model.path` is `'module:function'`, the name of a function without
arguments that returns what `models.foreign.from_nnx` returns.
"""

import dataclasses
import functools
import inspect
import pathlib
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import models
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.data import hub
from grpo_jax.mesh import random_keys
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.models import lora
from grpo_jax.models import quantized
from grpo_jax.models import weights
from grpo_jax.run.build.specs import WeightsSpec
from grpo_jax.run.keep import checkpoint
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep import records
from grpo_jax.run.keep.checkpoint import Checkpoints
from grpo_jax.run.keep.objects import Objects

Config = config_lib.Config

# Fields of `config.model` that say how a model is computed. All others are its
# shape, which `model.path` brings along.
COMPUTED = (
  'compute_dtype',
  'residual_dtype',
  'remat',
  'unroll',
  'attention',
)


class RunWeights(NamedTuple):
  """The policy of another run, as weights to begin with."""

  workdir: pathlib.Path
  run: Config  # of the other run

  def config(self, vocab_size: int, **computed: Any) -> models.ModelConfig:
    """The shape of the other run's model, without its adapters."""
    shape = transformer(self.run, vocab_size).config
    return dataclasses.replace(shape, **computed, lora=None)


Source = weights.Source | RunWeights


def source(path: str, needs_weights: bool = True) -> Source:
  """Opens what `config.model.path` names; no weights are read yet.

  Args:
    path: A folder, a GGUF file, a name on the Hub, whose files are downloaded
      if they are not here, or the workdir of another run.
    needs_weights: Whether weights must be there, and not the shape alone.

  Raises:
    ValueError: There is nothing that could be read; see `weights.source`.
  """
  path = data.local_model(path, 'weights' if needs_weights else 'shape')
  described = pathlib.Path(path).expanduser() / 'config.json'
  # A folder may be written anew while this process lives.
  written = described.stat().st_mtime_ns if described.is_file() else None
  return _opened(path, written, needs_weights)


@functools.lru_cache(maxsize=4)  # a run opens its source several times
def _opened(path: str, written: int | None, needs_weights: bool) -> Source:
  """`source`; `written` is when the description was written."""
  del written
  workdir = pathlib.Path(path).expanduser()
  if not (workdir / 'checkpoints').is_dir():
    if (workdir / 'versions.json').exists():
      raise ValueError(
        f'There is no checkpoint in {workdir}; give the workdir of a run that '
        'has trained.'
      )
    return weights.source(path, needs_weights)
  run = records.saved_config(workdir)
  theirs = run.model.path
  if objects_lib.is_object(theirs) or importing.is_function(theirs):
    raise ValueError(
      f'The run in {workdir} trained a model of your own ({theirs}), whose '
      'weights fit no other; give the same model, with these parameters, in '
      'Python.'
    )
  return RunWeights(workdir, run)


def first_path(path: str) -> str:
  """The model that a run began with, by way of the runs before it; '' if none.

  Raises:
    ValueError: One of these runs was of another version.
  """
  while path:
    workdir = pathlib.Path(path).expanduser()
    if not (workdir / 'checkpoints').is_dir():
      break
    path = records.saved_config(workdir).model.path
  return path


def is_run(path: str) -> bool:
  """Whether `config.model.path` names the workdir of another run."""
  return isinstance(source(path, needs_weights=False), RunWeights)


def transformer(
  config: Config, vocab_size: int, needs_weights: bool = True
) -> models.Transformer:
  """The model of a run.

  Args:
    config: Has the shape, or says where it comes from.
    vocab_size: Token ids of the tokenizer. The embedding has as many rows, if
      `model.path` does not bring one.
    needs_weights: Whether weights must be there, and not the shape alone.

  Raises:
    ValueError: The source cannot be read, the config contradicts it, or the
      tokenizer has more ids than the embedding has rows.
  """
  fields = dataclasses.asdict(config.model)
  path = fields.pop('path')
  del fields['beyond_context']  # no part of the shape
  # In the config, 0 stands for no window; in a `LayerKind`, None does.
  windows = fields.pop('window_tokens')
  fields['pattern'] = tuple(models.LayerKind(size or None) for size in windows)
  adapters = None
  if config.lora.rank:
    adapters = models.LowRank(
      config.lora.rank,
      config.lora.alpha,
      config.lora.targets,
      _quantized(config.lora.base_dtype),
    )
  if not path:
    shape = models.ModelConfig(vocab_size, **fields)
    return models.Transformer(dataclasses.replace(shape, lora=adapters))
  computed = {name: fields.pop(name) for name in COMPUTED}
  found = source(path, needs_weights)
  if isinstance(found, RunWeights):
    computed['vocab_size'] = vocab_size
  shape = found.config(**computed)
  _refuse_contradiction(config, fields, shape)
  data.check_vocab_size(vocab_size, shape.vocab_size)
  return models.Transformer(dataclasses.replace(shape, lora=adapters))


def _quantized(base_dtype: str) -> str | None:
  """How the weights of layers are quantized beside adapters, if they are."""
  return base_dtype if base_dtype in models.LowRank.QUANTIZED else None


def own_model(config: Config, objects: Objects) -> foreign.Pretrained | None:
  """The run's own model; None if its model is one of this package.

  Raises:
    ValueError: `config.model.path` names something that cannot be used.
  """
  path = config.model.path
  if objects.model is not None:
    return objects.model
  return _called(path) if importing.is_function(path) else None


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


def check_own(model: foreign.Foreign, config: Config, vocab_size: int) -> None:
  """Raises a ValueError if a run asks for more than the model can do.

  Args:
    model: The run's own model.
    config: Of the run that asks.
    vocab_size: Token ids of the tokenizer.
  """
  learner, name = config.learner, model.name
  usual = dataclasses.asdict(config_lib.Model(path=config.model.path))
  changed = [
    f'{field}={value!r}'
    for field, value in dataclasses.asdict(config.model).items()
    if value != usual[field]
  ]
  for is_wrong, text in (
    (
      vocab_size > model.vocab_size,
      f'The tokenizer has {vocab_size} token ids, but {name} has logits for '
      f'{model.vocab_size}; give the tokenizer of this model.',
    ),
    (
      learner.layout not in ('auto', 'padded'),
      f'config.learner.layout={learner.layout!r}, but {name}, a model of your '
      "own, reads padded rows alone; set it to 'auto' or 'padded'.",
    ),
    (
      config.lora.rank,
      f'config.lora.rank={config.lora.rank}, but {name} is a model of your '
      'own, which gets no adapters; set it to 0.',
    ),
    (
      learner.expert_balance,
      f'config.learner.expert_balance={learner.expert_balance}, but nothing is '
      f'known of experts in {name}, a model of your own; set it to 0.',
    ),
    (
      config.mesh.context > 1,
      f'config.mesh.context={config.mesh.context}, but {name}, a model of your '
      'own, reads whole rows; set it to 1.',
    ),
    (
      changed,
      f'config.model has {", ".join(changed)}, which nothing reads, because '
      f'{name} is a model of your own; leave out all but model.path.',
    ),
  ):
    if is_wrong:
      raise ValueError(text)


def context_tokens(path: str) -> int | None:
  """How many tokens the model of `model.path` was made for.

  Returns:
    None if that is not known: of random weights, or of a model of your own.
  """
  if not path or objects_lib.is_object(path) or importing.is_function(path):
    return None
  found = source(path, False)
  if isinstance(found, RunWeights):
    return context_tokens(found.run.model.path)
  return found.context_tokens


# The kind of device, as JAX calls it, that each kernel runs on.
_DEVICES = {'splash': 'tpu', 'cudnn': 'gpu'}


def check_device(config: Config, mesh: jax.sharding.Mesh) -> None:
  """Raises a ValueError if `model.attention` is for devices of another kind."""
  attention, found = config.model.attention, mesh.devices.flat[0].platform
  needed = _DEVICES.get(attention)
  if needed and needed != found:
    raise ValueError(
      f'config.model.attention={attention!r} runs on {needed.upper()}s, but '
      f"the devices here are of kind {found!r}; give 'auto'."
    )


def _refuse_contradiction(
  config: Config, fields: dict[str, Any], shape: models.ModelConfig
) -> None:
  """Raises a ValueError if the config has a shape of its own as well."""
  usual = config_lib.Model()
  values = dataclasses.asdict(config.model)
  for name, value in fields.items():
    field = 'window_tokens' if name == 'pattern' else name
    if values[field] != getattr(usual, field) and value != getattr(shape, name):
      raise ValueError(
        f'config.model.{field}={values[field]}, but the model in '
        f'{config.model.path} has {getattr(shape, name)}; leave the field out, '
        'because the shape comes with the weights.'
      )


class Parameters(NamedTuple):
  """Trees of arrays, shapes or shardings."""

  trained: Any
  frozen: Any  # None if every parameter is trained


def adapter_base(path: str, origin: weights.Source | None) -> dict[str, Any]:
  """What `weights.save_adapter` is told of the model that a run began with."""
  base, revision = _base(path)
  named = source(path) if path else None
  if isinstance(named, weights.Source):
    architecture = named.architecture
  else:  # a run has the class that it is written as, not its origin's
    architecture = origin and weights.written_as(origin.architecture)
  return {'base': base, 'revision': revision, 'architecture': architecture}


def _base(path: str) -> tuple[str, str | None]:
  """How an adapter names its base from anywhere, and its commit on the Hub."""
  if name := hub.parse(path):
    return name.repository, name.commit or name.revision or None
  there = pathlib.Path(path).expanduser()
  return str(there.resolve()) if there.exists() else path, None


def origin_of(path: str) -> weights.Source | None:
  """The pretrained model that a run began with, perhaps by way of other runs.

  None if it all began with random weights.
  """
  first = first_path(path)
  found = source(first) if first else None
  assert not isinstance(found, RunWeights)
  return found


def split(model: models.Model, whole: Any) -> Parameters:
  """What is trained of a model's parameters, and what is not."""
  leaves = jax.tree_util.tree_leaves_with_path(whole)
  if all(model.trains(sharding.path_names(path)) for path, _ in leaves):
    return Parameters(whole, None)
  return Parameters(*lora.split(whole, model.trains))


def abstract(
  model: models.Model, mesh: jax.sharding.Mesh, base_dtype: str = 'float32'
) -> Parameters:
  """Shapes, dtypes and shardings of all parameters, as training holds them.

  Args:
    model: Whose parameters.
    mesh: From `sharding.make_mesh`.
    base_dtype: Of frozen matrices. What the model itself keeps quantized is in
      codes, and the other matrices beside it are bfloat16.
  """
  trained, beside = split(model, _described(model, mesh))
  return Parameters(trained, _stored(model, beside, base_dtype))


def abstract_frozen(
  model: models.Model, mesh: jax.sharding.Mesh, dtype: str
) -> Any:
  """As `abstract`, of a model of which nothing is trained.

  Args:
    model: Whose parameters.
    mesh: From `sharding.make_mesh`.
    dtype: Of its matrices.
  """
  return _stored(model, _described(model, mesh), dtype)


def _described(model: models.Model, mesh: jax.sharding.Mesh) -> Any:
  """Shapes and shardings of all parameters, as the model makes them."""
  shapes = model.abstract()
  place = sharding.param_shardings(mesh, shapes, model.logical_axes)
  return jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    place,
  )


def _stored(model: models.Model, beside: Any, base_dtype: str) -> Any:
  """Parameters that no update changes, with the dtypes that they have."""
  narrow = 'bfloat16' if _quantized(base_dtype) else base_dtype

  def stored(path, x):
    is_matrix = model.decays(sharding.path_names(path))
    dtype = jnp.dtype(narrow) if is_matrix else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

  return jax.tree_util.tree_map_with_path(stored, beside)


def weights_spec(config: Config, own: foreign.Pretrained | None) -> WeightsSpec:
  """Where the parameters of a run come from."""
  path, is_free = config.model.path, config.model.beyond_context
  return WeightsSpec(
    path=path,
    own=own and own.params,
    seed=config.seed,
    has_adapters=config.lora.rank > 0,
    base_dtype=config.lora.base_dtype,
    most_tokens=None if is_free else context_tokens(path),
  )


def initial(
  spec: WeightsSpec, model: models.Model, mesh: jax.sharding.Mesh
) -> Any:
  """The trained parameters that a run begins with, on the mesh.

  Adapters begin at random, and change nothing yet. Those of a model of your own
  are copies, because updates donate the parameters.

  Raises:
    ValueError: They hold a number that is not finite, or cannot be read.
  """
  wanted = abstract(model, mesh).trained
  if spec.own is not None:
    copy = lambda params: jax.tree.map(jnp.copy, params)
    place = jax.tree.map(lambda x: x.sharding, wanted)
    found = jax.jit(copy, out_shardings=place)(spec.own)
    return _checked(found, spec)
  assert isinstance(model, models.Transformer)
  if spec.path and not spec.has_adapters:
    return read(spec, model, mesh, 'float32', wanted)
  return _random(spec, lambda x: split(model, x).trained, model, wanted)


def frozen(
  spec: WeightsSpec, model: models.Model, mesh: jax.sharding.Mesh
) -> Any:
  """The parameters that no update changes, on the mesh; None if there are none.

  They are in no checkpoint: every start reads them again, from `model.path`, or
  draws them from the seed.

  Raises:
    ValueError: As `initial`.
  """
  dtype = spec.base_dtype
  wanted = abstract(model, mesh, dtype).frozen
  if wanted is None:
    return None
  assert isinstance(model, models.Transformer)
  if spec.path:
    return read(spec, model, mesh, dtype, wanted)

  def part(params):
    kept = split(model, params).frozen
    return jax.tree.map(lambda x, like: x.astype(like.dtype), kept, wanted)

  return _random(spec, part, model, wanted)


def _checked(params: Any, spec: WeightsSpec) -> Any:
  """The parameters, if all of their numbers are finite."""
  if not spec.path:  # drawn at random
    return params
  finite = jax.jit(
    lambda tree: jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)
  )(params)
  for path, fine in jax.tree_util.tree_leaves_with_path(finite):
    if not fine:
      raise ValueError(
        f'The parameter {"/".join(sharding.path_names(path))} of model.path='
        f'{spec.path!r} has entries that are NaN or infinite, so '
        'nothing can be learned; give weights that are whole.'
      )
  return params


def _random(spec: WeightsSpec, part, model: models.Transformer, wanted: Any):
  """A part of randomly drawn parameters."""
  place = jax.tree.map(lambda x: x.sharding, wanted)

  def drawn():
    return part(model.init(random_keys.key(spec.seed, 'init')))

  # One program with sharded results, so that no device holds the whole model.
  return jax.jit(
    drawn, out_shardings=place, compiler_options=sharding.quickly()
  )()


def read(
  spec: WeightsSpec,
  model: models.Transformer,
  mesh: jax.sharding.Mesh,
  dtype: str,
  wanted: Any,
) -> Any:
  """Those of the parameters from a path that are wanted, on the mesh.

  Args:
    spec: Has the path.
    model: Its shapes.
    mesh: Where they are to be.
    dtype: Of matrices.
    wanted: Shapes, dtypes and shardings.

  Raises:
    ValueError: They hold a number that is not finite, or cannot be read.
  """
  found = source(spec.path)
  if isinstance(found, RunWeights):
    return _checked(_read_run(found, model, mesh, dtype, wanted), spec)
  place = jax.tree.map(lambda x: x.sharding, wanted)
  plain = dataclasses.replace(model.config, lora=None)
  # Frozen weights may be rounded; a config that asks for it says so.
  return _checked(weights.load(found, plain, place, dtype, rounded=True), spec)


def _read_run(
  found: RunWeights,
  model: models.Transformer,
  mesh: jax.sharding.Mesh,
  dtype: str,
  wanted: Any,
) -> Any:
  """The newest policy of another run, its adapters merged into its weights."""
  if dtype != 'float32':
    flag = '' if _quantized(dtype) else f' --dtype={dtype}'
    raise ValueError(
      f"config.lora.base_dtype='{dtype}' would round the weights of the run in "
      f'{found.workdir}, and with them most of what it has learned; give '
      "'float32'. Or round them knowingly, with `grpo-jax convert "
      f'{found.workdir} FOLDER{flag}`, and give that folder.'
    )
  saved = policy(found, model.config.vocab_size, mesh)
  # In float32, or merging would round the adapters away where the weights
  # beside them are bfloat16.
  whole = quantized.whole(saved.params)
  whole = jax.tree.map(lambda x: x.astype(dtype), whole)
  adapters = saved.model.config.lora
  whole = whole if adapters is None else lora.merge(whole, adapters)
  leaves = jax.tree_util.tree_leaves_with_path(wanted)
  paths = {sharding.path_names(path) for path, _ in leaves}
  return lora.split(whole, lambda path: path in paths)[0]


class Policy(NamedTuple):
  """What a checkpoint of a run holds of its model."""

  model: models.Transformer
  params: Any  # all of them, adapters beside their weights
  step: int  # rollouts that the policy has learned from


def policy(
  found: RunWeights,
  vocab_size: int,
  mesh: jax.sharding.Mesh,
  which: str = 'latest',
) -> Policy:
  """The policy in a checkpoint of a run.

  Args:
    found: The run.
    vocab_size: Token ids of its tokenizer.
    mesh: Where the parameters are to be.
    which: The number of a rollout, 'latest' or 'best'.

  Raises:
    ValueError: There is no such checkpoint, or it has adapters of other weights
      than there are now.
  """
  model = transformer(found.run, vocab_size)
  wanted = abstract(model, mesh, found.run.lora.base_dtype).trained
  directory = found.workdir / 'checkpoints'
  best = found.run.checkpoint.best_metric
  with Checkpoints(directory, best_metric=best, read_only=True) as saves:
    saved = saves.restore(wanted, saves.named(which), field='params')
  if saved is None:
    raise ValueError(
      f'There is no checkpoint in {directory}; let that run train on, or give '
      'another workdir.'
    )
  spec = weights_spec(found.run, None)
  beside = frozen(spec, model, mesh)
  check_frozen(saved, fingerprints.compute(beside), spec.path)
  return Policy(model, lora.join(saved.state, beside), saved.step)


def check_frozen(
  saved: checkpoint.Restored, found: list[int], path: str
) -> None:
  """Checks the weights beside the adapters.

  Args:
    saved: A checkpoint.
    found: Fingerprint of the weights that there are now.
    path: Where they come from; see `config.Model`.

  Raises:
    ValueError: They are not those that the run began with.
  """
  if saved.host.get('frozen', []) != found:
    raise ValueError(
      f'The weights in config.model.path={path!r} are not those '
      'that this run began with, and its adapters belong to those; put them '
      'back, or give another workdir.'
    )
