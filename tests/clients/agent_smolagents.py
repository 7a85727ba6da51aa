"""An agent on smolagents.

It takes a task as one text, has a prompt of its own for the system, and writes
calls and results into texts.
"""

import os

import smolagents
from smolagents import tool
import task


@tool
def calculator(expression: str) -> str:
  """Calculates.

  Args:
    expression: What is calculated.
  """
  return task.calculator(expression)


def play(example):
  """Lets the package's agent play."""
  model = smolagents.OpenAIModel(
    'policy',
    api_base=os.environ['OPENAI_BASE_URL'],
    api_key=os.environ['OPENAI_API_KEY'],
  )
  agent = smolagents.ToolCallingAgent(
    tools=[calculator], model=model, verbosity_level=0
  )
  texts = [f'{one["role"]}: {one["content"]}' for one in task.messages(example)]
  return agent.run('\n'.join(texts))


if __name__ == '__main__':
  task.main(play, (smolagents.AgentError,))
