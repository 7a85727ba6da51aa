"""Answers to the tasks of reasoning-gym, judged by reasoning-gym itself."""

import ast
import functools
import json
import re
import sys
from typing import Any

from grpo_jax.rewards import _base
from grpo_jax.rewards import sandbox
from grpo_jax.rewards.verifiers import _shared

# Their verifiers call `eval` on the answer. What they mean to read are lists
# and texts, for which `literal_eval` is enough.
_EVALUATE = ('binary_matrix', 'n_queens', 'spiral_matrix', 'string_insertion')
# Others hand it to sympy, which calls `eval` too. Here, whether what they mean
# to read is algebra or only numbers with + - * /.
_ALGEBRA = {
  'countdown': False,
  'intermediate_integration': True,
  'polynomial_multiplication': True,
  'puzzle24': False,
  'simple_integration': True,
}
_ARITHMETIC = ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub
_CALLED = frozenset(
  'sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh atanh'
  ' exp log ln sqrt Abs'.split()
)
# Any other letter is a variable to sympy; these are objects of its own.
_NO_VARIABLES = frozenset('INOQS')
_AROUND = ast.Expression, ast.operator, ast.unaryop, ast.Load


def _rewrite(text: str, algebra: bool) -> str | None:
  """An expression written anew, so that nothing but the expression is left.

  `sympy.parse_expr` evaluates a text as Python does, so it must be given no
  other. A comment, which a verifier might read numbers from, is dropped.

  >>> _rewrite('(8 - 2) * 4  # 1 1', algebra=False)
  '(8 - 2) * 4'
  >>> _rewrite('x**2/2 + C', algebra=True)
  'x ** 2 / 2 + C'
  >>> _rewrite('__import__("os").getpid()', algebra=True)

  Args:
    text: What a model wrote.
    algebra: Whether powers, decimal fractions, variables of one letter, pi and
      functions of one number are allowed too.

  Returns:
    The expression; None if the text is anything else.
  """
  try:
    tree = ast.parse(text.strip(), mode='eval')
    if all(_is_allowed(node, algebra) for node in ast.walk(tree)):
      return ast.unparse(tree)
  # Thousands of brackets raise the last two.
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    pass
  return None


def _is_allowed(node: ast.AST, algebra: bool) -> bool:
  match node:
    case ast.Constant():
      return type(node.value) is int or (algebra and type(node.value) is float)
    case ast.BinOp() | ast.UnaryOp():
      powers = algebra and isinstance(node.op, ast.Pow)
      return powers or isinstance(node.op, _ARITHMETIC)
    case ast.Call(func=ast.Name(), args=[_], keywords=[]):
      return algebra
    case ast.Name():
      variable = len(node.id) == 1 and node.id not in _NO_VARIABLES
      return algebra and (variable or node.id == 'pi' or node.id in _CALLED)
  return isinstance(node, _AROUND)


def prepare(example: dict[str, Any]) -> None:
  """Imports the package, and makes the task of an example ready to judge."""
  made = _made(example)
  _task(made['task'], json.dumps(made['parameters'], sort_keys=True))


def _check(tag: str | None = 'answer', require_tag: bool = False) -> None:
  named = isinstance(tag, str) and re.fullmatch(r'[\w-]+', tag)
  if not named and (tag is not None or require_tag):
    raise ValueError(
      f'The reward reasoning_gym has tag={tag!r} and require_tag={require_tag},'
      " but the name of a tag is required, as in tag='answer', or tag=None"
      ' without require_tag.'
    )
  if reason := sandbox.refusal('landlock'):
    raise ValueError(
      'The reward reasoning_gym would run what a model writes, and this system'
      f' does not offer Landlock to confine it ({reason}); use a Linux kernel'
      ' of 5.13 or newer that has it switched on.'
    )


@_base.checked(_check)
@_base.confined(prepare=prepare, bounds=(0.0, 1.0))
def reasoning_gym(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  tag: str | None = 'answer',
  require_tag: bool = False,
) -> float:
  """What the verifier of the task gives for the answer, from 0 to 1.

  The answer is the text between the last <answer> and </answer>, without white
  space at both ends; if there is no such pair, it is the whole completion.
  The last 100,000 characters are read. An empty answer is worth 0.

  Many tasks give parts of a reward, such as for an answer that has the right
  one in it: `evaluation.right_reward` says what counts as right.

  Some verifiers of the package evaluate the answer as a program. Here they get
  lists, texts and arithmetic alone; an expression of another kind, such as an
  unevaluated `Integral(...)`, is worth 0. Some never end on an answer such as
  9**9**9**9. So this function runs only in workers, where each call has a
  confined process and a time limit. An answer on which the verifier raises an
  error, or gives a number outside 0 to 1, has failed there, as one that takes
  too long.

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: a record of the source 'reasoning_gym:TASK'.
    tag: the name of the tags, without angle brackets; None to take the whole
      completion always.
    require_tag: whether a completion without tags has reward 0.

  Returns:
    The score.

  Raises:
    ValueError: it is called in the process of the trainer; or reasoning-gym is
      not installed, or the record is of another source.
  """
  del prompt
  if not _base.is_confined:
    raise ValueError(
      'The reward reasoning_gym judges in confined workers only, because some'
      ' of its verifiers run what a model writes, and it was called in the'
      ' process of the trainer; let it run in workers.'
    )
  made = _made(example)
  task = _task(made['task'], json.dumps(made['parameters'], sort_keys=True))
  answer = _answer(_shared.end_of(completion), tag, require_tag)
  if made['task'] in _ALGEBRA:
    answer = _rewrite(answer, _ALGEBRA[made['task']])
  if not answer:
    return 0.0
  entry = {
    'question': example.get('prompt'),
    'answer': example['answer'],
    'metadata': made['metadata'],
  }
  return float(task.score_answer(answer, entry))


def _made(example: dict[str, Any]) -> dict[str, Any]:
  made = example.get('reasoning_gym')
  if made is None:
    raise ValueError(
      "reasoning_gym requires the field 'reasoning_gym', but the example has"
      f' the fields {sorted(example)}; use it with a source whose name begins'
      " with 'reasoning_gym:'."
    )
  return made


def _answer(text: str, tag: str | None, require_tag: bool) -> str:
  if tag is not None:
    start, end = f'<{tag}>', f'</{tag}>'
    last = text.rfind(end)
    first = text.rfind(start, 0, max(last, 0))
    if first >= 0:
      return text[first + len(start) : last].strip()
    if require_tag:
      return ''
  return text.strip()


@functools.lru_cache(maxsize=64)
def _task(name: str, parameters: str) -> Any:
  """A task of the package, whose verifier may depend on its parameters."""
  try:
    import reasoning_gym as library
  except ImportError as error:
    raise ValueError(
      'The reward reasoning_gym requires the package reasoning-gym, which is'
      " not installed; run pip install 'grpo_jax[reasoning-gym]'."
    ) from error
  task = library.create_dataset(name, seed=0, size=1, **json.loads(parameters))
  if name in _EVALUATE:
    vars(sys.modules[type(task).__module__])['eval'] = ast.literal_eval
  return task
