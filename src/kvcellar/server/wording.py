"""A conversation in the words of one model: what its chat template knows, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.agents import ModelHost, Turn, n_system_of
from kvcellar.agents.lengths import refuse_bytes, size_of
from kvcellar.dialects import Dialect, dialect_for
from kvcellar.dialects.messages import say_calls, say_reasoning, say_tools, without_tools
from kvcellar.history import History
from kvcellar.server.dialogue import Question
from kvcellar.server.service import Service
from kvcellar.server.thinking import Wish, wish_of


@dataclass(frozen=True, slots=True)
class Wording:
    """Changes that were made to a question to have it in a model's words.

    Attributes:
        dialect: that the model speaks.
        wish: how much it thinks.
        knows_tools: the template tells tools by itself.
        knows_calls: the template writes calls by itself.
        knows_reasoning: the template reads the reasoning of a message apart from its content.
        lent: leading messages that are the named agent's, and not the client's.
    """

    dialect: Dialect
    wish: Wish
    knows_tools: bool
    knows_calls: bool
    knows_reasoning: bool
    lent: list[dict[str, Any]] = field(default_factory=list)

    def of_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Write a message as the template takes it."""
        said = dict(message) if self.knows_calls else say_calls(message, self.dialect)
        marks = self.dialect.reasoning
        return said if self.knows_reasoning or marks is None else say_reasoning(said, marks)


async def word(service: Service, host: ModelHost, question: Question) -> tuple[Turn, Wording]:
    """Put a question into a model's words, in a thread where that is much.

    Returns:
        The turn that it is, of nobody yet: its messages, and the definitions of its tools, None
        where the messages say them or there are none. And what was done.

    Raises:
        ContextError: it is longer than the model's context, as its bytes say.
        ApiError: 400, the model's template takes no such argument.
    """
    dialect = dialect_for(host.tokenizer, service.config.dialect)
    wording = Wording(
        dialect,
        wish_of(question.thinking, host, has_marks=dialect.thinks),
        knows_tools(host),
        knows_calls(host),
        host.template is not None and host.template.reads_reasoning,
        await _lent(service, host, question),
    )
    messages, tools = [*wording.lent, *question.messages], question.tools.given
    size = size_of(messages, tools)
    if host.tokenizer is not None:
        refuse_bytes(host.tokenizer, size.n_bytes, host.context)
    said, told = await service.agents.work.run(size.cost, _worded, messages, tools, wording)
    turn = Turn(
        messages=said,
        tools=told,
        template_kwargs=wording.wish.template_kwargs,
        model=host.name,
        deadline_s=service.config.wait_s,
    )
    return turn, wording


def _worded(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], wording: Wording
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools as a template takes them."""
    plain = [wording.of_message(message) for message in messages]
    listed = [dict(tool) for tool in tools] or None
    if listed and not wording.knows_tools:
        return say_tools(plain, listed, wording.dialect), None
    return plain, listed


async def _lent(service: Service, host: ModelHost, question: Question) -> list[dict[str, Any]]:
    """Return a named agent's system messages, where the request has tools and none of its own.

    A template that knows no tools is told of them in a system message, which would seem to be
    another one than the agent's.
    """
    name, has_own = question.whose.name, bool(n_system_of(question.messages))
    if name is None or has_own or not question.tools.given or knows_tools(host):
        return []
    if not await service.agents.directory.has(name):
        return []
    known = without_tools(service.agents.directory.conversation(name))
    return known[: n_system_of(known)]


def knows_calls(host: ModelHost) -> bool:
    """Return true if a model's template writes calls by itself."""
    return "tool_calls" in _template(host)


def knows_tools(host: ModelHost) -> bool:
    """Return true if a model's template tells tools by itself."""
    return re.search(r"\btools\b", _template(host)) is not None


def _template(host: ModelHost) -> str:
    return str(getattr(host.tokenizer, "chat_template", None) or "")


def opens_reasoning(host: ModelHost, dialect: Dialect, prompt: History, begun: str = "") -> bool:
    """Return true if a prompt ends inside reasoning, whose end comes as text.

    It ends with the mark that opens it, or with an answer that has ``begun`` to reason.
    """
    assert host.tokenizer is not None
    if dialect.reasoning is None:
        return False
    end = host.tokenizer.decode(prompt[-16:].tolist(), skip_special_tokens=False)
    if begun.rfind(dialect.reasoning.begin) > begun.rfind(dialect.reasoning.end):
        return True
    return end.rstrip().endswith(dialect.reasoning.begin.rstrip())
