"""An agent of the standard library alone: python small_agent.py WORD."""

import json
import os
import sys
import urllib.request


def main():
  example = json.loads(sys.stdin.readline())
  messages = [{'role': 'user', 'content': example['prompt']}]
  for _ in range(3):
    body = {'model': 'any', 'messages': messages, 'temperature': 0.5}
    request = urllib.request.Request(
      os.environ['OPENAI_BASE_URL'] + '/chat/completions',
      json.dumps(body).encode(),
      {
        'Content-Type': 'application/json',
        'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],
      },
    )
    with urllib.request.urlopen(request) as answer:
      said = json.load(answer)['choices'][0]['message']
    messages += [said, {'role': 'user', 'content': sys.argv[1]}]


if __name__ == '__main__':
  main()
