"""Answers that follow a JSON schema, or call tools as declared. The only user of llguidance.

A grammar says after each token which tokens may come; sampling leaves the others out.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from kvcellar.agents import ModelHost
from kvcellar.errors import PromptError
from kvcellar.server.calls import CALL_BEGIN, CALL_END, THOUGHT_BEGIN, THOUGHT_END, call_head
from kvcellar.server.errors import ApiError
from kvcellar.server.forms import Form
from kvcellar.server.loosening import ANYTHING, loosened

__all__ = ["MOST_CALLS", "Grammars", "GuideFn", "Held", "TokenGuide"]

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it: one way to write a value, so that every answer ends."""

_LIMITS = LLParserLimits(step_lexer_fuel=50_000)
"""So that no token of one answer holds up those of others for more than some 50 ms."""

MOST_CALLS = 8
"""In one answer that has to call."""


class TokenGuide:
    """A grammar's state along one sequence."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: NDArray[np.int64],
        *,
        ends_early: bool = False,
        may_let_go: bool = False,
        troubles: list[str] | None = None,
    ) -> None:
        """At the beginning of the grammar, or where the matcher is.

        Args:
            matcher: the grammar.
            vocab_size: of the model.
            eos_ids: tokens with which an answer ends.
            ends_early: wherever the answer may end, end it unless the model itself wants what else
                is allowed.
            may_let_go: allow everything where the grammar breaks down, instead of failing.
            troubles: where to say that it did; shared with copies.
        """
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._ends_early = ends_early
        self._may_let_go = may_let_go
        self.troubles = [] if troubles is None else troubles
        self._allowed: NDArray[np.bool_] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def end_id(self) -> int | None:
        """The end, where the grammar only offers what the model may not want; else None."""
        is_offer = self._ends_early and self._matcher.is_accepting()
        return int(self._eos_ids[0]) if is_offer else None

    def allowed(self) -> NDArray[np.bool_]:
        """``[vocab]``: which may come next.

        Raises:
            PromptError: the grammar became too large on the way, or the model has no token for what
                has to come, and it must not be let go.
        """
        if self._allowed is None:
            self._allowed = self._asked()
        return self._allowed

    def _asked(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(np.bool_)
            n = min(len(allowed), self._vocab_size)
            mask[:n] = allowed[:n]
        if mask.any() and not self._matcher.is_error():
            return mask
        trouble = (
            _clause(self._matcher.get_error()) or "the model has no token for what has to come"
        )
        if not self._may_let_go:
            raise PromptError(
                f"the answer could not be held to its schema any longer: {trouble}; use "
                f"simpler patterns and lower bounds"
            )
        if not self.troubles:
            self.troubles.append(f"calls were held to no schema from some token on: {trouble}")
        return np.ones(self._vocab_size, dtype=np.bool_)

    def accept(self, token_id: int) -> None:
        """The sequence goes on with a token."""
        self._allowed = None
        if not (self._matcher.is_stopped() or self.troubles):
            self._matcher.consume_token(token_id)

    def fork(self) -> TokenGuide:
        """A copy that goes on by itself."""
        return TokenGuide(
            self._matcher.deep_copy(),
            self._vocab_size,
            self._eos_ids,
            ends_early=self._ends_early,
            may_let_go=self._may_let_go,
            troubles=self.troubles,
        )


GuideFn = Callable[[], TokenGuide]


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to.

    Attributes:
        begin: makes the guide of one answer; None where it is held to nothing.
        begin_in_thought: the same where the prompt ends inside ``<think>``.
        notes: what it is not held to, although the request says so.
    """

    begin: GuideFn | None
    begin_in_thought: GuideFn | None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Arguments:
    """The schema that a tool's arguments are held to, and what that lacks of the tool's own."""

    tool: Mapping[str, Any]
    schema: dict[str, Any]
    losses: list[str] = field(default_factory=list)
    trouble: str = ""
    """Why they are held to no schema."""

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])

    def note(self) -> str | None:
        if self.trouble:
            return (
                f"tool {self.name}: its arguments are held to be an object and to nothing else: "
                f"{self.trouble}"
            )
        if self.losses:
            return f"tool {self.name}: its arguments are not held to {_few(self.losses)}"
        return None


