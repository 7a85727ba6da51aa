"""What a learner asks of a server whose engine it is, over sockets."""

import asyncio
import collections
from concurrent import futures
import contextlib
import dataclasses
import http.client
import json
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.sglang import Sglang
from grpo_jax.engines.http.vllm import Vllm
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.run import policy as policies
from grpo_jax.run.build import model as build_model
from grpo_jax.serving import wire
from tests import runs
from tests.models.weights import golden
from tests.serving import served

DIALECTS = {
  'vllm': lambda adapters: Vllm('policy@0', adapters),
  'sglang': Sglang,
}
CONTROLS = (
  '/generate', '/update_weights_from_disk', '/load_lora_adapter',
  '/unload_lora_adapter', '/v1/load_lora_adapter', '/v1/unload_lora_adapter',
  '/pause', '/resume', '/collective_rpc', '/reset_prefix_cache',
  '/update_weight_version',
)  # fmt: skip
PROMPT = [3, 4, 5]
LIMIT = 12


class Case(served.Opened):
  """A server, and folders of two adapters and of another model."""

  def draw(self, params, ids=PROMPT, seed=5, limit=LIMIT, ends=()):
    """What `LocalEngine` draws by some parameters."""
    self.reference.load(params, next(self.numbers))
    request = engines.Request(
      ids,
      dialects.seed_to_key(seed)[None],
      limit,
      engines.Sampling(ends),
      calls=served.ROWS,
    )
    ((one,),) = engines.generate(self.reference, [request])
    return one


@pytest.fixture(scope='module')
def case(tmp_path_factory):
  folder = tmp_path_factory.mktemp('folders')
  config = served.config_to_serve()
  with served.opened(config) as found:
    made = Case(*found)
    run = found.served.run
    made.folder = folder
    made.reference = engines.LocalEngine(
      run.model, run.engine.prompt_buckets, run.engine.completion_buckets,
      decode=run.tokenizer.decode, max_rows=served.ROWS,
    )  # fmt: skip
    made.reference.context_tokens = run.engine.context_tokens
    made.numbers = iter(range(1, 10**6))
    made.base = found.served.scorer.params
    made.params = {}
    for n, name in enumerate(('one', 'two')):
      made.params[name] = served.with_adapters(found, n)
      trained, _ = lora.split(made.params[name], lora.trains)
      weights.save_adapter(folder / name, run.model.config, trained, 'base')
    low = run.model.config.lora
    for n, name in enumerate(('new', 'newer')):
      merged = lora.merge(served.with_adapters(found, 8 + n), low)
      fresh, _ = lora.split(made.base, lora.trains)
      made.params[name] = lora.join(fresh, merged)
      weights.save(folder / name, run.model.config, made.params[name])
    yield made


@pytest.fixture(autouse=True)
def clean(request):
  """The server as it has begun, after each test."""
  yield
  if 'case' in request.fixturenames:
    case = request.getfixturevalue('case')
    served.run(case.desk.know('', lambda: case.base))
    for name in case.desk.policies():
      served.run(case.desk.forget(name))
    served.ask(f'{case.url}/resume', {})
    assert not case.desk.policies()


def told(case, calls):
  """Makes calls, all of which must be answered well."""
  for call in calls:
    status, said = served.ask(case.url + call.path, call.body)
    assert status == 200, (call, said)
    if call.wanted:
      assert said[call.wanted] is True


def complete(
  case, dialect, policy='', ids=PROMPT, seed=5, limit=LIMIT, ends=()
):
  asked = dialects.Completion(ids, seed, limit, engines.Sampling(ends), policy)
  call = dialect.complete(asked)
  status, said = served.ask(case.url + call.path, call.body)
  assert status == 200, said
  return dialect.drawn(said, asked)


def assert_drawn(found, expected):
  np.testing.assert_array_equal(found.ids, expected.ids)
  np.testing.assert_array_equal(found.logp, expected.logp)
  assert found.finish == expected.finish


