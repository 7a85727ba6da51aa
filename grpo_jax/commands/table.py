"""The commands: what runs each, what it does, and which flags it reads."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import os
import sys
from typing import Any
from typing import NamedTuple

from grpo_jax.commands import arguments
from grpo_jax.commands import refusals
from grpo_jax.commands.flag_definitions import CONFIG as _CONFIG
from grpo_jax.commands.flag_definitions import FLAGS as _FLAGS
from grpo_jax.config import plain_text
from grpo_jax.hosts import stop_signal
from grpo_jax.lab import studies
from grpo_jax.run.keep import host_memory

STOP = stop_signal.Stop()
"""One for the process: `main.run` installs its handlers before the flags are
read."""

SET_LATER: list[str] = []
"""What was typed for fields that are set after absl has read the config."""


def train() -> int:
  """`grpo-jax train`; returns the exit code."""
  from grpo_jax import monitor

  config = _config()
  steps = _step_range(_value('profile_steps'), config.steps)
  if _value('check'):
    with _together() as peers:
      _check(config, peers.is_first)
    return 0
  is_first = _join()
  screen = monitor.start if is_first else monitor.quiet
  with screen(config, _value('workdir')) as screen:
    with screen.phase('loading JAX'):  # only now: it takes seconds
      from grpo_jax.run import loop
    result = loop.train(
      config, _value('workdir'), STOP, _value('replay'), steps, screen=screen
    )
  if not is_first:
    return _code()
  result = {**result, 'peak_memory_gib': host_memory.peak_gib()}
  _print_json(
    {
      name: value if value is None else round(value, 4)
      for name, value in result.items()
    }
  )
  return _code()


def _code() -> int:
  return 0 if STOP.signal is None else 128 + STOP.signal


def _join(**options: Any) -> bool:
  """Joins the other processes, if there are any; whether this is the first."""
  from grpo_jax.hosts import joining

  is_first = joining.initialize(
    _value('coordinator'),
    _value('num_processes'),
    _value('process_id'),
    **options,
  )
  if joining.are_joined():
    refusals.keep_stdout()
  return is_first


def _check(config: Any, is_first: bool) -> None:
  """`grpo-jax train --check`."""
  from grpo_jax import monitor

  start = monitor.start if is_first else monitor.quiet
  with start(config, _value('workdir')) as screen:
    with screen.phase('loading JAX'):
      from grpo_jax.commands import dry_run
    with screen.phase('building, sampling and compiling, without training'):
      report = dry_run.inspect(config, _value('workdir'))
  (_print_json if _value('json') else dry_run.show)(report)


@contextlib.contextmanager
def _together(**options: Any) -> Iterator[Any]:
  """The processes that run this command; the first alone prints.

  Args:
    **options: Of `joining.initialize`.
  """
  _join(**options)
  from grpo_jax.hosts import joining

  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(joining.joined())
    peers.pass_on(STOP)
    typed = [x for x in sys.argv[1:] if not x.startswith('--process_id')]
    peers.check_equal({'the command': typed})
    if not peers.is_first:
      nowhere = stack.enter_context(open(os.devnull, 'w'))
      stack.enter_context(contextlib.redirect_stdout(nowhere))
    yield peers


def evaluate() -> None:
  """`grpo-jax eval`."""
  with _together() as peers:
    from grpo_jax.commands import eval_and_sample as policies
    from grpo_jax.run import judging

    policy = policies.load(
      _config(),
      _value('workdir'),
      _value('checkpoint'),
      to_evaluate=True,
      peers=peers,
    )
    summary = policies.evaluate(
      policy,
      examples=_value('examples'),
      samples=_value('samples'),
      ks=[_whole('k', k) for k in _value('k')],
      temperature=_value('temperature'),
      max_tokens=_value('max_tokens'),
      completions=_value('completions') if peers.is_first else None,
      judging=judging.shared(peers, STOP),
    )
    if _value('json'):
      _print_json(summary)
    else:
      policies.show(summary)


def sample() -> None:
  """`grpo-jax sample`."""
  with _together() as peers:
    from grpo_jax.commands import eval_and_sample as policies

    policy = policies.load(
      _config(), _value('workdir'), _value('checkpoint'), peers=peers
    )
    prompts = policies.prompts(_value('prompt'), _value('prompts'))
    policies.sample(
      policy,
      peers.all_from_first(prompts),
      number=_value('number'),
      temperature=_value('temperature'),
      max_tokens=_value('max_tokens'),
      write=_print_json if _value('json') else None,
    )


def convert() -> None:
  """`grpo-jax convert`."""
  from grpo_jax.commands import convert as converts

  done = converts.convert(
    _value('source'),
    _value('folder'),
    _value('checkpoint'),
    _value('dtype'),
    _value('shard_gb'),
    _value('adapter'),
  )
  if _value('json'):
    _print_json(done._asdict())
  else:
    converts.show(done)


def methods() -> None:
  """`grpo-jax methods`."""
  from grpo_jax.commands import audit as audits

  table = audits.table(audits.every())
  if _value('json'):
    _print_json(table)
  else:
    audits.show_table(table, _value('wide'))


def audit() -> None:
  """`grpo-jax audit`."""
  from grpo_jax.commands import audit as audits

  name = _value('method')
  result = audits.of(name, _value('method_kwargs'), _value('fields'))
  figure = audits.figure(name, result) if _value('plot') else None
  if _value('json'):
    _print_json(audits.to_json(name, result, figure))
  else:
    audits.show(name, result, figure)


def study() -> None:
  """`grpo-jax study`."""
  if studies.is_experiment(_value('study')):
    from grpo_jax.commands import claims

    given = _value('study'), _value('out'), _value('full')
    results = claims.run(*given)
    if _value('json'):
      _print_json(claims.to_json(results))
    else:
      claims.show(results, _value('out'))
    return
  named = studies.named(_value('study'))
  summary = named.run(
    _config(),
    _value('workdir'),
    seeds=_value('seeds'),
    steps=_value('steps'),
    only=_value('only'),
  )
  if _value('json'):
    _print_json(named.to_json(summary))
  else:
    named.show(summary)


def report() -> None:
  """`grpo-jax report`."""
  from grpo_jax.commands import report as reports

  given = [_value('workdir'), *_value('run')]
  out = _value('out')
  made = reports.write(given, 'report.html' if out is None else out)
  if _value('json'):
    _print_json(made)
  else:
    reports.show(made)


def doctor() -> int:
  """`grpo-jax doctor`."""
  from grpo_jax.planning import accelerators

  found = accelerators.look()  # before JAX holds the memory of the devices
  # Where a check fails, a launcher must not start the doctor again.
  with _together(late_code=2) as peers:
    from grpo_jax.commands import doctor as doctors

    given = _value('workdir'), _value('json'), _value('verbose')
    return doctors.run(peers, *given, found)


def plan() -> None:
  """`grpo-jax plan`."""
  from grpo_jax.commands import plan as plans

  given = {name: _value(name) for name in COMMANDS['plan'].flags[1:]}
  plans.run(_config, given, _print_json if _value('json') else None)


def show_data() -> None:
  """`grpo-jax data`."""
  if _CONFIG.value is None:
    raise ValueError(
      'data needs a config, as in data --config=configs/arithmetic.py.'
    )
  from grpo_jax.commands import show_data as shows

  write = _print_json if _value('json') else None
  shows.run(_config(), _value('show'), _value('records'), write)


class Command(NamedTuple):
  """One command: what runs it, what it does, and the flags that it reads."""

  run: Callable[[], int | None]  # returns the exit code; None is 0
  what: str
  flags: tuple[str, ...]
  takes: tuple[str, ...] = ()  # whose values need no name; see `prepared`


_SEVERAL = 'coordinator', 'num_processes', 'process_id'
COMMANDS = {
  'train': Command(
    train,
    'Trains a model, or continues a run; prints one JSON line at the end.',
    (
      'config', 'workdir', 'check', 'replay', 'profile_steps', *_SEVERAL,
      'json', 'verbose',
    ),
  ),
  'eval': Command(
    evaluate,
    'Measures pass@k, majority@k and lengths on held-out problems.',
    (
      'workdir', 'config', 'checkpoint', 'examples', 'samples', 'k',
      'temperature', 'max_tokens', 'completions', *_SEVERAL, 'json', 'verbose',
    ),
  ),
  'convert': Command(
    convert,
    'Writes a model as a Hugging Face folder, or its adapter for peft.',
    (
      'source', 'folder', 'checkpoint', 'adapter', 'dtype', 'shard_gb', 'json',
      'verbose',
    ),
    takes=('source', 'folder'),
  ),
  'methods': Command(
    methods,
    'Prints a table of all methods, measured by evaluating each of them.',
    ('wide', 'json', 'verbose'),
  ),
  'audit': Command(
    audit,
    'Measures what a method does to gradients and to clipped tokens.',
    ('method', 'method_kwargs', 'fields', 'plot', 'json', 'verbose'),
    takes=('method',),
  ),
  'sample': Command(
    sample,
    'Completes given prompts, and writes tokens as they come.',
    (
      'workdir', 'config', 'checkpoint', 'prompt', 'prompts', 'number',
      'temperature', 'max_tokens', *_SEVERAL, 'json', 'verbose',
    ),
  ),
  'data': Command(
    show_data,
    'Shows prompts as the model reads them, their lengths, and duplicates.',
    ('config', 'show', 'records', 'json', 'verbose'),
  ),
  'plan': Command(
    plan,
    'Tells what a run would need on machines that are not there.',
    (
      'config', 'topology', 'num_slices', 'mesh', 'estimate', 'search', 'price',
      'against', 'json', 'verbose',
    ),
  ),
  'doctor': Command(
    doctor,
    'Measures new machines: devices, memory, links, workdir. Run it first.',
    ('workdir', *_SEVERAL, 'json', 'verbose'),
  ),
  'report': Command(
    report,
    'Writes one HTML page about a run, or about several beside each other.',
    ('workdir', 'run', 'out', 'json', 'verbose'),
    takes=('workdir', '*run'),
  ),
  'study': Command(
    study,
    'Compares runs that differ in one thing, or tests claims of two papers.',
    (
      'study', 'workdir', 'config', 'seeds', 'steps', 'only', 'out', 'full',
      'json', 'verbose',
    ),
    takes=('study',),
  ),
}  # fmt: skip


_OF_EXPERIMENTS = 'out', 'full'
_OF_TRAINING = 'workdir', 'config', 'seeds', 'steps', 'only'


def read_by_study(argv: Sequence[str]) -> tuple[str, ...]:
  """The flags that the study of a command line reads.

  Args:
    argv: What `arguments.prepared` returned.

  Raises:
    ValueError: There is no such study.
  """
  every, start = COMMANDS['study'].flags, '--study='
  name = next((x.removeprefix(start) for x in argv if x.startswith(start)), '')
  if not name:
    return every
  others = _OF_TRAINING if studies.is_experiment(name) else _OF_EXPERIMENTS
  return tuple(flag for flag in every if flag not in others)


def _value(name: str) -> Any:
  return _FLAGS[name].value


def _print_json(values: Any) -> None:
  print(json.dumps(values), flush=True)


def _config():
  """The config of the flags, checked."""
  from grpo_jax import config

  values = _CONFIG.value
  if not hasattr(values, 'to_dict'):
    raise ValueError(
      f'get_config returned {values!r:.80}, which is no ConfigDict; return '
      'grpo_jax.config.default() with your changes.'
    )
  tree = values.to_dict()
  if warning := arguments.set_fields(tree, SET_LATER):
    print(f'warning: {plain_text.printable(warning)}', file=sys.stderr)
  return config.dataclass_from_dict(config.Config, tree, 'config')


def _whole(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise ValueError(
      f'--{name} has {text!r}; give whole numbers, separated by commas.'
    ) from error


def _step_range(given: list[str], last: int) -> tuple[int, int]:
  """First and last step of a run that has `last`; (0, 0) for none."""
  if not given:
    return 0, 0
  steps = [_whole('profile_steps', step) for step in given]
  if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
    raise ValueError(
      f'--profile_steps={",".join(given)} is no range; give the first and the '
      'last rollout, as in --profile_steps=3,5.'
    )
  if steps[0] > last:
    raise ValueError(
      f'--profile_steps={",".join(given)} begins behind the last rollout '
      f'(config.steps={last}); give earlier ones.'
    )
  return steps[0], steps[1]
