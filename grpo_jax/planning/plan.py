"""What a run would need on machines that are not there.

Every program of a run is either compiled for these machines (see `compiling`),
or counted by `arithmetic`. From both come memory, operations, bytes sent, and a
bound on time (see `roofline`). Programs for GPUs are lowered and counted: that
they can be built and what they multiply is then known, and all else estimated.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.learner import programs
from grpo_jax.planning import compiling
from grpo_jax.planning import pacing
from grpo_jax.planning import roofline
from grpo_jax.planning import topologies
from grpo_jax.planning import waste
from grpo_jax.planning.arithmetic import LEARNING_STEPS
from grpo_jax.planning.arithmetic import Arithmetic
from grpo_jax.planning.compiling import Compiled
from grpo_jax.planning.hlo import Collective
from grpo_jax.planning.roofline import Work
from grpo_jax.planning.topologies import GIB
from grpo_jax.planning.topologies import Topology
from grpo_jax.run.build import build

_SOMEWHERE = '127.0.0.1:1'  # where nobody is
LEARNING = (
  *LEARNING_STEPS,
  'score_all',
  'score_entropy',
  'score_reference',
  'score_teacher',
)


@dataclasses.dataclass(frozen=True)
class Program:
  """One program of a run, on one device.

  Attributes:
    name: One of `compiling.PROGRAMS`.
    calls: How often it runs in a rollout.
    error: Why the compiler refuses it, or why it cannot be lowered; empty if
      neither is so, or nobody was asked.
    memory: Bytes by part. The parts are arguments, what the program needs
      besides, and what else lies in memory while it runs.
    work: Of one call.
    collectives: Of one call; None if it was not compiled.
    compiled: What the compiler says, or what lowering tells where there is no
      compiler; None if neither was asked.
    beside: Bytes of `memory` that the program is not given, such as moments
      while completions are drawn.
  """

  name: str
  calls: int
  error: str
  memory: dict[str, float]
  work: Work
  collectives: tuple[Collective, ...] | None = None
  compiled: Compiled | None = None
  beside: float = 0.0

  @property
  def is_lowered(self) -> bool:
    """Whether it was lowered for machines for which there is no compiler."""
    one = self.compiled
    return one is not None and one.only_lowered and not one.error

  @property
  def is_refused(self) -> bool:
    """Whether the compiler found no room for it."""
    return self.compiled is not None and not self.compiled.fits

  @property
  def bytes(self) -> float:
    """All memory that must be there while the program runs."""
    return sum(self.memory.values())

  def fits(self, capacity: float) -> bool:
    """Whether it finds room; the compiler's verdict, if it was asked.

    The compiler does not know what lies beside.

    Args:
      capacity: The memory of one device that programs may use, bytes.
    """
    if self.collectives is not None and not self.beside:
      return True
    return not self.is_refused and self.bytes <= capacity


class Jobs(NamedTuple):
  """Jobs of their own that sample for a run."""

  number: int
  topology: Topology  # the machines of each


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run would need.

  Attributes:
    topology: The machines; those that learn, if jobs of their own sample.
    mesh: The axes and their sizes; of those that learn, if others sample.
    counted: The run, by arithmetic.
    programs: In the order in which they run.
    jobs: That sample; None: the run samples itself.
    drawing: What one of them draws with, by arithmetic.
  """

  topology: Topology
  mesh: dict[str, int]
  counted: Arithmetic
  programs: tuple[Program, ...]
  jobs: Jobs | None = None
  drawing: Arithmetic | None = None

  @property
  def sampler(self) -> Arithmetic:
    """What draws."""
    return self.drawing or self.counted

  @property
  def machine(self) -> roofline.Machine:
    """One device."""
    return roofline.chip_peaks(self.topology.chip)

  @property
  def sync(self) -> pacing.Sync | None:
    """What a version costs on its way; None if learner and sampler share."""
    if self.jobs and self.drawing:
      return pacing.fetched(
        self.counted, self.drawing, self.jobs.number, self.machine
      )
    if self.counted.apart:
      return pacing.handed_over(self.counted, self.machine)
    return None

  def step(self, drawing: float = 1.0, learning: float = 1.0) -> pacing.Step:
    """A rollout with its updates.

    Args:
      drawing: Which share of its bound drawing reaches.
      learning: The same of updates.
    """
    secs = self.draw_secs / drawing, self.learn_secs / learning
    if self.sync is None:
      return pacing.Step(sum(secs))
    return pacing.step(*secs, self.sync, self.counted.parts.run.draw.pace)

  @property
  def chips(self) -> float:
    """How many there are, those of jobs included, as they are paid for."""
    jobs = self.jobs
    return self.topology.chips + (
      jobs.number * jobs.topology.chips if jobs else 0
    )

  def side(self, learns: bool) -> list[Program]:
    """The programs that learn, or those that draw."""
    return [one for one in self.programs if (one.name in LEARNING) == learns]

  @property
  def capacity(self) -> float:
    """The memory of one device that programs may use, bytes."""
    return self.topology.memory_bytes

  @property
  def largest(self) -> Program:
    """The program that needs most memory, of those without room if any."""
    return max(
      self.programs, key=lambda one: (not one.fits(self.capacity), one.bytes)
    )

  @property
  def fits(self) -> bool:
    """Whether all programs find room, by the compiler if it was asked."""
    return all(one.fits(self.capacity) for one in self.programs)

  @property
  def is_whole(self) -> bool:
    """Whether every program could be compiled or lowered, or was too large."""
    return all(one.is_refused or not one.error for one in self.programs)

  def secs(self) -> dict[str, dict[str, float]]:
    """Seconds of a rollout for each program, by resource."""
    return {
      one.name: (one.work * one.calls).secs(self.machine)
      for one in self.programs
    }

  @property
  def draw_secs(self) -> float:
    """The least time to draw a rollout."""
    return self._secs(lambda name: name not in LEARNING)

  @property
  def learn_secs(self) -> float:
    """The least time of its updates."""
    return self._secs(lambda name: name in LEARNING)

  def _secs(self, counts: Callable[[str], bool]) -> float:
    secs = self.secs().items()
    return sum(roofline.bound(of)[0] for name, of in secs if counts(name))

  @property
  def bound_secs(self) -> float:
    """The least time of a rollout with its updates."""
    return self.step().secs

  @property
  def tokens_per_sec(self) -> float:
    """Completion tokens per second, of all devices, at most."""
    counted = self.counted
    tokens = counted.prompts * counted.group * counted.tokens
    return tokens / self.bound_secs

  @property
  def run_hours(self) -> float:
    """Hours for all rollouts of the config, at least."""
    return self.counted.config.steps * self.bound_secs / 3600


