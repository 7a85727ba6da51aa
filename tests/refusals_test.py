"""Values that mean nothing, one row each: of the config, config.json, methods.

Every field of the config has a row, or stands among those that take any value.
"""

import dataclasses
import itertools
import math
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.monitor import table
from grpo_jax.run import policy as policies
from grpo_jax.run.build import limits
from grpo_jax.run.build import method as build_method
from tests import cli

SERVERS = {'engine.kind': 'http', 'engine.urls': ('http://127.0.0.1:8000',)}
AGENT = {
  'environment.name': 'agent',
  'data.chat': True,
  'agent.command': 'sh',
}
# Fields by name, what they are given, and what the refusal says of them. Of a
# number NaN, infinity and -7 are in config_test.py.
CONFIG = [
  ({'seed': 2**32}, 'seed=4294967296; give at most 4294967295'),
  ({'steps': 2**31}, 'steps=2147483648; give at most'),
  (
    {'steps': 2**30, 'learner.epochs': 8},
    'whose product, 8,589,934,592 optimizer steps',
  ),
  ({'model.num_layers': 0}, 'model.num_layers=0; give 1 or more'),
  ({'model.num_layers': 10**9}, 'model.num_layers=1000000000; give at most'),
  ({'model.width': 0}, 'model.width=0; give 1 or more'),
  ({'model.num_heads': 0}, 'model.num_heads=0'),
  ({'model.num_kv_heads': 0}, 'model.num_kv_heads=0'),
  ({'model.head_dim': 0}, 'model.head_dim=0'),
  ({'model.mlp_width': 0}, 'model.mlp_width=0'),
  ({'model.rope_base': 1.0}, 'model.rope_base=1.0; give more than 1'),
  ({'model.norm_epsilon': -1.0}, 'model.norm_epsilon=-1.0; give more than 0'),
  ({'model.norm_epsilon': 2.0}, 'model.norm_epsilon=2.0; give at most 1'),
  ({'model.window_tokens': (-1,)}, 'model.window_tokens=(-1,)'),
  ({'model.remat': 'some'}, "model.remat='some'"),
  ({'lora.rank': -1}, 'lora.rank=-1; give 0 or more'),
  ({'lora.rank': 4, 'lora.targets': ()}, 'lora.rank=4 with no lora.targets'),
  ({'lora.alpha': 0.0}, 'lora.alpha=0.0; give more than 0'),
  ({'lora.alpha': 1e9}, 'lora.alpha=1000000000.0; give at most 1000000'),
  ({'lora.base_dtype': 'int4'}, "lora.base_dtype='int4'"),
  ({'lora.base_dtype': 'nf4'}, "lora.base_dtype='nf4' with lora.rank=0"),
  ({'teacher.dtype': 'int8'}, "teacher.dtype='int8'"),
  (
    {'teacher.dtype': 'bfloat16'},
    "teacher.dtype='bfloat16' with teacher.path empty",
  ),
  ({'teacher.offload': True}, 'teacher.offload=True with teacher.path empty'),
  (
    {'teacher.urls': ('http://a:1',), 'teacher.path': 'b'},
    "teacher.urls=('http://a:1',) with teacher.path='b'; either servers",
  ),
  ({'teacher.urls': ('a:1',)}, "teacher.urls=('a:1',); give each as http"),
  (
    {'teacher.urls': ('http://a:1',), 'sampler.temperature': 0.5},
    'teacher.urls with sampler.temperature=0.5, but servers score at',
  ),
  ({'teacher.dialect': 'tgi'}, "teacher.dialect='tgi'"),
  ({'data.train': ''}, "data.train=''; name where the prompts come from"),
  ({'data.train': ({'name': ''},)}, "data.train[0].name=''"),
  ({'data.train': ({'name': 'a', 'weight': -1.0},)}, 'weight=-1.0; give a num'),
  ({'data.heldout': ({'name': ''},)}, "data.heldout[0].name=''"),
  ({'data.heldout': ()}, 'no source in data.heldout'),
  ({'data.prompt_field': ''}, "data.prompt_field=''; name the field"),
  ({'data.prompt_field': 'answer'}, "both 'answer', so that the model would"),
  ({'data.tokenizer': ''}, "data.tokenizer='', the tokenizer of the model"),
  ({'data.system_prompt': 'x'}, "data.system_prompt='x' with data.chat=False"),
  ({'data.chat_kwargs': {'x': 1}}, 'data.chat_kwargs='),
  ({'data.prompt_buckets': (0,)}, 'data.prompt_buckets=(0,)'),
  ({'data.completion_buckets': (-5,)}, 'data.completion_buckets=(-5,)'),
  ({'data.completion_buckets': (4,)}, 'above the largest of'),
  ({'data.too_long': 'cut'}, "data.too_long='cut'"),
  ({'data.last_turn': 'drop'}, "data.last_turn='drop'"),
  ({'rewards': ()}, 'no rewards'),
  ({'rewards': ({'name': ''},)}, "rewards[0].name=''; name a function"),
  ({'rewards': ({'weight': 0.0},)}, 'weight=0 for each of its rewards'),
  (
    {'rewards': ({'weight': 0.0}, {'name': 'gsm8k', 'weight': -0.0})},
    'weight=0 for each of its rewards',
  ),
  ({'rewards': ({'failed_reward': 1.0},)}, "on_failure='invalid'"),
  ({'rewards': ({'where': 'x'},)}, "rewards[0].where='x'"),
  ({'rewards': ({'on_failure': 'x'},)}, "rewards[0].on_failure='x'"),
  ({'workers.number': 100_000}, 'workers.number=100000; give at most 4096'),
  ({'workers.time_limit_secs': 0.0}, 'workers.time_limit_secs=0.0'),
  ({'workers.start_limit_secs': 0.0}, 'workers.start_limit_secs=0.0'),
  ({'workers.wall_limit_secs': -1.0}, 'workers.wall_limit_secs=-1.0'),
  ({'workers.memory_limit_gib': 0.0}, 'workers.memory_limit_gib=0.0'),
  ({'workers.memory_limit_gib': 0.01}, 'in which Python does not start'),
  (
    {'environment.history': 'x'},
    "environment.history='x'; give one of append, template.",
  ),
  ({'environment.seed': 'x'}, "environment.seed='x'; give one of group,"),
  ({'environment.where': 'x'}, "environment.where='x'"),
  ({'environment.others': {'a': 'b:c'}}, 'without environment.name'),
  ({'environment.max_turns': 0}, 'environment.max_turns=0'),
  ({'environment.episode_tokens': -1}, 'environment.episode_tokens=-1'),
  ({'environment.context_tokens': -1}, 'environment.context_tokens=-1'),
  ({'environment.result_tokens': 0}, 'environment.result_tokens=0'),
  ({'environment.processes': 5000}, 'environment.processes=5000; give at most'),
  ({'environment.sessions': 256}, 'environment.sessions=256; give at most 255'),
  ({'environment.tool_secs': 0.0}, 'environment.tool_secs=0.0'),
  ({'environment.episode_secs': 0.0}, 'environment.episode_secs=0.0'),
  ({'environment.memory_limit_gib': 0.01}, 'environment.memory_limit_gib=0.01'),
  ({'environment.retries': -1}, 'environment.retries=-1; give 0 or more'),
  ({'environment.failed_share': 1.5}, 'environment.failed_share=1.5; give at'),
  (
    {'environment.name': 'calculator'},
    "environment.name='calculator' with data.chat=False",
  ),
  (
    {'agent.command': 'sh'},
    "agent.command with environment.name='', which does not play it",
  ),
  (
    {'environment.name': 'agent', 'data.chat': True},
    "environment.name='agent' with no agent",
  ),
  ({**AGENT, 'agent.function': 'a:b'}, 'with agent.command and agent.function'),
  ({**AGENT, 'agent.kwargs': {'a': 1}}, 'agent.kwargs={'),
  ({**AGENT, 'agent.variables': {'a': 1}}, 'agent.variables={'),
  ({**AGENT, 'agent.confine': 'jail'}, 'agent.confine='),
  ({'sampler.prompts': 0}, 'sampler.prompts=0'),
  ({'sampler.group': 0}, 'sampler.group=0'),
  ({'sampler.group': 2**30}, 'tokens of a rollout'),
  ({'sampler.max_tokens': 0}, 'sampler.max_tokens=0'),
  ({'sampler.min_tokens': 5}, 'so that no completion could end'),
  ({'sampler.temperature': 0.0}, 'under which there is nothing to learn from'),
  ({'sampler.temperature': 1e30}, 'sampler.temperature=1e+30; give at most'),
  ({'sampler.top_k': 1}, 'sampler.top_k=1, which draws the likeliest token'),
  ({'sampler.top_p': 0.0}, 'sampler.top_p=0.0; give more than 0'),
  ({'sampler.min_p': 1.0}, 'sampler.min_p=1.0, which draws the likeliest'),
  ({'sampler.max_rows': 0}, 'sampler.max_rows=0'),
  ({'sampler.tensor': -1}, 'sampler.tensor=-1'),
  (
    {'sampler.resample_rounds': 2, 'sampler.group': 1},
    'where the completions of a group always earn the same',
  ),
  ({'sampler.ahead': 17}, 'sampler.ahead=17; give at most 16'),
  ({'generator.devices': -1}, 'generator.devices=-1; give 0 or more'),
  ({'generator.every': 0}, 'generator.every=0; give 1 or more'),
  (
    {'generator.every': 3, 'sampler.ahead': 1},
    'generator.every=3 with sampler.ahead=1, whose rollouts need newer',
  ),
  ({'generator.updates': 'always'}, "generator.updates='always'"),
  (
    {'generator.updates': 'inflight'},
    "generator.updates='inflight' with sampler.ahead=0, where no version",
  ),
  ({'generator.parts': 0}, 'generator.parts=0; give 1 or more'),
  (
    {'generator.parts': 3},
    'generator.parts=3 with sampler.prompts=32, which it does not divide',
  ),
  ({'generator.listen': 'here'}, "generator.listen='here'; give HOST:PORT"),
  (
    {'generator.listen': 'localhost:70000'},
    "generator.listen='localhost:70000'; give HOST:PORT",
  ),
  (
    {'generator.listen': 'localhost:0', 'generator.devices': 1},
    "generator.listen='localhost:0' with generator.devices=1; either jobs",
  ),
  (
    {'generator.listen': '0.0.0.0:8470', 'generator.secret': ''},
    "generator.listen='0.0.0.0:8470' without generator.secret, where other",
  ),
  ({'generator.weights': 'mail'}, "generator.weights='mail'"),
  ({'generator.wait_secs': 0.0}, 'generator.wait_secs=0.0'),
  ({'engine.kind': 'grpc'}, "engine.kind='grpc'"),
  ({'engine.kind': 'http'}, "engine.kind='http' with engine.urls=(); give"),
  ({'engine.urls': ('http://a:1',)}, "engine.kind='local' with engine.urls="),
  (
    {'engine.kind': 'http', 'engine.urls': ('a:8000',)},
    "engine.urls=('a:8000',); give each as http://HOST:PORT",
  ),
  (
    {**SERVERS, 'generator.devices': 1},
    "engine.kind='http' with generator.devices or generator.listen",
  ),
  (
    {**SERVERS, 'generator.updates': 'inflight', 'sampler.ahead': 1},
    "engine.kind='http' with generator.updates='inflight'",
  ),
  (
    {**SERVERS, 'sampler.top_p': 0.9, 'sampler.top_k': 5},
    "engine.kind='http' with sampler.top_k, sampler.top_p: servers do not",
  ),
  (
    {**SERVERS, 'sampler.temperature': 2.5},
    'sampler.temperature=2.5, above the 2 that vLLM takes',
  ),
  ({'engine.dialect': 'tgi'}, "engine.dialect='tgi'"),
  ({'engine.dtype': 'int8'}, "engine.dtype='int8'"),
  ({'engine.concurrency': 0}, 'engine.concurrency=0; give 1 or more'),
  ({'engine.timeout_secs': 0.0}, 'engine.timeout_secs=0.0'),
  ({'engine.retries': -1}, 'engine.retries=-1; give 0 or more'),
  (
    {'optim.name': 'lyon'},
    "optim.name='lyon' (did you mean 'lion'?); give one of adamw,",
  ),
  (
    {'optim.name': 'sgd', 'optim.b2': 0.5},
    "optim.b2=0.5 with optim.name='sgd', which does not read it",
  ),
  (
    {'optim.name': 'a:b', 'optim.epsilon': 0.5},
    'and its own arguments in optim.kwargs',
  ),
  (
    {'optim.name': 'muon', 'optim.brake': 'decay'},
    "optim.brake='decay' with optim.name='muon': it needs the moments of Adam",
  ),
  ({'optim.name': 'lion', 'optim.moments': True}, 'optim.moments=True with'),
  (
    {'optim.name': 'lion', 'optim.overshoot_every_steps': 2},
    'optim.overshoot_every_steps=0',
  ),
  ({'optim.decay_share': 0.0}, 'optim.decay_share=0.0; give more than 0'),
  ({'optim.decay_share': 1.5}, 'optim.decay_share=1.5; give at most 1'),
  ({'optim.lr': -1.0}, 'optim.lr=-1.0; give 0 or more'),
  ({'optim.lr': 1e4}, 'optim.lr=10000.0; give at most 10'),
  ({'optim.warmup_steps': 60, 'optim.decay': 'linear'}, 'leave none'),
  ({'optim.decay': 'step'}, "optim.decay='step'"),
  ({'optim.b1': 1.0}, 'optim.b1=1.0; give at least 0 and less than 1'),
  ({'optim.b2': -0.1}, 'optim.b2=-0.1'),
  ({'optim.epsilon': 0.0}, 'optim.epsilon=0.0'),
  ({'optim.weight_decay': -0.1}, 'optim.weight_decay=-0.1'),
  ({'optim.weight_decay': 1e4}, 'all of it, or more'),
  ({'optim.clip_norm': -1.0}, 'optim.clip_norm=-1.0'),
  ({'optim.brake': 'hard'}, "optim.brake='hard'"),
  ({'optim.reward_scale': -1.0}, 'optim.reward_scale=-1.0'),
  ({'optim.overshoot_every_steps': -1}, 'optim.overshoot_every_steps=-1'),
  ({'learner.batches': 0}, 'learner.batches=0'),
  ({'learner.batches': 5}, 'learner.batches=5 with sampler.prompts=32'),
  ({'learner.epochs': 0}, 'learner.epochs=0'),
  ({'learner.layout': 'x'}, "learner.layout='x'"),
  ({'learner.micro_rows': -1}, 'learner.micro_rows=-1'),
  ({'learner.row_completions': 3}, 'give a divisor'),
  ({'learner.pack_tokens': 8, 'learner.layout': 'padded'}, 'pack_tokens with'),
  ({'learner.anchor': 'x'}, "learner.anchor='x'"),
  ({'learner.anchor': 'sampler', 'sampler.top_k': 5}, 'ratio of every token'),
  ({'learner.fields': {'x': 1}}, "learner.fields['x']=1; name a function"),
  ({'learner.on_zero_advantage': 'x'}, "learner.on_zero_advantage='x'"),
  ({'learner.nonfinite_rollouts': -1}, 'learner.nonfinite_rollouts=-1'),
  ({'learner.expert_balance': -0.1}, 'learner.expert_balance=-0.1'),
  ({'reference.refresh_steps': -1}, 'reference.refresh_steps=-1'),
  ({'reference.refresh_weight': 0.0}, 'reference.refresh_weight=0.0'),
  ({'reference.refresh_weight': 1.5}, 'reference.refresh_weight=1.5'),
  ({'warm_up.steps': -1}, 'warm_up.steps=-1'),
  ({'warm_up.examples': 0}, 'warm_up.examples=0'),
  ({'warm_up.micro_rows': -1}, 'warm_up.micro_rows=-1'),
  ({'warm_up.lr': 1e3}, 'warm_up.lr=1000.0; give at most 10'),
  (
    {'warm_up.steps': 1, 'warm_up.demonstrations': ''},
    "warm_up.demonstrations='' with warm_up.steps=1",
  ),
  ({'warm_up.carry_free_share': 1.1}, 'warm_up.carry_free_share=1.1'),
  ({'evaluation.every_steps': -1}, 'evaluation.every_steps=-1'),
  ({'evaluation.examples': 0}, 'evaluation.examples=0'),
  ({'evaluation.right_reward': math.nan}, 'evaluation.right_reward=nan'),
  ({'checkpoint.every_steps': 0}, 'checkpoint.every_steps=0'),
  ({'checkpoint.every_minutes': -1.0}, 'checkpoint.every_minutes=-1.0'),
  ({'checkpoint.every_warm_up_steps': 0}, 'checkpoint.every_warm_up_steps=0'),
  ({'checkpoint.keep_last': 0}, 'checkpoint.keep_last=0'),
  ({'export.every_saves': -1}, 'export.every_saves=-1'),
  ({'export.dtype': 'int8'}, "export.dtype='int8'"),
  ({'log.display': 'x'}, "log.display='x'"),
  ({'log.samples': -1}, 'log.samples=-1'),
  ({'log.wandb_mode': 'x'}, "log.wandb_mode='x'"),
  ({'log.mlflow_uri': 'http://a:b@c'}, 'log.mlflow_uri with a name and'),
  ({'early_stop.mode': 'most'}, "early_stop.mode='most'; give one of max"),
  ({'early_stop.patience': 0}, 'early_stop.patience=0'),
  (
    {'early_stop.least_improvement': -0.1},
    'early_stop.least_improvement=-0.1',
  ),
  ({'log.completions_every_steps': -1}, 'log.completions_every_steps=-1'),
  (
    {'log.token_effects': True, 'log.completions_every_steps': 0},
    'log.token_effects=True with log.completions_every_steps=0',
  ),
  ({'log.geometry_every_steps': -1}, 'log.geometry_every_steps=-1'),
  ({'log.kl_alarm': -1.0}, 'log.kl_alarm=-1.0'),
  ({'log.entropy_alarm': -1.0}, 'log.entropy_alarm=-1.0'),
  ({'log.sampler_gap_alarm': -1.0}, 'log.sampler_gap_alarm=-1.0'),
]
# Names, which are resolved where they are used, and switches.
ANY_VALUE = {
  'engine.folder', 'engine.key_env', 'engine.model',
  'shuffle_rewards', 'compilation_cache', 'model.path', 'model.qk_norm',
  'model.qkv_bias', 'model.tied_embeddings', 'model.unroll',
  'model.beyond_context', 'data.answer_field', 'data.eos_tokens',
  'data.pad_token', 'data.completion_prefix',
  'sampler.stop_strings', 'sampler.retire_solved', 'agent.trust_agent',
  'optim.offload', 'learner.compute_all', 'reference.offload',
  'evaluation.answer', 'log.tensorboard', 'log.wandb_project',
  'log.mlflow_experiment', 'log.expected_prefixes', 'export.adapter',
  'export.public',
}  # fmt: skip
# Refused where the model, the mesh, the method or the environment is built: see
# below, method_test.py, environment_test.py and teacher_test.py.
BUILT = {
  'model.compute_dtype', 'model.residual_dtype', 'model.attention',
  'environment.kwargs', 'environment.call_format', 'agent.trains',
  'teacher.key_env', 'teacher.model',
  'agent.readable', 'learner.method', 'learner.method_kwargs',
  'checkpoint.best_metric',
  'early_stop.metric', 'export.push_to', 'optim.kwargs', 'mesh.data',
  'mesh.fsdp', 'mesh.tensor', 'mesh.expert', 'mesh.context', 'mesh.slices',
}  # fmt: skip


