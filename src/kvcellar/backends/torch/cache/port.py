"""The bytes of all layers in torch, as the bookkeeping asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from kvcellar.backends.host_memory import THERE, Arrival, Landing
from kvcellar.backends.host_rows import GroupParts, LeavingRows, check_rows, landing_rows
from kvcellar.backends.torch.cache import host_rows, kernel
from kvcellar.backends.torch.cache.exact import ExactPool, LayerPool, beside_frozen, frozen_rows
from kvcellar.backends.torch.cache.pools import BlockFirstPool, GroupBlocks, Pool
from kvcellar.backends.torch.cache.shortage import within_memory
from kvcellar.backends.torch.cache.state_pools import StateArrays, StatePools
from kvcellar.backends.torch.gpu import choice
from kvcellar.bookkeeping.cells.exact import exact_cells
from kvcellar.cache_config import CacheConfig
from kvcellar.errors import ConfigError
from kvcellar.states import StatePlan
from kvcellar.types import IntArray, LayerGroup, StepPlan

if TYPE_CHECKING:
    from kvcellar.backends.torch.gpu.transfer.transfers import RowTransfers

_COPY = "a copy of rows"


class OtherRows(Protocol):
    """Protocol of the rows that other ranks have of a cache: ``ranks.leading.OtherRanks``."""

    @property
    def n_ranks(self) -> int:
        """Number of ranks that have rows, this one among them."""

    def moving(self, group: int, base: int, src_cells: IntArray) -> AbstractContextManager[None]:
        """Have the others copy the cells that the block copies here."""

    def joined(self, group: int, cells: IntArray, own: GroupParts) -> GroupParts:
        """Return rows with the heads of all ranks, of which these are this one's own."""

    def writing(
        self, group: int, cells: IntArray, rows: GroupParts
    ) -> AbstractContextManager[GroupParts]:
        """Have the others store their heads of some rows; enter with those to store here."""

    def writing_states(self, slots: IntArray, states: StateArrays) -> AbstractContextManager[None]:
        """Have the others store the states that the block stores."""


