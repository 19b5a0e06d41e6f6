"""From a conversation to a prompt: always what the template makes of the messages as they came.

The tokens of a turn are those of the whole conversation, rendered and encoded anew. What an agent
has computed before is found by comparing tokens, so warm and cold are the same conversation,
whatever a template does to old turns: where it changes one, the turn is computed from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcellar.errors import ModelError, PromptError
from kvcellar.history import History
from kvcellar.hosting.text_limits import refuse_text
from kvcellar.hosting.volatile import RuleChange, apply_rules, match_key
from kvcellar.models.prompts import PromptTokenizer, Rendered, begun_of, encode, render

Message = dict[str, Any]


MIN_AHEAD = 16
"""Tokens by which a place has to be behind what the history has for it to be worth a stop."""


class AgentTokenizer(PromptTokenizer, Protocol):
    """Protocol of a tokenizer for agents; those of transformers have it."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str:
        """Return the text of some tokens."""
        ...


@dataclass(slots=True)
class Prefixes:
    """The tokens of a conversation, and the places in them where its messages end.

    Attributes:
        tokenizer: of the model.
        messages: the conversation.
        tools: definitions of its tools.
        template_kwargs: what else the template takes.
        rendered: the conversation as the template writes it.
        tokens: of the conversation.
        n_common: leading tokens that the history has, too.
        control_tokens_in_text: as the conversation was rendered.
        n_left: how many more beginnings may be rendered to find out.
    """

    tokenizer: AgentTokenizer
    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    rendered: Rendered
    tokens: History
    n_common: int
    control_tokens_in_text: bool
    n_left: int = 16

    def end_of(self, n_messages: int, *, is_asking: bool) -> int:
        """Count the tokens that the first ``n_messages`` write by themselves.

        Fewer where the template writes them otherwise when more follows, but not less than the
        history has in common.
        """
        if not self.n_left:
            return self.n_common
        self.n_left -= 1
        try:
            rendered = self._render(self.messages[:n_messages], is_asking=is_asking)
        except ModelError:  # a template may want the user to have the last word
            return self.n_common
        part = History(encode(self.tokenizer, rendered))
        return max(self.n_common, self.tokens.common_prefix(part))

    def divergences(self) -> tuple[int, ...]:
        """Return where later conversations are likely to go on in other tokens: lengths, ascending.

        Behind the last message: what the template opens an answer with may not stand before that
        answer in the next turn. Behind the user's last message: templates drop all thoughts since
        when the user speaks again; and before it, where it is said otherwise, unless the history
        has what comes before. And where the conversation left its history: others may, too. An
        answer that is asked for again needs the last token's logits, so the last place is before.
        """
        messages = self.messages
        said = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        ends = {len(messages), said[-1] + 1 if said else len(messages)}
        found = [self.n_common, *(self._length_of(messages[:end]) for end in ends)]
        if said and said[-1]:
            otherwise = _otherwise(messages[said[-1]])
            found.append(self._length_of([*messages[: said[-1]], otherwise]))
            if found[-1] < self.n_common + MIN_AHEAD:
                found.pop()
        last = len(self.tokens) - 1
        return tuple(sorted({min(at, last) for at in found if min(at, last) > 0}))

    def _length_of(self, messages: Sequence[Message]) -> int:
        """Count the tokens that some messages write, as far as the conversation writes the same.

        What follows is encoded alone: where that gives the last tokens of the whole, the others
        are the beginning's. 0 where the template refuses these messages.
        """
        try:
            part = self._render(messages, is_asking=False)
        except ModelError:
            return 0
        whole = self.rendered
        if part.mark == whole.mark:
            rest = whole.behind(part)
            tail = encode(self.tokenizer, rest) if rest.text else []
            n = len(self.tokens) - len(tail)
            if tail and self.tokens[n:].tolist() == tail:
                return n
        return self.tokens.common_prefix(History(encode(self.tokenizer, part)))

    def _render(self, messages: Sequence[Message], *, is_asking: bool) -> Rendered:
        return render(
            self.tokenizer,
            messages,
            self.tools,
            template_kwargs=self.template_kwargs,
            is_asking=is_asking,
            control_tokens_in_text=self.control_tokens_in_text,
        )


def _otherwise(message: Message) -> Message:
    """Return a message of the same role whose text begins with another character."""
    begins = str(message.get("content"))[:1]
    return {"role": message["role"], "content": "," if begins == "." else "."}


