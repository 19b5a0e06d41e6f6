"""Recurrent modules of a plan: what goes through states between two linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.states import StateShape

CONVOLUTION, DELTA, SCAN = "convolution", "delta", "scan"

MOST_WIDTH, MOST_INNER = 8, 512
"""Tokens of a convolution, and numbers of a key, at most: what the kernel has."""


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """A short convolution, and a recurrence with a gated norm behind it where there is one.

    Attributes:
        kind: ``convolution`` alone; ``delta``, the gated delta rule; ``scan``, that of Mamba 2.
        at: where in the outputs of the linear layers before are: what is convolved; of
            ``convolution`` factors on its inputs and on its results; of others the gate, and what
            decays and betas are made of, or steps.
        by_key_heads: true if these outputs lie by key heads in tensors, and ``at`` is where they
            are once all q come first, then all k, v, gates, betas and what decays are made of.
        heads: sizes: of ``delta`` value heads, key heads, and numbers of a key and of a value; of
            ``scan`` heads, groups, and numbers of a head and of its state.
        conv: tensor of the convolution's weight, ``[channels, 1, width]``.
        conv_bias: tensor of its bias; None: there is none.
        conv_shape: channels and width.
        has_silu: true if results of the convolution go through SiLU.
        rates: tensor of the logarithms of decays, one for each head; None: there are none, as
            with all that a convolution alone has not.
        shifts: tensor of what is added to what decays or steps are made of.
        skips: tensor by which inputs are added to results.
        beta_scale: factor on betas.
        norm: tensor of the norm's weight; None: there is a gate alone.
        eps: of the norm.
        group: numbers that are normed together.
        gating: true if the gate comes first, if it is a sigmoid, and if the norm rounds between.
    """

    kind: str
    at: tuple[int, ...]
    conv: str
    conv_shape: tuple[int, int]
    conv_bias: str | None = None
    has_silu: bool = False
    by_key_heads: bool = False
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)
    rates: str | None = None
    shifts: str | None = None
    skips: str | None = None
    beta_scale: float = 1.0
    norm: str | None = None
    eps: float = 0.0
    group: int = 1
    gating: tuple[bool, bool, bool] = (False, False, False)

    def check(self) -> None:
        """Make sure that its sizes are such as the kernel has, and fit each other.

        Raises:
            ValueError: they are not.
        """
        heads = () if self.kind == CONVOLUTION else self.heads
        if not all(type(one) is int and one > 0 for one in (*self.conv_shape, *heads)):
            raise ValueError("sizes of a recurrent module are whole and positive")
        n_keys = self.heads[2 if self.kind == DELTA else 3]
        if self.conv_shape[1] > MOST_WIDTH or n_keys > MOST_INNER:
            raise ValueError("a recurrent module has sizes that no kernel has")
        if heads and heads[0] % heads[1]:
            raise ValueError("heads of a recurrent module are not divided evenly")
        n_channels, inner = self.conv_shape[0], self.inner
        n_heads, n_groups, third, fourth = self.heads
        wanted = inner
        widths: tuple[int, ...] = (inner, inner, inner)
        if self.kind == DELTA:
            wanted = inner + 2 * n_groups * third
            widths = (n_channels, inner, n_heads, n_heads)
        elif self.kind == SCAN:
            wanted, widths = inner + 2 * n_groups * fourth, (n_channels, inner, n_heads)
        ends = [at + width for at, width in zip(self.at, widths, strict=True)]
        if wanted != n_channels or min(self.at) < 0 or max(ends) > self.n_in:
            raise ValueError("a recurrent module reads what its linear layers do not say")
        if self.norm is not None and (self.group <= 0 or inner % self.group):
            raise ValueError("a norm of a recurrent module does not divide its numbers")

    @property
    def inner(self) -> int:
        """Numbers of a token that the linear layer behind takes."""
        if self.kind == CONVOLUTION:
            return self.conv_shape[0]
        return self.heads[0] * self.heads[3 if self.kind == DELTA else 2]

    @property
    def n_in(self) -> int:
        """Numbers of a token that the linear layers before say."""
        if self.kind == CONVOLUTION:
            return 3 * self.inner
        return self.conv_shape[0] + self.inner + self.heads[0] * (2 if self.kind == DELTA else 1)

    @property
    def ends(self) -> tuple[int, ...]:
        """Numbers, of those that the linear layers before say, behind which one may end."""
        inner, (n_heads, n_groups, third, fourth) = self.inner, self.heads
        n_channels = self.conv_shape[0]
        inside: tuple[int, ...] = (n_channels,)
        widths: tuple[int, ...] = (inner, inner)
        if self.kind == DELTA:
            inside = (n_groups * third, 2 * n_groups * third, n_channels)
            widths = (inner, n_heads, n_heads)
        elif self.kind == SCAN:
            inside = (inner, inner + n_groups * fourth, n_channels)
            widths = (inner, n_heads)
        first, *others = self.at
        ends = {first, *(first + end for end in inside)}
        ends |= {at + n for at, width in zip(others, widths, strict=True) for n in (0, width)}
        return tuple(sorted(ends - {0}))

    @property
    def n_normed(self) -> int:
        """Numbers of the norm's weight: of each head, or of all."""
        return self.group if self.kind == DELTA else self.inner

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        """Shapes of its states."""
        convolution = StateShape("convolution", self.conv_shape)
        if self.kind == CONVOLUTION:
            return (convolution,)
        n_heads, _, third, fourth = self.heads
        return convolution, StateShape("recurrent", (n_heads, third, fourth))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of its tensors."""
        found = (self.conv, self.conv_bias, self.rates, self.shifts, self.skips, self.norm)
        return tuple(one for one in found if one is not None)


def recurrent_plan(value: Mapping[str, Any]) -> RecurrentPlan:
    """Make a plan of a JSON object.

    Raises:
        TypeError, ValueError: it is none.
    """
    made = dict(value)
    for name in ("at", "heads", "conv_shape"):
        made[name] = tuple(map(int, value[name]))
    gates_first, is_sigmoid, rounds = map(bool, value["gating"])
    made |= {name: float(value[name]) for name in ("beta_scale", "eps")}
    plan = RecurrentPlan(**made | {"gating": (gates_first, is_sigmoid, rounds)})
    n_places = {CONVOLUTION: 3, DELTA: 4, SCAN: 3}
    if len(plan.at) != n_places.get(plan.kind) or len(plan.heads) != 4:
        raise TypeError("a recurrent module of a kind that no rule here knows")
    plan.check()
    return plan
