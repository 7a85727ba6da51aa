"""Every field of a config, with its default and its unit.

The comment above a field is its help text.
"""

import dataclasses
from typing import Any

from grpo_jax.config import checks
from grpo_jax.config.model_fields import Lora
from grpo_jax.config.model_fields import Model


@dataclasses.dataclass(frozen=True)
class Source:
  """One of several sources of prompts; see `Data.train`."""

  # As in data.train: a built-in task, files, a folder, 'tfds:NAME',
  # 'reasoning_gym:TASK', or your own as 'module:function'.
  name: str = 'arithmetic'
  # Share of the prompts, relative to the other weights. Held-out sources have
  # none: they are read one after the other.
  weight: float = 1.0
  # Arguments of the source. Files take prompt_field and answer_field, where
  # they differ from those of the config; folders and 'tfds:NAME' also split,
  # such as 'test'; 'tfds:NAME' also data_dir; 'reasoning_gym:TASK' size, seed,
  # curriculum and those of the task; a function its own.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Data:
  """Prompts and tokenizer: the built-in arithmetic, or files of your own."""

  # Prompts to train on: 'arithmetic' (sums), 'largest' (the largest of four
  # numbers), files that end in .jsonl, .parquet or .array_record (* matches
  # several), a folder that save_to_disk of Hugging Face datasets has written,
  # 'tfds:NAME' for a prepared data set of TensorFlow Datasets,
  # 'reasoning_gym:TASK' for made-up problems, a function of your own as
  # 'module:function' that returns an object with a length and dicts, or several
  # of these with weights:
  # ({'name': 'a.jsonl', 'weight': 3.0}, {'name': 'b.parquet', 'weight': 1.0}).
  train: str | tuple[Source, ...] = 'arithmetic'
  # Problems to evaluate on, named as in data.train; of several sources one
  # after the other. '': do not evaluate.
  heldout: str | tuple[Source, ...] = 'arithmetic'
  # Field of a record in a file that has the prompt: a text, or a list of
  # messages with 'role' and 'content'.
  prompt_field: str = 'prompt'
  # Field of a record in a file that has the reference answer: a text, a number
  # or a list of which any is right; within a dict behind a point, as in
  # 'reward_model.ground_truth'. '': no reward needs an answer.
  answer_field: str = 'answer'
  # What becomes of the last turn of a chat that ends with the assistant:
  # 'answer' takes it off the prompt, and it is the answer of a record that has
  # none; 'prefill' leaves it, and completions go on where it ends.
  last_turn: str = 'answer'
  # Tokenizer: '' for that of the model in model.path, 'arithmetic' for single
  # characters, 'package:NAME' for the GGUF file in an installed package, or the
  # path of a Hugging Face folder, a .gguf file, a tokenizer.json or a workdir.
  tokenizer: str = 'arithmetic'
  # Tokens that end a completion, for a tokenizer.json. Folders and .gguf files
  # name their own, which are taken while this is () or the default.
  eos_tokens: tuple[str, ...] = ('<eos>',)
  # Token that fills up rows, for a tokenizer.json. Folders and .gguf files name
  # their own, which is taken while this is '' or the default.
  pad_token: str = '<pad>'
  # Whether prompts are written by the tokenizer's chat template. A prompt that
  # is a text then is a message of the user.
  chat: bool = False
  # Content of a system message before every chat that has none. '': none.
  system_prompt: str = ''
  # Variables for the chat template, such as {'enable_thinking': False}.
  chat_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # How every completion begins, such as 'Answer:'. The model reads this text,
  # but does not sample it, and rewards do not see it.
  completion_prefix: str = ''
  # Widths to which prompts are padded, tokens; the largest is the longest
  # prompt allowed. A program is compiled for each width that is used. (): one
  # width, that of the longest prompt in the data; of more than 20,000 records,
  # or 300 that a program makes, a quarter above the longest in a sample.
  prompt_buckets: tuple[int, ...] = ()
  # The same for completions; the largest must hold sampler.max_tokens. (): one
  # width, sampler.max_tokens, or that of the longest demonstration.
  completion_buckets: tuple[int, ...] = ()
  # What to do with a prompt that is longer than the largest width: 'refuse' is
  # an error, at the start if the prompt is among those that are encoded there,
  # and otherwise later, from which the run can go on; 'drop' takes the next
  # prompt and counts the others (metrics prompts_too_long, heldout_too_long).
  too_long: str = 'refuse'