@pytest.mark.parametrize('name', DIALECTS)
def test_two_adapters_asked_at_once_draw_by_their_own_policies(case, name):
  dialect = DIALECTS[name](True)
  for policy in ('one', 'two'):
    told(case, dialect.load_adapter(policy, str(case.folder / policy)))
  status, models = served.ask(f'{case.url}/v1/models')
  assert [x['id'] for x in models['data']] == ['policy@0', 'one', 'two']
  asked = [
    (policy, [3 + n, 4], n, 6 + n % 5)
    for n in range(8)
    for policy in ('one', 'two', '')
  ]
  with futures.ThreadPoolExecutor(8) as pool:
    found = [*pool.map(lambda x: complete(case, dialect, *x), asked)]
  expected = {'': case.base, **case.params}
  for one, (policy, *rest) in zip(found, asked):
    assert_drawn(one, case.draw(expected[policy], *rest))
    assert [end for _, end in one.spans] == [len(one.ids)]
    named = policy or ('policy@0' if name == 'vllm' else '')
    assert one.spans[0][0] == named
  alone = [case.draw(x, PROMPT).ids.tolist() for x in expected.values()]
  assert alone[0] != alone[1] != alone[2] != alone[0]
  told(case, dialect.unload_adapter('one'))
  assert case.desk.policies() == ['two']
  assert_drawn(complete(case, dialect, 'two'), case.draw(case.params['two']))


@pytest.mark.parametrize('name', DIALECTS)
def test_all_weights_are_replaced(case, name):
  dialect = DIALECTS[name](False)
  before = complete(case, dialect)
  assert_drawn(before, case.draw(case.base))
  assert before.spans == (('default', len(before.ids)),)
  for version in ('new', 'newer'):
    told(case, dialect.load_weights(version, str(case.folder / version)))
    found = complete(case, dialect, version)
    assert_drawn(found, case.draw(case.params[version]))
    assert found.spans == ((version, len(found.ids)),)
    assert not np.array_equal(found.logp, before.logp)


@pytest.mark.parametrize('name', DIALECTS)
@pytest.mark.parametrize('adapters', [False, True])
def test_texts_are_scored_by_the_policy_that_is_named(case, name, adapters):
  dialect = DIALECTS[name](adapters)
  if adapters:
    told(case, dialect.load_adapter('one', str(case.folder / 'one')))
  ids = [3, 4, 5, 9, 1, 7]
  for policy in ('', 'one') if adapters else ('',):
    call = dialect.score(ids, 3, policy)
    status, said = served.ask(case.url + call.path, call.body)
    logp, top_ids, top_logp = dialect.scored(said, ids, 3)
    params = case.params[policy] if policy else case.base
    score = dataclasses.replace(case.served.scorer, params=params)
    known = score(ids, 3)
    np.testing.assert_array_equal(logp, known.logp)
    np.testing.assert_array_equal(top_ids, known.top_ids)
    np.testing.assert_array_equal(top_logp, known.top_logp)
  if name == 'sglang':
    assert said['output_ids'] == [] and said['text'] == ''


def test_end_tokens_are_those_that_are_asked_for(case):
  """Not those of the tokenizer: an end belongs to the completion."""
  whole = case.draw(case.base, limit=20)
  end = int(whole.ids[3])
  place = whole.ids.tolist().index(end)
  for name, make in DIALECTS.items():
    found = complete(case, make(True), limit=20, ends=(end,))
    own = case.service.sampling.eos_ids if name == 'sglang' else ()
    assert_drawn(found, case.draw(case.base, limit=20, ends=(end, *own)))
    assert found.ids.tolist() == whole.ids[: place + 1].tolist()


