"""Answers of turns, read in their model's dialect: thoughts, text and calls apart."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvcellar.agents.text.stops import TextStops
from kvcellar.dialects import AnswerParser, Dialect, choose_dialect, dialect_for, is_whole
from kvcellar.dialects.messages import (
    apart,
    as_message,
    say_calls,
    say_reasoning,
    say_tools,
    tools_said,
    without_tools,
)
from kvcellar.engine.loop.text import StopFinder
from kvcellar.history import History
from kvcellar.hosting.messages import Message
from kvcellar.models.text.prompts import begun_of
from kvcellar.models.text.templates import text_of_templates
from kvcellar.pictures.tokens import ids_of

if TYPE_CHECKING:
    from kvcellar.agents.records.agent import AgentRecord
    from kvcellar.hosting.conversation import AgentTokenizer
    from kvcellar.hosting.host import ModelHost


@dataclass(slots=True, eq=False)
class Reading:
    """Way in which the answer of one turn is read, and what is kept of it. For one turn.

    Attributes:
        dialect: that the model speaks.
        knows_calls: the template writes calls by itself.
        knows_reasoning: the template reads the reasoning of a message apart from its content.
        tools: definitions of what may be called, which say what is a string.
        reads_calls: look for calls; else they are text.
        is_forced: there is nothing but calls.
        reads_thoughts: look for thoughts also where the prompt opens none.
        begun: the message with which the answer has begun; None: it begins anew.
        keeps_cut: keep an answer that was cut inside of a thought or a call as it was said, so that
            it can be gone on with there. Whoever sends back what he was told cannot have that.
        is_in_reasoning: whether the prompt ends inside a thought.
    """

    dialect: Dialect
    knows_calls: bool
    knows_reasoning: bool
    tools: Sequence[Mapping[str, Any]] = ()
    reads_calls: bool = False
    is_forced: bool = False
    reads_thoughts: bool = True
    begun: Mapping[str, Any] | None = None
    keeps_cut: bool = False
    is_in_reasoning: bool = field(init=False, default=False)
    _own: Dialect = field(init=False)
    _call_ids: str = field(init=False)

    def __post_init__(self) -> None:
        self._call_ids = f"c{uuid.uuid4().hex[:7]}"  # with a number 9 characters, as Mistral wants
        self._own = self.dialect
        if not self.reads_thoughts:
            self.dialect = replace(self.dialect, reasoning=None)

    @property
    def marks(self) -> Mapping[int, str]:
        """Characters that stand in the text for tokens of marks, as ``Request`` has them."""
        return self.dialect.marks()

    def begin(self, tokenizer: AgentTokenizer, prompt: History) -> None:
        """Stand behind a prompt."""
        self.is_in_reasoning = opens_reasoning(tokenizer, self._own, prompt, self._begun_text)
        if self.is_in_reasoning:
            self.dialect = self._own

    def parser(self) -> AnswerParser:
        """Create a parser of what comes behind the prompt."""
        begun = self._begun_text
        if begun and self.keeps_cut:
            whole = self._parser(has_begun=False, is_in_reasoning=False)
            whole.push(self.dialect.spelt(begun))
            if _is_cut(whole):
                return whole
        return self._parser(has_begun=bool(begun), is_in_reasoning=self.is_in_reasoning)

    def finder(self, stops: Sequence[str]) -> StopFinder:
        """Make what finds stop texts in the text of the answer, and in nothing else of it."""
        return TextStops(self.parser(), stops)

    def kept(self, text: str) -> Message:
        """Make the message that joins the history, from all of an answer's text.

        It is what a client sends back that was told the parts, written as the template takes it.
        With how the answer was begun, as ``begun`` has it.
        """
        begun = self._begun_text
        if self.keeps_cut and text.startswith(begun):  # a history has marks as they are spelt
            text = self.dialect.spelt(begun) + text[len(begun) :]
        is_in_reasoning = self.is_in_reasoning and not begun
        parser = self._parser(has_begun=False, is_in_reasoning=is_in_reasoning)
        parser.push(text)
        parser.flush()
        if self.keeps_cut and _is_cut(parser):
            marks = self.dialect.reasoning
            opened = f"{marks.begin}\n" if is_in_reasoning and marks is not None else ""
            return as_message(opened + self.dialect.written(text), ())
        if parser.trouble:  # nobody was told of such a call
            return as_message(self.dialect.written(text, is_shown=True), ())
        message = as_message(parser.text, parser.calls, parser.reasoning)
        before = (self.begun or {}).get("reasoning_content")
        if before and "reasoning_content" not in message:
            message["reasoning_content"] = before
        return self.of_message(message)

    def of_message(self, message: Mapping[str, Any]) -> Message:
        """Write a message as the template takes it."""
        said = dict(message) if self.knows_calls else say_calls(message, self._own)
        marks = self._own.reasoning
        return said if self.knows_reasoning or marks is None else say_reasoning(said, marks)

    @property
    def _begun_text(self) -> str:
        return (begun_of([self.begun]) or "") if self.begun is not None else ""

    def _parser(self, *, has_begun: bool, is_in_reasoning: bool) -> AnswerParser:
        return AnswerParser(
            self.dialect,
            self._call_ids,
            is_in_reasoning,
            self.reads_calls,
            self.is_forced,
            self.tools,
            has_begun,
        )


def _is_cut(parser: AnswerParser) -> bool:
    """Return true if an answer so far ends inside of a thought or a call."""
    return parser.is_in_reasoning or bool(parser.calls and not is_whole(parser.calls[-1]))


def reading_of(
    host: ModelHost,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    dialect: str | None = None,
    begun: Mapping[str, Any] | None = None,
    has_marks: bool = True,
) -> Reading:
    """Return how an agent's next answer is read, whose history nobody sends back.

    Args:
        host: its model.
        messages: its conversation.
        tools: definitions of its tools; those that a system message tells are known without.
        dialect: name of a dialect, where somebody has chosen one.
        begun: the message that is gone on with.
        has_marks: whether ``marks`` are in the text that is read; else they are as they are spelt.
    """
    tools = tools or tools_said(messages)
    own = dialect_for(host.tokenizer, dialect)
    return Reading(
        own if has_marks else replace(own, tokens=()),
        knows_calls(host),
        host.template is not None and host.template.reads_reasoning,
        tools,
        reads_calls=bool(tools),
        begun=begun,
        keeps_cut=True,
    )


def worded(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    reading: Reading,
    host: ModelHost,
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Return a conversation, and definitions of its tools, as a model's template takes them.

    Args:
        messages: the conversation; a system message may tell tools already.
        tools: None: as before.
        reading: how its answers are read, and its messages written.
        host: the model.
    """
    plain = [reading.of_message(message) for message in messages]
    if tools is None or knows_tools(host):
        return plain, tools
    plain = without_tools(plain)
    return (say_tools(plain, tools, reading.dialect) if tools else plain), []