class Grammars:
    """Compiles grammars for the models' tokenizers."""

    def __init__(self) -> None:
        """Nothing compiled yet."""
        self._tokenizers: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def of_schema(
        self, host: ModelHost, schema: Mapping[str, Any], *, is_strict: bool = True
    ) -> Held:
        """Hold answers to be JSON of a schema.

        Args:
            host: the model.
            schema: of JSON.
            is_strict: refuse a keyword that no grammar can hold, instead of going without it.

        Raises:
            ApiError: 400, no grammar can be made of it.
        """
        return await asyncio.to_thread(self._of_schema, host, schema, is_strict)

    def _of_schema(self, host: ModelHost, schema: Mapping[str, Any], is_strict: bool) -> Held:
        held, losses = _answer_schema(schema, is_strict)
        begin = self._compiled(host, f"%llguidance {{}}\nstart: %json {_json(held)}")
        return Held(begin, begin, _lost(losses))

    async def of_form(self, host: ModelHost, form: Form) -> Held:
        """Hold answers to be of a form.

        Raises:
            ApiError: 400, no grammar can be made of it.
        """
        if form.kind == "schema":
            return await self.of_schema(host, form.value, is_strict=form.is_strict)
        return await asyncio.to_thread(self._of_form, host, form)

    def _of_form(self, host: ModelHost, form: Form) -> Held:
        try:
            begin = self._compiled(host, _grammar_of(form))
        except (ApiError, ValueError) as error:
            said = _line(str(error)).removeprefix("no grammar can be made: ")
            raise ApiError(
                400,
                f"no grammar can be made of {form.field}: {said}",
                "invalid_grammar",
                param=form.field,
            ) from error
        return Held(begin, begin)

    async def of_calls(
        self,
        host: ModelHost,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_forced: bool,
        most: int = MOST_CALLS,
        schema: Mapping[str, Any] | None = None,
        is_strict: bool = True,
        strict: Collection[str] = (),
    ) -> Held:
        """Hold the calls in answers to be of these tools, with arguments of their schemas.

        A schema of which no grammar can be made is held as far as one can; the notes say what is
        left out. An answer that has to call ends behind its first call, unless the model begins
        another.

        Args:
            host: the model.
            tools: definitions as OpenAI has them; those that may be called.
            is_forced: nothing but calls; otherwise text in which calls may come.
            most: calls that an answer may have; text that is not forced has one or any number.
            schema: of the JSON that an answer without calls has to be.
            is_strict: as in ``of_schema``.
            strict: names of tools whose schemas are promises.

        Raises:
            ApiError: 400, the only tool that may be called has to be, and no grammar can be made
                of its parameters, or not of all where it is strict.
        """
        return await asyncio.to_thread(
            self._of_calls,
            host,
            tools,
            is_forced=is_forced,
            most=most,
            schema=schema,
            is_strict=is_strict,
            strict=strict,
        )

    def _of_calls(
        self,
        host: ModelHost,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_forced: bool,
        most: int,
        schema: Mapping[str, Any] | None,
        is_strict: bool,
        strict: Collection[str],
    ) -> Held:
        asked = _Asked()
        arguments = [_arguments(tool, asked) for tool in tools]
        if is_forced and len(tools) == 1:
            _check_promise(arguments[0], arguments[0].name in strict)
        json_schema: dict[str, Any] | None = None
        losses: list[str] = []
        if schema is not None and not is_forced:
            json_schema, losses = _answer_schema(schema, is_strict)

        def compiled() -> tuple[GuideFn, GuideFn]:
            lines = _calls(arguments)
            is_free = not is_forced and json_schema is None
            starts = _free(most) if is_free else _forced(most, json_schema)
            first, second = ("\n".join([*start, *lines]) for start in starts)
            how = {"ends_early": is_forced, "may_let_go": is_free}
            begin = self._compiled(host, first, **how)
            if THOUGHT_BEGIN not in str(getattr(host.tokenizer, "chat_template", None)):
                return begin, begin  # no prompt ends in a thought
            return begin, self._compiled(host, second, **how)

        try:
            self._tokenizer(host)
        except ApiError as error:
            if is_forced or schema is not None:
                raise
            return Held(None, None, (f"calls are held to no schema: {error}",))
        try:
            begin, in_thought = compiled()
        except ApiError as error:  # each schema has a grammar, all together have none
            for one in arguments:
                one.schema, one.trouble = dict(ANYTHING), str(error)
            begin, in_thought = compiled()
        notes = [note for note in map(_Arguments.note, arguments) if note is not None]
        return Held(begin, in_thought, (*notes, *_lost(losses)))

    def _compiled(
        self,
        host: ModelHost,
        grammar: str,
        *,
        ends_early: bool = False,
        may_let_go: bool = False,
    ) -> GuideFn:
        """Compile a grammar.

        Raises:
            ApiError: 400, it cannot be.
        """
        tokenizer = self._tokenizer(host)
        first = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if first.is_error():
            raise ApiError(400, f"no grammar can be made: {_line(first.get_error())}")
        vocab_size = host.engine.runner.vocab_size
        eos_ids = np.array(sorted(host.eos_token_ids) or [0], dtype=np.int64)
        return lambda: TokenGuide(
            first.deep_copy(), vocab_size, eos_ids, ends_early=ends_early, may_let_go=may_let_go
        )

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


