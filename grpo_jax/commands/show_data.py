"""`grpo-jax data`: what the model will see."""

import sys
import time

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.data import survey_tables
from grpo_jax.run.build import data_survey

_SILENT_SECS = 2.0  # before a line says how far the reading is
_BEAT_SECS = 10.0  # between two such lines


def run(arguments: Arguments) -> None:
  """`grpo-jax data`.

  Raises:
    ValueError: There is no config, a number is negative, or the tokenizer or a
      source cannot be used.
  """
  if arguments.config is None:
    raise ValueError(
      'data needs a config, as in data --config=configs/arithmetic.py.'
    )
  for name, value in (('show', arguments.show), ('records', arguments.records)):
    if value < 0:
      raise ValueError(f'--{name}={value}; give 0 or more.')
  found = data_survey.survey(
    arguments.config, arguments.show, arguments.records, _Progress()
  )
  if arguments.json:
    printing.show_json(survey_tables.to_json(found))
    return
  encoding = str(getattr(sys.stdout, 'encoding', '') or '').lower()
  draws = sys.stdout.isatty() and 'utf' in encoding
  terminal = survey_tables.Terminal(max(printing.columns(), 40), draws)
  printing.show(*survey_tables.parts(found, terminal))


class _Progress:
  """Says on standard error how far the reading is, if it takes long."""

  def __init__(self):
    self._next: float | None = None

  def __call__(self, name: str, done: int, total: int) -> None:
    if self._next is None:  # what came before is no reading
      self._next = time.monotonic() + _SILENT_SECS
    if time.monotonic() < self._next:
      return
    self._next = time.monotonic() + _BEAT_SECS
    printing.say(
      f'reading {name}: {done:,} of {total:,} records', file=sys.stderr
    )
