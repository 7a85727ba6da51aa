"""Plays episodes with a policy that answers at once."""

from grpo_jax.environments import events
from grpo_jax.environments.base import Reply

MODULE = 'tests.environments.bad_environments:'


class Played:
  """What came of the episodes of a player.

  Attributes:
    events: By their episodes, in order; only of the last try of each.
    rounds: What each `wait` has returned.
    tries: How often each was begun.
  """

  def __init__(self):
    self.events = {}
    self.rounds = []
    self.tries = {}

  @property
  def ends(self):
    """The last event of each episode, in the order of their numbers."""
    return [self.events[episode][-1] for episode in sorted(self.events)]


def play(player, names, example=None, text='ok', cancel_at=None, most=1000):
  """Plays one episode of each name, and begins again what may.

  Args:
    player: A `sessions.Player`.
    names: Of environments.
    example: For all.
    text: What the policy says; a function of (say, turn) may say it.
    cancel_at: A turn at which episodes are cancelled.
    most: The most rounds.
  """
  begins = [
    events.Begin(k, example or {}, 7, name) for k, name in enumerate(names)
  ]
  played, turns = Played(), {}
  for begin in begins:
    player.begin(begin)
  played.tries = dict.fromkeys(range(len(begins)), 1)
  while player.live:
    assert len(played.rounds) < most
    news = player.wait()
    played.rounds.append(news)
    for event in news:
      episode = event.episode
      played.events.setdefault(episode, []).append(event)
      if isinstance(event, events.Failed) and event.unavailable:
        played.tries[episode] += 1
        played.events[episode], turns[episode] = [], 0
        player.begin(begins[episode])
      elif isinstance(event, events.Say):
        turn = turns.get(episode, 0)
        turns[episode] = turn + 1
        if turn == cancel_at:
          player.cancel(episode, 'turns')
          continue
        said = text(event, turn) if callable(text) else text
        player.answer(episode, event.context, Reply(said, turn=turn))
  return played
