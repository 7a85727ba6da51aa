"""GSM8K and MATH for TensorFlow Datasets, from the files of their authors.

  python -m grpo_jax.data.tfds_builders gsm8k data/gsm8k --data_dir=data/tfds

reads `train.jsonl` and `test.jsonl` in `data/gsm8k` and writes ArrayRecord
files, which a config then names:

  kwargs = {'split': 'train', 'data_dir': 'data/tfds'}
  config.data.train = ({'name': 'tfds:gsm8k', 'kwargs': kwargs},)

Neither writing nor reading needs TensorFlow. The examples keep the order of the
files. Importing this module needs the package tensorflow-datasets, and makes
the builders known to it.
"""

import argparse
from collections.abc import Iterator
import json
import os
import pathlib
import re
import sys
from typing import Any

import tensorflow_datasets as tfds

from grpo_jax.config import plain_text

_SPLITS = ('train', 'test')


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Records of files that the authors have written."""

  VERSION = tfds.core.Version('1.0.0')
  FIELDS: tuple[str, ...] = ()  # each a text

  def _info(self) -> tfds.core.DatasetInfo:
    """Fields of text; the order of the files stays."""
    features = {name: tfds.features.Text() for name in self.FIELDS}
    return tfds.core.DatasetInfo(
      builder=self,
      description=self.__doc__,
      features=tfds.features.FeaturesDict(features),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
    folder = pathlib.Path(dl_manager.manual_dir)
    return {
      split: enumerate(self._generate_examples(folder, split))
      for split in _SPLITS
    }


class Gsm8k(_Builder):
  """Word problems of grade school mathematics, with their solutions.

  Cobbe et al., Training Verifiers to Solve Math Word Problems,
  https://arxiv.org/abs/2110.14168. The answer ends in '####' and the number.
  """

  MANUAL_DOWNLOAD_INSTRUCTIONS = 'Give the folder of train.jsonl, test.jsonl.'
  FIELDS = 'question', 'answer'

  def _generate_examples(self, folder: pathlib.Path, split: str):
    for where, record in _lines(folder / f'{split}.jsonl'):
      yield _fields(where, record, self.FIELDS)


class Math(_Builder):
  """Problems of mathematics competitions, with their solutions.

  Hendrycks et al., Measuring Mathematical Problem Solving With the MATH
  Dataset, https://arxiv.org/abs/2103.03874. The solution holds the answer in
  its last box.
  """

  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    'Give the folder of train/SUBJECT/NUMBER.json and test/SUBJECT/NUMBER.json,'
    ' or of train.jsonl and test.jsonl.'
  )
  FIELDS = 'problem', 'solution', 'level', 'type'

  def _generate_examples(self, folder: pathlib.Path, split: str):
    records = _lines(folder / f'{split}.jsonl')
    if (folder / split).is_dir():
      records = _files(folder / split)
    for where, record in records:
      known = _fields(where, record, ('problem', 'solution'))
      # Copies of MATH call the subject by one of these names.
      subject = record.get('type', record.get('subject', ''))
      level = str(record.get('level', ''))
      yield {**known, 'level': level, 'type': str(subject)}


BUILDERS = {'gsm8k': Gsm8k, 'math': Math}


def build(
  name: str, folder: str | os.PathLike[str], data_dir: str | os.PathLike[str]
) -> dict[str, int]:
  """Writes a data set as ArrayRecord files, which `tfds_source` reads.

  Args:
    name: 'gsm8k' or 'math'.
    folder: Holds the official files. GSM8K: `train.jsonl` and `test.jsonl`.
      MATH: the folders `train` and `test`, with a folder of JSON files for each
      subject, or `train.jsonl` and `test.jsonl`.
    data_dir: Where to write; gets a folder `name`.

  Returns:
    The number of examples of each split.

  Raises:
    ValueError: There is no such data set, it has been written already, or a
      file or a record cannot be used.
  """
  if name not in BUILDERS:
    raise ValueError(
      f'{name!r} is no data set that can be built here; give one of'
      f' {", ".join(BUILDERS)}.'
    )
  builder = BUILDERS[name](
    data_dir=os.path.abspath(data_dir), file_format='array_record'
  )
  if pathlib.Path(builder.data_path).exists():
    raise ValueError(
      f'{builder.data_path} is there already; remove it to write the data set'
      ' anew, or give another data_dir.'
    )
  source = pathlib.Path(os.path.abspath(folder))
  if not source.is_dir():
    raise ValueError(
      f'There is no folder {str(folder)!r}; give the one with the files of'
      f' {name}.'
    )
  tfds.disable_progress_bar()
  builder.download_and_prepare(
    download_config=tfds.download.DownloadConfig(manual_dir=source)
  )
  return {
    split: about.num_examples for split, about in builder.info.splits.items()
  }


def _lines(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The records of a JSONL file, and what messages call them."""
  if not path.is_file():
    raise ValueError(
      f'There is no file {str(path)!r}; put the official files there, or give'
      ' the folder that has them.'
    )
  with path.open('rb') as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        where = f'Line {number} of {str(path)!r}'
        yield where, _object(where, line)


def _files(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """The records of SUBJECT/NUMBER.json, by subject and number."""

  def place(path: pathlib.Path):
    digits = re.sub(r'\D', '', path.stem)
    return path.parent.name, int(digits or 0), path.stem

  found = sorted(folder.glob('*/*.json'), key=place)
  if not found:
    raise ValueError(
      f'{str(folder)!r} has no files SUBJECT/NUMBER.json; give the folder with'
      ' the official files.'
    )
  for path in found:
    where = f'The file {str(path)!r}'
    yield where, _object(where, path.read_bytes())


def _object(where: str, text: bytes) -> dict[str, Any]:
  try:
    record = json.loads(text.decode('utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{where} is not valid JSON in UTF-8 ({error}); restore the file.'
    ) from error
  return record if isinstance(record, dict) else {}


def _fields(
  where: str, record: dict[str, Any], names: tuple[str, ...]
) -> dict[str, str]:
  """The fields of a record, each a text."""
  for name in names:
    if not isinstance(record.get(name), str) or not record[name]:
      raise ValueError(
        f'{where} needs a text in the field {name!r}, but has the fields'
        f' {sorted(record)}; restore the file.'
      )
  return {name: record[name] for name in names}


def main() -> None:
  """The command; see the module's docstring."""
  parser = argparse.ArgumentParser(
    prog='python -m grpo_jax.data.tfds_builders',
    description='Writes GSM8K or MATH as ArrayRecord files.',
  )
  parser.add_argument('name', choices=sorted(BUILDERS))
  parser.add_argument('folder', help='holds the official files')
  parser.add_argument('--data_dir', required=True, help='where to write')
  given = parser.parse_args()
  try:
    print(json.dumps(build(given.name, given.folder, given.data_dir)))
  except ValueError as error:
    sys.exit(plain_text.printable(plain_text.said(error)))


if __name__ == '__main__':
  main()
