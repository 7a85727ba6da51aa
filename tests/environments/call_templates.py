"""Small chat templates of an assistant's calls, one for each way to write them.

In our own words, but each writes calls as the models of its family read them.
"""

import functools
import json

import jinja2

_EACH = '{%- for call in calls %}'

HERMES = (
  _EACH + "{{ '\\n<tool_call>\\n' }}"
  "{{- {'name': call.name, 'arguments': call.arguments} | tojson }}"
  "{{- '\\n</tool_call>' }}{% endfor %}"
)
QWEN_CODER = (
  _EACH + "{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}"
  '{%- for name, value in call.arguments.items() %}'
  "{{- '<parameter=' + name + '>\\n' }}"
  '{{- value | tojson if value is mapping or (value is sequence and value is'
  ' not string) else value | string }}'
  "{{- '\\n</parameter>\\n' }}{% endfor %}"
  "{{- '</function>\\n</tool_call>' }}{% endfor %}"
)
LLAMA = (
  _EACH + '{{- \'{"name": "\' + call.name + \'", "parameters": \' }}'
  "{{- call.arguments | tojson + '}' }}"
  "{{- '; ' if not loop.last }}{% endfor %}"
)
LLAMA_TAG = "{{- '<|python_tag|>' }}" + LLAMA
_PYTHON = (
  "{{- '[' }}" + _EACH + "{{- call.name + '(' }}"
  '{%- for name, value in call.arguments.items() %}'
  "{{- name + '=' + (value | python) + (', ' if not loop.last else '') }}"
  "{%- endfor %}{{- ')' + (', ' if not loop.last else '') }}{% endfor %}"
  "{{- ']' }}"
)
PYTHONIC = _PYTHON
LFM2 = "{{- '<|tool_call_start|>' }}" + _PYTHON + "{{- '<|tool_call_end|>' }}"
LLAMA4 = "{{- '<|python_start|>' }}" + _PYTHON + "{{- '<|python_end|>' }}"
_GEMMA = (
  '{%- macro written(value) %}'
  '{%- if value is string %}{{- QUOTE + value + QUOTE }}'
  "{%- elif value is mapping %}{{- '{' }}{% for name, one in value.items() %}"
  "{{- name + ':' }}{{- written(one) }}{{- ',' if not loop.last }}"
  "{%- endfor %}{{- '}' }}"
  '{%- elif value is boolean or value is none or value is number %}'
  '{{- value | tojson }}'
  "{%- else %}{{- '[' }}{% for one in value %}{{- written(one) }}"
  "{{- ',' if not loop.last }}{% endfor %}{{- ']' }}{% endif %}"
  '{%- endmacro %}' + _EACH + "{{- START + 'call:' + call.name }}"
  '{{- written(call.arguments) + END }}{% endfor %}'
)
FUNCTION_GEMMA = (
  "{%- set QUOTE = '<escape>' %}{% set START = '<start_function_call>' %}"
  "{%- set END = '<end_function_call>' %}" + _GEMMA
)
GEMMA4 = (
  "{%- set QUOTE = '<|\"|>' %}{% set START = '<|tool_call>' %}"
  "{%- set END = '<tool_call|>' %}" + _GEMMA
)
BLOCK = (
  _EACH + "{{- '```json\\n' }}"
  "{{- {'name': call.name, 'arguments': call.arguments} | tojson }}"
  "{{- '\\n```\\n' }}{% endfor %}"
)

# The format that reads each. What is told apart by more than the calls, as
# Llama's own by 'ipython', has the mark in a comment.
ALL = {
  'hermes': ('hermes', HERMES),
  'qwen_coder': ('xml', QWEN_CODER),
  'llama3': ('llama_json', '{# ipython, tool_calls #}' + LLAMA),
  'llama3_tag': ('llama_json', LLAMA_TAG),
  'lfm2': ('pythonic', LFM2),
  'llama4': ('pythonic', LLAMA4),
  'llama4_bare': ('pythonic', '{# <|python_start|> #}' + PYTHONIC),
  'function_gemma': ('gemma', FUNCTION_GEMMA),
  'gemma4': ('gemma', GEMMA4),
  'block': ('json_block', BLOCK),
}


def render(template: str, calls) -> str:
  """What a template writes for calls: (name, arguments) each."""
  written = [{'name': name, 'arguments': given} for name, given in calls]
  return compiled(template).render(calls=written)


@functools.cache
def compiled(template: str) -> jinja2.Template:
  environment = jinja2.Environment()
  environment.filters['tojson'] = lambda value: json.dumps(
    value, ensure_ascii=False
  )
  environment.filters['python'] = repr
  return environment.from_string(template)
