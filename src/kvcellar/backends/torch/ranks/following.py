"""A process that follows: it reads commands from its standard input until that ends.

Started as ``python -m kvcellar.backends.torch.ranks.following RANK KIND``. Its standard output
carries answers; what libraries print goes to standard error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.port import TorchPools
from kvcellar.backends.torch.ranks.commands import (
    Command,
    Forget,
    Forward,
    Join,
    Load,
    Move,
    OpenCache,
    ReadRows,
    WriteRows,
    WriteStates,
)
from kvcellar.backends.torch.ranks.parts import read_part
from kvcellar.backends.torch.ranks.processes import join_group
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import KVCellarError
from kvcellar.models.facts import ModelFacts
from kvcellar.models.text.tokenizer import quiet
from kvcellar.states import StatePlan
from kvcellar.types import StepPlan


class ToldSteps:
    """The steps of a cache that somebody else plans: what he said of the forward that runs."""

    def __init__(self, config: CacheConfig) -> None:
        """Wait for the first forward."""
        self.config = config
        self.groups = config.params.groups
        self._group_of = config.params.group_of
        self.plans: Sequence[StepPlan] = ()
        self.states: StatePlan | None = None

    def group_of(self, layer: int) -> int:
        """Return the index of the group of a layer."""
        return self._group_of[layer]

    def needs_positions(self) -> bool:
        """Return False: the leader has compared them."""
        return False

    def plan(self, layer: int, n_tokens: int, positions: Any) -> StepPlan:
        """Return what was said of the group of a layer."""
        return self.plans[self._group_of[layer]]

    def take_plan(self, layer: int, plan: StepPlan) -> bool:
        """Return true if ``plan`` is of the forward that runs."""
        return self.plans[self._group_of[layer]] is plan

    def plan_states(self, layer: int, n_tokens: int, positions: Any) -> StatePlan:
        """Return what was said of recurrent layers."""
        assert self.states is not None, "the leader has told of recurrent layers"
        return self.states

    def wrote(self, layer: int) -> None:
        """Note nothing: the leader's own layers count."""

    def wrote_states(self, layer: int) -> None:
        """Note nothing: the leader's own layers count."""


class ToldCache(TorchCache):
    """The rows that this rank has of a cache whose bookkeeping is the leader's."""

    is_step_open = True

    def __init__(self, config: CacheConfig, *, in_blocks: bool) -> None:
        """Create pools without cells."""
        self.config = config
        self.told = ToldSteps(config)
        self.steps = self.told  # type: ignore[assignment]  # it does what layers ask of steps
        super().__init__(TorchPools(config, in_blocks=in_blocks))

    def cancel_step(self) -> None:
        """Do nothing: a forward that fails ends the process."""


@dataclass(frozen=True, slots=True)
class _Session:
    """A cache, as a runner wants it."""

    cache: ToldCache


@dataclass(frozen=True, slots=True)
class _Model:
    network: Any
    facts: ModelFacts


class Follower:
    """A rank that follows: its parts of models and caches, moved as the leader says."""

    def __init__(self, rank: int, kind: str, answers: IO[bytes]) -> None:
        """Have nothing yet; ``answers`` takes what the leader asks for."""
        self._rank, self._kind, self._answers = rank, kind, answers
        self._device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
        self._models: dict[int, _Model] = {}
        self._caches: dict[int, ToldCache] = {}
        self._runners: dict[int, TorchRunner] = {}
        self._model_of: dict[int, int] = {}

    def answer(self, value: Any) -> None:
        """Send the leader a value."""
        pickle.dump(value, self._answers, protocol=pickle.HIGHEST_PROTOCOL)
        self._answers.flush()

    def obey(self, command: Command) -> None:
        """Do what the leader has said; whatever fails ends the process."""
        match command:
            case Join():
                join_group(command, self._rank, self._kind)
            case Load():
                with quiet(lambda part: None):
                    network, _ = read_part(command, self._device)
                self._models[command.model] = _Model(network, command.facts)
            case OpenCache():
                self._caches[command.cache] = ToldCache(command.config, in_blocks=command.in_blocks)
                self._model_of[command.cache] = command.model
            case Forward():
                self._run(command)
            case Forget():
                self._forget(command)
            case _:
                self._move(command)

    def _run(self, step: Forward) -> None:
        """Run this rank's part of a forward."""
        cache = self._caches[step.cache]
        cache.told.plans, cache.told.states = step.plans, step.states
        runner = self._runner(step.cache)
        runner.rope_length = step.rope_length
        if step.is_hidden:
            runner.forward_hidden(step.ids, step.at)
        else:
            runner.forward(step.ids, step.at, step.rows)

    def _runner(self, number: int) -> TorchRunner:
        if number not in self._runners:
            model, session = self._models[self._model_of[number]], _Session(self._caches[number])
            params, n_ids = session.cache.config.params, model.facts.vocab_size
            given: tuple[Any, ...] = (model.network, None, params, n_ids, session)
            self._runners[number] = TorchRunner(*given, has_graphs=False)
        return self._runners[number]

    def _move(self, command: Move | ReadRows | WriteRows | WriteStates) -> None:
        """Move bytes of a cache as the leader's verbs do."""
        cache = self._caches[command.cache]
        match command:
            case Move(_, group, base, src_cells):
                cache.pools.move_cells(group, base, src_cells)
            case ReadRows(_, group, cells):
                self.answer(cache.pools.read_rows(cache.pools.groups[group], cells))
            case WriteRows(_, group, cells, rows):
                exact = cache.pools.exact[group]
                if exact is not None:
                    exact.drop(cells)
                cache.pools.write_rows(cache.pools.groups[group], cells, rows)
            case WriteStates(_, slots, states):
                cache.write_states(slots, states)

    def _forget(self, command: Forget) -> None:
        if command.kind == "model":
            self._models.pop(command.number, None)
            return
        self._caches.pop(command.number, None)
        self._runners.pop(command.number, None)


def main(rank: int, kind: str) -> None:
    """Say that this process is ready, and do what it is told until nobody tells it any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader says when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    follower = Follower(rank, kind, answers)
    follower.answer("ready")
    while True:
        try:
            command: Command = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # without waiting for ranks that may have ended before
        try:
            follower.obey(command)
        except KVCellarError as error:  # the leader meets the same one, and says it
            sys.stderr.write(f"rank {rank}: {error}\n")
            os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
