"""The engine: many requests, one flat batch per step, nothing prefilled twice. Start here.

``Engine.step`` is the whole of it: choose a batch, claim cells, run the model, sample, record.
Reusing a prefix happens while the batch is chosen; speculation changes what is proposed and what is
accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcellar.cache import SeqCache, TreeSeqCache
from kvcellar.engine.cell_map import CellMap, map_cells
from kvcellar.engine.choosing import choose
from kvcellar.engine.config import EngineConfig
from kvcellar.engine.first_use import run_first_steps
from kvcellar.engine.kv.host_offload import moved_out
from kvcellar.engine.kv.residency import Residency
from kvcellar.engine.kv.restore import HeldPrefix, Restore, hold
from kvcellar.engine.picture_rows import PictureRows
from kvcellar.engine.requests.batch import Batch, Verdict
from kvcellar.engine.requests.prepared_step import Ahead
from kvcellar.engine.requests.request import Event, FinishEvent, PromptProgress, Request
from kvcellar.engine.sample_on_device import choose_kept
from kvcellar.engine.schedule.outcomes import Outcomes
from kvcellar.engine.schedule.scheduler import Limits, Scheduler
from kvcellar.engine.speculate import Drafter, FeatureReader, Speculator
from kvcellar.engine.stats import EngineStats, StepTimes, take_stats
from kvcellar.errors import ConfigError, DeviceMemoryError, EngineFailedError, RankLostError
from kvcellar.history import History
from kvcellar.models.kept_logits import CompilingRunner, KeptLogits, PreparingRunner, SamplingRunner
from kvcellar.models.runner import (
    AdaptingRunner,
    FeatureRunner,
    LosableRunner,
    in_spaces,
    rope_border_of,
    step_limit,
)
from kvcellar.models.seeing import SeeingRunner, seeing
from kvcellar.prefix import key_of
from kvcellar.space import SHARED, Space
from kvcellar.types import IntArray

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray, Runner

log = logging.getLogger("kvcellar.engine")

TIDY_BYTES = 32 << 20
"""Of K and V, copied between two looks at who waits."""


class Engine:
    """Requests in, events out, one ``step`` at a time. Not for several threads at once.

    Args of the constructor:
        runner: the model, bound to the session of ``cache``.
        cache: for many sequences; the engine uses it alone.
        tokenizer: for texts and stop texts; None for tokens alone.
        eos_token_ids: tokens with which the model ends a text.
        config: see :class:`EngineConfig`.
        rows: rows of pictures, for a runner that reads them; None: prompts are text alone.
        drafter: guesses tokens that the same forward verifies, where that saves time; None for
            none. What comes out does not depend on it.
        max_positions: the longest sequence that the model was made for; one that reaches it ends
            with ``length``. None: as long as there are cells.
        clock: seconds, for deadlines and times.
    """

    def __init__(
        self,
        runner: Runner,
        cache: SeqCache,
        tokenizer: Any = None,
        *,
        eos_token_ids: Collection[int] = (),
        config: EngineConfig | None = None,
        rows: PictureRows | None = None,
        drafter: Drafter | None = None,
        max_positions: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create an engine without requests."""
        self.config = config or EngineConfig()
        self.runner = runner
        self.cache = cache
        self._trees = cache if isinstance(cache, TreeSeqCache) else None
        if cache.config.prefix is not None:
            raise ConfigError(
                "an engine shares prefixes inside of its cache; give it one without a frozen prefix"
            )
        self.index = self.config.make_index(cache.config.params.sights, cache.block_size)
        self._ahead = _ahead_of(cache, runner, drafter)
        residency = Residency(
            cache, self.index, ahead=self._ahead, rope_border=rope_border_of(runner)
        )
        residency.offload = moved_out(residency)
        residency.is_whole = isinstance(runner, SeeingRunner) and runner.is_whole
        speculator = None
        if drafter is not None:
            speculator = Speculator(
                drafter,
                _most_guesses(cache, self.config.max_drafted),
                is_adaptive=not self.config.verify_all_drafts,
                has_trees=self._trees is not None,
                runs_again=cache.config.params.state is not None and self._trees is None,
                clock=clock,
            )
        self.outcomes = Outcomes(residency, eos_token_ids, max_positions, speculator)
        self.scheduler = Scheduler(
            residency,
            self.config.make_policy(),
            Limits(
                step_limit(runner, self.config.max_num_batched_tokens),
                self.config.max_num_seqs,
                max_positions,
            ),
            self.outcomes,
            tokenizer,
            runner.vocab_size,
            rows if isinstance(runner, SeeingRunner) else None,
        )
        self._teller = _teller(runner) if isinstance(drafter, FeatureReader) else None
        self._sampler = runner if isinstance(runner, SamplingRunner) else None
        self._times = StepTimes()
        self._clock = clock
        self._failure: Exception | None = None
        self._losable = runner if isinstance(runner, LosableRunner) else None

    def submit(self, request: Request) -> int:
        """Queue a request; return its id, under which its events come.

        Raises:
            PromptError: it could never run; the message has the numbers. Nothing was queued.
            ConfigError: the model has no adapter of that name.
            EngineFailedError: the engine has stopped for good; see ``failure``.
        """
        failure = self.failure
        if failure is not None:
            raise failure
        _check_adapter(self.runner, request.space.adapter)
        return self.scheduler.add(request, self._clock())

    def prepare(self, report: Callable[[float, str], None]) -> None:
        """Have what a card compiles or records for the first request be there before it.

        To be called before anything is submitted; nothing is cached afterwards. Where the card has
        no memory for it requests find what is there.

        Args:
            report: called with how much is done, 0 to 1, and what comes now.
        """
        assert self.is_idle, "nothing was submitted yet"
        if not isinstance(self.runner, CompilingRunner):
            return
        limits = self.scheduler.limits
        most = limits.max_num_batched_tokens, limits.max_num_seqs
        try:
            run_first_steps(self.runner, self.cache, *most, report)
        except DeviceMemoryError as error:
            log.warning("not all was prepared that the first requests need: %s", error)

    def cancel(self, request_id: int) -> bool:
        """End a request, waiting or running; what it prefilled stays reusable. False: unknown."""
        with self._stopped_by_errors():
            return self.scheduler.cancel(request_id)

    def publish(self, request_id: int) -> History | None:
        """Let others share what a request has computed so far; return its tokens.

        None: it is unknown.
        """
        with self._stopped_by_errors():
            return self.scheduler.publish(request_id)

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        """Return how far the prompt of a request is read; None: it is unknown."""
        return self.scheduler.prompt_progress(request_id)

    @property
    def is_idle(self) -> bool:
        """True if ``step`` has nothing to do and nothing to tell."""
        return self.scheduler.is_idle

    @property
    def failure(self) -> EngineFailedError | None:
        """Why the engine has stopped for good; None while it works.

        What a model, a grammar or a tokenizer raises ends the requests that it was called for. An
        error in the engine's own books may have left them wrong: then all requests end with it,
        and the cache is not used again, since a refusal is better than a wrong token.
        """
        error = self._failure
        if error is None and self._losable is not None:
            error = self._losable.lost
        if error is None:
            return None
        found = EngineFailedError(
            f"the engine has stopped after {type(error).__name__}: {error}; its cache can no "
            f"longer be trusted; make a new engine, or start the program again"
        )
        found.__cause__ = error
        return found

    def step(self) -> list[Event]:
        """Advance the scheduled sequences once. Commits whole, or changes nothing.

        Nothing is raised: requests that cannot go on end with the error, and after an error of
        the engine's own all of them do; see ``failure``.
        """
        started = self._clock()
        try:
            batch = self.scheduler.schedule(started)
            if batch is None:
                return self.outcomes.events()
            try:
                positions = self._claim(batch)
                logits, features = self._forward(batch, positions)
                is_ahead = self._ahead is not None and self._ahead.begin(batch)
                verdicts = self._choose(batch, logits)
            except Exception as error:
                self._take_back(batch)
                self.outcomes.fail(batch, error)
                if isinstance(error, RankLostError):
                    self._stop(error)
                return self.outcomes.events()
            if not is_ahead:
                self.cache.end_step()
            now = self._clock()
            self._times.add(now - started)
            return self.scheduler.record(batch, verdicts, features, started, now)
        except Exception as error:
            self._stop(error)
            return self.outcomes.events()

    def _stop(self, error: Exception) -> None:
        """End every request with an error after which the books may be wrong; take no more."""
        log.error("the engine has stopped: its cache can no longer be trusted", exc_info=error)
        self._failure = error
        failure = self.failure
        assert failure is not None
        self.outcomes.abandon(failure)

    @contextmanager
    def _stopped_by_errors(self) -> Iterator[None]:
        """Stop where the books raise outside of a step.

        Raises:
            EngineFailedError: they have.
        """
        try:
            yield
        except Exception as error:
            self._stop(error)
            failure = self.failure
            assert failure is not None
            raise failure from error

    def _claim(self, batch: Batch) -> list[int]:
        """Claim the batch's cells, those of guesses too; return the position of every token."""
        for part in batch.parts:
            if part.is_tree:
                assert self._trees is not None, "without trees guesses are in one chain"
                self._trees.propose(part.parents, part.sequence.seq_id)
            elif part.draft:
                self.scheduler.residency.snapshots.before_guesses(part.sequence)
        found = None if self._ahead is None else self._ahead.take(batch.stretches)
        return self.cache.begin_step(batch.stretches) if found is None else found

    def _take_back(self, batch: Batch) -> None:
        """Take back a step that has failed, and what was begun behind it."""
        if self._ahead is None:
            self.cache.cancel_step()
        else:
            self._ahead.take_back(batch)

    def _forward(
        self, batch: Batch, positions: list[int]
    ) -> tuple[FloatArray | KeptLogits, FloatArray | None]:
        """Return logits of the wanted rows, and features of all where the drafter reads them."""
        step = batch.token_ids, positions, batch.rows
        with in_spaces(self.runner, batch.spaces), seeing(self.runner, batch.pictures):
            if self._sampler is not None:
                has_features = self._teller is not None
                logits, features = self._sampler.forward_kept(*step, has_features=has_features)
                return logits, features if has_features else None
            if self._teller is None:
                return self.runner.forward(*step), None
            return self._teller.forward_with_features(*step)

    def _choose(self, batch: Batch, logits: FloatArray | KeptLogits) -> list[Verdict]:
        """Return what each part's sequence goes on with, sampled where the logits are."""
        if isinstance(logits, np.ndarray):
            return choose(batch, logits)
        return choose_kept(batch, logits)

    # What the cache holds, between steps -------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while a request runs, whose cells will be free or evictable at its end."""
        return bool(self.scheduler.running)

    @property
    def n_available(self) -> int:
        """Cells that are free, or would be after evicting all that may be evicted."""
        return self.scheduler.residency.n_available

    def match(self, tokens: IntArray, space: Space = SHARED) -> int:
        """Return how many leading tokens of a history a request would find in the cache.

        They count as used: they are evicted later than what nobody asked for.
        """
        key = key_of(tokens, space)
        return self.index.match_prefix(key).length

    def hold(self, tokens: IntArray, space: Space = SHARED) -> HeldPrefix:
        """Protect what the cache holds of the beginning of a history until it is released."""
        return hold(self.scheduler.residency, tokens, space)

    def demote(self, tokens: IntArray, space: Space = SHARED) -> None:
        """Evict first, when cells are short, what only this history needs. Nothing goes now."""
        self.scheduler.residency.demote(tokens, space)

    def drop(self, tokens: IntArray, keep: int = 0, space: Space = SHARED) -> int:
        """Free what only this history needs behind its first ``keep`` tokens.

        What others share, and what a running request stands on, stays.

        Returns:
            The number of tokens that were dropped.
        """
        return self.scheduler.residency.drop(tokens, keep, space)

    def restore(
        self,
        tokens: IntArray,
        windows: Sequence[IntArray | None],
        first: int = 0,
        space: Space = SHARED,
    ) -> Restore | None:
        """Claim cells for rows of a history that come from outside; None where there is no room.

        Args:
            tokens: ``[stop]``: all that is to be in the cache at the end.
            windows: per layer group, the positions that come for it; None for full groups.
            first: positions before it are computed meanwhile, if the cache does not hold them.
            space: of the history.
        """
        return Restore.begin(self.scheduler.residency, tokens, windows, first, space)

    def cell_map(self, histories: Iterable[tuple[IntArray, int | None, Space]]) -> CellMap:
        """Return the state of every cell of the first layer group, and the cells of histories.

        To look is not to use: nothing is evicted earlier or later for it.

        Args:
            histories: tokens, the id of the request that runs for them or None, and their space.
        """
        return map_cells(self.scheduler, histories)

    def tidy(self) -> bool:
        """Copy some KV that lies in crumbs together, for a moment without requests. True: again.

        What is read and shared stays what it is; steps read longer runs afterwards. A call takes
        no longer than a copy of ``TIDY_BYTES``.
        """
        if self._failure is not None:
            return False
        with self._stopped_by_errors():
            return self.scheduler.residency.tidy(TIDY_BYTES)

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do; yield the events."""
        while not self.is_idle:
            yield from self.step()

    def generate(self, request: Request) -> FinishEvent:
        """Submit one request and run until it has ended.

        Other requests run along; their events are lost, so this is for one caller alone.
        """
        request_id = self.submit(request)
        while True:
            for event in self.step():
                if isinstance(event, FinishEvent) and event.request_id == request_id:
                    return event

    def stats(self) -> EngineStats:
        """Return all counts at this moment."""
        return take_stats(self.scheduler, self._times)


def _most_guesses(cache: SeqCache, wanted: int) -> int:
    """Return how many guesses can be taken back: where rows are let go of, the slack.

    In a tree each has a slot for its states, besides the one before it and that of the last token.
    """
    config, most = cache.config, wanted
    if not all(group.is_full for group in config.params.groups):
        most = min(most, config.window_slack)
    if config.params.state is not None and isinstance(cache, TreeSeqCache):
        most = min(most, config.n_slots - 2)
    return most


def _check_adapter(runner: Runner, name: str) -> None:
    """Refuse an adapter that the model was not loaded with.

    Raises:
        ConfigError: it was not.
    """
    there = runner.adapters if isinstance(runner, AdaptingRunner) else ()
    if name and name not in there:
        raise ConfigError(
            f"adapter {name!r} is not loaded; there are: {', '.join(there) or 'none'}; load it "
            f"beside the model"
        )


def _ahead_of(cache: SeqCache, runner: Runner, drafter: Drafter | None) -> Ahead | None:
    """Return what begins steps while a device works; None where none is like the one before.

    Guesses change with every token; states of recurrent layers are kept at points in between.
    """
    is_like = drafter is None and cache.config.params.state is None
    return Ahead(cache, runner) if is_like and isinstance(runner, PreparingRunner) else None


def _teller(runner: Runner) -> FeatureRunner:
    """Return the runner, which tells features.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(runner, FeatureRunner):
        raise ConfigError(
            f"the drafter guesses from what the model's layers say, and {type(runner).__name__} "
            f"tells nothing of them; choose another drafter, or another backend"
        )
    return runner
