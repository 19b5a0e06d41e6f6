"""All dialects by name, and which of them a model speaks."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from kvcellar.dialects import formats
from kvcellar.dialects.dialect import Dialect, ReasoningMarks, TaggedArguments

DIALECTS: Mapping[str, Dialect] = MappingProxyType({one.name: one for one in formats.ALL})
"""Every dialect by its name."""

_SIGNS = (
    (("<|channel|>", "<|message|>"), formats.HARMONY),
    (("<｜DSML｜",), formats.DEEPSEEK_TAGS),
    (("<｜tool▁calls▁begin｜>", "```json"), formats.DEEPSEEK),
    (("<｜tool▁calls▁begin｜>",), formats.DEEPSEEK_SHORT),
    (("<|tool_calls_section_begin|>",), formats.KIMI),
    (("<minimax:tool_call>",), formats.MINIMAX),
    (("</arg_key><arg_value>",), formats.GLM_SHORT),
    (("<arg_key>",), formats.GLM),
    (("<function=",), formats.QWEN_CODER),
    (("<|tool_call>",), formats.GEMMA),
    (("<start_function_call>",), formats.FUNCTION_GEMMA),
    (("<|tool_call_start|>",), formats.LFM),
    (("<|tool_list_start|>",), formats.LFM),
    (("[TOOL_CALLS]", "[CALL_ID]"), formats.MISTRAL_WITH_IDS),
    (("[TOOL_CALLS]", "[ARGS]"), formats.MISTRAL),
    (("[TOOL_CALLS]",), formats.MISTRAL_OLD),
    (("<|tool_call|>",), formats.GRANITE),
    (("xml_tools",), formats.SMOLLM),
    (("<tool_call>",), formats.HERMES),
    (("<tool_calls>",), formats.MINIMAX_JSON),
    (("<|python_start|>",), formats.LLAMA_PYTHON),
    (("<|header_start|>",), formats.LLAMA_PYTHON),
    (("<|python_tag|>",), formats.LLAMA_JSON),
    (("<|start_header_id|>", '"parameters"'), formats.LLAMA_JSON),
    (("<start_of_turn>",), formats.GEMMA_PYTHON),
)
"""What templates have in them, and whose they are; the first whose signs are all there counts."""

_OTHER_MARKS = (
    ReasoningMarks(),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("◁think▷", "◁/think▷"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)
_WORDS = re.compile(r"value\s*\|\s*string\b")
"""Writes a value of a call as Python has it."""

_REASONING_KEY = re.compile(r"""(?:\.|\[['"]|get\(['"])(reasoning_content|reasoning|thinking)\b""")


def _is_known(marks: ReasoningMarks, template: str, added: Mapping[str, tuple[int, bool]]) -> bool:
    """Return true if a template or a vocabulary has one of the marks."""
    begin = marks.begin.strip()
    return marks.end in added or begin in added or marks.end in template or begin in template


_known: WeakKeyDictionary[Any, tuple[tuple[str, str | None], Dialect]] = WeakKeyDictionary()
_lock = threading.Lock()


def dialect_for(tokenizer: Any, name: str | None = None) -> Dialect:
    """Return the dialect that a model's answers are in.

    Args:
        tokenizer: of the model; None: it has none.
        name: of a dialect, where somebody has chosen one.
    """
    given = getattr(tokenizer, "chat_template", None) or ""
    named = given.values() if isinstance(given, dict) else [given]
    template = "\n".join(map(str, named))
    if tokenizer is None:
        return choose_dialect(template, name=name)
    state = (template, name)
    with _lock:
        found = _known.get(tokenizer)
    if found is None or found[0] != state:
        added = {
            token.content: (int(i), bool(token.special))
            for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        found = (state, choose_dialect(template, added, name))
        with _lock:
            _known[tokenizer] = found
    return found[1]


def choose_dialect(
    template: str, added: Mapping[str, tuple[int, bool]] | None = None, name: str | None = None
) -> Dialect:
    """Return the dialect of a chat template.

    Args:
        template: its text; empty for none.
        added: token and whether it is special, of each text that the vocabulary adds.
        name: of a dialect, where somebody has chosen one.
    """
    added = added or {}
    signs = (one for marks, one in _SIGNS if all(mark in template for mark in marks))
    dialect = DIALECTS[name] if name is not None else next(signs, formats.HERMES)
    keys = _REASONING_KEY.findall(template)
    key = min(keys, key=("reasoning_content", "reasoning", "thinking").index, default="")
    form = dialect.calls
    if form is not None and isinstance(form.arguments, TaggedArguments):
        has_words = _WORDS.search(template) is not None
        how = replace(form.arguments, has_words=has_words)
        dialect = replace(dialect, calls=replace(form, arguments=how))
    if not dialect.has_channels:
        own = dialect.reasoning or ReasoningMarks()
        marks = (one for one in (own, *_OTHER_MARKS) if _is_known(one, template, added))
        dialect = replace(dialect, reasoning=next(marks, own if key else None))
    return replace(dialect, reasoning_key=key).of_vocabulary(added)