def with_fields(fields):
  values = config_lib.default()
  # A ConfigDict would take the fields of a dict one by one.
  kwargs = {k: v for k, v in fields.items() if isinstance(v, dict)}
  for name, value in kwargs.items():
    group, field = name.split('.')
    setattr(values[group], field, value)
  rest = {k: v for k, v in fields.items() if k not in kwargs}
  values.update_from_flattened_dict(rest)
  return config_lib.resolve(values)


@pytest.mark.parametrize('fields, words', CONFIG)
def test_a_value_without_meaning_is_refused(fields, words):
  with pytest.raises(ValueError, match='^The config has ') as refused:
    with_fields(fields)
  assert words in str(refused.value) and '\n' not in str(refused.value)
  assert str(refused.value).endswith('.')


def test_every_field_is_looked_at():
  known = set(config_lib.flat(dataclasses.asdict(config_lib.Config())))
  rows = {name for fields, _ in CONFIG for name in fields}
  assert rows | ANY_VALUE | BUILT == known
  assert not ANY_VALUE & BUILT and not rows & (ANY_VALUE | BUILT)


@pytest.mark.parametrize(
  'fields',
  [
    {'steps': 0, 'optim.warmup_steps': 10},
    {'optim.lr': 0.0},
    {'sampler.group': 1},
    {'rewards': ({'weight': 0.0}, {'name': 'gsm8k', 'weight': -1.0})},
    {'data.answer_field': ''},
    {'checkpoint.best_metric': ''},
    {'workers.memory_limit_gib': 1e6},
  ],
)
def test_unusual_values_that_mean_something_are_not(fields):
  with_fields(fields)


