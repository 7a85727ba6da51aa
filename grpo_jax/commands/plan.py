"""`grpo-jax plan`: what a run would need on machines that are not there."""

from collections.abc import Sequence
import dataclasses
import math
import os
import sys
import textwrap
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.config import Config
from grpo_jax.planning import against
from grpo_jax.planning import compiling
from grpo_jax.planning import division
from grpo_jax.planning import plan as plans
from grpo_jax.planning import roofline
from grpo_jax.planning import search
from grpo_jax.planning import topologies
from grpo_jax.planning.plan import Plan
from grpo_jax.planning.topologies import GIB

_RESOURCES = {
  'compute': 'compute',
  'memory': 'memory',
  'ici': 'ICI',
  'dcn': 'DCN',
}
_MOST_SHOWN = 20  # meshes of a search


def run(arguments: Arguments) -> None:
  """`grpo-jax plan`.

  Raises:
    ValueError: Flags are missing, or the run cannot be planned.
  """
  import jax

  # A machine's own TPU or GPU is left to those that train.
  jax.config.update('jax_platforms', 'cpu')
  write = printing.show_json if arguments.json else None
  if arguments.against:
    found = against.compare(arguments.against)
    write(against_json(found)) if write else show_against(found)
    return
  if not arguments.topology:
    raise ValueError(
      'plan needs --topology, as in --topology=v5p:4x4x4, or --against=WORKDIR.'
    )
  if arguments.config is None:
    raise ValueError(
      'plan needs a config, as in --config=configs/plan.py:Qwen3-30B-A3B.'
    )
  price, number = arguments.price, arguments.search
  if price is not None and not 0 <= price < math.inf:
    raise ValueError(f'--price={price} is no price; give 0 or more.')
  if number < 0:
    raise ValueError(
      f'--search={number}; give how many meshes that fit are wanted.'
    )
  config = with_mesh(arguments.config, arguments.mesh, arguments.num_slices)
  topology = topologies.named(arguments.topology, config.mesh.slices)
  reached, jobs = _reached(arguments.reached), arguments.generators
  if jobs < 0:
    raise ValueError(
      f'--generators={jobs}; give how many jobs sample, or 0 for none.'
    )
  if sum(map(bool, (arguments.split, jobs, number))) > 1:
    raise ValueError(
      '--split, --generators and --search were given together, each of which '
      'tries or plans something else; give one of them.'
    )
  if arguments.split:
    print('trying all divisions by arithmetic', file=sys.stderr, flush=True)
    found = division.divide(config, topology, reached)
    if write:
      write([division_json(one) for one in found])
    else:
      show_divisions(found, reached, topology)
    return
  if not number:
    own = plans.Jobs(jobs, topology.some(1)) if jobs else None
    made = plans.plan(config, topology, estimate=True, jobs=own)
    if not write:
      if arguments.topology != topology.name:
        printing.show(f'{arguments.topology} is {topology.name}.')
      show(made, price)
    if not arguments.estimate:
      made = plans.compiled(made, _tell, _announce)
      if not write:
        show_compiled(made, price)
    if write:
      write(to_json(made, price))
    return
  print('trying all meshes by arithmetic', file=sys.stderr, flush=True)
  ranked = search.best(config, topology, number, arguments.estimate, _tell)
  if write:
    write(
      [
        {**to_json(one.plan, price), 'flags': flags_of(one.config)}
        for one in ranked
      ]
    )
  else:
    show_ranked(ranked)
    show(ranked[0].plan, price)


def _reached(typed: str) -> division.Reached:
  """The shares of `--reached`.

  Raises:
    ValueError: They are no shares.
  """
  if not typed:
    return division.Reached()
  try:
    sampling, learning = map(float, typed.split(','))
  except ValueError:
    sampling = learning = math.nan
  if not (0 < sampling <= 1 and 0 < learning <= 1):
    raise ValueError(
      f'--reached={typed} are no two shares; give numbers up to 1, that of '
      'sampling and that of learning, as in --reached=0.5,0.4.'
    )
  return division.Reached(sampling, learning)


