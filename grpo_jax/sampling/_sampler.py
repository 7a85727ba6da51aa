"""The compiled sampler: one prefill per prompt, one loop for all its rows."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import sharding
from grpo_jax.models import attention
from grpo_jax.sampling._choose import Sampling
from grpo_jax.sampling._choose import choose

Array = jax.Array


class SamplingState(NamedTuple):
  """What the decoding loop carries; `B = P * G` rows."""

  step: Array  # i32[], tokens drawn so far
  last: Array  # i32[B], the newest token
  tokens: Array  # i32[B,T]
  logp: Array  # f32[B,T], under the policy, nats
  log_kept: Array  # f32[B,T], log of the mass that the filters left
  entropy: Array  # f32[B,T], of the policy, nats
  length: Array  # i32[B]
  ended: Array  # bool[B], an end token was drawn
  cache: Any  # per layer: prompt and own (key, value)


class Prompts(NamedTuple):
  """Right-padded prompts and where their noise comes from."""

  tokens: Array  # i32[P,N]
  length: Array  # i32[P]
  index: Array  # i32[P], the global prompt counter; -1 for padding
  key: Array  # of (seed, rollout)
  max_tokens: Array  # i32[], at most the buffer


@dataclasses.dataclass(frozen=True)
class Sampler:
  """The static part of a generation; hashable, so jit keys on it.

  Attributes:
    model: Anything with the model protocol.
    sampling: How tokens are drawn. Its `max_tokens` is read from `Prompts`.
    group: Completions per prompt.
    buffer_tokens: Length of the completion buffers and of the rows' cache.
    mesh: Where rows are split over devices; None without one.
  """

  model: Any
  sampling: Sampling
  group: int
  buffer_tokens: int
  mesh: jax.sharding.Mesh | None = None

  def __call__(self, params, prompts: Prompts) -> SamplingState:
    """Draws `group` completions of every prompt.

    Args:
      params: What `sampler_params` returned.
      prompts: See `Prompts`.

    Returns:
      The final state, without its cache. The noise of a token is a function of
      (seed, rollout, prompt index, completion, position) alone.
    """
    state = self.begin(params, prompts)
    state = self.advance(params, prompts, state, prompts.max_tokens)
    return state._replace(cache=None)

  def begin(self, params, prompts: Prompts) -> SamplingState:
    """The state after the first token."""
    with sharding.use(self.mesh):
      state, logits = self._prefill(params, prompts)
      return self._draw(state, logits, self._row_keys(prompts))

  def advance(
    self, params, prompts: Prompts, state: SamplingState, until: Array
  ) -> SamplingState:
    """The state after `until` tokens i32[], or when every row has ended."""
    with sharding.use(self.mesh):
      keys = self._row_keys(prompts)
      return lax.while_loop(
        lambda s: (s.step < until) & ~jnp.all(s.ended),
        lambda s: self._decode(params, prompts, keys, s),
        state,
      )

  def _row_keys(self, prompts: Prompts) -> Array:
    fold = jax.random.fold_in
    by_prompt = jax.vmap(functools.partial(fold, prompts.key))(prompts.index)
    completion = jnp.arange(self.group)
    rows = jax.vmap(lambda k: jax.vmap(lambda g: fold(k, g))(completion))
    return rows(by_prompt).reshape(-1)

  def _prefill(self, params, prompts: Prompts):
    """An empty state whose cache holds the prompts, and the first logits."""
    number, width = prompts.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (number, width))
    hidden, cache = self.model.hidden(
      params, prompts.tokens, positions, attention.over_prompts(prompts.length)
    )
    last = jnp.take_along_axis(
      hidden, (prompts.length - 1)[:, None, None], axis=1
    )[:, 0]
    logits = self.model.head(params, last)
    logits = jnp.repeat(logits, self.group, axis=0)

    def own(x):
      shape = (number, self.group, self.buffer_tokens, *x.shape[2:])
      return jnp.zeros(shape, x.dtype)

    rows, buffer = number * self.group, self.buffer_tokens
    state = SamplingState(
      step=jnp.zeros((), jnp.int32),
      last=jnp.zeros((rows,), jnp.int32),
      tokens=jnp.zeros((rows, buffer), jnp.int32),
      logp=jnp.zeros((rows, buffer)),
      log_kept=jnp.zeros((rows, buffer)),
      entropy=jnp.zeros((rows, buffer)),
      length=jnp.zeros((rows,), jnp.int32),
      ended=jnp.repeat(prompts.index < 0, self.group),
      cache=[(layer, jax.tree.map(own, layer)) for layer in cache],
    )
    return state, logits

  def _decode(self, params, prompts: Prompts, keys, state: SamplingState):
    """One step of every row: the newest token in, one more out."""
    place = state.step - 1
    position = jnp.repeat(prompts.length, self.group) + place
    hidden, cache = self.model.hidden(
      params,
      state.last[:, None],
      position[:, None],
      attention.over_cache(prompts.length, place, self.group),
      state.cache,
    )
    logits = self.model.head(params, hidden[:, 0])
    return self._draw(state._replace(cache=cache), logits, keys)

  def _draw(self, state: SamplingState, logits, keys) -> SamplingState:
    """Draws token number `step` of every row that has not ended."""
    at_step = jax.vmap(lambda key: jax.random.fold_in(key, state.step))(keys)
    uniform = jax.vmap(jax.random.uniform)(at_step)
    token, logp, log_kept, entropy = choose(
      logits, uniform, state.step, self.sampling
    )
    going = ~state.ended

    def put(buffer, value):
      value = jnp.where(going, value, 0).astype(buffer.dtype)[:, None]
      return lax.dynamic_update_slice_in_dim(buffer, value, state.step, axis=1)

    end = jnp.array(self.sampling.eos_ids, jnp.int32)
    is_end = jnp.any(token[:, None] == end[None], axis=-1)
    return state._replace(
      step=state.step + 1,
      last=token.astype(jnp.int32),
      tokens=put(state.tokens, token),
      logp=put(state.logp, logp),
      log_kept=put(state.log_kept, log_kept),
      entropy=put(state.entropy, entropy),
      length=state.length + going,
      ended=state.ended | is_end,
    )


_jit = functools.partial(
  jax.jit, static_argnums=0, compiler_options=sharding.COMPILER_OPTIONS
)


@_jit
def generate(sampler: Sampler, params, prompts: Prompts) -> SamplingState:
  """Calls a `Sampler`, compiled once per sampler and shapes of prompts."""
  return sampler(params, prompts)


@_jit
def begin(sampler: Sampler, params, prompts: Prompts) -> SamplingState:
  """`Sampler.begin`, compiled."""
  return sampler.begin(params, prompts)


@functools.partial(_jit, donate_argnums=3)
def advance(
  sampler: Sampler, params, prompts: Prompts, state: SamplingState, until: Array
) -> SamplingState:
  """`Sampler.advance`, compiled; the state is donated."""
  return sampler.advance(params, prompts, state, until)


def sampler_params(model, params):
  """A training tree made ready to decode: unstacked, in the compute dtype.

  Args:
    model: Anything with the model protocol and `unstack`.
    params: The training tree.

  Returns:
    The tree that `Sampler` and other engines read; vectors (norms) stay
    float32, as in training. Copies: the learner may donate its own.
  """
  dtype = jnp.dtype(model.config.compute_dtype)
  return jax.tree.map(
    lambda x: jnp.copy(x.astype(dtype) if x.ndim > 1 else x),
    model.unstack(params),
  )


def prepare_params(model, params, mesh: jax.sharding.Mesh | None = None):
  """`sampler_params` compiled, and resharded: the road to any engine.

  Args:
    model: Anything with the model protocol, `unstack` and `logical_axes`.
    params: The training tree, or its shapes.
    mesh: Its mesh, if any; the result is not split over `fsdp`, because
      decoding reads every parameter for every token.

  Returns:
    A function of the training tree, to be called once per rollout.
  """
  place = None
  if mesh is not None:
    shapes = jax.eval_shape(model.unstack, params)
    rules = sharding.DECODING_RULES
    place = sharding.of_params(mesh, shapes, model.logical_axes, rules)
  return jax.jit(functools.partial(sampler_params, model), out_shardings=place)