def plan(
  config: Config,
  topology: Topology,
  estimate: bool = False,
  tell: Callable[..., None] = lambda *_: None,
  jobs: Jobs | None = None,
) -> Plan:
  """Plans a run.

  Args:
    config: Of the run; `mesh` lies over the topology.
    topology: The machines.
    estimate: Whether arithmetic is enough. Otherwise programs are compiled, or
      for GPUs lowered.
    tell: See `compiling.compile_all`.
    jobs: That sample for it, on machines beside the topology. None: one, if
      the config waits for jobs (`generator.listen`).

  Returns:
    The plan.

  Raises:
    ValueError: The run cannot be built on these machines, or libtpu is missing.
  """
  if config.generator.listen and not jobs:
    jobs = Jobs(1, topology.some(1))
  if jobs:
    check_not_served(config)
    if own := config.generator.devices:
      raise ValueError(
        f'config.generator.devices={own} and {jobs.number} jobs that sample; '
        'either devices of the run sample or jobs do, so give one of them.'
      )
    made = _with_jobs(config, topology, jobs)
    return made if estimate else compiled(made, tell)
  own = config.generator.devices
  mesh = topologies.abstract_mesh(topology, config.mesh, own)
  counted = Arithmetic(build.abstract(config, mesh), topology.joined)
  programs = tuple(
    plan_program(counted, name, number, None)
    for name, number in count_calls(counted).items()
  )
  made = Plan(topology, dict(mesh.shape), counted, programs)
  return made if estimate else compiled(made, tell)


def check_not_served(config: Config) -> None:
  """Raises a ValueError if servers sample, so that nobody else does."""
  if config.engine.kind == 'http':
    raise ValueError(
      "config.engine.kind='http' lets servers sample, so no devices are "
      'divided and no jobs sample; leave --split and --generators out, or give '
      "'local'."
    )


