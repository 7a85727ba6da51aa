"""What a generator asks its learner, and the thread in which it beats."""

from collections.abc import Mapping
import http.client
import secrets
import threading
import time
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.run.jobs import door
from grpo_jax.run.jobs import wire

BEAT_SECS = 10.0
_CALL_SECS = 30.0  # in which an answer, or more of it, must come
_TRIES = 3  # of a call whose connection is cut


class Away(OSError):
  """The learner does not answer."""


class Learner:
  """The learner at an address.

  Any thread may call. Each call is a connection of its own.

  Attributes:
    host: Its name, without the port.
    own_host: The address of this machine from which it was reached last.

  Args:
    address: HOST:PORT.
    signer: Has the secret.

  Raises:
    ValueError: This is no address.
  """

  def __init__(self, address: str, signer: wire.Signer):
    host, colon, port = address.rpartition(':')
    if not (host and colon and port.isdecimal()):
      raise ValueError(
        f'--learner={address}; give HOST:PORT, as in --learner=learner-0:8470.'
      )
    self.host, self._port = host.strip('[]'), int(port)
    self.address, self._signer = address, signer
    self.run = ''  # set by `hello`
    self.own_host = ''

  def all(self) -> list['Learner']:
    """The processes of this learner now; each start has other addresses.

    Raises:
      Away: It does not answer.
      wire.Refused: It has another run now.
    """
    doors = self.ask('/hello', {})
    if doors.get('run') != self.run:
      raise wire.Refused(409, 'Another run is at this address now.')
    return [self, *map(self.beside, doors['doors'][1:])]

  def beside(self, address: str) -> 'Learner':
    """Another process of this learner, which has said hello."""
    found = Learner(address, self._signer)
    found.run = self.run
    return found

  def hello(self) -> dict[str, Any]:
    """What the learner tells of its run."""
    found = self.ask('/hello', {})
    self.run = found.get('run', '')
    return found

  def ask(
    self,
    path: str,
    values: Mapping[str, Any],
    blobs: Mapping[str, bytes] | None = None,
  ) -> dict[str, Any]:
    """One question and its answer.

    Raises:
      Away: There is no answer.
      wire.Refused: The answer is no.
    """
    body = wire.pack({'run': self.run, **values}, blobs)
    for left in reversed(range(_TRIES)):
      try:
        return self._once(path, body)
      except Away:
        if not left:
          raise
        time.sleep(0.2)
    raise AssertionError

  def _once(self, path: str, body: bytes) -> dict[str, Any]:
    nonce = secrets.token_hex(16).encode()
    digest = wire.digest(body)
    signature = self._signer.sign(b'ask', path.encode(), nonce, digest)
    connection = http.client.HTTPConnection(
      self.host, self._port, timeout=_CALL_SECS
    )
    try:
      connection.connect()
      self.own_host = connection.sock.getsockname()[0]
      connection.request(
        'POST',
        path,
        body,
        {
          door.NONCE: nonce.decode(),
          door.DIGEST: digest.decode(),
          door.SIGNATURE: signature,
        },  # fmt: skip
      )
      answer = connection.getresponse()
      status, said = answer.status, answer.headers.get(door.SIGNATURE, '')
      data = answer.read(wire.MOST_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
      raise Away(
        f'The learner at {self.address} does not answer '
        f'({plain_text.first_line(error)}).'
      ) from error
    finally:
      connection.close()
    parts = b'answer', path.encode(), nonce, str(status).encode(), data
    if not self._signer.knows(said, *parts):
      if status >= 500:  # a proxy, or a server that ends
        raise Away(f'The learner at {self.address} answers {status}.')
      raise wire.Refused(
        403,
        f'What answers at {self.address} has another secret; give the one in '
        'config.generator.secret of the run by --secret, and the address of '
        'the learner by --learner.',
      )
    values, _ = wire.unpack(data)
    if status == 500:  # such as of one that ends
      raise Away(
        f'The learner at {self.address} cannot answer '
        f'({values.get("refused")}).'
      )
    if status != 200:
      raise wire.Refused(status, str(values.get('refused', status)))
    return values


class Beats:
  """A thread that tells the learner that this generator is alive.

  It beats while this process computes, and not while it stands still.

  Attributes:
    is_known: Whether the learner knew it at the last beat.
    newest: The version by which the learner has rollouts drawn.
    is_open: Whether the learner still waits for the part under way.

  Args:
    learner: Is told.
    word: By which the learner knows this generator.
  """

  def __init__(self, learner: Learner, word: str):
    self._learner, self._word = learner, word
    self.is_known = self.is_open = True
    self.newest: int | None = None
    self._ticket: str | None = None
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._run, name='beat', daemon=True)
    self._thread.start()

  def draws(self, ticket: str | None) -> None:
    """Says what is drawn from now on; None: nothing."""
    self._ticket, self.is_open = ticket, True

  def close(self) -> None:
    """Ends the thread."""
    self._over.set()

  def _run(self) -> None:
    while not self._over.wait(BEAT_SECS):
      ticket = self._ticket
      try:
        heard = self._learner.ask(
          '/beat', {'word': self._word, 'ticket': ticket}
        )
      except (Away, wire.Refused, ValueError):  # `take` says so
        continue
      self.is_known, self.newest = bool(heard.get('known')), heard.get('newest')
      if ticket is not None and ticket == self._ticket:
        self.is_open = bool(heard.get('open')) and self.is_known
