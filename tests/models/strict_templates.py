"""Chat templates that refuse what others take, written after the structure of published ones."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}{% set system = messages[0]["content"] %}\
{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
{%- set ns = namespace(n=0) %}\
{%- for m in rest %}{% if m.role == "user" or (m.role == "assistant" and not m.tool_calls) %}\
{%- if (m.role == "user") != (ns.n % 2 == 0) %}{{ raise_exception("roles must alternate") }}\
{%- endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}\
{{- bos_token }}{% if system is defined %}[SYS]{{ system }}[/SYS]{% endif %}\
{%- for m in rest %}{% if m.role == "user" %}[INST]{{ m.content }}[/INST]\
{%- elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}\
{{- raise_exception("ids have 9 characters") }}{% endif %}\
[CALL]{{ c.function | tojson }}{% endfor %}{{ eos_token }}\
{%- elif m.role == "assistant" %}{{ m.content }}{{ eos_token }}\
{%- elif m.role == "tool" %}{% if m.tool_call_id | length != 9 %}\
{{- raise_exception("ids have 9 characters") }}{% endif %}[RES]{{ m.content }}[/RES]\
{%- else %}{{ raise_exception("only user, assistant and tool") }}{% endif %}{% endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0].role == "system" %}{{ raise_exception("no system role") }}\
{%- endif %}{% for m in messages %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}\
{{- raise_exception("roles must alternate") }}{% endif %}<start>\
{{- "model" if m.role == "assistant" else m.role }}
{{ m.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<start>model
{% endif %}"""

LLAMA = """\
{%- if messages[0].role == "system" %}{% set system = messages[0].content | trim %}\
{% set messages = messages[1:] %}{% else %}{% set system = "" %}{% endif %}\
{{- bos_token }}<|head|>system<|/head|>{{ system }}<|eot|>\
{%- for m in messages %}{% if m.role not in ("ipython", "tool") and not m.tool_calls %}\
<|head|>{{ m.role }}<|/head|>{{ m.content | trim }}<|eot|>{% elif m.tool_calls %}\
{%- if m.tool_calls | length != 1 %}{{ raise_exception("single calls alone") }}{% endif %}\
<|head|>assistant<|/head|>{{ m.tool_calls[0].function | tojson }}<|eot|>\
{%- else %}<|head|>ipython<|/head|>{{ m.content }}<|eot|>{% endif %}{% endfor %}\
{%- if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}"""

QWEN = """\
{%- for m in messages %}{% if m.role == "system" %}{% if not loop.first %}\
{{- raise_exception("system must be first") }}{% endif %}<|im|>system\n{{ m.content }}<|end|>
{% elif m.role == "user" %}<|im|>user\n{{ m.content }}<|end|>
{% elif m.role == "assistant" %}<|im|>assistant\n\
{% set content = m.content %}{% set thought = "" %}\
{%- if "</think>" in content %}\
{%- set thought = content.split("</think>")[0].split("<think>")[-1].strip("\\n") %}\
{%- set content = content.split("</think>")[-1].lstrip("\\n") %}{% endif %}\
{%- if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}\
{%- for c in m.tool_calls or [] %}
<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|end|>
{% elif m.role == "tool" %}{% if messages[loop.index0 - 1].role != "tool" %}<|im|>user{% endif %}
<tool_response>\n{{ m.content }}\n</tool_response>\
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|end|>
{% endif %}{% endif %}{% endfor %}\
{%- if add_generation_prompt %}<|im|>assistant\n<think>\n{% endif %}"""

DROPPING = """\
{%- if messages[0].role == "system" %}{{ messages[0].content }}\n{% endif %}\
{%- for m in messages %}{% if m.role == "user" %}U: {{ m.content }}\n\
{%- elif m.role == "assistant" %}A: {{ m.content }}\n{% endif %}{% endfor %}\
{%- if add_generation_prompt %}A: {% endif %}"""

FREE = """\
{%- for m in messages %}<|im|>{{ m.role }}\n{{ m.content }}\
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>\n\
{%- endfor %}{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"""

TEMPLATES = {
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "llama": LLAMA,
    "qwen": QWEN,
    "dropping": DROPPING,
    "free": FREE,
}
"""By the family that they are like; ``dropping`` leaves out what it does not know."""


@functools.cache
def tokenizer(name: str) -> Any:
    """A tokenizer of bytes with one of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    known = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATES[name], bos_token="<s>", eos_token="</s>"
    )
    known.add_tokens(["<think>", "</think>"])
    return known