LLAMA = dict(
  architectures=['LlamaForCausalLM'],
  vocab_size=14,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
)
QWEN3_MOE = dict(LLAMA, architectures=['Qwen3MoeForCausalLM'], head_dim=8)
QWEN3_MOE.update(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
LINEAR = {'rope_type': 'linear', 'factor': 2.0}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 2.0,
  'original_max_position_embeddings': 8,
}
WHOLE = 'but a whole number from 1 to 2147483647 is needed'
CONFIG_JSON = [
  (LLAMA, dict(rope_theta='x'), "rope_theta='x', but a finite number above 0"),
  (LLAMA, dict(rope_theta=-1.0), 'rope_theta=-1.0, but'),
  (LLAMA, dict(rope_theta=1), 'rope_theta=1, but a number above 1 is needed'),
  (LLAMA, dict(rope_theta=math.nan), 'rope_theta=nan, but'),
  (LLAMA, dict(rope_theta=10**400), 'rope_theta=1000'),
  (LLAMA, dict(rms_norm_eps=-1), 'rms_norm_eps=-1, but a finite number above'),
  (LLAMA, dict(rms_norm_eps=0), 'rms_norm_eps=0, but'),
  (LLAMA, dict(rms_norm_eps=2.0), 'above 0, at most 1, is needed'),
  (LLAMA, dict(rms_norm_eps=[1e-6]), 'rms_norm_eps=[1e-06], but'),
  (LLAMA, dict(vocab_size=0), f'vocab_size=0, {WHOLE}'),
  (LLAMA, dict(vocab_size='14'), f"vocab_size='14', {WHOLE}"),
  (LLAMA, dict(vocab_size=2**31), f'vocab_size=2147483648, {WHOLE}'),
  (LLAMA, dict(hidden_size=16.5), f'hidden_size=16.5, {WHOLE}'),
  (LLAMA, dict(hidden_size=-16), f'hidden_size=-16, {WHOLE}'),
  (LLAMA, dict(hidden_size=17), 'hidden_size=17, which num_attention_heads=2'),
  (LLAMA, dict(intermediate_size=True), f'intermediate_size=True, {WHOLE}'),
  (LLAMA, dict(num_hidden_layers=0), 'num_hidden_layers=0, but a whole numb'),
  (LLAMA, dict(num_attention_heads=[2]), f'num_attention_heads=[2], {WHOLE}'),
  (LLAMA, dict(num_key_value_heads=0), f'num_key_value_heads=0, {WHOLE}'),
  (LLAMA, dict(num_key_value_heads=3), 'num_key_value_heads=3 does not divide'),
  (LLAMA, dict(head_dim=7), 'heads of 7 entries'),
  (LLAMA, dict(head_dim={}), f'head_dim={{}}, {WHOLE}'),
  (LLAMA, dict(max_position_embeddings=-1), 'max_position_embeddings=-1, but'),
  (LLAMA, dict(max_position_embeddings='8k'), "embeddings='8k', but"),
  (LLAMA, dict(tie_word_embeddings='yes'), "tie_word_embeddings='yes', but tr"),
  (LLAMA, dict(tie_word_embeddings=1), 'tie_word_embeddings=1, but true or'),
  (LLAMA, dict(hidden_act=3), 'hidden_act=3, which is not built'),
  (LLAMA, dict(layer_types='full'), "layer_types='full', but a list of texts"),
  (LLAMA, dict(rope_scaling='linear'), "rope_scaling='linear', which is no"),
  (LLAMA, dict(rope_scaling=LINEAR | {'factor': 0}), 'factor=0 for rotary'),
  (LLAMA, dict(rope_scaling=LINEAR | {'factor': '2'}), "factor='2' for rotary"),
  (LLAMA, dict(rope_scaling=LINEAR | {'factor': -2}), 'factor=-2 for rotary'),
  (
    LLAMA,
    dict(rope_scaling=LLAMA3 | {'original_max_position_embeddings': -8}),
    'original_max_position_embeddings=-8 for rotary',
  ),
  (
    LLAMA,
    dict(rope_scaling=LLAMA3 | {'low_freq_factor': 4, 'high_freq_factor': 4}),
    'low_freq_factor=4 and high_freq_factor=4 for rotary',
  ),
  (
    LLAMA,
    dict(rope_parameters={'full_attention': LINEAR | {'factor': 'x'}}),
    "full_attention.factor='x' for rotary",
  ),
  (LLAMA, dict(architectures='LlamaForCausalLM'), 'give a list of one name'),
  (LLAMA, dict(rms_norm_eps=None), 'rms_norm_eps=None, but a finite number'),
  (LLAMA, dict(tie_word_embeddings=None), 'tie_word_embeddings=None, but true'),
  (LLAMA, dict(num_hidden_layers=2**31 - 1), 'a whole number from 1 to 10000'),
  (
    LLAMA,
    dict(rope_scaling={'rope_type': [1]}),
    'rope_type=[1] for rotary pos',
  ),
  (
    LLAMA,
    dict(rope_parameters={'full_attention': 3}),
    'full_attention=3 for rotary positions, which is no object',
  ),
  (
    LLAMA,
    dict(rope_scaling=LLAMA3 | {'low_freq_factor': 5}),
    'low_freq_factor=5 and high_freq_factor=4 for rotary',
  ),
  (QWEN3_MOE, dict(num_experts_per_tok=None), 'num_experts_per_tok=None, but'),
  (QWEN3_MOE, dict(decoder_sparse_step=None), 'decoder_sparse_step=None, but'),
  (
    QWEN3_MOE,
    dict(num_local_experts='x'),
    "num_local_experts='x', but a whole",
  ),
  (
    LLAMA | dict(architectures=['Qwen2ForCausalLM']),
    dict(use_sliding_window=True, max_window_layers=None),
    'use_sliding_window=True and max_window_layers=None',
  ),
  (
    LLAMA | dict(architectures=['Gemma2ForCausalLM'], num_key_value_heads=2),
    dict(query_pre_attn_scalar=None),
    'query_pre_attn_scalar=None, but a finite number above 0',
  ),
  (
    LLAMA,
    dict(architectures=['Gemma3ForConditionalGeneration'], text_config=[1]),
    'text_config=[1], which is no object',
  ),
  (
    LLAMA | dict(architectures=['MistralForCausalLM'], num_key_value_heads=2),
    dict(sliding_window=-4),
    'sliding_window=-4, but',
  ),
  (QWEN3_MOE, dict(num_experts_per_tok=5), 'num_experts_per_tok=5 of num_exp'),
  (QWEN3_MOE, dict(num_experts=-1), 'num_experts=-1, but a whole number from'),
  (
    QWEN3_MOE,
    dict(moe_intermediate_size=0),
    f'_size=0, {WHOLE}',
  ),
  (QWEN3_MOE, dict(decoder_sparse_step=0), f'decoder_sparse_step=0, {WHOLE}'),
  (QWEN3_MOE, dict(mlp_only_layers=[2]), 'mlp_only_layers with 2, and'),
  (QWEN3_MOE, dict(mlp_only_layers=[-1]), 'mlp_only_layers=[-1], but a list'),
  (QWEN3_MOE, dict(norm_topk_prob='x'), "norm_topk_prob='x', but true or"),
]


