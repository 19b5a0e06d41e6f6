"""Heads that are rotated by the product that makes them are those that are rotated after it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.backends.torch.cpu.modules.rotations import Rotation  # noqa: E402
from kvcellar.backends.torch.gpu.weights import layers, linears, multiply, products  # noqa: E402
from kvcellar.backends.torch.gpu.weights.matrices import floats  # noqa: E402
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402

HEADS = (3, 1, 16)
CASES = [
    (1, "doubled", False, True, torch.float32),
    (1, "once", True, False, torch.float16),
    (3, "repeated", True, True, torch.float16),
    (4, "doubled", False, False, torch.float16),
]


@pytest.mark.parametrize(("n_rows", "layout", "is_paired", "has_bias", "dtype"), CASES)
def test_heads_are_those_that_are_turned_after_the_product(
    n_rows: int, layout: str, is_paired: bool, has_bias: bool, dtype: Any, monkeypatch: Any
) -> None:
    hasten()
    monkeypatch.setattr(multiply, "OUTPUTS_AT_ONCE", 8)
    here, generator = device(), torch.Generator().manual_seed(n_rows)
    n_q, n_k, dim = HEADS
    n_out = (n_q + 2 * n_k) * dim

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype).to(here)

    linear = linears.CardLinear(
        [floats(random(n_out, 40), here)], random(n_out) if has_bias else None
    )
    norm = linears.CardNorm(random(40), 1e-5)
    x = random(1, n_rows, 40)
    sides = random(1, n_rows, dim), random(1, n_rows, dim)
    rotation = Rotation(dim, is_paired, layout, True, False)
    wanted = linear(x, norm=norm)
    layers.turn(wanted, rotation, sides, None, HEADS)
    turn = multiply.HeadTurn(
        sides[0][0], sides[1][0], n_q + n_k, dim, is_paired, 2 if layout == "repeated" else 1
    )
    after = pytest.fail  # it is in the product
    found = linear.turned(x, norm, turn, after)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert linear.turned(random(1, multiply.FEW + 1, 40), norm, turn, after) is None


def test_a_layer_of_few_tokens_has_no_launch_of_its_own_for_its_rotation(monkeypatch: Any) -> None:
    calls: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **named: calls.append(self.name)

    monkeypatch.setattr(products, "multiply_few", Counted("product"))
    monkeypatch.setattr(layers.between, "turn_heads", Counted("turn"))
    n_q, n_k, dim = HEADS
    linear = linears.CardLinear([floats(torch.zeros((n_q + 2 * n_k) * dim, 32), device())], None)
    attention = layers.CardAttention.__new__(layers.CardAttention)
    torch.nn.Module.__init__(attention)
    attention.qkv_proj, attention.q_norm, attention.k_norm = linear, None, None
    attention.n_heads, attention.n_kv_heads, attention.head_dim = HEADS
    attention.rotation = Rotation(dim, False, "doubled", True, False)
    monkeypatch.setattr(layers.CardAttention, "attend", lambda self, joined, kwargs: joined)
    sides = torch.zeros(1, 1, dim), torch.zeros(1, 1, dim)
    attention.attended(torch.zeros(1, 1, 32), sides, {})
    assert calls == ["product"]
    calls.clear()
    attention.rotation = Rotation(dim // 2, False, "doubled", False, False)
    attention.attended(torch.zeros(1, 1, 32), sides, {})
    assert calls == ["product", "turn"]
