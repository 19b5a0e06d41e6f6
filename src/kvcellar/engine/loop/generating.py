"""One sequence, one token at a time: the plain loop, behind any cache.

It is what a faster engine is compared with, so it has no batch, no queue and no second way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvcellar.cache import Cache
from kvcellar.checks import whole
from kvcellar.engine.loop.sequence import SequenceView
from kvcellar.engine.loop.text import TextStream, Tokenizer
from kvcellar.engine.sampler.sampling import SamplingParams, SamplingState, TokenLogprob, sample
from kvcellar.errors import PromptError
from kvcellar.history import History
from kvcellar.models.runner import TurningRunner, rope_border_of, step_limit, turning
from kvcellar.models.seeing import (
    EncodedPicture,
    EncodeFn,
    SeeingRunner,
    SeenPicture,
    seeing,
    unseen,
)
from kvcellar.pictures.tokens import PlacedPicture, ids_of, pictures_in

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray, Runner

PrefillFn = Callable[[int, int], None]
"""Called with how many of the prompt's new tokens are done, and how many there are."""

_GREEDY = SamplingParams()


class PromptPictures:
    """The pictures of one prompt, each encoded when the first of its tokens is computed."""

    def __init__(self, pictures: Sequence[PlacedPicture], encode: EncodeFn | None) -> None:
        """Encode nothing yet."""
        self._pictures, self._encode = pictures, encode
        self._rows: dict[str, EncodedPicture] = {}

    def stop(self, runner: Runner, start: int, stop: int) -> int:
        """Return where a forward from ``start`` ends: with all of a picture, if it has to be so."""
        if isinstance(runner, SeeingRunner) and runner.is_whole:
            for one in self._pictures:
                if one.start < stop < one.stop:
                    return one.start if one.start > start else one.stop
        return stop

    def seen(self, start: int, stop: int) -> list[SeenPicture]:
        """Return the pictures that begin before ``stop``, and the rows of those in the forward."""
        found = []
        for one in self._pictures:
            if one.start >= stop:
                break
            rows = None
            if one.stop > start:
                assert self._encode is not None, "asked before anything is computed"
                if one.name not in self._rows:
                    self._rows[one.name] = self._encode(one.name)
                rows = self._rows[one.name]
            found.append(SeenPicture(one, rows))
        return found


NO_PICTURES = PromptPictures((), None)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended.

    Attributes:
        reason: ``stop`` where the model or a stop ended it, ``length`` where room did.
        cause: which of them.
        detail: the cause in words, with numbers.
        stop_text: for the cause ``stop_text``: which one.
    """

    reason: Literal["stop", "length"]
    cause: Literal[
        "eos", "stop_token", "stop_text", "guide", "max_tokens", "cache_full", "context_full"
    ]
    detail: str
    stop_text: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds that a generation took.

    Attributes:
        prompt_tokens: tokens of the prompt, cached ones among them.
        cached_tokens: tokens of the prompt that were not computed again.
        completion_tokens: tokens sampled, the one that ended it among them.
        time_to_first_token_s: from the start to the first token.
        tokens_per_second: of the tokens after the first; None where there are none.
        drafted_tokens: guesses that were verified.
        accepted_tokens: guesses that were right.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    time_to_first_token_s: float
    tokens_per_second: float | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One sampled token.

    Attributes:
        token_id: the token.
        text: the text that became certain with it; may be empty, or that of several tokens.
        logprob: where ``SamplingParams.logprobs`` asks for it.
        top_logprobs: the most likely tokens, as many as were asked for.
        request_id: whose it is, where an engine sampled it.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    request_id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Generation:
    """The last item of ``generate``: what came, and why it ended.

    Attributes:
        text: the texts of all tokens, joined; no part of a stop text is in it.
        token_ids: what was sampled, the end token or the tokens of a stop text among it.
        finish: why it ended.
        usage: what it took.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    usage: Usage

    @property
    def finish_reason(self) -> str:
        """``stop`` or ``length``."""
        return self.finish.reason


