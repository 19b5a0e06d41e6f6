"""Answers that follow a JSON schema, or call tools as declared. The only user of llguidance.

A grammar says after each token which tokens may come; sampling leaves the others out.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from kvcellar.agents import ModelHost
from kvcellar.server.calls import CALL_BEGIN, CALL_END, call_head
from kvcellar.server.errors import ApiError

__all__ = ["Grammars", "GuideFn", "TokenGuide"]

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it: one way to write a value, so that every answer ends."""

MOST_CALLS = 8
"""In one answer that has to call."""


class TokenGuide:
    """A grammar's state along one sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: NDArray[np.int64]) -> None:
        """At the beginning of the grammar, or where the matcher is."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._allowed: NDArray[np.bool_] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """``[vocab]``: which may come next; the end alone where the grammar is at a loss."""
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
            mask = np.zeros(self._vocab_size, dtype=np.bool_)
            n = min(len(allowed), self._vocab_size)
            mask[:n] = allowed[:n]
            if not mask.any():
                mask[self._eos_ids] = True
            self._allowed = mask
        return self._allowed

    def accept(self, token_id: int) -> None:
        """The sequence goes on with a token."""
        self._allowed = None
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def fork(self) -> TokenGuide:
        """A copy that goes on by itself."""
        return TokenGuide(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)


GuideFn = Callable[[], TokenGuide]


class Grammars:
    """Compiles grammars for the models' tokenizers."""

    def __init__(self) -> None:
        """Nothing compiled yet."""
        self._tokenizers: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def of_schema(self, host: ModelHost, schema: Mapping[str, Any]) -> GuideFn:
        """Answers that are JSON of this schema.

        Raises:
            ApiError: 400, no grammar can be made of it.
        """
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults=_STYLE)  # type: ignore[arg-type]
        return await asyncio.to_thread(self._compiled, host, grammar, "response_format")

    async def of_calls(
        self,
        host: ModelHost,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_forced: bool,
        most: int = MOST_CALLS,
    ) -> GuideFn:
        """Answers whose calls are of these tools, with arguments of their schemas.

        Args:
            host: the model.
            tools: definitions as OpenAI has them; those that may be called.
            is_forced: nothing but calls; otherwise text in which calls may come.
            most: calls that a forced answer may have.

        Raises:
            ApiError: 400, no grammar can be made of a tool's parameters.
        """
        grammar = _forced(tools, most) if is_forced else _free(tools)
        return await asyncio.to_thread(self._compiled, host, grammar, "tools")

    def _compiled(self, host: ModelHost, grammar: str, param: str) -> GuideFn:
        tokenizer = self._tokenizer(host)
        trouble = LLMatcher.validate_grammar(grammar, tokenizer)
        if trouble and not trouble.startswith("WARNING"):
            raise ApiError(
                400,
                f"no grammar can be made of {param}: {trouble.strip().splitlines()[0][:300]}; "
                f"use types, enums, ranges and lengths of JSON schema",
                "invalid_schema",
                param=param,
            )
        first = LLMatcher(tokenizer, grammar, log_level=0)
        vocab_size = host.engine.runner.vocab_size
        eos_ids = np.array(sorted(host.eos_token_ids) or [0], dtype=np.int64)
        return lambda: TokenGuide(first.deep_copy(), vocab_size, eos_ids)

    def _tokenizer(self, host: ModelHost) -> LLTokenizer:
        with self._lock:
            found = self._tokenizers.get(host.engine)
            if found is None:
                try:
                    found = from_tokenizer(
                        host.tokenizer,  # type: ignore[arg-type]
                        n_vocab=host.engine.runner.vocab_size,
                        eos_token=sorted(host.eos_token_ids) or None,
                    )
                except ValueError as error:
                    raise ApiError(
                        400,
                        f"answers of {host.name!r} cannot be held to a grammar: {error}",
                        "no_grammar",
                    ) from error
                self._tokenizers[host.engine] = found
            return found


def _free(tools: Sequence[Mapping[str, Any]]) -> str:
    tags = [
        StructTag(
            trigger=CALL_BEGIN,
            begin=call_head(tool["function"]["name"]),
            grammar=_parameters(tool),
            end=f"}}{CALL_END}",
        )
        for tool in tools
    ]
    return StructTag.to_grammar(tags, assume_special=False)


def _forced(tools: Sequence[Mapping[str, Any]], most: int) -> str:
    names = [f"call_{i}" for i in range(len(tools))]
    rules = [
        f"{name}: {json.dumps(call_head(tool['function']['name']))} "
        f"%json {json.dumps(_parameters(tool))} {json.dumps('}' + CALL_END)}"
        for name, tool in zip(names, tools, strict=True)
    ]
    more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
    return "\n".join(["%llguidance {}", f"start: call{more}", f"call: {' | '.join(names)}", *rules])


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})
    schema.setdefault("type", "object")
    return {**schema, "x-guidance": _STYLE}
