"""The READMEs, and the parts of them that are made from the code.

`python -m tests.readmes` writes these parts anew; it audits all methods, which
takes half a minute. `tests/readme_test.py` fails while a part is out of date.

A part stands between two comments, `<!-- NAME: made by python -m tests.readmes
-->` and `<!-- NAME: end -->`.
"""

from collections.abc import Sequence
import pathlib
import re

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.commands import options
from grpo_jax.commands import peers
from grpo_jax.commands import table as command_line
from grpo_jax.config import Config
from grpo_jax.config import changes as config_changes
from grpo_jax.lab import audits
from tests.commands import data_example
from tests.data import peer_files
from tests.data import reasoning_gym_table
from tests.engines.http import tables
from tests.lab.studies import measured
from tests.launch import scaling
from tests.models import families_table
from tests.planning import configs_table

ROOT = pathlib.Path(__file__).parent.parent
_REFERENCE = re.compile(r'`([^`<]+)<(https?://[^>]+)>`_')


def paths() -> list[pathlib.Path]:
  """Every README and the changelog, from the root down."""
  folders = ('grpo_jax', 'configs', 'launch', 'tests')
  found = [path for one in folders for path in (ROOT / one).rglob('README.md')]
  return [ROOT / 'README.md', ROOT / 'CHANGELOG.md', *sorted(found)]


def papers() -> str:
  """Each method with the papers that its docstring names."""
  rows = ['| method | paper |', '| --- | --- |']
  for name in losses.methods.__all__:
    text = ' '.join(getattr(losses.methods, name).__doc__.split())
    _, _, references = text.partition('References: ')
    links = [
      f'{title.strip()} ([{label(url)}]({url}))'
      for title, url in _REFERENCE.findall(references)
    ]
    rows.append(f'| `{name}` | {"; ".join(links) or "none"} |')
  return '\n'.join(rows)


def label(url: str) -> str:
  """'arXiv:2402.03300' for a link to it, 'doi:...' likewise."""
  address = url.split('//')[1]
  for host, short in (('arxiv.org/abs/', 'arXiv:'), ('doi.org/', 'doi:')):
    if address.startswith(host):
      return short + address.removeprefix(host)
  return address


def commands() -> str:
  """What can be typed, from the table of the command line."""
  rows = ['| command | what it does |', '| --- | --- |']
  for name, command in command_line.COMMANDS.items():
    takes = ''.join(f' {options.placeholder(x)}' for x in command.takes)
    rows.append(f'| `grpo-jax {name}{takes}` | {command.what} |')
  return '\n'.join(rows)


def table(
  head: Sequence[str], rows: Sequence[Sequence[str]], bar: str = r'\|'
) -> str:
  """A table in Markdown, in whose cells `bar` stands for a vertical bar."""
  lines = [head, ['---'] * len(head), *rows]
  return ''.join(
    f'| {" | ".join(cell.replace("|", bar) for cell in line)} |\n'
    for line in lines
  )


def config_options(config_class: type = Config) -> str:
  """All options of the config, a table for each section."""
  parts = []
  for section in options.sections(config_class):
    rows = [
      (*(f'`{cell}`' for cell in option[:3]), option.meaning)
      for option in section.options
    ]
    parts.append(
      f'### `{section.name or "config"}`\n\n{section.meaning}\n\n'
      + table(('option', 'type', 'default', 'meaning'), rows)
    )
  return '\n'.join(parts)


def changes() -> str:
  """Which fields may change when a run goes on."""
  heads = {
    'free': 'at any start',
    'allowed': 'with `--allow_changed`',
    'fixed': 'never',
  }
  groups: dict[str, dict[str, str]] = {}
  for name, kind in config_changes.kinds().items():
    groups.setdefault(name.rpartition('.')[0], {})[name] = kind
  fields: dict[str, list[str]] = {kind: [] for kind in heads}
  for group, members in groups.items():
    if group and len({*members.values()}) == 1:  # all of one kind
      members = {f'{group}.*': next(iter(members.values()))}
    for name, kind in members.items():
      fields[kind].append(f'`{name}`')
  rows = [(head, ', '.join(fields[kind])) for kind, head in heads.items()]
  return table(('may change', 'fields'), rows) + (
    '\n`steps` may change at any start while `optim.decay` is `constant`.'
  )


def other_names() -> str:
  """What TRL and verl call the options."""
  rows = [
    (*(f'`{name}`' if name else '' for name in peer[:3]), peer.note)
    for peer in peers.PEERS
  ]
  return table(('ours', 'TRL', 'verl', 'where they differ'), rows)


def methods(rows: Sequence[dict[str, str]] = ()) -> str:
  """What an audit finds of each method, and what the columns mean."""
  rows = rows or audits.table(audits.every())
  cells = [list(row.values()) for row in rows]
  found = table(list(rows[0]), cells, bar='&#124;')
  meanings = [f'- {x}: {meaning}' for x, meaning in diagnostics.COLUMNS.items()]
  return '\n'.join([found, *meanings])


PARTS = {
  'families': ('grpo_jax/models/README.md', families_table.markdown),
  'options': ('configs/README.md', config_options),
  'peers': ('configs/README.md', other_names),
  'machines': ('configs/README.md', configs_table.markdown),
  'changes': ('grpo_jax/run/README.md', changes),
  'conformance': (
    'grpo_jax/run/README.md',
    lambda: table(*tables.conformance_table()),
  ),
  'faults': (
    'grpo_jax/run/README.md',
    lambda: table(*tables.faults_table()),
  ),
  'commands': ('grpo_jax/commands/README.md', commands),
  'data': ('grpo_jax/commands/README.md', data_example.markdown),
  'papers': ('grpo_jax/losses/README.md', papers),
  'methods': ('grpo_jax/losses/README.md', methods),
  'claims': ('grpo_jax/lab/studies/README.md', measured.markdown),
  'shapes': ('grpo_jax/data/README.md', peer_files.markdown),
  'reasoning_gym': (
    'grpo_jax/data/README.md',
    reasoning_gym_table.markdown,
  ),
  'scaling': ('launch/README.md', lambda: scaling.markdown(scaling.rows())),
}


def _between(name: str) -> re.Pattern[str]:
  first = f'<!-- {name}: made by python -m tests.readmes -->\n'
  return re.compile(f'(?<={first}).*?(?=<!-- {name}: end -->)', re.DOTALL)


def written(name: str) -> str:
  """A part as its README has it."""
  (text,) = _between(name).findall((ROOT / PARTS[name][0]).read_text())
  return text.strip()


def main() -> None:
  """Writes every part into its README."""
  for name, (file, make) in PARTS.items():
    path, text = ROOT / file, f'\n{make().strip()}\n\n'
    path.write_text(
      _between(name).sub(lambda _, text=text: text, path.read_text(), count=1)
    )


if __name__ == '__main__':
  main()