def generate(
    runner: Runner,
    cache: Cache,
    tokenizer: Tokenizer,
    prompt_ids: Iterable[int],
    params: SamplingParams = _GREEDY,
    *,
    eos_token_ids: Collection[int] = (),
    seq_id: int = 0,
    prefill_chunk: int = 512,
    on_prefill: PrefillFn | None = None,
    keep_at: Collection[int] = (),
    marks: Mapping[int, str] | None = None,
    encode: EncodeFn | None = None,
) -> Iterator[GeneratedToken | Generation]:
    """Continue a prompt: a :class:`GeneratedToken` for each token, then one :class:`Generation`.

    The sequence goes on from what the cache holds of it, which the caller promises to be the first
    tokens of ``prompt_ids``; only the others are computed. The last token that is sampled is not
    written to the cache. An iteration that is given up, in prefill too, leaves the cache with the
    tokens that were finished.

    Args:
        runner: the model, bound to the session of ``cache``.
        cache: of any kind.
        tokenizer: for the text; it sees sampled tokens and the end of the prompt.
        prompt_ids: the whole history.
        params: how to sample and when to end.
        eos_token_ids: tokens with which the model ends a text.
        seq_id: which sequence of the cache.
        prefill_chunk: tokens of the prompt in one forward.
        on_prefill: called before the first chunk and after each.
        keep_at: lengths of the prompt to which the sequence is to be cut back later: where it does
            not hold them yet, they are made points of the cache.
        marks: as ``Request`` has them.
        encode: finds a picture by name and has the vision part read it; None: there are none.

    Raises:
        PictureError: the prompt has pictures and nobody reads them; raised by this call.
        PromptError: the prompt is empty, does not fit, holds an id that the model does not have,
            or is shorter than what the cache holds; raised by this call, before any compute.
        ConfigError: a ``prefill_chunk`` below 1, or a ``logit_bias`` of an unknown token.
    """
    whole(prefill_chunk, "prefill_chunk", least=1)
    sequence = SequenceView(cache, seq_id)
    prompt = check_prompt(prompt_ids, runner.vocab_size, sequence)
    ids = History(ids_of(prompt.tokens))
    placed = pictures_in(prompt.tokens)
    if placed and (encode is None or not isinstance(runner, SeeingRunner)):
        raise unseen(len(placed))
    state = SamplingState(params, runner.vocab_size, ids, eos_token_ids)
    stream = TextStream(tokenizer, params.stop, context=ids, marks=marks)
    pictures = PromptPictures(placed, encode)
    read = partial(
        prefill, runner, sequence, prompt, prefill_chunk, on_prefill, keep_at, pictures=pictures
    )
    return _generate(runner, sequence, prompt, state, stream, eos_token_ids, read, pictures)


def _generate(
    runner: Runner,
    sequence: SequenceView,
    prompt: History,
    state: SamplingState,
    stream: TextStream,
    eos_token_ids: Collection[int],
    read: Callable[[], FloatArray],
    pictures: PromptPictures,
) -> Iterator[GeneratedToken | Generation]:
    started = time.perf_counter()
    turn_anew(runner, sequence, len(prompt))
    n_cached = sequence.cut(len(prompt) - 1)
    logits = read()
    history = History(prompt)
    token_ids: list[int] = []
    first_token_s, decode_s = time.perf_counter() - started, 0.0
    finish = out_of_tokens(state)
    while finish is None:
        if token_ids:
            started = time.perf_counter()
            history.append(token_ids[-1])
            logits = prefill(runner, sequence, history, pictures=pictures)
        choice = sample(logits, [state])[0]
        state.record(choice.token_id)
        token_ids.append(choice.token_id)
        if len(token_ids) == 1:
            first_token_s = time.perf_counter() - started
        else:
            decode_s += time.perf_counter() - started
        no_room = None if sequence.can_extend(1) else cache_full(sequence.cache)
        text, finish = told(choice.token_id, state, stream, eos_token_ids, no_room)
        yield GeneratedToken(choice.token_id, text, choice.logprob, choice.top_logprobs)
    n_decoded = max(0, len(token_ids) - 1)
    usage = Usage(
        prompt_tokens=len(prompt),
        cached_tokens=n_cached,
        completion_tokens=len(token_ids),
        time_to_first_token_s=first_token_s,
        tokens_per_second=n_decoded / decode_s if n_decoded else None,
    )
    yield Generation(stream.text, tuple(token_ids), finish, usage)


