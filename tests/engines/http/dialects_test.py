"""Tests of what servers are asked, and of how their answers are read.

The answers in golden_*.jsonl have the shapes of vLLM 0.33 and SGLang 0.5.23,
composed after their sources and documentation; each says from where it is.
"""

import json
import pathlib
import re

import numpy as np
import pytest

from grpo_jax.config import http_client
from grpo_jax.engines import protocol
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.dialects import Completion
from grpo_jax.engines.http.dialects import GivenUp
from grpo_jax.engines.http.dialects import Unusable
from grpo_jax.engines.http.servers import Servers
from grpo_jax.engines.http.sglang import Sglang
from grpo_jax.engines.http.vllm import Vllm
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import spoken
from tests.engines.http.fake_server import FakeServer
from tests.engines.http.fake_server import Fault
from tests.engines.http.faults import answers

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")

SAMPLING = protocol.Sampling(eos_ids=(9,), stop_strings=('\n\n',))
THREE, TWO = ([11, 12, 9], [-0.25, -1.5, -0.125]), ([11, 12], [-0.25, -1.5])
STOPPED = [11, 13], [-0.25, -0.75]
SCORES = [-2.0, -0.5], [[7], [3]], [[-0.25], [-0.5]]

# By name: adapters, the limit, and ids, log-probabilities, finish and spans; or
# an error and its words; or the status of HTTP; or scores; or what comes as is.
GOLDEN = {
  'V1 normal end': [
    (True, 3, (*THREE, protocol.ENDED, (('policy', 3),))),
    (True, 9, (*THREE, protocol.ENDED, (('policy', 3),))),
    (True, 2, (Unusable, '3 tokens, though at most 2 were asked for')),
    (False, 3, (Unusable, 'does not name the version of the weights')),
  ],
  'V2 length': [
    (True, 2, (*TWO, protocol.TRUNCATED, (('policy', 2),))),
    (True, 3, (Unusable, '2 tokens, cut at a limit, though 3 were')),
  ],
  'V3 stop string': [
    (True, 2, (*STOPPED, protocol.STOPPED, (('policy', 2),))),
    (True, 8, (*STOPPED, protocol.STOPPED, (('policy', 2),))),
  ],
  'V4 abort': [(True, 3, (GivenUp, "finished by 'abort'"))],
  'V5 error 400': [(True, 3, 400)],
  'V6 error 404 model': [(True, 3, 404)],
  'V7 503 paused': [(True, 3, 503)],
  'V8 null logprob': [
    (True, 1, (Unusable, '1 tokens and 4 log-probabilities'))
  ],
  'V9 wrong-length logprobs': [
    (True, 3, (Unusable, '3 tokens and 2 log-probabilities'))
  ],
  'V10 adapters listed': [(True, 3, 'as it is')],
  'V11 version given': [
    (False, 3, (*THREE, protocol.ENDED, (('6', 1), ('7', 3)))),
    (True, 3, (*THREE, protocol.ENDED, (('policy-v7', 3),))),
  ],
  'V12 prompt scores': [(False, 1, SCORES)],
  'V13 adapter loaded': [(True, 3, 'as it is')],
  'V14 NaN': [(True, 3, 400)],
  'S1 normal end': [
    (True, 3, (*THREE, protocol.ENDED, (('asked', 3),))),
    (False, 3, (*THREE, protocol.ENDED, (('7', 3),))),
    (False, 2, (Unusable, '3 tokens, though at most 2 were asked for')),
  ],
  'S2 length': [
    (False, 2, (*TWO, protocol.TRUNCATED, (('7', 2),))),
    (False, 3, (Unusable, '2 tokens, cut at a limit, though 3 were')),
  ],
  'S3 stop string': [(False, 8, (*STOPPED, protocol.STOPPED, (('7', 2),)))],
  'S4 abort': [(False, 3, (GivenUp, "finished by 'abort'"))],
  'S5 error 400': [(False, 3, 400)],
  'S6 error 404 model': [(False, 3, 404)],
  'S7 503 queue full': [(False, 3, 503)],
  'S8 null logprob': [(False, 3, (Unusable, 'None as the log-probability'))],
  'S9 wrong-length logprobs': [
    (False, 3, (Unusable, '3 tokens and 2 log-probabilities'))
  ],
  'S10 adapters listed': [(False, 3, 'as it is')],
  'S11 version given': [
    (False, 3, (*THREE, protocol.ENDED, (('6', 1), ('7', 3))))
  ],
  'S12 prompt scores': [(False, 1, SCORES)],
  'S13 weights loaded': [(False, 3, 'as it is')],
  'S14 unknown sampling field': [(False, 3, 400)],
  'S15 broken logits': [(False, 3, (Unusable, 'logits are no numbers'))],
}


