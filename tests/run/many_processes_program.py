"""One of several processes that train together, case after case.

  many_processes_program.py COORDINATOR NUMBER RANK FOLDER [CASE ...]

Writes what each case has ended with to `FOLDER/CASE.RANK.json`, and where it is
in one that takes long to `FOLDER/where.RANK`.
"""

import functools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
import traceback

import jax
import numpy as np

from grpo_jax.environments import sessions
from grpo_jax.hosts import joining
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import judging
from grpo_jax.run import learning
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from tests import cli
from tests import judges
from tests import runs
from tests.run import played

LATE = 40  # a call of the judge in the second rollout
LATER = 70  # in the third, before which groups are kept for it
LONG_SECS = 25.0  # of a case, most of which take 3 to 15
# The way of a rollout with everything in it that several processes decide on.
EVERYTHING = {
  **runs.WARM,
  'reward': 'tests.run.many_processes_program:judge',
  'mesh.fsdp': 4,
  'checkpoint.keep_last': 2,
  'learner.method_kwargs': {'kl_coefficient': 0.1},
  'learner.batches': 2,
  'learner.epochs': 2,
  'learner.micro_rows': 4,
  'reference.refresh_steps': 3,
  'reference.refresh_weight': 0.5,
  'sampler.prompts': 8,
  'sampler.resample_rounds': 2,
  'sampler.retire_solved': True,
  'sampler.group': 2,
  'optim.decay': 'cosine',
}

SHORT = {'steps': 2, 'optim.warmup_steps': 0}


_calls, _at_call = 0, {}


def judge(prompt, completion, example):
  """`even`; in the call of that number something else happens first."""
  global _calls
  _calls += 1
  _at_call.get(_calls, lambda: None)()
  return judges.even(prompt, completion, example)


def at_random(prompt, completion, example):
  return random.choice([0.0, 1.0])  # seeded by the system, in each process


def train(folder, stop, at_call=None, **changes):
  """One start of a run; `at_call` is for this process alone."""
  global _calls, _at_call
  _calls, _at_call = 0, at_call or {}
  return loop.train(runs.small(**{**EVERYTHING, **changes}), folder, stop)


def whole(folder, rank, stop):
  return train(folder, stop)


OWN = 'tests.run.batch_fields_test'
FIELDS = {
  'data.train': f'{OWN}:records',
  'data.heldout': '',
  'learner.method': f'{OWN}:weighted',
  'learner.method_kwargs': {},
  'learner.fields': {'of_tokens': f'{OWN}:by_token'},
  'optim.decay': 'constant',
}


def own_fields(folder, rank, stop):
  """A method that reads numbers of records and of tokens."""
  del rank
  return train(folder, stop, **SHORT, **FIELDS)


def changed(folder, rank, stop):
  """It goes on with another learning rate, as all processes say."""
  del rank
  changes = {**EVERYTHING, **SHORT, **FIELDS, 'steps': 3, 'optim.lr': 1e-5}
  workdir, allowed = folder.parent / 'own_fields', ('optim.lr',)
  return loop.train(runs.small(**changes), workdir, stop, allowed=allowed)


def allowed_by_one(folder, rank, stop):
  allowed = ('optim.lr',) if rank else ()
  return loop.train(runs.small(**EVERYTHING), folder, stop, allowed=allowed)


def tensor_across(folder, rank, stop):
  """All rows on all devices; one of the processes is to hold them."""
  changes = {'mesh.fsdp': 1, 'mesh.tensor': 4, 'steps': 1}
  changes['optim.warmup_steps'] = 0
  return train(folder, stop, **changes)


def sampler_tensor_2(folder, rank, stop):
  """Weights are split within each process while completions are drawn."""
  return train(folder, stop, **SHORT, **{'sampler.tensor': 2})


def sampler_tensor_4(folder, rank, stop):
  """They are split over both."""
  return train(folder, stop, **SHORT, **{'sampler.tensor': 4})


def slices(folder, rank, stop):
  """The devices of each process are a slice."""
  return train(folder, stop, **{'mesh.slices': 2, 'mesh.fsdp': 2})


def stopped(folder, rank, stop):
  """A signal to process 1 in the third rollout."""
  at_call = {LATER: lambda: os.kill(os.getpid(), signal.SIGTERM)}
  return train(folder, stop, at_call if rank == 1 else {})


def goes_on(folder, rank, stop):
  del stop
  with stop_signal.Stop() as another:
    return train(folder.parent / 'stopped', another)


def raises(folder, rank, stop):
  def fail():
    raise KeyError('no such answer')

  return train(folder, stop, {LATE: fail} if rank == 1 else {})


def goes_on_after_it(folder, rank, stop):
  return train(folder.parent / 'raises', stop)