def last(events: Iterable[GeneratedToken | Generation]) -> Generation:
    """Run ``generate`` to its end and return how it ended."""
    result = None
    for event in events:
        result = event
    assert isinstance(result, Generation), "generate ends with a Generation"
    return result


# The parts, for whoever drives several sequences -------------------------------------------------


def check_prompt(
    prompt_ids: Iterable[int], vocab_size: int, sequence: SequenceView, n_reserved: int = 0
) -> History:
    """Return the prompt, if it can go on from what the sequence holds, and fits.

    Args:
        prompt_ids: the whole history.
        vocab_size: ids that the model has.
        sequence: where it goes.
        n_reserved: cells that must be free besides.

    Raises:
        PromptError: see ``generate``.
    """
    prompt = History(prompt_ids)
    check_tokens(History(ids_of(prompt.tokens)), vocab_size)
    held = sequence.length
    if held > len(prompt):
        raise PromptError(
            f"sequence {sequence.seq_id} holds {held} tokens and the prompt has {len(prompt)}; a "
            f"prompt begins with all that the cache holds; cut the sequence back first"
        )
    n_new = len(prompt) - held
    if not sequence.can_extend(n_new + n_reserved):
        capacity = sequence.cache.capacity
        n_free = min(group.free for group in sequence.cache.usage().groups)
        of_these = f", {n_new} of them new" if held else ""
        besides = f" and its continuation {n_reserved}" if n_reserved else ""
        raise PromptError(
            f"the prompt has {len(prompt)} tokens{of_these}{besides}; the cache has {n_free} cells "
            f"free of {capacity}; shorten the prompt or "
            f"{sequence.cache.config.more_room}"
        )
    return prompt


def check_tokens(prompt: History, vocab_size: int) -> None:
    """Refuse a prompt without tokens, or with some that the model does not have.

    Raises:
        PromptError: it is such a prompt.
    """
    if not len(prompt):
        raise PromptError("the prompt has no tokens; give at least one, such as the model's BOS")
    low, high = prompt.tokens.min(), prompt.tokens.max()
    if low < 0 or high >= vocab_size:
        raise PromptError(
            f"the prompt holds token id {low if low < 0 else high} and the model has ids 0 to "
            f"{vocab_size - 1}: its tokens are of a tokenizer that does not match the model; "
            f"encode the text with the model's own tokenizer"
        )


def prefill(
    runner: Runner,
    sequence: SequenceView,
    prompt: History,
    chunk: int = 512,
    on_prefill: PrefillFn | None = None,
    keep_at: Collection[int] = (),
    *,
    n_text: int | None = None,
    pictures: PromptPictures = NO_PICTURES,
) -> FloatArray:
    """Compute what the sequence does not hold of a checked prompt.

    A prompt that is held whole gives its last token back, since that one's logits are needed. One
    that RoPE turns otherwise than what is held was turned is computed anew.

    Args:
        runner: the model.
        sequence: of its session.
        prompt: the whole history.
        chunk: tokens in one forward.
        on_prefill: called before the first chunk and after each.
        keep_at: lengths to be made points; see ``generate``.
        n_text: tokens of the text that it is turned as; None: its own.
        pictures: those in it.

    Returns:
        The logits of its last token, ``[1, vocab]``.
    """
    is_long = turn_anew(runner, sequence, len(prompt) if n_text is None else n_text)
    held = sequence.cut(len(prompt) - 1)
    n_new = len(prompt) - held
    if on_prefill is not None:
        on_prefill(0, n_new)
    chunk, start = step_limit(runner, chunk), held
    while start < len(prompt):
        stop = min((n for n in keep_at if n > start), default=len(prompt))
        stop = pictures.stop(runner, start, min(stop, start + chunk))
        tokens = ids_of(prompt[start:stop])
        seen = pictures.seen(start, stop)
        with turning(runner, is_long), seeing(runner, [(seen, len(tokens))]):
            logits = runner.forward(tokens, sequence.begin(len(tokens)))
        start += len(tokens)
        if start in keep_at:
            sequence.keep_point(start)
        if on_prefill is not None:
            on_prefill(start - held, n_new)
    return np.asarray(logits)


