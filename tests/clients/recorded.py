"""python -m tests.clients.recorded FOLDER [--write]

Runs the agent of each package against `stub`, and prints what it sends. With
--write, the bodies of tests/serving/bodies are written anew: the last that each
sends. FOLDER has the virtual environments that `venvs` makes.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from tests.clients import stub
from tests.clients import venvs

HERE = pathlib.Path(__file__).parent
BODIES = HERE.parent / 'serving' / 'bodies'
EXAMPLE = {
  'prompt': [
    {'role': 'system', 'content': 'Use the calculator.'},
    {'role': 'user', 'content': 'How many pens?'},
    {'role': 'assistant', 'content': '413'},
    {'role': 'user', 'content': 'And 1 more — ½?'},
  ],
  'answer': '414',
}


def run(
  name: str,
  python: pathlib.Path,
  served: stub.Stub,
  example: dict[str, Any] | None = None,
) -> subprocess.CompletedProcess[str]:
  """Runs an agent until it ends.

  Args:
    name: Of its package, see `venvs.PACKAGES`.
    python: That has the package.
    served: Whom it asks.
    example: What it is asked; None: `EXAMPLE`.
  """
  env = {'PATH': os.environ['PATH'], 'NO_PROXY': '*', 'HOME': '/nonexistent'}
  env |= {'OPENAI_BASE_URL': served.address, 'OPENAI_API_KEY': 'token'}
  return subprocess.run(
    [python, HERE / f'agent_{name}.py'],
    input=json.dumps(example or EXAMPLE) + '\n',
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
  )


def report(asked: list[stub.Asked]) -> dict[str, str]:
  """What a client sends, in words; the columns of the README's table."""
  bodies = [one.fields for one in asked]
  taken = {'messages', 'tools', 'model'}
  others = collections.Counter(
    f'{key}={json.dumps(value)}'
    for body in bodies
    for key, value in sorted(body.items())
    if key not in taken
  )
  last = bodies[-1]['messages']
  said = [one for one in last if one['role'] == 'assistant']
  calls = [call for one in said for call in one.get('tool_calls') or ()]
  wanted = '{"expression":  "12 * 34 + 5"}'
  sent = [call['function']['arguments'] for call in calls]
  whole = json.dumps(last)
  return {
    'requests': str(len(bodies)),
    'roles': ' '.join(one['role'][0] for one in last),
    'other fields': ', '.join(others) or 'none',
    'ids': _yes(any(c['id'] == 'call_0_0' for c in calls)),
    'arguments': 'as they were'
    if wanted in sent
    else (repr(sent[0]) if sent else 'none'),
    'text': repr(
      [one.get('content') for one in said if 'count' in str(one)][:1]
    ),
    'reasoning': _yes('let me see' in whole),
    'results': ' '.join(
      one.get('tool_call_id', '?') for one in last if one['role'] == 'tool'
    ),
    'keys': ' '.join(sorted({key for one in last for key in one})),
    'tool': json.dumps(bodies[0].get('tools', [None])[0]),
    'headers': ' '.join(
      sorted(h for h in asked[0].headers if h.startswith('x-'))
    ),
  }


def _yes(value: bool) -> str:
  return 'kept' if value else 'dropped'


def main(arguments: list[str]) -> None:
  """Prints, and writes."""
  if not arguments:
    raise SystemExit(__doc__)
  for name in venvs.PACKAGES:
    python = venvs.python(name, arguments[0])
    if python is None:
      raise SystemExit(f'{arguments[0]} has no {name}; make it by venvs.py.')
    began = time.monotonic()
    with stub.serving() as served:
      done = run(name, python, served)
    secs = time.monotonic() - began
    print(f'== {name} ({done.returncode}, {secs:.1f} s): {done.stdout!r:.200}')
    if done.returncode:
      print(done.stderr[-3000:])
    for key, value in report(served.asked).items():
      print(f'  {key}: {value}')
    if '--write' in arguments:
      BODIES.mkdir(exist_ok=True)
      last = served.asked[-1].fields  # which has all the others
      text = json.dumps(last, ensure_ascii=False, indent=1)
      (BODIES / f'{name}.json').write_text(text + '\n')


if __name__ == '__main__':
  main(sys.argv[1:])
