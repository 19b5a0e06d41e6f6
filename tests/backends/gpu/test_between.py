"""Norms, rotations of heads and gates in Triton, interpreted, against torch's own operations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.backends.torch.cpu.modules.rotations import Rotation  # noqa: E402
from kvcellar.backends.torch.gpu.weights.layers import turn  # noqa: E402
from kvcellar.backends.torch.gpu.weights.linears import CardNorm, gate  # noqa: E402
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    hasten()
    with device(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away
        yield


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dim", [16, 40])
def test_rows_are_divided_by_the_root_of_their_mean_square(dim: int) -> None:
    norm = CardNorm(torch.randn(dim), 1e-3)
    for x in (torch.randn(1, 3, dim), torch.randn(1, 3, 5, 2 * dim)[:, :, 1:4, :dim]):
        torch.testing.assert_close(norm(x), normed(x, norm.weight, 1e-3))
    x = torch.randn(1, 2, dim)
    assert CardNorm(norm.weight.bfloat16(), 1e-3)(x).dtype == torch.bfloat16


ROTATIONS = [
    Rotation(n_turned, is_paired, layout, False, True)
    for n_turned in (16, 12, 6)
    for is_paired in (False, True)
    for layout in ("doubled", "repeated", "once")
]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_turn_as_the_model_s_own_do(rotation: Rotation, has_norms: bool) -> None:
    n_tokens, n_q, n_k, dim = 3, 4, 2, 16
    joined = torch.randn(1, n_tokens, (n_q + 2 * n_k) * dim)
    width = rotation.n_turned // (1 + (rotation.layout == "once"))
    sides = torch.randn(1, n_tokens, width), torch.randn(1, n_tokens, width)
    norms = (CardNorm(torch.randn(dim), 0.1), CardNorm(torch.randn(dim), 0.2))
    want = joined.clone().view(1, n_tokens, -1, dim)
    if has_norms:
        for part, norm in ((slice(0, n_q), norms[0]), (slice(n_q, n_q + n_k), norms[1])):
            want[:, :, part] = normed(want[:, :, part], norm.weight, norm.eps)
    rotation.apply(want[:, :, : n_q + n_k], sides)
    turn(joined, rotation, sides, norms if has_norms else None, (n_q, n_k, dim))
    torch.testing.assert_close(joined, want.view(joined.shape))


def test_a_gate_is_the_silu_of_one_half_times_the_other() -> None:
    both = torch.randn(3, 2 * 40)
    want = torch.nn.functional.silu(both[:, :40]) * both[:, 40:]
    torch.testing.assert_close(gate(both), want)