def test_vllms_routes_say_what_vllms_say(case):
  """Fields and words of its API, without our own client."""
  adapter = {'lora_name': 'one', 'lora_path': str(case.folder / 'one')}
  for root in ('/v1', ''):
    assert served.ask(f'{case.url}{root}/load_lora_adapter', adapter)[0] == 200
    status, said = served.ask(f'{case.url}{root}/load_lora_adapter', adapter)
    assert status == 400
    assert 'already been loaded' in said['error']['message']
    assert 'already loaded' in said['error']['message']  # as SGLang says
    gone = f'{case.url}{root}/unload_lora_adapter'
    assert served.ask(gone, {'lora_name': 'one'})[0] == 200
    status, said = served.ask(gone, {'lora_name': 'one'})
    assert status == 404 and 'cannot be found' in said['error']['message']
    assert 'does not exist' in said['error']['message']
  body = {
    'model': 'policy@0', 'prompt': PROMPT, 'max_tokens': 4, 'temperature': 1.0,
    'seed': 5, 'logprobs': 0, 'ignore_eos': True, 'return_token_ids': True,
    'return_tokens_as_token_ids': True, 'return_weight_versions': True,
  }  # fmt: skip
  status, said = served.ask(f'{case.url}/v1/completions', body)
  (choice,) = said['choices']
  assert status == 200 and said['model'] == 'policy@0'
  assert choice['prompt_token_ids'] == PROMPT
  assert len(choice['token_ids']) == 4 and choice['finish_reason'] == 'length'
  assert choice['logprobs']['tokens'] == [
    f'token_id:{x}' for x in choice['token_ids']
  ]
  assert len(choice['logprobs']['token_logprobs']) == 4
  span = {'version': 'default', 'start': 0, 'end': 4}
  assert choice['weight_versions'] == [span]
  assert served.ask(f'{case.url}/pause?mode=wait', {}) == (
    200, {'status': 'paused'},
  )  # fmt: skip
  status, said = served.ask(f'{case.url}/v1/completions', body)
  assert status == 503 and said['error']['message'] == (
    'Generation is paused; ask again after it resumes.'
  )
  assert served.ask(
    f'{case.url}/collective_rpc',
    {
      'method': 'reload_weights',
      'kwargs': {'weights_path': str(case.folder / 'new')},
    },
  ) == (200, {'results': [None]})
  assert served.ask(f'{case.url}/reset_prefix_cache', {}) == (
    200, {'success': True},
  )  # fmt: skip
  assert served.ask(
    f'{case.url}/update_weight_version', {'new_version': '7'}
  ) == (200, {'success': True, 'new_version': '7'})
  assert served.ask(f'{case.url}/resume', {}) == (200, {'status': 'resumed'})
  status, said = served.ask(f'{case.url}/v1/completions', body)
  assert said['choices'][0]['weight_versions'][0]['version'] == '7'
  assert served.ask(f'{case.url}/health') == (200, {'status': 'ok'})


def test_sglangs_routes_say_what_sglangs_say(case):
  adapter = {'lora_name': 'one', 'lora_path': str(case.folder / 'one')}
  status, said = served.ask(f'{case.url}/load_lora_adapter', adapter)
  assert status == 200 and said == {
    'success': True, 'loaded_adapters': {'one': adapter['lora_path']},
  }  # fmt: skip
  given = {
    'max_new_tokens': 4, 'sampling_seed': 5, 'temperature': 1.0, 'top_k': -1,
    'top_p': 1.0, 'min_p': 0.0, 'repetition_penalty': 1.0, 'ignore_eos': True,
    'stop': [], 'stop_token_ids': [], 'no_stop_trim': True,
    'skip_special_tokens': False,
  }  # fmt: skip
  body = {
    'input_ids': PROMPT, 'sampling_params': given, 'return_logprob': True,
    'lora_path': 'one',
  }  # fmt: skip
  status, said = served.ask(f'{case.url}/generate', body)
  expected = case.draw(case.params['one'], limit=4)
  assert status == 200 and said['output_ids'] == expected.ids.tolist()
  meta = said['meta_info']
  assert meta['finish_reason'] == {'type': 'length', 'length': 4}
  assert meta['prompt_tokens'] == 3 and meta['completion_tokens'] == 4
  assert 'input_token_logprobs' not in meta  # nobody asks
  assert meta['weight_version'] == 'default'
  assert meta['weight_versions'] == [
    {'version': 'default', 'start': 0, 'end': 4}
  ]
  assert [x[1] for x in meta['output_token_logprobs']] == said['output_ids']
  logp = np.array([x[0] for x in meta['output_token_logprobs']], np.float32)
  np.testing.assert_array_equal(logp, expected.logp)
  end = int(expected.ids[0])
  body['sampling_params'] = {**given, 'stop_token_ids': [end]}
  _, said = served.ask(f'{case.url}/generate', body)
  assert said['output_ids'] == [end]
  assert said['meta_info']['finish_reason'] == {'type': 'stop', 'matched': end}
  del body['sampling_params']  # 128, as SGLang has it, unless it ends before
  _, said = served.ask(f'{case.url}/generate', body)
  assert 1 <= said['meta_info']['completion_tokens'] <= 128
  folder = str(case.folder / 'new')
  status, said = served.ask(
    f'{case.url}/update_weights_from_disk',
    {'model_path': folder, 'weight_version': 'v7', 'flush_cache': True},
  )
  assert (status, said['success']) == (200, True)
  _, said = served.ask(f'{case.url}/generate', {'input_ids': PROMPT})
  assert said['meta_info']['weight_version'] == 'v7'


