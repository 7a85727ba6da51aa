"""An engine that has nothing but the protocol, and no model."""

import numpy as np

from grpo_jax import engines

_NOTHING_MORE = engines.Capabilities()


class FakeEngine:
  """Answers the newest request first.

  Attributes:
    answer: `(request, number of the completion) -> ids`.
    requests: All that were submitted.
    forgotten: The numbers of those that nothing will follow.
    usual: Capabilities that tests may change for a while.
    versions: All that were loaded.
  """

  usual = engines.Capabilities(entropy=True)

  def __init__(self, answer, capabilities=_NOTHING_MORE):
    self.answer, self.capabilities = answer, capabilities
    self.requests, self.versions, self._waiting = [], [], []
    self.forgotten = []

  def load(self, params, version):
    del params
    self.versions.append(version)

  def take(self, params, version):
    self.load(params, version)

  def unload(self):
    pass

  def submit(self, request):
    assert request.follows is None or request.follows[0] not in self.forgotten
    self.requests.append(request)
    self._waiting.append(len(self.requests) - 1)
    return self._waiting[-1]

  def forget(self, request):
    self.forgotten.append(request)

  def completed(self, every_tokens=None):
    del every_tokens
    while self._waiting:
      number = self._waiting.pop()
      group = range(len(self.requests[number].keys))
      yield [self.sampled(number, g) for g in reversed(group)]

  def sampled(self, number, g):
    request = self.requests[number]
    ids = np.array(self.answer(request, g)[: request.limit], np.int32)
    ended = ids[-1] in request.sampling.eos_ids
    return engines.Sampled(
      request=number,
      number=g,
      ids=ids,
      logp=np.full(len(ids), -1.0, np.float32),
      log_kept=np.full(len(ids), -0.25, np.float32),
      version=np.full(len(ids), self.versions[-1], np.int32),
      finish=engines.ENDED if ended else engines.TRUNCATED,
      entropy=ids / 8 if self.capabilities.entropy else None,
    )
