"""What a learner and its generators write to each other, and how it is signed.

A message is a JSON value and blobs: NumPy's .npz, read without pickle, and the
Parquet files of rollouts. Nothing that is read is ever run.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import hmac
import io
import json
import struct
from typing import Any

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.rollouts import parquet
from grpo_jax.run import drawing

MOST_BYTES = 1 << 30
"""Of a message, at most."""

_MAGIC = b'grpo-jax 1\n'
_LENGTH = struct.Struct('<Q')
_PLAIN = str, int, float, bool, type(None)


class Refused(ValueError):
  """What is asked for is not answered; says why.

  Attributes:
    status: Of HTTP.
  """

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


class Unreadable(ValueError):
  """What has come is no message."""


def pack(values: Any, blobs: Mapping[str, bytes] | None = None) -> bytes:
  """A message of what JSON can hold, and of blobs by their names."""
  blobs = blobs or {}
  sizes = {name: len(blob) for name, blob in blobs.items()}
  head = json.dumps([values, sizes]).encode()
  return b''.join([_MAGIC, _LENGTH.pack(len(head)), head, *blobs.values()])


def unpack(data: bytes) -> tuple[Any, dict[str, bytes]]:
  """What `pack` was given.

  Raises:
    Unreadable: These bytes are no message.
  """
  begin = len(_MAGIC) + _LENGTH.size
  try:
    if len(data) < begin or not data.startswith(_MAGIC):
      raise ValueError('It does not begin like one.')
    (length,) = _LENGTH.unpack(data[len(_MAGIC) : begin])
    end = begin + length
    values, sizes = json.loads(data[begin:end])
    blobs = {}
    for name, size in sizes.items():
      if not isinstance(size, int) or size < 0:
        raise ValueError('A size is none.')
      blobs[name] = data[end : end + size]
      end += size
    if end != len(data):
      raise ValueError('It is cut, or goes on.')
  except (ValueError, TypeError, AttributeError, RecursionError) as error:
    raise Unreadable(
      f'This is no message of grpo_jax ({plain_text.first_line(error)}).'
    ) from error
  return values, blobs


class Signer:
  """Signs messages with a secret, and tells whether one is signed.

  The secret itself is never sent. Who has it not can neither ask a learner nor
  answer in its place; messages are not encrypted.
  """

  def __init__(self, secret: bytes):
    self._secret = secret

  def sign(self, *parts: bytes) -> str:
    """A signature of some parts, in their order."""
    made = hmac.new(self._secret, digestmod=hashlib.sha256)
    for part in parts:
      made.update(_LENGTH.pack(len(part)))
      made.update(part)
    return made.hexdigest()

  def knows(self, signature: str, *parts: bytes) -> bool:
    """Whether it is the signature of these parts; in constant time."""
    given = signature.encode('ascii', 'replace')
    return hmac.compare_digest(given, self.sign(*parts).encode())


def digest(data: bytes) -> bytes:
  """The SHA-256 of a message, in hexadecimal."""
  return hashlib.sha256(data).hexdigest().encode()


def check_records(records: drawing.Records) -> None:
  """Raises a ValueError unless JSON brings records over as they are."""
  for record in records:
    if where := _strange(record):
      raise ValueError(
        f'Prompt {record.get("index")} has {where}, which JSON does not bring '
        'to a job as it is; let its fields hold texts, numbers, None, lists '
        'and dicts with texts as keys, or let the run sample itself '
        '(config.generator.listen).'
      )


def _strange(value: Any, where: str = '') -> str:
  """Where a value has what JSON would change; '' if nowhere."""
  if type(value) in _PLAIN:
    return ''
  if type(value) is dict:
    for key, one in value.items():
      if type(key) is not str:
        return f'the key {plain_text.shown(key)} in {where or "it"}'
      if found := _strange(one, f'{where}.{key}' if where else key):
        return found
    return ''
  if type(value) is list:
    every = (_strange(one, f'{where}[{n}]') for n, one in enumerate(value))
    return next(filter(None, every), '')
  return f'a {plain_text.kind(value)} in {where or "it"}'


def collected_to_bytes(part: drawing.Collected) -> dict[str, bytes]:
  """What was drawn as blobs; see `collected_from_bytes`."""
  rollout = part.rollout
  arrays: dict[str, Any] = {
    'waited_secs': np.float64(part.waited_secs),
    'judging_secs': np.float64(part.judging_secs),
    **{f'use/{name}': np.float64(x) for name, x in part.use.items()},
  }
  # A file of a rollout has what is learned from, and not what took how long.
  if rollout.judge_secs is not None:
    arrays['judge_secs'] = rollout.judge_secs
  if rollout.accounts:
    arrays['secs'] = np.array(
      [[one.secs for one in row] for row in rollout.accounts], np.float64
    )
  written = io.BytesIO()
  np.savez(written, **arrays)
  return {
    'rollout': parquet.to_bytes(rollout, 0), 'numbers': written.getvalue(),
  }  # fmt: skip


def collected_from_bytes(blobs: Mapping[str, bytes]) -> drawing.Collected:
  """What `collected_to_bytes` was given.

  Raises:
    Unreadable: These are not its blobs.
  """
  try:
    rollout = parquet.from_bytes(blobs['rollout'])
    with np.load(io.BytesIO(blobs['numbers']), allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    use = {
      name.removeprefix('use/'): arrays[name].item()
      for name in arrays
      if name.startswith('use/')
    }
    if 'secs' in arrays:
      rollout = rollout._replace(accounts=_timed(rollout, arrays['secs']))
    rollout = rollout._replace(judge_secs=arrays.get('judge_secs'))
    return drawing.Collected(
      rollout,
      arrays['waited_secs'].item(),
      arrays['judging_secs'].item(),
      use,
    )
  except Exception as error:  # NumPy raises what it likes
    raise Unreadable(
      f'This is no part of a rollout ({plain_text.first_line(error)}).'
    ) from error


def _timed(rollout: Any, secs: np.ndarray) -> Sequence[Any]:
  return [
    [
      one._replace(secs=float(took))
      for one, took in zip(row, of_row, strict=True)
    ]
    for row, of_row in zip(rollout.accounts, secs, strict=True)
  ]
