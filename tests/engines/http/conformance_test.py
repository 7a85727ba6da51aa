"""What `grpo-jax doctor --engine` finds of servers, sound and broken."""

import asyncio
import re

import numpy as np
import pytest

from grpo_jax.config import Engine
from grpo_jax.config import http_client
from grpo_jax.engines.http import conformance
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.run.build import engine as build_engine
from tests.engines.http import engines
from tests.serving import served

NUMBER = 16  # ids
NAMES = (
  'answers', 'ids in, ids and log-probabilities out', 'limit of tokens',
  'end tokens', 'log-probabilities are those of the ids',
  'log-probabilities are those at the temperature',
  'greedy tokens are the likeliest', 'seeds', '32 completions at once',
  'an unknown policy is refused', 'version of the weights',
  'likeliest tokens of a text',
)  # fmt: skip


class Bigram:
  """Servers of a policy that looks at one token, without a network.

  A test breaks it by `faults`, words that the methods look for.
  """

  def __init__(self, dialect, faults=()):
    self.dialect, self.faults = dialect, {*faults}
    self.every = [servers_lib.Server('http://here:1')]
    logits = np.random.default_rng(0).normal(size=(NUMBER, NUMBER)) * 2
    self.logits, self.asked = logits, 0

  def run(self, do):
    return asyncio.run(do(None))

  async def ask(self, opened, server, call):
    assert opened is None and server is self.every[0]
    self.asked += 1
    if 'dead' in self.faults:
      raise http_client.NotAnswered('nothing (refused)', None)
    if call.body is None:
      return None
    read = self._vllm if self.dialect == 'vllm' else self._sglang
    return read(call.body)

  def logp(self, before, temperature=1.0):
    row = self.logits[before] / temperature
    return row - np.log(np.exp(row).sum())

  def draw(self, ids, seed, limit, temperature, ends):
    """Ids, log-probabilities, and whether an end token was drawn."""
    faults = self.faults
    if 'ends are ignored' in faults:
      ends = ()
    if 'one seed' in faults:
      seed = 0
    if 'no seed' in faults:
      seed = self.asked
    if 'longer' in faults:
      limit += 1
    rng, found, values = np.random.default_rng(seed % 2**64), [], []
    last = ids[-1]
    while len(found) < limit:
      at = temperature or 1.0
      logp = self.logp(last, at)
      flat = 'not greedy' in faults
      token = int(
        np.argmax(logp if not flat else -logp)
        if not temperature
        else np.argmax(logp + rng.gumbel(size=NUMBER))
      )
      told = self.logp(last) if 'raw' in faults else logp
      value = float(told[token])
      if 'top-p of its own' in faults:
        value = min(0.0, value + 0.3)
      found.append(token)
      values.append(value)
      last = token
      skipped = 'a second end' in faults and found.count(token) < 2
      if token in ends and not skipped:
        if 'end is dropped' in faults:
          return found[:-1], values[:-1], True
        return found, values, True
    return found, values, False

  def scored(self, ids, top):
    found = []
    for before, token in zip(ids, ids[1:], strict=False):
      logp = self.logp(before)
      likely = np.argsort(-logp)[:top]
      if 'order' in self.faults:
        likely = likely[::-1]
      found.append((float(logp[token]), likely, logp[likely]))
    return found

  def _vllm(self, body):
    name = body['model']
    if name not in ('policy', ''):
      if 'any policy' in self.faults:
        pass
      elif 'base answers' in self.faults:
        name = 'policy'
      elif 'unknown fails' in self.faults:
        raise http_client.NotAnswered('500', 500)
      else:
        raise http_client.NotAnswered('404 (does not exist)', 404)
    if (top := body.get('prompt_logprobs')) is not None:
      if 'no teacher' in self.faults and top == 3:
        raise http_client.NotAnswered('400 (at most 2)', 400)
      places = [None]
      for token, (value, ids, logp) in zip(
        body['prompt'][1:], self.scored(body['prompt'], top), strict=True
      ):
        place = {str(token): {'logprob': value}}
        for one, likely in zip(ids.tolist(), logp.tolist(), strict=True):
          place[str(one)] = {'logprob': likely}
        places.append(place)
      return {'choices': [{'prompt_logprobs': places}]}
    ids, values, ended = self.draw(
      body['prompt'], body['seed'], body['max_tokens'], body['temperature'],
      body['stop_token_ids'],
    )  # fmt: skip
    version = [{'version': 'default', 'start': 0, 'end': len(ids)}]
    wants = body['return_weight_versions'] and 'no version' not in self.faults
    texts = [f'token_id:{x}' for x in ids]
    choice = {
      'token_ids': None if 'no ids' in self.faults else ids,
      'finish_reason': 'stop' if ended else 'length',
      'logprobs': {'tokens': texts, 'token_logprobs': values},
      'weight_versions': version if wants else None,
    }
    return {'model': name, 'choices': [choice]}

  def _sglang(self, body):
    faults = self.faults
    if body.get('lora_path') and 'any policy' not in faults:
      status = 500 if 'unknown fails' in faults else 400
      raise http_client.NotAnswered(f'{status} (never been loaded)', status)
    given, ids = body['sampling_params'], body['input_ids']
    if body.get('logprob_start_len') == 0:
      top = body['top_logprobs_num']
      if 'no teacher' in faults and top == 3:
        raise http_client.NotAnswered('400 (at most 2)', 400)
      scored = self.scored(ids, top)
      entries = [[None, ids[0], None]]
      tops = [None]
      for token, (value, likely, logp) in zip(ids[1:], scored, strict=True):
        entries.append([value, token, None])
        tops.append(
          [[x, i, None] for x, i in zip(logp.tolist(), likely.tolist())]
        )
      return {
        'output_ids': [],
        'meta_info': {
          'input_token_logprobs': entries, 'input_top_logprobs': tops,
        },
      }  # fmt: skip
    drawn, values, ended = self.draw(
      ids, given['sampling_seed'], given['max_new_tokens'],
      given['temperature'], given['stop_token_ids'],
    )  # fmt: skip
    meta = {
      'finish_reason': {'type': 'stop' if ended else 'length'},
      'output_token_logprobs': [
        [x, i, None] for x, i in zip(values, drawn, strict=True)
      ],
      'weight_version': 'default',
    }
    if 'no version' in faults:
      del meta['weight_version']
    if 'no ids' in faults:
      return {'meta_info': meta}
    return {'output_ids': drawn, 'meta_info': meta}