def recorded():
  folder = pathlib.Path(__file__).parent
  for name in ('vllm', 'sglang'):
    lines = (folder / f'golden_{name}.jsonl').read_text().splitlines()
    for one in map(json.loads, lines):
      for number, expected in enumerate(GOLDEN[one['name']]):
        yield pytest.param(name, one, *expected, id=f'{one["name"]} {number}')


def completion(limit=3, sampling=SAMPLING, **fields):
  fields = {'ids': [1, 2, 3], 'seed': 5, 'policy': 'asked', **fields}
  return Completion(limit=limit, sampling=sampling, **fields)


def over_the_wire(name, recorded, call):
  """What a server's answer is for a dialect."""
  kind = call.path.rpartition('/')[2].partition('?')[0]
  body = recorded['body']
  data = body.encode() if isinstance(body, str) else body
  server = FakeServer(name, [Fault(kind, answers(recorded['status'], data))])
  try:
    client = http_client.Client(
      'x', '', 5.0, 1, 0.1, 1.0, http_client.Limits(0, 8)
    )
    servers = Servers([server.url], client, 8)
    return servers.run(
      lambda opened: servers.ask(opened, servers.every[0], call)
    )
  finally:
    server.close()


@pytest.mark.parametrize('name,one,adapters,limit,expected', [*recorded()])
def test_recorded_answers(name, one, adapters, limit, expected):
  dialect, asked = spoken(name, adapters), completion(limit)
  call = dialect.complete(asked)
  if isinstance(expected, int):
    said = one['body'].get('error', one['body'])
    said = said if isinstance(said, str) else said['message']
    with pytest.raises(http_client.NotAnswered, match=f'HTTP {expected}') as e:
      over_the_wire(name, one, call)
    assert e.value.status == expected == one['status']
    assert said[:40] in str(e.value)
    return
  answer = over_the_wire(name, one, call)
  assert answer == one['body']
  if expected == 'as it is':
    return
  if expected is SCORES:
    logp, top_ids, top_logp = dialect.scored(answer, [1, 2, 3], 1)
    assert logp.dtype == top_logp.dtype == np.float32
    assert top_ids.dtype == np.int32
    assert (logp.tolist(), top_ids.tolist(), top_logp.tolist()) == SCORES
    return
  if isinstance(expected[0], type):
    with pytest.raises(expected[0], match=re.escape(expected[1])) as e:
      dialect.drawn(answer, asked)
    assert type(e.value) is expected[0]
    return
  ids, logp, finish, spans = expected
  drawn = dialect.drawn(answer, asked)
  assert drawn.ids.dtype == np.int32 and drawn.ids.tolist() == ids
  assert drawn.logp.dtype == np.float32 and drawn.logp.tolist() == logp
  assert (drawn.finish, drawn.spans) == (finish, spans)


def test_all_answers_are_recorded():
  names = [one.values[1]['name'] for one in recorded()]
  assert [*dict.fromkeys(names)] == [*GOLDEN]


def test_vllm_is_sent_everything_that_decides():
  """Whatever generation_config.json says beside the model."""
  sampling = protocol.Sampling(
    eos_ids=(9, 10), stop_strings=('\n\n',), temperature=0.5
  )
  asked = completion(7, sampling, ids=np.array([1, 2], np.int32))
  for adapters, model in ((True, 'asked'), (False, 'policy')):
    call = Vllm('policy', adapters).complete(asked)
    assert call.path == '/v1/completions'
    assert json.loads(json.dumps(call.body)) == {
      'model': model,
      'prompt': [1, 2],
      'max_tokens': 7,
      'seed': 5,
      'temperature': 0.5,
      'top_p': 1.0,
      'top_k': 0,
      'min_p': 0.0,
      'repetition_penalty': 1.0,
      'presence_penalty': 0.0,
      'frequency_penalty': 0.0,
      'logprobs': 0,
      'stop': ['\n\n'],
      'include_stop_str_in_output': True,
      'stop_token_ids': [9, 10],
      'ignore_eos': True,
      'add_special_tokens': False,
      'skip_special_tokens': False,
      'return_token_ids': True,
      'return_tokens_as_token_ids': True,
      'return_weight_versions': not adapters,
    }