def division_json(one: division.Division) -> dict[str, Any]:
  """A division, for a program to read."""
  made = one.plan
  return {
    'sampling_devices': one.sampling,
    'jobs': one.jobs,
    'ahead': one.config.sampler.ahead,
    'fits': made.fits,
    'draw_secs': one.draw_secs,
    'learn_secs': one.learn_secs,
    'sync': plans.sync_json(made),
    'step_secs': one.step.secs,
    'sampling_waits_secs': one.step.sampling_waits,
    'learning_waits_secs': one.step.learning_waits,
    'flags': flags_of_division(one),
  }


def flags_of_division(one: division.Division) -> str:
  """The flags that give a run a division."""
  config = one.config
  values: dict[str, Any] = {
    'generator.devices': config.generator.devices,
    'sampler.ahead': config.sampler.ahead,
    'sampler.tensor': config.sampler.tensor,
  }
  if one.jobs:
    values['generator.listen'] = 'HOST:PORT'
    values['generator.parts'] = plans.parts_for(config, one.jobs)
  more = (f'--config.{name}={n}' for name, n in values.items())
  return ' '.join([*more, flags_of(config)])


def show_divisions(
  found: Sequence[division.Division],
  reached: division.Reached,
  topology: topologies.Topology,
) -> None:
  """Prints divisions of the devices, the best first."""
  names = 'sample', 'fits', 'step', 'waits', 'draw', 'update', 'send', 'mesh'
  title = (
    'Which devices sample, while the others learn; seconds of a step, and who '
    'waits in it for the other; those of a rollout, of its updates, and of a '
    'version on its way; the mesh of those that learn, and over how many '
    '(tensor) the others split the weights. All are bounds by arithmetic, of '
    f'which sampling is assumed to reach {reached.sampling:.0%} and learning '
    f'{reached.learning:.0%} (--reached).'
  )
  rows = [_row(one, topology) for one in found[:_MOST_SHOWN]]
  best, told = found[0], []
  turn = next((one for one in found if _in_turn(one)), None)
  if turn and turn is not best and turn.plan.fits:
    told.append(
      f'The first is {turn.step.secs / best.step.secs:.2f} times as fast as '
      'all devices in turn.'
    )
  if not best.plan.fits:
    told.append('None of them fits.')
  if why := division.indivisible(topology):
    told.append(why)
  if jobs := best.plan.jobs:
    told.append(
      f'{jobs.number} jobs sample, each on {jobs.topology.name}: start each '
      'with grpo-jax generate --learner=HOST:PORT.'
    )
  shown = printing.tables([*names, 'tensor'], rows, title)
  printing.show(*shown, *told, f'The first with {flags_of_division(best)}')


def _in_turn(one: division.Division) -> bool:
  return not one.sampling and not one.config.sampler.ahead


def _row(one: division.Division, topology: topologies.Topology) -> list[str]:
  """What is shown of a division."""
  made, sync = one.plan, one.plan.sync
  who = f'{one.sampling} of {topology.number}'
  if one.jobs:
    who = f'{one.jobs} x {one.sampling // one.jobs} of {topology.number}'
  elif not one.sampling:
    how = 'in turn' if _in_turn(one) else 'ahead'
    who = f'{made.counted.mesh.size} {how}'
  sends = ''
  if sync is not None:
    sends = _time(sync.secs) if sync.is_known else '?'
  return [
    who,
    'yes' if made.fits else 'no',
    _time(one.step.secs),
    f'{one.waits} {_time(one.waits_secs)}' if one.waits else '',
    _time(one.draw_secs),
    _time(one.learn_secs),
    sends,
    _axes(made.mesh),
    str(made.sampler.sampling_mesh.shape['tensor']),
  ]