@contextlib.contextmanager
def gated(case, monkeypatch):
  """What is drawn waits after a token, until more is wanted of the desk."""
  engine, desk = case.served.run.engine, case.desk
  began, completed = threading.Event(), engine.completed

  def slow(every_tokens=None):
    for turn in completed(every_tokens):
      yield turn
      began.set()
      end = time.monotonic() + 20
      while desk._inbox.empty() and time.monotonic() < end and gate:
        time.sleep(0.001)

  gate = [True]
  desk._turns.close() if hasattr(desk._turns, 'close') else None
  desk._turns = iter(())
  monkeypatch.setattr(engine, 'completed', slow)
  try:
    yield began, gate
  finally:
    gate.clear()


@pytest.mark.parametrize('name', DIALECTS)
def test_what_is_being_drawn_ends_by_the_weights_that_began_it(
  case, name, monkeypatch
):
  dialect = DIALECTS[name](False)
  new = str(case.folder / 'new')
  calls = dialect.load_weights('new', new)
  if name == 'vllm':  # a pause would wait
    calls = [
      call for call in calls if call.path[:6] not in ('/pause', '/resum')
    ]
  with (
    gated(case, monkeypatch) as (began, gate),
    futures.ThreadPoolExecutor() as pool,
  ):
    old = pool.submit(complete, case, dialect, limit=40)
    assert began.wait(20)
    told(case, calls)  # while it is drawn
    assert not old.done()
    late = pool.submit(complete, case, dialect, limit=40)
    deadline = time.monotonic() + 20
    while not case.desk._later and time.monotonic() < deadline:
      time.sleep(0.001)
    assert case.desk._later and not old.done()
    gate.clear()
    assert_drawn(old.result(), case.draw(case.base, limit=40))
    assert old.result().spans == (('default', 40),)
    assert_drawn(late.result(), case.draw(case.params['new'], limit=40))
    assert late.result().spans == (('new', 40),)


def test_the_version_is_of_who_drew_even_if_another_draws_before_it_is_told(
  case,
):
  """The thread of the desk goes on while the event loop does something else."""
  first, second = 'one', 'two'
  for policy in (first, second):
    read = lambda policy=policy: case.params[policy]
    served.run(case.desk.know(policy, read, f'v-{policy}'))

  async def both():
    asked = engines.Request(
      PROMPT, np.zeros((1, 2), np.uint32), 3, engines.Sampling()
    )
    tasks = [
      asyncio.ensure_future(case.desk.draw(asked, None, policy))
      for policy in (first, second)
    ]
    await asyncio.sleep(0)
    end = time.monotonic() + 20
    while case.desk._loaded != second and time.monotonic() < end:
      time.sleep(0.005)  # nothing is told meanwhile
    time.sleep(0.05)
    return await asyncio.gather(*tasks)

  found = served.run(both())
  assert [one.version for one in found] == ['v-one', 'v-two']
  for policy in (first, second):
    served.run(case.desk.forget(policy))


