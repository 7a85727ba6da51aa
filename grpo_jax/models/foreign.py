"""A model of your own: any Flax NNX module from tokens to logits.

Such a module is called with tokens, positions, a cache and a mask, and returns
logits and the cache, as those of Tunix do. `from_nnx` splits it into structure
and parameters and makes a record of what it can do, a `Foreign`. Everything
outside is then a pure function of the parameters, as for `Transformer`.

A `Foreign` is a `protocol.Model`, but it has no `hidden` and `head`: its logits
come at once. So its `score` reads padded rows alone, and it has an engine of
its own, `engines.PlainEngine`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from grpo_jax.config import plain_text
from grpo_jax.mesh import sharding
from grpo_jax.models.axes import MatrixAxes
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import reached
from grpo_jax.models.protocol import LOGP
from grpo_jax.models.protocol import Scores
from grpo_jax.models.protocol import Wanted
from grpo_jax.models.scores import token_scores
from grpo_jax.models.scores import without_ids

Array = jax.Array
Params = dict[str, Any]
Path = tuple[str, ...]
# (module, tokens, positions, cache, mask) -> (logits, cache)
Call = Callable[[Any, Array, Array, Any, Array], tuple[Array, Any]]
# (module, rows, columns) -> cache
InitCache = Callable[[Any, int, int], Any]

_EXPECTED = (
  'a pair (logits, cache) with float logits [rows, tokens, vocabulary] is '
  'needed; give from_nnx(module, call=...), a function (module, tokens, '
  'positions, cache, mask) that returns it'
)


def in_order(module, tokens, positions, cache, mask):
  """Calls a module whose arguments come in this order, as Tunix's do."""
  return module(tokens, positions, cache, mask)


def matrices(path: Path, shape: tuple[int, ...]) -> bool:
  """Whether a parameter has two axes or more: weight decay's default."""
  del path
  return len(shape) > 1


def largest(path: Path, shape: tuple[int, ...]) -> tuple[str | None, ...]:
  """The largest axis is split over `fsdp`: the default of `logical_axes`.

  >>> largest(('kernel',), (64, 256))
  (None, 'width')
  """
  del path
  if not shape:
    return ()
  split = shape.index(max(shape))
  # `sharding.RULES` gives the axis of this name to `fsdp`.
  return tuple('width' if i == split else None for i in range(len(shape)))


def written_as_matrices(path: Path, shape: tuple[int, ...]) -> MatrixAxes:
  """Two axes are inputs and outputs; all others are outputs together.

  >>> written_as_matrices(('kernel',), (64, 256))
  MatrixAxes(inputs=(-2,), outputs=(-1,), hidden=True)
  """
  del path
  if len(shape) == 2:
    return MatrixAxes((-2,), (-1,))
  return MatrixAxes((), tuple(range(-len(shape), 0)))