def _axes(mesh: dict[str, int]) -> str:
  """The axes of a mesh that have more than one device."""
  return ','.join(f'{k}={n}' for k, n in mesh.items() if n > 1) or '1'


def _announce(made: Plan) -> None:
  """Says what is compiled now, and how long it may take."""
  names = ', '.join(one.name for one in made.programs)
  done, secs = ('compiled', 'half a minute to ten minutes')
  if not made.topology.is_tpu:
    done, secs = 'lowered', 'some seconds to a minute'
  cores = len(os.sched_getaffinity(0))
  text = (
    f'Now {len(made.programs)} programs are {done} for {made.topology.name}: '
    f'{names}. A large model takes {secs} for each, and {cores} run at a time '
    '(one for each core). What was compiled once is kept. Ctrl-C leaves it at '
    'the estimates; --estimate gives nothing else.'
  )
  lines = textwrap.wrap(text, min(printing.columns(), 80))
  print('\n'.join(['', *lines]), file=sys.stderr, flush=True)


def with_mesh(config: Config, sizes: str, slices: int | None) -> Config:
  """The config with another mesh.

  Args:
    config: The config to change.
    sizes: `fsdp=16,tensor=4`; axes that are not named get 1. Empty: that of the
      config.
    slices: Slices of the topology; None: those of the config.

  Raises:
    ValueError: There is no such axis, or its size is no number.
  """
  mesh = config.mesh
  if sizes:
    pairs = (one.partition('=') for one in sizes.split(','))
    typed = {name: size for name, _, size in pairs}
    axes = 'data', 'fsdp', 'tensor', 'expert', 'context'
    if set(typed) - set(axes) or not all(
      size.lstrip('-').isdecimal() for size in typed.values()
    ):
      raise ValueError(
        f'--mesh={sizes} names no mesh; give sizes of {", ".join(axes)}, as in '
        '--mesh=data=2,fsdp=16,tensor=4.'
      )
    numbers = {name: int(size) for name, size in typed.items()}
    mesh = type(mesh)(**numbers, slices=mesh.slices)
  if slices is not None:
    mesh = dataclasses.replace(mesh, slices=slices)
  return dataclasses.replace(config, mesh=mesh)


def _tell(
  request: compiling.Request, result: compiling.Compiled | None
) -> None:
  if result is None:
    is_tpu = topologies.named(request.topology, request.slices).is_tpu
    said = 'compiling' if is_tpu else 'lowering'
  elif result.error:
    said = f'cannot be {"lowered" if result.only_lowered else "compiled"}'
  else:
    done = 'lowered' if result.only_lowered else 'compiled'
    said = f'{done} in {result.secs:.0f} s'
  print(f'{request.program}: {said}', file=sys.stderr, flush=True)


def to_json(made: Plan, price: float | None = None) -> dict[str, Any]:
  """A plan, with advice, for a program to read.

  Args:
    made: The plan.
    price: What a chip costs for an hour, in any currency.
  """
  found = {**plans.to_json(made), 'advice': plans.advice(made)}
  found['run_hours_at_least'] = made.run_hours
  if price:
    tokens, whole = _costs(made, price)
    found['million_tokens_cost_at_least'] = tokens
    found['run_costs_at_least'] = whole
  return found


def _costs(made: Plan, price: float) -> tuple[float, float]:
  """What a million completion tokens cost at least, and all rollouts."""
  hour = made.chips * price
  return 1e6 / made.tokens_per_sec / 3600 * hour, made.run_hours * hour


def show(made: Plan, price: float | None = None) -> None:
  """Prints a plan for a person; see `to_json`."""
  printing.show(_what(made), '', *_figures(made), *_verdict(made, price))
  sys.stdout.flush()


