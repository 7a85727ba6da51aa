"""The same records in every format that a source reads."""

import json

DATASET_INFO = {'citation': '', 'description': '', 'features': {}}


def jsonl(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return path


def parquet(path, records, schema=None, **options):
  import pyarrow as pa
  from pyarrow import parquet as writer

  table = pa.Table.from_pylist(records, schema)
  writer.write_table(table, path, **options)
  return path


def array_record(path, records):
  from array_record.python import array_record_module

  file = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    file.write(
      record if isinstance(record, bytes) else json.dumps(record).encode()
    )
  file.close()
  return path


def arrow(folder, records, batch=3, schema=None):
  """As `Dataset.save_to_disk` of datasets 5.2 writes it, in two files."""
  import pyarrow as pa

  folder.mkdir(parents=True)
  half = len(records) // 2
  names = [f'data-0000{n}-of-00002.arrow' for n in range(2)]
  for name, part in zip(names, (records[:half], records[half:])):
    table = pa.Table.from_pylist(part, schema)
    with pa.OSFile(str(folder / name), 'wb') as file:
      with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch)
  state = {
    '_data_files': [{'filename': name} for name in names],
    '_fingerprint': '0123456789abcdef',
    '_format_columns': None,
    '_format_kwargs': {},
    '_format_type': None,
    '_output_all_columns': False,
    '_split': None,
  }
  (folder / 'state.json').write_text(json.dumps(state))
  (folder / 'dataset_info.json').write_text(json.dumps(DATASET_INFO))
  return folder


def arrow_dict(folder, **splits):
  """As `DatasetDict.save_to_disk` writes it."""
  for name, records in splits.items():
    arrow(folder / name, records)
  told = json.dumps({'splits': list(splits)})
  (folder / 'dataset_dict.json').write_text(told)
  return folder


def gsm8k(folder, train, test):
  """The official files."""
  folder.mkdir()
  jsonl(folder / 'train.jsonl', train)
  jsonl(folder / 'test.jsonl', test)
  return folder


def tfds(data_dir, records):
  """The records as GSM8K's builder writes them; their number in each split."""
  from grpo_jax.data import tfds_builders

  renamed = [{'question': r['prompt'], 'answer': r['answer']} for r in records]
  folder = gsm8k(data_dir.with_name('official'), renamed, renamed[:2])
  return tfds_builders.build('gsm8k', folder, data_dir)