@dataclasses.dataclass(frozen=True)
class Reward:
  """One reward function. The reward of a completion is their weighted sum."""

  # A function of grpo_jax.rewards, 'reward_model', or your own as
  # 'module:function'.
  name: str = 'exact_match'
  # Factor of this reward in the sum; 0 measures it without training on it.
  weight: float = 1.0
  # Arguments of the function besides prompt, completion and example.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # What metrics and files call this reward; '' takes the name. Two rewards may
  # have one function if their labels differ.
  label: str = ''
  # Where it is called: 'workers' are processes with limits, 'here' is the
  # process of the run. 'auto': in workers, but for functions that are marked by
  # grpo_jax.rewards.bounded or given as objects in Python.
  where: str = 'auto'
  # What becomes of a completion on which it fails in a worker: 'invalid' leaves
  # it out of training, 'reward' gives it failed_reward.
  on_failure: str = 'invalid'
  # What this reward then is, before its weight.
  failed_reward: float = 0.0
  # Whether a completion for which it returns None is left out of training.
  # Otherwise the sum is over the rewards that have judged it.
  required: bool = False


@dataclasses.dataclass(frozen=True)
class Workers:
  """Processes that call reward functions, each under limits."""

  # How many beside each process of the run; 0: one for each core that it may
  # use, at most 16.
  number: int = 0
  # The most processor time of one call of a reward function and of all that it
  # starts, seconds; starting and importing are not counted. So a busy machine
  # fails no call. One that only waits ends at wall_limit_secs.
  time_limit_secs: float = 10.0
  # The most memory of one of them and of all that it starts, GiB. It limits
  # address space, of which some libraries take more than they use.
  memory_limit_gib: float = 4.0
  # The longest that starting one and importing a reward may take, seconds.
  start_limit_secs: float = 120.0
  # The longest that one call may take by the clock, seconds; 0: ten times
  # time_limit_secs.
  wall_limit_secs: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How the completions of a rollout are sampled."""

  # Prompts per rollout.
  prompts: int = 32
  # Completions per prompt. More make the advantages less noisy, and a hard
  # prompt more likely to have one that is right.
  group: int = 16
  # Longest completion, tokens, the end token included.
  max_tokens: int = 5
  # Tokens before an end token may be drawn.
  min_tokens: int = 0
  # Temperature of the policy: the sampler draws at it, and the learner trains
  # the policy at it.
  temperature: float = 1.0
  # Draw from this many most likely tokens; 0 turns it off.
  top_k: int = 0
  # Draw from the fewest tokens with this much probability; 1 turns it off.
  top_p: float = 1.0
  # Draw from tokens at least this likely, relative to the likeliest; 0: off.
  min_p: float = 0.0
  # Texts that end a completion.
  stop_strings: tuple[str, ...] = ()
  # Completions that are decoded at once. Lower it when sampling runs out of
  # memory; the rest waits for free rows.
  max_rows: int = 4096
  # Devices over which heads, hidden units and vocabulary are split while
  # sampling; they are taken from mesh.fsdp, and then from mesh.data. More split
  # the weights that decoding reads into smaller parts. 0: as many as
  # mesh.tensor.
  tensor: int = 0
  # Times that a rollout may draw further prompts for groups whose completions
  # all earned the same, from which group-based methods learn nothing; 0 turns
  # it off.
  resample_rounds: int = 0
  # Whether a prompt that all of its completions solved is never drawn again.
  retire_solved: bool = False
  # How many rollouts are drawn and judged before their turn. 0: each rollout is
  # drawn by the policy that learns from it. 1: while the updates of a rollout
  # run, the next one is drawn, by the policy before these updates. This saves
  # time where judging is slow, on one device alone, and needs a copy of the
  # trained parameters besides the sampler's weights. Give
  # learner.anchor='sampler' with it, or a method that has importance weights of
  # the sampler, such as truncate_token_importance: each corrects for the older
  # policy, and a warning says where nothing does.
  ahead: int = 0


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW, its schedule, and what is put around it."""

  # Learning rate at the peak of the schedule.
  lr: float = 3e-4
  # Updates over which the learning rate rises from 0 to its peak. Counted, as
  # for the decay, are all updates of the run, also those that are skipped.
  warmup_steps: int = 0
  # Course of the learning rate after its peak, over the whole run: 'constant',
  # 'linear' or 'cosine'.
  decay: str = 'constant'
  # Decay of Adam's first moment, per update.
  b1: float = 0.9
  # Decay of Adam's second moment, per update.
  b2: float = 0.99
  # Added to the root of Adam's second moment. Far below that root, the scale of
  # the rewards has no effect on the updates.
  epsilon: float = 1e-8
  # Decoupled weight decay, of matrices only.
  weight_decay: float = 0.01
  # Largest norm of the gradient over all parameters; 0 turns clipping off.
  clip_norm: float = 1.0
  # What keeps Adam's momentum from moving clipped tokens further out: 'none',
  # 'reset', 'reset_first', 'decay' or 'project' (optim/README.md).
  brake: str = 'none'
  # The advantages' root mean square at which an update has its full size.
  # Updates then follow the scale of the rewards, which Adam hides; 0: off.
  reward_scale: float = 0.0
  # Whether to record how Adam's moments make each update (metrics adam_*).
  moments: bool = False
  # Rollouts between those in which overshoot is measured, how far clipped
  # tokens still move; 0: off. A measured update takes 2.6 times as long.
  overshoot_every_steps: int = 0
  # Whether Adam's moments, 8 bytes for each parameter, lie in the memory of the
  # host and come to the device for the optimizer alone. Turn it on when memory
  # runs out; results stay the same, and each update waits for the copies. It
  # saves nothing on a CPU, whose memory is the host's.
  offload: bool = False


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a rollout becomes updates of the policy."""

  # The loss: a method of losses.methods (`grpo-jax methods` lists them), or
  # your own as 'module:function'.
  method: str = 'grpo'
  # Arguments of the method, such as {'high': 0.28}. Those in a config are left
  # out where the command line chooses another method than the config.
  method_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Optimizer batches, each one update, that a rollout is split into.
  batches: int = 1
  # Passes over a rollout.
  epochs: int = 1
  # How completions lie in the rows that the model reads: 'shared' (a prompt
  # once for its group), 'packed', 'padded', or 'auto' for the one of the
  # first two that is cheaper for the lengths of the first rollout.
  layout: str = 'auto'
  # Rows of a micro-batch. Lower it when updates run out of memory; 0 chooses a
  # number for the device.
  micro_rows: int = 0
  # Completions in a row of the shared layout; 0 puts the whole group into one.
  row_completions: int = 0
  # Least width of a packed row, tokens.
  pack_tokens: int = 0
  # Where the log-probabilities of the old policy come from: 'learner' computes
  # them again, 'sampler' takes what the sampler said. With sampler.ahead=1, the
  # ratio of 'sampler' corrects for the older policy that has drawn the rollout.
  anchor: str = 'learner'
  # What to do with an optimizer batch whose advantages are all 0: 'skip', or
  # 'step', in which momentum, weight decay and KL still move the policy.
  on_zero_advantage: str = 'skip'
  # Whether updates also compute completions without advantage, for metrics.
  compute_all: bool = False
  # Rollouts in a row without any update that is finite, after which the run is
  # saved and ends with an error. A run whose last rollout has no finite update
  # ends with an error too, and so does a warm-up after ten refused updates in a
  # row. 0: each of them goes on.
  nonfinite_rollouts: int = 5
  # Weight of a penalty on uneven use of experts, which is added to the loss of
  # a model that has experts. Raise it, to 0.001 say, if expert_load_max grows.
  # 0 leaves the penalty out; above 0 an update takes a third longer.
  expert_balance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reference:
  """The policy that a KL term is measured from, if the method has one."""

  # Rollouts between refreshes of the reference; 0 keeps the first one.
  refresh_steps: int = 0
  # Weight of the policy in the average that becomes the new reference; 1 makes
  # a copy of the policy.
  refresh_weight: float = 1.0
  # Whether the reference, 4 bytes for each parameter, lies in the memory of the
  # host and comes to the device for scoring alone; see optim.offload.
  offload: bool = False


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """Supervised updates on demonstrations, before the first rollout."""

  # Updates; 0 leaves the warm-up out.
  steps: int = 0
  # Demonstrations per update.
  examples: int = 256
  # Rows of a micro-batch; 0 chooses a number for the device.
  micro_rows: int = 0
  # Learning rate at the start; it falls linearly to 0.
  lr: float = 2e-3
  # Where the demonstrations come from: 'arithmetic', or files with prompts and
  # answers, named as in data.train. Of several right answers the first is
  # shown.
  demonstrations: str = 'arithmetic'
  # Share of the arithmetic demonstrations whose sums forget the carry, so that
  # something is left to learn.
  carry_free_share: float = 0.7


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Greedy answers to held-out problems, judged by the first reward.

  A run is evaluated before its first rollout and after its last one too.
  """

  # Rollouts between evaluations; 0 evaluates at the start and the end only.
  every_steps: int = 20
  # Held-out problems in an evaluation.
  examples: int = 1000
  # Least first reward of a right answer.
  right_reward: float = 1.0
  # What majority@k counts: a function 'module:function' from a completion to
  # its answer; '' counts whole completions.
  answer: str = ''


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """What a workdir keeps, so that the same command goes on from there."""

  # Rollouts between saves; the last rollout is always saved.
  every_steps: int = 20
  # Minutes after which a save is due too, whatever the rollouts are; 0: none.
  every_minutes: float = 0.0
  # Updates between saves during the warm-up.
  every_warm_up_steps: int = 100
  # Checkpoints to keep, the newest ones.
  keep_last: int = 2
  # Metric of which the checkpoint with the highest value is kept too; '': none.
  best_metric: str = 'heldout_accuracy'
  # Saves between those after which the model is also written into the workdir
  # as a Hugging Face folder, exports/ROLLOUT; 0 writes none. All are kept.
  export_every_saves: int = 0
  # Dtype of the weights in these folders: 'float32', or 'bfloat16' for half the
  # size, which loses changes below 1/256 of a weight.
  export_dtype: str = 'float32'