# Compared and hashed by identity: a static argument of compiled programs.
@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
  """What a module that is not ours can do; made by `from_nnx`.

  Attributes:
    name: The name of the module's class.
    vocab_size: Logits of each token, `V`.
    attention: `'mask'` or `'causal'`; see `from_nnx`.
    call: Calls the module.
    init_cache: Makes an empty cache; None if the module has none.
    shapes: The parameter tree as shapes, float32.
    unused_ids: Ids that are never drawn; see `ModelConfig`.
  """

  name: str
  vocab_size: int
  attention: str
  call: Call
  init_cache: InitCache | None
  shapes: Params
  _graphdef: Any
  _variables: Mapping[tuple[Any, ...], Any]  # of parameters, without values
  _rest: Mapping[tuple[Any, ...], Any]  # all other variables, with values
  _decays: Callable[[Path, tuple[int, ...]], bool]
  _axes: Callable[[Path, tuple[int, ...]], tuple[str | None, ...]]
  _matrices: Callable[[Path, tuple[int, ...]], MatrixAxes]
  unused_ids: tuple[tuple[int, int], ...] = ()
  # Whether the module has experts is not known here, nor anything of its heads.
  score_routed = file_shape = key_cost = None
  kv_heads = 0
  takes_shards = False

  @property
  def bytes_per_token(self) -> int:
    """What training keeps of a token at least: logits, softmax, gradient.

    What the layers keep is not known here.
    """
    return 3 * 4 * self.vocab_size

  def module(self, params: Params) -> Any:
    """A new module with these parameters, in the dtypes that it had."""
    # New variables in every call: a module may write into them while it is
    # traced (a counter of random numbers, say), and nothing of that is kept.
    values = _flat(params)
    flat = {
      path: variable.replace(values[_names(path)].astype(variable.dtype))
      for path, variable in self._variables.items()
    }
    flat |= {path: v.replace(v.get_value()) for path, v in self._rest.items()}
    return nnx.merge(self._graphdef, nnx.from_flat_state(list(flat.items())))

  def logits(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    cache: Any,
    mask: Array,
  ) -> tuple[Array, Any]:
    """Calls the module with these parameters.

    Args:
      params: The tree that `from_nnx` returned.
      tokens: i32[B,Q].
      positions: i32[B,Q], counted from the start of each prompt.
      cache: From `empty_cache` or an earlier call; None: the keys are the
        tokens of this call.
      mask: bool[B,Q,S], which of the S keys each token attends to. The keys are
        the columns of the cache, or the tokens of this call (S = Q).

    Returns:
      f32[B,Q,V], with `scores.UNUSED_LOGIT` at `unused_ids`, and the cache
      with Q more columns.
    """
    module = self.module(params)
    logits, cache = self.call(module, tokens, positions, cache, mask)
    logits = logits.astype(jnp.float32)
    return without_ids(logits, self.unused_ids), cache

  def drawing_without(self, ids: Sequence[tuple[int, int]]) -> 'Foreign':
    """The same model as a policy that never draws ids of these runs."""
    # Programs are compiled for the very object, so it is kept if it can be.
    return dataclasses.replace(self, unused_ids=tuple(ids)) if ids else self

  def empty_cache(self, params: Params, rows: int, columns: int) -> Any:
    """A cache for `columns` tokens of each row; the module must have one."""
    assert self.init_cache is not None
    return self.init_cache(self.module(params), rows, columns)

  def sampler_params(self, params: Params) -> Params:
    """A copy of the parameters in the dtypes that the module has."""
    flat = _flat(params)
    return traverse_util.unflatten_dict(
      {
        _names(path): jnp.copy(flat[_names(path)].astype(variable.dtype))
        for path, variable in self._variables.items()
      }
    )

  def score(
    self,
    params: Params,
    layout: Layout,
    temperature: float = 1.0,
    wanted: Wanted = LOGP,
    *,
    forward_mode: bool = False,
  ) -> Scores:
    """Log-probabilities of the completions in padded rows; see `scores.score`.

    The logits of whole rows exist at once, f32[R,S,V]; fewer rows in a
    micro-batch take less memory.

    Args:
      params: The tree that `from_nnx` returned.
      layout: From `layout.padded_rows`.
      temperature: The temperature of the sampler.
      wanted: What else is asked for.
      forward_mode: Not read: whether `jax.jvp` passes depends on the module.
    """
    del forward_mode
    rows, columns = layout.tokens.shape
    # Not `layout.position`, which is 0 in padding: a module that derives a mask
    # from positions would attend to it.
    positions = jnp.broadcast_to(jnp.arange(columns)[None], (rows, columns))
    mask = causal_mask(rows, columns)
    if layout.reach is not None:  # completions are trees
      used = jnp.asarray(layout.segment) > 0
      positions = jnp.where(used, layout.position, positions)
      mask = reached(layout.reach, columns)
    logits, _ = self.logits(params, layout.tokens, positions, None, mask)
    logits = sharding.constrain_rows(logits)
    # A padded row has one slot.
    column = jnp.asarray(layout.column)[:, 0, :, None]
    logits = jnp.take_along_axis(logits, column, axis=1)
    target = jnp.asarray(layout.target)[:, 0]
    wanted = jax.tree.map(lambda ids: ids[:, 0], wanted)
    scores = token_scores(logits / temperature, target, wanted)
    return jax.tree.map(lambda x: x[:, None], scores)

  def shares_prompts(self, platform: str) -> bool:
    """Whether the module obeys the mask; else branches read copies.

    It reads padded rows, and no prompt is shared in these.
    """
    del platform
    return self.attention == 'mask'

  @property
  def reads_branches(self) -> bool:
    """Whether the module obeys the mask, by which branches are told apart."""
    return self.attention == 'mask'

  def flops_per_token(self, context: ArrayLike, with_head: bool = True) -> None:
    """None: what the module computes is not known here."""

  def abstract(self) -> Params:
    """`shapes`."""
    return self.shapes

  def trains(self, path: Path) -> bool:
    """True: a module gets no adapters."""
    del path
    return True

  def logical_axes(self, path: Path, rank: int) -> tuple[str | None, ...]:
    """The names of a parameter's axes; see `sharding.param_shardings`."""
    del rank
    return self._axes(path, self._shape(path))

  def matrix_axes(self, path: Path, rank: int) -> MatrixAxes:
    """Which axes of a parameter are inputs, and which are outputs.

    One that has an axis of the vocabulary's size is taken for an embedding or
    an output layer.
    """
    del rank
    shape = self._shape(path)
    found = self._matrices(path, shape)
    return found._replace(hidden=found.hidden and self.vocab_size not in shape)

  def _shape(self, path: Path) -> tuple[int, ...]:
    return _flat(self.shapes)[path].shape

  def decays(self, path: Path) -> bool:
    """Whether weight decay acts on the parameter at this path."""
    return self._decays(path, self._shape(path))


