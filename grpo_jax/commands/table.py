"""The commands and their flags, as data."""

from typing import Any
from typing import NamedTuple

REPEATED = 'repeated'


class Flag(NamedTuple):
  """A flag of some commands.

  Attributes:
    meaning: Its help text.
    kind: Its type, as a field of a config has it; `REPEATED` for a text that
      may be given any number of times.
    default: Its value where it is not given.
  """

  meaning: str
  kind: Any = str
  default: Any = None


class Command(NamedTuple):
  """One command: what runs it, what it does, and the flags that it reads.

  Attributes:
    run: A module of `grpo_jax.commands` and a function in it, which takes
      `arguments.Arguments` and returns the exit code; None is 0.
    what: What it does, in a line.
    flags: The flags that it reads.
    takes: Flags whose values need no names, in this order, as in `audit dapo`.
      The last, if its name begins with a star, may be given any number of
      times, and with a question mark it may be left out.
  """

  run: str
  what: str
  flags: tuple[str, ...]
  takes: tuple[str, ...] = ()


SEVERAL = 'coordinator', 'num_processes', 'process_id'
COMMANDS = {
  'train': Command(
    'train:run',
    'Trains a model, or continues a run; prints one JSON line at the end.',
    (
      'config', 'workdir', 'allow_changed', 'check', 'replay',
      'profile_steps', *SEVERAL, 'json', 'verbose',
    ),
  ),
  'eval': Command(
    'eval_and_sample:run_eval',
    'Measures pass@k, majority@k and lengths on held-out problems.',
    (
      'workdir', 'config', 'checkpoint', 'examples', 'samples', 'k',
      'temperature', 'max_tokens', 'completions', *SEVERAL, 'json', 'verbose',
    ),
  ),
  'convert': Command(
    'convert:run',
    'Writes a model as a Hugging Face folder, or its adapter for peft.',
    (
      'source', 'folder', 'checkpoint', 'adapter', 'dtype', 'shard_gb', 'push',
      'public', 'overwrite', 'json', 'verbose',
    ),
    takes=('source', 'folder'),
  ),
  'methods': Command(
    'audit:run_table',
    'Prints a table of all methods, measured by evaluating each of them.',
    ('wide', 'json', 'verbose'),
  ),
  'audit': Command(
    'audit:run',
    'Measures what a method does to gradients and to clipped tokens.',
    ('method', 'method_kwargs', 'fields', 'plot', 'json', 'verbose'),
    takes=('method',),
  ),
  'sample': Command(
    'eval_and_sample:run_sample',
    'Completes given prompts, and writes tokens as they come.',
    (
      'workdir', 'config', 'checkpoint', 'prompt', 'prompts', 'number',
      'temperature', 'max_tokens', *SEVERAL, 'json', 'verbose',
    ),
  ),
  'generate': Command(
    'generate:run',
    'Draws rollouts for a run that learns elsewhere, until it is done.',
    ('learner', 'secret', 'wait_secs', *SEVERAL, 'json', 'verbose'),
  ),
  'serve': Command(
    'serve:run',
    "Answers clients of OpenAI's API by a policy, until Ctrl-C.",
    (
      'source', 'config', 'checkpoint', 'host', 'port', 'key', 'rows',
      'context_tokens', 'as_engine', 'json', 'verbose',
    ),
    takes=('?source',),
  ),
  'data': Command(
    'show_data:run',
    'Shows prompts as models read them; of a FILE, which fields read it.',
    (
      'file', 'config', 'show', 'records', 'prompt_field', 'answer_field',
      'json', 'verbose',
    ),
    takes=('*file',),
  ),
  'environment': Command(
    'environment:run',
    'Plays an environment without a model, and tells what it is like.',
    (
      'name', 'episodes', 'kwargs', 'example', 'config', 'seed', 'max_turns',
      'episode_secs', 'replies', 'tokenizer', 'json', 'verbose',
    ),
    takes=('?name',),
  ),
  'plan': Command(
    'plan:run',
    'Tells what a run would need on machines that are not there.',
    (
      'config', 'topology', 'num_slices', 'mesh', 'estimate', 'search', 'split',
      'reached', 'generators', 'price', 'against', 'json', 'verbose',
    ),
  ),
  'doctor': Command(
    'doctor:run',
    'Measures new machines: devices, memory, links, workdir. Run it first.',
    (
      'workdir', 'learner', 'secret', 'engine', 'dialect', 'model', 'key_env',
      *SEVERAL, 'json', 'verbose',
    ),
  ),
  'report': Command(
    'report:run',
    'Writes one HTML page about a run, or about several beside each other.',
    ('workdir', 'run', 'out', 'json', 'verbose'),
    takes=('workdir', '*run'),
  ),
  'study': Command(
    'study:run',
    'Compares runs that differ in one thing, or tests claims of two papers.',
    (
      'study', 'workdir', 'config', 'seeds', 'steps', 'only', 'out', 'full',
      'run', 'json', 'verbose',
    ),
    takes=('study',),
  ),
}  # fmt: skip
# Flags of `study` that only one kind of studies reads.
EXPERIMENT_FLAGS = 'out', 'full', 'run'
TRAINING_FLAGS = 'workdir', 'config', 'seeds', 'steps', 'only'