def started_differently(folder, rank, stop):
  return train(folder, stop, seed=rank)


def unreadable(folder, rank, stop):
  """Process 1 cannot read the newest checkpoint of what `whole` has done."""
  if rank == 0:
    shutil.copytree(folder.parent / 'whole', folder)
  import orbax.checkpoint as ocp

  restore, left = ocp.CheckpointManager.restore, [rank == 1]

  def failing(self, *args, **kwargs):
    if left and left.pop():
      raise OSError(5, 'Input/output error')
    return restore(self, *args, **kwargs)

  ocp.CheckpointManager.restore = failing
  try:
    with joining.joined() as peers:
      peers.exchange()  # the copy is there
    return train(folder, stop)
  finally:
    ocp.CheckpointManager.restore = restore


def disk_full(folder, rank, stop, where=1, times=2, **changes):
  """Saves from the second rollout on fail in one process, so many times."""
  from orbax.checkpoint._src.serialization import serialization

  write, left = serialization.async_serialize_from_host, 0

  async def failing(*args, **kwargs):
    nonlocal left
    if left:
      left -= 1
      raise OSError(28, 'No space left on device')
    return await write(*args, **kwargs)

  def fill():
    nonlocal left
    left = times

  serialization.async_serialize_from_host = failing
  try:
    at_call = {LATE: fill} if rank == where else {}
    return train(folder, stop, at_call, **changes)
  finally:
    serialization.async_serialize_from_host = write


def disk_full_first(folder, rank, stop):
  return disk_full(folder, rank, stop, where=0)


def disk_stays_full(folder, rank, stop):
  return disk_full(folder, rank, stop, times=math.inf, **SHORT)


def room_again(folder, rank, stop):
  return train(folder.parent / 'disk_stays_full', stop, **SHORT)


def replayed(folder, rank, stop):
  """The rollouts of `whole`, and what the user's function sees of them."""
  del rank
  seen = []

  def note(step, metrics, rollout):
    seen.append((step, rollout.texts, rollout.batch.tokens.tolist()))

  completions = folder.parent / 'whole' / 'completions'
  config = runs.small(**EVERYTHING)
  ended = loop.train(config, folder, stop, completions, on_rollout=note)
  return ended | {'seen': seen}


def in_flight(folder, rank, stop, programs=200, sums=24):
  """Many programs with many sums, which nothing waits for but the last."""
  del folder, rank, stop
  mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))

  @functools.partial(jax.jit, compiler_options=cli.DEFAULT_SCHEDULER)
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=jax.P(),
    out_specs=jax.P(),
    check_vma=False,
  )
  def mean(parts):
    mine = jax.lax.axis_index('x')  # 0 to 3
    return [
      jax.lax.all_gather(jax.lax.pmean(x * mine, 'x'), 'x') for x in parts
    ]

  parts = [np.full(8, 2 * i, np.float32) for i in range(sums)]
  for _ in range(programs):
    last = mean(parts)
  return {'means': [float(np.asarray(x).mean()) for x in last]}


def random_reward(folder, rank, stop):
  """What this process has trained on, of a judge that is no function."""
  learn, rewards, unknown = learning.learn, [], []

  def learn_and_note(updater, layout, state, rollout, *others):
    rewards.extend(rollout.batch.reward.ravel().tolist())
    elsewhere = np.flatnonzero(rollout.holder != rank)
    assert not any(text for p in elsewhere for text in rollout.texts[p])
    unknown.append(elsewhere.tolist())
    return learn(updater, layout, state, rollout, *others)

  learning.learn = learn_and_note
  name = f'{__name__}:at_random'
  try:
    ended = train(folder, stop, reward=name)
    return ended | {'rewards': rewards, 'unknown': unknown}
  finally:
    learning.learn = learn


def evaluated(folder, rank, stop):
  """`eval` and `sample` of what `whole` has learned."""
  del rank
  with joining.joined() as peers:
    peers.pass_on(stop)
    return answers(folder.parent / 'whole', judging.shared(peers, stop), peers)


def answers(workdir, shared, peers=processes.ALONE):
  """What a policy says, and how it does; by however many processes."""
  policy = policies.load(
    runs.small(**EVERYTHING), workdir, to_evaluate=True, peers=peers
  )
  told = [*policies.sample(policy, ['47+85='], number=2)]
  summary = policies.evaluate(policy, 9, 4, [1, 4], judging=shared)
  return {'summary': summary, 'told': told}


def gsm8k(folder, rank, stop, steps=1):
  """A start that ends in the middle of an epoch of 12 problems."""
  del rank
  kwargs = {'data_dir': str(folder.parent / 'tfds')}
  changes = {
    'data.train': ({'name': 'tfds:gsm8k', 'kwargs': kwargs},),
    'data.heldout': '',
    'data.prompt_field': 'question',
    'reward': 'gsm8k',
    'warm_up.steps': 0,
    'optim.decay': 'constant',
    'sampler.resample_rounds': 0,
    'sampler.retire_solved': False,
    'steps': steps,
  }
  return train(folder, stop, **changes)


