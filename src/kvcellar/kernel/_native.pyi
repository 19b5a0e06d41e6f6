"""
The compiled CPU kernel. Addresses are integers; nothing keeps what they point to alive.
"""

import enum
from collections.abc import Sequence

import numpy
import numpy.typing

import kvcellar.types

class Dtype(enum.Enum):
    """
    Storage types. Queries, new rows and results have one of the first three.
    """

    float32 = 0

    bfloat16 = 1

    float16 = 2

    int8 = 3

    int4 = 4

class Level(enum.Enum):
    """Instruction sets that the kernel is written for."""

    scalar = 0

    neon = 1

    avx2 = 2

    avx_vnni = 3

    vnni = 4

    bf16 = 5

    amx = 6

def levels() -> list[Level]:
    """
    Return the levels that this machine and this build have, the best first.
    """

def level() -> Level:
    """Return the level in use."""

def set_level(level: Level) -> None:
    """
    Use another level from the next call on.

    Raises:
        ConfigError: this machine or this build does not have it.
    """

class Threads(enum.Enum):
    """Whose threads the kernel runs on."""

    openmp = 0

    given = 1

    own = 2

def set_num_threads(n: int) -> None:
    """
    Use up to n threads; 0: as many as OpenMP, which torch is set by, or one per core.
    """

def num_threads() -> int:
    """Return how many threads the next call may use."""

def threads_of() -> Threads:
    """Return whose threads they are."""

def set_parallel_for(address: int) -> None:
    """
    Use another runtime's threads.

    Args:
        address: of a C function ``void(int n_workers, void (*work)(void*, int), void* data)``
            that calls ``work(data, i)`` for each worker i and returns when all have; 0: ours
            again.
    """

def stream_read(data: int, n_bytes: int) -> float:
    """
    Read memory with all threads and nothing else; return the sum of its floats.
    """

class Side:
    """
    Where K, or V, of one layer lies. Strides in bytes.

    Head h of cell c is at ``data + h * head_stride + c * cell_stride``; in blocks of
    ``block_size`` cells at ``data + h * head_stride + (c // block_size) * block_stride
    + (c % block_size) * cell_stride``. The ``affine`` fields say the same of the
    float16 (scale, bias) pairs, ``[dim // group_size, 2]`` for each row, of a
    quantised side.
    """

    def __init__(
        self,
        dtype: Dtype,
        dim: int,
        data: int,
        head_stride: int,
        cell_stride: int,
        block_stride: int = 0,
        affine: int = 0,
        affine_head_stride: int = 0,
        affine_cell_stride: int = 0,
        affine_block_stride: int = 0,
        group_size: int = 0,
    ) -> None:
        """
        Describe one side.

        Raises:
            ConfigError: a quantised side without scales or with groups that miss numbers.
        """

class Pool:
    """Where one layer's K and V lie; made anew when they are allocated anew."""

    def __init__(
        self,
        n_kv_heads: int,
        n_cells: int,
        k: Side,
        v: Side,
        block_size: int = 0,
        exact: Pool | None = None,
    ) -> None:
        """
        Describe one layer's bytes.

        Args:
            n_kv_heads: KV heads.
            n_cells: cells that are allocated; nothing past them is read or written.
            k: where K lies.
            v: where V lies.
            block_size: cells of a block; 0: all cells at one stride.
            exact: a pool of float rows, of as many heads and numbers. Runs of reads that start
                at ``bookkeeping.cells.exact.BASE`` or later are its cells, counted from there. Writes
                never go to it: a plan of their own does those.

        Raises:
            ConfigError: an exact pool of other rows.
        """

    @property
    def address(self) -> int:
        """Where it lies, for ``step_address()``."""

    def write_cells(
        self, layout: Layout, cells: numpy.typing.NDArray[numpy.int64], k: int, v: int
    ) -> None:
        """Write one row of k and v to each of these cells, int64, in order."""

    def move_cells(self, base: int, src: numpy.typing.NDArray[numpy.int64]) -> None:
        """
        Copy cells ``src``, int64, to those from base on; all are read before any is written.
        """

