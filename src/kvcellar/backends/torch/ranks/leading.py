"""The leader's end: a model of which this rank has its part, and caches whose rows several have."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvcellar.backends.host_rows import GroupParts, SideArrays
from kvcellar.backends.torch.bind.positions import RopeLength
from kvcellar.backends.torch.cache.caches import TorchCache
from kvcellar.backends.torch.cache.state_pools import StateArrays
from kvcellar.backends.torch.ranks.commands import (
    Forward,
    Load,
    Move,
    OpenCache,
    ReadRows,
    WriteRows,
    WriteStates,
)
from kvcellar.backends.torch.ranks.parts import read_part
from kvcellar.backends.torch.ranks.processes import Ranks
from kvcellar.errors import ConfigError, ModelError, RankLostError
from kvcellar.types import IntArray, LayerGroup


class Leader:
    """A model that several ranks compute, as the leader has it.

    Attributes:
        ranks: the processes.
        number: of the model.
        groups: its layer groups, with the KV heads of a rank.
    """

    def __init__(self, ranks: Ranks, number: int, groups: tuple[LayerGroup, ...]) -> None:
        """Lead a model that all ranks have read."""
        self.ranks, self.number, self.groups = ranks, number, groups
        self._caches: weakref.WeakKeyDictionary[Any, OtherRanks] = weakref.WeakKeyDictionary()
        weakref.finalize(self, ranks.forget, "model", number)

    def take(self, cache: TorchCache) -> None:
        """Have a cache hold the heads of this rank, and the others the rest, before it holds any.

        Raises:
            ConfigError: it begins with a frozen prefix.
            RankLostError: see :meth:`~kvcellar.backends.torch.ranks.processes.Ranks.together`.
        """
        if cache.pools in self._caches:
            return
        if cache.config.prefix is not None:
            raise ConfigError(
                "a frozen prefix has the KV heads of a whole model, and this one is divided among "
                "ranks; leave the prefix out, or load the model without tp"
            )
        pools, number = cache.pools, self.ranks.new_number()
        own = replace(pools.config, params=replace(cache.config.params, groups=self.groups))
        others = OtherRanks(self.ranks, number, cache.config.params.groups, self.groups)
        shown = replace(own, budget=None)
        with self.ranks.together(OpenCache(number, self.number, shown, pools.in_blocks)):
            pools.divide(self.groups, others)
        self._caches[pools] = others
        weakref.finalize(pools, self.ranks.forget, "cache", number)

    @contextmanager
    def forward(
        self,
        cache: TorchCache,
        ids: IntArray,
        at: IntArray,
        rows: IntArray | None,
        rope_length: RopeLength,
        *,
        is_hidden: bool = False,
    ) -> Iterator[None]:
        """Have the others run their part of the forward that the block runs; see ``Forward``.

        Raises:
            StepError, PositionError: the step is not that of these tokens; nobody has begun.
            RankLostError: see :meth:`~kvcellar.backends.torch.ranks.processes.Ranks.together`.
        """
        plans = tuple(cache.steps.plan_all(len(ids), at))
        states, number = cache.steps.begun_states(), self._caches[cache.pools].number
        step = Forward(number, ids, at, rows, plans, states, rope_length, is_hidden)
        with self.ranks.together(step):
            yield


def read_together(ranks: Ranks, what: Load, device: torch.device) -> tuple[Any, Leader]:
    """Have every rank read its part of a model; return this one's, and what leads the others.

    Raises:
        ModelError: as :func:`~kvcellar.backends.torch.ranks.parts.read_part`; the ranks are closed.
        RankLostError: another rank cannot read its part.
    """
    try:
        with ranks.together(what):
            network, groups = read_part(what, device)
    except RankLostError as lost:
        if isinstance(lost.__cause__, ModelError) and not ranks.was_killed:
            raise lost.__cause__ from None
        raise
    return network, Leader(ranks, what.model, groups)


class OtherRanks:
    """The rows that the other ranks have of one cache.

    Attributes:
        number: of the cache.
        n_ranks: how many have rows of it, the leader among them.
    """

    def __init__(
        self,
        ranks: Ranks,
        number: int,
        whole: Sequence[LayerGroup],
        own: Sequence[LayerGroup],
    ) -> None:
        """Know the groups of the whole model, and those with the heads of a rank."""
        self.number, self.n_ranks = number, ranks.n_ranks
        self._ranks = ranks
        self._is_divided = [
            group.n_kv_heads != part.n_kv_heads for group, part in zip(whole, own, strict=True)
        ]

    @contextmanager
    def moving(self, group: int, base: int, src_cells: IntArray) -> Iterator[None]:
        """Have the others copy the cells that the block copies here."""
        with self._ranks.together(Move(self.number, group, base, src_cells)):
            yield

    def joined(self, group: int, cells: IntArray, own: GroupParts) -> GroupParts:
        """Return rows with the heads of all ranks, of which these are the leader's own.

        Layers that every rank has whole, as latent rows are, are the leader's.
        """
        if not self._is_divided[group]:
            return own
        with self._ranks.together(ReadRows(self.number, group, cells)):
            parts: list[GroupParts] = [own, *self._ranks.answers()]
        k, v = zip(*parts, strict=True)
        return _joined(k), _joined(v)

    @contextmanager
    def writing(self, group: int, cells: IntArray, rows: GroupParts) -> Iterator[GroupParts]:
        """Have the others store their heads of some rows; yield those that the block stores."""
        parts = [rows] * self.n_ranks
        if self._is_divided[group]:
            sides = [[np.split(one, self.n_ranks, axis=1) for one in side] for side in rows]
            parts = [
                (tuple(one[rank] for one in sides[0]), tuple(one[rank] for one in sides[1]))
                for rank in range(self.n_ranks)
            ]
        number = self.number
        with self._ranks.together(lambda rank: WriteRows(number, group, cells, parts[rank])):
            yield parts[0]

    @contextmanager
    def writing_states(self, slots: IntArray, states: StateArrays) -> Iterator[None]:
        """Have the others store the states that the block stores."""
        with self._ranks.together(WriteStates(self.number, slots, states)):
            yield


def _joined(sides: Sequence[SideArrays]) -> SideArrays:
    """Join the arrays of one side, each ``[n_layers, n_kv_heads of a rank, n, width]``."""
    return tuple(np.concatenate(arrays, axis=1) for arrays in zip(*sides, strict=True))