def show_compiled(made: Plan, price: float | None = None) -> None:
  """Prints what is known of a plan beyond its estimate; see `to_json`."""
  if made.topology.is_tpu:
    shown = ['Compiled', '', *_figures(made)]
  else:  # the tables of memory and of what is sent are those of the estimate
    shown = ['Lowered', '', *_work(made)]
  printing.show('', *shown, *_verdict(made, price))


def _figures(made: Plan) -> list[Any]:
  return [*_memory(made), *_work(made), *_sent(made)]


def _what(made: Plan) -> str:
  """The run and the machines."""
  counted, topology = made.counted, made.topology
  mesh = ' x '.join(f'{k} {n}' for k, n in made.mesh.items() if n > 1) or '1'
  slices = f'{topology.slices} x ' if topology.slices > 1 else ''
  return (
    f'{counted.weights.number / 1e9:.2f} billion parameters on {slices}'
    f'{topology.name} ({topology.number} device'
    f'{"s" * (topology.number > 1)}, on each '
    f'{made.capacity / GIB:g} GiB for programs), mesh {mesh}{_others(made)}; '
    f'{counted.prompts} prompts x {counted.group}, '
    f'{counted.prompt_tokens} + {counted.tokens} tokens.'
  )


def _others(made: Plan) -> str:
  """Who samples, if those on the mesh learn."""
  if made.counted.served:
    number = len(made.counted.config.engine.urls)
    samples = 'a server samples' if number == 1 else f'{number} servers sample'
    return f', which learn; {samples}'
  if not made.counted.apart:
    return ''
  own = made.sampler.sampling_mesh
  split = ' x '.join(f'{k} {n}' for k, n in own.shape.items() if n > 1) or '1'
  if made.jobs:
    parts = plans.parts_for(made.counted.config, made.jobs.number)
    return (
      f', which learn; {made.jobs.number} x {made.jobs.topology.name} sample, '
      f'each mesh {split}, a rollout in {parts} parts (generator.parts)'
    )
  return f', which learn; {own.size} others sample, mesh {split}'


def _sides(made: Plan) -> list[str]:
  """What devices that learn and devices that sample need, and who waits."""
  sync = made.sync
  if sync is None:
    return []

  def needs(learns):
    side = made.side(learns)
    one = max(side, key=lambda one: (not one.fits(made.capacity), one.bytes))
    verb = 'needs' if one.fits(made.capacity) else 'has no room for'
    return f'{verb} {one.bytes / GIB:.2f} GiB ({one.name})'

  step = made.step()
  waits = 'sampling', step.sampling_waits, 'learning'
  if step.learning_waits > step.sampling_waits:
    waits = 'learning', step.learning_waits, 'sampling'
  who, secs, whom = waits
  link = {'ici': made.topology.chip.link, 'dcn': 'the network between hosts'}
  takes = f', which takes {_time(sync.secs)} at least'
  if not sync.is_known:
    takes = ', whose speed is not in the table of chips'
  return [
    f'A device that learns {needs(True)}, and one that samples {needs(False)}.',
    f'A version has {sync.bytes / GIB:.3g} GiB and goes over '
    f'{link[sync.link]}{takes}. A rollout is drawn in {_time(made.draw_secs)} '
    f'at least, and learned from in {_time(made.learn_secs)}; {who} waits for '
    f'{whom} for {_time(secs)} of {_time(step.secs)}.',
  ]