@pytest.mark.parametrize('base, changes, words', CONFIG_JSON)
def test_a_config_json_without_meaning_is_refused(base, changes, words):
  weights.config_from_huggingface(base)
  with pytest.raises(ValueError, match='config.json') as refused:
    weights.config_from_huggingface({**base, **changes})
  assert words in str(refused.value), refused.value


ENTROPY = 'credit_tokens_by_entropy'
ARGUMENTS = [
  ('add_kl', dict(coefficient=-0.1), 'coefficient=-0.1; give a number that is'),
  ('add_kl', dict(coefficient=math.nan), 'coefficient=nan'),
  ('add_kl', dict(coefficient=math.inf), 'coefficient=inf'),
  ('add_kl', dict(coefficient=None), 'coefficient=None; give a number'),
  ('add_kl', dict(coefficient='0.1'), "coefficient='0.1'; give a number"),
  ('subtract_kl', dict(coefficient=-1), 'coefficient=-1'),
  ('subtract_kl_to_go', dict(coefficient=-1), 'coefficient=-1'),
  ('add_teacher_kl', dict(coefficient=-1), 'coefficient=-1'),
  ('add_teacher_top_kl', dict(coefficient=-1), 'coefficient=-1'),
  (
    'add_teacher_top_kl',
    dict(coefficient=1, direction='back'),
    "direction='back'; give one of ('reverse', 'forward')",
  ),
  (
    'add_teacher_top_kl',
    dict(coefficient=1, number=0),
    'number=0; give how many',
  ),
  (
    'add_teacher_top_kl',
    dict(coefficient=1, number=2.0),
    'number=2.0; give how many',
  ),
  ('add_teacher_advantage', dict(coefficient=-1), 'coefficient=-1'),
  (
    'add_teacher_advantage',
    dict(reward_coefficient=-1),
    'reward_coefficient=-1',
  ),
  ('pull_to_old', dict(coefficient=-1), 'coefficient=-1'),
  ('imitate_positives', dict(coefficient=-1), 'coefficient=-1'),
  ('add_entropy_bonus', dict(coefficient=math.nan), 'coefficient=nan'),
  ('penalize_covariance', dict(share=2), 'share=2; give a number from 0 to 1'),
  ('penalize_covariance', dict(coefficient=-1), 'coefficient=-1'),
  ('subtract_entropy', dict(coefficient=-1), 'coefficient=-1'),
  ('silence_uncertain', dict(entropy_limit=-1), 'entropy_limit=-1'),
  ('mask_low_entropy', dict(share=-0.1), 'share=-0.1; give a number from 0'),
  ('detach_covariance', dict(share=1.1), 'share=1.1'),
  ('keep_largest_advantages', dict(share=1.5), 'share=1.5'),
  (ENTROPY, dict(alpha=1.5), 'alpha=1.5; give a number from 0 to 1'),
  (ENTROPY, dict(epsilon=-1), 'epsilon=-1'),
  ('normalize_by_group', dict(epsilon=-1e-4), 'epsilon=-0.0001'),
  ('normalize_over_tokens', dict(epsilon=math.nan), 'epsilon=nan'),
  ('divide_by_batch_deviation', dict(epsilon=-1), 'epsilon=-1'),
  ('ppo_clip', dict(low=1.0), 'low=1.0, so that the lower bound of the ratio'),
  ('ppo_clip', dict(low=3), 'is -2, below which no ratio lies'),
  ('ppo_clip', dict(low=-0.1), 'low=-0.1'),
  ('ppo_clip', dict(high=-0.1), 'high=-0.1'),
  ('ppo_clip', dict(cap=1.1), 'cap=1.1 and high=0.2'),
  ('sigmoid_gate', dict(positive=0), 'positive=0; give a number above 0'),
  ('gamma_weighted_score', dict(positive=(-1, 2)), 'positive=-1'),
  ('mask_off_policy_negatives', dict(threshold=-1), 'threshold=-1'),
  ('gate_small_advantages', dict(threshold=-1), 'threshold=-1'),
  ('weigh_conflict_tokens', dict(wrong=-1), 'wrong=-1'),
  ('truncate_token_importance', dict(cap=0), 'cap=0; give a number above 0'),
  ('truncate_sequence_importance', dict(cap=-2), 'cap=-2'),
  ('mask_sequence_importance', dict(cap=math.nan), 'cap=nan'),
  ('mean_over_sequence_sums', dict(budget_tokens='x'), "budget_tokens='x'"),
  ('constant_advantage', dict(value=math.inf), 'value=inf'),
  ('ppo_clip', dict(low=math.nan), 'low=nan; give a number'),
  ('ppo_clip', dict(high='x'), "high='x'; give a number"),
  ('ppo_clip', dict(low=None), 'low=None; give a number'),
  ('clip_log_ratio', dict(high=math.nan), 'high=nan'),
  ('gate_binary_kl', dict(low=1j), 'low=1j; give a number'),
  ('gate_probability_change', dict(low=[0.1]), 'low=[0.1]; give a number'),
  ('mask_token_importance', dict(low=math.nan), 'low=nan'),
  ('add_kl', dict(coefficient=True), 'coefficient=True; give a number'),
  ('add_kl', dict(coefficient=np.array(math.nan)), 'coefficient=nan; give'),
  ('add_kl', dict(coefficient=jnp.ones(2)), '; give a number'),
  ('pull_to_old', dict(coefficient=10**400), 'coefficient=1000'),
  ('ppo_clip', dict(cap=math.nan), 'cap=nan; give a number'),
  ('capped_score_function', dict(low=3), 'is -2, below which no ratio lies'),
  ('detach_covariance', dict(low_covariance=math.nan), 'low_covariance=nan'),
  ('detach_covariance', dict(low_covariance=6), 'between which nothing lies'),
  (
    'normalize_by_group',
    dict(under_root='false'),
    "under_root='false'; give T",
  ),
  ('normalize_over_tokens', dict(under_root=1), 'under_root=1; give True or'),
  ('divide_by_batch_deviation', dict(within_groups='no'), 'give True or False'),
  ('mask_token_importance', dict(self_normalized=None), 'give True or False'),
  ('gate_small_advantages', dict(spare_penalty='x'), 'give True or False'),
  (
    'normalize_each_reward',
    dict(weights='ab'),
    "weights='ab'; give one number",
  ),
  ('normalize_each_reward', dict(weights=(1, math.nan)), 'weights=nan; give'),
  ('credit_pass_at_k', dict(k=1.5), 'k=1.5; give a k of at least 1'),
  ('credit_pass_at_k', dict(k=len), 'k=<built-in function len>; give a number'),
  ('adaptive_kl', dict(initial=1, target=1, gain='x'), "gain='x'"),
  ('clip_advantage', dict(minimum=math.nan), 'minimum=nan; give a number'),
  ('clip_advantage', dict(minimum=1, maximum=-1), 'minimum=1 and maximum=-1'),
  ('adaptive_kl', dict(initial=-1, target=1), 'initial=-1'),
  ('entropy_target', dict(target=-1), 'target=-1'),
]


