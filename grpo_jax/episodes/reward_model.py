"""A reward model: a sequence classifier that scores completions on devices.

It is a reward function with a model inside, so it lives here and not in
`rewards`, which imports no jax. A config names it as 'reward_model'.

With several processes each judges the completions of its own rows, and not all
processes judge at the same time. So a process has a copy of the model on its
own devices, and none of its programs waits for another process.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import inspect
import math
import re
import secrets
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax import data
from grpo_jax import models
from grpo_jax import rewards
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models import weights
from grpo_jax.models.attention import over_layout

NAME = rewards.REWARD_MODEL
"""What a config calls this reward."""

_LEAST_BUCKET = 128  # tokens
_MOST_TOKENS = 4096  # of a chat, where nobody says more


class Chats:
  """Writes a prompt and its answer as the ids that a reward model reads.

  The answer was written by the policy, for which a high score pays. If it
  spelled out the special tokens of the reward model, and these were read as
  such, it could end its message and go on as the user who praises it. So they
  are read as plain text there.

  Args:
    path: The folder of the reward model.
    chat: Whether to use its chat template.
    system: Content of a system message; '': none.
    chat_kwargs: Variables for the template.

  Attributes:
    vocab_size: Of the tokenizer.

  Raises:
    ValueError: The tokenizer cannot be read, or has no chat template, or none
      that takes what is given.
  """

  def __init__(
    self, path: str, chat: bool, system: str, chat_kwargs: Mapping[str, Any]
  ):
    self._tokenizer = data.Tokenizer.from_folder(path)
    self._template = self._tokenizer.chat_template if chat else None
    self._kwargs = dict(chat_kwargs)
    self._format = data.PromptFormat(system_prompt=system)
    self.vocab_size = self._tokenizer.vocab_size
    if chat and self._template is None:
      raise ValueError(
        f'The reward model in {path!r} has no chat template; give chat=False,'
        ' and it reads prompt and completion one behind the other.'
      )
    if not chat and (system or chat_kwargs):
      raise ValueError(
        f'The reward model in {path!r} is given chat=False beside system='
        f'{system!r} and chat_kwargs={self._kwargs}, which only a chat has;'
        ' leave them out.'
      )
    if chat:
      self._text('x', 'x')  # some templates refuse system messages
    special = [
      token.content
      for token in self._tokenizer.backend.get_added_tokens_decoder().values()
      if token.special and token.content
    ]
    # The longest first, as the tokenizer finds them.
    special = map(re.escape, sorted(special, key=len, reverse=True))
    self._special = re.compile('|'.join(special) or '(?!)')

  def ids(self, prompt: data.Prompt, completion: str) -> list[int]:
    """The ids of a prompt and its answer.

    Args:
      prompt: A text, or messages.
      completion: The answer.

    Raises:
      ValueError: The template refuses the messages; or they are messages, and
        there is no template.
    """
    tokenizer = self._tokenizer
    harmless = self._special.search(completion) is None
    if self._template is None:
      if not isinstance(prompt, str):
        raise ValueError(
          f'A prompt is {prompt!r:.80}, but the reward model is used with'
          ' chat=False, so a text is needed; give chat=True.'
        )
      if harmless:
        return tokenizer.encode_prompt(prompt + completion)
      return [*tokenizer.encode_prompt(prompt), *self._plain(completion)]
    if harmless:
      return tokenizer.encode(self._text(prompt, completion))
    # The answer is put in the place of a word that stands nowhere else.
    word = secrets.token_hex(16)
    before, _, behind = self._text(prompt, word).rpartition(word)
    return [
      *tokenizer.encode(before),
      *self._plain(completion),
      *tokenizer.encode(behind),
    ]

  def _text(self, prompt: data.Prompt, completion: str) -> str:
    """The chat as its template writes it."""
    assert self._template is not None
    messages = self._format.messages(prompt)
    if data.is_by_assistant(
      messages[-1]
    ):  # the completion goes on where it ends
      completion = messages.pop()['content'] + completion
    answer = {'role': 'assistant', 'content': completion}
    return self._template.render(
      [*messages, answer],
      add_generation_prompt=False,
      **self._kwargs,
    )

  def _plain(self, text: str) -> list[int]:
    """The ids of a text, none of them of a special token."""
    pieces = tear(text, self._special)
    return [i for piece in pieces for i in self._tokenizer.encode(piece)]


def whole_prompt(example: Mapping[str, Any], prompt: str) -> data.Prompt:
  """The whole prompt of a record: its messages, if it is a chat."""
  chat = example.get('prompt')
  return prompt if chat is None or isinstance(chat, str) else chat


def tear(text: str, special: re.Pattern[str]) -> Iterator[str]:
  """Pieces of a text, each special token cut behind its first character.

  >>> list(tear('so<|end|>.', re.compile(r'<\\|end\\|>')))
  ['so<', '|end|>.']

  Args:
    text: Any text.
    special: Matches the special tokens. One of a single character is left out.
  """
  first = 0
  while match := special.search(text, first):
    is_single = len(match.group()) == 1
    yield text[first : match.start() + (not is_single)]
    first = match.start() + 1
  yield text[first:]


@rewards.batched
class RewardModel:
  """The score that a reward model gives to a chat, as a reward function.

  The chat is the prompt's messages and the completion as the assistant's
  answer, written by the chat template of the reward model. The reward is the
  logit as it is, such as -3.2 or 17; `weight` scales it. A completion that is
  not judged has a failure that says why.

  Scores are those of `AutoModelForSequenceClassification` in transformers. One
  thing differs on purpose: a special token that a completion spells out, such
  as '<|im_end|>', is read as plain text, so a completion cannot begin a message
  of its own.

  Args:
    path: Its Hugging Face folder, with tokenizer and weights as safetensors.
    mesh: Of the run; None: one device.
    dtype: Of weights and activations: 'bfloat16', which is half as large, or
      'float32'.
    max_tokens: The longest chat that is scored; None: 4096, or what the model
      was made for, if that is less.
    buckets: Widths to which chats are padded, tokens. A program is compiled for
      each that is used. (): powers of two from 128, and `max_tokens`.
    micro_tokens: Columns that each data shard computes at once, all rows
      together, at least one row. More need more memory.
    too_long: 'refuse', so that a longer chat is not judged, or 'cut', so that
      its first `max_tokens` count.
    chat: Whether to use the chat template. Without it the model reads prompt
      and completion one behind the other.
    system: Content of a system message before chats that have none; '': none.
    chat_kwargs: Variables for the chat template.
    tensor: Over how many devices heads and hidden units are split; 0: as many
      as in `mesh`.
    attention: See `models.ModelConfig`.

  Raises:
    ValueError: The folder holds no reward model, or an argument is wrong.
  """

  def __init__(
    self,
    path: str,
    mesh: jax.sharding.Mesh | None = None,
    *,
    dtype: str = 'bfloat16',
    max_tokens: int | None = None,
    buckets: Sequence[int] = (),
    micro_tokens: int = 16_384,
    too_long: str = 'refuse',
    chat: bool = True,
    system: str = '',
    chat_kwargs: Mapping[str, Any] | None = None,
    tensor: int = 0,
    attention: str = 'auto',
  ):
    if too_long not in ('refuse', 'cut'):
      raise ValueError(
        f"{NAME} has too_long={too_long!r}; give 'refuse' or 'cut'."
      )
    sizes = (
      micro_tokens,
      *buckets,
      *(() if max_tokens is None else (max_tokens,)),
    )
    if min(sizes) < 1:
      raise ValueError(
        f'{NAME} has max_tokens={max_tokens}, micro_tokens={micro_tokens} and'
        f' buckets={tuple(buckets)}; give 1 or more for each.'
      )
    found = weights.classifier(path)
    max_tokens = _limit(max_tokens, found)
    config = found.config(compute_dtype=dtype, attention=attention)
    self._chats = Chats(path, chat, system, chat_kwargs or {})
    data.check_vocab_size(self._chats.vocab_size, config.vocab_size)
    self._pad_id, self._too_long = found.pad_id, too_long
    self._max_tokens, self._micro_tokens = max_tokens, micro_tokens
    self._buckets = _buckets(tuple(buckets), max_tokens)
    self._mesh = _own_mesh(mesh, tensor)
    self._model = models.Transformer(config)
    shapes = jax.eval_shape(self._model.init, jax.random.key(0))
    # As the sampler has them: nothing is gathered for a micro-batch.
    place = sharding.param_shardings(
      self._mesh, shapes, self._model.logical_axes, sharding.DECODING_RULES
    )
    self._params = weights.load(
      found.source, config, place, dtype, rounded=True
    )
    head = found.score_weight().astype(np.float32)
    self._head = host_arrays.from_local(head, sharding.replicated(self._mesh))

  def __call__(
    self,
    prompts: Sequence[str],
    completions: Sequence[str],
    examples: Sequence[Mapping[str, Any]],
  ) -> list[rewards.Outcome]:
    """One outcome per completion.

    Args:
      prompts: N prompts as texts.
      completions: N completions.
      examples: N records. Where 'prompt' is a list of messages, it goes before
        the text.
    """
    begin = time.monotonic()
    rows = [
      self.ids(whole_prompt(example, prompt), completion)
      for prompt, completion, example in zip(
        prompts, completions, examples, strict=True
      )
    ]
    failures = [self._failure(row) for row in rows]
    judged = [i for i, failure in enumerate(failures) if not failure]
    found = self.scores([rows[i][: self._max_tokens] for i in judged])
    secs = (time.monotonic() - begin) / max(1, len(rows))
    outcomes = [rewards.Outcome(None, failure, secs) for failure in failures]
    for i, score in zip(judged, found.tolist(), strict=True):
      outcomes[i] = rewards.Outcome(score, '', secs)
      if not math.isfinite(score):
        failure = f'the reward model gave the score {score}'
        outcomes[i] = rewards.Outcome(None, failure, secs)
    return outcomes

  def ids(self, prompt: data.Prompt, completion: str) -> list[int]:
    """What the model reads of a completion, without padding.

    Args:
      prompt: A text or messages.
      completion: The answer.

    Returns:
      The ids, of which the last is the one where the score is read.
    """
    ids = self._chats.ids(prompt, completion)
    # As transformers finds the end, and the same where a text of a model whose
    # padding is its end token ends in that token.
    while ids and ids[-1] == self._pad_id:
      ids.pop()
    return ids

  def scores(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """The scores of some texts.

    Args:
      rows: N lists of ids, none empty or longer than the largest bucket.

    Returns:
      f32[N].
    """
    what = 'a text for the reward model'
    shards = sharding.row_shards(self._mesh)
    found = [layout.bucket(len(row), self._buckets, what) for row in rows]
    widths = np.array(found, np.int64)
    scores, waiting = np.zeros(len(rows), np.float32), []
    for width in sorted(set(widths.tolist())):
      chosen = np.flatnonzero(widths == width)
      # Of a fixed number of rows, so that it is compiled once.
      size = max(1, self._micro_tokens // width) * shards
      for first in range(0, len(chosen), size):
        part = chosen[first : first + size]
        tokens, length = _padded([rows[i] for i in part], size, width)
        place = sharding.rows(self._mesh)
        padded = host_arrays.from_local((tokens, length), place)
        found = _scores(
          self._model, self._mesh, self._params, self._head, *padded
        )
        waiting.append((part, found))
    # Read at the end, so that the devices do not wait for the host.
    for part, found in waiting:
      scores[part] = host_arrays.to_host(found)[: len(part)]
    return scores

  def _failure(self, row: Sequence[int]) -> str:
    if not row:
      return 'a text without tokens'
    if len(row) > self._max_tokens and self._too_long == 'refuse':
      return f'a text of more than {self._max_tokens} tokens'
    return ''


def from_kwargs(
  kwargs: Mapping[str, Any], mesh: jax.sharding.Mesh | None
) -> RewardModel:
  """The reward model that a config describes.

  Args:
    kwargs: Arguments of `RewardModel`, by name.
    mesh: Of the run.

  Raises:
    ValueError: The arguments do not fit; see `RewardModel`.
  """
  try:
    inspect.signature(RewardModel).bind(mesh=mesh, **kwargs)
  except TypeError as error:
    names = list(inspect.signature(RewardModel).parameters)
    names.remove('mesh')
    raise ValueError(
      f'The reward {NAME!r} has kwargs={dict(kwargs)}, which do not fit'
      f' ({error}); give some of {", ".join(names)}.'
    ) from error
  return RewardModel(mesh=mesh, **kwargs)


@functools.partial(
  jax.jit,
  static_argnames=('model', 'mesh'),
  compiler_options=sharding.COMPILER_OPTIONS,
)
def _scores(model: models.Layered, mesh, params, head, tokens, length):
  """The scores of padded rows, f32[R].

  Args:
    model: A transformer.
    mesh: Where it lies.
    params: Its parameters.
    head: f32[width].
    tokens: i32[R,S].
    length: i32[R], at least 1.
  """
  with sharding.use(mesh):
    column = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    used = (column < length[:, None]).astype(jnp.int32)
    nothing = jnp.zeros((tokens.shape[0], 1, 1), jnp.int32)  # is predicted
    rows = layout.Layout(
      tokens,
      position=column * used,
      segment=used,
      parent=jnp.zeros_like(tokens),
      column=nothing,
      target=nothing,
      completion=nothing[:, :, 0],
    )
    attention = over_layout(rows, model.config.attention)
    hidden, _ = model.hidden(params, tokens, rows.position, attention)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)
    return jnp.sum(last[:, 0].astype(jnp.float32) * head[None], axis=-1)


def _padded(
  rows: Sequence[Sequence[int]], size: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Rows as i32[size,width] and their lengths; what is left over has one id."""
  tokens, length = np.zeros((size, width), np.int32), np.ones(size, np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
    length[i] = len(row)
  return tokens, length


def _limit(max_tokens: int | None, found: weights.Classifier) -> int:
  """The longest chat that a model reads, tokens.

  Raises:
    ValueError: More are asked for than the model was made for.
  """
  context = found.source.context_tokens
  if max_tokens is None:
    return min(_MOST_TOKENS, context or _MOST_TOKENS)
  if context and max_tokens > context:
    raise ValueError(
      f'{NAME} has max_tokens={max_tokens}, but the model in'
      f' {found.source.path} was made for {context} (max_position_embeddings in'
      ' its config.json); give no more.'
    )
  return max_tokens


def _buckets(given: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
  """The widths, of which the largest holds `max_tokens`.

  >>> _buckets((), 600)
  (128, 256, 512, 600)
  """
  if not given:
    powers = (_LEAST_BUCKET << i for i in range(32))
    return (*(size for size in powers if size < max_tokens), max_tokens)
  if max(given) < max_tokens:
    raise ValueError(
      f'{NAME} has max_tokens={max_tokens}, but its largest bucket is'
      f' {max(given)}; give a larger bucket, or fewer max_tokens.'
    )
  return given


def _own_mesh(mesh: jax.sharding.Mesh | None, tensor: int) -> jax.sharding.Mesh:
  """A mesh over the devices of a run's mesh that this process has.

  Its axes are those of the run's mesh, if no other process has devices in that.
  """
  if mesh is None:
    devices = jax.local_devices()[: max(1, tensor)]
    return sharding.make_mesh(tensor=max(1, tensor), devices=devices)
  own = jax.process_index()
  devices = [x for x in mesh.devices.flat if x.process_index == own]
  if len(devices) == mesh.size and tensor in (0, mesh.shape['tensor']):
    return mesh
  # Fewer than the run has, where a process has fewer.
  split = tensor or math.gcd(mesh.shape['tensor'], len(devices))
  if len(devices) % split:
    raise ValueError(
      f'{NAME} has tensor={tensor}, which does not divide the {len(devices)}'
      ' devices of a process; give another.'
    )
  # In the order of the run's mesh, whose last axis has neighbours.
  shape = tuple(
    {'data': len(devices) // split, 'tensor': split}.get(name, 1)
    for name in mesh.axis_names
  )
  return jax.sharding.Mesh(
    np.array(devices).reshape(shape),
    mesh.axis_names,
    axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
  )
