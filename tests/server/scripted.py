"""A model that says what a script has, over cells that show it the conversation so far.

It reads its turn from the history that the cache shows it: a wrong cell, and it says no such thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcellar.agents import ModelHost
from tests.agents.fakes import make_host
from tests.engine.fakes import FULL_PARAMS, HashRunner
from tests.models.test_prompts import byte_level, plain, special, wrapped

OPENING = "<|im_start|>assistant\n"

QWEN = """\
{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{%- if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}\
{{- '<|im_end|>\n' }}{% endif %}\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' and m.reasoning_content is string \
and (preserve_thinking is defined and preserve_thinking or loop.index0 > ns.last) %}\
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}\
{{- m.content }}\
{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}\
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}\
{{- c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{%- if enable_thinking is defined and enable_thinking is false %}\
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
"""Built as Qwen3's: thoughts are dropped when the user speaks again, unless they are preserved."""


def chat_tokenizer(template: str = QWEN, *, has_tags: bool = True) -> Any:
    """A tokenizer whose vocabulary has the marks of calls and thoughts, or spells them."""
    tokens = [special(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>") if has_tags else ()
    return wrapped(byte_level(), template, [*tokens, *map(plain, tags)], eos_token="<|im_end|>")


class Scripted(HashRunner):
    """Says in its n-th answer what the script has at n; whatever is forced on it comes in between.

    What stands behind a thought follows also where the thought was ended early.
    """

    def __init__(self, cache: Any, tokenizer: Any, script: Callable[[int], str]) -> None:
        super().__init__(cache, len(tokenizer))
        self.tokenizer = tokenizer
        self.script = script
        self.opening = as_bytes(self.ids_of(OPENING))
        self.end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def logits_behind(self, seen: Sequence[tuple[Any, ...]]) -> np.ndarray:
        history = as_bytes(seen[0])
        n_answers, begun = history.count(self.opening), history.rfind(self.opening)
        said = list(seen[0])[(begun + len(self.opening)) // 4 :]
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[self._next(self.script(n_answers - 1), said) if n_answers else self.end] = 1e4
        return logits

    def _next(self, text: str, said: list[int]) -> int:
        ids = self.ids_of(text)
        if ids[: len(said)] != said:
            behind = self.tokenizer.decode(said).partition("</think>")[2]
            ids, said = self.ids_of(text.partition("</think>")[2][len(behind) :]), []
        return [*ids[len(said) :], self.end][0]


def as_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def scripted_host(
    script: Callable[[int], str],
    *,
    template: str = QWEN,
    has_tags: bool = True,
    params: Any = FULL_PARAMS,
    capacity: int = 16384,
) -> ModelHost:
    tokenizer = chat_tokenizer(template, has_tags=has_tags)
    host = make_host(
        "scripted",
        capacity=capacity,
        params=params,
        tokenizer=tokenizer,
        runner=lambda cache, _: Scripted(cache, tokenizer, script),
        eos_token_ids=(tokenizer.convert_tokens_to_ids("<|im_end|>"),),
    )
    host.engine.runner.bias = {}
    return host