@pytest.mark.parametrize('name, kwargs, words', ARGUMENTS)
def test_an_argument_of_a_loss_without_meaning_is_refused(name, kwargs, words):
  with pytest.raises(ValueError, match=f'^{name} got ') as refused:
    getattr(losses, name)(**kwargs)
  assert words in str(refused.value)


@pytest.mark.parametrize(
  'name, kwargs',
  [
    ('add_kl', dict(coefficient=lambda rollout: 0.1)),
    ('add_kl', dict(coefficient=losses.adaptive_kl(0.1, 0.01))),
    ('add_entropy_bonus', dict(coefficient=-0.1)),
    ('silence_uncertain', dict(entropy_limit=math.inf)),
    ('ppo_clip', dict(low=0.99, high=10.0)),
    ('capped_score_function', dict(low=1.0)),
  ],
)
def test_schedules_and_limits_that_are_off_are_not(name, kwargs):
  getattr(losses, name)(**kwargs)


def test_a_negative_kl_and_a_wide_clip_are_refused_in_a_config():
  for kwargs, words in (
    (
      {'kl_coefficient': -0.1},
      "method_kwargs={'kl_coefficient': -0.1} cannot be used: add_kl got coeff",
    ),
    ({'low': 1.0, 'high': 1.0}, 'ppo_clip got low=1.0'),
  ):
    with pytest.raises(ValueError, match=re.escape(words)):
      build_method.make_method('grpo', kwargs)


