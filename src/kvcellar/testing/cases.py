"""The models and settings that the conformance suite runs: few, and pairwise over the choices."""

from __future__ import annotations

from dataclasses import dataclass

from kvcellar import LayerGroup, ModelCacheParams
from kvcellar.states import StateGroup, StateShape
from kvcellar.testing.dense import row_bytes


@dataclass(frozen=True)
class Case:
    """A made-up model and how its cache is set up.

    Attributes:
        name: what the tests print.
        n_q_heads: query heads of every layer.
        groups: the layer groups; a full one among them or not.
        has_sinks: whether every layer has attention sinks.
        kv_dtype: how K and V are stored.
        in_dtype: the model's own type: that of q, k, v and of the result.
        window_slack: see ``CacheConfig``.
        capacity, min_chunk: see ``CacheConfig``.
        shared: layers that share an earlier one's rows, see ``ModelCacheParams``.
        state: the recurrent layers; None: there are none.
    """

    name: str
    n_q_heads: int
    groups: tuple[LayerGroup, ...]
    has_sinks: bool = False
    kv_dtype: str = "float32"
    in_dtype: str = "float32"
    window_slack: int = 64
    capacity: int = 256
    min_chunk: int = 8
    shared: tuple[tuple[int, int], ...] = ()
    state: StateGroup | None = None

    @property
    def params(self) -> ModelCacheParams:
        """Parameters of the model's cache."""
        n_layers = sum(len(g.layers) for g in self.groups) + len(self.shared)
        return ModelCacheParams(n_layers, groups=self.groups, shared=self.shared, state=self.state)

    @property
    def has_window(self) -> bool:
        """True if a layer group has a sliding window."""
        return any(g.window is not None for g in self.groups)

    @property
    def lets_go(self) -> bool:
        """True if a layer group has a window or a chunk, and lets go of its past."""
        return not all(g.is_full for g in self.groups)

    @property
    def bookkeeping(self) -> tuple[bool, ...]:
        """Kinds of groups that decide about cells: full, window, chunk, shared, states."""
        return (
            any(g.is_full for g in self.groups),
            self.has_window,
            any(g.chunk is not None for g in self.groups),
            bool(self.shared),
            self.state is not None,
        )

    def group(self, layer: int) -> LayerGroup:
        """Return the layer group that a layer belongs to, or whose rows it shares."""
        source = dict(self.shared).get(layer, layer)
        return next(g for g in self.groups if source in g.layers)