# Grammars as text: of an answer, and of one that begins inside a thought --------------------------

_HEAD = "%llguidance {}"
_TEXT = [
    "TEXT: /(.|\\n)*/",
    f"begin[lazy]: TEXT {json.dumps(CALL_BEGIN)}",
    f"think[lazy]: TEXT {json.dumps(THOUGHT_BEGIN)}",
    f"thought[lazy]: TEXT {json.dumps(THOUGHT_END)}",
]


def _calls(arguments: Iterable[_Arguments]) -> list[str]:
    """A rule for each tool's call, behind the mark."""
    rules = {}
    for i, one in enumerate(arguments):
        head = call_head(one.name).removeprefix(CALL_BEGIN)
        end = json.dumps("}" + CALL_END)
        rules[f"call_{i}"] = f"{json.dumps(head)} %json {_json(one.schema)} {end}"
    return [f"call: {' | '.join(rules)}", *(f"{name}: {rule}" for name, rule in rules.items())]


def _free(most: int) -> tuple[list[str], list[str]]:
    """Text, thoughts in which nothing is a call, and calls."""
    if most > 1:
        items = ["items: (begin call | think thought)*", "body: items (TEXT | think TEXT)"]
    else:
        items = ["body: (think thought)* (begin call | TEXT | think TEXT)"]
    rules = [*items, *_TEXT]
    return [_HEAD, "start: body", *rules], [_HEAD, "start: thought body | TEXT", *rules]


def _forced(most: int, schema: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """Calls and spaces, or JSON where a schema is given; a thought that was begun may end first."""
    more = f" (space? one){{0,{most - 1}}} space?" if most > 1 else ""
    other = f" | %json {_json(schema)}" if schema is not None else ""
    rules = [
        f"calls: one{more}",
        f"one: {json.dumps(CALL_BEGIN)} call",
        "space: /[ \\n]{1,2}/",
    ]
    start = [_HEAD, f"start: calls{other}", *rules]
    if schema is not None:
        return start, start
    thought = ["start: thought space? calls", "TEXT: /(.|\\n)*/", _TEXT[-1]]
    return start, [_HEAD, *thought, *rules]


# Schemas ------------------------------------------------------------------------------------------


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {**_STYLE, "coerce_one_of": True, "lenient": True}})


_MOST_ASKED = 20_000
"""Keywords of one request that are looked at one by one; it takes seconds."""


