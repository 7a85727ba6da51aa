"""Flat rows give the same losses as the batch that they were made from."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

CLOSE = dict(rtol=1e-9, atol=1e-12)
CHOSEN = (
  'dapo', 'gspo', 'gtpo_conflict', 'gtpo_entropy', 'gdpo', 'prompt_mean',
  'kl_cov', 'rollback_clip', 'recenter_shared_prefix', 'recenter_branches',
)  # fmt: skip
LONG = 'gtpo_entropy', 'prompt_mean', 'rollback_clip', 'recenter_branches'
FEW = 'gspo', 'gtpo_conflict', 'recenter_shared_prefix'


def entries(names):
  """`parametrize` with the first entry of each name in the table."""
  table = {entry.name.split('-')[0]: entry for entry in cases.ONCE_EACH}
  return pytest.mark.parametrize(
    **cases.by_name([table[n] for n in names], long=[table[n] for n in LONG])
  )


PER_TOKEN = (
  'tokens', 'logp', 'logp_old', 'logp_ref', 'logp_sampler', 'entropy_old',
  'entropy', 'noise',
)  # fmt: skip


class Flat(NamedTuple):
  """A case as rows, and where they come from."""

  fields: dict  # arguments of `batch_from_rows`
  logp: np.ndarray  # f[B,S]
  entropy: np.ndarray  # f[B,S]
  prompt: np.ndarray  # i[B], the axis P of the case
  member: np.ndarray  # i[B], the axis G of the case
  start: np.ndarray  # i[B], the column of the first token

  def of(self, values):
    """`[P,G,T]` of the case as `[B,S]`, 0 outside the completions."""
    result = np.zeros(self.logp.shape)
    for b, row in enumerate(result):
      value = values[self.prompt[b], self.member[b]]
      row[self.start[b] :][: len(value)] = value
    return result


def make_case(seed=0):
  """Unequal groups, and tool output in the middle of the completions."""
  case = cases.make_case(seed)
  rng = np.random.default_rng(seed)
  tool = rng.random(case.mask.shape) < 0.3
  tool[..., 0] = False  # a completion begins with a token of its own
  valid = case.valid.copy()
  valid[3, 1:3] = False
  case = case._replace(mask=case.mask & ~tool, valid=valid)
  return cases.garbage(case, np.nan)


def flatten(case, seed=0, garbage=np.nan):
  """Valid completions as rows in any order, each begun at a column of its own.

  What no completion owns is garbage, or an id of 77.
  """
  rng = np.random.default_rng(seed)
  prompt, member = rng.permutation(np.argwhere(case.valid)).T
  start = rng.integers(0, 4, len(prompt))
  size = len(prompt), case.mask.shape[-1] + 4
  column = np.arange(size[1])
  flat = {name: np.full(size, garbage) for name in PER_TOKEN}
  flat |= {'mask': np.zeros(size, bool), 'tokens': np.full(size, 77)}
  for b, source in enumerate(zip(prompt, member)):
    mask = case.mask[source]
    length = 1 + np.flatnonzero(mask)[-1] if mask.any() else 0
    inside = (start[b] <= column) & (column < start[b] + length)
    for name in ('mask', *PER_TOKEN):
      flat[name][b, inside] = getattr(case, name)[source][:length]
  fields = {
    name: getattr(case, name)[prompt, member]
    for name in ('reward', 'truncated', 'reward_parts')
  }
  noise = flat.pop('noise')
  extras = {'noise': noise, 'updates_done': np.floor(4 * noise)}
  logp, entropy = flat.pop('logp'), flat.pop('entropy')
  fields |= flat | {'group': 100 - prompt, 'extras': extras}
  return Flat(fields, logp, entropy, prompt, member, start)


def loss_and_gradient(method, flat, **changed):
  """(loss, d loss / d logp[B,S], Batch, Rows) through `batch_from_rows`."""
  batch, rows = losses.batch_from_rows(**flat.fields, **changed)
  run = program(method)
  return *run(flat.logp, flat.entropy, batch, rows), batch, rows


@functools.cache
def program(method):
  """The loss of rows and its gradient."""

  @jax.jit
  @jax.value_and_grad
  def run(logp, entropy, batch, rows):
    batch, state = cases.prepared(method, batch)
    logp, entropy = rows.gather(logp), rows.gather(entropy)
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  return run


@functools.cache
def method_of(entry):
  """The same for all tests, and so compiled once for rows of one shape."""
  return entry.make()


@entries(CHOSEN)
def test_rows_give_the_loss_of_the_batch_that_they_were_made_from(entry):
  case = make_case()
  flat = flatten(case)
  if entry.oracle:
    expected, gradient = entry.oracle(case)
  else:
    expected, gradient = cases.loss_and_gradient(entry.make(), case)
  loss, found, _, _ = loss_and_gradient(method_of(entry), flat)
  np.testing.assert_allclose(loss, expected, **CLOSE)
  np.testing.assert_allclose(found, flat.of(gradient), **CLOSE)
  assert np.any(found)


@pytest.mark.long
@entries(FEW)
def test_a_larger_shape_changes_nothing(entry):
  flat = flatten(make_case(1))
  loss, gradient, batch, _ = loss_and_gradient(method_of(entry), flat)
  wide = loss_and_gradient(method_of(entry), flat, shape=(7, 6, 11))
  assert batch.mask.shape == (4, 4, 6) and wide[2].mask.shape == (7, 6, 11)
  np.testing.assert_allclose(wide[0], loss, **CLOSE)
  np.testing.assert_allclose(wide[1], gradient, **CLOSE)


@entries(FEW)
def test_permuted_rows_have_a_permuted_gradient(entry):
  flat = flatten(make_case(2))
  order = np.random.default_rng(3).permutation(len(flat.logp))
  loss, gradient, _, _ = loss_and_gradient(method_of(entry), flat)
  moved = jax.tree.map(lambda x: x[order], flat)
  moved_loss, moved_gradient, _, _ = loss_and_gradient(method_of(entry), moved)
  np.testing.assert_allclose(moved_loss, loss, **CLOSE)
  np.testing.assert_allclose(moved_gradient, gradient[order], **CLOSE)


@entries((*FEW, 'dapo'))
def test_micro_batches_of_rows_add_up(entry):
  """Five rows at a time, with their tokens in their own columns."""
  flat, method = flatten(make_case(3)), method_of(entry)
  loss, gradient, _, rows = loss_and_gradient(method, flat)
  batch, _ = losses.batch_from_rows(**flat.fields)
  batch, state = cases.prepared(method, batch)
  batch = rows.scatter_batch(batch)
  assert batch.mask.shape == (len(flat.logp), 1, flat.logp.shape[1])

  @jax.jit
  @jax.value_and_grad
  def piece_loss(logp, entropy, batch):
    logp, entropy = logp[:, None], entropy[:, None]
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  total, found = 0.0, []
  given = jax.tree.map(np.asarray, (flat.logp, flat.entropy, batch))
  for i in range(0, len(flat.logp), 5):
    # The last ones are filled up by padding: all that is 0 is masked.
    piece = jax.tree.map(
      lambda x: np.concatenate([x, np.zeros_like(x[:5])])[i : i + 5],  # noqa: B023
      given,
    )
    value, slope = piece_loss(*piece)
    total += value
    found.append(slope)
  found = np.concatenate(found)[: len(flat.logp)]
  np.testing.assert_allclose(total, loss, **CLOSE)
  np.testing.assert_allclose(found, gradient, **CLOSE)


def test_what_no_completion_owns_is_inert():
  method = losses.methods.grpo()
  one, two = (flatten(make_case(4), garbage=x) for x in (np.nan, 60.0))
  two.fields['tokens'][two.fields['tokens'] == 77] = 5
  loss, gradient, batch, _ = loss_and_gradient(method, one)
  clean_loss, clean, clean_batch, _ = loss_and_gradient(method, two)
  assert loss == clean_loss
  np.testing.assert_array_equal(gradient, clean)
  assert np.all(np.asarray(gradient)[~one.fields['mask']] == 0)
  jax.tree.map(np.testing.assert_array_equal, batch, clean_batch)


# In the second shape, the number of tokens of the rows (which means "none" in
# one direction) is the place of a token of the batch.
@pytest.mark.parametrize('shape', [None, (4, 4, 130)])
def test_there_and_back(shape):
  flat = flatten(make_case(5), garbage=0.25)
  mask = flat.fields['mask']
  assert mask.size == 130
  batch, rows = losses.batch_from_rows(**flat.fields, shape=shape)
  logp, back = rows.gather(flat.logp), rows.scatter(rows.gather(flat.logp))
  np.testing.assert_array_equal(back[mask], flat.logp[mask])
  for b, span in enumerate(mask):  # 0 outside the spans, all kept inside
    inside = (
      np.maximum.accumulate(span) & np.maximum.accumulate(span[::-1])[::-1]
    )
    np.testing.assert_array_equal(back[b], np.where(inside, flat.logp[b], 0))
  np.testing.assert_array_equal(rows.gather(back), logp)
  np.testing.assert_array_equal(rows.scatter(batch.mask), mask)
  assert rows.scatter(batch.mask).dtype == bool
  reward = rows.gather_rows(flat.fields['reward'])
  np.testing.assert_array_equal(reward, batch.reward)
  np.testing.assert_array_equal(
    rows.scatter_rows(reward), flat.fields['reward']
  )
  deep = np.stack([flat.logp, flat.entropy], axis=-1)
  np.testing.assert_array_equal(rows.gather(deep)[..., 0], logp)
  parts = rows.gather_rows(flat.fields['reward_parts'])
  np.testing.assert_array_equal(parts, batch.reward_parts)


def test_groups_of_three_one_and_two_by_hand():
  """Centered by group, mean over tokens, logp: the gradient is -A / N."""
  method = losses.chain(
    losses.center_by_group(), losses.mean_over_tokens(), losses.score_function()
  )
  mask = np.array(
    [[0, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
  )
  group = ['z', 'b', 'z', 'a', 'b', 'z']
  reward = [1.0, 3.0, 2.0, 9.0, 4.0, 6.0]  # means: z 3, b 3.5, a 9
  batch, rows = losses.batch_from_rows(mask, group, reward)
  np.testing.assert_array_equal(
    batch.valid, [[True] * 3, [True, True, False], [True, False, False]]
  )
  np.testing.assert_array_equal(batch.reward, [[1, 2, 6], [3, 4, 0], [9, 0, 0]])
  batch, state = cases.prepared(method, batch)
  gradient = jax.grad(
    lambda x: losses.surrogate_loss(method, rows.gather(x), batch, state)[0]
  )(jnp.zeros(mask.shape))
  advantage = np.array([-2, -0.5, -1, 0, 0.5, 3])
  np.testing.assert_allclose(
    gradient, -advantage[:, None] * mask / mask.sum(), **CLOSE
  )


def test_an_empty_row_counts_in_its_group_and_one_that_is_not_valid_nowhere():
  mask = np.array([[1, 1], [0, 0], [1, 0]])
  method = losses.chain(losses.center_by_group(), losses.mean_over_sequences())
  advantage = lambda **fields: cases.prepared(
    method, losses.batch_from_rows(mask, [1, 1, 1], **fields)[0]
  )[0].advantage[0, :, 0]
  np.testing.assert_allclose(advantage(reward=[4.0, 2.0, 0.0]), [2, 0, -2])
  found = advantage(reward=[4.0, np.nan, 0.0], valid=[True, False, True])
  np.testing.assert_allclose(found, [2, 0, -2])
  found = advantage(reward=[4.0, np.inf, 1.0], valid=[1, 0, 1])
  np.testing.assert_allclose(found, [1.5, 0, -1.5])


def test_every_field_is_placed():
  flat = flatten(make_case(5))
  mask = flat.fields['mask']
  rng = np.random.default_rng(0)
  per_token = {
    'keep': (mask & (rng.random(mask.shape) < 0.5)).astype(float),
    'version': rng.integers(1, 9, mask.shape),
    'advantage': rng.random(mask.shape),
  }
  batch, rows = losses.batch_from_rows(**flat.fields | per_token)
  per_token |= {k: flat.fields[k] for k in PER_TOKEN if k in flat.fields}
  for name in per_token:
    found = np.asarray(rows.scatter(getattr(batch, name)))
    np.testing.assert_array_equal(found[mask], per_token[name][mask])
    assert name == 'tokens' or not np.any(found[~mask])
  for name in ('reward', 'truncated', 'reward_parts'):
    found = rows.scatter_rows(getattr(batch, name))
    np.testing.assert_array_equal(found, flat.fields[name])
  assert batch.tokens.dtype == batch.version.dtype == jnp.int32
  assert batch.keep.dtype == batch.truncated.dtype == bool


def test_rows_without_any_token_have_loss_0():
  method = losses.methods.gspo()
  batch, rows = losses.batch_from_rows(np.zeros((2, 5)), [3, 3], [0.0, 1.0])
  assert batch.mask.shape == (1, 2, 1)
  batch, state = cases.prepared(method, batch)
  logp = rows.gather(np.full((2, 5), np.nan))
  assert losses.surrogate_loss(method, logp, batch, state)[0] == 0


def test_extras_are_moved_by_token_or_by_row():
  """And back to rows by `scatter_batch`, trailing axes and all."""
  mask = np.array([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0]])
  rng = np.random.default_rng(0)
  extras = {
    'token': rng.random((3, 4)),
    'tokens': rng.random((3, 4, 2)),
    'row': rng.random(3),
    'rows': rng.random((3, 2)),
  }
  group = ['a', 'a', 'b']
  parts = rng.random((3, 3))  # as many as tokens: the shape does not tell
  batch, rows = losses.batch_from_rows(
    mask, group, np.ones(3), extras=extras, reward_parts=parts
  )
  found = batch.extras
  for name in ('token', 'tokens'):
    np.testing.assert_array_equal(found[name][0, 1, :2], extras[name][1, :2])
    np.testing.assert_array_equal(found[name][1, 0, 0], extras[name][2, 2])
  for name in ('row', 'rows'):
    np.testing.assert_array_equal(found[name][0], extras[name][:2])
    np.testing.assert_array_equal(found[name][1, 0], extras[name][2])
    np.testing.assert_array_equal(found[name][1, 1], 0 * extras[name][1])
  back = rows.scatter_batch(batch)
  np.testing.assert_array_equal(back.reward_parts[:, 0], parts)
  for name in ('token', 'tokens'):
    expected = np.where(mask.T, extras[name].T, 0).T
    np.testing.assert_array_equal(back.extras[name][:, 0], expected)
  for name in ('row', 'rows'):
    np.testing.assert_array_equal(back.extras[name][:, 0], extras[name])


def test_an_advantage_of_the_loop_itself_is_used():
  mask = np.array([[0, 1, 1], [1, 1, 0]])
  given = np.where(mask, [[np.nan, 2.0, 3.0], [-1.0, -4.0, np.nan]], np.nan)
  method = losses.chain(losses.mean_over_tokens(), losses.score_function())
  batch, rows = losses.batch_from_rows(
    mask, [0, 0], [0.0, 0.0], advantage=given
  )
  batch, state = cases.prepared(method, batch)
  gradient = jax.grad(
    lambda x: losses.surrogate_loss(method, rows.gather(x), batch, state)[0]
  )(jnp.zeros((2, 3)))
  np.testing.assert_allclose(gradient, [[0, -0.5, -0.75], [0.25, 1, 0]])


def test_one_compiled_program_for_one_shape():
  method, traces = losses.methods.gspo(), []

  @jax.jit
  def run(logp, batch, rows, state):
    traces.append(None)
    loss = lambda x: losses.surrogate_loss(
      method, rows.gather(x), batch, state
    )[0]
    return jax.value_and_grad(loss)(logp)

  found = set()
  for seed in range(3):
    rng = np.random.default_rng(seed)
    mask = np.arange(6) < rng.integers(1, 7, (8, 1))
    batch, rows = losses.batch_from_rows(
      mask, rng.integers(0, 4, 8), rng.random(8), shape=(4, 8, 6)
    )
    batch, state = cases.prepared(method, batch)
    loss, gradient = run(-rng.random((8, 6)), batch, rows, state)
    found.add(float(np.abs(gradient).sum()))
  assert len(traces) == 1 and len(found) == 3


@pytest.mark.long
@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_rows_that_are_sharded(axis_type):
  case, method = make_case(6), losses.methods.grpo()
  flat = jax.tree.map(lambda x: x[:8], flatten(case))
  loss, gradient, _, rows = loss_and_gradient(method, flat)
  batch, _ = losses.batch_from_rows(**flat.fields)
  batch, state = cases.prepared(method, batch)
  mesh = jax.make_mesh(
    (4,), ('data',), axis_types=(axis_type,), devices=jax.devices()[:4]
  )
  with jax.set_mesh(mesh):
    spread = NamedSharding(mesh, PartitionSpec('data'))
    logp = jax.device_put(jnp.asarray(flat.logp), spread)

    @jax.jit
    def run(logp, batch, rows):
      loss = lambda x: losses.surrogate_loss(
        method, rows.gather(x), batch, state
      )[0]
      return jax.value_and_grad(loss)(logp)

    sharded_loss, sharded = run(logp, batch, rows)
  np.testing.assert_allclose(sharded_loss, loss, **CLOSE)
  np.testing.assert_allclose(sharded, gradient, **CLOSE)


PLAIN = dict(mask=np.ones((3, 4)), group=np.array([0, 1, 0]), reward=np.ones(3))


@pytest.mark.parametrize(
  'words, changed',
  [
    (r'mask of shape \(3,\); give \[B,S\]', dict(mask=np.ones(3))),
    (r'mask of shape \(3, 0\)', dict(mask=np.ones((3, 0)))),
    (r'mask of shape \(0, 4\)', dict(mask=np.ones((0, 4)))),
    (r'mask with the value 2', dict(mask=np.full((3, 4), 2))),
    (r'mask with the value 0\.5', dict(mask=np.full((3, 4), 0.5))),
    (r'mask with the value nan', dict(mask=np.full((3, 4), np.nan))),
    (r'keep with the value 3', dict(keep=np.full((3, 4), 3))),
    (r'valid with the value -1', dict(valid=[1, 1, -1])),
    (r'truncated with the value 7', dict(truncated=[1, 7, 0])),
    (r'group of shape \(2,\) and a mask of 3 rows', dict(group=['a', 'b'])),
    (r'group of shape \(3, 1\)', dict(group=np.zeros((3, 1), int))),
    (r'group id nan in row 0', dict(group=np.array([np.nan, 1.0, 0.0]))),
    (r'group id 1.0 in row 0', dict(group=np.ones(3))),
    (r'group id nan in row 2', dict(group=['a', 'b', float('nan')])),
    (r'group id None in row 0', dict(group=np.array([None, 'a', 'b']))),
    (
      r'reward of shape \(3, 1\).* the shape \(3,\)',
      dict(reward=np.zeros((3, 1))),
    ),
    (
      r'reward that is not finite in the rows \[0, 2\]',
      dict(reward=[np.nan, 0, np.inf]),
    ),
    (
      r'reward_parts that is not finite in the rows \[1\]',
      # NaN is a reward that has not judged a row.
      dict(
        reward_parts=[[0.0, np.nan], [0, -np.inf], [0, np.inf]], valid=[1, 1, 0]
      ),
    ),
    (
      r'tokens of shape \(3, 5\).* the shape \(3, 4\)',
      dict(tokens=np.ones((3, 5))),
    ),
    (
      r'logp_old of shape \(3, 3\).* put one before.*np\.pad\(logp_old',
      dict(logp_old=np.zeros((3, 3))),
    ),
    (
      r'truncated of shape \(3, 3\).* the shape \(3,\)',
      dict(truncated=np.ones((3, 3))),
    ),
    (
      r"extras\['mine'\] of shape \(2, 4\).*the 3 rows",
      dict(extras={'mine': np.ones((2, 4))}),
    ),
    (
      r"'old_logp', which is none of the fields.*logp_old.*into extras",
      dict(old_logp=np.ones((3, 4))),
    ),
    (
      r'shape=\(2, 1, 4\), but these rows need at least \(2, 2, 4\)',
      dict(shape=(2, 1, 4)),
    ),
    (r'shape=\(4, 4\)', dict(shape=(4, 4))),
  ],
)
def test_bad_input_is_refused(words, changed):
  with pytest.raises(ValueError, match=words):
    losses.batch_from_rows(**PLAIN | changed)


@pytest.mark.parametrize('name', ['mask', 'group', 'reward'])
def test_traced_values_are_refused(name):
  run = jax.jit(lambda x: losses.batch_from_rows(**PLAIN | {name: x})[0])
  with pytest.raises(ValueError, match=f'traced {name}.*use Rows.gather'):
    run(PLAIN[name])


@pytest.mark.parametrize(
  'method, shape',
  [
    ('gather', (3, 3)),
    ('gather', (4, 3)),
    ('gather', (3,)),
    ('scatter', (3, 4)),
    ('gather_rows', (2, 2)),
    ('scatter_rows', (3,)),
  ],
)
def test_an_array_of_another_shape_is_refused(method, shape):
  _, rows = losses.batch_from_rows(**PLAIN)
  with pytest.raises(ValueError, match=f'Rows.{method} got an array of shape'):
    getattr(rows, method)(np.zeros(shape))