def test_a_pause_waits_for_what_is_drawn_and_refuses_what_comes(
  case, monkeypatch
):
  dialect = DIALECTS['vllm'](False)
  with (
    gated(case, monkeypatch) as (began, gate),
    futures.ThreadPoolExecutor() as pool,
  ):
    old = pool.submit(complete, case, dialect, limit=40)
    assert began.wait(20)
    pause = pool.submit(served.ask, f'{case.url}/pause?mode=wait', {})
    deadline = time.monotonic() + 20
    while not case.desk.is_paused and time.monotonic() < deadline:
      time.sleep(0.001)
    for path, body in (
      ('/v1/completions', {'prompt': PROMPT}),
      ('/generate', {'input_ids': PROMPT}),
    ):
      assert served.ask(case.url + path, body)[0] == 503
    assert pause.result(30) == (200, {'status': 'paused'})
    # The answer may be under way still.
    assert not case.desk._jobs and not case.desk._later
    assert_drawn(old.result(30), case.draw(case.base, limit=40))
  assert served.ask(f'{case.url}/resume', {})[0] == 200
  assert_drawn(complete(case, dialect), case.draw(case.base))


def test_a_pause_waits_for_what_the_thread_has_not_even_seen(case):
  async def at_once():
    asked = engines.Request(
      PROMPT, np.zeros((1, 2), np.uint32), 20, engines.Sampling()
    )
    task = asyncio.ensure_future(case.desk.draw(asked))
    await asyncio.sleep(0)
    await case.desk.pause()
    held = bool(case.desk._jobs or case.desk._later)
    await asyncio.sleep(0)
    done = task.done()
    case.desk.is_paused = False
    await task
    return held, done

  assert served.run(at_once()) == (False, True)


ADAPTER = '/v1/load_lora_adapter'
WEIGHTS = '/update_weights_from_disk'
GENERATE = '/generate'
REFUSED = {
  'no name': (ADAPTER, {'lora_path': 'x'}, 'lora_name must be a text; it is '),
  'a name that is a number': (
    ADAPTER, {'lora_name': 3, 'lora_path': 'x'},
    'lora_name must be a text; it is 3.',
  ),
  'an empty path': (
    ADAPTER, {'lora_name': 'a', 'lora_path': ''},
    "lora_path must be a text; it is ''.",
  ),
  'no such folder': (
    ADAPTER, {'lora_name': 'a', 'lora_path': 'FOLDER/nowhere'},
    'FOLDER/nowhere',
  ),
  'a folder of a model': (
    ADAPTER, {'lora_name': 'a', 'lora_path': 'FOLDER/new'}, 'FOLDER/new',
  ),
  'the name of the model': (
    ADAPTER, {'lora_name': 'policy@0', 'lora_path': 'FOLDER/one'},
    'The model itself is called policy@0; give another name.',
  ),
  'an adapter of another rank': (
    ADAPTER, {'lora_name': 'a', 'lora_path': 'FOLDER/wide'},
    'has rank and alpha (3, 32.0), and the model has (2, 32.0); give the same.',
  ),
  'no path of a model': (WEIGHTS, {}, 'model_path must be a text; it is None.'),
  'no such model': (
    WEIGHTS, {'model_path': 'FOLDER/nowhere'}, 'FOLDER/nowhere',
  ),
  'an adapter as a model': (
    WEIGHTS, {'model_path': 'FOLDER/one'}, 'FOLDER/one',
  ),
  'another model': (WEIGHTS, {'model_path': 'FOLDER/other'}, 'FOLDER/other'),
  'another method': (
    '/collective_rpc', {'method': 'exit'},
    "There is no method 'exit'; give reload_weights.",
  ),
  'no path of a worker': (
    '/collective_rpc', {'method': 'reload_weights'},
    'weights_path must be a text; it is None.',
  ),
  'arguments that are none': (
    '/collective_rpc', {'method': 'reload_weights', 'kwargs': 'x'},
    "kwargs must be an object; it is 'x'.",
  ),
  'no version': (
    '/update_weight_version', {'new_version': None},
    'new_version must be a text; it is None.',
  ),
  'an unknown policy': (
    GENERATE, {'input_ids': [3], 'lora_path': 'a'},
    'Got LoRA adapter that has never been loaded: a',
  ),
  'several policies': (
    GENERATE, {'input_ids': [3], 'lora_path': ['a']},
    "lora_path must be a text; it is ['a'].",
  ),
  'no ids': (
    GENERATE, {'text': 'a'},
    'input_ids must be a list of ids, of one prompt; it is None.',
  ),
  'several prompts': (
    GENERATE, {'input_ids': [[3], [4]]},
    'input_ids must be a list of ids, of one prompt; it is [[3], [4]].',
  ),
  'an unknown id': (
    GENERATE, {'input_ids': [3, 999]},
    'The id 999 is none of the tokenizer, which has 14.',
  ),
  'a number of tokens': (
    GENERATE, {'input_ids': [3], 'sampling_params': {'max_new_tokens': '4'}},
    "max_new_tokens must be a whole number from 0; it is '4'.",
  ),
  'sampling': (
    GENERATE, {'input_ids': [3], 'sampling_params': [4]},
    'sampling_params must be an object; it is [4].',
  ),
  'a penalty': (
    GENERATE,
    {'input_ids': [3], 'sampling_params': {'repetition_penalty': 1.2}},
    'repetition_penalty=1.2 cannot be honoured, because tokens are drawn '
    'without penalties here; leave it out.',
  ),
  'an unknown field': (
    GENERATE, {'input_ids': [3], 'sampling_params': {'seed': 1}},
    "unknown field 'seed' of sampling_params; leave it out.",
  ),
  'likeliest': (
    GENERATE, {'input_ids': [3], 'top_logprobs_num': -1},
    'top_logprobs_num must be a whole number from 0; it is -1.',
  ),
}  # fmt: skip