class Layout:
    """
    How a forward's q, k, v and result lie. Strides in numbers: from head to head, from
    token to token; the last dimension is contiguous everywhere.
    """

    def __init__(
        self,
        n_heads: int,
        dtype: Dtype,
        out_dtype: Dtype,
        q: tuple[int, int],
        k: tuple[int, int],
        v: tuple[int, int],
        out: tuple[int, int],
    ) -> None:
        """
        Describe the rows of a forward.

        Raises:
            ConfigError: a type that the kernel does not take.
        """

class Plan:
    """
    A ``StepPlan`` flattened, with its work already split; made once per forward and layer
    group. Cells that several reads see whole are read once.
    """

    def __init__(self, plan: kvcellar.types.StepPlan) -> None:
        """Flatten a plan."""

    @property
    def address(self) -> int:
        """Where it lies, for ``step_address()``."""

    @property
    def n_tokens(self) -> int:
        """Tokens of the forward."""

    @property
    def n_cells(self) -> int:
        """Cells that a pool needs."""

    @property
    def n_exact_cells(self) -> int:
        """Cells that an exact pool needs."""

    @property
    def n_shared_cells(self) -> int:
        """Cells that are read once for several reads."""

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
    ) -> None:
        """
        Write one layer's k and v, and attend. All rows are addresses.

        Args:
            pool: the layer's.
            layout: how rows lie.
            q: queries.
            k: new keys.
            v: new values.
            out: where results go.
            scale: factor on logits.
            softcap: their cap; 0.0: none.
            sinks: float32 ``[n_heads]``; 0: none.

        Raises:
            ConfigError: the plan reaches past the pool's cells, or heads do not fit.
        """

    def write(self, pool: Pool, layout: Layout, k: int, v: int) -> None:
        """Write one layer's k and v."""

    def attend(
        self, pool: Pool, layout: Layout, q: int, out: int, scale: float, softcap: float, sinks: int
    ) -> None:
        """Attend, of what is written already; arguments as of :meth:`step`."""

STEP_VERSION: int = 1

def step_address() -> int:
    """
    Return the address of the C function ``KvcStep`` of ``native/attend/step_call.h``.

    Shared objects of other runtimes call it with the addresses of a plan and of a pool,
    without Python.
    """

class WeightFormat(enum.Enum):
    """How weights are written; ``native/linear/linear.h`` says how they lie."""

    bf16 = 0

    int8 = 1

    int4 = 2

    coded = 3

    mxfp4 = 4

    f32 = 10

class BlockType(enum.Enum):
    """Types of blocks of GGUF files."""

    q4_0 = 0

    q4_1 = 1

    q5_0 = 2

    q5_1 = 3

    q8_0 = 4

    q4_k = 5

    q5_k = 6

    q6_k = 7

    iq4_nl = 8

    iq4_xs = 9

    mxfp4 = 10

    f16 = 11

    bf16 = 12

class LinearWeights:
    """Weights of a linear layer. Inputs and outputs are addresses."""

    def __init__(
        self, format: WeightFormat, n_in: int, n_out: int, data: int, beside: int = 0
    ) -> None:
        """
        Describe the weights.

        Args:
            format: how they are written.
            n_in: inputs, of int8, int4 and mxfp4 a multiple of 32.
            n_out: outputs.
            data: address of the weights.
            beside: address of the float16 scales of int8 and int4, the exponents of mxfp4, or
                what :func:`code` returned.
        """

    def linear(self, x: int, n_tokens: int, dtype: Dtype, out: int, out_dtype: Dtype) -> None:
        """
        Multiply rows ``[n_tokens, n_in]`` to ``[n_tokens, n_out]``, float32 or bfloat16.

        For int8, int4 and mxfp4 each group of 32 inputs is rounded to 8 bits. A token's result
        does not depend on others.
        """

    @property
    def can_multiply(self) -> bool:
        """True if the level in use has a matrix unit for these weights."""

    def multiply(self, x: int, n_tokens: int, out: int) -> None:
        """
        Multiply many tokens on the matrix unit, all in bfloat16; weights are rounded to it.
        """

    def unpack(self, first: int, stop: int, to: int) -> None:
        """
        Write blocks [first, stop) of 16 outputs as bfloat16 ``[outputs, n_in]``; not of bf16.
        """

    def gather(self, outputs: int, n: int, dtype: Dtype, to: int) -> None:
        """
        Write the weights of n outputs, int64, as ``[n, n_in]``.

        In bfloat16, all but coded ones also in float32. The outputs have to be there.
        """