class Pretrained(NamedTuple):
  """A model of your own, and the parameters that a run begins with."""

  model: Foreign
  params: Params  # float32, nested dicts


def from_nnx(
  module: nnx.Module,
  call: Call = in_order,
  init_cache: InitCache | None = None,
  attention: str = 'mask',
  decays: Callable[[Path, tuple[int, ...]], bool] = matrices,
  logical_axes: Callable[
    [Path, tuple[int, ...]], tuple[str | None, ...]
  ] = largest,
  matrix_axes: Callable[
    [Path, tuple[int, ...]], MatrixAxes
  ] = written_as_matrices,
) -> Pretrained:
  """Makes a module trainable here: the `model` that `grpo_jax.train` takes.

  Args:
    module: Maps tokens to logits. Its `nnx.Param` are trained; other variables
      stay as they are now.
    call: Called as `call(module, tokens, positions, cache, mask)` with i32[B,Q]
      tokens and positions, and bool[B,Q,S]. It returns logits f[B,Q,V] and the
      new cache. `cache` is None in training, where S = Q.
    init_cache: Called as `init_cache(module, rows, columns)`. It returns an
      empty cache, any tree of arrays, whose shapes and dtypes no call changes.
      Every row writes its next columns in the order of the calls. None: the
      engine computes the whole row anew for every token.
    attention: `'mask'` if a token attends to the keys that the mask allows and
      to no others; where episodes branch, these are not all that came before.
      `'causal'` if the module ignores the mask, or adds a window of its own: it
      attends to what came before. With a cache, prompts are then read token by
      token, because a cache must have no gaps.
    decays: From a parameter's path and shape to whether weight decay acts on
      it; by default on arrays of two axes and more.
    logical_axes: From a parameter's path and shape to the names of its axes in
      `sharding.RULES`; by default the largest axis is split over `fsdp`.
    matrix_axes: From a parameter's path and shape to its `models.MatrixAxes`,
      which the optimizers Muon and Adafactor read; by default an array of two
      axes is a matrix [inputs, outputs], and any other a vector.

  Returns:
    A `Pretrained` (model, params). The parameters are float32; the module
    computes in the dtypes that its own have now.

  Raises:
    ValueError: `attention` is neither of the two, or a call does not return
      what is needed.

  >>> import jax
  >>> from flax import nnx
  >>> class Bigram(nnx.Module):
  ...   def __init__(self, rngs):
  ...     self.table = nnx.Embed(8, 8, rngs=rngs)
  ...   def __call__(self, tokens, positions, cache, mask):
  ...     return self.table(tokens), cache
  >>> model, params = from_nnx(Bigram(nnx.Rngs(0)))
  >>> model.vocab_size, params['table']['embedding'].shape
  (8, (8, 8))
  """
  if attention not in ('mask', 'causal'):
    raise ValueError(
      f"from_nnx got attention={attention!r}; give 'mask' if the module obeys "
      "the mask, or 'causal'."
    )
  if not isinstance(module, nnx.Module):
    raise ValueError(
      f'from_nnx got {module!r:.60} of type {type(module).__name__}; give an '
      'instance of a flax.nnx.Module.'
    )
  graphdef, trained, rest = nnx.split(module, nnx.Param, ...)
  variables, values = {}, {}
  for path, variable in nnx.to_flat_state(trained):
    value = jnp.asarray(variable.get_value())
    variables[path] = variable.replace(jax.typeof(value))
    values[_names(path)] = value
  params = traverse_util.unflatten_dict(
    {path: jnp.array(value, jnp.float32) for path, value in values.items()}
  )
  model = Foreign(
    name=type(module).__qualname__,
    vocab_size=0,
    attention=attention,
    call=call,
    init_cache=init_cache,
    shapes=jax.eval_shape(lambda: params),
    _graphdef=graphdef,
    _variables=variables,
    _rest=dict(nnx.to_flat_state(rest)),
    _decays=decays,
    _axes=logical_axes,
    _matrices=matrix_axes,
  )
  vocab_size = _checked_vocab_size(model)
  return Pretrained(dataclasses.replace(model, vocab_size=vocab_size), params)


