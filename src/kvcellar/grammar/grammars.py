"""Grammars of answers that follow a JSON schema, or call tools as declared.

A grammar says after each token which tokens may come; sampling leaves the others out.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kvcellar.dialects import Dialect, dialect_for
from kvcellar.dialects.held import HeldArguments, few
from kvcellar.dialects.lark import call_grammars, schema_grammar
from kvcellar.errors import GrammarError
from kvcellar.grammar.form import ResponseFormat
from kvcellar.grammar.guidance import guidance_tokenizer
from kvcellar.grammar.guide import GuideFn, TokenGuide, one_line
from kvcellar.grammar.schema_relax import ANYTHING
from kvcellar.grammar.schema_support import (
    KeywordChecks,
    answer_schema,
    check_promise,
    held_arguments,
)
from kvcellar.hosting.host import ModelHost

_LIMITS = LLParserLimits(step_lexer_fuel=50_000)
"""So that no token of one answer holds up those of others for more than some 50 ms."""

MOST_KNOWN = 16
"""Constraints of a model that are kept: every turn of an agent has the same tools."""

MOST_CALLS = 8
"""In one answer that has to call."""


class NoGrammarError(Exception):
    """No grammar can be made of something; the message says why, and nothing else."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that answers are held to, if any.

    Attributes:
        begin: makes the guide of one answer; None where it is held to nothing.
        begin_in_thought: the same where the prompt ends inside ``<think>``.
        notes: what it is not held to, although the request says so.
    """

    begin: GuideFn | None
    begin_in_thought: GuideFn | None
    notes: tuple[str, ...] = ()


class Grammars:
    """Compiles grammars for the models' tokenizers."""

    def __init__(self, dialect: str | None = None) -> None:
        """Create a compiler that has compiled nothing; ``dialect`` as ``dialect_for`` has it."""
        self._dialect = dialect
        self._tokenizers: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._of_turns: WeakKeyDictionary[Any, OrderedDict[Any, Constraint]] = WeakKeyDictionary()

    async def of_schema(
        self, host: ModelHost, schema: Mapping[str, Any], *, is_strict: bool = True
    ) -> Constraint:
        """Hold answers to be JSON of a schema.

        Args:
            host: the model.
            schema: of JSON.
            is_strict: refuse a keyword that no grammar can hold, instead of going without it.

        Raises:
            GrammarError: no grammar can be made of it.
        """
        return await asyncio.to_thread(self._of_schema, host, schema, is_strict)

    def _of_schema(self, host: ModelHost, schema: Mapping[str, Any], is_strict: bool) -> Constraint:
        held, losses = answer_schema(schema, is_strict)
        try:
            begin = self._compiled(host, schema_grammar(self._dialect_of(host), held))
        except NoGrammarError as error:
            raise GrammarError(
                f"no grammar can be made: {error}", param="response_format"
            ) from error
        return Constraint(begin, begin, _lost(losses))

    async def of_form(self, host: ModelHost, form: ResponseFormat) -> Constraint:
        """Hold answers to be of a form.

        Raises:
            GrammarError: no grammar can be made of it.
        """
        if form.kind == "schema":
            return await self.of_schema(host, form.value, is_strict=form.is_strict)
        return await asyncio.to_thread(self._of_form, host, form)

    def _of_form(self, host: ModelHost, form: ResponseFormat) -> Constraint:
        try:
            begin = self._compiled(host, _grammar_of(form))
        except (GrammarError, NoGrammarError) as error:
            raise GrammarError(
                f"no grammar can be made of {form.field}: {one_line(str(error))}",
                "invalid_grammar",
                param=form.field,
            ) from error
        return Constraint(begin, begin)

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
    ) -> Constraint:
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
            GrammarError: the only tool that may be called has to be, and no grammar can be made
                of its parameters, or not of all where it is strict.
        """
        how = {"is_forced": is_forced, "most": most, "schema": schema, "is_strict": is_strict}
        key = self._dialect_of(host), json.dumps([tools, how, sorted(strict)])
        known = self._of_turns.setdefault(host.engine, OrderedDict())
        found = known.get(key)
        if found is None:
            found = await asyncio.to_thread(
                self._of_calls,
                host,
                tools,
                is_forced=is_forced,
                most=most,
                schema=schema,
                is_strict=is_strict,
                strict=strict,
            )
        known[key] = found
        known.move_to_end(key)
        if len(known) > MOST_KNOWN:
            known.popitem(last=False)
        return found

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
    ) -> Constraint:
        asked = KeywordChecks()
        arguments = [held_arguments(tool, asked) for tool in tools]
        if is_forced and len(tools) == 1:
            check_promise(arguments[0], arguments[0].name in strict)
        json_schema: dict[str, Any] | None = None
        losses: list[str] = []
        if schema is not None and not is_forced:
            json_schema, losses = answer_schema(schema, is_strict)

        dialect = self._dialect_of(host)

        def compiled() -> tuple[GuideFn, GuideFn]:
            first, second = call_grammars(
                dialect, arguments, is_forced=is_forced, most=most, schema=json_schema
            )
            is_free = not is_forced and json_schema is None
            how = {"ends_early": is_forced, "may_let_go": is_free}
            begin = self._compiled(host, first, **how)
            return begin, begin if second == first else self._compiled(host, second, **how)

        try:
            self._tokenizer(host)
        except GrammarError as error:
            if is_forced or schema is not None:
                raise
            return Constraint(None, None, (f"calls are held to no schema: {error}",))
        try:
            begin, in_thought = compiled()
        except NoGrammarError as error:  # each schema has a grammar, all together have none
            for one in arguments:
                one.schema, one.trouble = dict(ANYTHING), f"no grammar can be made: {error}"
            begin, in_thought = compiled()
        notes = [note for note in map(HeldArguments.note, arguments) if note is not None]
        return Constraint(begin, in_thought, (*notes, *_lost(losses)))

    def _dialect_of(self, host: ModelHost) -> Dialect:
        return dialect_for(host.tokenizer, self._dialect)

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
            NoGrammarError: it cannot be.
            GrammarError: answers of this model cannot be held to any.
        """
        tokenizer = self._tokenizer(host)
        first = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if first.is_error():
            raise NoGrammarError(one_line(first.get_error()))
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
                    found = guidance_tokenizer(
                        host.tokenizer,
                        host.engine.runner.vocab_size,
                        sorted(host.eos_token_ids) or None,
                        [one.content for one in self._dialect_of(host).tokens],
                    )
                except ValueError as error:
                    raise GrammarError(
                        f"answers of {host.name!r} cannot be held to a grammar: {error}",
                        "no_grammar",
                    ) from error
                self._tokenizers[host.engine] = found
            return found


# Forms that are no schema -------------------------------------------------------------------------


def _grammar_of(form: ResponseFormat) -> str:
    """Write a form that is no schema, as llguidance has it.

    Raises:
        NoGrammarError: it is none.
    """
    if form.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(form.value)
    elif form.kind == "choice":
        if not form.value:
            raise NoGrammarError("there is nothing to choose from")
        grammar = LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text) for text in form.value)
        )
    else:
        try:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(form.value))
        except Exception as error:  # a parser of others', with errors of its own
            raise NoGrammarError(f"it is neither Lark nor GBNF: {error}") from error
    return str(grammar)


def _lost(losses: Sequence[str]) -> tuple[str, ...]:
    return (f"the answer is not held to {few(losses)} of its schema",) if losses else ()
