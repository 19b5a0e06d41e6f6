"""The values that pass between bookkeeping, backends and models. Integers only, no tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.checks import flag, number, seen, whole, wholes
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import FLOAT_KV_DTYPES, KvDtype
from kvcellar.sight import Sight
from kvcellar.states import STATE_SIGHT, StateGroup

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


MOST_CELLS = 2**31 - 1
"""Of one layer group; kernels count in 32 bits."""

MOST_LAYERS = 1 << 16
"""Most layers of a model, of which a list is made: a file from elsewhere may state any number."""


class Run(NamedTuple):
    """Consecutive cells ``[start, start + length)``."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last cell."""
        return self.start + self.length


class AttendKind(enum.Enum):
    """Ways in which the queries of one read see its cells.

    NONE: every query sees every cell; the read is the selection.
    CAUSAL: the last ``q_len`` cells are the queries' own, in order (lower-right aligned): query i
        sees everything before them and, of them, the first i + 1.
    EXPLICIT: a boolean mask (true = attend) over the *last* ``mask.shape[1]`` cells; every cell
        before those is seen by every query.
    """

    NONE = "none"
    CAUSAL = "causal"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True, eq=False)
class AttendSpec:
    """One read and how to attend it.

    Attributes:
        q_start: index of the first query token in the flat batch.
        q_len: how many consecutive query tokens, all of one sequence.
        runs: the cells to read, in the order of the mask's columns.
        kind: see :class:`AttendKind`.
        mask: ``[q_len, n_masked]`` for EXPLICIT, else None.
    """

    q_start: int
    q_len: int
    runs: tuple[Run, ...]
    kind: AttendKind
    mask: BoolArray | None = None

    @property
    def read_len(self) -> int:
        """The number of cells that are read."""
        return sum(run.length for run in self.runs)


class Write(NamedTuple):
    """Tokens ``[q_start, q_start + run.length)`` of the flat batch go to the cells of ``run``."""

    q_start: int
    run: Run


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Plan of one forward's writes and reads in the layers of one layer group. Integers only.

    Attributes:
        n_tokens: tokens in the flat batch.
        writes: where each token's K and V go; covers every token once, in order.
        reads: what each stretch of query tokens attends; covers every token once, in order.
            Reads see this step's writes: a backend writes first.
        n_cells: one past the highest cell that is read or written: what a pool must hold.
    """

    n_tokens: int
    writes: tuple[Write, ...]
    reads: tuple[AttendSpec, ...]
    n_cells: int

    @property
    def write_cells(self) -> IntArray:
        """``[n_tokens]``: the cell of every token."""
        return cells_of(write.run for write in self.writes)


def cells_of(runs: Iterable[Run]) -> IntArray:
    """Return all cells of some runs, one after the other."""
    parts = [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the same cells in the same order in the fewest runs."""
    out: list[Run] = []
    for run in runs:
        if out and out[-1].stop == run.start:
            out[-1] = Run(out[-1].start, out[-1].length + run.length)
        else:
            out.append(run)
    return tuple(out)


def clip_runs(runs: Iterable[Run], start: int, stop: int) -> list[Run]:
    """Return the cells ``[start, stop)`` of some runs, counted along them."""
    out, at = [], 0
    for run in runs:
        low, high = max(start - at, 0), min(stop - at, run.length)
        if low < high:
            out.append(Run(run.start + low, high - low))
        at += run.length
    return out


def runs_of(cells: Sequence[int] | IntArray) -> list[Run]:
    """Return the fewest runs that give these cells in this order."""
    if isinstance(cells, list) and len(cells) <= FEW_CELLS:
        return _runs_of_few(cells)
    array = np.asarray(cells, dtype=np.int64)
    if not array.size:
        return []
    starts = [0, *(np.flatnonzero(np.diff(array) != 1) + 1).tolist()]
    lengths = np.diff([*starts, array.size]).tolist()
    return [Run(int(array[at]), n) for at, n in zip(starts, lengths, strict=True)]


FEW_CELLS = 64
"""So many in a list are looked at one by one: arrays take longer to make."""


