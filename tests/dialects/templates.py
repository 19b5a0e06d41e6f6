"""Chat templates that write calls as the published ones of each family do, and are short."""

from __future__ import annotations

import re

_SET = "{%- set reasoning = m.reasoning_content or '' %}\n"
_TURNS = """{%- if tools %}{{- (tools | length | string) + ' tools.' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- 'assistant: ' }}
{%- set reasoning = m.reasoning_content or '' %}
REASONING
{{- m.content or '' }}
{%- if m.tool_calls %}
CALLS
{%- endif %}
{{- '<|eos|>' }}
{%- else %}
{{- m.role + ': ' + m.content + '<|eos|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

_THINK = """{%- if reasoning %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}"""

_EACH = "{%- for c in m.tool_calls %}{%- set f = c.function %}"
_LINE = "{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}"
_NAMED = """{{- '{"name": "' + f.name + '", "KEY": ' + (f.arguments | tojson) + '}' }}"""
_RAW = "(v if v is string else v | tojson)"


def _named(key: str = "arguments") -> str:
    return _NAMED.replace("KEY", key)


CALLS = {
    "hermes": _EACH
    + _LINE
    + "{{- '<tool_call>\\n' }}"
    + _named()
    + "{{- '\\n</tool_call>' }}{%- endfor %}",
    "smollm3": "{#- xml_tools #}"
    + _EACH
    + _LINE
    + "{{- '<tool_call>' }}"
    + _named()
    + "{{- '</tool_call>' }}{%- endfor %}",
    "qwen3-coder": _EACH
    + _LINE
    + """{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}
{%- for k, v in f.arguments.items() %}
{{- '<parameter=' + k + '>\\n' + RAW + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}""".replace("RAW", _RAW),
    "llama3": "{#- <|python_tag|> #}"
    + _EACH
    + _named("parameters")
    + "{%- if not loop.last %}{{- '; ' }}{%- endif %}{%- endfor %}",
    "mistral": _EACH
    + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}{%- endfor %}",
    "mistral-v11": _EACH
    + """{{- '[TOOL_CALLS]' + f.name + '[CALL_ID]' + c.id + '[ARGS]' + (f.arguments | tojson) }}
{%- endfor %}""",
    "mistral-v3": "{{- '[TOOL_CALLS] [' }}"
    + _EACH
    + _named()
    + "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
    "harmony": _EACH
    + """{{- '<|channel|>commentary to=functions.' + f.name }}
{{- ' <|constrain|>json<|message|>' + (f.arguments | tojson) + '<|call|>' }}{%- endfor %}""",
    "deepseek-v3": "{{- '<｜tool▁calls▁begin｜>' }}"
    + _EACH
    + """{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name }}
{{- '\\n```json\\n' + (f.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}""",
    "deepseek-v3.1": "{{- '<｜tool▁calls▁begin｜>' }}"
    + _EACH
    + """{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + (f.arguments | tojson) }}
{{- '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}""",
    "deepseek-v3.2": "{{- '<｜DSML｜function_calls>\\n' }}"
    + _EACH
    + """{{- '<｜DSML｜invoke name="' + f.name + '">\\n' }}
{%- for k, v in f.arguments.items() %}
{{- '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- RAW + '</｜DSML｜parameter>\\n' }}
{%- endfor %}
{{- '</｜DSML｜invoke>\\n' }}{%- endfor %}{{- '</｜DSML｜function_calls>' }}""".replace(
        "RAW", _RAW
    ),
    "glm-4.5": _EACH
    + _LINE
    + """{{- '<tool_call>' + f.name + '\\n' }}
{%- for k, v in f.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + RAW + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}""".replace("RAW", _RAW),
    "glm-4.7": _EACH
    + """{{- '<tool_call>' + f.name }}
{%- for k, v in f.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key><arg_value>' + RAW + '</arg_value>' }}
{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}""".replace("RAW", _RAW),
    "granite-3": "{{- '<|tool_call|>[' }}"
    + _EACH
    + _named()
    + "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
    "kimi-k2": "{{- '<|tool_calls_section_begin|>' }}"
    + _EACH
    + """{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- (f.arguments | tojson) + '<|tool_call_end|>' }}{%- endfor %}
{{- '<|tool_calls_section_end|>' }}""",
    "minimax-m2": _LINE.replace("not loop.first or ", "")
    + "{{- '<minimax:tool_call>\\n' }}"
    + _EACH
    + """{{- '<invoke name="' + f.name + '">\\n' }}
{%- for k, v in f.arguments.items() %}
{{- '<parameter name="' + k + '">' + RAW + '</parameter>\\n' }}
{%- endfor %}
{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}""".replace("RAW", _RAW),
    "minimax-m1": "{{- '<tool_calls>\\n' }}"
    + _EACH
    + _named()
    + "{{- '\\n' }}{%- endfor %}{{- '</tool_calls>' }}",
    "gemma4": """{%- macro bare(v) -%}
{%- if v is string -%}{{- '<|"|>' + v + '<|"|>' -}}
{%- elif v is mapping -%}{{- '{' -}}
{%- for k, one in v.items() -%}{{- k + ':' + bare(one) -}}
{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- '}' -}}
{%- elif v is sequence -%}{{- '[' -}}
{%- for one in v -%}{{- bare(one) -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}
{%- endfor -%}{{- ']' -}}
{%- else -%}{{- v | tojson -}}{%- endif -%}
{%- endmacro %}"""
    + _EACH
    + "{{- '<|tool_call>call:' + f.name + bare(f.arguments) + '<tool_call|>' }}{%- endfor %}",
}
CALLS["functiongemma"] = (
    CALLS["gemma4"]
    .replace('<|"|>', "<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
)

REASONING = {
    "harmony": """{%- if reasoning %}
{{- '<|channel|>analysis<|message|>' + reasoning + '<|end|><|start|>assistant' }}{%- endif %}
{%- if m.content %}{{- '<|channel|>final<|message|>' }}{%- endif %}""",
    "gemma4": """{%- if reasoning %}{{- '<|channel>thought\\n' + reasoning + '<channel|>' }}
{%- endif %}""",
    "mistral-v11": "{%- if reasoning %}{{- '[THINK]' + reasoning + '[/THINK]' }}{%- endif %}",
    "mistral": "{%- if reasoning %}{{- '[THINK]' + reasoning + '[/THINK]' }}{%- endif %}",
}
NO_REASONING = ("llama3", "mistral-v3", "functiongemma", "gemma3", "llama4")
SAID_AS_TEXT = {
    "lfm2": "{#- <|tool_list_start|> #}",
    "gemma3": "{#- <start_of_turn> #}",
    "llama4": "{#- <|header_start|> #}",
}
"""Templates that write no calls; they stand in the text of answers."""


def template_of(name: str) -> str:
    """Return a template whose answers are as a dialect's models write them."""
    reasoning = "" if name in NO_REASONING else REASONING.get(name, _THINK)
    turns = _TURNS if reasoning else _TURNS.replace(_SET, "")
    if name in SAID_AS_TEXT:
        turns = re.sub(r"(?s)\{%- if m.tool_calls %\}.*?\{%- endif %\}", "", turns)
        return turns.replace("REASONING", reasoning) + SAID_AS_TEXT[name]
    return turns.replace("REASONING", reasoning).replace("CALLS", CALLS[name])