SHAPE = models.ModelConfig(14, num_layers=1, width=32)
SPARSE = dataclasses.replace(
  SHAPE,
  pattern=(models.LayerKind(experts=True),),
  experts=models.Experts(4, 2, 16),
)


@pytest.mark.parametrize(
  'shape, fields, words',
  [
    (SHAPE, {'mesh.expert': 2}, 'config.mesh.expert=2, but the model has no'),
    (SHAPE, {'learner.expert_balance': 0.1}, 'expert_balance=0.1, but the mod'),
    (
      SHAPE,
      {'lora.rank': 33},
      'config.lora.rank=33, but the model has',
    ),
    (SPARSE, {'lora.rank': 33}, 'config.lora.rank=33'),
  ],
)
def test_what_a_model_has_not_is_refused(shape, fields, words):
  config = with_fields(fields)
  mesh = sharding.make_mesh(**vars(config.mesh))
  with pytest.raises(ValueError, match=re.escape(words)):
    limits.check_model(config, shape, mesh)
  if shape is SHAPE and 'lora.rank' not in fields:
    limits.check_model(config, SPARSE, mesh)


@pytest.mark.parametrize(
  'shape, fields, words',
  [
    # (2**40 + 1280 * 2**19) parameters of 16 bytes; and 2**31 tokens, each
    # with 2 * 4 * 32 keys and values of 4 bytes.
    (
      dataclasses.replace(SHAPE, vocab_size=2**20, width=2**19),
      {},
      r'the parameters of the model \(width=524288, .* take 16,394.0 GiB at',
    ),
    (
      SHAPE,
      {'data.prompt_buckets': (2**31 - 1,)},
      r'a single row of 2147483647 tokens \(data.prompt_buckets\) and 5 of a '
      r'completion takes 2,048.0 GiB at least; give smaller widths',
    ),
    # 2**12 rows of 2**20 tokens and a turn.
    (
      SHAPE,
      {
        'environment.name': 'any',
        'data.chat': True,
        'data.completion_buckets': (2**20,),
        'sampler.max_tokens': 5,
        'sampler.prompts': 2**12,
      },
      r'4,096 rows for turns of episodes \(sampler.max_rows\) of 1,048,576 '
      r'tokens each take 4,096.0 GiB at least; lower sampler.max_rows',
    ),
  ],
)
def test_more_memory_than_there_is_is_refused(shape, fields, words):
  fields = {
    'data.prompt_buckets': (6,), 'data.completion_buckets': (5,), **fields
  }  # fmt: skip
  mesh = sharding.make_mesh()
  with pytest.raises(ValueError, match=words):
    limits.check_memory(with_fields(fields), models.Transformer(shape), mesh)
  small = {'data.prompt_buckets': (6,), 'data.completion_buckets': (5,)}
  limits.check_memory(with_fields(small), models.Transformer(SHAPE), mesh)