def gsm8k_goes_on(folder, rank, stop):
  return gsm8k(folder.parent / 'gsm8k', rank, stop, steps=3)


EPISODES = {'mesh.fsdp': 4, 'sampler.prompts': 6, 'learner.micro_rows': 4}


def episodes(folder, rank, stop, at_wait=None, **changes):
  """At that wait for environments something else happens first."""
  del rank
  real, waits = sessions.Player.news, 0

  def news(self, *secs):
    nonlocal waits
    waits += 1
    (at_wait or {}).get(waits, lambda: None)()
    return real(self, *secs)

  sessions.Player.news = news
  try:
    ended = played.train(folder, stop, **{**EPISODES, **changes})
    return ended | {'waits': waits}
  finally:
    sessions.Player.news = real


def episodes_in_workers(folder, rank, stop):
  return episodes(folder, rank, stop, **{'environment.where': 'workers'})


def episodes_over_all(folder, rank, stop):
  """No process has all the devices that hold a row."""
  return episodes(folder, rank, stop, **{'mesh.fsdp': 1, 'mesh.tensor': 4})


def episodes_stopped(folder, rank, stop):
  """A signal to process 0, while process 1 waits for its environments."""
  at_wait = {7: wait_until_stopped if rank else interrupt}
  return episodes(folder, rank, stop, at_wait)


def wait_until_stopped():
  # In naps: a signal that comes as one begins is heard behind it.
  for _ in range(1200):
    time.sleep(0.1)
  raise AssertionError('nobody has ended the wait')


def interrupt():
  time.sleep(1)  # the other waits for its environments by then
  os.kill(os.getpid(), signal.SIGTERM)


def episodes_go_on(folder, rank, stop):
  del stop
  with stop_signal.Stop() as another:
    return episodes(folder.parent / 'episodes_stopped', rank, another)


def episodes_raise(folder, rank, stop):
  def fail():
    raise ValueError('no room for a worker')

  return episodes(folder, rank, stop, {14: fail} if rank else {})


def episodes_go_on_after_it(folder, rank, stop):
  return episodes(folder.parent / 'episodes_raise', rank, stop)


CASES = {
  case.__name__: case
  for case in (
    whole,
    evaluated,
    random_reward,
    gsm8k,
    gsm8k_goes_on,
    replayed,
    own_fields,
    changed,
    allowed_by_one,
    tensor_across,
    sampler_tensor_2,
    sampler_tensor_4,
    slices,
    stopped,
    goes_on,
    raises,
    goes_on_after_it,
    started_differently,
    unreadable,
    disk_full,
    disk_full_first,
    disk_stays_full,
    room_again,
    in_flight,
    episodes,
    episodes_in_workers,
    episodes_over_all,
    episodes_stopped,
    episodes_go_on,
    episodes_raise,
    episodes_go_on_after_it,
  )
}


def tell(where, over):
  """Where this process is, in a case that the other may wait for.

  Gloo gives up after 30 s. `faulthandler.dump_traceback_later` would read the
  frames of threads that run, and end this process by SIGSEGV now and then.
  """
  while not over.wait(LONG_SECS):
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
      print(names.get(number), *traceback.format_stack(frame), file=where)
    where.flush()


def main(coordinator, number, rank, folder, *names):
  where = (pathlib.Path(folder) / f'where.{rank}').open('w')
  if hasattr(os, 'sched_setaffinity'):  # so few that `in_flight` can fail
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
  joining.initialize(coordinator, int(number), int(rank))
  for name in names or CASES:
    case = CASES[name]
    print(name, file=where, flush=True)
    over = threading.Event()
    threading.Thread(target=tell, args=(where, over), daemon=True).start()
    with stop_signal.Stop() as stop:
      try:
        told = case(pathlib.Path(folder) / name, int(rank), stop)
      except ValueError as error:
        told = {'raised': type(error).__name__, 'text': str(error)}
      told['signal'] = stop.signal and stop.signal.name
    over.set()
    file = pathlib.Path(folder) / f'{name}.{rank}.json'
    file.write_text(json.dumps(told))
    if name == 'stopped' and rank == '0':  # for other numbers of processes
      for copy in 'one', 'four':
        shutil.copytree(pathlib.Path(folder) / name, f'{folder}/{copy}')


if __name__ == '__main__':
  # Not that of `__main__`: the judge is looked up by the module's own name.
  from tests.run import many_processes_program

  many_processes_program.main(*sys.argv[1:])
