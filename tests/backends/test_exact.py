"""Both ends of a history in float32 beside quantised cells: what is read exactly, what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcellar import (
    LayerGroup,
    ModelCacheParams,
    make_config,
    make_decode_session,
    make_paged_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.bookkeeping.cells.exact import N_SEQUENCES
from kvcellar.budget import MemoryBudget
from kvcellar.testing.dense import stored
from tests.backends.adapters import needs_mlx

torch = pytest.importorskip("torch")
kernel = pytest.importorskip("kvcellar.backends.torch.cache.kernel")

N_HEADS, N_KV_HEADS, DIM = 4, 2, 32
N_LAYERS, SHARES = 4, {3: 0}
PARAMS = ModelCacheParams(
    N_LAYERS,
    groups=(
        LayerGroup((0, 2), N_KV_HEADS, DIM, DIM),
        LayerGroup((1,), N_KV_HEADS, DIM, DIM, window=12),
    ),
    shared=tuple(SHARES.items()),
)
MAKERS = {
    "decode": make_decode_session,
    "seq": make_seq_session,
    "paged": make_paged_session,
    "tree": make_tree_session,
}
BACKENDS = (
    "reference",
    "torch",
    "torch without the kernel",
    pytest.param("mlx", marks=needs_mlx),
)


class Model:
    """Random q, k, v per token and layer, the same for the same token."""

    def __init__(self, backend: str, kind: str, kv_dtype: str, **policy: Any) -> None:
        self.backend, *self.options = backend.split(" ", 1)
        self.kind = kind
        self.patch = pytest.MonkeyPatch()
        if self.options:
            self.patch.setattr(kernel, "takes", lambda *_: False)
        config = make_config(PARAMS, 200, kv_dtype, 16, block_size=4, window_slack=20, **policy)
        self.session: Any = MAKERS[kind](self.backend, config)

    def __enter__(self) -> Model:
        self.session.__enter__()
        self.cache = self.session.cache
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)
        self.patch.undo()

    @staticmethod
    def rows(tokens: list[int], layer: int, what: str) -> np.ndarray:
        heads = N_HEADS if what == "q" else N_KV_HEADS
        layer = layer if what == "q" else SHARES.get(layer, layer)
        out = [
            np.random.default_rng([token, layer, ord(what)]).standard_normal((heads, DIM))
            for token in tokens
        ]
        return np.stack(out, axis=1)[None].astype(np.float32)

    def feed(self, *batch: tuple[int, list[int]]) -> list[np.ndarray]:
        """``(seq_id, tokens)`` stretches; per layer ``[n_heads, n, DIM]``."""
        tokens = [token for _, stretch in batch for token in stretch]
        if self.kind == "decode":
            positions = list(range(self.cache.length, self.cache.length + len(tokens)))
        else:
            positions = self.cache.begin_step([(seq, len(stretch)) for seq, stretch in batch])
        return self.forward(tokens, positions)

    def forward(self, tokens: list[int], positions: list[int]) -> list[np.ndarray]:
        outputs = []
        for layer in range(N_LAYERS):
            q, k, v = (self.rows(tokens, layer, what) for what in "qkv")
            if self.backend == "torch":
                with torch.no_grad():
                    args = [torch.from_numpy(rows) for rows in (q, k, v)]
                    out = self.cache.update_and_attend(
                        *args, torch.tensor(positions), layer, 0.2, torch.float32
                    ).numpy()
            elif self.backend == "mlx":
                import mlx.core as mx

                args = [mx.array(rows) for rows in (q, k, v)]
                out = self.cache.update_and_attend(*args, positions, layer, 0.2, mx.float32)
            else:
                out = self.cache.update_and_attend(q, k, v, positions, layer, 0.2, "float32")
            outputs.append(np.asarray(out)[0])
        return outputs


def expected(tokens: list[int], layer: int, kv_dtype: str, n_new: int) -> np.ndarray:
    """The last ``n_new`` tokens of a history, whose ends are exact and whose middle is stored."""
    name, first, last = kv_dtype.rsplit(":", 2)
    n_first, n_last = int(first[5:]), int(last[4:])
    window = 12 if layer == 1 else None
    q, k, v = (Model.rows(tokens, layer, what)[0] for what in "qkv")
    rough_k, rough_v = stored(k, name, "k"), stored(v, name, "v")
    at = np.arange(len(tokens))
    is_exact = at >= len(tokens) - n_last
    if window is None:
        is_exact |= at < n_first
    k = np.where(is_exact[:, None], k, rough_k)
    v = np.where(is_exact[:, None], v, rough_v)
    k, v = (np.repeat(rows, N_HEADS // N_KV_HEADS, axis=0).astype(np.float64) for rows in (k, v))
    logits = np.einsum("hnd,hld->hnl", q[:, -n_new:], k) * 0.2
    behind = at[-n_new:, None] - at[None, :]
    seen = (behind >= 0) & (behind < (window or len(tokens) + 1))
    weights = np.exp(np.where(seen, logits, -np.inf))
    return np.einsum("hnl,hlv->hnv", weights / weights.sum(axis=2, keepdims=True), v)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int4", "int8", "int4:rot"])
def test_the_ends_of_a_history_are_read_in_float32_and_the_middle_as_stored(
    backend: str, kind: str, name: str
) -> None:
    kv_dtype = f"{name}:first3:last6"
    history: list[int] = []
    with Model(backend, kind, kv_dtype) as model:
        for n in (9, 1, 1, 5, 1, 1, 20, 1, 1, 1, 3, 1):
            tokens = list(range(len(history), len(history) + n))
            history += tokens
            for layer, out in enumerate(model.feed((0, tokens))):
                np.testing.assert_allclose(
                    out, expected(history, layer, kv_dtype, n), atol=1e-3, err_msg=f"{n} {layer}"
                )


@pytest.mark.parametrize("kind", ["seq", "paged", "tree"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_sequences_forks_and_cuts_that_are_exact_all_through_are_those_of_a_float_pool(
    backend: str, kind: str
) -> None:
    outputs = []
    for kv_dtype in ("float32", "int4:last60"):
        with Model(backend, kind, kv_dtype) as model:
            cache, out = model.cache, []
            out += model.feed((0, list(range(10))), (1, [50, 51]))
            cache.seq_cp(0, 2)
            out += model.feed((2, [60]), (0, [10, 11]), (1, [52]))
            cache.seq_rm(0, 9)
            out += model.feed((0, [70, 71]), (2, [61]))
            cache.seq_rm(1)
            out += model.feed((3, [80, 81, 82]), (0, [72]))
            if kind == "tree":
                for parents, tokens in (([-1, -1], [90, 91]), ([0, 1, 1], [92, 93, 94])):
                    cache.propose(parents, 0)
                    out += model.feed((0, tokens))
                cache.commit([1, 4], 0)
                out += model.feed((0, [95]), (3, [83]))
            outputs.append(out)
    for got, want in zip(*outputs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_more_histories_than_there_are_copies_for_are_read_quantised_and_go_on() -> None:
    with (
        Model("torch", "seq", "int8:first1:last2") as model,
        Model("torch", "seq", "int8") as rough,
    ):
        for start in range(0, 40, 8):
            batch = [(seq, [3 * seq + 1, 3 * seq + 2]) for seq in range(start, start + 8)]
            model.feed(*batch)
            rough.feed(*batch)
        for seq in range(40):
            one = [(seq, [200 + seq])]
            for layer, (a, b) in enumerate(zip(model.feed(*one), rough.feed(*one), strict=True)):
                np.testing.assert_allclose(a, b, atol=0.05, err_msg=f"{seq} {layer}")
        for exact in model.cache.pools.exact:
            exact.check()


def test_rows_that_were_taken_out_come_back_quantised() -> None:
    with Model("torch", "seq", "int8:last8") as model, Model("torch", "seq", "int8") as rough:
        for one in (model, rough):
            one.feed((0, list(range(12))))
            tables = one.cache.seq_table(0)
            rows = one.cache.read_rows(tables)
            one.cache.seq_rm(0)
            one.feed((1, list(range(40, 56))))
            new = one.cache.seq_claim(0, tables)
            one.cache.write_rows(new, rows)
        for a, b in zip(model.feed((0, [12])), rough.feed((0, [12])), strict=True):
            np.testing.assert_allclose(a, b, atol=0.05)
        for exact in model.cache.pools.exact:
            exact.check()


def test_exact_cells_count_as_bytes() -> None:
    sizes = {}
    for kv_dtype in ("int8", "int8:first2:last6"):
        with Model("torch", "seq", kv_dtype) as model:
            model.feed((0, [1, 2, 3]))
            sizes[kv_dtype] = model.cache.usage().size_bytes
    per_cell = 2 * N_KV_HEADS * DIM * 4
    more = N_SEQUENCES * per_cell * (2 * (2 + 6) + 6)  # layers 0 and 2; the window has no first
    assert sizes["int8:first2:last6"] == sizes["int8"] + more


def test_a_memory_budget_pays_for_exact_cells() -> None:
    held = {}
    for kv_dtype in ("int8", "int8:first2:last6"):
        budget = MemoryBudget(1 << 24)
        with Model("torch", "seq", kv_dtype, budget=budget) as model:
            model.feed((0, [1, 2, 3]))
            held[kv_dtype] = budget.held_bytes
    more = N_SEQUENCES * 2 * N_KV_HEADS * DIM * 4 * (2 * (2 + 6) + 6)
    assert held["int8:first2:last6"] == held["int8"] + more
