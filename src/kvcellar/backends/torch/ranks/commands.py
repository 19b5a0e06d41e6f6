"""Commands that the leader of a model's ranks gives those that follow, in the order of sending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvcellar.backends.host_rows import GroupParts
from kvcellar.backends.torch.bind.positions import RopeLength
from kvcellar.backends.torch.cache.state_pools import StateArrays
from kvcellar.cache_config import CacheConfig
from kvcellar.models.facts import ModelFacts
from kvcellar.states import StatePlan
from kvcellar.types import IntArray, StepPlan


class Join(NamedTuple):
    """Join the process group whose ranks meet at a file.

    Attributes:
        path: the file.
        n_ranks: how many.
        n_threads: each rank may compute with so many.
    """

    path: Path
    n_ranks: int
    n_threads: int


@dataclass(frozen=True, slots=True)
class Load:
    """Read a rank's part of a model.

    Attributes:
        model: number by which later commands name it.
        folder: the checkpoint, or a GGUF file.
        raw: its ``config.json``.
        dtype: type of the weights, by name.
        facts: of the whole model.
        n_ranks: how many have a part of it.
    """

    model: int
    folder: Path
    raw: dict[str, Any]
    dtype: str
    facts: ModelFacts
    n_ranks: int


class OpenCache(NamedTuple):
    """Make a cache for a model's rows on this rank.

    Attributes:
        cache: number by which later commands name it.
        model: whose.
        config: of the cache, with the heads that a rank has.
        in_blocks: its cells come in blocks.
    """

    cache: int
    model: int
    config: CacheConfig
    in_blocks: bool


class Forward(NamedTuple):
    """Run a forward of which the leader runs its part at the same time.

    Attributes:
        cache: whose step it is.
        ids: ``[T]`` tokens.
        at: ``[T]`` positions.
        rows: ``[R]`` tokens whose logits are wanted; None: the last one.
        plans: one per layer group.
        states: the plan of recurrent layers; None: there are none.
        rope_length: the length of text whose RoPE factors turn the positions, of all or of each.
        is_hidden: only the modules below the head run.
    """

    cache: int
    ids: IntArray
    at: IntArray
    rows: IntArray | None
    plans: Sequence[StepPlan]
    states: StatePlan | None
    rope_length: RopeLength
    is_hidden: bool


class Move(NamedTuple):
    """Copy cells to ``[base, base + len)`` in the pools of a layer group."""

    cache: int
    group: int
    base: int
    src_cells: IntArray


class ReadRows(NamedTuple):
    """Answer with this rank's rows of some cells of a layer group."""

    cache: int
    group: int
    cells: IntArray


class WriteRows(NamedTuple):
    """Store this rank's rows of some cells of a layer group."""

    cache: int
    group: int
    cells: IntArray
    rows: GroupParts


class WriteStates(NamedTuple):
    """Store states of recurrent layers in some slots."""

    cache: int
    slots: IntArray
    states: StateArrays


class Forget(NamedTuple):
    """Let go of a cache or of a model, of which the leader has no use any more."""

    kind: str
    number: int


Command = Join | Load | OpenCache | Forward | Move | ReadRows | WriteRows | WriteStates | Forget
