"""Small chat templates with the features that those of real models use.

Each writes chats as the models of its name read them, in our own words: no
tools, no images. What they share with the originals is what a renderer can get
wrong: white space control, `namespace`, slices, filters, `raise_exception`,
special tokens by name, and variables that may be missing.
"""

# A default system prompt; texts joined by +.
SMOLLM2 = (
  '{% for message in messages %}'
  "{% if loop.first and message['role'] != 'system' %}"
  "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
  "{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
  " + '<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Lines with white space control; tools as JSON.
QWEN2 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] or not message.tool_calls %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Thoughts are kept after the last question alone, and can be turned off.
QWEN3 = """\
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user' %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + content.split('</think>')[0].rstrip('\\n') }}
            {{- '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.split('</think>')[-1].lstrip('\\n') }}
    {%- elif message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' + content }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# The first token by name; the date; a system turn whatever the messages are.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# The system prompt is put into the first question; roles must alternate.
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate user/assistant/...') }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = 'model' -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

# Like it, but a system message is refused.
GEMMA2 = (
  "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not"
  " supported') }}{% endif %}"
) + GEMMA3

# The end token by name; the system prompt goes into the last question.
MISTRAL = """\
{%- set ns = namespace() %}
{%- if messages[0]["role"] == "system" %}
    {%- set ns.system = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " }}
        {%- if loop.last and ns.system is defined %}
            {{- ns.system + "\\n\\n" }}
        {%- endif %}
        {{- message["content"] + "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {% generation %}
            {{- " " + message["content"] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception("Only user, system and assistant roles!") }}
    {%- endif %}
{%- endfor %}
"""

# A system prompt has a turn of its own; thoughts of earlier answers are left
# out, and the last answer's are asked for by a variable.
GEMMA4 = """\
{{- bos_token -}}
{%- if enable_thinking is defined and enable_thinking -%}
    {{- '<|turn>system\\n<|think|>' -}}
    {%- if messages[0].role == 'system' -%}
        {{- messages[0].content | trim -}}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|turn>system\\n' + messages[0].content | trim + '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set role = {'assistant': 'model'}.get(message.role, message.role) -%}
    {%- set content = message.content.split('<channel|>')[-1] | trim -%}
    {{- '<|turn>' + role + '\\n' + content + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|turn>model\\n' -}}
{%- endif -%}
"""

ALL = {
  'smollm2': SMOLLM2,
  'qwen2': QWEN2,
  'qwen3': QWEN3,
  'llama3': LLAMA3,
  'gemma2': GEMMA2,
  'gemma3': GEMMA3,
  'gemma4': GEMMA4,
  'mistral': MISTRAL,
}
