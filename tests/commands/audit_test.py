"""`grpo-jax audit` and `grpo-jax methods`: names in, tables out."""

import functools
import json

import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.commands import audit as audit_lib
from grpo_jax.lab import audits
from tests import cli
from tests import readmes


@functools.cache
def grpo():
  return diagnostics.audit(losses.methods.grpo())


def test_arguments_reach_the_method():
  audit = audits.audit('dapo', "{'high': 0.4}")
  assert audit.clipping.text.startswith('zero above 1.4 for A > 0')


def test_a_users_method_and_its_fields():
  audit = audits.audit(
    'tests.diagnostics.audit_test:dated',
    '{"strength": 1.0}',
    'tests.diagnostics.audit_test:late',
  )
  assert audit.row.advantage.startswith('per token')


@pytest.mark.parametrize(
  'name, kwargs, said',
  [
    ('gsppo', '{}', "--method='gsppo' is no method; did you mean gspo"),
    ('dapo', '{', '--method_kwargs={ is no dict'),
    ('dapo', '{1: 2}', 'is no dict'),
    ('dapo', "{'hig': 1}", "--method_kwargs={'hig': 1} do not fit dapo"),
    ('tests.bad_methods:nothing', '{}', 'cannot be imported'),
    ('json:dumps', "{'obj': 1}", 'no LossTransform'),
  ],
)
def test_what_cannot_be_audited(name, kwargs, said):
  with pytest.raises(ValueError) as error:
    audits.audit(name, kwargs)
  assert said in str(error.value)


def test_what_a_person_sees(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '110')
  audit_lib.show('grpo', grpo(), 'audit-grpo.png')
  seen = capsys.readouterr().out
  assert max(map(len, seen.splitlines())) <= 110
  for text in ('(r - mean)/std', 'audit-grpo.png', 'always 0 at ratio 1'):
    assert text in seen


def test_the_table_as_a_person_and_as_a_readme_sees_it(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '150')
  rows = [{'method': 'grpo', **diagnostics.cells(grpo())}]
  audit_lib.show_table(rows, wide=True)
  seen = capsys.readouterr().out
  assert '(r - mean)/std' in seen and 'W_agg: sum of the' in seen
  assert all(name in seen for name in diagnostics.COLUMNS)
  head, line, row, *_ = readmes.methods(rows).splitlines()
  assert head.count('|') == line.count('|') == row.count('|') == 11
  rows[0]['ratio'] = '|s|'
  assert '&#124;s&#124;' in readmes.methods(rows)


def test_eighty_columns_hold_a_method_and_the_table_of_all(capsys, monkeypatch):
  """Every row of the table is one line; nothing is padded, as a pipe has it."""
  monkeypatch.delenv('COLUMNS', raising=False)
  longest = max(losses.methods.__all__, key=len)
  cells = diagnostics.cells(diagnostics.audit(losses.methods.vespo()))
  audit_lib.show_table([{'method': longest, **cells}])
  audit_lib.show(longest, grpo())
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) <= 80
  assert all(line == line.rstrip() for line in lines)
  text = '\n'.join(lines)
  assert '--wide' in text and 'zero gradient' not in text


def test_the_command(tmp_path):
  done = cli.call('audit', 'dr_grpo', '--json', '--plot', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['method'] == 'dr_grpo'
  assert found['row']['weight'] == '1/(3000 B)'
  assert (tmp_path / found['figure']).exists()


@pytest.mark.parametrize(
  'given, said',
  [
    ((), 'grpo-jax: audit needs a method. As in:'),
    (('dapo', 'gspo'), 'got gspo, which it does not read'),
    (('dapo', '--samples=3'), 'got --samples, which it does not read'),
    (('no.such:thing',), "--method='no.such:thing' cannot be imported"),
  ],
)
def test_bad_input(given, said):
  cli.assert_refused(cli.call('audit', *given), said)