def causal_mask(rows: int, columns: int) -> Array:
  """Each token attends to itself and to those before it, bool[B,S,S]."""
  mask = jnp.tril(jnp.ones((columns, columns), bool))
  return jnp.broadcast_to(mask[None], (rows, columns, columns))


def _checked_vocab_size(model: Foreign) -> int:
  """Traces the module once with each kind of cache; returns `V`."""
  tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
  none = jax.ShapeDtypeStruct((2, 3, 3), bool)
  vocab_size, _ = _traced(model, tokens, None, none)
  if model.init_cache is not None:
    cache = jax.eval_shape(
      lambda params: model.empty_cache(params, 2, 4), model.shapes
    )
    mask = jax.ShapeDtypeStruct((2, 3, 4), bool)
    found, after = _traced(model, tokens, cache, mask)
    if found != vocab_size or _shapes(after) != _shapes(cache):
      raise ValueError(
        f'The call of {model.name} got the cache {_shapes(cache):.200} and '
        f'returned {_shapes(after):.200}; return the cache with the shapes and '
        'dtypes that it had, because a loop on the device draws the tokens.'
      )
  return vocab_size


def _traced(model: Foreign, tokens, cache, mask) -> tuple[int, Any]:
  """The vocabulary's size and the cache that a call returns, as shapes."""
  try:
    # Not `model.logits`, which takes for granted what is checked here.
    found = jax.eval_shape(
      lambda params, *args: model.call(model.module(params), *args),
      model.shapes,
      tokens,
      tokens,
      cache,
      mask,
    )
  except TypeError as error:
    first = plain_text.first_line(error)
    raise ValueError(
      f'The call of {model.name} failed ({first}), but {_EXPECTED}.'
    ) from error
  is_pair = isinstance(found, tuple | list) and len(found) == 2
  logits, after = found if is_pair else (None, None)
  shape = getattr(logits, 'shape', ())
  has_floats = jnp.issubdtype(getattr(logits, 'dtype', bool), jnp.floating)
  if len(shape) != 3 or shape[:2] != tokens.shape or not has_floats:
    raise ValueError(
      f'For tokens {list(tokens.shape)} the call of {model.name} returned '
      f'{_shapes(found):.200}, but {_EXPECTED}.'
    )
  return shape[2], after


def _shapes(tree: Any) -> str:
  """'{'k': f32[2,4,8]}', say."""

  def text(x):
    if not hasattr(x, 'shape'):
      return type(x).__name__
    return f'{jnp.dtype(x.dtype).name}{list(x.shape)}'

  return str(jax.tree.map(text, tree)).replace("'", '')


def _flat(tree: Params) -> dict[Path, Any]:
  """The leaves of nested dicts by their paths."""
  flat: Any = traverse_util.flatten_dict(tree)
  return flat


def _names(path: tuple[Any, ...]) -> Path:
  """A path of nested dicts: a checkpoint has no numbers as keys."""
  return tuple(map(str, path))