def _verdict(made: Plan, price: float | None) -> list[str]:
  """Whether it fits, how fast it can be at most, and what to change."""
  largest = made.largest
  verdict = 'Fits' if made.fits else 'Does not fit'
  lowered = [one.name for one in made.programs if one.is_lowered]
  if not made.is_whole:
    done = 'compiled' if made.topology.is_tpu else 'lowered'
    verdict = f'Not known, since not all programs could be {done}'
  compiled = largest.collectives is not None
  source = 'compiled' if compiled else 'estimated by arithmetic'
  said = [
    f'{verdict}: {largest.name} needs {largest.bytes / GIB:.2f} of '
    f'{made.capacity / GIB:g} GiB ({source}).',
    *(f'{one.name}: {one.error}' for one in made.programs if one.error),
    *[
      f'Lowered for CUDA: {", ".join(lowered)}. There is no compiler for GPUs '
      'here, so memory, bytes and times are estimates by arithmetic.'
    ]
    * bool(lowered),
    *_sides(made),
    f'A rollout takes at least {made.bound_secs:.2f} s, which is at most '
    f'{made.tokens_per_sec:,.0f} completion tokens per second; '
    f'{made.counted.config.steps:,} rollouts, {made.run_hours:,.2f} hours. '
    'This is a bound for completions of full length, not a forecast; '
    'evaluations are not in it.',
  ]
  if made.counted.served:
    said.append(
      'What servers need to sample (config.engine.urls), and for how long, is '
      'not in it.'
    )
  if away := made.counted.on_host:
    said.append(
      f'For each device, {away / GIB:.2f} GiB of the state and of the inputs '
      'of layers lie in the memory of its host.'
    )
  if parked := made.sampler.parked:
    said.append(
      f'Episodes that have no row (config.sampler.max_rows) while their '
      f'environments work take {parked / GIB:.2f} GiB of the memory of each '
      'host.'
    )
  if made.counted.config.warm_up.steps:
    said.append('The warm-up is not planned.')
  if price:
    tokens, whole = _costs(made, price)
    said.append(
      f'At {price:g} for a chip and hour, a million completion tokens cost '
      f'{tokens:.3g} or more, and the run {whole:,.2f}.'
    )
  wasted = plans.wasted(made)
  return said + [_point(text) for text in (*wasted, *plans.advice(made))]


def _point(text: str) -> str:
  """A sentence of a list, as wide as the terminal."""
  return textwrap.fill(f'- {text}', printing.columns(), subsequent_indent='  ')


def show_ranked(ranked: Sequence[search.Candidate]) -> None:
  """Prints the meshes of a search, the best first."""
  names = 'mesh', 'rows', 'tokens', 'GiB', 'at least', 'remat', 'fits'
  shown = printing.table(names)
  for column in shown.columns[-2:]:
    column.justify = 'left'
  for one in ranked[:_MOST_SHOWN]:
    made = one.plan
    compiled = made.largest.compiled is not None
    shown.add_row(
      _axes(made.mesh),
      str(made.counted.rows.rows),
      f'{made.counted.rows.columns:,}',
      f'{made.largest.bytes / GIB:.2f}',
      f'{made.bound_secs:.2f} s',
      one.config.model.remat,
      ('yes' if made.fits and made.is_whole else 'no') + '*' * compiled,
    )
  told = (
    'Rows of a micro-batch and tokens of a row; GiB of the largest program.'
  )
  if any(one.plan.largest.compiled is not None for one in ranked):
    told += ' *: by the compiler.'
  if rest := len(ranked[_MOST_SHOWN:]):
    told += f' {rest} more follow, which --json has.'
  printing.show(shown, told, f'The first with {flags_of(ranked[0].config)}')


def flags_of(config: Config) -> str:
  """The flags that give a run the mesh, the rows and `remat` of a config."""
  learner = config.learner
  values = {
    **{f'mesh.{name}': size for name, size in vars(config.mesh).items()},
    'model.remat': config.model.remat,
    'learner.micro_rows': learner.micro_rows,
    'learner.row_completions': learner.row_completions,
  }
  return ' '.join(f'--config.{name}={n}' for name, n in values.items())


def against_json(found: against.Against) -> dict[str, Any]:
  """A run beside its bound, for a program to read."""

  def share_json(share: against.Share) -> dict[str, Any]:
    return {**share._asdict(), 'reached': share.reached}

  return {
    'devices': found.devices,
    'peak_flops': found.machine.flops,
    'peak_memory_bytes_per_sec': found.machine.memory_bytes,
    'rollouts': found.rollouts,
    'sampling': found.sampling and share_json(found.sampling),
    'learning': share_json(found.learning),
  }


