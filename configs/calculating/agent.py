"""An agent that calculates, on openai-agents; it knows nothing of training.

It gets a chat as JSON on a line of standard input, and prints its answer:

  echo '{"prompt": "How much is 12 * 34 + 5?"}' | python agent.py

Whom it asks, the variables OPENAI_BASE_URL and OPENAI_API_KEY say.
"""

import ast
import json
import operator
import sys

import agents

KNOWN = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node):
  """Of an expression; raises an exception that the model reads."""
  if isinstance(node, ast.Constant) and isinstance(node.value, int):
    return node.value
  if isinstance(node, ast.BinOp) and type(node.op) in KNOWN:
    return KNOWN[type(node.op)](value(node.left), value(node.right))
  raise ValueError('only whole numbers, +, - and * are known')


@agents.function_tool
def calculator(expression: str) -> str:
  """Calculates."""
  return str(value(ast.parse(expression, mode='eval').body))


if __name__ == '__main__':
  agents.set_default_openai_api('chat_completions')
  agent = agents.Agent(name='calculating', model='policy', tools=[calculator])
  asked = json.loads(sys.stdin.readline())['prompt']
  try:
    print(agents.Runner.run_sync(agent, asked).final_output)
  except agents.AgentsException as error:  # what the model wrote leads nowhere
    print(error)
