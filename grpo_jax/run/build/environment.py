"""The environment of a run: what plays it, and within which limits."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
from typing import Any

from grpo_jax import engines
from grpo_jax.config import Config
from grpo_jax.data import Tokenizer
from grpo_jax.data import tool_call
from grpo_jax.environments import formats
from grpo_jax.environments import forms
from grpo_jax.environments import sessions
from grpo_jax.environments import tools_as_text
from grpo_jax.episodes import history
from grpo_jax.episodes import play as play_lib
from grpo_jax.hosts import joining
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build.specs import EnvironmentSpec
from grpo_jax.serving import agents

_MOST_WORKERS = 16  # by default, however many cores there are
_GIB = 2**30
_FIRST_TOKENS = 256  # of the narrowest width that a turn reads

Tools = Sequence[Mapping[str, Any]]  # schemas


def environment_spec(
  config: Config, tokenizer: Tokenizer, own: Any = None
) -> EnvironmentSpec | None:
  """What plays the episodes of a run; None if its completions are single turns.

  Args:
    config: With widths.
    tokenizer: Of the run.
    own: The environment that was given in Python.

  Raises:
    ValueError: The environment cannot be used, or chats cannot go on.
  """
  fields = config.environment
  if not fields.name:
    return None
  played = {'': (fields.name if own is None else own, arguments(config))}
  played |= {name: _other(name, one) for name, one in fields.others.items()}
  toolsets, renders = _toolsets(played), fields.history == 'template'
  shown = toolsets if toolsets and tokenizer.reads_tools else [()]
  for tools in shown:
    tokenizer.check_continuation(tools, appends=not renders)
  call_format = _call_format(fields.call_format, tokenizer, toolsets)
  for tools in shown if renders else ():
    history.check(tokenizer, call_format, tools)
  context = context_tokens(config)
  return EnvironmentSpec(
    played=played,
    call_format=call_format,
    options=sessions.Options(
      where='here' if own is not None else fields.where,
      processes=fields.processes or min(joining.own_cores(), _MOST_WORKERS),
      sessions=fields.sessions,
      tool_secs=fields.tool_secs,
      episode_secs=fields.episode_secs,
      memory_limit_bytes=int(fields.memory_limit_gib * _GIB),
      retries=fields.retries,
    ),
    limits=play_lib.Limits(
      turns=fields.max_turns,
      turn_tokens=config.sampler.max_tokens,
      episode_tokens=fields.episode_tokens or context,
      context_tokens=context,
      prompt_tokens=max(config.data.prompt_buckets),
      result_tokens=fields.result_tokens,
    ),
    renders=renders,
    alike=fields.seed == 'group',
    failed_share=fields.failed_share,
    untrusted=frozenset(
      [''] if fields.name == 'agent' and not config.agent.trust_agent else ()
    ),
  )


def arguments(config: Config) -> dict[str, Any]:
  """The arguments of the environment that a config names.

  Raises:
    ValueError: It is an agent that cannot be played.
  """
  if config.environment.name != 'agent':
    return dict(config.environment.kwargs)
  given = dataclasses.asdict(config.agent)
  agents.check(**given)
  return given


def _other(name: str, given: Any) -> tuple[str, dict[str, Any]]:
  """A name and arguments of `config.environment.others`.

  Raises:
    ValueError: It is something else.
  """
  if isinstance(given, str):
    given = {'name': given}
  if (
    not name
    or not isinstance(given, Mapping)
    or not isinstance(given.get('name'), str)
    or not isinstance(given.get('kwargs', {}), Mapping)
    or not {*given} <= {'name', 'kwargs'}
  ):
    raise ValueError(
      f'config.environment.others[{name!r}]={given!r:.80}; give a name such as '
      "'my_lab.envs:Shop', or {'name': 'my_lab.envs:Shop', 'kwargs': {...}}."
    )
  return given['name'], dict(given.get('kwargs', {}))


def _toolsets(played: Mapping[str, Any]) -> list[Tools]:
  """The schemas of the tools of each environment that has some.

  Raises:
    ValueError: One cannot be used.
  """
  made = []
  for name, (one, kwargs) in played.items():
    try:
      made.append(forms.resolve(one, kwargs))
    except ValueError as error:
      if not name:
        raise
      where = f'config.environment.others[{name!r}]'
      raise ValueError(f'{where} cannot be used: {error}') from error
  return [one.tools for one in made if one.tools]


def _call_format(
  name: str, tokenizer: Tokenizer, toolsets: Sequence[Tools]
) -> formats.Format:
  """How the model writes calls.

  Raises:
    ValueError: The template does not say, or writes calls that the format which
      seems to be its own cannot read; or there is no such format.
  """
  if toolsets and not tokenizer.reads_tools:
    # The model is told in a text how it calls them.
    if name not in ('auto', tools_as_text.FORMAT):
      raise ValueError(
        f'config.environment.call_format={name!r}, but the chat template reads '
        'no tools, so that the model is told by a text to write calls as '
        f"{tools_as_text.FORMAT!r}; give 'auto'."
      )
    return formats.find(tools_as_text.FORMAT)
  if name != 'auto':
    return formats.find(name)
  template = tokenizer.chat_template
  found = formats.guess(template.source if template else '')
  format = formats.find(found or 'json_block')
  if not toolsets:
    return format
  written, is_read = _read_back(format, tokenizer, toolsets[0])
  if not found or not is_read:
    raise ValueError(
      f'The chat template writes a call of a tool as {written!r:.200}, in a '
      'format that is not known here; give config.environment.call_format, one '
      f"of {', '.join(formats.NAMES)}, or 'module:function' of your own."
    )
  return format


def _read_back(
  format: formats.Format,
  tokenizer: Tokenizer,
  tools: Tools,
) -> tuple[str, bool]:
  """A call as the template writes it, and whether a format reads it back."""
  name, arguments = tools[0]['function']['name'], {'x': 'seven'}
  call = tool_call('call_0', name, arguments)
  asked = [{'role': 'user', 'content': 'Well?'}]
  called = [{'role': 'assistant', 'content': '', 'tool_calls': [call]}]
  answered = [{'role': 'tool', 'tool_call_id': 'call_0', 'content': 'Yes.'}]
  before = tokenizer.begin_chat(asked, tools)
  ids = tokenizer.begin_chat([*asked, *called, *answered], tools)
  ends = tokenizer.turn_end_ids(tools)
  # Behind what both have: a template may open a turn as none is written later.
  begin = next(
    (n for n, pair in enumerate(zip(before, ids)) if pair[0] != pair[1]),
    min(len(before), len(ids)),
  )
  turn = list(itertools.takewhile(lambda one: one not in ends, ids[begin:]))
  pieces = tokenizer.turn_pieces(turn)
  opened = begin == len(before) and tokenizer.opens_reasoning()
  found = formats.parse(format, pieces, opened, tools=tools).calls
  is_read = [(one.name, one.arguments) for one in found] == [(name, arguments)]
  return ''.join(text for text, _ in pieces), is_read


def context_tokens(config: Config) -> int:
  """The most tokens of an episode, all that it reads and draws."""
  fields = config.environment
  return fields.context_tokens or max(config.data.completion_buckets)


def widths(config: Config) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The widths of what an engine reads before a turn, and of a turn, tokens.

  A turn reads all that came before it; each width is twice the one before.

  Args:
    config: With widths.
  """
  prompts, fields = config.data.prompt_buckets, config.environment
  if not fields.name:
    return prompts, config.data.completion_buckets
  most = context_tokens(config)
  found, width = [], min(_FIRST_TOKENS, most)
  while width < most:
    found.append(width)
    width *= 2
  return (*found, most), (config.sampler.max_tokens,)