def pack(
    rows: int, dtype: Dtype, format: WeightFormat, n_in: int, n_out: int, data: int, scales: int
) -> None:
    """
    Write weights in int8 or int4 and their float16 scales.

    Symmetric around 0, with a scale for each 128 inputs, or of int4 32: of int8 the largest
    magnitude is 127 steps, of int4 the number of the largest magnitude is -8 of them. Where
    not all that share a scale are finite it is NaN.

    Args:
        rows: address of ``[n_out, n_in]``.
        dtype: of them, float32 or bfloat16.
        format: int8 or int4.
        n_in: inputs, a multiple of 32.
        n_out: outputs.
        data: address of as many bytes as blocks of 16 outputs take.
        scales: address of float16 ``[n_blocks, n_scales, 16]``.
    """

def block_weights(type: BlockType, n_in: int, n_out: int, data: int, beside: int) -> LinearWeights:
    """
    Describe weights that :func:`place_blocks` has placed; addresses as it takes them.
    """

def block_sizes(type: BlockType, n_in: int, n_out: int) -> tuple[int, int, int]:
    """
    Return how many bytes weights take in a file, and as numbers and beside them here.
    """

def place_blocks(type: BlockType, rows: int, n_in: int, n_out: int, data: int, beside: int) -> None:
    """
    Put blocks of a GGUF file where products take them; nothing is lost.

    Args:
        type: of the blocks.
        rows: address of them, one output's after the other's.
        n_in: inputs, a multiple of a block's.
        n_out: outputs.
        data: address of as many bytes as :func:`block_sizes` says, for the numbers.
        beside: address of those for scales and minima.
    """

def affine_weights(
    bits: int, group: int, n_in: int, n_out: int, data: int, beside: int
) -> LinearWeights:
    """
    Describe weights that :func:`place_affine` has placed; addresses as it takes them.

    Raises:
        ConfigError: not 4 or 8 bits, groups of no multiple of 32 inputs, or not whole groups.
    """

def affine_sizes(bits: int, group: int, n_in: int, n_out: int) -> tuple[int, int]:
    """
    Return how many bytes affine weights take as numbers and beside them.

    Raises:
        ConfigError: as of :func:`affine_weights`.
    """

def place_affine(
    bits: int,
    group: int,
    numbers: int,
    scales: int,
    minima: int,
    n_in: int,
    n_out: int,
    data: int,
    beside: int,
) -> None:
    """
    Put affine weights, ``scale * number + minimum``, where products take them; nothing is lost.

    Args:
        bits: of a number, 4 or 8.
        group: inputs that share a scale and a minimum, a multiple of 32.
        numbers: address of uint8 ``[n_out, n_in]``, each of so many bits.
        scales: address of float32 ``[n_out, n_in / group]``.
        minima: address of as many.
        n_in: inputs, a multiple of the group.
        n_out: outputs.
        data: address of as many bytes as :func:`affine_sizes` says, for the numbers.
        beside: address of those for scales and minima.

    Raises:
        ConfigError: as of :func:`affine_weights`.
    """

def fit_q4_k(rows: int, dtype: Dtype, n_in: int, n_out: int, to: int) -> None:
    """
    Make weights blocks of Q4_K, for :func:`place_blocks`; scales and minima are searched.

    The same bytes come out on every machine. Of weights that are not all finite a block's
    are NaN.

    Args:
        rows: address of ``[n_out, n_in]``.
        dtype: of them, float32 or bfloat16.
        n_in: inputs, a multiple of 256.
        n_out: outputs.
        to: address of ``[n_out, n_in / 256, 144]`` bytes.
    """

def place_mxfp4(blocks: int, exponents: int, n_in: int, n_out: int, data: int, to: int) -> None:
    """
    Put weights of MXFP4, as checkpoints have them, where products take them; nothing is lost.

    Args:
        blocks: address of ``[n_out, n_in / 32, 16]`` bytes, the first input in a lower half.
        exponents: address of ``[n_out, n_in / 32]`` bytes, 127 for a scale of 1.
        n_in: inputs, a multiple of 32.
        n_out: outputs.
        data: address of as many bytes as blocks of 16 outputs take.
        to: address of the exponents ``[n_blocks, n_in / 32, 16]``.
    """

