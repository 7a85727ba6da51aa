"""Chats on their way through a rollout; several end tokens; empty answers."""

import dataclasses
import types

import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.commands import eval_and_sample
from grpo_jax.episodes import rollout
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import parquet
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from tests import tiny

# 38 characters and two more tokens, as many as the tiny model has rows.
_CHARACTERS = data.character_tokenizer(' 0123456789+:;=abcdefghijklmnopqrstuvx')
_TEMPLATE = data.ChatTemplate(
  "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
  '{% if add_generation_prompt %}a:{% endif %}'
)
CHAT = data.PromptFormat(
  chat=True, system_prompt='be brief', completion_prefix='='
)


def tokenizer(form=CHAT, ends=(1,), pad=1):
  return data.Tokenizer(
    _CHARACTERS.backend,
    ends,
    pad,
    chat_template=_TEMPLATE,
    prompt_format=form,
  )


def user(text):
  return {'role': 'user', 'content': text}


def assistant(text):
  return {'role': 'assistant', 'content': text}


RECORDS = [
  {'prompt': '1+2', 'answer': '3', 'index': 0},
  {'prompt': [user('1+2'), assistant('3'), user('4')], 'index': 1},
]
WRITTEN = ['s:be brief;u:1+2;a:=', 's:be brief;u:1+2;a:3;u:4;a:=']


def engine():
  model = tiny.model(num_layers=1)
  made = engines.LocalEngine(
    model, prompt_buckets=(32,), completion_buckets=(8,)
  )
  made.load(tiny.params(model), version=3)
  return made


def collect(tokens, records=RECORDS, judge=None, group=3):
  judge = judge or (lambda prompt, completion, example: 1.0)
  options = engines.Sampling(eos_ids=tokens.eos_ids)
  return rollout.collect(
    records, engine(), tokens, [rewards.WeightedReward('judge', judge)],
    options, 8, group, 0, 0, (8,),
  )  # fmt: skip


def test_the_model_reads_the_chat_and_people_the_question(tmp_path):
  seen = []

  def judge(prompt, completion, example):
    seen.append((prompt, completion, example['prompt']))
    return 0.0

  got = collect(tokenizer(), judge=judge)
  assert [_CHARACTERS.decode(ids) for ids in got.prompts] == WRITTEN
  assert got.prompt_texts == ['1+2', '4']
  prompts = [(prompt, whole) for prompt, _, whole in seen]
  first, second = RECORDS
  assert (
    prompts == [('1+2', first['prompt'])] * 3 + [('4', second['prompt'])] * 3
  )
  # What was sampled, and nothing of the prefix.
  assert [text for _, text, _ in seen] == [t for row in got.texts for t in row]
  parquet.write(tmp_path / 'a.parquet', got, 0)
  assert parquet.read(tmp_path / 'a.parquet').prompt_texts == ['1+2', '4']


def test_messages_are_refused_where_prompts_are_texts():
  plain = tokenizer(data.PromptFormat())
  with pytest.raises(ValueError, match='set config.data.chat=True'):
    collect(plain)


def test_demonstrations_are_chats_with_the_end_of_a_turn():
  # The template ends turns by ';', which comes second here.
  (turn,) = _CHARACTERS.encode(';')
  tokens = tokenizer(ends=(1, turn))
  record = {**RECORDS[1], 'answer': '4'}
  got = rollout.demonstrations([record], tokens, (8,))
  assert _CHARACTERS.decode(got.prompts[0]) == WRITTEN[1]
  assert got.prompt_texts == ['4'] and got.length.tolist() == [[2]]
  expected = [*_CHARACTERS.encode('4'), turn]
  assert got.batch.tokens[0, 0, :2].tolist() == expected


