"""E16, `other_optimizers`: what optimizers other than Adam do past the clip.

Fontana et al. show that Adam's momentum carries a clipped token on, out of the
clip range. Here ten optimizers train the transformer of
`configs/arithmetic.py`, each at a rate with which one update moves tokens as
far as one of any other does. After gradients of fresh rollouts, which fill
their memories, they take updates on one rollout under PPO's clip. Asked is

- how far the tokens that are clipped then still move outward, by what
  `optim.coast` predicts and by what is measured;
- what of it is memory, and what the gradient of the other tokens;
- whether a clip that accounts for memory keeps tokens within the range: one
  narrowed by a formula (`losses.contrib.coasting_clip`), and one that switches
  off the gradient of the tokens that `optim.coast` sees outside at the end.

The policy stays while memories are filled: gradients are taken at its first
parameters, and no update moves it. So all optimizers begin with one policy,
which has sampled all rollouts. A seed is another set of rollouts of this policy
and of random rewards, not another policy. Weight decay is 0.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits
from grpo_jax.lab.studies.papers import transformer
from grpo_jax.losses import contrib
from grpo_jax.run.build import optimizer as optimizers

MEMORY = 20  # gradients of fresh rollouts, one of each
UPDATES, LIVE = 8, 3  # on the last rollout; those before the coast begins
_TARGET = 0.06  # nats, mean |change of log p| by one update
_RANGE = 0.2  # of the ratio, to both sides of 1
_INSIDE = np.log1p([-_RANGE, _RANGE])
_SEEDS, _MORE_SEEDS = 3, 8
# Lower rates of the plain clip, beside which the others are: parts of the rate.
LOWER = 0.3, 0.5, 0.7
# Updates without a gradient after which tokens are scored.
COASTED = 1, 2, 3, 4, 5, 8, 16, 32
_LEFT = UPDATES - LIVE
_BETAS = 0.9, 0.99


class Optimizer(NamedTuple):
  """An optimizer, and what the experiment needs to know of it.

  Attributes:
    label: Its name in texts.
    make: `(schedule, matrices) -> transformation`.
    rate: A learning rate that is about right.
    betas: Adam's decays with which `coasting_clip` foretells its steps, each
      b1 / sqrt(b2) times the one before; None: the clip is not narrowed.
  """

  label: str
  make: Callable[..., optax.GradientTransformation]
  rate: float
  betas: tuple[float, float] | None = None


def _adam(b1):
  return lambda schedule, matrices: optim.adamw(
    schedule, b1, _BETAS[1], clip_norm=None
  )


def _schedule_free(base):
  def make(schedule, matrices):
    return optax.contrib.schedule_free(base(schedule, matrices), schedule)

  return make


_SGD: Any = lambda schedule, matrices: optim.sgd(schedule)
OPTIMIZERS = {
  'adamw': Optimizer('AdamW', _adam(_BETAS[0]), 1e-3, _BETAS),
  'momentum': Optimizer(
    'SGD with momentum 0.9',
    lambda schedule, matrices: optim.sgd(schedule, momentum=0.9),
    0.1,
    (0.9, 1.0),
  ),
  # Their steps stay as long as they are.
  'lion': Optimizer(
    'Lion', lambda schedule, matrices: optim.lion(schedule), 1e-3, (0.9, 0.81)
  ),
  'muon': Optimizer(
    'Muon',
    lambda schedule, matrices: optim.muon(schedule, matrices, b2=_BETAS[1]),
    1e-3,
    (0.9, 0.81),
  ),
  'adafactor_momentum': Optimizer(
    'Adafactor with momentum 0.9',
    lambda schedule, matrices: optim.adafactor(
      schedule, matrices, momentum=0.9
    ),
    1e-2,
  ),
  'schedule_free_sgd': Optimizer(
    'schedule-free SGD', _schedule_free(_SGD), 1.0
  ),
  'schedule_free_adam': Optimizer(
    'schedule-free Adam', _schedule_free(_adam(0.0)), 1e-3
  ),
  'sgd': Optimizer('SGD', _SGD, 1.0),
  'rmsprop': Optimizer('RMSProp (Adam with b1 = 0)', _adam(0.0), 1e-3),
  'adafactor': Optimizer('Adafactor', optim.adafactor, 1e-2),
}
STILL = 'sgd', 'rmsprop', 'adafactor'  # without a memory of directions
MOVING = tuple(name for name in OPTIMIZERS if name not in STILL)
NARROWED = tuple(name for name in OPTIMIZERS if OPTIMIZERS[name].betas)
CLIPS = 'plain', 'narrowed', 'foreseen'

_ASKED = f'asked by {FONTANA}'
CLAIMS = {
  'exact': Claim(
    'With gradients of zero each of ten optimizers goes where `optim.coast` '
    f'says (largest distance between the two after {_LEFT} updates / length of '
    'the last step with a gradient).',
    'derived',
    # Rounding: schedule-free takes its average from differences of parameters,
    # by which two programs of other flags of XLA have differed by 1e-3.
    high=0.01,
  ),
  'still': Claim(
    'SGD, RMSProp and Adafactor without momentum do not move once the gradient '
    'is zero (largest length of a step).',
    f'derived from {FONTANA}, prop. 3',
    0,
    0,
  ),
  'law_adamw': Claim(
    'On gradients of a transformer AdamW coasts by equation 36 (largest '
    f'relative error of the length of {COASTED[-1]} steps).',
    f'{FONTANA}, eq. 36',
    high=0.01,
  ),
  'law_momentum': Claim(
    'SGD with momentum 0.9 coasts by 0.9^n (largest relative error of the '
    f'length of {COASTED[-1]} steps).',
    'derived',
    high=1e-3,
  ),
  'constant': Claim(
    f'Lion and Muon do not slow down: step {COASTED[-1]} without a gradient / '
    'step 1, lengths, the one farthest from 1.',
    'derived',
    0.9,
    1.1,
  ),
  'law_free': Claim(
    'Schedule-free after T updates moves n / (T + n) of the way to `z`, what '
    'it averages, in n updates without a gradient (length of a step / length '
    f'of that way, largest relative error of {COASTED[-1]} steps, '
    f'T = {MEMORY + LIVE}).',
    'derived',
    high=0.05,
  ),
  'further': Claim(
    f'In {COASTED[-1]} updates without a gradient Lion and Muon carry tokens '
    'that have just been clipped more than twice as far as AdamW does (outward '
    'ways in last steps of these tokens, less sure of the two / that of '
    'AdamW).',
    'derived',
    2.0,
  ),
}
for _name in MOVING:
  _label = OPTIMIZERS[_name].label
  CLAIMS |= {
    f'carried_{_name}': Claim(
      f'{_label}: memory moves clipped tokens outward (mean outward change of '
      'log p by an update without a gradient, nats).',
      f'{FONTANA}, prop. 3' if _name == 'adamw' else _ASKED,
      0.0,
    ),
    f'foretold_{_name}': Claim(
      f'{_label}: `optim.coast` foretells how far tokens that have just been '
      f'clipped move outward in the {_LEFT} updates that are left (measured, '
      'with the gradient of the other tokens / predicted).',
      _ASKED,
      0.5,
      1.5,
    ),
  }
for _clip, _text in (
  ('narrowed', 'A clip that a formula for memory narrows (`coasting_clip`)'),
  ('foreseen', 'A clip of what `optim.coast` sees outside at the end'),
):
  CLAIMS |= {
    f'{_clip}_fewer': Claim(
      f'{_text} leaves fewer tokens outside the range at the end of a rollout '
      '(share with it / with the plain clip, worst of AdamW, momentum, Lion '
      'and Muon).',
      _ASKED,
      high=1.0,
    ),
    f'{_clip}_keeps': Claim(
      f'{_text} keeps nine tenths of those tokens within the range (the same '
      'number).',
      _ASKED,
      high=0.1,
    ),
    f'{_clip}_gains': Claim(
      f'{_text} gains more than the plain clip at a lower rate, with which '
      'that comes as far from the old policy (gain of the surrogate at the end '
      '/ with the plain clip at an equal KL, worst of the four).',
      _ASKED,
      1.0,
    ),
  }


class _Tools(NamedTuple):
  """Compiled functions of the policy, as a vector f32[D], for all optimizers.

  Attributes:
    score: `(vector, layout) -> logp`, f32[P,G,T].
    pull: `(vector, layout, coefficient) -> gradient`, f32[D].
    slopes: By clip, `(logp, old, done, mask, reward) -> coefficient`; 'none' is
      no clip.
  """

  score: Callable[..., Any]
  pull: Callable[..., Any]
  slopes: dict[Any, Callable[..., Any]]


class _Steps(NamedTuple):
  """Compiled functions of an optimizer, whose first argument is its rate.

  Attributes:
    init: `(rate, vector) -> state`.
    step: `(rate, gradient, state, vector) -> (vector, state, update)`.
    coast: `(rate, state, vector) -> (vector, state, length)`, of one update
      without a gradient.
  """

  init: Callable[..., Any]
  step: Callable[..., Any]
  coast: Callable[..., Any]


class _Rollout(NamedTuple):
  """A rollout of P prompts with G completions, ready for updates.

  Attributes:
    layout: Its rows.
    mask: bool[P,G,T], whether there is a token.
    reward: f32[P,G].
    pull: f32[P,G,T], the coefficients of its log-probabilities at ratio 1; a
      token's sign is the way in which it is pushed outward.
  """

  layout: Any
  mask: np.ndarray
  reward: np.ndarray
  pull: np.ndarray


class _Path(NamedTuple):
  """Updates on one rollout.

  Attributes:
    points: The vector and the optimizer's state before every update, and after
      the last one.
    logp: f32[U+1,P,G,T], at these points.
    lengths: Of the updates, U numbers.
  """

  points: list[tuple[Any, Any]]
  logp: np.ndarray
  lengths: list[float]


def _run(full: bool = False) -> dict[str, Any]:
  """Follows every optimizer with every seed.

  Args:
    full: Take more seeds. A policy that is warmed up is not tried: it is so
      sure of its tokens that the third update may clip none.

  Returns:
    By optimizer, then by seed: what `_past_the_clip` measures, and the `rate`;
    `clips[optimizer][clip]`: what `_ends` reads from a path; under `lower`,
    from one for each of `LOWER`. `exact` and `seeds` beside them.
  """
  seeds = _MORE_SEEDS if full else _SEEDS
  given = transformer.sample_rollouts(seeds * (MEMORY + 1))
  tools = _tools(given)
  rollouts = [_rollout(given, tools, k) for k in range(len(given.reward))]
  found: dict[str, Any] = {'seeds': seeds, 'exact': {}, 'clips': {}}
  found['optimizers'] = {name: [] for name in OPTIMIZERS}
  steps = {name: _steps(given, one.make) for name, one in OPTIMIZERS.items()}
  for seed in range(seeds):
    *before, last = rollouts[seed * (MEMORY + 1) : (seed + 1) * (MEMORY + 1)]
    gradients = jnp.stack(
      [tools.pull(given.params, one.layout, one.pull) for one in before]
    )
    own = tools.pull(given.params, last.layout, last.pull)
    for name, optimizer in OPTIMIZERS.items():
      run = steps[name]
      rate = _matched(given, tools, run, optimizer.rate, gradients, own, last)
      start = _remember(given, run, rate, gradients)
      path = _follow(tools, run, rate, start, last, _clipped(tools, last))
      measured = _past_the_clip(tools, run, rate, path, last)
      found['optimizers'][name].append({'rate': float(rate), **measured})
      if seed == 0:
        found['exact'][name] = _off(tools, run, rate, path, last)
      if optimizer.betas:
        arms = {
          'plain': path,
          'narrowed': _follow(
            tools, run, rate, start, last,
            _clipped(tools, last, optimizer.betas),
          ),
          'foreseen': _follow(
            tools, run, rate, start, last,
            functools.partial(_foreseen, tools, run, rate, last),
          ),
        }  # fmt: skip
        clips = found['clips'].setdefault(
          name, {clip: [] for clip in (*CLIPS, 'lower')}
        )
        for clip, one in arms.items():
          clips[clip].append(_ends(one, last))
        slope = _clipped(tools, last)
        clips['lower'].append(
          [
            _ends(_follow(tools, run, part * rate, start, last, slope), last)
            for part in LOWER
          ]
        )
  return found


def _tools(given: transformer.Rollouts) -> _Tools:
  chain = losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.importance_weighted(),
  )
  betas = {one.betas for one in OPTIMIZERS.values() if one.betas}
  narrowed = {
    pair: contrib.coasting_grpo(_RANGE, _RANGE, UPDATES, *pair)
    for pair in betas
  }
  plain = losses.methods.grpo(_RANGE, _RANGE, kl_coefficient=0.0)
  return _Tools(
    jax.jit(given.score),
    jax.jit(functools.partial(transformer.pull_back, given.score)),
    {
      clip: bandits.jit(functools.partial(_slope, method))
      for clip, method in {'none': chain, None: plain, **narrowed}.items()
    },
  )


def _slope(method, logp, old, done, mask, reward):
  """Coefficients -d loss / d logp, after `done` updates, f32[P,G,T]."""
  extras = {'updates_done': jnp.full(mask.shape, done, jnp.float32)}
  batch, state = bandits.credited(
    method, mask, reward, logp_old=old, extras=extras
  )
  return -jax.grad(
    lambda logp: transformer.loss_value(method, logp, batch, state)
  )(logp)


def _rollout(given: transformer.Rollouts, tools: _Tools, k: int) -> _Rollout:
  layout = jax.tree.map(lambda x: x[k], given.layout)
  mask, reward = given.mask[k], given.reward[k]
  zero = jnp.zeros(mask.shape)
  pull = tools.slopes['none'](zero, zero, 0, mask, reward)
  return _Rollout(layout, mask, reward, np.where(mask, pull, 0))


def _steps(given: transformer.Rollouts, make) -> _Steps:
  matrices = functools.partial(optimizers.matrices, given.model)
  flat = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]

  def made(rate):
    return make(lambda count: rate, matrices)

  def step(rate, gradient, state, vector):
    params = given.unflatten(vector)
    update, state = made(rate).update(given.unflatten(gradient), state, params)
    return flat(optax.apply_updates(params, update)), state, flat(update)

  def coast(rate, state, vector):
    coasted = optim.coast(made(rate), state, given.unflatten(vector), 1)
    return flat(coasted.params), coasted.state, coasted.norms[0]

  init = lambda rate, vector: made(rate).init(given.unflatten(vector))
  return _Steps(init, bandits.jit(step), bandits.jit(coast))


def _remember(given, run: _Steps, rate, gradients):
  """The first vector, and the state after some gradients, [N,D], there.

  The `z` of schedule-free moves, and so does the average of all `z`, which lies
  where the parameters would be. Each update moves all of them back by as much
  as the parameters, so that they lie to each other as in training.
  """
  state = run.init(rate, given.params)
  for gradient in gradients:
    moved, state, _ = run.step(rate, gradient, state, given.params)
    if isinstance(state, optax.contrib.ScheduleFreeState):
      back = given.unflatten(given.params - moved)
      state = state._replace(z=jax.tree.map(jnp.add, state.z, back))
  return given.params, state


def _matched(given, tools, run, rate, gradients, own, last) -> jax.Array:
  """The rate with which the first update on a rollout moves by `_TARGET`.

  Up to terms of third order in the update. Steps are proportional to the rate,
  as the parameters do not move before.
  """
  rate = jnp.float32(rate)
  vector, state = _remember(given, run, rate, gradients)
  update = run.step(rate, own, state, vector)[2]
  scale = 1.0
  for _ in range(2):
    ends = [
      tools.score(given.params + sign * scale * update, last.layout)
      for sign in (1, -1)
    ]
    change = np.asarray(ends[0] - ends[1])[last.mask] / 2
    scale *= float(_TARGET / np.abs(change).mean())
  return scale * rate


def _clipped(tools, last: _Rollout, betas=None):
  """What `_follow` needs: the coefficients of GRPO, its clip plain or not."""

  def slope(k, point, logp, old):
    del point
    return tools.slopes[betas](logp, old, k, last.mask, last.reward)

  return slope


def _foreseen(tools, run, rate, last: _Rollout, k, point, logp, old):
  """Coefficients without those of tokens that a coast leads outside."""
  vector, state = point
  for _ in range(UPDATES - k):
    vector, state, _ = run.coast(rate, state, vector)
  end = tools.score(vector, last.layout)
  c = tools.slopes['none'](logp, old, k, last.mask, last.reward)
  return jnp.where(_is_clipped(end - old, last), 0, c)


def _is_clipped(log_ratio, last: _Rollout):
  """Whether tokens are outside the range, where they are pushed to."""
  low, high = _INSIDE
  up, down = last.pull > 0, last.pull < 0
  return (up & (log_ratio > high)) | (down & (log_ratio < low))


def _follow(tools, run, rate, start, last: _Rollout, slope) -> _Path:
  """Takes the updates on the last rollout.

  Args:
    tools: Of the policy.
    run: Of the optimizer.
    rate: Its learning rate.
    start: The vector and the state before them.
    last: The rollout.
    slope: `(updates done, point, logp, old logp) -> coefficients`.
  """
  points, lengths = [start], []
  logp = [tools.score(start[0], last.layout)]
  for k in range(UPDATES):
    vector, state = points[-1]
    c = slope(k, points[-1], logp[-1], logp[0])
    gradient = tools.pull(vector, last.layout, c)
    vector, state, update = run.step(rate, gradient, state, vector)
    lengths.append(float(jnp.linalg.norm(update)))
    points.append((vector, state))
    logp.append(tools.score(vector, last.layout))
  return _Path(points, np.stack(logp), lengths)


def _past_the_clip(tools, run, rate, path: _Path, last: _Rollout):
  """How far clipped tokens move outward, by memory alone and in truth.

  Returns:
    - `carried`, `fresh`: mean outward change of log p of clipped tokens by an
      update without a gradient, and what the gradient adds to it, nats;
    - `clipped`: the share of tokens that are clipped, over these updates;
    - `last`: what the last update with a gradient did to the tokens that it has
      clipped, nats; `coast`: how many of these they move after `COASTED`
      updates without a gradient; `real`: after each of the updates that are
      left;
    - `steps`: the lengths of the steps of this coast, over that of the last one
      with a gradient; `way`: the length of the way to the `z` of schedule-free
      where they begin, in the same unit, or None.
  """
  way = np.sign(last.pull)
  outside = np.array([_is_clipped(x - path.logp[0], last) for x in path.logp])
  carried, moved, count = 0.0, 0.0, 0
  for k in range(1, UPDATES):
    vector, state = path.points[k]
    alone = tools.score(run.coast(rate, state, vector)[0], last.layout)
    chosen = outside[k]
    by_memory = way * (np.asarray(alone) - path.logp[k])
    in_truth = way * (path.logp[k + 1] - path.logp[k])
    carried += float(by_memory[chosen].sum())
    moved += float(in_truth[chosen].sum())
    count += int(chosen.sum())
  just = outside[LIVE] & ~outside[LIVE - 1]
  assert just.any()
  outward = lambda new, old: float((way * (new - old))[just].mean())
  live = outward(path.logp[LIVE], path.logp[LIVE - 1])
  vector, state = path.points[LIVE]
  coast, steps, to_z = [], [], None
  if isinstance(state, optax.contrib.ScheduleFreeState):
    z = jax.flatten_util.ravel_pytree(state.z)[0]
    to_z = float(jnp.linalg.norm(z - vector)) / path.lengths[LIVE - 1]
  for n in range(1, COASTED[-1] + 1):
    vector, state, length = run.coast(rate, state, vector)
    steps.append(float(length) / path.lengths[LIVE - 1])
    if n in COASTED:
      logp = np.asarray(tools.score(vector, last.layout))
      coast.append(outward(logp, path.logp[LIVE]) / live)
  return {
    'carried': carried / count,
    'fresh': (moved - carried) / count,
    'clipped': count / (UPDATES - 1) / int(last.mask.sum()),
    'last': live,
    'coast': coast,
    'real': [outward(x, path.logp[LIVE]) / live for x in path.logp[LIVE + 1 :]],
    'steps': steps,
    'way': to_z,
  }


def _off(tools, run, rate, path: _Path, last: _Rollout) -> float:
  """How far a loss without rewards leads from where a coast does."""
  vector, state = coasted, coasted_state = path.points[LIVE]
  for k in range(_LEFT):
    c = tools.slopes[None](
      tools.score(vector, last.layout), path.logp[0], LIVE + k, last.mask,
      np.ones_like(last.reward),
    )  # fmt: skip
    gradient = tools.pull(vector, last.layout, c)
    vector, state, _ = run.step(rate, gradient, state, vector)
    coasted, coasted_state, _ = run.coast(rate, coasted_state, coasted)
  return float(jnp.linalg.norm(vector - coasted)) / path.lengths[LIVE - 1]


def _ends(path: _Path, last: _Rollout) -> dict[str, list[float]]:
  """Before and after every update: where the policy is, on the rollout.

  Returns:
    `outside`, the share of tokens outside the range, on either side; `kl`, the
    estimate of KL(old || policy), nats per token; `gain`, of the surrogate
    without a clip.
  """
  d = (path.logp - path.logp[0]).astype(np.float64)
  low, high = _INSIDE
  outside = (d < low) | (d > high)
  return {
    'outside': outside[:, last.mask].mean(1).tolist(),
    'kl': (np.expm1(d) - d)[:, last.mask].mean(1).tolist(),
    'gain': (last.pull * np.expm1(d)).sum((1, 2, 3)).tolist(),
  }


def _over_seeds(numbers, name: str, read: Callable[..., float]) -> Measured:
  return claims.over_seeds([read(one) for one in numbers['optimizers'][name]])


def _laws() -> dict[str, np.ndarray]:
  """Lengths of steps without a gradient over the last one with a gradient.

  Those of schedule-free are over the way to its `z`.
  """
  n, live = np.arange(1, COASTED[-1] + 1), MEMORY + LIVE
  free = live / ((live + n - 1) * (live + n))
  return {
    'adamw': optim.coasting_ratio(n, *_BETAS, live),
    'momentum': 0.9**n,
    'schedule_free_sgd': free,
    'schedule_free_adam': free,
  }


def _errors(numbers) -> dict[str, float]:
  """The largest relative errors of the laws, over seeds and steps."""
  found = {}
  for name, law in _laws().items():
    steps = np.array([one['steps'] for one in numbers['optimizers'][name]])
    if name.startswith('schedule_free'):
      ways = [one['way'] for one in numbers['optimizers'][name]]
      steps = steps / np.array(ways)[:, None]
    found[name] = float(np.abs(steps / law - 1).max())
  return found


def _farthest_from_one(by_name) -> float:
  """The last step of a coast over its first one, of Lion and Muon."""
  kept = [
    one['steps'][-1] / one['steps'][0]
    for name in ('lion', 'muon')
    for one in by_name[name]
  ]
  return max(kept, key=lambda one: abs(one - 1))


def _measure(numbers) -> dict[str, Measured]:
  by_name, errors = numbers['optimizers'], _errors(numbers)
  last = lambda name: np.array([one['coast'][-1] for one in by_name[name]])
  further = [
    claims.over_seeds((last(name) / last('adamw')).tolist())
    for name in ('lion', 'muon')
  ]
  found = {
    'exact': Measured(max(numbers['exact'].values())),
    'still': Measured(
      max(max(one['steps']) for name in STILL for one in by_name[name])
    ),
    'law_adamw': Measured(errors['adamw']),
    'law_momentum': Measured(errors['momentum']),
    'constant': Measured(_farthest_from_one(by_name)),
    'law_free': Measured(
      max(errors['schedule_free_sgd'], errors['schedule_free_adam'])
    ),
    'further': claims.furthest(further, -1),
  }
  left = COASTED.index(_LEFT)
  for name in MOVING:
    found[f'carried_{name}'] = _over_seeds(
      numbers, name, lambda one: one['carried']
    )
    found[f'foretold_{name}'] = _over_seeds(
      numbers, name, lambda one: one['real'][-1] / one['coast'][left]
    )
  for clip in CLIPS[1:]:
    ratio, gain = _compared(numbers, clip)
    found |= {
      f'{clip}_fewer': claims.furthest(ratio),
      f'{clip}_keeps': claims.furthest(ratio),
      f'{clip}_gains': (
        claims.UNKNOWN
        if any(np.isnan(one.mean) for one in gain)
        else claims.furthest(gain, -1)
      ),
    }
  return found


def _compared(numbers, clip: str) -> tuple[list[Measured], list[Measured]]:
  """For the optimizers of `NARROWED`: a clip beside the plain one.

  Returns:
    The share of tokens outside at the end, over that with the plain clip; and
    the gain, over that with the plain clip at a rate where its KL is as large.
  """
  outside, gain = [], []
  for arms in numbers['clips'].values():
    pairs = list(zip(arms[clip], arms['plain'], strict=True))
    outside.append(
      claims.over_seeds(
        [new['outside'][-1] / old['outside'][-1] for new, old in pairs]
      )
    )
    gain.append(
      claims.over_seeds(
        [
          new['gain'][-1] / _gain_at(new['kl'][-1], [*lower, old])
          for lower, (new, old) in zip(arms['lower'], pairs, strict=True)
        ]
      )
    )
  return outside, gain


def _gain_at(kl: float, paths: Sequence[dict[str, Any]]) -> float:
  """The gain at the end of a path that ends at this KL, between some paths.

  Both begin at 0. A gain is about proportional to the root of the KL.

  Args:
    kl: Nats.
    paths: By their rates, upward.

  Returns:
    NaN above the largest KL of these paths.
  """
  kls = [0.0, *np.maximum.accumulate([one['kl'][-1] for one in paths])]
  gains = [0.0, *(one['gain'][-1] for one in paths)]
  found = np.interp(np.sqrt(kl), np.sqrt(kls), gains, right=np.nan)
  return float(found)


def _draw(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  by_name = numbers['optimizers']
  mean = lambda name, what: np.mean([x[what] for x in by_name[name]], 0)
  shown = 'adamw', 'momentum', 'lion', 'muon', 'schedule_free_adam'
  for name, color in zip(shown, SERIES, strict=True):
    given = {'color': colors[color], 'ms': 4}
    label = OPTIMIZERS[name].label
    left.plot(COASTED, mean(name, 'coast'), label=label, **given)
    left.plot(range(1, _LEFT + 1), mean(name, 'real'), 'o', **given)
  left.axhline(0, color=colors['faint'], lw=1, ls=':')
  left.set(
    xscale='log',
    title='line: optim.coast; dots: with gradients',
    xlabel='updates after the clip',
    ylabel='outward way / last step before the clip',
  )
  left.legend()
  names = list(OPTIMIZERS)[::-1]
  colored = ('carried', 'second'), ('fresh', 'first')
  for k, (part, color) in enumerate(colored):
    parts = [
      _over_seeds(numbers, x, lambda one, part=part: one[part]) for x in names
    ]
    right.barh(
      np.arange(len(names)) - 0.2 * (2 * k - 1), [x.mean for x in parts], 0.4,
      xerr=[np.nan_to_num(x.half) for x in parts],
      ecolor=colors['text'], color=colors[color], alpha=0.8, label=part,
    )  # fmt: skip
  right.axvline(0, color=colors['text'], lw=1)
  right.set_yticks(
    range(len(names)), [OPTIMIZERS[x].label.split(' (')[0] for x in names]
  )
  right.set_xlabel('outward, nats per update')
  right.grid(False, axis='y')
  right.legend()
  way = {name: mean(name, 'coast')[-1] for name in shown}
  return (
    f'In {COASTED[-1]} updates without a gradient clipped tokens go on by '
    f'{way["adamw"]:.1f} of their last steps under AdamW, '
    f'{way["lion"]:.1f} under Lion, {way["muon"]:.1f} under Muon'
  )


EXPERIMENTS = {
  'other_optimizers': Experiment(
    'E16',
    'optimizers other than Adam past the clip',
    CLAIMS,
    _measure,
    _draw,
    _run,
  ),
}