def show_against(found: against.Against) -> None:
  """Prints a run beside its bound."""

  def line(name: str, share: against.Share) -> str:
    return (
      f'{name}: {share.measured_secs:.3g} s; at least {share.bound_secs:.3g} s '
      f'({_RESOURCES[share.bound_by]}), of which {share.reached:.0%} are '
      'reached.'
    )

  machine = found.machine
  printing.show(
    f'{found.devices}: {machine.flops / 1e9:,.0f} GFLOP/s, '
    f'{machine.memory_bytes / 1e9:,.1f} GB/s; medians of {found.rollouts} '
    'rollouts.',
    line('sampling', found.sampling)
    if found.sampling
    else 'sampling: by jobs or servers, of whose devices nothing is told.',
    line('learning', found.learning),
  )


def _memory(made: Plan) -> list[Any]:
  """The memory of one device by part, a column for each program."""
  estimated = all(one.collectives is None for one in made.programs)
  parts = dict.fromkeys(part for one in made.programs for part in one.memory)
  rows = []
  for part in parts:
    cells = (one.memory.get(part) for one in made.programs)
    rows.append([part, *('' if x is None else _gib(x) for x in cells)])
  return printing.tables(
    ['', *(one.name for one in made.programs)],
    [*rows, ['all', *(_gib(one.bytes) for one in made.programs)]],
    'GiB of one device' + ', estimated by arithmetic' * estimated,
  )


def _tera(flops: float) -> str:
  """Operations in units of 10^12."""
  number = flops / 1e12
  return f'{number:,.0f}' if number >= 100 else f'{number:.3g}'


def _time(secs: float) -> str:
  if not secs:
    return '0'
  return f'{secs:.3g} s' if secs >= 0.1 else f'{1000 * secs:.3g} ms'


def _gib(size: float) -> str:
  return f'{size / GIB:.2f}' if size >= 0.005 * GIB else '<.01'


def _work(made: Plan) -> list[Any]:
  """Work and the bound of each program, and the time of each resource."""
  secs = made.secs()
  resources = [
    name
    for name in _RESOURCES
    if any(of.get(name) for of in secs.values())  # one slice sends nothing far
  ]
  names = [_RESOURCES[name] for name in resources]
  rows = []
  for one in made.programs:
    least = roofline.bound(secs[one.name])[0]
    rows.append(
      [
        one.name,
        str(one.calls),
        _tera(one.work.flops * one.calls),
        *(_time(secs[one.name][name]) for name in resources),
        _time(least),
        f'{least / made.bound_secs:.0%}',
      ]
    )
  return printing.tables(
    ['', 'calls', 'TFLOP', *names, 'at least', 'share'],
    rows,
    'One device, all calls of a rollout',
  )


def _sent(made: Plan) -> list[Any]:
  """What each program sends, by network and kind of collective."""
  sent_by = {}
  for one in made.programs:
    sent = one.work.ici_bytes + one.work.dcn_bytes
    if one.calls and sent:
      counted = {'sent at least': sent / GIB}  # by arithmetic
      sent_by[one.name] = plans.collectives(one) or counted
  if not sent_by:
    return ['Nothing is sent between devices.']
  rows = []
  for kind in dict.fromkeys(
    kind for kinds in sent_by.values() for kind in kinds
  ):
    cells = (kinds.get(kind) for kinds in sent_by.values())
    network, _, rest = kind.partition(' ')
    name = f'{_RESOURCES.get(network, network)} {rest}'
    rows.append([name, *('' if x is None else _gib(x * GIB) for x in cells)])
  return printing.tables(
    ['', *sent_by], rows, 'GiB of one device, each call: results of collectives'
  )
