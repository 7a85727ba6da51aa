"""`grpo_jax.train`, `evaluate` and `sample`: commands from Python.

They do what the commands of `grpo-jax` do, and take Python objects where the
command line takes names. A notebook needs no module files for its rewards, data
and method.
"""

import atexit
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import losses
from grpo_jax.config.load import load_config
from grpo_jax.hosts import joining
from grpo_jax.hosts import stop_signal
from grpo_jax.models import foreign
from grpo_jax.run import judging
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import placing
from grpo_jax.run.keep import records
from grpo_jax.run.progress import OnRollout

if TYPE_CHECKING:
  from ml_collections import ConfigDict


@stop_signal.no_exit()
def train(
  config: 'config_lib.Config | ConfigDict | str | os.PathLike[str] | None',
  workdir: str | os.PathLike[str],
  *,
  rewards: Sequence[Any] | None = None,
  prompts: Any = None,
  heldout: Any = None,
  demonstrations: Any = None,
  method: losses.LossTransform | Callable[..., Any] | str | None = None,
  fields: Mapping[str, Callable[..., Any] | str] | None = None,
  tokenizer: data.Tokenizer | str | None = None,
  model: foreign.Pretrained | str | None = None,
  environment: Any = None,
  agent: Callable[..., Any] | str | None = None,
  on_rollout: OnRollout | None = None,
  allow_changed: Sequence[str] = (),
) -> dict[str, float | str | None]:
  """Trains a model, or goes on with the run in `workdir`.

  An argument that is None leaves the config as it is. Any other replaces the
  name in the config. Each argument except `on_rollout` may also be a name as in
  a config, such as 'exact_match' or 'my_lab.rewards:brevity'.

  The workdir gets a record of each object, `given.json`: its source where
  Python has it, and a hash. To go on with the run, call `train` with the same
  objects. Objects with another hash are refused. `evaluate` needs the rewards,
  the held-out prompts, the tokenizer, the model and the environment or the
  agent again, `sample` only the last three.

  Ctrl-C, or interrupting the notebook's kernel, saves the run and then raises
  KeyboardInterrupt. A second Ctrl-C does not wait for the save.

  Args:
    config: A `grpo_jax.config.Config`; or a ConfigDict, such as
      `grpo_jax.config.default()` with your changes; or a config file with its
      argument, such as 'configs/arithmetic.py:mu=8'; or None for the config of
      the run in `workdir`.
    workdir: The directory of the run; made if it is not there.
    rewards: A list of functions `(prompt, completion, example) -> float`, see
      `help(grpo_jax.rewards)`. In place of a function there may be a pair
      `(function, weight)` or a `grpo_jax.rewards.WeightedReward`, which may
      also have the function called in worker processes.
    prompts: A list of dicts, or any object with `__len__` and `__getitem__`
      that returns dicts. Each has a 'prompt', a text or a list of messages, and
      whatever the rewards read of `example`, such as 'answer'.
    heldout: Prompts like these that are not trained on; [] for none. If
      `prompts` take the place of the built-in arithmetic and `heldout` is None,
      the run has none.
    demonstrations: Records with 'prompt' and 'answer' for the supervised
      warm-up, of which `config.warm_up` says how long it is.
    method: A `LossTransform`, such as `losses.methods.grpo(high=0.3)`, or a
      function without arguments that makes one, such as
      `functools.partial(losses.methods.dapo, high=0.3)`, whose other arguments
      may come from the run (see `losses.takes_from_run`). It replaces
      `config.learner.method_kwargs` too.
    fields: Functions `(record, ids) -> numbers` by name, one number for each id
      of a completion: what a method of your own reads as
      `batch.extras[name]`, f32[P,G,T], if it requires the name. What is not
      named here is the number of this name in each record, f32[P,G].
    tokenizer: Such as `grpo_jax.data.character_tokenizer('0123456789+=')` or
      `grpo_jax.data.Tokenizer.from_folder(path)`.
    model: What `grpo_jax.models.foreign.from_nnx(module)` returns for a Flax
      NNX module of your own. It replaces all of `config.model`.
    environment: An async function `(policy, example)`, a class with `reset` and
      `step`, or a list of tools; see grpo_jax/environments/README.md. It is
      played in this process, and its arguments are `config.environment.kwargs`.
    agent: A function `(example, base_url, api_key)` that plays an episode as a
      client of OpenAI's API; see grpo_jax/serving/README.md. It takes the place
      of an environment, in this process, and its other arguments are
      `config.agent.kwargs`.
    on_rollout: Called as `on_rollout(step, metrics, rollout)` after every
      rollout: how many are done, its metrics by name, and the
      `grpo_jax.episodes.types.Rollout` with prompts, completions and rewards.
      If it returns True, the run is saved and ends. If it raises, the run is
      saved first, and `sys.exit` counts as an error. `rollout` is None for a
      rollout that an earlier start has sampled but not evaluated.
    allow_changed: Fields of the config in which this start may differ from the
      run in `workdir`, such as ['optim.lr']: the run goes on with the new
      values, and the workdir says since when.

  Returns:
    `before`, the held-out accuracy after the warm-up, before the first rollout
    (the mean of the first reward, which is an accuracy if it is 0 or 1);
    `after`, the last that was measured, and `after_step`, the rollouts done by
    then, fewer than `steps` if the run was stopped between two evaluations.
    Earlier starts are included; all three are None without held-out prompts.
    `steps`, the rollouts done, and `secs`, the duration of this call in
    seconds. `ended_early` says why, of a run that `config.early_stop` has
    ended.

  Raises:
    ValueError: Something that was given cannot be used, or is not what the run
      in `workdir` was given. The message says what to do.
  """
  if isinstance(allow_changed, str):
    allow_changed = allow_changed.split(',')
  allowed = config_lib.check_allowed(allow_changed)
  resolved, objects = placing.place(
    _resolved(config, workdir),
    rewards=rewards,
    prompts=prompts,
    heldout=heldout,
    demonstrations=demonstrations,
    method=method,
    fields=fields,
    tokenizer=tokenizer,
    model=model,
    environment=environment,
    agent=agent,
  )
  if on_rollout is not None:
    placing.check_callback(on_rollout)
  stop = stop_signal.Stop()
  # Python lets only the main thread receive signals.
  main = threading.current_thread() is threading.main_thread()
  with _quiet(), stop if main else contextlib.nullcontext():
    result = loop.train(
      resolved,
      os.fspath(workdir),
      stop,
      objects=objects,
      on_rollout=on_rollout,
      allowed=allowed,
    )
  # The run is saved: now do what the signal asked for.
  if stop.signal == signal.SIGINT:
    # Not by the signal: a shell starts background jobs with SIGINT ignored.
    raise KeyboardInterrupt
  if stop.signal is not None:
    signal.raise_signal(stop.signal)
  return result


