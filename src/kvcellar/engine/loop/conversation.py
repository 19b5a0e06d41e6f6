"""A chat over one cache: each prompt is the whole conversation as its template writes it.

What the cache holds of it is found by comparing tokens. A template that renders old turns otherwise
than before, or an answer whose text is read in other tokens than it was sampled in, costs computing
from there on; what the model reads is never anything else than what was said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvcellar.cache import Cache
from kvcellar.engine.loop.generating import GeneratedToken, Generation, PrefillFn, generate
from kvcellar.engine.loop.sequence import SequenceView
from kvcellar.engine.loop.text import Tokenizer
from kvcellar.engine.sampler.sampling import SamplingParams
from kvcellar.errors import ModelError
from kvcellar.history import History
from kvcellar.models.seeing import EncodedPicture, SeeingRunner
from kvcellar.models.text.prompts import Looks, PromptTokenizer, encode, render
from kvcellar.pictures.tokens import usable
from kvcellar.valid import valid_json, valid_text

if TYPE_CHECKING:
    from kvcellar.models.runner import Runner

Message = dict[str, Any]


class Eyes(Looks, Protocol):
    """Protocol of what looks at pictures for prompts and encodes them for forwards."""

    def encode(self, name: str) -> EncodedPicture:
        """Have the model's vision part read a picture.

        Raises:
            PictureError: it is not here any more, or the model cannot read it.
        """
        ...


class ChatTokenizer(Tokenizer, PromptTokenizer, Protocol):
    """Protocol of a tokenizer for a conversation; those of transformers have it."""


def encode_chat(
    tokenizer: PromptTokenizer,
    messages: Sequence[Message],
    *,
    control_tokens_in_text: bool = False,
    looks: Looks | None = None,
) -> list[int]:
    """Return the tokens of a chat that awaits an answer.

    Args:
        tokenizer: of the model.
        messages: oldest first.
        control_tokens_in_text: let messages spell control tokens, which are text otherwise.
        looks: at the pictures in messages; None: the model reads text alone.

    Raises:
        ModelError: there is no chat template, or it refuses these messages.
        PictureError: a picture is not here any more, or the model cannot read it.
    """
    rendered = render(
        tokenizer,
        valid_json(messages),
        control_tokens_in_text=control_tokens_in_text,
        looks=looks,
    )
    return encode(tokenizer, rendered)


@dataclass(frozen=True, slots=True)
class _Turn:
    """State at the beginning of a turn, to which ``undo`` goes back."""

    tokens: History
    n_messages: int


class _Points:
    """Lengths that a model with states can go on from, as many as there are slots for.

    Without recurrent layers a sequence is cut back anywhere, or as far as windows have their slack.
    """

    def __init__(self, sequence: SequenceView) -> None:
        config = sequence.cache.config
        self._sequence = sequence
        self._kept: list[int] = []
        """Ascending."""
        self.most = 0 if config.params.state is None else config.n_slots - 2
        """All but the slots that a step reads and writes."""

    def add(self, lengths: Iterable[int]) -> list[int]:
        """Return lengths that the cache is to keep; the oldest ones give way to them."""
        new = sorted({n for n in lengths if n > 0}.difference(self._kept))
        new = new[max(0, len(new) - self.most) :]
        while len(self._kept) + len(new) > self.most:
            self._drop_oldest()
        self._kept = sorted([*self._kept, *new])
        return new

    def make_room(self, n_tokens: int) -> None:
        """Give the oldest ones up for as long as so many tokens do not fit."""
        while self._kept and not self._sequence.can_extend(n_tokens):
            self._drop_oldest()

    def cut(self, length: int) -> None:
        """Forget those that are gone, behind ``length``."""
        self._kept = [n for n in self._kept if n <= length]

    def _drop_oldest(self) -> None:
        self._sequence.drop_point(self._kept.pop(0))


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
        control_tokens_in_text: bool = False,
        marks: Mapping[int, str] | None = None,
        eyes: Eyes | None = None,
    ) -> None:
        """Begin a conversation; what the cache held of the sequence is forgotten.

        Args:
            runner: the model, bound to the session of ``cache``.
            cache: of any kind.
            tokenizer: with a chat template.
            system: the system message.
            eos_token_ids: tokens with which the model ends an answer.
            seq_id: which sequence of the cache.
            prefill_chunk: tokens of a prompt in one forward.
            control_tokens_in_text: let messages spell control tokens, which are text otherwise.
            eyes: read the pictures that are said; None: the model reads text alone.
            marks: as ``Request`` has them; ``say`` is then told what makes a message of the text.

        Raises:
            ModelError: the model has no chat template.
        """
        if not tokenizer.chat_template:
            raise ModelError(
                "the model has no chat template, so it is no chat model; give it plain text, or "
                "load a model that is tuned for chat"
            )
        self._runner = runner
        self._sequence = SequenceView(cache, seq_id)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prefill_chunk = prefill_chunk
        self._control_tokens_in_text = control_tokens_in_text
        self._marks, self._eyes = marks, eyes
        self._opening: list[Message] = []
        if system is not None:
            self._opening.append({"role": "system", "content": valid_text(system)})
        self.messages: list[Message] = []
        self.tokens = History()
        self._turns: list[_Turn] = []
        self._points = _Points(self._sequence)
        self.reset()

    @property
    def n_turns(self) -> int:
        """Number of user messages so far."""
        return len(self._turns)

    @property
    def cached_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self._sequence.length

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._cut(0)
        self.messages = list(self._opening)
        self.tokens = History()
        self._turns = []

    def undo(self) -> str | None:
        """Take back the last turn; return what the user said in it, None where there is none.

        The cache is cut back to before the turn, as far as the turn began with the same tokens.
        Where a layer cannot go on from there, it is cut back further, and the next turn computes
        what is missing.
        """
        if not self._turns:
            return None
        turn = self._turns.pop()
        said: str = self.messages[turn.n_messages]["content"]
        del self.messages[turn.n_messages :]
        n_common = turn.tokens.common_prefix(self.tokens)
        self.tokens = turn.tokens
        self._cut(n_common)
        return said

    def _cut(self, n_tokens: int) -> int:
        """Cut the cache back to at most so many tokens; return how many it holds."""
        held = self._sequence.cut(n_tokens)
        self._points.cut(held)
        return held

    def say(
        self,
        text: str,
        params: SamplingParams,
        on_prefill: PrefillFn | None = None,
        *,
        message_of: Callable[[str], Message] | None = None,
        pictures: Sequence[str] = (),
    ) -> Iterator[GeneratedToken | Generation]:
        """Let the user say something; iterate over the answer as over ``generate``.

        An answer that is given up half-way stays as far as it came: close the iterator then.

        Args:
            text: what is said.
            params: how to sample the answer, and when to end it.
            on_prefill: as ``generate`` takes it.
            message_of: from the text of the answer to the message that is kept; None: its text.
            pictures: names of pictures that stand before the text.

        Raises:
            PromptError: there is no room for it; raised by this call, and nothing was changed.
            ModelError: the template refuses the message; raised likewise.
        """
        user: Message = {"role": "user", "content": valid_text(text)}
        if pictures:
            user["pictures"] = [{"name": name, "at": 0} for name in pictures]
        ids = encode_chat(
            self._tokenizer,
            [*self.messages, user],
            control_tokens_in_text=self._control_tokens_in_text,
            looks=self._eyes,
        )
        tokens = History(ids)
        held = self._cut(self._resumable(tokens))
        keep_at = self._keep_points(tokens, held, user)
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
            keep_at=keep_at,
            marks=self._marks,
            encode=None if self._eyes is None else self._eyes.encode,
        )
        self._turns.append(_Turn(self.tokens, len(self.messages)))
        self.tokens = tokens
        answer: Message = {"role": "assistant", "content": ""}
        self.messages += [user, answer]
        return self._follow(events, tokens, answer, message_of)

    def _resumable(self, tokens: History) -> int:
        """Return how many tokens of a prompt the history has, up to where it can be gone on."""
        is_whole = isinstance(self._runner, SeeingRunner) and self._runner.is_whole
        return usable(tokens.tokens, self.tokens.common_prefix(tokens), is_whole=is_whole)

    def _keep_points(self, tokens: History, held: int, user: Message) -> list[int]:
        """Keep the states before a turn, for ``undo``; return at which lengths of it to keep more.

        That is behind what the user says: what an answer opens with may not stand before it in the
        next turn, and what the model thinks may not either.

        Args:
            tokens: the prompt.
            held: tokens of it that the cache holds.
            user: what the user says.
        """
        if not self._points.most:
            return []
        said = render(
            self._tokenizer,
            valid_json([*self.messages, user]),
            is_asking=False,
            control_tokens_in_text=self._control_tokens_in_text,
            looks=self._eyes,
        )
        n_said = tokens.common_prefix(History(encode(self._tokenizer, said)))
        new = self._points.add((held, n_said))
        if held in new:
            self._sequence.keep_point(held)
        self._points.make_room(len(tokens) - held)
        return [n for n in new if n > held]

    @staticmethod
    def _follow(
        events: Iterator[GeneratedToken | Generation],
        tokens: History,
        answer: Message,
        message_of: Callable[[str], Message] | None,
    ) -> Iterator[GeneratedToken | Generation]:
        try:
            for event in events:
                if isinstance(event, GeneratedToken):
                    tokens.append(event.token_id)
                    answer["content"] += event.text
                yield event
        finally:
            if message_of is not None:
                answer.update(message_of(answer["content"]))
