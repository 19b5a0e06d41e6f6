"""Conversations as tokens: where messages end in them, and why one does not continue another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcellar.errors import ModelError
from kvcellar.history import History
from kvcellar.hosting.messages import Message, Messages
from kvcellar.models.text.prompts import (
    Looks,
    PromptTokenizer,
    Rendered,
    begun_of,
    encode,
    render,
)

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
        looks: at its pictures; None: the model reads none.
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
    looks: Looks | None = None
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
        if part.mark == whole.mark and not whole.pictures:
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
            looks=self.looks,
        )


def _otherwise(message: Message) -> Message:
    """Return a message of the same role whose text begins with another character."""
    begins = str(message.get("content"))[:1]
    return {"role": message["role"], "content": "," if begins == "." else "."}


def split_begun(messages: Messages) -> tuple[Messages, str]:
    """Return a conversation without the answer that it ends with, and that answer's text.

    An answer with calls stays, since nothing but their results can follow it.
    """
    begun = begun_of(messages)
    return (messages, "") if begun is None else (messages.prefix(len(messages) - 1), begun)


def what_changed(
    known: Messages, new: Messages, n_known: int, rules: Collection[str]
) -> str | None:
    """Say why a conversation does not continue the messages that are known; None where it does."""
    if n_known == len(known):
        is_same = all(_said(a) == _said(b) for a, b in zip(known, new, strict=False))
        return None if is_same else "echoed"
    if n_known < len(new) and known[n_known].get("role") == "system":
        return "system"
    if len(new) <= len(known) and n_known >= len(new) - 1:
        return "truncated"
    here = new.key(n_known, rules)
    if any(known.key(i, rules) == here for i in range(n_known + 1, len(known))):
        return "truncated"  # what stood here is gone, and what follows it moved up
    return "edited"


def _said(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value}
