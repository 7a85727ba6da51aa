"""The changes that make mutants: what in a file is changed, and into what."""

import ast
from collections.abc import Iterator
import itertools
from typing import NamedTuple

_OPERATORS = {
  'Gt': 'Lt GtE', 'GtE': 'Lt Gt', 'Lt': 'Gt LtE', 'LtE': 'Gt Lt',
  'Eq': 'NotEq', 'NotEq': 'Eq', 'Is': 'IsNot', 'IsNot': 'Is',
  'In': 'NotIn', 'NotIn': 'In', 'Add': 'Sub', 'Sub': 'Add', 'Mult': 'Div',
  'Div': 'Mult', 'BitAnd': 'BitOr', 'BitOr': 'BitAnd', 'And': 'Or', 'Or': 'And',
}  # fmt: skip
_NAMES = dict(minimum='maximum', min='max', argmin='argmax', any='all')
_TEXTS = dict(population='sample', k2='k3', row='batch', constant='linear')
for _swaps in (_NAMES, _TEXTS):
  _swaps |= {new: old for old, new in _swaps.items()}


def _others(operator):
  names = _OPERATORS.get(type(operator).__name__, '').split()
  return [getattr(ast, name)() for name in names]


def replacements(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
  """Yields what may stand in a node's place, and what to call the change."""
  match node:
    case ast.Compare(left, operators, rest):
      for place, operator in enumerate(operators):
        for other in _others(operator):
          new = [*operators[:place], other, *operators[place + 1 :]]
          yield ast.Compare(left, new, rest), ''
    case ast.BinOp(left, operator, right):
      for other in _others(operator):
        yield ast.BinOp(left, other, right), ''
      if isinstance(operator, ast.Mult | ast.Div | ast.BitAnd):
        yield left, ''
      if isinstance(operator, ast.Mult | ast.BitAnd):
        yield right, ''
    case ast.BoolOp(operator, values):
      for other in _others(operator):
        yield ast.BoolOp(other, values), f'to {type(other).__name__}'
    case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand):
      yield operand, ''
    case ast.keyword('axis', ast.Constant(int()) | ast.UnaryOp() as axis):
      other = 1 if ast.unparse(axis) == '0' else 0
      yield ast.keyword('axis', ast.Constant(other)), ''
    case ast.Constant(bool(value)):
      yield ast.Constant(not value), ''
    case ast.Constant(int(value) | float(value)):
      moved = float(f'{1.5 * value:.6g}') if value % 1 else value + 1
      if moved != value:  # as of 1e30
        yield ast.Constant({0: 1, 1: 0}.get(value, moved)), ''
    case ast.Constant(str(value)) if value in _TEXTS:
      yield ast.Constant(_TEXTS[value]), ''
    case ast.Attribute(value, name) if name in _NAMES:
      yield ast.Attribute(value, _NAMES[name], node.ctx), ''
    case ast.Name(name) if name in _NAMES:
      yield ast.Name(_NAMES[name], node.ctx), ''
    case ast.Call(ast.Attribute(_, 'stop_gradient'), [argument]):
      yield argument, ''
    case ast.Call(ast.Attribute(_, 'where'), [condition, one, other]):
      new = ast.Call(node.func, [condition, other, one], node.keywords)
      yield new, 'branches swapped'
    case ast.Call(ast.Name('chain'), [_, _, *_] as links):
      for place, link in enumerate(links):
        rest = [*links[:place], *links[place + 1 :]]
        yield ast.Call(node.func, rest, []), f'without {_short(link)}'
    case ast.If(test, body, orelse) | ast.IfExp(test, body, orelse):
      if not isinstance(test, ast.Compare | ast.UnaryOp):  # have their own
        new = type(node)(ast.UnaryOp(ast.Not(), test), body, orelse)
        yield new, f'not ({_short(test)})'


def _short(node):
  text = ' '.join(ast.unparse(node).split())
  return text if len(text) <= 40 else f'{text[:20]}...{text[-17:]}'


def _children(node):
  """(key, child): what may be mutated in `node`, and its field or place."""
  for field, value in ast.iter_fields(node):
    if field in ('annotation', 'returns', 'decorator_list'):
      continue
    if isinstance(value, list):
      yield from enumerate(value)
    else:
      yield field, value


def _is_skipped(parent, key, child):
  match parent, child:
    case _, ast.Import() | ast.ImportFrom() | ast.Raise() | ast.JoinedStr():
      return True
    case (_, ast.Assert()) | (ast.Expr(), ast.Constant()):  # a docstring
      return True
    case _, ast.Assign([ast.Name('__all__')]):
      return True
    case ast.Module(), ast.Assign(value=ast.BinOp(op=ast.BitOr())):  # a type
      return True
    case ast.Call(ast.Name('isinstance')), _:
      return key == 1
  return not isinstance(child, ast.AST)


def _in_place(node, newlines):
  """A node's source, to stand where any node with that many newlines stood."""
  text = ast.unparse(node)
  if not newlines and isinstance(node, ast.Constant | ast.Name | ast.keyword):
    return text  # `-1` in a pattern and `axis=0` may have no parentheses
  return f'({text}' + '\n' * newlines + ')'


class Mutant(NamedTuple):
  """One change of one file."""

  path: str  # relative to the root
  lineno: int
  key: tuple[str, str, str]  # of `EQUIVALENT`; outlives edits elsewhere
  reach: range  # the lines that run when the change matters; empty: unknown
  edit: tuple[int, int, bytes]  # first byte, byte after the last, new text

  def applied(self, text: str) -> str:
    """The file's text with the change; the other lines keep their numbers."""
    start, end, new = self.edit
    return (text.encode()[:start] + new + text.encode()[end:]).decode()


def mutants(path: str, text: str) -> list[Mutant]:
  """Every mutant of a file."""
  tree, lines, made = ast.parse(text), text.splitlines(), {}
  starts = [0, *itertools.accumulate(map(len, text.encode().split(b'\n')))]

  def place(lineno, column):
    return starts[lineno - 1] + lineno - 1 + column

  def add(old, new, change, function, reach):
    change = change or f'{_short(old)} -> {_short(new)}'
    where = f'{path.removeprefix("grpo_jax/")}:{function}'
    for number in itertools.count(1):  # alike changes of one line
      name = f'{change} #{number}' if number > 1 else change
      key = where, lines[old.lineno - 1].strip(), name
      if key not in made:
        break
    gone, put = old, new
    if isinstance(old, ast.If | ast.IfExp):  # only its test is another one
      gone, put = old.test, new.test
    start = place(gone.lineno, gone.col_offset)
    end = place(gone.end_lineno, gone.end_col_offset)
    newlines = text.encode()[start:end].count(b'\n')
    edit = start, end, _in_place(put, newlines).encode()
    made[key] = Mutant(path, old.lineno, key, reach, edit)

  def visit(parent, function, reach):
    for key, child in _children(parent):
      if _is_skipped(parent, key, child):
        continue
      inner, inside = function, reach
      if isinstance(child, ast.FunctionDef | ast.ClassDef):
        inner = f'{function}.{child.name}'.lstrip('.')
        inside = range(child.body[0].lineno, child.end_lineno + 1)
      elif isinstance(child, ast.arguments):
        inside = range(0)  # a default may be read without a call
      elif isinstance(child, ast.stmt):
        header = getattr(child, 'test', child)
        inside = range(child.lineno, header.end_lineno + 1)
      for new, change in replacements(child):
        add(child, new, change, inner, inside)
      if not (isinstance(child, ast.keyword) and child.arg == 'axis'):
        visit(child, inner, inside)

  visit(tree, '', range(0))
  return list(made.values())
