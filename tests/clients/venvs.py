"""python tests/clients/venvs.py FOLDER [NAME ...]

Makes a virtual environment for each agent package, with whatever pip finds
newest, and prints the versions. What there is already stays.
"""

import os
import pathlib
import subprocess
import sys
import venv

PACKAGES = {
  'openai': ('openai',),
  'openai_agents': ('openai-agents',),
  'pydantic_ai': ('pydantic-ai-slim[openai]',),
  'langgraph': ('langgraph', 'langchain-openai'),
  'smolagents': ('smolagents[openai]',),
}
"""What is installed for each `agent_NAME.py` of this folder."""

VARIABLE = 'GRPO_JAX_CLIENTS'
"""The environment variable that names the folder, for the tests."""


def python(name: str, folder: str | None = None) -> pathlib.Path | None:
  """The interpreter that has a package; None where there is none.

  Args:
    name: Of `PACKAGES`.
    folder: Of the virtual environments; None: as the environment says.
  """
  folder = folder or os.environ.get(VARIABLE, '')
  found = pathlib.Path(folder, name, 'bin', 'python')
  return found if folder and (found.parent.parent / '.whole').exists() else None


def make(folder: pathlib.Path, name: str) -> None:
  """Makes one, unless it is there."""
  home = folder / name
  if not (home / '.whole').exists():
    venv.create(home, with_pip=True, clear=True)
    subprocess.run(
      [home / 'bin' / 'python', '-m', 'pip', 'install', '--quiet',
       '--disable-pip-version-check', *PACKAGES[name]],
      check=True,
    )  # fmt: skip
    (home / '.whole').touch()


def versions(folder: pathlib.Path, name: str) -> str:
  """The versions of the packages that were asked for, and of openai."""
  wanted = {package.split('[')[0] for package in PACKAGES[name]} | {'openai'}
  code = (
    'from importlib.metadata import version; import sys\n'
    'print(*(f"{x} {version(x)}" for x in sys.argv[1:]), sep=", ")'
  )
  return subprocess.run(
    [folder / name / 'bin' / 'python', '-c', code, *sorted(wanted)],
    check=True,
    capture_output=True,
    text=True,
  ).stdout.strip()


def main(arguments: list[str]) -> None:
  """Makes all, or those that are named."""
  if not arguments:
    raise SystemExit(__doc__)
  folder = pathlib.Path(arguments[0]).resolve()
  for name in arguments[1:] or PACKAGES:
    make(folder, name)
    print(f'{name}: {versions(folder, name)}', flush=True)
  print(f'export {VARIABLE}={folder}')


if __name__ == '__main__':
  main(sys.argv[1:])