@contextlib.contextmanager
def player(spec: EnvironmentSpec | None) -> Iterator[sessions.Player | None]:
  """What plays episodes; None without an environment. Ends with the context."""
  if spec is None:
    yield None
    return
  with sessions.Player(spec.played, spec.options) as made:
    yield made


def check_failures(
  spec: EnvironmentSpec, played: Sequence[Sequence[play_lib.Played]]
) -> None:
  """Raises a ValueError if too many episodes of a rollout have failed.

  Or if none of the others had a turn.
  """
  every = [one for group in played for one in group]
  reasons = [one.failure for one in every if one.failure]
  whole = [one.account for one in every if not one.failure]
  if whole and not any(one.turns for one in whole):
    limits = spec.limits
    raise ValueError(
      'No episode of a rollout had a turn of the policy '
      f'(ended: {whole[0].ended!r}). If what an environment says first is too '
      f'long for config.environment.context_tokens={limits.context_tokens}, '
      'give more, or where that is 0 a larger bucket in '
      'data.completion_buckets.'
    )
  if len(reasons) > spec.failed_share * len(every):
    most = max(set(reasons), key=reasons.count)
    raise ValueError(
      f'{len(reasons)} of {len(every)} episodes have failed, most often because'
      f' the environment {most}; mend it and give the same command again, or'
      ' raise config.environment.failed_share.'
    )


def _begun(spec: EnvironmentSpec, record: Mapping[str, Any]) -> str:
  """The name of the environment that a record begins.

  Raises:
    ValueError: There is none of that name.
  """
  try:
    return build_data.named(record, spec.played)
  except ValueError as error:
    place = record.get('index')
    which = 'record' if place is None else f'record {place}'
    raise ValueError(f'The {which} cannot be used: {error}') from error


def play(
  spec: EnvironmentSpec,
  player: sessions.Player,
  engine: engines.Engine,
  tokenizer: Tokenizer,
  sampling: engines.Sampling,
  max_tokens: int,
  records: Sequence[Mapping[str, Any]],
  index: Sequence[int],
  **asked: Any,
) -> tuple[list[list[int]], list[list[play_lib.Played]]]:
  """Plays episodes of records; see `play.play` for all arguments.

  Args:
    spec: How they are played.
    player: Of the spec.
    engine: Has the policy.
    tokenizer: Of the run.
    sampling: How tokens are drawn.
    max_tokens: The longest turn.
    records: What they begin with.
    index: Of the records.
    **asked: As for `play.play`.

  Raises:
    ValueError: Too many have failed, or a record names an environment that is
      not there.
  """
  prompts, played = play_lib.play(
    records,
    index,
    engine,
    tokenizer,
    player,
    spec.call_format,
    sampling,
    dataclasses.replace(spec.limits, turn_tokens=max_tokens),
    alike=spec.alike,
    renders=spec.renders,
    untrusted=spec.untrusted,
    environments=[_begun(spec, record) for record in records],
    **asked,
  )
  check_failures(spec, played)
  return prompts, played