def conversation_apart(
    agent: AgentRecord, host: ModelHost | None, dialect: str | None = None
) -> list[Message]:
    """Return an agent's conversation with thoughts and calls of its answers apart from their text.

    Args:
        agent: whose answers may be kept as they were said, marks and all.
        host: its model; None: it is not in memory, and the dialect is the one that its answers
            show.
        dialect: name of a dialect, where somebody has chosen one.
    """
    if host is not None:
        own = dialect_for(host.tokenizer, dialect)
    else:
        said = (one.get("content") for one in agent.messages if one.get("role") == "assistant")
        own = choose_dialect("\n".join(text for text in said if isinstance(text, str)), {}, dialect)
    return apart(agent.messages, own, agent.tools)


def knows_calls(host: ModelHost) -> bool:
    """Return true if a model's template writes calls by itself."""
    return "tool_calls" in _template(host)


def knows_tools(host: ModelHost) -> bool:
    """Return true if a model's template tells tools by itself."""
    return re.search(r"\btools\b", _template(host)) is not None


def _template(host: ModelHost) -> str:
    return text_of_templates(host.tokenizer)


def opens_reasoning(
    tokenizer: AgentTokenizer, dialect: Dialect, prompt: History, begun: str = ""
) -> bool:
    """Return true if a prompt ends inside reasoning, whose end comes as text.

    It ends with the mark that opens it, or with an answer that has ``begun`` to reason.
    """
    if dialect.reasoning is None:
        return False
    end = tokenizer.decode(ids_of(prompt[-16:]).tolist(), skip_special_tokens=False)
    if begun.rfind(dialect.reasoning.begin) > begun.rfind(dialect.reasoning.end):
        return True
    return end.rstrip().endswith(dialect.reasoning.begin.rstrip())
