"""Tools of an MCP server that talks over its standard input and output.

'mcp:command arguments' starts the command once to ask for its tools, and once
for each episode, so that no episode sees what another one has changed.
"""

import asyncio
from collections.abc import Mapping
from concurrent import futures
import contextlib
import os
import shlex
from typing import Any

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.environments import tools
from grpo_jax.environments.base import Unavailable

_START_SECS = 60.0
_MOST_PAGES = 100


def make(command: str) -> Any:
  """A class whose methods are the tools of a server.

  Args:
    command: A program and its arguments, as a shell writes them.

  Raises:
    ValueError: The package is missing, or the server does not start.
  """
  words = shlex.split(command)
  importing.package('mcp', 'mcp')
  try:
    with futures.ThreadPoolExecutor(1) as pool:  # here a loop may run already
      found = pool.submit(asyncio.run, _listed(words)).result()
  except (Exception, BaseExceptionGroup) as error:
    raise ValueError(
      f'The MCP server {command!r} has told no tools'
      f' ({plain_text.named(_first(error))}); see whether the command runs.'
    ) from error
  if not found:
    raise ValueError(f'The MCP server {command!r} has no tools; name another.')
  methods = {f'tool_{k}': _method(one) for k, one in enumerate(found)}
  return type('McpTools', (_Server,), {'words': words, **methods})


class _Server:
  """A server for one episode.

  Its connection lives in a task of its own, because what opens it must close
  it, and `reset` and `close` may be called in different tasks.

  Args:
    call_secs: The longest that the server may take for a call.
  """

  words: list[str] = []

  def __init__(self, call_secs: float = 30.0):
    self._call_secs = call_secs
    self._task: asyncio.Task[Any] | None = None

  async def reset(self, example: Mapping[str, Any], seed: int) -> None:
    """Starts the server; the record says what the policy is told."""
    await self.close()
    self._over = asyncio.Event()
    opened = asyncio.get_running_loop().create_future()
    self._task = asyncio.ensure_future(self._serve(opened))
    await asyncio.wait(
      {opened, self._task},
      timeout=_START_SECS,
      return_when=asyncio.FIRST_COMPLETED,
    )
    if not opened.done():
      await self.close()
      raise Unavailable(f'the MCP server {self.words[0]!r} does not start')
    self._session = opened.result()

  async def close(self) -> None:
    """Ends the server."""
    task, self._task = self._task, None
    if task is not None:
      self._over.set()
      await asyncio.wait({task}, timeout=5.0)
      task.cancel()
      await asyncio.wait({task})
      if not task.cancelled():
        task.exception()  # so that nothing is printed of it

  async def _serve(self, opened: asyncio.Future[Any]) -> None:
    async with _connected(self.words) as session:
      if not opened.done():
        opened.set_result(session)
      await self._over.wait()

  async def _call(self, name: str, arguments: dict[str, Any]) -> str:
    said = await self._session.call_tool(
      name, arguments, read_timeout_seconds=self._call_secs
    )
    text = '\n'.join(
      getattr(one, 'text', f'[{getattr(one, "type", "content")}]')
      for one in said.content
    )
    if said.is_error:
      raise RuntimeError(text or 'the server says that it went wrong')
    return text


def _method(tool: Any) -> Any:
  name = tool.name

  async def called(self: _Server, **arguments: Any) -> str:
    return await self._call(name, arguments)

  return tools.described(
    called,
    {
      'type': 'function',
      'function': {
        'name': name,
        'description': tool.description or '',
        'parameters': {'type': 'object', 'properties': {}, **tool.input_schema},
      },
    },
  )


@contextlib.asynccontextmanager
async def _connected(words: list[str]):
  mcp = importing.package('mcp', 'mcp')
  server = mcp.StdioServerParameters(command=words[0], args=words[1:])
  with open(os.devnull, 'w') as nowhere:
    async with mcp.stdio_client(server, errlog=nowhere) as (read, write):
      async with mcp.ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def _listed(words: list[str]) -> list[Any]:
  """The tools of a server."""
  found, cursor = [], None
  async with asyncio.timeout(_START_SECS), _connected(words) as session:
    for _ in range(_MOST_PAGES):
      said = await session.list_tools(params=_page(cursor))
      found += said.tools
      cursor = said.next_cursor
      if not cursor:
        break
  return found


def _page(cursor: str | None) -> Any:
  if not cursor:
    return None
  types = importing.package('mcp.types', 'mcp')
  return types.PaginatedRequestParams(cursor=cursor)


def _first(error: BaseException) -> BaseException:
  """The error inside of groups of them."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error
