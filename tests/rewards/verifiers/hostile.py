"""Completions that are written to break a verifier, or to fool it."""

import sys

MANY = 1_000_000
DEEP = 5_000

# What is repeated a million times, or nested 5,000 deep.
_REPEATED = [
  '{', '}', '{}', '}{', '\\', '\\{', '$', '$ ', '#', '#### ', '9', '9,', '.',
  '1.', '-', '--1', '1/', '1e', '%', ' ', '\n', '\t', '\0', '\ud800', 'é',
  '\u202e', '\U0001f600', 'a', 'A', 'A ', '(', ')', '(A', '[', '"', '{"a":',
  '```\n', '```x\n', '<', '<think>', '</think>', '<think></think>', 'answer',
  'answer is ', 'answer: A or ', '\\boxed', '\\boxed{', '\\boxed{}', '^', '**',
  '!', '9^', '9**', '=', '1=', ',', '1,2;', '&', '\\\\', '\\frac', '\\frac{',
  '\\sqrt', '\\left(', '\\begin{pmatrix}', '\\text{', '\u2212', '\u0663', '1 ',
]  # fmt: skip
_NESTED = [
  ('\\frac{', '}{2}'), ('\\sqrt{', '}'), ('{', '}'), ('(', ')'), ('[', ']'),
  ('{"a":', '}'), ('2^{', '}'), ('\\boxed{', '}'), ('|', '|'), ('-(', ')'),
  ('<think>', '</think>'), ('\\text{', '}'), ('\\left(', '\\right)'),
]  # fmt: skip
_SHORT = [
  '', ' ', '\0', '\ud800', '\x7f\x80\xff', '\ufeff5', '\r', 'nan', 'inf',
  '-inf', 'NaN', 'Infinity', '-', '.', ',', '/', '1/0', '0/0', '1e400',
  '1e-99999', '-0', '9**9**9**9', '9^9^9^9', '9^{9^{9^{9}}}', '(9^9)!',
  '2^{999999999}', '99999!', '9!!!!!!', '((9!)!)!', '10^{10^{10^{10}}}', '5^',
  '\\frac{1}{0}', '\\frac', '\\frac{1}', '\\sqrt[]{}', '\\binom{}{}', '\\int',
  '\\begin{pmatrix}', '\\begin{pmatrix}1&2\\\\3\\end{pmatrix}', '\\boxed',
  '\\boxed{', '\\boxed{}', '\\boxed{}}', '}\\boxed{5', '$$', '$', '\\', '\\\\',
  '{1,2', '(1,2', '[2,1]', '(2,1)', '1<x>2', 'x=x=x', '=', '5=6', '__import__',
  '__import__("os").system("false")', 'exec("1/0")', 'lambda: 0', '%s%n', '{0}',
  '\\N{BULLET}', '\\1', '(?R)', '*', '+', '[a', '####', '#### #', '{"$ref": 1}',
  '[1e999]', '{"a": 1, "a": 2}', '-Infinity', '"\\ud800"', '\u0665',
  '<think></answer>', '</think>', '<think>\n<answer>', 'Answer:', 'answer is',
]  # fmt: skip

assert sys.getrecursionlimit() < DEEP

LARGE = {
  **{
    f'{text!r} {MANY:,} long': text * (MANY // len(text)) for text in _REPEATED
  },
  **{
    f'{start!r} {DEEP:,} deep': start * DEEP + '5' + end * DEEP
    for start, end in _NESTED
  },
}
SMALL = {f'{text!r}': text for text in _SHORT}
ALL = LARGE | SMALL