def code(rows: int, n_in: int, n_out: int, to: int, n_before: int = 0) -> bytes:
    """
    Write bfloat16 weights in 12 bits, of which nothing is lost.

    Args:
        rows: address of ``[n_out, n_in]``.
        n_in: inputs, a multiple of 128.
        n_out: outputs.
        to: address of as many bytes as ``models.weights.coded_bytes`` says.
        n_before: such numbers of other weights, after which this one's will be put.

    Returns:
        The numbers that do not fit into 12 bits, 8 bytes each.
    """

def norm(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: Dtype,
    weight: int,
    eps: float,
    out: int,
) -> None:
    """
    Write ``x / sqrt(mean(x^2) + eps) * weight`` of each row; bfloat16 is rounded before it too.

    Args:
        x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.
        n_tokens: tokens.
        n_rows: rows of a token.
        dim: numbers of a row.
        token_stride: numbers from token to token.
        dtype: float32 or bfloat16, of all three.
        weight: address of ``[dim]``.
        eps: what is added to the mean.
        out: address of the result, without gaps.
    """

def rotate(
    x: int,
    n_tokens: int,
    n_rows: int,
    dim: int,
    token_stride: int,
    dtype: Dtype,
    cos: int,
    sin: int,
) -> None:
    """
    Rotate the halves of each row against each other, in place: RoPE.

    Args:
        x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.
        n_tokens: tokens.
        n_rows: rows of a token.
        dim: numbers of a row, an even number.
        token_stride: numbers from token to token.
        dtype: float32 or bfloat16, of all three.
        cos: address of ``[n_tokens, dim]``.
        sin: address of ``[n_tokens, dim]``.
    """

def gate(x: int, n_tokens: int, dim: int, dtype: Dtype, out: int) -> None:
    """
    Write ``silu(x[:, 0]) * x[:, 1]`` of ``[n_tokens, 2, dim]``, float32 or bfloat16.
    """

class LinearLayer:
    """Weights, and the address of a bias in the layer's type; 0: none."""

    def __init__(
        self, weights: LinearWeights, bias: int = 0, more: Sequence[LinearWeights] = []
    ) -> None:
        """
        Describe a layer.

        Args:
            weights: of it, or of its first outputs.
            bias: address of all outputs' bias in the layer's type; 0: none.
            more: of the outputs behind these; all are packed then.
        """

    def linear(self, x: int, n_tokens: int, dtype: Dtype, out: int) -> None:
        """
        Run rows ``[n_tokens, n_in]`` to ``[n_tokens, all outputs]``, float32 or bfloat16.
        """

class Norm:
    """Address of a norm's weight, 0: no norm; and what is added to the mean."""

    def __init__(self, weight: int, eps: float, in_floats: bool = False) -> None:
        """
        Describe a norm.

        Args:
            weight: address; 0: no norm.
            eps: what is added to the mean of squares.
            in_floats: the weight is float32 whatever the rows are, and results are rounded once.
        """

class ApartNorms:
    """Norms of a mixture beside an MLP, each of which reads for itself."""

    def __init__(self, router: Norm, experts: Norm, experts_said: Norm, mlp_said: Norm) -> None:
        """
        Describe them.

        Args:
            router: of what the router reads.
            experts: of what experts read.
            experts_said: of what they say, together.
            mlp_said: of what the MLP says.
        """

class OwnInputs:
    """What a layer makes of rows of its own, behind its MLP."""

    def __init__(self, gate: LinearLayer, out: LinearLayer, norm: Norm) -> None:
        """
        Describe it: ``x + norm(out(act(gate(x)) * rows))``, by the activation of the layer's MLP.

        Args:
            gate: from the layer's sum to as many numbers as its rows have.
            out: from there to the sum.
            norm: of what that says.
        """