@pytest.mark.parametrize(
  'sizes, words',
  [
    (dict(data=-1, fsdp=3), r'multiply to 3, which does not divide the 8 dev'),
    (dict(data=-1, tensor=5), 'multiply to 5, which does not divide'),
    (dict(fsdp=9), 'needs 9 devices, but 8 are present'),
    (dict(data=0), 'give 1 or more for each'),
    (dict(context=-1), 'give 1 or more for each'),
  ],
)
def test_a_mesh_that_leaves_devices_out_unasked_is_refused(sizes, words):
  with pytest.raises(ValueError, match=words):
    sharding.mesh_shape(8, **sizes)


@pytest.mark.parametrize(
  'name',
  [
    'heldout_acc', 'reward_mean', 'acc', 'val_loss', 'reward/gsm8k',
    'reward/exact_match_mean', 'nonsense', 'Reward', ' reward', 'loss/total',
  ],
)  # fmt: skip
def test_an_unknown_best_metric_is_refused(name):
  config = with_fields({'checkpoint.best_metric': name})
  with pytest.raises(ValueError, match='is no metric of this run'):
    limits.check_best_metric(config, ['exact_match'])
  own = with_fields(
    {'checkpoint.best_metric': name, 'learner.method': 'tests.own:method'}
  )
  limits.check_best_metric(own, ['exact_match'])  # may measure anything


@pytest.mark.parametrize(
  'name',
  [
    '', 'heldout_accuracy', 'reward', 'accuracy', 'reward/exact_match',
    'reward/exact_match_std', 'kl_old_k3', 'entropy', 'adam_carried_norm',
    'length_tokens', 'geometry_cosine_mean', 'sample_tokens_per_sec',
    'groups_solved', 'truncated', 'loss', 'mfu_learn', 'tokens_drawn',
    'groups_short', 'groups_surplus', 'learning_rate_min',
    *itertools.chain(*table.GROUPS.values()),
  ],
)  # fmt: skip
def test_a_metric_that_a_run_may_have_is_not(name):
  config = with_fields({'checkpoint.best_metric': name})
  limits.check_best_metric(config, ['exact_match'])


EARLY = 'early_stop.metric'


