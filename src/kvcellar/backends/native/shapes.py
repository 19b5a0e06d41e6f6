"""Shapes of a checkpoint's tensors, held to the sizes of its plan before the kernel reads one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvcellar.backends.native.tensors import Tensors
from kvcellar.errors import ModelError
from kvcellar.models.plans.plan import (
    LatentPlan,
    LayerPlan,
    LinearPlan,
    MixturePlan,
    ModelPlan,
    NormPlan,
)
from kvcellar.models.plans.recurrent import RecurrentPlan


def check_shapes(plan: ModelPlan, tensors: Tensors) -> None:
    """Refuse a checkpoint whose tensors do not have the sizes of its plan.

    Matrices of experts are held to their router when they are read.

    Raises:
        ModelError: a tensor has another shape, or is not there.
    """
    of = _Shapes(tensors)
    hidden, vocab = plan.facts.hidden_size, plan.facts.vocab_size
    (embedding,) = of.linear(LinearPlan((plan.embedding,), (None,)), None, hidden)
    if embedding < vocab:
        raise of.wrong(plan.embedding, f"rows of {vocab} tokens")
    of.linear(plan.head, vocab, hidden)
    of.norm(plan.norm, hidden)
    own = plan.own_rows
    if own is not None:
        width = own.size * len(plan.layers)
        of.linear(LinearPlan((own.embedding,), (None,)), vocab, width)
        of.linear(own.project, width, hidden)
        of.norm(own.norm, own.size)
    for one in plan.layers:
        _check_layer(one, of, hidden, 0 if own is None else own.size)


def _check_layer(one: LayerPlan, of: _Shapes, hidden: int, n_own: int) -> None:
    n_heads, n_kv_heads, dim = one.heads
    if one.latent is not None:
        _check_latent(one, one.latent, of, hidden)
    elif one.recurrent is not None:
        of.linear(one.qkv, one.recurrent.n_in, hidden, one.recurrent.ends)
        of.linear(one.o, hidden, one.recurrent.inner)
        _check_recurrent(one.recurrent, of)
    else:
        n_queries = n_heads * dim * (1 + one.is_gated)
        ends = [n_queries + n * n_kv_heads * dim for n in range(3)]
        of.linear(one.qkv, ends[-1], hidden, ends)
        of.linear(one.o, hidden, n_heads * dim)
    for norm in (one.before, one.between, one.attended, one.mixed):
        of.norm(norm, hidden)
    of.norm(one.q_norm, n_heads * dim if one.norms_together else dim)
    of.norm(one.k_norm, n_kv_heads * dim if one.norms_together else dim)
    if one.sinks is not None:
        of.vector(one.sinks, n_heads)
    if one.gate_up is not None and one.down is not None:
        n_both = sum(of.linear(one.gate_up, None, hidden))
        of.linear(one.down, hidden, n_both // 2)
    if one.mixture is not None:
        _check_mixture(one.mixture, of, hidden)
    if one.own is not None:
        of.linear(one.own.gate, n_own, hidden)
        of.linear(one.own.out, hidden, n_own)
        of.norm(one.own.norm, hidden)
    if one.result is not None:
        of.vector(one.result, 1)


def _check_latent(one: LayerPlan, latent: LatentPlan, of: _Shapes, hidden: int) -> None:
    shape = latent.shape
    n_heads = shape.n_kv_heads
    n_queries = latent.q_size or n_heads * latent.key_dim
    of.linear(one.qkv, latent.n_in, hidden, (n_queries, latent.n_in))
    of.linear(one.o, hidden, n_heads * shape.v_dim)
    if latent.q is not None:
        of.linear(latent.q, n_heads * latent.key_dim, latent.q_size)
    of.norm(latent.q_norm, latent.q_size)
    of.norm(latent.norm, shape.latent_dim)
    expand = LinearPlan((latent.expand,), (None,))
    of.linear(expand, n_heads * (shape.plain_dim + shape.v_dim), shape.latent_dim)


def _check_recurrent(recurrent: RecurrentPlan, of: _Shapes) -> None:
    n_channels, width = recurrent.conv_shape
    of.convolution(recurrent.conv, n_channels, width)
    n_heads = recurrent.heads[0]
    sizes = (n_channels, n_heads, n_heads, n_heads, recurrent.n_normed)
    one = recurrent
    names = (one.conv_bias, one.rates, one.shifts, one.skips, one.norm)
    for name, size in zip(names, sizes, strict=True):
        if name is not None:
            of.vector(name, size)


def _check_mixture(mixture: MixturePlan, of: _Shapes, hidden: int) -> None:
    (n_experts,) = of.linear(mixture.router, None, hidden)
    if mixture.n_chosen > n_experts:
        raise of.wrong(mixture.router.weights[0], f"a row for each of {mixture.n_chosen} experts")
    n_groups, n_kept, n_best = mixture.groups
    in_each = n_experts // n_groups
    if n_experts % n_groups or in_each < n_best or in_each * n_kept < mixture.n_chosen:
        raise of.wrong(mixture.router.weights[0], f"rows in {n_groups} groups of enough experts")
    if mixture.correction is not None:
        of.vector(mixture.correction, n_experts)
    if mixture.factors is not None:
        of.vector(mixture.factors, n_experts)
    for norm in () if mixture.apart is None else mixture.apart.norms:
        of.norm(norm, hidden)
    if mixture.share is not None:
        (weight,) = mixture.share.weights
        of.vector(weight, hidden)


class _Shapes:
    """Compares shapes of tensors by their names.

    Each method raises ``ModelError`` where a tensor has another shape, or is not there.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def linear(
        self, plan: LinearPlan, n_out: int | None, n_in: int, ends: Sequence[int] = ()
    ) -> Sequence[int]:
        """Return the outputs of each matrix.

        Args:
            plan: of the matrices.
            n_out: outputs of all together; None: that is not known.
            n_in: their inputs.
            ends: outputs behind which the next matrix may begin; none: behind any.
        """
        found = []
        for name, bias in zip(plan.weights, plan.biases, strict=True):
            shape = self._tensors.shape(name)[1]
            if len(shape) != 2 or shape[1] != n_in:
                raise self.wrong(name, f"rows of {n_in} numbers")
            if bias is not None:
                self.vector(bias, shape[0])
            found.append(shape[0])
        if n_out is not None and sum(found) != n_out:
            raise self.wrong(" and ".join(plan.weights), f"{n_out} rows")
        if ends and not {*itertools.accumulate(found)} <= {*ends}:
            said = ", ".join(map(str, sorted({*ends})))
            raise self.wrong(
                " and ".join(plan.weights), f"matrices that end at some of {said} rows"
            )
        return found

    def vector(self, name: str, n: int) -> None:
        """Compare a tensor that has one axis, or others of length 1."""
        shape = self._tensors.shape(name)[1]
        if math.prod(shape) != n or n not in shape[-1:]:
            raise self.wrong(name, f"{n} numbers")

    def convolution(self, name: str, n_channels: int, width: int) -> None:
        """Compare the weight of a convolution, which may have an axis of length 1 between."""
        shape = self._tensors.shape(name)[1]
        if shape not in ((n_channels, 1, width), (n_channels, width)):
            raise self.wrong(name, f"{n_channels} channels of {width} numbers")

    def norm(self, plan: NormPlan | None, n: int) -> None:
        """Compare the weight of a norm, where there is one."""
        if plan is not None:
            self.vector(plan.weight, n)

    def wrong(self, name: str, wanted: str) -> ModelError:
        """Return the error of a tensor that does not fit; ``wanted`` is what would."""
        shapes = [list(self._tensors.shape(one)[1]) for one in name.split(" and ")]
        said = " and ".join(map(str, shapes))
        return ModelError(
            f"{name} is {said}, and the model's config asks for {wanted}; they are of different "
            f"models, or damaged: copy the checkpoint again"
        )
