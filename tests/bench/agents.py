"""Times episodes of several turns by grpo_jax, TRL and Tunix, in turns.

python tests/bench/agents.py

All play the same episodes: the model draws a turn of a fixed length, an
environment answers, and so on; see `agents_work.Work`. The model has random
weights, the same shape for all, in float32. Only the sampling of a rollout is
timed, each in a process of its own, whose first rollout compiles and is not
timed. First environments answer at once. Then they sleep before each turn but
the first, for times that are exponentially distributed and the same for all:
in the mean as long as a turn of grpo_jax takes where nobody sleeps.

Before its turns a peer tries how many episodes to play at a time, and what
grpo_jax sets for a CPU or not, in episodes of fewer turns; it takes its turns
with what was fastest. Nothing else should run on the machine meanwhile.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
import statistics
import sys
from typing import Any
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import numpy as np  # noqa: E402

from grpo_jax import models  # noqa: E402
from tests.bench import agents_ours  # noqa: E402
from tests.bench import agents_work  # noqa: E402
from tests.bench import environments  # noqa: E402
from tests.bench import run  # noqa: E402
from tests.bench import tables  # noqa: E402

OURS, PEERS = 'grpo_jax', ('trl', 'tunix')
SCRIPTS = {OURS: 'ours', 'trl': 'trl', 'tunix': 'tunix'}
HEAD = (
  'environments', '', 'seconds', 'tokens/s', 'turns/s', 'peak memory, MiB',
  'ratio in each turn',
)  # fmt: skip
TRIED_TURNS = 2  # of an episode while settings are tried


class Setting(NamedTuple):
  """What a peer takes its turns with.

  Attributes:
    at_once: Episodes that it plays at a time.
    as_ours: Whether its process has what grpo_jax sets for a CPU.
    threads: Of its matrix products, where it can be told; 0 for as it has them.
    passive: Whether threads that wait for others leave their core to others,
      which is faster by far where a core is busy with another program.
  """

  at_once: int
  as_ours: bool = True
  threads: int = 0
  passive: bool = False

  def __str__(self) -> str:
    more = [
      f'{self.threads} thread' * bool(self.threads),
      'passive' * self.passive,
      'bare' * (not self.as_ours),
    ]
    return ', '.join([f'{self.at_once} at a time', *filter(None, more)])

  @property
  def environment(self) -> dict[str, str]:
    """Variables of its process."""
    found = dict(run.ON_A_CPU) if self.as_ours else {}
    if self.threads:
      found['OMP_NUM_THREADS'] = str(self.threads)
    if self.passive:
      found['OMP_WAIT_POLICY'] = 'PASSIVE'
    return found


Result = dict[str, Any]  # what `agents_work.answer` wrote, or {'error': why}
# By the mean of what environments sleep, and by who has played.
Results = Mapping[tuple[float, str], Sequence[Result]]
Tried = Mapping[tuple[float, str], Mapping[Setting, float]]


def main() -> None:
  """Plays all, and prints it."""
  args = arguments()
  work = agents_work.of_arguments(args)
  pythons = {OURS: sys.executable} | {
    peer: environments.python_of(peer, args.envs) for peer in args.peers
  }
  if args.secs is None:
    first = timed(args, pythons, work, 0.0, OURS)
    if 'error' in first:
      sys.exit(f'agents_ours.py failed: {first["error"]}')
    args.secs = first['turn_secs']
  results, tried = compared(args, pythons, work)
  print(report(work, args.secs, results, tried))


def arguments(given=None) -> argparse.Namespace:
  """What the command line says."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  words = lambda text: text.split(',') if text else []
  agents_work.add_fields(parser)
  parser.add_argument(
    '--secs',
    type=float,
    help='that environments sleep, a mean; default: as long as a turn takes',
  )
  parser.add_argument('--peers', type=words, default=[*PEERS])
  parser.add_argument('--repeats', type=int, default=2, help='turns of each')
  environments.add_arguments(parser, limit_secs=300.0)
  args = parser.parse_args(given)
  if unknown := set(args.peers) - set(PEERS):
    parser.error(f'{sorted(unknown)} is none of {", ".join(PEERS)}')
  return args