@dataclasses.dataclass(frozen=True)
class Log:
  """What a person sees, on the terminal and in the workdir."""

  # The display: 'rich' draws in a terminal, 'plain' prints lines, 'none' is
  # silent, 'auto' is rich in a terminal and plain elsewhere.
  display: str = 'auto'
  # Completions that are shown with their rewards.
  samples: int = 3
  # Whether to write event files for TensorBoard into the workdir.
  tensorboard: bool = True
  # Project in Weights & Biases; '' turns it off.
  wandb_project: str = ''
  # 'online', or 'offline' to upload later.
  wandb_mode: str = 'online'
  # Rollouts between those whose completions are written as Parquet; 0 writes
  # none, and no answers to held-out problems either. 1 allows `train --replay`.
  completions_every_steps: int = 20
  # Whether these files also tell what the updates did to each token, for
  # `grpo-jax report`: `coefficient`, its weight times its advantage, and
  # `log_ratio_after`, how far its log-probability moved, in nats. It takes two
  # forward passes in such a rollout (three with a reference): 1 to 2 % in all.
  token_effects: bool = False
  # Rollouts between those in which the gradients of prompts are compared, as
  # metrics geometry_*; 0: none. It takes as long as an update, and longer where
  # completions are short: 4 times in configs/arithmetic.py.
  geometry_every_steps: int = 0
  # Whether to measure prefix_*_expected too, the weight of shared prefixes
  # before the policy has moved. It takes the loss a second time.
  expected_prefixes: bool = False
  # KL to the old policy or the reference above which a warning is shown, nats
  # per token.
  kl_alarm: float = 1.0
  # Entropy below which a warning is shown, nats per token.
  entropy_alarm: float = 0.01
  # Mean difference of the log-probabilities of sampler and learner above which
  # a warning is shown, nats per token. In float32 it is below 1e-4, in bfloat16
  # about 0.01 to 0.02. A replay shows none, because its policy may be another
  # than the one that has drawn the completions.
  sampler_gap_alarm: float = 0.05


