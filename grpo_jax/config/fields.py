"""Every field of a config, with its default, its unit and its help text.

All of it is one file, because it is one table: who looks for an option reads it
from top to bottom, as the page of all options is made from it.
"""

import dataclasses
from typing import Any

from grpo_jax.config import checks

# Whether a field may change when a run goes on.
FREE = 'free'  # how the work is divided, kept or shown, not what is learned
ALLOWED = 'allowed'  # what is learned, if the start says so: --allow_changed
FIXED = 'fixed'


def field(
  default: Any,
  meaning: str,
  bools: tuple[str, ...] = (),
  change: str = FIXED,
) -> Any:
  """A field of a config.

  Args:
    default: Its value where nothing else is said.
    meaning: Its help text.
    bools: What False and True stand for, where it may also be a bool.
    change: Whether it may change when a run goes on: `FREE`, `ALLOWED` or
      `FIXED`.
  """
  metadata = {'meaning': meaning, 'bools': bools, 'change': change}
  if isinstance(default, dict):
    return dataclasses.field(default_factory=default.copy, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Model:
  """The transformer. The tokenizer says how many token ids it has."""

  path: str = field(
    '',
    'Where the weights, the shape and the tokenizer come from: a Hugging Face '
    "folder, a name on the Hugging Face Hub ('owner/name', also "
    "'owner/name@revision' and 'owner/name:file.gguf'; with hf:// before it "
    "never a path), the address of such a folder in a bucket ('gs://...'), a "
    ".gguf file, 'package:NAME' for the .gguf file in "
    "an installed package, or the workdir of another run. '': random weights "
    "of the shape below. 'module:function' names a function that returns a "
    'model of your own; see grpo_jax/models/README.md.',
  )
  num_layers: int = field(3, 'Number of layers.')
  width: int = field(128, 'Size of the residual stream.')
  num_heads: int = field(4, 'Number of query heads.')
  num_kv_heads: int = field(
    4,
    'Number of key and value heads; divides num_heads.',
  )
  head_dim: int = field(32, 'Size of one head, an even number.')
  mlp_width: int = field(
    256,
    'Number of hidden units in the SwiGLU of each layer.',
  )
  rope_base: float = field(10_000.0, 'Base of the rotary frequencies.')
  norm_epsilon: float = field(
    1e-6,
    'Added to the mean square in every RMSNorm.',
  )
  qk_norm: bool = field(False, 'Whether query and key heads pass an RMSNorm.')
  qkv_bias: bool = field(False, 'Whether queries, keys and values have biases.')
  tied_embeddings: bool = field(False, 'Output layer = transposed embedding.')
  window_tokens: tuple[int, ...] = field(
    (0,),
    'Sliding windows: how many tokens a layer attends to, the token itself '
    'and those just before it. One number per layer, repeated over all '
    'layers, as in (1024, 1024, 0). 0: no window.',
  )
  compute_dtype: str = field(
    'float32',
    "Dtype of activations, 'float32' or 'bfloat16', which accelerators "
    'compute faster. Parameters stay float32.',
  )
  residual_dtype: str = field(
    'float32',
    "Dtype of the sum to which the layers add: 'float32', or 'bfloat16' if "
    'they compute in it. Then sampler and learner differ by a third more, and '
    'the inputs of layers take half the memory.',
  )
  remat: str = field(
    'none',
    'What the backward pass computes again instead of keeping it, for less '
    "memory and more time. 'none': little of a layer. 'layer': all of it, "
    "from its input. 'attention': as 'layer', but for attention, whose output "
    "is kept too (that of cuDNN is computed again). 'offload': as 'layer', "
    'and the inputs lie in the memory of the host until they are needed. True '
    "stands for 'layer', and False for 'none'.",
    bools=('none', 'layer'),
    change=FREE,
  )
  unroll: bool = field(
    False,
    'Whether layers are compiled one by one instead of as a loop. Compiling '
    'takes longer; running is faster for a few layers.',
    change=FREE,
  )
  attention: str = field(
    'auto',
    "Code that computes attention in training and over prompts: 'xla' on any "
    "device, 'splash' on TPUs, 'cudnn' on GPUs with bfloat16. 'auto' takes "
    'the one for the device.',
    change=FREE,
  )
  beyond_context: bool = field(
    False,
    'Whether prompt and completion may together have more tokens than the '
    'model of `path` was made for: max_position_embeddings in its '
    'config.json, or what its YaRN scaling reaches. Such a run is refused '
    'otherwise, because the model gets worse there without a sign.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: the weights of the model stay as they are."""

  rank: int = field(0, 'Rank of the adapters; 0 trains the weights themselves.')
  alpha: float = field(
    32.0,
    "The adapters' product is multiplied by alpha / rank.",
  )
  targets: tuple[str, ...] = field(
    ('*',),
    'Which weights get an adapter, as patterns: attention/query, '
    'attention/key, attention/value, attention/output, mlp/gate, mlp/up, '
    'mlp/down, and those of layers with a state, convolution/* and delta/*. '
    'Experts get none.',
  )
  base_dtype: str = field(
    'float32',
    "Dtype of the weights beside the adapters: 'float32', or 'bfloat16' for "
    'half the memory, to which weights of more digits are rounded. Or what '
    "the package qwix quantizes the matrices of layers to: 'int8', or 'nf4' "
    "of 4 bits (QLoRA); embedding and output layer are 'bfloat16' then.",
  )


@dataclasses.dataclass(frozen=True)
class Source:
  """One of several sources of prompts; see `Data.train`."""

  name: str = field(
    'arithmetic',
    "As in data.train: a built-in task, files, a folder, 'hf:OWNER/NAME', "
    "'tfds:NAME', 'reasoning_gym:TASK', or your own as 'module:function'.",
  )
  weight: float = field(
    1.0,
    'Share of the prompts, relative to the other weights. Held-out sources '
    'have none: they are read one after the other.',
  )
  kwargs: dict[str, Any] = field(
    {},
    'Arguments of the source. Files take prompt_field and answer_field, where '
    "they differ from those of the config; folders, 'hf:OWNER/NAME' and "
    "'tfds:NAME' also split, such as 'test'; 'hf:OWNER/NAME' also config, "
    "the subset of that name; 'tfds:NAME' also data_dir; 'reasoning_gym:TASK' "
    'size, seed, curriculum and those of the task; a function its own.',
  )


@dataclasses.dataclass(frozen=True)
class Data:
  """Prompts and tokenizer: the built-in arithmetic, or files of your own."""

  train: str | tuple[Source, ...] = field(
    'arithmetic',
    "Prompts to train on: 'arithmetic' (sums), 'largest' (the largest of four "
    "numbers), 'episodes' (numbers, for an environment that needs no more), "
    'files that end in .jsonl, .parquet or .array_record (* matches '
    "several), 'hf:OWNER/NAME' for a data set of the Hugging Face Hub, a "
    'folder that save_to_disk of Hugging Face datasets has '
    "written, 'tfds:NAME' for a prepared data set of TensorFlow Datasets, "
    "'reasoning_gym:TASK' for made-up problems, a function of your own as "
    "'module:function' that returns an object with a length and dicts, or "
    "several of these with weights: ({'name': 'a.jsonl', 'weight': 3.0}, "
    "{'name': 'b.parquet', 'weight': 1.0}).",
  )
  heldout: str | tuple[Source, ...] = field(
    'arithmetic',
    'Problems to evaluate on, named as in data.train; of several sources one '
    "after the other. '': do not evaluate.",
  )
  prompt_field: str = field(
    'prompt',
    'Field of a record in a file that has the prompt: a text, or a list of '
    'messages; a path within dicts and lists has points in it, and several '
    "texts are joined by a plus, as in 'instruction+input'.",
  )
  answer_field: str = field(
    'answer',
    'Field of a record in a file that has the reference answer: a text, a '
    'number or a list of which any is right; or a path to it, as in '
    "'reward_model.ground_truth'. '': no reward needs an answer.",
  )
  last_turn: str = field(
    'answer',
    'What becomes of the last turn of a chat that ends with the assistant: '
    "'answer' takes it off the prompt, and it is the answer of a record that "
    "has none; 'prefill' leaves it, and completions go on where it ends.",
  )
  tokenizer: str = field(
    'arithmetic',
    "Tokenizer: '' for that of the model in model.path, 'arithmetic' for "
    "single characters, 'package:NAME' for the GGUF file in an installed "
    'package, a name on the Hugging Face Hub, or the path of a Hugging Face '
    'folder, a .gguf file, a tokenizer.json or a workdir.',
  )
  eos_tokens: tuple[str, ...] = field(
    ('<eos>',),
    'Tokens that end a completion, for a tokenizer.json. Folders and .gguf '
    'files name their own, which are taken while this is () or the default.',
  )
  pad_token: str = field(
    '<pad>',
    'Token that fills up rows, for a tokenizer.json. Folders and .gguf files '
    "name their own, which is taken while this is '' or the default.",
  )
  chat: bool = field(
    False,
    "Whether prompts are written by the tokenizer's chat template. A prompt "
    'that is a text then is a message of the user.',
  )
  system_prompt: str = field(
    '',
    "Content of a system message before every chat that has none. '': none.",
  )
  chat_kwargs: dict[str, Any] = field(
    {},
    "Variables for the chat template, such as {'enable_thinking': False}.",
  )
  completion_prefix: str = field(
    '',
    "How every completion begins, such as 'Answer:'. The model reads this "
    'text, but does not sample it, and rewards do not see it.',
  )
  prompt_buckets: tuple[int, ...] = field(
    (),
    'Widths to which prompts are padded, tokens; the largest is the longest '
    'prompt allowed. A program is compiled for each width that is used. (): '
    'one width, that of the longest prompt in the data; of more than 20,000 '
    'records, or 300 that a program makes, a quarter above the longest in a '
    'sample.',
  )
  completion_buckets: tuple[int, ...] = field(
    (),
    'The same for completions; the largest must hold sampler.max_tokens. (): '
    'one width, sampler.max_tokens, or that of the longest demonstration.',
  )
  too_long: str = field(
    'refuse',
    "What to do with a prompt that is longer than the largest width: 'refuse' "
    'is an error, at the start if the prompt is among those that are encoded '
    "there, and otherwise later, from which the run can go on; 'drop' takes "
    'the next prompt and counts the others (metrics prompts_too_long, '
    'heldout_too_long).',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Reward:
  """One reward function. The reward of a completion is their weighted sum."""

  name: str = field(
    'exact_match',
    "A function of grpo_jax.rewards, 'reward_model', or your own as "
    "'module:function'.",
  )
  weight: float = field(
    1.0,
    'Factor of this reward in the sum; 0 measures it without training on it.',
    change=ALLOWED,
  )
  kwargs: dict[str, Any] = field(
    {},
    'Arguments of the function besides prompt, completion and example.',
  )
  label: str = field(
    '',
    "What metrics and files call this reward; '' takes the name. Two rewards "
    'may have one function if their labels differ.',
  )
  where: str = field(
    'auto',
    "Where it is called: 'workers' are processes with limits, 'here' is the "
    "process of the run. 'auto': in workers, but for functions that are "
    'marked by grpo_jax.rewards.bounded or given as objects in Python.',
  )
  on_failure: str = field(
    'invalid',
    "What becomes of a completion on which it fails in a worker: 'invalid' "
    "leaves it out of training, 'reward' gives it failed_reward.",
  )
  failed_reward: float = field(
    0.0,
    'What this reward then is, before its weight.',
  )
  required: bool = field(
    False,
    'Whether a completion for which it returns None is left out of training. '
    'Otherwise the sum is over the rewards that have judged it.',
  )


@dataclasses.dataclass(frozen=True)
class Workers:
  """Processes that call reward functions, each under limits."""

  number: int = field(
    0,
    'How many beside each process of the run; 0: one for each core that it '
    'may use, at most 16.',
    change=FREE,
  )
  time_limit_secs: float = field(
    10.0,
    'The most processor time of one call of a reward function and of all that '
    'it starts, seconds; starting and importing are not counted. So a busy '
    'machine fails no call. One that only waits ends at wall_limit_secs.',
    change=FREE,
  )
  memory_limit_gib: float = field(
    4.0,
    'The most memory of one of them and of all that it starts, GiB. It limits '
    'address space, of which some libraries take more than they use.',
    change=FREE,
  )
  start_limit_secs: float = field(
    120.0,
    'The longest that starting one and importing a reward may take, seconds.',
    change=FREE,
  )
  wall_limit_secs: float = field(
    0.0,
    'The longest that one call may take by the clock, seconds; 0: ten times '
    'time_limit_secs.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Environment:
  """What the policy talks to, in episodes of several turns.

  `sampler.max_tokens` then is the limit of a turn, `sampler.group` the episodes
  of a record, and `data.completion_buckets` hold all that follows what the
  episodes of a record read first.
  """

  name: str = field(
    '',
    "The environment: your own as 'module:Thing', or one of another package, "
    "as 'textarena:NAME'; see the README of environments. 'agent' is that of "
    "config.agent. '': none, and each completion is a single turn.",
  )
  kwargs: dict[str, Any] = field({}, 'Arguments of the environment.')
  others: dict[str, Any] = field(
    {},
    'More environments, by the names that records have in their field '
    "'environment': {'wordle': 'textarena:Wordle-v0'}, or with arguments "
    "{'shop': {'name': 'my_lab.envs:Shop', 'kwargs': {'goods': 5}}}. Records "
    'without the field begin environment.name.',
  )
  call_format: str = field(
    'auto',
    "How the model writes calls of tools: 'hermes', 'xml', 'llama_json', "
    "'pythonic', 'gemma', 'json_block', or your own as 'module:function'. "
    "'auto' reads it from the chat template.",
  )
  history: str = field(
    'append',
    "What a turn reads of those before it: 'append' all that was read and "
    "sampled, as it was; 'template' the whole chat as the chat template writes "
    'it then, which may leave out what was thought in earlier turns.',
  )
  seed: str = field(
    'group',
    "Which seed an episode begins with: 'group' gives all episodes of a record "
    "the same, so that they start alike; 'episode' gives each its own.",
  )
  max_turns: int = field(16, 'Most turns of an episode.')
  episode_tokens: int = field(
    0,
    'Most tokens of all turns of an episode together; 0: as many as fit into '
    'its context.',
  )
  context_tokens: int = field(
    0,
    'Most tokens of an episode, what it reads included; 0: as many as the '
    'largest of data.completion_buckets.',
  )
  result_tokens: int = field(
    2048,
    'Most tokens of the result of a tool; a longer one is cut in its middle.',
  )
  where: str = field(
    'workers',
    "Where episodes are played: 'workers' are processes with limits, 'here' is "
    'the process of the run.',
    change=FREE,
  )
  processes: int = field(
    0,
    'Workers beside each process of the run; 0: one for each core that it may '
    'use, at most 16.',
    change=FREE,
  )
  sessions: int = field(8, 'Episodes that a worker plays at once.', change=FREE)
  tool_secs: float = field(
    30.0, 'The longest that a call of a tool may take, seconds.', change=FREE
  )
  episode_secs: float = field(
    600.0,
    'The longest that the environment may take for an episode, seconds; '
    'waiting for the policy is left out.',
    change=FREE,
  )
  memory_limit_gib: float = field(
    4.0,
    'The most memory of a worker and of all that it starts, GiB.',
    change=FREE,
  )
  retries: int = field(
    1,
    'How often an episode begins again whose server was away, or whose process '
    'another episode has ended.',
    change=FREE,
  )
  failed_share: float = field(
    0.5,
    'Share of the episodes of a rollout that may fail; if more do, the run is '
    'saved and ends. 1: it always goes on.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Agent:
  """Somebody's agent, which plays the episodes of environment.name='agent'.

  Its client of OpenAI's API asks a server beside the episode; see the README of
  serving.
  """

  command: str = field(
    '',
    "A command that is the agent, such as 'python my_agent.py'. It finds the "
    'server in OPENAI_BASE_URL and OPENAI_API_KEY, and its record as JSON on '
    'the first line of standard input.',
  )
  function: str = field(
    '',
    "Or a function 'module:function' that is the agent, called with example, "
    'base_url and api_key.',
  )
  kwargs: dict[str, Any] = field({}, 'More arguments of the function.')
  variables: dict[str, Any] = field(
    {}, 'More variables of the environment of the command: texts.'
  )
  readable: tuple[str, ...] = field(
    (),
    'More files and folders that the command may read, beside its interpreter, '
    'its packages and the files among its arguments.',
  )
  confine: str = field(
    'auto',
    'How the command is kept from all but its server, see the README of '
    "rewards: 'namespaces', 'landlock', 'auto' for the first that this system "
    "offers, or 'no'.",
  )
  trains: str = field(
    '',
    "A function 'module:function' of (messages, tools) that says whether the "
    'answer to a chat is learned from; all are without it.',
  )
  trust_agent: bool = field(
    False,
    'Whether what the agent says of its own worth counts: what it returns or '
    'prints last, the rewards that it posts, the turns that it leaves out. Not '
    'if code that the policy writes runs in its process.',
  )


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How the completions of a rollout are sampled."""

  prompts: int = field(32, 'Prompts per rollout.')
  group: int = field(
    16,
    'Completions per prompt. More make the advantages less noisy, and a hard '
    'prompt more likely to have one that is right.',
  )
  max_tokens: int = field(
    5,
    'Longest completion, tokens, the end token included; with an environment '
    'the longest turn.',
  )
  min_tokens: int = field(0, 'Tokens before an end token may be drawn.')
  temperature: float = field(
    1.0,
    'Temperature of the policy: the sampler draws at it, and the learner '
    'trains the policy at it.',
  )
  top_k: int = field(
    0,
    'Draw from this many most likely tokens; 0 turns it off.',
  )
  top_p: float = field(
    1.0,
    'Draw from the fewest tokens with this much probability; 1 turns it off.',
  )
  min_p: float = field(
    0.0,
    'Draw from tokens at least this likely, relative to the likeliest; 0: off.',
  )
  stop_strings: tuple[str, ...] = field((), 'Texts that end a completion.')
  max_rows: int = field(
    4096,
    'Completions that are decoded at once. Lower it when sampling runs out of '
    'memory; the rest waits for free rows.',
    change=FREE,
  )
  tensor: int = field(
    0,
    'Devices over which heads, hidden units and vocabulary are split while '
    'sampling; they are taken from mesh.fsdp, and then from mesh.data. More '
    'split the weights that decoding reads into smaller parts. 0: as many as '
    'mesh.tensor.',
  )
  resample_rounds: int = field(
    0,
    'Times that a rollout may draw further prompts for groups whose '
    'completions all earned the same, from which group-based methods learn '
    'nothing; 0 turns it off.',
  )
  retire_solved: bool = field(
    False,
    'Whether a prompt that all of its completions solved is never drawn again.',
  )
  ahead: int = field(
    0,
    'How many rollouts may be drawn and judged before their turn, by policies '
    'that are at most so many updates of a rollout older than the one that '
    'learns. 0: each rollout is drawn by the policy that learns from it. '
    'They are drawn while updates run: on devices of their own '
    '(generator.devices), by jobs (generator.listen), or on the one device '
    'that learns too, which saves time where judging is slow. '
    'Prompts that only resample_rounds, retire_solved or data.too_long need '
    'are read in another thread. '
    "Give learner.anchor='sampler' with it, or a method that has importance "
    'weights of the sampler, such as truncate_token_importance: each corrects '
    'for the older policy, and a warning says where nothing does.',
  )


@dataclasses.dataclass(frozen=True)
class Generator:
  """Devices, or jobs, that sample while others learn."""

  devices: int = field(
    0,
    'How many devices, the last of the process, sample and do nothing else, '
    'while those of config.mesh learn. sampler.tensor splits the weights over '
    'them. 0: all devices sample, and then learn.',
    change=FREE,
  )
  updates: str = field(
    'between',
    "When sampling takes new weights: 'between' two rollouts, each of which is "
    'drawn by the oldest version that sampler.ahead allows, so that a run is a '
    "function of its config; or 'inflight', between two tokens, as soon as "
    'they are there. That is no function of the config, but with '
    'log.completions_every_steps=1 `train --replay` repeats the learner.',
  )
  every: int = field(
    1,
    'Each so many-th version goes to the devices that sample, at most '
    'sampler.ahead + 1.',
  )
  parts: int = field(
    1,
    'Equal parts into which the prompts of a rollout fall, each of which is '
    'drawn and judged by itself, one after another here, or at the same time '
    'by several jobs.',
  )
  listen: str = field(
    '',
    'HOST:PORT at which a run waits for jobs that sample for it on machines '
    "of their own, as in '0.0.0.0:8470': `grpo-jax generate --learner=...`. "
    'They may come and go. Empty: the run samples itself.',
    change=FREE,
  )
  secret: str = field(
    '',
    'A file whose text the run and its jobs share; each message is signed with '
    'it. Without one only jobs on the same machine are heard.',
    change=FREE,
  )
  weights: str = field(
    'auto',
    "How jobs get weights: 'transfer', from device to device through "
    "jax.experimental.transfer; 'files', through the workdir, which both must "
    "see; or 'auto', by transfer where JAX can, but not from a CPU of one "
    'core, which sends nothing while it computes.',
    change=FREE,
  )
  wait_secs: float = field(
    600.0,
    'How long a run waits for a job while there is none. Then it is saved and '
    'ends with exit code 75.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Engine:
  """What samples: the devices of the run, or servers of others."""

  kind: str = field(
    'local',
    "'local': this package's own engine. 'http': servers of vLLM or SGLang, "
    'which run elsewhere; the run reads their tokens and log-probabilities, '
    'and gives them its weights.',
  )
  dialect: str = field(
    'vllm', "How the servers of kind='http' are asked: 'vllm' or 'sglang'."
  )
  urls: tuple[str, ...] = field(
    (),
    'The addresses of the servers, each of which has the model, as in '
    "('http://127.0.0.1:8000',). Completions of a prompt go to one of them.",
    change=FREE,
  )
  model: str = field(
    '',
    "The name by which vLLM has the model (--served-model-name); '': "
    'model.path.',
    change=FREE,
  )
  folder: str = field(
    '',
    'A folder that the run and the servers see at the same path, for weights: '
    "adapters alone with lora.rank, else the whole model. '': a temporary "
    'one, for servers on the same machine.',
    change=FREE,
  )
  dtype: str = field(
    'bfloat16',
    "Of the weights that are written for the servers: 'bfloat16' or 'float32'.",
  )
  key_env: str = field(
    '',
    "The environment variable with the servers' API key; '': they want none.",
    change=FREE,
  )
  concurrency: int = field(
    256, 'Completions that are asked for at once, at most.', change=FREE
  )
  timeout_secs: float = field(
    600.0,
    'The longest that one completion may take, and one change of weights.',
    change=FREE,
  )
  retries: int = field(
    5,
    'How often a request is repeated that gets no answer, or 408, 429 or 5xx. '
    'Another server is asked then.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Optim:
  """The optimizer, its schedule, and what is put around it."""

  name: str = field(
    'adamw',
    "The optimizer: 'adamw', 'adafactor', 'lion', 'muon', 'sgd', or your own "
    "as 'module:function', which returns an optax transformation "
    '(optim/README.md). All but adamw want another learning rate.',
  )
  kwargs: dict[str, Any] = field(
    {},
    "Arguments of the optimizer besides the fields here, such as {'momentum': "
    '0.9} for sgd. Those in a config are left out where the command line '
    'chooses another optimizer than the config.',
  )
  lr: float = field(
    3e-4,
    'Learning rate at the peak of the schedule.',
    change=ALLOWED,
  )
  warmup_steps: int = field(
    0,
    'Updates over which the learning rate rises from 0 to its peak. Counted, '
    'as for the decay, are all updates of the run, also those that are '
    'skipped.',
    change=ALLOWED,
  )
  decay: str = field(
    'constant',
    'Course of the learning rate after its peak, over the whole run: '
    "'constant', 'linear', 'cosine' or 'warmup-stable-decay', which stays at "
    'the peak and falls linearly at the end.',
    change=ALLOWED,
  )
  decay_share: float = field(
    0.2,
    "Share of the updates after warmup_steps over which 'warmup-stable-decay' "
    'falls to 0; no other schedule reads it.',
    change=ALLOWED,
  )
  b1: float = field(
    0.9,
    "Decay of Adam's first moment, per update; of lion, the weight of momentum "
    'in an update.',
  )
  b2: float = field(
    0.99,
    "Decay of Adam's second moment, per update; of lion, that of momentum.",
  )
  epsilon: float = field(
    1e-8,
    "Added to the root of Adam's second moment. Far below that root, the "
    'scale of the rewards has no effect on the updates.',
  )
  weight_decay: float = field(0.01, 'Decoupled weight decay, of matrices only.')
  clip_norm: float = field(
    1.0,
    'Largest norm of the gradient over all parameters; 0 turns clipping off.',
  )
  brake: str = field(
    'none',
    "What keeps Adam's momentum from moving clipped tokens further out: "
    "'none', 'reset', 'reset_first', 'decay' or 'project' (optim/README.md).",
  )
  reward_scale: float = field(
    0.0,
    "The advantages' root mean square at which an update has its full size. "
    'Updates then follow the scale of the rewards, which Adam hides; 0: off.',
  )
  moments: bool = field(
    False,
    "Whether to record how Adam's moments make each update (metrics adam_*).",
  )
  overshoot_every_steps: int = field(
    0,
    'Rollouts between those in which overshoot is measured, how far clipped '
    'tokens still move; 0: off. A measured update takes 2.6 times as long.',
  )
  offload: bool = field(
    False,
    "Whether what the optimizer keeps (Adam's moments, 8 bytes for each "
    'parameter) lies in the memory of the host and comes to the device for the '
    'optimizer alone. Turn it on when '
    'memory runs out; results stay the same, and each update waits for the '
    "copies. It saves nothing on a CPU, whose memory is the host's.",
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a rollout becomes updates of the policy."""

  method: str = field(
    'grpo',
    'The loss: a method of losses.methods (`grpo-jax methods` lists them), or '
    "your own as 'module:function'.",
  )
  method_kwargs: dict[str, Any] = field(
    {},
    "Arguments of the method, such as {'high': 0.28}. Those in a config are "
    'left out where the command line chooses another method than the config.',
  )
  fields: dict[str, Any] = field(
    {},
    'Where a method of your own gets a field that it requires: {NAME: '
    "'module:function'}, of a function of the record and the ids of a "
    'completion that returns a number for each id. A field that is not named '
    'here is the number of this name in each record of data.train.',
  )
  batches: int = field(
    1,
    'Optimizer batches, each one update, that a rollout is split into.',
  )
  epochs: int = field(1, 'Passes over a rollout.')
  layout: str = field(
    'auto',
    "How completions lie in the rows that the model reads: 'shared' (a prompt "
    "once for its group), 'packed', 'padded', or 'auto' for the one of the "
    'first two that is cheaper for the lengths of the first rollout.',
    change=FREE,
  )
  micro_rows: int = field(
    0,
    'Rows of a micro-batch. Lower it when updates run out of memory; 0 '
    'chooses a number for the device.',
    change=FREE,
  )
  row_completions: int = field(
    0,
    'Completions in a row of the shared layout; 0 puts the whole group into '
    'one.',
    change=FREE,
  )
  pack_tokens: int = field(
    0,
    'Least width of a packed row, tokens.',
    change=FREE,
  )
  anchor: str = field(
    'learner',
    "Where the log-probabilities of the old policy come from: 'learner' "
    "computes them again, 'sampler' takes what the sampler said. With "
    "sampler.ahead=1, the ratio of 'sampler' corrects for the older policy "
    'that has drawn the rollout.',
  )
  on_zero_advantage: str = field(
    'skip',
    "What to do with an optimizer batch whose advantages are all 0: 'skip', "
    "or 'step', in which momentum, weight decay and KL still move the policy.",
  )
  compute_all: bool = field(
    False,
    'Whether updates also compute completions without advantage, for metrics.',
  )
  nonfinite_rollouts: int = field(
    5,
    'Rollouts in a row without any update that is finite, after which the run '
    'is saved and ends with an error. A run whose last rollout has no finite '
    'update ends with an error too, and so does a warm-up after ten refused '
    'updates in a row. 0: each of them goes on.',
    change=FREE,
  )
  expert_balance: float = field(
    0.0,
    'Weight of a penalty on uneven use of experts, which is added to the loss '
    'of a model that has experts. Raise it, to 0.001 say, if expert_load_max '
    'grows. 0 leaves the penalty out; above 0 an update takes a third longer.',
  )


@dataclasses.dataclass(frozen=True)
class Reference:
  """The policy that a KL term is measured from, if the method has one."""

  refresh_steps: int = field(
    0,
    'Rollouts between refreshes of the reference; 0 keeps the first one.',
  )
  refresh_weight: float = field(
    1.0,
    'Weight of the policy in the average that becomes the new reference; 1 '
    'makes a copy of the policy.',
  )
  offload: bool = field(
    False,
    'Whether the reference, 4 bytes for each parameter, lies in the memory of '
    'the host and comes to the device for scoring alone; see optim.offload.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A second model that the policy learns from, if the method has one.

  It scores what the policy has drawn and is never updated. Its tokenizer must
  be that of the policy; shape and family may be any.
  """

  path: str = field(
    '',
    'Where the teacher comes from: as in model.path a Hugging Face folder, a '
    'GGUF file, a name of the Hub, or the workdir of another run, whose newest '
    "policy it then is. '': there is none. With adapters and the same path as "
    'model.path, their frozen weights are the teacher, and nothing is loaded.',
  )
  dtype: str = field(
    'float32',
    "Dtype of its weights: 'float32', or 'bfloat16' for half the memory, to "
    'which weights of more digits are rounded.',
  )
  urls: tuple[str, ...] = field(
    (),
    'The addresses of servers of vLLM or SGLang that score as the teacher, in '
    'the place of path. They must have its tokenizer, which is that of the '
    'policy, and they score at temperature 1.',
  )
  dialect: str = field(
    'vllm', "How these servers are asked: 'vllm' or 'sglang'."
  )
  model: str = field('', 'The name by which vLLM has the teacher.', change=FREE)
  key_env: str = field(
    '',
    "The environment variable with the servers' API key; '': they want none.",
    change=FREE,
  )
  offload: bool = field(
    False,
    'Whether the teacher lies in the memory of the host and comes to the '
    'device for scoring alone; see optim.offload.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """Supervised updates on demonstrations, before the first rollout."""

  steps: int = field(0, 'Updates; 0 leaves the warm-up out.')
  examples: int = field(256, 'Demonstrations per update.')
  micro_rows: int = field(
    0,
    'Rows of a micro-batch; 0 chooses a number for the device.',
  )
  lr: float = field(2e-3, 'Learning rate at the start; it falls linearly to 0.')
  demonstrations: str = field(
    'arithmetic',
    "Where the demonstrations come from: 'arithmetic', or files with prompts "
    'and answers, named as in data.train. Of several right answers the first '
    'is shown.',
  )
  carry_free_share: float = field(
    0.7,
    'Share of the arithmetic demonstrations whose sums forget the carry, so '
    'that something is left to learn.',
  )


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Greedy answers to held-out problems, judged by the first reward.

  A run is evaluated before its first rollout and after its last one too.
  """

  every_steps: int = field(
    20,
    'Rollouts between evaluations; 0 evaluates at the start and the end only.',
    change=FREE,
  )
  examples: int = field(
    1000,
    'Held-out problems in an evaluation.',
    change=FREE,
  )
  right_reward: float = field(
    1.0,
    'Least first reward of a right answer.',
    change=ALLOWED,
  )
  answer: str = field(
    '',
    "What majority@k counts: a function 'module:function' from a completion "
    "to its answer; '' counts whole completions.",
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class EarlyStop:
  """Ends a run before its last rollout, once a metric no longer improves.

  It then ends as behind its last rollout: evaluated and saved.
  """

  metric: str = field(
    '',
    "Metric of metrics.jsonl that has to improve, such as 'heldout_accuracy'; "
    "'': the run does not end early.",
    change=FREE,
  )
  mode: str = field(
    'max',
    "'max' if a higher value is better, or 'min'.",
    change=FREE,
  )
  patience: int = field(
    5,
    'Measurements in a row without an improvement on the best, after which '
    'the run ends. What is measured on held-out problems is measured in '
    'evaluations alone, most other metrics in each rollout.',
    change=FREE,
  )
  least_improvement: float = field(
    0.0,
    'By how much more a value must be better than the best, to be an '
    'improvement.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """What a workdir keeps, so that the same command goes on from there."""

  every_steps: int = field(
    20,
    'Rollouts between saves; the last rollout is always saved.',
    change=FREE,
  )
  every_minutes: float = field(
    0.0,
    'Minutes after which a save is due too, whatever the rollouts are; 0: '
    'none.',
    change=FREE,
  )
  every_warm_up_steps: int = field(
    100,
    'Updates between saves during the warm-up.',
    change=FREE,
  )
  keep_last: int = field(
    2,
    'Checkpoints to keep, the newest ones.',
    change=FREE,
  )
  best_metric: str = field(
    'heldout_accuracy',
    "Metric of which the checkpoint with the highest value is kept too; '': "
    'none.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Export:
  """How the policy goes out, as a Hugging Face folder."""

  every_saves: int = field(
    0,
    'Saves between those after which the policy is also written into the '
    'workdir, exports/ROLLOUT; 0 writes none. All are kept.',
    change=FREE,
  )
  dtype: str = field(
    'float32',
    "Dtype of the weights in these folders: 'float32', or 'bfloat16' for half "
    'the size, which loses changes below 1/256 of a weight.',
    change=FREE,
  )
  adapter: bool = field(
    False,
    'Whether folders have the adapters alone, for peft; otherwise these are '
    'added to the weights.',
    change=FREE,
  )
  push_to: str = field(
    '',
    'Repository of the Hub that the last policy goes to, with a model card, as '
    "one commit: 'owner/name'; '' for none. It is private unless `public`.",
    change=FREE,
  )
  public: bool = field(
    False,
    'Whether everybody may see that repository.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Log:
  """What a person sees, on the terminal and in the workdir."""

  display: str = field(
    'auto',
    "The display: 'rich' draws in a terminal, 'plain' prints lines, 'none' is "
    "silent, 'auto' is rich in a terminal and plain elsewhere.",
    change=FREE,
  )
  samples: int = field(
    3,
    'Completions that are shown with their rewards.',
    change=FREE,
  )
  tensorboard: bool = field(
    True,
    'Whether to write event files for TensorBoard into the workdir.',
    change=FREE,
  )
  wandb_project: str = field(
    '',
    "Project in Weights & Biases; '' turns it off.",
    change=FREE,
  )
  wandb_mode: str = field(
    'online',
    "'online', or 'offline' to upload later.",
    change=FREE,
  )
  mlflow_experiment: str = field(
    '',
    "Experiment in MLflow; '' turns it off.",
    change=FREE,
  )
  mlflow_uri: str = field(
    '',
    'Where MLflow keeps it: the address of a server, a folder or a database. '
    "'': what MLFLOW_TRACKING_URI says, or else a database in the workdir.",
    change=FREE,
  )
  completions_every_steps: int = field(
    20,
    'Rollouts between those whose completions are written as Parquet; 0 '
    'writes none, and no answers to held-out problems either. 1 allows `train '
    '--replay`.',
    change=FREE,
  )
  token_effects: bool = field(
    False,
    'Whether these files also tell what the updates did to each token, for '
    '`grpo-jax report`: `coefficient`, its weight times its advantage, and '
    '`log_ratio_after`, how far its log-probability moved, in nats. It takes '
    'two forward passes in such a rollout (three with a reference): 1 to 2 % '
    'in all.',
    change=FREE,
  )
  geometry_every_steps: int = field(
    0,
    'Rollouts between those in which the gradients of prompts are compared, '
    'as metrics geometry_*; 0: none. It takes as long as an update, and '
    'longer where completions are short: 4 times in configs/arithmetic.py.',
    change=FREE,
  )
  expected_prefixes: bool = field(
    False,
    'Whether to measure prefix_*_expected too, the weight of shared prefixes '
    'before the policy has moved. It takes the loss a second time.',
    change=FREE,
  )
  kl_alarm: float = field(
    1.0,
    'KL to the old policy or the reference above which a warning is shown, '
    'nats per token.',
    change=FREE,
  )
  entropy_alarm: float = field(
    0.01,
    'Entropy below which a warning is shown, nats per token.',
    change=FREE,
  )
  sampler_gap_alarm: float = field(
    0.05,
    'Mean difference of the log-probabilities of sampler and learner above '
    'which a warning is shown, nats per token. In float32 it is below 1e-4, '
    'in bfloat16 about 0.01 to 0.02. A replay shows none, because its policy '
    'may be another than the one that has drawn the completions.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Mesh:
  """How many devices each kind of parallelism takes; see sharding.py."""

  data: int = field(
    1,
    'Copies of the parameters, each with its own rows; -1 takes all devices '
    'that are left.',
    change=FREE,
  )
  fsdp: int = field(
    1,
    'Devices over which each copy of the parameters is split (FSDP).',
    change=FREE,
  )
  tensor: int = field(
    1,
    'Devices over which heads, hidden units and vocabulary are split.',
    change=FREE,
  )
  expert: int = field(
    1,
    'Devices over which the experts of each layer are split, if there are any.',
    change=FREE,
  )
  context: int = field(
    1,
    'Devices over which the tokens of each row are split in an update, for '
    'long completions: each computes its part of them, and attends to the '
    'keys of all. In sampling these devices draw rows of their own.',
    change=FREE,
  )
  slices: int = field(
    1,
    'Slices of a pod, or groups of machines, each with copies of its own: '
    'between them only sums of gradients are sent.',
    change=FREE,
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  seed: int = field(
    0,
    'Seed of everything random. Two runs with one seed on one machine are '
    'equal.',
  )
  steps: int = field(60, 'Rollouts.', change=ALLOWED)
  shuffle_rewards: bool = field(
    False,
    'Whether to permute the rewards of each rollout: a control that must not '
    'learn.',
  )
  compilation_cache: str = field(
    'auto',
    "Directory that keeps compiled programs for the next start: 'auto' for "
    "one in the user's cache directory, '' for none. "
    'JAX_COMPILATION_CACHE_DIR, if it is set, wins.',
    change=FREE,
  )
  model: Model = Model()
  lora: Lora = Lora()
  data: Data = Data()
  rewards: tuple[Reward, ...] = field(
    (Reward(),),
    'The reward functions, each with its weight.',
  )
  workers: Workers = Workers()
  environment: Environment = Environment()
  agent: Agent = Agent()
  sampler: Sampler = Sampler()
  generator: Generator = Generator()
  engine: Engine = Engine()
  optim: Optim = Optim()
  learner: Learner = Learner()
  reference: Reference = Reference()
  teacher: Teacher = Teacher()
  warm_up: WarmUp = WarmUp()
  evaluation: Evaluation = Evaluation()
  early_stop: EarlyStop = EarlyStop()
  checkpoint: Checkpoint = Checkpoint()
  export: Export = Export()
  log: Log = Log()
  mesh: Mesh = Mesh()

  def __post_init__(self):
    for ok, problem in checks.checks(self):
      if not ok:
        raise ValueError(f'The config has {problem}.')