@pytest.mark.parametrize(
  'fields, words',
  [
    ({EARLY: 'reward_mean'}, "'reward_mean' is no metric .* such as 'reward"),
    (
      {EARLY: 'heldout_accuracy', 'data.heldout': ''},
      "with data.heldout='' there are none",
    ),
    (
      {EARLY: 'heldout_accuracy', 'evaluation.every_steps': 0},
      'with evaluation.every_steps=0 there are none',
    ),
  ],
)
def test_a_metric_that_cannot_end_a_run_early_is_refused(fields, words):
  with pytest.raises(ValueError, match=f'config.early_stop.metric=.*{words}'):
    limits.check_early_stop(with_fields(fields), ['exact_match'])


@pytest.mark.parametrize(
  'fields',
  [
    {EARLY: '', 'data.heldout': ''},
    {EARLY: 'reward/exact_match', 'data.heldout': ''},
    {EARLY: 'heldout_accuracy'},
    {EARLY: 'mine', 'learner.method': 'tests.own:method'},
  ],
)
def test_a_metric_that_can_is_not(fields):
  limits.check_early_stop(with_fields(fields), ['exact_match'])


def test_they_are_refused_at_the_start_of_a_run(tmp_path):
  for given, words in (
    ('checkpoint.best_metric=reward_mean', "'reward_mean' is no metric"),
    ('lora.rank=64', 'config.lora.rank=64, but the model has the width 32'),
    ('mesh.expert=2', 'config.mesh.expert=2, but the model has no experts'),
    ('data.prompt_buckets=(2147483647,)', 'This run needs more memory than'),
  ):
    done = cli.call(
      'train', cli.SMALL, f'--config.{given}', f'--workdir={tmp_path}/run'
    )
    cli.assert_refused(done, words)
    assert not (tmp_path / 'run').exists()


ADAM = optax.adam(0.1)
SCHEDULE = dict(peak=0.1, warmup_steps=2, decay='linear', total_steps=10)
OPTIM = [
  ('learning_rate', SCHEDULE | dict(peak=-1), 'peak=-1; give a finite number'),
  ('learning_rate', SCHEDULE | dict(peak=math.nan), 'peak=nan'),
  (
    'learning_rate',
    SCHEDULE | dict(warmup_steps=-1),
    'warmup_steps=-1; give a',
  ),
  (
    'learning_rate',
    SCHEDULE | dict(warmup_steps=2.5),
    'a whole number that is',
  ),
  ('learning_rate', SCHEDULE | dict(total_steps=math.inf), 'total_steps=inf'),
  ('learning_rate', SCHEDULE | dict(total_steps='x'), "total_steps='x'"),
  ('adamw', dict(schedule=-0.1), 'schedule=-0.1'),
  ('adamw', dict(schedule='x'), "schedule='x'"),
  ('adamw', dict(schedule=0.1, b1='x'), "b1='x'"),
  ('adamw', dict(schedule=0.1, b2=math.nan), 'b2=nan'),
  ('adamw', dict(schedule=0.1, epsilon=-1e-8), 'epsilon=-1e-08'),
  ('adamw', dict(schedule=0.1, weight_decay=math.nan), 'weight_decay=nan'),
  ('adamw', dict(schedule=0.1, clip_norm=0), 'clip_norm=0; give a finite num'),
  ('project_outward', dict(inner=ADAM, epsilon=-1), 'epsilon=-1'),
  ('record_adam_moments', dict(inner=ADAM, epsilon=math.nan), 'epsilon=nan'),
  ('restore_reward_scale', dict(inner=ADAM, reference=0), 'reference=0; give'),
  ('restore_reward_scale', dict(inner=ADAM, reference=math.nan), '=nan; give'),
]


@pytest.mark.parametrize('name, kwargs, words', OPTIM)
def test_an_argument_of_an_optimizer_without_meaning_is_refused(
  name, kwargs, words
):
  with pytest.raises(ValueError, match=f'^{name} got ') as refused:
    getattr(optim, name)(**kwargs)
  assert words in str(refused.value)


@pytest.mark.parametrize(
  'name, kwargs',
  [
    ('learning_rate', dict(peak=0)),
    ('learning_rate', dict(peak=np.float32(0.1), warmup_steps=np.int64(2))),
    ('adamw', dict(schedule=lambda count: 0.1, clip_norm=None)),
    ('adamw', dict(schedule=jnp.float32(0.1), b1=jnp.float32(0.5))),
  ],
)
def test_numbers_of_any_kind_are_not(name, kwargs):
  getattr(optim, name)(**kwargs)


FLAGS = [
  (('convert', 'a', 'b', '--shard_gb=inf'), '--shard_gb=inf is no size'),
  (('plan', '--topology=h100-sxm:8', '--price=-1'), '--price=-1.0 is no price'),
  (('plan', '--topology=h100-sxm:8', '--price=nan'), '--price=nan is no price'),
  (('plan', '--topology=h100-sxm:8', '--search=-1'), '--search=-1; give how'),
  (('train', '--profile_steps=0,3'), '--profile_steps=0,3 is no range'),
  (('train', '--profile_steps=99,100'), 'begins behind the last rollout'),
]


@pytest.mark.parametrize('given, words', FLAGS)
def test_a_flag_without_meaning_is_refused(given, words, tmp_path):
  config = () if given[0] == 'convert' else (cli.SMALL,)
  workdir = (f'--workdir={tmp_path}/run',) if given[0] == 'train' else ()
  cli.assert_refused(cli.call(*given, *config, *workdir), words)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'given, words',
  [
    (dict(samples=0), '--samples=0 asks for none'),
    (dict(samples=2.5), '--samples=2.5; give a whole number, 1 or more'),
    (dict(examples=-3), '--examples=-3; give a whole number, 0 or more'),
    (dict(ks=[0]), 'k=0 with 8 samples per prompt; give a k from 1'),
    (dict(ks=['1']), "k='1' with 8 samples"),
  ],
)
def test_an_evaluation_of_nothing_is_refused(given, words):
  policy = policies.Policy(mock.Mock(), 3)
  given = dict(examples=0, samples=8, ks=[1]) | given
  with pytest.raises(ValueError, match=re.escape(words)):
    policies.evaluate(policy, **given)
