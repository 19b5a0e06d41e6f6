"""Settings of a cache, what it may begin with, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcellar.budget import MemoryBudget, format_size
from kvcellar.checks import seen, text, whole
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import KvDtype, parse_kv_dtype
from kvcellar.types import MOST_CELLS, ModelCacheParams

MIN_CHUNK = 512
"""Cells that a pool allocates at first, where nothing else is asked for."""


WINDOW_SLACK = 64
"""Positions by which histories can be cut back behind windows, where nothing else is said."""


SLOTS = 64
"""Slots for the states of recurrent layers, where nothing else is said."""


LAYOUTS = ("layer_first", "block_first")
"""How paged caches lay out their bytes: each layer's blocks together, or each block's layers."""


FROZEN = 1 << 41
"""Index of the first row of a frozen prefix, past any cell."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedPrefix:
    """K and V of a history's first tokens, frozen for all caches whose histories begin so.

    Nobody writes to it. It is as large as its tokens, however many caches read it, and is freed
    with the last of them. ``kvcellar.freeze_prefix`` makes it.

    Attributes:
        params: the model's facts.
        kv_dtype: how K and V are stored.
        length: its tokens.
        firsts: per layer group, the first position that it has rows of: of a window, the last ones.
        layers: per layer what the backend has frozen.
        size_bytes: bytes of all layers.
    """

    params: ModelCacheParams
    kv_dtype: str
    length: int
    firsts: tuple[int, ...]
    layers: tuple[Any, ...]
    size_bytes: int

    def __post_init__(self) -> None:
        kv = parse_kv_dtype(self.kv_dtype)
        if kv.exact_first or kv.exact_last:
            raise ConfigError(
                f"{self.kv_dtype} keeps the ends of each history in float32 beside, which caches "
                f"cannot share; freeze a prefix in a kv_dtype without exact ends"
            )

    def check_fits(self, config: CacheConfig) -> None:
        """Refuse a cache that cannot read it.

        Raises:
            ConfigError: it is of another model, or of another storage type.
        """
        if self.params != config.params or self.kv_dtype != config.kv_dtype:
            raise ConfigError(
                f"the frozen prefix of {self.length} tokens has K and V in {self.kv_dtype} of "
                f"{self.params}, and this cache {config.kv_dtype} of {config.params}; freeze a "
                f"prefix of the same model, in a cache with the same kv_dtype"
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """All that is needed to build a cache: the model's facts and the caller's policy.

    Attributes:
        params: the model's facts.
        capacity: the most cells that a layer group may hold, over all sequences; the context
            budget of the session. A fork's shared cells count once, a draft tree's nodes count.
        kv_dtype: how K and V are stored: a name that ``kv_dtype.parse_kv_dtype`` reads.
        min_chunk: cells that a pool allocates at first; it doubles from there up to capacity.
        window_slack: positions kept behind each window or chunk, so that a sequence can be cut
            back by that many tokens and go on exactly.
        block_size: cells per block of a paged cache; the others have token cells.
        layout: how a paged cache lays out its bytes: one of ``LAYOUTS``.
        budget: whom pools ask before they grow; None: they grow up to the capacity.
        prefix: what every sequence begins with; it takes none of the cells.
        n_slots: the most slots for the states of recurrent layers: while a step is open, two for
            each of its sequences; the others are for snapshots.
    """

    params: ModelCacheParams
    capacity: int
    kv_dtype: str
    min_chunk: int = MIN_CHUNK
    window_slack: int = WINDOW_SLACK
    block_size: int = 16
    layout: str = "layer_first"
    budget: MemoryBudget | None = None
    prefix: SharedPrefix | None = None
    n_slots: int = SLOTS

    def __post_init__(self) -> None:
        _check_params(self.params)
        for name in ("capacity", "min_chunk", "window_slack", "block_size", "n_slots"):
            value = whole(getattr(self, name), name, most=MOST_CELLS)
            object.__setattr__(self, name, value)
        if self.capacity < 1:
            raise ConfigError(
                f"capacity is the number of tokens a cache can hold and must be at least 1, "
                f"got {seen(self.capacity)}"
            )
        if self.min_chunk < 1:
            raise ConfigError(f"min_chunk must be at least 1 cell, got {seen(self.min_chunk)}")
        if self.window_slack < 0:
            raise ConfigError(f"window_slack cannot be negative, got {seen(self.window_slack)}")
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1 cell, got {seen(self.block_size)}")
        if self.n_slots < 2:
            raise ConfigError(
                f"a step reads one slot and writes another: n_slots must be at least 2, got "
                f"{seen(self.n_slots)}"
            )
        text(self.kv_dtype, "kv_dtype")
        text(self.layout, "layout")
        if self.budget is not None and not isinstance(self.budget, MemoryBudget):
            raise ConfigError(f"budget must be a MemoryBudget or None, got {seen(self.budget)}")
        for group in self.params.groups:
            for side, dim in ((self.kv.k, group.head_dim), (self.kv.v, group.v_head_dim)):
                side.row_bytes(dim)  # a group size that does not divide the row is refused
        if self.layout not in LAYOUTS:
            raise ConfigError(
                f"layout {self.layout!r} is not known; choose one of {', '.join(LAYOUTS)}"
            )
        if self.prefix is not None:
            if not isinstance(self.prefix, SharedPrefix):
                raise ConfigError(
                    f"prefix must be what freeze_prefix gives, got {seen(self.prefix)}"
                )
            self.prefix.check_fits(self)

    @property
    def origin(self) -> int:
        """The position of a sequence's first own token: behind the frozen prefix."""
        return 0 if self.prefix is None else self.prefix.length

    @property
    def kv(self) -> KvDtype:
        """``kv_dtype``, read."""
        return parse_kv_dtype(self.kv_dtype)

    @property
    def pool_chunk(self) -> int:
        """``min_chunk`` of ``grown_size`` for a pool: 0 where a budget grants its cells."""
        return self.min_chunk if self.budget is None else 0

    @property
    def more_room(self) -> str:
        """The way out of a full cache, for messages."""
        if self.budget is None:
            return "raise capacity"
        return (
            f"give more memory (KV may take {format_size(self.budget.kv_bytes)} of "
            f"{format_size(self.budget.limit_bytes)}, {format_size(self.budget.available_bytes)} "
            f"are left)"
        )


def _check_params(params: object) -> None:
    """Raise ConfigError unless these are a model's facts."""
    if not isinstance(params, ModelCacheParams):
        raise ConfigError(f"params must be a ModelCacheParams, got {seen(params)}")


def make_config(
    params: ModelCacheParams,
    capacity: int,
    kv_dtype: str | None = None,
    min_chunk: int = MIN_CHUNK,
    *,
    window_slack: int = WINDOW_SLACK,
    block_size: int = 16,
    layout: str = "layer_first",
    budget: MemoryBudget | None = None,
    prefix: SharedPrefix | None = None,
    n_slots: int = SLOTS,
) -> CacheConfig:
    """Join the model's facts and the caller's policy, as :class:`CacheConfig` names them.

    Without a ``kv_dtype`` K and V are stored in the type that the model computes them in.

    Raises:
        ConfigError: a value that cannot work; the message names it.
    """
    _check_params(params)
    return CacheConfig(
        params,
        capacity,
        params.kv_dtype if kv_dtype is None else kv_dtype,
        min_chunk,
        window_slack,
        block_size,
        layout,
        budget,
        prefix,
        n_slots,
    )


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Cells of one layer group at one moment.

    Attributes:
        window: the group's window, None where it has none.
        capacity: cells that the group may hold.
        live: cells that some sequence or draft tree owns.
        shared: of these, the cells with more than one owner.
        n_cells: one past the highest live cell: what the pools have to hold.
        chunk: the group's chunk, None where it has none.
    """

    window: int | None
    capacity: int
    live: int
    shared: int
    n_cells: int
    chunk: int | None = None

    @property
    def free(self) -> int:
        """Cells that can be claimed."""
        return self.capacity - self.live


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Contents of a cache at one moment, in cells and bytes.

    Attributes:
        groups: cells by layer group.
        size_bytes: bytes that the pools have allocated for K, V and states, and on a GPU those of
            captured steps.
        slots: slots of states, counted as cells are; None where no layer is recurrent.
    """

    groups: tuple[GroupUsage, ...]
    size_bytes: int = field(default=0)
    slots: GroupUsage | None = None
