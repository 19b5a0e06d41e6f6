"""Schedules requests: queues, admission, room, and the batch of the next step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcellar.engine.kv.residency import Residency, most_expected
from kvcellar.engine.loop.generating import check_tokens
from kvcellar.engine.loop.text import TextStream
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.engine.requests.batch import Batch, BatchPart, Verdict
from kvcellar.engine.requests.draft import NO_DRAFT
from kvcellar.engine.requests.request import Event, PromptProgress, Request, Sequence
from kvcellar.engine.sampler.sampling import SamplingState
from kvcellar.engine.schedule.outcomes import Outcomes
from kvcellar.engine.schedule.policy import Policy
from kvcellar.errors import DeadlineError, KVCellarError, PictureError, PromptError
from kvcellar.history import History
from kvcellar.models.seeing import unseen
from kvcellar.pictures.tokens import ids_of
from kvcellar.space import LONG

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step.

    Attributes:
        max_num_batched_tokens: tokens in one forward.
        max_num_seqs: sequences in one forward. Those that await a picture run beside them.
        max_positions: tokens of a sequence that may be computed, whatever the cache holds; None: as
            many as it has cells.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_positions: int | None = None


MIN_SHARED = 32
"""Tokens of a prefix that others just compute for which it is worth waiting."""


PICTURE_WAIT_S = 0.02
"""Seconds after which an engine that waits for pictures alone looks for new requests."""

SCORED_BYTES = 32 << 20
"""Logits of prompts in one step, where log probabilities of prompts are asked for."""


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
    outcomes: Outcomes
    """Ends requests and tells what came of them; it has the queues too."""
    tokenizer: Any
    vocab_size: int
    rows: PictureRows | None = None
    """Rows of pictures; None: the model reads none."""
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _step: int = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, those that had to give way among them."""
        return self.outcomes.waiting

    @property
    def running(self) -> list[Sequence]:
        """Sequences that run."""
        return self.outcomes.running

    # Requests come and go ----------------------------------------------------------------------

    def add(self, request: Request, now: float) -> int:
        """Queue a request; return its id.

        Raises:
            PromptError: no tokens, tokens that the model does not have, or more than could ever
                fit; nothing was queued.
            PictureError: it has pictures and the model reads none, or scores of them are asked for.
        """
        tokens = request.prompt_ids
        ids = History(ids_of(tokens.tokens))
        self._check_prompt(ids)
        request_id = next(self._ids)
        params = request.params
        sequence = Sequence(
            request_id=request_id,
            request=request,
            tokens=History(tokens),
            n_prompt=len(tokens),
            state=SamplingState(params, self.vocab_size, ids, self.outcomes.eos_token_ids),
            stream=TextStream(self.tokenizer, params.stop, ids, request.marks, request.finder)
            if self.tokenizer is not None
            else None,
            arrived_s=now,
        )
        self._check_pictures(sequence)
        self.waiting.append(sequence)
        self.outcomes.counts.requests += 1
        self.outcomes.counts.prompt_tokens += len(tokens)
        return request_id

    def _check_prompt(self, tokens: History) -> None:
        """Refuse a prompt that can never fit, whoever has asked.

        ``hosting.text_limits`` says it sooner of long texts, ``check_context`` of the server in a
        protocol's words.

        Raises:
            PromptError: so it is, or a token is none of the model's.
        """
        check_tokens(tokens, self.vocab_size)
        capacity = self.residency.cache.capacity
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

    def _check_pictures(self, sequence: Sequence) -> None:
        """Refuse pictures that nobody can read.

        Raises:
            PictureError: so they are.
        """
        if not sequence.pictures:
            return
        if self.rows is None:
            raise unseen(len(sequence.pictures))
        if not all(one.name for one in sequence.pictures):
            raise PictureError("the prompt ends inside of a picture; end it before or behind it")
        if sequence.request.prompt_logprobs is not None:
            raise PictureError(
                "log probabilities of a prompt are told of text alone, and this prompt has "
                "pictures; leave prompt_logprobs out"
            )

    def cancel(self, request_id: int) -> bool:
        """End a request wherever it is; its finished prefill stays reusable. False: unknown."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.request_id == request_id:
                self.outcomes.end(sequence, "cancelled")
                return True
        return False

    def publish(self, request_id: int) -> History | None:
        """Let others share what a request has computed so far; return its tokens.

        None: it is unknown.
        """
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id == request_id:
                if sequence.seq_id >= 0:
                    self.residency.publish(sequence)
                return History(sequence.tokens)
        return None

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        """Return how far the prompt of a request is read; None: it is unknown."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id == request_id:
                n_read = min(sequence.n_computed, sequence.n_prompt)
                return PromptProgress(n_read, sequence.n_prompt, min(sequence.n_cached, n_read))
        return None

    @property
    def is_idle(self) -> bool:
        """True if nobody waits or runs, and no event is left to tell."""
        return not (self.waiting or self.running or self.outcomes.has_events)

    # One step: before --------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | None:
        """Choose the next batch, evict what it needs cells of, and let those wait that do not fit.

        None: nothing can run.
        """
        self._step += 1
        self._turn_anew()
        self._expire(now)
        self._admit(now)
        self._draft()
        while self.running:
            parts = self._allot()
            if not parts:
                self._await_rows()
                return None
            if self._has_room(parts):
                return self._batch(parts)
            if len(self.running) == 1:
                if not self.residency.unlock(self.running[0]):
                    self.outcomes.end_full(self.running[0])
            else:
                self._give_way()
        return None

    def _allot(self) -> list[BatchPart]:
        """Divide the step's tokens among those that can go on, as far as their pictures are there.

        Where all of a picture has to be in one step, the first of them may have more than there is
        to divide; others wait then.
        """
        running, budget = self.running, self.limits.max_num_batched_tokens
        if self.rows is None or not any(sequence.pictures for sequence in running):
            return self.policy.allot(running, budget)
        self.rows.begin_step()
        for one in list(running):
            one.awaits_rows = bool(one.pictures) and not self._n_ready(one, 1)
        able = [one for one in running if not one.awaits_rows]
        if len(able) > self.limits.max_num_seqs:  # others came while these had to wait
            able = sorted(able, key=lambda s: s.last_step)[: self.limits.max_num_seqs]
        found: list[BatchPart] = []
        left, is_beyond = budget, False
        for part in self.policy.allot(able, budget):
            n = part.n_tokens
            if part.sequence.pictures:
                n = self._n_ready(part.sequence, n)
                if n > max(left, part.n_tokens):
                    n, is_beyond = (0 if is_beyond else n), True
            if n:
                found.append(part if n == part.n_tokens else BatchPart(part.sequence, n))
                left -= n
        return found

    def _n_ready(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of a sequence's next tokens can be computed now.

        Those before a picture whose rows are still to come; where rows see each other both ways,
        all of a picture or none. A sequence whose picture cannot be encoded ends, alone.
        """
        assert self.rows is not None, "asked where pictures are read"
        start = sequence.n_computed
        stop, needed = self._whole(sequence, start + n_tokens), {}
        for placed in sequence.pictures:
            if placed.stop <= start:
                continue
            if placed.start >= stop:
                break
            found = sequence.rows.get(placed.name)
            try:
                found = found or self.rows.take(placed.name, sequence.space.salt)
            except Exception as error:
                self.outcomes.end(sequence, "error", error=error)
                return 0
            if found is None:
                stop = max(start, placed.start)
                break
            needed[placed.name] = found
        sequence.rows = needed
        return stop - start

    def _whole(self, sequence: Sequence, stop: int) -> int:
        """Return where a step of a sequence that would end at a place ends: not inside a picture.

        Where all rows of one have to be in the same step.
        """
        if self.residency.is_whole:
            for placed in sequence.pictures:
                if placed.start < stop < placed.stop:
                    is_behind = placed.start > sequence.n_computed
                    return placed.start if is_behind else placed.stop
        return stop

    def _await_rows(self) -> None:
        """Wait a little where all that runs waits for pictures."""
        if self.rows is not None and self.running:
            self.rows.wait(PICTURE_WAIT_S)

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
                self.outcomes.end(sequence, "deadline", error=error)

    def _turn_anew(self) -> None:
        """Take sequences out of the running that have become longer than RoPE was made for.

        Their K was turned by the factors of short texts. It stays for those who go back there, and
        they come again as long ones: all of their tokens are computed by the others' factors.
        """
        for sequence in list(self.running):
            if sequence.space != self.residency.space_of(sequence):
                self.residency.leave(sequence)
                self._wait_again(sequence)

    def _admit(self, now: float) -> None:
        """Let waiting sequences join, in their order, as long as they fit."""
        if not self.policy.may_admit(self.waiting, self.running, now):
            return
        self.waiting.sort(key=lambda s: s.order)
        for sequence in list(self.waiting):
            if sum(not s.awaits_rows for s in self.running) >= self.limits.max_num_seqs:
                return
            if self._awaits_prefix(sequence):
                continue
            if not self._fits(sequence):
                return
            if sequence.admitted_s is None:
                sequence.admitted_s = now
            try:
                self.residency.enter(sequence)
            except KVCellarError as error:  # raised on purpose: nothing else was changed
                self.outcomes.end_without_kv(sequence, error)
                continue
            self.waiting.remove(sequence)
            if not sequence.n_preemptions:
                sequence.n_cached = sequence.n_computed
            sequence.n_cached = min(sequence.n_cached, sequence.n_computed)  # the rest comes again
            self.running.append(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """Return true if all of its tokens, and its states, fit besides what running ones need.

        Their guesses count, as many as in the last step. A sequence that has the cache for itself
        is let in whatever it needs.
        """
        if not self.residency.has_slots_for(len(self.running) + 1):
            return False
        promised = sum(other.n_left + len(other.draft) for other in self.running)
        fresh = len(sequence.tokens) - self.residency.n_reusable(sequence)
        if self.running and fresh + promised > self.residency.n_available:
            return False
        return not self._costs_snapshots(sequence)

    def _costs_snapshots(self, sequence: Sequence) -> bool:
        """Return true if running beside others would cost more in snapshots than it saves.

        A sequence's slots take the place of snapshots. Beside k others it, and who comes after it,
        saves one in k of the forwards that they still need. Where computing again what goes would
        take longer, such as a trunk that all who wait begin with, it waits until fewer run or they
        prove to need more. None overtakes it meanwhile, and who would have the cache for
        itself never waits, so nobody starves. Before it is known what a forward takes, snapshots
        stay.
        """
        spacing, n_running = self.residency.snapshots.spacing, len(self.running)
        if spacing is None or not n_running:
            return False
        pushed_out = self.residency.pushes_out(sequence, n_running)
        if not pushed_out:
            return False
        n_left = max(spacing.answer_left(most_expected(s), len(s.sampled)) for s in self.running)
        return pushed_out > spacing.prompt_tokens(n_left / n_running)

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Return true if a running sequence is just computing a prefix that this one can share.

        Then it waits for that instead of computing the same; the other is asked to publish there.
        """
        best, leader = self.residency.n_reusable(sequence) + MIN_SHARED - 1, None
        snapshots = self.residency.snapshots
        for other in self.running:
            is_alike = other.space == self.residency.space_of(sequence)
            if is_alike and other.n_computed < other.n_prompt:
                n = snapshots.aligned(other.tokens.common_prefix(sequence.reusable))
                if snapshots.has_states and other.n_computed > n:
                    continue  # it has passed there, and no states were kept
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
        """Let guesses be made for the sequences that decode."""
        speculator = self.outcomes.speculator
        if speculator is not None:
            # what states go through again comes alone: guesses behind it would put that off
            for sequence in self.running:
                sequence.draft = NO_DRAFT
            decoding = [s for s in self.running if s.is_decoding and not s.n_again]
            n_others = sum(s.n_left for s in self.running if s.n_again or not s.is_decoding)
            most = self.limits.max_num_batched_tokens - len(decoding)
            speculator.propose(decoding, min(n_others, max(0, most)))
            n_nodes = self.residency.snapshots.most_nodes(decoding, len(self.running))
            for sequence in decoding:
                n_left = n_nodes
                if self.limits.max_positions is not None:  # the model was made for no more
                    n_left = min(n_left, self.limits.max_positions - len(sequence.tokens))
                if self.residency.rope_border and sequence.space.rope != LONG:
                    n_left = min(n_left, self.residency.rope_border - len(sequence.tokens))
                sequence.draft = sequence.draft.first(max(0, n_left))

    def _has_room(self, parts: list[BatchPart]) -> bool:
        """Make room for these tokens, giving up drafts, and states kept, before anyone's turn."""
        is_tree = self.residency.snapshots.is_tree
        n_slots = sum(part.n_tokens if is_tree(part.draft) else 1 for part in parts)
        if self.residency.make_room_for(Batch(tuple(parts)).stretches, n_slots):
            return True
        if any(part.draft for part in parts):
            for sequence in self.running:
                sequence.draft = NO_DRAFT
            parts[:] = self._allot()
            return self._has_room(parts)
        if any(self.residency.snapshots.give_up_point(one) for one in self.running):
            return self._has_room(parts)
        return False

    def _give_way(self) -> None:
        """Take the last in order out of the running; it waits until it fits again."""
        victim = max(self.running, key=lambda s: s.order)
        self.residency.give_way(victim)
        self._wait_again(victim)
        self.outcomes.counts.preemptions += 1

    def _wait_again(self, sequence: Sequence) -> None:
        """Take a sequence that has left the cache from the running to the waiting."""
        self.running.remove(sequence)
        sequence.draft, sequence.awaits_rows = NO_DRAFT, False
        sequence.n_preemptions += 1
        sequence.publish_at.clear()
        self.waiting.append(sequence)

    def _batch(self, parts: list[BatchPart]) -> Batch:
        """Return the batch of these parts, shorter ones where a step is to end before."""
        snapshots, chosen = self.residency.snapshots, []
        n_scored = max(1, SCORED_BYTES // (4 * self.vocab_size))
        for part in parts:
            n = snapshots.chunk(part.sequence, part.n_tokens, len(self.running))
            n = self._whole(part.sequence, part.sequence.n_computed + n) - part.sequence.n_computed
            if len(part.targets):
                n = min(n, n_scored)
                n_scored -= n
                if not n:
                    continue
            if n < part.n_tokens:
                part = BatchPart(part.sequence, n)
            part.is_tree = snapshots.is_tree(part.draft)
            part.sequence.last_step = self._step
            chosen.append(part)
        return Batch(tuple(chosen))

    # One step: after ---------------------------------------------------------------------------

    def record(
        self,
        batch: Batch,
        verdicts: list[Verdict],
        features: FloatArray | None,
        started: float,
        now: float,
    ) -> list[Event]:
        """Take a step's tokens into the sequences; return what there is to tell.

        Args:
            batch: what was computed.
            verdicts: per part what its sequence goes on with.
            features: ``[T, n_features]`` of all tokens, where a drafter reads them.
            started: seconds, when the step began.
            now: seconds.
        """
        n_prefill = self.outcomes.take(batch, verdicts, features, now)
        self.policy.ran(n_prefill, started, now - started)
        if self.residency.offload is not None:
            self.residency.offload.ran(n_prefill, now - started)
        if self.residency.snapshots.spacing is not None:
            self.residency.snapshots.spacing.ran(batch.n_tokens, n_prefill, now - started)
        if self.outcomes.speculator is not None:
            self.outcomes.speculator.ran(batch.n_tokens, now - started)
        return self.outcomes.events()
