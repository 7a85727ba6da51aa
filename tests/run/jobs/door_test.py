"""Generators and a learner over sockets, without a model."""

import http.client
import json
import signal
import socket
import threading
import time

import numpy as np
import pytest

from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import door as door_lib
from grpo_jax.run.jobs import generating
from grpo_jax.run.jobs import wire
from tests.run.jobs import doors


@pytest.fixture(autouse=True)
def beats_fast(monkeypatch):
  monkeypatch.setattr(calls, 'BEAT_SECS', 0.1)
  monkeypatch.setattr(door_lib, 'TAKE_SECS', 0.3)
  monkeypatch.setattr(generating, '_AGAIN_SECS', 0.05)


def finish(desk, *generators):
  desk.is_done = True
  assert [one.ended() for one in generators] == [0] * len(generators)


def test_generators_draw_what_a_learner_asks_for():
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    every = [doors.Job(address, name=f'{n}') for n in range(3)]
    for step in range(4):
      found = desk.draw(doors.jobs(4, version=step, step=step))
      assert [one.rollout.index.tolist() for one in found] == [
        [n] for n in range(4)
      ]
    assert found[0].waited_secs == 0.5 and found[0].use['turns'] == 1
    finish(desk, *every)
    assert not desk.generators()
  assert sum(one.generator.parts for one in every) == 16
  assert {v for one in every for v in one.draws.versions} == {0, 1, 2, 3}
  lines = [line for one in every for line in one.said]
  assert any(
    line.startswith('rollout 3, part 4 of 4, version 3: 6 tokens in ')
    for line in lines
  )


def test_one_that_is_added_late_helps():
  desk = desk_lib.Desk()
  slow = doors.Draws(lambda job, check: time.sleep(0.3))
  with doors.opened(desk) as address:
    first = doors.Job(address, slow)
    asked = threading.Thread(target=desk.draw, args=(doors.jobs(6),))
    asked.start()
    time.sleep(0.4)
    second = doors.Job(address, name='two')
    asked.join(10)
    finish(desk, first, second)
  assert first.generator.parts and second.generator.parts


def test_its_own_error_reaches_the_learner():
  def fails(job, check):
    raise ValueError('The judge cannot read this.')

  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address, doors.Draws(fails))
    with pytest.raises(
      desk_lib.Failed, match='^The judge cannot read this.'
    ) as e:
      desk.draw(doors.jobs(1))
    assert 'in fails' in e.value.__notes__[0]
    assert isinstance(one.ended(), ValueError)
    assert not desk.generators()

  def breaks(job, check):
    raise KeyError('answer')

  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address, doors.Draws(breaks))
    with pytest.raises(desk_lib.FailedInside, match="^KeyError: 'answer'"):
      desk.draw(doors.jobs(1))
    assert isinstance(one.ended(), KeyError)


def test_devices_that_fail_end_the_generator_alone():
  import jax

  def fails(job, check):
    raise jax.errors.JaxRuntimeError('INTERNAL: the link is down')

  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    broken = doors.Job(address, doors.Draws(fails))
    asked = threading.Thread(target=desk.draw, args=(doors.jobs(2),))
    asked.start()
    assert isinstance(broken.ended(), generating.Ended)
    whole = doors.Job(address)
    asked.join(10)
    assert not asked.is_alive()
    finish(desk, whole)


def test_weights_that_never_come_end_the_generator_alone(monkeypatch):
  from grpo_jax.engines import fetching

  monkeypatch.setattr(generating, '_MOST_LATE', 2)
  desk, late = desk_lib.Desk(), doors.Draws()

  def fetch(version, start):
    raise fetching.Late('No weights have come.')

  late.fetch = fetch
  with doors.opened(desk) as address:
    without = doors.Job(address, late)
    asked = threading.Thread(target=desk.draw, args=(doors.jobs(2),))
    asked.start()
    error = without.ended()
    assert isinstance(error, generating.Ended)
    assert 'No weights have come. Start the generator again.' in str(error)
    whole = doors.Job(address)
    asked.join(10)
    assert not asked.is_alive()
    finish(desk, whole)


def test_a_learner_that_cannot_answer_now_is_asked_again():
  """As one that ends, whose threads have ended already."""
  ends = []

  def weights(wanted):
    if len(ends) < 2:
      ends.append(wanted)
      raise RuntimeError('cannot schedule new futures after shutdown')
    return {'file': 'x'}

  with doors.opened(desk_lib.Desk(), weights=weights) as address:
    learner = calls.Learner(address, wire.Signer(doors.SECRET))
    learner.hello()
    assert learner.ask('/weights', {}) == {'file': 'x'}
    ends.clear()
    for _ in range(2):
      with pytest.raises(calls.Away, match='cannot answer'):
        learner._once('/weights', wire.pack({'run': 'a run'}))


