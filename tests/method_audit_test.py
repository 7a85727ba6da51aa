"""`grpo-jax audit` and `grpo-jax methods`: names in, tables out."""

import json

import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax import method_audit
from tests import commands

GRPO = diagnostics.audit(losses.methods.grpo())


def test_arguments_reach_the_method():
  audit = method_audit.of('dapo', "{'high': 0.4}")
  assert audit.clipping.text.startswith('zero above 1.4 for A > 0')


def test_a_users_method_and_its_fields():
  audit = method_audit.of(
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
    method_audit.of(name, kwargs)
  assert said in str(error.value)


def test_what_a_person_sees(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '110')
  method_audit.show('grpo', GRPO, 'audit-grpo.png')
  seen = capsys.readouterr().out
  assert max(map(len, seen.splitlines())) <= 110
  for text in ('(r - mean)/std', 'audit-grpo.png', 'always 0 at ratio 1'):
    assert text in seen


def test_the_table_as_a_person_and_as_a_readme_sees_it(capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '150')
  rows = [{'method': 'grpo', **diagnostics.cells(GRPO)}]
  method_audit.show_table(rows)
  seen = capsys.readouterr().out
  assert '(r - mean)/std' in seen and 'W_agg: what is left' in seen
  head, line, row = method_audit.markdown(rows).splitlines()
  assert head.count('|') == line.count('|') == row.count('|') == 11
  rows[0]['ratio'] = '|s|'
  assert '&#124;s&#124;' in method_audit.markdown(rows)


def test_the_command(tmp_path):
  done = commands.command('audit', 'dr_grpo', '--json', '--plot', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['method'] == 'dr_grpo'
  assert found['row']['weight'] == '1/(3000 B)'
  assert (tmp_path / found['figure']).exists()


@pytest.mark.parametrize(
  'given, said',
  [
    ((), 'grpo-jax audit needs a method. As in:'),
    (('dapo', 'gspo'), 'got gspo, which it does not read'),
    (('dapo', '--samples=3'), 'got --samples, which it does not read'),
    (('no.such:thing',), "--method='no.such:thing' cannot be imported"),
  ],
)
def test_bad_input(given, said):
  commands.assert_refused(commands.command('audit', *given), said)
