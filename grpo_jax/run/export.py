"""Models go out, as Hugging Face folders or as adapters for `peft`.

A folder is written beside its place under another name, and takes its place
when it is whole: so a folder that is there can be read.
"""

from collections.abc import Callable
import dataclasses
import json
import math
import os
import pathlib
import shutil
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import data
from grpo_jax import models
from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.config import whole_files
from grpo_jax.data import hub
from grpo_jax.hosts.processes import ALONE
from grpo_jax.hosts.processes import Processes
from grpo_jax.mesh import sharding
from grpo_jax.models import quantized
from grpo_jax.models import weights
from grpo_jax.run.build import build
from grpo_jax.run.build import card
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build.model import RunWeights
from grpo_jax.run.build.specs import ExportSpec
from grpo_jax.run.keep import metrics_file
from grpo_jax.run.keep import objects
from grpo_jax.run.keep import records


class Written(NamedTuple):
  """What a folder got.

  Attributes:
    folder: Its path.
    architecture: As `transformers` calls it; '' of an adapter.
    parameters: How many.
    checkpoint: Rollouts of the run; None if there was no run.
    nbytes: Of all files.
    dequantized: `'int8'` or `'nf4'` if the run kept its weights so: those in
      the folder are what the codes stand for, and not what the run began with.
  """

  folder: str
  architecture: str
  parameters: int
  checkpoint: int | None
  nbytes: int
  dequantized: str = ''


def convert(
  source: str | os.PathLike,
  folder: str | os.PathLike,
  checkpoint: int | str = 'latest',
  dtype: str = 'float32',
  shard_gb: float = 5.0,
  adapter: bool = False,
) -> Written:
  """Writes a model, or the adapter of a run, as a Hugging Face folder.

  The whole model is held once, in `dtype` if it comes from a folder or a file,
  in float32 if it comes from a run.

  Args:
    source: What `config.model.path` takes: the workdir of a run, a Hugging Face
      folder, a GGUF file or `'package:NAME'`.
    folder: Where to; it may exist if it is empty.
    checkpoint: Of a run: `'latest'`, `'best'` or a number of rollouts.
    dtype: Of the weights in the folder, `'float32'` or `'bfloat16'`.
    shard_gb: Largest file of weights, in GB (10^9 bytes).
    adapter: Whether to write the run's adapters alone, for `peft`. Otherwise
      they are added to the weights.

  Returns:
    What was written: the folder, the architecture, parameters and bytes.

  Raises:
    ValueError: `dtype` or `shard_gb` is none, the model cannot be read, the
      folder holds something, the run has no such checkpoint or no adapters, or
      no architecture of Hugging Face's can express its model.
  """
  if not 0 < shard_gb < math.inf:
    raise ValueError(
      f'--shard_gb={shard_gb} is no size of a file; give a number above 0.'
    )
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'--dtype={dtype}; give one of float32, bfloat16.')
  path, checkpoint = os.fspath(source), str(checkpoint)
  shard_bytes = int(shard_gb * 1e9)
  target = pathlib.Path(folder).expanduser()
  _refuse_full(target)
  found = build_model.source(path)
  mesh = sharding.make_mesh()
  if isinstance(found, RunWeights):
    return _convert_run(
      found, target, mesh, checkpoint, dtype, shard_bytes, adapter
    )
  for flag, given in (
    ('--adapter', adapter),
    (f'--checkpoint={checkpoint}', checkpoint != 'latest'),
  ):
    if given:
      raise ValueError(
        f'{flag} asks for something of a run, and {path} is a model without '
        'one; leave it out, or give the workdir of a run.'
      )
  model = models.Transformer(found.config())
  place = jax.tree.map(
    lambda x: x.sharding, build_model.abstract(model, mesh).trained
  )
  params = weights.load(found, model.config, place, dtype, rounded=True)
  tokenizer = None  # that of a folder is copied
  if found.folder is None:
    tokenizer = data.tokenizer_from('', path)

  def write(to: pathlib.Path) -> None:
    save(to, model.config, params, tokenizer, found, dtype, shard_bytes)

  whole_folder(target, write)
  return _written(target, params, None)


def _convert_run(
  found: RunWeights,
  target: pathlib.Path,
  mesh: jax.sharding.Mesh,
  checkpoint: str,
  dtype: str,
  shard_bytes: int,
  adapter: bool,
) -> Written:
  """`convert` of a run."""
  config, where = found.run, found.workdir
  if adapter:
    _refuse_adapter(config, where)
  if 'tokenizer' in objects.standing(config).values():
    raise ValueError(
      f'The run in {where} was given its tokenizer in Python, which this '
      'command does not have; let the run itself write its model, with '
      'config.export.every_saves=1.'
    )
  tokenizer = build_data.tokenizer_of(config)
  policy = build_model.policy(found, tokenizer.vocab_size, mesh, checkpoint)
  shape, params = policy.model.config, policy.params
  origin = build_model.origin_of(config.model.path)

  def write(to: pathlib.Path) -> None:
    if adapter:
      named = build_model.adapter_base(config.model.path, origin)
      weights.save_adapter(to, shape, params, dtype=dtype, **named)
    else:
      save(to, shape, params, tokenizer, origin, dtype, shard_bytes)

  whole_folder(target, write)
  counted = params
  if shape.lora is not None:
    counted = build_model.split(policy.model, params)[1 - adapter]
  dense = jax.eval_shape(quantized.whole, counted)
  done = _written(target, dense, policy.step)
  if adapter or shape.lora is None or shape.lora.quantized is None:
    return done
  return done._replace(dequantized=shape.lora.quantized)


