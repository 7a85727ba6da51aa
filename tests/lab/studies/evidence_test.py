"""The numbers of an experiment as tables."""

import math

import pytest

from grpo_jax.lab import report
from grpo_jax.lab.studies import evidence


def rows_of(numbers):
  """The rows of both tables, by the names of the numbers."""
  *tables, link = evidence.parts(numbers)
  assert link == report.Link('All numbers: claims.json', 'claims.json')
  assert all(table.rows for table in tables)
  # A reader who comes from a claim sees the first.
  assert [table.folded for table in tables] == [False, True][: len(tables)]
  assert all(len(row) == len(x.head) for x in tables for row in x.rows)
  found = [row for table in tables for row in table.rows]
  assert len({name for name, *_ in found}) == len(found)
  return {name: tuple(rest) for name, *rest in found}


def test_a_few_numbers_are_shown_one_by_one():
  found = rows_of(
    {
      'value': 0.123456789,
      'text': 'as it is',
      'list': [1, 2.5, None, math.inf],
      'seeds': {'0': 1.0, '1': 2.0},
      'deep': {'a': {'x': 1.0}, 'b': [3.0], 'c': 4.0},
      'empty': [],
    }
  )
  assert found == {
    'value': ('0.123457',),
    'text': ('as it is',),
    'list': ('1, 2.5, -, -',),
    'seeds': ('0: 1, 1: 2',),
    'deep.a': ('x: 1',),
    'deep.b': ('3',),
    'deep.c': ('4',),
    'empty': ('',),
  }


def test_many_numbers_are_summed_up():
  found = rows_of(
    {
      'few': [1.0] * 12,
      'many': [1.0] * 12 + [14.0],
      'grid': [[1.0, 2.0], [3.0, math.nan]],
      'ragged': [[1.0], [2.0, 3.0], 5.0],
      'keys': {str(k): k for k in range(13)},
      'words': [['a', 'b']],
    }
  )
  assert len(found['few']) == 1
  assert found['many'] == ('13', '1', '2', '14')
  assert found['grid'] == ('2 × 2', '1', '2', '3')
  assert found['ragged'] == ('3 × 1 to 2', '1', '2.75', '5')
  assert found['keys'] == ('13', '0', '6', '12')
  assert found['words'] == ('1 × 2', '-', '-', '-')


def test_cases_alike_are_columns():
  cases = [
    {'arm': {'name': 'a'}, 'reward': 0.5, 'curve': [1.0, 2.0]},
    {'arm': {'name': 'b'}, 'reward': 1.5, 'more': 3.0},
  ]
  assert rows_of({'runs': cases}) == {
    'runs[].arm[].name': ('a, b',),
    'runs[].reward': ('0.5, 1.5',),
    'runs[].curve': ('2 × 2', '1', '1.5', '2'),
    'runs[].more': ('-, 3',),
  }


@pytest.mark.parametrize('value', [10**400, [10**400] * 20, True, 'x', {}])
def test_all_that_json_holds_can_be_shown(value):
  assert rows_of({'value': value, 'in': {'it': [value] * 2}})


def test_tables_end_and_say_so():
  several = evidence.parts({str(k): k for k in range(100)})
  (table, _) = several
  assert len(table.rows) == 80 and 'the first 80 lines' in table.title
  (table, _) = evidence.parts({str(k): k for k in range(80)})
  assert len(table.rows) == 80 and 'first' not in table.title


def test_large_numbers_have_a_mean():
  found = rows_of({'x': [1e308] * 20})
  assert found['x'] == ('20', '1e+308', '1e+308', '1e+308')
