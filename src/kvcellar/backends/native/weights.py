"""Weights of a planned model in NumPy arrays, as the CPU kernel multiplies them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcellar.backends.large_pages import CHUNK, LINE, mapped
from kvcellar.backends.native.tensors import TYPES, ExpertRows, TensorRows, Tensors
from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.errors import ModelError
from kvcellar.kernel import attend, blocks, experts, layers
from kvcellar.kernel import linear as products
from kvcellar.models.plans.plan import (
    ApartPlan,
    Gate,
    LatentPlan,
    LinearPlan,
    MixturePlan,
    NormPlan,
    OwnPlan,
)
from kvcellar.models.weights import (
    BLOCK,
    CODED_SAMPLE,
    FILE,
    MOST_EXACT_BITS,
    PLAIN,
    SHARED,
    are_mostly_coded,
    bits_of,
    can_code,
    can_pack,
    coded_bytes,
    is_fitted,
)
from kvcellar.types import IntArray

Array = NDArray[Any]

MXFP4 = "MXFP4"
"""Type of experts that stay as they are, whatever the others are held in."""

_FITTED_BLOCK, _FITTED_BYTES = 256, 144
"""Numbers of a block of Q4_K, and its bytes in a file."""


class Arena:
    """Memory in large pages for arrays that are read whole in every step, one behind the other."""

    def __init__(self) -> None:
        """Create an empty arena."""
        self._rest = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> Array:
        """Return so many bytes of any value, on a cache line's boundary."""
        padded = -(-n_bytes // LINE) * LINE
        if padded > len(self._rest):
            size = max(padded, CHUNK)
            memory, start = mapped(size)
            self._rest = np.frombuffer(memory, np.uint8, count=size, offset=start)
        taken, self._rest = self._rest[:n_bytes], self._rest[padded:]
        return taken

    def copy(self, parts: Sequence[Array]) -> Array:
        """Copy arrays of one type and width, one behind the other."""
        n_rows, first = sum(len(part) for part in parts), parts[0]
        n_bytes = n_rows * first[:1].size * first.itemsize
        out = self.take(n_bytes).view(first.dtype).reshape(n_rows, *first.shape[1:])
        return np.concatenate(parts, out=out)


class Embedding:
    """Rows of tokens, which may be the weights of the head as well."""

    def __init__(
        self, weights: products.LinearWeights, table: Array | None, dtype: attend.Dtype
    ) -> None:
        """Take the rows as the kernel reads them.

        Args:
            weights: a row for each token.
            table: the same as an array in the model's type; None: the kernel unpacks them.
            dtype: type of the model.
        """
        self._weights, self._table, self._dtype = weights, table, dtype

    def layer(self) -> layers.LinearLayer:
        """Return the layer that multiplies with these rows: a head that is tied to them."""
        return layers.LinearLayer(self._weights, 0, [])

    def look_up(self, ids: IntArray, rows: Array) -> None:
        """Write the rows of tokens, which are in the vocabulary, to the first of ``rows``."""
        if self._table is not None:
            np.take(self._table, ids, axis=0, out=rows[: len(ids)])
        else:
            self._weights.gather(ids.ctypes.data, len(ids), self._dtype, rows.ctypes.data)


class WeightHolder:
    """Puts the weights of a model where the kernel reads them.

    Attributes:
        arena: where they lie.
        kept: every array that the kernel has an address of.
    """

    def __init__(self, tensors: Tensors, weights: str, dtype: str) -> None:
        """Choose how weights are held.

        Args:
            tensors: of the checkpoint.
            weights: ``bf16``, ``int8``, ``int4``, ``file`` or ``plain``; see ``LoadOptions``.
            dtype: type of everything else: ``float32`` or ``bfloat16``.
        """
        self.arena = Arena()
        self.kept: list[Array] = []
        self.dtype = attend.Dtype[dtype]
        self._tensors, self._weights = tensors, weights

    def numbers(self, values: NDArray[np.float32]) -> Array:
        """Keep an array in the model's type."""
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        made = to_bfloat16_bits(values) if is_bf16 else np.ascontiguousarray(values)
        self.kept.append(made)
        return made

    def keep(self, numbers: Array) -> Array:
        """Keep an array, without gaps, as long as the kernel may read it."""
        made = np.ascontiguousarray(numbers)
        self.kept.append(made)
        return made

    def floats(self, name: str) -> NDArray[np.float32]:
        """Keep a tensor of one axis in float32."""
        return self.keep(self._tensors.vector(name))

    def small(self, name: str) -> NDArray[np.float32]:
        """Read a small tensor ``[n]`` in float32, rounded to the model's type."""
        numbers = self._tensors.vector(name).reshape(-1)
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        return from_bfloat16_bits(to_bfloat16_bits(numbers)) if is_bf16 else numbers

    def order_of_inputs(self, plan: LinearPlan) -> IntArray | None:
        """Return in which order a matrix is held to have its inputs; None: in the plan's."""
        return self._tensors.order_of_inputs(plan.weights[0])

    def rounded(self, number: float) -> float:
        """Return a number as the model's type has it."""
        if self.dtype != attend.Dtype.bfloat16:
            return number
        return float(from_bfloat16_bits(to_bfloat16_bits(np.array([number], np.float32)))[0])

    def norm(self, plan: NormPlan | None) -> layers.Norm:
        """Describe a norm to the kernel, or none."""
        if plan is None:
            return layers.Norm(0, 0.0)
        return self.described(plan, self.norm_weight(plan))

    @staticmethod
    def described(plan: NormPlan, weight: Array) -> layers.Norm:
        """Describe a norm whose weight is held to the kernel."""
        return layers.Norm(weight.ctypes.data, plan.eps, plan.in_floats)

    def norm_of_ones(self, n: int, eps: float) -> layers.Norm:
        """Describe a norm of rows of n numbers that has no weight."""
        return layers.Norm(self.keep(np.ones(n, np.float32)).ctypes.data, eps, True)

    def apart(self, plan: ApartPlan) -> layers.ApartNorms:
        """Describe the norms of a mixture beside an MLP; errors as of ``norm``."""
        router = self.keep(self._tensors.norm(plan.router) * np.float32(plan.router_scale))
        asked = layers.Norm(router.ctypes.data, plan.router.eps, True)
        return layers.ApartNorms(asked, *map(self.norm, plan.norms[1:]))

    def own(self, plan: OwnPlan) -> layers.OwnInputs:
        """Hold what a layer makes of rows of its own; errors as of ``matrices``."""
        return layers.OwnInputs(self.linear(plan.gate), self.linear(plan.out), self.norm(plan.norm))

    def norm_weight(self, plan: NormPlan) -> Array:
        """Hold the weight of a norm, in the type that it multiplies in."""
        weight = self._tensors.norm(plan)
        if not plan.in_floats:
            return self.numbers(weight)
        made = np.ascontiguousarray(weight, np.float32)
        self.kept.append(made)
        return made

    def matrices(
        self, names: Sequence[str], orders: Sequence[IntArray | None] = (), *, is_most_exact: bool
    ) -> list[products.LinearWeights]:
        """Hold matrices of the same inputs; their outputs come one behind the other.

        Args:
            names: of the tensors.
            orders: of each which of its rows come, in their order; None: all as they are, as of
                all where nothing is said.
            is_most_exact: true for the head and the embedding, which keep more bits.

        Raises:
            ModelError: one is in a type that is not multiplied so.
        """
        found = [self._tensors.matrix(name) for name in names]
        if orders:
            found = [
                one if order is None else one._replace(rows=one.rows[order])
                for one, order in zip(found, orders, strict=True)
            ]
        if self._weights == FILE and orders:
            return [self._blocks(one, name) for one, name in zip(found, names, strict=True)]
        if self._weights == FILE:  # what is named twice is held once
            of = dict(zip(names, found, strict=True))
            held = {name: self._blocks(one, name) for name, one in of.items()}
            return [held[name] for name in names]
        rows = [_plain(one, name) for one, name in zip(found, names, strict=True)]
        n_in = found[0].n_in
        if self._is_plain(n_in):
            if not all(map(self._codes_well, rows)):
                return [self._unchanged(rows)]
            whole = _joined([_as_bf16(one) for one in rows])
            return [self._coded_each([whole], 1, *whole.shape)]
        if is_fitted(self._weights, n_in, is_most_exact):
            return [self._placed("Q4_K", _fitted(one), n_in) for one in rows]
        return [self._packed(_joined(rows), MOST_EXACT_BITS)]

    def _codes_well(self, rows: Array) -> bool:
        """Return true if a matrix is read faster here in 12 bits a number, without loss."""
        n_out, n_in = rows.shape
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        if not (is_bf16 and can_code(n_in) and products.reads_coded()):
            return False
        some = np.ascontiguousarray(_as_bf16(rows[:: max(1, n_out // CODED_SAMPLE)]))
        to = np.empty(coded_bytes(*some.shape), np.uint8)
        escapes = products.code(some.ctypes.data, n_in, len(some), to.ctypes.data)
        return are_mostly_coded(len(escapes) // 8, some.size)

    def _coded_each(
        self, each: Iterable[Array], n: int, n_out: int, n_in: int
    ) -> products.LinearWeights:
        """Write n matrices in 12 bits one behind the other; return the first."""
        data = self.arena.take(n * coded_bytes(n_out, n_in)).reshape(n, -1)
        escapes = bytearray()
        for to, one in zip(data, each, strict=True):
            rows = np.ascontiguousarray(_as_bf16(one))
            n_before = len(escapes) // 8
            escapes += products.code(rows.ctypes.data, n_in, n_out, to.ctypes.data, n_before)
        beside = np.frombuffer(escapes or bytes(8), np.uint8)
        self.kept += data, beside
        at = data.ctypes.data, beside.ctypes.data
        return products.LinearWeights(products.WeightFormat.coded, n_in, n_out, *at)

    def _unchanged(self, rows: Sequence[Array]) -> products.LinearWeights:
        """Hold matrices of the same inputs in the model's type, one behind the other."""
        held = self._copied(rows)
        form = self._plain_form
        return products.LinearWeights(form, held.shape[-1], len(held), held.ctypes.data)

    def _copied(self, rows: Sequence[Array]) -> Array:
        """Copy matrices of the same inputs in the model's type, one behind the other."""
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        held = self.arena.copy([_as_bf16(one) if is_bf16 else floats(one) for one in rows])
        self.kept.append(held)
        return held

    @property
    def _plain_form(self) -> products.WeightFormat:
        """Form of matrices in the model's type."""
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        return products.WeightFormat.bf16 if is_bf16 else products.WeightFormat.f32

    def _is_plain(self, n_in: int) -> bool:
        """Return true if rows of so many numbers stay in the model's type."""
        return self._weights in ("bf16", PLAIN) or not can_pack(n_in)

    def linear(
        self,
        plan: LinearPlan,
        orders: Sequence[IntArray | None] = (),
        *,
        is_most_exact: bool = False,
    ) -> layers.LinearLayer:
        """Hold linear layers of one input; arguments and errors as of ``matrices``."""
        first, *more = self.matrices(plan.weights, orders, is_most_exact=is_most_exact)
        return layers.LinearLayer(first, self._bias(plan, orders), more)

    def unchanged(self, plan: LinearPlan) -> layers.LinearLayer:
        """Hold linear layers of one input in the model's type; errors as of ``matrices``."""
        return layers.LinearLayer(self._small(plan), self._bias(plan), [])

    def _small(self, plan: LinearPlan) -> products.LinearWeights:
        rows = [_read(self._tensors.matrix(name), name) for name in plan.weights]
        return self._unchanged([one.reshape(-1, one.shape[-1]) for one in rows])

    def _bias(self, plan: LinearPlan, orders: Sequence[IntArray | None] = ()) -> int:
        """Hold the biases of linear layers, one behind the other; return their address, 0: none."""
        if not any(plan.biases):
            return 0
        parts = [
            np.zeros(self._tensors.matrix(weight).n_out, np.float32)
            if name is None
            else self._tensors.vector(name)
            for name, weight in zip(plan.biases, plan.weights, strict=True)
        ]
        if orders:
            each = zip(parts, orders, strict=True)
            parts = [part if order is None else part[order] for part, order in each]
        return self.numbers(np.concatenate(parts)).ctypes.data

    def mixture(self, plan: MixturePlan, gate: Gate) -> experts.Mixture:
        """Hold a mixture of experts.

        Raises:
            ModelError: as of ``matrices``, or parts do not fit each other.
        """
        router = experts.Router(
            self._small(plan.router),
            plan.n_chosen,
            is_sigmoid=plan.is_sigmoid,
            is_normalised=plan.is_normalised,
            scale=plan.scale,
            bias=self._bias(plan.router),
            extra=0 if plan.correction is None else self.floats(plan.correction).ctypes.data,
            rounds_logits=plan.rounds_logits,
            rounds_shares=plan.rounds_shares,
            groups=plan.groups,
            factors=0 if plan.factors is None else self.floats(plan.factors).ctypes.data,
        )
        names, biases = (plan.gate_up, plan.down), plan.biases or (None, None)
        found = [self._tensors.experts(name, is_crossed=plan.is_crossed) for name in names]
        shape, inner = self._tensors.shape(plan.router.weights[0])[1], found[1].n_in
        wanted = [(*shape[:1], 2 * inner, *shape[1:]), (*shape, inner)]
        if [(one.n_experts, one.n_out, one.n_in) for one in found] != wanted:
            raise ModelError(
                f"{' and '.join(names)} are not matrices of the {shape[0]} experts that "
                f"{plan.router.weights[0]} chooses among; copy the checkpoint again"
            )
        up, down = (
            self._experts(rows, name, bias, is_crossed=plan.is_crossed)
            for rows, name, bias in zip(found, names, biases, strict=True)
        )
        return experts.Mixture(router, experts.Experts(up, down, experts.Gate(*gate)))

    def _experts(
        self, rows: ExpertRows, name: str, bias: str | None, *, is_crossed: bool
    ) -> experts.ExpertLayer:
        """Hold a product of all experts; errors as of ``mixture``."""
        at_bias = 0
        if bias is not None:
            numbers = self._tensors.expert_biases(bias, is_crossed=is_crossed)
            if numbers.shape != (rows.n_experts, rows.n_out):
                raise ModelError(f"{bias} is {list(numbers.shape)}, which does not fit {name}")
            at_bias = self.numbers(numbers).ctypes.data
        return experts.ExpertLayer(self._of_experts(rows, name), rows.n_experts, at_bias)

    def _of_experts(self, rows: ExpertRows, name: str) -> products.LinearWeights:
        """Hold experts' matrices one behind the other; return the first."""
        each: Iterable[Array] = (rows.of(at) for at in range(rows.n_experts))
        shape = rows.n_out, rows.n_in
        if self._weights == FILE or (rows.kind == MXFP4 and self._weights != PLAIN):
            _check_multiplied(rows.kind, name)
            return self._placed_each(rows.kind, each, rows.n_experts, *shape)
        read = _read if rows.kind == MXFP4 else _plain
        each = (read(TensorRows(rows.kind, one, rows.n_in), name) for one in each)
        if not self._is_plain(rows.n_in):
            return self._packed_each(each, rows.n_experts, *shape, bits_of(self._weights))
        some = (rows.of(at) for at in {0, rows.n_experts // 2, rows.n_experts - 1})
        matrices = (read(TensorRows(rows.kind, one, rows.n_in), name) for one in some)
        if all(map(self._codes_well, matrices)):
            return self._coded_each(each, rows.n_experts, *shape)
        is_bf16 = self.dtype == attend.Dtype.bfloat16
        size = np.uint16 if is_bf16 else np.float32
        held = self.arena.take(rows.n_experts * math.prod(shape) * size().itemsize).view(size)
        self.kept.append(held)
        whole = held.reshape(rows.n_experts, *shape)
        for at, one in enumerate(each):
            whole[at] = _as_bf16(one) if is_bf16 else floats(one)
        return products.LinearWeights(self._plain_form, rows.n_in, rows.n_out, held.ctypes.data)

    def expansion(self, plan: LatentPlan) -> tuple[experts.ExpertLayer, experts.ExpertLayer]:
        """Hold what expands latents, of each head, in the model's type.

        Args:
            plan: of the attention.

        Returns:
            From a head's query to latents, and from attended latents to a head's result.

        Raises:
            ModelError: it is not there, or in a type that is not read.
        """
        shape = plan.shape
        sizes = (shape.latent_dim, shape.plain_dim), (shape.v_dim, shape.latent_dim)
        numbers = [_read(one, plan.expand) for one in self._tensors.expansion(plan)]
        if len(numbers) == 1:
            by_head = numbers[0].reshape(shape.n_kv_heads, -1, shape.latent_dim)
            of_k, of_v = by_head[:, : shape.plain_dim], by_head[:, shape.plain_dim :]
            numbers = [of_k.swapaxes(1, 2), of_v]
        made = []
        for rows, (n_out, n_in) in zip(numbers, sizes, strict=True):
            held = self._copied([rows.reshape(-1, n_in)])
            one = products.LinearWeights(self._plain_form, n_in, n_out, held.ctypes.data)
            made.append(experts.ExpertLayer(one, shape.n_kv_heads))
        return made[0], made[1]

    def embedding(self, name: str) -> Embedding:
        """Hold the rows of an embedding; errors as of ``matrices``."""
        (weights,) = self.matrices([name], is_most_exact=True)
        last = self.kept[-1]  # of bytes, the kernel reads the rows
        table = last if last.dtype in (np.uint16, np.float32) else None
        return Embedding(weights, table, self.dtype)

    def _blocks(self, one: TensorRows, name: str) -> products.LinearWeights:
        _check_multiplied(one.kind, name)
        return self._placed(one.kind, one.rows, one.n_in)

    def _placed(self, kind: str, rows: Array, n_in: int) -> products.LinearWeights:
        return self._placed_each(kind, [rows], 1, len(rows), n_in)

    def _placed_each(
        self, kind: str, each: Iterable[Array], n: int, n_out: int, n_in: int
    ) -> products.LinearWeights:
        """Place n matrices of blocks one behind the other; return the first."""
        block = blocks.block_type(kind)
        n_stored, n_data, n_beside = blocks.block_sizes(block, n_in, n_out)
        data, beside = (self.arena.take(n * size).reshape(n, size) for size in (n_data, n_beside))
        self.kept += data, beside
        for at, rows in enumerate(each):
            rows = np.ascontiguousarray(rows)
            if rows.nbytes != n_stored:
                raise ModelError(
                    f"a matrix {n_out} x {n_in} in {kind} is {rows.nbytes} bytes, and takes "
                    f"{n_stored}; copy the checkpoint again"
                )
            to = data[at].ctypes.data, beside[at].ctypes.data
            blocks.place_blocks(block, rows.ctypes.data, n_in, n_out, *to)
        return blocks.block_weights(block, n_in, n_out, data.ctypes.data, beside.ctypes.data)

    def _packed(self, rows: Array, bits: int) -> products.LinearWeights:
        n_out, n_in = rows.shape
        return self._packed_each([rows], 1, n_out, n_in, bits)

    def _packed_each(
        self, each: Iterable[Array], n: int, n_out: int, n_in: int, bits: int
    ) -> products.LinearWeights:
        """Pack n matrices one behind the other; return the first."""
        n_rows = -(-n_out // BLOCK) * BLOCK
        sizes = n_rows * n_in * bits // 8, 2 * n_rows * -(-n_in // SHARED[bits])
        data, scales = (self.arena.take(n * size).reshape(n, size) for size in sizes)
        self.kept += data, scales
        kind = products.format_of(bits)
        for at, one in enumerate(each):
            rows = np.ascontiguousarray(one)
            if rows.shape != (n_out, n_in):
                raise ModelError(f"a matrix is {list(rows.shape)} and not {[n_out, n_in]}")
            dtype = attend.Dtype["bfloat16" if rows.dtype == np.uint16 else "float32"]
            to = data[at].ctypes.data, scales[at].ctypes.data
            products.pack(rows.ctypes.data, dtype, kind, n_in, n_out, *to)
        return products.LinearWeights(kind, n_in, n_out, data.ctypes.data, scales.ctypes.data)


def _check_multiplied(kind: str, name: str) -> None:
    """Refuse a type of blocks that is not multiplied as it is.

    Raises:
        ModelError: so it is.
    """
    if kind not in blocks.INPUTS:
        raise ModelError(
            f"the tensor {name} is in {kind}, which the kernel does not multiply as it is; "
            f"load the model with the backend torch, or choose --weights int8"
        )


def _plain(one: TensorRows, name: str) -> Array:
    """Return the numbers of a matrix: float32, or bfloat16's bits.

    Raises:
        ModelError: it is in blocks.
    """
    if one.kind not in TYPES:
        raise ModelError(
            f"the tensor {name} is in {one.kind}, which the native backend multiplies as it is and "
            f"does not pack anew; leave weights out, or load the model with the backend torch"
        )
    return one.rows.astype(np.float32) if one.kind == "F16" else one.rows


def _read(one: TensorRows, name: str) -> Array:
    """Return the numbers of a matrix, as ``_plain`` does, or what its blocks stand for."""
    if one.kind not in blocks.INPUTS or one.kind in TYPES:
        return _plain(one, name)
    block, shape = blocks.block_type(one.kind), (one.n_in, one.n_out)
    data, beside = (np.empty(size, np.uint8) for size in blocks.block_sizes(block, *shape)[1:])
    to = data.ctypes.data, beside.ctypes.data
    blocks.place_blocks(block, np.ascontiguousarray(one.rows).ctypes.data, *shape, *to)
    outputs, found = np.arange(one.n_out), np.empty((one.n_out, one.n_in), np.float32)
    blocks.block_weights(block, *shape, *to).gather(
        outputs.ctypes.data, one.n_out, attend.Dtype.float32, found.ctypes.data
    )
    return found


def _as_bf16(rows: Array) -> Array:
    return rows if rows.dtype == np.uint16 else to_bfloat16_bits(rows)


def floats(x: Array) -> Array:
    """Return numbers of the model's type, bfloat16 as its bits, in float32."""
    return from_bfloat16_bits(x) if x.dtype == np.uint16 else x


def typed(x: Array, dtype: Any) -> Array:
    """Return numbers in the model's type, bfloat16 as its bits."""
    return to_bfloat16_bits(x) if dtype == np.uint16 else x


def _joined(rows: Sequence[Array]) -> Array:
    """Join matrices, in float32 where their types differ."""
    if len({one.dtype for one in rows}) > 1:
        rows = [from_bfloat16_bits(one) if one.dtype == np.uint16 else one for one in rows]
    return np.ascontiguousarray(rows[0]) if len(rows) == 1 else np.concatenate(rows)


def _fitted(rows: Array) -> Array:
    """Make weights blocks of Q4_K, as :func:`kvcellar.kernel.blocks.fit_q4_k` says."""
    rows = np.ascontiguousarray(rows)
    n_out, n_in = rows.shape
    made = np.empty((n_out, n_in // _FITTED_BLOCK * _FITTED_BYTES), np.uint8)
    dtype = attend.Dtype["bfloat16" if rows.dtype == np.uint16 else "float32"]
    blocks.fit_q4_k(rows.ctypes.data, dtype, n_in, n_out, made.ctypes.data)
    return made