@pytest.fixture(scope='module')
def wrong_folders(case):
  """Of an adapter with another rank, and of a model of another shape."""
  config = case.served.run.model.config
  wide = dataclasses.replace(
    config, lora=dataclasses.replace(config.lora, rank=3)
  )
  trained, _ = lora.split(golden.random_params(wide), lora.trains)
  weights.save_adapter(case.folder / 'wide', wide, trained, 'base')
  other = dataclasses.replace(config, lora=None, width=48)
  weights.save(case.folder / 'other', other, golden.random_params(other))


@pytest.mark.parametrize('name', REFUSED)
def test_nothing_changes_after_a_refusal(case, wrong_folders, name):
  path, body, said = REFUSED[name]
  place = lambda text: text.replace('FOLDER', str(case.folder))
  body = json.loads(place(json.dumps(body)))
  policies = dict(case.desk._policies)
  versions = [one.version for one in policies.values()]
  status, answer = served.ask(case.url + path, body)
  assert status == 400, answer
  message = answer['error']['message']
  assert place(said) in message and '\n' not in message
  assert case.desk._policies == policies
  assert [one.version for one in policies.values()] == versions
  drawn = complete(case, DIALECTS['vllm'](False))
  assert_drawn(drawn, case.draw(case.base))


@contextlib.contextmanager
def held(desk):
  """In it the thread of a desk does nothing; what is asked of it waits."""
  began, may_end = threading.Event(), threading.Event()

  def wait():
    began.set()
    assert may_end.wait(60)

  desk._put(wait)
  assert began.wait(60)
  try:
    yield
  finally:
    may_end.set()


def closed_while(url, desk, paths, bodies):
  """What is answered to calls that wait while the desk is closed."""
  with futures.ThreadPoolExecutor(len(paths) + 1) as pool:
    with held(desk):
      asked = [
        pool.submit(served.ask, url + path, bodies.get(path, {}))
        for path in paths
      ]
      deadline = time.monotonic() + 30
      while desk._inbox.qsize() < len(paths) and time.monotonic() < deadline:
        time.sleep(0.001)
      assert desk._inbox.qsize() == len(paths)
      end = pool.submit(desk.__exit__)
      while not desk.is_closed:
        time.sleep(0.001)
    end.result()
    return [one.result() for one in asked]


