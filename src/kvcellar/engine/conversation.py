"""A chat over one cache: its history is the tokens that were sampled, never encoded again.

A chat template renders old turns as it likes (it may drop a model's thoughts, or trim spaces), and
a text may be encoded in other tokens than those it was sampled in. Either would make the cache
useless from that token on. So only what is new is rendered: the end of the last answer, the
user's words, and the opening of the next answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcellar.cache import Cache
from kvcellar.engine.generate import GeneratedToken, Generation, PrefillFn, generate
from kvcellar.engine.sampling import SamplingParams
from kvcellar.engine.sequence import OneSequence
from kvcellar.engine.text import Tokenizer
from kvcellar.errors import ModelError, RewindError
from kvcellar.valid import valid_json, valid_text

if TYPE_CHECKING:
    from kvcellar.models.runner import Runner

__all__ = ["ChatTokenizer", "Conversation", "encode_chat"]

Message = dict[str, str]

_MARK = "kvcellar-answer"
"""Stands in for an answer while a template is rendered; what follows it is what is wanted."""


class ChatTokenizer(Tokenizer, Protocol):
    """What a conversation needs of a tokenizer; those of transformers have it."""

    chat_template: Any

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """The messages as the text that the model was trained on."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The tokens of a text."""
        ...


def encode_chat(tokenizer: ChatTokenizer, messages: list[Message]) -> list[int]:
    """The tokens of a chat that awaits an answer.

    Raises:
        ModelError: there is no chat template, or it refuses these messages.
    """
    return _encode(tokenizer, _render(tokenizer, valid_json(messages)))


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where a turn began: what ``undo`` goes back to."""

    tokens: list[int]
    n_messages: int


class Conversation:
    """Messages and their tokens, of which the cache holds the first.

    Always: the cache's tokens are the first ``cached_tokens`` of ``tokens``, whatever raised or
    was given up in between.
    """

    def __init__(
        self,
        runner: Runner,
        cache: Cache,
        tokenizer: ChatTokenizer,
        *,
        system: str | None = None,
        eos_token_ids: Collection[int] = (),
        seq_id: int = 0,
        prefill_chunk: int = 512,
    ) -> None:
        """An empty conversation; what the cache held of the sequence is forgotten.

        Raises:
            ModelError: the model has no chat template.
        """
        _check_template(tokenizer)
        self._runner = runner
        self._sequence = OneSequence(cache, seq_id)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefill_chunk = prefill_chunk
        self._opening: list[Message] = []
        if system is not None:
            self._opening.append({"role": "system", "content": valid_text(system)})
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self._turns: list[_Turn] = []
        self.reset()

    @property
    def n_turns(self) -> int:
        """User messages so far."""
        return len(self._turns)

    @property
    def cached_tokens(self) -> int:
        """How many of the tokens the cache holds."""
        return self._sequence.length

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._sequence.cut(0)
        self.messages = list(self._opening)
        self.tokens = []
        self._turns = []

    def undo(self) -> str | None:
        """Take back the last turn; return what the user said in it, None where there is none.

        The cache is cut back to before the turn. Where a sliding window cannot, it is emptied and
        the next turn computes the history again.
        """
        if not self._turns:
            return None
        turn = self._turns.pop()
        said = self.messages[turn.n_messages]["content"]
        del self.messages[turn.n_messages :]
        self.tokens = turn.tokens
        self._cut_cache(len(self.tokens))
        return said

    def say(
        self, text: str, params: SamplingParams, on_prefill: PrefillFn | None = None
    ) -> Iterator[GeneratedToken | Generation]:
        """The user says something; iterate over the answer as over ``generate``.

        An answer that is given up half-way stays as far as it came.

        Raises:
            PromptError: there is no room for it; raised by this call, and nothing was changed.
            ModelError: the template refuses the message; raised likewise.
        """
        text = valid_text(text)
        kept, new = self._next_tokens(text)
        tokens = [*kept, *new]
        self._cut_cache(len(kept))
        events = generate(
            self._runner,
            self._sequence.cache,
            self._tokenizer,
            tokens,
            params,
            eos_token_ids=self._eos_token_ids,
            seq_id=self._sequence.seq_id,
            prefill_chunk=self._prefill_chunk,
            on_prefill=on_prefill,
        )
        self._turns.append(_Turn(self.tokens, len(self.messages)))
        self.tokens = tokens
        answer: Message = {"role": "assistant", "content": ""}
        self.messages += [{"role": "user", "content": text}, answer]
        return self._follow(events, tokens, answer)

    @staticmethod
    def _follow(
        events: Iterator[GeneratedToken | Generation], tokens: list[int], answer: Message
    ) -> Iterator[GeneratedToken | Generation]:
        for event in events:
            if isinstance(event, GeneratedToken):
                tokens.append(event.token_id)
                answer["content"] += event.text
            yield event

    def _cut_cache(self, n_tokens: int) -> None:
        """Cut the cache back to a beginning of the history, or to nothing where it cannot."""
        try:
            self._sequence.cut(n_tokens)
        except RewindError:
            self._sequence.cut(0)

    def _next_tokens(self, text: str) -> tuple[list[int], list[int]]:
        """(tokens of the history that stay, new tokens) when the user says ``text``."""
        user = {"role": "user", "content": text}
        if not self._turns:
            return [], encode_chat(self._tokenizer, [*self.messages, user])
        mark = _MARK
        while mark in text:
            mark += "x"
        marked = [*self.messages[:-1], {"role": "assistant", "content": mark}, user]
        _, found, rest = _render(self._tokenizer, marked).rpartition(mark)
        if not found:
            raise ModelError(
                "the chat template leaves out the answers of earlier turns, so a conversation "
                "cannot go on from its cache; use a model with another template"
            )
        new = _encode(self._tokenizer, rest)
        end = self.tokens[-1]
        if end not in self._eos_token_ids:
            return self.tokens, new
        if end in new and not self._tokenizer.decode(new[: new.index(end)]).strip():
            return self.tokens, new[new.index(end) + 1 :]  # the answer was closed by the model
        return self.tokens[:-1], new  # the template closes it with another token


def _check_template(tokenizer: ChatTokenizer) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            "the model has no chat template, so it is no chat model; give it plain text, or load "
            "a model that is tuned for chat"
        )


def _render(tokenizer: ChatTokenizer, messages: list[Message]) -> str:
    _check_template(tokenizer)
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except Exception as error:  # templates raise errors of jinja's
        raise ModelError(f"the model's chat template refuses these messages: {error}") from error


def _encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return [int(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