def _with_jobs(config: Config, topology: Topology, jobs: Jobs) -> Plan:
  """A run for which jobs sample, by arithmetic."""
  generator = config.generator
  listen = generator.listen or _SOMEWHERE
  learner = dataclasses.replace(
    config, generator=dataclasses.replace(generator, listen=listen)
  )
  mesh = topologies.abstract_mesh(topology, config.mesh)
  counted = Arithmetic(build.abstract(learner, mesh), topology.joined)
  own = of_job(learner, jobs)
  own_mesh = topologies.abstract_mesh(jobs.topology, own.mesh)
  drawing = Arithmetic(build.abstract(own, own_mesh), jobs.topology.joined)
  rounds = math.ceil(config.sampler.prompts / own.sampler.prompts / jobs.number)
  drawn = [
    plan_program(drawing, name, number * rounds, None)
    for name, number in count_calls(drawing).items()
    if name not in LEARNING
  ]
  learned = [
    plan_program(counted, name, number, None)
    for name, number in count_calls(counted).items()
    if name in LEARNING
  ]
  programs = tuple(drawn + learned)
  return Plan(topology, dict(mesh.shape), counted, programs, jobs, drawing)


def parts_for(config: Config, number: int) -> int:
  """Into how many equal parts a rollout falls, at least one for each job.

  They are those of the config if it has as many.

  Raises:
    ValueError: There are fewer prompts than jobs.
  """
  prompts, parts = config.sampler.prompts, config.generator.parts
  if parts >= number:
    return parts
  if number > prompts:
    raise ValueError(
      f'A rollout has {prompts} prompts, and {number} jobs would draw them, so '
      f'that some draw none; give at most {prompts} jobs, or more of '
      'config.sampler.prompts.'
    )
  return next(n for n in range(number, prompts + 1) if prompts % n == 0)


