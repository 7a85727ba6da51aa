"""What each entry of the table makes of many cases, found at one go.

Operation by operation a loss takes 30 ms, and nearly as little for a stack of
cases as for one, because the time goes into starting operations. Compiled as a
whole it would take ten times that, for each entry and each mutant anew, while
the operations are compiled once for all of them.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from tests import oracles
from tests.losses import cases


class Found(NamedTuple):
  """What a method makes of a case, in NumPy."""

  case: oracles.Case
  loss: np.ndarray  # f[]
  gradient: np.ndarray  # f[P,G,T], d loss / d logp
  batch: losses.Batch  # what `prepare` returned
  state: Any


def _with_one_invalid(case):
  """One in each group, with garbage in it."""
  valid = case.valid.copy()
  valid[:, 2] = False
  return cases.garbage(case._replace(valid=valid), np.nan)


def shuffled(case):
  """The case with prompts and completions in another order, and this order."""
  rng = np.random.default_rng(0)
  prompts, group = rng.permutation(4), rng.permutation(4)
  reordered = lambda x: x[prompts][:, group]
  return type(case)(*map(reordered, case)), reordered


def _extreme(case, gap):
  return case._replace(logp_old=case.logp - gap, logp_ref=case.logp + gap)


@functools.cache
def stacks() -> dict[Any, dict[Any, oracles.Case]]:
  """The cases of both dtypes, by what they are for."""
  wide: dict[Any, oracles.Case] = {
    seed: cases.make_case(seed) for seed in (0, 1, 2, 3, 4, 6, 7, 9)
  }
  wide['clean'] = cases.garbage(wide[1], 0.25)
  wide['invalid'] = _with_one_invalid(wide[2])
  wide['shuffled'], _ = shuffled(wide[3])
  for value in (60.0, -60.0, np.inf):
    wide['garbage', value] = cases.garbage(cases.make_case(5), value)
  narrow: dict[Any, oracles.Case] = {9: wide[9]}
  for gap in (100.0, -100.0):
    narrow['gap', gap] = _extreme(cases.make_case(8), gap)
  return {jnp.float64: wide, jnp.float32: narrow}


@functools.cache
def _every(entry, dtype) -> dict[Any, Found]:
  """What the entry makes of each case, by its name."""
  method, given = entry.make(), stacks()[dtype]
  joined = oracles.Case(*map(np.stack, zip(*given.values())))

  def one(batch, logp, entropy):
    batch, state = cases.prepared(method, batch)

    def loss(logp):
      top = cases.logp_top(logp, batch)
      return losses.surrogate_loss(method, logp, batch, state, entropy, top)[0]

    return *jax.value_and_grad(loss)(logp), batch, state

  stacked = jax.vmap(one)(
    cases.to_batch(joined, dtype),
    jnp.asarray(joined.logp, dtype),
    jnp.asarray(joined.entropy, dtype),
  )
  stacked = jax.tree.map(np.asarray, stacked)
  return {
    name: Found(case, *jax.tree.map(lambda x: x[n], stacked))  # noqa: B023
    for n, (name, case) in enumerate(given.items())
  }


def found(entry: cases.Entry, name, dtype=jnp.float64) -> Found:
  """What the entry makes of the case of this name."""
  return _every(entry, dtype)[name]


def forget():
  """The next test evaluates its entry itself; for `tests.mutants`."""
  _every.cache_clear()