def test_several_end_tokens_of_which_one_is_the_padding():
  ends = (5, 1, 9)
  tokens = tokenizer(ends=ends, pad=5)
  got = collect(tokens, group=16)
  last = np.take_along_axis(
    got.batch.tokens, got.length[..., None] - 1, -1
  )[..., 0]  # fmt: skip
  ended = ~got.batch.truncated
  assert len(set(last[ended])) > 1 and set(last[ended]) <= set(ends)
  # Every end token ends a completion: there is none before the last token.
  inside = got.batch.mask & (np.arange(8) < got.length[..., None] - 1)
  assert not np.isin(got.batch.tokens[inside], ends).any()
  # The mask comes from lengths: the padding that was sampled is trained on.
  np.testing.assert_array_equal(got.batch.mask.sum(-1), got.length)
  np.testing.assert_array_equal(got.batch.keep, got.batch.mask)
  assert (last[ended] == 5).any()
  hidden = [tokens.backend.id_to_token(token_id) for token_id in ends]
  assert not any(
    token in text for row in got.texts for text in row for token in hidden
  )


def test_a_completion_that_is_only_an_end_token():
  seen = []

  def judge(prompt, completion, example):
    seen.append((completion, example['completion_ids'], example['truncated']))
    return rewards.exact_match(prompt, completion, example)

  every = tokenizer(ends=tuple(range(40)), pad=39)
  records = [{'prompt': '1', 'answer': '', 'index': 0}]
  got = collect(every, records, judge, group=8)
  assert got.texts == [[''] * 8]
  np.testing.assert_array_equal(got.batch.mask.sum(-1), 1)
  np.testing.assert_array_equal(got.batch.reward, 1)
  assert all(text == '' and len(ids) == 1 for text, ids, _ in seen)
  assert not any(truncated for *_, truncated in seen)
  assert {ids[0] for _, ids, _ in seen} == set(got.batch.tokens[..., 0].flat)


def test_a_solved_chat_retires_and_not_one_with_the_same_question():
  system = [{'role': 'system', 'content': text} for text in ('a', 'b')]
  stream = [{'prompt': [one, user('1')]} for one in system] * 4
  asked = []

  def draw_records(records):
    asked.append([record['prompt'][0]['content'] for record in records])
    right = lambda prompt, completion, example: float(
      example['prompt'][0]['content'] == 'a'
    )
    return collect(tokenizer(), records, right)

  state = dynamic_sampling.PromptState()
  for _ in range(2):
    _, state, _ = dynamic_sampling.draw(
      state, stream, 2, 2, draw_records, retire=True
    )
  assert asked == [['a', 'b'], ['b', 'b']] and len(state.retired) == 1


def policy(form):
  tokens = tokenizer(form)
  config = config_lib.Config()
  sampler = dataclasses.replace(config.sampler, max_tokens=8)
  run = types.SimpleNamespace(
    tokenizer=tokens,
    engine=engine(),
    environment=None,
    sampling=engines.Sampling(eos_ids=(1,)),
    **build.sampler_specs(dataclasses.replace(config, sampler=sampler)),
  )
  return policies.Policy(run, 3)


@pytest.mark.parametrize('number', [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_sample_command_shows_a_line_for_the_question(number, capsys):
  prompts = [record['prompt'] for record in RECORDS]
  done = []
  sampler = policy(CHAT)
  done += policies.sample(sampler, prompts, number)
  assert [one['prompt'] for one in done] == [
    p for p in prompts for _ in range(number)
  ]
  eval_and_sample.write(sampler, prompts, number)
  lines = capsys.readouterr().out
  expected = [
    f'{question}\n={one["completion"]}\n'
    for question, one in zip(np.repeat(['1+2', '4'], number), done)
  ]
  assert lines == ''.join(expected)
  plain = policy(dataclasses.replace(CHAT, chat=False, system_prompt=''))
  done += policies.sample(plain, ['1+2'], number)
  eval_and_sample.write(plain, ['1+2'], number)
  assert capsys.readouterr().out.startswith(
    f'1+2={done[-number]["completion"]}'
  )


def test_the_sample_command_refuses_what_is_no_prompt():
  with pytest.raises(ValueError, match='A prompt must be a text or a list'):
    list(policies.sample(policy(CHAT), [user('1')]))
