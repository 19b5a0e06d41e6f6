"""From a conversation to tokens: what an agent has said stays the tokens that it sampled.

A client sends the conversation back as text. Messages that are known are matched one by one, and
their tokens are taken from the history; only what is new is rendered and encoded. So nothing that a
template does to old turns (an extra newline, dropped thoughts, re-ordered JSON) costs the cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcellar.agents.volatile import canonical_tools, clean_message, match_key
from kvcellar.errors import ModelError, PromptError

__all__ = [
    "AgentTokenizer",
    "Message",
    "Spoken",
    "TemplateReport",
    "check_template",
    "plan_messages",
]

Message = dict[str, Any]

_MARK = "kvcellar-answer"


class AgentTokenizer(Protocol):
    """What agents need of a tokenizer; those of transformers have it."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """The messages as the text that the model was trained on."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Spoken:
    """A conversation as tokens.

    Attributes:
        tokens: all of them, ready to be continued.
        n_kept: leading tokens that are the history's own.
        messages: the conversation, with the agent's own words for what it knew already.
        stops: per message, the tokens up to its end, for answers that were sampled; else None.
        n_known: leading messages that were known.
        tools: the definitions that were rendered.
        changed: ``system``, ``tools``, ``truncated``, ``edited`` or ``template``: what kept the
            history from being continued; None where it is.
        rules: names of the rules that changed something.
    """

    tokens: list[int]
    n_kept: int
    messages: list[Message]
    stops: list[int | None]
    n_known: int
    tools: list[dict[str, Any]] | None
    changed: str | None
    rules: tuple[str, ...]