class TorchPools:
    """The bytes of every layer: the port that the bookkeeping moves cells by.

    Always holds: a layer's pool lies on the device of the model that is bound to the session, or of
    the first K that came for it.
    """

    def __init__(self, config: CacheConfig, *, in_blocks: bool = False) -> None:
        """Create pools without cells; they allocate where ``place`` says, or the first K is.

        Args:
            config: groups, capacity, storage types.
            in_blocks: cells come in blocks, which ``config.layout`` says how to lay out.
        """
        self.config, self.in_blocks = config, in_blocks
        self.exact = [exact_cells(group, config.kv) for group in config.params.groups]
        state = config.params.state
        self.states = None if state is None else StatePools(state, config)
        """States of recurrent layers; None: there are none."""
        self._device = torch.device("cpu")
        self._of_card: RowTransfers | None = None
        self._others: OtherRows | None = None
        self.graph_bytes = 0
        """Bytes of captured steps over these pools, as whoever captured them counts."""
        self._make(config.params.groups)

    def _make(self, groups: tuple[LayerGroup, ...]) -> None:
        """Make the pools of some layer groups, without cells."""
        self.groups, config = groups, self.config
        block_first = self.in_blocks and config.layout == "block_first"
        found: dict[int, LayerPool] = {}
        for group, exact in zip(self.groups, self.exact, strict=True):
            blocks = GroupBlocks(group, config) if block_first else None
            for i, layer in enumerate(group.layers):
                pool = BlockFirstPool(blocks, i) if blocks else Pool(group, config)
                found[layer] = ExactPool(pool, group, config, exact.n_cells) if exact else pool
        if config.prefix is not None:
            frozen = config.prefix.layers
            found = {layer: beside_frozen(pool, frozen[layer]) for layer, pool in found.items()}
        self._stored = list(found.values())
        self.of_layer = [found[source] for source in config.params.sources]

    def divide(self, groups: tuple[LayerGroup, ...], others: OtherRows) -> None:
        """Hold one rank's KV heads alone, before any cell is held; other ranks have the rest.

        Args:
            groups: the layer groups, with the heads that a rank has.
            others: has them move, store and hand out their rows as this does.
        """
        assert not self.size_bytes, "no cell is held"
        self._make(groups)
        self._others = others

    @property
    def size_bytes(self) -> int:
        """Bytes that the pools have allocated, on all ranks, and those of captured steps."""
        beside = self.graph_bytes + (0 if self.states is None else self.states.size_bytes)
        n_ranks = 1 if self._others is None else self._others.n_ranks
        return n_ranks * (sum(pool.size_bytes for pool in self._stored) + beside)

    def place(self, device: torch.device) -> None:
        """Have rows and states that come before the first K go to a device."""
        self._device = device
        if self.states is not None:
            self.states.device = device

    @property
    def home(self) -> torch.device:
        """The device of the pools; before they have cells that of ``place``."""
        found = (pool.device for pool in self.of_layer)
        return next((device for device in found if device is not None), self._device)

    def frozen_rows(self, layer: int, group: LayerGroup, cells: IntArray) -> Pool:
        """Copy a layer's rows of some cells into a pool that nobody writes to.

        Raises:
            ConfigError: other ranks have some of its KV heads.
        """
        if self._of_card is not None:
            self._of_card.before_all()
        if self._others is not None:
            raise ConfigError(
                "a prefix of a model that is divided among ranks cannot be frozen: each has some "
                "of the KV heads; fork a sequence that holds the prefix, in one cache (seq_cp), or "
                "load the model without tp"
            )
        return frozen_rows(self.of_layer[layer], cells, group, self.config)

    def read_rows(self, group: LayerGroup, cells: IntArray) -> GroupParts:
        """Return copies of the rows of ``cells [n]`` in the group's layers, in host memory."""
        (own,), _ = landing_rows([group], [len(cells)], self.config.kv)
        self._begin_read(group, cells, own).wait()
        if self._others is None:
            return own
        return self._others.joined(self.groups.index(group), cells, own)

    def begin_read(self, tables: Sequence[IntArray]) -> LeavingRows:
        """Begin to copy the rows of some cells of each group; see :class:`RowMoves`."""
        pairs = list(zip(self.groups, tables, strict=True))
        if self._others is not None:
            return LeavingRows([self.read_rows(*pair) for pair in pairs], Landing())
        rows, memory = landing_rows(self.groups, [len(one) for one in tables], self.config.kv)
        arrival = THERE
        for (group, cells), into in zip(pairs, rows, strict=True):
            if len(cells):
                arrival = self._begin_read(group, cells, into)  # the last one comes last
        return LeavingRows(rows, Landing(arrival, memory))

    def _begin_read(self, group: LayerGroup, cells: IntArray, into: GroupParts) -> Arrival:
        pools = [self.of_layer[layer] for layer in group.layers]
        transfers = self._transfers()
        if transfers is None:
            host_rows.read(pools, cells, into)
            return THERE
        read = transfers.begin_read
        found = within_memory(lambda: read(pools, cells, group, into), self.home, what=_COPY)
        return found or THERE

    def write_rows(self, group: LayerGroup, cells: IntArray, given: GroupParts) -> None:
        """Store rows in ``cells [n]`` of the group's layers."""
        if self._others is None:
            self._write_own(group, cells, given)
            return
        check_rows(cells, given)
        with self._others.writing(self.groups.index(group), cells, given) as own:
            self._write_own(group, cells, own)

    def write_states(self, slots: IntArray, states: StateArrays) -> None:
        """Put states as ``read_states`` of a cache gives them in slots.

        Raises:
            ShapeError: they are not those of so many slots of this model; nothing was written.
        """
        assert self.states is not None, "the model has recurrent layers"
        self.states.check(slots, states)
        transfers = self._transfers()
        with nullcontext() if self._others is None else self._others.writing_states(slots, states):
            if transfers is None:
                self.states.write(slots, states)
            else:
                transfers.write_states(self.states, slots, states)

    def read_states(self, slots: IntArray) -> StateArrays:
        """Return copies of the states of some slots: per recurrent layer and state ``[n, ...]``."""
        if self.states is None:
            return []
        transfers = self._transfers()
        if transfers is None:
            return self.states.read(slots)
        return transfers.read_states(self.states, slots)

    def before_step(self, group: int, plan: StepPlan) -> None:
        """Have a step that comes wait, on its device, for transfers of cells that it touches."""
        if self._of_card is not None:
            first = self.groups[group].layers[0]
            self._of_card.before_step(first, plan, self.of_layer[first])

    def before_states(self, plan: StatePlan) -> None:
        """Have a step that comes wait, on its device, for transfers of slots that it touches."""
        if self._of_card is not None and self.states is not None:
            self._of_card.before_states(plan, self.states)

    def _write_own(self, group: LayerGroup, cells: IntArray, given: GroupParts) -> None:
        pools = [self.of_layer[layer] for layer in group.layers]
        transfers = self._transfers()
        if transfers is not None:
            write, home = transfers.write, self.home
            within_memory(lambda: write(pools, cells, given, group, home), home, what=_COPY)
        else:
            host_rows.write(pools, cells, given, self.home)

    def _transfers(self) -> RowTransfers | None:
        """Return what moves rows to and from a card, made with the first; None on a CPU."""
        if self._of_card is None and choice.is_gpu(self.home):
            from kvcellar.backends.torch.gpu.transfer.transfers import (
                transfers_on,  # it imports Triton
            )

            self._of_card = transfers_on(self.home)
        return self._of_card

    def move_cells(self, group: int, base: int, src_cells: IntArray) -> None:
        """Copy ``src_cells`` to ``[base, base + len)`` in every pool of the group."""
        if self._others is None:
            self._move_own(group, base, src_cells)
            return
        with self._others.moving(group, base, src_cells):
            self._move_own(group, base, src_cells)

    def _move_own(self, group: int, base: int, src_cells: IntArray) -> None:
        if self._of_card is not None:
            self._of_card.before_all()
        exact = self.exact[group]
        copies = None if exact is None else exact.move(base, src_cells)
        there = torch.as_tensor(src_cells, device=self.home)  # one transfer for all layers
        stop = base + len(src_cells)
        is_apart = bool(((src_cells < base) | (src_cells >= stop)).all())
        for layer in self.groups[group].layers:
            pool = self.of_layer[layer]
            if pool.device is not None:
                pool.ensure(base + len(src_cells), pool.device)
                if is_apart and choice.has_cells(pool, pool.device):
                    from kvcellar.backends.torch.gpu.attend import launch  # it imports Triton

                    cells = there.to(pool.device)
                    launch.move(launch.pool_arguments(pool.placed()), base, cells)
                elif kernel.takes(pool.device, self.config.kv) and not pool.is_joined:
                    pool.for_kernel().move_cells(base, src_cells)  # K rows, then those of V
                else:
                    pool.gather_into(base, there.to(pool.device))
                if copies is not None:
                    assert isinstance(pool, ExactPool)
                    pool.move_exact(*copies)