def test_a_desk_that_ends_takes_no_calls(tmp_path):
  """Neither those that wait when it ends, nor those that come later."""
  ending = 503, wire.error_json(wire.Refused(503, wire.ENDING))
  bodies = {
    '/load_lora_adapter': {'lora_name': 'a', 'lora_path': str(tmp_path)},
    '/v1/load_lora_adapter': {'lora_name': 'b', 'lora_path': str(tmp_path)},
    '/update_weights_from_disk': {'model_path': str(tmp_path)},
    '/collective_rpc': {
      'method': 'reload_weights', 'kwargs': {'weights_path': str(tmp_path)},
    },
    '/pause': {},
  }  # fmt: skip
  with served.opened(served.config_to_serve()) as found:
    # What loads weights or pauses waits for the thread.
    said = closed_while(found.url, found.desk, [*bodies], bodies)
    assert said == [ending] * len(bodies)
    found.desk.is_paused = False
    for path in (*CONTROLS, '/pause?mode=wait', '/v1/completions'):
      body = bodies.get(path, {'prompt': PROMPT, 'input_ids': PROMPT})
      assert served.ask(found.url + path, body) == ending, path
    assert served.ask(f'{found.url}/health')[0] == 200


def test_an_adapter_that_was_refused_may_come_again(case):
  ask = lambda folder: served.ask(
    case.url + ADAPTER, {'lora_name': 'a', 'lora_path': str(folder)}
  )
  assert ask(case.folder / 'nowhere')[0] == 400
  assert ask(case.folder / 'one')[0] == 200
  assert_drawn(
    complete(case, DIALECTS['vllm'](True), 'a'), case.draw(case.params['one'])
  )


def test_policies_wait_for_each_other_and_none_for_ever(case):
  """All that waits for one is drawn at once; what comes later waits."""
  loads, load = [], case.served.run.engine.load

  def counted(params, version):
    loads.append(version)
    load(params, version)

  for policy in ('one', 'two'):
    read = lambda policy=policy: case.params[policy]
    served.run(case.desk.know(policy, read))
  asked = engines.Request(
    PROMPT, np.zeros((1, 2), np.uint32), 6, engines.Sampling()
  )
  ended = collections.Counter()

  async def again(policy, until):
    while not until():
      await case.desk.draw(asked, None, policy)
      ended[policy] += 1

  async def interleaved():
    names = ['one', 'two'] * 8
    await asyncio.gather(
      *(case.desk.draw(asked, None, policy) for policy in names)
    )

  async def greedy():
    wants = lambda: ended['two'] > 0
    async with asyncio.timeout(60):
      await asyncio.gather(
        *(again('one', wants) for _ in range(4)), again('two', wants)
      )

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(case.served.run.engine, 'load', counted)
    served.run(interleaved())
    assert 2 <= len(loads) <= 4  # and not one for each of 16
    served.run(greedy())
  assert ended['two'] == 1 and ended['one'] <= 12
  for policy in ('one', 'two'):
    served.run(case.desk.forget(policy))


def test_a_policy_that_cannot_be_loaded_fails_its_requests_alone(
  case, monkeypatch
):
  served.run(case.desk.know('one', lambda: case.params['one']))
  load = case.served.run.engine.load

  def fails(params, version):
    if params is case.params['one']:
      raise RuntimeError('out of memory')
    load(params, version)

  monkeypatch.setattr(case.served.run.engine, 'load', fails)
  asked = engines.Request(
    PROMPT, np.zeros((1, 2), np.uint32), 3, engines.Sampling()
  )
  with pytest.raises(RuntimeError, match='out of memory'):
    served.run(case.desk.draw(asked, None, 'one'))
  dialect = DIALECTS['vllm'](False)
  assert_drawn(complete(case, dialect), case.draw(case.base))
  served.run(case.desk.forget('one'))


