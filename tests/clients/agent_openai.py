"""An agent on openai: a loop by hand."""

import asyncio
import json

import openai
import task

from grpo_jax.environments import base
from grpo_jax.environments import tools

TOOLS = {'calculator': task.arithmetic.calculator}


def play(example):
  """Calls the tool until the model answers without a call."""
  client = openai.OpenAI()
  schemas = [tools.schema(task.calculator)]
  messages = task.messages(example)
  while True:
    answer = client.chat.completions.create(
      model='policy', messages=messages, tools=schemas
    )
    said = answer.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    if not said.tool_calls:
      return said.content
    outcomes = asyncio.run(
      tools.run_calls([*map(_call, said.tool_calls)], TOOLS, 30.0)
    )
    for one in outcomes:
      kept = ('role', 'tool_call_id', 'content')
      messages.append({name: one.message[name] for name in kept})


def _call(call):
  name, raw = call.function.name, call.function.arguments
  try:
    arguments = json.loads(raw)
  except ValueError:
    arguments = None
  return base.ToolCall(call.id, name, arguments, raw)


if __name__ == '__main__':
  task.main(play)