def examined(servers, dialect, policy=''):
  found = []
  known = (engines.spoken(dialect, adapters) for adapters in (True, False))
  suite = conformance.Suite(servers, *known, policy)
  fine = suite.examine(found.append)
  assert fine == all(one.verdict != 'FAILED' for one in found)
  return found


@pytest.mark.parametrize('name', engines.DIALECTS)
def test_a_sound_server_passes(name):
  found = examined(Bigram(name), name)
  assert [one.name for one in found] == [*NAMES]
  assert {one.verdict for one in found} == {'ok'}, found
  said = {one.name: one.said for one in found}
  assert said['answers'] == 'http://here:1'
  assert said[NAMES[1]] == '8 tokens' and said[NAMES[2]] == '1 of 1'
  assert said[NAMES[3]] == 'an end token ends a completion, and belongs to it'
  assert re.fullmatch(
    r'\S+ nats from those of the same text as a prompt', said[NAMES[4]]
  )
  assert re.fullmatch(
    r'at 2 they differ by \S+ nats from those at 1', said[NAMES[5]]
  )
  assert said[NAMES[6]] == '8 of 8'
  assert said[NAMES[7]] == (
    'one seed draws the same again, and another one something else'
  )
  assert said[NAMES[8]] == '32 are different'
  assert said[NAMES[10]] == 'default'
  assert said[NAMES[11]] == '3 at each of 11 places'