def test_a_policy_that_is_forgotten_draws_no_more(case):
  served.run(case.desk.know('one', lambda: case.params['one']))
  asked = engines.Request(
    PROMPT, np.zeros((1, 2), np.uint32), 3, engines.Sampling()
  )
  served.run(case.desk.draw(asked, None, 'one'))
  served.run(case.desk.forget('one'))
  for what in (
    case.desk.draw(asked, None, 'one'),
    case.desk.score([3, 4], policy='one'),
  ):
    with pytest.raises(ValueError, match="There is no policy 'one' here."):
      served.run(what)


@pytest.mark.parametrize('path', ['/v1/completions', '/generate'])
def test_a_client_that_leaves_frees_its_row(case, path, monkeypatch):
  host = case.url.removeprefix('http://')
  body = {
    'prompt': PROMPT, 'max_tokens': 120, 'ignore_eos': True,
    'input_ids': PROMPT,
    'sampling_params': {'max_new_tokens': 120, 'ignore_eos': True},
  }  # fmt: skip
  with gated(case, monkeypatch) as (began, gate):
    client = http.client.HTTPConnection(host)
    client.request(
      'POST', path, json.dumps(body), {'Content-Type': 'application/json'}
    )
    assert began.wait(20)
    assert len(case.desk._jobs) == 1
    client.close()
    deadline = time.monotonic() + 20
    while case.desk._jobs and time.monotonic() < deadline:
      time.sleep(0.001)
    assert not case.desk._jobs  # long before 120 tokens
  assert_drawn(complete(case, DIALECTS['vllm'](False)), case.draw(case.base))


@pytest.mark.long  # its counterpart is in the refusals above
def test_a_policy_without_adapters_refuses_them_and_takes_weights(tmp_path):
  config = served.config_to_serve(**{'lora.rank': 0})
  with served.opened(config) as found:
    body = {'lora_name': 'a', 'lora_path': str(tmp_path)}
    status, said = served.ask(found.url + ADAPTER, body)
    assert status == 400 and said['error']['message'] == (
      'The policy that is served has no adapters; serve it with '
      '--config.lora.rank=... of the adapters that are to come.'
    )
    changed = jax.tree.map(lambda x: x * 1.5, found.served.scorer.params)
    weights.save(tmp_path / 'new', found.served.run.model.config, changed)
    body = {'model_path': str(tmp_path / 'new'), 'weight_version': 'v1'}
    assert served.ask(found.url + WEIGHTS, body)[0] == 200
    read = found.desk._policies[''].score.params
    jax.tree.map(np.testing.assert_array_equal, read, changed)


def test_none_of_the_routes_exist_unless_they_are_wanted(case):
  with served.desk() as found:
    service = found.service
    app = served.app_lib.app(lambda _: service, hosts=['127.0.0.1'])
    with served.listening.Listening(app, served.listening.bound()) as it:
      for path in CONTROLS:
        assert served.ask(it.origin + path, {})[0] == 404, path
        assert served.ask(case.url + path)[0] == 405, path  # a GET, here


def test_an_adapter_has_the_names_of_the_class_that_is_served(tmp_path):
  """Those of a model inside another, which the plainest class is not.

  As a run writes it, which begins with the same folder.
  """
  config = runs.arithmetic(**{
    'model.path': str(golden.folder('qwen3_vl')), 'model.rope_base': 1e4,
    'lora.rank': 2, 'mesh.data': 1, 'warm_up.steps': 0,
  })  # fmt: skip
  found = policies.load_to_serve(config, context_tokens=64)
  before = found.scorer.params
  trained, frozen = lora.split(before, lora.trains)
  rng = np.random.default_rng(0)
  trained = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), trained
  )
  path = config.model.path
  named = build_model.adapter_base(path, build_model.origin_of(path))
  assert named['architecture'] == 'Qwen3VLForConditionalGeneration'
  weights.save_adapter(tmp_path, found.run.model.config, trained, **named)
  read = policies.read_adapter(found, tmp_path)
  golden.assert_same_trees(read, lora.join(trained, frozen))