FLAGS = {
  'config': Flag(
    'A Python file with get_config; an argument for it follows a colon.',
  ),
  'workdir': Flag(
    'Directory of the run, or gs://... train goes on from what is in it; '
    'doctor writes a file there, and deletes it; report only reads it.',
  ),
  'verbose': Flag('Show the traceback of an error too.', bool, False),
  'json': Flag('Print the answer as JSON, for a program to read.', bool, False),
  'coordinator': Flag(
    'HOST:PORT of the first of several processes. Not needed where Cloud TPU, '
    'Slurm or Kubernetes tell it.',
    str,
    '',
  ),
  'num_processes': Flag(
    'How many processes train together, with --coordinator.', int
  ),
  'process_id': Flag(
    'Number of this process, from 0, with --coordinator.', int
  ),
  'learner': Flag(
    'HOST:PORT of the run to draw for, its config.generator.listen.', str, ''
  ),
  'secret': Flag(
    'File with the secret of the run, its config.generator.secret.', str, ''
  ),
  'wait_secs': Flag(
    'How long to wait for a learner that does not answer.', float, 600.0
  ),
  'topology': Flag(
    'Machines to plan for, such as v5p:4x4x4, v5e:16x16 or h100-sxm:2x8.',
    str,
    '',
  ),
  'num_slices': Flag(
    'How many such groups of machines, instead of config.mesh.slices.', int
  ),
  'mesh': Flag(
    'Sizes of the mesh, as in data=2,fsdp=16,tensor=4, instead of those of '
    'the config.',
    str,
    '',
  ),
  'estimate': Flag(
    'Answer by arithmetic, within seconds, and compile nothing.', bool, False
  ),
  'search': Flag(
    'Try all meshes by arithmetic, and compile the best until so many fit.',
    int,
    0,
  ),
  'split': Flag(
    'Try all ways to divide the devices, slices or nodes between sampling and '
    'learning, by arithmetic.',
    bool,
    False,
  ),
  'reached': Flag(
    'Which shares of their bounds sampling and learning are assumed to reach '
    'by --split, as in 0.5,0.4; --against tells those of a run.',
    str,
    '',
  ),
  'generators': Flag(
    'Plan for so many jobs that sample for the run, each on a --topology of '
    'its own.',
    int,
    0,
  ),
  'price': Flag('Of a chip for an hour, to tell what tokens cost.', float),
  'against': Flag(
    'Workdir of a run, whose times are laid beside the least possible.',
    str,
    '',
  ),
  'allow_changed': Flag(
    'Fields in which the config may differ from that of the run in the '
    'workdir, as in optim.lr,rewards.weight: the run goes on with the new '
    'values. Most fields can never change (grpo_jax/run/README.md).',
    tuple[str, ...],
    (),
  ),
  'check': Flag(
    'Show the config, shapes, memory and the first rollout, and train nothing.',
    bool,
    False,
  ),
  'replay': Flag(
    'Train on the completions in this directory, which an earlier run has '
    'written with log.completions_every_steps=1, instead of sampling.',
  ),
  'profile_steps': Flag(
    'FIRST,LAST: record these rollouts, counted from 1, with the JAX profiler.',
    tuple[int, ...],
    (),
  ),
  'checkpoint': Flag(
    "Checkpoint to load: a rollout's number, 'latest' or 'best'.",
    str,
    'latest',
  ),
  'source': Flag(
    'The model: a Hugging Face folder, a name on the Hub, a .gguf '
    'file, package:NAME for the .gguf file in an installed package, or the '
    'workdir of a run.',
  ),
  'host': Flag(
    'Name or address to listen at. All but those that this machine alone '
    'reaches need --key.',
    str,
    '127.0.0.1',
  ),
  'port': Flag('Port to listen at; 0 takes any that is free.', int, 8000),
  'key': Flag(
    'What clients must give as their API key. Better in the environment '
    'variable GRPO_JAX_SERVE_KEY, which other users of the machine cannot see.',
    str,
    '',
  ),
  'rows': Flag('How many requests to draw at once; others wait.', int, 8),
  'context_tokens': Flag(
    'The most tokens of a prompt and its answer. Default: as the run has it; '
    'of a model as it was made for, at most 4096.',
    int,
  ),
  'engine': Flag(
    'The address of a server of vLLM or SGLang, as in http://gpu-0:8000: only '
    'whether it answers as config.engine needs it is examined.',
    str,
    '',
  ),
  'dialect': Flag('How that server is asked: vllm or sglang.', str, 'vllm'),
  'model': Flag('The name by which vLLM has the model.', str, ''),
  'key_env': Flag(
    "The environment variable with the server's API key.", str, ''
  ),
  'as_engine': Flag(
    'Also answer the calls of vLLM and SGLang by which a learner samples, and '
    'replaces the weights by those of a folder on this machine.',
    bool,
    False,
  ),
  'folder': Flag('The folder to write, which must be new or empty.'),
  'adapter': Flag(
    "Write only a run's LoRA adapter, as a folder for peft, instead of adding "
    'it to the weights.',
    bool,
    False,
  ),
  'dtype': Flag(
    'Dtype of the weights in the folder: float32, or bfloat16 for half the '
    'size, which loses changes below 1/256 of a weight.',
    str,
    'float32',
  ),
  'shard_gb': Flag(
    'Largest file of weights, in GB; more go into the next.', float, 5.0
  ),
  'push': Flag(
    'Also push the folder to this repository of the Hugging Face Hub, '
    'owner/name, with a card; HF_TOKEN must be set.',
    str,
    '',
  ),
  'public': Flag('Whether everybody may see what is pushed.', bool, False),
  'overwrite': Flag(
    'Push over a repository that holds what was not pushed from here.',
    bool,
    False,
  ),
  'examples': Flag(
    'Held-out problems to judge; 0 takes as many as the config says.',
    int,
    0,
  ),
  'samples': Flag('Completions to sample per problem.', int, 8),
  'k': Flag(
    'Values of k for pass@k and majority@k, none above --samples.',
    tuple[int, ...],
    (1, 8),
  ),
  'temperature': Flag(
    "Sampling temperature; 0 is greedy. Default: the config's.", float
  ),
  'max_tokens': Flag(
    "Longest completion, in tokens. Default: the config's.", int
  ),
  'completions': Flag('Parquet file to write completions and rewards into.'),
  'prompt': Flag(
    'A prompt to complete. The flag may be repeated.', REPEATED, ()
  ),
  'prompts': Flag('File with a prompt on each line; - reads standard input.'),
  'number': Flag('Completions to sample per prompt.', int, 1),
  'file': Flag(
    'A file, a folder or a name on the Hub to look at, without a config. May '
    'be repeated.',
    REPEATED,
    (),
  ),
  'prompt_field': Flag(
    'Where the prompt of a FILE is, as in data.prompt_field; else it is '
    'looked for.',
  ),
  'answer_field': Flag(
    'Where the answer of a FILE is, as in data.answer_field; else it is '
    'looked for.',
  ),
  'show': Flag(
    'Prompts to show of the training data, and of those held out.',
    int,
    2,
  ),
  'records': Flag(
    'Records to read of each source, chosen at random; 0 reads all.',
    int,
    20_000,
  ),
  'name': Flag(
    "The environment: 'module:Thing', or a name such as calculator or "
    'textarena:Wordle-v0-raw.',
  ),
  'episodes': Flag('Episodes to play.', int, 20),
  'kwargs': Flag(
    'Arguments of the environment, as in \'{"start": 3}\'.', str, '{}'
  ),
  'example': Flag(
    'The record that the environment is given, as in \'{"number": 7}\'; '
    'with --config the records are those of its first data.train.',
    str,
    '{}',
  ),
  'seed': Flag(
    'Seed of the first episode; each next one has the next number.', int, 0
  ),
  'max_turns': Flag(
    'End an episode after this many turns (default: as the config has it, or '
    '16).',
    int,
  ),
  'episode_secs': Flag(
    'The longest that the environment may take for an episode.', float, 60.0
  ),
  'replies': Flag(
    'File with a text on each line; the policy says one of them, drawn by the '
    'seed.',
  ),
  'tokenizer': Flag(
    'Count tokens, and show what this chat template makes of the messages: a '
    'folder, a .gguf file or package:NAME (default: that of the config, if it '
    'names the environment).',
  ),
  'run': Flag(
    'Workdir of another run; for experiments, of a study that has trained '
    'runs, to show what these measured too. The flag may be repeated.',
    REPEATED,
    (),
  ),
  'out': Flag(
    'A page to write (default: report.html), or for experiments a folder.'
  ),
  'method': Flag("A method of losses.methods, or your own 'module:function'."),
  'method_kwargs': Flag(
    'Arguments of the method, as in \'{"high": 0.3}\'.', str, '{}'
  ),
  'fields': Flag(
    "A function 'module:function' from a batch [P,G,T] to a dict of arrays: "
    'fields that your own method requires, or reward_parts of several rewards.',
  ),
  'wide': Flag(
    'Show all columns, which takes about 160 characters.', bool, False
  ),
  'plot': Flag('Draw gradient against ratio into audit-NAME.png.', bool, False),
  'study': Flag(
    'The study to run: brakes, brakes_updates, brakes_smollm2, normalization, '
    'normalization_smollm2, turns, staleness or phases, which train; an '
    'experiment on the claims of two papers, such as coasting_ratio; or all of '
    'these experiments.',
  ),
  'full': Flag(
    'Take more seeds and longer runs in an experiment.', bool, False
  ),
  'seeds': Flag('Runs of each arm, with seeds 0, 1, ...', int, 3),
  'steps': Flag('Rollouts of each run.', int, 30),
  'only': Flag(
    'Arms to run and to show, separated by commas. Default: all.',
    tuple[str, ...],
    (),
  ),
}
