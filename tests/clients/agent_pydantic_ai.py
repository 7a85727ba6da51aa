"""An agent on pydantic-ai."""

import pydantic_ai
from pydantic_ai import messages as told
from pydantic_ai.models.openai import OpenAIChatModel
import task

PARTS = {'system': told.SystemPromptPart, 'user': told.UserPromptPart}


def play(example):
  """Lets the package's agent play."""
  agent = pydantic_ai.Agent(OpenAIChatModel('policy'), tools=[task.calculator])
  *before, last = task.messages(example)
  history = [
    told.ModelRequest([PARTS[one['role']](one['content'])])
    if one['role'] in PARTS
    else told.ModelResponse([told.TextPart(one['content'])])
    for one in before
  ]
  return agent.run_sync(last['content'], message_history=history).output


if __name__ == '__main__':
  task.main(
    play,
    (pydantic_ai.UnexpectedModelBehavior, pydantic_ai.UsageLimitExceeded),
  )