def test_sglang_is_sent_everything_that_decides():
  """With ignore_eos its stop_token_ids would count for nothing."""
  sampling = protocol.Sampling(
    eos_ids=(9, 10), stop_strings=('\n\n',), temperature=0.5
  )
  asked = completion(7, sampling, ids=np.array([1, 2], np.int32))
  for adapters, more in ((True, {'lora_path': 'asked'}), (False, {})):
    call = Sglang(adapters).complete(asked)
    assert call.path == '/generate'
    assert json.loads(json.dumps(call.body)) == {
      'input_ids': [1, 2],
      'sampling_params': {
        'max_new_tokens': 7,
        'sampling_seed': 5,
        'temperature': 0.5,
        'top_p': 1.0,
        'top_k': -1,
        'min_p': 0.0,
        'repetition_penalty': 1.0,
        'presence_penalty': 0.0,
        'frequency_penalty': 0.0,
        'stop': ['\n\n'],
        'stop_token_ids': [9, 10],
        'ignore_eos': False,
        'no_stop_trim': True,
        'skip_special_tokens': False,
      },
      'return_logprob': True,
      **more,
    }


def test_sglang_goes_on_without_end_tokens_only_if_we_have_none():
  for ids, goes_on in (((), True), ((9,), False)):
    asked = completion(7, protocol.Sampling(eos_ids=ids))
    body = Sglang(True).complete(asked).body or {}
    assert body['sampling_params']['ignore_eos'] is goes_on


def test_no_policy_is_the_model_itself():
  asked = completion(policy='')
  assert (Vllm('base', True).complete(asked).body or {})['model'] == 'base'
  assert 'lora_path' not in (Sglang(True).complete(asked).body or {})


def test_scores_are_asked_for_at_temperature_1():
  ids = np.array([4, 5], np.int32)
  vllm = Vllm('policy', True).score(ids, 2, 'asked')
  assert vllm.path == '/v1/completions'
  assert json.loads(json.dumps(vllm.body)) == {
    'model': 'asked',
    'prompt': [4, 5],
    'max_tokens': 1,
    'temperature': 1.0,
    'add_special_tokens': False,
    'prompt_logprobs': 2,
    'return_token_ids': True,
  }
  sglang = Sglang(True).score(ids, 2, 'asked')
  assert sglang.path == '/generate'
  assert json.loads(json.dumps(sglang.body)) == {
    'input_ids': [4, 5],
    'sampling_params': {'max_new_tokens': 0, 'temperature': 1.0},
    'return_logprob': True,
    'logprob_start_len': 0,
    'top_logprobs_num': 2,
    'lora_path': 'asked',
  }


def vllm_scores(*places):
  return {'choices': [{'prompt_logprobs': [None, *places]}]}


def sglang_scores(values, top):
  told = {
    'input_token_logprobs': [[None, 1, None], *[[v, 2, None] for v in values]],
    'input_top_logprobs': [None, *top],
  }
  return {'meta_info': told}


GOOD = {'2': {'logprob': -2.0}, '7': {'logprob': -0.25}}
LIKELY = [[-0.25, 7, None]]