def test_a_learner_has_other_addresses_after_a_new_start():
  hello = {'run': 'a run', 'doors': ['of the first', '127.0.0.1:1']}
  with doors.opened(desk_lib.Desk(), hello=hello) as address:
    learner = calls.Learner(address, wire.Signer(doors.SECRET))
    learner.hello()
    hello['doors'] = ['of the first', '127.0.0.1:2']
    first, second = learner.all()
    assert first is learner and second.address == '127.0.0.1:2'
    assert second.run == 'a run'
    learner.run = 'another'
    with pytest.raises(wire.Refused, match='Another run'):
      learner.all()


def test_it_ends_on_a_signal_in_the_midst_of_a_part():
  begun = threading.Event()

  def endless(job, check):
    begun.set()
    while True:
      check()
      time.sleep(0.01)

  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address, doors.Draws(endless))
    asked = threading.Thread(target=desk.draw, args=(doors.jobs(1),))
    asked.start()
    assert begun.wait(10)
    one.stop.take(signal.SIGTERM)
    assert one.ended() == 128 + signal.SIGTERM
    assert not desk.generators()
    other = doors.Job(address)
    asked.join(10)
    assert not asked.is_alive()
    finish(desk, other)


def test_a_part_that_nobody_waits_for_is_given_up():
  begun = threading.Event()

  def endless(job, check):
    if job.step == 0:
      begun.set()
      while True:
        check()
        time.sleep(0.01)

  desk, stops = desk_lib.Desk(), threading.Event()

  def check():
    if stops.is_set():
      raise InterruptedError

  def give_up():
    with pytest.raises(InterruptedError):
      desk.draw(doors.jobs(1), check)

  with doors.opened(desk) as address:
    one = doors.Job(address, doors.Draws(endless))
    asked = threading.Thread(target=give_up)
    asked.start()
    assert begun.wait(10)
    stops.set()
    asked.join(10)
    assert len(desk.draw(doors.jobs(2, step=1))) == 2
    finish(desk, one)
  assert 'rollout 0 is given up: nobody waits for it' in one.said


def test_a_learner_that_restarts_is_found_again():
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address)
    desk.draw(doors.jobs(1))
  port = int(address.rpartition(':')[2])
  time.sleep(0.3)
  again = desk_lib.Desk()
  with doors.opened(again, port=port):
    again.draw(doors.jobs(2))
    finish(again, one)


def test_a_generator_knows_its_own_address_though_the_learner_has_ended():
  """It makes a server of transfers there, a while after it was greeted."""
  with doors.opened(desk_lib.Desk()) as address:
    learner = calls.Learner(address, wire.Signer(doors.SECRET))
    learner.hello()
  assert learner.own_host == '127.0.0.1'
  with pytest.raises(calls.Away):
    learner.hello()
  assert learner.own_host == '127.0.0.1'


def test_a_learner_that_is_away_ends_it_after_a_while():
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address, wait_secs=0.5)
    desk.draw(doors.jobs(1))
  error = one.ended()
  assert isinstance(error, generating.Ended)
  assert 'does not answer' in str(error) and '--wait_secs' in str(error)


def test_another_run_at_the_address_ends_it():
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address)
    desk.draw(doors.jobs(1))
  port = int(address.rpartition(':')[2])
  with doors.opened(desk_lib.Desk(), port=port, run='another'):
    error = one.ended()
  assert isinstance(error, generating.Ended)
  assert 'start the generator again' in str(error)


def test_one_that_the_learner_does_not_want_is_told_why():
  desk = desk_lib.Desk()
  why = 'Its jax is another one.'
  with doors.opened(desk, refuse=lambda about: why) as address:
    error = doors.Job(address).ended()
  assert isinstance(error, wire.Refused) and str(error) == why


@pytest.mark.parametrize('secret', [b'', b'another'])
def test_another_secret_is_refused_on_both_sides(secret):
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    error = doors.Job(address, secret=secret).ended()
  assert isinstance(error, wire.Refused)
  assert 'has another secret' in str(error) and error.status == 403
  assert not desk.generators()


def raw(address, path, body, headers=None, method='POST'):
  host, _, port = address.partition(':')
  connection = http.client.HTTPConnection(host, int(port), timeout=10)
  connection.request(method, path, body, headers or {})
  answer = connection.getresponse()
  data = answer.read()
  connection.close()
  return answer.status, data


def signed(path, body, signer=None, digest=None):
  signer, nonce = signer or wire.Signer(doors.SECRET), '12'
  digest = digest or wire.digest(body)
  sign = signer.sign(b'ask', path.encode(), nonce.encode(), digest)
  return {
    door_lib.NONCE: nonce, door_lib.DIGEST: digest.decode(),
    door_lib.SIGNATURE: sign,
  }  # fmt: skip


@pytest.mark.parametrize(
  'body',
  [
    b'',
    b'{}',
    b'\x80\x04K\x01.',  # a pickle
    wire.pack(3),
    wire.pack({'word': 3}),
    wire.pack({'word': [], 'ticket': {}, 'secs': 'y'}),
    wire.pack({'run': 'a run'})[:-1],
    wire.pack({'run': 'a run'}) + b'x',
    wire.pack({}, {'rollout': b'PAR1'})[:-2],
    b'grpo-jax 1\n' + b'\xff' * 8,
    b'grpo-jax 1\n' + (10**6).to_bytes(8, 'little') + b'[' * 10**6,
  ],
)
def test_garbage_is_refused_and_hurts_nobody(body):
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    for path in ('/join', '/beat', '/take', '/bring', '/fail', '/leave'):
      status, _ = raw(address, path, body, signed(path, body))
      assert status in (400, 409), path
      another = signed(path, body, wire.Signer(b'another'))
      if len(body) < 1000:  # else the answer comes before all is sent
        assert raw(address, path, body)[0] == 403
        assert raw(address, path, body, another)[0] == 403
    one = doors.Job(address)
    assert len(desk.draw(doors.jobs(2))) == 2
    finish(desk, one)


