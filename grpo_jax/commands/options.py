"""Every option of a config, and what TRL and verl call it.

The options are read from the source of the dataclasses in `grpo_jax/config`:
the comment above a field, or behind it, says what the field means, and the
docstring of a dataclass heads its section.

`python -m grpo_jax.commands.options` prints the options and the names of peers
as Markdown.
"""

import ast
from collections.abc import Sequence
import dataclasses
import difflib
import functools
import inspect
import io
import textwrap
import tokenize
import typing
from typing import Any
from typing import NamedTuple

from grpo_jax.config import Config


class Option(NamedTuple):
  """One field of the config."""

  name: str  # as in --config.NAME
  type: str  # as annotated
  default: str  # as typed after --config.NAME=
  meaning: str  # the comment of the field


class Section(NamedTuple):
  """One dataclass of the config."""

  name: str  # its path in the config, '' for the config itself
  meaning: str  # its docstring
  options: tuple[Option, ...]


class Peer(NamedTuple):
  """What TRL and verl call an option of ours, '' where they have none."""

  ours: str
  trl: str  # of GRPOConfig
  verl: str  # of the PPO trainer
  note: str  # where the meaning or the unit differs


def describe(config_class: type = Config) -> tuple[Option, ...]:
  """Every option, in the order of `sections`.

  Args:
    config_class: A dataclass whose fields carry comments.

  Returns:
    Options; those of a field `rewards` that is a tuple of dataclasses are
    `rewards` itself, then `rewards[].name` and the like.

  >>> describe()[1]
  Option(name='steps', type='int', default='60', meaning='Rollouts.')
  """
  return tuple(
    option for section in sections(config_class) for option in section.options
  )


def sections(config_class: type = Config) -> tuple[Section, ...]:
  """The options by dataclass, the outermost first."""
  return tuple(_walk(config_class, ''))


def markdown() -> str:
  """All options as Markdown tables, one for each section."""
  parts = []
  for section in sections():
    rows = [
      (f'`{option.name}`', f'`{option.type}`', f'`{option.default}`')
      + (option.meaning,)
      for option in section.options
    ]
    parts.append(
      f'### `{section.name or "config"}`\n\n{section.meaning}\n\n'
      + _table(('option', 'type', 'default', 'meaning'), rows)
    )
  return '\n'.join(parts)