class _Asked:
    """What one request has asked about its schemas."""

    def __init__(self) -> None:
        self._n_left = _MOST_ASKED

    def trouble_of(self, schema: Mapping[str, Any]) -> str:
        """Why no grammar can be made of a keyword; nothing where one can."""
        self._n_left -= 1
        return _trouble_of(schema) if self._n_left >= 0 else "the schemas are too large"


def _arguments(tool: Mapping[str, Any], asked: _Asked) -> _Arguments:
    """What a tool's arguments can be held to."""
    own = dict(tool["function"].get("parameters") or {"properties": {}})
    own.setdefault("type", "object")
    held, losses, trouble = _holdable(own, asked)
    if not trouble and held.get("type") != "object":
        types = held.get("type")
        if types is not None and "object" not in types:
            trouble = f"its schema says {json.dumps(types)[:80]} and arguments are an object"
        held["type"] = "object"
        trouble = trouble or _trouble_of(held, is_lenient=True)
    return _Arguments(tool, dict(ANYTHING) if trouble else held, losses, trouble)


def _holdable(schema: Mapping[str, Any], asked: _Asked) -> tuple[dict[str, Any], list[str], str]:
    """What there is a grammar of; what it lacks of the schema; and why there is none at all."""
    try:
        if not _trouble_of(schema):
            return dict(schema), [], ""
        held, losses = loosened(schema, asked.trouble_of)
        return held, losses, _trouble_of(held, is_lenient=True)
    except RecursionError:
        return dict(ANYTHING), [], "its schema is nested too deeply"


def _trouble_of(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Why no grammar can be made of a schema; nothing where one can."""
    text = _json(schema) if is_lenient else json.dumps({**schema, "x-guidance": _STYLE})
    said = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    return "" if said.startswith("WARNING") else _line(said)


def _answer_schema(schema: Mapping[str, Any], is_strict: bool) -> tuple[dict[str, Any], list[str]]:
    """What an answer is held to, and what is left out of its schema.

    Raises:
        ApiError: 400, something is although it must not, or there is no grammar.
    """
    held, losses, trouble = _holdable(schema, _Asked())
    if trouble or (losses and is_strict):
        what = f" of {_few(losses)}" if losses else f": {trouble}"
        raise ApiError(
            400,
            f"no grammar can be made of response_format{what}, so an answer cannot be held to it; "
            f'leave it out, or say "strict": false to go without it',
            "invalid_schema",
            param="response_format",
        )
    return held, losses


def _check_promise(one: _Arguments, is_strict: bool) -> None:
    """Refuse a call that has to come and has to be right, and cannot be held to be.

    Raises:
        ApiError: 400, so it is.
    """
    if one.trouble:
        what = f" of {_few(one.losses)}" if one.losses else f": {one.trouble}"
    elif one.losses and is_strict:
        what = f" of {_few(one.losses)}, and the tool is strict"
    else:
        return
    raise ApiError(
        400,
        f"tool_choice wants a call of {one.name!r}, and no grammar can be made{what}; leave that "
        f"out of its parameters, or let the model choose",
        "invalid_schema",
        param="tools",
    )


def _grammar_of(form: Form) -> str:
    """A form that is no schema, as llguidance has it.

    Raises:
        ValueError: it is none.
    """
    if form.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(form.value)
    elif form.kind == "choice":
        if not form.value:
            raise ValueError("there is nothing to choose from")
        grammar = LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text) for text in form.value)
        )
    else:
        try:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(form.value))
        except Exception as error:  # a parser of others', with errors of its own
            raise ValueError(f"it is neither Lark nor GBNF: {error}") from error
    return str(grammar)


def _lost(losses: Sequence[str]) -> tuple[str, ...]:
    return (f"the answer is not held to {_few(losses)} of its schema",) if losses else ()


def _few(places: Sequence[str]) -> str:
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(place[:120] for place in places[:5]) + more


def _clause(text: str) -> str:
    """Take the first clause of an error of the library's; its parser's state follows."""
    return re.split(r"[(;\[{<]|, ", _line(text))[0].strip()[:160]


def _line(text: str) -> str:
    """An error of the library's in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^\t")]
    return " ".join(lines)[:300]
