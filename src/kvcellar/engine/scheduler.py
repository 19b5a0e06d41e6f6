"""Who runs next: queues, admission, room, and what a step's tokens mean for each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvcellar.cache import TreeSeqCache
from kvcellar.engine.batch import BatchOutput, ScheduledBatch, ScheduledTokens, Verdict
from kvcellar.engine.draft import NO_DRAFT
from kvcellar.engine.generate import (
    Finish,
    GeneratedToken,
    Usage,
    finish_of,
    is_shown,
    out_of_tokens,
    stopped_by_text,
)
from kvcellar.engine.policy import Allotment, Policy
from kvcellar.engine.request import (
    Event,
    FinishEvent,
    PromptEvent,
    Request,
    Sequence,
    Status,
    TokenEvent,
)
from kvcellar.engine.residency import Residency
from kvcellar.engine.sampling import Choice, SamplingState
from kvcellar.engine.speculate import Speculator
from kvcellar.engine.text import TextStream
from kvcellar.errors import (
    CacheFullError,
    DeadlineError,
    KVCellarError,
    PromptError,
)
from kvcellar.types import IntArray

__all__ = ["Limits", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step.

    Attributes:
        max_num_batched_tokens: tokens in one forward.
        max_num_seqs: sequences that run at a time.
        max_positions: tokens of a sequence that may be computed, whatever the cache holds; None: as
            many as it has cells.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_positions: int | None = None


MIN_SHARED = 32
"""Tokens of a prefix that others just compute for which it is worth waiting."""


SCORED_BYTES = 32 << 20
"""Logits of prompts in one step, where log probabilities of prompts are asked for."""

MAX_LATE = 8
"""Steps in a row that may find their room taken before their requests end with the error."""


@dataclass(slots=True)
class SchedulerCounts:
    """What has happened so far."""

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queue_s: float = 0.0


@dataclass(slots=True, eq=False)
class Scheduler:
    """The waiting and the running, and the rules by which they change places.

    Waiting sequences join in order of priority and arrival, and none overtakes: what does not fit
    now waits, and a stream of small requests cannot starve a large one. When cells run out for the
    running ones, the last in that order gives way.
    """

    residency: Residency
    policy: Policy
    limits: Limits
    tokenizer: Any
    vocab_size: int
    eos_token_ids: Collection[int]
    speculator: Speculator | None = None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)
    _in_batch: dict[int, Sequence] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _step: int = 0
    _n_late: int = 0
    _trees: TreeSeqCache | None = None

    def __post_init__(self) -> None:
        cache = self.residency.cache
        self._trees = cache if isinstance(cache, TreeSeqCache) else None

    # Requests come and go ----------------------------------------------------------------------

    def add(self, request: Request, now: float) -> int:
        """Queue a request; return its id.

        Raises:
            PromptError: no tokens, tokens that the model does not have, or more than could ever
                fit; nothing was queued.
        """
        tokens = list(request.prompt_ids)
        self._check_prompt(tokens)
        request_id = next(self._ids)
        params = request.params
        sequence = Sequence(
            request_id=request_id,
            request=request,
            tokens=tokens,
            n_prompt=len(tokens),
            state=SamplingState(params, self.vocab_size, tokens, self.eos_token_ids),
            stream=TextStream(self.tokenizer, params.stop, context=tokens)
            if self.tokenizer is not None
            else None,
            arrived_s=now,
        )
        self.waiting.append(sequence)
        self.counts.requests += 1
        self.counts.prompt_tokens += len(tokens)
        return request_id

    def _check_prompt(self, tokens: list[int]) -> None:
        capacity = self.residency.cache.capacity
        if not tokens:
            raise PromptError(
                "the prompt has no tokens; give at least one, such as the model's BOS"
            )
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            raise PromptError(
                f"the prompt holds token id {low if low < 0 else high} and the model has ids 0 to "
                f"{self.vocab_size - 1}; encode the text with the model's own tokenizer"
            )
        if len(tokens) > capacity:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and the cache {capacity} cells, so it can "
                f"never fit; shorten it or {self.residency.cache.config.more_room}"
            )
        most = self.limits.max_positions
        if most is not None and len(tokens) > most:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and the model was made for {most} positions; "
                f"shorten it"
            )

    def cancel(self, request_id: int) -> bool:
        """End a request wherever it is; its finished prefill stays reusable. False: unknown."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.request_id == request_id:
                self._end(sequence, "cancelled")
                return True
        return False

    def publish(self, request_id: int) -> tuple[int, ...] | None:
        """Let others share what a request has computed so far; its tokens. None: unknown."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id == request_id:
                if sequence.seq_id >= 0:
                    self.residency.publish(sequence)
                return tuple(sequence.tokens)
        return None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits or runs, and no event is left to tell."""
        return not (self.waiting or self.running or self._events)

    # One step: before --------------------------------------------------------------------------

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Choose the next batch and make room for it; None where nothing can run."""
        self._step += 1
        self._expire(now)
        self._admit(now)
        self._draft()
        while self.running:
            allotments = self.policy.allot(self.running, self.limits.max_num_batched_tokens)
            if self._has_room(allotments):
                return self._batch(allotments)
            if len(self.running) == 1:
                if not self.residency.unlock(self.running[0]):
                    self._full(self.running[0])
            else:
                self._give_way()
        return None

    def _expire(self, now: float) -> None:
        for sequence in list(self.waiting):
            limit = sequence.request.deadline_s
            if limit is None or sequence.admitted_s is not None:
                continue
            waited = now - sequence.arrived_s
            if waited > limit:
                cache = self.residency.cache
                error = DeadlineError(
                    f"request {sequence.request_id} waited {waited:.2f} s of at most {limit:.2f} s "
                    f"for {len(sequence.tokens)} cells; {self.residency.n_available} were free or "
                    f"evictable of {cache.capacity}, {len(self.running)} requests running"
                )
                self._end(sequence, "deadline", error=error)

    def _admit(self, now: float) -> None:
        """Let waiting sequences join, in their order, as long as they fit."""
        if not self.policy.may_admit(self.waiting, self.running, now):
            return
        self.waiting.sort(key=lambda s: s.order)
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.max_num_seqs:
                return
            if self._awaits_prefix(sequence):
                continue
            if not self._fits(sequence):
                return
            if sequence.admitted_s is None:
                sequence.admitted_s = now
                self.counts.queue_s += now - sequence.arrived_s
            try:
                self.residency.enter(sequence)
            except KVCellarError as error:  # raised on purpose: nothing else was changed
                self._end_without_kv(sequence, error)
                continue
            self.waiting.remove(sequence)
            if not sequence.n_preemptions:
                sequence.n_cached = sequence.n_computed
            sequence.status = Status.RUNNING
            self.running.append(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is room for all of its tokens, besides what running ones still need.

        Their guesses count, as many as in the last step. A sequence that has the cache for itself
        is let in whatever it needs.
        """
        promised = sum(other.n_left + len(other.draft) for other in self.running)
        fresh = len(sequence.tokens) - self.residency.n_reusable(sequence)
        return not self.running or fresh + promised <= self.residency.n_available

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is just computing a prefix that this one could share.

        Then it waits for that instead of computing the same; the other is asked to publish there.
        """
        best, leader = self.residency.n_reusable(sequence) + MIN_SHARED - 1, None
        for other in self.running:
            if other.n_computed < other.n_prompt:
                n = _common_prefix(sequence.reusable, other.token_array())
                if n > best:
                    best, leader = n, other
        if leader is None:
            return False
        if leader.n_computed >= best:  # it is past that point and has not published it yet
            self.residency.publish(leader)
            return False
        leader.publish_at.add(best)
        return True

    def _draft(self) -> None:
        if self.speculator is not None:
            decoding = [sequence for sequence in self.running if sequence.is_decoding]
            n_others = sum(s.n_left for s in self.running if not s.is_decoding)
            most = self.limits.max_num_batched_tokens - len(decoding)
            self.speculator.propose(decoding, min(n_others, max(0, most)))
            if self.limits.max_positions is not None:
                for sequence in decoding:  # no guess is computed beyond the model's positions
                    n_left = self.limits.max_positions - len(sequence.tokens)
                    sequence.draft = sequence.draft.first(max(0, n_left))

    def _has_room(self, allotments: list[Allotment]) -> bool:
        """Make room for these tokens, giving up drafts before anyone's turn."""
        seq_ids = [a.sequence.seq_id for a in allotments for _ in range(a.n_tokens)]
        if self.residency.make_room_for(seq_ids):
            return True
        if any(a.sequence.draft for a in allotments):
            for sequence in self.running:
                sequence.draft = NO_DRAFT
            allotments[:] = self.policy.allot(self.running, self.limits.max_num_batched_tokens)
            return self._has_room(allotments)
        return False

    def _give_way(self) -> None:
        """The last in order stops running and waits until it fits again."""
        victim = max(self.running, key=lambda s: s.order)
        self.residency.leave(victim)
        self.running.remove(victim)
        victim.status = Status.WAITING
        victim.draft = NO_DRAFT
        victim.n_preemptions += 1
        victim.publish_at.clear()
        self.counts.preemptions += 1
        self.waiting.append(victim)

    def _batch(self, allotments: list[Allotment]) -> ScheduledBatch:
        parts: list[ScheduledTokens] = []
        self._in_batch = {}
        n_scored = max(1, SCORED_BYTES // (4 * self.vocab_size))
        for sequence, allotted in allotments:
            stops = [at for at in sequence.publish_at if at > sequence.n_computed]
            n = min([allotted, *(at - sequence.n_computed for at in stops)])
            if sequence.unscored(n):
                n = min(n, n_scored)
                n_scored -= n
                if not n:
                    continue
            tokens = sequence.tokens[sequence.n_computed : sequence.n_computed + n]
            draft = sequence.draft.first(n - len(tokens))
            is_last = sequence.n_computed + len(tokens) == len(sequence.tokens)
            sequence.last_step = self._step
            parts.append(
                ScheduledTokens(
                    sequence.request_id,
                    sequence.seq_id,
                    (*tokens, *draft.tokens),
                    is_last and sequence.is_sampled,
                    draft,
                    sequence.unscored(n),
                    sequence.request.prompt_logprobs or 0,
                )
            )
            self._in_batch[sequence.request_id] = sequence
        return ScheduledBatch(tuple(parts))

    # One step: after ---------------------------------------------------------------------------

    def states_of(self, batch: ScheduledBatch) -> list[SamplingState]:
        """The sampling state of every part of the batch that has caught up."""
        return [self._in_batch[p.request_id].state for p in batch.parts if p.is_last]

    def record(
        self, batch: ScheduledBatch, output: BatchOutput, started: float, now: float
    ) -> list[Event]:
        """Take a step's tokens into the sequences; return what there is to tell."""
        self._n_late = 0
        n_prefill = first_row = 0
        for part, verdict in zip(batch.parts, output.verdicts, strict=True):
            sequence = self._in_batch[part.request_id]
            was_prefill = not sequence.is_decoding
            n_prefill += part.n_known if was_prefill else 0
            if verdict.error is not None:
                self._end_without_kv(sequence, verdict.error)
                first_row += len(part.token_ids)
                continue
            start = sequence.n_computed
            finish, error = None, None
            self._read(sequence, part, verdict)
            try:
                finish = self._take(sequence, verdict, now)
            except Exception as raised:  # its grammar or the tokenizer: nobody else's trouble
                error = raised
            rows = self._keep_computed(sequence, part, verdict)
            if not sequence.is_sampled and not sequence.n_left:
                sequence.first_token_s = sequence.last_token_s = now
                finish = out_of_tokens(sequence.state)
            if self.speculator is not None:
                self.speculator.learn(part.request_id, [c.token_id for c in verdict.choices])
                if output.features is not None:
                    at = [first_row + row for row in rows]
                    self.speculator.saw(part.request_id, start, output.features[at])
            first_row += len(part.token_ids)
            if was_prefill and (part.is_last or sequence.n_computed in sequence.publish_at):
                self.residency.publish(sequence)
                sequence.publish_at = {n for n in sequence.publish_at if n > sequence.n_computed}
            if error is not None:
                self._end(sequence, "error", error=error)
            elif finish is not None:
                self._end(sequence, finish.reason, finish=finish)
        self.policy.ran(n_prefill, started, now - started)
        if self.speculator is not None:
            self.speculator.ran(batch.n_tokens, now - started)
        return self.events()

    def _keep_computed(
        self, sequence: Sequence, part: ScheduledTokens, verdict: Verdict
    ) -> list[int]:
        """Keep the KV of what the sequence goes on with, drop wrong guesses'; which tokens stay.

        Where it ends before its last accepted guess, the guesses behind the end go too.
        """
        n_known = part.n_known
        n_new = len(sequence.tokens) - sequence.n_computed - n_known
        rows = [*range(n_known), *(n_known + node for node in verdict.accepted[:n_new])]
        self.counts.computed_tokens += len(part.token_ids)
        sequence.n_computed += len(rows)
        if part.draft:
            self.counts.drafted_tokens += len(part.draft)
            self.counts.accepted_tokens += len(verdict.accepted)
            sequence.n_drafted += len(part.draft)
            sequence.n_accepted += len(verdict.accepted)
        if part.is_tree:
            assert self._trees is not None
            self._trees.commit(rows, sequence.seq_id)
        elif len(rows) < len(part.token_ids):
            self.residency.cache.seq_rm(sequence.seq_id, sequence.n_computed)
        return rows

    def _read(self, sequence: Sequence, part: ScheduledTokens, verdict: Verdict) -> None:
        """Take the log probabilities of a prompt's tokens; tell them once it is read whole."""
        sequence.scores[sequence.n_computed :] = verdict.scores
        is_whole = sequence.n_computed + part.n_known == sequence.n_prompt
        is_told = sequence.request.prompt_logprobs is None or sequence.first_token_s is not None
        if is_whole and not is_told:
            self._events.append(PromptEvent(sequence.request_id, tuple(sequence.scores)))

    def _take(self, sequence: Sequence, verdict: Verdict, now: float) -> Finish | None:
        """Let a sequence go on with what was chosen, up to where it ends; why it does."""
        for choice in verdict.choices:
            finish = self._take_one(sequence, choice, now)
            if finish is not None:
                return finish
        return None

    def _take_one(self, sequence: Sequence, choice: Choice, now: float) -> Finish | None:
        """One more token of a sequence; the cause if it ends with it."""
        sequence.state.record(choice.token_id)
        sequence.tokens.append(choice.token_id)
        self.counts.sampled_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        sequence.last_token_s = now
        text = ""
        stream = sequence.stream
        finish = finish_of(choice.token_id, sequence.state, self.eos_token_ids)
        finish = finish or self._out_of_positions(sequence)
        if stream is not None:
            if is_shown(finish):
                text = stream.push(choice.token_id)
                finish = stopped_by_text(stream) or finish
            if finish is not None:
                text += stream.flush()
        token = GeneratedToken(choice.token_id, text, choice.logprob, choice.top_logprobs)
        self._events.append(TokenEvent(sequence.request_id, token))
        return finish

    def _out_of_positions(self, sequence: Sequence) -> Finish | None:
        """Whether the model has no position for the token that was sampled last."""
        most = self.limits.max_positions
        if most is None or len(sequence.tokens) <= most:
            return None
        return Finish("length", "context_full", f"the model's context of {most} tokens is full")

    def fail(self, batch: ScheduledBatch, error: Exception) -> list[Event]:
        """End the requests of a batch whose forward raised; the others do not notice.

        Where another cache took the memory between the choice of the batch and its step, nothing
        was claimed, and the next choice knows: then nobody ends.
        """
        for part in batch.parts:
            if self._trees is not None and part.is_tree and self._trees.has_tree(part.seq_id):
                self._trees.commit([], part.seq_id)  # proposed, and never verified
        is_late = isinstance(error, CacheFullError) and self._n_late < MAX_LATE
        self._n_late = self._n_late + 1 if is_late else 0
        if is_late:
            return self.events()
        for part in batch.parts:
            self._end(self._in_batch[part.request_id], "error", error=error)
        return self.events()

    def abandon(self, error: Exception) -> None:
        """End every request with an error that may have left the books wrong.

        Nothing is published and no cell is touched: neither may be right.
        """
        for sequence in [*self.running, *self.waiting]:
            sequence.status = Status.ENDED
            self._tell_end(sequence, "error", error=error)
        self.running.clear()
        self.waiting.clear()

    def events(self) -> list[Event]:
        """What there is to tell, once."""
        events, self._events = self._events, []
        return events

    def _full(self, sequence: Sequence) -> None:
        """The only sequence left has no cell for its next token."""
        cache = self.residency.cache
        finish = Finish(
            "length",
            "cache_full",
            f"the cache is full: no cell is free of {cache.capacity}; {cache.config.more_room}",
        )
        if sequence.stream is not None:
            sequence.stream.flush()
        self._end(sequence, "length", finish=finish)

    def _end(
        self,
        sequence: Sequence,
        reason: Literal["stop", "length", "cancelled", "deadline", "error"],
        *,
        finish: Finish | None = None,
        error: Exception | None = None,
    ) -> None:
        if self.speculator is not None:
            self.speculator.ended(sequence.request_id)
        self.residency.leave(sequence)
        sequence.status = Status.ENDED
        for queue in (self.running, self.waiting):  # last: until then somebody has to be told
            if sequence in queue:
                queue.remove(sequence)
        self._tell_end(sequence, reason, finish=finish, error=error)

    def _end_without_kv(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence whose KV is not to be reused, such as what gave logits without numbers."""
        if self._trees is not None and self._trees.has_tree(sequence.seq_id):
            self._trees.commit([], sequence.seq_id)
        self.residency.discard(sequence)
        self._end(sequence, "error", error=error)

    def _tell_end(
        self,
        sequence: Sequence,
        reason: Literal["stop", "length", "cancelled", "deadline", "error"],
        *,
        finish: Finish | None = None,
        error: Exception | None = None,
    ) -> None:
        self.counts.finished += 1
        self._events.append(
            FinishEvent(
                sequence.request_id,
                reason,
                sequence.stream.text if sequence.stream is not None else "",
                tuple(sequence.sampled),
                self._usage(sequence),
                finish,
                error,
            )
        )

    def _usage(self, sequence: Sequence) -> Usage | None:
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


def _common_prefix(a: IntArray, b: IntArray) -> int:
    """How many tokens two prompts begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