class DecoderLayer:
    """
    A decoder layer, which for a few tokens is two calls around its attention. All rows lie
    without gaps, at addresses.
    """

    def __init__(
        self,
        qkv: LinearLayer,
        o: LinearLayer,
        gate_up: LinearLayer | None,
        down: LinearLayer | None,
        before: Norm,
        between: Norm,
        q: Norm,
        k: Norm,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: Dtype,
        scale: float,
        mixture: Mixture | None = None,
        *,
        attended: Norm | None = None,
        mixed: Norm | None = None,
        norms_together: bool = False,
        n_turned: int = -1,
        rope: int = 0,
        residual: float = 1.0,
        gate: Gate | None = None,
        sinks: int = 0,
        share: LinearLayer | None = None,
        v: Norm | None = None,
        apart: ApartNorms | None = None,
        own: OwnInputs | None = None,
        result: float = 1.0,
    ) -> None:
        """
        Describe a layer.

        Args:
            qkv: q, k and v joined; q alone where an earlier layer's K and V are read.
            o: behind the attention.
            gate_up: gate and up joined; None: there is no MLP.
            down: the last one of the MLP; None: there is none.
            before: norm of the layer's input.
            between: norm of what comes after attention.
            q: norm of q's heads.
            k: norm of k's heads.
            n_heads: query heads.
            n_kv_heads: KV heads; 0: it attends over what an earlier layer has written, and ``qkv`` is
                q alone.
            head_dim: numbers of a head.
            dtype: float32 or bfloat16, of everything but packed weights.
            scale: factor on the attention's logits, for a :class:`Decoder`.
            mixture: in place of an MLP, or added to what that says.
            attended: norm of what the attention says, before it is added; None: there is none.
            mixed: norm of what the MLP says, before it is added; None: there is none.
            norms_together: all heads of q are normed together, and all of k.
            n_turned: the first so many numbers of a head are rotated; -1: all.
            rope: which of a forward's rotations.
            residual: factor on what is added.
            gate: of the MLP; None: silu.
            sinks: address of float32 ``[n_heads]``; 0: none.
            share: beside a mixture, from the MLP's input to a logit whose sigmoid it is multiplied
                with; None: it is added as it is.
            v: norm of v's heads; None: there is none.
            apart: norms of a mixture beside an MLP; None: both read what ``between`` makes.
            own: what the layer makes of rows of its own; None: it has none.
            result: factor on what the layer says.

        Raises:
            ConfigError: neither an MLP nor a mixture, or a share or norms of what is not both.
        """

    def before(self, x: int, n_tokens: int, cos: int, sin: int, qkv: int) -> None:
        """
        Make q, k and v of x ``[n_tokens, hidden]``: normed, projected, q and k normed and rotated.
        """

    def after(self, x: int, attended: int, n_tokens: int, out: int) -> None:
        """
        Project what was attended, add it to x, and add the gated MLP of its norm to that.

        Raises:
            ConfigError: the layer has rows of its own, which a :class:`Decoder` alone is given.
        """