def test_what_is_no_address_or_too_large_is_refused(monkeypatch):
  monkeypatch.setattr(door_lib, '_MOST_BYTES', 1000)
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    body = wire.pack({})
    assert raw(address, '/nowhere', body)[0] == 404
    assert raw(address, '/hello', None, method='GET')[0] == 404
    large = wire.pack({'x': 'y' * 1000})
    assert raw(address, '/beat', large, signed('/beat', large))[0] == 413

    def endless():  # without a length
      while True:
        yield b'x' * 500

    with pytest.raises((AssertionError, OSError)):
      status, _ = raw(address, '/beat', endless(), signed('/beat', body))
      assert status != 413
    # Nothing of it is waited for.
    headers = {'content-length': str(10**12)}
    told = signed('/bring', b'') | headers
    assert raw(address, '/bring', b'', told)[0] == 413
    # Who has no secret is not read at all.
    assert raw(address, '/bring', b'', headers)[0] == 403
    changed = wire.pack({'word': 'y'})
    status, _ = raw(
      address, '/beat', changed, signed('/beat', b'', None, wire.digest(body))
    )
    assert status == 400


def test_connections_that_are_cut_or_silent_hurt_nobody(monkeypatch):
  monkeypatch.setattr(door_lib, '_IDLE_SECS', 0.3)
  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    host, _, port = address.partition(':')
    body = wire.pack({'word': 'x'})
    head = ''.join(f'{k}: {v}\r\n' for k, v in signed('/beat', body).items())
    cut = (
      f'POST /beat HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 900\r\n\r\n'
    ).encode()
    silent = []
    for n in range(40):
      one = socket.create_connection((host, int(port)))
      one.sendall(cut[: 10 * n])
      if n % 2:
        one.close()
      else:
        silent.append(one)
    half = socket.create_connection((host, int(port)))
    half.sendall(cut + b'x')
    job = doors.Job(address)
    assert len(desk.draw(doors.jobs(4))) == 4
    half.settimeout(5)
    assert b' 408 ' in half.recv(4096).split(b'\r\n')[0]
    finish(desk, job)


def test_answers_that_somebody_else_gives_are_not_believed():
  """Who listens at the address without the secret is no learner."""

  async def app(scope, receive, send):
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    body = wire.pack({'word': 'x', 'done': True, 'known': True, 'run': 'a run'})
    await send({'type': 'http.response.body', 'body': body})

  from grpo_jax.serving import listening

  with listening.Listening(app, listening.bound()) as it:
    error = doors.Job(f'127.0.0.1:{it.address[1]}').ended()
  assert isinstance(error, wire.Refused) and error.status == 403


def test_a_late_answer_is_ignored(monkeypatch):
  """A generator stands still with a part, and another one draws it."""
  monkeypatch.setattr(desk_lib, 'SILENT_SECS', 0.5)
  goes_on, begun = threading.Event(), threading.Event()

  def stands(job, check):
    begun.set()
    assert goes_on.wait(20)

  desk = desk_lib.Desk()
  with doors.opened(desk) as address:
    one = doors.Job(address, doors.Draws(stands))
    asked = threading.Thread(target=desk.draw, args=(doors.jobs(1),))
    asked.start()
    assert begun.wait(10)
    monkeypatch.setattr(desk_lib.Desk, 'beat', silent(desk_lib.Desk.beat, desk))
    two = doors.Job(address, name='two')
    asked.join(10)
    assert not asked.is_alive() and two.draws.jobs
    monkeypatch.undo()
    goes_on.set()
    time.sleep(0.5)
    finish(desk, one, two)
  assert one.generator.parts == 0 and two.generator.parts == 1


def silent(beat, desk):
  """Beats of the first generator do not arrive."""
  first = next(iter(desk._generators))
  return lambda self, word: word != first and beat(self, word)


def test_records_that_json_would_change_are_refused():
  good = {'index': 3, 'prompt': 'x', 'a': [1, 2.5, None, {'b': True}]}
  wire.check_records([good])
  assert json.loads(json.dumps(good)) == good
  for value, words in (
    ((1, 2), 'a tuple in a.b'),
    (np.float32(1), 'a float32 in a.b'),
    ({1: 2}, 'the key 1 in a.b'),
    ([[b'x']], r'a bytes in a.b\[0\]\[0\]'),
    (object(), 'a object in a.b'),
  ):
    with pytest.raises(ValueError, match=f'^Prompt 3 has {words}, which JSON'):
      wire.check_records([{**good, 'a': {'b': value}}])