@dataclasses.dataclass(frozen=True)
class Mesh:
  """How many devices each kind of parallelism takes; see sharding.py."""

  # Copies of the parameters, each with its own rows; -1 takes all devices that
  # are left.
  data: int = 1
  # Devices over which each copy of the parameters is split (FSDP).
  fsdp: int = 1
  # Devices over which heads, hidden units and vocabulary are split.
  tensor: int = 1
  # Devices over which the experts of each layer are split, if there are any.
  expert: int = 1
  # Devices over which the tokens of each row are split in an update, for long
  # completions: each computes its part of them, and attends to the keys of all.
  # In sampling these devices draw rows of their own.
  context: int = 1
  # Slices of a pod, or groups of machines, each with copies of its own: between
  # them only sums of gradients are sent.
  slices: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
  """A run."""

  # Seed of everything random. Two runs with one seed on one machine are equal.
  seed: int = 0
  # Rollouts.
  steps: int = 60
  # Whether to permute the rewards of each rollout: a control that must not
  # learn.
  shuffle_rewards: bool = False
  # Directory that keeps compiled programs for the next start: 'auto' for one in
  # the user's cache directory, '' for none. JAX_COMPILATION_CACHE_DIR, if it is
  # set, wins.
  compilation_cache: str = 'auto'
  model: Model = Model()
  lora: Lora = Lora()
  data: Data = Data()
  # The reward functions, each with its weight.
  rewards: tuple[Reward, ...] = (Reward(),)
  workers: Workers = Workers()
  sampler: Sampler = Sampler()
  optim: Optim = Optim()
  learner: Learner = Learner()
  reference: Reference = Reference()
  warm_up: WarmUp = WarmUp()
  evaluation: Evaluation = Evaluation()
  checkpoint: Checkpoint = Checkpoint()
  log: Log = Log()
  mesh: Mesh = Mesh()

  def __post_init__(self):
    for ok, problem in checks.checks(self):
      if not ok:
        raise ValueError(f'The config has {problem}.')
