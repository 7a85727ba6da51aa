"""Tasks of reasoning-gym in several turns: a wrong answer may be corrected.

The records come from the source of the same name, `data.train=
'reasoning_gym:chain_sum'`. Verifiers of reasoning-gym call `eval`, so answers
are judged by the reward `reasoning_gym`, in a confined worker of `rewards`.
"""

from collections.abc import Mapping
import functools
import threading
from typing import Any

from grpo_jax.config import importing
from grpo_jax.environments.base import Action
from grpo_jax.environments.base import Step
from grpo_jax.rewards import workers

_lock = threading.Lock()
_judges: list[workers.Workers] = []  # one for all instances of this process
_users: set[int] = set()


def make(task: str) -> Any:
  """What makes an environment of a task."""
  return functools.partial(Task, task)


class Task:
  """A problem, and several tries at it.

  Args:
    task: A name of the package, such as 'chain_sum'.
    tries: How many answers there may be.
    discount: The reward of a right answer is multiplied by this for each try
      before it.
    feedback: What the policy reads after a wrong answer; '{left}' is how many
      tries are left.
    tag: As of the reward `reasoning_gym`.

  Raises:
    ValueError: The package is missing, or there is no try.
  """

  reusable = True

  def __init__(
    self,
    task: str,
    tries: int = 3,
    discount: float = 1.0,
    feedback: str = 'That is not right. Try again; tries left: {left}.',
    tag: str | None = 'answer',
  ):
    importing.package('reasoning_gym', 'reasoning-gym')
    if tries < 1:
      raise ValueError(f'tries is {tries}, but at least 1 is required.')
    self._task, self._tries, self._discount = task, tries, discount
    self._feedback, self._tag = feedback, tag

  def reset(self, example: Mapping[str, Any], seed: int) -> str:
    """Says the problem of a record."""
    made = example.get('reasoning_gym')
    if not isinstance(made, Mapping) or made.get('task') != self._task:
      raise ValueError(
        f"the record is no problem of 'reasoning_gym:{self._task}'; take the"
        ' records from the source with this name'
      )
    self._example, self._tried = dict(example), 0
    return str(example['prompt'])

  def step(self, action: Action) -> Step:
    """Judges an answer."""
    score = self._judged(action.text)
    reward = score * self._discount**self._tried
    self._tried += 1
    left = self._tries - self._tried
    if score >= 1.0 or not left:
      said = 'That is right.' if score >= 1.0 else 'That is not right.'
      return Step(said, reward, True, {'score': score})
    return Step(self._feedback.format(left=left), 0.0, False, {'score': score})

  def close(self) -> None:
    """Ends the judge, if no other instance needs it."""
    with _lock:
      _users.discard(id(self))
      if not _users and _judges:
        _judges.pop().close()

  def _judged(self, text: str) -> float:
    call = workers.Call(
      'reasoning_gym',
      (str(self._example['prompt']), text, self._example),
      kwargs={'tag': self._tag},
    )
    with _lock:
      _users.add(id(self))
      if not _judges:
        _judges.append(workers.Workers(1))
      ((outcome,),) = _judges[0].run([call])
    if outcome.reward is None:
      raise RuntimeError(f'the answer cannot be judged: {outcome.failure}')
    return outcome.reward