class Decoder:
    """A causal model, of which a forward of a few tokens is one call."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        embedding: int,
        norm: Norm,
        head: LinearLayer,
        *,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_cap: float = 0.0,
    ) -> None:
        """
        Describe a model.

        Args:
            layers: one or more.
            embedding: address of ``[n_vocab, hidden]``, in the layers' type; 0: the head's weights,
                of all but 16 bits.
            norm: of the last layer's result.
            head: from there to logits.
            embedding_scale: factor on rows of the embedding, in the layers' type.
            logit_scale: factor on logits.
            logit_cap: ``cap * tanh(logit / cap)`` of what that makes; 0.0: none.

        Raises:
            ConfigError: no layers.
        """

    def run(
        self,
        steps: Sequence[tuple[Plan, Pool, Plan | None, Pool | None, float]],
        ids: int,
        n_tokens: int,
        ropes: Sequence[tuple[int, int]],
        rows: int,
        n_rows: int,
        logits: int,
        feature_layers: Sequence[int],
        features: int,
        own: int = 0,
    ) -> None:
        """
        Run a forward. Ids and rows have to be there: nothing is checked.

        Args:
            steps: of each layer its plan and pool, those of exact cells or None twice, and the cap
                on logits, 0.0 for none.
            ids: int64 ``[n_tokens]``.
            n_tokens: tokens.
            ropes: what layers may be rotated by: addresses of cosines and of sines, ``[n_tokens,
                numbers of a head that are rotated]`` in the layers' type.
            rows: int64 ``[n_rows]``, the tokens whose logits are wanted.
            n_rows: how many.
            logits: float32 ``[n_rows, n_vocab]``.
            feature_layers: layers whose input is wanted; behind the last one that is its result.
            features: float32 ``[n_tokens, number of feature_layers, hidden]``.
            own: ``[n_tokens, layers, size]`` in the layers' type, rows of each layer's own; 0: there are none.

        Raises:
            ConfigError: steps, rotations or rows are missing.
        """

class Eagle3Weights:
    """
    An EAGLE-3 head, for one call per level; ``native/layers/eagle3.h`` says more.
    """

    def __init__(
        self,
        *,
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
        qkv_bias: int = 0,
        residual_scale: int = 0,
    ) -> None:
        """
        Describe a head.

        Args:
            hidden: width of its hidden states.
            inner: width of its MLP.
            n_heads: query heads.
            n_kv_heads: KV heads.
            head_dim: numbers of a head.
            n_vocab: tokens that it reads.
            n_said: tokens that it can say.
            eps: of all norms, which have no weights: those are folded into the matrices.
            qkv: q, k and v joined; q alone where an earlier layer's K and V are read.
            o: behind the attention.
            gate_up: gate and up joined.
            down: the last one of the MLP.
            lm_head: from hidden states to what it can say.
            embedding: address of float32 ``[n_vocab, hidden]``.
            qkv_bias: address of float32; 0: none.
            residual_scale: address of float32 ``[hidden]``, where the residual is the normed
                hidden state times it; 0: where it is the hidden state.
        """

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
    ) -> None:
        """
        Write K and V of all tokens, attend, and say what is likeliest behind some of them.

        Args:
            plan: of this level.
            pool: the head's.
            exact_plan: what is written to exact cells too.
            exact_pool: where these are.
            rope: float32 ``[2, n_rope, head_dim]``: cosines, and sines with the sign of their half.
            n_rope: positions of it.
            tokens: as it reads them.
            positions: one of each token.
            hidden: float32 ``[n_hidden, hidden]``.
            n_hidden: rows of it.
            above: which of those rows each token goes on from.
            rows: the tokens behind which something is said.
            k: guesses behind each.
            out: float32 ``[n_rows, hidden]``.
            ids: int64 ``[n_rows, k]``, the likeliest first.
            beliefs: float32 ``[n_rows, k]``: how likely each is, among all that it can say.
        """

class ExpertLayer:
    """A linear layer of each expert of a mixture, one behind the other."""

    def __init__(self, weights: LinearWeights, n_experts: int, bias: int = 0) -> None:
        """
        Describe the layer.

        Args:
            weights: of the first expert. The next one's begin where its last block of 16 outputs
                ends, of bf16 its last output; its scales likewise. Escapes are all experts'.
            n_experts: how many.
            bias: address of ``[n_experts, n_out]`` in the type of the rows; 0: none.
        """

    def linear(
        self, x: int, n_rows: int, experts: int, n_each: int, dtype: Dtype, out: int
    ) -> None:
        """
        Multiply each row by the experts that it chose; each expert is read once for all.

        Args:
            x: address of ``[n_rows, n_in]``.
            n_rows: rows.
            experts: address of int64 ``[n_rows, n_each]``; for one that is not there: zeros.
            n_each: experts of a row.
            dtype: float32 or bfloat16, of rows and results.
            out: address of ``[n_rows, n_each, n_out]``.
        """

class Gate:
    """
    What a mixture computes between its layers; ``native/layers/rows.h`` says more.
    """

    def __init__(
        self, alpha: float = 1.0, cubic: float = 0.0, shift: float = 0.0, limit: float = 0.0
    ) -> None:
        """
        Describe ``(up + shift) * x * sigmoid(x * (alpha + cubic * x^2))``.

        Args:
            alpha: 1 is SiLU.
            cubic: of GELU in its form with tanh, positive.
            shift: what is added to up.
            limit: most of the gate, which is x, and of up's magnitude; 0: none.
        """

class Experts:
    """All experts of a mixture, for one call per layer."""

    def __init__(self, up: ExpertLayer, down: ExpertLayer, gate: Gate) -> None:
        """
        Describe a mixture.

        Args:
            up: gate and up joined.
            down: the last one.
            gate: between them.
        """

    def run(
        self, x: int, n_tokens: int, chosen: int, shares: int, n_chosen: int, dtype: Dtype, out: int
    ) -> None:
        """
        Sum what the experts that each token chose make of it, times their shares.

        Args:
            x: address of ``[n_tokens, hidden]``.
            n_tokens: tokens.
            chosen: address of int64 ``[n_tokens, n_chosen]``; one that is not there adds nothing.
            shares: address of float32 ``[n_tokens, n_chosen]``.
            n_chosen: experts of a token.
            dtype: float32 or bfloat16, of x and out.
            out: address of ``[n_tokens, hidden]``.
        """

class Router:
    """
    By what the tokens of a mixture choose; ``native/experts/experts.h`` says more.
    """

    def __init__(
        self,
        weights: LinearWeights,
        n_chosen: int,
        *,
        is_sigmoid: bool,
        is_normalised: bool,
        scale: float,
        bias: int,
        extra: int,
        rounds_logits: bool,
        rounds_shares: bool,
        groups: tuple[int, int, int] = (1, 1, 1),
        factors: int = 0,
    ) -> None:
        """
        Describe a router.

        Args:
            weights: plain, from hidden states to a logit for each expert.
            n_chosen: experts of a token, those with the highest scores.
            is_sigmoid: scores are each logit's sigmoid, and else the softmax of all.
            is_normalised: shares are divided by their sum.
            scale: factor on shares.
            bias: address of what is added to logits, in the type of the rows; 0: none.
            extra: address of float32 that is added to scores only to choose; 0: none.
            rounds_logits: logits are rounded to the type of the rows.
            rounds_shares: shares are.
            groups: into how many the experts are divided, among how many of them a token chooses, and how many
                of a group's highest scores are summed to say which.
            factors: address of float32 ``[n_experts]``, on each one's shares; 0: none.

        Raises:
            ConfigError: no experts are chosen, or more than there are; or groups do not divide them.
        """

    def choose(self, x: int, n_tokens: int, dtype: Dtype, experts: int, shares: int) -> None:
        """
        Choose for each token; experts int64 and shares float32 ``[n_tokens, n_chosen]``.
        """

class Mixture:
    """A router and its experts, for one call per layer."""

    def __init__(self, router: Router, experts: Experts) -> None: ...
    def run(self, x: int, n_tokens: int, dtype: Dtype, out: int) -> None:
        """Run tokens, ``[n_tokens, hidden]`` to as many."""

def expert_counts() -> tuple[int, int]:
    """
    Return what products with experts have read since the process began.

    Returns:
        Bytes of weights that were read, what is read again for more rows counting again; and
        bytes of those experts of each product that some row chose, each once.
    """

class StateBatch:
    """Tokens of one forward, and the slots that they read and write."""

    def __init__(
        self, n_tokens: int, dtype: Dtype, advances: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """
        Take a plan's advances: first token, number of tokens, and slots; from slot -1 come zeros.

        Raises:
            ConfigError: rows of another type, or an advance beyond the batch.
        """

    @property
    def n_slots(self) -> int:
        """Slots that a pool needs."""

class Convolution:
    """Each channel's weighted sum over its last inputs."""

    def __init__(
        self, n_channels: int, width: int, weight: int, bias: int = 0, *, has_silu: bool
    ) -> None:
        """
        Describe a convolution.

        Args:
            n_channels: channels.
            width: inputs of a sum, at most 8.
            weight: address of float32 ``[width, n_channels]``, for the oldest input first.
            bias: address of float32 ``[n_channels]``; 0: none.
            has_silu: results go through SiLU.

        Raises:
            ConfigError: a width that the kernel does not have.
        """

    def run(
        self,
        batch: StateBatch,
        states: int,
        n_slots: int,
        x: int,
        stride: int,
        out: int,
        times_in: int = 0,
        times_out: int = 0,
    ) -> None:
        """
        Run the batch's tokens; slots that it names as targets are written.

        Args:
            batch: tokens and slots.
            states: address of float32 ``[n_slots, n_channels, width]``, the last inputs.
            n_slots: of them.
            x: address of inputs, ``n_channels`` for each token.
            stride: numbers from token to token.
            out: address of ``[n_tokens, n_channels]``.
            times_in: address of factors on inputs, at the same stride; 0: none.
            times_out: address of factors on results, at the same stride; 0: none.

        Raises:
            ConfigError: fewer slots than the batch names.
        """

