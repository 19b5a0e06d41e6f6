"""An agent's KV on its way: out of the store into cells, out of cells into the store.

What touches the cache runs in the engine's thread, between two steps; what waits for a disk runs in
another, a few blocks ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from kvcellar.agents.kv.kv_transfer import (
    CellRows,
    boundary_positions,
    write_boundaries,
    write_loaded,
)
from kvcellar.agents.kv.overlap_restore import Front, ReadAhead
from kvcellar.agents.kv.verify_restore import MAX_TAIL, check_restored
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.engine import (
    Engine,
    HeldPrefix,
    Restore,
    RowCache,
)
from kvcellar.errors import EngineClosedError
from kvcellar.history import History
from kvcellar.hosting.costs import Estimate
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.memory import IN_FLIGHT
from kvcellar.pictures.tokens import usable
from kvcellar.store import BoundaryState, Loaded, Match, SaveTicket, Store
from kvcellar.types import IntArray

ProgressFn = Callable[[float, str], None]
T = TypeVar("T")

MIN_GAIN = 16
"""Tokens below which nothing is restored."""

MAX_ATTEMPTS = 3

SLOTS_TO_VERIFY = 4
"""Slots that verifying states takes: of earlier, restored and computed ones, and a spare."""

PATIENCE_S = 2.0
"""How long to wait for cells where nobody knows what computing takes, or it was asked for."""

ROOM_POLL_S = 0.01


@dataclass(slots=True, eq=False)
class BroughtBack:
    """Cells of a history that are in the cache now, protected until ``release``.

    Attributes:
        n_cached: tokens that were in the cache.
        n_restored: tokens that came from the store.
        n_computed: tokens that were computed while others were loaded.
        n_known: tokens that the cache or the store could have given.
        n_matched: tokens whose rows were in the cache or the store: more than ``n_cached`` where no
            snapshot of states was left to go on from there.
        load_s: seconds that loading took; 0 where nothing was loaded.
        is_recomputed: whether computing was expected to be faster, or turned out so.
        tiers: tokens restored, by tier.
        is_exact: whether what was restored is bit for bit what was saved, and never had 8 bits.
        n_verified: restored rows that were computed again and agreed; None where nobody asked.
        trouble: what went wrong on the way, if anything: less was restored, nothing is wrong.
    """

    n_cached: int
    n_restored: int = 0
    n_computed: int = 0
    n_known: int = 0
    n_matched: int = 0
    load_s: float = 0.0
    is_recomputed: bool = False
    tiers: dict[str, int] = field(default_factory=dict)
    is_exact: bool = True
    n_verified: int | None = None
    trouble: str = ""
    _held: HeldPrefix | None = None

    def lacks_snapshot(self, n_cached: int) -> bool:
        """Return true if rows behind the first ``n_cached`` tokens were there, and no states."""
        return self.n_matched > n_cached and not self.n_computed and not self.is_recomputed

    def release(self, host: ModelHost) -> Future[None] | None:
        """Let it be evicted again; a request that runs on it protects it by itself."""
        held, self._held = self._held, None
        if held is None:
            return None
        with contextlib.suppress(EngineClosedError):  # then there is no cache to evict from
            return host.service.run(lambda _: held.release())
        return None


async def bring_back(
    host: ModelHost,
    store: Store,
    tokens: History,
    *,
    is_wanted: bool = False,
    is_verified: bool = False,
    progress: ProgressFn | None = None,
) -> BroughtBack:
    """Have as much of a history in the cache as is worth it, before its next turn is queued.

    Where loading is expected to be slower than computing, or turns out so, the rest is left to be
    computed. A block that is gone or damaged ends it there; nothing wrong gets into the cache.
    Where running requests hold the cells, it waits for them as long as loading would save time.

    Args:
        host: the model.
        store: what may hold it.
        tokens: the history, without the last token of a prompt: its logits are wanted.
        is_wanted: load it whatever is faster.
        is_verified: compute a few of the rows again first; where they differ, what they came from
            is put away, nothing is restored, and an event and ``trouble`` say so.
        progress: told how much is loaded.
    """
    job = _Job(host, store, tokens, is_wanted, is_verified, progress)
    async with host.restoring:
        work = asyncio.ensure_future(asyncio.to_thread(job.run))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            job.cancel()
            with contextlib.suppress(Exception):
                await asyncio.shield(work)  # who is cancelled again waits no longer
            raise


@dataclass(slots=True, eq=False)
class _Job:
    """One history on its way into the cache; runs in a thread of its own."""

    host: ModelHost
    store: Store
    tokens: History
    is_wanted: bool
    is_verified: bool
    progress: ProgressFn | None
    is_cancelled: bool = False
    blocks: list[Loaded] = field(default_factory=list)
    """Blocks that were loaded, in their order, without their rows."""
    _result: BroughtBack | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Want it no more: what came, or still comes, is released. In any thread."""
        with self._lock:
            self.is_cancelled = True
            if self._result is not None:
                self._result.release(self.host)

    def run(self) -> BroughtBack:
        """Bring it back; see ``bring_back``."""
        result = self._run()
        with self._lock:
            self._result = result
            if self.is_cancelled:
                result.release(self.host)
        return result

    def _run(self) -> BroughtBack:
        started = time.perf_counter()
        held = self._call(lambda engine: engine.hold(self.tokens.tokens, self.host.space))
        result = BroughtBack(
            held.n_tokens, n_known=held.n_tokens, n_matched=held.n_matched, _held=held
        )
        if held.n_tokens + MIN_GAIN > len(self.tokens):
            return result
        try:
            self._fill(held, result)
        except EngineClosedError:
            raise
        except Exception as error:  # whatever is wrong with a disk, the turn can be computed
            result.trouble = f"nothing more could be restored: {type(error).__name__}: {error}"
        if result.n_restored:
            result.load_s = time.perf_counter() - started
        return result

    def _fill(self, held: HeldPrefix, result: BroughtBack) -> None:
        """Load what is worth loading."""
        match = self._match()
        limit = match.n_tokens
        result.n_known = max(held.n_tokens, match.n_resumable)
        if self.host.key.layout.state is not None and result.n_known == held.n_tokens:
            result.n_matched = max(held.n_matched, match.n_tokens)
        for _ in range(MAX_ATTEMPTS):
            stop = match.resumable_at(limit)
            if stop < held.n_tokens + MIN_GAIN or self.is_cancelled:
                break
            estimate = self.host.costs.estimate(match, held.n_tokens, held.n_rows, stop)
            is_split = held.n_rows == held.n_tokens and not self.is_wanted
            first = self._split(estimate, held.n_tokens, stop) if is_split else 0
            if not self.is_wanted and not estimate.is_restore_faster and not first:
                self.host.costs.declined()
                result.is_recomputed = True
                break
            boundaries = self._boundaries(match, limit)
            if boundaries is None:
                break
            stop = boundaries[-1].n_tokens if boundaries else stop
            is_guess = self.is_wanted or estimate.prefill_s is None
            patience_s = PATIENCE_S if is_guess else estimate.gain_s
            limit = self._load(match, first, stop, boundaries, result, patience_s)
            if result.n_restored or result.is_recomputed or not boundaries:
                break

    def _match(self) -> Match:
        """Find what is stored of the history; of states, those behind whole blocks of the cache."""
        match, size = (
            self.store.match(self.host.key, self.tokens),
            self.host.engine.cache.block_size,
        )
        if size == 1 or self.host.key.layout.state is None:
            return match
        usable = tuple(point for point in match.boundaries if point.info.stop % size == 0)
        return replace(match, boundaries=usable)

    def _boundaries(self, match: Match, limit: int) -> list[BoundaryState] | None:
        """Load the boundary state to go on from; [] where a model needs none, None without any.

        One of states is verified from an earlier one, which comes first.
        """
        layout = self.host.key.layout
        if not layout.has_boundaries:
            return []
        started = time.perf_counter()
        last = self.store.load_boundary(match, limit)
        if last is None:
            return None
        seconds = time.perf_counter() - started
        self.host.costs.learn_load(last.tier, last.size_bytes, seconds)
        has_slots = self.host.engine.cache.config.n_slots >= SLOTS_TO_VERIFY
        is_verified = self.is_verified or self.store.is_unproven(last.address)
        if is_verified and layout.state is not None and has_slots:
            earlier = self.store.load_boundary(match, last.n_tokens - 1)
            if earlier is not None and last.n_tokens - earlier.n_tokens <= MAX_TAIL:
                return [earlier, last]
        return [last]

    def _load(
        self,
        match: Match,
        first: int,
        stop: int,
        boundaries: Sequence[BoundaryState],
        result: BroughtBack,
        patience_s: float,
    ) -> int:
        """Load up to ``stop`` and publish what came; returns how far it came.

        What lies before ``first`` is computed meanwhile.
        """
        layout = self.host.key.layout
        self.blocks.clear()
        wanted = boundary_positions(layout, boundaries)
        restore = self._claim(self.tokens[:stop], wanted, first, patience_s)
        if restore is None:
            return 0
        at = restore.first if layout.full_groups else stop
        front: Front | None = None
        try:
            if not restore.has_beginning:
                front = Front(self.host, self.tokens[: restore.first])
            self._call(lambda _: write_boundaries(restore, layout, boundaries))
            if layout.full_groups:
                at = self._stream(restore, match, stop, result)
            if front is not None:
                computed = front.wait(lambda: self.is_cancelled)
                self._call(lambda _: restore.stand_on(computed))
                result.n_computed = max(0, computed.n_tokens - result.n_cached)
                if not restore.has_beginning:
                    return 0
            if at < stop and boundaries:
                return at
            addresses = [block.address for block in self.blocks]
            addresses += [boundary.address for boundary in boundaries]
            unproven = [one for one in addresses if self.store.is_unproven(one)]
            is_verified = self.is_verified or bool(unproven)
            if is_verified and not self._verify(restore, boundaries, at, unproven, result):
                return 0
            held = self._call(lambda _: restore.publish(at))
            result.release(self.host)
            result._held = held
            result.n_restored = max(0, held.n_tokens - result.n_cached - result.n_computed)
            if boundaries and not result.tiers:  # all rows were there, and only states came
                result.tiers[boundaries[-1].tier] = result.n_restored
            return at
        finally:
            if front is not None:
                front.stop()
            self._call(lambda _: restore.give_up())

    def _split(self, estimate: Estimate, n_cached: int, stop: int) -> int:
        """Return where loading begins, behind what is computed meanwhile; 0: load everything."""
        step = math.lcm(self.host.key.layout.block_tokens, self.host.engine.cache.block_size)
        start = -(-n_cached // step) * step
        if stop - start < 2 * step:
            return 0
        n = estimate.n_to_compute(stop - start, step)
        is_whole = self.host.engine.scheduler.residency.is_whole
        while n and usable(self.tokens.tokens, start + n, is_whole=is_whole) != start + n:
            n -= step  # what is computed meanwhile does not end inside of a picture
        return start + n if n > 0 else 0

    def _claim(
        self, tokens: IntArray, windows: list[IntArray | None], first: int, patience_s: float
    ) -> Restore | None:
        """Claim cells for what is to come; wait while requests are running that will free some.

        The turn itself could not begin either before they do.
        """

        def begin(engine: Engine) -> tuple[Restore | None, bool]:
            return engine.restore(tokens, windows, first, self.host.space), engine.is_running

        deadline = time.perf_counter() + patience_s
        while True:
            restore, may_come = self._call(begin)
            if restore is not None or not may_come or self.is_cancelled:
                return restore
            if time.perf_counter() > deadline:
                return None
            time.sleep(ROOM_POLL_S)

    def _verify(
        self,
        restore: Restore,
        boundaries: Sequence[BoundaryState],
        stop: int,
        unproven: Sequence[bytes],
        result: BroughtBack,
    ) -> bool:
        """Return true if the rows are what the model computes; what is wrong is put away.

        Of what was imported all goes with one that is wrong, and where nothing can be computed
        again: rows behind an invented one are made to fit it.
        """
        layout, blocks = self.host.key.layout, self.blocks
        finding = self._call(
            lambda engine: check_restored(
                restore,
                engine.runner,
                layout,
                blocks,
                boundaries,
                stop,
                at_random=bool(unproven),
            )
        )
        bad = dict(finding.bad)
        if bad or not finding.n_checked:
            why = next(iter(bad.values()), "it was imported, and no row can be computed again")
            bad |= {address: why for address in unproven if address not in bad}
        for address, why in bad.items():
            self.store.reject(address, why)
        if bad:
            result.tiers.clear()
            result.trouble = (
                f"{len(bad)} stored blocks are not what this model computes and were put "
                f"away, so the history is computed again: {next(iter(bad.values()))}"
            )
            return False
        for address in unproven:
            self.store.prove(address)
        result.n_verified = finding.n_checked
        return True

    def _stream(self, restore: Restore, match: Match, stop: int, result: BroughtBack) -> int:
        """Bring blocks from the store to the cells, read a few ahead of being written.

        Ends where waiting for the next block would take longer than computing what is left.
        """
        costs, first = self.host.costs, restore.first
        source = ReadAhead(self.store, match, first, stop, costs)
        on_the_way: deque[tuple[Future[float], Loaded, float]] = deque()
        spent: dict[str, list[float]] = {}
        started, at = time.perf_counter(), first

        def landed() -> None:
            written, loaded, load_s = on_the_way.popleft()
            of_tier = spent.setdefault(loaded.tier, [0, 0.0])
            of_tier[0] += loaded.rows_bytes
            of_tier[1] += load_s + written.result()

        try:
            while at < stop and not self.is_cancelled:
                patience_s = None
                if not self.is_wanted:
                    patience_s = costs.patience_s(stop - first, at - first)
                if patience_s is not None:  # what is computed meanwhile takes its time anyway
                    n_meanwhile = first - result.n_cached
                    patience_s += n_meanwhile * (costs.prefill_s_per_token or 0.0)
                elapsed_s = time.perf_counter() - started
                got = source.next(None if patience_s is None else patience_s - elapsed_s)
                if got is None:
                    result.is_recomputed = not source.is_over
                    break
                loaded, load_s = got
                on_the_way.append((self._write(restore, loaded), loaded, load_s))
                at = loaded.stop
                self.blocks.append(replace(loaded, rows=()))
                result.is_exact &= loaded.is_exact
                n = loaded.stop - loaded.start
                result.tiers[loaded.tier] = result.tiers.get(loaded.tier, 0) + n
                if len(on_the_way) > IN_FLIGHT:
                    landed()
                if self.progress is not None:
                    self.progress((at - first) / (stop - first), f"loading {at} of {stop} tokens")
        finally:
            source.stop()
            while on_the_way:
                landed()
        for tier, (size_bytes, seconds) in spent.items():
            costs.learn_load(tier, int(size_bytes), seconds)
        return at

    def _write(self, restore: Restore, loaded: Loaded) -> Future[float]:
        layout = self.host.key.layout

        def write(_: Engine) -> float:
            began = time.perf_counter()
            write_loaded(restore, layout, loaded)
            return time.perf_counter() - began

        return self.host.service.run(write)

    def _call(self, function: Callable[[Engine], T]) -> T:
        return self.host.service.run(function).result()


def save_history(
    host: ModelHost, store: Store, agent: AgentRecord, *, is_last_resort: bool, min_new: int = 0
) -> SaveTicket | None:
    """Save what the cache holds of an agent's history and publish it, in the background.

    To be called between steps. Waits for nothing but its copies of rows: what the store has is
    taken from what was seen of it, and what is written beside them is put together by the writer.

    Args:
        host: in whose cache it may be.
        store: where it goes.
        agent: whose.
        is_last_resort: where the store holds more than the cache, publish it with the blocks that
            can be found at once. Otherwise None is returned, and nothing was done.
        min_new: tokens below which no rows are taken: the history is published with the blocks that
            are stored.

    Raises:
        StoreError: the store is closed; nothing was queued.
    """
    tokens, engine = agent.tokens, host.engine
    host = host.isolated(agent.key.salt).reading(len(tokens))
    key = agent.key.for_length(len(tokens))
    n_trusted = len(tokens) if engine.failure is None else 0  # its cells may hold anything
    held = engine.hold(tokens[:n_trusted], host.space)
    try:
        source: CellRows | None = None
        n_computed = held.n_tokens
        if n_computed + 1 < len(tokens) or min_new:
            n_stored = max(min(agent.n_stored, len(tokens)), store.seen(key, tokens))
            is_less = n_stored > n_computed or not n_computed
            if is_less and not is_last_resort:
                return None
            if is_less or n_computed - n_stored < min_new:
                n_computed = n_stored
        if n_computed == held.n_tokens and isinstance(engine.cache, RowCache):
            source = CellRows(engine.cache, key.layout, held)
        return store.save(
            agent.name,
            key,
            tokens,
            source,
            n_computed=n_computed,
            boundaries=_resume_points(engine, agent, held),
            parent=agent.parent,
            parent_position=agent.parent_position,
            metadata=agent.as_it_is().metadata,
            may_read=False,
        )
    finally:
        held.release()


def _resume_points(engine: Engine, agent: AgentRecord, held: HeldPrefix) -> list[int]:
    """Return the lengths of an agent's history that shall be resumable besides its end.

    Of a model with recurrent layers: where its next turn may leave it, or at snapshots that are so
    near before that the store has no use for both.
    """
    if agent.key.layout.state is None:
        return []
    lengths = np.flatnonzero(held.tables[-1] >= 0) + 1
    near = max(MIN_GAIN, engine.cache.block_size)
    firsts = (
        lengths[np.searchsorted(lengths, n - near, "right") :][:1] for n in agent.live.resume_at
    )
    return [
        int(m)
        for n, first in zip(agent.live.resume_at, firsts, strict=True)
        for m in first
        if m <= n
    ]