def _runs_of_few(cells: list[int]) -> list[Run]:
    out: list[Run] = []
    first = stop = -1
    for cell in cells:
        if cell != stop:
            if stop > first:
                out.append(Run(first, stop - first))
            first = cell
        stop = cell + 1
    if stop > first:
        out.append(Run(first, stop - first))
    return out


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that keep the same history.

    Attributes:
        layers: ids of the layers that store rows, ascending.
        n_kv_heads: KV heads per layer (not query heads).
        head_dim: length of a K row.
        v_head_dim: length of a V row.
        window: w, where a query at position p sees positions ``(p - w, p]``, itself included.
        softcap: attention logits become ``softcap * tanh(logits / softcap)``; None for no cap.
        chunk: c, where a query at position p sees positions ``[p - p % c, p]``.
        is_latent: true for latent attention (MLA): the V row of the one KV head is the latent, the
            K row its rotary part; a query row is as long as both together, latent part first, and
            a logit is its product with the V row and the K row behind each other.

    With neither window nor chunk, a query sees all of the history.
    """

    layers: tuple[int, ...]
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    is_latent: bool = False

    def __post_init__(self) -> None:
        for name in ("n_kv_heads", "head_dim", "v_head_dim"):
            value = whole(getattr(self, name), f"{name} of a layer group", most=MOST_CELLS)
            object.__setattr__(self, name, value)
            if getattr(self, name) < 1:
                raise ConfigError(f"a layer group needs {name} >= 1, got {getattr(self, name)}")
        object.__setattr__(self, "layers", tuple(wholes(self.layers, "layers")))
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"layers of a group ascend without repeats, got {self.layers}")
        sight = self.sight
        object.__setattr__(self, "window", sight.window)
        object.__setattr__(self, "chunk", sight.chunk)
        if self.softcap is not None:
            number(self.softcap, "softcap")
            if not self.softcap > 0:
                raise ConfigError(f"a softcap is above 0, or None for no cap; got {self.softcap}")
        object.__setattr__(self, "is_latent", flag(self.is_latent, "is_latent"))
        if self.is_latent and self.n_kv_heads != 1:
            raise ConfigError(f"latent rows are one KV head, got n_kv_heads={self.n_kv_heads}")

    @property
    def q_dim(self) -> int:
        """Length of a query row: of latent rows, as long as V's and K's together."""
        return self.head_dim + (self.v_head_dim if self.is_latent else 0)

    @property
    def sight(self) -> Sight:
        """The part of its history that a query sees."""
        return Sight(self.window, self.chunk)

    @property
    def is_full(self) -> bool:
        """True if a query sees all of the history."""
        return self.sight.is_full

    def first_seen(self, pos: int) -> int:
        """Return the first position that a query at ``pos`` sees."""
        return self.sight.first_seen(pos)

    def __str__(self) -> str:
        """Return the group in words, for messages."""
        kinds = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap}
        more = [f", {name} {value}" for name, value in kinds.items() if value is not None]
        return (
            f"{len(self.layers)} of {self.n_kv_heads} KV heads, K rows of {self.head_dim}, V rows "
            f"of {self.v_head_dim}{''.join(more)}{', latent' if self.is_latent else ''}"
        )

    def cell_bytes(self, kv: KvDtype) -> int:
        """Bytes of one token's K and V in all layers of the group, scales and biases included."""
        row_bytes = kv.k.row_bytes(self.head_dim) + kv.v.row_bytes(self.v_head_dim)
        return len(self.layers) * self.n_kv_heads * row_bytes