class DeltaRule:
    """
    The gated delta rule; ``native/recurrent/recurrent.h`` says what it computes.
    """

    def __init__(
        self,
        n_heads: int,
        n_key_heads: int,
        k_dim: int,
        v_dim: int,
        rates: int,
        shifts: int,
        *,
        n_decays: int,
        beta_scale: float,
    ) -> None:
        """
        Describe a layer.

        Args:
            n_heads: of values.
            n_key_heads: of queries and keys; each serves as many value heads that follow each other.
            k_dim: numbers of a key, at most 512.
            v_dim: numbers of a value.
            rates: address of float32 ``[n_heads]``.
            shifts: address of float32 ``[n_heads, n_decays]``.
            n_decays: of each head: 1, or ``k_dim``.
            beta_scale: factor on what is written.

        Raises:
            ConfigError: heads or sizes that the kernel does not have.
        """

    def run(
        self,
        batch: StateBatch,
        states: int,
        n_slots: int,
        q: int,
        k: int,
        v: int,
        stride: int,
        a: int,
        a_stride: int,
        b: int,
        b_stride: int,
        out: int,
    ) -> None:
        """
        Run the batch's tokens; slots that it names as targets are written.

        Args:
            batch: tokens and slots.
            states: address of float32 ``[n_slots, n_heads, k_dim, v_dim]``.
            n_slots: of them.
            q: address of queries, ``[n_key_heads, k_dim]`` for each token.
            k: address of keys.
            v: address of values, ``[n_heads, v_dim]``.
            stride: numbers from token to token, of all three.
            a: address of what decays are made of, ``[n_heads, n_decays]``.
            a_stride: numbers from token to token.
            b: address of what beta is made of, ``[n_heads]``.
            b_stride: numbers from token to token.
            out: address of ``[n_tokens, n_heads, v_dim]``.

        Raises:
            ConfigError: fewer slots than the batch names.
        """