def compared(args, pythons, work: agents_work.Work) -> tuple[Results, Tried]:
  """All turns, and what was tried before them."""
  results: dict[tuple[float, str], list[Result]] = {}
  tried: dict[tuple[float, str], Mapping[Setting, float]] = {}
  best: dict[str, Setting] = {}
  for secs in dict.fromkeys([0.0, args.secs]):
    for peer in args.peers:
      # TRL's environments sleep one after another, whatever its setting is.
      if not secs or peer != 'trl':
        found = tries(args, pythons, work, secs, peer)
        tried[secs, peer], best[peer] = found, min(found, key=found.__getitem__)
    for turn in range(args.repeats):
      for name in [OURS, *args.peers]:
        print(f'{label_of(secs)}, turn {turn + 1}: {name}', file=sys.stderr)
        result = timed(args, pythons, work, secs, name, best.get(name))
        results.setdefault((secs, name), []).append(result)
        print(f'  {result}', file=sys.stderr, flush=True)
  return results, tried


def settings_of(work: agents_work.Work, peer: str) -> list[Setting]:
  """What a peer tries.

  Tunix draws each episode by itself, in a thread, so that a thread for each
  core may do best; TRL draws all that it plays as one batch.
  """
  of_torch = peer == 'trl'
  few = [] if of_torch else [os.cpu_count() or 1]
  numbers = dict.fromkeys([*few, work.rows, work.episodes])
  found = [Setting(number) for number in numbers]
  if of_torch:
    found += [Setting(number, passive=True) for number in numbers]
    found.append(Setting(work.episodes, threads=1))
  return [*found, Setting(work.rows, as_ours=False)]


def tries(
  args, pythons, work: agents_work.Work, secs: float, peer: str
) -> dict[Setting, float]:
  """Seconds of a shorter rollout with each setting; infinite if it fails."""
  short = dataclasses.replace(work, turns=min(TRIED_TURNS, work.turns))
  found = {}
  for setting in settings_of(work, peer):
    result = timed(args, pythons, short, secs, peer, setting)
    found[setting] = result.get('secs', math.inf)
    print(f'tried: {peer}, {setting}: {result}', file=sys.stderr, flush=True)
  return found


def timed(
  args,
  pythons: Mapping[str, str],
  work: agents_work.Work,
  secs: float,
  name: str,
  setting: Setting | None = None,
) -> Result:
  """One run of grpo_jax, or of a peer with a setting; see `run.run`."""
  fields = dataclasses.asdict(work) | {'secs': secs}
  environment = {}
  if setting is not None:
    fields['at_once'] = setting.at_once
    environment = setting.environment
  script = HERE / f'agents_{SCRIPTS[name]}.py'
  given = [f'--{field}={value}' for field, value in fields.items()]
  return run.run(args, [pythons[name], script, *given], environment)


def report(
  work: agents_work.Work, secs: float, results: Results, tried: Tried
) -> str:
  """Everything that is printed."""
  versions: dict[str, str] = {}
  for turns in results.values():
    for result in turns:
      versions |= result.get('versions', {})
  said = [
    f'{work.episodes} episodes of {work.turns} turns, {work.turn_tokens} tokens'
    f' each; {", ".join(f"{k} {v}" for k, v in versions.items())}.',
    table(work, results),
    tried_table(tried),
    unfair(work, secs),
  ]
  labelled = {(label_of(key[0]), key[1]): results[key] for key in results}
  if failed := tables.errors(labelled):
    said.append(f'**Failed**\n\n{failed}')
  return '\n\n'.join(said)


