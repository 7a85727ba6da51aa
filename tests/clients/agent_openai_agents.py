"""An agent on openai-agents."""

import agents
import task

agents.set_default_openai_api('chat_completions')
agents.set_tracing_disabled(True)


def play(example):
  """Lets the package's runner play."""
  agent = agents.Agent(
    name='calculating',
    model='policy',
    tools=[agents.function_tool(task.calculator)],
  )
  return agents.Runner.run_sync(agent, task.messages(example)).final_output


if __name__ == '__main__':
  task.main(play, (agents.MaxTurnsExceeded, agents.ModelBehaviorError))