def _refuse_full(folder: pathlib.Path) -> None:
  """Raises a ValueError if there is something in a folder, or a file."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f'{folder} is a file; give a folder.')
  inside = sorted(path.name for path in folder.glob('*'))
  if inside:
    holds = 'a model' if 'config.json' in inside else ', '.join(inside[:3])
    raise ValueError(
      f'{folder} holds {holds} already; give another folder, or remove it.'
    )


def _refuse_adapter(config: Config, workdir: pathlib.Path) -> None:
  if not config.lora.rank:
    raise ValueError(
      f'--adapter: the run in {workdir} has no adapters (config.lora.rank=0); '
      'leave the flag out, which writes the whole model.'
    )
  if not config.model.path:
    raise ValueError(
      f'--adapter: the run in {workdir} began with random weights, and no '
      'folder has these for an adapter to be added to; leave the flag out, '
      'which writes the whole model.'
    )


def _written(
  folder: pathlib.Path, params: Any, checkpoint: int | None
) -> Written:
  described, architecture = folder / 'config.json', ''
  if described.exists():
    (architecture,) = json.loads(described.read_text())['architectures']
  return Written(
    str(folder),
    architecture,
    sum(leaf.size for leaf in jax.tree.leaves(params)),
    checkpoint,
    sum(path.stat().st_size for path in folder.iterdir()),
  )


def save(
  folder: pathlib.Path,
  shape: models.ModelConfig,
  params: Any,
  tokenizer: data.Tokenizer | None,
  origin: weights.Source | None,
  dtype: str,
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a model and its tokenizer.

  Every process calls this, and the first one writes.

  Args:
    folder: Where to; it may hold no model.
    shape: The model.
    params: Its parameters. If it has adapters, each is added to its weight.
    tokenizer: Written unless it is that of `origin`, whose files are copied;
      None: those are copied in any case.
    origin: What the model began with. Its architecture is kept.
    dtype: Of the weights in the folder.
    shard_bytes: Weights in one file.
  """
  folder_of_origin = None if origin is None else origin.folder
  copied = folder_of_origin is not None
  if folder_of_origin is not None and tokenizer is not None:
    copied = data.is_in_folder(tokenizer, folder_of_origin)
  fields = {}
  if not copied:
    if origin is not None:
      origin = dataclasses.replace(origin, folder=None)
    if tokenizer is not None:
      fields = {
        'bos_token_id': next(iter(tokenizer.bos_ids), None),
        'eos_token_id': list(tokenizer.eos_ids) or None,
        'pad_token_id': tokenizer.pad_id,
      }
  weights.save(folder, shape, params, dtype, origin, fields, shard_bytes)
  if tokenizer is None or jax.process_index():
    return
  if copied:
    data.save_ends(tokenizer, folder)
  else:
    data.save_tokenizer(tokenizer, folder)


def whole_folder(
  folder: pathlib.Path,
  write: Callable[[pathlib.Path], None],
  peers: Processes = ALONE,
) -> None:
  """Writes a folder so that a kill leaves all of it or none.

  Args:
    folder: Where it is to be. What is there is replaced.
    write: Writes into the folder that it is given. Every process calls it, and
      the first one writes.
    peers: The processes that call this.

  Raises:
    ValueError: The folder cannot be written; in all processes.
  """
  folder = folder.absolute()  # '.' has no name
  beside = folder.with_name(f'.{folder.name}.tmp')

  def prepare():
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    folder.parent.mkdir(parents=True, exist_ok=True)

  def put():
    if folder.exists():
      shutil.rmtree(folder)
    beside.rename(folder)

  def agreed(step: Callable[[], None]) -> None:
    """Raises in all processes if a step fails in one."""
    problem, cause = '', None
    try:
      step()
    except OSError as error:
      problem, cause = (
        (
          f'{folder} cannot be written ({error.strerror or error}); make room, '
          'or give another folder.'
        ),
        error,
      )
    except Exception as error:
      problem, cause = plain_text.said(error), error
    # The others may wait for this process in a program of the devices.
    with peers.failing(problem):
      told = peers.exchange(problem)
    if problem := next(filter(None, told), ''):
      raise ValueError(problem) from cause

  nothing = lambda: None
  try:
    agreed(prepare if peers.is_first else nothing)
    agreed(lambda: write(beside))
    agreed(put if peers.is_first else nothing)
  finally:
    if peers.is_first:
      shutil.rmtree(beside, ignore_errors=True)