def turn_anew(runner: Runner, sequence: SequenceView, n_tokens: int) -> bool:
    """Let go of what a sequence holds where RoPE turned it as a text of another length.

    A frozen prefix stays, and so all that stands on one is turned as the session's longest text.

    Args:
        runner: whose model turns positions.
        sequence: of its session.
        n_tokens: of the text that it becomes.

    Returns:
        True if that is a long text; see ``TurningRunner``.
    """
    border = rope_border_of(runner)
    if not border or sequence.cache.config.origin:
        return True
    assert isinstance(runner, TurningRunner), "it has a border"
    is_long, held = n_tokens > border, sequence.length
    if held and runner.read_as.get(sequence.seq_id, held > border) != is_long:
        sequence.cut(0)
    runner.read_as[sequence.seq_id] = is_long
    return is_long


def told(
    token_id: int,
    state: SamplingState,
    stream: TextStream | None,
    eos_token_ids: Collection[int],
    no_room: Finish | None = None,
) -> tuple[str, Finish | None]:
    """Return the text that became certain with a token, and why its sequence ends; None to go on.

    Args:
        token_id: what was sampled last; the state has it.
        state: of the sequence.
        stream: makes text of tokens; flushed at the end. None: without text.
        eos_token_ids: tokens with which the model ends a text.
        no_room: the end for want of room, where nothing else ends the sequence.
    """
    finish = _finish_of(token_id, state, eos_token_ids) or no_room
    if stream is None:
        return "", finish
    text = ""
    if finish is None or finish.cause not in ("stop_token", "eos"):
        text = stream.push(token_id)
        stop = stream.matched_stop
        if stop is not None:
            finish = Finish("stop", "stop_text", f"stop text {stop!r}", stop)
    if finish is not None:
        text += stream.flush()
        stop = stream.matched_stop
        if stop is not None:  # what was held back may have one, now that it is text
            finish = Finish("stop", "stop_text", f"stop text {stop!r}", stop)
    return text, finish


def _finish_of(
    token_id: int, state: SamplingState, eos_token_ids: Collection[int]
) -> Finish | None:
    """Return why a sequence ends with this token, whatever its text is; None to go on."""
    params = state.params
    if token_id in params.stop_token_ids:
        return Finish("stop", "stop_token", f"stop token {token_id}")
    if token_id in eos_token_ids and not params.ignore_eos:
        return Finish("stop", "eos", "the model ended its text")
    if state.is_complete:
        return Finish("stop", "guide", "nothing can follow in the grammar")
    return out_of_tokens(state)


def out_of_tokens(state: SamplingState) -> Finish | None:
    """Return the end of a sequence that has all the tokens it may have; None to go on."""
    most = state.params.max_tokens
    if most is None or state.n_sampled < most:
        return None
    return Finish("length", "max_tokens", f"max_tokens {most} reached")


def cache_full(cache: Cache) -> Finish:
    """Return the end of a sequence whose next token has no cell."""
    detail = f"no cell is free of {cache.capacity}; {cache.config.more_room}"
    return Finish("length", "cache_full", f"the cache is full: {detail}")
