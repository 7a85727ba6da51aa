"""The flags of all commands; `table.COMMANDS` says who reads which."""

import sys

from absl import flags
from ml_collections import config_flags

# ml_collections opens what --flagfile names already here, and may fail.
_argv, sys.argv = sys.argv, sys.argv[:1]
CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'A Python file with get_config; an argument for it follows a colon.',
)
sys.argv = _argv
FLAGS = {
  'workdir': flags.DEFINE_string(
    'workdir',
    None,
    'Directory of the run, or gs://... train goes on from what is in it; '
    'doctor writes a file there, and deletes it; report only reads it.',
  ),
  'verbose': flags.DEFINE_bool(
    'verbose', False, 'Show the traceback of an error too.'
  ),
  'json': flags.DEFINE_bool(
    'json', False, 'Print the answer as JSON, for a program to read.'
  ),
  'coordinator': flags.DEFINE_string(
    'coordinator',
    '',
    'HOST:PORT of the first of several processes. Not needed where Cloud TPU, '
    'Slurm or Kubernetes tell it.',
  ),
  'num_processes': flags.DEFINE_integer(
    'num_processes',
    None,
    'How many processes train together, with --coordinator.',
  ),
  'process_id': flags.DEFINE_integer(
    'process_id', None, 'Number of this process, from 0, with --coordinator.'
  ),
  'topology': flags.DEFINE_string(
    'topology',
    '',
    'Machines to plan for, such as v5p:4x4x4, v5e:16x16 or h100-sxm:2x8.',
  ),
  'num_slices': flags.DEFINE_integer(
    'num_slices',
    None,
    'How many such groups of machines, instead of config.mesh.slices.',
  ),
  'mesh': flags.DEFINE_string(
    'mesh',
    '',
    'Sizes of the mesh, as in data=2,fsdp=16,tensor=4, instead of those of the '
    'config.',
  ),
  'estimate': flags.DEFINE_bool(
    'estimate',
    False,
    'Answer by arithmetic, within seconds, and compile nothing.',
  ),
  'search': flags.DEFINE_integer(
    'search',
    0,
    'Try all meshes by arithmetic, and compile the best until so many fit.',
  ),
  'price': flags.DEFINE_float(
    'price', None, 'Of a chip for an hour, to tell what tokens cost.'
  ),
  'against': flags.DEFINE_string(
    'against',
    '',
    'Workdir of a run, whose times are laid beside the least possible.',
  ),
  'check': flags.DEFINE_bool(
    'check',
    False,
    'Show the config, shapes, memory and the first rollout, and train nothing.',
  ),
  'replay': flags.DEFINE_string(
    'replay',
    None,
    'Train on the completions in this directory, which an earlier run has '
    'written with log.completions_every_steps=1, instead of sampling.',
  ),
  'profile_steps': flags.DEFINE_list(
    'profile_steps',
    [],
    'FIRST,LAST: record these rollouts, counted from 1, with the JAX profiler.',
  ),
  'checkpoint': flags.DEFINE_string(
    'checkpoint',
    'latest',
    "Checkpoint to load: a rollout's number, 'latest' or 'best'.",
  ),
  'source': flags.DEFINE_string(
    'source',
    None,
    'The model to write: a Hugging Face folder, a .gguf file, package:NAME for '
    'the .gguf file in an installed package, or the workdir of a run.',
  ),
  'folder': flags.DEFINE_string(
    'folder', None, 'The folder to write, which must be new or empty.'
  ),
  'adapter': flags.DEFINE_bool(
    'adapter',
    False,
    "Write only a run's LoRA adapter, as a folder for peft, instead of adding "
    'it to the weights.',
  ),
  'dtype': flags.DEFINE_enum(
    'dtype',
    'float32',
    ['float32', 'bfloat16'],
    'Dtype of the weights in the folder: float32, or bfloat16 for half the '
    'size, which loses changes below 1/256 of a weight.',
  ),
  'shard_gb': flags.DEFINE_float(
    'shard_gb', 5.0, 'Largest file of weights, in GB; more go into the next.'
  ),
  'examples': flags.DEFINE_integer(
    'examples',
    0,
    'Held-out problems to judge; 0 takes as many as the config says.',
  ),
  'samples': flags.DEFINE_integer(
    'samples', 8, 'Completions to sample per problem.'
  ),
  'k': flags.DEFINE_list(
    'k',
    ['1', '8'],
    'Values of k for pass@k and majority@k, none above --samples.',
  ),
  'temperature': flags.DEFINE_float(
    'temperature',
    None,
    "Sampling temperature; 0 is greedy. Default: the config's.",
  ),
  'max_tokens': flags.DEFINE_integer(
    'max_tokens', None, "Longest completion, in tokens. Default: the config's."
  ),
  'completions': flags.DEFINE_string(
    'completions', None, 'Parquet file to write completions and rewards into.'
  ),
  'prompt': flags.DEFINE_multi_string(
    'prompt', [], 'A prompt to complete. The flag may be repeated.'
  ),
  'prompts': flags.DEFINE_string(
    'prompts', None, 'File with a prompt on each line; - reads standard input.'
  ),
  'number': flags.DEFINE_integer(
    'number', 1, 'Completions to sample per prompt.'
  ),
  'show': flags.DEFINE_integer(
    'show', 2, 'Prompts to show of the training data, and of those held out.'
  ),
  'records': flags.DEFINE_integer(
    'records',
    20_000,
    'Records to read of each source, chosen at random; 0 reads all.',
  ),
  'run': flags.DEFINE_multi_string(
    'run', [], 'Workdir of another run. The flag may be repeated.'
  ),
  'out': flags.DEFINE_string(
    'out',
    None,
    'A page to write (default: report.html), or for experiments a folder.',
  ),
  'method': flags.DEFINE_string(
    'method', None, "A method of losses.methods, or your own 'module:function'."
  ),
  'method_kwargs': flags.DEFINE_string(
    'method_kwargs', '{}', 'Arguments of the method, as in \'{"high": 0.3}\'.'
  ),
  'fields': flags.DEFINE_string(
    'fields',
    None,
    "A function 'module:function' from a batch [P,G,T] to a dict of arrays: "
    'fields that your own method requires, or reward_parts of several rewards.',
  ),
  'wide': flags.DEFINE_bool(
    'wide', False, 'Show all columns, which takes about 160 characters.'
  ),
  'plot': flags.DEFINE_bool(
    'plot', False, 'Draw gradient against ratio into audit-NAME.png.'
  ),
  'study': flags.DEFINE_string(
    'study',
    None,
    'The study to run: brakes, brakes_updates, brakes_smollm2, normalization '
    'or normalization_smollm2, which train; an experiment on the claims of two '
    'papers, such as coasting_ratio; or all of these experiments.',
  ),
  'full': flags.DEFINE_bool(
    'full', False, 'Take more seeds and longer runs in an experiment.'
  ),
  'seeds': flags.DEFINE_integer(
    'seeds', 3, 'Runs of each arm, with seeds 0, 1, ...'
  ),
  'steps': flags.DEFINE_integer('steps', 30, 'Rollouts of each run.'),
  'only': flags.DEFINE_list(
    'only', [], 'Arms to run and to show, separated by commas. Default: all.'
  ),
}