class Scan:
    """
    The state update of Mamba 2; ``native/recurrent/recurrent.h`` says what it computes.
    """

    def __init__(
        self,
        n_heads: int,
        n_groups: int,
        head_dim: int,
        state_dim: int,
        rates: int,
        shifts: int,
        skips: int,
    ) -> None:
        """
        Describe a layer.

        Args:
            n_heads: heads.
            n_groups: of heads that follow each other and share B and C.
            head_dim: numbers of a head.
            state_dim: numbers of B and C, at most 512.
            rates: address of float32 ``[n_heads]``.
            shifts: address of float32 ``[n_heads]``, rounded as rows are.
            skips: address of float32 ``[n_heads]``.

        Raises:
            ConfigError: heads or sizes that the kernel does not have.
        """

    def run(
        self,
        batch: StateBatch,
        states: int,
        n_slots: int,
        x: int,
        b: int,
        c: int,
        stride: int,
        dt: int,
        dt_stride: int,
        out: int,
    ) -> None:
        """
        Run the batch's tokens; slots that it names as targets are written.

        Args:
            batch: tokens and slots.
            states: address of float32 ``[n_slots, n_heads, head_dim, state_dim]``.
            n_slots: of them.
            x: address of inputs, ``[n_heads, head_dim]`` for each token.
            b: address of ``[n_groups, state_dim]`` for each token.
            c: address of as many.
            stride: numbers from token to token, of all three.
            dt: address of what steps are made of, ``[n_heads]``.
            dt_stride: numbers from token to token.
            out: address of ``[n_tokens, n_heads, head_dim]``.

        Raises:
            ConfigError: fewer slots than the batch names.
        """

class GatedNorm:
    """RMSNorm of groups of numbers, with a gate before it or behind."""

    def __init__(
        self,
        dim: int,
        group: int,
        weight: int,
        n_weights: int,
        *,
        eps: float,
        gates_first: bool,
        is_sigmoid: bool,
        rounds: bool,
    ) -> None:
        """
        Describe a norm.

        Args:
            dim: numbers of a token.
            group: numbers that are normalised together.
            weight: address of float32 ``[n_weights]``; 0: there is a gate alone.
            n_weights: ``group``, or ``dim``.
            eps: what is added to the mean of squares.
            gates_first: the gate comes before the norm.
            is_sigmoid: the gate is a sigmoid, and else SiLU.
            rounds: what is normalised is rounded to the type of the rows, and so is its product with the
                weight.

        Raises:
            ConfigError: groups that do not fit.
        """

    def run(self, n_tokens: int, dtype: Dtype, x: int, gates: int, stride: int, out: int) -> None:
        """
        Run tokens ``[n_tokens, dim]``; gates lie ``stride`` numbers apart. x itself may be the result.
        """
