"""The compiled kernel. Addresses are integers; nothing keeps what they point to alive."""

from collections.abc import Sequence

from kvcellar.types import AttendKind, StepPlan

class Side:
    def __init__(
        self,
        dtype: int,
        dim: int,
        data: int,
        head_stride: int,
        cell_stride: int,
        block_stride: int,
        affine: int,
        affine_head_stride: int,
        affine_cell_stride: int,
        affine_block_stride: int,
        group_size: int,
        /,
    ) -> None: ...

class Pool:
    def __init__(
        self,
        n_kv_heads: int,
        n_cells: int,
        block_size: int,
        k: Side,
        v: Side,
        exact: Pool | None,
        /,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    def write_cells(self, layout: Layout, cells: int, n: int, k: int, v: int, /) -> None: ...
    def move_cells(self, base: int, src: int, n: int, /) -> None: ...

class Layout:
    def __init__(
        self,
        n_heads: int,
        in_dtype: int,
        out_dtype: int,
        q_head: int,
        q_token: int,
        k_head: int,
        k_token: int,
        v_head: int,
        v_token: int,
        out_head: int,
        out_token: int,
        /,
    ) -> None: ...

class LinearWeights:
    def __init__(self, format: int, n_in: int, n_out: int, data: int, beside: int, /) -> None: ...
    def linear(self, x: int, n_tokens: int, dtype: int, out: int, out_dtype: int, /) -> None: ...
    @property
    def can_multiply(self) -> bool: ...
    def multiply(self, x: int, n_tokens: int, out: int, /) -> None: ...
    def unpack(self, first: int, stop: int, to: int, /) -> None: ...
    def gather(self, outputs: int, n: int, dtype: int, to: int, /) -> None: ...

class Eagle3Weights:
    def __init__(
        self,
        hidden: int,
        inner: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        n_vocab: int,
        n_said: int,
        eps: float,
        qkv: LinearWeights,
        o: LinearWeights,
        gate_up: LinearWeights,
        down: LinearWeights,
        lm_head: LinearWeights,
        embedding: int,
        qkv_bias: int,
        residual_scale: int,
        /,
    ) -> None: ...
    def level(
        self,
        plan: Plan,
        pool: Pool,
        exact_plan: Plan | None,
        exact_pool: Pool | None,
        rope: int,
        n_rope: int,
        tokens: Sequence[int],
        positions: Sequence[int],
        hidden: int,
        n_hidden: int,
        above: Sequence[int],
        rows: Sequence[int],
        k: int,
        out: int,
        ids: int,
        beliefs: int,
        /,
    ) -> None: ...

class Plan:
    def __init__(self, plan: StepPlan, causal: AttendKind, explicit: AttendKind, /) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_cells(self) -> int: ...
    @property
    def n_exact_cells(self) -> int: ...
    @property
    def n_shared_cells(self) -> int: ...
    def step(
        self,
        pool: Pool,
        layout: Layout,
        q: int,
        k: int,
        v: int,
        out: int,
        scale: float,
        softcap: float,
        sinks: int,
        /,
    ) -> None: ...
    def write(self, pool: Pool, layout: Layout, k: int, v: int, /) -> None: ...
    def attend(
        self,
        pool: Pool,
        layout: Layout,
        q: int,
        out: int,
        scale: float,
        softcap: float,
        sinks: int,
        /,
    ) -> None: ...

class LinearLayer:
    def __init__(self, weights: LinearWeights, bias: int, /) -> None: ...

class Norm:
    def __init__(self, weight: int, eps: float, /) -> None: ...

class DecoderLayer:
    def __init__(
        self,
        qkv: LinearLayer,
        o: LinearLayer,
        gate_up: LinearLayer,
        down: LinearLayer,
        before: Norm,
        between: Norm,
        q: Norm,
        k: Norm,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: int,
        scale: float,
        /,
    ) -> None: ...
    def before(self, x: int, n_tokens: int, cos: int, sin: int, qkv: int, /) -> None: ...
    def after(self, x: int, attended: int, n_tokens: int, out: int, /) -> None: ...

class Decoder:
    def __init__(
        self, layers: Sequence[DecoderLayer], embedding: int, norm: Norm, head: LinearLayer, /
    ) -> None: ...
    def run(
        self,
        steps: Sequence[tuple[Plan, Pool, Plan | None, Pool | None, float]],
        ids: int,
        n_tokens: int,
        cos: int,
        sin: int,
        rows: int,
        n_rows: int,
        logits: int,
        feature_layers: Sequence[int],
        features: int,
        /,
    ) -> None: ...

def norm(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: int,
    weight: int,
    eps: float,
    out: int,
    /,
) -> None: ...
def rotate(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: int,
    cos: int,
    sin: int,
    /,
) -> None: ...
def gate(x: int, n_tokens: int, dim: int, dtype: int, out: int, /) -> None: ...
def pack(
    rows: int, dtype: int, format: int, n_in: int, n_out: int, data: int, scales: int, /
) -> None: ...
def code(rows: int, n_in: int, n_out: int, to: int, /) -> bytes: ...
def levels() -> list[str]: ...
def level() -> str: ...
def set_level(name: str, /) -> bool: ...
def set_num_threads(n: int, /) -> None: ...
def num_threads() -> int: ...
def threads_of() -> str: ...
def set_parallel_for(address: int, /) -> None: ...

STEP_VERSION: int

def step_address() -> int: ...
def stream_read(data: int, n_bytes: int, /) -> float: ...