@pytest.mark.parametrize(
  'name,answer,top',
  [
    ('vllm', vllm_scores(), 1),
    ('vllm', vllm_scores(GOOD, GOOD), 1),
    ('vllm', vllm_scores(None), 1),
    ('vllm', vllm_scores([]), 1),
    ('vllm', vllm_scores('ab'), 1),
    ('vllm', vllm_scores({}), 1),
    ('vllm', vllm_scores({'7': {'logprob': -0.25}}), 1),
    ('vllm', vllm_scores(GOOD), 3),
    ('vllm', vllm_scores({**GOOD, '8': {}}), 1),
    ('vllm', vllm_scores({**GOOD, '8': {'logprob': None}}), 1),
    ('vllm', vllm_scores({**GOOD, 'a': {'logprob': -0.1}}), 1),
    ('vllm', vllm_scores({**GOOD, '9' * 20: {'logprob': -0.1}}), 1),
    ('vllm', vllm_scores({**GOOD, '2': {'logprob': 0.5}}), 1),
    ('vllm', vllm_scores({**GOOD, '2': {'logprob': float('nan')}}), 0),
    ('vllm', {'choices': []}, 0),
    ('sglang', sglang_scores([], []), 0),
    ('sglang', sglang_scores([-1.0, -1.0], []), 0),
    ('sglang', sglang_scores([None], []), 0),
    ('sglang', sglang_scores([float('nan')], []), 0),
    ('sglang', sglang_scores([-1.0], []), 1),
    ('sglang', sglang_scores([-1.0], [[]]), 1),
    ('sglang', sglang_scores([-1.0], [None]), 1),
    ('sglang', sglang_scores([-1.0], [LIKELY]), 2),
    ('sglang', sglang_scores([-1.0], [[[None, 7, None]]]), 1),
    ('sglang', sglang_scores([-1.0], [[[-1.0, None, None]]]), 1),
    ('sglang', sglang_scores([-1.0], [[[-1.0, 2**40, None]]]), 1),
    ('sglang', sglang_scores([-1.0], [[[-1.0]]]), 1),
    ('sglang', {'meta_info': {'input_token_logprobs': {}}}, 0),
    ('sglang', [], 0),
  ],
)
def test_scores_that_are_none(name, answer, top):
  with pytest.raises(Unusable):
    spoken(name, False).scored(answer, [1, 2], top)


def test_scores_of_more_than_were_asked_for():
  """vLLM gives the token of the text beside the likeliest."""
  place = {
    '2': {'logprob': -2.0}, '7': {'logprob': -0.25}, '8': {'logprob': -1.0},
  }  # fmt: skip
  logp, ids, top = Vllm('m', False).scored(vllm_scores(place), [1, 2], 2)
  assert (logp.tolist(), ids.tolist()) == ([-2.0], [[7, 8]])
  assert top.tolist() == [[-0.25, -1.0]]
  likely = [[-0.25, 7, None], [-1.0, 8, None], [-2.0, 2, None]]
  answer = sglang_scores([-2.0], [likely])
  logp, ids, top = Sglang(False).scored(answer, [1, 2], 2)
  assert (logp.tolist(), ids.tolist()) == ([-2.0], [[7, 8]])
  assert top.tolist() == [[-0.25, -1.0]]


@pytest.mark.parametrize('by', ['x', '', None, 12, '\n'])
def test_only_a_stop_string_of_ours_ends_a_completion(by):
  """Some end token of the server's own does not."""
  asked = completion(8, SAMPLING)
  choice = {
    'finish_reason': 'stop',
    'stop_reason': by,
    'token_ids': [11, 12],
    'logprobs': {
      'tokens': ['token_id:11', 'token_id:12'],
      'token_logprobs': [-1.0, -1.0],
    },
  }
  vllm = {'model': 'asked', 'choices': [choice]}
  told = {
    'finish_reason': {'type': 'stop', 'matched': by},
    'weight_version': '7',
    'output_token_logprobs': [[-1.0, 11, None], [-1.0, 12, None]],
  }
  sglang = {'output_ids': [11, 12], 'meta_info': told}
  for dialect, answer in ((Vllm('m', True), vllm), (Sglang(True), sglang)):
    with pytest.raises(Unusable, match='ends with the id 12, which is no end'):
      dialect.drawn(answer, asked)
  choice['stop_reason'] = told['finish_reason']['matched'] = '\n\n'
  for dialect, answer in ((Vllm('m', True), vllm), (Sglang(True), sglang)):
    assert dialect.drawn(answer, asked).finish == protocol.STOPPED


