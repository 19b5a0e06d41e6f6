"""A replica as the simulator has it: an engine that batches, a cache that forgets, a shared tier.

What it computes is time. A step has a fixed cost, one per sequence, and one per token that is read;
prompts are read in pieces beside the answers that run, as the engine does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from kvcellar.prefix.digest import CHUNK

_NOTHING = 1e-6
"""Part of a token that counts as none: what rounding leaves of a prompt that has been computed."""


@dataclass(frozen=True)
class Costs:
    """Speeds and sizes of one replica.

    Attributes:
        read_per_s: tokens of prompts per second.
        step_s: one step, whatever is in it.
        sequence_s: one more sequence in a step.
        piece: tokens of prompts in one step.
        beside: the same where answers run in it, which go on evenly meanwhile.
        running: answers at a time; others wait.
        cells: tokens that its cache holds.
        kv_bytes: of one token.
        tier_bytes_per_s: what it fetches from the shared tier; 0: there is none.
        tier_s: before the first byte of that comes.
        door_s: of each request, between the client and the engine.
    """

    read_per_s: float
    step_s: float
    sequence_s: float
    piece: int
    beside: int
    running: int
    cells: int
    kv_bytes: int
    tier_bytes_per_s: float
    tier_s: float = 0.02
    door_s: float = 0.0


CARD = Costs(
    read_per_s=8_000.0,
    step_s=0.012,
    sequence_s=0.0003,
    piece=512,
    beside=32,
    running=8,
    cells=300_000,
    kv_bytes=69_632,
    tier_bytes_per_s=2.5e9,
)
"""A model of 8B in 16 bits on a card of 80 GB, roughly: K and V of 128 KiB a token, of which the
tier has 8 bits, over 25 Gbit/s."""


@dataclass
class Job:
    """One turn on its way through a replica.

    Attributes:
        agent: whose turn it is.
        prompt: hashes of its prompt's chunks.
        history: those of what is there when it has been answered.
        n_prompt: tokens of its prompt.
        n_out: of its answer.
        n_known: of its prompt that somebody has computed before, and the tier has.
        arrived_s: when it came.
    """

    agent: str
    prompt: tuple[int, ...]
    history: tuple[int, ...]
    n_prompt: int
    n_out: int
    n_known: int
    arrived_s: float
    n_reused: int = 0
    n_restored: int = 0
    started_s: float = 0.0
    answered_s: float = 0.0
    to_read: float = 0.0
    to_write: float = 0.0
    ready_s: float = 0.0


@dataclass
class Replica:
    """One replica at one moment, ``now_s``; between events all steps are alike."""

    name: str
    costs: Costs
    now_s: float = 0.0
    running: list[Job] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    held: dict[int, None] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of the histories of agents that were here."""
    fetched_bytes: int = 0
    busy_s: float = 0.0

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.running) + len(self.waiting)

    def take(self, job: Job) -> None:
        """Queue a job; it starts at once where there is room."""
        self.waiting.append(job)
        self._start()

    def next_s(self) -> float:
        """Return when something changes by itself."""
        return self.now_s + self._stretch()[0]

    def advance(self, to_s: float) -> list[Job]:
        """Run until then, which is no later than ``next_s``; return the jobs that have ended."""
        _, reading, read_rate, write_rate = self._stretch()
        took = to_s - self.now_s
        writing = [job for job in self.running if job.ready_s <= self.now_s and not job.to_read]
        self.now_s = to_s
        if reading or writing:
            self.busy_s += took
        if reading is not None:
            reading.to_read -= read_rate * took
            if reading.to_read < _NOTHING:
                reading.to_read, reading.answered_s = 0.0, to_s
                self.held.update(dict.fromkeys(reversed(reading.prompt)))
                self._forget()
        for job in writing:
            job.to_write -= write_rate * took
        done = [job for job in writing if job.to_write < _NOTHING]
        for job in done:
            self.running.remove(job)
            self._hold(job.history)
            self.lengths[job.agent] = job.n_prompt + job.n_out
        if done:
            self._start()
        return done

    def _stretch(self) -> tuple[float, Job | None, float, float]:
        """Return seconds until the next event, who is read, and tokens per second of both kinds."""
        c, now = self.costs, self.now_s
        ready = [job for job in self.running if job.ready_s <= now]
        sleeping = min(
            (job.ready_s - now for job in self.running if job.ready_s > now), default=1e9
        )
        reading = next((job for job in ready if job.to_read), None)
        writing = [job for job in ready if not job.to_read]
        if reading is None and not writing:
            return sleeping, None, 0.0, 0.0
        step = c.step_s + c.sequence_s * len(writing)
        read_rate = 0.0
        until = sleeping
        if reading is not None:
            piece = c.beside if writing else c.piece
            step += piece / c.read_per_s
            read_rate = piece / step
            until = min(until, reading.to_read / read_rate)
        if writing:
            until = min(until, min(job.to_write for job in writing) * step)
        return until, reading, read_rate, 1.0 / step

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.costs.running:
            job = self.waiting.popleft()
            job.started_s = self.now_s
            job.n_reused = self._reused(job)
            missing = job.n_prompt - 1 - job.n_reused
            job.n_restored = self._restorable(job, missing)
            job.ready_s = self.now_s
            if job.n_restored:
                n_bytes = job.n_restored * self.costs.kv_bytes
                self.fetched_bytes += n_bytes
                job.ready_s += self.costs.tier_s + n_bytes / self.costs.tier_bytes_per_s
            job.to_read = float(max(1, missing - job.n_restored + 1))
            job.to_write = float(job.n_out)
            self.running.append(job)

    def _reused(self, job: Job) -> int:
        """Return a prompt's tokens that are here: whole chunks, or to an agent's last token."""
        n = next((n for n, one in enumerate(job.prompt) if one not in self.held), len(job.prompt))
        length = self.lengths.get(job.agent, 0)
        is_whole = length // CHUNK <= n
        return min(max(n * CHUNK, length if is_whole else 0), job.n_prompt - 1)

    def _restorable(self, job: Job, missing: int) -> int:
        """Return the tokens to fetch from the tier: all that it has, where that is faster."""
        c = self.costs
        n = min(missing, job.n_known - job.n_reused)
        if n <= 0 or not c.tier_bytes_per_s:
            return 0
        return n if c.tier_s + n * c.kv_bytes / c.tier_bytes_per_s < n / c.read_per_s else 0

    def _hold(self, history: tuple[int, ...]) -> None:
        """Hold a history that was used just now; its end is forgotten before its beginning."""
        for digest in reversed(history):
            self.held.pop(digest, None)
            self.held[digest] = None
        self._forget()

    def _forget(self) -> None:
        """Let go of what was used longest ago, where there is too much."""
        excess = len(self.held) - self.costs.cells // CHUNK
        for digest in list(islice(self.held, max(0, excess))):
            del self.held[digest]
