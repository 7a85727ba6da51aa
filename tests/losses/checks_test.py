"""What a chain refuses, in sentences without names of Python or of helpers."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses

SHAPE = (2, 4, 3)
BATCH = losses.make_batch(
  jnp.ones(SHAPE, bool), jnp.arange(8.0).reshape(SHAPE[:2])
)


def moving():
  """A chain whose state holds a number."""
  return losses.chain(
    losses.center_by_group(),
    losses.mean_over_tokens(),
    losses.ppo_clip(low=lambda rollout: 0.2, high=0.2),
  )


METHOD = moving()
OTHER = losses.methods.rloo()
FIRST = losses.LossTransform(
  lambda: (),
  lambda *both: both,
  lambda batch, _: batch,
  lambda terms, *_: terms,
)


def credited(function):
  """Runs `credit` on a chain that sets the advantage by a function."""
  method = losses.chain(losses.set_advantage(function))
  return losses.credit(method, BATCH, method.init())


def credited_by(link, function, *others):
  """Runs the `credit` of a transform whose own is replaced, or of a chain."""
  method = link._replace(credit=function)
  method = losses.chain(method, *others) if others else method
  return losses.credit(method, BATCH, method.init())


def prepared():
  batch, state = losses.credit(METHOD, BATCH, METHOD.init())
  return losses.prepare(METHOD, batch, state)


def keep(advantage, batch):
  return advantage


NOT_OF_IT = 'got a state that is not of this method; give method.init'
REFUSED = {
  'no call': (
    lambda: losses.chain(losses.mean_over_tokens),
    r'chain got mean_over_tokens, .*call it, as in mean_over_tokens\(\)',
  ),
  'a list': (
    lambda: losses.chain([OTHER, OTHER]),
    r'chain got a list of 2; give .* losses.chain\(\*transforms\)',
  ),
  'a number': (lambda: losses.chain(3), 'chain got 3, which is no LossTra'),
  'a method without its call': (
    lambda: losses.credit(losses.methods.grpo, BATCH, ()),
    r'credit got grpo, .*call it, as in grpo\(\)',
  ),
  'requires': (
    lambda: losses.on_advantage(keep, requires='logp_ref'),
    r"keep got requires='logp_ref', .*give .*requires=\('logp_ref',\)",
  ),
  'requires of a transform by hand': (
    lambda: losses.chain(OTHER._replace(requires='logp_ref')),
    "chain got requires='logp_ref'",
  ),
  'scope': (
    lambda: losses.add_penalty(keep, scope='all'),
    "keep got scope='all'; give 'batch' if",
  ),
  'function': (lambda: losses.on_reward(3), 'got 3, which is no function'),
  'nothing returned': (
    lambda: credited(lambda batch: None),
    'returned None; return an array',
  ),
  'no metrics': (
    lambda: credited(lambda batch: (batch.reward, 3)),
    'returned a pair whose second part is 3; give metrics',
  ),
  'no field': (
    lambda: losses.make_batch(BATCH.mask, BATCH.reward, ids=3),
    r"make_batch got ids, which is no field of Batch; .*extras=\{'ids': ...\}",
  ),
  'a misspelt field': (
    lambda: losses.make_batch(BATCH.mask, BATCH.reward, lop_old=3),
    'got lop_old, .*did you mean logp_old',
  ),
  'prepare before credit': (
    lambda: losses.prepare(METHOD, BATCH, METHOD.init()),
    'prepare got a batch without advantage; run losses.credit',
  ),
  'a batch alone, of a method by hand': (
    lambda: credited_by(OTHER, lambda batch, state: batch),
    'credit of a transform returned a Batch of 15; return a pair',
  ),
  'nothing, of a method by hand': (
    lambda: credited_by(OTHER, lambda batch, state: None),
    'credit of a transform returned None; return a pair',
  ),
  'no batch before the last transform': (
    lambda: credited_by(FIRST, lambda batch, state: (None, state), OTHER),
    'credit of a transform returned NoneType; return the Batch',
  ),
  'no batch before the last one in prepare': (
    lambda: losses.prepare(
      losses.chain(FIRST._replace(prepare=lambda *_: None), OTHER),
      losses.credit(OTHER, BATCH, OTHER.init())[0],
      ((), OTHER.init()),
    ),
    'prepare of a transform returned NoneType; return the Batch',
  ),
  'no terms before the last one': (
    lambda: losses.surrogate_loss(
      losses.chain(FIRST._replace(apply=lambda *_: None), OTHER),
      jnp.zeros(SHAPE),
      prepared(),
      ((), OTHER.init()),
    ),
    'apply of a transform returned NoneType; return the SurrogateTerms',
  ),
  'no state': (
    lambda: losses.credit(METHOD, BATCH, None),
    f'credit {NOT_OF_IT}',
  ),
  'init without its call': (
    lambda: losses.credit(METHOD, BATCH, METHOD.init),
    f'credit {NOT_OF_IT}',
  ),
  'state of a longer chain': (
    lambda: losses.credit(METHOD, BATCH, losses.methods.dapo().init()),
    f'credit {NOT_OF_IT}',
  ),
  'state of a chain of this length': (
    lambda: losses.credit(METHOD, BATCH, ({}, {}, {})),
    f'credit {NOT_OF_IT}',
  ),
  'state of another chain in prepare': (
    lambda: losses.prepare(METHOD, prepared(), ()),
    f'prepare {NOT_OF_IT}',
  ),
  'state of another chain in the loss': (
    lambda: losses.surrogate_loss(METHOD, jnp.zeros(SHAPE), prepared(), ()),
    f'surrogate_loss {NOT_OF_IT}',
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_mistakes_of_composition_get_a_sentence(name):
  call, words = REFUSED[name]
  with pytest.raises(ValueError, match=words):
    call()


def test_an_error_of_a_users_function_stays_as_it_is():
  def fails(batch):
    raise KeyError('mine')

  with pytest.raises(KeyError, match='mine'):
    credited(fails)


# Their bounds are of a probability, a divergence or a log-ratio.
OF_ANOTHER = (
  'gate_probability_change', 'dppo_tv', 'gate_binary_kl', 'dppo_kl',
  'clip_log_ratio', 'gmpo',
)  # fmt: skip
DISTANCES = [
  function
  for module in (losses, losses.methods, losses.contrib)
  for function in (getattr(module, name) for name in module.__all__)
  if callable(function)
  and {'low', 'high'} <= set(inspect.signature(function).parameters)
  and function.__name__ not in OF_ANOTHER
]


@pytest.mark.parametrize('function', DISTANCES, ids=lambda f: f.__name__)
def test_bounds_are_not_taken_for_distances(function):
  with pytest.raises(ValueError, match='give their .*low=0.2 and high=0.28'):
    function(low=0.8, high=1.28)
  with pytest.raises(ValueError, match='low=-0.1; give the distance'):
    function(low=-0.1, high=0.2)
  function(low=0.9, high=0.95)


@pytest.mark.parametrize('name', OF_ANOTHER)
def test_other_bounds_are_distances_too(name):
  function = getattr(losses, name, None) or getattr(losses.methods, name)
  for low, high in (-0.1, 0.2), (np.float32(0.2), np.float32(-0.1)):
    with pytest.raises(ValueError, match='=-0.1.*; give the distance'):
      function(low=low, high=high)
  if name in ('gate_probability_change', 'dppo_tv'):
    with pytest.raises(ValueError, match='high=1.28; .* from 0 to 1'):
      function(low=0.8, high=1.28)


def test_there_are_functions_of_distances():
  losses.ppo_clip(low=0.8, high=10.0)  # DeepSeek-R1 has this high
  assert len(DISTANCES) > 25 and losses.ppo_clip in DISTANCES
