"""`grpo-jax eval` and `grpo-jax sample`: a policy, evaluated or sampled."""

from collections.abc import Iterator
import contextlib
import sys
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands import together
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run import judging
from grpo_jax.run import policy as policies


def run_eval(arguments: Arguments) -> None:
  """`grpo-jax eval`."""
  with together.joined(arguments) as peers:
    policy = policies.load(
      arguments.config,
      arguments.workdir,
      arguments.checkpoint,
      to_evaluate=True,
      peers=peers,
      stop=together.STOP,
    )
    summary = policies.evaluate(
      policy,
      examples=arguments.examples,
      samples=arguments.samples,
      ks=list(arguments.k),
      temperature=arguments.temperature,
      max_tokens=arguments.max_tokens,
      completions=arguments.completions if peers.is_first else None,
      judging=judging.shared(peers, together.STOP),
    )
    printing.show_json(summary) if arguments.json else show(summary)


def show(summary: dict[str, Any]) -> None:
  """Prints what `policy.evaluate` returned as a table of at most 60 columns."""
  from rich import table

  shown = table.Table(
    title=f'{summary["examples"]:,} prompts, '
    f'{summary["samples_per_prompt"]:,} completions each'
  )
  shown.add_column('')
  for name in ('value', '95 % interval'):
    shown.add_column(name, justify='right')
  for name, value in summary.items():
    if name in ('examples', 'samples_per_prompt') or name.endswith('_interval'):
      continue
    shown.add_row(
      'mean first reward' if name == 'mean' else name.replace('_', ' '),
      _text(value),
      ' to '.join(map(_text, summary.get(f'{name}_interval') or ())),
    )
  printing.show(shown)


def _text(value: float | None) -> str:
  if value is None:
    return '-'
  if isinstance(value, int):
    return f'{value:,}'
  return f'{value:.3f}' if abs(value) < 10 else f'{value:,.1f}'


def run_sample(arguments: Arguments) -> None:
  """`grpo-jax sample`."""
  with together.joined(arguments) as peers:
    policy = policies.load(
      arguments.config,
      arguments.workdir,
      arguments.checkpoint,
      peers=peers,
      stop=together.STOP,
    )
    typed = prompts(arguments.prompt, arguments.prompts)
    write(
      policy,
      peers.all_from_first(typed),
      arguments.number,
      arguments.temperature,
      arguments.max_tokens,
      arguments.json,
    )


def write(
  policy: policies.Policy,
  typed: Any,
  number: int = 1,
  temperature: float | None = None,
  max_tokens: int | None = None,
  as_json: bool = False,
) -> None:
  """Prints completions of prompts; a single one of each as it is drawn."""
  limits = temperature, max_tokens
  if number == 1 and not as_json:
    for piece in policies.stream(policy, typed, *limits):
      printing.say(piece, end='')
    return
  shown = policy.run.tokenizer.prompt_format.shown
  for one in policies.sample(policy, typed, number, *limits):
    if as_json:
      printing.show_json(one)
    elif 'messages' in one:
      printing.say(policies.transcript(one))
    else:
      printing.say(shown(one['prompt']) + one['completion'])


def prompts(typed: list[str], file: str | None) -> Iterator[str]:
  """Prompts from flags, then from the lines of a file.

  Args:
    typed: Prompts.
    file: A path; `'-'` is standard input, as is None if `typed` is empty.

  Yields:
    Prompts, without the end of the line; empty lines are left out.
  """
  yield from typed
  if file is None and typed:
    return
  if file in (None, '-'):
    where, opened = 'Standard input', contextlib.nullcontext(sys.stdin)
    if sys.stdin is None:  # as after `<&-` in a shell
      raise ValueError(
        'There are no prompts, because standard input is closed; give '
        '--prompt, or --prompts=FILE.'
      )
  else:
    where, opened = f'The file {file!r}', open(file, encoding='utf-8')
  with opened as lines:
    try:
      yield from (line.rstrip('\n') for line in lines if line.strip())
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{where} is not UTF-8 ({error}); save it as UTF-8.'
      ) from error