def plan_messages(
    tokenizer: AgentTokenizer,
    history: Sequence[int],
    known: Sequence[Message],
    stops: Sequence[int | None],
    known_tools: list[dict[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    rules: Collection[str],
    eos_token_ids: Collection[int],
) -> Spoken:
    """The tokens of a whole conversation, on as much of a history as it continues.

    Args:
        tokenizer: of the model.
        history: the agent's tokens.
        known: its messages.
        stops: per known message, the tokens up to its end, for sampled answers.
        known_tools: the tool definitions that the history began with.
        messages: the whole conversation, oldest first; the last is not an answer.
        tools: definitions of tools, as the template takes them.
        rules: names of rules for volatile text; see ``volatile.RULES``.
        eos_token_ids: tokens with which the model ends an answer.

    Raises:
        PromptError: no message, or the last is the assistant's.
        ModelError: the template refuses the messages, or there is none.
    """
    if not messages or messages[-1].get("role") == "assistant":
        raise PromptError(
            "a turn needs a message to answer; end the conversation with the user's or a tool's"
        )
    cleaned = [clean_message(message, rules) for message in messages]
    wanted_tools = canonical_tools(tools, rules)
    used = _rules_used(messages, cleaned, tools, wanted_tools, known, rules)
    n_known = 0
    has_same_tools = not known or wanted_tools == known_tools
    if has_same_tools:
        for mine, theirs in zip(known, cleaned[:-1], strict=False):
            if match_key(mine, rules) != match_key(theirs, rules):
                break
            n_known += 1
    whole = [*map(dict, known[:n_known]), *cleaned[n_known:]]
    changed = _what_changed(known, cleaned, n_known, rules) if has_same_tools else "tools"
    answered = [i for i in range(n_known) if stops[i] is not None]
    if answered:
        last = answered[-1]
        stop = stops[last]
        assert stop is not None
        kept = list(history[:stop])
        tail = _after_answer(tokenizer, whole, last, wanted_tools)
        if tail is not None:
            kept, new = _joined(tokenizer, kept, tail, eos_token_ids)
            n_kept = len(kept)
            kept_stops = [*stops[: last + 1], *[None] * (len(whole) - last - 1)]
            return Spoken(
                [*kept, *new], n_kept, whole, kept_stops, n_known, wanted_tools, changed, used
            )
        changed = "template"
    tokens = encode(tokenizer, render(tokenizer, whole, wanted_tools))
    nothing: list[int | None] = [None] * len(whole)
    return Spoken(tokens, 0, whole, nothing, n_known, wanted_tools, changed, used)


def _rules_used(
    raw: Sequence[Mapping[str, Any]],
    cleaned: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    ordered: list[dict[str, Any]] | None,
    known: Sequence[Message],
    rules: Collection[str],
) -> tuple[str, ...]:
    found = []
    if any(dict(a) != b for a, b in zip(raw, cleaned, strict=True)):
        found.append("header")
    if known and cleaned[0].get("role") == "system" == known[0].get("role"):
        with_date = match_key(known[0], rules) == match_key(cleaned[0], rules)
        others = [rule for rule in rules if rule != "date"]
        if with_date and match_key(known[0], others) != match_key(cleaned[0], others):
            found.append("date")
    if tools and ordered is not None and [dict(tool) for tool in tools] != ordered:
        found.append("tool-order")
    return tuple(found)


def _what_changed(
    known: Sequence[Message], new: Sequence[Message], n_known: int, rules: Collection[str]
) -> str | None:
    if n_known == len(known):
        return None
    if n_known < len(new) and known[n_known].get("role") == "system":
        return "system"
    if len(new) <= len(known) and n_known >= len(new) - 1:
        return "truncated"
    here = match_key(new[n_known], rules)
    if any(match_key(message, rules) == here for message in known[n_known + 1 :]):
        return "truncated"  # what stood here is gone, and what follows it moved up
    return "edited"


def _after_answer(
    tokenizer: AgentTokenizer,
    messages: Sequence[Message],
    last: int,
    tools: list[dict[str, Any]] | None,
) -> str | None:
    """What the template writes behind the answer ``last``; None where it leaves answers out."""
    mark = _MARK
    while any(mark in str(message.get("content")) for message in messages):
        mark += "x"
    marked = [*messages[:last], {"role": "assistant", "content": mark}, *messages[last + 1 :]]
    _, found, rest = render(tokenizer, marked, tools).rpartition(mark)
    return rest if found else None


def _joined(
    tokenizer: AgentTokenizer, kept: list[int], rest: str, eos_token_ids: Collection[int]
) -> tuple[list[int], list[int]]:
    """The history and what follows it, with one end of the answer between them."""
    new = encode(tokenizer, rest)
    end = kept[-1] if kept else None
    if end is None or end not in eos_token_ids:
        return kept, new
    if end in new and not tokenizer.decode(new[: new.index(end)]).strip():
        return kept, new[new.index(end) + 1 :]
    return kept[:-1], new  # the template closes an answer with another token


def render(
    tokenizer: AgentTokenizer,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    is_asking: bool = True,
) -> str:
    """The messages as the text that the model was trained on.

    Raises:
        ModelError: there is no chat template, or it refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "the model has no chat template, so it is no chat model; give tokens, or load a model "
            "that is tuned for chat"
        )
    more: dict[str, Any] = {} if tools is None else {"tools": tools}
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=is_asking, tokenize=False, **more
            )
        )
    except Exception as error:  # templates raise errors of jinja's
        raise ModelError(f"the model's chat template refuses these messages: {error}") from error


def encode(tokenizer: AgentTokenizer, text: str) -> list[int]:
    """The tokens of a rendered text, which has its special tokens already."""
    return [int(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]


# Templates ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Whether a chat template leaves old turns as they were.

    Attributes:
        findings: what it changes, in words, with both texts; empty where it changes nothing.
    """

    findings: tuple[str, ...]

    @property
    def is_prefix_stable(self) -> bool:
        """Whether a conversation that goes on begins with the same text."""
        return not self.findings


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


def check_template(tokenizer: AgentTokenizer) -> TemplateReport:
    """Render a few conversations turn by turn and say where an earlier turn comes out differently.

    Agents do not depend on it, since sampled tokens stay the history. Clients that count on a
    prefix cache elsewhere do, and so does a history that was not sampled here.
    """
    user = {"role": "user", "content": "One?"}
    more = {"role": "user", "content": "Two?"}
    plain = {"role": "assistant", "content": "Yes."}
    cases: list[tuple[str, list[Message], Message, list[Message], str]] = [
        ("an answer", [user], plain, [more], "Yes."),
        (
            "an answer behind a system message",
            [{"role": "system", "content": "Be brief."}, user],
            plain,
            [more],
            "Yes.",
        ),
        (
            "an answer with thoughts",
            [user],
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
            [more],
            "<think>\nHm.\n</think>\n\nYes.",
        ),
        (
            "an answer with spaces around it",
            [user],
            {"role": "assistant", "content": " Yes.\n"},
            [more],
            " Yes.\n",
        ),
    ]
    findings = []
    for what, before, answer, after, said in cases:
        try:
            first = render(tokenizer, before)
            second = render(tokenizer, [*before, answer, *after])
        except ModelError as error:
            if what == "an answer":
                findings.append(str(error))
            continue
        expected = first + said
        if not second.startswith(expected):
            at = _differs_at(expected, second)
            findings.append(
                f"{what} comes out differently in the next turn, from character {at} on: it was "
                f"{_around(expected, at)!r} and becomes {_around(second, at)!r}"
            )
    findings += _check_tools(tokenizer, user)
    return TemplateReport(tuple(findings))


def _check_tools(tokenizer: AgentTokenizer, user: Message) -> list[str]:
    """Tool results are appended to what was there."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": {"what": "it"}}}
        ],
    }
    result = {"role": "tool", "name": "look", "content": "Seen."}
    try:
        first = render(tokenizer, [user, call], _TOOLS, is_asking=False)
        second = render(tokenizer, [user, call, result], _TOOLS)
    except (ModelError, TypeError):
        return []  # a template without tools
    at = _differs_at(first, second)
    if at == len(first) or not first[at:].strip():
        return []
    return [
        f"a tool's result changes the turn before it, from character {at} on: it was "
        f"{_around(first, at)!r} and becomes {_around(second, at)!r}"
    ]


def _differs_at(a: str, b: str) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _around(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 20]
