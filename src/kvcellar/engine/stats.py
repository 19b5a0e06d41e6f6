"""Counts of the engine's work and contents, as one value that CLI, server and tests read."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvcellar.cache_config import CacheUsage
from kvcellar.engine.picture_rows import PictureCounts

if TYPE_CHECKING:
    from kvcellar.engine.schedule.scheduler import Scheduler

RECENT = 256
"""Steps over which times are given."""


@dataclass(slots=True)
class StepTimes:
    """Times of steps."""

    n_steps: int = 0
    total_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, seconds: float) -> None:
        """Count one more step."""
        self.n_steps += 1
        self.total_s += seconds
        self.recent_s.append(seconds)

    @property
    def median_s(self) -> float:
        """Median of the recent steps; 0 where there are none."""
        return sorted(self.recent_s)[len(self.recent_s) // 2] if self.recent_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment. Counts are since its start; tokens are tokens.

    Attributes:
        waiting: requests in the queue, preempted ones among them.
        running: requests that run.
        requests: requests that came.
        finished: requests that ended, whatever the reason.
        prompt_tokens: tokens of all prompts.
        reused_tokens: tokens that were in the cache when their request was let in.
        computed_tokens: tokens that went through the model.
        sampled_tokens: tokens that were sampled.
        drafted_tokens: guesses that were verified.
        accepted_tokens: guesses that were right.
        drafter_failures: times that who guesses raised; requests went on without guesses.
        evicted_tokens: tokens whose cells were taken back from the prefix index.
        taken_snapshots: slots of states that were left in the prefix index to go on from.
        evicted_snapshots: those that were taken back from it.
        preemptions: times that a running sequence gave way.
        gathered_cells: cells that were copied out of crumbs, at rest.
        n_steps: steps that ran a batch.
        step_median_s: the middle one of the last steps.
        steps_s: time in all steps.
        live_cells: cells that sequences stand on, in the fullest layer group.
        evictable_cells: cells that only the prefix index holds.
        free_cells: cells that nobody holds.
        protected_tokens: tokens of the index that live sequences stand on.
        snapshots: slots of states in the prefix index; 0 where no layer is recurrent.
        live_slots: slots that sequences stand on and the index does not hold.
        free_slots: slots that nobody holds.
        encoded_pictures: pictures that the model's vision part has read.
        reused_pictures: times that what it made of one was there already.
        failed_pictures: pictures that could not be read.
        encoding_s: seconds that the vision part took.
        picture_bytes: bytes of what it made that are kept.
        cache: the cache's own account, by layer group, and its bytes.
    """

    waiting: int
    running: int
    requests: int
    finished: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    sampled_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    drafter_failures: int
    evicted_tokens: int
    preemptions: int
    gathered_cells: int
    taken_snapshots: int
    evicted_snapshots: int
    n_steps: int
    step_median_s: float
    steps_s: float
    live_cells: int
    evictable_cells: int
    free_cells: int
    protected_tokens: int
    snapshots: int
    live_slots: int
    free_slots: int
    encoded_pictures: int
    reused_pictures: int
    failed_pictures: int
    encoding_s: float
    picture_bytes: int
    cache: CacheUsage

    @property
    def hit_rate(self) -> float:
        """Reused tokens over those of all prompts that were let in or wait; 0 without any."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def take_stats(scheduler: Scheduler, times: StepTimes) -> EngineStats:
    """Return all counts at this moment."""
    outcomes, residency = scheduler.outcomes, scheduler.residency
    speculator = outcomes.speculator
    usage = residency.cache.usage()
    sizes = residency.index.size_info()
    return EngineStats(
        **asdict(outcomes.counts),
        **asdict(residency.counts),
        **asdict(PictureCounts() if scheduler.rows is None else scheduler.rows.counts),
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        drafter_failures=speculator.n_failures if speculator is not None else 0,
        n_steps=times.n_steps,
        step_median_s=times.median_s,
        steps_s=times.total_s,
        live_cells=max(group.live for group in usage.groups) - sizes.evictable,
        evictable_cells=sizes.evictable,
        free_cells=min(group.free for group in usage.groups),
        protected_tokens=sizes.protected,
        snapshots=residency.index.n_snapshots,
        live_slots=usage.slots.live - residency.index.n_snapshots if usage.slots else 0,
        free_slots=usage.slots.free if usage.slots else 0,
        cache=usage,
    )