@dataclass(frozen=True, slots=True)
class Spoken:
    """A conversation as tokens.

    Attributes:
        messages: the conversation, as the model reads it.
        n_known: leading messages that the history has, too.
        tools: the definitions that were rendered.
        template_kwargs: what else the template took.
        changed: ``system``, ``tools``, ``truncated``, ``edited`` or ``echoed``: what may keep the
            history from being continued; None where all of it was sent again.
        changes: what rules changed.
        prefixes: its tokens, and where its messages end.
        begun: the text with which the answer has begun already, as it was sent.
    """

    messages: list[Message]
    n_known: int
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    changed: str | None
    changes: tuple[RuleChange, ...]
    prefixes: Prefixes = field(repr=False)
    begun: str = ""

    @property
    def tokens(self) -> History:
        """All of them, ready to be answered."""
        return self.prefixes.tokens


def plan_messages(
    tokenizer: AgentTokenizer,
    history: History,
    known: Sequence[Message],
    known_tools: list[dict[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    rules: Collection[str],
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    control_tokens_in_text: bool = False,
    context: int | None = None,
) -> Spoken:
    """Turn a whole conversation into tokens, and compare it with a history.

    Args:
        tokenizer: of the model.
        history: the agent's tokens.
        known: its messages.
        known_tools: the tool definitions that the history began with.
        messages: the whole conversation, oldest first; where the last is an answer, it is gone on
            with.
        tools: definitions of tools, as the template takes them.
        rules: names of rules for volatile text; see ``volatile.RULES``.
        template_kwargs: what else the template takes.
        control_tokens_in_text: let messages spell control tokens.
        context: tokens that the conversation may have; None: any number.

    Raises:
        ContextError: it has many more tokens, and not all of them were counted.
        PromptError: no message, or the last has calls whose results are not there.
        ModelError: the template refuses the messages, or there is none.
    """
    said, begun = split_begun(messages)
    if not said or (said[-1].get("role") == "assistant" and not begun):
        raise PromptError(
            "a turn needs a message to answer; end the conversation with the user's or a tool's, "
            "or with an answer without calls that is to be gone on with"
        )
    ruled = apply_rules(said, tools, rules, known)
    begun_message = [dict(messages[-1])] if begun else []
    kwargs = dict(template_kwargs or {})
    rendered = render(
        tokenizer,
        [*ruled.messages, *begun_message],
        ruled.tools,
        template_kwargs=kwargs,
        control_tokens_in_text=control_tokens_in_text,
    )
    if context is not None:
        refuse_text(tokenizer, rendered.text, context)
    tokens = History(encode(tokenizer, rendered))
    n_known = 0
    has_same_tools = not known or ruled.tools == known_tools
    if has_same_tools:
        keys = ([match_key(m, rules) for m in some] for some in (known, ruled.messages[:-1]))
        n_known = n_alike(*keys)
    changed: str | None = "tools"
    if has_same_tools:
        new, n_same = [*ruled.messages, *begun_message], n_known
        if begun:  # an answer that was there is gone on with: no message of it was dropped
            n_same = n_alike(*([match_key(m, rules) for m in some] for some in (known, new)))
        changed = what_changed(known, new, n_same, rules)
    n_common = history.common_prefix(tokens)
    prefixes = Prefixes(
        tokenizer,
        ruled.messages,
        ruled.tools,
        kwargs,
        rendered,
        tokens,
        n_common,
        control_tokens_in_text,
    )
    return Spoken(
        ruled.messages, n_known, ruled.tools, kwargs, changed, ruled.changes, prefixes, begun
    )


def n_alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many messages or digests two sequences begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def split_begun(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return a conversation without the answer that it ends with, and that answer's text.

    An answer with calls stays, since nothing but their results can follow it.
    """
    begun = begun_of(messages)
    return (messages, "") if begun is None else (messages[:-1], begun)


def what_changed(
    known: Sequence[Message], new: Sequence[Message], n_known: int, rules: Collection[str]
) -> str | None:
    """Say why a conversation does not continue the messages that are known; None where it does."""
    if n_known == len(known):
        is_same = all(_said(a) == _said(b) for a, b in zip(known, new, strict=False))
        return None if is_same else "echoed"
    if n_known < len(new) and known[n_known].get("role") == "system":
        return "system"
    if len(new) <= len(known) and n_known >= len(new) - 1:
        return "truncated"
    here = match_key(new[n_known], rules)
    if any(match_key(message, rules) == here for message in known[n_known + 1 :]):
        return "truncated"  # what stood here is gone, and what follows it moved up
    return "edited"


def _said(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value}