def test_an_older_sglang_names_one_version_of_all_tokens():
  told = {
    'finish_reason': {'type': 'length', 'length': 2},
    'weight_version': '7',
    'output_token_logprobs': [[-0.25, 11, None], [-1.5, 12, None]],
  }
  answer = {'output_ids': [11, 12], 'meta_info': told}
  drawn = Sglang(False).drawn(answer, completion(2))
  assert drawn.spans == (('7', 2),)
  del told['weight_version']
  with pytest.raises(Unusable, match='without weight_version'):
    Sglang(False).drawn(answer, completion(2))


def test_a_probability_of_1_may_be_rounded_up():
  logp = dialects.log_probabilities([1e-6, 0, -0.0, -8999])
  assert logp.tolist() == [0.0, 0.0, 0.0, -8999.0]
  with pytest.raises(Unusable):
    dialects.log_probabilities([1e-3])


def test_weights_that_drew_nothing_are_not_named():
  values = [
    dict(zip(('version', 'start', 'end'), one))
    for one in (('default', 0, 0), (6, 0, 2), ('7', 2, 2), ('8', 2, 3))
  ]
  assert dialects.spans(values, 3) == (('6', 2), ('8', 3))


def test_seeds_have_the_bits_of_keys():
  numbers = np.random.default_rng(0)
  keys = numbers.integers(2**32, size=(2000, 2), dtype=np.uint32)
  edges = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
  keys = np.concatenate(
    [keys, np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)]
  )
  seeds = [dialects.key_to_seed(key) for key in keys]
  assert all(type(seed) is int for seed in seeds)
  assert all(-(2**63) <= seed < 2**63 and seed != -1 for seed in seeds)
  found = np.array([dialects.seed_to_key(seed) for seed in seeds])
  last = (keys == 2**32 - 1).all(-1)
  assert last.sum() == 1
  np.testing.assert_array_equal(found[~last], keys[~last])
  # The one that would be -1, which is no seed, has its neighbour's.
  assert found[last].tolist() == [[2**32 - 1, 2**32 - 2]]
  assert dialects.key_to_seed(keys[last][0]) == -2
  assert dialects.seed_to_key(7).dtype == np.uint32


def test_a_part_that_is_missing_is_named():
  with pytest.raises(Unusable, match=r'^an answer without a.0.b$'):
    dialects.field({'a': [{}]}, 'a', 0, 'b')
  with pytest.raises(Unusable, match="without a, but with '<html>"):
    dialects.field('<html>' + 'x' * 999, 'a')
  assert dialects.field({'a': [{'b': None}]}, 'a', 0, 'b') is None


def test_calls_that_change_what_a_server_knows():
  (load,) = Vllm('policy', True).load_adapter('a', '/w/1')
  assert load.path == '/v1/load_lora_adapter'
  assert load.body == {'lora_name': 'a', 'lora_path': '/w/1'}
  (unload,) = Vllm('policy', True).unload_adapter('a')
  assert (unload.path, unload.body) == (
    '/v1/unload_lora_adapter', {'lora_name': 'a'},
  )  # fmt: skip
  (load,) = Sglang(True).load_adapter('a', '/w/1')
  assert (load.path, load.wanted) == ('/load_lora_adapter', 'success')
  assert load.body == {'lora_name': 'a', 'lora_path': '/w/1'}
  (unload,) = Sglang(True).unload_adapter('a')
  assert (unload.path, unload.body) == (
    '/unload_lora_adapter', {'lora_name': 'a'},
  )  # fmt: skip
  for dialect in (Vllm('policy', True), Sglang(True)):
    assert dialect.alive() == dialects.Call('/health')


@pytest.mark.parametrize('name', ['vllm', 'sglang'])
def test_what_is_so_already_is_fine(name, tmp_path):
  (tmp_path / 'weights.json').write_text('3')
  server, dialect = FakeServer(name), spoken(name, True)
  client = http_client.Client(
    'x', '', 5.0, 1, 0.1, 1.0, http_client.Limits(0, 8)
  )
  servers = Servers([server.url + '/'], client, 8)

  async def twice(opened):
    calls = (
      *dialect.load_adapter('a', str(tmp_path)) * 2,
      *dialect.unload_adapter('a') * 2,
      dialect.alive(),
    )
    for call in calls:
      await servers.ask(opened, servers.every[0], call)

  try:
    servers.run(twice)
  finally:
    server.close()
  assert len(server.requests) == 5 and not server.adapters
