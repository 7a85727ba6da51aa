"""What engines answer, and what a run does with faults, as tables of a README.

`python -m tests.readmes` writes them. The first asks our engine in its process
and behind our server; servers of others are not there, and are not in it. The
second plays faults to a run with fake servers.
"""

import asyncio
import pathlib
import re
import tempfile
from typing import Any
from typing import NamedTuple

from grpo_jax import engines
from grpo_jax.config import Engine
from grpo_jax.engines import protocol
from grpo_jax.engines import scoring
from grpo_jax.engines.http import conformance
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.engines.http.servers import Away
from grpo_jax.run.build import engine as build_engine
from tests.engines.http import engines as staging
from tests.engines.http import faults as faults_lib
from tests.engines.http.fake_server import Fault
from tests.serving import served

_HERE = pathlib.Path(__file__).parent
OVER_HTTP = 'answers', 'an unknown policy is refused'
"""What an engine in the process does not do."""


class _Asked(NamedTuple):
  """Stands for a body: what the engine is asked, as it is."""

  what: Any
  top: int = 0


class Native:
  """`LocalEngine` in the place of a server and its dialect, without a network.

  Args:
    engine: With parameters.
    score: Has the same.
  """

  name = 'native'

  def __init__(self, engine: engines.Engine, score: scoring.Scorer):
    self.every = [servers_lib.Server('in the process')]
    self._engine, self._score = engine, score
    self._waiting: list[tuple[protocol.Request, asyncio.Future]] = []

  def run(self, do):
    return asyncio.run(do(None))

  def alive(self):
    return dialects.Call('')

  def complete(self, asked):
    return dialects.Call('', _Asked(asked))

  def score(self, ids, top, policy):
    del policy
    return dialects.Call('', _Asked([*ids], top))

  async def ask(self, opened, server, call):
    """Draws together what is asked at the same time."""
    del opened, server
    if call.body is None:
      return ''
    what = call.body.what
    if not isinstance(what, dialects.Completion):
      return self._score(what, call.body.top)
    loop = asyncio.get_running_loop()
    key = dialects.seed_to_key(what.seed)[None]
    request = protocol.Request(what.ids, key, what.limit, what.sampling)
    if not self._waiting:
      loop.call_soon(self._draw)
    self._waiting.append((request, loop.create_future()))
    return await self._waiting[-1][1]

  def _draw(self):
    waiting, self._waiting = self._waiting, []
    try:
      found = protocol.generate(self._engine, [one for one, _ in waiting])
    except Exception as error:
      for _, future in waiting:
        future.set_exception(error)
      return
    for (_, future), (one,) in zip(waiting, found, strict=True):
      future.set_result(one)

  def drawn(self, answer, asked):
    del asked
    spans = ((str(int(answer.version[0])), len(answer.ids)),)
    return dialects.Drawn(answer.ids, answer.logp, answer.finish, spans)

  def scored(self, answer, ids, top):
    del ids, top
    return answer.logp, answer.top_ids, answer.top_logp


def native(opened: served.Opened) -> Native:
  """The engine of a policy that is served, made once more."""
  run, scorer = opened.served.run, opened.served.scorer
  widths = 16, 32  # of what the checks ask, with some room
  engine = engines.LocalEngine(run.model, widths, widths)
  engine.load(scorer.params, version=0)
  return Native(engine, scorer)


def found_of(suite: conformance.Suite) -> dict[str, str]:
  """The verdict of each check."""
  found: list[conformance.Check] = []
  suite.examine(found.append)
  return {one.name: one.verdict for one in found}


def found_natively(one: Native) -> dict[str, str]:
  """The same of an engine in the process; '—' for what it does not do."""
  found = found_of(conformance.Suite(one, one, one, ''))
  return found | dict.fromkeys(OVER_HTTP, '—')


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""What stands above the columns, and the rows."""


def conformance_table() -> Table:
  """Who answers each check well, and how many answers are read rightly."""
  with served.opened(served.config_to_serve()) as opened:
    columns = [found_natively(native(opened))]
    for dialect in staging.DIALECTS:
      fields = Engine(
        kind='http', dialect=dialect, urls=(opened.url,), concurrency=64,
        timeout_secs=120.0,
      )  # fmt: skip
      # SGLang would take the name of its model for that of an adapter.
      policy = opened.service.name if dialect == 'vllm' else ''
      suite = build_engine.suite(fields, policy)
      columns.append(found_of(suite))
  rows = [(name, *(one[name] for one in columns)) for name in columns[0]]
  rows += [
    ('answers in their shapes that are read rightly', *golden()),
    ('faults of fake servers that are played', *played()),
  ]
  heads = 'ours, in the process', 'ours, as vLLM', 'ours, as SGLang'
  return ('', *heads), rows


def golden() -> tuple[str, str, str]:
  """How many recorded answers there are for each column."""
  files = [_HERE / f'golden_{dialect}.jsonl' for dialect in staging.DIALECTS]
  one, other = (str(len(file.read_text().splitlines())) for file in files)
  return '—', one, other


def played() -> tuple[str, str, str]:
  """How many faults there are for each column."""
  rows = [*faults_lib.ANSWERS, *faults_lib.LOADS]
  one, other = (
    str(sum(dialect in row.dialects for row in rows))
    for dialect in staging.DIALECTS
  )
  return '—', one, other


def _loads(adapters: bool) -> list[faults_lib.Row]:
  return [x for x in faults_lib.LOADS if x.adapters == adapters]


# Kinds of faults, and the one of each that is shown.
KINDS = {
  'the connection, or the status': (faults_lib.TRANSPORT, '502, a page'),
  'the shape of an answer': (faults_lib.SHAPES, 'JSON that is cut'),
  'ids': (faults_lib.IDS, 'too many tokens'),
  'log-probabilities': (faults_lib.LOGP, 'NaN as log-probability'),
  'how a completion ended': (faults_lib.FINISH, 'cut before the limit'),
  'who drew': (faults_lib.SPANS, "another run's weights"),
  'whole weights that are read': (_loads(False), 'no developer mode'),
  'adapters that are read': (_loads(True), 'no adapters at run time'),
}
_NAMES = re.compile(r"'?[0-9a-f]{8}-[0-9a-f]{8}-0'?")


def sentence(row: faults_lib.Row) -> str:
  """What a run says of its only server if that has a fault at every request.

  What stands around it is the same for all: who is asked, and what to see to.
  """
  (_, dialect, adapters), *_ = faults_lib.cases([row])
  fault = Fault(row.kind or staging.KIND[dialect], row.change)
  (request,) = staging.asked(1, 1)
  with tempfile.TemporaryDirectory() as name:
    staged = staging.staged(
      pathlib.Path(name), dialect, adapters, [fault], backoff_secs=0.0
    )
    with staged as stage:
      try:
        stage.engine.load(5, 0)
        protocol.generate(stage.engine, [request])
      except Away as error:
        _, _, said = str(error).partition(f'{stage.servers[0].url}: ')
        return _NAMES.sub('RUN-START-0', said.partition('. See that')[0])
  raise AssertionError(f'{row.name} ends no run.')


def faults_table() -> Table:
  """What a run does for each kind of fault."""
  rows = []
  for kind, (faults, shown) in KINDS.items():
    (one,) = (row for row in faults if row.name == shown)
    healed = sum(row.heals for row in faults)
    rows.append((kind, str(len(faults)), str(healed), f'`{sentence(one)}`'))
  heads = 'faults of', 'played', 'asked again', 'what is said, for example'
  return heads, rows
