"""Prompts as chats: lists of messages, and the templates that write them.

A prompt is a text, or a list of messages as chat models take them:
`[{'role': 'user', 'content': 'How much is 1+2?'}]`. A chat template is a
program in Jinja that comes with a model. It writes the messages as the one text
that the model was trained on, with its own marks for whose turn it is.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import datetime
import functools
import json
import re
from typing import Any

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

# How a list of messages begins that somebody has written as a text.
_AS_TEXT = re.compile(
  r"""\s*\[\s*\{\s*(["'])(?:role|content"""
  # Data such as the edges of a graph have one of these alone.
  r"""|from(?=\1.*["']value["']\s*:)|value(?=\1.*["']from["']\s*:))\1\s*:""",
  re.DOTALL,
)


def prompt_problem(prompt: Any) -> str:
  """Why a value is no prompt, as the end of a sentence; '' if it is one.

  >>> prompt_problem([{'role': 'user'}])
  "message 0 has no text in 'content', but {'role': 'user'}"

  Args:
    prompt: a text that is not empty and no list of messages written out, or a
      list or tuple of messages, at least one. A message is a dict with the
      texts 'role' and 'content'; other fields are for the chat template.
  """
  if half := half_of_a_pair(prompt):
    return f'it holds half of a surrogate pair ({half!r})'
  if isinstance(prompt, str):
    if _AS_TEXT.match(prompt):  # it may end with the answer
      return 'it is a list of messages that is written as a text'
    return '' if prompt else 'it is empty'
  if not isinstance(prompt, list | tuple) or not prompt:
    return f'it is {prompt!r:.80}'
  for place, message in enumerate(prompt):
    if not isinstance(message, Mapping):
      return f'message {place} is {message!r:.80}, no dict'
    if 'role' not in message and {'from', 'value'} <= message.keys():
      return (
        f"message {place} has 'from' and 'value', as ShareGPT writes them, in "
        "place of 'role' (system, user or assistant) and 'content'"
      )
    for field in ('role', 'content'):
      if not isinstance(message.get(field), str):
        return f'message {place} has no text in {field!r}, but {message!r:.80}'
  return ''


# As templates and data sets call the one whose turns are answers, beside names
# such as 'gpt-4' and 'AI assistant'.
_ASSISTANTS = frozenset(
  'model bot chatbot ai chatgpt llm agent answer response claude'.split()
)
_SYSTEMS = 'system', 'developer'
_ASKERS = frozenset(
  'user human prompter system developer tool function ipython environment '
  'observation tool_response'.split()
)


def is_by_assistant(message: Message) -> bool:
  """Whether a message is a turn of the one that answers.

  >>> is_by_assistant({'role': 'assistant', 'content': '3'})
  True
  """
  role = _role(message)
  return role in _ASSISTANTS or role.startswith('gpt') or 'assistant' in role


def has_known_role(message: Message) -> bool:
  """Whether the role of a message says whether it asks or answers.

  >>> has_known_role({'role': 'teacher', 'content': '1+2='})
  False
  """
  return _role(message) in _ASKERS or is_by_assistant(message)


def _role(message: Message) -> str:
  return str(message.get('role')).strip().casefold()


def half_of_a_pair(value: Any) -> str:
  """The first half of a surrogate pair in the texts of a value; '' if none.

  JSON may write a character as two escapes. One of them alone is no character:
  it cannot be encoded as UTF-8, which tokenizers and files need.

  >>> half_of_a_pair([{'content': 'a' + chr(0xD83D)}])
  '\\ud83d'
  """
  for text in leaves(value):
    if isinstance(text, str):
      try:
        text.encode()  # ten times as fast as a search
      except UnicodeEncodeError as error:
        return text[error.start]
  return ''


def leaves(value: Any) -> Iterator[Any]:
  """Every value in one that may hold others; names of fields are among them.

  >>> [*leaves({'a': [1, (2,)]})]
  [2, 1, 'a']
  """
  # A loop, because the value may be nested as deeply as Python lets calls be.
  waiting = [value]
  while waiting:
    value = waiting.pop()
    if isinstance(value, Mapping):
      waiting += [*value, *value.values()]
    elif isinstance(value, list | tuple):
      waiting += value
    else:
      yield value


def prompt_text(prompt: Prompt) -> str:
  """What a person sees of a prompt, and what rewards get as `prompt`.

  >>> prompt_text([{'role': 'system', 'content': 'Be brief.'},
  ...              {'role': 'user', 'content': 'How much is 1+2?'}])
  'How much is 1+2?'

  Args:
    prompt: a text or a list of messages.

  Returns:
    The text itself; of messages the content of the last one by a user, or of
    the last one if no user has written any.
  """
  if isinstance(prompt, str):
    return prompt
  asked = [message for message in prompt if message.get('role') == 'user']
  return str((asked or prompt)[-1]['content'])


@dataclasses.dataclass(frozen=True)
class PromptFormat:
  """How prompts become the text that a model completes.

  Args:
    chat: whether prompts are written by the model's chat template. A prompt
      that is a text then stands for a single message by the user. Without
      `chat` the model completes the text as it is, and a list of messages is
      refused.
    system_prompt: content of a system message that is put before the messages;
      messages that begin with a system message of their own keep it. '': none.
    chat_kwargs: variables for the template, such as
      `{'enable_thinking': False}` for Qwen3.
    completion_prefix: how every completion begins, as in 'Answer:'. The model
      reads this text as its own, but it is not sampled, not trained on, and not
      part of the completion that rewards see.
  """

  chat: bool = False
  system_prompt: str = ''
  chat_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  completion_prefix: str = ''

  def messages(self, prompt: Prompt) -> list[Message]:
    """A prompt as messages, the system prompt included.

    Raises:
      ValueError: it is neither a text nor a list of messages.
    """
    if problem := prompt_problem(prompt):
      raise ValueError(
        'A prompt must be a text or a list of messages such as'
        f" {{'role': 'user', 'content': 'How much is 1+2?'}}, but {problem};"
        ' correct the prompt.'
      )
    if isinstance(prompt, str):
      prompt = [{'role': 'user', 'content': prompt}]
    if self.system_prompt and prompt[0]['role'] not in _SYSTEMS:
      return [{'role': 'system', 'content': self.system_prompt}, *prompt]
    return list(prompt)

  def shown(self, prompt: Prompt) -> str:
    """What is printed before a completion of the prompt.

    A chat gets a line of its own for the completion, because nothing between
    the question and the answer says where one ends.
    """
    end = '\n' if self.chat else ''
    if not isinstance(prompt, str) and is_by_assistant(prompt[-1]):
      end += str(prompt[-1]['content'])  # where the completion goes on
    return prompt_text(prompt) + end + self.completion_prefix


PLAIN = PromptFormat()  # prompts are texts, completed as they are


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  r"""A chat template, rendered as `transformers` renders it.

  The template runs in Jinja's sandbox, because it is code out of a model's
  files. Like `apply_chat_template` in transformers 5.23 it has the functions
  `raise_exception` and `strftime_now`, the filter `tojson` without HTML
  escapes, `break` and `continue`, and the tag `generation`.

  A template may read the clock by `strftime_now`: those of Llama 3.1 and later
  write the date. Their prompts differ from day to day; pass `date_string` to
  fix the date.

  >>> template = ChatTemplate(
  ...   "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n"
  ...   "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
  >>> template.render([{'role': 'user', 'content': 'Hi'}])
  '<user>Hi\n<assistant>'

  Args:
    source: the template, in Jinja.
    tokens: special tokens that the template may write, by name, such as
      `{'bos_token': '<s>'}`.
  """

  source: str
  tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def render(
    self,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **kwargs: Any,
  ) -> str:
    """The messages as one text.

    Args:
      messages: dicts with 'role' and 'content'. A field that is None counts as
        missing. Descriptions of tools in a field 'tools' become the variable of
        this name. The role 'developer' is 'system' for a template that does not
        have it.
      add_generation_prompt: whether the text ends where the assistant's next
        message begins.
      **kwargs: further variables for the template; they go before `tokens`.

    Returns:
      The text, with special tokens spelled out.

    Raises:
      ValueError: the template has a syntax error, does not read one of
        `kwargs` or the tools, or refuses the messages. Its own words are passed
        on.
    """
    self.check(kwargs)
    template, _ = _compiled(self.source)
    given = [
      {name: value for name, value in message.items() if value is not None}
      for message in messages
    ]
    if 'developer' not in self.source:  # would leave the message out
      given = [
        {**one, 'role': 'system'} if one.get('role') == 'developer' else one
        for one in given
      ]
    if tools := self._tools(given):
      kwargs = {**kwargs, 'tools': tools}
    try:
      return template.render(
        messages=given,
        add_generation_prompt=add_generation_prompt,
        **{'tools': None, 'documents': None, **self.tokens, **kwargs},
      )
    except Exception as error:  # it is a program: any error may come out of it
      roles = [message.get('role') for message in given]
      raise ValueError(
        f'The chat template cannot write messages with the roles {roles}:'
        f' {error}; change the messages, config.data.system_prompt or'
        ' config.data.chat_kwargs.'
      ) from error

  @property
  def reads_tools(self) -> bool:
    """Whether it writes descriptions of tools."""
    return re.search(r'\btools\b', self.source) is not None

  def _tools(self, messages: Sequence[Message]) -> list[Any]:
    """The tools that a message carries; none if there are none."""
    carried = (message.get('tools') for message in messages)
    tools = next((one for one in carried if one and type(one) is list), [])
    if tools and not self.reads_tools:
      raise ValueError(
        'The chat template reads no tools, but the prompt comes with'
        f' {len(tools)} of them, which the model would never see; take a model'
        " whose template reads them, or records without 'tools'."
      )
    return tools

  def check(self, kwargs: Iterable[str] = ()):
    """Checks the template, and that some variables of it can be set.

    Args:
      kwargs: names of variables.

    Raises:
      ValueError: it has a syntax error, or does not read one of the variables.
    """
    _, variables = _compiled(self.source)
    # The run fills these in.
    variables -= {'messages', 'add_generation_prompt'}
    for name in kwargs:
      if name not in variables:  # a misspelt name would do nothing at all
        raise ValueError(
          f'The chat template has no variable {name!r} to be set, but only'
          f' {sorted(variables)}; correct or remove the name in'
          ' config.data.chat_kwargs.'
        )


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Any, frozenset[str]]:
  """A template, and the names of the variables that it reads."""
  import jinja2
  import jinja2.meta

  environment = _environment()
  try:
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), frozenset(names)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(
      f'The chat template has a syntax error in line {error.lineno}:'
      f' {error.message}; correct the template.'
    ) from error


@functools.cache
def _environment() -> Any:
  """Jinja as transformers sets it up for chat templates."""
  import jinja2
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """{% generation %}, which marks what an assistant has written."""

    tags = {'generation'}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      # A scope, as in transformers: what is set inside is not known outside.
      return jinja2.nodes.Scope(body, lineno=line)

  def raise_exception(message: str):
    raise jinja2.TemplateError(message)

  # Jinja's own filter writes '<' as '\\u003c', which no model was trained on.
  def tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
  ) -> str:
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, jinja2.ext.loopcontrols],
  )
  environment.filters['tojson'] = tojson
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: (
    datetime.datetime.now().strftime(form)
  )
  return environment
