"""Chat templates in the styles found in model files, written for these tests, and conversations.

Not a test: inputs of the rendering goldens. Each template uses a part of the language that real
ones rely on: white space control, loop controls, macros, namespaces, JSON, slices, generation
tags, refusals.
"""

from __future__ import annotations

from typing import Any

CHATML = """{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

INSTRUCTION = """{% if messages[0]['role'] == 'system' -%}
    {% set rest = messages[1:] -%}
    {% set first = '<<SYS>>\\n' ~ messages[0].content | trim ~ '\\n<</SYS>>\\n\\n' -%}
{% else -%}
    {% set rest = messages -%}
    {% set first = '' -%}
{% endif -%}
{{ bos_token -}}
{% for m in rest -%}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate: user, assistant, ...') }}
    {%- endif -%}
    {% if m.role == 'user' -%}
        [INST] {{ (first if loop.first else '') + m.content }} [/INST]
    {%- else -%}
        {{ ' ' + m.content | trim + ' ' + eos_token }}
    {%- endif -%}
{% endfor %}"""

TOOLS = """{%- macro turn(role, text) %}
<|{{ role }}|>
{{ text }}<|end|>
{%- endmacro -%}
{%- set ns = namespace(calls=0, system='') -%}
{%- for m in messages if m.role == 'system' -%}
{%- set ns.system = ns.system + m.content -%}
{%- endfor -%}
{%- if tools is not none and tools | length > 0 -%}
{{ turn('system', ns.system ~ '\\nTools: ' ~ tools | tojson) }}
{%- for tool in tools %}
- {{ tool.function.name }}: {{ tool['function'].description | default('none', true) }}
{%- for name, spec in tool.function.parameters.properties.items() %}
{%- set needed = name in tool.function.parameters.required %}
  {{ name }} ({{ spec.type | upper }}{{ ', required' if needed }})
{%- endfor %}
{%- endfor %}
{%- elif ns.system -%}
{{ turn('system', ns.system) }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' %}{% continue %}{% endif -%}
{%- if m.tool_calls is defined and m.tool_calls -%}
{%- for call in m.tool_calls -%}
{%- set ns.calls = ns.calls + 1 -%}
{{ turn('assistant', {'name': call.function.name, 'n': ns.calls} | tojson(indent=2)) }}
{%- endfor -%}
{%- else -%}
{{ turn(m.role, m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""

THINKING = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set text = m.content %}
{%- if '</think>' in text %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- generation %}{{ '<a>' + text }}{% endgeneration %}</a>
{%- else %}
{{- '<' ~ m.role[0] ~ '>' ~ m.content ~ '</' ~ m.role[0] ~ '>' }}
{%- endif %}
{%- if loop.last %}{% break %}{% endif %}
{{- ' ' if loop.nextitem is defined }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"""

FILTERS = """{{ messages | map(attribute='role') | join('|') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% set others = messages | rejectattr('role', 'in', ['user', 'system']) %}
{{ others | map(attribute='content') | first | default('-') }}
{{ messages[-1].content | trim | replace('a', 'A') | upper | capitalize | title | length }}
{{ messages[0] | items | list | tojson(sort_keys=true) }}
{{ [3, 1, 2] | sort(reverse=true) | join(', ') }} {{ [1, 2, 3] | sum }} {{ '7' | int + 1 }}
{{ 7 // 2 }} {{ -7 % 3 }} {{ 1 / 4 }}
{{ '%s-%05.1f' | format('x', 3.14159) }} {{ '%d%%' % 50 }} {{ '{:>4}'.format('ab') }}
{{ messages[:1] | tojson }} {{ messages[::-1][0].role }} {{ 'abc'[1:] }} {{ 2 ** 8 }}
{{ {'k': [none, true, 1.5, '<é>']} | tojson }} {{ 'x' * 3 }} {{ [1] + [2] }} {{ (1, 2) }}
{{ messages[0].content is string }} {{ messages is iterable }} {{ foo is defined }} {{ foo }}
{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}={{ v }};{% endfor %}
{%- for row in [1, 2, 3, 4, 5] | batch(2) %}{{ row }}{% endfor +%}
{{ messages[0].content.startswith('a') }} {{ ' x '.strip() }}
{{ 'a,b'.split(',') }} {{ 'Ab'.swapcase() }}
{{ namespace(a=1).a }} {{ dict(a=1) | tojson }} {{ range(3) | list }} {{ 'a\\nb' | indent(2) }}
{% set captured %}captured {{ 1 + 1 }}{% endset %}{{ captured }}
{{ [[1], [2]] | map('first') | list }}
{% filter upper %}shouted{% endfilter %} {{ 'a' if false }}{{ 1 if messages else 0 }} {{ none }}
"""

TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "instruction": INSTRUCTION,
    "tools": TOOLS,
    "thinking": THINKING,
    "filters": FILTERS,
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather, e.g. in Zürich <b>now</b>",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}],
}
USER = {"role": "user", "content": "a question?"}
CASES: dict[str, dict[str, Any]] = {
    "one": {"messages": [USER]},
    "no_prompt": {"messages": [USER], "add_generation_prompt": False},
    "turns": {
        "messages": [
            {"role": "system", "content": "  Be brief. "},
            {"role": "user", "content": "¿Qué? 🙂\n"},
            {"role": "assistant", "content": "<think>hm</think>\n\nAn answer. "},
            {"role": "user", "content": "More\n  lines\n"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            USER,
            CALL,
            {"role": "tool", "content": '{"t": 7}'},
        ],
        "tools": [TOOL],
    },
    "variables": {"messages": [USER], "variables": {"enable_thinking": False}},
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