def help_text(width: int) -> str:
  """All options for a terminal: how to type them, and what they mean.

  Args:
    width: Columns of the terminal.

  Returns:
    Lines of at most `width` columns.
  """
  wrap = functools.partial(textwrap.wrap, break_on_hyphens=False)
  column = min(44, width // 2)
  lines = []
  for section in sections():
    heading = f'{section.name}: ' if section.name else ''
    lines += ['', *wrap(heading + section.meaning, width)]
    for option in section.options:
      typed = option.name.replace('[]', '[0]')
      left = f'  --config.{typed}={option.default}'
      if len(left) + 2 > column:
        lines += wrap(left, width, subsequent_indent='    ')
        left = ''
      for text in wrap(option.meaning, width - column) or ['']:
        lines.append(f'{left:{column}}{text}'.rstrip())
        left = ''
  return '\n'.join(lines[1:])


def peers_markdown() -> str:
  """`PEER_NAMES` as one Markdown table."""
  rows = [
    (*(f'`{name}`' if name else '' for name in peer[:3]), peer.note)
    for peer in PEER_NAMES
  ]
  return _table(('ours', 'TRL', 'verl', 'where they differ'), rows)


def suggest(name: str) -> str | None:
  """The option of ours that somebody meant.

  Args:
    name: A field that the config does not have: misspelt, in the wrong section,
      or a name of TRL or verl; verl's may lack its first parts.

  Returns:
    A name of ours, or None if nothing is near.

  >>> suggest('num_generations'), suggest('actor_rollout_ref.rollout.n')
  ('sampler.group', 'sampler.group')
  >>> suggest('sampler.temprature'), suggest('lr'), suggest('zzz')
  ('sampler.temperature', 'optim.lr', None)
  """
  name = name.removeprefix('--').removeprefix('config.')
  last = name.rpartition('.')[2]
  ours = [o.name for o in describe() if ('[' in o.name) == ('[' in name)]
  if name in ours:
    return name

  # The last part counts first, since the name may be in the wrong section.
  def likeness(own):
    return _ratio(last, own.rpartition('.')[2]), _ratio(name, own)

  near = max(ours, key=likeness)
  close = likeness(near)[0]
  whole, part = _from_peer(name), _from_peer(last)
  if whole or (part and part.endswith(f'.{last}')):
    return whole or part
  if close == 1:  # the right name, in the wrong section
    return near
  return part or (near if close > 0.66 else None)


def _from_peer(name: str) -> str | None:
  """Our name for a name of TRL or verl, or for the last parts of verl's."""
  whole = [p.ours for p in PEER_NAMES if name and name in (p.trl, p.verl)]
  ends = [p.ours for p in PEER_NAMES if p.verl.endswith(f'.{name}')]
  return next(iter(whole + ends), None)


def _ratio(one: str, other: str) -> float:
  return difflib.SequenceMatcher(None, one, other).ratio()


def _walk(kind: Any, path: str) -> list[Section]:
  """The section of a dataclass at `path`, then those inside it."""
  hints, source = typing.get_type_hints(kind), _source(kind)
  options, inner = [], []
  for field in dataclasses.fields(kind):
    hint, (annotation, comment) = hints[field.name], source[field.name]
    name = f'{path}.{field.name}' if path else field.name
    option = Option(name, annotation, _default(field), comment)
    item, *_ = *typing.get_args(hint), None  # Reward in tuple[Reward, ...]
    if dataclasses.is_dataclass(hint):
      inner += _walk(hint, name)
    elif dataclasses.is_dataclass(item):
      first, *rest = _walk(item, f'{name}[]')
      whole = option._replace(meaning=comment or first.meaning)
      inner += [Section(name, first.meaning, (whole, *first.options)), *rest]
    else:
      options.append(option)
  meaning = ' '.join(inspect.cleandoc(kind.__doc__ or '').split())
  return [Section(path, meaning, tuple(options)), *inner]


@functools.cache
def _source(kind: type) -> dict[str, tuple[str, str]]:
  """(annotation, comment) of each field, as they stand in the file."""
  text = textwrap.dedent(inspect.getsource(kind))
  lines = text.splitlines()
  comments = {
    token.start[0]: token.string.lstrip('# ')
    for token in tokenize.generate_tokens(io.StringIO(text).readline)
    if token.type == tokenize.COMMENT
  }
  (tree,) = ast.parse(text).body
  assert isinstance(tree, ast.ClassDef)
  found = {}
  for node in tree.body:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      first, last = node.lineno, node.end_lineno or node.lineno
      # Back over the lines above the field that hold only a comment.
      while lines[first - 2].lstrip().startswith('#'):
        first -= 1
      said = (comments[k] for k in range(first, last + 1) if k in comments)
      found[node.target.id] = (ast.unparse(node.annotation), ' '.join(said))
  return found


def _default(field: dataclasses.Field) -> str:
  if field.default_factory is not dataclasses.MISSING:
    return repr(field.default_factory())
  value = field.default
  if isinstance(value, tuple):  # as a ConfigDict has it
    value = tuple(
      vars(item) if dataclasses.is_dataclass(item) else item for item in value
    )
  return '' if value is dataclasses.MISSING else repr(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  escaped = [[cell.replace('|', r'\|') for cell in line] for line in lines]
  return ''.join(f'| {" | ".join(line)} |\n' for line in escaped)


# Under each section: ours | TRL | verl | note, the note on a line of its own
# where it is long. A leading dot stands for `actor_rollout_ref.`.
_PEERS = """
[]
seed | seed | data.seed | ours: of everything; verl: one for each part
steps | max_steps | trainer.total_training_steps | TRL: optimizer steps
steps | num_train_epochs | trainer.total_epochs | passes over the data
[data]
train | train_dataset | data.train_files | TRL: given to GRPOTrainer
heldout | eval_dataset | data.val_files | TRL: given to GRPOTrainer
prompt_field | | data.prompt_key |
tokenizer | | .model.tokenizer_path | ours: a folder or a file
chat_kwargs | chat_template_kwargs | data.apply_chat_template_kwargs |
prompt_buckets | max_prompt_length | data.max_prompt_length
  the widest bucket is the limit; recent TRL has none
[rewards[]]
name | reward_funcs | reward.custom_reward_function.path
  'module:function'; TRL: given to GRPOTrainer; verl: a file, and .name
weight | reward_weights | | TRL: one list of all weights
[sampler]
prompts | generation_batch_size | data.train_batch_size | TRL: completions
group | num_generations | .rollout.n |
max_tokens | max_completion_length | data.max_response_length |
temperature | temperature | .rollout.temperature |
top_k | top_k | .rollout.top_k | off is 0; verl: -1
top_p | top_p | .rollout.top_p |
min_p | min_p | | off is 0; TRL: None
max_rows | | .rollout.max_num_seqs | verl: of each copy of its engine
resample_rounds | | algorithm.filter_groups.max_num_gen_batches
  ours counts extra draws, 0: off; verl all draws, 0: no limit
[optim]
lr | learning_rate | .actor.optim.lr |
warmup_steps | warmup_steps | .actor.optim.lr_warmup_steps | verl: rollouts
warmup_steps | warmup_ratio | .actor.optim.lr_warmup_steps_ratio
  theirs is a share of the run
decay | lr_scheduler_type | .actor.optim.lr_scheduler_type
  'constant', 'linear', 'cosine'; verl has no 'linear'
b1 | adam_beta1 | .actor.optim.betas | verl: the first of two
b2 | adam_beta2 | .actor.optim.betas | verl: the second of two
epsilon | adam_epsilon | |
weight_decay | weight_decay | .actor.optim.weight_decay |
clip_norm | max_grad_norm | .actor.optim.clip_grad |
clip_norm | | .actor.grad_clip | the older name
[learner]
method | loss_type | .actor.policy_loss.loss_mode
  ours fixes advantage, weights, ratio and clip together
method | scale_rewards | algorithm.norm_adv_by_std_in_grpo
  unscaled: 'dr_grpo', which also divides by a constant
method | importance_sampling_level | | 'sequence': 'gspo'
method | | algorithm.adv_estimator | 'grpo' and 'rloo' are names of ours too
method | | .actor.loss_agg_mode
  'token-mean' as in dapo, 'seq-mean-token-mean' as in grpo
batches | steps_per_generation | .actor.ppo_mini_batch_size
  TRL: ours times gradient_accumulation_steps; verl: prompts in each
epochs | num_iterations | .actor.ppo_epochs |
micro_rows | per_device_train_batch_size | .actor.ppo_micro_batch_size_per_gpu
  ours counts rows over all devices, theirs completions on one
micro_rows | gradient_accumulation_steps | | ours follows from the rows
layout | | .model.use_remove_padding | true is near 'packed'
layout | | .actor.use_prefix_grouper | true is near 'shared'
pack_tokens | | .actor.ppo_max_token_len_per_gpu
  ours is the least width of a row, verl's the most tokens at once
anchor | | algorithm.rollout_correction.bypass_mode | true is 'sampler'
[learner.method_kwargs]
low | epsilon | .actor.clip_ratio_low |
low | | .actor.clip_ratio | verl: both ends; ours also needs high
high | epsilon_high | .actor.clip_ratio_high |
kl_coefficient | beta | .actor.kl_loss_coef
  ours 0.04 by default, TRL 0; verl needs use_kl_loss
kl_coefficient | | algorithm.kl_ctrl.kl_coef | verl: out of the reward
max_tokens | | .actor.loss_scale_factor | of dr_grpo
soft_tokens | | reward.reward_kwargs.overlong_buffer_cfg.len | of dapo
share | | .actor.policy_loss.kl_cov_ratio | of kl_cov
coefficient | | .actor.policy_loss.ppo_kl_coef | of kl_cov
[reference]
refresh_steps | ref_model_sync_steps | | TRL: optimizer steps
refresh_weight | ref_model_mixup_alpha | |
[evaluation]
every_steps | eval_steps | trainer.test_freq | TRL: optimizer steps
examples | | data.val_max_samples |
[checkpoint]
every_steps | save_steps | trainer.save_freq | TRL: optimizer steps
keep_last | save_total_limit | trainer.max_actor_ckpt_to_keep |
best_metric | metric_for_best_model | |
[log]
samples | num_completions_to_print | trainer.log_val_generations
  verl: of validations
completions_every_steps | log_completions | trainer.rollout_data_dir
  TRL: whether to print; verl: a directory, written every rollout
tensorboard | report_to | trainer.logger | theirs is a list of names
wandb_project | | trainer.project_name | TRL: the variable WANDB_PROJECT
[mesh]
fsdp | | .actor.fsdp_config.fsdp_size |
tensor | vllm_tensor_parallel_size | .rollout.tensor_model_parallel_size
  theirs is of the sampler alone
[model]
path | model | .model.path | TRL: given to GRPOTrainer
compute_dtype | bf16 | .actor.fsdp_config.dtype |
remat | gradient_checkpointing | .model.enable_gradient_checkpointing |
"""


def _peers(text: str) -> tuple[Peer, ...]:
  """Reads the table above."""
  peers, section = [], ''
  for line in text.strip().splitlines():
    if line.startswith('['):
      section = line[1:-1] + '.' if line != '[]' else ''
    elif line.startswith(' '):
      peers[-1] = peers[-1]._replace(note=line.strip())
    else:
      ours, trl, verl, *note = (cell.strip() for cell in line.split('|'))
      verl = f'actor_rollout_ref{verl}' if verl.startswith('.') else verl
      peers.append(Peer(section + ours, trl, verl, ''.join(note)))
  return tuple(peers)


PEER_NAMES = _peers(_PEERS)

if __name__ == '__main__':
  print(markdown())
  print(peers_markdown(), end='')
