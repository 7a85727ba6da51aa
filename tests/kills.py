"""kill -9 at random moments: `python -m tests.kills --kills=20 --seed=0`.

A short run of the embedded default is left alone once. Then it is started again
and again in new workdirs, killed at a random moment of the time it took, and
started once more by the same command. Every run must end with the checkpoint,
the metrics and the completions of the one that was left alone, bit for bit.

With `--signal=TERM` it is asked to end instead, and the seconds until it has
saved and ended are told. With `--model=folder` the run trains a random model
that comes from a Hugging Face folder, and with `--model=lora` adapters of it.
With `--ahead=4` up to four rollouts are drawn while others are learned from,
and with `--devices=2` on two devices of their own, of four. With
`--served=weights` or `--served=adapters` a server draws, which goes on while
runs are killed, and with `--served=teacher` it scores. In the end it has no
adapter any more.
"""

import argparse
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from tests import runs
from tests.run import export_test

SHORT = (
  '--config.steps=12',
  '--config.evaluation.every_steps=4',
  '--config.evaluation.examples=100',
  '--config.checkpoint.every_steps=3',
  '--config.log.completions_every_steps=1',
)
ARITHMETIC = (
  '--config=configs/arithmetic.py',
  *SHORT,
  '--config.warm_up.steps=40',
  '--config.checkpoint.every_warm_up_steps=10',
)


def of_folder(folder: pathlib.Path) -> tuple[str, ...]:
  """The options of a run that begins with a Hugging Face folder."""
  judge = {'name': 'tests.judges:even', 'weight': 1.0}
  return (
    '--config=configs/smollm2.py',
    *SHORT,
    f'--config.model.path={folder}',
    f'--config.rewards=({judge},)',
    '--config.data.prompt_buckets=(160,)',
    '--config.optim.lr=1e-3',
  )


AHEAD = ('--config.learner.anchor=sampler',)
APART = ('--config.mesh.data=2', '--config.learner.micro_rows=16')
LORA = ('--config.lora.rank=2', '--config.lora.alpha=4.0')
# What a run asks a server for, and in what the server differs from it.
_ENGINE = '--config.engine.kind=http', '--config.engine.model=policy'
SERVED = {
  'weights': (_ENGINE, ()),
  'adapters': ((*_ENGINE, *LORA), LORA),
  'teacher': (
    (
      '--config.teacher.model=policy',
      '--config.learner.method=opd',
      '--config.learner.method_kwargs={}',
    ),
    ('--config.seed=7',),
  ),
}


@contextlib.contextmanager
def serving(
  options: Sequence[str], what: str
) -> Iterator[tuple[tuple[str, ...], str]]:
  """The options of a run that asks a server, and the address of that.

  Args:
    options: Of the run alone.
    what: One of `SERVED`.
  """
  asks, differs = SERVED[what]
  process = subprocess.Popen(
    [
      sys.executable, '-m', 'grpo_jax', 'serve', *options, *differs,
      '--as_engine', '--port=0', '--json',
    ],
    cwd=runs.ROOT,
    env={**os.environ, 'PYTHONPATH': str(runs.ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )  # fmt: skip
  try:
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())['base_url']
    url = url.removesuffix('/v1')
    section = 'teacher' if what == 'teacher' else 'engine'
    yield (*options, *asks, f'--config.{section}.urls=("{url}",)'), url
  finally:
    process.terminate()
    process.wait(60)


def adapters(url: str) -> list[str]:
  """The adapters that a server has."""
  with urllib.request.urlopen(f'{url}/v1/models', timeout=60) as answer:
    _, *names = (one['id'] for one in json.load(answer)['data'])
  return names


def start(workdir: pathlib.Path, options: Sequence[str]) -> subprocess.Popen:
  """The command, in a process group of its own."""
  return subprocess.Popen(
    [
      sys.executable, '-m', 'grpo_jax', 'train', *options,
      f'--workdir={workdir}',
    ],
    cwd=runs.ROOT,
    env={**os.environ, 'PYTHONPATH': str(runs.ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
  """What a run printed; it must have ended well."""
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  return out


def signal_after(
  process: subprocess.Popen, secs: float, number: signal.Signals
) -> str:
  """Sends a signal to the whole group; says what came of it, and when."""
  try:
    process.wait(timeout=secs)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, number)
  asked = time.monotonic()
  process.communicate()
  took = time.monotonic() - asked
  return f'exit code {process.returncode} in {took:.1f} s'


def where(workdir: pathlib.Path) -> str:
  """What a killed run has left: the moment it was killed at."""
  if not workdir.exists():
    return 'before the workdir'
  lines = workdir / 'metrics.jsonl'
  done = len(lines.read_text().splitlines()) - 1 if lines.exists() else -1
  saved = runs.checkpoints(workdir)
  warm = sorted(path.name for path in workdir.glob('warm_up/[0-9]*'))
  return f'rollouts {done}, checkpoints {saved}, of the warm-up {warm}'


def through(
  place: pathlib.Path,
  options: Sequence[str],
  kills: int,
  rng: random.Random,
  sent: signal.Signals = signal.SIGKILL,
) -> None:
  """Prints a line for each kill; fails at the first difference."""
  finish(start(place / 'first', options))  # compiles
  began = time.monotonic()
  finish(start(place / 'whole', options))
  whole = time.monotonic() - began
  runs.assert_equal(place / 'first', place / 'whole')
  print(f'one run takes {whole:.1f} s')
  for number in range(kills):
    workdir, secs = place / f'killed_{number}', rng.uniform(0, whole)
    end = signal_after(start(workdir, options), secs, sent)
    left = where(workdir)
    finish(start(workdir, options))
    runs.assert_equal(place / 'whole', workdir)
    print(f'{number + 1}: after {secs:.1f} s {end} ({left}): equal')


def main() -> None:
  """Kills as often as is asked for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--signal', choices=('KILL', 'TERM'), default='KILL')
  parser.add_argument(
    '--model', choices=('arithmetic', 'folder', 'lora'), default='arithmetic'
  )
  parser.add_argument('--ahead', type=int, default=0)
  parser.add_argument('--devices', type=int, default=0)
  parser.add_argument('--served', choices=[*SERVED])
  given = parser.parse_args()
  rng = random.Random(given.seed)
  os.environ.pop('XLA_FLAGS', None)
  with contextlib.ExitStack() as stack:
    place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    # What is compiled is kept, so that the time of a run is not compilation.
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(place / 'compiled'))
    options, url = ARITHMETIC, ''
    if given.model != 'arithmetic':
      options = of_folder(export_test.pretrained(place / 'model', qk_norm=True))
    if given.model == 'lora':
      options = (*options, *LORA)
    if given.ahead:
      options = (*options, *AHEAD, f'--config.sampler.ahead={given.ahead}')
    if given.devices:
      options += (*APART, f'--config.generator.devices={given.devices}')
      os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'
    if given.served:
      served = serving(options, given.served)
      options, url = stack.enter_context(served)
    sent = signal.Signals[f'SIG{given.signal}']
    through(place, options, given.kills, rng, sent)
    assert not url or not adapters(url)
  print(f'{given.kills} times, every run ends with the same bits')


if __name__ == '__main__':
  main()