def of_job(config: Config, jobs: Jobs) -> Config:
  """A run that draws what a job draws at a time, on its mesh.

  Raises:
    ValueError: There are too many jobs, or their devices cannot be divided.
  """
  number, mesh = jobs.topology.number, config.mesh
  tensor = config.sampler.tensor or mesh.tensor
  if number % tensor:
    raise ValueError(
      f'A job has {number} devices ({jobs.topology.name}) and {tensor} shards '
      'of heads, hidden units and vocabulary, which do not divide them; give '
      'config.sampler.tensor=1, or another divisor.'
    )
  expert = math.gcd(mesh.expert, number // tensor)
  slices = jobs.topology.slices
  data = number // tensor // expert // slices
  prompts = config.sampler.prompts
  return dataclasses.replace(
    config,
    mesh=dataclasses.replace(
      mesh, data=data, fsdp=1, tensor=tensor, expert=expert, context=1,
      slices=slices,
    ),
    sampler=dataclasses.replace(
      config.sampler,
      prompts=prompts // parts_for(config, jobs.number),
      ahead=0,
      tensor=0,
    ),
    learner=dataclasses.replace(
      config.learner, micro_rows=0, row_completions=0, batches=1
    ),
    generator=dataclasses.replace(config.generator, parts=1),
  )  # fmt: skip


def compiled(
  made: Plan,
  tell: Callable[..., None] = lambda *_: None,
  begin: Callable[[Plan], None] = lambda _: None,
) -> Plan:
  """An estimate, with what the compiler says, or what lowering tells.

  Args:
    made: By arithmetic.
    tell: See `compiling.compile_all`.
    begin: Called with the estimate when all is ready to be compiled.

  Raises:
    ValueError: libtpu is missing, or knows no such topology.
  """
  config, topology = made.counted.config, made.topology
  if topology.is_tpu:
    # Raises before minutes are spent.
    topologies.mesh(topology, config.mesh, config.generator.devices)
  begin(made)
  requests, counted = [], []
  for one in made.programs:
    learns = one.name in LEARNING
    of = made.counted if learns else made.sampler
    place = made.jobs.topology if made.jobs and not learns else topology
    config = dataclasses.asdict(of.config)
    requests.append(
      compiling.Request(config, place.name, place.slices, one.name)
    )
    counted.append(of)
  found = compiling.compile_all(requests, tell=tell)
  programs = tuple(
    plan_program(of, one.name, one.calls, result)
    for of, one, result in zip(counted, made.programs, found, strict=True)
  )
  return dataclasses.replace(made, programs=programs)


def count_calls(counted: Arithmetic) -> dict[str, int]:
  """How often each program runs in a rollout, in the order of their first call.

  Completions have their full length, so that no rows end early. Two programs
  are named for their memory alone: `regroup`, and `watched_step`, the update of
  a rollout in which overshoot is measured, if that is not every rollout.
  Programs that take no time worth mentioning are left out. Of an environment
  one turn of each episode is counted, behind a prompt of full length.
  """
  update = counted.parts.updater
  calls = {} if counted.served else _count_drawing(counted)
  for name in programs.scoring_names(update):
    calls[name] = calls.get(name, 0) + counted.config.learner.batches
  if update.spec.watch_steps > 1:
    calls['watched_step'] = 0
  return {**calls, 'train_step': counted.updates}


def _count_drawing(counted: Arithmetic) -> dict[str, int]:
  """As `count_calls`, of the programs that draw."""
  starts = counted.starts
  # Where others sample, the learner's part of it is that of `divide`.
  calls = {} if counted.apart else {'prepare': 1}
  if counted.pools:
    return calls | {'read': counted.reads, 'decode': starts}
  calls |= {'prefill': starts, 'decode': starts}
  if len(counted.rooms) > 1:
    calls['grow'] = starts * (len(counted.rooms) - 1)
  if counted.schedule.sizes:
    calls['regroup'] = 0
  return calls


# Parts of memory.
_OF_LEARNER = 'parameters', 'moments', 'reference', 'teacher'


def plan_program(
  counted: Arithmetic, name: str, calls: int, result: Compiled | None
) -> Program:
  """One program, by arithmetic and by what the compiler says."""
  weights = counted.weights
  # What lies in memory while the program runs, its arguments included.
  there = {
    'parameters': float(weights.trained + weights.frozen),
    'moments': float(weights.moments),
    'reference': float(weights.reference),
    'teacher': float(weights.teacher),
    'older parameters': float(weights.older),
    **counted.held(name),
  }
  if counted.apart:  # each device has what its own programs need
    # Jobs fetch older ones from the learner.
    owned = *_OF_LEARNER, *['older parameters'] * counted.jobs
    there = {
      part: size
      for part, size in there.items()
      if (part in owned) == (name in LEARNING)
    }
  needs = counted.memory(name)
  work = counted.work(name)
  if result is None or result.error or result.only_lowered:
    error = result.error if result else ''
    if result and not error:
      work = dataclasses.replace(work, flops=_flops(counted, name, result))
    memory = _shown(there, needs)
    return Program(name, calls, error, memory, work, compiled=result)
  besides = result.peak_bytes - result.argument_bytes
  needs = scaled(needs, besides)
  # Batches, layouts and numbers, which arithmetic leaves out.
  known = counted.arguments(name)
  needs['other arguments'] = max(0.0, result.argument_bytes - known)
  near = sum(one.sent[0] for one in result.collectives)
  far = sum(one.sent[1] for one in result.collectives)
  flops = _flops(counted, name, result)
  work = Work(flops, work.memory_bytes, near, far)
  beside = sum(there.values()) - known
  return Program(
    name,
    calls,
    '',
    _shown(there, needs),
    work,
    result.collectives,
    result,
    beside,
  )


def _flops(counted: Arithmetic, name: str, result: Compiled) -> float:
  """Operations of matrix products."""
  # A kernel of attention tells no operations; arithmetic knows them.
  return result.flops + counted.attention_flops(name) * bool(result.kernels)


def scaled(parts: dict[str, float], total: float) -> dict[str, float]:
  """The parts of a sum that is known, from estimates of them.

  What the estimates leave is a part of its own; if they are too large, all are
  taken to be so in the same measure.

  >>> scaled({'a': 1.0, 'b': 2.0}, 4.0)
  {'a': 1.0, 'b': 2.0, 'other': 1.0}
  """
  guessed = sum(parts.values())
  if guessed <= total:
    return {**parts, 'other': total - guessed}
  return {name: part * total / guessed for name, part in parts.items()}


def _shown(*groups: dict[str, float]) -> dict[str, float]:
  """Parts in one, without those of no bytes."""
  return {
    name: part for group in groups for name, part in group.items() if part
  }


def to_json(made: Plan) -> dict[str, Any]:
  """A plan for a program to read."""
  counted, chip = made.counted, made.topology.chip
  secs = made.secs()

  def program_json(one: Program) -> dict[str, Any]:
    bound, by = roofline.bound(secs[one.name])
    return {
      'calls': one.calls,
      'compiled': one.collectives is not None,
      'lowered': one.is_lowered,
      'estimated': one.collectives is None,
      'error': one.error,
      'memory_gib': {k: v / GIB for k, v in one.memory.items()},
      'total_gib': one.bytes / GIB,
      'flops': one.work.flops,
      'collectives_gib': collectives(one),
      'secs': secs[one.name],
      'bound_secs': bound,
      'bound_by': by,
    }

  return {
    'topology': made.topology.name,
    'num_slices': made.topology.slices,
    'devices': made.topology.number,
    'chip': chip.name,
    'mesh': made.mesh,
    'parameters': counted.weights.number,
    'rollout': {
      'prompts': counted.prompts,
      'group': counted.group,
      'prompt_tokens': counted.prompt_tokens,
      'max_tokens': counted.tokens,
      'updates': counted.updates,
    },
    'fits': made.fits if made.is_whole else None,
    'device_gib': made.capacity / GIB,
    'host_gib': counted.on_host / GIB,
    'parked_gib': made.sampler.parked / GIB,
    'largest': made.largest.name,
    'waste': wasted(made),
    'jobs': made.jobs.number if made.jobs else 0,
    'servers': len(counted.config.engine.urls),
    'draw_secs': made.draw_secs,
    'learn_secs': made.learn_secs,
    'sync': sync_json(made),
    **_waits_json(made),
    'programs': {one.name: program_json(one) for one in made.programs},
    'bound_secs': made.bound_secs,
    'tokens_per_sec_at_most': made.tokens_per_sec,
  }


def sync_json(made: Plan) -> dict[str, Any] | None:
  """What a version costs on its way; None if learner and sampler share."""
  sync = made.sync
  if sync is None:
    return None
  known = sync.is_known
  return {
    'gib': sync.bytes / GIB,
    'link': sync.link,
    'learning_secs': sync.learning_secs if known else None,
    'sampling_secs': sync.sampling_secs if known else None,
  }


def _waits_json(made: Plan) -> dict[str, float]:
  """Who waits, if learner and sampler have devices of their own."""
  step = made.step()
  return {
    'sampling_waits_secs': step.sampling_waits,
    'learning_waits_secs': step.learning_waits,
  }


def wasted(made: Plan) -> list[str]:
  """See `waste.sentences`."""
  return waste.sentences(made.counted, made.topology.number, made.drawing)


def collectives(program: Program) -> dict[str, float] | None:
  """GiB of results of a call by network and kind; None if not compiled."""
  if program.collectives is None:
    return None
  found: dict[str, float] = {}
  for one in program.collectives:
    name = f'{"dcn" if one.crosses else "ici"} {one.kind} {one.dtype}'
    found[name] = found.get(name, 0.0) + one.bytes * one.times / GIB
  return dict(sorted(found.items(), key=lambda item: -item[1]))


_LONG = 0.25  # a wait of a larger share of a step is worth a word
_IDLE = 0.9  # below this share of data shards with rows, it is worth a word


def advice(plan: Plan) -> list[str]:
  """Sentences, the most useful first; none if there is nothing to say."""
  return [*_to_fit(plan), *_to_be_faster(plan)]


def _to_fit(plan: Plan) -> list[str]:
  """What makes the largest program smaller, if it has to be."""
  if plan.fits:
    return []
  counted, largest = plan.counted, plan.largest
  memory = largest.memory
  found = []
  whole = plan.topology.chip.device_memory_gib * GIB
  if not plan.topology.is_tpu and plan.capacity < largest.bytes < 0.95 * whole:
    found.append(
      'Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX takes '
      f"{topologies.gpu_share():.0%} of a GPU's memory now."
    )
  if largest.name in LEARNING:
    activations = memory.get('activations', 0)
    if counted.model.remat in ('none', 'attention'):
      found.append(
        "Set config.model.remat='layer': only the input of each layer is kept "
        'then.'
      )
    elif counted.model.remat == 'layer' and activations > 0.2 * largest.bytes:
      found.append(
        "Set config.model.remat='offload': the inputs of layers then lie in "
        "the host's memory."
      )
    spare = counted.rows.rows // counted.shards
    if activations > 0.2 * largest.bytes and spare > 1:
      found.append(
        f'Set config.learner.micro_rows={counted.shards}: a micro-batch then '
        f'has one row on each data shard instead of {spare}.'
      )
    elif activations > 0.2 * largest.bytes:
      found.append(
        'Set config.learner.row_completions to a divisor of the group: rows '
        'become shorter.'
      )
  state = sum(memory.get(name, 0) for name in _OF_LEARNER)
  if state > 0.3 * plan.capacity:
    found.append(
      f'Split parameters and moments further: they take {state / GIB:.1f} GiB '
      f'of each device with fsdp={plan.mesh["fsdp"]}, tensor='
      f'{plan.mesh["tensor"]}.'
    )
  for part, field in (
    ('moments', 'optim'),
    ('reference', 'reference'),
    ('teacher', 'teacher'),
  ):
    if memory.get(part, 0) > 0.1 * plan.capacity:
      found.append(
        f'Set config.{field}.offload=True: the {part} '
        f'({memory[part] / GIB:.1f} GiB) then stay in the memory of the host '
        'and come to the device only where they are read.'
      )
  held = memory.get('sampler weights', 0)
  if held > 0.3 * plan.capacity:
    found.append(
      f'Raise config.sampler.tensor: the weights that decoding reads are split '
      f'over tensor and expert alone, and take {held / GIB:.1f} GiB.'
    )
  if memory.get('cache', 0) > 0.3 * plan.capacity:
    found.append(
      'Lower config.sampler.max_rows: fewer completions are decoded at once, '
      'and the others wait.'
    )
    if counted.pools:
      found.append(
        'Lower config.environment.context_tokens (or the largest of '
        'config.data.completion_buckets): every row of an episode has a cache '
        'of that length.'
      )
  return found


def _to_divide_better(plan: Plan) -> list[str]:
  """What to do if one side waits long for the other."""
  step = plan.step()
  sides = 'sampling', 'learning'
  waits = step.sampling_waits, step.learning_waits
  if step.learning_waits > step.sampling_waits:
    sides, waits = sides[::-1], waits[::-1]
  if waits[0] < _LONG * step.secs:
    return []
  who, whom = sides
  return [
    f'{who.capitalize()} waits for {whom} for {waits[0] / step.secs:.0%} of a '
    f'step: give {whom} more of the devices; --split tries all divisions.'
  ]


def _to_be_faster(plan: Plan) -> list[str]:
  """What the slowest program waits for."""
  counted = plan.counted
  found = []
  rows, shards = counted.rows, counted.shards
  needed = counted.prompts // counted.config.learner.batches
  kind = counted.parts.updater.layout.kind
  per_row = 1
  if kind in ('auto', 'shared'):
    per_row = counted.config.learner.row_completions or counted.group
  needed = needed * counted.group // per_row
  share = needed / (rows.micro * rows.rows)
  if share < _IDLE and kind != 'packed':
    found.append(
      f'Only {share:.0%} of the rows of an update hold something: {needed} '
      f'rows lie on {shards} data shards. Use more of config.mesh.tensor, set '
      'config.learner.row_completions, or sample more prompts.'
    )
  found += _to_divide_better(plan)
  secs = plan.secs()
  slowest = max(
    plan.programs, key=lambda one: roofline.bound(secs[one.name])[0]
  )
  least, by = roofline.bound(secs[slowest.name])
  if least < 0.5 * plan.bound_secs:
    return found
  advised = {
    'memory': 'More rows at once cost nearly the same there: raise '
    'config.sampler.prompts or config.mesh.tensor.',
    'ici': 'Give fsdp and tensor smaller sizes and data a larger one, as far '
    'as memory allows.',
    'dcn': 'Let data alone cross slices, and give each update more rows.',
  }
  if by in advised:
    found.append(
      f'{slowest.name} takes {least / plan.bound_secs:.0%} of the bound, and '
      f'is bound by {by}. {advised[by]}'
    )
  return found
