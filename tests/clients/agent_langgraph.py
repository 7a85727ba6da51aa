"""An agent on langgraph, with langchain-openai as its client."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
import task

os.environ['LANGSMITH_TRACING'] = 'false'


def play(example):
  """Lets the package's graph play."""
  agent = create_react_agent(
    ChatOpenAI(model='policy'), [tool(task.calculator)]
  )
  return agent.invoke({'messages': task.messages(example)})['messages'][-1].text


if __name__ == '__main__':
  task.main(play, (GraphRecursionError,))