WITHOUT_IDS = r'an answer without (ids of tokens|output_ids)'
FAULTS = {
  'no ids': {1: ('FAILED', WITHOUT_IDS)},
  'longer': {
    2: ('FAILED', 'a completion|2 tokens, though at most 1 were asked for')
  },
  'end is dropped': {
    3: (
      'FAILED',
      r'a completion that ends with the id \d+, which is no end|'
      'an answer without ids of tokens',
    )
  },
  'a second end': {
    3: ('FAILED', 'a completion that goes on behind an end token$')
  },
  'ends are ignored': {
    3: ('FAILED', 'a completion that goes on behind an end token$')
  },
  'top-p of its own': {
    4: (
      'FAILED',
      r'they differ by 0\.\d+ nats from those of the same text as a prompt; '
      'start the server without top-k, top-p and penalties of its own',
    )
  },
  'raw': {
    5: (
      'note',
      r'at temperature 2 they are those at 1 \(\S+ nats\), so only runs at 1 '
      'can learn from them; start vLLM with --logprobs-mode=processed_logprobs,'
      ' and SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB',
    )
  },
  'not greedy': {6: ('FAILED', '8 of 8 are not')},
  'one seed': {
    7: (
      'FAILED',
      'two seeds draw the same, so a group would have equal completions; start '
      'SGLang without --enable-deterministic-inference, or in a release that '
      'reads sampling_seed',
    )
  },
  'no seed': {7: ('note', 'one seed draws different tokens, so runs differ')},
  'any policy': {
    9: (
      'FAILED',
      'it answers for a policy that it does not have, so a lost adapter would '
      'not be noticed',
    )
  },
  'unknown fails': {9: ('FAILED', '500')},
  'base answers': {9: ('ok', 'by the name in its answer')},
  'no version': {
    10: (
      'note',
      '.*: runs with adapters need none, but the weights of others cannot be '
      'told apart',
    )
  },
  'no teacher': {11: ('note', r'400 \(at most 2\): it cannot be a teacher')},
}


@pytest.mark.parametrize('name', engines.DIALECTS)
@pytest.mark.parametrize('fault', FAULTS)
def test_a_check_goes_red_by_the_fault_that_it_is_for(fault, name):
  if fault == 'base answers' and name == 'sglang':
    pytest.skip('its answers name no adapter')
  found = examined(Bigram(name, [fault]), name)
  for place, (verdict, said) in FAULTS[fault].items():
    one = found[place]
    assert one.name == NAMES[place] and one.verdict == verdict, one
    assert re.match(said, one.said), one
  others = {n for n, one in enumerate(found) if one.verdict != 'ok'} - FAULTS[
    fault
  ].keys()
  # What every check needs is wrong in every check; who sends one token more
  # than was asked for sends nothing that can be used.
  needs = {'no ids', 'longer'}
  known = {'top-p of its own': {5}, 'one seed': {8}}
  assert fault in needs or others <= known.get(fault, set()), found


def test_likeliest_tokens_are_in_their_order():
  """SGLang's places are lists; vLLM's have no order, and are sorted."""
  found = examined(Bigram('sglang', ['order']), 'sglang')
  assert (found[11].verdict, found[11].said) == (
    'FAILED', 'they are not in the order of their probability',
  )  # fmt: skip


def test_who_does_not_answer_is_asked_nothing_more():
  server = Bigram('vllm', ['dead'])
  (one,) = examined(server, 'vllm')
  assert one == ('answers', 'FAILED', 'nothing (refused)')
  assert server.asked == 1


ours = pytest.fixture(scope='module')(served.smallest)


@pytest.mark.parametrize('name', engines.DIALECTS)
def test_our_own_server_passes(ours, name):
  fields = Engine(
    kind='http', dialect=name, urls=(ours.url,), model=ours.service.name,
    concurrency=64,
  )  # fmt: skip
  found = []
  assert build_engine.suite(fields, '').examine(found.append)
  assert [one.name for one in found] == [*NAMES]
  assert {one.verdict for one in found} == {'ok'}, found
  if name == 'vllm':
    assert found[9].said == 'by the name in its answer'