@dataclass(frozen=True, slots=True)
class ModelCacheParams:
    """Facts of a model's architecture that a cache must know; nothing of a session.

    ``ModelCacheParams(n_layers, n_kv_heads, head_dim)`` is a model whose layers are all alike and
    see all of the history. Where ``groups`` are given, the shapes of rows are theirs, and those of
    the model follow from them.

    Attributes:
        n_layers: attention layers, those that share another's rows included.
        n_kv_heads: KV heads of every layer; None where layers differ.
        head_dim: length of every layer's K rows, not hidden size over heads; None where they
            differ.
        v_head_dim: length of every layer's V rows; None where they differ. Given as 0: as long as
            K rows.
        groups: the layer groups; each layer that stores rows is in one of them.
        shared: ``(layer, source)`` for each layer that stores no rows and attends over those of an
            earlier one, as that one sees them.
        state: the recurrent layers, which have numbers of their own; None: there are none.
        kv_dtype: type in which the model computes K and V, and in which caches store them where
            nothing else is asked for; models that differ in nothing else are equal.
    """

    n_layers: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = 0
    groups: tuple[LayerGroup, ...] = ()
    shared: tuple[tuple[int, int], ...] = ()
    state: StateGroup | None = None
    kv_dtype: str = field(default="float32", compare=False)

    def __post_init__(self) -> None:
        n_layers = whole(self.n_layers, "n_layers of a model", most=MOST_LAYERS)
        object.__setattr__(self, "n_layers", n_layers)
        if n_layers < 1:
            raise ConfigError(f"a model has at least one layer, got n_layers={n_layers}")
        if not isinstance(self.groups, tuple) or not all(
            isinstance(group, LayerGroup) for group in self.groups
        ):
            raise ConfigError(f"groups must be a tuple of LayerGroup, got {seen(self.groups)}")
        if self.state is not None and not isinstance(self.state, StateGroup):
            raise ConfigError(f"state must be a StateGroup or None, got {seen(self.state)}")
        if self.kv_dtype not in FLOAT_KV_DTYPES:
            raise ConfigError(
                f"a model computes K and V in one of {', '.join(FLOAT_KV_DTYPES)}, got "
                f"kv_dtype={seen(self.kv_dtype)}"
            )
        self._check_shape()
        object.__setattr__(self, "shared", _layer_pairs(self.shared))
        if not self.groups:
            object.__setattr__(self, "groups", (self._full_group(),))
        for name in ("n_kv_heads", "head_dim", "v_head_dim"):
            found = {getattr(group, name) for group in self.groups}
            object.__setattr__(self, name, found.pop() if len(found) == 1 else None)
        self._check_layers()

    def _check_shape(self) -> None:
        """Raise ConfigError unless the shapes that were given for all layers can be ones."""
        if type(self.v_head_dim) is int and not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name in ("n_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is None and self.groups:
                continue
            if whole(value, f"{name} of a model", most=MOST_CELLS) < 1:
                raise ConfigError(f"a model needs {name} >= 1, got {value}")

    def _full_group(self) -> LayerGroup:
        """Return the group of a model whose layers are all alike."""
        shares = {layer for layer, _ in self.shared}
        layers = tuple(layer for layer in range(self.n_layers) if layer not in shares)
        heads, k, v = self.n_kv_heads, self.head_dim, self.v_head_dim
        assert heads is not None and k is not None and v is not None, "checked before"
        return LayerGroup(layers, heads, k, v)

    def _check_layers(self) -> None:
        """Raise ConfigError unless each layer stores rows, or attends over those of one before."""
        stored = {layer for group in self.groups for layer in group.layers}
        for layer, source in self.shared:
            if source not in stored or source >= layer:
                raise ConfigError(
                    f"layer {layer} cannot share the rows of layer {source}: it takes an earlier "
                    f"layer of a layer group"
                )
        names = [layer for group in self.groups for layer in group.layers]
        claimed = sorted(names + [layer for layer, _ in self.shared])
        if claimed != list(range(self.n_layers)):
            raise ConfigError(
                f"layer groups must name each of the {self.n_layers} layers once, got {claimed}"
            )

    def __str__(self) -> str:
        """Return the model's layers in words, for messages."""
        shared = f"; {len(self.shared)} share those of others" if self.shared else ""
        state = "" if self.state is None else f", and {self.state}"
        return f"{self.n_layers} layers ({'; '.join(map(str, self.groups))}{shared}){state}"

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Per table of a sequence what a query sees: those of the groups, and of states behind."""
        of_states = () if self.state is None else (STATE_SIGHT,)
        return (*(group.sight for group in self.groups), *of_states)

    @property
    def sources(self) -> tuple[int, ...]:
        """Per layer the one whose rows it attends over: itself, but for shared layers."""
        of_shared = dict(self.shared)
        return tuple(of_shared.get(layer, layer) for layer in range(self.n_layers))

    @property
    def group_of(self) -> tuple[int, ...]:
        """Per layer the index of the group whose rows it attends over."""
        of_stored = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return tuple(of_stored[source] for source in self.sources)


def _layer_pairs(pairs: object) -> tuple[tuple[int, int], ...]:
    """Return pairs of layers as plain tuples, ascending.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(pairs, tuple | list) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        raise ConfigError(f"shared must be a tuple of (layer, source), got {seen(pairs)}")
    found = [wholes(pair, "shared layers") for pair in pairs]
    return tuple(sorted((layer, source) for layer, source in found))