def _shape(model: models.Model) -> models.ModelConfig:
  """The shape of a model that can be written."""
  if model.file_shape is None:
    raise ValueError(
      'A model of your own has no form that Hugging Face knows; set '
      "config.export.every_saves=0 and config.export.push_to='' (the "
      'checkpoints hold its parameters).'
    )
  return model.file_shape


def writer(
  run: build.Run, peers: Processes = ALONE
) -> Callable[[pathlib.Path, Any], None] | None:
  """What writes a policy of a run as a folder, from what is on the devices.

  Training waits for it. A thread of its own would need a copy of the
  parameters, because the next update moves them; and where several processes
  hold them, they must gather each tensor together, in one order with all else
  that they compute. So the host holds one tensor above what training does, and
  adapters are added to one weight at a time.

  Args:
    run: The run.
    peers: The processes of the run.

  Returns:
    `(folder, params)`, the folder and all parameters, which raises a ValueError
    if the folder cannot be written; None if the run writes none.

  Raises:
    ValueError: No architecture of Hugging Face's can express the model.
  """
  spec, path = run.export, run.weights.path
  if not spec.every_saves and not spec.push_to:
    return None
  shape, origin = _shape(run.model), build_model.origin_of(path)
  weights.config_to_huggingface(shape, origin and origin.architecture)
  if spec.adapter:
    if not (run.weights.has_adapters and path):
      raise ValueError(
        'config.export.adapter=True needs a run that trains adapters of a '
        'model with a name; set config.lora.rank and config.model.path, or '
        'leave it out.'
      )
    adapter = build_model.adapter_base(path, origin)

    def save_in(to: pathlib.Path, params: Any) -> None:
      weights.save_adapter(to, shape, params, dtype=spec.dtype, **adapter)

  else:

    def save_in(to: pathlib.Path, params: Any) -> None:
      save(to, shape, params, run.tokenizer, origin, spec.dtype)

  def write(folder: pathlib.Path, params: Any) -> None:
    whole_folder(folder, lambda to: save_in(to, params), peers)

  return write


def pusher(
  spec: ExportSpec,
  write: Callable[[pathlib.Path, Any], None] | None,
  workdir: pathlib.Path,
  tell: Callable[[str], None],
  peers: Processes = ALONE,
) -> Callable[[int, Any], str] | None:
  """What sends the policy of a run to the Hub, with a card, as one commit.

  The Hub is asked now whether it may go there: the first start of a run is
  refused before anything is trained.

  Args:
    spec: Says where to.
    write: From `writer`.
    workdir: Says in pushed.json what has been sent, which is not sent again.
    tell: Hears of the upload, and why it may fail at the end of a run that goes
      on.
    peers: The processes of the run; the first one asks, and sends.

  Returns:
    `(step, params)`, the rollouts done and all parameters, which returns the
    address of the commit, and raises a ValueError, in all processes, if that
    fails. None if the run sends none.

  Raises:
    ValueError: It may not go there; in all processes.
  """
  if not spec.push_to or write is None:
    return None
  with peers.together():
    if peers.is_first:
      try:
        hub.check_push(spec.push_to, spec.public)
      except hub.HubError as error:
        # A run that goes on needs nothing of the Hub before its end.
        if not records.holds_run(workdir):
          raise
        tell(f'{error} The run goes on, and asks again at its end.')
  place, folder = workdir / 'pushed.json', workdir / '.pushing'

  def push(step: int, params: Any) -> str:
    sent = {'repository': spec.push_to, 'step': step, 'adapter': spec.adapter}
    earlier = peers.from_first(records.read(place)) or {}
    if earlier.items() >= sent.items():
      return earlier['commit']
    try:
      write(folder, params)
      with peers.together(), hub.telling(tell):
        if peers.is_first:
          sent['commit'] = _sent(spec, folder, step)
          whole_files.write(place, json.dumps(sent).encode())
    finally:
      if peers.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    return peers.from_first(sent)['commit']

  return push


def _sent(spec: ExportSpec, folder: pathlib.Path, step: int) -> str:
  """Sends a folder in a workdir with its card; the address of the commit."""
  workdir = folder.parent
  config = records.saved_config(workdir)
  measured = metrics_file.read(workdir / 'metrics.jsonl')
  try:
    to = hub.check_push(spec.push_to, spec.public)
    card.write(folder, to, config, measured, step, spec.adapter)
    return hub.push(folder, to, spec.public, f'{step} rollouts')
  except ValueError as error:
    raise ValueError(
      f'{error} The run is over and saved; the same command pushes it.'
    ) from error
