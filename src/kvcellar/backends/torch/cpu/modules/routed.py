"""Blocks of a mixture whose tokens choose as the kernel can, so that a block is one call.

What a block's router computes shows in what its experts are asked for: scores are the softmax or
the sigmoid of logits, the highest are chosen, and their shares may be divided by their sum. A block
that does more (shared experts, groups of experts) is run as it is, with its experts alone held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.backends.torch.cache.kernel import address_of, dtype_of
from kvcellar.backends.torch.cpu.modules.experts import KernelExperts
from kvcellar.backends.torch.cpu.modules.mixtures import HELD, mixtures
from kvcellar.kernel import experts as native
from kvcellar.kernel import linear

TOKENS = 64
"""Tokens by whose choices a router is known."""

_SAME = 0.9
"""Share of them that have to choose the same: between equal scores rounding decides."""


class KernelMixture(nn.Module):
    """A mixture's block in a decoder layer; its result is a tensor alone."""

    def __init__(self, own: nn.Module) -> None:
        """Keep a block, which runs as it is where the kernel does not run all of it."""
        super().__init__()
        self.own = own
        self.native: native.Mixture | None = None
        """The block as one call, for tokens in bfloat16; None where it is more than that."""
        self._beside: list[Tensor] = []

    def take_addresses(self) -> None:
        """Find what the block's router computes, and tell the kernel where its weights lie."""
        inside = list(mixtures(self.own))
        held = inside[0]._modules.get(HELD) if len(inside) == 1 else None
        if not isinstance(held, KernelExperts) or held.native is None:
            return
        found = find_router(self.own, inside[0])
        if found is not None:
            router, self._beside = found
            self.native = native.Mixture(router, held.native)

    def forward(self, x: Tensor) -> Tensor:
        """Run ``[1, T, hidden] -> [1, T, hidden]``."""
        found = self.own(x)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out


class RecordingExperts:
    """Experts that keep what they are asked for, and answer with random rows."""

    n_calls = 0

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Keep tokens, what they chose and their shares."""
        self.n_calls += 1
        self.x, self.chosen, self.shares = x, chosen, shares
        self.answer = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
        return self.answer


def find_router(block: Any, experts: Any) -> tuple[native.Router, list[Tensor]] | None:
    """Find the kernel's router that chooses as a block does, whose result is its experts' alone.

    Args:
        block: of a model in bfloat16; it is run on a few tokens.
        experts: the module of experts in it, which is not run.

    Returns:
        The router, and what has to stay for it; None where the kernel has none.
    """
    inside = {id(parameter) for parameter in experts.parameters()}
    others = [p for p in block.parameters() if p.dim() == 2 and id(p) not in inside]
    weights = [p for p in others if p.shape[0] == experts.num_experts]
    if len(weights) != 1 or weights[0].dtype != torch.bfloat16:
        return None
    asked = RecordingExperts()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn((1, TOKENS, weights[0].shape[1]), generator=generator).bfloat16()
    vars(experts)["forward"] = asked
    try:
        with torch.inference_mode():
            found = block(x)
    except Exception:  # it is called otherwise than with tokens alone
        return None
    finally:
        del vars(experts)["forward"]
    found = found[0] if isinstance(found, tuple) else found
    if not torch.equal(found.flatten(), asked.answer.flatten()) or not torch.equal(asked.x, x[0]):
        return None
    candidates = _routers(block, weights[0], asked)
    return next((one for one in candidates if _agrees(one[0], asked)), None)


def _routers(
    block: Any, weight: nn.Parameter, asked: RecordingExperts
) -> Iterator[tuple[native.Router, list[Tensor]]]:
    """Yield routers that a block may have, and what they read besides its weights."""
    n_experts, hidden = weight.shape
    own = (*block.named_parameters(), *block.named_buffers())
    numbers = [one for name, one in own if one.shape == (n_experts,) and HELD not in name]
    if len(numbers) > 1:
        return
    types = weight.dtype, torch.float32
    beside = [one.detach().to(dtype) for one in numbers for dtype in types]
    form = linear.WeightFormat.bf16
    weights = linear.LinearWeights(form, hidden, n_experts, address_of(weight))
    is_rounded, n_chosen = asked.shares.dtype == torch.bfloat16, asked.chosen.shape[1]
    for place, is_sigmoid, is_normalised, rounds in itertools.product(
        range(max(1, len(beside))), (False, True), (True, False), (is_rounded, not is_rounded)
    ):
        made: dict[str, Any] = {"is_sigmoid": is_sigmoid, "is_normalised": is_normalised}
        made |= {"rounds_logits": rounds, "rounds_shares": is_rounded}
        made |= {
            name: address_of(beside[place]) if beside and at == place else 0
            for at, name in enumerate(("bias", "extra"))
        }
        shares = _choose(native.Router(weights, n_chosen, scale=1.0, **made), asked)[1]
        scale = float(asked.shares.float().mean() / shares.mean())
        near = round(scale, 3)
        scale = near if abs(near - scale) < 5e-3 * scale else scale
        yield native.Router(weights, n_chosen, scale=scale, **made), beside


def _choose(router: native.Router, asked: RecordingExperts) -> tuple[Tensor, Tensor]:
    """Return what a router chooses for the same tokens, in the order of experts."""
    x, shape = asked.x.contiguous(), asked.chosen.shape
    chosen, shares = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    to = address_of(chosen), address_of(shares)
    router.choose(address_of(x), x.shape[0], dtype_of(x.dtype), *to)
    return _sorted(chosen, shares)


def _sorted(chosen: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    chosen, order = chosen.sort(-1)
    return chosen, shares.float().gather(-1, order)


def _agrees(router: native.Router, asked: RecordingExperts) -> bool:
    """Return true if nearly all tokens choose the same, and with the same shares."""
    want, found = _sorted(asked.chosen, asked.shares), _choose(router, asked)
    is_same = (want[0] == found[0]).all(-1)
    if float(is_same.float().mean()) < _SAME:
        return False
    shares = want[1][is_same], found[1][is_same]
    return bool(torch.allclose(*shares, rtol=0.03, atol=1e-4))
