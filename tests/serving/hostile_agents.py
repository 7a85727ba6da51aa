"""Commands that do what no agent should: `python hostile_agents.py NAME`.

What they see of the server, they say to the policy at last, by `tell`. Python's
standard library alone is imported: they start in a process of their own.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.parse

BASE = urllib.parse.urlsplit(os.environ.get('OPENAI_BASE_URL', ''))
TOKEN = os.environ.get('OPENAI_API_KEY', '')
HI = [{'role': 'user', 'content': 'hi'}]


def connected():
  return http.client.HTTPConnection(BASE.hostname, BASE.port, timeout=20)


def ask(body=None, path=BASE.path, to='/chat/completions', **headers):
  """Posts; the status, and what is said."""
  if not isinstance(body, bytes):
    body = json.dumps(body or {'messages': HI}).encode()
  named = {name.replace('_', '-'): value for name, value in headers.items()}
  with contextlib.closing(connected()) as connection:
    connection.request(
      'POST', path + to, body, {'Content-Type': 'application/json', **named}
    )
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors='replace')


def say(text):
  return ask({'messages': [{'role': 'user', 'content': text}]})


def tell(*seen):
  say(f'seen {json.dumps(seen)}')


def raw(data, wait=0.2):
  """Sends bytes, and closes at once."""
  with socket.create_connection((BASE.hostname, BASE.port), 10) as one:
    one.sendall(data)
    time.sleep(wait)


def head(length, path=BASE.path + '/chat/completions'):
  return (
    f'POST {path} HTTP/1.1\r\nHost: {BASE.hostname}\r\nContent-Type: '
    f'application/json\r\nContent-Length: {length}\r\n\r\n'
  ).encode()


def slow(text='slowly'):
  """A question whose answer takes a while."""
  body = json.dumps({'messages': [{'role': 'user', 'content': text}]}).encode()
  return head(len(body)) + body


# How it ends.


def good(example):
  tell(say('one')[0], say('two')[0])


def never_ends(example):
  while True:
    time.sleep(60)


def busy_for_ever(example):
  while True:
    pass


def ignores_signals(example):
  for number in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}:
    with contextlib.suppress(OSError):
      signal.signal(number, signal.SIG_IGN)
  never_ends(example)


def stops_itself(example):
  os.kill(os.getpid(), signal.SIGSTOP)


def exits_at_once(example):
  os._exit(0)


def exits_with_3(example):
  sys.stderr.write('first\nno such room\n')
  sys.exit(3)


def exits_without_a_word(example):
  os._exit(4)


def raises(example):
  raise KeyError('gold')


def ends_by_a_signal(example):
  os.kill(os.getpid(), signal.SIGTERM)


def exits_while_it_asks(example):
  threading.Thread(target=say, args=['slowly'], daemon=True).start()
  time.sleep(0.3)
  os._exit(0)


# What it prints and reads.


def prints_much(example):
  part = b'x' * (1 << 20)
  for _ in range(example['mebibytes']):
    os.write(1, part)
  tell('printed')


def complains_much(example):
  for _ in range(1 << 14):
    os.write(2, b'\xff\x00\x1b[31mno line ends' * 50)
  os._exit(5)


def closes_its_input(example):
  os.close(0)
  tell(say('one')[0])


def reads_no_input():
  """Its record is long, and nobody reads it."""
  tell('not read')


def closes_its_output(example):
  os.close(1)
  os.close(2)
  tell(say('one')[0])


# What it leaves behind.


def leaves_a_child(example):
  """The child has all files of its parent."""
  if not os.fork():
    never_ends(example)
  tell('left')


def daemonises(example):
  """A grandchild in a session of its own calls until it is ended."""
  if not os.fork():
    os.setsid()
    if not os.fork():
      for number in range(3):
        os.close(number)
      while True:
        with contextlib.suppress(OSError):
          say('behind the end')
        time.sleep(0.05)
    os._exit(0)
  time.sleep(0.2)


def forks_many(example):
  with contextlib.suppress(OSError):
    for _ in range(1000):
      if not os.fork():
        never_ends(example)
  never_ends(example)


def eats_memory(example):
  kept = []
  while True:
    kept.append(b'x' * (64 << 20))


def ends_its_parent(example):
  os.kill(os.getppid(), signal.SIGKILL)
  never_ends(example)


# What it asks.


def rewards_itself(example):
  seen = [say('one')[0]]
  for secret in '', TOKEN, 'secret', 'x' * 22, 'é'.encode().decode('latin1'):
    given = {'X_Grpo_Secret': secret} if secret else {}
    body = {'value': 1000.0}
    seen += [ask(body, to='/reward', **given)[0]]
    seen += [ask({'turn': 0}, to='/discard', **given)[0]]
    seen += [ask(X_Grpo_Train='0', **given)[0]]
  tell(*seen)
  print(1000.0)


def rewards_itself_with_its_secret(example):
  """Of an agent that is trusted: its secret is the second line."""
  secret = sys.stdin.readline().strip()
  seen = [say('one')[0]]
  seen += [ask({'value': 0.5}, to='/reward', X_Grpo_Secret='no')[0]]
  seen += [ask({'value': 0.5}, to='/reward', X_Grpo_Secret=secret)[0]]
  seen += [ask({'value': 'much'}, to='/reward', X_Grpo_Secret=secret)[0]]
  seen += [ask({'value': 1, 'turn': 9}, to='/reward', X_Grpo_Secret=secret)[0]]
  for named in {'turn': []}, {'turn': True}, {'id': 'x'}, {'id': []}:
    given = {'value': 1, **named}
    seen += [ask(given, to='/reward', X_Grpo_Secret=secret)[0]]
  seen += [ask({}, to='/discard', X_Grpo_Secret=secret)[0]]
  seen += [ask({'turn': 0}, to='/discard', X_Grpo_Secret=secret)[0]]
  tell(*seen)
  print(0.25)


def prints_no_number(example):
  tell('printed')
  print(example['printed'])


def guesses_tokens(example):
  other = TOKEN[:-1] + ('A' if TOKEN[-1] != 'A' else 'B')
  paths = (
    f'/e/{other}/v1', f'/e/{TOKEN}x/v1', f'/e/{TOKEN.swapcase()}/v1',
    '/e//v1', '/e/%2e%2e/v1', f'/e/{TOKEN}/../{other}/v1', f'/E/{TOKEN}/v1',
    f'/e/{TOKEN}%00/v1', '/e/*/v1', '/v1', '', f'/e/{"x" * 5000}/v1',
  )  # fmt: skip
  seen = [ask(path=path)[0] for path in paths]
  for kind in f'Bearer {other}', 'Bearer', 'Bearer  ', f'Basic {TOKEN}':
    seen.append(ask(path='/v1', Authorization=kind)[0])
  with contextlib.closing(connected()) as connection:
    for path in '/e', '/e/', '/', '/v1/models', '/docs', '/openapi.json':
      connection.request('GET', path)
      answer = connection.getresponse()
      answer.read()
      seen.append(answer.status)
  tell(*seen)


def other_hosts(example):
  seen = [
    ask(Host=host)[0]
    for host in (
      'evil.example',
      '127.0.0.1.evil.example',
      '',
      '[::1',
      '0.0.0.0',
    )
  ]
  kinds = 'text/plain', 'application/x-www-form-urlencoded', ''
  seen += [ask(Content_Type=kind)[0] for kind in kinds]
  with contextlib.closing(connected()) as connection:
    connection.request(
      'OPTIONS', BASE.path + '/chat/completions', None, {'Origin': 'http://a.b'}
    )
    answer = connection.getresponse()
    answer.read()
    names = [name.lower() for name, _ in answer.getheaders()]
    seen += [answer.status, any('access-control' in one for one in names)]
  tell(*seen)


def sends_garbage(example):
  bodies = [
    b'', b'{', b'[]', b'null', b'7', b'\xff\xfe', b'{"messages": 3}',
    b'{"messages": []}', b'{"messages": [7]}', b'{"messages": [{}]}',
    b'{"messages": [{"role": "judge", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": 1e999}]}',
    b'[' * 100_000, b'{"a":' * 50_000, b'9' * 5000,
    b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 5}}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "n": true}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [[]]}',
  ]  # fmt: skip
  tell(*(ask(body)[0] for body in bodies))


def sends_lone_surrogates(example):
  body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
  tell(ask(body)[0] in (200, 400))


def sends_too_much(example):
  with contextlib.closing(connected()) as connection:
    connection.putrequest('POST', BASE.path + '/chat/completions')
    connection.putheader('Content-Type', 'application/json')
    connection.putheader('Content-Length', str(1 << 40))
    connection.endheaders()
    status = connection.getresponse().status
  tell(status)


def sends_half(example):
  """Bodies and heads that never end, on connections that stay and that go."""
  kept = []
  for data in head(10_000) + b'{"mess', b'POST /v1/chat', slow()[:-3], b'':
    raw(data)
    one = socket.create_connection((BASE.hostname, BASE.port), 10)
    one.sendall(data)
    kept.append(one)
  raw(b'\x16\x03\x01\x00\xff' * 100)
  raw(head(-5) + b'x')
  raw(head(9)[:-2] + head(3)[-21:] + b'123')
  tell(say('one')[0], len(kept))


def hangs_up(example):
  """Three questions whose answers nobody waits for."""
  for number in range(3):
    raw(slow(f'slowly {number}'))
  say('slowly, and heard')  # the others are answered before
  tell('gone')


def reads_no_answer(example):
  """Its answers are asked for, and stay where they are."""
  kept = []
  for number in range(3):
    one = socket.create_connection((BASE.hostname, BASE.port), 10)
    one.sendall(slow(f'quick {number}'))
    kept.append(one)
  time.sleep(0.3)
  tell(len(kept))


def floods(example):
  """Two hundred questions at once, of which a limit leaves few."""
  seen = []
  threads = [
    threading.Thread(target=lambda k=k: seen.append(say(f'flood {k}')[0]))
    for k in range(200)
  ]
  for one in threads:
    one.start()
  for one in threads:
    one.join()
  said = {status: seen.count(status) for status in {*seen}}
  os._exit(0 if said == {200: example['turns'], 400: 200 - said[200]} else 6)


def goes_on_beyond_the_limit(example):
  for _ in range(100):
    say('more')


def never_ends_beyond_the_limit(example):
  while say('more')[0] == 200:
    pass
  never_ends(example)


def fails_beyond_the_limit(example):
  while say('more')[0] == 200:
    pass
  sys.exit('there is no more to say')


def looks_around(example):
  """What it has been given: variables and files."""
  files = [
    os.readlink(f'/proc/self/fd/{number}')
    for number in range(3, 64)
    if os.path.exists(f'/proc/self/fd/{number}')
  ]
  tell(sorted(os.environ), [one for one in files if 'socket' in one])


if __name__ == '__main__':
  wanted = globals()[sys.argv[1]]
  if sys.argv[1] == 'reads_no_input':
    wanted()
  else:
    wanted(json.loads(sys.stdin.readline()))