def group(
    layers: tuple[int, ...],
    n_kv_heads: int,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> LayerGroup:
    """Return a layer group; its V rows are as long as its K rows where ``v_head_dim`` is None."""
    return LayerGroup(layers, n_kv_heads, head_dim, v_head_dim or head_dim, window, softcap, chunk)


def latent_group(
    layers: tuple[int, ...],
    head_dim: int,
    v_head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
) -> LayerGroup:
    """Return a layer group with latent rows of ``v_head_dim`` and rotary ones of ``head_dim``."""
    return LayerGroup(layers, 1, head_dim, v_head_dim, window, softcap, is_latent=True)


CASES = (
    Case("mha", 4, (group((0, 1), 4),)),
    Case("gqa-sinks-short-v", 4, (group((0,), 2, 8, 6),), has_sinks=True),
    Case("mqa-window-softcap", 4, (group((0,), 1, 6, 8, window=5, softcap=2.0),), window_slack=3),
    Case("gqa-sinks-window", 6, (group((0, 1), 2, window=12),), has_sinks=True, window_slack=0),
    Case(
        "mixed-three-groups",
        6,
        (group((1, 4), 3), group((0, 3), 3, window=4), group((2,), 3, window=9, softcap=1.5)),
        window_slack=6,
    ),
    Case(
        "mixed-shapes-sinks",
        4,
        (group((0, 2), 2, 8, window=6), group((1,), 1, 12, 10)),
        has_sinks=True,
        window_slack=4,
    ),
    Case("two-windows-no-slack", 2, (group((0,), 1, window=3), group((1,), 2, window=2)), False,
         window_slack=0),
    Case("bf16-gqa", 4, (group((0, 1), 2, 16),), kv_dtype="bfloat16", in_dtype="bfloat16"),
    Case("bf16-model-fp32-kv", 4, (group((0,), 4, 16),), has_sinks=True, in_dtype="bfloat16"),
    Case(
        "bf16-kv-of-a-fp32-model",
        4,
        (group((0,), 2, 8), group((1,), 2, 8, 12, window=7, softcap=3.0)),
        kv_dtype="bfloat16",
        window_slack=5,
    ),
    Case(
        "fp16-mqa-window",
        4,
        (group((0,), 1), group((1,), 1, window=6)),
        has_sinks=True,
        kv_dtype="float16",
        in_dtype="float16",
        window_slack=8,
    ),
    Case("fp8", 4, (group((0, 1), 2, 8, 6), group((2,), 1, 12, window=6)), has_sinks=True,
         kv_dtype="fp8", window_slack=4),
    Case("int8", 4, (group((0, 1), 2, 64),), kv_dtype="int8"),
    Case("int4-window-sinks", 6, (group((0,), 2, 64, 96), group((1,), 2, 32, window=6)),
         has_sinks=True, kv_dtype="int4", window_slack=5),
    Case("k8v4-odd-rows-softcap", 3, (group((0,), 1, 9, 7), group((1,), 3, 6, 5, 8, 2.0)),
         kv_dtype="k8v4", window_slack=6),
    Case("int4-rotated", 4, (group((0,), 2, 64), group((1,), 4, 96, 32, 9)),
         kv_dtype="int4:g32:rot", window_slack=4),
    Case("k32v8-mha", 2, (group((0,), 2, 128),), kv_dtype="k32v8:g64", window_slack=4),
    Case("k4v16-bf16-model", 4, (group((0, 1), 2, 32),), kv_dtype="k4v16", in_dtype="bfloat16"),
    Case("chunk-beside-full", 4, (group((0, 2), 2, 8, chunk=4), group((1,), 4, 6, 10)),
         window_slack=6),
    Case("chunk-of-one-sinks-softcap", 6,
         (group((0,), 3, 8, 6, chunk=1), group((1,), 2, softcap=2.0, chunk=7)),
         has_sinks=True, window_slack=0),
    Case("chunk-longer-than-the-text", 2, (group((0,), 1, chunk=1000),), kv_dtype="bfloat16",
         in_dtype="bfloat16"),
    Case("int8-chunk-and-window", 4, (group((0,), 2, 64, chunk=9), group((1,), 4, 32, window=5)),
         kv_dtype="int8", window_slack=4),
    Case("shared-full-and-window", 4,
         (group((0,), 2, 12, 8), group((1, 2), 1, 8, window=6)), has_sinks=True, window_slack=5,
         shared=((3, 0), (4, 2), (5, 2))),
    Case("bf16-shared-chunk-softcap", 6,
         (group((0,), 3, 8, 6, softcap=2.0), group((2,), 2, chunk=5)),
         kv_dtype="bfloat16", in_dtype="bfloat16", window_slack=3, shared=((1, 0), (3, 2))),
    Case("int4-shared", 4, (group((0, 1), 2, 64),), kv_dtype="int4:rot", shared=((2, 1),)),
    Case("latent", 4, (latent_group((0,), 4, 16),)),
    Case("latent-window-sinks-softcap", 3,
         (latent_group((0,), 6, 10, window=6), latent_group((1,), 8, 8, softcap=2.0)),
         has_sinks=True, window_slack=5),
    Case("latent-beside-heads", 4, (latent_group((1,), 8, 32), group((0,), 2, 8, window=5)),
         kv_dtype="bfloat16", in_dtype="bfloat16", window_slack=4),
    Case("latent-fp8-bf16-model", 3, (latent_group((0,), 8, 16),), kv_dtype="fp8",
         in_dtype="bfloat16"),
    Case("latent-int8-rotated", 6, (latent_group((0,), 32, 64),), kv_dtype="int8:rot"),
    Case("latent-int4", 2, (latent_group((0,), 32, 96),), kv_dtype="int4"),
)  # fmt: skip


def states(*layers: tuple[tuple[str, tuple[int, ...]], ...]) -> StateGroup:
    """Return recurrent layers, each with states of these kinds and shapes."""
    return StateGroup(tuple(tuple(StateShape(*state) for state in layer) for layer in layers))


STATE_CASES = (
    Case("states-beside-full", 4, (group((0,), 2),),
         state=states((("convolution", (3, 4)), ("recurrent", (2, 3, 5))))),
    Case("states-beside-window-and-shared", 4, (group((0,), 2), group((1,), 2, window=6)),
         window_slack=5, shared=((2, 1),), kv_dtype="bfloat16", in_dtype="bfloat16",
         state=states((("recurrent", (7,)),), (("convolution", (2, 3)),),
                      (("convolution", (4, 2)), ("recurrent", (2, 2))))),
)  # fmt: skip
"""Models with recurrent layers: for backends whose caches keep states, see ``BackendAdapter``."""


def cases_named(*names: str) -> tuple[Case, ...]:
    """Return those of ``CASES`` that have these names."""
    return tuple(case for case in CASES if case.name in names)


def bytes_per_cell(case: Case) -> int:
    """Return the bytes of one token's K and V in all layers."""
    total = 0
    for g in case.groups:
        sides = (("k", g.head_dim), ("v", g.v_head_dim))
        row = sum(row_bytes(case.kv_dtype, side, dim) for side, dim in sides)
        total += len(g.layers) * g.n_kv_heads * row
    return total