@stop_signal.no_exit()
def evaluate(
  workdir: str | os.PathLike[str],
  *,
  rewards: Sequence[Any] | None = None,
  heldout: Any = None,
  tokenizer: data.Tokenizer | str | None = None,
  model: foreign.Pretrained | str | None = None,
  environment: Any = None,
  agent: Callable[..., Any] | str | None = None,
  answer: Callable[[str], str] | None = None,
  checkpoint: int | str = 'latest',
  examples: int = 0,
  samples: int = 8,
  ks: Sequence[int] = (1, 8),
  temperature: float | None = None,
  max_tokens: int | None = None,
  completions: str | None = None,
) -> dict[str, Any]:
  """Samples answers to held-out prompts: pass@k, majority@k, lengths.

  Args:
    workdir: The directory of a run; nothing in it is changed.
    rewards: Needed if the run was given them in Python; see `train`. The first
      says which answers are right. Others than the run's are allowed.
    heldout: Held-out prompts; needed if the run was given them in Python.
    tokenizer: Needed if the run was given it in Python.
    model: Needed if the run was given it in Python.
    environment: Likewise.
    agent: Likewise.
    answer: Reads the answer out of a completion, for majority@k; None: what
      `config.evaluation.answer` names.
    checkpoint: The number of a rollout, 'latest' or 'best'.
    examples: How many held-out prompts; 0: as many as the config says.
    samples: Completions of each prompt.
    ks: The k of pass@k and majority@k, none above `samples`.
    temperature: Of the sampling; 0: greedy; None: the config's.
    max_tokens: The longest completion; None: the config's.
    completions: A Parquet file for all completions with their rewards.

  Returns:
    The summary that `grpo-jax eval --json` prints.

  Raises:
    ValueError: Something is missing or cannot be used; the sentence says what.
  """
  resolved, objects = placing.place(
    _resolved(None, workdir),
    rewards=rewards,
    heldout=heldout,
    tokenizer=tokenizer,
    model=model,
    environment=environment,
    agent=agent,
  )
  with _quiet(), joining.joined() as peers:
    policy = policies.load(
      resolved, os.fspath(workdir), str(checkpoint), objects, True, peers
    )
    return policies.evaluate(
      policy,
      examples,
      samples,
      list(ks),
      temperature,
      max_tokens,
      completions if peers.is_first else None,
      answer,
      judging.shared(peers, stop_signal.Stop()),
    )