def table(work: agents_work.Work, results: Results) -> str:
  """A line for each who has played, medians; ratios are peer / grpo_jax."""
  lines = [HEAD, ('---',) * len(HEAD)]
  for (secs, name), turns in results.items():
    label = label_of(secs)
    done = [one for one in turns if 'error' not in one]
    if not done:
      lines.append((label, name, 'failed', *'----'))
      continue
    took = statistics.median(one['secs'] for one in done)
    peak = statistics.median(one['peak_rss_mib'] for one in done)
    ratios = [
      f'{theirs["secs"] / ours["secs"]:.2f}'
      for ours, theirs in zip(results[secs, OURS], turns, strict=True)
      if 'error' not in ours and 'error' not in theirs
    ]
    lines.append(
      (
        label, name, tables.number(took), tables.number(work.tokens / took),
        tables.number(work.episodes * work.turns / took), f'{peak:.0f}',
        '' if name == OURS else ', '.join(ratios) or '-',
      )
    )  # fmt: skip
  return tables.markdown(lines)


def label_of(secs: float) -> str:
  """What environments do that sleep for so long, in the mean."""
  return f'sleep {tables.number(secs)} s' if secs else 'answer at once'


def tried_table(tried: Tried) -> str:
  """Seconds of a shorter rollout of each peer, by setting."""
  lines = [('environments', 'peer', 'seconds by setting'), ('---',) * 3]
  for (secs, name), found in tried.items():
    label = label_of(secs)
    said = '; '.join(f'{one}: {tables.number(found[one])}' for one in found)
    lines.append((label, name, said))
  return '**Settings that peers tried**\n\n' + tables.markdown(lines)


def unfair(work: agents_work.Work, secs: float) -> str:
  """What is not the same for all, with its factors."""
  plain, padded = reread(work), reread(work, padded=True)
  one_by_one, in_rounds = slept(work, secs)
  return '\n'.join(
    [
      '**What is not the same for all**',
      '',
      '- Both peers read the whole context again in each turn. The operations '
      f'of a rollout are {plain:.2f} times ours, and {padded:.2f} times for '
      'Tunix, which fills contexts up to a power of 2.',
      '- TRL calls the environments of a round one after another: it waits for '
      f'{one_by_one:.1f} s of sleep. With all of a round at a time it would be '
      f'{in_rounds:.1f} s.',
      '- Tunix draws each episode by itself: every request of an agent is a '
      'batch of one in its vanilla rollout.',
      '- grpo_jax also computes the log-probability of each token, which is '
      'turned off in Tunix and never done by TRL.',
    ]
  )


def reread(work: agents_work.Work, padded: bool = False) -> float:
  """How many times the operations are, if each turn reads its whole context.

  Args:
    work: What is played.
    padded: Whether a context is also filled up to a power of 2, as Tunix does
      with all but the first.

  Returns:
    Operations over those of grpo_jax, which reads a prompt once for its group,
    and whatever else stands before a turn once.
  """
  config = agents_ours.model_config(work)

  def flops(first: int, last: int, with_head: bool = False) -> float:
    places = np.arange(first, last) + 1
    each = models.flops_per_token(config, places, with_head=with_head)
    return float(np.sum(each * np.ones(len(places))))

  drawn = sum(flops(n, n + work.turn_tokens, True) for n in work.contexts)
  ours = flops(0, work.contexts[0]) / work.group
  for before, after in zip(work.contexts, work.contexts[1:]):
    ours += flops(before + work.turn_tokens, after)
  theirs = 0.0
  for turn, size in enumerate(work.contexts):
    whole = 1 << (size - 1).bit_length() if padded and turn else size
    theirs += flops(0, whole)
  return (theirs + drawn) / (ours + drawn)


def slept(work: agents_work.Work, secs: float) -> tuple[float, float]:
  """Seconds of a rollout in which environments sleep.

  Returns:
    One environment after another; and all those of a round at a time.
  """
  every = [
    agents_work.sleeps(work, episode, secs) for episode in range(work.episodes)
  ]
  return sum(map(sum, every)), sum(map(max, zip(*every, strict=True)))


if __name__ == '__main__':
  main()
