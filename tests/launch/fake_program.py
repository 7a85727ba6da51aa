"""A stand-in for grpo-jax, which ends as it is told.

  fake_program.py PLACE STORY --process_id=RANK

STORY says what each process does in each start: `75,killed;0,0` are two starts
of two processes. Process RANK writes its environment to `PLACE/START.RANK` when
it is ready, and the signals that it gets to the end of `PLACE/signals.RANK`.
One that is `drawn` waits until generators were started three times. Of these,
`fake_program.py PLACE generate ...`, the first is lost, and the others wait.
Where all are to end with 0, each waits until all are ready: so none is late.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time


def main(place, story, *flags):
  place = pathlib.Path(place)
  if story == 'generate':
    return generate(place, *flags)
  rank = next(f for f in flags if '--process_id=' in f).partition('=')[2]
  start = len(list(place.glob(f'[0-9]*.{rank}')))
  does = story.split(';')[start].split(',')[int(rank)]
  received = []

  def receive(number, frame):
    with (place / f'signals.{rank}').open('a') as file:
      file.write(f'{number}\n')
    received.append(number)

  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, receive)
  told = {'pid': os.getpid(), 'flags': flags, 'env': dict(os.environ)}
  print('it is', does)
  print('an error', file=sys.stderr)
  if does == 'leaves':  # a process of its own behind
    told['left'] = subprocess.Popen(['sleep', '60']).pid
  ready = place / f'new.{rank}'
  ready.write_text(json.dumps(told))
  ready.rename(place / f'{start}.{rank}')
  while does == 'drawn' and len(list(place.glob('generator.*'))) < 3:
    time.sleep(0.02)
  while does == 'ignores' or does == 'waits' and not received:
    time.sleep(0.02)
  if does == 'waits':  # and saves for a while
    time.sleep(0.3)
    sys.exit(128 + received[0])
  everybody = story.split(';')[start].split(',')
  if set(everybody) == {'0'}:
    files = [place / f'{start}.{one}' for one in range(len(everybody))]
    while not all(file.exists() for file in files):
      time.sleep(0.02)
  if does == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
  sys.exit(0 if does in ('leaves', 'drawn') else int(does))


def generate(place, *flags):
  """A generator; the first that is started ends with 75."""
  for number in range(9):
    try:
      with (place / f'generator.{number}').open('x') as file:
        json.dump({'flags': flags, 'pid': os.getpid()}, file)
      break
    except FileExistsError:
      continue
  print('it draws')
  if not number:
    sys.exit(75)
  while True:
    time.sleep(0.02)


if __name__ == '__main__':
  main(*sys.argv[1:])
