"""Outcomes of a step: tokens added to sequences, requests ended, events told of both."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcellar.cache import TreeSeqCache
from kvcellar.engine.kv.residency import Residency
from kvcellar.engine.loop.generating import (
    Finish,
    GeneratedToken,
    Usage,
    cache_full,
    out_of_tokens,
    told,
)
from kvcellar.engine.requests.batch import Batch, BatchPart, Verdict
from kvcellar.engine.requests.request import (
    EndReason,
    Event,
    FinishEvent,
    PromptEvent,
    Sequence,
)
from kvcellar.engine.sampler.sampling import Choice
from kvcellar.engine.speculate import Speculator
from kvcellar.errors import CacheFullError

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray

MAX_LATE = 8
"""Steps in a row that may find their room taken before their requests end with the error."""


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests and of their tokens since the engine was made."""

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Outcomes:
    """Takes what was computed and chosen into the sequences, and ends those that end.

    Attributes:
        residency: where their KV is.
        eos_token_ids: tokens with which the model ends a text.
        max_positions: tokens of a sequence that the model can read; None: as many as fit.
        speculator: learns which guesses were right; None where there are none.
        waiting: the sequences that wait; an end takes one out.
        running: those that run, likewise.
        counts: of all requests.
    """

    residency: Residency
    eos_token_ids: Collection[int]
    max_positions: int | None
    speculator: Speculator | None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    counts: RequestCounts = field(default_factory=RequestCounts)
    _events: list[Event] = field(default_factory=list)
    _n_late: int = 0
    _trees: TreeSeqCache | None = None

    def __post_init__(self) -> None:
        cache = self.residency.cache
        self._trees = cache if isinstance(cache, TreeSeqCache) else None
        self.residency.waiting = self.waiting

    # A step that ran ---------------------------------------------------------------------------

    def take(
        self, batch: Batch, verdicts: list[Verdict], features: FloatArray | None, now: float
    ) -> int:
        """Take a step's tokens into the sequences; return how many of them were of prompts.

        Args:
            batch: what was computed.
            verdicts: per part what its sequence goes on with.
            features: ``[T, n_features]`` of all tokens, where a drafter reads them.
            now: seconds.
        """
        self._n_late = 0
        n_prefill = first = 0
        for part, verdict in zip(batch.parts, verdicts, strict=True):
            if not part.sequence.is_decoding:
                n_prefill += part.n_known
            if verdict.error is not None:
                self.end_without_kv(part.sequence, verdict.error)
            else:
                of_part = None if features is None else features[first : first + part.n_tokens]
                self._take_part(part, verdict, of_part, now)
            first += part.n_tokens
        return n_prefill

    def _take_part(
        self, part: BatchPart, verdict: Verdict, features: FloatArray | None, now: float
    ) -> None:
        """Let one sequence go on with what was computed and chosen; end it where it ends."""
        sequence = part.sequence
        was_prefill = not sequence.is_decoding
        finish, error = None, None
        self._take_scores(part, verdict)
        try:
            finish = self._take_tokens(sequence, verdict.choices, now)
        except Exception as raised:  # its grammar or the tokenizer: nobody else's trouble
            error = raised
        start = sequence.n_computed
        rows = self._keep_computed(part, verdict, was_prefill)
        if not sequence.is_sampled and not sequence.n_left:
            sequence.first_token_s = sequence.last_token_s = now
            finish = out_of_tokens(sequence.state)
        if self.speculator is not None:
            self.speculator.learn(sequence.request_id, [c.token_id for c in verdict.choices])
            if features is not None:
                self.speculator.saw(sequence.request_id, start, features[rows])
        snapshots = self.residency.snapshots
        if not was_prefill:
            snapshots.keep_newest(sequence)
        elif part.is_last or snapshots.is_due(sequence, len(self.running)):
            self.residency.publish(sequence)
        if error is not None:
            self.end(sequence, "error", error=error)
        elif finish is not None:
            self.end(sequence, finish.reason, finish=finish)

    def _take_scores(self, part: BatchPart, verdict: Verdict) -> None:
        """Take the log probabilities of a prompt's tokens; tell them once it is read whole."""
        sequence = part.sequence
        sequence.scores[sequence.n_computed :] = verdict.scores
        is_whole = sequence.n_computed + part.n_known == sequence.n_prompt
        is_told = sequence.request.prompt_logprobs is None or sequence.first_token_s is not None
        if is_whole and not is_told:
            self._events.append(PromptEvent(sequence.request_id, tuple(sequence.scores)))

    def _take_tokens(
        self, sequence: Sequence, choices: Iterable[Choice], now: float
    ) -> Finish | None:
        """Let a sequence go on with what was chosen, up to where it ends; return why it does."""
        for choice in choices:
            finish = self._take_token(sequence, choice, now)
            if finish is not None:
                return finish
        return None

    def _take_token(self, sequence: Sequence, choice: Choice, now: float) -> Finish | None:
        """Add one token to a sequence and tell it; return the cause if the sequence ends."""
        sequence.state.record(choice.token_id)
        sequence.tokens.append(choice.token_id)
        self.counts.sampled_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        sequence.last_token_s = now
        text, finish = told(
            choice.token_id,
            sequence.state,
            sequence.stream,
            self.eos_token_ids,
            self._out_of_positions(sequence),
        )
        known = (choice.logprob, choice.top_logprobs, sequence.request_id)
        self._events.append(GeneratedToken(choice.token_id, text, *known))
        return finish

    def _out_of_positions(self, sequence: Sequence) -> Finish | None:
        """Return the end of a sequence whose last token has no position; None to go on."""
        most = self.max_positions
        if most is None or len(sequence.tokens) <= most:
            return None
        return Finish("length", "context_full", f"the model's context of {most} tokens is full")

    def _keep_computed(self, part: BatchPart, verdict: Verdict, was_prefill: bool) -> list[int]:
        """Keep the KV of what a sequence goes on with, drop wrong guesses'; return what was right.

        Where it ends before its last accepted guess, the guesses behind the end go too. Where
        states cannot be cut back to what was right, the next step computes that again.

        Returns:
            The part's tokens that were right, as indices.
        """
        sequence, n_known = part.sequence, part.n_known
        n_new = len(sequence.tokens) - sequence.n_computed - n_known
        rows = [*range(n_known), *(n_known + node for node in verdict.accepted[:n_new])]
        self.counts.computed_tokens += part.n_tokens
        sequence.n_computed += len(rows)
        if part.draft:
            self.counts.drafted_tokens += len(part.draft)
            self.counts.accepted_tokens += len(verdict.accepted)
            sequence.n_drafted += len(part.draft)
            sequence.n_accepted += len(verdict.accepted)
        if part.is_tree:
            assert self._trees is not None
            self._trees.commit(rows, sequence.seq_id)
        elif part.draft:
            self._take_back(part, len(rows))
        if not was_prefill:
            sequence.n_again = max(0, sequence.n_left - 1)
        return rows

    def _take_back(self, part: BatchPart, n_kept: int) -> None:
        """Cut a chain back to where its guesses were right, or further where states cannot be."""
        sequence, residency = part.sequence, self.residency
        before = sequence.n_computed - n_kept
        if n_kept < part.n_tokens:
            sequence.n_computed = residency.cache.seq_rm(sequence.seq_id, sequence.n_computed)
        residency.snapshots.after_guesses(sequence, before)

    # A step that failed ------------------------------------------------------------------------

    def fail(self, batch: Batch, error: Exception) -> None:
        """End the requests of a batch whose forward raised; those outside of it go on.

        Where another cache took the memory between the choice of the batch and its step, nothing
        was claimed, and the next choice knows: then nobody ends.
        """
        for part in batch.parts:
            if part.is_tree:
                self._drop_tree(part.sequence)  # proposed, and never verified
            elif part.draft:
                self.residency.snapshots.after_guesses(part.sequence, part.sequence.n_computed)
        is_late = isinstance(error, CacheFullError) and self._n_late < MAX_LATE
        self._n_late = self._n_late + 1 if is_late else 0
        if not is_late:
            for part in batch.parts:
                self.end(part.sequence, "error", error=error)

    def abandon(self, error: Exception) -> None:
        """End every request with an error that may have left the books wrong.

        Nothing is published and no cell is touched: neither may be right.
        """
        for sequence in [*self.running, *self.waiting]:
            self._tell_end(sequence, "error", None, error)
        self.running.clear()
        self.waiting.clear()

    # Ends --------------------------------------------------------------------------------------

    def end(
        self,
        sequence: Sequence,
        reason: EndReason,
        *,
        finish: Finish | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a request, wherever it is, and tell it; what it computed stays reusable."""
        if self.speculator is not None:
            self.speculator.ended(sequence.request_id)
        spacing = self.residency.snapshots.spacing
        if spacing is not None and finish is not None and len(sequence.sampled):
            spacing.answered(len(sequence.sampled))
        self.residency.leave(sequence)
        for queue in (self.running, self.waiting):  # last: until then somebody has to be told
            if sequence in queue:
                queue.remove(sequence)
        self._tell_end(sequence, reason, finish, error)

    def end_without_kv(self, sequence: Sequence, error: Exception) -> None:
        """End a request whose KV is not to be reused, such as what gave logits without numbers."""
        self._drop_tree(sequence)
        self.residency.discard(sequence)
        self.end(sequence, "error", error=error)

    def end_full(self, sequence: Sequence) -> None:
        """End the only sequence left, which has no cell for its next token."""
        if sequence.stream is not None:
            sequence.stream.flush()
        self.end(sequence, "length", finish=cache_full(self.residency.cache))

    def _drop_tree(self, sequence: Sequence) -> None:
        """Free the cells of guesses that nobody verified."""
        if self._trees is not None and self._trees.has_tree(sequence.seq_id):
            self._trees.commit([], sequence.seq_id)

    # Events ------------------------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        """True if there is something to tell."""
        return bool(self._events)

    def events(self) -> list[Event]:
        """Return what there is to tell, once."""
        events, self._events = self._events, []
        return events

    def _tell_end(
        self,
        sequence: Sequence,
        reason: EndReason,
        finish: Finish | None,
        error: Exception | None,
    ) -> None:
        """Tell that a request has ended."""
        self.counts.finished += 1
        self._events.append(
            FinishEvent(
                sequence.request_id,
                reason,
                sequence.stream.text if sequence.stream is not None else "",
                tuple(sequence.sampled.tolist()),
                _usage_of(sequence),
                finish,
                error,
            )
        )


def _usage_of(sequence: Sequence) -> Usage | None:
    """Return what a request took; None where it never ran."""
    first = sequence.first_token_s
    if first is None:
        return None
    n = len(sequence.sampled)
    decode_s = sequence.last_token_s - first
    return Usage(
        prompt_tokens=sequence.n_prompt,
        cached_tokens=sequence.n_cached,
        completion_tokens=n,
        time_to_first_token_s=first - sequence.arrived_s,
        tokens_per_second=(n - 1) / decode_s if n > 1 and decode_s > 0 else None,
        drafted_tokens=sequence.n_drafted,
        accepted_tokens=sequence.n_accepted,
    )