@stop_signal.no_exit()
def sample(
  workdir: str | os.PathLike[str],
  prompts: Sequence[data.Prompt | Mapping[str, Any]],
  *,
  tokenizer: data.Tokenizer | str | None = None,
  model: foreign.Pretrained | str | None = None,
  environment: Any = None,
  agent: Callable[..., Any] | str | None = None,
  checkpoint: int | str = 'latest',
  number: int = 1,
  temperature: float | None = None,
  max_tokens: int | None = None,
) -> list[dict[str, Any]]:
  """Completes prompts with the policy of a checkpoint.

  Args:
    workdir: The directory of a run; nothing in it is changed.
    prompts: Texts, or lists of messages; with an environment also records.
    tokenizer: Needed if the run was given it in Python.
    model: Needed if the run was given it in Python.
    environment: Likewise.
    agent: Likewise.
    checkpoint: The number of a rollout, 'latest' or 'best'.
    number: Completions of each prompt.
    temperature: Of the sampling; 0: greedy; None: the config's.
    max_tokens: The longest completion; None: the config's.

  Returns:
    One dict per completion: 'prompt', 'completion', and 'truncated', whether
    the completion was cut at its longest length. Of an episode also 'messages',
    'reward', 'turn_rewards', 'ended' and 'failure'.

  Raises:
    ValueError: Something is missing or cannot be used; the sentence says what.
  """
  if isinstance(prompts, str):
    raise ValueError(
      f'prompts={prompts!r:.60} is one text; give a list, as in prompts=[...].'
    )
  resolved, objects = placing.place(
    _resolved(None, workdir),
    tokenizer=tokenizer,
    model=model,
    environment=environment,
    agent=agent,
  )
  with _quiet(), joining.joined() as peers:
    policy = policies.load(
      resolved, os.fspath(workdir), str(checkpoint), objects, peers=peers
    )
    return [*policies.sample(policy, prompts, number, temperature, max_tokens)]


@atexit.register
def _wait_for_compiler() -> None:
  """Waits for the thread in which XLA compiles a program ahead of its use.

  The run of a script may end early, by an error in a reward for example. If the
  interpreter then ended while XLA compiles, XLA would abort the process.
  """
  for thread in threading.enumerate():
    if thread.name == 'compile ahead':  # by `programs.compile_ahead`
      thread.join()


def _resolved(config: Any, workdir: Any) -> config_lib.Config:
  """The config that is given in one of several ways, checked."""
  if isinstance(config, config_lib.Config):
    return config
  if config is None:
    config = records.get_config(workdir)
  elif isinstance(config, str | os.PathLike):
    config = load_config(config)
  if not hasattr(config, 'to_dict'):
    raise ValueError(
      f'config={config!r:.60} is of type {type(config).__name__}; give '
      'grpo_jax.config.default() with your changes, or the path of a config '
      'file.'
    )
  return config_lib.resolve(config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides the logs of jax and orbax; the monitor says what matters in them."""
  from absl import logging

  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(before)
