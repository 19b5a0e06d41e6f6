"""A conversation in the words of one model: what its chat template knows, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcellar.agents import ModelHost, RuleChange, Turn, in_order, n_system_of
from kvcellar.agents.text.reading import Reading, knows_calls, knows_tools
from kvcellar.dialects import dialect_for
from kvcellar.dialects.messages import say_tools, without_tools
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.text_limits import refuse_bytes, size_of
from kvcellar.models.text.prompts import begun_of
from kvcellar.server.answer.dialogue import Question
from kvcellar.server.answer.thinking import Wish, wish_of
from kvcellar.server.answer.tools import chosen, with_plain_names
from kvcellar.server.state.service import Service


@dataclass(frozen=True, slots=True)
class Wording:
    """Changes that were made to a question to have it in a model's words.

    Attributes:
        reading: how the answer is read, and messages are written for the template.
        wish: how much it thinks.
        knows_tools: the template tells tools by itself.
        lent: leading messages that are the named agent's, and not the client's.
        rules: changes that a rule made before the messages were written.
    """

    reading: Reading
    wish: Wish
    knows_tools: bool
    lent: list[dict[str, Any]] = field(default_factory=list)
    rules: list[RuleChange] = field(default_factory=list)


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
    reads_calls = bool(chosen(question.tools, question.choice))
    reading = Reading(
        dialect,
        knows_calls(host),
        host.template is not None and host.template.reads_reasoning,
        question.tools.functions,
        reads_calls,
        is_forced=reads_calls and question.choice.mode == "required",
        # a form alone has reasoning only where the prompt opens it; calls may have it before
        reads_thoughts=question.form is None or reads_calls,
        begun=question.messages[-1] if begun_of(question.messages) is not None else None,
    )
    wording = Wording(
        reading,
        wish_of(question.thinking, host, has_marks=dialect.thinks),
        knows_tools(host),
        await _lent(service, host, question),
    )
    messages, tools = [*wording.lent, *question.messages], question.tools.given
    size = size_of(messages, tools)
    if host.tokenizer is not None:
        refuse_bytes(host.tokenizer, size.n_bytes, host.context)
    if tools and not wording.knows_tools:  # in a message, where no rule finds them
        tools, moved = in_order(tools, service.config.rules)
        wording.rules.extend(moved)
    said, told = await service.agents.work.run(size.cost, _worded, messages, tools, wording)
    turn = Turn(
        messages=said,
        tools=told,
        template_kwargs=wording.wish.template_kwargs,
        model=host.name,
        deadline_s=service.config.wait_s,
        reading=reading,
    )
    return turn, wording


def _worded(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], wording: Wording
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Return messages and tools as a template takes them."""
    plain = [wording.reading.of_message(with_plain_names(message)) for message in messages]
    listed = [dict(tool) for tool in tools] or None
    if listed and not wording.knows_tools:
        return Messages(say_tools(plain, listed, wording.reading.dialect)), None
    return Messages(plain), listed


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
