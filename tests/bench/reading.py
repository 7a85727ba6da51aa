"""How fast prompts are read: `python tests/bench/reading.py`.

Writes a million records in several formats to a temporary folder. Then it
starts a process for each, which opens the data as a run does, finds the widths
of prompts, and reads rollouts of 512 prompts in random order. It prints

- start-up: seconds until the first prompt is there, of a first start and of
  another one, which finds the widths in the cache;
- processor: seconds of a processor that the first start took, which depend
  less on what else runs;
- memory: MiB that opening and reading have added, without pages of files;
- prompts/s: read and encoded in one thread;
- waiting: milliseconds for a rollout's prompts, if the rollout before it took
  a second.
"""

import argparse
import json
import os
import pathlib
import string
import subprocess
import sys
import tempfile
import time

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.run.build import data as build_data

NAMES = {
  'JSONL': 'a.jsonl',
  'Parquet': 'a.parquet',
  'Parquet, groups of 1,000': 'b.parquet',
  'ArrayRecord': 'a.array_record',
  'a folder of datasets': 'folder',
  'TFDS': 'tfds:gsm8k',
}
_ROLLOUT = 512


def write(folder, number):
  """The same records in every format."""
  from array_record.python import array_record_module
  import pyarrow as pa
  from pyarrow import parquet

  from grpo_jax.data import tfds_builders
  from tests.data import formats

  questions = [
    f'Problem {n}: ' + 'How many apples? ' * (4 + n * 7919 % 16)
    for n in range(number)
  ]
  answers = [f'There are {n}. #### {n}' for n in range(number)]
  writer = array_record_module.ArrayRecordWriter(
    str(folder / NAMES['ArrayRecord']), 'group_size:1'
  )
  with (folder / NAMES['JSONL']).open('w') as file:
    for question, answer in zip(questions, answers):
      line = json.dumps({'question': question, 'answer': answer})
      file.write(line + '\n')
      writer.write(line.encode())
  writer.close()
  table = pa.table({'question': questions, 'answer': answers})
  parquet.write_table(table, folder / NAMES['Parquet'])
  small = folder / NAMES['Parquet, groups of 1,000']
  parquet.write_table(table, small, row_group_size=1000)
  # As `datasets` does, in batches of 1,000.
  records = table.to_pylist()
  formats.arrow(folder / NAMES['a folder of datasets'], records, 1000)
  # The official files of GSM8K.
  official = folder / 'official'
  official.mkdir()
  (official / 'train.jsonl').symlink_to(folder / NAMES['JSONL'])
  formats.jsonl(official / 'test.jsonl', records[:1])
  tfds_builders.build('gsm8k', official, folder / 'tfds')


def memory():
  """MiB of this process that are in no file."""
  status = pathlib.Path('/proc/self/status').read_text()
  return int(status.partition('RssAnon:')[2].split()[0]) / 1024


def measured(path):
  """What this process takes to read a file."""
  # What a run has imported by then.
  import grain  # noqa: F401
  import pyarrow.parquet  # noqa: F401

  config = config_lib.default()
  folder, name = pathlib.Path(path).parent, pathlib.Path(path).name
  source = {'name': path}
  if name.startswith('tfds:'):
    source = {'name': name, 'kwargs': {'data_dir': str(folder / 'tfds')}}
  config.data.train, config.data.heldout = (source,), ''
  config.data.prompt_field = 'question'
  config.data.prompt_buckets, config.warm_up.steps = (), 0
  config = config_lib.resolve(config)
  tokenizer = data.character_tokenizer(string.printable)
  before, start, cpu = memory(), time.perf_counter(), time.process_time()
  wide = build_data.with_widths(config, tokenizer)
  found, weights = build_data.train(wide)
  stream = data.mixture(found, weights, 0)
  data.take(stream, 0, 1)
  told = {'start': time.perf_counter() - start}
  told['start_cpu'] = time.process_time() - cpu
  start, number = time.perf_counter(), 4 * _ROLLOUT
  for row in data.take(stream, 0, number):
    tokenizer.encode_prompt(row['prompt'])
  told['rate'] = number / (time.perf_counter() - start)
  ahead, waits = data.ReadAhead(stream, _ROLLOUT), []
  for step in range(4):
    start = time.perf_counter()
    data.take(ahead, (8 + step) * _ROLLOUT, _ROLLOUT)
    waits.append(time.perf_counter() - start)
    time.sleep(1)
  told['wait'] = max(waits[1:])
  told['memory'] = memory() - before
  return told


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--records', type=int, default=1_000_000)
  parser.add_argument('--of', help='measure this file, in this process')
  parser.add_argument('--folder', help='keep the files here, for another time')
  given = parser.parse_args()
  if given.of:
    print(json.dumps(measured(given.of)))
    return
  print(
    '| format | start-up, s (again) | processor, s | memory, MiB | prompts/s '
    '| wait, ms |'
  )
  print('| --- ' * 6 + '|')
  with tempfile.TemporaryDirectory(dir=data.cache_directory().parent) as place:
    folder = pathlib.Path(given.folder or place)
    if not (folder / 'tfds').exists():
      folder.mkdir(exist_ok=True)
      write(folder, given.records)
    for form, name in NAMES.items():
      first, again = (
        json.loads(
          subprocess.run(
            [sys.executable, __file__, f'--of={folder / name}'],
            check=True,
            stdout=subprocess.PIPE,
            env={**os.environ, 'XDG_CACHE_HOME': place},
          ).stdout
        )
        for _ in range(2)
      )
      print(
        f'| {form} | {first["start"]:.2f} ({again["start"]:.2f}) '
        f'| {first["start_cpu"]:.2f} '
        f'| {max(first["memory"], again["memory"]):.0f} | {again["rate"]:,.0f} '
        f'| {1000 * again["wait"]:.0f} |',
        flush=True,
      )


if __name__ == '__main__':
  main()
