"""Histories whose every number is known: rows that depend on all tokens up to their position."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from kvcellar.backends.host_memory import Landing
from kvcellar.backends.reference.byte_floats import to_bytes
from kvcellar.backends.reference.quantise import quantise
from kvcellar.errors import StoreError
from kvcellar.kv_dtype import SideDtype
from kvcellar.states import StateGroup, StateShape
from kvcellar.store import (
    BoundaryState,
    GroupRows,
    Loaded,
    ModelKey,
    Reference,
    RowLayout,
    Rows,
    Side,
    States,
    Store,
    WindowRows,
)
from kvcellar.types import LayerGroup

QUICK = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112
"""For folders of which many are made: what is made durable in memory takes no time."""

FULL = LayerGroup((0, 2), 2, 8, 4)
WINDOW = LayerGroup((1,), 2, 8, 8, window=6)
CHUNK = LayerGroup((3,), 1, 8, 4, chunk=6)
STATE = StateGroup(
    (
        (StateShape("convolution", (6, 3)), StateShape("recurrent", (2, 4, 4))),
        (StateShape("recurrent", (5,)),),
    )
)


def make_key(
    fingerprint: str = "model",
    groups: Sequence[LayerGroup] = (FULL,),
    kv_dtype: str = "float32",
    block_tokens: int = 8,
    state: StateGroup | None = None,
) -> ModelKey:
    return ModelKey(fingerprint, RowLayout(tuple(groups), kv_dtype, block_tokens, state))


def bits_of(floats: np.ndarray) -> np.ndarray:
    """Bits of bfloat16, cut off."""
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


class History:
    """A :class:`RowSource` for tokens of one model; what a cache would hold."""

    def __init__(self, key: ModelKey, tokens: Sequence[int], slack: int = 0) -> None:
        self.key = key
        self.tokens = [int(token) for token in tokens]
        self.slack = slack
        self.n_read = 0
        self.n_states_read = 0
        salt = sum(key.fingerprint.encode())
        states = []
        state = salt
        for token in self.tokens:
            state = (state * 31 + token + 7) % 9973
            states.append(state)
        self._states = np.array(states, np.float32)

    def rows(self, index: int, positions: np.ndarray) -> GroupRows:
        group = self.key.layout.groups[index]
        kv = self.key.layout.kv
        k = self._side(kv.k, group, group.head_dim, positions, 1.0)
        return GroupRows(k, self._side(kv.v, group, group.v_head_dim, positions, -0.5))

    def _side(
        self, dtype: SideDtype, group: LayerGroup, dim: int, positions: np.ndarray, factor: float
    ) -> Side:
        layers = np.array(group.layers, np.float32)[:, None, None, None] + 1
        heads = np.arange(group.n_kv_heads, dtype=np.float32)[None, :, None, None]
        numbers = np.arange(dim, dtype=np.float32)[None, None, None, :]
        states = self._states[positions][None, None, :, None]
        floats = factor * np.sin(states * layers + heads * 3 + numbers).astype(np.float32)
        if dtype.name == "bfloat16":
            return Side(bits_of(floats))
        if dtype.byte_float is not None:
            return Side(to_bytes(floats, dtype.byte_float))
        if dtype.is_quantised:
            return Side(*quantise(floats, dtype.bits, dtype.group_of(dim)))
        return Side(floats.astype(dtype.name))

    def landing(self) -> Landing:
        return Landing()

    def read_rows(self, p0: int, p1: int) -> Rows:
        self.n_read += p1 - p0
        positions = np.arange(p0, p1)
        return tuple(self.rows(i, positions) for i in self.key.layout.full_groups)

    def holds_boundary(self, n: int) -> bool:
        return 0 < n <= len(self.tokens)

    def read_window(self, n: int) -> list[WindowRows]:
        out = []
        for index in self.key.layout.window_groups:
            first = _first_seen(self.key.layout.groups[index], max(0, n - self.slack))
            positions = np.arange(first, n)
            out.append(WindowRows(positions, self.rows(index, positions)))
        return out

    def read_states(self, n: int) -> States:
        self.n_states_read += 1
        layers = () if self.key.layout.state is None else self.key.layout.state.layers
        return tuple(
            tuple(self._state(n, 7 * i + j, state.shape) for j, state in enumerate(layer))
            for i, layer in enumerate(layers)
        )

    def _state(self, n: int, which: int, shape: tuple[int, ...]) -> np.ndarray:
        numbers = np.arange(int(np.prod(shape)), dtype=np.float32)
        return np.sin(self._states[n - 1] + numbers * (which + 1)).reshape(shape)

    # What must be true of what a store gives back

    def check(self, piece: Loaded) -> None:
        want = self.read_rows(piece.start, piece.stop)
        for got_group, want_group in zip(piece.rows, want, strict=True):
            assert_equal(got_group, want_group)

    def check_boundary(self, state: BoundaryState) -> None:
        for index, got in zip(self.key.layout.window_groups, state.windows, strict=True):
            first = _first_seen(self.key.layout.groups[index], state.n_tokens)
            needed = range(first, state.n_tokens)
            positions = got.positions.tolist()
            assert positions[len(positions) - len(needed) :] == list(needed)
            assert_equal(got.rows, self.rows(index, got.positions))
        for had, want in zip(state.states, self.read_states(state.n_tokens), strict=True):
            for a, b in zip(had, want, strict=True):
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _first_seen(group: LayerGroup, position: int) -> int:
    if group.chunk is not None:
        return position // group.chunk * group.chunk
    assert group.window is not None
    return max(0, position - group.window + 1)


def assert_equal(got: GroupRows, want: GroupRows) -> None:
    for got_side, want_side in zip(got, want, strict=True):
        for a, b in zip(got_side.parts(), want_side.parts(), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()


def load_all(store: Store, history: History, n: int | None = None) -> int:
    """Load as much as can be resumed, check every byte, return how many tokens that was."""
    tokens = history.tokens if n is None else history.tokens[:n]
    match = store.match(history.key, tokens)
    stop = match.n_resumable
    if history.key.layout.has_boundaries and stop:
        state = store.load_boundary(match)
        stop = 0 if state is None else state.n_tokens
        if state is not None:
            history.check_boundary(state)
    at = 0
    for piece in store.load(match, 0, stop):
        assert piece.start == at
        history.check(piece)
        at = piece.stop
    if not history.key.layout.full_groups:
        return stop
    return at


def save(store: Store, name: str, history: History, **options: object) -> None:
    """Save and wait until it is on disk."""
    ticket = store.save(name, history.key, history.tokens, history, **options)  # type: ignore[arg-type]
    state = ticket.wait(60)
    assert state == "published", ticket.reason
    assert not ticket.is_partial


def fork(
    store: Store, key: ModelKey, name: str, new_name: str, position: int | None = None
) -> Reference:
    """Save the beginning of a published history as another one's, without rows."""
    tokens = store.get(name).tokens
    at = len(tokens) if position is None else position
    ticket = store.save(new_name, key, tokens.prefix(at), parent=name, parent_position=at)
    if ticket.wait(60) != "published":
        raise StoreError(ticket.reason)
    return store.get(new_name)


def tokens_of(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 50_000, n)]
